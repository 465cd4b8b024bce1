"""Conversations as text, for those who need it, with what the text loses.

Invariants: an answer's text is made of its ids, and nothing is added to it but the opener that the
prompt wrote; each row is rendered by the run's template as it is written, tokenized again and
compared, so that the drift is that of these very rows. What a form cannot hold is left out, never
bent.

The text of the thinking goes into ``reasoning_content`` where the form has a place for it, else
into the content, between the target's own markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from eyas.conversation import Message
from eyas.drift import COLUMNS, WayDrift, row_of
from eyas.drift.ways import Row, answer_of, rendered
from eyas.errors import ConfigError, TemplateRefusal
from eyas.export.forms import Opening
from eyas.export.report import ExportReport
from eyas.export.rows import CARRIED, filtered
from eyas.prompting import Prompting
from eyas.run_target import RunTarget, open_run_target
from eyas.store import Run
from eyas.tokens import Profile, load_tokenizer

READS = ("messages", "tools", "finish_reason", "marks", "stop_id", "reasoning_start",
         "reasoning_end")  # fmt: skip
"""The columns of a run that a text is made of, besides its ids."""
LINE = f"{CARRIED}messages"
"""Where the finished line stands, once it is made."""

Conversation = list[Message]
Write = Callable[[str, Conversation, Any], dict[str, Any] | None]
"""Makes a row of an id, messages and tools; None where the form cannot hold them."""


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a form writes a conversation."""

    write: Write
    inline: bool
    """Whether the reasoning stands in the content."""


def open_text_target(
    run: Run,
    tokenizer: str | None,
    chat_template: Any,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> RunTarget:
    """The run's target, which has to have its template.

    Raises:
        ConfigError: a tokenizer or template that is not the run's, or not at hand.
    """
    loaded = load_tokenizer(
        tokenizer or run.manifest.tokenizer,
        chat_template=chat_template,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    target = open_run_target(run, loaded)
    if target.fault is not None:
        raise ConfigError(f"text needs the run's chat template: {target.fault}")
    return target


@dataclass
class Texts:
    """Makes the lines of a form, and measures what they lose."""

    form: TextForm
    target: RunTarget
    report: ExportReport
    drift: WayDrift = field(default_factory=WayDrift)

    def pass_on(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Rows whose messages have become the line that is written."""
        for rows in batches:
            made = [self._line(row) for row in _traces(rows, self.target.prompting)]
            self._measure([one for one in made if one is not None])
            keep = np.array([one is not None for one in made], np.bool_)
            self.report.leave_out("unheld", int(rows.column("turns").to_numpy()[~keep].sum()))
            lines = [one.line for one in made if one is not None]
            kept = filtered(rows, keep)
            at = kept.schema.get_field_index(LINE)
            if len(kept):
                yield kept.set_column(at, kept.schema.field(at), pa.array(lines, pa.string()))

    def finish(self) -> None:
        """Put what was measured into the report."""
        self.report.drift = self.drift.as_dict()

    def _line(self, row: Row) -> _Made | None:
        answer = answer_of(self.target.prompting, row)
        if answer is None or row.messages is None:
            return None
        messages = [*row.messages, answer]
        if self.form.inline:
            profile = self.target.prompting.profile
            *before, last = messages
            messages = [_inline(message, profile, closed=True) for message in before]
            messages.append(_inline(last, profile, closed=row.closed))
        made = self.form.write(row.id, messages, row.tools)
        if made is None:
            return None
        line = orjson.dumps(made).decode()
        return _Made(row, messages, None if self.form.inline else answer, line)

    def _measure(self, made: list[_Made]) -> None:
        prompting = self.target.prompting
        texts, shown = [], []
        for one in made:
            try:
                texts.append(rendered(prompting, one.row, one.messages, last=True))
                shown.append(one)
            except TemplateRefusal as refusal:
                self.drift.not_measured[str(refusal)] += 1
        for one, again in zip(shown, prompting.tokenizer.encode_batch(texts), strict=True):
            self.drift.add(prompting, one.row, again, one.answer)


@dataclass(frozen=True, slots=True)
class _Made:
    """A row on its way."""

    row: Row
    messages: Conversation
    """As they are written."""
    answer: Message | None
    """The last one taken apart; None where it was put together again."""
    line: str


def _traces(rows: Any, prompting: Prompting) -> Iterator[Row]:
    """The last trace of each row."""
    names = {name: f"{CARRIED}{name}" for name in READS}
    own = ["id", "key", "sample", "input_ids", "prompt"]
    for record in rows.select([*own, *names.values()]).to_pylist():
        n = record["prompt"]
        ids = {"prompt_ids": record["input_ids"][:n], "output_ids": record["input_ids"][n:]}
        trace = {name: record[name] for name in ("id", "key", "sample")} | ids
        trace |= {name: record[there] for name, there in names.items()}
        assert set(COLUMNS) <= set(trace)
        yield row_of(trace, prompting)


def _inline(message: Message, profile: Profile, *, closed: bool) -> Message:
    """A message whose reasoning stands in its content, between the target's markers."""
    reasoning = message.get("reasoning_content")
    if message["role"] != "assistant" or reasoning is None:
        return message
    opener, closer = (m.text if m else "" for m in (profile.opener, profile.closer))
    said = f"{opener}{reasoning}{closer if closed else ''}{message.get('content') or ''}"
    left = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**left, "content": said}


def as_openai(message: Message) -> Message:
    """A message as OpenAI's API has it: the arguments of calls are JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def with_tools(row: dict[str, Any], tools: Any) -> dict[str, Any]:
    """A row with the definitions of its tools, where it has some."""
    return {**row, "tools": tools} if tools else row


def uses_tools(messages: Conversation, tools: Any) -> bool:
    """Whether a conversation has tools, calls or results."""
    return bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)


def alternates(messages: Conversation) -> bool:
    """Whether user and assistant take turns, the user first, behind a system message or none."""
    roles = [m["role"] for m in messages]
    if roles[:1] == ["system"]:
        roles = roles[1:]
    return bool(roles) and all(
        role == ("assistant" if at % 2 else "user") for at, role in enumerate(roles)
    )


def shared(messages: Conversation, names: dict[str, str]) -> list[dict[str, str]]:
    """Messages as ``from`` and ``value``, with other names for the roles."""
    return [{"from": names[m["role"]], "value": m.get("content") or ""} for m in messages]


class Lines:
    """Writes the lines that `Texts` made."""

    def __init__(self, opening: Opening) -> None:
        from eyas.export.jsonl import open_lines

        self._file = open_lines(opening.path)

    def write(self, rows: Any) -> None:
        """Add a batch of rows."""
        self._file.writelines(f"{line}\n".encode() for line in rows.column(LINE).to_pylist())

    def close(self) -> None:
        """Write the file's end."""
        self._file.close()
