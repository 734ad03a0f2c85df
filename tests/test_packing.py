"""Packed log-probs and gradients are those of one forward per response by the unmodified model, in every family."""

import copy
import doctest
import functools
import logging
from dataclasses import replace
from types import SimpleNamespace

import common  # first: it mends torchvision beside a CPU-only torch # isort: skip
import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import common.packing
import rloo
from common.packing import (
    _grouped_attention,
    _make_buckets,
    _varlen_attention,
    build_pack,
    enable_packing,
    encode_vision_inputs,
    flat_to_rows,
    forward_hidden,
    logprobs_from_hidden,
    media_token_ids,
    plan_packs,
    prompt_positions,
    rows_to_flat,
)

V, EOS, IMAGE, VIDEO, VISION_START, VISION_END = 320, 2, 310, 311, 312, 313
TEXT = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "head_dim": 16,
    "pad_token_id": EOS,  # a mask derived from token ids would lose every EOS
    "eos_token_id": EOS,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
VISION = {"depth": 2, "patch_size": 8, "num_heads": 4}
QWEN_VL, TEXT_ONLY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("llama", "qwen2", "qwen3")
FAMILIES = (*QWEN_VL, "llava", *TEXT_ONLY)
TEMPERATURE = 0.7


@functools.cache
def cached_model(family: str):
    torch.manual_seed(FAMILIES.index(family) if family in FAMILIES else 99)
    if family == "qwen2_vl":
        vision = {**VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(text_config={**TEXT, **MROPE}, vision_config=vision, **TOKENS)
        model = transformers.Qwen2VLForConditionalGeneration(config)
    elif family == "qwen2_5_vl":
        vision = {**VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 32}
        vision["fullatt_block_indexes"] = [1]
        config = transformers.Qwen2_5_VLConfig(text_config={**TEXT, **MROPE}, vision_config=vision, **TOKENS)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif family == "qwen3_vl":
        vision = {**VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        config = transformers.Qwen3VLConfig(text_config={**TEXT, **MROPE}, vision_config=vision, **TOKENS)
        model = transformers.Qwen3VLForConditionalGeneration(config)
    elif family == "llava":
        text = transformers.LlamaConfig(**TEXT)
        vision = transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
        model = transformers.LlavaForConditionalGeneration(config)
    elif family == "qwen2 sliding":
        config = transformers.Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=4, max_window_layers=1)
        model = transformers.Qwen2ForCausalLM(config)
    elif family == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT, sliding_window=4))
    else:
        config = {
            "llama": transformers.LlamaConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
        }
        model = transformers.AutoModelForCausalLM.from_config(config[family](**TEXT))
    for parameter in model.parameters():  # attention that matters: with the usual 0.02 a wrong layout changes little
        noise = torch.randn_like(parameter) * 0.15
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model.float().eval()


def make_model(family: str):
    return copy.deepcopy(cached_model(family))


