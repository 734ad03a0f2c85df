"""rloo.py end to end: ranks, ZeRO, resume, kills, samplers and rewards of one's own, rows and flags that are wrong."""

import hashlib
import io
import json
import math
import random
import signal
import time

import conftest
import pytest
import torch
from conftest import ROOT, assert_same_run, metrics_differ, metrics_of, read_jsonl, weights_of, write_jsonl
from PIL import Image, ImageChops

import rloo


def test_a_run_writes_what_the_page_says(run, any_reward, capsys):
    folder = run("rloo", eval_steps=1, save_steps=1, save_total_limit=1, **any_reward)
    first, *steps = metrics_of(folder)
    assert first["train/step"] == 0 and all(key.startswith(("eval/", "train/")) for key in first)
    assert [m["train/step"] for m in steps] == [1, 2] and "eval/sampled_score" in steps[0]
    assert steps[0]["eval/sampled_reward_score"] <= 1 != steps[0]["eval/sampled_score"]  # it is named score
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-5) and abs(steps[1]["objective/kl"]) > 1e-4
    samples = read_jsonl(folder / "samples.jsonl")
    assert {s["phase"] for s in samples} == {"train", "eval_greedy", "eval_sampled"}
    names = {"train/step", "row", "prompt", "image", "answer", "response", "reward/accuracy"}
    assert names <= samples[0].keys()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    out = capsys.readouterr().out  # no terminal: a line per step
    assert "packed = unmodified model within" in out and "step 2 of 2" in out and "eval/greedy_score" in out


@pytest.mark.slow
def test_the_checkpoint_is_a_transformers_folder_that_writes_the_same(run, vqa_rows):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from common import packing

    folder = run("rloo", eval_steps=1, eval_samples=4)
    checkpoint = folder / "checkpoint-2"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    for sample in read_jsonl(folder / "samples.jsonl")[-8:]:
        if sample["phase"] != "eval_greedy":
            continue
        row = {"prompt": sample["prompt"], "image": sample["image"]}
        chat = rloo.to_messages(rloo.Args(), row, ROOT, processor.tokenizer)
        inputs = packing.encode_chat(processor, chat, add_generation_prompt=True)
        bad = packing.media_token_ids(model.config)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=8, suppress_tokens=bad)
        text = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == sample["response"]


@pytest.mark.slow
def test_rollouts_do_not_depend_on_batches_packs_or_checkpointing(run, tmp_path, any_reward):
    base = metrics_of(run("rloo", **any_reward))
    changes = {"generation_batch_size": 4}, {"micro_batch_tokens": 560}, {"gradient_checkpointing": True}
    for i, flags in enumerate(changes):  # 560: 1 pack -> several
        other = metrics_of(run("rloo", run_name=f"other{i}", **flags, **any_reward))
        assert max(metrics_differ(base, other).values()) < 1e-4, flags


@pytest.mark.slow
def test_wandb_takes_every_step_and_the_samples_of_evaluations(run, vqa_rows, tmp_path, monkeypatch):
    import wandb

    for name, value in {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", vqa_rows[::-1])
    folder = run("rloo", eval_dataset=held_out, track="wandb", save_total_limit=-1)
    wandb.finish()
    logged = (folder / "wandb").glob("offline-run-*/files/media/table/samples/*.json")
    phases = sorted(path.name.rsplit("_", 2)[0] for path in logged)
    assert phases == ["eval_greedy"] * 2 + ["eval_sampled"] * 2 + ["train"], "of steps 0 and 2"
    files = [path.read_bytes() for path in (tmp_path / "artifacts/staging").iterdir()]  # to be uploaded
    pictures = {hashlib.sha256(data).hexdigest(): data for data in files}
    shown = {}
    for table in (json.loads(data) for data in files if data.startswith(b'{"_type": "table"')):
        rows = [dict(zip(table["columns"], row)) for row in table["data"]]
        shown |= {(row["phase"], row["row"], row["response"]): row for row in rows}
    for sample in read_jsonl(folder / "samples.jsonl"):
        row = shown.get((sample["phase"], sample["row"], sample["response"]))
        if sample.pop("train/step") != 1:  # no evaluation
            assert row | sample | {"prompt": "<image>\n" + sample["prompt"]} == row
            picture = Image.open(io.BytesIO(pictures[row["picture_0"]["sha256"]]))
            assert not ImageChops.difference(picture, Image.open(sample["image"]).convert("RGB")).getbbox()
    assert (folder / "checkpoint-2").is_dir(), "the one just saved stays, whatever the limit"
    assert [*(folder / "wandb").glob("offline-run-*/*.wandb")] and len(metrics_of(folder)) == 3


def test_checkpoints_are_ordered_by_step(tmp_path):
    """Not by time: one that is being deleted is the newest."""
    names = [f"checkpoint-{n}" for n in ("10", "11.tmp", "best", "9", "2")]
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in rloo.checkpoints(tmp_path)] == [names[4], names[3], names[0]]


