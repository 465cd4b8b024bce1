"""Configurations: one model for command line, files and Python, which repeats itself exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.config import CaptureConfig, config_yaml, make_config, read_config_file
from eyas.demo.server import TARGET
from eyas.errors import ConfigError

GIVEN: dict[str, Any] = {"prompts": ["p.jsonl"], "out": "run", "url": "h:1", "tokenizer": "t/t"}


def test_what_is_given_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("n: 3\nseed: 5\nout: elsewhere\ntemperature: null\n")
    config = make_config({**GIVEN, "seed": 7}, file)
    assert (config.n, config.seed, config.out, config.temperature) == (3, 7, "run", None)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", -1, "temperature: "),
        ("top_p", 0, "top_p: "),
        ("top_k", -2, "top_k: "),
        ("n", 0, "n: "),
        ("max_new_tokens", 0, "max_new_tokens: "),
        ("limit", 0, "limit: "),
        ("concurrency", 0, "concurrency: "),
        ("concurrency", "all", "concurrency: it is auto or a number"),
        ("tries", 0, "tries: "),
        ("prompts", [], "prompts: "),
        ("date", "2026-13-01", "date: "),
        ("engine", "ollama", "engine: "),
        ("reject", ["odd"], "no mark is called 'odd'; there are truncated"),
        ("template_kwargs", "thinking", "template_kwargs: "),
        ("stop_token_ids", ["x"], "stop_token_ids.0: "),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({**GIVEN, name: value})
    assert said in str(refused.value)
    assert repr(value if name not in ("stop_token_ids",) else "x")[:8] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_concurrency_is_a_number_or_auto(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("concurrency: 16\n")
    assert make_config(GIVEN, file).concurrency == 16
    assert make_config({**GIVEN, "concurrency": "auto"}, file).concurrency is None
    assert make_config({**GIVEN, "concurrency": "8"}).concurrency == 8


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_missing_is_named_as_the_user_knows_it(name: str) -> None:
    given = {key: value for key, value in GIVEN.items() if key != name}
    with pytest.raises(ConfigError, match="PROMPTS" if name == "prompts" else f"--{name}"):
        make_config(given)


def test_an_unknown_name_is_told_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("temprature: 1\n")
    with pytest.raises(ConfigError, match=r"'temprature' in .*c\.yaml; known are .*temperature"):
        make_config(GIVEN, tmp_path / "c.yaml")


@pytest.mark.parametrize("text", ["", "- a", "just words", "a: [1", "\tx: 1", "{a: 1}}"])
def test_what_is_no_configuration_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_config_file(tmp_path / "c.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            read_config_file(path)
    (tmp_path / "latin.yaml").write_bytes(b"system: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        read_config_file(tmp_path / "latin.yaml")


def test_what_is_saved_gives_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(
        {
            **GIVEN,
            "prompts": ["a.jsonl", "sub/*.parquet", "-"],
            "tokenizer": str(TARGET),
            "url": "http://127.0.0.1:1",
            "chat_template": "t.jinja",
            "template_kwargs": {"thinking": True, "effort": "höchst"},
            "date": "2026-01-02",
            "stop_token_ids": [5],
            "reject": ["loop"],
            "system": "a\nb: c\u2028",
        }
    )
    (tmp_path / "saved.yaml").write_bytes(config_yaml(config))
    monkeypatch.chdir("/")
    again = make_config({}, tmp_path / "saved.yaml")
    moved = {
        "prompts": [f"{tmp_path}/a.jsonl", f"{tmp_path}/sub/*.parquet", "-"],
        "out": f"{tmp_path}/run",
        "chat_template": f"{tmp_path}/t.jinja",
    }
    assert again == config.model_copy(update=moved)


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@127.0.0.1:1", "me:hunter2@host:1", "https://h/v1?key=hunter2"]
)
def test_credentials_in_an_address_reach_no_file(url: str) -> None:
    saved = config_yaml(CaptureConfig.model_validate({**GIVEN, "url": url}))
    assert b"hunter2" not in saved
    assert yaml.safe_load(saved)["url"].startswith("http")
