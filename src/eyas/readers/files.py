"""Bytes on disk or standard input into raw rows.

Invariant: every byte of a file is in one of the rows that are yielded, or stands between rows
(blank lines, commas, byte order marks), or lies behind the place that a raised error names.
Damage to one row never changes another, and memory holds one row and fixed buffers.

Compression and Parquet are recognised by their first bytes, never by a file's name; other formats
by the suffix in front of ``.gz`` or ``.zst``, and where that leaves it open (``.json``, standard
input, other names) by what `sniff` finds. This module knows nothing about prompts: a row is
whatever JSON value stood there.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import orjson
import pyarrow as pa

from eyas.ids import read_object

STDIN = "-"
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
MAX_ROW = 64 << 20
"""The most bytes that one row may have: far more than any model's context holds."""

_HEAD = 64 << 10
_BUFFER = 256 << 10
_BOM = b"\xef\xbb\xbf"


class BrokenFile(Exception):
    """From some place on it cannot be told where one row ends and the next begins."""


UNREADABLE = (BrokenFile, OSError, EOFError, zlib.error, pa.ArrowException)
"""What is raised where the rest of a file cannot be read."""


@dataclass(slots=True)
class Damage:
    """What stands in the place of a row that could not be read."""

    reason: str
    detail: str


Row = tuple[int, Any, bytes | None]
"""Line or row number from 1; the JSON value or a `Damage`; the row's bytes (None: Parquet)."""


