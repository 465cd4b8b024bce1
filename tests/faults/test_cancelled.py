"""Requests that are given up are cancelled on the server: their connections are closed."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from capturing import (
    capture_from,
    check_run,
    config_for,
    eyas_command,
    numbered,
    wait_for,
    write_prompts,
)
from eyas import capture, fleet
from eyas.demo.server import TARGET
from eyas.engines import tries
from fault_server import Answer, Fault, FaultServer, Target, asks_one_token


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_TEND_S", 0.02)
    monkeypatch.setattr(fleet, "_QUIET_S", 0.3)
    monkeypatch.setattr(fleet, "_HEALTH_S", 0.1)
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tries, "_ONE_TOKEN_S", 0.3)


def test_those_that_a_server_has_forgotten(target: Target, tmp_path: Path) -> None:
    stalled: set[str] = set()

    def policy(body: Answer, _: Answer) -> Fault | None:
        prompt = str(body["input_ids"])
        if asks_one_token(body) or prompt in stalled or len(server.requests) % 10:
            return None
        stalled.add(prompt)
        return Fault(delay_s=3600.0)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(100))
    with FaultServer(target, policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run", concurrency=4)
        assert server.running == 0
    assert (summary.done, summary.rejected, summary.pending) == (100, 0, 0)
    assert server.cancelled == len(stalled) > 5


def test_one_that_is_forgotten_each_time_is_rejected_with_its_history(
    target: Target, tmp_path: Path
) -> None:
    """The others are not held up by it, and the capture ends."""

    def policy(body: Answer, _: Answer) -> Fault | None:
        lost = len(body["input_ids"]) == longest and not asks_one_token(body)
        return Fault(delay_s=3600.0) if lost else None

    rows = [{"id": "lost", "prompt": "one that is longer than all the others"}, *numbered(60)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    longest = len(target.tokenizer.encode("<|user|>" + str(rows[0]["prompt"]))) + 3
    with FaultServer(target, policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run", concurrency=4, tries=2)
    assert (summary.done, summary.rejected, summary.pending) == (60, 1, 0)
    assert summary.reasons == {"connection_lost": 1}
    assert server.cancelled == 2


def test_those_that_move_to_another_server(target: Target, tmp_path: Path) -> None:
    stuck = threading.Event()

    def policy(_: Answer, __: Answer) -> Fault | None:
        if len(stalls.requests) > 20:
            stuck.set()
        return Fault(delay_s=3600.0) if stuck.is_set() else None

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(400))
    with (
        FaultServer(target, policy=policy, delay_s=0.01) as stalls,
        FaultServer(target, delay_s=0.02) as works,
    ):
        config = config_for(stalls, prompts, tmp_path / "run", url=[stalls.url, works.url],
                            concurrency=4)  # fmt: skip
        summary = capture(config, probe=False)
        held = stalls.running
    assert (summary.done, summary.rejected, summary.pending) == (400, 0, 0)
    assert held == 0
    assert stalls.cancelled >= 4
    check_run(target, tmp_path / "run", summary)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_those_of_a_capture_that_is_ended(
    number: signal.Signals, target: Target, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(100))

    def policy(_: Answer, __: Answer) -> Fault | None:
        return Fault(delay_s=3600.0) if len(server.requests) > 40 else None

    with FaultServer(target, policy=policy) as server:
        command = eyas_command("capture", str(prompts), "--no-probe", "--out",
                               str(tmp_path / "run"), "--url", server.url, "--tokenizer",
                               str(TARGET), "--concurrency", "4")  # fmt: skip
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert wait_for(lambda: server.running == 4 and len(server.requests) >= 44, child), (
            child.communicate()
        )
        child.send_signal(number)
        _, error = child.communicate(timeout=600)
        while server.running:  # the server needs a moment to see it
            threading.Event().wait(0.01)
    assert (child.returncode, "Traceback" in error) == (130, False)
    assert server.cancelled == 4
    assert len(check_run(target, tmp_path / "run")) == 40
