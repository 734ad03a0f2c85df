"""A task with a checkable answer for a small text model: data, and a reward for rloo.py and ppo_vl.py.

    python examples/addition.py data
    python rloo.py --model models/smollm2 --dataset data/train.jsonl --eval-dataset data/test.jsonl \\
        --rewards examples/addition.py:right_sum --reward-weights 1
"""

import json
import random
import re
import sys
from pathlib import Path

LARGEST, HELD_OUT = 20, 80  # summands go from 1 to 20; of these 400 sums, 80 are kept for the test


def right_sum(texts: list[str], answer: list[str], **columns) -> list[float]:
    """1 when the last number that the model writes is the sum, else 0."""
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(texts, answer)]


def main(folder: Path) -> None:
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        question = "What is {} + {}? Answer with the number only."
        rows = [{"prompt": question.format(a, b), "answer": str(a + b)} for a, b in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
