"""A server whose answers are scripted by what its prompt ends with, and targets of several families.

What a family writes stands here in full, as its models write it, so that nothing that is tested
decides what is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from eyas.tokens import Tokenizer, load_tokenizer
from fault_server import Answer, Target

Asked = tuple[str, dict[str, Any]]
"""A tool's name and arguments."""
Reply = str | list[Asked]
"""What the target says, or the tools that it calls."""


@dataclass
class Family:
    """How one family of models talks."""

    name: str
    base: str
    """The tokenizer's folder in the test data."""
    template: str
    """The template's file in the test data, without suffix."""
    call: Callable[[list[tuple[str, dict[str, Any], str]]], str]
    """What a model writes to call tools: (name, arguments, id) each."""
    end: str
    """What ends an answer without calls."""
    call_end: str = ""
    """What ends one with calls, where that is something else."""
    before: str = ""
    """What it writes before content or calls: its reasoning."""
    reasoning: str | None = None
    added: Sequence[str] = ()
    """Control strings that the tokenizer at hand has not."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    make_id: Callable[[int, str], str] = lambda n, name: f"call0000{n}"
    as_text: bool = False
    parallel: bool = True
    glue: str = ""
    """What stands between content and calls."""
    content: bool = True
    """Whether its template shows content beside calls."""

    def said(self, text: str) -> str:
        return f"{self.before}{text}{self.end}"

    def called(self, asked: list[Asked], first: int, content: str = "") -> str:
        calls = [
            (name, args, self.make_id(first + n, name)) for n, (name, args) in enumerate(asked)
        ]
        glue = self.glue if content else ""
        return f"{self.before}{content}{glue}{self.call(calls)}{self.call_end or self.end}"

    def message(self, reply: Reply, first: int = 0, content: str = "") -> dict[str, Any]:
        """The answer as a chat client sends it back, written by hand."""
        lead = self.before[len(self.before.rstrip()) :]
        message: dict[str, Any] = {"role": "assistant", "content": content and lead + content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if isinstance(reply, str):
            return {**message, "content": lead + reply}
        message["tool_calls"] = [
            {
                "id": self.make_id(first + n, name),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(args) if self.as_text else args},
            }
            for n, (name, args) in enumerate(reply)
        ]
        return message

    def result(self, name: str, number: int, content: str) -> dict[str, Any]:
        return {
            "role": "tool",
            "tool_call_id": self.make_id(number, name),
            "name": name,
            "content": content,
        }

    def prepare(self, shared: Path, folder: Path) -> Home:
        """Its files in a folder of their own."""
        source = shared / "tokenizers" / self.base
        template = (shared / "templates" / f"{self.template}.jinja").read_text(encoding="utf-8")
        plain = _loaded(str(source))
        backend = plain.backend
        if missing := [text for text in self.added if text not in plain.control]:
            backend = Backend.from_str(plain.backend.to_str())
            more = [AddedToken(text, normalized=False, special=True) for text in missing]
            backend.add_special_tokens(more)
        special = dict(plain.special_tokens_map)
        return make_home(folder, backend, special, template, [self.end, self.call_end or self.end])


_loaded = lru_cache(maxsize=2)(load_tokenizer)
"""Large vocabularies take seconds to load; several families share one."""


@dataclass
class Home:
    """A target's files, as a user has them."""

    folder: Path
    tokenizer: Tokenizer
    reference: PreTrainedTokenizerFast

    def render(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        """What transformers makes of a conversation, tokenized by the tokenizers library."""
        text = self.reference.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **more
        )
        ids: list[int] = self.reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def make_home(
    folder: Path, backend: Backend, special: dict[str, str], template: str, ends: Sequence[str]
) -> Home:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    stops = sorted({backend.token_to_id(end) for end in ends})
    names = {name: text for name, text in special.items() if isinstance(text, str)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return Home(folder, load_tokenizer(str(folder)), reference)


class Talker(Target):
    """A target that answers by the last of some words that its prompt holds."""

    def __init__(
        self, home: Home, family: Family, script: dict[str, Reply | Callable[[str], str]]
    ) -> None:
        self.tokenizer = home.tokenizer
        self.family = family
        self.script = script

    def right_ids(self, prompt: list[int]) -> list[int]:
        text = self.tokenizer.decode(prompt)
        words = max(self.script, key=text.rfind)
        reply = self.script[words] if words in text else "?"
        if callable(reply):
            said = reply(text)
        elif isinstance(reply, str):
            said = self.family.said(reply)
        else:
            said = self.family.called(reply, self.calls_before(text))
        return self.tokenizer.encode(said)

    def calls_before(self, text: str) -> int:
        """How many calls the prompt shows, where ids count them."""
        kimi = text.count("## Return of functions.")
        return kimi + text.count('"call_id": "call0000')

    def answer(self, body: Answer, *, text: bool = True) -> Answer:
        answer = super().answer(body, text=text)
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "stop":
            finish["matched"] = answer["output_ids"][-1]
        return answer


def hermes(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    blocks = [json.dumps({"name": name, "arguments": args}) for name, args, _ in calls]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def kimi(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{json.dumps(args)}"
        "<|tool_call_end|>"
        for _, args, call_id in calls
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def llama(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    (name, args, _), *_ = calls
    return f'{{"name": "{name}", "parameters": {json.dumps(args)}}}'


def mistral(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    return "[TOOL_CALLS]" + json.dumps(
        [{"name": name, "arguments": args, "id": call_id} for name, args, call_id in calls]
    )


def glm(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    blocks = []
    for name, args, _ in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in args.items()
        )
        blocks.append(f"\n<tool_call>{name}\n{pairs}</tool_call>")
    return "".join(blocks)


def deepseek_r1(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```"
        "<｜tool▁call▁end｜>"
        for name, args, _ in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(blocks)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>"
        for name, args, _ in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>"


_GLM_STRINGS = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "/nothink", "<|begin_of_image|>",
    "<|end_of_image|>",
)  # fmt: skip
_MISTRAL_STRINGS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "kimi-k2.5",
            "kimi-k2.5",
            "Kimi-K2.5",
            kimi,
            "<|im_end|>",
            before="hm</think>",
            reasoning="hm",
            make_id=lambda n, name: f"functions.{name}:{n}",
        ),
        Family(
            "qwen3",
            "qwen3",
            "Qwen3-hybrid",
            hermes,
            "<|im_end|>",
            before="<think>\nhm\n</think>\n\n",
            reasoning="\nhm\n",
            glue="\n",
        ),
        Family(
            "llama-3.1",
            "llama3_1",
            "Llama-3.1-Instruct",
            llama,
            "<|eot_id|>",
            parallel=False,
            content=False,
        ),
        Family(
            "mistral-nemo",
            "llama3_1",
            "Mistral-Nemo-Instruct-2407",
            mistral,
            "</s>",
            added=_MISTRAL_STRINGS,
            content=False,
        ),
        Family(
            "glm-4.6",
            "qwen3",
            "GLM-4.6",
            glm,
            "<|user|>",
            call_end="<|observation|>",
            before="\n<think>hm</think>\n",
            reasoning="hm",
            added=_GLM_STRINGS,
        ),
        Family(
            "deepseek-r1",
            "deepseek_v3",
            "DeepSeek-R1-0528",
            deepseek_r1,
            "<｜end▁of▁sentence｜>",
            before="<think>\nhm\n</think>\n",
            reasoning="\nhm\n",
        ),
        Family(
            "deepseek-v3.1",
            "deepseek_v3",
            "DeepSeek-V3.1-Terminus",
            deepseek_v31,
            "<｜end▁of▁sentence｜>",
            as_text=True,
        ),
    )
}
