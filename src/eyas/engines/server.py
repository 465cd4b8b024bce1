"""One address of a target: what it holds, how much it may hold, and whether it is up.

Invariant: a request that was given a place holds it until it is given back; a server that is
down, or refused for what it serves, gives no places.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from itertools import count

from eyas.engines.base import Engine, ServerInfo

DEFAULT_SLOTS = 64
"""Where a server does not tell how many requests it runs at once."""
FIRST_SLOTS, MOST_SLOTS = 256, 2048
_GROWTH, _SHRINK_ABOVE = 0.25, 0.1
"""A full server without a queue gets a quarter more; a queue above a tenth is let run down."""
_numbers = count()


_UNHEARD = 3
"""So often a server may not tell its load before it is not asked any more."""
_WINDOW_S, _WINDOW_ANSWERS = 5.0, 2
"""A rate is measured over this time at least, and over two answers a place."""
_STEEP = 1.1
ENOUGH = 4
"""Answers from which a server's pace is told, or requests whose silence tells something."""
_KEPT = 63 / 64
"""How much of the earlier answers' weight each answer leaves."""


@dataclass(slots=True)
class _Climb:
    """Where the places of a server that tells nothing stand on the slope of its tokens."""

    since: float
    tokens: int
    """Its output tokens at that time."""
    best: float
    """The best tokens per second so far."""
    settled: bool = False


@dataclass(slots=True)
class Attempt:
    """One request that a server holds."""

    sent: float
    task: asyncio.Task[object] | None
    budget: int = 0
    """How many ids it may generate."""
    tokens: float | None = None
    """How many it is expected to; None where nothing is known of it."""
    answered: int = 0
    """How many answers its server had given when it was sent."""
    moved: bool = False
    """It was taken away, to be sent elsewhere."""
    lost: bool = False
    """It was taken away since its server seems to have forgotten it."""


