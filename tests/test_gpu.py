"""Tests on a GPU: pytest -m gpu. It ends with a table for docs/benchmarks.md."""

import contextlib
import copy
import functools
import importlib.util
import itertools
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, SCRIPTS, TINY, continuations, largest_difference, metrics_of, to_argv, weights_of
from test_memory import config_of
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function

import rloo
from common import attention, packing
from tools import memory

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU")]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
DEVICE = "cuda"
SMALL = {"total_steps": 3, "prompts_per_rollout": 8, "train_batch_size": 32, "eval_prompts": 16}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
CHILD = """
import importlib, os, sys, torch, tyro
script = importlib.import_module(sys.argv[1])
from common import attention, decoding, packing_check

def refuse(model, case):
    raise attention.ModelError("the test wants padded batches")

def generate_deterministically(*args, **kwargs):
    torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum would raise an error
    responses = generate(*args, **kwargs)
    torch.use_deterministic_algorithms(True)
    return responses

if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
    torch.use_deterministic_algorithms(True)
    generate, decoding.generate = decoding.generate, generate_deterministically
if os.environ.get("LAYOUT") == "padded":
    packing_check.measure_logit_factor = refuse
if os.environ.get("LAYOUT") == "packed, SDPA":
    attention.varlen_attn = None
script.main(tyro.cli(script.Args, args=sys.argv[2:]))
print(f"peak: {torch.cuda.max_memory_allocated() / 1e9} GB")
"""


@pytest.fixture
def row(record_property):
    """Add a row to the table that conftest.py prints."""
    return lambda what, result: record_property("row", f"| {what} | {result} |")


@pytest.fixture
def launch(tmp_path):
    """A run in separate processes: metrics of its steps, output, peak memory in GB, run directory."""

    def go(script: str, ranks: int = 1, env: dict | None = None, **flags) -> SimpleNamespace:
        flags = {"output_dir": tmp_path, "run_name": "run"} | flags
        torchrun = f"-m torch.distributed.run --standalone --no-python --nproc_per_node={ranks}"
        launcher = [*torchrun.split(), sys.executable] if ranks > 1 else []
        command = [sys.executable, *launcher, "-c", CHILD, script, *to_argv(flags)]
        env = os.environ | (env or {})
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        folder = tmp_path / flags["run_name"]
        steps = [step for step in metrics_of(folder) if step["train/step"] > 0]
        peak = max(map(float, re.findall("peak: (.*) GB", done.stdout)))
        return SimpleNamespace(steps=steps, out=done.stdout, peak=peak, folder=folder)

    return go


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.float() - exact.float()).norm() / exact.float().norm()).item()


# ---- the machine, attention, precision ----
def test_the_machine(row):
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    commit = subprocess.run("git describe --always".split(), cwd=ROOT, capture_output=True, text=True).stdout
    name = f"{NUM_GPUS} x {torch.cuda.get_device_name()}, {memory:.0f} GB"
    row(name, f"torch {torch.__version__}, {commit.strip()}")
    assert torch.cuda.get_device_capability() >= (8, 0), "varlen attention needs Ampere or later"


@pytest.mark.parametrize("heads, kv_heads, D", [(4, 2, 32), (16, 16, 80), (16, 2, 128)])
def test_varlen_attention_equals_sdpa(heads, kv_heads, D, row, monkeypatch):
    """Outputs and gradients of a pack are as close to fp32 as those of SDPA in bf16."""
    segments = []  # a token of a response attends to the prompt and to its own past
    N = 0
    for P, *lengths in ([300, 17, 1, 120], [5, 64, 64], [129], [700, 500, 3]):
        prompt = torch.arange(N, N + P)
        segments.append((prompt, prompt))
        N += P
        for R in lengths:
            response = torch.arange(N, N + R)
            segments.append((response, torch.cat([prompt, response])))
            N += R
    indices = attention.make_packed_indices(segments)
    indices = tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), indices)
    mask = attention.ModelMask(causal_mask_function)
    attend = functools.partial(attention.packed_attention, None, attention_mask=mask, packed_indices=indices)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, n, N, D, generator=generator) for n in (heads, kv_heads, kv_heads)]
    out_gradient = torch.randn(1, N, heads, D, generator=generator).to(DEVICE)

    def run(dtype: torch.dtype, is_varlen: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(attention, "can_use_varlen", lambda q, v, mask: is_varlen)
        inputs = [x.bfloat16().to(DEVICE, dtype).requires_grad_() for x in tensors]
        out, _ = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, out_gradient.to(dtype))]

    exact = run(torch.float32, is_varlen=False)
    sdpa_errors = [error(*pair) for pair in zip(run(torch.bfloat16, is_varlen=False), exact)]
    varlen_errors = [error(*pair) for pair in zip(run(torch.bfloat16, is_varlen=True), exact)]
    text = " · ".join(f"{a:.1e} ({b:.1e})" for a, b in zip(varlen_errors, sdpa_errors))
    what = f"varlen (SDPA) in bf16 against fp32, {heads}/{kv_heads} heads of {D}: output, grads of q, k, v"
    row(what, text)
    assert all(a < 2 * b + 1e-3 for a, b in zip(varlen_errors, sdpa_errors))


