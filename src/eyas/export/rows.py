"""Rows of training data: sequences of ids, and which of them are supervised.

Invariant: a row's supervised ids are the output ids of the traces that it is made of, each once
and all of them; every other id is the prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from eyas.trace import Trace


@dataclass(slots=True)
class Row:
    """One training sequence: a trace, or several turns of a conversation in one."""

    id: str
    """That of the trace; of several turns ``conversation_id/sample/FIRST-LAST``."""
    input_ids: list[int]
    spans: list[tuple[int, int]]
    """Where the supervised stretches begin and end, in order; one a turn."""
    complete: bool
    """Whether the model ended the last turn itself."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """A trace as it is."""
        n = len(trace.prompt_ids)
        ids = [*trace.prompt_ids, *trace.output_ids]
        return cls(trace.id, ids, [(n, len(ids))], trace.complete)

    @property
    def loss_mask(self) -> list[int]:
        """1 on every supervised id, 0 on the others."""
        mask = [0] * len(self.input_ids)
        for start, end in self.spans:
            mask[start:end] = [1] * (end - start)
        return mask

    @property
    def supervised(self) -> int:
        """How many ids are."""
        return sum(end - start for start, end in self.spans)

    def goes_on_in(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt begins with the row, id by id, and says something behind it."""
        n = len(self.input_ids)
        return len(prompt_ids) > n and list(prompt_ids[:n]) == self.input_ids
