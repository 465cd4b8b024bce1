"""manifest.json: what made a run, and whether it may be continued.

Invariant: two commands share a run only if their fingerprints are equal; what differs is named
with both values.
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from eyas.errors import DamagedRun, FingerprintError
from eyas.store.files import write_bytes
from eyas.trace import FORMAT_VERSION

NAME = "manifest.json"
CONFIG = "config.yaml"


class Manifest(BaseModel):
    """The manifest's fields."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT_VERSION
    """Version of the run's layout; a newer one is refused."""
    eyas: str
    """The version of eyas that began the run."""
    created: str
    """When it began, ISO 8601 in UTC."""
    date: str
    """The day that templates which print today's date are given, ISO 8601."""
    fingerprint: dict[str, Any]
    """What must be equal for rows to belong together."""
    profile: dict[str, Any]
    """What was found out about the target; see `eyas.tokens.Profile`. Under ``template`` and
    ``probe`` what the last probe before a capture saw."""
    max_new_tokens: int
    """The largest token budget so far; it may only rise."""
    tokenizer: str
    """Where the tokenizer was loaded from, for `show`."""
    servers: list[dict[str, Any]] = []
    """Who answered at each address, as far as it told; no keys."""
    versions: dict[str, str] = {}
    """Versions of the libraries that decide what a prompt's ids are."""
    inputs: list[str] = []
    shard: str | None = None
    """Which part of the input the last capture took, such as ``3/8``; null for all of it."""
    shapes: dict[str, int] = {}
    """Recognised input shapes and their number of rows, those of other shards included."""
    counts: dict[str, int] = {}
    """The counts at the end of the last capture."""

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str) -> str:
        dt.date.fromisoformat(value)
        return value

    def save(self, run: Path) -> None:
        """Replace the manifest of a run."""
        data = json.dumps(self.model_dump(), indent=2, ensure_ascii=False) + "\n"
        write_bytes(run / NAME, data.encode())

    @classmethod
    def load(cls, run: Path) -> Manifest:
        """Read the manifest of a run.

        Raises:
            DamagedRun: if it is missing, unreadable or of a newer format.
        """
        path = run / NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DamagedRun(f"{run} is not a run of eyas: it has no {NAME}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedRun(f"{path} cannot be read: {error}") from error
        number = data.get("format") if isinstance(data, dict) else None
        if isinstance(number, int | float) and number > FORMAT_VERSION:
            raise DamagedRun(
                f"{path} has format {number}; this eyas reads up to {FORMAT_VERSION}. "
                "Use a newer eyas."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DamagedRun(f"{path}: {where}: {first['msg']}") from error

    def refuse_other(self, run: Path, fingerprint: dict[str, Any], max_new_tokens: int) -> None:
        """Raise FingerprintError unless a configuration may continue this run."""
        differing = self.differing(fingerprint, "in the run", "now")
        if max_new_tokens < self.max_new_tokens:
            differing.append(
                f"max_new_tokens: {self.max_new_tokens} in the run, {max_new_tokens} now "
                f"(it may only rise: --max-new-tokens {self.max_new_tokens} goes on)"
            )
        if differing:
            raise FingerprintError(
                f"{run} belongs to another configuration ({'; '.join(differing)}). Choose another "
                "--out, or put the old rows aside with --archive."
            )

    def differing(self, fingerprint: dict[str, Any], here: str, there: str) -> list[str]:
        """What differs from another fingerprint, by name, with both values.

        `here` and `there` say where they stand ("in the run", "now").
        """
        return [
            f"{name}: {_shown(self.fingerprint.get(name))} {here}, {_shown(other)} {there}"
            for name, other in {**dict.fromkeys(self.fingerprint), **fingerprint}.items()
            if self.fingerprint.get(name) != other
        ]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
