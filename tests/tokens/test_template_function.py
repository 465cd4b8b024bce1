"""Prompts made by Python: functions that the user names, and the model's own code."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.config import make_config, make_target_config
from eyas.demo.server import TARGET
from eyas.errors import ConfigError, TemplateRefusal, TokenizerError
from eyas.modes import open_modes
from eyas.prompting import Chat, Prompt, Prompting, Refusal
from eyas.target import read_template
from eyas.tokens import ChatTemplate, Tokenizer, build_profile, load_tokenizer
from eyas.tokens.facts import template_facts
from eyas.tokens.template_function import TemplateFunction

TEXT = """
END = "<|end|>"

def prompt(messages, tools, template_kwargs):
    text = "".join(f"<|{m['role']}|>{m['content']}{END}" for m in messages)
    if tools:
        text = f"<|system|>{tools[0]['function']['name']}{END}" + text
    return text + "<|assistant|>" + ("<think>" if template_kwargs.get("thinking", True) else "")

def whole(messages, tools, template_kwargs, add_generation_prompt):
    made = prompt(messages, tools, template_kwargs)
    return made if add_generation_prompt else made.removesuffix("<|assistant|><think>")

def ids(messages, tools, template_kwargs):
    return [508, 256 + len(messages), 506, 509]

def careless(messages, tools, template_kwargs):
    messages[0]["content"] = "changed"
    messages.clear()
    tools.clear()
    return "x"

def odd(messages, tools, template_kwargs):
    return {"nothing": None, "empty": [], "text id": ["a"], "beyond": [10**6], "below": [-1],
            "true": [True], "surrogate": "\\ud800", "bytes": b"x",
            "nested": [[508, 506]], "mapping": {"input_ids": [508, 506]},
            }[messages[0]["content"]]

def raises(messages, tools, template_kwargs):
    raise ValueError("no such thing")

def few(messages):
    return ""

value = 3
class Inside:
    @staticmethod
    def prompt(messages, tools, template_kwargs):
        return "inside"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "encoding_own.py"
    path.write_text(TEXT)
    return path


def loaded(file: Path, name: str, **kwargs: Any) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = load_tokenizer(str(TARGET), chat_template=read_template(f"{file}:{name}"))
    return tokenizer, ChatTemplate.of(tokenizer, kwargs=kwargs)


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_function_that_gives_text(file: Path) -> None:
    tokenizer, template = loaded(file, "prompt")
    assert template.prompt(said("Hi")) == "<|user|>Hi<|end|><|assistant|><think>"
    assert template.prompt_ids(tokenizer, said("Hi")) == tokenizer.encode(
        "<|user|>Hi<|end|><|assistant|><think>"
    )
    assert template.under({"thinking": False}).prompt(said("Hi")) == (
        "<|user|>Hi<|end|><|assistant|>"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert str(template.prompt(said("Hi"), tools)).startswith("<|system|>look<|end|>")
    assert (template.shows_date, template.ignored_kwargs) == (False, [])


def test_a_function_that_gives_ids(file: Path) -> None:
    tokenizer, template = loaded(file, "ids")
    assert template.prompt_ids(tokenizer, said("Hi")) == [508, 257, 506, 509]
    made = Prompting(tokenizer, *open_modes(tokenizer, template, [(1.0, {})]))
    assert made.prompts([Chat(said("a")), Chat(said("b") * 2)]) == [
        Prompt([508, 257, 506, 509]), Prompt([508, 258, 506, 509]),
    ]  # fmt: skip


def test_what_a_function_does_is_found_by_calling_it(file: Path) -> None:
    tokenizer, template = loaded(file, "whole")
    facts = template_facts(tokenizer, template, build_profile(tokenizer, template))
    assert facts.reasoning == "open"
    assert [s[:3] for s in facts.switches] == [("thinking", False, "reasoning: open -> generated")]
    assert facts.roles["system"] == "kept"
    prompts_only = loaded(file, "prompt")[1]
    facts = template_facts(tokenizer, prompts_only, build_profile(tokenizer, prompts_only))
    assert (facts.reasoning, facts.last_turn_reasoning) == ("open", "unknown")
    given = loaded(file, "whole", thinking=False, other=1)[1]
    facts = template_facts(tokenizer, given, build_profile(tokenizer, given))
    assert facts.ignored_kwargs == ("other",)


def test_messages_that_are_stored_are_not_changed(file: Path) -> None:
    _, template = loaded(file, "careless")
    messages, tools = said("Hi"), [{"type": "function"}]
    assert template.prompt(messages, tools) == "x"
    assert (messages, tools) == (said("Hi"), [{"type": "function"}])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", "gives NoneType"),
        ("empty", "gives list"),
        ("text id", "gives 'a' as an id"),
        ("beyond", "gives 1000000 as an id; the tokenizer's end at 511"),
        ("below", "gives -1 as an id"),
        ("true", "gives True as an id"),
        ("surrogate", "no UTF-8"),
        ("bytes", "gives bytes"),
    ],
)
def test_what_is_neither_text_nor_ids_refuses_the_conversation(
    kind: str, words: str, file: Path
) -> None:
    tokenizer, template = loaded(file, "odd")
    with pytest.raises(TemplateRefusal, match=words):
        template.prompt(said(kind))
    made = Prompting(tokenizer, *open_modes(tokenizer, template, [(1.0, {})]))
    refusal = made.prompt(Chat(said(kind)))
    assert isinstance(refusal, Refusal) and refusal.reason == "template_refused"


