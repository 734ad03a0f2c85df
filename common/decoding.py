"""Sampling: in the packed layout the prompts run once, in packs, and then all responses are decoded
together. In the padded layout the model's own generate runs, prompt by prompt.

Letters: n prompts with G responses each, B unfinished responses; P, R: largest lengths.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import packing, stop
from common.attention import ModelError, is_packed
from common.packing import Continuation, Prompt, run_model, to_device


@dataclass
class Response:
    """A sampled response: one turn, or a trajectory [turn 1][observation 1][turn 2]..."""

    token_ids: Tensor  # (R,), on the CPU, including EOS if it was sampled
    logprobs: Tensor  # (R,): reported by the sampler for each token, 0 for observations
    truncated: bool  # stopped by the length limit
    # set for trajectories only:
    continuation: Continuation | None = None
    messages: list[dict] | None = None  # turns and observations
    environment: Any = None


def find_eos_ids(model, tokenizer) -> list[int]:
    """Ids of all tokens that end a response, the tokenizer's first."""
    ids = model.generation_config.eos_token_id  # an int, a list or None
    ids = [tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])]
    return list(dict.fromkeys(i for i in ids if i is not None))


@torch.no_grad()
def generate(
    model,
    prompts: list[Prompt],
    num_samples: int,
    max_new_tokens: int,
    eos_ids: list[int],
    temperature: float,
    max_tokens: int,
) -> list[Response]:
    """num_samples responses to each prompt, seeded with the prompt's seed; greedy at temperature 0.

    max_new_tokens: tokens per response, including EOS; a prompt may have a lower limit. max_tokens:
    per pack of prompts. Media tokens are never sampled, as training masks them."""
    limits = [min(max_new_tokens, prompt.max_new_tokens or max_new_tokens) for prompt in prompts]
    if not is_packed(model):
        responses = []
        for prompt, limit in zip(prompts, limits):
            try:
                responses += generate_padded(model, prompt, num_samples, limit, eos_ids, temperature)
            except ModelError as error:
                stop(f"the model's generate fails at row {prompt.row_id}: {error}")
        return responses
    device = model.device
    # A generator per prompt, so its responses don't depend on the batch. Limits differ only if G = 1, so
    # max(limits) does not shift the numbers of a response.
    uniforms = [np.random.default_rng(p.seed).random((num_samples, max(limits))) for p in prompts]
    uniforms = torch.tensor(np.concatenate(uniforms), device=device)  # (n * G, R)
    limits = torch.tensor(limits, device=device).repeat_interleave(num_samples)  # (n * G,)
    tokens = torch.full(uniforms.shape, -1, device=device)  # (n * G, R): -1 after the end
    logprobs = torch.zeros(uniforms.shape, device=device)  # (n * G, R)
    ends = torch.tensor(eos_ids, device=device)
    hidden, cache, prompt_mask = prefill(model, prompts, num_samples, max_tokens)
    position = torch.tensor([p.next_position for p in prompts for _ in range(num_samples)], device=device)
    axes = prompts[0].position_ids.shape[:-1]  # (3,) for M-RoPE
    rows = torch.arange(len(position), device=device)  # (B,): unfinished responses
    options = packing.logit_options(model)
    for t in range(tokens.shape[1]):
        logits = model.get_output_embeddings()(hidden)  # (B, V)
        token_logprobs = packing.scaled_log_softmax(logits, temperature or 1.0, **options)  # (B, V)
        token = sample_token(token_logprobs, uniforms[rows, t]) if temperature else token_logprobs.argmax(-1)
        tokens[rows, t] = token
        logprobs[rows, t] = token_logprobs.gather(1, token[:, None])[:, 0]
        unfinished = (~torch.isin(token, ends) & (t + 1 < limits[rows])).nonzero()[:, 0]
        if len(unfinished) == 0:
            break
        if len(unfinished) < len(rows):  # finished responses leave the batch
            cache.batch_select_indices(unfinished)
            rows, token = rows[unfinished], token[unfinished]
        out = model.base_model(
            input_ids=token[:, None],  # (B, 1)
            position_ids=(position[rows, None] + t).expand(*axes, -1, 1),  # ([3,] B, 1)
            attention_mask=F.pad(prompt_mask[rows], (0, t + 1), value=1),  # (B, P + t + 1)
            past_key_values=cache,
            use_cache=True,
        )
        hidden = out.last_hidden_state[:, -1]  # (B, H)
    return make_responses(tokens, logprobs, eos_ids)


