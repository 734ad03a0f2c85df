"""Random sizes of everything that has boundaries: chunks, packs, ranks, token limits, windows, responses. The
quick half tries a few cases of each, the slow half hundreds."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import continuations, slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_families import load_family, load_model, unmodified_logprobs

from common import decoding, packing

SEED = st.integers(0, 2**31)
GROUP = st.tuples(st.integers(0, 99), st.lists(st.integers(0, 9), max_size=4))  # prompt, lengths of responses
FLAG = st.booleans()
TEMPERATURE = 0.7
# Windows of 8; windows and image blocks that attend in both directions; M-RoPE; a factor of logits
FAMILIES = ("mistral", "gemma3", "qwen2_5_vl", "granite")
# Tiles, learned positions, token types
MORE_FAMILIES = ("internvl", "gpt2", "paligemma", *slow("qwen3_vl", "llava"))


def cases(quick: int, many: int):
    """Parametrize a test by the number of examples that `check` tries."""
    return pytest.mark.parametrize("examples", [quick, *slow(many)])


def check(examples: int, property_, **fields) -> None:
    how = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
    settings(max_examples=examples, **how)(given(st.fixed_dictionaries(fields))(property_))()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(hidden, weight, bias, targets, temperature, softcap, factor, suppressed) -> tuple:
    """Log-probs and entropies over the tokens that are not suppressed."""
    kept = torch.tensor([i for i in range(len(weight)) if i not in suppressed])
    logits = factor * (hidden @ weight.T + bias)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    logp = (logits[:, kept] / temperature).log_softmax(-1)
    column = torch.searchsorted(kept, targets)
    return logp.gather(1, column[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@cases(quick=25, many=1000)
def test_head(examples, monkeypatch):
    def property_(case: dict) -> None:
        M, V, chunk, random = case["M"], case["V"], case["chunk"], seeded(case["seed"])
        monkeypatch.setattr(packing, "LOGITS_CHUNK", chunk)
        suppressed = (torch.rand(V, generator=random) < case["suppressed"]).nonzero()[: V - 1, 0].tolist()
        possible = torch.tensor([i for i in range(V) if i not in suppressed])
        targets = possible[torch.randint(0, len(possible), (M,), generator=random)]
        options = {name: case[name] for name in ("temperature", "softcap", "factor")}
        options["suppressed"] = suppressed
        inputs = [torch.randn(shape, generator=random).to(case["dtype"]) for shape in ((M, 8), (V, 8), (V,))]
        exact = [x.double().requires_grad_() for x in inputs]
        hidden, weight, bias = (x.clone() for x in inputs)
        hidden.requires_grad_()
        weight.requires_grad_(not case["frozen"])
        bias.requires_grad_(not case["frozen"])
        entropy = {"with_entropy": case["with_entropy"]}
        to_logits = lambda x: torch.nn.functional.linear(x, weight, bias)  # noqa: E731
        computed = packing.logprobs_from_states(hidden, to_logits, targets, **entropy, **options)
        assert (computed[1] is not None) is case["with_entropy"] and computed[0].dtype == torch.float32
        computed = [x for x in computed if x is not None]
        expected = dense(*exact, targets, **options)[: len(computed)]
        weights = torch.randn(2, M, generator=random)
        for results in (computed, expected):
            sum((w * x).sum() for w, x in zip(weights, results)).backward()
        pairs = [*zip(computed, expected), *((x.grad, y.grad) for x, y in zip((hidden, weight, bias), exact))]
        # A low temperature magnifies the rounding of logits.
        precision = 1e-4 if case["dtype"] == torch.float32 else 0.05 / min(1.0, case["temperature"])
        for x, y in pairs:
            assert (x is None and case["frozen"]) or (x - y).norm() <= precision * (1 + y.norm())

    fields = {"M": st.integers(0, 50), "V": st.integers(2, 60), "chunk": st.integers(1, 16), "seed": SEED}
    fields |= {"suppressed": st.sampled_from([0.0, 0.1, 0.9]), "factor": st.sampled_from([1.0, 0.3])}
    fields |= {"temperature": st.floats(0.2, 4.0), "softcap": st.sampled_from([None, 2.0])}
    fields |= {"with_entropy": FLAG, "frozen": FLAG}
    fields |= {"dtype": st.sampled_from([torch.float32, torch.bfloat16])}
    check(examples, property_, **fields)


@pytest.fixture(scope="module")
def models_of(folder_of):
    """Family -> the unmodified model, a packed copy, and prompts: texts of any length, or its dataset's."""

    @cache
    def make(family: str) -> tuple:
        batch, packed = load_family(folder_of(family)), load_model(folder_of(family))
        packing.set_attention(packed, "packed")
        packed.logit_factor = 1 / 3 if family == "granite" else 1.0
        if not hasattr(batch.processor, "tokenizer"):
            ids = [torch.randint(0, 500, (1, P), generator=seeded(P)) for P in range(1, 30)]
            inputs = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
            batch.prompts = [packing.make_prompt(batch.model, x, index) for index, x in enumerate(inputs)]
        return batch.model, packed, batch.prompts

    return make


