"""What is done with every id of an answer, in plain Python: what it means, and where it runs when
the compiled functions (`_fast.c`) do not.

Invariant: each function gives what its namesake in `_fast.c` gives, for every input. Ids are bytes:
int32 numbers, one after the other, in the machine's order.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import orjson

_INT32 = 2**31


def pack(items: Sequence[object], least: int) -> bytes | None:
    """The items as ids; None if one of them is no whole number from `least` up to below 2**31
    (but a bool, say)."""
    if any(type(item) is not int or not least <= item < _INT32 for item in items):
        return None
    return array("i", cast("Sequence[int]", items)).tobytes()


def within(ids: bytes, size: int) -> bool:
    """Whether all ids are from 0 up to below `size`."""
    packed = np.frombuffer(ids, np.uint32)  # negative ones are large ones there
    return not packed.size or int(packed.max()) < size


def read_object(
    raw: bytes, names: tuple[str, ...], loads: Callable[[bytes], object]
) -> dict[str, object] | None:
    """A JSON object, in which the lists of ids under some names are bytes.

    None where it is no object, where such a list holds anything but whole numbers from 0 up to
    below 2**31, or where it is easier to give up (escapes in a name): it is then to be read as any
    other JSON, so that what is wrong can be said.

    Args:
        raw: the JSON text.
        names: of the object itself, not of what is within it.
        loads: what reads the rest; it raises ValueError where that is no JSON.
    """
    try:
        found = loads(raw)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    for name in names:
        items = found.get(name)
        if type(items) is list:
            ids = pack(items, 0)
            if ids is None:
                return None
            found[name] = ids
    return found


def read_lists(rows: list[bytes]) -> tuple[bytes, bytes]:
    """The ids of JSON lists without spaces, joined, and the length of each list, as int32.

    ``null`` is an empty list.

    Raises:
        ValueError: one of them is anything else.
    """
    values, lengths = [], []
    for row in rows:
        items = [] if row == b"null" else orjson.loads(row)
        ids = pack(items, -_INT32) if type(items) is list and b" " not in row else None
        if ids is None:
            raise ValueError("not a JSON list of int32 without spaces")
        values.append(ids)
        lengths.append(len(items))
    return b"".join(values), array("i", lengths).tobytes()


def read_lines(block: bytes, kind: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The prompts, outputs and columns of a journal's lines of one kind; see `eyas.store.journal`.

    A line that is torn or damaged, or has no line break, is passed over.
    """
    found: tuple[list[bytes], list[bytes], list[bytes]] = [], [], []
    for line in block.split(b"\n")[:-1]:
        if line[9:10] != kind or line[:9] != b"%08x " % zlib.crc32(line[9:]):
            continue
        pieces = line[9:].split(b" ", 3)
        if pieces[0] == kind and len(pieces) == 4:
            for pieces_so_far, piece in zip(found, pieces[1:], strict=True):
                pieces_so_far.append(piece)
    return found


def write_list(ids: bytes) -> bytes:
    """The ids as a JSON list without spaces."""
    return orjson.dumps(np.frombuffer(ids, np.int32), option=orjson.OPT_SERIALIZE_NUMPY)


def find(ids: bytes, table: bytes) -> list[int] | None:
    """The positions of the ids whose byte in a table of the vocabulary is not zero.

    None if an id is outside of the table.
    """
    if not within(ids, len(table)):
        return None
    packed = np.frombuffer(ids, np.int32)
    places: list[int] = np.frombuffer(table, np.uint8)[packed].nonzero()[0].tolist()
    return places


def spells(ids: bytes, pieces: bytes, ends: bytes, text: str) -> bool:
    """Whether the bytes for which ids stand, joined, are a text in UTF-8.

    Args:
        ids: what is outside of the vocabulary stands for nothing.
        pieces: what each id of the vocabulary stands for, joined.
        ends: where in `pieces` the bytes of each id end, as int32.
        text: the text.
    """
    bounds = (0, *array("i", ends))
    known = len(bounds) - 1
    joined = b"".join(
        pieces[bounds[id_] : bounds[id_ + 1]] for id_ in array("i", ids) if 0 <= id_ < known
    )
    try:
        return joined == text.encode()
    except UnicodeEncodeError:  # half a surrogate, which no bytes of a vocabulary spell
        return False


PERIODS = 128
REPEATS = 4
LOOP_IDS = 64


def is_loop(ids: bytes) -> bool:
    """Whether the ids end in an n-gram (of at most 128 ids) repeated to the end.

    It must be there at least 4 times and fill at least 64 ids, so that a short rule of dashes
    or a "ha ha ha" does not count.
    """
    n = len(ids) // 4
    for period in range(1, PERIODS + 1):
        span = max(REPEATS * period, LOOP_IDS + period)
        if span > n:
            break
        if ids[4 * (n - span + period) :] == ids[4 * (n - span) : -4 * period]:
            return True
    return False
