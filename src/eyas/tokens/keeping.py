"""Whether a template can keep earlier answers as a history policy asks, and by which switch.

Invariant: what is said of a template was seen in what it renders; a switch is named only if the
generation prompt's reasoning is the same with it.
"""

from __future__ import annotations

import json
from typing import Any

from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.facts import TemplateFacts, template_facts
from eyas.tokens.profile import Profile
from eyas.tokens.tokenizer import Tokenizer

_KEEPS = "keeps earlier reasoning"
"""The effect of a switch that `switches` names so."""


def keeping_switch(
    tokenizer: Tokenizer, template: ChatTemplate, profile: Profile, history: str
) -> tuple[dict[str, Any] | None, str]:
    """The switch under which a template keeps earlier answers; none where it does so anyway.

    Args:
        history: ``full`` (earlier reasoning is shown) or ``tokens`` (the next prompt begins with
            the earlier prompt and output).

    Returns:
        (switches, ""), or (None, why not).
    """
    facts = template_facts(tokenizer, template, profile)
    if history == "tokens":
        return _appending(facts)
    if not _drops_reasoning(facts):
        return {}, ""
    for switch in facts.switches:
        if not switch.effect.startswith(_KEEPS):
            continue
        under = template.under({**template.kwargs, **switch.kwargs})
        if not _drops_reasoning(template_facts(tokenizer, under, profile)):
            return switch.kwargs, ""
    what = "writes the reasoning of earlier answers in another way" if (
        facts.earlier_reasoning == "rewritten") else "drops the reasoning of earlier answers"  # fmt: skip
    return None, f"the chat template {what}, and has no switch that keeps it"


def _appending(facts: TemplateFacts) -> tuple[dict[str, Any] | None, str]:
    if facts.append_only is None:
        return None, "the chat template renders no conversation of two turns"
    if facts.ends_differently is not False:
        return None, "the chat template does not end earlier answers as the model ends them"
    if facts.append_only:
        return {}, ""
    if facts.append_only_with is not None:
        return facts.append_only_with, ""
    but = (
        f"only --template-kwargs {json.dumps(facts.append_only_without_reasoning)}, without "
        "reasoning, makes it so"
        if facts.append_only_without_reasoning
        else "no switch makes it so"
    )
    return None, (
        "with this chat template the next prompt does not begin with the earlier prompt and "
        f"output ({facts.first_difference}), and {but}"
    )


def _drops_reasoning(facts: TemplateFacts) -> bool:
    """Whether there is a reasoning in answers that a later prompt does not show."""
    reasons = facts.reasoning in ("open", "generated") and facts.markers == "template"
    return reasons and facts.earlier_reasoning != "kept"
