"""Prompt files of any usual shape into conversations.

Invariant: each row of the input comes out exactly once, as a `Conversation` or as a `BadLine`
that says why not, in the order of the files; and no row, however damaged, stops the reading.

    reader = PromptReader(["prompts/*.jsonl.gz", "more.parquet"])
    for item in reader:
        ...                      # reader.position and reader.shapes grow meanwhile
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from eyas.conversation import BadLine, Conversation, digest
from eyas.errors import InputError
from eyas.readers.files import COMPRESSED, STDIN, UNREADABLE, Damage, bare_suffix, read_rows
from eyas.readers.shapes import COLUMNS, REASONS, to_conversation
from eyas.readers.showing import Refused

__all__ = ["COLUMNS", "REASONS", "BadLine", "Conversation", "Position", "PromptReader"]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""The files that are taken from a directory, each also with `COMPRESSED` behind it."""

SHOWN = 2000
"""The most characters of a bad line that are kept for show."""


@dataclass(slots=True)
class Position:
    """How far reading has come; it changes as reading goes on."""

    bytes_read: int = 0
    """Bytes taken from the files, as they lie on disk: compressed ones are not expanded."""
    bytes_total: int | None = None
    """Bytes of all files together; None if one is standard input or a pipe."""
    rows_read: int = 0
    """Rows seen so far, good and bad."""


class PromptReader:
    """The conversations of some files, read as a stream.

    `inputs` are paths, directories (all files in them with a suffix of `SUFFIXES`), globs, and
    ``-`` for standard input. A file that is named twice is read once. `column` and `system` are
    those of `to_conversation`. Raises `InputError` if there is nothing to read.

    Reading again begins anew, except for standard input and pipes, which are then at their end.
    """

    def __init__(
        self, inputs: Sequence[str], *, column: str | None = None, system: str | None = None
    ) -> None:
        self.files = _expand(inputs)
        sizes = [_size(path) for path in self.files]
        known_sizes = [size for size in sizes if size is not None]
        total = sum(known_sizes) if len(known_sizes) == len(sizes) else None
        self.position = Position(bytes_total=total)
        self.shapes: Counter[str] = Counter()
        """Conversations by the shape in which they stood."""
        self._column = column
        self._system = system

    @property
    def rereadable(self) -> bool:
        """Whether all of it can be read more than once."""
        return all(path != STDIN and os.path.isfile(path) for path in self.files)

    def __iter__(self) -> Iterator[Conversation | BadLine]:
        self.position.bytes_read = self.position.rows_read = 0
        self.shapes.clear()
        for path in self.files:
            began, size = self.position.bytes_read, _size(path)
            yield from self._read(path)
            if size is not None:  # also where the file could not be read to its end
                self.position.bytes_read = began + size

    def _read(self, path: str) -> Iterator[Conversation | BadLine]:
        position, shapes, column, system = self.position, self.shapes, self._column, self._system
        source = "stdin" if path == STDIN else path
        known = COLUMNS if column is None else (column,)
        line = 0

        def progress(size: int) -> None:
            position.bytes_read += size

        try:
            for line, value, raw in read_rows(path, progress, known):
                position.rows_read += 1
                try:
                    if type(value) is Damage:
                        raise Refused(value.reason, value.detail)
                    item = to_conversation(
                        value, column=column, system=system, source=source, line=line
                    )
                    if item.tool_use is not None and item.tool_use.results:
                        raise Refused("tools_unsupported", "results of tools are not supported yet")
                except Refused as refused:
                    yield _bad_line(refused, value, raw, source, line)
                else:
                    shapes[item.shape] += 1
                    yield item
        except UNREADABLE as error:
            position.rows_read += 1
            place = f"line or row {line}" if line else "its beginning"
            yield BadLine(
                key=digest(
                    b"file", os.path.basename(source).encode("utf-8", "replace"), b"%d" % line
                ),
                reason="unreadable_file",
                detail=f"nothing of the file after {place} could be read: {error}",
                source=source,
                line=line + 1,
                text="",
            )


def _bad_line(refused: Refused, value: Any, raw: bytes | None, source: str, line: int) -> BadLine:
    if raw is None:
        try:
            raw = orjson.dumps(value, default=str)
        except TypeError:
            raw = repr(value).encode("utf-8", "replace")
    raw = raw.strip()  # the key is the same with and without CRLF
    text = raw[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]
    return BadLine(digest(b"line", raw), refused.reason, refused.detail, source, line, text)


def _size(path: str) -> int | None:
    """The size of a regular file; None for standard input and pipes."""
    return os.path.getsize(path) if path != STDIN and os.path.isfile(path) else None


def _expand(inputs: Sequence[str]) -> list[str]:
    """The files that the inputs name, each once, as the user wrote it or the glob found it."""
    if not inputs:
        raise InputError("no prompt file is named; give a file, a directory, a glob or - (stdin)")
    files: dict[str, str] = {}
    for given in inputs:
        for path in _matches(given):
            files.setdefault(path if path == STDIN else os.path.realpath(path), path)
    for path in files.values():
        if os.path.isfile(path):
            try:
                open(path, "rb").close()
            except OSError as error:
                problem = f"{path} cannot be opened: {error.strerror}; check its permissions"
                raise InputError(problem) from error
    return list(files.values())


def _matches(given: str) -> list[str]:
    if given == STDIN:
        return [given]
    path = os.path.expanduser(given)
    if os.path.isdir(path):
        inside = sorted(os.path.join(path, name) for name in os.listdir(path))
        found = [p for p in inside if bare_suffix(p) in SUFFIXES and os.path.isfile(p)]
        if not found:
            ends = ", ".join(SUFFIXES)
            raise InputError(
                f"the directory {given} holds no file that ends in {ends} (or one of these and "
                f"{', '.join(COMPRESSED)}); name the files, or use a glob such as {given}/**/*"
            )
        return found
    if os.path.lexists(path):
        if not os.path.exists(path):
            raise InputError(f"{given} is a link to {os.readlink(path)}, which does not exist")
        return [path]
    if glob.has_magic(path):
        found = sorted(p for p in glob.glob(path, recursive=True) if not os.path.isdir(p))
        if not found:
            raise InputError(f"no file matches {given}; check the pattern and the directory")
        return found
    if "://" in given:
        raise InputError(f"{given} is a remote address; only local files are read: fetch it first")
    raise InputError(f"{given} does not exist; check the path (a relative one: {os.getcwd()})")
