"""Two sequences of ids compared: what is lost, where they part, and why.

Invariant: a cause is named only by a rule on ids and the bytes they stand for; what no rule knows
is `other`. How many ids are lost depends on no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyas.conversation import Message
from eyas.drift.ways import Row
from eyas.ids import first_difference
from eyas.prompting import Prompting
from eyas.tokens import Marker, Tokenizer

CAUSES = {
    "reasoning_left_out": "the reasoning is not there",
    "marker_lost": "a marker of the reasoning is lost",
    "marker_added": "a marker of the reasoning is added",
    "stop_lost": "the stop id is lost",
    "other_end": "the turn ends with another control id",
    "end_added": "a cut answer gets an end that was not generated",
    "seam": "one id stands for the prompt's end and the answer's beginning",
    "prompt": "the prompt is written otherwise",
    "no_text": "an id that stands for no text",
    "unfinished_character": "an unfinished character becomes U+FFFD",
    "text_to_control": "text becomes a control id",
    "control_to_text": "a control id becomes text",
    "other_pieces": "the same text in other pieces",
    "calls": "calls of tools are written otherwise",
    "space": "white space is stripped or added",
    "other": "another text",
}
"""What makes a row differ first, by name."""
_WINDOW = 48
"""Ids behind the parting whose bytes are looked at."""
_TAIL = 64
"""Characters of the reasoning's end by which it is looked for."""


class Difference(NamedTuple):
    """How what text gives differs from what was generated."""

    position: int
    """The first id that differs, in prompt and output together."""
    cause: str
    lost: int
    """Output ids that do not come back in their order, from the parting on."""


@dataclass(frozen=True, slots=True)
class _Parting:
    """Where two sequences part, and what stands there."""

    row: Row
    ids: list[int]
    again: Sequence[int]
    at: int
    here: bytes
    """What is generated from there on, as bytes (of a window)."""
    there: bytes
    """What comes back instead."""
    common: int
    """Bytes that both begin with."""

    @property
    def given(self) -> int:
        return self.ids[self.at]

    @property
    def back(self) -> int | None:
        return self.again[self.at] if self.at < len(self.again) else None


def compare(
    prompting: Prompting, row: Row, again: Sequence[int], answer: Message | None
) -> Difference | None:
    """What is different in ids that were made from text; None where nothing is.

    What a template writes behind the end of an answer that was ended counts for nothing.

    Args:
        again: the ids of prompt and answer together.
        answer: what was rendered, where something was.
    """
    ids = row.ids
    at = first_difference(ids, again)
    if at == len(ids):
        ends = row.mode.ends | prompting.profile.stop_ids
        added = not row.complete and any(i in ends for i in again[at:])
        return Difference(at, "end_added", 0) if added else None
    border = len(row.prompt_ids)
    output = ids[max(at, border) :]
    lost = len(output) - common_ids(output, again[at:])
    return Difference(at, _cause(prompting, row, again, at, answer), lost)


