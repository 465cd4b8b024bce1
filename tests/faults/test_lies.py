"""Servers that lie: no wrong row is ever stored as good, and every refused row names its reason."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from capturing import capture_from, numbered, reasons, write_prompts
from eyas import Run
from fault_server import LIES, Answer, Fault, FaultServer, Policy, Target, asks_one_token, lying


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name(lie: str, target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(4))
    with FaultServer(target, policy=lying(lie)) as server:
        summary = capture_from(server, prompts, tmp_path / "run", tries=2)
    assert (summary.done, summary.rejected, summary.exit_code) == (0, 4, 3)
    assert reasons(tmp_path / "run") == {LIES[lie][1]: 4}


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != "one_id_exchanged"])
def test_lies_are_told_without_text_too(lie: str, target: Target, tmp_path: Path) -> None:
    """Only ids and counts tell here, and a third of the answers are lies."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(30))
    with FaultServer(target, policy=lying(lie, 0.3), text=False) as server:
        summary = capture_from(server, prompts, tmp_path / "run", tries=1)
    assert 0 < summary.rejected < 30
    assert summary.pending == 0
    assert reasons(tmp_path / "run") == {LIES[lie][1]: summary.rejected}


def test_an_exchanged_id_is_told_by_log_probabilities(target: Target, tmp_path: Path) -> None:
    def policy(_: Answer, honest: Answer) -> Fault:
        ids = list(honest["output_ids"])
        ids[0] = target.plain[0] if ids[0] != target.plain[0] else target.plain[1]
        return Fault(answer={**honest, "output_ids": ids, "text": ""})

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target, policy=policy) as server:
        capture_from(server, prompts, tmp_path / "run", logprobs=True)
    assert reasons(tmp_path / "run") == {"logprob_ids": 3}


def test_log_probabilities_that_do_not_come_are_missed(target: Target, tmp_path: Path) -> None:
    def policy(_: Answer, honest: Answer) -> Fault:
        honest["meta_info"].pop("output_token_logprobs")
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    with FaultServer(target, policy=policy) as server:
        capture_from(server, prompts, tmp_path / "run", logprobs=True)
    assert reasons(tmp_path / "run") == {"no_logprobs": 2}


def always(fault: Fault) -> Policy:
    return lambda _, __: fault


def for_rows(fault: Fault) -> Policy:
    """What is asked for one token, to learn whether the server answers anybody, is answered."""
    return lambda body, _: None if asks_one_token(body) else fault


