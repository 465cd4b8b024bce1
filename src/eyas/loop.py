"""The loop: conversations in, traces out.

Invariants: a row is put into the run only after every check; at the end, and at every end,
``input == done + rejected + pending``; rendering, tokenizing and writing happen on threads of
their own, never between two requests.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import orjson
import pyarrow as pa

from eyas.answering import Answering
from eyas.config import CaptureConfig
from eyas.engines.pool import Pool
from eyas.engines.server import Server
from eyas.errors import EXIT_INTERRUPTED, EyasError
from eyas.feed import Feed, Job
from eyas.findings import Finding
from eyas.fleet import Fleet
from eyas.progress import Progress, ServerProgress, Summary
from eyas.session import Session, open_session
from eyas.store.redo import Redo
from eyas.tool_threads import After, Policy
from eyas.tools.results import request_for
from eyas.tools.sources import NEAREST, NoResult
from eyas.trace import Rejected
from eyas.usage import Usage

_COUNT_REST_S = 10.0
_LINES_REPORTED = 20
_QUEUED = 1024
"""Jobs that are rendered and wait to be sent."""
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
    with (
        asyncio.Runner(loop_factory=loop_factory) as runner,
        _long_lived_apart(),
        _memory_given_back(),
    ):
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


@contextmanager
def _long_lived_apart() -> Iterator[None]:
    """Keep what is loaded out of garbage collections, which else cost a fifth of each row."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _memory_given_back() -> Iterator[None]:
    """Let Arrow take memory from the system: its own pool keeps up to 80 MB that nobody uses."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


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
        self._pool = Pool(
            [Server(session.target.engine, session.target.info, slots=config.concurrency)],
            tries=config.tries,
            give_up_after_s=config.give_up_after,
            say=self._note,
            on_weights=session.learn_weights,
            on_places=self._employ,
            left=self._left,
        )
        self._common = {"sampling": orjson.dumps(session.target.sampling.as_dict()).decode()}
        self._feed = Feed(
            session.reader.stretches(),
            run=session.run,
            ledger=session.ledger,
            prompting=session.prompting,
            max_new_tokens=config.max_new_tokens,
            context_length=session.target.context_length,
            samples=config.n,
            limit=config.limit,
            common=self._common,
            partials=session.partials,
            policy=Policy(
                nearest=config.tool_results == NEAREST,
                produces=session.tool_source is not None,
                rounds=config.tool_rounds,
            ),
            on_tools=session.learn_tools,
            order=session.order,
        )
        self._answering = Answering(session, self._pool, self._feed, self._common)
        self._usage = Usage(self._pool.servers)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="eyas-feed")
        self._fleet = Fleet(
            self._pool,
            session.target,
            slots=config.concurrency,
            say=say,
        )
        self._queue: asyncio.Queue[Job | None] = asyncio.Queue(_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._progress = Progress()
        self._decided = 0
        """Rows that were handed to the writer."""
        self._reasons: dict[str, int] = {}
        self._modes = Counter[str]()
        self._reported = Counter[bool]()
        self._said: set[str] = set()
        self._began = time.monotonic()
        self._interrupted = self._all_begun = False
        self._stopped: str | None = None
        self._workers = 0

    async def run(self) -> Summary:
        loop = asyncio.get_running_loop()
        self._writer.on_error = partial(loop.call_soon_threadsafe, self._writer_failed)
        self._tasks = [asyncio.create_task(self._fill())]
        self._employ()
        around = [asyncio.create_task(self._tick()), asyncio.create_task(self._fleet.tend())]
        restore = self._handle_signals(loop)
        try:
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
            self._look_at_use()
            await self._pool.close()
            return await self._finish(loop)
        finally:
            for task in around:
                task.cancel()
            await self._pool.close()
            self._threads.shutdown(wait=False, cancel_futures=True)
            restore()

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
        counts, ledger, writer = self._feed.counts, self._session.ledger, self._writer
        done, rejected = counts.done + writer.done, counts.rejected + writer.rejected
        summary = Summary(
            run=str(self._session.run.path),
            input=counts.input,
            done=done,
            rejected=rejected,
            pending=counts.input - done - rejected,
            extra=ledger.done + ledger.rejected - counts.done - counts.rejected,
            truncated=counts.truncated + self._progress.truncated,
            new=writer.done + writer.rejected,
            prompt_tokens=self._progress.prompt_tokens,
            output_tokens=self._progress.output_tokens,
            cached_tokens=self._progress.cached_tokens,
            use=self._progress.use,
            seconds=time.monotonic() - self._began,
            input_known=known,
            interrupted=self._interrupted,
            stopped=self._stopped,
            reasons=dict(sorted(self._reasons.items(), key=lambda item: -item[1])),
            shapes=dict(self._session.reader.shapes),
            modes=dict(self._modes.most_common()),
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
            self._tasks.append(asyncio.create_task(self._work()))
        self._workers = max(self._workers, wanted)

    def _left(self, mean_tokens: float) -> float:
        """Output tokens of everything that was not begun yet, given the mean of an answer."""
        order = self._session.order
        if order is not None and (tokens := order.tokens_left(mean_tokens)) is not None:
            return tokens
        total = self._snapshot().total
        if total is None:
            return math.inf
        counts = self._feed.counts
        begun = counts.done + counts.rejected + self._decided + self._pool.in_flight
        return max(0, total - begun) * mean_tokens

    async def _fill(self) -> None:
        """Keep the queue filled; reading, rendering and tokenizing happen on a thread."""
        loop = asyncio.get_running_loop()
        try:
            order = self._session.order
            while not self._feed.ended:
                room = self._queue.maxsize - self._queue.qsize()
                jobs, refused = await loop.run_in_executor(
                    self._threads, self._feed.next_batch, room
                )
                self._put(refused)
                if order is not None and order.lengths is not None and self._feed.all_met:
                    self._say_once(order.told)
                for job in jobs:
                    await self._queue.put(job)
            await self._queue.put(None)
        except Exception:
            self._cancel()
            raise

    async def _work(self) -> None:
        """Take jobs, one request at a time, until there are none."""
        try:
            while (job := await self._queue.get()) is not None:
                near: str | None = None
                if self._session.order is not None:
                    self._session.order.begun(job)
                if job.answered is not None and not await self._next_turn(job, job.answered):
                    continue
                while (near := await self._one_turn(job, near)) is not None:
                    pass
                while self._writer.backlog > _BACKLOG:
                    await asyncio.sleep(0.02)
            self._queue.put_nowait(None)  # for the next worker
            if not self._all_begun:
                self._look_at_use()
                self._all_begun = True
        except Exception:
            self._cancel()
            raise

    async def _one_turn(self, job: Job, near: str | None) -> str | None:
        """Generate, check and store one turn.

        Returns the address that answered if the job has a next turn to generate, else None.
        """
        answered = await self._answering.answer(job, near)
        trace, generation = answered.trace, answered.generation
        if trace is None or generation is None:
            self._put(answered.refused)
            return None
        progress = self._progress
        progress.prompt_tokens += len(job.prompt_ids)
        progress.output_tokens += len(trace.output_ids)
        if generation.cached_tokens is not None:
            progress.cached_tokens = (progress.cached_tokens or 0) + generation.cached_tokens
        finish = trace.finish_reason
        progress.finish_reasons[finish] = progress.finish_reasons.get(finish, 0) + 1
        progress.truncated += not answered.complete
        self._modes[trace.template_kwargs] += 1
        self._put(answered.refused, trace)
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
            after = await run(self._feed.after, job, output_ids)
            job.answered = None
        produced: list[str] = []
        if after is not None and after.ended is None:
            try:
                produced = await self._produce(job, after)
            except NoResult as problem:
                self._put(self._feed.no_result(job, str(problem)))
                return False
        turn = await run(self._feed.next_turn, job, output_ids, after, produced)
        self._put(turn.refused)
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

    def _put(self, refused: list[Rejected], *traces: object) -> None:
        for row in refused:
            self._reasons[row.reason] = self._reasons.get(row.reason, 0) + 1
            self._progress.finish_reasons[row.reason] = self._reasons[row.reason]
            self._report(row)
        self._decided += len(refused) + len(traces)
        if refused or traces:
            self._writer.put(*traces, *refused)  # type: ignore[arg-type]

    def _report(self, row: Rejected) -> None:
        """Name the first rows of each reason, and the first input lines; all are in rejected/."""
        from_input = row.id.startswith("line-")
        self._reported[from_input] += 1
        if from_input and self._reported[True] <= _LINES_REPORTED:
            self._note(f"{row.source}:{row.line}: {row.reason}: {row.detail}")
        elif self._reasons[row.reason] == 1:
            self._note(f"{row.id} rejected: {row.reason}: {row.detail}")
        elif from_input and self._reported[True] == _LINES_REPORTED + 1:
            self._note("more input lines cannot be used; all are in rejected/")

    # -- around it ---------------------------------------------------------------------------

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _note(self, line: str) -> None:
        self._progress.problems = [*self._progress.problems[-4:], line]
        self._say(line)

    def _snapshot(self) -> Progress:
        progress, counts, position = (
            self._progress,
            self._feed.counts,
            self._session.reader.position,
        )
        progress.done = counts.done + self._writer.done
        progress.rejected = counts.rejected + self._writer.rejected
        progress.new = self._writer.done + self._writer.rejected
        progress.input, progress.input_known = counts.input, self._feed.all_met
        if position.bytes_total:
            progress.input_fraction = min(1.0, position.bytes_read / position.bytes_total)
        if self._session.order is not None:
            left = self._session.order.tokens_left(self._pool.mean_tokens)
            # Those that are being generated are halfway through, on average.
            progress.output_left = None if left is None else left + self._pool.expected_tokens / 2
        progress.in_flight = self._pool.in_flight
        progress.servers = [
            ServerProgress(
                url=server.url,
                up=server.usable,
                slots=server.slots,
                in_flight=len(server.attempts),
                queued=server.queued,
                answered=server.answered,
                output_tokens=server.output_tokens,
            )
            for server in self._pool.servers
        ]
        progress.seconds = time.monotonic() - self._began
        return progress

    async def _tick(self) -> None:
        while True:
            self._employ()
            self._look_at_use()
            self._report_progress()
            await asyncio.sleep(0.5)

    def _look_at_use(self) -> None:
        left = not self._all_begun or self._pool.waiting > 0
        self._progress.use = self._usage.look(left=left)

    def _report_progress(self) -> None:
        """Tell how it stands. What shows it must not end the capture, whatever it raises."""
        if self._on_progress is not None:
            with suppress(Exception):
                self._on_progress(self._snapshot())

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

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        handled = [signal.SIGINT, signal.SIGTERM]
        for number in handled:
            loop.add_signal_handler(number, self._interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it ignored
            handled.append(signal.SIGHUP)
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)

        def restore() -> None:
            for number in handled:
                loop.remove_signal_handler(number)

        return restore
