"""The tables and the picture of tools/pipeline.sh, from the folder that it filled.

python tools/pipeline.py runs/pipeline      # prints the tables; writes table.md and pipeline.png into that folder
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

POLICIES = {  # run: (script, what it was trained against, the proxy among its reward components)
    "rule": ("ppo_vl.py", "the rule", None),
    "rm": ("rloo.py", "reward model, 200 steps", "checkpoint-200"),
    "judge_and_rule": ("ppo_vl.py", "judge, and the rule's format part", "score"),
    "early_rm": ("rloo.py", "reward model, stopped after 40 steps", "checkpoint-40"),
}
TRUE_RULE = {"accuracy": 0.9, "format": 0.1}  # what all are measured by, whatever they were trained against
STAGES = ("reward_model", "judge", *POLICIES)


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(lines: list[dict]) -> list[dict]:
    """The lines with held-out metrics, the first of them before the first step."""
    return [line for line in lines if "eval/num_samples" in line]


def true_reward(line: dict, mode: str) -> float:
    """The rule's mean score in an evaluation; mode: greedy or sampled."""
    return sum(weight * line[f"eval/{mode}_{name}"] for name, weight in TRUE_RULE.items())


def policy_table(runs: dict[str, list[dict]]) -> str:
    """Markdown: the start, and the end of each run. KL: mean of the last five rollouts; proxy: greedy, start -> end."""
    rows = [
        "| policy | trained against | true rule, sampled | accuracy, sampled | greedy | KL, nats | own proxy |",
        "|---|---|---|---|---|---|---|",
    ]
    first = evaluations(runs["rule"])[0]
    starts = [first[f"eval/{key}"] for key in ("sampled_accuracy", "greedy_accuracy")]
    rows.append(f"| base | | {true_reward(first, 'sampled'):.3f} | {starts[0]:.3f} | {starts[1]:.3f} | 0 | |")
    for name, (script, against, proxy) in POLICIES.items():
        first, last = evaluations(runs[name])[0], evaluations(runs[name])[-1]
        kl = np.mean([line["objective/kl"] for line in runs[name][-5:]])
        cells = [f"{true_reward(last, 'sampled'):.3f}", f"{last['eval/sampled_accuracy']:.3f}"]
        cells += [f"{last['eval/greedy_accuracy']:.3f}", f"{kl:.2f}"]
        # Greedy responses have no siblings that a judge could compare them to.
        key = f"eval/greedy_{proxy}"
        cells.append(f"{first[key]:.2f} -> {last[key]:.2f}" if proxy not in (None, "score") else "")
        rows.append(f"| {name} (`{script}`) | {against} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def proxy_table(reward_model: list[dict], judge: list[dict]) -> str:
    """Markdown: what reward model and judge know of held-out pairs."""
    accuracy = {
        line["train/step"]: line["eval/easy-vqa/accuracy"] for line in reward_model if "eval/easy-vqa/accuracy" in line
    }
    rows = ["| proxy | held-out pairs decided rightly |", "|---|---|"]
    rows += [f"| reward model, step {step} | {value:.3f} |" for step, value in accuracy.items()]
    return "\n".join([*rows, f"| judge | {evaluations(judge)[-1]['eval/accuracy']:.3f} |"]) + "\n"


def time_table(folder: Path) -> str:
    """Markdown: seconds of each stage, from the NAME.time files."""
    rows = ["| stage | wall, s | CPU, s |", "|---|---|---|"]
    for name in STAGES:
        wall, cpu = (folder / f"{name}.time").read_text().split()
        rows.append(f"| {name} | {float(wall):.0f} | {float(cpu):.0f} |")
    return "\n".join(rows) + "\n"


def verdicts(folder: Path, step: int) -> tuple[float, float]:
    """Mean judge's score of right and of wrong sampled answers at one evaluation, tags aside, which the judge does not see.

    Of those that were compared with an answer other than themselves: without one the score is 0.5. NaN: there are none.
    """
    samples = json.loads((folder / "eval" / f"eval_step_{step}.json").read_text())
    compared = [s for s in samples if s["phase"] == "eval_sampled" and s["components"]["score"] != 0.5]
    scores = {True: [], False: []}
    for sample in compared:
        words = re.sub(r"</?answer>", "", sample["response"]).strip()
        scores[words == sample["answer"]].append(sample["components"]["score"])
    return tuple(float(np.mean(values)) if values else float("nan") for values in scores.values())


def draw(folder: Path, runs: dict[str, list[dict]]) -> None:
    """pipeline.png. Above: truth and KL of all policies. Below: each proxy beside the truth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    colors = dict(zip(POLICIES, ("tab:green", "tab:blue", "tab:purple", "tab:red")))
    curves = {name: evaluations(lines) for name, lines in runs.items()}
    steps = {name: [line["train/step"] for line in lines] for name, lines in curves.items()}
    for name, lines in curves.items():
        style = {"color": colors[name], "label": name, "marker": "o"}
        panels[0, 0].plot(steps[name], [true_reward(line, "sampled") for line in lines], **style)
        panels[0, 1].plot(steps[name], [line["eval/greedy_accuracy"] for line in lines], **style)
        trained = [line for line in runs[name] if "objective/kl" in line]
        panels[0, 2].plot([x["train/step"] for x in trained], [x["objective/kl"] for x in trained], color=colors[name])
    panels[0, 0].set_title("reward under the true rule (held out, sampled)")
    panels[0, 1].set_title("right answers (held out, greedy)")
    panels[0, 2].set_title("KL to the start, nats per response (training)")
    panels[0, 0].legend()
    for panel, name in zip(panels[1], ("rm", "early_rm")):
        greedy = {key: [line[f"eval/greedy_{key}"] for line in curves[name]] for key in ("accuracy", "format")}
        panel.plot(steps[name], greedy["accuracy"], "s--", color=colors[name], label="truth: right answers")
        panel.plot(steps[name], greedy["format"], ":", color=colors[name], label="truth: format")
        panel.set_ylabel("truth: share", color=colors[name])
        panel.set_ylim(0.68, 1.01)
        score = panel.twinx()
        drawn = {POLICIES[name][2]: ("o-", "proxy: score trained on")}
        drawn.setdefault("checkpoint-200", ("o:", "score of the later reward model"))  # for early_rm
        for proxy, (style, label) in drawn.items():
            score.plot(
                steps[name], [x[f"eval/greedy_{proxy}"] for x in curves[name]], style, color="black", label=label
            )
        score.set_ylabel("mean score")
        lines = panel.get_lines() + score.get_lines()
        panel.legend(
            lines, [line.get_label() for line in lines], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2
        )
        panel.set_title(f"{name}: proxy and truth (held out, greedy)")
    right, wrong = zip(*(verdicts(folder / "judge_and_rule", step) for step in steps["judge_and_rule"]))
    panels[1, 2].plot(steps["judge_and_rule"], right, "o-", color="tab:purple", label="right answers")
    panels[1, 2].plot(steps["judge_and_rule"], wrong, "x--", color="tab:purple", label="wrong answers")
    panels[1, 2].set_title("judge_and_rule: the judge's scores (held out)")
    panels[1, 2].set_ylim(-0.02, 1.02)
    panels[1, 2].legend()
    for panel in panels.flat:
        panel.set_xlabel("step")
    figure.savefig(folder / "pipeline.png", dpi=80)


def main(folder: Path) -> None:
    missing = [name for name in STAGES if not (folder / name / "metrics.jsonl").is_file()]
    if missing:
        print(f"error: {folder} has no finished run {missing[0]}; tools/pipeline.sh {folder} makes it", file=sys.stderr)
        raise SystemExit(2)
    runs = {name: read_metrics(folder / name) for name in POLICIES}
    proxies = proxy_table(read_metrics(folder / "reward_model"), read_metrics(folder / "judge"))
    text = "\n".join([policy_table(runs), proxies, time_table(folder)])
    (folder / "table.md").write_text(text)
    draw(folder, runs)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pipeline"))