def make_picture(family: str, seed: int, grid=(1, 4, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """-> pixels and grid as a processor returns them for one picture or clip."""
    generator = torch.Generator().manual_seed(seed)
    if family == "llava":
        return torch.randn(1, 3, 16, 16, generator=generator), torch.tensor([[1, 2, 2]])
    rows = grid[0] * grid[1] * grid[2]
    return torch.randn(rows, 3 * 2 * 8 * 8, generator=generator), torch.tensor([grid])


def make_prompt(family: str, model, length: int, pictures=(), clips=()) -> dict:
    """A prompt as the scripts make it, and under "inputs" what the processor gave: the unmodified model reads that."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 300, (length,), generator=generator).tolist()
    ids[length // 2] = EOS  # also as an ordinary token
    merge = 1 if family == "llava" else 4
    for _, grid in pictures:
        ids += [VISION_START] + [IMAGE] * (int(grid.prod()) // merge) + [VISION_END, 5, 6]
    for _, grid in clips:
        frames, tokens = int(grid[0, 0]), int(grid.prod()) // merge
        if family == "qwen3_vl":  # one run of placeholders per frame, each after its timestamp
            for frame in range(frames):
                ids += [20 + frame, VISION_START] + [VIDEO] * (tokens // frames) + [VISION_END]
        else:
            ids += [VISION_START] + [VIDEO] * tokens + [VISION_END]
        ids += [7]
    prompt_ids = torch.tensor([*ids, 8, 9])
    inputs = {}
    if family in QWEN_VL:
        inputs["mm_token_type_ids"] = ((prompt_ids == IMAGE) + 2 * (prompt_ids == VIDEO))[None]
    if pictures:
        inputs["pixel_values"] = torch.cat([pixels for pixels, _ in pictures])
        if family in QWEN_VL:
            inputs["image_grid_thw"] = torch.cat([grid for _, grid in pictures])
    if clips:
        inputs["pixel_values_videos"] = torch.cat([pixels for pixels, _ in clips])
        inputs["video_grid_thw"] = torch.cat([grid for _, grid in clips])
        if family == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = [0.5] * len(clips)
    prompt = {"prompt_ids": prompt_ids, "position_ids": prompt_positions(model, prompt_ids, inputs), "inputs": inputs}
    if family in QWEN_VL:
        prompt["mm_token_type_ids"] = inputs["mm_token_type_ids"][0]
    return {**prompt, **encode_vision_inputs(inputs)}


def make_response(seed: int, length: int) -> torch.Tensor:
    response = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(100 + seed))
    if length > 2:
        response[length // 2] = EOS
    if seed % 3:
        response[-1] = EOS  # the others are truncated
    return response


def make_batch(family: str, model):
    """Groups of 1 to 8: several pictures, none, one, the same one again, clips; ragged and equal response lengths."""
    picture = functools.partial(make_picture, family)
    prompts = [make_prompt(family, model, 6), make_prompt(family, model, 4)]
    if family not in TEXT_ONLY:
        grid = (1, 4, 8) if family in QWEN_VL else (1, 4, 4)
        prompts.append(make_prompt(family, model, 3, [picture(0), picture(1, grid)]))
        prompts.append(make_prompt(family, model, 5, [picture(0)]))
    if family in QWEN_VL:
        clip = make_picture(family, 7, (2, 4, 4))
        prompts.append(make_prompt(family, model, 7, clips=[clip]))
        prompts.append(make_prompt(family, model, 3, [picture(2)], [make_picture(family, 8, (10, 4, 4)), clip]))
    lengths = [[5, 1, 2, 9, 3, 3, 1, 4], [4], [3, 3, 3], [1, 6], [2, 5, 1], [7]][: len(prompts)]
    groups, flat = [], []
    for g, group in enumerate(lengths):
        groups.append((g, list(range(len(flat), len(flat) + len(group)))))
        flat += group
    responses = [make_response(b, R) for b, R in enumerate(flat)]
    return groups, prompts, responses


def lengths_of(tensors) -> list[int]:
    return [len(tensor) for tensor in tensors]


def weights_of(responses) -> list[torch.Tensor]:
    """The loss is a weighted sum of log-probs: every token pulls in its own direction."""
    return [torch.randn(len(r), generator=torch.Generator().manual_seed(b)) for b, r in enumerate(responses)]


def gradients(model) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def one_by_one(model, groups, prompts, responses):
    """The unmodified model, one row per response, everything as its processor gives it. -> log-probs, gradients."""
    model.zero_grad()
    weights, logprobs = weights_of(responses), [None] * len(responses)
    for g, members in groups:
        for b in members:
            prompt_ids, response, inputs = prompts[g]["prompt_ids"], responses[b], dict(prompts[g]["inputs"])
            input_ids = torch.cat([prompt_ids, response])[None]
            if "mm_token_type_ids" in inputs:
                inputs["mm_token_type_ids"] = F.pad(inputs["mm_token_type_ids"], (0, len(response)))
            if "second_per_grid_ts" in inputs:
                inputs["second_per_grid_ts"] = torch.tensor(inputs["second_per_grid_ts"])
            logits = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **inputs).logits[0]
            logp = (logits[len(prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1).gather(1, response[:, None])[:, 0]
            (logp * weights[b]).sum().backward()
            logprobs[b] = logp.detach()
    return logprobs, gradients(model)


def packed(model, packs, responses):
    """The same from packs (shared or not)."""
    model.zero_grad()
    table = torch.nn.utils.rnn.pad_sequence(weights_of(responses), True)
    logprobs = torch.full_like(table, float("nan"))
    for pack in packs:
        hidden = forward_hidden(model, pack)
        logp, _ = logprobs_from_hidden(hidden, model.lm_head.weight, pack.targets, TEMPERATURE, chunk_tokens=7)
        (logp * rows_to_flat(table, pack)).sum().backward()
        logprobs = flat_to_rows(logp.detach(), pack, logprobs)
    return [logprobs[b, : len(r)] for b, r in enumerate(responses)], gradients(model)


def logprob_difference(a, b) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def assert_same(result, expected):
    assert logprob_difference(result[0], expected[0]) < 1e-4
    total = sum(g.norm() ** 2 for g in expected[1].values() if g is not None) ** 0.5
    assert total > 1
    for name, gradient in expected[1].items():
        other = result[1][name]
        if gradient is None:
            assert other is None or not other.any(), name
        else:  # the floor is for gradients that are zero but for rounding (the bias of keys, say)
            assert (other - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * total, name


def make_packs(groups, prompts, responses, max_tokens=4096, shared=True):
    plan = plan_packs(groups, lengths_of(p["prompt_ids"] for p in prompts), lengths_of(responses), max_tokens)[0]
    return [build_pack(pieces, prompts, responses, shared=shared) for pieces in plan]


# --- packed = one by one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family):
    model = make_model(family)
    batch = make_batch(family, model)
    expected = one_by_one(make_model(family), *batch)
    assert enable_packing(model)

    packs = make_packs(*batch)
    assert len(packs) == 1  # prompts with and without pictures and clips in one row
    assert_same(packed(model, packs, batch[2]), expected)

    longest = max(len(p["prompt_ids"]) for p in batch[1])
    packs = make_packs(*batch, max_tokens=max(longest + 9, 24))
    rows = [b for pack in packs for b, _ in pack.rows]
    assert len(packs) > 1 and sorted(rows) == list(range(len(batch[2])))
    if family in TEXT_ONLY:  # the group of 8 (36 tokens) is over the budget: split, its prompt twice
        assert sum(len(pack.layout.groups) for pack in packs) > len(batch[0])
    assert_same(packed(model, packs, batch[2]), expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_last_hidden_states_equal_one_by_one(family, shared):
    """What a score head reads: the hidden state of each response's last token."""
    model = make_model(family)
    groups, prompts, responses = make_batch(family, model)
    expected = {}
    model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state[0, -1]))
    for g, members in groups:
        for b in members:
            seen = []
            one_by_one(model, [(g, [b])], prompts, responses)
            expected[b] = seen[0].detach()
    model = make_model(family)
    enable_packing(model)
    for pack in make_packs(groups, prompts, responses, max_tokens=80, shared=shared):
        hidden = forward_hidden(model, pack, last=True)
        assert hidden.shape == (len(pack.rows), 64)
        torch.testing.assert_close(hidden, torch.stack([expected[b] for b, _ in pack.rows]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", QWEN_VL)
def test_two_dimensional_positions_would_be_seen(family):
    """The comparison can fail: plain positions, the silent defect of M-RoPE training, are far outside the tolerance."""
    model = make_model(family)
    groups, prompts, responses = make_batch(family, model)
    expected, _ = one_by_one(make_model(family), groups, prompts, responses)
    enable_packing(model)
    flat = [{**p, "position_ids": torch.arange(len(p["prompt_ids"])).expand(3, -1)} for p in prompts]
    result, _ = packed(model, make_packs(groups, flat, responses), responses)
    assert logprob_difference(result[:9], expected[:9]) < 1e-4  # prompts of text alone
    assert logprob_difference(result[9:], expected[9:]) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_beside_shared_prompts_draws_what_a_cache_of_its_own_per_row_draws(family):
    """Ragged prompts, rows that leave the batch at different steps; the same tokens with the same log-probs."""
    model = make_model(family).eval()
    _, prompts, _ = make_batch(family, model)
    args, draws = SimpleNamespace(max_response_length=12, top_p=1.0), []
    ends = list(range(0, V, 6))  # some rows end at once, some later, some never
    for packed_too in (False, True):
        assert not packed_too or enable_packing(model)
        generator = torch.Generator().manual_seed(0)
        draws.append(rloo.generate(model, prompts, 5, args, ends, 0.9, generator))
    (ids, logprobs, cut), (own_ids, own_logprobs, own_cut) = draws
    assert [x.tolist() for x in ids] == [x.tolist() for x in own_ids] and cut == own_cut
    assert len({len(x) for x in ids}) > 3
    assert logprob_difference(logprobs, own_logprobs) < 1e-4


def test_leaking_responses_would_be_seen():
    """The comparison can fail: responses of a group that see each other."""
    model = make_model("llama")
    batch = make_batch("llama", model)
    expected, _ = one_by_one(make_model("llama"), *batch)
    enable_packing(model)
    packs = make_packs(*batch)
    merged = [(P, [sum(lengths)]) for P, lengths in packs[0].layout.groups]
    packs[0].layout = replace(packs[0].layout, **_make_buckets(merged))
    result, _ = packed(model, packs, batch[2])
    assert logprob_difference(result, expected) > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_vl"])
def test_gradient_checkpointing(family):
    model = make_model(family)
    batch = make_batch(family, model)
    expected = one_by_one(make_model(family), *batch)
    enable_packing(model)
    model.train()
    model.gradient_checkpointing_enable()
    calls = []
    for name, module in model.named_modules():
        if name.endswith("layers.0.self_attn"):
            module.register_forward_hook(lambda *args: calls.append(1))
    assert_same(packed(model, make_packs(*batch), batch[2]), expected)
    assert len(calls) == 2  # forward and once more in backward


def test_prompt_without_responses():
    """Another rank's share may be empty: the pack of a bare prompt still runs forward and backward."""
    for family in ("llama", "qwen2_5_vl"):
        model = make_model(family)
        enable_packing(model)
        prompt = make_batch(family, model)[1][-1]
        for shared in (True, False):
            pack = build_pack([(0, [])], [prompt], [], shared=shared)
            hidden = forward_hidden(model, pack)
            logp, _ = logprobs_from_hidden(hidden, model.lm_head.weight, pack.targets)
            assert hidden.shape == (0, 64) and logp.shape == (0,)
            logp.sum().backward()
            assert not model.lm_head.weight.grad.any()


# --- the vision tower ----------------------------------------------------------------------------------------------


def count_pixels(model) -> list[tuple[int, int]]:
    """-> a list that collects (rows given to the vision tower, different rows among them), one entry per call."""
    seen = []
    base = model.base_model
    tower = base.visual if hasattr(base, "visual") else base.vision_tower

    def hook(module, args, kwargs):
        pixels = (args[0] if args else kwargs.get("hidden_states", kwargs.get("pixel_values"))).flatten(1)
        seen.append((len(pixels), len(pixels.unique(dim=0))))

    tower.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


@pytest.mark.parametrize("family", [*QWEN_VL, "llava"])
def test_each_picture_is_seen_once(family):
    model = make_model(family)
    pictures = [make_picture(family, seed) for seed in range(3)]
    clips = [make_picture(family, 9, (2, 4, 4))] if family in QWEN_VL else []
    rows = len(pictures[0][0])  # per picture: patches (Qwen-VL) or the picture itself (LLaVA)
    prompts = [
        make_prompt(family, model, 4, [pictures[0], pictures[1]], clips),
        make_prompt(family, model, 9, [pictures[1]], clips),  # another prompt, the same picture
        make_prompt(family, model, 5, [pictures[2], pictures[2], pictures[0]]),
        make_prompt(family, model, 6),
    ]
    responses = [make_response(b, 3) for b in range(8)]
    groups = [(g, [2 * g, 2 * g + 1]) for g in range(4)]
    expected, _ = one_by_one(make_model(family), groups, prompts, responses)

    enable_packing(model)
    seen = count_pixels(model)
    [pack] = make_packs(groups, prompts, responses)
    result, _ = packed(model, [pack], responses)
    assert seen == [(3 * rows, 3 * rows)] + [(2 * rows, 2 * rows)] * len(clips)
    assert logprob_difference(result, expected) < 1e-4

    seen.clear()
    packed(model, make_packs(groups, prompts, responses, shared=False), responses)  # the fallback repeats them
    assert seen == [(12 * rows, 3 * rows)] + [(8 * rows, 2 * rows)] * len(clips)

    seen.clear()
    packed(model, [build_pack([(3, [6, 7])], prompts, responses)], responses)
    assert seen == []  # no picture, no call


# --- the fallback --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*QWEN_VL, "llava", "llama"])
def test_unshared_rows_equal_one_by_one(family):
    model = make_model(family)
    batch = make_batch(family, model)
    expected = one_by_one(make_model(family), *batch)
    packs = make_packs(*batch, shared=False)
    assert_same(packed(model, packs, batch[2]), expected)  # the model as loaded
    enable_packing(model)
    assert_same(packed(model, packs, batch[2]), expected)  # rows with their mask, through the packed attention


@pytest.mark.parametrize("family", ["qwen2 sliding", "mistral"])
def test_sliding_windows_fall_back(family, caplog):
    model = make_model(family)
    batch = make_batch("llama", model)
    expected = one_by_one(make_model(family), *batch)
    with caplog.at_level(logging.WARNING):
        assert enable_packing(model) is False
    assert [record.name for record in caplog.records] == ["common.packing"]
    assert "prefix sharing is not verified" in caplog.text
    assert_same(packed(model, make_packs(*batch, shared=False), batch[2]), expected)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_claimed_families_do_not_warn(family, caplog):
    model = make_model(family)
    with caplog.at_level(logging.WARNING):
        assert enable_packing(model) is True
    assert not caplog.records
    assert model.config.get_text_config()._attn_implementation == "packed"
    if family not in TEXT_ONLY:
        assert model.config.vision_config._attn_implementation != "packed"


# --- log-probs -----------------------------------------------------------------------------------------------------


def dense_logprobs(hidden, weight, targets, temperature, suppressed_ids):
    logits = (hidden @ weight.T).float() / temperature
    if suppressed_ids:
        logits = logits.index_fill(1, torch.tensor(suppressed_ids), float("-inf"))
    logp = logits.log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return logp.gather(1, targets[:, None])[:, 0], entropy


@pytest.fixture
def head_case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, generator=generator).requires_grad_()
    weight = (torch.randn(50, 16, generator=generator) * 0.5).requires_grad_()
    return hidden, weight, torch.randint(0, 45, (11,), generator=generator), torch.randn(2, 11, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("suppressed_ids", [None, [45, 46, 49]])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 256])
