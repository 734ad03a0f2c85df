"""Prefix-shared packing: every prompt once, every image once, no padding, exact log-probs and gradients.

A *group* is one prompt with its G responses. A *pack* is one row of tokens,

    [prompt 0][response 0.0][response 0.1]...[prompt 1][response 1.0]...

in which a response attends to [its prompt; itself] and nothing else, and its positions continue from its prompt's. The
result of a forward is that of one row per response, up to the order of summation, for about 1/G of the work.

Letters: N tokens in a pack, P prompt length, R response length, M response tokens in a pack, H hidden, V vocab.

    plan   = plan_packs(groups, prompt_lengths, response_lengths, max_tokens, world_size)[rank]
    pack   = build_pack(plan[0], prompts, responses)                    # layout, positions, unique images
    hidden = forward_hidden(model, pack)                                # (M, H), the state that predicts each response token
    logprobs, entropy = logprobs_from_hidden(hidden, model.lm_head.weight, pack.targets, temperature)
    table  = flat_to_rows(logprobs, pack, table)                        # back to (B, R)

Prompts are dicts made by `encode_vision_inputs` and `prompt_positions`: prompt_ids (P,), position_ids (P,) or (3, P),
images and videos (one dict of tensors per picture or clip, with a key that identifies its content).
"""

import hashlib
import logging
import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F

# Families whose packed log-probs and gradients are compared with the unmodified model in tests/test_packing.py.
PACKABLE_MODEL_TYPES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llama", "qwen2", "qwen3"}
KEPT_PROBABILITIES = 2**26  # next-token probabilities kept from forward to backward: 256 MB, saves their recomputation
MEDIA = {"images": ("pixel_values", "image_grid_thw"), "videos": ("pixel_values_videos", "video_grid_thw")}


# ---------------------------------------------------------------------------------------------------------------------
# plan: which responses share a pack, which packs go to which rank
# ---------------------------------------------------------------------------------------------------------------------


def plan_packs(
    groups: list[tuple[int, list[int]]],
    prompt_lengths: list[int],
    response_lengths: list[int],
    max_tokens: int,
    world_size: int = 1,
    hidden_size: int = 2048,
) -> list[list[list[tuple[int, list[int]]]]]:
    """Spread groups over packs of at most `max_tokens` tokens: plan[rank][pack] = [(prompt index, [response indices])].

    Every rank gets the same number of packs (a pack may be empty: collectives need all ranks), and packs are balanced by
    cost = tokens + attended pairs / (6 * hidden_size), the ratio of attention to matrix-product work in a transformer
    block. A group over the budget is split by responses and its prompt repeated, only then. Deterministic, so all ranks
    plan alike from the same lengths. Longest-processing-time-first: R. L. Graham 1969.
    Raises ValueError when one prompt with one response is over the budget.

    >>> plan_packs([(0, [0, 1]), (1, [2])], [4, 3], [2, 2, 5], max_tokens=8, world_size=2)
    [[[(1, [2])]], [[(0, [0, 1])]]]
    """
    pieces = []  # (cost, tokens, prompt index, response indices)
    for prompt, members in groups:
        P = prompt_lengths[prompt]
        chunk, tokens = [], P
        for member in members:
            R = response_lengths[member]
            if P + R > max_tokens:
                raise ValueError(
                    f"prompt of {P} tokens with response of {R} tokens is over the pack budget of {max_tokens}"
                )
            if chunk and tokens + R > max_tokens:
                pieces.append((tokens, prompt, chunk))
                chunk, tokens = [], P
            chunk.append(member)
            tokens += R
        pieces.append((tokens, prompt, chunk))

    def cost(tokens: int, prompt: int, members: list[int]) -> float:
        P = prompt_lengths[prompt]
        pairs = P * P / 2 + sum(response_lengths[m] * (P + response_lengths[m] / 2) for m in members)
        return tokens + pairs / (6 * hidden_size)

    pieces = sorted(((cost(*piece), *piece) for piece in pieces), key=lambda piece: -piece[0])
    num_packs = max(1, math.ceil(sum(tokens for _, tokens, _, _ in pieces) / (max_tokens * world_size))) * world_size
    while True:
        packs = [[] for _ in range(num_packs)]
        room, load = [max_tokens] * num_packs, [0.0] * num_packs
        for piece_cost, tokens, prompt, members in pieces:
            fitting = [i for i in range(num_packs) if room[i] >= tokens]
            if not fitting:
                break
            target = min(fitting, key=lambda i: load[i])
            packs[target].append((prompt, members))
            room[target] -= tokens
            load[target] += piece_cost
        else:
            break
        num_packs += world_size
    # Ranks step through their packs together and wait for the slowest: neighbours in the order of load run side by side.
    order = sorted(range(num_packs), key=lambda i: -load[i])
    return [[packs[i] for i in order[rank::world_size]] for rank in range(world_size)]


