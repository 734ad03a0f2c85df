"""Packed log-probs and gradients are those of one response at a time by the unmodified model, and packing
that would be wrong is found out. What each family does through whichever path is in test_families.py."""

import copy
import doctest
import math
from types import SimpleNamespace

import common  # noqa: F401  before transformers # isort: skip
import pytest
import torch
import torch.nn.attention.varlen
import transformers
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import QWEN_VL, SEVEN, TEMPERATURE, build, folder_of, one_by_one, two_steps  # noqa: F401

import rloo
from common import packing
from common.packing import build_pack, logprobs_from_hidden, packs_of_rank, plan_packs, response_logprobs

EOS, IMAGE, VIDEO = 500, packing.MEDIA["image"], packing.MEDIA["video"]


@pytest.fixture
def batch_of(folder_of):  # noqa: F811
    """Family -> a model of its own, its dataset's prompts, groups of 1 to 8 responses, ragged, some cut.
    EOS, which is the pad token too, also stands amid them."""

    def make(family: str) -> SimpleNamespace:
        model, processor = build(family)
        args, folder = rloo.Args(rewards=()), folder_of(family)
        data = rloo.load_data(args, str(folder / "rows.jsonl"), "train", model, processor)
        prompts, groups, responses = data.encode(range(len(data.rows))), [], []
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
        chat = packing.encode_chat(batch.processor, batch.prompts[g]["messages"], add_generation_prompt=True)
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
    for pack in packs_of_rank(*given, packed=is_packed):
        logp, _ = response_logprobs(batch.model, pack, TEMPERATURE)
        own = {b: logp[pack.owner == s] for s, b in enumerate(pack.rows.tolist())}
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


