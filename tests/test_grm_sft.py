"""grm_sft.py: rows, label masks token by token, packed = one by one, judgements, runs; and what is built on it."""

import importlib
import os
import subprocess
import sys
from collections import Counter
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
from common import packing

FILES = ROOT / "tests/data/grm"
SEE = f"{FILES}/images"
ARGS = grm_sft.Args(max_response_length=12, video_fps=4.0)
END = "<|im_end|>"


def say(role: str, content) -> dict:
    return {"role": role, "content": content}


def make_rows(video: str) -> list[dict]:
    """Pairs of pictures, texts and videos, and chats: with pictures between answers, and of text alone."""
    turns = [
        say("system", "You judge."), say("user", "<image>Good?"), say("assistant", "<answer>8</answer>"),
        say("user", "<image>And this?"), say("assistant", "<think>less</think>"), say("user", "sure?"),
        say("assistant", "yes"),
    ]  # fmt: skip
    thought = "Image 1 shows a ball, Image 2 a box. The first image fits."
    red, cat_a, cat_b = {"image": f"{SEE}/small.png"}, f"{SEE}/cat_a.png", f"{SEE}/cat_b.png"
    return [
        {"prompt": "a red ball", "image_0": cat_a, "image_1": cat_b, "verdict": "1", "reasoning": thought},
        {"prompt": "a box", "image_0": cat_a, "image_1": f"{SEE}/wide.png", "verdict": "tie"},
        {"prompt": "it rolls", "video_0": video, "video_1": video, "verdict": "2"},
        {"prompt": "What is 2 + 2?", "answer_0": "4", "answer_1": "5", "verdict": "1"},
        {"prompt": "Which colour?", **red, "answer_0": "red", "answer_1": "blue", "verdict": "2"},
        {"prompt": "What shape?", **red, "answer_0": "circle", "answer_1": "box", "verdict": "1"},
        {"messages": turns, "images": [cat_a, f"{SEE}/small.png"]},
        {"messages": [say("user", "Say hello."), say("assistant", "Hello.")], "verdict": "1"},  # one entry
    ]


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> list[dict]:
    write_video(path := tmp_path_factory.mktemp("video") / "clip.mp4")
    return make_rows(str(path))


@pytest.fixture(scope="session")
def judgements(rows, tmp_path_factory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "judgements.jsonl", rows)


@pytest.fixture(scope="module")
def tiny_vl() -> tuple:
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    return grm_sft.load_model(TINY, torch.float32).eval(), processor, processor.tokenizer


def on(source: str) -> dict:
    data = {"dataset": source, "eval_dataset": source, "eval_dataset_split": "train", "video_fps": 4.0}
    small = {"train_batch_size": 6, "micro_batch_tokens": 4096, "warmup_steps": 0, "learning_rate": 1e-4}
    return data | small | {"best_metric": "loss"}


@pytest.fixture
def grm(run, judgements):
    return lambda **flags: run("grm_sft", **on(judgements) | flags)


def encode(tiny_vl, row: dict, entry: int = 0, share: bool = False, previous=None) -> grm_sft.Example:
    return grm_sft.encode_row(ARGS, *tiny_vl[:2], row, entry, Path(), share, previous)


# --- math ---


def test_worked_examples():
    assert grm_sft.next_token_loss(torch.tensor([-1.0, -3.0]), 8) == 0.5
    assert [round(x, 3) for x in grm_sft.wilson_interval(9, 10)] == [0.596, 0.982]
    assert grm_sft.wilson_interval(0, 5)[0] == 0 and grm_sft.wilson_interval(5, 5)[1] == 1


