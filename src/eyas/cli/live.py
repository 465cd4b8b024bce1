"""A capture as it runs: one line that renews itself on a terminal, a line now and then elsewhere.

Invariant: figures are of durable rows and finished answers, never of what was only sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from eyas.progress import Progress

_LOG_EVERY_S = 10.0


class Live:
    """Shows `Progress`. Use as a context manager; `say` prints a lasting line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._width = 0
        self._logged = time.monotonic()
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def say(self, line: str) -> None:
        """Print one lasting line."""
        from eyas.cli.tokens import printable

        self._clear()
        print(printable(line), file=self._stream, flush=True)

    def update(self, progress: Progress) -> None:
        """Show where the capture stands."""
        line = self.line(progress)
        if self._terminal:
            import shutil

            line = line[: shutil.get_terminal_size().columns - 1]
            padding = " " * max(0, self._width - len(line))
            print(f"\r{line}{padding}", end="", file=self._stream, flush=True)
            self._width = len(line)
        elif time.monotonic() - self._logged >= _LOG_EVERY_S:
            self._logged = time.monotonic()
            print(line, file=self._stream, flush=True)

    def count(self, what: str) -> Callable[[int], None]:
        """A function that shows how many there are so far, on a terminal."""

        def show(number: int) -> None:
            if self._terminal:
                line = f"{number:,} {what}"
                self._width = len(line)
                print(f"\r{line}", end="", file=self._stream, flush=True)

        return show

    def line(self, progress: Progress) -> str:
        """``812/2000 (41%)  2 rejected  64 in flight  5210 tokens/s  ETA 1m04s``."""
        decided = progress.done + progress.rejected
        total = progress.total
        about = "" if progress.input_known else "~"
        of = (
            f"{decided:,}/{about}{total:,} ({100 * decided // total}%)" if total else f"{decided:,}"
        )
        rate = progress.output_tokens / progress.seconds if progress.seconds > 0 else 0.0
        parts = [
            f"{of} rows",
            f"{progress.rejected:,} rejected",
            f"{progress.truncated:,} truncated",
            f"{progress.in_flight} in flight",
            f"{rate:,.0f} tokens/s",
        ]
        if total and progress.new and progress.seconds > 0:
            left = (total - decided) * progress.seconds / progress.new
            parts.append(f"ETA {duration(left)}")
        return "  ".join(parts)

    def _clear(self) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=self._stream, flush=True)
            self._width = 0


def duration(seconds: float) -> str:
    """``0.8s``, ``1m04s``, ``2h05m``, ``3d04h``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
