"""Chat templates that fail: whatever one raises refuses one conversation and ends no capture."""

from __future__ import annotations

import datetime as dt

import pytest

from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ range(10 ** 7) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10 ** 15 }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ [1, 'a'] | sort }}",
        "{{ '%d' % 'x' }}",
        "{{ [1].pop() }}",
        "{{ raise_exception('no') }}",
        "{{ strftime_now(5) }}",
        "{{ messages[0].content.encode('utf-99') }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefusal, match="the chat template refuses: "):
        ChatTemplate(source).render(CHAT)


def test_messages_are_not_changed_by_rendering() -> None:
    chat = [*CHAT, {"role": "assistant", "content": "A", "reasoning_content": "R"}, *CHAT]
    before = [dict(message) for message in chat]
    template = ChatTemplate("{% for m in messages %}{{ m }}{% endfor %}")
    assert template.render(chat) == template.render(chat)
    assert chat == before


def test_the_clock_stands_still_and_only_where_it_is_read() -> None:
    day = dt.date(2024, 2, 29)
    shown = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}", date=day)
    assert shown.render(CHAT) == "29 Feb 2024 00:00:00"
    assert not ChatTemplate("{{ messages[0].content }}", date=day).shows_date


def test_switches_of_one_render_go_before_those_of_the_run() -> None:
    template = ChatTemplate("{{ a }}{{ b }}{{ add_generation_prompt }}", kwargs={"a": 1, "b": 2})
    assert template.render(CHAT, b=3) == "13True"
    assert template.render(CHAT, add_generation_prompt=False) == "12False"


def test_the_hash_is_of_the_bytes() -> None:
    one, other = ChatTemplate("{{ x }}"), ChatTemplate("{{ x }}{# #}")
    assert one.render(CHAT) == other.render(CHAT)
    assert one.hash != other.hash
    assert one.hash == ChatTemplate("{{ x }}", kwargs={"x": 1}).hash


def test_what_is_null_is_not_there() -> None:
    """OpenAI's answers hold ``content: null``; transformers 5 does not show it to templates."""
    shows = ChatTemplate(
        "{% for m in messages %}{{ m.content or m.calls }},{{ m | length }};{% endfor %}"
    )
    assert (
        shows.render([*CHAT, {"role": "assistant", "content": None, "calls": "c"}]) == "Hi,2;c,2;"
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_seen_under_each_of_its_names(name: str) -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}")
    assert template.render([{"role": "assistant", "content": "", name: "why"}]) == "whywhy"
