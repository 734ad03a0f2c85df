"""Prefix-shared packing: every prompt once, every picture once, no padding, exact log-probs and gradients.

A *group* is one prompt with its G responses. A *pack* is one row of tokens,

    [prompt 0][response 0.0][response 0.1]...[prompt 1][response 1.0]...

in which a response attends to [its prompt; itself] and nothing else, and its positions continue from its
prompt's. The result is that of one row per response, up to the order of summation, for about 1/G of the work.

    for pack in packs_of_rank(groups, prompts, encode, responses, max_tokens, ranks, packed):
        logprobs, entropy = response_logprobs(model, pack, temperature)          # (M,) each
        fill_rows(table, logprobs, pack)                                         # back to (B, R)

Not every model can do this. `packing_gap` compares with the unmodified model before a run trusts packing;
where they differ, everything takes the *plain path* (packed=False): one response at a time, with all of the
processor's own inputs, through model.forward and model.generate: exact for any model, but slow.

Letters: N tokens in a pack, P prompt length, R response length, M response tokens and S responses in a pack,
H hidden, V vocab. Prompts are dicts of `make_prompt`: prompt_ids (P,), position_ids (P,) or (3, P), image
and video (one dict per picture or clip, with a key that identifies it), inputs (the processor's output).
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

MEDIA = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
PER_TOKEN = {"input_ids", "attention_mask", "mm_token_type_ids"}
TEXT_INPUTS = PER_TOKEN | {"second_per_grid_ts"}
# What shows beyond some length only, in the JSON of a text config: windows, kinds of layers, RoPE that changes.
HIDES = r'"sliding_window": [1-9]|"layer_types": \[[^]]*"(?!full_attention)\w+"|"(dynamic|longrope)"'
CHUNK = 256  # tokens whose logits live at a time
KEPT_LOGPROBS = 2**26  # next-token log-probs kept from forward to backward: 256 MB, saves their recomputation
NEVER = -1e30  # logit of tokens that are never drawn; finite, so that p * log p is 0


# ---- plan: which responses share a pack, which packs go to which rank ----


Groups = list[tuple[int, list[int]]]  # (index of a prompt, indices of its responses)


def plan_packs(
    groups: Groups, prompt_lengths: list, response_lengths: list, max_tokens: int, world_size: int = 1
) -> list[list[Groups]]:
    """Groups -> packs of at most max_tokens tokens: plan[rank][pack] = some of the groups.

    All ranks get equally many packs (some may be empty: collectives need everyone), balanced by cost =
    tokens + attended pairs / (6 * 2048), as attention compares with matrix products in a transformer
    block. A group over the budget is split by responses and its prompt repeated, only then. Deterministic:
    all ranks plan alike. Longest processing time first: R. L. Graham 1969.

    >>> plan_packs([(0, [0, 1]), (1, [2])], [4, 3], [2, 2, 5], max_tokens=8, world_size=2)
    [[[(1, [2])]], [[(0, [0, 1])]]]
    """
    pieces = []  # (cost, tokens, prompt index, response indices)
    for prompt, members in groups:
        P = prompt_lengths[prompt]
        chunks, tokens = [[]], P
        for R, member in ((response_lengths[m], m) for m in members):
            if P + R > max_tokens:
                raise ValueError(f"prompt of {P} and response of {R} tokens: over a pack's {max_tokens}")
            if chunks[-1] and tokens + R > max_tokens:
                chunks.append([])
                tokens = P
            chunks[-1].append(member)
            tokens += R
        for chunk in chunks:
            lengths = [response_lengths[m] for m in chunk]
            pairs = P * P / 2 + sum(R * (P + R / 2) for R in lengths)
            tokens = P + sum(lengths)
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
    groups: Groups,
    prompts: list[dict],
    encode: Callable[[list[int]], list[dict]],
    responses: list[Tensor],
    max_tokens: int,
    ranks: tuple[int, int] = (0, 1),
    packed: bool = True,
    media_everywhere: bool = False,
) -> Iterator["Pack"]:
    """Yield one rank's packs of some groups; all ranks have equally many, since collectives need everyone.

    prompts: what all ranks know of each, `summary`; encode: index of some -> the whole prompts, asked for what
    this rank needs. ranks: (rank, world size). media_everywhere: pictures in every pack on every rank, or in
    none: ZeRO-3 gathers a vision tower where it runs, 1 and 2 reduce its gradients in buckets. A prompt
    without responses adds no loss, but takes part in all of that.
    """
    rank, world_size = ranks
    if packed:
        lengths = [prompt["length"] for prompt in prompts], [len(r) for r in responses]
        plan = plan_packs(groups, *lengths, max_tokens, world_size)[rank]
        extra = {kind: g for g, _ in groups for kind in prompts[g]["kinds"] if media_everywhere}
    else:  # prompts with the same inputs run side by side
        alike, plan, extra = defaultdict(list), [], {}
        for g, members in groups:
            alike[prompts[g]["kinds"]] += [(g, [b]) for b in members]
        for pieces in alike.values():
            pieces += [(pieces[0][0], [])] * (-len(pieces) % world_size)
            plan += [[piece] for piece in pieces[rank::world_size]]
    for pieces in plan:
        pieces = pieces or [(groups[0][0], [])]
        for kind, g in extra.items():
            if not any(kind in prompts[piece]["kinds"] for piece, _ in pieces):
                pieces = [*pieces, (g, [])]
        places = [g for g, _ in pieces]
        whole = dict(zip(places, encode([prompts[g]["index"] for g in places])))
        yield (build_pack if packed else plain_pack)(pieces, whole, responses)


def summary(prompt: dict) -> dict:
    """What ranks tell each other of a prompt: its row, length, and kinds of inputs besides text."""
    kinds = tuple(sorted(set(prompt["inputs"]) - TEXT_INPUTS))
    return {"index": prompt["index"], "length": len(prompt["prompt_ids"]), "kinds": kinds}


# ---- prompts: positions and pictures ----


def make_prompt(model, inputs: dict) -> dict:
    """The processor's output for one prompt -> the prompt as the functions below take it."""
    inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
    prompt = {"inputs": inputs, "prompt_ids": inputs["input_ids"][0], "image": [], "video": []}
    for kind, (pixels_name, grid_name) in MEDIA.items():
        grids = inputs.get(grid_name)
        sizes = 1 if grids is None else grids.prod(-1).tolist()
        for i, piece in enumerate(inputs[pixels_name].split(sizes) if pixels_name in inputs else ()):
            item = {pixels_name: piece} | ({} if grids is None else {grid_name: grids[i : i + 1]})
            content = b"".join(x.contiguous().numpy().tobytes() for x in item.values())
            prompt[kind].append(item | {"key": hashlib.blake2b(content).digest()})  # equal ones are run once
    return prompt | {"position_ids": prompt_positions(model, inputs)}


