"""What templates do is found by rendering: small templates that show one thing each."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from eyas.findings import Findings
from eyas.probe.answer_facts import look_at_class
from eyas.probe.facts import look_at_rendering
from eyas.tokens import ChatTemplate, Tokenizer, build_profile
from eyas.tokens.facts import TemplateFacts, template_facts
from eyas.tokens.stand_in import stand_in
from unmarked import without_markers


def source(
    *,
    prompt: str = "",
    answer: str = "m.content",
    end: str = "'<|end|>'",
    start: str = "",
    other: str = "raise_exception('no ' + m.role)",
    before: str = "",
) -> str:
    """A template; the arguments are Jinja expressions for the parts that differ."""
    return (
        before
        + (f"{{{{ {start} }}}}" if start else "")
        + "{%- for m in messages -%}"
        + "{%- if m.role == 'user' -%}{{ '<|user|>' + m.content + '<|end|>' }}"
        + "{%- elif m.role == 'assistant' -%}"
        + f"{{{{ '<|assistant|>' }}}}{{{{ {answer} }}}}{{{{ {end} }}}}"
        + f"{{%- else -%}}{{{{ {other} }}}}{{%- endif -%}}"
        + "{%- endfor -%}"
        + "{%- if add_generation_prompt -%}"
        + f"{{{{ '<|assistant|>' }}}}{{{{ {prompt or repr('')} }}}}"
        + "{%- endif -%}"
    )


def facts_of(text: str, tokenizer: Tokenizer, **kwargs: Any) -> TemplateFacts:
    template = ChatTemplate(
        text, special_tokens_map=tokenizer.special_tokens_map, kwargs=kwargs or None
    )
    facts = template_facts(tokenizer, template, build_profile(tokenizer, template))
    json.dumps(facts.as_dict())
    assert facts.hash == template.hash
    return facts


THINKS = "'<think>' + m.reasoning_content|trim + '</think>' + m.content|trim"
SPACED = "'<think>\\n' + m.reasoning_content|trim + '\\n</think>\\n\\n' + m.content|trim"
FORGETS = "('<think>' + m.reasoning_content if loop.last else '<think>') + '</think>' + m.content"


@pytest.mark.parametrize(
    ("prompt", "reasoning", "tail"),
    [
        ("'<think>'", "open", ""),
        ("'<think>\\n'", "open", "\n"),
        ("'<think></think>'", "closed", ""),
        ("'<think>\\n\\n</think>\\n\\n'", "closed", ""),
        ("'</think>'", "closed", ""),
        ("", "generated", ""),
    ],
)
def test_what_the_generation_prompt_does(
    prompt: str, reasoning: str, tail: str, tokenizer: Tokenizer
) -> None:
    facts = facts_of(source(prompt=prompt, answer=THINKS), tokenizer)
    assert (facts.reasoning, facts.markers, facts.opener_tail) == (reasoning, "template", tail)
    opener = (tokenizer.control["<think>"],)
    assert facts.opener_ids == (opener if "<think>" in prompt else ())


def test_markers_of_the_vocabulary_only_mean_that_the_model_may(tokenizer: Tokenizer) -> None:
    facts = facts_of(source(), tokenizer)
    assert (facts.reasoning, facts.markers) == ("generated", "vocabulary")
    assert (facts.earlier_reasoning, facts.last_turn_reasoning) == ("none", "none")
    assert facts.append_only is True
    assert facts_of(source(), without_markers(tokenizer)).reasoning == "none"


def test_an_opener_of_several_ids_is_found_in_the_prompt(tokenizer: Tokenizer) -> None:
    """Where no id is the opener's own, its last byte may share an id with the line feed."""
    plain = without_markers(tokenizer)
    facts = facts_of(source(prompt="'<think>\\n'", answer=SPACED), plain)
    assert (facts.reasoning, facts.opener_tail) == ("open", "\n")
    assert len(facts.opener_ids) > 1
    assert plain.decode(facts.opener_ids).strip() == "<think>"


