"""A server of SGLang's /generate that answers at once, for measuring clients.

It speaks just enough HTTP/1.1 over asyncio's protocol to stay out of the client's way. Each
answer has 512 output ids that end in a stop id, their text, the echo of the prompt ids and the
counts, as SGLang 0.5.23 sends them. Prints its port, and the time (seconds since the epoch) at
which the first prompt came; ends when standard input closes.

    python benchmarks/server.py TOKENIZER_DIR [--output-tokens 512]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import cast

import orjson
import uvloop

from eyas.tokens import ChatTemplate, Tokenizer, build_profile, load_tokenizer

VARIANTS = 64


def answers(tokenizer: Tokenizer, length: int) -> list[tuple[bytes, bytes]]:
    """Bodies of honest answers, split where the prompt's echo and count go in."""
    profile = build_profile(tokenizer, ChatTemplate.of(tokenizer))
    stop = min(profile.declared_stop_ids)
    closer = list(profile.closer.ids) if profile.closer else []
    control = set(tokenizer.control.values())
    plain = [
        i
        for i in range(tokenizer.size)
        if i not in control
        and tokenizer.join([i]).decode("utf-8", "ignore").isprintable()
        and "\ufffd" not in tokenizer.decode([i])
    ]  # whole characters only, as a model writes them
    chosen = random.Random(0)
    bodies = []
    for _ in range(VARIANTS):
        body = chosen.choices(plain, k=length - 1 - len(closer))
        ids = [*body[: length // 2], *closer, *body[length // 2 :], stop]
        answer = orjson.dumps(
            {
                "text": tokenizer.decode(ids[:-1]),
                "output_ids": ids,
                "meta_info": {
                    "id": "0" * 32,
                    "finish_reason": {"type": "stop", "matched": stop},
                    "weight_version": "default",
                    "num_retractions": 0,
                    "completion_tokens": length,
                    "cached_tokens": 0,
                    "e2e_latency": 0.0,
                },
            }
        )
        bodies.append((answer[:-2], b"}}"))
    return bodies


class Generate(asyncio.Protocol):
    """Answers each POST; every GET is a 404 but /model_info."""

    bodies: list[tuple[bytes, bytes]]
    asked = False

    def __init__(self) -> None:
        self._buffer = b""
        self._count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /model_info"):
            content, status = b'{"model_path":"bench","weight_version":"default"}', b"200 OK"
        elif head.startswith(b"GET"):
            content, status = b"{}", b"404 Not Found"
        else:
            if not Generate.asked:
                Generate.asked = True
                print(time.time(), flush=True)
            start = body.index(b'"input_ids":[') + len(b'"input_ids":')
            echo = body[start : body.index(b"]", start) + 1]
            self._count += 1
            before, after = self.bodies[hash(echo) % VARIANTS]
            count = echo.count(b",") + 1
            content = b'%b,"prompt_tokens":%d},"prompt_token_ids":%b%b' % (
                before, count, echo, after[1:],
            )  # fmt: skip
            status = b"200 OK"
        self._transport.write(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(content), content)
        )


async def main() -> None:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("--output-tokens", type=int, default=512)
    options = parser.parse_args()
    Generate.bodies = answers(load_tokenizer(options.tokenizer), options.output_tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Generate, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(main())
