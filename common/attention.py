"""Attention of packs: a response sees its prompt and itself, through the model's own mask.

A model composes its mask as a function of batch, head, query and key indices (causal, windows,
chunks, blocks of pictures) and hands it to transformers' AttentionMaskInterface. Here it is kept
(ModelMask), and asked at the indices that tokens have in a text of their own, [prompt; response].

Three ways to attend, all exact:
    varlen      one kernel call per layer, for fp16 and bf16, where the mask is causal or a causal window
    grouped     SDPA on groups of similar lengths, two calls each: fp32, and masks of any form
    eager       grouped, by the model's own eager function, which has what SDPA lacks (sinks, soft caps)

Letters: as in packing.py; n prompts and S responses of a bucket, D head dimension.
"""

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

PACKED = ("packed", "packed_eager")


class CannotPack(Exception):
    """Why a model takes the plain path, in words."""


# ---- layout ----


class Bucket(NamedTuple):
    """Groups of a pack with similar lengths, which attend as one batch. Padding is row position 0."""

    prompts: Tensor  # (n, P): row positions
    prompts_valid: Tensor  # (n, P): False where there is padding
    responses: Tensor  # (S, R): row positions
    responses_valid: Tensor  # (S, R)
    owner: Tensor  # (S,): the prompt of each response, as its place in `prompts`


class Layout(NamedTuple):
    """Where the segments (prompts and responses) of a pack lie, for each way to attend."""

    own: Tensor  # (N,): index of each token in a text of its own, [prompt; response]
    buckets: list[Bucket]
    order: Tensor  # (N,): where each row position lies in the buckets' outputs, one after the other
    cu_q: Tensor  # (segments + 1,) int32: boundaries of the queries, as they lie
    cu_k: Tensor  # (segments + 1,) int32: those of the gathered keys: a response's begin with its prompt's
    kv_index: Tensor  # (K,): row position of every gathered key
    max_q: int
    max_k: int


def make_layout(groups: list[list[Tensor]]) -> Layout:
    """groups: of each the row positions of [prompt, response, ...], in the order of the row."""
    queries = [segment for group in groups for segment in group]
    own = []
    keys = []
    for prompt, *responses in groups:
        own.append(torch.arange(len(prompt)))
        keys.append(prompt)
        for response in responses:
            own.append(torch.arange(len(response)) + len(prompt))
            keys.append(torch.cat([prompt, response]))
    buckets, order = _make_buckets(groups)
    return Layout(
        own=torch.cat(own),
        buckets=buckets,
        order=order,
        cu_q=_boundaries(queries),
        cu_k=_boundaries(keys),
        kv_index=torch.cat(keys),
        max_q=max(map(len, queries)),
        max_k=max(map(len, keys)),
    )


def _boundaries(segments: list[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, segments)]).cumsum(0).int()


def _make_buckets(groups: list[list[Tensor]]) -> tuple[list[Bucket], Tensor]:
    """Groups of similar lengths, up to powers of two: little padding, few calls."""
    similar = defaultdict(list)
    for prompt, *responses in groups:
        longest = max(map(len, responses), default=0)
        similar[len(prompt).bit_length(), longest.bit_length()].append((prompt, responses))
    buckets = []
    order = []
    for members in similar.values():
        prompts, prompts_valid = _pad([prompt for prompt, _ in members])
        responses, responses_valid = _pad([row for _, responses in members for row in responses])
        owner = torch.repeat_interleave(torch.tensor([len(responses) for _, responses in members]))
        buckets.append(Bucket(prompts, prompts_valid, responses, responses_valid, owner))
        order += [prompts[prompts_valid], responses[responses_valid]]
    return buckets, torch.cat(order).argsort()


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    if not rows:
        return torch.empty(0, 0, dtype=torch.long), torch.empty(0, 0, dtype=torch.bool)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


# ---- masks ----


class Place(Tensor):
    """Indices in a text of its own, by which a mask compares (windows, chunks). What it looks
    up per token (blocks of pictures), it looks up at their `rows` of the pack."""

    rows = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not Tensor.__getitem__:
            return super().__torch_function__(function, types, args, kwargs or {})
        table, index = args
        where = []
        for x in index if isinstance(index, tuple) else (index,):
            if isinstance(x, Place) and x.rows is None:
                raise LookupError("the mask asks for data of tokens that are not here")
            where.append(x.rows if isinstance(x, Place) else x)
        return table[tuple(where)]