# ---------------------------------------------------------------------------------------------------------------------
# prompts: positions and pictures
# ---------------------------------------------------------------------------------------------------------------------


def prompt_positions(model, prompt_ids: torch.Tensor, inputs: dict) -> torch.Tensor:
    """Position ids of one prompt: (P,), or (3, P) for M-RoPE models (Qwen-VL), from the model's own `get_rope_index`.

    inputs: the processor's output for this prompt alone. Never feed 2-D ids to an M-RoPE model: it would copy them to all
    three axes, and train another function than the one that samples.
    """
    base = model.base_model
    P = len(prompt_ids)
    if not hasattr(base, "get_rope_index"):
        return torch.arange(P)
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if not grids:
        return torch.arange(P).expand(3, -1)
    if "second_per_grid_ts" in grids:
        grids["second_per_grid_ts"] = torch.as_tensor(grids["second_per_grid_ts"])
    position_ids, _ = base.get_rope_index(
        input_ids=prompt_ids[None],
        mm_token_type_ids=torch.as_tensor(inputs["mm_token_type_ids"]).view(1, P),
        attention_mask=torch.ones(1, P, dtype=torch.long),
        **grids,
    )
    return position_ids[:, 0]


def encode_vision_inputs(inputs: dict) -> dict[str, list[dict]]:
    """Split the processor's output for one prompt into one dict per picture and per clip, in order of appearance.

    -> {"images": [{"key", "pixel_values", "image_grid_thw"}], "videos": [{"key", "pixel_values_videos", ...}]}. The key is
    a digest of the pixels: equal pictures in different prompts of a pack are encoded once.
    """
    media = {}
    for kind, (pixels_name, grid_name) in MEDIA.items():
        pixels, grids = inputs.get(pixels_name), inputs.get(grid_name)
        if pixels is None:
            media[kind] = []
            continue
        pieces = pixels.split(grids.prod(-1).tolist()) if grids is not None else pixels.split(1)
        media[kind] = []
        for i, piece in enumerate(pieces):
            item = {pixels_name: piece.clone()}
            if grids is not None:
                item[grid_name] = grids[i : i + 1]
            if kind == "videos" and inputs.get("second_per_grid_ts") is not None:  # Qwen2.5-VL's own positions need it
                item["second_per_grid_ts"] = torch.as_tensor(inputs["second_per_grid_ts"])[i : i + 1]
            digest = hashlib.blake2b(piece.contiguous().numpy().tobytes(), digest_size=16)
            digest.update(repr([] if grids is None else grids[i].tolist()).encode())
            item["key"] = digest.hexdigest()
            media[kind].append(item)
    return media


