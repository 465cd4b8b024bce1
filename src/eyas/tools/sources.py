"""Where results come from that the recording does not have: a command, or a Python function.

Invariant: what fails is a sentence of its own (`NoResult`), whatever the command or function does;
a process that is not needed any more is ended with its children.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from eyas.errors import ConfigError

STOP, NEAREST, COMMAND = "stop", "nearest", "command:"

AT_ONCE = 16
"""Commands or functions that run at the same time."""
MOST_BYTES = 16 * 2**20
"""What a result may have."""


class NoResult(Exception):
    """A call got no result; the text says why."""


class Source(Protocol):
    """Something that gives a call its result."""

    async def result(self, request: dict[str, Any]) -> str:
        """The result of a call. Raises `NoResult`.

        ``request`` has name, arguments, call_id, conversation_id, sample, turn and metadata.
        """


def open_source(text: str, timeout_s: float) -> Source | None:
    """What ``--tool-results`` names; None for ``stop`` and ``nearest``.

    Raises:
        ConfigError: if it names nothing that there is.
    """
    if text in (STOP, NEAREST):
        return None
    if text.startswith(COMMAND):
        return _Command(text.removeprefix(COMMAND), timeout_s)
    if ":" in text:
        return _Function(text, timeout_s)
    raise ConfigError(
        f"--tool-results {text!r}: give stop, nearest, command:CMD or module:function"
    )


class _Command:
    """A process for each call: the request as JSON on its input, the result on its output."""

    def __init__(self, command: str, timeout_s: float) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--tool-results command:{command}: {error}") from error
        program = self._words[0] if self._words else ""
        if shutil.which(program) is None:
            raise ConfigError(
                f"--tool-results command:{command}: there is no program {program!r}; name one in "
                "PATH, or its whole path"
            )
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(AT_ONCE)

    async def result(self, request: dict[str, Any]) -> str:
        async with self._places:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise NoResult(f"{self._words[0]} cannot be started: {error}") from error
            try:
                async with asyncio.timeout(self._timeout_s):
                    said, complaint = await _talk(process, json.dumps(request).encode())
                    code = await process.wait()
            except TimeoutError:
                raise NoResult(
                    f"{self._words[0]} gave no result within {self._timeout_s:g} s (--tool-timeout)"
                ) from None
            finally:
                await _end(process)
        if code:
            last = complaint.decode("utf-8", "replace").strip()[-300:]
            raise NoResult(f"{self._words[0]} ended with exit code {code}: {last or 'no word'}")
        return _text(said, self._words[0])


class _Function:
    """A Python function, called with the request; it may be ``async``."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._function = load_function(path, "--tool-results")
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="eyas-tools")

    async def result(self, request: dict[str, Any]) -> str:
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout_s):
                    if inspect.iscoroutinefunction(self._function):
                        value = await self._function(request)
                    else:
                        loop = asyncio.get_running_loop()
                        value = await loop.run_in_executor(self._threads, self._function, request)
            except TimeoutError:
                raise NoResult(
                    f"{self._path} gave no result within {self._timeout_s:g} s (--tool-timeout)"
                ) from None
            except Exception as error:  # somebody else's code may raise anything
                said = f"{type(error).__name__}: {error}"[:300]
                raise NoResult(f"{self._path} raised {said}") from error
        if value is None:
            raise NoResult(f"{self._path} has no result for it")
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise NoResult(f"{self._path} gave what is neither text nor JSON: {error}") from error


def load_function(path: str, option: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; modules of the working directory are found.

    Raises:
        ConfigError: if there is none.
    """
    module_name, _, name = path.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise ConfigError(f"{option} {path}: module {module_name} has no {name!r}") from None
    except Exception as error:  # importing runs the module
        raise ConfigError(
            f"{option} {path}: {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}); it is looked for in {here} and in sys.path"
        ) from error
    if not callable(function):
        raise ConfigError(f"{option} {path}: {name!r} is no function")
    found: Callable[..., Any] = function
    return found


async def _talk(process: asyncio.subprocess.Process, request: bytes) -> tuple[bytes, bytes]:
    """Give a process its input and take what it says, a bounded part of each."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    stdin = process.stdin

    async def ask() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read
            stdin.write(request)
            await stdin.drain()
            stdin.close()

    _, said, complaint = await asyncio.gather(
        ask(), _all_of(process.stdout), _all_of(process.stderr)
    )
    return said, complaint


async def _all_of(stream: asyncio.StreamReader) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await stream.read(2**16):
        if size <= MOST_BYTES:  # what comes after is read and forgotten
            chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process and its children, if it still runs."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
    with suppress(ProcessLookupError):
        await process.wait()


def _text(said: bytes, program: str) -> str:
    if len(said) > MOST_BYTES:
        raise NoResult(f"{program} said more than {MOST_BYTES:,} bytes")
    try:
        text = said.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NoResult(f"{program} said what is no UTF-8 (byte {error.start})") from error
    return text.removesuffix("\n").removesuffix("\r")
