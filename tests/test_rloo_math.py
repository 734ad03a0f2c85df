"""rloo.py, function by function: algorithm, rewards, rollouts, data, optimizer, weights."""

import asyncio
import base64
import contextlib
import io
import math
import os
import pickle
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import peft
import pytest
import torch
import transformers
from conftest import TINY, chat, filled_args, write_jsonl
from packaging.version import Version
from PIL import Image
from test_families import write_video

import rloo
from common import chats, decoding
from common.decoding import Response, sample_token
from common.packing import Prompt
from rloo import accuracy_reward, compute_advantages, compute_rloo_loss, format_reward


def advantages(rewards, kept=None, normalize=False):
    rewards = torch.tensor(rewards)
    kept = torch.ones_like(rewards, dtype=torch.bool) if kept is None else torch.tensor(kept)
    return compute_advantages(rewards, kept, normalize)


def test_advantages_by_hand():
    assert advantages([[1.0, 2.0, 6.0]]).tolist() == [[-3.0, -1.5, 4.5]]
    assert advantages([[1.0, math.nan, 3.0]], [[True, False, True]]).tolist() == [[-2.0, 0.0, 2.0]]
    assert advantages([[1.0, 2.0]], [[True, False]]).tolist() == [[0, 0]]  # there is no other response
    assert advantages([[0.1] * 7, [0.3] * 7]).abs().max() == 0  # exactly, without rounding noise
    normalized = advantages([[1.0, 2.0, 6.0]], normalize=True)
    assert normalized.std(correction=0) == pytest.approx(1) and normalized[0, 2] > 0


