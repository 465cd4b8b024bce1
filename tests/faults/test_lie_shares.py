"""Lies in 2% and 20% of all answers: none is kept as a good row where a second account tells.

Each lie is told in the accounts that the name of its case says; what the engine says besides is
left honest. A lie that is the same in every account is out of a client's reach (scoring the ids
again is what finds it) and has no case here.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, check_run, numbered, paired, write_prompts
from eyas import Run
from fault_server import CLOSER, END, Answer, Fault, FaultServer, Policy, Target, asks_one_token

Lie = Callable[[random.Random, Target, Answer], None]
"""Changes an honest answer."""


@pytest.fixture(scope="module")
def silent(target: Target) -> Iterator[FaultServer]:
    """It writes no text, as SGLang with --skip-tokenizer-init."""
    with FaultServer(target, text=False) as running:
        yield running


def put(answer: Answer, ids: list[Any], *, count: bool = True) -> None:
    """Other ids, with a count that fits them."""
    answer["output_ids"] = ids
    if count:
        answer["meta_info"]["completion_tokens"] = len(ids)


def exchanged(chosen: random.Random, target: Target, ids: list[int]) -> list[int]:
    """One id, anywhere but at the end, by any other that looks different."""
    at = chosen.randrange(len(ids) - 1)
    tokenizer = target.tokenizer
    plain = [i for i in range(tokenizer.size) if i not in tokenizer.control.values()]
    others = [
        i
        for i in plain
        if visible(tokenizer.decode([i])) != visible(tokenizer.decode(ids[at : at + 1]))
    ]
    return [*ids[:at], chosen.choice(others), *ids[at + 1 :]]


def visible(text: str) -> str:
    """Without what unfinished characters become."""
    return text.replace("\ufffd", "")


def marker_stripped(_: random.Random, __: Target, answer: Answer) -> None:
    put(answer, [i for i in answer["output_ids"] if i != CLOSER])


def marker_stripped_and_not_counted(_: random.Random, __: Target, answer: Answer) -> None:
    put(answer, [i for i in answer["output_ids"] if i != CLOSER], count=False)


def prepended(_: random.Random, __: Target, answer: Answer) -> None:
    put(answer, [*answer["prompt_token_ids"][-5:], *answer["output_ids"]])


def prepended_and_not_counted(_: random.Random, __: Target, answer: Answer) -> None:
    put(answer, [*answer["prompt_token_ids"][-5:], *answer["output_ids"]], count=False)


def one_exchanged(chosen: random.Random, target: Target, answer: Answer) -> None:
    put(answer, exchanged(chosen, target, answer["output_ids"]))


def one_exchanged_in_its_logprobs_too(
    chosen: random.Random, target: Target, answer: Answer
) -> None:
    one_exchanged(chosen, target, answer)
    for entry, index in zip(answer["meta_info"]["output_token_logprobs"], answer["output_ids"],
                            strict=True):  # fmt: skip
        entry[1] = index


def one_exchanged_for(make: Callable[[int], Any]) -> Lie:
    """What no vocabulary holds, in the place of an id."""

    def lie(chosen: random.Random, _: Target, answer: Answer) -> None:
        ids = list(answer["output_ids"])
        at = chosen.randrange(len(ids))
        ids[at] = make(ids[at])
        put(answer, ids)

    return lie


def two_swapped(chosen: random.Random, target: Target, answer: Answer) -> None:
    ids = list(answer["output_ids"])
    places = [at for at in range(len(ids) - 2) if len({ids[at], ids[at + 1]}) == 2]
    at = chosen.choice(places)
    ids[at], ids[at + 1] = ids[at + 1], ids[at]
    put(answer, ids)


def one_dropped(chosen: random.Random, _: Target, answer: Answer) -> None:
    ids = list(answer["output_ids"])
    del ids[chosen.randrange(len(ids) - 1)]
    put(answer, ids)


def one_doubled(chosen: random.Random, _: Target, answer: Answer) -> None:
    ids = list(answer["output_ids"])
    at = chosen.randrange(len(ids) - 1)
    put(answer, [*ids[: at + 1], *ids[at:]])


def stop_doubled(_: random.Random, __: Target, answer: Answer) -> None:
    put(answer, [*answer["output_ids"], END])


def stop_missing(_: random.Random, __: Target, answer: Answer) -> None:
    put(answer, answer["output_ids"][:-1])


def stop_missing_and_another_named(_: random.Random, __: Target, answer: Answer) -> None:
    """Consistent but for the text, which shows what was not the stop id."""
    put(answer, answer["output_ids"][:-1])
    answer["meta_info"]["finish_reason"]["matched"] = answer["output_ids"][-1]


def cut_short(chosen: random.Random, _: Target, answer: Answer) -> None:
    """Fewer ids than its budget of which it says that it ended it."""
    ids = answer["output_ids"]
    put(answer, ids[: chosen.randrange(1, len(ids) - 1)])
    answer["meta_info"]["finish_reason"] = {"type": "length", "length": len(ids)}


def cut_short_in_all_counts(chosen: random.Random, target: Target, answer: Answer) -> None:
    """Only the text knows how it went on."""
    cut_short(chosen, target, answer)
    answer["meta_info"]["finish_reason"]["length"] = len(answer["output_ids"])


def one_more_at_the_cap(chosen: random.Random, target: Target, answer: Answer) -> None:
    """One id that was never sampled, behind an answer that its budget ended."""
    ids = answer["output_ids"][:-1]
    answer["text"] = target.tokenizer.decode(ids)
    put(answer, [*ids, chosen.choice(target.plain)])
    answer["meta_info"]["finish_reason"] = {"type": "length", "length": len(ids) + 1}


def text_emptied(_: random.Random, __: Target, answer: Answer) -> None:
    answer["text"] = ""


def text_of_others(chosen: random.Random, target: Target, answer: Answer) -> None:
    answer["text"] = target.tokenizer.decode(chosen.choices(target.plain, k=9))


def another_prompts(*, rid: bool, echo: bool, same_length: bool = True) -> Lie:
    """The whole answer to another prompt; `rid` and `echo` say what came with it unchanged."""

    def lie(_: random.Random, target: Target, answer: Answer) -> None:
        prompt = list(answer["prompt_token_ids"])
        other = [*prompt[:-1], prompt[-1] - 1] if same_length else prompt[:-1]
        body = {"input_ids": other, "sampling_params": {"max_new_tokens": 200},
                "return_prompt_token_ids": True}  # fmt: skip
        theirs = target.answer(body, text="text" in answer)
        own = answer["meta_info"]["id"]
        theirs["meta_info"]["id"] = f"{own[:-4]}ffff" if rid else own
        if not echo:
            theirs.pop("prompt_token_ids")
        answer.clear()
        answer.update(theirs)

    return lie


TOLD_BY_ANYTHING: dict[str, tuple[Lie, set[str]]] = {
    "a marker stripped": (marker_stripped, {"text", "missing_closer"}),
    "a marker stripped, not counted": (marker_stripped_and_not_counted, {"completion_tokens"}),
    "ids prepended, not counted": (prepended_and_not_counted, {"completion_tokens"}),
    "an id that is negative": (one_exchanged_for(lambda _: -1), {"vocabulary", "stop_id"}),
    "an id just too large": (one_exchanged_for(lambda _: 512), {"vocabulary", "stop_id"}),
    "an id of no int32": (one_exchanged_for(lambda _: 2**31), {"vocabulary", "stop_id"}),
    "an id of no int64": (one_exchanged_for(lambda _: 2**70), {"vocabulary", "not_ids", "stop_id"}),
    "an id as a float": (one_exchanged_for(float), {"not_ids"}),
    "an id as a bool": (one_exchanged_for(bool), {"not_ids"}),
    "an id as a string": (one_exchanged_for(str), {"not_ids"}),
    "an id as null": (one_exchanged_for(lambda _: None), {"not_ids"}),
    "an id in a list": (one_exchanged_for(lambda i: [i]), {"not_ids"}),
    "the stop id doubled": (stop_doubled, {"stop_inside"}),
    "the stop id missing": (stop_missing, {"stop_id"}),
    "cut short of its budget": (cut_short, {"completion_tokens"}),
    "another's, by its id": (another_prompts(rid=True, echo=False), {"engine_refusal"}),
    "another's, by its echo": (another_prompts(rid=False, echo=True), {"prompt_echo"}),
    "another's, by its length": (
        another_prompts(rid=False, echo=False, same_length=False), {"prompt_tokens"}),
}  # fmt: skip
TOLD_BY_TEXT: dict[str, tuple[Lie, set[str]]] = {
    "ids prepended": (prepended, {"text", "stop_inside"}),
    "one id exchanged": (one_exchanged, {"text"}),
    "two ids swapped": (two_swapped, {"text"}),
    "one id dropped": (one_dropped, {"text", "missing_closer"}),
    "one id doubled": (one_doubled, {"text"}),
    "another id named as the stop": (stop_missing_and_another_named, {"text", "missing_closer"}),
    "cut short in all counts": (cut_short_in_all_counts, {"text"}),
    "one id more at the cap": (one_more_at_the_cap, {"text"}),
    "no text": (text_emptied, {"text"}),
    "another text": (text_of_others, {"text"}),
}
TOLD_BY_LOGPROBS: dict[str, tuple[Lie, set[str]]] = {
    "one id exchanged": (one_exchanged, {"logprob_ids"}),
    "two ids swapped": (two_swapped, {"logprob_ids"}),
    "one id dropped": (one_dropped, {"logprob_ids"}),
    "one id doubled": (one_doubled, {"logprob_ids"}),
    "ids prepended": (prepended, {"logprob_ids", "stop_inside"}),
}


def telling(lie: Lie, share: float, target: Target) -> tuple[Policy, list[str]]:
    """A policy that lies in a share of the answers, and the ids of those requests."""
    chosen, told, count = random.Random(3), [], iter(range(10**9))

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if asks_one_token(body) or next(count) % round(1 / share) != 1:
            return None
        answer = copy.deepcopy(honest)
        lie(chosen, target, answer)
        assert repr(answer) != repr(honest)  # 5 == 5.0
        told.append(str(body["rid"]))
        return Fault(answer=answer)

    return policy, told


def check_lie(
    lie: tuple[Lie, set[str]], share: float, server: FaultServer, folder: Path, **more: Any
) -> None:
    """As many rows are refused as lies were told, each for a reason that fits, and no other."""
    rows = [*numbered(60), *paired(20)] if share < 0.1 else [*numbered(20), *paired(10)]
    prompts = write_prompts(folder / "p.jsonl", rows)
    server.policy, told = telling(lie[0], share, server.target)
    summary = capture_from(server, prompts, folder / "run", **more)
    refused = [
        row for row in Run(folder / "run").rejected() if row.reason != "earlier_turn_rejected"
    ]
    assert len(refused) == len(told) > 0
    assert {row.reason for row in refused} <= lie[1]
    assert summary.pending == 0
    assert len(check_run(server.target, folder / "run", summary)) == summary.done  # all are right


@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("lie", [*TOLD_BY_ANYTHING, *TOLD_BY_TEXT])
def test_no_lie_is_kept_beside_a_text(
    lie: str, share: float, server: FaultServer, tmp_path: Path
) -> None:
    check_lie({**TOLD_BY_ANYTHING, **TOLD_BY_TEXT}[lie], share, server, tmp_path)


@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("lie", TOLD_BY_ANYTHING)
def test_no_lie_is_kept_that_counts_alone_tell(
    lie: str, share: float, silent: FaultServer, tmp_path: Path
) -> None:
    check_lie(TOLD_BY_ANYTHING[lie], share, silent, tmp_path)


@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("lie", TOLD_BY_LOGPROBS)
def test_no_lie_is_kept_beside_log_probabilities(
    lie: str, share: float, silent: FaultServer, tmp_path: Path
) -> None:
    check_lie(TOLD_BY_LOGPROBS[lie], share, silent, tmp_path, logprobs=True)


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_a_text_tells_what_ids_and_log_probabilities_agree_on(
    share: float, server: FaultServer, tmp_path: Path
) -> None:
    lie = (one_exchanged_in_its_logprobs_too, {"text"})
    check_lie(lie, share, server, tmp_path, logprobs=True)


@pytest.mark.parametrize("logprobs", [False, True])
def test_answers_of_two_requests_that_are_exchanged(
    logprobs: bool, server: FaultServer, tmp_path: Path
) -> None:
    """Whole answers, each honest in itself: a fifth of them goes to the wrong one of two."""
    waiting: list[Answer] = []
    chosen = random.Random(7)

    def policy(body: Answer, honest: Answer) -> Fault | None:
        waiting.append(honest)
        if len(waiting) > 1 and chosen.random() < 0.2:
            return Fault(answer=waiting[-2])
        return None

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(60))
    server.policy = policy
    summary = capture_from(server, prompts, tmp_path / "run", logprobs=logprobs)
    assert summary.done + summary.rejected == 60
    assert summary.rejected > 3
    assert {row.reason for row in Run(tmp_path / "run").rejected()} == {"engine_refusal"}
