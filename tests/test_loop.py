"""The loop is never held up: while one thing takes long, the others' requests come and go."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, paired, write_prompts
from eyas.store.journal import Segment
from eyas.turns import Turns
from fault_server import Answer, FaultServer, Target


@pytest.mark.parametrize(
    ("of", "step", "call", "requests"),
    [
        (Turns, "prepare", 2, 64),  # rendering and tokenizing: all of the first batch is asked
        (Turns, "next_turn", 1, 40),
        (Segment, "write", 1, 150),
        (Segment, "sync", 1, 150),
    ],
    ids=["prompts", "next turns", "writing", "the disk"],
)
def test_what_takes_long_holds_up_no_request(
    of: type, step: str, call: int, requests: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One call returns only once so many requests have reached the server."""
    calls = 0
    seen: list[int] = []
    enough = threading.Event()
    ours, plain = threading.Lock(), getattr(of, step)

    def slow(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal calls
        with ours:
            calls += 1
            mine = calls
        if mine == call:
            assert threading.current_thread() is not threading.main_thread()
            enough.wait(60)  # for a loop that is held up
            seen.append(len(server.requests))
        return plain(self, *args, **more)

    def policy(_: Answer, __: Answer) -> None:
        if len(server.requests) >= requests:
            enough.set()

    monkeypatch.setattr(of, step, slow)
    prompts = write_prompts(tmp_path / "p.jsonl", paired(100))
    with FaultServer(Target(), policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
    assert summary.done == 200
    assert seen
    assert seen[0] >= requests
