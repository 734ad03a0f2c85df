"""reward_bt: the loss in closed form, every form of data, packed scores against the plain model, what a saved folder gives."""

import ast
import copy
import json
import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, write_jsonl
from PIL import Image
from safetensors.torch import load_file
from test_packing import cached_model, make_picture, make_prompt, make_response

import reward_bt
from common.packing import build_pack, enable_packing
from reward_bt import bradley_terry_loss, calibration_error, ranking_loss, ranking_pairs


def as64(*values) -> list[torch.Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


# --- loss and metrics ------------------------------------------------------------------------------------------------


def test_worked_examples_of_the_docstrings():
    bt_loss, center_loss = bradley_terry_loss(*as64([1.0, 0], [0.0, 2], [0.0, 0.5]))
    assert bt_loss.tolist() == pytest.approx([0.3133, 2.5789], abs=1e-4) and center_loss.tolist() == [1, 4]
    chosen, rejected, owner, share = ranking_pairs([2, 3])
    assert (chosen.tolist(), rejected.tolist(), owner.tolist()) == ([0, 2, 2, 3], [1, 3, 4, 4], [0, 1, 1, 1])
    assert share.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    loss, _ = ranking_loss(*as64([1.0, 0]), [2], *as64([0.0], [2.0]), 0.0, 0.1)
    assert float(loss) == pytest.approx(0.8265, abs=1e-4)
    assert float(calibration_error(*as64([2.0, -2, 0], [1.0, 1, 1]))[0]) == pytest.approx(0.2539, abs=1e-4)
    assert reward_bt.fit_lengths(6, [2, 5], 4, 8, "keep_start") == (6, [2, 2])
    assert reward_bt.fit_lengths(6, [2, 4], 4, 8, "keep_end") == (4, [2, 4])


@pytest.mark.parametrize("smoothing, center", [(0.0, 0.0), (0.0, 0.3), (0.2, 0.0), (0.1, 0.05)])
def test_loss_and_gradient_equal_the_closed_form(smoothing, center):
    """Rankings of 2, 4 and 3 responses with margins and weights, pair by pair by hand."""
    sizes, (margins, weights) = [2, 4, 3], as64([0.5, 0.0, -0.25], [1.0, 0.5, 2.0])
    rewards = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, _ = ranking_loss(rewards, sizes, margins, weights, smoothing, center)
    (gradient,) = torch.autograd.grad(loss, rewards)
    expected, by_hand, start = 0.0, torch.zeros(9, dtype=torch.float64), 0
    for K, margin, weight in zip(sizes, margins.tolist(), weights.tolist()):
        pairs = list(combinations(range(start, start + K), 2))
        for i, j in pairs:
            w, d = weight / len(pairs), float((rewards[i] - rewards[j]).detach()) - margin
            p, total = 1 / (1 + math.exp(-d)), float((rewards[i] + rewards[j]).detach())
            nll = -(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)
            expected += w * (nll + center * total**2)
            slope = -(1 - smoothing) * (1 - p) + smoothing * p  # of the loss in d
            by_hand[i] += w * (slope + 2 * center * total)
            by_hand[j] += w * (-slope + 2 * center * total)
        start += K
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(gradient, by_hand, rtol=1e-6, atol=1e-8)


def test_shift_invariance_only_without_centering():
    rewards, margins, weights = as64([1.0, 0.2, -0.5, 0.3, 0.1], [0.0, 0.1], [1.0, 1.0])
    plain = [ranking_loss(rewards + shift, [2, 3], margins, weights, 0.1, 0.0)[0] for shift in (0, 7.5)]
    centered = [ranking_loss(rewards + shift, [2, 3], margins, weights, 0.1, 0.1)[0] for shift in (0, 7.5)]
    assert torch.allclose(*plain, rtol=1e-12) and abs(centered[0] - centered[1]) > 1


@pytest.mark.parametrize("bad", ["chosen", "rejected", "margins"])
def test_columns_against_rows_cannot_broadcast(bad):
    tensors = {name: torch.randn(4) for name in ("chosen", "rejected", "margins")}
    tensors[bad] = tensors[bad][:, None]  # (4, 1) - (4,) would be (4, 4)
    with pytest.raises(AssertionError):
        bradley_terry_loss(*tensors.values())
    with pytest.raises(AssertionError):
        ranking_loss(torch.randn(4), [2, 2], torch.zeros(2, 1), torch.ones(2), 0.0, 0.0)


def metrics_of(rewards, lengths, sizes, margins=None, weights=None):
    n = len(sizes)
    margins, weights = torch.zeros(n) if margins is None else margins, torch.ones(n) if weights is None else weights
    return {
        name: float(x)
        for name, x in reward_bt.ranking_metrics(
            torch.tensor(rewards), torch.tensor(lengths), sizes, margins, weights, 0.0, 0.5
        ).items()
    }


def test_metrics_count_each_prompt_once_and_ties_as_one_half():
    # prompt 0: tie; prompt 1: right; prompt 2, three responses: 2 of 3 pairs right
    m = metrics_of([1.0, 1.0, 2.0, 0.0, 3.0, 1.0, 2.0], [5, 5, 7, 3, 4, 4, 4], [2, 2, 3])
    assert m["rm/accuracy"] == pytest.approx((0.5 + 1 + 2 / 3) / 3)
    assert m["rm/margin"] == pytest.approx((0 + 2 + (2 + 1 - 1) / 3) / 3)
    assert m["rm/chosen_rewards"] == pytest.approx((1 + 2 + (3 + 3 + 1) / 3) / 3)
    assert m["rm/loss"] == pytest.approx(m["rm/bt_loss"] + 0.5 * m["rm/center_loss"])
    assert 0 < m["rm/length_correlation"] < 1


def test_metrics_at_the_start_and_the_extremes():
    flat = metrics_of([0.0] * 8, [1, 2] * 4, [2] * 4)
    assert flat["rm/bt_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (flat["rm/accuracy"], flat["rm/ece"], flat["rm/length_correlation"]) == (0.5, 0.0, 0.0)
    sure = metrics_of([9.0, -9.0, -9.0, 9.0], [4, 2, 2, 4], [2, 2])
    assert sure["rm/ece"] == pytest.approx(0.5, abs=1e-3) and sure["rm/length_correlation"] == pytest.approx(1.0)


def test_calibration_error_against_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    margins, share = torch.randn(500, generator=generator).double() * 2, torch.rand(500, generator=generator).double()
    error, table = calibration_error(margins, share)
    expected = 0.0
    for b in range(10):
        inside = [k for k in range(500) if min(int((float(margins[k].abs().sigmoid()) - 0.5) * 20), 9) == b]
        if inside:
            w = float(share[inside].sum())
            confidence = float((share[inside] * margins[inside].abs().sigmoid()).sum()) / w
            expected += abs(float((share[inside] * (margins[inside] > 0)).sum()) / w - confidence) * w
    assert float(error) == pytest.approx(expected / float(share.sum())) and table.shape == (10, 3)


# --- scores: packed = one by one by the unmodified model -------------------------------------------------------------


def rows_of(family: str, model) -> tuple[list, list, list]:
    """Pairs and a ranking over prompts with and without pictures; responses end in EOS, which is also the pad token."""
    prompts = [make_prompt(family, model, 6), make_prompt(family, model, 4)]
    if model.config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"):
        prompts[1] = make_prompt(family, model, 5, [make_picture(family, 0), make_picture(family, 1)])
    responses = [make_response(b, R) for b, R in enumerate([3, 7, 4, 1, 6])]
    return [(0, [0, 1]), (1, [2, 3, 4])], prompts, responses


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llama", "qwen2", "qwen3", "mistral"]
)
def test_packed_scores_equal_one_by_one_and_those_of_the_saved_model(family, tmp_path, monkeypatch):
    plain = copy.deepcopy(cached_model(family)).model
    head = torch.nn.Linear(64, 1, bias=False)
    groups, prompts, responses = rows_of(family, plain)

    def one_by_one(model, weight):
        scores = []
        for g, members in groups:
            for b in members:
                ids, inputs = torch.cat([prompts[g]["prompt_ids"], responses[b]])[None], dict(prompts[g]["inputs"])
                if "mm_token_type_ids" in inputs:
                    kinds = inputs["mm_token_type_ids"]
                    inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, len(responses[b])))
                hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).last_hidden_state
                scores.append(hidden[0, -1] @ weight[0])
        return torch.stack(scores)

    with torch.no_grad():
        expected = one_by_one(plain, head.weight)
        model = copy.deepcopy(plain)
        module = reward_bt.RewardModel(model, head)
        shared = enable_packing(model)
        assert shared == (family != "mistral")
        pack = build_pack(groups, prompts, responses, shared)
        rewards, _ = module(pack)
        assert (rewards - expected).abs().max() < 1e-4 and expected.std() > 0.1

    class NoProcessor:
        save_pretrained = staticmethod(lambda folder: None)

    reward_bt.export_reward_model(module, NoProcessor, tmp_path, 0, 0)
    with torch.no_grad():
        if reward_bt.classifier_class(model.config) is None:
            assert "vision_config" in json.loads((tmp_path / "config.json").read_text())
            loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
            weight = load_file(tmp_path / "score.safetensors")["score.weight"]
            assert weight.shape == (1, 64)
            again = one_by_one(loaded, weight)
        else:
            loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
            again = one_by_one(loaded.base_model, loaded.score.weight)
    assert (again - expected).abs().max() < 1e-5
    assert (tmp_path / "score.safetensors").exists() == (reward_bt.classifier_class(model.config) is None)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", [True, False])
