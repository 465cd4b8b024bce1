"""A run, for reading: its manifest and its rows, also while it is being written.

Invariant: every durable row is seen once, whether it lies in a part or still in the journal.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import DamagedRun
from eyas.store.files import disk_errors, sync_directory
from eyas.store.journal import count_lines, read_segment, segments
from eyas.store.lock import WriterLock
from eyas.store.manifest import CONFIG, NAME, Manifest
from eyas.store.parts import (
    REJECTED,
    TRACES,
    count_rows,
    part_name,
    parts,
    read_batches,
    read_rows,
    segment_batches,
)
from eyas.trace import Rejected, Trace, arrow_schema, from_record

if TYPE_CHECKING:
    from eyas.tokens import Profile

FOLDERS = (TRACES, REJECTED, "journal")
PARTIALS = "partials"
"""Cut answers that wait to be continued."""
STATUS = "status.json"
"""How the capture that writes the run stands; see `eyas.status`."""
INPUT = "input"
"""What rows were found in the input files; see `eyas.readers.memory`."""
_OURS = {*FOLDERS, PARTIALS, INPUT, "archive", CONFIG, STATUS}


class Run:
    """A run directory."""

    def __init__(self, path: str | Path) -> None:
        """Open a run for reading.

        Raises:
            DamagedRun: if it is none, or its manifest cannot be read.
        """
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)

    def profile(self) -> Profile:
        """What is known of the target.

        Raises:
            DamagedRun: if the manifest holds something else there.
        """
        from eyas.tokens import Profile

        try:
            return Profile.from_dict(self.manifest.profile)
        except ValueError as error:
            raise DamagedRun(f"{self.path / NAME}: the profile cannot be read: {error}") from error

    def records(
        self, folder: str = TRACES, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The rows of ``traces`` or ``rejected`` as dicts, in the order of the parts."""
        live = segments(self.path / "journal")
        sealed = parts(self.path, folder)
        for part in sealed:
            yield from read_rows(part, columns)
        for number, segment in live:
            part = self.path / folder / part_name(number)
            if part in sealed:
                continue
            try:
                for packed in read_segment(segment, "T" if folder == TRACES else "R"):
                    row = packed.record()
                    yield row if columns is None else {name: row.get(name) for name in columns}
            except FileNotFoundError:  # sealed since we looked
                if part.exists():
                    yield from read_rows(part, columns)

    def batches(
        self,
        folder: str = TRACES,
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 4096,
    ) -> Iterator[Any]:
        """`records` as record batches: no Python object a value.

        Columns come in the order and with the types of `eyas.trace.arrow_schema`, whichever eyas
        wrote the part; rows of the journal are in it.
        """
        import pyarrow as pa

        whole = arrow_schema(Trace if folder == TRACES else Rejected)
        names = whole.names if columns is None else [n for n in whole.names if n in columns]
        schema = pa.schema([whole.field(name) for name in names])
        live = segments(self.path / "journal")
        sealed = parts(self.path, folder)
        for part in sealed:
            for batch in read_batches(part, names, batch_size=batch_size):
                yield _in_schema(batch, schema)
        for number, segment in live:
            part = self.path / folder / part_name(number)
            if part in sealed:
                continue
            try:
                for batch in segment_batches(segment, folder):
                    yield _in_schema(batch, schema)
            except FileNotFoundError:  # sealed since we looked
                if part.exists():
                    for batch in read_batches(part, names, batch_size=batch_size):
                        yield _in_schema(batch, schema)

    def count(self, folder: str = TRACES) -> int:
        """How many rows ``traces`` or ``rejected`` hold; parts are not read for it."""
        live = segments(self.path / "journal")
        sealed = parts(self.path, folder)
        rows = sum(count_rows(part) for part in sealed)
        for number, segment in live:
            part = self.path / folder / part_name(number)
            if part in sealed:
                continue
            try:
                rows += count_lines(segment, "T" if folder == TRACES else "R")
            except FileNotFoundError:  # sealed since we looked
                if part.exists():
                    rows += count_rows(part)
        return rows

    def search(
        self, folder: str, column: str, values: set[str], columns: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Sealed rows whose `column` is one of `values`, from the newest part backwards."""
        import pyarrow as pa
        import pyarrow.compute as pc

        wanted = pa.array(sorted(values), pa.string())
        for part in reversed(parts(self.path, folder)):
            for batch in read_batches(part, columns):
                hits = batch.filter(pc.is_in(batch.column(column), value_set=wanted))
                yield from hits.to_pylist()

    def traces(self) -> Iterator[Trace]:
        """The good rows."""
        for record in self.records(TRACES):
            row = from_record(record)
            assert isinstance(row, Trace)
            yield row

    def rejected(self) -> Iterator[Rejected]:
        """The refused rows and input lines."""
        for record in self.records(REJECTED):
            row = from_record(record)
            assert isinstance(row, Rejected)
            yield row

    def find(self, row_id: str) -> Trace | Rejected | None:
        """The row with this id; a conversation's id finds its first row."""
        wanted = (row_id, f"{row_id}/0/0")
        for folder in (TRACES, REJECTED):
            for part in parts(self.path, folder):
                ids = [record["id"] for record in read_rows(part, ["id"], batch_size=8192)]
                if any(name in wanted for name in ids):
                    return next(
                        from_record(record) for record in read_rows(part) if record["id"] in wanted
                    )
            if segments(self.path / "journal"):
                for record in self.records(folder):
                    if record["id"] in wanted:
                        return from_record(record)
        return None

    def first(self) -> Trace | Rejected | None:
        """The first good row, else the first refused one."""
        for folder in (TRACES, REJECTED):
            for record in self.records(folder):
                return from_record(record)
        return None


def _in_schema(batch: Any, schema: Any) -> Any:
    """A batch with the columns of a schema; a column that an earlier eyas did not write holds
    what it means there: nothing."""
    import pyarrow as pa

    columns = []
    for wanted in schema:
        if wanted.name not in batch.schema.names:
            nothing: Any = [] if pa.types.is_list(wanted.type) else None
            column = pa.array([nothing] * len(batch), wanted.type)
        else:
            column = batch.column(wanted.name)
            if column.type != wanted.type:  # a list's items may be called otherwise
                column = column.cast(wanted.type)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return (path / NAME).exists()


def prepare_directory(path: Path) -> None:
    """Make the folders of a new run.

    Raises:
        DamagedRun: if the directory holds something else already.
    """
    if path.exists() and not path.is_dir():
        raise DamagedRun(f"--out {path} is a file; a run is a directory")
    if path.is_dir() and not is_run(path):
        foreign = [p.name for p in path.iterdir() if p.name not in _OURS
                   and not p.name.startswith((".", "writer.lock"))]  # fmt: skip
        if foreign or any(parts(path, folder) for folder in (TRACES, REJECTED)):
            raise DamagedRun(
                f"--out {path} is not empty and not a run of eyas (no {NAME}; it holds "
                f"{', '.join(sorted(foreign)[:5]) or 'parts'}). Choose another directory."
            )
    with disk_errors(path):
        for folder in FOLDERS:
            (path / folder).mkdir(parents=True, exist_ok=True)
        sync_directory(path)


def remove_temporaries(path: Path) -> None:
    """Remove the unfinished files of a process that died while it wrote them.

    To be called with the run's lock held: nobody else is writing then.
    """
    for folder in (path, *(path / name for name in (*FOLDERS, PARTIALS))):
        for left in folder.glob(".*.tmp"):
            left.unlink(missing_ok=True)


def archive(path: Path) -> Path:
    """Put the rows of a run aside under ``archive/DATE`` in it; nothing is deleted.

    The manifest goes last, so that a crash on the way leaves a run that says what it is.
    """
    target = archive_place(path)
    with disk_errors(target):
        for name in (*FOLDERS, PARTIALS, CONFIG, STATUS, NAME):
            if (path / name).exists():
                (path / name).rename(target / name)
        sync_directory(target)
        sync_directory(path)
    return target


def archive_run(path: Path) -> Path:
    """`archive` of a run that nobody writes.

    Raises:
        DamagedRun: if it is no run.
        RunLocked: if it is being written.
    """
    if not is_run(path):
        raise DamagedRun(f"{path} is not a run of eyas: it has no {NAME}")
    lock = WriterLock(path)
    lock.acquire()
    try:
        return archive(path)
    finally:
        lock.release()


def archive_place(path: Path) -> Path:
    """A new folder ``archive/DATE`` in a run."""
    stamp = dt.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    target = path / "archive" / stamp
    extra = 0
    with disk_errors(target):
        while True:
            try:
                target.mkdir(parents=True)
            except FileExistsError:
                extra += 1
                target = path / "archive" / f"{stamp}-{extra}"
            else:
                return target
