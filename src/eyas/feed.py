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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from eyas.conversation import BadLine, Conversation, Message
from eyas.ids import Ids, as_list, as_row, first_bad, pack
from eyas.modes import Mode
from eyas.order import LongestFirst
from eyas.prompting import PROMPT_REASONS, Chat, Earlier, Prompt, Prompting, Refusal
from eyas.readers import Stretch
from eyas.store import CALLED, OPEN, REFUSED, TRACES, TRUNCATED, UNREADABLE, Ledger, Run
from eyas.store.redo import Partials
from eyas.tool_threads import TOOL_REASONS, After, Policy, after_answer, walk
from eyas.tools.steps import NO_CALL, Steps
from eyas.trace import Rejected, Trace

BATCH = 64
"""Conversations that are read, rendered and tokenized together."""

FEED_REASONS: dict[str, str] = {
    **PROMPT_REASONS,
    **TOOL_REASONS,
    "empty_prompt": "the template renders nothing: the prompt holds no ids",
    "prompt_id_outside_vocabulary": "a ready-made prompt id is outside the vocabulary",
    "prompt_too_long": "the prompt leaves no room for an answer in the context",
    "earlier_turn_truncated": "an earlier answer of the conversation was cut at its budget",
    "earlier_turn_rejected": "an earlier turn of the conversation was rejected",
}
"""Why a unit is rejected before anything is sent."""
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
        policy: Policy | None = None,
        on_tools: Callable[[], None] = lambda: None,
        order: LongestFirst | None = None,
    ) -> None:
        """Prepare a pass over the input.

        Args:
            stretches: what a reader yields.
            run: the run, to look up earlier answers of unfinished conversations.
            prompting: what makes prompts of messages and messages of answers.
            common: columns that all refused rows share (``sampling``).
            partials: cut answers of earlier captures, to be continued from their ids.
            policy: what becomes of calls without a recorded result.
            on_tools: called before the first conversation with tools is handed out.
            order: lets what was met wait, and gives the longest first; None for input order.
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
        self._policy = policy or Policy()
        self._on_tools: Callable[[], None] | None = on_tools
        self._order = order
        self.taken = 0
        """Conversations of the input that were met."""
        self._waiting: deque[Job] = deque()
        self._reading = threading.Lock()
        self.all_met = False
        """Whether the input was read to its end (or limit), so that all units are counted."""

    @property
    def ended(self) -> bool:
        """Whether everything was read and handed out."""
        return self.all_met and not self._waiting and not self._order

    def next_batch(self, room: int = BATCH) -> tuple[list[Job], list[Rejected]]:
        """The next jobs and refused rows; both may be empty before the input has ended.

        Args:
            room: how many jobs may be handed out before the whole input was read, where they
                are put in order.
        """
        with self._reading:
            refused = [] if self._waiting else self._meet_next()
            if self._order is None:
                waiting = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            else:
                waiting = self._order.sift(self._waiting, room=room, all_met=self.all_met)
                self._waiting.clear()
        self._recall([job for job in waiting if job.turn])
        jobs = [job for job in waiting if job.answered is not None]
        waiting = [job for job in waiting if job.answered is None]
        rendered = iter(self._prompting.prompts(
            self._chat(job) for job in waiting if job.conversation.prompt_ids is None
        ))  # fmt: skip
        for job in waiting:
            ready_made = job.conversation.prompt_ids
            fault = self._fit(job, next(rendered) if ready_made is None else Prompt(ready_made))
            if fault:
                refused += fault
                if self._order is not None:
                    self._order.begun(job)
            else:
                jobs.append(job)
        return jobs, refused

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
            answer = self._prompting.take_apart(job.prompt_ids, output_ids)
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
        refused = self._fit(job, self._prompting.prompt(self._chat(job)))
        return NextTurn([*passed, *refused], not refused)

    def after(self, job: Job, output_ids: Sequence[int]) -> After:
        """What an answer in a conversation with tools means for its thread."""
        use = job.conversation.tool_use
        assert job.steps is not None and use is not None
        prompt_ids, ids = as_list(job.prompt_ids), as_list(output_ids)
        answer = self._prompting.take_calls(prompt_ids, ids, use.tools)
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
            with self._reading:
                self.counts.input += 1
        job.counted = False

    def count_rest(self, *, seconds: float) -> bool:
        """Read on without preparing anything, only to count; False if time ran out."""
        deadline = time.monotonic() + seconds
        while not self.all_met:
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

    def refuse_later(self, job: Job, reason: str, detail: str = "") -> list[Rejected]:
        """Refused rows for the turns after a job's own."""
        said = f"{FEED_REASONS[reason]}: {job.id}" + (f": {detail}" if detail else "")
        return [
            self.refused_row(job, turn, reason, said)
            for turn in range(job.turn + 1, job.turn + 1 + job.left)
            if job.is_open(turn)
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
        self._count(met.count)
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
                    meet = self._meet_thread if item.tool_use is None else self._meet_tool_thread
                    rows += meet(job)
        return rows

    def _count(self, units: Sequence[int]) -> None:
        """Count units of the input: how many have each status."""
        self.counts.input += sum(units)
        self.counts.done += sum(units) - units[OPEN] - units[REFUSED]
        self.counts.truncated += units[TRUNCATED]
        self.counts.rejected += units[REFUSED]

    def _next_stretch(self) -> Stretch | None:
        """What is read next, up to the limit; None at the end."""
        left = None if self._limit is None else self._limit - self.taken
        stretch = None if left == 0 else next(self._stretches, None)
        if stretch is None:
            self.all_met = True
            return None
        stretch = stretch.up_to(left)
        self.taken += stretch.conversations
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

    def _meet_tool_thread(self, job: Job) -> list[Rejected]:
        """`_meet_thread` of a conversation with tools, which may have more units than turns."""
        if self._on_tools is not None:
            self._on_tools()
            self._on_tools = None
        recorded = len(job.statuses)
        if CALLED in job.statuses:
            job.statuses += self._ledger.more(job.key, job.sample, recorded)
        found = walk(job.conversation, job.statuses)
        more = found.statuses[recorded:]
        self._count([more.count(status) for status in range(UNREADABLE + 1)])
        job.steps, job.turn, job.statuses = (
            Steps(job.conversation),
            found.turn,
            bytes(found.statuses),
        )
        if found.blocked is not None:
            job.steps.next = found.next
            return self.refuse_later(job, found.blocked)
        if found.open:
            job.counted = found.extra
            self._waiting.append(job)
        return []

    def _recall(self, jobs: list[Job]) -> None:
        """Give unfinished conversations the answers that earlier captures stored."""
        wanted = {(job.key.hex(), job.sample, turn) for job in jobs for turn in range(job.turn)}
        if not wanted:
            return
        last = {(job.key.hex(), job.sample, job.turn - 1) for job in jobs}
        found: dict[tuple[str, int, int], Message] = {}
        records: dict[tuple[str, int, int], dict[str, Any]] = {}
        columns = ["key", "sample", "turn", "prompt_ids", "output_ids", "marks"]
        with_tools = {(job.key.hex(), job.sample) for job in jobs if job.steps is not None}
        if with_tools:
            columns.append("messages")
        for record in self._run.search(TRACES, "key", {key for key, _, _ in wanted}, columns):
            unit = (record["key"], record["sample"], record["turn"])
            if unit in wanted:
                if unit in last or unit[:2] in with_tools:
                    records[unit] = record
                if unit[:2] not in with_tools:
                    found[unit] = self._prompting.take_apart(
                        record["prompt_ids"], record["output_ids"]
                    )
        for job in jobs:
            thread = (job.key.hex(), job.sample)
            if job.steps is not None:
                at = max(turn for turn in range(job.turn) if (*thread, turn) in records)
                _resume(job, job.steps, records[*thread, at])
                continue
            for turn in range(job.turn):
                job.history += [*job.conversation.turns[turn], found[*thread, turn]]
            record = records[*thread, job.turn - 1]
            job.earlier = Earlier(record["prompt_ids"], record["output_ids"])
            job.drifted = "history_drift" in record["marks"]

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
            form = self._prompting.tool_form
            if form is not None and not form.shows_tools:
                job.tool_marks.append("tools_ignored")
        chat = Chat(job.messages, tools, job.mode, job.earlier)
        job.control_text = self._prompting.has_control_text(chat)
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
            return self.refuse(job, "empty_prompt", FEED_REASONS["empty_prompt"])
        packed = pack(ids)
        if packed is None or packed.max() >= self._vocab_size:
            at = first_bad(ids, self._vocab_size) or 0
            return self.refuse(
                job,
                "prompt_id_outside_vocabulary",
                f"prompt id {at} is {ids[at]!r}; the vocabulary ends at {self._vocab_size - 1}",
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


def _resume(job: Job, steps: Steps, record: dict[str, Any]) -> None:
    """Put a thread with tools back to its last stored answer, from where it is to go on."""
    job.turn = record["turn"]
    job.messages = orjson.loads(record["messages"])
    job.prompt_ids, job.answered = record["prompt_ids"], record["output_ids"]
    steps.replay([*(job.messages or ()), {"role": "assistant"}])
    job.drifted = "history_drift" in record["marks"]
    if "tool_result_nearest" in (record["marks"] or ()):
        job.tool_marks.append("tool_result_nearest")


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
