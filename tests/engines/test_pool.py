"""Requests that are tried again, on an engine that does what a test says, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from eyas.engines import Generation, Request, ServerInfo, roster, tries
from eyas.engines import pool as pools
from eyas.engines.pool import Pool
from eyas.engines.server import Server
from eyas.errors import (
    BusyError,
    CaptureStopped,
    EngineError,
    MalformedAnswer,
    RequestRefused,
    RowFailed,
    ServerUnreachable,
    TransportError,
    UnsuitableServerError,
)

REQUEST = Request([1], 4, 0)
Outcome = Exception | Generation


def good(**more: Any) -> Generation:
    return Generation([2], "stop", **more)


class Scripted:
    """An engine whose outcomes are given beforehand; the last one repeats.

    What is asked to learn whether it answers anybody (one token) has an outcome of its own.
    """

    name, url = "scripted", "http://scripted"

    def __init__(self, *outcomes: Outcome, told: ServerInfo | Exception | None = None) -> None:
        self.outcomes = list(outcomes)
        self.told = told or ServerInfo("scripted", self.url, model="m")
        self.sent = 0
        self.asked = 0
        self.one_token: Outcome = good()
        self.up = True

    async def generate(self, request: Request) -> Generation:
        if request.max_new_tokens == 1:
            self.asked += 1
            if isinstance(self.one_token, Exception):
                raise self.one_token
            return self.one_token
        self.sent += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def identify(self) -> ServerInfo:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    async def reachable(self) -> bool:
        return self.up

    async def healthy(self, timeout_s: float) -> bool | None:
        return None

    async def close(self) -> None:
        return None


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each pause would have been; none is waited for."""
    asked: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await real(0)

    monkeypatch.setattr(pools.asyncio, "sleep", sleep)
    return asked


def generate(engine: Scripted, **more: Any) -> Generation:
    async def run() -> Generation:
        info = ServerInfo("scripted", engine.url, version="1", model="m", context_length=100)
        pool = Pool([Server(engine, info)], **more)
        try:
            return await pool.generate(REQUEST)
        finally:
            await pool.close()

    return asyncio.run(run())


PASSING: list[Callable[[], EngineError]] = [
    lambda: BusyError("busy", status=500),
    lambda: BusyError("busy", status=503),
    lambda: MalformedAnswer("cut"),
    lambda: TransportError("broke"),
]


@pytest.mark.parametrize("error", PASSING)
def test_a_passing_fault_costs_nothing(
    error: Callable[[], EngineError], pauses: list[float]
) -> None:
    engine = Scripted(error(), error(), good())
    assert generate(engine).output_ids == [2]
    assert engine.sent == 3
    assert len(pauses) >= 2
    assert all(pause > 0 for pause in pauses)


def test_pauses_grow_and_have_an_end(pauses: list[float]) -> None:
    with pytest.raises(RowFailed):
        generate(Scripted(MalformedAnswer("cut")), tries=40)
    assert max(pauses) <= 1.5 * tries.LONGEST_PAUSE_S
    assert sum(pauses[:4]) < sum(pauses[4:8])


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_the_server_says_how_long_to_wait(status: int, pauses: list[float]) -> None:
    generate(Scripted(BusyError("busy", status=status, retry_after=7.5), good()))
    (pause,) = pauses
    assert 7.5 <= pause <= 8.5  # not all of them at the same moment


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BusyError("no room", status=500), "server_error"),
        (MalformedAnswer("cut", reason="cut_answer", seen="{"), "cut_answer"),
        (TransportError("broke"), "connection_lost"),
    ],
)
def test_the_last_try_ends_the_row(error: EngineError, reason: str, pauses: list[float]) -> None:
    engine = Scripted(error)
    with pytest.raises(RowFailed) as failed:
        generate(engine, tries=3)
    assert (engine.sent, engine.asked) == (3, 3)
    assert failed.value.reason == reason
    assert failed.value.tries == [str(error)] * 3
    assert "(try 3)" in str(failed.value)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    engine = Scripted(RequestRefused("too long", status=status))
    with pytest.raises(RowFailed) as failed:
        generate(engine)
    assert (engine.sent, failed.value.reason) == (1, "request_refused")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_concerns_every_request_stops_the_capture(status: int) -> None:
    engine = Scripted(RequestRefused("no", status=status))
    engine.one_token = RequestRefused("no", status=status)
    with pytest.raises(CaptureStopped, match="refuses every request"):
        generate(engine)
    assert engine.sent == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_concerns_one_request_alone_ends_its_row(status: int) -> None:
    """A firewall that does not like one prompt, say."""
    with pytest.raises(RowFailed, match="no"):
        generate(Scripted(RequestRefused("no", status=status)))


