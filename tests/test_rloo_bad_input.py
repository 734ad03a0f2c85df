"""Bad input to rloo: exit code 2, one sentence on stderr that names the culprit, no traceback, nothing written.

What rloo shares with the other scripts (datasets, rows, models, reward functions) is in test_bad_input.py."""
# ruff: noqa: E501, F401, F811  the table; fixtures

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_jsonl
from rloo_runs import BASE, flags_of, reward_file, sums_file, words

import rloo


def functions(tmp: Path, text: str, *names: str) -> dict:
    """Flags for reward functions of one file."""
    (tmp / "r.py").write_text(text)
    return {"rewards": [f"{tmp}/r.py:{name}" for name in names], "reward_weights": [1] * len(names)}


def rewards(*sources, weights: int | None = None) -> dict:
    return {"rewards": list(map(str, sources)), "reward_weights": [1] * (weights or len(sources))}


def classifier(tmp: Path, text_model: str, labels: int = 1, config: str | None = None, tokenizer: bool = True) -> Path:
    """A folder with a random sequence classifier."""
    import transformers

    config_of = transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=labels,
    )
    transformers.Qwen2ForSequenceClassification(config_of).save_pretrained(tmp / "judge")
    if tokenizer:
        transformers.AutoTokenizer.from_pretrained(text_model).save_pretrained(tmp / "judge")
    if config is not None:
        (tmp / "judge/config.json").write_text(config)
    return tmp / "judge"


def one_label(tmp: Path, text_model: str) -> Path:
    """A language model whose config says one label: its score head would be drawn at random."""
    shutil.copytree(text_model, tmp / "judge")
    config = json.loads((tmp / "judge/config.json").read_text())
    (tmp / "judge/config.json").write_text(json.dumps({**config, "id2label": {"0": "a"}, "label2id": {"a": 0}}))
    return tmp / "judge"


def rows_file(tmp: Path, *rows: dict) -> dict:
    return {"dataset": write_jsonl(tmp / "rows.jsonl", list(rows))}


def checkpoint(tmp: Path, model: str, **changed) -> dict:
    """Flags that resume from a folder with a trainer state alone."""
    (tmp / "old/checkpoint-1/state").mkdir(parents=True)
    args = {**vars(rloo.Args()), **BASE, "model": str(model), **changed}
    state = {
        "step": 1,
        "episode": 0,
        "cursor": 0,
        "skipped_in_a_row": 0,
        "wandb_id": None,
        "world_size": 1,
        "args": args,
    }
    (tmp / "old/checkpoint-1/state/trainer_state.json").write_text(json.dumps(state))
    rloo.write_manifest(tmp / "old/checkpoint-1", (0, 1))
    return {"resume": tmp / "old/checkpoint-1"}


ONE = "def {name}(completions{more}):\n    return [1.0] * len(completions)\n"

