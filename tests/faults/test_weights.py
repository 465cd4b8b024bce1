"""Rows of different weights are never mixed, also where only the answers tell the version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from capturing import capture_from, eyas_command, numbered, write_prompts
from eyas import Run
from eyas.demo.server import TARGET
from fault_server import Answer, Fault, FaultServer, Policy, Target


def serving(version: str | None) -> Policy:
    def policy(_: Answer, honest: Answer) -> Fault:
        honest["meta_info"]["weight_version"] = version
        return Fault(answer=honest)

    return policy


def versions(run: Path) -> set[str | None]:
    return {trace.weight_version for trace in Run(run).traces()}


def test_another_version_in_a_later_capture(target: Target, tmp_path: Path) -> None:
    """A server with POST /generate alone tells its version with each answer only."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(8))
    with FaultServer(target, policy=serving("a")) as server:
        capture_from(server, prompts, tmp_path / "run", limit=3)
        server.policy = serving("b")
        other = capture_from(server, prompts, tmp_path / "run")
        assert versions(tmp_path / "run") == {"a"}
        assert (other.done, other.rejected, other.pending, other.exit_code) == (3, 0, 5, 4)
        assert "'b'" in (other.stopped or "")
        server.policy = serving("a")
        assert capture_from(server, prompts, tmp_path / "run").done == 8


def test_another_version_after_a_kill(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(200))
    with FaultServer(target, policy=serving("a"), delay_s=0.02) as server:
        child = subprocess.Popen(
            eyas_command("capture", str(prompts), "--no-probe", "--out", str(tmp_path / "run"), "--url",
                         server.url, "--tokenizer", str(TARGET), "--concurrency", "4",
                         "--max-new-tokens", "200"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        journal = tmp_path / "run" / "journal"
        while not any(path.stat().st_size for path in journal.glob("*.log")):
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=0.01)
        child.kill()
        child.wait()
        server.policy = serving("b")
        summary = capture_from(server, prompts, tmp_path / "run")
    assert versions(tmp_path / "run") == {"a"}
    assert summary.exit_code == 4


def test_a_version_that_is_not_told_stops_nothing(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(8))
    with FaultServer(target, policy=serving(None)) as server:
        capture_from(server, prompts, tmp_path / "run", limit=3)
        assert capture_from(server, prompts, tmp_path / "run").done == 8
