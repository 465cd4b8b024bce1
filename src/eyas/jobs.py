"""One thread of a conversation, and the rows that its turns become.

Invariant: what is known of a thread stands in its `Job` alone: its place in the conversation, what
was said so far, and what its next request is made of. Each row says the same of its conversation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from eyas.conversation import Conversation, Message
from eyas.ids import as_row
from eyas.modes import Mode
from eyas.prompting import Earlier
from eyas.store import OPEN
from eyas.tools.steps import Steps
from eyas.trace import Rejected, Trace


@dataclass(slots=True)
class Job:
    """One thread of a conversation, standing at the turn that is to be generated next."""

    conversation: Conversation
    key: bytes
    name: str
    sample: int
    turn: int
    mode: Mode
    """The template switches of all its turns."""
    history: list[Message] = field(default_factory=list)
    """Everything before this turn's own messages, answers included."""
    messages: list[Message] | None = None
    """What was rendered for this turn."""
    prompt_ids: Sequence[int] = field(default_factory=list)
    max_new_tokens: int = 0
    control_text: bool = False
    tokens: float | None = None
    """How long an answer of its is expected to be, where an earlier run tells."""
    earlier: Earlier | None = None
    """The turn before, until the prompt is made."""
    drifted: bool = False
    """Whether an earlier answer stands in the prompt with other ids than were generated."""
    before: list[int] = field(default_factory=list)
    """Output of an earlier capture that the answer is to be continued from."""
    before_logprobs: list[float] = field(default_factory=list)
    joints: list[int] = field(default_factory=list)
    statuses: bytes = b""
    """What the ledger holds of each turn."""
    steps: Steps | None = None
    """Where a thread of a conversation with tools stands; None without tools."""
    stretch: list[Message] | None = None
    """This turn's own messages, where they are not those that the input has for it."""
    tool_marks: list[str] = field(default_factory=list)
    answered: list[int] | None = None
    """The output that an earlier capture stored for this turn: the next one is to be asked."""
    counted: bool = False
    """Whether the next turn was counted already, though the input does not know it."""

    @property
    def goes_on(self) -> bool:
        """Whether a next turn is to be generated, as far as is known without the answer. It is
        there already where an earlier one was lost with its part."""
        known = self.turn + 1 < len(self.statuses)
        return self.is_open(self.turn + 1) and (known or self.steps is not None)

    @property
    def left(self) -> int:
        """How many turns of the input come after this one."""
        if self.steps is not None:
            return self.steps.left
        return self.conversation.n_turns - self.turn - 1

    def is_open(self, turn: int) -> bool:
        """Whether the ledger has no row of a turn."""
        return turn >= len(self.statuses) or self.statuses[turn] == OPEN

    @property
    def id(self) -> str:
        return f"{self.name}/{self.sample}/{self.turn}"

    @property
    def marks(self) -> list[str]:
        """Marks that come from the input."""
        marks = [*self.conversation.marks, *self.tool_marks]
        if self.control_text:
            marks.append("control_text")
        if self.drifted:
            marks.append("history_drift")
        return marks


def metadata_json(conversation: Conversation) -> str:
    """The input row's other columns as JSON."""
    if not conversation.metadata:
        return "{}"
    return orjson.dumps(conversation.metadata, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def tools_json(conversation: Conversation) -> str | None:
    """The definitions of the conversation's tools as JSON; None without tools."""
    use = conversation.tool_use
    return None if use is None or use.tools is None else orjson.dumps(use.tools).decode()


def trace_of(job: Job, **columns: Any) -> Trace:
    """A good row with what is known of its conversation."""
    return Trace(
        id=job.id,
        conversation_id=job.name,
        turn=job.turn,
        sample=job.sample,
        key=job.key.hex(),
        prompt_ids=as_row(job.prompt_ids),
        messages=None if job.messages is None else orjson.dumps(job.messages).decode(),
        tools=tools_json(job.conversation),
        template_kwargs=job.mode.text,
        metadata=metadata_json(job.conversation),
        source=job.conversation.source,
        **columns,
    )


def refused_row(job: Job, turn: int, reason: str, detail: str, **columns: Any) -> Rejected:
    """A refused row with what is known of its conversation."""
    conversation = job.conversation
    return Rejected(
        id=f"{job.name}/{job.sample}/{turn}",
        conversation_id=job.name,
        turn=turn,
        sample=job.sample,
        key=job.key.hex(),
        reason=reason,
        detail=detail,
        marks=job.marks,
        tools=tools_json(conversation),
        template_kwargs=job.mode.text,
        metadata=metadata_json(conversation),
        source=conversation.source,
        line=conversation.line,
        finished_at=time.time(),
        **columns,
    )
