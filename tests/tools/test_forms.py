"""How templates of each shape write calls, and that what they write is read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from eyas.tokens.stand_in import stand_in
from eyas.tools import form as forms
from eyas.tools.calls import Call, Reading, ids_for, message_calls
from eyas.tools.form import ToolForm, tool_form
from eyas.tools.formats import LearntForm
from eyas.tools.samples import Sample
from tools import small

Target = tuple[Any, Any, Any]


@pytest.fixture(autouse=True)
def without_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if renderers were not installed: what is read here is read by the learnt form alone."""
    monkeypatch.setattr(forms, "packaged_readers", lambda tokenizer, model: iter(()))
    monkeypatch.setattr(forms, "package_version", lambda: None)
    forms._tool_form.cache_clear()
    yield
    forms._tool_form.cache_clear()


def form_of(template: str) -> tuple[Target, ToolForm]:
    target = stand_in(template, stop="<|end|>")
    return target, tool_form(*target)


def read(template: str, answer: str) -> Reading:
    (tokenizer, made, profile), form = form_of(template)
    prompt = tokenizer.encode(made.render([{"role": "user", "content": "?"}]))
    return form.read(tokenizer, profile, prompt, tokenizer.encode(answer), None)


SHAPES = {
    "hermes": (small.HERMES, "object"),
    "bare": (small.BARE, "object"),
    "list": (small.LIST, "object"),
    "parted": (small.PARTED, "name"),
    "named ids": (small.NAMED_IDS, "id"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_learnt_and_proven(shape: str) -> None:
    template, first = SHAPES[shape]
    (tokenizer, _, _), form = form_of(template)
    assert form.problem is None
    assert isinstance(form.reader, LearntForm)
    assert form.reader.fields[0] == first
    assert form.reader_name == "template 1"
    assert (form.shows_tools, form.shows_results) == (True, True)
    assert form.parallel == (shape != "bare")
    assert form.as_text == (shape == "parted")
    assert form.call_end == form.answer_end == tokenizer.control["<|end|>"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("several", [False, True])
def test_what_the_template_writes_is_read_back(shape: str, several: bool) -> None:
    (tokenizer, made, profile), form = form_of(SHAPES[shape][0])
    if several and not form.parallel:
        pytest.skip("this shape has one call an answer")
    calls = [Call("look", {"at": 'a "b"\n{c} ö', "n": 3, "deep": [{"x": None}]})]
    calls += [Call("count", {})] if several else []
    ids = ["functions.look:7", "functions.count:8"] if shape == "named ids" else ["call00001"] * 2
    said = message_calls(calls, ids[: len(calls)], as_text=form.as_text)
    question = {"role": "user", "content": "?"}
    prompt = made.render([question])
    answer = {"role": "assistant", "content": "", "tool_calls": said}
    whole = made.render([question, answer], add_generation_prompt=False)
    found = form.read(
        tokenizer,
        profile,
        tokenizer.encode(prompt),
        tokenizer.encode(whole[len(prompt) :]),
        None,
    )
    assert found.fault is None
    assert [(c.name, c.arguments) for c in found.calls] == [(c.name, c.arguments) for c in calls]
    if shape in ("named ids", "list"):
        assert [c.id for c in found.calls] == ids[: len(calls)]


class Numbering:
    """Reads a call with the id that stands in the answer."""

    def read(self, *_: Any) -> Reading:
        return Reading((Call("look", {}, "functions.look:0"),), "")


@pytest.mark.parametrize(
    ("given", "written", "proven"),
    [
        ("functions.look:0", "functions.look:0", True),
        ("call00001", "functions.look:0", True),  # the template numbers calls itself
        ("call00001", "call00001 functions.look:0", False),
    ],
)
def test_whose_ids_a_reader_has_to_give_back(given: str, written: str, proven: bool) -> None:
    tokenizer, _, profile = stand_in(small.NAMED_IDS, stop="<|end|>")
    sample = Sample((Call("look", {}, given),), "", "?", written, "")
    reader: Any = Numbering()
    assert forms._reads_back(reader, tokenizer, profile, sample) is proven


HERMES_ANSWERS = {
    "other spaces": (
        '<tool_call>{"arguments":{"at":1},"name":"look"}</tool_call><|end|>',
        [("look", {"at": 1})],
    ),
    "after content": (
        'I look.\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|end|>',
        [("look", {})],
    ),
    "no call": ("Just <tool words.<|end|>", []),
}


@pytest.mark.parametrize("answer", HERMES_ANSWERS)
def test_calls_of_hermes(answer: str) -> None:
    text, calls = HERMES_ANSWERS[answer]
    found = read(small.HERMES, text)
    assert found.fault is None
    assert [(c.name, c.arguments) for c in found.calls] == calls


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (small.HERMES, '<tool_call>\n{"name": "look", "arguments": {"at"\n</tool_call><|end|>'),
        (small.HERMES, '<tool_call>\n{"name": "look", "arguments": {}}<|end|>'),
        (small.HERMES, '<tool_call>\n{"arguments": {}}\n</tool_call><|end|>'),
        (small.HERMES, '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call><|end|>'),
        (small.HERMES, '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call><|end|>'),
        (
            small.HERMES,
            '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call> and more<|end|>',
        ),
        (small.HERMES, "<tool_call>" + "[" * 3000 + "<|end|>"),
        (
            small.BARE,
            '{"name": "look", "parameters": {}} {"name": "look", "parameters": {}}<|end|>',
        ),
        (small.LIST, '[CALLS][{"name": "look", "arguments": {}, "id": "abcdefghi"}<|end|>'),
        (small.LIST, "[CALLS]look<|end|>"),
        (small.PARTED, "<|calls|><|call|>look<|arguments|>no JSON<|call_end|><|calls_end|><|end|>"),
        (small.PARTED, "<|calls|><|call|><|arguments|>{}<|call_end|><|calls_end|><|end|>"),
        (small.PARTED, "<|calls|><|call|>look now<|arguments|>{}<|call_end|><|calls_end|><|end|>"),
        (small.PARTED, "<|calls|><|end|>"),
    ],
)
def test_what_is_no_whole_call_is_a_fault(template: str, answer: str) -> None:
    found = read(template, answer)
    assert found.calls == ()
    assert found.fault
    assert len(found.fault) < 600


@pytest.mark.parametrize(
    "answer",
    ['{"a": 1}<|end|>', "{1, 2}<|end|>", '{"name": "look"}<|end|>', "Hello {there}<|end|>"],
)
def test_json_is_an_answer_like_others_where_calls_are_bare_json(answer: str) -> None:
    assert read(small.BARE, answer) == Reading()


def test_bare_calls_may_say_arguments_too() -> None:
    found = read(small.BARE, '{"name": "look", "arguments": {"at": 1}}<|end|>')
    assert found.calls == (Call("look", {"at": 1}),)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (small.NO_CALLS, "shows no calls"),
        (small.NO_RESULTS, "shows no results"),
        (small.XML, "nothing at hand reads back"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_why_calls_cannot_be_answered(template: str, says: str) -> None:
    if "never" in template:
        template = "{% if messages | length > 1 %}" + template + "{% endif %}<|end|>"
    _, form = form_of(template)
    assert says in (form.problem or "")


def test_calls_that_nothing_reads_are_seen_where_a_control_string_begins_them() -> None:
    whole = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|end|>'
    found = read(small.NO_RESULTS, whole)
    assert found.calls == ()
    assert "shows no results" in (found.fault or "")


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ('<tool_call>\n{"name": "look"', True),
        ("Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0", True),
        ("<｜tool▁calls▁begin｜>", True),
        ("<minimax:tool_call>", True),
        ('[TOOL_CALLS][{"name"', True),
        ("<function=look>", True),
        ('{"name": "look", "arguments": {}}', True),
        ("<|python_tag|>look()", True),
        ("I call no tool, and a function call is what you want.", False),
        ('{"name": "Ada", "age": 36}', False),
        ('An example: {"name": "look", "arguments": {}}', False),
    ],
)
@pytest.mark.parametrize("template", [small.NO_CALLS, small.XML], ids=["no calls", "unknown"])
def test_usual_calls_are_seen_where_nothing_reads_the_targets(
    template: str, said: str, call: bool
) -> None:
    found = read(template, f"{said}<|end|>")
    assert found.calls == ()
    assert ("looks like the beginning of a call" in (found.fault or "")) is call