def make_responses(tokens: Tensor, logprobs: Tensor, eos_ids: list[int]) -> list[Response]:
    """Cut sampled tokens (n * G, R) and their log-probs after the first EOS or before the first -1."""
    responses = []
    for token_ids, token_logprobs in zip(tokens.cpu(), logprobs.cpu()):  # (R,), (R,)
        token_ids = token_ids[token_ids >= 0]
        ends = torch.isin(token_ids, torch.tensor(eos_ids)).nonzero()[:, 0].tolist()
        R = ends[0] + 1 if ends else len(token_ids)
        # Copies, because pickling a view for another rank would send the whole table.
        responses.append(Response(token_ids[:R].clone(), token_logprobs[:R].clone(), truncated=not ends))
    return responses


def prefill(model, prompts: list[Prompt], num_samples: int, max_tokens: int) -> tuple[Tensor, Any, Tensor]:
    """Run each prompt once, and copy its keys and values to the rows of its responses.

    Returns the hidden states (n * G, H) that predict the first token of each response, a
    DynamicCache with keys and values (n * G, kv_heads, P, D) per layer, and its mask (n * G, P),
    False at padding. Prompts are padded on the left, so that all responses continue in the
    same column of the cache."""
    from transformers import DynamicCache

    lengths = torch.tensor([prompt.length for prompt in prompts])  # (n,)
    plan = packing.plan_packs([(i, []) for i in range(len(prompts))], lengths.tolist(), [], max_tokens)[0]
    outputs = []  # one per pack; each layer of the cache has keys and values (1, kv_heads, tokens, D)
    for groups in plan:
        inputs = to_device(packing.build_packed(groups, prompts, responses=[]).model_inputs, model)
        outputs.append(model.base_model(**inputs, past_key_values=DynamicCache(), use_cache=True))
    # Where each prompt ends in the concatenated packs. Lengths 2, 4, 3 and packs [1], [0, 2]: ends 6, 4, 9.
    order = torch.tensor([i for groups in plan for i, _ in groups])  # (n,): 1 0 2
    prompt_ends = lengths[order].cumsum(0)[order.argsort()]  # (n,)

    column = torch.arange(-int(lengths.max()), 0)  # (P,): -P ... -1
    mask = (column >= -lengths[:, None]).repeat_interleave(num_samples, dim=0)  # (n * G, P)
    index = (prompt_ends[:, None] + column).clamp(min=0)  # (n, P): at padding, any token will do
    index = index.repeat_interleave(num_samples, dim=0).to(model.device)  # (n * G, P)
    row_cache = DynamicCache()
    for i, layers in enumerate(zip(*(out.past_key_values.layers for out in outputs))):
        keys = torch.cat([layer.keys for layer in layers], dim=2)[0]  # (kv_heads, tokens, D)
        values = torch.cat([layer.values for layer in layers], dim=2)[0]
        row_cache.update(keys[:, index].transpose(0, 1), values[:, index].transpose(0, 1), i)
    hidden = torch.cat([out.last_hidden_state[0] for out in outputs])  # (tokens, H)
    return hidden[index[:, -1]], row_cache, mask.to(model.device)


def sample_token(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling (B,): the token whose CDF interval contains `uniform` (B,)."""
    cdf = logprobs.double().exp().nan_to_num(1.0).cumsum(-1)  # the scripts stop at NaN
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logprobs.shape[-1] - 1)


def generate_padded(
    model,
    prompt: Prompt,
    num_samples: int,
    max_new_tokens: int,
    eos_ids: list[int],
    temperature: float,
) -> list[Response]:
    """num_samples responses to a prompt by model.generate, seeded with the prompt's seed."""
    from transformers import GenerationConfig

    # num_return_sequences would repeat each image patch in place, not each list of images.
    inputs = {name: torch.cat([x] * num_samples) for name, x in prompt.inputs.items()}
    # generate fills what a config leaves open, such as min_p, from the model's generation_config, so the
    # model gets a fresh one. It is passed as well, because BLIP-2's generate calls its language model's.
    own_config = model.generation_config
    config = model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_ids,
        pad_token_id=eos_ids[0],
        do_sample=temperature > 0,
        temperature=temperature or 1.0,
        top_k=0 if temperature > 0 else None,
        suppress_tokens=packing.media_token_ids(model.config) or None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(prompt.seed)
            out = run_model(model.generate, **to_device(inputs, model), generation_config=config)
    finally:
        model.generation_config = own_config
    tokens = out.sequences[:, -len(out.scores) :]  # (G, R)
    pairs = zip(out.scores, tokens.T)  # scores (G, V) and tokens (G,) of each step
    logprobs = torch.stack([x.log_softmax(-1).gather(1, t[:, None])[:, 0] for x, t in pairs], dim=1)
    return make_responses(tokens, logprobs, eos_ids)
