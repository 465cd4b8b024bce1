"""JSON Lines through `speculators prepare-data`, and what its training data set then holds."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from speculators.train.data import ArrowDataset

data, model, length, answer = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "prepared"
    command = [Path(sys.executable).with_name("speculators"), "prepare-data", "--model", model]
    command += ["--data", data, "--output", out, "--seq-length", length, "--no-skip-token-freq"]
    subprocess.run([str(part) for part in command], check=True)
    rows = ArrowDataset(max_len=int(length), datapath=out, on_missing="raise").data
    found = {
        "rows": [[row["input_ids"].tolist(), row["loss_mask"].tolist()] for row in rows],
        "counts": list(torch.load(out / "token_freq.pt", weights_only=True).items()),
    }
Path(answer).write_text(json.dumps(found))
