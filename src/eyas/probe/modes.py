"""The other modes of a mix: what each makes of the prompt, and whether its answers would be kept.

Invariant: the first mode is the one that all other findings are about; each further one is
rendered, and asked once at temperature 0 through the checks of a capture.
"""

from __future__ import annotations

from eyas.errors import EngineError, TemplateRefusal
from eyas.findings import Findings
from eyas.modes import Mode
from eyas.probe.question import GREEDY, QUESTION, answer_to, question_messages
from eyas.target import Target

_REASONING = {
    "open": "opens the reasoning in the prompt",
    "closed": "closes the reasoning in the prompt",
    "none": "leaves the reasoning to the model",
}


async def look_at_modes(target: Target, findings: Findings) -> None:
    """One finding a further mode."""
    for mode in target.modes.each[1:]:
        await _look_at(target, mode, findings)


async def _look_at(target: Target, mode: Mode, findings: Findings) -> None:
    assert mode.template is not None
    name = f"mode {mode.text}"
    first = target.modes.each[0]
    try:
        prompt_ids = mode.template.prompt_ids(target.tokenizer, question_messages(target))
    except TemplateRefusal as refusal:
        findings.add("modes", "failed", f"{name}: {QUESTION!r} cannot be rendered: {refusal}")
        return
    tail = target.tokenizer.decode(prompt_ids[-4:])
    does = f"{name} {_REASONING[mode.reasoning]} (it ends {tail!r} {prompt_ids[-4:]})"
    evidence = {"template_kwargs": mode.kwargs, "prompt_ids": prompt_ids}
    if first.template is not None and prompt_ids == first.template.prompt_ids(
        target.tokenizer, question_messages(target)
    ):
        findings.add(
            "modes",
            "warning",
            f"{name} renders the very prompt of {first.text}; the template may not know the switch",
            **evidence,
        )
        return
    try:
        answer = await answer_to(target, GREEDY, prompt_ids, logprobs=False)
    except EngineError as error:
        findings.add("modes", "failed", f"{does}; the server did not answer: {error}", **evidence)
        return
    output = answer.generation.output_ids
    evidence["output_ids"] = output
    if not answer.good:
        findings.add(
            "modes",
            "failed",
            f"{does}; the answer would be refused each time ({answer.verdict.refusal}): "
            f"{answer.verdict.detail}",
            **evidence,
        )
        return
    marks = f", marked {', '.join(answer.verdict.marks)}" if answer.verdict.marks else ""
    findings.add("modes", "ok", f"{does}; its answer of {len(output)} ids passes every check{marks}",
                 **evidence)  # fmt: skip
