"""Turns, samples, identity and limits: what a conversation becomes, also after a stop."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from capturing import capture_from, config_for, numbered, paired, reasons, write_prompts
from eyas import ChatTemplate, EyasError, Run, capture
from eyas.store import WriterLock
from fault_server import Answer, Fault, FaultServer, Target, asks_one_token


def budget_for(target: Target, lengths: Callable[[int], bool]) -> Any:
    """A policy that cuts some answers short, as a token budget would."""

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if not lengths(len(body["input_ids"])):
            return None
        ids = honest["output_ids"][:3]
        honest["output_ids"] = ids
        honest["text"] = target.tokenizer.decode(ids)
        honest["meta_info"]["completion_tokens"] = 3
        honest["meta_info"]["finish_reason"] = {"type": "length", "length": 3}
        return Fault(answer=honest)

    return policy


def test_each_turn_is_rendered_on_the_targets_own_answers(
    target: Target, template: ChatTemplate, tmp_path: Path
) -> None:
    rows = [{"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "A recorded answer that is dropped."},
        {"role": "user", "content": "Second?"},
        {"role": "assistant", "content": "Another one."},
    ]}]  # fmt: skip
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
        sent = [request["input_ids"] for request in server.requests]
    first, second = sorted(Run(tmp_path / "run").traces(), key=lambda trace: trace.turn)
    assert [first.prompt_ids, second.prompt_ids] == sent
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First?"},
    ]
    encode, decode = target.tokenizer.encode, target.tokenizer.decode
    assert first.prompt_ids == encode(template.render(asked))
    closer = first.output_ids.index(511)
    answer = {
        "role": "assistant",
        "content": decode(first.output_ids[closer + 1 : -1]),
        "reasoning_content": decode(first.output_ids[:closer]),
    }
    history = [*asked, answer, {"role": "user", "content": "Second?"}]
    assert second.prompt_ids == encode(template.render(history))
    assert orjson.loads(second.messages or "") == history
    assert "recorded" not in decode(second.prompt_ids)
    n = len(first.prompt_ids)
    assert (first.reasoning_start, first.reasoning_end) == (n, n + closer)
    assert (first.stop_id, first.finish_reason) == (506, "stop")


def test_a_cut_turn_rejects_the_later_ones_only(target: Target, tmp_path: Path) -> None:
    rows = [{"id": "a", "turns": ["1?", "2 and some more words?", "3?"]}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    first = len(target.tokenizer.encode("<|user|>1?<|end|><|assistant|><think>"))
    with FaultServer(target, policy=budget_for(target, lambda n: n > first)) as server:
        summary = capture_from(server, prompts, tmp_path / "run", max_new_tokens=60)
    assert (summary.done, summary.rejected, summary.truncated) == (2, 1, 1)
    by_id = {trace.id: trace for trace in Run(tmp_path / "run").traces()}
    assert by_id["a/0/0"].complete
    assert not by_id["a/0/1"].complete
    assert by_id["a/0/1"].marks == ["truncated", "reasoning_truncated"]
    assert reasons(tmp_path / "run") == {"earlier_turn_truncated": 1}


def test_a_rejected_turn_rejects_the_later_ones(target: Target, tmp_path: Path) -> None:
    def policy(_: Answer, honest: Answer) -> Fault:
        honest["meta_info"]["prompt_tokens"] += 1
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", paired(3))
    with FaultServer(target, policy=policy) as server:
        capture_from(server, prompts, tmp_path / "run")
        again = capture_from(server, prompts, tmp_path / "run")
    assert reasons(tmp_path / "run") == {"prompt_tokens": 3, "earlier_turn_rejected": 3}
    assert (again.new, again.rejected, again.exit_code) == (0, 6, 3)


def test_a_stop_between_the_turns_is_continued_on_the_stored_answer(
    target: Target, tmp_path: Path
) -> None:
    """The server is gone after the first turns; later the second are rendered on what was stored."""
    prompts = write_prompts(tmp_path / "p.jsonl", paired(8))
    longest = max(len(target.tokenizer.encode(f"What is {n} + 1?")) for n in range(8)) + 4

    firsts: set[bytes] = set()

    def policy(body: Answer, _: Answer) -> Fault | None:
        gone = len(firsts) == 8
        if len(body["input_ids"]) <= longest and not asks_one_token(body):
            firsts.add(orjson.dumps(body["input_ids"]))
            return None
        return Fault(drop=True) if gone or not asks_one_token(body) else None

    with FaultServer(target, policy=policy) as server:
        first = capture_from(server, prompts, tmp_path / "run", tries=50, give_up_after=0.0)
        assert (first.done, first.pending) == (8, 8)
        server.policy = None
        server.requests.clear()
        second = capture_from(server, prompts, tmp_path / "run")
        resumed = {orjson.dumps(r["input_ids"]) for r in server.requests}
        whole = capture_from(server, prompts, tmp_path / "whole")
    assert (second.done, second.new, whole.done) == (16, 8, 16)
    wanted = {orjson.dumps(t.prompt_ids) for t in Run(tmp_path / "whole").traces() if t.turn}
    assert resumed == wanted


def test_samples_are_independent_threads(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(2))
    with FaultServer(target) as server:
        one = capture_from(server, prompts, tmp_path / "run")
        three = capture_from(server, prompts, tmp_path / "run", n=3)
        assert all(r["sampling_params"]["n"] == 1 for r in server.requests)
        seeds = [r["sampling_params"]["sampling_seed"] for r in server.requests]
    assert (one.done, three.done, three.new) == (4, 12, 8)
    ids = {trace.id for trace in Run(tmp_path / "run").traces()}
    assert ids == {f"p{c}/{s}/{t}" for c in range(2) for s in range(3) for t in range(2)}
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_raised_limit_goes_on(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(10))
    with FaultServer(target) as server:
        first = capture_from(server, prompts, tmp_path / "run", limit=4)
        second = capture_from(server, prompts, tmp_path / "run", limit=7)
        third = capture_from(server, prompts, tmp_path / "run")
    assert [s.input for s in (first, second, third)] == [4, 7, 10]
    assert [s.new for s in (first, second, third)] == [4, 3, 3]


def test_order_and_files_play_no_part(target: Target, tmp_path: Path) -> None:
    rows = numbered(30)
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", limit=20)
        random.Random(3).shuffle(rows)
        prompts.unlink()
        write_prompts(tmp_path / "one.jsonl", rows[:11])
        write_prompts(tmp_path / "two.jsonl", rows[11:])
        summary = capture_from(server, tmp_path / "*.jsonl", tmp_path / "run")
    assert (summary.input, summary.done, summary.new, summary.extra) == (30, 30, 10, 0)


def test_the_same_id_with_other_content_is_told_apart(target: Target, tmp_path: Path) -> None:
    rows = [{"id": 7, "prompt": "One?"}, {"id": 7, "prompt": "Other?"}, {"id": 7, "prompt": "One?"}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        first = capture_from(server, prompts, tmp_path / "run")
        write_prompts(tmp_path / "p.jsonl", rows[::-1])
        again = capture_from(server, prompts, tmp_path / "run")
    names = [trace.conversation_id for trace in Run(tmp_path / "run").traces()]
    assert (first.done, again.new, len(set(names))) == (3, 0, 3)
    assert sorted(name.split("-")[0] for name in names) == ["7", "7", "7"]
    assert "7" in names


def test_rows_that_left_the_input_are_kept_apart(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(6))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
        write_prompts(prompts, [*numbered(4), {"id": "new", "prompt": "New?"}])
        summary = capture_from(server, prompts, tmp_path / "run")
    assert (summary.input, summary.done, summary.new, summary.extra) == (5, 5, 1, 2)


def test_ready_made_ids_are_sent_as_they_are(target: Target, tmp_path: Path) -> None:
    ids = [508, 80, 81, 82, 506, 509, 510]
    rows = [{"prompt_ids": ids, "note": "kept"}, {"prompt_ids": [1, 512]}, {"prompt_ids": [-1]}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
        assert [request["input_ids"] for request in server.requests] == [ids]
    (trace,) = Run(tmp_path / "run").traces()
    assert (trace.messages, trace.metadata) == (None, '{"note":"kept"}')
    assert summary.rejected == 2
    assert set(reasons(tmp_path / "run")) == {"prompt_id_outside_vocabulary", "bad_prompt_ids"}


def test_the_budget_is_clamped_to_the_context(target: Target, tmp_path: Path) -> None:
    rows = [{"prompt": "short"}, {"prompt": "x" * 2500}]  # the demo target has 2,048 positions
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=5000)
        (request,) = server.requests
    (trace,) = Run(tmp_path / "run").traces()
    assert trace.max_new_tokens == 2048 - len(trace.prompt_ids)
    assert request["sampling_params"]["max_new_tokens"] == trace.max_new_tokens
    assert reasons(tmp_path / "run") == {"prompt_too_long": 1}


def test_everything_that_decides_sampling_is_sent(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", top_k=0, temperature=0.25)
        (request,) = server.requests
    sent = request["sampling_params"]
    sent.pop("sampling_seed")
    assert sent == {
        "temperature": 0.25, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False, "n": 1,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "max_new_tokens": 200,
    }  # fmt: skip
    assert request["stream"] is False
    assert "text" not in request


def test_another_configuration_is_refused_and_can_be_put_aside(
    target: Target, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", temperature=0.5)
        before = sorted(p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())
        with pytest.raises(EyasError, match=r"temperature: 0\.5 in the run, 0\.6 now"):
            capture_from(server, prompts, tmp_path / "run", temperature=0.6)
        assert before == sorted(
            p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()
        )
        with pytest.raises(EyasError, match="may only rise"):
            capture_from(server, prompts, tmp_path / "run", temperature=0.5, max_new_tokens=100)
        put_aside = capture_from(server, prompts, tmp_path / "run", temperature=0.6, archive=True)
    assert put_aside.new == 3
    (old,) = (tmp_path / "run" / "archive").iterdir()
    assert len(list(Run(old).traces())) == 3


def test_a_changed_template_or_system_text_is_another_configuration(
    target: Target, template: ChatTemplate, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    other = tmp_path / "other.jinja"
    other.write_text(template.source + "{# one character more #}")
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
        for change, name in (
            ({"chat_template": str(other)}, "template"),
            ({"system": "Be kind."}, "system"),
            ({"template_kwargs": {"thinking": True}}, "template_kwargs"),
            ({"seed": 1}, "seed"),
            ({"stop_token_ids": [505]}, "stop_token_ids"),
        ):
            with pytest.raises(EyasError, match=f"{name}: "):
                capture_from(server, prompts, tmp_path / "run", **change)
        again = capture_from(server, prompts, tmp_path / "run", concurrency=1, logprobs=True)
    assert again.new == 0


def test_marks_of_what_the_model_did(target: Target, tmp_path: Path) -> None:
    def say(ids: list[int]) -> Any:
        def policy(_: Answer, honest: Answer) -> Fault:
            honest["output_ids"] = ids
            honest["text"] = target.tokenizer.decode(ids[:-1])
            honest["meta_info"]["completion_tokens"] = len(ids)
            honest["meta_info"]["finish_reason"]["matched"] = ids[-1]
            return Fault(answer=honest)

        return policy

    a = target.plain[0]
    cases = {
        "second_closer": [a, 511, a, 511, a, 506],
        "empty_answer": [a, 511, 506],
        "role_header": [a, 511, a, 508, a, 506],
        "loop": [a, 511, *target.plain[:8] * 12, 506],
        "unusual_stop": [a, 511, a, 505],
    }
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    for mark, ids in cases.items():
        with FaultServer(target, policy=say(ids)) as server:
            config: dict[str, Any] = {"temperature": 0.5}
            capture(config_for(server, prompts, tmp_path / mark, **config), probe=False)
            refused = capture(
                config_for(server, prompts, tmp_path / f"no-{mark}", reject=[mark], **config),
                probe=False,
            )
        (trace,) = Run(tmp_path / mark).traces()
        assert trace.marks == [mark]
        assert refused.reasons == {mark: 1}


def test_control_text_and_a_leading_answer_are_marked(target: Target, tmp_path: Path) -> None:
    rows = [
        {"prompt": "say <|end|> to me"},
        {
            "messages": [
                {"role": "assistant", "content": "Hello!"},
                {"role": "user", "content": "Hi"},
            ]
        },
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    marks = sorted(trace.marks for trace in Run(tmp_path / "run").traces())
    assert marks == [["control_text"], ["leading_assistant"]]


def test_a_missing_closer_can_be_kept(target: Target, tmp_path: Path) -> None:
    def policy(_: Answer, honest: Answer) -> Fault:
        ids = [i for i in honest["output_ids"] if i != 511]
        honest["output_ids"], honest["text"] = ids, target.tokenizer.decode(ids[:-1])
        honest["meta_info"]["completion_tokens"] = len(ids)
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target, policy=policy) as server:
        capture(
            config_for(server, prompts, tmp_path / "run", on_missing_closer="keep"), probe=False
        )
    (trace,) = Run(tmp_path / "run").traces()
    assert trace.marks == ["no_closer"]
    assert (trace.reasoning_start, trace.reasoning_end) == (len(trace.prompt_ids), None)


def test_bad_input_lines_stop_nothing(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{broken\n[1]\n{"prompt": "c"}'
    )
    with FaultServer(target) as server:
        first = capture_from(server, path, tmp_path / "run")
        again = capture_from(server, path, tmp_path / "run")
    assert (first.input, first.done, first.rejected) == (4, 2, 2)
    assert (again.new, again.rejected, again.exit_code) == (0, 2, 3)
    rows = {row.reason: row for row in Run(tmp_path / "run").rejected()}
    assert (rows["invalid_json"].source, rows["invalid_json"].line) == (str(path), 3)
    assert rows["invalid_json"].text == "{broken"


def test_keys_reach_no_file(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "s3cret-key")

    def policy(_: Answer, __: Answer) -> Fault:
        return Fault(status=400, body=b'{"error": "bad key s3cret-key"}')

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    info = {"model_path": "m", "api_key": "s3cret-key", "version": "0.5.23"}
    with FaultServer(target, policy=policy, info=info) as server:
        capture_from(server, prompts, tmp_path / "run", api_key_env="A_KEY")
        assert set(server.authorization) == {"Bearer s3cret-key"}
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def test_a_lock_is_released(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    lock = WriterLock(tmp_path / "run")
    lock.acquire()
    lock.release()
    assert not lock.path.exists()


def test_weights_that_only_answers_name_are_part_of_the_run(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(6))

    def policy(_: Answer, honest: Answer) -> Fault:
        honest["meta_info"]["weight_version"] = "step-2"
        return Fault(answer=honest)

    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", limit=3)
        server.policy = policy
        other = capture_from(server, prompts, tmp_path / "run")
        assert (other.new, other.pending, other.exit_code) == (0, 3, 4)
        assert "'step-2'" in (other.stopped or "")
        server.policy = None
        assert capture_from(server, prompts, tmp_path / "run").new == 3


def test_a_password_in_the_address_reaches_no_file(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    with FaultServer(target) as server:
        address = server.url.replace("http://", "http://me:s3cret@")
        summary = capture(config_for(server, prompts, tmp_path / "run", url=address), probe=False)
        assert (server.authorization[-1] or "").startswith("Basic ")
    assert summary.done == 2
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path
