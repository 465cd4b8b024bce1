"""Tokenizer, chat template and profile on the demo target and on small made-up ones."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from eyas.demo.server import TARGET
from eyas.errors import EyasError, TemplateRefusal
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer
from eyas.tokens.facts import template_facts
from eyas.tokens.stand_in import stand_in

CHAT = [{"role": "user", "content": "Hi"}]


@given(st.text(max_size=60))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = load_demo()
    assert tokenizer.decode(tokenizer.encode(text)) == text


_LOADED: list[Tokenizer] = []


def load_demo() -> Tokenizer:
    if not _LOADED:
        _LOADED.append(load_tokenizer(str(TARGET)))
    return _LOADED[0]


@given(st.lists(st.integers(0, 511), max_size=40))
def test_pieces_join_to_what_the_backend_decodes(ids: list[int]) -> None:
    tokenizer = load_demo()
    joined = b"".join(tokenizer.pieces(ids)).decode("utf-8", "replace")
    assert joined == tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert joined == tokenizer.decode(ids)


def test_a_control_string_that_is_not_one_id_stops_loading() -> None:
    tokenizer = load_tokenizer(str(TARGET))
    tokenizer.check_control_strings()
    tokenizer.control["two words"] = 7
    with pytest.raises(EyasError, match="'two words' should be the one id 7"):
        tokenizer.check_control_strings()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("/no/such/place", "no such directory"),
        ("./neither", "no such directory"),
        (str(Path(__file__).parent), "no tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_named(source: str, said: str) -> None:
    with pytest.raises(EyasError, match=said):
        load_tokenizer(source)


def test_remote_code_is_never_needed_silently(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X"]}})
    )
    with pytest.raises(EyasError, match="tokenization_x"):
        load_tokenizer(str(tmp_path))


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    shutil.copy(TARGET / "tokenizer.json", tmp_path)
    with pytest.raises(EyasError, match="no chat template.*--chat-template FILE"):
        ChatTemplate.of(load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("kwargs", [{}, {"thinking": False}, {"preserve_thinking": True}], ids=str)
def test_rendering_equals_apply_chat_template(kwargs: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(TARGET))
    ours = ChatTemplate.of(load_demo(), kwargs=kwargs)
    chats: list[list[dict[str, Any]]] = [
        CHAT,
        [{"role": "system", "content": "S"}, *CHAT],
        [*CHAT, {"role": "assistant", "content": "A", "reasoning_content": "R"}, *CHAT],
    ]
    for chat in chats:
        for add in (True, False):
            wanted = theirs.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=add, **kwargs
            )
            assert ours.render(chat, add_generation_prompt=add) == wanted
            assert load_demo().encode(wanted) == theirs.apply_chat_template(
                chat, add_generation_prompt=add, return_dict=False, **kwargs
            )


def test_real_templates_render_as_transformers_renders_them(shared: Path) -> None:
    if not hasattr(chat_template_utils, "_alias_reasoning_fields"):
        pytest.skip("before 5.20 transformers gave the reasoning no other names")
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "why"},
        {"role": "user", "content": "three"},
    ]
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = 0
    for path in sorted((shared / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        if "strftime_now" in source:
            continue
        try:
            theirs, _ = render_jinja_template(
                [chat], chat_template=source, add_generation_prompt=True, **names
            )
        except Exception:
            with pytest.raises(EyasError):
                ChatTemplate(source, special_tokens_map=names).render(chat)
            continue
        assert ChatTemplate(source, special_tokens_map=names).render(chat) == theirs[0], path.name
        rendered += 1
    assert rendered > 200


def test_the_date_is_frozen() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H') }}", date=dt.date(2026, 1, 2))
    assert template.shows_date
    assert template.render(CHAT) == "2026-01-02 00"


def test_switches_that_are_not_read_are_known() -> None:
    template = ChatTemplate("{{ thinking }}", kwargs={"thinking": 1, "enable_thinking": 0})
    assert template.ignored_kwargs == ["enable_thinking"]


def test_a_refusal_has_the_templates_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        template.render(CHAT)
    with pytest.raises(EyasError, match="not valid"):
        ChatTemplate("{% if %}")
    sandboxed = ChatTemplate("{{ ''.__class__.__mro__ }}")
    with pytest.raises(TemplateRefusal, match="refuses"):
        sandboxed.render(CHAT)


def test_the_demo_profile(profile: Profile, tokenizer: Tokenizer) -> None:
    assert (profile.reasoning, profile.vocab_size) == ("open", 512)
    assert (profile.opener, profile.closer) == (("<think>", (510,)), ("</think>", (511,)))
    assert profile.stop_ids == profile.declared_stop_ids == {506}
    assert {tokenizer.decode(header) for header in profile.role_headers} == {
        "<|user|>", "<|system|>",
    }  # fmt: skip
    assert Profile.from_dict(json.loads(json.dumps(profile.as_dict(tokenizer)))) == profile


def test_where_the_reasoning_stands(profile: Profile, tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    opened, closed, plain = [508, a, 506, 509, 510], [509, 510, 511], [509]
    for prompt, output, spans in (
        (opened, [a, a, 511, a, 506], (5, 7, 8, 1)),
        (opened, [511, a, 506], (5, 5, 6, 1)),
        (opened, [a, a], (5, None, 7, 0)),
        (opened, [a, 511, a, 511, 506], (5, 6, 7, 2)),
        (closed, [a, 506], (None, None, 3, 0)),
        (plain, [510, a, 511, a, 506], (2, 3, 4, 1)),
        (plain, [a, 510, a, 511, 506], (None, None, 1, 0)),  # quoted, not opened
        (plain, [a, 511, a, 506], (None, None, 1, 1)),
        (closed, [a, 511, a, 506], (None, None, 3, 1)),
    ):
        assert profile.spans(tokenizer, prompt, output) == spans
    reading = profile.read(tokenizer, opened, [a, 511, a, a, 506])
    assert (reading.reasoning, reading.content) == ("a", "aa")


@pytest.mark.parametrize(
    ("directory", "template", "opener", "tail"),
    [
        ("kimi-k2.5", "Kimi-K2.5", (163606,), (163606,)),
        ("qwen3", "Qwen3-Thinking-2507", (151667,), (151667, 198)),
        ("deepseek_v3", "DeepSeek-R1 (Feb 2025)", (30, 37947, 32), (30, 37947, 1018)),
        ("gptoss", "gpt-oss", (200005, 35644, 200008), (200006, 173781)),
    ],
)
def test_profiles_of_real_models(
    directory: str, template: str, opener: tuple[int, ...], tail: tuple[int, ...], shared: Path
) -> None:
    files = dict(
        line.split("\t")[:2]
        for line in (shared / "templates" / "CANONICAL.tsv").read_text().splitlines()
    )
    text = (shared / "templates" / files[template]).read_text(encoding="utf-8")
    tokenizer = load_tokenizer(str(shared / "tokenizers" / directory), chat_template=text)
    profile = build_profile(tokenizer, ChatTemplate.of(tokenizer))
    assert profile.opener is not None
    assert profile.closer is not None
    assert profile.opener.ids == opener
    assert profile.prompt_tail[-len(tail) :] == tail
    prompt = list(profile.prompt_tail)
    reasoning, answer = tokenizer.encode("Let me think."), tokenizer.encode("Four.")
    stop = min(profile.stop_ids)
    if profile.reasoning == "open":
        output = [*reasoning, *profile.closer.ids, *answer, stop]
    else:
        output = [*profile.opener.ids, *reasoning, *profile.closer.ids, *answer, stop]
    reading = profile.read(tokenizer, prompt, output)
    assert (reading.reasoning or "").strip() == "Let me think."
    assert reading.content == "Four."
    if "\n" in tokenizer.decode(output[-3:]):
        pytest.fail("the answer must not hold the stop id")


@pytest.mark.parametrize("reasons", [True, False])
def test_channels_of_gpt_oss_are_taken_apart(reasons: bool, shared: Path) -> None:
    text = (shared / "templates" / "gpt-oss.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "gptoss"), chat_template=text)
    template = ChatTemplate.of(tokenizer)
    profile = build_profile(tokenizer, template)
    prompt = tokenizer.encode(template.render([{"role": "user", "content": "Hi"}]))
    analysis = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
    said = (analysis if reasons else "") + "<|channel|>final<|message|>Four.\n<|return|>"
    reading = profile.read(tokenizer, prompt, tokenizer.encode(said))
    assert (reading.reasoning, reading.content) == ("Let me think." if reasons else None, "Four.\n")
    answer = {"role": "assistant", "content": reading.content}
    again = template.render(
        [{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "?"}]
    )
    assert again.count("<|channel|>final<|message|>Four.\n<|end|>") == 1


_FRAMED = {
    "Cohere2MoE": ("<|END_OF_TURN_TOKEN|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "command-a-reasoning-08-2025": (
        "<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "Kimi-K3-llamacpp-port": (
        "<|end_of_msg|>", "<|open|>response<|sep|>",
        "<|close|>response<|sep|><|close|>message<|sep|>"),
    "miles-inkling_fixed": (
        "<|content_model_end_sampling|>", "<|message_model|><|content_text|>", "<|end_message|>"),
}  # fmt: skip
"""Template -> what ends its turns, and what stands around content behind a reasoning."""


@pytest.mark.parametrize("name", _FRAMED)
def test_what_stands_around_content_is_taken_off(
    name: str, shared: Path, tokenizer: Tokenizer
) -> None:
    stop, first, last = _FRAMED[name]
    source = (shared / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    own, template, profile = stand_in(source, stop=stop)
    opener, closer = profile.opener, profile.closer
    assert opener is not None
    assert closer is not None
    prompt = template.render([{"role": "user", "content": "Hi"}])
    opens = "" if profile.reasoning == "open" else opener.text
    output = own.encode(f"{opens}Let me think.{closer.text}{first}Four.{last}{stop}")
    reading = profile.read(own, own.encode(prompt), output)
    assert (reading.reasoning, reading.content) == ("Let me think.", "Four.")
    assert reading.closers == 1
    facts = template_facts(own, template, profile)
    assert facts.append_only, facts.first_difference


def test_a_run_of_an_earlier_version_has_no_frame(profile: Profile) -> None:
    saved = profile.as_dict()
    del saved["content_openers"], saved["content_closer"]
    assert Profile.from_dict(saved) == profile


def test_a_closer_that_shares_an_id_with_what_follows(shared: Path) -> None:
    """DeepSeek's first vocabulary has no </think>: its last id merges with line breaks."""
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "deepseek_v3"), chat_template=(
        "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"))  # fmt: skip
    profile = build_profile(tokenizer, ChatTemplate.of(tokenizer))
    prompt = tokenizer.encode("Hi<think>\n")
    output = [*tokenizer.encode("why</think>\n\nFour."), 1]
    assert profile.closer is not None
    assert tuple(output[1 : 1 + len(profile.closer.ids)]) != profile.closer.ids
    reading = profile.read(tokenizer, prompt, output)
    assert (reading.reasoning, reading.content) == ("why", "\n\nFour.")
    assert reading.start == len(prompt)
