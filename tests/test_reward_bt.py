"""reward_bt: the loss in closed form, every form of data, scores and gradients against the unmodified model, runs on
one and two ranks, and what a saved folder gives."""

import re
import runpy
from itertools import combinations

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TINY, assert_same_run, chat, metrics_of, read_jsonl, weights_of, write_jsonl
from PIL import Image
from safetensors.torch import load_file
from test_families import VISION, folder_of  # noqa: F401

import reward_bt
from common.packing import PromptInfo
from reward_bt import Args, Ranking, calibration_error, compute_bt_loss, make_pairs, ranking_metrics

CPU = torch.device("cpu")


def ranking(K: int, margin: float = 0.0, weight: float = 1.0) -> Ranking:
    prompt, responses = PromptInfo(0, 1, ()), [torch.zeros(1)] * K
    return Ranking(prompt, responses, 1 + K, texts=[], margin=margin, weight=weight, columns={})


def mean_loss(scores: torch.Tensor, rankings: list[Ranking], smoothing: float, center: float) -> torch.Tensor:
    pairs = make_pairs(rankings, CPU)
    return (pairs.weights * compute_bt_loss(scores, pairs, smoothing, center)[0]).sum()


# --- loss and metrics ---


def test_worked_examples_of_the_docstrings():
    pairs = make_pairs([ranking(2, 0, 3), ranking(3, 0.5, 1)], CPU)
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([0, 2, 2, 3], [1, 3, 4, 4])
    assert pairs.margins.tolist() == [0, 0.5, 0.5, 0.5]
    assert pairs.weights.tolist() == pytest.approx([3 / 4, *[1 / 12] * 3])
    pairs = make_pairs([ranking(2, 0, 3), ranking(2, 0.5, 1)], CPU)
    losses, _ = compute_bt_loss(torch.tensor([1.0, 0, 0, 2]), pairs, 0.0, 0.1)
    assert losses.tolist() == pytest.approx([0.4133, 2.9789], abs=1e-4)
    assert calibration_error(torch.tensor([2.0, -2, 0]), torch.ones(3) / 3) == pytest.approx(0.2539, abs=1e-4)


@pytest.mark.parametrize("smoothing, center", [(0.0, 0.0), (0.0, 0.3), (0.2, 0.0), (0.1, 0.05)])
def test_loss_and_gradient_equal_the_closed_form(smoothing, center):
    """Rankings of 2, 4 and 3 responses with margins and weights, pair by pair by hand."""
    rankings = [ranking(2, 0.5, 1.0), ranking(4, 0.0, 0.5), ranking(3, -0.25, 2.0)]
    rewards = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = mean_loss(rewards, rankings, smoothing, center)
    (gradient,) = torch.autograd.grad(loss, rewards)
    expected, by_hand, start, r = 0.0, np.zeros(9), 0, rewards.detach().numpy()
    for own in rankings:
        pairs = list(combinations(range(start, start + len(own.responses)), 2))
        for i, j in pairs:
            w, d, total = own.weight / 3.5 / len(pairs), r[i] - r[j] - own.margin, r[i] + r[j]
            p = 1 / (1 + np.exp(-d))
            expected += w * (-(1 - smoothing) * np.log(p) - smoothing * np.log(1 - p) + center * total**2)
            slope = -(1 - smoothing) * (1 - p) + smoothing * p  # of the loss in d
            by_hand[i] += w * (slope + 2 * center * total)
            by_hand[j] += w * (-slope + 2 * center * total)
        start += len(own.responses)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert gradient.numpy() == pytest.approx(by_hand, rel=1e-5, abs=1e-8)
    shifted = mean_loss(rewards + 7.5, rankings, smoothing, center)
    assert (abs(float(shifted.detach()) - expected) < 1e-6) == (center == 0), "only centering sees a shift"


