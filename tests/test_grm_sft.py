"""grm_sft.py: rows, loss masks token by token, packed = unmodified model, judgments, runs, examples."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import deepspeed
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from conftest import ROOT, TINY, metrics_of, read_jsonl, weights_of, write_jsonl
from conftest import chat as chat_of
from test_families import unmodified_logprobs, write_video

import grm_sft
from common import chats, decoding, packing
from common.decoding import Response
from examples import convert_judgments

FILES = ROOT / "tests/data/grm"
IMAGES = f"{FILES}/images"
ARGS = grm_sft.Args(max_response_length=12, video_fps=4.0, dtype="float32", zero_stage=0)
EOS = "<|im_end|>"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    """Pairs of images, texts and videos; chats, with two images and of text only."""
    write_video(path := tmp_path_factory.mktemp("video") / "clip.mp4")
    video = str(path)
    turns = "<image><image>Good?", "<answer>8</answer>", "And this?", "<think>less</think>", "sure?", "yes"
    turns = [{"role": "system", "content": "You judge."}, *chat_of(*turns)]
    texts = {"reasoning": "Image 1 shows a ball, Image 2 a box. The first image fits."}
    texts["swapped_reasoning"] = "Image 2 shows a ball, Image 1 a box. The second image fits."
    red, cat_a, cat_b = {"image": f"{IMAGES}/small.png"}, f"{IMAGES}/cat_a.png", f"{IMAGES}/cat_b.png"
    return [
        {"prompt": "a red ball", "image_1": cat_a, "image_2": cat_b, "verdict": "1", **texts},
        {"prompt": "a box", "image_1": cat_a, "image_2": f"{IMAGES}/wide.png", "verdict": "tie"},
        {"prompt": "it rolls", "video_1": video, "video_2": video, "verdict": "2"},
        {"prompt": "What is 2 + 2?", "answer_1": "4", "answer_2": "5", "verdict": "1"},
        {"prompt": "Which color?", **red, "answer_1": "red", "answer_2": "blue", "verdict": "2"},
        {"prompt": "What shape?", **red, "answer_1": "circle", "answer_2": "box", "verdict": "1"},
        {"messages": turns, "images": [cat_a, f"{IMAGES}/small.png"]},
        {"messages": chat_of("Say hello.", "Hello."), "verdict": "1"},  # a chat, since it has no prompt
    ]


@pytest.fixture(scope="module")
def tiny_vl() -> tuple:
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    return grm_sft.load_model(ARGS, TINY).eval(), processor, processor.tokenizer


@pytest.fixture
def grm(run, rows, tmp_path):
    """A run on these rows: 14 examples."""
    judged = write_jsonl(tmp_path / "judged.jsonl", rows)
    base = {"dataset": judged, "eval_dataset": judged, "video_fps": 4.0, "train_batch_size": 6}
    base |= {"micro_batch_tokens": 4096, "warmup_updates": 0, "learning_rate": 1e-4}
    return lambda **flags: run("grm_sft", **base | flags)


def encode(tiny_vl, row: dict, number: int = 0, training: bool = False) -> grm_sft.Example:
    [example_id] = ids_of(number)
    rows = [row] * (example_id.row + 1)
    return grm_sft.ExampleDataset(ARGS, "", rows, [], Path(), *tiny_vl[:2], training).encode(example_id)


def ids_of(*numbers: int) -> list[grm_sft.ExampleId]:
    """Tests count examples: 2 * row, plus 1 if swapped."""
    return [grm_sft.ExampleId(number // 2, number % 2 == 1) for number in numbers]


def numbers_of(groups: list[list[grm_sft.ExampleId]]) -> list[list[int]]:
    return [[2 * row + swapped for row, swapped in group] for group in groups]


def make_chat(row: dict, swapped: bool = False) -> dict:
    if grm_sft.is_pair(row):
        return grm_sft.build_pair(row, swapped)[0]
    return row | {"prompt": row["messages"]}


def load(tiny_vl, source: str, training: bool, **flags) -> grm_sft.ExampleDataset:
    return grm_sft.load_examples(replace(ARGS, **flags), source, "train", *tiny_vl[:2], training)


def test_chats_alone_are_a_dataset(tiny_vl, tmp_path):
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat_of("Say hello.", "Hello.")}] * 3)
    assert load(tiny_vl, source, training=True).groups == [ids_of(i) for i in (0, 2, 4)]


@torch.no_grad()
def expected_logprobs(tiny_vl, row: dict, swapped: bool) -> torch.Tensor:
    """Log-probs of an example's trained tokens under the unmodified model, in one forward of the whole chat."""
    model, processor, tokenizer = tiny_vl
    example = encode(tiny_vl, row, swapped, training=True)
    messages = grm_sft.build_messages(ARGS, make_chat(row, swapped), Path(), tokenizer)
    ids = torch.cat([example.prefix.input_ids, example.suffix.input_ids])
    assert torch.equal(ids, chats.encode_chat(processor, messages)["input_ids"][0, : len(ids)])
    logprobs = unmodified_logprobs(model, example.prefix.inputs, example.suffix.input_ids, temperature=1.0)
    return logprobs[example.suffix.response_mask]


