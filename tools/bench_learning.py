"""How much is learnt in how many seconds: rloo.py beside TRL's RLOOTrainer, on the same start.

    python tools/bench_learning.py --trl-python TRL/bin/python --output runs/learning

The same data, rewards and weights of rewards, responses per step, KL coefficient, passes, learning rate and
schedule; one thread for each side, both at the same time. Every few rollouts both save their weights, and one
evaluation, rloo.py's, scores them all on the same held-out prompts. Seconds are those of the steps: no
evaluation, no saving. It writes results.json, and learning.png: score by steps and by seconds.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
import common  # noqa: E402, F401, I001  mends torchvision, so it comes before transformers
import torch  # noqa: E402
import transformers  # noqa: E402
import tyro  # noqa: E402


@dataclass
class Args:
    trl_python: str = "python"  # of the environment that has TRL, see tools/bench_trl.py
    output: str = "runs/learning"
    seeds: tuple[int, ...] = (1, 2, 3)
    every: int = 5  # rollouts between two evaluations
    child: str | None = None  # internal: ours or trl


# ---- the two sides: folder/rollout-N with weights, and seconds.json ----


def train_ours(seed: int, every: int, folder: Path) -> None:
    import rloo

    args = rloo.Args(seed=seed, output_dir=str(folder), run_name="run", eval_steps=0, eval_samples=1)
    args.save_steps, args.save_total_limit = every, 99
    rloo.main(args)
    for path in (folder / "run").glob("checkpoint-*"):
        path.rename(folder / f"rollout-{path.name[11:]}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line).get("time/total") for line in lines]
    (folder / "seconds.json").write_text(json.dumps([s for s in seconds if s is not None]))


class Clock(transformers.TrainerCallback):
    """Seconds of each rollout with its updates, loading included, saving not."""

    def __init__(self, updates: int):
        self.updates = updates  # of a rollout
        self.seconds = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.updates == 0:
            self.seconds.append(time.perf_counter() - self.start)
            self.start = time.perf_counter()

    def on_save(self, args, state, control, **kwargs) -> None:
        self.start = time.perf_counter()


def train_trl(seed: int, every: int, folder: Path) -> None:
    import datasets
    import trl

    import rloo

    ours = rloo.Args(seed=seed)
    updates = ours.rollout_batch_size // ours.train_batch_size * ours.num_iterations
    rows = rloo.easy_vqa_rows("train")
    chats = [[{"role": "user", "content": prompt}] for prompt in rows["prompt"]]
    rows = rows.remove_columns("prompt").add_column("prompt", chats).cast_column("image", datasets.Image())

    def accuracy(completions, answer, **columns) -> list[float]:
        return rloo.accuracy([chat[0]["content"] for chat in completions], answer)

    def format_reward(completions, **columns) -> list[float]:
        return rloo.format_reward([chat[0]["content"] for chat in completions])

    config = trl.RLOOConfig(
        output_dir=str(folder),
        seed=seed,
        per_device_train_batch_size=ours.train_batch_size,
        steps_per_generation=ours.rollout_batch_size // ours.train_batch_size,
        num_iterations=ours.num_iterations,
        num_generations=ours.num_samples_per_prompt,
        max_completion_length=ours.max_response_length,
        max_steps=ours.total_steps * updates,
        beta=ours.kl_coef,
        reward_weights=list(ours.reward_weights),
        learning_rate=ours.learning_rate,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": ours.min_lr_ratio},
        warmup_steps=ours.warmup_steps,
        adam_beta1=ours.adam_betas[0],
        adam_beta2=ours.adam_betas[1],
        max_grad_norm=ours.max_grad_norm,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        save_steps=every * updates,
        save_only_model=True,
        report_to="none",
        logging_steps=updates,
    )
    clock = Clock(updates)
    trainer = trl.RLOOTrainer(
        model=ours.model,
        reward_funcs=[accuracy, format_reward],
        args=config,
        train_dataset=rows,
        callbacks=[clock],
    )
    trainer.train()
    for path in folder.glob("checkpoint-*"):
        path.rename(folder / f"rollout-{int(path.name[11:]) // updates}")
    (folder / "seconds.json").write_text(json.dumps(clock.seconds))


# ---- the same evaluation for both ----


def evaluate_all(folders: list[Path], output: Path) -> dict[Path, float]:
    """Held-out sampled score of the weights in each folder."""
    import rloo

    run = rloo.setup(
        rloo.Args(kl_coef=0.0, output_dir=str(output), run_name=f"evaluation-{int(time.time())}")
    )
    args = rloo.Args()
    scores = {}
    for folder in folders:
        weights = rloo.load_model(str(folder), torch.float32).state_dict()
        run.actor.module.model.load_state_dict(weights)
        metrics, _ = rloo.evaluate(args, run)
        scores[folder] = metrics["eval/sampled_score"]
        print(f"{folder}: {scores[folder]:.3f}", file=sys.stderr, flush=True)
    return scores


def curve(folder: Path, scores: dict[Path, float], start: float) -> list[dict]:
    """Points of one side and seed: rollouts, seconds, score."""
    seconds = json.loads((folder / "seconds.json").read_text())
    points = [{"rollouts": 0, "seconds": 0.0, "score": start}]
    for path in sorted(folder.glob("rollout-*"), key=lambda path: int(path.name[8:])):
        rollouts = int(path.name[8:])
        points.append({"rollouts": rollouts, "seconds": sum(seconds[:rollouts]), "score": scores[path]})
    return points


def seconds_to(points: list[dict], score: float) -> float:
    """When the line between the points first reaches the score; infinite where it never does."""
    for a, b in zip(points, points[1:]):
        if b["score"] >= score:
            share = (score - a["score"]) / (b["score"] - a["score"])
            return a["seconds"] + share * (b["seconds"] - a["seconds"])
    return float("inf")


def draw(curves: dict[str, list[list[dict]]], path: Path) -> None:
    """A line per seed; by rollouts the sides should lie on each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, x in zip(figure.subplots(1, 2, sharey=True), ("rollouts", "seconds")):
        for side, color, name in (("trl", "#d9772b", "TRL's RLOOTrainer"), ("ours", "#2b6cb0", "rloo.py")):
            for i, points in enumerate(curves[side]):
                line = [point[x] for point in points], [point["score"] for point in points]
                axes.plot(
                    *line, "o-", color=color, markersize=3, linewidth=1.4, label=name if i == 0 else None
                )
        axes.set(xlim=(0, None), ylim=(0, 1.02), xlabel={"rollouts": "rollouts of 256 responses"}.get(x, x))
        axes.grid(color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("held-out score, sampled")
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main(args: Args) -> None:
    output = Path(args.output)
    if args.child:
        torch.set_num_threads(1)
        train = {"ours": train_ours, "trl": train_trl}[args.child]
        folder = output / f"{args.child}-{args.seeds[0]}"
        train(args.seeds[0], args.every, folder)
        return
    for seed in args.seeds:
        running = []
        for side, python in (("ours", sys.executable), ("trl", args.trl_python)):
            command = [python, __file__, "--child", side, "--seeds", str(seed), "--every", str(args.every)]
            running.append(subprocess.Popen([*command, "--output", args.output]))
        if any([process.wait() for process in running]):
            raise SystemExit("one side has ended: see above")
    start = ROOT / "assets/tiny_vl"
    scores = evaluate_all([start, *output.glob("*/rollout-*")], output)
    curves = {
        side: [curve(output / f"{side}-{s}", scores, scores[start]) for s in args.seeds]
        for side in ("ours", "trl")
    }
    (output / "results.json").write_text(json.dumps(curves, indent=1))
    draw(curves, output / "learning.png")
    print("| score | " + " | ".join(f"{side}, seed {seed}" for side in curves for seed in args.seeds) + " |")
    for score in (0.8, 0.9, 0.95):
        reached = [f"{seconds_to(points, score):.0f} s" for side in curves.values() for points in side]
        print(f"| {score} | {' | '.join(reached)} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
