"""Rows of a run that are to be done again: put aside first, so that a capture finds them open.

Invariants: rows that are not asked for are never touched; a part is replaced as a whole, and the
old one lies in ``archive/`` before; the output of a cut answer lies in ``partials/`` before its
row goes, so that it can be continued from its exact ids; a crash at any step leaves rows that
the same command puts aside again, and none that is lost or there twice.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eyas.store.files import disk_errors, sync_directory, sync_file, write_atomically
from eyas.store.parts import (
    REJECTED,
    TRACES,
    part_name,
    part_schema,
    part_writer,
    parts,
    read_batches,
    read_groups,
)
from eyas.store.run import PARTIALS, archive_place
from eyas.trace import Trace, arrow_schema, ended_itself

_LATER = frozenset(("earlier_turn_truncated", "earlier_turn_rejected"))
"""Reasons of turns that were refused for what became of an earlier one."""
_GROUP_ROWS = 64
"""Rows of a group in ``partials/``: what is read to continue one of them."""

Unit = tuple[str, int, int]
"""(key, sample, turn)."""


@dataclass(slots=True)
class Redo:
    """What is to be done again."""

    which: str
    """``length``: rows that their budget cut; ``rejected``: refused rows."""
    reasons: Collection[str] = ()
    """Only rows refused for these reasons; all where empty."""
    max_new_tokens: int | None = None
    """Only rows that were cut at a smaller budget than this."""


@dataclass(slots=True)
class PutAside:
    """What was put aside."""

    counts: Counter[str] = field(default_factory=Counter)
    """Rows by ``length`` or their reason."""
    archive: Path | None = None
    """Where the old parts lie."""


class Partials:
    """Cut answers that wait to be continued. They stay on the disk until they are asked for."""

    def __init__(self, run: Path) -> None:
        self._places: dict[Unit, tuple[Path, int, int]] = {}
        for path in parts(run, PARTIALS):
            at = 0
            for batch in read_batches(path, ["key", "sample", "turn"], batch_size=_GROUP_ROWS):
                columns = [batch.column(name).to_pylist() for name in ("key", "sample", "turn")]
                for n, unit in enumerate(zip(*columns, strict=True)):
                    self._places[unit] = (path, (at + n) // _GROUP_ROWS, (at + n) % _GROUP_ROWS)
                at += batch.num_rows

    def __len__(self) -> int:
        return len(self._places)

    def get(self, unit: Unit) -> dict[str, Any] | None:
        """The row as it was stored, or None where there is none."""
        place = self._places.get(unit)
        if place is None:
            return None
        path, group, row = place
        (table,) = read_groups(path, group)
        found: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
        return found


def put_aside(run: Path, redo: Redo) -> PutAside:
    """Take the rows that are to be redone out of a run whose lock is held and journal sealed.

    Raises:
        DamagedRun: a part cannot be read.
        DiskFull: no room for the new parts; the same command goes on.
    """
    done = PutAside()
    threads: dict[tuple[str, int], int] = {}
    """The first turn of each thread that is redone; what was refused after it goes too."""
    from_traces: dict[Path, set[int]] = {}
    if redo.which == "length":
        for path in parts(run, TRACES):
            for at, unit in _cut_rows(path, redo.max_new_tokens):
                from_traces.setdefault(path, set()).add(at)
                done.counts["length"] += 1
                _first_turn(threads, unit)
    refused = {path: list(_refused_rows(path)) for path in parts(run, REJECTED)}
    if redo.which == "rejected":
        for rows in refused.values():
            for _, unit, reason in rows:
                if reason not in _LATER and (not redo.reasons or reason in redo.reasons):
                    done.counts[reason] += 1
                    _first_turn(threads, unit)
    from_rejected: dict[Path, set[int]] = {}
    for path, rows in refused.items():
        for at, (key, sample, turn), reason in rows:
            first = threads.get((key, sample))
            if first is None or turn < first:
                continue
            own = redo.which == "rejected" and (not redo.reasons or reason in redo.reasons)
            if reason in _LATER or own:
                from_rejected.setdefault(path, set()).add(at)
                done.counts[reason] += reason in _LATER
    if not from_traces and not from_rejected:
        return done
    done.archive = archive_place(run)
    _keep_partials(run, from_traces)
    # Refused rows first: if it ends here, a capture refuses them again for the same reason.
    for folder, chosen in ((REJECTED, from_rejected), (TRACES, from_traces)):
        for path, away in chosen.items():
            _replace(path, away, done.archive / folder)
    return done


def put_partials_away(run: Path) -> None:
    """Move ``partials/`` into the archive: nothing is left to be continued."""
    if parts(run, PARTIALS):
        place = archive_place(run)
        with disk_errors(place):
            (run / PARTIALS).rename(place / PARTIALS)
            sync_directory(place)
            sync_directory(run)


def _first_turn(threads: dict[tuple[str, int], int], unit: Unit) -> None:
    key, sample, turn = unit
    threads[key, sample] = min(turn, threads.get((key, sample), turn))


def _cut_rows(path: Path, below: int | None) -> Iterator[tuple[int, Unit]]:
    """(row, unit) of the rows of a part that a budget (below a number) cut."""
    names = ["key", "sample", "turn", "finish_reason", "marks", "max_new_tokens"]
    at = 0
    for batch in read_batches(path, names):
        columns = [batch.column(name).to_pylist() for name in names]
        for key, sample, turn, finish, marks, budget in zip(*columns, strict=True):
            if not ended_itself(finish, marks or ()) and (below is None or budget < below):
                yield at, (key, sample, turn)
            at += 1


def _refused_rows(path: Path) -> Iterator[tuple[int, Unit, str]]:
    """(row, unit, reason) of the refused rows of a part; unreadable input lines stay."""
    names = ["id", "key", "sample", "turn", "reason"]
    at = 0
    for batch in read_batches(path, names):
        columns = [batch.column(name).to_pylist() for name in names]
        for row_id, key, sample, turn, reason in zip(*columns, strict=True):
            if not row_id.startswith("line-"):
                yield at, (key, sample, turn), reason
            at += 1


def _keep_partials(run: Path, chosen: dict[Path, set[int]]) -> None:
    """Write the cut rows of each part into a file of ``partials/``."""
    if not chosen:
        return
    folder = run / PARTIALS
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
        sync_directory(run)
    number = max((int(p.stem.removeprefix("part-")) for p in parts(run, PARTIALS)), default=0)
    for path, rows in chosen.items():
        number += 1
        write_atomically(folder / part_name(number), partial(_write_rows, path, rows, keep=True))


def _replace(path: Path, rows: set[int], archive: Path) -> None:
    """Put a part into the archive and a new one without some rows in its place."""
    with disk_errors(archive):
        archive.mkdir(parents=True, exist_ok=True)
        kept = archive / path.name
        try:
            os.link(path, kept)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, kept)
            sync_file(kept)
        sync_directory(archive)
    write_atomically(path, partial(_write_rows, path, rows, keep=False))


def _write_rows(source: Path, rows: set[int], target: Path, *, keep: bool) -> None:
    """Write those rows of a part (or all but those) to another file."""
    import pyarrow as pa

    schema = arrow_schema(Trace) if keep else part_schema(source)
    at = 0
    with part_writer(target, schema) as writer:
        for batch in read_batches(source):
            mask = [((at + n) in rows) is keep for n in range(batch.num_rows)]
            at += batch.num_rows
            table = pa.Table.from_batches([batch]).filter(pa.array(mask))
            if keep:  # partials may come from parts of an earlier eyas
                table = pa.Table.from_pylist(table.to_pylist(), schema=schema)
            if table.num_rows:
                writer.write_table(table, row_group_size=_GROUP_ROWS if keep else None)
