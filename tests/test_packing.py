"""Packed log-probs and gradients are those of one response at a time by the unmodified model, and packing
that would be wrong is found out. What each family does through whichever path is in test_families.py; any
lengths, budgets and ranks are in test_properties.py."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import common  # noqa: F401  before transformers # isort: skip
import pytest
import test_properties
import torch
import transformers
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import QWEN_VL, SEVEN, TEMPERATURE, build, folder_of, one_by_one  # noqa: F401

import rloo
from common import attention, packing
from common.packing import iter_rank_packs, plan_packs, response_logprobs

EOS = 500
# Windows, caps, sinks, blocks of pictures that see both ways, tiles, biases and factors of logits.
MORE = "mistral gemma2 gemma3 gpt_oss idefics3 internvl granite cohere gpt2 phi".split()


@pytest.fixture
def batch_of(folder_of):  # noqa: F811
    """Family -> a model of its own, its dataset's prompts, groups of 1 to 8 responses, ragged, some cut.
    EOS, which is the pad token too, also stands amid them."""

    def make(family: str) -> SimpleNamespace:
        model, processor = build(family)
        args, folder = rloo.Args(rewards=()), folder_of(family)
        data = rloo.load_prompts(args, str(folder / "rows.jsonl"), "train", model, processor)
        prompts, groups, responses = [data.encode(i) for i in range(len(data.rows))], [], []
        lengths = [[5, 1, 2, 9, 3, 3, 1, 4], [4], [3, 3, 3], [1, 6], [2, 5, 1], [7]][: len(prompts)]
        for g, own in enumerate(lengths):
            groups.append((g, [*range(len(responses), len(responses) + len(own))]))
            for R in own:
                seeded = torch.Generator().manual_seed(len(responses))
                response = torch.randint(0, 500, (R,), generator=seeded)
                response[R // 2] = EOS if R > 2 else response[R // 2]
                response[-1] = EOS if len(responses) % 3 else response[-1]
                responses.append(response)
        parts = {"model": copy.deepcopy(model), "processor": processor, "encode": data.encode}
        return SimpleNamespace(**parts, prompts=prompts, groups=groups, responses=responses)

    return make


def loss_of(logprobs, b: int, response):
    """Another weight for every token of every response."""
    return (logprobs * (1 + torch.arange(len(response)) * 0.3 - 0.7 * (b % 4))).sum()


def gradients(model) -> dict:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def unpacked(batch) -> tuple[list, dict]:
    """Log-probs of each response and gradients by the unmodified model."""
    model, logprobs = copy.deepcopy(batch.model), []
    never = packing.media_token_ids(model.config)
    for g, members in batch.groups:
        chat = packing.encode_chat(batch.processor, batch.prompts[g].messages, add_generation_prompt=True)
        for b in members:
            logp = one_by_one(model, dict(chat), batch.responses[b], TEMPERATURE, never)
            loss_of(logp, b, batch.responses[b]).backward()
            logprobs.append(logp.detach())
    return logprobs, gradients(model)


def packed(batch, max_tokens: int = 4096, is_packed: bool = True) -> tuple[list, dict, list]:
    """The same from packs -> and the packs."""
    packs, logprobs = [], [None] * len(batch.responses)
    given = batch.groups, batch.prompts, batch.encode, batch.responses, max_tokens
    batch.model.zero_grad()
    for pack in iter_rank_packs(*given, packed=is_packed):
        logp, _ = response_logprobs(batch.model, pack, TEMPERATURE)
        own = {b: logp[pack.response_of_token == s] for s, b in enumerate(pack.response_index.tolist())}
        sum((loss_of(x, b, x) for b, x in own.items()), 0.0 * logp.sum()).backward()
        for b, x in own.items():
            logprobs[b] = x.detach()
        packs.append(pack)
    return logprobs, gradients(batch.model), packs


def difference(a, b) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def assert_same(result, expected) -> None:
    assert difference(result[0], expected[0]) < 1e-4
    total = sum(g.norm() ** 2 for g in expected[1].values() if g is not None) ** 0.5
    assert total > 1
    for name, gradient in expected[1].items():
        other = result[1][name]
        if gradient is None:
            assert other is None or not other.any(), name
        else:  # the floor is for gradients that are zero but for rounding (the bias of keys, say)
            assert (other - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * total, name


# ---- packed = one by one ----


@pytest.mark.parametrize("family", [x for x in (*SEVEN, *MORE) if x not in test_properties.FAMILIES])
def test_packed_equals_one_by_one(family, batch_of):
    batch = batch_of(family)
    expected = unpacked(batch)
    *plain, packs = packed(batch, is_packed=False)
    assert len(packs) == len(batch.responses)
    assert_same(plain, expected)
    packing.set_attention(batch.model, "packed")
    *whole, packs = packed(batch)
    assert len(packs) == 1  # text, pictures, one of them twice, and a clip in one row
    assert_same(whole, expected)
    *split, packs = packed(batch, max(p.length for p in batch.prompts) + 10)
    seen = sorted(b for pack in packs for b in pack.response_index.tolist())
    assert len(packs) > 2 and seen == [*range(len(batch.responses))]
    assert_same(split, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_gradient_checkpointing(family, batch_of):
    batch, calls = batch_of(family), []
    expected = unpacked(batch)
    packing.set_attention(batch.model, "packed")
    batch.model.train()
    batch.model.gradient_checkpointing_enable()
    for name, module in batch.model.named_modules():
        if name.endswith("layers.0.self_attn"):
            module.register_forward_hook(lambda *args: calls.append(1))
    assert_same(packed(batch)[:2], expected)
    assert len(calls) == 2  # forward, and once more in backward


@pytest.mark.parametrize("family", [*QWEN_VL, "llava"])
def test_each_picture_is_seen_once(family, batch_of):
    batch, seen = batch_of(family), []
    tower = getattr(batch.model.base_model, "visual", None) or batch.model.base_model.vision_tower
    first = lambda args, kwargs: next(filter(torch.is_tensor, [*args, *kwargs.values()]))  # noqa: E731
    tower.register_forward_pre_hook(lambda _, *given: seen.append(len(first(*given))), with_kwargs=True)
    packing.set_attention(batch.model, "packed")
    packed(batch)
    media = packing.media_of(batch.prompts)
    clips = [clip.inputs["pixel_values_videos"] for clip in media["video"]]
    assert len(clips) == (family in QWEN_VL)
    pictures = {item.key: item.inputs["pixel_values"] for item in media["image"]}
    assert len(pictures) == 3 < len(media["image"])
    assert seen == [sum(map(len, pictures.values())), *map(len, clips)]
    seen.clear()
    batch.groups = batch.groups[:2]
    batch.responses = batch.responses[:9]
    packed(batch)
    assert seen == []  # no picture, no call


# ---- packing that proves itself ----

PLAIN = "warning: one response at a time, exact but slow, since this model can't be packed: "


def proof(batch, which=slice(None), max_tokens: int = 2048, max_length: int = 200) -> str:
    return packing_check.enable_packing_if_exact(
        model=batch.model,
        forward=lambda pack: response_logprobs(batch.model, pack, TEMPERATURE)[0],
        prompts=batch.prompts[which],
        max_length=max_length,
        max_tokens=max_tokens,
        temperature=TEMPERATURE,
    )


def see_each_other(monkeypatch) -> None:
    """Responses of a group as one: later ones see those before."""
    real = packing.make_layout

    def merge(groups):
        return real([[group[0], torch.cat(group[1:])] if group[1:] else group for group in groups])

    monkeypatch.setattr(packing, "make_layout", merge)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_responses_that_see_each_other_are_found_out(family, batch_of, monkeypatch):
    batch = batch_of(family)
    expected = unpacked(batch)
    with monkeypatch.context() as patch:
        see_each_other(patch)
        line = proof(batch)
        assert line.startswith(PLAIN) and "nats from those of the unmodified model" in line
        assert not packing.is_packed(batch.model)
        assert_same(packed(batch, is_packed=False)[:2], expected)
        packing.set_attention(batch.model, "packed")
        assert difference(packed(batch)[0], expected[0]) > 1e-2
        packing.set_attention(batch.model, "sdpa")
    assert proof(batch).startswith("packed = unmodified model within")
    assert packing.is_packed(batch.model)


@pytest.mark.parametrize("family", QWEN_VL)
def test_two_dimensional_positions_are_found_out(family, batch_of):
    """The silent defect of M-RoPE training. Prompts of text alone can't show it."""
    batch = batch_of(family)
    for prompt in batch.prompts:
        prompt.position_ids = torch.arange(prompt.length).expand(3, -1)
    assert proof(batch, slice(2)).startswith("packed = ")
    packing.set_attention(batch.model, "sdpa")
    assert proof(batch).startswith(PLAIN) and not packing.is_packed(batch.model)


