"""Problems: what they ask is what they answer, and held out means never trained on."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from eyas.demo.problems import (
    HELD_OUT_ONE_IN,
    KINDS,
    Problem,
    Split,
    generate,
    is_right,
    split_of,
    stream,
)
from eyas.demo.prompts import CHAT_PROMPTS

SPLITS: tuple[Split, ...] = ("train", "held_out")


def many(split: Split = "train", count: int = 3000) -> list[Problem]:
    return list(islice(stream(5, split), count))


def of_kind(kind: str) -> list[Problem]:
    return [problem for problem in many() if problem.kind == kind]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_problems(split: Split) -> None:
    assert generate(3, 64, split) == generate(3, 64, split)
    assert generate(3, 64, split) != generate(4, 64, split)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert generate(3, 80, "held_out")[:64] == generate(3, 64, "held_out")


@pytest.mark.parametrize("split", SPLITS)
def test_generated_problems_differ_in_content_and_lie_in_their_part(split: Split) -> None:
    problems = generate(1, 500, split)
    assert len({problem.key for problem in problems}) == 500
    assert {problem.split for problem in problems} == {split}


def test_no_question_is_in_both_parts() -> None:
    trained = {problem.question for problem in many("train", 20_000)}
    assert trained.isdisjoint(problem.question for problem in many("held_out", 5000))


def test_about_one_problem_in_ten_is_held_out() -> None:
    keys = [f"{a} + {b}" for a in range(100) for b in range(a, 100)]
    share = sum(split_of(key) == "held_out" for key in keys) / len(keys)
    assert share == pytest.approx(1 / HELD_OUT_ONE_IN, abs=0.015)


def test_the_split_never_changes() -> None:
    """A change would put held-out problems into the training of the model that is shipped."""
    assert split_of("2 + 2") == "held_out"
    assert split_of("23 + 48") == "train"


def test_the_order_of_a_sum_makes_no_other_problem() -> None:
    keys = {tuple(sorted(numbers(p.question))): p.key for p in of_kind("addition")}
    assert all(p.key == keys[tuple(sorted(numbers(p.question)))] for p in of_kind("addition"))


@pytest.mark.parametrize("split", SPLITS)
def test_every_kind_comes_up(split: Split) -> None:
    assert {problem.kind for problem in many(split)} == set(KINDS)


def test_addition() -> None:
    assert all(int(p.answer) == sum(numbers(p.question)) for p in of_kind("addition"))


def test_subtraction_never_goes_below_zero() -> None:
    for problem in of_kind("subtraction"):
        small, large = sorted(numbers(problem.question))
        assert int(problem.answer) == large - small >= 0


def test_multiplication_has_a_single_digit_in_it() -> None:
    for problem in of_kind("multiplication"):
        small, large = sorted(numbers(problem.question))
        assert int(problem.answer) == small * large
        assert small < 10


def test_sorting() -> None:
    for problem in of_kind("sorting"):
        answer = problem.answer.split(", ")
        assert answer == sorted(answer)
        assert 3 <= len(answer) <= 5
        assert all(word in problem.question for word in answer)


def test_reversing() -> None:
    for problem in of_kind("reversing"):
        places = [
            re.search(rf"\b{word}\b", problem.question.partition(":")[2] or problem.question)
            for word in problem.answer.split(", ")
        ]
        starts = [place.start() for place in places if place is not None]
        assert len(starts) == len(places)
        assert starts == sorted(starts, reverse=True)


def test_largest() -> None:
    assert all(int(p.answer) == max(numbers(p.question)) for p in of_kind("largest"))


def test_the_steps_of_arithmetic_are_true() -> None:
    claim = re.compile(r"(\d+) ([+×-]) (\d+) = (\d+)")
    for problem in many():
        for left, sign, right, result in claim.findall(problem.reasoning):
            a, b = int(left), int(right)
            assert {"+": a + b, "-": a - b, "×": a * b}[sign] == int(result), problem


def test_the_reasoning_leads_to_the_answer() -> None:
    for problem in many():
        last = problem.answer.rsplit(", ", maxsplit=1)[-1]
        assert problem.reasoning.rstrip(".").endswith(last), problem


def test_what_counts_as_right() -> None:
    problem = Problem("sorting", "?", "", "ant, bear, cat", "sort ant, bear, cat")
    assert is_right(problem, "ant, bear, cat")
    assert is_right(problem, " Ant, bear, cat.\n")
    assert not is_right(problem, "ant, cat, bear")
    assert not is_right(problem, "")
    assert not is_right(problem, "ant, bear, cat, cat")


def test_the_chat_prompts_differ_and_the_first_can_be_judged() -> None:
    assert len(CHAT_PROMPTS) == len(set(CHAT_PROMPTS)) == 16
    assert CHAT_PROMPTS[0] == "What is 2+2?"
