"""A process that dies at any single step of writing: the next start always goes on.

Property: whatever call to the file system was the last one of a capture, with or without half
of its bytes written, the same command ends with every row there once and nothing left over.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, config_for, numbered, paired, write_prompts
from eyas import CaptureConfig, Run
from eyas.loop import capture
from eyas.store import WriterLock
from fault_server import FaultServer

STEPS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir")
DIED = 9
ROWS = [*numbered(5), *paired(2), {"id": "bad", "prompt": 5}]

IMPORTED = [
    "aiohttp.web",
    "eyas.demo.server",
    "eyas.loop",
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pytest",
    "transformers.tokenization_utils_tokenizers",
    "uvloop",
]
"""What each process would else import anew; names that are not there are passed over."""


def dying(config: CaptureConfig, last: int, *, archive: bool = False) -> None:
    """Capture, and die before the step number `last` (a write: in its middle)."""
    steps = 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **more: Any) -> Any:
            nonlocal steps
            if name == "open" and not given[1] & os.O_CREAT:
                return real(*given, **more)
            steps += 1
            if steps == last:
                if name == "write":
                    real(given[0], bytes(given[1])[: len(given[1]) // 2])
                os._exit(DIED)
            return real(*given, **more)

        return step

    for name in STEPS:
        setattr(os, name, counted(name, getattr(os, name)))
    capture(config, archive=archive, probe=False)


def die_at(config: CaptureConfig, last: int, *, archive: bool = False) -> int | None:
    """The exit code of a process of its own that captures so far."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    child = context.Process(target=dying, args=(config, last), kwargs={"archive": archive})
    child.start()
    child.join(600)
    return child.exitcode


@pytest.mark.parametrize("archive", [False, True], ids=["new run", "other run put aside"])
def test_the_next_start_goes_on(
    archive: bool, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A half-written lock names no process; its heartbeat is watched, here only for a moment.
    monkeypatch.setitem(WriterLock.acquire.__kwdefaults__, "watch_s", 0.05)
    prompts = write_prompts(tmp_path / "p.jsonl", ROWS)
    died = 0
    for last in range(1, 200):
        run = tmp_path / f"run{last}"
        if archive:
            capture_from(server, prompts, run, seed=1, limit=2)
        code = die_at(config_for(server, prompts, run), last, archive=archive)
        if code == 0:
            break
        assert code == DIED
        died += 1
        summary = capture_from(server, prompts, run, archive=archive)
        assert (summary.done, summary.rejected, summary.pending) == (9, 1, 0), last
        assert not [p for p in run.rglob("*") if p.name.startswith(".")], last
        assert not list((run / "journal").iterdir())
        kept = list(run.glob("archive/*/traces/*.parquet"))
        assert len(kept) == archive, last
    assert died > 20
    assert len(list(Run(run).traces())) == 9
