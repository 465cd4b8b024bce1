"""The live view: what stands on a terminal, in a pipe, and in a window that is changed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import pairwise

import pytest

from eyas.cli import screen as screens
from eyas.cli.live import Live
from eyas.cli.panel import cells, fit, one_line, panel
from eyas.cli.screen import Screen
from eyas.pace import Pace
from eyas.progress import Progress, ServerProgress
from eyas.status import Status, status_of
from terminal import Terminal

HOSTILE = "\x1b[2J\x9b3J\u202e\r\n\x07\u061c\ud800\u200d日本語テキスト🦅  two blanks"
UNSAFE = ("\x1b", "\x9b", "\u202e", "\r", "\n", "\x07", "\u061c", "\ud800")


def progress(seconds: float = 100.0, new: int = 800, servers: int = 2, **more: object) -> Progress:
    values: dict[str, object] = {
        "done": new, "new": new, "rejected": 2, "truncated": 14, "input": 2000,
        "input_known": True, "prompt_tokens": 100_000, "output_tokens": 500_000,
        "cached_tokens": 43_000, "in_flight": 64, "seconds": seconds,
        "finish_reasons": {"length": 14, "stop": 780, "missing_closer": 2},
        "servers": [
            ServerProgress(url=f"http://10.0.0.{n}:30000", up=n != 1, slots=32, in_flight=32,
                           queued=4, answered=400, output_tokens=250_000)
            for n in range(servers)
        ],
        "problems": ["q1/0/0 rejected: missing_closer: no closer", "http://10.0.0.1:30000 is down"],
        **more,
    }  # fmt: skip
    return Progress(**values)  # type: ignore[arg-type]


def status(**more: object) -> Status:
    pace = Pace()
    start = Progress(input=2000, input_known=True, in_flight=64)
    pace.take(start)
    now = progress(**more)  # type: ignore[arg-type]
    return status_of(now, pace.take(now))


def text_of(shown: Status, width: int = 200, height: int = 100, **more: str) -> list[str]:
    return [line.plain for line in panel(shown, width=width, height=height, **more)]


def test_what_stands_in_it() -> None:
    assert text_of(status()) == [
        "rows      802/2,000 (40%)  800 done  2 rejected  1,198 pending  14 truncated",
        "time      1m40s  ETA 2m30s",
        "tokens    5,000 out and 1,000 in a second  overall 5,000 out and 1,000 in",
        "          500,000 out and 100,000 in altogether  43% of in cached",
        "requests  64 in flight  8 queued  1 of 2 servers up",
        "server    http://10.0.0.0:30000  32 in flight  4 queued  2,500 out a second",
        "server    DOWN  http://10.0.0.1:30000",
        "finish    stop 780  length 14  missing_closer 2",
        "problem   q1/0/0 rejected: missing_closer: no closer",
        "problem   http://10.0.0.1:30000 is down",
    ]


def test_many_servers_are_summed() -> None:
    lines = text_of(status(servers=20))
    assert "requests  64 in flight  80 queued  19 of 20 servers up" in lines
    assert "down      1 servers  http://10.0.0.1:30000" in lines
    assert sum(line.startswith("server") for line in lines) == 0
    assert sum(line.startswith("server") for line in text_of(status(servers=8))) == 8


def test_a_pause_and_an_unknown_input_are_told() -> None:
    lines = text_of(status(input_known=False, new=0, output_tokens=0))
    assert lines[0].startswith("rows      2  0 done  2 rejected")
    assert lines[1] == "time      1m40s  ETA not known yet  no row finished for 1m40s"
    guess = text_of(status(input_known=False, input_fraction=0.5))
    assert guess[0].startswith("rows      802/~4,000 (20%)  800 done  2 rejected  ~3,198 pending")


@pytest.mark.parametrize("width", [1, 2, 9, 15, 20, 21, 40, 79, 80, 200, 1000])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 8, 24])
@pytest.mark.parametrize("servers", [0, 1, 20])
def test_no_window_is_too_small(width: int, height: int, servers: int) -> None:
    shown = status(servers=servers, problems=[HOSTILE] * 5)
    lines = panel(shown, width=width, height=height)
    assert 1 <= len(lines) <= height
    for line in lines:
        assert cells(line.plain) <= width
        assert not any(char in line.plain for char in UNSAFE)


def test_what_matters_most_is_left_in_a_low_window() -> None:
    labels = [line.split(" ")[0] for line in text_of(status(), height=6)]
    assert labels == ["rows", "time", "tokens", "requests", "server", "problem"]
    assert "DOWN" in text_of(status(), height=5)[-1]
    assert [line.split(" ")[0] for line in text_of(status(), height=2)] == ["rows", "time"]


def test_no_figure_is_cut() -> None:
    """A half of 1,234 would be another number."""
    assert fit("1,234 done  5,678 pending", 20) == "1,234 done"
    assert fit("1,234 done  5,678 pending", 25) == "1,234 done  5,678 pending"
    for width in range(1, 120):
        for line in text_of(status(), width=width)[:1]:
            pieces = line.removeprefix("rows").strip().split("  ")
            if width >= 26:
                assert set(pieces) <= {"802/2,000 (40%)", "800 done", "2 rejected",
                                       "1,198 pending", "14 truncated"}  # fmt: skip


def test_what_a_stream_cannot_hold_is_escaped_before_it_is_measured() -> None:
    for line in text_of(status(problems=["日本語"]), width=30, encoding="ascii"):
        assert line.isascii()
        assert len(line) <= 30


def test_wide_characters_take_two_columns() -> None:
    assert (cells("abc"), cells("日本"), cells("é"), cells("🦅")) == (3, 4, 1, 2)
    assert cells(fit("日本語テキスト", 5)) <= 5


# -- on a terminal -------------------------------------------------------------------------------


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Terminal]:
    """Makes terminals."""

    def make(columns: int, rows: int) -> Terminal:
        terminal = Terminal(columns, rows)
        monkeypatch.setattr(screens.os, "get_terminal_size", terminal.size)
        return terminal

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    return make


def test_it_renews_itself_below_lasting_lines(sized: Callable[[int, int], Terminal]) -> None:
    terminal = sized(80, 24)
    with Live(terminal) as live:
        live.say("first")
        live.update(progress(100, 800))
        live.say(f"second {HOSTILE}".replace("\n", " ").replace("\ud800", ""))
        for more in range(20):
            live.update(progress(101 + more, 801 + more))
        live.say("third")
        live.update(progress(130, 900))
        assert [line[:6].strip() for line in terminal.shown] == [
            "first", "second", "third", "rows", "time", "tokens", "", "reques", "server",
            "server", "finish", "proble", "proble",
        ]  # fmt: skip
        assert "900 done" in terminal.shown[3]
        live.update(progress(131, 901, servers=0, problems=[]))
        assert len(terminal.shown) == 3 + 6
    assert [line.split(" ")[0] for line in terminal.shown] == ["first", "second", "third"]


@pytest.mark.parametrize("small", [(40, 24), (20, 24), (79, 10), (30, 5), (80, 2), (10, 3)])
def test_a_changed_size_leaves_nothing_behind(
    small: tuple[int, int], sized: Callable[[int, int], Terminal]
) -> None:
    """Narrower, lower, and back again. What a terminal has scrolled off is out of reach."""
    terminal = sized(80, 24)
    live = Live(terminal)
    live.say("lasting")
    live.update(progress())
    whole = list(terminal.shown)
    broken = sum(-(-len(line) // small[0]) for line in whole)
    for _ in range(3):
        terminal.resize(*small)
        live.update(progress())
        assert sum("802/2" in line for line in terminal.on_screen) == 1
        terminal.resize(80, 24)
        live.update(progress())
        if broken < small[1]:
            assert terminal.shown == whole
    live.say("end")
    live.update(progress())
    assert terminal.shown[-11:] == ["end", *whole[1:]]


def test_a_window_of_one_row(sized: Callable[[int, int], Terminal]) -> None:
    terminal = sized(60, 1)
    with Live(terminal) as live:
        for new in range(5):
            live.update(progress(100, new))
        assert len(terminal.shown) == 1
        assert "4 done" in terminal.shown[0]
        live.say("lasting")
    assert terminal.shown == ["lasting"]


def test_random_sizes_never_break_it(sized: Callable[[int, int], Terminal]) -> None:
    import random

    chosen = random.Random(5)
    terminal = sized(80, 24)
    live = Live(terminal)
    for step in range(200):
        terminal.resize(chosen.randint(2, 120), chosen.randint(1, 40))
        live.update(progress(step, step, servers=chosen.randint(0, 12), problems=[HOSTILE] * 3))
    terminal.resize(120, 40)
    live.update(progress())
    assert terminal.shown[-10].startswith("rows      802/2,000")


def test_colours_only_where_they_are_wanted(
    sized: Callable[[int, int], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sized(80, 24)
    Live(plain).update(progress())
    assert "\x1b[31m" not in plain.raw
    assert "\x1b[2m" not in plain.raw
    monkeypatch.delenv("NO_COLOR")
    coloured = sized(80, 24)
    Live(coloured).update(progress())
    assert "\x1b[31mDOWN  http://10.0.0.1:30000\x1b[0m" in coloured.raw
    assert coloured.shown == plain.shown


def test_a_count(sized: Callable[[int, int], Terminal]) -> None:
    terminal = sized(30, 24)
    with Live(terminal) as live:
        show = live.count("rows checked")
        for number in (1, 10, 1000):
            show(number)
        assert terminal.shown == ["1,000 rows checked"]
    assert terminal.shown == []


def test_the_streams_own_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a file, and COLUMNS of an hour ago."""
    asked = []

    def size(handle: int) -> os.terminal_size:
        asked.append(handle)
        return os.terminal_size((33, 12))

    monkeypatch.setattr(screens.os, "get_terminal_size", size)
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal(33, 12)
    assert Screen(terminal).size == (33, 12)
    assert asked == [terminal.fileno()]


