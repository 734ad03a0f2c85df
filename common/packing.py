"""Prefix-shared packing: every prompt once, every picture once, no padding, exact log-probs and gradients.

A *group* is one prompt with its G responses. A *pack* is one row of tokens,

    [prompt 0][response 0.0][response 0.1]...[prompt 1][response 1.0]...

in which a response attends to [its prompt; itself] and nothing else, and its positions continue from its
prompt's. The result is that of one row per response, up to the order of summation, for about 1/G of the work.

    for pack in packs_of_rank(groups, prompts, encode, responses, max_tokens, rank, world_size, packed):
        logprobs, entropy = response_logprobs(model, pack, temperature)          # (M,) each
        table[pack.index] = logprobs                                             # back to (B, R)

Not every model can do this. `prove_packing` compares with the unmodified model before a run trusts packing;
where they differ, everything takes the *plain path* (packed=False): one response at a time, with all of the
processor's own inputs, through model.forward and model.generate: exact for any model, but slow.

Letters: N tokens, S responses and M response tokens in a pack, P prompt length, R response length, H hidden,
V vocab. Prompts are dicts of `make_prompt`.
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
TEXT_INPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "second_per_grid_ts"}
# In a text config's JSON, what shows beyond some length only: windows, layer types, RoPE that changes.
HIDES = r'"sliding_window": [1-9]|"layer_types": \[[^]]*"(?!full_attention)\w+"|"(dynamic|longrope)"'
CHUNK = 256  # tokens whose logits live at a time
KEPT_LOGPROBS = 2**26  # log-probs kept from forward to backward: 256 MB that save their recomputation
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # nats, mean of log-probs that count as equal
NEVER = -1e30  # logit of tokens that are never drawn; finite, so that p * log p is 0


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
    groups: Groups, prompts: list[dict], encode: Callable, responses: list[Tensor], max_tokens: int,
    rank: int = 0, world_size: int = 1, packed: bool = True, media_everywhere: bool = False,
) -> Iterator["Pack"]:  # fmt: skip
    """Yield one rank's packs of some groups; all ranks have equally many, since collectives need everyone.

    prompts: index, length and kinds of each, known to all ranks; encode: indices -> whole prompts, asked for
    what this rank needs. media_everywhere: pictures in every pack on every rank, or in none: ZeRO-3 gathers a
    vision tower where it runs, 1 and 2 reduce its gradients in buckets. A prompt without responses adds no
    loss, but takes part in all of that.
    """
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
        whole = dict(zip(places, encode([prompts[g]["index"] for g in places]), strict=True))
        yield (build_pack if packed else plain_pack)(pieces, whole, responses)


# ---- prompts ----


def encode_chat(processor, messages: list[dict], **template) -> dict:
    """Messages of parts -> what the processor, or a text model's tokenizer, makes of them. A video's part has
    its frames and when they were `taken`."""
    taken = [part["taken"] for m in messages for part in m["content"] if part["type"] == "video"]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **template}
    how |= {"processor_kwargs": {"video_metadata": taken, "do_sample_frames": False}} if taken else {}
    if not hasattr(processor, "tokenizer"):
        messages = [m | {"content": "".join(part["text"] for part in m["content"])} for m in messages]
        if processor.chat_template is None:
            return processor("".join(m["content"] for m in messages), return_tensors="pt")
    return processor.apply_chat_template(messages, **how)


def make_prompt(model, inputs: dict) -> dict:
    """The processor's output for one prompt -> the prompt as the functions below take it."""
    inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
    prompt = {"inputs": inputs, "prompt_ids": inputs["input_ids"][0], "image": [], "video": []}
    prompt |= {"length": len(prompt["prompt_ids"]), "kinds": tuple(sorted(set(inputs) - TEXT_INPUTS))}
    for kind, (pixels_name, grid_name) in MEDIA.items():
        grids = inputs.get(grid_name)
        sizes = 1 if grids is None else grids.prod(-1).tolist()
        for i, piece in enumerate(inputs[pixels_name].split(sizes) if pixels_name in inputs else ()):
            item = {pixels_name: piece} | ({} if grids is None else {grid_name: grids[i : i + 1]})
            content = b"".join(x.contiguous().numpy().tobytes() for x in item.values())
            prompt[kind].append(item | {"key": hashlib.blake2b(content).digest()})  # equal ones are run once
    return prompt | {"position_ids": prompt_positions(model, inputs)}


