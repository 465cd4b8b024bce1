"""What SpecForge's ``data.prompts_path`` reads without tokenizing.

Source: SpecForge 0.2.0, ``specforge/data/prompt_builder.py``: JSON Lines whose first record has
``input_ids`` and ``loss_mask`` of the same length, the mask 0 or 1; further keys are ignored, the
order is kept, rows are cut to ``max_length`` and dropped with fewer than ``min_loss_tokens``.
"""

from __future__ import annotations

from eyas.export.forms import Form
from eyas.export.jsonl import JsonLines

FORM = Form(
    name="specforge",
    about="ids and mask a line, for SpecForge's data.prompts_path (online training)",
    suffix=".jsonl",
    open=JsonLines,
    cuts_at=2048,
    trainer=(
        "SpecForge cuts rows on the right at its max_length and then drops those with fewer "
        "supervised ids than min_loss_tokens; it keeps the order and ignores other columns",
        "SpecForge takes the mask at the place that predicts an id, so that the first id of each "
        "answer is not learnt, and sets its last entry to 0 (the stop id is learnt from the place "
        "before it)",
    ),
)
