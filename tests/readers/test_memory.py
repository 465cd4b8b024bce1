"""What was read is remembered, and nothing depends on that."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.readers import BadLine, Conversation, PromptReader, Stretch, blocks, memory

LINE = st.one_of(
    st.builds(lambda n: b'{"prompt": "p%d"}' % n, st.integers(0, 40)),
    st.builds(lambda n: b'{"id": %d, "turns": ["a", "b"]}' % n, st.integers(0, 9)),
    st.sampled_from([b"", b" ", b"oops", b'{"prompt": ""}', b"\xff", b"\xef\xbb\xbf", b"[]"]),
)
TEXT = st.tuples(st.lists(LINE, max_size=30), st.booleans()).map(
    lambda text: b"\n".join(text[0]) + b"\n" * text[1]
)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 40)
        patch.setattr(blocks, "_PARQUET_ROWS", 3)
        yield


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the lines that are made into conversations."""
    lines: list[int] = []
    item = PromptReader._item

    def noted(self: PromptReader, path: str, row: Any) -> Conversation | BadLine:
        lines.append(row[0])
        return item(self, path, row)

    monkeypatch.setattr(PromptReader, "_item", noted)
    return lines


def check(path: Path, folder: Path, **options: Any) -> list[Stretch]:
    """Read with what is remembered; it is what reading without it gives."""
    plain = PromptReader([str(path)], **options)
    expected = list(plain)
    reader = PromptReader([str(path)], **options)
    reader.remember(folder)
    stretches = list(reader.stretches())
    assert [item for stretch in stretches for item in stretch.items()] == expected
    assert b"".join(stretch.keys for stretch in stretches) == b"".join(i.key for i in expected)
    turns = [item.n_turns if isinstance(item, Conversation) else 0 for item in expected]
    assert [turn for stretch in stretches for turn in stretch.turns] == turns
    assert reader.shapes == plain.shapes
    assert reader.position == plain.position
    return stretches


@settings(max_examples=60)
@given(before=TEXT, after=TEXT, kept=st.integers(0, 99))
def test_it_is_as_if_everything_were_read_again(before: bytes, after: bytes, kept: int) -> None:
    """Also after the input was changed from some place on."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "p.jsonl"
        for text in (before, before, before[:kept] + after, after, before):
            path.write_bytes(text)
            check(path, folder / "input")


@settings(max_examples=60)
@given(text=TEXT, at=st.integers(0, 10**6), noise=st.binary(max_size=3), cuts=st.booleans())
def test_damage_is_forgotten(text: bytes, at: int, noise: bytes, cuts: bool) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "p.jsonl"
        path.write_bytes(text)
        check(path, folder / "input")
        (notes,) = (folder / "input").iterdir()
        noted = notes.read_bytes()
        at %= len(noted) + 1
        notes.write_bytes(noted[:at] + noise + (b"" if cuts else noted[at + len(noise) :]))
        check(path, folder / "input")
        assert notes.read_bytes().startswith(noted)  # what stands behind is never looked at
        check(path, folder / "input")


def write_files(folder: Path) -> list[Path]:
    rows = [{"id": n, "prompt": f"p{n}"} for n in range(20)] + [{"prompt": ""}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(text)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text))
    table = pa.table({"id": list(range(21)), "turns": [["x", "y"]] * 20 + [[""]]})
    pq.write_table(table, folder / "a.parquet", row_group_size=8)
    return [folder / name for name in ("a.jsonl", "a.jsonl.gz", "a.parquet")]


@pytest.mark.parametrize("at", range(3))
def test_what_is_known_is_not_parsed(tmp_path: Path, parsed: list[int], at: int) -> None:
    path, folder = write_files(tmp_path)[at], tmp_path / "input"
    check(path, folder)
    parsed.clear()
    reader = PromptReader([str(path)])
    reader.remember(folder)
    stretches = list(reader.stretches())
    assert parsed == []
    assert len(stretches) > 3
    assert reader.position.rows_read == 21
    assert stretches[1].items()
    assert len(parsed) == len(stretches[1].turns)  # only these


def test_rows_that_are_added_are_all_that_is_parsed(tmp_path: Path, parsed: list[int]) -> None:
    path, folder = write_files(tmp_path)[0], tmp_path / "input"
    check(path, folder)
    with path.open("ab") as file:
        file.write(b'{"prompt": "new"}\n' * 9)
    reader = PromptReader([str(path)])
    reader.remember(folder)
    parsed.clear()
    assert sum(len(stretch.turns) for stretch in reader.stretches()) == 30
    assert 9 <= len(parsed) < 14  # with the last block, which grew
    check(path, folder)


def test_a_parquet_file_is_another_where_one_value_is(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.parquet", tmp_path / "input"
    for prompts in ("abcdef", "abcdef", "abxdef", "abcdefg"):
        pq.write_table(pa.table({"prompt": list(prompts)}), path, row_group_size=4)
        check(path, folder)


def test_other_options_and_other_code_are_other_rows(
    tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "a.jsonl", tmp_path / "input"
    path.write_bytes(b'{"prompt": "p", "question": "q"}\n' * 5)
    check(path, folder)
    check(path, folder, column="question")
    check(path, folder, column="prompt")
    check(path, folder, column="prompt", system="Be brief.")
    parsed.clear()
    reader = PromptReader([str(path)], column="prompt")
    reader.remember(folder)
    list(reader.stretches())
    assert parsed == []  # a system message changes no key
    monkeypatch.setattr(memory, "_code", lambda: b"changed")
    list(reader.stretches())
    assert len(parsed) == 5


def test_a_file_that_breaks_is_broken_in_the_same_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = b"".join(
        b'{"prompt": "%d %s"}\n' % (n, os.urandom(20).hex().encode()) for n in range(200)
    )
    whole = gzip.compress(rows)
    path.write_bytes(whole[: len(whole) // 2])
    for _ in range(3):
        stretches = check(path, tmp_path / "input")
        last = stretches[-1].items()[-1]
        assert isinstance(last, BadLine)
        assert last.reason == "unreadable_file"


def test_where_nothing_can_be_written_everything_is_read(tmp_path: Path) -> None:
    path = write_files(tmp_path)[0]
    (tmp_path / "input").write_text("in the way")
    check(path, tmp_path / "input")
    check(path, tmp_path / "input")


@given(st.lists(st.integers(0, 2), max_size=12), st.one_of(st.none(), st.integers(0, 12)))
def test_the_beginning_of_a_stretch(turns: list[int], limit: int | None) -> None:
    keys = b"".join(bytes([n]) * 16 for n in range(len(turns)))
    whole: Any = Stretch(keys, turns, lambda: list(range(len(turns))))  # type: ignore[arg-type, return-value]
    part = whole.up_to(limit)
    good = sum(turn > 0 for turn in turns)
    assert part.conversations == (good if limit is None else min(limit, good))
    assert len(part.keys) == 16 * len(part.turns) == 16 * len(part.items())
    assert turns[: len(part.turns)] == part.turns
    if limit is None or limit > good:
        assert part.turns == turns
    elif limit:
        assert part.turns[-1] > 0
