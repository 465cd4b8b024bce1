"""``eyas redo``: rows that were cut or refused, done again."""

from __future__ import annotations

from typing import Any

import typer

from eyas.cli import options
from eyas.errors import ConfigError

NAME = "redo"
EPILOG = """\b
Examples:
  eyas redo run --which length --max-new-tokens 65536
  eyas redo run --which rejected
  eyas redo run --which rejected --reason missing_closer --url HOST:30000
\b
Exit codes: those of eyas capture.
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    which: str = typer.Option(
        ..., help="length: answers that their budget cut; rejected: refused rows."
    ),
    reason: list[str] = typer.Option(
        None, help="With rejected: only rows refused for this reason; may be repeated."
    ),
    max_new_tokens: int = typer.Option(
        None, help="The greater token budget that length needs, for the whole answer."
    ),
    url: options.Url = None,
    concurrency: options.Concurrency = None,
    api_key_env: options.ApiKeyEnv = None,
    trust_remote_code: bool = typer.Option(
        False,
        "--trust-remote-code",
        help="Run the code that the run's configuration names to make prompts.",
    ),
    no_probe: bool = typer.Option(False, "--no-probe", help="Skip the probe that comes first."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Do rows of a run again, with the run's own configuration and prompts.

    Cut answers are continued from their exact ids up to the greater budget (begun anew where a
    penalty would begin anew). Turns that were refused after them follow. Rows that were good are
    not touched; the old parts are kept in the run's archive.
    """
    from pathlib import Path

    from eyas.cli.capture import run_capture
    from eyas.config import make_config, read_config_file
    from eyas.store import Run
    from eyas.store.redo import Redo
    from eyas.verify.run_rows import KNOWN_REASONS

    if which not in ("length", "rejected"):
        raise ConfigError(f"--which {which} is not known; there are length and rejected")
    if reason and which == "length":
        raise ConfigError("--reason goes with --which rejected")
    for name in reason or ():
        if name not in KNOWN_REASONS:
            raise ConfigError(
                f"no row is ever refused for {name!r}; docs/format.md has the reasons"
            )
    manifest = Run(run).manifest
    if which == "length" and max_new_tokens is None:
        raise ConfigError(
            "--which length needs --max-new-tokens N, the budget of the whole answer, greater "
            f"than the one that cut it (the run's is {manifest.max_new_tokens})"
        )
    file = Path(run) / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run} has no config.yaml that says how to capture its rows")
    budget = max_new_tokens or manifest.max_new_tokens
    given: dict[str, Any] = {"out": str(Path(run)), "max_new_tokens": budget}
    more = {"url": url or None, "concurrency": concurrency, "api_key_env": api_key_env}
    given |= {name: value for name, value in more.items() if value is not None}
    if (read_config_file(file).get("continue_to") or budget + 1) <= budget:
        given["on_length"] = "keep"  # it was continued as far as it was to be
    config = make_config(given, file, trusted=trust_remote_code)
    if "-" in config.prompts:
        raise ConfigError(
            f"{run} was captured from standard input, which redo cannot read again; "
            "give its rows as a file"
        )
    code = run_capture(
        config,
        probe=not no_probe,
        as_json=as_json,
        redo=Redo(which, tuple(reason or ()), max_new_tokens),
    )
    raise typer.Exit(code)
