"""What a run already holds, and which part of the input it is to hold.

Invariants: a unit (conversation, sample, turn) that is in the ledger is never generated again;
a conversation keeps the name under which its first row was stored; two conversations never
share a name. Names and occurrences are told from the whole input, whatever the shard, so that
they are the same in each.

Memory is 20 bytes a unit and 20 bytes a name, independent of the rows' length. A unit is known by
128 bits: its conversation's key, with sample and turn folded in. Keys are hashes, so that two
units of ten million are taken for one with a probability of 1 in 10**24.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.conversation import nth_key
from eyas.errors import DamagedRun
from eyas.shard import Shard
from eyas.store.names import Names, hashes_of
from eyas.store.parts import REJECTED, TRACES, parts, read_batches
from eyas.store.table import Table, Values, Words, words_of
from eyas.trace import ended_itself

OPEN, GOOD, TRUNCATED, REFUSED, CALLED, UNANSWERED, UNREADABLE = range(7)
"""Status of a unit: to be done; complete; stored but cut at the budget; in ``rejected/``. Of complete
ones that call tools: their calls are answered; they have no results; they cannot be read."""

_MARKED = {
    "tool_call_unread": UNREADABLE,
    "tool_result_missing": UNANSWERED,
    "tool_calls": CALLED,
}
"""What a complete row's marks say of its status, the first that fits."""
_ONCE = np.uint32(8)
"""The table's values: the status, and this for each time that the conversation was met."""
_GATHERED = 1 << 16
"""Rows that are read before they are sorted in."""
_COLUMNS = ("conversation_id", "turn", "sample", "key")
_OF_TRACES = (*_COLUMNS, "finish_reason", "marks")


@dataclass(slots=True)
class Met:
    """What is known of conversations that were met in the input, one after the other."""

    keys: list[bytes]
    """The conversations' keys in this pass: exact duplicates have their occurrence's."""
    ours: list[bool]
    """Which of them are in the part of the input that the run is to hold."""
    statuses: bytes
    """The status of each unit: for each conversation, for each sample, for each turn."""
    bounds: list[int]
    """Conversation `n` has the statuses from ``bounds[n]`` to ``bounds[n + 1]``."""
    count: list[int]
    """How many units of our conversations have each status."""
    to_name: list[int]
    """The conversations whose names are to be asked for: those with an open unit, those with
    calls that were answered (they may have more units), and those that other shards hold."""


@dataclass(slots=True)
class _Rows:
    """Stored rows that are to be sorted in."""

    names: list[Words] = field(default_factory=list)
    """Hashes of them."""
    keys: bytearray = field(default_factory=bytearray)
    folded: list[Words] = field(default_factory=list)
    """Their sample and turn."""
    statuses: list[Values] = field(default_factory=list)


