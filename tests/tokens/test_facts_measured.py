"""Facts of real templates agree with what was measured on them otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from eyas.tokens import ChatTemplate, Tokenizer, build_profile, load_tokenizer
from eyas.tokens.facts import TemplateFacts, template_facts
from eyas.tokens.stand_in import stand_in

TOKENIZERS = {
    "Kimi-K3": "",
    "Kimi": "kimi-k2.5",
    "Moonlight": "kimi-k2.5",
    "Qwen": "qwen3",
    "QwQ": "qwen3",
    "DeepSeek": "deepseek_v3",
    "Llama-3.": "llama3_1",
    "gpt-oss": "gptoss",
}
"""How a model's name begins -> the real tokenizer of its family; the others get a stand-in."""

CLASSES = {
    "none": "none",
    "model-generated": "generated",
    "prompt-opened": "open",
    "prompt-closed": "closed",
}

HISTORY = {
    "DeepSeek-V4-Flash-0731 (jinja port)": (True, None),
    "Mistral-Small-3.2": (True, None),
    "Nemotron-3-Super": (False, None),
}
"""Where our question is another one. DeepSeek-V4's prompt closes the reasoning, so its answer has
none; Mistral-Small-3.2 moves tools only, and there are none here; Nemotron-3 puts its own line
feeds around a reasoning that is given back with those it was generated with."""


class Measured(NamedTuple):
    """One row of the measurement."""

    model: str
    source: str
    reasoning: str
    tail: str
    switches: frozenset[str]
    history: str
    off_mode: str
    last_turn: str
    inline: str
    arguments: str
    after_calls: str


