"""Calls read in the form in which the chat template itself writes them.

Invariant: a form was learnt from calls that the template rendered: a JSON object that holds name
and arguments (Hermes, Llama 3, Mistral's list), or a name and a JSON object with control strings
around them (later Mistral, DeepSeek-V3.1). Nothing is read that does not fit it to the end of
the answer, spaces apart.

For models that the package renderers knows its readers are used; this is for the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eyas.tokens import Marker, Profile, Tokenizer
from eyas.tools.calls import Call, Reading, json_object
from eyas.tools.samples import (
    ANSWER,
    PLAIN,
    PLAIN_TWO,
    QUESTION,
    REASONING,
    Sample,
    Samples,
)

VERSION = 1
"""To be raised when the same answer is read otherwise than before: it is in the fingerprint."""

PYTHON_TAG = "<|python_tag|>"
"""Llama 3.1 and later may write it before a call's JSON; their templates do not (Meta's prompt
format for tool use says so)."""

_ARGUMENTS = ("arguments", "parameters")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class LearntForm:
    """How one template writes calls."""

    opening: str
    """What stands before the first call; "" where a call begins the answer at once."""
    opening_id: int | None
    """Its control id, if it begins with one."""
    fields: tuple[str, ...]
    """``object`` alone, or ``name`` and ``arguments`` (and ``id``) in their order."""
    literals: tuple[str, ...]
    """What stands between these fields."""
    between: str
    """What stands between two calls; "" where the template never writes two."""
    closing: str
    """What stands behind the last one."""
    keys: tuple[str, str, str | None] = ("name", "arguments", None)
    """Names in the object: of the name, the arguments and the id."""

    def read(
        self,
        tokenizer: Tokenizer,
        profile: Profile,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> Reading:
        """The calls in an answer."""
        ids = list(output_ids)
        _, _, after, _ = profile.spans(tokenizer, prompt_ids, ids)
        first = after - len(prompt_ids)
        last = len(ids) - 1 if ids and ids[-1] in profile.stop_ids else len(ids)
        if self.opening_id is not None:
            if self.opening_id not in ids[first:last]:
                return Reading()
            at = ids.index(self.opening_id, first)
            return self._parse(tokenizer.decode(ids[first:at]), tokenizer.decode(ids[at:last]))
        text = tokenizer.decode(ids[first:last])
        if self.opening:
            found = re.search(_loosely(self.opening), text)
            return self._parse(text[: found.start()], text[found.start() :]) if found else Reading()
        stripped = text.lstrip()
        tagged = stripped.startswith(PYTHON_TAG)
        if tagged:
            stripped = stripped[len(PYTHON_TAG) :].lstrip()
        elif self._call_at(stripped, 0) is None:
            return Reading()  # a plain answer, which may well begin with a brace
        return self._parse("", stripped)

    def _parse(self, content: str, text: str) -> Reading:
        calls: list[Call] = []
        at = _match(self.opening, text, 0)
        while at is not None:
            found = self._call_at(text, at)
            if found is None:
                break
            call, at = found
            calls.append(call)
            end = _match(self.closing, text, at)
            if end is not None and not text[end:].strip():
                return Reading(tuple(calls), content.strip())
            at = _match(self.between, text, at) if self.between else None
        seen = text if len(text) <= 200 else f"{text[:160]}… ({len(text)} characters)"
        return Reading(fault=f"call {len(calls) + 1} is not in the form of the template: {seen!r}")

    def _call_at(self, text: str, at: int) -> tuple[Call, int] | None:
        """The call whose first field begins at a position, and where it ends."""
        if self.fields == ("object",):
            value, end = _object_at(text, at)
            call = None if value is None else self._call_of(value)
            return None if call is None else (call, end)
        found: dict[str, Any] = {}
        for field, literal in zip(self.fields, (*self.literals, ""), strict=True):
            at = len(text) - len(text[at:].lstrip())
            if field == "arguments":
                found[field], end = _object_at(text, at)
                found["text"] = text[at:end]
                if found[field] is None:
                    return None
            else:
                follows = re.compile(_loosely(literal)).search(text, at)
                if follows is None:
                    return None
                found[field], end = text[at : follows.start()].strip(), follows.start()
            after = _match(literal, text, end) if literal else end
            if after is None:
                return None
            at = after
        name = found.get("name") or _name_in(found.get("id") or "")
        if not name or not re.fullmatch(r"[\w.:/-]{1,256}", name):
            return None
        return Call(name, found["arguments"], found.get("id") or None, found["text"]), at

    def _call_of(self, value: dict[str, Any]) -> Call | None:
        name_key, arguments_key, id_key = self.keys
        inner = value.get("function") if type(value.get("function")) is dict else value
        assert inner is not None
        name = inner.get(name_key)
        keys = (arguments_key, *_ARGUMENTS) if arguments_key in _ARGUMENTS else (arguments_key,)
        key = next((key for key in keys if key in inner), None)
        if type(name) is not str or not name or key is None:
            return None
        arguments = inner[key]
        if type(arguments) is str:
            arguments = json_object(arguments)
        if type(arguments) is not dict:
            return None
        call_id = value.get(id_key) if id_key is not None else None
        return Call(name, arguments, call_id if type(call_id) is str and call_id else None)


def learn(tokenizer: Tokenizer, profile: Profile, samples: Samples) -> LearntForm | None:
    """The form of a template's calls; None where it shows none that is known here."""
    single, two = samples.one(PLAIN, ""), samples.one(PLAIN_TWO, "")
    if single is None:
        return None
    found = _fields(single, single.calls)
    if not found:
        return None
    fields, spans, keys = found[0]
    ends = _turn_end(tokenizer, profile, single.output, spans[-1][1])
    between = ""
    if two is not None:
        both = _fields(two, two.calls)
        if len(both) == 2 and both[1][0] == fields:
            between = two.output[both[0][1][-1][1] : both[1][1][0][0]]
    opening = _opening(samples, single, spans[0][0], profile.closer)
    control = tokenizer.control_pattern
    first = control.match(opening) if control else None
    if first is None and 0 < len(opening) < _SHORTEST:
        return None
    written = samples.plain_answer() or ""
    strings = control.findall(opening) if control else []
    if (
        any(word in opening for word in (QUESTION, REASONING))
        or any(tokenizer.control[string] in profile.stop_ids for string in strings)
        or (first is not None and first.group() in written)
    ):
        return None  # more than what begins a call stands there
    return LearntForm(
        opening=opening,
        opening_id=tokenizer.control[first.group()] if first else None,
        fields=fields,
        literals=tuple(single.output[spans[n][1] : spans[n + 1][0]] for n in range(len(spans) - 1)),
        between=between,
        closing=single.output[spans[-1][1] : ends],
        keys=keys,
    )


