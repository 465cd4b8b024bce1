"""Several runs of one configuration made into one, such as those of an array of jobs.

Invariants: the merged run is there whole or not at all, whatever happens on the way; the runs
that it is made of keep every row; nobody writes them meanwhile. What belongs to different
configurations is never joined, and no unit is there twice.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.config import CaptureConfig, config_yaml, make_config
from eyas.errors import EyasError, FingerprintError, RunLocked, StoreError
from eyas.shard import Shard
from eyas.store import (
    REJECTED,
    TRACES,
    Manifest,
    WriterLock,
    prepare_directory,
    remove_temporaries,
    seal_leftovers,
)
from eyas.store.files import disk_errors, sync_directory, write_bytes
from eyas.store.join import Join, JoinedRun
from eyas.store.journal import segments
from eyas.store.manifest import CONFIG
from eyas.store.parts import parts

_COUNTS = ("input", "done", "rejected", "pending", "extra", "truncated")


@dataclass(slots=True)
class MergeReport:
    """What a merge made."""

    run: str
    runs: int
    rows: int
    """Good rows in the merged run."""
    rejected: int
    left_out: int
    """Rows that an earlier run holds too (only with `skip_doubles`)."""
    renamed: int
    """Rows whose id was changed, since another conversation has it."""
    parts: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    """The counts of all runs together; empty where one of them holds none that are right."""
    missing_shards: list[str] = field(default_factory=list)
    """Shards that are not among the runs, where these are shards."""


def merge_runs(
    out: str | Path,
    runs: Sequence[str | Path],
    *,
    skip_doubles: bool = False,
    say: Callable[[str], None] = lambda _: None,
    on_read: Callable[[int], None] = lambda _: None,
    on_written: Callable[[int], None] = lambda _: None,
) -> MergeReport:
    """Join runs into a new one.

    Args:
        out: the new run; it must not exist, or be an empty directory.
        runs: the runs; where two clash, the one that is named first is right.
        skip_doubles: leave out what an earlier run holds too, instead of refusing.
        say: takes one line for the user.
        on_read: called with the number of rows that were looked at so far.
        on_written: called with the number of rows that were written so far.

    Raises:
        EyasError: with nothing at `out`, and the runs as they were.
    """
    began = time.monotonic()
    target = Path(os.path.realpath(Path(out).expanduser()))
    paths = [Path(run) for run in runs]
    _refuse_places(Path(out), target, paths)
    manifests = [Manifest.load(path) for path in paths]
    fingerprint = _common_fingerprint(paths, manifests)
    with ExitStack() as held:
        for path in paths:
            held.enter_context(_held(path, say))
        join = Join(paths)
        join.survey(on_read)
        doubles = [run for run in join.runs if run.doubles]
        if doubles and not skip_doubles:
            raise StoreError(_said_of_doubles(doubles[0], paths))
        manifest = _merged_manifest(join.runs, manifests, fingerprint, say)
        config = _merged_config(target, paths, say)
        with _made_whole(target) as made:
            prepare_directory(made)
            number = join.write(made, on_written)
            if config is not None:
                write_bytes(made / CONFIG, config_yaml(config))
            manifest.save(made)
    left = sum(run.rows[f"left {folder}"] for run in join.runs for folder in (TRACES, REJECTED))
    return MergeReport(
        run=str(out),
        runs=len(paths),
        rows=_kept(join.runs, TRACES),
        rejected=_kept(join.runs, REJECTED),
        left_out=left,
        renamed=sum(run.renamed for run in join.runs),
        parts=number,
        seconds=time.monotonic() - began,
        counts=manifest.counts,
        missing_shards=_missing_shards(manifests),
    )


def _refuse_places(out: Path, target: Path, paths: list[Path]) -> None:
    """Raise StoreError unless `out` can become a run made of the others."""
    if target.exists():
        if not target.is_dir():
            raise StoreError(f"{out} is a file; name a directory that does not exist yet")
        if os.path.ismount(target):
            raise StoreError(f"{out} is a mount point, which cannot be replaced; name a directory "
                             "in it")  # fmt: skip
        if any(target.iterdir()):
            raise StoreError(f"{out} is not empty; a merged run is always a new one: name a "
                             "directory that does not exist yet")  # fmt: skip
    seen: dict[Path, Path] = {}
    for path in paths:
        real = Path(os.path.realpath(path))
        if real in seen:
            raise StoreError(f"{path} is named twice (as {seen[real]} too); name each run once")
        if target.is_relative_to(real):
            raise StoreError(f"{out} lies in {path}, one of the runs; name another directory")
        seen[real] = path


def _common_fingerprint(paths: list[Path], manifests: list[Manifest]) -> dict[str, Any]:
    """The runs' one fingerprint.

    Where only answers name the weights, a run that got none does not know them.
    """
    manifests = _with_tools(manifests)
    names = "weight_version"
    knowing = [m.fingerprint.get(names) for m in manifests if m.fingerprint.get(names) is not None]
    first = manifests[0]
    if knowing and first.fingerprint.get(names) is None and not parts(paths[0], TRACES):
        first = first.model_copy(update={"fingerprint": {**first.fingerprint, names: knowing[0]}})
    for path, manifest in zip(paths[1:], manifests[1:], strict=True):
        other = manifest.fingerprint
        if other.get(names) is None and names in other and not parts(path, TRACES):
            other = {**other, names: first.fingerprint.get(names)}
        differing = first.differing(other, f"in {paths[0]}", f"in {path}")
        if differing:
            raise FingerprintError(
                f"{path} belongs to another configuration than {paths[0]} "
                f"({'; '.join(differing)}). Only runs of one configuration can be joined."
            )
    return first.fingerprint


def _with_tools(manifests: list[Manifest]) -> list[Manifest]:
    """The manifests, those of runs without conversations with tools as if they had the others'."""
    known = [m.fingerprint["tools"] for m in manifests if "tools" in m.fingerprint]
    return [
        m.model_copy(update={"fingerprint": {"tools": known[0], **m.fingerprint}}) if known else m
        for m in manifests
    ]