def test_saved_classifier_gives_the_same_scores_with_any_padding(side, template, tiny_text_model, tmp_path):
    """A tokenizer whose pad token is EOS, texts that end in EOS (without a template) or not; batches of unequal lengths."""
    args = reward_bt.Args(model=tiny_text_model, plain_prompts=not template)
    processor, (model, head) = reward_bt.load_processor(args.model), reward_bt.load_backbone(args, torch.float32)
    assert processor.pad_token == processor.eos_token
    processor.padding_side = side
    rows = [{"prompt": f"say {i}", "chosen": "a" * (i + 1), "rejected": "b" * (9 - 2 * i)} for i in range(4)]
    data = reward_bt.prepare_rankings(
        args, model, processor, write_jsonl(tmp_path / "d.jsonl", rows), "train", 0, 0, False
    )
    ids = [reward_bt.tokenize_ranking(model, processor, reward_bt.get_ranking(data, i)) for i in range(4)]
    assert template or all(x[-1] == processor.eos_token_id for pair in ids for x in pair)
    reward_bt.set_pad_token(model, processor, data["last_ids"])
    assert processor.pad_token_id not in {x[-1] for pair in ids for x in pair}
    module, shared = reward_bt.RewardModel(model, head), enable_packing(model)
    packs = list(reward_bt.packs_of_rankings(args, model, processor, data, data["keep"], shared, (0, 1), "cpu"))
    with torch.no_grad():
        scores = {b: r for pack in packs for (b, _), r in zip(pack.rows, module(pack)[0].tolist())}
    (tmp_path / "out").mkdir()
    reward_bt.export_reward_model(module, processor, tmp_path / "out", 0, 0)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", padding_side=side)
    flat = [x for pair in ids for x in pair]
    batch = tokenizer.pad({"input_ids": flat}, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        logits = loaded(**batch).logits
    assert logits.shape == (8, 1)
    assert logits[:, 0].tolist() == pytest.approx([scores[b] for b in range(8)], abs=1e-5)


def test_scores_of_pictures_equal_those_of_the_plain_model_and_processor(tiny, vqa_rows, tmp_path):
    """From files to scores: the whole path, against transformers alone."""
    args = reward_bt.Args(model=tiny)
    processor, (model, head) = reward_bt.load_processor(tiny), reward_bt.load_backbone(args, torch.float32)
    rows = [{**r, "responses": ["<answer>red</answer>", "blue", "no idea"]} for r in vqa_rows[:3]]
    source = write_jsonl(tmp_path / "d.jsonl", rows)
    data = reward_bt.prepare_rankings(args, model, processor, source, "train", 0, 0, False)
    plain = transformers.AutoModel.from_pretrained(tiny, dtype=torch.float32)
    expected = []
    with torch.no_grad():
        for row in rows:
            for text in row["responses"]:
                user = [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["prompt"]}]
                chat = [
                    {"role": "user", "content": user},
                    {"role": "assistant", "content": [{"type": "text", "text": text}]},
                ]
                whole = processor.apply_chat_template(chat, tokenize=False)
                inputs = processor(text=[whole], images=[Image.open(row["image"]).convert("RGB")], return_tensors="pt")
                expected.append(float(plain(**inputs).last_hidden_state[0, -1] @ head.weight[0]))
        module, shared = reward_bt.RewardModel(model, head), enable_packing(model)
        (pack,) = reward_bt.packs_of_rankings(args, model, processor, data, [0, 1, 2], shared, (0, 1), "cpu")
        assert module(pack)[0].tolist() == pytest.approx([expected[b] for b, _ in pack.rows], abs=1e-4)
    assert len(pack.media["images"]["image_grid_thw"]) == len({row["image"] for row in rows}), "each picture once"


