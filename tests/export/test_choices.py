"""Each choice of an export against rows that are made without any of its code."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporting import STOP, Plain, a_trace, make_run, plain, read_rows
from eyas.errors import ConfigError
from eyas.export import ExportOptions, ExportReport, export_run, parse_split
from eyas.trace import Rejected, Trace

MARKS = ("truncated", "eos_at_cap", "loop", "control_text", "tool_calls")


@st.composite
def a_run(draw: st.DrawFn) -> list[Trace]:
    """Threads of one to four turns with marks, reasoning, cut ends and rows that are there twice."""
    found: list[Trace] = []
    ids = st.lists(st.integers(0, 8), min_size=1, max_size=12)
    for number in range(draw(st.integers(1, 6))):
        thread, before = f"c{number}/{draw(st.integers(0, 1))}", draw(ids)
        for turn in range(draw(st.integers(1, 4))):
            keeps = draw(st.booleans())
            prompt = [*(found[-1].input_ids if turn and keeps else before), *draw(ids)]
            output = [*draw(ids), STOP]
            start = end = None
            if draw(st.booleans()):
                whole = len(prompt) + len(output)
                start = draw(st.integers(max(0, len(prompt) - 3), whole - 1))
                end = draw(st.one_of(st.none(), st.integers(max(start + 1, len(prompt)), whole)))
            found.append(
                a_trace(
                    thread,
                    turn,
                    prompt,
                    output,
                    finish_reason=draw(st.sampled_from(("stop", "stop", "length"))),
                    marks=draw(st.lists(st.sampled_from(MARKS), unique=True, max_size=2)),
                    reasoning_start=start,
                    reasoning_end=end,
                )
            )
    return draw(st.permutations(found))


def exported(
    traces: list[Trace], parts: int = 2, to: str = "jsonl", **choices: Any
) -> tuple[dict[str, Plain], ExportReport]:
    """What an export of these traces holds, and its report, whose sums are checked."""
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name) / "run", traces, parts=parts)
        out = Path(name) / "out"
        report = export_run(run, to=to, out=out / "x" if False else out, **choices)
        if not out.is_dir():
            out.rename(out.with_suffix(f".{to}"))
            out = out.with_suffix(f".{to}")
        rows = read_rows(out)
        left = sorted(path.name for path in Path(name).iterdir() if path.name.startswith("."))
        assert not left, "something was left behind"
    assert report.read == len(traces) == report.turns + sum(report.left_out.values())
    assert report.rows == len(rows) == sum(of.rows for of in report.splits.values())
    assert report.tokens == sum(len(row.input_ids) for row in rows.values())
    assert report.supervised == sum(sum(row.loss_mask) for row in rows.values())
    assert all(any(row.loss_mask) for row in rows.values())
    assert all(len(row.loss_mask) == len(row.input_ids) for row in rows.values())
    return rows, report


ONCE = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@ONCE
@given(a_run(), st.sampled_from(("all", "no-reasoning")), st.sampled_from(("jsonl", "parquet")))
def test_rows_hold_the_ids_and_masks_of_the_run(traces: list[Trace], mask: str, to: str) -> None:
    rows, report = exported(traces, to=to, mask=mask)
    wanted = {trace.id: plain(trace, mask) for trace in traces}
    taught = {name: row for name, row in wanted.items() if any(row.loss_mask)}
    assert rows == taught
    assert report.left_out.get("nothing_supervised", 0) == len(wanted) - len(taught)
    if mask == "all":
        assert rows == wanted


@ONCE
@given(a_run(), st.integers(1, 30), st.sampled_from(("drop", "cut")), st.integers(1, 4))
def test_longer_rows_are_dropped_or_cut_and_counted(
    traces: list[Trace], most: int, on_longer: str, least: int
) -> None:
    least = min(least, most)
    rows, report = exported(traces, max_length=most, on_longer=on_longer, min_supervised=least)
    wanted, why, lost = {}, Counter[str](), 0
    for trace in traces:
        row = plain(trace)
        if len(row.input_ids) > most and on_longer == "drop":
            why["too_long"] += 1
            continue
        short = Plain(row.input_ids[:most], row.loss_mask[:most])
        if not any(short.loss_mask):
            why["nothing_supervised"] += 1
        elif sum(short.loss_mask) < least:
            why["too_few_supervised"] += 1
        else:
            wanted[trace.id] = short
            lost += len(row.input_ids) - len(short.input_ids)
    assert rows == wanted
    assert report.left_out == dict(why)
    assert report.cut_ids == report.cut_supervised == lost
    assert max((len(row.input_ids) for row in rows.values()), default=0) <= most


@ONCE
@given(a_run())
def test_incomplete_and_marked_rows(traces: list[Trace]) -> None:
    rows, report = exported(traces, only="stop")
    assert set(rows) == {trace.id for trace in traces if trace.complete}
    assert report.truncated == 0
    rows, report = exported(traces, drop_marked=("loop", "truncated"))
    assert set(rows) == {t.id for t in traces if not {"loop", "truncated"} & set(t.marks)}
    assert report.left_out.get("marked", 0) == len(traces) - len(rows)
    assert set(exported(traces, drop_marked=("any",))[0]) == {t.id for t in traces if not t.marks}
    rows, report = exported(traces)  # marked rows are kept unless one says otherwise
    assert len(rows) == len(traces)
    assert report.truncated == sum(not trace.complete for trace in traces)


@ONCE
@given(a_run(), st.sampled_from(("all", "last-turn", "no-reasoning")))
def test_merged_rows_supervise_what_the_policy_says(traces: list[Trace], mask: str) -> None:
    rows, report = exported(traces, merge_turns=True, mask=mask)
    apart, _ = exported(traces, mask="no-reasoning" if mask == "no-reasoning" else "all")
    left = dict(apart)
    for name, row in rows.items():
        thread, _, turns = name.rpartition("/")
        first, _, last = turns.partition("-")
        members = [
            left.pop(f"{thread}/{turn}", None) for turn in range(int(first), int(last or first) + 1)
        ]
        ones = [at for at, one in enumerate(row.loss_mask) if one]
        there = [
            m for m in members if m is not None and row.input_ids[: len(m.input_ids)] == m.input_ids
        ]
        assert there
        wanted = set().union(*({at for at, one in enumerate(m.loss_mask) if one} for m in there))
        if mask == "last-turn" and last:
            assert set(ones) < wanted or len(there) == 1
            assert ones[-1] == len(row.input_ids) - 1
            assert ones == list(range(ones[0], ones[-1] + 1))
        else:
            assert set(ones) <= wanted
    if mask == "all":
        assert report.supervised == sum(len(trace.output_ids) for trace in traces)


@ONCE
@given(a_run(), st.integers(0, 2**40), st.integers(1, 4))
def test_a_shuffle_is_a_permutation_that_the_run_does_not_change(
    traces: list[Trace], seed: int, parts: int
) -> None:
    plain_order, _ = exported(traces)
    once, _ = exported(traces, shuffle=seed)
    again, _ = exported(sorted(traces, key=lambda t: t.id), parts=parts, shuffle=seed)
    assert once == plain_order
    assert list(once) == list(again)  # whatever the order of the run
    other, _ = exported(traces, shuffle=seed + 1)
    assert other == once


@ONCE
@given(a_run(), st.integers(1, 5))
def test_doubles_go_and_nothing_else(traces: list[Trace], copies: int) -> None:
    doubled = [
        a_trace(f"d{n}/0", 0, traces[0].prompt_ids, traces[0].output_ids) for n in range(copies)
    ]
    rows, report = exported([*traces, *doubled], parts=1, dedupe=True)
    contents = [(tuple(row.input_ids), tuple(row.loss_mask)) for row in rows.values()]
    assert len(set(contents)) == len(contents)
    every = {(tuple(p.input_ids), tuple(p.loss_mask)) for p in map(plain, traces)}
    assert set(contents) == every
    assert report.left_out.get("doubled", 0) == len(traces) + copies - len(every)


def test_a_mask_is_the_same_however_its_stretches_lie() -> None:
    traces = [
        a_trace("c0/0", 0, [1], [2, 3, STOP]),
        a_trace("c1/0", 0, [1], [2, 3, STOP], reasoning_start=2, reasoning_end=2),
    ]
    rows, report = exported(traces, parts=1, mask="no-reasoning", dedupe=True)
    assert rows == {"c0/0/0": plain(traces[0])}
    assert report.left_out == {"doubled": 1}


def test_doubles_are_found_over_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.export.exporting._BATCH_BYTES", 64)
    monkeypatch.setattr("eyas.store.table.Table.may_wait", property(lambda _: 3))
    traces = [a_trace(f"c{n}/0", 0, [n % 40], [1, STOP]) for n in range(200)]
    rows, report = exported(traces, parts=1, dedupe=True)
    assert list(rows) == [f"c{n}/0/0" for n in range(40)]  # the first ones
    assert report.left_out == {"doubled": 160}


def test_refused_rows_are_counted_and_not_there(tmp_path: Path) -> None:
    refused = Rejected("r/0/0", "r", 0, 0, "k", "budget", "more ids came", [1], [2])
    run = make_run(tmp_path / "run", [a_trace("c/0", 0, [1], [STOP]), refused])
    report = export_run(run, to="jsonl", out=tmp_path / "x.jsonl")
    assert (report.rows, report.rejected) == (1, 1)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"only": "length"}, "--only length is not known; there is stop"),
        ({"on_longer": "wrap", "max_length": 5}, "--on-longer wrap is not known"),
        ({"on_longer": "cut"}, "--on-longer cut needs --max-length"),
        ({"mask": "none"}, "--mask none is not known; there is all, last-turn, no-reasoning"),
        ({"drop_marked": ("lop",)}, "--drop-marked lop is not known; there is truncated"),
        ({"columns": ("turn", "ids")}, "--columns ids is not known; there is conversation_id"),
        ({"columns": ("turn", "marks", "turn")}, "--columns names turn twice"),
        ({"max_length": 0}, "--max-length 0: it must be 1 or more"),
        ({"shuffle": 2**64}, "--shuffle 18446744073709551616: a seed has at most 64 bits"),
        ({"shuffle": -(2**63) - 1}, "at most 64 bits"),
        ({"shards": 0}, "--shards 0: it must be 1 or more"),
        ({"shards": 10**6}, "at most"),
        ({"min_supervised": 0}, "--min-supervised-tokens 0"),
        ({"min_supervised": 9, "max_length": 5}, "no row could have so many"),
        ({"split": (("a b", 1.0),)}, "'a b' is no name"),
        ({"split": (("a", 0.5),)}, "add up to 0.5, not to 1"),
        ({"split": (("a", 0.5), ("a", 0.5))}, "--split names a twice"),
        ({"split": (("a", 1.5), ("b", -0.5))}, "the share of a is 1.5"),
    ],
)
def test_a_bad_choice_is_one_sentence(choices: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExportOptions(**choices)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, -(2**63)])
def test_the_greatest_and_the_least_seed(seed: int) -> None:
    traces = [a_trace(f"c{n}/0", 0, [n], [1, STOP]) for n in range(50)]
    rows, _ = exported(traces, shuffle=seed)
    assert set(rows) == {trace.id for trace in traces}


def test_shares_as_they_are_written() -> None:
    assert parse_split("train:0.98, eval:0.02") == (("train", 0.98), ("eval", 0.02))
    for text in ("train", "train:", "train:x", "train:0.9", ""):
        with pytest.raises(ConfigError, match="--split"):
            parse_split(text)
