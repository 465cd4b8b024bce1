"""Files as blocks of rows that can be recognised before their rows are parsed.

Invariants: blocks with the same content (where they have one) hold the same rows, whatever else
their files hold; memory holds one block: some hundred kilobytes, or one row where that is longer.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.conversation import digest
from eyas.readers import files
from eyas.readers.files import STDIN, Damage, Opened, Row, filled, json_lines, opened, text_rows

BLOCK = 256 << 10
"""Bytes of a block of lines."""
_PARQUET_ROWS = 256


@dataclass(slots=True)
class Block:
    """Consecutive rows of a file."""

    content: bytes | None
    """What the rows are made of, or a hash of that; None where they can only be read on."""
    before: int
    """The number of the line or row before them."""
    rows: Callable[[], Iterator[Row]]
    """Parses them. Where there is no content: once, and before the next block is asked for."""


def read_rows(
    path: str, progress: Callable[[int], None], known: Collection[str] = ()
) -> Iterator[Row]:
    """The rows of one file; the arguments are those of `opened`.

    Raises one of `UNREADABLE` after the last row that could be read.
    """
    for block in read_blocks(path, progress, known):
        yield from block.rows()


def read_blocks(
    path: str,
    progress: Callable[[int], None],
    known: Collection[str] = (),
    *,
    packed: bool = False,
) -> Iterator[Block]:
    """The same in blocks; where `packed`, lists of ``prompt_ids`` may come as `Ids`."""
    with opened(path, progress, known) as file:
        if file.kind == "parquet":
            yield from _parquet_blocks(file)
        elif file.kind == "lines" and path != STDIN and os.path.isfile(path):
            yield from _line_blocks(filled(file.source.read1), packed)
        else:  # also a pipe, whose rows are taken as they come
            yield Block(None, 0, partial(text_rows, file, packed=packed))


def _line_blocks(read: Callable[[int], bytes], packed: bool) -> Iterator[Block]:
    """Whole lines of JSON. Of one that is too long, its beginning."""
    number, rest, skips = 0, b"", False
    while data := read(max(BLOCK, len(rest))):
        if skips:
            _, line_break, data = data.partition(b"\n")
            skips = not line_break
        text = rest + data
        end = text.rfind(b"\n") + 1
        if not end and len(text) >= files.MAX_ROW:
            end, skips = len(text), True
        if end:
            yield _lines(text[:end], number, packed)
            number += text.count(b"\n", 0, end) + skips
        rest = text[end:]
    if rest:
        yield _lines(rest, number, packed)


def _lines(text: bytes, number: int, packed: bool) -> Block:
    return Block(text, number, lambda: json_lines(io.BytesIO(text), number, packed=packed))


def _parquet_blocks(file: Opened) -> Iterator[Block]:
    source: IO[bytes] = file.source
    size = source.seek(0, os.SEEK_END)
    table = pq.ParquetFile(source, pre_buffer=False, buffer_size=BLOCK)
    nested = [field.name for field in table.schema_arrow if pa.types.is_nested(field.type)]
    footer = _hash(source, size - 8 - table.metadata.serialized_size, size)
    number = 0
    for group in range(table.num_row_groups):
        columns = _columns(table.metadata.row_group(group))
        begin = min(begin for begin, _ in columns) if columns else 0
        end = max(end for _, end in columns) if columns else 0
        content = digest(footer, _hash(source, begin, end))
        for batch in table.iter_batches(
            batch_size=_PARQUET_ROWS, row_groups=[group], use_threads=False
        ):
            name = digest(content, b"%d" % number)
            yield Block(name, number, partial(_parquet_rows, batch, number, nested))
            number += batch.num_rows
            file.progress(size * batch.num_rows // table.metadata.num_rows)


def _columns(group: Any) -> list[tuple[int, int]]:
    """From where to where the columns of a row group lie in the file."""
    places = []
    for at in range(group.num_columns):
        column = group.column(at)
        begin = column.data_page_offset
        if column.dictionary_page_offset is not None:
            begin = min(begin, column.dictionary_page_offset)
        places.append((begin, begin + column.total_compressed_size))
    return places


def _hash(source: IO[bytes], begin: int, end: int) -> bytes:
    """A hash of the bytes of a file between two places."""
    sum_ = hashlib.blake2b(digest_size=16)
    source.seek(begin)
    while begin < end and (data := source.read(min(BLOCK, end - begin))):
        sum_.update(data)
        begin += len(data)
    return sum_.digest()


def _parquet_rows(batch: Any, number: int, nested: list[str]) -> Iterator[Row]:
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        rows = [_parquet_row(batch, index) for index in range(batch.num_rows)]
    for at, row in enumerate(rows, number + 1):
        if nested and type(row) is dict:
            row.update((name, _without_none(row[name])) for name in nested)
        yield at, row, None


def _parquet_row(batch: Any, index: int) -> dict[str, Any] | Damage:
    """One row of a batch that holds a value for which Python has no type, as nanoseconds."""
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except UnicodeDecodeError:
            return Damage("invalid_utf8", f"column {name!r} holds text that is not UTF-8")
        except (ValueError, OverflowError):
            row[name] = column[index].cast("string").as_py()
    return row


def _without_none(value: Any) -> Any:
    """The value without the members that Parquet adds to make all structs of a column alike."""
    if type(value) is dict:
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if type(value) is list and not {dict, list}.isdisjoint(map(type, value)):
        return [_without_none(v) for v in value]
    return value