def test_head_is_drawn_as_the_flag_says_and_kept_when_it_is_there(tiny_text_model, tiny, tmp_path):
    heads = {}
    for init in ("inverse_sqrt", "config"):
        for seed in (1, 2):
            args = reward_bt.Args(model=tiny, head_init=init, seed=seed)
            heads[init, seed] = reward_bt.load_backbone(args, torch.float32)[1].weight.detach()
    assert heads["inverse_sqrt", 1].std() == pytest.approx(129**-0.5, rel=0.2)
    assert heads["config", 1].std() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(heads["config", 1], heads["config", 2])
    for start in (tiny, tiny_text_model):
        model, head = reward_bt.load_backbone(reward_bt.Args(model=start), torch.float32)
        processor = reward_bt.load_processor(start)
        folder = tmp_path / Path(start).name
        folder.mkdir()
        reward_bt.export_reward_model(reward_bt.RewardModel(model, head), processor, folder, 0, 0)
        again = reward_bt.load_backbone(reward_bt.Args(model=str(folder), seed=9), torch.float32)[1]
        assert torch.equal(again.weight, head.weight)


def test_router_loss_of_a_mixture_of_experts(tmp_path):
    """Equals transformers' own, and --router-aux-coef scales it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    sizes |= {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=320, **sizes, router_aux_loss_coef=0.1)
    model = transformers.Qwen3MoeModel(config).eval()
    prompts = [{"prompt_ids": torch.arange(3, 9), "position_ids": torch.arange(6), "images": [], "videos": []}]
    responses = [torch.arange(10, 13), torch.arange(20, 25)]
    head = torch.nn.Linear(32, 1, bias=False)
    shared = enable_packing(model)
    pack = build_pack([(0, [0, 1])], prompts, responses, shared)
    with torch.no_grad():
        rewards, loss = reward_bt.RewardModel(model, head)(pack)
    assert rewards.shape == (2,) and loss > 0
    config.output_router_logits = False
    out = model(input_ids=pack.input_ids, attention_mask=pack.attention_mask, output_router_logits=True)
    own = load_balancing_loss_func(out.router_logits, 4, 2, pack.attention_mask)
    assert float(loss) == pytest.approx(0.1 * float(own), rel=1e-5)
    assert float(reward_bt.RewardModel(model, head, 0.3)(pack)[1]) == pytest.approx(0.3 * float(own), rel=1e-5)
    assert float(reward_bt.RewardModel(model, head, 0.0)(pack)[1]) == 0


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tiny_text_model):
    args = reward_bt.Args(model=tiny_text_model)
    return args, reward_bt.load_backbone(args, torch.float32)[0], reward_bt.load_processor(tiny_text_model)


@pytest.fixture
def prepare(text, tmp_path):
    """Rows -> prepared data, and per kept row the decoded prompt and responses."""

    def build(*rows: dict, **flags):
        args, model, processor = text
        source = write_jsonl(tmp_path / "data.jsonl", list(rows))
        data = reward_bt.prepare_rankings(replace(args, **flags), model, processor, source, "train", 0, 0, False)
        texts = []
        for i in data["keep"]:
            sample, rests = reward_bt.encode_ranking(
                model, processor, reward_bt.get_ranking(data, i), data["lengths"][i]
            )
            prompt = processor.decode(sample["prompt_ids"])
            texts.append([prompt + processor.decode(rest) for rest in rests])
        return data, texts

    return build


def chat(*contents: str) -> list[dict]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def sharegpt(*contents: str) -> list[dict]:
    return [{"from": r, "value": c} for r, c in zip(["human", "gpt"] * len(contents), contents)]


FORMS = {
    "explicit strings": ({}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
    "explicit chat": ({}, {"prompt": chat("q"), "chosen": chat("q", "good")[1:], "rejected": chat("q", "bad")[1:]}),
    "one message": ({}, {"prompt": "q", "chosen": chat("", "good")[1], "rejected": chat("", "bad")[1]}),
    "implicit chat": ({}, {"chosen": chat("q", "good"), "rejected": chat("q", "bad")}),
    "prompt and whole chats": ({}, {"prompt": "q", "chosen": chat("q", "good"), "rejected": chat("q", "bad")}),
    "sharegpt whole": ({}, {"chosen": sharegpt("q", "good"), "rejected": sharegpt("q", "bad")}),
    "sharegpt answers": (
        {"prompt_column": "conversations"},
        {"conversations": sharegpt("q"), "chosen": sharegpt("", "good")[1], "rejected": sharegpt("", "bad")[1]},
    ),
    "ranking": ({}, {"prompt": "q", "responses": ["good", "bad"]}),
    "named columns": (
        {"prompt_column": "x", "chosen_column": "y", "rejected_column": "z"}, {"x": "q", "y": "good", "z": "bad"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_text(form, prepare):
    flags, row = FORMS[form]
    _, texts = prepare(row, **flags)
    assert texts == [["user: q\nassistant: good\nassistant: ", "user: q\nassistant: bad\nassistant: "]]


def test_plain_text_with_and_without_a_prompt(prepare):
    expected = [["one two<|end|>", "one ten<|end|>"]]
    assert prepare({"chosen": "one two", "rejected": "one ten"})[1] == expected
    assert prepare({"prompt": "one ", "chosen": "two", "rejected": "ten"}, plain_prompts=True)[1] == expected


def test_token_ids_are_taken_as_they_are(prepare):
    data, texts = prepare({"chosen_ids": [65, 66, 67, 68], "rejected_ids": [65, 66, 70]})
    assert data["lengths"][0] == (2, [2, 1]) and len(texts) == 1


def test_template_arguments_of_a_row_and_tools_reach_the_template(prepare, text, monkeypatch):
    seen = []
    original = reward_bt.render_chat
    monkeypatch.setattr(
        reward_bt, "render_chat", lambda p, row, m: seen.append(row["template_kwargs"]) or original(p, row, m)
    )
    base = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    prepare({**base, "chat_template_kwargs": {"thinking": True}, "tools": json.dumps(tools)}, base)
    assert seen[0] == {"thinking": True, "tools": tools} and seen[-1] == {}
    prepare({**base, "chat_template_kwargs": {"a": 2}}, chat_template_kwargs='{"a": 1, "b": 3}')
    assert seen[-1] == {"a": 2, "b": 3}


def test_system_prompt_margin_and_weight(prepare):
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 0.5, "weight": 2}
    data, texts = prepare(row, {**row, "margin": 1, "weight": 0.25}, system_prompt="be kind")
    assert texts[0][0].startswith("system: be kind\nuser: q")
    assert data["margins"] == {0: 0.5, 1: 1.0} and data["weights"] == {0: 2.0, 1: 0.25}


def test_overflow_is_counted_and_never_silent(prepare):
    rows = [
        {"prompt": "q" * 20, "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "g" * 40, "rejected": "b" * 30},
    ]
    data, texts = prepare(*rows)
    assert (data["keep"], data["dropped"], data["cut"]) == ([0, 1], 0, 0)
    longest = [P + max(R) for P, R in data["lengths"].values()]
    data, _ = prepare(*rows, max_length=max(longest) - 1)
    assert (len(data["keep"]), data["dropped"], data["cut"]) == (1, 1, 0)
    limit = min(longest) - 6
    data, kept = prepare(*rows, max_length=limit, overflow="keep_end")  # row 1: its responses alone are too long
    assert (data["keep"], data["dropped"], data["cut"]) == ([0], 1, 1)
    assert kept[0][0] == texts[0][0][6:] and kept[0][0].endswith("good\nassistant: ")
    data, kept = prepare(*rows, max_length=limit, overflow="keep_start")
    assert data["cut"] == 2 and data["dropped"] == 0
    assert all(
        len(t) <= limit and whole.startswith(t) for pair, wholes in zip(kept, texts) for t, whole in zip(pair, wholes)
    )


def test_pictures_survive_every_cut(tiny, vqa_rows, tmp_path):
    args = reward_bt.Args(model=tiny)
    processor, (model, _) = reward_bt.load_processor(tiny), reward_bt.load_backbone(args, torch.float32)
    row = {"prompt": "<image> and what is this? a b c d e f g h i j k l", "images": [vqa_rows[0]["image"]]}
    source = write_jsonl(tmp_path / "d.jsonl", [{**row, "chosen": "a red circle", "rejected": "a blue box"}])

    def encode(**flags):
        changed = replace(args, **flags)
        data = reward_bt.prepare_rankings(changed, model, processor, source, "train", 0, 0, False)
        return reward_bt.encode_ranking(model, processor, reward_bt.get_ranking(data, 0), data["lengths"][0])

    whole, rests = encode()
    length = len(whole["prompt_ids"]) + max(map(len, rests))
    cut, _ = encode(max_length=length - 10, overflow="keep_end")
    media = torch.tensor(reward_bt.media_token_ids(model.config))
    count = [int(torch.isin(sample["prompt_ids"], media).sum()) for sample in (whole, cut)]
    assert count[0] == count[1] == 18 and len(cut["prompt_ids"]) == len(whole["prompt_ids"]) - 10
    grid = cut["images"][0]["image_grid_thw"]
    inputs = {"image_grid_thw": grid, "mm_token_type_ids": cut["mm_token_type_ids"][None]}
    expected, _ = model.get_rope_index(input_ids=cut["prompt_ids"][None], **inputs)
    assert torch.equal(cut["position_ids"], expected[:, 0])
    with pytest.raises(SystemExit):  # not even the picture would fit
        encode(max_length=20, overflow="keep_end")


def test_easy_vqa_pairs_are_of_one_kind_and_follow_the_seed():
    first, again, other = (reward_bt.load_preferences("easy-vqa", "test", seed) for seed in (1, 1, 2))
    assert first["rejected"] == again["rejected"] != other["rejected"]
    for row in first.select(range(0, 9673, 97)):
        chosen, rejected = (
            row[side].removeprefix("<answer>").removesuffix("</answer>") for side in ("chosen", "rejected")
        )
        assert chosen == row["answer"] != rejected
        assert any({chosen, rejected} <= set(kind) for kind in reward_bt.EASY_VQA_KINDS)


# --- code and docs ---------------------------------------------------------------------------------------------------


def test_metrics_are_as_documented():
    source = (ROOT / "reward_bt.py").read_text()
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings]
    key = re.compile(r"(?:rm|train|time|eval)/[a-z_]+")
    in_code = {s for s in strings if isinstance(s, str) and key.fullmatch(s)}
    in_docs = set(re.findall(rf"`({key.pattern})`", (ROOT / "docs/reward_bt.md").read_text()))
    assert in_code == in_docs and len(in_code) > 15
