"""Data of your own for all four scripts, from a folder that has one subfolder of pictures for each class (cats/1.png ...):

    python examples/custom_data.py pictures --output-dir data
    python ppo_vl.py --dataset data/prompts.jsonl --eval-dataset data/prompts_test.jsonl
    python rloo.py --dataset data/prompts.jsonl --eval-dataset data/prompts_test.jsonl
    python reward_bt.py --dataset data/pairs.jsonl --eval-datasets held_out=data/pairs_test.jsonl
    python grm_sft.py --dataset data/judged.jsonl --eval-dataset data/judged_test.jsonl --train-samples 0

The question is the same for every picture, the right answer its folder's name, a wrong one another folder's. A picture of the
held-out files is in none of the others. Rows of your own need no script: one JSON object per line, with these columns.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}


@dataclass
class Args:
    pictures: tyro.conf.Positional[str]
    """folder with one subfolder per class"""
    output_dir: str = "data"
    """where the six files go"""
    question: str = "What does the picture show?"
    """asked about every picture"""
    test_share: float = 0.2
    """share of the pictures that is held out"""
    seed: int = 0
    """of the split, the wrong answers and their sides"""


def make_rows(path: Path, answer: str, wrong: str, first: bool, question: str) -> dict[str, dict]:
    """One picture's row in each file. first: the right answer is the judge's Answer 1."""
    image, verdict = str(path.resolve()), f"<answer>Answer {1 if first else 2} is better</answer>"
    return {
        # Prompts: <image> says where the picture stands; `answer` is what the accuracy reward compares with.
        "prompts": {"prompt": f"<image>{question}", "image": image, "answer": answer},
        # Pairs: two answers to the same prompt, the better one is `chosen`.
        "pairs": {
            "prompt": f"<image>{question}",
            "image": image,
            "chosen": f"<answer>{answer}</answer>",
            "rejected": f"<answer>{wrong}</answer>",
        },
        # For a judge: two candidates, and what it is to write about them (reasoning in <think> tags may come before).
        "judged": {
            "prompt": question,
            "image": image,
            "answer_0": answer if first else wrong,
            "answer_1": wrong if first else answer,
            "response": verdict,
        },
    }


def main(args: Args) -> None:
    folder = Path(args.pictures)
    files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in ENDINGS)
    classes = sorted({path.parent.name for path in files})
    if len(classes) < 2:
        raise SystemExit(f"{folder} needs at least two subfolders with pictures, it has {len(classes)}")
    rng = random.Random(args.seed)
    rng.shuffle(files)
    held_out = max(1, round(len(files) * args.test_share))
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for ending, part in (("_test", files[:held_out]), ("", files[held_out:])):
        rows = []
        for path in part:
            wrong = rng.choice([name for name in classes if name != path.parent.name])
            rows.append(make_rows(path, path.parent.name, wrong, rng.random() < 0.5, args.question))
        for kind in ("prompts", "pairs", "judged"):
            lines = [json.dumps(row[kind], ensure_ascii=False) + "\n" for row in rows]
            (output / f"{kind}{ending}.jsonl").write_text("".join(lines))
    print(f"{len(files)} pictures of {len(classes)} classes, {held_out} held out: six files in {output}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