def test_an_epoch_sees_every_row_once_and_groups_stay_whole():
    groups = [[0, 1, 2], [3], [4, 5], [6]]
    epochs = [grm_sft.batch_entries(groups, 7 * e, 7, seed=1) for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert grm_sft.batch_entries(groups, 5, 12, seed=1) == epochs[0][5:] + epochs[1] + epochs[2][:3]
    assert all([e[e.index(0) + i] for i in range(3)] == [0, 1, 2] for e in epochs)
    assert any(grm_sft.batch_entries(groups, 0, 7, seed=s) != epochs[0] for s in (2, 3, 4))


# --- rows ---

UNREADABLE = [
    "", "Image 1 is better", "<answer>Image 3 is better</answer>", "<answer>Image 1 is better",
    "<answer>Image 1 is not better</answer>", "<answer>7</answer>",
    "<answer>Image 1 is better</answer><answer>Image 2 is better</answer>",
    "<answer>what</answer><answer>Image 2 is better</answer>",
]  # fmt: skip


def test_verdicts_are_read_strictly_and_as_they_are_written():
    assert [grm_sft.read_verdict(text) for text in UNREADABLE] == [None] * len(UNREADABLE)
    for verdict in grm_sft.VERDICTS:
        text = f"<think>x</think>{grm_sft.write_verdict(verdict, 'Video')} and so on"
        assert grm_sft.read_verdict(text) == verdict


def test_sides_are_exchanged_everywhere(rows):
    (one, *known), (other, *swapped) = (grm_sft.make_chat(rows[0], swap) for swap in (False, True))
    assert known == ["Image", "1"] and swapped == ["Image", "2"]
    assert other["images"] == one["images"][::-1] == [f"{SEE}/cat_b.png", f"{SEE}/cat_a.png"]
    asked, said = (one["messages"][i]["content"] for i in (0, 1))
    assert asked == other["messages"][0]["content"] == "a red ball\nImage 1: <image>\nImage 2: <image>"
    thought = "<think>Image {} shows a ball, Image {} a box. The {} image fits.</think>"
    end = "<answer>Image {} is better</answer>"
    assert said == (thought + end).format(1, 2, "first", 1)
    assert other["messages"][1]["content"] == (thought + end).format(2, 1, "second", 2)
    tie = [grm_sft.make_chat(rows[1], swap)[0]["messages"][1]["content"] for swap in (False, True)]
    assert tie == ["<answer>Both are equally good</answer>"] * 2
    texts = [grm_sft.make_chat(rows[4], swap)[0]["messages"][0]["content"] for swap in (False, True)]
    assert texts[0] == "<image>Which colour?\nAnswer 1: red\nAnswer 2: blue"
    assert texts[1] == "<image>Which colour?\nAnswer 1: blue\nAnswer 2: red"
    row = rows[0] | {"images": [f"{SEE}/wide.png"], "prompt": "change <image> to a ball"}
    assert grm_sft.make_chat(row, True)[0]["images"] == [f"{SEE}/{x}.png" for x in ("wide", "cat_b", "cat_a")]
    said = {"verdict": "1", "reasoning": "Image 2 shows 12, so ANSWER 1 is, First answer."}
    turn = grm_sft.make_chat(rows[4] | said, True)[0]["messages"][1]["content"]  # the prompt's pictures stay
    assert turn.startswith("<think>Image 2 shows 12, so ANSWER 2 is, second answer.</think>")
    text = rows[3] | {"answer_0": "<image><video>"}  # a candidate can't show pictures
    assert "Answer 1: < image>< video>\n" in grm_sft.make_chat(text, False)[0]["messages"][0]["content"]


def test_easy_vqa_becomes_fair_pairs_of_one_kind():
    row, verdicts = {"prompt": "what color?", "image": "x.png", "answer": "red"}, Counter()
    for i in range(300):
        pair = grm_sft.make_pair(row, np.random.default_rng([1, i]))
        sides = pair["answer_0"], pair["answer_1"]
        assert sides[int(pair["verdict"]) - 1] == "red" == pair["reasoning"]
        assert all(x in grm_sft.EASY_VQA_KINDS[2].split() for x in sides) and len({*sides}) == 2
        verdicts[pair["verdict"]] += 1
    assert 120 < verdicts["1"] < 180


def test_rows_of_one_picture_form_a_group_in_both_orders(tiny_vl):
    args = grm_sft.Args(train_samples=200)
    load = lambda args, training: grm_sft.load_data(args, "easy-vqa", "train", *tiny_vl[:2], training)  # noqa: E731
    data = load(args, True)
    assert len(sum(data.groups, [])) == len({*sum(data.groups, [])}) == 400 and len(data.groups) < 200
    for group in data.groups:
        assert all(entry ^ 1 in group for entry in group)
    held_out = load(grm_sft.Args(eval_samples=10, seed=1), False)
    assert len(sum(held_out.groups, [])) == 20, "an evaluation always asks in both orders"
    other = load(grm_sft.Args(eval_samples=10, seed=2), False)
    entries = sum(held_out.groups, [])
    truths = [[data.encode(entry).truth for entry in entries] for data in (held_out, other)]
    assert truths[0] == truths[1], "the held-out sides do not depend on the seed"


# --- label masks, token by token ---


def trained(tiny_vl, row: dict, **how) -> list[list[str]]:
    """The trained tokens of each sample."""
    samples = encode(tiny_vl, row, **how).samples
    return [tiny_vl[2].convert_ids_to_tokens(s.response_ids[s.start :].tolist()) for s in samples]


@pytest.mark.parametrize("share", [True, False])
def test_masks(share, tiny_vl, rows):
    want = "<think> red </think> <answer> Answer Ġ1 Ġis Ġbetter </answer>".split() + [END]
    row = rows[4] | {"verdict": "1", "reasoning": "red"}
    (tokens,) = trained(tiny_vl, row, share=share)
    assert "".join(tokens) == "".join(want) and tokens[0] == "<think>" and tokens[-2:] == ["</answer>", END]
    chat = ["".join(part) for part in trained(tiny_vl, rows[6], share=share)]
    assert chat == [f"<answer>8</answer>{END}", f"<think>less</think>{END}", f"yes{END}"], "one sample each"
    samples = encode(tiny_vl, rows[6], share=share).samples
    assert [len(s.prompt.media["image"]) for s in samples] == [1, 2, 2] and {s.entry for s in samples} == {0}
    before = torch.cat([samples[2].prompt.ids, samples[2].response_ids[: samples[2].start]])
    before = tiny_vl[2].decode(before)
    assert "less</think>" in before and before.endswith(f"sure?{END}\n<|im_start|>assistant\n")
    # Data can't end a turn.
    turns = [say("user", f"a{END}\n<|im_start|>assistant\nno"), say("assistant", f"yes{END}no")]
    (tokens,) = trained(tiny_vl, {"messages": turns})
    assert tokens.count(END) == 1 and tokens[-1] == END


LINE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
ASK = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_masks_of_templates_with_and_without_eos(tiny_text_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_model)

    def split(template: str) -> list[str]:
        tokenizer.chat_template = template
        turns = ("user", "a"), ("assistant", "ok"), ("user", "b"), ("assistant", "no")
        chat = [say(role, [{"type": "text", "text": text}]) for role, text in turns]
        found = grm_sft.split_chat(tokenizer, chat, [tokenizer.eos_token_id])
        return [tokenizer.decode(ids[start:]) for _, ids, start in found]

    assert split(LINE + "<|end|>\n\n" + ASK) == ["ok<|end|>", "no<|end|>"]
    assert split(LINE + "\n" + ASK) == ["ok\n", "no\n<|end|>"]
    with pytest.raises(ValueError, match="message 1 differently"):
        split("{% for m in messages %}{{ m['content'] if loop.last else 'x' }}|{% endfor %}")


# --- prompts and packs ---


@pytest.mark.parametrize("share", [True, False])
def test_samples_are_the_processors_tokens_and_positions(share, tiny_vl, rows):
    for entry in (0, 1):
        for row in rows:
            sample = encode(tiny_vl, row, entry, share).samples[-1]
            chat = grm_sft.to_messages(ARGS, grm_sft.make_chat(row, entry == 1)[0], Path(), tiny_vl[2])
            inputs = packing.encode_chat(tiny_vl[1], chat)
            ids = torch.cat([sample.prompt.ids, sample.response_ids])
            assert ids.tolist() == inputs["input_ids"][0][: len(ids)].tolist()
            assert len(inputs["input_ids"][0]) - len(ids) <= 1, "but for the newline after the last EOS"
            pack = packing.build_pack([(0, [0])], {0: sample.prompt}, [sample.response_ids])
            want = packing.make_prompt(tiny_vl[0], inputs).positions[..., : len(ids)]
            assert torch.equal(pack.inputs["position_ids"].reshape(want.shape), want)


def test_what_begins_alike_goes_through_the_processor_once(tiny_vl, rows, monkeypatch):
    calls, encode_chat = [], packing.encode_chat
    monkeypatch.setattr(packing, "encode_chat", lambda *a, **k: calls.append(1) or encode_chat(*a, **k))
    sample, keys = None, []
    for row in (rows[4], rows[5], rows[4] | {"image": f"{SEE}/cat_a.png"}, rows[0]):
        for entry in (0, 1):
            (sample,) = encode(tiny_vl, row, entry, True, sample).samples
            keys.append(sample.prompt_key)
    assert len({*keys[:4]}) == 1 and keys[4] == keys[5] != keys[0] and len(calls) == 4
    assert keys[6] != keys[7], "the order of pictures counts"


def make_judge() -> grm_sft.Judge:
    judge = grm_sft.Judge(grm_sft.load_model(TINY, torch.float32).eval())
    packing.switch_attention(judge.model, "packed")
    return judge


def make_run(judge, **known) -> grm_sft.Run:
    """What packs_of and evaluate take of a run."""
    known |= {"judge": torch.nn.ModuleDict({"module": judge}), "writer": judge.model, "device": "cpu"}
    return grm_sft.Run(**dict.fromkeys(grm_sft.Run.__dataclass_fields__) | known)


def test_rows_of_one_picture_share_it_in_a_pack(tiny_vl, rows, judgements):
    data = grm_sft.load_data(ARGS, judgements, "train", *tiny_vl[:2], True)
    samples = grm_sft.load_samples(data, [8, 9, 10, 11])
    (pack,) = grm_sft.packs_of(ARGS, make_run(make_judge(), train_data=data), samples)
    assert len(pack.media["image"]) == 1 and len(pack.response_index) == 4
    own = [encode(tiny_vl, rows[e // 2], e, share=True).samples[0] for e in (8, 9, 10, 11)]
    assert pack.inputs["input_ids"].numel() == own[0].prompt.length + sum(len(s.response_ids) for s in own)


# --- judgements ---


def test_judgements_and_soft_verdicts_are_those_of_the_plain_model(tiny_vl, rows):
    plain, processor, tokenizer = tiny_vl
    encoded = [encode(tiny_vl, rows[i], entry) for i in (0, 1, 2, 3, 4) for entry in (0, 1)]
    judged = grm_sft.write_judgements(ARGS, make_judge().model, tokenizer, encoded)
    bad = packing.media_token_ids(plain.config)
    for row, record in zip(encoded, judged):
        (sample,), sums = row.samples, []
        greedy = {"do_sample": False, "max_new_tokens": 12, "suppress_tokens": bad}
        ids = plain.generate(**sample.prompt.inputs, **greedy)[0, sample.prompt.length :]
        assert record["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert (record["length"], record["truncated_frac"]) == (len(ids), ids[-1] != tokenizer.eos_token_id)
        reasoning = record["response"].split("<answer>")[0]
        texts = [reasoning + grm_sft.write_verdict(verdict, row.noun) for verdict in grm_sft.VERDICTS]
        for ids in [sample.response_ids, *(torch.tensor(tokenizer(text)["input_ids"]) for text in texts)]:
            pack = packing.plain_pack([(0, [0])], [sample.prompt], [ids])
            with torch.no_grad():
                sums.append(packing.response_logprobs(plain, pack)[0].double().sum().item())
        assert record["loss"] == pytest.approx(-sums[0], abs=1e-3)
        want = np.exp(np.array(sums[1:]) - np.logaddexp.reduce(sums[1:]))
        assert [*record["probabilities"].values()] == pytest.approx(want, abs=1e-4)


def record(truth, said, follows=None, soft=None, loss=6.0) -> dict:
    known = truth is not None
    return {
        "accuracy": said == truth if known else None, "soft_accuracy": soft, "swap_consistency": follows,
        "parse_rate": said is not None, "tie_rate": said == "tie", "length": 5, "truncated_frac": False,
        "loss": loss, "tokens": 4,
    }  # fmt: skip


def test_metrics_of_hand_made_records():
    records = [record("1", "1", True, True), record("2", "1", False, True), record("1", None, False)]
    records += [record("tie", "tie", True, False), record(None, None, loss=2.0)]
    metrics = grm_sft.judge_metrics(records)
    assert metrics["eval/accuracy"] == 2 / 4 and metrics["eval/num_samples"] == 5
    assert metrics["eval/swap_consistency"] == 2 / 4 and metrics["eval/soft_accuracy"] == 2 / 3
    assert metrics["eval/parse_rate"] == 3 / 5 and metrics["eval/tie_rate"] == 1 / 5
    assert metrics["eval/loss"] == 26 / 20
    assert (metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]) == grm_sft.wilson_interval(2, 4)
    assert "eval/accuracy" not in grm_sft.judge_metrics(records[-1:])


JUDGES = [(["1", "2"], True), (["1", "1"], False), (["tie", "tie"], True), ([None, None], False)]


@pytest.mark.parametrize("said, consistent", JUDGES)
def test_both_orders_are_judged(said, consistent, tiny_vl, rows, tmp_path, monkeypatch):
    args, source = grm_sft.Args(), write_jsonl(tmp_path / "pairs.jsonl", rows[:1])
    data = grm_sft.load_data(args, source, "train", *tiny_vl[:2], False)

    def write(args, model, tokenizer, given):
        assert [row.truth for row in given] == ["1", "2"]
        found = [record(row.truth, verdict) for row, verdict in zip(given, said)]
        return [x | {"verdict": verdict, "response": verdict, "row": 0} for x, verdict in zip(found, said)]

    monkeypatch.setattr(grm_sft, "write_judgements", write)
    metrics, records = grm_sft.evaluate(args, make_run(make_judge(), eval_data=data))
    assert metrics["eval/swap_consistency"] == consistent and metrics["eval/num_samples"] == 1
    assert metrics["eval/accuracy"] == (said[0] == "1")
    assert records[0]["swapped_response"] == said[1] and records[0]["row"] == 0


# --- runs ---


def test_a_run_learns_and_keeps_its_best(grm, monkeypatch, capsys):
    judge_metrics, values = grm_sft.judge_metrics, iter([0.1, 0.9, 0.3])
    changed = lambda records: judge_metrics(records) | {"eval/accuracy": next(values)}  # noqa: E731
    monkeypatch.setattr(grm_sft, "judge_metrics", changed)
    flags = {"total_steps": 4, "eval_steps": 2, "learning_rate": 2e-3, "best_metric": "accuracy"}
    folder = grm(**flags, train_batch_size=14, track="tensorboard")
    first, *steps = metrics_of(folder)
    assert [m["train/step"] for m in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss/sft"] < 0.8 * steps[0]["loss/sft"] and steps[-1]["eval/loss"] < first["eval/loss"]
    kept = {n: weights_of(folder / f"checkpoint-{n}") for n in ("2", "4", "best")}
    assert conftest.largest_difference(kept["best"], kept["2"]) == 0
    assert conftest.largest_difference(kept["best"], kept["4"]) > 0
    assert not (folder / "checkpoint-best/state").exists()
    moved = {n for n, w in kept["2"].items() if not torch.equal(w, weights_of(Path(TINY))[n])}
    assert moved and not any("visual" in name for name in moved), "the vision tower is frozen"
    sample = read_jsonl(folder / "samples.jsonl")[0]
    assert {"phase", "prompt", "response", "swapped_response", "truth", "verdict"} <= sample.keys()
    steps, texts = conftest.tensorboard_of(folder)
    assert steps == [0, 1, 2, 3, 4] and [*texts["samples/eval"]] == [0, 2, 4]
    assert all(f"    {key}: " in texts["samples/eval"][4] for key in ("prompt", "swapped_response"))
    assert "packed = unmodified model within" in capsys.readouterr().out


@pytest.mark.slow
def test_training_does_not_depend_on_ranks_or_zero(grm, start, tmp_path, judgements):
    flags = on(judgements) | {"train_batch_size": 14}
    one = grm(run_name="one", train_batch_size=14)
    for zero in (0, 2, 3):
        name = f"zero{zero}"
        process = start("grm_sft", 2, zero_stage=zero, run_name=name, **flags)
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-2000:]
        assert_same_run(one, tmp_path / "runs" / name, 1e-4, of_weights=1e-4)


# --- what is wrong ---


def test_rows_that_can_not_be_used_are_left_out_and_named(grm, rows, tmp_path, capsys):
    bad = [
        rows[3] | {"verdict": "3"}, rows[0] | {"image_1": "nope.png"}, rows[3] | {"prompt": "long " * 900},
        {"messages": [say("user", "<image>?"), say("assistant", "a")]}, {"messages": [say("user", "hello")]},
        {"prompt": "no sides", "verdict": "1"},
    ]  # fmt: skip
    folder = grm(dataset=write_jsonl(tmp_path / "bad.jsonl", rows + bad), total_steps=1, train_batch_size=24)
    assert metrics_of(folder)[-1]["rollout/prompts_dropped"] == 10
    told, found = capsys.readouterr()
    for number, word in zip((8, 9, 10, 11, 13), ("verdict", "nope.png", "max-length", "places", "candid")):
        assert f"row {number} is left out" in found and word in found, (number, word, found)
    assert ": 24 rows" in told


CASES = {
    "micro batch": (["--micro-batch-tokens"], {"micro_batch_tokens": 100}),
    "best metric": (["--best-metric", "eval/accuracy"], {"best_metric": "nope"}),
    "all rows bad": (["no row can be used"], {"dataset": [{"prompt": "a", "verdict": "1"}]}),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_with_one_sentence(case, argv, judgements, tmp_path, capsys):
    words, flags = CASES[case]
    if isinstance(flags.get("dataset"), list):
        flags = flags | {"dataset": write_jsonl(tmp_path / "rows.jsonl", flags["dataset"])}
    with pytest.raises(SystemExit) as stopped:
        grm_sft.main(cli(grm_sft.Args, args=argv("grm_sft", **on(judgements) | flags)))
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
    assert preferred == [f"{SEE}/{name}.png" for name in ("cat_a", "small", "cat_b", "wide")]
    assert len({tuple(r["verdict"] for r in convert(tmp_path, "hpdv3.json", seed=s)) for s in range(5)}) > 1
    assert hpd[0]["prompt"].endswith("Prompt: a red ball")
    cot = convert(tmp_path, "imagegen_cot.json")
    assert [row["verdict"] for row in cot] == ["1", "2"] and "<image>" not in cot[0]["prompt"]
    assert cot[1]["reasoning"] == "\nThe first image is dark, the second image is plain.\n"
    omni = convert(tmp_path, "omnireward.parquet", "imagegen_cot.json")
    assert [row["verdict"] for row in omni] == ["1", "tie", "2", "tie", "1", "2"]
    assert omni[0]["prompt"].endswith("Prompt: a ball\nIt should be red.")
    for row in hpd + omni:
        assert encode(tiny_vl, row).truth == row["verdict"]


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
        given = asked(vqa_rows, ["red", "blue"])
        assert judge_reward.score_remote(**given) == pytest.approx(judge_reward.score(**given), abs=1e-6)
    finally:
        server.kill()
        server.wait()
