"""``{"id", "conversations": [{"from", "value"}]}`` a line, from system, human and gpt.

The thinking stands in the value, between the target's own markers. Rows with tools are left out:
there is no one way to write them.
"""

from __future__ import annotations

from typing import Any

from eyas.export.forms import Form
from eyas.export.texts import READS, Conversation, Lines, TextForm, shared, uses_tools

_NAMES = {"system": "system", "user": "human", "assistant": "gpt"}


def _write(row_id: str, messages: Conversation, tools: Any) -> dict[str, Any] | None:
    if uses_tools(messages, tools) or not all(m["role"] in _NAMES for m in messages):
        return None
    return {"id": row_id, "conversations": shared(messages, _NAMES)}


FORM = Form(
    name="sharegpt",
    about="conversations a line, from human and gpt",
    suffix=".jsonl",
    open=Lines,
    reads=READS,
    text=TextForm(_write, inline=True),
    trainer=("whoever reads it renders and tokenizes by himself, and masks by himself",),
)
