"""The check at startup: packing is enabled only if it reproduces the unmodified model's log-probs."""

import math
import re
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from common.attention import PackingNotSupported, is_packed, set_attention
from common.decoding import Decoder, next_logprobs
from common.packing import (
    MODEL_ERRORS,
    TOLERANCE,
    Pack,
    Prompt,
    build_pack,
    build_unpacked,
    media_token_ids,
    stop,
    to_device,
)

PROBE_LENGTHS = (12, 7)  # tokens of the two responses to each probed prompt
# Length limit of the long probe, in tokens: its unpacked forward has logits for each of them, which
# take 1 GB in fp32 with a vocabulary of 150,000.
MAX_PROBE_LENGTH = 2048


def choose_probe_rows(rows, count: int = 16) -> list[int]:
    """About `count` rows of a `datasets.Dataset`, at least two of each combination of media.

    A pass over the columns finds how many media a row has (none, one or several), without opening one."""
    import pyarrow.compute

    table = rows.with_format("arrow")[:]
    counts = [np.zeros(len(rows), dtype=int)]  # per column and type of media
    for name, column in zip(table.column_names, table.columns):
        is_list = hasattr(column.type, "value_type")
        if name.startswith(("image", "video")):
            present = pyarrow.compute.list_value_length(column).fill_null(0) if is_list else column.is_valid()
            counts.append(present.to_numpy())
        elif is_list:  # a chat may have message parts of type image or video
            parts = [re.findall(r"type\W+(image|video)", str(chat)) for chat in column]
            counts += [np.array([part.count(name) for part in parts]) for name in ("image", "video")]
    _, groups = np.unique(np.clip(counts, 0, 2), axis=1, return_inverse=True)
    per_group = max(2, count // (groups.max() + 1))
    chosen = []
    for group in range(groups.max() + 1):
        same = np.flatnonzero(groups == group)
        chosen += same[:: math.ceil(len(same) / per_group)].tolist()
    return sorted(chosen)


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
    pack -> log-probs (M,) or scores (S,). max_length: maximum tokens of a prompt plus a response;
    max_tokens: maximum tokens of a pack. Returns a message on whether packing is enabled.
    Exits if the unmodified model can't run a prompt, or is not causal. Call on all ranks."""
    by_media = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_media[prompt.media_keys].append(prompt)
    probes = [prompt for same in by_media.values() for prompt in (same[0], same[-1])]
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    long_length = min(max_length, max_tokens, max_positions, MAX_PROBE_LENGTH) - probes[0].length
    responses = [_probe_response(model, prompt, R) for prompt in probes for R in PROBE_LENGTHS]
    responses.append(_probe_response(model, probes[0], max(1, long_length)))
    _check_causality(model, forward, probes[0], responses[0])
    try:
        limit = _max_static_rope_length(model)
        if max_length > limit:
            raise PackingNotSupported(f"beyond {limit} tokens its RoPE depends on the sequence length")
        expected = []  # log-probs or score of each response
        for b, prompt in enumerate([*(prompt for prompt in probes for _ in PROBE_LENGTHS), probes[0]]):
            pack = build_unpacked([(0, [b])], {0: prompt}, responses)
            expected.append(_run_unmodified(model, forward, prompt, pack))
        errors = packing_errors(model, forward, probes, responses, expected, max_tokens, temperature)
        for part, error in errors.items():
            if not error < TOLERANCE[model.dtype]:  # also if NaN
                raise PackingNotSupported(f"its {part} change by {error:.1e} nats{_special_layers(model)}")
    except PackingNotSupported as reason:
        is_old = Version(transformers.__version__) < Version("5.18") and any(p.media_keys for p in prompts)
        advice = "; transformers 5.18 and newer pack more vision-language models" if is_old else ""
        return (
            f"warning: packing is not supported for this model ({reason}{advice}); "
            "running one response at a time, which is slower but exact"
        )
    set_attention(model, "packed")
    error = max(errors.values())
    return f"packing enabled: log-probs match the unmodified model within {error:.0e} nats"


def _special_layers(model) -> str:
    """What explains that packing changes log-probs: recurrent state, or layers that choose their keys."""
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    special = {*(getattr(model.config.get_text_config(), "layer_types", None) or [])} - known
    if getattr(model, "_is_stateful", False):
        special.add("recurrent state")
    return f"; it has {', '.join(sorted(special))}" if special else ""


@torch.no_grad()
def _run_unmodified(model, forward: Callable, prompt: Prompt, pack: Pack) -> Tensor:
    """Log-probs (M,) or score (1,) of an unpacked response by the unmodified model."""
    try:
        return forward(to_device(pack, model))
    except MODEL_ERRORS as error:
        stop(f"the model can't run row {prompt.index}: {type(error).__name__}: {error}")


@torch.no_grad()
def _check_causality(model, forward: Callable, prompt: Prompt, response: Tensor) -> None:
    """Exit if the log-probs (or score) of the first half of a response depend on its second half."""
    half = PROBE_LENGTHS[0] // 2
    first, second = response.split(half)
    results = []
    for later in (second, second.flip(0)):
        pack = build_unpacked([(0, [0])], {0: prompt}, [torch.cat([first, later])])
        last = pack.logit_indices[half : half + 1]  # of the first half
        targets = {
            "logit_indices": pack.logit_indices[:half],
            "target_ids": first,
            "last_token_indices": last,
        }
        results.append(_run_unmodified(model, forward, prompt, pack._replace(**targets)))
    error = (results[0] - results[1]).abs().mean()
    if error > TOLERANCE[model.dtype]:
        stop(f"the model is not causal: tokens change the log-probs of earlier ones by {error:.1e} nats")


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
def packing_errors(
    model, forward: Callable, prompts: list[Prompt], responses: list[Tensor], expected: list[Tensor],
    max_tokens: int, temperature: float,
) -> dict[str, float]:  # fmt: skip
    """Largest errors of packed log-probs (or scores), and of decoded ones, in nats.

    The error of a response is the mean over its last tokens, at most 12. The responses are
    two short ones per prompt, at the end of a full pack, where errors that depend on the pack index
    show up, and a long one, for attention that differs from the model's only at a distance."""
    by_index = dict(enumerate(prompts))
    groups = [(i, [2 * i, 2 * i + 1]) for i in by_index]

    def largest_error(results: Tensor, expected: list[Tensor]) -> float:
        parts = results.split([len(x) for x in expected])
        last = PROBE_LENGTHS[0]
        errors = [(x - y)[-last:].abs().mean() for x, y in zip(parts, expected)]
        return torch.stack(errors).max().item()  # keeps NaN

    previous = set_attention(model, "packed")
    if not is_packed(model):
        raise PackingNotSupported("its attention is not in transformers' AttentionInterface")
    try:
        free = max_tokens - sum(prompt.length + sum(PROBE_LENGTHS) for prompt in prompts)
        filling = [(0, [])] * (free // prompts[0].length)
        pack = to_device(build_pack([*filling, *groups], by_index, responses), model)
        long_pack = to_device(build_pack([(0, [len(responses) - 1])], by_index, responses), model)
        errors = {
            "packed log-probs": largest_error(forward(pack), expected[:-1]),
            "log-probs of long responses": largest_error(forward(long_pack), expected[-1:]),
        }
        is_sharded = hasattr(next(model.parameters()), "ds_id")
        can_decode = len(expected[0]) > 1 and not is_sharded  # a reward model has one score per response
        if can_decode and max(errors.values()) < TOLERANCE[model.dtype]:  # decoding starts with a pack
            table = _decoded_logprobs(model, prompts, responses[:-1], max_tokens, temperature)  # (B, R)
            errors["decoded log-probs"] = largest_error(table[pack.token_index], expected[:-1])
        return errors
    except MODEL_ERRORS as exception:
        raise PackingNotSupported(f"{type(exception).__name__}: {exception}") from exception
    finally:
        set_attention(model, previous)


def _probe_response(model, prompt: Prompt, length: int) -> Tensor:
    """A response of some length, made of the prompt's own text tokens.

    In bf16, log-probs of random tokens would be twice as noisy."""
    masked = torch.tensor(media_token_ids(model.config), dtype=torch.long)
    tokens = prompt.input_ids[~torch.isin(prompt.input_ids, masked)]
    if len(tokens) == 0:  # the prompt is an image
        tokens = torch.arange(model.config.get_text_config().vocab_size // 2)
        tokens = tokens[~torch.isin(tokens, masked)]
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
