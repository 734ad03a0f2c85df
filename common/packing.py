"""Prefix-shared packing: every prompt once, every picture once, no padding, exact log-probs and gradients.

A *group* is one prompt with its G responses. A *pack* is one row of tokens,

    [prompt 0][response 0.0][response 0.1]...[prompt 1][response 1.0]...

in which a response attends to [its prompt; itself] and nothing else, and its positions continue from its
prompt's. The result is that of one row per response, up to the order of summation, for about 1/G of the work.

    for pack in packs_of_rank(groups, prompts, encode, responses, max_tokens, rank, world_size, packed):
        new_logprobs, entropy = response_logprobs(model, pack, temperature)      # (M,) each
        logprobs = pack.tokens(table)                                            # (B, R) -> (M,)
        advantages = pack.responses(vector)                                      # (B,) -> (S,)
        table[pack.token_index] = new_logprobs                                   # back into a (B, R) table

Not every model can do this. `enable_packing_if_exact` compares with the unmodified model before a run trusts
packing; where they differ, everything takes the *plain path* (packed=False): one response at a time, with all
of the processor's own inputs, through model.forward and model.generate: exact for any model, but slow.

Letters: N tokens, S responses and M response tokens in a pack, B responses in a rollout, P prompt length, R
response length, H hidden, V vocab.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

MEDIA = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
TEXT_INPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "second_per_grid_ts"}
CHUNK = 256  # tokens whose logits live at a time
KEPT_LOGPROBS = 2**26  # log-probs kept from forward to backward: 256 MB that save their recomputation
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # nats, mean of log-probs that count as equal
NEVER = -1e30  # logit of tokens that are never drawn; finite, so that p * log p is 0


# ---- prompts ----


@dataclass
class PromptInfo:
    """What every rank knows of every prompt: enough to plan the packs of all ranks alike."""

    index: int  # its row in the data set
    length: int  # P, tokens
    kinds: tuple[str, ...]  # names of its inputs beside text: ("image_grid_thw", "pixel_values")


@dataclass
class Prompt(PromptInfo):
    """What the rank knows that runs it."""

    inputs: dict[str, Tensor]  # all that the processor made: input_ids (1, P), pixel_values, ...
    ids: Tensor  # (P,)
    positions: Tensor  # (P,), or (3, P) for M-RoPE
    media: dict[str, list[dict]]  # "image" and "video": of each its share of the inputs, and a hash as key
    row: dict | None = None  # of the data set, for rewards
    messages: list[dict] | None = None  # the chat with opened media, for other samplers
    seed: int = 0  # of what is sampled for it


def encode_chat(processor, messages: list[dict], **template) -> dict:
    """Messages of parts -> what the processor, or a text model's tokenizer, makes of them. A video's part has
    its frames and their metadata: which of how many, at what rate."""
    metadata = [part["metadata"] for m in messages for part in m["content"] if part["type"] == "video"]
    if metadata:
        template["processor_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
    if not hasattr(processor, "tokenizer"):
        messages = [m | {"content": "".join(part["text"] for part in m["content"])} for m in messages]
        if processor.chat_template is None:
            return processor("".join(m["content"] for m in messages), return_tensors="pt")
    template |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(messages, **template)


def make_prompt(model, inputs: dict, index: int = 0, row: dict | None = None, messages=None) -> Prompt:
    """The processor's output for one prompt -> the prompt as the functions below take it."""
    inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
    media = {"image": [], "video": []}
    for kind, (pixels_name, grid_name) in MEDIA.items():
        grids = inputs.get(grid_name)
        sizes = 1 if grids is None else grids.prod(-1).tolist()
        for i, pixels in enumerate(inputs[pixels_name].split(sizes) if pixels_name in inputs else ()):
            item = {pixels_name: pixels} | ({} if grids is None else {grid_name: grids[i : i + 1]})
            content = b"".join(x.contiguous().numpy().tobytes() for x in item.values())
            media[kind].append(item | {"key": hashlib.blake2b(content).digest()})  # equal ones are run once
    return Prompt(
        index=index, length=inputs["input_ids"].shape[1], kinds=tuple(sorted(set(inputs) - TEXT_INPUTS)),
        inputs=inputs, ids=inputs["input_ids"][0], positions=prompt_positions(model, inputs), media=media,
        row=row, messages=messages,
    )  # fmt: skip


