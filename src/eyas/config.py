"""The configuration of a capture: one model for the command line, YAML files and Python.

Invariant: what is saved in a run as config.yaml gives the same capture again; it holds no key.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from eyas.errors import ConfigError
from eyas.modes import parse_mix
from eyas.shard import Shard
from eyas.tokens.template_files import is_function

_Config = TypeVar("_Config", bound="TargetConfig")


class TargetConfig(BaseModel):
    """Which target is asked, and how; what `eyas probe` can be told. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid")

    url: list[str] = Field(min_length=1)
    """The servers' addresses; ``@FILE`` for a file of them, which may change meanwhile."""
    tokenizer: str
    """A directory with the target's tokenizer files, a .gguf file, or a hub id."""
    engine: Literal["auto", "sglang", "vllm", "llama_cpp"] = "auto"

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    """Sampling. Where nothing is said, the model's generation config decides."""
    max_new_tokens: int = Field(16384, ge=1)
    """The token budget of one answer, reasoning included; clamped to the context."""
    stop_token_ids: list[int] = []
    """Ids that end generation besides the model's own."""

    system: str | None = None
    """A system message for conversations that have none."""
    template_kwargs: dict[str, Any] | list[dict[str, Any]] = {}
    """The chat template's switches, such as ``{"thinking": true}``; or a list of such, each with a
    ``weight``, of which each conversation's sample is given one."""
    history: Literal["served", "full", "tokens"] = "served"
    """What the target is shown of its own earlier turns: what serving shows it, the reasoning as
    well, or the very ids."""
    chat_template: str | None = None
    """A template file that replaces the model's own, or ``module:function`` that makes prompts."""
    trust_remote_code: bool = False
    """Run the code beside the tokenizer, for models that make their prompts in Python."""
    revision: str | None = None
    """Which commit, branch or tag of a hub id; with `trust_remote_code` a commit."""
    control_text: Literal["allow", "escape", "refuse"] = "allow"
    """What becomes of control strings in the text of messages and tools: control ids, as serving
    makes of them; plain text; or the row is rejected."""
    date: dt.date | None = None
    """What templates that print today's date are given; the day on which the run began."""

    api_key_env: str | None = None
    """The name of the environment variable that holds the API key."""
    logprobs: bool = False
    """Store the log-probabilities of the generated ids."""
    on_missing_closer: Literal["reject", "keep"] = "reject"
    """What becomes of a turn that ended inside its reasoning."""
    tries: int = Field(4, ge=1)
    """How often a request is sent before its row is rejected."""
    give_up_after: float = Field(120.0, ge=0)
    """Seconds without any answer from the server before the capture ends, rows pending."""

    @field_validator("url", mode="before")
    @classmethod
    def _urls(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("template_kwargs", mode="before")
    @classmethod
    def _switches(cls, value: Any) -> Any:
        parse_mix(value)
        return value

    @field_validator("date", mode="before")
    @classmethod
    def _date(cls, value: Any) -> Any:
        return dt.date.fromisoformat(value) if isinstance(value, str) else value

    @property
    def several_servers(self) -> bool:
        """Whether more than one server is named, or a file of them, which may grow."""
        return len(self.url) > 1 or self.url[0].startswith("@")


class CaptureConfig(TargetConfig):
    """Everything that `eyas capture` can be told. Unknown names are refused."""

    prompts: list[str] = Field(min_length=1)
    """Files, globs or ``-`` for standard input."""
    out: str
    """The run directory."""
    n: int = Field(1, ge=1)
    """Independent samples of each conversation."""
    seed: int = 0
    """The base seed; each request's own seed is a hash of it and the row's key."""
    column: str | None = None
    """The input column that holds the prompt."""
    limit: int | None = Field(None, ge=1)
    """Take only the first conversations of the input."""
    order: str | None = None
    """``input``, ``longest`` or an earlier run, whose longest conversations are sent first."""
    shard: str | None = None
    """Take only one of N parts of it, such as ``3/8``; which part depends on content alone."""
    concurrency: int | None = Field(None, ge=1, le=65536)
    """Requests in flight at each server; where None (or ``auto``), as many as keep it full."""
    reject: list[str] = []
    """Marks that refuse a row."""
    on_length: Literal["keep", "reject", "continue"] = "keep"
    """What becomes of an answer that its budget cut."""
    continue_to: int | None = Field(None, ge=1)
    """The budget up to which a cut answer is continued from its exact ids."""
    tool_results: str = "stop"
    """What becomes of a call without a recorded result: ``stop``, ``nearest``, ``command:CMD`` or
    ``module:function``."""
    tool_timeout: float = Field(60.0, gt=0)
    """Seconds that a command or function has for one result."""
    tool_rounds: int = Field(32, ge=1)
    """The most answers in a row whose calls are answered."""

    @field_validator("concurrency", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value == "auto":
            return None
        if not value.isdecimal():
            raise ValueError("it is auto or a number from 1 to 65536")
        return int(value)

    @field_validator("order")
    @classmethod
    def _order(cls, value: str | None) -> str | None:
        from eyas.order import check_order

        return None if value is None else check_order(value)

    @field_validator("shard", mode="before")
    @classmethod
    def _shard(cls, value: Any) -> Any:
        return None if value is None else str(Shard.parse(str(value)))

    @model_validator(mode="after")
    def _continues(self) -> Self:
        if self.on_length == "continue" and (self.continue_to or 0) <= self.max_new_tokens:
            raise ValueError(
                "--on-length continue needs --continue-to N, greater than --max-new-tokens "
                f"{self.max_new_tokens}"
            )
        return self

    @field_validator("reject")
    @classmethod
    def _known_marks(cls, value: list[str]) -> list[str]:
        from eyas.checks import MARKS

        for name in value:
            if name not in MARKS:
                raise ValueError(f"no mark is called {name!r}; there are {', '.join(MARKS)}")
        return value


def make_config(
    given: dict[str, Any], file: str | Path | None = None, *, trusted: bool = False
) -> CaptureConfig:
    """A capture's configuration from a YAML file and the values given beside it, which win.

    Args:
        given: what was said on the command line.
        file: the YAML file.
        trusted: whether code that the file names may be run.

    Raises:
        ConfigError: naming the field, the rule and the value.
    """
    read = read_config_file(Path(file)) if file else {}
    if not trusted:
        _refuse_code(read, given, file)
    return _validated(CaptureConfig, {**read, **given}, given, file)


def make_target_config(given: dict[str, Any], file: str | Path | None = None) -> TargetConfig:
    """A target's configuration likewise; what concerns captures alone is left out of the file.

    Raises:
        ConfigError: naming the field, the rule and the value.
    """
    read = read_config_file(Path(file)) if file else {}
    _refuse_code(read, given, file)
    only_capture = set(CaptureConfig.model_fields) - set(TargetConfig.model_fields)
    values = {**{k: v for k, v in read.items() if k not in only_capture}, **given}
    return _validated(TargetConfig, values, given, file)


def _refuse_code(read: dict[str, Any], given: dict[str, Any], file: str | Path | None) -> None:
    """Raise ConfigError where only a file says that code is to be run: a file may be anyone's."""
    function = str(read.get("chat_template", ""))
    if read.get("trust_remote_code") and not given.get("trust_remote_code"):
        what, again = "trust_remote_code", "--trust-remote-code"
    elif is_function(function) and "chat_template" not in given:
        what, again = f"chat_template: {function}", f"--chat-template {function}"
    else:
        return
    raise ConfigError(
        f"{file} asks for code to be run ({what}), for which a file alone is not trusted: say "
        f"{again} on the command line as well, if you trust it"
    )


_REQUIRED = {"prompts": "PROMPTS", "out": "--out", "url": "--url", "tokenizer": "--tokenizer"}


def _validated(
    kind: type[_Config], values: dict[str, Any], given: dict[str, Any], file: str | Path | None
) -> _Config:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        where = f" in {file}" if file and first["loc"] and first["loc"][0] not in given else ""
        missing = {str(e["loc"][0]) for e in error.errors() if e["type"] == "missing"}
        if missing:
            asked = [option for field, option in _REQUIRED.items() if field in missing]
            be = "are" if len(asked) > 1 else "is"
            raise ConfigError(f"{', '.join(asked)} {be} missing; see --help") from error
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(kind.model_fields))
            raise ConfigError(f"unknown name {name!r}{where}; known are {known}") from error
        said = first["msg"].removeprefix("Value error, ")
        if not name:  # a rule over several fields names them itself
            raise ConfigError(said) from error
        raise ConfigError(f"{name}{where}: {said} (it is {str(first['input'])[:80]!r})") from error


def read_config_file(path: Path) -> dict[str, Any]:
    """The values of a YAML file.

    Raises:
        ConfigError: if it cannot be read or is no mapping.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"--config {path} must hold names and values, not a {type(value).__name__}"
        )
    return {str(name): item for name, item in value.items() if item is not None}


def config_yaml(config: CaptureConfig) -> bytes:
    """The configuration as it is saved in the run: paths absolute, no credentials."""
    from eyas.engines.http import clean_url

    values = config.model_dump(mode="json", exclude_none=True)
    # An address may hold a password.
    urls = [f"@{_absolute(u[1:])}" if u.startswith("@") else clean_url(u) for u in config.url]
    values["url"] = urls[0] if len(urls) == 1 else urls
    values["prompts"] = [p if p == "-" else _absolute(p) for p in config.prompts]
    values["out"] = _absolute(values["out"])
    if config.order is not None and config.order not in ("input", "longest"):
        values["order"] = _absolute(config.order)
    if config.chat_template is not None:
        place, colon, function = config.chat_template.rpartition(":")
        if not is_function(config.chat_template):
            values["chat_template"] = _absolute(config.chat_template)
        elif place.endswith(".py"):
            values["chat_template"] = f"{_absolute(place)}{colon}{function}"
    if Path(config.tokenizer).exists():
        values["tokenizer"] = _absolute(config.tokenizer)
    values = {**{name: values[name] for name in _REQUIRED}, **values}
    head = "# The resolved configuration of this run. To do the same again:\n"
    head += "#   eyas capture --config THIS_FILE [--out ANOTHER_RUN]\n"
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return (head + text).encode()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
