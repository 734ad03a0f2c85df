"""The four scripts on a pretended GPU (pretend_device.py): no operation mixes devices, the attention kernel's
requirements hold, and the CPU waits for the GPU only in known functions."""

import importlib
import subprocess
import sys
from collections import Counter

import pytest
import torch
import transformers
from conftest import ROOT
from packaging.version import Version
from pretend_device import pretend

from common import decoding, packing

slow = pytest.mark.slow
PAIRS = {"dataset": "easy-vqa", "eval_dataset": None}
FLAGS = {"rloo": {}, "ppo_vl": {}, "reward_bt": PAIRS, "grm_sft": PAIRS}
# Functions of this repository in which the CPU waits: at the start and end, once per rollout, evaluation or step.
WAITS_ONCE = "resolve_run_dir load_policy_and_reference load_models init_deepspeed_engine save_checkpoint"
WAITS_ONCE += " HFSampler packing_errors _check_causality _decoded_logprobs generate Decoder all_reduce_sum"
WAITS_ONCE += " all_reduce_mean optimizer_step make_pairs"
# iter_packs: the masks of grm_sft.py, for each pack of a step, before the update; main: metrics, after the update.
WAITS_ONCE += " sum_logprobs iter_packs main"
if Version(transformers.__version__) < Version("5.18"):  # the size of the largest image is a tensor
    WAITS_ONCE += " vision_attention"
# Other functions, where it waits in every pack: image sizes in transformers, ZeRO-3's comparison of ranks.
WAITS_IN_PACKS = "modeling_qwen2_5_vl vision_utils generic import_utils engine.DeepSpeedEngine.backward"
WAITS_IN_PACKS += " utils.get_lst_from_rank0 utils.assert_lst_len_same_as_other_ranks"


@pytest.fixture
def run(run, monkeypatch, capsys):
    """A run on the pretended GPU: returns the GPU, calls of some functions, and the output."""
    counted_functions = [(packing, "build_pack"), (packing, "_encode_batch"), (decoding, "build_pack")]
    counted_functions += [(decoding.Decoder, "__init__"), (decoding.Decoder, "step")]

    def go(script: str, **flags) -> tuple:
        flags = {"total_steps": 1, "micro_batch_tokens": 8192} | FLAGS[script] | flags
        calls = Counter()

        def counted(name: str, function):
            return lambda *args, **kwargs: calls.update([name]) or function(*args, **kwargs)

        with monkeypatch.context() as patch, pretend(importlib.import_module(script)) as gpu:
            for target, name in counted_functions:
                patch.setattr(target, name, counted(name, getattr(target, name)))
            run(script, **flags)
        return gpu, calls, capsys.readouterr().out

    return go


def test_mixed_devices_fail_and_waits_are_counted():
    with pretend() as gpu:
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
        gpu.waits.clear()
        there[torch.tensor([0, 1])], there[there > 1], there.tolist(), there.sum().item(), here.to("cuda")
        there.zero_().add_(1.0).nonzero()
        here.copy_(there), torch.equal(there, there), here.sum().item()
    test = "test_pretended_gpu.test_mixed_devices_fail_and_waits_are_counted"
    assert gpu.waits == {test: 8}


def expect_known_waits(script: str, gpu, calls: Counter) -> None:
    parts = [name.split(".") for name in gpu.waits]
    files = (script, "packing", "packing_check", "decoding", "attention", "kl")
    functions = {function for file, function, *_ in parts if file in files}
    assert functions <= {*WAITS_ONCE.split()}
    # One wait per sampled token, including the last; the others begin and end a batch.
    assert gpu.waits["decoding.generate"] <= calls["step"] + 7 * calls["__init__"]


RUNS = [
    pytest.param("rloo", {}),
    pytest.param("rloo", {"zero_stage": 2, "lora_rank": 4}, marks=slow),
    pytest.param("ppo_vl", {"zero_stage": 3}, marks=slow),
    pytest.param("ppo_vl", {"zero_stage": 2, "offload_optimizer": True}, marks=slow),
    pytest.param("reward_bt", {}, marks=slow),
    pytest.param("reward_bt", {"zero_stage": 1, "lora_rank": 4, "gradient_checkpointing": True}, marks=slow),
    pytest.param("grm_sft", {"zero_stage": 3, "offload_optimizer": True}, marks=slow),
]


@pytest.mark.parametrize("script, flags", RUNS)
def test_a_step(script, flags, run):
    gpu, calls, out = run(script, **flags)
    assert "packing enabled" in out and "cuda:0, torch.bfloat16" in out
    layers = 4  # in the tiny model's vision tower, and in its language model
    if "gradient_checkpointing" not in flags:
        assert gpu.kernels["vision"] == layers * calls["_encode_batch"] > 0
    assert gpu.kernels["text"] >= layers * calls["build_pack"] > 0
    expect_known_waits(script, gpu, calls)


@slow
@pytest.mark.parametrize(
    "script, flags", [("ppo_vl", {"max_prompt_length": 80}), ("reward_bt", {"max_length": 80})]
)
def test_more_packs_add_known_waits_only(script, flags, run):
    flags |= {"train_batch_size": 16, "zero_stage": 3}
    few, few_calls, _ = run(script, **flags)
    many, many_calls, _ = run(script, **flags, micro_batch_tokens=90, run_name="many")
    assert many_calls["build_pack"] > few_calls["build_pack"] + 8
    grown = many.waits - few.waits
    known = {*WAITS_IN_PACKS.split()}
    assert [name for name in grown if not {name, name.split(".")[0]} & known] == []


@slow
def test_resume(run, tmp_path):
    run("ppo_vl", total_steps=2, save_steps=1)
    gpu, calls, out = run("ppo_vl", total_steps=2, resume=tmp_path / "runs/run/checkpoint-1")
    assert "step 2 of 2" in out and "step 1 of 2" not in out
    expect_known_waits("ppo_vl", gpu, calls)


@slow
def test_two_ranks(argv):
    """Our own collectives, which one rank leaves out, are on the device too."""
    command = f"-m torch.distributed.run --standalone --nproc_per_node=2 {ROOT}/tests/pretend_device.py rloo"
    words = [sys.executable, *command.split(), *argv("rloo", total_steps=1, zero_stage=3)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "2 rank(s), cuda:0" in done.stdout, done.stderr[-3000:]
