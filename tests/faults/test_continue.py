"""Answers that their budget cut: kept, rejected, or continued from their exact ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, numbered, paired, reasons, write_prompts
from eyas import EyasError, Run
from eyas.config import CaptureConfig
from fault_server import END, OPENER, Answer, Fault, FaultServer, Target


def continuing(target: Target) -> Any:
    """A server whose answer to a prompt and a part of its answer is the rest of that answer."""

    def policy(body: Answer, honest: Answer) -> Fault | None:
        sent = body["input_ids"]
        opened = len(sent) - sent[::-1].index(OPENER)
        prompt, before = sent[:opened], sent[opened:]
        right = target.right_ids(prompt)
        if not before or right[: len(before)] != before:
            return None
        rest = right[len(before) :]
        budget = body["sampling_params"]["max_new_tokens"]
        finish: Answer = {"type": "stop", "matched": END}
        if len(rest) > budget:
            rest, finish = rest[:budget], {"type": "length", "length": budget}
        shown = rest[:-1] if finish["type"] == "stop" else rest
        meta = honest["meta_info"]
        honest["output_ids"], honest["text"] = rest, target.tokenizer.decode(shown)
        meta |= {"finish_reason": finish, "completion_tokens": len(rest)}
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = [[-0.2, i, None] for i in rest]
        return Fault(answer=honest)

    return policy


def test_a_continued_answer_is_the_whole_one(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(60))
    with FaultServer(target, policy=continuing(target)) as server:
        summary = capture_from(server, prompts, tmp_path / "run", max_new_tokens=15,
                               on_length="continue", continue_to=200, logprobs=True)  # fmt: skip
    assert (summary.done, summary.truncated) == (60, 0)
    rows = list(Run(tmp_path / "run").traces())
    continued = [row for row in rows if row.joints]
    assert continued
    assert len(continued) < 60
    for row in rows:  # check_run has compared the ids with the one right answer
        assert row.finish_reason == "stop"
        assert row.logprobs is not None
        assert len(row.logprobs) == len(row.output_ids)
        assert row.joints == ([15] if len(row.output_ids) > 15 else [])
        assert row.max_new_tokens == (200 if row.joints else 15)
        assert "reasoning_truncated" not in row.marks


def test_a_second_cut_is_final(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(40))
    with FaultServer(target, policy=continuing(target)) as server:
        summary = capture_from(server, prompts, tmp_path / "run", max_new_tokens=5,
                               on_length="continue", continue_to=12)  # fmt: skip
    cut = [row for row in Run(tmp_path / "run").traces() if not row.complete]
    assert summary.truncated == len(cut) > 0
    assert all((len(row.output_ids), row.joints) == (12, [5]) for row in cut)


def test_a_lie_in_a_later_piece_is_refused(target: Target, tmp_path: Path) -> None:
    honest_policy = continuing(target)

    def lying(body: Answer, honest: Answer) -> Fault | None:
        fault: Fault | None = honest_policy(body, honest)
        if fault is not None and fault.answer is not None:
            fault.answer["output_ids"] = [*body["input_ids"][-3:], *fault.answer["output_ids"]]
        return fault

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(30))
    with FaultServer(target, policy=lying) as server:
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=10,
                     on_length="continue", continue_to=200)  # fmt: skip
    assert set(reasons(tmp_path / "run")) == {"completion_tokens"}
    for row in Run(tmp_path / "run").rejected():
        assert row.output_ids is not None
        assert len(row.output_ids) > 10  # the first piece is kept too


def test_rejected_where_asked(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(20), *paired(5)])
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=20, on_length="reject")
    assert all(row.complete for row in Run(tmp_path / "run").traces())
    assert {"truncated"} <= set(reasons(tmp_path / "run")) <= {
        "truncated", "earlier_turn_rejected",
    }  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"continue_to": 5}, {"continue_to": 200}])
def test_a_greater_budget_must_be_named(more: dict[str, int]) -> None:
    values = {"prompts": ["p"], "out": "o", "url": "u", "tokenizer": "t", "max_new_tokens": 200}
    with pytest.raises(ValueError, match="--continue-to"):
        CaptureConfig.model_validate({**values, "on_length": "continue", **more})


def test_penalties_cannot_be_continued(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target) as server, pytest.raises(EyasError, match="penalty"):
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=5, on_length="continue",
                     continue_to=50, repetition_penalty=1.1)  # fmt: skip
