"""What TorchSpec's ``train_data_path`` reads, with ``prompt_key: conversations``. Format only.

Source: TorchSpec, ``torchspec/data/dataset.py`` and ``parse.py``: ``id`` and, under ``prompt_key``,
messages of ``role`` and ``content``; a conversation is cut where the roles do not follow each other,
and answers are found by the header and end of a template of its own.
"""

from __future__ import annotations

from typing import Any

from eyas.export.forms import Form
from eyas.export.texts import READS, Conversation, Lines, TextForm, alternates, uses_tools


def _write(row_id: str, messages: Conversation, tools: Any) -> dict[str, Any] | None:
    if uses_tools(messages, tools) or not alternates(messages):
        return None
    return {"id": row_id, "conversations": messages}


FORM = Form(
    name="torchspec",
    about="conversations a line for TorchSpec (format only)",
    suffix=".jsonl",
    open=Lines,
    reads=READS,
    text=TextForm(_write, inline=True),
    trainer=(
        "format only: written by its source code, not tried; set prompt_key: conversations",
        "TorchSpec drops conversations by their characters (a quarter of them as ids over "
        "max_seq_length), cuts the others there, and drops rows in which it finds no answer",
    ),
)
