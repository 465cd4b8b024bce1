"""Ids, packed: on their way from the tokenizer to the disk nobody makes Python numbers of them.

A Python number an id costs 40 bytes and, with hundreds of requests in flight, the processor's
caches; packed it is four bytes that are compared, searched and written at C speed. Invariant:
what is packed are whole numbers of 32 bits and nothing that only equals one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import orjson

from eyas import core

if TYPE_CHECKING:
    _Ids = Sequence[int]
else:  # asking whether something is one of an abstract class's costs more than most of what is done
    _Ids = object


class Ids(_Ids):
    """A list of ids that is packed. It equals a list of the same ids; it does not change."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data
        """int32 numbers, one after the other, in the machine's order."""

    @property
    def view(self) -> memoryview[int]:
        """The ids as numbers, not copied."""
        return memoryview(self.data).cast("i")

    def tolist(self) -> list[int]:
        """The ids as Python numbers."""
        return self.view.tolist()

    def __len__(self) -> int:
        return len(self.data) // 4

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        found = self.view[at]
        return found if isinstance(found, int) else found.tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return self.data == other.data
        if isinstance(other, list):
            return self.tolist() == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(self.tolist())


Sequence.register(Ids)

_LEAST = -(2**31)


def pack(ids: Sequence[int], least: int = _LEAST) -> Ids | None:
    """Ids packed; None if an item is no int32 (a float, a bool, a string) or is below `least`."""
    if isinstance(ids, Ids):
        return ids
    data = core.pack(ids, least)
    return None if data is None else Ids(data)


def as_list(ids: Sequence[int]) -> list[int]:
    """The same ids as a list; a list stays itself."""
    return ids if isinstance(ids, list) else list(ids)


def as_row(ids: Sequence[int]) -> list[int]:
    """The ids for a row that goes straight into the journal, which writes packed ones as a list."""
    return cast("list[int]", ids)


def as_json(value: Any) -> Any:
    """What orjson's `default` makes of packed ids."""
    if isinstance(value, Ids):
        return orjson.Fragment(core.write_list(value.data))
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def read_object(raw: bytes, names: tuple[str, ...]) -> dict[str, Any] | None:
    """A JSON object, with the lists under the names packed.

    None where it is something else or those lists hold anything else: it is then to be read as
    any other JSON, so that what is wrong can be said.
    """
    found = core.read_object(raw, names, orjson.loads)
    if found is not None:
        for name in names:
            data = found.get(name)
            if type(data) is bytes:  # which JSON does not have
                found[name] = Ids(data)
    return found


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
    if not packed or not core.within(packed.data, vocab_size):
        return first_bad(prompt_ids, vocab_size) or 0
    return None


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """The first position at which two sequences differ (the shorter's length if none)."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the ids end in an n-gram that is repeated to the end; see `core.plain.is_loop`."""
    packed = pack(ids)
    return packed is not None and core.is_loop(packed.data)