def test_logprobs_equal_dense(head_case, temperature, suppressed_ids, chunk_tokens):
    hidden, weight, targets, (a, b) = head_case
    logp, entropy = logprobs_from_hidden(hidden, weight, targets, temperature, suppressed_ids, True, chunk_tokens)
    grads = torch.autograd.grad((a * logp + b * entropy).sum(), (hidden, weight))
    if suppressed_ids:  # the dense entropy is nan there: leave the ids out instead
        kept = torch.tensor([i for i in range(50) if i not in suppressed_ids])
        dense = dense_logprobs(hidden, weight[kept], targets, temperature, None)
    else:
        dense = dense_logprobs(hidden, weight, targets, temperature, None)
    torch.testing.assert_close((logp, entropy), dense)
    expected = torch.autograd.grad((a * dense[0] + b * dense[1]).sum(), (hidden, weight))
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_logprobs_without_entropy_and_of_frozen_head(head_case):
    hidden, weight, targets, (a, _) = head_case
    logp, entropy = logprobs_from_hidden(hidden, weight.detach(), targets, 0.7, chunk_tokens=4)
    dense, _ = dense_logprobs(hidden, weight.detach(), targets, 0.7, None)
    assert entropy is None
    torch.testing.assert_close(
        torch.autograd.grad((a * logp).sum(), hidden), torch.autograd.grad((a * dense).sum(), hidden)
    )
    # entropy asked for as a metric only: it takes part in no loss
    logp, entropy = logprobs_from_hidden(hidden.detach(), weight, targets, 0.7, None, True, 4)
    torch.testing.assert_close(
        torch.autograd.grad((a * logp).sum(), weight),
        torch.autograd.grad((a * dense_logprobs(hidden.detach(), weight, targets, 0.7, None)[0]).sum(), weight),
    )


