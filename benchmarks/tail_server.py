"""Servers of SGLang's /generate with a number of slots, whose answers take as long as they are.

Each holds requests beyond its slots in a queue, first come first served, says so on /v1/loads
and tells its slots on /server_info. How long an answer is depends on its prompt alone (the
row's number stands in its text), so that the least possible makespan is known.

    python benchmarks/tail_server.py TOKENIZER_DIR LENGTHS.json --slots 64 --paces 1,10 \
        --events '1 stop 0, 1 start 7.5'

Prints the servers' ports. An event stops or starts a server so many seconds after the first
request came (at 0: before). Ends when its input does, and then prints when the first request
came, in seconds since the epoch.
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

    def __init__(
        self, tokenizer: Tokenizer, seconds: list[float], slots: int, pace: float, fleet: Fleet
    ) -> None:
        self.tokenizer, self.seconds, self.slots, self.pace = tokenizer, seconds, slots, pace
        self.fleet = fleet
        self.places = asyncio.Semaphore(slots)
        self.running = self.waiting = 0
        self.plain = tokenizer.encode("the answer of this row is")
        self.closer, self.stop = tokenizer.control["</think>"], tokenizer.control["<|end|>"]
        self.runner: web.AppRunner | None = None
        self.port = 0

    async def generate(self, request: web.Request) -> web.Response:
        self.fleet.first_request()
        body = await request.json()
        prompt = body["input_ids"]
        found = NUMBER.search(self.tokenizer.decode(prompt))
        seconds = self.seconds[int(found[1])] if found else 0.01
        self.waiting += 1
        try:
            await self.places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            await asyncio.sleep(seconds * self.pace)
        finally:
            self.running -= 1
            self.places.release()
        count = max(1, round(seconds * TOKENS_A_SECOND) - 3)  # three more end an answer
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

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/v1/loads", self.loads)
        for page in ("/model_info", "/server_info"):
            app.router.add_get(page, self.info)
        self.runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def end(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()


class Fleet:
    """All servers, and what happens to them."""

    def __init__(self, events: list[tuple[int, str, float]]) -> None:
        self.events = events
        self.servers: list[Simulated] = []
        self.began: float | None = None
        self.changing: set[asyncio.Task[None]] = set()

    def first_request(self) -> None:
        if self.began is not None:
            return
        self.began = time.time()
        for event in self.events:
            task = asyncio.create_task(self.change(*event))
            self.changing.add(task)

    async def change(self, number: int, what: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        server = self.servers[number]
        await (server.end() if what == "stop" else server.start())


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("lengths")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--paces", default="1,1")
    parser.add_argument("--events", default="")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    seconds = json.loads(Path(arguments.lengths).read_text(encoding="utf-8"))
    told = [event.split() for event in arguments.events.split(",") if event.strip()]
    events = [(int(number), what, float(after)) for number, what, after in told]
    fleet = Fleet([event for event in events if event[2] > 0])
    fleet.servers = [
        Simulated(tokenizer, seconds, arguments.slots, float(pace), fleet)
        for pace in arguments.paces.split(",")
    ]
    for server in fleet.servers:
        await server.start()
    for number, what, after in events:
        if after == 0:
            await fleet.change(number, what, 0.0)
    print(" ".join(str(server.port) for server in fleet.servers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(fleet.began, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
