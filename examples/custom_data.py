"""Data of your own for all four scripts, from a folder with one subfolder of pictures per class (cats/1.png):

    python examples/custom_data.py pictures data
    python rloo.py --dataset data/prompts.jsonl --eval-dataset data/prompts_test.jsonl      # ppo_vl.py alike
    python reward_bt.py --dataset data/pairs.jsonl
    python grm_sft.py --dataset data/judged.jsonl --eval-dataset data/judged_test.jsonl

The right answer is the folder's name, a wrong one another folder's. A held-out picture, one in five, is in
none of the other files. Rows of your own need no script: one JSON object per line, with these columns.
"""

import json
import random
import sys
from pathlib import Path

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
QUESTION = "What does the picture show?"


def make_rows(path: Path, right: str, wrong: str, first: int) -> dict[str, dict]:
    """One picture's row in each file. first: which of the judge's answers, 0 or 1, is the right one."""
    asked = {"prompt": QUESTION, "image": str(path.resolve())}
    return {
        # Prompts: `answer` is what the accuracy reward compares with.
        "prompts": asked | {"answer": right},
        # Pairs: two answers to the same prompt, the better one is `chosen`.
        "pairs": asked | {"chosen": f"<answer>{right}</answer>", "rejected": f"<answer>{wrong}</answer>"},
        # For a judge: two candidates, and which of them, 1 or 2, is better (or tie).
        "judged": asked | {f"answer_{first}": right, f"answer_{1 - first}": wrong, "verdict": str(1 + first)},
    }


def main(pictures: Path, output: Path) -> None:
    files = sorted(path for path in pictures.glob("*/*") if path.suffix.lower() in ENDINGS)
    classes = sorted({path.parent.name for path in files})
    if len(classes) < 2:
        raise SystemExit(f"{pictures} needs at least two subfolders with pictures, it has {len(classes)}")
    rng = random.Random(0)
    rng.shuffle(files)
    held_out = max(1, len(files) // 5)
    output.mkdir(parents=True, exist_ok=True)
    for ending, part in (("_test", files[:held_out]), ("", files[held_out:])):
        rows = []
        for path in part:
            wrong = rng.choice([name for name in classes if name != path.parent.name])
            rows.append(make_rows(path, path.parent.name, wrong, rng.randrange(2)))
        for kind in rows[0]:
            lines = [json.dumps(row[kind], ensure_ascii=False) + "\n" for row in rows]
            (output / f"{kind}{ending}.jsonl").write_text("".join(lines))
    print(f"{len(files)} pictures of {len(classes)} classes, {held_out} held out: six files in {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
