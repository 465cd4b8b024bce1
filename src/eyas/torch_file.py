"""Files as ``torch.save`` writes them, made without torch.

Invariant: a file holds one dict or one tensor, of plain integers and one-dimensional int64 or bool
tensors, and ``torch.load`` gives it back in its safe mode (``weights_only=True``, its default).

Source: torch 2.13, ``torch/serialization.py``. A file is an uncompressed zip of a pickle
(``data.pkl``, protocol 2), in which a tensor is a call of ``_rebuild_tensor_v2`` with the name of
its storage, and of the storages' bytes (``data/0``). The tests load such files with torch itself.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.int64] | NDArray[np.bool_]
_STORAGES = {np.dtype(np.int64): b"LongStorage", np.dtype(np.bool_): b"BoolStorage"}
_ROOT = "archive"
_MOMENT = (1980, 1, 1, 0, 0, 0)
"""The zip's oldest, so that equal contents are equal bytes."""


def save(path: Path, value: Tensor | Mapping[str, Tensor] | Mapping[int, int]) -> None:
    """Write a tensor, tensors by name, or numbers by number.

    Raises:
        TypeError: another kind of value.
        OverflowError: a number of more than 64 bits.
    """
    storages: list[Tensor] = []
    if isinstance(value, np.ndarray):
        body = _tensor(value, storages)
    else:
        entries = b"".join(
            _string(key) + _tensor(item, storages)
            if isinstance(key, str) and isinstance(item, np.ndarray)
            else _number(key) + _number(item)
            for key, item in value.items()
        )
        body = b"}(" + entries + b"u"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        _put(file, "data.pkl", b"\x80\x02" + body + b".")
        _put(file, "byteorder", b"little")
        for number, storage in enumerate(storages):
            _put(file, f"data/{number}", storage.astype(storage.dtype.newbyteorder("<")).tobytes())
        _put(file, "version", b"3\n")


def _put(file: zipfile.ZipFile, name: str, data: bytes) -> None:
    file.writestr(zipfile.ZipInfo(f"{_ROOT}/{name}", _MOMENT), data)


def _tensor(array: Tensor, storages: list[Tensor]) -> bytes:
    """The pickle's operations that call for a tensor; its storage is put to the others."""
    kind = _STORAGES.get(array.dtype)
    if kind is None or array.ndim != 1:
        raise TypeError(f"a tensor of {array.dtype} with {array.ndim} dimensions cannot be written")
    key, count = str(len(storages)), len(array)
    storages.append(array)
    storage = (
        b"(" + _string("storage") + b"ctorch\n" + kind + b"\n" + _string(key) + _string("cpu")
        + _number(count) + b"tQ"
    )  # fmt: skip
    shape, stride = _number(count) + b"\x85", _number(1) + b"\x85"
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = storage + _number(0) + shape + stride + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def _string(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: Any) -> bytes:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
