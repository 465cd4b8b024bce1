"""Compiles `eyas/core/_fast.c` where there is a C compiler; without one eyas runs in Python alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/eyas/core/_fast.c")
MADE = SOURCE.with_suffix(".abi3.so")


class CompileCore(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled functions beside their source, and into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. A wheel that holds what was compiled is one for this platform."""
        if self.target_name != "wheel":
            return
        made = Path(self.root) / MADE
        made.unlink(missing_ok=True)  # another source's, if this one cannot be compiled
        problem = compiled(Path(self.root) / SOURCE, made)
        if problem is not None:
            self.app.display_warning(f"eyas runs without its compiled core: {problem}")
            return
        if version != "editable":
            build_data["force_include"][str(made)] = str(MADE.relative_to("src"))
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def compiled(source: Path, made: Path) -> str | None:
    """Compile one extension module; why not, where it cannot be done."""
    if os.name != "posix":
        return "it is compiled on Linux and macOS only"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        return f"there is no {include}/Python.h (Debian has it in python3-dev)"
    flags = ["-O3", "-fPIC", "-shared", f"-I{include}"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    part = made.with_suffix(".part")  # a broken build must leave nothing that is imported
    command = [*shlex.split(compiler), *flags, str(source), "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"there is no C compiler ({error})"
    if done.returncode:
        part.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed: {done.stderr.strip()[-1000:]}"
    part.replace(made)
    return None
