"""The checks of tokenized rows: ids, mask, stop id, and where the reasoning lies.

Invariant: what is said of a row follows from its ids and mask alone; each supervised span is
read as one generation, with the ids before it as its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eyas.ids import is_loop
from eyas.verify.drift import Drift
from eyas.verify.faults import Tally
from eyas.verify.reference import Reference
from eyas.verify.rows import IdRow, kind_of, show

Span = tuple[int, int]
"""First supervised position and the one after the last."""

_TAIL = 64
"""How many ids before a span are enough to see whether the prompt opens the reasoning."""


@dataclass
class IdChecks:
    """The checks of tokenized rows for one target; `check` takes them in batches."""

    reference: Reference
    tally: Tally
    drift: Drift
    max_length: int | None = None
    longest: int = 0
    cut: Tally | None = None
    """The rows of exactly the greatest length so far that end in no stop id."""

    def check(self, rows: Sequence[IdRow]) -> None:
        """Check a batch."""
        sound: list[tuple[IdRow, list[Span]]] = []
        for row in rows:
            found: dict[str, str] = {}
            spans = self._check_row(row, found)
            self.tally.add_all(row.place, found)
            if spans is not None:
                sound.append((row, spans))
        self.drift.add(sound)

    def _check_row(self, row: IdRow, found: dict[str, str]) -> list[Span] | None:
        """Fill in the row's faults; its spans, or None where its ids cannot be decoded."""
        ids = row.ids
        if not self._sound_ids(ids, found):
            return None
        self.tally.counts["ids"] += len(ids)
        self._bos(ids, found)
        mask = _sound_mask(row, found)
        if self.max_length is not None and len(ids) > self.max_length:
            found["too_long"] = f"{len(ids)} ids; the maximum is {self.max_length}"
        if mask is None:
            return []
        supervised = sum(mask)
        self.tally.counts["supervised"] += supervised
        if not supervised:
            found["mask_all_zero"] = f"none of the {len(ids)} ids is supervised"
            return []
        if "too_long" in found and 1 not in mask[: self.max_length]:
            found["supervision_cut_off"] = (
                f"the first supervised id is number {mask.index(1)}; the maximum is "
                f"{self.max_length}"
            )
        if supervised == len(ids):
            found["mask_all_one"] = f"all {len(ids)} ids are supervised"
            return [(0, len(ids))]
        _check_labels(row, mask, found)
        spans = _spans(mask)
        for span, following in zip_longest(spans, spans[1:]):
            self._check_span(row, span, following, found)
        self._note_length(row, spans[-1])
        return spans

    def _sound_ids(self, ids: list[Any], found: dict[str, str]) -> bool:
        if not ids:
            found["no_ids"] = "the list of ids is empty"
            return False
        if set(map(type, ids)) != {int}:
            at = next(n for n, i in enumerate(ids) if type(i) is not int)
            found["ids_not_integers"] = f"id {at} is {show(ids[at])} ({kind_of(ids[at])})"
            return False
        size = self.reference.profile.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            at = next(n for n, i in enumerate(ids) if not 0 <= i < size)
            found["ids_outside_vocabulary"] = (
                f"id {at} is {ids[at]}; the vocabulary ends at {size - 1}"
            )
            return False
        return True

    def _bos(self, ids: list[int], found: dict[str, str]) -> None:
        bos, reference = self.reference.bos, self.reference
        if bos is None:
            return
        if ids[:2] == [bos, bos]:
            found["doubled_bos"] = f"the row begins {reference.around(ids, 0)}"
        elif reference.prompt_has_bos is False and ids[0] == bos:
            found["bos_added"] = f"the row begins {reference.around(ids, 0)}"
        elif reference.prompt_has_bos and ids[0] != bos:
            found["bos_missing"] = f"the row begins {reference.around(ids, 0)}"

    def _check_span(
        self, row: IdRow, span: Span, following: Span | None, found: dict[str, str]
    ) -> None:
        ids, (start, end) = row.ids, span
        last = following is None
        complete, end = self._check_end(row, span, last, found)
        if following is not None and not complete and self._is_gap(ids[end : following[0]]):
            found.pop("stop_missing", None)
            found.setdefault("mask_gap", f"from id {end} on: {self.reference.around(ids, end)}")
        if "mask_gap" in found:
            return
        begin = self._check_begin(ids, span, found)
        if begin < end:
            self._check_reasoning(ids, begin, end, complete, last, found)
        output = ids[start:end]
        if self.reference.profile.role_headers and "stop_inside" not in found:
            header = _header_in(output, self.reference.profile.role_headers)
            if header is not None:
                at = start + header
                found.setdefault("role_header", f"at id {at}: {self.reference.around(ids, at)}")
        if is_loop(output[:-1] if complete else output):
            found.setdefault("loop", f"the answer at id {start} has {len(output)} ids")

    def _check_end(
        self, row: IdRow, span: Span, last: bool, found: dict[str, str]
    ) -> tuple[bool, int]:
        """Whether the span ends its turn, and its end without what stands behind the stop id."""
        ids, (start, end), stops = row.ids, span, self.reference.profile.stop_ids
        reference = self.reference
        output = ids[start:end]
        places = []
        if not stops.isdisjoint(output):
            places = [start + n for n, i in enumerate(output) if i in stops]
        complete = bool(places)
        if places:
            behind = ids[places[-1] + 1 : end]
            if behind and not reference.tokenizer.is_blank(behind):
                found.setdefault("stop_inside", f"at id {places[-1]} of the span to {end - 1}: "
                                 f"{reference.around(ids, places[-1])}")  # fmt: skip
                complete = False
            elif behind:
                found.setdefault(
                    "after_stop_supervised",
                    f"behind id {places[-1]}: {reference.around(ids, places[-1])}",
                )
                end = places[-1] + 1
            if len(places) > 1:
                at = places[0]
                found.setdefault("stop_inside", f"at id {at} of the span to {end - 1}: "
                                 f"{reference.around(ids, at)}")  # fmt: skip
        if complete or not stops or "stop_inside" in found:
            return complete, end
        shown = f"the answer ends at id {end - 1}: {reference.around(ids, end - 1)}"
        if end < len(ids) and ids[end] in stops:
            found.setdefault("stop_not_supervised", shown)
            return True, end
        if not last or row.finish == "stop":
            found.setdefault("stop_missing", shown)
        elif row.finish == "length":
            found["truncated"] = shown
        else:
            found["stop_absent"] = shown
        return False, end

    def _is_gap(self, between: list[int]) -> bool:
        """Whether what stands between two spans belongs to the same turn."""
        headers, written = self.reference.profile.role_headers, self.reference.generation_prompt
        if not headers or not written:
            return False
        return _header_in([*between, -1], (*headers, tuple(written))) is None

    def _check_begin(self, ids: list[int], span: Span, found: dict[str, str]) -> int:
        """Where the answer begins: right behind the generation prompt, wherever the mask does."""
        (start, end), written = span, self.reference.generation_prompt
        repeated = self._repeated(ids, span)
        if repeated:
            found.setdefault(
                "prompt_repeated",
                f"the first {repeated} of the {end - start} supervised ids from id {start} on: "
                f"{self.reference.around(ids, start)}",
            )
            return start + repeated
        length = len(written)
        if not length or ids[max(0, start - length) : start] == written:
            return start
        shown = f"the mask begins at id {start}: {self.reference.around(ids, start)}"
        for inside in range(1, min(length, end - start) + 1):
            first = start + inside - length
            if first >= 0 and ids[first : start + inside] == written:
                opens = self._has_opener(written[-inside:])
                found.setdefault("opener_supervised" if opens else "prompt_supervised", shown)
                return start + inside
        if self.reference.closed_before(ids, start):
            return start
        behind = self._behind_generation_prompt(ids, start)
        if behind is not None:
            found.setdefault("answer_masked", shown)
            return behind
        if not self.reference.control_ids.isdisjoint(written):  # else text may merge with it
            found.setdefault("prompt_end", shown)
        return start

    def _repeated(self, ids: list[int], span: Span) -> int:
        """How many supervised ids are the prompt's last ones once more, or its opener."""
        (start, end), reference = span, self.reference
        profile, written = reference.profile, reference.generation_prompt
        behind = bool(written) and ids[max(0, start - len(written)) : start] == written
        if not behind and not reference.closed_before(ids, start):
            return 0
        for count in range(min(_TAIL, start, end - start), 0, -1):
            first = ids[start : start + count]
            if first == ids[start - count : start] and self._is_markup(first):
                return count
        before, first = ids[max(0, start - _TAIL) : start], ids[start : min(end, start + _TAIL)]
        if profile.open_position(reference.tokenizer, before) is None:
            return 0
        return profile.spans(reference.tokenizer, [], first)[0] or 0

    def _is_markup(self, ids: list[int]) -> bool:
        """Whether these ids are what a template writes, which no answer begins with by chance."""
        written = self.reference.generation_prompt
        return not self.reference.control_ids.isdisjoint(ids) or (
            0 < len(written) <= len(ids) and not self.reference.tokenizer.is_blank(ids)
        )

    def _behind_generation_prompt(self, ids: list[int], start: int) -> int | None:
        """Where the turn of a position began, if a generation prompt stands before it."""
        written, stops = self.reference.generation_prompt, self.reference.profile.stop_ids
        for at in range(start - len(written), -1, -1):
            if ids[at : at + len(written)] == written:
                return at + len(written)
            if ids[at + len(written) - 1] in stops:
                return None
        return None

    def _has_opener(self, ids: list[int]) -> bool:
        """Whether these last ids of the generation prompt hold the opener that it ends with."""
        return self.reference.reasons and not self.reference.tokenizer.is_blank(ids)

    def _check_reasoning(
        self, ids: list[int], begin: int, end: int, complete: bool, last: bool,
        found: dict[str, str],
    ) -> None:  # fmt: skip
        reference, counts = self.reference, self.tally.counts
        profile, tokenizer = reference.profile, reference.tokenizer
        if profile.opener is None or profile.closer is None:
            return
        prompt, output = ids[max(0, begin - _TAIL) : begin], ids[begin:end]
        opened, closed, after, _ = profile.spans(tokenizer, prompt, output)
        shown = f"the answer begins at id {begin}: {reference.around(ids, begin)}"
        if opened is not None and opened > len(prompt) and reference.reasons:
            found.setdefault("opener_supervised", shown)
        if opened is None:
            self._check_unopened(ids, begin, last, shown, found)
            return
        if closed is None:
            if complete:
                found.setdefault("closer_missing", shown)
            else:
                counts["reasoning_cut"] += 1
                found.setdefault("reasoning_truncated", shown)
            return
        offset = begin - len(prompt)
        thought = ids[offset + opened : offset + closed]
        if not tokenizer.is_blank(thought):
            counts["with_reasoning"] += 1
        else:
            counts["reasoning_empty"] += 1
            if reference.reasons:
                found.setdefault("reasoning_empty", shown)
        content = ids[offset + after : end - (ids[end - 1] in profile.stop_ids)]
        if complete and tokenizer.is_blank(content):
            found.setdefault("empty_answer", f"nothing follows the closer at id {offset + closed}")

    def _check_unopened(
        self, ids: list[int], begin: int, last: bool, shown: str, found: dict[str, str]
    ) -> None:
        """An answer whose reasoning was not opened: closed at once, left out, or torn off."""
        reference, counts = self.reference, self.tally.counts
        closer = reference.profile.closer
        if reference.closed_before(ids, begin):
            counts["reasoning_closed"] += 1
            if not reference.reasons:
                return
            if last:
                found.setdefault("reasoning_closed", shown)
            else:
                found.setdefault("reasoning_missing", f"an earlier answer of the row: {shown}")
            return
        counts["without_reasoning"] += 1
        if reference.reasons:
            assert closer is not None
            text = reference.tokenizer.join(ids[begin:])
            fault = "opener_missing" if closer.text.encode() in text else "reasoning_missing"
            found.setdefault(fault, shown)

    def _note_length(self, row: IdRow, span: Span) -> None:
        """Keep the rows of the greatest length that end in no stop id, where they do not say so."""
        length = len(row.ids)
        if length > self.longest:
            self.longest, self.cut = length, Tally()
        ended = row.ids[-1] in self.reference.profile.stop_ids or span[1] < length
        if length == self.longest and not ended and row.finish != "length":
            assert self.cut is not None
            self.cut.add("cut_at_length", row.place, f"{length} ids, no stop id at the end")

    def finish(self) -> None:
        """Count the rows that a common length cut, once all rows were seen."""
        seen = self.cut.faults.get("cut_at_length") if self.cut is not None else None
        if seen is not None and seen.count > 1:
            self.tally.faults["cut_at_length"] = seen


