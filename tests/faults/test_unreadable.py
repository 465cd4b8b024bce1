"""Files of a run that were damaged from outside: one sentence that names the file, from each command
that reads it, and nothing of the run is changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from capturing import capture_from, numbered, paired, write_prompts
from eyas import EyasError, Run
from eyas.cli import app
from eyas.demo.server import TARGET
from fault_server import FaultServer, Target

ROWS = [*numbered(4), *paired(2), {"id": "bad", "prompt": 5}]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(Target()) as running:
        yield running


@pytest.fixture(scope="module")
def made(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prompts = write_prompts(folder / "p.jsonl", ROWS)
    capture_from(server, prompts, folder / "run", max_new_tokens=20)  # some are cut
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    shutil.copy(made.parent / "p.jsonl", tmp_path / "p.jsonl")
    return tmp_path / "run"


def commands(run: Path, server: FaultServer) -> dict[str, list[str]]:
    aside = run.parent
    capture = [
        str(aside / "p.jsonl"), "--url", server.url, "--tokenizer", str(TARGET), "--no-probe",
        "--max-new-tokens", "20", "--give-up-after", "0",
    ]  # fmt: skip
    return {
        "status": ["status", str(run)],
        "stats": ["stats", str(run)],
        "show": ["show", str(run)],
        "verify": ["verify", str(run)],
        "export": [
            "export",
            str(run),
            "--to",
            "jsonl",
            "--out",
            str(aside / "x.jsonl"),
            "--overwrite",
        ],
        "merge": ["merge", str(aside / "merged"), str(run)],
        "redo": ["redo", str(run), "--which", "length", "--max-new-tokens", "200", "--no-probe"],
        "capture": ["capture", *capture, "--out", str(run)],
    }


COMMANDS = ("status", "stats", "show", "verify", "export", "merge", "redo", "capture")


def said(command: list[str]) -> tuple[int, str]:
    """The exit code and the words of a command; a traceback fails the test."""
    result = CliRunner().invoke(app, command)
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return result.exit_code, result.output
    assert isinstance(error, EyasError), repr(error)
    return error.exit_code, str(error)


def files(run: Path) -> dict[str, bytes]:
    kept = [*run.glob("traces/*"), *run.glob("rejected/*"), run / "manifest.json"]
    return {str(path): path.read_bytes() for path in kept if path.is_file()}


def rewritten(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        pq.write_table(change(pq.read_table(path)), path)

    return damage


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, pa.array([values] * len(table)))

    return change


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no Parquet": lambda path: path.write_bytes(b"hello, this is no Parquet\n"),
    "a directory": as_directory,
    "no keys": rewritten(lambda table: table.drop_columns(["key"])),
    "no marks and ids": rewritten(lambda table: table.drop_columns(["marks", "id"])),
    "turns as text": rewritten(with_column("turn", "0")),
    "ids as text": rewritten(with_column("prompt_ids", "1 2 3")),
    "keys as numbers": rewritten(with_column("key", 7)),
    "of a newer format": rewritten(
        lambda table: table.replace_schema_metadata({"eyas.format": "99", "eyas.kind": "trace"})
    ),
}
COLUMNS = {"no keys", "no marks and ids", "turns as text", "ids as text", "keys as numbers"}
"""Files that are whole, but for a column."""
OF_UNITS = {"no keys", "turns as text", "keys as numbers"}
"""Those that are needed to know which rows there are."""


def reads(command: str, damage: str, folder: str) -> bool:
    """Whether a command cannot but meet a damage. (Others may end well.)"""
    if command == "verify":
        return True
    if folder == "rejected" and command in ("stats", "show", "export"):
        return False
    if damage in COLUMNS:
        return damage in OF_UNITS and command in ("merge", "redo", "capture")
    return command != "status" or damage != "of a newer format"  # it counts, and reads no row


@pytest.mark.parametrize("folder", ["traces", "rejected"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_named(damage: str, folder: str, run: Path, server: FaultServer) -> None:
    (part,) = (run / folder).iterdir()
    DAMAGES[damage](part)
    before = files(run)
    asked = len(server.requests)
    for name, command in commands(run, server).items():
        if not reads(name, damage, folder) and name in ("redo", "capture"):
            continue  # they would go on, and change the run
        code, words = said(command)
        if reads(name, damage, folder):
            assert code == 2 or (name, code) == ("verify", 3), (name, words)
            assert part.name in "".join(words.split()), (name, words)
            assert not (run.parent / "merged").exists()
        assert len(words) < 2000
    assert files(run) == before
    assert len(server.requests) == asked  # nothing is asked for a run that cannot be read
    assert not (run / "writer.lock").exists()


def wrong_manifests(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field, and each one within, with values of other kinds."""
    kinds = (True, "x", [None])
    for name, value in whole.items():
        for wrong in kinds:
            yield name, {**whole, name: wrong}
        if isinstance(value, dict):
            for inner in value:
                for wrong in kinds:
                    yield f"{name}.{inner}", {**whole, name: {**value, inner: wrong}}


def test_a_manifest_with_anything_wrong_in_it(run: Path, server: FaultServer) -> None:
    """It is refused in a sentence, or what is wrong is nothing that the reader needs."""
    path = run / "manifest.json"
    whole = json.loads(path.read_text())
    for name, wrong in wrong_manifests(whole):
        path.write_text(json.dumps(wrong))
        for command in ("status", "stats", "show"):
            code, words = said(commands(run, server)[command])
            assert code in (0, 3, 4) or "manifest.json" in words or "tokenizer" in name, (
                name,
                words,
            )


@pytest.mark.parametrize("wrong", ["x", None, 2.5, 99, 99.0, [1]])
def test_a_format_that_is_no_number_we_know(wrong: object, run: Path) -> None:
    path = run / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": wrong}))
    with pytest.raises(EyasError, match=r"manifest\.json.*format"):
        Run(run)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\ud800", "[" * 99999])
@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", "status.json", "writer.lock"])
def test_a_file_of_something_else(name: str, text: str, run: Path, server: FaultServer) -> None:
    """Only the manifest is needed; the others are written anew or looked past."""
    (run / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    for command in COMMANDS:
        code, words = said(commands(run, server)[command])
        if name == "manifest.json":
            assert code == 2, (command, words)
            assert "manifest.json" in words
        elif name == "writer.lock" and command == "status":
            assert code == 0
        else:
            assert code in (0, 2, 3), (command, words)
        shutil.rmtree(run.parent / "merged", ignore_errors=True)


@pytest.mark.parametrize("damage", ["empty", "half", "no Parquet", "no keys", "turns as text"])
def test_cut_answers_that_cannot_be_read(damage: str, run: Path, server: FaultServer) -> None:
    """``partials/`` is looked into by the next capture, which names the file and stores nothing."""
    (part,) = (run / "traces").iterdir()
    (run / "partials").mkdir()
    shutil.copy(part, run / "partials" / part.name)
    DAMAGES[damage](run / "partials" / part.name)
    before = files(run)
    code, words = said(commands(run, server)["capture"])
    assert (code, "partials" in words) == (2, True), words
    assert files(run) == before
