"""Learning curves of our scripts and TRL's trainers, by steps and by seconds, from the same initial weights.

    python tools/bench_learning.py --trl-python TRL/bin/python --output runs/learning

rloo       rloo.py and RLOOTrainer: the tiny VLM answers questions about images
reward_bt  reward_bt.py and RewardTrainer: examples/spelling_pairs.py on the language model of the tiny VLM, because
           RewardTrainer does not support images; the same initial head, the same pairs in the same order
grm_sft    grm_sft.py and SFTTrainer: the tiny VLM learns to write verdicts; only the verdict tokens are trained and
           the vision tower is frozen. TRL shuffles rows, grm_sft.py shuffles images with all their rows

Both sides use the same rows, batches, loss (rloo: rewards, KL coefficient, epochs), learning rate, schedule and
gradient clipping, with one thread each, at the same time. Both save their weights several times, and the
evaluation of our script scores all of them on the same held-out rows. Seconds are those of the training steps only.
The results are results.json and learning.png. "cleanrft" is our side.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench_trl import trainer_arguments  # repairs torchvision, so it comes before transformers

# isort: split
import datasets
import numpy as np
import torch
import transformers
import tyro
from bench import chat
from safetensors.torch import load_file

import grm_sft
import reward_bt
import rloo

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets/tiny_vl"
transformers.logging.set_verbosity_error()


@dataclass
class Args:
    trl_python: str = "python"  # Python of the environment that has TRL, see tools/bench_trl.py.
    output: str = "runs/learning"  # Directory for runs and results.
    tasks: tuple[str, ...] = ("rloo", "reward_bt", "grm_sft")  # Tasks to run.
    seeds: tuple[int, ...] = (1, 2, 3)  # Random seeds; one run per seed and side.
    rloo_steps: int = 30  # Number of rollouts of 256 responses.
    reward_bt_steps: int = 240  # Number of steps of 32 pairs.
    grm_sft_steps: int = 300  # Number of steps of 32 rows.
    points: int = 10  # Evaluations per run.
    child: str | None = None  # Internal: train one side, cleanrft or trl, for the first task and seed.


@dataclass
class Task:
    script: Any
    trainer: str  # TRL's class
    steps: str  # label of the x axis
    metric: str  # in the evaluation of our script
    label: str  # label of the y axis
    levels: tuple[float, ...]  # the table has the seconds until each level is reached
    axis: str = "linear"


SCORE = "eval/sampled_score", "held-out score, sampled", (0.8, 0.9, 0.95)
ACCURACY = "eval/held_out/accuracy", "held-out pair accuracy", (0.7, 0.8, 0.9)
LOSS = "eval/loss", "held-out loss, nats per token", (1.0, 0.1, 0.05), "log"
TASKS = {
    "rloo": Task(rloo, "RLOOTrainer", "rollouts of 256 responses", *SCORE),
    "reward_bt": Task(reward_bt, "RewardTrainer", "steps of 32 pairs", *ACCURACY),
    "grm_sft": Task(grm_sft, "SFTTrainer", "steps of 32 rows", *LOSS),
}


@dataclass
class Point:
    steps: int
    seconds: float
    score: float


def main(args: Args) -> None:
    output = Path(args.output)
    if args.child:
        run_child(args, args.tasks[0], args.seeds[0], output)
        return
    all_curves = {}
    for name in args.tasks:
        prepare(args, name, output / "data")
        for seed in args.seeds:
            flags = [*sys.argv[1:], "--tasks", name, "--seeds", str(seed), "--child"]
            cleanrft = subprocess.Popen([sys.executable, __file__, *flags, "cleanrft"])
            trl = subprocess.Popen([args.trl_python, __file__, *flags, "trl"])
            if any([cleanrft.wait(), trl.wait()]):
                raise SystemExit("one side failed, see its error above")
        with get_context("spawn").Pool(1) as pool:  # a process can initialize DeepSpeed only once
            all_curves[name] = pool.apply(evaluate_all, (args, name))
        print_table(args, TASKS[name], all_curves[name])
    (output / "results.json").write_text(json.dumps(all_curves, indent=1, default=asdict))
    draw(all_curves, output / "learning.png")


def run_child(args: Args, name: str, seed: int, output: Path) -> None:
    """Write a run directory with checkpoints and seconds.json."""
    torch.set_num_threads(1)
    run_dir = output / f"{name}-{args.child}-{seed}"
    train = {"cleanrft": train_cleanrft, "trl": train_trl}[args.child]
    seconds = train(args, name, make_script_args(args, name, seed), run_dir)
    (run_dir / "seconds.json").write_text(json.dumps(seconds))


# ---- initial models and data ----


def make_script_args(args: Args, name: str, seed: int):
    """The script's Args, from which TRL's arguments are derived, too."""
    data = Path(args.output) / "data"
    flags = {"seed": seed, "total_steps": getattr(args, f"{name}_steps")}
    if name == "reward_bt":  # without label smoothing, which TRL does not have
        flags |= {"model": str(data / f"scorer-{seed}"), "dataset": str(data / "train.jsonl")}
        flags |= {"eval_datasets": (f"held_out={data}/held_out.jsonl",), "label_smoothing": 0.0}
    if name == "grm_sft":
        flags |= {"model": str(data / "judge"), "eval_rows": 200}
    return TASKS[name].script.Args(**flags)


def prepare(args: Args, name: str, data: Path) -> None:
    data.mkdir(parents=True, exist_ok=True)
    if name == "reward_bt":
        subprocess.run([sys.executable, ROOT / "examples/spelling_pairs.py", data], check=True)
        pairs = (data / "train.jsonl").read_text().splitlines(keepends=True)
        (data / "train.jsonl").write_text("".join(pairs[:1600]))
        (data / "held_out.jsonl").write_text("".join(pairs[1600:]))  # new sentences, the same words
        for seed in args.seeds:
            save_scorer(data / f"scorer-{seed}", seed)
    if name == "grm_sft":  # TRL would train on the newline that the template adds after the EOS token
        shutil.copytree(TINY, data / "judge", dirs_exist_ok=True)
        template = data / "judge/chat_template.jinja"
        template.write_text(template.read_text().replace("'<|im_end|>\\n'", "'<|im_end|>'"))


def save_scorer(model_dir: Path, seed: int) -> None:
    """Save the tiny VLM's language model with a new head, in a format that both sides load."""
    vlm = reward_bt.load_model(str(TINY), torch.float32)
    config = vlm.config.text_config.to_diff_dict() | {"num_labels": 1}
    del config["model_type"], config["rope_parameters"]["mrope_section"]  # only for images
    scorer = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**config))
    scorer.model.load_state_dict(vlm.model.language_model.state_dict())
    torch.manual_seed(seed)  # as reward_bt.py does, so that its head is equal
    scorer.score = reward_bt.RewardModel(scorer.model).score
    scorer.save_pretrained(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY, processor_class=None)
    tokenizer.save_pretrained(model_dir)


