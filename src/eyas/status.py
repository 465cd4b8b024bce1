"""How a capture stands, as one small document that other programs and terminals can read.

Invariants: ``status.json`` is there whole or not at all; it is a view and nothing depends on it:
no failure to write it reaches the capture, and it is written on a thread of its own; it belongs
to no fingerprint.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pydantic import BaseModel, ValidationError

from eyas.errors import EXIT_INTERRUPTED, EXIT_PENDING
from eyas.pace import Pace, Rates
from eyas.progress import Progress, Summary
from eyas.store.run import STATUS

EVERY_S = 2.0
_PROBLEMS = 5

State = Literal["running", "finished", "stopped", "interrupted", "killed"]
"""``finished``: nothing is pending. ``stopped``: something is, by itself. ``interrupted``: by
Ctrl-C or SIGTERM. ``killed`` stands in no file: it is what a reader finds."""


class Counts(BaseModel):
    """Units; ``total`` is an estimate until `total_known`, and null where there is none."""

    input: int = 0
    total: int | None = None
    total_known: bool = False
    done: int = 0
    rejected: int = 0
    pending: int | None = None
    truncated: int = 0
    new: int = 0


class Tokens(BaseModel):
    """Of this capture's finished answers."""

    prompt: int = 0
    output: int = 0
    cached: int | None = None
    """Of the prompt tokens; null where no server tells."""


class Speed(BaseModel):
    """Figures a second."""

    rows: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0


class Speeds(BaseModel):
    """Over the last minute, and since the first request."""

    last_minute: Speed = Speed()
    overall: Speed = Speed()


class Server(BaseModel):
    """One server."""

    url: str
    up: bool = True
    slots: int = 0
    in_flight: int = 0
    queued: int | None = None
    answered: int = 0
    output_tokens: int = 0
    output_tokens_per_second: float = 0.0


class Use(BaseModel):
    """How full the servers' places were, 0 to 1; see `eyas.progress.Use`."""

    share: float | None = None
    share_with_rows_left: float | None = None
    below_half_seconds: float = 0.0


class Status(BaseModel):
    """The document."""

    format: int = 1
    state: State
    pid: int | None = None
    host: str | None = None
    started: str | None = None
    """ISO 8601 in UTC, like `updated`."""
    updated: str | None = None
    seconds: float = 0.0
    counts: Counts = Counts()
    tokens: Tokens = Tokens()
    rates: Speeds = Speeds()
    eta_seconds: float | None = None
    quiet_seconds: float = 0.0
    """How long no row was finished."""
    in_flight: int = 0
    servers: list[Server] = []
    use: Use = Use()
    finish_reasons: dict[str, int] = {}
    problems: list[str] = []
    stopped: str | None = None
    """Why it ended early, as a sentence."""
    exit_code: int | None = None
    """Null while it runs."""

    @classmethod
    def load(cls, run: Path) -> Self | None:
        """The status that lies in a run; None if there is none that can be read."""
        try:
            return cls.model_validate_json((run / STATUS).read_bytes())
        except (OSError, ValidationError):
            return None

    def age(self, now: dt.datetime | None = None) -> float | None:
        """Seconds since it was written; None where it does not say when."""
        try:
            written = dt.datetime.fromisoformat(self.updated or "")
            return ((now or dt.datetime.now(dt.UTC)) - written).total_seconds()
        except (ValueError, TypeError):
            return None

    @property
    def code(self) -> int:
        """The exit code that fits: the capture's own, 4 if it was killed, 0 while it runs."""
        if self.exit_code is not None:
            return self.exit_code
        return EXIT_PENDING if self.state in ("killed", "stopped") else 0