def split_batch(batch: dict, counts: list[dict[str, int]]) -> list[dict[str, Tensor]]:
    """The processor's unpadded output for several chats -> that for each; counts: images and videos of each.
    Raises an error where it can't be told what belongs to which."""
    chats = [{} for _ in counts]
    for name, value in batch.items():
        if name in PER_TOKEN:
            parts = [torch.tensor(ids)[None] for ids in value]
        else:
            kind = next(kind for kind, names in MEDIA.items() if name in names)
            sizes, grid_name = [count[kind] for count in counts], MEDIA[kind][1]
            if name != grid_name and grid_name in batch:
                sizes = [int(grids.prod(-1).sum()) for grids in batch[grid_name].split(sizes)]
            parts = value.split(sizes)
        for chat, part in zip(chats, parts):
            chat |= {name: part} if len(part) else {}
    return chats


def prompt_positions(model, inputs: dict) -> Tensor:
    """(P,), or (3, P) for M-RoPE models (Qwen-VL), from the model's own `get_rope_index`. Never feed 2-D ids
    to one: it would copy them to all axes, and train another function than the one that samples."""
    (_, P), base = inputs["input_ids"].shape, model.base_model
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: inputs[name] for name in names if name in inputs}
    if not hasattr(base, "get_rope_index"):
        return torch.arange(P)
    if not grids:
        return torch.arange(P).expand(3, -1)
    grids |= {"input_ids": inputs["input_ids"], "attention_mask": torch.ones(1, P, dtype=torch.long)}
    return base.get_rope_index(mm_token_type_ids=inputs["mm_token_type_ids"].view(1, P), **grids)[0][:, 0]


