"""Convert datasets of judgments to rows for grm_sft.py, one JSON object per line:

    python examples/convert_judgments.py HPDv3/train.json judgments.jsonl
    python examples/convert_judgments.py ImageGen-CoT-Reward-5K.json OmniReward-Bench.parquet mixed.jsonl

The last argument is the output file. The dataset is recognized by its columns: HPDv3 (path1, the preferred
image; path2; prompt), ImageGen-CoT-Reward-5K (images, conversations), or the text-to-image part of
OmniReward-Bench (response1_path, response2_path, criteria, criteria_preference). Relative paths become
absolute. HPDv3 always lists the preferred image first, so the order is randomized.
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
VERDICT_PATTERN = "<answer>(?:Image ([12]) is better|Both [a-z ]*equally good)</answer>"
PREFERENCES = {"a": "1", "b": "2", "c": "tie", "response1": "1", "response2": "2", "tie": "tie"}


@dataclass
class Args:
    files: tyro.conf.Positional[tuple[Path, ...]]  # .json, .jsonl or .parquet inputs, then the .jsonl output.
    seed: int = 0  # Random seed for the order of HPDv3's images.


def convert(row: dict, rng: random.Random) -> dict:
    """Columns prompt, image_1, image_2, verdict (1, 2 or tie), and if the dataset has it, reasoning and
    swapped_reasoning, for the other order of the images (None: grm_sft.py trains the first order only)."""
    reasoning = {}
    if "path1" in row:
        images = [row["path1"], row["path2"]]
        verdict = rng.choice("12")
        if verdict == "2":
            images.reverse()
        prompt = INSTRUCTION.format(prompt=row["prompt"])
    elif "conversations" in row:
        images = row["images"]
        turns = [turn["value"] for turn in row["conversations"]]
        prompt = turns[0].replace("<image>", "").strip()
        verdict = re.search(VERDICT_PATTERN, turns[-1])[1] or "tie"
        thought = re.search("<think>(.*?)</think>", turns[-1], re.DOTALL)
        if thought:
            reasoning = {"reasoning": thought[1], "swapped_reasoning": swap_references(thought[1])}
    else:
        images = [row["response1_path"], row["response2_path"]]
        prompt = f"{INSTRUCTION.format(prompt=row['prompt'])}\n{row['criteria']}"
        verdict = PREFERENCES[row["criteria_preference"].strip().lower()]
    return {"prompt": prompt, "image_1": images[0], "image_2": images[1], "verdict": verdict, **reasoning}


def swap_references(reasoning: str) -> str | None:
    """The reasoning with the names "image 1" and "image 2", "first image" and "second image" exchanged.

    None if it has several words but no such name, or if it may name a candidate in another way, because
    a half-rewritten rationale is wrong. Words such as "both" and "the other" stay.

    "Image 1 has 3 cats" -> "Image 2 has 3 cats", "Image 1 and 2" -> None, "the left one" -> None
    """
    names = r"(?i:(?<=\bimage ))[12]\b(?![./]\d)|\b(?:[Ff]irst|[Ss]econd)(?= (?i:image)\b)"
    rest, num_names = re.subn(names, ",", reasoning)  # not "", or "Image 2 a box" becomes "Image a box"
    other_names = r"""(?ix)
        (?<![\d./])[12](?![./]?\d)  # a lone 1, Images 1 and 2, img1; not 8/10, 1.5, 12
        | \b(?:image|img|picture|photo|figure|option|candidate|response|answer|assistant|model|number)s?
          [ _#:-]*(?:one|two|II?|a)\b  # Image one, Image II, option a
        | \b(?:(?-i:A)|B)\b
        | \b(?:first|second|former|latter|previous|next|last|respectively)\b
        | \b(?:left(?:most)?|right(?:most)?|top|bottom|upper|lower|above|below)\b
        | [^\W\d_a-z]  # a letter of another language
    """
    if re.search(other_names, rest) or (num_names == 0 and len(reasoning.split()) > 1):
        return None
    exchanged = {"1": "2", "first": "second", "First": "Second"}
    exchanged |= {other: name for name, other in exchanged.items()}
    return re.sub(names, lambda name: exchanged[name[0]], reasoning)


def main(args: Args) -> None:
    import datasets

    *sources, target = args.files
    rng = random.Random(args.seed)
    count = 0
    with target.open("w") as file:
        for source in sources:
            file_format = source.suffix[1:].replace("jsonl", "json")
            for row in datasets.load_dataset(file_format, data_files=str(source), split="train"):
                row = convert(row, rng)
                row |= {name: str(source.resolve().parent / row[name]) for name in ("image_1", "image_2")}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    print(f"{count} rows in {target}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
