"""Lists of ids, looked through at C speed.

Invariant: what is packed are whole numbers of 32 bits and nothing that only equals one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

Packed = np.ndarray[tuple[int], np.dtype[np.uint32]]


def pack(ids: Sequence[int]) -> Packed | None:
    """Ids as unsigned numbers of 32 bits; None if an item is no int32 (a float, a bool, a string).

    Negative ids become large ones, so that one comparison with a vocabulary's size finds both.
    """
    try:
        packed = np.frombuffer(array("i", ids), np.uint32) if ids else np.zeros(0, np.uint32)
    except (TypeError, OverflowError):
        return None
    # JSON's false and true are ids 0 and 1 to everyone but `type`.
    if packed.size and packed.min() < 2:
        small: list[int] = (packed < 2).nonzero()[0].tolist()
        if any(type(ids[at]) is not int for at in small):
            return None
    return packed


def first_bad(ids: Sequence[object], size: int) -> int | None:
    """The position of the first item that is no whole number from 0 up to below `size`."""
    for at, item in enumerate(ids):
        if type(item) is not int or not 0 <= item < size:
            return at
    return None
