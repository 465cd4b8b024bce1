"""What the documentation says is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest

from eyas import errors
from eyas.checks import MARKS, REFUSALS
from eyas.readers import REASONS
from eyas.trace import Rejected, Trace, arrow_schema
from eyas.turns import TURN_REASONS

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
ENGINE_REASONS = {
    "connection_lost", "server_error", "malformed_answer", "cut_answer", "error_body",
    "request_refused",
}  # fmt: skip


def test_the_cli_reference_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_cli_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_name_is_in_the_format() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    names = {*REFUSALS, *MARKS, *TURN_REASONS, *REASONS}
    names |= {f.name for kind in (Trace, Rejected) for f in fields(kind)}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_format_names_nothing_that_is_not_there() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    known = {*REFUSALS, *MARKS, *TURN_REASONS, *REASONS, *ENGINE_REASONS}
    known |= {f.name for kind in (Trace, Rejected) for f in fields(kind)}
    listed = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert listed - known == set()


def test_the_reasons_of_the_engine_are_those_of_the_errors() -> None:
    kinds = [errors.TransportError, errors.BusyError, errors.MalformedAnswer, errors.RequestRefused]
    assert {kind.reason for kind in kinds} | {"cut_answer", "error_body"} == ENGINE_REASONS
    http = (ROOT / "src" / "eyas" / "engines" / "http.py").read_text(encoding="utf-8")
    assert set(re.findall(r'reason="(\w+)"', http)) == {"cut_answer", "error_body"}


@pytest.mark.parametrize(
    ("heading", "kind"), [("Traces", Trace), ("Rejected", Rejected)], ids=["traces", "rejected"]
)
def test_the_columns_stand_in_order_with_their_types(
    heading: str, kind: type[Trace] | type[Rejected]
) -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    said = re.findall(r"^\| `(\w+)` \| `?([\w<>]+)`? \|", section, flags=re.MULTILINE)
    schema = [(f.name, str(f.type).replace("element: ", "").split("[")[0])
              for f in arrow_schema(kind)]  # fmt: skip
    assert said == schema


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in chain.from_iterable(groups):
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert re.search(rf"^\|.*\b{name[0]}\b.*\|", text, flags=re.MULTILINE), name[0]


def test_the_readme_uses_options_that_there_are() -> None:
    known = set(re.findall(r"--[\w-]+", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", readme, flags=re.DOTALL)
    commands = [block for block in blocks if block.startswith("eyas ")]
    assert commands
    for command in commands:
        assert set(re.findall(r"(?<!\S)--[\w-]+", command)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_map_of_modules_is_complete() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in (ROOT / "src" / "eyas").iterdir():
        if path.name.startswith("_") or path.name == "py.typed":
            continue
        assert path.name in text or f"{path.name}/" in text, path.name
