"""Turns merged into rows: span by span the same ids are supervised, and nothing is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capturing import change_rows, run_eyas
from exporting import a_trace
from eyas import Run, Tokenizer
from eyas.errors import DiskFull
from eyas.export import export_run, merging
from eyas.export.buckets import Buckets
from eyas.export.rows import NEEDED, rows_of
from eyas.trace import Trace, arrow_schema
from test_history import KINDS, stage


class Row(NamedTuple):
    """A row with its supervised spans."""

    id: str
    input_ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def loss_mask(self) -> list[int]:
        mask = [0] * len(self.input_ids)
        for start, end in self.spans:
            mask[start:end] = [1] * (end - start)
        return mask


def trace(turn: int, prompt: list[int], output: list[int]) -> Trace:
    return a_trace("c/0", turn, prompt, output)


def as_rows(traces: Sequence[Trace]) -> Any:
    """Traces as the exporter reads them."""
    schema = pa.schema([arrow_schema(Trace).field(name) for name in NEEDED])
    columns = [pa.array([getattr(t, f.name) for t in traces], f.type) for f in schema]
    return rows_of(pa.RecordBatch.from_arrays(columns, schema=schema))


def from_rows(batch: Any) -> list[Row]:
    return [
        Row(
            row["id"],
            row["input_ids"],
            list(zip(row["spans"][::2], row["spans"][1::2], strict=True)),
        )
        for row in batch.to_pylist()
    ]


def join_turns(traces: Sequence[Trace], most: int | None = None) -> list[Row]:
    rows = as_rows(traces)
    return from_rows(merging.join_turns(rows, merging.thread_words(rows), most))


def merged_rows(traces: Sequence[Trace], spool: Path, bucket_bytes: int) -> list[Row]:
    """As an export does it, a few rows at a time."""
    batches = [as_rows(traces[at : at + 7]) for at in range(0, len(traces), 7)]
    several = merging.repeated(map(merging.thread_words, batches))
    spool.mkdir(exist_ok=True)
    buckets = Buckets(spool, sum(b.nbytes for b in batches), bucket_bytes=bucket_bytes)
    found = [row for b in merging.joined_rows(batches, several, buckets) for row in from_rows(b)]
    assert not list(spool.iterdir())
    return found


def check_rows(traces: Iterable[Trace], rows: Iterable[Row]) -> None:
    """Every trace is in one row: its prompt before its span, its output in it."""
    left = {t.id: t for t in traces}
    for row in rows:
        mask = row.loss_mask
        assert sum(mask) == sum(end - start for start, end in row.spans)
        assert [n for n, supervised in enumerate(mask) if supervised] == [
            n for start, end in row.spans for n in range(start, end)
        ]
        assert len(row.input_ids) == row.spans[-1][1]
        for start, end in row.spans:
            found = next(
                t
                for t in left.values()
                if list(t.prompt_ids) == row.input_ids[:start]
                and list(t.output_ids) == row.input_ids[start:end]
            )
            del left[found.id]
    assert not left


@st.composite
def threads(draw: st.DrawFn) -> list[Trace]:
    """Turns whose prompts begin with an earlier turn, with nearly one, or with anything."""
    found: list[Trace] = []
    for turn in range(draw(st.integers(1, 8))):
        ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)
        before: list[int] = []
        if found and draw(st.integers(0, 4)):
            base = found[-1] if draw(st.booleans()) else draw(st.sampled_from(found))
            before = base.input_ids[: len(base.input_ids) - draw(st.sampled_from((0, 0, 0, 1)))]
        found.append(trace(turn, before + draw(ids), draw(ids)))
    return found


@given(threads(), st.randoms(use_true_random=False))
def test_no_supervised_id_changes_and_none_is_lost(
    turns: list[Trace], chosen: random.Random
) -> None:
    rows = join_turns(chosen.sample(turns, len(turns)))
    check_rows(turns, rows)
    assert [row.input_ids for row in rows] == [row.input_ids for row in join_turns(turns)]
    ids = [row.id for row in rows]
    assert len(set(ids)) == len(ids)


@given(threads(), st.integers(1, 40))
def test_joining_makes_no_row_longer_than_asked_for(turns: list[Trace], most: int) -> None:
    rows = join_turns(turns, most)
    check_rows(turns, rows)
    assert all(len(row.input_ids) <= most for row in rows if len(row.spans) > 1)


def test_what_is_joined_and_what_is_not() -> None:
    first, second = trace(0, [1, 2], [3, 9]), trace(1, [1, 2, 3, 9, 4], [5, 9])
    (row,) = join_turns([first, second])
    assert (row.id, row.input_ids) == ("c/0/0-1", [1, 2, 3, 9, 4, 5, 9])
    assert (row.spans, row.loss_mask) == ([(2, 4), (5, 7)], [0, 0, 1, 1, 0, 1, 1])
    rewritten = trace(1, [1, 2, 9, 4], [5, 9])
    assert [row.id for row in join_turns([first, rewritten])] == ["c/0/0", "c/0/1"]
    # Two that go on from the same turn: it is supervised once.
    other = trace(2, [1, 2, 3, 9, 6], [7, 9])
    assert [row.id for row in join_turns([first, second, other])] == ["c/0/0-1", "c/0/2"]
    # A prompt that is no longer than what came before asks nothing new.
    same = trace(1, [1, 2, 3, 9], [5, 9])
    assert [row.id for row in join_turns([first, same])] == ["c/0/0", "c/0/1"]


def exported(run: Path, out: Path, **more: Any) -> tuple[list[Row], Any]:
    """The written rows, with the spans that their masks show, and the report."""
    report = export_run(run, to="jsonl", out=out, **more)
    rows = []
    for line in out.read_bytes().splitlines():
        row = json.loads(line)
        mask = [0, *row["loss_mask"], 0]
        edges = [n for n in range(len(mask) - 1) if mask[n] != mask[n + 1]]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        rows.append(Row(row["id"], row["input_ids"], spans))
    return rows, report


@pytest.mark.parametrize(
    ("kind", "history", "rows"),
    [
        ("opened and kept", "served", 4),
        ("opened and kept", "tokens", 4),
        ("no reasoning", "served", 4),
        ("opened, kept by a switch", "full", 4),
        ("ended by the next turn's header", "served", 4),
        ("kept, with line feeds", "served", 4),
        ("opened, dropped", "served", 40),
        ("generated, dropped", "served", 40),
    ],
)
def test_runs_of_each_class(
    kind: str, history: str, rows: int, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    set_up = stage(KINDS[kind], tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=10, conversations=4, history=history)
    run = tmp_path / "run"
    traces = list(Run(run).traces())
    apart, _ = exported(run, tmp_path / "apart.jsonl")
    merged, report = exported(run, tmp_path / "merged.jsonl", merge_turns=True)
    check_rows(traces, apart)
    check_rows(traces, merged)
    assert (len(merged), report.rows, report.turns) == (rows, rows, 40)
    assert report.tokens == sum(len(row.input_ids) for row in merged)
    assert report.tokens + report.tokens_saved == sum(len(row.input_ids) for row in apart)
    assert report.supervised == sum(len(t.output_ids) for t in traces)
    if rows == 4:
        assert {row.id for row in merged} == {f"c{c}/0/0-9" for c in range(4)}
        assert all(len(row.spans) == 10 for row in merged)


def test_an_answer_that_drifted_ends_a_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path, odd_share=0.15)
    threads = set_up.converse(tmp_path, turns=10, conversations=4)
    drifts = sum(
        not set_up.speaker.said[tuple(trace.prompt_ids)].canonical
        for thread in threads
        for trace in thread[:-1]
    )
    assert drifts
    merged, report = exported(tmp_path / "run", tmp_path / "m.jsonl", merge_turns=True)
    check_rows(Run(tmp_path / "run").traces(), merged)
    assert report.rows == 4 + drifts


def test_turns_that_lie_far_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Rows in any order, some of them in parts of their own, and hardly any memory for them."""
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=6, conversations=8)
    run = tmp_path / "run"
    change_rows(run, lambda rows: rows.clear(), lambda row: row["turn"] > 3)
    set_up.converse(tmp_path, turns=6, conversations=8)
    change_rows(run, lambda rows: random.Random(3).shuffle(rows), lambda _: True)
    traces = list(Run(run).traces())
    for size in (2**8, 2**12, 2**30):
        rows = merged_rows(traces, tmp_path / "spool", size)
        check_rows(traces, rows)
        assert {row.id for row in rows} == {f"c{c}/0/0-5" for c in range(8)}


