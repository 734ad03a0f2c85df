"""The check at startup chooses the layout of batches: packed if it reproduces the padded one, else padded.

It compares, on some rows of the dataset:
1. padded rows with the same rows one at a time, for which the model computes its own positions,
2. padded log-probs with those of the model's own generate,
3. packed log-probs with padded ones, over all tokens, and gradients of the input embeddings.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from common import packing
from common.attention import ModelError, PackingNotSupported, set_attention
from common.packing import TOLERANCE, Continuation, Prompt, continue_prompt, extend_prompt, run_model

PROBE_LENGTHS = (12, 7)  # tokens of the two short responses to each probed prompt
MAX_PROBE_LENGTH = 2048  # of the sequence with the long response
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5}  # relative, of norms
Cases = list[tuple[Prompt, list[Continuation]]]


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
    model, forward: Callable, prompts: list[Prompt], max_length: int, max_tokens: int,
    samples: bool = True, encode_observation: Callable[[Prompt], Continuation] | None = None,
) -> str:  # fmt: skip
    """Switch to the packed layout if it is exact; returns a message. Call on all ranks, which decide alike.

    forward: pack -> log-probs or values (M,), or scores (S,). max_length: maximum tokens of a prompt plus
    a response; max_tokens: maximum tokens of a pack. samples: exit if generate and forward disagree,
    instead of a warning. encode_observation: sequence so far -> observation, for trajectories."""
    previous = model.config.get_text_config()._attn_implementation
    is_sharded = hasattr(next(model.parameters()), "ds_id")  # ZeRO-3
    cases, long, notes = make_cases(model, prompts, max_length, max_tokens, encode_observation)
    run = functools.partial(run_cases, model, forward, max_tokens)
    try:
        with recorded_head(model) as records:
            run(cases[:1])
        single = run([(prompt, [x]) for prompt, responses in cases for x in responses], own_positions=True)
        padded = run([*cases, long])
        single += run([long], own_positions=True)
        padded_gradients = None if is_sharded else embedding_gradients(model, run, cases)
    except ModelError as error:
        packing.stop(f"the model can't run the dataset's prompts: {error}")
    if not (error := largest_error(padded, single)) < TOLERANCE[model.dtype]:  # also if NaN
        packing.stop(f"the model's outputs change by {error:.1e} in a batch of padded rows")
    if is_sharded:
        notes.append("not compared under ZeRO-3: the model's generate, gradients")
    elif model.can_generate():
        notes += compare_with_generate(model, cases, samples)

    reason = ""
    try:
        if previous != "sdpa":
            raise PackingNotSupported(f"its attention is {previous}, not sdpa")
        if max_length > (limit := packing.rope_limit(model)):
            raise PackingNotSupported(f"beyond {limit} tokens its RoPE depends on the sequence length")
        model.logit_factor = measure_logit_factor(records, packing.logit_options(model)["softcap"])
        set_attention(model, "packed")
        error = largest_error(run([*cases, long, fill_pack(cases, long, max_tokens)]), padded)
        if not error < TOLERANCE[model.dtype]:
            raise PackingNotSupported(f"its log-probs change by {error:.1e} nats")
        if not is_sharded:
            difference = embedding_gradients(model, run, cases) - padded_gradients
            gradient_error = float(difference.norm() / padded_gradients.norm())
            if not gradient_error < GRADIENT_TOLERANCE[model.dtype]:
                raise PackingNotSupported(f"its gradients change by {gradient_error:.1e} of their norm")
    except ModelError as problem:
        reason = str(problem)
    model.checked_media = {frozenset(extend_prompt(prompt, xs[0]).media_keys) for prompt, xs in cases}
    if all_ranks_agree(not reason, model.device):
        message = f"packing enabled: log-probs match the unmodified model within {error:.0e} nats"
    else:
        set_attention(model, previous)
        reason = reason or "another rank could not pack it"
        message = f"warning: batches are padded, because packing is not supported for this model ({reason})"
    return "; ".join([message, *notes])


def make_cases(
    model, prompts: list[Prompt], max_length: int, max_tokens: int, encode_observation: Callable | None
) -> tuple[Cases, tuple, list[str]]:
    """Prompts with short responses, a prompt with a long response, and what these don't cover.

    The prompts are the shortest and the longest one of each combination of media."""
    by_media = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_media[prompt.media_keys].append(prompt)
    cases = []
    notes = []
    for same_media in by_media.values():
        for prompt in same_media[:1] + same_media[1:][-1:]:
            text = text_of_other_rows(model, prompts, prompt)
            cases.append((prompt, [continue_prompt(prompt, text[R : 2 * R]) for R in PROBE_LENGTHS]))
    shortest = cases[0][0]
    text = text_of_other_rows(model, prompts, shortest)
    if encode_observation:
        turn = cases[0][1][0]
        observation = encode_observation(extend_prompt(shortest, turn))
        sequence = extend_prompt(extend_prompt(shortest, turn), observation)
        last_turn = continue_prompt(sequence, text[: PROBE_LENGTHS[0]])
        if sequence.length + PROBE_LENGTHS[0] <= max_tokens:
            cases.append((shortest, [packing.join_continuations([turn, observation, last_turn])]))
        else:
            notes.append("not compared: observations, which don't fit into a pack")
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    length = min(max_length, max_tokens, max_positions, MAX_PROBE_LENGTH)
    if length < max_length:
        notes.append(f"not compared: sequences of more than {length} tokens")
    R = max(1, length - shortest.length)
    long = (shortest, [continue_prompt(shortest, text.repeat(R // len(text) + 1)[:R])])
    return cases, long, notes


def text_of_other_rows(model, prompts: list[Prompt], prompt: Prompt) -> Tensor:
    """Text tokens of all other prompts: a trained model would copy the prompt's own text, whatever it sees.

    In bf16, log-probs of random tokens would be twice as noisy."""
    media_ids = torch.tensor(packing.media_token_ids(model.config), dtype=torch.long)
    others = [x.input_ids for x in prompts if x is not prompt] or [prompt.input_ids]
    ids = torch.cat(others)
    ids = ids[~torch.isin(ids, media_ids)]
    ids = ids if len(ids) > 0 else torch.arange(100)  # the prompts are images
    return ids.repeat(2 * max(PROBE_LENGTHS)).roll(-(len(others[0]) // 2))  # not the template's beginning


def fill_pack(cases: Cases, long: tuple, max_tokens: int) -> tuple:
    """Copies of the long response that fill a pack. They are not compared themselves: plan_packs puts the
    largest group first, so they push the others to its end, where errors of pack indices show."""
    tokens = long[0].length  # the copies repeat its prompt
    for prompt, responses in [*cases, long]:
        tokens += prompt.length + sum(len(x.response_mask) for x in responses)
    prompt, [response] = long
    num_copies = (max_tokens - tokens) // len(response.response_mask)
    return prompt, [response] * num_copies


def run_cases(model, forward: Callable, max_tokens: int, cases: Cases, own_positions: bool = False) -> list:
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
        max_tokens=max(max_tokens, max(prompt.length for prompt in prompts) + PROBE_LENGTHS[0]),
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
def embedding_gradients(model, run: Callable, cases: Cases) -> Tensor:
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


def compare_with_generate(model, cases: Cases, samples: bool) -> list[str]:
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
    count = PROBE_LENGTHS[0]
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


@contextlib.contextmanager
def recorded_head(model) -> Iterator[dict[str, Tensor]]:
    """Hidden states, input and output of the head, and logits, of the last forward."""
    records = {}

    def record_hidden(module, args, output) -> None:
        records["hidden"] = getattr(output, "last_hidden_state", None)

    def record_head(module, args, output: Tensor) -> None:
        records.update(head_input=args[0], head_output=output)

    def record_logits(module, args, output) -> None:
        records["logits"] = output.logits

    hooks = []
    if head := model.get_output_embeddings():
        hooks.append(model.base_model.register_forward_hook(record_hidden))
        hooks.append(head.register_forward_hook(record_head))
        hooks.append(model.register_forward_hook(record_logits))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def measure_logit_factor(records: dict[str, Tensor], softcap: float | None) -> float:
    """c if logits = c * head(hidden) before a softcap: Cohere, Granite and MiniCPM have such a factor."""
    if "logits" not in records:  # a critic or a reward model
        return 1.0
    if records.get("hidden") is None:
        raise PackingNotSupported("its backbone is not a module of its own")
    head_input = records["head_input"]
    hidden = records["hidden"][:, -head_input.shape[1] :]  # with logits_to_keep, the head runs for a few
    output, logits = records["head_output"].float(), records["logits"].float()
    if softcap:
        is_small = logits.abs() < softcap / 2
        output, logits = output[is_small], softcap * (logits[is_small] / softcap).atanh()
    return constant_ratio(head_input.float(), hidden.float()) * constant_ratio(logits, output)


def constant_ratio(x: Tensor, y: Tensor) -> float:
    """c if x = c * y."""
    ratio = float((x * y).sum() / y.square().sum())
    if not (x - ratio * y).abs().max() < 1e-2 * x.abs().max():
        raise PackingNotSupported("its logits are not its head's output times a constant")
    return ratio


def all_ranks_agree(is_exact: bool, device) -> bool:
    """True if it is True on all ranks."""
    flag = torch.tensor(float(is_exact), device=device)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
