"""Requests that are tried again: what a row meets between being sent and being answered.

Invariants: a server that is down costs no row a try; a request is rejected only by its own
last try or by a refusal that will not change; when nothing can succeed the capture stops with
one sentence and every open row stays pending.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from eyas.engines.base import Engine, Generation, Request, ServerInfo
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


@dataclass(slots=True)
class _Tries:
    """What one request has met so far."""

    allowed: int
    met: list[str] = field(default_factory=list)
    turned_away: int = 0
    next_pause_s: float = _FIRST_PAUSE_S

    @property
    def last(self) -> bool:
        """Whether the next failure that counts is the last."""
        return len(self.met) + 1 >= self.allowed

    def met_with(self, error: EngineError) -> bool:
        """Count a failure; true if it was the last."""
        self.met.append(str(error))
        return len(self.met) >= self.allowed or self.turned_away >= _TURNED_AWAY

    def failure(self, error: EngineError) -> RowFailed:
        """The row's end. Where the connection broke and nothing was said it stays pending."""
        return RowFailed(
            f"{error} (try {len(self.met) + self.turned_away})",
            reason=error.reason,
            tries=self.met,
            seen=getattr(error, "seen", ""),
            pending=isinstance(error, TransportError),
        )

    def pause(self, error: EngineError) -> float:
        """Seconds until the next try: what the server asked for, else growing, with jitter."""
        asked = error.retry_after if isinstance(error, BusyError) else None
        pause = self.next_pause_s * random.uniform(0.5, 1.5) if asked is None else asked
        self.next_pause_s = min(2 * self.next_pause_s, _LONGEST_PAUSE_S)
        return pause


class Pool:
    """One engine with patience."""

    def __init__(
        self,
        engine: Engine,
        info: ServerInfo,
        *,
        tries: int = 4,
        give_up_after_s: float = 120.0,
        say: Callable[[str], None] = lambda _: None,
        on_weights: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: where requests go.
            info: who the server said it was when the capture began.
            tries: how often a request is sent before its row fails.
            give_up_after_s: how long nothing may answer before the capture stops.
            say: takes one line for the user.
            on_weights: takes the weights version, where only the first answer tells it.
        """
        self.engine = engine
        self.info = info
        self._tries = tries
        self._give_up_after_s = give_up_after_s
        self._say = say
        self._on_weights = on_weights
        self._up = asyncio.Event()
        self._up.set()
        self._watch: asyncio.Task[None] | None = None
        self._stopped: CaptureStopped | None = None
        self._answered = 0
        self._failing_since: float | None = None
        self._sent: dict[int, float] = {}
        self._numbers = count()

    @property
    def url(self) -> str:
        """The server's address."""
        return self.engine.url

    @property
    def in_flight(self) -> int:
        """Requests that were sent and are not answered."""
        return len(self._sent)

    async def generate(self, request: Request) -> Generation:
        """Generate, trying again as long as that makes sense.

        Raises:
            RowFailed: this request cannot be answered.
            CaptureStopped: no request can be now.
        """
        tries = _Tries(self._tries)
        while True:
            await self._up.wait()
            if self._stopped is not None:
                raise self._stopped
            answered_before = self._answered
            try:
                generation = await self._attempt(request)
            except ServerUnreachable as gone:
                self._went_down(gone)
                continue
            except RequestRefused as refused:
                if refused.status in _CONCERNS_ALL:
                    raise self._stop(f"{self.url} refuses every request: {refused}") from None
                raise RowFailed(str(refused), reason=refused.reason, tries=tries.met) from refused
            except EngineError as failed:
                error = failed
            else:
                if generation.finish_reason in ("stop", "length") or tries.last:
                    return generation  # an abort goes to the checks, which keep its ids
                error = MalformedAnswer(
                    f"the engine's finish reason is {generation.finish_reason}",
                    reason="finish_reason",
                )
            if isinstance(error, BusyError) and error.status in _OVERLOADED:
                self._check_patience(error)
                tries.turned_away += self._answered != answered_before
                counts = tries.turned_away >= _TURNED_AWAY
            else:
                counts = True
            if counts and tries.met_with(error):
                raise tries.failure(error) from error
            await asyncio.sleep(tries.pause(error))

    async def _attempt(self, request: Request) -> Generation:
        """Send a request once."""
        number = next(self._numbers)
        self._sent[number] = time.monotonic()
        try:
            generation = await self.engine.generate(request)
        finally:
            del self._sent[number]
        if generation.finish_reason in ("stop", "length"):
            self._answered += 1
            self._failing_since = None
            self._same_weights(generation.weight_version)
        return generation

    async def close(self) -> None:
        """End the watch, if there is one, and close the connections."""
        if self._watch is not None:
            self._watch.cancel()
        await self.engine.close()

    def _check_patience(self, error: EngineError) -> None:
        """Stop if the server only turns requests away, and works on none, for too long."""
        now = time.monotonic()
        if self._failing_since is None or any(
            now - sent > _WORKING_S for sent in self._sent.values()
        ):
            self._failing_since = now
        failing = now - self._failing_since
        if failing > self._give_up_after_s:
            raise self._stop(
                f"{self.url} answered no request for {failing:.0f} s ({error}); the rest "
                "stays pending. Run the same command again to go on."
            )

    def _same_weights(self, now: str | None) -> None:
        was = self.info.weight_version
        if was is None and now is not None:
            self.info.weight_version = now
            self._on_weights(now)
        if was is not None and now is not None and now != was:
            raise self._stop(
                f"{self.url} now generates with weights version {now!r}, and the run began "
                f"with {was!r}; rows of both must not be mixed. Serve {was!r} again, or begin a "
                "new run."
            )

    def _stop(self, why: str) -> CaptureStopped:
        if self._stopped is None:
            self._stopped = CaptureStopped(why)
        self._up.set()
        return self._stopped

    def _went_down(self, error: ServerUnreachable) -> None:
        self._up.clear()
        if self._watch is None or self._watch.done():
            self._say(f"{error}; waiting for it")
            self._watch = asyncio.create_task(self._wait_until_up(error))

    async def _wait_until_up(self, error: ServerUnreachable) -> None:
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            if await self.engine.reachable():
                break
            if time.monotonic() - began > self._give_up_after_s:
                self._stop(
                    f"{error} for {time.monotonic() - began:.0f} s; the rest stays pending. "
                    "Start the server and run the same command again to go on."
                )
                return
        await self._recognise()
        self._up.set()

    async def _recognise(self) -> None:
        """A server that came back must be the one that the run began with."""
        try:
            now = await self.engine.identify()
        except EngineError:
            return  # gone again, or still starting: the next request finds out
        except Exception as unsuitable:
            self._stop(str(unsuitable))
            return
        if self.info.model is not None and now.model not in (None, self.info.model):
            self._stop(f"{self.url} came back with {now.model}, not {self.info.model}")
        else:
            self._same_weights_or_stop(now.weight_version)
            self._say(f"{self.url} answers again")

    def _same_weights_or_stop(self, version: str | None) -> None:
        try:
            self._same_weights(version)
        except CaptureStopped:
            return  # kept in _stopped; every waiting request sees it
