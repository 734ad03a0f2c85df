"""grm_sft.py: rows, loss masks token by token, packed = unmodified model, judgments, runs, and what builds on it."""

import importlib
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TINY, assert_same_run, metrics_of, read_jsonl, weights_of, write_jsonl
from test_families import write_video
from tyro import cli

import grm_sft
from common import decoding, packing

FILES = ROOT / "tests/data/grm"
IMAGES = f"{FILES}/images"
ARGS = grm_sft.Args(max_response_length=12, video_fps=4.0)
EOS = "<|im_end|>"


def message(role: str, content) -> dict:
    return {"role": role, "content": content}


def make_rows(video: str) -> list[dict]:
    """Pairs of images, texts and videos; chats, with an image in a later turn and of text only."""
    turns = [
        message("system", "You judge."), message("user", "<image>Good?"),
        message("assistant", "<answer>8</answer>"), message("user", "<image>And this?"),
        message("assistant", "<think>less</think>"), message("user", "sure?"), message("assistant", "yes"),
    ]  # fmt: skip
    reasoning = "Image 1 shows a ball, Image 2 a box. The first image fits."
    red, cat_a, cat_b = {"image": f"{IMAGES}/small.png"}, f"{IMAGES}/cat_a.png", f"{IMAGES}/cat_b.png"
    hello = [message("user", "Say hello."), message("assistant", "Hello.")]
    return [
        {"prompt": "a red ball", "image_0": cat_a, "image_1": cat_b, "verdict": "1", "reasoning": reasoning},
        {"prompt": "a box", "image_0": cat_a, "image_1": f"{IMAGES}/wide.png", "verdict": "tie"},
        {"prompt": "it rolls", "video_0": video, "video_1": video, "verdict": "2"},
        {"prompt": "What is 2 + 2?", "answer_0": "4", "answer_1": "5", "verdict": "1"},
        {"prompt": "Which color?", **red, "answer_0": "red", "answer_1": "blue", "verdict": "2"},
        {"prompt": "What shape?", **red, "answer_0": "circle", "answer_1": "box", "verdict": "1"},
        {"messages": turns, "images": [cat_a, f"{IMAGES}/small.png"]},
        {"messages": hello, "verdict": "1"},  # a chat, since it has no prompt
    ]


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> list[dict]:
    write_video(path := tmp_path_factory.mktemp("video") / "clip.mp4")
    return make_rows(str(path))


@pytest.fixture(scope="session")
def judged(rows, tmp_path_factory) -> str:
    """These rows as a file: 8 rows, 14 examples."""
    return write_jsonl(tmp_path_factory.mktemp("rows") / "judged.jsonl", rows)


@pytest.fixture(scope="module")
def tiny_vl() -> tuple:
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    return grm_sft.load_model(TINY, torch.float32).eval(), processor, processor.tokenizer


def flags_for(source: str) -> dict:
    data = {"dataset": source, "eval_dataset": source, "eval_dataset_split": "train", "video_fps": 4.0}
    small = {"train_batch_size": 6, "micro_batch_tokens": 4096, "warmup_steps": 0, "learning_rate": 1e-4}
    return data | small


@pytest.fixture
def grm(run, judged):
    return lambda **flags: run("grm_sft", **flags_for(judged) | flags)


def encode(tiny_vl, row: dict, example_id: int = 0, share_prompt=False, cache=None) -> grm_sft.Example:
    """The last example of a row."""
    cache = {} if cache is None else cache
    return grm_sft.encode_row(ARGS, *tiny_vl[:2], row, example_id, Path(), share_prompt, cache)[-1]


def load(tiny_vl, source: str, training: bool, split: str = "train", **flags) -> grm_sft.ExampleDataset:
    return grm_sft.load_examples(replace(ARGS, **flags), source, split, *tiny_vl[:2], training)


def assistant_tokens(tokenizer, ids: list[int]) -> list[bool]:
    """The loss mask of a chat of the tiny model, from its tokens: from each header to the next EOS."""
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    mask, inside = [], False
    for t, token in enumerate(ids):
        inside = inside or ids[max(0, t - len(header)) : t] == header
        mask.append(inside)
        inside = inside and token != tokenizer.eos_token_id
    return mask


@torch.no_grad()
def expected_logprobs(tiny_vl, row: dict, swapped: bool) -> torch.Tensor:
    """Log-probs of a row's trained tokens under the unmodified model, in one forward of the whole chat."""
    model, processor, tokenizer = tiny_vl
    chat, _, _ = grm_sft.build_chat(row, swapped)
    messages = grm_sft.build_messages(ARGS, chat, Path(), tokenizer)
    inputs = packing.encode_chat(processor, messages)
    ids = inputs["input_ids"][0]
    logits = model(**inputs).logits[0]
    logits[:, packing.media_token_ids(model.config)] = -1e30
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[assistant_tokens(tokenizer, ids.tolist())[1:]]