def prompt_positions(model, inputs: dict) -> Tensor:
    """(P,), or (3, P) for M-RoPE models (Qwen-VL), from the model's own `get_rope_index`. Never feed 2-D ids
    to one: it would copy them to all axes, and train another function than the one that samples."""
    ids, base = inputs["input_ids"], model.base_model
    names = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"} & set(inputs)
    if not hasattr(base, "get_rope_index"):
        return torch.arange(ids.shape[1])
    if not names:
        return torch.arange(ids.shape[1]).expand(3, -1)
    known = {name: inputs[name] for name in [*names, "mm_token_type_ids"]}
    return base.get_rope_index(ids, attention_mask=torch.ones_like(ids), **known)[0][:, 0]


def media_of(prompts: list[Prompt]) -> dict[str, list[dict]]:
    """The pictures and clips of some prompts."""
    return {kind: [item for prompt in prompts for item in prompt.media[kind]] for kind in MEDIA}


def media_token_ids(config) -> list[int]:
    """Ids that stand for pictures or clips, or open and close them: never drawn, and masked in log-probs."""
    name = re.compile("(image|video|vision|vision_start|vision_end|boi|eoi)_token_(id|index)")
    ids = {value for key, value in vars(config).items() if name.fullmatch(key)}
    return sorted(i for i in ids if isinstance(i, int) and 0 <= i < config.get_text_config().vocab_size)


# ---- plan ----


Groups = list[tuple[int, list[int]]]  # (index of a prompt, indices of its responses)


def plan_packs(
    groups: Groups, prompt_lengths: list, response_lengths: list, max_tokens: int, world_size: int = 1
) -> list[list[Groups]]:
    """Groups -> packs of at most max_tokens tokens: plan[rank][pack] = some of the groups.

    All ranks get equally many packs (some may be empty: collectives need everyone), balanced by cost =
    tokens + attended pairs / (6 * 2048), as attention compares with matrix products in a transformer block.
    A group over the budget is split by responses and its prompt repeated, only then. Longest processing time
    first: R. L. Graham 1969.

    >>> plan_packs([(0, [0, 1]), (1, [2])], [4, 3], [2, 2, 5], max_tokens=8, world_size=2)
    [[[(1, [2])]], [[(0, [0, 1])]]]
    """
    pieces = []  # (cost, tokens, prompt index, response indices)
    for prompt, members in groups:
        P = prompt_lengths[prompt]
        chunks, room = [[]], max_tokens - P
        for member in members:
            R = response_lengths[member]
            assert P + R <= max_tokens, f"{P} + {R} tokens never fit into a pack"
            if R > room:
                chunks, room = [*chunks, []], max_tokens - P
            chunks[-1].append(member)
            room -= R
        for chunk in chunks:
            lengths = [response_lengths[m] for m in chunk]
            pairs, tokens = P * P / 2 + sum(R * (P + R / 2) for R in lengths), P + sum(lengths)
            pieces.append((tokens + pairs / (6 * 2048), tokens, prompt, chunk))
    pieces.sort(key=lambda piece: -piece[0])
    num_packs = max(1, math.ceil(sum(piece[1] for piece in pieces) / (max_tokens * world_size))) * world_size
    while True:
        packs, room, load = [[] for _ in range(num_packs)], [max_tokens] * num_packs, [0.0] * num_packs
        for cost, tokens, prompt, members in pieces:
            fitting = [i for i in range(num_packs) if room[i] >= tokens]
            if not fitting:
                break
            target = min(fitting, key=lambda i: load[i])
            packs[target].append((prompt, members))
            room[target] -= tokens
            load[target] += cost
        else:
            break
        num_packs += world_size
    # Ranks wait for the slowest at every pack: neighbours in the order of load run side by side.
    order = sorted(range(num_packs), key=lambda i: -load[i])
    return [[packs[i] for i in order[rank::world_size]] for rank in range(world_size)]


