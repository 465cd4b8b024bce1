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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import orjson

from eyas.conversation import BadLine, Conversation, digest
from eyas.errors import InputError
from eyas.readers.blocks import Block, read_blocks
from eyas.readers.files import COMPRESSED, STDIN, UNREADABLE, Damage, Row, bare_suffix
from eyas.readers.memory import Known, Memory
from eyas.readers.shapes import COLUMNS, REASONS, to_conversation
from eyas.readers.showing import Refused

__all__ = ["COLUMNS", "REASONS", "BadLine", "Conversation", "Position", "PromptReader", "Stretch"]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""The files that are taken from a directory, each also with `COMPRESSED` behind it."""

STRETCH = 64
"""Rows of a stretch that were parsed."""

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


@dataclass(slots=True)
class Stretch:
    """Consecutive rows of the input, of which little need be known where all are done already."""

    keys: bytes
    """16 bytes a row."""
    turns: list[int]
    """How many turns each has; 0 for a `BadLine`."""
    items: Callable[[], Sequence[Conversation | BadLine]]
    """The rows themselves."""

    @classmethod
    def of(cls, items: Sequence[Conversation | BadLine]) -> Self:
        """Rows that are at hand."""
        turns = [item.n_turns if type(item) is Conversation else 0 for item in items]
        return cls(b"".join([item.key for item in items]), turns, lambda: items)

    @property
    def conversations(self) -> int:
        """How many rows can be used."""
        return len(self.turns) - self.turns.count(0)

    def up_to(self, conversations: int | None) -> Stretch:
        """This stretch, or where it has as many conversations, its beginning to the last of them."""
        if conversations is None or self.conversations < conversations:
            return self
        good = (at for at, turns in enumerate(self.turns, 1) if turns)
        end = next(islice(chain((0,), good), conversations, None))
        return Stretch(self.keys[: 16 * end], self.turns[:end], lambda: self.items()[:end])


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
        self._known_columns = COLUMNS if column is None else (column,)
        self._packed = "prompt_ids" in self._known_columns  # else they would be metadata
        self._folder: Path | None = None

    def remember(self, folder: Path) -> None:
        """Keep what rows are found in a folder, so that `stretches` need not parse them again."""
        self._folder = folder

    @property
    def rereadable(self) -> bool:
        """Whether all of it can be read more than once."""
        return all(path != STDIN and os.path.isfile(path) for path in self.files)

    def __iter__(self) -> Iterator[Conversation | BadLine]:
        for path, progress in self._each_file():
            line = 0
            try:
                for block in read_blocks(path, progress, self._known_columns, packed=self._packed):
                    for row in block.rows():
                        line = row[0]
                        yield self._counted(self._item(path, row))
            except UNREADABLE as error:
                yield self._counted(_unreadable(path, line, error))

    def stretches(self) -> Iterator[Stretch]:
        """The same, some rows at a time."""
        for path, progress in self._each_file():
            memory = None
            if self._folder is not None and path != STDIN and os.path.isfile(path):
                memory = Memory(self._folder, path, self._column)
            try:
                yield from self._stretches(path, progress, memory)
            finally:
                if memory is not None:
                    memory.close()

    def _stretches(
        self, path: str, progress: Callable[[int], None], memory: Memory | None
    ) -> Iterator[Stretch]:
        line = 0
        items: list[Conversation | BadLine] = []
        try:
            for block in read_blocks(path, progress, self._known_columns, packed=self._packed):
                known = memory and block.content and memory.recall(block.content)
                if known:
                    self.position.rows_read += len(known.turns)
                    self.shapes.update(known.shapes)
                    line = block.before + known.last if known.last else line
                    yield Stretch(known.keys, known.turns, partial(self._items, path, block))
                    continue
                last = 0
                for row in block.rows():
                    line, last = row[0], row[0] - block.before
                    items.append(self._counted(self._item(path, row)))
                    if len(items) == STRETCH and block.content is None:
                        yield Stretch.of(items)
                        items = []
                if items:
                    stretch = Stretch.of(items)
                    items = []
                    if memory and block.content:
                        shapes = Counter(
                            i.shape for i in stretch.items() if type(i) is Conversation
                        )
                        memory.keep(block.content, Known(stretch.keys, stretch.turns, shapes, last))
                    yield stretch
        except UNREADABLE as error:
            yield Stretch.of([*items, self._counted(_unreadable(path, line, error))])

    def _each_file(self) -> Iterator[tuple[str, Callable[[int], None]]]:
        """Each file, and what is to be told how many bytes of it were read."""
        position = self.position
        position.bytes_read = position.rows_read = 0
        self.shapes.clear()

        def progress(size: int) -> None:
            position.bytes_read += size

        for path in self.files:
            began, size = position.bytes_read, _size(path)
            yield path, progress
            if size is not None:  # also where the file could not be read to its end
                position.bytes_read = began + size

    def _items(self, path: str, block: Block) -> list[Conversation | BadLine]:
        return [self._item(path, row) for row in block.rows()]

    def _item(self, path: str, row: Row) -> Conversation | BadLine:
        line, value, raw = row
        source = _shown(path)
        try:
            if type(value) is Damage:
                raise Refused(value.reason, value.detail)
            item = to_conversation(
                value, column=self._column, system=self._system, source=source, line=line
            )
        except Refused as refused:
            return _bad_line(refused, value, raw, source, line)
        return item

    def _counted(self, item: Conversation | BadLine) -> Conversation | BadLine:
        self.position.rows_read += 1
        if type(item) is Conversation:
            self.shapes[item.shape] += 1
        return item


def _shown(path: str) -> str:
    return "stdin" if path == STDIN else path


def _unreadable(path: str, line: int, error: Exception) -> BadLine:
    """What stands for the rest of a file."""
    source = _shown(path)
    name = os.path.basename(source).encode("utf-8", "replace")
    place = f"line or row {line}" if line else "its beginning"
    return BadLine(
        key=digest(b"file", name, b"%d" % line),
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
