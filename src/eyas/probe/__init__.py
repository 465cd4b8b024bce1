"""The probe: is this server, with this tokenizer and template, what we think it is?

Invariant: every verdict stands on ids that were seen; what cannot be looked at is `unproven`;
a finding fails only if a capture would be wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyas.config import TargetConfig
from eyas.errors import ProbeFailed
from eyas.findings import Finding, Findings
from eyas.probe.accounts import look_at_accounts
from eyas.probe.chat import show_chat
from eyas.probe.facts import look_at_rendering
from eyas.probe.input import look_at_input
from eyas.probe.modes import look_at_modes
from eyas.probe.question import Answers, ask
from eyas.probe.scores import score_again
from eyas.probe.server import look_at_served_template, look_at_server, look_at_tokenizer
from eyas.probe.template import look_at_reasoning, look_at_stop
from eyas.readers import PromptReader
from eyas.target import Target, open_target
from eyas.tokens.facts import TemplateFacts, template_facts

__all__ = ["Probe", "probe", "probe_target", "require_probe"]


@dataclass(slots=True)
class Probe:
    """What a probe found."""

    target: Target
    findings: Findings
    facts: TemplateFacts | None
    """What the template does; None where there is none."""
    answers: Answers | None
    """The target's answers to the question; None where none came."""
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether a capture would be wrong."""
        return self.findings.failed

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: plain values."""
        info = self.target.info
        return {
            "ok": not self.failed,
            "server": {
                "url": info.url,
                "engine": info.engine,
                "version": info.version,
                "model": info.model,
                "weight_version": info.weight_version,
                "context_length": self.target.context_length,
                "details": info.details,
            },
            "findings": self.findings.as_dicts(),
            "profile": self.target.profile.as_dict(self.target.tokenizer),
            "template": None if self.facts is None else self.facts.as_dict(),
            "seconds": round(self.seconds, 3),
        }

    def learnt(self) -> dict[str, Any]:
        """What is kept in the run's profile, besides the profile itself."""
        return {
            "template": None if self.facts is None else self.facts.as_dict(),
            "probe": {
                "findings": self.findings.as_dicts(),
                "seconds": round(self.seconds, 3),
            },
        }


def probe(
    config: TargetConfig,
    *,
    on_finding: Callable[[Finding], None] | None = None,
    prompts: PromptReader | None = None,
) -> Probe:
    """Probe a server.

    Args:
        config: which server, tokenizer, template and sampling.
        on_finding: takes each finding as it is made.
        prompts: what a capture would be given; the beginning of it is looked through.

    Raises:
        EyasError: if the tokenizer cannot be loaded, or nothing that can be captured from
            answers there. What a capture would get wrong is in the findings, not an error.
    """

    async def run() -> Probe:
        target = await open_target(config, say=lambda _: None)
        try:
            return await probe_target(target, Findings(on_finding), prompts)
        finally:
            await target.close()

    return asyncio.run(run())


async def require_probe(
    target: Target,
    on_finding: Callable[[Finding], None] | None = None,
    prompts: PromptReader | None = None,
) -> dict[str, Any]:
    """Probe before a capture; returns what is kept in the run's profile.

    Raises:
        ProbeFailed: if a capture would be wrong.
    """
    done = await probe_target(target, Findings(on_finding), prompts)
    if failed := done.findings.of("failed"):
        first = failed[0]
        raise ProbeFailed(
            f"the probe failed ({first.name}): {first.text.rstrip('.')}. Nothing was captured. eyas probe "
            "shows all that it saw; --no-probe captures all the same."
        )
    return done.learnt()


async def probe_target(
    target: Target, findings: Findings, prompts: PromptReader | None = None
) -> Probe:
    """Look at everything, the cheap first.

    The target's profile gains what was learnt (a stop id that nobody declares).
    """
    began = time.monotonic()
    facts = None
    await look_at_server(target, findings)
    await look_at_tokenizer(target, findings)
    if target.template is not None:
        facts = await asyncio.to_thread(
            template_facts, target.tokenizer, target.template, target.profile
        )
        look_at_rendering(findings, target.tokenizer, target.template, facts)
        await look_at_served_template(target, findings)
        if prompts is not None:
            await asyncio.to_thread(look_at_input, target, findings, prompts)
    else:
        findings.add(
            "template",
            "warning",
            f"{target.tokenizer.no_template} Rows of messages would all be rejected",
        )
    if target.config.several_servers:
        findings.add(
            "servers",
            "note",
            f"only {target.info.url} is probed; the others join a capture if they serve the same "
            "model and weights",
        )
    answers = None
    if not findings.failed:  # a target that is another one need not be asked
        answers = await ask(target, findings)
    if answers is not None:
        look_at_accounts(target, findings, answers)
        look_at_reasoning(target, findings, facts, answers)
        look_at_stop(target, findings, facts, answers)
        if target.template is not None:
            await look_at_modes(target, findings)
        if answers.greedy.good:
            await score_again(target, findings, answers)
            await show_chat(target, findings, answers)
    return Probe(target, findings, facts, answers, time.monotonic() - began)
