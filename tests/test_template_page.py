"""A template on one page: facts as findings, and what it renders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.demo.server import TARGET
from eyas.errors import EyasError, InputError, TokenizerError
from eyas.findings import Findings
from eyas.template_page import TemplatePage, read_scene, template_page
from eyas.tokens.stand_in import SPECIAL

PLAIN = (
    "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}"
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content is defined else '' }}"
    "{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|><think>\\n' }}{%- endif -%}"
)


def looked_at(page: TemplatePage) -> dict[str, Any]:
    findings = Findings()
    page.look(findings)
    return {finding.name: finding for finding in findings.items}


def test_a_file_without_a_tokenizer_shows_text_and_no_ids(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(PLAIN)
    page = template_page(str(tmp_path / "own.jinja"))
    seen = looked_at(page)
    assert not page.own_tokenizer
    assert seen["reasoning"].text == (
        "the prompt opens the reasoning: it ends '<|end|><|assistant|><think>\\n'; '\\n' follows "
        "the opener, which is so not the last of the ids"
    )
    assert seen["reasoning"].evidence["opener_ids"] is None
    assert "control_strings" not in seen and "borders" not in seen
    question, again, _, finished = map(page.render, page.standard_scenes())
    assert question.text == "<|user|>What is 2+2?<|end|><|assistant|><think>\n"
    assert question.ids is None
    assert again.text is not None and "<think>2+2 is 4.</think>4<|end|>" in again.text
    assert finished.text is not None and finished.text.endswith("4<|end|>")


def test_a_tokenizer_gives_ids(tmp_path: Path) -> None:
    """Whether it is what is looked at, stands beside the file, or is named."""
    (tmp_path / "own.jinja").write_text(PLAIN)
    beside = template_page(str(TARGET / "chat_template.jinja"))
    for page in (template_page(str(TARGET)), beside):
        assert page.own_tokenizer and page.template.source == beside.template.source
    named = template_page(str(tmp_path / "own.jinja"), tokenizer=str(TARGET))
    assert named.template.source == PLAIN
    rendering = named.render(named.standard_scenes()[0])
    assert rendering.ids == named.tokenizer.encode(rendering.text or "")
    assert "control_strings" in looked_at(named)


@pytest.mark.parametrize(
    "written",
    [
        {"chat_template": PLAIN},
        {"chat_template": {"default": PLAIN, "rag": "{{ 1 }}"}},
        {
            "chat_template": [
                {"name": "rag", "template": "1"},
                {"name": "default", "template": PLAIN},
            ]
        },
    ],
)
def test_templates_inside_of_json(written: dict[str, Any], tmp_path: Path) -> None:
    for name in ("chat_template.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(written))
        assert template_page(str(tmp_path / name)).template.source == PLAIN


@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"chat_template": null}', "holds no chat template"),
        ("a.json", '{"chat_template": {"rag": "x"}}', "holds no chat template"),
        ("a.json", "[1]", "holds no chat template"),
        ("a.jinja", "  ", "is empty"),
        ("a.jsonl", '{"messages": []}', "nothing in it is Jinja"),
        ("a.jinja", "{% if %}", "not valid"),
        ("a.jinja", "{{ x | no_such_filter }}", "no_such_filter"),
    ],
)
def test_what_is_no_template_is_one_sentence(
    name: str, written: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(written)
    with pytest.raises(TokenizerError, match=words):
        template_page(str(tmp_path / name))


def test_tools_are_rendered_with_the_template_that_is_meant_for_them(tmp_path: Path) -> None:
    named = {"default": PLAIN, "tool_use": "{{ tools[0].function.name }}"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    page = template_page(str(tmp_path / "chat_template.json"))
    question, _, call, _ = map(page.render, page.standard_scenes())
    assert question.text is not None and question.text.startswith("<|user|>")
    assert call.text == "weather"
    assert page.template.hash != template_page(_file(tmp_path, PLAIN)).template.hash


def _file(directory: Path, text: str) -> str:
    path = directory / "alone.jinja"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("before", "name", "words"),
    [
        ("{{ strftime_now('%H:%M') }}", "date", "prints the day and the time"),
        (
            "{% if messages[0].content is not string %}{{ raise_exception('text only') }}{% endif %}",
            "content",
            "a list of parts is refused: text only",
        ),
        (
            "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}"
            "{% endfor %}",
            "roles",
            "system: refused: no system",
        ),
        (
            "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
            "{{ raise_exception('nine') if c.id | length != 9 }}{{ c.function.arguments.items() }}"
            "{% endfor %}{% endfor %}",
            "tools",
            "ids of calls are not free: nine",
        ),
        (
            "{% for m in messages %}{{ m.content + '' }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.arguments }}{% endfor %}{% endfor %}",
            "versions",
            "a call whose content is null is refused",
        ),
        ("{{ messages[0].thinking }}", "versions", ""),
    ],
)
def test_traps_are_named(before: str, name: str, words: str, tmp_path: Path) -> None:
    seen = looked_at(template_page(_file(tmp_path, before + PLAIN)))
    if words:
        assert words in seen[name].text
        assert seen[name].verdict == "note"
    else:
        assert name not in seen


def test_reasoning_under_a_name_that_transformers_4_does_not_fill(tmp_path: Path) -> None:
    source = PLAIN.replace("reasoning_content", "thinking")
    assert (
        "under the names that it reads"
        in looked_at(template_page(_file(tmp_path, source)))["versions"].text
    )


def test_tools_as_the_models_own_code_writes_them(shared: Path) -> None:
    """Kimi's template prints TypeScript that its tokenizer's code makes; a capture makes it too."""
    pytest.importorskip("renderers", reason="the package that writes TypeScript is not installed")
    page = template_page(str(shared / "tokenizers" / "kimi-k2.5"))
    assert "written as TypeScript" in looked_at(page)["tools"].text
    call = page.render(page.standard_scenes()[2])
    assert call.text is not None and "namespace functions {" in call.text
    assert call.ids == page.tokenizer.encode(call.text)
    scene = page.standard_scenes()[2]
    answer = {"role": "assistant", "content": "Sunny."}
    finished = replace(scene, messages=[*scene.messages, answer])
    whole = page.render(finished)
    assert whole.text is not None and "namespace functions {" in whole.text
    assert whole.ids == page.tokenizer.encode(whole.text)


def test_content_that_must_be_parts(tmp_path: Path) -> None:
    parts = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %} {% endfor %}"
    page = template_page(_file(tmp_path, parts))
    assert looked_at(page)["content"].verdict == "warning"
    assert page.render(page.standard_scenes()[0]).text == "user:What is 2+2? "


def test_a_mask_that_covers_what_the_prompt_writes(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
        "{% generation %}<think>{{ m.reasoning_content }}</think>{{ m.content }}{% endgeneration %}"
        "<|end|>{% else %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    text = looked_at(template_page(_file(tmp_path, source)))["finished"].text
    assert "mask covers the opener" in text and "mask leaves out the end" in text


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("no", "is not JSON"),
        ("[]", "should hold a list of messages"),
        ('{"prompt": "x"}', "should hold a list of messages"),
        ("[1]", "should be an object"),
        ('{"messages": [{}], "tools": {}}', "tools should be a list"),
        ('{"messages": [{}], "tools": "x"}', "text that is not JSON"),
    ],
)
def test_conversations_of_ones_own_that_are_none(written: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(written)
    with pytest.raises(InputError, match=words):
        read_scene(tmp_path / "chat.json")


def test_a_conversation_of_ones_own(tmp_path: Path) -> None:
    """Also the first line of JSON Lines, with tools as text, as data sets have them."""
    row = {"messages": [{"role": "user", "content": "Hi"}], "tools": '[{"a": 1}]'}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n{}\n")
    scene = read_scene(tmp_path / "rows.jsonl")
    assert (scene.messages, scene.tools, scene.answered) == (row["messages"], [{"a": 1}], False)


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    shown = run(app, ["template", str(TARGET), "--ids"])
    assert shown.exit_code == 0
    assert "the prompt opens the reasoning" in shown.output
    assert "thinking=False: reasoning: open -> closed" in shown.output
    assert "<think>[510]" in shown.output
    closed = run(app, ["template", str(TARGET), "--template-kwargs", '{"thinking": false}'])
    assert "closes the reasoning at once" in closed.output
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "Hello\\u001b[2J"}]')
    own = run(app, ["template", _file(tmp_path, PLAIN), "--messages", str(tmp_path / "chat.json")])
    assert "<|user|>Hello\\x1b[2J<|end|><|assistant|><think>⏎" in own.output
    assert "What is 2+2?" not in own.output
    said = run(app, ["template", str(TARGET), "--json"])
    value = json.loads(said.stdout)
    assert value["facts"]["reasoning"] == "open"
    assert value["renderings"][0]["name"] == "a question"
    assert value["renderings"][0]["ids"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/place"], "no such directory"),
        ([str(TARGET), "--date", "tomorrow"], "--date 'tomorrow' is no day"),
        ([str(TARGET), "--template-kwargs", "[1]"], "must be one object"),
        ([str(TARGET), "--template-kwargs", '{"tools": []}'], "tools is no switch"),
        ([str(TARGET), "--chat-template", "/no/such.jinja"], "/no/such.jinja"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["template", *arguments])
    assert isinstance(done.exception, EyasError)
    assert words in str(done.exception) and "\n" not in str(done.exception)


@pytest.mark.slow
def test_every_real_template_has_a_page(shared: Path) -> None:
    pages = 0
    for path in sorted((shared / "templates").glob("*.jinja")):
        page = template_page(str(path))
        seen = looked_at(page)
        assert {"reasoning", "history", "template", "switches"} <= set(seen), path.name
        assert all(finding.text and "\n" not in finding.text for finding in seen.values())
        renderings = [page.render(scene) for scene in page.standard_scenes()]
        assert all((r.text is None) != (r.refused is None) for r in renderings), path.name
        if page.facts.first_user_refusal is None:
            assert renderings[0].text is not None, path.name
        json.dumps([r.as_dict() for r in renderings])
        pages += 1
    assert pages == 305
    assert (
        SPECIAL["bos_token"]
        in template_page(str(shared / "templates" / "Llama-3.1-Instruct.jinja"))
        .render(page.standard_scenes()[0])
        .text
    )