def test_loss_by_hand():
    new, response_of_token = torch.tensor([0.1, 0.2, -0.4, 0.0]), torch.tensor([0, 0, 1, 1])
    new.requires_grad_()
    old = torch.zeros(4)
    loss, metrics = compute_rloo_loss(new, old, torch.tensor([1.0, -1.0]), response_of_token, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, 0.8])  # e^.3 clipped at 1.2; e^-.4 = 0.67 at 0.8 as A < 0
    assert not torch.autograd.grad(loss.sum(), new)[0].any()
    assert metrics["policy/clipfrac_high"].tolist() == [1, 0]
    assert metrics["policy/clipfrac_low"].tolist() == [0, 1]
    loss, _ = compute_rloo_loss(new, old, torch.tensor([-1.0, 1.0]), response_of_token, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([math.exp(0.3), -math.exp(-0.4)])  # the lower bound is not clipped
    gradient = torch.autograd.grad(loss.sum(), new)[0]
    assert torch.equal(gradient, loss[response_of_token]), "each token's is that of its response"
    loss, _ = compute_rloo_loss(torch.full((4,), 100.0), old, torch.ones(2), response_of_token, 0.2, 9e9)
    assert loss.isfinite().all()


def test_sampled_tokens_follow_the_distribution():
    logprobs = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(4000, 4)
    tokens = sample_token(logprobs, torch.linspace(0, 1, 4001).double()[:-1])
    frequencies = torch.bincount(tokens, minlength=4) / 4000
    assert frequencies.tolist() == pytest.approx([0.5, 0, 0.3, 0.2], abs=1e-3)
    assert 0 <= sample_token(logprobs[:1], torch.ones(1).double()) < 4
    assert 0 <= sample_token(torch.full((1, 4), math.nan), torch.ones(1).double() / 2) < 4


def test_rows_are_shuffled_epochs():
    def rows(steps, size: int, seed: int = 1) -> list[int]:
        args = rloo.Args(seed=seed, prompts_per_rollout=size)
        pairs = [pair for step in steps for pair in rloo.shuffled_rows(args, step, 10)]
        return [10 * epoch + row for epoch, row in pairs]

    indices = rows([1], 25)
    assert sorted(indices[:20]) == [*range(20)] and max(indices[:10]) == 9  # the second epoch starts at 10
    assert indices[:10] != [index - 10 for index in indices[10:20]]
    assert rows(range(1, 6), 5) == rows(range(1, 26), 1) == rows([1, 2], 15)[:25] == indices
    assert rows([1], 25, seed=2) != indices


# ---- rewards, rollouts, evaluation ----
def test_accuracy_and_format():
    texts = ["<answer>Blue </answer>", "<answer>a</answer> <answer>blue</answer>", "blue"]
    assert accuracy_reward([*texts, "<answer>red</answer>"], ["blue"] * 4) == [1, 1, 0, 0]
    numbers = ["<answer>3</answer>", "<answer>1234567</answer>", "<answer>0.12345678</answer>"]
    assert accuracy_reward(numbers, [3, 1234567.0, 0.12345678]) == [1, 1, 1]
    good = ["<answer>x</answer>", " <think>a\nb</think>\n<answer>x</answer>\n", "a</think><answer>x</answer>"]
    bad = ["x", "<answer>x", "<answer>x</answer> y", "<answer>x</answer>" * 2, "<think>a</think>"]
    assert format_reward(good + bad) == [1] * 3 + [0] * 5


def score(functions: dict, prompt="Q"):
    rows = [{"prompt": prompt, "answer": answer} for answer in ("a0", "a1")]
    prompts = [SimpleNamespace(row=row, messages=[]) for row in rows]
    responses = [Response(torch.tensor([i, 7]), torch.zeros(2), False) for i in range(2)]
    return rloo.score_responses(functions, prompts, responses, ["t0", "t1"], "state")


def test_rewards_are_called_as_in_trl():
    received = {}

    def plain(log_metric, log_extra, **columns):
        received.update(columns)
        log_metric("mine", 3)
        log_metric("mine", 5)
        log_extra("note", ["x", "y"])
        return [0.5, None]

    lock = asyncio.Lock()  # bound to the event loop of its first call, as HTTP clients are

    async def length(text) -> int:
        async with lock:
            await asyncio.sleep(0.01)
        return len(text)

    async def slow(texts, **columns):
        return await asyncio.gather(*map(length, texts))

    score({"slow": slow})
    results, columns, logged_values = score({"plain": plain, "slow": slow})
    assert columns == {"note": ["x", "y"]}
    assert results["slow"] == [2, 2] and results["plain"][0] == 0.5 and math.isnan(results["plain"][1])
    assert logged_values == [("reward_metrics/mine", 3.0), ("reward_metrics/mine", 5.0)]
    expected = {"answer": ["a0", "a1"], "completions": ["t0", "t1"], "completion_ids": [[0, 7], [1, 7]]}
    expected |= {"prompts": ["Q", "Q"], "trainer_state": "state"}
    assert received | expected == received
    score({"plain": plain}, prompt=chat("Q"))
    assert received["completions"][0] == chat("", "t0")[1:] and received["prompts"][0] == chat("Q")


@pytest.fixture
def fake():
    """args, run and data for collect_rollout: each response is the number of its row and of its sample."""

    def generate(prompts, num_samples, temperature):
        sampler.seeds.extend(prompt.seed for prompt in prompts)
        ids = [[10 + p.row_id, 20 + j] for p in prompts for j in range(num_samples)]
        return [Response(torch.tensor(i), torch.zeros(2), truncated=i[1] == 21) for i in ids]

    def try_encode(row: int) -> Prompt | None:
        if row == 3:
            return None
        columns = {"prompt": f"Q{row}", "answer": str(10 + row), "rating": [1, None][row % 2]}
        columns |= {"row": "a column of the dataset", "phase": "another one", "photo": "data:image/png;AA"}
        return Prompt(row, 2, (), {}, {}, torch.arange(2), {}, row=columns, messages=[{"content": "Q"}])

    decode = lambda ids, **options: [" ".join(map(str, x.tolist())) for x in ids]  # noqa: E731
    tokenizer = SimpleNamespace(batch_decode=decode)
    data = SimpleNamespace(source="data", rows=range(6), tokenizer=tokenizer, try_encode=try_encode)
    sampler = SimpleNamespace(generate=generate, seeds=[])
    run = SimpleNamespace(sampler=sampler, eval_data=data, state={"step": 0})

    def own(texts, answer, log_metric, **columns):
        log_metric("m", float(answer[0]))
        return [float(text.startswith(a)) for text, a in zip(texts, answer)]

    run.reward_funcs = {"own": own, "rating": lambda rating, **columns: rating}
    return rloo.Args(rewards=("own", "rating"), reward_weights=(0.9, 0.1)), run, data


def rows_of(*numbers: int) -> list[tuple[int, int]]:
    return [divmod(number, 6) for number in numbers]  # (epoch, row)


def test_scores_are_weighted_sums_and_rewards_see_their_own_rows(fake):
    args, run, data = fake
    rollout = rloo.collect_rollout(args, run, data, rows_of(2, 7, 0), num_samples=3, temperature=1.0, step=1)
    assert [prompt.row_id for prompt in rollout.prompts] == [2, 1, 0]
    assert rollout.rewards["own"].tolist() == [[1.0] * 3] * 3
    assert rollout.scores[:, 0].tolist() == pytest.approx([1.0, 0.9, 1.0])  # None does not count as 0
    assert rollout.truncated.tolist() == [[False, True, False]] * 3
    records = [(record["row"], record["response"]) for record in rollout.sample_records]
    assert records == [(2, "12 20"), (1, "11 20"), (0, "10 20")]  # not the dataset's column named row
    assert not any("photo" in record for record in rollout.sample_records)  # it would fill the logs
    ratings = [record.get("reward/rating") for record in rollout.sample_records]
    assert ratings == [1.0, None, 1.0]  # JSON has no NaN
    assert rollout.logged_metrics == {"reward_metrics/m": 12.0}
    only_rating = replace(args, reward_weights=(0.0, 1.0))  # a weight of 0: for logs only
    scores = rloo.collect_rollout(only_rating, run, data, rows_of(1, 2), 1, temperature=1.0, step=1).scores
    assert scores.isnan().tolist() == [[True], [False]]  # no reward applies to row 1
    rloo.collect_rollout(args, run, data, rows_of(1, 7), 1, temperature=1.0, step=1)
    assert len({*run.sampler.seeds[-2:]}) == 2, "a row that occurs twice gets different responses"


def test_only_errors_of_a_row_skip_a_row(fake, capsys, refused, text_data, monkeypatch):
    args, run, data = fake
    rollout = rloo.collect_rollout(args, run, data, rows_of(2, 3, 1), 1, 1.0, step=1)
    assert len(rollout.prompts) == 2
    rollout = rloo.collect_rollout(args, run, data, rows_of(3, 9, 1), 1, 1.0, step=1)
    assert len(rollout.prompts) == 1  # two bad rows
    for rows in ([3, 9, 15], [3] * 17 + [1] * 15):
        with refused("rows were skipped"):
            rloo.collect_rollout(args, run, data, rows_of(*rows), 1, 1.0, step=1)
    data = text_data()
    for error in (rloo.RowError("too small"), FileNotFoundError("a.png"), SyntaxError("broken PNG file")):
        monkeypatch.setattr(rloo, "build_messages", Mock(side_effect=error))
        assert data.try_encode(0) is None and f"row 0 is skipped: {error}" in capsys.readouterr().err
        with pytest.raises(type(error)):  # a pack needs the row, so that it can't be skipped any more
            data.encode(0)
    part = {"type": "text", "text": "x"}
    monkeypatch.setattr(rloo, "build_messages", lambda *_: chat([part], [part]))
    assert data.try_encode(0) is None and "ends with an assistant turn" in capsys.readouterr().err
    monkeypatch.setattr(rloo, "build_messages", Mock(side_effect=ValueError("a bug of a fork")))
    with pytest.raises(ValueError, match="a bug of a fork"):
        data.try_encode(0)


def test_evaluation_metrics_by_hand(fake, monkeypatch):
    args, run, _ = fake
    calls = []
    real = rloo.collect_rollout

    def collect(args, run, data, indices, num_samples, temperature, step):
        calls.append((indices, num_samples, temperature))
        rollout = real(args, run, data, rows_of(0, 2), num_samples, temperature, step)
        correct = torch.tensor([[0.0, 1.0, 0.0], [math.nan] * 3])  # it does not apply to row 2
        return replace(rollout, rewards={"accuracy": correct[:, :num_samples]})

    monkeypatch.setattr(rloo, "collect_rollout", collect)
    args = replace(args, eval_prompts=4, eval_num_samples=3, temperature=0.7)
    metrics, records = rloo.evaluate(args, run)
    rloo.evaluate(replace(args, seed=2), run)
    assert metrics["eval/pass@3"] == 1 and metrics["eval/sampled_reward_accuracy"] == pytest.approx(1 / 3)
    assert metrics["eval/greedy_reward_accuracy"] == 0 and metrics["eval/greedy_score"] == 1
    assert metrics["eval/greedy_reward_metrics/m"] == 10.0
    assert calls[:2] == calls[2:] and [call[1:] for call in calls[:2]] == [(1, 0.0), (3, 0.7)]
    assert len(set(calls[0][0])) == 4
    assert [record["phase"] for record in records[::2]] == ["eval_greedy", "eval_sampled"]


def test_means_over_ranks_count_entries(monkeypatch):
    monkeypatch.setattr(rloo, "WORLD_SIZE", 2)
    monkeypatch.setattr(rloo.dist, "all_reduce", lambda totals: totals.add_(torch.tensor([[6.0, 1.0]])))
    assert rloo.mean_over_ranks({"x": [torch.tensor([1.0, 2.0])]}) == {"x": 3.0}


def test_batches_are_counted_in_responses(monkeypatch):
    calls = []
    monkeypatch.setattr(decoding, "generate", lambda **how: calls.append(how) or how["prompts"])
    args = filled_args("rloo", max_num_seqs=8, micro_batch_tokens=4096)
    sampler = rloo.HFSampler(args, model="model", eos_ids=[7], run_dir=None)
    for num_samples, expected in ((1, [8, 2]), (4, [2] * 5), (16, [1] * 10)):
        calls.clear()
        assert sampler.generate([*range(10)], num_samples, 0.5) == [*range(10)]
        assert [len(call["prompts"]) for call in calls] == expected
    expected = {"max_tokens": 4096, "max_new_tokens": 24, "temperature": 0.5}
    assert calls[0] | expected == calls[0]


# ---- data ----
@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


def messages(row: dict, tokenizer, **flags):
    return rloo.build_messages(rloo.Args(**flags), row, rloo.Path("."), tokenizer)


def test_short_videos_are_no_traceback(tmp_path):
    write_video(clip := tmp_path / "clip.mp4", num_frames=3)
    with contextlib.suppress(chats.RowError):  # transformers 5.23 returns a frame, older ones an IndexError
        chats.load_video(str(clip), tmp_path, fps=2.0)


def test_images_replace_their_markers(tokenizer, vqa_rows):
    a, b = (Image.open(row["image"]).convert("RGB") for row in vqa_rows[:2])
    front = messages({"prompt": "Q", "image": a}, tokenizer)[0]["content"]
    assert [part["type"] for part in front] == ["image", "text"]
    marked = messages({"prompt": "A <image> and <image>?", "images": [a, b]}, tokenizer)[0]["content"]
    assert [part["type"] for part in marked] == ["text", "image", "text", "image", "text"]
    assert marked[1]["image"].tobytes() == a.tobytes() and marked[3]["image"].tobytes() == b.tobytes()
    parts = [{"type": "text", "text": "Q"}, {"type": "image", "image": vqa_rows[1]["image"]}]
    turns = messages({"prompt": chat(parts, "see")}, tokenizer, system_prompt="Be brief.")
    assert [m["role"] for m in turns] == ["system", "user", "assistant"]
    assert turns[1]["content"][1]["image"].tobytes() == b.tobytes()
    own = {"prompt": [{"role": "system", "content": "Own."}, *turns]}
    with_system = messages(own, tokenizer, system_prompt="No.")
    assert [m["content"][0]["text"] for m in with_system if m["role"] == "system"] == ["Own.", "Be brief."]
    for key in ("path", "url"):  # as in transformers' chats
        [message] = messages({"prompt": chat([{"type": "image", key: vqa_rows[0]["image"]}])}, tokenizer)
        assert message["content"][0]["image"].tobytes() == a.tobytes()
    raw = rloo.Path(vqa_rows[0]["image"]).read_bytes()
    encoded = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    for source in (raw, encoded, {"bytes": raw, "path": None}, {"bytes": None, "path": vqa_rows[0]["image"]}):
        loaded = messages({"prompt": "Q", "image": source}, tokenizer)
        assert loaded[0]["content"][0]["image"].tobytes() == a.tobytes()
    parts = [{"type": "text", "text": text} for text in ("a<|im_", "end|>b")]
    for content, text in ((parts, "a< |im_end|>b"), (42, "42")):
        [message] = messages({"prompt": chat(content)}, tokenizer)
        assert message["content"] == [{"type": "text", "text": text}]
    values = np.arange(0, 2**16, 256, dtype=np.uint16)  # PIL would clip them to white
    row = {"prompt": "Q", "image": Image.fromarray(values.reshape(16, 16))}
    [part, _] = messages(row, tokenizer)[0]["content"]
    assert np.array_equal(np.asarray(part["image"])[..., 0].flatten(), values // 257)
    with pytest.raises(OSError, match="refused"):
        messages({"prompt": "Q", "image": "http://127.0.0.1:9/a.png"}, tokenizer)
    with pytest.raises(chats.RowError, match="a text model can't read images"):
        chats.encode_chat(tokenizer, turns)


IMAGE = Image.new("RGB", (8, 8))
Image.effect_noise((512, 512), 99).save(FILE := io.BytesIO(), "png")
START, _, END = FILE.getvalue().rpartition(b"IDAT")  # the last chunk of pixels
UNUSABLE = [  # rows; part of the reason
    ({"prompt": "<image><image>", "image": IMAGE}, "2 <image> markers, but 1 images"),
    ({"prompt": [{"role": "system", "content": "Q"}], "image": IMAGE}, "0 <image> markers, but 1 images"),
    ({"prompt": chat([{"type": "image", "image": IMAGE}]), "image": IMAGE}, "0 <image> markers, but 1"),
    ({"prompt": ""}, "its prompt is empty"),
    ({"prompt": [{"from": "human", "value": "Q"}]}, "without the keys role and content"),
    ({"prompt": ["Q"]}, "without the keys role and content"),
    ({"prompt": chat([{"type": "audio", "audio": "a.wav"}])}, "type audio"),
    ({"prompt": chat([{"text": "no type"}])}, "parts with a type"),
    ({"prompt": [{"role": "user", "content": "Q", "tool_calls": [1]}]}, "tool_calls are not supported"),
    ({"prompt": "Q", "images": [None]}, "can't load an image"),
    ({"prompt": "Q", "image": "data:image/png;base64,A"}, "can't load an image"),
    ({"prompt": "Q", "image": START + bytes(4) + END}, "can't load an image"),
]


@pytest.mark.parametrize("row, reason", UNUSABLE)
def test_unusable_rows_are_refused_with_a_reason(row, reason, tokenizer):
    with pytest.raises(rloo.RowError, match=reason):
        messages(row, tokenizer)


def test_functions_of_files_can_be_pickled(tmp_path):
    (tmp_path / "math.py").write_text("def score(texts, **columns):\n    return [1.0]\n")
    score = rloo.load_callable("--rewards", f"{tmp_path}/math.py:score", {})
    assert pickle.loads(pickle.dumps(score)) is score


@pytest.fixture
def text_data(tiny_text_model, tmp_path):
    """Function from flags to the data of three rows of text, of which one has an answer."""
    rows = [{"prompt": "How long is this?", "answer": answer} for answer in ("?", "", None)]
    args = filled_args("rloo", model=tiny_text_model)
    model = rloo.load_model(args, args.model)
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    return lambda **flags: rloo.PromptDataset(replace(args, **flags), source, "train", model, processor)


def test_prompts_that_are_too_long_or_have_no_answer_are_skipped(text_data, capsys):
    length = text_data().encode(0).length
    kept = [text_data(max_prompt_length=n).try_encode(0) is not None for n in (length, length - 1)]
    assert kept == [True, False]
    assert [text_data().try_encode(i) for i in (1, 2)] == [None, None]
    error = capsys.readouterr().err
    assert "exceed --max-prompt-length" in error
    assert "--rewards accuracy needs an answer, not None" in error


# ---- signals, optimizer, weights ----
@pytest.mark.parametrize("rank", [None, "0"])
def test_a_second_signal_ends_a_process_without_a_launcher(monkeypatch, rank):
    """Whichever of the two it is. torchrun repeats signals that the rank has received already."""
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    received = rloo.catch_signals()
    if (child := os.fork()) == 0:  # such as a worker of a reward function
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM and not received
    os.kill(os.getpid(), signal.SIGINT)
    with contextlib.nullcontext() if rank else pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == ([signal.SIGINT, signal.SIGTERM] if rank else [signal.SIGINT])


class Two(torch.nn.Module):
    """A matrix and a vector; the loss is g times the sum of both."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.ones(2, 2))
        self.vector = torch.nn.Parameter(torch.ones(2))

    def forward(self, g: float):
        return g * (self.matrix.sum() + self.vector.sum())


def steps_of(gradients: list[float], **flags) -> tuple[list, list, list]:
    """Gradient norms, learning rates and parameters after each optimizer step of a new DeepSpeed engine."""
    rloo.init_distributed()
    args = filled_args("rloo", **flags)
    engine = rloo.init_deepspeed_engine(args, Two())
    norms, rates, values = [], [], []
    for update, g in enumerate(gradients):
        engine.set_gradient_accumulation_boundary(True)
        rates.append(0.1 * rloo.lr_factor(args, update, len(gradients)))
        engine.backward(engine(g))
        norms.append(rloo.optimizer_step(engine, rates[-1]))
        values.append([parameter.flatten()[0].item() for parameter in engine.module.parameters()])
    return norms, rates, values


def test_schedule_clipping_weight_decay_and_skipped_steps():
    flags = {"warmup_updates": 4, "min_lr_ratio": 0.1}
    norms, rates, values = steps_of([1.0] * 10, weight_decay=0.1, max_grad_norm=9.0, **flags)
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 6)) for t in range(1, 7)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, *(0.1 * x for x in cosine)])
    assert norms == pytest.approx([math.sqrt(6)] * 10)
    matrix, vector = 1.0, 1.0
    for rate, value in zip(rates, values):  # Adam moves by the rate if the gradient is constant
        matrix, vector = matrix * (1 - rate * 0.1) - rate, vector - rate
        assert value == pytest.approx([matrix, vector], abs=1e-5)
    norms, rates, values = steps_of([100.0, 1.0], warmup_updates=0, min_lr_ratio=1.0, max_grad_norm=1e-3)
    assert norms == pytest.approx([100 * math.sqrt(6), math.sqrt(6)])
    assert values[1] == pytest.approx([0.8, 0.8], abs=1e-3)  # 0.83 without clipping
    norms, _, values = steps_of([1.0, math.inf, 1.0], warmup_updates=0)
    assert math.isnan(norms[1]) and values[0] == values[1] != values[2]


def test_gradients_of_many_packs_are_added_in_fp32():
    """In bf16, 1 + 0.001 is 1, so 64 small gradients would be lost."""
    rloo.init_distributed()
    args = filled_args("rloo", dtype="bfloat16", max_grad_norm=9.0)
    engine = rloo.init_deepspeed_engine(args, Two())
    for k, g in enumerate([1.0] + 64 * [0.001]):
        engine.set_gradient_accumulation_boundary(k == 64)
        engine.backward(engine(g))
    assert rloo.optimizer_step(engine, 0.1) == pytest.approx(math.sqrt(6) * 1.064, rel=1e-4)


def test_an_invalid_generation_config_is_refused_before_training(tmp_path, refused):
    """save_pretrained would refuse it, after training."""
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"top_p": 0.6, "eos_token_id": 2}')
    with refused("can't load the model"):
        rloo.load_model(filled_args("rloo"), str(tmp_path / "model"))


@pytest.mark.parametrize("family", [None, "mixtral", "deepseek_v3"])  # the bundled model, mixtures of experts
def test_merged_lora_weights_give_the_same_logits(family, folder_of):
    if family and Version(peft.__version__) < Version("0.21"):
        pytest.skip("older PEFT refuses them: no modules were targeted for adaptation")
    source = str(folder_of(family)) if family else TINY
    model, plain = (rloo.load_model(filled_args("rloo"), source) for _ in range(2))
    rloo.prepare_for_training(rloo.Args(lora_rank=4), rloo.Policy(model, 1.0))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02 if family is None else 0.2)
    ids = torch.arange(20, 50)[None]
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        plain.load_state_dict(dict(rloo.iter_full_weights(model)))
        adapted, merged = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert (adapted - before).abs().max() > 0.1
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
