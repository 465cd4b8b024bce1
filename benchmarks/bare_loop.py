"""The floor of any client: post ready-made bodies, parse the answers, nothing else.

    python benchmarks/bare_loop.py URL BODIES.jsonl --in-flight 64

Prints the CPU seconds and the seconds that the loop itself took, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import aiohttp
import orjson
import uvloop


async def main() -> None:
    """Post every body once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("bodies", type=Path)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    bodies = options.bodies.read_bytes().splitlines()
    left = iter(bodies)
    ids = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal ids
        for body in left:
            async with session.post(options.url + "/generate", data=body) as response:
                ids += len(orjson.loads(await response.read())["output_ids"])

    cpu, began = time.process_time(), time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        await asyncio.gather(*(work(session) for _ in range(options.in_flight)))
    print(
        json.dumps(
            {
                "rows": len(bodies),
                "cpu_s": time.process_time() - cpu,
                "seconds": time.perf_counter() - began,
                "ids": ids,
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main())
