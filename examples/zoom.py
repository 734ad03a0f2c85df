"""A tool that returns an image: the prompt has a thumbnail, and <zoom> shows the original at a cost.

    python examples/zoom.py zoom                # writes train.jsonl, test.jsonl and demonstrations.jsonl
    python grm_sft.py --dataset zoom/demonstrations.jsonl --total-steps 300 --eval-steps 0 --run-name zoom_sft
    python rloo.py --model runs/zoom_sft/checkpoint-300 --dataset zoom/train.jsonl \\
        --eval-dataset zoom/test.jsonl --environment examples/zoom.py:Zoom --max-turns 2 \\
        --max-response-length 64 --rewards accuracy examples/zoom.py:calls --reward-weights 1 -0.2 \\
        --eval-prompts 100 --eval-num-samples 4 --total-steps 40

The questions are those of easy-VQA about colors and shapes. A thumbnail of 4 x 4 pixels, each the darkest
of 16 x 16, shows the color, but rarely the shape. The demonstrations call the tool for half of the
questions, chosen at random.
"""

import json
import random
import sys
from pathlib import Path

import easy_vqa
import numpy as np
from PIL import Image


class Zoom:
    def reset(self, original: str, **row) -> None:
        self.original = original
        self.num_calls = 0

    def step(self, response: str) -> list[dict] | None:
        if response != "<zoom>" or self.num_calls == 1:
            return None  # the end
        self.num_calls += 1
        return [{"type": "image", "image": Image.open(self.original)}]


def calls(environments: list[Zoom] | None, topic: list[str], log_metric, **columns) -> list[float]:
    """Number of calls; 0 without --environment. Also logs its mean for each topic."""
    counts = [environment.num_calls for environment in environments or []] or [0] * len(topic)
    for name, count in zip(topic, counts):
        log_metric(f"calls_{name}", count)
    return counts


def make_demonstration(row: dict, zoom: bool) -> dict:
    texts = ["<image>" + row["prompt"], f"<answer>{row['answer']}</answer>"]
    if zoom:
        texts[1:1] = ["<zoom>", "<image>"]
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    return {"messages": messages, "images": [row["image"], row["original"]] if zoom else [row["image"]]}


def main(output_dir: Path) -> None:
    files = {}
    for split in ("train", "test"):
        (output_dir / split).mkdir(parents=True, exist_ok=True)
        files[split] = []
        paths = getattr(easy_vqa, f"get_{split}_image_paths")()
        for i, path in paths.items():
            blocks = np.asarray(Image.open(path).convert("RGB")).reshape(4, 16, 4, 16, 3)
            Image.fromarray(blocks.min(axis=(1, 3))).save(output_dir / split / f"{i}.png")
        for prompt, answer, i in zip(*getattr(easy_vqa, f"get_{split}_questions")()):
            if prompt.startswith("what"):
                row = {"prompt": prompt, "image": f"{split}/{i}.png", "answer": answer}
                topic = "color" if "color" in prompt else "shape"
                files[split].append(row | {"original": str(paths[i]), "topic": topic})
    rng = random.Random(0)
    files["demonstrations"] = [make_demonstration(row, rng.random() < 0.5) for row in files["train"]]
    for name, lines in files.items():
        (output_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
