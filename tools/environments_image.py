"""Draw docs/environments.png: the scores of two examples with and without their tools, and how often the tool is called.

Run the commands of examples/guess_number.py and examples/zoom.py with --seed 1, 2 and 3 and --run-name guess1, ..., zoom3,
then once with --max-turns 1 and --run-name guess_without or zoom_without. With one turn, no observation is seen.

    python tools/environments_image.py runs
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RED, GREEN, BLUE, GRAY = "#b8323f", "#1d7a46", "#7f9cc0", "#7a828c"
PANELS = {  # run name: (label, metric, suffixes of runs, color) of each curve
    "guess": [
        ("score: number found in three guesses", "objective/scores", "123", GREEN),
        ("without answers: one guess", "objective/scores", ["_without"], GRAY),
    ],
    "zoom": [
        ("score: accuracy - 0.2 per call", "objective/scores", "123", GREEN),
        ("score without the image", "objective/scores", ["_without"], GRAY),
        ("share of calls, questions about shapes", "reward_metrics/calls_shape", "123", RED),
        ("share of calls, questions about colors", "reward_metrics/calls_color", "123", BLUE),
    ],
}
TITLES = {"guess": "examples/guess_number.py", "zoom": "examples/zoom.py"}


def read_curve(run_dir: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values, each the mean over up to three neighboring steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [(line["train/step"], line[metric]) for line in lines if metric in line]
    values = [value for _, value in points]
    windows = [values[max(0, i - 1) : i + 2] for i in range(len(values))]
    return [step for step, _ in points], [sum(window) / len(window) for window in windows]


def main(runs_dir: Path) -> None:
    figure, all_axes = plt.subplots(1, 2, figsize=(8.6, 3.3), dpi=100, layout="constrained")
    for axes, (name, curves) in zip(all_axes, PANELS.items()):
        for label, metric, suffixes, color in curves:
            for k, suffix in enumerate(suffixes):
                x, y = read_curve(runs_dir / f"{name}{suffix}", metric)
                axes.plot(x, y, color=color, label=label if k == 0 else None, linewidth=1.3)
        axes.set(title=TITLES[name], xlabel="step (training batches)", ylim=(-0.02, 1.02))
        axes.grid(color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    all_axes[1].legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.24))
    figure.savefig(Path(__file__).parents[1] / "docs/environments.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