class ModelMask(BlockMask):
    """What a model asks of attention, in its own words. Layers share it: what is made of it is
    made once per forward. To transformers it is a mask that is ready, which models hand on."""

    shape = (1, 1, 1, 1)

    def __init__(self, mask_function: Callable, device, **others):
        from transformers.masking_utils import causal_mask_function

        self.function = mask_function
        self.device = device
        self.is_causal = mask_function is causal_mask_function
        self.given = {**others, "mask_function": mask_function, "device": device}
        self.made = {}

    def once(self, key, make: Callable):
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def ask(self, query: Tensor, key: Tensor, query_rows=None, key_rows=None) -> Tensor:
        """Indices in texts of their own, (B, Q), (B, K), and rows in a pack -> (B, 1, Q, K)."""
        q = query[:, None, :, None].as_subclass(Place)
        k = key[:, None, None].as_subclass(Place)
        if query_rows is not None:
            q.rows = query_rows[:, None, :, None]
            k.rows = key_rows[:, None, None]
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=query.device)
        seen = self.function(zero, zero, q, k).as_subclass(Tensor)
        return seen.expand(len(query), 1, query.shape[1], key.shape[1])

    def window(self, longest: int) -> int:
        """How many tokens a token sees at most, itself included; 0 for masks of another form."""
        if self.is_causal:
            return longest
        index = torch.arange(longest, device=self.device)
        try:
            seen = self.ask(index[None], index[None])[0, 0]
        except LookupError:
            return 0
        width = int(seen[-1].sum())
        distance = index[:, None] - index
        return width if torch.equal(seen, (distance >= 0) & (distance < width)) else 0

    def of_prompts(self, own: Tensor, bucket: Bucket) -> Tensor | None:
        """(n, 1, P, P), None where plainly causal."""
        if self.is_causal:
            return None
        rows = bucket.prompts
        return self.ask(own[rows], own[rows], rows, rows) & bucket.prompts_valid[:, None, None]

    def of_responses(self, own: Tensor, bucket: Bucket) -> Tensor:
        """(S, 1, R, P + R): prompts as the model says, responses causal besides."""
        q = bucket.responses
        k = torch.cat([bucket.prompts[bucket.owner], q], dim=1)
        valid = torch.cat([bucket.prompts_valid[bucket.owner], bucket.responses_valid], dim=1)
        seen = valid[:, None] & (own[k][:, None] <= own[q][..., None])  # (S, R, P + R)
        return seen[:, None] if self.is_causal else seen[:, None] & self.ask(own[q], own[k], q, k)


# ---- attention ----


def packed_attention(
    module, query, key, value, attention_mask=None, layout=None, decoder=None, eager=False, **kwargs
):
    """Of a pack (layout), or of a decoding step (decoder), in the signature of transformers'
    AttentionInterface; with neither that of transformers. query (1, heads, N, D), key, value
    (1, kv_heads, N, D) -> (1, N, heads, D), None."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask = attention_mask
    own_eager = sys.modules[type(module).__module__].eager_attention_forward if eager else None
    if layout is None and decoder is None:
        if isinstance(mask, ModelMask):
            make_mask = ALL_MASK_ATTENTION_FUNCTIONS["eager" if eager else "sdpa"]
            mask = mask.once("transformers", lambda: make_mask(**attention_mask.given))
        return (own_eager or sdpa_attention_forward)(module, query, key, value, mask, **kwargs)
    if not isinstance(mask, ModelMask):
        raise CannotPack("its mask is not made by transformers' masking_utils")

    scaling = kwargs.get("scaling")
    own_attend = None
    if eager:
        own_attend = functools.partial(_attend_eager, functools.partial(own_eager, module, **kwargs))
    if layout is None:
        return decoder.attend(module.layer_idx, query, key, value, mask, scaling, own_attend), None
    if decoder is not None:  # it runs its prompts
        decoder.remember(module.layer_idx, key, value)
    window = 0
    if not eager and _varlen_takes(query):
        window = mask.once("window", lambda: mask.window(layout.max_k))
    if window:
        return _varlen_attention(query, key, value, scaling, layout, window), None
    attend = own_attend or functools.partial(_attend_sdpa, scaling)
    return _grouped_attention(attend, query, key, value, layout, mask), None


def _varlen_takes(query: Tensor) -> bool:
    D = query.shape[-1]
    return query.dtype in (torch.float16, torch.bfloat16) and (not query.is_cuda or (D % 8 == 0 and D <= 256))


def _varlen_attention(query, key, value, scaling, layout: Layout, window: int) -> Tensor:
    """Keys and values are gathered per response as [prompt; response]; a causal window that is
    aligned at the bottom right then gives each response token its prompt and its own past."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (N, heads, D)
    left = window - 1 if window < layout.max_k else -1
    return _varlen(
        q, k[layout.kv_index], v[layout.kv_index], layout.cu_q, layout.cu_k, layout.max_q, layout.max_k,
        scaling, window=(left, 0),
    )[None]  # fmt: skip


