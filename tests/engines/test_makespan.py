"""How close the pool comes to the best that was possible, in virtual time.

Rows have log-normal lengths; nothing is known of them but where a test says so.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Iterable

import pytest

from eyas.engines import Request
from eyas.engines.pool import Pool
from virtual import TOKENS_A_SECOND, Slots, run_virtually, server_of

SLOTS = 16
Event = tuple[float, Callable[[list[Slots], Pool], None]]


def lengths(rows: int, seed: int) -> list[float]:
    chosen = random.Random(seed)
    return [min(6.0, 0.6 * chosen.lognormvariate(0.0, 1.0)) for _ in range(rows)]


def first_come(seconds: Iterable[float], servers: int) -> float:
    """The makespan of the given order, each row to the slot that is free first."""
    free = [0.0] * SLOTS * servers
    for length in seconds:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


async def capture(
    engines: list[Slots],
    seconds: list[float],
    events: Iterable[Event] = (),
    order: list[int] | None = None,
    late: int = 0,
) -> float:
    """Send all rows through a pool as a capture does; when the last one was answered.

    Lengths are known to the pool where an `order` is given, the longest first; slow servers are
    then given the shortest. The last `late` engines are none of the first servers.
    """
    loop = asyncio.get_running_loop()
    known = order is not None
    rows = list(range(len(seconds))) if order is None else order
    left = rows[::-1]
    unsent = sum(seconds) * TOKENS_A_SECOND
    answered = 0

    def tokens_left(mean: float) -> float:
        if known:
            return unsent
        return mean * (len(seconds) - answered - pool.in_flight)

    pool = Pool([server_of(engine) for engine in engines[: len(engines) - late]], left=tokens_left)

    async def work() -> None:
        while left:
            await ask(left.pop())

    async def ask(row: int) -> None:
        nonlocal answered, unsent
        tokens = seconds[row] * TOKENS_A_SECOND if known else None
        unsent -= tokens or 0.0
        got = await pool.generate(Request([row], 9, 0), tokens=tokens)
        assert got.output_ids[0] == row
        answered += 1

    async def occupy() -> None:
        while known and left:
            places, tokens = pool.spare
            while places and left and seconds[left[0]] * TOKENS_A_SECOND <= tokens:
                workers.append(asyncio.create_task(ask(left.pop(0))))
                places -= 1
            await asyncio.sleep(0.1)

    async def tend() -> None:
        while True:
            while len(workers) < pool.capacity:
                workers.append(asyncio.create_task(work()))
            pool.foresee()
            await asyncio.sleep(1.0)

    workers: list[asyncio.Task[None]] = []
    around = [asyncio.create_task(tend()), asyncio.create_task(occupy())]
    for at, do in events:
        loop.call_at(at, do, engines, pool)
    await asyncio.sleep(0)
    while any(not worker.done() for worker in workers):
        await asyncio.wait(workers)
    for task in around:
        task.cancel()
    end = loop.time()
    assert answered == len(seconds)
    assert all(engine.most_running <= SLOTS for engine in engines)
    assert pool.in_flight == pool.waiting == 0
    await pool.close()
    return end


def engines_of(seconds: list[float], *paces: float) -> list[Slots]:
    return [Slots(f"http://{n}", seconds, slots=SLOTS, pace=pace) for n, pace in enumerate(paces)]


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_with_nothing_known_no_place_is_ever_free(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = lengths(30 * SLOTS * servers, seed=1)
    end = run_virtually(monkeypatch, capture(engines_of(seconds, *[1.0] * servers), seconds))
    assert end <= 1.001 * first_come(seconds, servers)


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_with_known_lengths_the_end_is_even(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = lengths(30 * SLOTS * servers, seed=2)
    longest_first = sorted(range(len(seconds)), key=lambda row: -seconds[row])
    engines = engines_of(seconds, *[1.0] * servers)
    end = run_virtually(monkeypatch, capture(engines, seconds, order=longest_first))
    assert end <= 1.01 * sum(seconds) / SLOTS / servers


@pytest.mark.parametrize(("pace", "known"), [(10.0, False), (3.0, False), (10.0, True)])
def test_a_slower_server_does_not_decide_the_end(
    pace: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = lengths(140 * SLOTS, seed=3)
    order = sorted(range(len(seconds)), key=lambda row: -seconds[row]) if known else None
    engines = engines_of(seconds, 1.0, pace)
    end = run_virtually(monkeypatch, capture(engines, seconds, order=order))
    least = sum(seconds) / SLOTS / (1 + 1 / pace)
    assert end <= (1.02 if known else 1.10) * least
    assert len(engines[1].begun) > 0.5 * len(seconds) / (1 + pace)  # and is made use of


def test_a_slow_server_is_given_the_short_rows_of_a_short_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few short ones go first, so that it is known to be slow before long ones wait for it."""
    seconds = lengths(32 * SLOTS, seed=8)
    longest = sorted(range(len(seconds)), key=lambda row: -seconds[row])
    tasters = longest[len(longest) * 3 // 4 :][:16]
    order = tasters + [row for row in longest if row not in tasters]
    engines = engines_of(seconds, 1.0, 10.0)
    end = run_virtually(monkeypatch, capture(engines, seconds, order=order))
    assert end <= 1.08 * sum(seconds) / SLOTS / 1.1
    assert len(engines[1].begun) > SLOTS


def test_one_slow_server_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = lengths(8 * 70 * SLOTS, seed=4)
    engines = engines_of(seconds, *[1.0] * 7, 10.0)
    end = run_virtually(monkeypatch, capture(engines, seconds))
    assert end <= 1.10 * sum(seconds) / SLOTS / 7.1


def test_a_server_that_joins_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = lengths(140 * SLOTS, seed=5)
    both = sum(seconds) / SLOTS / 2
    joins: Event = (both / 2, lambda engines, pool: pool.add(server_of(engines[1])))
    engines = engines_of(seconds, 1.0, 1.0)
    end = run_virtually(monkeypatch, capture(engines, seconds, [joins], late=1))
    assert end <= 1.10 * 1.25 * both


def test_a_server_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = lengths(140 * SLOTS, seed=6)
    both = sum(seconds) / SLOTS / 2

    def back(engines: list[Slots], _: Pool) -> None:
        engines[1].up = True

    events: list[Event] = [(both / 4, lambda engines, _: engines[1].go()), (3 * both / 4, back)]
    end = run_virtually(monkeypatch, capture(engines_of(seconds, 1.0, 1.0), seconds, events))
    assert end <= 1.10 * 1.25 * both
