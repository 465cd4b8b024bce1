"""Options that several commands share: how a target is reached and asked.

Invariant: an option means the same in every command that has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from eyas.run_target import RunTarget
    from eyas.store import Run

Url = Annotated[
    list[str] | None,
    typer.Option(
        help="The server's address; may be repeated, and @FILE is a file of addresses, one a "
        "line, which may change while a capture runs."
    ),
]
TokenizerSource = Annotated[
    str | None,
    typer.Option(help="Directory with the target's tokenizer files, a .gguf file, or a hub id."),
]
EngineName = Annotated[
    str | None, typer.Option(help="auto, sglang, vllm or llama_cpp.  [default: auto]")
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling; where not given, the model's generation config decides."),
]
TopP = Annotated[float | None, typer.Option()]
TopK = Annotated[int | None, typer.Option(help="-1 or 0 for all.")]
MinP = Annotated[float | None, typer.Option()]
RepetitionPenalty = Annotated[float | None, typer.Option()]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(help="Token budget of one answer, reasoning included.  [default: 16384]"),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(help="An id that ends generation besides the model's own; may be repeated."),
]
System = Annotated[
    str | None, typer.Option(help="System message for conversations that have none.")
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        help="The chat template's switches as JSON, such as '{\"thinking\": true}', or a list of "
        "such with a weight each, of which each conversation is given one; @FILE reads it."
    ),
]
History = Annotated[
    str | None,
    typer.Option(
        help="What the target is shown of its earlier turns: served (as a chat client sends them "
        "and the template keeps them), full (their reasoning too), tokens (their very ids).  "
        "[default: served]"
    ),
]
ChatTemplateFile = Annotated[
    str | None,
    typer.Option(
        help="Template file instead of the model's own, or a Python function: module:function or "
        "file.py:function (messages, tools, template_kwargs) that returns text or ids."
    ),
]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option(
        "--trust-remote-code",
        help="Run the model's own tokenizer code to make prompts; a hub id needs --revision COMMIT.",
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Which commit, branch or tag of a tokenizer's hub id.")
]
ControlText = Annotated[
    str | None,
    typer.Option(
        help="Control strings in the text of messages: allow (they become control ids, as in "
        "serving), escape (they stay plain text) or refuse (the row is rejected).  "
        "[default: allow]"
    ),
]
Date = Annotated[
    str | None,
    typer.Option(help="The day for templates that print it.  [default: the day the run began]"),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto",
        help="Requests in flight at each server; auto (a capture's default) for as many as "
        "keep it full.",
    ),
]
ApiKeyEnv = Annotated[
    str | None, typer.Option(help="Name of the environment variable that holds the API key.")
]
Logprobs = Annotated[
    bool | None, typer.Option("--logprobs", help="Store log-probabilities as well.")
]
OnMissingCloser = Annotated[
    str | None,
    typer.Option(help="reject or keep turns that end inside their reasoning.  [default: reject]"),
]
Tries = Annotated[
    int | None, typer.Option(help="Tries of a request before its row fails.  [default: 4]")
]
GiveUpAfter = Annotated[
    float | None,
    typer.Option(help="Seconds without any answer before the capture ends.  [default: 120]"),
]
ConfigFile = Annotated[
    str | None, typer.Option(help="YAML file with these options; the command line wins.")
]


def open_target_of(
    run: Run,
    tokenizer: str | None,
    chat_template: str | None,
    trust_remote_code: bool | None,
    revision: str | None,
) -> RunTarget:
    """The target of a run, from the files that it was captured with or those that are named.

    Raises:
        TokenizerError: if they cannot be loaded.
        ConfigError: if they are not the run's.
    """
    from eyas.run_target import open_run_target
    from eyas.target import read_template
    from eyas.tokens import load_tokenizer

    try:
        loaded = load_tokenizer(
            tokenizer or run.manifest.tokenizer,
            chat_template=read_template(chat_template),
            revision=revision,
            trust_remote_code=bool(trust_remote_code),
        )
    except TokenizerError as error:
        if tokenizer is not None:
            raise
        raise TokenizerError(
            f"{error} That is where the run found it; --tokenizer says where it is now."
        ) from error
    return open_run_target(run, loaded)


def given_values(options: dict[str, Any]) -> dict[str, Any]:
    """What was said on the command line, under the configuration's names."""
    names = {"stop_token_id": "stop_token_ids"}
    values = {names.get(k, k): v for k, v in options.items() if v is not None and v != []}
    if "template_kwargs" in values:
        values["template_kwargs"] = json_switches(values["template_kwargs"])
    return values


def json_switches(text: str) -> dict[str, Any] | list[Any]:
    """The value of ``--template-kwargs``: JSON, or ``@FILE`` that holds it.

    Raises:
        ConfigError: if it is no JSON object and no list.
    """
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--template-kwargs {text}: {error}") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--template-kwargs {text!r} is not JSON ({error}); it should look like "
            "'{\"thinking\": true}'"
        ) from error
    if not isinstance(value, dict | list):
        raise ConfigError(f"--template-kwargs {text!r} must be a JSON object of names and values")
    return value


def one_mode(text: str) -> dict[str, Any]:
    """`json_switches` where there can be no mix of modes.

    Raises:
        ConfigError: if it is no JSON object, or holds what is no switch.
    """
    from eyas.modes import parse_mix

    value = json_switches(text)
    if isinstance(value, list):
        raise ConfigError(f"--template-kwargs {text!r} is a mix; here it must be one object")
    try:
        parse_mix(value)
    except ValueError as error:
        raise ConfigError(f"--template-kwargs {text!r}: {error}") from error
    return value
