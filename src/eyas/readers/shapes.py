"""One raw row into a conversation, or the reason why it cannot be one.

Invariant: nothing that a model would be given is guessed, repaired or left out in silence. A row
becomes exactly the messages that it holds (recorded answers apart), or it is `Refused` with one
of the names in `REASONS` and a sentence that shows the value. What is no part of the messages is
kept in the metadata.

This module knows no files: it gets a dict and gives a `Conversation`.
"""

from __future__ import annotations

from typing import Any

import orjson

from eyas.conversation import Conversation, Message, ToolUse, conversation_key
from eyas.ids import Ids, first_bad, pack
from eyas.readers.recording import calls_in_text, calls_of, result_text, split, tool_definitions
from eyas.readers.showing import Refused
from eyas.readers.showing import kind as _kind
from eyas.readers.showing import show as _show

REASONS: dict[str, str] = {
    "invalid_json": "the line or array element is not JSON",
    "invalid_utf8": "the text is not UTF-8, or holds half of a surrogate pair",
    "invalid_csv": "the quotes of a CSV row do not fit together",
    "wrong_field_count": "a CSV row has more or fewer fields than the header",
    "row_too_long": "the line is longer than any prompt can be",
    "unreadable_file": "from here on the file cannot be read: cut, corrupt or of another format",
    "not_an_object": "the row is JSON, but not an object",
    "no_prompt_column": "no column of the row is one that holds prompts",
    "empty_prompt": "the prompt, or the text of a user message, is empty or blank",
    "bad_prompt": "a prompt column holds something other than text",
    "bad_messages": "the messages are not a list of objects",
    "bad_turns": "the turns are not a list of texts",
    "bad_prompt_ids": "the prompt ids are not a list of whole numbers from 0 to 2**31 - 1",
    "unknown_role": "a message has no role, or one that is not known",
    "missing_content": "a message of the user or system has no content",
    "bad_content": "the content of a message is neither text nor a list of text parts",
    "images_unsupported": "images, video and audio are not supported",
    "bad_tools": "the tools are not a list of objects that each name a function",
    "no_user_message": "the conversation holds no user message",
    "no_turn": "no answer follows the user's message, and the conversation does not end with it",
    "too_deep": "a column holds values that are nested too deeply to be stored",
}
"""Every reason for which a piece of the input is refused, and what it means."""

COLUMNS = (
    "prompt_ids",
    "messages",
    "conversations",
    "conversation",
    "turns",
    "instruction",
    "prompt",
    "question",
    "query",
    "text",
)
"""The columns that are recognised. Of several the first counts; the others become metadata."""

_MESSAGE_COLUMNS = frozenset(("messages", "conversations", "conversation"))
_JSON_COLUMNS = _MESSAGE_COLUMNS | {"turns", "prompt_ids"}
_ID_COLUMNS = ("id", "uuid", "question_id", "conversation_id")
_TOOL_COLUMNS = frozenset(("tools", "functions"))
_MEDIA_COLUMNS = frozenset(("image", "images", "video", "videos", "audio", "audios"))
_SPECIAL_COLUMNS = _TOOL_COLUMNS | _MEDIA_COLUMNS

_CALLS = "calls"
_ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), _CALLS),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
_CALL_KEYS = frozenset(("tool_calls", "function_call"))
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
_MEDIA_PARTS = ("image", "video", "audio", "input_image", "input_audio", "input_video")


def to_conversation(
    row: Any,
    *,
    column: str | None = None,
    system: str | None = None,
    source: str = "",
    line: int = 0,
) -> Conversation:
    """The conversation that a row holds. Raises `Refused`.

    `column` names the one column to look at. `system` is put before the first turn of a
    conversation that has no system or developer message of its own; it is no part of the key.
    """
    if type(row) is not dict:
        raise Refused("not_an_object", f"the row is {_kind(row)}, not an object: {_show(row)}")
    name, value = _prompt_column(row, column)
    used = {name}
    ids: Ids | None = None
    messages: list[Message] = []
    if name == "instruction" and column is None:
        used.add("input")
        messages = [_user_message(_instruction(value, row.get("input")), name)]
    elif name in _MESSAGE_COLUMNS:
        messages = _messages(value, name)
    elif name == "turns":
        messages = _from_texts(value, name)
    elif name == "prompt_ids":
        ids = _prompt_ids(value, name)
    elif type(value) is str:
        messages = [_user_message(value, name)]
    elif name == "prompt" or column is not None:
        ids, messages = _from_list(value, name)
    else:
        raise Refused("bad_prompt", f"column {name!r} holds {_kind(value)}, not text")

    tools: list[dict[str, Any]] | None = None
    if ids is None and not _SPECIAL_COLUMNS.isdisjoint(row):
        tools, special = _special(row, used)
        used |= special
    turns, results, marks = split(messages) if ids is None else ([], {}, ())
    given_id, id_column = _given_id(row)
    if id_column is not None:
        used.add(id_column)
    content = {"messages": messages, "tools": tools} if ids is None else {"prompt_ids": ids}
    try:
        key = conversation_key(given_id, content)
    except TypeError as error:  # orjson's word for text that UTF-8 cannot hold
        raise Refused("invalid_utf8", f"the text cannot be written as UTF-8: {error}") from None
    if system is not None and turns and not any(m["role"] in _SYSTEM for m in messages):
        turns[0].insert(0, {"role": "system", "content": system})
    shape = "conversations" if name == "conversation" else name
    return Conversation(
        key=key,
        given_id=given_id,
        turns=turns,
        prompt_ids=ids,
        metadata=_metadata(row, used),
        source=source,
        line=line,
        shape=shape if column is None else f"column:{column}",
        marks=marks,
        tool_use=ToolUse(tools, results) if tools or results else None,
    )


