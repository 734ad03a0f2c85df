"""Packing that would be wrong is detected at startup; packed attention, plans of packs, prompts. Packed log-probs
and gradients against the unmodified model: test_families.py and test_properties.py."""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import TINY, continuations
from test_families import TEMPERATURE, choose_layout, load_family, load_model, unmodified_logprobs

import rloo
from common import attention, chats, decoding, environments, packing, packing_check
from common.packing import iter_rank_packs, plan_packs, response_logprobs


@pytest.fixture
def batch_of(folder_of):
    """Family -> its model, its processor, and its prompts."""
    return lambda family: load_family(folder_of(family))


def test_padded_rows_need_few_logits(batch_of):
    """Models that can return logits of the last tokens only are asked for the responses'."""
    batch, shapes = batch_of("llama"), []
    batch.model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape[:2]))
    groups, ids = [(0, [0, 1, 2]), (1, [3])], [torch.arange(R) for R in (5, 1, 2, 4)]
    responses = continuations(groups, batch.prompts, ids)
    for pack in iter_rank_packs(batch.model, groups, batch.prompts, responses, 4096):
        response_logprobs(batch.model, pack, TEMPERATURE)
    assert sorted(shapes) == [(1, 5), (3, 6)]


# ---- the check at startup ----
WARNING = "warning: batches are padded, because packing is not supported for this model ("
ENABLED = "packing enabled: outputs match the unmodified model within"


def check(batch, max_tokens: int = 2048, max_length: int = 200, **options) -> str:
    packing.set_attention(batch.model, "sdpa")
    options |= {"max_tokens": max_tokens, "max_length": max_length}
    message = choose_layout(batch.model, batch.prompts, **options)
    assert packing.is_packed(batch.model) == message.startswith(ENABLED) != message.startswith(WARNING)
    return message


def observe(batch):
    """An encoder of an observation with an image."""
    sampler = SimpleNamespace(update_weights=None, sleep=None)
    image = [p for m in batch.prompts[-1].messages for p in m["content"] if p["type"] == "image"]
    encoder = environments.EnvironmentSampler(rloo.Args(), sampler, None, batch.model, batch.processor, [500])
    message = {"role": "user", "content": [*image, {"type": "text", "text": "And now?"}]}
    return functools.partial(encoder.encode_message, message=message)


def let_responses_see_each_other(monkeypatch, batch) -> None:
    """A response attends to all responses before it."""
    make_indices = packing.make_packed_indices

    def merge(segments):
        merged = []
        for queries, keys in segments:
            if len(queries) < len(keys) and len(merged[-1][0]) < len(merged[-1][1]):  # after a response
                previous = merged.pop()
                queries, keys = torch.cat([previous[0], queries]), torch.cat([previous[1], queries])
            merged.append((queries, keys))
        return make_indices(merged)

    monkeypatch.setattr(packing, "make_packed_indices", merge)


def shift_positions_after_images(monkeypatch, batch) -> None:
    for prompt in batch.prompts:
        last_image = (prompt.input_ids == batch.model.config.image_token_id).nonzero().max()
        prompt.position_ids = prompt.position_ids + (torch.arange(prompt.length) > last_image)


def hide(monkeypatch, is_visible) -> None:
    """Attention also needs is_visible(index of the query in the pack, position of query, of key)."""
    bucket_mask = attention.ModelMask.bucket_mask

    def narrow(self, indices, i):
        bucket = indices.buckets[i]
        q, k = indices.seq_positions[bucket.queries], indices.seq_positions[bucket.keys]
        visible = is_visible(*(x[:, None, :, None] for x in (bucket.queries, q)), k[:, None, None])
        return bucket_mask(self, indices, i) & visible

    monkeypatch.setattr(attention.ModelMask, "bucket_mask", narrow)


def shorten_windows(monkeypatch, batch) -> None:
    hide(monkeypatch, lambda index, q, k: q - k < 7)  # the window is 8


def swap_token_types(monkeypatch, batch) -> None:
    for prompt in batch.prompts:
        prompt.next_inputs["token_type_ids"] = 1 - prompt.next_inputs["token_type_ids"]


def reverse_media(monkeypatch, batch) -> None:
    """Images of the last prompt first."""
    cat_padded = packing.cat_padded
    reverse = lambda xs: cat_padded(xs[::-1] if xs[0].is_floating_point() else xs)  # noqa: E731
    monkeypatch.setattr(packing, "cat_padded", reverse)


