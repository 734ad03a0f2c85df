"""The tables and the picture of tools/pipeline.sh, from the folder that it filled.

python tools/pipeline.py runs/pipeline      # prints the tables; writes table.md and pipeline.png there
"""

import json
import sys
from pathlib import Path

import numpy as np

POLICIES = {  # run: script, what it was trained against, and whether the score is a reward model's alone
    "rule": ("ppo_vl.py", "the rule", False),
    "rm": ("rloo.py", "reward model, and the rule's format part", False),
    "judge_and_rule": ("ppo_vl.py", "judge, and the rule's format part", False),
    "early_rm": ("rloo.py", "reward model, stopped after 40 steps", True),
}
TRUE_RULE = {"accuracy": 0.9, "format": 0.1}  # what all are measured by, whatever they were trained against
STAGES = ("reward_model", "judge", *POLICIES)


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(lines: list[dict]) -> list[dict]:
    """The lines of a policy with held-out metrics, the first of them before the first step."""
    return [line for line in lines if "eval/greedy_score" in line]


def true_reward(line: dict, mode: str) -> float:
    """The rule's mean score in an evaluation; mode: greedy or sampled."""
    return sum(weight * line[f"eval/{mode}_{name}"] for name, weight in TRUE_RULE.items())


def markdown(head: str, rows: list[list[str]]) -> str:
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def policy_table(runs: dict[str, list[dict]]) -> str:
    """The start and the ends. KL: mean of the last five rollouts; own proxy: greedy, start -> end."""
    first = evaluations(runs["rule"])[0]
    start = [f"{x:.3f}" for x in (first["eval/sampled_accuracy"], first["eval/greedy_accuracy"])]
    rows = [["base", "", f"{true_reward(first, 'sampled'):.3f}", *start, "0", ""]]
    for name, (script, against, has_proxy) in POLICIES.items():
        first, last = evaluations(runs[name])[0], evaluations(runs[name])[-1]
        kl = np.mean([line["objective/kl"] for line in runs[name] if "objective/kl" in line][-5:])
        truth = true_reward(last, "sampled"), last["eval/sampled_accuracy"], last["eval/greedy_accuracy"]
        proxy = f"{first['eval/greedy_score']:.2f} -> {last['eval/greedy_score']:.2f}" if has_proxy else ""
        rows.append([f"{name} (`{script}`)", against, *(f"{x:.3f}" for x in truth), f"{kl:.2f}", proxy])
    head = "policy | trained against | true rule, sampled | accuracy, sampled | greedy | KL, nats | own proxy"
    return markdown(head, rows)


def proxy_table(reward_model: list[dict], judge: list[dict]) -> str:
    """What reward model and judge know of held-out pairs."""
    key = "eval/easy-vqa/accuracy"
    known = [(f"reward model, step {line['train/step']}", line[key]) for line in reward_model if key in line]
    known.append(("judge", judge[-1]["eval/accuracy"]))
    return markdown("proxy | held-out pairs decided rightly", [[name, f"{x:.3f}"] for name, x in known])


def time_table(folder: Path) -> str:
    """Seconds of each stage, from the NAME.time files."""
    seconds = {name: map(float, (folder / f"{name}.time").read_text().split()) for name in STAGES}
    return markdown(
        "stage | wall, s | CPU, s", [[name, *(f"{x:.0f}" for x in own)] for name, own in seconds.items()]
    )


def draw(folder: Path, runs: dict[str, list[dict]]) -> None:
    """pipeline.png. Above: truth and KL of all policies. Below: each proxy beside the truth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    colors = dict(zip(POLICIES, ("tab:green", "tab:blue", "tab:purple", "tab:red")))
    for name, lines in runs.items():
        curve, trained = evaluations(lines), [line for line in lines if "objective/kl" in line]
        steps, style = [line["train/step"] for line in curve], {"color": colors[name], "label": name}
        panels[0, 0].plot(steps, [true_reward(line, "sampled") for line in curve], marker="o", **style)
        panels[0, 1].plot(steps, [line["eval/greedy_accuracy"] for line in curve], marker="o", **style)
        panels[0, 2].plot([x["train/step"] for x in trained], [x["objective/kl"] for x in trained], **style)
    panels[0, 0].set_title("reward under the true rule (held out, sampled)")
    panels[0, 1].set_title("right answers (held out, greedy)")
    panels[0, 2].set_title("KL to the start, nats per response (training)")
    panels[0, 0].legend()
    for panel, name in zip(panels[1], ("rm", "early_rm", "judge_and_rule")):
        curve, color = evaluations(runs[name]), colors[name]
        mode = (
            "greedy" if POLICIES[name][2] else "sampled"
        )  # a judge compares a greedy response with no sibling
        steps = [line["train/step"] for line in curve]
        for key, line, label in (
            ("accuracy", "s--", "truth: right answers"),
            ("format", ":", "truth: format"),
        ):
            panel.plot(steps, [x[f"eval/{mode}_{key}"] for x in curve], line, color=color, label=label)
        panel.set_ylabel("truth: share", color=color)
        score = panel.twinx()
        score.plot(
            steps, [x[f"eval/{mode}_score"] for x in curve], "o-", color="black", label="score trained on"
        )
        score.set_ylabel("mean score")
        lines = panel.get_lines() + score.get_lines()
        panel.legend(
            lines, [x.get_label() for x in lines], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2
        )
        panel.set_title(f"{name}: proxy and truth (held out, {mode})")
    for panel in panels.flat:
        panel.set_xlabel("step")
    figure.savefig(folder / "pipeline.png", dpi=80)


def main(folder: Path) -> None:
    missing = [name for name in STAGES if not (folder / name / "metrics.jsonl").is_file()]
    if missing:
        print(
            f"error: {folder} has no run {missing[0]}: tools/pipeline.sh {folder} makes it", file=sys.stderr
        )
        raise SystemExit(2)
    runs = {name: read_metrics(folder / name) for name in POLICIES}
    proxies = proxy_table(read_metrics(folder / "reward_model"), read_metrics(folder / "judge"))
    text = "\n".join([policy_table(runs), proxies, time_table(folder)])
    (folder / "table.md").write_text(text)
    draw(folder, runs)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pipeline"))
