"""Millions of small entries, each found by 64 or 128 bits, at 20 bytes an entry.

Invariants: the columns are sorted by the first two, and no pair of these is there twice; entries
are put in where they belong by moving others apart, so that memory never holds the table twice.
Numbers come and go by the thousand, since NumPy takes as long for one as for a hundred.

A Python dict takes 150 bytes and more for the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Values = NDArray[np.uint32]

_MOVED = 1 << 16
"""Entries that are moved at a time."""


class Table:
    """Entries ``(first, second) -> value`` of 64, 64 and 32 bits."""

    def __init__(self) -> None:
        self.first: Words = np.empty(0, np.uint64)
        self.second: Words = np.empty(0, np.uint64)
        self.values: Values = np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def may_wait(self) -> int:
        """How many new entries may be gathered in a dict before `add` is worth its while."""
        return max(1 << 14, len(self) >> 6)

    def find(self, first: Words, second: Words | None = None) -> NDArray[np.int64]:
        """Where entries stand, or -1 for those that are not there.

        Args:
            first: what to look for.
            second: likewise; None for the first entry with that `first`.
        """
        if not len(self.first):
            return np.full(len(first), -1, np.int64)
        at = np.searchsorted(self.first, first)
        last = len(self.first) - 1
        there = self.first[np.minimum(at, last)] == first
        there &= at <= last
        if second is not None:
            other = there & (self.second[np.minimum(at, last)] != second)
            while other.any():  # two entries with the same 64 bits: next to never
                at[other] += 1
                there &= at <= last
                there &= self.first[np.minimum(at, last)] == first
                other = there & (self.second[np.minimum(at, last)] != second)
        return np.where(there, at, -1)

    def add(self, first: Words, second: Words, values: Values) -> NDArray[np.bool_]:
        """Sort entries in; returns which were new. Of those with the same key the first counts."""
        order = np.lexsort((second, first))
        first, second, values = first[order], second[order], values[order]
        new = np.ones(len(first), np.bool_)
        new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
        new &= self.find(first, second) < 0
        self._insert(first[new], second[new], values[new])
        were_new = np.empty_like(new)
        were_new[order] = new
        return were_new

    def _insert(self, first: Words, second: Words, values: Values) -> None:
        """Move the entries apart, from the last to the first, and put new ones between them."""
        old, count = len(self.first), len(first)
        if not count:
            return
        places = np.searchsorted(self.first, first)
        for number in np.flatnonzero(self.find(first) >= 0):  # the same 64 bits: next to never
            while places[number] < old and (
                self.first[places[number]] == first[number]
                and self.second[places[number]] < second[number]
            ):
                places[number] += 1
        self.first = _longer(self.first, count)
        self.second = _longer(self.second, count)
        self.values = _longer(self.values, count)
        columns: tuple[NDArray[Any], ...] = (self.first, self.second, self.values)
        end, least = old, int(places[0])
        while end > least:
            begin = max(least, end - _MOVED)
            inside = places[np.searchsorted(places, begin) : np.searchsorted(places, end)] - begin
            before = int(np.searchsorted(places, begin))
            shift = np.cumsum(np.bincount(inside, minlength=end - begin)) + before
            target = np.arange(begin, end) + shift
            for column in columns:
                column[target] = column[begin:end].copy()
            end = begin
        target = places + np.arange(count)
        for column, new in zip(columns, (first, second, values), strict=True):
            column[target] = new


def _longer(column: NDArray[Any], count: int) -> NDArray[Any]:
    """A column with room for `count` more entries at its end.

    The room behind it is doubled where there is not enough; the system gives memory for it only
    as it is used.
    """
    whole = column if column.base is None else column.base
    used = len(column)
    if used + count > len(whole):
        whole = np.empty(max(2 * used, used + count), column.dtype)
        whole[:used] = column
    return whole[: used + count]


def words_of(keys: bytes | bytearray) -> tuple[Words, Words]:
    """Keys of 16 bytes as two columns."""
    pairs = np.frombuffer(keys, "<u8").reshape(-1, 2).astype(np.uint64)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
