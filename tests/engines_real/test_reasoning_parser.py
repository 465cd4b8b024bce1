"""What ``--reasoning-parser`` does on a model that thinks: nothing to ids, much to the chat API.

Each server is started with and without the parser, on the demo target (its template writes the
opener) and on the variant that writes its own, with newlines around it as Qwen3 has them.
"""

from __future__ import annotations

import pytest

from engines_real.parsing import CUT, OFF, Look, look_at
from engines_real.servers import Served, SetUp

FIELD = {"sglang": "reasoning_content", "vllm": "reasoning"}
PLAIN = [SetUp(engine, model) for engine in FIELD for model in OFF]
PARSED = [SetUp(engine, model, parser="qwen3") for engine in FIELD for model in OFF]

plain = pytest.mark.parametrize("served", PLAIN, indirect=True, ids=str)
parsed = pytest.mark.parametrize("served", PARSED, indirect=True, ids=str)
of_the_demo = pytest.mark.parametrize("served", PARSED[::2], indirect=True, ids=str)
of_the_variant = pytest.mark.parametrize("served", PARSED[1::2], indirect=True, ids=str)

_looks: dict[tuple[str, str, bool], Look] = {}


@pytest.fixture
def look(served: Served) -> Look:
    """Each server is looked at once."""
    key = (served.engine, served.name, served.parser is not None)
    if key not in _looks:
        _looks[key] = look_at(served)
    return _looks[key]


@parsed
def test_the_parser_changes_no_id(served: Served, look: Look) -> None:
    without = _looks.get((served.engine, served.name, False))
    if without is None:
        pytest.skip("the server without the parser was not asked in this session")
    assert look.ids == without.ids
    assert look.texts == without.texts


@plain
def test_without_a_parser_the_markers_stand_in_the_answer(served: Served, look: Look) -> None:
    for said, ids, text in zip(look.said, look.ids, look.texts, strict=True):
        assert (said.content, said.reasoning) == (text, None)
        assert said.ids == ids
        assert said.completion_tokens == len(ids)
        assert text.startswith("<think>") == (served.name == "own-opener")
        assert text.count("</think>") == 1
    assert look.at_once.content == look.at_once_text
    assert look.cut.content == look.cut_text


@parsed
def test_with_it_the_markers_stand_nowhere(served: Served, look: Look) -> None:
    for said, ids, text in zip(look.said, look.ids, look.texts, strict=True):
        # The API's own ids are those of the model, whatever it made of the text.
        assert said.ids == ids
        assert said.field == FIELD[served.engine]
        reasoning, answer = text.removeprefix("<think>").split("</think>")
        assert (said.reasoning, said.content) == (reasoning, answer)


@of_the_variant
def test_newlines_stay_on_their_sides_of_the_closer(look: Look) -> None:
    for said in look.said:
        assert said.reasoning is not None
        assert said.reasoning.startswith("\n")
        assert said.reasoning.endswith("\n")
        assert said.content is not None
        assert said.content.startswith("\n\n")


@parsed
def test_an_answer_cut_in_its_reasoning_is_all_reasoning(served: Served, look: Look) -> None:
    assert look.cut.completion_tokens == CUT
    assert look.cut.reasoning == look.cut_text.removeprefix("<think>")
    assert look.cut.content == ("" if served.engine == "sglang" else None)


@of_the_demo
def test_vllm_takes_an_answer_at_once_for_reasoning(served: Served, look: Look) -> None:
    # The demo's switch is called `thinking`. The prompt ends with the closer, so all that is
    # generated is the answer.
    said = (look.at_once.content, look.at_once.reasoning)
    if served.engine == "sglang":
        assert said == (look.at_once_text, None)
    else:
        assert said == (None, look.at_once_text)


@of_the_variant
def test_a_switch_by_qwens_name_is_understood(look: Look) -> None:
    assert (look.at_once.content, look.at_once.reasoning) == (look.at_once_text, None)
