"""In which order conversations are sent: as the input has them, or the longest first.

Invariants: which conversations there are, what they are called and how often the same one was
met is told by the input's order alone, whatever the order in which they are sent; a conversation
that waits lies on the disk, and memory holds some twenty bytes of it.

The last rows of a run decide its end: if a long one is among them, all servers wait for it.
"""

from __future__ import annotations

import math
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from eyas.conversation import Conversation
from eyas.errors import ConfigError
from eyas.store import is_run
from eyas.store.files import disk_errors
from eyas.store.lengths import Lengths

INPUT, LONGEST = "input", "longest"
"""``--order``: as the input has them; the most turns first, and of these the longest prompts.
Anything else is an earlier run, whose longest conversations go first."""

_UNKNOWN = 1e10
"""More tokens than any conversation has: one that is not known may be long, and goes first."""
_WIDEST = 10**7
"""Characters beyond which prompts count as equally long."""
_AT_ONCE = 1 / 8
"""Of what was read of the input, so much is sent before the rest is known: the longest of it."""
_TAKEN = 64
"""Threads that are given together once everything was met."""
TASTERS = 32
"""So many go before all others where there are several servers: some answers tell the pace of one."""


class Thread(Protocol):
    """What is put in order: `eyas.jobs.Job`."""

    conversation: Conversation
    key: bytes
    turn: int
    tokens: float | None


_Thread = TypeVar("_Thread", bound=Thread)


