"""The names under which conversations go in a run.

Invariants: a name belongs to one conversation; a name that was stored stays. A name is known by
64 bits of its hash, which differ from process to process, and its owner by 96 bits of its key:
of a million names two share a hash once in 40 million runs, and one of them then gets digits of
its key that it did not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from eyas.store.table import Table, Words

_DIGITS = (8, 16, 32)
"""How many digits of its key a conversation's name gets where another one has its id."""
_LOW = (1 << 64) - 1


class Names:
    """Who has which name."""

    def __init__(self) -> None:
        self._table = Table()
        self._lately: dict[int, int] = {}
        """Owners by name, of names that are not in the table yet."""
        self._fetched: dict[int, int | None] = {}
        """Owners by name, as the table has them."""
        self._any_kept = False

    def keep(self, names: Words, first: Words, second: Words) -> None:
        """Note names that were stored (`hashes_of` them), and the keys of their conversations."""
        self._any_kept = True
        self._table.add(names, first, second.astype(np.uint32))

    def choose(self, wanted: Sequence[tuple[str, bytes]]) -> list[str]:
        """The names of conversations with these ids and keys, each asked once.

        The id; where another conversation has it, with the beginning of the key. A conversation
        that has a longer name already keeps it.
        """
        self._fetch(given for given, _ in wanted)
        open_names = [
            (given, key)
            for given, key in wanted
            if (owner := self._owner(given)) != _number(key) and (self._any_kept or owner)
        ]
        self._look_up([hash(name) for given, key in open_names for name in _longer(given, key)])
        return [self._choose(given, key) for given, key in wanted]

    def settle(self, stored: Sequence[tuple[str, bytes]]) -> list[str]:
        """The names that rows of another run get here, where they were stored under these.

        Asking again gives the same answer, whatever was settled meanwhile.
        """
        self._fetch(name for name, _ in stored)
        return [self._settle(name, key) for name, key in stored]

    def _choose(self, given_id: str, key: bytes) -> str:
        number = _number(key)
        owner = self._owner(given_id)
        if owner == number:
            return given_id
        if owner is None and not self._any_kept:
            self._lately[hash(given_id)] = number
            return given_id
        longer = _longer(given_id, key)
        for name in longer:
            if self._owner(name) == number:
                return name
        for name in (given_id, *longer):
            owner = self._owner(name)
            if owner is None:
                self._lately[hash(name)] = owner = number
            if owner == number:
                return name
        raise AssertionError("two keys with the same 96 bits")

    def _settle(self, stored: str, key: bytes) -> str:
        number = _number(key)
        if self._owner(stored) == number:
            return stored
        for digits in _DIGITS:
            given_id = stored.removesuffix(f"-{key.hex()[:digits]}")
            if given_id != stored and self._owner(given_id) == number:
                return given_id
        return self._choose(stored, key)

    def _owner(self, name: str) -> int | None:
        """96 bits of the key of the conversation that has a name."""
        at = hash(name)
        owner = self._lately.get(at)
        if owner is None:
            if at not in self._fetched:
                self._look_up([at])
            owner = self._fetched[at]
        return owner

    def _fetch(self, names: Iterable[str]) -> None:
        """Look names up together."""
        if len(self._lately) >= self._table.may_wait:
            owners = self._lately.values()
            self._table.add(
                _hashes(self._lately),
                np.fromiter((owner & _LOW for owner in owners), np.uint64, len(owners)),
                np.fromiter((owner >> 64 for owner in owners), np.uint32, len(owners)),
            )
            self._lately = {}
        self._fetched = {}
        self._look_up([hash(name) for name in names])

    def _look_up(self, hashes: list[int]) -> None:
        table = self._table
        at = table.find(_hashes(hashes))
        self._fetched.update(dict.fromkeys(hashes))
        for n in np.flatnonzero(at >= 0):
            place = at[n]
            owner = int(table.second[place]) | int(table.values[place]) << 64
            self._fetched[hashes[n]] = owner


def _longer(given_id: str, key: bytes) -> list[str]:
    digits = key.hex()
    return [f"{given_id}-{digits[:count]}" for count in _DIGITS]


def _number(key: bytes) -> int:
    """96 bits of a key, in the order of the table's columns."""
    return int.from_bytes(key[:12], "little")


def hashes_of(names: Iterable[str]) -> Words:
    """The 64 bits by which names are known."""
    return _hashes(map(hash, names))


def _hashes(hashes: Iterable[int]) -> Words:
    return np.fromiter(hashes, np.int64).view(np.uint64)
