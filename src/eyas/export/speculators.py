"""The directory that speculators trains from, written as its ``prepare-data`` would, in our order.

Source: speculators 0.9.0 reads it with ``datasets.load_from_disk``: Arrow streams named
``data-00000-of-0000N.arrow`` with ``input_ids`` and ``loss_mask`` (lists of int64) and ``seq_len``
(int64), the format "torch" in ``state.json``, and beside them ``token_freq.pt``, how often each id
is supervised, from which ``--draft-vocab-size`` chooses. The layout of the three files is that of
datasets 5.2, which reads it as its own; further columns are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eyas.export.forms import Finished, Form, Opening, carried_columns
from eyas.export.parquet import list_of, with_mask
from eyas.export.rows import lengths, loss_mask, numbers
from eyas.torch_file import save

_NAMES = {"double": "float64", "float": "float32", "timestamp[ms, tz=UTC]": "timestamp[ms, tz=UTC]"}
"""What datasets calls types that Arrow calls otherwise."""


class ArrowFile:
    """Writes one Arrow stream, and counts supervised ids."""

    def __init__(self, opening: Opening) -> None:
        self._carried = carried_columns(opening.schema)
        fields = [
            pa.field("input_ids", list_of(pa.int64())),
            pa.field("loss_mask", list_of(pa.int64())),
            pa.field("seq_len", pa.int64()),
            pa.field("id", pa.string()),
            *(opening.schema.field(own).with_name(name) for own, name in self._carried),
        ]
        features = {"info": {"features": features_of(fields)}}
        self.schema = pa.schema(fields, metadata={"huggingface": json.dumps(features)})
        self.counts = np.zeros(0, np.int64)
        self._stream = pa.ipc.new_stream(opening.path, self.schema)

    def write(self, rows: Any) -> None:
        """Add a batch of rows."""
        made = with_mask(rows, pa.int64(), pa.int64())
        made["seq_len"] = pa.array(lengths(rows).astype(np.int64))
        made |= {name: rows.column(own) for own, name in self._carried}
        columns = [made[name] for name in self.schema.names]
        self._stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=self.schema))
        column = rows.column("input_ids")
        starts = numbers(column.offsets)
        ids = numbers(column.values)[starts[0] : starts[-1]]
        counts = np.bincount(ids[loss_mask(rows).view(np.bool_)], minlength=len(self.counts))
        counts[: len(self.counts)] += self.counts
        self.counts = counts

    def close(self) -> None:
        """Write the stream's end."""
        self._stream.close()


def features_of(fields: Sequence[Any]) -> dict[str, Any]:
    """Columns as datasets describes them."""
    return {field.name: _feature(field.type) for field in fields}


def _feature(kind: Any) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": _NAMES.get(str(kind), str(kind)), "_type": "Value"}


def _finish(done: Finished) -> None:
    """Put beside each split's streams what datasets and speculators look for."""
    for split, paths in done.files.items():
        sinks = [done.sinks[path] for path in paths]
        _describe(paths, sinks, split if done.options.split else None)


def _describe(paths: list[Path], sinks: Sequence[Any], split: str | None) -> None:
    folder, schema = paths[0].parent, sinks[0].schema
    counts: Any = np.zeros(max(len(sink.counts) for sink in sinks), np.int64)
    digest = hashlib.blake2b(digest_size=8)
    for path, sink in zip(paths, sinks, strict=True):
        counts[: len(sink.counts)] += sink.counts
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    info = {"citation": "", "description": "", "features": features_of(list(schema)),
            "homepage": "", "license": ""}  # fmt: skip
    state: dict[str, Any] = {
        "_data_files": [{"filename": path.name} for path in paths],
        "_fingerprint": digest.hexdigest(),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": split,
    }
    for name, value in (("dataset_info.json", info), ("state.json", state)):
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True), encoding="utf-8")
    there = np.flatnonzero(counts)
    save(folder / "token_freq.pt", dict(zip(there.tolist(), counts[there].tolist(), strict=True)))


FORM = Form(
    name="speculators",
    about="the directory that speculators train reads, with no prepare-data between",
    suffix=".arrow",
    open=ArrowFile,
    is_directory=True,
    split_folders=True,
    stem="data",
    cuts_at=8192,
    trainer=(
        "speculators train takes the last tenth of the rows, in their order, for validation "
        "(train_data_ratio 0.9): --shuffle mixes them, --merge-turns keeps turns together",
        "it packs rows up to --total-seq-len (8,192 unless told otherwise) and cuts what is longer",
        "a row whose hidden states do not have its very ids is dropped with a warning only",
    ),
    no_columns=("messages",),
    finish=_finish,
)
