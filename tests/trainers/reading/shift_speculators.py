"""Which steps carry loss once speculators has shifted a row: what each reads, and what it aims at."""

import json
import sys
from pathlib import Path

import torch
from speculators.models.eagle3.data import shift_batch

ids, mask, answer = sys.argv[1:]
ids, mask = torch.tensor(json.loads(ids)), torch.tensor(json.loads(mask))
places = torch.arange(len(ids))
row = shift_batch(
    {
        "input_ids": ids,
        "hidden_states": places[:, None],  # each state is called by its place
        "verifier_last_hidden_states": places[:, None],
        "loss_mask": mask,
        "lengths": torch.tensor([len(ids)]),
        "position_ids": places,
    }
)
steps = zip(
    row["input_ids"].tolist(),
    row["hidden_states"][:, 0].tolist(),
    row["verifier_last_hidden_states"][:, 0].tolist(),
    row["loss_mask"].tolist(),
    strict=True,
)
Path(answer).write_text(json.dumps([list(step[:3]) for step in steps if step[3]]))
