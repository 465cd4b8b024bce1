"""The Python API: short names that are typed, lazy, and the same in whatever order one imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eyas


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_eyas_imports_nothing_else() -> None:
    assert python("import sys, eyas; print([m for m in sys.modules if m.startswith('eyas.')])") == (
        "[]"
    )


@pytest.mark.parametrize("name", sorted(eyas.__all__))
def test_each_name_is_what_its_home_holds(name: str) -> None:
    home = eyas._HOME_OF[name]
    value = getattr(eyas, name)
    assert value is getattr(sys.modules[f"eyas.{home}"], name)
    assert callable(value)


def test_a_name_that_is_no_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        eyas.nothing  # noqa: B018


@pytest.mark.parametrize(
    "first", ["", "import eyas.loop", "import eyas.cli.capture, eyas.session",
              "from eyas.loop import capture"],
)  # fmt: skip
def test_capture_can_be_called_whatever_was_imported_before(first: str) -> None:
    """The function has its module's name, which Python puts into the package on import."""
    assert python(f"{first}\nfrom eyas import capture\nprint(callable(capture))") == "True"


def test_types_are_shipped() -> None:
    assert (Path(eyas.__file__).parent / "py.typed").exists()
