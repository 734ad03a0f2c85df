"""rloo.py: its math, rewards and data, function by function."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import rloo
from common.packing import Response
from rloo import accuracy, batch_indices, compute_advantages, compute_rloo_loss, format_reward, sample_token

F = torch.float64


def advantages(rewards, mask=None, normalize=False):
    rewards = torch.tensor(rewards)
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return compute_advantages(rewards, mask, normalize)


def test_advantages_by_hand():
    assert advantages([[1.0, 2.0, 6.0]]).tolist() == [[-3.0, -1.5, 4.5]]
    nan = advantages([[1.0, math.nan, 3.0]], [[True, False, True]])
    assert nan.tolist() == [[-2.0, 0.0, 2.0]]
    assert advantages([[0.1] * 7, [0.3] * 7]).abs().max() == 0  # exactly: nothing to learn, no rounding noise


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(2, 9), st.integers(0, 2**31))
def test_advantages_are_the_reward_minus_the_mean_of_the_siblings(n, G, seed):
    random = np.random.default_rng(seed)
    rewards, mask = random.normal(size=(n, G)), random.random((n, G)) < 0.8
    found = advantages(rewards.tolist(), mask.tolist()).numpy()
    for i in range(n):
        for j in range(G):
            siblings = [rewards[i, k] for k in range(G) if k != j and mask[i, k]]
            expected = rewards[i, j] - np.mean(siblings) if mask[i, j] and siblings else 0.0
            assert found[i, j] == pytest.approx(expected, abs=1e-5)
    if mask.sum() > 2 and found[mask].std() > 1e-3:
        normal = advantages(rewards.tolist(), mask.tolist(), normalize=True)
        assert normal[torch.tensor(mask)].std(correction=0) == pytest.approx(1, abs=1e-4)


def test_loss_by_hand():
    new, owner = torch.tensor([0.1, 0.2, -0.4, 0.0]), torch.tensor([0, 0, 1, 1])
    loss, metrics = compute_rloo_loss(new, torch.zeros(4), torch.tensor([1.0, -1.0]), owner, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, 0.8])  # e^.3 clipped at 1.2; e^-.4 = 0.67 at 0.8 as A < 0
    assert metrics["policy/clipfrac_high"].tolist() == [1, 0]
    assert metrics["policy/clipfrac_low"].tolist() == [0, 1]
    loss, _ = compute_rloo_loss(new, torch.zeros(4), torch.tensor([-1.0, 1.0]), owner, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([math.exp(0.3), -math.exp(-0.4)])  # the pessimistic side stays
    loss, _ = compute_rloo_loss(torch.full((4,), 100.0), torch.zeros(4), torch.ones(2), owner, 0.2, 9e9)
    assert loss.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**31))
def test_loss_and_gradient_against_a_reference_in_float64(lengths, seed):
    torch.manual_seed(seed % 2**31)
    owner = torch.repeat_interleave(torch.tensor(lengths))
    old, A = -torch.rand(len(owner), dtype=F), torch.randn(len(lengths), dtype=F)
    new = (old + 0.1 * torch.randn(len(owner), dtype=F)).requires_grad_()
    low, high = 0.1, 0.3
    loss, _ = compute_rloo_loss(new, old, A, owner, low, high)
    expected = []
    for s in range(len(lengths)):
        rho = torch.exp((new - old)[owner == s].sum())
        expected.append(-torch.minimum(rho * A[s], rho.clamp(1 - low, 1 + high) * A[s]))
    expected = torch.stack(expected)
    assert torch.allclose(loss, expected, atol=1e-12)
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), new, retain_graph=True) for x in (loss, expected))
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=F)
    new, A = old.clone().requires_grad_(), torch.tensor([0.5, -2.0], dtype=F)
    compute_rloo_loss(new, old, A, torch.tensor([0, 0, 1]), 0.2, 0.2)[0].sum().backward()
    assert new.grad.tolist() == [-0.5, -0.5, 2.0]


def test_sampled_tokens_follow_the_distribution():
    logprobs = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(4000, 4)
    tokens = sample_token(logprobs, torch.linspace(0, 1, 4001, dtype=F)[:-1])
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert shares.tolist() == pytest.approx([0.5, 0, 0.3, 0.2], abs=1e-3)
    edge = sample_token(logprobs[:1], torch.tensor([1.0], dtype=F))
    assert 0 <= edge < 4
    assert 0 <= sample_token(torch.full((1, 4), math.nan), torch.tensor([0.5], dtype=F)) < 4


def test_the_stream_of_rows_is_shuffled_epochs():
    rows = batch_indices(0, 25, 10, seed=1)
    assert sorted(rows[:20]) == [*range(20)] and max(rows[:10]) == 9  # rows of the second epoch count from 10
    assert rows[:10] != [entry - 10 for entry in rows[10:20]]
    assert batch_indices(7, 9, 10, seed=1) == rows[7:16]
    assert batch_indices(0, 25, 10, seed=2) != rows


def test_accuracy_and_format():
    texts = ["<answer>Blue </answer>", "<answer>a</answer> <answer>blue</answer>", "blue"]
    texts += ["<answer>red</answer>"]
    assert accuracy(texts, ["blue"] * 4) == [1, 1, 0, 0] and accuracy(["<answer>3</answer>"], [3]) == [1]
    good = ["<answer>x</answer>", " <think>a\nb</think>\n<answer>x</answer>\n"]
    bad = ["x", "<answer>x", "<answer>x</answer> y", "<answer>x</answer>" * 2, "<think>a</think>"]
    assert format_reward(good + bad) == [1] * 2 + [0] * 5
    for answer in (["blue"], "", None):
        with pytest.raises(SystemExit) as stopped:
            accuracy(["x"], [answer])
        assert stopped.value.code == 2


def scored(functions: dict, prompt="Q", n: int = 2):
    rows = [{"prompt": prompt, "answer": f"a{i}"} for i in range(n)]
    prompts = [SimpleNamespace(row=row, messages=[]) for row in rows]
    responses = [Response(torch.tensor([i, 7]), torch.zeros(2), False) for i in range(n)]
    return rloo.score_responses(functions, prompts, responses, [f"t{i}" for i in range(n)], "state")


def test_rewards_get_what_trl_gives_them():
    seen = {}

    def plain(prompts, completions, completion_ids, trainer_state, log_metric, **columns):
        seen.update(columns, completions=completions, prompts=prompts)
        seen.update(ids=completion_ids, state=trainer_state)
        log_metric("mine", 3)
        return [0.5, None]

    async def slow(texts, **columns):
        await asyncio.sleep(0.01)
        return [len(text) for text in texts]

    results, logged = scored({"plain": plain, "slow": slow})
    assert results["slow"] == [2, 2] and results["plain"][0] == 0.5 and math.isnan(results["plain"][1])
    assert logged == [("mine", 3.0)]
    assert seen["answer"] == ["a0", "a1"] and seen["completions"] == ["t0", "t1"]
    assert seen["ids"] == [[0, 7], [1, 7]] and seen["prompts"] == ["Q", "Q"] and seen["state"] == "state"
    chat = [{"role": "user", "content": "Q"}]
    scored({"plain": plain}, prompt=chat)
    assert seen["completions"][0] == [{"role": "assistant", "content": "t0"}] and seen["prompts"][0] == chat
    with pytest.raises(TypeError) as error:  # a function that wants chats says what it got
        scored({"trl": lambda completions, **columns: [float(c[0]["content"] == "x") for c in completions]})
    assert "strings" in error.value.__notes__[0]
    for bad in ([1.0], [1.0, math.inf]):
        with pytest.raises(SystemExit):
            scored({"bad": lambda values=bad, **columns: values})


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


def messages(row: dict, tokenizer, **flags):
    return rloo.to_messages(rloo.Args(**flags), row, rloo.Path("."), tokenizer)


def test_pictures_go_to_their_places(tokenizer, vqa_rows):
    a, b = (Image.open(row["image"]).convert("RGB") for row in vqa_rows[:2])
    front = messages({"prompt": "Q", "image": a}, tokenizer)[0]["content"]
    assert [part["type"] for part in front] == ["image", "text"]
    marked = messages({"prompt": "A <image> and <image>?", "images": [a, b]}, tokenizer)[0]["content"]
    assert [part["type"] for part in marked] == ["text", "image", "text", "image", "text"]
    assert marked[1]["image"].tobytes() == a.tobytes() and marked[3]["image"].tobytes() == b.tobytes()
    parts = [{"type": "text", "text": "Q"}, {"type": "image", "image": vqa_rows[1]["image"]}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "see <image>"}]
    chat = messages({"messages": chat}, tokenizer, system_prompt="Be brief.")
    assert [m["role"] for m in chat] == ["system", "user", "assistant"]
    assert chat[1]["content"][1]["image"].tobytes() == b.tobytes() and chat[2]["content"][0]["type"] == "text"
    with pytest.raises(ValueError, match="2 places for images, but 1 images"):
        messages({"prompt": "<image><image>", "image": a}, tokenizer)
    raw = messages({"prompt": "Q", "image": rloo.Path(vqa_rows[0]["image"]).read_bytes()}, tokenizer)
    assert raw[0]["content"][0]["image"].tobytes() == a.tobytes()
