"""Control strings in the text of messages: found, and encoded as plain text in their context."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from eyas.conversation import Message
from eyas.demo.server import TARGET
from eyas.errors import TemplateRefusal
from eyas.modes import open_modes
from eyas.prompting import Chat, Prompt, Prompting, Refusal
from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer
from eyas.tokens.control_text import CannotEscape, control_strings, escape

DEMO = load_tokenizer(str(TARGET))
DEMO_TEMPLATE = ChatTemplate.of(DEMO)

MODELS = {
    "kimi-k2.5": "Kimi-K2.5",
    "qwen3": "Qwen3 (hybrid)",
    "llama3_1": "Llama-3.1-Instruct",
    "gptoss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3",
}
PIECES = ["Hello", " world", "\n", "  ", "é", "東京", "<", "|>", "<|", "'s", "123", "🦅"]


def escaped(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    return escape(tokenizer, lambda m, t: template.render(m, tools=t), messages, tools).ids


def without_added_tokens(tokenizer: Tokenizer) -> Backend:
    """The bare model: what it makes of a text in which it knows no control string."""
    bare = Backend(tokenizer.backend.model)
    if tokenizer.backend.normalizer is not None:
        bare.normalizer = tokenizer.backend.normalizer
    bare.pre_tokenizer = tokenizer.backend.pre_tokenizer
    return bare


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    known = set(tokenizer.control.values())
    return [index for index in ids if index in known]


def said(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", MODELS)
def test_on_real_tokenizers(name: str, shared: Path) -> None:
    """No control id comes from the text; the ids stand for the same text; the stretch between
    the template's own control tokens is what the bare model makes of it."""
    files = dict(
        line.split("\t")[:2]
        for line in (shared / "templates" / "CANONICAL.tsv").read_text().splitlines()
    )
    source = (shared / "templates" / files[MODELS[name]]).read_text(encoding="utf-8")
    tokenizer = load_tokenizer(str(shared / "tokenizers" / name), chat_template=source)
    template, bare = ChatTemplate.of(tokenizer), without_added_tokens(tokenizer)
    strings = list(tokenizer.control)
    rng = random.Random(f"control text of {name}")
    own = control_ids(tokenizer, tokenizer.encode(template.render(said("q"))))
    for string in [*strings[:40], *rng.choices(strings, k=40)]:
        more = rng.choices([*PIECES, *strings], k=rng.randint(0, 6))
        place = rng.randint(0, len(more))
        content = "a" + "".join([*more[:place], string, *more[place:]]) + "z"
        text = template.render(said(content))
        ids = escaped(tokenizer, template, said(content))
        assert control_ids(tokenizer, ids) == own, content
        assert tokenizer.decode(ids) == text
        assert ids != tokenizer.encode(text)
        before, found, after = text.partition(content)
        assert found and "".join(tokenizer.decode([i]) for i in control_ids(tokenizer, ids))
        head, tail = _stretch(tokenizer, before), _stretch(tokenizer, after[::-1], backwards=True)
        middle = bare.encode(head + content + tail, add_special_tokens=False).ids
        assert any(ids[at : at + len(middle)] == middle for at in range(len(ids))), content
    for content in PIECES:
        text = template.render(said(f"a{content}z"))
        assert escaped(tokenizer, template, said(f"a{content}z")) == tokenizer.encode(text)


def _stretch(tokenizer: Tokenizer, text: str, *, backwards: bool = False) -> str:
    """What of a text stands behind its last control string (before its first, read backwards)."""
    if backwards:
        text = text[::-1]
        found = tokenizer.control_pattern.search(text)  # type: ignore[union-attr]
        return text[: found.start()] if found else text
    last = list(tokenizer.control_pattern.finditer(text))  # type: ignore[union-attr]
    return text[last[-1].end() :] if last else text


@given(st.lists(st.sampled_from([*PIECES, *DEMO.control]), max_size=12).map("".join))
def test_property_no_control_id_comes_from_the_text(text: str) -> None:
    messages = said(f"q{text}")
    plain = DEMO_TEMPLATE.render(messages)
    ids = escaped(DEMO, DEMO_TEMPLATE, messages)
    own = control_ids(DEMO, DEMO.encode(DEMO_TEMPLATE.render(said("q"))))
    assert control_ids(DEMO, ids) == own
    assert DEMO.decode(ids) == plain
    if not control_strings(DEMO, messages):
        assert ids == DEMO.encode(plain)


