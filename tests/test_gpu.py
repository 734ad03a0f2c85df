"""First contact with a GPU, in ten minutes: pytest -m gpu. At its end it prints a table for docs/benchmarks.md."""

import functools
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, largest_difference, read_jsonl, to_argv, weights_of

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU")]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
DEVICE = "cuda"
SMALL = {"total_steps": 3, "rollout_batch_size": 64, "train_batch_size": 32, "eval_samples": 16}
SMALL |= {"eval_steps": 0, "learning_rate": 3e-4, "warmup_steps": 0}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
CHILD = """
import importlib, os, sys, torch, tyro
script = importlib.import_module(sys.argv[1])

def deterministically(*given):
    torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum throws otherwise
    responses = generate(*given)
    torch.use_deterministic_algorithms(True)
    return responses

if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
    torch.use_deterministic_algorithms(True)
    generate, script.generate = script.generate, deterministically
if "NO_CHECKPOINT" in os.environ:
    script.save_checkpoint = lambda *given: None
script.main(tyro.cli(script.Args, args=sys.argv[2:]))
print(f"peak: {torch.cuda.max_memory_allocated() / 1e9} GB")
"""


@pytest.fixture
def row(record_property):
    """Adds a row to the table that conftest.py prints."""
    return lambda what, result: record_property("row", f"| {what} | {result} |")


@pytest.fixture
def launch(tmp_path):
    """A run in processes of its own -> its steps' metrics, what it printed, GB at the peak, its folder."""

    def go(script: str, ranks: int = 1, env: dict | None = None, **flags) -> SimpleNamespace:
        flags = {"output_dir": tmp_path, "run_name": "run"} | flags
        torchrun = (
            f"-m torch.distributed.run --standalone --no-python --nproc_per_node={ranks} {sys.executable}"
        )
        launcher = torchrun.split() if ranks > 1 else []
        command = [sys.executable, *launcher, "-c", CHILD, script, *to_argv(flags)]
        env = os.environ | (env or {})
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        folder = tmp_path / flags["run_name"]
        steps = [step for step in read_jsonl(folder / "metrics.jsonl") if step["train/step"] > 0]
        assert all(math.isfinite(value) for step in steps for value in step.values())
        peak = max(map(float, re.findall("peak: (.*) GB", done.stdout)))
        return SimpleNamespace(steps=steps, out=done.stdout, peak=peak, folder=folder)

    return go


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


# ---- the machine, attention, precision ----


def test_the_machine(row):
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    commit = subprocess.run("git describe --always".split(), cwd=ROOT, capture_output=True, text=True).stdout
    name = f"{NUM_GPUS} x {torch.cuda.get_device_name()}, {memory:.0f} GB"
    row(name, f"torch {torch.__version__}, {commit.strip()}")
    assert torch.cuda.get_device_capability() >= (8, 0), "varlen attention wants Ampere or later"


@pytest.mark.parametrize("heads, kv_heads, D, window", [(4, 2, 32, 0), (16, 16, 80, 0), (16, 2, 128, 64)])
def test_varlen_attention_is_sdpa(heads, kv_heads, D, window, row):
    """Of a packed layout, outputs and gradients: no further from fp32 than SDPA in bf16 is."""
    from torch.utils._pytree import tree_map_only
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    from common import attention

    groups, end = [], 0
    for lengths in ([300, 17, 1, 120], [5, 64, 64], [129], [700, 500, 0, 3]):  # a prompt, its responses
        groups.append([])
        for n in lengths:
            groups[-1].append(torch.arange(n) + end)
            end += n
    layout = tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), attention.make_layout(groups))
    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    mask = attention.ModelMask(function, torch.device(DEVICE))
    width = mask.window(layout.max_k)
    assert width == (window or layout.max_k)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, n, end, D, generator=generator) for n in (heads, kv_heads, kv_heads)]
    out_gradient = torch.randn(1, end, heads, D, generator=generator).to(DEVICE)

    def run(dtype: torch.dtype, attend) -> list[torch.Tensor]:
        inputs = [x.bfloat16().to(DEVICE, dtype).requires_grad_() for x in made]
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, out_gradient.to(dtype))]

    attend = functools.partial(attention._attend_sdpa, None)
    by_sdpa = functools.partial(attention._grouped_attention, attend, layout=layout, mask=mask)
    by_varlen = functools.partial(attention._varlen_attention, scaling=None, layout=layout, window=width)
    exact = run(torch.float32, by_sdpa)
    of_sdpa = [error(*pair) for pair in zip(run(torch.bfloat16, by_sdpa), exact)]
    of_varlen = [error(*pair) for pair in zip(run(torch.bfloat16, by_varlen), exact)]
    shown = " · ".join(f"{a:.1e} ({b:.1e})" for a, b in zip(of_varlen, of_sdpa))
    shape = f"{heads}/{kv_heads} heads of {D}" + f", window {window}" * bool(window)
    row(f"varlen (SDPA) in bf16 against fp32, {shape}: output, gradients of q, k, v", shown)
    assert all(a < 2 * b + 1e-3 for a, b in zip(of_varlen, of_sdpa))


