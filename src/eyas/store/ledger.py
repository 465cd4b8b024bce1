"""What a run already holds, and which part of the input it is to hold.

Invariants: a unit (conversation, sample, turn) that is in the ledger is never generated again;
a conversation keeps the name under which its first row was stored; two conversations never
share a name. Names and occurrences are told from the whole input, whatever the shard, so that
they are the same in each. Memory is some hundred bytes a row and independent of the rows' length.
"""

from __future__ import annotations

from pathlib import Path

from eyas.conversation import nth_key, row_key
from eyas.shard import Shard
from eyas.store.names import Names
from eyas.store.parts import REJECTED, TRACES, parts, read_batches

GOOD, TRUNCATED, REFUSED = 0, 1, 2
"""Status of a unit: complete; stored but cut at the budget; in ``rejected/``."""


class Ledger:
    """The units of a run, by key."""

    def __init__(self, shard: Shard | None = None) -> None:
        self.shard = shard
        self._status: dict[bytes, int] = {}
        self._names = Names()
        self._seen: dict[bytes, int] = {}
        self.done = 0
        self.rejected = 0

    @classmethod
    def load(cls, run: Path, shard: Shard | None = None) -> Ledger:
        """Read the sealed rows' keys (the journal must have been sealed before)."""
        ledger = cls(shard)
        columns = ["conversation_id", "turn", "sample", "key"]
        for path in parts(run, TRACES):
            for batch in read_batches(path, [*columns, "finish_reason", "marks"]):
                ids, turns, samples, keys, reasons, marks = (
                    batch.column(n).to_pylist() for n in (*columns, "finish_reason", "marks")
                )
                for n in range(len(ids)):
                    cut = reasons[n] == "length" and "eos_at_cap" not in (marks[n] or ())
                    ledger._add(ids[n], keys[n], samples[n], turns[n], TRUNCATED if cut else GOOD)
        for path in parts(run, REJECTED):
            for batch in read_batches(path, columns):
                ids, turns, samples, keys = (batch.column(n).to_pylist() for n in columns)
                for n in range(len(ids)):
                    ledger._add(ids[n], keys[n], samples[n], turns[n], REFUSED)
        return ledger

    def _add(self, name: str, key_hex: str, sample: int, turn: int, status: int) -> None:
        key = bytes.fromhex(key_hex)
        unit = row_key(key, sample, turn)
        if unit in self._status:
            return
        self._status[unit] = status
        if status == REFUSED:
            self.rejected += 1
        else:
            self.done += 1
        self._names.keep(name, key)

    def status(self, key: bytes, sample: int, turn: int) -> int | None:
        """The status of a unit, or None where it is still to be done."""
        return self._status.get(row_key(key, sample, turn))

    def identify(self, key: bytes, given_id: str | None) -> tuple[bytes, str]:
        """A conversation's key in this pass over the input, and the name it goes by.

        Exact duplicates get their occurrence's key. The name is the given id; where another
        conversation has that name already, the beginning of the key is added.
        """
        occurrence = self._seen.get(key, 0)
        self._seen[key] = occurrence + 1
        key = nth_key(key, occurrence)
        if given_id is None:
            return key, key.hex()[:16]
        return key, self._names.choose(given_id, key)

    def wants(self, key: bytes) -> bool:
        """Whether a key that `identify` gave is in the part of the input that the run is to hold."""
        return self.shard is None or self.shard.holds(key)