def test_an_abort_is_tried_again_and_at_last_handed_to_the_checks(pauses: list[float]) -> None:
    abort = Generation([2, 3], "abort: no room")
    engine = Scripted(abort, good())
    assert generate(engine).finish_reason == "stop"
    engine = Scripted(abort)
    assert generate(engine, tries=3) is abort
    assert engine.sent == 3


def test_a_server_that_is_down_costs_no_try(pauses: list[float]) -> None:
    said: list[str] = []
    engine = Scripted(*[ServerUnreachable("nobody")] * 5, good())
    assert generate(engine, tries=1, say=said.append).output_ids == [2]
    assert engine.sent == 6
    assert said.count("nobody; waiting for it") == said.count("http://scripted answers again")


def test_a_server_that_stays_away_stops_the_capture(pauses: list[float]) -> None:
    engine = Scripted(ServerUnreachable("nobody"))
    engine.up = False
    with pytest.raises(CaptureStopped, match="the rest stays pending"):
        generate(engine, give_up_after_s=0.0)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (ServerInfo("scripted", "u", model="other"), "came back with other, not m"),
        (UnsuitableServerError("SGLang 0.5.3 is not right"), "SGLang 0.5.3 is not right"),
        (ServerInfo("scripted", "u", version="2"), "came back with version 2 of scripted, not 1"),
        (ServerInfo("scripted", "u", context_length=99), "a context of 99 ids, not 100"),
        (RequestRefused("the key is wrong", status=401), "refuses every request: the key"),
    ],
)
def test_another_server_that_comes_back_stops_the_capture(
    told: ServerInfo | Exception, said: str, pauses: list[float]
) -> None:
    with pytest.raises(CaptureStopped, match=said):
        generate(Scripted(ServerUnreachable("nobody"), good(), told=told), give_up_after_s=0.0)


def test_other_weights_stop_every_request_after(pauses: list[float]) -> None:
    """It looks well when it is asked; its answers say that it is not, and the second one ends it."""

    async def run() -> Pool:
        other = good(weight_version="b")
        engine = Scripted(good(weight_version="a"), other, other, good())
        pool = Pool([Server(engine, ServerInfo("scripted", engine.url))])
        assert (await pool.generate(REQUEST)).weight_version == "a"
        for _ in range(2):
            with pytest.raises(CaptureStopped, match="'b', and the run began with 'a'"):
                await pool.generate(REQUEST)
        assert engine.sent == 3
        return pool

    assert asyncio.run(run()).in_flight == 0


def test_a_server_that_turns_all_away_ends_the_capture_and_rejects_nothing(
    pauses: list[float],
) -> None:
    engine = Scripted(BusyError("queue full", status=429))
    with pytest.raises(CaptureStopped, match="queue full"):
        generate(engine, tries=1, give_up_after_s=0.0)


def test_an_interruption_wins_over_a_request_that_moves() -> None:
    """Taken away from its server and interrupted at once: the worker ends."""

    class Holding(Scripted):
        async def generate(self, request: Request) -> Generation:
            await asyncio.sleep(3600)
            raise AssertionError

    async def run() -> bool:
        engine = Holding(good())
        pool = Pool([Server(engine, ServerInfo("scripted", engine.url))])
        task = asyncio.create_task(pool.generate(REQUEST))
        while not pool.in_flight:
            await asyncio.sleep(0)
        pool.servers[0].take_away()
        task.cancel()
        await asyncio.wait([task], timeout=5)
        return task.cancelled()

    assert asyncio.run(run())