@pytest.fixture(scope="module")
def measured(shared: Path) -> list[Measured]:
    folder = shared / "templates"
    lines = (folder / "CANONICAL.tsv").read_text(encoding="utf-8").splitlines()
    files = dict(line.split("\t")[:2] for line in lines[1:])
    rows = []
    text = (shared / "reference" / "templates.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 13 and cells[0] in files:
            rows.append(
                Measured(
                    model=cells[0],
                    source=(folder / files[cells[0]]).read_text(encoding="utf-8"),
                    reasoning=CLASSES[cells[3].split()[0]],
                    tail=cells[4].strip("`").replace("\\n", "\n").replace("\\|", "|"),
                    switches=frozenset(cells[5].split(", ")) - {""},
                    history=cells[6],
                    off_mode=cells[8],
                    last_turn=cells[9],
                    inline=cells[10],
                    arguments=cells[11],
                    after_calls=cells[12],
                )
            )
    assert len(rows) == 47
    return rows


@pytest.fixture(scope="module")
def found(measured: list[Measured], shared: Path) -> dict[str, TemplateFacts]:
    loaded = dict[str, Tokenizer]()
    facts = {}
    for row in measured:
        name = next((t for start, t in TOKENIZERS.items() if row.model.startswith(start)), "")
        if name:
            if name not in loaded:
                loaded[name] = load_tokenizer(str(shared / "tokenizers" / name))
            own = loaded[name]
            template = ChatTemplate(row.source, special_tokens_map=own.special_tokens_map)
            facts[row.model] = template_facts(own, template, build_profile(own, template))
        else:
            facts[row.model] = template_facts(*stand_in(row.source))
    return facts


def test_reasoning_of_the_generation_prompt(
    measured: list[Measured], found: dict[str, TemplateFacts]
) -> None:
    for row in measured:
        facts = found[row.model]
        seen = "none" if facts.markers == "vocabulary" else facts.reasoning
        assert seen == row.reasoning, row.model
        assert facts.opener_tail == ("\n" if seen == "open" and row.tail[-1:] == "\n" else "")


def test_switches_of_the_generation_prompt(
    measured: list[Measured], found: dict[str, TemplateFacts]
) -> None:
    words = {"opened": "open"}
    for row in measured:
        seen = {
            (f"[{s.value}]" if s.name == "system text" else f"{s.name}={s.value!r}")
            + "->"
            + s.effect.split(";")[0].split(" -> ")[1]
            for s in found[row.model].switches
            if s.effect.startswith("reasoning:")
        }
        said = {
            f"{left}->{words.get(right, right)}"
            for left, right in (switch.split("->") for switch in row.switches)
            if right != "plain"  # a header without reasoning: our classes know no such thing
        }
        assert seen == said, row.model


def test_history(measured: list[Measured], found: dict[str, TemplateFacts]) -> None:
    for row in measured:
        facts = found[row.model]
        append_only = row.history in ("append-only", "append-only(reasoning_content)")
        switch = re.search(r"\{.*\}", row.history)
        said = append_only, json.loads(switch.group()) if switch else None
        seen = facts.append_only, facts.append_only_with
        assert seen == HISTORY.get(row.model, said), (row.model, facts.first_difference)


def test_history_without_reasoning(
    measured: list[Measured], found: dict[str, TemplateFacts]
) -> None:
    """With the switch that closes the reasoning; rows that are append-only anyway say it too."""
    compared = 0
    for row in measured:
        facts = found[row.model]
        if facts.append_only is not False or row.off_mode == "-" or row.reasoning == "closed":
            continue
        compared += 1
        seen = facts.append_only_without_reasoning is not None
        assert seen == (row.off_mode == "yes"), (row.model, facts.append_only_without_reasoning)
    assert compared >= 10
    assert found["Kimi-K2.5"].append_only_without_reasoning == {"thinking": False}


def test_last_turn(measured: list[Measured], found: dict[str, TemplateFacts]) -> None:
    for row in measured:
        seen = found[row.model].last_turn_reasoning
        assert seen.replace("none", "dropped") == row.last_turn, row.model


ARGUMENTS = {
    "both": ("kept", "kept"),
    "dict only": ("kept", "refused"),
    "str only": ("refused", "kept"),
    "str double-encoded": ("kept", "encoded twice"),
    "call not rendered": ("dropped", "dropped"),
    "no tools": ("dropped", "dropped"),
}


def test_arguments_of_calls(measured: list[Measured], found: dict[str, TemplateFacts]) -> None:
    compared = 0
    for row in measured:
        takes = found[row.model].takes
        seen = takes.arguments.partition(":")[0], takes.arguments_as_text.partition(":")[0]
        if row.arguments in ARGUMENTS and row.model != "command-a-reasoning":
            compared += 1
            assert seen == ARGUMENTS[row.arguments], row.model
    assert compared == 41
    assert found["Mistral-Small-3.2"].takes.call_ids is not None
    # It asks for the first letter of an answer's content, which is empty beside a call.
    assert found["command-a-reasoning"].takes.calls == "refused: str object has no element 0"


def test_what_becomes_of_calls(measured: list[Measured], found: dict[str, TemplateFacts]) -> None:
    compared = 0
    for row in measured:
        takes = found[row.model].takes
        if "/" not in row.after_calls or takes.calls_append_only is None:
            continue
        compared += 1
        seen = (
            takes.call_reasoning.replace("none", "drop").removesuffix("ped").replace("kept", "keep")
        )
        prompt = "prefix" if takes.calls_append_only else "REWRITE"
        assert f"{seen}/{prompt}" == row.after_calls, row.model
    assert compared >= 30


def test_reasoning_inside_of_content(
    measured: list[Measured], found: dict[str, TemplateFacts]
) -> None:
    words = {"kept": "kept verbatim", "none": "kept verbatim", "parsed": "kept reformatted"}
    for row in measured:
        if row.model in ("gpt-oss", "Ling-3.0-flash"):  # another way to write it was measured
            continue
        seen = found[row.model].takes.inline
        assert words.get(seen, seen) == row.inline, row.model
    assert found["gpt-oss"].takes.inline.startswith("refused: You have passed a message containing")


def test_ids_of_real_tokenizers(found: dict[str, TemplateFacts]) -> None:
    assert found["Kimi-K2.5"].opener_ids == (163606,)
    assert found["Kimi-K2.5"].turn_end_ids == (163586,)
    assert found["Qwen3-Thinking-2507"].opener_ids == (151667,)
    assert found["DeepSeek-R1 (Feb 2025)"].opener_ids == (30, 37947, 1018)  # "<", "think", ">\n"
    oss = found["gpt-oss"]
    assert (oss.turn_end_ids, oss.ends_differently, oss.shows_date) == ((200007,), True, True)
    assert found["Llama-3.1-Instruct"].bos_would_double
    assert found["Llama-3.1-Instruct"].date_switch == ("date_string", "26 Jul 2024")
    assert found["GLM-4.6"].stop_is_role_marker and found["GLM-5.2"].stop_is_role_marker
    assert not any(f.stop_is_role_marker for m, f in found.items() if not m.startswith("GLM"))


@pytest.mark.slow
def test_every_template_is_survived_and_counted(shared: Path) -> None:
    everything = []
    for path in sorted((shared / "templates").glob("*.jinja")):
        parts = stand_in(path.read_text(encoding="utf-8"))
        everything.append(template_facts(*parts))
        json.dumps(everything[-1].as_dict())

    def count(attribute: str, *values: object) -> int:
        return sum(getattr(facts, attribute) in values for facts in everything)

    def roles(role: str, verdict: str) -> int:
        return sum(facts.roles[role].startswith(verdict) for facts in everything)

    assert len(everything) == 305
    assert count("first_user_refusal", None) == 297
    assert count("reasoning", "closed") == 21
    assert 54 <= count("reasoning", "open") <= 56
    assert 64 <= count("reasoning", "generated") <= 68
    assert count("shows_date", True) == 19
    assert count("alternation", True) == 35
    assert (roles("system", "dropped"), roles("system", "refused")) == (10, 8 + 8)
    assert (roles("system_later", "dropped"), roles("system_later", "refused")) == (40, 48 + 8)
    assert roles("developer", "dropped") == 149
    takes = [facts.takes for facts in everything]
    assert sum(t.parts == "dropped" for t in takes) == 19
    assert sum(t.parts == "printed" for t in takes) >= 42  # also as JSON
    assert sum(t.parts.startswith("refused") for t in takes) == 134 + 8
    assert sum(t.arguments_as_text == "encoded twice" for t in takes) >= 39
    assert sum(t.null_content_4 == "printed" for t in takes) >= 37
    assert sum(t.trims_user for t in takes) == 53 - 6  # six take parts only
