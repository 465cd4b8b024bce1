"""Rows of training data as Arrow columns: sequences of ids, and which of them are supervised.

Invariant: a row's supervised ids are output ids of the traces that it is made of, each at most
once; every other id is a prompt's. Which they are is told by spans, two numbers each, so that a
choice among them costs nothing an id; a mask is made of them when it is written.

Nothing here makes a Python object of an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Numbers = NDArray[Any]

IDS = pa.list_(pa.field("element", pa.int32()))
"""The type of both list columns."""
OWN = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("key", pa.string()),
        pa.field("sample", pa.int32()),
        pa.field("turn", pa.int32()),
        pa.field("turns", pa.int32()),
        pa.field("prompt", pa.int32()),
        pa.field("apart", pa.int64()),
        pa.field("complete", pa.bool_()),
        pa.field("input_ids", IDS),
        pa.field("spans", IDS),
    ]
)
"""What every batch of rows has. ``turns`` is how many traces a row is made of, ``prompt`` the
length of the last one's prompt, ``apart`` how many ids they have, each by itself, ``complete``
whether the model ended the last one, ``spans`` where the supervised stretches begin and end (start,
end, start, end, ...). ``turn`` is the last one's."""
CARRIED = "run."
"""Columns of the run that go along are called so with their own name behind it."""
NEEDED = (
    "id", "key", "sample", "turn", "prompt_ids", "output_ids", "finish_reason", "marks",
    "reasoning_start", "reasoning_end",
)  # fmt: skip
"""The columns of a run that rows are made of."""
MOST_IDS = 2**31 - 1
"""Arrow's lists count in 32 bits."""


def rows_of(traces: Any, *, reasoning: bool = True, carry: Sequence[str] = ()) -> Any:
    """Traces as rows, one each.

    Args:
        traces: a record batch with the columns `NEEDED` and those of `carry`.
        reasoning: False to leave the ids between the thinking markers unsupervised.
        carry: columns of the run that go along.
    """
    prompts, outputs = traces.column("prompt_ids"), traces.column("output_ids")
    begin = np.diff(numbers(prompts.offsets))
    end = begin + np.diff(numbers(outputs.offsets))
    columns = {
        "id": traces.column("id"),
        "key": traces.column("key"),
        "sample": traces.column("sample"),
        "turn": traces.column("turn"),
        "turns": pa.array(np.ones(len(traces), np.int32)),
        "prompt": pa.array(begin.astype(np.int32)),
        "apart": pa.array(end.astype(np.int64)),
        "complete": pa.array(is_complete(traces)),
        "input_ids": _joined(prompts, outputs),
        "spans": _spans_of(traces, begin, end, reasoning),
    }
    more = [traces.column(name) for name in carry]
    schema = schema_with([traces.schema.field(name) for name in carry])
    return pa.RecordBatch.from_arrays([*columns.values(), *more], schema=schema)


def schema_with(carried: Sequence[Any]) -> Any:
    """The schema of rows that carry these fields of the run along."""
    return pa.schema([*OWN, *(field.with_name(CARRIED + field.name) for field in carried)])


def numbers(array: Any) -> Numbers:
    """An Arrow array without nulls as numpy's, not copied."""
    found: Numbers = array.to_numpy(zero_copy_only=True)
    return found


def is_complete(traces: Any) -> NDArray[np.bool_]:
    """Which traces the model ended itself."""
    stopped = pc.equal(traces.column("finish_reason"), "stop").to_numpy(zero_copy_only=False)
    found: NDArray[np.bool_] = stopped.astype(np.bool_) | has_mark(traces, ["eos_at_cap"])
    return found


def has_mark(traces: Any, names: Sequence[str] | None) -> NDArray[np.bool_]:
    """Which traces carry one of the marks (any at all where None)."""
    marks = traces.column("marks")
    ends = numbers(marks.offsets)
    flat = marks.values[ends[0] : ends[-1]]
    hit = np.ones(len(flat), np.int64)
    if names is not None:
        hit = pc.is_in(flat, value_set=pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
    counted = np.concatenate([[0], np.cumsum(hit, dtype=np.int64)])
    found: NDArray[np.bool_] = np.diff(counted[ends - ends[0]]) > 0
    return found


def _joined(prompts: Any, outputs: Any) -> Any:
    """The lists of two columns, joined row by row."""
    first, second = numbers(prompts.values), numbers(outputs.values)
    starts, ends = numbers(prompts.offsets), numbers(outputs.offsets)
    offsets = (starts - starts[0]).astype(np.int64) + (ends - ends[0])
    pieces: list[Numbers] = []
    for p0, p1, o0, o1 in zip(
        starts[:-1].tolist(), starts[1:].tolist(), ends[:-1].tolist(), ends[1:].tolist(),
        strict=True,
    ):  # fmt: skip
        pieces += (first[p0:p1], second[o0:o1])
    return list_array(offsets, np.concatenate(pieces) if pieces else np.zeros(0, np.int32))


def list_array(offsets: Numbers, values: Numbers) -> Any:
    """A column of lists of int32."""
    assert offsets[-1] <= MOST_IDS, "a batch holds more ids than Arrow's lists can count"
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(values.astype(np.int32, copy=False)), type=IDS
    )