class Server:
    """A server with its places."""

    def __init__(self, engine: Engine, info: ServerInfo, *, slots: int | None = None) -> None:
        """Wrap an engine.

        Args:
            engine: the address.
            info: who it said it was.
            slots: how many requests it is to hold at once; where None, what it says of itself,
                and then by what it says of its load.
        """
        self.engine = engine
        self.info = info
        self.pinned = slots is not None
        self._most = min(info.slots or MOST_SLOTS, MOST_SLOTS)
        self.slots = slots or min(info.slots or DEFAULT_SLOTS, FIRST_SLOTS)
        self.up = True
        self.downs = 0
        """How often it went down."""
        self.refused: str | None = None
        """Why it gets nothing any more: other weights, another model, a key that it refuses."""
        self.held = 0
        self.attempts: dict[int, Attempt] = {}
        self.queued: int | None = None
        self.answered = 0
        self.output_tokens = 0
        self.last_answer = time.monotonic()
        self.longest_s = 0.0
        """The longest that an answer took here."""
        self.most_tokens = math.inf
        """Rows that are expected to be longer are through sooner elsewhere; see `outlook`."""
        self.awaited = 0
        """Requests that wait in line for this very server."""
        self._busy_s = 0.0
        self._took_s = self._took_tokens = 0.0
        self.watch: asyncio.Task[None] | None = None
        self._unheard = 0
        self._climbing = _Climb(time.monotonic(), 0, 0.0)
        self._answered_then = 0

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def usable(self) -> bool:
        """Whether it may be given requests at all."""
        return self.up and self.refused is None

    @property
    def free(self) -> int:
        """Places that are free now."""
        return self.slots - self.held if self.usable else 0

    @property
    def token_s(self) -> float | None:
        """Seconds that an output token of one request takes here, of the latest answers.

        None where there were too few.
        """
        enough = self.answered >= ENOUGH and self._took_tokens
        return self._took_s / self._took_tokens if enough else None

    def busy_s(self, now: float) -> float:
        """Seconds that its places were in use, added up."""
        return self._busy_s + sum(now - attempt.sent for attempt in self.attempts.values())

    def begin(self, budget: int, tokens: float | None = None) -> tuple[int, Attempt]:
        """A request for so many ids at most is sent now; it is expected to get so many."""
        number, task = next(_numbers), asyncio.current_task()
        attempt = Attempt(time.monotonic(), task, budget, tokens, self.answered)
        self.attempts[number] = attempt
        return number, attempt

    def end(self, number: int) -> None:
        """A request is no longer held; its place is free."""
        self._busy_s += time.monotonic() - self.attempts.pop(number).sent
        self.held -= 1

    def answered_with(self, attempt: Attempt, tokens: int) -> None:
        """Count a finished answer."""
        now = time.monotonic()
        took = now - attempt.sent
        self.answered += 1
        self.output_tokens += tokens
        self.last_answer = now
        self.longest_s = max(self.longest_s, took)
        self._took_s = _KEPT * self._took_s + took
        self._took_tokens = _KEPT * self._took_tokens + tokens

    def oldest(self) -> float | None:
        """When the request that it holds the longest was sent."""
        return min((attempt.sent for attempt in self.attempts.values()), default=None)

    def overdue(self, quiet_s: float, factor: float) -> list[int]:
        """Requests that it seems to have forgotten.

        Even a whole budget would have been made since, `factor` times over and in more than
        `quiet_s`, and many that came later were answered (or nothing else is left here).
        """
        now, pace = time.monotonic(), self.token_s
        if pace is None:
            return []
        late = [
            number
            for number, attempt in self.attempts.items()
            if now - attempt.sent
            > max(quiet_s, factor * max(self.longest_s, pace * attempt.budget))
        ]
        if len(late) == len(self.attempts):
            return late
        enough = 2 * self.slots
        return [n for n in late if self.answered - self.attempts[n].answered >= enough]

    def take_away(self, numbers: list[int] | None = None, *, lost: bool = False) -> int:
        """Take requests away (all where None): each is cancelled here, to be sent elsewhere."""
        taken = 0
        for number in list(self.attempts) if numbers is None else numbers:
            attempt = self.attempts.get(number)
            if attempt is not None and attempt.task is not None and not attempt.moved:
                attempt.moved, attempt.lost = True, lost
                attempt.task.cancel()
                taken += 1
        return taken

    async def fit_slots(self) -> None:
        """Set the places by the server's own count: full, with a short queue and no more."""
        load = await self.engine.load() if self._unheard < _UNHEARD else None
        if load is None:
            self._unheard += 1
            if not self.pinned and self.info.slots is None:
                self._climb()
            return
        self._unheard = 0
        self.queued = load.waiting
        if self.pinned:
            return
        if load.waiting > max(2, _SHRINK_ABOVE * load.running):
            self.slots = max(1, min(self.slots, load.running + max(1, load.running // 20)))
        elif load.waiting == 0 and self.held >= self.slots:
            self.slots = min(self._most, self.slots + max(4, int(_GROWTH * self.slots)))

    def _climb(self) -> None:
        """Half as many places again, as long as that makes a tenth more tokens per second."""
        climb, now = self._climbing, time.monotonic()
        if climb.settled:
            return
        if self.held < self.slots:  # not full: nothing can be told
            self._climbing = _Climb(now, self.output_tokens, climb.best)
            self._answered_then = self.answered
            return
        enough = self.answered - self._answered_then >= _WINDOW_ANSWERS * self.slots
        if now - climb.since < _WINDOW_S or not enough:
            return
        rate = (self.output_tokens - climb.tokens) / (now - climb.since)
        grows = rate > _STEEP * climb.best
        if grows:
            self.slots = min(self._most, self.slots + self.slots // 2)
        elif climb.best:
            self.slots = max(1, self.slots * 2 // 3)  # the last step was of no use
        self._climbing = _Climb(now, self.output_tokens, max(rate, climb.best), not grows)
        self._answered_then = self.answered
