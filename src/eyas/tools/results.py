"""Recorded results of tools, given to the target's own calls.

Invariant: a recorded result is given to a call of the same tool with the same arguments, or, if
the user asks for it, to the one with the nearest; never to another tool's.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from eyas.conversation import Message, Result, ToolUse, plain_arguments
from eyas.tools.calls import json_object


class Results:
    """The recorded results of one thread of a conversation, as they are used up."""

    def __init__(self, use: ToolUse) -> None:
        self._all: list[tuple[int, Result]] = [
            (turn, result) for turn, results in sorted(use.results.items()) for result in results
        ]
        self._used: set[int] = set()

    def take(self, call: Message, turn: int) -> str | None:
        """The result of a call that was recorded with the same arguments, or None.

        Of several it is one that was not used yet and that stands nearest to `turn`, the
        recorded turn that comes next; of used ones the nearest.
        """
        name, arguments = name_of(call), arguments_of(call)
        same = [
            at
            for at, (_, result) in enumerate(self._all)
            if result.name == name and result.arguments == arguments
        ]
        return self._give(same, turn)

    def nearest(self, call: Message, turn: int) -> str | None:
        """The result of the same tool whose arguments are nearest to the call's, or None.

        Near is how much of the arguments' JSON is alike; equals as in `take`.
        """
        name, arguments = name_of(call), arguments_of(call)
        alike = {
            at: SequenceMatcher(None, result.arguments or "", arguments, autojunk=False).ratio()
            for at, (_, result) in enumerate(self._all)
            if result.name == name
        }
        most = max(alike.values(), default=0.0)
        return self._give([at for at, ratio in alike.items() if ratio == most], turn)

    def _give(self, fitting: list[int], turn: int) -> str | None:
        if not fitting:
            return None

        def distance(at: int) -> tuple[bool, int, bool, int]:
            place = self._all[at][0]
            return at in self._used, abs(place - turn), place < turn, at

        chosen = min(fitting, key=distance)
        self._used.add(chosen)
        return self._all[chosen][1].content


def name_of(call: Message) -> str:
    """The tool's name in one of a message's ``tool_calls``."""
    name: str = call["function"]["name"]
    return name


def arguments_of(call: Message) -> str:
    """The arguments of one of a message's ``tool_calls``, as `plain_arguments` writes them."""
    arguments: Any = call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    return plain_arguments(arguments)


def request_for(call: Message, **more: Any) -> dict[str, Any]:
    """What a command or function is told of a call."""
    arguments: Any = call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    return {"name": name_of(call), "arguments": arguments, "call_id": call["id"], **more}