def test_a_row_that_occurs_twice_in_a_rollout_is_sampled_for_twice(run, tmp_path, vqa_rows, monkeypatch):
    found, real = [], rloo.roll_out
    watched = lambda *given, **how: found.append(real(*given, **how)) or found[-1]  # noqa: E731
    monkeypatch.setattr(rloo, "roll_out", watched)
    run("rloo", dataset=write_jsonl(tmp_path / "one.jsonl", vqa_rows[:1]), eval_dataset=None, total_steps=1)
    texts = [tuple(ids.tolist()) for ids in found[0].response_ids]
    assert len({*zip(*[iter(texts)] * 4)}) == 4 and {prompt.index for prompt in found[0].prompts} == {0}


LORA = {"lora_rank": 4, "learning_rate": 1e-3}
PLANS = [({"zero_stage": stage}, {}) for stage in (0, 2, 3)]
PLANS += [({"zero_stage": 3, "offload_optimizer": True}, LORA)]


@pytest.mark.slow
@pytest.mark.parametrize("flags, lora", PLANS)
def test_two_ranks_train_as_one(run, start, tmp_path, vqa_rows, any_reward, flags, lora):
    rows = [{"prompt": "What is it?", "answer": "blue"}, *(dict(row) for row in vqa_rows[::2])]
    for row in rows[1::3]:  # some without pictures
        del row["image"]
    data = write_jsonl(tmp_path / "mixed.jsonl", rows)
    one = run("rloo", dataset=data, run_name="one", **any_reward, **lora)
    process = start("rloo", ranks=2, dataset=data, run_name="two", **any_reward, **flags, **lora)
    assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-3000:]
    assert_same_run(one, tmp_path / "runs/two", 1e-4, of_weights=1e-4)


BF16 = [{"zero_stage": stage} for stage in (0, 1, 2, 3)]
BF16 += [{"lora_rank": 4}, {"zero_stage": 2, "offload_optimizer": True}]
BF16 += [{"zero_stage": 3, "offload_optimizer": True, "lora_rank": 4}]


@pytest.mark.slow
@pytest.mark.parametrize("flags", BF16)
def test_bf16(run, any_reward, monkeypatch, flags):
    """Ratios are exactly 1 while nothing is learnt. A rate of 1e-6 is below what most bf16 weights can show: it
    moves the master weights, which are fp32. Resume is bit-exact."""
    from deepspeed.utils import safe_get_full_fp32_param

    found, real = [], rloo.save_checkpoint

    def save_checkpoint(args, state):
        trained = [p for p in state.actor.module.parameters() if p.requires_grad]
        groups = getattr(state.actor.optimizer, "fp32_groups", [])  # without ZeRO
        masters = [x for group in groups for x in group] or [safe_get_full_fp32_param(p) for p in trained]
        assert {x.dtype for x in masters} == {torch.float32}
        found.append(torch.cat([x.detach().flatten().clone() for x in masters]))
        return real(args, state)

    monkeypatch.setattr(rloo, "save_checkpoint", save_checkpoint)
    flags = {"dtype": "bfloat16", "eval_dataset": None, "warmup_steps": 0, **any_reward, **flags}
    still = run("rloo", learning_rate=0.0, run_name="still", **flags)
    for step in metrics_of(still):
        assert step["policy/ratio"] == 1 and step["policy/approx_kl"] == 0 < step["train/grad_norm"]
    flags |= {"learning_rate": 1e-6, "save_steps": 1, "num_iterations": 1, "train_batch_size": 16}
    flags["min_lr_ratio"] = 1.0
    moved = run("rloo", **flags)
    before, first, after = found
    assert (before - first).abs().max() == pytest.approx(1e-6, rel=0.05)  # as AdamW's first update is
    assert (before != after).float().mean() > 0.9 and (before - after).abs().max() < 1e-5
    if "lora_rank" not in flags:
        assert (before.bfloat16() == after.bfloat16()).float().mean() > 0.7
    metrics, weights = metrics_of(moved), weights_of(moved / "checkpoint-2")
    run("rloo", resume=moved / "checkpoint-1", **flags)
    assert all(value == 0 for value in metrics_differ(metrics, metrics_of(moved)).values())
    assert conftest.largest_difference(weights, weights_of(moved / "checkpoint-2")) == 0
    assert torch.equal(found[-1], after)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [BF16[2], BF16[-1]])
