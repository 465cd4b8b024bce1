"""A finished run, checked again offline: every row by every check, and the run as a whole.

Invariant: nothing is changed, and memory holds a key a row. What only the engine could say (its
counts, echo and text) is gone by now; scoring again (`rescore`) is what is left for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.checks import Checker
from eyas.errors import EyasError
from eyas.findings import Findings
from eyas.modes import Modes
from eyas.prompting import Chat, Prompting, Refusal
from eyas.run_target import control_text_of, date_of, history_of, modes_of
from eyas.store import Run
from eyas.store.journal import segments
from eyas.store.parts import REJECTED, TRACES, parts
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.trace import LATER_COLUMNS, Rejected, Trace, arrow_schema, from_record
from eyas.verify.run_rows import Faults, RowChecks, read_records, tools_of
from eyas.verify.turns import Turns

_BATCH = 256
_EXAMPLES = 5
_PART = re.compile(r"part-\d+\.parquet")


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
    modes, profile = _modes(run, tokenizer, _template(run, tokenizer, findings), findings)
    if not _parts(run, findings):
        return
    faults, stored = Faults(), {TRACES: 0, REJECTED: 0}
    prompting = Prompting(
        tokenizer, modes, profile, history=history_of(run), control_text=control_text_of(run)
    )
    _check_rows(run, prompting, faults, stored, on_row)
    _report_rows(findings, faults, stored)
    _counts(run, findings, stored)


def _check_rows(
    run: Run,
    prompting: Prompting,
    faults: Faults,
    stored: dict[str, int],
    on_row: Callable[[int], None],
) -> None:
    """Every row by itself, then beside those of its conversation."""
    keep = _config_of(run).get("on_missing_closer") == "keep"
    checker = Checker(prompting.tokenizer, prompting.profile, keep_missing_closer=keep)
    checks = RowChecks(run.manifest, prompting.modes, checker, faults)
    turns = Turns(run, prompting, faults)
    keys: set[tuple[str, int, int]] = set()
    ids: set[int] = set()
    later: list[tuple[str, int, int, str]] = []
    seen = 0
    every = _rows(run)
    while rows := tuple(islice(every, _BATCH)):
        chats: list[tuple[Trace, Chat]] = []
        for row in rows:
            good = not isinstance(row, Rejected)
            stored[TRACES if good else REJECTED] += 1
            key = (row.key, row.sample, row.turn)
            if key in keys or hash(row.id) in ids:
                faults.add("twice", row.id, "its id or key is there twice")
            keys.add(key)
            ids.add(hash(row.id))
            messages = checks.check(row)
            if isinstance(row, Rejected) or checks.null_columns(row):
                continue
            chat = messages and Chat(messages, tools_of(row), checks.mode(row))
            if row.turn > 0:
                later.append((row.key, row.sample, row.turn - 1, row.id))
            elif chat:
                chats.append((row, chat))
            try:
                if chat and prompting.has_control_text(chat) != ("control_text" in row.marks):
                    faults.add(
                        "marks", row.id, "its mark control_text is not what its messages say"
                    )
                turns.add(row, chat or None)
            except Exception as error:  # a damaged row may hold anything
                checks.unreadable(row, error)
        if prompting.modes.each[0].template is not None:
            _check_prompts(chats, prompting, faults)
        seen += len(rows)
        on_row(seen)
    for *before, row_id in later:
        if tuple(before) not in keys:
            faults.add("turn_missing", row_id, "its conversation's turn before it is not there")


def _rows(run: Run) -> Iterator[Trace | Rejected]:
    for folder in (TRACES, REJECTED):
        for record in read_records(run, folder):
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
    if fingerprint.get("template") is None or not tokenizer.makes_prompts:
        return None
    template = ChatTemplate.of(tokenizer, date=date_of(run))
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


def _modes(
    run: Run, tokenizer: Tokenizer, template: ChatTemplate | None, findings: Findings
) -> tuple[Modes, Profile]:
    """The modes, and the saved profile, compared with what the files say now."""
    saved = run.profile()
    modes, now = modes_of(run, tokenizer, template)
    if template is None:
        return modes, saved
    differing = [
        name
        for name in _PROFILE
        if name in run.manifest.profile and getattr(saved, name) != getattr(now, name)
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
    return modes, saved


_PROFILE = (
    "vocab_size", "declared_stop_ids", "opener", "closer", "reasoning", "role_headers", "bos_ids",
    "content_openers", "content_closer",
)  # fmt: skip
"""What the files tell of a profile; a probe changes none of it."""


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
            here = [f for f in wanted if f.name in schema.names or f.name not in LATER_COLUMNS]
            if not schema.equals(pa.schema(here), check_metadata=False):
                broken.append(f"{path}: its columns are not those of a {folder} part")
    open_rows = segments(run.path / "journal")
    if broken:
        findings.add("parts", "failed", f"{len(broken)} of {found} parts cannot be used: "
                     f"{'; '.join(broken[:_EXAMPLES])}", broken=broken)  # fmt: skip
        return False
    findings.add("parts", "ok", f"{found} parts can be read and have their columns")
    _strays(run, findings)
    if open_rows:
        findings.add(
            "journal",
            "note",
            f"{len(open_rows)} journal segments are not sealed: a capture is running, or was "
            "killed; the same capture command seals them",
        )
    return True


def _strays(run: Run, findings: Findings) -> None:
    """Name what lies beside the parts: readers of ``traces/*.parquet`` take it for rows."""
    places = [run.path / folder for folder in (TRACES, REJECTED) if (run.path / folder).is_dir()]
    strays = [
        path
        for folder in places
        for path in sorted(folder.iterdir())
        if not _PART.fullmatch(path.name) and not path.name.startswith(".")
    ]
    if not strays:
        return
    taken = [path for path in strays if path.suffix == ".parquet"]
    findings.add(
        "strays",
        "failed" if taken else "warning",
        f"{len(strays)} files that are no parts: {', '.join(map(str, strays[:_EXAMPLES]))}"
        + ("; programs that read *.parquet there take their rows too" if taken else ""),
        files=[str(path) for path in strays],
    )


def _check_prompts(chats: list[tuple[Trace, Chat]], prompting: Prompting, faults: Faults) -> None:
    """Whether the prompt ids are what template and control-text policy make of the messages that
    are stored."""
    prompts = prompting.prompts(chat for _, chat in chats)
    for (row, _), prompt in zip(chats, prompts, strict=True):
        if isinstance(prompt, Refusal):
            faults.add("prompt", row.id, f"its messages do not render: {prompt.detail}")
        elif prompt.ids != row.prompt_ids:
            faults.add("prompt", row.id, "its prompt ids are not what the template makes of its "
                       "messages")  # fmt: skip


def _report_rows(findings: Findings, faults: Faults, stored: dict[str, int]) -> None:
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
    findings.add("counts", "ok" if not left else "note", "the counts add up: " + ", ".join(f"{n} {count:,}" for n, count in counts.items()),
                 counts=counts)  # fmt: skip


def _config_of(run: Run) -> dict[str, Any]:
    """The run's config.yaml, or nothing where it cannot be read."""
    from eyas.config import read_config_file

    try:
        return read_config_file(Path(run.path) / "config.yaml")
    except EyasError:
        return {}