class Ledger:
    """The units of a run, by key."""

    def __init__(self, shard: Shard | None = None) -> None:
        self.shard = shard
        self._units = Table()
        self._lately: dict[bytes, int] = {}
        """How often conversations were met that the table does not know yet."""
        self._names = Names()
        self.done = 0
        self.rejected = 0

    @classmethod
    def load(cls, run: Path, shard: Shard | None = None) -> Ledger:
        """Read the sealed rows' keys (the journal must have been sealed before).

        Raises:
            DamagedRun: a part cannot be read.
        """
        ledger = cls(shard)
        rows = _Rows()
        for folder, columns in ((TRACES, _OF_TRACES), (REJECTED, _COLUMNS)):
            for path in parts(run, folder):
                for batch in read_batches(path, columns):
                    rows.names.append(hashes_of(batch.column("conversation_id").to_pylist()))
                    rows.keys += _keys(path, batch.column("key"))
                    rows.folded.append(
                        _fold(_int32s(batch.column("sample")), _int32s(batch.column("turn")))
                    )
                    rows.statuses.append(_statuses(batch))
                    if len(rows.keys) >= 16 * _GATHERED:
                        ledger._keep(rows)
                        rows = _Rows()
        if rows.keys:
            ledger._keep(rows)
        return ledger

    def _keep(self, rows: _Rows) -> None:
        first, second = words_of(rows.keys)
        folded, statuses = np.concatenate(rows.folded), np.concatenate(rows.statuses)
        self._names.keep(np.concatenate(rows.names), first, second)
        new = self._units.add(first, second ^ folded, statuses)
        rejected = int(np.count_nonzero(new & (statuses == REFUSED)))
        self.rejected += rejected
        self.done += int(np.count_nonzero(new)) - rejected

    def meet(self, keys: bytes, turns: Sequence[int], samples: int = 1) -> Met:
        """Take the next conversations of the input, in its order.

        Args:
            keys: 16 bytes a conversation, of its content.
            turns: how many turns each has; 0 for an input line that cannot be used, which is
                one unit whatever the samples.
            samples: samples of each conversation.
        """
        if len(self._lately) >= self._units.may_wait:
            values = np.fromiter(self._lately.values(), np.uint32) * _ONCE
            self._units.add(*words_of(b"".join(self._lately)), values)
            self._lately = {}
        first, second = words_of(keys)
        known = self._units.find(first, second)
        times = self._count(keys, known)
        listed = [keys[at : at + 16] for at in range(0, len(keys), 16)]
        again = np.flatnonzero(times)
        for n in again.tolist():
            listed[n] = nth_key(listed[n], int(times[n]))
        if len(again):
            first, second = words_of(b"".join(listed))
        ours = np.ones(len(listed), np.bool_)
        if self.shard is not None:
            ours[:] = [self.shard.holds(key) for key in listed]

        turn_counts = np.maximum(np.asarray(turns, np.int64), 1)
        unit_counts = np.where(np.asarray(turns) > 0, turn_counts * samples, 1)
        ends = np.cumsum(unit_counts)
        starts = ends - unit_counts
        row = np.repeat(np.arange(len(listed)), unit_counts)
        sample, turn = np.divmod(np.arange(len(row)) - starts[row], turn_counts[row])
        if len(row) > len(listed) or len(again):
            known = self._units.find(first[row], second[row] ^ _fold(sample, turn))
        statuses = np.zeros(len(row), np.uint8)
        there = known >= 0
        statuses[there] = self._units.values[known[there]] % _ONCE
        to_name = ~ours
        to_name[row[(statuses == OPEN) | (statuses == CALLED)]] = True
        return Met(
            keys=listed,
            ours=ours.tolist(),
            statuses=statuses.tobytes(),
            bounds=[0, *ends.tolist()],
            count=np.bincount(statuses[ours[row]], minlength=UNREADABLE + 1).tolist(),
            to_name=np.flatnonzero(to_name).tolist(),
        )

    def more(self, key: bytes, sample: int, turn: int) -> bytes:
        """The statuses of a thread's units from a turn on, up to the first that is open."""
        first, second = words_of(key)
        found = bytearray()
        while True:
            folded = _fold(np.array([sample]), np.array([turn + len(found)]))
            at = int(self._units.find(first, second ^ folded)[0])
            status = OPEN if at < 0 else int(self._units.values[at] % _ONCE)
            if status == OPEN:
                return bytes(found)
            found.append(status)

    def name(self, wanted: Sequence[tuple[str | None, bytes]]) -> list[str]:
        """The names by which conversations go, of their given ids and the keys of `meet`.

        The name is the given id, or the beginning of the key; where another conversation has
        that name already, the beginning of the key is added. To be asked for each conversation
        once, in the input's order, but for those that hold all their units.
        """
        return self._names.choose(
            [(key.hex()[:16] if given is None else given, key) for given, key in wanted]
        )

    def _count(self, keys: bytes, known: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often each conversation was met before; counts this time."""
        times = np.zeros(len(known), np.int64)
        at = known[known >= 0]
        values = self._units.values
        if len(np.unique(at)) == len(at):
            times[known >= 0] = values[at] // _ONCE
            values[at] += _ONCE
        else:
            for n in np.flatnonzero(known >= 0).tolist():
                times[n] = values[known[n]] // _ONCE
                values[known[n]] += _ONCE
        lately = self._lately
        for n in np.flatnonzero(known < 0).tolist():
            key = keys[16 * n : 16 * n + 16]
            before = lately.get(key, 0)
            lately[key] = before + 1
            if before:
                times[n] = before
        return times


def _fold(sample: NDArray[np.integer[Any]], turn: NDArray[np.integer[Any]]) -> Words:
    """What makes a conversation's key that of a unit, by exclusive or with its second half."""
    return sample.astype(np.uint64) << np.uint64(32) | turn.astype(np.uint64)


def _int32s(column: Any) -> NDArray[np.int32]:
    """A column of numbers. (Arrow's own `to_numpy` imports pandas where that is installed.)"""
    data = np.frombuffer(column.buffers()[1], np.int32)
    return data[column.offset : column.offset + len(column)]


def _keys(path: Path, column: Any) -> bytes:
    """A column of keys in hex digits as 16 bytes each."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    try:
        keys = unhexlify(memoryview(data)[ends[0] : ends[-1]] if data else b"")
    except ValueError as error:
        raise DamagedRun(f"{path} holds a key that is none ({error})") from error
    if len(keys) != 16 * len(column) or (np.diff(ends) != 32).any():
        raise DamagedRun(f"{path} holds a key that does not have 32 digits")
    return keys


def _statuses(batch: Any) -> Values:
    """The status of each stored row of a part."""
    if "finish_reason" not in batch.schema.names:
        return np.full(batch.num_rows, REFUSED, np.uint32)
    statuses = np.full(batch.num_rows, GOOD, np.uint32)
    reasons, marks = batch.column("finish_reason").to_pylist(), batch.column("marks")
    counts = marks.value_lengths().to_pylist()
    for n, reason in enumerate(reasons):
        if reason == "length" or counts[n]:
            statuses[n] = _status(reason, marks[n].as_py() or ())
    return statuses


def _status(finish_reason: str, marks: Collection[str]) -> int:
    if not ended_itself(finish_reason, marks):
        return TRUNCATED
    return next((status for mark, status in _MARKED.items() if mark in marks), GOOD)
