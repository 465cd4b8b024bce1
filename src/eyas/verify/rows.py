"""One raw row of somebody's training data into the form in which it can be checked.

Invariant: ids, mask and texts are taken as they stand. A row is recognised as one of two kinds,
`IdRow` or `TextRow`, or refused with a sentence that shows the value; nothing in it is repaired.

This module knows no tokenizer and no template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from eyas.conversation import Message
from eyas.readers import COLUMNS

PAIRS = (
    ("prompt_ids", "output_ids"),
    ("prompt_ids", "completion_ids"),
    ("prompt_ids", "response_ids"),
    ("prompt_token_ids", "output_token_ids"),
    ("prompt_token_ids", "completion_token_ids"),
    ("prompt_token_ids", "response_token_ids"),
    ("prompt_token_ids", "token_ids"),
    ("prompt_tokens", "completion_tokens"),
    ("prompt_tokens", "response_tokens"),
)
"""Columns that hold what the model was given and what it generated, as ids."""

IDS = ("input_ids", "token_ids", "tokens")
MASKS = (
    "loss_mask",
    "assistant_masks",
    "assistant_mask",
    "assistant_tokens_mask",
    "completion_mask",
    "response_mask",
    "labels_mask",
    "target_mask",
)
IGNORED = -100
"""The label of ids that are not supervised, as torch's cross entropy has it."""

CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "response", "output", "answer", "chosen")
KNOWN = (*IDS, *MASKS, *CONVERSATIONS, *PROMPTS, *ANSWERS, "labels", "text", *COLUMNS)
"""Column names by which the header of a CSV without a suffix is recognised."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages carry the reasoning."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
_STOPPED = frozenset(("stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls"))
_CUT = frozenset(("length", "max_tokens", "max_length", "max_output_tokens", "truncated"))


class Unknown(Exception):
    """No kind of row that can be checked. `reason` is a name; the message shows the value."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class Place:
    """Where a row stands, for messages."""

    where: str
    """``file:line``."""
    id: str | None = None
    """The id that the row gives itself."""


@dataclass(slots=True)
class IdRow:
    """A tokenized row. What its lists hold has not been looked at."""

    place: Place
    kind: str
    """The columns, such as ``input_ids+loss_mask``."""
    ids: list[Any]
    mask: list[Any] | None
    """None where no column says which ids are supervised."""
    labels: list[Any] | None
    """The labels from which the mask was derived, where they are."""
    finish: str | None
    """``stop``, ``length``, another word of the row's, or None if it says nothing."""
    has_prompt: bool
    """Whether `eyas capture` finds a prompt in this row."""


@dataclass(slots=True)
class TextRow:
    """A row of messages or texts."""

    place: Place
    kind: str
    messages: list[Message]
    """Roles and contents as they stood; empty for a rendered text."""
    finish: str | None
    has_prompt: bool
    tools: list[Any] | None = None
    rendered: tuple[str, str] | None = None
    """Prompt and answer that were rendered already; the prompt is empty for a whole text."""
    reasoning_keys: list[str] = field(default_factory=list)
    """The keys under which reasoning was found."""


def to_row(value: Any, where: str) -> IdRow | TextRow:
    """Recognise a row. Raises `Unknown`."""
    if type(value) is not dict:
        raise Unknown("not_an_object", f"the row is {kind_of(value)}: {show(value)}")
    place = Place(where, _given_id(value))
    finish = _finish(value)
    has_prompt = any(value.get(name) not in (None, "") for name in COLUMNS if name != "text")
    for prompt, output in PAIRS:
        if type(value.get(prompt)) in (list, str) and type(value.get(output)) in (list, str):
            given, made = _ids(value[prompt], prompt), _ids(value[output], output)
            mask = [0] * len(given) + [1] * len(made)
            return IdRow(
                place, f"{prompt}+{output}", [*given, *made], mask, None, finish, has_prompt
            )
    for name in IDS:
        if value.get(name) is not None and (name == "input_ids" or not _is_text(value, name)):
            return _id_row(value, name, place, finish, has_prompt)
    return _text_row(value, place, finish, has_prompt)