@pytest.mark.parametrize("error", [*PASSING, lambda: BusyError("no room", status=502)])
def test_a_server_that_answers_nobody_costs_no_row_a_try(
    error: Callable[[], EngineError], pauses: list[float]
) -> None:
    """As long as it gives not even one token, it is the server's fault."""
    said: list[str] = []

    class Ill(Scripted):
        async def generate(self, request: Request) -> Generation:
            if request.max_new_tokens == 1 and self.asked == 7:
                self.outcomes, self.one_token = [good()], good()
            return await super().generate(request)

    engine = Ill(error())
    engine.one_token = error()
    assert generate(engine, tries=1, say=said.append).output_ids == [2]
    assert engine.asked >= 8
    assert [line.endswith("answers again") for line in said] == [False, True]


@pytest.mark.parametrize("error", PASSING)
def test_a_server_that_never_answers_anybody_ends_the_capture_and_rejects_nothing(
    error: Callable[[], EngineError], pauses: list[float]
) -> None:
    engine = Scripted(error())
    engine.one_token = error()
    with pytest.raises(CaptureStopped, match="stays pending"):
        generate(engine, tries=1, give_up_after_s=0.0)


class Killed(Scripted):
    """A server that one prompt takes down, with all that it holds, and that is started again."""

    def __init__(self, poison: int) -> None:
        super().__init__(good())
        self.poison = poison
        self.held: list[asyncio.Future[None]] = []
        self.crashes = 0
        self.answered: list[int] = []

    async def generate(self, request: Request) -> Generation:
        if not self.up:
            raise ServerUnreachable("nobody")
        if request.max_new_tokens == 1:
            return good()
        held = asyncio.get_running_loop().create_future()
        self.held.append(held)
        if request.prompt_ids == [self.poison]:
            self.crashes += 1
            self.up = False
            for other in self.held:
                if not other.done():
                    other.set_exception(TransportError("the connection broke"))
            self.held.clear()
        else:
            asyncio.get_running_loop().call_later(
                0.02, lambda: held.done() or held.set_result(None)
            )
        await held
        self.answered.append(request.prompt_ids[0])
        return good()

    async def reachable(self) -> bool:
        self.up = True  # when it is looked at, it has been started again
        return True


def test_a_row_that_takes_the_server_down_is_found_and_only_it_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.01)
    rows, poison = range(100, 160), 117

    async def run() -> tuple[Killed, list[Any]]:
        engine = Killed(poison)
        pool = Pool([Server(engine, ServerInfo("scripted", engine.url), slots=16)])
        asked = [pool.generate(Request([row], 4, 0)) for row in rows]
        results = await asyncio.gather(*asked, return_exceptions=True)
        await pool.close()
        return engine, results

    engine, results = asyncio.run(run())
    failed = [
        row for row, result in zip(rows, results, strict=True) if not isinstance(result, Generation)
    ]
    assert failed == [poison]
    failure = results[poison - 100]
    assert isinstance(failure, RowFailed)
    assert failure.reason == "connection_lost"
    assert engine.crashes <= 8
    assert set(failure.tries) == {"the connection broke"}
    assert sorted(engine.answered) == [row for row in rows if row != poison]


def test_who_looks_when_the_server_is_back_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests take a server down together; one of them notices only when it is up again."""
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.0)
    late: list[tries.Tries] = []

    class Fragile(Killed):
        async def generate(self, request: Request) -> Generation:
            if self.up and request.max_new_tokens > 1:
                self.held.append(asyncio.get_running_loop().create_future())
                for _ in range(200):
                    await asyncio.sleep(0)
                    if len(self.held) > 1:
                        self.up = False
                    if not self.up:
                        break
                self.held.pop()
                if not self.up:
                    raise TransportError("the connection broke")
            if not self.up:
                raise ServerUnreachable("nobody")
            return good()

    async def pause(
        self: Pool, server: Server, own: tries.Tries, error: EngineError | None = None
    ) -> None:
        late.append(own)
        before = server.downs
        while own is late[0] and not (server.downs > before and server.up):
            await asyncio.sleep(0)

    async def run() -> list[Generation]:
        engine = Fragile(-1)
        pool = Pool([Server(engine, ServerInfo("scripted", engine.url), slots=2)])
        asked = [pool.generate(Request([row], 4, 0)) for row in range(2)]
        found = await asyncio.gather(*asked)
        await pool.close()
        return found

    monkeypatch.setattr(Pool, "_pause", pause)
    assert len(asyncio.run(run())) == 2
