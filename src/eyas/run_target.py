"""What a run was captured with, opened again without a server: template, modes, profile.

Invariant: a template is used only if it is the run's own, by its hash; what else decided the
run's prompts (history, control text, date, switches) comes from its manifest.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from eyas.errors import ConfigError, DamagedRun
from eyas.modes import Modes, open_modes, parse_mix
from eyas.prompting import HISTORIES, Prompting
from eyas.store import Run
from eyas.store.manifest import NAME
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.tokens.control_text import POLICIES
from eyas.tokens.profile import are_ids


@dataclass(frozen=True, slots=True)
class RunTarget:
    """The target of a run, as its files and its manifest tell it."""

    tokenizer: Tokenizer
    prompting: Prompting
    """How the run's prompts were made; without a template where `fault` says so."""
    fault: str | None
    """Why the run's template is not at hand, as a sentence; None where it is."""

    @property
    def template(self) -> ChatTemplate | None:
        """The template under the switches of the first mode."""
        return self.prompting.modes.each[0].template


def open_run_target(run: Run, tokenizer: Tokenizer) -> RunTarget:
    """The target of a run.

    Args:
        tokenizer: the run's own, with the template that it was given.

    Raises:
        ConfigError: a tokenizer that is another one.
        DamagedRun: a manifest that cannot be right.
    """
    fingerprint = run.manifest.fingerprint
    if tokenizer.files_hash != fingerprint.get("tokenizer_files"):
        raise ConfigError(
            f"the tokenizer files at {tokenizer.source} are not those of the run (their hash is "
            f"{tokenizer.files_hash[:12]}, the run's "
            f"{str(fingerprint.get('tokenizer_files'))[:12]}); name the run's own with --tokenizer"
        )
    template, fault = _template(run, tokenizer)
    modes, _ = modes_of(run, tokenizer, template)
    prompting = Prompting(
        tokenizer,
        modes,
        run.profile(),
        history=history_of(run),
        control_text=control_text_of(run),
    )
    return RunTarget(tokenizer, prompting, fault)


def _template(run: Run, tokenizer: Tokenizer) -> tuple[ChatTemplate | None, str | None]:
    wanted = run.manifest.fingerprint.get("template")
    if wanted is None:
        return None, "the run was captured without a chat template"
    if not tokenizer.makes_prompts:
        return None, tokenizer.no_template
    template = ChatTemplate.of(tokenizer, date=date_of(run))
    if template.hash != wanted:
        return None, (
            "the chat template at hand is not the run's (a capture may have been given its own: "
            "name it with --chat-template)"
        )
    return template, None


def modes_of(
    run: Run, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[Modes, Profile]:
    """The modes of a run, and the profile that the files tell now.

    Raises:
        DamagedRun: if the manifest says what cannot be.
    """
    fingerprint = run.manifest.fingerprint
    stop_ids = fingerprint.get("stop_token_ids") or ()
    if type(stop_ids) not in (list, tuple) or not are_ids(stop_ids):
        raise damaged(run, f"stop_token_ids of the fingerprint are no ids: {stop_ids!r}")
    try:
        mix = parse_mix(fingerprint.get("template_kwargs") or {})
    except ValueError as error:
        raise damaged(run, f"template_kwargs of the fingerprint: {error}") from error
    try:
        return open_modes(
            tokenizer, template, mix, stop_token_ids=stop_ids, history=history_of(run)
        )
    except ConfigError as error:
        raise damaged(run, f"its history or template_kwargs cannot be right: {error}") from error


def control_text_of(run: Run) -> str:
    """What became of control strings in the text of messages."""
    policy = run.manifest.fingerprint.get("control_text", "allow")
    if policy not in POLICIES:
        raise damaged(run, f"control_text of the fingerprint is no policy: {policy!r}")
    return str(policy)


def history_of(run: Run) -> str:
    """What the target was shown of its own earlier turns."""
    history = run.manifest.fingerprint.get("history", "served")
    if history not in HISTORIES:
        raise damaged(run, f"history of the fingerprint is no policy: {history!r}")
    return str(history)


def date_of(run: Run) -> dt.date:
    """The day that templates which print today's date were given."""
    try:
        return dt.date.fromisoformat(run.manifest.date)
    except ValueError as error:
        raise damaged(run, f"date is {run.manifest.date!r}, which is no day") from error


def damaged(run: Run, what: Any) -> DamagedRun:
    """The error for a manifest that says what cannot be."""
    return DamagedRun(f"{run.path / NAME}: {str(what)[:300]}")
