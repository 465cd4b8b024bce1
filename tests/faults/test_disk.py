"""Disks that are full and files that are damaged: one sentence, and nothing lost."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from capturing import capture_from, check_run, eyas_command, numbered, run_eyas, write_prompts
from eyas import EyasError, Run
from eyas.demo.server import TARGET
from fault_server import FaultServer, Target


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def arguments(server: FaultServer, prompts: Path, out: Path) -> list[str]:
    return ["capture", str(prompts), "--no-probe", "--out", str(out), "--url", server.url, "--tokenizer",
            str(TARGET), "--max-new-tokens", "200"]  # fmt: skip


def test_a_full_disk_ends_the_run_cleanly(small_disk: Path, target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1500))
    with FaultServer(target) as server:
        command = [*arguments(server, prompts, small_disk / "run"), "--give-up-after", "1"]
        full = run_eyas(*command)
        assert full.returncode == 4
        assert "the disk is full" in full.stdout
        assert "Traceback" not in full.stderr
        kept = len(check_run(target, small_disk / "run"))
        assert 0 < kept < 1500
        reported = int(full.stdout.split(" = ")[1].split(" done")[0].replace(",", ""))
        assert reported <= kept
        still_full = run_eyas(*command)
        assert still_full.returncode == 4
        assert len(still_full.stderr.splitlines()[-1]) < 400
        subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
        assert run_eyas(*command).returncode == 0
    assert len(check_run(target, small_disk / "run")) == 1500


def test_a_full_disk_is_waited_for(small_disk: Path, target: Target, tmp_path: Path) -> None:
    """The capture pauses, says so, and goes on when there is room: no row is lost or doubled."""
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1500))
    with FaultServer(target) as server:
        child = subprocess.Popen(
            eyas_command(*arguments(server, prompts, small_disk / "run")),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stderr is not None
        for line in child.stderr:
            if "waiting for room" in line:
                break
        subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
        _, rest = child.communicate(timeout=600)
    assert child.returncode == 0
    assert "there is room again" in rest
    assert len(check_run(target, small_disk / "run")) == 1500


def test_a_file_size_limit_is_no_different(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(800))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with FaultServer(target) as server:
        command = arguments(server, prompts, tmp_path / "run")
        child = subprocess.run(
            eyas_command(*command), capture_output=True, text=True, preexec_fn=limited, timeout=600
        )
        assert child.returncode == 4
        assert "cannot write" in child.stdout
        assert "Traceback" not in child.stderr
        assert run_eyas(*command).returncode == 0
    assert len(check_run(target, tmp_path / "run")) == 800


def test_a_damaged_part_is_named(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(5))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
        (part,) = (tmp_path / "run" / "traces").iterdir()
        whole = part.read_bytes()
        part.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(EyasError, match=r"part-000001\.parquet cannot be read"):
            capture_from(server, prompts, tmp_path / "run")
        part.write_bytes(whole)
        assert capture_from(server, prompts, tmp_path / "run").new == 0


def test_a_directory_of_something_else_is_left_alone(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with FaultServer(target) as server, pytest.raises(EyasError, match=r"thesis\.txt"):
        capture_from(server, prompts, tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_damaged_manifest_is_named(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "run")
    (tmp_path / "run" / "manifest.json").write_text("{")
    with pytest.raises(EyasError, match=r"manifest\.json cannot be read"):
        Run(tmp_path / "run")


def test_an_unwritable_place_is_named(target: Target, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/eyas-run")
    else:
        place = tmp_path / "closed" / "run"
        place.parent.mkdir(mode=0o500)
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    with FaultServer(target) as server:
        refused = run_eyas(*arguments(server, prompts, place))
    assert refused.returncode in (2, 4)
    assert "Traceback" not in refused.stderr
    assert str(place.name) in refused.stderr
