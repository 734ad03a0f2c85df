"""Draw docs/readme.png: the rewards of a run of ppo_vl.py or rloo.py, and six evaluation responses before and after.

python ppo_vl.py --run-name readme
python tools/readme_image.py runs/readme
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from PIL import Image  # noqa: E402

RED, GREEN, BLUE = "#b8323f", "#1d7a46", "#7f9cc0"
CURVES = {  # metric: label, color
    "objective/scores": ("training batches", BLUE),
    "eval/sampled_score": ("evaluation, sampled", RED),
    "eval/greedy_score": ("evaluation, greedy", GREEN),
}


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def before_and_after(run_dir: Path) -> list[tuple[dict, dict]]:
    """Greedy responses at the first and last evaluation: two with a wrong answer at first, two without tags, and
    two that are right from the start."""
    records = [x for x in read_lines(run_dir / "samples.jsonl") if x["phase"] == "eval_greedy"]
    last_step = max(record["train/step"] for record in records)
    after = {record["row"]: record for record in records if record["train/step"] == last_step}
    pairs = [(x, after[x["row"]]) for x in records if x["train/step"] == 0]
    untagged = [pair for pair in pairs if "<answer>" not in pair[0]["response"]]
    right = [pair for pair in pairs if score(pair[0]) == 1]
    confused = [pair for pair in pairs if pair not in untagged and pair not in right]
    return [*confused[:2], *untagged[:2], *right[:2]]


def score(record: dict) -> float:
    return 0.9 * record["reward/accuracy"] + 0.1 * record["reward/format"]


def verdict(record: dict) -> str:
    if score(record) == 1:
        return "right"
    return "wrong" if "<answer>" in record["response"] else "no answer tags"


def draw(run_dir: Path, output: Path) -> None:
    """Large type, because GitHub scales the image to the width of a phone."""
    plt.rcParams |= {"font.size": 22, "axes.spines.top": False, "axes.spines.right": False}
    metrics = read_lines(run_dir / "metrics.jsonl")
    figure = plt.figure(figsize=(15, 13))
    axes = figure.add_axes((0.07, 0.645, 0.91, 0.305))
    for key, (label, color) in CURVES.items():
        points = [(line["train/step"], line[key]) for line in metrics if key in line]
        width, marker = (2, None) if color == BLUE else (4, "o")
        axes.plot(*zip(*points), color=color, label=label, linewidth=width, marker=marker, markersize=12)
    axes.set(ylim=(0, 1.05), xlabel="step", title="Reward (maximum 1)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=24, frameon=False)

    title = "Greedy responses to evaluation questions, before and after training"
    figure.text(0.5, 0.54, title, ha="center", fontsize=26)
    for k, pair in enumerate(before_and_after(run_dir)):
        left, top = 0.02 + 0.5 * (k % 2), 0.515 - 0.178 * (k // 2)
        figure.text(left, top, pair[0]["prompt"], va="top", fontsize=23)
        panel = figure.add_axes((left, top - 0.15, 0.1, 0.115))
        panel.imshow(Image.open(pair[0]["image"]))
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(True)
        for record, when, y in zip(pair, ("before", "after"), (top - 0.036, top - 0.096)):
            color = GREEN if score(record) == 1 else RED
            note = f"{when}: {verdict(record)}, reward {score(record):.1f}"
            figure.text(left + 0.12, y, note, va="top", fontsize=20, color="0.35")
            style = {"va": "top", "fontsize": 20, "color": color, "family": "monospace"}
            figure.text(left + 0.12, y - 0.023, record["response"], **style)
    figure.savefig(output, dpi=80)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(__file__).parent.parent / "docs/readme.png")
