"""``eyas probe``: is this server, with this tokenizer, what we think it is?"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from eyas.cli import options
from eyas.errors import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from eyas.probe import Probe

NAME = "probe"
EPILOG = """\b
Examples:
  eyas probe --url http://127.0.0.1:30000 --tokenizer /models/Kimi-K2.5
  eyas probe --url HOST:8000 --tokenizer Qwen/Qwen3-8B --template-kwargs '{"enable_thinking": false}'
  eyas probe prompts.jsonl --config run/config.yaml --json
\b
Verdicts: ok was proven; note is worth knowing; warning may be wrong for some rows; unproven
could not be looked at here; failed means that a capture would be wrong.
\b
Exit codes: 0 nothing failed, 2 something failed, or usage, 4 nothing answers at the address.
"""


def command(
    prompts: list[str] = typer.Argument(
        None, help="Prompt files: their beginning is looked through for control strings."
    ),
    url: options.Url = None,
    tokenizer: options.TokenizerSource = None,
    engine: options.EngineName = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    max_new_tokens: options.MaxNewTokens = None,
    stop_token_id: options.StopTokenId = None,
    system: options.System = None,
    template_kwargs: options.TemplateKwargs = None,
    history: options.History = None,
    chat_template: options.ChatTemplateFile = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    control_text: options.ControlText = None,
    date: options.Date = None,
    api_key_env: options.ApiKeyEnv = None,
    logprobs: options.Logprobs = None,
    on_missing_closer: options.OnMissingCloser = None,
    tries: options.Tries = None,
    give_up_after: options.GiveUpAfter = None,
    config: options.ConfigFile = None,
    as_json: bool = typer.Option(False, "--json", help="Print everything seen as JSON."),
) -> None:
    """Prove a server before a capture is paid for.

    Asks "What is 2+2?" as a capture would, and looks at ids: who answers, whether client and
    server agree on tokenizer and template, where the reasoning begins and ends, how the answer
    stops, whether all that the server says fits together, and whether the captured ids, scored
    again as one prompt, are what the model sampled.
    """
    given = locals()
    from eyas.cli.findings import print_finding
    from eyas.config import make_target_config
    from eyas.probe import probe
    from eyas.readers import PromptReader

    flags = ("config", "as_json", "prompts")
    values = options.given_values({k: v for k, v in given.items() if k not in flags})
    resolved = make_target_config(values, config)
    reader = PromptReader(prompts, system=resolved.system) if prompts else None
    done = probe(resolved, on_finding=None if as_json else print_finding, prompts=reader)
    if as_json:
        print(json.dumps(done.as_dict()))  # ASCII: what a model wrote may be hostile
    else:
        _print_end(done)
    raise typer.Exit(EXIT_USAGE if done.failed else EXIT_OK)


def _print_end(done: Probe) -> None:
    """The picture of the answer, and the verdict."""
    from eyas.cli.findings import count_verdicts
    from eyas.cli.tokens import print_parts
    from eyas.probe.question import QUESTION

    target, answers = done.target, done.answers
    if answers is not None and answers.greedy.generation.output_ids and answers.greedy.good:
        greedy = answers.greedy
        print(f"\n{QUESTION!r} at temperature 0, token[id]:\n")
        print_parts(
            greedy.prompt_ids, list(greedy.generation.output_ids), target.profile, target.tokenizer,
            ids=True,
        )  # fmt: skip
        generation = greedy.generation
        print(
            f"\ncounts    prompt {len(greedy.prompt_ids)} sent, {generation.prompt_tokens} by the "
            f"server; output {len(generation.output_ids)} came, {generation.completion_tokens} by "
            f"the server; finish {generation.finish_reason}"
            + (f", stopped at {generation.matched}" if generation.matched is not None else "")
        )
    counts = count_verdicts(done.findings.items)
    verdict = "a capture would be wrong" if done.failed else "a capture can begin"
    print(f"\n{verdict} ({counts}; {done.seconds:.1f} s)", file=sys.stdout)
