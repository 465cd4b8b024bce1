"""Captures whose prompts are made by Python, and what of them is proven and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from capturing import capture_from, config_for, paired, reasons, run_eyas, write_prompts
from eyas import Run
from eyas.config import config_yaml
from eyas.demo.server import TARGET
from eyas.errors import EyasError
from eyas.probe import probe
from fault_server import FaultServer, Target

FUNCTION = """
def prompt(messages, tools, template_kwargs):
    if "2" in messages[-1]["content"]:
        raise ValueError("no twos")
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|><think>"

def ids(messages, tools, template_kwargs):
    from eyas.tokens import load_tokenizer
    return load_tokenizer(PLACE).encode(prompt(messages, tools, template_kwargs))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(f"PLACE = {str(TARGET)!r}\n{FUNCTION}")
    return path


@pytest.mark.parametrize("name", ["prompt", "ids"])
def test_a_function_through_a_capture(
    name: str, target: Target, tmp_path: Path, file: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(4))
    out, spec = tmp_path / "run", f"{file}:{name}"
    with FaultServer(target) as server:
        summary = capture_from(server, prompts, out, chat_template=spec)
        assert (summary.done, summary.rejected) == (6, 2)
        assert reasons(out) == {"template_refused": 1, "earlier_turn_rejected": 1}
        (refused,) = (row for row in Run(out).rejected() if row.reason == "template_refused")
        assert refused.detail == f"own.py:{name} refuses: ValueError: no twos"
        assert capture_from(server, prompts, out, chat_template=spec).new == 0
        file.write_text(file.read_text() + "\n# another\n")
        with pytest.raises(EyasError, match="template: .* in the run"):
            capture_from(server, prompts, out, chat_template=spec)


def test_verify_renders_with_the_function_again(target: Target, tmp_path: Path, file: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(4))
    out, spec = tmp_path / "run", f"{file}:ids"
    with FaultServer(target) as server:
        capture_from(server, prompts, out, chat_template=spec)
    proven = run_eyas("verify", str(out), "--chat-template", spec)
    assert proven.returncode == 0, proven.stdout
    assert "the chat template is the run's" in " ".join(proven.stdout.split())
    without = run_eyas("verify", str(out))
    assert without.returncode == 0
    assert "unproven  template" in without.stdout
    file.write_text(file.read_text().replace("<|end|>", "<|end|> "))
    other = run_eyas("verify", str(out), "--chat-template", spec)
    assert "unproven  template" in other.stdout


def test_the_runs_configuration_names_the_function(
    target: Target, tmp_path: Path, file: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", paired(3))
    out, spec = tmp_path / "run", f"{file}:prompt"
    with FaultServer(target) as server:
        capture_from(server, prompts, out, chat_template=spec)
        saved = (out / "config.yaml").read_text()
        assert f"chat_template: {spec}" in saved
        file.write_text(file.read_text())
        redo = ["redo", str(out), "--which", "rejected", "--no-probe", "--url", server.url]
        refused = run_eyas(*redo)
        assert refused.returncode == 2
        assert "for which a file alone is not trusted" in refused.stderr
        assert "Traceback" not in refused.stderr
        done = run_eyas(*redo, "--trust-remote-code")
        assert done.returncode == 3, done.stderr  # it still refuses twos
    config = config_for(server, prompts, out, chat_template="package.module:function")
    assert b"chat_template: package.module:function" in config_yaml(config)


def test_a_function_is_probed(target: Target, tmp_path: Path, file: Path) -> None:
    file.write_text(file.read_text().replace('if "2" in', 'if "never" in'))
    prompts = write_prompts(tmp_path / "p.jsonl", paired(1))
    for name in ("prompt", "ids"):
        with FaultServer(target) as server:
            config = config_for(server, prompts, tmp_path / "r", chat_template=f"{file}:{name}")
            done = probe(config)
        assert not done.failed
        assert done.facts is not None and done.facts.reasoning == "open"


def test_the_page_of_a_function(file: Path) -> None:
    page = run_eyas("template", str(TARGET), "--chat-template", f"{file}:prompt")
    assert page.returncode == 0, page.stderr
    assert "own.py:prompt refuses: ValueError: no twos" in " ".join(page.stdout.split())
    missing = run_eyas("template", str(TARGET), "--chat-template", f"{file}:nothing")
    assert missing.returncode == 2
    assert "no such function" in missing.stderr and "Traceback" not in missing.stderr


OWN = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, conversation, tools=None, tokenize=False,
                            add_generation_prompt=True, **kwargs):
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in conversation)
        return text + ("<|assistant|><think>" if add_generation_prompt else "")
"""


def test_a_models_own_code_through_a_capture(target: Target, tmp_path: Path) -> None:
    model = tmp_path / "own_model"
    shutil.copytree(TARGET, model)
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
               "tokenizer_class": "OwnTokenizer"}  # fmt: skip
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(OWN)
    prompts, out = write_prompts(tmp_path / "p.jsonl", paired(2)), tmp_path / "run"
    env = {"HF_HOME": str(tmp_path / "home")}
    with FaultServer(target) as server:
        arguments = ["capture", str(prompts), "--out", str(out), "--url", server.url,
                     "--tokenizer", str(model), "--max-new-tokens", "200"]  # fmt: skip
        without = run_eyas(*arguments, "--no-probe", env=env)
        assert without.returncode == 3
        assert "It may encode in Python only (own.py)" in without.stderr
        assert reasons(out)["no_chat_template"] == 2
        shutil.rmtree(out)
        done = run_eyas(*arguments, "--trust-remote-code", env=env)
        assert done.returncode == 0, done.stderr
    assert len(list(Run(out).traces())) == 4
    proven = run_eyas("verify", str(out), "--trust-remote-code", env=env)
    assert proven.returncode == 0, proven.stdout
    assert "the chat template is the run's" in " ".join(proven.stdout.split())
    untrusted = run_eyas("verify", str(out), env=env)
    assert untrusted.returncode == 0
    assert "the chat template is the run's" not in " ".join(untrusted.stdout.split())
