"""Exports against pyarrow alone writing the same Parquet, and their memory against the run's size.

    python benchmarks/bench_export.py [--rows 20000] [--large 10] [--case NAME] ...

A run is made of random ids (drawn as words are: a few often, most hardly ever) in conversations of
one to four turns. **Speed**: `eyas export --to parquet` reads the run, joins, masks and writes;
the ratio is the time that `pyarrow.parquet` needs to write the very same table with the same
settings from memory, over the time of the export in a process of its own without its start.
**Memory**: peak memory of the process at two sizes of the run; `--large 10` makes one of 10 GB.

Cases: plain, merged (`--merge-turns`), shuffled (`--shuffle`), all (both, `--dedupe` and a split).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from peak import peak_kib

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": {"merge_turns": True},
    "shuffled": {"shuffle": 1},
    "all": {"merge_turns": True, "shuffle": 1, "dedupe": True,
            "split": (("train", 0.98), ("eval", 0.02))},
}  # fmt: skip
GOAL_RATIO, GOAL_MIB = 0.5, 1024
ALONE = "alone"
"""In place of a case: pyarrow writes the table of an export again."""
REPEATS = 3
GROUP_IDS = 1 << 20
"""Ids of a row group of the parts, about as sealing makes them."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--large", type=float, default=0.4, help="GB of ids of the larger run")
    parser.add_argument("--small", type=float, default=0.1, help="GB of ids of the smaller run")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--folder", help="where runs are made  [default: a temporary directory]")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    report: dict[str, Any] = {"rows": options.rows}
    with tempfile.TemporaryDirectory(prefix="eyas-export-", dir=options.folder) as name:
        folder = Path(name)
        report["speed"] = speed(folder, options.rows, options.case or ["plain", "merged"])
        report["memory"] = memory(folder, options.small, options.large, options.case or list(CASES))
    (HERE / "last-export.json").write_text(json.dumps(report, indent=2) + "\n")


def speed(folder: Path, rows: int, cases: list[str]) -> dict[str, Any]:
    """The ratios of all cases on one run."""
    run = folder / "run"
    make_run(run, rows)
    found: dict[str, Any] = {}
    for case in cases:
        out, tries, alone = folder / "out", [], []
        for _ in range(REPEATS):
            tries.append(measured(run, out, case))
            alone.append(measured(out, folder / "alone.parquet", ALONE))
            remove(out)
        # Of repeats the least counts: a busy machine only adds.
        least = {n: min(t[n] for t in tries) for n in ("seconds", "cpu")}
        floor = {n: min(t[n] for t in alone) for n in ("seconds", "cpu")}
        ratio, cpu = floor["seconds"] / least["seconds"], floor["cpu"] / least["cpu"]
        found[case] = {"export": least, "pyarrow_alone": floor, "ratio": ratio, "cpu_ratio": cpu,
                       "rows_per_second": rows / least["seconds"]}  # fmt: skip
        print(
            f"{case:<9} {rows / least['seconds']:9,.0f} rows/s   export {least['seconds']:.2f} s   "
            f"pyarrow alone {floor['seconds']:.2f} s   ratio {ratio:.2f}, of CPU {cpu:.2f}"
            + (f" (goal {GOAL_RATIO})" if case == "plain" else ""),
            flush=True,
        )
    shutil.rmtree(run)
    return found


def memory(folder: Path, small: float, large: float, cases: list[str]) -> dict[str, Any]:
    """Peak memory of all cases on a small and a large run."""
    found: dict[str, Any] = {}
    for size in (small, large):
        run = folder / "run"
        rows = make_run(run, int(size * 2**30 / 4 / MEAN_IDS))
        for case in cases:
            figures = measured(run, folder / "out", case)
            remove(folder / "out")
            found.setdefault(case, {})[f"{size:g} GB"] = figures
            print(
                f"{case:<9} {size:6g} GB of ids, {rows:,} rows: peak {figures['peak_mib']:.0f} MiB "
                f"in {figures['seconds']:.1f} s (goal {GOAL_MIB} MiB)",
                flush=True,
            )
        shutil.rmtree(run)
    return found


def measured(run: Path, out: Path, case: str) -> dict[str, float]:
    """Seconds and peak memory of one export, or of pyarrow alone, in a process of its own."""
    command = [sys.executable, __file__, "--child", str(run), str(out), case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def child(run: str, out: str, case: str) -> None:
    """Export once, or write once, and print what it took."""
    import pyarrow.compute  # noqa: F401 - which imports pandas, where it is installed

    from eyas.export import export_run

    if case == ALONE:
        print(json.dumps(written_alone(Path(run), Path(out))))
        return
    pa.array(np.zeros(1))
    before, start = time.process_time(), time.perf_counter()
    export_run(run, to="parquet", out=out, **CASES[case])
    figures = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - before}
    print(json.dumps({**figures, "peak_mib": peak_kib() / 1024}))


