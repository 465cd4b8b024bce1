"""From the input to prompts that are ready to be sent.

Invariants: each unit of the input (or of the ledger's shard of it) is met once and is then
counted as done, rejected or handed out as a job; a job's `prompt_ids` are inside the vocabulary
and leave room in the context; a turn is rendered on the target's own earlier answers, whether
they were captured a moment or a run ago.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from eyas.conversation import BadLine, Conversation, Message
from eyas.ids import Ids, as_row, first_bad, pack
from eyas.modes import Mode
from eyas.prompting import PROMPT_REASONS, Chat, Prompting, Refusal
from eyas.readers import Stretch
from eyas.store import OPEN, REFUSED, TRACES, TRUNCATED, Ledger, Run
from eyas.store.redo import Partials
from eyas.trace import Rejected, Trace

BATCH = 64
"""Conversations that are read, rendered and tokenized together."""

FEED_REASONS: dict[str, str] = {
    **PROMPT_REASONS,
    "empty_prompt": "the template renders nothing: the prompt holds no ids",
    "prompt_id_outside_vocabulary": "a ready-made prompt id is outside the vocabulary",
    "prompt_too_long": "the prompt leaves no room for an answer in the context",
    "earlier_turn_truncated": "an earlier answer of the conversation was cut at its budget",
    "earlier_turn_rejected": "an earlier turn of the conversation was rejected",
}
"""Why a unit is rejected before anything is sent."""
_OPEN_TURN = bytes((OPEN,))
_BLOCKED = {REFUSED: "earlier_turn_rejected", TRUNCATED: "earlier_turn_truncated"}
"""Why a turn cannot be asked, by the status of an earlier one."""


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
    before: list[int] = field(default_factory=list)
    """Output of an earlier capture that the answer is to be continued from."""
    before_logprobs: list[float] = field(default_factory=list)
    joints: list[int] = field(default_factory=list)
    statuses: bytes = b""
    """What the ledger holds of each turn."""

    @property
    def goes_on(self) -> bool:
        """Whether a next turn is to be generated. It is there already where an earlier one was
        lost with its part."""
        return self.statuses[self.turn + 1 : self.turn + 2] == _OPEN_TURN

    @property
    def id(self) -> str:
        return f"{self.name}/{self.sample}/{self.turn}"

    @property
    def marks(self) -> list[str]:
        """Marks that come from the input."""
        marks = list(self.conversation.marks)
        if self.control_text:
            marks.append("control_text")
        return marks


@dataclass(slots=True)
class Counts:
    """Units of the input, as far as it was read; done and rejected ones of earlier captures."""

    input: int = 0
    done: int = 0
    rejected: int = 0
    truncated: int = 0


class Feed:
    """Reads the input once, in order, and hands out jobs and refused rows."""

    def __init__(
        self,
        stretches: Iterable[Stretch],
        *,
        run: Run,
        ledger: Ledger,
        prompting: Prompting,
        max_new_tokens: int,
        context_length: int | None,
        samples: int = 1,
        limit: int | None = None,
        common: dict[str, Any] | None = None,
        partials: Partials | None = None,
    ) -> None:
        """Prepare a pass over the input.

        Args:
            stretches: what a reader yields.
            run: the run, to look up earlier answers of unfinished conversations.
            prompting: what makes prompts of messages and messages of answers.
            common: columns that all refused rows share (``sampling``).
            partials: cut answers of earlier captures, to be continued from their ids.
        """
        self.counts = Counts()
        self._stretches = iter(stretches)
        self._run = run
        self._ledger = ledger
        self._prompting = prompting
        self._vocab_size = prompting.profile.vocab_size
        self._max_new_tokens = max_new_tokens
        self._context_length = context_length
        self._samples = samples
        self._limit = limit
        self._common = common or {}
        self._partials = partials
        self._taken = 0
        self._waiting: deque[Job] = deque()
        self._reading = threading.Lock()
        self._all_read = False

    @property
    def ended(self) -> bool:
        """Whether everything was read and handed out."""
        return self._all_read and not self._waiting

    def next_batch(self) -> tuple[list[Job], list[Rejected]]:
        """The next jobs and refused rows of the input; both may be empty before it has ended."""
        with self._reading:
            refused = [] if self._waiting else self._meet_next()
            waiting = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        self._recall([job for job in waiting if job.turn])
        rendered = iter(self._prompting.prompts(
            self._chat(job) for job in waiting if job.conversation.prompt_ids is None
        ))  # fmt: skip
        jobs = []
        for job in waiting:
            ready_made = job.conversation.prompt_ids
            fault = self._fit(job, next(rendered) if ready_made is None else ready_made)
            if fault:
                refused += fault
            else:
                jobs.append(job)
        return jobs, refused

    def next_turn(self, job: Job, output_ids: Sequence[int]) -> list[Rejected]:
        """Move a job on to its next turn, with the answer that it just got.

        Returns the refused rows if the next turn cannot be asked, else nothing.
        """
        answer = self._prompting.take_apart(job.prompt_ids, output_ids)
        job.history = [*(job.messages or ()), answer]
        job.turn += 1
        return self._fit(job, self._prompting.prompt(self._chat(job)))

    def count_rest(self, *, seconds: float) -> bool:
        """Read on without preparing anything, only to count; False if time ran out."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            with self._reading:
                self._waiting.clear()
                self._meet_next()
            if time.monotonic() > deadline:
                return False
        return True

    def refuse(
        self, job: Job, reason: str, detail: str, *, later: str = "earlier_turn_rejected"
    ) -> list[Rejected]:
        """The refused row of a job, and those of the turns that would have followed."""
        row = self.refused_row(job, job.turn, reason, detail)
        row.messages = None if job.messages is None else orjson.dumps(job.messages).decode()
        row.prompt_ids = as_row(job.prompt_ids) if job.prompt_ids else None
        return [row, *self.refuse_later(job, later)]

    def refuse_later(self, job: Job, reason: str) -> list[Rejected]:
        """Refused rows for the turns after a job's own."""
        detail = f"{FEED_REASONS[reason]}: {job.id}"
        return [
            self.refused_row(job, turn, reason, detail)
            for turn in range(job.turn + 1, job.conversation.n_turns)
            if job.statuses[turn] == OPEN
        ]

    def refused_row(self, job: Job, turn: int, reason: str, detail: str) -> Rejected:
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
            **self._common,
        )

    def _meet_next(self) -> list[Rejected]:
        """Read a stretch and find what is to be done of it: jobs go to those that wait."""
        stretch = self._next_stretch()
        if stretch is None:
            return []
        met = self._ledger.meet(stretch.keys, stretch.turns, self._samples)
        _, good, cut, refused = met.count
        self.counts.input += sum(met.count)
        self.counts.done += good + cut
        self.counts.truncated += cut
        self.counts.rejected += refused
        if not met.to_name:
            return []
        items = stretch.items()
        rows: list[Rejected] = []
        named: list[tuple[int, Conversation]] = []
        for at in met.to_name:
            item = items[at]
            if isinstance(item, Conversation):
                named.append((at, item))
            elif met.ours[at]:
                rows.append(self._refused_line(item, met.keys[at]))
        names = self._ledger.name([(item.given_id, met.keys[at]) for at, item in named])
        for (at, item), name in zip(named, names, strict=True):
            if met.ours[at]:
                for sample in range(self._samples):
                    mode = self._prompting.modes.of(met.keys[at], sample)
                    job = Job(item, met.keys[at], name, sample, 0, mode)
                    begin = met.bounds[at] + sample * item.n_turns
                    job.statuses = met.statuses[begin : begin + item.n_turns]
                    rows += self._meet_thread(job)
        return rows

    def _next_stretch(self) -> Stretch | None:
        """What is read next, up to the limit; None at the end."""
        left = None if self._limit is None else self._limit - self._taken
        stretch = None if left == 0 else next(self._stretches, None)
        if stretch is None:
            self._all_read = True
            return None
        stretch = stretch.up_to(left)
        self._taken += stretch.conversations
        return stretch

    def _refused_line(self, line: BadLine, key: bytes) -> Rejected:
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
            template_kwargs=self._prompting.modes.of(key, 0).text,
            finished_at=time.time(),
            **self._common,
        )

    def _meet_thread(self, job: Job) -> list[Rejected]:
        """Let a thread wait if something is to be done, or refuse what cannot be."""
        first_open = job.statuses.find(OPEN)
        if first_open < 0:
            return []
        blocked = next((_BLOCKED[s] for s in job.statuses[:first_open] if s in _BLOCKED), None)
        if blocked is not None:
            job.turn = first_open - 1
            return self.refuse_later(job, blocked)
        job.turn = first_open
        self._waiting.append(job)
        return []

    def _recall(self, jobs: list[Job]) -> None:
        """Give unfinished conversations the answers that earlier captures stored."""
        wanted = {(job.key.hex(), job.sample, turn) for job in jobs for turn in range(job.turn)}
        if not wanted:
            return
        found: dict[tuple[str, int, int], Message] = {}
        columns = ["key", "sample", "turn", "prompt_ids", "output_ids"]
        for record in self._run.search(TRACES, "key", {key for key, _, _ in wanted}, columns):
            unit = (record["key"], record["sample"], record["turn"])
            if unit in wanted:
                found[unit] = self._prompting.take_apart(record["prompt_ids"], record["output_ids"])
        for job in jobs:
            for turn in range(job.turn):
                answer = found[job.key.hex(), job.sample, turn]
                job.history += [*job.conversation.turns[turn], answer]

    def _chat(self, job: Job) -> Chat:
        """What a job's prompt is made of."""
        stretch = job.conversation.turns[job.turn]
        job.messages = [*job.history, *stretch]
        job.prompt_ids = []
        use = job.conversation.tool_use
        chat = Chat(job.messages, None if use is None else use.tools, job.mode)
        job.control_text = self._prompting.has_control_text(chat)
        return chat

    def _fit(self, job: Job, prompt: Sequence[int] | Refusal) -> list[Rejected]:
        """Give a job its prompt ids and token budget.

        Returns its refused rows where there is no prompt, where ids must not be sent, or where
        they leave no room.
        """
        if isinstance(prompt, Refusal):
            return self.refuse(job, prompt.reason, prompt.detail)
        if not prompt:
            return self.refuse(job, "empty_prompt", FEED_REASONS["empty_prompt"])
        packed = pack(prompt)
        if packed is None or packed.max() >= self._vocab_size:
            at = first_bad(prompt, self._vocab_size) or 0
            return self.refuse(
                job,
                "prompt_id_outside_vocabulary",
                f"prompt id {at} is {prompt[at]!r}; the vocabulary ends at {self._vocab_size - 1}",
            )
        job.prompt_ids = Ids(packed)
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