# ---- training: both sides write checkpoints and return the seconds of each step ----


def train_cleanrft(args: Args, name: str, script_args, run_dir: Path) -> list[float]:
    flags = {"output_dir": args.output, "run_name": run_dir.name, "save_total_limit": 99, "eval_steps": 0}
    flags["save_steps"] = script_args.total_steps // args.points
    flags["eval_prompts" if name == "rloo" else "eval_rows"] = 1
    TASKS[name].script.main(replace(script_args, **flags))
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["time/total"] for line in lines if "time/total" in line]


class Clock(transformers.TrainerCallback):
    """Seconds of each optimizer step, including data loading, excluding saving."""

    def __init__(self):
        self.seconds = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.start = time.perf_counter()

    on_save = on_train_begin

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.start = time.perf_counter()


def train_trl(args: Args, name: str, script_args, run_dir: Path) -> list[float]:
    import trl

    job = {
        "flags": {"learning_rate": script_args.learning_rate},
        "steps": script_args.total_steps,
        "seed": script_args.seed,
    }
    fields = trainer_arguments(job, rows=script_args.train_batch_size, output_dir=str(run_dir)) | {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": script_args.min_lr_ratio},
        "warmup_steps": script_args.warmup_steps,
        "adam_beta1": script_args.adam_betas[0],
        "adam_beta2": script_args.adam_betas[1],
        "save_strategy": "steps",
        "save_steps": script_args.total_steps // args.points,
        "save_only_model": True,
    }
    make_trainer = {"rloo": rloo_trainer, "reward_bt": reward_trainer, "grm_sft": sft_trainer}[name]
    trainer = make_trainer(trl, script_args, fields)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return np.reshape(clock.seconds, (script_args.total_steps, -1)).sum(1).tolist()


def rloo_trainer(trl, script_args, fields: dict):
    rows = rloo.easy_vqa_rows("train").map(lambda row: {"prompt": chat("user", row["prompt"])})

    def accuracy(completions, answer, **columns) -> list[float]:
        return rloo.accuracy_reward([chat[0]["content"] for chat in completions], answer)

    def format_reward(completions, **columns) -> list[float]:
        return rloo.format_reward([chat[0]["content"] for chat in completions])

    mini_batches = script_args.rollout_batch_size // script_args.train_batch_size
    for name in ("max_steps", "save_steps"):  # our steps are rollouts, TRL's are optimizer steps
        fields[name] *= mini_batches * script_args.num_epochs
    config = trl.RLOOConfig(
        **fields,
        steps_per_generation=mini_batches,
        num_iterations=script_args.num_epochs,
        num_generations=script_args.num_samples_per_prompt,
        max_completion_length=script_args.max_response_length,
        beta=script_args.kl_coef,
        reward_weights=list(script_args.reward_weights),
    )
    rows = rows.cast_column("image", datasets.Image())
    rewards = [accuracy, format_reward]
    return trl.RLOOTrainer(model=script_args.model, reward_funcs=rewards, args=config, train_dataset=rows)