def test_bf16_against_fp32(vqa, row, monkeypatch):
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    can_use_varlen = attention.can_use_varlen
    results = {}
    for name, dtype in (("fp32", "float32"), ("varlen", "bfloat16"), ("SDPA", "bfloat16")):
        is_varlen = name == "varlen"
        usable = can_use_varlen if is_varlen else lambda q, v, mask: False
        monkeypatch.setattr(attention, "can_use_varlen", usable)
        rloo.fill_defaults(args := rloo.Args(dtype=dtype))
        model = rloo.load_model(args, TINY).to(DEVICE)
        packing.set_attention(model, "packed")
        data = rloo.PromptDataset(args, vqa, "train", model, processor)
        prompts = [data.encode(i) for i in range(len(data.rows))]
        media_ids = torch.tensor(packing.media_token_ids(model.config))
        tokens = [prompt.input_ids[~torch.isin(prompt.input_ids, media_ids)] for prompt in prompts]
        groups = [(i, [i]) for i in range(len(prompts))]
        responses = continuations(groups, prompts, [ids[: 5 + i % 9] for i, ids in enumerate(tokens)])
        (pack,) = packing.iter_rank_packs(model, groups, prompts, responses, max_tokens=8192)
        logprobs, _ = packing.response_logprobs(model, pack)
        logprobs.mean().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        results[name] = logprobs.detach(), gradient
    exact, exact_gradient = results.pop("fp32")
    for name, (logprobs, gradient) in results.items():
        diff = (logprobs - exact).abs()
        text = f"{diff.mean():.3f} nats, at most {diff.max():.2f}; {error(gradient, exact_gradient):.1%}"
        row(f"tiny VLM, a pack in bf16 with {name} against fp32: log-probs; gradient", text)
        assert diff.mean() < 0.03 and error(gradient, exact_gradient) < 0.05


# ---- runs ----
@pytest.mark.parametrize("script", SCRIPTS)
def test_default_runs(script, launch, row):
    run = launch(script)
    assert "packing enabled" in run.out
    seconds = statistics.median(step["time/total"] for step in run.steps)
    text = f"{len(run.steps)} steps of {seconds:.2f} s, {run.peak:.2f} GB; "
    text += ", ".join(line for line in run.out.splitlines() if line.startswith("eval/"))
    if script in ("rloo", "ppo_vl"):
        diffs = [step["sampling/logprob_diff_mean"] for step in run.steps]
        text += f"; sampler and trainer differ by {max(diffs):.3f} nats"
        assert all(step["policy/clipfrac_first"] == 0 for step in run.steps)
        assert run.steps[-1]["eval/greedy_score"] > 0.9
    row(f"`{script}.py`, default run", text)


def test_old_and_new_logprobs_of_an_unchanged_policy(launch, row):
    """Equal in the first epoch; the second one has other packs."""
    flags = {**SMALL, "learning_rate": 0.0, "num_epochs": 2, "eval_steps": 0}
    run = launch("rloo", **flags)
    first = max(step["policy/logprob_diff_mean"] for step in run.steps)
    both = max(step["policy/approx_kl"] for step in run.steps)
    clipped = max(step["policy/clipfrac_low"] + step["policy/clipfrac_high"] for step in run.steps)
    text = f"{first:.1e} nats in the first mini-batch; approx_kl {both:.1e}, clipped {clipped:.1%} in all of them"
    row("`rloo.py`, learning rate 0, two epochs: old and new log-probs differ by", text)
    assert first == 0


def test_zero(launch, row):
    norms = []
    for ranks, stage in itertools.product(sorted({1, NUM_GPUS}), (2, 3)):
        flags = {**SMALL, "total_steps": 1, "zero_stage": stage, "run_name": f"{ranks}-{stage}"}
        run = launch("ppo_vl", ranks, **flags)
        (step,) = run.steps
        actor, critic = step["train/grad_norm"], step["train/critic_grad_norm"]
        norms.append((actor, critic))
        text = f"gradient norms {actor:.4f}, {critic:.4f}, {step['time/total']:.2f} s, {run.peak:.2f} GB"
        row(f"`ppo_vl.py`, {ranks} GPUs, ZeRO {stage}", text)
    for pair in norms:
        assert pair == pytest.approx(norms[0], rel=0.1)