def test_what_is_left_out_is_not_joined(tokenizer: Tokenizer, tmp_path: Path) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=8, conversations=3)
    run = tmp_path / "run"
    traces = list(Run(run).traces())
    most = sorted(len(t.input_ids) for t in traces)[12]
    merged, report = exported(run, tmp_path / "m.jsonl", merge_turns=True, max_length=most)
    kept = [t for t in traces if len(t.input_ids) <= most]
    check_rows(kept, merged)
    assert report.left_out == {"too_long": len(traces) - len(kept)}
    assert len(kept) < len(traces)
    assert max(len(row.input_ids) for row in merged) <= most


def test_a_merged_export_is_sound_training_data(tokenizer: Tokenizer, tmp_path: Path) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=5, conversations=3)
    out = tmp_path / "merged.jsonl"
    shown = run_eyas(
        "export", str(tmp_path / "run"), "--to", "jsonl", "--out", str(out), "--merge-turns"
    )
    assert shown.returncode == 0, shown.stderr
    assert "merged    15 turns into 3 rows, which saves " in shown.stdout
    checked = run_eyas("verify", str(out), "--tokenizer", str(set_up.directory))
    assert checked.returncode == 0, checked.stdout


def test_a_full_disk_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=3, conversations=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eyas.export.buckets.BUCKET_BYTES", 64)
    monkeypatch.setattr("eyas.export.buckets.pa.ipc.new_stream", full)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(DiskFull):
        export_run(tmp_path / "run", to="jsonl", out=tmp_path / "m.jsonl", merge_turns=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
