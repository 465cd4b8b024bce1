"""Conversations, as SpecForge renders, tokenizes and masks them."""

import json
import sys
from pathlib import Path

from specforge.data.prompt_builder import prepare_prompt_tasks
from specforge.data.template import TEMPLATE_REGISTRY, ChatTemplate
from transformers import AutoTokenizer

data, model, cache, answer = sys.argv[1:]
TEMPLATE_REGISTRY.register(
    name="here",
    template=ChatTemplate(
        assistant_header="<|assistant|>", user_header="<|user|>", end_of_turn_token="<|end|>"
    ),
)
tasks = prepare_prompt_tasks(
    data,
    AutoTokenizer.from_pretrained(model),
    chat_template="here",
    max_length=2048,
    is_preformatted=False,
    train_only_last_turn=False,
    cache_dir=cache,
    cache_key="chats",
    num_proc=None,
)
rows = [[list(task["payload"]["input_ids"]), list(task["payload"]["loss_mask"])] for task in tasks]
Path(answer).write_text(json.dumps({"rows": rows}))