@pytest.mark.parametrize("family", [*SEVEN, "granite", "gpt2"])
def test_packed_equals_one_by_one(family, batch_of):
    batch = batch_of(family)
    expected = unpacked(batch)
    *plain, packs = packed(batch, is_packed=False)
    assert len(packs) == len(batch.responses)
    assert_same(plain, expected)
    packing.switch_attention(batch.model, "packed")
    *whole, packs = packed(batch)
    assert len(packs) == 1  # text, pictures, one of them twice, and a clip in one row
    assert_same(whole, expected)
    *split, packs = packed(batch, max(p["length"] for p in batch.prompts) + 10)
    seen = sorted(b for pack in packs for b in pack.rows.tolist())
    assert len(packs) > 2 and seen == [*range(len(batch.responses))]
    assert_same(split, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_gradient_checkpointing(family, batch_of):
    batch, calls = batch_of(family), []
    expected = unpacked(batch)
    packing.switch_attention(batch.model, "packed")
    batch.model.train()
    batch.model.gradient_checkpointing_enable()
    for name, module in batch.model.named_modules():
        if name.endswith("layers.0.self_attn"):
            module.register_forward_hook(lambda *args: calls.append(1))
    assert_same(packed(batch)[:2], expected)
    assert len(calls) == 2  # forward, and once more in backward


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_last_hidden_states(family, batch_of):
    """What a score head reads: of each response's last token, from packs and on the plain path alike."""
    batch, found = batch_of(family), []
    for is_packed in (False, True):
        packing.switch_attention(batch.model, "packed" if is_packed else "sdpa")
        given = batch.groups, batch.prompts, batch.encode, batch.responses, 80
        table = torch.zeros(len(batch.responses), 64)
        for pack in packs_of_rank(*given, packed=is_packed):
            table[pack.rows] = packing.forward_hidden(batch.model, pack, last=True).detach()
        found.append(table)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    own = one_hidden(batch, 3)
    torch.testing.assert_close(found[0][3], own, atol=1e-4, rtol=1e-4)


def one_hidden(batch, b: int):
    """Of response b to prompt 0."""
    chat = packing.encode_chat(batch.processor, batch.prompts[0]["messages"], add_generation_prompt=True)
    ids = torch.cat([chat["input_ids"], batch.responses[b][None]], 1)
    return build(batch.model.config.model_type)[0].base_model(input_ids=ids).last_hidden_state[0, -1].detach()


@pytest.mark.parametrize("family", [*QWEN_VL, "llava"])
def test_each_picture_is_seen_once(family, batch_of):
    batch, seen = batch_of(family), []
    tower = getattr(batch.model.base_model, "visual", None) or batch.model.base_model.vision_tower
    first = lambda args, kwargs: next(filter(torch.is_tensor, [*args, *kwargs.values()]))  # noqa: E731
    tower.register_forward_pre_hook(lambda _, *given: seen.append(len(first(*given))), with_kwargs=True)
    packing.switch_attention(batch.model, "packed")
    packed(batch)
    clips = [p["video"][0]["pixel_values_videos"] for p in batch.prompts if p["video"]]
    assert len(clips) == (family in QWEN_VL)
    pictures = {item["key"]: item["pixel_values"] for p in batch.prompts for item in p["image"]}
    assert len(pictures) == 3 < sum(len(p["image"]) for p in batch.prompts)
    assert seen == [sum(map(len, pictures.values())), *map(len, clips)]
    seen.clear()
    batch.groups = batch.groups[:2]
    batch.responses = batch.responses[:9]
    packed(batch)
    assert seen == []  # no picture, no call


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_prompt_without_responses_takes_part_in_forward_and_backward(family, batch_of):
    batch = batch_of(family)
    for is_packed in (False, True):
        packing.switch_attention(batch.model, "packed" if is_packed else "sdpa")
        make = build_pack if is_packed else packing.plain_pack
        logp, entropy = response_logprobs(batch.model, make([(0, [])], batch.prompts, []), with_entropy=True)
        assert logp.shape == entropy.shape == (0,)
        logp.sum().backward()
        assert not any(g.any() for g in gradients(batch.model).values() if g is not None)


def test_rollouts_do_not_depend_on_the_batch(batch_of):
    batch = batch_of("qwen2_5_vl")
    prompts = [prompt | {"seed": i} for i, prompt in enumerate(batch.prompts)]
    args, ends = rloo.Args(max_response_length=8), [*range(4, 500, 8)]
    packing.switch_attention(batch.model, "packed")
    ids, logprobs, cut = rloo.generate(args, batch.model, prompts, 4, 1.0, ends)
    alone = [rloo.generate(args, batch.model, [prompt], 4, 1.0, ends) for prompt in prompts[::-1]][::-1]
    assert [x.tolist() for x in ids] == [x.tolist() for own, _, _ in alone for x in own]
    assert difference(logprobs, [x for _, own, _ in alone for x in own]) < 1e-4
    assert cut == [x for _, _, own in alone for x in own] and len({tuple(x.tolist()) for x in ids[:4]}) > 1


# ---- packing that proves itself ----


def proof(batch, which=slice(None)) -> str:
    forward = lambda pack: response_logprobs(batch.model, pack, TEMPERATURE)[0]  # noqa: E731
    return packing.prove_packing(batch.model, forward, batch.prompts[which], TEMPERATURE)


def see_each_other(monkeypatch) -> None:
    """Responses of a group as one: later ones see those before."""
    real = packing._make_buckets

    def merge(groups):
        return real([[group[0], torch.cat(group[1:])] if group[1:] else group for group in groups])

    monkeypatch.setattr(packing, "_make_buckets", merge)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_responses_that_see_each_other_are_found_out(family, batch_of, monkeypatch):
    batch = batch_of(family)
    expected = unpacked(batch)
    with monkeypatch.context() as patch:
        see_each_other(patch)
        line = proof(batch)
        assert line.startswith("warning: no packing") and "nats from those of the unmodified model" in line
        assert not packing.is_packed(batch.model)
        assert_same(packed(batch, is_packed=False)[:2], expected)
        packing.switch_attention(batch.model, "packed")
        assert difference(packed(batch)[0], expected[0]) > 1e-2
    assert proof(batch).startswith("packed = unmodified model within")
    assert packing.is_packed(batch.model)


@pytest.mark.parametrize("family", QWEN_VL)
def test_two_dimensional_positions_are_found_out(family, batch_of, monkeypatch):
    """The silent defect of M-RoPE training. Prompts of text alone can't show it."""
    batch = batch_of(family)
    for prompt in batch.prompts:
        prompt["position_ids"] = torch.arange(prompt["length"]).expand(3, -1)
    assert proof(batch, slice(2)).startswith("packed = ")
    packing.switch_attention(batch.model, "sdpa")
    assert proof(batch).startswith("warning: no packing") and not packing.is_packed(batch.model)


def test_a_broken_decoder_is_found_out(batch_of, monkeypatch):
    batch, real = batch_of("llama"), packing.Decoder.step
    for broken in (lambda self, x: real(self, x * 0), lambda self, x: self.hidden.fill_(math.nan)):
        with monkeypatch.context() as patch:
            patch.setattr(packing.Decoder, "step", broken)
            assert proof(batch).startswith("warning: no packing") and not packing.is_packed(batch.model)
    assert proof(batch).startswith("packed = ")


@pytest.mark.slow
def test_the_proof_in_bf16(vqa, monkeypatch):
    """Rounding is allowed for, wrong positions and responses that see each other are not."""
    model = rloo.load_model(TINY, torch.bfloat16).eval()
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    prompts = rloo.load_data(rloo.Args(), vqa, "train", model, processor).encode(range(12))
    flat = [p | {"position_ids": torch.arange(p["length"]).expand(3, -1)} for p in prompts]
    batch, wrong = SimpleNamespace(model=model, prompts=prompts), SimpleNamespace(model=model, prompts=flat)
    assert proof(batch).startswith("packed = ")
    packing.switch_attention(model, "sdpa")
    assert proof(wrong).startswith("warning: no packing")
    see_each_other(monkeypatch)
    assert proof(batch).startswith("warning: no packing")


@pytest.mark.slow
def test_a_run_that_can_not_pack_says_so_and_is_exact(folder_of, tmp_path, monkeypatch, capsys):  # noqa: F811
    see_each_other(monkeypatch)
    steps = two_steps(folder_of("qwen2_vl"), tmp_path)
    words = "warning: no packing, one response at a time, exact but slow: ValueError, log-probs"
    assert words in capsys.readouterr().out
    for step in steps:
        assert step["rollout/engine_logprob_diff_max"] < 1e-4 > abs(step["policy/ratio"] - 1)


# ---- log-probs of the head ----


def head(dtype=torch.float32) -> tuple:
    """-> hidden (11, 16), weight (50, 16), targets (11,), weights of log-probs and entropies in a loss."""
    seeded = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=seeded).to(dtype).requires_grad_() for n in (11, 50))
    targets = torch.randint(0, 45, (11,), generator=seeded)
    return hidden, weight, targets, *torch.randn(2, 11, generator=seeded)


