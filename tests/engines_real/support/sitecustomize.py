"""Run by Python at start, for SGLang's processes only: lets torchvision load without its kernels.

Invariant: nothing is computed differently. The two operators that torchvision describes at import
are declared, not implemented; calling one still fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_declared: list[Any] = []
"""Keeps the library alive: its operators vanish with it."""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first looked for: not every process needs torch."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _declared.append(library)
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # others find it


sys.meta_path.insert(0, _BeforeTorchvision())