def bare_suffix(name: str) -> str:
    """The suffix that tells the format: ``.jsonl`` for ``a.JSONL.gz``, empty if there is none."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix


@dataclass(slots=True)
class Opened:
    """A file whose format is known."""

    kind: str
    """``parquet``, or what `sniff` gives."""
    source: Any
    """Parquet: a file with random access. Else the plain bytes, buffered."""
    progress: Callable[[int], None]


@contextlib.contextmanager
def opened(
    path: str, progress: Callable[[int], None], known: Collection[str] = ()
) -> Iterator[Opened]:
    """One file (``-`` is standard input) whose format is found.

    `progress` is called with the number of bytes that were taken from the file, as they lie
    there. `known` are column names by which the header of a CSV without a suffix is recognised.
    """
    with contextlib.ExitStack() as stack:
        source: Any = sys.stdin.buffer if path == STDIN else stack.enter_context(open(path, "rb"))
        stream, compressed = _decompressed(source, progress)
        head = stream.head(_HEAD)
        buffered = io.BufferedReader(stream, _BUFFER)
        kind = "parquet" if head[:4] == b"PAR1" else sniff(path, head, known)
        if kind == "parquet":
            if compressed or path == STDIN or not os.path.isfile(path):
                spool = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(buffered, spool, _BUFFER)
                yield Opened(kind, spool, lambda size: None)
            else:
                progress(-source.tell())  # it is begun again
                yield Opened(kind, source, progress)
            return
        if bare_suffix(path) == ".parquet":
            raise BrokenFile("the file is named .parquet but does not begin with PAR1")
        if _is_utf16(head):
            raise BrokenFile("the text is UTF-16 or UTF-32; convert it to UTF-8 (see iconv)")
        yield Opened(kind, buffered, progress)


def text_rows(file: Opened, *, packed: bool = False) -> Iterator[Row]:
    """The rows of an opened file that is no Parquet; for `packed` see `json_lines`."""
    if file.kind == "array":
        yield from _json_array(filled(file.source.read1))
    elif file.kind == "object":
        yield from _json_object(file.source)
    elif file.kind == "lines":
        yield from json_lines(file.source, packed=packed)
    else:
        yield from _csv(file.source, file.kind)


def sniff(name: str, head: bytes, known: Collection[str] = ()) -> str:
    """The format of a text file: ``lines``, ``array``, ``object``, ``csv`` or ``tsv``.

    What begins with ``[`` is an array, unless its first line is a whole array and more follows:
    then it is JSON Lines (of which that line cannot be used). An object is one that goes over
    several lines: its first line stops in the middle and the next begins no other object.
    """
    suffix = bare_suffix(name)
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    if suffix in (".jsonl", ".ndjson"):
        return "lines"
    first, _, rest = head.removeprefix(_BOM).lstrip().partition(b"\n")
    first, rest = first.strip(), rest.lstrip()
    if first.startswith(b"["):
        return "lines" if rest and not isinstance(parse_json(first), Damage) else "array"
    if first.startswith(b"{"):
        stops_inside = first.endswith((b"{", b"[", b",", b":"))
        return "object" if stops_inside and rest and not rest.startswith(b"{") else "lines"
    if suffix != ".json":
        header = first.decode("utf-8", "replace")
        for kind, delimiter in (("csv", ","), ("tsv", "\t")):
            if any(cell.strip('" ') in known for cell in header.split(delimiter)):
                return kind
    return "lines"


def parse_json(text: bytes) -> Any:
    """The JSON value, or a `Damage` that says what is wrong with the text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        message, column = error.msg, error.colno
    try:
        text.decode()
    except UnicodeDecodeError as error:
        byte = text[error.start]
        return Damage("invalid_utf8", f"not UTF-8: byte 0x{byte:02x} at byte {error.start + 1}")
    if "surrogate" in message:
        return Damage("invalid_utf8", f"half of a surrogate pair at column {column}: {message}")
    what = f"{message} at column {column}" if text else "nothing stands between two commas"
    return Damage("invalid_json", f"not valid JSON: {what}")


class _Stream(io.RawIOBase):
    """Bytes from `read`, the first of which can be looked at before they are read."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._head = b""

    def head(self, size: int) -> bytes:
        """The first `size` bytes, or fewer at the end, a failure, or if a second line shows."""
        with contextlib.suppress(*UNREADABLE):  # who reads past the head will meet it again
            while len(self._head) < size and not self._head.lstrip().partition(b"\n")[2].strip():
                data = self._read(size - len(self._head))
                if not data:
                    break
                self._head += data
        return self._head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._head:
            data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        else:
            data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def filled(read: Callable[[int], bytes], step: int = _BUFFER) -> Callable[[int], bytes]:
    """A read function that gives as much as it is asked for, from reads of up to `step` bytes.

    A failure is held back until everything that came before it has been given.
    """
    failure: Exception | None = None

    def filled(size: int) -> bytes:
        nonlocal failure
        pieces: list[bytes] = []
        try:
            while size > 0 and failure is None and (piece := read(min(size, step))):
                pieces.append(piece)
                size -= len(piece)
        except UNREADABLE as error:
            failure = error
        if failure is not None and not pieces:
            raise failure
        return b"".join(pieces)

    return filled


def _decompressed(source: Any, progress: Callable[[int], None]) -> tuple[_Stream, bool]:
    """The plain bytes of a file, and whether they were compressed."""

    def counted(size: int) -> bytes:
        data: bytes = source.read1(size)
        progress(len(data))
        return data

    stream = _Stream(counted)
    magic = stream.head(4)
    if magic[:2] == b"\x1f\x8b":
        unzipped = gzip.GzipFile(fileobj=io.BufferedReader(stream, _BUFFER))
        return _Stream(filled(unzipped.read1)), True
    if magic == b"\x28\xb5\x2f\xfd":
        # pyarrow drops what it has decompressed when it then meets a broken frame: it is asked
        # for little at a time, so that little is lost before the break.
        frames = pa.CompressedInputStream(io.BufferedReader(stream, _BUFFER), "zstd")
        return _Stream(filled(frames.read, step=256)), True
    return stream, False


def _is_utf16(head: bytes) -> bool:
    nuls = [byte == 0 for byte in head[:4]]
    return (
        any(nuls)
        if head.startswith((b"\xff\xfe", b"\xfe\xff"))
        else nuls in ([True, False] * 2, [False, True] * 2)
    )


def json_lines(stream: IO[bytes], number: int = 0, *, packed: bool = False) -> Iterator[Row]:
    """One JSON value a line. Only ``\\n`` ends a line, so U+2028 and U+0085 are ordinary text.

    `number` lines came before. Where `packed`, a list of ``prompt_ids`` may come as `Ids`.
    """
    loads = orjson.loads
    for line in iter(partial(stream.readline, MAX_ROW), b""):
        number += 1
        if len(line) == MAX_ROW and line[-1:] != b"\n":
            yield number, Damage("row_too_long", f"the line has {MAX_ROW:,} bytes or more"), line
            while stream.readline(MAX_ROW)[-1:] not in (b"\n", b""):
                pass
            continue
        value = read_object(line, ("prompt_ids",)) if packed and b'"prompt_ids"' in line else None
        try:
            value = value or loads(line)
        except orjson.JSONDecodeError:
            # Blank lines and byte order marks come here too, to keep the usual way short.
            line = line.removeprefix(_BOM).strip()
            if not line:
                continue
            value = parse_json(line)
        yield number, value, line


_COMMA, _QUOTE, _OPEN, _END = b","[0], b'"'[0], b"[{", b"]"[0]
# Over whole strings to the next bracket, and outside of elements also to the next comma. The
# repeats are bounded because Python's matcher keeps a state for each round.
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TO_BRACKET = re.compile(rb'[^"\[\]{}]*(?:%s[^"\[\]{}]*){0,99}' % _STRING, re.DOTALL)
_TO_BORDER = re.compile(rb'[^",\[\]{}]*(?:%s[^",\[\]{}]*){0,99}' % _STRING, re.DOTALL)


def _json_array(read: Callable[[int], bytes]) -> Iterator[Row]:
    """The elements of a JSON array, cut at the commas between them and parsed one by one.

    So an element that is not JSON (``NaN``, half a surrogate, a stray byte) costs that element
    alone. Where brackets or quotes do not close, the rest of the array is lost, by name. A comma
    before the closing bracket is let pass.
    """
    data = read(_BUFFER)
    at = start = data.index(b"[") + 1
    number = offset = depth = 0
    while True:
        before = at
        match = (_TO_BRACKET if depth else _TO_BORDER).match(data, at)
        at = match.end() if match else at
        if at == len(data) or (data[at] == _QUOTE and at == before):
            # As much again as there is, so that a long string is not scanned once a buffer.
            more = read(max(_BUFFER, len(data) - start))
            offset, at = offset + start, at - start
            if not more or len(data) - start > MAX_ROW:
                raise BrokenFile(f"the element at about byte {offset:,} of the text does not end")
            data, start = data[start:] + more, 0
            continue
        byte = data[at]
        if byte == _QUOTE:
            continue
        at += 1
        if byte in _OPEN:
            depth += 1
        elif depth:
            depth -= 1
        elif byte in (_COMMA, _END):
            raw = data[start : at - 1].strip()
            start = at
            if raw or byte == _COMMA:
                number += 1
                yield number, parse_json(raw), raw
            if byte == _END:
                break
    if (data[at:] + read(_BUFFER)).strip():
        raise BrokenFile(f"something follows the array at about byte {offset + at:,} of the text")


def _json_object(stream: io.BufferedReader[Any]) -> Iterator[Row]:
    raw = stream.read(MAX_ROW).removeprefix(_BOM).strip()
    yield 1, parse_json(raw), raw
    if stream.read(1):
        raise BrokenFile(f"the object has more than {MAX_ROW:,} bytes")


def _csv(stream: io.BufferedReader[Any], kind: str) -> Iterator[Row]:
    """Rows as dicts by the header's names; empty cells are null. The line is the first one.

    Quoting is checked strictly: a text after a closing quote, or a quote that is never closed,
    is damage and not a guess.
    """
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    lines: list[str] = []

    def recorded() -> Iterator[str]:
        held = 0
        for line in iter(partial(text.readline, MAX_ROW), ""):
            held = held + len(line) if lines else len(line)
            lines.append(line)
            if held >= MAX_ROW:
                raise BrokenFile(f"a row has more than {MAX_ROW:,} bytes; is a quote not closed?")
            yield line

    csv.field_size_limit(MAX_ROW)  # a limit of the whole process; Python's own is 128 KiB
    reader = csv.reader(recorded(), delimiter="," if kind == "csv" else "\t", strict=True)
    names: list[str] = []
    while True:
        lines.clear()
        start = reader.line_num + 1
        damage: Damage | None = None
        cells: list[str] = []
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            damage = Damage("invalid_csv", f"lines {start} to {reader.line_num}: {error}")
        row = "".join(lines).strip("\r\n")
        if not row.strip():
            continue
        if not names:
            names = [cell.encode("utf-8", "replace").decode().strip() for cell in cells]
            twice = {name for name in names if name and names.count(name) > 1}
            if damage or twice:
                what = damage.detail if damage else f"it names {', '.join(sorted(twice))} twice"
                raise BrokenFile(f"the header of the CSV cannot be used: {what}")
            continue
        raw = row.encode("utf-8", "surrogateescape")
        if damage is None and len(cells) != len(names):
            damage = Damage("wrong_field_count", f"{len(cells)} fields, header has {len(names)}")
        if not row.isascii() and (wrong := re.search("[\udc80-\udcff]", row)):
            damage = Damage("invalid_utf8", f"not UTF-8: byte 0x{ord(wrong[0]) & 0xFF:02x}")
        yield start, damage or {k: v or None for k, v in zip(names, cells, strict=True)}, raw