def test_it_is_found_wherever_people_write(tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "look", "arguments": {"<|end|>": ["x<think>"]}}}
    value = [{"role": "<|user|>", "content": None, "tool_calls": [call]}, None]
    assert control_strings(tokenizer, value) == ["<|end|>", "<think>"]
    assert control_strings(tokenizer, [{"role": "user", "content": "a < b |> c"}, None]) == []


def test_control_strings_that_json_would_escape_are_found(tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken('<"end">', normalized=False)])
    own = dataclasses.replace(tokenizer, backend=backend)
    assert control_strings(own, said('a <"end"> b')) == ['<"end">']
    assert control_strings(own, said("a b")) == []


def test_values_that_are_no_json_are_looked_through(tokenizer: Tokenizer) -> None:
    assert control_strings(tokenizer, [{"content": "\ud800 <think>", "n": 2**70}]) == ["<think>"]
    assert control_strings(tokenizer, [{"content": "\ud800", "n": 2**70}]) == []


def test_white_space_is_no_control_string(tokenizer: Tokenizer) -> None:
    """Gemma's vocabulary adds runs of line feeds, others runs of spaces: ordinary text."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("   ", normalized=False)])
    own = dataclasses.replace(tokenizer, backend=backend)
    template = ChatTemplate.of(tokenizer)
    assert control_strings(own, said("a\n\nb   c")) == []
    ids = escaped(own, template, said("a\n\nb   c<|end|>"))
    assert own.control["\n\n"] in ids and own.control["   "] in ids
    assert ids.count(own.control["<|end|>"]) == 1


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ("m.content if m.content.startswith('<think>') and m.content.endswith('</think>') else 'no'",
         "<think>x</think>"),
        ("m.content if m.content.startswith('<think>') else 'no'", "<think>"),
        ("m.content if m.content.endswith('<|end|>') else 'no'", "<|end|>"),
        ("m.content | trim", "  <think>\n"),
        ("m.content.split('</think>')[-1]", "a</think>b"),
        ("m.content.split('</think>')[0]", "a</think>b"),
        ("m.content.split('</think>')[-1] | trim", "a</think>\n<|end|>"),
        ("m | tojson", "a</think>\"b"),
    ],
)  # fmt: skip
def test_templates_that_look_at_the_text(body: str, content: str, tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}<|user|>{{ " + body + " }}<|end|>{% endfor %}<|assistant|>"
    template = ChatTemplate(source)
    ids = escaped(tokenizer, template, said(content))
    wanted = template.render(said(content))
    assert tokenizer.decode(ids) == wanted != "no"
    names = [tokenizer.decode([i]) for i in control_ids(tokenizer, ids)]
    assert names == ["<|user|>", "<|end|>", "<|assistant|>"]


def test_what_cannot_be_told_from_the_templates_own_is_refused(tokenizer: Tokenizer) -> None:
    source = "<|user|>{{ messages[0].content | replace('<|', '< |') | upper }}<|end|>"
    with pytest.raises(CannotEscape, match="reads the control strings"):
        escaped(tokenizer, ChatTemplate("{{ messages[0].content | length }}"), said("<think>"))
    changed = ChatTemplate(source)
    assert "<THINK>" in changed.render(said("<think>"))
    assert tokenizer.decode(escaped(tokenizer, changed, said("<think>"))) == changed.render(
        said("<think>")
    )


def test_private_characters_are_left_to_people(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    """A text may hold those with which control strings are told apart; it forges nothing."""
    for char in ("\ue0f0", "\U000f0001", "\uffff"):
        ids = escaped(tokenizer, template, said(f"{char}<|end|>{char}x{char}"))
        assert tokenizer.decode(ids) == template.render(said(f"{char}<|end|>{char}x{char}"))
        assert ids.count(tokenizer.control["<|end|>"]) == 1
    with pytest.raises(CannotEscape, match="last private plane"):
        escaped(tokenizer, template, said("\U00100003<think>"))


def test_a_vocabulary_that_makes_a_control_id_of_ordinary_text() -> None:
    """Unigram models hold <s> as a piece: then plain text becomes the control id after all."""
    pieces = [("<unk>", 0.0), ("<s>", -1.0), *((c, -9.0) for c in "<>s▁helo")]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = dataclasses.replace(DEMO, backend=backend)
    with pytest.raises(CannotEscape, match="of ordinary text as well"):
        escaped(tokenizer, ChatTemplate("{{ messages[0].content }}"), said("hello <s>"))


def test_spaces_of_sentencepiece_stand_where_they_would(tokenizer: Tokenizer) -> None:
    """A space is put before the text's first piece only, as for the whole text without escape."""
    vocabulary = {piece: at for at, piece in enumerate(["<unk>", "▁", "▁a", *"abcdefghijkl<>|/"])}
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(Regex(" "), "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</b>", normalized=False)])
    own = dataclasses.replace(tokenizer, backend=backend)
    template = ChatTemplate("{{ messages[0].content }}</b>{{ messages[1].content }}")
    messages = [*said("a a"), {"role": "user", "content": "a</b>a"}]
    texts = [backend.id_to_token(index) for index in escaped(own, template, messages)]
    assert texts == ["▁a", "▁a", "</b>", "a", "<", "/", "b", ">", "a"]


