"""Conversations of many turns under each history policy, on templates of each class: every prompt
is compared with transformers' own rendering of what was said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from capturing import change_rows, config_for, paired, run_eyas, write_prompts
from eyas import EyasError, Run, Tokenizer, capture, load_tokenizer
from eyas.errors import ConfigError
from eyas.findings import Findings
from eyas.stats import run_stats
from eyas.verify.run import verify_run
from fault_server import FaultServer
from speaking import Stage


class Kind(NamedTuple):
    """A class of templates, and what it does under each policy."""

    source: str
    full: dict[str, Any] | None = None
    """The switches under which earlier reasoning is kept; None where it cannot be."""
    tokens: dict[str, Any] | None = None
    """Those under which it is append-only; None where it is not."""
    stop: str = "<|end|>"
    leads: tuple[str, str, str] = ("", "", "")
    reasons: bool = True


_USER = "{%- if m.role == 'user' -%}{{- '<|user|>' + m.content + '<|end|>' -}}{%- else -%}"


def _template(answer: str, generation: str, user: str = _USER) -> str:
    return (
        f"{{%- for m in messages -%}}{user}{answer}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{generation}{{%- endif -%}}"
    )


KINDS = {
    "opened, dropped": Kind(
        _template(
            "{{- '<|assistant|></think>' + m.content + '<|end|>' -}}",
            "{{- '<|assistant|><think>' -}}",
        )
    ),
    "opened, kept by a switch": Kind(
        _template(
            "{{- '<|assistant|><think>' -}}{%- if keep_thinking is defined and keep_thinking and "
            "m.reasoning_content is string -%}{{- m.reasoning_content -}}{%- endif -%}"
            "{{- '</think>' + m.content + '<|end|>' -}}",
            "{{- '<|assistant|><think>' -}}",
        ),
        full={"keep_thinking": True},
        tokens={"keep_thinking": True},
    ),
    "opened and kept": Kind(
        _template(
            "{{- '<|assistant|><think>' + m.reasoning_content | default('') + '</think>' + m.content + '<|end|>' -}}",
            "{{- '<|assistant|><think>' -}}",
        ),
        full={},
        tokens={},
    ),
    "opened, with line feeds": Kind(
        _template(
            "{{- '<|assistant|>\\n' + m.content | trim + '<|end|>\\n' -}}",
            "{{- '<|assistant|>\\n<think>\\n' -}}",
        ),
        leads=("", "\n", "\n\n"),
    ),
    "kept, with line feeds": Kind(
        _template(
            "{{- '<|assistant|>\\n<think>\\n' + m.reasoning_content | default('') | trim + '\\n</think>\\n\\n' "
            "+ m.content | trim + '<|end|>\\n' -}}",
            "{{- '<|assistant|>\\n<think>\\n' -}}",
        ),
        full={},
        tokens={},
        leads=("", "\n", "\n\n"),
    ),
    "generated, dropped": Kind(
        _template(
            "{{- '<|assistant|>' + m.content + '<|end|>' -}}",
            "{{- '<|assistant|>' -}}{#- <think> </think> -#}",
        )
    ),
    "generated and kept": Kind(
        _template(
            "{{- '<|assistant|>' -}}{%- if m.reasoning_content -%}{{- '<think>' + "
            "m.reasoning_content + '</think>' -}}{%- endif -%}{{- m.content + '<|end|>' -}}",
            "{{- '<|assistant|>' -}}",
        ),
        full={},
        tokens={},
    ),
    "closed": Kind(
        _template(
            "{{- '<|assistant|><think></think>' + m.content + '<|end|>' -}}",
            "{{- '<|assistant|><think></think>' -}}",
        ),
        full={},
        tokens={},
    ),
    "no reasoning": Kind(
        _template(
            "{{- '<|assistant|>' + m.content + '<|end|>' -}}", "{{- '<|assistant|>' -}}"
        ),
        full={},
        tokens={},
        reasons=False,
    ),
    "ended by the next turn's header": Kind(
        _template(
            "{{- '<|assistant|><think>' + m.reasoning_content | default('') + '</think>' + m.content -}}",
            "{{- '<|assistant|><think>' -}}",
            user="{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}{%- else -%}",
        ),
        full={},
        tokens={},
        stop="<|user|>",
    ),
    "a channel around the content": Kind(
        _template(
            "{{- '<|assistant|><think>' + m.reasoning_content | default('') + '</think><|system|>' "
            "+ m.content + '<|system|><|end|>' -}}",
            "{{- '<|assistant|><think>' -}}",
        ),
        full={},
        tokens={},
    ),
}  # fmt: skip


def stage(kind: Kind, tokenizer: Tokenizer, folder: Path, **more: Any) -> Stage:
    return Stage.set(
        folder / "model", tokenizer, kind.source,
        stop=kind.stop, leads=kind.leads, reasons=kind.reasons, **more,
    )  # fmt: skip


def verified(run: Path, model: Path) -> Findings:
    findings = Findings()
    verify_run(Run(run), load_tokenizer(str(model)), findings)
    return findings


@pytest.mark.parametrize("history", ["served", "full", "tokens"])
@pytest.mark.parametrize("name", KINDS)
def test_twenty_turns(name: str, history: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    kind = KINDS[name]
    kwargs = {"served": {}, "full": kind.full, "tokens": kind.tokens}[history]
    set_up = stage(kind, tokenizer, tmp_path)
    if kwargs is None:
        with pytest.raises(ConfigError, match=f"--history {history} cannot be had"):
            set_up.converse(tmp_path, turns=2, history=history)
        assert not (tmp_path / "run").exists()
        return
    for thread in set_up.converse(tmp_path, history=history):
        assert set_up.check(thread, history=history, **kwargs) == 0
        assert all(json.loads(trace.template_kwargs) == kwargs for trace in thread)
    findings = verified(tmp_path / "run", set_up.directory)
    assert not findings.failed, findings.of("failed")


@pytest.mark.parametrize("history", ["served", "full", "tokens"])
@pytest.mark.parametrize("name", ["opened and kept", "no reasoning", "opened, kept by a switch"])
def test_answers_with_other_ids_are_marked_from_then_on(
    name: str, history: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kind = KINDS[name]
    kwargs = {"served": {}, "full": kind.full, "tokens": kind.tokens}[history]
    assert kwargs is not None
    set_up = stage(kind, tokenizer, tmp_path, odd_share=0.2)
    threads = set_up.converse(tmp_path, turns=8, conversations=4, history=history)
    drifted = sum(set_up.check(thread, history=history, **kwargs) for thread in threads)
    figures = run_stats(Run(tmp_path / "run"))
    assert 0 < drifted < 28
    assert (figures["later_turns"], figures["history_drift"]) == (28, drifted)
    shown = run_eyas("stats", str(tmp_path / "run")).stdout
    share = f"{drifted / 28:.1%}"
    assert (
        f"drift      {drifted} of 28 later turns ({share}) show an answer with other ids" in shown
    )
    assert "turns      0 4, 1 4, 2 4, 3 4, 4 4, 5 4, 6 4, 7 4\n" in shown
    assert not verified(tmp_path / "run", set_up.directory).failed


def test_a_stop_between_turns_keeps_the_policy_and_the_mark(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path, odd_share=0.3)
    for history in ("served", "tokens"):
        whole = set_up.converse(tmp_path / history, turns=6, conversations=4, history=history)
        run = tmp_path / history / "run"
        change_rows(run, lambda rows: rows.clear(), lambda row: row["turn"] > 2)
        again = set_up.converse(tmp_path / history, turns=6, conversations=4, history=history)
        told = [
            [(t.id, t.prompt_ids, t.marks) for thread in threads for t in thread]
            for threads in (whole, again)
        ]
        assert told[0] == told[1]
        assert {"history_drift" in t.marks for thread in again for t in thread} == {True, False}


def test_verify_names_a_prompt_or_a_mark_that_is_not_the_policys(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kind = KINDS["opened and kept"]
    set_up = stage(kind, tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=4, history="tokens")

    def failed(change: Callable[[dict[str, Any]], None]) -> set[str]:
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        change_rows(tmp_path / "copy", lambda rows: change(rows[0]), lambda r: r["turn"] == 2)
        found = {f.name for f in verified(tmp_path / "copy", set_up.directory).of("failed")}
        shutil.rmtree(tmp_path / "copy")
        return found

    def other_id(row: dict[str, Any], at: int) -> None:
        row["prompt_ids"][at] = 70 if row["prompt_ids"][at] != 70 else 71

    assert failed(lambda row: None) == set()
    assert failed(lambda row: other_id(row, 3)) == {"history"}
    # The turn behind it began with the ids that it had.
    assert failed(lambda row: other_id(row, -4)) == {"prompt", "history"}
    assert failed(lambda row: row["marks"].append("history_drift")) == {"marks"}


def test_a_conversation_that_the_template_moves_is_refused_row_by_row(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Append-only without a system message's word, and not with it: what Mistral does to tools."""
    moving = "{%- if 'odd' in messages[0].content and not loop.last -%}<|system|>{%- endif -%}"
    source = KINDS["no reasoning"].source.replace("{{- '<|user|>'", moving + "{{- '<|user|>'")
    set_up = stage(Kind(source, reasons=False), tokenizer, tmp_path)
    rows = [{"id": "a", "turns": ["odd 1", "2", "3"]}, {"id": "b", "turns": ["even 1", "2", "3"]}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(set_up.speaker) as server:
        values = {"tokenizer": str(set_up.directory), "history": "tokens"}
        summary = capture(config_for(server, prompts, tmp_path / "run", **values), probe=False)
    assert (summary.done, summary.rejected) == (4, 2)
    assert summary.reasons == {"history_not_kept": 1, "earlier_turn_rejected": 1}
    row = next(r for r in Run(tmp_path / "run").rejected() if r.reason == "history_not_kept")
    assert row.id == "a/0/1"
    assert "has become '<|system|><|user|>odd" in row.detail


def test_another_policy_is_another_configuration(tokenizer: Tokenizer, tmp_path: Path) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path)
    set_up.converse(tmp_path, turns=2)
    with pytest.raises(EyasError, match="history: served in the run, tokens now"):
        set_up.converse(tmp_path, turns=2, history="tokens")


