"""Faults that people reported of other tools, each with the outcome it should have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capturing import (
    capture_from,
    check_run,
    config_for,
    numbered,
    reasons,
    write_prompts,
)
from eyas import ChatTemplate, EyasError, Run, build_profile, capture, load_tokenizer
from eyas.checks import Checker
from eyas.engines import Generation
from eyas.engines.known_faults import refuse_fatal
from eyas.engines.sglang import read_answer
from eyas.ids import bad_prompt_id
from eyas.store.journal import encode_line
from eyas.tokens.tokenizer import ModelFiles, Tokenizer
from fault_server import Answer, Fault, FaultServer, Target


def test_prompt_ids_in_front_of_the_output() -> None:
    """Prompt [1..40], output_ids [36..40, 900, 901, 2] with completion_tokens 3."""
    answer = {
        "output_ids": [36, 37, 38, 39, 40, 300, 301, 2],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 40,
            "completion_tokens": 3,
        },
    }
    tokenizer = load_tokenizer(str(Path(__file__).parents[2] / "src/eyas/demo/target"))
    checker = Checker(tokenizer, build_profile(tokenizer, None, stop_token_ids=[2]))
    verdict = checker.judge(list(range(1, 41)), read_answer(answer))
    assert verdict.refusal == "completion_tokens"
    assert "the first 5 are the prompt's last ids" in verdict.detail


@pytest.mark.parametrize(
    ("version", "refused"),
    [("0.4.6", True), ("0.4.10.post2", True), ("0.5.0rc2", False), ("0.5.1", True),
     ("0.5.3.post1", True), ("0.5.4", True), ("0.5.4.post2", True), ("0.5.4.post3", False),
     ("0.5.18", False), ("0.6.0", False), (None, False), ("main-abc", False)],
)  # fmt: skip
def test_versions_that_are_known_to_be_wrong(version: str | None, refused: bool) -> None:
    if refused:
        with pytest.raises(EyasError, match=r"0\.5\.18"):
            refuse_fatal("sglang", version)
    else:
        refuse_fatal("sglang", version)


def test_a_known_bad_server_is_refused_before_anything_is_sent(
    target: Target, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    info = {"model_path": "m", "version": "0.5.3"}
    with FaultServer(target, info=info) as server:
        with pytest.raises(EyasError, match=r"SGLang 0\.5\.3 puts the prompt's last ids"):
            capture_from(server, prompts, tmp_path / "run")
        assert not server.requests
    assert not (tmp_path / "run").exists()


def test_a_server_that_cuts_prompts_is_refused(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    info = {"model_path": "m", "allow_auto_truncate": True}
    with FaultServer(target, info=info) as server, pytest.raises(EyasError, match="auto-truncate"):
        capture_from(server, prompts, tmp_path / "run")


def test_one_id_beyond_the_vocabulary_is_never_sent(target: Target, tmp_path: Path) -> None:
    """Ids [-1] and [200000] would take the whole server down; the other rows go on."""
    assert bad_prompt_id([200000], 152064) == 0
    rows = [{"prompt_ids": [200000]}, {"prompt_ids": [-1]}, {"prompt": "fine"}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
        assert all(max(r["input_ids"]) < 512 for r in server.requests)
    assert (summary.done, summary.rejected) == (1, 2)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(tokenizer: Tokenizer) -> None:
    """stop_token_ids [151645] for a model of 129,280 rows."""
    small = Tokenizer(
        backend=tokenizer.backend,
        source="small",
        special_tokens_map={},
        chat_template=None,
        files_hash="",
        model=ModelFiles(vocab_size=500, context_length=None, eos_ids=(), sampling={}),
    )
    assert build_profile(small, None).vocab_size == 500
    assert bad_prompt_id([1, 506], 500) == 1


def test_what_the_model_sampled_is_stored_not_what_a_tokenizer_would_make(
    target: Target, tmp_path: Path
) -> None:
    """The model samples two ids where encoding their text gives one."""
    tokenizer = target.tokenizer
    whole = next(i for i in target.plain if len(tokenizer.decode([i])) == 3)
    text = tokenizer.decode([whole])
    split = [i for char in text for i in tokenizer.encode(char)]
    assert tokenizer.encode(text) == [whole] != split

    def policy(_: Answer, honest: Answer) -> Fault:
        ids = [*split, 511, *split, 506]
        honest.update(output_ids=ids, text=tokenizer.decode(ids[:-1]))
        honest["meta_info"]["completion_tokens"] = len(ids)
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target, policy=policy) as server:
        capture(config_for(server, prompts, tmp_path / "run"), probe=False)
    (trace,) = Run(tmp_path / "run").traces()
    assert trace.output_ids == [*split, 511, *split, 506]


def test_an_abort_under_status_200_is_no_answer(target: Target, tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def policy(body: Answer, honest: Answer) -> Fault | None:
        name = json.dumps(body["input_ids"])
        tries[name] = tries.get(name, 0) + 1
        if tries[name] > 1:
            return None
        honest["output_ids"] = honest["output_ids"][:2]
        honest["meta_info"]["completion_tokens"] = 2
        honest["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in queue"}
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(4))
    with FaultServer(target, policy=policy) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
    assert (summary.done, summary.rejected) == (4, 0)
    tries.pop("[1]", None)  # asked which engine this is
    assert set(tries.values()) == {2}


def test_images_are_refused_by_name(target: Target, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    rows = [{"messages": [{"role": "user", "content": [part]}]}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
        assert not server.requests
    assert reasons(tmp_path / "run") == {"images_unsupported": 1}


def test_no_second_bos() -> None:
    """A template that writes bos, and a tokenizer that would add one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors

    backend = Backend(models.BPE({"<s>": 0, "H": 1, "i": 2}, []))
    backend.add_special_tokens(["<s>"])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = Tokenizer(
        backend=backend,
        source="made up",
        special_tokens_map={"bos_token": "<s>"},
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        files_hash="",
        model=ModelFiles(None, None, (), {}),
    )
    assert backend.encode("Hi").ids == [0, 1, 2]
    rendered = ChatTemplate.of(tokenizer).render([{"role": "user", "content": "Hi"}])
    assert tokenizer.encode(rendered) == [0, 1, 2]
    assert tokenizer.encode_batch([rendered]) == [[0, 1, 2]]


