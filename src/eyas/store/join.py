"""The rows of several runs as one: which are there twice, what they are called, where they go.

Invariants: a unit is taken once; all rows of a conversation's sample come from one run, so that
later turns stand on the very answers that lie beside them; a name belongs to one conversation.
A part is copied as it is unless a row of it is left out or renamed; parts keep their order.
Memory is a key a sample of a conversation and a name a conversation, however long the rows are.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import DamagedRun
from eyas.store.files import disk_errors, sync_directory, sync_file
from eyas.store.names import Names
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
from eyas.trace import ended_itself

_COLUMNS = ("conversation_id", "turn", "sample", "key")
_RUN_BITS = 24
"""A thread's owner and its turns are kept as one number: the run below, a bit a turn above."""


@dataclass(slots=True)
class JoinedRun:
    """What was found in one of the runs."""

    path: Path
    rows: Counter[str] = field(default_factory=Counter)
    """Rows by folder, and those of them that are left out by ``left traces`` and so on."""
    cut: int = 0
    """Traces among those left out that were cut at their budget."""
    doubles: Counter[int] = field(default_factory=Counter)
    """Rows that an earlier run (by its place) holds too."""
    example: dict[int, str] = field(default_factory=dict)
    """The id of one such row, by that run."""
    renamed: int = 0


@dataclass(slots=True)
class _Part:
    run: int
    folder: str
    path: Path
    number: int
    """Its number in the new run."""
    rows: int = 0
    changes: bool = False
    """Whether rows are left out or renamed."""


class Join:
    """Several runs, read once to see how they fit together, and then written as one."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = [JoinedRun(path) for path in runs]
        self._parts: list[_Part] = []
        self._owners: dict[bytes, int] = {}
        self._names = Names()

    def survey(self, on_row: Callable[[int], None] = lambda _: None) -> None:
        """Read every row's key and name.

        Raises:
            DamagedRun: if a part cannot be read, or a run holds a row twice.
        """
        number = seen = 0
        for at, run in enumerate(self.runs):
            of_run = {folder: parts(run.path, folder) for folder in (TRACES, REJECTED)}
            stems = sorted({path.stem for paths in of_run.values() for path in paths})
            numbers = {stem: number + n for n, stem in enumerate(stems, 1)}
            number += len(stems)
            for folder, paths in of_run.items():
                for path in paths:
                    part = _Part(at, folder, path, numbers[path.stem])
                    self._survey_part(part)
                    self._parts.append(part)
                    seen += part.rows
                    on_row(seen)

    def _survey_part(self, part: _Part) -> None:
        run = self.runs[part.run]
        of_traces = part.folder == TRACES
        columns = [*_COLUMNS, "finish_reason", "marks"] if of_traces else list(_COLUMNS)
        for batch in read_batches(part.path, columns):
            ids, turns, samples, keys = (batch.column(name).to_pylist() for name in _COLUMNS)
            taken: list[tuple[str, bytes]] = []
            for n, name in enumerate(ids):
                key = bytes.fromhex(keys[n])
                owner = self._take(part.run, key, samples[n], turns[n])
                if owner is None:
                    raise DamagedRun(
                        f"{run.path} holds {name}/{samples[n]}/{turns[n]} twice, so it was "
                        f"changed from outside; eyas verify {run.path} says more"
                    )
                if owner != part.run:
                    run.doubles[owner] += 1
                    run.example.setdefault(owner, f"{name}/{samples[n]}/{turns[n]}")
                    run.rows[f"left {part.folder}"] += 1
                    part.changes = True
                    if of_traces:
                        reason, marks = (
                            batch.column(name)[n].as_py() for name in ("finish_reason", "marks")
                        )
                        run.cut += not ended_itself(reason, marks or ())
                else:
                    taken.append((name, key))
            settled = zip(taken, self._names.settle(taken), strict=True)
            renamed = sum(stored != name for (stored, _), name in settled)
            run.renamed += renamed
            part.changes |= renamed > 0
            part.rows += len(ids)
        run.rows[part.folder] += part.rows

    def _take(self, run: int, key: bytes, sample: int, turn: int) -> int | None:
        """The run that a row is taken from; None if this one holds it twice."""
        thread, bit = _thread(key, sample), 1 << (turn + _RUN_BITS)
        known = self._owners.get(thread)
        if known is None:
            self._owners[thread] = run | bit
            return run
        owner = known & ((1 << _RUN_BITS) - 1)
        if owner == run:
            if known & bit:
                return None
            self._owners[thread] = known | bit
        return owner

    def write(self, out: Path, on_row: Callable[[int], None] = lambda _: None) -> int:
        """Write the rows as parts of `out`, durable; returns how many parts there are.

        Raises:
            DiskFull: if a write fails.
        """
        written = seen = 0
        for part in self._parts:
            target = out / part.folder / part_name(part.number)
            with disk_errors(target):
                if not part.changes:
                    shutil.copyfile(part.path, target)
                elif not self._rewrite(part, target):
                    target.unlink()
                if target.exists():
                    sync_file(target)
                    written += 1
            seen += part.rows
            on_row(seen)
        for folder in (TRACES, REJECTED):
            sync_directory(out / folder)
        return written

    def _rewrite(self, part: _Part, target: Path) -> int:
        """Write a part without the rows that are left out and with new names; returns its rows."""
        kept = 0
        with part_writer(target, part_schema(part.path)) as writer:
            for group in read_groups(part.path):
                table = self._changed(part.run, group)
                if table.num_rows:
                    writer.write_table(table)
                kept += table.num_rows
        return kept

    def _changed(self, run: int, table: Any) -> Any:
        """A row group as it is to be written."""
        import pyarrow as pa

        ids, turns, samples, keys = (table.column(name).to_pylist() for name in _COLUMNS)
        stored = list(zip(ids, map(bytes.fromhex, keys), strict=True))
        ours = [
            self._owners[_thread(key, samples[n])] & ((1 << _RUN_BITS) - 1) == run
            for n, (_, key) in enumerate(stored)
        ]
        settled = iter(self._names.settle([row for n, row in enumerate(stored) if ours[n]]))
        names = [next(settled) if ours[n] else name for n, name in enumerate(ids)]
        row_ids = [f"{name}/{samples[n]}/{turns[n]}" for n, name in enumerate(names)]
        for column, values in (("conversation_id", names), ("id", row_ids)):
            at = table.schema.get_field_index(column)
            table = table.set_column(at, table.schema.field(at), pa.array(values, pa.string()))
        return table.filter(pa.array(ours))


def _thread(key: bytes, sample: int) -> bytes:
    """One sample of a conversation."""
    return key + sample.to_bytes(4, "little")
