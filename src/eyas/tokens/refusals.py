"""Why a chat template refuses a conversation, in words that say what to do.

Invariant: what is said to help was rendered, and did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.tokens.chat_template import ChatTemplate

Tools = list[dict[str, Any]] | None
_Change = Callable[[Message], Message]

_PRINTED = re.compile(r"""["']type["']: ["']text["']""")
_ELSEWHERE = re.compile(r"No (?:filter|test) named|attribute '\w+' of '\w+' object is unsafe")
_UNDEFINED = re.compile(r"'(\w+)' is undefined")


def explain(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, refusal: TemplateRefusal
) -> str:
    """The template's own words, and what it would take instead, if that is found.

    Args:
        template: the template that refused.
        messages: what it refused.
        tools: what it was given with them.
        refusal: what it said.
    """
    said = str(refusal)
    missing = _UNDEFINED.search(said)
    if missing and missing[1] in template.reads and missing[1] not in template.kwargs:
        return f"{said} (it asks for {missing[1]}, which --template-kwargs can give)"
    for what, others, their_tools in _others(list(messages), tools):
        try:
            text = template.render(others, tools=their_tools)
        except TemplateRefusal:
            continue
        if _PRINTED.search(text):  # it takes parts only to print them
            continue
        return f"{said} (it takes the conversation {what})"
    if _ELSEWHERE.search(said):
        return (
            f"{said} (it was written for another renderer than transformers, such as llama.cpp's)"
        )
    return said


def _others(messages: list[Message], tools: Tools) -> Iterator[tuple[str, list[Message], Tools]]:
    """Conversations that differ in one thing, with what that is."""
    for what, change in _CHANGES.items():
        changed = [change(message) for message in messages]
        if changed != messages:
            yield what, changed, tools
    merged = _merged(messages)
    if merged != messages:
        yield "with messages of one role in a row made one", merged, tools
    for role in ("system", "developer"):
        rest = [message for message in messages if message.get("role") != role]
        if rest and rest != messages:
            yield f"without the {role} message", rest, tools
    if tools:
        yield "without tools", messages, None
    if tools is None:
        yield "with a list of tools, be it an empty one", messages, []


def _as_text(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text", "") for part in content if isinstance(part, dict)]
    return {**message, "content": "".join(map(str, texts))}


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _not_null(message: Message) -> Message:
    return message if message.get("content") is not None else {**message, "content": ""}


def _with_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    return {**message, "tool_calls": [change(call) for call in calls]}


def _arguments(call: dict[str, Any], kind: type, convert: Callable[[Any], Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), kind):
        return call
    try:
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}
    except ValueError:
        return call


def _as_object(message: Message) -> Message:
    return _with_calls(message, lambda call: _arguments(call, str, json.loads))


def _as_json(message: Message) -> Message:
    return _with_calls(message, lambda call: _arguments(call, dict, json.dumps))


def _nine(message: Message) -> Message:
    named = _with_calls(message, lambda call: {**call, "id": "call00001"})
    return {**named, "tool_call_id": "call00001"} if "tool_call_id" in message else named


_CHANGES: dict[str, _Change] = {
    "with content as text instead of a list of parts": _as_text,
    "with content as a list of parts instead of text": _as_parts,
    "with an empty text where content is null": _not_null,
    "with the arguments of calls as objects instead of JSON text": _as_object,
    "with the arguments of calls as JSON text instead of objects": _as_json,
    "with ids of calls of nine letters and digits": _nine,
    "with an empty text for null and arguments as objects": lambda m: _as_object(_not_null(m)),
    "with an empty text for null and arguments as JSON text": lambda m: _as_json(_not_null(m)),
}


def _merged(messages: list[Message]) -> list[Message]:
    """Messages of one role in a row as one."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        texts = [last.get("content"), message.get("content")]
        if last.get("role") == message.get("role") and all(isinstance(t, str) for t in texts):
            merged[-1] = {**last, "content": "\n\n".join(map(str, texts))}
        else:
            merged.append(message)
    return merged
