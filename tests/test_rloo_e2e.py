"""Whole runs of rloo on tiny models: what they write and what comes back from it, LoRA, reward models, options, resuming."""
# ruff: noqa: F401, F811  fixtures

import json
import math
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, read_jsonl, write_jsonl
from PIL import Image
from rloo_runs import BASE, caught, flags_of, read_metrics, reward_file, run, steps_of, sums_file, words
from safetensors.torch import load_file, save_file

import rloo

METRICS = """
    train/step train/episode train/learning_rate train/grad_norm train/skipped_updates
    objective/scores objective/scores_std objective/kl objective/rlhf_reward objective/entropy
    objective/advantages_mean objective/advantages_std reward/score
    policy/ratio policy/ratio_max policy/approx_kl policy/clipfrac_low policy/clipfrac_high policy/entropy loss/policy
    rollout/response_length_mean rollout/response_length_min rollout/response_length_max rollout/truncated_frac
    rollout/zero_std_groups_frac rollout/group_std rollout/prompts_sampled rollout/responses_trained
    rollout/engine_logprob_diff_mean rollout/engine_logprob_diff_max
    time/rollout time/score time/update time/sync time/total time/tokens_per_second
""".split()
EVAL_METRICS = [f"eval/{mode}_{what}" for mode in ("greedy", "sampled") for what in ("score", "accuracy", "length")]
EVAL_METRICS += ["eval/best_score", "eval/pass_at_k", "eval/num_samples"]
FAST = {"learning_rate": 3e-3, "warmup_steps": 0, "lr_schedule": "constant"}  # visible after one step


def same(a: dict, b: dict, tolerance: float = 0.0) -> None:
    """Equal metrics, times left out."""
    assert a.keys() == b.keys()
    for name in a:
        if not name.startswith("time/"):
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


# --- one finished run, looked at from all sides ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, vqa) -> tuple[Path, rloo.Args]:
    """Folder of a run of 3 steps, each with 2 optimizer steps, that saved at each, and its arguments."""
    folder = tmp_path_factory.mktemp("finished")
    rewards = {"rewards": ["accuracy", f"{folder}/reward.py:score"], "reward_weights": [0.5, 1]}
    reward_file(folder)
    flags = {**BASE, **rewards, **FAST, "dataset": vqa, "eval_dataset": vqa, "output_dir": folder}
    flags |= {"total_steps": 3, "save_steps": 1, "train_batch_size": 8, "max_response_length": 12, "kl_coef": 0.05}
    flags |= {"learning_rate": 3e-4}
    args = rloo.parse_args(words(flags))
    rloo.main(args)
    return folder / "run", args


def test_metrics_are_complete_and_finite(finished):
    before, *steps = read_metrics(finished[0])
    assert set(EVAL_METRICS) <= before.keys() and set(EVAL_METRICS) <= steps[-1].keys()
    assert [m["train/step"] for m in steps] == [1, 2, 3] and [m["train/episode"] for m in steps] == [16, 32, 48]
    for metrics in steps:
        assert not set(METRICS) - metrics.keys()
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["rollout/engine_logprob_diff_max"] < 1e-3, "the sampler and the trainer are one function"
        assert metrics["objective/advantages_mean"] == pytest.approx(0, abs=1e-5)
        expected = metrics["objective/scores"] - 0.05 * metrics["objective/kl"]
        assert metrics["objective/rlhf_reward"] == pytest.approx(expected, abs=1e-5)
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-4), "the reference is where the policy starts"
    assert abs(steps[2]["objective/kl"]) > 1e-3
    assert steps[0]["policy/approx_kl"] > 1e-7, "the second optimizer step is off-policy"


def test_evaluation_says_how_good_the_best_sample_is(finished):
    for metrics in (m for m in read_metrics(finished[0]) if "eval/best_score" in m):
        assert metrics["eval/num_samples"] == 4
        assert metrics["eval/best_score"] >= metrics["eval/sampled_score"]
        for mode in ("greedy", "sampled"):  # the reward that is called score does not hide the score of all
            parts = 0.5 * metrics[f"eval/{mode}_accuracy"] + metrics[f"eval/{mode}_reward_score"]
            assert metrics[f"eval/{mode}_score"] == pytest.approx(parts, abs=1e-6)
        assert metrics["eval/sampled_accuracy"] <= metrics["eval/pass_at_k"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"num_iterations": 2, "normalize_advantages": True}, {"mask_truncated": True}])