def reference(hidden, weight, targets, a, b, temperature, suppressed=()) -> list:
    """Log-probs, entropies and both gradients in float64, over the tokens that are left."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    kept = torch.tensor([i for i in range(50) if i not in suppressed])
    logp = (hidden @ weight[kept].T / temperature).log_softmax(-1)
    logprobs = logp[torch.arange(11), [kept.tolist().index(t) for t in targets]]
    entropy = -(logp.exp() * logp).sum(-1)
    return [logprobs, entropy, *torch.autograd.grad((a * logprobs + b * entropy).sum(), (hidden, weight))]


@pytest.mark.parametrize("kept", [0, 100, 2**26])  # log-probs recomputed in backward, some of them, none
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("suppressed", [(), (45, 46, 49)])
@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_head(chunk, suppressed, temperature, kept, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK", chunk)
    monkeypatch.setattr(packing, "KEPT_LOGPROBS", kept)
    hidden, weight, targets, a, b = head()
    logp, entropy = logprobs_from_hidden(hidden, weight, targets, temperature, suppressed, True)
    found = [logp, entropy, *torch.autograd.grad((a * logp + b * entropy).sum(), (hidden, weight))]
    for x, y in zip(found, reference(hidden, weight, targets, a, b, temperature, suppressed), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_head_without_entropy_frozen_and_of_nothing():
    hidden, weight, targets, a, _ = head()
    expected = reference(hidden, weight, targets, a, 0 * a, 0.7)
    for with_entropy in (False, True):  # an entropy that is in no loss costs no backward
        logp, entropy = logprobs_from_hidden(hidden, weight.detach(), targets, 0.7, with_entropy=with_entropy)
        assert (entropy is not None) is with_entropy
        [grad] = torch.autograd.grad((a * logp).sum(), hidden)
        torch.testing.assert_close(grad.double(), expected[2], rtol=1e-5, atol=1e-5)
    logp, entropy = logprobs_from_hidden(hidden[:0], weight, targets[:0], with_entropy=True)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and not weight.grad.any()


def test_head_in_bf16():
    hidden, weight, targets, a, b = head(torch.bfloat16)
    logp, entropy = logprobs_from_hidden(hidden, weight, targets, 0.7, (), True)
    assert logp.dtype == entropy.dtype == torch.float32
    found = [logp, entropy, *torch.autograd.grad((a * logp + b * entropy).sum(), (hidden, weight))]
    for x, y in zip(found, reference(hidden, weight, targets, a, b, 0.7), strict=True):
        assert (x.double() - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "granite"])
def test_log_probs_and_entropies_of_packs_are_those_of_the_plain_path(family, batch_of):
    """Placeholders of pictures masked, logits scaled: in the entropy too, and as the sampler sees them."""
    batch, found = batch_of(family), []
    for is_packed in (False, True):
        packing.switch_attention(batch.model, "packed" if is_packed else "sdpa")
        table = torch.zeros(2, len(batch.responses), 9)
        given = batch.groups, batch.prompts, batch.encode, batch.responses, 4096
        for pack in packs_of_rank(*given, packed=is_packed):
            for x, values in zip(table, response_logprobs(batch.model, pack, TEMPERATURE, with_entropy=True)):
                x[pack.index] = values.detach()
        found.append(table)
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)
    never = packing.media_token_ids(batch.model.config)
    assert never == ([] if family == "granite" else [503, 504, 506, 507])
    next_one = packing.next_logprobs(batch.model, torch.randn(3, 64), TEMPERATURE)
    assert not next_one.exp()[:, never].any() and next_one.exp().sum(-1).tolist() == pytest.approx([1] * 3)


# ---- attention on CUDA ----


def slow_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch documents of varlen_attn, one segment at a time, in plain matrix products."""
    assert window_size == (-1, 0), "causal, aligned at the bottom right"
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q[-1] == len(q) and cu_k[-1] == len(k)
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    assert enable_gqa or q.shape[1] == k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v, outputs = *(x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v)), []
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(int(d - c - b + a))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v[c:d]))
    return torch.cat(outputs)