def test_each_epoch_has_every_example_once_and_groups_stay_together():
    groups = [[0, 1, 2], [3], [4, 5], [6]]

    def sample(step, batch_size=7, seed=1) -> list[int]:
        args = replace(ARGS, train_batch_size=batch_size, seed=seed)
        return grm_sft.sample_example_ids(args, groups, step)

    epochs = [sample(step) for step in (1, 2, 3, 4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert sample(2, batch_size=12) == sum(epochs, [])[12:24]
    assert all([e[e.index(0) + i] for i in range(3)] == [0, 1, 2] for e in epochs)
    assert any(sample(1, seed=s) != epochs[0] for s in (2, 3, 4))


# --- rows ---
def test_verdicts_are_parsed_strictly():
    first, second = "<answer>Image 1 is better</answer>", "<answer>Image 2 is better</answer>"
    for text in ("", "Image 1 is better", "<answer>Image 1 is better", first.replace("is", "is not")):
        assert grm_sft.parse_verdict(text, "Image") is None
    for text in (first.replace("1", "3"), first + second, "<answer>what</answer>" + second):
        assert grm_sft.parse_verdict(text, "Image") is None
    for verdict in grm_sft.VERDICTS:
        text = f"<think>x</think><answer> {grm_sft.VERDICTS[verdict].format('Video')}\n</answer> and so on"
        assert grm_sft.parse_verdict(text, "Video") == verdict


def test_swapping_changes_candidates_verdict_and_reasoning(rows):
    (original, *known), (swapped, *changed) = (grm_sft.build_pair(rows[0], x) for x in (False, True))
    assert known == ["Image", "1"] and changed == ["Image", "2"]
    assert swapped["images"] == original["images"][::-1] == [f"{IMAGES}/cat_b.png", f"{IMAGES}/cat_a.png"]
    user, assistant = (original["prompt"][i]["content"] for i in (0, 1))
    assert user == swapped["prompt"][0]["content"] == "a red ball\nImage 1: <image>\nImage 2: <image>"
    template = "<think>Image {} shows a ball, Image {} a box. The {} image fits.</think>"
    template += "<answer>Image {} is better</answer>"
    assert assistant == template.format(1, 2, "first", 1)
    assert swapped["prompt"][1]["content"] == template.format(2, 1, "second", 2)
    ties = [make_chat(rows[1], x)["prompt"][1]["content"] for x in (False, True)]
    assert ties == ["<answer>Both are equally good</answer>"] * 2
    texts = [make_chat(rows[4], x)["prompt"][0]["content"] for x in (False, True)]
    assert texts[0] == "<image>Which color?\nAnswer 1: red\nAnswer 2: blue"
    assert texts[1] == "<image>Which color?\nAnswer 1: blue\nAnswer 2: red"
    assert [grm_sft.build_pair(rows[4], x)[2] for x in (False, True)] == ["2", "1"]
    row = rows[0] | {"images": [f"{IMAGES}/wide.png"], "prompt": "change <image> to a ball"}
    assert make_chat(row, True)["images"] == [f"{IMAGES}/{name}.png" for name in ("wide", "cat_b", "cat_a")]
    text = rows[3] | {"answer_1": "<image><video>", "reasoning": "<image><answer>"}  # text, not markers
    user, assistant = make_chat(text)["prompt"]
    assert "Answer 1: < image>< video>\n" in user["content"]
    assert "< image>< answer>" in assistant["content"] and assistant["content"].count("<answer>") == 1


def test_pairs_with_reasoning_for_one_order_are_trained_in_one(tiny_vl, rows, tmp_path, capsys):
    unknown = rows[0] | {"swapped_reasoning": None}
    source = write_jsonl(tmp_path / "rows.jsonl", [rows[0], unknown, rows[1]])
    assert numbers_of(load(tiny_vl, source, training=True).groups) == [[0, 1], [2], [4, 5]]
    assert "1 of 3 rows have one order only" in capsys.readouterr().out
    judged = load(tiny_vl, source, training=False)
    assert numbers_of(judged.groups) == [[0, 1], [2, 3], [4, 5]]
    assert judged.encode(grm_sft.ExampleId(1, swapped=True)).label == "2"


def test_both_orders_and_rows_with_the_same_image_form_a_group(tiny_vl, monkeypatch):
    monkeypatch.setattr(grm_sft, "EASY_VQA_ROWS", 200)
    rows = chats.easy_vqa_rows("train").select(range(2500))  # of 39,000
    monkeypatch.setattr(chats, "easy_vqa_rows", lambda split: rows)
    data = load(tiny_vl, "easy-vqa", training=True)
    assert len(sum(data.groups, [])) == len({*sum(data.groups, [])}) == 400 and len(data.groups) < 200
    for group in data.groups:
        assert {(row, swapped) for row, _ in group for swapped in (False, True)} == {*group}
        assert len({data.rows[row]["image"] for row, _ in group}) == 1
    data = load(tiny_vl, "easy-vqa", training=True, group_by_image=False)
    assert all(second == first + 1 for first, second in numbers_of(data.groups)) and len(data.groups) == 200
    evaluations = [load(tiny_vl, "easy-vqa", training=False, eval_rows=10, seed=s) for s in (1, 2)]
    ids = sum(evaluations[0].groups, [])
    assert len(ids) == 20 and ids == sum(evaluations[1].groups, [])
    assert max(ids).row > 1000, "ids are those of the dataset's rows, not of the subset's"
    labels = [[data.encode(i).label for i in ids] for data in evaluations]
    assert labels[0] == labels[1], "the evaluation set does not depend on the seed"


# --- loss masks ---
def trained(tiny_vl, row: dict, **how) -> str:
    example = encode(tiny_vl, row, **how)
    return tiny_vl[2].decode(example.suffix.input_ids[example.suffix.response_mask])


@pytest.mark.parametrize("training", [True, False])
def test_assistant_turns_are_trained(training, tiny_vl, rows):
    row = rows[4] | {"verdict": "1", "reasoning": "red"}
    answer = f"<think>red</think><answer>Answer 1 is better</answer>{EOS}"
    assert trained(tiny_vl, row, training=training) == answer
    turns = f"<answer>8</answer>{EOS}<think>less</think>{EOS}yes{EOS}" if training else f"yes{EOS}"
    assert trained(tiny_vl, rows[6], training=training) == turns
    chat = encode(tiny_vl, rows[6], training=training)
    assert len(chat.prefix.media_inputs["image_grid_thw"]) == 2
    text = tiny_vl[2].decode(chat.suffix.input_ids)
    assert ("And this?" in tiny_vl[2].decode(chat.prefix.input_ids)) != training
    assert ("And this?" in text) == training and text.startswith("Good?" if training else "yes")
    text_only = [turn | {"content": turn["content"].replace("<image>", "")} for turn in rows[6]["messages"]]
    assert trained(tiny_vl, {"messages": text_only}, training=training) == turns
    # Data can't end a turn.
    turns = chat_of(f"a{EOS}\n<|im_start|>assistant\nno", f"yes{EOS}no")
    text = trained(tiny_vl, {"messages": turns}, training=training)
    assert text.count(EOS) == 1 and text.endswith(EOS)


LINE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
ASK = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_turns_are_located_in_templates_with_and_without_eos(tiny_text_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_model)
    model = grm_sft.load_model(ARGS, tiny_text_model)

    def turns_of(template: str) -> list[str]:
        tokenizer.chat_template = template
        chat = chat_of(
            *([{"type": "text", "text": text}] for text in ("a", "<think>hm</think>ok", "b", "no"))
        )
        data = grm_sft.ExampleDataset(ARGS, "", [], [], Path(), model, tokenizer, training=True)
        ids, turns = data.locate_turns(chat)
        assert turns[-1].stop == len(ids)
        return [tokenizer.decode(ids[turn.start : turn.stop]) for turn in turns]

    assert turns_of(LINE + "<|end|>\n\n" + ASK) == ["<think>hm</think>ok<|end|>", "no<|end|>"]
    assert turns_of(LINE + "\n" + ASK) == ["<think>hm</think>ok\n", "no\n<|end|>"]
    with pytest.raises(chats.RowError, match="message 1 depends on what follows"):
        turns_of("{% for m in messages %}{{ m['content'] if loop.last else 'x' }}|{% endfor %}")
    renamed = LINE.replace("['content']", "['content'].replace('think>', 'why>')")
    assert turns_of(renamed + "<|end|>" + ASK)[0] == "<why>hm</why>ok<|end|>"
    with pytest.raises(chats.RowError, match="leaves out the reasoning of message 1"):  # DeepSeek-R1's
        turns_of(LINE.replace("['content']", "['content'].split('</think>')[-1]") + "<|end|>" + ASK)


def make_judge() -> grm_sft.Judge:
    judge = grm_sft.Judge(grm_sft.load_model(ARGS, TINY).eval())
    packing.set_attention(judge.model, "packed")
    return judge


def make_run(**known) -> grm_sft.Run:
    """The fields that iter_packs and evaluate use."""
    judge = make_judge()
    engine = torch.nn.ModuleDict({"module": judge})
    known |= {"judge": engine, "sampling_model": judge.model, "state": {"step": 0}}
    return grm_sft.Run(**dict.fromkeys(grm_sft.Run.__dataclass_fields__) | known)


def test_packs_share_images(tiny_vl, rows, tmp_path):
    source = write_jsonl(tmp_path / "judged.jsonl", rows)
    run = make_run(train_data=load(tiny_vl, source, training=True))
    grm_sft.gather_examples(run.train_data, ids_of(0))  # its prefix is not kept
    examples = grm_sft.gather_examples(run.train_data, ids_of(8, 9, 10, 11))  # one image
    (pack,) = grm_sft.iter_packs(ARGS, run, examples)
    assert len(pack.model_inputs["image_grid_thw"]) == 1 and len(pack.response_index) == 4
    assert len(run.train_data.prefixes) == 1, "both rows have the same prefix"
    num_tokens = examples[0].prefix.length + sum(len(example.suffix.input_ids) for example in examples)
    assert pack.model_inputs["input_ids"].numel() == num_tokens


# --- judgments ---
@pytest.fixture
def write(tiny_vl, monkeypatch):
    """Make the model write given texts, one per prompt."""

    def write(*texts: str) -> None:
        ids = [torch.tensor(tiny_vl[2](text)["input_ids"]) for text in texts]
        responses = [Response(x, torch.zeros(len(x)), EOS not in text) for x, text in zip(ids, texts)]
        monkeypatch.setattr(decoding, "generate", lambda **how: responses)

    return write


@torch.no_grad()
def softmax_over_verdicts(tiny_vl, example: grm_sft.Example, reasoning: str) -> list[float]:
    texts = [reasoning + grm_sft.format_verdict(verdict, example.noun) for verdict in grm_sft.VERDICTS]
    ids = [torch.tensor(tiny_vl[2](text)["input_ids"]) for text in texts]
    logprobs = [unmodified_logprobs(tiny_vl[0], example.prefix.inputs, x, 1.0) for x in ids]
    return torch.stack([x.sum() for x in logprobs]).softmax(0).tolist()


def test_judgments_are_those_of_the_unmodified_model(tiny_vl, rows):
    model, _, tokenizer = tiny_vl
    examples = [encode(tiny_vl, rows[i], 2 * i + x) for i in (0, 1, 2, 3, 4) for x in (0, 1)]
    examples.append(encode(tiny_vl, rows[6], 12))
    records = grm_sft.judge_examples(ARGS, make_judge().model, tokenizer, examples)
    suppressed = packing.media_token_ids(model.config)
    for example, record in zip(examples, records, strict=True):
        P = example.prefix.length
        greedy = {"do_sample": False, "max_new_tokens": 12, "suppress_tokens": suppressed}
        ids = model.generate(**example.prefix.inputs, **greedy)[0, P:]
        assert record["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert record["length"] == len(ids)
        assert record["truncated"] == (ids[-1] != tokenizer.eos_token_id)
        logprobs = unmodified_logprobs(model, example.prefix.inputs, example.suffix.input_ids, 1.0)
        assert record["loss_sum"] == pytest.approx(-logprobs.sum().item(), abs=1e-3)
        assert record["num_tokens"] == len(example.suffix.input_ids)
        assert (record["row"], record["swapped"]) == example.example_id
    assert "correct" in records[0] and not {"correct", "probabilities"} & records[-1].keys()


def test_the_dataset_s_response_may_be_long_in_an_evaluation(tiny_vl, rows):
    """Otherwise one order of a pair could be judged alone: the other one has no reasoning to rewrite."""
    row = rows[4] | {"reasoning": "red " * 3000}
    assert encode(tiny_vl, row).label is not None
    with pytest.raises(grm_sft.RowError, match="exceed --max-length"):
        encode(tiny_vl, row, training=True)


def test_soft_verdicts_follow_the_own_reasoning(tiny_vl, rows, write):
    """Probabilities of the verdicts given what the model has written before its answer."""
    examples = [encode(tiny_vl, rows[4], x) for x in (0, 1)]
    reasonings = ["<think>red</think>", "<think>Answer 2 is better, Answer 2 is better</think>"]
    write(*[f"{reasoning}<answer>Answer 2 is better</answer>{EOS}" for reasoning in reasonings])
    records = grm_sft.judge_examples(ARGS, make_judge().model, tiny_vl[2], examples)
    for example, record, reasoning in zip(examples, records, reasonings):
        soft = list((probabilities := record["probabilities"]).values())
        assert soft == pytest.approx(softmax_over_verdicts(tiny_vl, example, reasoning), abs=1e-4)
        assert np.abs(np.subtract(soft, softmax_over_verdicts(tiny_vl, example, ""))).max() > 0.01
        likeliest = max(probabilities, key=probabilities.get)
        assert record["soft_correct"] == (likeliest == example.label)
    assert [x["predicted_verdict"] for x in records] == ["2", "2"]
    assert [x["correct"] for x in records] == [True, False], "the labels are 2 and 1"
    assert grm_sft.compute_judge_metrics(records)["eval/first_rate"] == 0


def test_soft_accuracy_skips_a_truncated_reasoning(tiny_vl, rows, write):
    """Its verdicts would be scored after an unclosed <think>."""
    examples = [encode(tiny_vl, rows[4], x) for x in (0, 1)]
    for text, is_scored in (("<think>red, so", False), ("<think>red</think><answer>Answer 2", True)):
        write(f"<think>red</think>{EOS}", text)
        records = grm_sft.judge_examples(ARGS, make_judge().model, tiny_vl[2], examples)
        assert [x["truncated"] for x in records] == [False, True]
        assert records[0]["soft_correct"] in (True, False)
        assert (records[1]["soft_correct"] is not None) == is_scored
        metrics = grm_sft.compute_judge_metrics(records)
        scored = [x["soft_correct"] for x in records if x["soft_correct"] is not None]
        assert metrics["eval/soft_accuracy"] == np.mean(scored)
        assert metrics["eval/num_soft_skipped"] == 1 - is_scored


def make_record(example_id: int, label: str | None, verdict: str | None, **other) -> dict:
    record = {"row": example_id // 2, "swapped": example_id % 2 == 1, "response": f"writes {verdict}"}
    record |= {"length": 5, "truncated": False, "loss_sum": 6.0, "num_tokens": 4} | other
    if label is not None:
        record |= {"predicted_verdict": verdict, "correct": verdict == label, "soft_correct": True}
    return record


LEAKS = {"accuracy": "yes", "correct": 0, "soft_correct": None, "loss": "high", "tie": True, "length": 99}


# verdicts in both orders: accuracy, swap consistency, parse rate, tie rate, first rate
VERDICTS = {("1", "2"): (1, 1, 1, 0, 0.5), ("1", "1"): (0.5, 0, 1, 0, 1), ("2", "1"): (0, 1, 1, 0, 0.5)}
VERDICTS |= {("tie", "tie"): (0, 1, 1, 1, 0), ("1", None): (0.5, 0, 0.5, 0, 0.5)}


@pytest.mark.parametrize("verdicts", VERDICTS)
def test_both_orders_count_and_columns_of_the_data_do_not(verdicts, tiny_vl, rows, tmp_path, monkeypatch):
    """A pair whose first candidate is better, and a chat."""

    def judge(args, model, tokenizer, examples) -> list[dict]:
        assert [x.label for x in examples] == ["1", "2", None]
        columns = [{"columns": x.row} for x in examples]
        records = [make_record(i, x.label, verdicts[i], **columns[i]) for i, x in enumerate(examples[:2])]
        return [*records, make_record(2, None, None, loss_sum=2.0, length=8, **columns[2])]

    monkeypatch.setattr(grm_sft, "judge_examples", judge)
    source = write_jsonl(tmp_path / "rows.jsonl", [rows[0] | LEAKS, rows[7] | LEAKS])
    metrics, records = grm_sft.evaluate(ARGS, make_run(eval_data=load(tiny_vl, source, training=False)))
    accuracy, *others = VERDICTS[verdicts]
    names = ("eval/swap_consistency", "eval/parse_rate", "eval/tie_rate", "eval/first_rate")
    assert metrics["eval/accuracy"] == accuracy
    assert [metrics[name] for name in names] == others
    assert metrics["eval/loss"] == 8 / 8 and metrics["eval/length"] == 6 and metrics["eval/num_rows"] == 2
    pair, chat = records
    assert (pair["row"], pair["predicted_verdict"], pair["accuracy"]) == (0, verdicts[0], "yes")
    assert pair["length"] == 5, "not the column's"
    assert pair["swapped_response"] == f"writes {verdicts[1]}" and pair["consistent"] == others[0]
    assert chat["row"] == 1 and "consistent" not in chat and "columns" not in chat
    of_chats = grm_sft.compute_judge_metrics([make_record(2, None, None)])
    assert of_chats.keys() == {"eval/loss", "eval/length", "eval/truncated_frac", "eval/num_rows"}


# --- runs ---
def test_the_loss_is_the_mean_over_the_trained_tokens_of_the_step(grm, tiny_vl, rows, monkeypatch, capsys):
    """Compared with the unmodified model, over several packs; the last pack ends the optimizer step."""
    boundaries, engine = [], deepspeed.DeepSpeedEngine
    set_boundary = engine.set_gradient_accumulation_boundary
    watched = lambda self, is_last: boundaries.append(is_last) or set_boundary(self, is_last)  # noqa: E731
    monkeypatch.setattr(engine, "set_gradient_accumulation_boundary", watched)
    sizes = {"max_length": 700, "micro_batch_tokens": 700}
    run_dir = grm(total_steps=1, train_batch_size=14, eval_dataset=None, **sizes)
    (metrics,) = metrics_of(run_dir)
    orders = [(row, swapped) for row in rows for swapped in ([False, True] if "prompt" in row else [False])]
    logprobs = [expected_logprobs(tiny_vl, *order) for order in orders]
    num_tokens = sum(map(len, logprobs))
    assert metrics["train/trained_tokens"] == num_tokens and metrics["train/rows_skipped"] == 0
    assert metrics["loss/sft"] == pytest.approx(-sum(x.sum().item() for x in logprobs) / num_tokens, abs=1e-4)
    assert boundaries == [False] * (len(boundaries) - 1) + [True] != [True]
    assert "14 examples" in capsys.readouterr().out


def test_a_run_learns(grm):
    run_dir = grm(total_steps=2, eval_steps=1, learning_rate=2e-3, train_batch_size=14, eval_rows=3)
    _, *steps = metrics_of(run_dir)
    assert [m["train/step"] for m in steps] == [1, 2]
    assert steps[1]["loss/sft"] < 0.9 * steps[0]["loss/sft"]
    initial, last = map(weights_of, (Path(TINY), run_dir / "checkpoint-2"))
    moved = {name for name, w in last.items() if not torch.equal(w, initial[name])}
    assert moved and not any("visual" in name for name in moved), "the vision tower is frozen"
    record = read_jsonl(run_dir / "samples.jsonl")[0]
    assert {"phase", "prompt", "response", "swapped_response", "predicted_verdict"} <= record.keys()


# --- invalid input ---
def test_rows_that_can_not_be_used_are_skipped_and_counted(grm, rows, tmp_path, capsys):
    calls = {"role": "assistant", "content": "let me look", "tool_calls": [{"name": "zoom"}]}
    bad = [  # words of the message, row
        ("nope.png", rows[0] | {"image_2": "nope.png"}),
        ("max-length", rows[3] | {"prompt": "long " * 900}),
        ("exactly one of", rows[0] | {"answer_1": "a", "answer_2": "b"}),
        ("assistant turn", {"messages": chat_of("hello")}),
        ("must have text", {"messages": chat_of("a", "b", "<image>?", "c"), "image": f"{IMAGES}/small.png"}),
        ("must have text", {"messages": chat_of("a", "", "b", "ok")}),
        ("tool_calls", {"messages": [*chat_of("a"), calls, *chat_of("b", "ok")]}),
    ]
    source = write_jsonl(tmp_path / "bad.jsonl", [*rows, *(row for _, row in bad)])
    run_dir = grm(dataset=source, total_steps=1, train_batch_size=24, eval_dataset=None)
    assert metrics_of(run_dir)[-1]["train/rows_skipped"] == len(bad)
    error = capsys.readouterr().err
    for row, (words, _) in enumerate(bad, 8):
        assert re.search(f"row {row} is skipped.*{words}", error)


def test_most_rows_end_a_run_but_not_a_bad_row_in_a_small_batch(grm, rows, tmp_path, refused):
    bad = {"messages": chat_of("no answer")}
    source = write_jsonl(tmp_path / "rows.jsonl", [rows[7], rows[7], bad])
    run_dir = grm(dataset=source, total_steps=3, train_batch_size=1, eval_dataset=None)
    steps = metrics_of(run_dir)
    assert sorted(m["train/rows_skipped"] for m in steps) == [0, 0, 1]
    assert all(("loss/sft" in m) == (m["train/rows_skipped"] == 0) for m in steps)
    assert (run_dir / "checkpoint-3").is_dir()
    source = write_jsonl(tmp_path / "rows.jsonl", [rows[7], bad, bad])
    with refused("step 12: 72 of the last 108 examples were skipped"):
        grm(dataset=source, total_steps=40, train_batch_size=9, eval_dataset=None, run_name="bad")
    assert (tmp_path / "runs/bad/checkpoint-12-problem").is_dir()


def test_an_evaluation_without_usable_rows_saves_and_stops(grm, tmp_path, refused, monkeypatch):
    """Its images are gone after the first evaluation."""
    judge, all_records = grm_sft.judge_examples, []

    def judge_once(*args):
        all_records.append([] if all_records else judge(*args))
        return all_records[-1]

    monkeypatch.setattr(grm_sft, "judge_examples", judge_once)
    with refused("all rows were skipped"):
        grm(total_steps=2, eval_steps=1)
    assert (tmp_path / "runs/run/checkpoint-1-problem/state").is_dir()


def test_tags_that_decoding_drops_are_refused(tiny_vl, rows, tmp_path, refused):
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
    with refused("['<answer>'] must be ordinary tokens"):
        load((tiny_vl[0], processor), write_jsonl(tmp_path / "rows.jsonl", rows), training=True)


@pytest.mark.parametrize("verdicts", [[1, 2], [1.0, 2.0, None], ["1", "tie"]])
def test_verdicts_may_be_numbers(verdicts, tiny_vl, rows, tmp_path):
    """And prompts, too."""
    pairs = [rows[3] | rows[7] | {"prompt": 5, "verdict": x} for x in verdicts]
    source = write_jsonl(tmp_path / "rows.jsonl", pairs)
    data = load(tiny_vl, source, training=True)
    labels = [data.encode(example_id).label for example_id in ids_of(*range(0, 2 * len(verdicts), 2))]
    assert labels == [None if x is None else str(x)[:3].removesuffix(".0") for x in verdicts]


PAIR = {"prompt": "?", "answer_1": "a", "answer_2": "b"}
VQA_ROW = {"prompt": "What color?", "image": "a.png", "answer": "red"}  # only "easy-vqa" becomes pairs
BAD_ROWS = {"has columns prompt, ": [VQA_ROW], "not messages": [PAIR | {"prompt": [], "verdict": 1}]}
BAD_ROWS |= {f"not {bad!r}": [PAIR | {"verdict": x} for x in (bad, good)] for bad, good in ((0, 1), "a1")}


@pytest.mark.parametrize("words", BAD_ROWS)
def test_invalid_input_ends_with_one_sentence(words, grm, tmp_path, refused):
    with refused(words):
        grm(dataset=write_jsonl(tmp_path / "bad.jsonl", BAD_ROWS[words]))


# --- examples ---
SWAPS = {
    "IMAGE 2 is dark, the first image isn't.": "IMAGE 1 is dark, the second image isn't.",
    "First image: dark. Second image: bright.": "Second image: dark. First image: bright.",
    "Both are good, but image 1 is sharp.": "Both are good, but image 2 is sharp.",
    "Image 1 gets 8/10 or 1.5, or 12 of 21.": "Image 2 gets 8/10 or 1.5, or 12 of 21.",
    "Image 1 has 3 cats": "Image 2 has 3 cats",
    "image 1 has no triangle": "image 2 has no triangle",
    "In image 1, I see a photo": "In image 2, I see a photo",
    "circle": "circle",
    "": "",
}
UNKNOWN_REFERENCES = [
    "Image 1 and 2 are dark.", "Images 1 and 2 are dark.", "The first and second image are dark.", "img1 is dark",
    "image1 is dark.", "Image-1 is dark", "image #1 is dark", "Image A is dark.", "A is darker than B.", "1 is better",
    "Both are dark, but the former fits.", "the latter is better", "Image one fits.", "The left one fits.",
    "the first is better than the second", "Answer 1 is better.", "the 2nd image is better", "Image II fits",
    "1. It is dark.\n2. It fits.", "图1更清晰", "la primera imagen es mejor", "dark sky", "option b is darker",
]  # fmt: skip


@pytest.mark.parametrize("text", [*SWAPS, *UNKNOWN_REFERENCES])
def test_a_reasoning_is_swapped_as_a_whole_or_not_at_all(text):
    assert convert_judgments.swap_references(text) == SWAPS.get(text)


def convert(tmp_path, *names: str, seed: int = 0) -> list[dict]:
    files = tuple(FILES / name for name in names) + (tmp_path / "out.jsonl",)
    convert_judgments.main(convert_judgments.Args(files=files, seed=seed))
    return read_jsonl(files[-1])


def test_data_sets_are_converted(tmp_path, tiny_vl):
    hpd = convert(tmp_path, "hpdv3.json")
    preferred = [row[f"image_{row['verdict']}"] for row in hpd]
    assert preferred == [f"{IMAGES}/{name}.png" for name in ("cat_a", "small", "cat_b", "wide")]
    assert len({tuple(r["verdict"] for r in convert(tmp_path, "hpdv3.json", seed=s)) for s in range(5)}) > 1
    assert hpd[0]["prompt"].endswith("Prompt: a red ball")
    cot = convert(tmp_path, "imagegen_cot.json")
    assert [row["verdict"] for row in cot] == ["1", "2"] and "<image>" not in cot[0]["prompt"]
    assert cot[0]["swapped_reasoning"] is None, "it has a list with a lone 1"
    assert cot[1]["swapped_reasoning"] == "\nThe second image is dark, the first image is plain.\n"
    omni = convert(tmp_path, "omnireward.parquet", "imagegen_cot.json")
    assert [row["verdict"] for row in omni] == ["1", "tie", "2", "tie", "1", "2"]
    assert omni[0]["prompt"].endswith("Prompt: a ball\nIt should be red.")
    for row in hpd + omni:
        assert encode(tiny_vl, row).label == row["verdict"]


def asked(vqa_rows, answers: list[str]) -> dict:
    """Keywords of a reward function: two questions with these answers each."""
    prompts, chats = [], []
    for row in vqa_rows[:2]:
        prompts += [row["prompt"]] * len(answers)
        image = {"type": "image", "image": PIL.Image.open(row["image"])}
        chats += [[{"role": "user", "content": [image]}]] * len(answers)
    return {"prompts": prompts, "chats": chats, "completions": [f"<answer>{a}</answer>" for a in answers] * 2}


@pytest.mark.slow
def test_a_judge_is_a_reward(vqa_rows, monkeypatch):
    """A judge that knows nothing, but loads and writes like any other."""
    monkeypatch.setenv("JUDGE", TINY)
    monkeypatch.setenv("JUDGE_TOKENS", "4")
    monkeypatch.syspath_prepend(ROOT / "examples")
    judge_reward = importlib.import_module("judge_reward")
    one = judge_reward.score(**asked(vqa_rows, ["red", "blue"]))
    other = judge_reward.score(**asked(vqa_rows, ["blue", "red"]))
    assert all(0 <= x <= 1 for x in one) and len({*one}) > 1
    assert one[0] + one[1] == pytest.approx(1, abs=1e-5), "a pair shares one verdict"
    assert one == pytest.approx([other[1], other[0], other[3], other[2]], abs=1e-5)
    assert judge_reward.score(**asked(vqa_rows, ["red", "red"])) == [0.5] * 4
    spelled = judge_reward.score(**asked(vqa_rows, ["<image>", "<|im_end|><|image_pad|>"]))
    assert all(0 <= x <= 1 for x in spelled)
    command = [sys.executable, str(ROOT / "examples/judge_server.py"), "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stdout if line.startswith("judge on port"))
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{line.split()[-1]}")
        remote = judge_reward.score_remote(**asked(vqa_rows, ["red", "blue"]))
        assert remote == pytest.approx(one, abs=1e-6), "the endpoint gives the same scores"
    finally:
        server.kill()
        server.wait()
