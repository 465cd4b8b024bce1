"""Shards of an input are, together, the input: each unit once, and under the same name."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas import ChatTemplate, PromptReader, Tokenizer
from eyas.config import make_config
from eyas.errors import ConfigError
from eyas.feed import Feed
from eyas.merge import merge_runs
from eyas.modes import open_modes
from eyas.prompting import Prompting
from eyas.shard import Shard
from eyas.store import Ledger, Manifest, Run, prepare_directory
from eyas.store.journal import Segment, encode_line
from eyas.store.parts import seal
from eyas.trace import Rejected, Trace
from eyas.turns import Turns

Unit = tuple[str, str, int, int]
"""Name, key, sample and turn."""

LINES = st.one_of(
    st.fixed_dictionaries(
        {"prompt": st.sampled_from("xyz")},
        optional={"id": st.sampled_from("ab"), "mood": st.sampled_from("mn")},
    ).map(json.dumps),
    st.fixed_dictionaries(
        {"turns": st.lists(st.sampled_from("xy"), min_size=1, max_size=3)},
        optional={"id": st.sampled_from("ab")},
    ).map(json.dumps),
    st.sampled_from(['{"prompt": 5}', "{", '{"prompt": ""}', '{"id": "a"}']),
)


@pytest.fixture(scope="module")
def desk(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, Any]:
    """What a feed needs besides the input."""
    modes, profile = open_modes(tokenizer, template, [(1.0, {})])
    return {"prompting": Prompting(tokenizer, modes, profile),
            "max_new_tokens": 8, "context_length": 4096}  # fmt: skip


def files_of(folder: Path, lines: list[str], count: int = 1) -> list[str]:
    """The lines as files, in turns."""
    paths = []
    for at in range(count):
        path = folder / f"{random.getrandbits(32):x}-{at}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines[at::count]))
        paths.append(str(path))
    return paths


def fill(
    run: Path, files: list[str], desk: dict[str, Any], shard: Shard | None = None, **more: Any
) -> tuple[list[Unit], int]:
    """Decide every unit of the input without a server, in a new run; the units and the count."""
    prepare_directory(run)
    Manifest(eyas="0", created="", date="2026-01-02", fingerprint={}, profile={},
             max_new_tokens=1, tokenizer="", inputs=files).save(run)  # fmt: skip
    stretches = PromptReader(files).stretches()
    feed = Feed(stretches, run=Run(run), ledger=Ledger.load(run, shard),
                turns=Turns(**desk), **more)  # fmt: skip
    rows: list[Trace | Rejected] = []
    while not feed.ended:
        jobs, refused = feed.next_batch()
        rows += refused
        for job in jobs:
            for turn in range(job.conversation.n_turns):
                row = Trace(f"{job.name}/{job.sample}/{turn}", job.name, turn, job.sample,
                            job.key.hex(), [1], [2], "stop", 2, None, None)  # fmt: skip
                rows.append(row)
    segment = Segment(run / "journal", 1)
    segment.write([encode_line(row) for row in rows])
    segment.close()
    seal(run, 1, segment.path)
    units = [(row.conversation_id, row.key, row.sample, row.turn) for row in rows]
    done = sum(isinstance(row, Trace) for row in rows)
    manifest = Manifest.load(run)
    manifest.counts = {"input": len(rows), "done": done, "rejected": len(rows) - done,
                       "pending": 0, "extra": 0, "truncated": 0}  # fmt: skip
    manifest.save(run)
    return units, feed.counts.input


@settings(max_examples=40)
@given(st.lists(LINES, max_size=12), st.integers(1, 4), st.integers(1, 2), st.integers(0, 9))
@example(['{"prompt": "x", "id": "a"}', '{"prompt": "y", "id": "a"}'] * 3, 3, 1, 0)
def test_the_shards_are_the_run(
    desk: dict[str, Any], lines: list[str], count: int, samples: int, limit: int
) -> None:
    """The union of N shards is the unsharded run, unit by unit, under the same ids."""
    more = {"samples": samples, "limit": limit or None}
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = files_of(folder, lines, 2)
        whole, met = fill(folder / "whole", files, desk, **more)
        assert met == len(whole)
        together: list[Unit] = []
        for number in range(1, count + 1):
            units, met = fill(folder / str(number), files, desk, Shard(number, count), **more)
            assert met == len(units)
            together += units
        assert Counter(together) == Counter(whole)
        merged = merge_runs(folder / "merged", [folder / str(n + 1) for n in range(count)])
        assert (merged.renamed, merged.left_out) == (0, 0)
        assert stored(folder / "merged") == stored(folder / "whole") == Counter(whole)
        assert merged.counts == Manifest.load(folder / "whole").counts


@settings(max_examples=40)
@given(st.lists(LINES, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_order_and_files_play_no_part(
    desk: dict[str, Any], lines: list[str], count: int, chance: random.Random
) -> None:
    """Shards whose inputs were shuffled and split otherwise still make up the run."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole, _ = fill(folder / "whole", files_of(folder, lines), desk)
        for number in range(1, count + 1):
            chance.shuffle(lines)
            files = files_of(folder, lines, chance.randint(1, 3))
            fill(folder / str(number), files, desk, Shard(number, count))
        merged = merge_runs(folder / "merged", [folder / str(n + 1) for n in range(count)])
        assert merged.left_out == 0
        units = stored(folder / "merged")
        assert Counter(unit[1:] for unit in units) == Counter(unit[1:] for unit in whole)
        owners: dict[str, str] = {}
        for title, key, _, _ in units:
            assert owners.setdefault(title, key) == key
        # and the unsharded capture finds nothing to do
        files = files_of(folder, lines)
        feed = Feed(PromptReader(files).stretches(), run=Run(folder / "merged"),
                    ledger=Ledger.load(folder / "merged"), turns=Turns(**desk))  # fmt: skip
        assert feed.next_batch() == ([], [])


def stored(run: Path) -> Counter[Unit]:
    opened = Run(run)
    rows = [*opened.traces(), *opened.rejected()]
    for row in rows:
        assert row.id == f"{row.conversation_id}/{row.sample}/{row.turn}"
    return Counter((row.conversation_id, row.key, row.sample, row.turn) for row in rows)


def test_shards_are_about_as_large_as_each_other() -> None:
    from eyas.conversation import digest

    keys = [digest(b"%d" % n) for n in range(8000)]
    sizes = [sum(map(Shard(n, 8).holds, keys)) for n in range(1, 9)]
    assert sum(sizes) == 8000
    assert max(sizes) - min(sizes) < 200


GIVEN = {"url": "u", "tokenizer": "t", "out": "o", "prompts": ["p"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [("0/8", "there is none 0"), ("9/8", "of 8 there is none 9"), ("3", "I/N, such as 3/8"),
     ("3/0", "of 0 there is none 3"), ("a/b", "I/N"), ("1/2/3", "I/N"), (3, "I/N"),
     ("-1/8", "I/N"), ("٣/8", "I/N"), ("1/" + "9" * 5000, "I/N")],
)  # fmt: skip
def test_what_is_no_shard_is_said_so(text: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_config({**GIVEN, "shard": text})
    assert str(caught.value).startswith("shard: ")


def test_a_shard_is_written_as_it_is_read() -> None:
    assert make_config({**GIVEN, "shard": " 03/8"}).shard == "3/8"
    assert make_config(GIVEN).shard is None
