"""Which steps carry loss once SpecForge has shifted a row: what each reads, and what it aims at."""

import json
import sys
from pathlib import Path

import torch
from specforge.data.preprocessing import process_offline_eagle3_sample
from specforge.modeling.target.target_head import TargetHead

ids, mask, answer = sys.argv[1:]
ids, mask = torch.tensor(json.loads(ids)), torch.tensor(json.loads(mask))
places = torch.arange(len(ids))[None, :, None]  # each state is called by its place
row = process_offline_eagle3_sample(
    {"input_ids": ids, "loss_mask": mask, "aux_hidden_state": places, "hidden_state": places},
    len(ids),
)
read, target, kept = TargetHead.preprocess(None, row["input_ids"], row["target"], row["loss_mask"])
steps = zip(
    read[0].tolist(),
    row["hidden_state"][0, :, 0].tolist(),
    target[0, :, 0].tolist(),
    kept[0, :, 0].tolist(),
    strict=True,
)
Path(answer).write_text(json.dumps([list(step[:3]) for step in steps if step[3]]))
