"""Long conversations on real templates of every class, with real tokenizers where there are any."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eyas import Run, Tokenizer, load_tokenizer
from eyas.errors import ConfigError
from eyas.findings import Findings
from eyas.tokens.stand_in import stand_in
from eyas.verify.run import verify_run
from speaking import Stage

OPENED = "qzreasoning"


class Model(NamedTuple):
    """A template, its tokenizer (none for a stand-in), what ends its answers, and the switches
    under which it keeps its earlier turns (None where it cannot)."""

    template: str
    tokenizer: str
    stop: str
    full: dict[str, Any] | None
    tokens: dict[str, Any] | None
    reasons: bool = True
    """Whether its answers have a reasoning."""


MODELS = {
    "Kimi-K2.5": Model("Kimi-K2.5", "kimi-k2.5", "<|im_end|>", None, None),
    "Kimi-K2.6": Model(
        "Kimi-K2.6", "kimi-k2.5", "<|im_end|>",
        {"preserve_thinking": True}, {"preserve_thinking": True}),
    "Kimi-K2-Instruct": Model("Kimi-K2-Instruct-0711", "kimi-k2.5", "<|im_end|>", {}, {}, reasons=False),
    "Qwen3-Thinking-2507": Model("Qwen3-Thinking-2507-unsloth", "qwen3", "<|im_end|>", None, None),
    "Qwen3": Model("Qwen3-hybrid", "qwen3", "<|im_end|>", None, None),
    "Qwen3.8": Model("Qwen3.8-max", "qwen3", "<|im_end|>", {}, {}),
    "Qwen2.5": Model("Qwen2.5-Instruct", "qwen3", "<|im_end|>", {}, {}, reasons=False),
    "DeepSeek-R1": Model("DeepSeek-R1", "deepseek_v3", "<｜end▁of▁sentence｜>", None, None),
    "DeepSeek-R1-0528": Model("DeepSeek-R1-0528", "deepseek_v3", "<｜end▁of▁sentence｜>", None, None),
    "DeepSeek-V3.1": Model("DeepSeek-V3.1", "", "<｜end▁of▁sentence｜>", {}, {}, reasons=False),
    "gpt-oss": Model("gpt-oss", "gptoss", "<|return|>", None, None),
    "Llama-3.1": Model("Llama-3.1-Instruct", "llama3_1", "<|eot_id|>", {}, {}, reasons=False),
    "GLM-4.6": Model("GLM-4.6", "", "<|user|>", None, None),
    "GLM-5.2": Model(
        "GLM-5.2", "", "<|user|>", {"clear_thinking": False}, {"clear_thinking": False}),
    "MiniMax-M3": Model("MiniMax-M3", "", "[e~[", {}, {}),
    "Command-A": Model("command-a-reasoning-08-2025", "", "<|END_OF_TURN_TOKEN|>", {}, {}),
    "Kimi-K3": Model("Kimi-K3-llamacpp-port", "", "<|end_of_msg|>", {}, {}),
    "Ling-3.0": Model("Ling-3.0-flash", "", "<|role_end|>", {}, {}),
    "Gemma-2": Model("Gemma-2-it", "", "<end_of_turn>", {}, {}, reasons=False),
    "Mistral-7B-v0.3": Model("Mistral-7B-Instruct-v0.3", "", "<|eos_token|>", {}, None, reasons=False),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(shared: Path) -> dict[str, Tokenizer]:
    names = {model.tokenizer for model in MODELS.values() if model.tokenizer}
    return {name: load_tokenizer(str(shared / "tokenizers" / name)) for name in names}


def learned(stage: Stage, **kwargs: Any) -> tuple[str, str, str]:
    """The space that the template writes around reasoning and content, as a model learns it."""
    opener, closer = stage.speaker.profile.opener, stage.speaker.profile.closer
    if opener is None or closer is None:
        return "", "", ""
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "qzcontent", "reasoning_content": OPENED}
    for messages in ([question, answer, question], [question, answer]):
        text = stage.speaker.tokenizer.decode(stage.second.prompt(messages, **kwargs))
        found = re.search(
            re.escape(opener.text) + r"(\s*)" + OPENED + r"(\s*)" + re.escape(closer.text)
            + r"(\s*)", text,
        )  # fmt: skip
        if found is not None:
            before, after, lead = found.groups()
            asked = stage.speaker.tokenizer.decode(stage.second.prompt([question], **kwargs))
            return "" if asked.endswith(opener.text + before) else before, after, lead
    return "\n", "\n", "\n\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_turns(
    name: str,
    shared: Path,
    tokenizers: dict[str, Tokenizer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODELS[name]
    source = (shared / "templates" / f"{model.template}.jinja").read_text(encoding="utf-8")
    tokenizer = tokenizers[model.tokenizer] if model.tokenizer else stand_in(source)[0]
    stage = Stage.set(tmp_path / "model", tokenizer, source, stop=model.stop, reasons=model.reasons)
    # Large vocabularies take seconds to load, and each capture would do so.
    monkeypatch.setattr("eyas.target.load_tokenizer", lambda *_, **__: stage.speaker.tokenizer)
    policies = {"served": {}, "full": model.full, "tokens": model.tokens}
    for history, kwargs in policies.items():
        folder = tmp_path / history
        if kwargs is None:
            with pytest.raises(ConfigError, match=f"--history {history} cannot be had"):
                stage.converse(folder, turns=2, history=history)
            continue
        stage.speaker.leads = learned(stage, **kwargs)
        for thread in stage.converse(folder, conversations=1, history=history):
            assert stage.check(thread, history=history, **kwargs) == 0
            assert all(json.loads(trace.template_kwargs) == kwargs for trace in thread)
            assert all((t.reasoning_end is not None) is model.reasons for t in thread)
        findings = Findings()
        verify_run(Run(folder / "run"), stage.speaker.tokenizer, findings)
        assert not findings.failed, findings.of("failed")
