"""Limits of the machine and of the server: they slow a capture down, and end none."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from capturing import capture_from, check_run, eyas_command, numbered, write_prompts
from eyas.demo.server import TARGET
from fault_server import Answer, Fault, FaultServer, Target


@pytest.mark.parametrize("hard", [4096, 150], ids=["may be raised", "fixed"])
def test_more_requests_than_open_files_are_allowed(
    hard: int, target: Target, tmp_path: Path
) -> None:
    """Many systems allow 1,024 open files, and servers run more requests at once than that."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(600))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))

    with FaultServer(target, delay_s=0.3) as server:
        done = subprocess.run(
            eyas_command("capture", str(prompts), "--no-probe", "--out", str(tmp_path / "run"), "--url",
                         server.url, "--tokenizer", str(TARGET), "--concurrency", "300"),
            capture_output=True, text=True, timeout=600, preexec_fn=limited,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "too many open files" not in done.stderr
    assert len(check_run(target, tmp_path / "run")) == 600


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_more_ids_than_were_asked_for_are_refused(
    finish: str, target: Target, tmp_path: Path
) -> None:
    """Every count fits, no text comes, and yet the server cannot have sampled them so."""

    def policy(body: Answer, honest: Answer) -> Fault:
        ids = [*body["input_ids"][1:3], *honest["output_ids"]]
        honest["output_ids"] = ids
        honest["meta_info"]["completion_tokens"] = len(ids)
        if finish == "length":
            honest["meta_info"]["finish_reason"] = {"type": "length", "length": len(ids) - 2}
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "What is 2 + 2?"}])
    with FaultServer(target, text=False) as server:
        capture_from(server, prompts, tmp_path / "honest")
        budget = len(check_run(target, tmp_path / "honest")[0].output_ids)
        server.policy = policy
        summary = capture_from(server, prompts, tmp_path / "run", max_new_tokens=budget)
    assert (summary.done, summary.rejected) == (0, 1)
