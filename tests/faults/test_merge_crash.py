"""A merge that dies at any single step: no run is there, or all of it.

Property: whatever call to the file system was the last one of a merge, the runs it is made of
keep their rows, the new one is absent or whole, and where it is absent the same command makes
it and leaves nothing else over.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas import Run
from eyas.conversation import digest
from eyas.errors import DiskFull, StoreError
from eyas.merge import merge_runs
from eyas.store import Manifest, WriterLock, prepare_directory
from eyas.store.journal import Segment, encode_line
from eyas.store.parts import seal
from eyas.trace import Rejected, Trace

STEPS = ("open", "write", "sendfile", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
DIED, SWALLOWED = 9, 10


def counted(last: int, end: Callable[[], None]) -> None:
    """Let the step number `last` be the end (a write: in its middle)."""
    steps = 0

    def step_of(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **more: Any) -> Any:
            nonlocal steps
            if name == "open" and not given[1] & os.O_CREAT:
                return real(*given, **more)
            steps += 1
            if steps == last:
                if name == "write":
                    real(given[0], bytes(given[1])[: len(given[1]) // 2])
                end()
            return real(*given, **more)

        return step

    for name in STEPS:
        if hasattr(os, name):
            setattr(os, name, step_of(name, getattr(os, name)))


def dying(out: str, runs: list[str], last: int) -> None:
    counted(last, lambda: os._exit(DIED))
    merge_runs(out, runs)


def failing(out: str, runs: list[str], last: int) -> None:
    """A step that fails, as on a full disk, must end in a sentence, with nothing left behind."""

    reached = False

    def full() -> None:
        nonlocal reached
        reached = True
        raise OSError(28, "No space left on device")

    counted(last, full)
    try:
        merge_runs(out, runs)
    except DiskFull:
        os._exit(DIED)
    if reached:
        os._exit(SWALLOWED)


def code_of(work: Callable[..., None], out: Path, runs: list[Path], last: int) -> int | None:
    """The exit code of a process of its own that merges so far."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pandas", "pyarrow.compute", "pyarrow.parquet", "eyas.merge", "pytest"]
    )
    child = context.Process(target=work, args=(str(out), [str(run) for run in runs], last))
    child.start()
    child.join(600)
    return child.exitcode


def make_run(path: Path, first: int, *, sealed: bool) -> Path:
    """Rows of which one has an id that each run has, so that a part is written anew."""
    prepare_directory(path)
    Manifest(eyas="0", created="", date="2026-01-02", fingerprint={}, profile={},
             max_new_tokens=1, tokenizer="").save(path)  # fmt: skip
    rows: list[Trace | Rejected] = []
    for at in range(first, first + 3):
        key, name = digest(b"%d" % at).hex(), "same" if at == first else str(at)
        rows.append(Trace(f"{name}/0/0", name, 0, 0, key, [1], [2], "stop", 2, None, None))
    key = digest(b"r %d" % first).hex()
    rows.append(Rejected(f"r{key}/0/0", f"r{key}", 0, 0, key, "text", "differs"))
    segment = Segment(path / "journal", 1)
    segment.write([encode_line(row) for row in rows])
    segment.close()
    if sealed:
        seal(path, 1, segment.path)
    return path


def contents(run: Path) -> set[tuple[str, str]]:
    opened = Run(run)
    rows = [(row.id, row.key) for row in (*opened.traces(), *opened.rejected())]
    assert len(set(rows)) == len(rows)
    return set(rows)


@pytest.mark.parametrize(
    ("work", "there"), [(dying, False), (failing, True)], ids=["killed", "disk full"]
)
def test_a_run_or_none(
    work: Callable[..., None], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A half-written lock names no process; its heartbeat is watched, here only for a moment.
    monkeypatch.setitem(WriterLock.acquire.__kwdefaults__, "watch_s", 0.05)
    first = [make_run(tmp_path / "a", 0, sealed=True), make_run(tmp_path / "b", 10, sealed=False)]
    before = [contents(run) for run in first]
    died = 0
    for last in range(1, 300):
        folder = tmp_path / str(last)
        runs = [shutil.copytree(run, folder / run.name) for run in first]
        out = folder / "out"
        if there:
            out.mkdir()
        code = code_of(work, out, runs, last)
        assert [contents(run) for run in runs] == before, last
        assert code in (0, DIED, SWALLOWED), last
        if code == DIED:
            died += 1
            if out.exists() and any(out.iterdir()):
                with pytest.raises(StoreError, match="not empty"):
                    merge_runs(out, runs)
            else:
                left = list(folder.glob(".*"))
                assert not left or work is dying, last
                merge_runs(out, runs)
                assert not list(folder.glob(".*")), last
                assert not list(folder.glob("*/writer.lock")), last
        assert len(contents(out)) == 8, last
        assert {key for _, key in contents(out)} == {key for run in before for _, key in run}
        if code == 0:
            break
    assert died > 20
