"""Threads of conversations with tools: how far the ledger says they came, and how they go on.

Invariant: each unit of such a thread is counted once. Units are the turns that the input knows,
and those in which a call is answered that the recording did not answer there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from eyas.conversation import Conversation
from eyas.prompting import Refusal
from eyas.store import CALLED, OPEN, REFUSED, TRUNCATED, UNANSWERED, UNREADABLE
from eyas.tools.answers import Answer
from eyas.tools.steps import MISSING, NO_CALL, UNREAD, Found, Steps

TOOL_REASONS: dict[str, str] = {
    MISSING: "an earlier answer calls a tool, and there is no result for the call",
    UNREAD: "an earlier answer holds a call that cannot be read",
    NO_CALL: "the turn brings results of tools, and the target called none",
    "tool_failed": "what should give a call its result failed",
}
"""Why turns of a conversation with tools are not asked."""


_BLOCKING = {
    REFUSED: "earlier_turn_rejected",
    TRUNCATED: "earlier_turn_truncated",
    UNANSWERED: MISSING,
    UNREADABLE: UNREAD,
}
"""Statuses behind which nothing more is asked, and the reason that later turns are given."""


@dataclass(slots=True)
class Walk:
    """What the ledger holds of one thread."""

    turn: int = 0
    """The unit at which it ends: open, blocking, or the last one."""
    next: int = 1
    """The recorded turn that comes after it."""
    statuses: bytearray = field(default_factory=bytearray)
    """The status of each unit that is known, there or not."""
    open: bool = False
    """Whether that unit is still to be asked, or passed over."""
    extra: bool = False
    """Whether the open unit is one that the input does not know."""
    blocked: str | None = None
    """The reason for later turns, where nothing more is asked behind that unit."""


def walk(conversation: Conversation, stored: bytes) -> Walk:
    """Follow a thread through the statuses of its units.

    `stored` has one for each recorded turn, and further ones as far as units were stored.
    """
    use = conversation.tool_use
    assert use is not None
    total = len(conversation.turns)
    found = Walk()
    passed = False
    while True:
        now = stored[found.turn] if found.turn < len(stored) else OPEN
        found.statuses.append(now)
        if now == OPEN:
            found.open = True
            break
        if now in _BLOCKING and not passed:
            found.blocked = _BLOCKING[now]
            break
        brings_results = found.next < total and found.next in use.results
        if now == CALLED:
            found.extra = not brings_results
            passed = False
            found.next += brings_results
        elif found.next < total:
            passed = brings_results and not conversation.turns[found.next]
            found.extra = False
            found.next += 1
        else:
            return found
        found.turn += 1
    for later in range(found.turn + 1, found.turn + 1 + total - found.next):
        found.statuses.append(stored[later] if later < len(stored) else OPEN)
    return found


class After(NamedTuple):
    """What an answer means for the thread that it belongs to."""

    answer: Answer
    marks: tuple[str, ...] = ()
    """Of the answer's row."""
    found: Found | None = None
    """What there is for its calls; None where it makes none."""
    ended: Refusal | None = None
    """Why the thread ends here, though the recording may go on."""


def after_answer(answer: Answer, steps: Steps, policy: Policy) -> After:
    """What follows an answer that the target ended itself."""
    if answer.fault is not None:
        return After(answer, (UNREAD,), ended=Refusal(UNREAD, answer.fault))
    if not answer.calls:
        return After(answer, (NO_CALL,) if steps.recorded_results else ())
    found = steps.find(answer.calls, nearest=policy.nearest)
    missing = [call for call, result in zip(answer.calls, found.results, strict=True)
               if result is None]  # fmt: skip
    marks = ("tool_calls",)
    if steps.rounds >= policy.rounds:
        detail = f"{policy.rounds} answers in a row called tools, as many as --tool-rounds allows"
        return After(answer, (*marks, MISSING), found, Refusal(MISSING, detail))
    if missing and not policy.produces:
        function = missing[0]["function"]
        detail = (
            f"the target calls {function['name']} with "
            f"{_shown(function['arguments'])}, for which no result is recorded"
        )
        return After(answer, (*marks, MISSING), found, Refusal(MISSING, detail))
    return After(answer, marks, found)


def _shown(arguments: Any) -> str:
    """Arguments as JSON, the beginning of it."""
    text = (
        arguments if isinstance(arguments, str) else orjson.dumps(arguments, default=str).decode()
    )
    return text[:200]


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of calls that have no recorded result."""

    nearest: bool = False
    produces: bool = False
    """Whether a command or function gives them one."""
    rounds: int = 32
    """The most answers in a row whose calls are answered."""
