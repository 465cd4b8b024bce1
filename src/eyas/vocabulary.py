"""The ids that a draft model with a smaller vocabulary can say, chosen from what its target said.

Invariant: ids that no draft can do without are in every vocabulary; of the others the most frequent
go first, of equally frequent ones the lower. So the same run gives the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas import torch_file
from eyas.errors import ConfigError, DamagedRun
from eyas.id_counts import KINDS, Counts, Ids, count_ids
from eyas.run_target import RunTarget
from eyas.store import Run
from eyas.store.files import disk_errors, write_atomically, write_bytes
from eyas.tokens import Tokenizer
from eyas.tokens.tokenizer import byte_alphabet
from eyas.tools.samples import PLAIN, PLAIN_TWO, Samples

_LEFT_OUT = 10
"""How many of the most frequent ids that are left out a report shows."""


def embedding_size(tokenizer: Tokenizer, given: int | None) -> tuple[int, str]:
    """How many rows the target's embedding has, and who says so.

    Maps are as long as the embedding, which is often padded beyond the tokenizer's ids.

    Raises:
        ConfigError: if nobody says so, or what is said is less than the tokenizer's ids.
    """
    size, source = (given, "--vocab-size") if given else (tokenizer.model.vocab_size, "config.json")
    if size is None:
        raise ConfigError(
            f"{tokenizer.source} has no config.json that tells how many rows the target's "
            f"embedding has (the tokenizer has {tokenizer.size} ids, and embeddings are often "
            "padded beyond); give config.json's vocab_size with --vocab-size"
        )
    if given and given < tokenizer.size and given != tokenizer.model.vocab_size:
        raise ConfigError(
            f"--vocab-size {given} is less than the tokenizer's {tokenizer.size} ids; it is the "
            "number of rows of the target's embedding, vocab_size in its config.json"
        )
    return size, source


def indispensable(target: RunTarget, counts: Counts) -> dict[str, Ids]:
    """Ids that every vocabulary keeps, each by the first purpose that it has.

    Stop ids; the ids that make up the markers of reasoning and content; the control ids that the
    template writes into calls of tools; whatever other control ids were generated; those that stand
    for one byte, without which some text could not be said at all.
    """
    tokenizer, profile = target.tokenizer, target.prompting.profile
    generated = counts.of()
    frame = (*profile.content_openers, profile.content_closer)
    purposes: dict[str, Ids] = {
        "stop ids": _sorted(profile.stop_ids),
        "reasoning markers": _ids_of(profile.opener, profile.closer),
        "answer markers": _ids_of(*frame),
        "tool markers": _sorted(_tool_markers(target)),
        "other control ids that were generated": _sorted(
            i for i in tokenizer.control.values() if i < len(generated) and generated[i]
        ),
        "bytes": _sorted(_byte_ids(tokenizer)),
    }
    seen: set[int] = set()
    for name, ids in purposes.items():
        purposes[name] = _sorted(int(i) for i in ids if int(i) not in seen)
        seen.update(map(int, ids))
    return purposes


def _ids_of(*markers: Any) -> Ids:
    return _sorted(i for marker in markers if marker is not None for i in marker.ids)


def _sorted(ids: Iterable[int]) -> Ids:
    return np.array(sorted(set(ids)), np.int64)


def _tool_markers(target: RunTarget) -> list[int]:
    """Control ids in the calls that the template writes when it is asked to."""
    pattern, template = target.tokenizer.control_pattern, target.template
    if pattern is None or template is None:
        return []
    found: list[int] = []
    for as_text in (False, True):
        samples = Samples(target.tokenizer, template, target.prompting.profile, as_text=as_text)
        for calls in (PLAIN, PLAIN_TWO):
            sample = samples.one(calls, "")
            if sample is not None and calls[0].name in sample.output:
                found += [target.tokenizer.control[text] for text in pattern.findall(sample.output)]
    return found


def _byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that stand for one byte: letters of GPT-2's alphabet, or ``<0x0A>`` and so on."""
    letters = byte_alphabet().values() if tokenizer.is_byte_level else []
    names = [*letters, *(f"<0x{byte:02X}>" for byte in range(256))]
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    return [known[name] for name in names if name in known]


@dataclass
class Vocabulary:
    """A smaller vocabulary."""

    counts: Counts
    kept: dict[str, Ids]
    """Ids that it must have, by what they are for."""
    ids: Ids
    """The ids, ascending; [size]. The draft's id i is the target's ``ids[i]``."""

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> Ids:
        """What is added to a draft's id to get the target's; [size]."""
        return self.ids - np.arange(self.size)

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """Whether the draft has a target's id; [vocab_size]."""
        has = np.zeros(self.counts.vocab_size, np.bool_)
        has[self.ids] = True
        return has

    def coverage(self, *, mode: str | None = None, kind: str | None = None) -> float | None:
        """The share of generated ids that it has; None where there are none."""
        counts = self.counts.of(mode=mode, kind=kind)
        return float(counts[self.ids].sum() / counts.sum()) if counts.any() else None

    def figures(self) -> dict[str, Any]:
        """What it has and how much of what was generated that is, as plain values."""
        counts = self.counts.of()
        return {
            "size": self.size,
            "vocab_size": self.counts.vocab_size,
            "rows": self.counts.rows,
            "ids": int(counts.sum()),
            "different_ids": int(np.count_nonzero(counts)),
            "never_generated": int(np.count_nonzero(counts[self.ids] == 0)),
            "kept": {name: len(ids) for name, ids in self.kept.items()},
            "coverage": self.coverage(),
            "by_kind": {kind: self.coverage(kind=kind) for kind in KINDS},
            "by_mode": {mode: self.coverage(mode=mode) for mode in self.counts.modes},
        }

    def left_out(self) -> list[tuple[int, int]]:
        """The most frequent ids that it does not have, with how often they were generated."""
        counts = np.where(self.t2d, 0, self.counts.of())
        first = np.argsort(-counts, kind="stable")[:_LEFT_OUT]
        return [(int(i), int(counts[i])) for i in first if counts[i]]


