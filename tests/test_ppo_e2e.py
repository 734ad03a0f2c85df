"""Whole runs of ppo_vl on the tiny model: what they write and what comes back from it, every kind of data, learning."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SHORT, read_jsonl, to_argv, write_jsonl
from PIL import Image

import ppo_vl

METRICS = """
    train/step train/episode train/learning_rate train/kl_coef train/grad_norm train/critic_grad_norm
    train/skipped_updates objective/scores objective/scores_std objective/kl objective/rlhf_reward objective/entropy
    reward/accuracy reward/format policy/ratio policy/approx_kl policy/clipfrac_low policy/clipfrac_high policy/entropy
    loss/policy loss/value val/clipfrac val/explained_variance
    rollout/response_length_mean rollout/response_length_min rollout/response_length_max rollout/truncated_frac
    rollout/zero_std_groups_frac rollout/group_std rollout/engine_logprob_diff_mean rollout/engine_logprob_diff_max
    time/rollout time/score time/update time/sync time/total time/tokens_per_second
""".split()
EVAL_METRICS = [
    f"eval/{mode}_{what}" for mode in ("greedy", "sampled") for what in ("score", "accuracy", "format", "length")
] + ["eval/best_score", "eval/pass_at_k"]


def read_metrics(folder: Path) -> list[dict]:
    """metrics.jsonl, which must be JSON that any reader takes: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} in metrics.jsonl is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict]:
    return [m for m in read_metrics(folder) if "loss/policy" in m]


def assert_same_metrics(metrics: dict, others: dict, tolerance: float, but: tuple[str, ...] = ()):
    assert metrics.keys() == others.keys()
    for name in metrics:
        if not name.startswith(("time/", *but)):
            assert metrics[name] == pytest.approx(others[name], rel=tolerance, abs=tolerance), name


# --- one finished run, looked at from all sides ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny, vqa, any_reward) -> tuple[Path, ppo_vl.Args]:
    """Folder of a run of 3 steps that saved and evaluated at each, and its arguments."""
    changes = {"total_steps": 3, "save_steps": 1, "eval_steps": 1, "max_response_length": 16, **any_reward}
    changes |= {"kl_target": 0.1, "kl_horizon": 100}  # a coefficient that moves, so that resuming must restore it
    flags = {"model": tiny, "dataset": vqa, "eval_dataset": vqa, "output_dir": tmp_path_factory.mktemp("runs"), **SHORT}
    args = ppo_vl.parse_args(to_argv({**flags, **changes}))
    ppo_vl.main(args)
    return Path(args.output_dir) / "run", args


def test_metrics_are_complete_and_finite(finished):
    before, *steps = read_metrics(finished[0])
    assert before["train/step"] == 0 and set(EVAL_METRICS) <= before.keys()
    assert [m["train/step"] for m in steps] == [1, 2, 3]
    assert [m["train/episode"] for m in steps] == [16, 32, 48]
    for metrics in steps:
        missing = {*METRICS, *EVAL_METRICS, "reward/score"} - metrics.keys()
        assert not missing
        assert all(math.isfinite(value) for value in metrics.values())
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-4), "the reference is where the policy starts"
    assert steps[2]["objective/kl"] != steps[0]["objective/kl"]
    assert all(
        0 <= m["policy/clipfrac_low"] + m["policy/clipfrac_high"] <= 1 and m["policy/entropy"] > 0 for m in steps
    )
    assert all(m["eval/num_samples"] == 8 for m in steps)


def test_samples_show_prompt_response_rewards_and_picture(finished):
    samples = read_jsonl(finished[0] / "samples.jsonl")
    assert {s["phase"] for s in samples} == {"train", "eval_greedy", "eval_sampled"}
    assert {s["step"] for s in samples} == {0, 1, 2, 3}
    for sample in samples:
        assert Path(sample["images"][0]).is_file()
        assert sample["messages"][0]["content"][-1]["text"] not in sample["response"]
        assert sample["components"].keys() == {"accuracy", "format", "score"}
        parts = sample["components"]
        assert sample["score"] == pytest.approx(0.9 * parts["accuracy"] + 0.1 * parts["format"] + parts["score"])


def test_curves_and_arguments_are_written(finished):
    folder, args = finished
    for name in ("curves", "samples-0", "samples-3"):
        assert min(Image.open(folder / f"{name}.png").size) > 300
    as_json = json.loads(json.dumps(asdict(args)))  # tuples become lists
    assert json.loads((folder / "args.json").read_text()) == as_json


