"""What a target's files and rendering tell of its output: markers, stop ids, role headers.

Invariant: where reasoning begins and ends is decided by ids (or the bytes they stand for, where
a marker has no id of its own), never by a regular expression over an answer's text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.markers import Marker, find_frame, find_markers
from eyas.tokens.role_headers import rendered, role_headers
from eyas.tokens.tokenizer import Tokenizer

_TAIL = 24
"""How many of the prompt's last ids may hold an opener and what follows it."""


class Reading(NamedTuple):
    """Where the parts of one generation lie, as positions in ``prompt_ids + output_ids``."""

    start: int | None
    """The first id after the opener."""
    text_start: int | None
    """The first id that holds text of the reasoning: `start`, or the one before, where that begins
    with the opener's end."""
    end: int | None
    """The closer's first id."""
    reasoning: str | None
    """What the model wrote between opener and closer (to the end where there is no closer): space
    that the prompt puts behind its opener is no part of an answer, and no server gives it back."""
    content: str
    """The text between closer and stop id, unstripped, without the markers around it."""
    content_start: int
    """The content's first id."""
    content_end: int
    """The id after its last one: the stop id, what is written before it, or the end."""
    closers: int
    """How many closers stand in the output; where no reasoning was open, those without an opener."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What capture needs to know of a target to check its rows."""

    vocab_size: int
    """Ids must be below it."""
    declared_stop_ids: frozenset[int]
    """config.json and generation_config.json (the tokenizer's eos where both say nothing)."""
    stop_ids: frozenset[int]
    """Every id that ends generation: declared, the tokenizer's eos, and the user's."""
    opener: Marker | None
    closer: Marker | None
    reasoning: str
    """What the generation prompt does: ``open``, ``closed`` or ``none`` (the model decides)."""
    prompt_tail: tuple[int, ...]
    """The last ids of a rendered prompt, for people to look at."""
    role_headers: tuple[tuple[int, ...], ...]
    """Ids that begin a user's, the system's or a tool's message; a model writes none."""
    bos_ids: tuple[int, ...] = ()
    """The id that the tokenizer calls bos; a prompt must not begin with two of them."""
    content_openers: tuple[Marker, ...] = ()
    """What the model may write before content, besides its reasoning; the longest first."""
    content_closer: Marker | None = None
    """What it writes between content and stop id."""

    def as_dict(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """For the manifest: plain values, with the texts of ids where a tokenizer is given."""

        def marker(m: Marker | None) -> dict[str, Any] | None:
            return None if m is None else {"text": m.text, "ids": list(m.ids)}

        return {
            "vocab_size": self.vocab_size,
            "declared_stop_ids": sorted(self.declared_stop_ids),
            "stop_ids": sorted(self.stop_ids),
            "opener": marker(self.opener),
            "closer": marker(self.closer),
            "reasoning": self.reasoning,
            "prompt_tail": list(self.prompt_tail),
            "prompt_tail_text": tokenizer.decode(self.prompt_tail) if tokenizer else None,
            "role_headers": [list(header) for header in self.role_headers],
            "bos_ids": list(self.bos_ids),
            "content_openers": [marker(opener) for opener in self.content_openers],
            "content_closer": marker(self.content_closer),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """Read what `as_dict` wrote.

        Raises:
            ValueError: it holds something else.
        """

        def marker(m: dict[str, Any] | None) -> Marker | None:
            return None if m is None else Marker(m["text"], tuple(m["ids"]))

        try:
            profile = cls(
                vocab_size=data["vocab_size"],
                declared_stop_ids=frozenset(data["declared_stop_ids"]),
                stop_ids=frozenset(data["stop_ids"]),
                opener=marker(data["opener"]),
                closer=marker(data["closer"]),
                reasoning=data["reasoning"],
                prompt_tail=tuple(data["prompt_tail"]),
                role_headers=tuple(tuple(header) for header in data["role_headers"]),
                bos_ids=tuple(data.get("bos_ids", ())),
                content_openers=tuple(filter(None, map(marker, data.get("content_openers", ())))),
                content_closer=marker(data.get("content_closer")),
            )
        except KeyError as error:
            raise ValueError(f"it has no {error}") from error
        except TypeError as error:
            raise ValueError(str(error)) from error
        profile._require_sound()
        return profile

    def _require_sound(self) -> None:
        """Raise ValueError where it holds values of another kind than it should."""
        markers = [*self.content_openers]
        markers += [m for m in (self.opener, self.closer, self.content_closer) if m is not None]
        lists: list[Sequence[Any]] = [
            [self.vocab_size], [*self.declared_stop_ids], [*self.stop_ids],
            self.prompt_tail, self.bos_ids, *self.role_headers, *(m.ids for m in markers),
        ]  # fmt: skip
        if not all(map(are_ids, lists)):
            raise ValueError("what should be ids are none")
        if not all(self.role_headers) or not all(m.ids and type(m.text) is str for m in markers):
            raise ValueError("a marker or header is empty")
        if self.reasoning not in ("open", "closed", "none"):
            raise ValueError(f"reasoning is {self.reasoning!r}")

    def open_position(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> int | None:
        """The position after the opener if the prompt ends inside the reasoning, else None.

        An opener counts when only whitespace follows it (``<think>\\n`` on Qwen). Where the
        opener has no id of its own, its bytes are looked for; it may then share its last id
        with the whitespace behind it, and the position is that of the next id.
        """
        if self.opener is None:
            return None
        marker, length = self.opener.ids, len(prompt_ids)
        if length and marker == (prompt_ids[-1],):  # the usual case
            return length
        first = max(0, length - _TAIL)
        tail = list(prompt_ids[first:])
        if len(marker) == 1:
            if marker[0] not in tail:
                return None
            end = len(tail) - tail[::-1].index(marker[0])
            return first + end if tokenizer.is_blank(tail[end:]) else None
        for at in range(len(tail) - len(marker), -1, -1):
            if tuple(tail[at : at + len(marker)]) == marker:
                end = at + len(marker)
                return first + end if tokenizer.is_blank(tail[end:]) else None
        pieces = tokenizer.pieces(tail)
        text, wanted = b"".join(pieces), self.opener.text.encode()
        at = text.rfind(wanted)
        if at < 0 or text[at + len(wanted) :].strip():
            return None
        ends = list(accumulate(map(len, pieces)))
        return first + bisect_right(ends, at + len(wanted) - 1) + 1

    def read(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> Reading:
        """Take one generation apart. The texts come from ids and leave out the stop id."""
        spans = self.spans(tokenizer, prompt_ids, output_ids)
        start, end, content_start, closers = spans
        ids = [*prompt_ids, *output_ids]
        body_end = len(ids)
        if output_ids and output_ids[-1] in self.stop_ids:
            body_end -= 1
        if start is None:
            content_start, content_end = self.content_span(tokenizer, ids, content_start, body_end)
            content = tokenizer.decode(ids[content_start:content_end])
            return Reading(None, None, None, None, content, content_start, content_end, closers)
        written = max(start, len(prompt_ids))
        begun = self._behind_opener(tokenizer, ids[len(prompt_ids) : start])
        text_start = start - bool(begun.strip())
        if end is None:
            reasoning = _text(tokenizer, begun, ids[written:body_end])
            return Reading(start, text_start, None, reasoning, "", body_end, body_end, 0)
        content_start, content_end = self.content_span(tokenizer, ids, content_start, body_end)
        assert self.closer is not None
        width = len(self.closer.ids)
        if self.closer.single is not None or tuple(ids[end : end + width]) == self.closer.ids:
            reasoning = _text(tokenizer, begun, ids[written:end])
            content = tokenizer.decode(ids[content_start:content_end])
        else:  # the closer shares ids with its neighbours: part the bytes, not the ids
            whole = begun + tokenizer.join(ids[written:body_end])
            before, _, after = whole.partition(self.closer.text.encode())
            reasoning = before.decode("utf-8", "replace")
            content = after.decode("utf-8", "replace")
        return Reading(
            start, text_start, end, reasoning, content, content_start, content_end, closers
        )

    def _behind_opener(self, tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
        """What the last of the ids of an opener that the model wrote holds besides it."""
        assert self.opener is not None
        if not ids or tuple(ids[-len(self.opener.ids) :]) == self.opener.ids:
            return b""
        return tokenizer.join(ids).partition(self.opener.text.encode())[2]

    def content_span(
        self, tokenizer: Tokenizer, ids: Sequence[int], start: int, end: int
    ) -> tuple[int, int]:
        """Where the content lies within ids of an answer, without the markers around it."""
        first = start
        while first < min(end, start + 3) and tokenizer.is_blank(ids[first : first + 1]):
            first += 1
        for opener in self.content_openers:
            after = first + len(opener.ids)
            if after <= end and tuple(ids[first:after]) == opener.ids:
                start = after
                break
        last = self.content_closer
        if last is not None and tuple(ids[max(start, end - len(last.ids)) : end]) == last.ids:
            end -= len(last.ids)
        return start, end

    def spans(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        among: Sequence[int] | None = None,
    ) -> tuple[int | None, int | None, int, int]:
        """Only the positions of `read`: (start, end, content_start, closers).

        Args:
            among: positions in the output, in order, outside of which no closer's id stands;
                None where that is not known.
        """
        n = len(prompt_ids)
        if self.opener is None or self.closer is None:
            return None, None, n, 0
        start = self.open_position(tokenizer, prompt_ids)
        offset = 0
        if start is None and (length := self._opened_by_model(tokenizer, output_ids)) is not None:
            start, offset = n + length, length
        found = self._find_closers(tokenizer, output_ids, offset, among)
        last = len(output_ids)
        if output_ids and self.content_closer is not None:  # some models end both with one string
            last -= len(self.content_closer.ids) + (output_ids[-1] in self.stop_ids)
        if start is None:
            closers = sum(at < last for at, _ in found)
            return None, None, n, max(0, closers - self._openers(output_ids)) if closers else 0
        if not found:
            return start, None, n + len(output_ids), 0
        first, after = found[0]
        return start, n + first, n + after, 1 + sum(at < last for at, _ in found[1:])

    def _openers(self, output_ids: Sequence[int]) -> int:
        """How many openers stand in an output, such as quoted ones."""
        assert self.opener is not None
        marker, width = self.opener.ids, len(self.opener.ids)
        return sum(
            tuple(output_ids[at : at + width]) == marker
            for at, token in enumerate(output_ids)
            if token == marker[0]
        )

    def _opened_by_model(self, tokenizer: Tokenizer, output_ids: Sequence[int]) -> int | None:
        """How many of the output's first ids make up an opener (whitespace may precede it)."""
        assert self.opener is not None
        marker = self.opener.ids
        for at in range(min(4, len(output_ids))):
            if tuple(output_ids[at : at + len(marker)]) == marker:
                return at + len(marker)
            if not tokenizer.is_blank(output_ids[at : at + 1]):
                break
        if len(marker) == 1:
            return None
        pieces = tokenizer.pieces(output_ids[:_TAIL])
        text = b"".join(pieces)
        stripped = text.lstrip()
        if not stripped.startswith(self.opener.text.encode()):
            return None
        end = len(text) - len(stripped) + len(self.opener.text.encode())
        return bisect_right(list(accumulate(map(len, pieces))), end - 1) + 1

    def _find_closers(
        self,
        tokenizer: Tokenizer,
        output_ids: Sequence[int],
        offset: int,
        among: Sequence[int] | None,
    ) -> list[tuple[int, int]]:
        """(first id, id after) of each closer in the output from `offset` on."""
        assert self.closer is not None
        single = self.closer.single
        if single is not None:
            places = range(offset, len(output_ids)) if among is None else among
            return [(at, at + 1) for at in places if at >= offset and output_ids[at] == single]
        pieces = tokenizer.pieces(output_ids)
        ends = list(accumulate(map(len, pieces)))
        text, wanted = b"".join(pieces), self.closer.text.encode()
        found = []
        begin = 0
        if offset:  # the closer may begin in the id that the opener ends in
            begin = ends[offset - 1] - len(self._behind_opener(tokenizer, output_ids[:offset]))
        at = text.find(wanted, begin)
        while at >= 0:
            first, after = bisect_right(ends, at), bisect_right(ends, at + len(wanted) - 1) + 1
            found.append((max(first, offset), after))
            at = text.find(wanted, at + len(wanted))
        return found


def _text(tokenizer: Tokenizer, begun: bytes, ids: Sequence[int]) -> str:
    """The text of ids, behind what an id before them holds of it."""
    if not begun:
        return tokenizer.decode(ids)
    return (begun + tokenizer.join(ids)).decode("utf-8", "replace")


def build_profile(
    tokenizer: Tokenizer, template: ChatTemplate | None, *, stop_token_ids: Sequence[int] = ()
) -> Profile:
    """Find a target's profile from its files and by rendering. No server is asked."""
    declared = frozenset(tokenizer.model.eos_ids)
    eos = tokenizer.eos_id
    tokenizer_eos = frozenset() if eos is None else frozenset((eos,))
    if not declared:
        declared = tokenizer_eos
    stop_ids = declared | tokenizer_eos | frozenset(stop_token_ids)
    prompt = rendered(template, [{"role": "user", "content": "Hi"}]) or ""
    opener, closer, reasoning = find_markers(tokenizer, template, prompt)
    content_openers, content_closer = find_frame(tokenizer, template, (opener, closer), stop_ids)
    bos = tokenizer.special_tokens_map.get("bos_token")
    bos_id = None if bos is None else tokenizer.control.get(bos)
    return Profile(
        vocab_size=tokenizer.vocab_size,
        declared_stop_ids=declared,
        stop_ids=stop_ids,
        opener=opener,
        closer=closer,
        reasoning=reasoning,
        prompt_tail=tuple(tokenizer.encode(prompt)[-8:]),
        role_headers=role_headers(tokenizer, template, stop_ids),
        bos_ids=() if bos_id is None else (bos_id,),
        content_openers=content_openers,
        content_closer=content_closer,
    )


def are_ids(values: Sequence[Any]) -> bool:
    """Whether these are ids and nothing that only equals one."""
    return all(type(value) is int and 0 <= value < 2**31 for value in values)
