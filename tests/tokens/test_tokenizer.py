"""Vocabularies of another kind than byte-level BPE: slower ways to the same promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from eyas.checks import Checker
from eyas.demo.server import TARGET
from eyas.engines import Generation
from eyas.ids import pack
from eyas.tokens import Tokenizer, build_profile, load_tokenizer
from eyas.tokens.tokenizer import ModelFiles


def sentencepiece() -> Tokenizer:
    """A Llama-2-like vocabulary: spaces as ``▁``, bytes as ``<0x..>``, no byte alphabet."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "ab", "▁ab"]
    vocabulary = {word: at for at, word in enumerate(words)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(
        backend=backend,
        source="made up",
        special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=None,
        files_hash="",
        model=ModelFiles(None, None, (2,), {}),
    )


TOKENIZER = sentencepiece()
BYTE_LEVEL = load_tokenizer(str(TARGET))


@given(st.text("ab é東\n", max_size=20))
def test_texts_come_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(TOKENIZER.pieces(ids)).decode() == text


def test_it_has_no_byte_table() -> None:
    assert TOKENIZER._bytes is None


@pytest.mark.parametrize("odd", [-1, 2**31, 2**40, 10**6])
def test_an_id_that_is_none_has_a_name(odd: int) -> None:
    assert TOKENIZER.name(odd).endswith(f"({odd})")


@pytest.mark.parametrize("matched", [-1, 2**40, 0])
def test_a_match_that_is_no_id_refuses_the_row(matched: int) -> None:
    checker = Checker(TOKENIZER, build_profile(TOKENIZER, None))
    generation = Generation([260, 2], "stop", matched=matched, prompt_tokens=1, completion_tokens=2)
    verdict = checker.judge([260], generation)
    assert verdict.refusal == "stop_id"
    assert str(matched) in verdict.detail


def test_an_honest_answer_passes_with_text_as_engines_show_it() -> None:
    checker = Checker(TOKENIZER, build_profile(TOKENIZER, None))
    ids = [*TOKENIZER.encode("ab é"), 2]
    for text in ("ab é", "ab é</s>", None):
        generation = Generation(
            ids, "stop", matched=2, prompt_tokens=1, completion_tokens=len(ids), text=text
        )
        assert checker.judge([260], generation).refusal is None
    generation.text = "ab e"
    assert checker.judge([260], generation).refusal == "text"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, TOKENIZER])
@given(st.lists(st.integers(0, 520) | st.sampled_from([2**31 - 1, -1]), max_size=40))
def test_packed_ids_spell_what_they_stand_for(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Unknown ones among them, which stand for nothing."""
    known = [i for i in ids if i >= 0]  # what a tokenizer's own decoder takes
    packed = pack(ids if tokenizer.is_byte_level else known)
    assert packed is not None
    joined = tokenizer.join(known)
    assert tokenizer.join(packed) == joined
    assert not tokenizer.spells(packed, joined.decode("utf-8", "replace") + "x")
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        assert not tokenizer.spells(packed, joined.decode("utf-8", "replace"))
    else:
        assert tokenizer.spells(packed, text)


@given(st.lists(st.sampled_from([*BYTE_LEVEL.encode(" \n\t  a"), 511, 512, -1, 2**31 - 1]), max_size=5))
def test_what_is_blank_joins_to_white_space(ids: list[int]) -> None:
    assert BYTE_LEVEL.is_blank(ids) == (not BYTE_LEVEL.join(ids).strip())
    known = TOKENIZER.encode(" a")[: len(ids) % 3]
    assert TOKENIZER.is_blank(known) == (not TOKENIZER.join(known).strip())
