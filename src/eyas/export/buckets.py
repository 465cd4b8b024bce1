"""Rows put in the order of 64-bit keys, more of them than memory holds.

Invariants: every row that was added comes out once, in the order of the keys (rows with the same
key in the order in which they were added); memory holds one bucket and what waits to be written,
however many rows there are. Keys are hashes, so buckets are about equally large.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BUCKET_BYTES = 48 * 2**20
"""About how large a bucket is; sorting one takes three times as much."""
_MOST_BITS = 12
_KEY = pa.field("bucket_key", pa.uint64())
_SLICE_BYTES = 8 * 2**20


class Buckets:
    """Batches of rows with a key a row; `sorted` gives them back."""

    def __init__(self, folder: Path, expected_bytes: int, *, bucket_bytes: int | None = None):
        """
        Args:
            folder: where rows wait that are too many for memory.
            expected_bytes: how much will be added, about.
            bucket_bytes: `BUCKET_BYTES` where None.
        """
        self._folder = folder
        self._bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        wanted = -(-expected_bytes // self._bytes)
        self._bits = min(_MOST_BITS, max(0, (wanted - 1).bit_length()))
        self._waiting: dict[int, list[Any]] = {}
        self._held = 0

    def add(self, keys: NDArray[np.uint64], rows: Any) -> None:
        """Add a batch."""
        if not len(rows):
            return
        schema = rows.schema.append(_KEY)
        rows = pa.RecordBatch.from_arrays([*rows.columns, pa.array(keys)], schema=schema)
        if not self._bits:
            self._waiting.setdefault(0, []).append(rows)
            return
        bucket = (keys >> np.uint64(64 - self._bits)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        rows, bucket = rows.take(pa.array(order)), bucket[order]
        edges = [0, *(np.flatnonzero(np.diff(bucket)) + 1).tolist(), len(bucket)]
        for start, end in pairwise(edges):
            self._waiting.setdefault(int(bucket[start]), []).append(rows[start:end])
        self._held += rows.nbytes
        if self._held > self._bytes:
            self._put_down()

    def sorted(self) -> Iterator[tuple[NDArray[np.uint64], Any]]:
        """The keys and rows of one bucket after the other, each in order."""
        if self._bits:
            self._put_down()
        for number in range(1 << self._bits):
            batches = self._waiting.pop(number, []) if not self._bits else self._read(number)
            if not batches:
                continue
            table = pa.Table.from_batches(batches)
            del batches
            keys = np.concatenate([c.to_numpy() for c in table.column(_KEY.name).chunks])
            order = np.argsort(keys, kind="stable")
            table = table.drop_columns([_KEY.name]).combine_chunks().take(pa.array(order))
            (rows,) = table.combine_chunks().to_batches()
            del table
            yield keys[order], rows

    def _path(self, number: int) -> Path:
        return self._folder / f"bucket-{number:04d}.arrows"

    def _put_down(self) -> None:
        """Write all that is held, a stream of its own behind what a bucket's file holds."""
        for number, batches in self._waiting.items():
            table = pa.Table.from_batches(batches).combine_chunks()
            with self._path(number).open("ab") as file, pa.ipc.new_stream(file, table.schema) as s:
                s.write_table(table)
        self._waiting.clear()
        self._held = 0

    def _read(self, number: int) -> list[Any]:
        path = self._path(number)
        if not path.exists():
            return []
        batches: list[Any] = []
        size = path.stat().st_size
        with path.open("rb") as file:
            while file.tell() < size:
                with pa.ipc.open_stream(file) as stream:
                    batches += list(stream)
        path.unlink()
        return batches


def slices(rows: Any, most_bytes: int = _SLICE_BYTES) -> Iterator[Any]:
    """A batch in pieces of about so many bytes, not copied."""
    step = max(1, int(len(rows) * most_bytes / max(rows.nbytes, 1)))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