def common_ids(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common subsequence.

    A row of the usual table is kept in the bits of one number (Hyyrö 2004), so that ten thousand
    ids against as many take some hundredths of a second.
    """
    places: dict[int, int] = {}
    for number, index in enumerate(first):
        places[index] = places.get(index, 0) | 1 << number
    whole = (1 << len(first)) - 1
    row = whole
    for index in second:
        met = row & places.get(index, 0)
        row = ((row + met) | (row - met)) & whole
    return len(first) - row.bit_count()


def _cause(
    prompting: Prompting, row: Row, again: Sequence[int], at: int, answer: Message | None
) -> str:
    join = prompting.tokenizer.join
    ids = row.ids
    here, there = join(ids[at : at + _WINDOW]), join(again[at : at + _WINDOW])
    parting = _Parting(row, ids, again, at, here, there, first_difference(here, there))
    return (
        _of_reasoning(prompting, parting)
        or _of_the_end(prompting, parting)
        or _of_the_prompt(prompting.tokenizer, parting)
        or _of_the_text(prompting, parting, answer)
    )


def _of_reasoning(prompting: Prompting, parting: _Parting) -> str | None:
    """Whether the reasoning or its markers are what is lost."""
    profile, row, decode = prompting.profile, parting.row, prompting.tokenizer.decode
    markers = [marker for marker in (profile.opener, profile.closer) if marker is not None]
    if row.reasoning is not None:
        start, end = row.reasoning
        left = _squeezed(decode(parting.ids[max(parting.at, start) : end]))[-_TAIL:]
        if left and left not in _squeezed(decode(parting.again[max(0, parting.at - _WINDOW) :])):
            return "reasoning_left_out"
    if any(_stands(marker, parting.ids, parting.at, parting.here) for marker in markers):
        return "marker_lost"
    if any(_stands(marker, parting.again, parting.at, parting.there) for marker in markers):
        return "marker_added"
    return None


def _squeezed(text: str) -> str:
    """A text without its white space, which a template may change as well."""
    return "".join(text.split())


def _stands(marker: Marker, ids: Sequence[int], at: int, follows: bytes) -> bool:
    """Whether a marker stands at a position: its one id, or its text."""
    if marker.single is not None:
        return at < len(ids) and ids[at] == marker.single
    return follows.startswith(marker.text.encode())


def _of_the_end(prompting: Prompting, parting: _Parting) -> str | None:
    """Whether what ended the turn is what is lost."""
    last = parting.at == len(parting.ids) - 1 and parting.row.complete
    if not last or parting.given not in prompting.profile.stop_ids:
        return None
    if parting.back is None:
        return "stop_lost"
    return "other_end" if parting.back in prompting.tokenizer.control.values() else None


def _of_the_prompt(tokenizer: Tokenizer, parting: _Parting) -> str | None:
    border = len(parting.row.prompt_ids)
    if parting.at >= border:
        return None
    left = len(tokenizer.join(parting.ids[parting.at : border]))
    piece = tokenizer.join(parting.again[parting.at : parting.at + 1])
    return "seam" if len(piece) > left and parting.common >= left else "prompt"


def _of_the_text(prompting: Prompting, parting: _Parting, answer: Message | None) -> str:
    tokenizer = prompting.tokenizer
    given, back = parting.given, parting.back
    control = tokenizer.control.values()
    mine = tokenizer.join([given])
    other = b"" if back is None else tokenizer.join([back])
    if not mine:
        return "no_text"
    near = slice(max(0, parting.at - 2), parting.at + 3)  # its first bytes may be ids before
    if _REPLACED in tokenizer.join(parting.again[near]) and _REPLACED not in tokenizer.join(
        parting.ids[near]
    ):
        return "unfinished_character"
    if parting.common >= max(len(mine), len(other)) and back is not None:
        if back in control and given not in control:
            return "text_to_control"
        return "control_to_text" if given in control and back not in control else "other_pieces"
    if answer is not None and answer.get("tool_calls") and _in_calls(prompting, parting, answer):
        return "calls"
    here, there = parting.here[parting.common :], parting.there[parting.common :]
    if here.strip() == there.strip() or _only_space(here, there):
        return "space"
    return "other"


_REPLACED = "\ufffd".encode()
_ALIKE = 8
"""Bytes behind white space that have to be the same."""


def _only_space(here: bytes, there: bytes) -> bool:
    """Whether two texts go on alike behind white space that only one of them has."""
    mine, other = here.lstrip(), there.lstrip()
    count = min(_ALIKE, len(mine), len(other))
    return (mine, other) != (here, there) and count > 0 and mine[:count] == other[:count]


def _in_calls(prompting: Prompting, parting: _Parting, answer: Message) -> bool:
    """Whether an answer's content is over where the sequences part."""
    row = parting.row
    content = str(answer.get("content") or "").strip().encode()
    start = len(row.prompt_ids) if row.reasoning is None else row.reasoning[1]
    return content in prompting.tokenizer.join(parting.ids[start : parting.at])
