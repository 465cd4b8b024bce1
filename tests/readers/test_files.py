"""Files of every format and compression into rows: nothing lost, nothing changed, little held."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.conversation import BadLine, Conversation
from eyas.errors import InputError
from eyas.readers import REASONS, PromptReader
from eyas.readers import files as reader_files
from eyas.readers.blocks import read_rows
from eyas.readers.files import BrokenFile, Damage, sniff

BOM = b"\xef\xbb\xbf"


def zstd(data: bytes) -> bytes:
    """One zstd frame."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def lines_of(*prompts: str) -> bytes:
    return b"".join(orjson.dumps({"prompt": p}) + b"\n" for p in prompts)


def put(tmp_path: Path, name: str, data: bytes) -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def read(*inputs: str, column: str | None = None) -> tuple[list[Conversation], list[BadLine]]:
    good: list[Conversation] = []
    bad: list[BadLine] = []
    for item in PromptReader(inputs, column=column):
        if isinstance(item, BadLine):
            assert item.reason in REASONS
            assert len(item.key) == 16
            bad.append(item)
        else:
            good.append(item)
    return good, bad


def prompts(good: list[Conversation]) -> list[str]:
    return [c.turns[0][-1]["content"] for c in good]


def reasons(bad: list[BadLine]) -> list[tuple[int, str]]:
    return [(b.line, b.reason) for b in bad]


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))


# JSON Lines


def test_unusual_but_ordinary_lines_are_read(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\u2029d\x00"
    raw = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    data = BOM + raw + b"\r\n\r\n  \t\n" + BOM + b'{"prompt":"second"}\n\n{"prompt":"last"}'
    good, bad = read(put(tmp_path, "a.jsonl", data))
    assert bad == []
    assert prompts(good) == [text, "second", "last"]
    assert [c.line for c in good] == [1, 4, 6]


@given(
    texts=st.lists(
        st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1).filter(
            lambda text: not text.isspace()
        ),
        max_size=8,
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_lines_read_back_the_same_however_they_are_separated(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    """Any mixture of BOM, CRLF, blank lines, raw separators and a missing last newline."""
    out = b""
    for i, text in enumerate(texts):
        separators = data.draw(st.sampled_from(["", "\u2028", "\u0085", "\x0b\u2029"]))
        raw = json.dumps({"prompt": text + separators}, ensure_ascii=data.draw(st.booleans()))
        texts[i] = text + separators
        out += data.draw(st.sampled_from([b"", BOM])) + raw.encode()
        last = i == len(texts) - 1
        ends = [b"\n", b"\r\n", b"\n\n", b"\r\n \t\r\n", *([b""] if last else [])]
        out += data.draw(st.sampled_from(ends))
    path = put(tmp_path_factory.mktemp("lines"), "a.jsonl", out)
    good, bad = read(path)
    assert bad == []
    assert prompts(good) == texts


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        (b'{"prompt": "a', "invalid_json", "unexpected end of data at column"),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "after document at column 17"),
        (b"{'prompt': 'a'}", "invalid_json", "column 2"),
        (b'{"prompt": "a",}', "invalid_json", "trailing comma"),
        (b'{"prompt": NaN}', "invalid_json", "column 12"),
        (b"just text", "invalid_json", "column 1"),
        (b"\x00\x00\x00\x00", "invalid_json", "column 1"),
        (b'{"prompt": "tab\there"}', "invalid_json", "control character"),
        (b"[" * 5000, "invalid_json", "depth"),
        (b'{"prompt": "caf\xe9"}', "invalid_utf8", "byte 0xe9 at byte 16"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_utf8", "byte 0xed"),
        (b'{"prompt": "\\ud83d"}', "invalid_utf8", "surrogate"),
        (b"[1, 2]", "not_an_object", "a list"),
        (b'"text"', "not_an_object", "text"),
        (b"17", "not_an_object", "a number"),
        (b"null", "not_an_object", "null"),
    ],
)
def test_a_bad_line_is_named_and_its_neighbours_stay(
    tmp_path: Path, line: bytes, reason: str, says: str
) -> None:
    path = put(tmp_path, "a.jsonl", lines_of("before") + line + b"\r\n" + lines_of("after"))
    good, [bad] = read(path)
    assert prompts(good) == ["before", "after"]
    assert (bad.source, bad.line, bad.reason) == (path, 2, reason)
    assert says in bad.detail
    assert bad.text == line.decode("utf-8", "replace")[:2000]


def test_a_bad_line_has_the_key_of_its_bytes_alone(tmp_path: Path) -> None:
    _, [first] = read(put(tmp_path, "a.jsonl", b"{oops\n"))
    _, [moved] = read(put(tmp_path, "b.jsonl", lines_of("x") + BOM + b"{oops\r\n"))
    _, [other] = read(put(tmp_path, "c.jsonl", b"{oops!\n"))
    assert first.key == moved.key != other.key


def test_a_line_longer_than_any_row_is_one_bad_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_files, "MAX_ROW", 1000)
    for length in (1000, 1001, 2000, 2500):
        data = lines_of("before") + b'{"prompt":"' + b"x" * length + b'"}\n' + lines_of("after")
        good, bad = read(put(tmp_path, "a.jsonl", data))
        assert prompts(good) == ["before", "after"]
        assert reasons(bad) == [(2, "row_too_long")]
        assert len(bad[0].text) == 1000
    exact = lines_of("x" * (1000 - len(lines_of(""))))
    assert len(exact) == 1000
    good, bad = read(put(tmp_path, "a.jsonl", exact + lines_of("after")))
    assert (len(good), bad) == (2, [])


