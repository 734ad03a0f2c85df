"""The tables and the plot of tools/pipeline.sh, from the directory with its runs.

python tools/pipeline.py runs/pipeline      # prints the tables; writes table.md and pipeline.png there
"""

import json
import sys
from pathlib import Path

import numpy as np

POLICIES = {  # run: script, rewards it was trained with, whether its score is only the reward model's
    "rule": ("ppo_vl.py", "the rule", False),
    "rm": ("rloo.py", "reward model and format rule", False),
    "judge_and_rule": ("ppo_vl.py", "judge and format rule", False),
    "early_rm": ("rloo.py", "reward model after 40 steps", True),
}
TRUE_RULE = {"accuracy": 0.9, "format": 0.1}  # the true reward, which measures all policies
STAGES = ("reward_model", "judge", *POLICIES)


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def evaluations(lines: list[dict]) -> list[dict]:
    """The metrics of a policy's evaluations, of which the first is before the first step."""
    return [line for line in lines if "eval/greedy_score" in line]


def true_reward(line: dict, mode: str) -> float:
    """Mean true reward in an evaluation; mode: greedy or sampled."""
    return sum(weight * line[f"eval/{mode}_reward_{name}"] for name, weight in TRUE_RULE.items())


def markdown(head: str, rows: list[list[str]]) -> str:
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def policy_table(runs: dict[str, list[dict]]) -> str:
    """The initial model and the final policies. KL: mean of the last five rollouts."""

    def measure(line: dict) -> list[str]:
        accuracies = [line[f"eval/{mode}_reward_accuracy"] for mode in ("sampled", "greedy")]
        return [f"{x:.3f}" for x in (true_reward(line, "sampled"), *accuracies)]

    rows = [["initial model", "", *measure(evaluations(runs["rule"])[0]), "0", ""]]
    for name, (script, rewards, has_proxy) in POLICIES.items():
        first = evaluations(runs[name])[0]
        last = evaluations(runs[name])[-1]
        kl = np.mean([line["objective/kl"] for line in runs[name] if "objective/kl" in line][-5:])
        proxy = f"{first['eval/greedy_score']:.2f} -> {last['eval/greedy_score']:.2f}" if has_proxy else ""
        rows.append([f"{name} (`{script}`)", rewards, *measure(last), f"{kl:.2f}", proxy])
    head = "policy | trained with | score by the rule, sampled | accuracy, sampled | accuracy, greedy"
    return markdown(f"{head} | KL, nats | learned reward", rows)


def proxy_table(reward_model: list[dict], judge: list[dict]) -> str:
    """Accuracy of the reward model and of the judge on evaluation pairs."""
    key = "eval/easy-vqa/accuracy"
    rows = []
    for line in reward_model:
        if key in line:
            rows.append([f"reward model, step {line['train/step']}", f"{line[key]:.3f}"])
    rows.append(["judge", f"{judge[-1]['eval/accuracy']:.3f}"])
    return markdown("reward | accuracy on evaluation pairs", rows)


def time_table(output_dir: Path) -> str:
    """Seconds of each stage, from the files NAME.time."""
    rows = []
    for name in STAGES:
        seconds = map(float, (output_dir / f"{name}.time").read_text().split())
        rows.append([name, *(f"{x:.0f}" for x in seconds)])
    return markdown("stage | wall time, s | CPU time, s", rows)


def draw(output_dir: Path, runs: dict[str, list[dict]]) -> None:
    """pipeline.png: true reward, accuracy and KL of all policies; learned and true rewards of three of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 14  # readable on a phone, where the plot has its width
    figure, panels = plt.subplots(3, 2, figsize=(11, 15), layout="constrained")
    panels = panels.flatten()
    colors = dict(zip(POLICIES, ("tab:green", "tab:blue", "tab:purple", "tab:red")))
    for name, lines in runs.items():
        curve = evaluations(lines)
        trained = [line for line in lines if "objective/kl" in line]
        steps = [line["train/step"] for line in curve]
        style = {"color": colors[name], "label": name}
        panels[0].plot(steps, [true_reward(line, "sampled") for line in curve], marker="o", **style)
        accuracy = [line["eval/greedy_reward_accuracy"] for line in curve]
        panels[1].plot(steps, accuracy, marker="o", **style)
        panels[2].plot([x["train/step"] for x in trained], [x["objective/kl"] for x in trained], **style)
    panels[0].set_title("true reward (evaluation, sampled)")
    panels[1].set_title("accuracy (evaluation, greedy)")
    panels[2].set_title("KL to the initial model, nats (training)")
    panels[0].legend()
    for panel, name in zip(panels[3:], ("rm", "early_rm", "judge_and_rule")):
        curve = evaluations(runs[name])
        color = colors[name]
        # A judge compares responses to the same prompt, and there is only one greedy response.
        mode = "greedy" if POLICIES[name][2] else "sampled"
        steps = [line["train/step"] for line in curve]
        for reward, line, label in (("accuracy", "s--", "true: accuracy"), ("format", ":", "true: format")):
            values = [x[f"eval/{mode}_reward_{reward}"] for x in curve]
            panel.plot(steps, values, line, color=color, label=label)
        panel.set_ylabel("true rewards", color=color)
        axes = panel.twinx()
        scores = [x[f"eval/{mode}_score"] for x in curve]
        axes.plot(steps, scores, "o-", color="black", label="score used for training")
        axes.set_ylabel("mean score")
        lines = panel.get_lines() + axes.get_lines()
        labels = [line.get_label() for line in lines]
        panel.legend(lines, labels, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
        panel.set_title(f"{name}: learned and true rewards\n(evaluation, {mode})")
    for panel in panels:
        panel.set_xlabel("step")
    figure.savefig(output_dir / "pipeline.png", dpi=80)


def main(output_dir: Path) -> None:
    for name in STAGES:
        if not (output_dir / name / "metrics.jsonl").is_file():
            message = f"{output_dir} has no run {name}: start tools/pipeline.sh {output_dir} first"
            print(f"error: {message}", file=sys.stderr)
            raise SystemExit(2)
    runs = {name: read_metrics(output_dir / name) for name in POLICIES}
    proxies = proxy_table(read_metrics(output_dir / "reward_model"), read_metrics(output_dir / "judge"))
    text = "\n".join([policy_table(runs), proxies, time_table(output_dir)])
    (output_dir / "table.md").write_text(text)
    draw(output_dir, runs)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pipeline"))
