"""What becomes of an answer's ids in a later prompt, on answers of any ids."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from eyas.demo.server import TARGET
from eyas.modes import open_modes
from eyas.prompting import Chat, Earlier, Prompt, Prompting
from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer
from eyas.tokens.answers import AnswerIds, Outline, drifted, generated_ids
from unmarked import without_markers

TOKENIZER = load_tokenizer(str(TARGET))
CLOSER, END = 511, 506
IDS = st.lists(st.integers(0, 504), max_size=30)
QUESTION = {"role": "user", "content": "What is it?"}

KEPT = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<|user|>' + m.content + '<|end|>' -}}"
    "{%- else -%}{{- '<|assistant|><think>' + m.reasoning_content|default('') + '</think>' + "
    "m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}"
)
DROPPED = KEPT.replace("m.reasoning_content|default('')", "''")
TRIMMED = KEPT.replace(
    "m.content + '<|end|>' -}}{%- endif", "m.content|trim + '<|end|>' -}}{%- endif"
)


def prompting(source: str, history: str = "served", tokenizer: Tokenizer = TOKENIZER) -> Prompting:
    modes, profile = open_modes(tokenizer, ChatTemplate(source), [(1.0, {})])
    return Prompting(tokenizer, modes, profile, history)


def next_prompt(way: Prompting, output_ids: list[int]) -> tuple[Prompt, Earlier]:
    first = way.prompt(Chat([QUESTION]))
    assert isinstance(first, Prompt)
    earlier = Earlier(first.ids, output_ids)
    chat = [QUESTION, way.take_apart(*earlier), {"role": "user", "content": "And then?"}]
    second = way.prompt(Chat(chat, earlier=earlier))
    assert isinstance(second, Prompt)
    return second, earlier


def stripped(ids: list[int]) -> list[int]:
    while ids and not TOKENIZER.join(ids[:1]).strip():
        ids = ids[1:]
    while ids and not TOKENIZER.join(ids[-1:]).strip():
        ids = ids[:-1]
    return ids


def survives(ids: list[int]) -> bool:
    """Whether ids are still the same once they were text (space at the ends does not count)."""
    return stripped(TOKENIZER.encode(TOKENIZER.decode(ids))) == stripped(ids)


@given(IDS, IDS)
def test_drift_is_ids_that_do_not_survive_text(reasoning: list[int], content: list[int]) -> None:
    output = [*reasoning, CLOSER, *content, END]
    second, earlier = next_prompt(prompting(KEPT), output)
    assert second.drifted is not (survives(reasoning) and survives(content))
    if not second.drifted and stripped(reasoning) == reasoning and stripped(content) == content:
        assert second.ids[: len(earlier.prompt_ids) + len(output)] == [*earlier.prompt_ids, *output]


@given(IDS, IDS)
def test_a_reasoning_that_the_template_drops_is_no_drift(
    reasoning: list[int], content: list[int]
) -> None:
    output = [*reasoning, CLOSER, *content, END]
    assert next_prompt(prompting(DROPPED), output)[0].drifted is not survives(content)
    full, _ = next_prompt(prompting(DROPPED, "full"), output)
    assert full.drifted is (bool(stripped(reasoning)) or not survives(content))


@given(IDS, IDS)
def test_with_tokens_every_id_stays(reasoning: list[int], content: list[int]) -> None:
    output = [*reasoning, CLOSER, *content, END]
    second, earlier = next_prompt(prompting(KEPT, "tokens"), output)
    behind = TOKENIZER.encode("<|user|>And then?<|end|><|assistant|><think>")
    assert second.ids == [*earlier.prompt_ids, *output, *behind]


@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
def test_space_that_the_template_trims_is_no_drift(space: str) -> None:
    words = TOKENIZER.encode("It is 12")
    lead = [i for letter in space for i in TOKENIZER.encode(letter)]
    output = [70, CLOSER, *lead, *words, *lead, END]
    second, _ = next_prompt(prompting(TRIMMED), output)
    assert not second.drifted


def test_a_word_that_the_template_cuts_off_is_drift() -> None:
    cut = KEPT.replace(
        "m.content + '<|end|>' -}}{%- endif", "m.content[:3] + '<|end|>' -}}{%- endif"
    )
    output = [70, CLOSER, *TOKENIZER.encode("It is 12"), END]
    second, _ = next_prompt(prompting(cut), output)
    assert second.drifted


def test_an_answer_that_the_template_does_not_show_is_drift() -> None:
    hidden = KEPT.replace("m.content + '<|end|>' -}}{%- endif", "'hidden<|end|>' -}}{%- endif")
    second, _ = next_prompt(prompting(hidden), [70, CLOSER, 71, END])
    assert second.drifted


def test_an_answer_that_could_not_have_been_another_one_is_drift() -> None:
    strict = (
        "{%- for m in messages if m.role == 'assistant' and m.content != 'a' -%}"
        "{{ raise_exception('only a') }}{%- endfor -%}"
    )
    output = [70, CLOSER, *TOKENIZER.encode("a"), END]
    second, _ = next_prompt(prompting(strict + KEPT), output)
    assert second.drifted


def test_an_answer_with_a_second_closer() -> None:
    second, _ = next_prompt(prompting(KEPT), [70, CLOSER, 71, CLOSER, 72, END])
    assert not second.drifted


@pytest.mark.parametrize("opens", ["'<think>'", "'<think>\\n'", "''"])
def test_space_that_the_prompt_writes_is_no_part_of_an_answer(opens: str) -> None:
    """The prompt ends in <think> and a line feed, and history writes both itself."""
    lead = opens.strip("'").replace("\\n", "\n")
    source = KEPT.replace(
        "{{- '<|assistant|><think>' -}}", f"{{{{- '<|assistant|>' + {opens} -}}}}"
    )
    source = source.replace("'<|assistant|><think>' + m.", f"'<|assistant|>' + {opens} + m.")
    if not lead:
        source = source.replace(
            "m.reasoning_content|default('')", "'<think>' + m.reasoning_content"
        )
    said = "\n\nso it is\n"
    output = [
        *TOKENIZER.encode(("" if lead else "<think>") + said + "</think>Twelve"),
        END,
    ]
    way = prompting(source)
    second, earlier = next_prompt(way, output)
    assert way.take_apart(*earlier)["reasoning_content"] == said
    assert TOKENIZER.decode(earlier.prompt_ids).endswith("<|assistant|>" + lead)
    assert list(second.ids)[: len(earlier.prompt_ids) + len(output)] == [
        *earlier.prompt_ids,
        *output,
    ]
    assert not second.drifted


def sharing() -> Tokenizer:
    """One without markers, and with ids that an opener's end shares with what follows it."""
    backend = json.loads(without_markers(TOKENIZER).backend.to_str())
    vocabulary, merges = backend["model"]["vocab"], backend["model"]["merges"]
    for first, last in ((">", '"'), ("<", "/"), (">", "</")):
        rare = next(pair for pair in reversed(merges) if len("".join(pair)) > 3)
        merges.remove(rare)
        vocabulary[first + last] = vocabulary.pop("".join(rare))
        merges.append([first, last])
    return dataclasses.replace(TOKENIZER, backend=Backend.from_str(json.dumps(backend)))