def test_trajectories_hold_what_was_trained(flags, run):
    """On-policy, where the advantages are computed in the update, and not; cut responses are left out where they are masked."""
    folder = run(**flags, kl_coef=0.3, save_trajectories=True, max_response_length=4)
    for step, metrics in enumerate(steps_of(folder), 1):
        lines = read_jsonl(folder / f"trajectories/step_{step}.jsonl")
        assert len(lines) == metrics["rollout/responses_trained"]
        assert (len(lines) == 16) == ("mask_truncated" not in flags)
        for line in lines:
            ids = line["response_ids"]
            assert line["score"] == pytest.approx(sum(ids) % 7 / 7) and not (
                line["truncated"] and "mask_truncated" in flags
            )
            assert all(
                len(line[name]) == len(ids) for name in ("logprobs", "ref_logprobs", "engine_logprobs", "advantages")
            )
            assert line["logprobs"] == pytest.approx(line["engine_logprobs"], abs=1e-3)
            assert len({*line["advantages"]}) == 1
        advantages = [line["advantages"][0] for line in lines]
        assert metrics["objective/advantages_std"] == pytest.approx(np.std(advantages), rel=1e-4)


def test_pictures_of_samples_and_curves_are_written(finished):
    for name in ("samples-0.png", "samples-3.png", "curves.png"):
        assert min(Image.open(finished[0] / name).size) > 300
    samples = read_jsonl(finished[0] / "samples.jsonl")
    assert {s["phase"] for s in samples} == {"train", "eval_greedy", "eval_sampled"}
    assert all(s["score"] == pytest.approx(sum(w * s["components"][n] for n, w in [("accuracy", 0.5), ("score", 1)])) for s in samples)  # fmt: skip # noqa: E501


def test_reloaded_checkpoint_answers_as_the_run_did_at_its_end(finished, vqa_rows):
    """With nothing but transformers."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = finished[0] / "checkpoint-3"
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    last = [s for s in read_jsonl(finished[0] / "samples.jsonl") if s["step"] == 3 and s["phase"] == "eval_greedy"]
    assert len(last) == 4
    for sample in last:
        row = vqa_rows[sample["row"]]
        content = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[text], images=[Image.open(row["image"]).convert("RGB")], return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
        assert processor.decode(ids, skip_special_tokens=True) == sample["response"]


def test_resume_is_bitwise_the_uninterrupted_run(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(rloo, "draw_curves", lambda *args: None)
    monkeypatch.setattr(rloo, "draw_samples", lambda *args: None)
    folder, args = finished
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-3")
    rloo.main(rloo.parse_args(words({**asdict(args), "resume": tmp_path / "run/checkpoint-2"})))
    for a, b in zip(steps_of(tmp_path / "run"), steps_of(folder), strict=True):
        same(a, b)
    a, b = (weights_of(x / "checkpoint-3") for x in (folder, tmp_path / "run"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_seed_decides_the_run(run, tiny_text_model, tmp_path):
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path)}
    one, again, other = (steps_of(run(run_name=n, seed=s, **flags)) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    same(one[-1], again[-1])
    assert one[-1]["objective/scores"] != other[-1]["objective/scores"]


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_best_score_and_pass_at_k_by_hand(monkeypatch):
    """Three prompts with three samples each; no reward applies to the third prompt."""
    nan = math.nan
    scores = [[0.9, 0.0, 0.5], [0.1, nan, 0.2], [nan, nan, nan]]
    accuracy = [[1, 0, 0], [0, 0, 0], [nan, nan, nan]]

    def fake(model, processor, data, indices, count, *rest):
        records = [
            {
                "row": i, "messages": [], "images": [], "answer": "", "texts": ["x"] * 3, "extra": {},
                "response_ids": [[1, 2]] * count, "scores": np.array(scores[i][:count]),
                "components": {"accuracy": np.array(accuracy[i][:count], dtype=float)},
            }
            for i in indices
        ]  # fmt: skip
        return records, {}

    monkeypatch.setattr(rloo, "generate_and_score", fake)
    args = rloo.Args(eval_num_samples=3)
    model = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")
    metrics, samples = rloo.evaluate(model, None, {"keep": [0, 1, 2]}, args, [], (0, 1), 0)
    assert metrics["eval/best_score"] == pytest.approx((0.9 + 0.2) / 2)
    assert metrics["eval/pass_at_k"] == pytest.approx(1 / 2)  # of the prompts that accuracy judges
    assert metrics["eval/sampled_score"] == pytest.approx((0.9 + 0.5 + 0.1 + 0.2) / 5)
    assert metrics["eval/greedy_accuracy"] == pytest.approx(0.5)
    assert len(samples) == 3 + 9


def test_held_out_rows_to_which_no_reward_applies(run, tiny_text_model, tmp_path):
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"question": "1 + 1?", "answer": "unknown"}] * 3)
    text = "def score(answer, **c):\n    return [None if a == 'unknown' else i % 3 for i, a in enumerate(answer)]\n"
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "eval_dataset": held_out}
    before, *_ = read_metrics(run(total_steps=1, **flags, **reward_file(tmp_path, text)))
    assert before["eval/greedy_length"] > 0 and "eval/best_score" not in before and "eval/greedy_score" not in before


# --- rewards ---------------------------------------------------------------------------------------------------------

MIXED_REWARDS = """
import asyncio, threading
here = {}
def one(completions, trainer_state, log_metric, log_extra, **columns):
    log_metric("custom/step", trainer_state.global_step)
    log_extra("note", [f"{trainer_state.max_steps} {trainer_state.max_response_length}"] * len(completions))
    return [1.0] * len(completions)
