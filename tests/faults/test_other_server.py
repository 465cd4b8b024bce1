"""A server that comes back as another one is refused by name, and no row of it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from capturing import capture_from, check_run, config_for, numbered, write_prompts
from eyas import Run, capture
from eyas.engines import roster
from eyas.errors import FingerprintError
from fault_server import Answer, Fault, FaultServer, Target

INFO = {"model_path": "m", "version": "0.5.23", "weight_version": "a", "context_length": 2048}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"model_path": "n"}, "came back with n, not m"),
        ({"weight_version": "b"}, "weights version 'b', and the run began with 'a'"),
        ({"version": "0.5.22"}, "version 0.5.22 of sglang, not 0.5.23"),
        ({"version": "0.5.3"}, "SGLang 0.5.3 puts the prompt's last ids"),
        ({"context_length": 1024}, "a context of 1024 ids, not 2048"),
    ],
    ids=["model", "weights", "version", "a wrong version", "context"],
)
def test_after_a_restart(
    other: dict[str, object], said: str, target: Target, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.02)
    crashed: list[int] = []

    def policy(_: Answer, honest: Answer) -> Fault | None:
        honest["meta_info"]["weight_version"] = server.info["weight_version"]  # type: ignore[index]
        if len(server.requests) <= 20:
            return Fault(answer=honest)
        if crashed:
            return Fault(answer=honest)
        crashed.append(1)
        server.info = {**INFO, **other}
        return Fault(crash_s=0.05)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(60))
    with FaultServer(target, policy=policy, info=dict(INFO), delay_s=0.01) as server:
        summary = capture_from(server, prompts, tmp_path / "run", concurrency=4, give_up_after=0.2)
        assert 0 < summary.done < 60
        assert (summary.rejected, summary.exit_code) == (0, 4)
        assert said in (summary.stopped or "")
        if "model_path" in other or "weight_version" in other:
            with pytest.raises(FingerprintError):
                capture_from(server, prompts, tmp_path / "run")
        server.info = dict(INFO)
        again = capture_from(server, prompts, tmp_path / "run")
    assert (again.done, again.rejected, again.pending) == (60, 0, 0)
    assert {trace.weight_version for trace in Run(tmp_path / "run").traces()} == {"a"}
    check_run(target, tmp_path / "run", again)


@pytest.mark.parametrize("instead", [{"model_path": "n"}, {"weight_version": "b"}])
def test_it_is_waited_for_until_it_is_what_it_was(
    instead: dict[str, object], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as `--give-up-after` says."""
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.02)
    said: list[str] = []
    asked_then: list[int] = []
    crashed: list[int] = []

    def policy(_: Answer, honest: Answer) -> Fault | None:
        honest["meta_info"]["weight_version"] = server.info["weight_version"]  # type: ignore[index]
        if len(server.requests) > 20 and not crashed:
            crashed.append(1)
            server.info = {**INFO, **instead}
            return Fault(crash_s=0.05)
        return Fault(answer=honest)

    def say(line: str) -> None:
        said.append(line)
        if "came back with n" in line or "weights version 'b'" in line:
            asked_then.append(len(server.requests))
            server.info = dict(INFO)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(60))
    with FaultServer(target, policy=policy, info=dict(INFO), delay_s=0.01) as server:
        config = config_for(server, prompts, tmp_path / "run", concurrency=4)
        summary = capture(config, probe=False, say=say)
    assert (summary.done, summary.rejected, summary.stopped) == (60, 0, None)
    assert len(asked_then) == 1
    assert any("answers again" in line for line in said)
    assert {trace.weight_version for trace in Run(tmp_path / "run").traces()} == {"a"}
    check_run(target, tmp_path / "run", summary)
