"""``eyas export``: a run in a trainer's own form."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli import options
from eyas.cli.tokens import printable

if TYPE_CHECKING:
    from eyas.export import ExportReport

NAME = "export"
EPILOG = """\b
Examples:
  eyas export run --to jsonl --out train.jsonl --only stop --max-length 8192
  eyas export run --to parquet --out data --split train:0.98,eval:0.02 --shards 8 --shuffle 1
  eyas export run --to speculators --out prepared --merge-turns --max-length 8192 --on-longer cut
  eyas export run --to hf --out upload --columns turn,sample,marks
  eyas export run --to openai --out chats.jsonl --dry-run
\b
--out names a file. It names a directory with --split or --shards, whose files are called
SPLIT.SUFFIX or SPLIT-00000-of-00008.SUFFIX (SPLIT is train where there is no --split), and for
hf and speculators. It is there whole or not at all.
\b
Exit codes: 0 written, 2 usage, 4 the disk is full, 130 interrupted.
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    to: str = typer.Option("jsonl", help="The form; see below."),
    out: str = typer.Option(..., help="The file or directory to write; .gz compresses JSON Lines."),
    only: str = typer.Option(None, help="stop: leave out rows that their budget cut."),
    drop_marked: str = typer.Option(
        None,
        metavar="MARK,...",
        help="Leave out rows that carry one of these marks; any: rows with any mark.  "
        "[default: marked rows are kept]",
    ),
    max_length: int = typer.Option(
        None, min=1, help="The most ids of a row (prompt and output together)."
    ),
    on_longer: str = typer.Option(
        "drop", help="What becomes of longer rows: drop, or cut (at the end)."
    ),
    min_supervised_tokens: int = typer.Option(
        1, min=1, help="Leave out rows with fewer supervised ids."
    ),
    merge_turns: bool = typer.Option(
        False,
        "--merge-turns",
        help="One row of several turns where ids prove that the later prompt begins with the "
        "earlier prompt and output.",
    ),
    mask: str = typer.Option(
        "all",
        help="What is supervised: all generated ids, last-turn (of a row that --merge-turns made), "
        "or no-reasoning (what does not stand between the thinking markers).",
    ),
    dedupe: bool = typer.Option(
        False, "--dedupe", help="Of rows with the same ids and mask write the first one."
    ),
    split: str = typer.Option(
        None,
        metavar="NAME:SHARE,...",
        help="Such as train:0.98,eval:0.02; a conversation is in one split, with all its turns "
        "and samples, whatever else the run holds.",
    ),
    shuffle: int = typer.Option(
        None, metavar="SEED", help="Write rows in a random order.  [default: that of the run]"
    ),
    shards: int = typer.Option(None, min=1, help="Write each split to so many files."),
    columns: str = typer.Option(
        None,
        metavar="NAME,...",
        help="Further columns of the run; a merged row has its last turn's.",
    ),
    tokenizer: options.TokenizerSource = None,
    chat_template: options.ChatTemplateFile = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace a file, or a directory that an export made."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Do everything but write, and say what would be."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Write the good rows of a run for a trainer, and say what was left out or cut.

    Forms of ids, exact to the last one:
    jsonl ({"id", "input_ids", "loss_mask"} a line), parquet, hf (Parquet and a data set card, for
    a hub), speculators (its prepared directory), specforge (for data.prompts_path).

    Forms of text, whose reader tokenizes again; how many rows that changes is measured:
    openai, sharegpt, specforge-chat, eagle, torchspec, automodel.

    The mask is 0 over the prompt and 1 over every generated id, the stop id included.
    --merge-turns saves the repeated beginnings of conversations and supervises the same ids;
    where the template rewrites history, turns stay rows of their own. What the trainer itself
    will still do is said at the end.
    """
    from eyas.cli.live import Live
    from eyas.export import ExportOptions, export_run, parse_split

    chosen = ExportOptions(
        only=only,
        drop_marked=_names(drop_marked),
        max_length=max_length,
        on_longer=on_longer,
        min_supervised=min_supervised_tokens,
        merge_turns=merge_turns,
        mask=mask,
        dedupe=dedupe,
        split=() if split is None else parse_split(split),
        shuffle=shuffle,
        shards=shards,
        columns=_names(columns),
    )

    def plan(lines: list[str]) -> None:
        if not as_json:
            print(f"plan      {printable('; '.join(lines))}", flush=True)

    with _ended_like_ctrl_c(), Live(sys.stderr) as live:
        report = export_run(
            run,
            to=to,
            out=out,
            options=chosen,
            overwrite=overwrite,
            dry_run=dry_run,
            tokenizer=tokenizer,
            chat_template=_template(chat_template),
            revision=revision,
            trust_remote_code=bool(trust_remote_code),
            on_plan=plan,
            on_rows=live.count("rows read"),
        )
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report, "would write" if dry_run else "wrote")
        _print_pending(run)


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Have the signals that end a process end the export, which then leaves nothing behind."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signals = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)  # ignored under nohup
    before = {number: signal.signal(number, end) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _template(given: str | None) -> Any:
    """What ``--chat-template`` names."""
    from eyas.target import read_template

    return None if given is None else read_template(given)


def _names(text: str | None) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _print(report: ExportReport, wrote: str) -> None:
    from eyas.export import REASONS

    print(f"{wrote:<9} {report.rows:,} rows, {report.tokens:,} ids, "
          f"{report.supervised:,} of them supervised, to {printable(report.out)}")  # fmt: skip
    if len(report.splits) > 1:
        for name, of in report.splits.items():
            print(f"  {name:<8}{of.rows:,} rows, {of.tokens:,} ids, {of.supervised:,} supervised")
    if report.lengths:
        shown = ", ".join(f"{name} {length:,}" for name, length in report.lengths.items())
        print(f"lengths   {shown} ids")
    if report.turns > report.rows:
        print(f"merged    {report.turns:,} turns into {report.rows:,} rows, which saves "
              f"{report.tokens_saved:,} ids")  # fmt: skip
    for reason, count in report.left_out.items():
        print(f"left out  {count:,} {REASONS[reason]}")
    if report.rejected:
        print(f"left out  {report.rejected:,} rejected rows and input lines")
    if report.cut:
        print(f"cut       {report.cut:,} rows, which lose {report.cut_ids:,} ids, "
              f"{report.cut_supervised:,} of them supervised")  # fmt: skip
    if report.truncated:
        print(f"note      {report.truncated:,} rows end without a stop id, at their token budget "
              "or where they were cut (--only stop leaves out the former)")  # fmt: skip
    if report.drift:
        _print_drift(report.drift)
    for line in report.trainer:
        print(f"trainer   {line}")


def _print_drift(drift: dict[str, Any]) -> None:
    from eyas.drift import CAUSES

    if drift["rows"]:
        print(f"drift     {drift['rows_changed']:,} of {drift['rows']:,} rows "
              f"({drift['rows_changed_share']:.2%}) have other ids once the run's own template and "
              f"tokenizer read them: {drift['ids_lost']:,} of the {drift['ids']:,} ids of their last "
              "answers are lost")  # fmt: skip
    for cause, count in drift["causes"].items():
        print(f"  {count:,} rows: {CAUSES[cause]}")
    for why, count in drift["not_measured"].items():
        print(f"  {count:,} rows not measured: {printable(why)}")


def _print_pending(run: str) -> None:
    from eyas.store import Run

    counts = Run(run).manifest.counts
    if not counts or counts.get("pending"):
        pending = f"{counts['pending']:,} rows are" if counts else "rows may be"
        print(
            f"note      {pending} still pending in {printable(run)}; the capture goes on with its "
            "own command"
        )