def shift_positions_after_observations(monkeypatch, batch) -> None:
    join = packing.join_continuations
    shift = lambda part: replace(part, position_ids=part.position_ids + 1)  # noqa: E731
    monkeypatch.setattr(packing, "join_continuations", lambda parts: join([*parts[:-1], shift(parts[-1])]))


def add_a_constant(monkeypatch, batch) -> None:
    """It hardly changes the gradients."""
    compute = packing.logprobs_from_states

    def add(to_logits, **how):
        logprobs, entropies = compute(to_logits=to_logits, **how)
        return logprobs + 0.005 * (to_logits != torch.clone), entropies  # in the packed layout only

    monkeypatch.setattr(packing, "logprobs_from_states", add)


def detach_prompts(monkeypatch, batch) -> None:
    """The forward is right, but no gradient reaches the shared prompt."""
    attend = attention.attend

    def detached(query, key, value, **how):
        return attend(query, key.detach(), value.detach(), **how)

    monkeypatch.setattr(attention, "attend", detached)


def keep_its_attention(monkeypatch, batch) -> None:
    """Falcon ignores set_attn_implementation, and would compare padded rows with themselves."""
    monkeypatch.setattr(packing_check, "set_attention", lambda model, name: None)


def attend_to_blocks(monkeypatch, batch) -> None:
    """Sparse attention passes the blocks to attend to; transformers' SDPA path would not get them."""
    layer = batch.model.model.layers[0].self_attn
    layer.forward = functools.partial(layer.forward, block_indices=torch.zeros(1))


def fail_on_another_rank(monkeypatch, batch) -> None:
    dist = {"is_initialized": lambda: True, "all_reduce": lambda flag, op: flag.zero_()}
    monkeypatch.setattr(packing_check, "dist", SimpleNamespace(**dist, ReduceOp=torch.distributed.ReduceOp))


WRONG = "outputs change by|differ by"
BREAKAGES = [  # and a part of the warning, or of the error that ends the run
    ("qwen2_5_vl", let_responses_see_each_other, WRONG),
    ("qwen2_5_vl", shift_positions_after_images, WRONG),
    ("qwen2_5_vl", shift_positions_after_observations, WRONG),
    ("mistral", shorten_windows, WRONG),
    ("paligemma", swap_token_types, WRONG),
    ("gemma3", reverse_media, WRONG),
    ("llama", add_a_constant, "its outputs change by 5.0e-03"),
    ("llama", detach_prompts, "its gradients change by"),
    ("llama", keep_its_attention, "its attention can't be replaced"),
    ("llama", attend_to_blocks, "its attention has the input block_indices"),
    ("llama", fail_on_another_rank, "another rank could not pack it"),
]


@pytest.mark.parametrize("family, break_it, reason", BREAKAGES)
def test_the_check_notices(family, break_it, reason, batch_of, monkeypatch, capsys):
    """What is only wrong in packs is padded; what is wrong in both layouts is refused."""
    batch = batch_of(family)
    if break_it == shift_positions_after_images:
        batch.prompts = [prompt for prompt in batch.prompts if "pixel_values" in prompt.media_keys]
    options = {"encode_observation": observe(batch)} if "observation" in break_it.__name__ else {}
    assert check(batch, **options).startswith(ENABLED)
    break_it(monkeypatch, batch)
    try:
        message = check(batch, **options)
        assert message.startswith(WARNING)
    except SystemExit:
        message = capsys.readouterr().err
    assert re.search(reason, message)


@pytest.mark.slow
@pytest.mark.parametrize("_, break_it, reason", [x for x in BREAKAGES if x[0] == "qwen2_5_vl"])
def test_the_check_notices_with_the_bundled_model_in_bf16(_, break_it, reason, vqa, monkeypatch, capsys):
    """Rounding passes; what is wrong does not."""
    model, processor = load_model(TINY, "bfloat16"), transformers.AutoProcessor.from_pretrained(TINY)
    data = rloo.PromptDataset(rloo.Args(max_prompt_length=1024), vqa, "train", model, processor)
    prompts = [data.encode(i) for i in range(12)]
    batch = SimpleNamespace(model=model, processor=processor, prompts=prompts)
    test_the_check_notices("", break_it, reason, lambda family: batch, monkeypatch, capsys)


def test_the_check_stays_within_the_context_of_the_model(batch_of):
    batch = batch_of("llama")
    shortest = min(prompt.length for prompt in batch.prompts)
    batch.model.config.max_position_embeddings = limit = shortest + 24
    cases, (prompt, [response]), _ = packing_check.make_cases(batch.model, batch.prompts, 4096, 4096, None)
    assert {case.prompt.length for case in cases} == {shortest} and prompt.length + len(response) == limit