def unique_media(prompts: list[dict]) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[int]]]:
    """The different pictures (and clips) of some prompts, by kind: processor-style tensors, and which picture
    each slot shows."""
    media, order = {}, {}
    for kind, names in MEDIA.items():
        slots = [item for prompt in prompts for item in prompt[kind]]
        unique = {item["key"]: item for item in slots}
        places = {key: place for place, key in enumerate(unique)}
        order[kind] = [places[item["key"]] for item in slots]
        present = [name for name in names if slots and name in slots[0]]
        media[kind] = {name: torch.cat([item[name] for item in unique.values()]) for name in present}
    return media, order


def media_token_ids(config) -> list[int]:
    """Ids that stand for pictures or clips, or open and close them: never drawn, and masked in log-probs."""
    kinds = ("image_token", "video_token", "vision_start_token", "vision_end_token", "vision_token")
    names = [f"{kind}_{ending}" for kind in kinds for ending in ("id", "index")]
    ids = {getattr(config, name, None) for name in [*names, "boi_token_index", "eoi_token_index"]}
    return sorted(i for i in ids if isinstance(i, int) and 0 <= i < config.get_text_config().vocab_size)


# ---- pack: one row of tokens ----


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
    rows: list[tuple[int, int]]  # (response index, R), in the order of `targets`
    targets: Tensor  # (M,): the response tokens
    predict_from: Tensor  # (M,): row position of the hidden state that predicts each of them
    last: Tensor  # (S,): row position of each response's last token
    media: dict[str, dict[str, Tensor]]  # kind -> processor-style tensors, one entry per different picture
    media_order: dict[str, list[int]]  # kind -> which entry each slot of the row shows

    def to(self, device) -> "Pack":
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), self)


def build_pack(pieces: Groups, prompts: dict[int, dict], responses: list[Tensor]) -> Pack:
    """Lay out the groups of one planned pack: prompts by prompt index, responses (each (R,)) by theirs."""
    ids, positions, groups, rows, offset = [], [], [], [], 0  # groups: row positions [prompt, response, ...]
    predict_from, last, empty = [], [], torch.empty(0, dtype=torch.long)
    for g, members in pieces:
        prompt, P = prompts[g], len(prompts[g]["prompt_ids"])
        unknown = set(prompt["inputs"]) - TEXT_INPUTS - {name for names in MEDIA.values() for name in names}
        if unknown:
            raise ValueError(f"packs have no place for {', '.join(sorted(unknown))}")
        ids.append(prompt["prompt_ids"])
        positions.append(prompt["position_ids"])
        groups.append([torch.arange(offset, offset + P)])
        # All axes go on from the last token: the frames of a long video may lie beyond the text after it.
        next_position, before = int(prompt["position_ids"][..., -1].max()) + 1, groups[-1][0][-1:]
        offset += P
        for b in members:
            R = len(responses[b])
            assert P > 0 and R > 0, "a pack holds no empty prompt or response"
            own = torch.arange(offset, offset + R)
            ids.append(responses[b])
            positions.append((next_position + torch.arange(R)).expand(*positions[-1].shape[:-1], R))
            groups[-1].append(own)
            predict_from.append(torch.cat([before, own[:-1]]))
            rows.append((b, R))
            offset += R
            last.append(offset - 1)
    position_ids, (media, order) = torch.cat(positions, dim=-1), unique_media([prompts[g] for g, _ in pieces])
    keys = [torch.cat([group[0], *own]) for group in groups for own in ([], *([x] for x in group[1:]))]
    lengths_q, lengths_k = [len(x) for group in groups for x in group], [len(x) for x in keys]
    layout = Layout(
        *_make_buckets(groups),
        cu_q=torch.tensor([0, *lengths_q]).cumsum(0).int(),
        cu_k=torch.tensor([0, *lengths_k]).cumsum(0).int(),
        kv_index=torch.cat(keys),
        max_q=max(lengths_q),
        max_k=max(lengths_k),
    )
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids[:, None]
    return Pack(
        inputs={"input_ids": torch.cat(ids)[None], "position_ids": position_ids, "layout": layout},
        rows=rows,
        targets=torch.cat([empty, *(responses[b] for b, _ in rows)]),
        predict_from=torch.cat([empty, *predict_from]),
        last=torch.tensor(last, dtype=torch.long),
        media=media,
        media_order=order,
    )


