"""A target: who answers at an address, with the tokenizer, template and sampling to ask it with.

Invariant: an open target's server is of a kind and version that can be captured from, its
tokenizer's control strings are one id each, and nothing has been sent but questions of who it is.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.config import TargetConfig
from eyas.engines import Engine, Sampling, ServerInfo, connect, doubt_engine
from eyas.errors import ConfigError, ServerUnreachable
from eyas.modes import Modes, open_modes, parse_mix
from eyas.tokens import ChatTemplate, Profile, Tokenizer, load_tokenizer
from eyas.tokens.template_files import TemplateText, is_function, read_template_file
from eyas.tokens.template_function import TemplateFunction, load_function


@dataclass(slots=True)
class Target:
    """A model at an address and all that asking it needs."""

    config: TargetConfig
    tokenizer: Tokenizer
    modes: Modes
    """The sets of template switches that its rows are given."""
    profile: Profile
    engine: Engine
    info: ServerInfo
    sampling: Sampling

    @property
    def template(self) -> ChatTemplate | None:
        """The template under the switches of the first mode."""
        return self.modes.each[0].template

    @property
    def context_length(self) -> int | None:
        """Ids of prompt and output together, by the server or else by config.json."""
        return self.info.context_length or self.tokenizer.model.context_length

    async def close(self) -> None:
        """Close the connections."""
        await self.engine.close()


async def open_target(
    config: TargetConfig,
    *,
    say: Callable[[str], None],
    date: dt.date | None = None,
    weight_version: str | None = None,
) -> Target:
    """Load the files, then ask the server who it is.

    Args:
        config: which target.
        say: takes one line for the user.
        date: the day that an earlier capture began, for templates that print it.
        weight_version: what an earlier capture learnt from answers, where only they tell it.

    Raises:
        EyasError: with nothing sent and nothing changed.
    """
    tokenizer = load_tokenizer(
        config.tokenizer,
        chat_template=read_template(config.chat_template),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    template = _template(config, tokenizer, date, say)
    modes, profile = open_modes(
        tokenizer,
        template,
        parse_mix(config.template_kwargs),
        stop_token_ids=config.stop_token_ids,
        history=config.history,
    )
    _say_ignored(modes, say)
    _check_stop_ids(config, profile)
    sampling = resolve_sampling(config, tokenizer)
    engine, info = await _connect(config, sampling)
    if info.weight_version is None:
        info.weight_version = weight_version
    for warning in info.warnings:
        say(warning)
    return Target(config, tokenizer, modes, profile, engine, info, sampling)


def listed_urls(urls: Sequence[str]) -> list[str]:
    """Addresses as they are given, those in ``@FILE`` included (one a line, # for comments).

    Raises:
        ConfigError: a file that cannot be read, or no address at all.
    """
    found: dict[str, None] = {}
    for url in urls:
        if not url.startswith("@"):
            found[url] = None
            continue
        try:
            lines = Path(url[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--url {url}: {error}") from error
        for line in lines:
            if address := line.partition("#")[0].strip():
                found[address] = None
    if not found:
        raise ConfigError(f"--url {' '.join(urls)} names no server")
    return list(found)


async def _connect(config: TargetConfig, sampling: Sampling) -> tuple[Engine, ServerInfo]:
    """The first of the servers that answers, and who it says it is."""
    urls = listed_urls(config.url)
    for url in urls[:-1]:
        try:
            return await _connect_to(url, config, sampling)
        except ServerUnreachable:
            continue
    try:
        return await _connect_to(urls[-1], config, sampling)
    except ServerUnreachable as error:
        if len(urls) == 1:
            raise
        raise ServerUnreachable(
            f"none of the {len(urls)} servers answers; the last: {error}"
        ) from error


async def _connect_to(
    url: str, config: TargetConfig, sampling: Sampling
) -> tuple[Engine, ServerInfo]:
    key = read_api_key(config.api_key_env)
    engine: Engine | None = None
    try:
        engine = await connect(url, engine=config.engine, sampling=sampling, api_key=key)
        info = await engine.identify()
        info.doubt = await doubt_engine(url, config.engine, key)
        return engine, info
    except BaseException as error:
        if engine is not None:
            await engine.close()
        if isinstance(error, ServerUnreachable):
            raise ServerUnreachable(
                f"{error}. Nothing was sent and nothing was changed: start the server or "
                "correct --url, and run the same command again."
            ) from error
        raise


def resolve_sampling(config: TargetConfig, tokenizer: Tokenizer) -> Sampling:
    """What the user says; else the model's generation config; else neutral values."""
    said = {**tokenizer.model.sampling}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = getattr(config, name)
        if value is not None:
            said[name] = value
    if "top_k" in said:  # 0 means all for transformers and llama.cpp, -1 for SGLang and vLLM
        said["top_k"] = int(said["top_k"]) or -1
    return Sampling(**said, stop_token_ids=tuple(config.stop_token_ids))  # type: ignore[arg-type]


def read_template(given: str | None) -> TemplateText | TemplateFunction | None:
    """What ``--chat-template`` names: a file, or a function; None where nothing is given.

    Raises:
        TokenizerError: if it cannot be read or loaded, or holds no template.
    """
    if given is None:
        return None
    return load_function(given) if is_function(given) else read_template_file(Path(given))


def _template(
    config: TargetConfig,
    tokenizer: Tokenizer,
    date: dt.date | None,
    say: Callable[[str], None],
) -> ChatTemplate | None:
    if not tokenizer.makes_prompts:
        say(f"{tokenizer.no_template} Rows of messages will be rejected.")
        return None
    return ChatTemplate.of(tokenizer, date=config.date or date)


def _say_ignored(modes: Modes, say: Callable[[str], None]) -> None:
    """Name switches that the template never reads."""
    template = modes.each[0].template
    if template is None:
        return
    ignored = sorted({name for m in modes.each if m.template for name in m.template.ignored_kwargs})
    if ignored:
        switches = sorted(template.reads & _USUAL_SWITCHES) or ["none of the usual ones"]
        say(
            f"the chat template never reads {', '.join(ignored)}, which changes nothing; "
            f"it reads {', '.join(switches)}"
        )


_USUAL_SWITCHES = frozenset(
    (
        "thinking", "enable_thinking", "thinking_mode", "thinking_budget", "reasoning_effort",
        "reasoning", "preserve_thinking", "clear_thinking", "truncate_history_thinking",
        "force_reasoning", "skip_reasoning", "skip_thinking", "date_string",
    )
)  # fmt: skip


def _check_stop_ids(config: TargetConfig, profile: Profile) -> None:
    for index in config.stop_token_ids:
        if not 0 <= index < profile.vocab_size:
            raise ConfigError(
                f"--stop-token-id {index} is outside the vocabulary of {profile.vocab_size} ids"
            )


def read_api_key(variable: str | None) -> str | None:
    """The key in the environment variable that ``--api-key-env`` names.

    Raises:
        ConfigError: if it is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-env {variable}: no such environment variable, or it is empty")
    return key
