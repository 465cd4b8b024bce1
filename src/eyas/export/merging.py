"""Turns of a conversation in one row, where ids prove that the later goes on from the earlier.

Invariants: a turn is joined to another only if its prompt begins with the other's prompt and
output, id by id; no trace is lost or there twice; memory holds eight bytes a trace and a bounded
number of ids. The ids of a joined row are those of its last trace; the others only give spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eyas.export.buckets import Buckets, slices
from eyas.export.report import ExportReport
from eyas.export.rows import (
    filtered,
    list_array,
    mixed,
    numbers,
    replaced,
    words,
)

Words = NDArray[np.uint64]


def thread_words(rows: Any) -> Words:
    """64 bits that stand for each row's thread: its conversation's key and its sample."""
    first, second = words(rows)
    return mixed(first, second, rows.column("sample").to_numpy())


def repeated(threads: Iterable[Words]) -> Words:
    """The threads that are there more than once, sorted."""
    found, counts = np.unique(
        np.concatenate([np.zeros(0, np.uint64), *threads]), return_counts=True
    )
    return found[counts > 1]


def joined_rows(
    batches: Iterable[Any],
    several: Words,
    buckets: Buckets,
    *,
    max_length: int | None = None,
    last_turn: bool = False,
) -> Iterator[Any]:
    """Rows, with the turns of each thread joined as far as they can be.

    Rows of a single turn come first and as they are; the others by thread.

    Args:
        batches: rows of one trace each.
        several: the threads of more than one turn (`repeated`).
        buckets: where these wait for one another.
        max_length: rows of more ids are not made by joining.
        last_turn: whether only a row's last turn stays supervised.
    """
    yield from _apart(batches, several, buckets)
    for threads, rows in buckets.sorted():
        for piece in _whole_threads(threads, rows):
            yield join_turns(*piece, max_length, last_turn=last_turn)


def last_rows(
    batches: Iterable[Any], several: Words, buckets: Buckets, report: ExportReport
) -> Iterator[Any]:
    """The last turn of each thread, whose messages hold the turns before it.

    Behind a turn that was left out the thread has ended: the messages of its later turns would
    bring the answer back. What is supervised is the last turn.
    """
    for rows in _apart(batches, several, buckets):
        first = rows.column("turn").to_numpy() == 0
        report.leave_out("behind_left_out", int((~first).sum()))
        yield filtered(rows, first)
    for found, all_rows in buckets.sorted():
        for rows, threads in _whole_threads(found, all_rows):
            turns, chains = rows.column("turn").to_numpy(), []
            for thread in _threads(rows, threads):
                there = [at for n, at in enumerate(thread) if turns[at] == n]
                report.leave_out("behind_left_out", len(thread) - len(there))
                if there:
                    chains.append(there)
            yield _merged(rows, chains, last_turn=True)


def _apart(batches: Iterable[Any], several: Words, buckets: Buckets) -> Iterator[Any]:
    """The rows that are alone in their thread; the others are put into the buckets."""
    for rows in batches:
        threads = thread_words(rows)
        waits = np.zeros(len(rows), np.bool_)
        if len(several):
            place = np.minimum(np.searchsorted(several, threads), len(several) - 1)
            waits = several[place] == threads
        buckets.add(threads[waits], filtered(rows, waits))
        if not waits.all():
            yield filtered(rows, ~waits)


def _whole_threads(threads: Words, rows: Any) -> Iterator[tuple[Any, Words]]:
    """A bucket in smaller pieces, none of which ends within a thread."""
    begin = 0
    while begin < len(rows):
        piece = next(slices(rows[begin:]))
        end = int(np.searchsorted(threads, threads[begin + len(piece) - 1], side="right"))
        yield rows[begin:end], threads[begin:end]
        begin = end


def join_turns(
    rows: Any, threads: Words, max_length: int | None = None, *, last_turn: bool = False
) -> Any:
    """Rows of whole threads, those that lie behind each other joined as far as ids allow.

    Args:
        rows: in any order within a thread.
        threads: which thread each belongs to.
    """
    column = rows.column("input_ids")
    ids, starts = numbers(column.values), numbers(column.offsets)
    prompts = rows.column("prompt").to_numpy()
    made: list[list[int]] = []
    for thread in _threads(rows, threads):
        made += _chains(thread, ids, starts, prompts, max_length)
    return _merged(rows, made, last_turn=last_turn)


def _threads(rows: Any, threads: Words) -> Iterator[list[int]]:
    """The rows of each thread in the order of their turns."""
    samples, turns = (rows.column(name).to_numpy() for name in ("sample", "turn"))
    keys = words(rows)
    order = np.lexsort((turns, samples, *keys, threads))
    same = np.zeros(len(rows), np.bool_)
    same[1:] = True
    for column in (*keys, samples):
        same[1:] &= column[order][1:] == column[order][:-1]
    edges = [*np.flatnonzero(~same).tolist(), len(rows)]
    for begin, end in pairwise(edges):
        yield order[begin:end].tolist()


def _chains(
    turns: Sequence[int], ids: Any, starts: Any, prompts: Any, max_length: int | None
) -> list[list[int]]:
    """The rows of one thread, in the order of their turns, as chains of which each goes on from
    the one before it."""
    chains: list[list[int]] = []
    for turn in turns:
        start, end = int(starts[turn]), int(starts[turn + 1])
        best, longest = None, -1
        if max_length is None or end - start <= max_length:
            for chain in chains:
                first, last = int(starts[chain[-1]]), int(starts[chain[-1] + 1])
                n = last - first
                # The prompt has to say something behind what was there already.
                if longest < n < prompts[turn] and np.array_equal(
                    ids[start : start + n], ids[first:last]
                ):
                    best, longest = chain, n
        if best is None:
            chains.append([turn])
        else:
            best.append(turn)
    return chains


def _merged(rows: Any, chains: list[list[int]], *, last_turn: bool) -> Any:
    """One row a chain: its last turn's, with the spans and turns of all."""
    last = np.array([chain[-1] for chain in chains], np.int64)
    taken = rows.take(pa.array(last))
    turns = rows.column("turn").to_numpy()
    names = taken.column("id").to_pylist()
    for at, chain in enumerate(chains):
        if len(chain) > 1:
            thread = names[at].rpartition("/")[0]
            names[at] = f"{thread}/{turns[chain[0]]}-{turns[chain[-1]]}"
    count = np.array([len(chain) for chain in chains], np.int32)
    ids = rows.column("apart").to_numpy()
    apart = np.array([ids[chain].sum() for chain in chains], np.int64)
    columns = {"id": pa.array(names, pa.string()), "turns": pa.array(count)}
    columns["apart"] = pa.array(apart)
    if not last_turn:
        columns["spans"] = _all_spans(rows, chains)
    return replaced(taken, **columns)


def _all_spans(rows: Any, chains: list[list[int]]) -> Any:
    """The spans of all turns of each chain, one behind the other."""
    order = np.array([turn for chain in chains for turn in chain], np.int64)
    flat = rows.column("spans").take(pa.array(order))
    ends = numbers(flat.offsets)
    edges = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])])
    return list_array(ends[edges] - ends[0], numbers(flat.values)[ends[0] : ends[-1]])