@pytest.mark.parametrize("kind", ["nested", "mapping"])
def test_ids_as_tokenizers_give_them(kind: str, file: Path) -> None:
    assert loaded(file, "odd")[1].prompt(said(kind)) == [508, 506]


def test_what_it_raises_refuses_the_conversation(file: Path) -> None:
    tokenizer, template = loaded(file, "raises")
    made = Prompting(tokenizer, *open_modes(tokenizer, template, [(1.0, {})]))
    assert made.prompt(Chat(said("Hi"))) == Refusal(
        "template_refused", "encoding_own.py:raises refuses: ValueError: no such thing"
    )


def test_control_text_of_functions(file: Path) -> None:
    tokenizer, template = loaded(file, "prompt")
    modes, profile = open_modes(tokenizer, template, [(1.0, {})])
    made = Prompting(tokenizer, modes, profile, control_text="escape")
    prompt = made.prompt(Chat(said("a <|end|>")))
    assert isinstance(prompt, Prompt) and list(prompt.ids).count(506) == 1
    tokenizer, template = loaded(file, "ids")
    modes, profile = open_modes(tokenizer, template, [(1.0, {})])
    made = Prompting(tokenizer, modes, profile, control_text="escape")
    assert made.prompt(Chat(said("a"))) == Prompt([508, 257, 506, 509])
    refusal = made.prompt(Chat(said("<|end|>")))
    assert isinstance(refusal, Refusal) and refusal.reason == "control_text"
    assert "makes ids" in refusal.detail


def test_the_hash_is_of_file_and_name(file: Path, tmp_path: Path) -> None:
    hashes = {loaded(file, name)[1].hash for name in ("prompt", "whole", "ids")}
    file.write_text(TEXT + "\n# other\n")
    assert len(hashes | {loaded(file, "prompt")[1].hash}) == 4
    moved = tmp_path / "elsewhere.py"
    shutil.copy(file, moved)
    assert loaded(moved, "prompt")[1].hash == loaded(file, "prompt")[1].hash