def _make_buckets(groups: list[list[Tensor]]) -> tuple[list[Bucket], Tensor]:
    """Groups of about the same lengths, up to powers of two: little padding, few calls."""
    buckets, made, order = defaultdict(list), [], []
    for group in groups:
        buckets[len(group[0]).bit_length(), max(map(len, group[1:]), default=0).bit_length()].append(group)
    for bucket in buckets.values():
        prompts, prompts_valid = _pad([group[0] for group in bucket])
        responses, responses_valid = _pad([response for group in bucket for response in group[1:]])
        owner = torch.repeat_interleave(torch.tensor([len(group) - 1 for group in bucket]))
        made.append(Bucket(prompts, prompts_valid, responses, responses_valid, owner))
        order += [prompts[prompts_valid], responses[responses_valid]]
    return made, torch.cat(order).argsort()


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    longest = int(lengths.max()) if rows else 0
    padded = [F.pad(row, (0, longest - len(row)), value=int(row[-1])) for row in rows]
    padded = torch.stack(padded) if rows else torch.empty(0, 0, dtype=torch.long)
    return padded, torch.arange(longest)[None] < lengths[:, None]


def plain_pack(pieces: Groups, prompts: dict[int, dict], responses: list[Tensor]) -> Pack:
    """The same of one prompt with at most one response, for the plain path: all of the processor's inputs. What
    has an entry per token goes on for the response, token types with 0 and masks with their last entry."""
    ((g, members),) = pieces
    response = torch.cat([torch.empty(0, dtype=torch.long), *(responses[b] for b in members)])
    inputs, P, R = dict(prompts[g]["inputs"]), len(prompts[g]["prompt_ids"]), len(response)
    for name, value in inputs.items():
        if value.shape[:2] == (1, P):
            last = torch.zeros_like(value[:, -1:]) if "type" in name else value[:, -1:]
            more = response[None] if name == "input_ids" else last.repeat_interleave(R, dim=1)
            inputs[name] = torch.cat([value, more], dim=1)
    last, rows = torch.tensor([P + R - 1] * len(members), dtype=torch.long), [(b, R) for b in members]
    return Pack(inputs, rows, response, torch.arange(P - 1, P + R - 1), last, {}, {})


def rows_to_flat(table: Tensor, pack: Pack) -> Tensor:
    """(B, R) table -> (M,): the values of this pack's response tokens, in the order of `pack.targets`."""
    return torch.cat([table.new_empty(0), *(table[b, :R] for b, R in pack.rows)])


def fill_rows(table: Tensor, flat: Tensor, pack: Pack) -> None:
    """(M,) -> into a (B, R) table, at this pack's response tokens."""
    for (b, R), values in zip(pack.rows, flat.to(table).split([R for _, R in pack.rows])):
        table[b, :R] = values


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


@torch.no_grad()
def packing_gap(
    model, forward: Callable[[Pack], Tensor], prompt: dict, temperature: float = 1.0
) -> tuple[float, str]:
    """Largest difference, in nats, of packed and of decoded log-probs from those of the unmodified model, on
    two random responses to a prompt -> (gap, reason); inf where the config says no or it fails. Collective.

    forward: pack -> log-probs (M,), through the engine. A silent wrong answer is worse than a slow one:
    sliding windows and the like show only beyond some length, so config and parameters are asked first.
    """
    text = model.config.get_text_config()
    special = re.search(HIDES, json.dumps(text.to_dict(), default=str))
    if special or any("sink" in name for name, _ in model.named_parameters()):
        return math.inf, f"its text model has {special[0] if special else 'attention sinks'}"
    suppressed = media_token_ids(model.config)
    allowed = torch.tensor(sorted(set(range(text.vocab_size)) - set(suppressed)))
    tokens = allowed[torch.randint(len(allowed), (2, 12), generator=torch.Generator().manual_seed(0))]
    responses, prompts = [tokens[0], tokens[1, :7]], {0: prompt}
    plain = [forward(plain_pack([(0, [b])], prompts, responses).to(model.device)) for b in (0, 1)]
    before = switch_attention(model, "packed")
    try:
        found = [forward(build_pack([(0, [0, 1])], prompts, responses).to(model.device))]
        sharded = hasattr(next(model.parameters()), "ds_id")
        if model.get_output_embeddings() is not None and not sharded:  # a policy that samples
            decoder, decoded = Decoder(model, [prompt], 2), []
            for token in tokens.T.to(model.device):
                logp = next_logprobs(model, decoder.hidden, temperature)  # (2, V)
                decoded.append(logp.gather(1, token[:, None])[:, 0])
                decoder.step(token)
            decoded = torch.stack(decoded, dim=1)  # (2, 12)
            found.append(torch.cat([decoded[0], decoded[1, :7]]))
        return max((logprobs - torch.cat(plain)).abs().max().item() for logprobs in found), "other log-probs"
    except Exception as error:
        return math.inf, f"{type(error).__name__}: {error}"
    finally:
        switch_attention(model, before)


