"""A million short rows: what a row costs in memory, and how soon a run goes on that holds them.

    python benchmarks/bench_million.py [--rows 1000000] [--case ids] ...

**Capturing**: the peak memory of `eyas capture` over few and over many very short rows, against a
server that answers at once; the slope between them is what a row costs. **Resuming**: a run is
made that holds all rows of the input but the last ones (its first rows are captured, the others
are written as parts by the store itself), and `eyas capture` goes on with it: seconds from the
start of the process until the first new request is at the server, and the slope of its peak
memory. `--no-probe` throughout: the probe's questions take a server's time, not ours.

Cases: ids (JSON Lines with ids), plain (without), parquet, turns (four answers a conversation),
samples (``--n 4``), forgotten (ids, where the run no longer holds what was read of the input).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from bench_capture import run_child, run_measured

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "src" / "eyas" / "demo" / "target"
CASES = ("ids", "plain", "parquet", "turns", "samples", "forgotten")
UNITS = {"turns": 4, "samples": 4}
"""Rows a conversation, where it is more than one."""
FIRST = 200
"""Conversations that are captured, so that the run is a real one."""
GOAL_BYTES, GOAL_SECONDS = 64, 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the run that goes on")
    parser.add_argument("--left", type=int, default=2000, help="rows that it does not hold yet")
    parser.add_argument("--small", type=int, default=50_000, help="rows of the smaller runs")
    parser.add_argument("--large", type=int, default=500_000, help="rows that are captured")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--no-capture", action="store_true", help="only resume")
    parser.add_argument("--make", nargs=2, metavar=("RUN", "PROMPTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        fill_run(Path(options.make[0]), options.make[1], options.rows, options.left)
        return
    report: dict[str, Any] = {"rows": options.rows, "left": options.left}
    with tempfile.TemporaryDirectory(prefix="eyas-million-") as name:
        folder = Path(name)
        if not options.no_capture:
            report["capture"] = capturing(folder, options.small, options.large)
        for case in options.case or CASES:
            report[case] = resuming(folder, case, options.small, options.rows, options.left)
    (HERE / "last-million.json").write_text(json.dumps(report, indent=2) + "\n")


def capturing(folder: Path, small: int, large: int) -> dict[str, float]:
    """Peak memory of capturing few and many rows."""
    peaks = {}
    for rows in (small, large):
        prompts = write_prompts(folder, "ids", rows)
        with Server() as server:
            _, seconds, said, peak = run_measured(command(server.url, prompts, folder / "run"))
        assert json.loads(said)["done"] == rows, said
        peaks[rows] = peak
        shutil.rmtree(folder / "run")
        prompts.unlink()
    slope = (peaks[large] - peaks[small]) * 2**20 / (large - small)
    print(
        f"capture   {small:,} rows {peaks[small]:.0f} MiB   {large:,} rows {peaks[large]:.0f} MiB"
        f" ({large / seconds:,.0f} rows/s)   {slope:.0f} bytes a row (goal: at most {GOAL_BYTES})",
        flush=True,
    )
    return {str(small): peaks[small], str(large): peaks[large], "bytes_a_row": slope}


def resuming(folder: Path, case: str, small: int, rows: int, left: int) -> dict[str, float]:
    """Seconds until the first request, and peak memory, of runs that are nearly whole."""
    found = {}
    for size in (small, rows):
        prompts = write_prompts(folder, case, size // UNITS.get(case, 1))
        out = folder / "run"
        more = ["--n", "4"] if case == "samples" else []
        with Server() as server:
            run_child([*command(server.url, prompts, out), "--limit", str(FIRST), *more])
        run_child([sys.executable, __file__, "--rows", str(size), "--left", str(left),
                   "--make", str(out), str(prompts)])  # fmt: skip
        if case == "forgotten":
            shutil.rmtree(out / "input")
        with Server() as server:
            began = time.time()
            cpu, whole, said, peak = run_measured([*command(server.url, prompts, out), *more])
            first = server.first_request() - began
        summary = json.loads(said)
        assert (summary["done"], summary["new"]) == (size, left), summary
        found[size] = first, peak, whole, cpu
        shutil.rmtree(out)
        prompts.unlink()
    slope = (found[rows][1] - found[small][1]) * 2**20 / (rows - small)
    first, peak, whole, cpu = found[rows]
    print(
        f"resume    {case:8} {rows:,} rows: first request after {first:.1f} s (goal: at most "
        f"{GOAL_SECONDS}; {small:,} rows: {found[small][0]:.1f} s), all done after {whole:.1f} s ({cpu:.1f} of CPU)   "
        f"{peak:.0f} MiB, {slope:.0f} bytes a row",
        flush=True,
    )
    return {"first_request_s": first, "small_first_request_s": found[small][0], "whole_s": whole,
            "cpu_s": cpu, "mib": peak, "small_mib": found[small][1], "bytes_a_row": slope}  # fmt: skip


def command(url: str, prompts: Path, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "eyas", "capture", str(prompts), "--out", str(out), "--url", url,
        "--tokenizer", str(TOKENIZER), "--max-new-tokens", "16", "--temperature", "1.0",
        "--concurrency", "64", "--json", "--no-probe",
    ]  # fmt: skip


def write_prompts(folder: Path, case: str, count: int) -> Path:
    """A file of `count` conversations."""
    path = folder / ("prompts.parquet" if case == "parquet" else "prompts.jsonl")
    if case == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"id": [f"q-{n}" for n in range(count)],
                          "prompt": [f"Say {n}." for n in range(count)]})  # fmt: skip
        pq.write_table(table, path)
        return path
    with path.open("w") as file:
        for n in range(count):
            if case == "turns":
                file.write(f'{{"id": "q-{n}", "turns": ["Say {n}.", "On.", "On.", "On."]}}\n')
            elif case == "plain":
                file.write(f'{{"prompt": "Say {n}."}}\n')
            else:
                file.write(f'{{"id": "q-{n}", "prompt": "Say {n}."}}\n')
    return path


def fill_run(run: Path, prompts: str, rows: int, left: int) -> None:
    """Write the rows that a captured run does not hold yet as parts, but for the last ones."""
    from eyas.readers import PromptReader
    from eyas.store import Ledger, Run
    from eyas.store.journal import Segment, encode_line
    from eyas.store.parts import TRACES, parts, seal
    from eyas.store.run import INPUT

    like = next(Run(run).traces())
    held = Run(run).count()
    samples = 1 + max(record["sample"] for record in Run(run).records(TRACES, ["sample"]))
    ledger = Ledger()

    def lines() -> Iterator[bytes]:
        at = 0
        reader = PromptReader([prompts])
        reader.remember(run / INPUT)  # as a capture does that has read all this
        for stretch in reader.stretches():
            met, items = ledger.meet(stretch.keys, stretch.turns), stretch.items()
            ids = [item.given_id for item in items]  # type: ignore[union-attr]
            names = ledger.name(list(zip(ids, met.keys, strict=True)))
            for name, key, turns in zip(names, met.keys, stretch.turns, strict=True):
                for sample in range(samples):
                    for turn in range(turns):
                        at += 1
                        if held < at <= rows - left:
                            row = replace(
                                like, id=f"{name}/{sample}/{turn}", conversation_id=name,
                                turn=turn, sample=sample, key=key.hex(),
                            )  # fmt: skip
                            yield encode_line(row)

    number, every = len(parts(run, TRACES)), lines()
    while some := list(islice(every, 50_000)):  # about what a segment of short rows holds
        number += 1
        segment = Segment(run / "journal", number)
        segment.write(some)
        segment.close()
        seal(run, number, segment.path)


class Server:
    """`server.py` with short answers, as a context."""

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(TOKENIZER), "--output-tokens", "8"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def first_request(self) -> float:
        """When the first prompt came (seconds since the epoch)."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")


if __name__ == "__main__":
    main()
