"""What the chat API would have lost: the same question as text, tokenized again the usual way.

Invariant: this is shown to people and never a reason to fail; the true ids stand beside it.
"""

from __future__ import annotations

from typing import Any

from eyas.engines import ChatAnswer
from eyas.errors import EngineError, TemplateRefusal
from eyas.findings import Findings
from eyas.ids import first_difference
from eyas.probe.question import Answers
from eyas.target import Target

_AROUND = 5
"""Ids shown on each side of the first difference."""


async def show_chat(target: Target, findings: Findings, answers: Answers) -> None:
    """Ask the question through ``/v1/chat/completions`` and set it beside the true ids."""
    if answers.messages is None or target.template is None:
        return
    greedy = answers.greedy
    try:
        said = await target.engine.chat(
            answers.messages,
            target.modes.each[0].kwargs,
            max_tokens=max(1, len(greedy.generation.output_ids) + 8),
        )
    except EngineError as error:
        findings.add("chat_api", "note", f"the chat API could not be compared with: {error}")
        return
    if said is None:
        findings.add(
            "chat_api", "note", "there is no chat API here to show what it would have lost"
        )
        return
    _compare_prompts(findings, said, len(greedy.prompt_ids))
    _compare_rows(target, findings, answers, said)


def _compare_prompts(findings: Findings, said: ChatAnswer, sent: int) -> None:
    """Where the server renders nothing for us, its chat API's count of the prompt still tells."""
    if said.prompt_tokens is None or said.prompt_tokens == sent:
        return
    findings.add(
        "chat_prompt",
        "warning",
        f"the chat API counts {said.prompt_tokens} prompt ids for the question, and the client "
        f"rendered {sent}: the server serves another chat template (or other switches) than this "
        "capture would use",
        chat=said.prompt_tokens,
        client=sent,
    )


def _compare_rows(target: Target, findings: Findings, answers: Answers, said: ChatAnswer) -> None:
    template, tokenizer = target.template, target.tokenizer
    assert template is not None and answers.messages is not None
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    evidence: dict[str, Any] = {"content": said.content, "reasoning": said.reasoning}
    try:
        text = template.render([*answers.messages, message], add_generation_prompt=False)
    except TemplateRefusal as refusal:
        findings.add(
            "chat_api",
            "note",
            f"what the chat API gave cannot even be rendered again: {refusal}",
            **evidence,
        )
        return
    again, true = tokenizer.encode(text), answers.greedy.input_ids
    evidence |= {"true_ids": true, "retokenized_ids": again}
    at = first_difference(true, again)
    if at == len(true) and len(again) >= at:
        rest = again[at:]
        more = f", and puts {tokenizer.decode(rest)!r} behind it" if rest else ""
        findings.add(
            "chat_api",
            "note",
            f"tokenized again from the chat API's text, this row would have kept its ids{more}",
            **evidence,
        )
        return
    lost = [i for i in set(tokenizer.control.values()) if true.count(i) > again.count(i)]
    names = ", ".join(tokenizer.name(i) for i in sorted(lost))
    before = slice(max(0, at - _AROUND), at)
    after = slice(at, at + _AROUND)
    findings.add(
        "chat_api",
        "note",
        f"tokenized again from the chat API's text, this row would differ from id {at} of "
        f"{len(true)} on: after {tokenizer.decode(true[before])!r} the model has "
        f"{tokenizer.decode(true[after])!r} {true[after]}, the text gives "
        f"{tokenizer.decode(again[after])!r} {again[after]}"
        + (f"; lost: {names}" if names else ""),
        first_difference=at,
        lost=sorted(lost),
        **evidence,
    )
