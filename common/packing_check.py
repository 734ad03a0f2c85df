"""The check at startup: packing is enabled only if it reproduces the unmodified model's log-probs."""

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from common.attention import PackingNotSupported, is_packed, set_attention
from common.decoding import Decoder, next_logprobs
from common.packing import TOLERANCE, Prompt, build_pack, build_unpacked, media_token_ids, to_device


def enable_packing_if_exact(
    model,
    forward: Callable,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    temperature: float = 1.0,
) -> str:
    """Switch to packed attention if it reproduces the unmodified model's log-probs on `prompts`.

    forward: pack -> log-probs (M,) or scores (S,). max_length: tokens of a prompt and a response.
    max_tokens: tokens of a pack. Returns a message that says which path is used. Collective."""
    by_media = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_media[prompt.media_keys].append(prompt)
    probes = [prompt for same in by_media.values() for prompt in (same[0], same[-1])]
    try:
        limit = _max_static_rope_length(model)
        if max_length > limit:
            raise PackingNotSupported(f"beyond {limit} tokens its RoPE depends on the sequence length")
        error = packing_error(model, forward, probes, max_tokens, temperature)
        if not error < TOLERANCE[model.dtype]:  # also if NaN
            raise PackingNotSupported(f"its log-probs change by {error:.1e} nats")
    except PackingNotSupported as reason:
        return (
            f"warning: packing is not supported for this model ({reason}); "
            "running one response at a time, which is slower but exact"
        )
    set_attention(model, "packed")
    return f"packing enabled: log-probs match the unmodified model within {error:.0e} nats"


def _max_static_rope_length(model) -> float:
    """Longest sequence whose RoPE angles do not depend on its length.

    Beyond it, the RoPE types dynamic and longrope rotate every token by other angles."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limit = math.inf
    for parameters in [rope, *rope.values()]:  # some models have one dict per layer type
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings", math.inf)
            limit = min(limit, original, config.max_position_embeddings)
    return limit


@torch.no_grad()
def packing_error(
    model, forward: Callable, prompts: list[Prompt], max_tokens: int, temperature: float = 1.0
) -> float:
    """How much packing and decoding change the log-probs of the unmodified model, in nats.

    The mean over the tokens of a response, and the largest over two responses per prompt. The
    prompts come last in a full pack, so that errors that depend on the pack index show up."""
    responses = _probe_responses(model, prompts)
    by_index = dict(enumerate(prompts))
    groups = [(i, [2 * i, 2 * i + 1]) for i in by_index]
    expected = []  # log-probs or score of each response
    for i, response_indices in groups:
        for b in response_indices:
            pack = build_unpacked([(i, [b])], by_index, responses)
            expected.append(forward(to_device(pack, model)))

    def largest_difference(results: Tensor) -> Tensor:
        parts = results.split([len(x) for x in expected])
        return torch.stack([(x - y).abs().mean() for x, y in zip(parts, expected)]).max()

    previous = set_attention(model, "packed")
    if not is_packed(model):
        raise PackingNotSupported("its attention is not in transformers' AttentionInterface")
    try:
        free = max_tokens - sum(prompt.length + 19 for prompt in prompts)
        filling = [(0, [])] * (free // prompts[0].length)
        pack = to_device(build_pack([*filling, *groups], by_index, responses), model)
        error = largest_difference(forward(pack))
        is_sharded = hasattr(next(model.parameters()), "ds_id")
        can_decode = model.get_output_embeddings() is not None and not is_sharded
        if can_decode and error < TOLERANCE[model.dtype]:  # decoding starts with a pack
            table = _decoded_logprobs(model, prompts, responses, max_tokens, temperature)
            error = torch.maximum(error, largest_difference(table[pack.token_index]))  # keeps NaN
        return error.item()
    except (AttributeError, NotImplementedError, TypeError, ValueError) as exception:
        # Model code that can't run a pack raises these. Others, such as out of memory, end the run.
        raise PackingNotSupported(f"{type(exception).__name__}: {exception}") from exception
    finally:
        set_attention(model, previous)


def _probe_responses(model, prompts: list[Prompt]) -> list[Tensor]:
    """Two responses, of 12 and 7 tokens, to each prompt: tokens of the prompt itself.

    Random tokens would be twice as noisy in bf16."""
    masked = torch.tensor(media_token_ids(model.config), dtype=torch.long)
    responses = []
    for prompt in prompts:
        tokens = prompt.input_ids[~torch.isin(prompt.input_ids, masked)].repeat(24)[-24:]
        responses += [tokens[:12], tokens[12:19]]
    return responses


def _decoded_logprobs(
    model, prompts: list[Prompt], responses: list[Tensor], max_tokens: int, temperature: float
) -> Tensor:
    """Log-probs (B, R) of two responses per prompt, token by token, as a sampler computes them."""
    tokens = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)  # (B, R)
    tokens = tokens.to(model.device)
    decoder = Decoder(model, prompts, 2, max_tokens)
    table = torch.zeros(tokens.shape, device=model.device)
    for t, token in enumerate(tokens.T):
        logprobs = next_logprobs(model, decoder.hidden, temperature)  # (B, V)
        table[:, t] = logprobs.gather(1, token[:, None])[:, 0]
        decoder.step(token)
    return table
