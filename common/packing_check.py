"""The check at startup chooses the layout of batches: packed if it reproduces the padded one, else padded.

It compares, on some rows of the dataset:
1. padded rows with the same rows one at a time, for which the model computes its own positions,
2. padded log-probs with those of the model's own generate,
3. packed log-probs with padded ones, over all tokens, and gradients of the input embeddings.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common import packing
from common.attention import ModelError, PackingNotSupported, set_attention
from common.packing import TOLERANCE, Continuation, Prompt, continue_prompt, extend_prompt, run_model

SHORT_LENGTHS = (12, 7)  # tokens of the two short responses to each probed prompt
MAX_PROBE_LENGTH = 2048  # of the sequence with the long response
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5}  # relative, of norms


class Case(NamedTuple):
    """A prompt with responses to compare."""

    prompt: Prompt
    responses: list[Continuation]


def choose_probe_rows(rows, count: int = 16) -> list[int]:
    """Evenly spaced rows of a `datasets.Dataset`, and the first row with media of each media column."""
    import pyarrow.compute

    chosen = {k * len(rows) // count for k in range(count)} if len(rows) else set()
    for name in rows.column_names:
        if name.startswith(("image", "video")):
            column = rows.select_columns([name]).with_format("arrow")[:][name]
            present = column.is_valid()
            if hasattr(column.type, "value_type"):  # lists, which may be empty
                lengths = pyarrow.compute.list_value_length(column).fill_null(0)
                present = pyarrow.compute.greater(lengths, 0)
            chosen.add(pyarrow.compute.index(present, True).as_py())
    return sorted(chosen - {-1})


@torch.no_grad()
def choose_layout(
    model,
    forward: Callable,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    samples: bool = True,
    encode_observation: Callable[[Prompt], Continuation] | None = None,
) -> str:
    """Switch to the packed layout if it is exact; returns a message. Call on all ranks, which decide alike.

    forward: pack -> log-probs or values (M,), or scores (S,). max_length: maximum tokens of a prompt plus
    a response; max_tokens: maximum tokens of a pack. samples: exit if generate and forward disagree,
    instead of a warning. encode_observation: sequence so far -> observation, for trajectories."""
    cases, notes = make_cases(model, prompts, max_length, max_tokens, encode_observation)
    run = functools.partial(run_cases, model, forward, max_tokens)
    padded = compare_padded_with_single_rows(model, run, cases)
    if is_sharded(model):
        notes.append("not compared under ZeRO-3: the model's generate, gradients")
    elif model.can_generate():
        notes += compare_with_generate(model, cases[:-1], samples)
    attention = model.config.get_text_config()._attn_implementation
    reason = ""
    try:
        if max_length > (limit := packing.rope_limit(model)):
            raise PackingNotSupported(f"beyond {limit} tokens its RoPE depends on the sequence length")
        error = compare_packed_with_padded(model, run, cases, padded, max_tokens)
    except ModelError as problem:
        reason = str(problem)
    model.checked_media = {frozenset(extend_prompt(prompt, xs[0]).media_keys) for prompt, xs in cases}
    if all_ranks_agree(not reason, model.device):
        message = f"packing enabled: log-probs match the unmodified model within {error:.0e} nats"
    else:
        set_attention(model, attention)
        reason = reason or "another rank could not pack it"
        message = f"warning: batches are padded, because packing is not supported for this model ({reason})"
    return "; ".join([message, *notes])


def compare_padded_with_single_rows(model, run: Callable, cases: list[Case]) -> list[Tensor]:
    """Results of padded rows. Exits if single rows, for which the model computes positions, give others."""
    try:
        padded = run(cases)
        rows = [Case(prompt, [response]) for prompt, responses in cases for response in responses]
        single = run(rows, own_positions=True)
    except ModelError as error:
        packing.stop(f"the model can't run the dataset's prompts: {error}")
    row_error = largest_error(padded, single)
    if not row_error < TOLERANCE[model.dtype]:  # also if it is NaN
        packing.stop(f"the model's outputs change by {row_error:.1e} in a batch of padded rows")
    return padded


def compare_packed_with_padded(
    model, run: Callable, cases: list[Case], padded: list[Tensor], max_tokens: int
) -> float:
    """Switch to the packed layout; returns the largest error. Raises if packing is not exact."""
    attention = model.config.get_text_config()._attn_implementation
    if attention != "sdpa":
        raise PackingNotSupported(f"its attention is {attention}, not sdpa")
    model.logit_factor = measure_logit_factor(model, *cases[0])
    if not is_sharded(model):
        padded_gradients = embedding_gradients(model, run, cases[:-1])
    set_attention(model, "packed")
    packed = run([*cases, fill_pack(cases, max_tokens)])
    error = largest_error(packed[: len(padded)], padded)
    if not error < TOLERANCE[model.dtype]:
        raise PackingNotSupported(f"its log-probs change by {error:.1e} nats")
    if not is_sharded(model):
        difference = embedding_gradients(model, run, cases[:-1]) - padded_gradients
        gradient_error = float(difference.norm() / padded_gradients.norm())
        if not gradient_error < GRADIENT_TOLERANCE[model.dtype]:
            raise PackingNotSupported(f"its gradients change by {gradient_error:.1e} of their norm")
    return error


def is_sharded(model) -> bool:
    """True under ZeRO-3."""
    return hasattr(next(model.parameters()), "ds_id")


def make_cases(
    model,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    encode_observation: Callable | None,
) -> tuple[list[Case], list[str]]:
    """The cases to compare, and notes on what they don't cover.

    The shortest and the longest prompt of each combination of media get short responses. With an environment,
    a trajectory follows. The last case is the shortest prompt with a long response."""
    by_media = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_media[prompt.media_keys].append(prompt)
    cases = []
    notes = []
    for same_media in by_media.values():
        for prompt in same_media[:1] + same_media[1:][-1:]:
            text = make_response_text(model, prompts, prompt)
            cases.append(Case(prompt, [continue_prompt(prompt, text[R : 2 * R]) for R in SHORT_LENGTHS]))
    shortest, (turn, _) = cases[0]
    text = make_response_text(model, prompts, shortest)
    if encode_observation:
        observation = encode_observation(extend_prompt(shortest, turn))
        sequence = extend_prompt(extend_prompt(shortest, turn), observation)
        last_turn = continue_prompt(sequence, text[: SHORT_LENGTHS[0]])
        if sequence.length + SHORT_LENGTHS[0] <= max_tokens:
            cases.append(Case(shortest, [packing.join_continuations([turn, observation, last_turn])]))
        else:
            notes.append("not compared: observations, which don't fit into a pack")
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    length = min(max_length, max_tokens, max_positions, MAX_PROBE_LENGTH)
    if length < max_length:
        notes.append(f"not compared: sequences of more than {length} tokens")
    R = max(1, length - shortest.length)
    long_response = continue_prompt(shortest, text.repeat(R // len(text) + 1)[:R])
    return [*cases, Case(shortest, [long_response])], notes


def make_response_text(model, prompts: list[Prompt], prompt: Prompt) -> Tensor:
    """Token ids of a response to `prompt`: the text of all other prompts.

    A trained model would copy the prompt's own text, whatever it sees. In bf16, log-probs of random tokens
    would be twice as noisy."""
    media_ids = torch.tensor(packing.media_token_ids(model.config), dtype=torch.long)
    others = [x.input_ids for x in prompts if x is not prompt] or [prompt.input_ids]
    ids = torch.cat(others)
    ids = ids[~torch.isin(ids, media_ids)]
    ids = ids if len(ids) > 0 else torch.arange(100)  # the prompts are images
    return ids.repeat(2 * max(SHORT_LENGTHS)).roll(-(len(others[0]) // 2))  # not the template's beginning


def fill_pack(cases: list[Case], max_tokens: int) -> Case:
    """Copies of the long response that fill a pack, so that errors of pack indices show.

    plan_packs puts the largest group first, so these copies push the other cases to the end of their pack.
    The copies themselves are not compared."""
    prompt, [response] = cases[-1]
    tokens = prompt.length  # the copies repeat the prompt
    for case in cases:
        tokens += case.prompt.length + sum(len(x.response_mask) for x in case.responses)
    return Case(prompt, [response] * ((max_tokens - tokens) // len(response.response_mask)))


def run_cases(
    model, forward: Callable, max_tokens: int, cases: list[Case], own_positions: bool = False
) -> list:
    """The results of all responses. own_positions: the model computes positions itself."""
    prompts = [replace(prompt, row_id=i) for i, (prompt, _) in enumerate(cases)]
    continuations = dict(enumerate(x for _, responses in cases for x in responses))
    indices = iter(continuations)
    packs = packing.iter_rank_packs(
        model,
        groups=[(i, [next(indices) for _ in responses]) for i, (_, responses) in enumerate(cases)],
        prompts=prompts,
        encode=prompts.__getitem__,
        responses=[x.token_inputs["input_ids"][0] for x in continuations.values()],
        max_tokens=max(max_tokens, max(prompt.length for prompt in prompts) + SHORT_LENGTHS[0]),
        continuations=continuations,
    )
    results = {}
    for pack in packs:
        if own_positions:
            pack.model_inputs.pop("position_ids", None)
        values = forward(pack)
        for s, b in enumerate(pack.response_index.tolist()):
            are_scores = len(values) == len(pack.response_index)
            results[b] = values[s : s + 1] if are_scores else values[pack.response_of_token == s]
    return [results[b] for b in continuations]


def largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference from the expected results in a mean over about 64 tokens."""
    errors = []
    for x, y in zip(results, expected):
        errors += [part.mean() for part in (x - y).abs().tensor_split(max(1, len(y) // 64))]
    return float(torch.stack(errors).max())


@torch.enable_grad()
def embedding_gradients(model, run: Callable, cases: list[Case]) -> Tensor:
    """Gradients (1024, H) of the squared results with respect to the input embeddings.

    They are added up by token id modulo 1024, because layouts have tokens in other places."""
    records = []  # token ids and embeddings of each forward

    def record(module, args, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()  # also if all weights are frozen
        records.append((args[0], leaf))
        return leaf.clone()  # some models write image features into it

    hook = model.get_input_embeddings().register_forward_hook(record)
    try:
        loss = sum(values.square().sum() for values in run(cases))
    finally:
        hook.remove()
    leaves = [leaf for _, leaf in records]
    gradients = run_model(torch.autograd.grad, loss, leaves, materialize_grads=True)
    table = torch.zeros(1024, leaves[0].shape[-1], device=model.device)
    for (ids, _), gradient in zip(records, gradients):
        table.index_add_(0, ids.flatten() % 1024, gradient.flatten(0, -2).float())
    return table


def compare_with_generate(model, cases: list[Case], samples: bool) -> list[str]:
    """Compare padded log-probs of greedy tokens with those of generate. Exits, or returns a warning."""
    for prompt, responses in cases:
        try:
            error = generate_error(model, extend_prompt(prompt, responses[0]))
            if error < TOLERANCE[model.dtype]:
                continue
            problem = f"the model's generate and its forward differ by {error:.1e} nats per token"
        except ModelError as model_error:
            problem = f"the model's generate fails: {model_error}"
        if samples:
            packing.stop(f"row {prompt.row_id}: {problem}")
        return [f"warning: row {prompt.row_id}: {problem}, so don't sample from this model"]
    return []


def generate_error(model, sequence: Prompt) -> float:
    """Mean difference of log-probs, large if the inputs of response tokens are not those of generate, or
    if the model is not causal.

    The sequence ends in text, because generate mis-positions tokens that follow an image."""
    count = SHORT_LENGTHS[0]
    suppressed = packing.media_token_ids(model.config)
    out = run_model(
        model.generate,
        **packing.to_device(sequence.inputs, model),
        do_sample=False,
        num_beams=1,
        max_new_tokens=count,
        min_new_tokens=count,
        suppress_tokens=suppressed or None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    response = continue_prompt(sequence, out.sequences[0, sequence.length :].cpu())
    pack = packing.to_device(packing.build_padded([(0, [0])], [sequence], [response]), model)
    logprobs, _ = packing.response_logprobs(model, pack)
    expected = packing.scaled_log_softmax(torch.cat(out.logits), 1.0, suppressed)  # (R, V)
    return float((logprobs - expected.gather(1, pack.target_ids[:, None])[:, 0]).abs().mean())


def measure_logit_factor(model, prompt: Prompt, responses: list[Continuation]) -> float:
    """c if logits = c * head(hidden) before a softcap: Cohere, Granite and MiniCPM have such a factor."""
    head = model.get_output_embeddings()
    if head is None:  # a critic or a reward model
        return 1.0
    pack = packing.to_device(packing.build_padded([(0, [0])], [prompt], responses), model)
    logits = packing.padded_logits(model, pack).float()  # (M, V)
    output = run_model(head, packing.forward_hidden(model, pack)).float()  # (M, V)
    if softcap := packing.logit_options(model)["softcap"]:
        is_small = logits.abs() < softcap / 2
        output, logits = output[is_small], softcap * (logits[is_small] / softcap).atanh()
    factor = float((logits * output).sum() / output.square().sum())
    if not (logits - factor * output).abs().max() < 1e-2 * logits.abs().max():
        raise PackingNotSupported("its logits are not its head's output times a constant")
    return factor


def all_ranks_agree(is_exact: bool, device) -> bool:
    """True if it is True on all ranks."""
    flag = torch.tensor(float(is_exact), device=device)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
