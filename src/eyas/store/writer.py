"""The one writer of a run: rows go to the journal, are made durable in groups, and are sealed.

Invariants: `done` and `rejected` count durable (fsynced) rows only; rows that are put together
are written together; after a failure nothing more is written and nothing unwritten is counted.
Rows reach the system within some milliseconds, so that a killed process loses next to none,
and the disk in groups, so that one fsync serves many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from eyas.errors import DiskFull, EyasError
from eyas.store.journal import Segment, encode_line, segments
from eyas.store.lock import WriterLock
from eyas.store.parts import REJECTED, TRACES, part_number, parts, seal
from eyas.trace import Rejected, Trace

SYNC_EVERY_S = 0.2
GATHER_S = 0.01
"""How long rows are gathered before they are written."""
SEAL_BYTES = 32 * 2**20


class Writer:
    """Appends rows to a run on a thread of its own.

    Open it with the run's lock held; opening seals what an earlier process left in the journal.
    """

    def __init__(
        self,
        run: Path,
        lock: WriterLock,
        *,
        patience_s: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
        sync_every_s: float = SYNC_EVERY_S,
        seal_bytes: int = SEAL_BYTES,
    ) -> None:
        """Start writing.

        Args:
            run: the run directory.
            lock: its lock, held.
            patience_s: how long to wait for room on a full disk before giving up.
            say: takes one line for the user (on the writer's thread).
        """
        self.run = run
        self.done = 0
        self.rejected = 0
        self.error: EyasError | None = None
        self.on_error: Callable[[], object] | None = None
        """Called on the writer's thread when writing fails."""
        self._lock = lock
        self._patience_s = patience_s
        self._say = say
        self._sync_every_s = sync_every_s
        self._seal_bytes = seal_bytes
        self._queue: list[Trace | Rejected] = []
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._closing = False
        self._flushing = False
        self._unsynced = [0, 0]
        """Traces and refused rows that were written since the last sync."""
        self._synced_at = 0.0
        self._idle = True
        self._asleep = False
        """Whether the thread waits for rows to come."""
        self._segment: Segment | None = None
        self._next = 1 + max(
            [number for number, _ in segments(run / "journal")]
            + [part_number(path) for folder in (TRACES, REJECTED) for path in parts(run, folder)],
            default=0,
        )
        self._thread = threading.Thread(target=self._work, name="eyas-writer", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Rows that were put and are not yet being written."""
        return len(self._queue)

    def put(self, *rows: Trace | Rejected) -> None:
        """Hand over rows; they are durable at the latest `sync_every_s` (and an fsync) later.

        Raises:
            EyasError: the failure that stopped the writer.
        """
        with self._mutex:
            if self.error is not None:
                raise self.error
            self._queue.extend(rows)
            if self._asleep:  # not while it gathers: a wake-up a row costs more than the row
                self._asleep = False
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything put so far is durable.

        Raises:
            EyasError: the failure that stopped the writer.
        """
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.error or (self._idle and not self._queue))
            self._flushing = False
            if self.error is not None:
                raise self.error

    def close(self) -> None:
        """Write what is left, seal it, and stop.

        Raises:
            EyasError: the failure that stopped the writer.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            while True:
                rows = self._next_rows()
                if rows:
                    self._patiently(partial(self._write, rows))
                if self._sync_is_due():
                    self._patiently(self._sync)
                if self._closing and not self._queue:
                    break
            self._patiently(self._sync)
            self._patiently(self._seal)
        except EyasError as error:
            self._fail(error)
        except Exception as error:  # a fault of ours must not look like a finished run
            self._fail(EyasError(f"the writer of {self.run} failed: {error!r}"))

    def _patiently(self, step: Callable[[], None]) -> None:
        """Do a step again until there is room for it, or until patience (or the run) ends."""
        began, pause = None, 0.2
        while True:
            try:
                step()
            except DiskFull as error:
                now = time.monotonic()
                began = began or now
                if not error.full or now - began >= self._patience_s or self._closing:
                    raise
                if pause == 0.2:
                    self._say(f"{str(error).split('. ', 1)[0]}; waiting for room")
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
            else:
                if began is not None:
                    self._say("there is room again")
                return

    def _fail(self, error: EyasError) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()
        if self.on_error is not None:
            self.on_error()

    def _next_rows(self) -> Sequence[Trace | Rejected]:
        """Wait for rows, or until a sync is due, or the end; gather what comes meanwhile."""

        def wanted() -> bool:
            return bool(self._queue or self._closing or self._flushing)

        with self._changed:
            self._asleep = not self._queue
            if any(self._unsynced):
                left = self._synced_at + self._sync_every_s - time.monotonic()
                self._changed.wait_for(wanted, timeout=max(0.0, left))
            else:
                self._idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                self._idle = False
            self._asleep = False
            if self._queue and not (self._closing or self._flushing):
                self._changed.wait_for(lambda: self._closing or self._flushing, timeout=GATHER_S)
            rows, self._queue = self._queue, []
            return rows

    def _write(self, rows: Sequence[Trace | Rejected]) -> None:
        self._lock.check()
        if self._segment is None:
            self._segment = Segment(self.run / "journal", self._next)
            self._next += 1
        if not any(self._unsynced):
            self._synced_at = time.monotonic()
        self._segment.write([encode_line(row) for row in rows])
        refused = sum(isinstance(row, Rejected) for row in rows)
        self._unsynced[0] += len(rows) - refused
        self._unsynced[1] += refused

    def _sync_is_due(self) -> bool:
        if not any(self._unsynced):
            return False
        waited = time.monotonic() - self._synced_at
        return self._flushing or waited >= self._sync_every_s

    def _sync(self) -> None:
        if self._segment is None or not any(self._unsynced):
            return
        self._segment.sync()
        done, rejected = self._unsynced
        self._unsynced = [0, 0]
        self.done += done
        self.rejected += rejected
        if self._segment.bytes >= self._seal_bytes:
            self._seal()

    def _seal(self) -> None:
        if self._segment is not None:
            seal(self.run, self._segment.number, self._segment.path)
            self._segment.close()
            self._segment = None


def seal_leftovers(run: Path) -> int:
    """Seal the segments that an earlier process left; returns how many there were."""
    left = segments(run / "journal")
    for number, path in left:
        seal(run, number, path)
    return len(left)