def packs_of_rank(
    groups: Groups, prompts: list[PromptInfo], encode: Callable[[int], Prompt], responses: list[Tensor],
    max_tokens: int, rank: int = 0, world_size: int = 1, packed: bool = True, media_everywhere: bool = False,
) -> Iterator["Pack"]:  # fmt: skip
    """Yield one rank's packs of some groups; all ranks have equally many, since collectives need everyone.

    encode: row of the data set -> the whole prompt, asked for those that this rank needs. media_everywhere:
    pictures in every pack on every rank, or in none: ZeRO-3 gathers a vision tower where it runs, 1 and 2
    reduce its gradients in buckets. A prompt without responses adds no loss, but takes part in all of that.
    """
    wanted = {}  # kind of input -> a prompt that has it, added where no other one has
    if packed:
        prompt_lengths = [prompt.length for prompt in prompts]
        response_lengths = [len(response) for response in responses]
        plan = plan_packs(groups, prompt_lengths, response_lengths, max_tokens, world_size)[rank]
        if media_everywhere:
            wanted = {kind: g for g, _ in groups for kind in prompts[g].kinds}
    else:  # one response at a time; on all ranks, prompts with the same inputs side by side
        alike, plan = defaultdict(list), []
        for g, members in groups:
            alike[prompts[g].kinds] += [(g, [b]) for b in members]
        for pieces in alike.values():
            pieces += [(pieces[0][0], [])] * (-len(pieces) % world_size)
            plan += [[piece] for piece in pieces[rank::world_size]]
    for pieces in plan:
        pieces = pieces or [(groups[0][0], [])]
        for kind, g in wanted.items():
            if not any(kind in prompts[other].kinds for other, _ in pieces):
                pieces = [*pieces, (g, [])]
        whole = {g: encode(prompts[g].index) for g, _ in pieces}
        make = build_pack if packed else plain_pack
        yield make(pieces, whole, responses)


# ---- pack ----


class Bucket(NamedTuple):
    """Groups of a pack with similar lengths, which attend as one batch. Padding repeats the last token."""

    prompts: Tensor  # (n, P): row positions
    prompts_valid: Tensor  # (n, P): False where there is padding
    responses: Tensor  # (S, R): row positions
    responses_valid: Tensor  # (S, R)
    owner: Tensor  # (S,): the prompt of each response, as its place in `prompts`


class Layout(NamedTuple):
    """Where the segments (prompts and responses) of a pack lie, for either kind of attention."""

    buckets: list[Bucket]
    order: Tensor  # (N,): where each row position lies in the buckets' outputs, one after the other
    cu_q: Tensor  # (segments + 1,) int32: boundaries of the queries, as they lie
    cu_k: Tensor  # (segments + 1,) int32: those of the gathered keys: a response's begin with its prompt's
    kv_index: Tensor  # (K,): row position of every gathered key
    max_q: int
    max_k: int


class Pack(NamedTuple):
    inputs: dict  # input_ids (1, N), position_ids (1, N) or (3, 1, N), layout; plain: the processor's
    media: dict[str, list[dict]]  # of media_of: what each slot of the row shows
    response_index: Tensor  # (S,): which of the B responses are here
    token_index: tuple[Tensor, Tensor]  # (M,), (M,): the places of their tokens in a (B, R) table
    owner: Tensor  # (M,): which of the S responses each token is of: lengths 2, 3 -> 0 0 1 1 1
    targets: Tensor  # (M,): the response tokens
    predict_from: Tensor  # (M,): row position of the hidden state that predicts each of them
    last: Tensor  # (S,): row position of each response's last token

    def tokens(self, table: Tensor) -> Tensor:
        """(B, R), a number per token of all responses -> (M,), those of the pack."""
        return table.to(self.owner.device)[self.token_index]

    def responses(self, vector: Tensor) -> Tensor:
        """(B,), a number per response -> (S,), those of the pack."""
        return vector.to(self.owner.device)[self.response_index]

    def to(self, device) -> "Pack":
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), self)


