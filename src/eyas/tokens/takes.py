"""What a chat template makes of what a message can hold: parts, nulls, calls, space, old markers.

Invariant: as with all facts of a template, each was seen in something that it rendered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from eyas.conversation import Message
from eyas.tokens.scenes import (
    AGAIN,
    ANSWER,
    ARGUMENT,
    REASONING,
    RESULT,
    TOOLS,
    USER,
    Scenes,
    answer,
    system,
    tool_cycle,
    user,
)

KEPT, DROPPED, PRINTED, TWICE = "kept", "dropped", "printed", "encoded twice"


@dataclass(frozen=True, slots=True)
class Takes:
    """How one template takes messages. ``refused: …`` ends in the template's own words."""

    parts: str
    """A user's content as a list of text parts: ``kept``, ``printed`` (as Python writes a list),
    ``dropped`` or refused."""
    only_parts: bool
    """Whether content as text is refused or dropped, and as parts kept."""
    tools: str
    """A list of tools: ``kept``, ``dropped`` or refused."""
    calls: str
    """A call in an earlier answer: ``kept``, ``dropped`` or refused."""
    arguments: str
    """A call's arguments as an object: ``kept``, ``dropped`` or refused."""
    arguments_as_text: str
    """The same as JSON text, as OpenAI's API gives them; also ``encoded twice``."""
    call_ids: str | None
    """The template's own words if it refuses a call's id that is not nine letters long."""
    null_content: str
    """A call whose content is null: ``kept`` (the call is) or refused."""
    null_content_4: str
    """The same with transformers 4, which hands null on; also ``printed`` (the word None)."""
    reasoning_names_4: bool
    """Whether transformers 4 renders ``reasoning_content`` otherwise: it does not give it the other
    names under which some templates read reasoning (``thinking``, ``reasoning``)."""
    call_reasoning: str
    """The reasoning before a call, once a new question follows: ``kept``, ``dropped``, ``none``
    (it is not shown before either) or ``unknown``."""
    calls_append_only: bool | None
    """Whether the prompt of a new question begins with that of the call's result."""
    trims_user: bool
    """Whether white space at the ends of the user's text is cut."""
    empty_system: bool
    """Whether an empty system message is something else than none."""
    inline: str
    """Reasoning inside an earlier answer's content: ``kept``, ``stripped``, ``parsed`` (shown
    in another way), ``none`` (no markers) or refused."""
    user_markers: bool
    """Whether thinking markers in the user's own text are changed."""
    spans: tuple[str, ...]
    """What ``{% generation %}`` marks as the answer's; empty where the template has no such."""

    def as_dict(self) -> dict[str, Any]:
        """For a report or a manifest: plain JSON values."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        fields["spans"] = list(self.spans)
        return fields


def takes(scenes: Scenes) -> Takes:
    """Find how a template takes messages."""
    arguments, arguments_as_text = (_arguments(scenes, as_text) for as_text in (False, True))
    as_text = arguments != KEPT and arguments_as_text == KEPT
    return Takes(
        parts=_parts(scenes),
        only_parts=_only_parts(scenes),
        tools=_tools(scenes),
        calls=_call(scenes, as_text),
        arguments=arguments,
        arguments_as_text=arguments_as_text,
        call_ids=_call_ids(scenes, as_text),
        null_content=_null(scenes, as_text, as_given=False),
        null_content_4=_null(scenes, as_text, as_given=True),
        reasoning_names_4=_names_differ(scenes),
        **_after_calls(scenes, as_text),
        trims_user=_trims(scenes),
        empty_system=scenes.text([system(""), user()]) != scenes.prompt,
        inline=_inline(scenes),
        user_markers=_user_markers(scenes),
        spans=_spans(scenes),
    )


def shown(scenes: Scenes, messages: list[Message], word: str, **more: Any) -> str:
    """Whether a word is in what is rendered: kept, dropped or refused."""
    text, refusal = scenes.attempt(messages, **more)
    if text is None:
        return f"refused: {refusal}"
    return KEPT if word in text else DROPPED


def _parts(scenes: Scenes) -> str:
    found = shown(scenes, [_in_parts(user())], USER)
    if found != KEPT:
        return found
    text = scenes.text([_in_parts(user())]) or ""
    around = text.partition(USER)
    written = re.search(r"['\"]?text['\"]?\s*:\s*['\"]$", around[0])
    return PRINTED if written and around[2][:1] in ("'", '"') else KEPT


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _only_parts(scenes: Scenes) -> bool:
    if USER in (scenes.prompt or ""):
        return False
    return _parts(scenes) == KEPT


def _tools(scenes: Scenes) -> str:
    name = TOOLS[0]["function"]["name"]
    for before in ([], [system()]):
        text, refusal = scenes.attempt([*before, user()], tools=TOOLS)
        if text is None:
            return f"refused: {refusal}"
        if text.count(name) > (scenes.text([*before, user()]) or "").count(name):
            return KEPT
    return DROPPED


def _cycle(scenes: Scenes, as_text: bool, **more: Any) -> tuple[str | None, str | None]:
    """The prompt after a call's result, with its tools if it can be had so."""
    messages = tool_cycle(arguments_as_text=as_text, **more)
    text, refusal = scenes.attempt(messages, tools=TOOLS)
    return (text, refusal) if text is not None else scenes.attempt(messages)


