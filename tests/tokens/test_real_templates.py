"""Every real template renders what transformers renders, or refuses in the same words."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate, Tokenizer
from eyas.tokens.scenes import TOOLS, answer, system, tool_cycle, user

DAY = dt.datetime(2026, 1, 2)
PARTS = [{"type": "text", "text": "qzuser"}, {"type": "text", "text": "more"}]
SWITCHES = {
    "enable_thinking": False,
    "thinking": False,
    "preserve_thinking": True,
    "clear_thinking": False,
}


class StandingClock(dt.datetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
        return DAY


def null_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As OpenAI's API gives back an answer that is nothing but a call."""
    return [messages[0], {**messages[1], "content": None, "refusal": None}, *messages[2:]]


CYCLE, CYCLE_OF_TEXTS = (tool_cycle(arguments_as_text=as_text) for as_text in (False, True))
LONG = [user(), answer(), user("b"), answer("c", "d"), user("e"), answer("f", None), user("g")]
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a question": ([user()], {}),
    "with a system message": ([system(), user()], {}),
    "with an empty one": ([system(""), user()], {}),
    "with a later one": ([user(), answer(), system(), user()], {}),
    "with a developer's": ([system(role="developer"), user()], {}),
    "a second question": ([user(), answer(), user("b")], {}),
    "many turns": (LONG, {}),
    "many turns with switches": (LONG, SWITCHES),
    "two questions in a row": ([user(), user("b")], {}),
    "finished": ([user(), answer()], {"add_generation_prompt": False}),
    "finished with tools": ([*CYCLE, answer()], {"add_generation_prompt": False, "tools": TOOLS}),
    "reasoning under its new name": (
        [user(), {"role": "assistant", "content": "a", "reasoning": "r"}, user()],
        {},
    ),
    "reasoning under gpt-oss's": (
        [user(), {"role": "assistant", "content": "a", "thinking": "r"}, user()],
        {},
    ),
    "nulls": (
        [user(), {**answer("a", None), "reasoning_content": None, "tool_calls": None}, user()],
        {},
    ),
    "parts": ([{"role": "user", "content": PARTS}], {}),
    "system of parts": ([{"role": "system", "content": PARTS}, user()], {}),
    "tools": ([user()], {"tools": TOOLS}),
    "no tools in a list": ([user()], {"tools": []}),
    "a call": (CYCLE, {"tools": TOOLS}),
    "a call without tools": (CYCLE, {}),
    "a call whose arguments are text": (CYCLE_OF_TEXTS, {"tools": TOOLS}),
    "a call and null": (null_content(CYCLE), {"tools": TOOLS}),
    "a call, an answer and a question": ([*CYCLE, answer(), user()], {"tools": TOOLS}),
    "control text": ([user(" <think>x</think> <|im_end|><tool_response>\n")], {}),
    "an effort": ([user()], {"reasoning_effort": "high"}),
}


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<|BOS|>", eos_token="<|EOS|>"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(chat_template_utils, "_alias_reasoning_fields"),
    reason="before 5.20 transformers gave the reasoning no other names",
)
def test_as_transformers_renders(
    reference: PreTrainedTokenizerFast, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Template by template, since compiling one takes longer than rendering all its chats."""
    monkeypatch.setattr(chat_template_utils, "datetime", StandingClock)
    refused: Counter[str] = Counter()
    wrong = []
    paths = sorted((shared / "templates").glob("*.jinja"))
    for path in paths:
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(
            source, special_tokens_map=reference.special_tokens_map, date=DAY.date()
        )
        for chat, (messages, said) in CHATS.items():
            options = {"add_generation_prompt": True, **said}
            expected, refusal = attempt(
                partial(reference.apply_chat_template, chat_template=source, tokenize=False),
                messages,
                **options,
            )
            rendered, own_refusal = attempt(template.render, messages, **options)
            refused[chat] += refusal is not None
            if isinstance(refusal, Exception):
                right = isinstance(own_refusal, TemplateRefusal)
                right = right and (str(refusal) or type(refusal).__name__) in str(own_refusal)
            else:
                right = own_refusal is None and rendered == expected
            if not right:
                wrong.append((path.name, chat, refusal or expected, own_refusal or rendered))
    assert not wrong, wrong[0]
    assert len(paths) == 305
    assert max(refused.values()) < 200, "most render it"


def attempt(
    render: Callable[..., Any], messages: list[dict[str, Any]], **options: Any
) -> tuple[Any, Exception | None]:
    """What is rendered, or why not."""
    try:
        return render(messages, **options), None
    except Exception as error:
        return None, error
