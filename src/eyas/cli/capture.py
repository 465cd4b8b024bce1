"""``eyas capture``: prompts in, exact token sequences out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from eyas.errors import ConfigError

NAME = "capture"
EPILOG = """\b
Examples:
  eyas capture prompts.jsonl --out run --url http://127.0.0.1:30000 \\
    --tokenizer /models/Kimi-K2.5 --template-kwargs '{"thinking": true}'
  eyas capture 'data/*.parquet' --out run --url HOST:30000 --tokenizer Qwen/Qwen3-8B --n 4
  eyas capture --config run/config.yaml --out another-run
"""


def command(
    prompts: list[str] = typer.Argument(
        None,
        help="Files, globs or - for standard input: JSON Lines, JSON, CSV, Parquet (.gz, .zst).",
    ),
    out: str = typer.Option(None, help="The run directory. The same command again continues it."),
    url: str = typer.Option(None, help="The server's address."),
    tokenizer: str = typer.Option(
        None, help="Directory with the target's tokenizer files, a .gguf file, or a hub id."
    ),
    engine: str = typer.Option(None, help="auto, sglang or llama_cpp.  [default: auto]"),
    temperature: float = typer.Option(
        None, help="Sampling; where not given, the model's generation config decides."
    ),
    top_p: float = typer.Option(None),
    top_k: int = typer.Option(None, help="-1 or 0 for all."),
    min_p: float = typer.Option(None),
    repetition_penalty: float = typer.Option(None),
    max_new_tokens: int = typer.Option(
        None, help="Token budget of one answer, reasoning included.  [default: 16384]"
    ),
    n: int = typer.Option(None, help="Independent samples of each conversation.  [default: 1]"),
    seed: int = typer.Option(None, help="Base of all requests' seeds.  [default: 0]"),
    stop_token_id: list[int] = typer.Option(
        None, help="An id that ends generation besides the model's own; may be repeated."
    ),
    system: str = typer.Option(None, help="System message for conversations that have none."),
    template_kwargs: str = typer.Option(
        None, help="The chat template's switches as JSON, such as '{\"thinking\": true}'."
    ),
    chat_template: str = typer.Option(None, help="Template file instead of the model's own."),
    date: str = typer.Option(
        None, help="The day for templates that print it.  [default: the day the run began]"
    ),
    column: str = typer.Option(None, help="The input column that holds the prompt."),
    limit: int = typer.Option(None, help="Take only the first N conversations."),
    concurrency: int = typer.Option(
        None, help="Requests in flight.  [default: what the server says it runs at once, else 64]"
    ),
    api_key_env: str = typer.Option(
        None, help="Name of the environment variable that holds the API key."
    ),
    logprobs: bool = typer.Option(None, "--logprobs", help="Store log-probabilities as well."),
    on_missing_closer: str = typer.Option(
        None, help="reject or keep turns that end inside their reasoning.  [default: reject]"
    ),
    reject: str = typer.Option(None, help="Refuse rows with these marks too (comma-separated)."),
    tries: int = typer.Option(None, help="Tries of a request before its row fails.  [default: 4]"),
    give_up_after: float = typer.Option(
        None, help="Seconds without any answer before the capture ends.  [default: 120]"
    ),
    config: str = typer.Option(None, help="YAML file with these options; the command line wins."),
    archive: bool = typer.Option(
        False, "--archive", help="If --out holds another configuration's rows, put them aside."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Capture a target's exact answers to a set of prompts.

    Prompts are rendered with the model's own chat template and sent as token ids; the ids
    that come back are checked and stored. Running the same command again goes on where it
    stopped. Ctrl-C stops cleanly; a second one at once.
    """
    given: dict[str, Any] = {
        "prompts": prompts or None,
        "out": out,
        "url": url,
        "tokenizer": tokenizer,
        "engine": engine,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "max_new_tokens": max_new_tokens,
        "n": n,
        "seed": seed,
        "stop_token_ids": stop_token_id or None,
        "system": system,
        "template_kwargs": _json_object(template_kwargs),
        "chat_template": chat_template,
        "date": date,
        "column": column,
        "limit": limit,
        "concurrency": concurrency,
        "api_key_env": api_key_env,
        "logprobs": logprobs,
        "on_missing_closer": on_missing_closer,
        "reject": reject.split(",") if reject else None,
        "tries": tries,
        "give_up_after": give_up_after,
    }
    from eyas.config import make_config

    resolved = make_config({k: v for k, v in given.items() if v is not None}, config)
    raise typer.Exit(run_capture(resolved, archive=archive, as_json=as_json))


def run_capture(config: Any, *, archive: bool = False, as_json: bool = False) -> int:
    """Capture with progress on standard error and a summary on standard output."""
    from dataclasses import asdict

    from eyas.cli.live import Live
    from eyas.cli.summary import print_start, print_summary
    from eyas.loop import capture

    with Live(sys.stderr) as live:
        summary = capture(
            config,
            archive=archive,
            on_start=lambda session: print_start(session, live),
            on_progress=live.update,
            say=live.say,
        )
    if as_json:
        print(json.dumps({**asdict(summary), "exit_code": summary.exit_code}))
    else:
        print_summary(summary)
    if summary.interrupted:  # a thread may still wait for standard input, and would be joined
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(summary.exit_code)
    return summary.exit_code


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--template-kwargs {text}: {error.strerror}") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--template-kwargs {text!r} is not JSON ({error}); it should look like "
            "'{\"thinking\": true}'"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"--template-kwargs {text!r} must be a JSON object of names and values")
    return value
