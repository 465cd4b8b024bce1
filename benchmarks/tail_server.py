"""Servers of SGLang's /generate with a number of slots, whose answers take as long as they are.

Each holds requests beyond its slots in a queue, first come first served, says so on /v1/loads
and tells its slots on /server_info. How long an answer is depends on its prompt alone (the
row's number stands in its text), so that the least possible makespan is known. Reads lines
``PORT_INDEX start|stop`` to let a server join or go; prints its ports; ends with its input.

    python benchmarks/tail_server.py TOKENIZER_DIR LENGTHS.json --slots 64 --paces 1,10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path

from aiohttp import web

from eyas.tokens import Tokenizer, load_tokenizer

NUMBER = re.compile(r"row (\d+)")
TOKENS_A_SECOND = 50.0


class Simulated:
    """One server."""

    def __init__(self, tokenizer: Tokenizer, seconds: list[float], slots: int, pace: float) -> None:
        self.tokenizer, self.seconds, self.slots, self.pace = tokenizer, seconds, slots, pace
        self.places = asyncio.Semaphore(slots)
        self.running = self.waiting = 0
        self.busy_s = 0.0
        self.plain = tokenizer.encode("the answer of this row is")
        self.closer, self.stop = tokenizer.control["</think>"], tokenizer.control["<|end|>"]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["input_ids"]
        found = NUMBER.search(self.tokenizer.decode(prompt))
        seconds = self.seconds[int(found[1])] if found else 0.01
        self.waiting += 1
        async with self.places:
            self.waiting -= 1
            self.running += 1
            began = time.monotonic()
            try:
                await asyncio.sleep(seconds * self.pace)
            finally:
                self.running -= 1
                self.busy_s += time.monotonic() - began
        count = max(1, round(seconds * TOKENS_A_SECOND))
        body_ids = (self.plain * (count // len(self.plain) + 1))[:count]
        ids = [*body_ids, self.closer, self.plain[0], self.stop]
        return web.json_response({
            "output_ids": ids,
            "prompt_token_ids": prompt,
            "meta_info": {
                "id": body.get("rid"),
                "finish_reason": {"type": "stop", "matched": self.stop},
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "weight_version": "default",
            },
        })  # fmt: skip

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({
            "version": "0.5.23", "model_path": "simulated", "weight_version": "default",
            "max_running_requests": self.slots,
        })  # fmt: skip

    async def loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": self.running, "num_waiting_reqs": self.waiting}
        return web.json_response({"loads": [load]})

    async def start(self, port: int = 0) -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/v1/loads", self.loads)
        for page in ("/model_info", "/server_info"):
            app.router.add_get(page, self.info)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        assert site._server is not None
        return runner, site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("lengths")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--paces", default="1,1")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    seconds = json.loads(Path(arguments.lengths).read_text(encoding="utf-8"))
    servers = [
        Simulated(tokenizer, seconds, arguments.slots, float(pace))
        for pace in arguments.paces.split(",")
    ]
    running = {n: await server.start() for n, server in enumerate(servers)}
    ports = {n: port for n, (_, port) in running.items()}
    print(" ".join(str(ports[n]) for n in range(len(servers))), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number, what = line.split()
        n = int(number)
        if what == "stop":
            await running[n][0].cleanup()
        else:
            running[n] = await servers[n].start(ports[n])
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
