"""``eyas status``: how a capture stands, from another terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from eyas.cli.panel import Line
    from eyas.status import Status

NAME = "status"
EPILOG = """\b
Examples:
  eyas status run
  eyas status run --watch && eyas export run --out train.jsonl
  eyas status run --json

Exit codes: 0 it runs, or all is done; 3 some rejected, 4 some pending (stopped
or killed), 130 interrupted, 2 not a run.
"""
_EVERY_S = 2.0
_TELLS_S = 15.0
"""A running capture writes more often than this."""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    watch: bool = typer.Option(
        False, "--watch", help="Renew it every 2 seconds until the capture ends."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON, one object a time."),
) -> None:
    """Say how the capture of a run stands: rows, speed, servers, problems.

    Says so if the process that wrote the run was killed. A run without a status (a capture
    from Python writes none) shows its counts.
    """
    from eyas.standing import status_of_run

    status = status_of_run(run)
    if watch and status.state == "running":
        status = _watch(run, status, as_json=as_json)
    if as_json:
        print(_as_json(run, status), flush=True)
    else:
        _print(run, status)
    raise typer.Exit(status.code)


def _watch(run: str, status: Status, *, as_json: bool) -> Status:
    """Show it until it no longer runs; returns the last."""
    from eyas.cli.live import Live
    from eyas.cli.screen import Screen
    from eyas.standing import status_of_run

    screen, live = Screen(sys.stdout), Live(sys.stdout)
    if not (as_json or screen.drawable):
        live.log(status)
    while status.state == "running":
        if as_json:
            print(_as_json(run, status), flush=True)
        elif screen.drawable:
            columns, rows = screen.room
            screen.draw(_lines(run, status, columns, rows, screen.encoding)[:rows])
        else:
            live.log(status, if_due=True)
        time.sleep(_EVERY_S)
        status = status_of_run(run)
    screen.clear()
    return status


def _print(run: str, status: Status) -> None:
    from eyas.cli.screen import Screen

    screen = Screen(sys.stdout)
    columns = screen.room.columns if screen.drawable else 1000
    for line in _lines(run, status, columns, 1000, screen.encoding):
        print(screen.painted(line))


def _lines(run: str, status: Status, columns: int, rows: int, encoding: str) -> list[Line]:
    """The run, its writer, what the capture itself shows, and what to do next."""
    from eyas.cli.panel import LABEL, Line, fit, panel, safe

    around = [Line("run", safe(run)), Line("state", _state(status), status.state == "killed")]
    if status.stopped:
        around.append(Line("stopped", safe(status.stopped), True))
    after = []
    if status.state in ("stopped", "interrupted"):
        after.append(Line("next", "run the same command again to go on"))
    width = max(1, columns - LABEL)
    around = [line._replace(text=fit(line.text, width, encoding)) for line in around]
    inside = panel(status, width=columns, height=rows - len(around) - len(after), encoding=encoding)
    return [*around, *inside, *after]


def _state(status: Status) -> str:
    from eyas.cli.panel import duration, safe

    who = f"process {status.pid} on {safe(status.host or '?')}" if status.pid else ""
    if status.state == "killed":
        return f"was killed{f' ({who})' if who else ''}; run the same command again to go on"
    if status.state != "running":
        return "interrupted by a signal" if status.state == "interrupted" else status.state
    said = f"running  {who}"
    age = status.age()
    if age is not None and age > _TELLS_S:
        said += f"  silent for {duration(age)}"
    return said


def _as_json(run: str, status: Status) -> str:
    import json

    code = None if status.state == "running" else status.code
    return json.dumps({"run": run, **status.model_dump(), "exit_code": code})