def choose_vocabulary(
    run: Run,
    target: RunTarget,
    size: int,
    *,
    vocab_size: int | None = None,
    only: str | None = None,
    on_row: Callable[[int], None] = lambda _: None,
) -> Vocabulary:
    """Count a run's output ids, as a stream, and choose the vocabulary of a size.

    Args:
        target: the run's, see `eyas.run_target.open_run_target`.
        vocab_size: rows of the target's embedding; what its config.json says if None.
        only: ``stop`` leaves out rows that their token budget cut.
        on_row: called with the number of rows seen so far.

    Raises:
        ConfigError: a size that cannot be had, or nobody tells the embedding's.
        DamagedRun: a run that cannot be read, or holds no good rows.
    """
    if only not in (None, "stop"):
        raise ConfigError(f"--only {only} is not known; there is stop")
    whole, _ = embedding_size(target.tokenizer, vocab_size)
    counts = count_ids(run, whole, only=only, on_row=on_row)
    return choose(counts, indispensable(target, counts), size)


def choose(counts: Counts, kept: dict[str, Ids], size: int) -> Vocabulary:
    """The vocabulary of a size.

    Where fewer ids were generated than it has room for, the lowest others fill it, as speculators
    does.

    Raises:
        ConfigError: a size that cannot be had.
        DamagedRun: a run of other ids than its target has.
    """
    must = _sorted(int(i) for ids in kept.values() for i in ids)
    whole = counts.vocab_size
    if len(must) and int(must[-1]) >= whole:
        raise ConfigError(
            f"id {int(must[-1])} has to be kept and is not below the vocabulary's {whole} ids; "
            "--vocab-size is the number of rows of the target's embedding"
        )
    if size < len(must):
        parts = ", ".join(f"{len(ids)} {name}" for name, ids in kept.items() if len(ids))
        raise ConfigError(
            f"--size {size} has no room for the {len(must)} ids that are always kept ({parts}); "
            "give a larger one"
        )
    if size >= whole:
        raise ConfigError(
            f"--size {size} is not smaller than the target's vocabulary of {whole} ids; a draft "
            "with all of them needs no map"
        )
    if not counts.rows:
        raise DamagedRun("the run holds no good rows yet, so there is nothing to count")
    ranked = np.argsort(-counts.of(), kind="stable")
    others = ranked[~np.isin(ranked, must)]
    return Vocabulary(counts, kept, np.sort(np.concatenate([must, others[: size - len(must)]])))


def other_sizes(vocabulary: Vocabulary) -> list[Vocabulary]:
    """Vocabularies of a quarter, half, twice and four times the size, as far as they can be."""
    counts, kept = vocabulary.counts, vocabulary.kept
    least = len(_sorted(int(i) for ids in kept.values() for i in ids))
    sizes = [vocabulary.size * factor // 4 for factor in (1, 2, 8, 16)]
    return [choose(counts, kept, size) for size in sizes if least <= size < counts.vocab_size]


def files_of(size: int) -> dict[str, str]:
    """The files of a vocabulary, and who reads them."""
    return {
        f"d2t-{size}.npy": "speculators train --draft-vocab-size, in its --data-path",
        f"t2d-{size}.npy": "likewise",
        "token_freq.pt": "speculators, to make a map of another size (it keeps no id on purpose)",
        "vocab_mapping.pt": "SpecForge model.vocab_mapping_path; EAGLE, as cache.pt",
        "d2t.pt": "Model Optimizer",
        "vocabulary.json": "people: the figures",
    }


def write(
    vocabulary: Vocabulary, out: Path, figures: dict[str, Any], *, overwrite: bool = False
) -> list[Path]:
    """Write the files of a vocabulary; each is there whole or not at all.

    Counts that lie there already stay (an export wrote those of its own rows), unless `overwrite`.

    Returns:
        What was written.

    Raises:
        ConfigError: one of them is there already.
        DiskFull: if one cannot be written.
    """
    paths = [out / name for name in files_of(vocabulary.size)]
    d2t_npy, t2d_npy, freq, mapping, d2t, told = paths
    counted = freq.exists() and not overwrite
    there = [path.name for path in paths if path.exists() and path != freq]
    if there and not overwrite:
        raise ConfigError(
            f"{out} holds {', '.join(there)} already; name another --out, or give --overwrite"
        )
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        for name in there:  # what a crash leaves lacks files, and never mixes two maps
            (out / name).unlink()
    counts = vocabulary.counts.of()
    frequencies = {int(i): int(counts[i]) for i in np.flatnonzero(counts)}
    tensors: dict[str, torch_file.Tensor] = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    write_atomically(d2t_npy, lambda path: _save(path, vocabulary.d2t))
    write_atomically(t2d_npy, lambda path: _save(path, vocabulary.t2d))
    if not counted:
        write_atomically(freq, lambda path: torch_file.save(path, frequencies))
    write_atomically(mapping, lambda path: torch_file.save(path, tensors))
    write_atomically(d2t, lambda path: torch_file.save(path, vocabulary.d2t))
    write_bytes(told, (json.dumps(figures, indent=2, ensure_ascii=False) + "\n").encode())
    return [path for path in paths if path != freq or not counted]


def _save(path: Path, array: NDArray[Any]) -> None:
    with path.open("wb") as file:  # numpy would add a suffix to a name
        np.save(file, array)
