"""Rows of every shape into conversations, and every reason for which one is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.conversation import Conversation, conversation_key
from eyas.readers import REASONS, PromptReader
from eyas.readers.shapes import to_conversation
from eyas.readers.showing import Refused


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def refusal(row: Any, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        to_conversation(row, **options)
    assert caught.value.reason in REASONS
    return caught.value


# Shapes


@pytest.mark.parametrize(
    ("row", "shape", "turns"),
    [
        ({"messages": [user("a"), assistant("b"), user("c")]}, "messages", [["a"], ["c"]]),
        ({"messages": '[{"role": "user", "content": "a"}]'}, "messages", [["a"]]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "conversations",
            [["a"]],
        ),
        ({"conversations": [user("a")]}, "conversations", [["a"]]),
        ({"conversation": [user("a")]}, "conversations", [["a"]]),
        ({"turns": ["a", "b"]}, "turns", [["a"], ["b"]]),
        ({"turns": '["a", "b"]'}, "turns", [["a"], ["b"]]),
        ({"instruction": "a", "input": "b", "output": "c"}, "instruction", [["a\n\nb"]]),
        ({"instruction": "a", "input": ""}, "instruction", [["a"]]),
        ({"instruction": "a", "input": " \n"}, "instruction", [["a"]]),
        ({"instruction": "a", "input": None}, "instruction", [["a"]]),
        ({"instruction": "a"}, "instruction", [["a"]]),
        ({"prompt": " a "}, "prompt", [[" a "]]),
        ({"prompt": [user("a"), assistant("b"), user("c")]}, "prompt", [["a"], ["c"]]),
        ({"question": "a"}, "question", [["a"]]),
        ({"query": "a"}, "query", [["a"]]),
        ({"text": "a"}, "text", [["a"]]),
        # Of several the first in the documented order; null and "" count as absent.
        ({"text": "x", "prompt": "a"}, "prompt", [["a"]]),
        ({"prompt": "x", "messages": [user("a")]}, "messages", [["a"]]),
        ({"messages": None, "instruction": "", "question": "a"}, "question", [["a"]]),
    ],
)
def test_each_shape_is_recognised(row: dict[str, Any], shape: str, turns: list[list[str]]) -> None:
    conversation = to_conversation(row, source="f", line=3)
    assert conversation.shape == shape
    assert [[m["content"] for m in turn] for turn in conversation.turns] == turns
    assert conversation.prompt_ids is None
    assert (conversation.source, conversation.line) == ("f", 3)


def test_prompt_ids_are_taken_as_they_are() -> None:
    conversation = to_conversation({"id": 5, "prompt_ids": [1, 0, 2**31 - 1], "prompt": "x"})
    assert conversation.prompt_ids == [1, 0, 2**31 - 1]
    assert (conversation.turns, conversation.n_turns) == ([], 1)
    assert conversation.shape == "prompt_ids"
    assert conversation.metadata == {"prompt": "x"}
    assert conversation.key == conversation_key("5", {"prompt_ids": [1, 0, 2**31 - 1]})
    assert to_conversation({"prompt_ids": "[1, 2]"}).prompt_ids == [1, 2]


@pytest.mark.parametrize(
    ("value", "turns", "ids"),
    [
        ("a", [[user("a")]], None),
        ('[{"role"', [[user('[{"role"')]], None),
        ([user("a")], [[user("a")]], None),
        (["a", "b"], [[user("a")], [user("b")]], None),
        ([4, 5], [], [4, 5]),
    ],
)
def test_a_named_column_may_hold_any_kind(
    value: Any, turns: list[Any], ids: list[int] | None
) -> None:
    row = {"mine": value, "prompt": "not this", "input": "nor this"}
    conversation = to_conversation(row, column="mine")
    assert (conversation.turns, conversation.prompt_ids) == (turns, ids)
    assert conversation.shape == "column:mine"
    assert conversation.metadata == {"prompt": "not this", "input": "nor this"}


def test_a_named_column_that_is_a_known_one() -> None:
    row = {"messages": '[{"role": "user", "content": "a"}]', "text": "b", "instruction": "c"}
    assert to_conversation(row, column="messages").turns == [[user("a")]]
    assert to_conversation(row, column="text").turns == [[user("b")]]
    assert to_conversation(row | {"input": "x"}, column="instruction").turns == [[user("c")]]


# Turns


@pytest.mark.parametrize(
    ("roles", "turns", "marks"),
    [
        ("u", ["u"], ()),
        ("sua", ["su"], ()),
        ("suaua", ["su", "u"], ()),
        ("uu", ["uu"], ()),
        ("uua", ["uu"], ()),
        ("uaau", ["u", "u"], ()),
        ("au", ["u"], ("leading_assistant",)),
        ("aaua", ["u"], ("leading_assistant",)),
        ("saua", ["su"], ("leading_assistant",)),
        ("sasu", ["ssu"], ("leading_assistant",)),
        ("dau", ["du"], ("leading_assistant",)),
        ("uas", ["u"], ()),
        ("uaus", ["u"], ()),
        ("usa", ["us"], ()),
        ("uasau", ["u", "s", "u"], ()),
    ],
)
def test_turns(roles: str, turns: list[str], marks: tuple[str, ...]) -> None:
    """A turn is what an answer follows, or what ends the conversation with the user."""
    name = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    row = {"messages": [{"role": name[r], "content": f"{i}"} for i, r in enumerate(roles)]}
    conversation = to_conversation(row)
    got = ["".join(m["role"][0] for m in turn) for turn in conversation.turns]
    assert got == turns
    assert conversation.marks == marks
    assert conversation.n_turns == len(turns)


@given(st.text(alphabet="usad", max_size=12))
def test_turns_hold_the_given_messages_in_order(roles: str) -> None:
    """No message is invented or moved, and none before the last turn's end is left out."""
    name = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    row = {"messages": [{"role": name[r], "content": f"{i}"} for i, r in enumerate(roles)]}
    try:
        conversation = to_conversation(row)
    except Refused as refused:
        assert refused.reason == ("no_user_message" if "u" not in roles else "no_turn")
        return
    got = [int(m["content"]) for turn in conversation.turns for m in turn]
    assert got == [i for i, r in enumerate(roles) if r != "a" and i <= got[-1]]
    assert all(conversation.turns)