def test_the_check_notices_what_only_long_packs_or_responses_show(batch_of, monkeypatch):
    """Prompts are much shorter. Block-sparse attention, for example, is dense up to some length."""
    batch = batch_of("llama")
    assert max(prompt.length for prompt in batch.prompts) < 100
    with monkeypatch.context() as patch:
        hide(patch, lambda index, q, k: (index < 1000) | (k >= 5))
        assert check(batch, max_tokens=2048, max_length=100).startswith(WARNING)
        assert check(batch, max_tokens=500, max_length=100).startswith(ENABLED)  # no pack has such an index
    hide(monkeypatch, lambda index, q, k: q - k < 128)
    assert check(batch, max_length=200).startswith(WARNING)
    assert check(batch, max_length=120).startswith(ENABLED)


def test_the_check_fills_packs_of_each_kind_of_media(batch_of, spy):
    """Images and videos, too, are compared at large pack indices."""
    built, longest = spy(packing, "build_packed"), {}
    assert check(batch_of("qwen2_5_vl"), max_tokens=2048).startswith(ENABLED)
    for _, _, pack in built:
        kind = frozenset(name for name in pack.model_inputs if "pixel" in name)
        longest[kind] = max(longest.get(kind, 0), pack.model_inputs["input_ids"].shape[1])
    assert len(longest) > 1 and min(longest.values()) > 1000


