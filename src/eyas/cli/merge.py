"""``eyas merge``: several runs, such as those of an array of jobs, made into one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from eyas.merge import MergeReport

NAME = "merge"
EPILOG = """\b
Examples:
  eyas capture prompts.jsonl --out runs/1 --shard 1/3 --url HOST1:30000 --tokenizer /models/M
  eyas merge run runs/1 runs/2 runs/3
  eyas merge run runs/*
\b
Exit codes: 0 merged, 2 refused, 4 the disk is full, 130 interrupted. OUT is there only after 0.
"""


def command(
    out: str = typer.Argument(..., help="The new run: a directory that is empty or not there."),
    runs: list[str] = typer.Argument(
        ..., metavar="RUN...", help="The runs to join; where two clash, the first one is right."
    ),
    skip_doubles: bool = typer.Option(
        False,
        "--skip-doubles",
        help="Leave out the rows of a conversation's sample that an earlier run holds too.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Join runs of one configuration into a new run, and leave them as they are.

    Refused are runs of different fingerprints, runs that are being written, and runs that hold
    the same rows. Where conversations of different content have one id, the later ones get a
    suffix. What lies in archive/ is not taken. The new run can be continued like any other,
    without --shard.
    """
    from dataclasses import asdict

    from eyas.cli.live import Live
    from eyas.merge import merge_runs

    with Live(sys.stderr) as live:
        report = merge_runs(
            out,
            runs,
            skip_doubles=skip_doubles,
            say=live.say,
            on_read=live.count("rows read"),
            on_written=live.count("rows written"),
        )
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _print(report)


def _print(report: MergeReport) -> None:
    from eyas.cli.panel import duration

    runs = "1 run" if report.runs == 1 else f"{report.runs:,} runs"
    print(f"merged    {runs}: {report.rows:,} good and {report.rejected:,} rejected rows, "
          f"in {duration(report.seconds)}")  # fmt: skip
    if report.left_out:
        print(f"left out  {report.left_out:,} rows that an earlier run holds too")
    if report.renamed:
        print(f"renamed   {report.renamed:,} rows whose id another conversation has")
    counts = report.counts
    if counts:
        print(f"input     {counts['input']:,} = {counts['done']:,} done + "
              f"{counts['rejected']:,} rejected + {counts['pending']:,} pending")  # fmt: skip
    if report.missing_shards:
        some = ", ".join(report.missing_shards[:8])
        more = ", ..." if len(report.missing_shards) > 8 else ""
        print(f"missing   shards {some}{more}")
    print(f"files     {report.run}/traces/*.parquet")
    print(f"next      eyas verify {report.run}   eyas stats {report.run}   "
          f"eyas capture --config {report.run}/config.yaml (what is pending)")  # fmt: skip
