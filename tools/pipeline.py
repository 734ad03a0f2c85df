"""Data, tables and plot of tools/pipeline.sh, in the directory with its runs.

python tools/pipeline.py pairs runs/pipeline      # writes pairs.jsonl
python tools/pipeline.py tables runs/pipeline     # prints the tables; writes table.md and pipeline.png
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))

SEEDS = (1, 2, 3, 4, 5)
COLORS = {"accuracy_and_format": "tab:green", "judge_and_format": "tab:purple"}
COLORS |= {"early_rm_and_format": "tab:red", "rm_and_format_kl0.01": "tab:blue"}
COLORS |= {"untagged_rm_and_format_kl0.01": "tab:orange"}
SWEEP = {f"{rm}_and_format_kl{kl}": {"0.01": "tab:orange", "0.1": "tab:cyan", "1": "black"}[kl]
         for rm in ("rm", "untagged_rm") for kl in ("0.01", "0.1", "1")}  # fmt: skip
POLICIES = [f"{policy}_seed{seed}" for policy in COLORS | SWEEP for seed in SEEDS]
STAGES = ("reward_model", "judge", "untagged_reward_model", *POLICIES)
ACCURACY, LEARNED = "eval/greedy_reward_accuracy", "eval/greedy_reward_score"


def write_pairs(output_dir: Path) -> None:
    """The pairs of reward_bt.py, but half of the rejected responses are the correct answer without tags."""
    import reward_bt

    rows = reward_bt.add_easy_vqa_responses(reward_bt.chats.easy_vqa_rows("train"), seed=1)
    is_untagged = np.random.default_rng(1).random(len(rows)) < 0.5

    def untag(row: dict, i: int) -> dict:
        return {"rejected": f"The answer is {row['answer']}."} if is_untagged[i] else {}

    rows.map(untag, with_indices=True).to_json(output_dir / "pairs.jsonl")


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_curves(output_dir: Path, policy: str, metric: str) -> tuple[list[int], np.ndarray]:
    """Steps (T,) and the metric's values (seeds, T)."""
    runs = [read_metrics(output_dir / f"{policy}_seed{seed}") for seed in SEEDS]
    curves = [[(line["train/step"], line[metric]) for line in lines if metric in line] for lines in runs]
    return [step for step, _ in curves[0]], np.array([[value for _, value in curve] for curve in curves])


def markdown(head: str, rows: list[list[str]]) -> str:
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def spread(values) -> str:
    """Mean, lowest and highest."""
    return f"{np.mean(values):.3f} ({np.min(values):.3f} to {np.max(values):.3f})"


def policy_table(output_dir: Path) -> str:
    """Each policy after its last step. Fall: from the highest point of the mean curve, with its standard error."""
    rows = []
    for policy in COLORS | SWEEP:
        steps, accuracy = read_curves(output_dir, policy, ACCURACY)
        peak = int(accuracy.mean(0).argmax())
        fall = accuracy[:, peak] - accuracy[:, -1]  # (seeds,)
        error = fall.std(ddof=1) / len(SEEDS) ** 0.5
        tagged = read_curves(output_dir, policy, "eval/greedy_reward_format")[1][:, -1]
        kl = read_curves(output_dir, policy, "objective/kl")[1][:, -5:].mean(1)
        cells = [
            spread(accuracy[:, -1]),
            f"{fall.mean():.3f} \u00b1 {error:.3f} since step {steps[peak]:.0f}",
        ]
        cells += [spread(tagged), f"{kl.mean():.2f}"]
        learned = read_curves(output_dir, policy, LEARNED)[1] if "rm_" in policy else None
        cells.append("" if learned is None else f"{learned[:, 0].mean():.2f} -> {learned[:, -1].mean():.2f}")
        rows.append([policy, *cells])
    head = "policy | accuracy, greedy | fall of accuracy | tagged, greedy | KL, nats | learned reward"
    return markdown(head, rows)


def proxy_table(output_dir: Path) -> str:
    """Accuracy of the reward models and of the judge on evaluation pairs."""
    metrics = dict.fromkeys(("reward_model", "untagged_reward_model"), "eval/easy-vqa/accuracy")
    rows = []
    for name, metric in (metrics | {"judge": "eval/accuracy"}).items():
        values = [f"{line[metric]:.3f}" for line in read_metrics(output_dir / name) if metric in line]
        rows.append([name, ", ".join(values)])
    return markdown("reward | accuracy on evaluation pairs, at each evaluation", rows)


def draw(output_dir: Path) -> None:
    """pipeline.png: a thin line per seed, and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 14  # readable on a phone, where the plot has its width
    figure, panels = plt.subplots(2, 2, figsize=(11, 9.5), layout="constrained")
    sweep = {policy: color for policy, color in SWEEP.items() if policy.startswith("untagged")}
    learned = {policy: color for policy, color in COLORS.items() if "rm_" in policy}
    plots = {  # title: metric, policies
        "accuracy (evaluation, greedy)": (ACCURACY, COLORS),
        "KL to the initial model (training), nats": ("objective/kl", COLORS),
        "learned reward, rise since step 6": (LEARNED, learned),
        "accuracy: --kl-coef 0.01, 0.1 and 1": (ACCURACY, sweep),
    }
    for panel, (title, (metric, policies)) in zip(panels.flat, plots.items()):
        for policy, color in policies.items():
            steps, values = read_curves(output_dir, policy, metric)
            if metric == LEARNED:  # without the first evaluation
                steps, values = steps[1:], values[:, 1:] - values[:, 1:2]
            panel.plot(steps, values.T, color=color, alpha=0.25, linewidth=0.8)
            panel.plot(steps, values.mean(0), color=color, label=policy, linewidth=2)
        panel.set(title=title, xlabel="step")
    panels[0, 1].legend(fontsize=11, loc="upper left")
    panels[1, 1].legend(fontsize=11)
    figure.savefig(output_dir / "pipeline.png", dpi=80)


def write_tables(output_dir: Path) -> None:
    seconds = sum(float((output_dir / f"{name}.time").read_text()) for name in STAGES)
    tables = [policy_table(output_dir), proxy_table(output_dir), f"{seconds:.0f} CPU seconds"]
    (output_dir / "table.md").write_text("\n".join(tables))
    draw(output_dir)
    print("\n".join(tables))


if __name__ == "__main__":
    {"pairs": write_pairs, "tables": write_tables}[sys.argv[1]](Path(sys.argv[2]))