# name: (words that the sentence must hold, flags from the test's folder and the tiny text model's)
CASES = {
    # groups and batches
    "one response per prompt": (["--num-samples-per-prompt 1", "--baseline none"], lambda t, m: {"num_samples_per_prompt": 1}),
    "one response with the group's mean": (["--num-samples-per-prompt 1"], lambda t, m: {"num_samples_per_prompt": 1, "baseline": "group_mean"}),
    "no response": (["--num-samples-per-prompt"], lambda t, m: {"num_samples_per_prompt": 0}),
    "train batch splits a group": (["--train-batch-size", "--num-samples-per-prompt"], lambda t, m: {"train_batch_size": 6}),
    "rollout not divisible": (["--rollout-batch-size", "--train-batch-size"], lambda t, m: {"rollout_batch_size": 12}),
    "micro batch too small": (["--micro-batch-tokens", "--max-prompt-length"], lambda t, m: {"micro_batch_tokens": 100}),
    # ranges
    "no iteration": (["--num-iterations"], lambda t, m: {"num_iterations": 0}),
    "zero clip": (["--clip-coef"], lambda t, m: {"clip_coef": 0}),
    "negative upper clip": (["--clip-coef-high"], lambda t, m: {"clip_coef_high": -0.1}),
    "negative kl": (["--kl-coef"], lambda t, m: {"kl_coef": -1}),
    "negative entropy bonus": (["--entropy-coef"], lambda t, m: {"entropy_coef": -1}),
    "negative refill": (["--dynamic-sampling"], lambda t, m: {"dynamic_sampling": -1}),
    "alpha above 1": (["--ref-sync-alpha"], lambda t, m: {"ref_sync_alpha": 1.5}),
    "no time for rewards": (["--reward-timeout"], lambda t, m: {"reward_timeout": 0}),
    "reward clip reversed": (["--reward-clip 1.0 -1.0"], lambda t, m: {"reward_clip": [1, -1]}),
    "reward clip of one value": (["--reward-clip"], lambda t, m: {"reward_clip": [1, 1]}),
    "no held-out sample": (["--eval-num-samples"], lambda t, m: {"eval_num_samples": 0}),
    # reference
    "sync without kl": (["--ref-sync-steps", "--kl-coef"], lambda t, m: {"ref_sync_steps": 2, "kl_coef": 0}),
    "sync with adapters": (["--ref-sync-steps", "--lora-rank"], lambda t, m: {"ref_sync_steps": 2, "lora_rank": 2}),
    # adapters
    "targets match nothing": (["--lora-targets", "nothing", "q_proj"], lambda t, m: {"lora_rank": 2, "lora_targets": "nothing"}),
    "targets match the head alone": (["--lora-targets", "lm_head"], lambda t, m: {"lora_rank": 2, "lora_targets": "lm_head"}),
    "targets match no linear layer": (["--lora-targets"], lambda t, m: {"lora_rank": 2, "lora_targets": "embed_tokens|norm"}),
    "targets are no regular expression": (["--lora-targets", "regular expression"], lambda t, m: {"lora_rank": 2, "lora_targets": "(q|v"}),
    "targets without rank": (["--lora-targets", "--lora-rank"], lambda t, m: {"lora_targets": "q_proj"}),
    "negative rank": (["--lora-rank"], lambda t, m: {"lora_rank": -1}),
    "zero lora alpha": (["--lora-alpha"], lambda t, m: {"lora_rank": 2, "lora_alpha": 0}),
    "4 bits without CUDA": (["--load-in-4bit", "CUDA"], lambda t, m: {"lora_rank": 2, "load_in_4bit": True}),
    "4 bits without adapters": (["--load-in-4bit", "--lora-rank"], lambda t, m: {"load_in_4bit": True}),
    # prompts
    "template options are no JSON": (["--chat-template-kwargs", "{mood"], lambda t, m: {"chat_template_kwargs": "{mood"}),
    "template options are no object": (["--chat-template-kwargs", "JSON object"], lambda t, m: {"chat_template_kwargs": "[1]"}),
    "chat template needs another option": (["row 0", "chat template"], lambda t, m: {"chat_template_kwargs": '{"messages": 5}'}),
    # sources of rewards
    "too few weights": (["--reward-weights has 1", "--rewards has 2"], lambda t, m: rewards("accuracy", "format", weights=1)),
    "too many weights": (["--reward-weights has 3", "--rewards has 2"], lambda t, m: rewards("accuracy", "format", weights=3)),
    "unknown source": (["nonsense", "accuracy", "path.py:function"], lambda t, m: rewards("nonsense")),
    "the same source twice": (["'length'", "once"], lambda t, m: rewards("length", "length")),
    "a function named like a rule": (["'length'"], lambda t, m: functions(t, ONE.format(name="length", more=", **c"), "length") | {"rewards": [f"{t}/r.py:length", "length"], "reward_weights": [1, 1]}),
    "function without **kwargs": (["score", "**kwargs"], lambda t, m: functions(t, ONE.format(name="score", more=""), "score")),
    "async function without **kwargs": (["score", "**kwargs"], lambda t, m: functions(t, "async " + ONE.format(name="score", more=", answer"), "score")),
    "async function raises": (["score", "ValueError", "no luck"], lambda t, m: functions(t, "async def score(**columns):\n    raise ValueError('no luck')\n", "score")),
    "async function returns one number": (["score", "float"], lambda t, m: functions(t, "async def score(**columns):\n    return 1.0\n", "score")),
    "not a function": (["score", "function"], lambda t, m: functions(t, "score = 1\n", "score")),
    "log_extra of another length": (["log_extra", "note", "1 values"], lambda t, m: functions(t, "def score(completions, log_extra, **c):\n    log_extra('note', [1])\n    return [1.0] * len(completions)\n", "score")),
    "log_metric of no number": (["score", "good"], lambda t, m: functions(t, "def score(completions, log_metric, **c):\n    log_metric('x', 'good')\n    return [1.0] * len(completions)\n", "score")),
    "accuracy without answers": (["--answer-column", "accuracy"], lambda t, m: rewards("accuracy") | rows_file(t, {"prompt": "a"})),
    # reward models
    "reward folder without config": (["empty", "reward model"], lambda t, m: (t / "empty").mkdir() or rewards(t / "empty")),
    "reward folder that is not there": (["/nope"], lambda t, m: rewards("/nope")),
    "reward model with two labels": (["judge", "label"], lambda t, m: rewards(classifier(t, m, labels=2))),
    "reward model with a broken config": (["judge", "reward model"], lambda t, m: rewards(classifier(t, m, config="{"))),
    "reward model of an unknown type": (["judge", "reward model"], lambda t, m: rewards(classifier(t, m, config='{"model_type": "none_such"}'))),
    "reward model without tokenizer": (["--rewards", "judge", "tokenizer"], lambda t, m: rewards(classifier(t, m, tokenizer=False))),
    "a language model as the reward model": (["--rewards", "label"], lambda t, m: rewards(m)),
    "a language model with one label": (["--rewards", "judge", "score.weight"], lambda t, m: rewards(one_label(t, m))),
    # checkpoints
    "resume with adapters": (["--lora-rank 0", "use the same"], lambda t, m: checkpoint(t, m) | {"lora_rank": 4}),
    "resume with another alpha": (["--lora-alpha"], lambda t, m: checkpoint(t, m, lora_rank=4) | {"lora_rank": 4, "lora_alpha": 5}),
    "resume with other targets": (["--lora-targets"], lambda t, m: checkpoint(t, m, lora_rank=4) | {"lora_rank": 4, "lora_targets": "q_proj"}),
    "resume with another sync": (["--ref-sync-steps"], lambda t, m: checkpoint(t, m) | {"ref_sync_steps": 3}),
    "resume without engine state": (["--resume", "does not fit"], lambda t, m: checkpoint(t, m) | {"force": True}),
}  # fmt: skip


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in str(path))


