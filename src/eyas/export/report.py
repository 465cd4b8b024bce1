"""What an export did, in figures.

Invariant: ``read == turns + sum(left_out.values())``: a trace of the run is in a row, or left out
for one reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from eyas.export.rows import cut, filtered, first_supervised, lengths, supervised

REASONS = {
    "truncated": "cut at the token budget (--only stop)",
    "marked": "marked (--drop-marked)",
    "too_long": "longer than --max-length",
    "nothing_supervised": "without a supervised id",
    "too_few_supervised": "with fewer supervised ids than --min-supervised-tokens",
    "doubled": "with the ids of another row (--dedupe)",
    "behind_left_out": "behind a turn of their conversation that is left out",
    "no_messages": "of ready-made prompt ids, which have no messages",
    "unheld": "with roles, tools or an order of messages that this form cannot hold",
}
"""Why traces are left out."""


@dataclass(slots=True)
class SplitFigures:
    """What one split holds."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0


@dataclass(slots=True)
class ExportReport:
    """What an export wrote and what it left out."""

    to: str = ""
    out: str = ""
    plan: list[str] = field(default_factory=list)
    """What was going to be done, each choice as a phrase."""
    read: int = 0
    """Good traces that the run held."""
    rows: int = 0
    turns: int = 0
    """Traces in the rows: as many, unless turns were merged."""
    tokens: int = 0
    """Ids written, prompts included."""
    supervised: int = 0
    """Ids with a loss mask of 1."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Traces that are in no row, by reason."""
    cut: int = 0
    """Rows that were shortened, the ids and supervised ids that they lost."""
    cut_ids: int = 0
    cut_supervised: int = 0
    tokens_saved: int = 0
    """Ids that are not there again, because turns were merged."""
    truncated: int = 0
    """Written rows that do not end as the model ended them: at their budget, or cut here."""
    rejected: int = 0
    """Rows and input lines of the run that were refused and so are not exported."""
    lengths: dict[str, int] = field(default_factory=dict)
    """p50, p90, p99 and max of the written rows' ids."""
    splits: dict[str, SplitFigures] = field(default_factory=dict)
    """Each split, those without a row too."""
    trainer_cuts: dict[str, int] = field(default_factory=dict)
    """What the trainer would cut at its own default length: `at`, `rows`, `supervised`, `emptied`."""
    trainer: list[str] = field(default_factory=list)
    """What the trainer itself will still do to the rows, each a sentence."""
    drift: dict[str, Any] = field(default_factory=dict)
    """For forms of text: the rows whose ids do not survive; empty for forms of ids."""

    def leave_out(self, reason: str, count: int) -> None:
        """Count traces that are in no row."""
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return asdict(self)


class Tally:
    """Counts rows as they are written, for a report."""

    def __init__(self, report: ExportReport, cuts_at: int | None) -> None:
        self._report = report
        self._cuts_at = cuts_at
        self._lengths: Counter[int] = Counter()
        self._cut: Counter[str] = Counter()

    def add(self, split: str, rows: Any) -> None:
        """Count a batch that goes to a split."""
        report, ids, ones = self._report, lengths(rows), supervised(rows)
        for figures in (report, report.splits[split]):
            figures.rows += len(rows)
            figures.tokens += int(ids.sum())
            figures.supervised += int(ones.sum())
        report.tokens_saved += int(rows.column("apart").to_numpy().sum() - ids.sum())
        report.turns += int(rows.column("turns").to_numpy().sum())
        report.truncated += int((~rows.column("complete").to_numpy(zero_copy_only=False)).sum())
        values, counts = np.unique(ids, return_counts=True)
        self._lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if self._cuts_at is not None and (over := ids > self._cuts_at).any():
            longer = filtered(rows, over)
            left = supervised(cut(longer, self._cuts_at))
            self._cut["rows"] += len(longer)
            self._cut["supervised"] += int((supervised(longer) - left).sum())
            self._cut["emptied"] += int((first_supervised(longer) >= self._cuts_at).sum())

    def finish(self) -> None:
        """Put what was counted into the report."""
        report = self._report
        total, seen = self._lengths.total(), 0
        wanted = [("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)]
        for length, count in sorted(self._lengths.items()):
            seen += count
            while wanted and seen * 100 >= total * wanted[0][1]:
                report.lengths[wanted.pop(0)[0]] = length
        if self._cut:
            assert self._cuts_at is not None
            names = ("rows", "supervised", "emptied")
            report.trainer_cuts = {"at": self._cuts_at, **{n: self._cut[n] for n in names}}
