"""Modes: the sets of template switches that a run gives to its threads, and who gets which.

Invariant: the mode of a thread (a conversation's sample) follows from its key and sample alone,
so that all its turns, a continued run and verification agree, and order plays no part. One
profile holds for all modes, or they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from eyas.conversation import digest
from eyas.errors import ConfigError
from eyas.tokens import ChatTemplate, Marker, Profile, Tokenizer, build_profile
from eyas.tokens.history import turn_end
from eyas.tokens.scenes import Scenes

WEIGHT = "weight"
"""The one name in an entry of a mix that is no switch."""
_NO_SWITCHES = ("messages", "add_generation_prompt", "tools", "documents", "tokenize")


@dataclass(frozen=True, slots=True)
class Mode:
    """One set of switches."""

    weight: float
    """Its share among the weights of all modes."""
    kwargs: dict[str, Any]
    """The switches."""
    template: ChatTemplate | None
    """The chat template under them; None where the target has none."""
    reasoning: str
    """What its generation prompt does with the reasoning, as in `Profile`."""
    prompt_tail: tuple[int, ...]
    ends: frozenset[int] = frozenset()
    """Control ids that history ends an answer with."""
    end_begins_message: bool = False
    """Whether that id belongs to the next message."""

    text: str = field(init=False)
    """The switches as JSON, as rows have them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", orjson.dumps(self.kwargs).decode())

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "weight": self.weight,
            "template_kwargs": self.kwargs,
            "reasoning": self.reasoning,
            "prompt_tail": list(self.prompt_tail),
        }


@dataclass(frozen=True, slots=True)
class Modes:
    """All modes of a run, in the order in which they were given."""

    each: tuple[Mode, ...]

    def of(self, key: bytes, sample: int) -> Mode:
        """The mode of a thread."""
        if len(self.each) == 1:
            return self.each[0]
        drawn = int.from_bytes(digest(b"mode", key, sample.to_bytes(4, "little"))[:8], "little")
        left = drawn / 2**64 * sum(mode.weight for mode in self.each)
        for mode in self.each:
            left -= mode.weight
            if left < 0:
                return mode
        return self.each[-1]


def parse_mix(value: Any) -> list[tuple[float, dict[str, Any]]]:
    """Weights and switches of ``template_kwargs``: one set of switches, or a list of weighted ones.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if isinstance(value, list) and not value:
        raise ValueError("a list of modes must not be empty")
    entries = value if isinstance(value, list) else [value]
    mix: list[tuple[float, dict[str, Any]]] = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("switches are an object of names and values, or a list of such")
        switches = {str(name): item for name, item in entry.items()}
        weight = switches.pop(WEIGHT, 1.0) if isinstance(value, list) else 1.0
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9:
            raise ValueError(f"the weight of a mode is a number above 0, not {weight!r}")
        for name in _NO_SWITCHES:
            if name in switches:
                raise ValueError(f"{name} is no switch of a template; eyas sets it itself")
        if any(switches == others for _, others in mix):
            raise ValueError(f"the mode {switches!r} is there twice")
        mix.append((float(weight), switches))
    return mix


def open_modes(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    mix: Sequence[tuple[float, dict[str, Any]]],
    *,
    stop_token_ids: Sequence[int] = (),
    history: str = "served",
) -> tuple[Modes, Profile]:
    """The modes with their template, and the one profile of all (of the first, where they differ
    only in what the generation prompt does).

    Args:
        template: the target's, whatever its switches are.
        mix: what `parse_mix` read.
        history: what the target is shown of its earlier turns; where a switch of the template
            has to be on for it, that one is added to each mode's.

    Raises:
        ConfigError: modes that mark their reasoning in different ways, or a template that cannot
            keep its earlier turns as `history` says.
    """
    modes, profiles = [], []
    for weight, given in mix:
        kwargs, own, ends = dict(given), None, None
        if template is not None:
            own = template.under(kwargs)
        profile = build_profile(tokenizer, own, stop_token_ids=stop_token_ids)
        if own is not None:
            if history != "served":
                kwargs |= _keeping(tokenizer, own, profile, history)
                own = own.under(kwargs)
            ends = turn_end(tokenizer, Scenes(own, profile))
        mode = Mode(
            weight,
            kwargs,
            own,
            profile.reasoning,
            profile.prompt_tail,
            frozenset()
            if ends is None or not tokenizer.control_pattern
            else frozenset(ends.ids[:1]),
            ends is not None and ends.stop_is_role_marker,
        )
        modes.append(mode)
        profiles.append(profile)
    openers = dict.fromkeys(opener for p in profiles for opener in p.content_openers)
    return Modes(tuple(modes)), replace(
        profiles[0],
        opener=_one([p.opener for p in profiles], modes),
        closer=_one([p.closer for p in profiles], modes),
        content_openers=tuple(sorted(openers, key=lambda marker: -len(marker.text))),
        content_closer=_one([p.content_closer for p in profiles], modes),
    )


def _one(markers: list[Marker | None], modes: list[Mode]) -> Marker | None:
    """The marker of all modes that know one."""
    known = {marker: mode.kwargs for marker, mode in zip(markers, modes, strict=True) if marker}
    if len(known) > 1:
        said = " and ".join(f"{marker.text!r} with {kwargs}" for marker, kwargs in known.items())
        raise ConfigError(
            f"--template-kwargs mixes modes whose answers are marked in different ways ({said}); "
            "capture each into a run of its own"
        )
    return next(iter(known), None)


def _keeping(
    tokenizer: Tokenizer, template: ChatTemplate, profile: Profile, history: str
) -> dict[str, Any]:
    from eyas.tokens.keeping import keeping_switch

    switches, why_not = keeping_switch(tokenizer, template, profile, history)
    if switches is None:
        under = f" under {template.kwargs}" if template.kwargs else ""
        raise ConfigError(
            f"--history {history} cannot be had: {why_not}{under}. --history served shows the "
            "target what it is shown when it is served."
        )
    return switches
