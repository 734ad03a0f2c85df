"""Packed log-probs and gradients equal those of the unmodified model, which runs one response at a time, and
packing that would be wrong is detected at startup. test_families.py covers each family, test_properties.py
random lengths, token limits and ranks."""

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
from packaging.version import Version
from test_families import QWEN_VL, SEVEN, TEMPERATURE, build, folder_of, unmodified_logprobs  # noqa: F401

import rloo
from common import attention, decoding, packing, packing_check
from common.packing import iter_rank_packs, plan_packs, response_logprobs

EOS = 500
# Windows, softcaps, attention sinks, image blocks, tiles, biases and factors of logits.
OTHERS = "mistral gemma2 gemma3 gpt_oss idefics3 internvl granite cohere gpt2 phi".split()


@pytest.fixture
def batch_of(folder_of):  # noqa: F811
    """Family -> a copy of its model, its prompts, and groups of 1 to 8 responses of different lengths.

    EOS, which is also the padding token, occurs inside of responses, too."""

    def make(family: str) -> SimpleNamespace:
        model, processor = build(family)
        args = rloo.Args(rewards=())
        data = rloo.load_prompts(args, str(folder_of(family) / "rows.jsonl"), "train", model, processor)
        prompts = [data.encode(i) for i in range(len(data.rows))]
        groups = []
        responses = []
        for i, lengths in enumerate([[5, 1, 2, 9, 3, 3, 1, 4], [4], [3, 3, 3], [1, 6], [2, 5, 1], [7]]):
            if i == len(prompts):
                break
            groups.append((i, [*range(len(responses), len(responses) + len(lengths))]))
            for R in lengths:
                generator = torch.Generator().manual_seed(len(responses))
                response = torch.randint(0, 500, (R,), generator=generator)
                response[R // 2] = EOS if R > 2 else response[R // 2]
                response[-1] = EOS if len(responses) % 3 else response[-1]
                responses.append(response)
        parts = {"model": copy.deepcopy(model), "processor": processor, "encode": data.encode}
        return SimpleNamespace(**parts, prompts=prompts, groups=groups, responses=responses)

    return make


def weighted_sum(logprobs, b: int):
    """A loss with a different weight for each token of each response."""
    return (logprobs * (1 + torch.arange(len(logprobs)) * 0.3 - 0.7 * (b % 4))).sum()


def gradients(model) -> dict:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def run_unmodified(batch) -> tuple[list, dict]:
    """Log-probs of each response and gradients, by the unmodified model on the processor's output."""
    model = copy.deepcopy(batch.model)
    logprobs = []
    for i, response_indices in batch.groups:
        chat = packing.encode_chat(batch.processor, batch.prompts[i].messages, add_generation_prompt=True)
        for b in response_indices:
            logp = unmodified_logprobs(model, dict(chat), batch.responses[b], TEMPERATURE)
            weighted_sum(logp, b).backward()
            logprobs.append(logp.detach())
    return logprobs, gradients(model)


def run_packs(batch, max_tokens: int = 4096) -> tuple[list, dict, list]:
    """The same by packs of the model as it is, packed or not; and the packs."""
    logprobs = [None] * len(batch.responses)
    packs = []
    batch.model.zero_grad()
    arguments = batch.model, batch.groups, batch.prompts, batch.encode, batch.responses, max_tokens
    for pack in iter_rank_packs(*arguments):
        logp, _ = response_logprobs(batch.model, pack, TEMPERATURE)
        parts = {b: logp[pack.response_of_token == s] for s, b in enumerate(pack.response_index.tolist())}
        sum((weighted_sum(x, b) for b, x in parts.items()), 0.0 * logp.sum()).backward()
        for b, x in parts.items():
            logprobs[b] = x.detach()
        packs.append(pack)
    return logprobs, gradients(batch.model), packs


def largest_difference(a, b) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def assert_same(result, expected) -> None:
    assert largest_difference(result[0], expected[0]) < 1e-4
    total = sum(g.norm() ** 2 for g in expected[1].values() if g is not None) ** 0.5
    assert total > 1
    for name, gradient in expected[1].items():
        other = result[1][name]
        if gradient is None:
            assert other is None or not other.any(), name
        else:  # the absolute term is for gradients that are zero up to rounding, such as biases of keys
            assert (other - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * total, name


# ---- packed and unpacked ----


@pytest.mark.parametrize("family", [x for x in (*SEVEN, *OTHERS) if x not in test_properties.FAMILIES])
def test_packed_equals_unmodified(family, batch_of):
    batch = batch_of(family)
    expected = run_unmodified(batch)
    *unpacked, packs = run_packs(batch)
    assert len(packs) == len(batch.responses)
    assert_same(unpacked, expected)
    packing.set_attention(batch.model, "packed")
    *whole, packs = run_packs(batch)
    assert len(packs) == 1  # text, images, an image twice, and a video in one sequence
    assert_same(whole, expected)
    *split, packs = run_packs(batch, max(p.length for p in batch.prompts) + 10)
    indices = sorted(b for pack in packs for b in pack.response_index.tolist())
    assert len(packs) > 2 and indices == [*range(len(batch.responses))]
    assert_same(split, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_gradient_checkpointing(family, batch_of):
    batch = batch_of(family)
    calls = []
    expected = run_unmodified(batch)
    packing.set_attention(batch.model, "packed")
    batch.model.train()
    batch.model.gradient_checkpointing_enable()
    for name, module in batch.model.named_modules():
        if name.endswith("layers.0.self_attn"):
            module.register_forward_hook(lambda *args: calls.append(1))
    assert_same(run_packs(batch)[:2], expected)
    assert len(calls) == 2  # forward, and again in backward


@pytest.mark.parametrize("family", [*QWEN_VL, "llava"])
def test_each_image_is_encoded_once(family, batch_of):
    batch = batch_of(family)
    lengths = []
    tower = getattr(batch.model.base_model, "visual", None) or batch.model.base_model.vision_tower

    def hook(module, args, kwargs):
        lengths.append(len(next(filter(torch.is_tensor, [*args, *kwargs.values()]))))

    tower.register_forward_pre_hook(hook, with_kwargs=True)
    packing.set_attention(batch.model, "packed")
    *_, (pack,) = run_packs(batch)
    videos = [video.inputs["pixel_values_videos"] for video in pack.media["video"]]
    assert len(videos) == (family in QWEN_VL)
    images = {item.key: item.inputs["pixel_values"] for item in pack.media["image"]}
    assert len(images) == 3 < len(pack.media["image"])
    batches = [sum(map(len, images.values()))]
    if family == "qwen3_vl" and Version(transformers.__version__) < Version("5.18"):
        batches += map(len, images.values())  # the batch's deepstack features can't be assigned to images
    assert lengths == [*batches, *map(len, videos)]
    lengths.clear()
    batch.groups = batch.groups[:2]
    batch.responses = batch.responses[:9]
    run_packs(batch)
    assert lengths == []  # without images, the vision tower does not run


# ---- the check at startup ----

WARNING = "warning: packing is not supported for this model ("
ENABLED = "packing enabled: log-probs match the unmodified model within"


def check(batch, which=slice(None), max_tokens: int = 2048, max_length: int = 200) -> str:
    message = packing_check.enable_packing_if_exact(
        model=batch.model,
        forward=lambda pack: response_logprobs(batch.model, pack, TEMPERATURE)[0],
        prompts=batch.prompts[which],
        max_length=max_length,
        max_tokens=max_tokens,
        temperature=TEMPERATURE,
    )
    assert packing.is_packed(batch.model) == message.startswith(ENABLED) != message.startswith(WARNING)
    return message


def let_responses_see_each_other(monkeypatch) -> None:
    """Lay out the responses of a group as one, so that later ones attend to earlier ones."""
    make_layout = packing.make_layout

    def merge(groups, is_sampled):
        groups = [[group[0], torch.cat(group[1:])] if group[1:] else group for group in groups]
        return make_layout(groups, is_sampled)

    monkeypatch.setattr(packing, "make_layout", merge)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_the_check_detects_responses_that_see_each_other(family, batch_of, monkeypatch):
    batch = batch_of(family)
    expected = run_unmodified(batch)
    with monkeypatch.context() as patch:
        let_responses_see_each_other(patch)
        message = check(batch)
        assert message.startswith(WARNING + "its packed log-probs change by")
        assert_same(run_packs(batch)[:2], expected)
        packing.set_attention(batch.model, "packed")
        assert largest_difference(run_packs(batch)[0], expected[0]) > 1e-2
        packing.set_attention(batch.model, "sdpa")
    assert check(batch).startswith(ENABLED)


@pytest.mark.parametrize("family", QWEN_VL)
def test_the_check_detects_two_dimensional_positions(family, batch_of):
    """The silent defect of M-RoPE training. Prompts without images can't show it."""
    batch = batch_of(family)
    for prompt in batch.prompts:
        prompt.position_ids = torch.arange(prompt.length).expand(3, -1)
    assert check(batch, slice(2)).startswith(ENABLED)
    packing.set_attention(batch.model, "sdpa")
    assert check(batch).startswith(WARNING)


def test_the_check_detects_errors_far_into_a_pack(batch_of, monkeypatch):
    """Prompts are much shorter, so only a full pack can show them."""
    bucket_mask = attention.ModelMask.bucket_mask

    def blind_beyond_200(self, layout, bucket):
        attn_mask = bucket_mask(self, layout, bucket)
        if not bucket.is_prompts:
            attn_mask[..., :5] &= (bucket.queries < 200)[:, None, :, None]
        return attn_mask

    batch = batch_of("llama")
    assert max(prompt.length for prompt in batch.prompts) < 100
    monkeypatch.setattr(attention.ModelMask, "bucket_mask", blind_beyond_200)
    assert check(batch, max_tokens=2048, max_length=100).startswith(WARNING)
    packing.set_attention(batch.model, "sdpa")
    assert check(batch, max_tokens=150).startswith(ENABLED)  # no pack is long enough for the error


def test_the_check_detects_attention_that_is_only_wrong_at_a_distance(batch_of, monkeypatch):
    """Block-sparse attention, for example, is dense up to some length: the long probe exceeds it."""
    evaluate = attention.ModelMask.bucket_mask

    def blind_at_a_distance(self, layout, bucket):
        attn_mask = evaluate(self, layout, bucket)
        if not bucket.is_prompts:
            q, k = (layout.seq_positions[x] for x in (bucket.queries, bucket.keys))
            distance = q[..., None] - k[:, None]
            attn_mask = attn_mask & (distance < 128)[:, None]
        return attn_mask

    batch = batch_of("llama")
    monkeypatch.setattr(attention.ModelMask, "bucket_mask", blind_at_a_distance)
    assert check(batch, max_length=200).startswith(WARNING)
    assert check(batch, max_length=120).startswith(ENABLED)


def test_the_check_detects_a_broken_decoder(batch_of, monkeypatch):
    """Padding of shorter prompts that is not masked, tokens that are ignored, NaN."""
    batch = batch_of("llama")
    step = decoding.Decoder.step
    store_prompt_kv = decoding.Decoder.store_prompt_kv

    def without_padding(self, *arguments):
        self.prompt_valid[:] = True
        store_prompt_kv(self, *arguments)

    broken = [("step", lambda self, x: step(self, x * 0)), ("store_prompt_kv", without_padding)]
    broken += [("step", lambda self, x: self.hidden.fill_(math.nan))]
    for name, function in broken:
        with monkeypatch.context() as patch:
            patch.setattr(decoding.Decoder, name, function)
            assert check(batch).startswith(WARNING), name
    assert check(batch).startswith(ENABLED)


def test_unexpected_errors_in_the_check_end_the_run(batch_of, monkeypatch):
    """Out of memory is no reason to train slowly; model code that can't run a pack is."""
    batch = batch_of("llama")
    for error, ends in ((RuntimeError("out of memory"), True), (TypeError("no such keyword"), False)):

        def fails(*arguments, error=error):
            raise error

        monkeypatch.setattr(decoding.Decoder, "step", fails)
        with pytest.raises(RuntimeError, match="out of memory") if ends else nullcontext():
            assert check(batch).startswith(WARNING + "TypeError: no such keyword)")
        assert not packing.is_packed(batch.model)


def test_reasons_for_the_unpacked_path(batch_of, monkeypatch):
    for family, limit in (("phi3 longrope", 200), ("llama dynamic", 2048)):
        batch = batch_of(family)
        reason = f"beyond {limit} tokens its RoPE depends on the sequence length)"
        assert check(batch, max_length=limit + 1).startswith(WARNING + reason)
        assert check(batch, max_length=limit).startswith(ENABLED)
    batch = batch_of("qwen2_5_vl")
    for prompt in batch.prompts:
        prompt.unsupported_inputs = ("pixel_masks",)
    assert check(batch).startswith(WARNING + "packs do not support its inputs pixel_masks")


def test_attention_refuses_inputs_that_it_would_ignore(batch_of, monkeypatch):
    """Sparse attention passes the blocks to attend to; transformers' SDPA path would not get them."""
    batch = batch_of("llama")
    layer = batch.model.model.layers[0].self_attn
    forward = layer.forward
    blocks = {"block_indices": torch.zeros(1)}
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, **blocks)
    assert check(batch).startswith(WARNING + "its attention has the input block_indices)")


@pytest.mark.slow
def test_the_check_in_bf16(vqa, monkeypatch):
    """Rounding passes; wrong positions and responses that see each other do not."""
    model = rloo.load_model(TINY, torch.bfloat16).eval()
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    data = rloo.load_prompts(rloo.Args(), vqa, "train", model, processor)
    prompts = [data.encode(i) for i in range(12)]
    flat = [replace(p, position_ids=torch.arange(p.length).expand(3, -1)) for p in prompts]
    assert check(SimpleNamespace(model=model, prompts=prompts)).startswith(ENABLED)
    packing.set_attention(model, "sdpa")
    assert check(SimpleNamespace(model=model, prompts=flat)).startswith(WARNING)
    let_responses_see_each_other(monkeypatch)
    assert check(SimpleNamespace(model=model, prompts=prompts)).startswith(WARNING)


# ---- attention ----


def separate_attention(q, k, v, scaling, groups, function) -> torch.Tensor:
    """Attention of each prompt and each [prompt; response] as a separate sequence, in matrix products."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[0] for x in (k, v))  # (heads, N, D)
    out = torch.zeros_like(q[0])
    for prompt, *responses in groups:
        for segment in (prompt[:0], *responses):
            sequence = torch.cat([prompt, segment])
            index = torch.arange(len(sequence))
            zero = torch.zeros(1, 1, dtype=torch.long)
            attn_mask = function(zero, zero, index[:, None], index[None])
            scores = q[0][:, sequence] @ k[:, sequence].mT
            scores = scores * (q.shape[-1] ** -0.5 if scaling is None else scaling)
            attended = scores.masked_fill(~attn_mask, -math.inf).softmax(-1) @ v[:, sequence]
            part = slice(len(prompt), None) if len(segment) else slice(None)
            out = out.index_copy(1, sequence[part], attended[:, part])
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("form", ["causal", "window 1", "window 6", "window 99", "chunks 4"])
@pytest.mark.parametrize("kv_heads, scaling", [(4, None), (2, 0.5), (1, None)])
def test_attention_equals_separate_sequences(kv_heads, scaling, form):
    groups = []
    offset = 0
    for lengths in ([5, 3, 1, 4], [1, 2], [9], [2, 1, 1, 1, 1], [3, 6, 6], [4, 0, 2]):
        groups.append([offset + sum(lengths[:i]) + torch.arange(n) for i, n in enumerate(lengths)])
        offset += sum(lengths)
    layout = attention.make_layout(groups, torch.ones(offset, dtype=torch.bool))
    assert layout.cu_seqlens_q.dtype == layout.cu_seqlens_k.dtype == torch.int32  # as the kernel requires
    masks = transformers.masking_utils
    size = int(form.partition(" ")[2] or 0)
    functions = {"causal": masks.causal_mask_function}
    functions["window"] = masks.sliding_window_causal_mask_function(size)
    functions["chunks"] = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    function = functions[form.split()[0]]
    # transformers gives the size of windows and of chunks under the same name.
    mask = attention.ModelMask(mask_function=function, device="cpu", local_size=size or None)
    assert mask.window_size() == (size if "window" in form else None)
    inputs = [torch.randn(1, heads, offset, 16) for heads in (4, kv_heads, kv_heads, 4)]
    attend = partial(attention._attend_sdpa, scaling)
    implementations = [lambda *qkv: separate_attention(*qkv, scaling, groups, mask.function)]
    implementations += [lambda *qkv: attention._grouped_attention(attend, *qkv, layout, mask)]
    if "chunks" not in form:
        window = size or -1
        implementations += [lambda *qkv: attention._varlen_attention(*qkv, scaling, layout, window)]
    results = []
    for implementation in implementations:
        *qkv, weight = (x.clone().requires_grad_() for x in inputs)
        out = implementation(*qkv)
        results.append((out, *torch.autograd.grad((out * weight.transpose(1, 2)).sum(), qkv)))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-4, atol=1e-5)


def test_logical_index_of_the_docstring():
    """A window of 3 over "abc" with the responses "de" and "fg", and an image block of b and c."""
    groups = [[torch.arange(3), torch.tensor([3, 4]), torch.tensor([5, 6])]]
    layout = attention.make_layout(groups, torch.ones(7, dtype=torch.bool))
    assert layout.seq_positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    window = transformers.masking_utils.sliding_window_causal_mask_function(3)
    image_block = torch.tensor([-1, 0, 0, -1, -1, -1, -1])

    def attended(function) -> dict[str, str]:
        mask = attention.ModelMask(mask_function=function, device="cpu")
        sees = {}
        for bucket in layout.buckets:
            attn_mask = mask.bucket_mask(layout, bucket)[:, 0]  # (S, Q, K)
            for s, q in bucket.queries_valid.nonzero().tolist():
                keys = bucket.keys[s, attn_mask[s, q]]
                sees["abcdefg"[bucket.queries[s, q]]] = "".join("abcdefg"[k] for k in keys)
        return sees

    expected = {"a": "a", "b": "ab", "c": "abc", "d": "bcd", "e": "cde", "f": "bcf", "g": "cfg"}
    assert attended(window) == expected
    is_block = lambda q, k: (image_block[q] == image_block[k]) & (image_block[q] >= 0)  # noqa: E731
    with_block = attended(lambda batch, head, q, k: window(batch, head, q, k) | is_block(q, k))
    assert with_block == expected | {"b": "abc"}  # b sees c, which comes later


def test_the_vision_tower_attends_once_per_layer_in_bf16(batch_of, monkeypatch):
    """One call for all windows and images, where transformers would loop over them."""
    batch = batch_of("qwen2_5_vl")
    calls = []
    varlen = attention._varlen
    monkeypatch.setattr(attention, "_varlen", lambda *x, **y: calls.append(1) or varlen(*x, **y))
    media = {name: [x for prompt in batch.prompts for x in prompt.media[name]] for name in ("image", "video")}
    expected = packing.encode_media(batch.model.base_model, media)
    batch.model.bfloat16()
    packing.set_attention(batch.model, "packed")
    features = packing.encode_media(batch.model.base_model, media)
    assert len(calls) == 2 * 2  # images and videos, two layers
    for media_type, outputs in expected.items():
        for x, y in zip(features[media_type].pooler_output, outputs.pooler_output, strict=True):
            assert (x.float() - y).norm() < 0.03 * y.norm()
    packing.set_attention(batch.model, "sdpa")
    packing.encode_media(batch.model.base_model, media)
    assert len(calls) == 4


# ---- planning ----


@st.composite
def plans(draw):
    shape = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=9))
    shapes = draw(st.lists(shape, min_size=1, max_size=12))
    order = draw(st.permutations(range(sum(len(lengths) for _, lengths in shapes))))  # responses in any order
    prompt_lengths = [P for P, _ in shapes]
    response_lengths = [0] * len(order)
    groups = []
    for i, (_, lengths) in enumerate(shapes):
        response_indices = [order.pop() for _ in lengths]
        for b, R in zip(response_indices, lengths):
            response_lengths[b] = R
        groups.append((i, response_indices))
    longest = max(P + max(lengths, default=0) for P, lengths in shapes)
    max_tokens = longest + draw(st.integers(0, 100))
    world_size = draw(st.integers(1, 4))
    return groups, prompt_lengths, response_lengths, max_tokens, world_size


@given(plans())
@settings(max_examples=200, deadline=None)
def test_plan(case):
    groups, prompt_lengths, response_lengths, max_tokens, world_size = case
    before = copy.deepcopy(case)
    plan = plan_packs(*case)
    assert case == before and plan == plan_packs(*case)  # no side effects, deterministic
    assert len(plan) == world_size and len({len(packs) for packs in plan}) == 1
    group_of = {b: i for i, response_indices in groups for b in response_indices}
    num_parts = {}
    planned = []
    costs = [0.0] * world_size
    for rank, pack in ((rank, pack) for rank, packs in enumerate(plan) for pack in packs):
        tokens = 0
        for i, response_indices in pack:
            P = prompt_lengths[i]
            lengths = [response_lengths[b] for b in response_indices]
            tokens += P + sum(lengths)
            costs[rank] += P + sum(lengths) + (P * P / 2 + sum(R * (P + R / 2) for R in lengths)) / (6 * 2048)
            assert all(group_of[b] == i for b in response_indices)
            planned += response_indices
            num_parts[i] = num_parts.get(i, 0) + 1
        assert tokens <= max_tokens
    assert sorted(planned) == [*range(len(response_lengths))]
    for i, response_indices in groups:  # only groups that do not fit are split
        tokens = prompt_lengths[i] + sum(response_lengths[b] for b in response_indices)
        assert num_parts[i] == 1 or tokens > max_tokens
    assert max(costs) - min(costs) <= 1.02 * max_tokens  # at most one pack


def test_plan_weighs_attention():
    """By tokens, the long group would share its rank with another one; by cost it outweighs all six."""
    plan = plan_packs([(g, [g]) for g in range(7)], [24576] + [6144] * 6, [10] * 7, 61510, 2)
    assert sorted(len(packs[0]) for packs in plan) == [1, 6]


def test_plan_refuses_what_cannot_fit():
    with pytest.raises(AssertionError, match="30 \\+ 11 tokens never fit into a pack"):
        plan_packs([(0, [0, 1])], [30], [10, 11], 40)
    plan_packs([(0, [0, 1])], [30], [10, 10], 40)


# ---- prompts ----


@pytest.mark.parametrize("shapes", [((32, 64), (64, 32)), ((32, 32), (32, 32))])
def test_images_are_equal_only_if_their_shapes_are(shapes):
    """Two images of one color have the same bytes; with patches, only the grid differs."""
    sizes = [torch.ones(3, *shape) for shape in shapes]
    tiles = [packing._split_media({"pixel_values": x[None]})[0] for x in sizes]
    patches = torch.ones(8, 12)  # of each image
    grids = [torch.tensor([[1, height // 16, width // 16]]) for height, width in shapes]
    items = [packing._split_media({"image_grid_thw": grid, "pixel_values": patches})[0] for grid in grids]
    for a, b in (tiles, items):
        assert (a.key == b.key) == (shapes[0] == shapes[1])


def test_positions_after_a_long_video(batch_of, folder_of):  # noqa: F811
    """A video's frames count in time beyond the text after them. The response continues from that text."""
    batch = batch_of("qwen2_5_vl")
    model = batch.model
    prompt = batch.prompts[-1]  # "<image>, then <video>?"
    inputs = dict(prompt.inputs)
    inputs["second_per_grid_ts"] = torch.tensor([30.0])  # a slow video: 60 positions per frame
    long = packing.make_prompt(model, inputs)
    assert long.next_position == int(long.position_ids[0, -1]) + 1 < long.position_ids.max()
    response = torch.randint(0, 500, (6,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = unmodified_logprobs(model, inputs, response, TEMPERATURE)
        packing.set_attention(model, "packed")
        pack = packing.build_pack([(0, [0])], {0: long}, [response])
        logprobs = response_logprobs(model, pack, TEMPERATURE)[0]
        decoder = decoding.Decoder(model, [long], 1, max_tokens=1000)
        decoded = []
        for token in response:
            decoded.append(decoding.next_logprobs(model, decoder.hidden, TEMPERATURE)[0, token])
            decoder.step(token[None])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.stack(decoded), expected, atol=1e-4, rtol=0)


def test_long_prefills_are_split(batch_of, monkeypatch):
    """No pack of a decoder's prompts exceeds max_tokens, and the hidden states stay the same."""
    batch = batch_of("qwen2_5_vl")
    packing.set_attention(batch.model, "packed")
    lengths = []
    run_backbone = decoding.run_backbone

    def record(model, pack, **options):
        lengths.append(pack.model_inputs["input_ids"].shape[1])
        return run_backbone(model, pack, **options)

    monkeypatch.setattr(decoding, "run_backbone", record)
    max_tokens = max(prompt.length for prompt in batch.prompts)
    split = decoding.Decoder(batch.model, batch.prompts, 2, max_tokens)
    assert len(lengths) > 1 and max(lengths) <= max_tokens
    whole = decoding.Decoder(batch.model, batch.prompts, 2, max_tokens=10_000)
    assert lengths[-1] == sum(lengths[:-1])
    torch.testing.assert_close(split.hidden, whole.hidden, atol=1e-4, rtol=1e-4)


def test_a_prompt_of_exactly_the_limit_is_used(folder_of):  # noqa: F811
    model, processor = build("llama")
    path = str(folder_of("llama") / "rows.jsonl")
    load = lambda **flags: rloo.load_prompts(rloo.Args(rewards=(), **flags), path, "train", model, processor)  # noqa: E731
    length = load().encode(0).length
    assert load(max_prompt_length=length).encode(0).length == length
    with pytest.raises(ValueError, match=f"{length} tokens exceed --max-prompt-length"):
        load(max_prompt_length=length - 1).encode(0)


def test_per_token_inputs_of_responses(batch_of):
    """Responses get the value of text, even if the prompt ends in an image; unknown inputs are refused."""
    model = batch_of("qwen2_5_vl").model
    image = model.config.image_token_id
    input_ids = torch.tensor([[5, 6, image, image, 7, 7]])
    types = (input_ids == image).long()
    per_token = {"input_ids": input_ids, "mm_token_type_ids": types, "token_type_ids": types + 3}
    values = packing._next_token_inputs(model, per_token | {"expert_type_ids": types}, length=4)
    assert {name: int(x) for name, x in values.items() if name != "input_ids"} == {
        "mm_token_type_ids": 0, "token_type_ids": 3, "expert_type_ids": 0,
    }  # fmt: skip
    lines = {"line_ids": torch.arange(6)[None]}
    ends_in_image = {name: x[:, :4] for name, x in per_token.items()}
    changes_later = per_token | {"token_type_ids": torch.tensor([[0, 0, 1, 1, 2, 0]])}
    for inputs, name in (
        (per_token | lines, "line"),
        (ends_in_image, "token_type"),
        (changes_later, "token_type"),
    ):
        with pytest.raises(ValueError, match=f"unknown how {name}_ids continues"):
            packing._next_token_inputs(model, inputs, length=4)


def test_special_tokens_in_data_are_text():
    """Alone, nested or split over parts of a message, they end no turn and stand for no image."""
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
        for split in range(1, len(token)):
            parts = [{"type": "text", "text": text} for text in (token[:split], token[split:])]
            assert special_ids(parts) == usual
    for text in ("<think>a</think><answer>b</answer>", "a < b |im_end|>", "< |im_end|>"):  # these stay
        [message] = rloo.build_messages(rloo.Args(), {"prompt": text}, ".", tokenizer)
        assert message["content"] == [{"type": "text", "text": text}]
