"""Where chat templates are written: beside a model, inside its configuration, or alone.

Invariant: of the places that transformers looks at, the one is taken that it would take.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import TokenizerError

JINJA, LEGACY, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
NAMED = "additional_chat_templates"


FUNCTION = re.compile(r"(?P<place>[\w.]+|.+\.py):(?P<name>[A-Za-z_][\w.]*)")
"""``module:function`` or ``file.py:function``, in the place of a template's file."""


class TemplateText(NamedTuple):
    """A template as it is written."""

    source: str
    """The template's text (Jinja)."""
    tools: str | None = None
    """Another one for conversations with tools, which some models have under ``tool_use``."""


def read_template_file(path: Path) -> TemplateText:
    """A template from a file: Jinja, ``chat_template.json`` or ``tokenizer_config.json``.

    Raises:
        TokenizerError: if it cannot be read or holds none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"chat template {path} cannot be read: {error}") from error
    if path.suffix != ".json":
        if not text.strip():
            raise TokenizerError(f"chat template {path} is empty")
        if "{{" not in text and "{%" not in text:
            raise TokenizerError(
                f"{path} holds no chat template: nothing in it is Jinja ({{{{ ... }}}}, {{% ... %}})"
            )
        return TemplateText(text)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"chat template {path} is not JSON: {error}") from error
    found = template_of(value.get("chat_template") if isinstance(value, dict) else value)
    if found is None:
        raise TokenizerError(
            f"{path} holds no chat template: there should be a chat_template, a text or a list of "
            "named ones with a default among them"
        )
    return found


def template_of_directory(directory: Path, loaded: Any = None) -> TemplateText | None:
    """The template of a directory with a tokenizer, or None where there is none.

    Args:
        directory: a model's files.
        loaded: what transformers made of ``chat_template`` in its configuration, if it was asked.
    """
    if (directory / JINJA).is_file():
        source = read_template_file(directory / JINJA).source
        named = directory / NAMED / "tool_use.jinja"
        return TemplateText(source, read_template_file(named).source if named.is_file() else None)
    if found := template_of(loaded):
        return found
    for name in (CONFIG, LEGACY):
        if (directory / name).is_file():
            try:
                return read_template_file(directory / name)
            except TokenizerError:
                continue
    return None


def template_of(value: Any) -> TemplateText | None:
    """The template in a value of ``chat_template``: a text, or several by name."""
    if isinstance(value, list):
        value = {
            str(entry.get("name")): entry.get("template")
            for entry in value
            if isinstance(entry, dict)
        }
    if isinstance(value, dict):
        source, tools = value.get("default"), value.get("tool_use")
        if not isinstance(source, str):
            return None
        return TemplateText(source, tools if isinstance(tools, str) else None)
    return TemplateText(value) if isinstance(value, str) and value.strip() else None


def is_function(given: str) -> bool:
    """Whether a ``--chat-template`` names a function and no file."""
    return FUNCTION.fullmatch(given) is not None and not Path(given).exists()