def test_reasoning_that_the_prompt_opens_in_plain_words(tokenizer: Tokenizer) -> None:
    plain = without_markers(tokenizer)
    answer = "m.reasoning_content|default('') + 'So: ' + m.content"
    for prompt, reasoning in (("'I think that '", "open"), ("", "generated")):
        text = source(prompt=prompt, answer=answer)
        facts = facts_of(text, plain)
        assert (facts.reasoning, facts.markers, facts.opener_ids) == (reasoning, "template", ())
        findings = Findings()
        look_at_class(findings, build_profile(plain, ChatTemplate(text)), facts)
        (finding,) = findings.of("ok")
        says = "the prompt opens the reasoning" if prompt else "the model reasons, without markers"
        assert finding.text.startswith(says)


def test_control_strings_that_a_template_puts_together_are_of_the_stand_in() -> None:
    """Brackets and the role's name are written apart, and only a rendering shows them whole."""
    text = (
        "{%- for m in messages -%}{{ '[|' + m.role + '|]' + m.content }}"
        "{{ '[|endofturn|]' if m.role == 'assistant' else '<|' ~ 'over|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '[|assistant|]' }}{%- endif -%}"
    )
    tokenizer, template, profile = stand_in(text)
    assert {"[|user|]", "[|assistant|]", "[|endofturn|]", "<|over|>"} <= tokenizer.control.keys()
    facts = template_facts(tokenizer, template, profile)
    assert facts.turn_end_ids == (tokenizer.control["[|endofturn|]"],)
    assert (facts.append_only, facts.stop_is_role_marker) == (True, False)


@pytest.mark.parametrize(("prompt", "answer"), [("'<think>'", THINKS), ("'<think>\\n'", SPACED)])
def test_history_that_keeps_reasoning_is_append_only(
    prompt: str, answer: str, tokenizer: Tokenizer
) -> None:
    for opening in (prompt, ""):  # opened by the prompt, or by the model
        facts = facts_of(source(prompt=opening, answer=answer), tokenizer)
        assert facts.append_only is True
        assert (facts.first_difference, facts.append_only_with) == (None, None)
        assert (facts.earlier_reasoning, facts.last_turn_reasoning) == ("kept", "kept")


def test_history_that_forgets_reasoning_is_not(tokenizer: Tokenizer) -> None:
    facts = facts_of(source(prompt="'<think>'", answer=FORGETS), tokenizer)
    assert (facts.append_only, facts.append_only_with) == (False, None)
    assert facts.first_difference is not None
    assert "<|assistant|><think>" in facts.first_difference
    assert "is now '</think>" in facts.first_difference
    assert (facts.earlier_reasoning, facts.last_turn_reasoning) == ("stripped", "kept")


def test_history_that_keeps_the_last_answers_reasoning_alone(tokenizer: Tokenizer) -> None:
    """With one answer there is nothing to see; the second one makes the first one's go."""
    count = (
        "{%- set ns = namespace(last=-1) -%}{%- for m in messages if m.role == 'assistant' -%}"
        "{%- set ns.last = loop.index0 -%}{%- endfor -%}{%- set seen = namespace(n=0) -%}"
    )
    answer = (
        "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content is defined"
        " and (keep_past_thinking|default(false) or seen.n == ns.last) else '') + m.content"
    )
    text = source(before=count, answer=answer).replace(
        "{{ '<|end|>' }}", "{{ '<|end|>' }}{%- set seen.n = seen.n + 1 -%}"
    )
    facts = facts_of(text, tokenizer)
    assert (facts.reasoning, facts.earlier_reasoning) == ("generated", "stripped")
    assert facts.append_only is False
    assert facts.append_only_with == {"keep_past_thinking": True}
    assert [s[:3] for s in facts.switches] == [
        ("keep_past_thinking", True, "keeps earlier reasoning")
    ]
    assert "with a third question" in str(facts.first_difference)


def test_reasoning_elsewhere_than_between_its_markers_is_rewritten(tokenizer: Tokenizer) -> None:
    answer = "'<think></think>(' + m.reasoning_content + ')' + m.content"
    assert facts_of(source(prompt="'<think>'", answer=answer), tokenizer).earlier_reasoning == (
        "rewritten"
    )


def test_a_tail_that_history_loses_is_a_difference(tokenizer: Tokenizer) -> None:
    """The prompt closes the reasoning at once, history shows the content alone."""
    facts = facts_of(source(prompt="'<think></think>'"), tokenizer)
    assert facts.append_only is False
    assert "<think></think>" in str(facts.first_difference)


