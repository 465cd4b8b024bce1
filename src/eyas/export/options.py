"""What a user chooses of an export, and what is wrong with it.

Invariant: every choice is checked here, before anything is read; what passes can be carried out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from eyas.checks import MARKS
from eyas.errors import ConfigError
from eyas.trace import Trace

CUT, DROP = "cut", "drop"
MASKS = {
    "all": "every generated id",
    "last-turn": "the generated ids of a row's last turn",
    "no-reasoning": "generated ids that do not stand between the thinking markers",
}
"""Which ids are supervised, by policy."""
ANY = "any"
"""In place of a mark's name: whichever mark."""
_NO_COLUMNS = ("id", "prompt_ids", "output_ids")
COLUMNS = tuple(f.name for f in fields(Trace) if f.name not in _NO_COLUMNS)
"""Columns of a run that an export may carry along; ``id`` is there anyway."""
_SPLIT = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What goes out, and how. The defaults take every good row as it is."""

    only: str | None = None
    """``stop`` leaves out rows that their token budget cut."""
    drop_marked: tuple[str, ...] = ()
    """Rows that carry one of these marks are left out; ``any`` stands for all marks."""
    max_length: int | None = None
    """The most ids of a row, prompt and output together."""
    on_longer: str = DROP
    """What becomes of longer rows: ``drop``, or ``cut`` at the end."""
    min_supervised: int = 1
    """Rows with fewer supervised ids are left out; one at least, always."""
    merge_turns: bool = False
    """One row of several turns where ids prove that the later goes on from the earlier."""
    mask: str = "all"
    """One of `MASKS`."""
    dedupe: bool = False
    """Of rows with the same ids and mask the first one is taken."""
    split: tuple[tuple[str, float], ...] = ()
    """Names and shares; a conversation is in one of them as a whole."""
    shuffle: int | None = None
    """The seed of a random order; None for the order of the run."""
    shards: int | None = None
    """How many files a split is written to; None for what the form does by itself."""
    columns: tuple[str, ...] = ()
    """Further columns of the run."""

    def __post_init__(self) -> None:
        _one_of("--only", self.only, (None, "stop"))
        _one_of("--on-longer", self.on_longer, (DROP, CUT))
        _one_of("--mask", self.mask, tuple(MASKS))
        for name in self.drop_marked:
            _one_of("--drop-marked", name, (*MARKS, ANY))
        for name in self.columns:
            _one_of("--columns", name, COLUMNS)
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"--columns names {max(self.columns, key=self.columns.count)} twice")
        for option, number in (
            ("--max-length", self.max_length),
            ("--min-supervised-tokens", self.min_supervised),
            ("--shards", self.shards),
        ):
            if number is not None and number < 1:
                raise ConfigError(f"{option} {number}: it must be 1 or more")
        if self.shards is not None and self.shards > 99_999:
            raise ConfigError(f"--shards {self.shards}: at most 99999 files are written")
        if self.shuffle is not None and not -(2**63) <= self.shuffle < 2**64:
            raise ConfigError(f"--shuffle {self.shuffle}: a seed has at most 64 bits")
        if self.max_length is None and self.on_longer == CUT:
            raise ConfigError("--on-longer cut needs --max-length: the ids at which to cut")
        if self.max_length is not None and self.min_supervised > self.max_length:
            raise ConfigError(
                f"--min-supervised-tokens {self.min_supervised} is more than --max-length "
                f"{self.max_length} leaves room for: no row could have so many"
            )
        _check_split(self.split)

    def lines(self) -> list[str]:
        """Each choice as a phrase, in the order in which they are carried out."""
        said = []
        if self.only:
            said.append("only rows that the model ended")
        if self.drop_marked:
            said.append(f"no rows marked {', '.join(self.drop_marked)}")
        if self.merge_turns:
            said.append("turns merged where ids prove it")
        if self.mask != "all":
            said.append(f"supervised: {MASKS[self.mask]}")
        if self.max_length is not None:
            done = "cut at the end" if self.on_longer == CUT else "left out"
            said.append(f"rows over {self.max_length:,} ids {done}")
        if self.min_supervised > 1:
            said.append(f"at least {self.min_supervised:,} supervised ids")
        if self.dedupe:
            said.append("rows with the same ids once")
        if self.split:
            said.append("split " + ", ".join(f"{name} {share:.4g}" for name, share in self.split))
        if self.shuffle is not None:
            said.append(f"shuffled with seed {self.shuffle}")
        if self.shards is not None:
            said.append(f"{self.shards} shards")
        if self.columns:
            said.append(f"with {', '.join(self.columns)}")
        return said


def parse_split(text: str) -> tuple[tuple[str, float], ...]:
    """``train:0.98,eval:0.02`` as names and shares.

    Raises:
        ConfigError: saying what is wrong with it.
    """
    found = []
    for piece in text.split(","):
        name, _, share = piece.strip().partition(":")
        try:
            found.append((name.strip(), float(share)))
        except ValueError:
            raise ConfigError(
                f"--split {text}: {piece.strip()!r} is no NAME:SHARE, such as train:0.98"
            ) from None
    _check_split(tuple(found))
    return tuple(found)


def _check_split(split: tuple[tuple[str, float], ...]) -> None:
    names = [name for name, _ in split]
    for name, share in split:
        if not _SPLIT.fullmatch(name):
            raise ConfigError(f"--split: {name!r} is no name of letters, digits and _")
        if not 0 < share <= 1:
            raise ConfigError(f"--split: the share of {name} is {share:g}, not above 0 and up to 1")
    if len(set(names)) < len(names):
        raise ConfigError(f"--split names {max(names, key=names.count)} twice")
    total = sum(share for _, share in split)
    if split and abs(total - 1) > 1e-6:
        raise ConfigError(f"--split: the shares add up to {total:g}, not to 1")


def _one_of(option: str, value: str | None, known: tuple[str | None, ...]) -> None:
    if value not in known:
        names = ", ".join(name for name in known if name is not None)
        raise ConfigError(f"{option} {value} is not known; there is {names}")
