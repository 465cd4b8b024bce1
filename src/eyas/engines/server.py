"""One address of a target: what it holds, how much it may hold, and whether it is up.

Invariant: a request that was given a place holds it until it is given back; a server that is
down, or refused for what it serves, gives no places.
"""

from __future__ import annotations

import asyncio
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


@dataclass(slots=True)
class Attempt:
    """One request that a server holds."""

    sent: float
    task: asyncio.Task[object] | None
    moved: bool = False
    """It was taken away, to be sent elsewhere."""


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
        self.token_s: float | None = None
        """Seconds an output token of one request takes here, smoothed."""
        self.watch: asyncio.Task[None] | None = None

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

    def begin(self) -> tuple[int, Attempt]:
        """A request is sent now."""
        number, attempt = next(_numbers), Attempt(time.monotonic(), asyncio.current_task())
        self.attempts[number] = attempt
        return number, attempt

    def answered_with(self, attempt: Attempt, tokens: int) -> None:
        """Count a finished answer."""
        now = time.monotonic()
        took = now - attempt.sent
        self.answered += 1
        self.output_tokens += tokens
        self.last_answer = now
        self.longest_s = max(self.longest_s, took)
        if tokens:
            pace = took / tokens
            self.token_s = pace if self.token_s is None else 0.9 * self.token_s + 0.1 * pace

    def oldest(self) -> float | None:
        """When the request that it holds the longest was sent."""
        return min((attempt.sent for attempt in self.attempts.values()), default=None)

    def take_away(self, numbers: list[int] | None = None) -> int:
        """Take requests away (all where None): each is cancelled here, to be sent elsewhere."""
        taken = 0
        for number in list(self.attempts) if numbers is None else numbers:
            attempt = self.attempts.get(number)
            if attempt is not None and attempt.task is not None and not attempt.moved:
                attempt.moved = True
                attempt.task.cancel()
                taken += 1
        return taken

    async def fit_slots(self) -> None:
        """Set the places by the server's own count: full, with a short queue and no more."""
        load = await self.engine.load()
        if load is None:
            return
        self.queued = load.waiting
        if self.pinned:
            return
        if load.waiting > max(2, _SHRINK_ABOVE * load.running):
            self.slots = max(1, min(self.slots, load.running + max(1, load.running // 20)))
        elif load.waiting == 0 and self.held >= self.slots:
            self.slots = min(self._most, self.slots + max(4, int(_GROWTH * self.slots)))
