"""``eyas archive``: a run's rows put aside."""

from __future__ import annotations

import json
from pathlib import Path

import typer

NAME = "archive"
EPILOG = """\b
Examples:
  eyas archive run
  eyas stats run/archive/2026-01-31T12-00-00
\b
Exit codes: 0 put aside, 2 not a run or being written, 4 the disk is full.
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    as_json: bool = typer.Option(False, "--json", help="Print where the rows went as JSON."),
) -> None:
    """Put a run's rows aside, under archive/DATE in it, so that the next capture begins anew.

    Nothing is deleted: what was put aside is a run like any other.
    """
    from eyas.cli.tokens import printable
    from eyas.store import archive_run

    aside = archive_run(Path(run))
    if as_json:
        print(json.dumps({"run": run, "archive": str(aside)}))
        return
    print(printable(f"put aside {aside}"))
    print(printable(f"nothing was deleted (eyas stats {aside}); a capture into {run} begins anew"))