def test_bf16_against_fp32(vqa, row, monkeypatch):
    import transformers

    import rloo
    from common import attention, packing

    args = rloo.Args()
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    found = {}
    for how, dtype in (("fp32", torch.float32), ("varlen", torch.bfloat16), ("SDPA", torch.bfloat16)):
        monkeypatch.setattr(attention, "_varlen_takes", lambda query, how=how: how == "varlen")
        model = rloo.load_model(args.model, dtype).to(DEVICE)
        packing.set_attention(model, "packed")
        data = rloo.load_prompts(args, vqa, "train", model, processor)
        prompts = [data.encode(i) for i in range(len(data.rows))]
        never = torch.tensor(packing.media_token_ids(model.config))
        words = [prompt.ids[~torch.isin(prompt.ids, never)] for prompt in prompts]
        responses = [ids[: 5 + i % 9] for i, ids in enumerate(words)]
        groups = [(i, [i]) for i in range(len(prompts))]
        (pack,) = packing.iter_rank_packs(groups, prompts, data.encode, responses, 8192)
        logprobs, _ = packing.response_logprobs(model, pack.to(DEVICE))
        logprobs.mean().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        found[how] = logprobs.detach(), gradient
    exact, exact_gradient = found.pop("fp32")
    for how, (logprobs, gradient) in found.items():
        gap = (logprobs - exact).abs()
        shown = f"{gap.mean():.3f} nats, at most {gap.max():.2f}; {error(gradient, exact_gradient):.1%}"
        row(f"tiny VLM, a pack in bf16 by {how} against fp32: log-probs; gradient", shown)
        assert gap.mean() < 0.03 and error(gradient, exact_gradient) < 0.05


# ---- runs ----


@pytest.mark.parametrize("script", SCRIPTS)
def test_default_runs(script, launch, row):
    run = launch(script, total_steps=5, eval_samples=50)
    proof = re.search("packed = unmodified model within (.*) nats", run.out)
    assert proof, run.out
    seconds = sorted(step["time/total"] for step in run.steps)[2]
    last = run.steps[-1]
    shown = f"proof {proof[1]} nats, {seconds:.2f} s a step, {run.peak:.2f} GB"
    if "time/tokens_per_second" in last:
        gap = last["rollout/engine_logprob_diff_max"]
        shown += f", {last['time/tokens_per_second']:.0f} tokens/s, sampler at most {gap:.2f} nats off"
    row(f"`{script}.py`, default run, 5 steps", shown)


def test_the_ratio_is_1_before_any_update(launch, row):
    """At a rate of 0 old and new log-probs differ by the packs in which they were computed, no more."""
    last = launch("rloo", **SMALL | {"learning_rate": 0.0, "total_steps": 1}).steps[-1]
    cut = last["policy/clipfrac_low"] + last["policy/clipfrac_high"]
    shown = f"{last['policy/ratio']:.4f}, {cut:.1%}"
    row("`policy/ratio` at a rate of 0, and share of clipped responses", shown)
    assert abs(last["policy/ratio"] - 1) < 0.02 and cut < 0.02


def test_zero(launch, row):
    norms = []
    for ranks, stage in itertools.product(sorted({1, NUM_GPUS}), range(4)):
        flags = {**SMALL, "total_steps": 1, "zero_stage": stage, "run_name": f"{ranks}-{stage}"}
        run = launch("ppo_vl", ranks, **flags)
        (step,) = run.steps
        actor, critic = step["train/grad_norm"], step["train/critic_grad_norm"]
        norms.append((actor, critic))
        shown = f"gradient norms {actor:.4f}, {critic:.4f}, {step['time/total']:.2f} s, {run.peak:.2f} GB"
        row(f"`ppo_vl.py`, {ranks} GPUs, ZeRO {stage}", shown)
    for found in norms:
        assert found == pytest.approx(norms[0], rel=0.1)