_SYSTEM = ("system", "developer")


def _prompt_column(row: dict[str, Any], column: str | None) -> tuple[str, Any]:
    """The name and value of the column with the prompt; a JSON column's text is parsed.

    A column that is null or an empty string counts as absent.
    """
    for name in COLUMNS if column is None else (column,):
        value = row.get(name)
        if value is None or value == "":
            continue
        if type(value) is str and name in _JSON_COLUMNS:
            return name, _parsed(value, name)
        return name, value
    empty = [name for name in COLUMNS if name in row] if column is None else [column]
    if empty and empty[0] in row:
        raise Refused("empty_prompt", f"column {empty[0]!r} is empty")
    shown = ", ".join(_show(name) for name in list(row)[:12]) or "none"
    if column is None:
        hint = "name the one with the prompts with --column"
    else:
        hint = f"none is {column!r}, which --column names"
    raise Refused("no_prompt_column", f"the row's columns are {shown}; {hint}")


def _parsed(text: str, name: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        problem = f"column {name!r} holds text that is not JSON ({error.msg}): {_show(text)}"
        raise Refused(_wrong(name), problem) from None


def _wrong(name: str) -> str:
    return "bad_messages" if name in _MESSAGE_COLUMNS else f"bad_{name}"


def _user_message(text: str, name: str) -> Message:
    if not text or text.isspace():
        raise Refused("empty_prompt", f"column {name!r} is blank: {_show(text)}")
    return {"role": "user", "content": text}


def _instruction(instruction: Any, more: Any) -> str:
    """The instruction, and under it the input if there is one."""
    for name, value in (("instruction", instruction), ("input", more)):
        if type(value) is not str and value is not None:
            raise Refused("bad_prompt", f"column {name!r} holds {_kind(value)}, not text")
    text: str = instruction
    blank = not text or text.isspace()
    return text if blank or not more or more.isspace() else f"{text}\n\n{more}"


def _from_list(value: Any, name: str) -> tuple[Ids | None, list[Message]]:
    """Prompt ids or messages from a list of ids, of user texts or of messages."""
    if type(value) is list and value:
        if type(value[0]) is dict:
            return None, _messages(value, name)
        if type(value[0]) is str:
            return None, _from_texts(value, name)
        if type(value[0]) in (int, float):
            return _prompt_ids(value, name), []
    seen = "an empty list" if value == [] else _kind(value)
    raise Refused("bad_prompt", f"column {name!r} holds {seen}, not text or a list of messages")


def _from_texts(value: Any, name: str) -> list[Message]:
    """User messages, with an answer without content between them: that is where turns end."""
    if type(value) is not list or not value:
        seen = "an empty list" if value == [] else _kind(value)
        raise Refused("bad_turns", f"column {name!r} holds {seen}, not a list of texts")
    messages: list[Message] = []
    for number, text in enumerate(value, 1):
        if type(text) is not str:
            raise Refused("bad_turns", f"turn {number} is {_kind(text)}, not text: {_show(text)}")
        if not text or text.isspace():
            raise Refused("empty_prompt", f"turn {number} is blank: {_show(text)}")
        if messages:
            messages.append({"role": "assistant"})
        messages.append({"role": "user", "content": text})
    return messages


def _prompt_ids(value: Any, name: str) -> Ids:
    if type(value) is Ids and value:
        return value
    if type(value) is not list or not value:
        seen = "an empty list" if value == [] else _kind(value)
        raise Refused("bad_prompt_ids", f"column {name!r} holds {seen}, not a list of ids")
    packed = pack(value, 0)
    if packed is not None:
        return packed
    wrong = first_bad(value, 2**31) or 0
    what = "" if type(value[wrong]) is int else f" ({_kind(value[wrong])})"
    raise Refused(
        "bad_prompt_ids",
        f"{name}[{wrong}] is {_show(value[wrong])}{what}; ids are whole numbers from 0 to 2**31-1",
    )


def _messages(value: Any, name: str) -> list[Message]:
    """The messages with ``role``, ``content`` and perhaps ``name``, recorded answers included."""
    if type(value) is not list:
        raise Refused("bad_messages", f"column {name!r} holds {_kind(value)}, not a list")
    messages: list[Message] = []
    for number, given in enumerate(value, 1):
        if type(given) is not dict:
            what = f"message {number} is {_kind(given)}, not an object: {_show(given)}"
            raise Refused("bad_messages", what)
        said = given.get("role")
        if said is None:
            said = given.get("from")
        role = _ROLES.get(said) if type(said) is str else None
        if role is None:
            what = "no role" if said is None else f"the unknown role {_show(said)}"
            raise Refused("unknown_role", f"message {number} has {what}")
        content = given.get("content")
        if content is None:
            content = given.get("value")
        message: Message = {"role": role}
        if role == _CALLS:
            message = {"role": "assistant", "tool_calls": calls_in_text(content)}
            content = None if message["tool_calls"] is not None else content
            role = "assistant"
        elif role == "assistant" and not _CALL_KEYS.isdisjoint(given):
            calls = calls_of(given)
            if calls is not None:
                message["tool_calls"] = calls
        elif role == "tool":
            messages.append(_tool_message(given, content, number))
            continue
        if len(given) > 2 and _is_filled(given.get("tools") or given.get("functions")):
            what = f"message {number} has tools of its own; give them in a column of the row"
            raise Refused("bad_tools", what)
        if type(content) is list:
            content = _joined_parts(content, role, number)
        if type(content) is str:
            if role == "user" and (not content or content.isspace()):
                what = f"message {number} of the user is blank: {_show(content)}"
                raise Refused("empty_prompt", what)
            message["content"] = content
        elif content is not None:
            what = f"the content of message {number} is {_kind(content)}: {_show(content)}"
            raise Refused("bad_content", what)
        elif role != "assistant":
            raise Refused("missing_content", f"message {number} of the {role} has no content")
        if len(given) > 2 and type(given.get("name")) is str and given["name"]:
            message["name"] = given["name"]
        messages.append(message)
    return messages


def _tool_message(given: dict[str, Any], content: Any, number: int) -> Message:
    """A tool's result, with the name and the call's id where they are given."""
    if type(content) is list and all(
        type(part) is str or (type(part) is dict and type(part.get("type")) is str)
        for part in content
    ):
        content = _joined_parts(content, "tool", number)
    text = result_text(content)
    if text is None:
        what = f"the content of message {number} is {_kind(content)}: {_show(content)}"
        raise Refused("bad_content", what)
    message: Message = {"role": "tool", "content": text}
    for key in ("name", "tool_call_id"):
        if type(given.get(key)) is str and given[key]:
            message[key] = given[key]
    return message


def _joined_parts(parts: list[Any], role: str, number: int) -> str:
    """The text parts of a content, joined by ``\\n``, as vLLM joins them for a text template."""
    texts: list[str] = []
    for part in parts:
        if type(part) is str:
            texts.append(part)
            continue
        kind = part.get("type") if type(part) is dict else None
        if kind in _TEXT_PARTS and type(part.get("text")) is str:
            texts.append(part["text"])
        elif type(kind) is str and kind.startswith(_MEDIA_PARTS):
            raise Refused("images_unsupported", f"message {number} has a part of type {kind!r}")
        elif not (role == "assistant" and kind in _THOUGHT_PARTS):
            what = f"message {number} has a part that is not text: {_show(part)}"
            raise Refused("bad_content", what)
    return "\n".join(texts)


def _special(row: dict[str, Any], used: set[str]) -> tuple[list[dict[str, Any]] | None, set[str]]:
    """The tools of a row, and the columns that say nothing more. Media are refused."""
    present = _SPECIAL_COLUMNS.intersection(row) - used
    tools: list[dict[str, Any]] | None = None
    done = set()
    for name in sorted(present, reverse=True):
        if not _is_filled(row[name]):
            done.add(name)
        elif name in _MEDIA_COLUMNS:
            raise Refused("images_unsupported", f"column {name!r} is not empty: {_show(row[name])}")
        elif tools is None:  # tools come before functions
            tools = tool_definitions(row[name], name)
            done.add(name)
    return tools, done


def _is_filled(value: Any) -> bool:
    """Whether there is something; ``[]``, null and the same written as JSON text are nothing."""
    if type(value) is str:
        return value.strip() not in ("", "[]", "{}", "null", "None")
    return bool(value)


def _given_id(row: dict[str, Any]) -> tuple[str | None, str | None]:
    """The id that the row gives, as text, and the column it stands in."""
    for name in _ID_COLUMNS:
        value = row.get(name)
        if value is None:
            continue
        if type(value) is str and value:
            return value, name
        if type(value) is int or (type(value) is float and value.is_integer()):
            return str(int(value)), name
    return None, None


def _metadata(row: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """The other columns, without those that are null."""
    metadata = {k: v for k, v in row.items() if v is not None and k not in used}
    for name, value in metadata.items():
        if type(value) in (dict, list):
            try:
                orjson.dumps(value, default=str)
            except TypeError as error:
                raise Refused("too_deep", f"column {name!r} cannot be stored: {error}") from None
    return metadata