def unique_media(prompts: list[dict], kind: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Batch the different pictures (or clips) of some prompts: processor-style tensors, and which one each slot shows."""
    index, unique, order = {}, [], []
    for item in (item for prompt in prompts for item in prompt[kind]):
        if item["key"] not in index:
            index[item["key"]] = len(unique)
            unique.append(item)
        order.append(index[item["key"]])
    names = [name for name in MEDIA[kind] if unique and name in unique[0]]
    return {name: torch.cat([item[name] for item in unique]) for name in names}, order


def media_token_ids(config) -> list[int]:
    """Ids that stand for pictures or clips, or open and close them. The sampler never draws them, and log-probs mask them."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
    ids = {getattr(config, name, None) for name in names}
    return sorted(i for i in ids if isinstance(i, int) and 0 <= i < config.get_text_config().vocab_size)


# ---------------------------------------------------------------------------------------------------------------------
# pack: one row of tokens
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """n groups of a pack with prompts of one length P and G responses each, which attend as one batch without varlen_attn."""

    prompts: torch.Tensor  # (n, P): row positions
    responses: torch.Tensor  # (n * G, R): row positions; padding repeats the last token of a response
    valid: torch.Tensor  # (n * G, R): False where there is padding


@dataclass
class Layout:
    """Where the segments of a pack lie. cu_* and kv_index serve `varlen_attn`: one segment is a prompt or a response."""

    groups: list[tuple[int, list[int]]]  # (P, [R, ...]) per group, in the order of the row
    buckets: list[Bucket]
    order: torch.Tensor  # (N,): where each row position lies in the buckets' outputs, one after the other
    cu_q: torch.Tensor  # (S + 1,) int32: segment boundaries of the queries, as they lie
    cu_k: torch.Tensor  # (S + 1,) int32: boundaries of the gathered keys (a response's keys begin with its prompt's)
    kv_index: torch.Tensor  # (K,): row position of every gathered key
    max_q: int
    max_k: int


@dataclass
class Pack:
    input_ids: torch.Tensor  # (1, N), or (B, T) right-padded in the fallback
    position_ids: torch.Tensor | None  # (1, N) or (3, 1, N); None: the model's own (fallback)
    attention_mask: torch.Tensor | None  # None, or (B, T) in the fallback
    mm_token_type_ids: torch.Tensor | None  # fallback of M-RoPE models: (B, T)
    layout: Layout | None  # None in the fallback
    predict_from: torch.Tensor  # (M,): flat position of the hidden state that predicts each response token
    last: torch.Tensor  # (S,): flat position of each response's last token
    targets: torch.Tensor  # (M,): the response tokens
    rows: list[tuple[int, int]]  # (response index, R), in the order of `targets`
    media: dict[str, dict[str, torch.Tensor]]  # kind -> processor-style tensors, one entry per different picture
    media_order: dict[str, list[int]]  # kind -> which entry each slot of the row shows
    media_keys: dict[str, list[str]]  # kind -> what identifies each entry

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def to(self, device) -> "Pack":
        def move(value):
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, dict):
                return {name: move(item) for name, item in value.items()}
            if isinstance(value, list) and value and isinstance(value[0], Bucket):
                return [move(item) for item in value]
            if isinstance(value, (Pack, Layout, Bucket)):
                return replace(value, **{field.name: move(getattr(value, field.name)) for field in fields(value)})
            return value

        return move(self)


def build_pack(
    plan: list[tuple[int, list[int]]], prompts: list[dict], responses: list[torch.Tensor], shared: bool = True
) -> Pack:
    """Lay out the groups of one planned pack. `prompts` by prompt index, `responses` (each (R,)) by response index.

    shared=False is the fallback for models whose attention can't be replaced: one right-padded row per response, with its
    own copy of prompt and pictures, and the model's own masks and positions. Exact too, only slower.
    """
    if not shared:
        return _build_rows(plan, prompts, responses)
    input_ids, positions, layout, predict_from, last, targets, rows = [], [], [], [], [], [], []
    cu_q, cu_k, kv_index, offset = [0], [0], [], 0
    for g, members in plan:
        prompt = prompts[g]
        P = len(prompt["prompt_ids"])
        prompt_slice = torch.arange(offset, offset + P)
        input_ids.append(prompt["prompt_ids"])
        positions.append(prompt["position_ids"])
        # All axes go on from the last token: the frames of a long video may lie beyond the text after it.
        next_position = int(prompt["position_ids"][..., -1].max()) + 1
        cu_q.append(offset + P)
        cu_k.append(cu_k[-1] + P)
        kv_index.append(prompt_slice)
        before, offset = offset + P - 1, offset + P
        for b in members:
            response = responses[b]
            R = len(response)
            assert P > 0 and R > 0, "a pack holds no empty prompt or response"
            here = torch.arange(offset, offset + R)
            input_ids.append(response)
            positions.append((next_position + torch.arange(R)).expand(*prompt["position_ids"].shape[:-1], R))
            predict_from.append(torch.cat([torch.tensor([before]), here[:-1]]))
            last.append(offset + R - 1)
            targets.append(response)
            rows.append((b, R))
            cu_q.append(offset + R)
            cu_k.append(cu_k[-1] + P + R)
            kv_index += [prompt_slice, here]
            offset += R
        layout.append((P, [len(responses[b]) for b in members]))
    position_ids = torch.cat(positions, dim=-1)
    media, media_order = {}, {}
    for kind in MEDIA:
        media[kind], media_order[kind] = unique_media([prompts[g] for g, _ in plan], kind)
    empty = torch.empty(0, dtype=torch.long)
    return Pack(
        input_ids=torch.cat(input_ids)[None],
        position_ids=position_ids[None] if position_ids.dim() == 1 else position_ids[:, None],
        attention_mask=None,
        mm_token_type_ids=None,
        layout=Layout(
            groups=layout,
            **_make_buckets(layout),
            cu_q=torch.tensor(cu_q, dtype=torch.int32),
            cu_k=torch.tensor(cu_k, dtype=torch.int32),
            kv_index=torch.cat(kv_index),
            max_q=max(b - a for a, b in zip(cu_q, cu_q[1:])),
            max_k=max(b - a for a, b in zip(cu_k, cu_k[1:])),
        ),
        predict_from=torch.cat([empty, *predict_from]),
        last=torch.tensor(last, dtype=torch.long),
        targets=torch.cat([empty, *targets]),
        rows=rows,
        media=media,
        media_order=media_order,
        media_keys={
            kind: list(dict.fromkeys(item["key"] for g, _ in plan for item in prompts[g][kind])) for kind in MEDIA
        },
    )