class LongestFirst:
    """Lets conversations wait, and gives the longest of them.

    With `tasters`, some short ones go before all others. They tell the paces of the servers before
    a long answer has held a place at a slow one for long.
    """

    def __init__(
        self,
        lengths: Lengths | None,
        folder: Path,
        shared: Iterable[object] = (),
        tasters: int = 0,
    ) -> None:
        """Begin with nothing that waits.

        Args:
            lengths: those of an earlier run; None to judge by the input.
            folder: where to keep what waits, in a file that has no name.
            shared: objects that threads have in common, and that stay what they are.
            tasters: how many conversations of known length go before all others.

        Raises:
            DiskFull: no file can be made there.
        """
        self.lengths = lengths
        self.known = self.unknown = 0
        """Conversations that are in the earlier run, and that are not."""
        self._waiting = Waiting(folder, shared)
        self._met = self._begun = 0.0
        """Output tokens of all threads that were met, and of those that were begun."""
        self._unknown_met = self._unknown_begun = 0
        """Turns of threads whose lengths are not known."""
        self._all_met = False
        self._tasters = tasters

    def __len__(self) -> int:
        return len(self._waiting)

    def sift(self, threads: Iterable[_Thread], *, room: int, all_met: bool) -> list[_Thread]:
        """Take threads that were met in the input, and give those that are to be sent now.

        While the input is still read these are the longest of what was met, as far as servers
        have room, so that they need not wait for the end of the reading.

        Args:
            threads: in the input's order, the samples of a conversation together.
            room: how many threads may be given before the last were met.
            all_met: whether these were the last.

        Raises:
            DiskFull: there is no room for what waits.
        """
        groups = [list(group) for _, group in groupby(threads, key=lambda thread: thread.key)]
        ranked = sorted(((self._rank(group), group) for group in groups), key=lambda pair: -pair[0])
        given = self._taken_from(ranked)
        if all_met:
            self._all_met = True
            self._let_wait(ranked)
            while len(self._waiting) and sum(map(len, given)) < _TAKEN:
                given.append(self._waiting.take())
        else:
            at_once = math.ceil(_AT_ONCE * len(ranked))
            while at_once and sum(len(group) for _, group in ranked[:at_once]) > room:
                at_once -= 1
            given += [group for _, group in ranked[:at_once]]
            self._let_wait(ranked[at_once:])
        return [thread for group in given for thread in group]

    def shortest(self, count: int, tokens: float) -> list[Any]:
        """So many threads that wait at least, or all whose answers are at most so long.

        None before everything was met, as nobody knows which are the shortest.

        Raises:
            DiskFull: what waits cannot be read.
        """
        given: list[Any] = []
        if self._all_met and self.lengths is not None:
            while len(given) < count and self._waiting.least <= tokens:
                given += self._waiting.take_least()
        return given

    def begun(self, thread: Thread) -> None:
        """A thread that was given is begun (or cannot be)."""
        turns = _turns_left(thread)
        if thread.tokens is None:
            self._unknown_begun += turns
        else:
            self._begun += thread.tokens * turns

    @property
    def told(self) -> str:
        """How much of the input the earlier run knows, as a line for the user."""
        if not self.unknown:
            return "order     all conversations are in the earlier run; the longest go first"
        if not self.known:
            return (
                "order     none of the conversations is in the earlier run; those with the most "
                "turns and the longest prompts go first"
            )
        return (
            f"order     {self.known:,} conversations are in the earlier run, the longest go first; "
            f"{self.unknown:,} are not and go before them"
        )

    def tokens_left(self, mean: float) -> float | None:
        """Output tokens of all threads that were not begun; None as long as that is not known.

        Args:
            mean: output tokens of a turn of which nothing is known.
        """
        if self.lengths is None or not self._all_met:
            return None
        unknown = self._unknown_met - self._unknown_begun
        return max(0.0, self._met - self._begun + mean * unknown)

    def close(self) -> None:
        """Give the disk back."""
        self._waiting.close()

    def _taken_from(self, ranked: list[tuple[float, list[_Thread]]]) -> list[list[_Thread]]:
        """Those of a stretch that go before all others: shorter than most, no trifles."""
        known = [at for at, (rank, _) in enumerate(ranked) if rank < _UNKNOWN]
        if not self._tasters or not known:
            return []
        chosen = known[len(known) * 5 // 8 : len(known) * 7 // 8][: self._tasters]
        self._tasters -= len(chosen)
        return [ranked.pop(at)[1] for at in reversed(chosen)]

    def _let_wait(self, ranked: list[tuple[float, list[_Thread]]]) -> None:
        for rank, group in ranked:
            self._waiting.put(group, rank)

    def _rank(self, group: list[_Thread]) -> float:
        """The greater, the earlier its threads go; sets how long each is expected to be."""
        conversation, tokens = group[0].conversation, None
        if self.lengths is not None:
            tokens = self.lengths.of(group[0].key, conversation.given_id)
            self.known += tokens is not None
            self.unknown += tokens is None
        for thread in group:
            turns = _turns_left(thread)
            if tokens is None:
                self._unknown_met += turns
            else:
                thread.tokens = tokens / conversation.n_turns
                self._met += thread.tokens * turns
        return _UNKNOWN + _size(conversation) if tokens is None else tokens


def _turns_left(thread: Thread) -> int:
    return max(1, thread.conversation.n_turns - thread.turn)


def _size(conversation: Conversation) -> float:
    """Turns first, since one follows another; then characters (or ready-made ids)."""
    if conversation.prompt_ids is not None:
        characters = len(conversation.prompt_ids)
    else:
        characters = sum(
            len(content) if isinstance(content := message.get("content"), str) else 0
            for stretch in conversation.turns
            for message in stretch
        )
    return conversation.n_turns * _WIDEST + min(characters, _WIDEST - 1)


def open_order(
    given: str | None,
    folder: Path,
    shared: Iterable[object],
    say: Callable[[str], None],
    *,
    several: bool = False,
) -> LongestFirst | None:
    """What ``--order`` asks for, of one server or `several`; None for the input's own order.

    Raises:
        ConfigError: it is no known word, and no run.
        DamagedRun: a part of the earlier run cannot be read.
    """
    if given is None or given == INPUT:
        return None
    if given == LONGEST:
        say("order     the conversations with the most turns first, then the longest prompts")
        return LongestFirst(None, folder, shared)
    say(f"order     reading how long the answers in {given} were")
    lengths = Lengths.of_run(Path(given).expanduser())
    if not len(lengths):
        raise ConfigError(f"--order {given}: that run holds no answers to learn lengths from")
    return LongestFirst(lengths, folder, shared, TASTERS if several else 0)


def check_order(given: str) -> str:
    """A word that is known, or the path of a run.

    Raises:
        ValueError: it is neither.
    """
    if given not in (INPUT, LONGEST) and not is_run(Path(given).expanduser()):
        raise ValueError(f"it is {INPUT}, {LONGEST} or the directory of an earlier run")
    return given


class Waiting:
    """Items in a file without a name, in the order of their ranks, to be taken at both ends."""

    def __init__(self, folder: Path, shared: Iterable[object] = ()) -> None:
        """Make the file; it is gone with the process, however that ends.

        Objects that are `shared` are the same when an item that has them is taken.
        """
        self._folder = folder
        self._shared = tuple(shared)
        with disk_errors(folder):
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 - `close` closes it
                dir=folder, prefix=".waiting-", suffix=".tmp"
            )
        self._places = array("Q")
        self._ranks = array("d")
        self._sorted = False
        """Whether something was taken: then the greatest ranks are last."""
        self._taken = 0
        """Of the least ranks, how many were taken."""

    def __len__(self) -> int:
        return len(self._places) - self._taken

    @property
    def least(self) -> float:
        """The least rank; infinite where nothing waits."""
        self._sort()
        return self._ranks[self._taken] if len(self) else math.inf

    def put(self, item: object, rank: float) -> None:
        """Let an item wait; nothing can be put any more once something was taken."""
        assert not self._sorted
        with disk_errors(self._folder):
            self._places.append(self._file.tell())
            self._ranks.append(rank)
            _Pickler(self._file, self._shared).dump(item)

    def take(self) -> Any:
        """An item of the greatest rank; those of equal rank in the order in which they came."""
        self._sort()
        self._ranks.pop()
        return self._load(self._places.pop())

    def take_least(self) -> Any:
        """An item of the least rank."""
        self._sort()
        self._taken += 1
        return self._load(self._places[self._taken - 1])

    def close(self) -> None:
        """Give the disk back."""
        self._file.close()

    def _sort(self) -> None:
        if not self._sorted:
            ranks = np.frombuffer(self._ranks)
            order = np.argsort(-ranks, kind="stable")[::-1]
            self._places = array("Q", np.frombuffer(self._places, np.uint64)[order].tobytes())
            self._ranks = array("d", ranks[order].tobytes())
            self._sorted = True

    def _load(self, place: int) -> Any:
        with disk_errors(self._folder):
            self._file.seek(place)
            return _Unpickler(self._file, self._shared).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes], shared: tuple[object, ...]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(one): number for number, one in enumerate(shared)}

    def persistent_id(self, one: object) -> int | None:
        return self._numbers.get(id(one))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> object:
        return self._shared[number]
