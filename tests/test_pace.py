"""Rates and the forecast: from completions, after a start, a resume, a stall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.pace import Pace, Rates
from eyas.progress import Progress, ServerProgress


def at(
    seconds: float, new: int, *, total: int = 10_000, earlier: int = 0, **more: object
) -> Progress:
    """A snapshot of a capture whose input is known, with 100 output and 10 prompt tokens a row."""
    values = {
        "done": earlier + new, "new": new, "input": total, "input_known": True, "in_flight": 8,
        "prompt_tokens": 10 * new, "output_tokens": 100 * new, "seconds": seconds, **more,
    }  # fmt: skip
    return Progress(**values)  # type: ignore[arg-type]


def run(pace: Pace, *snapshots: Progress) -> Rates:
    for snapshot in snapshots:
        rates = pace.take(snapshot)
    return rates


def test_a_steady_capture() -> None:
    rates = run(Pace(), *(at(n / 2, n) for n in range(1000)))
    assert rates.rows == pytest.approx(2, rel=0.01)
    assert rates.output_tokens == pytest.approx(200, rel=0.01)
    assert rates.prompt_tokens == pytest.approx(20, rel=0.01)
    assert rates.overall_output_tokens == pytest.approx(200, rel=0.01)
    assert rates.eta_seconds == pytest.approx((10_000 - 999) / 2, rel=0.01)
    assert rates.quiet_seconds == 0


def test_the_rate_is_that_of_the_last_minute() -> None:
    slow = [at(n, n) for n in range(600)]
    fast = [at(600 + n, 600 + 10 * n) for n in range(120)]
    rates = run(Pace(), *slow, *fast)
    assert rates.rows == pytest.approx(10, rel=0.02)
    assert rates.overall_rows == pytest.approx((600 + 1190) / 719, rel=0.02)


def test_nothing_is_foretold_before_something_was_seen() -> None:
    pace = Pace()
    assert run(pace, at(0, 0), at(0.5, 1), at(1.0, 5)).eta_seconds is None
    assert run(pace, at(1.5, 5), at(10, 50)).eta_seconds == pytest.approx(9950 / 5, rel=0.01)


def test_the_last_rows_of_a_small_capture_are_foretold() -> None:
    assert run(Pace(), at(0, 0, total=3), at(30, 1, total=3)).eta_seconds is None
    rates = run(Pace(), at(0, 0, total=2), at(30, 1, total=2))
    assert rates.eta_seconds == pytest.approx(30)
    assert run(Pace(), at(0, 0, total=2), at(30, 2, total=2)).eta_seconds == 0.0


def test_rows_of_an_earlier_capture_speed_nothing_up() -> None:
    """A continued capture meets 5,000 done rows within 20 seconds, then makes one a second."""
    pace = Pace()
    for second in range(20):
        rates = pace.take(at(second, 0, earlier=250 * second, in_flight=0))
        assert (rates.rows, rates.eta_seconds) == (0.0, None)
    rates = run(pace, *(at(20 + n, n, earlier=5000) for n in range(31)))
    assert rates.rows == pytest.approx(31 / 31, rel=0.05)
    assert rates.overall_rows == pytest.approx(1, rel=0.05)
    assert rates.eta_seconds == pytest.approx(10_000 - 5030, rel=0.05)


def test_a_stall_is_seen() -> None:
    pace = Pace()
    before = run(pace, *(at(n, 2 * n) for n in range(300)))
    assert before.eta_seconds is not None
    etas = []
    for second in range(300, 2400, 5):
        rates = pace.take(at(second, 598))
        etas.append(rates.eta_seconds)
        if second > 362:
            assert rates.output_tokens == 0.0
    assert rates.quiet_seconds == pytest.approx(2395 - 299, abs=5)
    known = [eta for eta in etas if eta is not None]
    assert known == sorted(known)  # it recedes
    assert known[100] > 10 * before.eta_seconds
    assert etas[-1] is None  # and is given up
    again = run(pace, *(at(2400 + n, 598 + 2 * n) for n in range(120)))
    assert again.eta_seconds == pytest.approx(before.eta_seconds, rel=0.1)


def test_where_lengths_are_known_the_rows_to_come_are_shorter() -> None:
    """The longest went first: a row took 100 s until now, and all that are left 500 tokens."""
    snapshots = [at(100 * n, n, output_tokens=1000 * n, output_left=500.0) for n in range(20)]
    assert run(Pace(), *snapshots).eta_seconds == pytest.approx(50)


def test_what_was_only_sent_counts_for_nothing() -> None:
    """A server that takes every request and answers none."""
    rates = run(Pace(), *(at(n, 0, in_flight=1000 + n) for n in range(100)))
    assert (rates.rows, rates.output_tokens, rates.eta_seconds) == (0.0, 0.0, None)
    assert rates.quiet_seconds == pytest.approx(99)


def test_long_answers_look_back_further_than_a_minute() -> None:
    """64 answers of ten minutes each, spread evenly: 0.1 rows a second."""
    rates = run(Pace(), *(at(n, n // 10) for n in range(1200)))
    assert rates.eta_seconds == pytest.approx((10_000 - 119) * 10, rel=0.05)


def test_an_input_whose_size_is_not_known() -> None:
    unknown = {"input_known": False, "total": 64}
    rates = run(Pace(), *(at(n, n, **unknown) for n in range(30)))  # type: ignore[arg-type]
    assert rates.eta_seconds is None  # standard input
    assert rates.rows == pytest.approx(1)
    half = {**unknown, "total": 500, "input_fraction": 0.5}
    rates = run(Pace(), *(at(n, n, **half) for n in range(31)))  # type: ignore[arg-type]
    assert rates.eta_seconds == pytest.approx(970)
    read = {**unknown, "total": 30, "input_fraction": 1.0}
    rates = run(Pace(), *(at(n, n, **read) for n in range(31)))  # type: ignore[arg-type]
    assert rates.eta_seconds is None  # nothing left as far as it was read, and more may come


def test_servers_have_rates_of_their_own_and_may_come_and_go() -> None:
    pace = Pace()
    for second in range(60):
        servers = [ServerProgress(url="a", output_tokens=50 * second)]
        if second >= 30:
            servers.append(ServerProgress(url="b", output_tokens=20 * (second - 30)))
        rates = pace.take(at(second, second, servers=servers))
    assert rates.servers["a"] == pytest.approx(50, rel=0.01)
    assert 0 < rates.servers["b"] <= 20
    rates = pace.take(at(60, 60, servers=[ServerProgress(url="b", output_tokens=0)]))
    assert rates.servers == {"b": 0.0}


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(0, 50)), max_size=60))
def test_no_figure_is_negative(steps: list[tuple[float, int]]) -> None:
    pace, seconds, new = Pace(), 0.0, 0
    for pause, rows in steps:
        seconds, new = seconds + pause, new + rows
        rates = pace.take(at(seconds, new, total=1000))
        figures = [rates.rows, rates.output_tokens, rates.overall_rows, rates.quiet_seconds]
        assert min([*figures, rates.eta_seconds or 0.0]) >= 0


def test_memory_is_bounded() -> None:
    pace = Pace()
    for n in range(20_000):
        pace.take(at(n / 2, n))
    assert len(pace._marks) < 2000