def _is_text(row: dict[str, Any], name: str) -> bool:
    """Whether a column named like ids holds words, as ``tokens`` of other tasks does."""
    held = row[name]
    return type(held) is not list or (bool(held) and type(held[0]) is str)


def _id_row(
    row: dict[str, Any], name: str, place: Place, finish: str | None, has_prompt: bool
) -> IdRow:
    ids = _ids(row[name], name)
    mask: list[Any] | None = None
    labels: list[Any] | None = None
    masked_by = next((m for m in MASKS if row.get(m) is not None), None)
    if masked_by is not None:
        mask = _ids(row[masked_by], masked_by)
    elif row.get("labels") is not None:
        masked_by, labels = "labels", _ids(row["labels"], "labels")
        # What can be no label stays in the mask as it is, for the check of its values.
        mask = [int(x != IGNORED) if type(x) in (int, float) else x for x in labels]
    attention = row.get("attention_mask")
    if (
        type(attention) is list
        and len(attention) == len(ids)
        and 0 in attention
        and (mask is None or len(mask) == len(ids))
    ):
        kept = [at for at, real in enumerate(attention) if real]
        ids = [ids[at] for at in kept]
        mask = None if mask is None else [mask[at] for at in kept]
        labels = None if labels is None else [labels[at] for at in kept]
    kind = name if masked_by is None else f"{name}+{masked_by}"
    return IdRow(place, kind, ids, mask, labels, finish, has_prompt)


def _ids(value: Any, name: str) -> list[Any]:
    value = _parsed(value, name, "bad_ids")
    if type(value) is not list:
        raise Unknown("bad_ids", f"column {name!r} holds {kind_of(value)}: {show(value)}")
    return value


def _text_row(row: dict[str, Any], place: Place, finish: str | None, has_prompt: bool) -> TextRow:
    tools = _tools(row)
    for name in CONVERSATIONS:
        if row.get(name) not in (None, "", []):
            found = TextRow(place, name, [], finish, has_prompt, tools)
            _add_messages(found, row[name], name)
            return found
    prompt = next((name for name in PROMPTS if row.get(name) not in (None, "")), None)
    answer = next((name for name in ANSWERS if row.get(name) is not None and name != prompt), None)
    if prompt is not None and answer is not None:
        found = TextRow(place, f"{prompt}+{answer}", [], finish, has_prompt, tools)
        text = row[prompt]
        more = row.get("input") if prompt == "instruction" else None
        if type(text) is str and type(more) is str and more.strip():
            text = f"{text}\n\n{more}"
        _add_side(found, text, prompt, "user")
        _add_side(found, row[answer], answer, "assistant")
        _add_reasoning(found, found.messages[-1], row)
        return found
    if type(row.get("text")) is str and row["text"]:
        return TextRow(place, "text", [], finish, False, tools, rendered=("", row["text"]))
    if has_prompt or prompt is not None:
        raise Unknown("no_answer", "the row holds a prompt and no answer")
    shown = ", ".join(show(name) for name in list(row)[:12]) or "none"
    raise Unknown("unknown_columns", f"no column is known; the row's columns are {shown}")


def _add_side(row: TextRow, value: Any, name: str, role: str) -> None:
    if type(value) is str:
        row.messages.append({"role": role, "content": value})
    else:
        _add_messages(row, value, name)


