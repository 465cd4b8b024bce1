"""How long a capture takes where answers differ in length, against the best that was possible.

    python benchmarks/bench_tail.py [--case equal] [--order input|known] [--rows-a-slot N]

Servers with 64 slots each, log-normal answer lengths (half of them below 0.6 s, one in a hundred
at 6 s, where they end; with eight servers four times as long, so that no more rows a second are
answered and the client's own work does not count). Makespans are from the first request that a
server got to the last answer, as the rows tell (`finished_at`); what it took to get there, and
from the last answer until the capture had returned (all rows durable and sealed) stands beside.

- ``/schedule``: against the work-conserving client that sends rows in input order to the first
  free slot, knowing nothing of the lengths (where a server goes, its rows are begun anew).
- ``/least``: against what no client can beat: the work there is over the speed there is, and the
  longest row.

Cases: one, equal (two servers), eight, slow (two servers, one of them ten times slower), joins
(the second server comes after a quarter of the work), dies (the second goes and comes back).
``known`` captures once from servers that answer at once, and gives that run to ``--order``.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from eyas import CaptureConfig, Run, Summary, capture
from eyas.demo.server import TARGET

HERE = Path(__file__).parent


class Case(NamedTuple):
    """Servers, and what happens to the second of them."""

    paces: list[float]
    rows: int
    """For each slot."""
    scale: float = 1.0
    """How much longer answers take."""
    events: tuple[tuple[str, float], ...] = ()
    """(stop or start, at which share of the time that all servers together would need)."""


CASES = {
    "one": Case([1.0], 32),
    "equal": Case([1.0, 1.0], 32),
    "eight": Case([1.0] * 8, 16, 4.0),
    "slow": Case([1.0, 10.0], 64),
    "joins": Case([1.0, 1.0], 64, 1.0, (("stop", 0.0), ("start", 0.5))),
    "dies": Case([1.0, 1.0], 64, 1.0, (("stop", 0.25), ("start", 0.75))),
}


def lengths(rows: int, scale: float, seed: int = 7) -> list[float]:
    """Seconds of each answer at pace 1."""
    chosen = random.Random(seed)
    return [scale * min(6.0, 0.6 * chosen.lognormvariate(0.0, 1.0)) for _ in range(rows)]


def schedule(
    seconds: list[float], paces: list[float], slots: int, events: list[tuple[str, float]]
) -> float:
    """The makespan of input order, each row to the slot that is free first; `events` are those
    of the second server, whose rows are begun anew elsewhere when it stops."""
    left = list(enumerate(seconds))[::-1]
    free = [slots] * len(paces)
    up = [True] * len(paces)
    running: dict[int, set[int]] = {n: set() for n in range(len(paces))}
    queue: list[tuple[float, int, str, int]] = [(at, -1, what, -1) for what, at in events]
    heapq.heapify(queue)
    now = end = 0.0
    while True:
        while left and (n := next((n for n in range(len(paces)) if up[n] and free[n]), None)) \
                is not None:  # fmt: skip
            row, length = left.pop()
            free[n] -= 1
            running[n].add(row)
            heapq.heappush(queue, (now + length * paces[n], n, "end", row))
        if not queue:
            return end
        now, n, what, row = heapq.heappop(queue)
        if what == "end":
            if row in running[n]:
                running[n].discard(row)
                free[n] += 1
                end = now
        else:
            up[1] = what == "start"
            left += [(row, seconds[row]) for row in running[1]]
            running[1].clear()
            free[1] = slots


def least(
    seconds: list[float], paces: list[float], slots: int, events: list[tuple[str, float]]
) -> float:
    """No schedule is shorter: the work over the speed there is, and the longest row."""
    away, since = 0.0, None
    for what, at in events:
        if what == "stop":
            since = at
        elif since is not None:
            away, since = away + at - since, None
    speeds = [slots / pace for pace in paces]
    work = sum(seconds) + (away * speeds[1] if events else 0.0)
    return max(work / sum(speeds), max(seconds) * min(paces))


class Measured(NamedTuple):
    """One capture."""

    summary: Summary
    start_s: float
    """From knowing server and run to the first request."""
    makespan_s: float
    end_s: float
    """From the last answer to the capture's end."""


def measure(
    seconds: list[float], paces: list[float], slots: int, events: str, folder: Path, **more: Any
) -> Measured:
    """Capture all rows from simulated servers."""
    out = Path(more.pop("out"))
    lengths_file, prompts = folder / "lengths.json", folder / "prompts.jsonl"
    lengths_file.write_text(json.dumps(seconds), encoding="utf-8")
    prompts.write_text(
        "".join(
            json.dumps({"id": str(n), "prompt": f"row {n}"}) + "\n" for n in range(len(seconds))
        ),
        encoding="utf-8",
    )
    child = subprocess.Popen(
        [sys.executable, str(HERE / "tail_server.py"), str(TARGET), str(lengths_file),
         "--slots", str(slots), "--paces", ",".join(map(str, paces)), "--events", events],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    ports = child.stdout.readline().split()
    config = CaptureConfig.model_validate({
        "prompts": [str(prompts)],
        "out": str(out),
        "url": [f"http://127.0.0.1:{port}" for port in ports],
        "tokenizer": str(TARGET),
        "max_new_tokens": 1500,
        **more,
    })  # fmt: skip
    opened: list[float] = []
    summary = capture(config, probe=False, on_start=lambda _: opened.append(time.time()))
    ended = time.time()
    child.stdin.close()
    began = float(child.stdout.readline())
    child.wait()
    assert summary.done == len(seconds), summary
    last = max(row["finished_at"].timestamp() for row in Run(out).records(columns=["finished_at"]))
    return Measured(summary, began - opened[0], last - began, ended - last)


def run_case(name: str, known: bool, rows: int | None, slots: int, folder: Path) -> None:
    case = CASES[name]
    paces = case.paces
    seconds = lengths((rows or case.rows) * slots * len(paces), case.scale)
    whole = sum(seconds) / slots / sum(1 / pace for pace in paces)
    events = [(what, share * whole) for what, share in case.events]
    more = {}
    if known:
        more["order"] = str(folder / "earlier")
        measure(seconds, [1e-6], slots, "", folder, out=folder / "earlier")
    told = ", ".join(f"1 {what} {at}" for what, at in events)
    found = measure(seconds, paces, slots, told, folder, out=folder / "run", **more)
    plan, bound = schedule(seconds, paces, slots, events), least(seconds, paces, slots, events)
    print(f"{name:6} {'known' if known else 'input':6} {len(paces):7} {len(seconds):6} "
          f"{found.start_s:6.2f}s {found.makespan_s:8.2f}s {found.end_s:5.2f}s "
          f"{found.makespan_s / plan:10.3f} {found.makespan_s / bound:7.3f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows-a-slot", type=int, help="default: 16 to 64, by case")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--order", choices=["input", "known", "both"], default="both")
    arguments = parser.parse_args()
    orders = {"input": [False], "known": [True], "both": [False, True]}[arguments.order]
    print(f"{'case':6} {'order':6} {'servers':>7} {'rows':>6} {'start':>7} {'makespan':>9} "
          f"{'end':>6} {'/schedule':>10} {'/least':>7}")  # fmt: skip
    for case in CASES if arguments.case == "all" else [arguments.case]:
        for known in orders:
            with tempfile.TemporaryDirectory() as folder:
                run_case(case, known, arguments.rows_a_slot, arguments.slots, Path(folder))


if __name__ == "__main__":
    main()
