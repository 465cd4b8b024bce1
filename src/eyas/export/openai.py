"""``{"id", "messages", "tools"}`` a line, as OpenAI's chat API has them.

``reasoning_content`` holds the thinking, as vLLM and SGLang call it; ``tools`` is there where a row
has tools, and calls have their arguments as JSON text.
"""

from __future__ import annotations

from typing import Any

from eyas.export.forms import Form
from eyas.export.texts import READS, Conversation, Lines, TextForm, as_openai, with_tools


def _write(row_id: str, messages: Conversation, tools: Any) -> dict[str, Any] | None:
    return with_tools({"id": row_id, "messages": [as_openai(m) for m in messages]}, tools)


FORM = Form(
    name="openai",
    about="messages a line, as OpenAI's chat API has them",
    suffix=".jsonl",
    open=Lines,
    reads=READS,
    text=TextForm(_write, inline=False),
    trainer=("whoever reads it renders and tokenizes by himself, and masks by himself",),
)
