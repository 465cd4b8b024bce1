"""Packed ids: they equal the lists that they were made of, and nothing else gets in."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.ids import IdReader, Ids, as_json, as_list, first_bad, pack

INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(INT32, max_size=30)


def packed(ids: list[int]) -> Ids:
    found = pack(ids)
    assert found is not None
    return Ids(found)


@given(IDS, IDS, st.integers(-40, 40), st.integers(-40, 40))
def test_packed_ids_are_what_they_were_made_of(
    ids: list[int], other: list[int], start: int, stop: int
) -> None:
    ours = packed(ids)
    assert ours == ids and ids == ours and ours == packed(ids)
    assert (ours == packed(other)) == (ids == other) == (ours == other)
    assert list(ours) == as_list(ours) == ids
    assert len(ours) == len(ids) and bool(ours) == bool(ids)
    assert ours[start:stop] == ids[start:stop]
    assert [ours[at] for at in range(len(ids))] == ids
    assert ours + other == ids + other
    assert repr(ours) == repr(ids)
    assert pack(ours) is ours.packed
    data = orjson.dumps(ours, default=as_json, option=orjson.OPT_SERIALIZE_NUMPY)
    assert orjson.loads(data) == ids


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(["a", "b", "text"]), JSON, max_size=3),
    st.lists(st.integers(0, 2**31 - 1), max_size=9),
)
def test_an_answer_is_read_as_any_json_reader_reads_it(
    other: dict[str, object], ids: list[int]
) -> None:
    raw = orjson.dumps({**other, "output_ids": ids})
    read = IdReader("output_ids").read(raw)
    assert read == {**other, "output_ids": ids}
    assert not ids or isinstance(read["output_ids"], Ids)


@pytest.mark.parametrize(
    "ids",
    ["[1,2.0]", "[1,true]", "[true]", "[1,null]", '[1,"2"]', "[-1,2]", "[2147483648]", "[1e3]",
     "[99999999999999999999]", "[[1,2]]", "[[1],[2]]", "[1,[2,3]]", "[{}]",
     "[1,[2],3]", "[1,[2,3],[]]", "[1,2,[ 3 ]]"],
)  # fmt: skip
def test_lists_of_anything_else_are_left_to_the_usual_reader(ids: str) -> None:
    reader = IdReader("output_ids")
    assert reader.read(f'{{"output_ids":{ids},"text":"a"}}'.encode()) is None
    assert reader.read(b'{"output_ids":[1,2]}') == {"output_ids": [1, 2]}  # and it goes on


def test_names_in_a_text_or_an_object_mislead_nobody() -> None:
    reader = IdReader("output_ids")
    told = {"text": '"output_ids":[[1]]', "meta": {"output_ids": [1, 2]}, "output_ids": [3]}
    assert reader.read(orjson.dumps(told)) == told
    nested = {"meta": {"output_ids": [[1]]}, "output_ids": [3]}
    assert reader.read(orjson.dumps(nested)) is None  # not told apart, so left to the other reader
    assert reader.read(b'{"output\\u005fids":[1,[2]]}') is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"7", b'"a"', b"null", b'{"a":1}}', b"\xff"])
def test_what_is_no_object_is_left_to_the_usual_reader(raw: bytes) -> None:
    assert IdReader("output_ids").read(raw) is None


def test_names_that_are_not_asked_for_and_nulls_stay() -> None:
    raw = b'{"output_ids":null,"prompt_token_ids":[],"others":[1,2]}'
    read = IdReader("output_ids", "prompt_token_ids").read(raw)
    assert read == {"output_ids": None, "prompt_token_ids": [], "others": [1, 2]}
    assert type(read["others"]) is list