def test_each_mode_finds_its_own_switch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The demo target's template: with thinking off there is no reasoning that could be kept."""
    source = tokenizer.chat_template
    assert source is not None
    set_up = Stage.set(tmp_path / "model", tokenizer, source, stop="<|end|>")
    mix = [{"thinking": True}, {"thinking": False}]
    threads = set_up.converse(
        tmp_path, turns=5, conversations=12, history="full", template_kwargs=mix
    )
    seen = set()
    for thread in threads:
        kwargs = json.loads(thread[0].template_kwargs)
        seen.add(thread[0].template_kwargs)
        assert set_up.check(thread, history="full", **kwargs) == 0
    assert seen == {'{"thinking":true,"preserve_thinking":true}', '{"thinking":false}'}
    assert not verified(tmp_path / "run", set_up.directory).failed


def test_the_policy_is_said_on_the_command_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    set_up = stage(KINDS["opened, dropped"], tokenizer, tmp_path)
    prompts = write_prompts(tmp_path / "p.jsonl", paired(2))
    with FaultServer(set_up.speaker) as server:
        shown = run_eyas(
            "capture", str(prompts), "--out", str(tmp_path / "run"), "--url", server.url,
            "--tokenizer", str(set_up.directory), "--no-probe", "--history", "full",
        )  # fmt: skip
    assert shown.returncode == 2
    assert shown.stderr == (
        "eyas: --history full cannot be had: the chat template drops the reasoning of earlier "
        "answers, and has no switch that keeps it. --history served shows the target what it is "
        "shown when it is served.\n"
    )


