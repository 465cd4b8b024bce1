"""One turn: asked for, in several pieces where it is continued, judged, and made a row.

Invariants: a continued answer goes on from its exact ids, and where a request began is recorded
(``joints``); every piece passes the checks of its own request, and the whole the marks; what is
refused keeps all ids that came.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from eyas.checks import Checker, Verdict
from eyas.conversation import seed_for
from eyas.engines import Generation, Request
from eyas.engines.pool import Pool
from eyas.errors import RowFailed
from eyas.ids import as_list, as_row, pack
from eyas.jobs import Job, trace_of
from eyas.session import Session
from eyas.tool_threads import After
from eyas.trace import Rejected, Trace
from eyas.turns import Turns


@dataclass(slots=True)
class Answered:
    """What became of one turn."""

    trace: Trace | None = None
    refused: list[Rejected] = field(default_factory=list)
    complete: bool = False
    """The model ended the turn itself."""
    generation: Generation | None = None
    """The whole answer, its pieces joined."""
    after: After | None = None
    """What the answer means for a conversation with tools."""

    @property
    def goes_on(self) -> bool:
        """Whether the conversation may have a next turn."""
        return self.complete and (self.after is None or self.after.ended is None)


class Answering:
    """Asks for turns and makes rows of the answers."""

    def __init__(self, session: Session, pool: Pool, turns: Turns, common: dict[str, Any]) -> None:
        config, target = session.config, session.target
        self._config = config
        self._pool = pool
        self._turns = turns
        self._common = common
        self._context = target.context_length
        # Penalties would begin anew at each joint.
        self._continues = not target.sampling.penalised
        self._checker = Checker(
            target.tokenizer,
            target.profile,
            keep_missing_closer=config.on_missing_closer == "keep",
            want_logprobs=config.logprobs,
        )
        self._refused_marks = frozenset(config.reject) | (
            {"truncated"} if config.on_length == "reject" else set()
        )

    async def answer(self, job: Job, near: str | None) -> Answered:
        """Generate, check and continue one turn.

        Raises:
            CaptureStopped: nothing can be captured now.
        """
        config = self._config
        so_far, logprobs = self._begun(job)
        joints = [*job.joints, len(so_far)] if so_far else []
        budget = job.max_new_tokens
        group = job.key if config.n > 1 and job.turn == 0 else None  # samples of one prompt
        while True:
            request = Request(
                prompt_ids=[*job.prompt_ids, *so_far] if so_far else job.prompt_ids,
                max_new_tokens=budget - len(so_far),
                seed=seed_for(config.seed + len(joints), job.key, job.sample, job.turn),
                logprobs=config.logprobs,
                packed=True,
            )
            try:
                generation = await self._pool.generate(
                    request, near=near, group=group, tokens=job.tokens
                )
            except RowFailed as failed:
                return self._failed(job, request, failed)
            near = generation.server
            verdict = self._checker.judge(
                job.prompt_ids, generation, request.max_new_tokens, so_far
            )
            if so_far:
                generation.output_ids = [*so_far, *generation.output_ids]
                whole = generation.logprobs is not None and len(logprobs) == len(so_far)
                # Those of one piece alone would not be those of the row.
                generation.logprobs = [*logprobs, *(generation.logprobs or ())] if whole else None
            if verdict.refusal is None and not verdict.complete:
                more = self._greater_budget(job, budget)
                if more > budget:
                    budget = more
                    so_far, logprobs = as_list(generation.output_ids), generation.logprobs or []
                    joints = [*joints, len(so_far)]
                    continue
            after = None
            if verdict.complete and job.steps is not None:
                ids = generation.output_ids
                after = await asyncio.to_thread(self._turns.after, job, ids)
            return self._row(job, request, budget, generation, verdict, joints, after)

    def _begun(self, job: Job) -> tuple[list[int], list[float]]:
        """The output of an earlier capture that is to be continued, as far as it may be."""
        if not job.before or not self._continues or len(job.before) >= job.max_new_tokens:
            return [], []
        return list(job.before), list(job.before_logprobs)

    def _greater_budget(self, job: Job, budget: int) -> int:
        """The budget up to which a cut answer is continued; the same where it is not."""
        greater = self._config.continue_to if self._config.on_length == "continue" else None
        if greater is None:
            return budget
        if self._context is not None:
            greater = min(greater, self._context - len(job.prompt_ids))
        return greater

    def _row(
        self,
        job: Job,
        request: Request,
        budget: int,
        generation: Generation,
        verdict: Verdict,
        joints: list[int],
        after: After | None,
    ) -> Answered:
        marks = [*job.marks, *verdict.marks, *(after.marks if after is not None else ())]
        if verdict.refusal is None and not self._refused_marks.isdisjoint(marks):
            verdict.refusal = next(mark for mark in marks if mark in self._refused_marks)
            asked = "--on-length reject" if verdict.refusal == "truncated" else "--reject"
            verdict.detail = f"{asked}: the row is marked {verdict.refusal}"
        if verdict.refusal is not None:
            rows = self._turns.refuse(job, verdict.refusal, verdict.detail)
            row, ids = rows[0], generation.output_ids
            if pack(ids) is not None:
                row.output_ids = as_list(ids)
            else:  # what no int32 can hold is kept as text
                row.text = orjson.dumps(as_list(ids)).decode()
            row.finish_reason = generation.finish_reason
            row.marks = marks
            row.seed, row.max_new_tokens = request.seed, budget
            row.server, row.weight_version = generation.server, generation.weight_version
            return Answered(refused=rows, generation=generation)
        trace = trace_of(
            job,
            output_ids=as_row(generation.output_ids),
            finish_reason=generation.finish_reason,
            stop_id=verdict.stop_id,
            reasoning_start=verdict.reasoning_start,
            reasoning_end=verdict.reasoning_end,
            marks=marks,
            seed=request.seed,
            max_new_tokens=budget,
            joints=joints,
            logprobs=generation.logprobs,
            server=generation.server,
            weight_version=generation.weight_version,
            finished_at=time.time(),
            **self._common,
        )
        later: list[Rejected] = []
        if not verdict.complete:
            later = self._turns.refuse_later(job, "earlier_turn_truncated")
        elif after is not None and after.ended is not None:
            later = self._turns.refuse_later(job, *after.ended)
        return Answered(trace, later, verdict.complete, generation, after=after)

    def _failed(self, job: Job, request: Request, failed: RowFailed) -> Answered:
        rows = self._turns.refuse(job, failed.reason, str(failed))
        rows[0].tries, rows[0].text = failed.tries, failed.seen or None
        rows[0].seed, rows[0].max_new_tokens = request.seed, request.max_new_tokens
        rows[0].server = failed.server
        return Answered(refused=rows)
