"""Datasets for all four scripts, from a directory with one subdirectory of images per class (cats/1.png):

    python examples/custom_data.py images data
    python rloo.py --dataset data/prompts.jsonl --eval-dataset data/prompts_test.jsonl      # or ppo_vl.py
    python reward_bt.py --dataset data/pairs.jsonl --eval-datasets test=data/pairs_test.jsonl
    python grm_sft.py --dataset data/judged.jsonl --eval-dataset data/judged_test.jsonl

The right answer is the name of the class, the wrong one the name of another class. One image in five goes
to the test files. Your own data needs no script: write one JSON object per line with these columns.
"""

import json
import random
import sys
from pathlib import Path

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
QUESTION = "What does the image show?"


def make_rows(path: Path, right: str, wrong: str, verdict: int) -> dict[str, dict]:
    """The row of one image in each file. verdict (1 or 2): which of the judge's candidates is right."""
    question = {"prompt": QUESTION, "image": str(path.resolve())}
    candidates = {f"answer_{verdict}": right, f"answer_{3 - verdict}": wrong}
    return {
        # For rloo.py and ppo_vl.py: the accuracy reward compares responses with `answer`.
        "prompts": question | {"answer": right},
        # For reward_bt.py: two responses to the same prompt; `chosen` is the better one.
        "pairs": question | {"chosen": f"<answer>{right}</answer>", "rejected": f"<answer>{wrong}</answer>"},
        # For grm_sft.py: two candidates, and which of them is better: 1, 2 or tie.
        "judged": question | candidates | {"verdict": str(verdict)},
    }


def main(image_dir: Path, output_dir: Path) -> None:
    paths = sorted(path for path in image_dir.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES)
    classes = sorted({path.parent.name for path in paths})
    if len(classes) < 2:
        raise SystemExit(f"{image_dir} needs at least two subdirectories with images, but has {len(classes)}")
    rng = random.Random(0)
    rng.shuffle(paths)
    num_test = max(1, len(paths) // 5)
    output_dir.mkdir(parents=True, exist_ok=True)
    for suffix, split in (("_test", paths[:num_test]), ("", paths[num_test:])):
        rows = []
        for path in split:
            wrong = rng.choice([name for name in classes if name != path.parent.name])
            rows.append(make_rows(path, path.parent.name, wrong, rng.choice((1, 2))))
        for name in rows[0]:
            lines = [json.dumps(row[name], ensure_ascii=False) + "\n" for row in rows]
            (output_dir / f"{name}{suffix}.jsonl").write_text("".join(lines))
    print(f"{len(paths)} images of {len(classes)} classes, {num_test} for testing: six files in {output_dir}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
