"""Where an earlier answer stands in a later prompt, and with which ids.

Invariant: the place is found by rendering the same conversation with words of our own in place of
the answer's, so that it is the template that shows it; what is compared are ids, never texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import orjson

from eyas.conversation import Message
from eyas.tokens.encoded import Encoded
from eyas.tokens.profile import Profile
from eyas.tokens.tokenizer import Tokenizer

_SPACE = " \t\n\r\v\f"


class AnswerIds(NamedTuple):
    """The ids that an answer's parts lie in; space at a part's ends does not count."""

    reasoning: tuple[int, ...] | None
    """Between opener and closer; None where it is not shown, or there is none."""
    content: tuple[int, ...]
    """From the content on to the turn's end, calls of tools included."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a template writes around its last answer."""

    before: str
    """Everything before the answer's reasoning, or its content where that is not shown."""
    middle: str | None
    """Between reasoning and content; None where the reasoning is not shown."""
    after: str
    """From the turn's end on."""
    end: int | None
    """The control id that ends the turn and begins `after`; None where there is none."""

    def find(self, text: str) -> tuple[tuple[int, int] | None, tuple[int, int]] | None:
        """Positions of the reasoning (None where it is not shown) and the content in what the
        template makes of the real answer; None where that is not of this outline."""
        first, last = len(self.before), len(text) - len(self.after)
        if last < first or not (text.startswith(self.before) and text.endswith(self.after)):
            return None
        if self.middle is None:
            return None, (first, last)
        at = text.find(self.middle, first, last)
        return None if at < 0 else ((first, at), (at + len(self.middle), last))


class Words(NamedTuple):
    """Words that stand in place of an answer's parts."""

    content: str
    reasoning: str | None
    """None where the answer has no reasoning."""


def put_words(messages: Sequence[Message], at: int) -> tuple[list[Message], Words]:
    """The messages with words of our own in the answer at `at`."""
    word = _unused_word(messages)
    said = {**messages[at], "content": f"{word}content"}
    reasons = bool(str(said.get("reasoning_content") or "").strip())
    if reasons:
        said["reasoning_content"] = f"{word}reasoning"
    words = Words(said["content"], said["reasoning_content"] if reasons else None)
    return [*messages[:at], said, *messages[at + 1 :]], words


def outline(text: str, words: Words, tokenizer: Tokenizer, ends: frozenset[int]) -> Outline | None:
    """What the template writes around an answer; None where it does not show its content.

    Args:
        text: what it makes of the messages with `words` in the answer.
        ends: ids that end a turn.
    """
    before, found, after = text.rpartition(words.content)
    if not found:
        return None
    middle = None
    if words.reasoning is not None and words.reasoning in before:
        before, _, middle = before.rpartition(words.reasoning)
    at, end = _first_end(after, 0, tokenizer, ends)
    return Outline(before, middle, after if end is None else after[at:], end)


def outline_behind(
    before: str,
    text: str,
    tokenizer: Tokenizer,
    profile: Profile,
    ends: frozenset[int],
    *,
    reasons: bool,
) -> Outline | None:
    """`outline` of an answer that calls tools, beside which the template shows no content.

    None where what the template makes of the messages does not begin with the earlier prompt.

    Args:
        before: the earlier prompt.
        text: what the template makes of the messages as they are.
        reasons: whether the answer has a reasoning.
    """
    if not text.startswith(before):
        return None
    start, middle = len(before), None
    begun = start
    if reasons and profile.opener is not None and profile.closer is not None:
        opened = start + len(text[start:]) - len(text[start:].lstrip())
        if text.startswith(profile.opener.text, opened):
            start = opened + len(profile.opener.text)
        closed = text.find(profile.closer.text, start)
        if closed >= 0:
            middle, begun = profile.closer.text, closed + len(profile.closer.text)
    at, end = _first_end(text, begun, tokenizer, ends)
    return None if end is None else Outline(text[:start], middle, text[at:], end)


