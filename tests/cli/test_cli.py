"""The command line as a user meets it: help, exit codes, and one sentence for a mistake."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from capturing import eyas_command, numbered, paired, run_eyas, write_prompts
from eyas.demo.server import TARGET
from fault_server import FaultServer, Target


@pytest.fixture(scope="module")
def run(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ten rows, one of them refused."""
    folder = tmp_path_factory.mktemp("cli")
    rows = [*numbered(6), *paired(2), {"id": "bad", "prompt": 5}]
    prompts = write_prompts(folder / "p.jsonl", rows)
    with FaultServer(target) as server:
        done = run_eyas("capture", str(prompts), "--out", str(folder / "run"), "--url", server.url,
                        "--tokenizer", str(TARGET), "--max-new-tokens", "200")  # fmt: skip
    assert done.returncode == 3, done.stderr
    return folder / "run"


@pytest.mark.parametrize(
    "verb",
    ["", "demo", "probe", "capture", "status", "show", "stats", "verify", "redo", "merge", "archive",
     "export"],
)  # fmt: skip
def test_help(verb: str) -> None:
    shown = run_eyas(*([verb] if verb else []), "--help")
    assert shown.returncode == 0
    assert "Usage:" in shown.stdout
    assert "eyas" in shown.stdout.split("Options:")[-1]  # an example, or the demo