def test_the_text_of_a_bad_line_is_cut(tmp_path: Path) -> None:
    _, [bad] = read(put(tmp_path, "a.jsonl", b"\xff" + "ä".encode() * 5000))
    assert bad.text == "\N{REPLACEMENT CHARACTER}" + "ä" * 1999


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_utf16_is_said_to_be_utf16(tmp_path: Path, encoding: str, name: str) -> None:
    data = lines_of("a", "b").decode().encode(encoding)
    good, bad = read(put(tmp_path, name, data))
    assert good == []
    assert reasons(bad) == [(1, "unreadable_file")]
    assert "UTF-16" in bad[0].detail


def test_a_first_line_of_stray_bytes_costs_that_line_only(tmp_path: Path) -> None:
    for junk in (b"\xff\xfe junk", b"\x00" * 64):
        good, bad = read(put(tmp_path, "a.jsonl", junk + b"\n" + lines_of("a", "b")))
        assert prompts(good) == ["a", "b"]
        assert [b.line for b in bad] == [1]


@pytest.mark.parametrize("data", [b"", BOM, b"\n\n \r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a"])
def test_an_empty_file_holds_nothing(tmp_path: Path, name: str, data: bytes) -> None:
    assert read(put(tmp_path, name, data)) == ([], [])


# Compression


