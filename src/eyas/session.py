"""Everything that a capture needs before its first request: who answers, and into which run.

Invariant: when a session is open, the server is of a kind and version that can be captured
from, the run belongs to this very configuration, no other process writes it, and what an
earlier process left in its journal is sealed.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.config import CaptureConfig, config_yaml
from eyas.engines import ServerInfo
from eyas.engines.server import DEFAULT_SLOTS
from eyas.errors import ConfigError, EyasError
from eyas.findings import Finding
from eyas.order import LongestFirst, open_order
from eyas.probe import require_probe
from eyas.prompting import Prompting
from eyas.readers import PromptReader
from eyas.shard import Shard
from eyas.store import (
    Ledger,
    Manifest,
    Run,
    Writer,
    WriterLock,
    archive,
    is_run,
    prepare_directory,
    remove_temporaries,
    seal_leftovers,
)
from eyas.store.files import write_bytes
from eyas.store.redo import Partials, Redo, put_aside, put_partials_away
from eyas.store.run import INPUT
from eyas.target import Target, open_target
from eyas.tools.sources import Source, open_source

_MOST = 16384
_OTHER_FILES = 64
"""Open files besides the connections: input, journal, parts, libraries."""
_LIBRARIES = ("eyas", "transformers", "tokenizers", "jinja2")
"""Whose versions decide what a prompt's ids are."""


@dataclass(slots=True)
class Session:
    """An open capture."""

    config: CaptureConfig
    reader: PromptReader
    target: Target
    prompting: Prompting
    """How its prompts are made."""
    most_requests: int
    """Requests that may be in flight altogether."""
    run: Run
    ledger: Ledger
    writer: Writer
    lock: WriterLock
    partials: Partials
    """Cut answers of earlier captures that are continued."""
    order: LongestFirst | None
    """What puts conversations in another order than the input's."""
    continued: bool
    """Whether the run held rows of an earlier capture."""
    tool_source: Source | None = None
    """What gives results to calls that have no recorded one."""
    _learning: threading.Lock = field(default_factory=threading.Lock)

    def close_writer(self) -> EyasError | None:
        """Make every row durable and seal it; returns what kept it from that."""
        try:
            self.writer.close()
        except EyasError as error:
            return error
        return None

    def save_counts(self, shapes: dict[str, int], counts: dict[str, int]) -> None:
        """Record in the manifest how the capture ended (a full disk is no reason to fail)."""
        self.run.manifest.shapes, self.run.manifest.counts = shapes, counts
        try:
            self.run.manifest.save(self.run.path)
        except EyasError:
            return

    def end_of_partials(self) -> None:
        """Nothing is pending, so nothing is left to be continued."""
        with suppress(EyasError):
            put_partials_away(self.run.path)

    def learn_weights(self, version: str) -> None:
        """Record the weights that only answers name, before a row of them is stored."""
        with self._learning:
            self.run.manifest.fingerprint["weight_version"] = version
            self.run.manifest.save(self.run.path)

    def learn_tools(self) -> None:
        """Record how calls are read and answered, before the first row with tools is asked for."""
        entry = _tools_entry(self.config, self.prompting)
        with self._learning:
            if "tools" not in self.run.manifest.fingerprint:
                self.run.manifest.fingerprint["tools"] = entry
                self.run.manifest.save(self.run.path)

    async def close(self) -> None:
        """Release the run. Safe to call twice."""
        self.close_writer()
        self.lock.release()
        if self.order is not None:
            self.order.close()
        await self.target.close()


async def open_session(
    config: CaptureConfig,
    *,
    archive: bool = False,
    probe: bool = True,
    redo: Redo | None = None,
    say: Callable[[str], None],
    on_finding: Callable[[Finding], None] | None = None,
) -> Session:
    """Check everything, in the order in which a user would want to hear of it.

    Args:
        config: what to capture.
        archive: put the rows of another configuration in the run directory aside.
        redo: rows that are put aside first, to be done again.
        probe: ask the server the probe's questions first; a failed probe is an error.
        say: takes one line for the user.
        on_finding: takes each of the probe's findings as it is made.

    Raises:
        EyasError: with nothing stored and nothing changed.
    """
    out = Path(config.out)
    reader = PromptReader(config.prompts, column=config.column, system=config.system)
    earlier = Manifest.load(out) if is_run(out) else None
    source = open_source(config.tool_results, config.tool_timeout)
    target = await open_target(
        config,
        say=say,
        date=None if earlier is None else dt.date.fromisoformat(earlier.date),
        weight_version=None if earlier is None else earlier.fingerprint.get("weight_version"),
    )
    if not probe and target.info.doubt is not None:  # the probe says it as well
        say(target.info.doubt)
    try:
        if config.on_length == "continue" and target.sampling.penalised:
            raise ConfigError(
                "--on-length continue cannot be had with a repetition, presence or frequency "
                "penalty: it would begin anew at each joint. Use --on-length keep."
            )
        if earlier is not None and not archive:
            fingerprint = _fingerprint(config, target, earlier)
            earlier.refuse_other(out, fingerprint, config.max_new_tokens)
        looked_through = PromptReader(config.prompts, column=config.column, system=config.system)
        learnt = await require_probe(target, on_finding, looked_through) if probe else {}
        session = _open_run(config, archive, say, reader, target, learnt, redo)
        session.tool_source = source
        return session
    except BaseException:
        await target.close()
        raise