async def zero(completions, **columns):
    await asyncio.sleep(0.01)
    return [0.0] * len(completions)
async def zero_too(completions, **columns):
    await asyncio.sleep(0.01)
    return [None] * len(completions)
"""


def test_weights_of_sync_and_async_functions(run, tiny_text_model, tmp_path):
    (tmp_path / "r.py").write_text(MIXED_REWARDS)
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "total_steps": 2}
    rewards = [f"{tmp_path}/r.py:{name}" for name in ("one", "zero", "zero_too")]
    folder = run(**{**flags, "rewards": rewards, "reward_weights": [0.7, 0.3, 5]})
    for step, metrics in enumerate(steps_of(folder), start=1):
        assert metrics["objective/scores"] == pytest.approx(0.7)
        assert (metrics["reward/one"], metrics["reward/zero"], metrics["custom/step"]) == (1, 0, step)
        assert "reward/zero_too" not in metrics and metrics["rollout/zero_std_groups_frac"] == 1
    assert {s["note"] for s in read_jsonl(folder / "samples.jsonl")} == {"2 8"}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("at_start", [True, False], ids=["at the start", "later"])
def test_reward_function_that_hangs_is_named(kind, at_start, run, tiny_text_model, tmp_path, capfd):
    wait = "await asyncio.sleep(60)" if kind == "async def" else "time.sleep(60)"
    when = "True" if at_start else "trainer_state.global_step == 1"
    text = f"import asyncio, time\n{kind} score(completions, trainer_state, **columns):\n"
    text += f"    if {when}:\n        {wait}\n    return [1.0] * len(completions)\n"
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "reward_timeout": 1.5}
    with pytest.raises(SystemExit) as stopped:
        run(**flags, **reward_file(tmp_path, text))
    assert stopped.value.code == 2
    message = capfd.readouterr().err
    assert "reward function score" in message and "--reward-timeout 1.5" in message and "Traceback" not in message
    assert (tmp_path / "runs").exists() == (not at_start)


def test_functions_that_hang_one_after_the_other_do_not_add_up(run, tiny_text_model, tmp_path, capfd):
    text = "".join(f"def slow{i}(**columns):\n    time.sleep(60)\n" for i in range(5))
    (tmp_path / "r.py").write_text("import time\n" + text)
    rewards = {"rewards": [f"{tmp_path}/r.py:slow{i}" for i in range(5)], "reward_weights": [1] * 5}
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "reward_timeout": 1}
    started = time.time()
    with pytest.raises(SystemExit):
        run(**{**flags, **rewards})
    assert time.time() - started < 4
    assert "slow0" in capfd.readouterr().err


# --- reward models ---------------------------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWARD_CHAT = CHAT.replace("<end>", " :end")


def records_of(run, **flags) -> list[dict]:
    """Records of the training rollouts of a run."""
    found, gather = [], rloo.gather_records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "gather_records", lambda r, n: found.extend(gather(r, n)) or gather(r, n))
        run(total_steps=1, num_samples_per_prompt=4, **flags)
    return found


def text_reward_model(folder: Path, tiny_text_model: str, kind: str) -> Path:
    """A random sequence classifier with one label, with a tokenizer and, but for BERT, a chat template of its own."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    torch.manual_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_model)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=len(tokenizer) + 2, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, num_labels=1, max_position_embeddings=256,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        for p in model.parameters():
            p.data *= 10  # as they are drawn, every text scores alike
        tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
        ids = [(t, tokenizer.convert_tokens_to_ids(t)) for t in ("[CLS]", "[SEP]")]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
        tokenizer.chat_template = None
    else:
        config = transformers.Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=1,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.Qwen2ForSequenceClassification(config)
        tokenizer.chat_template = REWARD_CHAT
        model.score.weight.data.normal_()
    model.save_pretrained(folder / kind)
    tokenizer.save_pretrained(folder / kind)
    return folder / kind


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
@pytest.mark.parametrize("budget", [2048, 200])
def test_scores_of_a_text_reward_model_are_those_of_its_own_forward(kind, budget, run, tiny_text_model, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = text_reward_model(tmp_path, tiny_text_model, kind)
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "micro_batch_tokens": budget}
    flags |= {"max_prompt_length": 100, "rewards": [folder, "length"], "reward_weights": [2, 1]}
    records = records_of(run, **flags)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    distinct = set()
    for record in records:
        question = record["messages"][0]["content"][0]["text"]
        for k, text in enumerate(record["texts"]):
            if kind == "bert":
                whole = question + text + tokenizer.eos_token
                ids = tokenizer(whole, return_tensors="pt", return_token_type_ids=False)["input_ids"]
                assert ids[0, 0] == tokenizer.cls_token_id and ids[0, -1] == tokenizer.sep_token_id
            else:
                chat = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
                whole = tokenizer.apply_chat_template(chat, tokenize=False)
                ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                expected = model(input_ids=ids).logits[0, 0].item()
            assert record["components"][kind][k] == pytest.approx(expected, abs=1e-4)
            length = record["components"]["length"][k]
            assert record["scores"][k] == pytest.approx(2 * expected + length, abs=1e-3)
            distinct.add(round(expected, 4))
    assert len(records) == 4 and len(distinct) > 8