def error_of(flags: dict, capfd) -> str:
    """The one sentence with which a run ends."""
    with pytest.raises(SystemExit) as stopped:
        rloo.main(rloo.parse_args(words(flags)))
    assert stopped.value.code == 2
    stderr = capfd.readouterr().err
    assert "Traceback" not in stderr
    lines = [line for line in re.split(r"[\r\n]|\x1b\[A", stderr) if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    assert len(lines[0]) < 600
    return lines[0]


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, flags_of, tmp_path, tiny_text_model, capfd):
    expected, make = CASES[name]
    flags = flags_of(model=tiny_text_model, dataset=sums_file(tmp_path))
    flags |= make(tmp_path, tiny_text_model)
    before = listing(tmp_path)
    message = error_of(flags, capfd)
    assert [word for word in expected if word not in message] == [], message
    assert listing(tmp_path) == before, "nothing may be left behind"


def test_plain_prompts_are_for_text_models(flags_of, tmp_path, capfd):
    assert "--plain-prompts is for text models" in error_of(flags_of(plain_prompts=True), capfd)
    assert not (tmp_path / "runs").exists()


def test_no_reward_for_any_response_of_a_rollout(flags_of, tmp_path, tiny_text_model, capfd):
    """Known only then: the log stays, it is complete."""
    text = "def score(completions, **columns):\n    return [None] * len(completions)\n"
    for changes in ({}, {"skip_zero_std_groups": True, "run_name": "skip"}):
        flags = {"model": tiny_text_model, "dataset": sums_file(tmp_path), **changes, **reward_file(tmp_path, text)}
        assert "None" in error_of(flags_of(**flags), capfd)


def test_weights_that_are_no_reward_head(flags_of, tmp_path, tiny, capfd):
    """A vision folder whose score.safetensors holds something else."""
    from safetensors.torch import save_file

    shutil.copytree(tiny, tmp_path / "judge")
    for tensors in (
        {"other": torch.zeros(1, 128)},
        {"score.weight": torch.zeros(2, 128)},
        {"score.weight": torch.zeros(1, 8)},
    ):
        save_file(tensors, tmp_path / "judge/score.safetensors")
        message = error_of(flags_of(**rewards(tmp_path / "judge")), capfd)
        assert "--rewards" in message and "judge" in message