def _make_buckets(groups: list[tuple[int, list[int]]]) -> dict:
    """Groups by prompt length, number of responses, and longest response up to a power of two (little padding)."""
    buckets, starts, offset = {}, [], 0
    for P, lengths in groups:
        starts.append(offset)
        offset += P + sum(lengths)
    for (P, lengths), start in zip(groups, starts):
        key = P, len(lengths), max(lengths, default=0).bit_length()
        prompts, responses = buckets.setdefault(key, ([], []))
        prompts.append(torch.arange(start, start + P))
        for i, R in enumerate(lengths):
            first = start + P + sum(lengths[:i])
            responses.append(torch.arange(first, first + R))
    made, order = [], []
    for prompts, responses in buckets.values():
        lengths = torch.tensor([len(r) for r in responses], dtype=torch.long)
        R = int(lengths.max()) if responses else 0
        rows = [F.pad(r, (0, R - len(r)), value=int(r[-1])) for r in responses]
        rows = torch.stack(rows) if rows else torch.empty(0, 0, dtype=torch.long)
        made.append(Bucket(torch.stack(prompts), rows, torch.arange(R)[None] < lengths[:, None]))
        order += [made[-1].prompts.flatten(), rows[made[-1].valid]]
    return {"buckets": made, "order": torch.cat(order).argsort()}


def _build_rows(plan: list[tuple[int, list[int]]], prompts: list[dict], responses: list[torch.Tensor]) -> Pack:
    flat = [(prompts[g], b) for g, members in plan for b in (members or [None])]
    sequences = [torch.cat([p["prompt_ids"], responses[b]]) if b is not None else p["prompt_ids"] for p, b in flat]
    T = max(len(s) for s in sequences)
    kinds = [p.get("mm_token_type_ids") for p, _ in flat]
    predict_from, targets, last, rows = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)], [], []
    for i, (prompt, b) in enumerate(flat):
        if b is None:
            continue
        start = i * T + len(prompt["prompt_ids"]) - 1
        predict_from.append(torch.arange(start, start + len(responses[b])))
        last.append(start + len(responses[b]))
        targets.append(responses[b])
        rows.append((b, len(responses[b])))
    media = {}
    for kind in MEDIA:
        items = [item for prompt, _ in flat for item in prompt[kind]]
        names = [name for name in items[0] if name != "key"] if items else []
        media[kind] = {name: torch.cat([item[name] for item in items]) for name in names}
    return Pack(
        input_ids=torch.stack([F.pad(s, (0, T - len(s))) for s in sequences]),
        position_ids=None,
        attention_mask=torch.stack([F.pad(torch.ones_like(s), (0, T - len(s))) for s in sequences]),
        mm_token_type_ids=None if kinds[0] is None else torch.stack([F.pad(k, (0, T - len(k))) for k in kinds]),
        layout=None,
        predict_from=torch.cat(predict_from),
        last=torch.tensor(last, dtype=torch.long),
        targets=torch.cat(targets),
        rows=rows,
        media=media,
        media_order={kind: [] for kind in MEDIA},
        media_keys={kind: [] for kind in MEDIA},
    )


def rows_to_flat(table: torch.Tensor, pack: Pack) -> torch.Tensor:
    """(B, R) table -> (M,): the values of this pack's response tokens, in the order of `pack.targets`."""
    return torch.cat([table.new_empty(0), *(table[b, :R] for b, R in pack.rows)])


