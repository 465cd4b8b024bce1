"""How long a capture takes where answers differ in length, against the best that was possible.

    python benchmarks/bench_tail.py [--rows 1500] [--case equal] ...

Servers with 64 slots each, log-normal answer lengths (half of them below 0.6 s here, one in a
hundred at 6 s, where they end). The **schedule** is what a work-conserving client reaches that sends rows in
input order to the first free slot, knowing nothing of the lengths; the **least** possible is
bounded by the work there is and by the longest row. Makespans are from the first request to the
last answer, as the rows tell (``finished_at``), so that starting up is not in them.

Cases: one, equal (two servers), eight, slow (two servers, one of them ten times slower), joins
(the second server comes halfway), dies (the second goes and comes back).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from eyas import CaptureConfig, Run, capture
from eyas.demo.server import TARGET

HERE = Path(__file__).parent
CASES: dict[str, list[float]] = {
    "one": [1.0],
    "equal": [1.0, 1.0],
    "eight": [1.0] * 8,
    "slow": [1.0, 10.0],
    "joins": [1.0, 1.0],
    "dies": [1.0, 1.0],
}


def lengths(rows: int, seed: int = 7) -> list[float]:
    """Seconds of each answer at pace 1."""
    chosen = random.Random(seed)
    return [min(6.0, 0.6 * chosen.lognormvariate(0.0, 1.0)) for _ in range(rows)]


def schedule(seconds: list[float], paces: list[float], slots: int) -> float:
    """The makespan of input order, each row to the slot that is free first."""
    free = [(0.0, pace) for pace in paces for _ in range(slots)]
    heapq.heapify(free)
    end = 0.0
    for length in seconds:
        at, pace = heapq.heappop(free)
        end = max(end, at + length * pace)
        heapq.heappush(free, (at + length * pace, pace))
    return end


def least(seconds: list[float], paces: list[float], slots: int) -> float:
    """No schedule is shorter: the work over the speed there is, and the longest row."""
    speed = sum(slots / pace for pace in paces)
    return max(sum(seconds) / speed, max(seconds) * min(paces))


def run_case(case: str, rows: int, slots: int, folder: Path) -> dict[str, Any]:
    paces = CASES[case]
    seconds = lengths(rows)
    (folder / "lengths.json").write_text(json.dumps(seconds), encoding="utf-8")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": str(n), "prompt": f"row {n}"}) + "\n" for n in range(rows)),
        encoding="utf-8",
    )
    child = subprocess.Popen(
        [sys.executable, str(HERE / "tail_server.py"), str(TARGET), str(folder / "lengths.json"),
         "--slots", str(slots), "--paces", ",".join(map(str, paces))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    ports = child.stdout.readline().split()

    def tell(line: str) -> None:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()
        child.stdout.readline()

    whole = schedule(seconds, paces, slots)
    alone = least(seconds, paces[:1], slots)
    joins_at = 0.25 * alone
    began: list[float] = []

    def on_start(_: object) -> None:
        began.append(time.time())
        if case == "joins":
            threading.Timer(joins_at, tell, ["1 start"]).start()
        if case == "dies":
            threading.Timer(0.25 * whole, tell, ["1 stop"]).start()
            threading.Timer(0.75 * whole, tell, ["1 start"]).start()

    if case == "joins":
        tell("1 stop")
    config = CaptureConfig.model_validate({
        "prompts": [str(prompts)],
        "out": str(folder / "run"),
        "url": [f"http://127.0.0.1:{port}" for port in ports],
        "tokenizer": str(TARGET),
        "max_new_tokens": 1900,
    })  # fmt: skip
    summary = capture(config, probe=False, on_start=on_start)
    child.stdin.close()
    child.wait()
    assert summary.done == rows, summary
    makespan = max(row.finished_at for row in Run(folder / "run").traces()) - began[0]
    if case == "joins":  # one alone at first, then both
        plan = bound = joins_at + (alone - joins_at) / 2
    elif case == "dies":
        plan = bound = least(seconds, paces, slots) + 0.25 * whole
    else:
        plan, bound = whole, least(seconds, paces, slots)
    return {
        "case": case,
        "servers": len(paces),
        "rows": rows,
        "makespan_s": round(makespan, 2),
        "over_schedule": round(makespan / plan, 3),
        "over_least": round(makespan / bound, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    arguments = parser.parse_args()
    print(f"{'case':8} {'servers':>7} {'rows':>6} {'makespan':>9} {'/schedule':>10} {'/least':>7}")
    for case in CASES if arguments.case == "all" else [arguments.case]:
        with tempfile.TemporaryDirectory() as folder:
            rows = arguments.rows * max(1, len(CASES[case]) // 2)
            found = run_case(case, rows, arguments.slots, Path(folder))
        print(f"{found['case']:8} {found['servers']:7} {found['rows']:6} "
              f"{found['makespan_s']:8.2f}s {found['over_schedule']:10.3f} "
              f"{found['over_least']:7.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