def build_pack(pieces: Groups, prompts: dict[int, Prompt], responses: list[Tensor]) -> Pack:
    """Lay out the groups of one planned pack: prompts by prompt index, responses (each (R,)) by theirs."""
    ids, positions, offset = [], [], 0
    groups = []  # of each group the row positions of [prompt, response, ...]
    for g, members in pieces:
        prompt, P = prompts[g], prompts[g].length
        if unknown := set(prompt.kinds) - {name for names in MEDIA.values() for name in names}:
            raise ValueError(f"packs have no place for {', '.join(unknown)}")
        ids.append(prompt.ids)
        positions.append(prompt.positions)
        segments = [torch.arange(offset, offset + P)]
        offset += P
        # All axes go on from the last token: the frames of a long video may lie beyond the text after it.
        next_position = int(prompt.positions[..., -1].max()) + 1
        for b in members:
            R = len(responses[b])
            ids.append(responses[b])
            positions.append((next_position + torch.arange(R)).expand(*prompt.positions.shape[:-1], R))
            segments.append(torch.arange(offset, offset + R))
            offset += R
        groups.append(segments)
    position_ids = torch.cat(positions, dim=-1)  # (N,) or (3, N)
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids[:, None]
    queries = [segment for group in groups for segment in group]
    keys = []  # a response's are its prompt's and its own
    for prompt, *answers in groups:
        keys += [prompt, *(torch.cat([prompt, answer]) for answer in answers)]
    buckets, order = _make_buckets(groups)
    layout = Layout(
        buckets=buckets, order=order, cu_q=_boundaries(queries), cu_k=_boundaries(keys),
        kv_index=torch.cat(keys), max_q=max(map(len, queries)), max_k=max(map(len, keys)),
    )  # fmt: skip
    inputs = {"input_ids": torch.cat(ids)[None], "position_ids": position_ids, "layout": layout}
    places = [torch.cat([prompt[-1:], answer]) for prompt, *answers in groups for answer in answers]
    return _make_pack(inputs, media_of([prompts[g] for g, _ in pieces]), pieces, responses, places)


def _boundaries(segments: list[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, segments)]).cumsum(0).int()


def plain_pack(pieces: Groups, prompts: dict[int, Prompt], responses: list[Tensor]) -> Pack:
    """The same for the plain path: one prompt, at most one response, all of the processor's inputs. What has
    an entry per token goes on, token types with 0 and masks with their last entry."""
    ((g, members),) = pieces
    response = torch.cat([torch.empty(0, dtype=torch.long), *(responses[b] for b in members)])
    inputs, P, R = dict(prompts[g].inputs), prompts[g].length, len(response)
    for name, value in inputs.items():
        if value.shape[:2] == (1, P):
            last = torch.zeros_like(value[:, -1:]) if "type" in name else value[:, -1:]
            more = response[None] if name == "input_ids" else last.repeat_interleave(R, dim=1)
            inputs[name] = torch.cat([value, more], dim=1)
    return _make_pack(inputs, {}, pieces, responses, [torch.arange(P - 1, P + R)] * len(members))


def _make_pack(inputs: dict, media: dict, pieces: Groups, responses: list, places: list[Tensor]) -> Pack:
    """places: row positions of the token before each response and of its R tokens, (R + 1,)."""
    members, none = [b for _, own in pieces for b in own], torch.empty(0, dtype=torch.long)
    ids = [responses[b] for b in members]
    lengths = torch.tensor([len(x) for x in ids], dtype=torch.long)
    response_index, owner = torch.tensor(members, dtype=torch.long), torch.repeat_interleave(lengths)
    columns = torch.cat([none, *map(torch.arange, lengths.tolist())])
    return Pack(
        inputs=inputs, media=media, response_index=response_index, owner=owner,
        token_index=(response_index[owner], columns), targets=torch.cat([none, *ids]),
        predict_from=torch.cat([none, *(x[:-1] for x in places)]),
        last=torch.cat([none, *(x[-1:] for x in places)]),
    )  # fmt: skip


def _make_buckets(groups: list[list[Tensor]]) -> tuple[list[Bucket], Tensor]:
    """Groups of similar lengths, up to powers of two: little padding, few calls."""
    similar, buckets, order = defaultdict(list), [], []
    for prompt, *responses in groups:
        longest = max(map(len, responses), default=0)
        similar[len(prompt).bit_length(), longest.bit_length()].append((prompt, responses))
    for members in similar.values():
        prompts, prompts_valid = _pad([prompt for prompt, _ in members])
        responses, responses_valid = _pad([row for _, responses in members for row in responses])
        owner = torch.repeat_interleave(torch.tensor([len(responses) for _, responses in members]))
        buckets.append(Bucket(prompts, prompts_valid, responses, responses_valid, owner))
        order += [prompts[prompts_valid], responses[responses_valid]]
    return buckets, torch.cat(order).argsort()


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    longest = int(lengths.max()) if rows else 0
    padded = [F.pad(row, (0, longest - len(row)), value=int(row[-1])) for row in rows]
    padded = torch.stack(padded) if rows else torch.empty(0, 0, dtype=torch.long)
    return padded, torch.arange(longest)[None] < lengths[:, None]


# ---- attention ----