def reward_trainer(trl, script_args, fields: dict):
    pairs = reward_bt.load_rows(script_args.dataset, "train")
    order = reward_bt.shuffled_indices(
        0, script_args.total_steps * script_args.train_batch_size, len(pairs), script_args.seed
    )
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    pairs = pairs.select([i % len(pairs) for i in order])
    pairs = pairs.map(lambda pair: {name: chat(role, pair[name]) for name, role in roles.items()})
    config = trl.RewardConfig(**fields, train_sampling_strategy="sequential", max_length=None)
    return trl.RewardTrainer(model=script_args.model, args=config, train_dataset=pairs)


def sft_trainer(trl, script_args, fields: dict):
    data = grm_sft.load_examples(script_args, "easy-vqa", "train", model=None, processor=None, training=True)
    questions = grm_sft.easy_vqa_rows("train")
    rows = []
    for example_id in sum(data.groups, []):
        index = example_id // 2
        pair = grm_sft.make_easy_vqa_pair(questions[index], np.random.default_rng([script_args.seed, index]))
        judged, _, _ = grm_sft.build_chat(pair, swapped=example_id % 2 == 1)
        user, assistant = (message["content"] for message in judged["prompt"])
        prompt = chat("user", user.removeprefix("<image>"))  # TRL adds the image in front
        rows.append({"prompt": prompt, "completion": chat("assistant", assistant), "image": pair["image"]})
    rows = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    model = grm_sft.load_model(script_args.model, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(script_args.freeze, name))
    config = trl.SFTConfig(**fields, completion_only_loss=True, max_length=None)
    return trl.SFTTrainer(model=model, args=config, train_dataset=rows)


# ---- evaluation of both sides by our script ----


def evaluate_all(args: Args, name: str) -> dict[str, list[list[Point]]]:
    """Per side, one curve per seed: all saved weights, scored by our script on the same held-out rows."""
    task = TASKS[name]
    script_args = make_script_args(args, name, args.seeds[0])
    script_args = replace(
        script_args, output_dir=args.output, run_name=f"evaluation-{name}-{int(time.time())}"
    )
    run = task.script.setup(script_args)
    curves = {"cleanrft": [], "trl": []}
    for seed in args.seeds:
        start = make_script_args(args, name, seed).model
        for side, side_curves in curves.items():
            run_dir = Path(args.output) / f"{name}-{side}-{seed}"
            seconds = json.loads((run_dir / "seconds.json").read_text())
            points = []
            for i, checkpoint in enumerate([start, *task.script.list_checkpoints(run_dir)]):
                load_weights(task, run, str(checkpoint))
                metrics, _ = task.script.evaluate(script_args, run)
                steps = i * (script_args.total_steps // args.points)
                points.append(Point(steps, sum(seconds[:steps]), metrics[task.metric]))
                print(f"{name}, {side}, seed {seed}: {points[-1]}", file=sys.stderr, flush=True)
            side_curves.append(points)
    return curves


def load_weights(task: Task, run, checkpoint: str) -> None:
    if task.script is reward_bt:
        weights = {}
        for path in Path(checkpoint).glob("*.safetensors"):  # TRL's classifier, or a backbone and its head
            weights |= {re.sub(r"^(model\.)?(?!score)", "model.", k): x for k, x in load_file(path).items()}
        run.reward_model.module.load_state_dict(weights)
    else:
        engine = run.actor if task.script is rloo else run.judge
        saved = task.script.load_model(checkpoint, torch.float32)
        engine.module.model.load_state_dict(saved.state_dict())


def seconds_to(points: list[Point], level: float) -> float:
    """Seconds until the curve, linear between its points, first crosses the level; infinite if it never does."""
    for a, b in pairwise(points):
        if min(a.score, b.score) <= level <= max(a.score, b.score):
            return a.seconds + (level - a.score) / (b.score - a.score) * (b.seconds - a.seconds)
    return float("inf")


def print_table(args: Args, task: Task, curves: dict[str, list[list[Point]]]) -> None:
    names = [f"{side}, seed {seed}" for side in curves for seed in args.seeds]
    print(f"\n| {task.label} | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for level in task.levels:
        reached = [f"{seconds_to(points, level):.0f} s" for side in curves.values() for points in side]
        print(f"| {level} | {' | '.join(reached)} |", flush=True)


def draw(all_curves: dict[str, dict[str, list[list[Point]]]], path: Path) -> None:
    """One row per task, one line per seed. By steps, the curves of the two sides should coincide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6 * len(all_curves)), dpi=110, layout="constrained")
    rows = figure.subplots(len(all_curves), 2, sharey="row", squeeze=False)
    for row, (name, curves) in zip(rows, all_curves.items()):
        task = TASKS[name]
        for axes, x in zip(row, ("steps", "seconds")):
            for side, color in (("trl", "#d9772b"), ("cleanrft", "#2b6cb0")):
                for points in curves[side]:
                    line = [getattr(point, x) for point in points], [point.score for point in points]
                    axes.plot(*line, "o-", color=color, markersize=3, linewidth=1.4)
            axes.set(xlim=(0, None), yscale=task.axis, xlabel=task.steps if x == "steps" else x)
            axes.grid(color="#e4e4e4", linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(task.label)
        first_lines = row[0].lines[:: len(curves["trl"])]
        row[0].legend(first_lines, [f"TRL's {task.trainer}", f"{name}.py"], frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
