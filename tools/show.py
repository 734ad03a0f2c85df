"""Print metrics of a run: a line per step, then means of the first and the last ten values (or halves), and the median.

python tools/show.py runs/NAME objective/scores train/grad_norm
"""

import json
import sys
from pathlib import Path
from statistics import fmean, median


def main(folder: str, *names: str) -> None:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    for metrics in (steps := [line for line in lines if line.keys() & names]):
        print(folder, metrics["train/step"], *(f"{x} {metrics[x]:.3g}" for x in names if x in metrics))
    for name in names:
        values = [metrics[name] for metrics in steps if name in metrics] or [float("nan")]
        n = min(10, len(values) // 2) or 1
        first, last = fmean(values[:n]), fmean(values[-n:])
        print(f"{name}: first {n}: {first:.3g}, last {n}: {last:.3g}, median {median(values):.3g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
