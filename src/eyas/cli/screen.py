"""A block of lines at the lower end of a terminal that is drawn over itself.

Invariants: what was printed above the block stays; after every drawing the cursor stands below
it (or, in a window of two rows or less, at its end), so that what a shell prints next is not
mixed into it; a stream that can no longer be written to is left alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from eyas.cli.panel import Line

_LOW = 3
"""A window with fewer rows gets one line, and the cursor stays in it."""


class Size(NamedTuple):
    """Of a terminal."""

    columns: int
    rows: int


class Screen:
    """Draws on a stream, if it is a terminal that can move its cursor."""

    def __init__(self, stream: TextIO) -> None:
        from eyas.cli.tokens import use_color

        self._stream = stream
        self._broken = False
        self.drawable = stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self.color = self.drawable and use_color(stream)
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._shown: list[str] = []
        """The lines on the terminal, without colours."""
        self._last: Sequence[Line] = ()
        self._below = False
        """Whether the cursor stands below them."""

    @property
    def size(self) -> Size:
        """The terminal's size now (the stream's own: standard output may be a file)."""
        columns, rows = 0, 0
        with suppress(OSError, ValueError, AttributeError):
            columns, rows = os.get_terminal_size(self._stream.fileno())
        if columns <= 0 or rows <= 0:
            columns, rows = shutil.get_terminal_size()
        return Size(columns, rows)

    @property
    def room(self) -> Size:
        """What a drawing may take: the last column and row stay free."""
        columns, rows = self.size
        return Size(max(1, columns - 1), rows - 1 if rows >= _LOW else 1)

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines in the place of those before."""
        size = self.size
        text = self._back(size)
        shown = list(lines) if size.rows >= _LOW else list(lines[:1])
        text += "\n".join(self.painted(line) + "\x1b[K" for line in shown)
        self._below = bool(shown) and size.rows >= _LOW
        text += "\n\x1b[J" if self._below else "\x1b[J"
        self._shown, self._last = [line.plain for line in shown], lines
        self._put(text)

    def print(self, text: str) -> None:
        """Print a lasting line above the block."""
        if not self._shown:
            self._put(f"{text}\n")
            return
        last = self._last
        self.clear()
        self._put(f"{text}\n")
        self.draw(last)

    def clear(self) -> None:
        """Take the block away."""
        if self._shown:
            self._put(self._back(self.size) + "\x1b[J")
        self._shown, self._last = [], ()

    def _back(self, size: Size) -> str:
        """To the block's first column and row, wherever a new size has put them."""
        if not self._shown:
            return ""
        from eyas.cli.panel import cells

        # Most terminals break lines anew that have become too long.
        taken = [max(1, -(-cells(line) // size.columns)) for line in self._shown]
        up = min(sum(taken) - (not self._below), size.rows - 1)
        clear = "\x1b[J" if any(rows > 1 for rows in taken) else ""
        return ("\r" + f"\x1b[{up}A" if up > 0 else "\r") + clear

    def painted(self, line: Line) -> str:
        """A line with its colours, if there are any."""
        if not self.color:
            return line.plain
        label = line.plain[: len(line.plain) - len(line.text)]
        text = f"\x1b[31m{line.text}\x1b[0m" if line.worry else line.text
        return f"\x1b[2m{label}\x1b[0m{text}"

    def _put(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the file closed
            self._broken = True
