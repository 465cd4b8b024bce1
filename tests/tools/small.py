"""Small families of our own: templates of each shape in which calls are written, on bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.tokens.stand_in import stand_in
from tools.talking import Family, Home, hermes, make_home

_HEAD = """\
{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|assistant|>' }}"""
_TAIL = """\
    {{- '<|end|>' }}
  {%- elif message.role == 'tool' %}
    {{- '<|result|>' + message.content + '<|end|>' }}
  {%- else %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

HERMES = (
    _HEAD
    + """
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {%- if (loop.first and message.content) or not loop.first %}{{ '\\n' }}{% endif %}
      {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments}
          | tojson + '\\n</tool_call>' }}
    {%- endfor %}"""
    + _TAIL
)
BARE = (
    _HEAD
    + """
    {%- if message.tool_calls %}
      {%- if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
      {%- set call = message.tool_calls[0].function %}
      {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}{{ message.content }}{% endif %}"""
    + _TAIL
)
LIST = (
    _HEAD
    + """
    {%- if message.tool_calls %}
      {{- '[CALLS][' }}
      {%- for call in message.tool_calls %}
        {%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
        {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {{- ', ' if not loop.last else ']' }}
      {%- endfor %}
    {%- else %}{{ message.content }}{% endif %}"""
    + _TAIL
)
PARTED = (
    _HEAD
    + """
    {{- message.content }}
    {%- if message.tool_calls %}
      {{- '<|calls|>' }}
      {%- for call in message.tool_calls %}
        {{- '<|call|>' + call.function.name + '<|arguments|>' + call.function.arguments
            + '<|call_end|>' }}
      {%- endfor %}
      {{- '<|calls_end|>' }}
    {%- endif %}"""
    + _TAIL
)
NAMED_IDS = (
    _HEAD
    + """
    {{- message.content }}
    {%- if message.tool_calls %}
      {{- '<|calls|>' }}
      {%- for call in message.tool_calls %}
        {{- '<|call|>' + call.id + '<|arguments|>' + call.function.arguments | tojson
            + '<|call_end|>' }}
      {%- endfor %}
      {{- '<|calls_end|>' }}
    {%- endif %}"""
    + _TAIL
)
NO_CALLS = _HEAD + "{{- message.content }}" + _TAIL
NO_RESULTS = HERMES.replace("'<|result|>' + message.content + '<|end|>'", "''")
NO_TOOLS = HERMES.replace("{%- if tools %}", "{%- if false %}")
XML = (
    _HEAD
    + """
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>' + call.function.name }}
      {%- for name, value in call.function.arguments | items %}
        {{- '<' + name + '>' + value | string + '</' + name + '>' }}
      {%- endfor %}
      {{- '</tool_call>' }}
    {%- endfor %}"""
    + _TAIL
)


def listed(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    """As `LIST` writes calls."""
    said = [
        json.dumps({"name": name, "arguments": arguments})[:-1] + f', "id": "{call_id}"}}'
        for name, arguments, call_id in calls
    ]
    return f"[CALLS][{', '.join(said)}]"


def parted(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    """As `PARTED` does."""
    said = "".join(
        f"<|call|>{name}<|arguments|>{json.dumps(arguments)}<|call_end|>"
        for name, arguments, _ in calls
    )
    return f"<|calls|>{said}<|calls_end|>"


SMALL = Family("small", "", "", hermes, "<|end|>", glue="\n")


def small_home(folder: Path, template: str = HERMES) -> Home:
    """A target with a byte-level tokenizer and one of these templates."""
    tokenizer, _, _ = stand_in(template, stop="<|end|>")
    special = dict(tokenizer.special_tokens_map)
    return make_home(folder, tokenizer.backend, special, template, ["<|end|>"])


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, arguments: dict[str, Any], call_id: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id or None, "type": "function", "function": function}