@pytest.mark.parametrize(
    ("given", "role"),
    [
        *[(r, "user") for r in ("human", "user")],
        *[(r, "assistant") for r in ("gpt", "assistant", "chatgpt", "bard", "bing", "model")],
        ("system", "system"),
    ],
)
def test_sharegpt_roles(given: str, role: str) -> None:
    rows = [{"from": "human", "value": "a"}, {"from": given, "value": "b"}]
    rows.append({"from": "human", "value": "c"})
    conversation = to_conversation({"conversations": rows})
    expected = [user("a"), {"role": role, "content": "b"}, user("c")]
    assert [m for turn in conversation.turns for m in turn] == [
        m for m in expected if m["role"] != "assistant"
    ]
    assert conversation.key == to_conversation({"messages": expected}).key


def test_text_parts_are_joined_and_names_are_kept() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": ""}]
    row = {"messages": [{"role": "user", "content": parts, "name": "Ann", "weight": 1}]}
    assert to_conversation(row).turns == [[{"role": "user", "content": "a\nb\n", "name": "Ann"}]]


def test_what_a_recorded_answer_carries_besides_text_is_left_out() -> None:
    plain = to_conversation({"messages": [user("a"), assistant("b"), user("c")]})
    extra: dict[str, Any] = {
        "reasoning_content": "hm",
        "tool_calls": [],
        "function_call": None,
        "name": None,
    }
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]
    answers: list[dict[str, Any]] = [
        {**assistant("b"), **extra},
        {"role": "assistant", "content": thought},
    ]
    for answer in answers:
        assert to_conversation({"messages": [user("a"), answer, user("c")]}).key == plain.key
    answers = [{"role": "assistant", "content": None}, {"role": "assistant"}]
    for answer in answers:
        conversation = to_conversation({"messages": [user("a"), answer, user("c")]})
        assert conversation.turns == plain.turns


