"""Measure the demo target as its users meet it: in llama.cpp, ids in and ids out.

What must hold: the GGUF and the safetensors file hold the same weights bit for bit; llama.cpp and
transformers cut every text into the same ids; and of the held-out problems, none of which was seen
in training in any wording, at least 95 in 100 are answered right at temperature 0, and so is
"What is 2+2?". The exit status is 0 only if all of it does. Torch is not needed.

    pip install -r scripts/train-requirements.txt
    python scripts/check_demo_target.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from eyas.demo.problems import KINDS, Problem, is_right, stream  # found through the line above
from eyas.demo.server import TARGET, serve

SEED = 7
GOAL = 0.95
PARALLEL = 8
MOST_TOKENS = 256

GREEDY = {"temperature": 0.0}

TEXTS = (
    "",
    " ",
    "\n",
    "\r\n\r\n",
    "  two spaces   three\t\ttabs \n newline \n\n",
    "trailing   ",
    "\u00a0no-break\u2003em\u3000ideographic",
    "1234567890 3.14159 1e-5 ½ ²³ ٣٤٥",
    "don't I'll WE'VE you're she'D it'S 'tis",
    "!!??... --- ___ ***\n\n#$%^&*()",
    "naïve café Cafe\u0301 Ångström",
    "日本語のテキストと漢字、かな。",
    "한국어 문장입니다",
    "Привет, мир! Γειά σου שלום مرحبا",
    "🙂👩‍👩‍👧‍👦🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ✂️",
    "<think>why</think>because<|end|>",
    "<|user|>hi<|end|><|assistant|><think></think>",
    "<|system|><|endoftext|>",
    "<think <|end| > </ think> <|END|> <|user|",
    "a<think>b </think> c\n</think>\n<think>",
    "What is 2+2?",
    "12 × 7 = 84",
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one problem."""

    problem: Problem
    ids: list[int]
    stop_type: str


