"""Calls of tools: what a target said, and how it is said again in a message.

Invariant: a call keeps the id under which the target made it; where it made none, the id follows
from the answer's ids alone, so that whoever takes the answer apart again finds the same one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from eyas.conversation import Message, digest

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LETTERS = 9
"""Mistral's templates refuse ids of another length; nobody else minds."""


class Call(NamedTuple):
    """One call of one tool."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """The id that the target wrote; None where its format has none."""
    text: str | None = None
    """The arguments' JSON as the target wrote it, where that is known."""


class Reading(NamedTuple):
    """What a reader found in one answer."""

    calls: tuple[Call, ...] = ()
    content: str | None = None
    """The text before the calls, without the space around it."""
    fault: str | None = None
    """Why something that is or looks like a call could not be read."""


def message_calls(calls: Sequence[Call], ids: Sequence[str], *, as_text: bool) -> list[Message]:
    """Calls as ``tool_calls`` of a message.

    `as_text` gives the arguments as JSON text (in the target's own spelling), else as an object.
    """
    said: list[Message] = []
    for call, call_id in zip(calls, ids, strict=True):
        arguments: Any = call.arguments
        if as_text:
            arguments = call.text or json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        said.append({"id": call_id, "type": "function", "function": function})
    return said


def ids_for(calls: Sequence[Call], output_ids: Sequence[int]) -> list[str]:
    """The calls' ids: the target's own, else nine letters that follow from the answer."""
    if all(call.id for call in calls):
        return [call.id or "" for call in calls]
    whole = json.dumps(list(output_ids)).encode()
    return [call.id or _letters(digest(b"call", whole, b"%d" % n)) for n, call in enumerate(calls)]


def result_message(call: Message, content: str) -> Message:
    """A tool's message that answers one of a message's ``tool_calls``."""
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": content,
    }


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text says in JSON; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict else None


def _letters(value: bytes) -> str:
    number = int.from_bytes(value, "little")
    letters = []
    for _ in range(_ID_LETTERS):
        number, at = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[at])
    return "".join(letters)
