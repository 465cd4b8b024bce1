"""Whose fault a failed request is: its row's, or its server's.

Invariants: a failure counts as a row's own try only where its server answers others; a row that
was in flight each time a server went down is sent in ever smaller company, so that the one that
takes servers down is found, and only it is rejected.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field

from eyas.engines.base import Request
from eyas.engines.server import Server
from eyas.errors import BusyError, EngineError, MalformedAnswer, RowFailed, TransportError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
_TURNED_AWAY, _TURNED_AWAY_S = 12, 300.0
"""So often, and over this time, a busy server may turn one request away while it serves others."""
_ONE_TOKEN_S = 60.0
"""A server that gives not even one token for so long answers nobody."""


@dataclass(slots=True)
class Tries:
    """What one request has met so far."""

    allowed: int
    met: list[str] = field(default_factory=list)
    """What each failed try met, whosever fault it was."""
    own: int = 0
    """Failures that were the row's own."""
    downs: int = 0
    """How often a server went down while it held the request."""
    answered_then: int = -1
    """How many answers all requests had got when that was last so."""
    turned_away: int = 0
    turned_away_since: float | None = None
    next_pause_s: float = field(default_factory=lambda: FIRST_PAUSE_S)
    avoid: Server | None = None
    """Where it failed last: another server is tried first."""

    def count(self, error: EngineError, *, own: bool = True) -> bool:
        """Note a failure; true if it was the row's own and its last."""
        if own or not self.met or self.met[-1] != str(error):
            self.met.append(str(error))
        self.own += own
        return own and self.own >= self.allowed

    def count_down(self, error: EngineError, *, alone: bool) -> bool:
        """A server went down with the request; true if that was its last try.

        It is the row's own fault where no other suspect was in flight.
        """
        self.downs += 1
        return self.count(error, own=alone)

    def count_turned_away(self, error: EngineError) -> bool:
        """A busy server turned the request away, and served others; true if it was the last."""
        now = time.monotonic()
        if self.turned_away_since is None:
            self.turned_away_since = now
        self.turned_away += 1
        self.count(error, own=False)
        long = now - self.turned_away_since >= _TURNED_AWAY_S
        return long and self.turned_away >= _TURNED_AWAY

    def failure(self, error: EngineError, server: Server) -> RowFailed:
        """The row's end, with its history."""
        return RowFailed(
            f"{error} (try {self.own + self.turned_away})",
            reason=error.reason,
            tries=self.met,
            seen=getattr(error, "seen", ""),
            server=server.url,
        )

    def pause(self, error: EngineError | None = None, *, elsewhere: bool = False) -> float:
        """Seconds until the next try.

        What the server asked for, and a little more, so that not all come back at once; where
        it asked for nothing (or the request may go `elsewhere`), a growing time.
        """
        asked = error.retry_after if isinstance(error, BusyError) and not elsewhere else None
        own = self.next_pause_s
        self.next_pause_s = min(2 * own, LONGEST_PAUSE_S)
        if asked is None:
            return own * random.uniform(0.5, 1.5)
        return asked + random.uniform(0.0, min(own, 1.0))


class Witness:
    """Asks a server for one token, to learn whether it answers anybody."""

    def __init__(self) -> None:
        self._request = Request([1], 1, 0)
        self._shortest: int | None = None
        """Ids of the shortest prompt that was answered."""
        self._asking: dict[Server, asyncio.Task[EngineError | None]] = {}

    def remember(self, request: Request) -> None:
        """A request was answered: its prompt, if it is the shortest, is one to ask with."""
        length = len(request.prompt_ids)
        if self._shortest is None or length < self._shortest:
            self._request, self._shortest = Request(request.prompt_ids, 1, 0), length

    async def fault_of(self, server: Server) -> EngineError | None:
        """None if the server gives a token, else what it does instead. One question at a time."""
        asking = self._asking.get(server)
        if asking is None or asking.done():
            asking = self._asking[server] = asyncio.create_task(self._ask(server))
        return await asyncio.shield(asking)

    async def _ask(self, server: Server) -> EngineError | None:
        try:
            async with asyncio.timeout(_ONE_TOKEN_S):
                generation = await server.engine.generate(self._request)
        except TimeoutError:
            return TransportError(f"{server.url} gave not one token in {_ONE_TOKEN_S:.0f} s")
        except EngineError as error:
            return error
        if (generation.finish_reason or "").startswith("abort"):
            return MalformedAnswer(f"the engine's finish reason is {generation.finish_reason}")
        return None

    def close(self) -> None:
        """Ask nothing more."""
        for asking in self._asking.values():
            asking.cancel()


class Suspects:
    """Requests that were in flight when a server went down, sent in ever smaller company."""

    def __init__(self) -> None:
        self._sent = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for fewer others to be in flight."""
        return len(self._waiting)

    async def enter(self, tries: Tries, places: int) -> int:
        """Wait until few enough others are in flight.

        Returns:
            How many suspects may be in flight together; 0 where it is none. `leave` is to be
            called in the other case.
        """
        if tries.downs < 2:  # once is no pattern
            return 0
        most = max(1, places >> 4 * (tries.downs - 1))
        if self._sent < most:
            self._sent += 1
            return most
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((most, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self._waiting.remove((most, turn))
            raise
        return most

    def leave(self) -> None:
        """A suspect is no longer in flight."""
        self._sent -= 1
        for item in list(self._waiting):
            most, turn = item
            if self._sent < most and not turn.done():
                self._waiting.remove(item)
                self._sent += 1
                turn.set_result(None)