def weight_differences(target: Path) -> list[str]:
    """What differs between the two weight files; empty if they hold the same numbers."""
    import gguf

    stored = read_bfloat16(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    others = {t.name: t for t in gguf.GGUFReader(target / "model.gguf").tensors}
    differences = []
    for name, values in stored.items():
        other = others.pop(names.get_name(name, try_suffixes=(".weight",)) or name, None)
        if other is None:
            differences.append(f"{name} is missing in the GGUF file")
        elif not np.array_equal(values.ravel(), np.asarray(other.data).ravel()):
            differences.append(f"{name} differs")
    return differences + [f"{name} is only in the GGUF file" for name in others]


def read_bfloat16(path: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of a bfloat16 safetensors file, widened, which changes no value.

    Read by hand, since numpy has no bfloat16: eight bytes of length, a JSON header, the data.
    """
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is stored as {entry['dtype']}, not as BF16")
        begin, end = (start + offset for offset in entry["data_offsets"])
        halves = np.frombuffer(raw[begin:end], dtype="<u2").astype(np.uint32)
        tensors[name] = (halves << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def texts(count: int) -> list[str]:
    """Fixed awkward texts, then mixtures of their pieces and of problems."""
    rng = random.Random(SEED)
    source = stream(SEED, "held_out")
    made = list(TEXTS)
    while len(made) < count:
        pieces = [*rng.sample(TEXTS, 2), next(source).question, next(source).reasoning]
        pieces.append("".join(chr(rng.randrange(32, 0xD800)) for _ in range(8)))
        rng.shuffle(pieces)
        made.append(rng.choice(("", " ", "\n")).join(pieces))
    return made


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with session.post(path, json=body) as response:
        response.raise_for_status()
        return await response.json()


async def id_differences(session: aiohttp.ClientSession, tokenizer: Any, count: int) -> list[str]:
    """The texts that llama.cpp and transformers cut into different ids."""
    differences = []
    for text in texts(count):
        body = {"content": text, "parse_special": True, "add_special": False}
        theirs = (await post(session, "/tokenize", body))["tokens"]
        ours = tokenizer.encode(text, add_special_tokens=False)
        if ours != theirs:
            differences.append(f"{text!r}: transformers {ours}, llama.cpp {theirs}")
    return differences


async def ask(
    session: aiohttp.ClientSession,
    tokenizer: Any,
    problems: list[Problem],
    sampling: dict[str, float],
) -> list[Reply]:
    """One reply a problem, no more than the server's slots at a time."""
    free = asyncio.Semaphore(PARALLEL)

    async def ask_one(number: int, problem: Problem) -> Reply:
        messages = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        body = {
            "prompt": prompt,
            "n_predict": MOST_TOKENS,
            "return_tokens": True,
            "seed": number,
            **sampling,
        }
        async with free:
            answer = await post(session, "/completion", body)
        return Reply(problem, answer["tokens"], answer["stop_type"])

    return await asyncio.gather(*(ask_one(i, problem) for i, problem in enumerate(problems)))


def draw(per_kind: int) -> list[Problem]:
    """Held-out problems that differ in content: so many of each kind, or as many as there are.

    Some kinds have few: there are only 107 held-out products, for example.
    """
    taken: dict[str, Problem] = {}
    counts: Counter[str] = Counter()
    for problem in islice(stream(SEED, "held_out"), 100 * per_kind):
        if counts[problem.kind] < per_kind and problem.key not in taken:
            taken[problem.key] = problem
            counts[problem.kind] += 1
    return list(taken.values())


def is_well_formed(tokenizer: Any, reply: Reply) -> bool:
    """Exactly one closer, and the end where the model put it."""
    closer = tokenizer.convert_tokens_to_ids("</think>")
    return reply.stop_type == "eos" and reply.ids.count(closer) == 1


def has_right_answer(tokenizer: Any, reply: Reply) -> bool:
    closer = tokenizer.convert_tokens_to_ids("</think>")
    if not is_well_formed(tokenizer, reply):
        return False
    answer = reply.ids[reply.ids.index(closer) + 1 : -1]
    return is_right(reply.problem, tokenizer.decode(answer))


def accuracy_table(tokenizer: Any, replies: list[Reply]) -> tuple[str, float]:
    """A Markdown table by kind, and the share that is right over all."""
    rows = ["| kind | asked | right | % | ids an answer |", "|---|---|---|---|---|"]
    for name in (*KINDS, "all"):
        group = [r for r in replies if name in (r.problem.kind, "all")]
        right = sum(has_right_answer(tokenizer, r) for r in group)
        length = sum(len(r.ids) for r in group) / len(group)
        rows.append(
            f"| {name} | {len(group)} | {right} | {100 * right / len(group):.1f} | {length:.0f} |"
        )
    return "\n".join(rows), right / len(group)


def shipped_sampling(target: Path) -> dict[str, float]:
    """What the model's generation config asks for.

    min_p is no part of it, and llama.cpp would use 0.05 of its own.
    """
    config = json.loads((target / "generation_config.json").read_text())
    return {name: config[name] for name in ("temperature", "top_p", "top_k")} | {"min_p": 0.0}


async def check(
    url: str, tokenizer: Any, sampling: dict[str, float], per_kind: int, show: int
) -> bool:
    """Everything that needs the server; prints what it finds."""
    async with aiohttp.ClientSession(url) as session:
        differences = await id_differences(session, tokenizer, 200)
        count = len(differences)
        print(f"texts cut into other ids by llama.cpp: {count} of 200", *differences[:5], sep="\n")

        first = Problem("addition", "What is 2+2?", "", "4", "2 + 2")
        first_reply = (await ask(session, tokenizer, [first], GREEDY))[0]
        print(f"What is 2+2? {tokenizer.decode(first_reply.ids)}\n")

        problems = draw(per_kind)
        replies = await ask(session, tokenizer, problems, GREEDY)
        table, share = accuracy_table(tokenizer, replies)
        print(f"temperature 0\n\n{table}\n")
        wrong = [r for r in replies if not has_right_answer(tokenizer, r)]
        for reply in wrong[:show]:
            print(f"wrong: {reply.problem.question}\n    {tokenizer.decode(reply.ids)}")

        sampled = await ask(session, tokenizer, problems, sampling)
        table, _ = accuracy_table(tokenizer, sampled)
        formed = sum(is_well_formed(tokenizer, reply) for reply in sampled)
        print(f"\n{sampling}\n\n{table}\n")
        print(f"one closer, ended by itself: {formed} of {len(sampled)}")
    return not differences and share >= GOAL and has_right_answer(tokenizer, first_reply)


def main() -> int:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--per-kind", type=int, default=150, help="held-out problems of each kind")
    parser.add_argument("--show", type=int, default=10, help="wrong answers to print")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    differences = weight_differences(arguments.target)
    print(f"tensors that differ between the two files: {len(differences)}", *differences, sep="\n")
    with serve(arguments.target / "model.gguf", parallel=PARALLEL) as server:
        sampling = shipped_sampling(arguments.target)
        good = asyncio.run(
            check(server.url, tokenizer, sampling, arguments.per_kind, arguments.show)
        )
    return 0 if good and not differences else 1


if __name__ == "__main__":
    sys.exit(main())