def _first_end(
    text: str, start: int, tokenizer: Tokenizer, ends: frozenset[int]
) -> tuple[int, int | None]:
    """Where the first control string stands that ends a turn, and its id; None without one."""
    for control in (
        tokenizer.control_pattern.finditer(text, start) if tokenizer.control_pattern else ()
    ):
        if (index := tokenizer.control[control.group()]) in ends:
            return control.start(), index
    return len(text), None


def shown_ids(shape: Outline, prompt: Encoded) -> AnswerIds | None:
    """The ids of an answer as they stand in a later prompt; None where it cannot be found.

    Args:
        prompt: what the template makes of the conversation with the real answer.
    """
    found = shape.find(prompt.text)
    if found is None:
        return None
    reasoning, content = found
    return AnswerIds(
        None if reasoning is None else _lying_in(*prompt, *reasoning) or None,
        _lying_in(*prompt, *content),
    )


def generated_ids(
    tokenizer: Tokenizer,
    profile: Profile,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> AnswerIds:
    """The ids of an answer as they were generated, its stop id left out."""
    reading = profile.read(tokenizer, prompt_ids, output_ids)
    ids = [*prompt_ids, *output_ids]
    last = len(ids) - (output_ids[-1] in profile.stop_ids)
    content = _without_space(tokenizer, ids[reading.content_start : last])
    if reading.text_start is None:
        return AnswerIds(None, content)
    end = last if reading.end is None else reading.end
    closer = profile.closer
    if closer and reading.end is not None and tuple(ids[end : end + len(closer.ids)]) != closer.ids:
        # The closer shares ids with its neighbours, so the bytes say which ids are theirs.
        parts = _around(closer.text, ids[reading.text_start : last], tokenizer)
        return parts if (reading.reasoning or "").strip() else AnswerIds(None, parts.content)
    return AnswerIds(_without_space(tokenizer, ids[reading.text_start : end]) or None, content)


def _around(closer: str, ids: Sequence[int], tokenizer: Tokenizer) -> AnswerIds:
    pieces = [piece.decode("latin-1") for piece in tokenizer.pieces(ids)]
    ends = list(accumulate(map(len, pieces)))
    places = list(zip([0, *ends], ends, strict=False))
    text, marker = "".join(pieces), closer.encode().decode("latin-1")
    at = text.index(marker)
    return AnswerIds(
        _lying_in(text, ids, places, 0, at) or None,
        _lying_in(text, ids, places, at + len(marker), len(text)),
    )


def drifted(generated: AnswerIds, shown: AnswerIds | None, *, keeps_reasoning: bool) -> bool:
    """Whether an answer stands in a later prompt with other ids than it was generated with.

    A reasoning that is not shown was dropped by the template on purpose, unless
    `keeps_reasoning` says that it should be there.
    """
    if shown is None or generated.content != shown.content:
        return True
    if shown.reasoning is None and not keeps_reasoning:
        return False
    return generated.reasoning != shown.reasoning


def _unused_word(messages: Sequence[Message]) -> str:
    """A word that is in no message and that no template writes."""
    said = orjson.dumps(messages, default=str).decode()
    number = 0
    while (word := f"qz{number}z") in said:
        number += 1
    return word


def _lying_in(
    text: str, ids: Sequence[int], places: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[int, ...]:
    """The ids that stand for something other than space between two positions.

    An id that stands for such and for space behind the border counts (a full stop and the line
    feed that the template writes itself).
    """
    while start < end and text[start] in _SPACE:
        start += 1
    while start < end and text[end - 1] in _SPACE:
        end -= 1
    return tuple(i for i, (a, b) in zip(ids, places, strict=True) if a < end and b > start)


def _without_space(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    first, last = 0, len(ids)
    while first < last and tokenizer.is_blank(ids[first : first + 1]):
        first += 1
    while first < last and tokenizer.is_blank(ids[last - 1 : last]):
        last -= 1
    return tuple(ids[first:last])