def packed_attention(module, query, key, value, mask, scaling=None, layout=None, decoder=None, **kwargs):
    """Attention of a pack (layout), or of a decoding step (decoder), in the signature of transformers'
    AttentionInterface; with neither ordinary SDPA. query (1, heads, N, D), key, value (1, kv_heads, N, D)."""
    if decoder is not None:
        return decoder.attend(module.layer_idx, query, key, value, scaling), None
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    fast = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    return (_varlen_attention if fast else _grouped_attention)(query, key, value, scaling, layout), None


def _varlen_attention(query, key, value, scaling, layout: Layout) -> Tensor:
    """One kernel call. Keys and values are gathered per response as [prompt; response]; a causal window that
    is aligned at the bottom right then gives each response token its prompt and its own past."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (N, heads, D)
    return varlen_attn(
        q, k[layout.kv_index], v[layout.kv_index], layout.cu_q, layout.cu_k, layout.max_q, layout.max_k,
        scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )[None]  # fmt: skip


def _grouped_attention(query, key, value, scaling, layout: Layout) -> Tensor:
    """Two SDPA calls per bucket: its prompts, and its responses, each after its prompt's keys and values."""
    outputs, options = [], {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]  # (N, heads, D)
    for bucket in layout.buckets:
        q, k, v = (x[bucket.prompts].transpose(1, 2) for x in tokens)  # (n, heads, P, D)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        outputs.append(out.transpose(1, 2)[bucket.prompts_valid])
        if len(bucket.owner) == 0:
            continue
        qr, kr, vr = (x[bucket.responses].transpose(1, 2) for x in tokens)  # (S, heads, R, D)
        k, v = torch.cat([k[bucket.owner], kr], dim=2), torch.cat([v[bucket.owner], vr], dim=2)  # P + R
        R = qr.shape[2]
        own = torch.ones(R, R, dtype=torch.bool, device=q.device).tril()
        to_prompt = bucket.prompts_valid[bucket.owner][:, None, None].expand(-1, 1, R, -1)  # (S, 1, R, P)
        mask = torch.cat([to_prompt, own.expand(len(qr), 1, R, R)], dim=-1)
        out = F.scaled_dot_product_attention(qr, k, v, attn_mask=mask, **options)
        outputs.append(out.transpose(1, 2)[bucket.responses_valid])
    return torch.cat(outputs)[layout.order][None]  # (1, N, heads, D)


def switch_attention(model, name: str) -> str:
    """Give the text model this attention, "packed" or one of transformers' (the vision tower keeps its own)
    -> the name of the one before."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", _skip_mask_of_packs)
    before = model.config.get_text_config()._attn_implementation
    vision = getattr(model.config, "vision_config", None)
    names = {"text_config": name, "vision_config": vision._attn_implementation} if vision else name
    model.set_attn_implementation(names)
    return before


def is_packed(model) -> bool:
    return model.config.get_text_config()._attn_implementation == "packed"


def _skip_mask_of_packs(*args, attention_mask=None, **kwargs):
    """Ordinary masks for padded rows (prefill); none for packs, where (N, N) entries would be wasted."""
    from transformers.masking_utils import sdpa_mask

    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def enable_packing_if_exact(
    model, forward: Callable, prompts: list[Prompt], max_length: int, max_tokens: int, temperature: float = 1.0
) -> str:
    """Switch to packed attention, if it gives the log-probs of the unmodified model on some real prompts -> a
    line that says which path is taken, and why. forward: pack -> log-probs (M,), by an engine. max_length:
    tokens of prompt and response at most; max_tokens: of a pack. Collective."""
    try:
        if reason := _hidden_by_short_rows(model):
            raise ValueError(f"this model has {reason}")
        gap = torch.tensor([packing_gap(model, forward, prompt, temperature) for prompt in prompts]).max()
        if not gap < TOLERANCE[model.dtype]:  # or NaN
            raise ValueError(f"log-probs are {gap:.1e} nats from those of the unmodified model")
    except Exception as error:
        return f"warning: no packing, one response at a time, exact but slow: {type(error).__name__}, {error}"
    switch_attention(model, "packed")
    return f"packed = unmodified model within {gap:.0e} nats"


def _hidden_by_short_rows(model) -> str | None:
    """What changes the function beyond some length only, so that a comparison on short rows can't show it."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}  # of all layers, or of each kind of them
    rope_types = {own.get("rope_type") for own in (rope, *rope.values()) if isinstance(own, dict)}
    if getattr(config, "sliding_window", None):
        return "a sliding window"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "layers without full attention"
    if rope_types & {"dynamic", "longrope"}:
        return "RoPE that changes with the length"
    return "attention sinks" if any("sink" in name for name, _ in model.named_parameters()) else None