def test_system_text_is_put_before_conversations_that_have_none() -> None:
    bare, own = {"messages": [user("a"), assistant("b"), user("c")]}, {"messages": [system("s")]}
    own["messages"] += bare["messages"]
    given = to_conversation(bare, system="S")
    assert given.turns == [[system("S"), user("a")], [user("c")]]
    assert given.key == to_conversation(bare).key
    assert to_conversation(own, system="S").turns == to_conversation(own).turns
    developer = {"messages": [{"role": "developer", "content": "d"}, user("a")]}
    assert to_conversation(developer, system="S").turns == to_conversation(developer).turns
    assert to_conversation({"prompt": "a"}, system="S").turns == [[system("S"), user("a")]]
    assert to_conversation({"prompt_ids": [1]}, system="S").turns == []


# Keys, ids, metadata


def test_the_key_is_that_of_the_content() -> None:
    same = [
        {"prompt": "a"},
        {"question": "a", "other": 1},
        {"turns": ["a"]},
        {"messages": [user("a")]},
        {"messages": [{"content": "a", "role": "user"}], "tools": []},
        {"conversations": [{"from": "human", "value": "a"}]},
    ]
    other = [
        {"prompt": "b"},
        {"prompt": "a", "id": "1"},
        {"messages": [user("a"), assistant("b")]},
        {"messages": [user("a"), user("b")]},
        {"turns": ["a", "b"]},
        {"messages": [{**user("a"), "name": "Ann"}]},
        {"prompt_ids": [1]},
    ]
    assert len({to_conversation(row).key for row in same}) == 1
    keys = {to_conversation(row).key for row in [same[0], *other]}
    assert len(keys) == 1 + len(other)


@pytest.mark.parametrize(
    ("ids", "given", "left"),
    [
        ({"id": "x", "uuid": "y"}, "x", {"uuid": "y"}),
        ({"id": 7}, "7", {}),
        ({"id": 7.0}, "7", {}),
        ({"id": 0}, "0", {}),
        ({"id": 1.5, "uuid": "y"}, "y", {"id": 1.5}),
        ({"id": None, "question_id": 3}, "3", {}),
        ({"id": "", "conversation_id": "c"}, "c", {"id": ""}),
        ({"id": True}, None, {"id": True}),
        ({"id": [1], "uuid": {"a": 1}}, None, {"id": [1], "uuid": {"a": 1}}),
        ({"id": float("inf")}, None, {"id": float("inf")}),
        ({}, None, {}),
    ],
)
def test_given_ids(ids: dict[str, Any], given: str | None, left: dict[str, Any]) -> None:
    conversation = to_conversation({"prompt": "a", **ids})
    assert (conversation.given_id, conversation.metadata) == (given, left)


def test_the_other_columns_are_the_metadata() -> None:
    row: dict[str, Any] = {
        "id": "1",
        "instruction": "a",
        "input": "b",
        "tools": None,
        "images": [],
        "functions": "[]",
        "prompt": "kept",
        "label": {"x": [1, None]},
        "nothing": None,
        "empty": "",
    }
    assert to_conversation(row).metadata == {
        "prompt": "kept",
        "label": {"x": [1, None]},
        "empty": "",
    }


# Refusals