def test_what_is_wrong_beyond_some_place_of_a_row_is_found_out(batch_of, monkeypatch):
    """Prompts are far shorter: only a full pack can show it."""
    real = attention.ModelMask.of_responses

    def blind_beyond_200(self, own, bucket):
        seen = real(self, own, bucket)
        seen[..., :5] &= (bucket.responses < 200)[:, None, :, None]
        return seen

    batch = batch_of("llama")
    assert max(prompt.length for prompt in batch.prompts) < 100
    monkeypatch.setattr(attention.ModelMask, "of_responses", blind_beyond_200)
    assert proof(batch, max_tokens=2048).startswith(PLAIN)
    assert proof(batch, max_tokens=150).startswith("packed = ")  # where no pack is so long, nothing is wrong


def test_a_broken_decoder_is_found_out(batch_of, monkeypatch):
    """One that is wrong for prompts of different lengths, one that reads other tokens, one that gives NaN."""
    batch, step, remember = batch_of("llama"), decoding.Decoder.step, decoding.Decoder.remember

    def without_padding(self, *given):
        self.valid[:] = True
        remember(self, *given)

    broken = [("step", lambda self, x: step(self, x * 0)), ("remember", without_padding)]
    broken += [("step", lambda self, x: self.hidden.fill_(math.nan))]
    for name, function in broken:
        with monkeypatch.context() as patch:
            patch.setattr(decoding.Decoder, name, function)
            assert proof(batch).startswith(PLAIN), name
            assert not packing.is_packed(batch.model)
    assert proof(batch).startswith("packed = ")


