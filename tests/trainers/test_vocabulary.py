"""Maps of a smaller vocabulary, read by the trainers' own code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capturing import run_eyas
from eyas.demo.server import TARGET
from eyas.store import Run

SIZE, WHOLE = 300, 512


@pytest.fixture
def maps(run: Path, tmp_path: Path) -> Path:
    done = run_eyas("vocab", str(run), "--size", str(SIZE), "--out", str(tmp_path / "vocab"))
    assert done.returncode == 0, done.stderr
    return tmp_path / "vocab"


def test_speculators_takes_the_map(run: Path, maps: Path, ask: Callable[..., Any]) -> None:
    found = ask("speculators", "vocabulary_speculators", maps, TARGET, SIZE, WHOLE).value
    d2t, t2d = np.load(maps / f"d2t-{SIZE}.npy"), np.load(maps / f"t2d-{SIZE}.npy")
    assert (found["d2t"], found["t2d"]) == (d2t.tolist(), t2d.tolist())
    assert found["dtypes"] == ["torch.int64", "torch.bool"]
    said = Counter(chain.from_iterable(trace.output_ids for trace in Run(run).traces()))
    assert dict(map(tuple, found["counts"])) == said
    # Its own choice of that size is the most frequent, without what a draft must be able to say.
    assert len(set(found["own"]) & set(np.flatnonzero(t2d).tolist())) < SIZE


def test_specforge_and_torch_take_the_map(maps: Path, ask: Callable[..., Any]) -> None:
    found = ask("specforge", "vocabulary_specforge", maps, SIZE, WHOLE).value
    d2t, t2d = np.load(maps / f"d2t-{SIZE}.npy"), np.load(maps / f"t2d-{SIZE}.npy")
    assert (found["d2t"], found["t2d"]) == (d2t.tolist(), t2d.tolist())
    assert (found["alone"], found["dtype"]) == (d2t.tolist(), "torch.int64")
