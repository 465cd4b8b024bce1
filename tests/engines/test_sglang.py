"""SGLang's answers read as they are: what is absent stays None, what is odd stays odd."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eyas.engines import Request, Sampling, SGLang
from eyas.engines.known_faults import parse_version, refuse_fatal
from eyas.engines.sglang import read_answer
from eyas.errors import EyasError, MalformedAnswer
from fault_server import Answer, FaultServer


def answer(**meta: Any) -> Answer:
    return {
        "text": "ab",
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 6},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "weight_version": "default",
            **meta,
        },
    }


def test_an_ordinary_answer() -> None:
    g = read_answer({**answer(cached_tokens=1), "prompt_token_ids": [1, 2, 3]})
    assert (g.output_ids, g.finish_reason, g.matched, g.names_stop) == ([5, 6], "stop", 6, True)
    assert (g.prompt_tokens, g.completion_tokens, g.cached_tokens) == (3, 2, 1)
    assert (g.prompt_echo, g.text, g.weight_version) == ([1, 2, 3], "ab", "default")
    assert (g.logprob_ids, g.logprobs, g.refusal) == (None, None, None)


def test_what_is_absent_stays_none() -> None:
    g = read_answer({"meta_info": {}})
    assert (g.output_ids, g.finish_reason, g.matched) == ([], None, None)
    assert (g.prompt_tokens, g.completion_tokens, g.prompt_echo, g.text) == (None,) * 4


def test_the_answer_of_another_request_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the request's id: one of ours that was not sent now is wrong; a foreign one is not,
    unless this server has kept a request's id before."""
    engine = SGLang("http://127.0.0.1:1")
    said = ["foreign", engine._rid + "0" * 16, "", "foreign"]

    async def post(path: str, body: Answer, **_: bool) -> Answer:
        return answer(id=said.pop(0) or body["rid"])

    monkeypatch.setattr(engine._http, "post", post)
    asyncio.run(engine.close())

    async def ask() -> list[tuple[bool, bool]]:
        given = [await engine.generate(Request([1, 2, 3], 9, 0)) for _ in range(4)]
        return [(g.renamed, g.refusal is not None) for g in given]

    renamed, own, wrong = (True, False), (False, False), (True, True)
    assert asyncio.run(ask()) == [renamed, wrong, own, wrong]


@pytest.mark.parametrize("odd", [True, 2.0, "2", None, [2]])
def test_counts_that_are_no_numbers_are_none(odd: object) -> None:
    g = read_answer(answer(prompt_tokens=odd, completion_tokens=odd))
    assert (g.prompt_tokens, g.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    ("finish", "kind", "matched"),
    [
        ({"type": "length", "length": 2}, "length", None),
        ({"type": "stop", "matched": "NaN happened"}, "stop", "NaN happened"),
        ({"type": "abort", "message": "Aborted"}, "abort: Aborted", None),
        ({"type": "abort"}, "abort", None),
        ("stop", "stop", None),
        (None, None, None),
        ({}, None, None),
        ({"type": ["stop"]}, None, None),
    ],
)
def test_finish_reasons(finish: object, kind: str | None, matched: object) -> None:
    g = read_answer(answer(finish_reason=finish))
    assert (g.finish_reason, g.matched) == (kind, matched)


@pytest.mark.parametrize(
    "whole", [{}, {"output_ids": [1]}, {"meta_info": None}, {"meta_info": [1]}, {"message": "x"}]
)
def test_an_answer_without_meta_info_is_malformed(whole: Answer) -> None:
    with pytest.raises(MalformedAnswer, match="no meta_info"):
        read_answer(whole)


def test_log_probabilities() -> None:
    g = read_answer(answer(output_token_logprobs=[[-0.5, 5, None], [0, 6, "b"]]))
    assert (g.logprob_ids, g.logprobs) == ([5, 6], [-0.5, 0.0])
    for no_number in ("x", None, "nan", float("nan")):
        g = read_answer(answer(output_token_logprobs=[[no_number, 5, None]]))
        assert (g.logprob_ids, g.logprobs) == ([5], None)  # -inf is null in JSON
    for odd in ([[]], [None], [{}]):
        with pytest.raises(MalformedAnswer, match="output_token_logprobs"):
            read_answer(answer(output_token_logprobs=odd))


def test_weights_that_changed_midway() -> None:
    one = [{"version": "a", "start": 0, "end": 2}]
    assert read_answer(answer(weight_versions=one)).refusal is None
    two = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    assert "the weights changed" in (read_answer(answer(weight_versions=two)).refusal or "")


@pytest.mark.parametrize(
    ("text", "number"),
    [("0.5.4.post2", (0, 5, 4, 2)), ("0.5.18", (0, 5, 18, 0)), ("0.5.0rc2", (0, 5, 0, 0)),
     ("1.0.0+cu130", (1, 0, 0, 0)), ("main", None), ("", None), (None, None)],
)  # fmt: skip
def test_versions(text: str | None, number: tuple[int, ...] | None) -> None:
    assert parse_version(text) == number


def test_versions_between_are_refused_and_those_around_are_not() -> None:
    bad = ["0.4.10.post2", "0.5.1", "0.5.2", "0.5.3.post3", "0.5.4", "0.5.4.post1", "0.5.4.post2"]
    for version in bad:
        with pytest.raises(EyasError, match="0.5.18"):
            refuse_fatal("sglang", version)
    for version in ("0.5.0rc2", "0.5.4.post3", "0.5.5", "0.5.23", "1.0.0"):
        refuse_fatal("sglang", version)


@pytest.mark.parametrize(
    ("version", "seeded"), [(None, True), ("0.5.23", True), ("0.5.0rc2", False)]
)
def test_a_seed_is_sent_only_where_it_is_known(version: str | None, seeded: bool) -> None:
    """A version that does not know the parameter answers 500."""
    sent: list[Answer] = []

    def policy(body: Answer, _: Answer) -> None:
        sent.append(body)

    async def ask(url: str) -> None:
        engine = SGLang(url, sampling=Sampling(temperature=0.5, stop_token_ids=(7,)))
        await engine.identify()
        await engine.generate(Request([1, 2, 3], 4, seed=9, logprobs=True))
        await engine.generate(Request([1, 2, 3], 4, seed=9))
        await engine.close()

    info = {"model_path": "m", **({} if version is None else {"version": version})}
    with FaultServer(policy=policy, info=info) as server:
        asyncio.run(ask(server.url))
    first, second = sent
    assert first["sampling_params"].get("sampling_seed") == (9 if seeded else None)
    assert first["sampling_params"]["stop_token_ids"] == [7]
    assert (first["return_logprob"], "return_logprob" in second) == (True, False)
    assert len(first["rid"]) == len(second["rid"]) == 32
    assert first["rid"] != second["rid"]


def test_who_answers_is_told_without_its_secrets() -> None:
    info = {
        "model_path": "/m", "version": "0.5.23", "weight_version": "w1", "api_key": "s3cret",
        "max_running_requests": 48, "context_length": 4096, "admin_api_key": "s3cret",
        "preferred_sampling_params": {"top_k": 5},
    }  # fmt: skip

    async def ask(url: str) -> Any:
        engine = SGLang(url)
        told = await engine.identify()
        await engine.close()
        return told

    with FaultServer(info=info) as server:
        told = asyncio.run(ask(server.url))
    assert (told.model, told.version, told.weight_version) == ("/m", "0.5.23", "w1")
    assert (told.slots, told.context_length) == (48, 4096)
    assert "preferred_sampling_params" in told.warnings[0]
    assert "s3cret" not in repr(told)