def prompt_positions(model, inputs: dict) -> Tensor:
    """(P,), or (3, P) for M-RoPE models (Qwen-VL), from the model's own `get_rope_index`. Never feed 2-D ids
    to one: it would copy them to all axes, and train another function than the one that samples."""
    ids, base = inputs["input_ids"], model.base_model
    names = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"} & set(inputs)
    if not hasattr(base, "get_rope_index"):
        return torch.arange(ids.shape[1])
    if not names:
        return torch.arange(ids.shape[1]).expand(3, -1)
    how = {name: inputs[name] for name in [*names, "mm_token_type_ids"]}
    return base.get_rope_index(ids, attention_mask=torch.ones_like(ids), **how)[0][:, 0]


def media_of(prompts: list[dict]) -> dict[str, list[dict]]:
    """The pictures and clips of some prompts."""
    return {kind: [item for prompt in prompts for item in prompt[kind]] for kind in MEDIA}


def media_token_ids(config) -> list[int]:
    """Ids that stand for pictures or clips, or open and close them: never drawn, and masked in log-probs."""
    name = re.compile("(image|video|vision|vision_start|vision_end|boi|eoi)_token_(id|index)")
    ids = {value for key, value in vars(config).items() if name.fullmatch(key)}
    return sorted(i for i in ids if isinstance(i, int) and 0 <= i < config.get_text_config().vocab_size)


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
    rows: Tensor  # (S,): the pack's responses
    owner: Tensor  # (M,): which of these S each token is of: lengths 2, 3 -> 0 0 1 1 1
    index: tuple[Tensor, Tensor]  # (M,), (M,): the tokens' places in a (B, R) table
    targets: Tensor  # (M,): the response tokens
    predict_from: Tensor  # (M,): row position of the hidden state that predicts each of them
    last: Tensor  # (S,): row position of each response's last token
    media: dict[str, list[dict]]  # of media_of: what each slot of the row shows

    def to(self, device) -> "Pack":
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), self)


def build_pack(pieces: Groups, prompts: dict[int, dict], responses: list[Tensor]) -> Pack:
    """Lay out the groups of one planned pack: prompts by prompt index, responses (each (R,)) by theirs."""
    ids, positions, places, offset = [], [], [], 0
    groups = []  # row positions [prompt, response, ...] of each
    for g, members in pieces:
        prompt, P = prompts[g], prompts[g]["length"]
        if unknown := set(prompt["kinds"]) - {name for names in MEDIA.values() for name in names}:
            raise ValueError(f"packs have no place for {', '.join(unknown)}")
        ids.append(prompt["prompt_ids"])
        positions.append(prompt["position_ids"])
        groups.append([torch.arange(offset, offset + P)])
        # All axes go on from the last token: the frames of a long video may lie beyond the text after it.
        next_position, offset = int(prompt["position_ids"][..., -1].max()) + 1, offset + P
        for b in members:
            R = len(responses[b])
            groups[-1].append(torch.arange(offset, offset + R))
            ids.append(responses[b])
            positions.append((next_position + torch.arange(R)).expand(*positions[-1].shape[:-1], R))
            places.append(torch.cat([groups[-1][0][-1:], groups[-1][-1]]))  # R + 1 row positions
            offset += R
    keys = [torch.cat([group[0], *own]) for group in groups for own in ([], *([x] for x in group[1:]))]
    lengths_q, lengths_k = [len(x) for group in groups for x in group], [len(x) for x in keys]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    layout = Layout(*_make_buckets(groups), cu_q, cu_k, torch.cat(keys), max(lengths_q), max(lengths_k))
    position_ids = torch.cat(positions, dim=-1)  # (N,) or (3, N)
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids[:, None]
    inputs = {"input_ids": torch.cat(ids)[None], "position_ids": position_ids, "layout": layout}
    return _make_pack(inputs, pieces, responses, places, media_of([prompts[g] for g, _ in pieces]))


