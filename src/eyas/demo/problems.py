"""Small problems with worked solutions: what the demo model is trained and judged on.

A problem belongs to the training or to the held-out part by a hash of its content alone, never of
its phrasing: whoever asks "What is 23+48?" and "Add 48 and 23." asks the same problem, so no
wording of a held-out problem was ever seen in training. The same seed gives the same problems on
every machine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Split = Literal["train", "held_out"]
Kind = Literal["addition", "subtraction", "multiplication", "sorting", "reversing", "largest"]

KINDS: tuple[Kind, ...] = get_args(Kind)

HELD_OUT_ONE_IN = 10
"""One problem in so many is held out."""

# fmt: off
WORDS: tuple[str, ...] = (
    "ant", "apple", "bear", "bird", "boat", "cake", "cat", "cloud", "corn", "deer", "desk", "dog",
    "door", "duck", "eagle", "egg", "fig", "fish", "fox", "frog", "gate", "goat", "grape", "hat",
    "hill", "horse", "ink", "iron", "jam", "jar", "key", "king", "kite", "lamp", "leaf", "lemon",
    "lion", "moon", "mouse", "nest", "night", "oak", "olive", "owl", "pear", "pen", "pine", "plum",
    "queen", "rain", "river", "rose", "salt", "ship", "star", "tea", "tree", "tulip", "urn",
    "vase", "violin", "wolf", "wood", "yard", "zebra",
)
# fmt: on
"""The words of all lists. Few and short, so that a tiny vocabulary holds most of them whole."""

# How often each kind is drawn: what has more to learn comes more often.
_WEIGHTS: dict[Kind, int] = {
    "addition": 24,
    "subtraction": 20,
    "multiplication": 24,
    "sorting": 16,
    "reversing": 6,
    "largest": 10,
}

# {a} and {b} are the operands in the order of the operation.
_ADDITION = (
    "What is {a}+{b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a}+{b}?",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "Please add {a} and {b}.",
    "Add {b} to {a}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b} = ?",
    "{a}+{b}",
)
_SUBTRACTION = (
    "What is {a}-{b}?",
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "How much is {a}-{b}?",
    "How much is {a} - {b}?",
    "Calculate {a} - {b}.",
    "Please subtract {b} from {a}.",
    "What is left of {a} if I take away {b}?",
    "What is the difference of {a} and {b}?",
    "{a} - {b} = ?",
    "{a}-{b}",
)
_MULTIPLICATION = (
    "What is {a}×{b}?",
    "What is {a} × {b}?",
    "What is {a}*{b}?",
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "How much is {a} × {b}?",
    "Calculate {a} × {b}.",
    "Please multiply {a} by {b}.",
    "What is the product of {a} and {b}?",
    "{a} × {b} = ?",
    "{a}*{b}",
)
# {list} is the list with commas, {and_list} the same with "and" before its last member.
_SORTING = (
    "Sort these words: {list}",
    "Sort these words alphabetically: {list}.",
    "Please sort {and_list}.",
    "Put these words in alphabetical order: {list}",
    "What is the alphabetical order of {and_list}?",
    "Can you sort {and_list} for me?",
)
_REVERSING = (
    "Reverse this list: {list}",
    "Reverse the order of these words: {list}.",
    "Please reverse {and_list}.",
    "Write these words backwards, last one first: {list}",
    "What is the list {list} in reverse order?",
)
_LARGEST = (
    "Which number is the largest: {list}?",
    "What is the largest of {and_list}?",
    "Find the largest number in this list: {list}",
    "Which of {and_list} is the biggest?",
    "What is the maximum of {list}?",
)

# How a worked solution begins. {task} is the problem in one fixed notation.
_ARITHMETIC_LEADS = ("I work out {task}.", "Let me do {task} digit by digit.", "This is {task}.")
_LIST_LEADS = ("The words are {list}.", "I am given {list}.")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, its worked solution and its answer."""

    kind: Kind
    question: str
    """What the user asks: one of several phrasings."""
    reasoning: str
    """The steps, as the model writes them between its thinking markers."""
    answer: str
    """What the model says after its reasoning."""
    key: str
    """The content without the phrasing, such as ``23 + 48``. Equal keys, equal problems."""

    @property
    def split(self) -> Split:
        """The part that this problem belongs to."""
        return split_of(self.key)


def split_of(key: str) -> Split:
    """The part that a problem's content belongs to; a hash decides, so it never changes."""
    digest = hashlib.sha256(key.encode()).digest()
    held_out = int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "train"


def stream(seed: int, split: Split) -> Iterator[Problem]:
    """Problems without end, drawn from one part; the same seed gives the same problems.

    Small problems come again and again, as training wants them to.
    """
    rng = random.Random(f"{seed}/{split}")
    kinds, weights = tuple(_WEIGHTS), tuple(_WEIGHTS.values())
    while True:
        problem = _MAKERS[rng.choices(kinds, weights)[0]](rng)
        if problem.split == split:
            yield problem


def generate(seed: int, n: int, split: Split) -> list[Problem]:
    """The first ``n`` problems of :func:`stream` that differ from each other in content."""
    problems: dict[str, Problem] = {}
    source = stream(seed, split)
    while len(problems) < n:
        problem = next(source)
        problems.setdefault(problem.key, problem)
    return list(problems.values())


def is_right(problem: Problem, answer_text: str) -> bool:
    """Whether ``answer_text``, what stands after the reasoning, answers the problem.

    White space around it, a final full stop and capital letters are not held against it.
    """
    given = answer_text.strip().removesuffix(".").lower()
    return given == problem.answer