def test_a_switch_that_preserves_reasoning_is_found(tokenizer: Tokenizer, template: Any) -> None:
    facts = template_facts(tokenizer, template, build_profile(tokenizer, template))
    assert facts.reasoning == "open"
    assert [s[:3] for s in facts.switches] == [
        ("preserve_thinking", True, "keeps earlier reasoning"),
        ("thinking", False, "reasoning: open -> closed"),
    ]
    assert (facts.append_only, facts.append_only_with) == (False, {"preserve_thinking": True})
    assert facts.roles["system"] == "kept"
    assert facts.roles["system_later"] == "refused: A system message can only be the first message."
    assert facts.roles["developer"].startswith("refused: Unknown role")
    assert (facts.ends_differently, facts.stop_is_role_marker) == (False, False)
    assert facts.turn_end_ids == (tokenizer.control["<|end|>"],)


def test_switches_of_unknown_names_values_that_raise_and_words_of_the_system(
    tokenizer: Tokenizer,
) -> None:
    before = (
        "{%- if terse is defined and terse -%}{{ 'Be short.' }}{%- endif -%}"
        "{%- if motto is defined -%}{{ motto }}{%- endif -%}"
        "{%- if reasoning_effort is defined and reasoning_effort != 'low' -%}"
        "{{ raise_exception('only low') }}{%- endif -%}"
    )
    prompt = "'' if messages[0].content != '/no_think' else '<think></think>'"
    facts = facts_of(source(before=before, prompt=prompt, other="m.content"), tokenizer)
    assert [s[:3] for s in facts.switches] == [
        ("reasoning_effort", "medium", "refused: only low"),
        ("reasoning_effort", "high", "refused: only low"),
        ("terse", True, "changes the prompt"),
        ("system text", "/no_think", "reasoning: generated -> closed"),
    ]


def test_given_switches_that_change_nothing_are_named(tokenizer: Tokenizer, template: Any) -> None:
    text = template.source
    facts = facts_of(text, tokenizer, enable_thinking=False, thinking=False, preserve_thinking=0)
    assert facts.ignored_kwargs == ("enable_thinking", "preserve_thinking")
    assert facts.reasoning == "closed"


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("true", True),
        ("tools", True),
        ("messages[0].role == 'system'", True),
        ("false", False),
    ],
)
def test_a_date_is_seen_even_if_it_needs_tools(
    where: str, shown: bool, tokenizer: Tokenizer
) -> None:
    date = "{% if " + where + " %}{{ strftime_now('%Y') }}{% endif %}"
    facts = facts_of(source(before=date, other="m.content"), tokenizer)
    assert facts.shows_date is shown


def test_a_day_of_the_templates_own_is_seen_with_its_switch(tokenizer: Tokenizer) -> None:
    """Llama 3.1 prints 26 Jul 2024 for ever, unless it is told the day."""
    own = (
        "{%- if not date_string is defined -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}"
        "{{- 'Today: ' + date_string -}}"
    )
    said = "{%- for m in messages -%}{{- '<|user|>' + m.content + '<|end|>' -}}{%- endfor -%}"
    for source, seen in ((own + said, ("date_string", "26 Jul 2024")), (said, None)):
        template = ChatTemplate(source)
        profile = build_profile(tokenizer, template)
        facts = template_facts(tokenizer, template, profile)
        assert (facts.date_switch, facts.shows_date) == (seen, False)
        findings = Findings()
        look_at_rendering(findings, tokenizer, template, facts)
        said_of_it = [f.text for f in findings.items if f.name == "date"]
        assert ("'26 Jul 2024', unless the switch date_string" in "".join(said_of_it)) is bool(seen)


def test_roles_are_kept_dropped_or_refused(tokenizer: Tokenizer) -> None:
    refused = facts_of(source(), tokenizer)
    assert refused.roles["system"] == "refused: no system"
    assert refused.roles["tool"] == "refused: no tool"
    dropped = facts_of(source(other="''"), tokenizer)
    assert set(dropped.roles.values()) == {"dropped"}
    kept = facts_of(source(other="'<|system|>' + m.content"), tokenizer)
    assert set(kept.roles.values()) == {"kept"}


def test_alternation(tokenizer: Tokenizer) -> None:
    alternates = (
        "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 is even) -%}"
        "{{ raise_exception('must alternate') }}{%- endif -%}{%- endfor -%}"
    )
    assert facts_of(source(before=alternates), tokenizer).alternation is True
    assert facts_of(source(), tokenizer).alternation is False