@pytest.mark.parametrize("compress", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl", "noname"])
def test_compression_is_seen_in_the_bytes_and_may_have_several_members(
    tmp_path: Path, compress: Callable[[bytes], bytes], name: str
) -> None:
    texts = [f"prompt {i}" for i in range(30)]
    data = b"".join(compress(lines_of(*texts[i : i + 10])) for i in (0, 10, 20))
    path = put(tmp_path, name, data)
    good, bad = read(path)
    assert (prompts(good), bad) == (texts, [])


@pytest.mark.parametrize("compress", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_cut_stream_keeps_the_rows_before_the_cut(
    tmp_path: Path, compress: Callable[[bytes], bytes], name: str
) -> None:
    texts = [f"prompt {i} " + os.urandom(150).hex() for i in range(1000)]
    body = {
        "a.jsonl": lines_of(*texts),
        "a.json": b"[" + b",\n".join(lines_of(t).strip() for t in texts) + b"]",
        "a.csv": "\n".join(["prompt", *texts, ""]).encode(),
    }[name]
    whole = compress(body)
    cut = put(tmp_path, name, whole[: len(whole) * 4 // 5])
    after = put(tmp_path, "z.jsonl", lines_of("next file"))
    good, bad = read(cut, after)
    assert prompts(good) == [*texts[: len(good) - 1], "next file"]
    assert len(good) > 400
    assert reasons(bad) == [(good[-2].line + 1, "unreadable_file")]
    assert f"after line or row {good[-2].line} could be read" in bad[0].detail


def test_a_cut_second_member_keeps_the_first(tmp_path: Path) -> None:
    for compress in (gzip.compress, zstd):
        first = lines_of(*(f"prompt {i}" for i in range(500)))
        second = compress(os.urandom(5000))
        good, bad = read(put(tmp_path, "a.jsonl", compress(first) + second[:-2500]))
        assert 480 <= len(good) <= 500
        assert prompts(good) == [f"prompt {i}" for i in range(len(good))]
        assert bad[-1].reason == "unreadable_file"


def test_a_cut_right_behind_the_only_row(tmp_path: Path) -> None:
    data = gzip.compress(lines_of("a")) + gzip.compress(lines_of("b"))[:12]
    good, bad = read(put(tmp_path, "a.jsonl.gz", data))
    assert (prompts(good), reasons(bad)) == (["a"], [(2, "unreadable_file")])


def test_flipped_bits_in_a_gzip_file_are_not_silent(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(lines_of("a", "b")))
    data[-6] ^= 1  # the checksum
    _, bad = read(put(tmp_path, "a.jsonl.gz", bytes(data)))
    assert [b.reason for b in bad] == ["unreadable_file"]


# JSON arrays and objects


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("before", [b"", BOM, b"\n  "])
def test_an_array_gives_its_elements(tmp_path: Path, indent: int | None, before: bytes) -> None:
    texts = ['plain "quoted" \\ [x] {y}, \\" ]', "\u2028\nb", "x" * 600_000 + '\\"', "z"]
    rows = [
        {"prompt": t, "n": [1, [2.5, {"a": None}], 10**25], "id": i} for i, t in enumerate(texts)
    ]
    data = before + json.dumps(rows, indent=indent, ensure_ascii=False).encode() + b"\n\n"
    good, bad = read(put(tmp_path, "a.json", data))
    assert bad == []
    assert prompts(good) == texts
    assert [c.line for c in good] == [1, 2, 3, 4]
    assert good[0].metadata == {"n": [1, [2.5, {"a": None}], 1e25]}
    [same], _ = read(put(tmp_path, "a.jsonl", json.dumps(rows[3]).encode()))
    assert same.key == good[3].key


@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(alphabet='ab"\\[]{},:é\n'),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.text(alphabet='k"\\,]'), inner, max_size=4)
            ),
            max_leaves=12,
        ),
        max_size=6,
    ),
    st.sampled_from([None, 0, 3]),
    st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_any_array_is_cut_where_its_elements_end(
    values: list[Any], indent: int | None, buffer: int
) -> None:
    """However few bytes are held at a time."""
    data = json.dumps(values, indent=indent).encode()
    stream = io.BytesIO(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_files, "_BUFFER", buffer)
        rows = list(reader_files._json_array(stream.read))
    assert [value for _, value, _ in rows] == values


@pytest.mark.parametrize(
    "broken",
    [b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"", b"1 2", b"{}}"],
)
def test_a_bad_element_costs_that_element_only(tmp_path: Path, broken: bytes) -> None:
    data = b'[{"prompt": "a"}, ' + broken + b', {"prompt": "b"}]'
    good, bad = read(put(tmp_path, "a.json", data))
    assert prompts(good) == ["a", "b"]
    assert [b.line for b in bad] == [2]


@pytest.mark.parametrize(
    "rest",
    [b"", b",", b', {"prompt": ', b', {"prompt": "b"', b', {"prompt": "b}]', b"] trailing"],
)
def test_a_broken_array_keeps_the_rows_before_and_the_next_file(
    tmp_path: Path, rest: bytes
) -> None:
    cut = put(tmp_path, "a.json", b'[{"prompt": "a"}, {"prompt": "b"}' + rest)
    good, bad = read(cut, put(tmp_path, "b.jsonl", lines_of("c")))
    expected = ["a", "b", "c"] if rest[:1] in (b",", b"]") else ["a", "c"]
    assert prompts(good) == expected
    assert [b.reason for b in bad] == ["unreadable_file"]
    assert "byte" in bad[0].detail


def test_an_element_that_never_ends_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_files, "MAX_ROW", 10_000)
    monkeypatch.setattr(reader_files, "_BUFFER", 100)
    stream = io.BytesIO(b'[1, {"a": "' + b"x" * 1_000_000)
    rows = reader_files._json_array(stream.read)
    assert next(rows)[1] == 1
    with pytest.raises(BrokenFile, match="at about byte 3 of the text does not end"):
        next(rows)
    assert stream.tell() < 100_000