def test_scores_of_a_vision_reward_model_are_those_of_its_own_forward(run, tmp_path, vqa_rows):
    from transformers import AutoModel, AutoProcessor

    folder = tmp_path / "vision"
    model = AutoModel.from_pretrained(TINY, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(TINY)
    head = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    save_file({"score.weight": head}, folder / "score.safetensors")
    records = records_of(run, rewards=[folder], reward_weights=[1])
    distinct = set()
    for record in records:
        row = vqa_rows[record["row"]]
        for k, text in enumerate(record["texts"]):
            asked = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
            said = [{"type": "text", "text": text}]
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            whole = processor.apply_chat_template(chat, tokenize=False)
            inputs = processor(text=[whole], images=[Image.open(row["image"]).convert("RGB")], return_tensors="pt")
            with torch.no_grad():
                expected = (model(**inputs).last_hidden_state[0, -1] @ head[0]).item()
            assert record["scores"][k] == pytest.approx(expected, abs=1e-4)
            distinct.add(round(expected, 4))
    assert len(distinct) > 4


# --- groups without signal -------------------------------------------------------------------------------------------

# Responses to every other question all score alike.
EVERY_OTHER = """
def score(completion_ids, answer, **columns):
    return [sum(ids) % 97 / 97 if int(a) % 4 == 0 else 0.5 for ids, a in zip(completion_ids, answer)]
"""


def test_groups_without_signal_are_counted_before_the_kl_and_can_be_skipped(run, tiny_text_model, tmp_path):
    same_scores = "def score(completions, **columns):\n    return [0.3] * len(completions)\n"
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "kl_coef": 0.5, **FAST}
    noise = {"entropy_coef": 0.1}  # so that the policy leaves its reference
    first, last = steps_of(run(run_name="dead", **flags, **noise, **reward_file(tmp_path, same_scores)))
    assert last["objective/kl"] != 0 and last["objective/advantages_std"] > 0
    assert first["rollout/zero_std_groups_frac"] == last["rollout/zero_std_groups_frac"] == 1
    for skip, trained in ((False, {16}), (True, {4, 8, 12})):
        folder = run(run_name=f"skip{skip}", skip_zero_std_groups=skip, **flags, **reward_file(tmp_path, EVERY_OTHER))
        for step in steps_of(folder):
            dead = step["rollout/zero_std_groups_frac"]
            assert step["rollout/responses_trained"] in trained and step["rollout/prompts_sampled"] == 4
            assert not skip or step["rollout/responses_trained"] == 16 * (1 - dead)


