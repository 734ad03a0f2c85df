"""The four scripts on a pretended GPU (pretend_device.py): no operation mixes devices, and the attention kernel's
requirements hold."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, filled_args
from pretend_device import pretend
from transformers.masking_utils import causal_mask_function

import rloo
from common import attention
from common.packing import Prompt

NUM_LAYERS = 4  # of the tiny model


def test_vllm_sampler_keeps_the_order_of_prompts_and_completions(monkeypatch, tmp_path):
    """With a fake engine, whose completion g of the prompt [i] is the token 10 * i + g."""

    def completion(token: int):
        logprobs = [{token: SimpleNamespace(logprob=-token / 10)}]
        reason = "length" if token % 2 else "stop"
        return SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=reason)

    def answer(prompt_ids, n):
        outputs = [completion(10 * prompt_ids[0] + g) for g in range(n)]
        return SimpleNamespace(prompt_token_ids=[*prompt_ids], outputs=outputs)

    def generate(inputs, params, use_tqdm):
        assert [(x.seed, x.max_tokens) for x in params] == [(7, 24), (8, 3)]
        return [answer(x["prompt_token_ids"], params[0].n) for x in inputs]

    engine = SimpleNamespace(generate=generate)
    vllm = SimpleNamespace(LLM=lambda **keywords: engine, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    args = filled_args("rloo")
    model = rloo.load_model(args, args.model)
    sampler = rloo.VLLMSampler(args, model, [500], tmp_path)
    ids = [{"input_ids": torch.tensor([[i]])} for i in (3, 5)]
    prompts = [Prompt(0, 1, (), x, {}, torch.arange(1), {}, seed=seed) for x, seed in zip(ids, (7, 8))]
    prompts[1].max_new_tokens = 3  # as in a later turn
    responses = sampler.generate(prompts, 2, 1.0)
    assert [x.token_ids.tolist() for x in responses] == [[30], [31], [50], [51]]
    assert [x.truncated for x in responses] == [False, True, False, True]
    assert responses[3].logprobs.tolist() == pytest.approx([-5.1])
    engine.generate = lambda inputs, params, use_tqdm: [SimpleNamespace(prompt_token_ids=[1])] * len(inputs)
    assert sampler.generate(prompts, 2, 1.0) == [None] * 4  # vLLM has other tokens


RUNS = [
    ("rloo", {"zero_stage": 2, "lora_rank": 4}),
    ("ppo_vl", {}),
    ("reward_bt", {"lora_rank": 4, "gradient_checkpointing": True}),
    ("grm_sft", {"zero_stage": 3, "offload_optimizer": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", RUNS)
def test_a_step(script, flags, run, capsys):
    with pretend(importlib.import_module(script)) as gpu:
        run(script, total_steps=1, **flags)
    out = capsys.readouterr().out
    assert "packing enabled" in out and "cuda:0, torch.bfloat16" in out
    assert gpu.num_varlen_calls >= 4 * NUM_LAYERS  # in the check at startup, and in the step


def test_varlen_attention_needs_ampere_and_values_as_wide_as_queries(monkeypatch):
    mask = attention.ModelMask(causal_mask_function)
    with pretend(rloo):
        q, wider = (torch.zeros(1, 1, D, dtype=torch.bfloat16).to("cuda") for D in (16, 24))
        assert attention.can_use_varlen(q, q, mask) and not attention.can_use_varlen(q, wider, mask)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not attention.can_use_varlen(q, q, mask)


@pytest.mark.parametrize("queries", [1, 5])
def test_heads_that_share_a_key_head(queries, spy):
    """SDPA gets no mask with grouped heads: it would fall back to the kernel that stores all scores. Keys are not
    copied for a single query."""
    shapes = (6, queries, 8), (2, 7, 8), (2, 7, 5), (1, queries, 7)  # latent attention has smaller values
    q, k, v, mask = (torch.randn(2, *shape) for shape in shapes)
    expected = attention.attend(q, k, v, mask > -1, None)  # on the CPU, SDPA gets enable_gqa
    calls = spy(attention.F, "scaled_dot_product_attention")
    with pretend(rloo):
        result = attention.attend(*(x.to("cuda") for x in (q, k, v, mask > -1)), None).cpu()
    torch.testing.assert_close(result, expected)
    [((query, key, *_), options, _)] = calls
    assert query.shape[1] == key.shape[1] == (2 if queries == 1 else 6) and not options["enable_gqa"]


@pytest.mark.slow
def test_two_ranks(argv):
    """Our own collectives, which one rank leaves out, are on the device too."""
    command = f"-m torch.distributed.run --standalone --nproc_per_node=2 {ROOT}/tests/pretend_device.py rloo"
    words = [sys.executable, *command.split(), *argv("rloo", total_steps=1, zero_stage=3)]
    assert "2 rank(s), cuda:0" in subprocess.check_output(words, text=True, timeout=300)
