"""Smaller vocabularies: counted by hand, the same every time, and as trainers read them."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capturing import run_eyas
from eyas.demo.server import TARGET
from eyas.errors import ConfigError, DamagedRun
from eyas.id_counts import Counts, count_ids
from eyas.run_target import open_run_target
from eyas.store import Run
from eyas.store.files import write_atomically
from eyas.tokens import Tokenizer, load_tokenizer
from eyas.trace import Trace
from eyas.vocabulary import (
    choose,
    choose_vocabulary,
    embedding_size,
    indispensable,
    other_sizes,
    write,
)
from fault_server import CLOSER, END, OPENER
from tools.small import small_home
from writing import trace_of, write_run

V = 512
MODES = ('{"thinking":true}', '{"thinking":false}')


def rows(count: int, seed: int = 0) -> list[Trace]:
    """Rows of every kind: opened by the prompt or by the model, closed or cut, with calls."""
    chosen = random.Random(seed)
    made = []
    for at in range(count):
        prompt = chosen.choices(range(500), k=chosen.randint(1, 9))
        reasoning = chosen.choices(range(500), k=chosen.randint(0, 6))
        answer = chosen.choices(range(500), k=chosen.randint(0, 6))
        n, mode = len(prompt), chosen.choice(MODES)
        marks = ["tool_calls"] if chosen.random() < 0.3 else []
        match chosen.randrange(4):
            case 0:
                output, start, end = [*reasoning, CLOSER, *answer, END], n, n + len(reasoning)
            case 1:
                output = [OPENER, *reasoning, CLOSER, *answer, END]
                start, end = n + 1, n + 1 + len(reasoning)
            case 2:
                output, start, end, marks = [*reasoning, 7], n, None, ["truncated"]
            case _:
                output, start, end = [*answer, END], None, None
        cut = "truncated" in marks
        made.append(
            trace_of(at, prompt, output, reasoning_start=start, reasoning_end=end, marks=marks,
                     template_kwargs=mode, finish_reason="length" if cut else "stop",
                     stop_id=None if cut else END)
        )  # fmt: skip
    return made


def by_hand(traces: list[Trace]) -> Counter[tuple[str, str, int]]:
    found: Counter[tuple[str, str, int]] = Counter()
    for row in traces:
        n = len(row.prompt_ids)
        for at, i in enumerate(row.output_ids, n):
            kind = "answer"
            if row.reasoning_start is not None and at >= row.reasoning_start:
                if row.reasoning_end is None or at < row.reasoning_end:
                    kind = "reasoning"
                elif "tool_calls" in row.marks:
                    kind = "calls"
            elif row.reasoning_start is None and "tool_calls" in row.marks:
                kind = "calls"
            found[row.template_kwargs, kind, i] += 1
    return found


def test_ids_are_counted_as_by_hand(tmp_path: Path) -> None:
    traces = rows(300)
    run = Run(write_run(tmp_path / "run", traces, seal_bytes=3000))
    assert len(list((tmp_path / "run" / "traces").iterdir())) > 5
    counts = count_ids(run, V)
    assert counts.rows == 300
    found = {
        (mode, kind, int(i)): int(one[i])
        for (mode, kind), one in counts.by.items()
        for i in np.flatnonzero(one)
    }
    assert found == dict(by_hand(traces))
    stopped = [row for row in traces if row.complete]
    only = count_ids(run, V, only="stop")
    assert (only.rows, int(only.of().sum())) == (len(stopped), sum(by_hand(stopped).values()))


@given(st.lists(st.integers(0, 5), min_size=20, max_size=20), st.integers(4, 19),
       st.sets(st.integers(0, 19), max_size=4))  # fmt: skip
def test_the_most_frequent_are_chosen_and_the_lower_of_equals(
    counted: list[int], size: int, must: set[int]
) -> None:
    counts = Counts(20, 1, {("{}", "answer"): np.array(counted)})
    kept = {"stop ids": np.array(sorted(must), np.int64)}
    found = choose(counts, kept, size)
    free = sorted((i for i in range(20) if i not in must), key=lambda i: (-counted[i], i))
    assert found.ids.tolist() == sorted([*must, *free[: size - len(must)]])
    assert (found.d2t + np.arange(size)).tolist() == np.flatnonzero(found.t2d).tolist()
    if any(counted):
        assert found.coverage() == sum(counted[i] for i in found.ids) / sum(counted)
    else:
        assert found.coverage() is None


def test_what_must_be_there_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run = Run(write_run(tmp_path / "run", rows(50)))
    target = open_run_target(run, tokenizer)
    kept = indispensable(target, count_ids(run, V))
    assert kept["stop ids"].tolist() == [END]
    assert kept["reasoning markers"].tolist() == [OPENER, CLOSER]
    assert {tokenizer.join([int(i)]) for i in kept["bytes"]} == {bytes([b]) for b in range(256)}
    together = [int(i) for ids in kept.values() for i in ids]
    assert len(together) == len(set(together))


def test_markers_of_calls_are_kept_though_no_row_holds_one(tmp_path: Path) -> None:
    home = small_home(tmp_path / "small")
    control = home.tokenizer.control
    row = trace_of(0, [1], [2, control["<|end|>"]])
    run = Run(write_run(tmp_path / "run", [row], source=home.folder))
    target = open_run_target(run, home.tokenizer)
    kept = indispensable(target, count_ids(run, home.tokenizer.size))
    wanted = {i for text, i in control.items() if "call" in text}
    assert wanted
    assert wanted <= {int(i) for ids in kept.values() for i in ids}


def test_other_control_ids_are_kept_once_they_were_generated(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    strange = next(i for i in tokenizer.control.values() if i not in (END, OPENER, CLOSER))
    run = Run(write_run(tmp_path / "run", [trace_of(0, [1], [strange, END])]))
    kept = indispensable(open_run_target(run, tokenizer), count_ids(run, V))
    assert kept["other control ids that were generated"].tolist() == [strange]


def test_sizes_that_cannot_be_had(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run = Run(write_run(tmp_path / "run", rows(5)))
    counts = count_ids(run, V)
    kept = indispensable(open_run_target(run, tokenizer), counts)
    with pytest.raises(ConfigError, match=r"no room for the 259 ids .*256 bytes"):
        choose(counts, kept, 258)
    with pytest.raises(ConfigError, match=r"--size 512 is not smaller than the target's"):
        choose(counts, kept, V)
    assert [one.size for one in other_sizes(choose(counts, kept, 260))] == []
    assert [one.size for one in other_sizes(choose(counts, {}, 60))] == [15, 30, 120, 240]
    with pytest.raises(
        ConfigError, match=r"holds id 5\d\d, which is not below the vocabulary's 50"
    ):
        count_ids(run, 50)
    with pytest.raises(DamagedRun, match="no good rows yet"):
        choose(Counts(V), kept, 300)


def test_the_embedding_is_what_config_json_says(tmp_path: Path) -> None:
    home = tmp_path / "target"
    shutil.copytree(TARGET, home)
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "vocab_size": 640}))
    assert embedding_size(load_tokenizer(str(home)), None) == (640, "config.json")
    (home / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 576}}))
    assert embedding_size(load_tokenizer(str(home)), None) == (576, "config.json")
    (home / "config.json").unlink()
    unknown = load_tokenizer(str(home))
    with pytest.raises(ConfigError, match=r"no config.json that tells .* give .* --vocab-size"):
        embedding_size(unknown, None)
    assert embedding_size(unknown, 640) == (640, "--vocab-size")
    with pytest.raises(ConfigError, match="less than the tokenizer's 512 ids"):
        embedding_size(unknown, 500)


def test_the_command_writes_the_same_files_each_time(tmp_path: Path) -> None:
    traces = rows(300)
    run = write_run(tmp_path / "run", traces)
    out = tmp_path / "vocab"
    done = run_eyas("vocab", str(run), "--size", "300", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    d2t, t2d = np.load(out / "d2t-300.npy"), np.load(out / "t2d-300.npy")
    assert (d2t.dtype, d2t.shape, t2d.dtype, t2d.shape) == (np.int64, (300,), np.bool_, (V,))
    assert (d2t + np.arange(300)).tolist() == np.flatnonzero(t2d).tolist()
    counted = by_hand(traces)
    for kind, share in figures["by_kind"].items():
        of_kind = {key: n for key, n in counted.items() if key[1] == kind}
        covered = sum(n for (_, _, i), n in of_kind.items() if t2d[i])
        assert share == pytest.approx(covered / sum(of_kind.values()))
    assert set(figures["by_mode"]) == set(MODES)
    assert json.loads((out / "vocabulary.json").read_text())["coverage"] == figures["coverage"]
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    again = run_eyas("vocab", str(run), "--size", "300", "--out", str(out))
    assert again.returncode == 2
    assert "holds d2t-300.npy, t2d-300.npy" in again.stderr
    again = run_eyas("vocab", str(run), "--size", "300", "--out", str(out), "--overwrite")
    assert again.returncode == 0, again.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
    assert "512 ids (config.json)" in again.stdout
    assert f"{figures['coverage']:.3%}" in again.stdout


def test_counts_of_an_export_stay(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run", rows(30)), tmp_path / "prepared"
    done = run_eyas("export", str(run), "--to", "speculators", "--out", str(out))
    assert done.returncode == 0, done.stderr
    before = (out / "token_freq.pt").read_bytes()
    done = run_eyas("vocab", str(run), "--size", "300", "--out", str(out), "--only", "stop")
    assert done.returncode == 0, done.stderr
    assert "token_freq.pt was there already" in done.stdout
    assert (out / "token_freq.pt").read_bytes() == before
    assert (out / "d2t-300.npy").exists()


def test_a_crash_never_mixes_two_maps(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(write_run(tmp_path / "run", rows(30)))
    target = open_run_target(run, tokenizer)
    write(choose_vocabulary(run, target, 300), tmp_path / "v", {})
    other = choose_vocabulary(run, target, 300, only="stop")
    calls: list[Path] = []

    def dying(path: Path, save: Callable[[Path], None]) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write_atomically(path, save)

    monkeypatch.setattr("eyas.vocabulary.write_atomically", dying)
    with pytest.raises(KeyboardInterrupt):
        write(other, tmp_path / "v", {}, overwrite=True)
    left = {path.name for path in (tmp_path / "v").iterdir()}
    assert left == {"d2t-300.npy", "token_freq.pt"}
    assert (np.load(tmp_path / "v" / "d2t-300.npy") == other.d2t).all()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows(3))
    home = small_home(tmp_path / "small")
    done = run_eyas("vocab", str(run), "--size", "300", "--out", str(tmp_path / "v"),
                    "--tokenizer", str(home.folder))  # fmt: skip
    assert done.returncode == 2
    assert "are not those of the run" in done.stderr
    assert not (tmp_path / "v").exists()
