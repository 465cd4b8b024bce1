"""What the documentation says is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from eyas.checks import MARKS, REFUSALS
from eyas.feed import FEED_REASONS
from eyas.readers import REASONS
from eyas.trace import Rejected, Trace

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_cli_reference_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_cli_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_name_is_in_the_format() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    names = {*REFUSALS, *MARKS, *FEED_REASONS, *REASONS}
    names |= {f.name for kind in (Trace, Rejected) for f in fields(kind)}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_format_names_nothing_that_is_not_there() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    engine = {"connection_lost", "server_error", "malformed_answer", "cut_answer", "error_body",
              "request_refused"}  # fmt: skip
    known = {*REFUSALS, *MARKS, *FEED_REASONS, *REASONS, *engine}
    known |= {f.name for kind in (Trace, Rejected) for f in fields(kind)}
    listed = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert listed - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_map_of_modules_is_complete() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in (ROOT / "src" / "eyas").iterdir():
        if path.name.startswith("_") or path.name == "py.typed":
            continue
        assert path.name in text or f"{path.name}/" in text, path.name
