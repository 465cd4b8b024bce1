"""The checks of a run's single rows, from what is stored of them.

Invariant: whatever a row holds, what is wrong with it is counted as a fault of that row; no
value of one raises.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import orjson

from eyas.checks import GIVEN_MARKS, MARKS, REFUSALS, Checker
from eyas.conversation import Message, conversation_key, nth_key, seed_for
from eyas.engines import Generation, Sampling
from eyas.errors import (
    BusyError,
    DamagedRun,
    EngineError,
    MalformedAnswer,
    RequestRefused,
    ServerUnreachable,
    TransportError,
)
from eyas.ids import bad_prompt_id
from eyas.modes import Mode, Modes
from eyas.readers import REASONS
from eyas.store import Manifest, Run
from eyas.trace import Rejected, Trace
from eyas.turns import TURN_REASONS

_EXAMPLES = 5
_JUDGED_MARKS = frozenset(MARKS) - GIVEN_MARKS
"""Marks that the checks of a generation give."""

_ENGINE_ERRORS = (
    EngineError, ServerUnreachable, TransportError, BusyError, MalformedAnswer, RequestRefused,
)  # fmt: skip
KNOWN_REASONS = frozenset(
    (*REFUSALS, *MARKS, *TURN_REASONS, *REASONS, "cut_answer", "error_body")
).union(kind.reason for kind in _ENGINE_ERRORS)
"""Every reason that a capture can write into ``rejected/``."""

_MAY_BE_NULL = {
    Trace: frozenset(
        ("stop_id", "reasoning_start", "reasoning_end", "messages", "tools", "logprobs",
         "weight_version")
    ),
    Rejected: frozenset(
        ("prompt_ids", "output_ids", "finish_reason", "messages", "tools", "line", "text", "seed",
         "max_new_tokens", "weight_version")
    ),
}  # fmt: skip
NEVER_NULL = {
    kind: tuple(f.name for f in fields(kind) if f.name not in nullable)
    for kind, nullable in _MAY_BE_NULL.items()
}
"""Columns that always hold a value, as `docs/format.md` has it."""

_SAMPLING = tuple(Sampling().as_dict())
_ABOVE_ZERO = 0.01
"""How far rounding may lift a log-probability."""
_DUPLICATES = 4096
"""How many exact duplicates of ready-made ids are looked through for a row's key."""