def test_an_unexpected_error_in_the_proof_ends_the_run(batch_of, monkeypatch):
    """A memory that is full, say, is no reason to train slowly. What the model's code can't take, is."""
    batch = batch_of("llama")
    for error, ends in ((RuntimeError("out of memory"), True), (TypeError("no such keyword"), False)):

        def fails(*given, error=error):
            raise error

        monkeypatch.setattr(decoding.Decoder, "step", fails)
        with pytest.raises(RuntimeError, match="out of memory") if ends else nullcontext():
            assert proof(batch) == PLAIN + "TypeError, no such keyword"
        assert not packing.is_packed(batch.model)


def test_reasons_for_the_plain_path_are_named(batch_of):
    for family, limit in (("phi3 longrope", 200), ("llama dynamic", 2048)):
        batch = batch_of(family)
        words = f"texts of more than {limit} tokens change the RoPE of all others in a pack"
        assert proof(batch, max_length=limit + 1) == PLAIN + words and not packing.is_packed(batch.model)
        assert proof(batch, max_length=limit).startswith("packed = ")
    batch = batch_of("qwen2_5_vl")
    for prompt in batch.prompts:
        prompt.unsupported_inputs = ("pixel_masks",)
    assert proof(batch) == PLAIN + "packs have no place for its pixel_masks"
    assert not packing.is_packed(batch.model)


@pytest.mark.slow
def test_the_proof_in_bf16(vqa, monkeypatch):
    """Rounding is allowed for, wrong positions and responses that see each other are not."""
    model = rloo.load_model(TINY, torch.bfloat16).eval()
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    data = rloo.load_prompts(rloo.Args(), vqa, "train", model, processor)
    prompts = [data.encode(i) for i in range(12)]
    flat = [replace(p, positions=torch.arange(p.length).expand(3, -1)) for p in prompts]
    batch, wrong = SimpleNamespace(model=model, prompts=prompts), SimpleNamespace(model=model, prompts=flat)
    assert proof(batch).startswith("packed = ")
    packing.set_attention(model, "sdpa")
    assert proof(wrong).startswith(PLAIN)
    see_each_other(monkeypatch)
    assert proof(batch).startswith(PLAIN)


