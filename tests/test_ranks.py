"""Two ranks and all ZeRO stages, in all four scripts: the metrics and weights of one plain rank.

Odd numbers of rows, so that shares are unequal; rows with and without pictures, so that a rank, or a step, may have none;
steps of one prompt and of three packs, so that a rank has nothing to learn from. Importing takes longer than a run: two
processes do all of them, one after the other.
"""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, read_jsonl, to_argv, write_jsonl
from safetensors.torch import load_file

ROLLOUT = {
    "total_steps": 2, "rollout_batch_size": 12, "num_samples_per_prompt": 4, "train_batch_size": 12, "eval_num_samples": 2,
    "max_response_length": 8, "kl_coef": 0.1,
}  # fmt: skip
ONE_PROMPT = {"rollout_batch_size": 8, "train_batch_size": 4}  # a step of the optimizer
SFT = {"max_steps": 2, "batch_size": 3, "max_response_length": 8}
PAIRS = {"max_steps": 2, "batch_size": 3}
# name: (script, ZeRO stages, flags); one rank has them too
RUNS = {
    "ppo_vl": ("ppo_vl", (0, 2, 3), {**ROLLOUT, "num_ppo_epochs": 2, "ema_beta": 0.5}),
    "ppo_vl, one network": ("ppo_vl", (2,), {**ROLLOUT, "critic_share_backbone": True, "kl_loss": True}),
    "ppo_vl, one prompt": ("ppo_vl", (3,), {**ROLLOUT, **ONE_PROMPT}),
    "rloo": ("rloo", (0, 2, 3), {**ROLLOUT, "num_iterations": 2, "ref_sync_steps": 1}),
    "rloo, one prompt": ("rloo", (3,), {**ROLLOUT, **ONE_PROMPT}),
    "grm_sft": ("grm_sft", (0, 2, 3), SFT),
    "grm_sft, small packs": ("grm_sft", (2,), {**SFT, "max_length": 63, "micro_batch_tokens": 63}),
    "reward_bt": ("reward_bt", (0, 2, 3), PAIRS),
    "reward_bt, small packs": ("reward_bt", (3,), {**PAIRS, "max_length": 59, "micro_batch_tokens": 59}),
}
CASES = [
    (name, stage, ranks)
    for name, (_, stages, _) in RUNS.items()
    for stage in stages
    for ranks in ((1, 2) if stage > 0 else (2,))
]
PER_RANK = {"train/packed_tokens"}  # a prompt counts on each rank that has some of its answers


def write_data(folder: Path, rows: list[dict]) -> None:
    """Seven rows for each script, every third without a picture, and a reward."""
    some = [{"prompt": row["prompt"], "answer": row["answer"], "images": [row["image"]]} for row in rows[:7]]
    some[1]["images"] = some[4]["images"] = []
    verdicts = [f"<answer>Answer {i % 2 + 1} is better</answer>" for i in range(7)]
    answers = [[row["answer"], "none"][:: 1 - 2 * (i % 2)] for i, row in enumerate(some)]
    kinds = {
        "ppo_vl": some,
        "rloo": some,
        "reward_bt": [{**row, "chosen": row["answer"], "rejected": "?" * (i % 3 + 1)} for i, row in enumerate(some)],
        "grm_sft": [
            {"prompt": row["prompt"], "images": row["images"], "answer_0": a, "answer_1": b, "response": verdict}
            for row, (a, b), verdict in zip(some, answers, verdicts)
        ],
    }
    for script, own in kinds.items():
        write_jsonl(folder / f"{script}.jsonl", own)
    reward = "def score(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    (folder / "reward.py").write_text(reward)


def by_prompt(module):
    """HFSampler.sample whose responses depend on the prompt alone, not on how ranks share out a batch."""

    def sample(self, rows, samples, num_samples, temperature, generator):
        parts = [], [], []
        for one in samples:
            own = torch.Generator().manual_seed(int(one["prompt_ids"].sum()) + self.version)
            model = self.rollout_model or self.model
            drawn = module.generate(model, [one], num_samples, self.args, self.end_ids, temperature, own)
            for everything, part in zip(parts, drawn):
                everything += part
        return parts

    return sample


