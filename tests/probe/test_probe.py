"""The probe: each lie is named, and no honest server is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, config_for, numbered, write_prompts
from eyas import Run, capture
from eyas.config import TargetConfig
from eyas.demo.server import TARGET
from eyas.errors import ProbeFailed, UnsuitableServerError
from eyas.findings import Finding
from eyas.probe import Probe, probe
from eyas.readers import PromptReader
from fault_server import CLOSER, END, LIES, Answer, Fault, FaultServer, Pages, Policy, Target, lying

INFO: Answer = {
    "version": "0.5.23",
    "model_path": "/models/demo",
    "weight_version": "default",
    "context_length": 2048,
}


def run_probe(server: FaultServer, **more: Any) -> Probe:
    values = {"url": server.url, "tokenizer": str(TARGET), **more}
    return probe(TargetConfig.model_validate(values))


def finding(done: Probe, name: str) -> Finding:
    """The worst finding of a name."""
    order = ("failed", "warning", "unproven", "note", "ok")
    found = [f for f in done.findings.items if f.name == name]
    assert found, f"no finding {name}: {[f.name for f in done.findings.items]}"
    return min(found, key=lambda f: order.index(f.verdict))


def verdict(done: Probe, name: str) -> str:
    return finding(done, name).verdict


# -- honest servers --------------------------------------------------------------------------


def test_an_honest_server_with_all_pages_is_proven(target: Target) -> None:
    with FaultServer(target, info=INFO, pages=Pages()) as server:
        done = run_probe(server)
    assert not done.failed
    assert done.findings.of("unproven") == []
    assert done.findings.of("warning") == []
    for name in ("server", "vocabulary", "tokenizer", "template", "served_template", "question",
                 "sampling", "again", "accounts", "reasoning", "stop", "scores"):  # fmt: skip
        assert verdict(done, name) == "ok", finding(done, name)
    assert finding(done, "reasoning").evidence["reasoning_end"] is not None
    assert finding(done, "stop").evidence["seen"] == END


def test_an_engine_that_was_named_wrongly_is_said(target: Target, tmp_path: Path) -> None:
    with FaultServer(target, info={"model_path": "m"}) as server:
        done = run_probe(server, engine="llama_cpp")
        assert verdict(done, "engine") == "warning"
        assert "looks like sglang" in finding(done, "engine").text
        said: list[str] = []
        prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
        config = config_for(server, prompts, tmp_path / "run", engine="llama_cpp")
        capture(config, probe=False, say=said.append)
        assert any("looks like sglang" in line for line in said)


def test_a_bare_generate_is_not_refused(target: Target) -> None:
    """POST /generate alone, without log-probabilities, echo or text."""

    def bare(body: Answer, honest: Answer) -> Fault | None:
        if "logprob_start_len" in body:
            return Fault(status=400, body=b'{"error": {"message": "no"}}')
        honest.pop("prompt_token_ids", None)
        honest["meta_info"].pop("output_token_logprobs", None)
        return Fault(answer=honest)

    with FaultServer(target, policy=bare, text=False) as server:
        done = run_probe(server)
    assert not done.failed
    assert {f.name for f in done.findings.of("unproven")} == {
        "version", "tokenizer", "served_template", "scores",
    }  # fmt: skip


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_the_noise_of_an_engine_is_no_lie(target: Target, noise: float) -> None:
    noisy = copy.copy(target)
    noisy.noise = noise
    with FaultServer(noisy, info=INFO, pages=Pages()) as server:
        done = run_probe(server)
    assert verdict(done, "scores") == "ok"


def test_scores_that_never_repeat_prove_nothing(target: Target) -> None:
    noisy = copy.copy(target)
    noisy.noise = 3.0
    with FaultServer(noisy, info=INFO) as server:
        done = run_probe(server)
    assert (verdict(done, "scores"), done.failed) == ("unproven", False)


@pytest.mark.parametrize("version", ["0.5.5", "0.5.12", "0.5.17", "0.5.18", "0.5.23"])
def test_usable_versions_are_named_with_their_faults(target: Target, version: str) -> None:
    info = {**INFO, "version": version, "speculative_algorithm": "EAGLE3"}
    with FaultServer(target, info=info) as server:
        done = run_probe(server)
    assert not done.failed
    said = " ".join(f.text for f in done.findings.items if f.name == "version")
    assert ("eos_at_cap" in said) is (version not in {"0.5.18", "0.5.23"})
    assert ("speculative decoding" in said) is (version not in {"0.5.18", "0.5.23"})
    assert ("cannot echo" in said) is (version in {"0.5.5", "0.5.12"})


def test_an_answer_cut_by_its_budget_is_not_wrong(target: Target) -> None:
    with FaultServer(target, info=INFO) as server:
        done = run_probe(server, max_new_tokens=3)
    assert not done.failed
    assert verdict(done, "reasoning") == "unproven"
    assert verdict(done, "stop") == "unproven"


def test_an_engine_that_is_not_deterministic_is_noted(target: Target) -> None:
    """An honest engine whose greedy answers vary with what runs beside them."""
    chosen = random.Random(3)

    def whim(body: Answer, honest: Answer) -> Fault | None:
        if "logprob_start_len" in body:
            return None
        ids = [chosen.choice(target.plain), *honest["output_ids"][1:]]
        honest["output_ids"], honest["text"] = ids, target.tokenizer.decode(ids[:-1])
        honest["meta_info"].pop("output_token_logprobs", None)
        return Fault(answer=honest)

    with FaultServer(target, policy=whim) as server:
        done = run_probe(server)
    assert verdict(done, "again") == "note"


# -- lies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LIES))
def test_each_lie_is_named(name: str, target: Target) -> None:
    check = LIES[name][1]
    with FaultServer(target, policy=lying(name), info=INFO, pages=Pages()) as server:
        done = run_probe(server)
    assert done.failed
    found = finding(done, "question")
    assert found.verdict == "failed"
    # With log-probabilities at hand their ids may tell first.
    assert check in found.text or "logprob_ids" in found.text


def test_a_lie_that_comes_and_goes_is_a_warning(target: Target) -> None:
    told: list[int] = []

    def once(body: Answer, honest: Answer) -> Fault | None:
        told.append(1)
        return lying("closer_missing")(body, honest) if len(told) == 1 else None

    with FaultServer(target, policy=once, info=INFO) as server:
        done = run_probe(server)
    assert (verdict(done, "question"), done.failed) == ("warning", False)
    assert "1 of 2 answers" in finding(done, "question").text


def without_logprobs(name: str) -> Policy:
    """A lie that is told only where no log-probabilities are asked for, as captures ask."""

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if "return_logprob" in body:
            return None
        return lying(name)(body, honest)

    return policy


@pytest.mark.parametrize("name", ["closer_missing", "prompt_tail_prepended", "stop_dropped"])
def test_a_lie_that_avoids_logprobs(name: str, target: Target) -> None:
    with FaultServer(target, policy=without_logprobs(name), info=INFO) as server:
        done = run_probe(server)
    assert done.failed
    assert LIES[name][1] in finding(done, "again").text


def test_other_ids_where_no_logprobs_are_asked_for(target: Target) -> None:
    """They pass every check there; scored again they are not what the model would write."""

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if "return_logprob" in body:
            return None
        return HIDDEN["one id lost"](target)(body, honest)

    with FaultServer(target, policy=policy, info=INFO) as server:
        done = run_probe(server)
    assert verdict(done, "again") == "note"
    assert verdict(done, "scores") == "failed"


@pytest.mark.parametrize("version", ["0.4.0", "0.4.10.post2", "0.5.1", "0.5.3", "0.5.4.post2"])
def test_versions_that_cannot_be_right_are_refused(target: Target, version: str) -> None:
    with (
        FaultServer(target, info={**INFO, "version": version}) as server,
        pytest.raises(UnsuitableServerError, match=version.replace(".", r"\.")),
    ):
        run_probe(server)


def consistent(change: Callable[[Target, list[int]], list[int]]) -> Callable[[Target], Policy]:
    """Other ids in every account that the server gives; the log-probabilities are those of the
    ids that were really sampled, as far as the ids are still there."""

    def for_target(target: Target) -> Policy:
        def policy(body: Answer, honest: Answer) -> Fault | None:
            if "logprob_start_len" in body:
                return None
            ids = change(target, honest["output_ids"])
            meta = honest["meta_info"]
            honest["output_ids"] = ids
            meta["completion_tokens"] = len(ids)
            meta["finish_reason"] = {"type": "stop", "matched": ids[-1]}
            honest["text"] = target.tokenizer.decode(ids[:-1])
            if entries := meta.get("output_token_logprobs"):
                lps = [entry[0] for entry in entries]
                lps = (lps + lps)[: len(ids)]
                meta["output_token_logprobs"] = [
                    [lp, i, None] for lp, i in zip(lps, ids, strict=True)
                ]
            return Fault(answer=honest)

        return policy

    return for_target


def _retokenized(target: Target, ids: list[int]) -> list[int]:
    """The first id of several letters, in pieces of one."""
    at = next(n for n, i in enumerate(ids) if len(target.tokenizer.decode([i])) > 1)
    letters = [i for char in target.tokenizer.decode([ids[at]])
               for i in target.tokenizer.encode(char)]  # fmt: skip
    return [*ids[:at], *letters, *ids[at + 1 :]]


HIDDEN = {
    "one id lost": consistent(lambda _, ids: [*ids[:2], *ids[3:]]),
    "one id exchanged": consistent(lambda t, ids: [*ids[:2], t.plain[7], *ids[3:]]),
    "one id added": consistent(lambda t, ids: [*ids[:2], t.plain[9], *ids[2:]]),
    "shifted": consistent(lambda _, ids: [*ids[1 : ids.index(CLOSER)], *ids[ids.index(CLOSER) :]]),
    "tokenized again": consistent(_retokenized),
    "another answer": consistent(lambda t, ids: [*t.plain[5:15], CLOSER, *ids[-2:]]),
}


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_what_no_account_shows_is_found_by_scoring_again(name: str, target: Target) -> None:
    with FaultServer(target, policy=HIDDEN[name](target), info=INFO) as server:
        done = run_probe(server)
    assert verdict(done, "question") == "ok"  # every account fits
    assert verdict(done, "scores") == "failed"
    assert "Output id" in finding(done, "scores").text


def test_a_server_that_scores_other_ids_than_it_was_given(target: Target) -> None:
    def policy(body: Answer, honest: Answer) -> Fault | None:
        if "logprob_start_len" not in body:
            return None
        honest["meta_info"]["input_token_logprobs"][-1][1] = 77
        return Fault(answer=honest)

    with FaultServer(target, policy=policy, info=INFO) as server:
        done = run_probe(server)
    assert verdict(done, "scores") == "failed"
    assert "other ids" in finding(done, "scores").text


PAGES: dict[str, tuple[Pages, str, str]] = {
    "other vocabulary": (
        Pages(tokenize=lambda t, text: [(i + 1) % 500 for i in t.tokenizer.encode(text)]),
        "tokenizer", "failed",
    ),
    "control strings in pieces": (
        Pages(tokenize=lambda t, text: [i for char in text.replace("<think>", "< think>").split("x")
                                        for i in t.tokenizer.encode(char)]),
        "tokenizer", "failed",
    ),
    "other pieces of the same text": (
        Pages(tokenize=lambda t, text: [i for char in text for i in t.tokenizer.encode(char)]
              if "quick" in text else t.tokenizer.encode(text)),
        "tokenizer", "warning",
    ),
    "an ordinary id put in front": (
        Pages(tokenize=lambda t, text: [70, *t.tokenizer.encode(text)]), "tokenizer", "failed",
    ),
    "bos put in front": (
        Pages(tokenize=lambda t, text: [505, *t.tokenizer.encode(text)]), "tokenizer", "ok",
    ),
    "eos put behind": (
        Pages(tokenize=lambda t, text: [*t.tokenizer.encode(text), 506]), "tokenizer", "ok",
    ),
    "no ids of messages": (
        Pages(render=lambda _, __: ""), "served_template", "unproven",
    ),
    "another template": (
        Pages(render=lambda t, body: t.render(body).replace("<|user|>", "<|user|> ")),
        "served_template", "failed",
    ),
    "another count of prompt ids": (
        Pages(chat=lambda t, body: {**t.chat(body), "usage": {"prompt_tokens": 99}}),
        "chat_prompt", "warning",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PAGES))
def test_pages_that_disagree(name: str, target: Target) -> None:
    pages, where, expected = PAGES[name]
    with FaultServer(target, info=INFO, pages=pages) as server:
        done = run_probe(server)
    assert verdict(done, where) == expected
    assert done.failed is (expected == "failed")


def test_a_template_that_was_asked_for_is_only_warned_about(target: Target, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text((TARGET / "chat_template.jinja").read_text() + "\n", encoding="utf-8")
    pages = Pages(render=lambda t, body: t.render(body) + "<think>")
    with FaultServer(target, info=INFO, pages=pages) as server:
        done = run_probe(server, chat_template=str(own))
    assert verdict(done, "served_template") == "warning"


def test_a_router_that_drops_fields_is_recognised(target: Target) -> None:
    def router(body: Answer, honest: Answer) -> Fault:
        honest.pop("prompt_token_ids", None)
        honest["meta_info"].pop("output_token_logprobs", None)
        honest["meta_info"]["id"] = "another-id"
        return Fault(answer=honest)

    with FaultServer(target, policy=router, info=INFO) as server:
        done = run_probe(server)
    texts = [f.text for f in done.findings.items if f.name == "between"]
    assert not done.failed
    assert any("return_prompt_token_ids, return_logprob" in text for text in texts)
    assert any("another request id" in text for text in texts)


def test_settings_that_bear_on_ids_are_said(target: Target) -> None:
    info = {
        **INFO,
        "reasoning_parser": "qwen3",
        "preferred_sampling_params": {"top_p": 0.5, "logit_bias": {"5": -100}},
        "speculative_algorithm": "EAGLE3",
        "speculative_accept_threshold_single": 0.8,
        "api_key": "secret-key",
    }
    with FaultServer(target, info=info) as server:
        done = run_probe(server)
    texts = " ".join(f.text for f in done.findings.items if f.name == "settings")
    assert "reasoning_parser qwen3" in texts
    assert "logit_bias" in texts
    assert "below 1" in texts
    assert "secret-key" not in str(done.as_dict())


def test_an_ignored_switch_is_named_with_those_that_work(target: Target) -> None:
    with FaultServer(target, info=INFO) as server:
        done = run_probe(server, template_kwargs={"enable_thinking": False})
    found = finding(done, "switches")
    assert found.verdict == "warning"
    assert "enable_thinking" in found.text
    assert "thinking=False: reasoning: open -> closed" in found.text


def test_thinking_off_is_seen(target: Target) -> None:
    """The honest answer has no reasoning then, and the closer stands in the prompt."""
    with FaultServer(target) as server:
        done = run_probe(server, template_kwargs={"thinking": False})
    assert "closes the reasoning at once" in finding(done, "reasoning").text


def test_what_the_chat_route_would_have_lost_is_shown(target: Target) -> None:
    with FaultServer(target, info=INFO, pages=Pages()) as server:
        done = run_probe(server)
    shown = finding(done, "chat_api")
    assert shown.verdict == "note"
    assert shown.evidence["first_difference"] == len(shown.evidence["true_ids"]) - len(
        done.answers.greedy.generation.output_ids  # type: ignore[union-attr]
    )


# -- before a capture ------------------------------------------------------------------------


def test_a_capture_does_not_start_on_a_failed_probe(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target, policy=lying("closer_missing"), info=INFO) as server:
        with pytest.raises(ProbeFailed, match="the probe failed"):
            capture_from(server, prompts, tmp_path / "run", probe=True)
        assert not (tmp_path / "run").exists()
        assert capture_from(server, prompts, tmp_path / "run", probe=False).rejected == 3


def test_what_was_learnt_is_the_runs_profile(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target, info=INFO, pages=Pages()) as server:
        assert capture_from(server, prompts, tmp_path / "run", probe=True).done == 3
    profile = Run(tmp_path / "run").manifest.profile
    assert profile["template"]["reasoning"] == "open"
    names = {f["name"]: f["verdict"] for f in profile["probe"]["findings"]}
    assert names["scores"] == "ok"


@pytest.mark.parametrize(("stop", "expected"), [(508, "warning"), (70, "failed")])
def test_a_stop_id_that_nobody_declares(stop: int, expected: str, target: Target) -> None:
    """A control id is learnt, and counts as a stop id inside rows; ordinary text is a lie."""

    def policy(body: Answer, honest: Answer) -> Fault | None:
        ids = honest["output_ids"]
        if "logprob_start_len" in body or not ids or ids[-1] != END:
            return None
        honest["output_ids"] = [*ids[:-1], stop]
        honest["meta_info"]["finish_reason"]["matched"] = stop
        honest["meta_info"].pop("output_token_logprobs", None)
        return Fault(answer=honest)

    with FaultServer(target, policy=policy) as server:
        done = run_probe(server)
    assert verdict(done, "stop") == expected
    assert (stop in done.target.profile.stop_ids) is (expected == "warning")


def test_scoring_that_does_not_look_at_the_ids(target: Target) -> None:
    def echo(body: Answer, honest: Answer) -> Fault | None:
        if "logprob_start_len" not in body:
            return None
        for entry in honest["meta_info"]["input_token_logprobs"]:
            entry[0] = None if entry[0] is None else -0.1
        honest["meta_info"]["input_top_logprobs"] = None
        return Fault(answer=honest)

    with FaultServer(target, policy=echo, info=INFO) as server:
        done = run_probe(server)
    assert verdict(done, "scores") == "failed"
    assert "does not look at the ids" in finding(done, "scores").text


def test_prompt_ids_in_front_with_all_accounts_fitting(target: Target) -> None:
    def policy(body: Answer, honest: Answer) -> Fault | None:
        if "logprob_start_len" in body:
            return Fault(status=400, body=b"{}")
        meta = honest["meta_info"]
        honest["output_ids"] = ids = [*body["input_ids"][-2:], *honest["output_ids"]]
        meta["completion_tokens"] = len(ids)
        meta.pop("output_token_logprobs", None)
        honest["text"] = target.tokenizer.decode(ids[:-1])
        return Fault(answer=honest)

    with FaultServer(target, policy=policy) as server:
        done = run_probe(server)
    assert verdict(done, "prompt_in_output") == "warning"


def test_a_server_that_refuses_log_probabilities_is_not_refused(target: Target) -> None:
    def policy(body: Answer, _: Answer) -> Fault | None:
        if "return_logprob" in body:
            return Fault(status=400, body=b'{"error": {"message": "no logprobs here"}}')
        return None

    with FaultServer(target, policy=policy, info=INFO) as server:
        done = run_probe(server)
        assert not done.failed
        assert verdict(done, "logprobs") == "note"
        assert run_probe(server, logprobs=True).failed


def test_a_page_that_never_answers_is_not_waited_for(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines import openai

    monkeypatch.setattr(openai, "GENERATING_S", 0.3)

    def policy(body: Answer, _: Answer) -> Fault | None:
        return Fault(delay_s=600.0) if "logprob_start_len" in body else None

    with FaultServer(target, policy=policy, info=INFO) as server:
        done = run_probe(server)
    assert (verdict(done, "scores"), done.failed) == ("unproven", False)


def test_a_template_that_leaves_the_question_out(target: Target, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("<|user|>{% for m in messages %}{% if m.content is not string %}"
                   "{{ m.content[0].text }}{% endif %}{% endfor %}<|assistant|><think>",
                   encoding="utf-8")  # fmt: skip
    with FaultServer(target, info=INFO) as server:
        done = run_probe(server, chat_template=str(own))
    assert verdict(done, "question") == "failed"
    assert "leaves the user's text out" in finding(done, "question").text


def test_text_that_an_engine_writes_with_other_spaces(target: Target, tmp_path: Path) -> None:
    """Spaces between text and control strings, as slow tokenizers put them."""

    def policy(_: Answer, honest: Answer) -> Fault | None:
        if honest.get("text"):
            honest["text"] = honest["text"].replace("</think>", " </think> ")
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(20))
    with FaultServer(target, policy=policy) as server:
        assert capture_from(server, prompts, tmp_path / "run", probe=True).done == 20


def test_an_answer_of_one_length_whatever_the_probe_asks_for(target: Target) -> None:
    """What must be kept is the capture's budget, not the shorter one of the probe."""

    def fixed(body: Answer, honest: Answer) -> Fault | None:
        if "logprob_start_len" in body:
            return None
        many = (target.plain * 3)[:400]
        ids = [*many, CLOSER, target.plain[0], END]
        honest["output_ids"], honest["text"] = ids, target.tokenizer.decode(ids[:-1])
        meta = honest["meta_info"]
        meta.pop("output_token_logprobs", None)
        meta |= {"completion_tokens": len(ids), "finish_reason": {"type": "stop", "matched": END}}
        return Fault(answer=honest)

    def unscored(body: Answer, honest: Answer) -> Fault | None:
        return fixed(body, honest) or Fault(status=400, body=b"{}")

    with FaultServer(target, policy=unscored) as server:
        assert not run_probe(server).failed
        assert run_probe(server, max_new_tokens=300).failed