@torch.no_grad()
def packing_gap(model, forward: Callable[[Pack], Tensor], prompt: Prompt, temperature: float) -> float:
    """Mean difference, in nats, of packed or of decoded log-probs, the larger, from those of the unmodified
    model, on a prompt's own words as responses: random tokens would be twice as noisy in bf16."""
    suppressed, is_sharded = media_token_ids(model.config), hasattr(next(model.parameters()), "ds_id")
    words = prompt.ids[~torch.isin(prompt.ids, torch.tensor(suppressed))]
    tokens = words.repeat(24)[-24:].view(2, 12)
    responses, prompts = [tokens[0], tokens[1, :7]], {0: prompt}
    plain = [forward(plain_pack([(0, [b])], prompts, responses).to(model.device)) for b in (0, 1)]
    expected = torch.cat(plain)  # (19,)
    attention_before = switch_attention(model, "packed")
    try:
        packed = forward(build_pack([(0, [0, 1])], prompts, responses).to(model.device))
        gap = (packed - expected).abs().mean()
        if model.get_output_embeddings() is not None and not is_sharded:  # a policy that samples
            decoder, decoded = Decoder(model, [prompt], 2), []
            for token in tokens.T.to(model.device):
                logp = next_logprobs(model, decoder.hidden, temperature)  # (2, V)
                decoded.append(logp.gather(1, token[:, None])[:, 0])
                decoder.step(token)
            first, second = torch.stack(decoded, dim=1)  # (12,) each
            gap = torch.maximum(gap, (torch.cat([first, second[:7]]) - expected).abs().mean())  # or NaN
        return gap.item()
    finally:
        switch_attention(model, attention_before)


# ---- decoding ----


