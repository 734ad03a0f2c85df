"""Each command of docs/recipes.md that runs a script does a step on a CPU. What is replaced: the model (by the bundled
one), the data, the output directory, batch sizes and the number of processes. All other flags are the page's. vLLM is
replaced by the training model, and used where it is installed. `my_reward.py` is the page's."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import test_vllm
import tyro
from conftest import ROOT, SCRIPTS, TINY, to_argv, write_jsonl
from test_docs import commands, fences

BATCH_SIZES = {"prompts_per_rollout": 2, "num_samples_per_prompt": 2, "train_batch_size": 4}
BATCH_SIZES |= {"total_steps": 1, "eval_prompts": 2, "eval_rows": 2}


def recipes() -> list[tuple[str, list[str]]]:
    """(script, its flags) of each command."""
    found = []
    for words in commands(ROOT / "docs/recipes.md"):
        scripts = [word for word in words if word.removesuffix(".py") in SCRIPTS]
        if scripts and "--help" not in words:
            found.append((scripts[0].removesuffix(".py"), words[words.index(scripts[0]) + 1 :]))
    return found


@pytest.fixture(scope="module")
def data(vqa_rows, tmp_path_factory) -> dict[str, str]:
    """One file per script, in the format that the page describes."""
    rows = vqa_rows[:8]
    media = [{"prompt": row["prompt"], "image": row["image"]} for row in rows]
    pairs = [x | {"chosen": row["answer"], "rejected": "purple"} for x, row in zip(media, rows)]
    wrong = {"answer_2": "purple", "verdict": 1}
    judged = [x | wrong | {"answer_1": row["answer"]} for x, row in zip(media, rows)]
    tables = {"rloo": rows, "ppo_vl": rows, "reward_bt": pairs, "grm_sft": judged}
    folder = tmp_path_factory.mktemp("recipes")
    return {script: write_jsonl(folder / f"{script}.jsonl", tables[script]) for script in SCRIPTS}


def my_reward(folder: Path) -> str:
    """The page's reward function as a file."""
    folder.mkdir(exist_ok=True)
    path = folder / "my_reward.py"
    path.write_text(next(text for _, text in fences(ROOT / "docs/recipes.md") if "my_reward.py" in text))
    return str(path)


def test_my_reward(tmp_path):
    reward = runpy.run_path(my_reward(tmp_path))["accuracy"]
    texts = ["Four legs. Answer: a **cat**", "Answer: dog\nNo.\nAnswer: Cat.", "cat"]
    reported = []
    assert reward(texts, ["a cat", "cat", 3], lambda *x: reported.append(x)) == [0.0, 1.0, 0.0]
    assert reported == [("answered", 2 / 3)]


def short_args(script: str, flags: list[str], data: dict[str, str], folder: Path):
    """The flags of a command with the tiny model, this data and small batches."""
    args = tyro.cli(importlib.import_module(script).Args, args=flags)
    total_steps = args.total_steps
    for name, size in BATCH_SIZES.items():
        if hasattr(args, name):
            setattr(args, name, size)
    args.total_steps = min(1, total_steps)  # 0 evaluates a checkpoint
    args.model, args.dataset, args.output_dir = TINY, data[script], str(folder)
    if hasattr(args, "rewards"):
        args.rewards = tuple(x.replace("my_reward.py", my_reward(folder)) for x in args.rewards)
    if hasattr(args, "eval_datasets"):
        args.eval_datasets = tuple(f"{x.partition('=')[0]}={data[script]}" for x in args.eval_datasets)
    elif args.eval_dataset:
        args.eval_dataset = data[script]
    return args


def assert_has_run(args) -> None:
    (run_dir,) = [path for path in Path(args.output_dir).iterdir() if path.is_dir()]
    assert (run_dir / "metrics.jsonl").exists()
    assert (run_dir / "checkpoint-1").exists() == (args.total_steps == 1)


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", recipes(), ids=[script for script, _ in recipes()])
def test_command_runs_for_a_step(script, flags, data, tmp_path):
    args = short_args(script, flags, data, tmp_path)
    if hasattr(args, "sampler"):
        args.sampler = "hf"
    importlib.import_module(script).main(args)
    if args.track == "wandb":
        import wandb

        wandb.finish()  # or the next test's run would be logged to this one
    assert_has_run(args)


WITH_VLLM = [(script, flags) for script, flags in recipes() if "vllm" in flags]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(test_vllm.missing, reason=test_vllm.reason)
@pytest.mark.parametrize("script, flags", WITH_VLLM, ids=[script for script, _ in WITH_VLLM])
def test_command_runs_for_a_step_with_vllm(script, flags, data, tmp_path):
    args = short_args(script, flags, data, tmp_path)
    command = [sys.executable, ROOT / f"{script}.py", *to_argv(vars(args))]
    result = subprocess.run(command, env=os.environ | test_vllm.ON_CPU, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_has_run(args)


def test_commands_are_found():
    scripts = [script for script, _ in recipes()]
    assert set(scripts) == {*SCRIPTS} and len(scripts) >= 8
