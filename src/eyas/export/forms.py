"""What a form is: where its files lie, what writes them, what its trainer does with them.

Invariant: a form gets batches of rows in their final order and knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eyas.errors import ConfigError
from eyas.export.options import ExportOptions
from eyas.export.report import ExportReport
from eyas.store.manifest import Manifest

if TYPE_CHECKING:
    from eyas.export.texts import TextForm

ONLY_SPLIT = "train"
"""What files are called that belong to no split."""


class Sink(Protocol):
    """One file that is being written."""

    def write(self, rows: Any) -> None:
        """Add a batch of rows."""

    def close(self) -> None:
        """Write what is held, and the file's end."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a sink is told."""

    path: Path
    schema: Any
    """Of the rows that come."""
    sinks: int = 1
    """How many are open at once: they share the memory."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What was written, for the files that a form puts beside its rows."""

    root: Path
    files: dict[str, list[Path]]
    """By split, in order."""
    report: ExportReport
    options: ExportOptions
    manifest: Manifest
    """That of the run."""
    sinks: dict[Path, Any]
    """What wrote each file."""

    @property
    def target(self) -> str:
        """What the target is called; of a path its last name, since the others are the user's."""
        given = str(self.manifest.fingerprint.get("target") or "an unnamed target")
        if "\\" in given or given.startswith(("/", ".", "~")):
            return given.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return given

    def record(self) -> str:
        """How it was made, as YAML."""
        import yaml

        import eyas

        figures = self.report.as_dict()
        chosen = asdict(self.options) | {"split": dict(self.options.split)}
        names = ("weight_version", "tokenizer_files", "template", "history")
        target = {name: self.manifest.fingerprint.get(name) for name in names}
        out = {
            "eyas": eyas.__version__,
            "format": 1,
            "options": {n: list(v) if isinstance(v, tuple) else v for n, v in chosen.items()},
            "target": {"name": self.target, **target},
            "report": {name: v for name, v in figures.items() if name not in ("out", "plan")},
        }
        return str(yaml.safe_dump(out, sort_keys=False, allow_unicode=True, width=100))


def no_more(_: Finished) -> None:
    """For forms that are their rows' files and nothing else."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of an export."""

    name: str
    about: str
    """What it is and who reads it, in a few words."""
    suffix: str
    """Of its files."""
    open: Callable[[Opening], Sink]
    is_directory: bool = False
    """Whether it is a directory even where it is a single file."""
    folder: str = ""
    """Where in the directory its files lie."""
    split_folders: bool = False
    """Whether each split is a directory of its own."""
    stem: str = ""
    """What its files are called; the split's name where empty."""
    cuts_at: int | None = None
    """The length at which its trainer cuts rows, unless it is told another."""
    trainer: tuple[str, ...] = ()
    """What its trainer does to the rows, each a sentence."""
    reads: tuple[str, ...] = ()
    """Columns of the run that it needs."""
    text: TextForm | None = None
    """For forms of messages, which the trainer tokenizes again."""
    default_shards: Callable[[int], int] = field(default=lambda _: 1)
    """How many files a split is written to, by the ids that there are at most."""
    finish: Callable[[Finished], None] = no_more

    no_columns: tuple[str, ...] = ()
    """Columns that its trainer would take for something else."""

    def check(self, options: ExportOptions) -> None:
        """Raise ConfigError where a choice cannot be had in this form."""
        for name in options.columns:
            if name in self.no_columns:
                raise ConfigError(
                    f"--columns {name}: the trainer of --to {self.name} takes a column of that name "
                    "for something else and fails"
                )
        if self.text is None:
            return
        trainer = f"--to {self.name} is text, which its reader tokenizes and masks by itself"
        if options.mask != "all":
            raise ConfigError(f"--mask {options.mask}: {trainer}; forms of ids keep masks")
        if options.merge_turns:
            raise ConfigError(
                f"--merge-turns: {trainer}; a conversation is one row there in any case"
            )
        if options.on_longer != "drop":
            raise ConfigError(f"--on-longer cut: {trainer}; there is no id at which to cut")
        if options.columns:
            raise ConfigError(f"--columns: --to {self.name} has the columns that its reader knows")

    def said(self, report: ExportReport) -> list[str]:
        """What the trainer will still do, with figures where they are known."""
        found = list(self.trainer)
        if cuts := report.trainer_cuts:
            found.append(
                f"{cuts['rows']:,} rows are longer than {cuts['at']:,} ids, where the trainer cuts "
                f"unless told otherwise: {cuts['supervised']:,} supervised ids would be lost, and "
                f"{cuts['emptied']:,} rows with all of theirs"
            )
        return found

    def makes_directory(self, options: ExportOptions) -> bool:
        """Whether ``--out`` names a directory."""
        return self.is_directory or bool(options.split) or options.shards is not None

    def files(self, root: Path, options: ExportOptions, ids: int) -> dict[str, list[Path]]:
        """The files of each split, in order."""
        if not self.makes_directory(options):
            return {ONLY_SPLIT: [root]}
        shards = options.shards or self.default_shards(ids)
        found = {}
        for split in [name for name, _ in options.split] or [ONLY_SPLIT]:
            inside = root / self.folder
            if self.split_folders and options.split:
                inside = root / split
            stem = self.stem or split
            numbered = options.shards is not None or self.is_directory
            names = [f"{stem}-{n:05d}-of-{shards:05d}" for n in range(shards)]
            found[split] = [
                inside / f"{name}{self.suffix}" for name in (names if numbered else [stem])
            ]
        return found


def carried_columns(schema: Any) -> Sequence[tuple[str, str]]:
    """The columns that go along: their names in the rows, and in the run."""
    from eyas.export.rows import CARRIED

    return [(n, n.removeprefix(CARRIED)) for n in schema.names if n.startswith(CARRIED)]
