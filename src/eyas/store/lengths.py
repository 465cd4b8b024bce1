"""How long the answers of a run were, by conversation.

Invariants: memory is some 24 bytes a conversation, and no id is made a Python object; a run is
read as far as it was captured, while it is being written too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import DamagedRun
from eyas.store.journal import read_segment, segments
from eyas.store.parts import REJECTED, TRACES, part_name, parts, read_batches

_COLUMNS = ("conversation_id", "key", "sample", "output_ids")
_BATCH = 512
"""Rows that are read together: with long answers some 30 MB."""
_WORD = (1 << 64) - 1

_Row = tuple[str, str, int, int]
"""Conversation id, key in hex digits, sample, output tokens."""


@dataclass(slots=True)
class _Rows:
    """Rows as they were read, one after the other."""

    names: array[int] = field(default_factory=lambda: array("Q"))
    keys: array[int] = field(default_factory=lambda: array("Q"))
    samples: array[int] = field(default_factory=lambda: array("Q"))
    tokens: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, name: str, key: str, sample: int, tokens: int) -> None:
        self.names.append(_name_word(name))
        self.keys.append(int(key[:16], 16))
        self.samples.append(sample)
        self.tokens.append(tokens)


class Lengths:
    """Output tokens of conversations: of all turns of a sample, the longest sample's."""

    def __init__(self, rows: _Rows | None = None) -> None:
        rows = rows or _Rows()
        keys, names, samples, tokens = (
            np.frombuffer(column, np.uint64) if len(column) else np.empty(0, np.uint64)
            for column in (rows.keys, rows.names, rows.samples, rows.tokens)
        )
        threads = keys ^ (samples << np.uint64(32))
        _, first, of_row = np.unique(threads, return_index=True, return_inverse=True)
        sums = np.bincount(of_row, weights=tokens, minlength=len(first)).astype(np.uint64)
        self._by_key = _longest(keys[first], sums)
        self._by_name = _longest(names[first], sums)

    @classmethod
    def of_run(cls, run: Path) -> Lengths:
        """Read a run's rows, the refused ones with an output too.

        Raises:
            DamagedRun: a part cannot be read.
        """
        rows = _Rows()
        for name, key, sample, tokens in _rows(run):
            if tokens:
                rows.add(name, key, sample, tokens)
        return cls(rows)

    def __len__(self) -> int:
        return len(self._by_key[0])

    def of(self, key: bytes, given_id: str | None) -> int | None:
        """The length of a conversation, by its key, else by the id that the input gave it."""
        found = _find(self._by_key, int.from_bytes(key[:8], "big"))
        if found is None and given_id is not None:
            found = _find(self._by_name, _name_word(given_id))
        return found


_Sorted = tuple["array[int]", "array[int]"]
"""Words in rising order, and the tokens of each."""


def _longest(words: Any, tokens: Any) -> _Sorted:
    """The greatest number of tokens of each word."""
    order = np.lexsort((tokens, words))
    words, tokens = words[order], tokens[order]
    last = np.append(words[1:] != words[:-1], True)[: len(words)]
    return array("Q", words[last].tobytes()), array("Q", tokens[last].tobytes())


def _find(pairs: _Sorted, word: int) -> int | None:
    words, tokens = pairs
    at = bisect_left(words, word)
    return tokens[at] if at < len(words) and words[at] == word else None


def _name_word(name: str) -> int:
    return hash(name) & _WORD


def _rows(run: Path) -> Iterator[_Row]:
    """All rows, those that are not sealed yet too."""
    live = segments(run / "journal")
    for folder, kind in ((TRACES, "T"), (REJECTED, "R")):
        sealed = parts(run, folder)
        for path in sealed:
            yield from _part_rows(path)
        for number, segment in live:
            part = run / folder / part_name(number)
            if part in sealed:
                continue
            try:
                for line in read_segment(segment, kind):
                    row = line.record()
                    tokens = len(row["output_ids"] or ())
                    yield row["conversation_id"], row["key"], row["sample"], tokens
            except FileNotFoundError:  # sealed since we looked
                if part.exists():
                    yield from _part_rows(part)


def _part_rows(path: Path) -> Iterator[_Row]:
    import pyarrow.compute as pc

    for batch in read_batches(path, _COLUMNS, batch_size=_BATCH):
        if set(_COLUMNS) - set(batch.schema.names):
            raise DamagedRun(f"{path} does not have the columns of a run's part")
        names, keys, samples, outputs = (batch.column(name) for name in _COLUMNS)
        tokens = pc.fill_null(pc.list_value_length(outputs), 0)
        columns = (names, keys, samples, tokens)
        yield from zip(*(column.to_pylist() for column in columns), strict=True)