def _addition(rng: random.Random) -> Problem:
    a, b = _operand(rng), _operand(rng)
    key = f"{min(a, b)} + {max(a, b)}"
    steps = _add_steps(a, b)
    return _arithmetic(rng, "addition", _ADDITION, (a, b), f"{a} + {b}", steps, a + b, key)


def _subtraction(rng: random.Random) -> Problem:
    b, a = sorted((_operand(rng), _operand(rng)))
    task = f"{a} - {b}"
    steps = _subtract_steps(a, b)
    return _arithmetic(rng, "subtraction", _SUBTRACTION, (a, b), task, steps, a - b, task)


def _multiplication(rng: random.Random) -> Problem:
    a, b = _operand(rng), rng.randrange(10)
    key = f"{min(a, b)} × {max(a, b)}"
    steps = _multiply_steps(a, b)
    if rng.random() < 0.3:  # also with the single digit first; the steps are the same
        a, b = b, a
    task = f"{a} × {b}"
    return _arithmetic(rng, "multiplication", _MULTIPLICATION, (a, b), task, steps, a * b, key)


def _operand(rng: random.Random) -> int:
    return rng.randrange(10) if rng.random() < 0.25 else rng.randrange(10, 100)


def _arithmetic(
    rng: random.Random,
    kind: Kind,
    phrasings: Sequence[str],
    operands: tuple[int, int],
    task: str,
    steps: str,
    result: int,
    key: str,
) -> Problem:
    a, b = operands
    question = rng.choice(phrasings).format(a=a, b=b)
    lead = rng.choice(_ARITHMETIC_LEADS).format(task=task)
    end = rng.choice((f"So {task} = {result}.", f"The answer is {result}."))
    return Problem(kind, question, f"{lead} {steps} {end}", str(result), key)


def _add_steps(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    steps = f"Ones: {a % 10} + {b % 10} = {ones}"
    if a < 10 and b < 10:
        return f"{steps}."
    tens = a // 10 + b // 10
    if ones < 10:
        return f"{steps}. Tens: {a // 10} + {b // 10} = {tens}."
    return (
        f"{steps}, write {ones - 10}, carry 1. "
        f"Tens: {a // 10} + {b // 10} = {tens}, plus 1 is {tens + 1}."
    )


def _subtract_steps(a: int, b: int) -> str:
    ones_a, ones_b, tens_a = a % 10, b % 10, a // 10
    if ones_a >= ones_b:
        steps = f"Ones: {ones_a} - {ones_b} = {ones_a - ones_b}."
    else:  # a is at least b, so there is a ten to borrow
        tens_a -= 1
        steps = (
            f"Ones: {ones_a} is less than {ones_b}, borrow 1, "
            f"{10 + ones_a} - {ones_b} = {10 + ones_a - ones_b}."
        )
    return steps if a < 10 else f"{steps} Tens: {tens_a} - {b // 10} = {tens_a - b // 10}."


def _multiply_steps(a: int, b: int) -> str:
    ones = a % 10 * b
    steps = f"Ones: {a % 10} × {b} = {ones}"
    if a < 10:
        return f"{steps}."
    tens = a // 10 * b
    if ones < 10:
        return f"{steps}. Tens: {a // 10} × {b} = {tens}."
    return (
        f"{steps}, write {ones % 10}, carry {ones // 10}. "
        f"Tens: {a // 10} × {b} = {tens}, plus {ones // 10} is {tens + ones // 10}."
    )


def _sorting(rng: random.Random) -> Problem:
    words = rng.sample(WORDS, rng.randint(3, 5))
    left = list(words)
    steps = [rng.choice(_LIST_LEADS).format(list=_commas(words))]
    while len(left) > 1:
        first = min(left)
        steps.append(f"The first of {_commas(left)} is {first}.")
        left.remove(first)
    steps.append(f"That leaves {left[0]}.")
    # The answer depends on which words there are, not on the order in which they come.
    key = f"sort {_commas(sorted(words))}"
    question = _list_question(rng, _SORTING, words)
    return Problem("sorting", question, " ".join(steps), _commas(sorted(words)), key)


def _reversing(rng: random.Random) -> Problem:
    words = rng.sample(WORDS, rng.randint(3, 5))
    backwards = words[::-1]
    steps = [rng.choice(_LIST_LEADS).format(list=_commas(words))]
    steps.append(f"The last word is {backwards[0]}.")
    steps += [f"Before {after} comes {word}." for after, word in pairwise(backwards)]
    question = _list_question(rng, _REVERSING, words)
    key = f"reverse {_commas(words)}"
    return Problem("reversing", question, " ".join(steps), _commas(backwards), key)


def _largest(rng: random.Random) -> Problem:
    numbers = rng.sample(range(100), rng.randint(3, 5))
    best = numbers[0]
    steps = [f"I start with {best}."]
    for number in numbers[1:]:
        if number > best:
            steps.append(f"{number} is larger than {best}, so I keep {number}.")
            best = number
        else:
            steps.append(f"{number} is smaller than {best}.")
    steps.append(f"The largest is {best}.")
    key = f"largest {_commas([str(number) for number in sorted(numbers)])}"
    question = _list_question(rng, _LARGEST, [str(number) for number in numbers])
    return Problem("largest", question, " ".join(steps), str(best), key)


def _list_question(rng: random.Random, phrasings: Sequence[str], members: Sequence[str]) -> str:
    and_list = f"{_commas(members[:-1])} and {members[-1]}"
    return rng.choice(phrasings).format(list=_commas(members), and_list=and_list)


def _commas(members: Sequence[str]) -> str:
    return ", ".join(members)


_MAKERS = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "sorting": _sorting,
    "reversing": _reversing,
    "largest": _largest,
}
