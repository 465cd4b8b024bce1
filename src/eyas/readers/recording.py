"""What a row records of tools, and where the turns of a conversation end.

Invariant: a recorded result goes with the very call that it answered (by the call's id where it
has one, else by order and name) or with none; definitions of tools are passed on as they are.

Known are OpenAI's shape (``tool_calls``, the older ``function_call``, roles ``tool`` and
``function``), ShareGPT's (``function_call``, ``observation``) and Hermes' text (``<tool_call>``
and ``<tool_response>``).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from eyas.conversation import Message, Result, plain_arguments
from eyas.readers.showing import Refused, kind, show

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_LITERAL = 100_000
"""Characters of Python's notation that are looked at."""


class Recorded(NamedTuple):
    """A call as the recording has it."""

    id: str | None
    name: str | None
    arguments: str | None
    """As `plain_arguments` writes them; None where they cannot be read."""


def tool_definitions(value: Any, name: str) -> list[dict[str, Any]]:
    """The tools of a column, each in the shape that chat templates take (OpenAI's).

    Taken are a list or its JSON text; a bare function is put under ``function``. Raises
    `Refused`.
    """
    if type(value) is str:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            problem = f"column {name!r} holds text that is not JSON ({error.msg}): {show(value)}"
            raise Refused("bad_tools", problem) from None
    if type(value) is dict:
        value = [value]
    if type(value) is not list:
        raise Refused("bad_tools", f"column {name!r} holds {kind(value)}, not a list of tools")
    return [_definition(tool, f"{name}[{number}]") for number, tool in enumerate(value)]


def _definition(tool: Any, place: str) -> dict[str, Any]:
    if type(tool) is str:
        with suppress(orjson.JSONDecodeError):
            tool = orjson.loads(tool)
    if type(tool) is not dict:
        raise Refused("bad_tools", f"{place} is {kind(tool)}, not an object: {show(tool)}")
    function = tool.get("function", tool)
    if type(function) is not dict or type(function.get("name")) is not str or not function["name"]:
        raise Refused("bad_tools", f"{place} has no function with a name: {show(tool)}")
    return {"type": "function", "function": tool} if function is tool else tool


def calls_of(message: dict[str, Any]) -> list[Message] | None:
    """An answer's calls from ``tool_calls`` or ``function_call``; None where it has neither.

    The values are kept as they stand: they are part of what identifies a conversation.
    """
    calls = _parsed(message.get("tool_calls"))
    if not calls:
        single = _parsed(message.get("function_call"))
        calls = [single] if single else None
    if type(calls) is dict:
        calls = [calls]
    return calls if type(calls) is list else None


def calls_in_text(text: Any) -> list[Any] | None:
    """The calls of a ShareGPT message whose role is ``function_call``."""
    calls = _parsed(text)
    if type(calls) is dict:
        return [calls]
    if type(calls) is list:
        return calls
    return [_parsed(found) for found in _CALL.findall(text)] if type(text) is str else None


def result_text(content: Any) -> str | None:
    """A result's text; an object or list as JSON, null as nothing. None for another kind."""
    if content is None:
        return ""
    if type(content) in (dict, list, int, float, bool):
        return json.dumps(content, ensure_ascii=False)
    return content if type(content) is str else None


class Recording:
    """The calls that wait for their results, as a conversation is read in order."""

    def __init__(self) -> None:
        self._open: list[Recorded] = []
        self._ids: set[str] = set()

    def hear(self, message: Message) -> None:
        """Take a recorded answer."""
        calls = message.get("tool_calls")
        if calls is None and type(message.get("content")) is str:
            calls = [_parsed(found) for found in _CALL.findall(message["content"])]
        for call in map(_recorded, calls or ()):
            self._open.append(call)
            if call.id is not None:
                self._ids.add(call.id)

    def pair(self, message: Message, number: int) -> Iterator[Result]:
        """The results in a tool's message, each with its call. Raises `Refused`."""
        blocks = _RESPONSE.findall(message["content"])
        if not blocks:
            call_id = message.get("tool_call_id")
            if call_id is not None and self._ids and call_id not in self._ids:
                raise Refused(
                    "bad_messages",
                    f"message {number} answers the call {show(call_id)}, which no message makes",
                )
            yield self._result(call_id, message.get("name"), message["content"])
        for block in blocks:
            said = _parsed(block)
            if type(said) is dict and "name" in said and "content" in said:
                content = result_text(said["content"])
                yield self._result(_text(said.get("tool_call_id")), _text(said["name"]),
                                   block if content is None else content)  # fmt: skip
            else:
                yield self._result(None, message.get("name"), block)

    def _result(self, call_id: str | None, name: str | None, content: str) -> Result:
        waiting = self._open
        found = next((c for c in waiting if call_id is not None and c.id == call_id), None)
        if found is None and name is not None:
            found = next((c for c in waiting if c.name == name), None)
        if found is None and name is None and call_id not in self._ids:
            found = waiting[0] if waiting else None
        if found is None:
            return Result(name, None, content)
        waiting.remove(found)
        return Result(found.name or name, found.arguments, content)


def split(
    messages: list[Message],
) -> tuple[list[list[Message]], dict[int, tuple[Result, ...]], tuple[str, ...]]:
    """The turns, the recorded results that begin them, and marks. Raises `Refused`.

    A turn is a stretch of messages that an answer follows, or that ends the conversation with
    the user or a tool. An answer before the first user message is left out, and marked; what
    stood before it stays. An answer right after an answer begins no turn.
    """
    turns: list[list[Message]] = []
    results: dict[int, tuple[Result, ...]] = {}
    stretch: list[Message] = []
    given: list[Result] = []
    marks: tuple[str, ...] = ()
    user_spoke = False
    recording = Recording()
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "assistant":
            if not user_spoke:
                marks = ("leading_assistant",)
                continue
            recording.hear(message)
            if stretch or given:
                if given:
                    results[len(turns)] = tuple(given)
                turns.append(stretch)
                stretch, given = [], []
        elif role == "tool":
            if not turns:
                raise Refused("bad_messages", f"message {number} is a tool's, before any answer")
            given += recording.pair(message, number)
        else:
            user_spoke = user_spoke or role == "user"
            stretch.append(message)
    if not user_spoke:
        raise Refused("no_user_message", f"none of the {len(messages)} messages is the user's")
    if (stretch[-1]["role"] == "user") if stretch else given:
        if given:
            results[len(turns)] = tuple(given)
        turns.append(stretch)
    if not turns:
        last = stretch[-1]["role"]
        raise Refused("no_turn", f"the conversation ends with a {last} message, not with the user")
    return turns, results, marks


def _recorded(call: Any) -> Recorded:
    if type(call) is not dict:
        return Recorded(None, None, None)
    function = call.get("function", call)
    if type(function) is not dict:
        return Recorded(_text(call.get("id")), None, None)
    given = _parsed(function.get("arguments", function.get("parameters")))
    arguments = None
    if given in (None, "") or type(given) is dict:
        with suppress(RecursionError):
            arguments = plain_arguments(given)
    return Recorded(_text(call.get("id")), _text(function.get("name")), arguments)


def _text(value: Any) -> str | None:
    return value if type(value) is str and value else None


def _parsed(value: Any) -> Any:
    """What JSON text (or Python's own notation, as in Hermes' data) says; else the value."""
    if type(value) is not str:
        return value
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(value)
    if value.lstrip()[:1] in ("{", "[") and len(value) <= _LITERAL:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return ast.literal_eval(value.strip())
    return value