def status_of(progress: Progress, rates: Rates) -> Status:
    """A running capture's snapshot and its rates as a document."""
    total = progress.total
    decided = progress.done + progress.rejected
    return Status(
        state="running",
        seconds=round(progress.seconds, 3),
        counts=Counts(
            input=progress.input,
            total=total,
            total_known=progress.input_known,
            done=progress.done,
            rejected=progress.rejected,
            pending=None if total is None else max(0, total - decided),
            truncated=progress.truncated,
            new=progress.new,
        ),
        tokens=Tokens(
            prompt=progress.prompt_tokens,
            output=progress.output_tokens,
            cached=progress.cached_tokens,
        ),
        rates=Speeds(
            last_minute=_speed(rates.rows, rates.prompt_tokens, rates.output_tokens),
            overall=_speed(
                rates.overall_rows, rates.overall_prompt_tokens, rates.overall_output_tokens
            ),
        ),
        eta_seconds=None if rates.eta_seconds is None else round(rates.eta_seconds, 1),
        quiet_seconds=round(rates.quiet_seconds, 1),
        in_flight=progress.in_flight,
        servers=[
            Server(
                url=_clean(server.url),
                up=server.up,
                slots=server.slots,
                in_flight=server.in_flight,
                queued=server.queued,
                answered=server.answered,
                output_tokens=server.output_tokens,
                output_tokens_per_second=round(rates.servers.get(server.url, 0.0), 3),
            )
            for server in progress.servers
        ],
        use=_use(progress),
        finish_reasons={_clean(name): n for name, n in progress.finish_reasons.items()},
        problems=[_clean(line) for line in progress.problems[-_PROBLEMS:]],
    )


def _use(stands: Progress | Summary) -> Use:
    shares = (stands.use.share, stands.use.share_with_rows_left)
    whole, before = (None if share is None else round(share, 4) for share in shares)
    return Use(
        share=whole,
        share_with_rows_left=before,
        below_half_seconds=round(stands.use.below_half_s, 1),
    )


def _speed(rows: float, prompt_tokens: float, output_tokens: float) -> Speed:
    return Speed(
        rows=round(rows, 4),
        prompt_tokens=round(prompt_tokens, 3),
        output_tokens=round(output_tokens, 3),
    )


class StatusFile:
    """Keeps ``status.json`` of a run that this process writes.

    Give `update` to `capture` as ``on_progress`` and its Summary to `finish`. A context manager,
    which says that the capture was stopped if it is left without a Summary.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(run) / STATUS
        self._every_s = every_s
        self._clock = clock
        self._due = clock()
        self._pace = Pace()
        self._about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": _now(),
        }
        self._status = Status(state="running", **self._about)  # type: ignore[arg-type]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eyas-status")
        self._writing: Future[None] | None = None
        self._ended = False

    def update(self, progress: Progress) -> None:
        """Take a snapshot; it is written if the last one that was is old enough."""
        if self._ended:
            return
        status = status_of(progress, self._pace.take(progress))
        self._status = status.model_copy(update=self._about)
        if self._clock() < self._due or (self._writing and not self._writing.done()):
            return
        self._due = self._clock() + self._every_s
        self._writing = self._thread.submit(self._write, self._status)

    def finish(self, summary: Summary) -> None:
        """Write how the capture ended."""
        known = summary.input_known
        counts = self._status.counts.model_copy(
            update={
                "input": summary.input,
                "total": summary.input if known else self._status.counts.total,
                "total_known": known,
                "done": summary.done,
                "rejected": summary.rejected,
                "pending": summary.pending if known else self._status.counts.pending,
                "truncated": summary.truncated,
                "new": summary.new,
            }
        )
        tokens = self._status.tokens.model_copy(
            update={
                "prompt": summary.prompt_tokens,
                "output": summary.output_tokens,
                "cached": summary.cached_tokens,
            }
        )
        code = summary.exit_code
        states: dict[int, State] = {EXIT_INTERRUPTED: "interrupted", EXIT_PENDING: "stopped"}
        self._end(
            state=states.get(code, "finished"),
            exit_code=code,
            stopped=summary.stopped and _clean(summary.stopped),
            seconds=round(summary.seconds, 3),
            counts=counts,
            tokens=tokens,
            use=_use(summary),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(
            state="stopped", stopped=_clean("it ended" if error is None else repr(error)[:1000])
        )

    def _end(self, **update: object) -> None:
        if self._ended:
            return
        self._ended = True
        status = self._status.model_copy(update={"eta_seconds": None, "in_flight": 0, **update})
        status.servers = [s.model_copy(update={"in_flight": 0}) for s in status.servers]
        self._thread.submit(self._write, status)
        self._thread.shutdown()

    def _write(self, status: Status) -> None:
        """Replace the file; a full disk or a lost directory costs this one writing."""
        temporary = self._path.with_name(f".{STATUS}.tmp")
        data = status.model_copy(update={"updated": _now()}).model_dump_json(indent=2)
        with suppress(OSError):
            try:
                temporary.write_text(data + "\n", encoding="utf-8")
                os.replace(temporary, self._path)
            except OSError:
                temporary.unlink(missing_ok=True)


def _clean(text: str) -> str:
    """Text that can be encoded, half surrogate pairs as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