def test_a_tokenizer_without_a_template_is_said(target: Target, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(TARGET, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with FaultServer(target, info=INFO) as server:
        done = run_probe(server, tokenizer=str(tmp_path / "bare"))
    assert verdict(done, "template") == "warning"
    assert "--chat-template" in finding(done, "template").text


def test_several_servers_are_not_all_probed(target: Target) -> None:
    with FaultServer(target, info=INFO) as server:
        done = run_probe(server, url=[server.url, "http://127.0.0.1:9"])
    assert "only" in finding(done, "servers").text


def test_control_strings_in_the_input_are_counted_and_shown(target: Target, tmp_path: Path) -> None:
    rows = [*numbered(7), {"prompt": "say <|end|> and <think>"}, {"prompt": "a <think>"}, {"x": 1}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    for policy, said in (("allow", "note"), ("escape", "ok")):
        config = TargetConfig(url=["http://x"], tokenizer=str(TARGET), control_text=policy)
        with FaultServer(target, info=INFO) as server:
            done = probe(
                config.model_copy(update={"url": [server.url]}),
                prompts=PromptReader([str(prompts)]),
            )
        seen = finding(done, "control_text")
        assert seen.verdict == said
        assert seen.evidence["rows"] == 10 and seen.evidence["touched"] == 2
        assert seen.evidence["strings"] == {"<think>": 2, "<|end|>": 1}
        assert seen.text.startswith("2 of the first 10 rows hold control strings in their text")
        assert "p.jsonl:8 holds '<|end|>' (506)" in seen.text
        assert "'<|end|> and <think>' [" in seen.text
        example = seen.evidence["example"]
        assert 506 in example["allow"] and example["escape"].count(506) < example["allow"].count(
            506
        )
        assert "message 1 (user) holds '<|end|>'" in example["refuse"]


def test_the_look_at_the_input_is_bounded(target: Target, tmp_path: Path) -> None:
    from eyas.probe.input import find_control_text

    class Endless:
        def __iter__(self) -> Any:
            yield from reader
            raise AssertionError("looked too far")

    reader = PromptReader([str(write_prompts(tmp_path / "p.jsonl", numbered(50)))])
    with FaultServer(target, info=INFO) as server:
        done = run_probe(server)
    assert find_control_text(done.target, Endless(), rows=50).rows == 50
    assert find_control_text(done.target, Endless(), seconds=-1.0).rows == 1


def test_an_input_without_control_strings_or_through_a_pipe(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target, info=INFO) as server:
        config = TargetConfig(url=[server.url], tokenizer=str(TARGET))
        done = probe(config, prompts=PromptReader([str(prompts)]))
        piped = probe(config, prompts=PromptReader(["-"]))
    assert (
        finding(done, "control_text").text
        == "none of the first 3 rows holds control strings in its text"
    )
    assert "through a pipe" in finding(piped, "control_text").text
