"""Everything that a capture needs before its first request: who answers, and into which run.

Invariant: when a session is open, the server is of a kind and version that can be captured
from, the run belongs to this very configuration, no other process writes it, and what an
earlier process left in its journal is sealed.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.config import CaptureConfig, config_yaml
from eyas.engines import Engine, Sampling, ServerInfo, connect
from eyas.errors import ConfigError, EyasError, ServerUnreachable
from eyas.readers import PromptReader
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
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer

_DEFAULT_CONCURRENCY = 64
_OTHER_FILES = 64
"""Open files besides the connections: input, journal, parts, libraries."""
_LIBRARIES = ("eyas", "transformers", "tokenizers", "jinja2")
"""Whose versions decide what a prompt's ids are."""


@dataclass(slots=True)
class Session:
    """An open capture."""

    config: CaptureConfig
    reader: PromptReader
    tokenizer: Tokenizer
    template: ChatTemplate | None
    profile: Profile
    engine: Engine
    info: ServerInfo
    sampling: Sampling
    context_length: int | None
    concurrency: int
    run: Run
    ledger: Ledger
    writer: Writer
    lock: WriterLock
    continued: bool
    """Whether the run held rows of an earlier capture."""

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

    def learn_weights(self, version: str) -> None:
        """Record the weights that only answers name, before a row of them is stored."""
        self.run.manifest.fingerprint["weight_version"] = version
        self.run.manifest.save(self.run.path)

    async def close(self) -> None:
        """Release the run. Safe to call twice."""
        self.close_writer()
        self.lock.release()
        await self.engine.close()


async def open_session(
    config: CaptureConfig, *, archive: bool = False, say: Callable[[str], None]
) -> Session:
    """Check everything, in the order in which a user would want to hear of it.

    Raises:
        EyasError: with nothing sent and nothing changed.
    """
    out = Path(config.out)
    reader = PromptReader(config.prompts, column=config.column, system=config.system)
    earlier = Manifest.load(out) if is_run(out) else None
    tokenizer = load_tokenizer(config.tokenizer, chat_template=_template_text(config))
    template = _template(config, tokenizer, earlier, say)
    profile = build_profile(tokenizer, template, stop_token_ids=config.stop_token_ids)
    _check_stop_ids(config, profile)
    sampling = resolve_sampling(config, tokenizer)
    engine, info = await _connect(config, sampling)
    if info.weight_version is None and earlier is not None:
        # Told only in answers: what earlier answers told is what the next ones must tell.
        info.weight_version = earlier.fingerprint.get("weight_version")
    try:
        for warning in info.warnings:
            say(warning)
        fingerprint = _fingerprint(config, tokenizer, template, info, sampling)
        return _open_run(
            config, archive, say, reader, tokenizer, template, profile, engine, info, sampling,
            fingerprint,
        )  # fmt: skip
    except BaseException:
        await engine.close()
        raise


async def _connect(config: CaptureConfig, sampling: Sampling) -> tuple[Engine, ServerInfo]:
    """The engine and who it says it is."""
    key = _api_key(config)
    engine: Engine | None = None
    try:
        engine = await connect(config.url, engine=config.engine, sampling=sampling, api_key=key)
        return engine, await engine.identify()
    except BaseException as error:
        if engine is not None:
            await engine.close()
        if isinstance(error, ServerUnreachable):
            raise ServerUnreachable(
                f"{error}. Nothing was sent and nothing was changed: start the server or "
                "correct --url, and run the same command again."
            ) from error
        raise


def _open_run(
    config: CaptureConfig,
    archive_other: bool,
    say: Callable[[str], None],
    reader: PromptReader,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    profile: Profile,
    engine: Engine,
    info: ServerInfo,
    sampling: Sampling,
    fingerprint: dict[str, Any],
) -> Session:
    out = Path(config.out)
    prepare_directory(out)
    lock = WriterLock(out)
    lock.acquire()
    try:
        manifest = Manifest.load(out) if is_run(out) else None
        if manifest is not None:
            try:
                manifest.refuse_other(out, fingerprint, config.max_new_tokens)
            except EyasError:
                if not archive_other:
                    raise
                say(f"the rows of another configuration were put aside: {archive(out)}")
                prepare_directory(out)
                manifest = None
        continued = manifest is not None
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
        manifest.profile = profile.as_dict(tokenizer)
        manifest.max_new_tokens = config.max_new_tokens
        source = Path(config.tokenizer)
        manifest.tokenizer = str(source.absolute()) if source.exists() else config.tokenizer
        manifest.servers = [_server_record(info)]
        manifest.versions = {name: _version(name) for name in _LIBRARIES}
        manifest.inputs = list(reader.files)
        remove_temporaries(out)
        manifest.save(out)
        write_bytes(out / "config.yaml", config_yaml(_resolved(config, sampling, template)))
        seal_leftovers(out)
        run = Run(out)
        return Session(
            config=config,
            reader=reader,
            tokenizer=tokenizer,
            template=template,
            profile=profile,
            engine=engine,
            info=info,
            sampling=sampling,
            context_length=info.context_length or tokenizer.model.context_length,
            concurrency=_concurrency(config, info, say),
            run=run,
            ledger=Ledger.load(out),
            writer=Writer(out, lock),
            lock=lock,
            continued=continued,
        )
    except BaseException:
        lock.release()
        raise