def test_the_hash_is_of_what_lies_beside_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's encoder is mostly imported by a function of one's own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    encoder, own = tmp_path / "encoder_of_a_model.py", tmp_path / "own_prompts.py"
    own.write_text(
        "import json\nfrom encoder_of_a_model import encode\n"
        "def prompt(messages, tools, template_kwargs):\n    return encode(messages)\n"
    )
    hashes = set()
    for mark in ("<|user|>", "<|system|>"):
        encoder.write_text(f"def encode(messages):\n    return {mark!r} + messages[0]['content']\n")
        sys.modules.pop("encoder_of_a_model", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        template = loaded(own, "prompt")[1]
        assert template.prompt(said("Hi")) == f"{mark}Hi"
        hashes.add(template.hash)
    sys.modules.pop("encoder_of_a_model", None)
    assert len(hashes) == 2


def test_modules_and_what_lies_inside(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = read_template("encoding_own:Inside.prompt")
    assert isinstance(found, TemplateFunction)
    assert found.call([], None, {}, True) == "inside"
    sys.modules.pop("encoding_own", None)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{file}:nothing", "no such function; .* has .*prompt"),
        ("{file}:value", "no such function"),
        ("{file}:few", "called as function"),
        ("/no/such.py:f", "there is no file /no/such.py"),
        ("no.such.module:f", "cannot be imported .ModuleNotFoundError"),
        ("sys:exit", "has no source file"),
        ("{broken}:f", "cannot be imported .ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(spec: str, words: str, file: Path) -> None:
    broken = file.parent / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(TokenizerError, match=words):
        read_template(spec.format(file=file, broken=broken))


# -- the model's own code --------------------------------------------------------------------

OWN = """
import json
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, conversation, tools=None, tokenize=False,
                            add_generation_prompt=True, thinking=True, **kwargs):
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in conversation)
        if tools:
            names = ", ".join(f"type {t['function']['name']} = any" for t in tools)
            text = f"<|system|>{names}<|end|>" + text
        if add_generation_prompt:
            text += "<|assistant|>" + ("<think>" if thinking else "<think></think>")
        return self.encode(text, add_special_tokens=False) if tokenize else text
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer's directory with code of its own, as models have it."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    directory = tmp_path / "own_model"
    shutil.copytree(TARGET, directory)
    (directory / "chat_template.jinja").unlink()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
    config["tokenizer_class"] = "OwnTokenizer"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "own_tokenizer.py").write_text(OWN)
    return directory


def test_code_runs_only_where_it_is_trusted(remote: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"open({str(seen)!r}, 'w').close()\n"
    (remote / "own_tokenizer.py").write_text(code + OWN)
    plain = load_tokenizer(str(remote))
    assert not plain.makes_prompts
    assert "own_tokenizer.py" in plain.no_template
    with pytest.raises(TokenizerError, match="may encode in Python only .own_tokenizer.py"):
        ChatTemplate.of(plain)
    assert not seen.exists()
    trusted = load_tokenizer(str(remote), trust_remote_code=True)
    assert trusted.makes_prompts and seen.exists()


def test_the_models_own_apply_chat_template(remote: Path) -> None:
    tokenizer = load_tokenizer(str(remote), trust_remote_code=True)
    template = ChatTemplate.of(tokenizer)
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert template.prompt(said("Hi"), tools) == (
        "<|system|>type look = any<|end|><|user|>Hi<|end|><|assistant|><think>"
    )
    facts = template_facts(tokenizer, template, build_profile(tokenizer, template))
    assert (facts.reasoning, facts.takes.tools) == ("open", "kept")
    assert template.under({"thinking": False}).prompt(said("Hi")) == (
        "<|user|>Hi<|end|><|assistant|><think></think>"
    )
    before = template.hash
    (remote / "own_tokenizer.py").write_text(OWN.replace("= any", "= (_: any) => any"))
    assert ChatTemplate.of(load_tokenizer(str(remote), trust_remote_code=True)).hash != before


def test_a_template_that_is_named_goes_before_the_models_code(remote: Path, file: Path) -> None:
    tokenizer = load_tokenizer(
        str(remote), chat_template=read_template(f"{file}:prompt"), trust_remote_code=True
    )
    assert "encoding_own.py" in str(tokenizer.template_function)


def test_code_without_a_template_of_its_own_leaves_the_models(remote: Path) -> None:
    (remote / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    shutil.copy(TARGET / "chat_template.jinja", remote)
    tokenizer = load_tokenizer(str(remote), trust_remote_code=True)
    assert tokenizer.template_function is None
    assert ChatTemplate.of(tokenizer).source == (TARGET / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0\n", "its own code cannot be loaded .ZeroDivisionError"),
        (OWN.replace("add_special_tokens=False", "").replace(
            "    def apply", "    def encode(self, text, **kwargs):\n        return [1, 2]\n\n    def apply"),
         "its own code makes .1, 2. and its files make"),
        (OWN.replace(
            "    def apply", "    def encode(self, text, **kwargs):\n        raise OSError('no')\n\n    def apply"),
         "cannot encode a text .OSError: no"),
    ],
)  # fmt: skip
def test_code_that_does_not_fit_is_one_sentence(code: str, words: str, remote: Path) -> None:
    (remote / "own_tokenizer.py").write_text(code)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(str(remote), trust_remote_code=True)


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "0123456789abcdef"])
def test_a_hub_name_must_be_pinned(revision: str | None) -> None:
    with pytest.raises(TokenizerError, match="needs --revision with the 40 digits"):
        load_tokenizer("some/model", trust_remote_code=True, revision=revision)


def test_a_pinned_hub_name_is_fetched_at_its_commit(
    remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, Any, list[str]]] = []

    def snapshot(name: str, *, revision: Any = None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(remote)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    commit = "0123456789" * 4
    assert load_tokenizer("some/model", revision=commit, trust_remote_code=True).makes_prompts
    assert not load_tokenizer(f"some/model@{commit}").makes_prompts
    load_tokenizer("some/model")
    assert [(name, revision) for name, revision, _ in asked] == [
        ("some/model", commit), ("some/model", commit), ("some/model", None),
    ]  # fmt: skip
    assert ["*.py" in patterns for _, _, patterns in asked] == [True, False, False]


def test_a_directory_has_no_revision(remote: Path) -> None:
    with pytest.raises(TokenizerError, match="--revision x is for hub names"):
        load_tokenizer(str(remote), revision="x")


def test_a_file_alone_is_not_trusted_with_code(tmp_path: Path, file: Path) -> None:
    """A run's config.yaml may be anyone's: code that it names is asked for on the command line."""
    values = {"prompts": "p.jsonl", "out": "run", "url": "http://x", "tokenizer": "m"}
    config = tmp_path / "config.yaml"
    given = {"prompts": ["p.jsonl"]}

    def write(more: dict[str, Any]) -> None:
        config.write_text(json.dumps({**values, "prompts": ["p.jsonl"], **more}))

    write({"trust_remote_code": True})
    for make in (make_config, make_target_config):
        with pytest.raises(ConfigError, match="say --trust-remote-code on the command line"):
            make({}, config)
    assert make_config({**given, "trust_remote_code": True}, config).trust_remote_code
    assert make_config({}, config, trusted=True).trust_remote_code
    spec = f"{file}:prompt"
    write({"chat_template": spec})
    with pytest.raises(ConfigError, match="say --chat-template .*encoding_own.py:prompt on the"):
        make_config({}, config)
    assert make_config({"chat_template": spec}, config).chat_template == spec
    write({"chat_template": str(file)})
    assert make_config({}, config).chat_template == str(file)
