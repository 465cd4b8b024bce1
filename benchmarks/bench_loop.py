"""How long the loop is held up: by a capture, and by a loop that only posts and parses.

    python benchmarks/bench_loop.py [--tokenizer DIR]

A clock on the loop asks to be woken every 5 ms and notes how late it was. Both clients have 64
requests in flight at one server that answers at once (`server.py`), so each loop is as busy as
it ever gets; with real servers it mostly waits. Once with answers of 512 ids, once of 32,768,
whose text and ids are checked in one piece. Late by much means that something ran on the loop
that belongs on a thread: rendering, tokenizing, writing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import orjson
import uvloop

from bench_capture import make_prompts
from eyas import CaptureConfig, capture
from eyas.demo.server import TARGET
from eyas.tokens import ChatTemplate, load_tokenizer

HERE = Path(__file__).parent
EVERY_S = 0.005
IN_FLIGHT = 64
CASES = {512: 6000, 32768: 300}
"""Ids of an answer: rows."""


class Clock:
    """Notes how late the loop wakes it."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def start(self) -> None:
        """Begin, on the running loop; it ends with the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(EVERY_S)
            self.late.append(time.perf_counter() - asked - EVERY_S)

    def told(self, who: str, length: int) -> str:
        late = sorted(self.late)
        p50, p99, worst = (1000 * late[int(q * (len(late) - 1))] for q in (0.5, 0.99, 1.0))
        return f"{length:6} {who:6} {len(late):7} {p50:9.1f} {p99:9.1f} {worst:9.1f}"


async def bare(url: str, bodies: list[bytes], clock: Clock) -> None:
    """Post every body and parse its answer."""
    left = iter(bodies)

    async def work(session: aiohttp.ClientSession) -> None:
        for body in left:
            async with session.post(url + "/generate", data=body) as response:
                orjson.loads(await response.read())

    clock.start()
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        await asyncio.gather(*(work(session) for _ in range(IN_FLIGHT)))


def with_room(directory: str, folder: Path) -> str:
    """The tokenizer's files, with a context that holds the longest answers."""
    there = folder / "tokenizer"
    shutil.copytree(directory, there, ignore=shutil.ignore_patterns("*.gguf", "*.safetensors"))
    config = there / "config.json"
    told = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**told, "max_position_embeddings": 2**20}))
    return str(there)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", default=str(TARGET))
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    template = ChatTemplate.of(tokenizer)
    print(f"{'ids':>6} {'client':6} {'ticks':>7} {'p50 ms':>9} {'p99 ms':>9} {'worst ms':>9}")
    for length, rows in CASES.items():
        prompts = make_prompts(tokenizer, rows)
        rendered = [template.render([{"role": "user", "content": p["prompt"]}]) for p in prompts]
        bodies = [
            orjson.dumps({"input_ids": tokenizer.encode(text), "rid": "0" * 32})
            for text in rendered
        ]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
            server = subprocess.Popen(
                [sys.executable, str(HERE / "server.py"), options.tokenizer,
                 "--output-tokens", str(length)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert server.stdout is not None
            assert server.stdin is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            floor, ours = Clock(), Clock()
            uvloop.run(bare(url, bodies, floor))
            config = CaptureConfig.model_validate({
                "prompts": [str(folder / "p.jsonl")], "out": str(folder / "run"), "url": url,
                "tokenizer": with_room(options.tokenizer, folder), "max_new_tokens": length, "temperature": 1.0,
                "concurrency": IN_FLIGHT,
            })  # fmt: skip
            summary = capture(config, probe=False, on_start=lambda _, clock=ours: clock.start())
            assert summary.done == rows, summary
            server.stdin.close()
            server.wait()
        print(floor.told("bare", length))
        print(ours.told("eyas", length), flush=True)


if __name__ == "__main__":
    main()