def _add_messages(row: TextRow, value: Any, name: str) -> None:
    value = _parsed(value, name, "bad_messages")
    if type(value) is not list or not value:
        seen = "an empty list" if value == [] else kind_of(value)
        raise Unknown("bad_messages", f"column {name!r} holds {seen}, not a list of messages")
    for number, given in enumerate(value, 1):
        if type(given) is not dict:
            raise Unknown("bad_messages", f"message {number} is {kind_of(given)}: {show(given)}")
        role = given.get("role") or given.get("from")
        if type(role) is not str:
            raise Unknown("bad_messages", f"message {number} has no role: {show(given)}")
        content = given["content"] if "content" in given else given.get("value")
        message: Message = {
            k: v for k, v in given.items() if k not in ("from", "value") and v is not None
        }
        message["role"] = _ROLES.get(role, role)
        if type(content) is list:
            content = _joined(content, message, number)
        if content is not None and type(content) is not str:
            raise Unknown("bad_messages", f"the content of message {number} is {kind_of(content)}")
        message["content"] = content
        if message["role"] == "assistant":
            _add_reasoning(row, message, given)
            row.finish = row.finish or _word(given.get("finish_reason"))
        row.messages.append(message)


def _joined(parts: list[Any], message: Message, number: int) -> str:
    """The text parts joined by ``\\n``; parts of reasoning go to ``reasoning_content``."""
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if type(part) is dict else None
        if type(part) is str:
            texts.append(part)
        elif kind == "text" and type(part.get("text")) is str:
            texts.append(part["text"])
        elif kind in ("thinking", "reasoning"):
            said = part.get(kind) or part.get("text")
            if type(said) is str:
                message["reasoning_content"] = said
        else:
            raise Unknown("bad_messages", f"message {number} has a part that is not text")
    return "\n".join(texts)


def _add_reasoning(row: TextRow, message: Message, given: dict[str, Any]) -> None:
    """Give the reasoning the name that templates read, as transformers does when it renders."""
    for key in REASONING:
        said = given.get(key)
        if type(said) is str and said.strip():
            message.setdefault("reasoning_content", said)
            row.reasoning_keys.append(key)
            return


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if tools is None or tools == "":
        return None
    tools = _parsed(tools, "tools", "bad_tools")
    if type(tools) is not list:
        raise Unknown("bad_tools", f"column 'tools' holds {kind_of(tools)}, not a list")
    return tools or None


def _parsed(value: Any, name: str, reason: str) -> Any:
    """The value, or what its text says where it is JSON written as text (CSV, some Parquet)."""
    if type(value) is not str:
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        problem = f"column {name!r} holds text that is not JSON ({error.msg}): {show(value)}"
        raise Unknown(reason, problem) from None


def _given_id(row: dict[str, Any]) -> str | None:
    for name in ("id", "uuid", "question_id", "conversation_id", "session_id"):
        value = row.get(name)
        if type(value) in (str, int) and value != "":
            return str(value)[:200]
    return None


def _finish(row: dict[str, Any]) -> str | None:
    """What the row says of its end: ``stop``, ``length`` or its own word; None if nothing."""
    inner = [row.get(name) for name in ("metadata", "meta_info", "meta", "info")]
    for place in (row, *(value for value in inner if type(value) is dict)):
        for name in ("finish_reason", "stop_reason"):
            if (word := _word(place.get(name))) is not None:
                return word
        if place.get("truncated") is True:
            return "length"
    return None


def _word(value: Any) -> str | None:
    if type(value) is dict:
        value = value.get("type")
    if type(value) is not str or not value:
        return None
    lower = value.lower()
    return "stop" if lower in _STOPPED else "length" if lower in _CUT else lower[:40]


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words."""
    names: dict[type, str] = {str: "text", bool: "true or false", int: "a whole number"}
    names |= {float: "a number with a point", list: "a list", dict: "an object"}
    names[type(None)] = "null"
    return names.get(type(value), f"a value of type {type(value).__name__}")


def show(value: Any, width: int = 80) -> str:
    """The value as a message can show it: escaped, and cut."""
    try:
        shown = repr(value[:width] if type(value) in (str, list) else value)
    except RecursionError:
        return f"{kind_of(value)}, nested too deeply to show"
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
