"""Exports: no id changes on the way, and what is left out is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, numbered, write_prompts
from eyas import Run
from eyas.errors import ConfigError, DamagedRun
from eyas.export import export_run
from fault_server import FaultServer, Target


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows are cut by their budget, and one line was refused."""
    folder = tmp_path_factory.mktemp("export")
    prompts = write_prompts(folder / "p.jsonl", [*numbered(30), {"prompt": 5}])
    with FaultServer(Target()) as server:
        capture_from(server, prompts, folder / "run", max_new_tokens=25)
    return folder / "run"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_row_goes_out_as_it_is(run: Path, tmp_path: Path) -> None:
    report = export_run(run, to="jsonl", out=tmp_path / "t.jsonl")
    written = {row.pop("id"): row for row in rows(tmp_path / "t.jsonl")}
    assert written == {
        trace.id: {
            "input_ids": trace.prompt_ids + trace.output_ids,
            "loss_mask": [0] * len(trace.prompt_ids) + [1] * len(trace.output_ids),
        }
        for trace in Run(run).traces()
    }
    assert (report.rows, report.rejected) == (30, 1)
    assert report.tokens == sum(len(row["input_ids"]) for row in written.values())
    assert report.supervised == sum(sum(row["loss_mask"]) for row in written.values())
    assert report.left_out == {}
    assert report.read == report.turns == 30


def test_what_is_left_out_is_counted(run: Path, tmp_path: Path) -> None:
    traces = list(Run(run).traces())
    cut = [trace for trace in traces if trace.finish_reason == "length"]
    assert 0 < len(cut) < 30
    report = export_run(run, to="jsonl", out=tmp_path / "s.jsonl", only="stop")
    assert (report.rows, report.left_out) == (30 - len(cut), {"truncated": len(cut)})
    assert {row["id"] for row in rows(tmp_path / "s.jsonl")} == {
        trace.id for trace in traces if trace.finish_reason == "stop"
    }
    limit = sorted(len(trace.input_ids) for trace in traces)[10]
    report = export_run(run, to="jsonl", out=tmp_path / "l.jsonl", max_length=limit)
    kept = [len(row["input_ids"]) for row in rows(tmp_path / "l.jsonl")]
    assert max(kept) == limit  # a row of exactly that length stays
    assert (report.rows, report.left_out) == (len(kept), {"too_long": 30 - len(kept)})
    assert all(1 in row["loss_mask"] for row in rows(tmp_path / "l.jsonl"))


def test_a_compressed_file_holds_the_same(run: Path, tmp_path: Path) -> None:
    export_run(run, to="jsonl", out=tmp_path / "t.jsonl")
    export_run(run, to="jsonl", out=tmp_path / "t.jsonl.gz")
    assert (
        gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes())
        == (tmp_path / "t.jsonl").read_bytes()
    )


def test_an_existing_file_is_kept_unless_one_says_otherwise(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        export_run(run, to="jsonl", out=out)
    assert out.read_text() == "mine"
    export_run(run, to="jsonl", out=out, overwrite=True)
    assert len(rows(out)) == 30


def test_a_damaged_run_leaves_no_half_file(run: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (part,) = (broken / "traces").iterdir()
    part.write_bytes(part.read_bytes()[:200])
    out = tmp_path / "t.jsonl"
    out.write_text("old")
    with pytest.raises(DamagedRun, match=r"part-000001\.parquet"):
        export_run(broken, to="jsonl", out=out, overwrite=True)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "t.jsonl"]


@pytest.mark.parametrize(
    ("more", "said"),
    [({"to": "csv"}, "--to csv"), ({"only": "length"}, "--only length"),
     ({"out": "/no/such/place/t.jsonl"}, "no directory")],
)  # fmt: skip
def test_mistakes(more: dict[str, str], said: str, run: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"to": "jsonl", "out": tmp_path / "t.jsonl", **more}
    with pytest.raises(ConfigError, match=said):
        export_run(run, **values)
    with pytest.raises(DamagedRun, match="is not a run"):
        export_run(tmp_path, to="jsonl", out=tmp_path / "t.jsonl")
