"""Where a thread of a conversation with tools stands: which recorded turn comes next, and why.

Invariants: each recorded turn is begun once, in order, or passed over with a reason; the steps of
a thread follow from the messages that it consists of, so that a thread that is taken up again
stands where it stood.

The target need not call what the recording called. Where it answers without a call, recorded
turns that only bring results are passed over. Where it calls and the recording goes on without
results, its call is answered in a turn of its own, between two recorded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eyas.conversation import Conversation, Message
from eyas.tools.calls import result_message
from eyas.tools.results import Results

MISSING, UNREAD, NO_CALL = "tool_result_missing", "tool_call_unread", "no_tool_call"
"""Why recorded turns of a conversation with tools are not reached or passed over."""


class Found(NamedTuple):
    """What there is for the calls of an answer."""

    results: list[str | None]
    """Each call's result, None where there is none yet."""
    guessed: bool = False
    """Whether one of them was recorded for other arguments."""


@dataclass(slots=True)
class Steps:
    """The steps of one thread."""

    conversation: Conversation
    next: int = 1
    """The recorded turn that was not yet begun or passed over, counted from 0."""
    rounds: int = 0
    """Answers in a row whose calls were answered, since a message that is no tool's."""
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        use = self.conversation.tool_use
        assert use is not None
        self.results = Results(use)

    @property
    def left(self) -> int:
        """How many recorded turns were not yet begun or passed over."""
        return len(self.conversation.turns) - self.next

    @property
    def recorded_results(self) -> bool:
        """Whether the next recorded turn begins with results of tools."""
        use = self.conversation.tool_use
        return use is not None and self.next in use.results and self.left > 0

    def find(self, calls: Sequence[Message], *, nearest: bool) -> Found:
        """Recorded results of an answer's calls, in their order."""
        found = [self.results.take(call, self.next) for call in calls]
        guessed = False
        if nearest:
            for at, call in enumerate(calls):
                if found[at] is None:
                    found[at] = self.results.nearest(call, self.next)
                    guessed = guessed or found[at] is not None
        return Found(found, guessed)

    def answered(self, calls: Sequence[Message], results: Sequence[str]) -> list[Message]:
        """Go on with the calls' results; returns the messages of the next turn."""
        messages = [
            result_message(call, result) for call, result in zip(calls, results, strict=True)
        ]
        self.rounds += 1
        if self.recorded_results:
            more = self.conversation.turns[self.next]
            self.next += 1
            if more:
                self.rounds = 0
            messages += more
        return messages

    def passed_over(self) -> int:
        """Pass over recorded turns that only bring results; returns how many."""
        before = self.next
        while self.recorded_results and not self.conversation.turns[self.next]:
            self.next += 1
        return self.next - before

    def spoken(self) -> list[Message] | None:
        """Go on after an answer without calls; the next turn's messages, None at the end."""
        if not self.left:
            return None
        messages = self.conversation.turns[self.next]
        self.next += 1
        self.rounds = 0
        return messages

    def replay(self, messages: Sequence[Message]) -> None:
        """Take the steps of a thread that consists of these messages, its last answer left out."""
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at + 1 == len(messages):
                continue
            calls = message.get("tool_calls")
            if calls:
                self.find(calls, nearest=False)
                self.answered(calls, [""] * len(calls))
            else:
                self.passed_over()
                self.spoken()