def test_resume(launch, row):
    """With deterministic kernels it is what would have been."""
    flags = {**SMALL, "total_steps": 4, "save_steps": 2, "save_total_limit": 9}
    whole = launch("rloo", env=DETERMINISTIC, **flags)
    weights = weights_of(whole.folder / "checkpoint-4")
    resumed = launch("rloo", env=DETERMINISTIC, resume=whole.folder / "checkpoint-2", **flags)
    difference = largest_difference(weights, weights_of(whole.folder / "checkpoint-4"))
    row("`rloo.py`, resumed: largest difference of a weight, deterministic kernels", f"{difference:.1e}")
    names = [name for name in whole.steps[2] if not name.startswith("time/")]
    assert [whole.steps[2][name] for name in names] == [resumed.steps[2][name] for name in names]
    assert difference == 0


# ---- vLLM ----


def expect_to_follow(run, sampler: str, row) -> None:
    """By the last steps the policy is far from where it began, and the engine says the same."""
    first, *_, last = run.steps
    gaps = ", ".join(f"{step['rollout/engine_logprob_diff_max']:.3f}" for step in run.steps)
    shown = f"{gaps} nats; KL {last['objective/kl']:.2f}; {last['time/sync']:.2f} s a sync; {run.peak:.1f} GB"
    row(f"{sampler}: largest gap of a response in each step, a sync before each", shown)
    assert abs(last["objective/kl"]) > 0.01 and last["rollout/engine_logprob_diff_max"] < 0.3


@needs_vllm
def test_vllm_in_process(launch, row):
    expect_to_follow(launch("rloo", rollout="vllm", vllm_gpu_memory=0.3, **SMALL), "vLLM in process", row)


@needs_vllm
def test_vllm_server(launch, row, tmp_path):
    from test_vllm import Server

    server = Server(tmp_path, options="--dtype bfloat16 --gpu-memory-utilization 0.3")
    try:
        server.wait()
        sampler = f"{ROOT}/examples/vllm_server.py:Servers"
        run = launch("rloo", env={"VLLM_URLS": server.url}, rollout=sampler, **SMALL)
        expect_to_follow(run, "`examples/vllm_server.py`", row)
    finally:
        server.stop()


# ---- memory and speed ----


def test_peak_memory_is_that_of_the_page(launch, row, tmp_path):
    """A random model of the shapes of a 3B VLM, packs of about 7000 tokens."""
    from tools import full_size

    exec(re.search(r"def memory\(.*?\n(?=```)", (ROOT / "docs/recipes.md").read_text(), re.S)[0], page := {})
    full_size.make_model(tmp_path / "model")
    full_size.make_data(tmp_path)
    flags = {"model": tmp_path / "model", "dataset": tmp_path / "data.jsonl", "max_response_length": 64}
    flags |= {"total_steps": 1, "rollout_batch_size": 96, "train_batch_size": 96, "num_iterations": 1}
    flags |= {"gradient_checkpointing": True}
    cases = {
        "LoRA": ({"lora_rank": 8}, {"trained": 0.015e9}),
        "all weights, ZeRO 2": ({"zero_stage": 2, "learning_rate": 1e-6}, {"reference": True, "zero": 2}),
    }
    for name, (more, given) in cases.items():
        expected = page["memory"](N=3.75e9, L=36, H=2048, I=11008, V=151_936, pack=7000, **given)["peak"]
        if expected * 1.2e9 > torch.cuda.mem_get_info()[0]:
            row(f"`rloo.py`, 3.75e9 parameters, {name}", f"`memory()` {expected:.1f} GB: not run")
            continue
        run = launch("rloo", run_name=name.split()[0], env={"NO_CHECKPOINT": ""}, **flags, **more)
        step = run.steps[-1]
        shown = f"{run.peak:.1f} GB, `memory()` {expected:.1f} GB; rollout {step['time/rollout']:.1f} s, "
        row(f"`rloo.py`, 3.75e9 parameters, {name}", shown + f"update {step['time/update']:.1f} s")
        assert run.peak == pytest.approx(expected, rel=0.3)


@needs_trl
def test_speed_against_trl(row, tmp_path):
    command = f"{ROOT}/tools/bench.py rloo --cases vlm_64 --steps 5 --output {tmp_path} --trl-python {sys.executable}"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    for part in ("step", "update"):
        ours, trl, ratio = (result[f"{part}_{name}"] for name in ("ours", "trl", "ratio"))
        what = f"`rloo.py` and TRL, 64 pictures x 8 responses, {part} (tokens per second: the same ratio)"
        row(what, f"{ours:.2f} s, {trl:.2f} s: {ratio:.1f}")
