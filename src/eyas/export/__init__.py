"""A run in a trainer's own form; one module a form.

Invariant: no id changes on the way, every row has a supervised id, and what is left out is
counted by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import ConfigError
from eyas.export.jsonl import write_jsonl
from eyas.store import REJECTED, Run
from eyas.store.files import write_atomically
from eyas.trace import Trace

FORMS: dict[str, Callable[[Path, Iterator[Trace], bool], None]] = {"jsonl": write_jsonl}


@dataclass(slots=True)
class ExportReport:
    """What an export wrote and what it left out."""

    rows: int = 0
    tokens: int = 0
    """Ids written, prompts included."""
    supervised: int = 0
    """Ids with a loss mask of 1."""
    truncated: int = 0
    """Written rows that their token budget cut."""
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
    overwrite: bool = False,
) -> ExportReport:
    """Write a run's good rows to a file; the file appears whole or not at all.

    Args:
        to: the form, one of `FORMS`.
        only: ``stop`` leaves out rows that their token budget cut.
        max_length: leaves out rows of more ids, prompt and output together.

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
    chosen = _choose(opened.traces(), report, only=only, max_length=max_length)
    compress = target.suffix == ".gz"
    write_atomically(target, lambda path: FORMS[to](path, chosen, compress))
    report.rejected = sum(1 for _ in opened.records(REJECTED, ["id"]))
    return report


def _choose(
    traces: Iterator[Trace], report: ExportReport, *, only: str | None, max_length: int | None
) -> Iterator[Trace]:
    for trace in traces:
        length = len(trace.prompt_ids) + len(trace.output_ids)
        if only == "stop" and not trace.complete:
            report.left_out_truncated += 1
        elif max_length is not None and length > max_length:
            report.left_out_long += 1
        else:
            report.rows += 1
            report.tokens += length
            report.supervised += len(trace.output_ids)
            report.truncated += not trace.complete
            yield trace
