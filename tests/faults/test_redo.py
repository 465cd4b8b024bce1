"""Rows that are done again: cut ones from their exact ids, refused ones anew, good ones never."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, check_run, config_for, numbered, paired, run_eyas, write_prompts
from eyas import Run, Summary, capture
from eyas.findings import Findings
from eyas.store.redo import Redo
from eyas.tokens import load_tokenizer
from eyas.verify.run import verify_run
from fault_server import Fault, FaultServer, Target, lying
from faults.test_continue import continuing

ROWS = [*numbered(40), *paired(20), {"id": "bad", "prompt": 5}]


def redo(server: FaultServer, out: Path, which: str, **more: Any) -> Summary:
    config = config_for(server, out.parent / "p.jsonl", out, **more)
    summary = capture(config, probe=False, redo=Redo(which, more.pop("reasons", ())))
    check_run(server.target, out, summary)
    findings = Findings()
    verify_run(Run(out), load_tokenizer(config.tokenizer), findings)
    assert not findings.failed, [f.text for f in findings.of("failed")]
    return summary


def good_rows(out: Path) -> dict[str, tuple[list[int], float]]:
    return {row.id: (row.output_ids, row.finished_at) for row in Run(out).traces() if row.complete}


def test_cut_rows_go_on_from_their_ids(target: Target, tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", ROWS)
    out = tmp_path / "run"
    with FaultServer(target, policy=continuing(target)) as server:
        first = capture_from(server, tmp_path / "p.jsonl", out, max_new_tokens=15)
        assert first.truncated > 10
        before = good_rows(out)
        server.requests.clear()
        second = redo(server, out, "length", max_new_tokens=300)
        begun = [r for r in server.requests if r["sampling_params"]["max_new_tokens"] == 285]
    assert (second.truncated, second.pending, second.rejected) == (0, 0, 1)
    assert len(begun) == first.truncated  # each was asked for the rest of its budget only
    rows = {row.id: row for row in Run(out).traces()}
    assert len(rows) == 80
    for row_id, (ids, finished_at) in before.items():
        assert (rows[row_id].output_ids, rows[row_id].finished_at) == (ids, finished_at)
    continued = [row for row in rows.values() if row.joints]
    assert {tuple(row.joints) for row in continued} == {(15,)}
    assert not (out / "partials").exists()
    kept = list((out / "archive").rglob("traces/*.parquet"))
    assert kept


def test_refused_rows_are_done_anew(target: Target, tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", ROWS)
    out = tmp_path / "run"
    with FaultServer(target, policy=lying("closer_missing", 0.3)) as server:
        first = capture_from(server, tmp_path / "p.jsonl", out)
        assert first.rejected > 5
        before = good_rows(out)
        server.policy = None
        second = redo(server, out, "rejected")
    assert (second.done, second.rejected, second.pending) == (80, 1, 0)
    after = good_rows(out)
    assert {row_id: after[row_id] for row_id in before} == before


def test_only_the_reasons_that_are_asked_for(target: Target, tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", ROWS)
    out = tmp_path / "run"
    with FaultServer(target, policy=lying("closer_missing", 0.3)) as server:
        first = capture_from(server, tmp_path / "p.jsonl", out)
        server.policy = None
        config = config_for(server, tmp_path / "p.jsonl", out)
        other = capture(config, probe=False, redo=Redo("rejected", ("abort",)))
        assert (other.rejected, other.new) == (first.rejected, 0)
        mended = capture(config, probe=False, redo=Redo("rejected", ("missing_closer",)))
    assert mended.rejected == 1


def test_a_redo_that_was_cut_off_goes_on_with_the_same_command(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step of putting aside was the last: nothing is lost, nothing is there twice."""
    write_prompts(tmp_path / "p.jsonl", ROWS)
    with FaultServer(target, policy=continuing(target)) as server:
        whole = tmp_path / "whole"
        capture_from(server, tmp_path / "p.jsonl", whole, max_new_tokens=15)
        for step in range(40):
            out = tmp_path / f"run{step}"
            shutil.copytree(whole, out)
            if not dies_at(step, lambda out=out: redo(server, out, "length", max_new_tokens=300),
                           monkeypatch):  # fmt: skip
                break
            for lock in out.glob("writer.lock*"):
                lock.unlink()
            summary = redo(server, out, "length", max_new_tokens=300)
            assert (summary.done, summary.rejected, summary.pending) == (80, 1, 0)
            shutil.rmtree(out)
        else:
            pytest.fail("more steps than were tried")
    assert step > 5


class _Died(BaseException):
    pass


def dies_at(step: int, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let a process die at its n-th rename, link or folder while it puts rows aside."""
    from eyas import session

    left = [step]
    real = session.put_aside

    def dying(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            if left[0] == 0:
                raise _Died
            left[0] -= 1
            return original(*arguments, **more)

        return call

    def put_aside(run: Path, what: Redo) -> Any:
        with monkeypatch.context() as patch:
            for name in ("replace", "link", "mkdir"):
                patch.setattr(os, name, dying(name))
            return real(run, what)

    with monkeypatch.context() as patch:
        patch.setattr(session, "put_aside", put_aside)
        try:
            do()
        except _Died:
            return True
    return False


def test_the_command(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(20))
    out = str(tmp_path / "run")
    with FaultServer(target, policy=continuing(target)) as server:
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=15)
        for arguments, said in (
            (["--which", "length"], "--max-new-tokens"),
            (["--which", "rejected", "--reason", "whim"], "'whim'"),
            (["--which", "all"], "length and rejected"),
            (["--which", "length", "--reason", "x"], "--which rejected"),
        ):
            refused = run_eyas("redo", out, *arguments)
            assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
            assert said in refused.stderr
        before = (tmp_path / "run" / "config.yaml").read_bytes()
        nothing = run_eyas("redo", out, "--which", "rejected", "--max-new-tokens", "99")
        assert nothing.returncode == 0
        assert "nothing to do again" in nothing.stderr
        assert Run(out).manifest.max_new_tokens == 15
        assert b"max_new_tokens: 15" in before
        done = run_eyas("redo", out, "--which", "length", "--max-new-tokens", "300", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["truncated"] == 0
    assert "redo" in done.stderr


def test_an_interrupted_redo_goes_on_with_the_same_command(target: Target, tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", ROWS)
    out = tmp_path / "run"
    with FaultServer(target, policy=continuing(target)) as server:
        capture_from(server, tmp_path / "p.jsonl", out, max_new_tokens=15)
    with FaultServer(target, policy=lambda _, __: Fault(status=401)) as refusing:
        config = config_for(refusing, tmp_path / "p.jsonl", out, max_new_tokens=300)
        cut_off = capture(config, probe=False, redo=Redo("length", max_new_tokens=300))
        assert cut_off.pending > 10
    with FaultServer(target, policy=continuing(target)) as server:
        again = run_eyas("redo", str(out), "--which", "length", "--max-new-tokens", "300",
                         "--url", server.url, "--no-probe")  # fmt: skip
        assert again.returncode == 3, again.stdout + again.stderr
        assert "put aside earlier" in again.stderr
    rows = list(Run(out).traces())
    assert len(rows) == 80
    assert all(row.complete for row in rows)
    assert any(row.joints for row in rows)
