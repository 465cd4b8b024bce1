"""The names under which conversations go in a run.

Invariants: a name belongs to one conversation; a name that was stored stays. Memory is a hash
and a key a name.
"""

from __future__ import annotations

_DIGITS = (8, 16, 32)
"""How many digits of its key a conversation's name gets where another one has its id."""


class Names:
    """Who has which name."""

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}

    def keep(self, name: str, key: bytes) -> None:
        """Note a name that was stored."""
        self._keys[hash(name)] = key

    def choose(self, given_id: str, key: bytes) -> str:
        """The given id; where another conversation has it, with the beginning of the key.

        A conversation that has a longer name already keeps it.
        """
        longer = [f"{given_id}-{key.hex()[:digits]}" for digits in _DIGITS]
        for name in longer:
            if self._keys.get(hash(name)) == key:
                return name
        for name in (given_id, *longer):
            if self._keys.setdefault(hash(name), key) == key:
                return name
        raise AssertionError("two keys with the same 128 bits")

    def settle(self, stored: str, key: bytes) -> str:
        """The name that a row of another run gets here, where it was stored under `stored`.

        Asking again gives the same answer, whatever was settled meanwhile.
        """
        if self._keys.get(hash(stored)) == key:
            return stored
        for digits in _DIGITS:
            given_id = stored.removesuffix(f"-{key.hex()[:digits]}")
            if given_id != stored and self._keys.get(hash(given_id)) == key:
                return given_id
        return self.choose(stored, key)
