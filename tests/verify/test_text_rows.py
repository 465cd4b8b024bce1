"""Rows of messages and texts: what rendering and encoding them makes of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer
from verifying import Desk, chat_row

KEEPS = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}<|user|>{{ m.content }}<|end|>"
    "{%- else -%}<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ m.content }}<|end|>"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|><think>{%- endif -%}"
)
"""A template that renders the reasoning where the model generates it."""

STRIPS = KEEPS.replace("{{ m.content }}<|end|>{%- endif", "{{ m.content.split('</think>')[-1] }}"
                       "<|end|>{%- endif")  # fmt: skip


@pytest.fixture
def desk(tokenizer: Tokenizer, tmp_path: Path) -> Desk:
    """The demo target, whose template drops the reasoning."""
    return Desk.of(tokenizer, tmp_path)


@pytest.fixture
def keeper(tokenizer: Tokenizer, tmp_path: Path) -> Desk:
    return Desk.of(tokenizer, tmp_path, KEEPS)


def test_a_row_that_is_rendered_as_served_has_no_fault(keeper: Desk) -> None:
    outcome = keeper.verify(chat_row("4", "2 + 2 = 4."), chat_row("4", "Two and two."))
    assert outcome.faults == {}
    assert outcome.proven == {"lines", "reasoning", "template"}
    (unproven,) = outcome.findings.of("unproven")
    assert unproven.name == "sampled"
    assert "cannot be proven" in unproven.text
    assert outcome.report.regenerate_command is None


def test_reasoning_that_the_template_drops(desk: Desk) -> None:
    outcome = desk.verify(chat_row("4", "2 + 2 = 4."))
    assert outcome.verdicts == {"reasoning_dropped": "failed"}
    assert "'</think>4<|end|>'" in outcome.report.faults["reasoning_dropped"].examples[0].detail
    assert "template" not in outcome.proven


@pytest.mark.parametrize("key", ["reasoning", "thinking", "reasoning_content"])
def test_every_usual_key_of_the_reasoning(key: str, keeper: Desk) -> None:
    row = chat_row("4")
    row["messages"][1][key] = "Two and two."
    assert keeper.verify(row).faults == {}
    assert keeper.verify(chat_row("4")).verdicts == {"reasoning_missing": "failed"}


@pytest.mark.parametrize("content", ["<think>Two and two.</think>4", "Two and two.</think>4"])
def test_inline_reasoning_says_what_the_template_does(
    content: str, desk: Desk, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kept = desk.verify(chat_row(content))
    assert kept.verdicts == {"reasoning_inline": "warning", "reasoning_misplaced": "failed"}
    assert kept.report.faults["reasoning_inline"].examples[0].detail.startswith("kept")
    stripped = Desk.of(tokenizer, tmp_path, STRIPS).verify(chat_row(content))
    assert stripped.verdicts == {"reasoning_inline": "warning", "reasoning_dropped": "failed"}
    assert stripped.report.faults["reasoning_inline"].examples[0].detail.startswith("stripped")


@pytest.mark.parametrize(
    ("row", "faults"),
    [
        (chat_row("", "Two."), {"empty_answer"}),
        (chat_row("4<|end|>\n", "Two."), {"stop_text"}),
        (chat_row("a <|user|> b", "Two."), {"control_text"}),
        (chat_row("4", "Two.", finish_reason="length"), {"truncated_text"}),
        (chat_row("4", "Two.", metadata={"finish_reason": "max_tokens"}), {"truncated_text"}),
        ({"messages": [{"role": "user", "content": "Hi"}]}, {"no_answer"}),
    ],
)
def test_faults_of_contents(row: dict[str, Any], faults: set[str], keeper: Desk) -> None:
    assert set(keeper.verify(row).faults) == faults


def test_the_template_refuses_with_its_own_words(desk: Desk) -> None:
    row = chat_row("4", "Two.")
    row["messages"].insert(1, {"role": "tool", "content": "7"})
    outcome = desk.verify(row)
    assert outcome.verdicts == {"template_refuses": "failed"}
    assert "Unknown role" in outcome.report.faults["template_refuses"].examples[0].detail


def test_shapes_of_the_same_conversation(keeper: Desk) -> None:
    reasoning = "Two and two."
    answer = {"role": "assistant", "content": "4", "reasoning_content": reasoning}
    user = {"role": "user", "content": "What is 2+2?"}
    rows: list[dict[str, Any]] = [
        {"messages": [user, answer]},
        {"conversations": [
            {"from": "human", "value": "What is 2+2?"},
            {"from": "gpt", "value": "4", "reasoning": reasoning},
        ]},
        {"prompt": [user], "completion": [answer]},
        {"prompt": "What is 2+2?", "response": "4", "reasoning_content": reasoning},
        {"instruction": "What is", "input": "2+2?", "output": "4", "thinking": reasoning},
        {"messages": [user, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": reasoning}, {"type": "text", "text": "4"}]}]},
    ]  # fmt: skip
    outcome = keeper.verify(*rows)
    assert outcome.faults == {}
    assert outcome.report.kinds == {
        "messages": 2,
        "conversations": 1,
        "prompt+completion": 1,
        "prompt+response": 1,
        "instruction+output": 1,
    }


def test_earlier_answers_whose_reasoning_is_dropped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    drops = KEEPS.replace("m.reasoning_content or ''", "m.reasoning_content if loop.last else ''")
    row = chat_row("4", "Two and two.")
    row["messages"] += chat_row("6", "Three and three.")["messages"]
    outcome = Desk.of(tokenizer, tmp_path, drops).verify(row)
    assert outcome.verdicts == {"history_reasoning": "warning"}


def test_a_prompt_that_is_not_in_the_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = KEEPS.replace("<|assistant|><think>{{", "<|assistant|>{{", 1)
    outcome = Desk.of(tokenizer, tmp_path, other).verify(chat_row("4", "Two."))
    assert outcome.verdicts["prompt_lost"] == "failed"


def test_texts_that_were_rendered_already(desk: Desk) -> None:
    prompt = "<|user|>What is 2+2?<|end|><|assistant|><think>"
    outcome = desk.verify(
        {"prompt": prompt, "completion": "Two.</think>4<|end|>"},
        {"text": prompt + "Two.</think>4<|end|>"},
    )
    assert outcome.faults == {}
    assert outcome.report.kinds == {"prompt+completion": 1, "text": 1}
    cut = desk.verify({"prompt": prompt, "completion": "Two.</think>4"})
    assert set(cut.faults) == {"stop_absent"}
    assert set(desk.verify({"text": prompt.replace("<think>", "")}).faults) == {"reasoning_missing"}


def test_without_a_template_nothing_is_said_of_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    desk = Desk.of(tokenizer, tmp_path)
    desk.template = None
    outcome = desk.verify(chat_row("4", "Two."))
    assert outcome.faults == {}
    assert {f.name for f in outcome.findings.of("unproven")} == {"template", "sampled"}
    assert "template" not in outcome.proven


def test_a_model_that_may_reason_and_never_does(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen3"))
    desk = Desk.of(tokenizer, tmp_path, (shared / "templates/Qwen3-hybrid.jinja").read_text())
    assert desk.profile.reasoning == "none"
    without = desk.verify(chat_row("4"), chat_row("5"))
    assert "reasoning_nowhere" in [f.name for f in without.findings.of("warning")]
    outcome = desk.verify(chat_row("4"), chat_row("4", "Two and two."))
    assert "reasoning_nowhere" not in [f.name for f in outcome.findings.items]
    assert outcome.faults == {}


def test_kimi_drops_the_reasoning_of_the_last_answer(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tokenizers/kimi-k2.5"))
    desk = Desk.of(tokenizer, tmp_path)
    outcome = desk.verify(chat_row("It is 4.", "Two and two."))
    assert outcome.verdicts == {"reasoning_dropped": "failed"}
    inline = desk.verify(chat_row("<think>Two and two.</think>It is 4."))
    assert set(inline.faults) == {"reasoning_inline", "reasoning_misplaced"}
    assert inline.findings.failed


def test_the_border_between_prompt_and_answer(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tokenizers/llama3_1"))
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    desk = Desk.of(
        tokenizer, tmp_path, plain + "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    outcome = desk.verify(chat_row("\n\nFour."), chat_row("Four."))
    seam = outcome.report.faults["seam"]
    assert seam.count == 1
    assert r"':\n\n'" in seam.examples[0].detail


def test_a_second_bos(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tokenizers/llama3_1"))
    template = (shared / "templates/Llama-3.1-Instruct.jinja").read_text()
    desk = Desk.of(tokenizer, tmp_path, template)
    assert desk.verify(chat_row("Four.")).verdicts == {"text_bos_doubled": "warning"}
    text = ChatTemplate(template, special_tokens_map=tokenizer.special_tokens_map).render(
        chat_row("Four.")["messages"], add_generation_prompt=False
    )
    assert "doubled_bos" in desk.verify({"text": f"<|begin_of_text|>{text}"}).faults
