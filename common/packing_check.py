"""Startup check: use packed batches if their log-probs and gradients match padded ones.

It compares, on some rows of the dataset:
1. a padded batch with its rows one at a time, for which the model computes its own positions,
2. padded log-probs with those of the model's own generate,
3. packed log-probs with padded ones, over all tokens, and gradients of the input embeddings.

A *case* is a prompt with responses, which are pieces of the other prompts' text.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common import packing, stop
from common.attention import ModelError, set_attention
from common.decoding import generate_padded
from common.packing import TOLERANCE, Continuation, Prompt, continue_prompt, extend_prompt, run_model

SHORT_LENGTHS = (12, 7)  # tokens of the two short responses to each prompt
MAX_LENGTH = 2048  # tokens of the sequence with the long response
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5}  # relative, of norms


class Case(NamedTuple):
    prompt: Prompt
    responses: list[Continuation]


def choose_probe_rows(rows) -> list[int]:
    """16 evenly spaced rows of a `datasets.Dataset`, and the first with media of each column."""
    chosen = {k * len(rows) // 16 for k in range(16)}
    for name in rows.column_names:
        if name.startswith(("image", "video")):
            column = rows.select_columns([name]).with_format("arrow")[:][name]  # decodes nothing
            chosen.add(next((i for i, value in enumerate(column) if value.as_py()), None))
    return sorted(chosen - {None})


@torch.no_grad()
def choose_layout(
    network,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    forward: Callable = lambda network, pack: network(pack),
    must_generate: bool = True,
    encode_observation: Callable[[Prompt], Continuation] | None = None,
) -> str:
    """Switch the model to the packed layout if it is exact there; returns a message.

    All ranks call it and decide alike. It exits if padded rows don't match single rows.

    network             a module around network.model, or its DeepSpeed engine
    max_length          maximum tokens of a prompt plus a response
    max_tokens          maximum tokens of a pack
    forward             (network, pack) -> log-probs or values (M,), or rewards (S,)
    must_generate       exit, instead of a warning, if the model's generate and its forward differ
    encode_observation  sequence so far -> observation, for trajectories"""
    module = getattr(network, "module", network)
    model = module.model
    # ZeRO-3 needs the engine's forward; otherwise the module's, because the engine refuses autograd.grad.
    forward = functools.partial(forward, network if is_sharded(model) else module)
    cases, long_case, notes = make_cases(model, prompts, max_length, max_tokens, encode_observation)
    model.checked_media = {frozenset(extend_prompt(x.prompt, x.responses[0]).media_keys) for x in cases}
    run = functools.partial(run_cases, model, forward, max_tokens)
    padded = compare_padded_with_single_rows(model, run, [*cases, long_case])
    if is_sharded(model):
        notes.append("not compared under ZeRO-3: the model's generate, gradients")
    elif model.can_generate():
        notes += compare_padded_with_generate(model, cases, must_generate)

    attention = model.config.get_text_config()._attn_implementation
    reason = ""
    try:
        if attention != "sdpa":
            raise ModelError(f"the model uses {attention} attention, but packing needs sdpa")
        if max_length > (limit := packing.rope_limit(model)):
            raise ModelError(f"beyond {limit} tokens its RoPE depends on the sequence length")
        model.logit_factor = measure_logit_factor(model, cases[0])
        error = compare_packed_with_padded(model, run, cases, long_case, padded, max_tokens)
    except ModelError as problem:
        reason = str(problem)
    is_exact = torch.tensor(float(not reason), device=model.device)
    if dist.is_initialized():  # on all ranks
        dist.all_reduce(is_exact, op=dist.ReduceOp.MIN)
    if is_sharded(model):
        network.empty_partition_cache()  # a failed check can leave parameters gathered
    if is_exact:
        message = f"packing enabled: outputs match the unmodified model within {error:.0e}"
    else:
        set_attention(model, attention)
        reason = reason or "another rank could not pack it"
        message = f"warning: batches are padded, because packing is not supported for this model ({reason})"
    return "; ".join([message, *notes])


# ---- cases ----


def make_cases(
    model,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    encode_observation: Callable | None,
) -> tuple[list[Case], Case, list[str]]:
    """Cases with short responses, a case with a long response, and what these don't cover.

    The prompts are the shortest and the longest one of each combination of media."""
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    # A response and generated tokens follow.
    prompts = [x for x in prompts if x.length + 2 * SHORT_LENGTHS[0] <= max_positions] or prompts
    by_media = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_media[prompt.media_keys].append(prompt)
    cases = []
    for same_media in by_media.values():
        shortest_and_longest = same_media if len(same_media) < 3 else [same_media[0], same_media[-1]]
        for prompt in shortest_and_longest:
            texts = other_text(model, prompts, prompt, sum(SHORT_LENGTHS)).split(SHORT_LENGTHS)
            cases.append(Case(prompt, [continue_prompt(prompt, text) for text in texts]))
    shortest = cases[0].prompt
    if encode_observation:
        turn, other_turn = cases[0].responses
        sequence = extend_prompt(shortest, turn)
        observation = encode_observation(sequence)
        sequence = extend_prompt(sequence, observation)
        last_turn = continue_prompt(sequence, other_turn.input_ids)
        cases.append(Case(shortest, [packing.join_continuations([turn, observation, last_turn])]))
    length = min(max_length, max_tokens, max_positions, MAX_LENGTH)
    notes = [f"not compared: sequences of more than {length} tokens"] if length < max_length else []
    long_text = other_text(model, prompts, shortest, max(1, length - shortest.length))
    return cases, Case(shortest, [continue_prompt(shortest, long_text)]), notes


def other_text(model, prompts: list[Prompt], prompt: Prompt, length: int) -> Tensor:
    """Token ids (length,) for responses to a prompt, from the text of all other prompts.

    A response that repeats its own prompt is easy to predict, so its log-probs hardly show errors."""
    media_ids = torch.tensor(packing.media_token_ids(model.config), dtype=torch.long)
    others = [x.input_ids for x in prompts if x is not prompt] or [prompt.input_ids]
    ids = torch.cat(others)
    ids = ids[~torch.isin(ids, media_ids)]
    ids = ids if len(ids) > 0 else torch.arange(100)  # the prompts are images
    # Don't start with what all prompts begin with, the words of the chat template.
    start = len(others[0]) // 2
    return ids.roll(-start).repeat(length // len(ids) + 1)[:length]


def run_cases(
    model, forward: Callable, max_tokens: int, cases: list[Case], own_positions: bool = False
) -> list[Tensor]:
    """What `forward` returns for each response: (its tokens,) or (1,). own_positions: let the model
    compute position_ids."""
    groups = []
    responses = []
    for i, case in enumerate(cases):
        groups.append((i, [len(responses) + k for k in range(len(case.responses))]))
        responses += case.responses
        longest = max(map(len, case.responses), default=0)
        max_tokens = max(max_tokens, case.prompt.length + longest)  # may exceed the run's limit
    packs = packing.iter_rank_packs(
        model=model,
        groups=groups,
        prompts=[case.prompt for case in cases],
        responses=responses,
        max_tokens=max_tokens,
    )
    results = [None] * len(responses)
    for pack in packs:
        if own_positions:
            pack.model_inputs.pop("position_ids", None)
        values = forward(pack)  # (M,), or (S,) from a reward model
        is_per_response = len(values) == len(pack.response_index)  # S = M: either is right
        for s, b in enumerate(pack.response_index.tolist()):
            results[b] = values[s : s + 1] if is_per_response else values[pack.response_of_token == s]
    return results


def compare_padded_with_single_rows(model, run: Callable, cases: list[Case]) -> list[Tensor]:
    """The results of padded rows. Exits if they are not those of one row at a time."""
    single_rows = [Case(case.prompt, [response]) for case in cases for response in case.responses]
    try:
        padded = run(cases)
        error = largest_error(padded, run(single_rows, own_positions=True))
    except ModelError as problem:
        stop(f"the model can't run the dataset's prompts: {problem}")
    if not error < TOLERANCE[model.dtype]:  # also if it is NaN
        stop(f"the model's outputs change by {error:.1e} in a batch of padded rows")
    return padded


def largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Largest mean absolute difference over chunks of about 64 tokens.

    A result with one entry is a reward, whose scale is arbitrary, so its difference is relative above 1."""
    errors = []
    for x, y in zip(results, expected, strict=True):
        scale = y.abs().clamp(min=1) if len(y) == 1 else 1.0
        chunks = ((x - y).abs() / scale).tensor_split(max(1, len(y) // 64))
        errors += [chunk.mean() for chunk in chunks]
    return float(torch.stack(errors).max())


def compare_padded_with_generate(model, cases: list[Case], must_generate: bool) -> list[str]:
    """Compare padded log-probs of greedy tokens with those of generate. Exits, or returns a warning.

    They differ if generate gives response tokens different inputs, or if the model is not causal."""
    no_eos = [model.config.get_text_config().vocab_size]  # an id that no token has
    for case in cases:
        # It ends in text, because generate gives wrong positions to tokens that follow an image.
        sequence = extend_prompt(case.prompt, case.responses[0])
        try:
            [sampled] = generate_padded(model, sequence, 1, SHORT_LENGTHS[0], no_eos, temperature=0.0)
            response = continue_prompt(sequence, sampled.token_ids)
            pack = packing.build_padded([(0, [0])], [sequence], [response])
            logprobs, _ = packing.response_logprobs(model, packing.to_device(pack, model))
            error = float((logprobs.cpu() - sampled.logprobs).abs().mean())
            if error < TOLERANCE[model.dtype]:
                continue
            problem = f"the model's generate and its forward differ by {error:.1e} nats per token"
        except ModelError as model_error:
            problem = f"the model's generate fails: {model_error}"
        if must_generate:
            stop(f"row {case.prompt.row_id}: {problem}")
        return [f"warning: row {case.prompt.row_id}: {problem}, so don't sample from this model"]
    return []


def compare_packed_with_padded(
    model, run: Callable, cases: list[Case], long_case: Case, padded: list[Tensor], max_tokens: int
) -> float:
    """Switch to the packed layout; returns the largest error of its outputs."""
    has_gradients = not is_sharded(model)
    expected = embedding_gradients(model, run, cases) if has_gradients else None
    set_attention(model, "packed")
    if not packing.is_packed(model):
        raise ModelError("its attention can't be replaced")
    # For each kind of media, copies of the long response, which are not compared, fill the rest of a pack.
    # plan_packs puts the largest group first, so the cases show errors that only occur at large pack indices.
    used = sum(x.prompt.length + sum(map(len, x.responses)) for x in [*cases, long_case])
    fillers = []
    for prompt in {case.prompt.media_keys: case.prompt for case in cases}.values():
        response = continue_prompt(prompt, long_case.responses[0].input_ids)
        free_tokens = max_tokens - used - prompt.length
        fillers.append(Case(prompt, [response] * max(0, free_tokens // len(response))))
    error = largest_error(run([*cases, long_case, *fillers])[: len(padded)], padded)
    if not error < TOLERANCE[model.dtype]:
        raise ModelError(f"its outputs change by {error:.1e}")
    if has_gradients:
        difference = embedding_gradients(model, run, cases) - expected
        gradient_error = float(difference.norm() / expected.norm())
        if not gradient_error < GRADIENT_TOLERANCE[model.dtype]:
            raise ModelError(f"its gradients change by {gradient_error:.1e} of their norm")
    return error


@torch.enable_grad()
def embedding_gradients(model, run: Callable, cases: list[Case]) -> Tensor:
    """Gradients (1024, H) of the sum of squared results with respect to the input embeddings.

    The layouts order tokens differently, so gradients are added up by token id, modulo 1024."""
    embeddings = model.get_input_embeddings()
    zeros = torch.zeros(1024, embeddings.weight.shape[1], device=model.device, requires_grad=True)
    gradients = torch.zeros_like(zeros)

    def add_zeros(module, args, output: Tensor) -> Tensor:
        return output + zeros[args[0] % len(zeros)].to(output.dtype)

    with embeddings.register_forward_hook(add_zeros):
        for case in cases:  # one at a time, because each keeps its activations
            loss = sum(values.square().sum() for values in run([case]))
            gradients += run_model(torch.autograd.grad, loss, zeros)[0]
    return gradients


def measure_logit_factor(model, case: Case) -> float:
    """c if logits = c * head(hidden states), before a softcap, as in Cohere, Granite and MiniCPM."""
    head = model.get_output_embeddings()
    if head is None:  # a critic or a reward model
        return 1.0
    pack = packing.build_padded([(0, [0])], [case.prompt], case.responses)
    logits = packing.padded_logits(model, pack).float()  # (R, V)
    unscaled = run_model(head, packing.forward_hidden(model, pack)).float()  # (R, V)
    if softcap := packing.logit_options(model)["softcap"]:
        is_small = logits.abs() < softcap / 2
        logits, unscaled = softcap * (logits[is_small] / softcap).atanh(), unscaled[is_small]
    factor = float((logits * unscaled).sum() / unscaled.square().sum())
    if not (logits - factor * unscaled).abs().max() < 1e-2 * logits.abs().max():
        raise ModelError("its logits are not its head's output times a constant")
    return 1.0 if abs(factor - 1) < 1e-3 else factor  # otherwise it has rounding errors


def is_sharded(model) -> bool:
    """Whether DeepSpeed's ZeRO-3 distributes the weights over ranks."""
    return hasattr(next(model.parameters()), "ds_id")