def flat_to_rows(flat: torch.Tensor, pack: Pack, table: torch.Tensor) -> torch.Tensor:
    """(M,) -> a copy of the (B, R) table with this pack's response tokens filled in."""
    table = table.clone()
    for (b, R), values in zip(pack.rows, flat.to(table).split([R for _, R in pack.rows])):
        table[b, :R] = values
    return table


# ---------------------------------------------------------------------------------------------------------------------
# attention
# ---------------------------------------------------------------------------------------------------------------------


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, layout=None, prefix=None, **kwargs
):
    """Attention of a pack, in the signature of transformers' AttentionInterface. query (1, heads, N, D), key and value
    (1, kv_heads, N, D) -> (1, N, heads, D). With a prefix: of a decoding step. With neither: ordinary SDPA."""
    if prefix is not None:
        return _prefix_attention(module, query, key, value, scaling, prefix), None
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen_attention(query, key, value, scaling, layout), None
    return _grouped_attention(query, key, value, scaling, layout), None


def _varlen_attention(query, key, value, scaling, layout: Layout):
    """One kernel call. Keys and values are gathered per response as [prompt; response]; a causal window aligned at the
    bottom right then gives each response token its prompt and its own past. Hidden states are never repeated."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (N, heads, D)
    out = varlen_attn(
        q, k[layout.kv_index], v[layout.kv_index], layout.cu_q, layout.cu_k, layout.max_q, layout.max_k,
        scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]


def _grouped_attention(query, key, value, scaling, layout: Layout):
    """Two SDPA calls per bucket: its prompts, causal, and its responses, each after a copy of its prompt's keys and values."""
    outputs, gqa = [], query.shape[1] != key.shape[1]
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]  # (N, heads, D)
    for bucket in layout.buckets:
        q, k, v = (x[bucket.prompts].transpose(1, 2) for x in tokens)  # (n, heads, P, D)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        if len(bucket.responses) == 0:
            continue
        G, R, P = len(bucket.responses) // len(k), bucket.responses.shape[1], k.shape[2]
        qr, kr, vr = (x[bucket.responses].transpose(1, 2) for x in tokens)  # (n * G, heads, R, D)
        k, v = (x[:, None].expand(-1, G, -1, -1, -1).flatten(0, 1) for x in (k, v))
        kr, vr = torch.cat([k, kr], dim=2), torch.cat([v, vr], dim=2)  # (n * G, heads, P + R, D)
        mask = torch.ones(R, P + R, dtype=torch.bool, device=query.device).tril(P)
        out = F.scaled_dot_product_attention(qr, kr, vr, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2)[bucket.valid])
    return torch.cat(outputs)[layout.order][None]  # (1, N, heads, D)


@dataclass
class Prefix:
    """Keys and values of S prompts, which the rows of a decoding batch continue. Nothing is copied per row."""

    keys: list[torch.Tensor]  # per layer (S, kv_heads, P, D)
    values: list[torch.Tensor]
    padding: torch.Tensor  # (S, P) bool, True where a prompt is padded
    rows: torch.Tensor  # (B,): row b of the batch is response rows[b] % G of prompt rows[b] // G
    group_size: int  # G


def share_prefix(model, cache, attention_mask: torch.Tensor, group_size: int) -> Prefix | None:
    """The cache of a prefill of S prompts (attention_mask (S, P)) -> what S * G rows decode with, given to the model as
    `prefix`, beside an empty cache for their own tokens. None where enable_packing is not on: expand the cache instead."""
    if model.config.get_text_config()._attn_implementation != "packed":
        return None
    return Prefix(
        keys=[layer.keys for layer in cache.layers],
        values=[layer.values for layer in cache.layers],
        padding=attention_mask == 0,
        rows=torch.arange(len(attention_mask) * group_size, device=attention_mask.device),
        group_size=group_size,
    )