def _spans_of(traces: Any, begin: Numbers, end: Numbers, reasoning: bool) -> Any:
    """The spans of traces: the output, or what of it lies outside the reasoning."""
    n = len(traces)
    pairs = np.empty((n, 2, 2), np.int64)
    pairs[:, 0, 0], pairs[:, 1, 1] = begin, end
    pairs[:, 0, 1] = pairs[:, 1, 0] = end
    if not reasoning:
        for at, name in enumerate(("reasoning_start", "reasoning_end")):
            column = traces.column(name)
            there = column.is_valid().to_numpy(zero_copy_only=False)
            place = np.clip(column.fill_null(0).to_numpy(zero_copy_only=False), begin, end)
            pairs[there, at, 1 - at] = place[there]
        nothing = pairs[:, 0, 1] == pairs[:, 1, 0]  # equal masks are equal spans: none ends in two
        pairs[nothing, 0, 1] = pairs[nothing, 1, 0] = end[nothing]
    return spans_array(pairs.reshape(-1, 2), np.repeat(np.arange(n), 2), n)


def spans_array(pairs: Numbers, row: Numbers, rows: int) -> Any:
    """A column of spans.

    Args:
        pairs: starts and ends; those that hold nothing are left out.
        row: which row each belongs to, in order.
        rows: how many rows there are.
    """
    held = pairs[:, 0] < pairs[:, 1]
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(2 * np.bincount(row[held], minlength=rows), out=offsets[1:])
    return list_array(offsets, pairs[held].reshape(-1))


def lengths(rows: Any) -> Numbers:
    """How many ids each row has."""
    return np.diff(numbers(rows.column("input_ids").offsets))


def span_pairs(rows: Any) -> tuple[Numbers, Numbers]:
    """All spans (start, end), and the row that each belongs to."""
    spans = rows.column("spans")
    ends = numbers(spans.offsets)
    pairs = numbers(spans.values)[ends[0] : ends[-1]].reshape(-1, 2)
    return pairs, np.repeat(np.arange(len(rows)), np.diff(ends) // 2)


def supervised(rows: Any) -> Numbers:
    """How many ids of each row are supervised."""
    pairs, row = span_pairs(rows)
    count: Numbers = np.bincount(row, weights=pairs[:, 1] - pairs[:, 0], minlength=len(rows))
    return count.astype(np.int64)


def first_supervised(rows: Any) -> Numbers:
    """Where the first supervised id of each row stands; rows have one."""
    spans = rows.column("spans")
    return numbers(spans.values)[numbers(spans.offsets)[:-1]]


def loss_mask(rows: Any, dtype: Any = np.int8) -> Numbers:
    """1 on every supervised id and 0 on the others, over all rows one after another.

    Args:
        dtype: a signed integer's (sums of bools are no sums).
    """
    starts = numbers(rows.column("input_ids").offsets)
    pairs, row = span_pairs(rows)
    steps = np.zeros(int(starts[-1] - starts[0]) + 1, np.int8)
    base = (starts[:-1] - starts[0])[row]
    steps[pairs[:, 0] + base] += 1  # no two spans begin, or end, at the same id
    steps[pairs[:, 1] + base] -= 1
    mask: Numbers = np.cumsum(steps[:-1], dtype=dtype)
    return mask


def cut(rows: Any, most: int) -> Any:
    """Rows whose ids beyond the first `most` are gone, with their supervision."""
    pairs, row = span_pairs(rows)
    kept = spans_array(np.minimum(pairs, most), row, len(rows))
    short = pc.list_slice(rows.column("input_ids"), 0, most).cast(IDS)
    gone = np.maximum(lengths(rows) - most, 0)
    complete = rows.column("complete").to_numpy(zero_copy_only=False) & (gone == 0)
    return replaced(
        rows,
        input_ids=short,
        spans=kept,
        complete=pa.array(complete),
        apart=pa.array(rows.column("apart").to_numpy() - gone),
    )


def replaced(rows: Any, **columns: Any) -> Any:
    """Rows with some of their columns exchanged."""
    return pa.RecordBatch.from_arrays(
        [columns.get(field.name, rows.column(field.name)) for field in rows.schema],
        schema=rows.schema,
    )


def filtered(rows: Any, keep: NDArray[np.bool_]) -> Any:
    """The rows that are to be kept; all of them are not copied."""
    return rows if keep.all() else rows.filter(pa.array(keep))


def words(rows: Any) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The rows' keys as two columns of 64 bits.

    Raises:
        ValueError: a key is none.
    """
    raw = bytes.fromhex("".join(rows.column("key").to_pylist()))
    pairs = np.frombuffer(raw, "<u8").astype(np.uint64)
    if len(pairs) != 2 * len(rows):
        raise ValueError("a key is not 32 hex digits long")
    return np.ascontiguousarray(pairs[::2]), np.ascontiguousarray(pairs[1::2])


def mixed(*columns: Any) -> NDArray[np.uint64]:
    """Columns of numbers as one column of 64 random-looking bits (SplitMix64's finaliser)."""
    found = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            found = found + np.asarray(column).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            found ^= found >> np.uint64(31)
    return found
