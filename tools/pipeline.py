"""The tables and the plot of tools/pipeline.sh, from the directory with its runs.

python tools/pipeline.py runs/pipeline      # prints the tables; writes table.md and pipeline.png there
"""

import json
import re
import sys
from pathlib import Path

COLORS = {"accuracy_and_format": "tab:green", "judge_and_format": "tab:purple"}
COLORS |= {"rm_and_format": "tab:blue", "early_rm_and_format": "tab:red"}
SWEEP = {"rm_and_format_seed1": "tab:blue", "rm_and_format_kl0.1": "tab:cyan", "rm_and_format_kl1": "black"}
POLICIES = [*(f"{policy}_seed{seed}" for policy in COLORS for seed in (1, 2)), *list(SWEEP)[1:]]
STAGES = ("reward_model", "judge", *POLICIES)


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def evaluations(lines: list[dict], key: str = "eval/greedy_reward_accuracy") -> list[dict]:
    """The metrics of a run's evaluations, of which the first is before the first step."""
    return [line for line in lines if key in line]


def markdown(head: str, rows: list[list[str]]) -> str:
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def policy_table(runs: dict[str, list[dict]]) -> str:
    """The initial model and the final policies, with a number per seed. KL: mean of the last five rollouts."""
    accuracy, learned = "eval/greedy_reward_accuracy", "eval/greedy_reward_score"
    policies = {"initial model": [evaluations(runs[name])[:1] for name in POLICIES[:2]]}  # lines of each seed
    for run, lines in runs.items():
        policies.setdefault(re.sub("_seed.$", "", run), []).append(lines)
    rows = []
    for policy, seeds in policies.items():
        curves = [evaluations(lines) for lines in seeds]
        best = [max(curve, key=lambda line: line[accuracy]) for curve in curves]
        kl = [[line["objective/kl"] for line in lines if "objective/kl" in line][-5:] for lines in seeds]
        names = ("eval/sampled_reward_accuracy", accuracy, "eval/greedy_reward_format")
        cells = [[f"{curve[-1][name]:.3f}" for curve in curves] for name in names]
        cells.insert(2, [f"{line[accuracy]:.3f} ({line['train/step']:.0f})" for line in best])
        cells.append([f"{sum(x) / max(len(x), 1):.2f}" for x in kl])
        has_learned = "rm_" in policy  # greedy responses have no others that a judge could compare them with
        cells.append([f"{x[0][learned]:.2f} -> {x[-1][learned]:.2f}" for x in curves if has_learned])
        rows.append([policy, *map(", ".join, cells)])
    head = "policy | accuracy, sampled | accuracy, greedy | peak greedy accuracy (step) | tagged, greedy"
    return markdown(f"{head} | KL, nats | learned reward", rows)


def proxy_table(reward_model: list[dict], judge: list[dict]) -> str:
    """Accuracy of the reward model and of the judge on evaluation pairs."""
    rows = []
    for line in evaluations(reward_model, key := "eval/easy-vqa/accuracy"):
        rows.append([f"reward model, step {line['train/step']}", f"{line[key]:.3f}"])
    rows.append(["judge", f"{judge[-1]['eval/accuracy']:.3f}"])
    return markdown("reward | accuracy on evaluation pairs", rows)


def draw(output_dir: Path, runs: dict[str, list[dict]]) -> None:
    """pipeline.png: the curves of all rewards, with a line per seed, and the sweep of --kl-coef."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 14  # readable on a phone, where the plot has its width
    figure, panels = plt.subplots(3, 2, figsize=(11, 14), layout="constrained")
    accuracy, kl, learned = "eval/greedy_reward_accuracy", "objective/kl", "eval/greedy_reward_score"

    def plot(panel, title: str, metric: str, names: list[str], ylabel: str = "") -> None:
        for name in names:
            lines = [line for line in runs[name] if metric in line]
            policy, _, variant = name.rpartition("_")
            style = {"color": COLORS[policy], "linestyle": "--" if variant == "seed2" else "-"}
            label = policy if variant == "seed1" else None
            if names == list(SWEEP):
                label = "--kl-coef " + variant.replace("seed1", "0.01").strip("kl")
                style = {"color": SWEEP[name]}
            marker = "" if metric == kl else "o"
            x, y = ([line[key] for line in lines] for key in ("train/step", metric))
            panel.plot(x, y, label=label, marker=marker, **style)
        panel.set(title=title, xlabel="step", ylabel=ylabel)

    default = [name for name in POLICIES if name not in list(SWEEP)[1:]]
    plot(panels[0, 0], "accuracy (evaluation, greedy)", accuracy, default)
    plot(panels[0, 1], "KL to the initial model (training)", kl, default, "nats")
    reward_models = [name for name in default if "rm_" in name]
    plot(panels[1, 0], "learned reward (evaluation, greedy)", learned, reward_models)
    plot(panels[1, 1], "rm_and_format: KL (training)", kl, list(SWEEP), "nats")
    plot(panels[2, 0], "rm_and_format: learned reward", learned, list(SWEEP))
    plot(panels[2, 1], "rm_and_format: accuracy", accuracy, list(SWEEP))
    panels[0, 1].legend(title="seed 2: dashed")
    panels[1, 1].legend()
    figure.savefig(output_dir / "pipeline.png", dpi=80)


def main(output_dir: Path) -> None:
    runs = {name: read_metrics(output_dir / name) for name in POLICIES}
    proxies = proxy_table(read_metrics(output_dir / "reward_model"), read_metrics(output_dir / "judge"))
    seconds = [[name, f"{float((output_dir / f'{name}.time').read_text()):.0f}"] for name in STAGES]
    text = "\n".join([policy_table(runs), proxies, markdown("stage | CPU seconds", seconds)])
    (output_dir / "table.md").write_text(text)
    draw(output_dir, runs)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pipeline"))
