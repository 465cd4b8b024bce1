"""The compiled functions do what the plain ones do, whatever they are given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
import zipfile
import zlib
from array import array
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capturing import check_run, config_for, numbered, run_eyas, write_prompts
from eyas import Run, capture, core
from eyas.core import plain
from eyas.demo.server import TARGET
from eyas.ids import Ids
from eyas.trace import Rejected, Trace
from fault_server import LIES, OPENER, Fault, FaultServer, Target, lying

ROOT = Path(__file__).parents[1]
CAN_COMPILE = bool(
    shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)

try:
    from eyas.core import _fast
except ImportError:
    _fast = plain  # type: ignore[assignment]

compiled = pytest.mark.skipif(_fast is plain, reason="the core was not compiled here")
each = pytest.mark.parametrize("one", [plain, pytest.param(_fast, marks=compiled)])

INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(st.integers(0, 12) | INT32, max_size=30)
FEW = st.lists(st.integers(0, 3), max_size=700)


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def test_the_core_is_compiled_where_it_can_be() -> None:
    if os.environ.get("EYAS_PLAIN") or not CAN_COMPILE:
        pytest.skip("there is no C compiler, or EYAS_PLAIN is set")
    assert core.COMPILED


@compiled
def test_both_have_the_same_functions() -> None:
    names = [name for name, value in vars(core).items() if callable(value)]
    assert sorted(names) == sorted(n for n in vars(_fast) if not n.startswith("_"))
    assert all(callable(getattr(plain, name)) for name in names)


@pytest.mark.parametrize("plainly", [True, False])
def test_the_plain_ones_can_be_chosen(plainly: bool) -> None:
    code = "from eyas import core; print(core.COMPILED, core.find.__module__)"
    environment = {k: v for k, v in os.environ.items() if k != "EYAS_PLAIN"}
    environment |= {"EYAS_PLAIN": "1"} if plainly else {}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert said == (
        ["False", "eyas.core.plain"] if plainly or _fast is plain else ["True", "eyas.core._fast"]
    )


# -- the same, whatever they are given -------------------------------------------------------------


@compiled
@given(
    st.lists(INT32 | st.integers() | st.booleans() | st.floats() | st.none(), max_size=6) | IDS,
    st.sampled_from([0, 5, -(2**31)]),
)
def test_pack(items: list[object], least: int) -> None:
    assert _fast.pack(items, least) == plain.pack(items, least)
    assert _fast.pack(tuple(items), least) == plain.pack(items, least)


@compiled
@given(IDS, st.integers(0, 14) | st.just(2**31))
def test_within(ids: list[int], size: int) -> None:
    assert _fast.within(packed(ids), size) is plain.within(packed(ids), size)


@compiled
@given(st.lists(st.integers(-1, 12), max_size=40), st.binary(min_size=8, max_size=14))
def test_find(ids: list[int], table: bytes) -> None:
    assert _fast.find(packed(ids), table) == plain.find(packed(ids), table)


@compiled
@given(FEW, st.integers(1, 140), st.integers(1, 700))
def test_is_loop(ids: list[int], period: int, length: int) -> None:
    assert _fast.is_loop(packed(ids)) is plain.is_loop(packed(ids))
    tail = (ids or [1])[-period:]
    looped = ids + (tail * length)[:length]
    assert _fast.is_loop(packed(looped)) is plain.is_loop(packed(looped))


@compiled
@given(
    st.lists(st.text(max_size=3).map(str.encode) | st.binary(max_size=2), min_size=1, max_size=9),
    st.lists(st.integers(-2, 10), max_size=12),
    st.sampled_from(["", "a", "\ud800", "\U0001f985"]),
    st.booleans(),
)
def test_spells(pieces: list[bytes], ids: list[int], more: str, honest: bool) -> None:
    ends = array("i", [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]).tobytes()
    joined = b"".join(pieces[i] for i in ids if 0 <= i < len(pieces))
    text = joined.decode("utf-8", "replace") + ("" if honest else more)
    given = (packed(ids), b"".join(pieces), ends, text)
    assert _fast.spells(*given) is plain.spells(*given)
    if not more and joined.decode("utf-8", "ignore").encode() == joined:
        assert _fast.spells(*given)


@compiled
@given(st.lists(IDS, max_size=5))
def test_lists_are_written_and_read(rows: list[list[int]]) -> None:
    texts = [_fast.write_list(packed(ids)) for ids in rows]
    assert texts == [plain.write_list(packed(ids)) for ids in rows]
    assert [orjson.loads(text) for text in texts] == rows
    texts.insert(len(texts) // 2, b"null")
    assert _fast.read_lists(texts) == plain.read_lists(texts)


BROKEN = [b"", b"[", b"]", b"1", b"[1", b"[1,]", b"[,1]", b"[1 ,2]", b"[1, 2]", b"[1.0]", b"[01]",
          b"[-]", b"[-01]", b"[1]]", b"[[1]]", b"[1],[2]", b"[true]", b"[null]", b'["1"]', b"{}",
          b"[2147483648]", b"[-2147483649]", b"[99999999999999999999999]", b"[1e2]", b"nul",
          b" [1]", b"[1] ", b"[1\x00]", b"[ ]"]  # fmt: skip


@each
@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_list_of_ids_is_named(one: ModuleType, text: bytes) -> None:
    with pytest.raises(ValueError):
        one.read_lists([b"[1,2]", text, b"[]"])


@compiled
@given(
    st.lists(
        st.tuples(st.sampled_from(["T", "R", "TT", "", "\n"]), IDS | st.none(), st.text(max_size=5)),
        max_size=4,
    ),
    st.sampled_from(["nothing", "a byte", "a cut", "a break"]),
    st.integers(0, 10**6),
    st.integers(0, 255),
)
def test_lines_of_a_journal(
    rows: list[tuple[str, list[int] | None, str]], damage: str, at: int, byte: int
) -> None:
    block = b""
    for kind, ids, text in rows:
        body = f"{kind} {orjson.dumps(ids).decode()} [1] {orjson.dumps(text).decode()}".encode()
        block += b"%08x %b\n" % (zlib.crc32(body), body)
    at %= len(block) + 1
    if damage == "a byte":
        block = block[:at] + bytes([byte]) + block[at + 1 :]
    elif damage == "a cut":
        block = block[:at]
    elif damage == "a break":
        block = block[:at] + b"\n" + block[at:]
    found = _fast.read_lines(block, b"T")
    assert found == plain.read_lines(block, b"T")
    if damage == "nothing":
        mine = [(ids, text) for kind, ids, text in rows if kind == "T"]
        assert [(orjson.loads(a), orjson.loads(c)) for a, _, c in zip(*found, strict=True)] == mine


@each
def test_ids_of_each_number_of_digits(one: ModuleType) -> None:
    borders = [10**digits + more for digits in range(10) for more in (-1, 0, 1)]
    ids = [*borders, *(-border for border in borders), *range(1200), *range(999_000, 1_001_100)]
    text = orjson.dumps(ids)
    assert one.write_list(packed(ids)) == text
    assert one.read_lists([text]) == (packed(ids), packed([len(ids)]))


@each
def test_the_borders_of_int32_are_ids(one: ModuleType) -> None:
    ids = [-(2**31), -1, 0, 2**31 - 1]
    assert one.pack(ids, -(2**31)) == packed(ids)
    assert one.write_list(packed(ids)) == b"[-2147483648,-1,0,2147483647]"
    assert one.read_lists([one.write_list(packed(ids))]) == (packed(ids), packed([4]))
    assert one.pack(ids, 0) is None and one.pack([2**31], 0) is None
    assert one.read_object(b'{"a":[2147483647]}', ("a",), orjson.loads) == {"a": packed(ids[-1:])}
    assert one.read_object(b'{"a":[2147483648]}', ("a",), orjson.loads) is None


# -- reading an object -----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text('a"\\[]{},:1', max_size=9),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["ids", "b", '"', "[", "\\"]), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
SPACE = st.sampled_from(["", "", " ", "\n", "\t \r"])


def expected(raw: bytes) -> object:
    """What any JSON reader finds, the list under ``ids`` packed where it is one of ids."""
    found = orjson.loads(raw)
    ids = found.get("ids")
    if type(ids) is list:
        found["ids"] = plain.pack(ids, 0)
        if found["ids"] is None:
            return None
    return found


@each
@given(
    st.lists(st.tuples(st.sampled_from(["ids", "b", "text", "idsx", ""]), JSON), max_size=4),
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    st.lists(SPACE, min_size=4, max_size=4),
    st.integers(0, 4),
)
def test_an_object_is_read_as_any_reader_reads_it(
    one: ModuleType,
    others: list[tuple[str, object]],
    ids: list[int],
    space: list[str],
    at: int,
) -> None:
    a, b, c, d = space
    written = f"{a}[{b}" + f"{c},{d}".join(map(str, ids)) + f"{d}]"
    members = [f"{orjson.dumps(name).decode()}{a}:{orjson.dumps(v).decode()}" for name, v in others]
    members.insert(at, f'{b}"ids"{c}:{written}')
    raw = (a + "{" + b + ",".join(members) + c + "}" + d).encode()
    read = one.read_object(raw, ("ids", "more"), orjson.loads)
    names = [name for name, _ in others]
    if read is not None or names.count("ids") == 0:
        assert read == expected(raw)
        assert type(read) is dict


@compiled
@given(st.binary(max_size=40) | st.text('{}[]",:\\ 12idsn\n', max_size=60).map(str.encode))
def test_what_is_no_json_is_never_read(raw: bytes) -> None:
    """Nor is anything read otherwise than by the usual reader."""
    read = _fast.read_object(raw, ("ids",), orjson.loads)
    try:
        wanted = expected(raw)
    except (orjson.JSONDecodeError, AttributeError):
        wanted = None
    assert read is None or read == wanted


@compiled
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.sampled_from([*list(b'{}[]",:\\ 0-.e'), 0, 255]),
    st.booleans(),
)
def test_a_damaged_answer_is_read_right_or_not_at_all(
    ids: list[int], at: int, byte: int, replaces: bool
) -> None:
    whole = orjson.dumps({"text": 'a"\\[1]', "ids": ids, "meta": {"ids": [1], "b": "]}"}, "more": [2]})
    at %= len(whole)
    raw = whole[:at] + bytes([byte]) + whole[at + replaces :]
    read = _fast.read_object(raw, ("ids", "more"), orjson.loads)
    try:
        wanted = plain.read_object(raw, ("ids", "more"), orjson.loads)
    except orjson.JSONDecodeError:
        wanted = None
    assert read is None or read == wanted


@each
@pytest.mark.parametrize(
    "ids",
    ["[1,2.0]", "[1,true]", "[true]", "[1,null]", '[1,"2"]', "[-1,2]", "[2147483648]", "[1e3]",
     "[99999999999999999999]", "[[1,2]]", "[[1],[2]]", "[1,[2,3]]", "[{}]", "[1,[2],3]",
     "[1,[2,3],[]]", "[1,2,[ 3 ]]", '["]",1]'],
)  # fmt: skip
def test_lists_of_anything_else_are_left_to_the_usual_reader(one: ModuleType, ids: str) -> None:
    raw = f'{{"ids":{ids},"text":"a"}}'.encode()
    assert one.read_object(raw, ("ids",), orjson.loads) is None


@each
def test_names_in_a_text_or_within_something_mislead_nobody(one: ModuleType) -> None:
    told = {"text": '"ids":[[1]]', "meta": {"ids": [1, 2]}, "ids": [3], "list": [{"ids": [4]}]}
    read = one.read_object(orjson.dumps(told), ("ids",), orjson.loads)
    assert read == {**told, "ids": packed([3])}


@each
@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"7", b'"a"', b"null", b'{"a":1}}', b"\xff",
                                 b'{"a":[1]', b'{"a":[1]]', b'{"a":[1],}', b'{"a"[1]}', b'{"a":"'])  # fmt: skip
def test_what_is_no_object_is_left_to_the_usual_reader(one: ModuleType, raw: bytes) -> None:
    assert one.read_object(raw, ("a",), orjson.loads) is None


@each
def test_what_the_reader_itself_raises_is_not_hidden(one: ModuleType) -> None:
    def fails(_: bytes) -> object:
        raise KeyError("fault")

    with pytest.raises(KeyError, match="fault"):
        one.read_object(b'{"a":[1]}', ("a",), fails)


@compiled
@pytest.mark.parametrize(
    "call",
    [
        lambda: _fast.find(b""),  # type: ignore[call-arg]
        lambda: _fast.find("", b""),  # type: ignore[arg-type]
        lambda: _fast.write_list([1]),  # type: ignore[arg-type]
        lambda: _fast.read_lists((b"[]",)),  # type: ignore[arg-type]
        lambda: _fast.read_lists(["[]"]),  # type: ignore[list-item]
        lambda: _fast.read_object(b"{}", ["a"], orjson.loads),  # type: ignore[arg-type]
        lambda: _fast.read_object(b'{"a":1}', (1,), orjson.loads),  # type: ignore[arg-type]
        lambda: _fast.pack(7, 0),  # type: ignore[arg-type]
        lambda: _fast.spells(b"", b"", b"", b""),  # type: ignore[arg-type]
        lambda: _fast.within(b"", "a"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_an_error_of_pythons(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, SystemError)):
        call()


@compiled
def test_ends_beyond_the_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="ends"):
        _fast.spells(packed([0]), b"ab", packed([3]), "ab?")


@compiled
def test_nothing_is_kept_or_lost() -> None:
    """Objects that come and go leave their counts as they were."""
    ids, table = packed([1, 2, 3]), bytes(5)
    raw, names = b'{"a":[1,2],"b":{"c":1}}', ("a",)
    rows = [b"[1,2]", b"null"]
    watched = [ids, table, raw, names, rows, rows[0], orjson.loads]

    def once() -> None:
        _fast.find(ids, table)
        _fast.within(ids, 2)
        _fast.is_loop(ids)
        _fast.write_list(ids)
        _fast.read_lists(rows)
        _fast.read_object(raw, names, orjson.loads)
        _fast.read_object(raw[:-1], names, orjson.loads)
        _fast.read_object(b'{"a":[1,"2"]}', names, orjson.loads)
        _fast.pack([1, 2], 0)
        _fast.pack([1, None], 0)
        with pytest.raises(ValueError):
            _fast.read_lists([rows[0], b"[1"])

    once()
    before = [sys.getrefcount(item) for item in watched]
    for _ in range(50):
        once()
    assert [sys.getrefcount(item) for item in watched] == before


# -- a whole capture -------------------------------------------------------------------------------


def ready_made(target: Target, count: int) -> list[dict[str, Any]]:
    """Rows with prompt ids."""
    encode = target.tokenizer.encode
    return [{"id": f"r{n}", "prompt_ids": [*encode(f"say {n}"), OPENER]} for n in range(count)]


@compiled
def test_a_capture_is_the_same_with_either(tmp_path: Path) -> None:
    """Honest answers and every lie, each told to the same prompts."""
    target = Target()
    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(60), *ready_made(target, 60)])
    lies = [None, *LIES]

    def policy(body: dict[str, Any], honest: dict[str, Any]) -> Fault | None:
        lie = lies[sum(body["input_ids"]) % len(lies)]
        return None if lie is None else lying(lie)(body, honest)

    found = []
    with FaultServer(target, policy=policy) as server:
        for name, plainly in (("fast", ""), ("plain", "1")):
            run = tmp_path / name
            done = run_eyas(
                "capture", str(prompts), "--out", str(run), "--url", server.url, "--tokenizer",
                str(TARGET), "--max-new-tokens", "200", "--no-probe", env={"EYAS_PLAIN": plainly},
            )  # fmt: skip
            assert done.returncode == 3, done.stderr  # some are rejected
            check_run(target, run)
            rows = [*Run(run).traces(), *Run(run).rejected()]
            found.append(sorted(map(essence, rows), key=str))
    assert found[0] == found[1]
    assert {row[1] for row in found[0]} >= {LIES[name][1] for name in LIES} - {"finish_reason"}


def test_what_is_packed_stays_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of ready-made prompts makes no Python numbers of ids that are as they should be."""
    target = Target()
    prompts = write_prompts(tmp_path / "p.jsonl", ready_made(target, 60))
    unpacked: list[str] = []
    with FaultServer(target) as server:
        for way in (Ids.tolist, Ids.__iter__):

            def told(ids: Ids, way: Callable[[Ids], object] = way) -> object:
                unpacked.append("".join(traceback.format_stack(limit=3)))
                return way(ids)

            monkeypatch.setattr(Ids, way.__name__, told)
        config = config_for(server, prompts, tmp_path / "run")
        assert capture(config, probe=False).done == 60
        monkeypatch.undo()
        check_run(target, tmp_path / "run")
    assert not unpacked, unpacked[0]


