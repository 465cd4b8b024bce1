"""The ledger knows every unit and gives every name as plain dicts would, in little room."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.conversation import digest, nth_key, row_key
from eyas.errors import DamagedRun
from eyas.shard import Shard
from eyas.store import GOOD, OPEN, REFUSED, TRUNCATED, UNREADABLE, Ledger
from eyas.store.journal import Segment, encode_line
from eyas.store.names import Names
from eyas.store.parts import TRACES, seal
from eyas.store.table import Table
from eyas.trace import Rejected, Trace

KEYS = [digest(b"%d" % n) for n in range(6)]
GIVEN = ["a", "b", f"a-{KEYS[1].hex()[:8]}", KEYS[2].hex()[:16], None]
"""Ids that several conversations share, and some that look like names that were made."""
CONVERSATIONS = st.tuples(st.integers(0, 5), st.integers(0, 3)).map(
    # A key is made of the id too: each id has keys of its own, but for the ids that are equal.
    lambda at: (digest(KEYS[at[0]], b"%d" % (at[0] % 5)), GIVEN[at[0] % 5], at[1])
)
"""(key, given id, turns); no turn is a line that cannot be used."""
STATUSES = {GOOD: "stop", TRUNCATED: "length"}


@pytest.fixture(scope="module", params=[1, 3, 1 << 14])
def steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also with so little waiting that tables grow all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "may_wait", request.param)
        patch.setattr("eyas.store.ledger._GATHERED", request.param)
        yield


class Model:
    """The same with plain dicts."""

    def __init__(self) -> None:
        self.status: dict[bytes, int] = {}
        self.seen: dict[bytes, int] = {}
        self.owners: dict[str, bytes] = {}

    def store(self, name: str, key: bytes, sample: int, turn: int, status: int) -> None:
        self.status.setdefault(row_key(key, sample, turn), status)
        self.owners[name] = key

    def identify(self, key: bytes) -> bytes:
        times = self.seen[key] = self.seen.get(key, -1) + 1
        return nth_key(key, times)

    def name(self, given_id: str | None, key: bytes) -> str:
        given_id = key.hex()[:16] if given_id is None else given_id
        longer = [f"{given_id}-{key.hex()[:digits]}" for digits in (8, 16, 32)]
        for name in longer:
            if self.owners.get(name) == key:
                return name
        return next(n for n in (given_id, *longer) if self.owners.setdefault(n, key) == key)


def store(run: Path, number: int, rows: list[Trace | Rejected]) -> None:
    for folder in ("journal", "traces", "rejected"):
        (run / folder).mkdir(exist_ok=True)
    segment = Segment(run / "journal", number)
    segment.write([encode_line(row) for row in rows])
    segment.close()
    seal(run, number, segment.path)


def row(name: str, key: bytes, sample: int, turn: int, status: int) -> Trace | Rejected:
    about: Any = (f"{name}/{sample}/{turn}", name, turn, sample, key.hex())
    if status == REFUSED:
        return Rejected(*about, "text", "differs")
    return Trace(*about, [1], [2], STATUSES[status], 2, None, None)


@pytest.mark.usefixtures("steps")
@settings(max_examples=50)
@given(
    passes=st.lists(st.lists(CONVERSATIONS, max_size=14), min_size=1, max_size=3),
    samples=st.integers(1, 2),
    portion=st.integers(1, 5),
    chance=st.randoms(use_true_random=False),
)
@example([[(KEYS[0], "a", 1), (KEYS[1], "a", 1)] * 3] * 2, 1, 2, __import__("random").Random(0))
def test_it_does_what_dicts_do(
    passes: list[list[tuple[bytes, str | None, int]]], samples: int, portion: int, chance: Any
) -> None:
    """Passes over several inputs, some units of each of which are stored before the next one."""
    with TemporaryDirectory() as folder:
        run = Path(folder)
        model = Model()
        for number, conversations in enumerate(passes, 1):
            ledger = Ledger.load(run)
            assert ledger.done + ledger.rejected == len(model.status)
            assert ledger.rejected == list(model.status.values()).count(REFUSED)
            model.seen = {}
            rows = []
            for begin in range(0, len(conversations), portion):
                some = conversations[begin : begin + portion]
                met = ledger.meet(b"".join(k for k, _, _ in some), [t for _, _, t in some], samples)
                keys = [model.identify(key) for key, _, _ in some]
                assert met.keys == keys
                assert met.ours == [True] * len(some)
                expected = [
                    [
                        model.status.get(row_key(key, sample, turn), OPEN)
                        for sample in range(samples if turns else 1)
                        for turn in range(turns or 1)
                    ]
                    for key, (_, _, turns) in zip(keys, some, strict=True)
                ]
                bounds = zip(met.bounds, met.bounds[1:], strict=False)
                assert [list(met.statuses[a:b]) for a, b in bounds] == expected
                flat = list(chain.from_iterable(expected))
                assert met.count == [flat.count(status) for status in range(UNREADABLE + 1)]
                assert met.to_name == [n for n, units in enumerate(expected) if OPEN in units]
                asked = [(some[n][1], keys[n]) for n in met.to_name]
                names = ledger.name(asked)
                assert names == [model.name(*conversation) for conversation in asked]
                for n, name in zip(met.to_name, names, strict=True):
                    turns = some[n][2] or 1
                    for at, status in enumerate(expected[n]):
                        if status == OPEN and chance.random() < 0.6:
                            new = chance.choice([GOOD, TRUNCATED, REFUSED])
                            rows.append((name, keys[n], at // turns, at % turns, new))
            if rows:
                store(run, number, [row(*unit) for unit in rows])
            stored_as: dict[bytes, str] = {}
            for unit in rows:
                model.store(*unit)
                assert stored_as.setdefault(unit[1], unit[0]) == unit[0]
            model.owners = {name: key for name, key in model.owners.items()
                            if any(row_key(key, s, t) in model.status
                                   for s in range(2) for t in range(3))}  # fmt: skip


@pytest.mark.usefixtures("steps")
@given(st.lists(CONVERSATIONS, max_size=30), st.integers(1, 3), st.integers(1, 7))
def test_shards_give_the_same_keys_and_names(
    conversations: list[tuple[bytes, str | None, int]], count: int, portion: int
) -> None:
    """Each conversation is in one shard, under the key and name that the whole input gives it."""

    def met(shard: Shard | None) -> list[tuple[bytes, str, bool]]:
        ledger, found = Ledger(shard), []
        for begin in range(0, len(conversations), portion):
            some = conversations[begin : begin + portion]
            now = ledger.meet(b"".join(k for k, _, _ in some), [t for _, _, t in some])
            assert now.to_name == list(range(len(some)))
            assert sum(now.count) == sum((t or 1) for (_, _, t), ours
                                         in zip(some, now.ours, strict=True) if ours)  # fmt: skip
            names = ledger.name([(some[n][1], now.keys[n]) for n in now.to_name])
            found += zip(now.keys, names, now.ours, strict=True)
        return found

    whole = met(None)
    shards = [met(Shard(number, count)) for number in range(1, count + 1)]
    for at, (key, name, ours) in enumerate(whole):
        assert ours
        assert [shard[at][:2] for shard in shards] == [(key, name)] * count
        assert sum(shard[at][2] for shard in shards) == 1


def test_a_key_that_is_none_is_said_so(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store(tmp_path, 1, [row("a", KEYS[0], 0, 0, GOOD)])
    (part,) = (tmp_path / TRACES).iterdir()
    table = pq.read_table(part)
    at = table.schema.get_field_index("key")
    for bad in ("no hex digits at all, though 32", "00"):
        other = table.set_column(at, table.schema.field(at), [[bad]])
        pq.write_table(other, part)
        with pytest.raises(DamagedRun, match="holds a key"):
            Ledger.load(tmp_path)


def held(units: int) -> int:
    """The most bytes that a ledger takes while it goes through an input that is half done."""
    keys = [digest(b"key", b"%d" % n) for n in range(units)]
    done = units // 2
    tracemalloc.start()
    try:
        ledger = Ledger()
        for begin in range(0, done, 1 << 14):
            ledger._keep(rows_of(keys[begin : min(begin + (1 << 14), done)], begin))
        for begin in range(0, units, 4096):
            some = keys[begin : begin + 4096]
            met = ledger.meet(b"".join(some), [1] * len(some))
            assert (
                met.count[OPEN] == len(met.to_name) == max(0, min(len(some), begin + 4096 - done))
            )
            ledger.name([(f"q{begin + n}", met.keys[n]) for n in met.to_name])
        assert ledger.done == done
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rows_of(keys: list[bytes], begin: int) -> Any:
    """Stored rows as `Ledger.load` gathers them."""
    import numpy as np

    from eyas.store.ledger import _Rows
    from eyas.store.names import hashes_of

    names = hashes_of(f"q{begin + n}" for n in range(len(keys)))
    good = np.full(len(keys), GOOD, np.uint32)
    return _Rows([names], bytearray(b"".join(keys)), [np.zeros(len(keys), np.uint64)], [good])


def test_a_unit_takes_at_most_64_bytes() -> None:
    """Everything that the ledger holds of a single-turn row with an id, at its peak."""
    # Room is doubled when it is needed: between these sizes it was, once for each column.
    slope = (held(200_000) - held(100_000)) / 100_000
    assert 40 <= slope <= 64


def test_names_settle_as_they_are_told() -> None:
    names = Names()
    one, two = KEYS[:2]
    longer = f"x-{two.hex()[:8]}"
    assert names.settle([("x", one), ("x", two), ("x", one)]) == ["x", longer, "x"]
    assert names.settle([(longer, two), ("x", two), (f"x-{one.hex()[:16]}", one)]) == [
        longer, longer, "x"
    ]  # fmt: skip
