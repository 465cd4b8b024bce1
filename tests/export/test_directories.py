"""Forms that are directories, read by other people's code: datasets, DuckDB and polars."""

from __future__ import annotations

import json
import pickle
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from capturing import capture_from, numbered, write_prompts
from exporting import STOP, Plain, a_trace, make_run, plain, read_rows
from eyas import Run
from eyas.checks import REFUSALS
from eyas.errors import ConfigError
from eyas.export import export_run
from fault_server import FaultServer, Target

HALVES = (("train", 0.7), ("test", 0.3))


@pytest.fixture(scope="module")
def traces() -> list[Any]:
    chance = random.Random(2)
    return [
        a_trace(
            f"c{n}/0", 0, chance.choices(range(300), k=n % 9 + 1),
            [*chance.choices(range(300), k=n % 5), STOP], marks=["loop"] * (n % 3),
            logprobs=[-0.5] * (n % 5 + 1) if n % 2 else None, finished_at=1.5,
        )
        for n in range(120)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(traces: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("directories") / "run", traces, parts=3)


def arrow_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a directory as it is, read without datasets."""
    state = json.loads((folder / "state.json").read_text())
    rows: list[dict[str, Any]] = []
    for file in state["_data_files"]:
        with pa.ipc.open_stream(folder / file["filename"]) as stream:
            rows += stream.read_all().to_pylist()
    return rows


@pytest.mark.parametrize("shards", [None, 4])
def test_what_speculators_trains_from(
    shards: int | None, run: Path, traces: list[Any], tmp_path: Path
) -> None:
    report = export_run(run, to="speculators", out=tmp_path / "out", shards=shards)
    rows = arrow_rows(tmp_path / "out")
    assert {row["id"]: Plain(row["input_ids"], row["loss_mask"]) for row in rows} == {
        trace.id: plain(trace) for trace in traces
    }
    assert all(row["seq_len"] == len(row["input_ids"]) for row in rows)
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert (state["_format_type"], state["_split"]) == ("torch", None)
    with pa.ipc.open_stream(tmp_path / "out" / state["_data_files"][0]["filename"]) as stream:
        kinds = {name: str(stream.schema.field(name).type) for name in ("input_ids", "loss_mask")}
    assert set(kinds.values()) == {"list<element: int64>"}
    counted = Counter(i for trace in traces for i in trace.output_ids)
    with zipfile.ZipFile(tmp_path / "out" / "token_freq.pt") as file:
        assert pickle.loads(file.read("archive/data.pkl")) == dict(counted)
    assert sum(counted.values()) == report.supervised


def test_datasets_reads_the_directory_as_its_own(
    run: Path, traces: list[Any], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    columns = ("turn", "marks", "logprobs", "finished_at", "metadata")
    export_run(run, to="speculators", out=tmp_path / "out", columns=columns, split=HALVES)
    found: dict[str, Any] = {}
    for split, _ in HALVES:
        state = tmp_path / "out" / split / "state.json"
        assert json.loads(state.read_text())["_split"] == split
        # Its torch format needs torch, which is not here; the rest of the layout does not.
        state.write_text(state.read_text().replace('"torch"', "null"))
        read = datasets.load_from_disk(str(tmp_path / "out" / split))
        assert str(read.split) == split
        assert read.column_names == ["input_ids", "loss_mask", "seq_len", "id", *columns]
        saved = tmp_path / f"again-{split}"
        read.save_to_disk(str(saved))  # its own description of the columns is ours
        assert (
            json.loads((saved / "dataset_info.json").read_text())["features"]
            == json.loads((tmp_path / "out" / split / "dataset_info.json").read_text())["features"]
        )
        found |= {row["id"]: row for row in read}
    assert {n: Plain(r["input_ids"], r["loss_mask"]) for n, r in found.items()} == {
        trace.id: plain(trace) for trace in traces
    }
    for trace in traces:
        row = found[trace.id]
        assert (row["marks"], row["logprobs"], row["turn"]) == (trace.marks, trace.logprobs, 0)


def test_a_column_that_the_trainer_would_misread_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--columns messages: the trainer of --to speculators"):
        export_run(run, to="speculators", out=tmp_path / "out", columns=("messages",))


def test_a_hub_directory_loads_by_its_name_alone(
    run: Path, traces: list[Any], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    export_run(run, to="hf", out=tmp_path / "out", split=HALVES, shards=2, columns=("marks",))
    read = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert sorted(read) == ["test", "train"]
    found = {row["id"]: row for split in read.values() for row in split}
    assert {n: Plain(r["input_ids"], r["loss_mask"]) for n, r in found.items()} == {
        trace.id: plain(trace) for trace in traces
    }
    assert all(found[trace.id]["marks"] == trace.marks for trace in traces)


def test_a_split_without_a_row_hides_no_other(run: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = (("train", 1 - 1e-9), ("eval", 1e-9))
    report = export_run(run, to="hf", out=tmp_path / "out", split=split)
    assert {name: of.rows for name, of in report.splits.items()} == {
        "train": report.rows, "eval": 0
    }  # fmt: skip
    read = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in read.items()} == {"train": report.rows}
    assert "| eval | 0 | 0 | 0 |" in (tmp_path / "out" / "README.md").read_text()


def test_duckdb_and_polars_read_the_files(run: Path, traces: list[Any], tmp_path: Path) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    export_run(run, to="parquet", out=tmp_path / "out", shards=3, columns=("metadata", "marks"))
    glob = str(tmp_path / "out" / "*.parquet")
    wanted = {trace.id: plain(trace) for trace in traces}
    rows = duckdb.sql(f"select id, input_ids, loss_mask from '{glob}'").fetchall()
    assert {name: Plain(ids, mask) for name, ids, mask in rows} == wanted
    frame = polars.read_parquet(glob)
    assert frame.schema["input_ids"] == polars.List(polars.Int32)
    assert frame.schema["loss_mask"] == polars.List(polars.Int8)
    assert (
        dict(
            zip(
                frame["id"],
                map(Plain, frame["input_ids"].to_list(), frame["loss_mask"].to_list()),
                strict=True,
            )
        )
        == wanted
    )


def test_columns_are_the_run_s(run: Path, traces: list[Any], tmp_path: Path) -> None:
    export_run(run, to="parquet", out=tmp_path / "p.parquet", columns=("turn", "logprobs", "key"))
    found = {row["id"]: row for row in pq.read_table(tmp_path / "p.parquet").to_pylist()}
    export_run(run, to="jsonl", out=tmp_path / "j.jsonl", columns=("turn", "logprobs", "key"))
    lines = [json.loads(line) for line in (tmp_path / "j.jsonl").read_text().splitlines()]
    for trace in traces:
        assert found[trace.id]["key"] == trace.key
        assert found[trace.id]["logprobs"] == trace.logprobs
    assert {row["id"]: row for row in lines} == found


def test_the_card_says_what_it_is_and_not_where(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "secret-prompts.jsonl", [*numbered(8), {"prompt": 5}])
    with FaultServer(Target()) as server:
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=25, temperature=0.7)
        report = export_run(
            tmp_path / "run", to="hf", out=tmp_path / "out", only="stop", split=HALVES
        )
        address = server.url
    run = Run(tmp_path / "run")
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    head = yaml.safe_load(front)
    assert head["configs"][0]["data_files"] == [
        {"split": "train", "path": "data/train-*.parquet"},
        {"split": "test", "path": "data/test-*.parquet"},
    ]
    assert head["size_categories"] == ["n<1K"]
    for said in (
        run.manifest.fingerprint["template"], run.manifest.fingerprint["tokenizer_files"],
        "| temperature | 0.7 |", f"{report.rows:,}", "cut at the token budget", "0.1.0",
        f"| refused by a check during the capture, or unusable input | {report.rejected} |",
        *REFUSALS,
    ):  # fmt: skip
        assert said in body, said
    everything = text + (tmp_path / "out" / "export.yaml").read_text()
    for private in (str(tmp_path), "secret-prompts", address, address.split("//")[1],
                    run.manifest.tokenizer):  # fmt: skip
        assert private not in everything
    assert report.left_out["truncated"] > 0
    assert len(read_rows(tmp_path / "out")) == report.rows


def test_a_target_s_name_cannot_break_the_card(tmp_path: Path) -> None:
    for target, shown in (
        ("/home/me/models/Kimi|K2*", "Kimi\\|K2\\*"),
        ("C:\\Users\\me\\model", "model"),
        ("org/model", "org/model"),
        ("x\n---\n# <script>", "x --- \\# \\<script\\>"),
    ):
        run = make_run(tmp_path / "run", [a_trace("c/0", 0, [1], [STOP])],
                       fingerprint={"target": target})  # fmt: skip
        export_run(run, to="hf", out=tmp_path / "out", overwrite=True)
        text = (tmp_path / "out" / "README.md").read_text()
        assert f"# Token ids generated by {shown}\n" in text
        assert "/home/me" not in text + (tmp_path / "out" / "export.yaml").read_text()
        __import__("shutil").rmtree(run)


def test_what_the_trainer_cuts_is_said_with_figures(tmp_path: Path) -> None:
    rows = [
        a_trace("short/0", 0, [1] * 10, [2] * 10),
        a_trace("long/0", 0, [1] * 2000, [2] * 100),  # SpecForge cuts at 2,048: 52 are lost
        a_trace("lost/0", 0, [1] * 2048, [2] * 7),
    ]
    run = make_run(tmp_path / "run", rows)
    report = export_run(run, to="specforge", out=tmp_path / "x.jsonl")
    assert report.trainer_cuts == {"at": 2048, "rows": 2, "supervised": 52 + 7, "emptied": 1}
    assert "2 rows are longer than 2,048 ids" in report.trainer[-1]
    report = export_run(
        run, to="specforge", out=tmp_path / "y.jsonl", max_length=2048, on_longer="cut"
    )
    assert (report.trainer_cuts, report.left_out) == ({}, {"nothing_supervised": 1})
    assert (report.cut, report.cut_ids, report.cut_supervised) == (1, 52, 52)