def _call(scenes: Scenes, as_text: bool) -> str:
    text, refusal = _cycle(scenes, as_text)
    if text is None:
        return f"refused: {refusal}"
    return KEPT if ARGUMENT in text else DROPPED


def _arguments(scenes: Scenes, as_text: bool) -> str:
    text, refusal = _cycle(scenes, as_text)
    if text is None:
        return f"refused: {refusal}"
    if ARGUMENT not in text:
        return DROPPED
    return TWICE if as_text and f'\\"{ARGUMENT}\\"' in text else KEPT


def _call_ids(scenes: Scenes, as_text: bool) -> str | None:
    if _cycle(scenes, as_text)[0] is None:
        return None
    return _cycle(scenes, as_text, call_id="functions.look:0")[1]


def _null(scenes: Scenes, as_text: bool, *, as_given: bool) -> str:
    messages = tool_cycle(arguments_as_text=as_text, content=None)
    plain = scenes.text(tool_cycle(arguments_as_text=as_text), tools=TOOLS, as_given=as_given)
    text, refusal = scenes.attempt(messages, tools=TOOLS, as_given=as_given)
    if text is None:
        return f"refused: {refusal}"
    return PRINTED if text.count("None") > (plain or "").count("None") else KEPT


def _names_differ(scenes: Scenes) -> bool:
    """Whether reasoning is read under a name that only transformers 5 fills."""
    for messages, answered in (
        ([user(), answer(), user(AGAIN)], False),
        ([user(), answer()], True),
    ):
        old, new = (
            scenes.text(messages, answered=answered, as_given=as_given)
            for as_given in (True, False)
        )
        if old != new:
            return True
    return False


def _after_calls(scenes: Scenes, as_text: bool) -> dict[str, Any]:
    """What becomes of a call's reasoning and of its prompt when a new question follows."""
    unknown: dict[str, Any] = {"call_reasoning": "unknown", "calls_append_only": None}
    messages = tool_cycle(arguments_as_text=as_text, reasoning=REASONING)
    prompt = scenes.text(messages, tools=TOOLS)
    if prompt is None or ARGUMENT not in prompt or RESULT not in prompt:
        return unknown
    then = scenes.text([*messages, answer(reasoning="qzmore"), user(AGAIN)], tools=TOOLS)
    if then is None:
        return unknown
    before, after = (REASONING in text for text in (prompt, then))
    return {
        "call_reasoning": (KEPT if after else DROPPED) if before else "none",
        "calls_append_only": then.startswith(prompt),
    }


def _trims(scenes: Scenes) -> bool:
    spaced = scenes.text([user(f"  {USER}  ")])
    return spaced is not None and USER in spaced and f"  {USER}  " not in spaced


def _inline(scenes: Scenes) -> str:
    opener, closer = scenes.profile.opener, scenes.profile.closer
    if opener is None or closer is None:
        return "none"
    written = f"{opener.text}{REASONING}{closer.text}{ANSWER}"
    text, refusal = scenes.attempt([user(), answer(written, None), user(AGAIN)])
    if text is None:
        return f"refused: {refusal}"
    if written in text:
        return KEPT
    return "parsed" if REASONING in text else "stripped"


def _user_markers(scenes: Scenes) -> bool:
    opener, closer = scenes.profile.opener, scenes.profile.closer
    if opener is None or closer is None:
        return False
    written = f"{opener.text}{REASONING}{closer.text}{USER}"
    text = scenes.text([user(written)])
    return text is not None and written not in text


def _spans(scenes: Scenes) -> tuple[str, ...]:
    return scenes.template.answer_spans([user(), answer()], **scenes.switches)


__all__ = ["Takes", "shown", "takes"]
