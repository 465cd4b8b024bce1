"""``eyas vocab``: a smaller vocabulary for a draft model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli import options

if TYPE_CHECKING:
    from eyas.tokens import Tokenizer
    from eyas.vocabulary import Vocabulary

NAME = "vocab"
EPILOG = """\b
Examples:
  eyas vocab run --size 32000 --out vocab
  eyas vocab run --size 16000 --out speculators-data --only stop
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    size: int = typer.Option(..., min=1, help="How many ids the draft can say."),
    out: str = typer.Option(..., help="The directory for the maps; made if it is not there."),
    only: str = typer.Option(None, help="stop: count no rows that their budget cut."),
    vocab_size: int = typer.Option(
        None,
        min=1,
        help="Rows of the target's embedding.  [default: vocab_size in its config.json]",
    ),
    tokenizer: options.TokenizerSource = None,
    chat_template: options.ChatTemplateFile = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace maps that are there."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Choose the ids that a draft with a smaller vocabulary can say, and write them for trainers.

    Counts the run's output ids. The most frequent are taken, and always stop ids, the markers of
    reasoning, answer and tools, every control id that was generated, and the ids of single bytes.
    Says how much of what the target says is covered, overall, by kind and by template switches,
    and what other sizes would cover. Needs no GPU and no torch.
    """
    from pathlib import Path

    from eyas import vocabulary
    from eyas.cli.live import Live
    from eyas.cli.tokens import printable
    from eyas.store import Run

    opened = Run(run)
    target = options.open_target_of(opened, tokenizer, chat_template, trust_remote_code, revision)
    loaded = target.tokenizer
    _, said_by = vocabulary.embedding_size(loaded, vocab_size)
    with Live(sys.stderr) as live:
        chosen = vocabulary.choose_vocabulary(
            opened, target, size,
            vocab_size=vocab_size, only=only, on_row=live.count("rows counted"),
        )  # fmt: skip
    figures = {
        **chosen.figures(),
        "vocab_size_from": said_by,
        "tokenizer_ids": loaded.size,
        "only": only,
        "run": run,
        "template_missing": target.fault,
        "other_sizes": [_short(other) for other in vocabulary.other_sizes(chosen)],
        "left_out": [
            {"id": i, "text": loaded.decode([i]), "count": n} for i, n in chosen.left_out()
        ],
    }
    paths = vocabulary.write(chosen, Path(out), figures, overwrite=overwrite)
    if as_json:
        print(json.dumps({**figures, "files": [str(path) for path in paths]}))
        return
    _print(figures, loaded)
    print(f"wrote     {printable(out)}: " + ", ".join(path.name for path in paths))
    if not any(path.name == "token_freq.pt" for path in paths):
        print("note      token_freq.pt was there already, with an export's own counts, and stays")


def _short(other: Vocabulary) -> dict[str, Any]:
    figures = other.figures()
    return {name: figures[name] for name in ("size", "coverage", "by_kind", "by_mode")}


def _print(figures: dict[str, Any], tokenizer: Tokenizer) -> None:
    from eyas.cli.tokens import printable

    of = f"{figures['vocab_size']:,} ids ({figures['vocab_size_from']}"
    if figures["vocab_size"] != figures["tokenizer_ids"]:
        of += f"; the tokenizer has {figures['tokenizer_ids']:,}"
    print(f"target    {of})")
    print(f"counted   {figures['ids']:,} output ids of {figures['rows']:,} rows, "
          f"{figures['different_ids']:,} different ones")  # fmt: skip
    kept = ", ".join(f"{count} {name}" for name, count in figures["kept"].items() if count)
    print(f"kept      {kept or 'none'}")
    if figures["template_missing"]:
        print(f"note      the template's tool markers are not known: "
              f"{printable(figures['template_missing'])}")  # fmt: skip
    if figures["never_generated"]:
        print(f"note      {figures['never_generated']:,} ids of the {figures['size']:,} were never "
              "generated")  # fmt: skip
    _print_coverage(figures)
    if figures["left_out"]:
        few = ", ".join(
            f"{tokenizer.name(entry['id'])} {entry['count']:,}x"
            for entry in figures["left_out"][:5]
        )
        print(f"left out  {printable(few)}")


def _print_coverage(figures: dict[str, Any]) -> None:
    """A line a size, a column for all ids, each kind and (where they differ) each mode."""
    from eyas.cli.tokens import printable

    kinds = [kind for kind, share in figures["by_kind"].items() if share is not None]
    modes = list(figures["by_mode"]) if len(figures["by_mode"]) > 1 else []
    names = [printable(name) for name in ("all", *kinds, *modes)]
    widths = [max(9, len(name)) for name in names]

    def line(cells: list[str]) -> str:
        return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    print(f"covered   {line(names)}")
    for row in sorted([figures, *figures["other_sizes"]], key=lambda row: int(row["size"])):
        shares = [row["coverage"], *(row["by_kind"][kind] for kind in kinds)]
        shares += [row["by_mode"][mode] for mode in modes]
        mark = " *" if row is figures else ""
        print(f"{row['size']:>9,} {line([f'{share:.3%}' for share in shares])}{mark}")
