"""A world in which time passes only when nobody has anything to do, and servers in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from eyas.engines import Generation, Request, ServerInfo, outlook, pool, roster, server
from eyas.engines.base import Load
from eyas.engines.server import Server
from eyas.errors import ServerUnreachable

T = TypeVar("T")
TOKENS_A_SECOND = 50.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next moment at which something is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtually(monkeypatch: pytest.MonkeyPatch, main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, with the pool's and the servers' clock that of the loop."""
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time)
    for module in (outlook, pool, roster, server):
        monkeypatch.setattr(module, "time", clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


class Slots:
    """An engine that answers row ``prompt_ids[0]`` after its time; it may go and come back."""

    name = "slots"

    def __init__(self, url: str, seconds: list[float], *, slots: int, pace: float = 1.0) -> None:
        self.url = url
        self.seconds, self.slots, self.pace = seconds, slots, pace
        self.up = True
        self.running: set[asyncio.Task[Any] | None] = set()
        self.most_running = 0
        self.begun: list[int] = []
        """The rows it was sent, in order."""

    async def generate(self, request: Request) -> Generation:
        if not self.up:
            raise ServerUnreachable(f"nothing answers at {self.url}")
        row = request.prompt_ids[0]
        self.begun.append(row)
        task = asyncio.current_task()
        self.running.add(task)
        self.most_running = max(self.most_running, len(self.running))
        gone = asyncio.get_running_loop().create_future()
        self._gone = getattr(self, "_gone", set()) | {gone}
        try:
            await asyncio.wait([gone], timeout=self.seconds[row] * self.pace)
            if gone.done():
                raise ServerUnreachable(f"{self.url} is gone")
        finally:
            self.running.discard(task)
            self._gone.discard(gone)
        return Generation([row] * max(1, round(self.seconds[row] * TOKENS_A_SECOND)), "stop")

    def go(self) -> None:
        """The server dies with all that it holds."""
        self.up = False
        for gone in getattr(self, "_gone", ()):
            gone.set_result(None)

    async def identify(self) -> ServerInfo:
        return ServerInfo("slots", self.url, model="m", slots=self.slots)

    async def reachable(self) -> bool:
        return self.up

    async def healthy(self, timeout_s: float) -> bool | None:
        return self.up

    async def load(self) -> Load | None:
        return None

    async def close(self) -> None:
        return None


def server_of(engine: Slots) -> Server:
    info = ServerInfo("slots", engine.url, model="m", slots=engine.slots)
    return Server(engine, info, slots=engine.slots)  # type: ignore[arg-type]