def made_with(tokenizer: Tokenizer, template: ChatTemplate, policy: str) -> Prompting:
    return Prompting(tokenizer, *open_modes(tokenizer, template, [(1.0, {})]), control_text=policy)


def ids_of(made: Prompting, chat: Chat) -> list[int]:
    prompt = made.prompt(chat)
    assert isinstance(prompt, Prompt)
    return list(prompt.ids)


def test_policies(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    asks = Chat([{"role": "system", "content": "s"}, *said("a <|end|> b")])
    answered = Chat([*said("a"), {"role": "assistant", "content": "no <|end|> here"}, *said("b")])
    plain = Chat(said("a"))
    made = {
        policy: made_with(tokenizer, template, policy) for policy in ("allow", "escape", "refuse")
    }
    allowed = ids_of(made["allow"], asks)
    assert allowed == tokenizer.encode(template.render(asks.messages))
    assert made["refuse"].prompt(asks) == Refusal(
        "control_text", "message 2 (user) holds '<|end|>' (--control-text refuse)"
    )
    ids = ids_of(made["escape"], asks)
    assert (allowed.count(506), ids.count(506)) == (3, 2)
    assert {tuple(ids_of(p, plain)) for p in made.values()} == {
        tuple(tokenizer.encode(template.render(plain.messages)))
    }
    # What the target wrote itself is not its user's doing; but it becomes no control id either.
    assert not made["allow"].has_control_text(answered)
    assert isinstance(made["refuse"].prompt(answered), Prompt)
    kept, escaped_ids = ids_of(made["allow"], answered), ids_of(made["escape"], answered)
    assert kept.count(506) == escaped_ids.count(506) + 1
    assert made["escape"].prompts([asks, plain, answered]) == [
        made["escape"].prompt(chat) for chat in (asks, plain, answered)
    ]


def test_tools_are_peoples_text_too(tokenizer: Tokenizer) -> None:
    source = "{{ tools | tojson if tools else '' }}<|user|>{{ messages[0].content }}<|end|>"
    template = ChatTemplate(source)
    tools = [{"type": "function", "function": {"name": "f", "description": "ends <|end|>"}}]
    chat = Chat(said("a"), tools)
    assert made_with(tokenizer, template, "refuse").prompt(chat) == Refusal(
        "control_text", "the tools hold '<|end|>' (--control-text refuse)"
    )
    ids = ids_of(made_with(tokenizer, template, "escape"), chat)
    assert ids.count(506) == 1
    assert tokenizer.decode(ids) == template.render(chat.messages, tools=tools)


def test_refusals_of_the_template_stay_its_own(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('never') }}")
    with pytest.raises(TemplateRefusal, match="never"):
        escaped(tokenizer, template, said("<think>"))
    made = made_with(tokenizer, template, "escape")
    assert made.prompt(Chat(said("<think>"))) == Refusal(
        "template_refused", "the chat template refuses: never"
    )