# ---- attention ----
@pytest.mark.parametrize("form", ["causal", "window 1", "window 6", "window 99", "chunks 4"])
@pytest.mark.parametrize("kv_heads, scaling", [(4, None), (2, 0.5), (1, None)])
def test_attention_equals_separate_sequences(kv_heads, scaling, form):
    """Each prompt, and each [prompt; response], by one mask over all of them."""
    groups = []
    offset = 0
    for lengths in ([5, 3, 1, 4], [1, 2], [9], [2, 1, 1, 1, 1], [3, 6, 6], [4, 0, 2]):
        groups.append([offset + sum(lengths[:i]) + torch.arange(n) for i, n in enumerate(lengths)])
        offset += sum(lengths)
    segments = []  # queries and keys
    for prompt, *rs in groups:
        segments += [(prompt, prompt), *((response, torch.cat([prompt, response])) for response in rs)]
    indices = attention.make_packed_indices(segments)
    assert all(x.dtype == torch.int32 for x in indices.cu_seqlens)  # as the kernel requires
    masks = transformers.masking_utils
    size = int(form.partition(" ")[2] or 0)
    functions = {"causal": masks.causal_mask_function}
    functions["window"] = masks.sliding_window_causal_mask_function(size)
    functions["chunks"] = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = attention.ModelMask(mask_function=functions[form.split()[0]])
    *qkv, weight = (torch.randn(1, n, offset, 16).requires_grad_() for n in (4, kv_heads, kv_heads, 4))
    how = {"attention_mask": mask, "packed_indices": indices, "scaling": scaling}
    allowed, zero = torch.zeros(offset, offset, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    for queries, keys in segments:
        k = torch.arange(len(keys))
        q = k[len(keys) - len(queries) :]
        allowed[queries[:, None], keys] = mask.function(zero, zero, q[:, None], k)
    options = {"attn_mask": allowed, "scale": scaling, "enable_gqa": True}
    separate = torch.nn.functional.scaled_dot_product_attention(*qkv, **options).transpose(1, 2)
    outputs = separate, attention.packed_attention(None, *qkv, **how)[0]
    results = [(x, *torch.autograd.grad((x * weight.transpose(1, 2)).sum(), qkv)) for x in outputs]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# ---- planning ----
def test_plan_by_hand():
    """The third group needs two packs of 20 tokens. The k-th packs of the ranks have similar sizes."""
    groups, lengths = [(0, [0, 1]), (1, [2]), (2, [3, 4, 5])], [2, 2, 5, 9, 9, 9]
    plan = functools.partial(plan_packs, groups, [4, 3, 1], lengths, 20)
    first_rank, second_rank = [[(2, [3, 4])], [(1, [2])]], [[(2, [5]), (0, [0, 1])], []]
    assert plan(world_size=2) == [first_rank, second_rank]
    assert plan(packed=False) == [[[(2, [3, 4])], [(0, [0, 1])], [(2, [5])], [(1, [2])]]]  # one prompt each
    [packs] = plan(packed=False, max_rows=1)
    assert sorted(packs) == [[(i, [b])] for i, response_indices in groups for b in response_indices]
    with pytest.raises(AssertionError, match="response 1 never fits into 40 tokens"):
        plan_packs([(0, [0, 1])], [30], [10, 11], 40)


def test_groups_with_other_media_run_separately(monkeypatch):
    """Response 1 has an observation with an image."""
    config = SimpleNamespace(_attn_implementation="packed")
    model = SimpleNamespace(device="cpu", config=SimpleNamespace(get_text_config=lambda: config))
    mask = torch.ones(1, dtype=torch.bool)
    unseen, seen = (packing.Continuation(mask, {}, media, None) for media in ({}, {"pixel_values": 0}))
    monkeypatch.setattr(packing, "build_packed", lambda groups, *_: [groups, *[torch.zeros(1)] * 6])
    packs = packing.iter_rank_packs(model, [(0, [0, 1])], [packing.PromptInfo(0, 1, ())], [unseen, seen], 9)
    assert [pack.model_inputs for pack in packs] == [[(0, [0])], [(0, [1])]]


def test_configs_of_other_families():
    """Lists of media tokens, and RoPE that depends on the length in some layers only."""
    rope = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    text = SimpleNamespace(vocab_size=9, rope_parameters=rope, max_position_embeddings=64)
    config = SimpleNamespace(get_text_config=lambda: text, eos_token_id=1, image_token_id=2)
    config.vision_end_token_ids = [5, 99]
    assert packing.media_token_ids(config) == [2, 5]
    assert packing.rope_limit(SimpleNamespace(config=config)) == 64


# ---- prompts ----
def test_positions_after_a_long_video(batch_of):
    """A slow video's frames count in time beyond the text after them. The response continues from that text."""
    batch = batch_of("qwen2_5_vl")
    model = batch.model
    inputs = batch.prompts[-1].inputs | {"second_per_grid_ts": torch.tensor([100 / 3])}
    long = packing.make_prompt(model, inputs)
    assert long.next_position == int(long.position_ids[0, -1]) + 1 < long.position_ids.max()
    packing.set_attention(model, "packed")
    [sampled] = decoding.generate(model, [long], 1, 6, [-1], TEMPERATURE, max_tokens=1000)
    response = packing.continue_prompt(long, sampled.token_ids)
    with torch.no_grad():
        pack = packing.build_packed([(0, [0])], {0: long}, {0: response})
        logprobs = response_logprobs(model, pack, TEMPERATURE)[0]
        packing.set_attention(model, "sdpa")
        expected = unmodified_logprobs(model, inputs, sampled.token_ids, TEMPERATURE)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(sampled.logprobs, expected, atol=1e-4, rtol=0)
    media = packing.make_prompt(model.bfloat16(), inputs).media_inputs
    assert media["second_per_grid_ts"] == torch.tensor([100 / 3])
    assert media["pixel_values"].dtype == model.dtype


def test_inputs_of_responses(batch_of):
    """Responses get the values of text, even if the prompt ends in an image."""
    model = batch_of("qwen2_5_vl").model
    image = model.config.image_token_id
    input_ids = torch.tensor([[5, 6, image, image]])
    types = (input_ids == image).long()
    seen = torch.tensor([[0, 0, 1, 1]])[..., None]  # (1, P, images): which tokens see an image
    inputs = {"input_ids": input_ids, "mm_token_type_ids": types, "token_type_ids": types + 3, "seen": seen}
    values = packing.response_inputs(model, inputs)
    assert [int(values[name]) for name in ("mm_token_type_ids", "token_type_ids", "seen")] == [0, 3, 1]


def test_special_tokens_in_data_are_text():
    """Alone, nested or split over parts of a message, they end no turn and stand for no image."""
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    tokenizer = processor.tokenizer
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def special_ids(*texts: str) -> list[int]:
        content = [{"type": "text", "text": text} for text in texts]
        row = {"prompt": [{"role": "user", "content": content}]}
        messages = rloo.build_messages(rloo.Args(), row, ".", tokenizer)
        ids = chats.encode_chat(processor, messages, add_generation_prompt=True)["input_ids"][0].tolist()
        return [i for i in ids if i in special.values()]

    usual = special_ids("hello")
    assert len(special) >= 6 and usual
    for token in special:
        nested = [(token[:3] + other + token[3:],) for other in special]
        halves = [(token[:split], token[split:]) for split in range(1, len(token))]
        for texts in [(token,), (f"a {token}{token} b",), *nested, *halves]:
            assert special_ids(*texts) == usual
    for text in ("<think>a</think><answer>b</answer>", "a < b |im_end|>", "< |im_end|>"):  # these stay
        [message] = rloo.build_messages(rloo.Args(), {"prompt": text}, ".", tokenizer)
        assert message["content"] == [{"type": "text", "text": text}]
