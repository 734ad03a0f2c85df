"""What has boundaries (chunks, packs, ranks, budgets, windows, ends) is right wherever they lie: some cases each
in the quick half, thousands in the slow one."""

import copy
from dataclasses import replace
from functools import cache

import common  # noqa: F401  before transformers # isort: skip
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_families import build, folder_of, one_by_one  # noqa: F401

import rloo
from common import packing

SEED = st.integers(0, 2**31)
GROUP = st.tuples(st.integers(0, 99), st.lists(st.integers(0, 9), max_size=4))  # prompt, lengths of responses
FLAG = st.booleans()
TEMPERATURE = 0.7
# Windows of 8; windows and soft caps; windows and pictures that see both ways; pictures and M-RoPE
FAMILIES = ("mistral", "gemma2", "gemma3", "qwen2_5_vl")


def cases(quick: int, slow: int):
    """Parametrizes a test by how many examples `check` tries."""
    return pytest.mark.parametrize("examples", [quick, pytest.param(slow, marks=pytest.mark.slow)])


def check(examples: int, property_, **fields) -> None:
    how = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
    settings(max_examples=examples, **how)(given(st.fixed_dictionaries(fields))(property_))()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the head: log-probs, entropies and gradients against the dense formula ----


def dense(hidden, weight, bias, targets, temperature, softcap=None, suppressed=()) -> tuple:
    """Over the tokens that are left."""
    kept = torch.tensor([i for i in range(len(weight)) if i not in suppressed])
    logits = hidden @ weight.T + bias
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    logp = (logits[:, kept] / temperature).log_softmax(-1)
    column = torch.searchsorted(kept, targets)
    return logp.gather(1, column[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@cases(quick=100, slow=3000)
def test_head(examples, monkeypatch):
    def property_(case: dict) -> None:
        M, V, chunk, random = case["M"], case["V"], case["chunk"], seeded(case["seed"])
        monkeypatch.setattr(packing, "LOGITS_CHUNK", chunk)
        monkeypatch.setattr(packing, "MAX_CACHED_LOGITS", int(case["kept"] * chunk * V))
        suppressed = (torch.rand(V, generator=random) < case["suppressed"]).nonzero()[: V - 1, 0].tolist()
        possible = torch.tensor([i for i in range(V) if i not in suppressed])
        targets = possible[torch.randint(0, len(possible), (M,), generator=random)]
        how = {"temperature": case["temperature"], "softcap": case["softcap"], "suppressed": suppressed}
        inputs = [torch.randn(shape, generator=random).to(case["dtype"]) for shape in ((M, 8), (V, 8), (V,))]
        exact = [x.double().requires_grad_() for x in inputs]
        hidden, weight, bias = (x.clone() for x in inputs)
        hidden.requires_grad_()
        weight.requires_grad_(not case["frozen"])
        bias.requires_grad_(not case["frozen"])
        entropy = {"with_entropy": case["with_entropy"]}
        found = packing.logprobs_from_hidden(hidden, weight, targets, bias=bias, **how, **entropy)
        assert (found[1] is not None) is case["with_entropy"] and found[0].dtype == torch.float32
        found = [x for x in found if x is not None]
        expected = dense(*exact, targets, **how)[: len(found)]
        weights = torch.randn(2, M, generator=random)
        for results in (found, expected):
            sum((w * x).sum() for w, x in zip(weights, results)).backward()
        pairs = [*zip(found, expected), *((x.grad, y.grad) for x, y in zip((hidden, weight, bias), exact))]
        for x, y in pairs:
            in_bf16 = 0.05 / min(1.0, case["temperature"])  # which magnifies the rounding of logits
            precision = 1e-4 if case["dtype"] == torch.float32 else in_bf16
            assert (x is None and case["frozen"]) or (x - y).norm() <= precision * (1 + y.norm())

    fields = {"M": st.integers(0, 50), "V": st.integers(2, 60), "chunk": st.integers(1, 16), "seed": SEED}
    fields |= {"kept": st.floats(0, 5), "suppressed": st.sampled_from([0.0, 0.1, 0.9])}  # chunks; share of V
    fields |= {"temperature": st.floats(0.2, 4.0), "softcap": st.sampled_from([None, 2.0])}
    fields |= {"with_entropy": FLAG, "frozen": FLAG}
    fields |= {"dtype": st.sampled_from([torch.float32, torch.bfloat16])}
    check(examples, property_, **fields)


# ---- packs and the decoder against the unmodified model ----


@cache
def models_of(family: str) -> tuple:
    """-> the unmodified one, and one whose attention is packed."""
    plain = copy.deepcopy(build(family)[0])
    if family == "gemma2":  # its caps
        plain.set_attn_implementation("eager")
    ours = copy.deepcopy(plain)
    packing.set_attention(ours, "packed")
    return plain, ours


@pytest.fixture(scope="module")
def pool_of(folder_of):  # noqa: F811
    """Family -> prompts to draw from: for text models of any length, else those of its dataset."""

    @cache
    def make(family: str) -> list[packing.Prompt]:
        model, processor = build(family)
        if hasattr(processor, "tokenizer"):
            path = str(folder_of(family) / "rows.jsonl")
            data = rloo.load_prompts(rloo.Args(rewards=()), path, "train", model, processor)
            return [data.encode(i) for i in range(len(data.rows))]
        ids = [torch.randint(0, 500, (1, P), generator=seeded(P)) for P in range(1, 30)]
        inputs = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
        return [packing.make_prompt(model, x, index) for index, x in enumerate(inputs)]

    return make


def by_transformers(model, prompt: packing.Prompt, response: torch.Tensor, temperature: float):
    return one_by_one(model, prompt.inputs, response, temperature, packing.media_token_ids(model.config))


def gradients(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cases(quick=12, slow=300)
@pytest.mark.parametrize("family", FAMILIES)
def test_packs(family, examples, pool_of):
    pool, (plain, packed) = pool_of(family), models_of(family)

    def property_(case: dict) -> None:
        prompts = [pool[entry % len(pool)] for entry, _ in case["groups"]]
        random, groups, responses = seeded(case["seed"]), [], []
        for g, (_, lengths) in enumerate(case["groups"]):
            groups.append((g, [*range(len(responses), len(responses) + len(lengths))]))
            responses += [torch.randint(0, 500, (R,), generator=random) for R in lengths]
        weights = torch.randn(len(responses), 9, generator=random)
        longest = [max(lengths, default=0) for _, lengths in case["groups"]]
        budget = case["room"] + max(p.length + R for p, R in zip(prompts, longest))
        how = {name: case[name] for name in ("world_size", "packed", "media_everywhere")}
        given = groups, prompts, pool.__getitem__, responses, budget
        ranks = [list(packing.iter_rank_packs(*given, rank, **how)) for rank in range(case["world_size"])]
        for packs in zip(*ranks, strict=True):  # equally many; the same towers run at the same time
            if not case["packed"]:
                assert len({frozenset(pack.model_inputs) for pack in packs}) == 1
            elif case["media_everywhere"]:
                wanted = [bool(media) for media in packing.media_of(prompts).values()]
                assert all([bool(media) for media in pack.media.values()] == wanted for pack in packs)
            else:
                assert max(pack.model_inputs["input_ids"].shape[1] for pack in packs) <= budget
        table = torch.full(weights.shape, 7.0)
        ours = packed if case["packed"] else plain
        ours.zero_grad()
        for pack in (pack for packs in ranks for pack in packs):
            logp, entropy = packing.response_logprobs(ours, pack, TEMPERATURE, with_entropy=True)
            table[pack.token_index] = logp.detach()
            (logp * pack.gather_tokens(weights) + 0.0 * entropy).sum().backward()
        found = gradients(ours)
        plain.zero_grad()
        for g, b in ((g, b) for g, members in groups for b in members):
            R = len(responses[b])
            logp = by_transformers(plain, prompts[g], responses[b], TEMPERATURE)
            (logp * weights[b, :R]).sum().backward()
            torch.testing.assert_close(table[b, :R], logp.detach(), atol=1e-4, rtol=0)
            assert (table[b, R:] == 7).all()  # nothing is written behind its end
        exact = gradients(plain)
        total = sum(float(g.norm()) ** 2 for g in exact.values()) ** 0.5
        for name in exact.keys() | found.keys():
            grad, wanted = (gradient.get(name, torch.zeros(1)) for gradient in (found, exact))
            assert (grad - wanted).norm() <= 1e-4 * wanted.norm() + 2e-6 * total, name

    fields = {"packed": st.sampled_from([True, True, False]), "media_everywhere": FLAG, "seed": SEED}
    fields |= {"room": st.integers(0, 150), "world_size": st.integers(1, 3)}
    check(examples, property_, groups=st.lists(GROUP, min_size=1, max_size=5), **fields)


@cases(quick=20, slow=300)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder(family, examples, pool_of):
    """Log-probs of what is sampled are those of teacher forcing, and rows end where they should."""
    pool, (plain, ours) = pool_of(family), models_of(family)

    def property_(case: dict) -> None:
        prompts = [replace(pool[e % len(pool)], seed=case["seed"] + i) for i, e in enumerate(case["entries"])]
        is_end = torch.rand(501, generator=seeded(case["seed"])) < case["end_share"]
        ends = is_end.index_fill(0, torch.tensor(500), True).nonzero()[:, 0].tolist()
        args = rloo.Args(max_response_length=case["longest"])
        responses = rloo.generate(args, ours, prompts, case["G"], case["temperature"], ends)
        assert len(responses) == len(prompts) * case["G"]
        for b, response in enumerate(responses):
            ended = torch.isin(response.token_ids, torch.tensor(ends))
            assert not ended[:-1].any() and ended[-1] != response.truncated
            assert len(response.token_ids) == case["longest"] or not response.truncated
            prompt, temperature = prompts[b // case["G"]], case["temperature"] or 1.0
            logp = by_transformers(plain, prompt, response.token_ids, temperature)
            torch.testing.assert_close(response.logprobs, logp, atol=1e-4, rtol=0)

    fields = {"entries": st.lists(st.integers(0, 99), min_size=1, max_size=5), "G": st.integers(1, 4)}
    fields |= {"longest": st.integers(1, 16), "end_share": st.sampled_from([0.0, 0.05, 0.2, 0.6])}  # of words
    with torch.no_grad():
        check(examples, property_, **fields, temperature=st.sampled_from([0.0, 0.7, 1.0]), seed=SEED)
