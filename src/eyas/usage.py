"""How full the servers' places were while a capture ran.

Invariants: seconds in use are those between a request's sending and its end, exactly; what a
server offers is counted while it is usable; nothing is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from eyas.engines.server import Server
from eyas.progress import Use


class Usage:
    """Adds up, each time that it is told to look."""

    def __init__(self, servers: Sequence[Server]) -> None:
        """Take the servers of a pool, as they come and go."""
        self._servers = servers
        self._offered: dict[bool, float] = {True: 0.0, False: 0.0}
        self._used: dict[bool, float] = {True: 0.0, False: 0.0}
        """Place-seconds: while rows were left to begin (True), and after that."""
        self._looked_at: float | None = None
        self._offering = 0
        self._busy_then = 0.0
        self._half_full_at = 0.0

    def look(self, *, left: bool) -> Use:
        """Add what has passed since the last look.

        Args:
            left: whether there are rows that are not begun.
        """
        now = time.monotonic()
        busy = sum(server.busy_s(now) for server in self._servers)
        if self._looked_at is None:
            self._half_full_at = now
        else:
            self._offered[left] += self._offering * (now - self._looked_at)
            self._used[left] += busy - self._busy_then
        self._looked_at, self._busy_then = now, busy
        self._offering = sum(server.slots for server in self._servers if server.usable)
        held = sum(len(server.attempts) for server in self._servers)
        if 2 * held >= self._offering:
            self._half_full_at = now
        return Use(
            share=_share(sum(self._used.values()), sum(self._offered.values())),
            share_with_rows_left=_share(self._used[True], self._offered[True]),
            below_half_s=now - self._half_full_at,
        )


def _share(used: float, offered: float) -> float | None:
    return min(1.0, used / offered) if offered > 0 else None
