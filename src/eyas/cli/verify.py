"""``eyas verify``: a finished run, or other people's training data, checked row by row."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli import options
from eyas.errors import EXIT_OK, EXIT_REJECTED, ConfigError

if TYPE_CHECKING:
    from eyas.tokens import Tokenizer

NAME = "verify"
EPILOG = """\b
Examples:
  eyas verify run
  eyas verify run --rescore 50
  eyas verify train.jsonl --tokenizer /models/Kimi-K2.5
\b
Exit codes: 0 nothing failed, 2 usage, 3 something failed, 4 the server for --rescore is not there.
"""


def command(
    what: list[str] = typer.Argument(
        ..., metavar="RUN|FILE...", help="A run directory, or files of training data."
    ),
    tokenizer: str = typer.Option(
        None,
        help="The target's tokenizer files; a run knows its own.",
    ),
    chat_template: options.ChatTemplateFile = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    template_kwargs: options.TemplateKwargs = None,
    rescore: int = typer.Option(
        None, min=1, metavar="N", help="Score N rows of a run again on the server, at random."
    ),
    url: str = typer.Option(None, help="The server for --rescore.  [default: the one of the run]"),
    seed: int = typer.Option(0, help="Which rows --rescore takes."),
    api_key_env: options.ApiKeyEnv = None,
    limit: int = typer.Option(None, min=1, help="Check only the first N rows of files."),
    max_length: int = typer.Option(
        None, min=1, help="Ids at which the trainer cuts a row, to say what it would lose."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything seen as JSON."),
) -> None:
    """Check a finished run again, or data that others made.

    A run: every check of every row, its prompts rendered again, parts, counts, unique ids and
    profile; with --rescore a sample of rows is scored by the server, and the worst are shown.

    Files (messages, or input_ids with a loss_mask): missing or inline reasoning, missing stop
    ids, masks that teach nothing or too much, ids that do not survive text and back, rows that
    were cut; and the command that makes the damaged data anew.
    """
    from eyas.cli.findings import count_verdicts, print_finding
    from eyas.cli.tokens import printable
    from eyas.findings import Findings

    findings = Findings(None if as_json else print_finding)
    more: dict[str, Any] = {}
    if len(what) == 1 and Path(what[0]).is_dir() and _looks_like_run(Path(what[0])):
        load = _loader(chat_template, revision, trust_remote_code)
        _verify_run(what[0], findings, tokenizer, load, rescore, url, seed, api_key_env)
    else:
        if any(Path(path).is_dir() and _looks_like_run(Path(path)) for path in what):
            raise ConfigError("runs are verified one at a time; give one run, or files")
        for name, value in (("--rescore", rescore), ("--url", url)):
            if value is not None:
                raise ConfigError(f"{name} needs a run directory, and {what[0]} is none")
        if tokenizer is None:
            raise ConfigError(
                f"{what[0]} is not a run, so the target must be named: --tokenizer DIR_OR_ID"
            )
        own = _loader(chat_template, revision, trust_remote_code)(tokenizer)
        named = _template_options(chat_template, revision, trust_remote_code)
        _say_what_waits(what)
        more = _verify_files(what, findings, own, template_kwargs, limit, max_length, named)
    if as_json:
        print(json.dumps({"ok": not findings.failed, "findings": findings.as_dicts(), **more}))
    else:
        verdict = "something is wrong" if findings.failed else "nothing is wrong"
        print(f"\n{verdict} ({count_verdicts(findings.items)})")
        if command := more.get("report", {}).get("regenerate_command"):
            print(f"to make the data anew:\n  {printable(command)}")
    raise typer.Exit(EXIT_REJECTED if findings.failed else EXIT_OK)


def _looks_like_run(path: Path) -> bool:
    from eyas.store import is_run

    return is_run(path) or (path / "traces").is_dir()


def _loader(
    chat_template: str | None, revision: str | None, trust_remote_code: bool | None
) -> Callable[[str], Tokenizer]:
    """What loads a tokenizer with the template that was named for it."""
    from eyas.target import read_template
    from eyas.tokens import load_tokenizer

    return partial(
        load_tokenizer,
        chat_template=read_template(chat_template),
        revision=revision,
        trust_remote_code=bool(trust_remote_code),
    )


def _template_options(
    chat_template: str | None, revision: str | None, trust_remote_code: bool | None
) -> list[str]:
    """What a capture must be told to make prompts as they were made here."""
    named = ["--chat-template", chat_template] if chat_template else []
    named += ["--revision", revision] if revision else []
    return [*named, "--trust-remote-code"] if trust_remote_code else named


def _say_what_waits(files: list[str]) -> None:
    """A pipe that nothing writes to is waited for, as by every program, but not silently."""
    for path in files:
        if Path(path).is_fifo() or (path == "-" and sys.stdin.isatty()):
            name = "standard input" if path == "-" else f"{path} is a pipe, which"
            print(f"{name} is read until its writer ends", file=sys.stderr, flush=True)


def _verify_run(
    path: str,
    findings: Any,
    tokenizer_source: str | None,
    load: Callable[[str], Tokenizer],
    rescore: int | None,
    url: str | None,
    seed: int,
    api_key_env: str | None,
) -> None:
    from eyas.cli.live import Live
    from eyas.store import Run
    from eyas.verify.run import verify_run

    run = Run(path)
    tokenizer = load(tokenizer_source or run.manifest.tokenizer)
    with Live(sys.stderr) as live:
        verify_run(run, tokenizer, findings, on_row=live.count("rows checked"))
    if rescore is not None:
        _rescore(run, tokenizer, findings, rescore, url, seed, api_key_env)


def _rescore(
    run: Any,
    tokenizer: Any,
    findings: Any,
    count: int,
    url: str | None,
    seed: int,
    api_key_env: str | None,
) -> None:
    import asyncio

    from eyas.cli.live import Live
    from eyas.engines import connect
    from eyas.target import read_api_key
    from eyas.verify.rescore import rescore

    known = run.manifest.servers[0] if run.manifest.servers else {}
    address = url or known.get("url")
    if address is None:
        raise ConfigError("the run names no server; give one with --url")

    async def score() -> None:
        key = read_api_key(api_key_env)
        engine = await connect(address, api_key=key)
        try:
            with Live(sys.stderr) as live:
                await rescore(
                    run, engine, tokenizer, findings, count=count, seed=seed,
                    on_row=live.count("rows scored"),
                )  # fmt: skip
        finally:
            await engine.close()

    asyncio.run(score())


def _verify_files(
    files: list[str],
    findings: Any,
    tokenizer: Tokenizer,
    template_kwargs: str | None,
    limit: int | None,
    max_length: int | None,
    template_options: list[str],
) -> dict[str, Any]:
    from eyas.tokens import ChatTemplate, build_profile
    from eyas.verify import verify_file

    kwargs = options.one_mode(template_kwargs) if template_kwargs else {}
    template = ChatTemplate.of(tokenizer, kwargs=kwargs) if tokenizer.makes_prompts else None
    profile = build_profile(tokenizer, template)
    report = verify_file(
        files,
        tokenizer,
        template,
        profile,
        findings,
        limit=limit,
        max_length=max_length,
        template_options=template_options,
    )
    return {"report": report.as_dict()}
