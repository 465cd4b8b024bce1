"""Steps of a thread, and the walk through its statuses: both must tell the same story."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eyas.conversation import Conversation, Result, ToolUse
from eyas.store import CALLED, GOOD, OPEN, REFUSED, TRUNCATED, UNANSWERED, UNREADABLE
from eyas.tool_threads import Policy, after_answer, walk
from eyas.tools.answers import Answer
from eyas.tools.results import Results
from eyas.tools.steps import Steps


def call(name: str, call_id: str = "1", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def conversation(*turns: str) -> Conversation:
    """Turns by letters: ``u`` a user's message, ``r`` a result of ``look``, ``ru`` both."""
    results = {
        at: (Result("look", '{"at": ' + str(at) + "}", f"seen {at}"),)
        for at, turn in enumerate(turns)
        if "r" in turn
    }
    messages = [[{"role": "user", "content": f"{at}"}] if "u" in turn else [] for at, turn in
                enumerate(turns)]  # fmt: skip
    return Conversation(b"k" * 16, None, messages, tool_use=ToolUse(None, results))


# Results


def test_results_go_to_equal_calls_only() -> None:
    use = ToolUse(None, {1: (Result("a", '{"x": 1}', "one"), Result("b", '{"x": 1}', "two"))})
    results = Results(use)
    assert results.take(call("b", x=1.0), 1) == "two"
    assert results.take(call("a", x=2), 1) is None
    assert results.take(call("c", x=1), 1) is None
    assert results.nearest(call("a", x=2), 1) == "one"
    assert results.nearest(call("c", x=1), 1) is None


def test_equal_calls_get_their_results_in_order_and_the_last_one_again() -> None:
    polls = tuple(Result("poll", "{}", f"{n}") for n in range(3))
    results = Results(ToolUse(None, {1: polls[:1], 3: polls[1:2], 5: polls[2:]}))
    assert [results.take(call("poll"), turn) for turn in (1, 3, 5, 5, 1)] == [
        "0", "1", "2", "2", "0",
    ]  # fmt: skip


def test_a_result_of_an_unknown_call_is_only_near() -> None:
    results = Results(ToolUse(None, {1: (Result("look", None, "x"), Result(None, None, "y"))}))
    assert results.take(call("look"), 1) is None
    assert results.nearest(call("look"), 1) == "x"


def test_arguments_may_be_text() -> None:
    results = Results(ToolUse(None, {1: (Result("look", '{"at": 1}', "x"),)}))
    said = call("look")
    said["function"]["arguments"] = '{"at":1.0,"more":null}'
    assert results.take(said, 1) == "x"


# Answers


def after(steps: Steps, *calls: dict[str, Any], fault: str | None = None, **policy: Any) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = list(calls)
    return after_answer(Answer(message, fault), steps, Policy(**policy))


def test_what_an_answer_means() -> None:
    recording = conversation("u", "r", "u")
    assert after(Steps(recording), call("look", at=1)).marks == ("tool_calls",)
    assert after(Steps(recording)).marks == ("no_tool_call",)
    assert after(Steps(recording, next=2)).marks == ()
    ended = after(Steps(recording), call("look", at=7))
    assert ended.marks == ("tool_calls", "tool_result_missing")
    assert ended.ended.reason == "tool_result_missing"
    assert "look" in ended.ended.detail
    near = after(Steps(recording), call("look", at=7), nearest=True)
    assert (near.ended, near.found.results, near.found.guessed) == (None, ["seen 1"], True)
    made = after(Steps(recording), call("look", at=7), call("look", at=1), produces=True)
    assert (made.ended, made.found.results) == (None, [None, "seen 1"])
    unread = after(Steps(recording), fault="why")
    assert (unread.marks, unread.ended) == (("tool_call_unread",), ("tool_call_unread", "why"))


def test_calls_in_a_row_are_bounded() -> None:
    steps = Steps(conversation("u", "r"))
    for _ in range(3):
        found = after(steps, call("look", at=1), rounds=3)
        assert found.ended is None
        steps.answered(found.answer.calls, found.found.results)
    found = after(steps, call("look", at=1), rounds=3)
    assert found.ended.reason == "tool_result_missing"
    assert "--tool-rounds" in found.ended.detail


# Threads

DECISIONS = st.lists(
    st.sampled_from(["plain", "call", "far call", "cut", "refused", "unread"]), max_size=12
)
TURNS = st.lists(st.sampled_from(["u", "r", "ru"]), max_size=5).map(lambda more: ["u", *more])


def thread(recording: Conversation, decisions: list[str]) -> tuple[list[int], int, list[Any]]:
    """Statuses of a thread as a capture stores them, all its units, and its messages."""
    steps = Steps(recording)
    statuses: list[int] = []
    messages: list[Any] = list(recording.turns[0])
    ending = {"cut": TRUNCATED, "refused": REFUSED, "far call": UNANSWERED, "unread": UNREADABLE}
    for decision in decisions:
        if decision in ending:
            statuses += [ending[decision], *[REFUSED] * steps.left]
            return statuses, len(statuses), messages
        answer: dict[str, Any] = {"role": "assistant", "content": ""}
        if decision == "call":
            known = recording.tool_use.results if recording.tool_use else {}
            if not known:
                continue
            answer["tool_calls"] = [call("look", at=min(known))]
            statuses.append(CALLED)
            messages += [answer, *steps.answered(answer["tool_calls"], ["x"])]
            continue
        statuses.append(GOOD)
        statuses += [REFUSED] * steps.passed_over()
        more = steps.spoken()
        if more is None:
            return statuses, len(statuses), [*messages, answer]
        messages += [answer, *more]
    return statuses, len(statuses) + 1 + steps.left, messages


@given(TURNS, DECISIONS)
def test_a_thread_is_found_where_it_stopped(turns: list[str], decisions: list[str]) -> None:
    recording = conversation(*turns)
    statuses, units, messages = thread(recording, decisions)
    stored = bytes(statuses).ljust(len(turns), bytes([OPEN]))
    found = walk(recording, stored)
    assert found.statuses == bytes(statuses).ljust(units, bytes([OPEN]))
    assert found.open == (units > len(statuses))
    if found.open:
        assert found.turn == len(statuses)
        steps = Steps(recording)
        steps.replay([*messages, {"role": "assistant"}])
        assert steps.left == units - len(statuses) - 1
        assert found.next == steps.next


@given(TURNS, DECISIONS, st.integers(0, 12))
def test_every_unit_is_counted_once_wherever_it_stopped(
    turns: list[str], decisions: list[str], kept: int
) -> None:
    """Rows are lost from some turn on, as when a process was killed between two of them."""
    recording = conversation(*turns)
    statuses, _, _ = thread(recording, decisions)
    there = statuses[:kept]
    found = walk(recording, bytes(there).ljust(len(turns), bytes([OPEN])))
    units = len(found.statuses)
    assert found.statuses == bytes(there).ljust(units, bytes([OPEN]))
    assert units >= max(len(there), len(recording.turns))
    assert units <= len(recording.turns) + there.count(CALLED)