def _sound_mask(row: IdRow, found: dict[str, str]) -> list[int] | None:
    """The mask as 0 and 1, or None where it cannot be used."""
    mask = row.mask
    if mask is None:
        found["mask_missing"] = f"the columns are {row.kind}"
        return None
    if len(mask) != len(row.ids):
        found["mask_length"] = f"{len(mask)} mask values for {len(row.ids)} ids"
        return None
    types = set(map(type, mask))
    if types != {int}:
        at = next(n for n, value in enumerate(mask) if type(value) is not int)
        what = "value" if row.labels is None else "label"
        found["mask_values"] = f"{what} {at} is {show(mask[at])} ({kind_of(mask[at])})"
        if not types <= {int, bool, float}:
            return None
    if mask.count(0) + mask.count(1) != len(mask):
        at = next(n for n, value in enumerate(mask) if value not in (0, 1))
        found.setdefault("mask_values", f"value {at} is {show(mask[at])}")
        return None
    return mask if types == {int} else [int(value) for value in mask]


def _check_labels(row: IdRow, mask: list[int], found: dict[str, str]) -> None:
    labels, ids = row.labels, row.ids
    if labels is None:
        return
    wrong = [n for n, used in enumerate(mask) if used and labels[n] != ids[n]]
    if not wrong:
        return
    at = wrong[0]
    shifted = all(labels[n] == ids[n + 1] for n in wrong if n + 1 < len(ids)) and len(wrong) > 1
    found["labels_differ"] = f"label {at} is {show(labels[at])}, the id {ids[at]}" + (
        "; the labels are shifted by one, which trainers do themselves" if shifted else ""
    )


def _spans(mask: list[int]) -> list[Span]:
    """The stretches of 1."""
    packed = bytes(mask)
    spans: list[Span] = []
    start = packed.find(1)
    while start >= 0:
        end = packed.find(0, start)
        if end < 0:
            end = len(packed)
        spans.append((start, end))
        start = packed.find(1, end)
    return spans


def _header_in(ids: list[int], headers: tuple[tuple[int, ...], ...]) -> int | None:
    """Where a role header stands before the last id, or None."""
    for header in headers:
        if header[0] not in ids:
            continue
        for at in range(len(ids) - len(header)):
            if tuple(ids[at : at + len(header)]) == header:
                return at
    return None
