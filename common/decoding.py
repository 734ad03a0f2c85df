"""Sampling responses: `generate` uses a `Decoder` for packed models, `generate_unpacked` for others.

    decoder = Decoder(model, prompts, num_samples, max_tokens)    # runs each prompt once
    logprobs = next_logprobs(model, decoder.hidden, temperature)  # (B, V): choose a token of each row
    decoder.select(unfinished)                                    # drop responses that have ended
    decoder.step(token)                                           # (B,): append one token to each

Letters: n prompts with G responses each, of which B are unfinished; P tokens in the longest prompt;
t response tokens so far; V vocabulary size; H hidden size; D head dimension.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from common.attention import ModelMask, is_packed
from common.packing import (
    MODEL_ERRORS,
    Prompt,
    Response,
    build_pack,
    call_backbone,
    logit_scale_and_softcap,
    media_token_ids,
    run_backbone,
    stop,
    to_device,
    to_logprobs_,
    unpacked_inputs,
)

CACHE_BLOCK = 32  # tokens by which the KV cache of the responses grows


class BlockGrowingCacheLayer(DynamicLayer):
    """Keys and values (B, kv_heads, t, D) of one layer, in storage that grows by CACHE_BLOCK tokens.

    transformers' DynamicLayer copies the whole cache at every token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple:
        new = (key_states, value_states)  # (B, kv_heads, 1, D)
        t = self.get_seq_length()
        if t == 0:
            self.lazy_initialization(key_states, value_states)
            self.storage = [F.pad(x, (0, 0, 0, CACHE_BLOCK - 1)) for x in new]
        elif t == self.storage[0].shape[2]:
            self.storage = [F.pad(x, (0, 0, 0, CACHE_BLOCK)) for x in self.storage]
        for storage, x in zip(self.storage, new):
            storage[:, :, t : t + 1] = x
        self.keys, self.values = (storage[:, :, : t + 1] for storage in self.storage)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.storage = [storage[indices] for storage in self.storage]