# ---- decoding ----


class Decoder:
    """Token-by-token decoding of G rows for each of S prompts, which are run once, left-padded, every picture
    once. The rows of a prompt share its keys and values without a copy. Needs packed attention."""

    @torch.no_grad()
    def __init__(self, model, prompts: list[dict], G: int):
        from transformers import DynamicCache

        self.base, self.G, device = model.base_model, G, model.device
        longest = max(len(p["prompt_ids"]) for p in prompts)
        pad = [longest - len(p["prompt_ids"]) for p in prompts]
        ids = torch.stack([F.pad(p["prompt_ids"], (n, 0)) for p, n in zip(prompts, pad)]).to(device)  # (S, P)
        self.valid = (torch.arange(longest)[None] >= torch.tensor(pad)[:, None]).to(device)  # (S, P)
        positions = torch.stack([F.pad(p["position_ids"], (n, 0)) for p, n in zip(prompts, pad)], dim=-2)
        positions = positions.to(device)  # (S, P) or (3, S, P)
        vision = encode_media(self.base, *unique_media(prompts))
        mask = self.valid.long()
        out = self.base(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **vision)
        self.hidden = out.last_hidden_state[:, -1].repeat_interleave(
            G, 0
        )  # (S * G, H): predict the next token
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
        (S, kv_heads, P, D), (B, heads), t = keys.shape, query.shape[:2], key.shape[2]

        def by_prompt(x: Tensor) -> Tensor:
            """(B, heads, n) -> (S, kv_heads, G * heads per kv head, n); rows that have left are 0."""
            slots = x.new_zeros(S * G, heads, x.shape[-1]).index_copy(0, self.rows, x)
            return slots.view(S, G, kv_heads, -1, x.shape[-1]).transpose(1, 2).flatten(2, 3)

        def by_row(x: Tensor) -> Tensor:
            """The way back."""
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
    model, prompts: list[dict], G: int, max_length: int, end_ids: list[int], temperature: float, top_p: float
) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """The plain path: model.generate, prompt by prompt -> S * G responses (R_b,), log-probs (R_b,), and which
    were cut. Prompts have a `seed`."""
    ids, logprobs, cut, suppressed = [], [], [], media_token_ids(model.config)
    how = {"do_sample": True, "temperature": temperature, "top_p": top_p, "num_return_sequences": G}
    how = how if temperature else {"do_sample": False}
    how |= {"suppress_tokens": suppressed} if suppressed else {}
    for prompt in prompts:
        torch.manual_seed(prompt["seed"])
        out = model.generate(
            **_cast(prompt["inputs"], model), **how, top_k=0, repetition_penalty=1.0,
            max_new_tokens=max_length, eos_token_id=end_ids, pad_token_id=end_ids[0],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[:, -len(out.logits) :]  # (G, R)
        logits = torch.stack(out.logits, 1).float() / (temperature or 1.0)  # (G, R, V)
        logp = _mask_media(logits, suppressed).log_softmax(-1).gather(2, tokens[..., None])[..., 0].cpu()
        for row, values in zip(tokens.cpu(), logp):
            ends = torch.isin(row, torch.tensor(end_ids)).nonzero()[:, 0].tolist()
            length = ends[0] + 1 if ends else len(row)
            ids, logprobs, cut = [*ids, row[:length]], [*logprobs, values[:length]], [*cut, not ends]
    return ids, logprobs, cut


# ---- forward ----


def forward_hidden(model, pack: Pack, last: bool = False) -> Tensor:
    """Hidden states (M, H) that predict the response tokens of a pack, or with last=True those of each
    response's last token, (S, H), which a score head reads. The vision tower runs once per different picture.

    model: a transformers *ForCausalLM, *ForConditionalGeneration, or the backbone of one.
    """
    inputs = _cast(pack.inputs, model) | encode_media(model.base_model, pack.media, pack.media_order)
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[pack.last if last else pack.predict_from]


def encode_media(base, media: dict, order: dict[str, list[int]]) -> dict:
    """Run the vision tower on each different picture and clip -> a keyword for the model, with the features
    of every slot that shows them."""
    outputs = {}
    for kind, encode in (("image", "get_image_features"), ("video", "get_video_features")):
        if order.get(kind):
            features = getattr(base, encode)(**_cast(media[kind], base), return_dict=True)
            layers = getattr(features, "deepstack_features", None)  # Qwen3-VL: of each tapped layer
            outputs[kind] = SimpleNamespace(
                pooler_output=[features.pooler_output[i] for i in order[kind]],
                deepstack_features=layers and [[layer[i] for i in order[kind]] for layer in layers],
            )
    return {"mm_encoder_outputs": outputs} if outputs else {}


def _cast(inputs: dict, model) -> dict:
    """To the model's device, pixels in its precision."""
    return tree_map_only(
        Tensor, lambda x: x.to(model.device, model.dtype if x.is_floating_point() else x.dtype), inputs
    )


def response_logprobs(
    model, pack: Pack, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (M,) of a pack's response tokens and, if asked for, entropies (M,) of each next-token
    distribution, in nats, fp32, of the policy at a temperature, without the placeholders of pictures."""
    suppressed = media_token_ids(model.config)
    if "layout" in pack.inputs:
        hidden, head = forward_hidden(model, pack), model.get_output_embeddings()  # (M, H)
        options = temperature / logit_scale(model), suppressed, with_entropy
        return logprobs_from_hidden(hidden, head.weight, head.bias, pack.targets, *options)
    logits = model(**_cast(pack.inputs, model), use_cache=False).logits[0, pack.predict_from].float()
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


def logprobs_from_hidden(hidden, weight, bias, targets, temperature=1.0, suppressed=(), with_entropy=False):
    """log_softmax((hidden @ weight.T + bias) / temperature) at `targets`, without the `suppressed` ids, and
    entropies, both differentiable: hidden (M, H), weight (V, H), bias (V,) or None -> (M,), (M,) or None.
    Peak memory does not grow with M x V: logits live for CHUNK tokens at a time, also in backward."""
    options = float(temperature), list(suppressed), with_entropy
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, *options)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def chunk(hidden, weight, bias, temperature, suppressed) -> Tensor:
        logits = F.linear(hidden, weight, bias).float()  # (chunk, V)
        logits = logits.div_(temperature) if temperature != 1 else logits
        if suppressed:
            logits[:, suppressed] = NEVER
        return logits.log_softmax(-1)

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, suppressed, with_entropy):
        ctx.set_materialize_grads(False)  # an entropy that is a mere metric costs no backward
        logprobs, entropy, ctx.kept = [], [], []
        for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logp = _ChunkedLogProbs.chunk(h, weight, bias, temperature, suppressed)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            if with_entropy:
                entropy.append(-(logp.exp() * logp).sum(-1))
            room = KEPT_LOGPROBS - sum(x.numel() for x in ctx.kept) if any(ctx.needs_input_grad) else 0
            ctx.kept += [logp] if logp.numel() <= room else []
        entropy = torch.cat(entropy) if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.options = temperature, suppressed
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        needed = ctx.needs_input_grad
        # fp32: hundreds of chunks are added up here
        grad_weight, grad_bias = (
            torch.zeros_like(x, dtype=torch.float32) if wanted else None
            for x, wanted in ((weight, needed[1]), (bias, needed[2]))
        )
        grad_hidden = torch.empty_like(hidden)
        grad = torch.zeros(len(targets), device=hidden.device) if grad is None else grad
        for i, start in enumerate(range(0, len(targets), CHUNK)):
            rows = slice(start, start + CHUNK)
            kept = i < len(ctx.kept)
            logp = ctx.kept[i] if kept else _ChunkedLogProbs.chunk(hidden[rows], weight, bias, *ctx.options)
            p, g = logp.exp(), grad[rows, None]
            # d logprob_t / d logit_j = [j = t] - p_j     d entropy / d logit_j = -p_j (log p_j + entropy)
            grad_logits = (p * -g).scatter_add_(1, targets[rows, None], g)
            if grad_entropy is not None:
                grad_logits -= p * (logp + entropy[rows, None]) * grad_entropy[rows, None]
            grad_logits = (grad_logits / ctx.options[0]).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grads = (x if x is None else x.to(weight.dtype) for x in (grad_weight, grad_bias))
        return grad_hidden, *grads, *[None] * 4