def written_alone(out: Path, target: Path) -> dict[str, float]:
    """What it takes pyarrow to write the same table with the same settings."""
    files = sorted(out.glob("*.parquet")) if out.is_dir() else [out]
    table = pa.concat_tables(pq.read_table(file) for file in files).combine_chunks()
    rows = pq.read_metadata(files[0]).row_group(0).num_rows if len(table) else 1
    before, start = time.process_time(), time.perf_counter()
    pq.write_table(
        table,
        target,
        compression="zstd",
        compression_level=1,
        use_dictionary=["loss_mask.list.element"],
        write_statistics=["id"],
        row_group_size=rows,
    )
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - before}


def remove(path: Path) -> None:
    """Remove a file or directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


MEAN_IDS = 680
"""About how many ids a row has, prompt and output together."""


BASE_ROWS = 30_000
"""Rows that are made one by one; what is more are these under other keys."""


def make_run(path: Path, rows: int, seed: int = 0) -> int:
    """Write a run of so many rows (a few more, so that conversations are whole)."""
    from eyas.store import prepare_directory
    from eyas.store.manifest import Manifest
    from eyas.store.parts import part_name, part_writer
    from eyas.trace import Trace, arrow_schema

    prepare_directory(path)
    rng, schema = np.random.default_rng(seed), arrow_schema(Trace)
    words = (rng.zipf(1.3, 1 << 22) % 150_000).astype(np.int32)
    made = part = 0
    while made < min(rows, BASE_ROWS):
        part += 1
        with part_writer(path / "traces" / part_name(part), schema) as writer:
            for _ in range(8):  # row groups
                group: list[dict[str, Any]] = []
                ids = 0
                while ids < GROUP_IDS and made < min(rows, BASE_ROWS):
                    for row in conversation(rng, words, made):
                        group.append(row)
                        made, ids = made + 1, ids + len(row["prompt_ids"]) + len(row["output_ids"])
                if group:
                    columns = [pa.array([row[f.name] for row in group], f.type) for f in schema]
                    writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    base, copy = part, 0
    while made < rows:
        copy += 1
        for number in range(1, base + 1):
            if made >= rows:
                break
            part += 1
            like = pq.ParquetFile(path / "traces" / part_name(number))
            with part_writer(path / "traces" / part_name(part), schema) as writer:
                for group_number in range(like.num_row_groups):
                    table = renamed(like.read_row_group(group_number), copy)
                    writer.write_table(table)
                    made += len(table)
    Manifest(
        eyas="0", created="2026-01-01T00:00:00+00:00", date="2026-01-01",
        fingerprint={"target": "bench"}, profile={}, max_new_tokens=4096, tokenizer="none",
    ).save(path)  # fmt: skip
    return made


def renamed(table: Any, copy: int) -> Any:
    """The same rows as other conversations."""
    for name, values in (
        ("key", [f"{copy:08x}{key[8:]}" for key in table["key"].to_pylist()]),
        ("id", [f"{copy}-{name}" for name in table["id"].to_pylist()]),
        ("conversation_id", [f"{copy}-{name}" for name in table["conversation_id"].to_pylist()]),
    ):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values, pa.string()))
    return table


def conversation(rng: Any, words: Any, number: int) -> list[dict[str, Any]]:
    """Turns whose prompts begin with the turn before, in two conversations of three."""
    from eyas.trace import Trace

    turns, kept = int(rng.choice([1, 1, 1, 2, 4])), rng.random() < 2 / 3
    key, before, found = rng.bytes(16).hex(), np.zeros(0, np.int32), []

    def some(mean: int) -> Any:
        n, at = int(rng.integers(mean // 4, 2 * mean)), int(rng.integers(0, len(words) - 8 * mean))
        return words[at : at + n]

    for turn in range(turns):
        prompt = np.concatenate([before, some(120)])
        output = np.concatenate([some(600 // turns), [7]]).astype(np.int32)
        before = np.concatenate([prompt, output]) if kept else before
        trace = Trace(
            id=f"c{number}/0/{turn}", conversation_id=f"c{number}", turn=turn, sample=0, key=key,
            prompt_ids=prompt, output_ids=output,  # type: ignore[arg-type]
            finish_reason="stop" if rng.random() < 0.95 else "length", stop_id=7,
            reasoning_start=None, reasoning_end=None, messages='[{"role": "user"}]',
            finished_at=0.0,
        )  # fmt: skip
        row = {name: getattr(trace, name) for name in Trace.__slots__}
        row["finished_at"] = 0
        if row["finish_reason"] == "length":
            row["marks"] = ["truncated"]
        found.append(row)
    return found


if __name__ == "__main__":
    main()
