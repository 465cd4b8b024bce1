"""``eyas drift``: what a run would have lost, had only text been kept."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from eyas.cli import options

NAME = "drift"
EPILOG = """\b
Examples:
  eyas drift run
  eyas drift run --sample 10000 --json
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    limit: int = typer.Option(None, min=1, help="Look at the first N rows only."),
    sample: int = typer.Option(None, min=1, help="Look at N rows, drawn at random."),
    seed: int = typer.Option(0, help="Which rows --sample draws."),
    tokenizer: options.TokenizerSource = None,
    chat_template: options.ChatTemplateFile = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    as_json: bool = typer.Option(False, "--json", help="Print everything seen as JSON."),
) -> None:
    """Measure how many rows and ids would be others, had only text been kept.

    In three ways: decoded and encoded again; through the chat API's fields (reasoning_content,
    content, tool_calls) and rendered again; rendered as an earlier turn of a longer conversation.
    Says where rows differ first and why, with examples. Changes nothing.
    """
    from eyas.cli.live import Live
    from eyas.drift import measure_drift
    from eyas.store import Run

    opened = Run(run)
    target = options.open_target_of(opened, tokenizer, chat_template, trust_remote_code, revision)
    with Live(sys.stderr) as live:
        report = measure_drift(
            opened, target, limit=limit, sample=sample, seed=seed, on_row=live.count("rows")
        )
    figures = {**report.as_dict(), "template_missing": target.fault}
    print(json.dumps(figures)) if as_json else _print(figures)


def _print(figures: dict[str, Any]) -> None:
    from eyas.cli.tokens import printable
    from eyas.drift import CAUSES

    print(f"{figures['rows']:,} rows; had only text been kept, so many would be others:\n")
    print(f"{'way':<9} {'rows':>9} {'changed':>17} {'output ids':>13} {'lost':>19}")
    for name, way in figures["ways"].items():
        if way["rows"]:
            print(
                f"{name:<9} {way['rows']:>9,} {way['rows_changed']:>9,} "
                f"{way['rows_changed_share']:>7.2%} {way['ids']:>13,} {way['ids_lost']:>11,} "
                f"{way['ids_lost_share']:>7.3%}"
            )
    if figures["template_missing"]:
        print(f"\nnote: {printable(figures['template_missing'])}")
    for name, way in figures["ways"].items():
        print(f"\n{name}: {way['way']}")
        for why, count in way["not_measured"].items():
            print(f"  {count:,} rows not measured: {printable(why)}")
        for cause, count in way["causes"].items():
            print(f"  {count:,} rows: {CAUSES[cause]}")
            for example in way["examples"][cause][:1]:
                print(f"    {_shown(example)}")


def _shown(example: dict[str, Any]) -> str:
    from eyas.cli.tokens import printable

    def pieces(suffix: str) -> str:
        pairs = zip(example[f"pieces{suffix}"], example[f"ids{suffix}"], strict=True)
        return " ".join(f"{piece!r}[{index}]" for piece, index in pairs) or "the end"

    at = example["output_position"]
    where = f"output id {at}" if at >= 0 else f"prompt id {example['position']}"
    return printable(f"{example['id']} at {where}: {pieces('')} comes back as {pieces('_again')}")
