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
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0


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
    ) -> None:
        """Wrap an engine.

        Args:
            engine: where requests go.
            info: who the server said it was when the capture began.
            tries: how often a request is sent before its row fails.
            give_up_after_s: how long nothing may answer before the capture stops.
            say: takes one line for the user.
        """
        self.engine = engine
        self.info = info
        self._tries = tries
        self._give_up_after_s = give_up_after_s
        self._say = say
        self._up = asyncio.Event()
        self._up.set()
        self._watch: asyncio.Task[None] | None = None
        self._stopped: CaptureStopped | None = None
        self._answered = 0
        self._last_answer = time.monotonic()
        self.in_flight = 0

    async def generate(self, request: Request) -> Generation:
        """Generate, trying again as long as that makes sense.

        Raises:
            RowFailed: this request cannot be answered.
            CaptureStopped: no request can be now.
        """
        met: list[str] = []
        pause = _FIRST_PAUSE_S
        while True:
            await self._up.wait()
            if self._stopped is not None:
                raise self._stopped
            answered_before = self._answered
            self.in_flight += 1
            try:
                generation = await self.engine.generate(request)
                if generation.finish_reason in ("stop", "length"):
                    self._answered += 1
                    self._last_answer = time.monotonic()
                    self._same_weights(generation.weight_version)
                    return generation
                error: EngineError = MalformedAnswer(
                    f"the engine's finish reason is {generation.finish_reason}",
                    reason="finish_reason",
                )
                if len(met) + 1 >= self._tries:
                    return generation  # the checks refuse it and keep its partial ids
            except ServerUnreachable as gone:
                self._went_down(gone)
                continue
            except RequestRefused as refused:
                if refused.status in _CONCERNS_ALL:
                    raise self._stop(
                        f"{self.engine.url} refuses every request: {refused}"
                    ) from None
                raise RowFailed(str(refused), reason=refused.reason, tries=met) from refused
            except EngineError as failed:
                error = failed
            finally:
                self.in_flight -= 1
            if isinstance(error, BusyError) and error.status in _OVERLOADED:
                self._check_patience(error)
                if self._answered == answered_before:  # nobody is served: it is not this row
                    await self._sleep(pause, error)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                    continue
            met.append(str(error))
            if len(met) >= self._tries:
                raise RowFailed(
                    f"{error} (try {len(met)} of {self._tries})",
                    reason=error.reason,
                    tries=met,
                    seen=getattr(error, "seen", ""),
                    pending=isinstance(error, TransportError),
                )
            await self._sleep(pause, error)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """End the watch, if there is one, and close the connections."""
        if self._watch is not None:
            self._watch.cancel()
        await self.engine.close()

    async def _sleep(self, pause: float, error: EngineError) -> None:
        asked = error.retry_after if isinstance(error, BusyError) else None
        await asyncio.sleep(asked if asked is not None else pause * random.uniform(0.5, 1.5))

    def _check_patience(self, error: EngineError) -> None:
        silent = time.monotonic() - self._last_answer
        if silent > self._give_up_after_s:
            raise self._stop(
                f"{self.engine.url} answered no request for {silent:.0f} s ({error}); the rest "
                "stays pending. Run the same command again to go on."
            )

    def _same_weights(self, now: str | None) -> None:
        was = self.info.weight_version
        if was is not None and now is not None and now != was:
            raise self._stop(
                f"{self.engine.url} now generates with weights version {now!r}, and the run began "
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
        self._last_answer = time.monotonic()
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
            self._stop(f"{self.engine.url} came back with {now.model}, not {self.info.model}")
        else:
            self._same_weights_or_stop(now.weight_version)
            self._say(f"{self.engine.url} answers again")

    def _same_weights_or_stop(self, version: str | None) -> None:
        try:
            self._same_weights(version)
        except CaptureStopped:
            return  # kept in _stopped; every waiting request sees it