def test_step_without_any_signal_is_left_out(run, tiny_text_model, tmp_path):
    same_scores = "def score(completions, **columns):\n    return [0.3] * len(completions)\n"
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), **reward_file(tmp_path, same_scores)}
    for name, rounds in (("skip_zero_std_groups", 1), ("dynamic_sampling", 3)):
        folder = run(run_name=name, **flags, **{name: True if rounds == 1 else rounds - 1})
        for step in steps_of(folder):
            assert step["rollout/responses_trained"] == 0 and step["rollout/prompts_sampled"] == 4 * rounds
            assert "loss/policy" not in step and step["rollout/zero_std_groups_frac"] == 1
        a, b = weights_of(tiny_text_model), weights_of(folder / "checkpoint-2")
        assert all(torch.equal(a[n], b[n]) for n in a)


def test_dynamic_sampling_refills_and_resumes_where_it_stopped(run, tiny_text_model, tmp_path):
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "dynamic_sampling": 6, "total_steps": 3}
    flags |= {"save_steps": 1, "save_total_limit": 9, **FAST, **reward_file(tmp_path, EVERY_OTHER)}
    folder = run(**flags)
    steps = steps_of(folder)
    assert all(m["rollout/responses_trained"] == 16 and m["rollout/prompts_sampled"] > 4 for m in steps)
    cursor = [
        json.loads((folder / f"checkpoint-{n}/state/trainer_state.json").read_text())["cursor"] for n in (1, 2, 3)
    ]
    assert cursor == np.cumsum([m["rollout/prompts_sampled"] for m in steps]).tolist()
    assert [m["train/episode"] for m in steps] == [4 * c for c in cursor]
    resumed = steps_of(run(**flags, resume=folder / "checkpoint-1"))
    for a, b in zip(steps, resumed, strict=True):
        same(a, b)


def test_signal_is_that_of_the_responses_which_are_trained():
    def record(scores, truncated):
        return {"scores": np.array(scores), "truncated": truncated}

    assert rloo.has_signal(record([1, 0, 0], [True, False, False]), mask_truncated=False)
    assert not rloo.has_signal(record([1, 0, 0], [True, False, False]), mask_truncated=True)
    assert rloo.has_signal(record([1, 0, math.nan], [False] * 3), mask_truncated=True)
    assert not rloo.has_signal(record([1, math.nan, math.nan], [False] * 3), mask_truncated=True)
    assert not rloo.has_signal(record([math.nan] * 3, [False] * 3), mask_truncated=True)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {"ratio_level": "sequence_mean", "num_iterations": 2, "clip_coef": 3e-3, "clip_coef_high": 4e-3},
        {"ratio_level": "token", "train_batch_size": 8, "num_iterations": 2, "normalize_advantages": True},
        {"kl_loss": True, "kl_estimator": "k2", "baseline": "group_mean", "max_response_length": 4},
        {"kl_loss": True, "kl_estimator": "k3", "train_batch_size": 4},
        {"kl_coef": 0, "baseline": "none", "reward_clip": [-0.5, 0.5], "top_p": 0.9},
        {"baseline": "none", "num_samples_per_prompt": 1, "train_batch_size": 4, "kl_estimator": "k3"},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_options_run_and_count_their_optimizer_steps(flags, run, tiny_text_model, tmp_path, monkeypatch):
    taken, step = [], rloo.optimizer_step
    monkeypatch.setattr(rloo, "optimizer_step", lambda engine: taken.append(1) or step(engine))
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), **FAST, **flags}
    folder = run(**flags)
    steps = steps_of(folder)
    assert all(math.isfinite(value) for m in steps for value in m.values())
    expected = 2 * flags.get("num_iterations", 1) * 16 // flags.get("train_batch_size", 16)
    assert len(taken) == expected
    assert ("loss/kl" in steps[0]) == flags.get("kl_loss", False)
    assert ("objective/kl" in steps[0]) == (flags.get("kl_coef") != 0)
    assert (steps[1]["policy/ratio_max"] == 1) == (expected == 2)
    assert steps[0]["train/learning_rate"] == 3e-3


