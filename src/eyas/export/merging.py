"""Turns of a conversation in one row, where ids prove that the later goes on from the earlier.

Invariants: a turn is joined to another only if its prompt begins with the other's prompt and
output; no trace is lost or there twice; memory holds a count a thread and a bounded number of ids
(what is too much waits in a file that has no name and goes with the process).
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from eyas.export.rows import Row
from eyas.store import TRACES, Run
from eyas.trace import Trace

HELD_IDS = 64 * 2**20
"""Ids of unfinished threads that are held in memory (4 bytes each)."""

_Thread = tuple[str, int]


def merged_rows(
    run: Run,
    keep: Callable[[Trace], bool],
    *,
    max_length: int | None = None,
    spool: Path,
    held_ids: int | None = None,
) -> Iterator[Row]:
    """The rows of a run, with the turns of each thread joined as far as they can be.

    Args:
        keep: which traces are taken; called once for each.
        max_length: rows of more ids are not made by joining.
        spool: a directory for the file that turns wait in if they are too many for memory.
        held_ids: how many ids may be held; `HELD_IDS` where None.
    """
    count: Counter[_Thread] = Counter()
    for record in run.records(TRACES, ["key", "sample"]):
        count[record["key"], record["sample"]] += 1
    for thread in [thread for thread, turns in count.items() if turns == 1]:
        del count[thread]  # nearly all, in a run of single turns
    with _Waiting(spool, HELD_IDS if held_ids is None else held_ids) as waiting:
        for trace in run.traces():
            thread = (trace.key, trace.sample)
            taken = keep(trace)
            if thread not in count:
                if taken:
                    yield Row.of(trace)
                continue
            if taken:
                waiting.add(thread, trace)
            count[thread] -= 1
            if not count[thread]:
                del count[thread]
                yield from join_turns(waiting.take(thread), max_length)
        for thread in list(count):  # of a run that is being written
            yield from join_turns(waiting.take(thread), max_length)


def join_turns(traces: Iterable[Trace], max_length: int | None = None) -> list[Row]:
    """The traces of one thread as few rows as their ids allow, in the order of their turns."""
    made: list[tuple[Row, Trace, Trace]] = []
    """Rows with their first and last trace."""
    for trace in sorted(traces, key=lambda trace: trace.turn):
        start, end = len(trace.prompt_ids), len(trace.prompt_ids) + len(trace.output_ids)
        before: list[int] = []
        if max_length is None or end <= max_length:
            before = [n for n, (row, _, _) in enumerate(made) if row.goes_on_in(trace.prompt_ids)]
        if not before:
            made.append((Row.of(trace), trace, trace))
            continue
        at = max(before, key=lambda n: len(made[n][0].input_ids))
        row, first, _ = made[at]
        row.input_ids = [*trace.prompt_ids, *trace.output_ids]
        row.spans.append((start, end))
        row.complete = trace.complete
        made[at] = row, first, trace
    for row, first, last in made:
        if first is not last:
            row.id = f"{first.conversation_id}/{first.sample}/{first.turn}-{last.turn}"
    return [row for row, _, _ in made]


class _Waiting:
    """Traces of threads whose other turns are still to come."""

    def __init__(self, spool: Path, held_ids: int) -> None:
        self._directory = spool
        self._most = held_ids
        self._held: dict[_Thread, list[Trace]] = {}
        self._ids = 0
        self._file: IO[bytes] | None = None
        self._places: dict[_Thread, list[int]] = {}

    def __enter__(self) -> _Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, thread: _Thread, trace: Trace) -> None:
        """Keep a trace until its thread is taken."""
        # Packed: a tenth of what Python numbers need.
        trace.prompt_ids = array("i", trace.prompt_ids)  # type: ignore[assignment]
        trace.output_ids = array("i", trace.output_ids)  # type: ignore[assignment]
        self._held.setdefault(thread, []).append(trace)
        self._ids += len(trace.prompt_ids) + len(trace.output_ids)
        if self._ids > self._most:
            self._put_down()

    def take(self, thread: _Thread) -> list[Trace]:
        """What was kept of a thread, which is then forgotten."""
        found = self._held.pop(thread, [])
        self._ids -= sum(len(trace.prompt_ids) + len(trace.output_ids) for trace in found)
        for place in self._places.pop(thread, ()):
            assert self._file is not None
            self._file.seek(place)
            found.append(pickle.load(self._file))  # our own, from a file without a name
        return found

    def _put_down(self) -> None:
        """Write all that is held to the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
        self._file.seek(0, 2)
        for thread, traces in self._held.items():
            for trace in traces:
                self._places.setdefault(thread, []).append(self._file.tell())
                pickle.dump(trace, self._file, pickle.HIGHEST_PROTOCOL)
        self._held.clear()
        self._ids = 0
