"""One writer at a time: whoever comes second is told so, also when both come at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eyas.errors import RunLocked
from eyas.store import WriterLock
from eyas.store import lock as locks


def stale(run: Path) -> Path:
    """A lock of a process on this host that is gone."""
    lock = WriterLock(run)
    lock.acquire()
    holder = json.loads(lock.path.read_text())
    lock.release()
    lock.path.write_text(json.dumps({**holder, "started": "0", "token": "of one that is gone"}))
    return lock.path


def test_two_that_find_the_same_dead_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has seen the dead holder too, but the first has taken over meanwhile."""
    path, first, second = stale(tmp_path), WriterLock(tmp_path), WriterLock(tmp_path)
    real, asked = locks._alive, 0

    def overtaken(holder: dict[str, object], where: Path, watch_s: float) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            monkeypatch.setattr(locks, "_alive", real)
            first.acquire()
            return False
        return real(holder, where, watch_s)

    monkeypatch.setattr(locks, "_alive", overtaken)
    with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        second.acquire()
    assert json.loads(path.read_text())["token"] == first._token
    first.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_read_for_a_moment_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, or a network file system that hiccups."""
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.001)
    real, lock = Path.read_bytes, WriterLock(tmp_path)
    failed = locks.threading.Event()

    def failing(path: Path) -> bytes:
        if path == lock.path and not failed.is_set():
            failed.set()
            raise OSError(24, "Too many open files")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    lock.acquire()
    assert failed.wait(20)
    beats = lock._beats
    while lock._beats < beats + 3 and not lock.lost.wait(0.001):
        pass
    assert not lock.lost.is_set()
    lock.release()


def test_a_lock_that_was_taken_is_noticed_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.01)
    lock = WriterLock(tmp_path)
    lock.acquire()
    other = tmp_path / "other"
    other.write_text(json.dumps({"token": "another", "pid": 1, "host": "h"}))
    os.replace(other, lock.path)
    while not lock.lost.wait(0.01):  # a beat that was under way may have put ours back
        other.write_text(json.dumps({"token": "another", "pid": 1, "host": "h"}))
        os.replace(other, lock.path)
    lock.release()
    assert json.loads(lock.path.read_text())["token"] == "another"
    with pytest.raises(Exception, match="taken over"):
        lock.check()


def test_a_holder_elsewhere_that_beats_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "writer.lock"
    holder = {"pid": 1, "host": "elsewhere", "token": "t", "since": "today", "beats": 0}
    path.write_text(json.dumps(holder))

    def beat(_: float) -> None:
        path.write_text(json.dumps({**holder, "beats": 1}))

    monkeypatch.setattr(locks.time, "sleep", beat)
    with pytest.raises(RunLocked, match="process 1 on elsewhere since today"):
        WriterLock(tmp_path).acquire(watch_s=5)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_torn_lock_holds_nobody_up(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "writer.lock").write_bytes(content)
    lock = WriterLock(tmp_path)
    lock.acquire(watch_s=0.05)
    assert json.loads(lock.path.read_text())["token"] == lock._token
    lock.release()


def test_a_full_disk_leaves_no_empty_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, __: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(Exception, match="the disk is full"):
            WriterLock(tmp_path).acquire()
    assert not list(tmp_path.iterdir())