def attend_both_ways(kv_heads: int, scaling, times: int, half: dict, full: dict) -> list:
    """Outputs and gradients of _varlen_attention and _grouped_attention on the same random inputs."""
    prompts, pieces, responses = {}, [], []
    for g, (P, lengths) in enumerate([(5, [3, 1, 4]), (1, [2]), (9, []), (2, [1, 1, 1, 1]), (3, [6, 6])]):
        ids = torch.arange(P * times)
        prompts[g] = {"prompt_ids": ids, "position_ids": ids, "length": len(ids)}
        prompts[g] |= {"kinds": (), "image": [], "video": []}
        pieces.append((g, [*range(len(responses), len(responses) + len(lengths))]))
        responses += [torch.randint(0, 300, (R * times,)) for R in lengths]
    pack, results = build_pack(pieces, prompts, responses), []
    N = pack.inputs["input_ids"].shape[1]
    inputs = [torch.randn(1, heads, N, 16) for heads in (4, kv_heads, kv_heads, 4)]
    for attention, how in ((packing._varlen_attention, half), (packing._grouped_attention, full)):
        *qkv, grad = (x.detach().to(**how).requires_grad_() for x in inputs)
        out = attention(*qkv, scaling, pack.to(qkv[0].device).inputs["layout"])
        results.append((out, *torch.autograd.grad((out * grad.transpose(1, 2)).sum(), qkv)))
    return results


