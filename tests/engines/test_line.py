"""Who gets which place."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines.line import Line, Waiter
from eyas.engines.server import Server
from virtual import Slots, server_of

SYSTEM = list(range(300))
"""A beginning that is long enough to matter."""


def servers_of(count: int, slots: int) -> list[Server]:
    return [server_of(Slots(f"http://{n}", [], slots=slots)) for n in range(count)]


Case = Callable[["Desk"], Coroutine[None, None, None]]


class Desk:
    """A line at which requests are made and ended by hand."""

    def __init__(self, count: int, slots: int) -> None:
        self.servers = servers_of(count, slots)
        self.line = Line(self.servers)
        self.asked: list[asyncio.Task[Server]] = []

    async def ask(self, **wish: object) -> asyncio.Task[Server]:
        task = asyncio.create_task(self.line.place(Waiter(**wish)))  # type: ignore[arg-type]
        self.asked.append(task)
        await asyncio.sleep(0)
        return task

    async def fill(self) -> None:
        for server in self.servers:
            server.held = server.slots

    async def end(self, server: Server) -> None:
        server.held -= 1
        self.line.hand_out(server)
        await asyncio.sleep(0)

    def marks(self, ids: list[int], group: bytes | None = None) -> tuple[int, ...]:
        return self.line.marks(ids, group)


def at_a_desk(count: int, slots: int) -> Callable[[Case], Callable[[], None]]:
    """A test that is given a desk with so many servers of so many places."""

    def made(case: Case) -> Callable[[], None]:
        def test() -> None:
            asyncio.run(case(Desk(count, slots)))

        test.__name__, test.__doc__ = case.__name__, case.__doc__
        return test

    return made


@at_a_desk(2, 1)
async def test_who_comes_first_is_served_first(desk: Desk) -> None:
    await desk.fill()
    first, second = await desk.ask(), await desk.ask()
    await desk.end(desk.servers[0])
    assert first.done()
    assert not second.done()
    assert len(desk.line) == 1
    await desk.end(desk.servers[1])
    assert (await first, await second) == tuple(desk.servers)


@at_a_desk(1, 2)
async def test_what_was_begun_goes_before_what_was_not(desk: Desk) -> None:
    await desk.fill()
    fresh = await desk.ask()
    begun = await desk.ask(first=True)
    await desk.end(desk.servers[0])
    assert begun.done()
    assert not fresh.done()
    fresh.cancel()


@at_a_desk(2, 8)
async def test_a_next_turn_waits_for_its_server_while_another_takes_what_is_free(
    desk: Desk,
) -> None:
    await desk.fill()
    turn = await desk.ask(near="http://0", first=True)
    fresh = await desk.ask()
    await desk.end(desk.servers[1])
    assert fresh.done()
    assert not turn.done()
    await desk.end(desk.servers[0])
    assert await turn is desk.servers[0]


@at_a_desk(2, 8)
async def test_a_next_turn_takes_any_place_before_one_stays_free(desk: Desk) -> None:
    await desk.fill()
    turn = await desk.ask(near="http://0", first=True)
    await desk.end(desk.servers[1])
    assert await turn is desk.servers[1]


@at_a_desk(2, 16)
async def test_a_server_that_many_wait_for_is_not_waited_for(desk: Desk) -> None:
    """An eighth of 16 places is 2: the third turn takes the first place there is."""
    await desk.fill()
    turns = [await desk.ask(near="http://0", first=True) for _ in range(3)]
    await desk.ask()
    await desk.end(desk.servers[1])
    assert [turn.done() for turn in turns] == [False, False, True]
    for task in desk.asked:
        task.cancel()


@at_a_desk(2, 8)
async def test_a_server_that_goes_is_not_waited_for(desk: Desk) -> None:
    await desk.fill()
    turn = await desk.ask(near="http://0", first=True)
    await desk.ask()
    desk.servers[0].up = False
    await desk.end(desk.servers[1])
    assert await turn is desk.servers[1]
    desk.asked[1].cancel()


@at_a_desk(2, 64)
async def test_prompts_that_begin_alike_go_together(desk: Desk) -> None:
    """Two documents, each asked about often: each has a server of its own."""
    where: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for n in range(200):
        document = n % 2
        marks = desk.marks([document, *SYSTEM, n])
        server = await (await desk.ask(marks=marks))
        where[document][server.url] += 1
        server.held -= n > 1  # the first of each document go on all the while
    assert [len(counted) for counted in where.values()] == [1, 1]
    assert where[0] != where[1]


@at_a_desk(2, 64)
async def test_in_steady_state_prompts_that_begin_alike_go_together_too(desk: Desk) -> None:
    """All places are taken; who waits is given a place at the server that has its beginning."""
    for document, server in enumerate(desk.servers):
        desk.line._prefixes.sent(desk.marks([document, *SYSTEM]), server)
    await desk.fill()
    waiting = [(n % 2, await desk.ask(marks=desk.marks([n % 2, *SYSTEM, n]))) for n in range(8)]
    for n in range(8):
        await desk.end(desk.servers[n % 2])
    for document, task in waiting:
        assert await task is desk.servers[document]


@at_a_desk(4, 64)
async def test_a_beginning_that_all_prompts_share_does_not_gather_them(desk: Desk) -> None:
    shares = Counter([
        (await (await desk.ask(marks=desk.marks([*SYSTEM, n])))).url for n in range(120)
    ])  # fmt: skip
    assert max(shares.values()) - min(shares.values()) <= 2


@at_a_desk(4, 64)
async def test_behind_a_shared_beginning_longer_ones_still_count(desk: Desk) -> None:
    """All share the system's text; the samples of one prompt go together all the same."""
    for n in range(8):
        await (await desk.ask(marks=desk.marks([*SYSTEM, n])))
    home = await (await desk.ask(marks=desk.marks([*SYSTEM, 9], b"row 9")))
    samples = [
        (await (await desk.ask(marks=desk.marks([*SYSTEM, 9], b"row 9")))).url for _ in range(2)
    ]
    assert samples == [home.url] * 2