class Decoder:
    """Decodes num_samples responses to each of n prompts. Requires packed attention.

    The prompts run once, in packs of at most max_tokens tokens, and all responses to a prompt
    read the same copy of its keys and values. Response j to prompt i has slot i * G + j. When
    responses end, the batch shrinks from n * G to B entries, and `slots` (B,) has those left."""

    @torch.no_grad()
    def __init__(self, model, prompts: list[Prompt], num_samples: int, max_tokens: int):
        n = len(prompts)
        device = model.device
        self.base = model.base_model
        self.G = num_samples
        self.slots = torch.arange(n * self.G, device=device)  # (B,)
        self.cache = Cache(layer_class_to_replicate=BlockGrowingCacheLayer)  # of response tokens
        lengths = torch.tensor([prompt.length for prompt in prompts])  # (n,)
        column = torch.arange(int(lengths.max()))  # (P,)
        self.prompt_lengths = lengths.to(device)  # (n,)
        self.prompt_valid = (column < lengths[:, None]).to(device)  # (n, P): False at padding
        self.prompt_keys = {}  # layer -> (n, kv_heads, P, D)
        self.prompt_values = {}
        last_hidden = []
        start = 0
        while start < n:
            ends = lengths[start:].cumsum(0)
            ends = ends[: max(1, int((ends <= max_tokens).sum()))]  # of the prompts in this pack
            self.batch = slice(start, start + len(ends))
            starts = ends - lengths[self.batch]
            # Pack index of each prompt token; at padding that of another token, which is masked.
            pack_index = (starts[:, None] + column).clamp(max=int(ends[-1]) - 1)
            self.pack_index = pack_index.to(device, non_blocking=True)
            groups = [(i, []) for i in range(start, start + len(ends))]
            pack = to_device(build_pack(groups, prompts, responses=[]), model)
            hidden = run_backbone(model, pack, decoder=self)  # (N, H)
            last_hidden.append(hidden[ends.to(device, non_blocking=True) - 1])
            start += len(ends)
        # (B, H): hidden states that predict the next token
        self.hidden = torch.cat(last_hidden).repeat_interleave(self.G, dim=0)
        position = torch.tensor([prompt.next_position for prompt in prompts], device=device)
        position = position.repeat_interleave(self.G)[:, None]
        axes = prompts[0].position_ids.shape[:-1]  # (3,) for M-RoPE
        self.next_position = position.expand(*axes, n * self.G, 1)  # ([3,] B, 1)

    def store_prompt_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Called by attention for a pack of prompts: key, value (1, kv_heads, N, D)."""
        for cache, x in ((self.prompt_keys, key), (self.prompt_values, value)):
            rows = x[0][:, self.pack_index].transpose(0, 1)  # (prompts in this pack, kv_heads, P, D)
            if layer not in cache:
                cache[layer] = rows.new_zeros(len(self.prompt_valid), *rows.shape[1:])
            cache[layer][self.batch] = rows

    def select(self, indices: Tensor) -> None:
        """Continue with these entries of the current batch only."""
        self.cache.batch_select_indices(indices)
        self.slots = self.slots[indices]
        self.next_position = self.next_position[..., indices, :]

    @torch.no_grad()
    def step(self, token: Tensor) -> None:
        """Append one token (B,) to each response. `hidden` then predicts the next one."""
        hidden = call_backbone(
            self.base,
            input_ids=token[:, None],
            position_ids=self.next_position,
            past_key_values=self.cache,
            use_cache=True,
            decoder=self,
        )
        self.hidden = hidden[:, -1]
        self.next_position = self.next_position + 1

    def step_mask(self, mask: ModelMask, t: int) -> Tensor:
        """Mask (B, 1, P + t): what the t-th response token sees of its prompt and its response."""
        prompt_index = self.slots // self.G  # (B,)
        valid = F.pad(self.prompt_valid[prompt_index], (0, t), value=True)  # (B, P + t)
        if mask.is_causal:
            return valid[:, None]
        prompt = torch.arange(self.prompt_valid.shape[1], device=valid.device).expand(len(valid), -1)
        response = torch.arange(t, device=valid.device) + self.prompt_lengths[prompt_index][:, None]
        seq_positions = torch.cat([prompt, response], dim=1)  # (B, P + t)
        return mask.evaluate(seq_positions[:, -1:], seq_positions)[:, 0] & valid[:, None]

    def attention(self, layer: int, query, key, value, mask: ModelMask, scaling, eager_attend) -> Tensor:
        """One new token per response attends to its prompt and to its response so far.

        The queries of all responses to a prompt form one matrix, so that the prompt's keys are
        read once, not once per response.
        query (B, heads, 1, D), key and value (B, kv_heads, t, D) -> (B, 1, heads, D)"""
        prompt_keys = self.prompt_keys[layer]  # (n, kv_heads, P, D)
        prompt_values = self.prompt_values[layer]
        n, kv_heads, P, D = prompt_keys.shape
        B, heads, _, _ = query.shape
        t = key.shape[2]
        attn_mask = mask.cached("step", lambda: self.step_mask(mask, t))  # (B, 1, P + t)
        if eager_attend:  # the model's own function: it needs the prompt's keys once per response
            k = torch.cat([prompt_keys[self.slots // self.G], key], dim=2)
            v = torch.cat([prompt_values[self.slots // self.G], value], dim=2)
            return eager_attend(query, k, v, attn_mask[:, None])

        def group_by_prompt(x: Tensor) -> Tensor:
            """(B, heads, d) -> (n, kv_heads, G * heads / kv_heads, d), zero in finished slots."""
            slots = x.new_zeros(n * self.G, heads, x.shape[-1]).index_copy(0, self.slots, x)
            return slots.view(n, self.G, kv_heads, -1, x.shape[-1]).transpose(1, 2).flatten(2, 3)

        def ungroup(x: Tensor) -> Tensor:
            """The inverse of group_by_prompt."""
            x = x.view(n, kv_heads, self.G, heads // kv_heads, -1).transpose(1, 2)
            return x.reshape(n * self.G, heads, -1)[self.slots]

        q = query[:, :, 0] * (D**-0.5 if scaling is None else scaling)  # (B, heads, D)
        prompt_scores = ungroup(group_by_prompt(q) @ prompt_keys.transpose(-1, -2))  # (B, heads, P)
        response_scores = q.view(B, kv_heads, -1, D) @ key.transpose(-1, -2)
        scores = torch.cat([prompt_scores, response_scores.flatten(1, 2)], dim=-1)  # (B, heads, P + t)
        scores = scores.masked_fill(~attn_mask, float("-inf"))
        weights = scores.float().softmax(-1).to(query.dtype)
        prompt_weights, response_weights = weights.split([P, t], dim=-1)
        prompt_out = ungroup(group_by_prompt(prompt_weights) @ prompt_values)  # (B, heads, D)
        response_out = (response_weights.view(B, kv_heads, -1, t) @ value).flatten(1, 2)
        return (prompt_out + response_out)[:, None]


def next_logprobs(model, hidden: Tensor, temperature: float) -> Tensor:
    """Log-probs (B, V) of the next token, from a Decoder's hidden states (B, H)."""
    scale, softcap = logit_scale_and_softcap(model)
    logits = model.get_output_embeddings()(hidden)
    return to_logprobs_(logits, temperature / scale, media_token_ids(model.config), softcap)


