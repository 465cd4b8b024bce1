"""Requests to the servers of one target, tried again as long as that makes sense.

Invariants: a request waits only while no usable server has a free place; a server that is down,
stalled, restarted or fails everybody costs no row a try; a request is rejected only by its own
last try or by a refusal that will not change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from eyas.engines.base import Generation, Request
from eyas.engines.line import Waiter
from eyas.engines.roster import OF_THE_REQUEST, Roster
from eyas.engines.server import Server
from eyas.engines.tries import Suspects, Tries
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
_BAD_GATEWAY = frozenset((502, 504))
"""Those with which a proxy says that the server broke off."""
_WORKING_S = 10.0
"""A request that is held this long is being worked on."""


class _Moved(Exception):
    """The request was taken away from a server and is to be sent elsewhere."""

    def __init__(self, tokens: float | None) -> None:
        super().__init__()
        self.tokens = tokens
        """How long its answer is expected to be now."""


class Pool(Roster):
    """A roster to which requests are sent."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        tries: int = 4,
        give_up_after_s: float = 120.0,
        say: Callable[[str], None] = lambda _: None,
        on_weights: Callable[[str], None] = lambda _: None,
        on_places: Callable[[], None] = lambda: None,
        left: Callable[[float], float] = lambda _: math.inf,
    ) -> None:
        """Join servers.

        Args:
            servers: at least one, all of the same target.
            tries: how often a request is sent before its row fails.
            give_up_after_s: how long nothing may answer before the capture stops.
            say: takes one line for the user.
            on_weights: takes the weights version, where only the first answer tells it.
            on_places: called when there are more places than before.
            left: output tokens of everything that was not begun yet, given the mean of an answer;
                infinite where nobody knows.
        """
        super().__init__(
            servers,
            give_up_after_s=give_up_after_s,
            say=say,
            on_weights=on_weights,
            on_places=on_places,
            left=left,
        )
        self._tries = tries
        self._suspects = Suspects()
        self._pausing = 0
        self._answered = 0
        self._failing_since: float | None = None

    @property
    def capacity(self) -> int:
        """Requests that keep the servers full, those that wait to be tried again besides.

        With several servers some more, so that each free place finds one that suits it.
        """
        places = self.places
        in_line = 0 if len(self.servers) < 2 else 8 + places // 8
        return places + in_line + min(places, self._pausing + self._suspects.waiting)

    async def generate(
        self,
        request: Request,
        *,
        near: str | None = None,
        group: bytes | None = None,
        tokens: float | None = None,
    ) -> Generation:
        """Generate, trying again as long as that makes sense.

        Args:
            request: what is asked.
            near: the address that answered what comes before the prompt, and is likely to hold
                it in its cache.
            group: whatever only requests with the very same prompt share.
            tokens: how long the answer is expected to be, where that is known.

        Raises:
            RowFailed: this request cannot be answered.
            CaptureStopped: no request can be now.
        """
        tries = Tries(self._tries)
        several = len(self.servers) > 1
        marks = self._line.marks(request.prompt_ids, group) if several else ()
        again = False
        while True:
            company = await self._suspects.enter(tries, self.places) if tries.downs else 0
            generation, error = None, None
            try:
                if self._stopped is not None:
                    raise self._stopped
                server = await self._line.place(
                    Waiter(
                        tokens=self._outlook.mean_tokens if tokens is None else tokens,
                        near=near,
                        avoid=tries.avoid,
                        marks=marks,
                        first=again or near is not None,
                    )
                )
                answered_before, downs_before = server.answered, server.downs
                generation = await self._attempt(server, request, tokens)
            except _Moved as moved:
                tokens = moved.tokens
            except CaptureStopped:
                raise
            except EngineError as failed:
                error = failed
            finally:
                again = True
                if company:
                    self._suspects.leave()
            if generation is not None:
                if generation.finish_reason in ("stop", "length"):
                    if self._same_weights(server, generation.weight_version):
                        self._witness.remember(request)
                        return generation
                    continue
                error = MalformedAnswer(
                    f"the engine's finish reason is {generation.finish_reason}",
                    reason="finish_reason",
                )
            tries.avoid = server
            if isinstance(error, ServerUnreachable):
                self.went_down(server, str(error), moves=False)
                continue
            if isinstance(error, RequestRefused):
                await self._check_refusal(server, error, tries)
                continue
            if error is None:  # it was taken away
                error = TransportError(f"{server.url} went down while it held the request")
                last = not server.up and self._count_down(tries, error, company)
            else:
                last = await self._find_fault(
                    server, error, tries, company, answered_before, downs_before
                )
            if last and generation is not None:
                return generation  # an abort goes to the checks, which keep its ids
            if last:
                raise tries.failure(error, server) from error

    async def _find_fault(
        self,
        server: Server,
        error: EngineError,
        tries: Tries,
        company: int,
        before: int,
        downs_before: int,
    ) -> bool:
        """Wait, and see whether a failure was the row's own; true if it was its last.

        `before` is how many answers the server had given when the request was sent, and
        `downs_before` how often it had gone down.
        """
        status = error.status if isinstance(error, BusyError) else None
        busy = status in _OVERLOADED
        if busy:
            self._check_patience(server, error)
        answered = before if busy else server.answered
        await self._pause(server, tries, error)
        if server.downs != downs_before and not busy:  # others found it, and it may be back
            return self._count_down(tries, error, company)
        fault = None
        if server.answered == answered and not (busy and server.attempts):  # nobody can tell
            fault = await self._witness.fault_of(server)
        answers = server.answered != answered
        if fault is None or answers:
            if busy:
                return answers and tries.count_turned_away(error)
            return tries.count(error)
        if isinstance(fault, RequestRefused):
            if fault.status not in OF_THE_REQUEST:
                self.refuse(server, f"{server.url} refuses every request: {fault}")
            return tries.count(error, own=fault.status in OF_THE_REQUEST)
        there = not isinstance(fault, ServerUnreachable)
        why = f"{server.url} answers nobody ({fault})" if there else str(fault)
        self.went_down(server, why, moves=False)
        if busy and status not in _BAD_GATEWAY:
            return tries.count(error, own=False)
        return self._count_down(tries, error, company)

    def _count_down(self, tries: Tries, error: EngineError, company: int) -> bool:
        """A server went down with a request: whether that tells against the request."""
        others = self._answered != tries.answered_then or not self.in_flight
        tries.answered_then = self._answered
        return tries.count_down(error, alone=company == 1 and others)

    async def _check_refusal(self, server: Server, error: RequestRefused, tries: Tries) -> None:
        """A 4xx that will not change ends the row, or the server, where nobody else gets through.

        Raises:
            RowFailed: it concerns this row.
        """
        fault: EngineError | None = None
        if error.status not in OF_THE_REQUEST:
            fault = await self._witness.fault_of(server)
        if isinstance(fault, RequestRefused):
            self.refuse(server, f"{server.url} refuses every request: {error}")
        elif fault is None:
            raise RowFailed(
                str(error), reason=error.reason, tries=tries.met, server=server.url
            ) from error
        else:
            tries.count(error, own=False)
            await self._pause(server, tries)

    async def _pause(self, server: Server, tries: Tries, error: EngineError | None = None) -> None:
        """Wait before the next try, shorter where another server may take the request."""
        elsewhere = any(other.usable for other in self.servers if other is not server)
        self._pausing += 1
        try:
            await asyncio.sleep(tries.pause(error, elsewhere=elsewhere))
        finally:
            self._pausing -= 1

    async def _attempt(self, server: Server, request: Request, tokens: float | None) -> Generation:
        """Send a request once, to a server that has a place for it, and give the place back."""
        number, attempt = server.begin(request.max_new_tokens, tokens)
        try:
            generation = await server.engine.generate(request)
        except asyncio.CancelledError:
            assert attempt.task is not None
            if not attempt.moved or attempt.task.uncancel() > 0:
                raise  # the capture ends, whether the request was also taken away or not
            if attempt.lost:
                waited = time.monotonic() - attempt.sent
                raise TransportError(
                    f"{server.url} gave no answer in {waited:.0f} s, where others got theirs"
                ) from None
            raise _Moved(attempt.tokens) from None
        finally:
            server.end(number)
            self._line.hand_out(server)
        generation.server = server.url
        if generation.finish_reason in ("stop", "length"):
            self._answered += 1
            self._failing_since = None
            server.answered_with(attempt, len(generation.output_ids))
        return generation

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
