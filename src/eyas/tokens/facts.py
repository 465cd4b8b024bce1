"""What a chat template does to prompts and to earlier answers, for the probe to say.

Invariant: every fact was seen in something that the template rendered, never looked up by a
model's name; what the template refuses is told in its own words, and no exception leaves here.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2 import Undefined

from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.history import Continuation, TurnEnd, continuation, encode, turn_end
from eyas.tokens.profile import Profile
from eyas.tokens.scenes import (
    AGAIN,
    ANSWER,
    REASONING,
    RESULT,
    SYSTEM,
    TOOLS,
    USER,
    Scenes,
    answer,
    system,
    tool_cycle,
    user,
)
from eyas.tokens.switches import SYSTEM_TEXT, USER_TEXT, Switch, find_switches
from eyas.tokens.takes import DROPPED, KEPT, Takes, shown, takes
from eyas.tokens.tokenizer import Tokenizer

STRIPPED, REWRITTEN, NONE, UNKNOWN = "stripped", "rewritten", "none", "unknown"

_TAIL = 64
"""How many of a prompt's last ids are searched for the opener."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What one template does, with one tokenizer and one set of switches."""

    hash: str
    """SHA-256 of the template's bytes."""
    first_user_refusal: str | None
    """The template's own words if it refuses even one user message."""
    writes_bos: bool
    """Whether the rendered prompt begins with the tokenizer's BOS."""
    bos_would_double: bool
    """Whether the tokenizer's own special tokens would put a second BOS in front."""
    shows_date: bool
    """Whether the prompt depends on the date, at least with tools or a system message."""
    shows_time: bool
    """Whether it depends on the time of day too; a run gives every prompt midnight."""
    date_switch: tuple[str, str] | None
    """A switch that is printed as the day, and what stands there without it (Llama 3.1)."""
    reasoning: str
    """``open``: the generation prompt ends inside the reasoning; ``closed``: behind it;
    ``generated``: the model writes the opener, or may; ``none``; ``unknown``."""
    markers: str
    """Who knows the markers: ``template``, only the ``vocabulary``, or ``none``."""
    prompt_end: str | None
    """What the generation prompt writes behind the user's text."""
    opener_tail: str
    """The prompt's text behind an open opener, such as a line feed."""
    opener_ids: tuple[int, ...]
    """The opener's ids in the rendered prompt; empty where the prompt has none at its end."""
    switches: tuple[Switch, ...]
    """Switches with an effect, and values that are refused."""
    ignored_kwargs: tuple[str, ...]
    """Given switches without which every rendering is the same: unknown, or the default."""
    roles: dict[str, str]
    """``system``, ``system_later``, ``developer``, ``tool``: kept, dropped or refused."""
    system_place: str | None
    """Where a system message stands: ``own`` (a message of its own), ``merged`` into the user's,
    ``moved`` before the last user message; None where it is not kept."""
    alternation: bool | None
    """Whether two user messages in a row are refused."""
    earlier_reasoning: str
    """An earlier answer's reasoning before a new question: ``kept``, ``stripped``,
    ``rewritten`` (shown, but not between its markers), ``none`` or ``unknown``."""
    last_turn_reasoning: str
    """That of the last answer, without a generation prompt: ``kept``, ``dropped``, …"""
    append_only: bool | None
    """Whether turn 2's prompt begins with turn 1's prompt and answer, as ids."""
    append_only_with: dict[str, Any] | None
    """A switch that makes it so and leaves the generation prompt's reasoning as it is."""
    append_only_without_reasoning: dict[str, Any] | None
    """One that closes the reasoning at once, and makes it so."""
    append_only_with_tools: bool | None
    """The same where there is a list of tools, which some templates move to the last turn."""
    first_difference: str | None
    """Where turn 2's prompt departs, with some text around."""
    turn_end_ids: tuple[int, ...]
    """What history writes to end an answer: its first control id."""
    ends_differently: bool | None
    """Whether that is no stop id, as with gpt-oss (<|return|> is generated, <|end|> written)."""
    stop_is_role_marker: bool
    """Whether a stop id begins the next turn, as GLM's <|user|>."""
    border_merges: bool
    """Whether an answer that begins with a line feed, tokenized together with the prompt, takes
    an id from the prompt: a reason to join ids and never text."""
    takes: Takes
    """What becomes of parts, nulls, tools and calls."""

    def as_dict(self) -> dict[str, Any]:
        """For a report or a manifest: plain JSON values."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        fields["switches"] = [switch._asdict() for switch in self.switches]
        for name in ("opener_ids", "ignored_kwargs", "turn_end_ids"):
            fields[name] = list(fields[name])
        fields["date_switch"] = list(self.date_switch) if self.date_switch else None
        fields["roles"] = dict(self.roles)
        fields["takes"] = self.takes.as_dict()
        return fields


def template_facts(tokenizer: Tokenizer, template: ChatTemplate, profile: Profile) -> TemplateFacts:
    """Find a template's facts by rendering small conversations. No server is asked."""
    scenes = Scenes(template, profile)
    prompt, refusal = scenes.attempt([user()])
    reasoning = scenes.reasoning_of(prompt)
    markers = _markers(scenes)
    reasons = reasoning in ("open", "generated") and markers == "template"
    switches = tuple(find_switches(scenes))
    end = turn_end(tokenizer, scenes)
    again = continuation(tokenizer, scenes, reasons=reasons)
    bos = _bos(tokenizer, profile, prompt)
    return TemplateFacts(
        hash=template.hash,
        first_user_refusal=refusal,
        writes_bos=bos[0],
        bos_would_double=bos[1],
        shows_date=_shows_clock(scenes, *_DAYS),
        shows_time=_shows_clock(scenes, *_TIMES),
        date_switch=_date_switch(scenes),
        reasoning=reasoning,
        markers=markers,
        prompt_end=(prompt or "").rpartition(USER)[2] if USER in (prompt or "") else None,
        opener_tail=_opener_tail(profile, reasoning, prompt or ""),
        opener_ids=_opener_ids(tokenizer, profile, reasoning, prompt or ""),
        switches=switches,
        ignored_kwargs=_ignored_kwargs(scenes),
        roles=_roles(scenes),
        system_place=_system_place(tokenizer, scenes),
        alternation=_alternation(scenes),
        earlier_reasoning=_earlier_reasoning(scenes, markers),
        last_turn_reasoning=_last_turn_reasoning(scenes, markers),
        append_only=again.append_only,
        append_only_with=_append_only_with(tokenizer, scenes, switches, again, reasons),
        append_only_without_reasoning=_append_only_without(tokenizer, scenes, switches, again),
        append_only_with_tools=_append_only_with_tools(tokenizer, scenes, again, reasons),
        first_difference=again.difference,
        turn_end_ids=end.ids if end else (),
        ends_differently=_ends_differently(end, profile),
        stop_is_role_marker=end.stop_is_role_marker if end else False,
        border_merges=_border_merges(tokenizer, prompt or ""),
        takes=takes(scenes),
    )


