"""The table is a dict that takes a tenth of the room."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.store import table as table_module
from eyas.store.table import Table, words_of

ENTRY = st.tuples(
    st.one_of(st.integers(0, 2), st.integers(2**64 - 3, 2**64 - 1), st.integers(0, 2**64 - 1)),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
"""Few keys of 64 bits, so that entries meet that share them."""
BATCHES = st.lists(st.lists(ENTRY, max_size=40), max_size=6)


def columns(entries: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first, second, values = zip(*entries, strict=True) if entries else ((), (), ())
    return np.array(first, np.uint64), np.array(second, np.uint64), np.array(values, np.uint32)


@pytest.mark.parametrize("moved", [1, 3, 1 << 16])
@given(batches=BATCHES, others=st.lists(ENTRY, max_size=9))
def test_it_holds_what_a_dict_holds(
    moved: int, batches: list[list[tuple[int, int, int]]], others: list[tuple[int, int, int]]
) -> None:
    """Whatever is added in whatever portions: the first of two with the same key counts."""
    table, model = Table(), dict[tuple[int, int], int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "_MOVED", moved)
        for entries in batches:
            expected = []
            for first, second, value in entries:
                expected.append((first, second) not in model)
                model.setdefault((first, second), value)
            assert table.add(*columns(entries)).tolist() == expected
    assert len(table) == len(model)
    rows = list(zip(table.first.tolist(), table.second.tolist(), strict=True))
    assert all(a < b for a, b in pairwise(rows))
    asked = [(first, second, 0) for first, second in model] + others
    first, second, _ = columns(asked)
    for (a, b, _), at in zip(asked, table.find(first, second).tolist(), strict=True):
        assert (table.values[at] if at >= 0 else None) == model.get((a, b))
    for (a, _, _), at in zip(asked, table.find(first).tolist(), strict=True):
        least = min((pair for pair in model if pair[0] == a), default=None)
        assert (rows[at] if at >= 0 else None) == least


def test_an_entry_takes_20_bytes() -> None:
    table = Table()
    chance = np.random.default_rng(1)
    for _ in range(20):
        words = chance.integers(0, 2**64, (2, 10_000), np.uint64)
        table.add(words[0], words[1], np.zeros(10_000, np.uint32))
    used = table.first.nbytes + table.second.nbytes + table.values.nbytes
    assert used == 20 * len(table) == 20 * 200_000


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_keys_are_two_words(keys: list[bytes]) -> None:
    first, second = words_of(b"".join(keys))
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    assert [a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in pairs] == keys
