"""A clock that is set while a capture runs: nothing is waited for, lost or doubled because of it."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path

import pytest

from capturing import capture_from, check_run, numbered, paired, write_prompts
from eyas import Run
from eyas.engines import roster, tries
from fault_server import Answer, Fault, FaultServer, Target

_real = time.time


@pytest.fixture(params=["back", "forward", "about"])
def jumps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is hours away from the one before."""
    calls, chosen = itertools.count(), random.Random(0)
    steps = {"back": lambda: -7200 * next(calls), "forward": lambda: 7200 * next(calls),
             "about": lambda: chosen.uniform(-1e6, 1e6)}  # fmt: skip
    monkeypatch.setattr(time, "time", lambda: _real() + steps[request.param]())


def test_a_capture_with_faults(
    jumps: None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.01)
    chosen = random.Random(1)
    faults = [
        Fault(status=503, headers={"Retry-After": "0.01"}),
        Fault(drop=True), Fault(status=500), Fault(away_s=0.02), Fault(crash_s=0.02),
    ]  # fmt: skip
    hit: set[str] = set()

    def policy(body: Answer, _: Answer) -> Fault | None:
        prompt = json.dumps(body["input_ids"])
        if prompt in hit or chosen.random() > 0.3:
            return None
        hit.add(prompt)
        return chosen.choice(faults)

    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(40), *paired(20)])
    began = time.monotonic()
    with FaultServer(target, policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run", limit=30)
        again = capture_from(server, prompts, tmp_path / "run")
    took = time.monotonic() - began
    assert (summary.done, summary.pending) == (30, 0)
    assert (again.done, again.new, again.pending) == (80, 50, 0)
    assert 0 <= summary.seconds + again.seconds <= took
    assert len(check_run(target, tmp_path / "run", again)) == 80


def test_rows_keep_a_time_whatever_it_was(jumps: None, target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(3), {"id": "bad", "prompt": 5}])
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert len({row.finished_at for row in [*run.traces(), *run.rejected()]}) == 4
