"""The demo target as files: small, whole, and one id for each control string."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eyas.demo.problems import generate
from eyas.demo.server import TARGET

CONTROL = (
    "<|endoftext|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<think>",
    "</think>",
)
SCRIPT = Path(__file__).parents[2] / "scripts" / "check_demo_target.py"
USER = {"role": "user", "content": "What is 2+2?"}
HISTORY = [USER, {"role": "assistant", "reasoning_content": "why", "content": "4"}, USER]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(TARGET)


def text_of(tokenizer: Any, messages: list[dict[str, Any]], **switches: Any) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **switches
    )
    return text


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((TARGET / name).read_text())
    return loaded


def test_it_is_small_enough_to_travel_in_the_package() -> None:
    assert sum(path.stat().st_size for path in TARGET.iterdir()) <= 10_000_000
    served = ("model.gguf", "tokenizer.json")
    assert sum((TARGET / name).stat().st_size for name in served) <= 8_000_000


def test_nothing_but_its_own_files_lies_there() -> None:
    assert {path.name for path in TARGET.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.gguf",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_it_is_deep_enough_for_eagle_3_and_wide_enough_for_vllm() -> None:
    model = config("config.json")
    assert model["architectures"] == ["Qwen3ForCausalLM"]
    assert model["num_hidden_layers"] >= 7
    assert model["head_dim"] >= 32
    assert model["vocab_size"] % 64 == 0
    assert model["dtype"] == "bfloat16"
    assert "auto_map" not in model


def test_each_control_string_is_one_id(tokenizer: Any) -> None:
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in CONTROL]
    assert [len(own) for own in ids] == [1] * len(CONTROL)
    assert len({own[0] for own in ids}) == len(CONTROL)


def test_every_id_of_the_model_is_one_of_the_tokenizer(tokenizer: Any) -> None:
    assert len(tokenizer) == config("config.json")["vocab_size"]


def test_thinking_markers_survive_where_special_tokens_are_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode("<think>why</think>4<|end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>why</think>4"


def test_digits_are_single_ids(tokenizer: Any) -> None:
    assert len(tokenizer.encode("0123456789", add_special_tokens=False)) == 10


@pytest.mark.parametrize("text", ["tab\t and  spaces \n\n", "日本語 🙂 naïve", "<|end|> <think>"])
def test_text_comes_back_from_ids_unchanged(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_generation_prompt_ends_with_the_opener(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<think>")
    assert text_of(tokenizer, [USER]) == "<|user|>What is 2+2?<|end|><|assistant|><think>"


def test_without_thinking_the_prompt_closes_it_at_once(tokenizer: Any) -> None:
    assert text_of(tokenizer, [USER], thinking=False).endswith("<|assistant|><think></think>")


def test_earlier_reasoning_is_dropped_unless_it_is_preserved(tokenizer: Any) -> None:
    assert "<think></think>4<|end|>" in text_of(tokenizer, HISTORY)
    assert "<think>why</think>4<|end|>" in text_of(tokenizer, HISTORY, preserve_thinking=True)


def test_a_system_message_comes_first(tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert text_of(tokenizer, [system, USER]).startswith("<|system|>Be brief.<|end|><|user|>")
    with pytest.raises(Exception, match="can only be the first"):
        text_of(tokenizer, [USER, system])


def test_content_is_kept_to_the_last_space(tokenizer: Any) -> None:
    spaced = {"role": "user", "content": "\n a \n"}
    assert text_of(tokenizer, [spaced]).startswith("<|user|>\n a \n<|end|>")


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "tool", "content": "4"}, "Unknown role"),
        ({"role": "user", "content": [{"type": "text", "text": "4"}]}, "must be a string"),
        ({"role": "user", "content": None}, "must be a string"),
    ],
)
def test_what_it_cannot_say_it_refuses(
    tokenizer: Any, message: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        text_of(tokenizer, [message])


def test_only_the_end_stops_it(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    generation = config("generation_config.json")
    assert generation["eos_token_id"] in (end, [end])
    assert generation["do_sample"] is True
    assert config("config.json")["eos_token_id"] == end


def test_problems_fit_the_context_many_times(tokenizer: Any) -> None:
    lengths = [len(tokenizer.encode(p.reasoning)) for p in generate(0, 200, "held_out")]
    assert max(lengths) < 256


def test_both_weight_files_hold_the_same_numbers() -> None:
    pytest.importorskip("gguf", reason="reading the GGUF file needs the gguf package")
    assert check_script().weight_differences(TARGET) == []


def test_the_gguf_file_holds_the_same_vocabulary_and_template(tokenizer: Any) -> None:
    gguf = pytest.importorskip("gguf", reason="reading the GGUF file needs the gguf package")
    fields = gguf.GGUFReader(TARGET / "model.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    template = (TARGET / "chat_template.jinja").read_text()
    assert fields["tokenizer.chat_template"].contents() == template
    assert tokens[fields["tokenizer.ggml.eos_token_id"].contents()] == "<|end|>"
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"


def check_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_demo_target", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name while it is being executed.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
