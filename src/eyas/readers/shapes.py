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

from eyas.conversation import Conversation, Message, conversation_key

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
    "tools_unsupported": "tools are not supported yet",
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

_TOOL = "a tool's role"
_ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_call"), _TOOL),
}
_TOOL_KEYS = frozenset(("tool_calls", "function_call", "tools", "functions"))
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
_MEDIA_PARTS = ("image", "video", "audio", "input_image", "input_audio", "input_video")


class Refused(Exception):
    """This row cannot be used. `reason` is one of `REASONS`; `detail` shows the value."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


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
    ids: list[int] | None = None
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

    if ids is None and not _SPECIAL_COLUMNS.isdisjoint(row):
        used |= _refuse_special(row, used)
    turns, marks = _split(messages) if ids is None else ([], ())
    given_id, id_column = _given_id(row)
    if id_column is not None:
        used.add(id_column)
    content = {"messages": messages, "tools": None} if ids is None else {"prompt_ids": ids}
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


def _from_list(value: Any, name: str) -> tuple[list[int] | None, list[Message]]:
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


def _prompt_ids(value: Any, name: str) -> list[int]:
    if type(value) is not list or not value:
        seen = "an empty list" if value == [] else _kind(value)
        raise Refused("bad_prompt_ids", f"column {name!r} holds {seen}, not a list of ids")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31:
        return value
    wrong = next(i for i, v in enumerate(value) if type(v) is not int or not 0 <= v < 2**31)
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
        if role is _TOOL:
            raise Refused("tools_unsupported", f"message {number} has the role {said!r}")
        if len(given) > 2:
            for key in _TOOL_KEYS.intersection(given):
                if _is_filled(given[key]):
                    raise Refused("tools_unsupported", f"message {number} has {key!r}")
        content = given.get("content")
        if content is None:
            content = given.get("value")
        if type(content) is list:
            content = _joined_parts(content, role, number)
        message: Message = {"role": role}
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


def _split(messages: list[Message]) -> tuple[list[list[Message]], tuple[str, ...]]:
    """The turns: stretches that an answer follows, or that end the conversation with the user.

    An answer before the first user message is left out, and marked; what stood before it stays.
    An answer right after an answer begins no turn.
    """
    turns: list[list[Message]] = []
    stretch: list[Message] = []
    marks: tuple[str, ...] = ()
    user_spoke = False
    for message in messages:
        if message["role"] != "assistant":
            user_spoke = user_spoke or message["role"] == "user"
            stretch.append(message)
        elif not user_spoke:
            marks = ("leading_assistant",)
        elif stretch:
            turns.append(stretch)
            stretch = []
    if not user_spoke:
        raise Refused("no_user_message", f"none of the {len(messages)} messages is the user's")
    if stretch and stretch[-1]["role"] == "user":
        turns.append(stretch)
    if not turns:
        last = stretch[-1]["role"]
        raise Refused("no_turn", f"the conversation ends with a {last} message, not with the user")
    return turns, marks


def _refuse_special(row: dict[str, Any], used: set[str]) -> set[str]:
    """Refuse columns with tools or media. Gives those that are empty, which say nothing."""
    present = _SPECIAL_COLUMNS.intersection(row) - used
    for name in sorted(present):
        if _is_filled(row[name]):
            tools = name in _TOOL_COLUMNS
            reason = "tools_unsupported" if tools else "images_unsupported"
            raise Refused(reason, f"column {name!r} is not empty: {_show(row[name])}")
    return set(present)


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


def _kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _show(value: Any) -> str:
    """The value as a message can show it: escaped, and cut."""
    try:
        shown = repr(value[:80] if type(value) in (str, list) else value)
    except RecursionError:
        return f"{_kind(value)}, nested too deeply to show"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
