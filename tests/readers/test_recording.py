"""Tools and recorded results: which result goes with which call, and where turns end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.conversation import Conversation, Result, plain_arguments
from eyas.readers.shapes import to_conversation
from eyas.readers.showing import Refused

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*given: tuple[str, Any, str | None]) -> dict[str, Any]:
    """An answer with calls: (name, arguments, id)."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments, call_id in given
        ],
    }


def tool(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def read(*messages: dict[str, Any], **columns: Any) -> Conversation:
    return to_conversation({"messages": list(messages), **columns})


def results(conversation: Conversation) -> dict[int, tuple[Result, ...]]:
    assert conversation.tool_use is not None
    return conversation.tool_use.results


def test_a_row_without_tools_carries_nothing_of_them() -> None:
    assert read(user("a"), said("b"), user("c")).tool_use is None
    assert read(user("a"), tools=[], functions="null").tool_use is None


@pytest.mark.parametrize(
    "given",
    [
        [LOOK],
        json.dumps([LOOK]),
        [LOOK["function"]],
        json.dumps([LOOK["function"]]),
        [json.dumps(LOOK)],
        LOOK,
    ],
)
def test_tools_come_as_a_list_or_as_json_text(given: Any) -> None:
    for column in ("tools", "functions"):
        conversation = read(user("a"), **{column: given})
        assert conversation.tool_use is not None
        assert conversation.tool_use.tools == [LOOK]
        assert conversation.metadata == {}


def test_definitions_keep_the_order_and_the_nulls_that_they_came_with() -> None:
    function = {"parameters": {"b": 1, "a": {"default": None}}, "name": "f", "strict": True}
    conversation = read(user("a"), tools=[{"function": function, "type": "function"}])
    assert conversation.tool_use is not None
    assert json.dumps(conversation.tool_use.tools) == json.dumps(
        [{"function": function, "type": "function"}]
    )


def test_tools_and_calls_belong_to_the_key() -> None:
    rows = [
        read(user("a"), said("b"), user("c")),
        read(user("a"), said("b"), user("c"), tools=[LOOK]),
        read(user("a"), calls(("look", "{}", "1")), tool("x"), said("b"), user("c")),
        read(user("a"), calls(("look", "{}", "1")), tool("y"), said("b"), user("c")),
        read(user("a"), calls(("look", '{"at": 1}', "1")), tool("x"), said("b"), user("c")),
    ]
    assert len({row.key for row in rows}) == len(rows)


def test_results_begin_the_turn_behind_the_call() -> None:
    conversation = read(
        user("a"),
        calls(("look", '{"at": "x"}', "1"), ("look", {"at": "y"}, "2")),
        tool("Y", tool_call_id="2"),
        tool("X", tool_call_id="1"),
        calls(("count", None, "3")),
        tool(7, tool_call_id="3"),
        user("and now?"),
        said("b"),
        user("c"),
    )
    assert conversation.turns == [[user("a")], [], [user("and now?")], [user("c")]]
    assert results(conversation) == {
        1: (Result("look", '{"at": "y"}', "Y"), Result("look", '{"at": "x"}', "X")),
        2: (Result("count", "{}", "7"),),
    }


def test_results_without_ids_go_by_name_and_order() -> None:
    pair = calls(("look", {"at": 1}, None), ("count", {}, None), ("look", {"at": 2}, None))
    by_order = read(user("a"), pair, tool("1"), tool("n"), tool("2"), said("b"))
    by_name = read(
        user("a"),
        pair,
        tool("n", name="count"),
        tool("1", name="look"),
        tool("2", name="look"),
        said("b"),
    )
    expected = {
        Result("look", '{"at": 1}', "1"),
        Result("count", "{}", "n"),
        Result("look", '{"at": 2}', "2"),
    }
    assert set(results(by_order)[1]) == set(results(by_name)[1]) == expected


def test_a_result_of_no_known_call_is_kept_without_arguments() -> None:
    conversation = read(user("a"), said("I look."), tool("x", name="look"), said("b"))
    assert results(conversation) == {1: (Result("look", None, "x"),)}


def test_a_result_for_a_call_that_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="call_9") as caught:
        read(user("a"), calls(("look", "{}", "call_1")), tool("x", tool_call_id="call_9"))
    assert caught.value.reason == "bad_messages"


def test_a_conversation_may_end_with_results() -> None:
    conversation = read(user("a"), calls(("look", "{}", "1")), tool("x", tool_call_id="1"))
    assert conversation.turns == [[user("a")], []]
    assert results(conversation) == {1: (Result("look", "{}", "x"),)}


def test_the_older_shape_of_openai() -> None:
    conversation = read(
        user("a"),
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look", "arguments": '{"at": 1.0}'},
        },
        {"role": "function", "name": "look", "content": "x"},
        said("b"),
        functions=[LOOK["function"]],
    )
    assert results(conversation) == {1: (Result("look", '{"at": 1}', "x"),)}


@pytest.mark.parametrize(
    ("call", "answer"), [("function_call", "observation"), ("tool_call", "tool_response")]
)
def test_sharegpt(call: str, answer: str) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": call, "value": '{"name": "look", "arguments": {"at": "x"}}'},
            {"from": answer, "value": "X"},
            {"from": "gpt", "value": "b"},
        ],
        "tools": json.dumps([LOOK["function"]]),
    }
    conversation = to_conversation(row)
    assert conversation.turns == [[user("a")], []]
    assert results(conversation) == {1: (Result("look", '{"at": "x"}', "X"),)}


def test_hermes_text() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "a"},
            {
                "from": "gpt",
                "value": "<think>hm</think>\n<tool_call>\n{'arguments': {'at': 'x'}, 'name': "
                "'look'}\n</tool_call>\n<tool_call>\n"
                '{"name": "count", "arguments": {}}\n</tool_call>',
            },
            {
                "from": "tool",
                "value": '<tool_response>\n{"name": "look", "content": {"seen": true}}\n'
                "</tool_response>\n<tool_response>\n7\n</tool_response>",
            },
            {"from": "gpt", "value": "b"},
        ]
    }
    assert results(to_conversation(row)) == {
        1: (Result("look", '{"at": "x"}', '{"seen": true}'), Result("count", "{}", "7"))
    }


def test_calls_that_cannot_be_read_leave_their_results_unpaired() -> None:
    for broken in ("no JSON", '{"name": "look", "arguments": "{"}', "[1]"):
        row = {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": broken},
                {"from": "observation", "value": "X"},
                {"from": "gpt", "value": "b"},
            ]
        }
        (result,) = results(to_conversation(row))[1]
        assert (result.arguments, result.content) == (None, "X")


def test_arguments_are_compared_by_what_they_say() -> None:
    same = [{"b": [1, 2.5], "a": {"x": 1.0}}, {"a": {"x": 1, "y": None}, "b": [1.0, 2.5]}]
    assert len({plain_arguments(one) for one in same}) == 1
    other = [{}, {"a": 1}, {"a": "1"}, {"a": True}, {"a": 1.5}, {"a": [1]}, {"a": [None]}]
    assert len({plain_arguments(one) for one in other}) == len(other)
    assert plain_arguments(None) == plain_arguments({}) == plain_arguments("")