def test_resume(launch, row):
    """With deterministic kernels, a resumed run reproduces the uninterrupted one bit for bit."""
    flags = {**SMALL, "total_steps": 4, "save_steps": 2, "save_total_limit": 9}
    full_run = launch("rloo", env=DETERMINISTIC, **flags)
    checkpoint = full_run.folder / "checkpoint-2"
    resumed = launch("rloo", env=DETERMINISTIC, **flags | {"resume": checkpoint, "run_name": "resumed"})
    weights = [weights_of(run.folder / "checkpoint-4") for run in (full_run, resumed)]
    difference = largest_difference(*weights)
    row("`rloo.py`, resumed: largest difference between weights, deterministic kernels", f"{difference:.1e}")
    for name, value in full_run.steps[2].items():
        assert name.startswith(("time/", "memory/")) or resumed.steps[2][name] == value
    assert difference == 0


# ---- vLLM ----
@needs_vllm
@pytest.mark.parametrize("sampler", ["vllm", f"{ROOT}/examples/vllm_server.py:Servers"])
def test_new_weights_reach_vllm(sampler, launch, row, tmp_path, monkeypatch):
    import test_vllm

    monkeypatch.setattr(test_vllm, "ON_CPU", {})
    flags = SMALL | {"sampler": sampler, "vllm_gpu_memory_utilization": 0.3}
    with contextlib.ExitStack() as stack:
        if sampler != "vllm":
            server = test_vllm.Server(tmp_path, "--dtype bfloat16 --gpu-memory-utilization 0.3")
            stack.callback(server.stop)
            server.wait()
            monkeypatch.setenv("VLLM_URLS", server.url)
        run = launch("examples.check_sync", **flags)
    parts = [line for line in run.out.splitlines() if line.startswith("pass:")]
    row(f"`examples/check_sync.py`, {sampler.split('/')[-1]}", "; ".join(parts))
    assert len(parts) == 2


# ---- memory ----
@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> Path:
    """Random bf16 weights of the shapes of Qwen2.5-VL-3B; its processor scales small images to 448 x 448."""
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    processor.image_processor.patch_size = processor.video_processor.patch_size = 14
    processor.image_processor.size = {"shortest_edge": 448 * 448, "longest_edge": 28 * 28 * 1280}
    tiny = transformers.AutoConfig.from_pretrained(TINY)
    config = copy.deepcopy(config_of("Qwen/Qwen2.5-VL-3B-Instruct"))
    config.update({name: x for name, x in vars(tiny).items() if re.fullmatch(r"\w+_token_id", name)})
    config.text_config.update({"eos_token_id": processor.tokenizer.eos_token_id, "bos_token_id": None})
    with torch.device("cuda"):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("large_model")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.mark.parametrize(
    "what, flags",
    [
        ("LoRA, packed, varlen", {"lora_rank": 16}),
        ("LoRA, packed, SDPA", {"lora_rank": 16}),
        ("LoRA, padded", {"lora_rank": 16}),
        pytest.param("LoRA, vLLM", {"lora_rank": 16, "sampler": "vllm"}, marks=needs_vllm),
        ("all weights, ZeRO-2", {"zero_stage": 2, "gradient_checkpointing": True}),
    ],
)
def test_a_model_of_3e9_parameters(what, flags, launch, row, large_model, vqa):
    """16 images of 256 tokens x 8 responses of up to 64 tokens. Peak memory is what tools/memory.py says."""
    config = transformers.AutoConfig.from_pretrained(large_model)
    share = 0.4 if "vLLM" in what else 0.0
    sizes = {"gpus": 1, "vllm_gpu_memory_utilization": share, "gradient_checkpointing": False, **flags}
    sizes |= {"image_pixels": 448 * 448, "prompt_tokens": 290, "response_tokens": 64}
    expected = memory.estimate(memory.Args(model="", **sizes), config)["peak"]
    if expected * 1.2e9 > torch.cuda.mem_get_info()[0]:
        return row(f"3.75e9 parameters, {what}", f"tools/memory.py {expected:.1f} GB: not run")
    flags |= {"model": large_model, "dataset": vqa, "total_steps": 3, "prompts_per_rollout": 16}
    env = {"LAYOUT": what.removeprefix("LoRA, ")}
    run = launch("rloo", env=env, max_response_length=64, save_total_limit=0, **flags)
    *_, step = run.steps
    parts = ", ".join(f"{part} {step[f'time/{part}']:.2f}" for part in ("rollout", "logprobs", "update"))
    text = f"{run.peak:.1f} GB (tools/memory.py: {expected:.1f}); seconds: {parts}"
    text += f"; sampler and trainer differ by {step['sampling/logprob_diff_mean']:.4f} nats, "
    text += f"old and new log-probs by {step['policy/logprob_diff_mean']:.4f}"
    row(f"`rloo.py`, 3.75e9 parameters, {what}", text)
    assert ("packing enabled" in run.out) == ("padded" not in what)
    assert "padded" in what or run.peak == pytest.approx(expected, rel=0.3)
