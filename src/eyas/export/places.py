"""Where a row goes: its split, its file, and its place in a random order.

Invariants: all rows of a conversation are in one split, whatever else is in the run; each row is
in one file; a shuffled order depends on the rows and the seed alone, not on the run's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.export.buckets import Buckets, slices
from eyas.export.forms import ONLY_SPLIT, Sink
from eyas.export.rows import filtered, mixed, words

Split = Sequence[tuple[str, float]]


def shuffled(batches: Iterable[Any], seed: int, buckets: Buckets) -> Iterator[Any]:
    """Rows in a random order: that of a hash of seed, conversation, sample and turn."""
    for rows in batches:
        place = (rows.column(name).to_numpy() for name in ("sample", "turn"))
        first, second = words(rows)
        buckets.add(mixed(np.full(1, seed), first, second, *place), rows)
    for _, rows in buckets.sorted():
        yield from slices(rows)


def split_of(rows: Any, split: Split) -> NDArray[np.int64]:
    """Which split each row is in.

    The last 8 bytes of its conversation's key, little-endian, as a share of 2**64; the splits
    take the shares in their order. (``--shard`` looks at the first 8 bytes.)
    """
    ends = np.cumsum([share for _, share in split])[:-1]
    _, second = words(rows)
    found: NDArray[np.int64] = np.searchsorted(ends, second / 2.0**64, side="right")
    return found


def by_split(rows: Any, split: Split) -> Iterator[tuple[str, Any]]:
    """A batch, parted by split."""
    if not split:
        yield ONLY_SPLIT, rows
        return
    number = split_of(rows, split)
    for at, (name, _) in enumerate(split):
        if (chosen := number == at).any():
            yield name, filtered(rows, chosen)


class Shards:
    """The files of one split: row i of the split goes to file i modulo their number."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._rows = 0

    def write(self, rows: Any) -> None:
        """Write a batch."""
        n = len(self._sinks)
        if n == 1:
            self._sinks[0].write(rows)
            return
        number = (self._rows + np.arange(len(rows))) % n
        self._rows += len(rows)
        for at, sink in enumerate(self._sinks):
            if (chosen := number == at).any():
                sink.write(filtered(rows, chosen))
