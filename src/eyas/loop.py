"""The loop: conversations in, traces out.

Invariants: a row is put into the run only after every check; at the end, and at every end,
``input == done + rejected + pending``; rendering, tokenizing and writing happen on threads of
their own, never between two requests.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import orjson

from eyas.account import Account
from eyas.answering import Answering
from eyas.config import CaptureConfig
from eyas.engines.pool import Pool
from eyas.engines.server import Server
from eyas.errors import EXIT_INTERRUPTED, EyasError
from eyas.feed import BATCH, Feed
from eyas.findings import Finding
from eyas.fleet import Fleet
from eyas.jobs import Job
from eyas.process import signals, tuned
from eyas.progress import Progress, Summary
from eyas.session import Session, open_session
from eyas.store.redo import Redo
from eyas.tool_threads import After, Policy
from eyas.tools.results import request_for
from eyas.tools.sources import NEAREST, NoResult
from eyas.trace import Rejected
from eyas.turns import Turns

_COUNT_REST_S = 10.0
_OCCUPY_S = 0.1
"""How often it is looked whether slow servers have places free."""
_QUEUED, _QUEUED_IN_ORDER = 1024, 256
"""Jobs that are rendered and wait to be sent; few where the shortest of the rest may be wanted."""
_BACKLOG = 512
"""Rows that may wait for the disk before workers wait too."""


def capture(
    config: CaptureConfig,
    *,
    archive: bool = False,
    probe: bool = True,
    redo: Redo | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    on_start: Callable[[Session], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Summary:
    """Capture the target's answers to a set of prompts into a run.

    Args:
        config: what to do; see `CaptureConfig`.
        archive: put the rows of another configuration in the run directory aside.
        probe: ask the server the probe's questions first, and end if a capture would be wrong.
        redo: rows of the run that are to be done again.
        on_finding: takes each of the probe's findings as it is made.
        on_start: called once when the server and the run are known.
        on_progress: called about twice a second.
        say: takes single lines for the user.

    Raises:
        EyasError: if the capture cannot begin. Once it has begun it always ends with a
            Summary, which names what stopped it.
    """
    loop_factory = None
    try:
        import uvloop
    except ImportError:  # Windows, or not installed
        pass
    else:
        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner, tuned():
        opening = partial(
            open_session,
            config,
            archive=archive,
            probe=probe,
            redo=redo,
            say=_harmless(say),
            on_finding=on_finding,
        )
        return runner.run(_capture(opening, on_start, on_progress, _harmless(say)))


def _harmless(say: Callable[[str], None] | None) -> Callable[[str], None]:
    """What shows a line must not end a capture, whatever it raises."""

    def harmless(line: str) -> None:
        if say is not None:
            with suppress(Exception):
                say(line)

    return harmless


async def _capture(
    opening: Callable[[], Awaitable[Session]],
    on_start: Callable[[Session], None] | None,
    on_progress: Callable[[Progress], None] | None,
    say: Callable[[str], None],
) -> Summary:
    session = await opening()
    gc.freeze()  # the tokenizer and what it imported
    try:
        if on_start is not None:
            on_start(session)
        return await _Loop(session, on_progress, say).run()
    finally:
        await session.close()


class _Loop:
    """One pass over the input."""

    def __init__(
        self,
        session: Session,
        on_progress: Callable[[Progress], None] | None,
        say: Callable[[str], None],
    ) -> None:
        config = session.config
        self._session = session
        self._config = config
        self._writer = session.writer
        self._on_progress = on_progress
        self._say = say
        common = {"sampling": orjson.dumps(session.target.sampling.as_dict()).decode()}
        self._turns = Turns(
            session.prompting,
            max_new_tokens=config.max_new_tokens,
            context_length=session.target.context_length,
            common=common,
            partials=session.partials,
            policy=Policy(
                nearest=config.tool_results == NEAREST,
                produces=session.tool_source is not None,
                rounds=config.tool_rounds,
            ),
        )
        self._feed = Feed(
            session.reader.stretches(),
            run=session.run,
            ledger=session.ledger,
            turns=self._turns,
            samples=config.n,
            limit=config.limit,
            on_tools=session.learn_tools,
            order=session.order,
        )
        self._account = Account(session, self._feed, say)
        self._pool = Pool(
            [Server(session.target.engine, session.target.info, slots=config.concurrency)],
            tries=config.tries,
            give_up_after_s=config.give_up_after,
            say=self._account.note,
            on_weights=session.learn_weights,
            on_places=self._employ,
            left=lambda mean: self._account.left(mean, self._pool.in_flight),
        )
        self._answering = Answering(session, self._pool, self._turns, common)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="eyas-feed")
        self._fleet = Fleet(self._pool, session.target, slots=config.concurrency, say=say)
        self._queue: asyncio.Queue[Job | None] = asyncio.Queue(
            _QUEUED if session.order is None else _QUEUED_IN_ORDER
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._interrupted = False
        self._stopped: str | None = None
        self._workers = 0

    async def run(self) -> Summary:
        loop = asyncio.get_running_loop()
        self._writer.on_error = partial(loop.call_soon_threadsafe, self._writer_failed)
        self._start(self._fill)
        self._start(self._occupy)
        self._employ()
        around = [asyncio.create_task(self._tick()), asyncio.create_task(self._fleet.tend())]
        try:
            with signals(loop, interrupt=self._interrupt, hang_up=self._hang_up):
                while not all(task.done() for task in self._tasks):
                    await asyncio.wait(self._tasks)
                for task in self._tasks:
                    error = None if task.cancelled() else task.exception()
                    if isinstance(error, EyasError):
                        self._stopped = self._stopped or str(error)
                    elif error is not None:
                        raise error
                for task in around:
                    task.cancel()
                self._account.look_at(self._pool)
                await self._pool.close()
                return await self._finish(loop)
        finally:
            for task in around:
                task.cancel()
            await self._pool.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _finish(self, loop: asyncio.AbstractEventLoop) -> Summary:
        """Make everything durable, count what is left, and save the counts."""
        error = await loop.run_in_executor(None, self._session.close_writer)
        if error is not None:
            self._stopped = str(error)
        known = self._feed.all_met
        if not known and "-" not in self._config.prompts:
            known = await loop.run_in_executor(
                self._threads, lambda: self._feed.count_rest(seconds=_COUNT_REST_S)
            )
        summary = self._account.summary(
            input_known=known, interrupted=self._interrupted, stopped=self._stopped
        )
        self._session.save_counts(summary.shapes, {
            name: getattr(summary, name)
            for name in ("input", "done", "rejected", "pending", "extra", "truncated")
        })  # fmt: skip
        if known and not summary.pending and not summary.stopped:
            self._session.end_of_partials()
        self._report_progress()
        return summary

    # -- tasks -------------------------------------------------------------------------------

    def _employ(self) -> None:
        """As many workers as there are places at the servers."""
        wanted = min(self._pool.capacity, self._session.most_requests)
        for _ in range(wanted - self._workers):
            self._start(self._work)
        self._workers = max(self._workers, wanted)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._all_or_none(work)))

    async def _all_or_none(self, work: Callable[[], Awaitable[None]]) -> None:
        """What one task cannot go on from ends the others."""
        try:
            await work()
        except Exception:
            self._cancel()
            raise

    async def _fill(self) -> None:
        """Keep the queue filled; reading, rendering and tokenizing happen on a thread."""
        loop = asyncio.get_running_loop()
        while not self._feed.ended:
            room = self._queue.maxsize - self._queue.qsize()
            jobs, refused = await loop.run_in_executor(self._threads, self._feed.next_batch, room)
            self._account.tell_order()
            self._refuse(refused)
            for job in jobs:
                await self._queue.put(job)
        await self._queue.put(None)

    async def _occupy(self) -> None:
        """Where the longest go first: give short ones to servers that are too slow for those."""
        order, loop = self._session.order, asyncio.get_running_loop()
        while order is not None and order.lengths is not None and not self._feed.ended:
            places, tokens = self._pool.spare
            if places:
                jobs, refused = await loop.run_in_executor(
                    self._threads, self._feed.shortest, min(places, BATCH), tokens
                )
                self._refuse(refused)
                for job in jobs:
                    self._start(partial(self._thread, job))
            await asyncio.sleep(_OCCUPY_S)

    async def _work(self) -> None:
        """Take jobs, one request at a time, until there are none."""
        while (job := await self._queue.get()) is not None:
            await self._thread(job)
        self._queue.put_nowait(None)  # for the next worker
        self._account.all_begun(self._pool)

    async def _thread(self, job: Job) -> None:
        """Ask the turns of a job, one after the other."""
        near: str | None = None
        if self._session.order is not None:
            self._session.order.begun(job)
        if job.answered is not None and not await self._next_turn(job, job.answered):
            return
        while (near := await self._one_turn(job, near)) is not None:
            pass
        while self._writer.backlog > _BACKLOG:
            await asyncio.sleep(0.02)

    async def _one_turn(self, job: Job, near: str | None) -> str | None:
        """Generate, check and store one turn.

        Returns the address that answered if the job has a next turn to generate, else None.
        """
        answered = await self._answering.answer(job, near)
        trace, generation = answered.trace, answered.generation
        if trace is None or generation is None:
            self._refuse(answered.refused)
            return None
        self._account.answered(trace, generation, complete=answered.complete)
        self._account.refused(answered.refused)
        self._writer.put(trace, *answered.refused)
        ids, after = generation.output_ids, answered.after
        if not (job.goes_on and answered.goes_on and await self._next_turn(job, ids, after)):
            return None
        return generation.server

    async def _next_turn(
        self, job: Job, output_ids: Sequence[int], after: After | None = None
    ) -> bool:
        """Move a conversation on to its next turn, which is rendered on a thread.

        Returns whether there is one that can be asked.
        """
        loop = asyncio.get_running_loop()
        run = partial(loop.run_in_executor, self._threads)
        if job.steps is not None and after is None:  # an earlier capture stored the answer
            after = await run(self._turns.after, job, output_ids)
            job.answered = None
        produced: list[str] = []
        if after is not None and after.ended is None:
            try:
                produced = await self._produce(job, after)
            except NoResult as problem:
                self._refuse(self._turns.no_result(job, str(problem)))
                return False
        turn = await run(self._turns.next_turn, job, output_ids, after, produced)
        self._refuse(turn.refused)
        return turn.asked

    async def _produce(self, job: Job, after: After) -> list[str]:
        """Results of an answer's calls that were not recorded. Raises `NoResult`."""
        source = self._session.tool_source
        if source is None or after.found is None:
            return []
        calls = zip(after.answer.calls, after.found.results, strict=True)
        requests = [
            request_for(
                call,
                conversation_id=job.name,
                sample=job.sample,
                turn=job.turn,
                metadata=job.conversation.metadata,
            )
            for call, result in calls
            if result is None
        ]
        return list(await asyncio.gather(*map(source.result, requests)))

    def _refuse(self, rows: list[Rejected]) -> None:
        self._account.refused(rows)
        if rows:
            self._writer.put(*rows)

    # -- around it ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._employ()
            self._account.look_at(self._pool)
            self._report_progress()
            await asyncio.sleep(0.5)

    def _report_progress(self) -> None:
        """Tell how it stands. What shows it must not end the capture, whatever it raises."""
        if self._on_progress is not None:
            with suppress(Exception):
                self._on_progress(self._account.snapshot(self._pool))

    def _cancel(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    def _writer_failed(self) -> None:
        self._stopped = str(self._writer.error)
        self._cancel()

    def _interrupt(self) -> None:
        if self._interrupted:
            os._exit(EXIT_INTERRUPTED)
        self._hang_up()

    def _hang_up(self) -> None:
        """End cleanly. A terminal that closes may say so several times, and means nothing by it."""
        if not self._interrupted:
            self._interrupted = True
            self._cancel()
            self._say(
                "stopping: what was finished is being made durable (once more to stop at once)"
            )
