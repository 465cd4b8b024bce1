"""The journal: rows that are durable but not yet sealed into a Parquet part.

A segment is a file of lines ``CRC32 K PROMPT OUTPUT JSON\\n``: a checksum of the rest (8 hex
digits), the kind of row (``T`` for a trace, ``R`` for a refused row), the prompt ids and the
output ids (little-endian int32 in base64, ``-`` for null, ``.`` for none), and the other
columns. Ids are packed since they are nearly all of a row, and sealing then never makes Python
numbers of them. Invariants:

* a segment is appended to by one process only and never again after that process ended, so
  that a torn tail stays where it is and costs only itself;
* a line counts only if its checksum fits; what is torn anywhere is skipped, and the next line
  break starts afresh;
* segment N is sealed into parts N, which are a pure function of it: sealing again after a
  crash writes the same bytes under the same names, so it can neither lose nor double a row.
"""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

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


class Packed(NamedTuple):
    """A journal line taken apart, its ids as they lie in it."""

    prompt: bytes | None
    """Little-endian int32; None for null."""
    output: bytes | None
    columns: dict[str, Any]
    """The other columns."""

    def record(self) -> dict[str, Any]:
        """All columns, ids as lists."""
        return {
            **self.columns,
            "prompt_ids": None if self.prompt is None else _unpack_ids(self.prompt),
            "output_ids": None if self.output is None else _unpack_ids(self.output),
        }


def encode_line(row: Trace | Rejected) -> bytes:
    """One row as a journal line."""
    kind = b"R" if isinstance(row, Rejected) else b"T"
    names, values = _GETTERS[type(row)]
    body = b"%b %b %b %b" % (
        kind,
        _pack_ids(row.prompt_ids),
        _pack_ids(row.output_ids),
        orjson.dumps(dict(zip(names, values(row), strict=True))),
    )
    return b"%08x %b\n" % (zlib.crc32(body), body)


def read_segment(path: Path, kind: str) -> Iterator[Packed]:
    """A segment's rows of one kind (``T`` or ``R``) whose lines are whole."""
    wanted = kind.encode()
    with path.open("rb") as file:
        for line in file:
            if line[9:10] == wanted and is_whole(line):
                _, _, prompt, output, columns = line.split(b" ", 4)
                yield Packed(_raw_ids(prompt), _raw_ids(output), orjson.loads(columns))


def count_lines(path: Path, kind: str) -> int:
    """How many rows of one kind a segment holds."""
    wanted = kind.encode()
    with path.open("rb") as file:
        return sum(line[9:10] == wanted and is_whole(line) for line in file)


def is_whole(line: bytes) -> bool:
    """Whether a journal line is neither torn nor damaged."""
    if len(line) < 13 or line[8:9] != b" " or not line.endswith(b"\n"):
        return False
    try:
        return int(line[:8], 16) == zlib.crc32(line[9:-1])
    except ValueError:
        return False


def _pack_ids(ids: list[int] | None) -> bytes:
    if not ids:
        return b"-" if ids is None else b"."
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return b2a_base64(packed, newline=False)


def _raw_ids(text: bytes) -> bytes | None:
    if text == b"-":
        return None
    return b"" if text == b"." else a2b_base64(text)


def _unpack_ids(raw: bytes) -> list[int]:
    packed = array("i", raw)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


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
