"""The servers of one target: which there are, which answer, and when nothing can go on.

Invariants: a server that is down gets its requests taken away and is looked at until it is back;
one that serves anything else than the run began with gets nothing more; when no server is left
that could answer, the capture stops with one sentence and every open row stays pending.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence

from eyas.engines.base import ServerInfo
from eyas.engines.line import Line
from eyas.engines.outlook import Outlook
from eyas.engines.server import Server
from eyas.engines.tries import FIRST_PAUSE_S, Witness
from eyas.errors import CaptureStopped, EngineError, RequestRefused

OF_THE_REQUEST = frozenset((400, 413, 422))
"""Refusals that concern the request itself; others may concern everybody (a key, an address)."""
_LONGEST_LOOK_S = 2.0
"""Between looks at a server that is down: looking costs it next to nothing."""
_HEALTH_S = 15.0
_LOOKS = 3
"""After so many looks at a server that answers nobody its requests go elsewhere."""


class Roster:
    """One target at several addresses."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        give_up_after_s: float,
        say: Callable[[str], None],
        on_weights: Callable[[str], None],
        on_places: Callable[[], None],
        left: Callable[[float], float],
    ) -> None:
        """Join servers; see `eyas.engines.pool.Pool`."""
        self.servers = list(servers)
        self.model = servers[0].info.model
        self.weights = next((s.info.weight_version for s in servers if s.info.weight_version), None)
        self.say = say
        self._give_up_after_s = give_up_after_s
        self._on_weights = on_weights
        self._on_places = on_places
        self._line = Line(self.servers)
        self._outlook = Outlook(self.servers, left)
        self._witness = Witness()
        self._stopped: CaptureStopped | None = None
        self._all_down_since: float | None = None
        self._others: dict[Server, str] = {}
        """Servers that are not what they were, and what they are instead."""
        self._said_of_others: set[str] = set()

    @property
    def in_flight(self) -> int:
        """Requests that were sent and are not answered."""
        return sum(len(server.attempts) for server in self.servers)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._line)

    @property
    def places(self) -> int:
        """Places of all servers that may be given requests, now or when they are up again."""
        return sum(server.slots for server in self.servers if server.refused is None)

    @property
    def spare(self) -> tuple[int, float]:
        """Free places of slow servers that are for short answers only, and how short.

        Nobody who waits in line has answers so short, or a place would not be free.
        """
        slow = [s for s in self.servers if s.free > 0 and s.most_tokens < math.inf]
        return sum(s.free for s in slow), max((s.most_tokens for s in slow), default=0.0)

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

    def _put_off(self, server: Server, why: str) -> None:
        """A server is another than it was; it gets nothing until it is the same again.

        One that seemed to be the same, and whose answers say again that it is not, is refused.
        """
        why = f"{why.rstrip('.')}."
        if self._others.get(server) == why:
            return
        if server.up and why in self._said_of_others:
            self.refuse(server, why)
            return
        self._others[server] = why
        self._said_of_others.add(why)
        if server.up:
            self.went_down(server, why)
        else:
            self.say(f"{why} Waiting until it is what it was.")

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
        server.downs += 1
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
                for_s = f"for {time.monotonic() - since:.0f} s; the rest stays pending"
                if server in self._others:
                    self.stop(f"{self._others[server]} It was so {for_s}.")
                else:
                    self.stop(
                        f"{why} {for_s}. Start the server and run the same command again to go on."
                    )
                return
        self._others.pop(server, None)
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
            self._put_off(server, str(unsuitable))
            return False
        if (other := self._other_server(server, now)) is not None:
            self._put_off(server, f"{server.url} came back with {other}")
            return False
        if not self._same_weights(server, now.weight_version):
            return False
        fault = await self._witness.fault_of(server)
        if isinstance(fault, RequestRefused) and fault.status not in OF_THE_REQUEST:
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
        self._put_off(
            server,
            f"{server.url} now generates with weights version {now!r}, and the run began with "
            f"{self.weights!r}; rows of both must not be mixed. Serve {self.weights!r} again, or "
            "begin a new run.",
        )
        return False
