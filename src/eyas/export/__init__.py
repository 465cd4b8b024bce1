"""A run in a trainer's own form; one module a form.

Invariant: no id changes on the way, every output id is supervised once, and what is left out is
counted by reason. A form gets rows and knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import ConfigError
from eyas.export.jsonl import write_jsonl
from eyas.export.merging import merged_rows
from eyas.export.rows import Row
from eyas.store import REJECTED, Run
from eyas.store.files import write_atomically
from eyas.trace import Trace

FORMS: dict[str, Callable[[Path, Iterator[Row], bool], None]] = {"jsonl": write_jsonl}


@dataclass(slots=True)
class ExportReport:
    """What an export wrote and what it left out."""

    rows: int = 0
    turns: int = 0
    """Traces in them: as many as rows, unless turns were merged."""
    tokens: int = 0
    """Ids written, prompts included."""
    supervised: int = 0
    """Ids with a loss mask of 1."""
    tokens_saved: int = 0
    """Ids that are not there again, because turns were merged."""
    truncated: int = 0
    """Written rows whose last turn its token budget cut."""
    left_out_truncated: int = 0
    left_out_long: int = 0
    rejected: int = 0
    """Rows and input lines of the run that were refused and so are not exported."""


def export_run(
    run: str | Path,
    *,
    to: str,
    out: str | Path,
    only: str | None = None,
    max_length: int | None = None,
    merge_turns: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write a run's good rows to a file; the file appears whole or not at all.

    Args:
        to: the form, one of `FORMS`.
        only: ``stop`` leaves out rows that their token budget cut.
        max_length: leaves out rows of more ids, prompt and output together.
        merge_turns: makes one row of turns where ids prove that the later prompt begins with the
            earlier prompt and output, as far as `max_length` allows.

    Raises:
        ConfigError: an unknown form, or the file exists.
        DamagedRun: the run cannot be read.
    """
    target = Path(out)
    if to not in FORMS:
        raise ConfigError(f"--to {to} is not known; there is {', '.join(sorted(FORMS))}")
    if only not in (None, "stop"):
        raise ConfigError(f"--only {only} is not known; there is stop")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists already; name another --out or give --overwrite")
    if not target.parent.is_dir():
        raise ConfigError(f"--out {target}: there is no directory {target.parent}")
    opened, report = Run(run), ExportReport()
    chosen = _Chosen(report, only, max_length)
    rows = (
        merged_rows(opened, chosen.take, max_length=max_length, spool=target.parent)
        if merge_turns
        else (Row.of(trace) for trace in opened.traces() if chosen.take(trace))
    )
    compress = target.suffix == ".gz"
    write_atomically(target, lambda path: FORMS[to](path, _counted(rows, report), compress))
    report.tokens_saved = chosen.tokens - report.tokens
    report.rejected = sum(1 for _ in opened.records(REJECTED, ["id"]))
    return report


@dataclass(slots=True)
class _Chosen:
    """Which traces are exported."""

    report: ExportReport
    only: str | None
    max_length: int | None
    tokens: int = 0
    """Ids of all that are, each trace by itself."""

    def take(self, trace: Trace) -> bool:
        """Whether a trace is exported; if not, why is counted."""
        length = len(trace.prompt_ids) + len(trace.output_ids)
        if self.only == "stop" and not trace.complete:
            self.report.left_out_truncated += 1
            return False
        if self.max_length is not None and length > self.max_length:
            self.report.left_out_long += 1
            return False
        self.report.turns += 1
        self.tokens += length
        return True


def _counted(rows: Iterator[Row], report: ExportReport) -> Iterator[Row]:
    for row in rows:
        report.rows += 1
        report.tokens += len(row.input_ids)
        report.supervised += row.supervised
        report.truncated += not row.complete
        yield row
