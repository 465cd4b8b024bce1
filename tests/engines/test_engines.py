"""Engines: a real llama.cpp server, recognising who answers, addresses and their secrets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capturing import config_for, numbered, write_prompts
from eyas import CaptureConfig, EyasError, Run, Summary, capture
from eyas.demo.server import TARGET, serve
from eyas.engines import Request, Sampling, clean_url, connect, doubt_engine
from eyas.engines.llama_cpp import LlamaCpp, read_answer
from eyas.errors import RequestRefused, ServerUnreachable
from fault_server import Fault, FaultServer, Target


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    with serve(TARGET / "model.gguf", parallel=2, context=512) as server:
        yield server.url


def test_llama_cpp_gives_ids_for_ids(llama: str) -> None:
    async def ask() -> None:
        engine = await connect(llama, sampling=Sampling(temperature=0.0))
        assert engine.name == "llama_cpp"
        info = await engine.identify()
        assert (info.context_length, info.slots) == (512, 2)
        tokenizer = Target().tokenizer
        prompt = tokenizer.encode("<|user|>What is 2+2?<|end|><|assistant|><think>")
        request = Request(prompt_ids=prompt, max_new_tokens=100, seed=1, logprobs=True)
        first, second = await engine.generate(request), await engine.generate(request)
        assert first.output_ids == second.output_ids
        assert (first.finish_reason, first.output_ids[-1]) == ("stop", 506)
        assert first.prompt_tokens == len(prompt)
        assert first.completion_tokens == len(first.output_ids)
        assert first.logprob_ids == first.output_ids
        assert first.logprobs is not None
        assert all(value <= 0 for value in first.logprobs)
        assert tokenizer.decode(first.output_ids).endswith("</think>4<|end|>")
        cut = await engine.generate(Request(prompt_ids=prompt, max_new_tokens=3, seed=1))
        assert (cut.finish_reason, cut.output_ids) == ("length", first.output_ids[:3])
        with pytest.raises(RequestRefused):
            await engine.generate(Request(prompt_ids=[5] * 600, max_new_tokens=3, seed=1))
        with pytest.raises(RequestRefused):
            await engine.generate(Request(prompt_ids=[99999], max_new_tokens=3, seed=1))
        await engine.close()

    asyncio.run(ask())


def test_a_capture_from_llama_cpp_with_log_probabilities(llama: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(6))
    config = CaptureConfig(
        prompts=[str(prompts)],
        out=str(tmp_path / "run"),
        url=llama,
        tokenizer=str(TARGET),
        max_new_tokens=400,
        logprobs=True,
        repetition_penalty=1.1,
    )
    summary = capture(config)
    assert summary.input == 6
    assert summary.done + summary.rejected == 6
    for trace in Run(tmp_path / "run").traces():
        assert trace.logprobs is not None
        assert len(trace.logprobs) == len(trace.output_ids)
        assert trace.server == llama


def test_llama_cpp_has_no_stop_ids_of_the_requests_own() -> None:
    with pytest.raises(EyasError, match="--stop-token-id 7"):
        LlamaCpp("http://127.0.0.1:1", sampling=Sampling(stop_token_ids=(7,)))


def test_a_prompt_that_llama_cpp_cut_is_known() -> None:
    answer = {"tokens": [1], "stop_type": "limit", "truncated": True}
    assert "cut the prompt" in (read_answer(answer).refusal or "")
    assert read_answer({"tokens": [1], "stop_type": "word"}).finish_reason == "word"


def test_llama_cpp_repeats_the_seed_of_a_request(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tells the answer of another request from its own."""

    async def ask() -> list[str | None]:
        engine = await connect(llama)
        assert isinstance(engine, LlamaCpp)
        prompt = Target().tokenizer.encode("<|user|>What is 2+2?<|end|><|assistant|><think>")
        own = await engine.generate(Request(prompt, 5, 2**31 - 1))
        other = await engine._http.post(
            "/completion", {**engine._params, "prompt": prompt, "n_predict": 5, "seed": 9}
        )

        async def exchanged(path: str, body: object) -> object:
            return other

        monkeypatch.setattr(engine._http, "post", exchanged)
        swapped = await engine.generate(Request(prompt, 5, 8))
        await engine.close()
        return [own.refusal, swapped.refusal]

    own, swapped = asyncio.run(ask())
    assert own is None
    assert "seed 9, not 8" in (swapped or "")