@pytest.mark.slow
def test_entropy_bonus_raises_the_entropy(run, tmp_path):
    same_scores = "def score(completions, **columns):\n    return [0.3] * len(completions)\n"
    flags = {"total_steps": 4, **FAST, **reward_file(tmp_path, same_scores), "learning_rate": 1e-3, "kl_coef": 0}
    more, less = (steps_of(run(run_name=str(c), entropy_coef=c, **flags)) for c in (0.5, 0))
    assert more[-1]["policy/entropy"] > 1.5 * more[0]["policy/entropy"]
    assert less[-1]["train/grad_norm"] == 0, "no reward, no gradient"


def test_reference_moves_towards_the_policy_and_is_resumed(run, tiny_text_model, tmp_path):
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "kl_coef": 0.1, **FAST, "total_steps": 4}
    flags |= {"ref_sync_steps": 2, "ref_sync_alpha": 0.25, "save_steps": 1, "save_total_limit": 9}
    folder = run(**flags)
    start = weights_of(tiny_text_model)
    two, three, four = (torch.load(folder / f"checkpoint-{n}/state/reference.pt") for n in (2, 3, 4))
    policies = {n: weights_of(folder / f"checkpoint-{n}") for n in (2, 4)}
    for name, weight in start.items():
        expected = 0.25 * policies[2][name] + 0.75 * weight
        torch.testing.assert_close(two[f"model.{name}"], expected)
        assert torch.equal(three[f"model.{name}"], two[f"model.{name}"])
        torch.testing.assert_close(four[f"model.{name}"], 0.25 * policies[4][name] + 0.75 * expected)
    assert not torch.equal(policies[2]["lm_head.weight"], start["lm_head.weight"])
    whole = steps_of(folder)
    resumed = steps_of(run(**flags, resume=folder / "checkpoint-3"))
    same(whole[-1], resumed[-1])
    plain = steps_of(run(**{**flags, "ref_sync_steps": 0}, run_name="plain"))
    assert abs(plain[2]["objective/kl"] - whole[2]["objective/kl"]) > 1e-4, "step 3 sees another reference"


@pytest.mark.slow
def test_bf16_and_gradient_checkpointing(run):
    plain = steps_of(run(run_name="plain"))
    checkpointed = steps_of(run(run_name="checkpointed", gradient_checkpointing=True))
    for a, b in zip(plain, checkpointed, strict=True):
        same(a, b, tolerance=1e-5)
    folder = run(run_name="bf16", dtype="bf16", kl_coef=0.1, train_batch_size=8, ref_sync_steps=1)
    assert all(math.isfinite(value) for m in steps_of(folder) for value in m.values())
    assert {w.dtype for w in weights_of(folder / "checkpoint-2").values()} == {torch.bfloat16}


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompt_texts(caught, tokenizer, **flags) -> list[str]:
    call = caught("generate", **flags)
    return sorted(tokenizer.decode(s["prompt_ids"]) for s in call["samples"])


