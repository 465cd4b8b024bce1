"""Splits, files and the place itself: nothing straddles, nothing is lost, nothing half is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capturing import run_eyas
from exporting import STOP, a_trace, make_run, read_rows
from eyas import Run
from eyas.errors import ConfigError, DamagedRun, DiskFull
from eyas.export import export_run
from eyas.export.buckets import Buckets

HALVES = (("one", 0.5), ("two", 0.3), ("three", 0.2))


def many(conversations: int) -> list[Any]:
    chance = random.Random(5)
    return [
        a_trace(f"c{n}/{sample}", turn, [n % 50, *range(turn + 1)], [7, STOP])
        for n in range(conversations)
        for sample in range(2)
        for turn in range(chance.choice((1, 1, 3)))
    ]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("shuffle", [None, 4])
def test_splits_hold_whole_conversations(merge: bool, shuffle: int | None, tmp_path: Path) -> None:
    traces = many(400)
    run = make_run(tmp_path / "run", traces, parts=3)
    out = tmp_path / "out"
    choices: dict[str, Any] = {"split": HALVES, "merge_turns": merge, "shuffle": shuffle}
    report = export_run(run, to="jsonl", out=out, **choices)
    found = {name: read_rows(out / f"{name}.jsonl") for name, _ in HALVES}
    where: dict[str, str] = {}
    for name, rows in found.items():
        for row_id in rows:
            assert where.setdefault(row_id.split("/")[0], name) == name
    assert len(where) == 400
    for name, share in HALVES:
        assert report.splits[name].rows == len(found[name])
        assert abs(sum(at == name for at in where.values()) / 400 - share) < 0.1
    # A conversation keeps its split, whatever else the run holds.
    fewer = make_run(tmp_path / "fewer", [t for t in traces if t.key[0] in "0123"])
    export_run(fewer, to="jsonl", out=tmp_path / "again", **choices)
    for name, _ in HALVES:
        for row_id in read_rows(tmp_path / "again" / f"{name}.jsonl"):
            assert where[row_id.split("/")[0]] == name


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_shards_are_a_partition_of_equal_parts(to: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", many(60), parts=2)
    export_run(run, to="jsonl", out=tmp_path / "all.jsonl")
    export_run(run, to=to, out=tmp_path / "out", shards=7)
    names = [f"train-{n:05d}-of-00007.{to}" for n in range(7)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["export.yaml", *names]
    every = [read_rows(tmp_path / "out" / name) for name in names]
    assert max(map(len, every)) - min(map(len, every)) <= 1
    assert {n: row for rows in every for n, row in rows.items()} == read_rows(
        tmp_path / "all.jsonl"
    )


def test_more_files_than_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [a_trace("c/0", 0, [1], [STOP])])
    export_run(run, to="parquet", out=tmp_path / "out", shards=3, split=(("a", 0.5), ("b", 0.5)))
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 6
    assert len(read_rows(tmp_path / "out")) == 1
    with pytest.raises(ConfigError, match="at most"):
        export_run(run, to="parquet", out=tmp_path / "x", shards=513)


def test_an_empty_run_is_an_empty_export(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    for to in ("jsonl", "parquet", "hf", "speculators"):
        report = export_run(run, to=to, out=tmp_path / to, merge_turns=True, shuffle=1)
        assert (report.rows, report.lengths) == (0, {})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.integers(1, 9), st.integers(1, 4000))
def test_buckets_give_back_everything_in_order(keys: list[int], size: int, bytes_: int) -> None:
    import tempfile

    import numpy as np
    import pyarrow as pa

    with tempfile.TemporaryDirectory() as name:
        buckets = Buckets(Path(name), 8 * len(keys), bucket_bytes=bytes_)
        for at in range(0, len(keys), size):
            some = np.array(keys[at : at + size], np.uint64)
            rows = pa.record_batch({"n": pa.array(range(at, at + len(some)), pa.int64())})
            buckets.add(some, rows)
        found = [(int(k), n) for ks, rows in buckets.sorted()
                 for k, n in zip(ks, rows["n"].to_pylist(), strict=True)]  # fmt: skip
        assert not list(Path(name).iterdir())
    assert found == sorted((key, n) for n, key in enumerate(keys))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", many(20), parts=2)


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("to", ["jsonl", "parquet", "hf", "speculators", "specforge"])
def test_a_failure_on_the_way_leaves_nothing(
    to: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(tmp_path)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_run(run, to=to, out=tmp_path / "out", on_rows=stop)
    assert listing(tmp_path) == before
    monkeypatch.setattr(
        "eyas.export.staging.sync_file", lambda _: (_ for _ in ()).throw(OSError(28, ""))
    )
    with pytest.raises(DiskFull, match="the disk is full"):
        export_run(run, to=to, out=tmp_path / "out", merge_turns=True)
    assert listing(tmp_path) == before


def test_a_killed_export_leaves_no_result_and_the_next_one_cleans_up(
    run: Path, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys\n"
        "from eyas.export import export_run\n"
        "def die(_): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"export_run({str(run)!r}, to='parquet', out={str(tmp_path / 'out')!r}, shards=2, on_rows=die)"
    )
    died = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert died.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    export_run(run, to="parquet", out=tmp_path / "out", shards=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_two_exports_to_one_place(run: Path, tmp_path: Path) -> None:
    """The second one is refused, and the first one goes on as if nothing had been."""
    out, refused = tmp_path / "out", []

    def second(_: int) -> None:
        shown = run_eyas("export", str(run), "--to", "hf", "--out", str(out), "--overwrite")
        refused.append((shown.returncode, shown.stderr))

    report = export_run(run, to="hf", out=out, on_rows=second)
    assert {code for code, _ in refused} == {2}
    assert all("another export writes" in said for _, said in refused)
    assert len(read_rows(out)) == report.rows
    assert (
        run_eyas("export", str(run), "--to", "hf", "--out", str(out), "--overwrite").returncode == 0
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_export_that_is_told_to_end_leaves_nothing(
    number: int, run: Path, tmp_path: Path
) -> None:
    before = listing(tmp_path)
    code = (
        "import os, eyas.cli, eyas.export.exporting as e\n"
        f"e.Tally.add = lambda *_: os.kill(os.getpid(), {int(number)})\n"
        "eyas.cli.main()"
    )
    arguments = ["export", str(run), "--out", str(tmp_path / "out"), "--shards", "2"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert listing(tmp_path) == before


def test_a_directory_is_replaced_only_if_an_export_made_it(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no export made"):
        export_run(run, to="hf", out=out, overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    (out / "thesis.tex").unlink()
    export_run(run, to="hf", out=out, overwrite=True)  # an empty one is nobody's
    with pytest.raises(ConfigError, match="--overwrite"):
        export_run(run, to="hf", out=out)
    export_run(run, to="parquet", out=out, shards=2, overwrite=True)
    assert sorted(p.suffix for p in out.iterdir()) == [".parquet", ".parquet", ".yaml"]
    with pytest.raises(ConfigError, match="is a directory, and this export is one file"):
        export_run(run, to="parquet", out=out, overwrite=True)


def test_a_directory_that_was_moved_aside_comes_back(run: Path, tmp_path: Path) -> None:
    """The process died between the two renames of an overwriting export."""
    out = tmp_path / "out"
    export_run(run, to="hf", out=out)
    held = read_rows(out)
    aside = tmp_path / ".out.tmp"
    aside.mkdir()
    out.rename(aside / "old")
    run_damaged = tmp_path / "none"
    run_damaged.mkdir()
    with pytest.raises(DamagedRun):
        export_run(run_damaged, to="hf", out=out)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_run(run, to="hf", out=out, on_rows=stop)
    assert read_rows(out) == held
    assert not aside.exists()


def test_places_that_cannot_be(run: Path, tmp_path: Path) -> None:
    for out, more, said in (
        (tmp_path / "no" / "x.jsonl", {}, "there is no directory"),
        (tmp_path / "x.jsonl", {"shards": 2}, "looks like a file"),
        (tmp_path / "x.jsonl.gz", {"split": HALVES}, "looks like a file"),
        (tmp_path / "run" / "..", {"overwrite": True}, "names no file"),
    ):
        with pytest.raises(ConfigError, match=said):
            export_run(run, to="jsonl", out=out, **more)


def test_a_dry_run_says_all_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    before = listing(tmp_path)
    choices: dict[str, Any] = {"max_length": 6, "on_longer": "cut", "shuffle": 1, "split": HALVES}
    dry = export_run(run, to="hf", out=tmp_path / "out", dry_run=True, **choices)
    assert listing(tmp_path) == before
    wet = export_run(run, to="hf", out=tmp_path / "out", **choices)
    assert dry == wet


def test_the_command_says_plan_and_outcome(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_eyas(
        "export", str(run), "--to", "parquet", "--out", str(out), "--split", "train:0.9,eval:0.1",
        "--shards", "2", "--shuffle", "3", "--max-length", "4", "--columns", "turn,marks",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("plan      ")
    for phrase in ("as parquet", "rows over 4 ids left out", "split train 0.9, eval 0.1",
                   "shuffled with seed 3", "2 shards", "with turn, marks"):  # fmt: skip
        assert phrase in first
    assert any(line.startswith("left out  ") and "--max-length" in line for line in rest)
    shown = run_eyas("export", str(run), "--out", str(out), "--split", "train")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "eyas: --split train: 'train' is no NAME:SHARE, such as train:0.98\n"


def test_nothing_is_written_among_the_runs_own_files(run: Path) -> None:
    with pytest.raises(ConfigError, match="among the run's own files"):
        export_run(run, to="parquet", out=run / "traces" / "part-000009.parquet")
    export_run(run, to="jsonl", out=run / "rows.jsonl")  # beside them is no harm
    assert len(read_rows(run / "rows.jsonl")) == Run(run).count("traces")