def essence(row: Trace | Rejected) -> tuple[object, ...]:
    """What a row says, but for when and where."""
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    for name in ("finished_at", "server", "tries", "text", "detail"):
        values.pop(name, None)
    return row.id, values.get("reason"), values


# -- how it is built -------------------------------------------------------------------------------


def build(target: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Build a wheel of a copy of the project; what hatchling said, and what the wheel holds."""
    pytest.importorskip("hatchling", reason="the package cannot be built here")
    copy = target / "project"
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        copy.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(
        ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "demo")
    )
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target / "dist")],
        cwd=copy, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    (wheel,) = (target / "dist").glob("*.whl")
    return done, [wheel.name, *zipfile.ZipFile(wheel).namelist()]


@pytest.mark.skipif(not CAN_COMPILE, reason="there is no C compiler")
def test_a_wheel_holds_what_was_compiled(tmp_path: Path) -> None:
    done, (name, *files) = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eyas/core/_fast.abi3.so" in files and "none-any" not in name


def test_without_a_compiler_there_is_a_wheel_of_python_alone(tmp_path: Path) -> None:
    done, (name, *files) = build(tmp_path, CC="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert "runs without its compiled core" in done.stderr + done.stdout
    assert "eyas/core/plain.py" in files and not [f for f in files if f.endswith(".so")]
    assert name.endswith("py3-none-any.whl")
