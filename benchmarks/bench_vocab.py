"""`eyas vocab` over a million rows, against a bare read of the same columns by pyarrow.

    python benchmarks/bench_vocab.py [--rows 1000000]

The run is made of parts as the store writes them, with ids of a Zipf law over a vocabulary of
163,840, a reasoning and a closer a row; no model said them. The **floor** reads the columns that
counting needs, with pyarrow alone, and does nothing with them. Both are timed one after the other,
in a process each, and of two rounds the least counts; the ratio is that of CPU seconds, since the
machine is busy with other things. Peak memory stands beside.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench_capture import run_child
from eyas.id_counts import _COLUMNS, count_ids
from eyas.store import Manifest, Run, prepare_directory
from eyas.store.parts import part_name, part_writer, parts
from eyas.trace import Trace, arrow_schema
from peak import peak_kib

HERE = Path(__file__).parent
WHOLE, CLOSER, STOP = 163_840, 163_607, 163_586
PROMPT, REASONING, ANSWER = 100, 200, 100
"""Mean ids of each part of a row."""
GROUP, PART = 4096, 65_536
"""Rows of a row group and of a part."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    with tempfile.TemporaryDirectory(prefix="eyas-vocab-") as name:
        run = Path(name) / "run"
        ids = make_run(run, options.rows)
        size = sum(part.stat().st_size for part in parts(run, "traces"))
        print(f"{options.rows:,} rows, {ids:,} output ids, {size / 2**20:,.0f} MiB", flush=True)
        report: dict[str, Any] = {"rows": options.rows, "ids": ids, "bytes": size}
        for what in ("floor", "vocab") * 2:
            cpu, seconds, said = run_child([sys.executable, __file__, "--child", what, str(run)])
            peak = int(said.split()[-1]) / 1024
            best = report.setdefault(what, {"seconds": seconds, "cpu": cpu, "MiB": peak})
            for figure, value in (("seconds", seconds), ("cpu", cpu), ("MiB", peak)):
                best[figure] = min(best[figure], value)
            print(
                f"{what:<6} {seconds:7.1f} s   {cpu:7.1f} CPU s   peak {peak:,.0f} MiB", flush=True
            )
        report["ratio"] = report["floor"]["cpu"] / report["vocab"]["cpu"]
        print(f"ratio {report['ratio']:.2f} (1 would be as fast as reading alone)")
    (HERE / "last-vocab.json").write_text(json.dumps(report, indent=2) + "\n")


def child(what: str, run: str) -> None:
    """One of the two, in a process of its own."""
    began = time.perf_counter()
    if what == "vocab":
        counts = count_ids(Run(run), WHOLE)
        print(counts.rows, int(counts.of().sum()))
    else:
        rows = 0
        for part in parts(Path(run), "traces"):
            for batch in pq.ParquetFile(part).iter_batches(columns=list(_COLUMNS)):
                rows += len(batch)
        print(rows)
    print(f"{time.perf_counter() - began:.1f} s without starting", file=sys.stderr)
    print(peak_kib())


def make_run(path: Path, rows: int) -> int:
    """Write a run; returns how many output ids it has."""
    prepare_directory(path)
    Manifest(eyas="0", created="", date="2026-01-02", fingerprint={}, profile={},
             max_new_tokens=512, tokenizer="").save(path)  # fmt: skip
    chosen = np.random.default_rng(0)
    written = 0
    for number, first in enumerate(range(0, rows, PART), 1):
        with part_writer(path / "traces" / part_name(number), arrow_schema(Trace)) as writer:
            for table, ids in groups(first, min(first + PART, rows), chosen):
                writer.write_table(table)
                written += ids
    return written


def groups(first: int, last: int, chosen: np.random.Generator) -> Iterator[tuple[pa.Table, int]]:
    schema = arrow_schema(Trace)
    for start in range(first, last, GROUP):
        count = min(GROUP, last - start)
        before, reasons, answers = (
            chosen.integers(mean // 2, mean * 3 // 2, count) for mean in (PROMPT, REASONING, ANSWER)
        )
        outputs = reasons + 1 + answers + 1
        ends = np.cumsum(outputs)
        said = zipf(chosen, int(ends[-1]))
        said[ends - 1] = STOP
        said[ends - outputs + reasons] = CLOSER
        columns: dict[str, Any] = {
            "id": [f"c{n}/0/0" for n in range(start, start + count)],
            "conversation_id": [f"c{n}" for n in range(start, start + count)],
            "key": [f"{n:032x}" for n in range(start, start + count)],
            "prompt_ids": lists(before, zipf(chosen, int(before.sum()))),
            "output_ids": lists(outputs, said),
            "finish_reason": ["stop"] * count,
            "reasoning_start": before,
            "reasoning_end": before + reasons,
            "marks": [[]] * count,
            "template_kwargs": ['{"thinking":true}'] * count,
        }
        arrays = []
        for field in schema:
            value = columns.get(field.name)
            if value is None:
                empty: Any = [] if pa.types.is_list(field.type) else None
                value = pa.array([empty] * count, field.type)
            arrays.append(value if isinstance(value, pa.Array) else pa.array(value, field.type))
        yield pa.Table.from_arrays(arrays, schema=schema), int(outputs.sum())


def zipf(chosen: np.random.Generator, count: int) -> np.ndarray:
    """Ids that are the rarer the higher they are."""
    return np.minimum(WHOLE ** chosen.random(count) - 1, WHOLE - 1).astype(np.int32)


def lists(lengths: np.ndarray, values: np.ndarray) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kind = pa.list_(pa.field("element", pa.int32()))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind)


if __name__ == "__main__":
    main()
