"""How much of tokenized rows survives text and back, and where it does not.

Invariant: ids that come back at the same place of the same text have survived, all others have
not; the figures are counts over all rows that could be decoded.

What drifts is no fault of ids that a model sampled: a model may write a word in other pieces
than the tokenizer would. It is what a trainer loses that takes text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from eyas.ids import first_difference
from eyas.verify.faults import EXAMPLES, Tally
from eyas.verify.reference import Reference
from eyas.verify.rows import IdRow

Rows = Sequence[tuple[IdRow, list[tuple[int, int]]]]


@dataclass
class Drift:
    """The figures so far; memory does not grow with the rows."""

    reference: Reference
    tally: Tally
    rows: int = 0
    rows_changed: int = 0
    """Rows of which some id, prompt or answer, does not come back."""
    ids: int = 0
    ids_lost: int = 0
    answers: int = 0
    answers_changed: int = 0
    """Supervised spans that, decoded and encoded alone, give other ids."""
    supervised: int = 0
    supervised_lost: int = 0
    prompts_changed: int = 0
    seams: int = 0
    """Rows in which a joint encoding puts one id across the border of prompt and answer."""
    causes: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        """Decode and encode a batch again."""
        encode = self.reference.tokenizer.encode_batch
        whole = encode([self.reference.tokenizer.decode(row.ids) for row, _ in rows])
        alone: list[tuple[IdRow, int, int]] = []
        for (row, spans), again in zip(rows, whole, strict=True):
            changed = again != row.ids
            self.rows += 1
            self.ids += len(row.ids)
            for start, end in spans:
                self.answers += 1
                self.supervised += end - start
                # Nothing merges across a control id: behind one, the whole row's ids tell it.
                parted = start > 0 and row.ids[start - 1] in self.reference.control_ids
                if changed or not (parted or start == 0):
                    alone.append((row, start, end))
            if changed:
                self._add_changed(row, spans, again)
        texts = [self.reference.tokenizer.decode(row.ids[start:end]) for row, start, end in alone]
        for (row, start, end), again in zip(alone, encode(texts), strict=True):
            ids = row.ids[start:end]
            if again != ids:
                self.answers_changed += 1
                self.supervised_lost += self._lost(ids, again)

    def _add_changed(self, row: IdRow, spans: list[tuple[int, int]], again: list[int]) -> None:
        ids = row.ids
        self.rows_changed += 1
        self.ids_lost += self._lost(ids, again)
        at = first_difference(ids, again)
        cause = self._cause(ids, again, at)
        border = spans[0][0] if spans else len(ids)
        if spans and at < border:
            pieces = self.reference.tokenizer.pieces
            given = len(b"".join(pieces(ids[at:border])))
            if at < len(again) and len(b"".join(pieces(again[at : at + 1]))) > given:
                cause = "one id across the border of prompt and answer"
                self.seams += 1
            else:
                self.prompts_changed += 1
                self.tally.add("prompt_drift", row.place, self._show(ids, again, at))
        self.causes[cause] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(
                {
                    "where": row.place.where,
                    "id": row.place.id,
                    "position": at,
                    "cause": cause,
                    "ids": ids[max(0, at - 1) : at + 3],
                    "ids_again": again[max(0, at - 1) : at + 3],
                    "text": self._show(ids, again, at),
                }
            )

    def _show(self, ids: list[int], again: list[int], at: int) -> str:
        around = self.reference.around
        return f"at id {at}: {around(ids, at)} comes back as {around(again, at)}"

    def _cause(self, ids: list[int], again: list[int], at: int) -> str:
        tokenizer, control = self.reference.tokenizer, self.reference.control_ids
        given = ids[at] if at < len(ids) else None
        back = again[at] if at < len(again) else None
        if given is not None and not tokenizer.join([given]):
            return "an id without a text"
        if back in control and given not in control:
            return "a control string written in pieces"
        text = tokenizer.join(ids)
        if tokenizer.join(again) == text:
            return "the same text in other pieces"
        try:
            text.decode()
        except UnicodeDecodeError:
            return "an unfinished character"
        return "the tokenizer changes the text"

    def _lost(self, ids: list[int], again: list[int]) -> int:
        """How many ids do not come back with the same bytes before them."""
        kept = _placed(self.reference, ids) & _placed(self.reference, again)
        return len(ids) - len(kept)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {
            "rows": self.rows,
            "rows_changed": self.rows_changed,
            "ids": self.ids,
            "ids_lost": self.ids_lost,
            "answers": self.answers,
            "answers_changed": self.answers_changed,
            "supervised": self.supervised,
            "supervised_lost": self.supervised_lost,
            "prompts_changed": self.prompts_changed,
            "seams": self.seams,
            "causes": dict(self.causes.most_common()),
            "examples": self.examples,
        }


def _placed(reference: Reference, ids: list[int]) -> set[tuple[int, int]]:
    """Each id with the number of bytes before it (empty pieces cannot be told apart)."""
    lengths = map(len, reference.tokenizer.pieces(ids))
    return set(zip(accumulate(lengths, initial=0), ids, strict=False))
