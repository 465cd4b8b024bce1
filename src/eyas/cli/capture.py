"""``eyas capture``: prompts in, exact token sequences out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli import options

if TYPE_CHECKING:
    from eyas.progress import Progress
    from eyas.session import Session
    from eyas.status import StatusFile
    from eyas.store.redo import Redo

NAME = "capture"
EPILOG = """\b
Examples:
  eyas capture prompts.jsonl --out run --url http://127.0.0.1:30000 \\
    --tokenizer /models/Kimi-K2.5 --template-kwargs '{"thinking": true}'
  eyas capture 'data/*.parquet' --out run --url HOST:30000 --tokenizer Qwen/Qwen3-8B --n 4
  eyas capture --config run/config.yaml --out another-run
  eyas capture --config run/config.yaml --out runs/3 --shard 3/8
"""


def command(
    prompts: list[str] = typer.Argument(
        None,
        help="Files, globs or - for standard input: JSON Lines, JSON, CSV, Parquet (.gz, .zst).",
    ),
    out: str = typer.Option(None, help="The run directory. The same command again continues it."),
    url: options.Url = None,
    tokenizer: options.TokenizerSource = None,
    engine: options.EngineName = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    max_new_tokens: options.MaxNewTokens = None,
    n: int = typer.Option(None, help="Independent samples of each conversation.  [default: 1]"),
    seed: int = typer.Option(None, help="Base of all requests' seeds.  [default: 0]"),
    stop_token_id: options.StopTokenId = None,
    system: options.System = None,
    template_kwargs: options.TemplateKwargs = None,
    history: options.History = None,
    chat_template: options.ChatTemplateFile = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    control_text: options.ControlText = None,
    date: options.Date = None,
    column: str = typer.Option(None, help="The input column that holds the prompt."),
    limit: int = typer.Option(None, help="Take only the first N conversations of the input."),
    order: str = typer.Option(
        None,
        metavar="input|longest|RUN",
        help="Which conversations go first, so that no long one is left to the end: longest for "
        "those with the most turns and the longest prompts, or an earlier RUN for those whose "
        "answers were the longest there.  [default: input]",
    ),
    shard: str = typer.Option(
        None,
        metavar="I/N",
        help="Take only the I-th of N parts (of what --limit takes), for array jobs; "
        "eyas merge joins their runs.",
    ),
    concurrency: options.Concurrency = None,
    api_key_env: options.ApiKeyEnv = None,
    logprobs: options.Logprobs = None,
    on_missing_closer: options.OnMissingCloser = None,
    reject: str = typer.Option(None, help="Refuse rows with these marks too (comma-separated)."),
    on_length: str = typer.Option(
        None,
        help="keep, reject or continue answers that their budget cut.  [default: keep]",
    ),
    continue_to: int = typer.Option(
        None, help="The greater budget up to which --on-length continue goes on."
    ),
    tool_results: str = typer.Option(
        None,
        help="For a tool call without a recorded result: stop (the conversation ends), nearest "
        "(the recorded arguments most like it), command:CMD or module:function.  [default: stop]",
    ),
    tool_timeout: float = typer.Option(
        None, help="Seconds that command or function have for one result.  [default: 60]"
    ),
    tool_rounds: int = typer.Option(
        None, help="The most answers in a row whose tool calls are answered.  [default: 32]"
    ),
    tries: options.Tries = None,
    give_up_after: options.GiveUpAfter = None,
    config: options.ConfigFile = None,
    archive: bool = typer.Option(
        False, "--archive", help="If --out holds another configuration's rows, put them aside."
    ),
    no_probe: bool = typer.Option(
        False, "--no-probe", help="Skip the probe that else comes first (see eyas probe)."
    ),
    metrics_port: int = typer.Option(
        0, help="Serve figures for Prometheus at this port's /metrics; 0 for not at all."
    ),
    metrics_host: str = typer.Option("127.0.0.1", help="The address that --metrics-port is on."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Capture a target's exact answers to a set of prompts.

    Prompts are rendered with the model's own chat template and sent as token ids; the ids
    that come back are checked and stored. A probe comes first, and nothing is captured if it
    fails. Running the same command again goes on where it stopped. Ctrl-C stops cleanly; a
    second one at once.
    """
    given = locals()
    from eyas.config import make_config

    flags = ("config", "archive", "no_probe", "metrics_port", "metrics_host", "as_json")
    values = options.given_values({k: v for k, v in given.items() if k not in flags})
    if "reject" in values:
        values["reject"] = values["reject"].split(",")
    resolved = make_config(values, config)
    code = run_capture(
        resolved,
        archive=archive,
        probe=not no_probe,
        as_json=as_json,
        metrics=(metrics_host, metrics_port) if metrics_port else None,
    )
    raise typer.Exit(code)


def run_capture(
    config: Any,
    *,
    archive: bool = False,
    probe: bool = True,
    as_json: bool = False,
    metrics: tuple[str, int] | None = None,
    redo: Redo | None = None,
) -> int:
    """Capture with progress on standard error and a summary on standard output.

    Args:
        config: what to capture.
        archive: put the rows of another configuration aside.
        redo: rows of the run that are to be done again.
        probe: ask the probe's questions first.
        as_json: print the summary as JSON.
        metrics: host and port to serve figures at.
    """
    from dataclasses import asdict

    from eyas.cli.findings import brief, count_verdicts
    from eyas.cli.live import Live
    from eyas.cli.summary import print_start, print_summary
    from eyas.findings import Findings
    from eyas.loop import capture

    with ExitStack() as stack:
        live = stack.enter_context(Live(sys.stderr))
        views: list[Callable[[Progress], None]] = [live.update]
        if metrics is not None:
            from eyas.metrics import Metrics

            served = stack.enter_context(Metrics(*metrics))
            live.say(f"metrics   {served.url}")
            views.append(served.update)
        findings = Findings(lambda finding: brief(finding, live.say))
        status: StatusFile | None = None

        def start(session: Session) -> None:
            from eyas.status import StatusFile

            nonlocal status
            status = stack.enter_context(StatusFile(session.run.path))
            views.append(status.update)
            if findings.items:
                live.say(f"probe     {count_verdicts(findings.items)}")
            print_start(session, live)

        def show(progress: Progress) -> None:
            for view in views:
                view(progress)

        summary = capture(
            config,
            archive=archive,
            probe=probe,
            redo=redo,
            on_finding=findings.take,
            on_start=start,
            on_progress=show,
            say=live.say,
        )
        if status is not None:
            status.finish(summary)
    try:
        if as_json:
            print(json.dumps({**asdict(summary), "exit_code": summary.exit_code}))
        else:
            print_summary(summary)
        sys.stdout.flush()
    except OSError:  # nobody reads it any more; how the capture ended stays the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if summary.interrupted:  # a thread may still wait for standard input, and would be joined
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(summary.exit_code)
    return summary.exit_code
