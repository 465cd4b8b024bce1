"""Which switches a chat template knows, and what each of them changes.

Invariant: a switch is named only if a rendering with it differs from the one without it, or if
the template refuses its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from eyas.tokens.scenes import REASONING, Scenes, system, user

SYSTEM_TEXT = "system text"
"""The name under which a word in the system message stands that works like a switch."""

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

    @property
    def kwargs(self) -> dict[str, Any]:
        return {self.name: self.value}


def find_switches(scenes: Scenes) -> Iterator[Switch]:
    """Every switch that has an effect, found by rendering with and without it."""
    for name, value, known in _candidates(scenes):
        effect = _effect(scenes, scenes.under({name: value}), value, known=known)
        if effect:
            yield Switch(name, value, effect)
    base = scenes.reasoning_of(scenes.text([system("Be kind."), user()]))
    for word in ("/no_think", "/think"):
        now = scenes.reasoning_of(scenes.text([system(word), user()]))
        if "unknown" not in (base, now) and now != base:
            yield Switch(SYSTEM_TEXT, word, f"reasoning: {base} -> {now}")


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
