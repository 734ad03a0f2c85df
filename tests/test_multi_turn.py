"""--environment: trajectories [turn 1][observation 1][turn 2]... against the unmodified model on the whole sequence."""

import json
from dataclasses import replace
from types import SimpleNamespace

import common  # noqa: F401  before transformers # isort: skip
import pytest
import torch
import transformers
from conftest import TINY, assert_same_run, metrics_of, read_jsonl, to_argv, write_jsonl
from PIL import Image
from test_families import build, folder_of  # noqa: F401

import rloo
from common import packing
from common.packing import Response

TURNS = ("Let me see.", "", "It is <answer>blue</answer>!")  # the second is empty: EOS at once
LONG = "no, look closer " * 40
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3", "llava")


def crop(row: int, size=(40, 24)) -> Image.Image:
    return Image.linear_gradient("L").resize(size).rotate(90 * row)


OBSERVATIONS = [  # of two turns, for each dataset row
    ["", LONG],
    ["again", [{"type": "text", "text": "seen: "}, {"type": "image", "image": crop(0)}]],
    [[{"type": "image", "image": crop(1)}, {"type": "image", "image": crop(2, (24, 48))}], "and now?"],
    [{"role": "user", "content": "yes"}, [{"type": "image", "image": crop(3)}]],
]


class Scripted:
    """An environment that returns the observations of its dataset row, and remembers what it saw."""

    def reset(self, chat, prompt, **row):
        self.chat, self.texts, self.prompt = chat, [], prompt

    def step(self, response):
        self.texts.append(response)
        observations = self.observations
        return observations[len(self.texts) - 1] if len(self.texts) <= len(observations) else None


class ScriptedSampler:
    """A sampler whose turns are TURNS."""

    def __init__(self, tokenizer, eos: int, turns=TURNS):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [eos] for text in turns]
        self.turns = [torch.tensor(x) for x in ids]
        self.seeds = []
        self.calls = 0
        self.update_weights = self.sleep = lambda: None

    def generate(self, prompts, num_samples, temperature):
        turn = self.turns[self.calls % len(self.turns)]
        self.calls += 1
        self.seeds.append([prompt.seed for prompt in prompts])
        return [Response(turn, torch.ones(len(turn)), False) for _ in prompts for _ in range(num_samples)]


def make_sampler(model, processor, sampler=None, environment=Scripted, **flags):
    args = SimpleNamespace(
        **{"max_response_length": 2000, "max_turns": 4, "sampler": "hf", "model": "m"} | flags
    )
    tokenizer = getattr(processor, "tokenizer", processor)
    sampler = sampler or ScriptedSampler(tokenizer, 500)
    return rloo.EnvironmentSampler(args, sampler, environment, model, processor)


def make_trajectories(prompts, model, processor, **flags) -> list[Response]:
    """One scripted trajectory per prompt."""
    responses = []
    for prompt, observations in zip(prompts, OBSERVATIONS):
        environment = type("Env", (Scripted,), {"observations": observations})
        responses += make_sampler(model, processor, environment=environment, **flags).generate(
            [prompt], 1, 1.0
        )
    return responses


def whole_logprobs(model, processor, prompt, response) -> torch.Tensor:
    """Log-probs of the model's own tokens by model.forward on the processor's output for the whole chat."""
    full = []
    for k, message in enumerate(response.messages):
        content = message["content"]
        if isinstance(content, str):  # a truncated turn is a prefix of the scripted one
            content = [{"type": "text", "text": TURNS[k // 2]}]
        full.append({**message, "content": content})
    inputs = dict(packing.encode_chat(processor, [*prompt.messages, *full]))
    R = len(response.token_ids)
    P = prompt.length
    assert torch.equal(inputs["input_ids"][0, : P + R], torch.cat([prompt.input_ids, response.token_ids]))
    logits = model(**inputs).logits[0, P - 1 : P + R - 1]
    logits[:, packing.media_token_ids(model.config)] = -torch.inf
    logprobs = logits.log_softmax(-1).gather(1, response.token_ids[:, None])[:, 0]
    return logprobs[response.loss_mask]


def packed_logprobs(model, prompts, responses, max_tokens=4000) -> torch.Tensor:
    groups = [(i, [i]) for i in range(len(prompts))]
    ids = [response.token_ids for response in responses]
    continuations = {b: response.continuation for b, response in enumerate(responses)}
    parts = {}
    for pack in packing.iter_rank_packs(
        model, groups, prompts, prompts.__getitem__, ids, max_tokens, continuations=continuations
    ):
        logprobs = packing.response_logprobs(model, pack)[0]
        parts |= {int(b): logprobs[pack.response_of_token == s] for s, b in enumerate(pack.response_index)}
        masks = torch.nn.utils.rnn.pad_sequence([x.loss_mask for x in responses], batch_first=True)
        assert pack.gather_tokens(masks).all()  # no observation is a target
    return torch.cat([parts[b] for b in range(len(prompts))])


def gradients(model, logprobs: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, len(logprobs))
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_trajectories_equal_the_unmodified_model_on_the_whole_chat(family, folder_of):  # noqa: F811
    """Packed and unpacked log-probs and gradients, for whole trajectories and ones truncated in each turn."""
    folder = folder_of(family)
    model, unmodified = (rloo.load_model(str(folder), torch.float32).eval() for _ in range(2))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    data = rloo.load_prompts(rloo.Args(rewards=()), str(folder / "rows.jsonl"), "train", model, processor)
    prompts = [replace(data.encode(i), index=i) for i in range(4)]
    whole = make_trajectories(prompts, model, processor)
    assert [len(x.messages) for x in whole] == [5] * 4 and not any(x.truncated for x in whole)
    assert max(int((~x.loss_mask).sum()) for x in whole) > 200
    starts = [int((~whole[0].loss_mask).nonzero()[0]), int((~whole[0].loss_mask).nonzero()[-1]) + 1]
    for limit in (2000, starts[0] - 1, starts[1] + 2):
        responses = make_trajectories(prompts, model, processor, max_response_length=limit)
        expected = [whole_logprobs(unmodified, processor, *pair) for pair in zip(prompts, responses)]
        expected = torch.cat(expected)
        expected_gradient = gradients(unmodified, expected)
        for attention in ("packed", "sdpa"):
            packing.set_attention(model, attention)
            logprobs = packed_logprobs(model, prompts, responses)
            torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=0)
            gradient = gradients(model, logprobs)
            assert (gradient - expected_gradient).norm() < 1e-4 * expected_gradient.norm()