def plain_pack(pieces: Groups, prompts: dict[int, dict], responses: list[Tensor]) -> Pack:
    """The same for the plain path: one prompt, at most one response, all of the processor's inputs. What has
    an entry per token goes on, token types with 0 and masks with their last entry."""
    ((g, members),) = pieces
    response = torch.cat([torch.empty(0, dtype=torch.long), *(responses[b] for b in members)])
    inputs, P, R = dict(prompts[g]["inputs"]), prompts[g]["length"], len(response)
    for name, value in inputs.items():
        if value.shape[:2] == (1, P):
            last = torch.zeros_like(value[:, -1:]) if "type" in name else value[:, -1:]
            more = response[None] if name == "input_ids" else last.repeat_interleave(R, dim=1)
            inputs[name] = torch.cat([value, more], dim=1)
    return _make_pack(inputs, pieces, responses, [torch.arange(P - 1, P + R)] * len(members), {})


def _make_pack(inputs: dict, pieces: Groups, responses, places: list[Tensor], media: dict) -> Pack:
    """places: row positions of the token before each response and of its R tokens, (R + 1,)."""
    members = [b for _, own in pieces for b in own]
    ids, empty = [responses[b] for b in members], torch.empty(0, dtype=torch.long)
    rows, lengths = torch.tensor(members, dtype=torch.long), [len(x) for x in ids]
    owner = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    columns, targets = torch.cat([empty, *map(torch.arange, lengths)]), torch.cat([empty, *ids])
    before, last = (torch.cat([empty, *(x[part] for x in places)]) for part in (slice(-1), slice(-1, None)))
    return Pack(inputs, rows, owner, (rows[owner], columns), targets, before, last, media)


def _make_buckets(groups: list[list[Tensor]]) -> tuple[list[Bucket], Tensor]:
    """Groups of similar lengths, up to powers of two: little padding, few calls."""
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
def packing_gap(model, forward: Callable[[Pack], Tensor], prompt: dict, temperature: float) -> float:
    """Mean difference, in nats, of packed or of decoded log-probs, the larger, from those of the unmodified
    model, on a prompt's own words as responses. forward: pack -> log-probs (M,), by an engine. Collective."""
    suppressed, sharded = media_token_ids(model.config), hasattr(next(model.parameters()), "ds_id")
    ids = prompt["prompt_ids"]  # random tokens would be twice as noisy in bf16
    tokens = ids[~torch.isin(ids, torch.tensor(suppressed))].repeat(24)[-24:].view(2, 12)
    responses, prompts = [tokens[0], tokens[1, :7]], {0: prompt}
    plain = [forward(plain_pack([(0, [b])], prompts, responses).to(model.device)) for b in (0, 1)]
    before = switch_attention(model, "packed")
    try:
        found = [forward(build_pack([(0, [0, 1])], prompts, responses).to(model.device))]
        if model.get_output_embeddings() is not None and not sharded:  # a policy that samples
            decoder, decoded = Decoder(model, [prompt], 2), []
            for token in tokens.T.to(model.device):
                logp = next_logprobs(model, decoder.hidden, temperature)  # (2, V)
                decoded.append(logp.gather(1, token[:, None])[:, 0])
                decoder.step(token)
            decoded = torch.stack(decoded, dim=1)  # (2, 12)
            found.append(torch.cat([decoded[0], decoded[1, :7]]))
        return (torch.stack(found) - torch.cat(plain)).abs().mean(1).max().item()
    finally:
        switch_attention(model, before)


def prove_packing(model, forward: Callable, prompts: list[dict], temperature: float = 1.0) -> str:
    """Pack if this is exact on some real prompts -> a line that says which path is taken, and why. What shows
    only beyond some length is asked of the config."""
    hidden = re.search(HIDES, json.dumps(model.config.get_text_config().to_dict(), default=str))
    try:
        if hidden or any("sink" in name for name, _ in model.named_parameters()):
            raise ValueError(f"this model has {hidden[0] if hidden else 'attention sinks'}")
        gap = torch.tensor([packing_gap(model, forward, prompt, temperature) for prompt in prompts]).max()
        if not gap < TOLERANCE[model.dtype]:
            raise ValueError(f"log-probs are {gap:.1e} nats from those of the unmodified model")
    except Exception as error:
        return f"warning: no packing, one response at a time, exact but slow: {type(error).__name__}, {error}"
    switch_attention(model, "packed")
    return f"packed = unmodified model within {gap:.0e} nats"


# ---- decoding ----