# ---- attention ----


def text_by_text(q, k, v, scaling, groups, function) -> torch.Tensor:
    """Attention of every prompt, and of every response behind its prompt, in plain matrix products."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[0] for x in (k, v))  # (heads, N, D)
    out = torch.zeros_like(q[0])
    for prompt, *responses in groups:
        for segment in (prompt[:0], *responses):
            text = torch.cat([prompt, segment])
            index, zero = torch.arange(len(text)), torch.zeros(1, 1, dtype=torch.long)
            seen = function(zero, zero, index[:, None], index[None])
            scores = q[0][:, text] @ k[:, text].mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
            attended = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, text]
            own = slice(len(prompt), None) if len(segment) else slice(None)
            out = out.index_copy(1, text[own], attended[:, own])
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("form", ["causal", "window 1", "window 6", "window 99", "chunks"])
@pytest.mark.parametrize("kv_heads, scaling", [(4, None), (2, 0.5), (1, None)])
def test_attention_is_that_of_texts_by_themselves(kv_heads, scaling, form):
    groups, offset = [], 0
    for lengths in ([5, 3, 1, 4], [1, 2], [9], [2, 1, 1, 1, 1], [3, 6, 6], [4, 0, 2]):
        groups.append([offset + sum(lengths[:i]) + torch.arange(n) for i, n in enumerate(lengths)])
        offset += sum(lengths)
    layout = attention.make_layout(groups)
    masks, size = transformers.masking_utils, int(form.partition(" ")[2] or 0)
    chunks = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    function = masks.sliding_window_causal_mask_function(size) if size else masks.causal_mask_function
    mask = attention.ModelMask(mask_function=chunks if form == "chunks" else function, device="cpu")
    window = mask.window(layout.max_k)
    assert window == (0 if form == "chunks" else min(size or layout.max_k, layout.max_k))
    assert layout.cu_q.dtype == layout.cu_k.dtype == torch.int32  # as the kernel wants it
    inputs = [torch.randn(1, heads, offset, 16) for heads in (4, kv_heads, kv_heads, 4)]
    attend = partial(attention._attend_sdpa, scaling)
    ways = [lambda *qkv: text_by_text(*qkv, scaling, groups, mask.function)]
    ways += [lambda *qkv: attention._grouped_attention(attend, *qkv, layout, mask)]
    if window:
        ways += [lambda *qkv: attention._varlen_attention(*qkv, scaling, layout, window)]
    results = []
    for way in ways:
        *qkv, weight = (x.clone().requires_grad_() for x in inputs)
        out = way(*qkv)
        results.append((out, *torch.autograd.grad((out * weight.transpose(1, 2)).sum(), qkv)))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-4, atol=1e-5)


def test_the_vision_tower_attends_once_per_layer_in_bf16(batch_of, monkeypatch):
    """Over all windows and pictures, where transformers would loop over them."""
    batch, calls = batch_of("qwen2_5_vl"), []
    real = attention.vision_attention
    monkeypatch.setattr(attention, "vision_attention", lambda *x, **y: calls.append(1) or real(*x, **y))
    media = packing.media_of(batch.prompts)
    expected = packing.encode_media(batch.model.base_model, media)["mm_encoder_outputs"]
    batch.model.bfloat16()
    packing.set_attention(batch.model, "packed")
    found = packing.encode_media(batch.model.base_model, media)["mm_encoder_outputs"]
    assert len(calls) == 2 * 2  # of pictures and clips, two layers
    for kind, outputs in expected.items():
        for ours, theirs in zip(found[kind].pooler_output, outputs.pooler_output, strict=True):
            assert (ours.float() - theirs).norm() < 0.03 * theirs.norm()
    packing.set_attention(batch.model, "sdpa")
    packing.encode_media(batch.model.base_model, media)
    assert len(calls) == 4


# ---- planning ----


@st.composite
def plans(draw):
    shape = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=9))
    shapes = draw(st.lists(shape, min_size=1, max_size=12))
    order = draw(st.permutations(range(sum(len(lengths) for _, lengths in shapes))))  # responses lie anywhere
    prompt_lengths, response_lengths, groups, taken = [], [0] * len(order), [], 0
    for g, (P, lengths) in enumerate(shapes):
        members = list(order[taken : taken + len(lengths)])
        taken += len(lengths)
        for b, R in zip(members, lengths):
            response_lengths[b] = R
        prompt_lengths.append(P)
        groups.append((g, members))
    least = max(P + max(lengths, default=0) for P, lengths in shapes)
    max_tokens, world_size = least + draw(st.integers(0, 100)), draw(st.integers(1, 4))
    return groups, prompt_lengths, response_lengths, max_tokens, world_size


@given(plans())
@settings(max_examples=200, deadline=None)
def test_plan(case):
    groups, prompt_lengths, response_lengths, max_tokens, world_size = case
    before = copy.deepcopy(case)
    plan = plan_packs(*case)
    assert case == before and plan == plan_packs(*case)  # no side effects, deterministic
    assert len(plan) == world_size and len({len(packs) for packs in plan}) == 1
    member_of, size, seen, loads = {b: g for g, members in groups for b in members}, {}, [], []
    for packs in plan:
        loads.append(0.0)
        for pack in packs:
            tokens = 0
            for g, members in pack:
                P, lengths = prompt_lengths[g], [response_lengths[b] for b in members]
                own = P + sum(lengths)
                tokens += own
                loads[-1] += own + (P * P / 2 + sum(R * (P + R / 2) for R in lengths)) / (6 * 2048)
                assert all(member_of[b] == g for b in members)
                seen += members
                size[g] = size.get(g, 0) + 1
            assert tokens <= max_tokens
    assert sorted(seen) == [*range(len(response_lengths))]
    for g, members in groups:  # split only where it must be
        assert size[g] == 1 or prompt_lengths[g] + sum(response_lengths[b] for b in members) > max_tokens
    assert max(loads) - min(loads) <= 1.02 * max_tokens  # by one pack at most


def test_plan_weighs_attention():
    """By tokens, the long group takes one of the others along; by cost it is worth more than all six."""
    plan = plan_packs([(g, [g]) for g in range(7)], [24576] + [6144] * 6, [10] * 7, 61510, 2)
    assert sorted(len(packs[0]) for packs in plan) == [1, 6]


def test_plan_refuses_what_cannot_fit():
    with pytest.raises(AssertionError, match="30 \\+ 11 tokens never fit into a pack"):
        plan_packs([(0, [0, 1])], [30], [10, 11], 40)
    plan_packs([(0, [0, 1])], [30], [10, 10], 40)


# ---- prompts ----


def test_special_tokens_in_data_are_text():
    """Alone, nested, cut in two by the parts of a message: data ends no turn and stands for no picture."""
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    tokenizer = processor.tokenizer
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def special_ids(content) -> list[int]:
        row = {"prompt": [{"role": "user", "content": content}]}
        messages = rloo.build_messages(rloo.Args(), row, ".", tokenizer)
        ids = packing.encode_chat(processor, messages, add_generation_prompt=True)["input_ids"][0].tolist()
        return [i for i in ids if i in special.values()]

    usual = special_ids("hello")
    assert len(special) >= 6 and usual
    for token in special:
        for text in [token, *(token[:3] + other + token[3:] for other in special), f"a {token}{token} b"]:
            assert special_ids(text) == usual
        for cut in range(1, len(token)):
            parts = [{"type": "text", "text": text} for text in (token[:cut], token[cut:])]
            assert special_ids(parts) == usual
    for text in ("<think>a</think><answer>b</answer>", "a < b |im_end|>", "< |im_end|>"):  # these stay
        [message] = rloo.build_messages(rloo.Args(), {"prompt": text}, ".", tokenizer)
        assert message["content"] == [{"type": "text", "text": text}]
