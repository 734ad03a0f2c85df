"""A task with a checkable answer for a small text model: data, and a reward in the protocol of rloo.py and ppo_vl.py.

    python examples/addition.py --output-dir data
    python rloo.py --model models/smollm2 --dataset data/train.jsonl --eval-dataset data/test.jsonl \\
        --rewards examples/addition.py:right_sum --reward-weights 1
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Args:
    output_dir: str = "data"
    """folder for train.jsonl and test.jsonl"""
    largest: int = 20
    """summands go from 1 to this"""
    test_share: float = 0.2
    """share of the sums that is held out"""


def right_sum(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 when the last number that the model writes is the sum, else 0."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer)]


def main(args: Args) -> None:
    pairs = [(a, b) for a in range(1, args.largest + 1) for b in range(1, args.largest + 1)]
    random.Random(0).shuffle(pairs)
    held_out = int(len(pairs) * args.test_share)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:held_out]), ("train", pairs[held_out:])):
        rows = [{"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in part]
        (Path(args.output_dir) / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