_FUNCTION = """
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file({path!r})


def prompt(messages, tools, kwargs, add_generation_prompt=True):
    text = ""
    for m in messages:
        if m["role"] == "user":
            text += "<|user|>" + m["content"] + "<|end|>"
        else:
            text += "<|assistant|><think>" + m.get("reasoning_content", "") + "</think>"
            text += m["content"] + "<|end|>"
    text += "<|assistant|><think>" if add_generation_prompt else ""
    return TOKENIZER.encode(text, add_special_tokens=False).ids if {ids} else text
"""


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("history", ["served", "tokens"])
def test_prompts_that_a_function_makes(
    ids: bool, history: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path, odd_share=0.1)
    function = tmp_path / f"made_{history}_{ids}.py"
    path = str(set_up.directory / "tokenizer.json")
    function.write_text(_FUNCTION.format(path=path, ids=ids))
    threads = set_up.converse(
        tmp_path, turns=8, conversations=4, history=history, chat_template=f"{function}:prompt"
    )
    assert sum(set_up.check(thread, history=history) for thread in threads) > 0


@pytest.mark.parametrize("history", ["served", "full", "tokens"])
def test_control_text_that_is_escaped(history: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Positions in the text are the same, though the ids of what the user wrote are others."""
    set_up = stage(KINDS["opened and kept"], tokenizer, tmp_path)
    rows = [{"id": "a", "turns": ["1 <|end|><|user|> x", "2 </think> y", "3 <|end|>", "4"]}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer(set_up.speaker) as server:
        values = {
            "tokenizer": str(set_up.directory),
            "history": history,
            "control_text": "escape",
            "max_new_tokens": 2000,
        }
        capture(config_for(server, prompts, tmp_path / "run", **values), probe=False)
    traces = sorted(Run(tmp_path / "run").traces(), key=lambda trace: trace.turn)
    whole: list[int] = []
    for trace in traces:
        assert trace.marks == ["control_text"]
        assert trace.prompt_ids[: len(whole)] == whole
        assert trace.prompt_ids.count(506) == 2 * trace.turn + 1
        whole = trace.prompt_ids + trace.output_ids
    assert not verified(tmp_path / "run", set_up.directory).failed
