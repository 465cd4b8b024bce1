"""From one turn of a thread to the next: its messages, its prompt, its budget, or why it has none.

Invariants: a turn is rendered on the target's own earlier answers; a job's `prompt_ids` are inside
the vocabulary and leave room in the context; a turn that cannot be asked is a refused row with its
reason, and so is each that would have followed it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from eyas.conversation import BadLine, Message
from eyas.ids import as_list, as_row, bad_prompt_id, pack
from eyas.jobs import Job, refused_row
from eyas.prompting import PROMPT_REASONS, Chat, Earlier, Prompt, Prompting, Refusal
from eyas.store import OPEN, REFUSED, TRUNCATED
from eyas.store.redo import Partials
from eyas.tool_threads import TOOL_REASONS, After, Policy, after_answer
from eyas.tools.steps import NO_CALL, Steps
from eyas.trace import Rejected

TURN_REASONS: dict[str, str] = {
    **PROMPT_REASONS,
    **TOOL_REASONS,
    "empty_prompt": "the template renders nothing: the prompt holds no ids",
    "prompt_id_outside_vocabulary": "a ready-made prompt id is outside the vocabulary",
    "prompt_too_long": "the prompt leaves no room for an answer in the context",
    "earlier_turn_truncated": "an earlier answer of the conversation was cut at its budget",
    "earlier_turn_rejected": "an earlier turn of the conversation was rejected",
}
"""Why a unit is rejected before anything is sent."""


class NextTurn(NamedTuple):
    """What came of moving a job on."""

    refused: list[Rejected]
    asked: bool
    """Whether the job stands at a turn that can be asked."""


@dataclass(slots=True)
class Counts:
    """Units of the input, as far as it was read; done and rejected ones of earlier captures."""

    input: int = 0
    done: int = 0
    rejected: int = 0
    truncated: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, units: Sequence[int]) -> None:
        """Count units: how many have each status."""
        with self._lock:
            self.input += sum(units)
            self.done += sum(units) - units[OPEN] - units[REFUSED]
            self.truncated += units[TRUNCATED]
            self.rejected += units[REFUSED]

    def add_open(self) -> None:
        """Count a unit that the input did not know and that begins now."""
        with self._lock:
            self.input += 1


class Turns:
    """Makes jobs ready to be sent, and moves them on with the answers that they got."""

    def __init__(
        self,
        prompting: Prompting,
        *,
        max_new_tokens: int,
        context_length: int | None,
        common: dict[str, Any] | None = None,
        partials: Partials | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Prepare for the threads of one run.

        Args:
            prompting: what makes prompts of messages and messages of answers.
            max_new_tokens: the budget of one answer; less where the context leaves less.
            common: columns that all refused rows share (``sampling``).
            partials: cut answers of earlier captures, to be continued from their ids.
            policy: what becomes of calls without a recorded result.
        """
        self.counts = Counts()
        self.prompting = prompting
        self._max_new_tokens = max_new_tokens
        self._context_length = context_length
        self._common = common or {}
        self._partials = partials
        self._policy = policy or Policy()

    def prepare(self, jobs: Sequence[Job]) -> list[list[Rejected]]:
        """Make the prompts of jobs, together.

        Returns each job's refused rows, which are none where it can be sent.
        """
        rendered = iter(self.prompting.prompts(
            self._chat(job) for job in jobs if job.conversation.prompt_ids is None
        ))  # fmt: skip
        refused = []
        for job in jobs:
            ready_made = job.conversation.prompt_ids
            prompt = next(rendered) if ready_made is None else Prompt(ready_made)
            refused.append(self._fit(job, prompt))
        return refused

    def next_turn(
        self,
        job: Job,
        output_ids: Sequence[int],
        after: After | None = None,
        produced: Sequence[str] = (),
    ) -> NextTurn:
        """Move a job on to its next turn, with the answer that it just got.

        In a conversation with tools `after` is what `after` gave for the answer, and `produced`
        are the results of its calls that were not recorded.
        """
        passed: list[Rejected] = []
        if job.steps is None or after is None:
            answer = self.prompting.take_apart(job.prompt_ids, output_ids)
            job.turn += 1
        else:
            answer = after.answer.message
            if after.ended is not None:
                return NextTurn(self.refuse_later(job, *after.ended), False)
            passed, job.stretch = self._step(job, job.steps, after, produced)
            if job.stretch is None:
                return NextTurn(passed, False)
        job.history = [*(job.messages or ()), answer]
        job.earlier = Earlier(job.prompt_ids, output_ids)
        refused = self._fit(job, self.prompting.prompt(self._chat(job)))
        return NextTurn([*passed, *refused], not refused)

    def after(self, job: Job, output_ids: Sequence[int]) -> After:
        """What an answer in a conversation with tools means for its thread."""
        use = job.conversation.tool_use
        assert job.steps is not None and use is not None
        prompt_ids, ids = as_list(job.prompt_ids), as_list(output_ids)
        answer = self.prompting.take_calls(prompt_ids, ids, use.tools)
        return after_answer(answer, job.steps, self._policy)

    def no_result(self, job: Job, detail: str) -> list[Rejected]:
        """The refused rows of a thread whose calls got no result."""
        assert job.steps is not None
        self._begin_turn(job, job.steps)
        job.steps.answered((), ())
        job.turn += 1
        row = self.refused_row(job, job.turn, "tool_failed", detail)
        return [row, *self.refuse_later(job, "earlier_turn_rejected")]

    def _step(
        self, job: Job, steps: Steps, after: After, produced: Sequence[str]
    ) -> tuple[list[Rejected], list[Message] | None]:
        """Take a thread's next step: refused rows of turns that are passed over, and the messages
        of the next one (None where there is none)."""
        if after.found is None:
            turns = range(job.turn + 1, job.turn + 1 + steps.passed_over())
            job.turn += len(turns)
            detail = f"{TOOL_REASONS[NO_CALL]}: {job.id}"
            passed = [
                self.refused_row(job, turn, NO_CALL, detail) for turn in turns if job.is_open(turn)
            ]
            stretch = steps.spoken()
            job.turn += stretch is not None
            return passed, stretch
        more = iter(produced)
        results = [next(more) if result is None else result for result in after.found.results]
        if after.found.guessed and "tool_result_nearest" not in job.tool_marks:
            job.tool_marks.append("tool_result_nearest")
        self._begin_turn(job, steps)
        job.turn += 1
        return [], steps.answered(after.answer.calls, results)

    def _begin_turn(self, job: Job, steps: Steps) -> None:
        """Count a turn that answers calls, if the input does not know it."""
        if not steps.recorded_results and not job.counted:
            self.counts.add_open()
        job.counted = False

    def refuse(
        self, job: Job, reason: str, detail: str, *, later: str = "earlier_turn_rejected"
    ) -> list[Rejected]:
        """The refused row of a job, and those of the turns that would have followed."""
        row = self.refused_row(job, job.turn, reason, detail)
        row.messages = None if job.messages is None else orjson.dumps(job.messages).decode()
        row.prompt_ids = as_row(job.prompt_ids) if job.prompt_ids else None
        return [row, *self.refuse_later(job, later)]

    def refuse_later(self, job: Job, reason: str, detail: str = "") -> list[Rejected]:
        """Refused rows for the turns after a job's own."""
        said = f"{TURN_REASONS[reason]}: {job.id}" + (f": {detail}" if detail else "")
        return [
            self.refused_row(job, turn, reason, said)
            for turn in range(job.turn + 1, job.turn + 1 + job.left)
            if job.is_open(turn)
        ]

    def refused_row(self, job: Job, turn: int, reason: str, detail: str) -> Rejected:
        """A refused row with what is known of its conversation."""
        return refused_row(job, turn, reason, detail, **self._common)

    def refused_line(self, line: BadLine, key: bytes) -> Rejected:
        """The refused row of an input line that cannot be used."""
        name = f"line-{key.hex()[:16]}"
        return Rejected(
            id=f"{name}/0/0",
            conversation_id=name,
            turn=0,
            sample=0,
            key=key.hex(),
            reason=line.reason,
            detail=line.detail,
            source=line.source,
            line=line.line,
            text=line.text,
            template_kwargs=self.prompting.modes.of(key, 0).text,
            finished_at=time.time(),
            **self._common,
        )

    def _chat(self, job: Job) -> Chat:
        """What a job's prompt is made of."""
        stretch = job.stretch
        if stretch is None:
            stretch = job.conversation.turns[job.turn]
        job.messages = [*job.history, *stretch]
        job.prompt_ids = []
        use = job.conversation.tool_use
        tools = None if use is None else use.tools
        if tools is not None and "tools_ignored" not in job.tool_marks:
            form = self.prompting.tool_form
            if form is not None and not form.shows_tools:
                job.tool_marks.append("tools_ignored")
        chat = Chat(job.messages, tools, job.mode, job.earlier)
        job.control_text = self.prompting.has_control_text(chat)
        return chat

    def _fit(self, job: Job, prompt: Prompt | Refusal) -> list[Rejected]:
        """Give a job its prompt ids and token budget.

        Returns its refused rows where there is no prompt, where ids must not be sent, or where
        they leave no room.
        """
        job.earlier = None
        if isinstance(prompt, Refusal):
            return self.refuse(job, prompt.reason, prompt.detail)
        job.drifted = job.drifted or prompt.drifted
        ids = prompt.ids
        if not ids:
            return self.refuse(job, "empty_prompt", TURN_REASONS["empty_prompt"])
        size = self.prompting.profile.vocab_size
        given = pack(ids) or ids
        at = bad_prompt_id(given, size)
        if at is not None:
            return self.refuse(
                job,
                "prompt_id_outside_vocabulary",
                f"prompt id {at} is {ids[at]!r}; the vocabulary ends at {size - 1}",
            )
        job.prompt_ids = given
        budget = self._max_new_tokens
        if self._context_length is not None:
            budget = min(budget, self._context_length - len(job.prompt_ids))
        if budget < 1:
            return self.refuse(
                job,
                "prompt_too_long",
                f"{len(job.prompt_ids)} prompt ids fill the context of {self._context_length}",
            )
        job.max_new_tokens = budget
        self._begin_from_partial(job)
        return []

    def _begin_from_partial(self, job: Job) -> None:
        """If an earlier capture has a part of this very prompt's answer, go on from its ids."""
        job.before, job.before_logprobs, job.joints = [], [], []
        if not self._partials:
            return
        row = self._partials.get((job.key.hex(), job.sample, job.turn))
        if row is not None and row["prompt_ids"] == job.prompt_ids:
            job.before = row["output_ids"]
            job.before_logprobs = row["logprobs"] or []
            job.joints = row["joints"] or []
