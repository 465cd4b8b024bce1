"""Whether each later turn stands on the very answer that is stored for the turn before.

Invariant: only turns that are both there are compared, and memory is two hashes a later turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import orjson

from eyas.conversation import Message, digest
from eyas.prompting import Prompting
from eyas.store import TRACES, Run
from eyas.trace import Trace
from eyas.verify.run_rows import Faults, read_records, tools_of

_COLUMNS = ("key", "sample", "turn")


class _Shown(NamedTuple):
    """An answer as the turn behind it was asked with."""

    answer: bytes
    finished_at: float
    row_id: str


class _Stored(NamedTuple):
    """An answer as its own row has it, in each way in which it may have been read."""

    answers: tuple[bytes, ...]
    finished_at: float
    row_id: str


class Turns:
    """The answers of turns that another one follows."""

    def __init__(self, run: Run, prompting: Prompting, faults: Faults) -> None:
        self._prompting = prompting
        self._faults = faults
        self._followed: set[int] = set()
        for row in read_records(run, TRACES, _COLUMNS):
            key, sample, turn = (row[name] for name in _COLUMNS)
            if turn:
                self._followed.add(hash((key, sample, turn - 1)))
        self._shown: dict[int, _Shown] = {}
        self._stored: dict[int, _Stored] = {}

    def add(self, row: Trace, messages: list[Message] | None) -> None:
        """Take a row that can be read, and compare it where its neighbour was seen already."""
        own = hash((row.key, row.sample, row.turn))
        if own in self._followed:
            self._stored[own] = _Stored(self._answers(row), row.finished_at, row.id)
            self._compare(own)
        if row.turn and messages is not None:
            before = hash((row.key, row.sample, row.turn - 1))
            said = [message for message in messages if message["role"] == "assistant"]
            self._shown[before] = _Shown(_hash(said[-1] if said else {}), row.finished_at, row.id)
            self._compare(before)

    def _answers(self, row: Trace) -> tuple[bytes, ...]:
        ways = [self._prompting]
        if "unusual_stop" in row.marks and row.stop_id is not None:
            # The stop id may have been learnt after the answer was read.
            profile = self._prompting.profile
            ways = [
                replace(self._prompting, profile=replace(profile, stop_ids=stop_ids))
                for stop_ids in (profile.stop_ids - {row.stop_id}, profile.stop_ids | {row.stop_id})
            ]
        if "tool_calls" in row.marks:
            taken = (way.take_calls(row.prompt_ids, row.output_ids, tools_of(row)) for way in ways)
            return tuple(_hash(answer.message) for answer in taken)
        return tuple(_hash(way.take_apart(row.prompt_ids, row.output_ids)) for way in ways)

    def _compare(self, unit: int) -> None:
        shown, stored = self._shown.get(unit), self._stored.get(unit)
        if shown is None or stored is None:
            return
        del self._shown[unit], self._stored[unit]
        # An answer that is younger than the turn behind it was lost and captured once more.
        if shown.answer not in stored.answers and stored.finished_at <= shown.finished_at:
            self._faults.add(
                "history",
                shown.row_id,
                f"its messages show another answer than {stored.row_id} holds",
            )


def _hash(message: Message) -> bytes:
    return digest(orjson.dumps(message, option=orjson.OPT_SORT_KEYS))