def test_a_whole_file_object_is_one_row(tmp_path: Path) -> None:
    row = {"id": 1, "prompt": "a\nb", "more": {"x": [1]}}
    for indent in (None, 4):
        path = put(tmp_path, "a.json", BOM + json.dumps(row, indent=indent).encode() + b"\n")
        good, bad = read(path)
        assert (prompts(good), bad) == (["a\nb"], [])
    good, bad = read(put(tmp_path, "a.json", b'{\n "prompt": "a",\n "x": oops\n}'))
    assert (good, reasons(bad)) == ([], [(1, "invalid_json")])


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a.json", b'[\n {"prompt"', "array"),
        ("a.json", b'[{"prompt": "a"}]\n', "array"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt"', "array"),
        ("a.json", b"[1]\n[2]\n", "lines"),
        ("a.json", b"[1]\n \r\n", "array"),
        ("a.json", b'{"prompt":\n\n{"prompt"', "lines"),
        ("a.jsonl", b"[1]\n", "lines"),
        ("a.json", b'{"prompt": "a"}\n{"prompt"', "lines"),
        ("a.json", b'{"prompt": "a\n{"prompt"', "lines"),
        ("a.json", b'{"prompt": \n{"prompt"', "lines"),
        ("a.json", b'{\n  "prompt"', "object"),
        ("a.json", b'{"a": 1,\n "b": 2}', "object"),
        ("a.json", b"prompt,id\nx,1\n", "lines"),
        ("-", b"prompt,id\nx,1\n", "csv"),
        ("-", b'id\t"prompt"\r\nx\t1\n', "tsv"),
        ("-", b"hello, world\n", "lines"),
        ("a.CSV.gz", b"{}", "csv"),
        ("a.tsv.zst", b"{}", "tsv"),
    ],
)
def test_the_format_is_found(name: str, head: bytes, kind: str) -> None:
    assert sniff(name, head, ("prompt",)) == kind
    assert sniff(name, BOM + head, ("prompt",)) == kind


# CSV


def test_csv_with_quotes_newlines_and_a_bom(tmp_path: Path) -> None:
    sink = io.StringIO(newline="")
    writer = csv.writer(sink)  # ends rows with CRLF
    writer.writerow(["id", "prompt", "note"])
    writer.writerow(["1", 'say "hi",\r\nthen\nstop\u2028', ""])
    writer.writerow(["2", "x" * 200_000, "n"])
    data = BOM + sink.getvalue().encode() + b"\r\n3,last,n"
    for name, raw in (("a.csv", data), ("a.csv.gz", gzip.compress(data)), ("b.csv", zstd(data))):
        good, bad = read(put(tmp_path, name, raw))
        assert bad == []
        assert prompts(good) == ['say "hi",\r\nthen\nstop\u2028', "x" * 200_000, "last"]
        assert [c.given_id for c in good] == ["1", "2", "3"]
        assert [c.line for c in good] == [2, 5, 7]
        assert [c.metadata for c in good] == [{}, {"note": "n"}, {"note": "n"}]


def test_bad_csv_rows_stop_nothing(tmp_path: Path) -> None:
    data = b'prompt,n\na,1\nb\nc,1,2\n"d"x,1\ne\xff,1\n"f\nf",1\n,5\ng,\x00\n"h\nh,1\n'
    good, bad = read(put(tmp_path, "a.csv", data))
    assert prompts(good) == ["a", "f\nf", "g"]
    assert [c.line for c in good] == [2, 7, 10]
    assert reasons(bad) == [
        (3, "wrong_field_count"),
        (4, "wrong_field_count"),
        (5, "invalid_csv"),
        (6, "invalid_utf8"),
        (9, "empty_prompt"),
        (11, "invalid_csv"),
    ]
    assert bad[0].detail == "1 fields, header has 2"
    assert "0xff" in bad[3].detail
    assert bad[5].text == '"h\nh,1'


