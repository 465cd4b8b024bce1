"""Whether each later turn stands on the very answer that is stored for the turn before.

Invariant: a later turn's prompt is rendered again as the run's history policy has it; two turns
are compared where both are there, and memory is some hashes a later turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import orjson

from eyas.conversation import Message, digest
from eyas.prompting import Chat, Prompting, Refusal
from eyas.store import TRACES, Run
from eyas.tokens.answers import AnswerIds, generated_ids
from eyas.trace import Trace
from eyas.verify.run_rows import Faults, read_records, tools_of

_COLUMNS = ("key", "sample", "turn")


class _Shown(NamedTuple):
    """An answer as the turn behind it was asked with."""

    answer: bytes
    """Of the message."""
    ids: AnswerIds | None
    """Hashes of the ids in the prompt, as one number a part; None where it is not found there."""
    begins_with: bytes | None
    """Of the ids that the prompt begins with, where they are the earlier ones."""
    drifted: bool
    """Whether the row says so."""
    finished_at: float
    row_id: str


class _Stored(NamedTuple):
    """An answer as its own row has it, in each way in which it may have been read."""

    answers: tuple[bytes, ...]
    ids: tuple[AnswerIds, ...]
    """Hashes of the ids as they were generated, as in `_Shown`."""
    whole: bytes
    """Of prompt and output."""
    drifted: bool
    finished_at: float
    row_id: str


class Turns:
    """Later turns, and the answers that they stand on."""

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

    def add(self, row: Trace, chat: Chat | None) -> None:
        """Take a row that can be read, with what it was rendered from, and compare it where its
        neighbour was seen already."""
        own = hash((row.key, row.sample, row.turn))
        if own in self._followed:
            self._stored[own] = self._store(row)
            self._compare(own)
        if row.turn and chat is not None:
            before = hash((row.key, row.sample, row.turn - 1))
            shown = self._look(row, chat)
            if shown is not None:
                self._shown[before] = shown
                self._compare(before)

    def _store(self, row: Trace) -> _Stored:
        ways = [self._prompting]
        if "unusual_stop" in row.marks and row.stop_id is not None:
            # The stop id may have been learnt after the answer was read.
            profile = self._prompting.profile
            ways = [
                replace(self._prompting, profile=replace(profile, stop_ids=stop_ids))
                for stop_ids in (profile.stop_ids - {row.stop_id}, profile.stop_ids | {row.stop_id})
            ]
        prompt, output = row.prompt_ids, row.output_ids
        if "tool_calls" in row.marks:
            tools = tools_of(row)
            messages = [way.take_calls(prompt, output, tools).message for way in ways]
        else:
            messages = [way.take_apart(prompt, output) for way in ways]
        return _Stored(
            tuple(map(_hash, messages)),
            tuple(
                _hashes(generated_ids(way.tokenizer, way.profile, prompt, output)) for way in ways
            ),
            _hash_ids([*prompt, *output]),
            "history_drift" in row.marks,
            row.finished_at,
            row.id,
        )

    def _look(self, row: Trace, chat: Chat) -> _Shown | None:
        """Render a later turn again; what is seen of the answer before it."""
        said = [message for message in chat.messages if message["role"] == "assistant"]
        answer, drifted = _hash(said[-1] if said else {}), "history_drift" in row.marks
        if not said or self._prompting.modes.each[0].template is None:
            return _Shown(answer, None, None, drifted, row.finished_at, row.id)
        later = self._prompting.later(chat)
        if isinstance(later, Refusal):
            self._faults.add("prompt", row.id, f"its messages do not render: {later.detail}")
            return None
        begins_with = None
        if self._prompting.history == "tokens":
            if later.tail is None:
                self._faults.add("prompt", row.id, f"it cannot be proven: {later.fault}")
                return None
            between = later.between(row.prompt_ids[-len(later.tail)])
            right = row.prompt_ids[-len(between) :] == between
            begins_with = _hash_ids(row.prompt_ids[: -len(between)])
        else:
            right = row.prompt_ids == later.ids
        if not right:
            self._faults.add("prompt", row.id, "its prompt ids are not what the template makes of "
                             "its messages")  # fmt: skip
        ids = None if later.shown is None else _hashes(later.shown)
        return _Shown(answer, ids, begins_with, drifted, row.finished_at, row.id)

    def _compare(self, unit: int) -> None:
        shown, stored = self._shown.get(unit), self._stored.get(unit)
        if shown is None or stored is None:
            return
        del self._shown[unit], self._stored[unit]
        if stored.finished_at > shown.finished_at:
            return  # it was lost and captured once more, after the turn behind it
        if shown.answer not in stored.answers:
            self._faults.add(
                "history",
                shown.row_id,
                f"its messages show another answer than {stored.row_id} holds",
            )
            return
        if shown.begins_with not in (None, stored.whole):
            self._faults.add("history", shown.row_id, f"its prompt does not begin with the ids of "
                             f"{stored.row_id}")  # fmt: skip
        if self._prompting.modes.each[0].template is None:
            return
        generated = stored.ids[stored.answers.index(shown.answer)]
        drifted = stored.drifted or self._prompting.drifted(generated, shown.ids)
        if drifted != shown.drifted:
            self._faults.add(
                "marks",
                shown.row_id,
                f"it should {'' if drifted else 'not '}be marked history_drift: an earlier answer's "
                f"ids {'are other ones' if drifted else 'are the same'} in its prompt",
            )


def _hash(message: Message) -> bytes:
    return digest(orjson.dumps(message, option=orjson.OPT_SORT_KEYS))


def _hash_ids(ids: Sequence[int]) -> bytes:
    return digest(array("i", ids).tobytes())


def _hashes(ids: AnswerIds) -> AnswerIds:
    """One number for the ids of each part; equal where those are."""

    def one(part: tuple[int, ...]) -> tuple[int]:
        return (int.from_bytes(_hash_ids(part)),)

    return AnswerIds(None if ids.reasoning is None else one(ids.reasoning), one(ids.content))