# --- math ---


def test_worked_example():
    assert grm_sft.compute_sft_loss(torch.tensor([-1.0, -3.0]), 8) == 0.5


def test_each_epoch_has_every_example_once_and_groups_stay_together():
    groups = [[0, 1, 2], [3], [4, 5], [6]]
    sample = grm_sft.sample_example_ids
    epochs = [sample(groups, start=7 * e, count=7, seed=1) for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert sample(groups, start=5, count=12, seed=1) == epochs[0][5:] + epochs[1] + epochs[2][:3]
    assert all([e[e.index(0) + i] for i in range(3)] == [0, 1, 2] for e in epochs)
    assert any(sample(groups, start=0, count=7, seed=s) != epochs[0] for s in (2, 3, 4))


# --- rows ---

UNREADABLE = [
    "", "Image 1 is better", "<answer>Image 3 is better</answer>", "<answer>Image 1 is better",
    "<answer>Image 1 is not better</answer>", "<answer>7</answer>",
    "<answer>Image 1 is better</answer><answer>Image 2 is better</answer>",
    "<answer>what</answer><answer>Image 2 is better</answer>",
]  # fmt: skip


def test_verdicts_are_parsed_strictly():
    assert [grm_sft.parse_verdict(text) for text in UNREADABLE] == [None] * len(UNREADABLE)
    for verdict in grm_sft.VERDICTS:
        text = f"<think>x</think>{grm_sft.format_verdict(verdict, 'Video')} and so on"
        assert grm_sft.parse_verdict(text) == verdict


def test_swapping_changes_candidates_verdict_and_reasoning(rows):
    (original, *known), (swapped, *changed) = (grm_sft.build_chat(rows[0], x) for x in (False, True))
    assert known == ["Image", "1"] and changed == ["Image", "2"]
    assert swapped["images"] == original["images"][::-1] == [f"{IMAGES}/cat_b.png", f"{IMAGES}/cat_a.png"]
    user, assistant = (original["prompt"][i]["content"] for i in (0, 1))
    assert user == swapped["prompt"][0]["content"] == "a red ball\nImage 1: <image>\nImage 2: <image>"
    template = "<think>Image {} shows a ball, Image {} a box. The {} image fits.</think>"
    template += "<answer>Image {} is better</answer>"
    assert assistant == template.format(1, 2, "first", 1)
    assert swapped["prompt"][1]["content"] == template.format(2, 1, "second", 2)
    ties = [grm_sft.build_chat(rows[1], x)[0]["prompt"][1]["content"] for x in (False, True)]
    assert ties == ["<answer>Both are equally good</answer>"] * 2
    texts = [grm_sft.build_chat(rows[4], x)[0]["prompt"][0]["content"] for x in (False, True)]
    assert texts[0] == "<image>Which color?\nAnswer 1: red\nAnswer 2: blue"
    assert texts[1] == "<image>Which color?\nAnswer 1: blue\nAnswer 2: red"
    assert [grm_sft.build_chat(rows[4], x)[2] for x in (False, True)] == ["2", "1"]
    row = rows[0] | {"images": [f"{IMAGES}/wide.png"], "prompt": "change <image> to a ball"}
    images = [f"{IMAGES}/{name}.png" for name in ("wide", "cat_b", "cat_a")]
    assert grm_sft.build_chat(row, True)[0]["images"] == images
    reasoning = {"verdict": "1", "reasoning": "Image 2 shows 12, so ANSWER 1 is, First answer."}
    turn = grm_sft.build_chat(rows[4] | reasoning, True)[0]["prompt"][1]["content"]  # images of the prompt
    assert turn.startswith("<think>Image 2 shows 12, so ANSWER 2 is, second answer.</think>")
    text = rows[3] | {"answer_0": "<image><video>"}  # a candidate can't refer to an image
    assert "Answer 1: < image>< video>\n" in grm_sft.build_chat(text, False)[0]["prompt"][0]["content"]


def test_easy_vqa_becomes_fair_pairs_of_one_type():
    row, verdicts = {"prompt": "what color?", "image": "x.png", "answer": "red"}, Counter()
    for i in range(300):
        pair = grm_sft.make_easy_vqa_pair(row, np.random.default_rng([1, i]))
        candidates = pair["answer_0"], pair["answer_1"]
        assert candidates[int(pair["verdict"]) - 1] == "red" == pair["reasoning"]
        assert {*candidates} <= {*grm_sft.EASY_VQA_ANSWERS[2].split()} and len({*candidates}) == 2
        verdicts[pair["verdict"]] += 1
    assert 120 < verdicts["1"] < 180


def test_examples_that_share_an_image_form_a_group_in_both_orders(tiny_vl, monkeypatch):
    monkeypatch.setattr(grm_sft, "EASY_VQA_ROWS", 200)
    data = load(tiny_vl, "easy-vqa", training=True)
    assert len(sum(data.groups, [])) == len({*sum(data.groups, [])}) == 400 and len(data.groups) < 200
    for group in data.groups:
        assert {2 * (i // 2) for i in group} | {2 * (i // 2) + 1 for i in group} == {*group}
    evaluations = [load(tiny_vl, "easy-vqa", training=False, eval_rows=10, seed=s) for s in (1, 2)]
    ids = sum(evaluations[0].groups, [])
    assert len(ids) == 20 and ids == sum(evaluations[1].groups, [])
    labels = [[data.encode(i)[0].label for i in ids] for data in evaluations]
    assert labels[0] == labels[1], "the evaluation set does not depend on the seed"


def test_all_rows_of_a_file_are_used(tiny_vl, tmp_path):
    """1b599b4 kept 8,000 random rows."""
    row = {"messages": [message("user", "a"), message("assistant", "b")]}
    data = load(tiny_vl, write_jsonl(tmp_path / "many.jsonl", [row] * 8001), training=True)
    assert data.groups == [[2 * i] for i in range(8001)]


# --- loss masks ---


def trained(tiny_vl, row: dict, **how) -> str:
    """The trained tokens as text."""
    example = encode(tiny_vl, row, **how)
    return tiny_vl[2].decode(example.response_ids[example.loss_mask])


@pytest.mark.parametrize("share_prompt", [True, False])
def test_assistant_turns_are_trained(share_prompt, tiny_vl, rows):
    row = rows[4] | {"verdict": "1", "reasoning": "red"}
    answer = f"<think>red</think><answer>Answer 1 is better</answer>{EOS}"
    assert trained(tiny_vl, row, share_prompt=share_prompt) == answer
    chat = encode(tiny_vl, rows[6], share_prompt=share_prompt)  # a turn, an image, two turns
    turns = f"<think>less</think>{EOS}yes{EOS}" if share_prompt else f"yes{EOS}"
    assert tiny_vl[2].decode(chat.response_ids[chat.loss_mask]) == turns
    assert len(chat.prompt.media["image"]) == 2
    assert tiny_vl[2].decode(chat.response_ids).startswith("And this?" if share_prompt else "yes")
    text_only = [turn | {"content": turn["content"].replace("<image>", "")} for turn in rows[6]["messages"]]
    turns = f"<answer>8</answer>{EOS}<think>less</think>{EOS}yes{EOS}" if share_prompt else f"yes{EOS}"
    assert trained(tiny_vl, {"messages": text_only}, share_prompt=share_prompt) == turns
    # Data can't end a turn.
    turns = [message("user", f"a{EOS}\n<|im_start|>assistant\nno"), message("assistant", f"yes{EOS}no")]
    text = trained(tiny_vl, {"messages": turns}, share_prompt=share_prompt)
    assert text.count(EOS) == 1 and text.endswith(EOS)


LINE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
ASK = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_turns_are_located_in_templates_with_and_without_eos(tiny_text_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_model)

    def turns_of(template: str) -> list[str]:
        tokenizer.chat_template = template
        turns = ("user", "a"), ("assistant", "ok"), ("user", "b"), ("assistant", "no")
        chat = [message(role, [{"type": "text", "text": text}]) for role, text in turns]
        ids, turns = grm_sft.locate_turns(tokenizer, chat, [tokenizer.eos_token_id])
        assert turns[-1].stop == len(ids)
        return [tokenizer.decode(ids[turn.start : turn.stop]) for turn in turns]

    assert turns_of(LINE + "<|end|>\n\n" + ASK) == ["ok<|end|>", "no<|end|>"]
    assert turns_of(LINE + "\n" + ASK) == ["ok\n", "no\n<|end|>"]
    with pytest.raises(ValueError, match="message 1 differently"):
        turns_of("{% for m in messages %}{{ m['content'] if loop.last else 'x' }}|{% endfor %}")


# --- prompts and packs ---


@pytest.mark.parametrize("share_prompt", [True, False])
def test_examples_have_the_tokens_and_positions_of_the_processor(share_prompt, tiny_vl, rows):
    for example_id in (0, 1):
        for row in rows:
            example = encode(tiny_vl, row, example_id, share_prompt)
            chat = grm_sft.build_chat(row, swapped=example_id == 1)[0]
            inputs = packing.encode_chat(tiny_vl[1], grm_sft.build_messages(ARGS, chat, Path(), tiny_vl[2]))
            ids = torch.cat([example.prompt.input_ids, example.response_ids]).tolist()
            assert ids == inputs["input_ids"][0][: len(ids)].tolist()
            assert len(inputs["input_ids"][0]) - len(ids) <= 1, "except the newline after the last EOS"
            assert example.loss_mask.tolist() == assistant_tokens(tiny_vl[2], ids)[example.prompt.length :]
            pack = packing.build_pack([(0, [0])], {0: example.prompt}, [example.response_ids])
            expected = packing.make_prompt(tiny_vl[0], inputs).position_ids[..., : len(ids)]
            assert torch.equal(pack.model_inputs["position_ids"].reshape(expected.shape), expected)


def test_equal_prompts_go_through_the_processor_once_in_any_order(tiny_vl, rows, monkeypatch):
    calls, encode_chat = [], packing.encode_chat
    monkeypatch.setattr(packing, "encode_chat", lambda *a, **k: calls.append(1) or encode_chat(*a, **k))
    cache, keys = {}, []
    for row in (rows[4], rows[4] | {"image": f"{IMAGES}/cat_a.png"}, rows[5], rows[0]):
        for example_id in (0, 1):
            keys.append(encode(tiny_vl, row, example_id, True, cache).prompt_key)
    assert len({*keys[:2], *keys[4:6]}) == 1 and keys[2] == keys[3] != keys[0]
    assert keys[6] != keys[7], "the order of images counts"
    assert len(calls) == len(cache) == 4


def make_judge() -> grm_sft.Judge:
    judge = grm_sft.Judge(grm_sft.load_model(TINY, torch.float32).eval())
    packing.set_attention(judge.model, "packed")
    return judge


def make_run(judge, **known) -> grm_sft.Run:
    """The fields that iter_packs and evaluate use."""
    known |= {"judge": torch.nn.ModuleDict({"module": judge}), "sampling_model": judge.model}
    return grm_sft.Run(**dict.fromkeys(grm_sft.Run.__dataclass_fields__) | known)


def test_packs_share_images_and_predict_the_trained_tokens(tiny_vl, rows, judged):
    """Also of a conversation with images in later turns, which is two examples."""
    judge = make_judge()
    run = make_run(judge, train_data=load(tiny_vl, judged, training=True))
    examples = grm_sft.gather_examples(run.train_data, [8, 9, 10, 11])  # one image
    (pack,) = grm_sft.iter_packs(ARGS, run, examples)
    assert len(pack.media["image"]) == 1 and len(pack.response_index) == 4
    num_tokens = examples[0].prompt.length + sum(len(example.response_ids) for example in examples)
    assert pack.model_inputs["input_ids"].numel() == num_tokens
    examples = grm_sft.gather_examples(run.train_data, sum(run.train_data.groups, []))
    expected, used = [], Counter()  # used: tokens of a chat that its examples so far have trained
    for x in examples:
        whole = expected_logprobs(tiny_vl, rows[x.example_id // 2], x.example_id % 2 == 1)
        expected.append(whole[used[x.example_id] :][: x.loss_mask.sum()])
        used[x.example_id] += int(x.loss_mask.sum())
        assert x.example_id == 12 or len(expected[-1]) == len(whole)
    assert [x.example_id for x in examples].count(12) == 2
    assert used[12] == len(expected_logprobs(tiny_vl, rows[6], False))
    for packed in ("packed", "unpacked"):
        if packed == "unpacked":
            packing.set_attention(judge.model, "sdpa")
        for pack in grm_sft.iter_packs(replace(ARGS, micro_batch_tokens=600), run, examples):
            with torch.no_grad():
                logprobs = judge(pack)
            in_pack = torch.cat([expected[b] for b in pack.response_index.tolist()])
            torch.testing.assert_close(logprobs, in_pack, atol=1e-4, rtol=0)
            targets = [examples[b].response_ids[examples[b].loss_mask] for b in pack.response_index.tolist()]
            assert torch.equal(pack.target_ids, torch.cat(targets))


# --- judgments ---


@pytest.fixture
def write(tiny_vl, monkeypatch):
    """Make the model write given texts, one per prompt."""

    def write(*texts: str) -> None:
        def generate(prompts: list, max_tokens: int, temperature: float, **how) -> list[packing.Response]:
            assert max_tokens == ARGS.micro_batch_tokens and temperature == 0 and len(prompts) == len(texts)
            ids = [torch.tensor(tiny_vl[2](text)["input_ids"]) for text in texts]
            return [packing.Response(x, torch.zeros(len(x)), truncated=False) for x in ids]

        monkeypatch.setattr(decoding, "generate", generate)

    return write


@torch.no_grad()
def sum_logprob(model, prompt: packing.Prompt, ids: list[int] | torch.Tensor) -> float:
    pack = packing.build_unpacked([(0, [0])], {0: prompt}, [torch.as_tensor(ids)])
    return packing.response_logprobs(model, pack)[0].double().sum().item()


def softmax_over_verdicts(tiny_vl, example: grm_sft.Example, reasoning: str) -> list[float]:
    texts = [reasoning + grm_sft.format_verdict(verdict, example.noun) for verdict in grm_sft.VERDICTS]
    sums = [sum_logprob(tiny_vl[0], example.prompt, tiny_vl[2](text)["input_ids"]) for text in texts]
    return torch.tensor(sums).softmax(0).tolist()


def test_judgments_are_those_of_the_unmodified_model(tiny_vl, rows):
    model, _, tokenizer = tiny_vl
    examples = [encode(tiny_vl, rows[i], 2 * i + x) for i in (0, 1, 2, 3, 4) for x in (0, 1)]
    examples.append(encode(tiny_vl, rows[6], 12))
    records = grm_sft.judge_examples(ARGS, make_judge().model, tokenizer, examples)
    suppressed = packing.media_token_ids(model.config)
    for example, record in zip(examples, records, strict=True):
        P = example.prompt.length
        ids = model.generate(
            **example.prompt.inputs, do_sample=False, max_new_tokens=12, suppress_tokens=suppressed
        )[0, P:]
        assert record["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert record["length"] == len(ids)
        assert record["truncated_frac"] == (ids[-1] != tokenizer.eos_token_id)
        loss = -sum_logprob(model, example.prompt, example.response_ids)
        assert record["loss"] == pytest.approx(loss, abs=1e-3)
        assert record["tokens"] == len(example.response_ids)
        assert 2 * record["row"] + record["swapped"] == example.example_id
    assert "accuracy" in records[0] and not {"accuracy", "parse_rate", "probabilities"} & records[-1].keys()


def test_soft_verdicts_follow_the_own_reasoning(tiny_vl, rows, write):
    """Probabilities of the verdicts given what the model has written before its answer."""
    examples = [encode(tiny_vl, rows[4], x) for x in (0, 1)]
    reasonings = ["<think>red</think>", "<think>Answer 2 is better, Answer 2 is better</think>"]
    write(*[f"{reasoning}<answer>Answer 2 is better</answer>{EOS}" for reasoning in reasonings])
    records = grm_sft.judge_examples(ARGS, make_judge().model, tiny_vl[2], examples)
    for example, record, reasoning in zip(examples, records, reasonings):
        soft = list(record["probabilities"].values())
        assert soft == pytest.approx(softmax_over_verdicts(tiny_vl, example, reasoning), abs=1e-4)
        assert np.abs(np.subtract(soft, softmax_over_verdicts(tiny_vl, example, ""))).max() > 0.01
    assert [x["predicted_verdict"] for x in records] == ["2", "2"]
    assert [x["accuracy"] for x in records] == [True, False], "the labels are 2 and 1"


def test_soft_accuracy_counts_the_likeliest_verdict(tiny_vl, rows, write, monkeypatch):
    examples = [encode(tiny_vl, rows[4], x) for x in (0, 1)]  # labels 2, 1
    write("no", "no")
    logprobs = [torch.tensor([-7.0, -3.0, -1.0, -2.0]), torch.tensor([-1.0, -4.0, -5.0, -3.5])]
    monkeypatch.setattr(grm_sft, "sum_logprobs", lambda *arguments: logprobs)
    records = grm_sft.judge_examples(ARGS, tiny_vl[0], tiny_vl[2], examples)
    assert records[0]["probabilities"]["1"] == pytest.approx(math.exp(-2) / (math.exp(-2) + 1 + math.exp(-1)))
    assert [x["loss"] for x in records] == [7.0, 1.0]
    assert [x["soft_accuracy"] for x in records] == [True, False]


def test_reasoning_may_grow_when_it_is_tokenized_again(tiny_vl, rows, write, monkeypatch):
    """Bytes that form no character decode to replacement characters of three tokens each."""
    example = encode(tiny_vl, rows[3])
    length = example.prompt.length + len(example.response_ids)
    args = replace(ARGS, max_length=length, micro_batch_tokens=length)
    monkeypatch.setattr(ARGS, "micro_batch_tokens", length)
    write("\ufffd" * 12)
    (record,) = grm_sft.judge_examples(args, make_judge().model, tiny_vl[2], [example])
    assert math.isfinite(record["loss"]) and sum(record["probabilities"].values()) == pytest.approx(1)


def make_record(example_id: int, label: str | None, verdict: str | None, **other) -> dict:
    record = {"row": example_id // 2, "swapped": example_id % 2 == 1, "response": f"writes {verdict}"}
    record |= {"length": 5, "truncated_frac": False, "loss": 6.0, "tokens": 4} | other
    if label is not None:
        record |= {"predicted_verdict": verdict, "accuracy": verdict == label}
        record |= {"parse_rate": verdict is not None, "tie_rate": verdict == "tie"}
    return record


@pytest.fixture
def evaluate(tiny_vl, rows, tmp_path, monkeypatch):
    """Evaluate a pair whose first candidate is better, and a chat, with given verdicts of the pair."""
    source = write_jsonl(tmp_path / "rows.jsonl", [rows[0], rows[7]])
    data = load(tiny_vl, source, training=False)

    def evaluate(*verdicts) -> tuple[dict, list[dict]]:
        def judge(args, model, tokenizer, examples) -> list[dict]:
            assert [x.label for x in examples] == ["1", "2", None]
            records = [make_record(i, x.label, verdicts[i]) for i, x in enumerate(examples[:2])]
            return [*records, make_record(2, None, None, loss=2.0, length=8)]

        monkeypatch.setattr(grm_sft, "judge_examples", judge)
        return grm_sft.evaluate(ARGS, make_run(make_judge(), eval_data=data))

    return evaluate


# verdicts in both orders: accuracy, swap consistency, parse rate, tie rate
VERDICTS = {("1", "2"): (1, 1, 1, 0), ("1", "1"): (0.5, 0, 1, 0), ("2", "1"): (0, 1, 1, 0)}
VERDICTS |= {("tie", "tie"): (0, 1, 1, 1), (None, None): (0, 0, 0, 0), ("1", None): (0.5, 0, 0.5, 0)}


@pytest.mark.parametrize("verdicts", VERDICTS)
def test_both_orders_count_and_chats_have_no_verdict(verdicts, evaluate):
    """With 1b599b4, a judge that always answers "1" had accuracy 1 here."""
    metrics, records = evaluate(*verdicts)
    accuracy, *others = VERDICTS[verdicts]
    names = ("eval/swap_consistency", "eval/parse_rate", "eval/tie_rate")
    assert metrics["eval/accuracy"] == accuracy
    assert [metrics[name] for name in names] == others
    assert metrics["eval/loss"] == 14 / 12 and metrics["eval/length"] == 6 and metrics["eval/num_rows"] == 2
    pair, chat = records
    assert (pair["row"], pair["predicted_verdict"]) == (0, verdicts[0])
    assert pair["swapped_response"] == f"writes {verdicts[1]}" and pair["swap_consistency"] == others[0]
    assert chat["row"] == 1 and "swap_consistency" not in chat
    assert grm_sft.judge_metrics([chat]).keys() == {
        "eval/loss", "eval/length", "eval/truncated_frac", "eval/num_rows"
    }  # fmt: skip


# --- runs ---


@pytest.mark.parametrize("micro_batch_tokens", [4096, 700])
def test_the_loss_is_the_mean_over_the_trained_tokens_of_the_step(
    micro_batch_tokens, grm, tiny_vl, rows, monkeypatch, capsys
):
    """Compared with the unmodified model, whatever the packs; the last pack ends the optimizer step."""
    boundaries, init = [], grm_sft.init_deepspeed_engine

    def spy(*args, **keywords):
        engine = init(*args, **keywords)
        set_boundary = engine.set_gradient_accumulation_boundary
        engine.set_gradient_accumulation_boundary = lambda x: boundaries.append(x) or set_boundary(x)
        return engine

    monkeypatch.setattr(grm_sft, "init_deepspeed_engine", spy)
    sizes = {"max_length": 700, "micro_batch_tokens": micro_batch_tokens}
    run_dir = grm(total_steps=1, train_batch_size=14, eval_dataset=None, **sizes)
    (metrics,) = metrics_of(run_dir)
    logprobs = [
        expected_logprobs(tiny_vl, row, x) for row in rows for x in (False, True)[: 1 + ("prompt" in row)]
    ]
    num_tokens = sum(map(len, logprobs))
    assert metrics["train/trained_tokens"] == num_tokens and metrics["train/rows_skipped"] == 0
    assert metrics["loss/sft"] == pytest.approx(-sum(x.sum().item() for x in logprobs) / num_tokens, abs=1e-4)
    assert boundaries == [False] * (len(boundaries) - 1) + [True]
    assert (len(boundaries) > 1) == (micro_batch_tokens == 700)
    assert "14 examples" in capsys.readouterr().out


BEST = {"accuracy": [0.1, 0.9, 0.3], "loss": [5.0, 1.0, 3.0]}  # before the first step, after steps 2 and 4


@pytest.mark.parametrize("best_metric", BEST)
def test_a_run_learns_and_keeps_its_best(best_metric, grm, monkeypatch, capsys):
    """By accuracy; by the loss if the evaluation set has no pairs and therefore no accuracy."""
    judge_metrics, values = grm_sft.judge_metrics, iter(BEST[best_metric])

    def changed(records: list[dict]) -> dict:
        metrics = judge_metrics(records) | {f"eval/{best_metric}": next(values)}
        return {name: x for name, x in metrics.items() if best_metric in name or name != "eval/accuracy"}

    monkeypatch.setattr(grm_sft, "judge_metrics", changed)
    flags = {"total_steps": 4, "eval_steps": 2, "learning_rate": 2e-3}
    run_dir = grm(**flags, train_batch_size=14, track="tensorboard")
    first, *steps = metrics_of(run_dir)
    assert [m["train/step"] for m in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss/sft"] < 0.8 * steps[0]["loss/sft"]
    assert best_metric == "loss" or steps[-1]["eval/loss"] < first["eval/loss"]
    saved = {n: weights_of(run_dir / f"checkpoint-{n}") for n in ("2", "4", "best")}
    assert conftest.largest_difference(saved["best"], saved["2"]) == 0
    assert conftest.largest_difference(saved["best"], saved["4"]) > 0
    assert not (run_dir / "checkpoint-best/state").exists()
    initial = weights_of(Path(TINY))
    moved = {name for name, w in saved["2"].items() if not torch.equal(w, initial[name])}
    assert moved and not any("visual" in name for name in moved), "the vision tower is frozen"
    record = read_jsonl(run_dir / "samples.jsonl")[0]
    assert {"phase", "prompt", "response", "swapped_response", "predicted_verdict"} <= record.keys()
    steps, texts = conftest.tensorboard_of(run_dir)
    assert steps == [0, 1, 2, 3, 4] and [*texts["samples"]] == [0, 2, 4]
    assert all(f"    {key}: " in texts["samples"][4] for key in ("prompt", "swapped_response"))
    assert "packing enabled" in capsys.readouterr().out


@pytest.mark.slow
def test_the_default_run_learns_to_write_judgments(tmp_path):
    """With seeds 1, 2, 3 the evaluation loss goes from 11.0 to 0.226, 0.220, 0.231 in 60 steps."""
    flags = {"total_steps": 60, "eval_steps": 0, "eval_rows": 32, "output_dir": str(tmp_path)}
    metrics = grm_sft.main(grm_sft.Args(**flags, run_name="run"))
    assert metrics["eval/loss"] < 0.3 and metrics["eval/parse_rate"] == 1


@pytest.mark.slow
def test_training_does_not_depend_on_ranks_or_zero(grm, start, tmp_path, judged):
    flags = flags_for(judged) | {"train_batch_size": 14}
    one = grm(run_name="one", train_batch_size=14)
    for zero in (0, 3):  # tests of rloo.py and ppo_vl.py have the other stages
        name = f"zero{zero}"
        process = start("grm_sft", 2, zero_stage=zero, run_name=name, **flags)
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-2000:]
        assert_same_run(one, tmp_path / "runs" / name, 1e-4, of_weights=1e-4)


# --- invalid input ---


def test_rows_that_can_not_be_used_are_skipped_and_counted(grm, rows, tmp_path, capsys):
    bad = [
        rows[3] | {"verdict": "3"}, rows[0] | {"image_1": "nope.png"}, rows[3] | {"prompt": "long " * 900},
        {"messages": [message("user", "<image>?"), message("assistant", "a")]},
        {"messages": [message("user", "hello")]}, {"prompt": "no candidates", "verdict": "1"},
    ]  # fmt: skip
    source = write_jsonl(tmp_path / "bad.jsonl", rows + bad)
    run_dir = grm(dataset=source, total_steps=1, train_batch_size=24)
    assert metrics_of(run_dir)[-1]["train/rows_skipped"] == 6
    captured = capsys.readouterr()
    for row, word in zip(
        range(8, 14), ("verdict", "nope.png", "max-length", "marker", "assistant", "candid")
    ):
        (line, *_) = [x for x in captured.err.splitlines() if f"row {row} is skipped" in x]
        assert word in line, line
    assert "24 examples" in captured.out


CASES = {
    "micro batch": (["--micro-batch-tokens"], {"micro_batch_tokens": 100}),
    "counts": (["--generation-batch-size (0)"], {"generation_batch_size": 0}),
    "columns": (["columns", "verdict"], {"dataset": "columns"}),
}


@pytest.mark.parametrize("case", CASES)
def test_invalid_input_ends_with_one_sentence(case, argv, judged, rows, tmp_path, capsys):
    words, flags = CASES[case]
    names = {"columns": write_jsonl(tmp_path / "columns.jsonl", [{"text": "a"}])}
    flags = flags_for(judged) | {name: names.get(value, value) for name, value in flags.items()}
    with pytest.raises(SystemExit) as stopped:
        grm_sft.main(cli(grm_sft.Args, args=argv("grm_sft", **flags)))
    assert stopped.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert all(word in line for word in words), line


# --- examples ---


def convert(tmp_path, *names: str, seed: int = 0) -> list[dict]:
    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module("convert_judgments")
    files = tuple(FILES / name for name in names) + (tmp_path / "out.jsonl",)
    module.main(module.Args(files=files, seed=seed))
    return read_jsonl(files[-1])


def test_data_sets_are_converted(tmp_path, tiny_vl):
    hpd = convert(tmp_path, "hpdv3.json")
    preferred = [row[f"image_{int(row['verdict']) - 1}"] for row in hpd]
    assert preferred == [f"{IMAGES}/{name}.png" for name in ("cat_a", "small", "cat_b", "wide")]
    assert len({tuple(r["verdict"] for r in convert(tmp_path, "hpdv3.json", seed=s)) for s in range(5)}) > 1
    assert hpd[0]["prompt"].endswith("Prompt: a red ball")
    cot = convert(tmp_path, "imagegen_cot.json")
    assert [row["verdict"] for row in cot] == ["1", "2"] and "<image>" not in cot[0]["prompt"]
    assert cot[1]["reasoning"] == "\nThe first image is dark, the second image is plain.\n"
    omni = convert(tmp_path, "omnireward.parquet", "imagegen_cot.json")
    assert [row["verdict"] for row in omni] == ["1", "tie", "2", "tie", "1", "2"]
    assert omni[0]["prompt"].endswith("Prompt: a ball\nIt should be red.")
    for row in hpd + omni:
        assert encode(tiny_vl, row).label == row["verdict"]


@pytest.fixture
def judge_reward(monkeypatch):
    """A judge that knows nothing, but loads and writes like any other."""
    monkeypatch.setenv("JUDGE", TINY)
    monkeypatch.setenv("JUDGE_TOKENS", "8")
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("judge_reward")


def asked(vqa_rows, answers: list[str]) -> dict:
    """Keywords of a reward function: two questions with these answers each."""
    rows = [row for row in vqa_rows[:2] for _ in answers]
    columns = {"prompts": [r["prompt"] for r in rows], "image": [r["image"] for r in rows]}
    return columns | {"completions": [f"<answer>{a}</answer>" for a in answers] * 2}


def test_a_judge_is_a_reward(judge_reward, vqa_rows):
    one = judge_reward.score(**asked(vqa_rows, ["red", "blue"]))
    other = judge_reward.score(**asked(vqa_rows, ["blue", "red"]))
    assert all(0 <= x <= 1 for x in one) and len({*one}) > 1
    assert one[0] + one[1] == pytest.approx(1, abs=1e-5), "a pair shares one verdict"
    assert one == pytest.approx([other[1], other[0], other[3], other[2]], abs=1e-5)
    assert judge_reward.score(**asked(vqa_rows, ["red", "red"])) == [0.5] * 4
    spelled = judge_reward.score(**asked(vqa_rows, ["<image>", "<|im_end|><|image_pad|>", "<think>", ""]))
    assert len(spelled) == 8 and all(0 <= x <= 1 for x in spelled)


@pytest.mark.slow
def test_the_endpoint_gives_the_same_scores(judge_reward, vqa_rows, monkeypatch):
    command = [sys.executable, str(ROOT / "examples/judge_server.py"), "0"]
    server = subprocess.Popen(command, env={**os.environ}, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stdout if line.startswith("judge on port"))
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{line.split()[-1]}")
        keywords = asked(vqa_rows, ["red", "blue"])
        assert judge_reward.score_remote(**keywords) == pytest.approx(
            judge_reward.score(**keywords), abs=1e-6
        )
    finally:
        server.kill()
        server.wait()
