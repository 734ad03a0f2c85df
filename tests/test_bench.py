"""tools/bench.py: its cases are the same work for both sides, and our side of a step runs."""

import importlib
import sys

import pytest
from conftest import ROOT, TINY

sys.path.append(str(ROOT / "tools"))
import bench  # noqa: E402


def test_cases_are_valid_flags_and_the_same_work_for_trl():
    args = bench.Args(parts=())
    cases = {name: case for make_cases in bench.CASES.values() for name, case in make_cases(args).items()}
    for case in cases.values():
        script = importlib.import_module(case["script"])
        script_args = script.Args(**case["flags"], total_steps=2)
        script.fill_defaults(script_args)
        script.check_args(script_args)
    ranked, (first, *_) = cases["ranked_4"], cases["pairs_100"]["rows"]
    assert len(ranked["rows"]) == 4 and len(ranked["trl_rows"]) == 4 * 6
    chosen, rejected = first["responses"]
    same = {"prompt": first["prompt"], "chosen": chosen, "rejected": rejected}
    assert cases["pairs_100"]["trl_rows"][0] == same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vlm_64", "pairs_100", "different"])
def test_our_side_reports_each_step(name):
    """The functions that bench.py wraps still exist."""
    args = bench.Args(parts=(), threads=1, text_model=TINY, vlm=TINY, steps=1)
    cases = bench.rloo_cases(args) | bench.reward_cases(args) | bench.sft_cases(args)
    case = cases[name] | {"steps": 2}
    if name == "vlm_64":
        case["flags"] |= {"prompts_per_rollout": 4, "train_batch_size": 32}
    steps = bench.run_sides(args, case, ("cleanrft",))["cleanrft"]
    assert len(steps) == 2 and min(step["seconds"] for step in steps) > 0
    assert all(step["grad_norm"] > 0 and step["peak_bytes"] > 1e8 for step in steps)
    assert (len(steps[0]["prompt_ids"]) == 4) == (name == "vlm_64")