def test_logprobs_of_nothing(head_case):
    hidden, weight, targets, _ = head_case
    logp, entropy = logprobs_from_hidden(hidden[:0], weight, targets[:0], with_entropy=True)
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert not weight.grad.any() and not hidden.grad.any()


def test_logprobs_in_bf16(head_case):
    hidden, weight, targets, (a, b) = head_case
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    full = [x.detach().float().requires_grad_() for x in half]
    results = []
    for inputs in (half, full):
        logp, entropy = logprobs_from_hidden(*inputs, targets, 0.7, None, True, 4)
        assert logp.dtype == entropy.dtype == torch.float32
        results.append((logp, entropy, *torch.autograd.grad((a * logp + b * entropy).sum(), inputs)))
    for x, y in zip(*results, strict=True):
        assert (x.float() - y).norm() < 0.02 * y.norm()


def test_media_token_ids():
    assert media_token_ids(make_model("qwen2_5_vl").config) == [IMAGE, VIDEO, VISION_START, VISION_END]
    assert media_token_ids(make_model("llama").config) == []


# --- the CUDA path -------------------------------------------------------------------------------------------------


def slow_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """What torch documents of varlen_attn, one segment at a time, in plain matrix products."""
    assert window_size == (-1, 0), "causal, aligned at the bottom right"
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key)
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert enable_gqa or query.shape[1] == key.shape[1]
    repeat = query.shape[1] // key.shape[1]
    outputs = []
    for s in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[s] : cu_seq_q[s + 1]]
        k, v = (x[cu_seq_k[s] : cu_seq_k[s + 1]].repeat_interleave(repeat, dim=1) for x in (key, value))
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)