def test_bf16_on_two_ranks(run, start, tmp_path, any_reward, flags):
    flags = {"dtype": "bfloat16", "eval_dataset": None, "learning_rate": 0.0, **any_reward, **flags}
    process = start("rloo", ranks=2, run_name="two", **flags)
    one = metrics_of(run("rloo", run_name="one", **flags))
    assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-3000:]
    for ours, theirs in zip(metrics_of(tmp_path / "runs" / "two"), one, strict=True):
        assert ours["policy/ratio"] == theirs["policy/ratio"] == 1
        for name in ("train/grad_norm", "objective/scores"):  # one word may be another one, by rounding
            assert ours[name] == pytest.approx(theirs[name], rel=0.3)


@pytest.mark.slow
def test_sigterm_saves_and_kills_lose_nothing(start, run, tmp_path, any_reward):
    flags = {"total_steps": 6, "save_steps": 1, "run_name": "killed", "resume": "auto", **any_reward}
    process = start("rloo", **flags)
    wait_for(tmp_path / "runs/killed/metrics.jsonl", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0 and "stopped by a signal" in (tmp_path / "log").read_text()
    for seed in (1, 2):  # anywhere, start-up and saving too
        process = start("rloo", **flags)
        time.sleep(random.Random(seed).uniform(6, 12))
        process.kill()
        process.wait()
    assert start("rloo", **flags).wait(timeout=120) == 0, (tmp_path / "log").read_text()[-3000:]
    calm = run("rloo", **{**flags, "run_name": "calm", "resume": None})
    assert_same_run(calm, tmp_path / "runs/killed", 0, of_weights=0)


def wait_for(path, lines: int) -> None:
    for _ in range(600):
        if path.is_file() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} never had {lines} lines")


def test_text_models_tensorboard_and_a_sampler_of_ones_own(run, tiny_text_model, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"Say {i}"}], "answer": str(i)} for i in range(8)]
    (tmp_path / "plug.py").write_text(
        "import rloo\n"
        "class Mine(rloo.ModelSampler):\n"
        "    slept = 0\n"
        "    def sleep(self):\n"
        "        Mine.slept += 1\n"
        "def brief(completions, completion_ids, log_metric, **columns):\n"
        "    log_metric('mine/slept', len(completions))\n"
        "    return [-len(ids) * len(c[0]['content']) / 9 for c, ids in zip(completions, completion_ids)]\n"
    )
    plug = f"{tmp_path}/plug.py"
    flags = {"rollout": f"{plug}:Mine", "rewards": [f"{plug}:brief"], "reward_weights": [1]}
    data = write_jsonl(tmp_path / "text.jsonl", rows)
    folder = run("rloo", model=tiny_text_model, dataset=data, eval_dataset=data, track="tensorboard", **flags)
    assert metrics_of(folder)[-1]["mine/slept"] == 16 and "reward/brief" in metrics_of(folder)[-1]
    steps, texts = conftest.tensorboard_of(folder)
    assert steps == [0, 1, 2] and len([*folder.glob("events*")]) == 1
    assert [*texts["samples/eval_greedy"]] == [*texts["samples/eval_sampled"]] == [0, 2]
    assert "    prompt: Say 7\n    phase" in texts["samples/eval_greedy"][2]
    assert metrics_of(folder)[1]["rollout/engine_logprob_diff_max"] < 1e-5  # a forward of its own, compared


def test_rows_that_can_not_be_used_are_named_and_counted(run, tmp_path, vqa_rows, capsys):
    rows = [dict(row) for row in vqa_rows[:12]]
    rows[3]["image"] = "nowhere.png"
    rows[5]["prompt"] = "long " * 900
    rows[7]["prompt"] = "<image><image> two places"
    data = write_jsonl(tmp_path / "some.jsonl", rows)
    folder = run("rloo", dataset=data, eval_dataset=None, total_steps=3)
    error = capsys.readouterr().err
    reasons = "No such file", "more than --max-prompt-length", "2 places for images"
    assert all(words in error for words in ("row 3 is left out", *reasons)), error
    dropped = sum(m["rollout/prompts_dropped"] for m in metrics_of(folder))
    assert dropped == 3  # an epoch: 3 steps of 4 prompts