def read_records(
    run: Run, folder: str, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a folder.

    Raises:
        DamagedRun: also where a part's bytes are sound and their values are none.
    """
    try:
        yield from run.records(folder, columns)
    except (ValueError, OverflowError) as error:  # text that is no UTF-8, a moment that is none
        raise DamagedRun(
            f"{run.path / folder}: rows cannot be read ({error}): a part was damaged"
        ) from error


@dataclass(slots=True)
class Faults:
    """What was found wrong with rows: how often, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: str, row_id: str, detail: str) -> None:
        """Count a fault of a row."""
        self.counts[fault] += 1
        examples = self.examples.setdefault(fault, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{row_id}: {detail}")


@dataclass
class RowChecks:
    """Every check of one row for which no other row is needed."""

    manifest: Manifest
    modes: Modes
    checker: Checker
    faults: Faults

    def __post_init__(self) -> None:
        fingerprint = self.manifest.fingerprint
        sampling = {name: fingerprint[name] for name in _SAMPLING if name in fingerprint}
        self._wanted: dict[str, Any] = {}
        if sampling:
            self._wanted["sampling"] = sampling
        self._right: set[tuple[str, str]] = set()
        """Texts of these columns that were found right."""
        seed = fingerprint.get("seed")
        self._seed = seed if type(seed) is int else None
        self._weights = fingerprint.get("weight_version")

    def check(self, row: Trace | Rejected) -> list[Message] | None:
        """Check a row; returns the messages of a good row, if it has any that can be read."""
        missing = self.null_columns(row)
        if missing:
            self.faults.add("null", row.id, f"without {', '.join(missing)}")
            return None
        try:
            self._check_common(row)
            if isinstance(row, Rejected):
                self._check_rejected(row)
                return None
            self._check_ids(row)
            self._check_columns(row)
            return self._messages(row)
        except Exception as error:  # a damaged row may hold anything
            self.unreadable(row, error)
            return None

    def mode(self, row: Trace | Rejected) -> Mode:
        """The template switches that the row's thread should have been given."""
        return self.modes.of(bytes.fromhex(row.key) if _is_key(row.key) else b"", row.sample)

    def null_columns(self, row: Trace | Rejected) -> list[str]:
        """Columns without a value that always have one."""
        return [name for name in NEVER_NULL[type(row)] if getattr(row, name) is None]

    def unreadable(self, row: Trace | Rejected, error: Exception) -> None:
        """Count a row of which something cannot even be looked at."""
        self.faults.add("unreadable", row.id, f"{type(error).__name__}: {error}"[:300])

    def _check_common(self, row: Trace | Rejected) -> None:
        add = self.faults.add
        if row.id != f"{row.conversation_id}/{row.sample}/{row.turn}":
            add("id", row.id, "its id is not CONVERSATION/SAMPLE/TURN")
        unknown = [mark for mark in row.marks if mark not in MARKS]
        if unknown:
            add("marks", row.id, f"marked {unknown}, which is no mark")
        if not _is_key(row.key):
            add("key", row.id, f"its key {row.key[:40]!r} is not 32 hex digits")
        mode = self.mode(row)
        if row.template_kwargs != mode.text and _parsed(row.template_kwargs) != mode.kwargs:
            add("template_kwargs", row.id, f"{row.template_kwargs[:200]}, and its key and sample "
                f"say {mode.text[:200]}")  # fmt: skip
        for name, wanted in self._wanted.items():
            text = getattr(row, name)
            if (name, text) in self._right:
                continue
            if _parsed(text) == wanted:
                self._right.add((name, text))
            else:
                add(name, row.id, f"{text[:200]}, the run has {json.dumps(wanted)[:200]}")
        if type(_parsed(row.metadata)) is not dict:
            add("metadata", row.id, f"its metadata is no JSON object: {row.metadata[:80]!r}")

    def _check_rejected(self, row: Rejected) -> None:
        if not row.reason or not row.detail:
            self.faults.add("no_reason", row.id, "a refused row without reason or detail")
        elif row.reason not in KNOWN_REASONS:
            self.faults.add(
                "reason", row.id, f"refused for {row.reason[:80]!r}, which is no reason"
            )

    def _check_ids(self, row: Trace) -> None:
        """What the checks of a capture say of the ids."""
        add = self.faults.add
        at = bad_prompt_id(row.prompt_ids, self.checker.profile.vocab_size)
        if at is not None:
            shown = f"prompt id {at} is {row.prompt_ids[at]}" if row.prompt_ids else "it has none"
            add("prompt_ids", row.id, shown)
            return
        generation = Generation(
            output_ids=row.output_ids,
            finish_reason=row.finish_reason,
            matched=row.stop_id if row.finish_reason == "stop" else None,
            names_stop=False,
            prompt_tokens=len(row.prompt_ids),
            completion_tokens=len(row.output_ids),
        )
        # Where the answer was continued, the budget is that of all its pieces.
        verdict = self.checker.judge(row.prompt_ids, generation, row.max_new_tokens)
        if verdict.refusal is not None:
            add(verdict.refusal, row.id, verdict.detail)
            return
        marks = _JUDGED_MARKS.intersection(row.marks)
        if marks != set(verdict.marks):
            add("marks", row.id, f"marked {sorted(marks)}, the checks say {verdict.marks}")
        positions = (row.stop_id, row.reasoning_start, row.reasoning_end)
        found = (verdict.stop_id, verdict.reasoning_start, verdict.reasoning_end)
        if positions != found:
            add("positions", row.id, f"stop id, reasoning start and end are {positions}, the ids "
                f"say {found}")  # fmt: skip

    def _check_columns(self, row: Trace) -> None:
        add, joints, count = self.faults.add, row.joints, len(row.output_ids)
        if row.tools is not None and tools_of(row) is None:
            add("tools", row.id, f"its tools are no list of definitions: {row.tools[:80]!r}")
        if joints and not (joints == sorted(set(joints)) and 0 < joints[0] <= joints[-1] < count):
            add("joints", row.id, f"continued at {joints[:20]}, which are no increasing positions "
                f"inside its {count} output ids")  # fmt: skip
        if row.logprobs is not None:
            wrong = wrong_logprobs(row.logprobs, count)
            if wrong is not None:
                add("logprobs", row.id, wrong)
        if self._seed is not None and _is_key(row.key):
            key = bytes.fromhex(row.key)
            if row.seed != seed_for(self._seed + len(joints), key, row.sample, row.turn):
                add("seed", row.id, "its seed is not that of its key, sample and turn")
        if None not in (self._weights, row.weight_version) and row.weight_version != self._weights:
            add("weights", row.id, f"of weights {row.weight_version!r}, the run of "
                f"{self._weights!r}")  # fmt: skip

    def _messages(self, row: Trace) -> list[Message] | None:
        """The row's messages; a row that has none must be of ready-made ids."""
        if row.messages is None:
            if row.turn or not self._is_ready_made(row):
                self.faults.add(
                    "messages",
                    row.id,
                    "it has no messages, and its key is not that of ready-made prompt ids: its "
                    "messages were lost, or its prompt was changed",
                )
            return None
        messages = _parsed(row.messages)
        if type(messages) is list and messages and all(map(_is_message, messages)):
            return messages
        self.faults.add("messages", row.id, f"its messages are no list of messages: "
                        f"{row.messages[:80]!r}")  # fmt: skip
        return None

    def _is_ready_made(self, row: Trace) -> bool:
        """Whether the row's key is that of its prompt ids, under a name that it may have had."""
        if not _is_key(row.key):
            return False
        key, content = bytes.fromhex(row.key), {"prompt_ids": row.prompt_ids}
        first = [conversation_key(None, content)]
        first += [conversation_key(name, content) for name in _given_ids(row)]
        reach = 64 if self.faults.counts["messages"] > 64 else _DUPLICATES
        return any(nth_key(one, n) == key for n in range(reach) for one in first)


def tools_of(row: Trace) -> list[dict[str, Any]] | None:
    """The definitions of tools that a row was rendered with; None where it has none."""
    tools = None if row.tools is None else _parsed(row.tools)
    sound = type(tools) is list and tools and all(type(tool) is dict for tool in tools)
    return tools if sound else None


def _given_ids(row: Trace) -> list[str]:
    """The ids that the input may have given: the name, also without what made it unique."""
    names = [row.conversation_id]
    for name in names:  # a merged run may have lengthened a name again
        for digits in (8, 16, 32):
            shorter = name.removesuffix(f"-{row.key[:digits]}")
            if shorter != name:
                names.append(shorter)
    return names


def wrong_logprobs(logprobs: list[float], count: int) -> str | None:
    """What is wrong with the log-probabilities of so many output ids, or None."""
    if len(logprobs) != count:
        return f"{len(logprobs)} log-probabilities for {count} output ids"
    if None in logprobs or not math.isfinite(sum(logprobs)):
        at = next(n for n, x in enumerate(logprobs) if x is None or not math.isfinite(x))
        return f"log-probability {at} is {logprobs[at]}"
    if logprobs and max(logprobs) > _ABOVE_ZERO:
        at = logprobs.index(max(logprobs))
        return f"log-probability {at} is {logprobs[at]}; a logarithm of a probability is below 0"
    return None


def _is_key(text: str) -> bool:
    try:
        return len(text) == 32 and len(bytes.fromhex(text)) == 16
    except ValueError:
        return False


def _is_message(value: Any) -> bool:
    return type(value) is dict and type(value.get("role")) is str


def _parsed(text: str) -> Any:
    """What JSON says, or None."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