class Decoder:
    """Token-by-token decoding of G rows for each of S prompts, which are run once, left-padded. The rows of a
    prompt share its keys and values without a copy. Needs packed attention."""

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
        (S, kv_heads, P, D), (B, heads), t = keys.shape, query.shape[:2], key.shape[2]

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
    model, prompts: list[dict], G: int, max_length: int, end_ids: list[int], temperature: float
) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """The plain path: model.generate, by each prompt's `seed` -> S * G responses (R_b,), their log-probs, and
    which were cut."""
    ids, logprobs, cut, suppressed = [], [], [], media_token_ids(model.config)
    how = {"temperature": temperature, "top_p": 1.0, "num_return_sequences": G} if temperature else {}
    how |= {"suppress_tokens": suppressed} if suppressed else {}
    for prompt in prompts:
        torch.manual_seed(prompt["seed"])
        out = model.generate(
            **_cast(prompt["inputs"], model), **how, do_sample=temperature > 0, top_k=0,
            repetition_penalty=1.0, max_new_tokens=max_length, eos_token_id=end_ids,
            pad_token_id=end_ids[0], return_dict_in_generate=True, output_logits=True,
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
    response's last token, (S, H), which a score head reads. model: a *ForCausalLM, *ForConditionalGeneration,
    or the backbone of one."""
    inputs = _cast(pack.inputs, model) | encode_media(model.base_model, pack.media)
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[pack.last if last else pack.predict_from]


def encode_media(base, media: dict[str, list[dict]]) -> dict:
    """The vision tower on each different picture and clip -> a keyword for the model: features by slot."""
    outputs = {}
    for kind, encode in (("image", "get_image_features"), ("video", "get_video_features")):
        if slots := media.get(kind):
            unique = {item["key"]: item for item in slots}
            inputs = {
                name: torch.cat([x[name] for x in unique.values()]) for name in slots[0] if name != "key"
            }
            features = getattr(base, encode)(**_cast(inputs, base), return_dict=True)
            layers = getattr(features, "deepstack_features", None)  # Qwen3-VL: of each tapped layer
            places = {key: place for place, key in enumerate(unique)}
            order = [places[item["key"]] for item in slots]
            outputs[kind] = SimpleNamespace(
                pooler_output=[features.pooler_output[i] for i in order],
                deepstack_features=layers and [[layer[i] for i in order] for layer in layers],
            )
    return {"mm_encoder_outputs": outputs} if outputs else {}


def _cast(inputs: dict, model) -> dict:
    """To the model's device, pixels in its precision."""
    kinds = {True: model.dtype, False: None}
    return tree_map_only(Tensor, lambda x: x.to(model.device, kinds[x.is_floating_point()]), inputs)


def response_logprobs(
    model, pack: Pack, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (M,) of a pack's response tokens and, if asked for, entropies (M,) of each next-token
    distribution, in nats, fp32, of the policy at a temperature, without the placeholders of pictures."""
    suppressed = media_token_ids(model.config)
    if "layout" in pack.inputs:
        hidden, weight = forward_hidden(model, pack), model.get_output_embeddings().weight  # (M, H), (V, H)
        options = temperature / logit_scale(model), suppressed, with_entropy
        return logprobs_from_hidden(hidden, weight, pack.targets, *options)
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
        logprobs, entropy, ctx.kept = [], [], []
        for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logp = _ChunkedLogProbs.chunk(h, weight, temperature, suppressed)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            if with_entropy:
                entropy.append(-(logp.exp() * logp).sum(-1))
            room = KEPT_LOGPROBS - sum(x.numel() for x in ctx.kept) if any(ctx.needs_input_grad) else 0
            ctx.kept += [logp] if logp.numel() <= room else []
        entropy = torch.cat(entropy) if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.options = temperature, suppressed
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:  # fp32: hundreds of chunks are added up here
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i, start in enumerate(range(0, len(targets), CHUNK)):
            rows = slice(start, start + CHUNK)
            kept = i < len(ctx.kept)
            logp = ctx.kept[i] if kept else _ChunkedLogProbs.chunk(hidden[rows], weight, *ctx.options)
            p, g = logp.exp(), grad[rows, None]
            # d logprob_t / d logit_j = [j = t] - p_j     d entropy / d logit_j = -p_j (log p_j + entropy)
            grad_logits = (p * -g).scatter_add_(1, targets[rows, None], g)
            if grad_entropy is not None:
                grad_logits -= p * (logp + entropy[rows, None]) * grad_entropy[rows, None]
            grad_logits = (grad_logits / ctx.options[0]).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 4
