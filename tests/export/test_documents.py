"""docs/exports.md names every form, reason and option, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from capturing import run_eyas
from eyas.export import FORMS, REASONS

TEXT = (Path(__file__).parents[2] / "docs" / "exports.md").read_text(encoding="utf-8")


def test_every_form_and_reason_is_explained() -> None:
    assert {name for name in (*FORMS, *REASONS) if f"`{name}`" not in TEXT} == set()
    listed = {name for row in re.findall(r"^\| (\[.*?) \| ", TEXT, flags=re.MULTILINE)
              for name in re.findall(r"`([\w-]+)`", row)}  # fmt: skip
    assert listed == set(FORMS)


def test_options_are_those_of_the_command() -> None:
    shown = run_eyas("export", "--help", env={"COLUMNS": "200"}).stdout
    there = set(re.findall(r"--[a-z-]+", shown))
    other = {"--model", "--data", "--output", "--seq-length", "--no-skip-token-freq", "--data-path",
             "--verifier-name-or-path", "--draft-vocab-size", "--total-seq-len",
             "--repo-type"}  # fmt: skip
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - other
    assert named <= there
    assert there - named <= {"--help", "--trust-remote-code", "--revision"}


def test_the_command_s_help_names_every_form() -> None:
    shown = run_eyas("export", "--help").stdout
    assert {name for name in FORMS if name not in shown} == set()