class Decoder:
    """Token-by-token decoding of G rows for each of S prompts, which are run once, left-padded. The rows of a
    prompt share its keys and values without a copy. Needs packed attention."""

    @torch.no_grad()
    def __init__(self, model, prompts: list[Prompt], G: int):
        from transformers import DynamicCache

        self.base, self.G, device = model.base_model, G, model.device
        longest = max(prompt.length for prompt in prompts)
        pad = [longest - prompt.length for prompt in prompts]
        ids = torch.stack([F.pad(prompt.ids, (n, 0)) for prompt, n in zip(prompts, pad)]).to(device)  # (S, P)
        self.valid = (torch.arange(longest)[None] >= torch.tensor(pad)[:, None]).to(device)  # (S, P)
        positions = [F.pad(prompt.positions, (n, 0)) for prompt, n in zip(prompts, pad)]
        positions = torch.stack(positions, dim=-2).to(device)  # (S, P) or (3, S, P)
        vision = encode_media(self.base, media_of(prompts))
        mask = self.valid.long()
        out = self.base(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **vision)
        last = out.last_hidden_state[:, -1]
        self.hidden = last.repeat_interleave(G, 0)  # (S * G, H): predicts the next token of each row
        self.keys = [layer.keys for layer in out.past_key_values.layers]  # per layer (S, kv_heads, P, D)
        self.values = [layer.values for layer in out.past_key_values.layers]
        self.cache = DynamicCache()  # of the rows' own tokens
        self.rows = torch.arange(len(prompts) * G, device=device)  # row b: response rows[b] % G of its prompt
        # Not the largest: the frames of a long video may lie beyond the text after it.
        self.next_position = positions[..., -1].repeat_interleave(G, -1)[..., None] + 1  # ([3,] S * G, 1)

    def keep(self, alive: Tensor) -> None:
        """Go on with some rows only: their places in the present batch."""
        self.cache.batch_select_indices(alive)
        self.rows, self.next_position = self.rows[alive], self.next_position[..., alive, :]

    @torch.no_grad()
    def step(self, token: Tensor) -> None:
        """Append one token per row, (rows,); `hidden` then predicts the next one."""
        past = {"past_key_values": self.cache, "use_cache": True, "decoder": self}
        out = self.base(input_ids=token[:, None], position_ids=self.next_position, **past)
        self.hidden, self.next_position = out.last_hidden_state[:, -1], self.next_position + 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """One new token per row attends to its prompt, whose keys and values are read once for all its rows,
        and to the row's own tokens so far. query (B, heads, 1, D), key and value (B, kv_heads, t, D)."""
        keys, values, G = self.keys[layer], self.values[layer], self.G
        S, kv_heads, P, D = keys.shape
        B, heads, t = len(query), query.shape[1], key.shape[2]

        def by_prompt(x: Tensor) -> Tensor:  # (B, heads, n) -> (S, kv_heads, G * heads per kv head, n)
            slots = x.new_zeros(S * G, heads, x.shape[-1]).index_copy(0, self.rows, x)
            return slots.view(S, G, kv_heads, -1, x.shape[-1]).transpose(1, 2).flatten(2, 3)

        def by_row(x: Tensor) -> Tensor:  # and back
            x = x.view(S, kv_heads, G, heads // kv_heads, -1).transpose(1, 2)
            return x.reshape(S * G, heads, -1)[self.rows]

        q = query[:, :, 0] * (D**-0.5 if scaling is None else scaling)  # (B, heads, D)
        to_prompt = by_row(by_prompt(q) @ keys.transpose(-1, -2))  # (B, heads, P)
        to_prompt = to_prompt.masked_fill(~self.valid[self.rows // G][:, None], float("-inf"))
        to_own = (q.view(B, kv_heads, -1, D) @ key.transpose(-1, -2)).flatten(1, 2)  # (B, heads, t)
        weights = torch.cat([to_prompt, to_own], dim=-1).float().softmax(-1).to(query.dtype)
        on_prompt, on_own = weights.split([P, t], dim=-1)
        out = by_row(by_prompt(on_prompt) @ values) + (on_own.view(B, kv_heads, -1, t) @ value).flatten(1, 2)
        return out[:, None]  # (B, 1, heads, D)


@torch.no_grad()
def generate_plain(
    model, prompts: list[Prompt], G: int, max_length: int, end_ids: list[int], temperature: float
) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """The plain path: model.generate, by each prompt's `seed` -> S * G responses (R_b,), their log-probs, and
    which were cut."""
    responses, logprobs, truncated = [], [], []
    suppressed = media_token_ids(model.config)
    for prompt in prompts:
        torch.manual_seed(prompt.seed)
        out = model.generate(
            **_to_model(prompt.inputs, model), do_sample=temperature > 0, temperature=temperature or 1.0,
            top_p=1.0, top_k=0, repetition_penalty=1.0, num_return_sequences=G, max_new_tokens=max_length,
            suppress_tokens=suppressed or None, eos_token_id=end_ids, pad_token_id=end_ids[0],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[:, -len(out.logits) :]  # (G, R)
        logits = torch.stack(out.logits, 1).float() / (temperature or 1.0)  # (G, R, V)
        logp = _mask_media(logits, suppressed).log_softmax(-1).gather(2, tokens[..., None])[..., 0].cpu()
        for row, values in zip(tokens.cpu(), logp):
            ends = torch.isin(row, torch.tensor(end_ids)).nonzero()[:, 0].tolist()
            length = ends[0] + 1 if ends else len(row)
            responses.append(row[:length])
            logprobs.append(values[:length])
            truncated.append(not ends)
    return responses, logprobs, truncated


# ---- forward ----


def forward_hidden(model, pack: Pack, last: bool = False) -> Tensor:
    """Hidden states (M, H) that predict the response tokens of a pack, or with last=True those of each
    response's last token, (S, H), which a score head reads. model: a *ForCausalLM, *ForConditionalGeneration,
    or the backbone of one."""
    inputs = _to_model(pack.inputs, model) | encode_media(model.base_model, pack.media)
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[pack.last if last else pack.predict_from]


def encode_media(base, media: dict[str, list[dict]]) -> dict:
    """The vision tower on each different picture and clip -> a keyword for the model: features by slot."""
    outputs = {}
    for kind, method in (("image", "get_image_features"), ("video", "get_video_features")):
        if slots := media.get(kind):
            unique = {item["key"]: item for item in slots}
            names = slots[0].keys() - {"key"}
            inputs = {name: torch.cat([item[name] for item in unique.values()]) for name in names}
            features = getattr(base, method)(**_to_model(inputs, base), return_dict=True)
            places = {key: place for place, key in enumerate(unique)}
            order = [places[item["key"]] for item in slots]
            features.pooler_output = [features.pooler_output[i] for i in order]
            if layers := getattr(features, "deepstack_features", None):  # Qwen3-VL: of each tapped layer
                features.deepstack_features = [[layer[i] for i in order] for layer in layers]
            outputs[kind] = features
    return {"mm_encoder_outputs": outputs} if outputs else {}


def _to_model(inputs: dict, model) -> dict:
    """To the model's device, pixels in its precision."""

    def move(x: Tensor) -> Tensor:
        return x.to(model.device, model.dtype if x.is_floating_point() else x.dtype)

    return tree_map_only(Tensor, move, inputs)


def response_logprobs(
    model, pack: Pack, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (M,) of a pack's response tokens and, if asked for, entropies (M,) of each next-token
    distribution, in nats, fp32, of the policy at a temperature, without the placeholders of pictures."""
    suppressed = media_token_ids(model.config)
    if "layout" in pack.inputs:
        hidden, weight = forward_hidden(model, pack), model.get_output_embeddings().weight  # (M, H), (V, H)
        temperature = temperature / logit_scale(model)
        return logprobs_from_hidden(hidden, weight, pack.targets, temperature, suppressed, with_entropy)
    logits = model(**_to_model(pack.inputs, model), use_cache=False).logits[0, pack.predict_from].float()
    logp = _mask_media(logits / temperature, suppressed).log_softmax(-1)  # (M, V)
    entropy = -(logp.exp() * logp).sum(-1) if with_entropy else None
    return logp.gather(1, pack.targets[:, None])[:, 0], entropy


def next_logprobs(model, hidden: Tensor, temperature: float) -> Tensor:
    """The same of all tokens, from the hidden states of a Decoder: (rows, H) -> (rows, V)."""
    logits = model.get_output_embeddings()(hidden).float() * (logit_scale(model) / temperature)
    return _mask_media(logits, media_token_ids(model.config)).log_softmax(-1)


def logit_scale(model) -> float:
    """What some models multiply their logits with (Cohere), or divide by (Granite)."""
    text = model.config.get_text_config()
    return (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)


def _mask_media(logits: Tensor, suppressed: list[int]) -> Tensor:
    return logits.index_fill(-1, torch.tensor(suppressed, dtype=torch.long, device=logits.device), NEVER)


def logprobs_from_hidden(hidden, weight, targets, temperature=1.0, suppressed=(), with_entropy=False):
    """log_softmax(hidden @ weight.T / temperature) at `targets`, without the `suppressed` ids, and entropies:
    hidden (M, H), weight (V, H), targets (M,) -> (M,), (M,) or None, both differentiable. Peak memory does
    not grow with M x V: logits live for CHUNK tokens at a time, in forward and, recomputed, in backward."""
    return _ChunkedLogProbs.apply(hidden, weight, targets, float(temperature), list(suppressed), with_entropy)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def chunk(hidden, weight, temperature, suppressed) -> Tensor:
        logits = (hidden @ weight.T).float()  # (chunk, V)
        logits = logits.div_(temperature) if temperature != 1 else logits
        if suppressed:
            logits[:, suppressed] = NEVER
        return logits.log_softmax(-1)

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, suppressed, with_entropy):
        ctx.set_materialize_grads(False)  # an entropy that is a mere metric costs no backward
        logprobs, entropy = [], []
        ctx.kept = []  # of each chunk: its log-probs, or None where they are computed again
        room = KEPT_LOGPROBS if any(ctx.needs_input_grad) else 0
        for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logp = _ChunkedLogProbs.chunk(h, weight, temperature, suppressed)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            if with_entropy:
                entropy.append(-(logp.exp() * logp).sum(-1))
            fits = logp.numel() <= room
            ctx.kept.append(logp if fits else None)
            room -= logp.numel() if fits else 0
        entropy = torch.cat(entropy) if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.options = temperature, suppressed
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, entropy = ctx.saved_tensors
        temperature, suppressed = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # fp32: hundreds of chunks are added up here
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i, start in enumerate(range(0, len(targets), CHUNK)):
            rows = slice(start, start + CHUNK)
            logp = ctx.kept[i]
            if logp is None:
                logp = _ChunkedLogProbs.chunk(hidden[rows], weight, temperature, suppressed)
            p, g = logp.exp(), grad[rows, None]
            # d logprob_t / d logit_j = [j = t] - p_j     d entropy / d logit_j = -p_j (log p_j + entropy)
            grad_logits = (p * -g).scatter_add_(1, targets[rows, None], g)
            if grad_entropy is not None:
                grad_logits -= p * (logp + entropy[rows, None]) * grad_entropy[rows, None]
            grad_logits = (grad_logits / temperature).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
