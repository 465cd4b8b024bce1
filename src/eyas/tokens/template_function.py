"""Prompts made by Python: a function that the user names, or the model's own tokenizer code.

Invariants: no code is loaded that was not asked for by name; what it is made of is hashed; what
it raises or gives back wrongly refuses one conversation and ends nothing; it gets copies, so it
changes no message that is stored.
"""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Undefined

from eyas.conversation import Message
from eyas.errors import TemplateRefusal, TokenizerError
from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.template_files import FUNCTION

if TYPE_CHECKING:
    from eyas.tokens.tokenizer import Tokenizer

_GENERATION_PROMPT = "add_generation_prompt"


@dataclass(frozen=True, slots=True)
class TemplateFunction:
    """A function that makes a prompt, and what it is made of."""

    name: str
    """How it is named in messages: ``module:function``."""
    call: Callable[[list[Message], list[dict[str, Any]] | None, dict[str, Any], bool], Any]
    """Messages, tools, switches, and whether a generation prompt is wanted, to text or ids."""
    source: str
    """Its text, in which switches are looked for."""
    hash: str
    """SHA-256 of what it is made of."""
    prompts_only: bool
    """Whether it cannot do without a generation prompt."""
    shows_date: bool = False
    """Whether it asks for the day by ``strftime_now``."""


class FunctionTemplate(ChatTemplate):
    """A template function with its switches, for one run."""

    by_function = True

    def __init__(
        self,
        function: TemplateFunction,
        tokenizer: Tokenizer,
        *,
        kwargs: Mapping[str, Any] | None = None,
        date: dt.date | None = None,
    ) -> None:
        """Wrap a function.

        Args:
            function: what makes the prompts.
            tokenizer: the target's, for functions that give ids.
            kwargs: the switches that it is given.
            date: what ``strftime_now`` shows where the function asks for it.
        """
        self.source, self.tool_source = function.source, None
        self.kwargs = dict(kwargs or {})
        self.date = date or dt.datetime.now().date()
        self.reads = frozenset(re.findall(r"[\"'](\w+)[\"']", function.source))
        self._function = function
        self._tokenizer = tokenizer
        self._one_at_a_time = threading.Lock()

    @property
    def hash(self) -> str:
        return self._function.hash

    @property
    def shows_date(self) -> bool:
        return self._function.shows_date

    @property
    def ignored_kwargs(self) -> list[str]:
        """None: what a function reads cannot be seen from outside."""
        return []

    def under(self, kwargs: Mapping[str, Any]) -> FunctionTemplate:
        return FunctionTemplate(self._function, self._tokenizer, kwargs=kwargs, date=self.date)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        return self._made(messages, tools, True, kwargs)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        tools = kwargs.pop("tools", None)
        made = self._made(messages, tools, add_generation_prompt, kwargs)
        return made if isinstance(made, str) else self._tokenizer.decode(made)

    render_as_given = render

    def answer_spans(self, messages: Sequence[Message], **kwargs: Any) -> tuple[str, ...]:
        del messages, kwargs
        return ()

    def _made(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        more: dict[str, Any],
    ) -> str | list[int]:
        function = self._function
        if not add_generation_prompt and function.prompts_only:
            raise TemplateRefusal(f"{function.name} makes prompts only")
        switches = {**self.kwargs, **more}
        switches = {k: v for k, v in switches.items() if not isinstance(v, Undefined)}
        if function.shows_date:
            switches.setdefault("strftime_now", dt.datetime.combine(self.date, dt.time()).strftime)
        else:
            switches.pop("strftime_now", None)
        try:
            with self._one_at_a_time:
                made = function.call(
                    copy.deepcopy(list(messages)), copy.deepcopy(tools), switches,
                    add_generation_prompt,
                )  # fmt: skip
        except Exception as error:
            said = str(error) or "no words"
            raise TemplateRefusal(
                f"{function.name} refuses: {type(error).__name__}: {said}"
            ) from error
        return self._checked(made)

    def _checked(self, made: Any) -> str | list[int]:
        """Text or ids; anything else refuses the conversation."""
        name, size = self._function.name, self._tokenizer.size
        if isinstance(made, str):
            try:
                made.encode()
            except UnicodeEncodeError as error:
                raise TemplateRefusal(f"{name} gives text that is no UTF-8: {error}") from error
            return made
        if isinstance(made, Mapping):
            made = made.get("input_ids")
        if hasattr(made, "tolist"):
            made = made.tolist()
        ids = list(made) if isinstance(made, list | tuple) else None
        if ids and len(ids) == 1 and isinstance(ids[0], list):
            ids = ids[0]
        if not ids:
            raise TemplateRefusal(
                f"{name} should give text or ids; it gives {type(made).__name__} {str(made)[:60]!r}"
            )
        for index in ids:
            if type(index) is not int or not 0 <= index < size:
                raise TemplateRefusal(
                    f"{name} gives {index!r} as an id; the tokenizer's end at {size - 1}"
                )
        return ids


