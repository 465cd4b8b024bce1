"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the tests' own fault_server

from eyas.demo.server import TARGET
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer
from fault_server import FaultServer, Target

settings.register_profile("eyas", deadline=None)  # a busy machine is no fault
settings.load_profile("eyas")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Converted tokenizers are cached for one session of tests only."""
    before = os.environ.get("EYAS_CACHE")
    os.environ["EYAS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["EYAS_CACHE"]
    else:
        os.environ["EYAS_CACHE"] = before


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real prompts, templates and tokenizers, which lie outside the project."""
    found = os.environ.get("EYAS_TEST_DATA")
    if not found:
        pytest.skip("EYAS_TEST_DATA names no directory with real tokenizers and templates")
    return Path(found)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo target's tokenizer: real, small, always there."""
    return load_tokenizer(str(TARGET))


@pytest.fixture(scope="session")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.of(tokenizer)


@pytest.fixture(scope="session")
def profile(tokenizer: Tokenizer, template: ChatTemplate) -> Profile:
    return build_profile(tokenizer, template)


@pytest.fixture(scope="module")
def target() -> Target:
    """A target whose right answers are known."""
    return Target()


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[FaultServer]:
    """A server of the target, which is honest as long as it is given no policy."""
    with FaultServer(target) as running:
        yield running
