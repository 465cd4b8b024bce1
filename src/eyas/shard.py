"""One of N parts of an input, so that the jobs of an array need not speak with each other.

Invariant: each key is in exactly one of N shards, and in which depends on the key and N alone:
never on the order of the input, its files, or what else it holds.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

_FORM = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


class Shard(NamedTuple):
    """Shard `number` (from 1) of `of`; written ``3/8``."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``3/8`` as a shard.

        Raises:
            ValueError: a sentence, if it is none.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ValueError("a shard is written I/N, such as 3/8 for the third of eight")
        number, count = int(found[1]), int(found[2])
        if not 1 <= number <= count:
            raise ValueError(f"shards are counted from 1, so of {count} there is none {number}")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def holds(self, key: bytes) -> bool:
        """Whether a conversation or line with this key is in the shard."""
        return int.from_bytes(key[:8], "little") % self.of == self.number - 1