@contextmanager
def _held(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep others from writing a run, with everything in it sealed."""
    lock = WriterLock(run)
    left = len(segments(run / "journal"))
    if not os.access(run, os.W_OK):  # somebody else's, to be read only
        if lock.path.exists():
            raise RunLocked(f"{run} has a {lock.path.name}: it is being written, or its writer "
                            "died; the capture command that made it goes on")  # fmt: skip
        if left:
            raise StoreError(f"{run} holds rows that are not sealed yet and cannot be written to; "
                             "the capture command that made it seals them")  # fmt: skip
        yield
        return
    lock.acquire()
    try:
        remove_temporaries(run)
        if seal_leftovers(run):
            say(f"{run} was ended before its last rows were sealed; they are sealed now")
        yield
    finally:
        lock.release()


@contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its place if all goes well, and else goes away."""
    workplace = target.with_name(f".{target.name}.merge")
    made = workplace / "run"
    lock = WriterLock(workplace)
    with disk_errors(target):
        workplace.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except EyasError:
        with suppress(OSError):  # not empty: another merge into the same place works in it
            workplace.rmdir()
        raise
    try:
        with disk_errors(target):
            if made.exists():  # of a merge that was killed
                shutil.rmtree(made)
            made.mkdir()
        yield made
        with disk_errors(target):
            sync_directory(made)
            if target.exists():
                target.rmdir()
            made.rename(target)
            sync_directory(target.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        lock.release()
        shutil.rmtree(workplace, ignore_errors=True)


def _said_of_doubles(run: JoinedRun, paths: list[Path]) -> str:
    earlier, count = run.doubles.most_common(1)[0]
    rows = "row is" if count == 1 else "rows are"
    return (
        f"{count:,} {rows} in {paths[earlier]} and in {run.path}, {run.example[earlier]} for "
        "example: these runs overlap (the same input, or the same --shard). Leave one of them out, "
        "or keep what the first one holds with --skip-doubles."
    )


def _kept(runs: list[JoinedRun], folder: str) -> int:
    return sum(run.rows[folder] - run.rows[f"left {folder}"] for run in runs)


def _merged_manifest(
    runs: list[JoinedRun],
    manifests: list[Manifest],
    fingerprint: dict[str, Any],
    say: Callable[[str], None],
) -> Manifest:
    oldest = min(manifests, key=lambda manifest: manifest.created)
    first = manifests[0]
    stops = {i for m in manifests for i in m.profile.get("stop_ids", ())}  # a probe learns some
    return Manifest(
        eyas=oldest.eyas,
        created=oldest.created,
        date=first.date,
        fingerprint=fingerprint,
        profile={**first.profile, "stop_ids": sorted(stops)} if stops else first.profile,
        max_new_tokens=max(manifest.max_new_tokens for manifest in manifests),
        tokenizer=first.tokenizer,
        servers=_united([server for manifest in manifests for server in manifest.servers]),
        versions={
            name: ", ".join(_united([m.versions[name] for m in manifests if name in m.versions]))
            for name in _united([name for m in manifests for name in m.versions])
        },
        inputs=_united([path for manifest in manifests for path in manifest.inputs]),
        shapes=_merged_shapes(manifests),
        counts=_merged_counts(runs, manifests, say),
    )


def _united(items: list[Any]) -> list[Any]:
    """Each item once, in order."""
    return [item for at, item in enumerate(items) if item not in items[:at]]


def _merged_shapes(manifests: list[Manifest]) -> dict[str, int]:
    """Rows by their shape; runs of the same files have read the same rows."""
    of_files: dict[tuple[str, ...], Counter[str]] = {}
    for manifest in manifests:
        of_files.setdefault(tuple(manifest.inputs), Counter())
        of_files[tuple(manifest.inputs)] |= Counter(manifest.shapes)
    total: Counter[str] = Counter()
    for shapes in of_files.values():
        total += shapes
    return dict(total)


def _merged_counts(
    runs: list[JoinedRun], manifests: list[Manifest], say: Callable[[str], None]
) -> dict[str, int]:
    """The counts of all runs together, without the rows that are left out."""
    total = dict.fromkeys(_COUNTS, 0)
    for run, manifest in zip(runs, manifests, strict=True):
        counts = {name: manifest.counts.get(name, 0) for name in _COUNTS}
        there = run.rows[TRACES] + run.rows[REJECTED]
        if not manifest.counts or there != sum(counts[n] for n in ("done", "rejected", "extra")):
            say(f"{run.path} was not captured to its end, so the merged run holds no counts; "
                "a capture into it counts again")  # fmt: skip
            return {}
        for folder, name in ((TRACES, "done"), (REJECTED, "rejected")):
            of_input = min(run.rows[f"left {folder}"], counts[name])
            counts["extra"] -= run.rows[f"left {folder}"] - of_input
            counts[name] -= of_input
            counts["input"] -= of_input
        counts["truncated"] = max(0, counts["truncated"] - run.cut)
        for name in _COUNTS:
            total[name] += counts[name]
    return total


def _merged_config(
    out: Path, paths: list[Path], say: Callable[[str], None]
) -> CaptureConfig | None:
    """What captures the rest of all the runs' inputs into the new one."""
    configs: list[CaptureConfig] = []
    for path in paths:
        try:
            configs.append(make_config({"out": str(out)}, path / CONFIG))
        except EyasError as error:
            say(f"{path / CONFIG} is left out: {error}")
    if not configs:
        return None
    limits = [config.limit for config in configs]
    return configs[0].model_copy(
        update={
            "prompts": _united([prompt for config in configs for prompt in config.prompts]),
            "n": max(config.n for config in configs),
            "max_new_tokens": max(config.max_new_tokens for config in configs),
            "limit": None if None in limits else max(limit or 0 for limit in limits),
            "shard": None,
        }
    )


def _missing_shards(manifests: list[Manifest]) -> list[str]:
    """Shards of as many as there are said to be that no run is of; none beside a run of all."""
    if any(m.shard is None for m in manifests):
        return []
    shards = {Shard.parse(m.shard) for m in manifests if m.shard is not None}
    if len({shard.of for shard in shards}) != 1:
        return []
    count = next(iter(shards)).of
    there = {shard.number for shard in shards}
    return [f"{n}/{count}" for n in range(1, count + 1) if n not in there]