@pytest.mark.parametrize(
    ("header", "says"), [(b"prompt,id,prompt", "names prompt twice"), (b'"prompt"x,id', "line")]
)
def test_a_csv_header_that_cannot_be_used(tmp_path: Path, header: bytes, says: str) -> None:
    """The row after it is not taken for the header."""
    good, bad = read(put(tmp_path, "a.csv", header + b"\nprompt,2,3\n"))
    assert (good, reasons(bad)) == ([], [(1, "unreadable_file")])
    assert says in bad[0].detail


def test_empty_csv_column_names_may_repeat(tmp_path: Path) -> None:
    good, bad = read(put(tmp_path, "a.csv", b"prompt,,\na,,\n"))
    assert (prompts(good), bad) == (["a"], [])


def test_csv_cells_with_json(tmp_path: Path) -> None:
    cells = [
        json.dumps([{"role": "user", "content": "a"}]),
        json.dumps([{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]),
        "[{'role': 'user'}]",
    ]
    sink = io.StringIO()
    csv.writer(sink).writerows([["messages"], *[[c] for c in cells]])
    good, bad = read(put(tmp_path, "a.csv", sink.getvalue().encode()))
    assert prompts(good) == ["a", "b"]
    assert reasons(bad) == [(4, "bad_messages")]


def test_a_csv_quote_that_is_never_closed_is_not_held_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_files, "MAX_ROW", 10_000)
    data = b'prompt\nok\n"never closed\n' + b"x\n" * 50_000
    good, bad = read(put(tmp_path, "a.csv", data))
    assert prompts(good) == ["ok"]
    assert reasons(bad) == [(3, "unreadable_file")]
    assert "is a quote not closed?" in bad[0].detail


def test_tsv(tmp_path: Path) -> None:
    good, bad = read(put(tmp_path, "a.tsv", b"id\tprompt\n7\ta, b\n"))
    assert (prompts(good), good[0].given_id, bad) == (["a, b"], "7", [])


# Parquet


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def test_parquet_rows_have_the_keys_of_their_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "q"}], "extra": {"x": 1}},
        {
            "id": "b",
            "messages": [
                {"role": "user", "content": "q", "name": "Ann"},
                {"role": "assistant", "content": "a"},
            ],
            "extra": {"y": None},
        },
        {"id": "c", "messages": [{"role": "alien", "content": "q"}]},
    ]
    lines = put(tmp_path, "a.jsonl", b"\n".join(map(orjson.dumps, rows)))
    data = parquet(pa.Table.from_pylist(rows))
    expected, _ = read(lines)
    assert [c.given_id for c in expected] == ["a", "b"]
    for name, raw in (
        ("a.parquet", data),
        ("noname", data),
        ("a.parquet.gz", gzip.compress(data)),
        ("b.parquet.zst", zstd(data)),
        ("-", data),
    ):
        if name == "-":
            give_stdin(monkeypatch, raw)
        good, bad = read(name if name == "-" else put(tmp_path, name, raw))
        assert [c.key for c in good] == [c.key for c in expected]
        assert [c.turns for c in good] == [c.turns for c in expected]
        assert good[0].metadata == {"extra": {"x": 1}}
        assert reasons(bad) == [(3, "unknown_role")]
        assert '"alien"' in bad[0].text


def test_parquet_values_of_every_type_end_up_in_the_metadata(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "nanos": pa.array([1_700_000_000_000_000_001] * 2, pa.timestamp("ns")),
            "year": pa.array([253_402_300_800_000, 0], pa.timestamp("ms")),
            "day": [day, day],
            "raw": [b"\xff", b"x"],
            "price": pa.array([1, 2], pa.int64()).cast(pa.decimal128(22, 2)),
            "took": [datetime.timedelta(1)] * 2,
            "ids": [[1, None], None],
        }
    )
    good, bad = read(put(tmp_path, "a.parquet", parquet(table)))
    assert (prompts(good), bad) == (["a", "b"], [])
    assert orjson.loads(orjson.dumps(good[0].metadata, default=str))["ids"] == [1, None]
    assert str(good[0].metadata["nanos"]).startswith("2023-11-14 22:13:20")
    assert str(good[0].metadata["year"]).startswith("10000-01-01")
    assert good[0].metadata["raw"] == b"\xff"


