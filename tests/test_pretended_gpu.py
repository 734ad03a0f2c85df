"""The four scripts on a pretended GPU (pretend_device.py): no operation mixes devices, and the attention kernel's
requirements hold."""

import importlib
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from pretend_device import pretend

PAIRS = {"dataset": "easy-vqa", "eval_dataset": None, "micro_batch_tokens": 8192}
FLAGS = {"rloo": {}, "ppo_vl": {}, "reward_bt": PAIRS, "grm_sft": PAIRS}
NUM_LAYERS = 4  # of the tiny model


def test_mixed_devices_fail():
    with pretend():
        here = torch.arange(3.0)
        there = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        assert there.is_cuda and there[1:].device == torch.device("cuda:0") and not here.is_cuda
        mixtures = {
            "add": lambda: there + here,
            "stack": lambda: torch.stack([there[0], here[0]]),
            "numpy": lambda: there.numpy(),
            "index_put": lambda: there.index_put((there.long(),), here),
            "add_": lambda: torch.zeros(()).add_(there[0]),
        }
        for name, mix in mixtures.items():
            with pytest.raises(AssertionError, match=name):
                mix()
        weight = torch.ones(3, device="cuda", requires_grad=True)
        (here.to("cuda:0", non_blocking=True) * weight.view(3) * torch.tensor(2.0)).sum().backward()
        assert weight.grad.is_cuda and weight.grad.cpu().tolist() == [0, 2, 4]
        assert there[torch.tensor([0, 1])].is_cuda and there.sum().item() == 6


RUNS = [
    ("rloo", {}),
    ("rloo", {"zero_stage": 2, "lora_rank": 4}),
    ("ppo_vl", {"zero_stage": 3}),
    ("ppo_vl", {"offload_optimizer": True}),
    ("reward_bt", {"lora_rank": 4, "gradient_checkpointing": True}),
    ("grm_sft", {"zero_stage": 3, "offload_optimizer": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", RUNS)
def test_a_step(script, flags, run, capsys):
    with pretend(importlib.import_module(script)) as gpu:
        run(script, **{"total_steps": 1} | FLAGS[script] | flags)
    out = capsys.readouterr().out
    assert "packing enabled" in out and "cuda:0, torch.bfloat16" in out
    assert gpu.num_varlen_calls >= 4 * NUM_LAYERS  # in the check at startup, and in the step


@pytest.mark.slow
def test_resume(run, tmp_path, capsys):
    import ppo_vl

    with pretend(ppo_vl):
        run("ppo_vl", total_steps=2, save_steps=1)
    with pretend(ppo_vl):
        run("ppo_vl", resume=tmp_path / "runs/run/checkpoint-1", run_name="resumed", total_steps=2)
    assert capsys.readouterr().out.count("step 2 of 2") == 2


@pytest.mark.slow
def test_two_ranks(argv):
    """Our own collectives, which one rank leaves out, are on the device too."""
    command = f"-m torch.distributed.run --standalone --nproc_per_node=2 {ROOT}/tests/pretend_device.py rloo"
    words = [sys.executable, *command.split(), *argv("rloo", total_steps=1, zero_stage=3)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "2 rank(s), cuda:0" in done.stdout, done.stderr[-3000:]
