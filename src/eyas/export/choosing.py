"""Which rows go out: choices that leave rows out or shorten them, each counted by its reason.

Invariant: every trace that came in is in a row that goes out or counted under one reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.export.options import ANY, CUT, ExportOptions
from eyas.export.report import ExportReport
from eyas.export.rows import (
    Numbers,
    cut,
    filtered,
    has_mark,
    is_complete,
    lengths,
    numbers,
    supervised,
)
from eyas.store.table import Table, words_of

Chosen = NDArray[np.bool_]


def chosen_traces(
    batches: Iterable[Any], options: ExportOptions, report: ExportReport, *, text: bool = False
) -> Iterator[Any]:
    """The traces that are exported at all; as `text` only those that have messages."""
    marks = None if ANY in options.drop_marked else options.drop_marked
    for batch in batches:
        report.read += len(batch)
        if text:
            there = batch.column("messages").is_valid().to_numpy(zero_copy_only=False)
            batch = _left(batch, there, "no_messages", report)
        if options.only == "stop":
            batch = _left(batch, is_complete(batch), "truncated", report)
        if options.drop_marked:
            batch = _left(batch, ~has_mark(batch, marks), "marked", report)
        if options.max_length is not None and options.on_longer != CUT:
            prompt, output = (
                np.diff(numbers(batch.column(name).offsets))
                for name in ("prompt_ids", "output_ids")
            )
            fits = np.less_equal(prompt + output, options.max_length)
            batch = _left(batch, fits, "too_long", report)
        if len(batch):
            yield batch


def _left(batch: Any, keep: Chosen, reason: str, report: ExportReport) -> Any:
    report.leave_out(reason, int((~keep).sum()))
    return filtered(batch, keep)


@dataclass
class Sieve:
    """What is done to rows, once they are what they are going to be."""

    options: ExportOptions
    report: ExportReport
    _seen: Table = field(default_factory=Table)
    _recent: set[bytes] = field(default_factory=set)

    def pass_on(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The rows that go out, cut where that was asked for."""
        for rows in batches:
            rows, gone = self._shorten(rows)
            rows, gone = self._leave(rows, gone, supervised(rows) > 0, "nothing_supervised")
            if self.options.min_supervised > 1:
                enough = supervised(rows) >= self.options.min_supervised
                rows, gone = self._leave(rows, gone, enough, "too_few_supervised")
            if self.options.dedupe and len(rows):
                rows, gone = self._leave(rows, gone, self._is_new(rows), "doubled")
            self.report.cut += int((gone[0] > 0).sum())
            self.report.cut_ids += int(gone[0].sum())
            self.report.cut_supervised += int(gone[1].sum())
            if len(rows):
                yield rows

    def _leave(self, rows: Any, gone: Numbers, keep: Chosen, reason: str) -> tuple[Any, Numbers]:
        if keep.all():
            return rows, gone
        turns = rows.column("turns").to_numpy()
        self.report.leave_out(reason, int(turns[~keep].sum()))
        return filtered(rows, keep), gone[:, keep]

    def _shorten(self, rows: Any) -> tuple[Any, Numbers]:
        """The rows, and how many ids and supervised ids each has lost."""
        most, before = self.options.max_length, lengths(rows)
        if self.options.on_longer != CUT or most is None or not (before > most).any():
            return rows, np.zeros((2, len(rows)), np.int64)
        ones = supervised(rows)
        rows = cut(rows, most)
        return rows, np.stack([before - lengths(rows), ones - supervised(rows)])

    def _is_new(self, rows: Any) -> Chosen:
        """Which rows were not there before; of equal ones in a batch the first is new."""
        found = [_digest(ids) for ids in _row_bytes(rows)]
        first, second = words_of(b"".join(found))
        new: Chosen = self._seen.find(first, second) < 0
        for at, name in enumerate(found):
            if name in self._recent:
                new[at] = False
            elif new[at]:
                self._recent.add(name)
        if len(self._recent) > self._seen.may_wait:
            first, second = words_of(b"".join(self._recent))
            self._seen.add(first, second, np.zeros(len(first), np.uint32))
            self._recent.clear()
        return new


def _row_bytes(rows: Any) -> Iterator[tuple[memoryview, memoryview]]:
    """The bytes of each row's ids and spans."""
    columns = [rows.column(name) for name in ("input_ids", "spans")]
    data = [memoryview(numbers(c.values).data).cast("B") for c in columns]
    ends = [(4 * numbers(c.offsets).astype(np.int64)).tolist() for c in columns]
    for at in range(len(rows)):
        ids, spans = (d[e[at] : e[at + 1]] for d, e in zip(data, ends, strict=True))
        yield ids, spans


def _digest(row: tuple[memoryview, memoryview]) -> bytes:
    ids, spans = row
    h = hashlib.blake2b(ids, digest_size=16)
    h.update(spans)
    return h.digest()