def load_function(spec: str) -> TemplateFunction:
    """The function that ``module:function`` or ``file.py:function`` names.

    It is called with messages, tools and the template's switches and gives text or ids; one that
    has a parameter ``add_generation_prompt`` is told by it whether the prompt is for an answer.

    Raises:
        TokenizerError: saying why it cannot be loaded or used.
    """
    found = FUNCTION.fullmatch(spec)
    assert found is not None
    place, name = found["place"], found["name"]
    module = _module(place, spec)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        there = ", ".join(n for n in vars(module) if not n.startswith("_"))[:200] or "nothing"
        raise TokenizerError(f"--chat-template {spec}: no such function; {place} has {there}")
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        raise TokenizerError(
            f"--chat-template {spec}: {place} has no source file, so it could not be told whether "
            "a run is continued with the same function"
        )
    code = [path.read_bytes() for path in (Path(file), *_beside(module, Path(file)))]
    takes_prompt = _takes_prompt(function, spec)

    def call(
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        switches: dict[str, Any],
        add_generation_prompt: bool,
    ) -> Any:
        more = {_GENERATION_PROMPT: add_generation_prompt} if takes_prompt else {}
        return function(messages, tools, switches, **more)

    return TemplateFunction(
        name=f"{Path(place).name}:{name}",
        call=call,
        source="\n".join(text.decode("utf-8", "replace") for text in code),
        hash=hashlib.sha256(b"\0".join([name.encode(), *code])).hexdigest(),
        prompts_only=not takes_prompt,
    )


def _module(place: str, spec: str) -> Any:
    try:
        if place.endswith(".py"):
            path = Path(place)
            if not path.is_file():
                raise TokenizerError(f"--chat-template {spec}: there is no file {place}")
            _find_in(path.parent)
            known = importlib.util.spec_from_file_location(path.stem, path)
            assert known is not None and known.loader is not None
            module = importlib.util.module_from_spec(known)
            known.loader.exec_module(module)
            return module
        _find_in(Path.cwd())
        return importlib.import_module(place)
    except TokenizerError:
        raise
    except Exception as error:  # a module may raise anything when it is imported
        raise TokenizerError(
            f"--chat-template {spec}: {place} cannot be imported "
            f"({type(error).__name__}: {error}); run where it can be, or give file.py:function"
        ) from error


def _find_in(directory: Path) -> None:
    """Let modules be found in a directory, as if Python had been started there."""
    place = str(directory.absolute())
    if place not in sys.path:
        sys.path.append(place)


def _beside(module: Any, file: Path) -> list[Path]:
    """The files in the module's own directory of what it imported, in order."""
    found: set[Path] = set()
    for value in vars(module).values():
        imported = value if inspect.ismodule(value) else inspect.getmodule(value)
        place = getattr(imported, "__file__", None)
        if place is not None:
            found.add(Path(place).resolve())
    file = file.resolve()
    return sorted(
        path for path in found if path.parent == file.parent and path != file and path.is_file()
    )


def _takes_prompt(function: Any, spec: str) -> bool:
    """Whether a function has a parameter for the generation prompt.

    Raises:
        TokenizerError: if it cannot be called with three arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins tell none
        return False
    takes_prompt = _GENERATION_PROMPT in signature.parameters
    try:
        signature.bind([], None, {}, **({_GENERATION_PROMPT: True} if takes_prompt else {}))
    except TypeError as error:
        raise TokenizerError(
            f"--chat-template {spec}: it is called as function(messages, tools, template_kwargs), "
            f"which {signature} does not take ({error})"
        ) from error
    return takes_prompt


__all__ = ["FunctionTemplate", "TemplateFunction", "load_function"]
