"""tools/bench.py: its parts parse, its cases are jobs of the scripts, its tables and its picture; the bare work, run."""

import importlib.util
import json
import sys
from typing import get_args, get_type_hints

import pytest
import torch
import tyro
from conftest import ROOT, TINY

import rloo

spec = importlib.util.spec_from_file_location("bench", ROOT / "tools/bench.py")
bench = sys.modules["bench"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)

PARTS = get_args(get_args(get_args(get_type_hints(bench.Args, include_extras=True)["parts"])[0])[0])
MACHINE = {"torch": "2.13.0", "cores": 2, "threads": 1}
BARE = {"tokens": 4000, "packs": 4, "bare_update": 0.9, "bare_score": 0.6, "update": 1.0, "score": 0.5, "phase": 1.6}
BARE |= {f"update_{name}": 0.2 for name in ("packing", "forward", "backward", "optimizer")}
BARE |= {"flops": 40e9, "peak_flops": 80e9}


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def test_every_part_parses():
    assert {"vlm", "memory", "bare", "rloo", "reward", "sft", "curves", "sync"} <= {*PARTS}
    for part in PARTS:
        words = [part, "--output", "runs/bench", "--clock", "cpu", "--threads", "1", "--cases", "a", "b"]
        args = tyro.cli(bench.Args, args=words)
        assert args.parts == (part,) and args.cases == ("a", "b") and args.output == "runs/bench"


@pytest.mark.parametrize("words", [["--clock", "cpu"], ["reward", "--cases", "nonsense"]])
def test_what_can_not_be_measured_is_refused(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    with pytest.raises(SystemExit, match=r"^--c\w+ "):
        bench.main(tyro.cli(bench.Args, args=words))


def test_speed_against_the_bare_work():
    steps = [
        {**BARE, "update": seconds, "peak_flops": peak} for seconds, peak in ((1.0, 80e9), (1.2, 100e9), (0.9, 90e9))
    ]
    result = bench.summarize_bare(steps)
    assert result["update_speed"] == pytest.approx(0.9)  # the median of 0.9, 0.75 and 1
    assert result["phase_speed"] == pytest.approx(0.9 / 1.6)
    assert result["work_speed"] == pytest.approx(1.5 / 1.6)
    assert result["update_mfu"] == pytest.approx(40 / 1.0 / 100)  # of the fastest product in the run
    assert result["packs"] == 4


def test_tables_of_made_up_figures():
    sides = {"step_ours": 2.0, "step_trl": 8.0, "step_ratio": 4.0, "memory_ours": 1e9, "memory_trl": 3e9}
    curve = {"curve": "prompts", "x": 8, "seconds_ours": 1.0, "update_ours": 0.5, "memory_ours": 5e8}
    results = [
        {"part": "bare rloo_vlm", **bench.summarize_bare([BARE])},
        {"part": "rloo vlm_64", **sides},
        {"part": "curves", **curve},
    ]
    rows = rows_of(bench.report(MACHINE, results))
    assert ["bare rloo_vlm", "4000", "0.90", "1.00", "90%", "1.50", "1.60", "94%"] in rows
    assert ["bare rloo_vlm", "0.50", "0.20", "0.20", "0.20", "0.20", "0.20"] in rows
    assert ["bare rloo_vlm", "40", "80", "50%", "56%"] in rows
    assert ["rloo vlm_64", "2.00", "8.00", "4.00", "", "", "", "1.00", "3.00"] in rows
    assert ["prompts", "8", "1.00", "", "0.50", "", "0.50", ""] in rows
    assert [rows[i] for i in range(len(rows)) if rows[i][0] == "---"] == [["---"] * n for n in (8, 7, 5, 8, 9)]


def test_picture_of_made_up_figures(tmp_path):
    results = [
        {"curve": curve, "x": x, "seconds_ours": x, "memory_ours": x * 1e8, "seconds_trl": 2 * x, "memory_trl": x * 2e8}
        for curve in bench.CURVES
        for x in (2, 4, 8)
    ]
    bench.draw_curves(results, tmp_path / "curves.png")
    bench.draw_curves(results[:6], tmp_path / "two.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"


def test_points_of_the_curves_change_what_their_axis_says(tmp_path, tiny_text_model, monkeypatch):
    monkeypatch.setattr(bench, "text_model_size", lambda args, name, hidden, layers: hidden)
    points = {}
    for curve, x, job, _ in bench.curve_points(bench.Args(vlm=TINY, text_model=tiny_text_model), tmp_path):
        points.setdefault(curve, []).append((x, job))
    assert points.keys() == bench.CURVES.keys()
    assert all([x for x, _ in own] == sorted({x for x, _ in own}) for own in points.values())
    assert all(job["G"] == x for name in ("group_text", "group_vlm") for x, job in points[name])
    assert all(len(job["prompts"]) == x for x, job in points["prompts"])
    assert all(job["max_new_tokens"] == job["min_new_tokens"] == x for x, job in points["response"])
    assert all(len(p["images"]) == x for x, job in points["images"] for p in job["prompts"])


@pytest.mark.slow
def test_bare_work_of_a_run(tmp_path, vqa, monkeypatch):
    """The script's own hooks are still where the bench looks for them, and the parts add up."""
    for name in ("packs_of_rank", "fill_logprobs", "optimizer_step", "update_policy", "draw_curves", "draw_samples"):
        monkeypatch.setattr(rloo, name, getattr(rloo, name))  # put back after the test, as everything below
    monkeypatch.setattr(rloo.Policy, "forward", rloo.Policy.forward)
    for name in ("draw_curves", "draw_samples", "draw_gap"):
        monkeypatch.setattr(rloo, name, lambda *args: None, raising=False)
    flags = {"model": TINY, "dataset": vqa, "rollout_batch_size": 8, "num_samples_per_prompt": 4, "train_batch_size": 4}
    flags |= {"max_response_length": 8, "eval_samples": 2, "num_iterations": 2}
    job = {"job": "bare", "script": "rloo", "steps": 1, "clock": "wall", "flags": flags}
    common = {"output_dir": str(tmp_path), "run_name": "run", "seed": 1, "eval_steps": 0}
    [step] = bench.run_bare(job, tmp_path, common)["steps"]
    assert step["packs"] == 4  # two optimizer steps, twice
    inside = sum(step[f"update_{name}"] for name in ("packing", "forward", "backward", "optimizer"))
    assert 0.5 * step["update"] < inside < step["update"] < step["phase"]
    assert step["score"] < step["phase"] and 0 < step["bare_score"] < step["bare_update"]
    parameters = sum(p.numel() for p in rloo.load_model(TINY, torch.float32).parameters())
    assert 3 * parameters * step["tokens"] < step["flops"] < 60 * parameters * step["tokens"]
    assert json.dumps(step)
