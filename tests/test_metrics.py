"""What Prometheus is told: a page it can parse, counters that only rise."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from capturing import numbered, run_eyas, write_prompts
from eyas import errors
from eyas.demo.server import TARGET
from eyas.metrics import CONTENT_TYPE, METRICS, Metrics
from eyas.progress import Progress, ServerProgress
from fault_server import Answer, FaultServer

_SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? ([0-9.]+)$')
Samples = dict[tuple[str, str], float]


def parse(page: str) -> tuple[Samples, dict[str, str]]:
    """Samples by name and labels, and types by name; every line must be in order."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: list[str] = []
    assert page.endswith("\n")
    for line in page[:-1].split("\n"):
        if line.startswith("# HELP "):
            helped.append(line.split(" ")[2])
            assert helped.count(helped[-1]) == 1
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped[-1]
            assert kind in ("counter", "gauge")
            assert kind == "gauge" or name.endswith("_total")
            kinds[name] = kind
        else:
            found = _SAMPLE.match(line)
            assert found, line
            name, labels, value = found.groups()
            assert name == helped[-1]  # lines of one metric stand together
            assert name.startswith("eyas_")
            assert (name, labels or "") not in samples
            samples[name, labels or ""] = float(value)
    return samples, kinds


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=600) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        text: str = answer.read().decode()
        return text


def progress(new: int, **more: object) -> Progress:
    values: dict[str, object] = {
        "done": new, "new": new, "input": 100, "input_known": True, "prompt_tokens": 10 * new,
        "output_tokens": 100 * new, "cached_tokens": new, "in_flight": 8, "seconds": 2.5 * new,
        "finish_reasons": {"stop": new, "missing_closer": 1},
        "servers": [
            ServerProgress(url="http://a:1", slots=4, in_flight=4, queued=3, answered=new),
            ServerProgress(url="http://b:1", up=False, slots=4, answered=new),
        ],
        **more,
    }  # fmt: skip
    return Progress(**values)  # type: ignore[arg-type]


def test_the_figures() -> None:
    with Metrics("127.0.0.1", 0) as metrics:
        first, _ = parse(get(metrics.url))
        assert first["eyas_rows_durable_total", ""] == 0
        for new in range(21):
            metrics.update(progress(new))
        samples, kinds = parse(get(metrics.url))
    assert set(kinds) == set(METRICS)
    assert samples["eyas_rows_total", 'outcome="stop"'] == 20
    assert samples["eyas_rows_total", 'outcome="missing_closer"'] == 1
    assert samples["eyas_output_tokens_total", ""] == 2000
    assert samples["eyas_cached_prompt_tokens_total", ""] == 20
    assert samples["eyas_seconds_total", ""] == 50
    assert samples["eyas_input_rows", 'state="pending"'] == 80
    assert samples["eyas_server_up", 'server="http://a:1"'] == 1
    assert samples["eyas_server_up", 'server="http://b:1"'] == 0
    assert samples["eyas_server_queued", 'server="http://a:1"'] == 3
    assert ("eyas_server_queued", 'server="http://b:1"') not in samples
    assert samples["eyas_eta_seconds", ""] == pytest.approx(200)


def test_counters_only_rise() -> None:
    """Even where a server is told anew and counts from nothing."""
    with Metrics("127.0.0.1", 0) as metrics:
        before: Samples = {}
        for new in (0, 3, 9, 4, 0, 12):
            metrics.update(progress(new))
            samples, kinds = parse(metrics._page.text.decode())
            for which, value in before.items():
                if kinds.get(which[0]) == "counter":
                    assert samples[which] >= value
            before = samples


def test_hostile_labels() -> None:
    evil = 'a"} 5\neyas_x{b="\\\r\x1b\ud800'
    with Metrics("127.0.0.1", 0) as metrics:
        metrics.update(progress(1, finish_reasons={evil: 2}, servers=[ServerProgress(url=evil)]))
        samples, _ = parse(get(metrics.url))
    assert sum(name == "eyas_rows_total" for name, _ in samples) == 1
    assert not any(name == "eyas_x" for name, _ in samples)


def test_other_pages_and_clients_that_say_nothing() -> None:
    with Metrics("127.0.0.1", 0) as metrics:
        port = int(metrics.url.split(":")[2].split("/")[0])
        silent = socket.create_connection(("127.0.0.1", port))
        for path in ("/", "/metrics/x", "/etc/passwd"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(metrics.url.replace("/metrics", path))
            assert refused.value.code == 404
        assert get(f"{metrics.url}?x=1")
        silent.close()
    with pytest.raises(urllib.error.URLError):
        get(metrics.url)


@pytest.mark.parametrize("host", ["127.0.0.1", "256.1.1.1", "no host", "a" * 300])
def test_an_address_that_cannot_be_had(host: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=f"--metrics-port {port}"):
            Metrics(host, port)
    with pytest.raises(errors.ConfigError, match="--metrics-port 70000"):
        Metrics("127.0.0.1", 70_000)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_a_capture_serves_them_until_it_ends(tmp_path: Path) -> None:
    prompts, port = write_prompts(tmp_path / "p.jsonl", numbered(32)), free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    pages: list[Samples] = []

    def look(_: Answer, __: Answer) -> None:
        """The figures are looked at whenever a row is asked for."""
        pages.append(parse(get(url))[0])

    with FaultServer(policy=look, delay_s=0.4) as server:
        command = ["capture", str(prompts), "--no-probe", "--out", str(tmp_path / "run"), "--url",
                   server.url, "--tokenizer", str(TARGET), "--concurrency", "8",
                   "--metrics-port", str(port)]  # fmt: skip
        done = run_eyas(*command)
    assert done.returncode == 0
    assert f"metrics   {url}" in done.stderr
    rows = [page["eyas_rows_durable_total", ""] for page in pages]
    assert rows == sorted(rows)
    assert rows[-1] > rows[0]
    assert pages[-1]["eyas_server_up", f'server="{server.url}"'] == 1
    with pytest.raises(OSError):
        get(url)


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(1))
    for more in (["--metrics-port", "70000"], ["--metrics-port", "9471", "--metrics-host", "x y"]):
        shown = run_eyas("capture", str(prompts), "--out", str(tmp_path / "run"), "--url",
                         "http://127.0.0.1:9", "--tokenizer", str(TARGET), *more)  # fmt: skip
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
        assert "--metrics-port" in shown.stderr
        assert not (tmp_path / "run").exists()