def run_all(folder: Path, world_size: int) -> None:
    """All runs of the table, in this process. One rank does stage 0 of each, which the others are compared with."""
    for name, (script, stages, own) in RUNS.items():
        module, data = importlib.import_module(script), folder / f"{script}.jsonl"
        base = {
            "model": TINY, "dataset": data, "eval_dataset": data, "eval_datasets": [f"own={data}"], "eval_samples": 5,
            "eval_steps": 2, "logging_steps": 1, "learning_rate": 1e-4, "critic_learning_rate": 1e-4, "warmup_steps": 0,
            "rewards": [f"{folder}/reward.py:score"], "reward_weights": [1], "freeze_vision": False,
            "freeze_projector": False, "generation_batch_size": 4, "seed": 3, "output_dir": folder / f"ranks{world_size}",
        }  # fmt: skip
        base = {flag: value for flag, value in base.items() if flag in module.Args.__dataclass_fields__}
        with pytest.MonkeyPatch.context() as patch:
            for drawing in ("curves", "samples", "judged", "gap", "calibration", "worst_pairs"):
                patch.setattr(module, f"draw_{drawing}", lambda *args: None, raising=False)
            if script in ("ppo_vl", "rloo"):
                patch.setattr(module.HFSampler, "sample", by_prompt(module))
            for stage in stages if world_size > 1 else sorted({0, *stages}):
                flags = {**base, **own, "zero_stage": stage, "run_name": f"{name}-{stage}"}
                module.main(module.parse_args(to_argv(flags)))


RANK = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from pathlib import Path
import torch.distributed as dist
import conftest, test_ranks
dist.destroy_process_group, destroy = lambda *args: None, dist.destroy_process_group
test_ranks.run_all(Path(sys.argv[1]), 2)
destroy()
"""


@pytest.fixture(scope="module")
def runs(vqa_rows, tmp_path_factory) -> Path:
    """Folder of all runs, of one rank and of two."""
    from test_ppo_update import torchrun

    folder = tmp_path_factory.mktemp("ranks")
    write_data(folder, vqa_rows)
    (folder / "rank.py").write_text(RANK.format(root=str(ROOT)))
    run_all(folder, 1)
    torchrun(2, folder / "rank.py", folder)
    return folder


def weights_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(folder, name) -> weight, of every model in the last checkpoint."""
    files = sorted((folder / "checkpoint-2").rglob("*.safetensors"))
    return {(file.parent.name, name): x.float() for file in files for name, x in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name, stage, ranks", CASES)
def test_ranks_and_stages_have_the_same_metrics_and_weights(name, stage, ranks, runs):
    one, other = runs / f"ranks1/{name}-0", runs / f"ranks{ranks}/{name}-{stage}"
    pairs = list(zip(read_jsonl(one / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl"), strict=True))
    assert [a["train/step"] for a, _ in pairs] == [0, 1, 2]
    for a, b in pairs:
        assert a.keys() == b.keys()
        for key in (key for key in a.keys() - PER_RANK if not key.startswith("time/")):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5), f"{key} at step {a['train/step']}"
    assert all(m["train/grad_norm"] > 0 for m, _ in pairs[1:])
    for file in (one / "eval").glob("eval_step_0.json"):
        both = [json.loads((folder / "eval" / file.name).read_text()) for folder in (one, other)]
        assert sorted(map(json.dumps, both[0])) == sorted(map(json.dumps, both[1]))
    start, a, b = load_file(f"{TINY}/model.safetensors"), weights_of(one), weights_of(other)
    assert a.keys() == b.keys() and len(a) >= len(start)
    apart = math.sqrt(sum(float((x - b[key]).square().sum()) for key, x in a.items()))
    moved = math.sqrt(sum(float((x - start[key[1]].float()).square().sum()) for key, x in a.items() if key[1] in start))
    assert apart < 0.02 * moved  # Adam makes much of gradients that are rounding alone
