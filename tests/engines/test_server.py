"""Places of a server: what it says of itself, of its load, and the slope of its tokens."""

from __future__ import annotations

import asyncio

import pytest

from eyas.engines import ServerInfo
from eyas.engines import server as servers
from eyas.engines.base import Load
from eyas.engines.server import Server
from eyas.engines.sglang import read_load as read_sglang
from eyas.engines.vllm import read_load as read_vllm


class Telling:
    """An engine that tells its load."""

    url = "http://telling"

    def __init__(self, *loads: Load | None) -> None:
        self.loads = list(loads)
        self.asked = 0

    async def load(self) -> Load | None:
        self.asked += 1
        return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]


def server_of(engine: Telling, *, slots: int | None = None, told: int | None = None) -> Server:
    return Server(engine, ServerInfo("x", engine.url, slots=told), slots=slots)  # type: ignore[arg-type]


def fit(server: Server, times: int = 1) -> int:
    async def run() -> None:
        for _ in range(times):
            await server.fit_slots()

    asyncio.run(run())
    return server.slots


def test_a_full_server_without_a_queue_gets_more() -> None:
    server = server_of(Telling(Load(64, 0)))
    server.held = 64
    assert fit(server) == 80
    assert fit(server) == 80  # not full any more


def test_a_queue_is_let_run_down() -> None:
    server = server_of(Telling(Load(40, 24)))
    server.held = 64
    assert fit(server) == 42
    assert server.queued == 24


def test_what_a_server_says_of_itself_is_the_most() -> None:
    server = server_of(Telling(Load(48, 0)), told=48)
    server.held = 48
    assert fit(server, 3) == 48


def test_a_number_pins_it() -> None:
    server = server_of(Telling(Load(8, 500)), slots=8)
    server.held = 8
    assert fit(server) == 8
    assert server.queued == 500


def test_a_server_that_tells_nothing_is_not_asked_for_ever() -> None:
    engine = Telling(None)
    server = server_of(engine)
    fit(server, 10)
    assert engine.asked == servers._UNHEARD


@pytest.mark.parametrize("limit", [100, 1000, 40])
def test_without_any_word_the_slope_tells(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of which `limit` requests run at once: more places than that bring nothing."""
    now = [1000.0]
    monkeypatch.setattr(servers.time, "monotonic", lambda: now[0])
    server = server_of(Telling(None))
    seen = []
    for _ in range(40):
        server.held = server.slots
        now[0] += 6.0
        server.answered += 2 * server.slots
        server.output_tokens += 600 * min(server.slots, limit)
        seen.append(fit(server))
    assert seen[-1] == seen[-2]
    assert seen[-1] >= min(limit, 64) * 0.9
    assert seen[-1] <= max(64, 2 * limit)


def test_loads_are_read_from_what_each_engine_says() -> None:
    ranks = [{"num_running_reqs": 3, "num_waiting_reqs": 1}, {"num_reqs": 9, "num_waiting_reqs": 4}]
    assert read_sglang(ranks) == Load(8, 5)
    for odd in (None, [], [3], [{}], [{"num_running_reqs": True, "num_waiting_reqs": 1}]):
        assert read_sglang(odd) is None
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
        'vllm:num_requests_waiting{engine="0"} 7.0\n'
    )
    assert read_vllm(text) == Load(5, 7)
    assert read_vllm("nothing") is None
