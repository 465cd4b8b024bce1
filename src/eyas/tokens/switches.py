"""Which switches a chat template knows, and what each of them changes.

Invariant: a switch is named only if a rendering with it differs from the one without it, or if
the template refuses its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from eyas.conversation import Message
from eyas.tokens.scenes import REASONING, USER, Scenes, system, user

SYSTEM_TEXT, USER_TEXT = "system text", "user text"
"""The names under which a word in a message stands that works like a switch."""

_WORDS = ("/no_think", "/nothink", "/think")

_EFFORTS = ("low", "medium", "high")
_MORE_EFFORTS = ("none", "no_think", "minimal", "xhigh", "max")
"""Tried only where the template itself names them: some print whatever they are given."""

_VALUES: dict[str, tuple[Any, ...]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_budget": (0,),
    "thinking_effort": _EFFORTS,
    "reasoning_effort": _EFFORTS,
    "reasoning": (False, True),
    "force_reasoning": (True,),
    "skip_reasoning": (True,),
    "skip_thinking": (True,),
    "preserve_thinking": (True, False),
    "clear_thinking": (False, True),
    "truncate_history_thinking": (False, True),
    "keep_past_thinking": (True, False),
    "drop_thinking": (False, True),
    "think_render_option": ("all", "lastthink"),
}
"""Names and values seen in real templates. Other names that a template asks for by ``is
defined`` or ``default`` are tried with True and False."""

_NO_SWITCHES = re.compile(
    r"messages|tools|documents|add_generation_prompt|continue_final_message|bos_token"
    r"|eos_token|pad_token|unk_token|sep_token|cls_token|mask_token|strftime_now"
    r"|raise_exception|date_string|datetime|current_date|today|namespace|range|loop|message"
    r"|content|role|name|reasoning_content|tool_calls|tool_call|tool_call_id|tool|arguments"
    r"|function|functions|system_message|custom_tools|builtin_tools|xml_tools|python_tools"
)
"""What a chat brings with it, and names that templates give to parts of a message."""


class Switch(NamedTuple):
    """A switch's name and value, and in words what it changes."""

    name: str
    value: Any
    effect: str
    prompt_end: str | None = None
    """What follows the user's text in the prompt, if that is not what it is without the switch."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return {self.name: self.value}


def find_switches(scenes: Scenes) -> Iterator[Switch]:
    """Every switch that has an effect, found by rendering with and without it."""
    for name, value, known in _candidates(scenes):
        after = scenes.under({name: value})
        effect = _effect(scenes, after, value, known=known)
        if effect:
            end = _prompt_end(after.prompt)
            yield Switch(name, value, effect, end if end != _prompt_end(scenes.prompt) else None)
    for name in (SYSTEM_TEXT, USER_TEXT):
        plain = scenes.text(_saying(name, "Be kind."))
        for word in _WORDS:
            text = scenes.text(_saying(name, word))
            was, now = scenes.reasoning_of(plain), scenes.reasoning_of(text)
            if text is not None and plain is not None and now != was:
                effect = f"reasoning: {was} -> {now}"
                if word not in text:
                    effect += "; the word is taken out"
                yield Switch(name, word, effect, _prompt_end(text))


def _saying(name: str, words: str) -> list[Message]:
    if name == SYSTEM_TEXT:
        return [system(words), user()]
    return [user(f"{words} {USER}")]


def _prompt_end(prompt: str | None) -> str | None:
    if prompt is None or USER not in prompt:
        return None
    return prompt.rpartition(USER)[2]


def _candidates(scenes: Scenes) -> Iterator[tuple[str, Any, bool]]:
    template = scenes.template
    for name in sorted(template.reads):
        if name in _VALUES:
            named = [v for v in _MORE_EFFORTS if re.search(f"['\"]{v}['\"]", template.source)]
            values = _VALUES[name] + tuple(named if _VALUES[name] == _EFFORTS else ())
            yield from ((name, value, True) for value in values)
        elif not _NO_SWITCHES.fullmatch(name) and re.search(
            rf"(?<![\w.]){name}\s+is\s+(?:not\s+)?(?:un)?defined"
            rf"|(?<![\w.]){name}\s*\|\s*default",
            template.source,
        ):
            yield from ((name, value, False) for value in (True, False))


def _effect(before: Scenes, after: Scenes, value: Any, *, known: bool) -> str:
    """What changes from one to the other, in words; "" for nothing."""
    prompt, refusal = after.attempt([user()])
    if prompt is None:
        return f"refused: {refusal}" if known and before.prompt is not None else ""
    if not known and _shows(after, str(value)) > _shows(before, str(value)):
        return ""  # a text that the template prints, no switch
    effects = []
    was, now = before.reasoning_of(before.prompt), after.reasoning_of(prompt)
    if now != was:
        effects.append(f"reasoning: {was} -> {now}")
    kept_before, kept_now = (REASONING in (scenes.history or "") for scenes in (before, after))
    if kept_before != kept_now:
        effects.append("keeps earlier reasoning" if kept_now else "drops earlier reasoning")
    if not effects:
        if before.prompt != prompt or before.text([system(), user()]) != after.text(
            [system(), user()]
        ):
            effects.append("changes the prompt")
        elif before.history != after.history:
            effects.append("changes earlier turns")
        elif before.finished != after.finished:
            effects.append("changes a finished conversation")
    return "; ".join(effects)


def _shows(scenes: Scenes, text: str) -> int:
    return ((scenes.prompt or "") + (scenes.history or "")).count(text)
