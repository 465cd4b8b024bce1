"""The main job on a real tokenizer: prompts in, exact token sequences out."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

import eyas
from eyas import CaptureConfig, ChatTemplate, capture, load_tokenizer
from fault_server import FaultServer, Target


class Kimi(Target):
    """Answers in Kimi's ids."""

    end = 163586

    def right_ids(self, prompt: list[int]) -> list[int]:
        ids = super().right_ids(prompt)
        return [{511: 163607, 506: 163586}.get(i, i + 1000) for i in ids]


def test_kimi_on_two_turn_prompts(shared: Path, tmp_path: Path) -> None:
    directory = shared / "tokenizers" / "kimi-k2.5"
    tokenizer = load_tokenizer(str(directory))
    demo = Target()
    target = Kimi(tokenizer)
    target.plain = demo.plain
    with FaultServer(target) as server:
        summary = capture(
            CaptureConfig(
                prompts=[str(shared / "data" / "mt_bench.jsonl")],
                out=str(tmp_path / "run"),
                url=server.url,
                tokenizer=str(directory),
                max_new_tokens=512,
                template_kwargs={"thinking": True},
            )
        )
    assert (summary.done, summary.exit_code, summary.shapes) == (160, 0, {"turns": 80})
    rows = duckdb.sql(
        "select conversation_id, turn, prompt_ids, output_ids, reasoning_start, reasoning_end, "
        f"messages, metadata from '{tmp_path}/run/traces/*.parquet' order by id"
    ).fetchall()
    template = ChatTemplate.of(tokenizer, kwargs={"thinking": True})
    asked = {}
    for line in (shared / "data" / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        asked[str(row["question_id"])] = row
    for name, turn, prompt, output, start, end, messages, metadata in rows:
        assert output == target.right_ids(prompt)
        assert prompt[-1] == 163606
        assert prompt == tokenizer.encode(template.render(json.loads(messages)))
        assert json.loads(messages)[-1]["content"] == asked[name]["turns"][turn]
        assert start == len(prompt)
        assert (prompt + output)[end] == 163607
        assert json.loads(metadata)["category"] == asked[name]["category"]
    assert len({row[0] for row in rows}) == 80


def test_short_names_are_there_and_lazy() -> None:
    for name in eyas.__all__:
        assert getattr(eyas, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        eyas.nothing  # noqa: B018
