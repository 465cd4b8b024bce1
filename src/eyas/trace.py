"""Trace and Rejected: the two kinds of rows in a run, and their Arrow schemas.

Invariants: `prompt_ids` are the ids that were sent and `output_ids` the ids that came back,
untouched; the training sequence is their concatenation and the loss mask follows from their
lengths, so neither is stored. Field order is column order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
"""Version of the schemas and of the run's layout, kept in every part and in the manifest."""


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
        return self.finish_reason == "stop" or "eos_at_cap" in self.marks


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
    records: list[dict[str, Any]],
    prompt_ids: list[bytes | None],
    output_ids: list[bytes | None],
) -> pa.Table:
    """Rows as an Arrow table.

    Args:
        records: the columns besides the ids, by name.
        prompt_ids: one item a row: little-endian int32, or None for null.
        output_ids: likewise.
    """
    import pyarrow as pa

    schema = arrow_schema(kind)
    ids = {"prompt_ids": prompt_ids, "output_ids": output_ids}
    arrays = []
    for f in schema:
        if f.name in ids:
            arrays.append(_id_lists(ids[f.name]).cast(f.type))
            continue
        values = [record.get(f.name) for record in records]
        if f.name == "finished_at":
            values = [None if v is None else int(v * 1000) for v in values]
        arrays.append(pa.array(values, type=f.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _id_lists(rows: list[bytes | None]) -> pa.ListArray:
    """A list<int32> column from packed ids, without a Python number an id."""
    import pyarrow as pa

    ends = list(accumulate((len(row or b"") // 4 for row in rows), initial=0))
    data = pa.py_buffer(b"".join(row or b"" for row in rows))
    values = pa.Array.from_buffers(pa.int32(), ends[-1], [None, data])
    missing = [row is None for row in rows]
    return pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()),
        values,
        mask=pa.array(missing) if any(missing) else None,
    )


def from_record(record: dict[str, Any]) -> Trace | Rejected:
    """A row as it comes out of a part (or the journal) as an object."""
    moment = record.get("finished_at")
    if moment is not None and not isinstance(moment, int | float):
        record = {**record, "finished_at": moment.timestamp()}
    return Rejected(**record) if "reason" in record else Trace(**record)
