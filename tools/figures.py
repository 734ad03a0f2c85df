"""Draw the figure of README.md from runs, and measure what docs/theory.md says of variance.

python ppo_vl.py --run-name readme --eval-steps 2
python tools/figures.py readme runs            # docs/readme.png: scores, and responses before and after
python tools/figures.py variance runs          # prints a table of docs/theory.md, about three minutes
"""

import json
import sys
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import torch
import tyro
from tyro.conf import Positional

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from PIL import Image  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs"
RED, GREEN, BLUE, GRAY = "#b8323f", "#1d7a46", "#7f9cc0", "#7a828c"
SCORES = {  # metric: label, color
    "objective/scores": ("training batches", BLUE),
    "eval/sampled_score": ("evaluation, sampled", RED),
    "eval/greedy_score": ("evaluation, greedy", GREEN),
}


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_curve(run_dir: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if metric in line]
    return [line["train/step"] for line in lines], [line[metric] for line in lines]


# ---- readme.png ----


def before_and_after(run_dir: Path) -> list[tuple[dict, dict]]:
    """Greedy responses at the first and last evaluation that end right: two without tags at first, two wrong."""
    records = [x for x in read_lines(run_dir / "samples.jsonl") if x["phase"] == "eval_greedy"]
    last_step = max(record["train/step"] for record in records)
    after = {record["row"]: record for record in records if record["train/step"] == last_step}
    pairs = [(x, after[x["row"]]) for x in records if x["train/step"] == 0]
    learned = [pair for pair in pairs if score(pair[0]) < 1 and score(pair[1]) == 1]
    untagged = [pair for pair in learned if "<answer>" not in pair[0]["response"]]
    confused = [pair for pair in learned if pair not in untagged]
    return [*untagged[:2], *confused[:2]]


def score(record: dict) -> float:
    return 0.9 * record["reward/accuracy"] + 0.1 * record["reward/format"]


def describe(record: dict) -> str:
    if score(record) == 1:
        return "right"
    return "wrong" if "<answer>" in record["response"] else "no answer tags"


def draw_readme(runs: Path):
    """Large type, because GitHub scales the image to the width of a phone."""
    plt.rcParams |= {"font.size": 22}
    run_dir = runs / "readme"
    figure = plt.figure(figsize=(15, 9.5), dpi=80)
    axes = figure.add_axes((0.07, 0.58, 0.91, 0.36))
    for metric, (label, color) in SCORES.items():
        width, marker = (2, None) if color == BLUE else (4, "o")
        style = {"color": color, "label": label, "linewidth": width, "marker": marker, "markersize": 8}
        axes.plot(*read_curve(run_dir, metric), **style)
    axes.set(ylim=(0, 1.05), xlabel="step", title="Score (maximum 1)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=24, frameon=False)

    title = "Greedy responses before and after training: two without tags, two wrong"
    figure.text(0.5, 0.435, title, ha="center", fontsize=26)
    for k, pair in enumerate(before_and_after(run_dir)):
        left, top = 0.02 + 0.5 * (k % 2), 0.395 - 0.2 * (k // 2)
        figure.text(left, top, pair[0]["prompt"], va="top", fontsize=23)
        panel = figure.add_axes((left, top - 0.19, 0.1, 0.145))
        panel.imshow(Image.open(pair[0]["image"]))
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(True)
        for record, when, y in zip(pair, ("before", "after"), (top - 0.045, top - 0.12)):
            color = GREEN if score(record) == 1 else RED
            note = f"{when}: {describe(record)}, score {score(record):.1f}"
            figure.text(left + 0.12, y, note, va="top", fontsize=20, color="0.35")
            style = {"va": "top", "fontsize": 20, "color": color, "family": "monospace"}
            figure.text(left + 0.12, y - 0.032, record["response"], **style)
    return figure


# ---- the table of docs/theory.md ----


def print_variance(runs: Path, model: str, num_prompts: int = 64, num_groups: int = 8, G: int = 8) -> None:
    """Variance of the gradient of a prompt with G responses, summed over all weights, with several baselines: over
    num_groups groups of responses to each prompt, averaged over prompts. In parentheses: the ratio to leave-one-out,
    a 95 % interval by bootstrapping prompts."""
    sys.path.insert(0, str(DOCS.parent))
    import rloo

    args = rloo.Args(output_dir=str(runs), model=model, prompts_per_rollout=num_prompts, kl_coef=0)
    args.max_response_length = 24  # the bundled model's default
    run = rloo.setup(args)
    rows = rloo.shuffled_rows(args, step=1, num_rows=len(run.train_data.rows))
    rollout = rloo.collect_rollout(args, run, run.train_data, rows, num_groups * G, 1.0, step=1)
    scores = rollout.scores.view(-1, G)  # (n * num_groups, G)
    loo, others = (
        rloo.compute_advantages(x, kept_responses=x.isfinite(), normalize=False).view(-1, G)
        for x in (scores, scores.view(num_prompts, -1))
    )
    advantages = {
        "leave-one-out": loo,
        "none": scores,
        "none, if each reward were higher by 1": scores + 1,
        f"average of the prompt's other {num_groups * G - 1} responses": others,
        "ones": torch.ones_like(scores),
    }
    weights = list(run.actor.module.parameters())
    variances = {name: torch.zeros(num_prompts) for name in advantages}
    for i in range(num_prompts):
        gradients = {name: [] for name in advantages}
        for group in range(i * num_groups, (i + 1) * num_groups):
            kept = torch.zeros_like(scores, dtype=torch.bool)
            kept[group] = True
            (pack,) = rloo.iter_packs(args, run, rollout, np.array([i]), kept.view(num_prompts, -1))
            logprobs, _ = run.actor.module(pack)
            for name, values in advantages.items():
                objective = (logprobs * values[group][pack.response_of_token]).sum() / G
                parts = torch.autograd.grad(objective, weights, retain_graph=True, allow_unused=True)
                gradients[name].append(torch.cat([x.flatten() for x in parts if x is not None]))
        for name, estimates in gradients.items():
            variances[name][i] = torch.stack(estimates).var(0).sum()
    # Gradients are linear in the advantages: a baseline b gives none - 2 * b * covariance + b^2 * ones.
    ones = variances.pop("ones")
    covariance = (variances["none, if each reward were higher by 1"] - variances["none"] - ones) / 2
    best = (covariance.sum() - covariance) / (ones.sum() - ones)  # (n,): fitted on the other prompts
    variances["optimal constant baseline"] = variances["none"] - best * (2 * covariance - best * ones)
    print(f"average score {scores.mean():.2f}, optimal constant {best.mean():.2f}")
    samples = torch.randint(num_prompts, (10_000, num_prompts), generator=torch.Generator().manual_seed(0))
    for name, x in variances.items():
        ratios = x[samples].sum(1) / variances["leave-one-out"][samples].sum(1)
        low, high = ratios.quantile(torch.tensor([0.025, 0.975])).tolist()
        print(f"| {name} | {x.mean():.1f} ({low:.2f} to {high:.2f}) |")


def main(
    name: Positional[Literal["readme", "variance"]], runs: Positional[Path], model: str = "assets/tiny_vl"
) -> None:
    """name: what to draw or measure. runs: directory with the runs. model: whose gradients vary."""
    if name == "variance":
        return print_variance(runs, model)
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    draw_readme(runs).savefig(DOCS / "readme.png")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
