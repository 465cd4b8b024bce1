"""A run that goes on meets all of its input again, and parses only what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eyas.readers
from capturing import capture_from, check_run, numbered, paired, write_prompts
from eyas.readers import blocks
from fault_server import FaultServer, Target


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ids of the rows that are parsed, in blocks of some lines."""
    monkeypatch.setattr(blocks, "BLOCK", 300)
    rows: list[Any] = []
    parse = eyas.readers.to_conversation

    def noted(row: Any, **more: Any) -> Any:
        rows.append(row["id"])
        return parse(row, **more)

    monkeypatch.setattr(eyas.readers, "to_conversation", noted)
    return rows


def test_a_whole_run_is_not_parsed(target: Target, tmp_path: Path, parsed: list[Any]) -> None:
    rows = [*numbered(40), *paired(20), {"id": "bad", "prompt": 5}]
    prompts, run = write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "run"
    with FaultServer(target) as server:
        first = capture_from(server, prompts, run, n=2)
        assert len(parsed) == 61
        asked = len(server.requests)
        again = capture_from(server, prompts, run, n=2)
        assert len(server.requests) == asked
    assert len(parsed) == 61
    assert (first.input, first.done, first.rejected) == (161, 160, 1)
    assert (again.input, again.done, again.rejected, again.new) == (161, 160, 1, 0)
    assert again.shapes == first.shapes == {"prompt": 40, "turns": 20}
    assert again.input_known


def test_new_rows_are_found_wherever_they_stand(
    target: Target, tmp_path: Path, parsed: list[Any]
) -> None:
    """Added at the end, put in the middle, and the same row once more."""
    rows = numbered(60)
    prompts, run = write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run)
        parsed.clear()
        rows.append({"id": "last", "prompt": "And at the end?"})
        write_prompts(prompts, rows)
        assert capture_from(server, prompts, run).new == 1
        assert "last" in parsed
        assert len(parsed) < 20
        rows[30:30] = [{"id": "q7", "prompt": "Another one of that id?"}, rows[3]]
        write_prompts(prompts, rows)
        summary = capture_from(server, prompts, run)
        assert (summary.new, summary.input, summary.done) == (2, 63, 63)
        assert len(parsed) < 70  # what stands before is known
        names = [row.conversation_id for row in check_run(target, run)]
    assert len(set(names)) == 63
    assert {"q7", "q3", "last"} < set(names)
    twins = [name for name in names if name.startswith(("q7-", "q3-"))]
    assert len(twins) == 2


def test_what_is_remembered_may_be_lost_or_wrong(
    target: Target, tmp_path: Path, parsed: list[Any]
) -> None:
    rows = numbered(30)
    prompts, run = write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "run"
    with FaultServer(target) as server:
        capture_from(server, prompts, run, limit=20)
        (notes,) = (run / "input").iterdir()
        for damage in (b"", b"\xff" * 400, notes.read_bytes()[:-7]):
            notes.write_bytes(damage)
            summary = capture_from(server, prompts, run, limit=20)
            assert (summary.new, summary.done) == (0, 20)
        whole = capture_from(server, prompts, run)
    assert (whole.new, whole.done) == (10, 30)
    assert sorted(json.loads(row.messages or "")[0]["content"] for row in check_run(target, run)) \
        == sorted(row["prompt"] for row in rows)  # fmt: skip
