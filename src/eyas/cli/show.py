"""``eyas show``: one row, token by token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from eyas.errors import InputError

if TYPE_CHECKING:
    from eyas.store import Run
    from eyas.tokens import Profile, Tokenizer
    from eyas.trace import Rejected, Trace

NAME = "show"
EPILOG = """\b
Examples:
  eyas show run
  eyas show run 81/0/1 --ids
  eyas show run --json
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    row: str = typer.Argument(
        None, metavar="[ID]", help="A row's id (or a conversation's); the first row if absent."
    ),
    ids: bool = typer.Option(False, "--ids", help="Show each token's id."),
    as_json: bool = typer.Option(False, "--json", help="Print the row as JSON."),
    tokenizer: str = typer.Option(
        None, help="Where the tokenizer is now, if it is no longer where the run found it."
    ),
) -> None:
    """Show a row token by token: prompt, reasoning, answer and stop token told apart.

    Refused rows are shown too, with the reason.
    """
    from eyas.store import Run

    opened = Run(run)
    found = opened.find(row) if row else opened.first()
    if found is None:
        what = f"no row {row!r}" if row else "no rows yet"
        raise InputError(f"{run} holds {what}; ids look like CONVERSATION/SAMPLE/TURN")
    if as_json:
        print_json(found)
    else:
        show_row(opened, found, ids=ids, tokenizer_source=tokenizer)


def load_for(run: Run, source: str | None = None) -> tuple[Tokenizer, Profile]:
    """The tokenizer and profile that a run was captured with."""
    from eyas.tokens import load_tokenizer

    return load_tokenizer(source or run.manifest.tokenizer), run.profile()


def show_row(
    run: Run, found: Trace | Rejected, *, ids: bool = False, tokenizer_source: str | None = None
) -> None:
    """Print one row for people."""
    from eyas.cli.tokens import print_row, printable
    from eyas.trace import Rejected

    head = [found.id, found.finish_reason or "", *found.marks]
    print(printable("  ".join(part for part in head if part)))
    if isinstance(found, Rejected):
        print(printable(f"rejected: {found.reason}: {found.detail}"))
        where = f"{found.source}:{found.line}" if found.line else found.source
        if where:
            print(printable(f"from {where}"))
        for attempt in found.tries:
            print(printable(f"try: {attempt}"))
        if found.text and not found.output_ids:
            print(printable(found.text))
    if found.prompt_ids or found.output_ids:
        tokenizer, profile = load_for(run, tokenizer_source)
        print_row(found, profile, tokenizer, ids=ids)


def print_json(found: Trace | Rejected) -> None:
    """Print one row as JSON, with `input_ids` and `loss_mask` for good rows."""
    from dataclasses import asdict

    from eyas.trace import Trace

    row = asdict(found)
    if isinstance(found, Trace):
        row["input_ids"], row["loss_mask"] = found.input_ids, found.loss_mask
    for name in ("messages", "metadata", "template_kwargs", "sampling"):
        if isinstance(row.get(name), str):
            row[name] = json.loads(row[name])
    print(json.dumps(row))  # ASCII: what a model wrote may be hostile to a terminal
