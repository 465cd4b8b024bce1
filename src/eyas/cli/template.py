"""``eyas template``: what a chat template renders, what class it is of, what to watch for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from eyas.cli import options

if TYPE_CHECKING:
    from eyas.template_page import Rendering, TemplatePage

NAME = "template"
EPILOG = """\b
Examples:
  eyas template /models/Kimi-K2.5
  eyas template chat_template.jinja --template-kwargs '{"enable_thinking": false}'
  eyas template Qwen/Qwen3-8B --messages conversation.json --ids
\b
FILE is a .jinja file, a chat_template.json or a tokenizer_config.json; a tokenizer beside it is
used, or the one that --tokenizer names. Without one, no ids are shown.
"""


def command(
    source: str = typer.Argument(
        ...,
        metavar="FILE|TOKENIZER",
        help="A template's file, or a tokenizer: a directory, a .gguf file or a hub id.",
    ),
    tokenizer: options.TokenizerSource = None,
    chat_template: options.ChatTemplateFile = None,
    template_kwargs: options.TemplateKwargs = None,
    trust_remote_code: options.TrustRemoteCode = None,
    revision: options.Revision = None,
    date: options.Date = None,
    messages: str = typer.Option(
        None,
        metavar="FILE",
        help="Render this conversation instead: JSON, a list of messages, or an object with "
        "messages and tools.",
    ),
    ids: bool = typer.Option(False, "--ids", help="Show each token's id."),
    as_json: bool = typer.Option(False, "--json", help="Print everything seen as JSON."),
) -> None:
    """Show what a chat template does, on one page. No server is asked.

    How the reasoning begins, whether the next prompt begins with the earlier one and with which
    switch, what each switch does, what becomes of roles, tools, parts and nulls, and what to
    watch for: all of it found by rendering small conversations. Then usual conversations, as the
    template renders them.
    """
    import datetime as dt

    from eyas.cli.findings import print_finding
    from eyas.errors import ConfigError
    from eyas.findings import Findings
    from eyas.target import read_template
    from eyas.template_page import read_scene, template_page

    try:
        day = None if date is None else dt.date.fromisoformat(date)
    except ValueError as error:
        raise ConfigError(f"--date {date!r} is no day; it should look like 2026-01-31") from error
    page = template_page(
        source,
        tokenizer=tokenizer,
        chat_template=read_template(chat_template),
        kwargs=options.one_mode(template_kwargs) if template_kwargs else None,
        date=day,
        revision=revision,
        trust_remote_code=bool(trust_remote_code),
    )
    scenes = page.standard_scenes() if messages is None else [read_scene(Path(messages))]
    renderings = [page.render(scene) for scene in scenes]
    if as_json:
        findings = Findings()
        page.look(findings)
        print(json.dumps(_as_dict(page, findings.as_dicts(), renderings)))
        return
    _print_head(page)
    page.look(Findings(print_finding))
    for rendering in renderings:
        _print_rendering(page, rendering, ids=ids)


def _as_dict(
    page: TemplatePage, findings: object, renderings: list[Rendering]
) -> dict[str, object]:
    own = page.own_tokenizer
    return {
        "source": page.source,
        "tokenizer": page.tokenizer.source if own else None,
        "template_kwargs": page.template.kwargs,
        "facts": page.facts.as_dict(),
        "profile": page.profile.as_dict(page.tokenizer) if own else None,
        "findings": findings,
        "renderings": [rendering.as_dict() for rendering in renderings],
    }


def _print_head(page: TemplatePage) -> None:
    from eyas.cli.tokens import printable

    print(printable(page.source))
    if page.own_tokenizer:
        print(f"tokenizer {printable(page.tokenizer.source)}")
    else:
        print("tokenizer none at hand: no ids are shown; --tokenizer names the template's own")
    if page.template.kwargs:
        print(f"switches  {printable(json.dumps(page.template.kwargs))}")
    print()


def _print_rendering(page: TemplatePage, rendering: Rendering, *, ids: bool) -> None:
    from eyas.cli.tokens import print_text, print_tokens, printable

    print(f"\n{printable(rendering.scene.name)}:")
    if rendering.text is None:
        print(printable(rendering.refused or ""))
    elif rendering.ids is None:
        print_text(rendering.text, page.tokenizer.control_pattern, stream=sys.stdout)
    else:
        print_tokens(rendering.ids, page.tokenizer, ids=ids, stream=sys.stdout)
