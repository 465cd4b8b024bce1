"""What EAGLE's own ``traineagle3`` reads. Format only.

Source: SafeAILab/EAGLE, ``eagle/traineagle3/main.py``: JSON Lines of ``id`` and ``conversations``
from human and gpt by turns, the human first. It knows no other role.
"""

from __future__ import annotations

from typing import Any

from eyas.export.forms import Form
from eyas.export.texts import READS, Conversation, Lines, TextForm, alternates, shared, uses_tools

_NAMES = {"user": "human", "assistant": "gpt"}


def _write(row_id: str, messages: Conversation, tools: Any) -> dict[str, Any] | None:
    if uses_tools(messages, tools) or messages[0]["role"] != "user" or not alternates(messages):
        return None
    return {"id": row_id, "conversations": shared(messages, _NAMES)}


FORM = Form(
    name="eagle",
    about="conversations a line for EAGLE's traineagle3 (format only)",
    suffix=".jsonl",
    open=Lines,
    reads=READS,
    text=TextForm(_write, inline=True),
    trainer=(
        "format only: written by its source code, not tried",
        "traineagle3 puts a system prompt of its own before every conversation, so no prompt is the "
        "captured one; it finds answers by Llama-3's headers with fixed offsets, shuffles, and "
        "names 2,048 ids as its longest",
    ),
)
