"""Check a dataset and a reward on a CPU, without the model's weights. The flags are those of the run:

    python examples/check_data.py --dataset my.jsonl --rewards my_reward.py:accuracy

By default, 2,000 random rows are checked, because opening all images of a large dataset takes hours, and a
reward may cost money: it gets two responses per row. Warnings say which rows rloo.py would skip, and why. For
each of the others, "Answer: " followed by the column `answer` should get a higher reward than an empty
response. Rows are counted from 0.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import rloo  # noqa: E402


@dataclass
class Args(rloo.Args):
    rows: int = 2000  # Random rows to check; 0: all.


args = tyro.cli(Args, description=__doc__)
rloo.fill_defaults(args)
config = transformers.AutoConfig.from_pretrained(args.model)
is_vlm = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
auto = transformers.AutoModelForImageTextToText if is_vlm else transformers.AutoModelForCausalLM
with torch.device("meta"):  # positions depend on the model's class, not on its weights
    model = auto.from_config(config)
processor = transformers.AutoProcessor.from_pretrained(args.model)
data = rloo.PromptDataset(args, args.dataset, args.dataset_split, model, processor)
functions = {x.rpartition(":")[2]: rloo.load_callable("--rewards", x, rloo.REWARDS) for x in args.rewards}
response = rloo.Response(torch.tensor([0]), torch.tensor([0.0]), truncated=False)
shuffled = np.random.default_rng(args.seed).permutation(len(data.rows)).tolist()
checked = sorted(shuffled[: args.rows or None])
lengths = {}  # by row
wrong = {name: [] for name in functions}  # rows whose answer scores no more than an empty response
for i in checked:
    if prompt := data.try_encode(i):
        lengths[i] = prompt.length
        answer = prompt.row.get("answer")
        texts = ["" if answer is None else f"Answer: {answer}", ""]
        state = transformers.TrainerState()
        rewards, *_ = rloo.score_responses(functions, [prompt] * 2, [response] * 2, texts, state)
        for name, (right, empty) in rewards.items():
            wrong[name] += [] if right > empty else [i]
print(f"{len(lengths)} of {len(checked)} checked rows can be used; the dataset has {len(data.rows)}")
percentiles = np.percentile(list(lengths.values()), (50, 95, 100)) if lengths else [0] * 3
print("tokens per prompt: median {:.0f}, 95% up to {:.0f}, longest {:.0f}".format(*percentiles))
for name, rows in wrong.items():
    print(f"{name}: {len(rows)} rows whose answer gets no reward {rows[:10]}")