# -- elsewhere -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pipe_gets_a_line_now_and_then() -> None:
    clock, pipe = Clock(), io.StringIO()
    live = Live(pipe, clock=clock)
    times = []
    for half in range(2 * 1800):
        clock.now = half / 2
        before = len(pipe.getvalue())
        live.update(progress(clock.now, half, problems=[HOSTILE]))
        if len(pipe.getvalue()) > before:
            times.append(clock.now)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 10
    assert min(gaps) >= 10
    assert all(gap >= 60 for at, gap in zip(times[1:], gaps, strict=True) if at > 660)
    assert 30 < len(times) < 60
    for line in pipe.getvalue().splitlines():
        assert line.isprintable()
        assert "rows" in line
    live.say("said at once, by a command\nin two lines")
    assert pipe.getvalue().endswith("\nsaid at once, by a command\\nin two lines\n")


def test_one_line_says_what_matters() -> None:
    assert one_line(status()) == (
        "802/2,000 (40%) rows  2 rejected  14 truncated  64 in flight  5,000 output tokens/s  "
        "1 of 2 servers down  ETA 2m30s"
    )


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    clock, terminal = Clock(), Terminal(80, 24)
    with Live(terminal, clock=clock) as live:
        live.count("rows")(5)
        live.update(progress())
        assert terminal.raw == ""
        clock.now = 11.0
        live.update(progress())
    assert terminal.raw.count("\n") == 1
    assert terminal.raw[:-1].isprintable()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), BrokenPipeError(), ValueError])
def test_a_stream_that_is_gone_ends_nothing(error: Exception) -> None:
    class Gone(io.StringIO):
        tried = 0

        def write(self, _: str) -> int:
            Gone.tried += 1
            raise error

    clock = Clock()
    with Live(Gone(), clock=clock) as live:
        live.say("x")
        clock.now = 100.0
        live.update(progress())
    assert Gone.tried == 1
