"""The servers of a capture: which there should be, which join, and how each one fares.

Invariant: a server joins only if it serves the very target that the run is of; one that leaves
or stands still loses its place, not its rows; places follow what a server says of its own load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from eyas.engines import clean_url, connect
from eyas.engines.pool import Pool
from eyas.engines.server import Server
from eyas.errors import EyasError, ServerUnreachable, UnsuitableServerError
from eyas.target import Target, listed_urls, read_api_key

_TEND_S = 1.0
_RETRY_S = 1.0
"""Between knocks at an address where nothing answers: they cost it next to nothing."""
_QUIET_S = 60.0
"""Nothing is called a stall that is shorter."""
_QUIET_FACTOR = 3.0
"""Nor what is shorter than this many times the longest answer so far."""
_PEERS_FACTOR = 10.0
"""A server that says it is well, but answers nothing while its peers answer for so long."""
_HEALTH_S = 20.0


class Fleet:
    """Tends a pool while a capture runs."""

    def __init__(
        self,
        pool: Pool,
        target: Target,
        *,
        slots: int | None,
        say: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            pool: the servers that are there already.
            target: what they serve.
            slots: requests that each is to hold; None for as many as it can.
            say: takes one line for the user.
        """
        self._pool = pool
        self._target = target
        self._slots = slots
        self._say = say
        self._again: dict[str, float] = {}
        """Addresses that did not answer, and when to ask again."""
        self._never: set[str] = set()
        """Addresses that serve something else."""
        # Each on its own: an address that swallows connections must not hold up the others.
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._looking: dict[Server, asyncio.Task[None]] = {}
        self._doubted: dict[Server, int] = {}
        self._asked_at: dict[Server, float] = {}
        self._complained = ""

    async def tend(self) -> None:
        """Look after the servers until cancelled."""
        try:
            while True:
                self._follow_list()
                for server in self._pool.servers:
                    looking = self._looking.get(server)
                    if server.usable and (looking is None or looking.done()):
                        self._looking[server] = asyncio.create_task(self._look_at(server))
                await asyncio.sleep(_TEND_S)
                self._pool.foresee()
        finally:
            for task in (*self._joining.values(), *self._looking.values()):
                task.cancel()

    # -- who belongs -------------------------------------------------------------------------

    def _follow_list(self) -> None:
        try:
            wanted = {clean_url(url): url for url in listed_urls(self._target.config.url)}
        except EyasError as error:  # a file that is being written: what was listed stays
            if str(error) != self._complained:
                self._complained = str(error)
                self._say(f"{error}; the servers stay as they are")
            return
        known = {server.url: server for server in self._pool.servers}
        self._never &= set(wanted)
        self._joining = {url: task for url, task in self._joining.items() if not task.done()}
        for url, given in wanted.items():
            server = known.get(url)
            if server is not None and server.refused == _UNLISTED:
                server.refused = None
                self._say(f"{url} is listed again")
            if server is None and url not in self._never and url not in self._joining:
                self._joining[url] = asyncio.create_task(self._join(url, given))
        for url, server in known.items():
            if url not in wanted and server.refused is None:
                self._retire(server)

    async def _join(self, url: str, given: str) -> None:
        now = time.monotonic()
        if now < self._again.get(url, 0.0):
            return
        config, engine = self._target.config, None
        try:
            engine = await connect(
                given,
                engine=config.engine,
                sampling=self._target.sampling,
                api_key=read_api_key(config.api_key_env),
            )
            info = await engine.identify()
            other = self._other_target(info.model, info.weight_version)
            if other is not None:
                raise UnsuitableServerError(other)
        except BaseException as error:
            if engine is not None:
                await engine.close()
            if isinstance(error, ServerUnreachable):
                if url not in self._again:
                    self._say(f"{error}; it joins when it answers")
                self._again[url] = now + _RETRY_S
            elif isinstance(error, EyasError):
                self._never.add(url)
                self._say(f"{url} does not join: {error}")
            else:
                raise
            return
        self._again.pop(url, None)
        server = Server(engine, info, slots=self._slots)
        self._pool.add(server)
        self._say(f"{url} joins ({info.engine} {info.version or ''}, {server.slots} at once)")

    def _other_target(self, model: str | None, weights: str | None) -> str | None:
        for what, was, now in (
            ("model", self._pool.model, model),
            ("weights version", self._pool.weights, weights),
        ):
            if None not in (was, now) and was != now:
                return f"it serves {what} {now!r}, and the run is of {was!r}"
        return None

    def _retire(self, server: Server) -> None:
        """No new requests; those that it holds it may finish."""
        if not any(s.usable for s in self._pool.servers if s is not server):
            return  # the last one that works is kept, whatever the list says
        server.refused = _UNLISTED
        self._say(f"{server.url} is no longer listed: it finishes what it holds")

    # -- how each fares ----------------------------------------------------------------------

    async def _look_at(self, server: Server) -> None:
        try:
            await server.fit_slots()
            if lost := server.overdue(_QUIET_S, _QUIET_FACTOR):
                server.take_away(lost, lost=True)
            await self._look_for_stall(server)
        except EyasError:
            return  # the next request finds out

    async def _look_for_stall(self, server: Server) -> None:
        """A server that holds requests and finishes none for long is asked how it is."""
        now, oldest = time.monotonic(), server.oldest()
        longest = max(s.longest_s for s in self._pool.servers)
        quiet = max(_QUIET_S, _QUIET_FACTOR * longest)
        if oldest is None or now - max(oldest, server.last_answer) < quiet:
            self._doubted.pop(server, None)
            return
        if now - self._asked_at.get(server, 0.0) < _HEALTH_S / 2:
            return
        self._asked_at[server] = now
        well = await server.engine.healthy(_HEALTH_S)
        peers = [s for s in self._pool.servers if s is not server and s.last_answer > oldest]
        behind = bool(peers) and now - max(oldest, server.last_answer) > max(
            _QUIET_S, _PEERS_FACTOR * longest
        )
        if well is False:
            self._doubted[server] = self._doubted.get(server, 0) + 1
        if self._doubted.get(server, 0) >= 3 or (well is not False and behind):
            self._doubted.pop(server, None)
            silent = now - max(oldest, server.last_answer)
            self._pool.went_down(
                server,
                f"{server.url} holds {len(server.attempts)} requests and has answered none for "
                f"{silent:.0f} s",
            )


_UNLISTED = "no longer listed"
