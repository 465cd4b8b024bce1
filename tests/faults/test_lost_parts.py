"""Parts that are lost from outside: what is missing is captured again, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from capturing import capture_from, paired, write_prompts
from eyas import Run
from eyas.store.journal import encode_line
from fault_server import FaultServer, Target

ROWS = [*paired(2), {"id": "three", "turns": ["One?", "Two?", "Three?"]}]


@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1}, {2}, {0, 2}], ids=str)
def test_lost_turns_are_captured_again(lost: set[int], target: Target, tmp_path: Path) -> None:
    """A damaged part was moved away, as its error message says; later turns lie in another."""
    prompts = write_prompts(tmp_path / "p.jsonl", ROWS)
    run = tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run)
        before = {trace.id: trace for trace in Run(run).traces()}
        kept = [trace for trace in before.values() if trace.turn not in lost]
        for part in (run / "traces").iterdir():
            part.unlink()
        lines = b"".join(map(encode_line, kept))
        (run / "journal" / "segment-000009.log").write_bytes(lines)
        for _ in range(2):  # a second time where only then the next turn can be rendered
            summary = capture_from(server, prompts, run)
    assert (summary.done, summary.rejected, summary.pending) == (7, 0, 0)
    after = {trace.id: trace for trace in Run(run).traces()}
    assert {name: (t.prompt_ids, t.output_ids) for name, t in after.items()} == {
        name: (t.prompt_ids, t.output_ids) for name, t in before.items()
    }


def test_a_lost_first_turn_whose_later_ones_were_refused(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(1))
    run = tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run, max_new_tokens=3)  # cuts the first turn
        for part in (run / "traces").iterdir():
            part.unlink()
        summary = capture_from(server, prompts, run, max_new_tokens=200)
    assert (summary.input, summary.pending) == (2, 0)
