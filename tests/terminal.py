"""A terminal of so many columns and rows, as far as the live view uses one.

It breaks lines that are too long, scrolls, and when its size changes it breaks them anew, as
most terminals do. `lines` is all that was ever scrolled off, and what is on the screen.
"""

from __future__ import annotations

import io
import os
import re

_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class Terminal(io.StringIO):
    """Write to it like to standard error."""

    def __init__(self, columns: int, rows: int, encoding: str = "utf-8") -> None:
        super().__init__()
        self.columns, self.rows = columns, rows
        self._lines: list[list[str]] = [[""]]
        """Paragraphs (what stands between two line breaks), each as its rows."""
        self._at = 0
        """The cursor's row, counted over all rows from the first."""
        self._column = 0
        self._top = 0
        """The first row that can be seen."""
        self.raw = ""
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1_000_000

    def size(self, _: int = 0) -> os.terminal_size:
        """In the place of `os.get_terminal_size`."""
        return os.terminal_size((self.columns, self.rows))

    @property
    def lines(self) -> list[str]:
        return [row for paragraph in self._lines for row in paragraph]

    @property
    def shown(self) -> list[str]:
        """The lines without empty ones at the end."""
        found = [line.rstrip() for line in self.lines]
        while found and not found[-1]:
            found.pop()
        return found

    @property
    def on_screen(self) -> list[str]:
        """The rows that can be seen."""
        return self.lines[self._top :]

    def resize(self, columns: int, rows: int) -> None:
        """Break all lines anew; the cursor stays with its text."""
        paragraph, row = self._place()
        offset = sum(len(r) for r in self._lines[paragraph][:row]) + self._column
        self.columns, self.rows = columns, rows
        self._lines = [self._broken("".join(broken)) for broken in self._lines]
        self._stand(paragraph, offset)
        self._top = max(0, len(self.lines) - self.rows)

    def write(self, text: str) -> int:
        self.raw += text
        for token in _TOKEN.finditer(text):
            self._take(token)
        return len(text)

    def _take(self, token: re.Match[str]) -> None:
        said, kind = token.group(), token.group(2)
        if said == "\r":
            self._column = 0
        elif said == "\n":
            self._down()
        elif kind == "A":
            self._at = max(self._top, self._at - int(token.group(1) or 1))
        elif kind == "K":
            paragraph, row = self._place()
            self._lines[paragraph][row] = self._lines[paragraph][row][: self._column]
            del self._lines[paragraph][row + 1 :]
        elif kind == "J":
            paragraph, row = self._place()
            self._lines[paragraph][row] = self._lines[paragraph][row][: self._column]
            del self._lines[paragraph][row + 1 :]
            del self._lines[paragraph + 1 :]
        elif kind == "m":
            pass
        elif kind is None:
            assert "\x1b" not in said
            self._print(said)
        else:
            raise AssertionError(f"not a command of ours: {said!r}")

    def _print(self, text: str) -> None:
        paragraph, row = self._place()
        before = (
            "".join(self._lines[paragraph][:row])
            + self._lines[paragraph][row].ljust(self._column)[: self._column]
        )
        after = "".join(self._lines[paragraph])[len(before) + len(text) :]
        self._lines[paragraph] = self._broken(before + text + after)
        self._stand(paragraph, len(before + text))

    def _broken(self, text: str) -> list[str]:
        return [text[i : i + self.columns] for i in range(0, len(text), self.columns)] or [""]

    def _stand(self, paragraph: int, offset: int) -> None:
        """Put the cursor behind so many characters of a paragraph."""
        row = min(offset // self.columns, len(self._lines[paragraph]) - 1)
        self._at = sum(len(p) for p in self._lines[:paragraph]) + row
        self._column = offset - row * self.columns
        self._top = max(self._top, self._at - self.rows + 1)

    def _down(self) -> None:
        paragraph, row = self._place()
        self._column = 0
        self._at += len(self._lines[paragraph]) - row
        if paragraph + 1 == len(self._lines):
            self._lines.append([""])
        self._top = max(self._top, self._at - self.rows + 1)

    def _place(self) -> tuple[int, int]:
        left = self._at
        for number, paragraph in enumerate(self._lines):
            if left < len(paragraph):
                return number, left
            left -= len(paragraph)
        raise AssertionError("the cursor is nowhere")
