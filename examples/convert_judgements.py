"""Data sets of judgements -> rows for grm_sft.py, one JSON object per line:

    python examples/convert_judgements.py HPDv3/train.json judgements.jsonl
    python examples/convert_judgements.py ImageGen-CoT-Reward-5K.json OmniReward-Bench.parquet mixed.jsonl

Columns tell which data set a file is of: HPDv3 (path1, the preferred one, path2, prompt),
ImageGen-CoT-Reward-5K (images, conversations), or the text-to-image part of OmniReward-Bench (response1_path,
response2_path, criteria, criteria_preference). Paths, relative to the file, become absolute. Sides of HPDv3
are drawn.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

INSTRUCTION = """Two images were made for the prompt below. Compare how well they follow it and how good they
look, and say which one is better.
Prompt: {prompt}"""
PREFERENCES = {"a": "1", "b": "2", "c": "tie", "response1": "1", "response2": "2", "tie": "tie"}


@dataclass
class Args:
    files: tyro.conf.Positional[tuple[Path, ...]]  # .json, .jsonl or .parquet, and the .jsonl to write
    seed: int = 0  # of the sides of HPDv3


def convert(row: dict, rng: random.Random) -> dict:
    """A row of one of the three data sets -> prompt, image_0, image_1, verdict, maybe reasoning."""
    if "path1" in row:
        images, verdict = [row["path1"], row["path2"]], rng.choice("12")
        prompt, extra = INSTRUCTION.format(prompt=row["prompt"]), {}
        images = images if verdict == "1" else images[::-1]
    elif "conversations" in row:
        images, turns = row["images"], [turn["value"] for turn in row["conversations"]]
        prompt, said = turns[0].replace("<image>", "").strip(), turns[-1]
        found = re.search("<answer>(?:Image ([12]) is better|Both [a-z ]*equally good)</answer>", said)
        verdict, thought = found[1] or "tie", re.search("<think>(.*?)</think>", said, re.DOTALL)
        extra = {"reasoning": thought[1]} if thought else {}
    else:
        images, extra = [row["response1_path"], row["response2_path"]], {}
        prompt = f"{INSTRUCTION.format(prompt=row['prompt'])}\n{row['criteria']}"
        verdict = PREFERENCES[row["criteria_preference"].strip().lower()]
    return {"prompt": prompt, "image_0": images[0], "image_1": images[1], "verdict": verdict, **extra}


def main(args: Args) -> None:
    import datasets

    *sources, target = args.files
    rng, count = random.Random(args.seed), 0
    with target.open("w") as file:
        for source in sources:
            kind = source.suffix[1:].replace("jsonl", "json")
            for row in datasets.load_dataset(kind, data_files=str(source), split="train"):
                row = convert(row, rng)
                row |= {name: str(source.resolve().parent / row[name]) for name in ("image_0", "image_1")}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    print(f"{count} rows in {target}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
