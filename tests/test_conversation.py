"""Keys and seeds: functions of content alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eyas.conversation import (
    Conversation,
    conversation_key,
    digest,
    nth_key,
    row_key,
    seed_for,
)

KEY = bytes(range(16))
SMALL = st.integers(0, 2**31)


def test_keys_stay_what_they_are() -> None:
    """Another hash would make every run that exists begin anew."""
    chat = [{"role": "user", "content": "Zürich"}]
    assert conversation_key("7", chat).hex() == "267ff29ee0c4921dd74ad65791a936ca"
    assert row_key(KEY, 1, 2).hex() == "c9876f397ca3beac82804ba9f3b7e6d1"
    assert seed_for(0, KEY, 0, 0) == 1187758298


def test_the_order_of_a_messages_names_plays_no_part() -> None:
    one = [{"role": "user", "content": "x"}]
    assert conversation_key("a", one) == conversation_key("a", [{"content": "x", "role": "user"}])


def test_what_counts_in_a_key() -> None:
    base = conversation_key("a", [{"role": "user", "content": "x"}])
    others = {
        conversation_key(None, [{"role": "user", "content": "x"}]),
        conversation_key("", [{"role": "user", "content": "x"}]),
        conversation_key("b", [{"role": "user", "content": "x"}]),
        conversation_key("a", [{"role": "user", "content": "x "}]),
        conversation_key("a", [{"role": "system", "content": "x"}]),
        conversation_key("a", [1, 2]),
    }
    assert len({base, *others}) == 7


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_borders_between_parts_count(one: list[bytes], other: list[bytes]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_duplicates_have_keys_of_their_own() -> None:
    assert nth_key(KEY, 0) == KEY
    assert len({nth_key(KEY, n) for n in range(50)}) == 50


@given(SMALL, SMALL, SMALL, SMALL)
def test_units_are_told_apart(sample: int, turn: int, other: int, later: int) -> None:
    same = (sample, turn) == (other, later)
    assert (row_key(KEY, sample, turn) == row_key(KEY, other, later)) == same


@given(st.integers(-(2**70), 2**70), SMALL, SMALL)
def test_seeds_are_31_bits(base: int, sample: int, turn: int) -> None:
    assert 0 <= seed_for(base, KEY, sample, turn) < 2**31


def test_seeds_differ_by_each_of_what_they_are_made_of() -> None:
    seeds = {
        seed_for(base, key, sample, turn)
        for base in (0, 1)
        for key in (KEY, KEY[::-1])
        for sample in (0, 1)
        for turn in (0, 1)
    }
    assert len(seeds) == 16


def test_ready_made_ids_are_one_turn() -> None:
    assert Conversation(KEY, None, turns=[], prompt_ids=[1]).n_turns == 1
    assert Conversation(KEY, None, turns=[[], []]).n_turns == 2