def test_parquet_text_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    good, bad = read(put(tmp_path, "a.parquet", parquet(pa.table({"prompt": text}))))
    assert prompts(good) == ["a", "c"]
    assert reasons(bad) == [(2, "invalid_utf8")]


def test_broken_parquet(tmp_path: Path) -> None:
    data = parquet(pa.table({"prompt": ["a"] * 10}))
    for broken in (data[:-20], b"PAR1", b"PAR1" + b"x" * 50, b"something else"):
        path = put(tmp_path, "a.parquet", broken)
        good, bad = read(path, put(tmp_path, "b.jsonl", lines_of("next")))
        assert prompts(good) == ["next"]
        assert reasons(bad) == [(1, "unreadable_file")]
    damaged = data[:30] + b"\xff" * 20 + data[50:]
    good, bad = read(put(tmp_path, "c.parquet", damaged))
    assert good == []
    assert [b.reason for b in bad] == ["unreadable_file"]


# Standard input, several files, what the user names


@pytest.mark.parametrize(
    "data",
    [
        lines_of("a", "b"),
        b'[{"prompt": "a"}, {"prompt": "b"}]',
        b"prompt\na\nb\n",
        gzip.compress(lines_of("a", "b")),
        zstd(b"prompt\tid\na\t1\nb\t2"),
    ],
    ids=["lines", "array", "csv", "gzip", "zstd"],
)
def test_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    give_stdin(monkeypatch, data)
    reader = PromptReader(["-"])
    items = list(reader)
    assert [i.source for i in items] == ["stdin", "stdin"]
    assert prompts([i for i in items if isinstance(i, Conversation)]) == ["a", "b"]
    assert reader.position.bytes_total is None
    assert reader.position.bytes_read == len(data)


def test_a_pipe_that_gives_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickle(io.RawIOBase):
        rest = BOM + lines_of(*map(str, range(50)))

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            piece, self.rest = self.rest[:1], self.rest[1:]
            buffer[: len(piece)] = piece
            return len(piece)

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(Trickle())))
    good, bad = read("-")
    assert (prompts(good), bad) == ([str(i) for i in range(50)], [])


