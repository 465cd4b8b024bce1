"""Checks and marks one by one, on answers made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.checks import MARKS, REFUSALS, Checker
from eyas.engines import Generation
from eyas.ids import bad_prompt_id, is_loop
from eyas.tokens import Profile, Tokenizer

PROMPT = [508, 80, 506, 509, 510]


def generation(ids: list[int], **more: object) -> Generation:
    values: dict[str, object] = {
        "output_ids": ids,
        "finish_reason": "stop",
        "matched": ids[-1] if ids else None,
        "prompt_tokens": len(PROMPT),
        "completion_tokens": len(ids),
        **more,
    }
    return Generation(**values)  # type: ignore[arg-type]


@pytest.fixture
def checker(tokenizer: Tokenizer, profile: Profile) -> Checker:
    return Checker(tokenizer, profile)


def test_an_honest_answer_passes(checker: Checker) -> None:
    verdict = checker.judge(PROMPT, generation([70, 71, 511, 72, 506]))
    assert (verdict.refusal, verdict.marks, verdict.complete) == (None, [], True)
    assert (verdict.reasoning_start, verdict.reasoning_end, verdict.stop_id) == (5, 7, 506)


def test_a_reasoning_that_is_closed_at_once_is_none(checker: Checker) -> None:
    verdict = checker.judge(PROMPT, generation([511, 72, 506]))
    assert (verdict.refusal, verdict.marks) == (None, [])
    assert (verdict.reasoning_start, verdict.reasoning_end) == (None, None)


def test_a_closer_where_no_reasoning_was_open(checker: Checker) -> None:
    """Thinking is off, and the model reasons all the same: its answer holds what it should not."""
    closed = [508, 80, 506, 509, 510, 511]
    for ids, marks in (
        ([70, 506], []),
        ([70, 511, 72, 506], ["second_closer"]),
        ([510, 70, 511, 72, 506], []),  # opened and closed again
        ([510, 70, 511, 72, 511, 506], ["second_closer"]),
    ):
        verdict = checker.judge(closed, generation(ids, prompt_tokens=len(closed)))
        assert (verdict.refusal, verdict.marks) == (None, marks), ids


def test_a_stop_id_at_the_cap_counts_as_complete(checker: Checker) -> None:
    verdict = checker.judge(PROMPT, generation([70, 511, 71, 506], finish_reason="length"))
    assert (verdict.refusal, verdict.marks, verdict.complete) == (None, ["eos_at_cap"], True)


def test_ids_after_a_stop_id_are_refused_at_the_cap_too(checker: Checker) -> None:
    verdict = checker.judge(PROMPT, generation([70, 511, 506, 71], finish_reason="length"))
    assert verdict.refusal == "stop_inside"


def test_fewer_ids_than_the_budget_that_ended_it(checker: Checker) -> None:
    """SGLang says on ``length`` how many ids it made, besides its count."""
    honest = generation([70, 71, 72], finish_reason="length", matched=None, length=3)
    assert checker.judge(PROMPT, honest).refusal is None
    short = generation([70, 71], finish_reason="length", matched=None, length=3)
    assert checker.judge(PROMPT, short).refusal == "completion_tokens"


def test_reasoning_that_the_budget_cut_is_no_empty_answer(checker: Checker) -> None:
    verdict = checker.judge(PROMPT, generation([70] * 9, finish_reason="length"))
    assert verdict.marks == ["truncated", "reasoning_truncated"]
    assert not verdict.complete


def test_llama_cpp_does_not_name_the_id_it_stopped_at(checker: Checker) -> None:
    good = generation([70, 511, 71, 506], matched=None, names_stop=False)
    assert checker.judge(PROMPT, good).refusal is None
    bad = generation([70, 511, 71, 72], matched=None, names_stop=False)
    assert checker.judge(PROMPT, bad).refusal == "stop_id"


@pytest.mark.parametrize(
    "shown", ["{plain}", "{plain}<|end|>", "{skipped}"], ids=["trimmed", "whole", "no specials"]
)
def test_texts_that_engines_make_of_the_same_ids(
    shown: str, checker: Checker, tokenizer: Tokenizer
) -> None:
    ids = [*tokenizer.encode("so it is"), 511, *tokenizer.encode("4 é"), 506]
    text = shown.format(
        plain=tokenizer.decode(ids[:-1]),
        skipped=tokenizer.backend.decode(ids, skip_special_tokens=True),
    )
    assert checker.judge(PROMPT, generation(ids, text=text)).refusal is None
    assert checker.judge(PROMPT, generation(ids, text=text + "!")).refusal == "text"


@pytest.mark.parametrize(
    ("ids", "told"),
    [("so it is", " so it is"), ("so it is ", "so it is"), ("so\n\nit", "so\nit")],
    ids=["the first space", "the last space", "a line break"],
)
def test_spaces_are_ids_like_others(
    ids: str, told: str, checker: Checker, tokenizer: Tokenizer
) -> None:
    """No engine trims or changes what a byte-level vocabulary decodes to."""
    checker.judge(PROMPT, generation([70, 511, 71, 506], text=tokenizer.decode([70, 511, 71])))
    answer = [511, *tokenizer.encode(ids), 506]
    for text, refusal in ((ids, None), (told, "text")):
        given = generation(answer, text=f"</think>{text}")
        assert checker.judge(PROMPT, given).refusal == refusal


def test_spaces_between_text_and_control_strings(checker: Checker, tokenizer: Tokenizer) -> None:
    """As slow tokenizers put them; but what the ids have there themselves must be there."""
    ids = [*tokenizer.encode("so"), 511, *tokenizer.encode("\n\n4"), 506]
    spaced = generation(ids, text="so </think> \n\n4")
    assert checker.judge(PROMPT, spaced).refusal is None
    assert checker.judge(PROMPT, generation(ids, text="so </think> 4")).refusal == "text"
    assert checker.judge(PROMPT, generation(ids, text="so</think>\n\n4")).refusal is None
    assert checker.judge(PROMPT, spaced).refusal == "text"  # now it is known to put none


def test_an_empty_text_is_an_account_where_the_engine_writes_one(checker: Checker) -> None:
    ids = [70, 511, 71, 506]
    assert checker.judge(PROMPT, generation(ids, text="")).refusal == "text"
    assert checker.judge(PROMPT, generation(ids, text="", writes_text=False)).refusal is None
    assert checker.judge(PROMPT, generation(ids, text=None)).refusal is None
    assert (
        checker.judge([70, 506, 509], generation([506], text="", prompt_tokens=3)).refusal is None
    )


def test_a_text_ends_where_the_ids_end(checker: Checker, tokenizer: Tokenizer) -> None:
    """The last id is trimmed if the engine stopped at it, and shown at the cap."""
    ids = [70, 511, 71, 72]
    text = tokenizer.decode(ids)
    cap: dict[str, object] = {"finish_reason": "length", "matched": None}
    assert checker.judge(PROMPT, generation(ids, text=text, **cap)).refusal is None
    assert checker.judge(PROMPT, generation([*ids, 73], text=text, **cap)).refusal == "text"
    assert checker.judge(PROMPT, generation(ids, text=text)).refusal == "text"
    assert checker.judge(PROMPT, generation([*ids, 506], text=text, **cap)).refusal is None


def test_half_characters_are_no_difference(checker: Checker, tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é")[:1]
    ids = [70, 511, *half]
    shown = tokenizer.decode([70, 511]) + "\ufffd\ufffd"
    verdict = checker.judge(PROMPT, generation(ids, finish_reason="length", text=shown))
    assert verdict.refusal is None


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.integers(0, 60))
def test_a_repeated_stretch_to_the_end_is_a_loop(stretch: list[int], before: int) -> None:
    repeats = 4 + -(-64 // len(stretch)) + 1
    assert is_loop([401 + n for n in range(before)] + stretch * repeats)


def ends_in_a_loop(ids: list[int]) -> bool:
    """What `is_loop` means, as it is said."""
    periods = range(1, min(128, len(ids) // 4) + 1)
    spans = ((period, max(4 * period, 64 + period)) for period in periods)
    return any(
        span <= len(ids) and ids[-span:-period] == ids[len(ids) - span + period :]
        for period, span in spans
    )


@given(
    st.lists(st.sampled_from([0, 1, 256, 257, 65536, 16777216]), max_size=40),
    st.lists(st.sampled_from([0, 1, 256, 65536, 16777216]), min_size=1, max_size=140),
    st.integers(0, 130),
    st.integers(0, 3),
)
def test_loops_are_those_that_are_meant(
    before: list[int], stretch: list[int], repeats: int, cut: int
) -> None:
    """Ids whose bytes resemble one another, too."""
    ids = before + stretch * repeats
    ids = ids[: len(ids) - cut]
    assert is_loop(ids) == ends_in_a_loop(ids)


@given(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=300))
def test_distinct_ids_are_no_loop(ids: list[int]) -> None:
    assert not is_loop(ids)


def test_a_rule_of_dashes_is_no_loop() -> None:
    assert not is_loop([*range(100), *[7] * 40])
    assert is_loop([*range(100), *[7] * 70])


@pytest.mark.parametrize(
    ("ids", "at"), [([0, 511], None), ([0, 512], 1), ([-1], 0), ([0, 2**40], 1), ([0, "1"], 1)]
)
def test_ids_that_must_not_be_sent(ids: list[int], at: int | None) -> None:
    assert bad_prompt_id(ids, 512) == at


def test_a_doubled_bos_is_marked(tokenizer: Tokenizer, profile: Profile) -> None:
    from dataclasses import replace

    checker = Checker(tokenizer, replace(profile, bos_ids=(505,)))
    prompt = [505, 505, *PROMPT]
    verdict = checker.judge(prompt, generation([70, 511, 71, 506], prompt_tokens=len(prompt)))
    assert verdict.marks == ["doubled_bos"]


def test_names_are_told_apart() -> None:
    assert not REFUSALS.keys() & MARKS.keys()
