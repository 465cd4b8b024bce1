"""Real engines on this machine: one server at a time, on 127.0.0.1 and a free port.

Invariant: a server ends with its ``with`` block, by its own process group and no other, and on
Linux also with a suite that is killed; one that does not come up says why, with the end of its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eyas.demo import server as demo

HERE = Path(__file__).parent
SUPPORT = HERE / "support"
SCRIPTS = HERE.parents[1] / "scripts"
START_SECONDS = 300.0
"""Half a minute alone; a machine that does much else takes longer."""
STOP_SECONDS = 20.0
CONTEXT = 2048
LOG_LINES = 25
PR_SET_PDEATHSIG = 1


class NotServed(RuntimeError):
    """A server did not come up, or went away."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    engine: str
    url: str
    model: Path
    """The directory of the checkpoint, with the tokenizer and the template."""
    name: str = "demo"
    """Which of the tests' models it is."""
    parser: str | None = None


@dataclass(frozen=True, slots=True)
class SetUp:
    """One way to start a server."""

    engine: str
    model: str = "demo"
    """``demo`` (the template writes the opener), ``own-opener`` (the model does), ``smollm2``."""
    parser: str | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        return "-".join(filter(None, [self.engine, self.model, self.parser]))


def environments() -> Path | None:
    """Where `make test-engines` installed the engines."""
    named = os.environ.get("EYAS_ENGINES")
    return Path(named).resolve() if named else None


def missing(engine: str) -> str | None:
    """Why an engine cannot be started here, or None."""
    if engine == "llama_cpp":
        return None  # it is one of the suite's own packages
    root = environments()
    if root is None:
        return f"EYAS_ENGINES names no directory with {engine}; make test-engines makes it"
    if (root / f"{engine}.failed").is_file():
        return f"{engine} could not be installed: {(root / f'{engine}.failed').read_text()}"
    return None if (root / engine / ".ready").is_file() else f"{engine} is not installed in {root}"


def python(engine: str) -> str:
    """The interpreter of an engine's environment."""
    root = environments()
    assert root is not None, "ask missing() first"
    return str(root / engine / "bin" / "python")


def environment(engine: str) -> dict[str, str]:
    """What a process of an engine's environment needs besides its interpreter."""
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if engine == "vllm":
        return {**offline, **quiet, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**offline, **quiet, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SUPPORT)}


@contextlib.contextmanager
def serve(
    engine: str, model: Path, *, dtype: str = "bfloat16", parser: str | None = None
) -> Iterator[Served]:
    """Serve the checkpoint ``model`` with an engine, if asked so with a reasoning parser."""
    if engine == "llama_cpp":
        assert parser is None
        with demo.serve(model / "model.gguf", context=CONTEXT, parallel=4) as server:
            yield Served(engine, server.url, model)
        return
    port = free_port()
    command = [python(engine), *COMMANDS[engine](model, port, dtype)]
    if parser is not None:
        command += ["--reasoning-parser", parser]
    with process(command, environment(engine)) as (child, log):
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(child, port, log)
        yield Served(engine, url, model)
        if child.poll() is not None:
            raise NotServed(f"{engine} ended by itself ({child.returncode})\n{tail(log)}")


def sglang_command(model: Path, port: int, dtype: str) -> list[str]:
    return [
        "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
        # It would take most of the memory, and a core while there is nothing to do.
        "--max-total-tokens", "16384", "--sleep-on-idle",
    ]  # fmt: skip


def vllm_command(model: Path, port: int, dtype: str) -> list[str]:
    # `vllm serve` looks for a distribution by another name than that of the build for CPUs.
    return [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
        "--max-model-len", str(CONTEXT), "--max-num-seqs", "16", "--enforce-eager",
    ]  # fmt: skip


COMMANDS = {"sglang": sglang_command, "vllm": vllm_command}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def process(
    command: list[str], extra: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A child in a process group of its own, which ends with the block; and its log."""
    descriptor, name = tempfile.mkstemp(prefix="eyas-engine-", suffix=".log")
    log = Path(name)
    with open(descriptor, "wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env={**inherited(), **extra}, start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
    try:
        yield child, log
    finally:
        stop(child)
        log.unlink(missing_ok=True)


def end_with_parent() -> None:
    """Run in the child: Linux sends it SIGTERM when the suite's process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(child: subprocess.Popen[bytes]) -> None:
    """End this child and the workers it started, gently first."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    # The group was made for it and holds nothing else; workers may outlive their parent.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def wait_until_healthy(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(port):
        if child.poll() is not None:
            raise NotServed(f"the server ended by itself ({child.returncode})\n{tail(log)}")
        if time.monotonic() > deadline:
            raise NotServed(f"the server was not ready in {START_SECONDS:.0f} s\n{tail(log)}")
        time.sleep(0.2)


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def run_script(engine: str, script: str, *arguments: str) -> None:
    """Run one of this directory's scripts in an engine's environment.

    Raises:
        NotServed: it failed.
    """
    env = environment(engine)
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(SCRIPTS)])
    del env["OMP_NUM_THREADS"]
    done = subprocess.run(
        [python(engine), str(HERE / script), *arguments],
        capture_output=True, text=True, env={**inherited(), **env},
    )  # fmt: skip
    if done.returncode:
        raise NotServed(f"{script} failed\n{(done.stdout + done.stderr)[-3000:]}")


def inherited() -> dict[str, str]:
    """The environment, without the suite's own variables, which are not the engines'."""
    own = ("PYTHON", "COV_", "COVERAGE", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}
