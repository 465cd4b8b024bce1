"""The status file, and how a run stands for one who looks at it from outside."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capturing import (
    capture_from,
    config_for,
    eyas_command,
    numbered,
    run_eyas,
    wait_for,
    write_prompts,
)
from eyas import Run, capture
from eyas.demo.server import TARGET
from eyas.errors import DamagedRun
from eyas.progress import Progress, ServerProgress, Summary
from eyas.standing import status_of_run
from eyas.status import Status, StatusFile
from eyas.store import archive, prepare_directory
from fault_server import FaultServer, Target

HOSTILE = "\x1b[2J\u202e\ud800 \r"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(new: int = 5, seconds: float = 1.0) -> Progress:
    return Progress(
        done=new, new=new, input=20, input_known=True, prompt_tokens=10 * new,
        output_tokens=100 * new, in_flight=4, seconds=seconds, problems=[f"bad {HOSTILE}"],
        servers=[ServerProgress(url="http://a:1", slots=4, in_flight=4, queued=0, answered=new)],
        finish_reasons={"stop": new},
    )  # fmt: skip


def summary(**more: Any) -> Summary:
    values = {
        "run": "run", "input": 20, "done": 18, "rejected": 2, "pending": 0, "extra": 0,
        "truncated": 1, "new": 20, "prompt_tokens": 200, "output_tokens": 2000, "seconds": 9.0,
        **more,
    }  # fmt: skip
    return Summary(**values)


def saved(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "status.json").read_text(encoding="utf-8"))
    return value


# -- writing -------------------------------------------------------------------------------------


def test_it_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    clock = Clock()
    file = StatusFile(tmp_path, clock=clock)
    seen = []
    for half in range(21):
        clock.now = half / 2
        file.update(progress(half, half / 2))
        if file._writing is not None:
            file._writing.result()
        seen.append(saved(tmp_path)["counts"]["new"])
    assert sorted(set(seen)) == [0, 4, 8, 12, 16, 20]
    now = saved(tmp_path)
    assert (now["state"], now["exit_code"], now["pid"]) == ("running", None, os.getpid())
    assert now["counts"]["pending"] == 0
    assert now["rates"]["last_minute"]["output_tokens"] == pytest.approx(200)
    assert now["servers"][0]["in_flight"] == 4
    assert now["finish_reasons"] == {"stop": 20}
    assert now["problems"] == ["bad \x1b[2J\u202e\\ud800 \r"]
    file.finish(summary())
    file.update(progress(99))
    end = saved(tmp_path)
    assert (end["state"], end["exit_code"], end["stopped"]) == ("finished", 3, None)
    assert end["counts"] == {
        "input": 20, "total": 20, "total_known": True, "done": 18, "rejected": 2, "pending": 0,
        "truncated": 1, "new": 20,
    }  # fmt: skip
    assert (end["eta_seconds"], end["in_flight"], end["servers"][0]["in_flight"]) == (None, 0, 0)
    assert end["started"] <= end["updated"]
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("more", "state", "code"),
    [
        ({"rejected": 0, "done": 20}, "finished", 0),
        ({"pending": 3, "done": 15}, "stopped", 4),
        ({"stopped": f"the server {HOSTILE}"}, "stopped", 4),
        ({"input_known": False}, "stopped", 4),
        ({"interrupted": True, "pending": 3}, "interrupted", 130),
    ],
)
def test_how_it_ended(more: dict[str, Any], state: str, code: int, tmp_path: Path) -> None:
    StatusFile(tmp_path).finish(summary(**more))
    end = Status.load(tmp_path)
    assert end is not None
    assert (end.state, end.exit_code, end.code) == (state, code, code)


def test_a_capture_that_ends_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StatusFile(tmp_path) as file:
        file.update(progress())
        raise ZeroDivisionError("no number")
    end = saved(tmp_path)
    assert (end["state"], end["stopped"]) == ("stopped", "ZeroDivisionError('no number')")


def test_a_reader_sees_it_whole_or_not_at_all(tmp_path: Path) -> None:
    clock = Clock()
    file, seen = StatusFile(tmp_path, every_s=0.0, clock=clock), set()
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        last = False
        while not last:
            last = ended.is_set()
            status = Status.load(tmp_path)
            seen.add(None if status is None else status.counts.new)
            begun.set()

    file.update(progress(0))
    assert file._writing is not None
    file._writing.result()
    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    for new in range(1, 300):
        file.update(progress(new))
    file.finish(summary(new=300))
    ended.set()
    reader.join()
    assert 300 in seen
    assert None not in seen
    assert len(seen) > 1


@pytest.mark.parametrize("step", ["write", "rename", "all"])
def test_a_full_disk_hurts_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StatusFile(tmp_path, every_s=0.0)
    file.update(progress(1))
    assert file._writing is not None
    file._writing.result()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(path: Path, text: str, **_: Any) -> None:
        with path.open("w") as opened:
            opened.write(text[:10])
        full()

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        if step != "rename":
            patch.setattr(Path, "write_text", half)
        if step == "all":
            patch.setattr(Path, "unlink", full)
        file.update(progress(2))
        assert file._writing.result() is None
        if step != "all":
            assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
        assert saved(tmp_path)["counts"]["new"] == 1
    file.finish(summary())
    assert saved(tmp_path)["counts"]["new"] == 20
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_slow_disk_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, real = threading.Event(), os.replace

    def slow(*paths: Any) -> None:
        assert free.wait(600)
        real(*paths)

    monkeypatch.setattr(os, "replace", slow)
    file = StatusFile(tmp_path, every_s=0.0)
    for new in range(100):  # would never return if it waited
        file.update(progress(new))
    free.set()
    file.finish(summary())
    assert saved(tmp_path)["state"] == "finished"


def test_a_directory_that_is_gone_hurts_nothing(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "gone")
    file.update(progress())
    file.finish(summary())
    assert not (tmp_path / "gone").exists()


def test_the_run_knows_the_file(target: Target, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "status.json").write_text("{}")
    prepare_directory(new)
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    StatusFile(tmp_path / "run").finish(summary())
    aside = archive(tmp_path / "run")
    assert (aside / "status.json").exists()
    assert not (tmp_path / "run" / "status.json").exists()


# -- reading -------------------------------------------------------------------------------------


def command(server: FaultServer, prompts: Path, out: Path, *more: str) -> list[str]:
    return ["capture", str(prompts), "--no-probe", "--out", str(out), "--url", server.url,
            "--tokenizer", str(TARGET), "--max-new-tokens", "200", "--concurrency", "16",
            *more]  # fmt: skip


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        eyas_command(*arguments), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def started(run: Path) -> bool:
    status = Status.load(run)
    return status is not None and status.counts.new > 0


def shown(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = run_eyas("status", *arguments, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_running_a_killed_and_a_finished_run(target: Target, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(300)), tmp_path / "run"
    with FaultServer(target, delay_s=0.2) as server:
        arguments = command(server, prompts, run)
        child = start(*arguments)
        try:
            assert wait_for(lambda: started(run), child)
            server.delay_s = 3600.0  # it stays as it is, however long the looking takes
            code, now = shown(str(run))
            assert (code, now["state"], now["pid"]) == (0, "running", child.pid)
            assert now["exit_code"] is None
            assert now["counts"]["total"] == 300
            assert now["servers"][0]["url"] == server.url
            text = run_eyas("status", str(run)).stdout
            assert f"running  process {child.pid} on " in text
            assert "/300 (" in text
        finally:
            child.kill()
            child.wait()
        code, now = shown(str(run))
        assert (code, now["state"], now["exit_code"]) == (4, "killed", 4)
        text = run_eyas("status", str(run), "--watch")
        assert text.returncode == 4
        assert "was killed" in text.stdout
        assert "run the same command again to go on" in text.stdout
        server.delay_s = 0.0
        assert run_eyas(*arguments).returncode == 0
    code, now = shown(str(run))
    assert (code, now["state"], now["exit_code"]) == (0, "finished", 0)
    assert now["counts"]["done"] == 300


def test_watching_until_the_end(target: Target, tmp_path: Path) -> None:
    rows = [*numbered(600), {"id": "bad", "prompt": 5}]
    prompts, run = write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "run"
    watch = eyas_command("status", str(run), "--watch", "--json")
    with FaultServer(target, delay_s=0.5) as server:
        child = start(*command(server, prompts, run))
        assert wait_for(lambda: started(run), child)
        with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            lines = [watching.stdout.readline()]
            server.delay_s = 0.0  # it was seen while it runs; now it may end
            lines += watching.stdout
        child.wait()
    states = [json.loads(line)["state"] for line in lines]
    assert states[0] == "running"
    assert states[-1] == "finished"
    assert set(states[:-1]) == {"running"}
    assert watching.returncode == 3 == child.returncode
    assert "1 rejected" in run_eyas("status", str(run), "--watch").stdout


def test_an_interrupted_run(target: Target, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(500)), tmp_path / "run"
    with FaultServer(target, delay_s=0.2) as server:
        child = start(*command(server, prompts, run))
        assert wait_for(lambda: started(run), child)
        child.terminate()
        assert child.wait(600) == 130
    code, now = shown(str(run))
    assert (code, now["state"], now["exit_code"]) == (130, "interrupted", 130)
    assert now["counts"]["pending"] == 500 - now["counts"]["done"]


def test_a_run_without_a_status_file(target: Target, tmp_path: Path) -> None:
    """As a capture from Python leaves it, at its end and while it runs."""
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(20)), tmp_path / "run"
    seen: list[Status] = []
    with FaultServer(target) as server:
        config = config_for(server, prompts, run)
        capture(config, probe=False, on_progress=lambda _: seen.append(status_of_run(run)))
    assert not (run / "status.json").exists()
    assert {status.state for status in seen} == {"running"}
    assert {status.pid for status in seen} == {os.getpid()}
    assert seen[-1].counts.done == 20
    end = status_of_run(run)
    assert (end.state, end.counts.done, end.counts.pending, end.code) == ("finished", 20, 0, 0)


def test_a_status_of_an_earlier_capture_is_not_believed(target: Target, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(20)), tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run, limit=5)
        file = StatusFile(run)
        file.update(progress())
        file.finish(summary(input=5, done=5, rejected=0, pending=0))
        assert status_of_run(run).counts.done == 5
        capture_from(server, prompts, run)  # from Python: no status
    assert status_of_run(run).counts.done == 20
    stale = Status.load(run)
    assert stale is not None
    stale.state = "running"  # of one that was killed before that
    (run / "status.json").write_text(stale.model_dump_json())
    waited: list[float] = []
    assert status_of_run(run, sleep=waited.append).state == "finished"
    assert waited


def test_one_that_ends_this_moment_is_waited_for(target: Target, tmp_path: Path) -> None:
    """The lock is given back a moment before the last status is written."""
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(5)), tmp_path / "run"
    with FaultServer(target) as server:
        last = capture_from(server, prompts, run)
    manifest = Run(run).manifest
    manifest.counts = {}
    manifest.save(run)
    file = StatusFile(run)
    file.update(progress())
    assert file._writing is not None
    file._writing.result()
    assert status_of_run(run, sleep=lambda _: None).state == "killed"
    assert status_of_run(run, sleep=lambda _: file.finish(last)).state == "finished"


def test_a_holder_on_another_host(target: Target, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(5)), tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run)
    lock = run / "writer.lock"
    lock.write_text(json.dumps({"pid": 77, "host": "elsewhere", "token": "x", "beats": 1}))
    fresh = status_of_run(run)
    assert (fresh.state, fresh.pid, fresh.host) == ("running", 77, "elsewhere")
    os.utime(lock, (0, 0))
    assert status_of_run(run, watch_s=0.05).state == "killed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "dancing"}', '{"format": 1}', "\x00"])
def test_a_status_that_cannot_be_read(text: str, target: Target, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(5)), tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run)
    (run / "status.json").write_text(text)
    assert status_of_run(run).counts.done == 5


def test_what_others_wrote_is_escaped(target: Target, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(5)), tmp_path / "run"
    evil = "\x1b[2J\x9b\u202e\r\n"
    with FaultServer(target) as server:
        capture_from(server, prompts, run)
    status = Status(state="stopped", stopped=evil, host=evil, pid=1, problems=[evil])
    status.counts.input = status.counts.done = 5
    status.finish_reasons = {evil: 1}
    (run / "status.json").write_text(status.model_dump_json())
    for more in ([], ["--json"], ["--watch"]):
        done = run_eyas("status", str(run), *more)
        assert done.returncode == 4
        assert all(char not in done.stdout for char in "\x1b\x9b\u202e\r")


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DamagedRun):
        status_of_run(tmp_path)
    done = run_eyas("status", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_full_disk_and_a_capture(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status file that can never be written changes nothing about the rows."""
    prompts, run = write_prompts(tmp_path / "p.jsonl", numbered(20)), tmp_path / "run"

    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with FaultServer(target) as server:
        files: list[StatusFile] = []
        monkeypatch.setattr(Path, "write_text", full)
        end = capture(
            config_for(server, prompts, run),
            probe=False,
            on_start=lambda session: files.append(StatusFile(session.run.path)),
            on_progress=lambda now: files[0].update(now),
        )
        files[0].finish(replace(end))
    assert (end.done, end.exit_code) == (20, 0)
    assert not (run / "status.json").exists()
