"""Ids, packed: on their way from the tokenizer to the disk nobody makes Python numbers of them.

A Python number an id costs 40 bytes and, with hundreds of requests in flight, the processor's
caches; packed it is four bytes that are compared, searched and written at C speed. Invariant:
what is packed are whole numbers of 32 bits and nothing that only equals one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast, overload

import numpy as np
import simdjson

Packed = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Ids as unsigned numbers of 32 bits. Negative ones are large ones there, so that one comparison
with a vocabulary's size finds both."""


class Ids(Sequence[int]):
    """A list of ids that is packed. It equals a list of the same ids; it does not change."""

    __slots__ = ("packed",)

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def tolist(self) -> list[int]:
        """The ids as Python numbers."""
        numbers: list[int] = self.packed.view(np.int32).tolist()
        return numbers

    def numbers(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The ids as numpy's numbers, not copied."""
        return self.packed.view(np.int32)

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        found: int | list[int] = self.packed[at].view(np.int32).tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return self.packed.tobytes() == other.packed.tobytes()
        return self.tolist() == other

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(self.tolist())


def pack(ids: Sequence[int]) -> Packed | None:
    """Ids packed; None if an item is no int32 (a float, a bool, a string)."""
    if isinstance(ids, Ids):
        return ids.packed
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


def as_list(ids: Sequence[int]) -> list[int]:
    """The same ids as a list; a list stays itself."""
    return ids if isinstance(ids, list) else list(ids) if not isinstance(ids, Ids) else ids.tolist()


def as_row(ids: Sequence[int]) -> list[int]:
    """The ids for a row that goes straight into the journal, which writes packed ones as a list."""
    return cast("list[int]", ids)


def as_json(value: Any) -> Any:
    """What orjson's `default` makes of packed ids, under its option for numpy."""
    if isinstance(value, Ids):
        return value.numbers()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def first_bad(ids: Sequence[object], size: int) -> int | None:
    """The position of the first item that is no whole number from 0 up to below `size`."""
    for at, item in enumerate(ids):
        if type(item) is not int or not 0 <= item < size:
            return at
    return None


def bad_prompt_id(prompt_ids: Sequence[int], vocab_size: int) -> int | None:
    """The position of an id that must not be sent, or None.

    One id outside the vocabulary takes a whole SGLang server down (CUDA assert), so this
    comes before every request.
    """
    packed = pack(prompt_ids)
    if packed is None or not packed.size or packed.max() >= vocab_size:
        return first_bad(prompt_ids, vocab_size) or 0
    return None


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """The first position at which two sequences differ (the shorter's length if none)."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


_LOOP_PERIODS = 128
_LOOP_REPEATS = 4
_LOOP_IDS = 64


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the ids end in an n-gram (of at most 128 ids) repeated to the end.

    It must be there at least 4 times and fill at least 64 ids, so that a short rule of dashes
    or a "ha ha ha" does not count.
    """
    if len(ids) < _LOOP_IDS:
        return False
    ids = ids[-_LOOP_REPEATS * _LOOP_PERIODS :]
    end = ids if isinstance(ids, memoryview) else array("q", ids)
    n, size, tail = len(end), end.itemsize, end.tobytes()
    last = tail[-size:]
    at = tail.find(last, size * (n - 1 - min(_LOOP_PERIODS, n // _LOOP_REPEATS)), -size)
    while at >= 0:
        period = n - 1 - at // size
        span = max(_LOOP_REPEATS * period, _LOOP_IDS + period)
        if at % size == 0 and span <= n:  # and not in the middle of two ids
            repeated = tail[size * (n - span + period) :]
            if repeated == tail[size * (n - span) : -size * period]:
                return True
        at = tail.find(last, at + 1, -size)
    return False


class IdReader:
    """Reads JSON objects in which some lists are ids."""

    def __init__(self, *names: str) -> None:
        self._names = frozenset(names)
        self._parser = simdjson.Parser()

    def read(self, raw: bytes) -> dict[str, Any] | None:
        """A JSON object, with the lists under the names packed.

        None where it is something else or those lists hold anything else: it is then to be read
        as any other JSON, so that what is wrong can be said.
        """
        try:
            return self._read(raw)
        except (ValueError, TypeError, RuntimeError):
            self._parser = simdjson.Parser()  # the failed one may still be referred to
            return None

    def _read(self, raw: bytes) -> dict[str, Any] | None:
        document = self._parser.parse(raw)
        if not isinstance(document, simdjson.Object):
            return None
        found: dict[str, Any] = {}
        for name in document.keys():  # noqa: SIM118 - and `items` would make lists of all arrays
            if name in found:
                raise ValueError(f"{name!r} stands there twice")
            value: object = document[name]
            if isinstance(value, simdjson.Object):
                found[name] = value.as_dict()
            elif isinstance(value, simdjson.Array):
                if name not in self._names:
                    found[name] = value.as_list()
                elif _is_flat(raw, name.encode()):
                    found[name] = _read_ids(value)
                else:
                    raise ValueError(f"{name!r} holds lists")
            else:
                found[name] = value
        return found


def _is_flat(raw: bytes, name: bytes) -> bool:
    """Whether no list stands in a list of this name: simdjson would flatten it.

    A quoted name does not occur in a string, where its quotes would be escaped. What is not
    found (since it is escaped itself) is not known to be flat.
    """
    at = raw.find(b'"%b"' % name)
    if at < 0:
        return False
    while at >= 0:
        begin, end = raw.find(b"[", at), raw.find(b"]", at)
        if raw.find(b"[", begin + 1, end) >= 0:
            return False
        at = raw.find(b'"%b"' % name, at + 1)
    return True


def _read_ids(given: simdjson.Array) -> Sequence[int]:
    if not len(given):
        return []
    numbers = np.frombuffer(given.as_buffer(of_type="u"), np.uint64)
    first: object = given[0]
    if not isinstance(first, int) or len(numbers) != len(given) or numbers.max() >= 2**31:
        raise ValueError("not a plain list of ids")
    return Ids(numbers.astype(np.uint32))
