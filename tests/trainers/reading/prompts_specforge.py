"""A file for `data.prompts_path`, as SpecForge's online training prepares it."""

import json
import sys
from pathlib import Path

from specforge.data.prompt_builder import prepare_prompt_tasks

data, length, answer = sys.argv[1:]
tasks = prepare_prompt_tasks(
    data,
    None,
    chat_template=None,
    max_length=int(length),
    is_preformatted=False,
    train_only_last_turn=False,
    cache_dir=None,
    cache_key=None,
    num_proc=None,
)
rows = [[list(task["payload"]["input_ids"]), list(task["payload"]["loss_mask"])] for task in tasks]
Path(answer).write_text(json.dumps({"rows": rows}))
