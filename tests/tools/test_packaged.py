"""The readers of the package renderers, on real vocabularies and templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.findings import Findings
from eyas.modes import open_modes
from eyas.probe.calls import look_at_calls
from eyas.prompting import Chat, Prompting, Refusal
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer
from eyas.tools import packaged
from eyas.tools.form import ToolForm, tool_form
from eyas.tools.packaged import PackagedReader, packaged_readers, typescript

pytest.importorskip("renderers")


def target(shared: Path, folder: str, template: str) -> tuple[Tokenizer, ChatTemplate, Profile]:
    source = (shared / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer(str(shared / "tokenizers" / folder), chat_template=source)
    made = ChatTemplate.of(tokenizer)
    return tokenizer, made, build_profile(tokenizer, made)


@pytest.mark.parametrize(
    ("folder", "template", "reader"),
    [
        ("kimi-k2.5", "Kimi-K2.5", "kimi-k2.5"),
        ("kimi-k2.5", "Kimi-K2-Thinking__huggingface.js", "kimi-k2"),
        ("kimi-k2.5", "Kimi-K2-Instruct-0711", "kimi-k2"),  # its template numbers calls itself
        ("qwen3", "Qwen3-hybrid", "qwen3"),
        ("qwen3", "Qwen2.5-Instruct", "qwen3"),
        ("qwen3", "Qwen3-Coder", "prime-qwen3"),
        ("deepseek_v3", "DeepSeek-R1-0528", "deepseek-r1"),
    ],
)
def test_the_reader_is_found_without_a_name(
    shared: Path, folder: str, template: str, reader: str
) -> None:
    """The tokenizer lies in a directory whose name says nothing to the package."""
    form = tool_form(*target(shared, folder, template))
    assert isinstance(form.reader, PackagedReader)
    assert form.reader_name == f"renderers {packaged.package_version()}: {reader}"
    assert form.problem is None


@pytest.mark.parametrize(
    ("folder", "template", "says"),
    [
        ("deepseek_v3", "DeepSeek-V3-lenml", "shows no calls"),
        ("gptoss", "gpt-oss", "nothing at hand"),
    ],
)
def test_where_nothing_reads_calls(
    shared: Path, folder: str, template: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss's renderer wants a vocabulary from the network, which a test does not fetch."""
    monkeypatch.setattr(packaged, "_FETCHES", {"gpt-oss": "no such string"})
    form = tool_form(*target(shared, folder, template))
    assert (form.reader, form.reader_name) == (None, None)
    assert says in (form.problem or "")
    findings = Findings()
    look_at_calls(findings, form, "3 rows have tools")
    (finding,) = findings.of("warning")
    assert says in finding.text
    assert "3 rows have tools" in finding.text


class Broken:
    """A renderer that fails on everything."""

    def parse_response(self, *_: Any, **__: Any) -> Any:
        raise RecursionError("too deep")


def test_what_a_reader_raises_is_a_fault_of_the_reading() -> None:
    found = PackagedReader("broken", Broken()).read([1], [2], None)
    assert found.calls == ()
    assert found.fault == "renderers (broken) failed: RecursionError: too deep"


def test_a_small_vocabulary_has_no_renderer(tokenizer: Tokenizer) -> None:
    assert [reader.name for reader in packaged_readers(tokenizer, "")] == []


# Kimi's declarations


def golden(shared: Path) -> Iterator[dict[str, Any]]:
    lines = (shared / "golden" / "Kimi-K2.5.jsonl").read_text(encoding="utf-8").splitlines()
    yield from (case for case in map(json.loads, lines) if case["tools"])


def test_kimi_writes_tools_as_typescript(shared: Path) -> None:
    """Reference ids of Moonshot's own tokenizer, tools, calls and results included."""
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "kimi-k2.5"))
    seen = 0
    for case in golden(shared):
        mix = [(1.0, case["kwargs"])]
        modes, profile = open_modes(tokenizer, ChatTemplate.of(tokenizer), mix)
        prompting = Prompting(tokenizer, modes, profile)
        if not case["add_generation_prompt"]:
            continue
        prompt = prompting.prompt(Chat(case["messages"], case["tools"]))
        assert prompt.ids == case["ids"], case["case"]
        seen += 1
    assert seen >= 8


def test_without_renderers_such_tools_are_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas import prompting as module

    monkeypatch.setattr(module, "typescript", lambda tokenizer, tools: None)
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "kimi-k2.5"))
    modes, profile = open_modes(tokenizer, ChatTemplate.of(tokenizer), [(1.0, {})])
    tools = [{"type": "function", "function": {"name": "look"}}]
    question = [{"role": "user", "content": "?"}]
    prompt = Prompting(tokenizer, modes, profile).prompt(Chat(question, tools))
    assert isinstance(prompt, Refusal)
    assert prompt.reason == "tools_unwritten"
    assert "eyas[tools]" in prompt.detail
    assert not isinstance(Prompting(tokenizer, modes, profile).prompt(Chat(question)), Refusal)


def test_declarations_of_a_vocabulary_that_is_not_kimis(tokenizer: Tokenizer) -> None:
    assert typescript(tokenizer, [{"type": "function", "function": {"name": "look"}}]) is None


def test_a_finding_says_what_reads_calls(shared: Path) -> None:
    form: ToolForm = tool_form(*target(shared, "kimi-k2.5", "Kimi-K2.5"))
    findings = Findings()
    look_at_calls(findings, form)
    (finding,) = findings.items
    assert (finding.name, finding.verdict) == ("calls", "ok")
    assert "kimi-k2.5" in finding.text