def test_a_template_may_show_no_definitions() -> None:
    _, form = form_of(small.NO_TOOLS)
    assert (form.shows_tools, form.problem) == (False, None)


def test_ids_follow_from_the_answer() -> None:
    calls = [Call("look", {}), Call("look", {"at": 1})]
    ids = ids_for(calls, [1, 2, 3])
    assert ids == ids_for(calls, [1, 2, 3])
    assert len({*ids, *ids_for(calls, [1, 2, 4])}) == 4
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)
    own = [Call("look", {}, "functions.look:0"), Call("look", {})]
    assert ids_for(own, [1])[0] == "functions.look:0"


def test_arguments_as_text_keep_the_spelling() -> None:
    call = Call("look", {"at": "ö"}, text='{"at":"ö"}')
    (said,) = message_calls([call], ["x"], as_text=True)
    assert said["function"]["arguments"] == '{"at":"ö"}'
    (said,) = message_calls([call._replace(text=None)], ["x"], as_text=True)
    assert json.loads(said["function"]["arguments"]) == call.arguments


def test_a_template_that_makes_prompts_only_is_read_too() -> None:
    """As functions of Python may be: it shows no answer without what follows."""
    only = "{% if not add_generation_prompt %}{{ raise_exception('prompts only') }}{% endif %}"
    found = read(only + small.HERMES, "So.\n<tool_call>\n" + '{"name": "look", "arguments": {"a": 1}}'
                 "\n</tool_call><|end|>")  # fmt: skip
    assert found.calls == (Call("look", {"a": 1}),)
    assert found.content == "So."
