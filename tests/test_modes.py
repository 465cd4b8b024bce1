"""Mixes of template switches: who is given which, what rows record, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capturing import capture_from, change_rows, paired, run_eyas, write_prompts
from eyas import CaptureConfig, ChatTemplate, EyasError, Run, Tokenizer
from eyas.config import TargetConfig
from eyas.demo.server import TARGET
from eyas.errors import ConfigError
from eyas.findings import Findings
from eyas.modes import Mode, Modes, open_modes, parse_mix
from eyas.probe import probe
from eyas.stats import run_stats
from eyas.verify.run import verify_run
from fault_server import Answer, Fault, FaultServer, Target

MIX = [{"weight": 3, "thinking": True}, {"weight": 1, "thinking": False}]
KEYS = st.binary(min_size=16, max_size=16)


def modes_of(*weights: float) -> Modes:
    return Modes(tuple(Mode(w, {"n": n}, None, "none", ()) for n, w in enumerate(weights)))


def thinks(trace: Any) -> bool:
    return bool(json.loads(trace.template_kwargs)["thinking"])


def test_a_mix_is_read() -> None:
    assert parse_mix({"thinking": True}) == [(1.0, {"thinking": True})]
    assert parse_mix({"weight": 2}) == [(1.0, {"weight": 2})]  # no mix, so a switch of that name
    assert parse_mix(MIX) == [(3.0, {"thinking": True}), (1.0, {"thinking": False})]
    assert parse_mix([{"thinking": True}, {}]) == [(1.0, {"thinking": True}), (1.0, {})]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "must not be empty"),
        ("thinking", "object of names and values"),
        ([1], "object of names and values"),
        ([{"weight": 0, "a": 1}], "above 0, not 0"),
        ([{"weight": -1.0}], "above 0, not -1.0"),
        ([{"weight": "much"}], "above 0, not 'much'"),
        ([{"weight": True}], "above 0, not True"),
        ([{"weight": float("nan")}], "above 0, not nan"),
        ([{"weight": float("inf")}], "above 0, not inf"),
        ([{"a": 1}, {"weight": 2, "a": 1}], "there twice"),
        ([{"a": 1}, {"messages": []}], "messages is no switch"),
    ],
)
def test_what_is_no_mix_is_said(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_mix(value)
    with pytest.raises(ValueError, match=said):
        CaptureConfig.model_validate(
            {"prompts": ["p"], "out": "o", "url": "u", "tokenizer": "t", "template_kwargs": value}
        )


@given(KEYS, st.integers(0, 1000), st.lists(st.floats(0.001, 1000), min_size=1, max_size=5))
def test_a_draw_is_one_of_the_modes_and_always_the_same(
    key: bytes, sample: int, weights: list[float]
) -> None:
    modes = modes_of(*weights)
    drawn = modes.of(key, sample)
    assert drawn in modes.each
    assert modes_of(*weights).of(key, sample) == drawn


@given(KEYS)
def test_draws_follow_the_weights(key: bytes) -> None:
    modes = modes_of(0.7, 0.3)
    drawn = Counter(modes.of(key, sample).kwargs["n"] for sample in range(2000))
    assert 1250 < drawn[0] < 1550  # 1400 expected, with a deviation of 20.5


def test_each_thread_keeps_its_mode_and_says_which(
    target: Target, template: ChatTemplate, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(40))
    with FaultServer(target) as server:
        summary = capture_from(server, prompts, tmp_path / "run", n=2, template_kwargs=MIX)
    threads: dict[tuple[str, int], set[str]] = {}
    for trace in Run(tmp_path / "run").traces():
        threads.setdefault((trace.key, trace.sample), set()).add(trace.template_kwargs)
        kwargs = json.loads(trace.template_kwargs)
        text = template.render(json.loads(trace.messages or ""), **kwargs)
        assert trace.prompt_ids == target.tokenizer.encode(text)
        assert (trace.prompt_ids[-1] == 510) is thinks(trace)
        assert (trace.reasoning_start is None) is not thinks(trace)
        if trace.turn:
            first = json.loads(trace.messages or "")[1]
            assert ("reasoning_content" in first) is thinks(trace)
    assert len(threads) == 80
    assert all(len(modes) == 1 for modes in threads.values())
    counted = Counter(mode for modes in threads.values() for mode in modes)
    assert 45 <= counted['{"thinking":true}'] <= 75  # 60 expected, with a deviation of 3.9
    assert summary.modes == {mode: 2 * count for mode, count in counted.most_common()}
    assert run_stats(Run(tmp_path / "run"))["modes"] == summary.modes


def test_draws_outlive_a_stop_and_another_order(target: Target, tmp_path: Path) -> None:
    rows = paired(20)
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", template_kwargs=MIX)
        shutil.copytree(tmp_path / "run", tmp_path / "whole")
        change_rows(
            tmp_path / "run", lambda chosen: chosen.clear(), lambda r: r["turn"] or r["id"] < "p15"
        )
        write_prompts(prompts, rows[::-1])
        again = capture_from(server, prompts, tmp_path / "run", template_kwargs=MIX)
        assert again.new > 20
        with pytest.raises(EyasError, match="template_kwargs: "):
            capture_from(server, prompts, tmp_path / "run", template_kwargs=MIX[::-1])
    found = [
        {(t.id, t.template_kwargs, tuple(t.prompt_ids)) for t in Run(tmp_path / name).traces()}
        for name in ("run", "whole")
    ]
    assert found[0] == found[1]
    assert len({kwargs for _, kwargs, _ in found[0]}) == 2


def test_refused_rows_and_lines_have_their_mode_too(
    target: Target, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [*paired(6), {"prompt": 5}, {"prompt": 6}])

    def policy(_: Answer, honest: Answer) -> Fault:
        honest["meta_info"]["prompt_tokens"] += 1
        return Fault(answer=honest)

    with FaultServer(target, policy=policy) as server:
        capture_from(server, prompts, tmp_path / "run", template_kwargs=MIX)
    assert len(list(Run(tmp_path / "run").rejected())) == 14
    findings = Findings()
    verify_run(Run(tmp_path / "run"), tokenizer, findings)
    assert not findings.failed, findings.of("failed")


def test_verify_knows_who_should_have_been_given_what(
    target: Target, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(12))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run", template_kwargs=MIX)
    findings = Findings()
    verify_run(Run(tmp_path / "run"), tokenizer, findings)
    assert not findings.failed, findings.of("failed")
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert [mode["reasoning"] for mode in manifest["profile"]["modes"]] == ["open", "closed"]
    manifest["fingerprint"]["template_kwargs"] = [
        {"weight": 1, "thinking": True}, {"weight": 3, "thinking": False},
    ]  # fmt: skip
    path.write_text(json.dumps(manifest))
    findings = Findings()
    verify_run(Run(tmp_path / "run"), tokenizer, findings)
    assert {"template_kwargs", "prompt"} <= {finding.name for finding in findings.of("failed")}


def test_every_mode_is_probed(target: Target) -> None:
    switches = [{"thinking": True}, {"thinking": False}, {"thinkng": False}]
    config = {"tokenizer": str(TARGET), "template_kwargs": switches}
    with FaultServer(target) as server:
        done = probe(TargetConfig.model_validate({**config, "url": server.url}))
    found = [f for f in done.findings.items if f.name == "modes"]
    assert not done.failed
    assert [f.verdict for f in found] == ["ok", "warning"]
    assert "closes the reasoning in the prompt" in found[0].text
    assert "renders the very prompt" in found[1].text

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if body.get("input_ids", [0])[-1] != 511:
            return None
        honest["meta_info"]["prompt_tokens"] += 1
        return Fault(answer=honest)

    with FaultServer(target, policy=policy) as server:
        done = probe(TargetConfig.model_validate({**config, "url": server.url}))
    assert [f.name for f in done.findings.of("failed")] == ["modes"]


def test_modes_with_other_markers_are_refused(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
        "<|assistant|>{% if odd is defined %}<thought>{% else %}<think>{% endif %}"
    )
    template = ChatTemplate(source)
    with pytest.raises(ConfigError, match=r"<think>.*<thought>"):
        open_modes(tokenizer, template, [(1.0, {}), (1.0, {"odd": True})])


def test_a_mix_on_the_command_line(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(8))
    (tmp_path / "mix.json").write_text(json.dumps(MIX))
    with FaultServer(target) as server:
        done = run_eyas(
            "capture", str(prompts), "--out", str(tmp_path / "run"), "--url", server.url,
            "--tokenizer", str(TARGET), "--max-new-tokens", "200", "--no-probe",
            "--template-kwargs", f"@{tmp_path / 'mix.json'}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert '75% with {"thinking":true}: ends' in done.stderr
        assert 'modes     {"thinking":true} ' in done.stdout
        again = run_eyas("capture", "--config", str(tmp_path / "run" / "config.yaml"), "--no-probe")
    assert again.returncode == 0, again.stderr
    assert "captured  0 rows" in again.stdout
    assert 'modes      {"thinking":true} ' in run_eyas("stats", str(tmp_path / "run")).stdout