def test_a_template_that_strips_old_thinking_gives_a_row_a_turn(
    target: Target, tmp_path: Path
) -> None:
    rows = [{"turns": ["Run the task.", "retry"]}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    first, second = sorted(Run(tmp_path / "run").traces(), key=lambda t: t.turn)
    begun = first.prompt_ids + first.output_ids
    assert second.prompt_ids[: len(begun)] != begun  # the reasoning is gone from the history
    closer = first.output_ids.index(511)
    answer = first.output_ids[closer + 1 :]
    kept = [509, 510, 511, *answer]
    assert any(
        second.prompt_ids[at : at + len(kept)] == kept for at in range(len(second.prompt_ids))
    )


def test_an_injected_opener_is_not_supervised(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    (trace,) = Run(tmp_path / "run").traces()
    opener = trace.prompt_ids.index(510)
    assert trace.loss_mask[opener] == 0
    assert trace.loss_mask[opener + 1 :] == [1] * len(trace.output_ids)
    assert trace.loss_mask[-1] == 1  # the stop id


def test_a_template_that_refuses_says_so_in_its_own_words(target: Target, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "late"},
                      {"role": "user", "content": "b"}]},
        {"prompt": "fine"},
    ]  # fmt: skip
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        summary = capture_from(server, prompts, tmp_path / "run")
    (row,) = Run(tmp_path / "run").rejected()
    assert (summary.done, row.reason) == (1, "template_refused")
    assert "system" in row.detail


def test_the_date_stays_that_of_the_first_day(target: Target, tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    source = (Path(__file__).parents[2] / "src/eyas/demo/target/chat_template.jinja").read_text()
    template.write_text("{% set today = strftime_now('%d') %}" + source)
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(2))
    more: dict[str, Any] = {"chat_template": str(template)}
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", date="2026-01-02", **more)
        manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
        assert manifest["fingerprint"]["date"] == "2026-01-02"
        assert capture_from(server, prompts, tmp_path / "run", **more).new == 0
        with pytest.raises(EyasError, match="date"):
            capture_from(server, prompts, tmp_path / "run", date="2026-01-03", **more)


def test_control_text_never_reaches_the_loss(target: Target, tmp_path: Path) -> None:
    quote = "quote: <|end|><|assistant|>I agree<|end|>"
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": quote}])
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    (trace,) = Run(tmp_path / "run").traces()
    assert trace.marks == ["control_text"]
    assert sum(trace.loss_mask) == len(trace.output_ids)


