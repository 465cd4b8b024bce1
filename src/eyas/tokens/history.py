"""What a chat template makes of an answer once the conversation goes on.

Invariant: append-only is said only where the ids of the second prompt begin with those of the
first prompt and of the answer as it was generated, and the answer's end is a stop id.
"""

from __future__ import annotations

from typing import NamedTuple

from eyas.conversation import Message
from eyas.tokens.scenes import (
    AGAIN,
    ANSWER,
    REASONING,
    USER,
    Scenes,
    answer,
    exchange,
    system,
    user,
)
from eyas.tokens.tokenizer import Tokenizer


class TurnEnd(NamedTuple):
    """What history writes between an answer's content and the next user's."""

    text: str
    """The text from the content to the turn's end, the end included."""
    ids: tuple[int, ...]
    """The first stop id after the content, else the first control id (all ids of the end where
    none is a control id)."""
    stop_is_role_marker: bool
    """Whether the end is a stop id, and all that begins the next user's turn and the first."""


class Continuation(NamedTuple):
    """Whether the second prompt begins with the first one and its answer."""

    append_only: bool | None
    """None where the template renders no second turn."""
    difference: str | None
    """Where they part, with some text around; None where they do not."""


def turn_end(tokenizer: Tokenizer, scenes: Scenes) -> TurnEnd | None:
    """How history ends an answer; None where the template renders no second turn."""
    again = [user(), answer(reasoning=None), user(AGAIN)]
    between = _between(scenes.text(again), ANSWER, AGAIN)
    ended = scenes.text([user(), answer(reasoning=None)], answered=True) or ""
    last = ended.rpartition(ANSWER)[2] if ANSWER in ended else ""
    if between is None:
        if not last.strip():
            return None
        between = last
    control = tokenizer.control_pattern
    found = control.findall(between) if control else []
    if not control or not found:
        text = last.rstrip() if between.startswith(last.rstrip()) else ""
        return TurnEnd(text, tuple(encode(tokenizer, text)), False)
    stop_ids = scenes.profile.stop_ids
    name = next((text for text in found if tokenizer.control[text] in stop_ids), found[0])
    end = tokenizer.control[name]
    first = control.findall((scenes.prompt or "").partition(USER)[0])
    alone = found == [name] == first[-1:]
    return TurnEnd(
        text=between[: between.index(name) + len(name)],
        ids=(end,),
        stop_is_role_marker=alone and end in stop_ids,
    )


def continuation(tokenizer: Tokenizer, scenes: Scenes, *, reasons: bool) -> Continuation:
    """Compare turn 2's prompt with turn 1's prompt and answer, and turn 3's with turn 2's.

    Both without and with a system message, since some templates move it to the last turn.
    ``reasons`` says whether the answer has a reasoning.
    """
    plain = _continuation(tokenizer, scenes, [], reasons)
    if not plain.append_only:
        return plain
    third = _continuation(tokenizer, scenes, [user("qzfirst"), *exchange(reasons)[:1]], reasons)
    if third.append_only is False:
        return Continuation(False, f"with a third question, {third.difference}")
    with_system = _continuation(tokenizer, scenes, [system()], reasons)
    if with_system.append_only is False:
        return Continuation(False, f"with a system message, {with_system.difference}")
    return plain


def _continuation(
    tokenizer: Tokenizer, scenes: Scenes, before: list[Message], reasons: bool
) -> Continuation:
    prompt = scenes.text([*before, user()])
    end = turn_end(tokenizer, scenes)
    if prompt is None or end is None or not encode(tokenizer, prompt):
        return Continuation(None, None)
    raw = _as_generated(scenes, prompt, reasons)
    given_back = _taken_apart(tokenizer, scenes, prompt, raw)
    then, refusal = scenes.attempt([*before, user(), given_back, user(AGAIN)])
    if then is None:
        return Continuation(False, f"the answer given back is refused: {refusal}")
    sequence = prompt + raw + end.text
    if not then.startswith(sequence):
        return Continuation(False, _parting(sequence, then))
    ids = encode(tokenizer, prompt) + encode(tokenizer, raw + end.text)
    now = encode(tokenizer, then)
    if now[: len(ids)] != ids:
        at = next(i for i, pair in enumerate(zip(ids, now, strict=False)) if pair[0] != pair[1])
        text = tokenizer.decode(ids[max(0, at - 4) : at])
        return Continuation(
            False, f"after {text!r} the text is the same, but {ids[at]} is now {now[at]}"
        )
    stop_ids = scenes.profile.stop_ids
    if stop_ids and end.ids and end.ids[-1] not in stop_ids:
        return Continuation(
            False, f"history ends an answer with {end.text!r}, which ends no generation"
        )
    return Continuation(True, None)


def _as_generated(scenes: Scenes, prompt: str, reasons: bool) -> str:
    """An answer as a model that learned this template writes it, without the turn's end.

    Its whitespace is what the template itself writes around reasoning and content where it
    shows them; else that of the common templates.
    """
    header = prompt.rpartition(USER)[2]
    opener, closer = scenes.profile.opener, scenes.profile.closer
    state = scenes.reasoning_of(prompt)
    if not reasons or state == "closed":
        shown = scenes.text([user(), answer(reasoning=None)], answered=True)
        return _lead(header, _between(shown, USER, ANSWER)) + ANSWER
    for shown in (scenes.finished, scenes.history):
        middle = _between(shown, REASONING, ANSWER)
        if middle is not None and (closer is None or closer.text in middle):
            before = _between(shown, USER, REASONING) or ""
            lead = _lead(header, before)
            if not lead and state == "generated" and opener is not None:
                lead = opener.text + before.rpartition(opener.text)[2]
            return lead + REASONING + middle + ANSWER
    first, last = (opener.text if opener else ""), (closer.text if closer else "")
    if state == "open":
        spaced = header != header.rstrip()
        return REASONING + (f"\n{last}\n\n" if spaced else last) + ANSWER
    return f"{first}\n{REASONING}\n{last}\n\n{ANSWER}"


def _lead(header: str, before: str | None) -> str:
    """What history writes between the generation prompt's end and a text of the answer's."""
    return before[len(header) :] if before is not None and before.startswith(header) else ""


def _taken_apart(tokenizer: Tokenizer, scenes: Scenes, prompt: str, raw: str) -> Message:
    """The answer as capture hands it back to the template."""
    reading = scenes.profile.read(tokenizer, encode(tokenizer, prompt), encode(tokenizer, raw))
    return answer(reading.content, reading.reasoning)


def _between(text: str | None, first: str, last: str) -> str | None:
    """What stands between two words, None where they do not stand in this order."""
    if text is None or first not in text:
        return None
    middle, found, _ = text.partition(first)[2].partition(last)
    return middle if found else None


def _parting(sequence: str, then: str) -> str:
    pairs = zip(sequence, then, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(sequence), len(then)))
    return (
        f"after {sequence[max(0, at - 24) : at]!r}: {sequence[at : at + 24]!r} "
        f"is now {then[at : at + 24]!r}"
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text; none where it cannot be encoded (a template may print half a character)."""
    try:
        return tokenizer.encode(text)
    except (TypeError, ValueError):
        return []
