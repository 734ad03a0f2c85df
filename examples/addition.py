"""A task with a checkable answer for a small text model: a dataset, and a reward for rloo.py and ppo_vl.py.

    python examples/addition.py data
    python rloo.py --model models/smollm2 --dataset data/train.jsonl --eval-dataset data/test.jsonl \\
        --rewards examples/addition.py:right_sum
"""

import json
import random
import re
import sys
from pathlib import Path

MAX_SUMMAND = 20  # summands are 1 to 20, which makes 400 questions
NUM_TEST_PAIRS = 42  # about 80 questions, since 3 + 5 and 5 + 3 are in the same split


def right_sum(texts: list[str], answer: list[str], **columns) -> list[float]:
    """1 if the last number in the response is the sum, else 0."""
    return [float(re.findall(r"\d+", text)[-1:] == [expected]) for text, expected in zip(texts, answer)]


def main(output_dir: Path) -> None:
    summands = range(1, MAX_SUMMAND + 1)
    pairs = [(a, b) for a in summands for b in summands if a <= b]
    random.Random(0).shuffle(pairs)
    output_dir.mkdir(parents=True, exist_ok=True)
    for split, part in (("test", pairs[:NUM_TEST_PAIRS]), ("train", pairs[NUM_TEST_PAIRS:])):
        rows = []
        for a, b in part + [(b, a) for a, b in part if a != b]:
            question = f"What is {a} + {b}? Answer with the number only."
            rows.append({"prompt": question, "answer": str(a + b)})
        (output_dir / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