def _varlen(q, k, v, cu_q, cu_k, max_q: int, max_k: int, scaling, window: tuple[int, int]) -> Tensor:
    """Each segment's queries (N, heads, D) attend to its keys (K, kv_heads, D), on CUDA at once."""
    is_grouped = q.shape[1] != k.shape[1]
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            q, k, v, cu_q, cu_k, max_q, max_k, scale=scaling, window_size=window, enable_gqa=is_grouped
        )
    outputs = []  # one by one, so that here too nothing depends on a segment's neighbours
    left, right = window
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist())):
        Q, K = q1 - q0, k1 - k0
        seen = torch.ones(Q, K, dtype=torch.bool)
        if right == 0:
            seen = seen.tril(K - Q)
        if left >= 0:
            seen = seen.triu(K - Q - left)
        segment = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))  # (1, heads, n, D)
        out = F.scaled_dot_product_attention(*segment, seen, scale=scaling, enable_gqa=is_grouped)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _grouped_attention(attend: Callable, query, key, value, layout: Layout, mask: ModelMask) -> Tensor:
    """Two calls per bucket: its prompts, and its responses, each after its prompt's keys, values."""
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]  # (N, heads, D)
    outputs = []
    for i, bucket in enumerate(layout.buckets):
        q, k, v = (x[bucket.prompts].transpose(1, 2) for x in tokens)  # (n, heads, P, D)
        seen = mask.once(("prompts", i), lambda bucket=bucket: mask.of_prompts(layout.own, bucket))
        outputs.append(attend(q, k, v, seen)[bucket.prompts_valid])
        if bucket.responses.numel() == 0:
            continue
        own_q, own_k, own_v = (x[bucket.responses].transpose(1, 2) for x in tokens)  # (S, heads, R, D)
        k = torch.cat([k[bucket.owner], own_k], dim=2)  # (S, kv_heads, P + R, D)
        v = torch.cat([v[bucket.owner], own_v], dim=2)
        seen = mask.once(("responses", i), lambda bucket=bucket: mask.of_responses(layout.own, bucket))
        outputs.append(attend(own_q, k, v, seen)[bucket.responses_valid])
    return torch.cat(outputs)[layout.order][None]


def _attend_sdpa(scaling, query, key, value, seen: Tensor | None) -> Tensor:
    """(n, heads, Q, D) to (n, kv_heads, K, D), causal where `seen` is None -> (n, Q, heads, D)"""
    out = F.scaled_dot_product_attention(
        query, key, value, seen,
        is_causal=seen is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2)


def _attend_eager(eager: Callable, query, key, value, seen: Tensor | None) -> Tensor:
    if seen is None:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    lowest = torch.finfo(query.dtype).min
    bias = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, lowest)
    return eager(query, key, value, bias)[0]


def vision_attention(module, query, key, value, scaling, cu_seq_lens_q, max_length_q, **kwargs):
    """All windows or pictures of a vision tower in one call, where transformers would loop
    over them: it gives boundaries to an attention whose name has "flash" in it."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (N, heads, D)
    cu = cu_seq_lens_q.int()
    return _varlen(q, k, v, cu, cu, max_length_q, max_length_q, scaling, window=(-1, -1))[None], None


# ---- switching ----


def switch_attention(model, name: str) -> str:
    """Give the text model this attention, "packed" or one of transformers' -> the name of the
    one before. Packed is eager where transformers' was."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for kind in PACKED:
        AttentionInterface.register(kind, functools.partial(packed_attention, eager=kind == "packed_eager"))
        AttentionMaskInterface.register(kind, ModelMask)
    AttentionInterface.register("packed_flash", vision_attention)
    before = model.config.get_text_config()._attn_implementation
    if name == "packed" and "eager" in before:
        name = "packed_eager"
    names = name
    if vision := getattr(model.config, "vision_config", None):
        of_vision = "sdpa" if vision._attn_implementation == "packed_flash" else vision._attn_implementation
        if name in PACKED and of_vision == "sdpa" and _loops_over_windows(model):
            of_vision = "packed_flash"
        names = {"text_config": name, "vision_config": of_vision}
    model.set_attn_implementation(names)
    return before


def _loops_over_windows(model) -> bool:
    """Does its vision tower attend in segments, and could one kernel call do?"""
    forwards = [inspect.signature(type(module).forward) for module in model.modules()]
    takes_boundaries = any("cu_seqlens" in forward.parameters for forward in forwards)
    return model.dtype in (torch.float16, torch.bfloat16) and takes_boundaries


def is_packed(model) -> bool:
    return model.config.get_text_config()._attn_implementation in PACKED
