"""A refusal says what the template would take instead, where that is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate
from eyas.tokens.refusals import explain
from eyas.tokens.scenes import TOOLS, answer, system, tool_cycle, user

SHOWS = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
PARTS: Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}


def explained(source: str, messages: list[Message], tools: Any = None) -> str:
    template = ChatTemplate(source)
    with pytest.raises(TemplateRefusal) as refused:
        template.render(messages, tools=tools)
    return explain(template, messages, tools, refused.value)


@pytest.mark.parametrize(
    ("check", "messages", "tools", "takes"),
    [
        ("{{ messages[0].content + 'x' }}", [PARTS], None,
         "with content as text instead of a list of parts"),
        ("{{ messages[1].content + 'x' }}", tool_cycle(arguments_as_text=True, content=None), None,
         "with an empty text where content is null"),
        ("{{ messages[1].tool_calls[0].function.arguments.items() }}",
         tool_cycle(arguments_as_text=True), TOOLS,
         "with the arguments of calls as objects instead of JSON text"),
        ("{{ messages[1].tool_calls[0].function.arguments + 'x' }}",
         tool_cycle(arguments_as_text=False), None,
         "with the arguments of calls as JSON text instead of objects"),
        ("{{ raise_exception('nine') if messages[2].tool_call_id | length != 9 }}",
         tool_cycle(arguments_as_text=True, call_id="x"), None,
         "with ids of calls of nine letters and digits"),
        ("{{ messages[1].content + messages[1].tool_calls[0].function.arguments.at }}",
         tool_cycle(arguments_as_text=True, content=None), None,
         "with an empty text for null and arguments as objects"),
        ("{{ raise_exception('alternate') if messages | length == 2 }}", [user(), user()], None,
         "with messages of one role in a row made one"),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}",
         [system(), user()], None, "without the system message"),
        ("{{ raise_exception('no tools') if tools }}", [user()], TOOLS, "without tools"),
        ("{% for tool in tools %}{% endfor %}", [user()], None,
         "with a list of tools, be it an empty one"),
    ],
)  # fmt: skip
def test_what_it_takes_is_said(check: str, messages: list[Message], tools: Any, takes: str) -> None:
    said = explained(check + SHOWS, messages, tools)
    assert said.endswith(f"(it takes the conversation {takes})")


def test_a_name_that_is_missing() -> None:
    said = explained("{{ functions[0] }}" + SHOWS, [user()])
    assert said.endswith("'functions' is undefined (it asks for functions, which --template-kwargs "
                         "can give)")  # fmt: skip


def test_where_nothing_helps_the_templates_words_are_all() -> None:
    assert explained("{{ raise_exception('never') }}", [user(), answer()]) == (
        "the chat template refuses: never"
    )


@pytest.mark.parametrize("made", ["{{ messages | from_json }}", "{{ messages.append(1) }}"])
def test_templates_of_other_renderers(made: str) -> None:
    """llama.cpp has a filter from_json and lets lists be appended to; transformers does not."""
    said = explained("{% if messages %}" + made + "{% endif %}", [user()])
    assert said.endswith(
        "(it was written for another renderer than transformers, such as llama.cpp's)"
    )


def test_parts_that_are_wanted() -> None:
    said = explained("{{ messages[0].content[0].text + 'x' }}", [user()])
    assert said.endswith(
        "(it takes the conversation with content as a list of parts instead of text)"
    )


def test_parts_that_would_only_be_printed_are_no_help() -> None:
    source = "{{ raise_exception('no') if 'x' in messages[0].content }}" + SHOWS
    assert explained(source, [user("x")]) == "the chat template refuses: no"


def test_messages_that_are_odd_in_every_way_are_survived() -> None:
    odd: list[Message] = [
        {"role": "user", "content": [1, {"text": 2}], "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}, {}]},
        {"content": None},
    ]
    assert "never" in explained("{{ raise_exception('never') }}", odd, [{}])


def test_real_templates(shared: Path) -> None:
    """Of those that refuse parts all take text, and what most want of a call is said."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    cycle = tool_cycle(arguments_as_text=True, content=None)
    found: Counter[str] = Counter()
    for path in sorted((shared / "templates").glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"), special_tokens_map=special)
        if not _takes(template, [user()]):
            continue
        for kind, messages, tools in (("parts", [PARTS], None), ("call", cycle, TOOLS)):
            try:
                template.render(messages, tools=tools)
            except TemplateRefusal as error:
                said = explain(template, messages, tools, error)
                found[kind] += 1
                found[f"{kind}: {said.partition('(it takes the conversation ')[2]}"] += 1
    assert found["parts"] == found["parts: with content as text instead of a list of parts)"] == 134
    assert found["call: with an empty text where content is null)"] >= 70
    assert found["call: with the arguments of calls as objects instead of JSON text)"] >= 60
    assert found["call: "] < found["call"] / 4


def _takes(template: ChatTemplate, messages: list[Message]) -> bool:
    try:
        return bool(template.render(messages))
    except TemplateRefusal:
        return False