@pytest.mark.parametrize("closed", [True, False])
def test_an_opener_that_shares_an_id_with_what_the_model_thinks(closed: bool) -> None:
    """Where no id is the opener's own, its last byte may be in one with the first word."""
    plain = sharing()
    source = KEPT.replace("{{- '<|assistant|><think>' -}}", "{{- '<|assistant|>' -}}")
    way = prompting(source, tokenizer=plain)
    output = plain.encode('<think>"Why" it' + "</think>Twelve" * closed)
    shared = plain.encode('>"')
    assert len(shared) == 1 and shared[0] in output
    first = way.prompt(Chat([QUESTION]))
    assert isinstance(first, Prompt)
    reading = way.profile.read(plain, first.ids, output)
    assert reading.reasoning == '"Why" it'
    assert reading.start == len(first.ids) + output.index(shared[0]) + 1
    if closed:
        assert reading.content == "Twelve"
        second, earlier = next_prompt(way, [*output, END])
        assert plain.decode(second.ids).startswith(plain.decode([*earlier.prompt_ids, *output]))
        assert not second.drifted


def test_an_opener_that_shares_an_id_with_the_closer() -> None:
    """Closed at once: the closer begins in the id that the opener ends in."""
    plain = sharing()
    source = KEPT.replace("{{- '<|assistant|><think>' -}}", "{{- '<|assistant|>' -}}")
    way = prompting(source, tokenizer=plain)
    output = [*plain.encode("<think></think>Twelve"), END]
    assert len(shared := plain.encode("></")) == 1 and shared[0] in output
    second, earlier = next_prompt(way, output)
    reading = way.profile.read(plain, *earlier)
    assert (reading.reasoning, reading.content, reading.closers) == ("", "Twelve", 1)
    assert reading.start == reading.end
    assert plain.decode(second.ids).startswith(plain.decode([*earlier.prompt_ids, *output]))
    assert not second.drifted


def test_the_outline_of_another_text_finds_nothing() -> None:
    shape = Outline("before ", None, " after", None)
    assert shape.find("before it after") == (None, (7, 9))
    assert shape.find("before it afterwards") is None
    assert shape.find("before after") is None
    assert Outline("a", "|", "z", None).find("arc-z") is None
    assert Outline("a", "|", "z", None).find("ar|cz") == ((1, 2), (3, 4))


def test_what_counts_as_drift() -> None:
    one, other = AnswerIds((1,), (2,)), AnswerIds((3,), (2,))
    dropped = AnswerIds(None, (2,))
    for keeps in (False, True):
        assert drifted(one, None, keeps_reasoning=keeps)
        assert drifted(one, other, keeps_reasoning=keeps)
        assert drifted(one, AnswerIds((1,), (4,)), keeps_reasoning=keeps)
        assert not drifted(one, one, keeps_reasoning=keeps)
        assert not drifted(dropped, dropped, keeps_reasoning=keeps)
    assert not drifted(one, dropped, keeps_reasoning=False)
    assert drifted(one, dropped, keeps_reasoning=True)


def test_generated_ids_leave_the_stop_id_out() -> None:
    profile = prompting(KEPT).profile
    prompt = TOKENIZER.encode("<|user|>Hi<|end|><|assistant|><think>")
    assert generated_ids(TOKENIZER, profile, prompt, [70, CLOSER, 71, END]) == ((70,), (71,))
    assert generated_ids(TOKENIZER, profile, prompt, [CLOSER, 71, END]) == (None, (71,))
    assert generated_ids(TOKENIZER, profile, prompt, [70, 71]) == ((70, 71), ())