def test_newest_checkpoints_are_kept_and_no_temporary_is_left(finished):
    folder, _ = finished
    assert sorted(path.name for path in folder.glob("checkpoint*")) == ["checkpoint-2", "checkpoint-3"]
    assert not list(folder.rglob("*.tmp"))
    readme = (folder / "checkpoint-3/README.md").read_text()
    assert "objective/scores" in readme and "learning_rate" in readme


def greedy_texts(folder, prompts: list[str], paths: list[str], limit: int) -> list[str]:
    """Greedy answers of a saved folder with nothing but transformers."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt, path in zip(prompts, paths, strict=True):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[text], images=[Image.open(path).convert("RGB")], return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=limit)[0, inputs["input_ids"].shape[1] :]
        texts.append(processor.decode(ids, skip_special_tokens=True))
    return texts


def test_reloaded_checkpoint_answers_as_the_run_did_at_its_end(finished, vqa_rows):
    folder, args = finished
    last = [s for s in read_jsonl(folder / "samples.jsonl") if s["step"] == 3 and s["phase"] == "eval_greedy"]
    assert len(last) == 8
    rows = [vqa_rows[s["row"]] for s in last]
    texts = greedy_texts(folder / "checkpoint-3", [r["prompt"] for r in rows], [r["image"] for r in rows], 16)
    assert texts == [s["response"] for s in last]
    accuracy = ppo_vl.accuracy_reward(texts, answer=[r["answer"] for r in rows])
    assert sum(accuracy) / 8 == read_metrics(folder)[-1]["eval/greedy_accuracy"]
    first = [s for s in read_jsonl(folder / "samples.jsonl") if s["step"] == 0 and s["phase"] == "eval_greedy"]
    assert [s["row"] for s in first] == [s["row"] for s in last], "the held-out subset is fixed"


def test_a_run_that_starts_from_the_checkpoint_begins_with_its_last_evaluation(finished, run, any_reward):
    folder, _ = finished
    again = run(model=folder / "checkpoint-3", total_steps=1, max_response_length=16, **any_reward)
    before, last = read_metrics(again)[0], read_metrics(folder)[-1]
    assert {name: before[name] for name in EVAL_METRICS} == {name: last[name] for name in EVAL_METRICS}


@pytest.mark.slow
def test_resume_goes_on_as_if_nothing_had_happened(finished, tmp_path):
    folder, args = finished
    shutil.copytree(folder, tmp_path / "run")
    ppo_vl.main(ppo_vl.parse_args(to_argv({**asdict(args), "resume": tmp_path / "run/checkpoint-2"})))
    resumed, whole = steps_of(tmp_path / "run"), steps_of(folder)
    assert [m["train/step"] for m in resumed] == [1, 2, 3]
    assert_same_metrics(resumed[-1], whole[-1], tolerance=1e-6)
    assert whole[-1]["train/kl_coef"] != whole[0]["train/kl_coef"]


@pytest.mark.slow
def test_other_folders_and_left_behind_checkpoints_do_not_confuse_the_limit(finished, tmp_path):
    """A copy that someone keeps, and a later checkpoint of the run that is resumed from an earlier one."""
    folder, args = finished
    shutil.copytree(folder, tmp_path / "run")
    for name in ("checkpoint-best", "checkpoint-99"):
        (tmp_path / "run" / name).mkdir()
    flags = {**asdict(args), "resume": tmp_path / "run/checkpoint-2", "save_total_limit": 1, "eval_dataset": None}
    ppo_vl.main(ppo_vl.parse_args(to_argv(flags)))
    assert (tmp_path / "run/checkpoint-3/config.json").is_file() and (tmp_path / "run/checkpoint-best").is_dir()
    assert not (tmp_path / "run/checkpoint-2").exists()


# --- variants: as the plain run, or with a mark of their own ---------------------------------------------------------


SAME = {"total_steps": 2, "lr_schedule": "constant", "eval_dataset": None}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny, vqa, any_reward) -> list[dict]:
    """Metrics of a run without any of the flags that save memory."""
    flags = {**SHORT, **SAME, "model": tiny, "dataset": vqa, **any_reward}
    folder = tmp_path_factory.mktemp("plain")
    ppo_vl.main(ppo_vl.parse_args(to_argv({**flags, "output_dir": folder})))
    return steps_of(folder / "run")


MEMORY_FLAGS = [
    {"gradient_checkpointing": True},
    {"zero_stage": 2, "offload_optimizer": True},
    {"micro_batch_tokens": 100, "max_prompt_length": 64},
]


@pytest.mark.parametrize("flags", MEMORY_FLAGS, ids=lambda flags: next(iter(flags)))
@pytest.mark.slow
def test_memory_flags_do_not_change_the_result(flags, plain, run, any_reward, monkeypatch):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer as Layer

    training, forward = [], Layer.forward

    def spy(*args, **kwargs):
        training.append(args[0].training)
        return forward(*args, **kwargs)

    monkeypatch.setattr(Layer, "forward", spy)
    changed = steps_of(run(**SAME, **flags, **any_reward))
    for a, b in zip(plain, changed, strict=True):
        assert_same_metrics(a, b, tolerance=1e-4)
    if "gradient_checkpointing" in flags:
        forwards = 2 * 2 * 4 * 4  # actor and critic, 2 steps, 4 updates, 4 layers
        assert sum(training) == 2 * forwards, "every layer runs a second time, in the backward pass"


def test_shared_backbone_with_kl_loss_and_adaptive_coefficient(run, any_reward):
    flags = {"critic_share_backbone": True, "kl_loss": True, "kl_estimator": "k3", "kl_target": 0.5, "kl_horizon": 100}
    folder = run(total_steps=3, **any_reward, tensorboard=True, learning_rate=1e-3, warmup_steps=0, **flags)
    steps = steps_of(folder)
    assert all(math.isfinite(v) for m in steps for v in m.values())
    assert len({m["train/kl_coef"] for m in steps}) == 3
    assert steps[-1]["loss/kl"] > 0 and steps[-1]["loss/value"] > 0
    assert any("tfevents" in path.name for path in (folder / "tensorboard").iterdir())
    assert not (folder / "checkpoint-3/state/critic").exists()


@pytest.mark.slow
def test_bf16_without_reference(run, any_reward):
    folder = run(dtype="bf16", kl_coef=0, whiten_advantages="off", value_clip=0, top_p=0.9, **any_reward)
    steps = steps_of(folder)
    assert all(math.isfinite(v) for m in steps for v in m.values())
    assert all(m["objective/kl"] == 0 and m["val/clipfrac"] == 0 for m in steps)
    from safetensors import safe_open

    with safe_open(folder / "checkpoint-2/model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}


@pytest.mark.slow
def test_zero_3_saves_whole_weights_and_resumes(run, any_reward):
    flags = {"zero_stage": 3, **any_reward, "save_steps": 1, "eval_steps": 1}
    whole = run(**flags)
    last = steps_of(whole)[-1]
    shutil.rmtree(whole / "checkpoint-2")
    resumed = steps_of(run(**flags, resume=whole / "checkpoint-1"))
    assert_same_metrics(resumed[-1], last, tolerance=1e-5)
    plain = run(**any_reward, eval_steps=1, run_name="plain")
    assert_same_metrics(steps_of(plain)[-1], last, tolerance=1e-4)
    from transformers import AutoModelForImageTextToText

    a, b = (AutoModelForImageTextToText.from_pretrained(x / "checkpoint-2").state_dict() for x in (whole, plain))
    assert all(torch.allclose(a[name], b[name], atol=1e-3) for name in b)


@pytest.mark.slow
def test_weights_and_biases_offline(run):
    folder = run(track=True, eval_dataset=None)
    import wandb

    wandb.finish()
    assert list((folder / "wandb").glob("offline-run-*"))
    assert json.loads((folder / "checkpoint-2/state/trainer_state.json").read_text())["wandb_id"]


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_and_processor(tiny):
    return ppo_vl.load_model(tiny, torch.float32), ppo_vl.load_processor(tiny)


@pytest.fixture
def prepare(model_and_processor):
    """prepare_data of a source -> the data, and a function from row index to its encoded prompt."""

    def go(source, split="train", limit=0, **flags):
        data = ppo_vl.prepare_data(ppo_vl.Args(**flags), *model_and_processor, str(source), split, limit, False)

        def encoded(index: int) -> dict:
            return ppo_vl.encode_prompts(*model_and_processor, [ppo_vl.get_row(data, index)])[0]

        return data, encoded

    return go


def saved_as(kind: str, folder: Path, rows: list[dict]) -> Path:
    """The same rows (prompt, image path, answer) in another kind of file."""
    import datasets

    data = datasets.Dataset.from_list(rows)
    if kind == "relative":
        for row in rows:
            shutil.copy(row["image"], folder)
        return Path(write_jsonl(folder / "data.jsonl", [{**row, "image": Path(row["image"]).name} for row in rows]))
    if kind == "json":
        (folder / "data.json").write_text(json.dumps(rows))
    elif kind == "csv":
        data.to_csv(folder / "data.csv")
    elif kind == "bytes":
        data.map(lambda row: {"image": Path(row["image"]).read_bytes()}).to_parquet(folder / "data.parquet")
    elif kind == "parquet of pictures":  # {"bytes", "path"}, decoded to PIL
        data.cast_column("image", datasets.Image()).to_parquet(folder / "data.parquet")
    elif kind == "saved folder":
        data.cast_column("image", datasets.Image()).save_to_disk(folder / "data")
    elif kind == "saved folder of splits":
        datasets.DatasetDict({"train": data.cast_column("image", datasets.Image())}).save_to_disk(folder / "data")
    elif kind == "list of pictures":
        rows = [{"prompt": r["prompt"], "images": [r["image"]], "solution": r["answer"]} for r in rows]
        data = datasets.Dataset.from_list(rows)
        data.cast_column("images", datasets.List(datasets.Image())).save_to_disk(folder / "data")
    elif kind == "messages":
        contents = [[{"type": "image", "image": r["image"]}, {"type": "text", "text": r["prompt"]}] for r in rows]
        chats = [[{"role": "user", "content": content}] for content in contents]
        write_jsonl(
            folder / "data.jsonl", [{"messages": c, "answer": r["answer"]} for c, r in zip(chats, rows, strict=True)]
        )
    return next(path for path in folder.iterdir() if path.stem == "data")


KINDS = ["relative", "json", "csv", "bytes", "parquet of pictures", "saved folder", "saved folder of splits"]
KINDS += ["list of pictures", "messages"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_prompt(kind, prepare, vqa, vqa_rows, tmp_path):
    data, encoded = prepare(saved_as(kind, tmp_path, vqa_rows[:3]))
    _, expected = prepare(vqa)
    assert len(data["keep"]) == 3
    for i in range(3):
        a, b = encoded(i), expected(i)
        assert torch.equal(a["prompt_ids"], b["prompt_ids"]) and torch.equal(a["position_ids"], b["position_ids"])
        assert [x["key"] for x in a["images"]] == [x["key"] for x in b["images"]] and len(a["images"]) == 1
        assert ppo_vl.get_row(data, i)["answer"] == vqa_rows[i]["answer"]


def test_prompts_prepared_together_are_those_prepared_apart(prepare, model_and_processor, vqa, vqa_rows, tmp_path):
    rows = [{"prompt": "which is <image> and <image>?", "images": [r["image"] for r in vqa_rows[3:5]], "answer": "x"}]
    rows += [{"prompt": r["prompt"], "images": [r["image"]], "answer": r["answer"]} for r in vqa_rows[:3]]
    data, encoded = prepare(write_jsonl(tmp_path / "rows.jsonl", rows))
    together = ppo_vl.encode_prompts(*model_and_processor, [ppo_vl.get_row(data, i) for i in range(4)])
    for i, sample in enumerate(together):
        apart = encoded(i)
        assert sample.keys() == apart.keys()
        assert all(torch.equal(sample[k], apart[k]) for k in ("prompt_ids", "position_ids", "mm_token_type_ids"))
        for a, b in zip(sample["images"], apart["images"], strict=True):
            assert a["key"] == b["key"] and torch.equal(a["pixel_values"], b["pixel_values"])


def frames(folder: Path, count: int = 4) -> list[str]:
    for k in range(count):
        Image.new("RGB", (32, 32), (60 * k, 0, 0)).save(folder / f"frame{k}.png")
    return [str(folder / f"frame{k}.png") for k in range(count)]


def mixed_file(folder: Path, vqa_rows: list[dict]) -> str:
    """No, one and several pictures, placed or not, and a clip as a list of frames."""
    a, b = vqa_rows[0]["image"], vqa_rows[1]["image"]
    rows = [
        {"prompt": "is grass green?", "images": [], "videos": []},
        {"prompt": "what shape is it?", "images": [a], "videos": []},
        {"prompt": "first <image> and then <image> which is red?", "images": [a, b], "videos": []},
        {"prompt": "what happens in <video>?", "images": [], "videos": [frames(folder)]},
        {"prompt": "is <image> in <video>?", "images": [b], "videos": [frames(folder)]},
    ]
    return write_jsonl(folder / "mixed.jsonl", [{**row, "answer": "yes"} for row in rows])


def test_media_stand_where_the_prompt_puts_them(prepare, model_and_processor, vqa_rows, tmp_path):
    data, _ = prepare(mixed_file(tmp_path, vqa_rows))
    texts = [ppo_vl.render_chat(model_and_processor[1], ppo_vl.get_row(data, i)) for i in range(5)]
    marks = [re.sub(r"<\|vision_start\|><\|(image|video)_pad\|><\|vision_end\|>", r"[\1]", text) for text in texts]
    expected = [
        "is grass green?",
        "[image]what shape is it?",
        "first [image] and then [image] which is red?",
        "what happens in [video]?",
        "is [image] in [video]?",
    ]
    for i in range(5):
        assert f"user\n{expected[i]}<|im_end|>" in marks[i]


def test_rows_are_dropped_by_their_real_length_pictures_counted(prepare, vqa_rows, tmp_path):
    source = mixed_file(tmp_path, vqa_rows)
    data, encoded = prepare(source)
    lengths = [len(encoded(i)["prompt_ids"]) for i in range(5)]
    assert len(set(lengths)) >= 4
    for limit in sorted(lengths):
        data, _ = prepare(source, max_prompt_length=limit)
        assert data["keep"] == [i for i, n in enumerate(lengths) if n <= limit]
        assert data["dropped"] == 5 - len(data["keep"])


def test_system_prompt_is_put_before_prompts_that_have_none(prepare, model_and_processor, tmp_path):
    own = [{"role": "system", "content": "own rules"}, {"role": "user", "content": "a"}]
    rows = [{"messages": own, "answer": "x"}, {"messages": own[1:], "answer": "x"}]
    data, _ = prepare(write_jsonl(tmp_path / "a.jsonl", rows), system_prompt="be brief")
    texts = [ppo_vl.render_chat(model_and_processor[1], ppo_vl.get_row(data, i)) for i in range(2)]
    assert "own rules" in texts[0] and "be brief" not in texts[0]
    assert texts[1].index("be brief") < texts[1].index("user")


def test_held_out_subset_is_random_fixed_and_of_the_asked_size(prepare, vqa):
    keeps = [prepare(vqa, limit=10, seed=seed)[0]["keep"] for seed in (1, 2)]
    assert keeps[0] == keeps[1] and len(keeps[0]) == 10 and keeps[0] != list(range(10))


def test_easy_vqa_is_there_without_network():
    train, test = ppo_vl.load_rows("easy-vqa", "train"), ppo_vl.load_rows("easy-vqa", "test")
    assert len(train) == 38575 and len(test) == 9673
    assert Path(test[0]["image"]).is_file() and len(set(test["answer"])) == 13


def test_columns_named_by_flags(prepare, vqa_rows, tmp_path):
    renamed = [{"q": r["prompt"], "pic": r["image"], "gold": r["answer"]} for r in vqa_rows[:2]]
    rows = [{**row, "kind": "easy", "prompt": "decoy"} for row in renamed]
    flags = {"prompt_column": "q", "image_column": "pic", "answer_column": "gold"}
    data, _ = prepare(write_jsonl(tmp_path / "a.jsonl", rows), **flags)
    row = ppo_vl.get_row(data, 1)
    assert row["messages"][0]["content"][-1]["text"] == rows[1]["q"]
    assert (row["images"], row["answer"], row["columns"]["kind"]) == ([rows[1]["pic"]], rows[1]["gold"], "easy")


ANSWERS = [
    ["<answer>circle</answer>", "<answer>square</answer>", "<answer>circle"],  # alike beyond the prompt
    ["it is", "it is", "it is red", "no"],
    ["alone"],
]


@pytest.mark.parametrize("answers", ANSWERS, ids=len)
@pytest.mark.parametrize("kind", ["pictures", "text", "plain text"])
def test_a_group_of_texts_is_encoded_as_each_of_them_alone(kind, answers, tiny, tiny_text_model, vqa_rows, tmp_path):
    model_name = tiny if kind == "pictures" else tiny_text_model
    model, processor = ppo_vl.load_model(model_name, torch.float32), ppo_vl.load_processor(model_name)
    source, args = mixed_file(tmp_path, vqa_rows), ppo_vl.Args(plain_prompts=kind == "plain text")
    if kind != "pictures":
        source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "what is 2 + 2?", "answer": "4"}])
    data = ppo_vl.prepare_data(args, model, processor, source, "train", 0, False)
    for index in range(len(data["rows"])):
        row = ppo_vl.get_row(data, index)
        chats = [
            [*row["messages"], {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
            for answer in answers
        ]
        texts = [ppo_vl.render_chat(processor, row, chat) for chat in chats]
        sample, rests = ppo_vl.encode_group(model, processor, row, texts)
        assert min(map(len, rests)) == 1 or len({int(rest[0]) for rest in rests}) > 1, "nothing more is common"
        for text, rest in zip(texts, rests, strict=True):
            inputs = ppo_vl.run_processor(processor, row, text)
            alone = ppo_vl.make_prompt(model, inputs, inputs["input_ids"].shape[1])
            assert torch.equal(torch.cat([sample["prompt_ids"], rest]), alone["prompt_ids"])
            positions = int(sample["position_ids"].max()) + 1 + torch.arange(len(rest))  # as a pack goes on
            positions = torch.cat(
                [sample["position_ids"], positions.expand(*sample["position_ids"].shape[:-1], -1)], -1
            )
            assert torch.equal(positions, alone["position_ids"])
            for media in ("images", "videos"):
                assert [item["key"] for item in sample[media]] == [item["key"] for item in alone[media]]


def test_a_picture_in_answers_that_differ_is_refused(prepare, model_and_processor, vqa, capfd):
    row = ppo_vl.get_row(prepare(vqa)[0], 3)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    with pytest.raises(SystemExit):
        ppo_vl.encode_group(*model_and_processor, row, [f"what? a {picture}", f"what? b {picture}"])
    assert "row 3: a picture or video stands where the answers differ" in capfd.readouterr().err


@pytest.mark.slow
def test_run_on_mixed_media(run, vqa_rows, tmp_path, any_reward):
    source = mixed_file(tmp_path, vqa_rows)
    folder = run(dataset=source, eval_dataset=source, rollout_batch_size=24, train_batch_size=12, **any_reward)
    assert [m["train/episode"] for m in steps_of(folder)] == [24, 48]
    assert all(math.isfinite(v) for m in steps_of(folder) for v in m.values())
    assert steps_of(folder)[0]["objective/kl"] == pytest.approx(0, abs=1e-4)


def test_run_of_a_text_model(run, tiny_text_model, tmp_path, any_reward):
    rows = [{"question": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    source = write_jsonl(tmp_path / "sums.jsonl", rows)
    folder = run(model=tiny_text_model, dataset=source, eval_dataset=source, **any_reward)
    assert all(math.isfinite(v) for m in steps_of(folder) for v in m.values())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder / "checkpoint-2").chat_template
    assert AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2").config.model_type == "qwen2"


@pytest.mark.slow
def test_reward_that_is_none_for_some_rows_trains_on_the_others(run, tmp_path):
    body = "return [None if i % 4 == 0 else float(i % 3) for i in range(len(completion_ids))]"
    (tmp_path / "r.py").write_text(f"def score(completion_ids, **columns):\n    {body}\n")
    folder = run(rewards=[f"{tmp_path}/r.py:score"], reward_weights=[1])
    assert [m["train/episode"] for m in steps_of(folder)] == [16, 32]
    assert [m["rollout/responses_trained"] for m in steps_of(folder)] == [12, 12]
    assert read_metrics(folder)


def test_held_out_rows_to_which_no_reward_applies(run, vqa_rows, tmp_path):
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{**row, "answer": "unknown"} for row in vqa_rows[:8]])
    body = "return [None if a == 'unknown' else float(i % 3) for i, a in enumerate(answer)]"
    (tmp_path / "r.py").write_text(f"def score(answer, **columns):\n    {body}\n")
    flags = {"rewards": [f"{tmp_path}/r.py:score"], "reward_weights": [1]}
    before, *_ = read_metrics(run(eval_dataset=held_out, total_steps=1, **flags))
    assert before.get("eval/greedy_score") is None and before["eval/greedy_length"] > 0


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_default_run_learns(tmp_path, tiny):
    """The default, shortened: held-out sampled reward rises, greedy accuracy does not fall."""
    flags = {"model": tiny, "output_dir": tmp_path, "run_name": "run"}
    flags |= {"total_steps": 25, "eval_samples": 400, "eval_steps": 0}
    command = [sys.executable, "ppo_vl.py", *to_argv(flags)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "->" in result.stdout.splitlines()[-1]
    before, *_, last = read_metrics(tmp_path / "run")
    assert last["eval/sampled_score"] >= before["eval/sampled_score"] + 0.30
    assert last["eval/greedy_accuracy"] >= before["eval/greedy_accuracy"]