def _prefix_attention(module, query, key, value, scaling, prefix: Prefix):
    """One new token per row attends to its prompt, whose keys and values are read once for all of its rows, and to the
    row's own tokens so far. query (B, heads, 1, D), key and value (B, kv_heads, t, D) -> (B, 1, heads, D)."""
    keys, values, G = prefix.keys[module.layer_idx], prefix.values[module.layer_idx], prefix.group_size
    (S, kv_heads, P, D), (B, heads) = keys.shape, query.shape[:2]
    scaling = D**-0.5 if scaling is None else scaling

    def by_prompt(x: torch.Tensor) -> torch.Tensor:
        """(B, heads, n) -> (S, kv_heads, G * heads per kv head, n); rows that have left the batch are 0."""
        slots = x.new_zeros(S * G, heads, x.shape[-1]).index_copy(0, prefix.rows, x)
        return slots.view(S, G, kv_heads, -1, x.shape[-1]).transpose(1, 2).flatten(2, 3)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        x = x.view(S, kv_heads, G, heads // kv_heads, -1).transpose(1, 2)
        return x.reshape(S * G, heads, -1)[prefix.rows]

    q = query[:, :, 0] * scaling  # (B, heads, D)
    to_prompt = by_row(by_prompt(q) @ keys.transpose(-1, -2))  # (B, heads, P)
    to_prompt = to_prompt.masked_fill(prefix.padding[prefix.rows // G][:, None], float("-inf"))
    to_own = (q.view(B, kv_heads, -1, D) @ key.transpose(-1, -2)).flatten(1, 2)  # (B, heads, t)
    weights = torch.cat([to_prompt, to_own], dim=-1).float().softmax(-1).to(query.dtype)
    on_prompt, on_own = weights.split([P, key.shape[2]], dim=-1)
    out = by_row(by_prompt(on_prompt) @ values) + (on_own.view(B, kv_heads, -1, key.shape[2]) @ value).flatten(1, 2)
    return out[:, None]


def enable_packing(model) -> bool:
    """Switch the text model to packed attention (the vision tower keeps its own). -> False: use build_pack(shared=False).

    Asked by model type, since a silent wrong answer is worse than a slow one: sliding windows, linear attention and
    unknown families fall back, with one warning.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    text_config = model.config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if model.config.model_type not in PACKABLE_MODEL_TYPES or layer_types != {"full_attention"}:
        logging.getLogger(__name__).warning(
            f"prefix sharing is not verified for model type {model.config.model_type!r} with {sorted(layer_types)}: "
            "each response runs in its own row with a repeated prompt (exact, but slower)"
        )
        return False
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", _skip_mask_of_packs)
    vision_config = getattr(model.config, "vision_config", None)
    if vision_config is None:
        model.set_attn_implementation("packed")
    else:
        model.set_attn_implementation({"text_config": "packed", "vision_config": vision_config._attn_implementation})
    return True


def _skip_mask_of_packs(*args, attention_mask=None, **kwargs):
    """Ordinary SDPA masks for padded rows (rollouts, generate); none for packs, where (N, N) entries would be wasted."""
    from transformers.masking_utils import sdpa_mask

    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# forward
# ---------------------------------------------------------------------------------------------------------------------


def forward_hidden(model, pack: Pack, last: bool = False, media_cache: dict | None = None) -> torch.Tensor:
    """Hidden states (M, H) that predict the response tokens of a pack, or with last=True those of each response's last token,
    (S, H), which a score head reads. The vision tower runs once per different picture.

    model: a transformers *ForCausalLM, *ForConditionalGeneration, or the backbone of one. Response tokens must not contain
    image or video placeholders: only those of the prompt receive features (encode prompts and responses accordingly).
    media_cache: for frozen vision towers, see encode_media.
    """
    base, positions = model.base_model, pack.last if last else pack.predict_from
    if pack.layout is None:
        inputs = {name: tensor for kind in MEDIA for name, tensor in pack.media[kind].items()}
        if pack.mm_token_type_ids is not None:
            inputs["mm_token_type_ids"] = pack.mm_token_type_ids
        hidden = base(input_ids=pack.input_ids, attention_mask=pack.attention_mask, use_cache=False, **inputs)
        return hidden.last_hidden_state.flatten(0, 1)[positions]
    inputs = {}
    if any(pack.media.values()):
        features = encode_media(base, pack.media, pack.media_order, pack.media_keys, media_cache)
        inputs["mm_encoder_outputs"] = features
    hidden = base(
        input_ids=pack.input_ids, position_ids=pack.position_ids, layout=pack.layout, use_cache=False, **inputs
    ).last_hidden_state  # (1, N, H)
    return hidden[0, positions]


def encode_media(
    base,
    media: dict[str, dict[str, torch.Tensor]],
    order: dict[str, list[int]],
    keys: dict[str, list[str]] | None = None,
    cache: dict | None = None,
) -> dict:
    """Run the vision tower on each different picture and clip, and hand its features out to the slots that show it.

    cache: features by key, of a tower that is frozen: it runs only where one of the keys is not there yet.
    """
    outputs = {}
    for kind, encode in (("images", "get_image_features"), ("videos", "get_video_features")):
        if not order[kind]:
            continue
        if cache is None or not all((kind, key) in cache for key in keys[kind]):
            features = getattr(base, encode)(**media[kind], return_dict=True)
            deepstack = getattr(features, "deepstack_features", None)  # Qwen3-VL: a list of pictures per tapped layer
            items = [
                (x, None if deepstack is None else [layer[i] for layer in deepstack])
                for i, x in enumerate(features.pooler_output)
            ]
            if cache is not None:
                cache.update(((kind, key), item) for key, item in zip(keys[kind], items, strict=True))
        else:
            items = [cache[kind, key] for key in keys[kind]]
        slots = [items[i] for i in order[kind]]
        outputs[kind.removesuffix("s")] = SimpleNamespace(
            pooler_output=[x for x, _ in slots],
            deepstack_features=None if slots[0][1] is None else list(map(list, zip(*(tapped for _, tapped in slots)))),
        )
    return outputs


def logprobs_from_hidden(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    suppressed_ids: list[int] | None = None,
    with_entropy: bool = False,
    chunk_tokens: int = 256,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of `targets` and, if asked for, the entropy of each next-token distribution, in nats.

    hidden (M, H), head_weight (V, H), targets (M,) -> logprobs (M,) fp32, entropy (M,) fp32 or None; both differentiable.
    log_softmax(hidden @ head_weight.T / temperature) in fp32 over the vocabulary without `suppressed_ids` (tokens that
    the sampler never draws). Logits live for `chunk_tokens` tokens at a time, in forward and, recomputed, in backward;
    only the first KEPT_PROBABILITIES are kept in between. Peak memory does not grow with M x V.
    """
    logprobs, entropy = _ChunkedLogProbs.apply(
        hidden, head_weight, targets, float(temperature), suppressed_ids or [], with_entropy, chunk_tokens
    )
    return logprobs, entropy if with_entropy else None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def _logits(hidden, weight, temperature, suppressed_ids):
        logits = (hidden @ weight.T).float()  # (chunk, V)
        if temperature != 1.0:
            logits.div_(temperature)
        if suppressed_ids:
            logits[:, suppressed_ids] = float("-inf")
        return logits

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, suppressed_ids, with_entropy, chunk_tokens):
        ctx.set_materialize_grads(False)  # entropy as a mere metric has no gradient, and then costs no backward
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        log_sums, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs) if with_entropy else None
        ctx.kept, room = {}, KEPT_PROBABILITIES
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _ChunkedLogProbs._logits(hidden[rows], weight, temperature, suppressed_ids)
            logp = logits.log_softmax(-1)
            logprobs[rows] = logp.gather(1, targets[rows, None])[:, 0]
            log_sums[rows] = logits.amax(-1) - logp.amax(-1)  # log of the softmax's denominator
            keep = logp.numel() <= room
            p = logp.exp_() if with_entropy or keep else None
            if with_entropy:
                entropy[rows] = torch.special.entr(p).sum(-1)  # entr(0) = 0: suppressed ids add nothing
            if keep:
                ctx.kept[start] = p
                room -= p.numel()
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.options = temperature, suppressed_ids, chunk_tokens
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        temperature, suppressed_ids, chunk_tokens = ctx.options
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # fp32: hundreds of chunks are added up here
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sums)
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            p = ctx.kept.get(start)
            if p is None:
                logits = _ChunkedLogProbs._logits(hidden[rows], weight, temperature, suppressed_ids)
                p = logits.sub_(log_sums[rows, None]).exp_()
            # d logprob_t / d logit_j = [j = t] - p_j     d entropy / d logit_j = -p_j (log p_j + entropy)
            grad_logits = p * -grad_logprobs[rows, None]
            if grad_entropy is not None:
                logp = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
                grad_logits -= p * (logp + entropy[rows, None]) * grad_entropy[rows, None]
            grad_logits.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if temperature != 1.0:
                grad_logits.div_(temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None, None, None, None
