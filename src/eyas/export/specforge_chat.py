"""SpecForge's conversation form, which it renders and tokenizes by itself.

Source: SpecForge 0.2.0, ``specforge/data/preprocessing.py`` and ``parse.py``: ``conversations`` of
messages, of which it keeps ``role``, ``content`` and ``tool_calls`` and nothing else, so the thinking
stands in the content; ``tools`` may be JSON text, which spares its reader one type for all rows.
"""

from __future__ import annotations

import json
from typing import Any

from eyas.export.forms import Form
from eyas.export.texts import READS, Conversation, Lines, TextForm, as_openai


def _write(row_id: str, messages: Conversation, tools: Any) -> dict[str, Any] | None:
    row: dict[str, Any] = {"id": row_id, "conversations": [_plain(m) for m in messages]}
    if tools:
        row["tools"] = json.dumps(tools, ensure_ascii=False)
    return row


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls are JSON text: rows are read as a table, where types must be one."""
    if message.get("tool_calls"):
        calls = as_openai(message)["tool_calls"]
        return {**message, "tool_calls": json.dumps(calls, ensure_ascii=False)}
    return message


FORM = Form(
    name="specforge-chat",
    about="conversations a line for SpecForge, which tokenizes them again",
    suffix=".jsonl",
    open=Lines,
    reads=READS,
    text=TextForm(_write, inline=True),
    trainer=(
        "SpecForge renders with a chat template that its configuration names, finds answers by that "
        "template's headers, shuffles, and cuts rows at its max_length (2,048 unless told otherwise)",
        "its templates of the kind 'thinking' write the generation prompt themselves: where that "
        "opens the thinking, the opener would stand there twice. --to specforge has no such question",
    ),
)