def test_prompts_of_a_text_model(caught, tiny_text_model, tmp_path):
    """Through the chat template with its options, plain, and as messages with a system prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_text_model)
    shutil.copytree(tiny_text_model, tmp_path / "model")
    tokenizer.chat_template = "{{ mood | default('calm') }}|" + CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    flags = {"model": tmp_path / "model", "dataset": sums_file(tmp_path, count=1), "rollout_batch_size": 4}
    flags |= {"train_batch_size": 4}
    question = "what is 0 + 0?"
    assert prompt_texts(caught, tokenizer, **flags) == [f"calm|<user>{question}<assistant>"]
    kwargs = {"chat_template_kwargs": '{"mood": "merry"}'}
    assert prompt_texts(caught, tokenizer, **flags, **kwargs) == [f"merry|<user>{question}<assistant>"]
    assert prompt_texts(caught, tokenizer, **flags, plain_prompts=True) == [question]
    system = {"system_prompt": "be brief"}
    assert prompt_texts(caught, tokenizer, **flags, **system) == [f"calm|<system>be brief<user>{question}<assistant>"]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    rows = [{"messages": chat, "answer": "x"}]
    flags["dataset"] = write_jsonl(tmp_path / "chat.jsonl", rows)
    expected = "calm|<system>be brief<user>hi<assistant>ho<end><user>?<assistant>"
    assert prompt_texts(caught, tokenizer, **flags, **system) == [expected]
    assert prompt_texts(caught, tokenizer, **flags, **system, plain_prompts=True) == [expected], "a chat is never plain"


def test_runs_of_plain_prompts_and_of_chats(run, tiny_text_model, tmp_path):
    sums = sums_file(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(6)]
    chats = write_jsonl(tmp_path / "chats.jsonl", rows)
    kinds = "import json\ndef score(prompts, completions, **columns):\n"
    kinds += "    assert all(type(p) is type(c) for p, c in zip(prompts, completions))\n"
    kinds += "    return [float(len(str(c)) % 3) for c in completions]\n"
    flags = {"model": tiny_text_model, **reward_file(tmp_path, kinds)}
    for name, source in (("plain", sums), ("chats", chats)):
        folder = run(run_name=name, dataset=source, eval_dataset=source, plain_prompts=name == "plain", **flags)
        assert all(math.isfinite(value) for m in steps_of(folder) for value in m.values())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder / "checkpoint-2").chat_template
    assert AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2").config.model_type == "qwen2"


def test_every_end_id_of_the_generation_config_ends_a_response(run, tiny_text_model, tmp_path):
    """Half of the vocabulary ends a response here: what ends by one of those ids is not truncated."""
    shutil.copytree(tiny_text_model, tmp_path / "model")
    ends = [*range(128), 256]
    config = json.loads((tmp_path / "model/generation_config.json").read_text())
    (tmp_path / "model/generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    records = records_of(run, model=tmp_path / "model", dataset=sums_file(tmp_path))
    lengths = set()
    for record in records:
        for ids, cut in zip(record["response_ids"], record["truncated"]):
            assert not set(ids[:-1].tolist()) & set(ends)
            assert cut == (ids[-1].item() not in ends)
            assert not cut or len(ids) == 8
            lengths.add(len(ids))
    assert len(lengths) > 2
    (step,) = steps_of(tmp_path / "runs/run")
    assert step["rollout/truncated_frac"] == np.mean([r["truncated"] for r in records]) < 0.5


# --- LoRA ------------------------------------------------------------------------------------------------------------

LORA = {"lora_rank": 4, "lora_alpha": 8, "kl_coef": 0.1, **FAST, "learning_rate": 1e-2}


@pytest.fixture
def run_with_engine(run, monkeypatch):
    """A short run -> its folder and its engine."""
    engines, make_engine = [], rloo.make_engine
    monkeypatch.setattr(rloo, "make_engine", lambda *args: engines.append(make_engine(*args)) or engines[-1])
    return lambda **flags: (run(**flags), engines[-1])


def test_lora_trains_adapters_alone_and_exports_the_merged_model(run_with_engine, tmp_path, vqa_rows, monkeypatch):
    folder, engine = run_with_engine(total_steps=3, **LORA)
    model, steps = engine.module.model, steps_of(folder)
    from transformers import AutoModelForImageTextToText, AutoProcessor

    start = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    base = {n.replace(".base_layer", ""): p for n, p in model.named_parameters() if "lora_" not in n}
    assert base.keys() == dict(start.named_parameters()).keys()
    assert all(torch.equal(p, base[n]) for n, p in start.named_parameters())
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert len(adapters) == 2 * 7 * 4 and all(p.abs().max() > 0 for p in adapters.values())
    assert not any("visual" in n or "lm_head" in n for n in adapters)
    trained = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in adapters.values()}
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-5) and abs(steps[2]["objective/kl"]) > 1e-3

    checkpoint = folder / "checkpoint-3"
    assert not list(checkpoint.glob("adapter*"))
    monkeypatch.setitem(sys.modules, "peft", None)  # a user without it
    merged = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}, {"type": "text", "text": vqa_rows[0]["prompt"]}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.open(vqa_rows[0]["image"]).convert("RGB")], return_tensors="pt")
    with torch.no_grad():
        logp = [m.eval()(**inputs).logits.log_softmax(-1) for m in (model, merged, start)]
    assert (logp[0] - logp[1]).abs().max() < 1e-4
    assert (logp[0] - logp[2]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_200_exports_leave_the_base_weights_as_they_were(dtype, tiny_text_model):
    model = rloo.load_model(tiny_text_model, dtype)
    start = {n: p.clone() for n, p in model.state_dict().items()}
    rloo.add_lora(rloo.Args(lora_rank=4, lora_alpha=8), model)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator).to(dtype)
    for _ in range(200):
        merged = rloo.merged_state_dict(model, 0)
    assert merged.keys() == start.keys()
    parts = dict(model.named_parameters())
    for name, p in parts.items():
        if "lora_" not in name:
            assert torch.equal(p, start[name.replace(".base_layer", "")])
    changed = [n for n in start if not torch.equal(start[n], merged[n])]
    assert len(changed) == 7 * 2
    for name in changed:
        A, B = (parts[name.replace("weight", f"lora_{side}.default.weight")].double() for side in "AB")
        expected = (start[name].double() + 8 / 4 * B @ A).to(dtype)
        torch.testing.assert_close(merged[name], expected)


def test_adapters_are_drawn_from_the_seed_alone(tiny_text_model):
    drawn = []
    for seed, before in ((1, 0), (1, 7), (2, 0)):
        model = rloo.load_model(tiny_text_model, torch.float32)
        torch.manual_seed(before)
        rloo.add_lora(rloo.Args(lora_rank=4, seed=seed), model)
        drawn.append(torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_A" in n]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_lora_targets_choose_the_layers_but_never_the_head(tiny_text_model):
    for pattern, count in ((r"layers\.1\..*q_proj", 1), ("(q|v)_proj$", 4), ("proj|lm_head", 14)):
        model = rloo.load_model(tiny_text_model, torch.float32)
        rloo.add_lora(rloo.Args(lora_rank=2, lora_targets=pattern), model)
        names = [n for n, p in model.named_parameters() if "lora_A" in n]
        assert len(names) == count and not any("lm_head" in n for n in names)


@pytest.mark.slow
def test_lora_resumes_and_checkpoints_gradients(run, tiny_text_model, tmp_path):
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "total_steps": 3, "save_steps": 1, **LORA}
    folder = run(**flags)
    shutil.rmtree(folder / "checkpoint-3")
    whole = steps_of(folder)
    for a, b in zip(whole, steps_of(run(**flags, resume=folder / "checkpoint-2")), strict=True):
        same(a, b)
    saving = steps_of(run(**flags, run_name="saving", gradient_checkpointing=True))
    for a, b in zip(whole, saving, strict=True):
        same(a, b, tolerance=1e-4)


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.slow
def test_lora_under_zero(zero_stage, run, tiny_text_model, tmp_path):
    flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), "total_steps": 3, **LORA}
    plain, sharded = run(**flags), run(**flags, run_name="zero", zero_stage=zero_stage)
    for a, b in zip(steps_of(plain), steps_of(sharded), strict=True):
        same(a, b, tolerance=1e-3)
    a, b = (weights_of(folder / "checkpoint-3") for folder in (plain, sharded))
    assert a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-3) for n in a)


def test_lora_of_a_vision_model_with_gradient_checkpointing_in_bf16(run):
    folder = run(**LORA, gradient_checkpointing=True, dtype="bf16", train_batch_size=8)
    assert all(math.isfinite(value) for m in steps_of(folder) for value in m.values())
    assert {w.dtype for w in weights_of(folder / "checkpoint-2").values()} == {torch.bfloat16}
