"""A finished run, checked again offline: every row by every check, and the run as a whole.

Invariant: nothing is changed, and memory holds a key a row. What only the engine could say (its
counts, echo and text) is gone by now; scoring again (`rescore`) is what is left for that.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.checks import MARKS, Checker, bad_prompt_id
from eyas.engines import Generation
from eyas.errors import DamagedRun, EyasError, TemplateRefusal
from eyas.findings import Findings
from eyas.store import Run
from eyas.store.journal import segments
from eyas.store.parts import REJECTED, TRACES, parts
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile
from eyas.trace import Rejected, Trace, arrow_schema, from_record

_BATCH = 256
_EXAMPLES = 5
_JUDGED_MARKS = frozenset(MARKS) - {"control_text", "leading_assistant"}
"""Marks that the checks of a generation give; the others come from its conversation."""


@dataclass(slots=True)
class _Faults:
    """What was found wrong with rows: how often, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: str, row_id: str, detail: str) -> None:
        self.counts[fault] += 1
        examples = self.examples.setdefault(fault, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{row_id}: {detail}")


def verify_run(
    run: Run,
    tokenizer: Tokenizer,
    findings: Findings,
    *,
    on_row: Callable[[int], None] = lambda _: None,
) -> None:
    """Check a run. Findings that fail say which rows are wrong and why.

    Args:
        run: the run.
        tokenizer: the one that it was captured with, with the template that it was given;
            another one is a finding.
        findings: takes what is seen.
        on_row: called with the number of rows seen so far.
    """
    template = _template(run, tokenizer, findings)
    profile = _profile(run, tokenizer, template, findings)
    if not _parts(run, findings):
        return
    faults = _Faults()
    keys: set[tuple[str, int, int]] = set()
    stored = {TRACES: 0, REJECTED: 0}
    later: list[tuple[str, int, int, str]] = []
    checker = Checker(
        tokenizer,
        profile,
        keep_missing_closer=_config_of(run).get("on_missing_closer") == "keep",
    )
    seen = 0
    ids: set[int] = set()
    every = _rows(run)
    while rows := tuple(islice(every, _BATCH)):
        for row in rows:
            folder = REJECTED if isinstance(row, Rejected) else TRACES
            stored[folder] += 1
            key = (row.key, row.sample, row.turn)
            if key in keys or hash(row.id) in ids:
                faults.add("twice", row.id, "its id or key is there twice")
            keys.add(key)
            ids.add(hash(row.id))
            if isinstance(row, Rejected):
                if not row.reason or not row.detail:
                    faults.add("no_reason", row.id, "a refused row without reason or detail")
                continue
            if row.turn > 0:
                later.append((row.key, row.sample, row.turn - 1, row.id))
            _check_trace(row, checker, run, faults)
        if template is not None:
            _check_prompts(rows, tokenizer, template, faults)
        seen += len(rows)
        on_row(seen)
    for *before, row_id in later:
        if tuple(before) not in keys:
            faults.add("turn_missing", row_id, "its conversation's turn before it is not there")
    _report_rows(findings, faults, stored)
    _counts(run, findings, stored)


def _rows(run: Run) -> Iterator[Trace | Rejected]:
    for folder in (TRACES, REJECTED):
        for record in run.records(folder):
            yield from_record(record)


def _template(run: Run, tokenizer: Tokenizer, findings: Findings) -> ChatTemplate | None:
    """The template of the run, or None where it is not at hand."""
    fingerprint = run.manifest.fingerprint
    if tokenizer.files_hash != fingerprint.get("tokenizer_files"):
        findings.add(
            "tokenizer",
            "failed",
            f"the tokenizer files at {tokenizer.source} are not those of the run (their hash is "
            f"{tokenizer.files_hash[:12]}, the run's {str(fingerprint.get('tokenizer_files'))[:12]}); "
            "give the run's own with --tokenizer",
        )
    else:
        findings.add("tokenizer", "ok", f"the tokenizer files are those of the run, at "
                     f"{tokenizer.source}")  # fmt: skip
    if fingerprint.get("template") is None or tokenizer.chat_template is None:
        return None
    template = ChatTemplate.of(
        tokenizer,
        kwargs=fingerprint.get("template_kwargs") or {},
        date=dt.date.fromisoformat(run.manifest.date),
    )
    if template.hash != fingerprint["template"]:
        findings.add(
            "template",
            "unproven",
            "the chat template at hand is not the run's (a capture may have been given its own: "
            "name it with --chat-template), so prompts were not rendered again",
        )
        return None
    findings.add("template", "ok", f"the chat template is the run's ({template.hash[:12]})")
    return template


def _profile(
    run: Run, tokenizer: Tokenizer, template: ChatTemplate | None, findings: Findings
) -> Profile:
    """The saved profile, compared with what the files say now."""
    try:
        saved = Profile.from_dict(run.manifest.profile)
    except (KeyError, TypeError) as error:
        raise DamagedRun(
            f"{run.path / 'manifest.json'}: the profile cannot be read ({error!r})"
        ) from error
    if template is None:
        return saved
    stop_ids = run.manifest.fingerprint.get("stop_token_ids") or ()
    now = build_profile(tokenizer, template, stop_token_ids=stop_ids)
    differing = [
        name
        for name in ("vocab_size", "declared_stop_ids", "opener", "closer", "role_headers")
        if getattr(saved, name) != getattr(now, name)
    ]
    if not saved.stop_ids >= now.stop_ids:  # a probe may have learnt more
        differing.append("stop_ids")
    if differing:
        findings.add(
            "profile",
            "failed",
            f"the profile in the manifest is not what the files tell: {', '.join(differing)}",
            saved=run.manifest.profile,
            now=now.as_dict(tokenizer),
        )
    else:
        findings.add("profile", "ok", "the profile is what tokenizer, template and config tell")
    return saved


def _parts(run: Run, findings: Findings) -> bool:
    """Whether every part can be read, and has the columns that it should."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    broken: list[str] = []
    found = 0
    for folder, kind in ((TRACES, Trace), (REJECTED, Rejected)):
        wanted = arrow_schema(kind)
        for path in parts(run.path, folder):
            found += 1
            try:
                schema = pq.read_schema(path)
            except (OSError, pa.ArrowException) as error:
                broken.append(f"{path}: {error}")
                continue
            if not schema.equals(wanted, check_metadata=False):
                broken.append(f"{path}: its columns are not those of a {folder} part")
    open_rows = segments(run.path / "journal")
    if broken:
        findings.add("parts", "failed", f"{len(broken)} of {found} parts cannot be used: "
                     f"{'; '.join(broken[:_EXAMPLES])}", broken=broken)  # fmt: skip
        return False
    findings.add("parts", "ok", f"{found} parts can be read and have their columns")
    if open_rows:
        findings.add(
            "journal",
            "note",
            f"{len(open_rows)} journal segments are not sealed: a capture is running, or was "
            "killed; the same capture command seals them",
        )
    return True


def _check_trace(row: Trace, checker: Checker, run: Run, faults: _Faults) -> None:
    """Every check of one row, from what is stored of it."""
    generation = Generation(
        output_ids=row.output_ids,
        finish_reason=row.finish_reason,
        matched=row.stop_id if row.finish_reason == "stop" else None,
        names_stop=False,
        prompt_tokens=len(row.prompt_ids),
        completion_tokens=len(row.output_ids),
    )
    verdict = checker.judge(row.prompt_ids, generation, row.max_new_tokens)
    if verdict.refusal is not None:
        faults.add(verdict.refusal, row.id, verdict.detail)
        return
    if row.id != f"{row.conversation_id}/{row.sample}/{row.turn}":
        faults.add("id", row.id, "its id is not CONVERSATION/SAMPLE/TURN")
    at = bad_prompt_id(row.prompt_ids, checker.profile.vocab_size)
    if at is not None:
        faults.add("prompt_ids", row.id, f"prompt id {at} is {row.prompt_ids[at]}")
    marks = _JUDGED_MARKS.intersection(row.marks)
    if marks != set(verdict.marks):
        faults.add("marks", row.id, f"marked {sorted(marks)}, the checks say {verdict.marks}")
    positions = (row.stop_id, row.reasoning_start, row.reasoning_end)
    found = (verdict.stop_id, verdict.reasoning_start, verdict.reasoning_end)
    if positions != found:
        faults.add("positions", row.id, f"stop id, reasoning start and end are {positions}, the "
                   f"ids say {found}")  # fmt: skip
    if row.logprobs is not None and len(row.logprobs) != len(row.output_ids):
        faults.add("logprobs", row.id, f"{len(row.logprobs)} log-probabilities for "
                   f"{len(row.output_ids)} output ids")  # fmt: skip
    weights = run.manifest.fingerprint.get("weight_version")
    if None not in (weights, row.weight_version) and row.weight_version != weights:
        faults.add("weights", row.id, f"of weights {row.weight_version!r}, the run of {weights!r}")


def _check_prompts(
    rows: tuple[Trace | Rejected, ...],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    faults: _Faults,
) -> None:
    """Whether the prompt ids are what the template makes of the messages that are stored."""
    rendered: list[tuple[Trace, str]] = []
    for row in rows:
        if isinstance(row, Rejected) or row.messages is None:
            continue
        try:
            kwargs = json.loads(row.template_kwargs)
            rendered.append((row, template.render(json.loads(row.messages), **kwargs)))
        except (TemplateRefusal, ValueError) as error:
            faults.add("prompt", row.id, f"its messages do not render: {error}")
    texts = [text for _, text in rendered]
    for (row, _), ids in zip(rendered, tokenizer.encode_batch(texts), strict=True):
        if ids != row.prompt_ids:
            faults.add("prompt", row.id, "its prompt ids are not what the template makes of its "
                       "messages")  # fmt: skip


def _report_rows(findings: Findings, faults: _Faults, stored: dict[str, int]) -> None:
    good, refused = stored[TRACES], stored[REJECTED]
    if not faults.counts:
        findings.add("rows", "ok", f"{good:,} rows pass every check again, {refused:,} refused "
                     "rows each have their reason; no id is there twice")  # fmt: skip
        return
    for fault, count in faults.counts.most_common():
        findings.add(
            fault,
            "failed",
            f"{count:,} of {good + refused:,} rows: {'; '.join(faults.examples[fault][:2])}",
            rows=count,
            examples=faults.examples[fault],
        )


def _counts(run: Run, findings: Findings, stored: dict[str, int]) -> None:
    counts = run.manifest.counts
    if not counts:
        findings.add("counts", "unproven", "the manifest holds no counts: the capture has not "
                     "ended by itself yet")  # fmt: skip
        return
    said = counts.get("done", 0) + counts.get("rejected", 0) + counts.get("extra", 0)
    there = stored[TRACES] + stored[REJECTED]
    adds_up = counts.get("input") == sum(
        counts.get(name, 0) for name in ("done", "rejected", "pending")
    )
    if said != there or not adds_up:
        findings.add(
            "counts",
            "failed",
            f"the manifest counts {counts}, and {stored[TRACES]:,} good and "
            f"{stored[REJECTED]:,} refused rows are there",
            counts=counts,
            stored=stored,
        )
        return
    left = counts.get("pending", 0)
    findings.add("counts", "ok" if not left else "note", f"the counts add up: {counts}",
                 counts=counts)  # fmt: skip


def _config_of(run: Run) -> dict[str, Any]:
    """The run's config.yaml, or nothing where it cannot be read."""
    from eyas.config import read_config_file

    try:
        return read_config_file(Path(run.path) / "config.yaml")
    except EyasError:
        return {}
