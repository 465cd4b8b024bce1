"""Exports, read by the trainers' own code: every id and mask of the run, and what is cut or dropped."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capturing import run_eyas
from eyas.demo.server import TARGET
from eyas.store import Run
from eyas.tokens import load_tokenizer
from tools.talking import make_home
from trainers.conftest import Row, as_row, content, rows_of
from writing import trace_of, write_run

EXTRAS = "turn,sample,marks"


def export(run: Path, form: str, out: Path, *options: str) -> dict[str, Any]:
    """What the export says of itself."""
    done = run_eyas("export", str(run), "--to", form, "--out", str(out), "--json", *options)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def read(found: Any) -> list[Row]:
    return [as_row(ids, mask) for ids, mask in found.value["rows"]]


def supervised(rows: list[Row]) -> Counter[int]:
    return Counter(i for ids, mask in rows for i, m in zip(ids, mask, strict=True) if m)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows on both sides of where trainers cut, some with prompts that are longer than that."""
    chosen = random.Random(5)
    sizes = [(9, 20), (2000, 60), (2047, 1), (2048, 5), (3000, 40), (9000, 30), (100, 9000)]
    sizes += [(8191, 1), (8192, 9), (chosen.randint(1, 50), 2048), (1, 1)] * 2
    rows = [
        trace_of(at, chosen.choices(range(500), k=p), [*chosen.choices(range(500), k=o - 1), 506])
        for at, (p, o) in enumerate(sizes)
    ]
    return write_run(tmp_path_factory.mktemp("long") / "run", rows)