@pytest.mark.parametrize("info", [None, {"model_path": "m"}], ids=["bare", "told"])
def test_sglang_is_recognised(info: dict[str, str] | None) -> None:
    with FaultServer(info=info) as server:
        engine = asyncio.run(connect(server.url))
    assert engine.name == "sglang"


def test_an_engine_that_was_named_wrongly_is_doubted() -> None:
    """By the server's own pages alone: one that has none may be anything."""
    for info, doubted in (({"model_path": "m"}, True), (None, False)):
        with FaultServer(info=info) as server:
            said = asyncio.run(doubt_engine(server.url, "vllm"))
            assert (said is not None) is doubted
            assert asyncio.run(doubt_engine(server.url, "sglang")) is None
            assert asyncio.run(doubt_engine(server.url, "auto")) is None
        if said is not None:
            assert said == (
                f"--engine vllm was given, but what answers at {server.url} looks like sglang; "
                "without --engine it is recognised by itself"
            )
    assert asyncio.run(doubt_engine("http://127.0.0.1:9", "vllm")) is None


def test_a_server_of_another_kind_is_named(tmp_path: Path) -> None:
    with FaultServer(policy=lambda _, __: Fault(status=404)) as server:
        with pytest.raises(EyasError, match="neither as SGLang"):
            asyncio.run(connect(server.url))
        with pytest.raises(EyasError, match="not known"):
            asyncio.run(connect(server.url, engine="ollama"))
    with pytest.raises(ServerUnreachable):
        asyncio.run(connect("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        ("localhost:30000", "http://localhost:30000"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/generate", "http://h:1"),
        ("https://user:pass@h/base/?key=1", "https://h/base"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_addresses(given: str, clean: str) -> None:
    assert clean_url(given) == clean


@pytest.mark.parametrize("given", ["ftp://h", "http://", "http://h:port", ""])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(EyasError, match="address"):
        clean_url(given)


def capture_in_background(server: FaultServer, config: CaptureConfig) -> Callable[[], Summary]:
    """Start a capture, wait until the server has seen some requests; returns what joins it."""
    done: list[Summary] = []
    thread = threading.Thread(target=lambda: done.append(capture(config)))
    thread.start()
    while len(server.requests) < 8:
        assert thread.is_alive()
        thread.join(0.005)

    def join() -> Summary:
        thread.join(600)
        return done[0]

    return join


def test_a_server_that_comes_back_costs_no_row(tmp_path: Path) -> None:
    """The port is closed for a while in the middle; nothing is lost or rejected."""
    target = Target()
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(30))
    with FaultServer(target, delay_s=0.02) as first:
        config = config_for(first, prompts, tmp_path / "run", concurrency=2, tries=50)
        join = capture_in_background(first, config)
        port = int(first.url.rsplit(":", 1)[1])
    with FaultServer(target, port=port):
        summary = join()
    assert (summary.done, summary.rejected, summary.pending) == (30, 0, 0)


def test_a_server_that_stays_away_leaves_the_rest_pending(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(50))
    with FaultServer(delay_s=0.05) as server:
        config = config_for(
            server, prompts, tmp_path / "run", concurrency=2, give_up_after=0.5, tries=50
        )
        join = capture_in_background(server, config)
    summary = join()
    assert summary.rejected == 0
    assert summary.done + summary.pending == 50
    assert summary.exit_code == 4
    assert "nothing answers" in (summary.stopped or "")