@pytest.mark.parametrize("amount, words", [(math.nan, "nan"), (0.5, "0.5")])
def test_a_sampler_of_another_function_stops_the_run(run, tmp_path, amount, words, capsys):
    """Without a sign, the run would be spoilt; NaN is no number below the tolerance."""
    (tmp_path / "plug.py").write_text(
        "import rloo\n"
        "class Off(rloo.ModelSampler):\n"
        "    def sample(self, prompts, *how):\n"
        "        responses = super().sample(prompts, *how)\n"
        f"        responses[-1].logprobs += 16 * float('{amount}')\n"
        "        return responses\n"
    )
    with pytest.raises(SystemExit) as stopped:
        run("rloo", rollout=f"{tmp_path}/plug.py:Off", eval_dataset=None)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and f"log-probs are {words} nats from the trainer's, most at row" in error


BAD = [  # flags, words of the message
    ({"num_samples_per_prompt": 1}, "--num-samples-per-prompt must be 2 or more"),
    ({"train_batch_size": 6}, "divide --train-batch-size"),
    ({"rollout_batch_size": 20}, "--rollout-batch-size must be a multiple"),
    ({"total_steps": 0}, "counts must be at least 1"),
    ({"micro_batch_tokens": 100}, "--micro-batch-tokens must hold prompt + response"),
    ({"reward_weights": (1,)}, "one weight per reward"),
    ({"rewards": ("format", "a.py:format"), "reward_weights": (1, 1)}, "--rewards need different names"),
    ({"temperature": 0}, "--temperature must be more than 0"),
    ({"resume": "auto", "run_name": None}, "--resume auto needs --run-name"),
    ({"resume": "nowhere"}, "is no checkpoint"),
    ({"model": "nowhere/at-all"}, "the model nowhere/at-all can't be loaded"),
    ({"dataset": "nowhere.jsonl"}, "can't be read as a dataset"),
    ({"dataset": "{tmp}/broken.jsonl"}, "can't be read as a dataset: JSON parse error"),
    ({"dataset": "{tmp}/no_answer.jsonl"}, "has columns prompt: rename yours"),
    ({"dataset": "{tmp}/listed.jsonl"}, "needs an answer that is a text or a number, not ['a']"),
    ({"rewards": ("accurate",), "reward_weights": (1,)}, "neither path.py:name nor one of accuracy, format"),
    ({"rewards": ("{tmp}/none.py:f",), "reward_weights": (1,)}, "neither path.py:name"),
    ({"rewards": ("{tmp}/reward.py:f",), "reward_weights": (1,)}, "has no 'f'"),
    ({"rewards": ("{tmp}/reward.py:short",), "reward_weights": (1,)}, "must return one finite number"),
    ({"rollout": "vlm"}, "--rollout vlm is neither"),
    ({"run_name": "taken"}, "exists already"),
    ({"max_prompt_length": 5, "max_response_length": 4}, "no row can be used"),
    ({"output_dir": "{tmp}/broken.jsonl"}, "--output-dir"),
    ({"eval_dataset": "nowhere"}, "nowhere (split test; HF_HOME) can't be read"),
]


@pytest.mark.parametrize("flags, words", BAD, ids=[words[:30] for _, words in BAD])
def test_bad_input_gets_one_sentence_and_exit_code_2(run, tmp_path, flags, words, capsys):
    write_jsonl(tmp_path / "no_answer.jsonl", [{"prompt": "Q"}])
    write_jsonl(tmp_path / "listed.jsonl", [{"prompt": "Q", "answer": ["a"]}] * 8)
    (tmp_path / "broken.jsonl").write_text("{not json")
    (tmp_path / "reward.py").write_text("def short(**columns):\n    return [1.0]\n")
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    fill = lambda x: x.replace("{tmp}", str(tmp_path)) if isinstance(x, str) else x  # noqa: E731
    flags = {k: tuple(map(fill, v)) if isinstance(v, tuple) else fill(v) for k, v in flags.items()}
    with pytest.raises(SystemExit) as stopped:
        run("rloo", **flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and words in error
    assert error.count("\nerror:") + error.startswith("error:") == 1