@pytest.mark.parametrize("options", [(), ("--shuffle", "3", "--columns", EXTRAS, "--shards", "3")])
def test_speculators_opens_its_prepared_directory(
    options: tuple[str, ...], run: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    report = export(run, "speculators", tmp_path / "prepared", *options)
    found = ask("speculators", "prepared_speculators", tmp_path / "prepared")
    rows = rows_of(run)
    assert content(read(found)) == content(rows)
    if not options:
        assert read(found) == rows
    assert found.value["lengths"] == [len(ids) for ids, _ in read(found)]
    assert report["rows"] == len(rows)
    more = EXTRAS.split(",") if options else []
    assert set(found.value["columns"]) == {"input_ids", "loss_mask", "seq_len", "id", *more}


def test_merged_turns_supervise_the_same_ids(
    run: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    report = export(run, "speculators", tmp_path / "prepared", "--merge-turns")
    rows = read(ask("speculators", "prepared_speculators", tmp_path / "prepared"))
    threads = {(trace.key, trace.sample) for trace in Run(run).traces()}
    assert len(rows) == report["rows"] == len(threads) < report["turns"]
    assert supervised(rows) == supervised(rows_of(run))
    last: dict[Any, Any] = {}
    for trace in Run(run).traces():  # its ids begin with those of the turn before
        thread = last.setdefault((trace.key, trace.sample), ([], []))
        ids, mask = trace.input_ids, trace.loss_mask
        mask[: len(thread[1])] = thread[1]
        last[trace.key, trace.sample] = ids, mask
    assert content(rows) == content([as_row(*row) for row in last.values()])


def test_speculators_prepares_json_lines(
    run: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    export(run, "jsonl", tmp_path / "train.jsonl")
    found = ask("speculators", "prepared_by_speculators", tmp_path / "train.jsonl", TARGET, 8192)
    assert content(read(found)) == content(rows_of(run))  # it shuffles
    assert dict(map(tuple, found.value["counts"])) == supervised(rows_of(run))


def test_the_directory_is_what_prepare_data_makes(
    run: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    """Our own counts are those that speculators makes itself."""
    export(run, "speculators", tmp_path / "prepared")
    found = ask("speculators", "vocabulary_speculators", tmp_path / "prepared", TARGET, 300, 512)
    assert dict(map(tuple, found.value["counts"])) == supervised(rows_of(run))


def test_specforge_reads_prompts_in_order(
    run: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    for form in ("specforge", "jsonl"):
        export(run, form, tmp_path / f"{form}.jsonl")
        found = ask("specforge", "prompts_specforge", tmp_path / f"{form}.jsonl", 8192)
        assert read(found) == rows_of(run)


@pytest.mark.parametrize(
    ("form", "trainer", "script", "length"),
    [
        ("specforge", "specforge", "prompts_specforge", 2048),
        ("jsonl", "speculators", "prepared_by_speculators", 8192),
    ],
)
def test_what_the_trainer_cuts_is_what_was_said(
    form: str, trainer: str, script: str, length: int, long_run: Path, tmp_path: Path,
    ask: Callable[..., Any],
) -> None:  # fmt: skip
    report = export(long_run, form, tmp_path / "train.jsonl")
    model = [TARGET] if trainer == "speculators" else []
    rows = read(ask(trainer, script, tmp_path / "train.jsonl", *model, length))
    whole = rows_of(long_run)
    said = report["trainer_cuts"]
    assert said["at"] == length
    longer = [row for row in whole if len(row[0]) > length]
    assert said["rows"] == len(longer) > 0
    assert said["emptied"] == len(whole) - len(rows) > 0
    assert said["supervised"] == supervised(whole).total() - supervised(rows).total() > 0
    kept = [(ids[:length], mask[:length]) for ids, mask in whole if any(mask[:length])]
    assert content(rows) == content(kept)


def test_nothing_is_cut_where_the_export_cut(
    long_run: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    report = export(
        long_run, "specforge", tmp_path / "t.jsonl", "--max-length", "2048", "--on-longer", "cut"
    )
    rows = read(ask("specforge", "prompts_specforge", tmp_path / "t.jsonl", 2048))
    assert report["trainer_cuts"] == {}
    assert (len(rows), supervised(rows).total()) == (report["rows"], report["supervised"])
    whole = [row for row in rows_of(long_run) if any(row[1][:2048])]
    assert rows == [(ids[:2048], mask[:2048]) for ids, mask in whole]


def with_datasets(path: Path) -> list[Any]:
    from datasets import load_dataset

    return list(
        load_dataset("parquet", data_dir=str(path), cache_dir=str(path.parent / "c"))["train"]
    )


def with_duckdb(path: Path) -> list[Any]:
    import duckdb

    table = duckdb.sql(f"select * from '{path}/**/*.parquet'")
    return [dict(zip(table.columns, row, strict=True)) for row in table.fetchall()]


def with_polars(path: Path) -> list[Any]:
    import polars

    return polars.read_parquet(f"{path}/**/*.parquet").to_dicts()


@pytest.mark.parametrize("reader", [with_datasets, with_duckdb, with_polars])
@pytest.mark.parametrize("form", ["hf", "parquet"])
def test_readers_of_parquet_give_the_run(
    form: str, reader: Callable[[Path], list[Any]], run: Path, tmp_path: Path
) -> None:
    export(run, form, tmp_path / "out", "--shards", "2", "--shuffle", "1")
    rows = reader(tmp_path / "out")
    assert content([as_row(row["input_ids"], row["loss_mask"]) for row in rows]) == content(
        rows_of(run)
    )
    assert {row["id"] for row in rows} == {trace.id for trace in Run(run).traces()}


ASKS = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""A template that leaves the thinking to the model, and to the content."""


def test_the_drift_of_conversations_is_what_specforge_makes_of_them(
    tmp_path: Path, ask: Callable[..., Any]
) -> None:
    demo = load_tokenizer(str(TARGET))
    special = dict(demo.special_tokens_map)
    home = make_home(tmp_path / "home", demo.backend, special, ASKS, ["<|end|>"])
    plain = [i for i in range(250, 500) if demo.decode([i]).strip().isalnum()]
    chosen, rows = random.Random(2), []
    for at in range(60):
        messages = [{"role": "user", "content": f"What is {at}?"}]
        said = chosen.choices(plain, k=3)  # often not in the pieces that text comes back in
        output = [*demo.encode("<think>So</think>"), *said, 506]
        prompt = home.render(messages)
        n = len(prompt)
        rows.append(
            trace_of(at, prompt, output, messages=json.dumps(messages), reasoning_start=n + 1,
                     reasoning_end=n + output.index(511))
        )  # fmt: skip
    run = write_run(tmp_path / "run", rows, source=home.folder)
    report = export(run, "specforge-chat", tmp_path / "chats.jsonl")
    made = read(
        ask("specforge", "chats_specforge", tmp_path / "chats.jsonl", home.folder, tmp_path / "c")
    )
    assert len(made) == len(rows) == report["drift"]["rows"]
    same = {tuple(trace.input_ids) for trace in rows} & {ids for ids, _ in made}
    assert 0 < report["drift"]["rows_changed"] < len(rows)
    assert len(same) == len(rows) - report["drift"]["rows_changed"]
