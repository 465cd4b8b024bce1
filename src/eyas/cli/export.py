"""``eyas export``: a run in a trainer's own form."""

from __future__ import annotations

import json

import typer

NAME = "export"
EPILOG = """\b
Examples:
  eyas export run --to jsonl --out train.jsonl --only stop --max-length 8192
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    to: str = typer.Option("jsonl", help="The form: jsonl (speculators and SpecForge read it)."),
    out: str = typer.Option(..., help="The file to write; .gz compresses it."),
    only: str = typer.Option(None, help="stop: leave out rows that their budget cut."),
    max_length: int = typer.Option(
        None, min=1, help="Leave out rows of more ids (prompt and output together)."
    ),
    merge_turns: bool = typer.Option(
        False,
        "--merge-turns",
        help="One row of several turns where ids prove that the later prompt begins with the "
        "earlier prompt and output.",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing file."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Write the good rows of a run for a trainer, and say what was left out.

    jsonl is one {"id", "input_ids", "loss_mask"} a line; the mask is 0 over the prompt and 1
    over every generated id, the stop id included. --merge-turns saves the repeated beginnings of
    conversations and supervises the same ids; where the template rewrites history, turns stay
    rows of their own.
    """
    from dataclasses import asdict

    from eyas.export import export_run
    from eyas.store import Run

    report = export_run(
        run, to=to, out=out, only=only, max_length=max_length, merge_turns=merge_turns,
        overwrite=overwrite,
    )  # fmt: skip
    if as_json:
        print(json.dumps(asdict(report)))
        return
    print(f"wrote     {report.rows:,} rows, {report.tokens:,} ids, "
          f"{report.supervised:,} of them supervised, to {out}")  # fmt: skip
    if merge_turns:
        print(f"merged    {report.turns:,} turns into {report.rows:,} rows, which saves "
              f"{report.tokens_saved:,} ids")  # fmt: skip
    left = {
        "cut at the token budget": report.left_out_truncated,
        f"longer than {max_length} ids": report.left_out_long,
    }
    for why, count in left.items():
        if count:
            print(f"left out  {count:,} {why}")
    counts = Run(run).manifest.counts
    if not counts or counts.get("pending"):
        pending = f"{counts['pending']:,} rows are" if counts else "rows may be"
        print(
            f"note      {pending} still pending in {run}; the capture goes on with its own command"
        )
    if report.rejected:
        print(f"left out  {report.rejected:,} rejected rows and input lines")
    if report.truncated:
        print(f"note      {report.truncated:,} rows end at their token budget, without a stop id "
              "(--only stop leaves them out)")  # fmt: skip
