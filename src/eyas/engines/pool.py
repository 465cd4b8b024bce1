"""The servers of one target, kept full and no fuller, and requests that are tried again.

Invariants: a request waits only while no usable server has a free place; a server that is down,
stalled or restarted costs no row a try; a request is rejected only by its own last try or by a
refusal that will not change; a server that serves anything else than the run began with gets
nothing more; when nothing can succeed the capture stops with one sentence and every open row
stays pending.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from eyas.engines.base import Generation, Request
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
)

_OVERLOADED = frozenset((408, 425, 429, 502, 503, 504))
"""Statuses that tell of the server or a proxy, not of the request."""
_CONCERNS_ALL = frozenset((401, 403, 404))
_TURNED_AWAY = 12
"""How often a busy server may turn one request away while it serves others (over a minute)."""
_WORKING_S = 10.0
"""A request that is held this long is being worked on."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0
_LONGEST_LOOK_S = 2.0
"""Between looks at a server that is down: looking costs it next to nothing."""
_HEALTH_S = 15.0
_SHARED = 64
"""Ids at the beginning of a prompt by which requests that share them are kept together."""


class _Moved(Exception):
    """The request was taken away from a server and is to be sent elsewhere."""


@dataclass(slots=True)
class _Tries:
    """What one request has met so far."""

    allowed: int
    met: list[str] = field(default_factory=list)
    turned_away: int = 0
    next_pause_s: float = _FIRST_PAUSE_S
    avoid: Server | None = None
    """Where it failed last: another server is tried first."""

    @property
    def last(self) -> bool:
        """Whether the next failure that counts is the last."""
        return len(self.met) + 1 >= self.allowed

    def met_with(self, error: EngineError) -> bool:
        """Count a failure; true if it was the last."""
        self.met.append(str(error))
        return len(self.met) >= self.allowed or self.turned_away >= _TURNED_AWAY

    def failure(self, error: EngineError, server: Server) -> RowFailed:
        """The row's end. Where the connection broke and nothing was said it stays pending."""
        return RowFailed(
            f"{error} (try {len(self.met) + self.turned_away})",
            reason=error.reason,
            tries=self.met,
            seen=getattr(error, "seen", ""),
            pending=isinstance(error, TransportError),
            server=server.url,
        )

    def pause(self, error: EngineError) -> float:
        """Seconds until the next try: what the server asked for, else growing, with jitter."""
        asked = error.retry_after if isinstance(error, BusyError) else None
        pause = self.next_pause_s * random.uniform(0.5, 1.5) if asked is None else asked
        self.next_pause_s = min(2 * self.next_pause_s, _LONGEST_PAUSE_S)
        return pause


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for a place."""

    place: asyncio.Future[Server]
    near: str | None
    avoid: Server | None
    prefix: int


class Pool:
    """One target at several addresses."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        tries: int = 4,
        give_up_after_s: float = 120.0,
        say: Callable[[str], None] = lambda _: None,
        on_weights: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Join servers.

        Args:
            servers: at least one, all of the same target.
            tries: how often a request is sent before its row fails.
            give_up_after_s: how long nothing may answer before the capture stops.
            say: takes one line for the user.
            on_weights: takes the weights version, where only the first answer tells it.
        """
        self.servers = list(servers)
        self.model = servers[0].info.model
        self.weights = next((s.info.weight_version for s in servers if s.info.weight_version), None)
        self._tries = tries
        self._give_up_after_s = give_up_after_s
        self.say = say
        self._on_weights = on_weights
        self._waiters: deque[_Waiter] = deque()
        self._stopped: CaptureStopped | None = None
        self._answered = 0
        self._failing_since: float | None = None
        self._all_down_since: float | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were sent and are not answered."""
        return sum(len(server.attempts) for server in self.servers)

    @property
    def capacity(self) -> int:
        """Places of all servers that may be given requests, now or when they are up again."""
        return sum(server.slots for server in self.servers if server.refused is None)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiters)

    async def generate(self, request: Request, *, near: str | None = None) -> Generation:
        """Generate, trying again as long as that makes sense.

        Args:
            request: what is asked.
            near: the address that is likely to hold the prompt's beginning in its cache; it is
                preferred while it has a free place.

        Raises:
            RowFailed: this request cannot be answered.
            CaptureStopped: no request can be now.
        """
        tries = _Tries(self._tries)
        prefix = hash(tuple(request.prompt_ids[:_SHARED])) if len(self.servers) > 1 else 0
        while True:
            server = await self._place(near, tries.avoid, prefix)
            answered_before = self._answered
            try:
                generation = await self._attempt(server, request)
            except _Moved:
                tries.avoid = server
                continue
            except ServerUnreachable as gone:
                self.went_down(server, str(gone))
                continue
            except RequestRefused as refused:
                if refused.status in _CONCERNS_ALL:
                    self.refuse(server, f"{server.url} refuses every request: {refused}")
                    continue
                raise RowFailed(
                    str(refused), reason=refused.reason, tries=tries.met, server=server.url
                ) from refused
            except EngineError as failed:
                error = failed
            else:
                if generation.finish_reason not in ("stop", "length") and not tries.last:
                    error = MalformedAnswer(
                        f"the engine's finish reason is {generation.finish_reason}",
                        reason="finish_reason",
                    )
                elif self._of_other_weights(server, generation):
                    continue
                else:
                    return generation  # an abort goes to the checks, which keep its ids
            tries.avoid = server
            if isinstance(error, BusyError) and error.status in _OVERLOADED:
                self._check_patience(server, error)
                tries.turned_away += self._answered != answered_before
                counts = tries.turned_away >= _TURNED_AWAY
            else:
                counts = True
            if counts and tries.met_with(error):
                raise tries.failure(error, server) from error
            await asyncio.sleep(tries.pause(error))

    async def _attempt(self, server: Server, request: Request) -> Generation:
        """Send a request once, to a server that has a place for it, and give the place back."""
        number, attempt = server.begin()
        try:
            generation = await server.engine.generate(request)
        except asyncio.CancelledError:
            assert attempt.task is not None
            if not attempt.moved or attempt.task.uncancel() > 0:
                raise  # the capture ends, whether the request was also taken away or not
            raise _Moved from None
        finally:
            del server.attempts[number]
            server.held -= 1
            self._hand_out()
        generation.server = server.url
        if generation.finish_reason in ("stop", "length"):
            self._answered += 1
            self._failing_since = None
            server.answered_with(attempt, len(generation.output_ids))
        return generation

    async def close(self) -> None:
        """End the watches, if there are any, and close the connections."""
        for server in self.servers:
            if server.watch is not None:
                server.watch.cancel()
            await server.engine.close()

    # -- places ------------------------------------------------------------------------------

    async def _place(self, near: str | None, avoid: Server | None, prefix: int) -> Server:
        """A server with a free place, which is then held."""
        if self._stopped is not None:
            raise self._stopped
        waiter = _Waiter(asyncio.get_running_loop().create_future(), near, avoid, prefix)
        if not self._waiters and (server := self._choose(waiter)) is not None:
            server.held += 1
            return server
        self._waiters.append(waiter)
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                waiter.place.result().held -= 1  # it was handed out just before
                self._hand_out()
            else:
                with suppress(ValueError):
                    self._waiters.remove(waiter)
            raise

    def _choose(self, waiter: _Waiter) -> Server | None:
        """The server that is the least full, for its size; the preferred one if it has room."""
        free = [server for server in self.servers if server.free > 0]
        if len(free) <= 1:
            return free[0] if free else None
        others = [server for server in free if server is not waiter.avoid] or free
        for server in others:
            if server.url == waiter.near:
                return server
        # Within a twentieth of fullness, prompts that begin alike go together.
        return min(
            others,
            key=lambda s: (int(20 * s.held / s.slots), hash((waiter.prefix, s.url))),
        )

    def _hand_out(self) -> None:
        """Give free places to those who wait, the first come first."""
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.place.done():
                self._waiters.popleft()
                continue
            server = self._choose(waiter)
            if server is None:
                return
            self._waiters.popleft()
            server.held += 1
            waiter.place.set_result(server)

    # -- servers that come and go ------------------------------------------------------------

    def add(self, server: Server) -> None:
        """A server joins; it gets its share at once."""
        self.servers.append(server)
        self._hand_out()

    def refuse(self, server: Server, why: str) -> None:
        """A server gets nothing more; if it was the last one, the capture stops."""
        if server.refused is not None:
            return
        server.refused = why
        if all(other.refused is not None for other in self.servers):
            self.stop(why)
        else:
            self.say(f"{why}; it gets no more requests")
            server.take_away()

    def stop(self, why: str) -> CaptureStopped:
        """Nothing more can be captured: everyone who waits is told."""
        if self._stopped is None:
            self._stopped = CaptureStopped(why)
        for waiter in self._waiters:
            if not waiter.place.done():
                waiter.place.set_exception(self._stopped)
        self._waiters.clear()
        return self._stopped

    def went_down(self, server: Server, why: str) -> None:
        """A server is not there (or does not move); its requests go elsewhere."""
        if not server.up:
            return
        server.up = False
        server.take_away()
        others = [s for s in self.servers if s.usable]
        if others:
            self.say(f"{why}; its requests go to {len(others)} other{'s' * (len(others) > 1)}")
        else:
            self._all_down_since = time.monotonic()
            all_of = f" (all {len(self.servers)} servers are down)" if len(self.servers) > 1 else ""
            self.say(f"{why}{all_of}; waiting for it")
        if server.watch is None or server.watch.done():
            server.watch = asyncio.create_task(self._wait_until_up(server, why))

    async def _wait_until_up(self, server: Server, why: str) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, _LONGEST_LOOK_S)
            if await server.engine.reachable() and (
                await server.engine.healthy(_HEALTH_S) is not False
            ):
                break
            if any(other.usable for other in self.servers):
                self._all_down_since = None
                continue
            since = self._all_down_since = self._all_down_since or time.monotonic()
            if time.monotonic() - since > self._give_up_after_s:
                self.stop(
                    f"{why} for {time.monotonic() - since:.0f} s; the rest stays pending. "
                    "Start the server and run the same command again to go on."
                )
                return
        if await self._is_the_same(server):
            server.up = True
            server.last_answer = time.monotonic()
            self._all_down_since = None
            self.say(f"{server.url} answers again")
            self._hand_out()

    async def _is_the_same(self, server: Server) -> bool:
        """Whether a server that came back is the one that the run began with."""
        try:
            now = await server.engine.identify()
        except EngineError:
            return True  # gone again, or still starting: the next request finds out
        except Exception as unsuitable:
            self.refuse(server, str(unsuitable))
            return False
        if self.model is not None and now.model not in (None, self.model):
            self.refuse(server, f"{server.url} came back with {now.model}, not {self.model}")
            return False
        return self._same_weights(server, now.weight_version)

    def _of_other_weights(self, server: Server, generation: Generation) -> bool:
        """Whether an answer is of other weights; its server then gets nothing more."""
        if generation.finish_reason not in ("stop", "length"):
            return False
        return not self._same_weights(server, generation.weight_version)

    def _same_weights(self, server: Server, now: str | None) -> bool:
        if self.weights is None and now is not None:
            self.weights = now
            self._on_weights(now)
        if now is None or now == self.weights:
            return True
        self.refuse(
            server,
            f"{server.url} now generates with weights version {now!r}, and the run began with "
            f"{self.weights!r}; rows of both must not be mixed. Serve {self.weights!r} again, or "
            "begin a new run.",
        )
        return False

    def _check_patience(self, server: Server, error: EngineError) -> None:
        """Stop if all servers only turn requests away, and work on none, for too long."""
        now = time.monotonic()
        if self._failing_since is None or any(
            now - attempt.sent > _WORKING_S
            for other in self.servers
            for attempt in other.attempts.values()
        ):
            self._failing_since = now
        failing = now - self._failing_since
        if failing > self._give_up_after_s:
            raise self.stop(
                f"{server.url} answered no request for {failing:.0f} s ({error}); the rest "
                "stays pending. Run the same command again to go on."
            )
