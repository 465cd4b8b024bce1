"""Tokenized rows: each fault is found by name in a row that has it and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer
from verifying import Desk, id_row

PAD, END, USER, ASSISTANT, OPENER, CLOSER = 505, 506, 508, 509, 510, 511


@pytest.fixture
def desk(tokenizer: Tokenizer, tmp_path: Path) -> Desk:
    return Desk.of(tokenizer, tmp_path)


@pytest.fixture
def prompt(desk: Desk) -> list[int]:
    ids = desk.prompt()
    assert ids[-2:] == [ASSISTANT, OPENER]
    return ids


@pytest.fixture
def output(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode("2 + 2 is 4.</think>4<|end|>")
    assert ids[-1] == END
    return ids


def test_a_right_row_is_proven_and_its_source_is_not(
    desk: Desk, prompt: list[int], output: list[int]
) -> None:
    outcome = desk.verify(id_row(prompt, output, id="a"), id_row(prompt, output))
    assert outcome.faults == {}
    assert not outcome.findings.failed
    assert outcome.report.regenerate_command is None
    assert outcome.proven == {
        "lines", "ids", "mask", "stop", "reasoning", "drift", "text_drift"
    }  # fmt: skip
    assert [f.name for f in outcome.findings.of("unproven")] == ["sampled"]
    report = outcome.report
    assert (report.rows, report.kinds) == (2, {"input_ids+loss_mask": 2})
    assert report.ids == 2 * len(prompt + output)
    assert report.supervised == 2 * len(output)


def broken(name: str, prompt: list[int], output: list[int]) -> dict[str, Any]:
    """A row with one fault."""
    row = id_row(prompt, output)
    ids, mask, n = row["input_ids"], row["loss_mask"], len(prompt)
    body = output[:-1]
    changes: dict[str, dict[str, Any]] = {
        "no_ids": {"input_ids": [], "loss_mask": []},
        "ids_not_integers": {"input_ids": [*ids[:-1], 506.0]},
        "ids_outside_vocabulary": {"input_ids": [*ids[:-2], 512, END]},
        "mask_missing": {"loss_mask": None},
        "mask_length": {"loss_mask": mask[:-1]},
        "mask_values": {"loss_mask": [*mask[:-1], 2]},
        "mask_all_zero": {"loss_mask": [0] * len(ids)},
        "mask_all_one": {"loss_mask": [1] * len(ids)},
        "opener_supervised": {"loss_mask": [0] * (n - 1) + [1] * (len(output) + 1)},
        "prompt_end": id_row([*prompt[:-2], *output[:2], ASSISTANT, 75, OPENER], output),
        "answer_masked": {"loss_mask": [0] * (n + 3) + [1] * (len(output) - 3)},
        "mask_gap": {"loss_mask": [*mask[: n + 3], 0, 0, *mask[n + 5 :]]},
        "after_stop_supervised": id_row(prompt, [*output, 198]),
        "stop_missing": id_row(prompt, body, finish_reason="stop"),
        "stop_not_supervised": {"loss_mask": [*mask[:-1], 0]},
        "stop_absent": id_row(prompt, body),
        "stop_inside": id_row(prompt, [*output[:-2], END, *output[-2:]]),
        "truncated": id_row(prompt, body, finish_reason="length"),
        "reasoning_truncated": id_row(prompt, output[:4], finish_reason="length"),
        "reasoning_missing": id_row(prompt[:-1], output[-2:]),
        "reasoning_closed": id_row([*prompt, CLOSER], output[-2:]),
        "reasoning_empty": id_row(prompt, output[output.index(CLOSER) :]),
        "opener_missing": id_row(prompt[:-1], output),
        "closer_missing": id_row(prompt, [i for i in output if i != CLOSER]),
        "empty_answer": id_row(prompt, [*output[: output.index(CLOSER) + 1], END]),
        "role_header": id_row(prompt, [*output[:-1], USER, END]),
        "loop": id_row(prompt, [*body, *([70, 71] * 50), END]),
    }
    return {k: v for k, v in (row | changes[name]).items() if v is not None}


FAILED = (
    "no_ids", "ids_not_integers", "ids_outside_vocabulary", "mask_missing", "mask_length",
    "mask_values", "mask_all_zero", "mask_all_one", "opener_supervised", "answer_masked",
    "mask_gap", "after_stop_supervised", "stop_missing", "stop_not_supervised", "stop_absent",
    "stop_inside", "reasoning_missing", "reasoning_closed", "reasoning_empty", "opener_missing",
    "closer_missing", "empty_answer",
)  # fmt: skip
ALONGSIDE = {
    "reasoning_truncated": {"truncated"},
    "reasoning_missing": {"prompt_end"},
    "opener_missing": {"prompt_end"},
    "loop": set(),
}
"""Faults that come with another one."""


@pytest.mark.parametrize(
    "name", [*FAILED, "prompt_end", "truncated", "reasoning_truncated", "role_header", "loop"]
)
def test_each_fault_has_its_name(
    name: str, desk: Desk, prompt: list[int], output: list[int]
) -> None:
    outcome = desk.verify(broken(name, prompt, output) | {"id": "row-7"})
    assert set(outcome.faults) == {name} | ALONGSIDE.get(name, set())
    assert (outcome.verdicts[name] == "failed") == (name in FAILED)
    (example,) = outcome.report.faults[name].examples
    assert example.where.endswith("rows.jsonl:1")
    assert example.id == "row-7"
    finding = next(f for f in outcome.findings.items if f.name == name)
    assert "1 of 1 (100.0%)" in finding.text
    assert "rows.jsonl:1 (id 'row-7')" in finding.text
    assert outcome.findings.failed == (outcome.report.regenerate_command is not None)
    if outcome.findings.failed:
        assert outcome.findings.items[-1].name == "regenerate"


@pytest.mark.parametrize("bad", [True, 506.0, "506", None, [506]])
def test_ids_of_any_other_type(bad: Any, desk: Desk, prompt: list[int], output: list[int]) -> None:
    outcome = desk.verify(id_row(prompt, [*output[:-1], bad]), id_row(prompt, output))
    assert outcome.faults == {"ids_not_integers": 1}
    assert repr(bad) in outcome.report.faults["ids_not_integers"].examples[0].detail


@pytest.mark.parametrize("mask", ["bools", "floats", "texts", "weights"])
def test_masks_of_any_other_type(
    mask: str, desk: Desk, prompt: list[int], output: list[int]
) -> None:
    row = id_row(prompt, output)
    values = row["loss_mask"]
    row["loss_mask"] = {
        "bools": [bool(v) for v in values],
        "floats": [float(v) for v in values],
        "texts": [str(v) for v in values],
        "weights": [0.5 * v for v in values],
    }[mask]
    assert desk.verify(row).faults == {"mask_values": 1}


def test_the_other_names_of_the_same_row(desk: Desk, prompt: list[int], output: list[int]) -> None:
    ids, n = prompt + output, len(prompt)
    mask = [0] * n + [1] * len(output)
    rows: list[dict[str, Any]] = [
        {"input_ids": ids, "labels": [-100] * n + output},
        {"input_ids": ids, "completion_mask": mask},
        {"tokens": ids, "assistant_masks": mask},
        {"prompt_ids": prompt, "output_ids": output},
        {"prompt_token_ids": prompt, "completion_token_ids": output},
        {"prompt_ids": prompt, "completion_ids": output},
        {"input_ids": str(ids), "loss_mask": str(mask)},
        {
            "input_ids": [PAD, PAD, *ids],
            "loss_mask": [0, 0, *mask],
            "attention_mask": [0, 0] + [1] * len(ids),
        },
        {"input_ids": [*ids, PAD, PAD], "loss_mask": [*mask, 0, 0]},
    ]
    outcome = desk.verify(*rows)
    assert outcome.faults == {}
    assert outcome.report.rows == len(rows)
    assert outcome.report.supervised == len(rows) * len(output)


def test_labels_that_are_not_the_ids(desk: Desk, prompt: list[int], output: list[int]) -> None:
    ids, n = prompt + output, len(prompt)
    shifted = [*([-100] * (n - 1)), *output, -100]
    outcome = desk.verify(
        {"input_ids": ids, "labels": [-100] * n + [*output[:-1], 7]},
        {"input_ids": ids, "labels": shifted},
    )
    seen = outcome.report.faults["labels_differ"]
    assert seen.count == 2
    assert "shifted by one" in seen.examples[1].detail
    assert "shifted by one" not in seen.examples[0].detail


def test_several_answers_in_one_row(desk: Desk, prompt: list[int], output: list[int]) -> None:
    first, second = id_row(prompt, output), id_row(prompt, output)
    both = {k: first[k] + second[k] for k in first}
    assert desk.verify(both).faults == {}
    lost = id_row([*prompt, CLOSER], output[-2:])  # as the template renders history
    outcome = desk.verify({k: lost[k] + second[k] for k in lost})
    assert outcome.faults == {"reasoning_missing": 1}
    assert "earlier answer" in outcome.report.faults["reasoning_missing"].examples[0].detail
    open_end = id_row(prompt, output[:-1])
    assert "stop_missing" in desk.verify({k: open_end[k] + second[k] for k in lost}).faults


def test_what_a_model_may_do_is_a_fault_only_where_most_rows_do_it(
    desk: Desk, prompt: list[int], output: list[int]
) -> None:
    right = id_row(prompt, output)
    for name in ("stop_absent", "reasoning_empty", "reasoning_closed"):
        wrong = broken(name, prompt, output)
        few, many = desk.verify(right, right, wrong), desk.verify(wrong, wrong, wrong)
        assert few.verdicts == {name: "warning"}
        assert many.verdicts[name] == "failed"


def test_rows_that_end_at_the_same_length(desk: Desk, prompt: list[int], output: list[int]) -> None:
    plain = [70 + n for n in range(30)]
    cut = [id_row(prompt, [*plain[n:], *plain[:n]]) for n in range(3)]
    shorter = id_row(prompt, plain[:20])
    outcome = desk.verify(*cut, shorter, id_row(prompt, output))
    assert outcome.faults["cut_at_length"] == 3
    assert outcome.faults["stop_absent"] == 4
    honest = [row | {"finish_reason": "length"} for row in cut]
    assert "cut_at_length" not in desk.verify(*honest).faults


def test_the_maximum_length(desk: Desk, prompt: list[int], output: list[int]) -> None:
    row, size = id_row(prompt, output), len(prompt)
    assert desk.verify(row, max_length=size + len(output)).faults == {}
    assert set(desk.verify(row, max_length=size + 1).faults) == {"too_long"}
    outcome = desk.verify(row, max_length=size)
    assert set(outcome.faults) == {"too_long", "supervision_cut_off"}
    assert outcome.verdicts["supervision_cut_off"] == "failed"


def test_drift_says_what_is_lost_and_where(
    desk: Desk, tokenizer: Tokenizer, prompt: list[int], output: list[int]
) -> None:
    whole = tokenizer.encode(" is")
    pieces = [tokenizer.encode(" ")[0], *tokenizer.encode("i"), *tokenizer.encode("s")]
    assert len(whole) == 1
    assert len(pieces) == 3
    sampled = id_row(prompt, [*pieces, *output])
    spelled = id_row(prompt, [*tokenizer.encode("<|en"), *tokenizer.encode("d|>"), *output])
    outcome = desk.verify(sampled, spelled, id_row(prompt, output))
    assert not outcome.findings.failed
    drift = outcome.report.drift
    assert (drift["rows"], drift["rows_changed"], drift["answers_changed"]) == (3, 2, 2)
    assert drift["prompts_changed"] == 0
    assert drift["supervised_lost"] == drift["ids_lost"] > 3
    assert drift["causes"] == {
        "the same text in other pieces": 1,
        "a control string written in pieces": 1,
    }
    example = drift["examples"][0]
    assert example["position"] == len(prompt)
    assert repr(tokenizer.decode(whole)) in example["text"]


def test_ids_of_another_tokenizer_are_noticed(desk: Desk, prompt: list[int]) -> None:
    spelled = [tokenizer_id for c in "What is" for tokenizer_id in desk.tokenizer.encode(c)]
    odd = [*prompt[:1], *spelled, *prompt[-3:]]
    outcome = desk.verify(id_row(odd, [70, CLOSER, 71, END]))
    assert outcome.verdicts == {"prompt_drift": "warning"}
    assert outcome.report.drift["prompts_changed"] == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "input_ids": st.lists(st.integers(-1, 513) | st.booleans() | st.none(), max_size=9)
                | st.text(max_size=5),
                "loss_mask": st.lists(st.integers(0, 2) | st.booleans(), max_size=9),
                "labels": st.lists(st.integers(-100, 513) | st.none(), max_size=9),
                "attention_mask": st.lists(st.integers(0, 1), max_size=9),
                "finish_reason": st.sampled_from(["stop", "length", None, 7]),
                "messages": st.lists(
                    st.dictionaries(
                        st.sampled_from(["role", "content", "from", "value", "thinking"]),
                        st.sampled_from(["user", "assistant", "<think>", "", 1, None, ["a"]]),
                    )
                    | st.none(),
                    max_size=3,
                ),
                "prompt": st.text(max_size=5) | st.integers(),
                "completion": st.text(max_size=5) | st.lists(st.integers()),
                "text": st.text(max_size=9),
            },
        ),
        max_size=4,
    )
)
def test_any_row_is_counted_and_none_stops_the_check(
    desk: Desk, rows: list[dict[str, Any]]
) -> None:
    outcome = desk.verify(*rows)
    report = outcome.report
    unread = report.faults["bad_line"].count if "bad_line" in report.faults else 0
    assert report.rows == len(rows) == sum(report.kinds.values()) + unread
    assert all(seen.count <= len(rows) for seen in report.faults.values())


def with_bos(shared: Path, tmp_path: Path) -> Desk:
    tokenizer = load_tokenizer(str(shared / "tokenizers/llama3_1"))
    template = (shared / "templates/Llama-3.1-Instruct.jinja").read_text()
    return Desk.of(tokenizer, tmp_path, template)


def test_bos_ids(shared: Path, tmp_path: Path) -> None:
    desk = with_bos(shared, tmp_path)
    (bos,) = desk.profile.bos_ids
    prompt = desk.prompt()
    output = [*desk.tokenizer.encode("Four."), *desk.profile.stop_ids]
    assert desk.verify(id_row(prompt, output)).faults == {}
    doubled = desk.verify(id_row([bos, *prompt], output))
    assert doubled.verdicts == {"doubled_bos": "failed"}
    assert desk.verify(id_row(prompt[1:], output)).verdicts == {"bos_missing": "warning"}


def test_kimi_rows_made_with_its_own_template_lost_their_reasoning(
    shared: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(shared / "tokenizers/kimi-k2.5"))
    desk = Desk.of(tokenizer, tmp_path)
    template = ChatTemplate.of(tokenizer)
    chat = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."},
    ]
    whole = tokenizer.encode(template.render(chat, add_generation_prompt=False))
    prompt = tokenizer.encode(template.render(chat[:1]))
    assert prompt[-1] == 163606
    for border, expected in (
        (len(prompt) - 1, {"opener_supervised", "reasoning_empty"}),
        (len(prompt), {"reasoning_empty"}),
        (len(prompt) + 1, {"reasoning_closed"}),
    ):
        outcome = desk.verify(id_row(whole[:border], whole[border:]))
        assert set(outcome.faults) == expected
        assert outcome.findings.failed
    kept = [
        *prompt,
        *tokenizer.encode("Two and two."),
        163607,
        *tokenizer.encode("It is 4."),
        163586,
    ]
    assert desk.verify(id_row(kept[: len(prompt)], kept[len(prompt) :])).faults == {}


def test_the_space_behind_the_opener_belongs_to_the_prompt(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen3"))
    template = (shared / "templates/Qwen3-Next-Thinking.jinja").read_text()
    desk = Desk.of(tokenizer, tmp_path, template)
    prompt = desk.prompt()
    assert prompt[-2:] == [151667, 198]
    output = tokenizer.encode("Two and two.\n</think>\n\nFour.<|im_end|>")
    assert desk.verify(id_row(prompt, output)).faults == {}
    for earlier, fault in ((1, "prompt_supervised"), (2, "opener_supervised")):
        row = id_row(prompt[:-earlier], prompt[-earlier:] + output)
        assert desk.verify(row).faults == {fault: 1}
    assert desk.verify(id_row(prompt, [*output, 198])).faults == {"after_stop_supervised": 1}
    # A newline that the model generated merges with the prompt's where both are one text.
    seam = desk.verify(id_row(prompt, [198, *output]))
    assert seam.faults == {}
    assert seam.report.drift["seams"] == 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_end_of_the_prompt_in_front_of_the_output(
    count: int, desk: Desk, prompt: list[int], output: list[int]
) -> None:
    """As SGLang 0.5.1 to 0.5.4.post2 answers; one id is the opener once more."""
    outcome = desk.verify(id_row(prompt, prompt[-count:] + output), id_row(prompt, output))
    more = {"stop_inside": 1} if END in prompt[-count:] else {}
    assert outcome.faults == {"prompt_repeated": 1} | more
    assert outcome.verdicts["prompt_repeated"] == "failed"


def test_the_opener_again_behind_space(desk: Desk, prompt: list[int], output: list[int]) -> None:
    outcome = desk.verify(id_row(prompt, [198, OPENER, *output]))
    assert outcome.faults == {"prompt_repeated": 1}


def test_what_an_answer_may_begin_with(
    desk: Desk, tokenizer: Tokenizer, prompt: list[int], output: list[int]
) -> None:
    """Space, words of the question, or an opener that it writes about."""
    later = [*output[:4], OPENER, *output[4:]]
    question = tokenizer.encode("What is 2+2?")
    rows = [id_row(prompt, made) for made in ([198, *output], [*question, *output], later)]
    assert desk.verify(*rows).faults == {}


@pytest.mark.parametrize("bad", [None, "5", True, [7]])
@pytest.mark.parametrize("place", ["prompt", "answer"])
def test_labels_that_are_none(
    bad: Any, place: str, desk: Desk, prompt: list[int], output: list[int]
) -> None:
    labels: list[Any] = [-100] * len(prompt) + output
    for at in range(len(prompt)) if place == "prompt" else [len(labels) - 3]:
        labels[at] = bad
    outcome = desk.verify({"input_ids": prompt + output, "labels": labels})
    assert "mask_values" in outcome.faults
    if bad is not True:
        assert set(outcome.faults) == {"mask_values"}
    assert repr(bad) in outcome.report.faults["mask_values"].examples[0].detail
