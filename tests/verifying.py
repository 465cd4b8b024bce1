"""Small helpers of the tests that verify training data: rows, files, and what was found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.findings import Findings
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile
from eyas.verify import FAULTS, FileReport, verify_file


@dataclass
class Outcome:
    """A report with its findings."""

    report: FileReport
    findings: Findings

    @property
    def faults(self) -> dict[str, int]:
        return {name: seen.count for name, seen in self.report.faults.items()}

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each fault."""
        return {f.name: f.verdict for f in self.findings.items if f.name in FAULTS}

    @property
    def proven(self) -> set[str]:
        return {f.name for f in self.findings.of("ok")}


@dataclass
class Desk:
    """One target's files and a folder for rows."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    profile: Profile
    folder: Path

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path, template: str | None = None) -> Desk:
        made = (
            ChatTemplate.of(tokenizer)
            if template is None
            else ChatTemplate(template, special_tokens_map=tokenizer.special_tokens_map)
        )
        return cls(tokenizer, made, build_profile(tokenizer, made), folder)

    def verify(self, *rows: dict[str, Any] | str, **more: Any) -> Outcome:
        """Write rows (dicts, or lines as they are) as JSON Lines and check them."""
        path = self.folder / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return self.verify_path(path, **more)

    def verify_path(self, path: Path, **more: Any) -> Outcome:
        findings = Findings()
        report = verify_file(
            [str(path)], self.tokenizer, self.template, self.profile, findings, **more
        )
        return Outcome(report, findings)

    def prompt(self, question: str = "What is 2+2?") -> list[int]:
        """The ids that serving sends for one user message."""
        assert self.template is not None
        return self.tokenizer.encode(self.template.render([{"role": "user", "content": question}]))


def id_row(prompt: list[int], output: list[int], **more: Any) -> dict[str, Any]:
    """A tokenized row."""
    mask = [0] * len(prompt) + [1] * len(output)
    return {"input_ids": prompt + output, "loss_mask": mask, **more}


def chat_row(content: str, reasoning: str | None = None, **more: Any) -> dict[str, Any]:
    """A row of one question and one answer."""
    answer = {"role": "assistant", "content": content}
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    return {"messages": [{"role": "user", "content": "What is 2+2?"}, answer], **more}
