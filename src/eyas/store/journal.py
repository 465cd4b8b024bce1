"""The journal: rows that are durable but not yet sealed into a Parquet part.

A segment is a file of lines ``CRC32 K PROMPT OUTPUT COLUMNS\\n``: a checksum of the rest (8 hex
digits), the kind of row (``T`` for a trace, ``R`` for a refused row), the prompt ids, the output
ids and the other columns, each as JSON without spaces between its parts. Ids are nearly all of a
row; they stand apart so that sealing parses them straight into int32. Invariants:

* a segment is appended to by one process only and never again after that process ended, so
  that a torn tail stays where it is and costs only itself;
* a line counts only if its checksum fits; what is torn anywhere is skipped, and the next line
  break starts afresh;
* segment N is sealed into parts N, which are a pure function of it: sealing again after a
  crash writes the same bytes under the same names, so it can neither lose nor double a row.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from eyas import core
from eyas.ids import Ids
from eyas.store.files import disk_errors, sync_directory
from eyas.trace import Rejected, Trace


class Segment:
    """A journal file that is being written."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.path = directory / segment_name(number)
        self.bytes = 0
        with disk_errors(self.path):
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            sync_directory(directory)

    def write(self, lines: list[bytes]) -> None:
        """Hand lines to the system: they survive the process, but not yet a power loss.

        Raises:
            DiskFull: nothing of this call may then be counted as done.
        """
        data = b"".join(lines)
        with disk_errors(self.path):
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:  # so that the same lines may be written again
                with suppress(OSError):
                    os.ftruncate(self._file, self.bytes)
                    os.lseek(self._file, self.bytes, os.SEEK_SET)
                raise
        self.bytes += len(data)

    def sync(self) -> None:
        """Make all lines durable; only after it returns are they done.

        Raises:
            DiskFull: the lines since the last sync may not be counted as done.
        """
        with disk_errors(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file. It is sealed by its path."""
        os.close(self._file)


class Line(NamedTuple):
    """A journal line taken apart: three pieces of JSON."""

    prompt: bytes
    output: bytes
    columns: bytes

    def record(self) -> dict[str, Any]:
        """All columns."""
        return {
            **orjson.loads(self.columns),
            "prompt_ids": orjson.loads(self.prompt),
            "output_ids": orjson.loads(self.output),
        }


def encode_line(row: Trace | Rejected) -> bytes:
    """One row as a journal line."""
    kind = b"R" if isinstance(row, Rejected) else b"T"
    names, values = _GETTERS[type(row)]
    body = b"%b %b %b %b" % (
        kind,
        _ids_json(row.prompt_ids),
        _ids_json(row.output_ids),
        orjson.dumps(dict(zip(names, values(row), strict=True))),
    )
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _ids_json(ids: list[int] | None) -> bytes:
    return core.write_list(ids.data) if isinstance(ids, Ids) else orjson.dumps(ids)


class Lines(NamedTuple):
    """Consecutive lines: `prompt[n]`, `output[n]` and `columns[n]` are one row's."""

    prompt: list[bytes]
    output: list[bytes]
    columns: list[bytes]


def read_lines(path: Path, kind: str, at_once: int = 2**20) -> Iterator[Lines]:
    """A segment's rows of one kind (``T`` or ``R``) whose lines are whole, some at a time.

    Args:
        path: the segment.
        kind: the kind of rows.
        at_once: about how many bytes of lines.
    """
    with path.open("rb") as file:
        while block := file.read(at_once):
            lines = Lines(*core.read_lines(block + file.readline(), kind.encode()))
            if lines.prompt:
                yield lines


def read_segment(path: Path, kind: str) -> Iterator[Line]:
    """The same, row by row."""
    for lines in read_lines(path, kind):
        yield from map(Line, *lines)


def count_lines(path: Path, kind: str) -> int:
    """How many rows of one kind a segment holds."""
    return sum(len(lines.prompt) for lines in read_lines(path, kind))


def _getter(kind: type[Trace] | type[Rejected]) -> tuple[list[str], Callable[[Any], Any]]:
    names = [f.name for f in fields(kind) if f.name not in ("prompt_ids", "output_ids")]
    return names, attrgetter(*names)


_GETTERS = {kind: _getter(kind) for kind in (Trace, Rejected)}


def segment_name(number: int) -> str:
    """``segment-000012.log``."""
    return f"segment-{number:06d}.log"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """The segments of a journal directory in order."""
    found = []
    for path in directory.glob("segment-*.log"):
        digits = path.stem.removeprefix("segment-")
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)
