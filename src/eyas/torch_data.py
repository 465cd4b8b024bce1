"""A run's rows as tensors, and a collate that pads them. Needs torch; nothing else imports this.

Invariant: a row's ids are those of the run and its mask is 1 on every output id; nothing is shifted
and nothing added. What is left out or cut is counted.
"""

from __future__ import annotations

import operator
import os
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from eyas.errors import ConfigError
from eyas.library import id_lists
from eyas.store import TRACES, Run
from eyas.store.files import disk_errors
from eyas.trace import ended_itself

IGNORED = -100
"""What stands in ``labels`` where nothing is supervised; torch's cross entropy skips it."""
_COLUMNS = ("id", "prompt_ids", "output_ids", "finish_reason", "marks")


class TraceDataset(Dataset):  # type: ignore[misc]
    """Rows by number: ``{"input_ids": int64 [T], "loss_mask": int64 [T]}``.

    Made by `eyas.open_run(path).torch()`. Can be given to a `DataLoader`, with workers that are
    forked or spawned; the file of ids goes with the dataset that made it.
    """

    def __init__(
        self,
        run: Run,
        *,
        max_length: int | None = None,
        on_longer: str = "drop",
        only: str | None = None,
        directory: str | Path | None = None,
    ) -> None:
        if on_longer not in ("drop", "cut"):
            raise ConfigError(f"on_longer={on_longer!r} is not known; there are drop and cut")
        if only not in (None, "stop"):
            raise ConfigError(f"only={only!r} is not known; there is stop")
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length={max_length} leaves no row anything")
        self._most, self._cuts, self._only = max_length, on_longer == "cut", only
        self.left_out: Counter[str] = Counter()
        """Rows that are not there (``longer``, ``truncated``, ``unsupervised``: cut to their
        prompt) or not whole (``cut``)."""
        names: list[Any] = []
        prompts, lengths = array("q"), array("q")
        with disk_errors(Path(directory or tempfile.gettempdir())):
            file = tempfile.NamedTemporaryFile(  # noqa: SIM115
                prefix="eyas-ids-", suffix=".int32", dir=directory, delete=False
            )
            weakref.finalize(self, _remove, file.name, os.getpid())
            with file:
                for batch in run.batches(TRACES, _COLUMNS):
                    names.append(self._take(batch, file, prompts, lengths))
        self._path = file.name
        self._names = pa.chunked_array(names, pa.string())
        self._prompts = np.array(prompts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._ids: Any = None

    def _take(self, batch: Any, file: Any, prompts: array[int], lengths: array[int]) -> Any:
        """Write a batch's ids; returns the names of the rows that were taken."""
        ends = zip(
            batch.column("finish_reason").to_pylist(),
            batch.column("marks").to_pylist(),
            strict=True,
        )
        complete = [ended_itself(reason, marks) for reason, marks in ends]
        pairs = zip(id_lists(batch, "prompt_ids"), id_lists(batch, "output_ids"), strict=True)
        taken: list[int] = []
        for number, (prompt, output) in enumerate(pairs):
            if self._only == "stop" and not complete[number]:
                self.left_out["truncated"] += 1
                continue
            if self._most is not None and len(prompt) + len(output) > self._most:
                if not self._cuts or len(prompt) >= self._most:
                    self.left_out["unsupervised" if self._cuts else "longer"] += 1
                    continue
                self.left_out["cut"] += 1
                output = output[: self._most - len(prompt)]
            file.write(prompt.tobytes() + output.tobytes())
            prompts.append(len(prompt))
            lengths.append(len(prompt) + len(output))
            taken.append(number)
        return batch.column("id").take(pa.array(taken, pa.int64()))

    def row_id(self, number: int) -> str:
        """The id in the run of the row with a number."""
        return str(self._names[number])

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        at = operator.index(number)
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        if self._ids is None:
            self._ids = np.memmap(self._path, np.int32, "r")
        ids = torch.from_numpy(self._ids[self._starts[at] : self._starts[at + 1]].astype(np.int64))
        mask = torch.ones_like(ids)
        mask[: self._prompts[at]] = 0
        return {"input_ids": ids, "loss_mask": mask}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}


def collate(rows: Sequence[dict[str, torch.Tensor]], *, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """Rows as one batch, padded at the end to the longest.

    Args:
        rows: as `TraceDataset` gives them.
        pad_id: what stands in ``input_ids`` behind a row's end; no mask ever has it.

    Returns:
        int64 tensors: ``input_ids``, ``attention_mask`` (1 on a row's own ids), ``loss_mask`` (1
        on supervised ids), ``labels`` (the supervised ids at their own places, -100 elsewhere;
        nothing is shifted), each [rows, longest], and ``lengths`` [rows].
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.long)
    shape = (len(rows), int(lengths.max()) if rows else 0)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    mask, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for number, row in enumerate(rows):
        end = len(row["input_ids"])
        ids[number, :end], mask[number, :end] = row["input_ids"], row["loss_mask"]
        attention[number, :end] = 1
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "loss_mask": mask,
        "labels": torch.where(mask == 1, ids, IGNORED),
        "lengths": lengths,
    }


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy goes before the file may
        with suppress(OSError):
            os.unlink(path)
