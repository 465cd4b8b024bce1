"""The servers of one target, kept full and no fuller, and requests that are tried again.

Invariants: a request waits only while no usable server has a free place; a server that is down,
stalled, restarted or fails everybody costs no row a try; a request is rejected only by its own
last try or by a refusal that will not change; a server that serves anything else than the run
began with gets nothing more; when nothing can succeed the capture stops with one sentence and
every open row stays pending.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence

from eyas.engines.base import Generation, Request, ServerInfo
from eyas.engines.line import Line, Waiter
from eyas.engines.outlook import Outlook
from eyas.engines.server import Server
from eyas.engines.tries import FIRST_PAUSE_S, Suspects, Tries, Witness
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
_OF_THE_REQUEST = frozenset((400, 413, 422))
"""Refusals that concern the request itself; others may concern everybody (a key, an address)."""
_WORKING_S = 10.0
"""A request that is held this long is being worked on."""
_LONGEST_LOOK_S = 2.0
"""Between looks at a server that is down: looking costs it next to nothing."""
_HEALTH_S = 15.0
_LOOKS = 3
"""After so many looks at a server that answers nobody its requests go elsewhere."""


class _Moved(Exception):
    """The request was taken away from a server and is to be sent elsewhere."""

    def __init__(self, tokens: float | None) -> None:
        super().__init__()
        self.tokens = tokens
        """How long its answer is expected to be now."""


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
        self.servers = list(servers)
        self.model = servers[0].info.model
        self.weights = next((s.info.weight_version for s in servers if s.info.weight_version), None)
        self._tries = tries
        self._give_up_after_s = give_up_after_s
        self.say = say
        self._on_weights = on_weights
        self._on_places = on_places
        self._line = Line(self.servers)
        self._outlook = Outlook(self.servers, left)
        self._stopped: CaptureStopped | None = None
        self._witness = Witness()
        self._suspects = Suspects()
        self._pausing = 0
        self._answered = 0
        self._failing_since: float | None = None
        self._all_down_since: float | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were sent and are not answered."""
        return sum(len(server.attempts) for server in self.servers)

    @property
    def mean_tokens(self) -> float:
        """Output tokens of an answer so far."""
        return self._outlook.mean_tokens

    @property
    def expected_tokens(self) -> float:
        """Output tokens that the answers to all requests in flight are expected to have."""
        return sum(
            attempt.tokens or self.mean_tokens
            for server in self.servers
            for attempt in server.attempts.values()
        )

    @property
    def capacity(self) -> int:
        """Requests that keep the servers full, those that wait to be tried again besides.

        With several servers some more, so that each free place finds one that suits it.
        """
        places = self._places
        in_line = 0 if len(self.servers) < 2 else 8 + places // 8
        return places + in_line + min(places, self._pausing + self._suspects.waiting)

    @property
    def _places(self) -> int:
        """Places of all servers that may be given requests, now or when they are up again."""
        return sum(server.slots for server in self.servers if server.refused is None)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._line)

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
            company = await self._suspects.enter(tries, self._places) if tries.downs else 0
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
                answered_before = server.answered
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
                last = await self._find_fault(server, error, tries, company, answered_before)
            if last and generation is not None:
                return generation  # an abort goes to the checks, which keep its ids
            if last:
                raise tries.failure(error, server) from error

    async def _find_fault(
        self, server: Server, error: EngineError, tries: Tries, company: int, before: int
    ) -> bool:
        """Wait, and see whether a failure was the row's own; true if it was its last.

        `before` is how many answers the server had given when the request was sent.
        """
        status = error.status if isinstance(error, BusyError) else None
        busy = status in _OVERLOADED
        if busy:
            self._check_patience(server, error)
        answered = before if busy else server.answered
        await self._pause(server, tries, error)
        fault = None
        if server.answered == answered and not (busy and server.attempts):  # nobody can tell
            fault = await self._witness.fault_of(server)
        answers = server.answered != answered
        if fault is None or answers:
            if busy:
                return answers and tries.count_turned_away(error)
            return tries.count(error)
        if isinstance(fault, RequestRefused):
            if fault.status not in _OF_THE_REQUEST:
                self.refuse(server, f"{server.url} refuses every request: {fault}")
            return tries.count(error, own=fault.status in _OF_THE_REQUEST)
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
        if error.status not in _OF_THE_REQUEST:
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

    async def close(self) -> None:
        """End the watches, if there are any, and close the connections."""
        self.end_watches()
        for server in self.servers:
            await server.engine.close()

    def end_watches(self) -> None:
        """Ask no server any more whether it is there."""
        self._witness.close()
        for server in self.servers:
            if server.watch is not None:
                server.watch.cancel()

    # -- servers that come and go ------------------------------------------------------------

    def add(self, server: Server) -> None:
        """A server joins; it gets its share at once."""
        self.servers.append(server)
        self._changed()

    def foresee(self) -> None:
        """Look at what is left to do, and take from slow servers what others are through with
        sooner."""
        self._changed()
        for server, numbers in self._outlook.late():
            server.take_away(numbers)

    def _changed(self) -> None:
        """There are other servers or places than before."""
        self._outlook.update()
        self._line.hand_out()
        self._on_places()

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
            self._changed()

    def stop(self, why: str) -> CaptureStopped:
        """Nothing more can be captured: everyone who waits is told."""
        if self._stopped is None:
            self._stopped = CaptureStopped(why)
            self._line.fail(self._stopped)
        return self._stopped

    def went_down(self, server: Server, why: str, *, moves: bool = True) -> None:
        """A server is not there (or does not move); its requests go elsewhere.

        Where not `moves`, those that it holds are left to it for a while: it may be well again.
        """
        if not server.up:
            return
        server.up = False
        if moves:
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
        self._line.lost(server)
        self._changed()

    async def _wait_until_up(self, server: Server, why: str) -> None:
        pause, looks = FIRST_PAUSE_S, 0
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, _LONGEST_LOOK_S)
            if await self._is_back(server):
                break
            if server.refused is not None:
                return
            looks += 1
            if looks == _LOOKS:
                server.take_away()
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
        server.up = True
        server.last_answer = time.monotonic()
        self._all_down_since = None
        self.say(f"{server.url} answers again")
        self._changed()

    async def _is_back(self, server: Server) -> bool:
        """Whether a server that was down gives ids again, and is the one that it was."""
        engine = server.engine
        if not await engine.reachable() or await engine.healthy(_HEALTH_S) is False:
            return False
        try:
            now = await engine.identify()
        except RequestRefused as refused:
            self.refuse(server, f"{server.url} refuses every request: {refused}")
            return False
        except EngineError:
            return False  # gone again, or still starting
        except Exception as unsuitable:
            self.refuse(server, str(unsuitable))
            return False
        if (other := self._other_server(server, now)) is not None:
            self.refuse(server, f"{server.url} came back with {other}")
            return False
        if not self._same_weights(server, now.weight_version):
            return False
        fault = await self._witness.fault_of(server)
        if isinstance(fault, RequestRefused) and fault.status not in _OF_THE_REQUEST:
            self.refuse(server, f"{server.url} refuses every request: {fault}")
        return fault is None or (isinstance(fault, RequestRefused) and server.refused is None)

    def _other_server(self, server: Server, now: ServerInfo) -> str | None:
        """What a server is now and was not before, beside its weights."""
        was = server.info
        if self.model is not None and now.model not in (None, self.model):
            return f"{now.model}, not {self.model}"
        if None not in (was.version, now.version) and was.version != now.version:
            return f"version {now.version} of {now.engine}, not {was.version}"
        context = now.context_length
        if context is not None and was.context_length is not None and context < was.context_length:
            return f"a context of {context} ids, not {was.context_length}"
        return None

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
