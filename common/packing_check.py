"""The check at startup: packing is enabled only if it reproduces the unmodified model's log-probs."""

import math
from collections import defaultdict
from collections.abc import Callable

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from common.attention import PackingNotSupported, is_packed, set_attention
from common.decoding import Decoder, next_logprobs
from common.packing import TOLERANCE, Prompt, build_pack, build_unpacked, media_token_ids, to_device

PROBE_LENGTHS = (12, 7)  # tokens of the two responses to each probed prompt
# Length limit of the long probe, in tokens: its unpacked forward has logits for each of them, which
# take 1 GB in fp32 with a vocabulary of 150,000.
MAX_PROBE_LENGTH = 2048


def enable_packing_if_exact(
    model,
    forward: Callable,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    temperature: float = 1.0,
) -> str:
    """Switch to packed attention if it reproduces the unmodified model's log-probs on `prompts`.

    Of each combination of media inputs, the shortest and the longest prompt are probed. forward:
    pack -> log-probs (M,) or scores (S,). max_length: limit of a prompt and a response together;
    max_tokens: of a pack. Returns a message that names the path in use. Call on all ranks."""
    by_media = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_media[prompt.media_keys].append(prompt)
    probes = [prompt for same in by_media.values() for prompt in (same[0], same[-1])]
    try:
        limit = _max_static_rope_length(model)
        if max_length > limit:
            raise PackingNotSupported(f"beyond {limit} tokens its RoPE depends on the sequence length")
        error = packing_error(model, forward, probes, max_length, max_tokens, temperature)
        if not error < TOLERANCE[model.dtype]:  # also if NaN
            raise PackingNotSupported(f"its log-probs change by {error:.1e} nats")
    except PackingNotSupported as reason:
        is_old = Version(transformers.__version__) < Version("5.18") and any(p.media_keys for p in prompts)
        advice = "; transformers 5.18 and newer pack more vision-language models" if is_old else ""
        return (
            f"warning: packing is not supported for this model ({reason}{advice}); "
            "running one response at a time, which is slower but exact"
        )
    set_attention(model, "packed")
    return f"packing enabled: log-probs match the unmodified model within {error:.0e} nats"


def _max_static_rope_length(model) -> float:
    """Longest sequence whose RoPE angles do not depend on its length.

    Beyond it, the RoPE types dynamic and longrope rotate every token by different angles."""
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
    model, forward: Callable, prompts: list[Prompt], max_length: int, max_tokens: int, temperature: float
) -> float:
    """Largest error of packed log-probs (or scores) and of decoded ones on some responses, in nats.

    The error of a response is the mean over its last tokens, at most 12. The responses are
    two short ones per prompt, at the end of a full pack, where errors that depend on the pack index
    show up, and a long one, for attention that differs from the model's only at a distance."""
    by_index = dict(enumerate(prompts))
    groups = [(i, [2 * i, 2 * i + 1]) for i in by_index]
    responses = [_probe_response(model, prompt, R) for prompt in prompts for R in PROBE_LENGTHS]
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    long_length = min(max_length, max_tokens, max_positions, MAX_PROBE_LENGTH) - prompts[0].length
    responses.append(_probe_response(model, prompts[0], max(1, long_length)))
    long_group = (0, [len(responses) - 1])
    expected = []  # log-probs or score of each response, by the unmodified model
    for i, response_indices in [*groups, long_group]:
        for b in response_indices:
            pack = build_unpacked([(i, [b])], by_index, responses)
            expected.append(forward(to_device(pack, model)))

    def largest_error(results: Tensor, expected: list[Tensor]) -> Tensor:
        parts = results.split([len(x) for x in expected])
        last = PROBE_LENGTHS[0]
        errors = [(x - y)[-last:].abs().mean() for x, y in zip(parts, expected)]
        return torch.stack(errors).max()  # keeps NaN

    previous = set_attention(model, "packed")
    if not is_packed(model):
        raise PackingNotSupported("its attention is not in transformers' AttentionInterface")
    try:
        free = max_tokens - sum(prompt.length + sum(PROBE_LENGTHS) for prompt in prompts)
        filling = [(0, [])] * (free // prompts[0].length)
        pack = to_device(build_pack([*filling, *groups], by_index, responses), model)
        long_pack = to_device(build_pack([long_group], by_index, responses), model)
        errors = [
            largest_error(forward(pack), expected[:-1]),
            largest_error(forward(long_pack), expected[-1:]),
        ]
        is_sharded = hasattr(next(model.parameters()), "ds_id")
        can_decode = model.get_output_embeddings() is not None and not is_sharded
        if can_decode and max(errors) < TOLERANCE[model.dtype]:  # decoding starts with a pack
            table = _decoded_logprobs(model, prompts, responses[:-1], max_tokens, temperature)  # (B, R)
            errors.append(largest_error(table[pack.token_index], expected[:-1]))
        return torch.stack(errors).max().item()
    except (
        AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError
    ) as exception:  # fmt: skip
        # Model code that can't run a pack raises these. Others, such as out of memory, end the run.
        raise PackingNotSupported(f"{type(exception).__name__}: {exception}") from exception
    finally:
        set_attention(model, previous)


def _probe_response(model, prompt: Prompt, length: int) -> Tensor:
    """A response of some length, made of the prompt's own text tokens.

    In bf16, log-probs of random tokens would be twice as noisy."""
    masked = torch.tensor(media_token_ids(model.config), dtype=torch.long)
    tokens = prompt.input_ids[~torch.isin(prompt.input_ids, masked)]
    return tokens.repeat(length // max(1, len(tokens)) + 1)[-length:]


def _decoded_logprobs(
    model, prompts: list[Prompt], responses: list[Tensor], max_tokens: int, temperature: float
) -> Tensor:
    """Log-probs (B, R) of two responses per prompt, token by token, as a sampler computes them."""
    tokens = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)  # (B, R)
    tokens = tokens.to(model.device)
    decoder = Decoder(model, prompts, len(PROBE_LENGTHS), max_tokens)
    table = torch.zeros(tokens.shape, device=model.device)
    for t, token in enumerate(tokens.T):
        logprobs = next_logprobs(model, decoder.hidden, temperature)  # (B, V)
        table[:, t] = logprobs.gather(1, token[:, None])[:, 0]
        decoder.step(token)
    return table
