"""From the input to jobs that are ready to be sent.

Invariants: each unit of the input (or of the ledger's shard of it) is met once and is then
counted as done, rejected or handed out as a job; a thread that an earlier capture left is taken up
with the answers that it stored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from eyas.conversation import Conversation, Message
from eyas.jobs import Job
from eyas.order import LongestFirst
from eyas.prompting import Earlier
from eyas.readers import Stretch
from eyas.store import CALLED, OPEN, REFUSED, TRACES, TRUNCATED, UNREADABLE, Ledger, Run
from eyas.tool_threads import walk
from eyas.tools.steps import Steps
from eyas.trace import Rejected
from eyas.turns import Turns

BATCH = 64
"""Conversations that are read, rendered and tokenized together."""

_BLOCKED = {REFUSED: "earlier_turn_rejected", TRUNCATED: "earlier_turn_truncated"}
"""Why a turn cannot be asked, by the status of an earlier one."""


class Feed:
    """Reads the input once, in order, and hands out jobs and refused rows."""

    def __init__(
        self,
        stretches: Iterable[Stretch],
        *,
        run: Run,
        ledger: Ledger,
        turns: Turns,
        samples: int = 1,
        limit: int | None = None,
        on_tools: Callable[[], None] = lambda: None,
        order: LongestFirst | None = None,
    ) -> None:
        """Prepare a pass over the input.

        Args:
            stretches: what a reader yields.
            run: the run, to look up earlier answers of unfinished conversations.
            ledger: what is known of each unit.
            turns: what makes jobs ready.
            samples: threads of each conversation.
            limit: how many conversations of the input are taken; None for all.
            on_tools: called before the first conversation with tools is handed out.
            order: lets what was met wait, and gives the longest first; None for input order.
        """
        self.counts = turns.counts
        self._stretches = iter(stretches)
        self._run = run
        self._ledger = ledger
        self._turns = turns
        self._prompting = turns.prompting
        self._samples = samples
        self._limit = limit
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
        jobs, more = self._ready(waiting)
        return jobs, refused + more

    def shortest(self, count: int, tokens: float) -> tuple[list[Job], list[Rejected]]:
        """So many of the jobs that wait to be put in order, or all of at most so many tokens."""
        with self._reading:
            waiting = [] if self._order is None else self._order.shortest(count, tokens)
        return self._ready(waiting)

    def _ready(self, waiting: list[Job]) -> tuple[list[Job], list[Rejected]]:
        """Make the prompts of jobs that waited; gives those to send, and refused rows."""
        refused: list[Rejected] = []
        self._recall([job for job in waiting if job.turn])
        jobs = [job for job in waiting if job.answered is not None]
        waiting = [job for job in waiting if job.answered is None]
        for job, rows in zip(waiting, self._turns.prepare(waiting), strict=True):
            if not rows:
                jobs.append(job)
                continue
            refused += rows
            if self._order is not None:
                self._order.begun(job)
        return jobs, refused

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

    def _meet_next(self) -> list[Rejected]:
        """Read a stretch and find what is to be done of it: jobs go to those that wait."""
        stretch = self._next_stretch()
        if stretch is None:
            return []
        met = self._ledger.meet(stretch.keys, stretch.turns, self._samples)
        self.counts.add(met.count)
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
                rows.append(self._turns.refused_line(item, met.keys[at]))
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

    def _meet_thread(self, job: Job) -> list[Rejected]:
        """Let a thread wait if something is to be done, or refuse what cannot be."""
        first_open = job.statuses.find(OPEN)
        if first_open < 0:
            return []
        blocked = next((_BLOCKED[s] for s in job.statuses[:first_open] if s in _BLOCKED), None)
        if blocked is not None:
            job.turn = first_open - 1
            return self._turns.refuse_later(job, blocked)
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
        self.counts.add([more.count(status) for status in range(UNREADABLE + 1)])
        job.steps, job.turn, job.statuses = (
            Steps(job.conversation),
            found.turn,
            bytes(found.statuses),
        )
        if found.blocked is not None:
            job.steps.next = found.next
            return self._turns.refuse_later(job, found.blocked)
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


def _resume(job: Job, steps: Steps, record: dict[str, Any]) -> None:
    """Put a thread with tools back to its last stored answer, from where it is to go on."""
    job.turn = record["turn"]
    job.messages = orjson.loads(record["messages"])
    job.prompt_ids, job.answered = record["prompt_ids"], record["output_ids"]
    steps.replay([*(job.messages or ()), {"role": "assistant"}])
    job.drifted = "history_drift" in record["marks"]
    if "tool_result_nearest" in (record["marks"] or ()):
        job.tool_marks.append("tool_result_nearest")