def _open_run(
    config: CaptureConfig,
    archive_other: bool,
    say: Callable[[str], None],
    reader: PromptReader,
    target: Target,
    learnt: dict[str, Any],
    redo: Redo | None,
) -> Session:
    template = target.template
    out = Path(config.out)
    prepare_directory(out)
    lock = WriterLock(out)
    lock.acquire()
    try:
        if config.shard is not None:
            say(f"shard     {config.shard} of the input, by what its conversations hold")
        manifest = Manifest.load(out) if is_run(out) else None
        fingerprint = _fingerprint(config, target, manifest)
        if manifest is not None:
            try:
                manifest.refuse_other(out, fingerprint, config.max_new_tokens)
            except EyasError:
                if not archive_other:
                    raise
                say(f"the rows of another configuration were put aside: {archive(out)}")
                prepare_directory(out)
                manifest = None
                fingerprint.pop("tools", None)
        continued = manifest is not None
        if redo is not None and manifest is not None:
            config = _put_aside(config, manifest, out, redo, say)
        # What cannot be read ends it before anything is changed.
        remove_temporaries(out)
        seal_leftovers(out)
        ledger = Ledger.load(out, Shard.parse(config.shard) if config.shard else None)
        partials = Partials(out)
        if manifest is None:
            manifest = Manifest(
                eyas=_version("eyas"),
                created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                date=(template.date if template else dt.datetime.now().date()).isoformat(),
                fingerprint=fingerprint,
                profile={},
                max_new_tokens=config.max_new_tokens,
                tokenizer="",
            )
        manifest.profile = target.profile.as_dict(target.tokenizer)
        manifest.profile["modes"] = [mode.as_dict() for mode in target.modes.each]
        manifest.profile.update(learnt)
        manifest.max_new_tokens = config.max_new_tokens
        source = Path(config.tokenizer)
        manifest.tokenizer = str(source.absolute()) if source.exists() else config.tokenizer
        if config.revision is not None:
            manifest.tokenizer = f"{config.tokenizer.partition('@')[0]}@{config.revision}"
        manifest.servers = [_server_record(target.info)]
        manifest.versions = {name: _version(name) for name in _LIBRARIES}
        manifest.inputs = list(reader.files)
        manifest.shard = config.shard
        manifest.save(out)
        write_bytes(out / "config.yaml", config_yaml(_resolved(config, target)))
        reader.remember(out / INPUT)
        run = Run(out)
        return Session(
            config=config,
            reader=reader,
            target=target,
            prompting=_prompting(config, target),
            most_requests=_most_requests(config, say),
            run=run,
            ledger=ledger,
            writer=Writer(out, lock, patience_s=config.give_up_after, say=say),
            lock=lock,
            partials=partials,
            order=open_order(
                config.order, out, target.modes.each, say, several=config.several_servers
            ),
            continued=continued,
        )
    except BaseException:
        lock.release()
        raise


def _put_aside(
    config: CaptureConfig, manifest: Manifest, out: Path, redo: Redo, say: Callable[[str], None]
) -> CaptureConfig:
    """Put the rows that are to be redone aside; without any the run's budget stays as it was."""
    seal_leftovers(out)
    aside = put_aside(out, redo)
    if aside.archive is not None:
        rows = ", ".join(f"{count:,} {name}" for name, count in aside.counts.items())
        say(f"redo      {rows}; the old parts lie in {aside.archive}")
    elif waiting := len(Partials(out)):
        say(f"redo      goes on: {waiting:,} cut answers were put aside earlier")
    else:
        say("redo      there is nothing to do again")
        return config.model_copy(update={"max_new_tokens": manifest.max_new_tokens})
    return config


def _most_requests(config: CaptureConfig, say: Callable[[str], None]) -> int:
    """Requests that may be in flight altogether: as far as files may be open."""
    try:
        import resource
    except ImportError:  # Windows
        return _MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        asked = (config.concurrency or DEFAULT_SLOTS) * len(config.url)
        if soft < asked + _OTHER_FILES:
            say(f"only {soft} files may be open (ulimit -n), so fewer requests are in flight")
        return max(1, min(_MOST, soft - _OTHER_FILES))
    return _MOST


def _resolved(config: CaptureConfig, target: Target) -> CaptureConfig:
    """The configuration with what was decided for the user filled in."""
    values = target.sampling.as_dict()
    chosen = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    update: dict[str, Any] = {name: values[name] for name in chosen}
    if target.template is not None and target.template.shows_date:
        update["date"] = target.template.date
    return config.model_copy(update=update)


def _fingerprint(config: CaptureConfig, target: Target, earlier: Manifest | None) -> dict[str, Any]:
    """What must be equal for rows to belong into one run.

    How calls of tools are read and answered is in it once a run has conversations with tools.
    """
    template = target.template
    more: dict[str, Any] = {}
    if earlier is not None and "tools" in earlier.fingerprint:
        more["tools"] = _tools_entry(config, _prompting(config, target))
    return {
        **more,
        "target": target.info.model,
        "weight_version": target.info.weight_version,
        "tokenizer_files": target.tokenizer.files_hash,
        "template": None if template is None else template.hash,
        "template_kwargs": config.template_kwargs,
        "system": config.system,
        "history": config.history,
        "control_text": config.control_text,
        "date": template.date.isoformat() if template and template.shows_date else None,
        **target.sampling.as_dict(),
        "seed": config.seed,
    }


def _prompting(config: CaptureConfig, target: Target) -> Prompting:
    return Prompting(
        target.tokenizer,
        target.modes,
        target.profile,
        history=config.history,
        control_text=config.control_text,
    )


def _tools_entry(config: CaptureConfig, prompting: Prompting) -> dict[str, Any]:
    form = prompting.tool_form
    return {
        "reader": None if form is None else form.reader_name,
        "results": config.tool_results,
    }


def _server_record(info: ServerInfo) -> dict[str, Any]:
    return {
        "engine": info.engine,
        "url": info.url,
        "version": info.version,
        "model": info.model,
        "weight_version": info.weight_version,
        "context_length": info.context_length,
        "slots": info.slots,
        "details": info.details,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
