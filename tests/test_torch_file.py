"""Files for torch, read back without it; `tests/trainers` reads them with torch itself."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.torch_file import save


class Reader(pickle.Unpickler):
    """What torch's own unpickler does, with numpy in place of torch."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        super().__init__(self.zip.open("archive/data.pkl"))

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch", "LongStorage"): "<i8",
            ("torch", "BoolStorage"): "?",
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild,
            ("collections", "OrderedDict"): dict,
        }
        return known[module, name]

    def persistent_load(self, key: Any) -> Any:
        kind, dtype, name, place, count = key
        assert (kind, place) == ("storage", "cpu")
        found = np.frombuffer(self.zip.read(f"archive/data/{name}"), dtype)
        assert len(found) == count
        return found

    @staticmethod
    def rebuild(storage: Any, start: int, shape: Any, stride: Any, grad: bool, hooks: Any) -> Any:
        assert (start, shape, stride, grad, hooks) == (0, (len(storage),), (1,), False, {})
        return storage


def load(path: Path) -> Any:
    return Reader(path).load()


def test_tensors_come_back(tmp_path: Path) -> None:
    d2t, t2d = np.array([0, 5, -(2**40)]), np.array([True, False])
    save(tmp_path / "map.pt", {"d2t": d2t, "t2d": t2d})
    found = load(tmp_path / "map.pt")
    assert {name: array.tolist() for name, array in found.items()} == {
        "d2t": d2t.tolist(), "t2d": [True, False],
    }  # fmt: skip
    save(tmp_path / "one.pt", d2t)
    assert load(tmp_path / "one.pt").tolist() == d2t.tolist()
    assert zipfile.ZipFile(tmp_path / "map.pt").testzip() is None
    assert {i.compress_type for i in zipfile.ZipFile(tmp_path / "map.pt").infolist()} == {0}


@given(st.dictionaries(st.integers(0, 2**31), st.integers(-(2**63), 2**63 - 1)))
def test_numbers_come_back(counts: dict[int, int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "f.pt", counts)
        assert load(Path(folder) / "f.pt") == counts


def test_the_same_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, {1: 2})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("value", [{1: 2.5}, {"x": 1}, np.zeros(3), np.zeros((2, 2), np.int64)])
def test_what_cannot_be_written_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save(tmp_path / "f.pt", value)
