"""What NeMo Automodel's ``ChatDataset`` reads, from which its EAGLE-3 recipe trains. Format only.

Source: NeMo Automodel, ``components/datasets/llm/chat_dataset.py`` and ``eagle3.py``: JSON Lines
(the file's name has to end in .jsonl) with ``messages`` of the roles system, user, assistant and
tool, and ``tools``; rendered by the tokenizer's chat template and cut at the recipe's ``seq_length``.
"""

from __future__ import annotations

from typing import Any

from eyas.export.forms import Form
from eyas.export.texts import READS, Conversation, Lines, TextForm, as_openai, with_tools

_ROLES = frozenset(("system", "user", "assistant", "tool"))


def _write(row_id: str, messages: Conversation, tools: Any) -> dict[str, Any] | None:
    if not all(m["role"] in _ROLES for m in messages):
        return None
    return with_tools({"id": row_id, "messages": [as_openai(m) for m in messages]}, tools)


FORM = Form(
    name="automodel",
    about="messages a line for NeMo Automodel (format only)",
    suffix=".jsonl",
    open=Lines,
    reads=READS,
    text=TextForm(_write, inline=False),
    trainer=(
        "format only: written by its source code, not tried",
        "Automodel renders with the tokenizer's chat template, pads or cuts every row to its "
        "seq_length, shuffles, and supervises every answer of a conversation",
    ),
)