def metrics_by_hand(scores: list[float], sizes: list[int]) -> dict[str, float]:
    args = Args(label_smoothing=0.0, center_coef=0.5)
    return ranking_metrics(args, [ranking(K) for K in sizes], torch.tensor(scores))


def test_metrics_count_each_prompt_once_and_ties_as_one_half():
    # prompt 0: tie; prompt 1: right; prompt 2, three responses: 2 of 3 pairs right
    m = metrics_by_hand([1.0, 1.0, 2.0, 0.0, 3.0, 1.0, 2.0], [2, 2, 3])
    assert m["rm/accuracy"] == pytest.approx((0.5 + 1 + 2 / 3) / 3)
    assert m["rm/margin"] == pytest.approx((0 + 2 + (2 + 1 - 1) / 3) / 3)
    assert m["rm/chosen_rewards"] == pytest.approx((1 + 2 + (3 + 3 + 1) / 3) / 3)
    assert m["rm/rejected_rewards"] == pytest.approx((1 + 0 + (1 + 2 + 2) / 3) / 3)
    assert m["rm/loss"] == pytest.approx(m["rm/bt_loss"] + 0.5 * m["rm/center_loss"])
    flat = metrics_by_hand([0.0] * 8, [2] * 4)
    assert flat["rm/bt_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (flat["rm/accuracy"], flat["rm/ece"]) == (0.5, 0.0)
    assert metrics_by_hand([9.0, -9.0, -9.0, 9.0], [2, 2])["rm/ece"] == pytest.approx(0.5, abs=1e-3)


def test_calibration_error_against_a_plain_loop():
    rng = np.random.default_rng(0)
    gap, weights = rng.normal(size=500), rng.dirichlet(np.ones(500))
    confidence, expected = 1 / (1 + np.exp(-abs(gap))), 0.0
    for low in np.arange(0.5, 1, 0.05):
        inside = (confidence >= low) & (confidence < low + 0.05)
        if w := weights[inside].sum():
            accuracy = (weights * (gap > 0))[inside].sum() / w
            expected += w * abs(accuracy - (weights * confidence)[inside].sum() / w)
    found = calibration_error(torch.tensor(gap), torch.tensor(weights))
    assert float(found) == pytest.approx(expected, abs=1e-6)


# --- data ---


@pytest.fixture(scope="module")
def text(tiny_text_model):
    args = reward_bt.Args(model=tiny_text_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_model)
    return args, reward_bt.load_model(tiny_text_model, torch.float32).base_model, tokenizer


@pytest.fixture
def encode(text, tmp_path):
    """Rows -> their rankings, and the texts of prompt and response together."""

    def build(*rows: dict, **flags):
        args, model, tokenizer = text
        source = write_jsonl(tmp_path / "data.jsonl", list(rows))
        args = reward_bt.Args(**vars(args) | flags)
        data = reward_bt.load_data(args, source, "train", 0, model, tokenizer)
        rankings = [ranking for i in range(len(rows)) if (ranking := data.encode(i))]
        whole = [[torch.cat([r.prompt.ids, x]) for x in r.responses] for r in rankings]
        return rankings, [tokenizer.batch_decode(own) for own in whole]

    return build


FORMS = {
    "strings": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "prompt as chat": {"messages": chat("q"), "chosen": "good", "rejected": "bad"},
    "answers as chats": {"prompt": "q", "chosen": chat("", "good")[1:], "rejected": chat("", "bad")[1:]},
    "whole chats": {"chosen": chat("q", "good"), "rejected": chat("q", "bad")},
    "prompt and whole chats": {"prompt": "q", "chosen": chat("q", "good"), "rejected": chat("q", "bad")},
    "ranking": {"prompt": "q", "responses": ["good", "bad"]},
    "ranked chats": {"responses": [chat("q", "good"), chat("q", "bad")]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_text(form, encode):
    (ranking,), texts = encode(FORMS[form])
    assert texts == [["user: q\nassistant: good\nassistant: ", "user: q\nassistant: bad\nassistant: "]]
    assert ranking.prompt.length == len("user: q\nassistant: "), "all that they share is encoded once"
    assert ranking.texts == ["good", "bad"]


def test_turns_after_the_first_difference_belong_to_the_responses(encode):
    row = {"chosen": chat("q", "good", "so?", "yes"), "rejected": chat("q", "bad", "so?", "yes")}
    _, (texts,) = encode(row)
    assert texts[0] == "user: q\nassistant: good\nuser: so?\nassistant: yes\nassistant: "
    _, (texts,) = encode({"prompt": "q", "responses": ["a", "ab", "abc"]})  # one is the beginning of another
    assert [len(x) for x in texts] == [32, 33, 34]


def test_system_prompt_margin_weight_and_special_tokens(encode):
    row = {"prompt": "q<|end|>", "chosen": "good<|end|>", "rejected": "bad"}
    others = {**row, "margin": 0.5, "weight": 2}, {**row, "margin": None, "weight": 0.25}
    rankings, texts = encode(row, *others, system_prompt="be kind")
    assert texts[0][0] == "system: be kind\nuser: q< |end|>\nassistant: good< |end|>\nassistant: "
    assert [(r.margin, r.weight) for r in rankings] == [(0.0, 1.0), (0.5, 2), (0.0, 0.25)]


def test_unusable_rows_are_left_out_and_named(encode, text, tmp_path, capsys):
    good = {"prompt": "q", "chosen": "good", "rejected": "bad", "responses": None, "image": None}
    rows = [good, {**good, "chosen": "g" * 40}, {**good, "responses": ["alone"]}, {**good, "chosen": None}]
    rows += [{**good, "image": "gone.png"}, {**good, "prompt": None}]
    rankings, _ = encode(*rows, max_length=50)
    told = capsys.readouterr().err
    assert [r.prompt.index for r in rankings] == [0]
    assert [f"data.jsonl row {i} is left out" in told for i in range(6)] == [False, *[True] * 5]
    for reason in ("--max-length", "needs two responses", "gone.png"):
        assert reason in told
    data = reward_bt.load_data(text[0], str(tmp_path / "data.jsonl"), "train", 0, *text[1:])
    assert [r.prompt.index for r in reward_bt.gather_rankings(data, [0, 6, 12, 4])] == [0, 0, 0]
    with pytest.raises(SystemExit):
        reward_bt.gather_rankings(data, [0, 4, 5])
    assert "more than half of 3 rows" in capsys.readouterr().err


def test_held_out_sets_have_names(capsys):
    with pytest.raises(SystemExit):
        reward_bt.check_args(reward_bt.Args(eval_datasets=("held.jsonl",)))
    assert "--eval-datasets takes name=source" in capsys.readouterr().err


KINDS = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"


def test_easy_vqa_pairs_are_of_one_kind_and_follow_the_seed():
    rows = reward_bt.load_rows("easy-vqa", "test")
    first, again, other = (reward_bt.add_pairs(rows, seed) for seed in (1, 1, 2))
    assert first["rejected"] == again["rejected"] != other["rejected"]
    for row in first.select(range(0, 9673, 97)):
        sides = [re.fullmatch("<answer>(.*)</answer>", row[side])[1] for side in ("chosen", "rejected")]
        assert sides[0] == row["answer"] != sides[1]
        assert any(set(sides) <= set(kind.split()) for kind in KINDS)


# --- scores and gradients against the unmodified model ---


class Engine:
    """What main asks of a DeepSpeed engine, without one: gradients stay in the module."""

    def __init__(self, module):
        self.module, self.train, self.eval = module, module.train, module.eval
        self.set_gradient_accumulation_boundary = lambda last: None
        self.get_lr = lambda: [0.0]

    def __call__(self, pack):
        return self.module(pack)

    def backward(self, loss, scale_wrt_gas: bool) -> None:
        loss.backward()


def with_media(family: str, folder) -> list[dict]:
    """Pairs and rankings of texts, pictures and a video, as users write them."""
    rows = [("What is 2 + 2?", [], [], ["4", "five, I think", "no idea, sorry", "4 or so"])]
    rows += [("Say something.", [], [], ["Rivers are long.", "no"])]
    if family in VISION:
        rows += [("Is <image> like <image>?", ["1.png", "2.png"], [], ["yes", "not at all"])]
        rows += [("What is it?", ["0.png"], [], ["a dog", "a cat", "dog"])]
    if family == "qwen2_5_vl":
        rows += [("What moves?", [], ["clip.mp4"], ["the square", "nothing"])]
    rows = [dict(zip(("prompt", "images", "videos", "responses"), row)) for row in rows]
    rows[1] |= {"weight": 2.0, "margin": 0.3}
    write_jsonl(folder / "pairs.jsonl", [{"weight": None, "margin": None} | row for row in rows])
    return rows


def by_transformers(row: dict, folder, model, processor, weight) -> list[torch.Tensor]:
    """Scores by transformers alone: a chat with opened media, the processor's inputs, the model's own forward."""
    scores, how = [], {"return_tensors": "pt", "add_special_tokens": False}
    pictures = [Image.open(folder / name).convert("RGB") for name in row["images"]]
    how |= {"images": pictures} if pictures else {}
    for name in row["videos"]:
        frames, taken = transformers.video_utils.load_video(str(folder / name), fps=2.0, backend="pyav")
        how |= {"videos": [frames], "video_metadata": [taken], "do_sample_frames": False}
    marks = "" if "<image>" in row["prompt"] else "<image>" * len(pictures) + "<video>" * len(row["videos"])
    pieces = filter(None, re.split("(<image>|<video>)", marks + row["prompt"]))
    parts = [{"type": x[1:-1]} if x[0] == "<" else {"type": "text", "text": x} for x in pieces]
    for answer in row["responses"]:
        answer = [{"type": "text", "text": answer}]
        whole = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        if not hasattr(processor, "tokenizer"):
            whole = [m | {"content": "".join(part["text"] for part in m["content"])} for m in whole]
        inputs = processor(text=[processor.apply_chat_template(whole, tokenize=False)], **how)
        scores.append(model(**inputs).last_hidden_state[0, -1] @ weight)
    return scores


@pytest.mark.parametrize("family", "qwen2_5_vl qwen3_vl llava gemma3 llama gptj gpt2 mistral".split())
def test_main_has_the_gradients_of_the_unmodified_model(family, folder_of, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Packed where the family allows it, one response at a time, and with rankings that don't fit into a pack."""
    folder = folder_of(family)
    rows, modules = with_media(family, folder), []
    source, flags = str(folder / "pairs.jsonl"), {"total_steps": 1, "train_batch_size": len(rows)}
    flags |= {"dataset": source, "eval_datasets": (f"x={source}",), "output_dir": str(tmp_path)}
    args = Args(model=str(folder), center_coef=0.1, **flags)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    plain = reward_bt.load_model(args.model, torch.float32).base_model.train()  # its dropout is 0
    torch.manual_seed(args.seed)
    weight = reward_bt.RewardModel(plain).score.weight[0].detach().clone().requires_grad_()
    expected = torch.stack(sum([by_transformers(row, folder, plain, processor, weight) for row in rows], []))
    assert expected.std() > 0.1
    data = reward_bt.load_data(args, source, "train", 0, plain, processor)
    rankings = [data.encode(i) for i in range(len(rows))]
    mean_loss(expected, rankings, args.label_smoothing, args.center_coef).backward()
    known = ranking_metrics(args, rankings, expected.detach())
    largest = max(r.prompt.length + max(map(len, r.responses)) for r in rankings)
    assert largest < max(r.num_tokens for r in rankings), "the second pass splits a ranking"
    monkeypatch.setattr(reward_bt, "make_engine", lambda args, module, *rest: Engine(module))
    monkeypatch.setattr(reward_bt, "optimizer_step", lambda engine: 0.0)
    monkeypatch.setattr(reward_bt, "save_checkpoint", lambda args, run: modules.append(run.engine.module))
    for budget in (8192, largest):
        flags = {"max_length": largest, "micro_batch_tokens": budget, "run_name": str(budget)}
        metrics = run(tmp_path, **vars(args) | flags)[-1]
        assert ("warning: one response at a time" in capsys.readouterr().out) == (family == "gptj")
        assert {name: metrics[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-4)
        chosen = expected[make_pairs(rankings, CPU).chosen].tolist()
        pairs = read_jsonl(tmp_path / str(budget) / "samples.jsonl")[len(chosen) :]
        assert [pair["chosen_reward"] for pair in pairs] == pytest.approx(chosen, abs=1e-4)
        own = [*modules[-1].model.parameters(), modules[-1].score.weight]
        for ours, theirs in zip(own, [*plain.parameters(), weight], strict=True):
            exact = torch.zeros_like(ours) if theirs.grad is None else theirs.grad.view_as(ours)
            grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
            assert (grad - exact).abs().max() < 1e-4 * max(1, exact.abs().max())


# --- runs ---


FLAGS = {"run_name": "run", "total_steps": 4, "train_batch_size": 8, "warmup_steps": 0, "learning_rate": 1e-3}
FLAGS |= {"eval_samples": 8, "eval_steps": 0, "seed": 3}


def run(tmp_path, **flags) -> list[dict]:
    """A run in this process -> its metrics."""
    given = FLAGS | {"output_dir": str(tmp_path)} | flags
    reward_bt.main(reward_bt.Args(**given))
    return metrics_of(tmp_path / given["run_name"])


@pytest.mark.slow
def test_adapters_train_with_the_head_and_are_merged(tmp_path):
    first, *_, last = run(tmp_path, lora_rank=4, total_steps=12, learning_rate=3e-3, train_batch_size=16)
    assert last["rm/loss"] != first["eval/easy-vqa/loss"]
    start = reward_bt.load_model(TINY, torch.float32).base_model
    torch.manual_seed(3)
    head = reward_bt.RewardModel(start).score.weight
    before, end = start.state_dict() | {"score.weight": head}, weights_of(tmp_path / "run/checkpoint-12")
    changed = {name for name in before if not torch.equal(before[name], end[name])}
    assert before.keys() == end.keys() and "score.weight" in changed
    assert changed - {"score.weight"} == {n for n in before if re.search(r"language_model.*proj\.weight", n)}


@pytest.mark.slow
def test_two_ranks_and_every_zero_stage_train_alike(start, tmp_path):
    """Text and pictures in one step, so that some packs have none."""
    rows = [{"prompt": f"what is {i}?", "chosen": "one", "rejected": "two or three"} for i in range(8)]
    easy = reward_bt.add_pairs(reward_bt.load_rows("easy-vqa", "test").select(range(0, 800, 50)), 0)
    names = ("prompt", "image", "chosen", "rejected")
    rows = [{name: row.get(name) for name in names} for row in [*rows, *easy]]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {"dataset": source, "total_steps": 2, "micro_batch_tokens": 1024, "max_length": 512}
    flags |= {"eval_datasets": (f"held={source}",), "train_batch_size": 12}
    run(tmp_path, **flags, run_name="one")
    for stage in (0, 2, 3):
        own = flags | {"zero_stage": stage, "run_name": f"zero{stage}", "output_dir": tmp_path}
        process = start("reward_bt", 2, **FLAGS | own)
        assert process.wait(timeout=500) == 0, (tmp_path / "log").read_text()[-3000:]
        assert_same_run(tmp_path / "one", tmp_path / f"zero{stage}", 1e-4, of_weights=1e-3)


@pytest.mark.slow
def test_bf16_makes_no_ties(tmp_path):
    """128 responses to 64 prompts have 128 scores: the head works in fp32."""
    rows = [{"prompt": f"what is {i}?", "chosen": "one", "rejected": "two or three"} for i in range(64)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {"dataset": source, "eval_datasets": (f"x={source}",), "eval_samples": 64, "total_steps": 1}
    run(tmp_path, **flags, dtype="bfloat16")
    pairs = read_jsonl(tmp_path / "run" / "samples.jsonl")[:64]
    assert len({pair[f"{side}_reward"] for pair in pairs for side in ("chosen", "rejected")}) == 128


# --- what a saved folder gives ---


@pytest.mark.parametrize("template", ["", "<|end|>"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_saved_classifier_gives_the_same_scores_with_any_padding(side, template, tiny_text_model, tmp_path):
    """A tokenizer whose pad token is EOS, chats that end in EOS or not; batches of unequal lengths."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_model)
    tokenizer.add_special_tokens({"unk_token": "<|unk|>"})
    end = template + "{% endfor %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}assistant: ", end)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_text_model)
    model.resize_token_embeddings(len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "start")
    rows = [{"prompt": f"say {i}", "chosen": "a" * (i + 1), "rejected": "b" * (9 - 2 * i)} for i in range(4)]
    source = write_jsonl(tmp_path / "d.jsonl", rows)
    flags = {"model": str(tmp_path / "start"), "dataset": source, "eval_datasets": (f"x={source}",)}
    run(tmp_path, **flags, total_steps=1)
    folder = tmp_path / "run" / "checkpoint-1"
    samples = [s for s in read_jsonl(tmp_path / "run" / "samples.jsonl") if s["train/step"] == 1]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    chats = [chat(s["prompt"], s[name]) for s in samples for name in ("chosen", "rejected")]
    texts = [tokenizer.apply_chat_template(x, tokenize=False) for x in chats]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        logits = loaded(**batch).logits
    expected = [s[name] for s in samples for name in ("chosen_reward", "rejected_reward")]
    assert logits.shape == (8, 1) and logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_saved_backbone_head_and_second_stage(tmp_path, monkeypatch):
    """The reloaded tiny VLM scores as in the run, also as an example's reward, and is where a next run begins."""
    run(tmp_path, total_steps=2)
    folder, samples = tmp_path / "run" / "checkpoint-2", read_jsonl(tmp_path / "run" / "samples.jsonl")
    model = transformers.AutoModel.from_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    weight = load_file(folder / "score.safetensors")["score.weight"][0]
    samples, expected, found = [s for s in samples if s["train/step"] == 2], [], []
    for s in samples:
        row = {"prompt": s["prompt"], "images": [s["image"]], "videos": []}
        row["responses"] = [s["chosen"], s["rejected"]]
        with torch.no_grad():
            found += by_transformers(row, tmp_path, model, processor, weight)
        expected += [s["chosen_reward"], s["rejected_reward"]]
    assert [float(x) for x in found] == pytest.approx(expected, abs=1e-5)
    again = run(tmp_path, run_name="again", model=str(folder), total_steps=1)
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    for key in ("accuracy", "loss", "chosen_rewards"):
        assert again[0][f"eval/easy-vqa/{key}"] == pytest.approx(last[f"eval/easy-vqa/{key}"], abs=1e-5)

    monkeypatch.setenv("REWARD_MODEL", str(folder))
    example = runpy.run_path(str(ROOT / "examples/reward_model.py"))
    chats, texts = [], []
    for s in samples:
        content = [{"type": "image", "image": Image.open(s["image"]).convert("RGB")}]
        chats += [[{"role": "user", "content": [*content, {"type": "text", "text": s["prompt"]}]}]] * 2
        texts += [s["chosen"], s["rejected"]]
    assert example["score"](chats=chats, texts=texts, prompts=[]) == pytest.approx(expected, abs=1e-5)