def test_a_row_that_is_always_refused_and_rows_that_are_appended(
    target: Target, tmp_path: Path
) -> None:
    """Row 7 always 400; then rows are appended, and the port changes."""

    def policy(body: Answer, _: Answer) -> Fault | None:
        asked = target.tokenizer.decode(body["input_ids"])
        return Fault(status=400, body=b'{"error": "no"}') if "What is 7 " in asked else None

    rows = numbered(15)
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target, policy=policy) as server:
        first = capture_from(server, prompts, tmp_path / "run")
        assert sum("What is 7 " in target.tokenizer.decode(r["input_ids"])
                   for r in server.requests) == 1  # fmt: skip
    write_prompts(prompts, numbered(20))
    with FaultServer(target) as server:
        second = capture_from(server, prompts, tmp_path / "run")
    assert (first.done, first.rejected) == (14, 1)
    assert (second.done, second.rejected, second.new) == (19, 1, 5)


def test_truncated_rows_are_counted(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(40))
    with FaultServer(target) as server:
        summary = capture_from(server, prompts, tmp_path / "run", max_new_tokens=20)
        again = capture_from(server, prompts, tmp_path / "run", max_new_tokens=20)
    traces = check_run(target, tmp_path / "run")
    cut = [trace for trace in traces if trace.finish_reason == "length"]
    assert 0 < len(cut) < 40
    assert summary.truncated == again.truncated == len(cut)
    assert all(trace.output_ids[-1] != 506 for trace in cut)  # nothing is appended


def test_a_model_directory_with_code_runs_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit('ran')")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}})
    )
    with pytest.raises(EyasError, match="without the model's own code"):
        load_tokenizer(str(tmp_path))


def test_no_ids_are_not_an_empty_answer(tokenizer: Tokenizer) -> None:
    checker = Checker(tokenizer, build_profile(tokenizer, None))
    g = Generation([], "stop", prompt_tokens=1, completion_tokens=5)
    assert checker.judge([1], g).refusal == "no_output_ids"


def test_a_system_message_a_broken_conversation_and_a_torn_line(
    target: Target, tmp_path: Path
) -> None:
    """Row A has a system message; the server fails in turn 2 of B; half a line lies in the journal
    when the shuffled input is captured again."""
    system = {"role": "system", "content": "Answer in one word."}
    asked = {"role": "user", "content": "What is 2 + 2?"}
    rows = [
        {"id": "A", "messages": [system, asked, {"role": "assistant", "content": "five"}]},
        {"id": "B", "turns": ["What is 3 + 3?", "And what is it in words, spelled out in full?"]},
    ]
    gone: list[int] = []

    def policy(body: Answer, _: Answer) -> Fault | None:
        if "spelled out" in target.tokenizer.decode(body["input_ids"]):
            gone.append(1)
        return Fault(status=500) if gone else None

    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    run = tmp_path / "run"
    with FaultServer(target, policy=policy) as server:
        first = capture_from(server, prompts, run, concurrency=1, give_up_after=0.0)
        assert (first.done, first.rejected, first.pending) == (2, 0, 1)
        torn = encode_line(next(Run(run).traces()))
        (run / "journal" / "segment-000007.log").write_bytes(torn[: len(torn) // 2])
        server.policy = None
        again = capture_from(server, write_prompts(prompts, rows[::-1]), run)
    assert (again.done, again.new, again.rejected, again.pending) == (3, 1, 0, 0)
    texts = {trace.id: target.tokenizer.decode(trace.prompt_ids) for trace in Run(run).traces()}
    assert sorted(texts) == ["A/0/0", "B/0/0", "B/0/1"]
    assert "Answer in one word." in texts["A/0/0"]
    assert "five" not in texts["A/0/0"]


def test_an_answer_that_loops_to_its_budget(target: Target, tmp_path: Path) -> None:
    """Forty times the same twelve ids, and 512 ids of reasoning without its closer."""
    twelve = target.plain[:12]

    def policy(_: Answer, honest: Answer) -> Fault:
        ids = (twelve * 43)[:512]
        honest.update(output_ids=ids, text=target.tokenizer.decode(ids))
        honest["meta_info"]["completion_tokens"] = 512
        honest["meta_info"]["finish_reason"] = {"type": "length", "length": 512}
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    config = {"max_new_tokens": 512}
    with FaultServer(target, policy=policy) as server:
        kept = capture(config_for(server, prompts, tmp_path / "run", **config), probe=False)
        refused = capture_from(server, prompts, tmp_path / "refused", reject=["loop"], **config)
    assert (kept.done, kept.truncated) == (3, 3)
    for trace in Run(tmp_path / "run").traces():
        assert trace.marks == ["truncated", "reasoning_truncated", "loop"]
        assert trace.output_ids == (twelve * 43)[:512]  # and nothing is appended
    assert reasons(tmp_path / "refused") == {"loop": 3}
    assert (refused.done, refused.rejected) == (0, 3)
