"""Trace and Rejected: the two kinds of rows in a run, and their Arrow schemas.

Invariants: `prompt_ids` are the ids that were sent and `output_ids` the ids that came back,
untouched; the training sequence is their concatenation and the loss mask follows from their
lengths, so neither is stored. Field order is column order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from eyas import core

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
"""Version of the schemas and of the run's layout, kept in every part and in the manifest."""


def ended_itself(finish_reason: str, marks: Collection[str]) -> bool:
    """Whether the model ended the turn itself (a stop id at the cap counts)."""
    return finish_reason == "stop" or "eos_at_cap" in marks


@dataclass(slots=True)
class Trace:
    """One generation event that passed every check."""

    id: str
    """``conversation_id/sample/turn``; unique in the run."""
    conversation_id: str
    turn: int
    """0-based; the n-th assistant answer of the conversation."""
    sample: int
    """0-based; one of ``--n`` independent threads of the conversation."""
    key: str
    """The conversation's key, 32 hex digits: hash of its given id, messages and tools."""
    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    """``stop`` or ``length``, as the engine said."""
    stop_id: int | None
    """The last output id where it ended the turn, else null."""
    reasoning_start: int | None
    """Position in prompt_ids + output_ids of the first id after the thinking opener."""
    reasoning_end: int | None
    """Position of the closer's first id; null where there is none."""
    marks: list[str] = field(default_factory=list)
    messages: str | None = None
    """JSON of the messages that were rendered; null for ready-made prompt ids."""
    tools: str | None = None
    """JSON of the tools' definitions that were rendered; null without tools."""
    metadata: str = "{}"
    """JSON of the input row's other columns."""
    source: str = ""
    """The input file."""
    template_kwargs: str = "{}"
    """JSON of the chat template's switches."""
    sampling: str = "{}"
    """JSON of the sampling parameters that were sent."""
    seed: int = 0
    max_new_tokens: int = 0
    """The token budget that was sent (clamped to the context)."""
    joints: list[int] = field(default_factory=list)
    """Positions in output_ids at which a continued answer was asked for anew; mostly empty."""
    logprobs: list[float] | None = None
    """Natural logarithms of the output ids' probabilities; null unless asked for."""
    server: str = ""
    """The server's address, without credentials."""
    weight_version: str | None = None
    finished_at: float = 0.0
    """When the answer came, in seconds since 1970 (UTC)."""

    @property
    def input_ids(self) -> list[int]:
        """The training sequence."""
        return self.prompt_ids + self.output_ids

    @property
    def loss_mask(self) -> list[int]:
        """0 over the prompt, 1 over every output id, the stop id included."""
        return [0] * len(self.prompt_ids) + [1] * len(self.output_ids)

    @property
    def complete(self) -> bool:
        """Whether the model ended the turn itself (a stop id at the cap counts)."""
        return ended_itself(self.finish_reason, self.marks)


@dataclass(slots=True)
class Rejected:
    """A unit that was refused, or an input line that cannot be used; nothing is dropped."""

    id: str
    conversation_id: str
    turn: int
    sample: int
    key: str
    """The conversation's key; for an input line the hash of its bytes."""
    reason: str
    """The check, error or fault by name; `docs/format.md` lists them."""
    detail: str
    """A sentence: what was seen."""
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    """What the engine gave, as far as it was ids; for diagnosis only."""
    finish_reason: str | None = None
    marks: list[str] = field(default_factory=list)
    messages: str | None = None
    tools: str | None = None
    metadata: str = "{}"
    source: str = ""
    line: int | None = None
    """The line or row of the input file, counted from 1."""
    text: str | None = None
    """The input line or the server's answer as it stood, cut."""
    template_kwargs: str = "{}"
    sampling: str = "{}"
    seed: int | None = None
    max_new_tokens: int | None = None
    server: str = ""
    weight_version: str | None = None
    tries: list[str] = field(default_factory=list)
    """What each failed try of the request met, in order."""
    finished_at: float = 0.0


