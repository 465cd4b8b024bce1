"""How fast a capture goes, and when it will be through.

Invariants: every rate is made of completions, never of what was only sent; the clock is the
capture's own (`Progress.seconds`), so that the same snapshots always give the same figures; an
earlier capture's rows, which a continued one meets again within seconds, speed nothing up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from eyas.progress import Progress

WINDOW_S = 60.0
"""Over how long the moving rates are taken."""
_ROWS_WANTED = 20
"""Long answers may finish fewer than this in a minute: the rows' rate then looks back further."""
_LONGEST_S = 1800.0
"""But no further than this: who finished nothing for half an hour has no forecast."""
_MARK_EVERY_S = 1.0
_FIRST_ROWS, _FIRST_S = 3, 2.0
"""What must have been seen before anything is foretold."""


@dataclass(slots=True)
class Rates:
    """Figures a second."""

    rows: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    """Over the last minute, or since the first request where that is shorter."""
    overall_rows: float = 0.0
    overall_prompt_tokens: float = 0.0
    overall_output_tokens: float = 0.0
    """Since the first request."""
    servers: dict[str, float] = field(default_factory=dict)
    """Output tokens a second over the last minute, by address."""
    eta_seconds: float | None = None
    """Seconds until the last row; None where it cannot be told."""
    quiet_seconds: float = 0.0
    """How long no row was finished."""


@dataclass(slots=True)
class _Mark:
    """The figures at one moment."""

    seconds: float
    rows: int
    prompt_tokens: int
    output_tokens: int
    servers: dict[str, int]


class Pace:
    """Takes snapshots in their order; see `take`."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._begin: _Mark | None = None
        self._last_row: tuple[int, float] = (0, 0.0)

    def take(self, progress: Progress) -> Rates:
        """Look at one more snapshot."""
        now = _Mark(
            progress.seconds,
            progress.new,
            progress.prompt_tokens,
            progress.output_tokens,
            {server.url: server.output_tokens for server in progress.servers},
        )
        if self._begin is None or not (now.rows or now.output_tokens or progress.in_flight):
            # Nothing was sent yet: the time in which an earlier capture's rows are met again.
            self._begin = now
            self._marks = deque([now])
            self._last_row = (now.rows, now.seconds)
            return Rates()
        if now.rows > self._last_row[0]:
            self._last_row = (now.rows, now.seconds)
        rates = self._rates(now)
        rates.eta_seconds = self._eta(progress, now)
        if now.seconds - self._marks[-1].seconds >= _MARK_EVERY_S:
            self._marks.append(now)
        while len(self._marks) > 2 and self._marks[1].seconds <= now.seconds - _LONGEST_S:
            self._marks.popleft()
        return rates

    def _rates(self, now: _Mark) -> Rates:
        begin = self._begin
        assert begin is not None
        base = self._before(now.seconds - WINDOW_S)
        span, whole = now.seconds - base.seconds, now.seconds - begin.seconds
        rates = Rates(quiet_seconds=now.seconds - self._last_row[1])
        if span > 0:
            rates.rows = (now.rows - base.rows) / span
            rates.prompt_tokens = (now.prompt_tokens - base.prompt_tokens) / span
            rates.output_tokens = (now.output_tokens - base.output_tokens) / span
            rates.servers = {
                url: max(0, count - base.servers.get(url, 0)) / span
                for url, count in now.servers.items()
            }
        if whole > 0:
            rates.overall_rows = (now.rows - begin.rows) / whole
            rates.overall_prompt_tokens = (now.prompt_tokens - begin.prompt_tokens) / whole
            rates.overall_output_tokens = (now.output_tokens - begin.output_tokens) / whole
        return rates

    def _eta(self, progress: Progress, now: _Mark) -> float | None:
        total = progress.total
        if total is None:
            return None
        left = total - progress.done - progress.rejected
        if left <= 0:
            return 0.0 if progress.input_known else None
        base = self._before(now.seconds - WINDOW_S, rows=now.rows - _ROWS_WANTED)
        rows, span = now.rows - base.rows, now.seconds - base.seconds
        if rows < min(_FIRST_ROWS, left) or rows < 1 or span < _FIRST_S:
            return None
        tokens = now.output_tokens - base.output_tokens
        if progress.output_left is not None and tokens:  # the rows to come are shorter
            return progress.output_left * span / tokens
        return left * span / rows

    def _before(self, seconds: float, rows: int | None = None) -> _Mark:
        """The newest mark that is this old (and had no more rows), else the oldest."""
        for mark in reversed(self._marks):
            if mark.seconds <= seconds and (rows is None or mark.rows <= rows):
                return mark
        return self._marks[0]