@torch.no_grad()
def generate(
    model, prompts: list[Prompt], num_samples: int, max_length: int, eos_ids: list[int],
    temperature: float, max_tokens: int,
) -> list[Response]:  # fmt: skip
    """num_samples responses to each prompt, seeded with the prompt's seed; greedy at temperature 0.

    max_length: tokens per response, including EOS. max_tokens: per pack of prompts. Media tokens
    are never sampled, because log-probs mask them, too."""
    if not is_packed(model):
        return generate_unpacked(model, prompts, num_samples, max_length, eos_ids, temperature)
    uniforms = [np.random.default_rng(p.seed).random((num_samples, max_length)) for p in prompts]
    uniforms = torch.tensor(np.concatenate(uniforms), device=model.device)  # (n * G, R)
    tokens = torch.full(uniforms.shape, -1, device=model.device)  # (n * G, R): -1 after the end
    logprobs = torch.zeros(uniforms.shape, device=model.device)  # (n * G, R)
    ends = torch.tensor(eos_ids, device=model.device)
    decoder = Decoder(model, prompts, num_samples, max_tokens)
    for t in range(max_length):
        slots = decoder.slots  # (B,): unfinished responses
        token_logprobs = next_logprobs(model, decoder.hidden, temperature or 1.0)  # (B, V)
        if temperature:
            token = sample_token(token_logprobs, uniforms[slots, t])  # (B,)
        else:
            token = token_logprobs.argmax(-1)
        tokens[slots, t] = token
        logprobs[slots, t] = token_logprobs.gather(1, token[:, None])[:, 0]
        unfinished = (~torch.isin(token, ends)).nonzero()[:, 0]
        if len(unfinished) < len(slots):  # finished responses leave the batch
            decoder.select(unfinished)
        if len(unfinished) == 0 or t + 1 == max_length:
            break
        decoder.step(token[unfinished])
    lengths = (tokens >= 0).sum(1).tolist()
    truncated = set(decoder.slots.tolist())
    responses = []
    for b, (token_ids, token_logprobs) in enumerate(zip(tokens.cpu(), logprobs.cpu())):  # (R,), (R,)
        length = lengths[b]
        response = Response(token_ids[:length].clone(), token_logprobs[:length].clone(), b in truncated)
        responses.append(response)
    return responses


def sample_token(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling (B,): the token whose CDF interval contains `uniform` (B,)."""
    cdf = logprobs.double().exp().nan_to_num(1.0).cumsum(-1)  # NaN log-probs stop the run after the update
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logprobs.shape[-1] - 1)


def generate_unpacked(
    model, prompts: list[Prompt], num_samples: int, max_length: int, eos_ids: list[int], temperature: float
) -> list[Response]:
    """num_samples responses to each prompt by model.generate, seeded with the prompt's seed."""
    responses = []
    for prompt in prompts:
        torch.manual_seed(prompt.seed)
        try:
            responses += _call_generate(model, prompt, num_samples, max_length, eos_ids, temperature)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if not prompt.media_keys:
                stop(f"the model's generate fails at row {prompt.index}: {error}")
            # Some models can't repeat images, because all images of a batch are one entry.
            torch.manual_seed(prompt.seed)
            for _ in range(num_samples):
                responses += _call_generate(model, prompt, 1, max_length, eos_ids, temperature)
    return responses


@torch.no_grad()
def _call_generate(
    model, prompt: Prompt, num_samples: int, max_length: int, eos_ids: list[int], temperature: float
) -> list[Response]:
    suppressed = media_token_ids(model.config)
    # num_return_sequences would repeat each image patch in place, not each list of images.
    inputs = {name: torch.cat([x] * num_samples) for name, x in unpacked_inputs(prompt).items()}
    try:
        out = model.generate(
            **to_device(inputs, model), max_new_tokens=max_length, eos_token_id=eos_ids,
            pad_token_id=eos_ids[0], do_sample=temperature > 0, temperature=temperature or 1.0,
            top_p=1.0, top_k=0, repetition_penalty=1.0, suppress_tokens=suppressed or None,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    except MODEL_ERRORS as error:
        stop(f"the model's generate fails at row {prompt.index}: {type(error).__name__}: {error}")
    tokens = out.sequences[:, -len(out.scores) :].cpu()  # (G, R)
    logprobs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    responses = []
    for token_ids, token_logprobs in zip(tokens, logprobs.cpu()):  # (R,), (R,)
        ends = torch.isin(token_ids, torch.tensor(eos_ids)).nonzero()[:, 0].tolist()
        length = ends[0] + 1 if ends else len(token_ids)
        response = Response(token_ids[:length].clone(), token_logprobs[:length].clone(), not ends)
        responses.append(response)
    return responses
