"""What would have become of a run's ids if only text had been kept?

    python examples/03_check_ids.py [RUN]

Without a run a small one is captured first (see 01_capture.py). For each trace the training
sequence is made in the four ways that people make it, and compared with what the model was given
and generated. The tiny model cuts its few words in one way only, so that decoding does it little
harm; the last way drops its reasoning, as it does with any model whose template leaves it out.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections import Counter
from pathlib import Path

from some_run import given_or_captured

from eyas import ChatTemplate, Profile, Run, Tokenizer, Trace, load_tokenizer

WAYS = {
    "ids joined as ids": "what a run holds",
    "output decoded, encoded again, joined": "forgets how the model cut its words",
    "prompt and output decoded as one text": "and may merge ids over their border",
    "answer rendered by the chat template": "and loses what the template leaves out",
}


class Retokenizer:
    """The three ways that go through text, for one run's target."""

    def __init__(self, run: Run) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(run.manifest.tokenizer)
        self.profile = Profile.from_dict(run.manifest.profile)
        self.template: ChatTemplate | None = None
        if self.tokenizer.chat_template is not None:
            template = ChatTemplate.of(
                self.tokenizer,
                kwargs=run.manifest.fingerprint["template_kwargs"],
                date=dt.date.fromisoformat(run.manifest.date),
            )
            if template.hash == run.manifest.fingerprint["template"]:
                self.template = template

    def sequences(self, trace: Trace) -> list[list[int] | None]:
        """The training sequence in each of `WAYS`; None where a way is not open."""
        tokenizer, prompt, output = self.tokenizer, trace.prompt_ids, trace.output_ids
        return [
            prompt + output,
            prompt + tokenizer.encode(tokenizer.decode(output)),
            tokenizer.encode(tokenizer.decode(prompt + output)),
            self._rendered(trace),
        ]

    def _rendered(self, trace: Trace) -> list[int] | None:
        """As a script does that has a chat API's answer text: messages in, template, ids."""
        if self.template is None or trace.messages is None:
            return None
        content = self.profile.read(self.tokenizer, trace.prompt_ids, trace.output_ids).content
        messages = [*json.loads(trace.messages), {"role": "assistant", "content": content}]
        text = self.template.render(messages, add_generation_prompt=False)
        return self.tokenizer.encode(text)


def check(run: Run) -> None:
    """Print how many traces each way would have changed."""
    retokenizer = Retokenizer(run)
    changed: Counter[str] = Counter()
    traces = 0
    for trace in run.traces():
        traces += 1
        mask = trace.loss_mask
        assert trace.input_ids == trace.prompt_ids + trace.output_ids
        assert mask == [0] * len(trace.prompt_ids) + [1] * len(trace.output_ids)
        for way, ids in zip(WAYS, retokenizer.sequences(trace), strict=True):
            changed[way] += ids is not None and ids != trace.input_ids
    print(f"{traces} traces; how many of them each way changes:")
    for way, why in WAYS.items():
        print(f"  {changed[way]:>5}  {way} ({why})")


def main() -> int:
    with given_or_captured() as run:
        check(Run(Path(run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
