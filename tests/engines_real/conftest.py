"""Fixtures of the tests on real engines.

Invariant: one heavy server runs at a time, and each set-up starts once a session: tests are
ordered by the set-up they ask for. What is not installed skips, and says why.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines_real import servers
from engines_real.servers import NotServed, Served, SetUp
from eyas.demo.server import TARGET, MissingPackage, find_smollm2


class Keeper:
    """Keeps the last server that was asked for, and ends it for the next."""

    def __init__(self, models: Callable[[str], Path]) -> None:
        self._models = models
        self._stack = contextlib.ExitStack()
        self._now: tuple[SetUp, Served] | None = None
        self._failed: dict[SetUp, NotServed] = {}

    def serve(self, setup: SetUp) -> Served:
        if self._now is not None and self._now[0] == setup:
            return self._now[1]
        if reason := servers.missing(setup.engine):
            pytest.skip(reason)
        if setup in self._failed:  # it took minutes to find out
            raise self._failed[setup]
        model = self._models(setup.model)
        self.close()
        try:
            served = self._stack.enter_context(
                servers.serve(setup.engine, model, dtype=setup.dtype, parser=setup.parser)
            )
        except NotServed as error:
            self._failed[setup] = error
            raise
        served = replace(served, name=setup.model, parser=setup.parser)
        self._now = (setup, served)
        return served

    def close(self) -> None:
        self._now = None
        self._stack.close()


@pytest.fixture(scope="session")
def models() -> Callable[[str], Path]:
    """A checkpoint by its name; what has to be made is made once and kept."""
    return model_directory


def model_directory(name: str) -> Path:
    if name == "demo":
        return TARGET
    if reason := servers.missing("sglang"):
        pytest.skip(f"making the model needs SGLang's environment: {reason}")
    root = servers.environments()
    assert root is not None
    directory = root / "models" / name
    script = servers.HERE / f"{name.replace('-', '_')}.py"
    if directory.is_dir() and directory.stat().st_mtime >= script.stat().st_mtime:
        return directory
    if name == "smollm2":
        try:
            servers.run_script("sglang", script.name, str(find_smollm2()), str(directory))
        except MissingPackage as error:
            pytest.skip(str(error))
    else:
        servers.run_script("sglang", script.name, str(directory))
    os.utime(directory)
    return directory


@pytest.fixture(scope="session")
def keeper(models: Callable[[str], Path]) -> Iterator[Keeper]:
    kept = Keeper(models)
    yield kept
    kept.close()


@pytest.fixture
def served(request: pytest.FixtureRequest, keeper: Keeper) -> Served:
    """The server that the test is parametrized with."""
    return keeper.serve(request.param)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one set-up stand together, the light ones first."""

    def order(item: pytest.Item) -> tuple[str, ...]:
        setup = item.callspec.params.get("served") if hasattr(item, "callspec") else None
        if not isinstance(setup, SetUp):
            return ("",)
        return (setup.engine, setup.model, setup.parser or "")

    own = [at for at, item in enumerate(items) if item.path.parent == servers.HERE]
    for at, item in zip(own, sorted((items[at] for at in own), key=order), strict=True):
        items[at] = item