def _markers(scenes: Scenes) -> str:
    opener, closer = scenes.profile.opener, scenes.profile.closer
    shown = [scenes.template.source, scenes.prompt or "", scenes.finished or ""]
    if REASONING in shown[2]:
        return "template"
    if opener is None or closer is None:
        return NONE
    known = any(marker.text in text for marker in (opener, closer) for text in shown)
    return "template" if known else "vocabulary"


def _bos(tokenizer: Tokenizer, profile: Profile, prompt: str | None) -> tuple[bool, bool]:
    """Whether the prompt begins with BOS, and whether encoding it naively would add another."""
    ids = encode(tokenizer, prompt or "")
    bos = tokenizer.control.get(tokenizer.special_tokens_map.get("bos_token", ""))
    if not ids or ids[0] not in (*profile.bos_ids, bos):
        return False, False
    naive = tokenizer.backend.encode(prompt, add_special_tokens=True).ids[:2]
    return True, naive == ids[:1] * 2 and ids[:2] != naive


_DAYS = dt.datetime(2001, 2, 3, 4, 5, 6), dt.datetime(2019, 11, 28, 17, 48, 59)
_DATE_SWITCHES = ("date_string", "current_date", "today", "datetime")
_TIMES = dt.datetime(2001, 2, 3, 4, 5, 6), dt.datetime(2001, 2, 3, 17, 48, 59)


def _shows_clock(scenes: Scenes, *moments: dt.datetime) -> bool:
    """Two moments whose every part differs; some templates show them only with tools."""
    for messages, tools in (([user()], None), ([system(), user()], None), ([user()], TOOLS)):
        first, second = (
            scenes.text(messages, tools=tools, strftime_now=moment.strftime) for moment in moments
        )
        if first != second:
            return True
    return False


def _date_switch(scenes: Scenes) -> tuple[str, str] | None:
    given = "qzday"
    for name in _DATE_SWITCHES:
        if name not in scenes.template.reads:
            continue
        after = scenes.under({name: given})
        for messages in ([user()], [system(), user()]):
            text, found, rest = (after.text(messages) or "").partition(given)
            plain = scenes.text(messages)
            if found and plain and plain.startswith(text) and plain.endswith(rest):
                return name, plain[len(text) : len(plain) - len(rest)]
    return None


def _border_merges(tokenizer: Tokenizer, prompt: str) -> bool:
    ids = encode(tokenizer, prompt)
    return any(
        encode(tokenizer, prompt + text)[: len(ids)] != ids for text in ("\nOkay", "\n\nOkay")
    )


def _opener_tail(profile: Profile, reasoning: str, prompt: str) -> str:
    if reasoning != "open" or profile.opener is None:
        return ""
    return prompt.rpartition(profile.opener.text)[2]


