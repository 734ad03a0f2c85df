"""reward_bt.py: the loss, data, rewards and gradients of the unmodified model, runs, saved checkpoints."""

import math
import re
import runpy
import shutil
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import conftest
import huggingface_hub
import pytest
import torch
import transformers
from conftest import chat, filled_args, metrics_of, read_jsonl, weights_of, write_jsonl
from PIL import Image
from safetensors.torch import load_file, save_file

import ppo_vl
import reward_bt
from common import packing
from common.packing import PromptInfo
from reward_bt import Args, Ranking, RankingDataset, compute_bt_loss, make_pairs, pair_metrics

EXPORT = runpy.run_path(str(conftest.ROOT / "examples/export_classifier.py"))


def ranking(K: int, margin: float = 0.0) -> Ranking:
    return Ranking(PromptInfo(0, 1, ()), [None] * K, texts=[], margin=margin, columns={})


def mean_loss(rewards: torch.Tensor, rankings: list[Ranking], smoothing: float, center: float):
    pairs = make_pairs(rankings)
    chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
    losses, _ = compute_bt_loss(chosen, rejected, pairs.margins, smoothing, center)
    return (pairs.weights * losses).sum()


# --- loss and metrics ---
@pytest.mark.parametrize("smoothing, center", [(0.2, 0.0), (0.1, 0.05)])
def test_loss_and_gradient_equal_the_closed_form(smoothing, center):
    """Rankings of 2, 4 and 3 responses with margins, pair by pair."""
    rankings = [ranking(2, 0.5), ranking(4), ranking(3, -0.25)]
    r = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, expected, start = mean_loss(r, rankings, smoothing, center), 0.0, 0
    for x in rankings:
        pairs = list(combinations(range(start, start + len(x.responses)), 2))
        for i, j in pairs:
            p = 1 / (1 + (-(r[i] - r[j] - x.margin)).exp())
            bt = -(1 - smoothing) * p.log() - smoothing * (1 - p).log()
            expected = expected + (bt + center * (r[i] + r[j]) ** 2) / 3 / len(pairs)
        start += len(x.responses)
    gradients = [torch.autograd.grad(x, r, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close((loss, gradients[0]), (expected, gradients[1]), rtol=1e-5, atol=1e-8)
    shifted = mean_loss(r + 7.5, rankings, smoothing, center)
    assert (abs((shifted - expected).item()) < 1e-6) == (center == 0), "only centering sees a shift"


def metrics_by_hand(rewards: list[float], sizes: list[int]) -> dict[str, float]:
    args = Args(label_smoothing=0.1, center_coef=0.5)
    return pair_metrics(args, make_pairs([ranking(K) for K in sizes]), torch.tensor(rewards))


def test_metrics_count_each_prompt_once_and_ties_as_one_half():
    # prompt 0: tie; prompt 1: right; prompt 2, three responses: 2 of 3 pairs right
    m = metrics_by_hand([1.0, 1.0, 2.0, 0.0, 3.0, 1.0, 2.0], [2, 2, 3])
    assert m["rm/accuracy"] == pytest.approx((0.5 + 1 + 2 / 3) / 3)
    assert m["rm/reward_diff"] == pytest.approx((0 + 2 + (2 + 1 - 1) / 3) / 3)
    assert m["rm/chosen_rewards"] == pytest.approx((1 + 2 + (3 + 3 + 1) / 3) / 3)
    assert m["rm/rejected_rewards"] == pytest.approx((1 + 0 + (1 + 2 + 2) / 3) / 3)
    # Difference 2: -log sigmoid(2) = 0.1269; smoothing by 0.1 adds 0.1 * 2, centering 0.5 * (3 + 1)^2.
    m = metrics_by_hand([3.0, 1.0], [2])
    assert m["rm/bt_loss"] == pytest.approx(0.126928) and Args().label_smoothing == 0
    assert m["rm/loss"] == pytest.approx(0.126928 + 0.2 + 8)
    for sizes in ([2 + k % 3 for k in range(n)] for n in (1, 3, 7, 49, 100, 603)):
        perfect = [float(-j) for K in sizes for j in range(K)]
        assert metrics_by_hand(perfect, sizes)["rm/accuracy"] == 1  # exactly


# --- data ---
@pytest.fixture(scope="module")
def text(tiny_text_model):
    args = filled_args("reward_bt", model=tiny_text_model)
    return args, reward_bt.load_backbone(args), transformers.AutoTokenizer.from_pretrained(tiny_text_model)


@pytest.fixture
def rows_of(text, tmp_path):
    """Function from rows and flags to args, and a run with these rows for training and evaluation."""

    def make(rows: list[dict], **flags):
        args, model, tokenizer = text
        args = Args(**vars(args) | {"max_length": 100} | flags)
        data = RankingDataset(args, write_jsonl(tmp_path / "data.jsonl", rows), "train", 0, model, tokenizer)
        torch.manual_seed(0)
        run = SimpleNamespace(train_data=data, eval_sets={"x": data})
        run.reward_model = Engine(reward_bt.RewardModel(model).eval())
        run.state = {"rows_read": 0, "step": 0}
        return args, run

    return make


@pytest.fixture
def encode(rows_of):
    """Rows -> their rankings, and the text of prompt and response together for each response."""

    def build(*rows: dict, **flags):
        data = rows_of(list(rows), **flags)[1].train_data
        rankings = data.encode_all(range(len(rows)))
        ids = [[torch.cat([x.prompt.input_ids, y.input_ids]) for y in x.responses] for x in rankings]
        return rankings, [data.processor.batch_decode(chats) for chats in ids]

    return build


FORMATS = {
    "strings": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "prompt as chat": {"messages": chat("q"), "chosen": "good", "rejected": "bad"},
    "responses as chats": {"prompt": "q", "chosen": chat("", "good")[1:], "rejected": chat("", "bad")[1:]},
    "whole chats": {"chosen": chat("q", "good"), "rejected": chat("q", "bad")},
    "ranking": {"prompt": "q", "responses": ["good", "bad"]},
    "ranked chats": {"responses": [chat("q", "good"), chat("q", "bad")]},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_data_format_gives_the_same_text(name, encode):
    (ranking,), texts = encode(FORMATS[name])
    assert texts == [["user: q\nassistant: good\nassistant: ", "user: q\nassistant: bad\nassistant: "]]
    assert ranking.prompt.length == len("user: q\nassistant: "), "the shared tokens are the prompt"
    assert ranking.texts == ["good", "bad"]


def test_turns_after_the_first_difference_are_part_of_the_responses(encode):
    row = {"chosen": chat("q", "good", "so?", "yes"), "rejected": chat("q", "bad", "so?", "yes")}
    _, (texts,) = encode(row)
    assert texts[0] == "user: q\nassistant: good\nuser: so?\nassistant: yes\nassistant: "
    chats = {name: chat("q", "a", "so?", end) for name, end in (("chosen", "yes"), ("rejected", "no"))}
    assert encode(chats | {"prompt": chat("q")})[0], "their shared turns may be more than the prompt"


def test_system_prompt_margin_and_special_tokens(encode):
    row = {"prompt": "q<|end|>", "chosen": "good<|end|><image>", "rejected": "bad"}
    others = {**row, "margin": 0.5}, {**row, "margin": None}
    rankings, texts = encode(row, *others, system_prompt="be brief")
    assert texts[0][0] == "system: be brief\nuser: q< |end|>\nassistant: good< |end|><image>\nassistant: "
    assert [x.margin for x in rankings] == [0.0, 0.5, 0.0]


GOOD = {"prompt": "q", "chosen": "good", "rejected": "bad"}
CALLS = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "1 2"}]}
IMAGE = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "bad"}]
EMPTY = [{"type": "text", "text": ""}]
UNUSABLE = {
    "--max-length": GOOD | {"chosen": "g" * 40},
    "at least two responses": GOOD | {"chosen": None},
    "gone.png": GOOD | {"image": "gone.png"},
    "its prompt is empty": GOOD | {"prompt": None},
    "margin is inf": GOOD | {"margin": 1e999},
    "needs a list": {"prompt": "q", "responses": "good"},
    "tool_calls": {"prompt": "q", "chosen": [CALLS | {"content": None}], "rejected": chat("", "b")[1:]},
    "or tool_calls": {"chosen": [*chat("q"), CALLS | {"content": "a"}], "rejected": chat("q", "b")},
    "images, videos": {"prompt": "q", "chosen": chat("", IMAGE)[1:], "rejected": chat("", "b")[1:]},
    "messages with a role": {"prompt": "q", "chosen": ["a"], "rejected": ["b"]},
    "list of messages": {"prompt": "q", "chosen": chat("", "a")[1], "rejected": chat("", "b")[1]},  # no lists
    "must have text": {"prompt": "q", "chosen": [{"role": "assistant", "content": 5}], "rejected": "b"},
    "beginning of another": {"chosen": chat("q", "a"), "rejected": chat("q", "a", "so?")},
    "prompt is empty, or": {"prompt": "q", "chosen": "good", "rejected": chat("q", "bad")},  # mixed
    "have text, and": {"prompt": "q", "chosen": "b", "rejected": chat("", EMPTY)[1:]},
    "do not begin with": {"prompt": chat("p"), "chosen": chat("q", "a"), "rejected": chat("q", "b")},
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_unusable_rows_are_skipped_with_a_reason(reason, encode, capsys):
    rankings, _ = encode(UNUSABLE[reason], max_length=50)
    assert rankings == [] and re.search(f"data.jsonl row 0 is skipped.*{reason}", capsys.readouterr().err)


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_rankings_that_exceed_a_pack_are_skipped(attention, rows_of, capsys):
    """Packed, the prompt counts once; padded, each response is as long as the longest one."""
    data = rows_of([{"prompt": "q" * 30, "responses": ["a", "b", "c" * 9]}])[1].train_data
    packing.set_attention(data.model, attention)
    ranking = data.encode(0)
    P, lengths = ranking.prompt.length, [len(response) for response in ranking.responses]
    size = P + sum(lengths) if attention == "packed" else 3 * (P + max(lengths))
    for limit in (size, size - 1):
        data.args.micro_batch_tokens = limit
        assert len(reward_bt.gather_rankings(data, [0])) == (limit == size)
    packing.set_attention(data.model, "sdpa")
    assert f"row 0 is skipped: its 3 responses need {size} --micro-batch-tokens" in capsys.readouterr().err


def test_messages_may_have_empty_keys(encode):
    user = [{"role": "user", "content": "q"}]
    whole = [[user[0] | {"score": None}, {"role": "assistant", "content": x, "score": 1}] for x in "ab"]
    assert len(encode({"prompt": user, "chosen": whole[0], "rejected": whole[1]})[0]) == 1


@pytest.mark.parametrize("row", [GOOD | {"responses": ["good", "bad"]}, {"prompt": "q", "chosen": "good"}])
def test_columns_are_those_of_pairs_or_of_rankings(row, encode, refused):
    with refused(
        "must have either the columns chosen and rejected, or the column responses",
        f"it has {', '.join(row)}",
    ):
        encode(row)


def test_without_a_chat_template_responses_end_in_eos(text, tmp_path):
    """The head reads EOS, and not the last word, in training and in the example that scores responses."""
    args, model, tokenizer = text
    plain = transformers.AutoTokenizer.from_pretrained(args.model)
    plain.chat_template = None
    source = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "q: ", "chosen": "ab", "rejected": "a"}])
    ranking = RankingDataset(args, source, "train", 0, model, plain).encode(0)
    chats = [torch.cat([ranking.prompt.input_ids, x.input_ids]) for x in ranking.responses]
    assert [*map(len, ranking.responses)] == [3, 2], "a token and EOS at least"
    assert plain.batch_decode(chats) == ["q: ab<|end|>", "q: a<|end|>"]


