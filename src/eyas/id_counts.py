"""How often each id of a vocabulary was generated, by mode and kind of text.

Invariant: only output ids are counted, each once; memory holds one record batch and some counts an
id of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import ConfigError
from eyas.export.rows import has_mark, is_complete
from eyas.store import TRACES, Run

Ids = NDArray[np.int64]
KINDS = ("reasoning", "answer", "calls")
"""What ids are of: the reasoning; the answer, with the markers and the stop id; all that stands
behind the reasoning of an answer that calls tools."""
_COLUMNS = ("prompt_ids", "output_ids", "reasoning_start", "reasoning_end", "marks",
            "template_kwargs", "finish_reason")  # fmt: skip
_BATCH = 2048


@dataclass
class Counts:
    """How often each id was generated."""

    vocab_size: int
    """Rows of the model's embedding, often more than the tokenizer has ids."""
    rows: int = 0
    by: dict[tuple[str, str], Ids] = field(default_factory=dict)
    """A count an id for each mode (template switches as JSON) and kind that occurs."""

    def of(self, *, mode: str | None = None, kind: str | None = None) -> Ids:
        """Counts of one mode, one kind, or all; [vocab_size]."""
        chosen = [c for (m, k), c in self.by.items() if mode in (None, m) and kind in (None, k)]
        total = np.zeros(self.vocab_size, np.int64)
        for counted in chosen:
            total += counted
        return total

    @property
    def modes(self) -> list[str]:
        """The modes that occur."""
        return sorted({mode for mode, _ in self.by})

    def _add(self, mode: str, kind: str, ids: NDArray[np.int32]) -> None:
        if len(ids):
            found = np.bincount(ids, minlength=self.vocab_size)
            known = self.by.get((mode, kind))
            self.by[mode, kind] = found if known is None else known + found


def count_ids(
    run: Run,
    vocab_size: int,
    *,
    only: str | None = None,
    on_row: Callable[[int], None] = lambda _: None,
) -> Counts:
    """Count a run's output ids; reads record batches and holds one at a time.

    Args:
        vocab_size: rows of the model's embedding.
        only: ``stop`` leaves out rows that their token budget cut.
        on_row: called with the number of rows seen so far.

    Raises:
        ConfigError: an id that is not below `vocab_size`.
        DamagedRun: a part that cannot be read.
    """
    import pyarrow as pa

    counts = Counts(vocab_size)
    for batch in run.batches(TRACES, _COLUMNS, batch_size=_BATCH):
        if only == "stop":
            batch = batch.filter(pa.array(is_complete(batch)))
        _count_batch(batch, counts)
        on_row(counts.rows)
    return counts


def _count_batch(batch: Any, counts: Counts) -> None:
    ids, lengths = _values(batch.column("output_ids"))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < counts.vocab_size:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise ConfigError(
            f"the run holds id {wrong}, which is not below the vocabulary's {counts.vocab_size} "
            "ids; --vocab-size is the number of rows of the target's embedding"
        )
    counts.rows += len(batch)
    modes = batch.column("template_kwargs").dictionary_encode()
    names, row_mode = modes.dictionary.to_pylist(), modes.indices.to_numpy(zero_copy_only=False)
    kinds = np.repeat(*_stretches(batch, lengths))
    id_mode = np.repeat(row_mode, lengths) if len(names) > 1 else None
    for number, mode in enumerate(names):
        for code, kind in enumerate(KINDS):
            of_kind = kinds == code
            counts._add(
                mode, kind, ids[of_kind if id_mode is None else of_kind & (id_mode == number)]
            )


def _stretches(batch: Any, lengths: Ids) -> tuple[NDArray[np.uint8], Ids]:
    """What kinds of ids each output holds one after the other, and how many of each: [3 * rows]."""
    _, before = _values(batch.column("prompt_ids"))
    start, end = (
        batch.column(name).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        for name in ("reasoning_start", "reasoning_end")
    )
    first = np.where(start < 0, 0, start - before).clip(0, lengths)
    last = np.where(start < 0, 0, np.where(end < 0, lengths, end - before)).clip(first, lengths)
    kinds = np.empty((len(batch), 3), np.uint8)
    kinds[:] = KINDS.index("answer"), KINDS.index("reasoning"), KINDS.index("answer")
    kinds[has_mark(batch, ["tool_calls"]), 2] = KINDS.index("calls")
    return kinds.ravel(), np.stack([first, last - first, lengths - last], axis=1).ravel()


def _values(column: Any) -> tuple[NDArray[np.int32], Ids]:
    """The numbers of a column of lists, one behind the other, and the lists' lengths."""
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), lengths