def text_pack(groups: list[tuple[int, list[int]]]):
    """A pack of random tokens: groups as (P, [R, ...])."""
    prompts, responses, plan = [], [], []
    for g, (P, lengths) in enumerate(groups):
        prompts.append({"prompt_ids": torch.arange(P), "position_ids": torch.arange(P), "images": [], "videos": []})
        plan.append((g, list(range(len(responses), len(responses) + len(lengths)))))
        responses += [torch.randint(0, V, (R,)) for R in lengths]
    return build_pack(plan, prompts, responses)


GROUPS = [(5, [3, 1, 4]), (1, [2]), (9, []), (2, [1, 1, 1, 1]), (3, [6, 6])]


def attention_inputs(num_tokens: int, kv_heads: int, **kwargs) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, num_tokens, 16) for heads in (4, kv_heads, kv_heads, 4)]
    query, key, value, grad = (torch.randn(shape, generator=generator).to(**kwargs) for shape in shapes)
    return [x.requires_grad_() for x in (query, key, value)] + [grad.transpose(1, 2)]


@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_varlen_indices(monkeypatch, kv_heads, scaling):
    """_varlen_attention on a slow stand-in for the kernel: what is checked is the arithmetic of its indices."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", slow_varlen_attn)
    pack = text_pack(GROUPS)
    *qkv, grad = attention_inputs(pack.num_tokens, kv_heads)
    results = []
    for attention in (_varlen_attention, _grouped_attention):
        out = attention(*qkv, scaling, pack.layout)
        results.append((out, *torch.autograd.grad((out * grad).sum(), qkv)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_varlen_on_cuda():
    pack = text_pack([(P * 20, [R * 15 for R in lengths]) for P, lengths in GROUPS]).to("cuda")
    results = []
    for attention, dtype in ((_varlen_attention, torch.bfloat16), (_grouped_attention, torch.float32)):
        *qkv, grad = attention_inputs(pack.num_tokens, 2, device="cuda", dtype=dtype)
        out = attention(*qkv, None, pack.layout)
        results.append((out, *torch.autograd.grad((out * grad).sum(), qkv)))
    for half, full in zip(*results, strict=True):
        assert (half.float() - full).norm() < 0.02 * full.norm()


# --- planning ------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw):
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=9)), min_size=1, max_size=12)
    )
    order = draw(st.permutations(range(sum(len(lengths) for _, lengths in shapes))))  # responses lie anywhere
    prompt_lengths, response_lengths, groups, taken = [], [0] * len(order), [], 0
    for g, (P, lengths) in enumerate(shapes):
        members = list(order[taken : taken + len(lengths)])
        taken += len(lengths)
        for b, R in zip(members, lengths, strict=True):
            response_lengths[b] = R
        prompt_lengths.append(P)
        groups.append((g, members))
    least = max(P + max(lengths, default=0) for P, lengths in shapes)
    return groups, prompt_lengths, response_lengths, least + draw(st.integers(0, 100)), draw(st.integers(1, 4))


@given(plans())
@settings(max_examples=200, deadline=None)
def test_plan_covers_everything_within_the_budget(case):
    groups, prompt_lengths, response_lengths, max_tokens, world_size = case
    before = copy.deepcopy(case)
    plan = plan_packs(*case)
    assert case == before and plan == plan_packs(*case)  # no side effects, deterministic
    assert len(plan) == world_size and len({len(packs) for packs in plan}) == 1
    member_of = {b: g for g, members in groups for b in members}
    seen, pieces_of = [], {g: 0 for g, _ in groups}
    loads = []
    for packs in plan:
        loads.append(0)
        for pack in packs:
            tokens = sum(prompt_lengths[g] + sum(response_lengths[b] for b in members) for g, members in pack)
            assert tokens <= max_tokens
            loads[-1] += tokens
            for g, members in pack:
                assert all(member_of[b] == g for b in members)
                seen += members
                pieces_of[g] += 1
    assert sorted(seen) == list(range(len(response_lengths)))
    for g, members in groups:  # split only where it must be
        if prompt_lengths[g] + sum(response_lengths[b] for b in members) <= max_tokens:
            assert pieces_of[g] == 1


@given(plans())
@settings(max_examples=200, deadline=None)
def test_plan_is_balanced(case):
    """With attention for free, cost is tokens. Packs are dealt out by load: ranks differ by one pack at most.
    With room for everything it is list scheduling: no rank exceeds the mean by more than the largest group."""
    groups, prompt_lengths, response_lengths, max_tokens, world_size = case
    size = {g: prompt_lengths[g] + sum(response_lengths[b] for b in members) for g, members in groups}
    tight = plan_packs(*case, hidden_size=10**12)
    loads = [
        sum(prompt_lengths[g] + sum(response_lengths[b] for b in members) for pack in packs for g, members in pack)
        for packs in tight
    ]
    assert max(loads) - min(loads) <= max_tokens
    roomy = plan_packs(groups, prompt_lengths, response_lengths, sum(size.values()), world_size, hidden_size=10**12)
    loads = [sum(size[g] for pack in packs for g, _ in pack) for packs in roomy]
    assert max(loads) <= sum(loads) / world_size + max(size.values())


def test_plan_weighs_attention():
    """By tokens, a group of 610 takes a fourth of the others along; by cost it is worth all four of them."""
    groups, prompts = [(g, [g]) for g in range(5)], [600, 250, 250, 250, 250]
    for hidden_size, expected in ((10**12, [2, 3]), (64, [1, 4])):
        plan = plan_packs(groups, prompts, [10] * 5, 4096, 2, hidden_size)
        assert sorted(len(packs[0]) for packs in plan) == expected


def test_plan_refuses_what_cannot_fit():
    with pytest.raises(
        ValueError, match="prompt of 30 tokens with response of 11 tokens is over the pack budget of 40"
    ):
        plan_packs([(0, [0, 1])], [30], [10, 11], 40)
    plan_packs([(0, [0, 1])], [30], [10, 10], 40)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_round_trip_without_padding(case):
    groups, prompt_lengths, response_lengths, _, _ = case
    prompts = [
        {"prompt_ids": torch.full((P,), EOS), "position_ids": torch.arange(P), "images": [], "videos": []}
        for P in prompt_lengths
    ]
    responses = [torch.randint(0, V, (R,)) for R in response_lengths]
    B, R = len(responses), max(response_lengths, default=1)
    mask = torch.arange(R) < torch.tensor(response_lengths, dtype=torch.long)[:, None]  # (B, R)
    table, filled = torch.randn(B, R), torch.zeros(B, R)
    for packs in plan_packs(*case):
        for pieces in packs:
            if not pieces:
                continue
            pack = build_pack(pieces, prompts, responses)
            lengths = [prompt_lengths[g] + sum(response_lengths[b] for b in members) for g, members in pieces]
            assert pack.num_tokens == sum(lengths)  # no padding
            assert pack.position_ids.shape == pack.input_ids.shape
            assert torch.equal(pack.targets, torch.cat([torch.empty(0).long(), *(responses[b] for b, _ in pack.rows)]))
            flat = rows_to_flat(table, pack)
            assert flat.shape == pack.targets.shape == pack.predict_from.shape
            before = filled.clone()
            filled, old = flat_to_rows(flat, pack, filled), filled
            assert torch.equal(old, before)  # a copy
    assert torch.equal(filled, table * mask)


def test_doctests():
    result = doctest.testmod(common.packing)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("kept", [0, 100, 2**26])
def test_probabilities_kept_or_recomputed_give_the_same_gradients(kept, monkeypatch):
    monkeypatch.setattr("common.packing.KEPT_PROBABILITIES", kept)
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    targets = torch.randint(0, 20, (11,))
    logprobs, entropy = logprobs_from_hidden(hidden, weight, targets, 0.7, None, True, chunk_tokens=4)
    logp = (hidden @ weight.T / 0.7).log_softmax(-1)
    dense = (logp.gather(1, targets[:, None])[:, 0].square() - (logp.exp() * logp).sum(-1).pow(3)).sum()
    for a, b in zip(
        *(torch.autograd.grad(loss, (hidden, weight)) for loss in ((logprobs**2 + entropy**3).sum(), dense))
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
