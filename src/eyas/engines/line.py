"""Requests that wait for a place, and which of them each free place is for.

Invariants: no place is free while a request waits that may have it; a server that holds the
beginning of a request's prompt is preferred as long as others are not much emptier, and waited
for only while another request takes the place that is free; what was begun already (a
conversation's next turn, a request that is sent again) goes before what was not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from eyas.engines.prefixes import Marks, Prefixes
from eyas.engines.server import Server

_EVEN = 1 / 20
"""Servers whose fullness differs by less are taken for equally full."""
_AWAITED = 1 / 8
"""Of a server's places: so many requests may wait for it while others would take them."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that wants a place."""

    tokens: float = 0.0
    """How long its answer is expected to be."""
    near: str | None = None
    """The address that holds what comes before it in its conversation."""
    avoid: Server | None = None
    """Where it failed last."""
    marks: Marks = ()
    """What its prompt's beginnings are known by."""
    first: bool = False
    """Whether it goes before others."""
    home: Server | None = None
    """The server that it waits for, as long as others take what is free."""
    place: asyncio.Future[Server] | None = None


class Line:
    """Who waits for a place at some servers."""

    def __init__(self, servers: Sequence[Server]) -> None:
        """Begin with nobody waiting; `servers` may grow."""
        self._servers = servers
        self._waiters: deque[Waiter] = deque()
        self._prefixes = Prefixes()

    def __len__(self) -> int:
        return len(self._waiters)

    def marks(self, prompt_ids: Sequence[int], group: bytes | None) -> Marks:
        """What a prompt's beginnings are known by; see `Prefixes.marks`."""
        return self._prefixes.marks(prompt_ids, group)

    def lost(self, server: Server) -> None:
        """A server went down, and with it all beginnings that it held."""
        self._prefixes.forget(server)

    async def place(self, waiter: Waiter) -> Server:
        """A server with a free place, which is then held."""
        server = self._choose(waiter)
        if server is not None:
            self._give(waiter, server)
            return server
        waiter.place = asyncio.get_running_loop().create_future()
        waiter.home = self._home(waiter)
        if waiter.home is not None:
            waiter.home.awaited += 1
        if waiter.first:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                server = waiter.place.result()  # it was handed out just before
                server.held -= 1
                self.hand_out(server)
            else:
                with suppress(ValueError):
                    self._waiters.remove(waiter)
                    self._left(waiter)
            raise

    def hand_out(self, server: Server | None = None) -> None:
        """Give free places (of one server) to those who wait."""
        if server is not None:
            while self._waiters and server.free > 0 and self._serve(server):
                pass
            return
        while self._waiters:
            free = sorted((s for s in self._servers if s.free > 0), key=_fullness)
            if not any(self._serve(s) for s in free):
                return

    def fail(self, error: Exception) -> None:
        """Tell everyone who waits that there is nothing to wait for."""
        for waiter in self._waiters:
            self._left(waiter)
            if waiter.place is not None and not waiter.place.done():
                waiter.place.set_exception(error)
        self._waiters.clear()

    def _serve(self, server: Server) -> bool:
        """Give a server's free place to the first whom it suits; false if there is nobody."""
        at = self._next_for(server)
        if at is None:
            return False
        waiter = self._waiters[at]
        del self._waiters[at]
        self._left(waiter)
        if waiter.place is not None and not waiter.place.done():  # else it is just being cancelled
            self._give(waiter, server)
            waiter.place.set_result(server)
        return True

    def _next_for(self, server: Server) -> int | None:
        """The first in line who does not rather wait for another server, else the first."""
        second: int | None = None
        for at, waiter in enumerate(self._waiters):
            if waiter.tokens > server.most_tokens:
                continue
            home = waiter.home
            if waiter.avoid is not server and (home is None or home is server or not home.usable):
                return at
            second = at if second is None else second
        return second

    def _give(self, waiter: Waiter, server: Server) -> None:
        server.held += 1
        if waiter.marks:
            self._prefixes.sent(waiter.marks, server)

    @staticmethod
    def _left(waiter: Waiter) -> None:
        if waiter.home is not None:
            waiter.home.awaited -= 1

    def _choose(self, waiter: Waiter) -> Server | None:
        """The free place that suits a request best."""
        free = [s for s in self._servers if s.free > 0 and waiter.tokens <= s.most_tokens]
        if len(free) <= 1:
            return free[0] if free else None
        free = [server for server in free if server is not waiter.avoid] or free
        if waiter.near is not None:
            for server in free:
                if server.url == waiter.near:
                    return server
        even = min(map(_fullness, free)) + _EVEN
        holders = self._prefixes.holders(waiter.marks, self._servers) if waiter.marks else ()
        near = [server for server in free if server in holders and _fullness(server) <= even]
        return min(near or free, key=_fullness)

    def _home(self, waiter: Waiter) -> Server | None:
        """The server that a request had best wait for; None if too many wait for it already."""
        if len(self._servers) < 2:
            return None
        homes = [server for server in self._servers if server.url == waiter.near]
        if not homes and waiter.marks:
            homes = self._prefixes.holders(waiter.marks, self._servers)
        home = min(homes, key=lambda server: server.awaited / server.slots, default=None)
        if home is None or not home.usable or home is waiter.avoid:
            return None
        return home if home.awaited < max(1, _AWAITED * home.slots) else None


def _fullness(server: Server) -> float:
    return server.held / server.slots
