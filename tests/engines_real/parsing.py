"""One look at what a server makes of a thinking model: its ids, and what its chat API says.

Invariant: everything is asked at temperature 0 and in the same order, so two looks differ only
in what the servers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines_real.asking import generate, post, prompt_ids, tokenizer_of
from engines_real.servers import Served

QUESTIONS = ["What is 2+2?", "What is 17+25?", "Which is the largest: 3, 12, 7?"]
OFF = {"demo": {"thinking": False}, "own-opener": {"enable_thinking": False}}
"""What switches thinking off in each template."""
CUT = 8
"""A budget that ends inside the reasoning."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message of the chat API."""

    content: str | None
    reasoning: str | None
    field: str | None
    """Where the reasoning stood."""
    completion_tokens: int
    ids: list[int]
    """What the chat API itself says it generated."""


@dataclass(frozen=True, slots=True)
class Look:
    """All that was asked of one server."""

    ids: list[list[int]]
    """Of the capturing route: ids in, ids out."""
    texts: list[str]
    """Those ids decoded, without the stop token."""
    said: list[Said]
    at_once: Said
    """With thinking switched off."""
    at_once_text: str
    cut: Said
    cut_text: str


def look_at(served: Served) -> Look:
    tokenizer = tokenizer_of(served)
    ids = [generate(served, prompt_ids(tokenizer, q)).output_ids for q in QUESTIONS]
    question, off = QUESTIONS[0], OFF[served.name]
    at_once = generate(served, prompt_ids(tokenizer, question, **off)).output_ids
    return Look(
        ids=ids,
        texts=[tokenizer.decode(row[:-1]) for row in ids],
        said=[chat(served, q) for q in QUESTIONS],
        at_once=chat(served, question, chat_template_kwargs=off),
        at_once_text=tokenizer.decode(at_once[:-1]),
        cut=chat(served, question, max_tokens=CUT),
        cut_text=tokenizer.decode(ids[0][:CUT]),
    )


def chat(served: Served, question: str, **more: Any) -> Said:
    body = {"model": str(served.model), "messages": [{"role": "user", "content": question}],
            "temperature": 0, "max_tokens": 300, "return_token_ids": True, **more}  # fmt: skip
    answer = post(served, "/v1/chat/completions", body)
    choice = answer["choices"][0]
    message = choice["message"]
    where = next((f for f in ("reasoning_content", "reasoning") if message.get(f)), None)
    return Said(
        content=message.get("content"),
        reasoning=message[where] if where else None,
        field=where,
        completion_tokens=answer["usage"]["completion_tokens"],
        ids=choice.get("token_ids") or choice.get("response_token_ids"),
    )
