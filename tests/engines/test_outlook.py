"""What is expected of the rest of a run, by figures given by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from eyas.engines import outlook as outlooks
from eyas.engines import server as servers
from eyas.engines.outlook import Outlook
from eyas.engines.server import Attempt, Server
from virtual import Slots, server_of

NOW = 1000.0
MEAN = 100


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (outlooks, servers):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW))


def server(url: str, token_s: float, *, answered: int = 10, slots: int = 10) -> Server:
    """One whose answers of 100 tokens took so many seconds a token."""
    made = server_of(Slots(url, [], slots=slots))
    for _ in range(answered):
        made.answered_with(Attempt(NOW - token_s * MEAN, None), MEAN)
    return made


def holding(made: Server, *ages: float, tokens: float | None = None) -> list[int]:
    """Requests that were sent so many seconds ago."""
    begin = len(made.attempts)
    for n, age in enumerate(ages, begin):
        made.attempts[n] = Attempt(NOW - age, None, tokens=tokens)
    made.held = len(made.attempts)
    return list(range(begin, begin + len(ages)))


def outlook(left: float, *all_servers: Server) -> Outlook:
    made = Outlook(all_servers, lambda mean: left)
    made.update()
    return made


def test_servers_of_about_equal_pace_are_not_told_apart() -> None:
    one, other = server("a", 0.02), server("b", 0.029)
    holding(other, 50.0, 60.0)
    assert outlook(0.0, one, other).late() == []
    assert (one.most_tokens, other.most_tokens) == (math.inf, math.inf)


def test_a_slow_server_gets_rows_as_long_as_there_is_work_enough() -> None:
    """The fast one does 500 tokens a second; an average row takes the slow one 20 s, or 30."""
    fast, slow = server("a", 0.02), server("b", 0.2)
    outlook(500 * 40.0, fast, slow)
    assert slow.most_tokens > MEAN
    outlook(500 * 20.0, fast, slow)
    assert slow.most_tokens < MEAN
    assert slow.most_tokens == pytest.approx(20.0 / (1.5 * 0.2 - 0.02))  # shorter ones it may have
    assert fast.most_tokens == math.inf


def test_nothing_is_kept_from_a_server_where_the_end_is_not_known() -> None:
    fast, slow = server("a", 0.02), server("b", 0.2)
    holding(slow, 10.0)
    assert outlook(math.inf, fast, slow).late() == []
    assert slow.most_tokens == math.inf


def test_nothing_is_kept_from_the_only_one_that_is_up() -> None:
    fast, slow = server("a", 0.02), server("b", 0.2)
    made = outlook(0.0, fast, slow)
    assert slow.most_tokens == 0.0
    fast.up = False
    made.update()
    assert slow.most_tokens == math.inf


def test_few_answers_tell_no_pace() -> None:
    fast, slow = server("a", 0.02), server("b", 2.0, answered=3)
    assert slow.token_s is None
    outlook(0.0, fast, slow)
    assert slow.most_tokens == math.inf


def test_a_server_that_says_nothing_is_as_slow_as_its_silence() -> None:
    fast, silent = server("a", 0.02), server("b", 0.0, answered=0)
    holding(silent, *[2.5] * 10)  # a fast one would be through with 100 tokens in 2 s
    outlook(0.0, fast, silent)
    assert silent.most_tokens == math.inf
    for attempt in silent.attempts.values():
        attempt.sent -= 7.5
    made = outlook(0.0, fast, silent)
    assert silent.most_tokens == 0.0
    assert [len(numbers) for _, numbers in made.late()] == [10]


def test_one_silent_request_may_just_be_long() -> None:
    fast, silent = server("a", 0.02), server("b", 0.0, answered=0)
    holding(silent, 100.0)
    outlook(0.0, fast, silent)
    assert silent.most_tokens == math.inf


def test_rows_are_taken_back_when_others_are_through_with_them_sooner() -> None:
    """Begun 10 s ago, an average row has 50 of its 100 tokens at the slow server: 10 s more.

    Anew on the fast one it takes 2 s, behind what is left to begin there.
    """
    fast, slow = server("a", 0.02), server("b", 0.2)
    numbers = holding(slow, 10.0)
    assert outlook(500 * 14.0, fast, slow).late() == []
    assert outlook(500 * 12.0, fast, slow).late() == [(slow, numbers)]
    assert slow.attempts[numbers[0]].tokens == pytest.approx(MEAN)


def test_a_row_that_has_taken_long_is_expected_to_take_as_long_again() -> None:
    fast, slow = server("a", 0.02), server("b", 0.2)
    holding(slow, 40.0)
    ((_, (number,)),) = outlook(0.0, fast, slow).late()
    assert slow.attempts[number].tokens == pytest.approx(2 * 40.0 / 0.2)


def test_known_lengths_are_believed() -> None:
    """The row is through in 2 s where it is, and would take 10 s anew."""
    fast, slow = server("a", 0.02), server("b", 0.2)
    holding(slow, 98.0, tokens=500)
    assert outlook(0.0, fast, slow).late() == []


def test_at_the_end_as_many_are_taken_as_there_is_room_for_the_longest_first() -> None:
    fast, slow = server("a", 0.02, slots=10), server("b", 0.2)
    holding(fast, *[0.1] * 8)
    old, new, older, moved = holding(slow, 30.0, 0.0, 60.0, 90.0)
    slow.attempts[moved].moved = True  # it is on its way already
    assert outlook(0.0, fast, slow).late() == [(slow, [older, old])]
    assert new not in [older, old]
