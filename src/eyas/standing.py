"""How a run stands, for whoever looks at it from outside.

Invariant: nothing is written and no lock is taken; a run whose writer is gone is never called
running, and one that a capture ended properly is never called killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from eyas.errors import EXIT_OK, EXIT_PENDING, EXIT_REJECTED
from eyas.status import Counts, State, Status
from eyas.store import REJECTED, TRACES, Run
from eyas.store.journal import segments
from eyas.store.lock import WATCH_S, find_holder

_SETTLE_S = 3.0
"""A process that gave its lock back writes its last status within this."""


def status_of_run(
    run: str | Path, *, watch_s: float = WATCH_S, sleep: Callable[[float], object] = time.sleep
) -> Status:
    """How a run stands, by its status file, its lock, its manifest and its rows.

    Works for runs without a status file, such as those of a capture from Python: their counts
    come from the manifest, or from the rows where no capture ended.

    Args:
        run: the run directory.
        watch_s: how long a writer on another host is watched, where its heartbeat looks old.
        sleep: waits some seconds.

    Raises:
        DamagedRun: if the directory holds no run.
    """
    opened = Run(run)
    for _ in range(round(_SETTLE_S / 0.2)):
        holder = find_holder(opened.path, watch_s=watch_s)
        saved = Status.load(opened.path)
        if holder is not None or saved is None or saved.state != "running":
            break
        sleep(0.2)  # it ended a moment ago, or is about to begin
    if holder is not None:
        if saved is not None and (saved.pid, saved.host) != (holder.pid, holder.host):
            saved = None  # of an earlier capture
        state: State = "running" if holder.alive else "killed"
        if saved is None:
            status = _counted(opened, state)
            return status.model_copy(update={"pid": holder.pid, "host": holder.host})
        return saved if saved.state != "running" else saved.model_copy(update={"state": state})
    opened = Run(run)  # its counts may be newer now
    if saved is None:
        return _of_manifest(opened) or _unfinished(opened)
    if saved.state == "running":
        return _of_manifest(opened) or saved.model_copy(update={"state": "killed"})
    if _figures(saved) == tuple(opened.manifest.counts.get(name) for name in _COMPARED):
        return saved
    return _of_manifest(opened) or saved  # a later capture wrote no status


_COMPARED = ("input", "done", "rejected")


def _figures(status: Status) -> tuple[int, ...]:
    return status.counts.input, status.counts.done, status.counts.rejected


def _of_manifest(run: Run) -> Status | None:
    """What the manifest says of the last capture; None if rows came after that, or it never
    ended."""
    counts = run.manifest.counts
    done, rejected = counts.get("done", 0), counts.get("rejected", 0)
    stored = run.count(TRACES) + run.count(REJECTED)
    if not counts or done + rejected + counts.get("extra", 0) != stored:
        return None
    code = EXIT_PENDING if counts.get("pending") else EXIT_REJECTED if rejected else EXIT_OK
    return Status(
        state="stopped" if code == EXIT_PENDING else "finished",
        counts=Counts(
            input=counts.get("input", 0),
            total=counts.get("input"),
            total_known=True,
            done=done,
            rejected=rejected,
            pending=counts.get("pending"),
            truncated=counts.get("truncated", 0),
        ),
        exit_code=code,
    )


def _unfinished(run: Run) -> Status:
    """A run that nobody writes and whose rows no capture has counted at its end."""
    if segments(run.path / "journal"):
        return _counted(run, "killed")
    why = "no capture that ended has counted these rows"
    return _counted(run, "stopped").model_copy(update={"stopped": why})


def _counted(run: Run, state: State) -> Status:
    """What the rows themselves say."""
    done, rejected = run.count(TRACES), run.count(REJECTED)
    return Status(state=state, counts=Counts(done=done, rejected=rejected))