def _opener_ids(
    tokenizer: Tokenizer, profile: Profile, reasoning: str, prompt: str
) -> tuple[int, ...]:
    """The ids that the opener's bytes lie in; the outer ones may hold more than the opener."""
    if reasoning not in ("open", "closed") or profile.opener is None:
        return ()
    ids = encode(tokenizer, prompt)[-_TAIL:]
    pieces = tokenizer.pieces(ids)
    wanted = profile.opener.text.encode()
    first = b"".join(pieces).rfind(wanted)
    if first < 0:
        return ()
    ends = list(accumulate(map(len, pieces)))
    return tuple(
        token
        for token, piece, end in zip(ids, pieces, ends, strict=True)
        if piece and end > first and end - len(piece) < first + len(wanted)
    )


def _ignored_kwargs(scenes: Scenes) -> tuple[str, ...]:
    """Jinja's own Undefined as a value is what a template sees where nothing was given."""
    given = scenes.template.kwargs
    return tuple(
        name
        for name in sorted(given)
        if name not in scenes.template.reads
        or scenes.under({name: Undefined(name=name)}).standard() == scenes.standard()
    )


def _roles(scenes: Scenes) -> dict[str, str]:
    later = [user(), answer(reasoning=None), system(), user(AGAIN)]
    return {
        "system": shown(scenes, [system(), user()], SYSTEM),
        "system_later": shown(scenes, later, SYSTEM),
        "developer": shown(scenes, [system(role="developer"), user()], SYSTEM),
        "tool": _tool(scenes),
    }


def _tool(scenes: Scenes) -> str:
    """The best of four: arguments as a mapping or as JSON text, without and with tools."""
    found = [
        shown(scenes, tool_cycle(arguments_as_text=as_text), RESULT, tools=tools)
        for tools in (None, TOOLS)
        for as_text in (False, True)
    ]
    return next((verdict for best in (KEPT, DROPPED) for verdict in found if verdict == best),
                found[0])  # fmt: skip


def _system_place(tokenizer: Tokenizer, scenes: Scenes) -> str | None:
    """Whether a system message has a header of its own, and whether it stays where it is."""
    text = scenes.text([system(), user()])
    if text is None or SYSTEM not in text:
        return None
    then = scenes.text([system(), user(), answer(reasoning=None), user(AGAIN)]) or ""
    if SYSTEM in then and USER in then and then.index(USER) < then.index(SYSTEM):
        return "moved"
    header = (scenes.prompt or "").partition(USER)[0]
    before, _, after = text.partition(SYSTEM)
    control = tokenizer.control_pattern
    between = after.partition(USER)[0]
    if before.strip() == header.strip() and not (control and control.search(between)):
        return "merged"
    return "own"


def _alternation(scenes: Scenes) -> bool | None:
    if scenes.prompt is None:
        return None
    return scenes.text([user(), user(AGAIN)]) is None


def _earlier_reasoning(scenes: Scenes, markers: str) -> str:
    text = scenes.history
    if text is None:
        return UNKNOWN
    if REASONING not in text:
        return STRIPPED if markers == "template" else NONE
    before, _, after = text.partition(REASONING)
    opener, closer = scenes.profile.opener, scenes.profile.closer
    if opener is None or closer is None:
        return REWRITTEN
    between = before.rstrip().endswith(opener.text) and after.lstrip().startswith(closer.text)
    return KEPT if between and ANSWER in after else REWRITTEN


def _last_turn_reasoning(scenes: Scenes, markers: str) -> str:
    text = scenes.finished
    if text is None:
        return UNKNOWN
    if REASONING in text:
        return KEPT
    return DROPPED if markers == "template" else NONE


def _append_only_with(
    tokenizer: Tokenizer,
    scenes: Scenes,
    switches: tuple[Switch, ...],
    plain: Continuation,
    reasons: bool,
) -> dict[str, Any] | None:
    if plain.append_only is not False:
        return None
    for switch in switches:
        if switch.name in (SYSTEM_TEXT, USER_TEXT) or switch.effect.startswith(
            ("refused:", "reasoning:")
        ):
            continue
        if continuation(tokenizer, scenes.under(switch.kwargs), reasons=reasons).append_only:
            return switch.kwargs
    return None


def _append_only_without(
    tokenizer: Tokenizer, scenes: Scenes, switches: tuple[Switch, ...], plain: Continuation
) -> dict[str, Any] | None:
    if plain.append_only is not False:
        return None
    for switch in switches:
        named = switch.name not in (SYSTEM_TEXT, USER_TEXT)
        if named and switch.effect.partition(";")[0].endswith("-> closed"):
            under = scenes.under(switch.kwargs)
            if continuation(tokenizer, under, reasons=False).append_only:
                return switch.kwargs
    return None


def _append_only_with_tools(
    tokenizer: Tokenizer, scenes: Scenes, plain: Continuation, reasons: bool
) -> bool | None:
    if not plain.append_only:
        return plain.append_only
    if scenes.text([user()], tools=TOOLS) is None:
        return None
    return continuation(tokenizer, scenes.under({"tools": TOOLS}), reasons=reasons).append_only


def _ends_differently(end: TurnEnd | None, profile: Profile) -> bool | None:
    if end is None or not end.ids or not profile.stop_ids:
        return None
    return end.ids[0] not in profile.stop_ids


__all__ = ["Switch", "TemplateFacts", "template_facts"]
