"""Packed ids: they equal the lists that they were made of, and nothing else gets in."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.ids import Ids, as_json, as_list, first_bad, pack, read_object

INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(INT32, max_size=30)


def packed(ids: list[int]) -> Ids:
    found = pack(ids)
    assert found is not None
    return found


@given(IDS, IDS, st.integers(-40, 40), st.integers(-40, 40))
def test_packed_ids_are_what_they_were_made_of(
    ids: list[int], other: list[int], start: int, stop: int
) -> None:
    ours = packed(ids)
    assert ours == ids and ids == ours and ours == packed(ids)
    assert (ours == packed(other)) == (ids == other) == (ours == other)
    assert ours != tuple(ids) and ours != ""
    assert list(ours) == as_list(ours) == ids
    assert len(ours) == len(ids) and bool(ours) == bool(ids)
    assert ours[start:stop] == ids[start:stop]
    assert [ours[at] for at in range(len(ids))] == ids
    assert ours + other == ids + other
    assert repr(ours) == repr(ids)
    assert pack(ours) is ours and isinstance(ours, Sequence)
    assert orjson.dumps({"ids": ours}, as_json) == orjson.dumps({"ids": ids})


@pytest.mark.parametrize("item", [1.0, True, False, None, "1", 2**31, -(2**31) - 1, 2**70, [1]])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_no_id_is_not_packed(item: object, at: int) -> None:
    ids: list[object] = [7, 1, 0]
    ids.insert(at, item)
    assert pack(ids) is None  # type: ignore[arg-type]


@given(st.lists(st.integers(-5, 12) | st.booleans() | st.floats(0, 3), max_size=8))
def test_the_first_bad_id(items: list[object]) -> None:
    good = [type(item) is int and 0 <= item < 10 for item in items]  # type: ignore[operator]
    assert first_bad(items, 10) == (None if all(good) else good.index(False))


def test_names_that_are_not_asked_for_and_nulls_stay() -> None:
    raw = b'{"output_ids":null,"prompt_token_ids":[],"others":[1,2]}'
    read = read_object(raw, ("output_ids", "prompt_token_ids"))
    assert read == {"output_ids": None, "prompt_token_ids": [], "others": [1, 2]}
    assert type(read["others"]) is list and type(read["prompt_token_ids"]) is Ids
    assert read_object(b'{"output_ids":[1,true]}', ("output_ids",)) is None
