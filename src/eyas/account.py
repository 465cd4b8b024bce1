"""What a capture has done so far, what is left of it, and what was said of it.

Invariant: figures are of rows that were handed to the run, never of what was only sent; at every
end ``input == done + rejected + pending``, where done and rejected rows are durable.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from eyas.engines import Generation
from eyas.engines.pool import Pool
from eyas.feed import Feed
from eyas.progress import Progress, ServerProgress, Summary
from eyas.session import Session
from eyas.trace import Rejected, Trace
from eyas.usage import Usage

_LINES_REPORTED = 20
_PROBLEMS = 5


class Account:
    """Counts rows as they come, and tells how the capture stands and how it ended."""

    def __init__(self, session: Session, feed: Feed, say: Callable[[str], None]) -> None:
        """Begin at nothing; `say` takes one line for the user."""
        self._session = session
        self._feed = feed
        self._say = say
        self._progress = Progress()
        self._began = time.monotonic()
        self._decided = 0
        """Rows that were handed to the writer."""
        self._reasons: dict[str, int] = {}
        self._modes = Counter[str]()
        self._reported = Counter[bool]()
        self._order_told = False
        self._usage: Usage | None = None
        self._all_begun = False

    def answered(self, trace: Trace, generation: Generation, *, complete: bool) -> None:
        """A good row goes to the writer."""
        progress = self._progress
        progress.prompt_tokens += len(trace.prompt_ids)
        progress.output_tokens += len(trace.output_ids)
        if generation.cached_tokens is not None:
            progress.cached_tokens = (progress.cached_tokens or 0) + generation.cached_tokens
        finish = trace.finish_reason
        progress.finish_reasons[finish] = progress.finish_reasons.get(finish, 0) + 1
        progress.truncated += not complete
        self._modes[trace.template_kwargs] += 1
        self._decided += 1

    def refused(self, rows: Sequence[Rejected]) -> None:
        """Refused rows go to the writer."""
        self._decided += len(rows)
        for row in rows:
            self._reasons[row.reason] = self._reasons.get(row.reason, 0) + 1
            self._progress.finish_reasons[row.reason] = self._reasons[row.reason]
            self._report(row)

    def note(self, line: str) -> None:
        """Say a line that tells of a problem."""
        self._progress.problems = [*self._progress.problems[1 - _PROBLEMS :], line]
        self._say(line)

    def all_begun(self, pool: Pool) -> None:
        """From now on there is no row that is not begun."""
        if not self._all_begun:
            self.look_at(pool)
            self._all_begun = True

    def look_at(self, pool: Pool) -> None:
        """See how full the servers were since the last look."""
        self._usage = self._usage or Usage(pool.servers)
        left = not self._all_begun or pool.waiting > 0
        self._progress.use = self._usage.look(left=left)

    def tell_order(self) -> None:
        """Once the whole input was met: how much of it an earlier run knows."""
        order = self._session.order
        if order is not None and self._feed.all_met and not self._order_told:
            self._order_told = True
            if order.lengths is not None:
                self._say(order.told)

    def left(self, mean_tokens: float, in_flight: int) -> float:
        """Output tokens of everything that was not begun yet; infinite where nobody knows.

        Args:
            mean_tokens: those of an answer so far.
            in_flight: requests that were sent and are not answered.
        """
        order = self._session.order
        if order is not None and (tokens := order.tokens_left(mean_tokens)) is not None:
            return tokens
        self._read_input()
        total = self._progress.total
        if total is None:
            return math.inf
        counts = self._feed.counts
        begun = counts.done + counts.rejected + self._decided + in_flight
        return max(0, total - begun) * mean_tokens

    def snapshot(self, pool: Pool) -> Progress:
        """How the capture stands."""
        self._read_input()
        progress, counts, writer = self._progress, self._feed.counts, self._session.writer
        progress.done = counts.done + writer.done
        progress.rejected = counts.rejected + writer.rejected
        progress.new = writer.done + writer.rejected
        if self._session.order is not None:
            left = self._session.order.tokens_left(pool.mean_tokens)
            # Those that are being generated are halfway through, on average.
            progress.output_left = None if left is None else left + pool.expected_tokens / 2
        progress.in_flight = pool.in_flight
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
            for server in pool.servers
        ]
        progress.seconds = time.monotonic() - self._began
        return progress

    def summary(self, *, input_known: bool, interrupted: bool, stopped: str | None) -> Summary:
        """How the capture ended, once nothing is written any more."""
        progress, counts, writer = self._progress, self._feed.counts, self._session.writer
        ledger = self._session.ledger
        done, rejected = counts.done + writer.done, counts.rejected + writer.rejected
        return Summary(
            run=str(self._session.run.path),
            input=counts.input,
            done=done,
            rejected=rejected,
            pending=counts.input - done - rejected,
            extra=ledger.done + ledger.rejected - counts.done - counts.rejected,
            truncated=counts.truncated + progress.truncated,
            new=writer.done + writer.rejected,
            prompt_tokens=progress.prompt_tokens,
            output_tokens=progress.output_tokens,
            cached_tokens=progress.cached_tokens,
            use=progress.use,
            seconds=time.monotonic() - self._began,
            input_known=input_known,
            interrupted=interrupted,
            stopped=stopped,
            reasons=dict(sorted(self._reasons.items(), key=lambda item: -item[1])),
            shapes=dict(self._session.reader.shapes),
            modes=dict(self._modes.most_common()),
        )

    def _read_input(self) -> None:
        """How much of the input was read, and how much there is."""
        progress, position = self._progress, self._session.reader.position
        progress.input, progress.input_known = self._feed.counts.input, self._feed.all_met
        fractions = [self._feed.taken / limit] if (limit := self._session.config.limit) else []
        if position.bytes_total:
            fractions.append(min(1.0, position.bytes_read / position.bytes_total))
        progress.input_fraction = max(fractions, default=None)

    def _report(self, row: Rejected) -> None:
        """Name the first rows of each reason, and the first input lines; all are in rejected/."""
        from_input = row.id.startswith("line-")
        self._reported[from_input] += 1
        if from_input and self._reported[True] <= _LINES_REPORTED:
            self.note(f"{row.source}:{row.line}: {row.reason}: {row.detail}")
        elif self._reasons[row.reason] == 1:
            self.note(f"{row.id} rejected: {row.reason}: {row.detail}")
        elif from_input and self._reported[True] == _LINES_REPORTED + 1:
            self.note("more input lines cannot be used; all are in rejected/")