@pytest.mark.parametrize(
    ("row", "reason", "says"),
    [
        ([1], "not_an_object", "a list"),
        ({}, "no_prompt_column", "columns are none"),
        ({"promt": "a", "label": 1}, "no_prompt_column", "'promt', 'label'"),
        ({"prompt": ""}, "empty_prompt", "'prompt' is empty"),
        ({"prompt": None, "label": 1}, "empty_prompt", "'prompt' is empty"),
        ({"prompt": " \n\t"}, "empty_prompt", "'prompt' is blank"),
        ({"instruction": " ", "input": "b"}, "empty_prompt", "'instruction' is blank"),
        ({"turns": ["a", " "]}, "empty_prompt", "turn 2 is blank"),
        ({"messages": [user("")]}, "empty_prompt", "message 1 of the user is blank"),
        ({"messages": [user("a"), assistant("b"), user("\n")]}, "empty_prompt", "message 3"),
        ({"messages": [{"role": "user", "content": []}]}, "empty_prompt", "message 1"),
        ({"prompt": 5}, "bad_prompt", "a number"),
        ({"prompt": {"a": 1}}, "bad_prompt", "an object"),
        ({"prompt": []}, "bad_prompt", "an empty list"),
        ({"prompt": [None]}, "bad_prompt", "a list"),
        ({"question": ["a"]}, "bad_prompt", "'question' holds a list"),
        ({"text": True}, "bad_prompt", "true or false"),
        ({"instruction": 1}, "bad_prompt", "'instruction' holds a number"),
        ({"instruction": "a", "input": {}}, "bad_prompt", "'input' holds an object"),
        ({"messages": "hello"}, "bad_messages", "not JSON"),
        ({"messages": {"role": "user"}}, "bad_messages", "an object"),
        ({"messages": 3}, "bad_messages", "a number"),
        ({"messages": ["a"]}, "bad_messages", "message 1 is text"),
        ({"conversations": [user("a"), None]}, "bad_messages", "message 2 is null"),
        ({"turns": "hello"}, "bad_turns", "not JSON"),
        ({"turns": 2}, "bad_turns", "a number"),
        ({"turns": []}, "bad_turns", "an empty list"),
        ({"turns": ["a", 5]}, "bad_turns", "turn 2 is a number"),
        ({"turns": [user("a")]}, "bad_turns", "turn 1 is an object"),
        ({"prompt_ids": []}, "bad_prompt_ids", "an empty list"),
        ({"prompt_ids": "1 2"}, "bad_prompt_ids", "not JSON"),
        ({"prompt_ids": {"a": 1}}, "bad_prompt_ids", "an object"),
        ({"prompt_ids": [1, True]}, "bad_prompt_ids", "prompt_ids[1] is True"),
        ({"prompt_ids": [1, 2.0]}, "bad_prompt_ids", "prompt_ids[1] is 2.0 (a number)"),
        ({"prompt_ids": [0, 1, -4]}, "bad_prompt_ids", "prompt_ids[2] is -4"),
        ({"prompt_ids": [2**31]}, "bad_prompt_ids", "prompt_ids[0] is 2147483648"),
        ({"prompt_ids": [1, "2"]}, "bad_prompt_ids", "prompt_ids[1] is '2' (text)"),
        ({"prompt_ids": [None]}, "bad_prompt_ids", "(null)"),
        ({"prompt_ids": [[1]]}, "bad_prompt_ids", "(a list)"),
        ({"messages": [{"role": "alien", "content": "a"}]}, "unknown_role", "'alien'"),
        ({"messages": [{"role": "User", "content": "a"}]}, "unknown_role", "'User'"),
        ({"messages": [{"content": "a"}]}, "unknown_role", "message 1 has no role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown_role", "['user']"),
        ({"messages": [{"role": "user"}]}, "missing_content", "message 1 of the user"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_content", "message 1"),
        ({"messages": [{"role": "system"}, user("a")]}, "missing_content", "of the system"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_content", "a number: 5"),
        ({"messages": [user("a"), {"role": "assistant", "content": {}}]}, "bad_content", "2"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "bad_content", "text"),
        ({"messages": [{"role": "user", "content": [7]}]}, "bad_content", "7"),
        ({"messages": [{"role": "user", "content": [{"type": [1]}]}]}, "bad_content", "1"),
        ({"prompt": "a", "image": "x.png"}, "images_unsupported", "'image'"),
        ({"prompt": "a", "tools": [{"description": "f"}]}, "bad_tools", "tools[0]"),
        ({"prompt": "a", "tools": "f"}, "bad_tools", "'tools'"),
        ({"prompt": "a", "tools": 7}, "bad_tools", "a number"),
        ({"messages": [user("a")], "functions": [{"name": ""}]}, "bad_tools", "functions[0]"),
        ({"messages": [user("a"), {"role": "tool", "content": "a"}]}, "bad_messages", "2"),
        ({"messages": [{"role": "system", "content": "", "tools": [{}]}]}, "bad_tools", "1"),
        ({"conversations": [{"from": "function_call", "value": "a"}]}, "no_user_message", "1"),
        ({"messages": []}, "no_user_message", "0 messages"),
        ({"messages": [system("a"), assistant("b")]}, "no_user_message", "2 messages"),
        ({"messages": [user("a"), system("b")]}, "no_turn", "ends with a system"),
        ({"prompt": "a\ud800"}, "invalid_utf8", "UTF-8"),
    ],
)
def test_refusals(row: Any, reason: str, says: str) -> None:
    refused = refusal(row)
    assert refused.reason == reason
    assert says in refused.detail
    assert len(refused.detail) < 1000


@pytest.mark.parametrize(
    "kind", ["image", "image_url", "input_image", "video", "video_url", "audio", "input_audio"]
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_media_parts_are_refused_by_name(kind: str, role: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: "x"}]
    refused = refusal({"messages": [user("a"), {"role": role, "content": parts}]})
    assert refused.reason == "images_unsupported"
    assert repr(kind) in refused.detail


def test_a_named_column_that_cannot_be_used() -> None:
    assert refusal({"prompt": "a"}, column="mine").reason == "no_prompt_column"
    assert "'mine'" in refusal({"prompt": "a"}, column="mine").detail
    assert refusal({"mine": "", "prompt": "a"}, column="mine").reason == "empty_prompt"
    assert refusal({"mine": 1}, column="mine").reason == "bad_prompt"
    assert refusal({"mine": [1, -2]}, column="mine").reason == "bad_prompt_ids"
    assert refusal({"mine": [{"role": "x"}]}, column="mine").reason == "unknown_role"


def test_metadata_that_could_not_be_written_is_refused() -> None:
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    refused = refusal({"prompt": "a", "deep": deep})
    assert refused.reason == "too_deep"
    assert "'deep'" in refused.detail


def test_values_too_deep_to_show_are_refused_like_others() -> None:
    deep: Any = []
    for _ in range(1000):
        deep = [deep]
    for row, reason in (
        (deep, "not_an_object"),
        ({"messages": [deep]}, "bad_messages"),
        ({"messages": [{"role": deep}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [deep]}]}, "bad_content"),
        ({"prompt": "a", "tools": deep}, "bad_tools"),
    ):
        assert refusal(row).reason == reason


def test_details_are_short_and_show_no_control_characters() -> None:
    row = {"messages": [{"role": "\x1b[31m" + "x" * 5000, "content": "a"}]}
    detail = refusal(row).detail
    assert len(detail) < 200
    assert "\x1b" not in detail


NAMES = [
    "messages",
    "role",
    "content",
    "from",
    "value",
    "turns",
    "prompt",
    "prompt_ids",
    "type",
    "text",
    "tools",
    "id",
    "instruction",
    "input",
    "conversations",
    "name",
]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(NAMES) | st.text(max_size=3),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    ),
    st.sampled_from([None, "mine", "prompt"]),
)
def test_any_row_is_a_conversation_or_a_refusal(row: Any, column: str | None) -> None:
    """Nothing else is ever raised, and what comes out can be stored."""
    try:
        conversation = to_conversation(row, column=column)
    except Refused as refused:
        assert refused.reason in REASONS
        refused.detail.encode()
        return
    assert bool(conversation.turns) != bool(conversation.prompt_ids)
    assert len(conversation.key) == 16
    for turn in conversation.turns:
        assert all(type(m["content"]) is str and m["role"] != "assistant" for m in turn)
    if not any(isinstance(v, int) and abs(v) >= 2**63 for v in conversation.metadata.values()):
        orjson.dumps(conversation.metadata, default=str)


# Real data


def test_real_question_files() -> None:
    root = os.environ.get("EYAS_TEST_DATA")
    if root is None:
        pytest.skip("EYAS_TEST_DATA does not name a directory with data/*.jsonl")
    path = Path(root) / "data" / "mt_bench.jsonl"
    reader = PromptReader([str(path)])
    items = list(reader)
    assert reader.shapes == {"turns": 80}
    assert all(isinstance(item, Conversation) and item.n_turns == 2 for item in items)
    assert items[0].line == 1
    assert isinstance(items[0], Conversation)
    assert items[0].given_id == "81"
    assert items[0].metadata["category"] == "writing"
    everything = PromptReader([str(path.parent / "*.jsonl")])
    assert all(isinstance(item, Conversation) for item in everything)
    assert everything.shapes.total() == everything.position.rows_read > 80
