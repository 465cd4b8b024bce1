"""Rows with tools: what is sent, what is stored, and that it can be proven afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capturing import capture_from, write_prompts
from eyas import Run
from eyas.demo.server import TARGET
from eyas.findings import Findings
from eyas.store.parts import parts
from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer
from eyas.verify.run import verify_run
from fault_server import FaultServer

TEMPLATE = """\
{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"""

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Sieht nach: ö"}}]


def verified(out: Path, template: Path) -> list[str]:
    """The names of the findings that fail."""
    tokenizer = load_tokenizer(str(TARGET), chat_template=template.read_text())
    findings = Findings()
    verify_run(Run(out), tokenizer, findings)
    return [finding.name for finding in findings.of("failed")]


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.jinja"
    path.write_text(TEMPLATE)
    return path


def rows() -> list[dict[str, Any]]:
    return [
        {"id": "with", "prompt": "What is 1 + 2?", "tools": TOOLS},
        {"id": "without", "prompt": "What is 1 + 2?"},
    ]


def test_definitions_are_rendered_stored_and_proven(
    tmp_path: Path, template_file: Path, tokenizer: Tokenizer
) -> None:
    out = tmp_path / "run"
    with FaultServer() as server:
        summary = capture_from(
            server,
            write_prompts(tmp_path / "p.jsonl", rows()),
            out,
            chat_template=str(template_file),
        )
    assert (summary.done, summary.rejected) == (2, 0)
    template = ChatTemplate(TEMPLATE, special_tokens_map=tokenizer.special_tokens_map)
    traces = {trace.conversation_id: trace for trace in Run(out).traces()}
    question = [{"role": "user", "content": "What is 1 + 2?"}]
    assert traces["with"].prompt_ids == tokenizer.encode(template.render(question, tools=TOOLS))
    assert traces["without"].prompt_ids == tokenizer.encode(template.render(question))
    assert json.loads(traces["with"].tools or "") == TOOLS
    assert traces["without"].tools is None
    assert verified(out, template_file) == []


def rewritten(out: Path, change: Any) -> None:
    """Exchange each part of the traces for what `change` makes of its table."""
    for path in parts(out, "traces"):
        pq.write_table(change(pq.read_table(path)), path)


def test_lost_definitions_are_found(tmp_path: Path, template_file: Path) -> None:
    out = tmp_path / "run"
    with FaultServer() as server:
        capture_from(
            server,
            write_prompts(tmp_path / "p.jsonl", rows()),
            out,
            chat_template=str(template_file),
        )
    at = pq.read_schema(parts(out, "traces")[0]).get_field_index("tools")

    def lost(table: pa.Table) -> pa.Table:
        return table.set_column(at, table.field(at), pa.nulls(len(table), pa.string()))

    def broken(table: pa.Table) -> pa.Table:
        return table.set_column(at, table.field(at), pa.array(["[7]"] * len(table)))

    rewritten(out, lost)
    assert verified(out, template_file) == ["prompt"]
    rewritten(out, broken)
    assert set(verified(out, template_file)) == {"prompt", "tools"}


def test_parts_of_an_earlier_eyas_have_no_such_column(tmp_path: Path) -> None:
    out = tmp_path / "run"
    prompts = write_prompts(tmp_path / "p.jsonl", rows()[1:])
    with FaultServer() as server:
        capture_from(server, prompts, out)
        rewritten(out, lambda table: table.drop_columns(["tools"]))
        write_prompts(prompts, [*rows()[1:], {"id": "new", "prompt": "And 3?"}])
        summary = capture_from(server, prompts, out)
    assert (summary.input, summary.done, summary.new) == (2, 2, 1)
    assert {trace.tools for trace in Run(out).traces()} == {None}
    findings = Findings()
    verify_run(Run(out), load_tokenizer(str(TARGET)), findings)
    assert [finding.name for finding in findings.of("failed")] == []
