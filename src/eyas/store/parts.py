"""Parquet parts: sealed rows, written whole and never changed.

Invariant: ``part-N.parquet`` in ``traces/`` and ``rejected/`` holds exactly the rows of journal
segment N; the segment is deleted only after both are durable. What is read is what was written:
every page carries a checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from eyas.errors import DamagedRun
from eyas.store.files import disk_errors, sync_directory, write_atomically
from eyas.store.journal import Lines, read_lines
from eyas.trace import (
    FORMAT_VERSION,
    LATER_COLUMNS,
    Rejected,
    Trace,
    arrow_schema,
    to_table,
)

TRACES, REJECTED = "traces", "rejected"
_KINDS: tuple[tuple[str, str, type[Trace] | type[Rejected]], ...] = (
    (TRACES, "T", Trace),
    (REJECTED, "R", Rejected),
)


_GROUP_BYTES = 2 * 2**20
"""About how many bytes of rows become one row group: what sealing holds in memory."""


def seal(run: Path, number: int, segment: Path) -> None:
    """Turn a segment into its parts and delete it.

    Raises:
        DiskFull: the segment then stays as it is and is sealed at the next start.
    """
    for folder, letter, kind in _KINDS:
        path = run / folder / part_name(number)
        groups = read_lines(segment, letter, _GROUP_BYTES)
        first = next(groups, None)
        if first is not None:
            write_atomically(path, partial(_write_groups, kind, chain((first,), groups)))
    with disk_errors(segment):
        segment.unlink(missing_ok=True)
        sync_directory(segment.parent)


def _write_groups(
    kind: type[Trace] | type[Rejected], groups: Iterable[Lines], path: Path
) -> None:
    with part_writer(path, arrow_schema(kind)) as writer:
        for group in groups:
            writer.write_table(_table(kind, group))


def _table(kind: type[Trace] | type[Rejected], lines: Lines) -> Any:
    return to_table(kind, lines.columns, lines.prompt, lines.output)


def part_writer(path: Path, schema: Any) -> Any:
    """A `pyarrow.parquet.ParquetWriter` with the settings of all parts."""
    import pyarrow.parquet as pq

    unique = {"id", "messages", "metadata", "text", "detail"}
    repeated = [f.name for f in schema if f.name not in unique and not is_list(f.type)]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=repeated,
        write_page_checksum=True,
    )


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is that of a list."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind))


def _part_file(path: Path) -> Any:
    """A `pyarrow.parquet.ParquetFile` that gives no page whose checksum does not fit: a byte that
    changed among the ids would be another id. Pages of an earlier eyas have no checksum."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, page_checksum_verification=True)


def part_schema(path: Path) -> Any:
    """The Arrow schema of one part.

    Raises:
        DamagedRun: if the part cannot be read.
    """
    import pyarrow.parquet as pq

    with _damage(path):
        return pq.read_schema(path)


def part_name(number: int) -> str:
    """``part-000012.parquet``."""
    return f"part-{number:06d}.parquet"


def parts(run: Path, folder: str) -> list[Path]:
    """The parts of ``traces`` or ``rejected`` in order."""
    return sorted((run / folder).glob("part-*.parquet"))


def part_number(path: Path) -> int:
    """12 for ``part-000012.parquet``."""
    digits = path.stem.removeprefix("part-")
    return int(digits) if digits.isdigit() else 0


def read_rows(
    path: Path, columns: Sequence[str] | None = None, *, batch_size: int = 256
) -> Iterator[dict[str, Any]]:
    """The rows of one part as dicts, a batch at a time.

    Raises:
        DamagedRun: if the part cannot be read.
    """
    for batch in read_batches(path, columns, batch_size=batch_size):
        yield from batch.to_pylist()


def read_batches(
    path: Path, columns: Sequence[str] | None = None, *, batch_size: int = 4096
) -> Iterator[Any]:
    """The record batches of one part.

    Raises:
        DamagedRun: if the part cannot be read.
    """
    with _damage(path), _part_file(path) as file:
        there = file.schema_arrow
        _require_layout(path, there, columns)
        names = None if columns is None else [c for c in columns if c in there.names]
        read = 0
        for batch in file.iter_batches(batch_size=batch_size, columns=names):
            read += len(batch)
            yield batch
        if read != file.metadata.num_rows:  # a page's header is outside its checksum
            raise OSError(f"it holds {read} rows and says {file.metadata.num_rows}")


def read_groups(path: Path, *numbers: int) -> Iterator[Any]:
    """The row groups of one part as tables: those with these numbers, or all.

    Raises:
        DamagedRun: if the part cannot be read.
    """
    with _damage(path), _part_file(path) as file:
        for number in numbers or range(file.num_row_groups):
            yield file.read_row_group(number)


def segment_batches(segment: Path, folder: str) -> Iterator[Any]:
    """The rows of a segment that is not sealed yet, as record batches with all columns.

    Raises:
        FileNotFoundError: if it was sealed meanwhile; nothing was given then.
    """
    letter, kind = next((letter, kind) for name, letter, kind in _KINDS if name == folder)
    for group in read_lines(segment, letter, _GROUP_BYTES):
        yield from _table(kind, group).to_batches()


def _require_layout(path: Path, there: Any, columns: Sequence[str] | None) -> None:
    """Raise DamagedRun where a part does not have the columns that are asked for (all if None)."""
    number = (there.metadata or {}).get(b"eyas.format", b"")
    if number.isdigit() and int(number) > FORMAT_VERSION:
        raise DamagedRun(
            f"{path} has format {int(number)}; this eyas reads up to {FORMAT_VERSION}. "
            "Use a newer eyas."
        )
    wanted = arrow_schema(Rejected if path.parent.name == REJECTED else Trace)
    for name in wanted.names if columns is None else columns:
        if name not in there.names:
            if name in LATER_COLUMNS:
                continue
            fault = f"it has no column {name!r}"
        elif not _alike(wanted.field(name).type, there.field(name).type):
            fault = (
                f"its column {name!r} is {there.field(name).type}, not {wanted.field(name).type}"
            )
        else:
            continue
        raise DamagedRun(
            f"{path} is no part as eyas writes it: {fault}. Restore the file, or move it away to "
            "have its rows captured again."
        )


def _alike(wanted: Any, there: Any) -> bool:
    """Whether a column's type is the one that is written; what a list's items are called is not
    the same everywhere."""
    if is_list(wanted) and is_list(there):
        return bool(wanted.value_type == there.value_type)
    return bool(wanted == there)


def count_rows(path: Path) -> int:
    """How many rows a part says that it has.

    Raises:
        DamagedRun: if the part cannot be read.
    """
    import pyarrow.parquet as pq

    with _damage(path):
        return int(pq.read_metadata(path).num_rows)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn a part that cannot be read into a sentence."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DamagedRun(
            f"{path} cannot be read ({error}). Parts are never changed after they were written, "
            "so the file was damaged from outside: restore it, or move it away to have its rows "
            "captured again."
        ) from error
