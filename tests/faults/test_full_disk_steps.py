"""A disk that is full from any single step of writing on: one sentence, and nothing lost.

Property: whatever call to the file system is the first one to find no room, the capture ends with
the rest pending, what it counts as done is there, and the same command goes on when there is room.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from capturing import capture_from, check_run, config_for, numbered, paired, write_prompts
from eyas import EyasError, capture
from eyas.errors import DiskFull
from fault_server import FaultServer

ROWS = [*numbered(5), *paired(2), {"id": "bad", "prompt": 5}]
_WRITES = os.O_CREAT | os.O_WRONLY


class Disk:
    """Room for a number of steps, and then for none that needs room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.room: int | None = None
        for owner, name in (
            (os, "open"), (os, "write"), (os, "fsync"), (os, "mkdir"), (os, "link"),
            (Path, "write_bytes"), (pq.ParquetWriter, "write_table"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **more: Any) -> Any:
            if name == "open" and not given[1] & _WRITES:
                return real(*given, **more)
            self.steps += 1
            if self.room is not None and self.steps > self.room:
                if name == "write":  # half of it finds room
                    real(given[0], bytes(given[1])[: len(given[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*given, **more)

        return step


def test_full_from_any_step_on(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ROWS)
    disk = Disk(monkeypatch)
    capture_from(server, prompts, tmp_path / "whole")
    steps, refused, stopped = disk.steps, 0, 0
    assert steps > 15
    for room in range(steps):
        run = tmp_path / f"run{room}"
        disk.steps, disk.room = 0, room
        try:
            config = config_for(server, prompts, run, give_up_after=0.0)
            summary = capture(config, probe=False)
        except EyasError as error:  # before anything was sent
            assert isinstance(error, DiskFull), room
            assert "the disk is full" in str(error)
            refused += 1
        else:
            stopped += summary.stopped is not None
            assert summary.stopped is None or "the disk is full" in summary.stopped, room
            assert len(check_run(server.target, run)) >= summary.done
        disk.room = None
        again = capture_from(server, prompts, run)
        assert (again.done, again.rejected, again.pending) == (9, 1, 0), room
        assert not [p for p in run.rglob("*") if p.name.startswith(".")], room
        assert not list((run / "journal").iterdir())
    assert min(refused, stopped) > 3
