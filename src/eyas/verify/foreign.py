"""The check of training data that others made: what in it is not what the target generates.

Invariant: every row of the files is counted once, as a kind or as a line that cannot be read;
rows are read as a stream and none is changed; and what ids alone cannot prove is said to be
unproven.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas.findings import Findings, Verdict
from eyas.readers import PromptReader
from eyas.readers.blocks import read_rows
from eyas.readers.files import STDIN, UNREADABLE, Damage
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.verify.drift import Drift
from eyas.verify.faults import FAULTS, TOPICS, FileReport, Seen, Tally
from eyas.verify.ids import IdChecks
from eyas.verify.reference import Reference
from eyas.verify.rows import KNOWN, IdRow, Place, TextRow, Unknown, to_row
from eyas.verify.texts import TextChecks

_BATCH_ROWS = 512
_BATCH_SIZE = 1 << 20
"""Ids or characters of a batch: enough for all cores, and little memory."""

_HALF = 0.5
_MANY_LOST = 0.2
"""More lost ids than this speak for another tokenizer, not for a model's own spelling."""


def verify_file(
    paths: list[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    profile: Profile,
    findings: Findings,
    *,
    limit: int | None = None,
    max_length: int | None = None,
    template_options: Sequence[str] = (),
) -> FileReport:
    """Check files of training data against the target that they should be of.

    Args:
        paths: files, directories or globs of JSON Lines, JSON, CSV or Parquet.
        template: the target's chat template; without it rows of messages are not rendered.
        findings: gets one finding for each fault, and one for each thing that was proven.
        limit: check only the first rows.
        max_length: ids at which the trainer will cut a row.
        template_options: words of the command line that name the template, for the command that
            makes the data anew.

    Raises:
        InputError: if there is no such file.
    """
    checked = _Checked(Reference(tokenizer, template, profile), max_length)
    files = PromptReader(paths).files
    for where, value in _rows(files, limit):
        checked.take(where, value)
    checked.finish()
    report = checked.report(files)
    _conclude(report, checked, findings)
    if any(_failed(report, checked)):
        command = _command(files, checked, tokenizer, template)
        report.regenerate_command = " ".join([command, *map(shlex.quote, template_options)])
        findings.add(
            "regenerate",
            "note",
            "make the data anew, as ids: " + report.regenerate_command,
            command=report.regenerate_command,
        )
    return report


def _unheeded(size: int) -> None:
    """Progress is shown by nobody here."""


def _rows(files: list[str], limit: int | None) -> Iterator[tuple[str, object]]:
    """Each row with its place; a `Damage` for a line or a rest of a file that cannot be read."""
    count = 0
    for path in files:
        line = 0
        name = "stdin" if path == STDIN else path
        try:
            for line, value, _ in read_rows(path, _unheeded, KNOWN):
                if limit is not None and count >= limit:
                    return
                count += 1
                yield f"{name}:{line}", value
        except UNREADABLE as error:
            yield f"{name}:{line + 1}", Damage("unreadable_file", f"nothing from here on: {error}")


@dataclass
class _Checked:
    """The rows that were seen, and the checks that see them in batches."""

    reference: Reference
    max_length: int | None
    tally: Tally = field(default_factory=Tally)
    rows: int = 0
    id_rows: int = 0
    text_rows: int = 0
    with_prompt: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    _ids: list[IdRow] = field(default_factory=list)
    _texts: list[TextRow] = field(default_factory=list)
    _size: int = 0

    def __post_init__(self) -> None:
        self.drift = Drift(self.reference, self.tally)
        self.id_checks = IdChecks(self.reference, self.tally, self.drift, self.max_length)
        self.text_checks = TextChecks(self.reference, self.tally, self.max_length)

    def take(self, where: str, value: object) -> None:
        self.rows += 1
        try:
            if isinstance(value, Damage):
                raise Unknown(value.reason, value.detail)
            row = to_row(value, where)
        except Unknown as unknown:
            self.unread[unknown.reason] += 1
            self.tally.add("bad_line", Place(where), f"{unknown.reason}: {unknown}")
            return
        self.kinds[row.kind] += 1
        self.with_prompt += row.has_prompt
        if isinstance(row, IdRow):
            self.id_rows += 1
            self._ids.append(row)
            self._size += len(row.ids)
        else:
            self.text_rows += 1
            self._texts.append(row)
            self._size += sum(len(m["content"] or "") for m in row.messages)
        if len(self._ids) + len(self._texts) >= _BATCH_ROWS or self._size >= _BATCH_SIZE:
            self._flush()

    def _flush(self) -> None:
        if self._ids:
            self.id_checks.check(self._ids)
        if self._texts:
            self.text_checks.check(self._texts)
        self._ids, self._texts, self._size = [], [], 0

    def finish(self) -> None:
        self._flush()
        self.id_checks.finish()

    def report(self, files: list[str]) -> FileReport:
        known = {name: self.tally.faults[name] for name in FAULTS if name in self.tally.faults}
        return FileReport(
            files=files,
            rows=self.rows,
            kinds=dict(self.kinds.most_common()),
            ids=self.tally.counts["ids"],
            supervised=self.tally.counts["supervised"],
            faults=known,
            drift=self.drift.as_dict(),
            counts=dict(sorted(self.tally.counts.items())),
        )


def _verdict(name: str, seen: Seen, checked: _Checked) -> Verdict:
    """What a fault means, given how many of the rows have it.

    A model may end its reasoning at once or be cut now and then; where most rows are so, the
    data was made that way.
    """
    share, counts = seen.count / max(1, checked.rows), checked.tally.counts
    if name == "stop_absent" and checked.id_rows and seen.count > _HALF * checked.id_rows:
        return "failed"
    if name == "reasoning_empty" and share <= _HALF:
        return "warning"
    if name == "reasoning_closed" and counts["with_reasoning"]:
        return "warning"
    return FAULTS[name].verdict


def _failed(report: FileReport, checked: _Checked) -> Iterator[bool]:
    """For each fault, whether it makes the data wrong."""
    return (_verdict(name, seen, checked) == "failed" for name, seen in report.faults.items())


def _conclude(report: FileReport, checked: _Checked, findings: Findings) -> None:
    """One finding for each fault, then what was proven and what could not be."""
    if not report.rows:
        findings.add("rows", "failed", "the files hold no rows at all", files=report.files)
        return
    findings.add(
        "rows",
        "note",
        f"{_number(report.rows)}: "
        + (", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items()) or "none known"),
        kinds=report.kinds,
        unread=dict(checked.unread),
    )
    for name, seen in report.faults.items():
        share = seen.count / report.rows
        findings.add(
            name,
            _verdict(name, seen, checked),
            f"rows that {FAULTS[name].says}: {seen.count:,} of {report.rows:,} "
            f"({_percent(share)}). First: {seen.examples[0]}",
            count=seen.count,
            share=share,
            examples=[str(example) for example in seen.examples],
        )
    _conclude_reasoning(checked, findings)
    faulty = {FAULTS[name].topic for name in report.faults}
    if not report.faults.keys().isdisjoint(("reasoning_dropped", "reasoning_misplaced")):
        faulty.add("template")
    for topic, says in TOPICS.items():
        if topic not in faulty and _was_checked(topic, checked):
            findings.add(topic, "ok", says)
    if checked.text_rows and checked.reference.template is None:
        findings.add(
            "template", "unproven", "there is no chat template: no row of messages was rendered"
        )
    _conclude_drift(checked.drift, findings)
    _conclude_source(checked, findings)


def _was_checked(topic: str, checked: _Checked) -> bool:
    """Whether rows were there for the checks of a topic."""
    reference = checked.reference
    if topic == "lines":
        return True
    if topic in ("ids", "drift"):
        return bool(checked.drift.rows)
    if topic == "mask":
        return bool(checked.drift.answers and reference.generation_prompt)
    if topic == "stop":
        return bool(checked.drift.answers and reference.profile.stop_ids)
    if topic == "reasoning":
        return bool(reference.reasons and checked.tally.counts["with_reasoning"])
    if topic == "template":
        return bool(checked.text_rows and reference.template is not None)
    return checked.max_length is not None


def _conclude_reasoning(checked: _Checked, findings: Findings) -> None:
    """Where the model itself decides whether to reason, only the whole can look wrong."""
    counts, reference = checked.tally.counts, checked.reference
    without = counts["without_reasoning"]
    if reference.reasons or not reference.marker_texts or not without or counts["with_reasoning"]:
        return
    if reference.profile.reasoning == "none":
        findings.add(
            "reasoning_nowhere",
            "warning",
            f"none of {without:,} answers has reasoning, though the target knows "
            f"{' and '.join(map(repr, reference.marker_texts))}; where it reasons in serving, the "
            "reasoning was lost",
            answers=without,
        )


def _conclude_drift(drift: Drift, findings: Findings) -> None:
    if not drift.rows:
        return
    figures = drift.as_dict()
    if not drift.rows_changed:
        findings.add(
            "text_drift",
            "ok",
            f"all {drift.ids:,} ids of {_number(drift.rows)} come back from their text",
            **figures,
        )
        return
    lost = drift.ids_lost / max(1, drift.ids)
    cause, count = drift.causes.most_common(1)[0]
    text = (
        f"{drift.answers_changed:,} of {drift.answers:,} answers and {drift.rows_changed:,} of "
        f"{drift.rows:,} rows ({_percent(drift.rows_changed / drift.rows)}) do not survive text "
        f"and back, {_percent(lost)} of the ids; mostly: {cause} ({_number(count)}). First: "
        f"{drift.examples[0]['where']} {drift.examples[0]['text']}. Keep them as ids"
    )
    if lost > _MANY_LOST:
        text += "; so many speak for another tokenizer, or for ids that were not sampled"
    findings.add("text_drift", "warning" if lost > _MANY_LOST else "note", text, **figures)


def _conclude_source(checked: _Checked, findings: Findings) -> None:
    """Whether the ids are the model's own is out of reach of a file."""
    if checked.text_rows:
        findings.add(
            "sampled",
            "unproven",
            f"text in {_number(checked.text_rows)}: that its ids are those that the model sampled "
            "cannot be proven, for text does not tell them",
            rows=checked.text_rows,
        )
    elif checked.drift.answers:
        same = not checked.drift.answers_changed
        findings.add(
            "sampled",
            "unproven",
            "that these ids are what the target sampled is not in the file; scoring them on the "
            "target tells"
            + (
                f". All {checked.drift.supervised:,} supervised ids are what the tokenizer makes "
                "of their text, as they are where data was tokenized from text"
                if same
                else ""
            ),
            rows=checked.id_rows,
        )


def _command(
    files: list[str], checked: _Checked, tokenizer: Tokenizer, template: ChatTemplate | None
) -> str:
    """The capture that makes the data anew; PROMPTS where these files hold no prompts for it."""
    pipes = any(path == STDIN or Path(path).is_fifo() for path in files)
    usable = checked.with_prompt > 0 and not pipes
    prompts = " ".join(shlex.quote(path) for path in files) if usable else "PROMPTS"
    command = f"eyas capture {prompts} --out RUN --url http://HOST:30000 --tokenizer "
    command += shlex.quote(tokenizer.source)
    if template is not None and template.kwargs:
        import orjson

        switches = orjson.dumps(template.kwargs, default=str).decode()
        command += f" --template-kwargs {shlex.quote(switches)}"
    return command


def _number(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows:,} rows"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "under 0.1 %"