def test_a_second_bos_is_foreseen(tokenizer: Tokenizer) -> None:
    bos = "<|endoftext|>"
    backend = Backend.from_str(tokenizer.backend.to_str())
    special = {**tokenizer.special_tokens_map, "bos_token": bos}
    quiet = dataclasses.replace(tokenizer, backend=backend, special_tokens_map=special)
    facts = facts_of(source(start="bos_token"), quiet)
    assert (facts.writes_bos, facts.bos_would_double) == (True, False)
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.control[bos])]
    )
    facts = facts_of(source(start="bos_token"), quiet)
    assert (facts.writes_bos, facts.bos_would_double) == (True, True)
    facts = facts_of(source(), quiet)
    assert (facts.writes_bos, facts.bos_would_double) == (False, False)


def test_a_stop_that_is_the_next_turns_header(tokenizer: Tokenizer) -> None:
    """GLM's way: history shows no end of an answer but the next user's header."""
    text = source(end="''").replace(" + '<|end|>'", "")
    template = ChatTemplate(text)
    stop = tokenizer.control["<|user|>"]
    profile = build_profile(tokenizer, template, stop_token_ids=[stop])
    facts = template_facts(tokenizer, template, profile)
    assert facts.turn_end_ids == (stop,)
    assert (facts.stop_is_role_marker, facts.ends_differently) == (True, False)
    assert facts.append_only is True


def test_history_that_ends_an_answer_otherwise_than_generation(tokenizer: Tokenizer) -> None:
    """gpt-oss's way: what ends an answer in history ends no generation."""
    facts = facts_of(source(end="'<|endoftext|>'"), tokenizer)
    assert facts.turn_end_ids == (tokenizer.control["<|endoftext|>"],)
    assert (facts.ends_differently, facts.stop_is_role_marker) == (True, False)
    assert facts.append_only is False
    assert "ends no generation" in str(facts.first_difference)


def test_a_system_message_that_moves_is_not_append_only(tokenizer: Tokenizer) -> None:
    moves = (
        "{%- set s = messages[0].content if messages[0].role == 'system' else '' -%}"
        "{%- set first = 1 if s else 0 -%}"
        "{%- for m in messages[first:] -%}{%- if m.role == 'user' -%}"
        "{{ '<|user|>' + (s if loop.last else '') + m.content + '<|end|>' }}"
        "{%- else -%}{{ '<|assistant|>' + m.content + '<|end|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
    )
    facts = facts_of(moves, tokenizer)
    assert facts.append_only is False
    assert str(facts.first_difference).startswith("with a system message, after '<|user|>qz")


def test_an_answer_that_the_template_does_not_take_back(tokenizer: Tokenizer) -> None:
    strict = (
        "{%- for m in messages -%}{%- if '|' in m.content -%}"
        "{{ raise_exception('no channels here') }}{%- endif -%}{%- endfor -%}"
    )
    answer = "'final| ' + m.content"
    facts = facts_of(source(before=strict, answer=answer), tokenizer)
    assert facts.append_only is False
    assert facts.first_difference == "the answer given back is refused: no channels here"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[7].content.nothing }}", "list object has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ functions[0] }}", "'functions' is undefined"),
    ],
)
def test_a_template_that_refuses_everything(text: str, words: str, tokenizer: Tokenizer) -> None:
    facts = facts_of(text, tokenizer, thinking=True)
    assert facts.first_user_refusal == words
    assert (facts.reasoning, facts.earlier_reasoning, facts.last_turn_reasoning) == (
        ("unknown",) * 3
    )
    assert (facts.append_only, facts.alternation, facts.ends_differently) == (None, None, None)
    assert facts.roles["system"] == f"refused: {words}"
    assert facts.switches == ()


def test_texts_that_no_tokenizer_takes(tokenizer: Tokenizer) -> None:
    """Half a surrogate pair in a template's output is no reason to fail."""
    whole = source(prompt="'<think>'", answer=THINKS)
    profile = build_profile(tokenizer, ChatTemplate(whole))
    facts = template_facts(tokenizer, ChatTemplate("{{ '\\ud800' }}" + whole), profile)
    assert (facts.reasoning, facts.opener_ids) == ("open", ())
    assert (facts.writes_bos, facts.append_only) == (False, None)
