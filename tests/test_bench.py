"""tools/bench.py: its parts parse, its cases are jobs of the scripts, its tables and picture; the bare work, run."""

import importlib
import sys

import pytest
import torch
import tyro
from conftest import ROOT, TINY

import rloo

sys.path.append(str(ROOT / "tools"))
import bench  # noqa: E402

BARE = dict(tokens=4000, packs=4, bare_update=0.9, bare_score=0.6, update=1.0, score=0.5, phase=1.6)
BARE |= {f"update_{name}": 0.2 for name in bench.PARTS} | {"flops": 40e9, "peak_flops": 80e9}


def test_what_can_not_be_measured_is_refused():
    for words in (["rloo", "--clock", "cpu"], ["reward", "--cases", "nonsense"]):
        with pytest.raises(SystemExit, match=r"^--c\w+ "):
            bench.main(tyro.cli(bench.Args, args=words))


def test_cases_are_flags_of_the_scripts_and_the_same_work_for_trl():
    args, points = bench.Args(parts=()), {}
    cases = bench.rloo_cases(args) | bench.reward_cases(args) | bench.sft_cases(args) | bench.bare_cases(args)
    for curve, x, case in bench.curve_cases(args):
        points.setdefault(curve, []).append((x, case))
        cases[f"{curve} {x}"] = case
    for case in cases.values():
        script = importlib.import_module(case["script"])
        script.check_args(script.Args(**case["flags"], total_steps=2))
    assert points.keys() == bench.CURVES.keys()
    assert all([x for x, _ in own] == sorted({x for x, _ in own}) for own in points.values())
    assert all(case["G"] == x for own in points.values() for x, case in own)
    ranked, pairs = cases["ranked_4"], cases["pairs_100"]
    assert len(ranked["rows"]) == 4 and len(ranked["trl_rows"]) == 4 * 6 and len(pairs["trl_rows"]) == 16
    first = pairs["rows"][0]
    chosen, rejected = first["responses"]
    assert pairs["trl_rows"][0] == {"prompt": first["prompt"], "chosen": chosen, "rejected": rejected}
    shown = [len({row["image"] for row in cases[name]["rows"]}) for name in ("different", "by_picture")]
    assert shown[0] == 64 and shown[1] < 16


def test_ratios_are_those_of_single_steps():
    steps = [{**BARE, "update": x, "peak_flops": y} for x, y in ((1.0, 80e9), (1.2, 100e9), (0.9, 90e9))]
    result = bench.summarize_bare(steps)
    assert result["update_speed"] == pytest.approx(0.9)  # the median of 0.9, 0.75 and 1
    assert result["phase_speed"] == pytest.approx(0.9 / 1.6)
    assert result["work_speed"] == pytest.approx(1.5 / 1.6)
    assert result["update_mfu"] == pytest.approx(40 / 1.0 / 100)  # of the fastest product in the run
    ours, theirs = ([{"seconds": x} for x in own] for own in ((1.0, 2.0, 4.0), (8.0, 10.0, 12.0)))
    result = bench.ratios(ours, theirs, "seconds", "step")
    assert (result["step_ours"], result["step_trl"], result["step_ratio"]) == (2.0, 10.0, 5.0)
    assert result["step_steps"]["ratio"] == [8.0, 5.0, 3.0]


def test_tables_and_picture_of_made_up_figures(tmp_path):
    sides = {"step_ours": 2.0, "step_trl": 8.0, "step_ratio": 4.0, "memory_ours": 1e9, "memory_trl": 3e9}
    results = [
        {"part": "bare rloo_vlm", **bench.summarize_bare([dict(BARE)])},
        {"part": "rloo vlm_64", **sides},
        {"part": "memory", "memory_dense": 14e9, "memory_chunked": 7e8, "ratio": 20.0},
    ]
    for curve in bench.CURVES:
        for x in (2, 8):
            own = dict(seconds_ours=x, update_ours=0.5, memory_ours=x * 1e8, seconds_trl=2, memory_trl=2e8)
            results.append({"part": "curves", "curve": curve, "x": x, **own})
    table = bench.report({"torch": "2.13.0", "cores": 2}, results)
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert ["bare rloo_vlm", "4000", "0.90", "1.00", "90%", "1.50", "1.60", "94%"] in rows
    assert ["bare rloo_vlm", "0.50", "0.20", "0.20", "0.20", "0.20", "0.20"] in rows
    assert ["bare rloo_vlm", "40", "80", "50%", "56%"] in rows
    assert ["rloo vlm_64", "2.00", "8.00", "4.00", "", "", "", "1.00", "3.00"] in rows
    assert ["curves", "group_vlm", "8", "8.00", "2.00", "0.50", "", "0.80", "0.20"] in rows
    assert ["memory", "14.00", "0.70", "20.00"] in rows
    for head, *rest in bench.TABLES.values():
        assert head.count("|") == len(rest[0])
    bench.draw_curves(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_sides_take_steps_and_the_bare_work_is_that_of_the_script():
    """The scripts' hooks are still where the bench looks for them, and the parts of a step add up."""
    flags = {"model": TINY, "rollout_batch_size": 8, "num_samples_per_prompt": 4, "train_batch_size": 4}
    flags |= {"max_response_length": 8, "eval_samples": 2, "num_iterations": 2}
    args = bench.Args(parts=("bare",), threads=1, vlm=TINY)
    case = {"script": "rloo", "flags": flags, "steps": 2, "G": 4}
    steps = bench.run_sides(args, case, ("ours", "bare"))
    assert [len(own) for own in steps.values()] == [2, 2]
    for ours, step in zip(*steps.values()):
        assert (ours["loss"], ours["grad_norm"]) == (step["loss"], step["grad_norm"])
        assert step["packs"] == 4  # two optimizer steps, twice
        inside = [step[f"update_{part}"] for part in bench.PARTS]
        assert min(inside) > 0 and sum(inside) < step["update"] < step["phase"] < step["seconds"]
        assert step["bare_score"] > 0 and step["bare_update"] > 0
        parameters = sum(p.numel() for p in rloo.load_model(TINY, torch.float32).parameters())
        assert 3 * parameters * step["tokens"] < step["flops"] < 60 * parameters * step["tokens"]