BAD_ANSWERS = {
    "error object": (Fault(body=b'{"error": {"message": "boom"}}'), "error_body", "boom"),
    "error text": (Fault(body=b'{"object": "error", "message": "bang"}'), "error_body", "bang"),
    "no meta_info": (Fault(body=b'{"output_ids": [1, 506]}'), "malformed_answer", "meta_info"),
    "a list": (Fault(body=b"[1, 2]"), "malformed_answer", "list"),
    "half a JSON": (Fault(body=b'{"output_ids": [1, 2, '), "malformed_answer", "JSON"),
    "no body": (Fault(body=b""), "malformed_answer", "JSON"),
    "a page": (Fault(body=b"<html>login</html>"), "malformed_answer", "JSON"),
    "a cut body": (Fault(cut_body=True), "cut_answer", "cut off"),
    "500 as text": (Fault(status=500, body=b"Internal Server Error"), "server_error", "Internal"),
    "400 of SGLang": (
        Fault(status=400, body=b'{"error": {"message": "The input (9 tokens) is longer"}}'),
        "request_refused",
        "The input (9 tokens) is longer",
    ),
    "400 as a string": (
        Fault(status=400, body=b'{"error": "unknown field `max_tokens`"}'),
        "request_refused",
        "unknown field `max_tokens`",
    ),
    "422 of FastAPI": (
        Fault(status=422, body=b'{"detail": [{"loc": ["x"], "msg": "field required"}]}'),
        "request_refused",
        "field required",
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_bad_answers_become_one_clear_reason(name: str, target: Target, tmp_path: Path) -> None:
    fault, reason, said = BAD_ANSWERS[name]
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    with FaultServer(target, policy=for_rows(fault)) as server:
        summary = capture_from(server, prompts, tmp_path / "run", tries=2)
    assert (summary.done, summary.rejected, summary.pending) == (0, 2, 0)
    for row in Run(tmp_path / "run").rejected():
        assert row.reason == reason
        assert said in row.detail


@pytest.mark.parametrize("name", [n for n in BAD_ANSWERS if not n.startswith("4")])
def test_what_a_server_does_to_everybody_rejects_no_row(
    name: str, target: Target, tmp_path: Path
) -> None:
    """A proxy's page for maintenance, an engine that died behind its front: wait, and give up."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    with FaultServer(
        target, policy=always(BAD_ANSWERS[name][0]), info={"model_path": "m"}
    ) as server:
        summary = capture_from(server, prompts, tmp_path / "run", tries=1, give_up_after=0.0)
    assert (summary.done, summary.rejected, summary.pending) == (0, 0, 2)
    assert summary.exit_code == 4
    assert "answers nobody" in (summary.stopped or "")


def test_a_fault_that_passes_costs_no_row(target: Target, tmp_path: Path) -> None:
    """Every first try fails in one way or another; every row is good in the end."""
    faults = [Fault(status=500, body=b"x"), Fault(body=b"{"), Fault(drop=True),
              Fault(status=503, body=b"{}", headers={"Retry-After": "0"}),
              Fault(status=429, body=b"{}"), Fault(cut_body=True)]  # fmt: skip
    seen: set[bytes] = set()

    def policy(body: Answer, _: Answer) -> Fault | None:
        prompt = orjson.dumps(body["input_ids"])
        if prompt in seen:
            return None
        seen.add(prompt)
        return faults[len(seen) % len(faults)]

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(24))
    with FaultServer(target, policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
    assert (summary.done, summary.rejected, summary.exit_code) == (24, 0, 0)


@pytest.mark.parametrize("others", [30, 0], ids=["beside others", "alone"])
def test_a_row_whose_connection_always_breaks_is_rejected_with_its_history(
    others: int, target: Target, tmp_path: Path
) -> None:
    def policy(body: Answer, _: Answer) -> Fault | None:
        return Fault(drop=True) if len(body["input_ids"]) == poison else None

    rows = [*numbered(others), {"id": "poison", "prompt": "one that is longer than all the others"}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    poison = len(target.tokenizer.encode("<|user|>" + str(rows[-1]["prompt"]))) + 3
    with FaultServer(target, policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run", tries=3)
    assert (summary.done, summary.rejected, summary.pending) == (others, 1, 0)
    (row,) = Run(tmp_path / "run").rejected()
    assert (row.conversation_id, row.reason) == ("poison", "connection_lost")
    assert len(row.tries) == 3
    assert all("broke before an answer came" in met for met in row.tries)


def test_a_refused_key_rejects_nothing(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(5))
    fault = Fault(status=401, body=b'{"error": "Unauthorized"}')
    with FaultServer(target, policy=always(fault), info={"model_path": "m"}) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
    assert (summary.rejected, summary.pending, summary.exit_code) == (0, 5, 4)
    assert "Unauthorized" in (summary.stopped or "")


def test_other_weights_stop_the_capture(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(60))
    served = 0

    def policy(_: Answer, honest: Answer) -> Fault | None:
        nonlocal served
        served += 1
        if served > 20:
            honest["meta_info"]["weight_version"] = "step-2"
        return Fault(answer=honest)

    info = {"model_path": "m", "weight_version": "default"}
    with FaultServer(target, policy=policy, info=info) as server:
        summary = capture_from(server, prompts, tmp_path / "run", concurrency=4)
    assert 0 < summary.done < 60
    assert (summary.rejected, summary.exit_code) == (0, 4)
    assert "step-2" in (summary.stopped or "")


def test_what_was_refused_keeps_its_ids(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target, policy=lying("stop_inside")) as server:
        capture_from(server, prompts, tmp_path / "a")
        sent = server.requests[0]["input_ids"]
    (row,) = Run(tmp_path / "a").rejected()
    right = target.right_ids(sent)
    assert row.prompt_ids == sent
    assert row.output_ids == [*right[:3], 506, *right[3:]]
    with FaultServer(target, policy=lying("id_huge")) as server:
        capture_from(server, prompts, tmp_path / "b")
    (row,) = Run(tmp_path / "b").rejected()
    assert row.output_ids is None  # no int32 holds it; the answer is kept as text
    assert orjson.loads(row.text or "") == [10**12, *right[1:]]