def test_a_named_pipe_is_read_once(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = PromptReader([path])  # does not open it: that would wait for a writer
    assert reader.position.bytes_total is None
    writer = threading.Thread(target=Path(path).write_bytes, args=[lines_of("a", "b")])
    writer.start()
    items = list(reader)
    writer.join()
    assert prompts([i for i in items if isinstance(i, Conversation)]) == ["a", "b"]


def test_files_globs_and_directories(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl.gz", "c.JSON", "notes.md", "d.parquet"]
    for name in names:
        put(tmp_path, name, b"")
    (tmp_path / "sub").mkdir()
    deep = put(tmp_path / "sub", "e.jsonl", b"")
    at = [str(tmp_path / name) for name in names]
    assert PromptReader([str(tmp_path)]).files == [at[1], at[0], at[2], at[4]]
    assert PromptReader([f"{tmp_path}/*.jsonl*"]).files == [at[1], at[0]]
    assert PromptReader([f"{tmp_path}/**/*.jsonl"]).files == [at[0], deep]
    twice = [at[0], f"{tmp_path}/*.jsonl", f"{tmp_path}/sub/../b.jsonl", "-", "-"]
    assert PromptReader(twice).files == [at[0], "-"]
    odd = put(tmp_path, "x[1].jsonl", b"")
    assert PromptReader([odd]).files == [odd]


def test_inputs_that_do_not_exist_are_refused_at_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "gone.jsonl")
    for inputs, says in (
        ([], "no prompt file"),
        ([str(tmp_path / "none.jsonl")], "does not exist"),
        ([f"{tmp_path}/*.csv"], "no file matches"),
        ([str(empty)], "holds no file"),
        ([str(link)], "gone.jsonl, which does not exist"),
        (["s3://bucket/a.jsonl"], "remote address"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            PromptReader(inputs)
        assert all(name in str(caught.value) for name in inputs)


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, "a.jsonl", b"")

    def deny(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(InputError, match="Permission denied"):
        PromptReader([path])


def test_a_file_that_vanishes_does_not_stop_the_others(tmp_path: Path) -> None:
    gone, there = (put(tmp_path, n, lines_of("a")) for n in ("a.jsonl", "b.jsonl"))
    reader = PromptReader([gone, there])
    os.remove(gone)
    assert [type(item) for item in reader] == [BadLine, Conversation]


def test_position_and_shapes_grow_while_reading(tmp_path: Path) -> None:
    files = {
        "a.jsonl.gz": gzip.compress(lines_of(*map(str, range(9))) + b"oops\n"),
        "b.csv": b"question\nx\n",
        "c.parquet": parquet(pa.table({"prompt": [str(i) for i in range(700)]})),
        "d.json": b'[{"prompt": "a"}, {"pro',
    }
    paths = [put(tmp_path, name, data) for name, data in files.items()]
    reader = PromptReader(paths)
    total = sum(map(len, files.values()))
    for _ in range(2):  # a second reading begins anew
        seen = [0]
        for n, _ in enumerate(reader, 1):
            assert reader.position.rows_read == n
            assert seen[-1] <= reader.position.bytes_read <= total
            seen.append(reader.position.bytes_read)
        assert reader.position.bytes_total == reader.position.bytes_read == total
        assert reader.position.rows_read == 9 + 1 + 1 + 700 + 1 + 1
        assert reader.shapes == {"prompt": 9 + 700 + 1, "question": 1}
        assert len(set(seen)) > 4


# Memory


@pytest.mark.parametrize("kind", ["lines", "array", "csv", "gzip"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    text = b"x" * 4000
    row = b'{"prompt": "' + text + b'", "id": %d}'
    path = tmp_path / {"lines": "a.jsonl", "array": "a.json", "csv": "a.csv"}.get(
        kind, "a.jsonl.gz"
    )
    file: Any
    with gzip.open(path, "wb", 1) if kind == "gzip" else path.open("wb") as file:
        if kind == "csv":
            file.write(b"prompt,id\n")
        for i in range(10_000):
            if kind == "csv":
                file.write(b'"' + text + b'",%d\n' % i)
            else:
                file.write((b"," if i else b"[") * (kind == "array") + row % i + b"\n")
        file.write(b"]" * (kind == "array"))
    reader = PromptReader([str(path)])
    tracemalloc.start()
    try:
        count = sum(isinstance(item, Conversation) for item in reader)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 10_000
    assert peak < 4 << 20


def test_memory_does_not_grow_with_a_parquet_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": [f"{i} " + "x" * 4000 for i in range(10_000)]})
    pq.write_table(table, path, use_dictionary=False, compression="none")
    assert pq.ParquetFile(path).num_row_groups == 1
    del table
    before = pa.total_allocated_bytes()
    tracemalloc.start()  # pyarrow reads a Python file through objects of Python's
    try:
        held = [pa.total_allocated_bytes() - before for _ in PromptReader([str(path)])]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(held) == 10_000
    assert max(held) + peak < 16 << 20


def test_rows_are_given_before_the_end_is_read(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", lines_of(*["x" * 1000] * 5000))
    reader = PromptReader([path])
    next(iter(reader))
    assert reader.position.bytes_read < os.path.getsize(path) / 4


def test_read_rows_gives_damage_in_the_place_of_a_row(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", b'{"a": 1}\n{oops\n')
    (_, first, _), (line, second, raw) = read_rows(path, lambda size: None)
    assert first == {"a": 1}
    assert isinstance(second, Damage)
    assert (line, second.reason, raw) == (2, "invalid_json", b"{oops")


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_only_the_prompt_itself_is_packed(name: str, tmp_path: Path) -> None:
    """A column of ids that is not the prompt is metadata, as it stands."""
    path = tmp_path / name
    row = {"mine": "hello", "prompt_ids": [1, 2], "other": {"prompt_ids": [3]}}
    line = json.dumps(row)
    path.write_text(line + "\n" if name == "p.jsonl" else f"[{line}]")
    (found,) = PromptReader([str(path)])
    assert isinstance(found, Conversation)
    assert found.prompt_ids == [1, 2]
    assert found.metadata == {"mine": "hello", "other": {"prompt_ids": [3]}}
    (found,) = PromptReader([str(path)], column="mine")
    assert isinstance(found, Conversation)
    assert found.metadata == {k: v for k, v in row.items() if k != "mine"}
    assert type(found.metadata["prompt_ids"]) is list
