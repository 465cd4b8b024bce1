"""A run as data: record batches, tensors, or one trace after the other.

Invariant: what is given are the good rows that were durable when it was asked for, each once, also
while the run is written; ids are as they lie in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.errors import ConfigError
from eyas.store import TRACES, Run
from eyas.trace import Trace, arrow_schema

if TYPE_CHECKING:
    from eyas.torch_data import TraceDataset

DERIVED = ("input_ids", "loss_mask")
"""Columns that follow from `prompt_ids` and `output_ids`, and are made when they are asked for."""


def open_run(path: str | Path) -> OpenRun:
    """Open a run for reading; it may still be written.

    Raises:
        DamagedRun: if there is none, or its manifest cannot be read.
    """
    return OpenRun(path)


class OpenRun(Run):
    """A run that is iterated over, and given to Arrow or torch."""

    def __iter__(self) -> Iterator[Trace]:
        """The good rows, in the order of the parts; read as a stream.

        Raises:
            DamagedRun: a part that cannot be read.
        """
        return self.traces()

    def __len__(self) -> int:
        """How many good rows there are now."""
        return self.count()

    def arrow(self, columns: Sequence[str] | None = None, *, batch_size: int = 4096) -> Any:
        """The good rows as a `pyarrow.RecordBatchReader`, which reads a batch at a time.

        Args:
            columns: which, in this order; None for all that are stored. ``input_ids`` (prompt and
                output, list<int32>) and ``loss_mask`` (0 over the prompt, 1 over the output,
                list<int8>) are made of the stored ones.
            batch_size: rows of a batch, at most.

        Raises:
            ConfigError: a column that there is not.
            DamagedRun: when a part is met that cannot be read.
        """
        import pyarrow as pa

        stored = arrow_schema(Trace)
        known = {field.name: field for field in stored}
        known |= {name: pa.field(name, _list_of(kind)) for name, kind in _KINDS.items()}
        names = stored.names if columns is None else list(columns)
        for name in names:
            if name not in known:
                raise ConfigError(f"a run has no column {name!r}; it has {', '.join(known)}")
        schema = pa.schema([known[name] for name in names])
        needed = {name for name in names if name not in DERIVED}
        if needed != set(names):
            needed |= {"prompt_ids", "output_ids"}

        def batches() -> Iterator[Any]:
            for batch in self.batches(TRACES, sorted(needed), batch_size=batch_size):
                made = [_derived(batch, n) if n in DERIVED else batch.column(n) for n in names]
                yield pa.RecordBatch.from_arrays(made, schema=schema)

        return pa.RecordBatchReader.from_batches(schema, batches())

    def torch(
        self,
        *,
        max_length: int | None = None,
        on_longer: str = "drop",
        only: str | None = None,
        directory: str | Path | None = None,
    ) -> TraceDataset:
        """The good rows as a `torch.utils.data.Dataset` of tensors.

        The run is read once; its ids then lie in a temporary file of 4 bytes an id, so that memory
        holds some 30 bytes a row and workers share the rest.

        Args:
            max_length: the most ids of a row, prompt and output together.
            on_longer: ``drop`` leaves longer rows out, ``cut`` cuts them at the end; both are
                counted in ``left_out``.
            only: ``stop`` leaves out rows that their token budget cut.
            directory: where the temporary file lies; the system's place for such if None.

        Raises:
            ConfigError: torch is not installed, or an argument is none of these.
            DamagedRun: a part that cannot be read.
        """
        try:
            from eyas.torch_data import TraceDataset
        except ImportError as error:
            raise ConfigError(
                f"open_run(...).torch() needs torch, which cannot be imported here ({error}); "
                "install it, or read the run with .arrow()"
            ) from error
        return TraceDataset(
            self, max_length=max_length, on_longer=on_longer, only=only, directory=directory
        )


_KINDS = {"input_ids": "int32", "loss_mask": "int8"}


def _list_of(kind: str) -> Any:
    import pyarrow as pa

    return pa.list_(pa.field("element", getattr(pa, kind)()))


def _derived(batch: Any, name: str) -> Any:
    """A column that is made of the prompt's and the output's ids."""
    import pyarrow as pa

    prompts, outputs = id_lists(batch, "prompt_ids"), id_lists(batch, "output_ids")
    rows: list[Any]
    if name == "input_ids":
        rows = [ids for pair in zip(prompts, outputs, strict=True) for ids in pair]
    else:
        rows = [
            made for p, o in zip(prompts, outputs, strict=True)
            for made in (np.zeros(len(p), np.int8), np.ones(len(o), np.int8))
        ]  # fmt: skip
    lengths = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    values = np.concatenate(rows) if rows else np.zeros(0, _KINDS[name])
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values), type=_list_of(_KINDS[name])
    )


def id_lists(batch: Any, name: str) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """The lists of ids in a column, each a view into the batch."""
    column = batch.column(name)
    values = column.values.to_numpy(zero_copy_only=True)
    return [
        values[a:b]
        for a, b in zip(
            column.offsets[:-1].to_pylist(), column.offsets[1:].to_pylist(), strict=True
        )
    ]