def _concurrency(config: CaptureConfig, info: ServerInfo, say: Callable[[str], None]) -> int:
    """Requests in flight: as asked, else what the server runs, as far as files may be open."""
    wanted = config.concurrency or min(info.slots or _DEFAULT_CONCURRENCY, 1024)
    try:
        import resource
    except ImportError:  # Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            say(f"only {soft} files may be open (ulimit -n), so fewer requests are in flight")
            return max(1, soft - _OTHER_FILES)
    return wanted


def resolve_sampling(config: CaptureConfig, tokenizer: Tokenizer) -> Sampling:
    """What the user says; else the model's generation config; else neutral values."""
    said = {**tokenizer.model.sampling}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = getattr(config, name)
        if value is not None:
            said[name] = value
    if "top_k" in said:  # 0 means all for transformers and llama.cpp, -1 for SGLang and vLLM
        said["top_k"] = int(said["top_k"]) or -1
    return Sampling(**said, stop_token_ids=tuple(config.stop_token_ids))  # type: ignore[arg-type]


def _resolved(
    config: CaptureConfig, sampling: Sampling, template: ChatTemplate | None
) -> CaptureConfig:
    """The configuration with what was decided for the user filled in."""
    values = sampling.as_dict()
    chosen = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    update: dict[str, Any] = {name: values[name] for name in chosen}
    if template is not None and template.shows_date:
        update["date"] = template.date
    return config.model_copy(update=update)


def _fingerprint(
    config: CaptureConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    info: ServerInfo,
    sampling: Sampling,
) -> dict[str, Any]:
    """What must be equal for rows to belong into one run."""
    return {
        "target": info.model,
        "weight_version": info.weight_version,
        "tokenizer_files": tokenizer.files_hash,
        "template": None if template is None else template.hash,
        "template_kwargs": config.template_kwargs,
        "system": config.system,
        "history": "served",
        "control_text": "allow",
        "date": template.date.isoformat() if template and template.shows_date else None,
        **sampling.as_dict(),
        "seed": config.seed,
    }


def _template_text(config: CaptureConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {config.chat_template}: {error}") from error


def _template(
    config: CaptureConfig,
    tokenizer: Tokenizer,
    earlier: Manifest | None,
    say: Callable[[str], None],
) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        say(
            f"tokenizer {tokenizer.source} has no chat template (chat_template.jinja or "
            "chat_template in tokenizer_config.json): only rows with ready-made prompt_ids can "
            "be captured; give one with --chat-template FILE"
        )
        return None
    date = config.date
    if date is None and earlier is not None:
        date = dt.date.fromisoformat(earlier.date)
    template = ChatTemplate.of(tokenizer, kwargs=config.template_kwargs, date=date)
    if ignored := template.ignored_kwargs:
        switches = sorted(template.reads & _USUAL_SWITCHES) or ["none of the usual ones"]
        say(
            f"the chat template never reads {', '.join(ignored)}, which changes nothing; "
            f"it reads {', '.join(switches)}"
        )
    return template


_USUAL_SWITCHES = frozenset(
    (
        "thinking", "enable_thinking", "thinking_mode", "thinking_budget", "reasoning_effort",
        "reasoning", "preserve_thinking", "clear_thinking", "truncate_history_thinking",
        "force_reasoning", "skip_reasoning", "skip_thinking", "date_string",
    )
)  # fmt: skip


def _check_stop_ids(config: CaptureConfig, profile: Profile) -> None:
    for index in config.stop_token_ids:
        if not 0 <= index < profile.vocab_size:
            raise ConfigError(
                f"--stop-token-id {index} is outside the vocabulary of {profile.vocab_size} ids"
            )


def _api_key(config: CaptureConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"--api-key-env {config.api_key_env}: no such environment variable, or it is empty"
        )
    return key


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
