"""Processes that are killed: each row is there once in the end, and right."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from capturing import check_run, eyas_command, numbered, paired, run_eyas, wait_for, write_prompts
from eyas import Run
from eyas.demo.server import TARGET
from fault_server import Answer, Fault, FaultServer, Target


def arguments(server: FaultServer, prompts: Path, out: Path, *more: str) -> list[str]:
    return ["capture", str(prompts), "--no-probe", "--out", str(out), "--url", server.url, "--tokenizer",
            str(TARGET), "--max-new-tokens", "200", "--concurrency", "16", *more]  # fmt: skip


@pytest.mark.parametrize("rows", [numbered(600), paired(300)], ids=["one turn", "two turns"])
def test_kill_at_any_moment(rows: list[dict[str, object]], target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    chosen = random.Random(4)
    with FaultServer(target, delay_s=0.02) as server:
        command = arguments(server, prompts, tmp_path / "run")
        for _ in range(4):
            child = subprocess.Popen(eyas_command(*command), stderr=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL)  # fmt: skip
            seen = len(server.requests)
            more = chosen.randint(1, 140)
            wait_for(lambda seen=seen, more=more: len(server.requests) >= seen + more, child)
            child.kill()
            child.wait()
            durable = {trace.id for trace in check_run(target, tmp_path / "run")}
        last = run_eyas(*command)
        asked = len(server.requests)
    assert last.returncode == 0, last.stderr
    traces = check_run(target, tmp_path / "run")
    assert len(traces) == 600
    assert durable <= {trace.id for trace in traces}
    assert asked <= 600 + 4 * 3 * 16  # redone: what was in flight, or answered that moment
    assert not list((tmp_path / "run" / "journal").iterdir())


def test_an_interrupt_keeps_what_was_finished(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2000))
    with FaultServer(target, delay_s=0.05) as server:
        command = arguments(server, prompts, tmp_path / "run")
        child = subprocess.Popen(eyas_command(*command), stderr=subprocess.PIPE,
                                 stdout=subprocess.PIPE)  # fmt: skip
        wait_for(lambda: len(server.requests) > 100, child)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=600)
        assert child.returncode == 130
        kept = len(check_run(target, tmp_path / "run"))
        assert kept >= 100 - 16
        assert f"2,000 = {kept:,} done + 0 rejected + {2000 - kept:,} pending" in out.decode()
        server.delay_s = 0.0
        again = run_eyas(*command)
    assert again.returncode == 0
    assert len(check_run(target, tmp_path / "run")) == 2000


def test_one_writer_at_a_time(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(500))

    def policy(_: Answer, __: Answer) -> Fault | None:
        return Fault(delay_s=300) if len(server.requests) > 10 else None

    with FaultServer(target, policy=policy) as server:
        command = arguments(server, prompts, tmp_path / "run")
        child = subprocess.Popen(eyas_command(*command), stderr=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL)  # fmt: skip
        wait_for(lambda: len(server.requests) > 10, child)
        second = run_eyas(*command)
        child.kill()
        child.wait()
    assert second.returncode == 2
    assert f"written by process {child.pid}" in second.stderr
    assert "Traceback" not in second.stderr


def test_slow_rows_are_not_lost(target: Target, tmp_path: Path) -> None:
    """One answer in ten takes ten times as long; the process is killed halfway."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(200))
    with FaultServer(target, delay_s=0.05) as server:

        def slow(body: Answer, honest: Answer) -> Fault | None:
            one_in_ten = sum(body["input_ids"]) % 10 == 0
            return Fault(answer=honest, delay_s=0.5) if one_in_ten else None

        server.policy = slow
        command = arguments(server, prompts, tmp_path / "run")
        command[command.index("--concurrency") + 1] = "32"
        child = subprocess.Popen(eyas_command(*command), stderr=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL)  # fmt: skip
        wait_for(lambda: len(server.requests) > 130, child)
        child.kill()
        child.wait()
        assert run_eyas(*command).returncode == 0
        asked = len(server.requests)
    ids = [trace.id for trace in check_run(target, tmp_path / "run")]
    assert sorted(ids) == sorted(f"q{at}/0/0" for at in range(200))
    # At most what was in flight, and what was answered in the last moments before the kill.
    assert asked <= 200 + 2 * 32
    assert Run(tmp_path / "run").manifest.counts["done"] == 200
