"""A capture as it runs: some lines that renew themselves on a terminal, one now and then elsewhere.

Invariants: figures are of durable rows and finished answers, never of what was only sent; what
cannot be shown (a terminal that is gone, a closed pipe) never ends a capture; a file or pipe
gets whole lines without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from eyas.cli.panel import Line, fit, one_line, panel
from eyas.cli.screen import Screen
from eyas.cli.tokens import printable

if TYPE_CHECKING:
    from eyas.pace import Pace
    from eyas.progress import Progress
    from eyas.status import Status

_OFTEN_S = 10.0
_LATER = ((120.0, 30.0), (600.0, 60.0))
"""After so many seconds a log file gets a line only every so often."""


class Live:
    """Shows `Progress`. Use as a context manager; `say` prints a lasting line."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = Screen(stream)
        self._clock = clock
        self._began = self._logged = clock()
        self._pace: Pace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._screen.clear()

    def say(self, line: str) -> None:
        """Print one lasting line."""
        self._screen.print(printable(line).replace("\n", "\\n"))

    def update(self, progress: Progress) -> None:
        """Show where the capture stands."""
        from eyas.pace import Pace
        from eyas.status import status_of

        self._pace = self._pace or Pace()
        rates = self._pace.take(progress)  # also where nothing is shown: rates need the past
        if self._screen.drawable:
            columns, rows = self._screen.room
            encoding = self._screen.encoding
            lines = panel(status_of(progress, rates), width=columns, height=rows, encoding=encoding)
            self._screen.draw(lines)
        elif self._log_is_due():
            self.log(status_of(progress, rates))

    def log(self, status: Status, *, if_due: bool = False) -> None:
        """Print a status as one lasting line."""
        if not if_due or self._log_is_due():
            self._logged = self._clock()
            self._screen.print(one_line(status))

    def count(self, what: str) -> Callable[[int], None]:
        """A function that shows how many there are so far, on a terminal."""

        def show(number: int) -> None:
            if self._screen.drawable:
                width = self._screen.room.columns
                self._screen.draw([Line("", fit(f"{number:,} {what}", width))])

        return show

    def _log_is_due(self) -> bool:
        now = self._clock()
        every = _OFTEN_S
        for after, rarer in _LATER:
            if now - self._began >= after:
                every = rarer
        return now - self._logged >= every