@pytest.mark.parametrize("kv_heads, scaling", [(4, None), (2, 0.5), (1, None)])
def test_varlen_indices(kv_heads, scaling, monkeypatch):
    """On a slow stand-in for the kernel: what is checked is the arithmetic of the indices."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", slow_varlen_attn)
    torch.testing.assert_close(*attend_both_ways(kv_heads, scaling, 1, {}, {}), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_varlen_on_cuda():
    on = {"device": "cuda"}
    for half, full in zip(*attend_both_ways(2, None, 20, on | {"dtype": torch.bfloat16}, on), strict=True):
        assert (half.float() - full).norm() < 0.02 * full.norm()


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


def ranks_of(world_size: int, is_packed: bool, groups, kinds: list[tuple], **how) -> list[list]:
    """Packs of each rank, of prompts with P = 5 and these kinds of inputs, responses of 3 tokens."""
    ids = torch.arange(5)
    prompts = [{"index": 10 + i, "length": 5, "kinds": own} for i, own in enumerate(kinds)]
    for i, (prompt, own) in enumerate(zip(prompts, kinds)):
        media = {kind: [{"key": i}] if names[0] in own else [] for kind, names in packing.MEDIA.items()}
        prompt |= {"prompt_ids": ids, "position_ids": ids, "inputs": {"input_ids": ids[None]}, **media}
    encode, responses = (lambda indices: [prompts[i - 10] for i in indices]), [torch.full((3,), EOS)] * 99
    given = groups, prompts, encode, responses, 18
    return [list(packs_of_rank(*given, rank, world_size, is_packed, **how)) for rank in range(world_size)]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_have_equally_many_packs_and_every_response_once(world_size, is_packed):
    groups = [(0, [0, 1, 2]), (2, [5]), (1, [3, 4])]
    ranks = ranks_of(world_size, is_packed, groups, [IMAGE, (), VIDEO])
    assert len({len(packs) for packs in ranks}) == 1
    packs = [pack for own in ranks for pack in own]
    assert sorted(b for pack in packs for b in pack.rows.tolist()) == [0, 1, 2, 3, 4, 5]
    for pack in packs:  # the places of its tokens in a table
        rows = pack.rows.tolist()
        assert pack.index[0].tolist() == pack.rows[pack.owner].tolist() == [b for b in rows for _ in range(3)]
        assert pack.index[1].tolist() == [0, 1, 2] * len(rows)
        assert pack.targets.tolist() == [EOS] * len(pack.owner)
        assert pack.last.tolist() == (pack.predict_from[2::3] + 1).tolist()
        assert is_packed or len(pack.rows) <= 1


def test_pictures_and_clips_everywhere_or_nowhere():
    """Under ZeRO all ranks run the same towers in the same pack."""
    groups, kinds = [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6, 7])], [IMAGE, (), VIDEO]
    for world_size in (1, 2, 3):
        ranks = ranks_of(world_size, True, groups, kinds, media_everywhere=True)
        for pack in (pack for packs in ranks for pack in packs):
            assert pack.media["image"] and pack.media["video"]
        assert sorted(b for packs in ranks for pack in packs for b in pack.rows.tolist()) == [*range(8)]
        ranks = ranks_of(world_size, True, groups[1:2], kinds, media_everywhere=True)
        assert not any(pack.media["image"] or pack.media["video"] for packs in ranks for pack in packs)
        for packs in zip(*ranks_of(world_size, False, groups, kinds)):  # one at a time: beside its like
            assert len({g for g, own in groups for pack in packs for b in pack.rows if int(b) in own}) <= 1


def test_doctests():
    result = doctest.testmod(packing)
    assert result.attempted > 0 and result.failed == 0


# ---- prompts ----


def test_special_tokens_in_data_are_text():
    """Alone, nested, cut in two by the parts of a message: data ends no turn and stands for no picture."""
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    tokenizer = processor.tokenizer
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def special_ids(content) -> list[int]:
        row = {"prompt": [{"role": "user", "content": content}]}
        messages = rloo.to_messages(rloo.Args(), row, ".", tokenizer)
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
        [message] = rloo.to_messages(rloo.Args(), {"prompt": text}, ".", tokenizer)
        assert message["content"] == [{"type": "text", "text": text}]