def test_help_imports_nothing_heavy() -> None:
    heavy = ["transformers", "tokenizers", "pyarrow", "httptools", "pydantic", "numpy"]
    code = (
        "import sys; sys.argv = ['eyas', '--help']\n"
        "from eyas.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "[]"


MISTAKES = {
    "no such tokenizer": (["--tokenizer", "/no/such"], "no such directory", 2),
    "no such prompts": (["--prompts-instead"], "does not exist", 2),
    "server not there": ([], "nothing answers at http://127.0.0.1:9", 4),
    "not an address": (["--url", "ftp://x"], "not an address", 2),
    "bad JSON": (["--template-kwargs", "{x"], "is not JSON", 2),
    "no object": (["--template-kwargs", "[1]"], "are an object of names", 2),
    "out of range": (["--top-p", "7"], "top_p", 2),
    "unknown mark": (["--reject", "nonsense"], "nonsense", 2),
    "unknown engine": (["--engine", "ollama"], "engine", 2),
    "no key": (["--api-key-env", "EYAS_NO_SUCH_KEY"], "EYAS_NO_SUCH_KEY", 2),
    "no template": (["--chat-template", "/no/such.jinja"], "/no/such.jinja", 2),
    "stop id": (["--stop-token-id", "99999"], "outside the vocabulary", 2),
    "no config": (["--config", "/no/such.yaml"], "/no/such.yaml", 2),
    "bad date": (["--date", "yesterday"], "date", 2),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str, tmp_path: Path) -> None:
    more, said, code = MISTAKES[name]
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    if more == ["--prompts-instead"]:
        prompts, more = tmp_path / "absent.jsonl", []
    command = ["capture", str(prompts), "--out", str(tmp_path / "run"), "--url",
               "http://127.0.0.1:9", "--tokenizer", str(TARGET), *more]  # fmt: skip
    shown = run_eyas(*command)
    assert shown.returncode == code
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_named() -> None:
    for given, said in (([], "PROMPTS"), (["x.jsonl"], "--out"), (["x", "--out", "r"], "--url")):
        shown = run_eyas("capture", *given)
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
        assert said in shown.stderr


@pytest.mark.parametrize("text", ["[1, 2]", "temprature: 1", "{", "n: no"])
def test_a_bad_config_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    shown = run_eyas("capture", "p", "--out", "o", "--url", "u", "--tokenizer", "t", "--config",
                     str(tmp_path / "c.yaml"))  # fmt: skip
    assert shown.returncode == 2
    assert "Traceback" not in shown.stderr
    assert "c.yaml" in shown.stderr


def test_the_saved_config_does_the_same_again(run: Path, target: Target, tmp_path: Path) -> None:
    with FaultServer(target) as server:
        done = run_eyas("capture", "--config", str(run / "config.yaml"), "--out",
                        str(tmp_path / "again"), "--url", server.url, "--json")  # fmt: skip
    summary = json.loads(done.stdout)
    assert (summary["done"], summary["rejected"], done.returncode) == (10, 1, 3)
    assert summary["exit_code"] == 3
    one, two = (json.loads((p / "manifest.json").read_text()) for p in (run, tmp_path / "again"))
    assert one["fingerprint"] == two["fingerprint"]


def test_prompts_from_standard_input(target: Target, tmp_path: Path) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in numbered(3))
    with FaultServer(target) as server:
        command = eyas_command("capture", "-", "--out", str(tmp_path / "run"), "--url", server.url,
                               "--tokenizer", str(TARGET))  # fmt: skip
        done = subprocess.run(command, input=rows, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "3 = 3 done" in done.stdout


def test_show(run: Path) -> None:
    shown = run_eyas("show", str(run), "q3/0/0")
    parts = [line for line in shown.stdout.splitlines() if line.startswith("--")]
    assert [part.split()[1] for part in parts] == [
        "prompt", "reasoning", "closer", "answer", "stop",
    ]  # fmt: skip
    assert "<|end|>" in shown.stdout.splitlines()[-1]
    with_ids = run_eyas("show", str(run), "q3", "--ids")
    assert "<|end|>[506]" in with_ids.stdout
    row = json.loads(run_eyas("show", str(run), "q3/0/0", "--json").stdout)
    assert row["input_ids"] == row["prompt_ids"] + row["output_ids"]
    assert len(row["loss_mask"]) == len(row["input_ids"])
    assert sum(row["loss_mask"]) == len(row["output_ids"])


def test_show_a_refused_line(run: Path) -> None:
    from eyas import Run

    (line,) = Run(run).rejected()
    shown = run_eyas("show", str(run), line.id)
    assert shown.returncode == 0
    assert "rejected: bad_prompt" in shown.stdout
    absent = run_eyas("show", str(run), "nobody")
    assert (absent.returncode, "nobody" in absent.stderr) == (2, True)


def test_hostile_text_cannot_move_the_cursor() -> None:
    from eyas.cli.tokens import printable

    assert printable("a\x1b[2Jb\r\x9b\u202ec\n") == "a\\x1b[2Jb\\r\\x9b\\u202ec\n"


def test_stats(run: Path) -> None:
    figures = json.loads(run_eyas("stats", str(run), "--json").stdout)
    assert (figures["rows"], figures["rejected"], figures["truncated"]) == (10, 1, 0)
    assert figures["finish_reasons"] == {"stop": 10}
    assert figures["rejected_reasons"] == {"bad_prompt": 1}
    assert figures["turns"] == {"0": 8, "1": 2}
    tokens = figures["tokens"]
    inside = tokens["reasoning"]["total"] + tokens["answer"]["total"]
    assert inside + 2 * 10 == tokens["output"]["total"]  # a closer and a stop id each
    shown = run_eyas("stats", str(run)).stdout
    assert "10 done, 1 rejected" in shown


def test_export(run: Path, target: Target, tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    done = run_eyas("export", str(run), "--to", "jsonl", "--out", str(out), "--only", "stop")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 10
    for row in rows:
        assert set(row) == {"id", "input_ids", "loss_mask"}
        prompt = row["loss_mask"].count(0)
        assert row["loss_mask"] == [0] * prompt + [1] * (len(row["input_ids"]) - prompt)
        assert row["input_ids"][prompt:] == target.right_ids(row["input_ids"][:prompt])
    again = run_eyas("export", str(run), "--out", str(out))
    assert (again.returncode, "--overwrite" in again.stderr) == (2, True)
    longest = max(len(row["input_ids"]) for row in rows)
    short = run_eyas("export", str(run), "--out", str(tmp_path / "s.jsonl.gz"), "--max-length",
                     str(longest - 1), "--json")  # fmt: skip
    report = json.loads(short.stdout)
    assert report["left_out"]["too_long"] >= 1
    assert report["rows"] + report["left_out"]["too_long"] == 10
    with gzip.open(tmp_path / "s.jsonl.gz", "rt") as file:
        assert len(file.readlines()) == report["rows"]
    for wrong in (["--to", "csv"], ["--only", "some"], ["--out", "/no/such/dir/x"]):
        shown = run_eyas("export", str(run), "--out", str(tmp_path / "w"), *wrong)
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)


def test_not_a_run(tmp_path: Path) -> None:
    for verb in ("show", "stats"):
        shown = run_eyas(verb, str(tmp_path))
        assert (shown.returncode, "is not a run" in shown.stderr) == (2, True)


def test_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the demo's engine is not installed")
    for _ in range(2):  # the second time puts the first one's rows aside
        shown = run_eyas("demo", "--prompts", "20", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert "20 = 20 done + 0 rejected + 0 pending" in shown.stdout
        assert "-- stop (1)" in shown.stdout
    right = int(shown.stdout.split("answers   ")[1].split(" ")[0])
    assert right >= 16


def test_the_real_chat_model(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the demo's engine is not installed")
    from eyas.demo.server import DemoError, find_smollm2

    try:
        find_smollm2()
    except DemoError as error:
        pytest.skip(str(error))
    shown = run_eyas("demo", "--model", "smollm2", "--prompts", "2", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "2 = 2 done" in shown.stdout
