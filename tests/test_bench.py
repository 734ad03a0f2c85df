"""tools/bench.py: arguments, cases, and short runs of both sides."""

import importlib
import sys

import pytest
import torch
import tyro
from conftest import ROOT, TINY

import rloo

sys.path.append(str(ROOT / "tools"))
import bench  # noqa: E402


def test_invalid_arguments_are_refused():
    for words in (["rloo", "--clock", "cpu"], ["reward", "--cases", "nonsense"]):
        with pytest.raises(SystemExit, match=r"^--c\w+ "):
            bench.main(tyro.cli(bench.Args, args=words))


def test_cases_are_valid_flags_and_the_same_work_for_trl():
    args = bench.Args(parts=())
    points = {}
    cases = bench.rloo_cases(args) | bench.reward_cases(args) | bench.sft_cases(args) | bench.bare_cases(args)
    for curve, x, case in bench.curve_cases(args):
        points.setdefault(curve, []).append((x, case))
        cases[f"{curve} {x}"] = case
    for case in cases.values():
        script = importlib.import_module(case["script"])
        script.check_args(script.Args(**case["flags"], total_steps=2))
    assert points.keys() == bench.CURVES.keys()
    assert all([x for x, _ in curve] == sorted({x for x, _ in curve}) for curve in points.values())
    assert all(case["G"] == x for curve in points.values() for x, case in curve)
    ranked, pairs = cases["ranked_4"], cases["pairs_100"]
    assert len(ranked["rows"]) == 4 and len(ranked["trl_rows"]) == 4 * 6 and len(pairs["trl_rows"]) == 16
    first = pairs["rows"][0]
    chosen, rejected = first["responses"]
    assert pairs["trl_rows"][0] == {"prompt": first["prompt"], "chosen": chosen, "rejected": rejected}
    num_images = [len({row["image"] for row in cases[name]["rows"]}) for name in ("different", "by_image")]
    assert num_images[0] == 64 and num_images[1] < 16


@pytest.mark.slow
def test_both_sides_run_the_same_steps():
    """The functions that bench.py wraps still exist, and the parts of a step add up."""
    flags = {"model": TINY, "rollout_batch_size": 8, "num_samples_per_prompt": 4, "train_batch_size": 4}
    flags |= {"max_response_length": 8, "eval_prompts": 2, "num_epochs": 2}
    args = bench.Args(parts=("bare",), threads=1, vlm=TINY)
    case = {"script": "rloo", "flags": flags, "steps": 2, "G": 4}
    steps = bench.run_sides(args, case, ("cleanrft", "bare"))
    assert [len(side) for side in steps.values()] == [2, 2]
    for cleanrft, step in zip(*steps.values()):
        assert (cleanrft["loss"], cleanrft["grad_norm"]) == (step["loss"], step["grad_norm"])
        assert step["packs"] == 4  # two optimizer steps in each of two epochs
        parts = [step[f"update_{part}"] for part in bench.PARTS]
        assert min(parts) > 0 and sum(parts) < step["update"] < step["phase"] < step["seconds"]
        assert step["bare_score"] > 0 and step["bare_update"] > 0
        parameters = sum(p.numel() for p in rloo.load_model(TINY, torch.float32).parameters())
        assert 3 * parameters * step["tokens"] < step["flops"] < 60 * parameters * step["tokens"]
