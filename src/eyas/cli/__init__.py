"""The command line: parses arguments and prints, and calls the Python API for the rest.

Invariant: a user's mistake ends with one sentence on standard error and a documented exit
code, never with a traceback. Heavy imports are inside the commands: ``eyas --help`` is fast.
"""

from __future__ import annotations

import io
import os
import sys

import typer

from eyas.cli import (
    archive,
    capture,
    demo,
    drift,
    export,
    merge,
    probe,
    redo,
    show,
    stats,
    status,
    template,
    verify,
    vocab,
)
from eyas.cli.tokens import printable
from eyas.errors import EXIT_INTERRUPTED, EyasError

app = typer.Typer(
    name="eyas",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Capture the exact token sequences that a large language model generates.",
    epilog="""\b
Examples:
  eyas demo                      try it without a GPU or a server
  eyas capture --help            what a capture can be told

Exit codes: 0 all done, 2 usage, 3 some rejected, 4 some pending, 130 interrupted.
""",
)


def _version(value: bool) -> None:
    if value:
        from eyas import __version__
        from eyas.core import COMPILED

        typer.echo(f"eyas {__version__} ({'compiled' if COMPILED else 'plain'} core)")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    del version


for module in (
    demo,
    template,
    probe,
    capture,
    status,
    show,
    stats,
    verify,
    redo,
    merge,
    archive,
    export,
    vocab,
    drift,
):
    app.command(name=module.NAME, epilog=module.EPILOG)(module.command)


def main() -> None:
    """The ``eyas`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show all characters
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="eyas")
    except EyasError as error:
        print(f"eyas: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
