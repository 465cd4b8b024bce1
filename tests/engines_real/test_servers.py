"""What is not there is said; what does not start shows its log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engines_real import servers


def test_the_reason_for_a_missing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYAS_ENGINES", raising=False)
    assert "make test-engines" in (servers.missing("vllm") or "")
    assert servers.missing("llama_cpp") is None
    monkeypatch.setenv("EYAS_ENGINES", str(tmp_path))
    assert "not installed" in (servers.missing("vllm") or "")
    (tmp_path / "vllm.failed").write_text("no disk space", encoding="utf-8")
    assert "no disk space" in (servers.missing("vllm") or "")


def test_a_half_made_environment_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_ENGINES", str(tmp_path))
    (tmp_path / "sglang").mkdir()
    assert servers.missing("sglang") is not None
    (tmp_path / "sglang" / ".ready").touch()
    assert servers.missing("sglang") is None


def test_a_server_that_dies_shows_the_end_of_its_log() -> None:
    command = ["sh", "-c", "echo started; echo no kernel for this >&2; exit 3"]
    with (
        pytest.raises(servers.NotServed, match="(?s)by itself.*3.*no kernel for this"),
        servers.process(command, {}) as (child, log),
    ):
        servers.wait_until_healthy(child, servers.free_port(), log)
    assert not log.exists()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_locks_pin_every_package_by_hash_but_torch(engine: str) -> None:
    folder = servers.SCRIPTS.parent / "requirements" / "engines"
    lock = (folder / f"{engine}.lock").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==[^\\\n]+\\\n    --hash=", lock, flags=re.MULTILINE)
    assert len(pins) == len(re.findall(r"^[\w.-]+==", lock, flags=re.MULTILINE))
    assert "torch" not in pins
    assert "://" not in lock
    assert "torch==" in (folder / "torch.txt").read_text(encoding="utf-8")
