"""A vocabulary map, as speculators' own training command reads it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from speculators.model import DraftVocabMixin
from speculators.train.cli import parse_vocab_mappings
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

folder, model, size, whole, answer = sys.argv[1:]
size, whole = int(size), int(whole)
arguments = SimpleNamespace(
    d2t_path=None,
    t2d_path=None,
    data_path=folder,
    draft_vocab_size=size,
    token_freq_path=None,
    verifier_name_or_path=model,
    trust_remote_code=False,
)
d2t, t2d, found = parse_vocab_mappings(arguments)
assert found == size

# What its model checks when it takes a map, on a model that has nothing else.
taken = {}
draft = SimpleNamespace(
    use_draft_vocab=True,
    verifier_vocab_size=whole,
    draft_vocab_size=size,
    load_state_dict=lambda values, strict: taken.update(values),
)
DraftVocabMixin.load_vocab_mappings(draft, t2d, d2t)

counts = torch.load(Path(folder) / "token_freq.pt", weights_only=True)
own_d2t, own_t2d = build_vocab_mappings_from_distribution(counts, size, whole)
Path(answer).write_text(
    json.dumps(
        {
            "d2t": taken["d2t"].tolist(),
            "t2d": taken["t2d"].tolist(),
            "dtypes": [str(taken["d2t"].dtype), str(taken["t2d"].dtype)],
            "counts": [[i, n] for i, n in counts.items()],
            "own": torch.nonzero(own_t2d).flatten().tolist(),
        }
    )
)