_LISTS = {"prompt_ids": "int32", "output_ids": "int32", "logprobs": "float32",
          "joints": "int32", "marks": "string", "tries": "string"}  # fmt: skip
_NUMBERS = {"turn": "int32", "sample": "int32", "stop_id": "int32", "reasoning_start": "int32",
            "reasoning_end": "int32", "seed": "int64", "max_new_tokens": "int32",
            "line": "int64"}  # fmt: skip


LATER_COLUMNS = ("joints", "tools")
"""Columns that parts of an earlier eyas do not have."""


def arrow_schema(kind: type[Trace] | type[Rejected]) -> pa.Schema:
    """The Arrow schema of a part; ``finished_at`` is a UTC timestamp in milliseconds."""
    import pyarrow as pa

    columns = []
    for f in fields(kind):
        if f.name in _LISTS:
            column = pa.list_(pa.field("element", getattr(pa, _LISTS[f.name])()))
        elif f.name in _NUMBERS:
            column = getattr(pa, _NUMBERS[f.name])()
        elif f.name == "finished_at":
            column = pa.timestamp("ms", tz="UTC")
        else:
            column = pa.string()
        columns.append(pa.field(f.name, column))
    return pa.schema(columns, metadata={"eyas.format": str(FORMAT_VERSION), "eyas.kind":
                                        kind.__name__.lower()})  # fmt: skip


def to_table(
    kind: type[Trace] | type[Rejected],
    columns: list[bytes],
    prompt_ids: list[bytes],
    output_ids: list[bytes],
) -> pa.Table:
    """Rows as an Arrow table, made from JSON without a Python object a value.

    Args:
        columns: each row's columns besides the ids, a JSON object without line breaks.
        prompt_ids: each row's ids, a JSON list of int32 without spaces, or null.
        output_ids: likewise.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import json

    schema = arrow_schema(kind)
    if not columns:
        return schema.empty_table()
    ids = {"prompt_ids": prompt_ids, "output_ids": output_ids}
    moment = pa.field("finished_at", pa.float64())
    read = pa.schema([moment if f.name == moment.name else f for f in schema if f.name not in ids])
    data = b"\n".join(columns)
    table = json.read_json(
        pa.BufferReader(data),
        read_options=json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=json.ParseOptions(explicit_schema=read, unexpected_field_behavior="error"),
    )
    # Arrays are made from buffers: `pyarrow.array` and `pyarrow.compute` would import pandas
    # first, where that is installed.
    seconds = np.frombuffer(table.column(moment.name).combine_chunks().buffers()[1], np.float64)
    milliseconds = pa.py_buffer((seconds[: len(table)] * 1000).astype(np.int64))
    made = {
        moment.name: pa.Array.from_buffers(
            schema.field(moment.name).type, len(table), [None, milliseconds]
        ),
        **{name: _id_lists(rows) for name, rows in ids.items()},
    }
    return pa.Table.from_arrays(
        [made[f.name] if f.name in made else table.column(f.name) for f in schema], schema=schema
    )


def _id_lists(rows: list[bytes]) -> pa.ListArray:
    """A list<int32> column from JSON lists."""
    import numpy as np
    import pyarrow as pa

    values, lengths = core.read_lists(rows)
    ends = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(np.frombuffer(lengths, np.int32), out=ends[1:])
    valid = np.packbits([row != b"null" for row in rows], bitorder="little")
    return pa.ListArray.from_buffers(
        pa.list_(pa.field("element", pa.int32())),
        len(rows),
        [pa.py_buffer(valid), pa.py_buffer(ends)],
        children=[
            pa.Array.from_buffers(pa.int32(), len(values) // 4, [None, pa.py_buffer(values)])
        ],
    )


def from_record(record: dict[str, Any]) -> Trace | Rejected:
    """A row as it comes out of a part (or the journal) as an object."""
    moment = record.get("finished_at")
    if moment is not None and not isinstance(moment, int | float):
        record = {**record, "finished_at": moment.timestamp()}
    return Rejected(**record) if "reason" in record else Trace(**record)