def test_short_prompts_have_no_beginning_worth_keeping() -> None:
    line = Line(servers_of(2, 4))
    assert line.marks([1] * 200, None) == ()
    assert len(line.marks([1] * 300, None)) == 1
    assert len(line.marks([1] * 3000, b"group")) == 3


@at_a_desk(2, 8)
async def test_a_server_that_went_down_has_lost_what_it_held(desk: Desk) -> None:
    marks = desk.marks(SYSTEM)
    first = await (await desk.ask(marks=marks))
    assert desk.line._prefixes.holders(marks, desk.servers) == [first]
    desk.line.lost(first)
    assert desk.line._prefixes.holders(marks, desk.servers) == []


@at_a_desk(2, 8)
async def test_where_it_failed_is_not_tried_again_while_another_wants_the_place(desk: Desk) -> None:
    await desk.fill()
    failed = await desk.ask(avoid=desk.servers[0], first=True)
    fresh = await desk.ask()
    await desk.end(desk.servers[0])
    assert fresh.done()
    assert not failed.done()
    await desk.end(desk.servers[0])
    assert await failed is desk.servers[0]


@at_a_desk(2, 4)
async def test_a_request_that_is_too_long_for_a_slow_server_waits_for_another(desk: Desk) -> None:
    slow, fast = desk.servers
    slow.most_tokens = 100.0
    fast.held = fast.slots
    long, short = await desk.ask(tokens=200.0), await desk.ask(tokens=50.0)
    assert await short is slow
    await desk.end(slow)
    assert not long.done()
    await desk.end(fast)
    assert await long is fast


@at_a_desk(1, 8)
async def test_who_is_cancelled_leaves_no_place_taken(desk: Desk) -> None:
    await desk.fill()
    for moment in (False, True):  # waiting, and just when a place is given
        gone, next_one = await desk.ask(near="http://0"), await desk.ask()
        if moment:
            desk.servers[0].held -= 1
            desk.line.hand_out(desk.servers[0])
        gone.cancel()
        if not moment:
            await desk.end(desk.servers[0])
        await asyncio.wait([gone, next_one], timeout=5)
        assert gone.cancelled()
        assert next_one.done()
        assert desk.servers[0].held == desk.servers[0].slots
        assert desk.servers[0].awaited == len(desk.line) == 0


@at_a_desk(1, 1)
async def test_everyone_is_told_when_there_is_nothing_to_wait_for(desk: Desk) -> None:
    await desk.fill()
    task = await desk.ask(near="http://0")
    desk.line.fail(RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        await task
    assert len(desk.line) == desk.servers[0].awaited == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_no_place_is_free_while_somebody_may_have_it(steps: list[tuple[int, int]]) -> None:
    """Property: whatever comes and goes, in whichever order."""

    async def do(desk: Desk) -> None:
        desk.servers[2].most_tokens = 100.0
        for what, which in steps:
            server = desk.servers[which % 3]
            if what == 0:
                near = f"http://{which}"
                await desk.ask(tokens=60.0 * which, near=near, avoid=server, first=which == 1)
            elif what == 1:
                await desk.ask(tokens=60.0 * which, marks=desk.marks([which, *SYSTEM]))
            elif what == 2 and server.held:
                await desk.end(server)
            elif what == 3 and desk.asked:
                desk.asked[which % len(desk.asked)].cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            elif what == 4:
                server.up = not server.up
                desk.line.hand_out()
                await asyncio.sleep(0)
            for waiter in desk.line._waiters:
                for other in desk.servers:
                    assert other.free <= 0 or waiter.tokens > other.most_tokens
            assert all(server.awaited >= 0 for server in desk.servers)
        for task in desk.asked:
            task.cancel()
        await asyncio.gather(*desk.asked, return_exceptions=True)
        assert len(desk.line) == sum(server.awaited for server in desk.servers) == 0

    at_a_desk(3, 2)(do)()
