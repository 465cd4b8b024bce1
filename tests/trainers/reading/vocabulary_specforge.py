"""A vocabulary map, as SpecForge's draft model takes it, and as torch reads the other files."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.modeling.draft.base import Eagle3DraftModel

folder, size, whole, answer = sys.argv[1:]
model = SimpleNamespace(
    t2d=torch.zeros(int(whole), dtype=torch.bool), d2t=torch.zeros(int(size), dtype=torch.long)
)
Eagle3DraftModel.load_vocab_mapping(model, str(Path(folder) / "vocab_mapping.pt"))
validate_vocab_mapping_consistency(model.t2d, model.d2t)
alone = torch.load(Path(folder) / "d2t.pt", weights_only=True)
Path(answer).write_text(
    json.dumps(
        {
            "d2t": model.d2t.tolist(),
            "t2d": model.t2d.tolist(),
            "alone": alone.tolist(),
            "dtype": str(alone.dtype),
        }
    )
)