_SHORTEST = 3
"""Characters of an opening without a control string that are worth looking for in an answer."""

_Found = tuple[tuple[str, ...], list[tuple[int, int]], tuple[str, str, str | None]]


def _fields(sample: Sample, calls: Sequence[Call]) -> list[_Found]:
    """Of each call in a rendering the fields, where they stand, and the names in its object."""
    found: list[_Found] = []
    at = 0
    for call in calls:
        one = _object_field(sample.output, at, call) or _split_fields(sample.output, at, call)
        if one is None:
            break
        found.append(one)
        at = one[1][-1][1]
    return found


def _object_field(text: str, at: int, call: Call) -> _Found | None:
    """The outermost object that holds name and arguments."""
    for brace in (m.start() for m in re.finditer(r"\{", text[at:])):
        start = at + brace
        value, end = _object_at(text, start)
        if value is None:
            continue
        inner = value.get("function") if type(value.get("function")) is dict else value
        assert inner is not None
        name = next((k for k, v in inner.items() if v == call.name), None)
        arguments = next((k for k, v in inner.items() if _are_arguments(v, call)), None)
        if name is not None and arguments is not None:
            own = next((k for k, v in value.items() if v == call.id), None)
            return ("object",), [(start, end)], (name, arguments, own)
        if value == call.arguments:
            return None  # the name stands outside
    return None


def _split_fields(text: str, at: int, call: Call) -> _Found | None:
    """A name (or an id that carries it) and the arguments' object."""
    spans: dict[str, tuple[int, int]] = {}
    for brace in (m.start() for m in re.finditer(r"\{", text[at:])):
        value, end = _object_at(text, at + brace)
        if value is not None and value == call.arguments:
            spans["arguments"] = (at + brace, end)
            break
    if "arguments" not in spans:
        return None
    call_id = call.id or " "
    where = text.find(call_id, at)
    if where >= 0:
        spans["id"] = (where, where + len(call_id))
    start = text.find(call.name, at)
    if "id" in spans and spans["id"][0] <= start < spans["id"][1]:
        start = -1
    if start >= 0:
        spans["name"] = (start, start + len(call.name))
    elif "id" not in spans or call.name not in call_id:
        return None
    order = sorted(spans, key=lambda name: spans[name])
    places = [spans[name] for name in order]
    if order[-1] != "arguments" or any(not text[a[1] : b[0]].strip() for a, b in pairwise(places)):
        return None  # nothing tells where a name ends
    return tuple(order), places, ("name", "arguments", None)


def _are_arguments(value: Any, call: Call) -> bool:
    return value == call.arguments or (type(value) is str and json_object(value) == call.arguments)


def _opening(samples: Samples, single: Sample, start: int, closer: Marker | None) -> str:
    """What the template writes before the first call, told apart from reasoning and content."""
    before = single.output[:start]
    spoken = samples.one(PLAIN, ANSWER)
    if spoken is not None and ANSWER in spoken.output:
        behind = spoken.output.rpartition(ANSWER)[2]
        tail = single.output[start:]
        if behind.endswith(tail) or tail in behind:
            return behind[: behind.index(tail)].strip()
    return (before.rpartition(closer.text)[2] if closer is not None else before).strip()


def _turn_end(tokenizer: Tokenizer, profile: Profile, text: str, start: int) -> int:
    """Where the turn's end begins behind the last call (the text's end where it has none)."""
    control = tokenizer.control_pattern
    if control is not None:
        for found in control.finditer(text, start):
            if tokenizer.control[found.group()] in profile.stop_ids:
                return found.start()
    return len(text)


def _object_at(text: str, at: int) -> tuple[dict[str, Any] | None, int]:
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return (value, end) if type(value) is dict else (None, at)


def _loosely(literal: str) -> str:
    """A pattern for a literal whose spaces may be others, or none."""
    return r"\s*" + r"\s*".join(map(re.escape, literal.split())) + r"\s*"


def _match(literal: str, text: str, at: int) -> int | None:
    found = re.compile(_loosely(literal)).match(text, at)
    return None if found is None else found.end()


def _name_in(call_id: str) -> str:
    """``look`` of ``functions.look:0``."""
    found = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", call_id)
    return found[1] if found else ""
