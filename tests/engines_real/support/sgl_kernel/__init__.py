"""A stand-in for SGLang's compiled kernels, which exist as builds for GPUs only.

Invariant: every name can be imported from here and from any submodule, and whatever is called
raises. A model that would need a kernel fails loudly; it never computes something else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"
__path__: list[str] = []


class _Absent:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> _Absent:
        return _attribute(self.__name__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is a GPU kernel; this is a stand-in")

    def __repr__(self) -> str:
        return f"<absent kernel {self.__name__}>"


def _attribute(module: str, name: str) -> _Absent:
    if name.startswith("__"):  # the import system asks for those, and takes an answer at its word
        raise AttributeError(name)
    return _Absent(f"{module}.{name}")


def __getattr__(name: str) -> _Absent:
    return _attribute(__name__, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule, however deep."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: _attribute(module.__name__, name)  # type: ignore[method-assign]


sys.meta_path.append(_Submodules())