def gradients(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cases(quick=5, many=40)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_packs(family, examples, models_of):
    unmodified, packed, pool = models_of(family)

    def property_(case: dict) -> None:
        prompts = [pool[index % len(pool)] for index, _ in case["groups"]]
        random = seeded(case["seed"])
        groups, responses = [], []
        for i, (_, lengths) in enumerate(case["groups"]):
            groups.append((i, [*range(len(responses), len(responses) + len(lengths))]))
            responses += [torch.randint(400, 501, (R,), generator=random) for R in lengths]
        for ids in responses:
            ids[ids % 5 == 0] = 500  # EOS, which is also the padding token, inside of responses
        weights = torch.randn(len(responses), 9, generator=random)
        longest = [max(lengths, default=0) for _, lengths in case["groups"]]
        max_tokens = case["spare_tokens"] + max(p.length + R for p, R in zip(prompts, longest))
        model = packed if case["packed"] else unmodified
        arguments = model, groups, prompts, continuations(groups, prompts, responses), max_tokens
        world_size = case["world_size"]
        ranks = [list(packing.iter_rank_packs(*arguments, k, world_size)) for k in range(world_size)]
        for packs in zip(*ranks, strict=True):  # all ranks run the same vision towers at the same time
            assert len({frozenset(pack.model_inputs) for pack in packs}) == 1
            assert max(pack.model_inputs["input_ids"].numel() for pack in packs) <= max_tokens
        table = torch.full(weights.shape, 7.0)
        model.zero_grad()
        for pack in (pack for packs in ranks for pack in packs):
            logp, entropy = packing.response_logprobs(model, pack, TEMPERATURE, with_entropy=True)
            table[pack.token_index] = logp.detach()
            (logp * weights[pack.token_index] + 0.0 * entropy).sum().backward()
        computed = gradients(model)
        unmodified.zero_grad()
        for i, b in ((i, b) for i, response_indices in groups for b in response_indices):
            R = len(responses[b])
            logp = unmodified_logprobs(unmodified, prompts[i].inputs, responses[b], TEMPERATURE)
            (logp * weights[b, :R]).sum().backward()
            torch.testing.assert_close(table[b, :R], logp.detach(), atol=1e-4, rtol=0)
            assert (table[b, R:] == 7).all()  # nothing is written after its end
        exact = gradients(unmodified)
        total = sum(float(g.norm()) ** 2 for g in exact.values()) ** 0.5
        for name in exact.keys() | computed.keys():
            grad, expected = (gradient.get(name, torch.zeros(1)) for gradient in (computed, exact))
            assert (grad - expected).norm() <= 1e-4 * expected.norm() + 2e-6 * total, name

    fields = {"packed": st.sampled_from([True, True, False]), "seed": SEED}
    fields |= {"spare_tokens": st.integers(0, 150), "world_size": st.integers(1, 3)}
    check(examples, property_, groups=st.lists(GROUP, min_size=1, max_size=5), **fields)


@cases(quick=8, many=100)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder(family, examples, models_of, spy):
    """Log-probs of sampled tokens equal teacher forcing, and responses end at an EOS or the limit. Prompts may have
    lower limits, as those of later turns do."""
    unmodified, packed, pool = models_of(family)
    packs = spy(packing, "build_packed")  # of prompts

    def property_(case: dict) -> None:
        packs.clear()
        G, R = case["G"], case["max_length"]
        chosen = [pool[index % len(pool)] for index in case["indices"]]
        prompts = [replace(prompt, seed=case["seed"] + i) for i, prompt in enumerate(chosen)]
        prompts[0].max_new_tokens = case["lower_limit"]
        model = packed if case["packed"] else unmodified
        is_eos = torch.rand(501, generator=seeded(case["seed"])) < case["eos_share"]
        eos_ids = is_eos.index_fill(0, torch.tensor(500), True).nonzero()[:, 0].tolist()
        responses = decoding.generate(model, prompts, G, R, eos_ids, case["temperature"], case["max_tokens"])
        assert len(responses) == len(prompts) * G and len(packs) >= case["packed"]
        limit = max(case["max_tokens"], *(prompt.length for prompt in prompts))
        assert all(pack.model_inputs["input_ids"].numel() <= limit for _, _, pack in packs)
        for b, response in enumerate(responses):
            ends = torch.isin(response.token_ids, torch.tensor(eos_ids))
            assert not ends[:-1].any() and ends[-1] != response.truncated
            limit = min(R, prompts[b // G].max_new_tokens or R)
            assert (
                len(response.token_ids) == limit if response.truncated else len(response.token_ids) <= limit
            )
            temperature = case["temperature"] or 1.0
            logp = unmodified_logprobs(unmodified, prompts[b // G].inputs, response.token_ids, temperature)
            torch.testing.assert_close(response.logprobs, logp, atol=1e-4, rtol=0)

    fields = {"indices": st.lists(st.integers(0, 99), min_size=1, max_size=5), "G": st.integers(1, 4)}
    fields |= {"packed": st.sampled_from([True] * 5 + [False]), "lower_limit": st.sampled_from([None, 1, 5])}
    fields |= {"max_length": st.integers(1, 16), "eos_share": st.sampled_from([0.0, 0.05, 0.2, 0.6])}
    fields |= {"max_tokens": st.sampled_from([1, 100, 1000])}  # a pack per prompt, some packs, one pack
    with torch.no_grad():
        check(examples, property_, **fields, temperature=st.sampled_from([0.0, 0.7, 1.0]), seed=SEED)
