"""Signals: the first ends a capture cleanly, the second at once; neither costs a durable row."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from capturing import check_run, eyas_command, numbered, run_eyas, wait_for, write_prompts
from eyas.demo.server import TARGET
from fault_server import Answer, Fault, FaultServer, Target


def arguments(server: FaultServer, prompts: Path, run: Path) -> list[str]:
    return ["capture", str(prompts), "--no-probe", "--out", str(run), "--url", server.url, "--tokenizer",
            str(TARGET), "--concurrency", "4"]  # fmt: skip


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        eyas_command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGHUP, signal.SIGHUP]], ids=str
)
def test_a_request_to_terminate_is_an_interrupt(
    signals: list[signal.Signals], target: Target, tmp_path: Path
) -> None:
    """A terminal that closes may say so twice: once itself, once by its shell."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(400))
    with FaultServer(target, delay_s=0.02) as server:
        command = arguments(server, prompts, tmp_path / "run")
        child = start(command)
        assert wait_for(lambda: len(server.requests) > 40, child), child.communicate()
        for number in signals:
            child.send_signal(number)
        out, error = child.communicate(timeout=600)
        assert (child.returncode, "Traceback" in error) == (130, False)
        kept = len(check_run(target, tmp_path / "run"))
        assert f"400 = {kept} done + 0 rejected + {400 - kept} pending" in out
        assert not (tmp_path / "run" / "writer.lock").exists()
        server.delay_s = 0.0
        assert run_eyas(*command).returncode == 0
    assert len(check_run(target, tmp_path / "run")) == 400


def test_the_second_interrupt_ends_at_once(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(200))

    def policy(_: Answer, __: Answer) -> Fault | None:
        return Fault(delay_s=300) if len(server.requests) > 40 else None

    with FaultServer(target, policy=policy) as server:
        command = arguments(server, prompts, tmp_path / "run")
        child = start(command)
        assert wait_for(lambda: len(server.requests) >= 44, child), child.communicate()
        for _ in range(2):
            child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=600)
        assert (child.returncode, "Traceback" in error) == (130, False)
        before = {trace.id for trace in check_run(target, tmp_path / "run")}
        server.policy = None
        assert run_eyas(*command).returncode == 0
    after = {trace.id for trace in check_run(target, tmp_path / "run")}
    assert before <= after
    assert len(after) == 200


def test_an_interrupt_before_anything_was_sent(target: Target, tmp_path: Path) -> None:
    """The server does not even say who it is."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))

    def policy(_: Answer, __: Answer) -> Fault:
        return Fault(delay_s=300)

    with FaultServer(target, policy=policy) as server:
        child = start(arguments(server, prompts, tmp_path / "run"))
        assert wait_for(lambda: server.running > 0, child), child.communicate()
        child.send_signal(signal.SIGINT)
        out, error = child.communicate(timeout=600)
    assert (child.returncode, out) == (130, "")
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_hang_up_that_is_ignored_stays_ignored(target: Target, tmp_path: Path) -> None:
    """As under nohup."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(100))
    with FaultServer(target, delay_s=0.02) as server:
        child = subprocess.Popen(
            eyas_command(*arguments(server, prompts, tmp_path / "run")), stdout=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert wait_for(lambda: len(server.requests) > 40, child), child.communicate()
        child.send_signal(signal.SIGHUP)
        _, error = child.communicate(timeout=600)
    assert (child.returncode, "Traceback" in error) == (0, False)
    assert len(check_run(target, tmp_path / "run")) == 100


@pytest.mark.parametrize("reader", ["stdout", "stderr"])
def test_a_reader_that_goes_away_ends_no_capture(
    reader: str, target: Target, tmp_path: Path
) -> None:
    """As `| head` does, or a terminal that is gone."""
    rows = [*numbered(100), {"id": "bad", "prompt": 5}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        child = start(arguments(server, prompts, tmp_path / "run"))
        gone, other = child.stdout, child.stderr
        if reader == "stderr":
            gone, other = other, gone
        assert gone is not None
        assert other is not None
        gone.close()
        said = other.read()
        assert child.wait(timeout=600) == 3
    assert "Traceback" not in said
    assert len(check_run(target, tmp_path / "run")) == 100
