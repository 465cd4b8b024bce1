"""Reference renders of real models are reproduced id by id."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest

from eyas.tokens import ChatTemplate, load_tokenizer

MODELS = {
    "Kimi-K2.5": ("kimi-k2.5", "Kimi-K2.5"),
    "Kimi-K2-Instruct-0711": ("kimi-k2.5", "Kimi-K2-Instruct-0711"),
    "Qwen3-hybrid": ("qwen3", "Qwen3 (hybrid)"),
    "Qwen3-Thinking-2507": ("qwen3", "Qwen3-Thinking-2507"),
    "Qwen3-Instruct-2507": ("qwen3", "Qwen3-Instruct-2507"),
    "Llama-3.1": ("llama3_1", "Llama-3.1-Instruct"),
    "gpt-oss": ("gptoss", "gpt-oss"),
}
"""Reference file -> (tokenizer, template's name in CANONICAL.tsv)."""


@pytest.mark.parametrize("name", MODELS)
def test_reference_renders(name: str, shared: Path) -> None:
    tokenizer_name, model = MODELS[name]
    files = dict(
        line.split("\t")[:2]
        for line in (shared / "templates" / "CANONICAL.tsv").read_text().splitlines()
    )
    template = (shared / "templates" / files[model]).read_text(encoding="utf-8")
    tokenizer = load_tokenizer(str(shared / "tokenizers" / tokenizer_name), chat_template=template)
    compared = 0
    for line in (shared / "golden" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["tools"] and tokenizer_name == "kimi-k2.5":
            continue  # Kimi's own code writes tools as TypeScript; the template alone cannot
        chat = ChatTemplate.of(tokenizer, kwargs=case["kwargs"], date=dt.date(2026, 1, 2))
        text = chat.render(
            case["messages"],
            add_generation_prompt=case["add_generation_prompt"],
            tools=case["tools"],
        )
        assert text == case["text"], case["case"]
        assert tokenizer.encode(text) == case["ids"], case["case"]
        compared += 1
    assert compared >= 9


def test_kimi_conversion_comes_from_the_cache_the_second_time(shared: Path) -> None:
    from eyas.tokens.tiktoken import cache_directory

    source = str(shared / "tokenizers" / "kimi-k2.5")
    first = load_tokenizer(source)
    (cached,) = cache_directory().glob("tiktoken-*.json")
    assert load_tokenizer(source).encode("Zürich 東京") == first.encode("Zürich 東京")
    cached.write_text("torn")
    assert load_tokenizer(source).encode("東京") == first.encode("東京")
    assert (first.control["<think>"], first.control["</think>"]) == (163606, 163607)
    assert (first.vocab_size, first.model.eos_ids, first.eos_id) == (163840, (163586,), 163585)