LONG = GOOD | {"chosen": "g" * 400}  # longer than rows_of's --max-length


@pytest.mark.parametrize("batch_size", [1, 3])
def test_unusable_rows_are_replaced_by_the_next_ones(batch_size, rows_of):
    """Every step has its batch. At batch size 1 one bad row of three would otherwise end the run."""
    seed = next(n for n in range(99) if reward_bt.choose_row_ids(range(1), 3, n) == [1])  # the bad row
    rows = [GOOD, LONG, GOOD | {"rejected": "worse"}]
    args, run = rows_of(rows, train_batch_size=batch_size, seed=seed)
    found = [reward_bt.next_rankings(args, run) for _ in range(120 // batch_size)]
    assert {len(rankings) for rankings in found} == {batch_size}
    order = reward_bt.choose_row_ids(range(run.state["rows_read"]), 3, args.seed)
    assert len({tuple(order[i : i + 3]) for i in range(0, 99, 3)}) > 1, "each epoch has its own order"
    assert [x.prompt.row_id for rankings in found for x in rankings] == [row for row in order if row != 1]
    assert order.count(1) > 50


def test_a_run_whose_rows_are_mostly_unusable_saves_and_stops(rows_of, monkeypatch, refused):
    args, run = rows_of([GOOD, LONG, LONG, LONG], train_batch_size=4)
    run.state["step"], saved = 1, []
    run.train_data.num_read = 3000  # good rows before
    monkeypatch.setattr(reward_bt, "save_checkpoint", lambda args, run, suffix: saved.append(suffix))
    with refused("rows were skipped; see the warnings"):
        for _ in range(99):
            reward_bt.next_rankings(args, run)
    assert saved == ["-problem"]
    assert run.train_data.num_read >= 100, "a few rows say nothing about the dataset"


def test_a_block_of_long_rows_does_not_end_an_evaluation(rows_of, refused):
    """40 of 100 rows, of which a batch of 20 has none that can be used. With 60 of 100 the run stops."""
    flags = {"train_batch_size": 20, "eval_rows": 0}
    metrics, records = reward_bt.evaluate(*rows_of([LONG] * 40 + [GOOD] * 60, **flags))
    assert len(records) == 60 and metrics["eval/x/rows_skipped"] == 40
    with refused("60 of 100 rows were skipped"):
        reward_bt.evaluate(*rows_of([LONG] * 60 + [GOOD] * 40, **flags))


def test_columns_of_the_dataset_replace_nothing_of_ours(rows_of):
    """Columns named as metrics or as entries of records leave both as they are."""
    theirs = dict.fromkeys(("accuracy", "rm/accuracy", "reward_diff", "chosen_reward", "phase"), "theirs")
    metrics, records = reward_bt.evaluate(*rows_of([GOOD] * 3))
    assert records[0]["prompt"] == "q"
    expected = metrics, [theirs | record for record in records]
    nan = torch.tensor([math.nan, 0.0, 1.0, 0.0])  # JSON has no NaN
    rankings = [replace(ranking(2), texts=["good", "bad"])] * 2
    assert [x["reward_diff"] for x in reward_bt.make_records("eval", rankings, nan)] == [1.0]
    assert reward_bt.evaluate(*rows_of([GOOD | theirs | {"photo": "data:image/png"}] * 3)) == expected


def test_easy_vqa_pairs_have_a_wrong_answer_of_the_same_type():
    rows = reward_bt.load_rows(Args(), "easy-vqa", "test").select(range(500))
    first, other = (reward_bt.add_easy_vqa_responses(rows, seed) for seed in (1, 2))
    assert first["rejected"] != other["rejected"]
    for row in first:
        assert row["chosen"] == f"<answer>{row['answer']}</answer>" != row["rejected"]
        assert (row["rejected"] == "<answer>yes</answer>") == (row["answer"] == "no")


# --- rewards and gradients against the unmodified model ---
class Engine:
    """What main calls of a DeepSpeed engine. The module is never in train mode, with its noise."""

    def __init__(self, module):
        self.module, self.eval = module, module.eval
        self.set_gradient_accumulation_boundary = self.empty_partition_cache = lambda *args: None

    def __call__(self, pack):
        assert not any(module.training for module in self.module.modules())
        return self.module(pack)

    def backward(self, loss) -> None:
        loss.backward()


def by_transformers(row: dict, folder, model, processor, weight) -> list[torch.Tensor]:
    """Rewards by transformers alone: loaded media, the processor's inputs, the model's own forward."""
    rewards, options = [], {"return_tensors": "pt", "add_special_tokens": False}
    images = [Image.open(folder / name).convert("RGB") for name in row["images"]]
    options |= {"images": images} if images else {}
    for name in row["videos"]:
        frames, metadata = transformers.video_utils.load_video(str(folder / name), fps=2.0, backend="pyav")
        options |= {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}
    markers = "" if "<image>" in row["prompt"] else "<image>" * len(images) + "<video>" * len(row["videos"])
    pieces = filter(None, re.split("(<image>|<video>)", markers + row["prompt"]))
    parts = [{"type": x[1:-1]} if x[0] == "<" else {"type": "text", "text": x} for x in pieces]
    for response in row["responses"]:
        response = [{"type": "text", "text": response}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": response}]
        if not hasattr(processor, "tokenizer"):
            messages = [m | {"content": "".join(part["text"] for part in m["content"])} for m in messages]
        inputs = processor(text=[processor.apply_chat_template(messages, tokenize=False)], **options)
        rewards.append(model(**inputs).last_hidden_state[0, -1] @ weight)
    return rewards


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llama", "gptj"])
def test_main_has_gradients_of_the_unmodified_model(family, folder_of, tmp_path, monkeypatch, capsys, spy):
    """Packed where the family allows it, and with packs that are as small as the rankings allow.

    The evaluation set has the rows in reverse, so that its rewards are not those of training rows."""
    folder = folder_of(family)
    rows = [{"margin": None} | row for row in read_jsonl(folder / "rows.jsonl") * 2]
    for i, row in enumerate(rows):
        row["responses"] = ["4", "five, I think", "no idea, sorry", "4 or so"][: 4 - i % 3]
    rows[1]["margin"], modules = 0.3, []
    made = spy(reward_bt, "make_packs")
    source = write_jsonl(folder / "pairs.jsonl", rows)
    eval_source = write_jsonl(folder / "eval.jsonl", rows[::-1])
    flags = {"total_steps": 1, "train_batch_size": len(rows), "model": str(folder), "center_coef": 0.1}
    flags |= {"dataset": source, "eval_datasets": (f"x={eval_source}",), "output_dir": str(tmp_path)}
    args = filled_args("reward_bt", **flags)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    unmodified = reward_bt.load_backbone(args).eval()
    torch.manual_seed(args.seed)
    weight = reward_bt.RewardModel(unmodified).score.weight[0].detach().clone().requires_grad_()
    rewards = [by_transformers(row, folder, unmodified, processor, weight) for row in rows]
    expected = torch.stack(sum(rewards, []))
    assert expected.std() > 0.1
    data = RankingDataset(args, source, "train", 0, unmodified, processor)
    rankings = [data.encode(i) for i in range(len(rows))]
    mean_loss(expected, rankings, args.label_smoothing, args.center_coef).backward()
    expected_metrics = pair_metrics(args, make_pairs(rankings), expected.detach())
    expected_pairs = [pair for x in rewards[::-1] for pair in combinations(torch.stack(x).tolist(), 2)]
    longest = max(x.prompt.length + max(map(len, x.responses)) for x in rankings)
    largest = max((x.prompt.length + max(map(len, x.responses))) * len(x.responses) for x in rankings)
    monkeypatch.setattr(reward_bt, "init_reward_engine", lambda args, module: Engine(module))
    monkeypatch.setattr(reward_bt, "optimizer_step", lambda engine, learning_rate: 0.0)
    save = lambda args, run: modules.append(run.reward_model.module)  # noqa: E731
    monkeypatch.setattr(reward_bt, "save_checkpoint", save)
    for budget in (8192, largest):
        made.clear()
        flags |= {"max_length": longest, "micro_batch_tokens": budget, "run_name": str(budget)}
        metrics = run(tmp_path, **vars(args) | flags)[-1]
        assert ("batches are padded" in capsys.readouterr().out) == (family == "gptj")
        are_few = max(len(packs) for _, _, packs in made) == len({x.prompt.media_keys for x in rankings})
        assert are_few == (budget == 8192 and family != "gptj")
        found = {name: metrics[name] for name in expected_metrics}
        assert found == pytest.approx(expected_metrics, rel=1e-4, abs=1e-4)
        records = read_jsonl(tmp_path / str(budget) / "samples.jsonl")
        assert len(records) == 2 * len(expected_pairs), "before and after the step"
        for record, (chosen, rejected) in zip(records, expected_pairs * 2):
            row = rows[::-1][record["row"]]
            assert (record["prompt"], record["margin"]) == (row["prompt"], row["margin"] or 0.0)
            assert record["chosen_reward"] == pytest.approx(chosen, abs=1e-4)
            assert record["reward_diff"] == pytest.approx(chosen - rejected, abs=2e-4)
        parameters = [*modules[-1].model.parameters(), modules[-1].score.weight]
        for parameter, exact in zip(parameters, [*unmodified.parameters(), weight], strict=True):
            zeros = torch.zeros_like(parameter)
            exact = zeros if exact.grad is None else exact.grad.view_as(parameter)
            gradient = zeros if parameter.grad is None else parameter.grad
            assert (gradient - exact).abs().max() < 1e-4 * max(1, exact.abs().max())


# --- runs ---
FLAGS = {"run_name": "run", "train_batch_size": 8, "warmup_updates": 0, "learning_rate": 1e-3}
FLAGS |= {"eval_rows": 8, "eval_steps": 0, "seed": 3}


def both(tmp_path, rows: list[dict]) -> dict:
    """Flags to train and evaluate on the same rows."""
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    return {"dataset": source, "eval_datasets": (f"x={source}",)}


def run(tmp_path, **flags) -> list[dict]:
    """A run in this process -> its metrics."""
    flags = FLAGS | {"output_dir": str(tmp_path)} | flags
    reward_bt.main(Args(**flags))
    return metrics_of(tmp_path / flags["run_name"])


TRAINED = [({"freeze": "^visual"}, "^(?!visual)"), ({"lora_rank": 4}, r"language_model.*proj\.weight|score")]


@pytest.mark.slow
@pytest.mark.parametrize("flags, trained", TRAINED)
def test_frozen_weights_stay_and_the_others_move(flags, trained, tmp_path):
    """Adapters are merged; the head is trained with them."""
    run(tmp_path, **flags, total_steps=4, eval_rows=2)
    model = reward_bt.load_backbone(filled_args("reward_bt"))
    torch.manual_seed(3)
    head = reward_bt.RewardModel(model).score.weight
    before, after = model.state_dict() | {"score.weight": head}, weights_of(tmp_path / "run/checkpoint-4")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed == {x for x in before if re.search(trained, x)}


@pytest.mark.parametrize("head", [reward_bt.RewardHead, ppo_vl.ValueHead])
def test_heads_multiply_in_fp32(head):
    """Otherwise many rewards in bf16 would be equal."""
    head, hidden = head(64, 1, bias=False, dtype=torch.bfloat16), torch.randn(9, 64).bfloat16()
    exact = hidden.double() @ head.weight[0].double()
    torch.testing.assert_close(head(hidden), exact.float(), atol=1e-5, rtol=1e-5)


# --- what a saved checkpoint gives ---
@pytest.mark.parametrize("template", ["", "<|end|>"])
def test_exported_classifier_gives_the_same_rewards_with_any_padding(template, tiny_text_model, tmp_path):
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
    run(tmp_path, model=str(tmp_path / "start"), **both(tmp_path, rows), total_steps=1)
    records = [x for x in read_jsonl(tmp_path / "run" / "samples.jsonl") if x["train/step"] == 1]
    expected = [x[name] for x in records for name in ("chosen_reward", "rejected_reward")]
    folder = tmp_path / "classifier"
    EXPORT["export"](str(tmp_path / "run" / "checkpoint-1"), str(folder))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for side in ("left", "right"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
        chats = [chat(x["prompt"], x[name]) for x in records for name in ("chosen", "rejected")]
        texts = [tokenizer.apply_chat_template(x, tokenize=False) for x in chats]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        assert (batch["attention_mask"] == 0).any()
        with torch.no_grad():
            logits = loaded(**batch).logits
        assert logits.shape == (8, 1) and logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_head_on_the_hub_is_never_replaced_by_a_random_one(tiny_text_model, tmp_path, monkeypatch, refused):
    """A checkpoint in the Hub's cache, the same without its head, and a model that never had one."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    run(tmp_path, model=tiny_text_model, **both(tmp_path, [GOOD]), total_steps=1)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    for name, folder in {"whole": checkpoint, "lost": checkpoint, "plain": tiny_text_model}.items():
        repository = tmp_path / "hub" / f"models--me--{name}"
        shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
    (tmp_path / "hub/models--me--lost/snapshots" / ("a" * 40) / "score.safetensors").unlink()

    load_head = lambda x: reward_bt.load_head(x, transformers.AutoConfig.from_pretrained(x))  # noqa: E731
    saved = load_file(checkpoint / "score.safetensors")["score.weight"]
    assert torch.equal(load_head("me/whole"), saved) and load_head("me/plain") is None
    with refused("me/lost has a trained head, but"):
        load_head("me/lost")
    # A classifier has its head in model.safetensors; a reward model that starts from it got a random one.
    auto_class = transformers.AutoModelForSequenceClassification
    auto_class.from_pretrained(tiny_text_model, num_labels=1).save_pretrained(tmp_path / "classifier")
    with refused("a trained head, but no score.safetensors"):
        load_head(str(tmp_path / "classifier"))


def test_a_model_with_missing_weights_is_refused(tiny_text_model, tmp_path, refused):
    shutil.copytree(tiny_text_model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with refused("1 weights are missing: ['layers.1.mlp.up_proj"):
        reward_bt.load_backbone(filled_args("reward_bt", model=str(tmp_path / "model")))


@pytest.mark.slow
def test_a_checkpoint_is_a_reward_of_an_example_and_starts_a_next_run(tmp_path, monkeypatch):
    run(tmp_path, total_steps=2)
    folder, records = tmp_path / "run" / "checkpoint-2", read_jsonl(tmp_path / "run" / "samples.jsonl")
    again = run(tmp_path, run_name="again", model=str(folder), total_steps=0)  # only evaluates
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert again[0]["eval/easy-vqa/loss"] == pytest.approx(last["eval/easy-vqa/loss"], abs=1e-5)
    monkeypatch.setenv("REWARD_MODEL", str(folder))
    example = runpy.run_path(str(conftest.ROOT / "examples/reward_model.py"))
    chats, texts, expected = [], [], []
    for x in (x for x in records if x["train/step"] == 2):
        image = {"type": "image", "image": Image.open(x["image"]).convert("RGB")}
        chats += [chat([image, {"type": "text", "text": x["prompt"]}])] * 2
        texts += [x["chosen"], x["rejected"]]
        expected += [x["chosen_reward"], x["rejected_reward"]]
    assert example["score"](chats=chats, texts=texts, prompts=[]) == pytest.approx(expected, abs=1e-5)
