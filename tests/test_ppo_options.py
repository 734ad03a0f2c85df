"""Options of ppo_vl on tiny models, by its command line: losses, KL, critics, PTX, EMA, freezing, LoRA, batches, rewards."""
# ruff: noqa: F401, F811  fixtures

import functools
import inspect
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT, TINY, read_jsonl, to_argv, write_jsonl
from safetensors.torch import load_file
from test_bad_input import assert_one_sentence
from test_ppo_e2e import read_metrics, steps_of
from test_ppo_update import (
    ONE_STEP,
    assert_same_gradients,
    caught,
    gradients_of_update,
    mixed,
    mixed_rows,
    plain_inputs,
    plain_model,
    torchrun,
    value_head_is_random,
)

import ppo_vl
from common.packing import media_token_ids

FAST = {"learning_rate": 3e-3, "warmup_steps": 0, "lr_schedule": "constant"}  # visible after one step
SMALL = {"rollout_batch_size": 8, "train_batch_size": 4, "num_ppo_epochs": 1}  # two optimizer steps per step


@pytest.fixture(scope="module", autouse=True)
def source_is_parsed_once():
    """Finding the sections of Args in the script takes a third of a second per command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getsource", functools.cache(inspect.getsource))
        yield


@pytest.fixture
def text(tiny_text_model, any_reward, tmp_path) -> dict:
    """Flags of a run on a text model without held-out prompts: the fastest there is."""
    rows = [{"prompt": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    return {
        "model": tiny_text_model,
        "dataset": write_jsonl(tmp_path / "sums.jsonl", rows),
        "eval_dataset": None,
    } | any_reward


@pytest.fixture
def vlm(any_reward) -> dict:
    """Flags of a run on the vision-language model without held-out prompts."""
    return {"eval_dataset": None, **any_reward}


@pytest.fixture
def unsaved(monkeypatch):
    """Runs that write no checkpoint: half of the time of a short one."""
    monkeypatch.setattr(ppo_vl, "save_checkpoint", lambda *args: Path("nowhere"))


@pytest.fixture
def run_with_engines(run, monkeypatch):
    """A short run -> its folder and its engines, by the class of what they train."""
    engines, make = {}, ppo_vl.make_engine

    def keep(args, module, *rest):
        engines[type(module).__name__] = make(args, module, *rest)
        return engines[type(module).__name__]

    def go(**flags):
        engines.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ppo_vl, "make_engine", keep)
            return run(**flags), dict(engines)

    return go


@pytest.fixture
def stops(argv, capfd):
    """A run that must end with exit code 2 and one sentence that holds these words."""

    def go(*words: str, **flags) -> None:
        with pytest.raises(SystemExit) as stopped:
            ppo_vl.main(ppo_vl.parse_args(argv(**flags)))
        assert stopped.value.code == 2
        assert_one_sentence(capfd.readouterr().err, list(words))

    return go


@pytest.fixture
def seen_updates(monkeypatch):
    """Arguments of every call of update in the runs to come, with copies of the weights before and after it."""
    calls, update = [], ppo_vl.update

    def spy(*args, **kwargs):
        call = dict(inspect.signature(update).bind(*args, **kwargs).arguments)
        call["before"] = {name: weights(call[name]) for name in ("actor", "critic") if call[name] is not None}
        result = update(*args, **kwargs)
        call["after"] = {name: weights(call[name]) for name in call["before"]}
        calls.append({**call, "metrics": result[0]})
        return result

    monkeypatch.setattr(ppo_vl, "update", spy)
    return calls


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def same_weights(a: dict, b: dict) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def actor_of(gradients: dict) -> dict:
    return {name: g for name, g in gradients.items() if name.startswith("model.")}


# --- 1. estimators, losses, aggregations -----------------------------------------------------------------------------

CRITIC_METRICS = {"loss/value", "val/clipfrac", "val/mean", "val/returns_mean", "val/explained_variance"}
CRITIC_METRICS |= {"train/critic_grad_norm", "train/critic_learning_rate"}
ACTOR_METRICS = set(
    """train/step train/episode train/learning_rate train/kl_coef train/grad_norm train/skipped_updates
    train/tokens_trained_frac objective/scores objective/kl objective/rlhf_reward objective/entropy
    objective/reward_clipfrac objective/advantages_mean objective/advantages_std objective/advantage_clipfrac
    policy/ratio policy/approx_kl policy/clipfrac_low policy/clipfrac_high policy/entropy loss/policy
    rollout/prompts_sampled rollout/responses_trained rollout/zero_std_groups_frac""".split()
)
VARIANTS = [{"advantage": name} for name in ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "cpgd")]
VARIANTS += [{"policy_loss": "dual_clip"}, {"policy_loss": "cpg"}, {"policy_loss": "gspo"}]
VARIANTS += [{"loss_agg": f"seq-mean-token-{name}"} for name in ("mean", "sum", "sum-norm")]


@pytest.mark.parametrize("flags", VARIANTS, ids=lambda flags: next(iter(flags.values())))
def test_every_estimator_loss_and_aggregation_trains(flags, run, vlm, unsaved, seen_updates):
    steps = steps_of(run(**vlm, **SMALL, **{"advantage": "group_norm", **flags}))
    assert len(steps) == 2
    for metrics in steps:
        assert not ACTOR_METRICS - metrics.keys()
        assert CRITIC_METRICS & metrics.keys() == (CRITIC_METRICS if flags.get("advantage") == "gae" else set())
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["train/grad_norm"] > 0
    assert all(
        set(call["before"]) == ({"actor", "critic"} if "loss/value" in steps[0] else {"actor"}) for call in seen_updates
    )
    assert not same_weights(seen_updates[0]["before"]["actor"], seen_updates[-1]["after"]["actor"])


# --- 2. KL -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradient_of_the_kl_loss_is_that_without_packing(caught, mixed, monkeypatch):
    call = caught("update", advantage="reinforce", kl_loss=True, **mixed, num_ppo_epochs=1, train_batch_size=16)
    tables = call["tables"]
    noise = torch.randn(tables["ref_logprobs"].shape, generator=torch.Generator().manual_seed(0))
    call["tables"] = tables | {"advantages": torch.zeros_like(noise), "ref_logprobs": tables["ref_logprobs"] + noise}
    gradients = {}
    for estimator in ("k1", "k2", "k3"):
        change = {"args": replace(call["args"], kl_estimator=estimator), "kl_coef": 0.3}
        packed, alone = (gradients_of_update(monkeypatch, call, shared=s, **change)[0] for s in (True, False))
        assert torch.stack([g.norm() for g in packed.values()]).norm() > 1e-3
        assert_same_gradients(packed, alone)
        gradients[estimator] = torch.cat([g.flatten() for g in packed.values()])
    assert (gradients["k1"] - gradients["k2"]).norm() > 0.1 * gradients["k1"].norm()
    assert (gradients["k2"] - gradients["k3"]).norm() > 0.1 * gradients["k2"].norm()


def test_adaptive_kl_coefficient_is_saved_and_goes_on(run, text):
    flags = {
        **text,
        **FAST,
        "advantage": "rloo",
        "kl_target": 0.01,
        "kl_horizon": 100,
        "save_steps": 1,
        "total_steps": 3,
    }
    folder = run(**flags)
    whole = steps_of(folder)
    coefs = [m["train/kl_coef"] for m in whole]
    assert len(set(coefs)) == 3 and coefs[0] == 0.01
    state = json.loads((folder / "checkpoint-2/state/trainer_state.json").read_text())
    assert state["kl_coef"] == coefs[2]
    shutil.rmtree(folder / "checkpoint-3")
    resumed = steps_of(run(**flags, resume=folder / "checkpoint-2"))
    assert [m["train/kl_coef"] for m in resumed] == coefs
    assert resumed[2]["objective/kl"] == pytest.approx(whole[2]["objective/kl"], rel=1e-6)


@pytest.mark.parametrize("kl_coef, loads", [(0, 0), (0.1, 1)])
def test_reference_is_loaded_only_for_a_kl(kl_coef, loads, run, text, unsaved, monkeypatch):
    made, make = [], ppo_vl.make_reference
    monkeypatch.setattr(ppo_vl, "make_reference", lambda *args: made.append(1) or make(*args))
    steps = steps_of(run(**text, **FAST, advantage="rloo", kl_coef=kl_coef))
    assert len(made) == loads
    assert (steps[1]["objective/kl"] != 0) == bool(loads)


# --- 3. the critic's own time ----------------------------------------------------------------------------------------


def test_actor_stands_still_while_the_critic_learns_alone(run, text, unsaved, seen_updates):
    steps = steps_of(run(**text, total_steps=3, freezing_actor_steps=2))
    for call in seen_updates[:2]:
        assert same_weights(call["before"]["actor"], call["after"]["actor"])
        assert not same_weights(call["before"]["critic"], call["after"]["critic"])
    for name in ("actor", "critic"):
        assert not same_weights(seen_updates[2]["before"][name], seen_updates[2]["after"][name])
    assert not {"loss/policy", "train/grad_norm", "policy/ratio"} & seen_updates[1]["metrics"].keys()
    assert [m["train/step"] for m in steps] == [3], "steps_of looks for a policy loss"


def test_critic_has_a_schedule_of_its_own(run, text, unsaved):
    actor = {"learning_rate": 1e-3, "lr_schedule": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1}
    critic = {"critic_learning_rate": 2e-2, "critic_lr_schedule": "constant", "critic_warmup_steps": 6}
    folder = run(**text, **actor, **critic, total_steps=3, freezing_actor_steps=1)
    steps = [m for m in read_metrics(folder) if "loss/value" in m]
    updates = 4  # per step
    actor_rates = [1e-3 * ppo_vl.learning_rate_factor(n * updates, 3, 2 * updates, "cosine", 0.1) for n in (0, 1, 2)]
    critic_rates = [2e-2 * ppo_vl.learning_rate_factor(n * updates, 6, 3 * updates, "constant", 0.1) for n in (1, 2, 3)]
    assert [m["train/learning_rate"] for m in steps] == pytest.approx(actor_rates)
    assert [m["train/critic_learning_rate"] for m in steps] == pytest.approx(critic_rates)
    assert critic_rates[0] < 2e-2 == critic_rates[1]


# --- 4. where the critic comes from ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory, vqa_rows) -> Path:
    """What reward_bt.py makes of the vision-language model in two steps."""
    import reward_bt

    folder = tmp_path_factory.mktemp("reward_model")
    rows = [{**row, "chosen": row["answer"], "rejected": "none of these"} for row in vqa_rows[:8]]
    flags = {
        "model": TINY,
        "dataset": write_jsonl(folder / "pairs.jsonl", rows),
        "output_dir": folder,
        "run_name": "run",
    }
    flags |= {
        "max_steps": 2,
        "batch_size": 4,
        "eval_steps": 0,
        "eval_samples": 0,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_calibration", "draw_worst_pairs"):
            patch.setattr(reward_bt, name, lambda *args: None)
        reward_bt.main(reward_bt.parse_args(to_argv(flags)))
    return folder / "run/checkpoint-2"


def test_critic_from_a_reward_model_takes_its_head(reward_folder, caught, vlm):
    from transformers import AutoModel

    call = caught("update", **vlm, critic_model=reward_folder)
    critic, head = call["critic"].module, load_file(reward_folder / "score.safetensors")["score.weight"]
    assert head.abs().max() > 0 and torch.equal(critic.value_head.weight, head.float())
    saved = dict(AutoModel.from_pretrained(reward_folder, dtype=torch.float32).named_parameters())
    backbone = dict(critic.backbone.named_parameters())
    assert backbone.keys() == saved.keys() and all(torch.equal(p, saved[name]) for name, p in backbone.items())
    assert call["rollout"].values[call["rollout"].response_mask].abs().max() > 0


def test_critic_from_a_plain_model_starts_at_zero(caught, vlm, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    other = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    for parameter in other.parameters():
        parameter.data.mul_(1.01)
    other.save_pretrained(tmp_path / "other")
    AutoProcessor.from_pretrained(TINY).save_pretrained(tmp_path / "other")
    call = caught("update", **vlm, critic_model=tmp_path / "other")
    backbone = dict(call["critic"].module.backbone.named_parameters())
    assert all(torch.equal(p, backbone[name]) for name, p in other.base_model.named_parameters())
    assert not call["critic"].module.value_head.weight.any() and not call["rollout"].values.any()


def test_critic_from_a_text_classifier_takes_its_head(caught, text, tiny_text_model, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_text_model, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(tiny_text_model).save_pretrained(tmp_path / "classifier")
    call = caught("update", **text, critic_model=tmp_path / "classifier")
    assert torch.equal(call["critic"].module.value_head.weight, model.score.weight)


def test_critic_with_another_tokenizer_is_refused(stops, vlm, tiny_text_model):
    stops("--critic-model", "tokenizer", **vlm, critic_model=tiny_text_model)


# --- 5. supervised rows beside ---------------------------------------------------------------------------------------


def ptx_rows(vqa_rows: list[dict]) -> list[dict]:
    """Every way to write a supervised row, with and without pictures; columns that a row does not have are null."""
    a, b = vqa_rows[0]["image"], vqa_rows[1]["image"]

    def turn(role: str, text: str) -> dict:
        return {"role": role, "content": text}

    later = [
        turn("user", "hello"),
        turn("assistant", "hi"),
        turn("user", "<image> and this?"),
        turn("assistant", "red"),
    ]
    twice = [
        turn("user", "<image> what?"),
        turn("assistant", "one"),
        turn("user", "<image> now?"),
        turn("assistant", "two"),
    ]
    system = [turn("system", "be brief"), turn("user", "is grass green?"), turn("assistant", "yes it is")]
    rows = [
        {"prompt": "what shape is it?", "response": "a circle", "image": [a]},
        {"prompt": "is the sky blue?", "response": "yes"},
        {"messages": later, "image": [b]},
        {"messages": twice, "image": [a, b]},
        {"messages": system},
        {"prompt": "which of <image> and <image>?", "response": "the second", "image": [a, b]},
    ]
    return [{"prompt": None, "response": None, "messages": None, "image": [], **row} for row in rows]


PTX_ANSWERS = ["a circle", "yes", "hi", "red", "one", "two", "yes it is", "the second"]
PTX_PICTURES = [1, 0, 0, 1, 1, 2, 0, 2]  # that stand before the answer


@pytest.fixture
def ptx(vqa_rows, tmp_path) -> dict:
    return {
        "ptx_dataset": write_jsonl(tmp_path / "ptx.jsonl", ptx_rows(vqa_rows)),
        "ptx_batch_size": 8,
        "ptx_coef": 0.7,
    }


def test_ptx_learns_the_answers_with_one_end_token_and_nothing_else(caught, vlm, ptx, tiny):
    data = caught("update", **vlm, advantage="rloo", **ptx)["ptx"]
    tokenizer = ppo_vl.load_processor(tiny).tokenizer
    encoded = [data.encode(item) for item in data.items]
    texts = [tokenizer.decode(response) for _, response in encoded]
    assert texts == [f"{answer}{tokenizer.eos_token}" for answer in PTX_ANSWERS]
    assert [len(sample["images"]) for sample, _ in encoded] == PTX_PICTURES
    prompts = [tokenizer.decode(sample["prompt_ids"]) for sample, _ in encoded]
    assert "hi<" in prompts[3] and "hello" in prompts[3] and "be brief" in prompts[6]
    assert all(prompt.endswith("assistant\n") for prompt in prompts)


def test_ptx_of_a_template_without_end_token_adds_one(caught, text, tmp_path, tiny_text_model):
    shutil.copytree(tiny_text_model, tmp_path / "model")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    chat = [("user", "2 + 2?"), ("assistant", "4"), ("user", "and 3 + 3?"), ("assistant", "6")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]}]
    flags = {**text, "model": tmp_path / "model", "ptx_dataset": write_jsonl(tmp_path / "ptx.jsonl", rows)}
    data = caught("update", **flags, advantage="rloo")["ptx"]
    encoded, decode = [data.encode(item) for item in data.items], data.processor.decode
    assert [decode(response) for _, response in encoded] == ["4\n<|end|>", "6\n<|end|>"]
    assert decode(encoded[1][0]["prompt_ids"]) == "user: 2 + 2?\nassistant: 4\nuser: and 3 + 3?\nassistant: "


def test_gradient_with_ptx_is_the_sum_of_both_parts(caught, vlm, ptx, vqa_rows, plain_model, monkeypatch):
    call = caught("update", **vlm, advantage="rloo", **ptx, **ONE_STEP)
    both, _ = gradients_of_update(monkeypatch, call)
    alone, _ = gradients_of_update(monkeypatch, call, ptx=None)
    model, processor = plain_model
    total, count = 0.0, 0
    for row in ptx_rows(vqa_rows):
        chat = row["messages"]
        if chat is None:
            prompt = row["prompt"] if "<image>" in row["prompt"] else "<image>" * len(row["image"]) + row["prompt"]
            chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["response"]}]
        for k, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            inputs, length = ptx_inputs(processor, chat[: k + 1], row["image"])
            logits = model(**inputs).logits[0].float()
            logits[:, media_token_ids(model.config)] = float("-inf")
            logp = logits.log_softmax(-1)[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
            total, count = total - logp[-length:].sum(), count + length
    (total / count).backward()
    expected = {f"model.{name}": 0.7 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients({name: both[name] - alone[name] for name in both}, expected, tolerance=1e-3)
    assert both.keys() == alone.keys() and torch.stack([g.norm() for g in alone.values()]).norm() > 1e-3


def ptx_inputs(processor, chat: list[dict], images: list[str]) -> tuple[dict, int]:
    """What a user of transformers feeds the model with to learn the last turn, and the tokens of that turn."""
    from PIL import Image

    messages = []
    for message in chat:
        pieces = [piece for piece in re.split("(<image>)", message["content"]) if piece]
        parts = [{"type": "image"} if x == "<image>" else {"type": "text", "text": x} for x in pieces]
        messages.append({"role": message["role"], "content": parts})
    used = sum(message["content"].count("<image>") for message in chat)
    start = processor.apply_chat_template(messages[:-1], add_generation_prompt=True)
    pictures = [Image.open(path).convert("RGB") for path in images[:used]] or None
    inputs = processor(text=[start], images=pictures, return_tensors="pt")
    answer = processor.tokenizer(chat[-1]["content"] + processor.tokenizer.eos_token, return_tensors="pt")["input_ids"]
    whole = dict(inputs) | {"input_ids": torch.cat([inputs["input_ids"], answer], dim=1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    if "mm_token_type_ids" in whole:
        types = torch.as_tensor(whole["mm_token_type_ids"])
        whole["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, answer.shape[1]))
    return whole, answer.shape[1]


def test_ptx_rows_are_shuffled_anew_in_every_epoch(run, vlm, unsaved, ptx, monkeypatch):
    seen, encode, packs = [], ppo_vl.PtxData.encode, ppo_vl.PtxData.packs

    def spy(self, number, *args):
        with monkeypatch.context() as patch:
            patch.setattr(ppo_vl.PtxData, "encode", lambda self, item: seen.append(item) or encode(self, item))
            return packs(self, number, *args)

    monkeypatch.setattr(ppo_vl.PtxData, "packs", spy)
    steps = steps_of(
        run(**vlm, advantage="rloo", **{**ptx, "ptx_batch_size": 4})
    )  # 8 optimizer steps: 4 epochs of 8 turns
    epochs = [tuple(seen[k : k + 8]) for k in range(0, len(seen), 8)]
    assert len(epochs) == 4 and len(set(epochs)) == 4
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 8 for epoch in epochs)
    assert all(m["loss/ptx"] > 0 for m in steps)


def test_ptx_turns_that_are_too_long_are_dropped_and_counted(caught, text, tmp_path, capsys):
    rows = [{"prompt": "a", "response": "b" * n} for n in (5, 900, 2000)]
    caught("update", **text, advantage="rloo", ptx_dataset=write_jsonl(tmp_path / "ptx.jsonl", rows))
    assert "2 supervised turns (1 too long)" in capsys.readouterr().out


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BAD_PTX = {
    "no assistant turn": (["row 1", "assistant"], [{"messages": CHAT}, {"messages": CHAT[:1]}]),
    "assistant first": (["row 0", "assistant"], [{"messages": CHAT[1:]}]),
    "no response": (["row 1", "assistant"], [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": None}]),
    "picture is missing": (["row 0", "nope.png"], [{"prompt": "a", "response": "b", "image": "nope.png"}]),
    "picture without a place": (["row 0", "placeholder"], [{"prompt": "<image> a", "response": "b"}]),
    "no column": (["ptx.jsonl", "messages", "text"], [{"text": "a"}]),
    "nothing": (["ptx.jsonl"], []),
    "all too long": (["--ptx-dataset", "short"], [{"prompt": "a", "response": "b " * 3000}]),
}


@pytest.mark.parametrize("name", BAD_PTX)
def test_bad_ptx_rows_are_refused(name, stops, vlm, tmp_path):
    words, rows = BAD_PTX[name]
    stops(*words, **vlm, ptx_dataset=write_jsonl(tmp_path / "ptx.jsonl", rows))
    assert not (tmp_path / "runs").exists()


def test_ptx_dataset_without_rows_is_refused(stops, vlm, tmp_path):
    (tmp_path / "ptx.csv").write_text("prompt,response\n")
    stops("ptx.csv", "no data", **vlm, ptx_dataset=tmp_path / "ptx.csv")


# --- 6. EMA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ema_weights(monkeypatch):
    """Weights (i -> tensor) at the start and after every update of the averages of the runs to come, and their names."""
    history, init, update = [], ppo_vl.Ema.__init__, ppo_vl.Ema.update

    def first(self, module, *args):
        init(self, module, *args)
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        history[:] = [names, {i: average.clone() for i, average in self.average.items()}]

    def after(self):
        history.append({i: p.detach().float().cpu().clone() for i, p in self.each()})
        update(self)

    monkeypatch.setattr(ppo_vl.Ema, "__init__", first)
    monkeypatch.setattr(ppo_vl.Ema, "update", after)
    return history


def closed_form(history: list, beta: float) -> dict[str, torch.Tensor]:
    """beta^N w_0 + (1 - beta) sum_n beta^(N - n) w_n"""
    names, start, *later = history
    N = len(later)
    return {
        name.removeprefix("model."): beta**N * start[i]
        + (1 - beta) * sum(beta ** (N - n) * w[i] for n, w in enumerate(later, 1))
        for i, name in enumerate(names)
    }


def assert_close_weights(weights: dict, expected: dict, tolerance=1e-6):
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name].float(), tensor, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.slow
def test_average_is_the_closed_form_of_the_weights(zero_stage, run, any_reward, ema_weights, monkeypatch):
    from transformers import AutoModelForImageTextToText

    applied, inside = ppo_vl.Ema.applied, []

    class Watched:
        """Ema.applied: the weights while it holds, and before and after."""

        def __init__(self, ema):
            self.ema, self.context = ema, applied(ema)

        def now(self):
            return {i: p.detach().clone() for i, p in self.ema.each()}

        def __enter__(self):
            self.before = self.now()
            self.context.__enter__()
            assert all(torch.equal(p, self.ema.average[i]) for i, p in self.now().items())
            inside.append(not same_weights(self.now(), self.before))

        def __exit__(self, *error):
            self.context.__exit__(*error)
            assert same_weights(self.now(), self.before)

    monkeypatch.setattr(ppo_vl.Ema, "applied", lambda self: Watched(self))
    flags = {
        **any_reward,
        **FAST,
        "advantage": "rloo",
        "ema_beta": 0.8,
        "eval_ema": True,
        "eval_samples": 2,
        **SMALL,
        "kl_coef": 0,
    }
    folder = run(**flags, zero_stage=zero_stage)
    assert len(ema_weights) == 2 + 4 and inside == [False, True, True], "evaluation before and after, and the export"
    expected = closed_form(ema_weights, 0.8)
    saved, plain = (
        dict(AutoModelForImageTextToText.from_pretrained(f, dtype=torch.float32).named_parameters())
        for f in (folder / "checkpoint-2/ema", folder / "checkpoint-2")
    )
    assert_close_weights(saved, expected)
    last = {name.removeprefix("model."): ema_weights[-1][i] for i, name in enumerate(ema_weights[0])}
    assert_close_weights(plain, last, tolerance=0)
    assert any((saved[name] - plain[name]).abs().max() > 1e-3 for name in plain)
    before, *_, end = read_metrics(folder)
    for metrics in (before, end):
        names = {name for name in metrics if name.startswith("eval/") and not name.startswith("eval/ema_")}
        assert {name.replace("eval/", "eval/ema_") for name in names} <= metrics.keys()
    assert before["eval/ema_greedy_score"] == before["eval/greedy_score"]


def test_average_goes_on_after_a_resume(run, text):
    flags = {**text, **FAST, "advantage": "rloo", "ema_beta": 0.9, "save_steps": 1, "kl_coef": 0}
    folder = run(**flags)
    whole = {name: load_file(folder / f"checkpoint-2/{name}/model.safetensors") for name in ("ema", ".")}
    shutil.rmtree(folder / "checkpoint-2")
    run(**flags, resume=folder / "checkpoint-1")
    for name, expected in whole.items():
        assert same_weights(load_file(folder / f"checkpoint-2/{name}/model.safetensors"), expected)
    assert not same_weights(whole["ema"], whole["."])


@pytest.mark.slow
def test_average_of_adapters_is_exported_merged(run, text, ema_weights):
    folder = run(**text, **FAST, advantage="rloo", ema_beta=0.5, lora_rank=4, kl_coef=0)
    assert all("lora_" in name for name in ema_weights[0])
    average = closed_form(ema_weights, 0.5)
    saved, start = (load_file(f / "model.safetensors") for f in (folder / "checkpoint-2/ema", Path(text["model"])))
    changed = {name for name in start if not torch.equal(start[name], saved[name])}
    assert changed == {name.replace("lora_A.default.weight", "weight") for name in average if "lora_A" in name}
    for name in changed:
        A, B = (average[name.replace("weight", f"lora_{side}.default.weight")] for side in "AB")
        torch.testing.assert_close(saved[name], start[name] + 32 / 4 * B @ A, atol=1e-5, rtol=1e-5)


# --- 7. frozen parts -------------------------------------------------------------------------------------------------


def part_of(name: str) -> str:
    """Of a parameter of the tiny vision-language model."""
    return "text" if "visual" not in name else "projector" if "merger" in name else "vision"


FROZEN = {
    "freeze_vision": (True, lambda name: part_of(name) == "vision"),
    "freeze_projector": (True, lambda name: part_of(name) == "projector"),
    "freeze_text": (True, lambda name: part_of(name) == "text"),
    "freeze": (r"layers\.[01]\.|embed", lambda name: re.search(r"layers\.[01]\.|embed", name) is not None),
}


@pytest.mark.parametrize("flag", FROZEN)
def test_frozen_parts_stay_and_the_others_move(flag, run, vlm, unsaved, seen_updates, value_head_is_random):
    value, is_frozen = FROZEN[flag]
    run(**vlm, **FAST, **SMALL, critic_learning_rate=1e-3, total_steps=1, **{flag: value})
    for engine in ("actor", "critic") if flag != "freeze" else ("actor",):  # --freeze names parameters of the actor
        before, after = seen_updates[0]["before"][engine], seen_updates[-1]["after"][engine]
        frozen = {name for name in before if is_frozen(name) and name != "value_head.weight"}
        assert frozen and frozen != before.keys()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        if engine == "actor":
            assert moved == before.keys() - frozen
        else:
            assert not moved & frozen and len(moved) > 0.9 * len(before.keys() - frozen)  # no LM head there


def test_a_frozen_actor_of_the_same_flags_resumes(run, text):
    flags = {**text, "advantage": "rloo", "freeze": r"layers\.0", "save_steps": 1}
    folder = run(**flags)
    whole = load_file(folder / "checkpoint-2/model.safetensors")
    shutil.rmtree(folder / "checkpoint-2")
    run(**flags, resume=folder / "checkpoint-1")
    assert same_weights(load_file(folder / "checkpoint-2/model.safetensors"), whole)


NOTHING_TO_FREEZE = {
    "no such part": (["--freeze-vision"], {"freeze_vision": True}),
    "no such projector": (["--freeze-projector"], {"freeze_projector": True}),
    "nothing left": (["--freeze-text"], {"freeze_text": True}),
    "matches nothing": (["--freeze", "nonsense"], {"freeze": "nonsense"}),
    "matches everything": (["--freeze", "every"], {"freeze": "."}),
}


@pytest.mark.parametrize("name", NOTHING_TO_FREEZE)
def test_nothing_to_freeze_or_to_train_is_refused(name, stops, text, tmp_path):
    words, flags = NOTHING_TO_FREEZE[name]
    stops(*words, **text, advantage="rloo", **flags)
    assert not (tmp_path / "runs").exists()


def test_frozen_parts_that_leave_nothing_are_refused(stops, vlm):
    stops("--freeze-text", **vlm, freeze_vision=True, freeze_projector=True, freeze_text=True)


@pytest.fixture
def tower_calls(monkeypatch):
    """Keys of the pictures that each call of a vision tower prepares, by the model it belongs to."""
    import common.packing

    calls, encode = {}, common.packing.encode_media

    def spy(base, media, order, keys=None, cache=None):
        original = base.get_image_features
        base.get_image_features = lambda **kw: calls.setdefault(id(base), []).append(keys["images"]) or original(**kw)
        try:
            return encode(base, media, order, keys, cache)
        finally:
            del base.get_image_features

    monkeypatch.setattr(common.packing, "encode_media", spy)
    return calls


TOWER = {"freeze_vision": True, "freeze_projector": True}


@pytest.mark.parametrize("flags", [TOWER, {"freeze": "visual", "advantage": "rloo"}], ids=["parts", "regex"])
@pytest.mark.slow
def test_a_frozen_tower_runs_once_per_picture_and_rollout(
    flags, run, mixed, any_reward, unsaved, tower_calls, monkeypatch
):
    bases, make = {}, ppo_vl.make_engine

    def keep(args, module, *rest):
        model = module.backbone if isinstance(module, ppo_vl.Critic) else module.model
        bases[type(module).__name__] = id(model.base_model)
        return make(args, module, *rest)

    monkeypatch.setattr(ppo_vl, "make_engine", keep)
    run(**{**mixed, **any_reward}, **flags, kl_coef=0.1)
    assert tower_calls.keys() == set(bases.values()), "the reference takes the features of the actor"
    for calls in tower_calls.values():
        assert len(calls) == 2, "one pack scores a rollout here; the updates take what it left"
        assert all(len(keys) == len(set(keys)) == 2 for keys in calls)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_with_remembered_pictures_are_those_without(
    checkpointing, caught, mixed, any_reward, monkeypatch, value_head_is_random
):
    flags = {**mixed, **any_reward, **TOWER, **ONE_STEP, "gradient_checkpointing": checkpointing}
    call = caught("update", **flags)
    cached, _ = gradients_of_update(monkeypatch, call)
    caches = [call[name].module.media_cache for name in ("actor", "critic")]
    assert all(len(cache) == 2 for cache in caches)
    for name in ("actor", "critic"):
        call[name].module.media_cache = None
    fresh, _ = gradients_of_update(monkeypatch, call)
    assert_same_gradients(cached, fresh, tolerance=1e-5)
    assert not any("visual" in name for name in cached)


TRAINED_TOWERS = [{"freeze_vision": True}, {"lora_rank": 2, "lora_targets": "visual.*qkv"}]


@pytest.mark.parametrize("flags", TRAINED_TOWERS, ids=lambda flags: next(iter(flags)))
def test_a_tower_that_is_trained_is_never_remembered(flags, caught, vlm):
    assert caught("update", **vlm, **flags, advantage="rloo")["actor"].module.media_cache is None


def test_remembered_pictures_do_not_outlive_a_rollout(run, vlm, unsaved, monkeypatch):
    seen, update = [], ppo_vl.update

    def spy(args, rollout, tables, policy_mask, prompt_of, actor, *rest):
        keys = {("images", x["key"]) for g, _ in rollout.groups for x in prompt_of(g)["images"]}
        seen.append(actor.module.media_cache.keys() == keys)
        return update(args, rollout, tables, policy_mask, prompt_of, actor, *rest)

    monkeypatch.setattr(ppo_vl, "update", spy)
    run(**vlm, advantage="rloo", **TOWER)
    assert seen == [True, True]


# --- 8. LoRA ---------------------------------------------------------------------------------------------------------

LORA = {"lora_rank": 4, "lora_alpha": 8, **FAST, "learning_rate": 1e-2, "critic_learning_rate": 1e-2}


def plain_name(name: str) -> str:
    return name.replace(".base_layer", "").removeprefix("backbone.").removeprefix("model.").removeprefix("model.")


def test_lora_trains_adapters_alone_and_exports_the_merged_model(run_with_engines, vlm, vqa_rows, plain_model):
    from transformers import AutoModelForImageTextToText

    folder, engines = run_with_engines(**vlm, **LORA, **SMALL, total_steps=3)
    start = {plain_name(name): p for name, p in plain_model[0].named_parameters()}
    for kind, engine in engines.items():
        parameters = dict(engine.module.named_parameters())
        base = {plain_name(n): p for n, p in parameters.items() if "lora_" not in n and "value_head" not in n}
        assert base and base.keys() <= start.keys() and all(torch.equal(p, start[n]) for n, p in base.items())
        adapters = {n: p for n, p in parameters.items() if "lora_" in n}
        assert len(adapters) == 2 * 7 * 4 and all(p.abs().max() > 0 for p in adapters.values())
        trained = {n for n, p in parameters.items() if p.requires_grad}
        assert trained == adapters.keys() | ({"value_head.weight"} if kind == "Critic" else set())
    model = engines["Actor"].module.model
    merged = AutoModelForImageTextToText.from_pretrained(folder / "checkpoint-3", dtype=torch.float32).eval()
    inputs = plain_inputs(plain_model[1], {**vqa_rows[0], "images": [vqa_rows[0]["image"]]})
    with torch.no_grad():
        logp = [m.eval()(**inputs).logits.log_softmax(-1) for m in (model, merged, plain_model[0])]
    assert (logp[0] - logp[1]).abs().max() < 1e-4
    assert (logp[0] - logp[2]).abs().max() > 1e-2


def test_reference_of_lora_is_the_model_without_adapters(caught, run, text, unsaved, tiny_text_model):
    steps = steps_of(run(**text, **LORA, advantage="rloo", kl_coef=0.1, kl_estimator="k2"))
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-6) and steps[1]["objective/kl"] > 1e-4
    call = caught("update", 2, **text, **LORA, advantage="rloo", kl_coef=0.1, run_name="again")
    rollout, model = call["rollout"], ppo_vl.load_model(tiny_text_model, torch.float32)
    shared = ppo_vl.enable_packing(model)
    reference = ppo_vl.Actor(call["args"], model.eval())
    for pack in ppo_vl.packs_of_rank(call["args"], rollout, rollout.groups, call["prompt_of"], shared, 0, 1, "cpu"):
        with torch.no_grad():
            expected = reference(pack)[0]
        torch.testing.assert_close(ppo_vl.rows_to_flat(rollout.ref_logprobs, pack), expected, atol=1e-4, rtol=0)
    assert (rollout.logprobs - rollout.ref_logprobs).abs().max() > 1e-2


def test_kl_of_lora_is_subtracted_from_the_rewards(caught, text):
    flags = {**text, **LORA, "advantage": "rloo", "whiten_advantages": "off"}
    call = caught("update", 2, **flags, kl_coef=0.1)
    rollout, mask = call["rollout"], call["rollout"].response_mask
    kl = (rollout.logprobs - rollout.ref_logprobs) * mask
    centered = ppo_vl.center_scores(rollout.scores, rollout.group_ids, "rloo")
    to_go = kl.flip(1).cumsum(1).flip(1)  # gamma 1, no critic: KL from here to the end
    expected = (centered[:, None] - 0.1 * to_go) * mask
    torch.testing.assert_close(call["tables"]["advantages"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_gradient_checkpointing_of_lora_does_not_change_the_result(run, vlm, unsaved):
    plain, saving = (
        steps_of(
            run(**vlm, **SMALL, **{**LORA, "learning_rate": 1e-3}, run_name=f"run{flag}", gradient_checkpointing=flag)
        )
        for flag in (False, True)
    )
    for a, b in zip(plain, saving, strict=True):
        for name in ("loss/policy", "loss/value", "train/grad_norm", "train/critic_grad_norm", "objective/scores"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
    assert plain[0]["train/grad_norm"] > 0


# --- 9. mixture of experts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe_model(tiny_text_model, tmp_path_factory) -> str:
    """Folder of a random mixture of experts with the tokenizer of the text model."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_text_model)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    size |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, router_aux_loss_coef=0.25, **size
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            parameter.data.mul_(30)  # experts of unequal load
    folder = tmp_path_factory.mktemp("moe_model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def router_gradients(gradients: dict) -> dict:
    return {name: g for name, g in gradients.items() if "mlp.gate" in name}


def test_load_balancing_loss_is_that_of_transformers(caught, text, moe_model, monkeypatch):
    from transformers import AutoModelForCausalLM

    flags = {
        **text,
        "model": moe_model,
        "advantage": "rloo",
        **ONE_STEP,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
    }
    call = caught("update", **flags)
    call["tables"] |= {"advantages": torch.zeros_like(call["tables"]["advantages"])}
    gradients, packs = gradients_of_update(monkeypatch, call)
    rollout, sample = call["rollout"], call["prompt_of"](0)
    assert packs == 1 and len(rollout.groups) == 1
    rows = [torch.cat([sample["prompt_ids"], response]) for response in rollout.response_ids]
    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    (0.25 * model(input_ids=input_ids, attention_mask=attention_mask, output_router_logits=True).aux_loss).backward()
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert router_gradients(expected)
    found = {name: g for name, g in gradients.items() if g.any()}
    assert_same_gradients(found, expected)


def test_router_aux_coef_of_a_run(run, text, moe_model, unsaved, monkeypatch):
    losses = {}
    for coef in (None, 0.5, 0):
        name = f"run{coef}"
        steps = steps_of(run(**{**text, "model": moe_model}, advantage="rloo", run_name=name, router_aux_coef=coef))
        assert all(math.isfinite(value) for m in steps for value in m.values())
        losses[coef] = [m.get("loss/router") for m in steps]
    assert losses[0] == [None, None]
    assert losses[0.5][0] == pytest.approx(2 * losses[None][0], rel=1e-3) and losses[None][0] > 0.25


def test_router_learns_nothing_from_a_coefficient_of_0(caught, text, moe_model, monkeypatch):
    call = caught("update", **{**text, "model": moe_model}, advantage="rloo", **ONE_STEP, router_aux_coef=0)
    call["tables"] |= {"advantages": torch.zeros_like(call["tables"]["advantages"])}
    gradients, _ = gradients_of_update(monkeypatch, call)
    assert not any(g.any() for g in gradients.values())


# --- 10. batches -----------------------------------------------------------------------------------------------------


BATCHES = {  # rollout and train batch size -> rollouts and optimizer steps of a step, with 2 epochs
    "less": (16, 4, 1, 8),
    "equal": (16, 16, 1, 2),
    "more": (8, 24, 3, 2),
}


@pytest.mark.parametrize("name", BATCHES)
def test_optimizer_steps_are_as_many_as_are_said(name, run, text, unsaved, monkeypatch, capsys, seen_updates):
    rollout_size, train_size, rollouts, updates = BATCHES[name]
    calls, step = [], ppo_vl.optimizer_step
    monkeypatch.setattr(ppo_vl, "optimizer_step", lambda engine: calls.append(1) or step(engine))
    flags = {"rollout_batch_size": rollout_size, "train_batch_size": train_size, "advantage": "rloo"}
    steps = steps_of(run(**text, **flags))
    said = (
        f"a step is {rollouts} rollout(s) of {rollout_size} responses and {updates} optimizer step(s) of {train_size}"
    )
    assert said in capsys.readouterr().out
    assert len(calls) == 2 * updates
    assert [m["rollout/responses_trained"] for m in steps] == [rollouts * rollout_size] * 2
    rows = [row for call in seen_updates for row in call["rollout"].row_indices]
    assert len(rows) == 2 * rollouts * rollout_size // 4
    assert len(set(rows[:12])) == min(12, len(rows)), "each row once per pass over the data"


@pytest.mark.parametrize("limit, kept", [(4, 1), (11, 2), (100, 4)])
def test_replay_limit_trains_on_the_newest_groups(limit, kept, run, text, unsaved, monkeypatch, seen_updates):
    sampled, generate = [], ppo_vl.generate_and_score

    def spy(*args):
        records, prompts = generate(*args)
        sampled.append([record["row"] for record in records])
        return records, prompts

    monkeypatch.setattr(ppo_vl, "generate_and_score", spy)
    folder = run(**text, advantage="rloo", replay_limit=limit, save_trajectories=True)
    assert [call["rollout"].row_indices for call in seen_updates] == [rows[-kept:] for rows in sampled]
    assert [m["rollout/responses_trained"] for m in steps_of(folder)] == [4 * kept] * 2
    lines = read_jsonl(folder / "trajectories/step_2.jsonl")
    assert [line["row"] for line in lines] == [row for row in sampled[1][-kept:] for _ in range(4)]


@pytest.fixture
def uneven_reward(tmp_path) -> dict:
    """A reward that tells the responses of every second sum apart."""
    body = "return [sum(ids) % 7 if int(a) % 4 else 1.0 for ids, a in zip(completion_ids, answer)]"
    (tmp_path / "uneven.py").write_text(f"def score(completion_ids, answer, **columns):\n    {body}\n")
    return {"rewards": [f"{tmp_path}/uneven.py:score"], "reward_weights": [1]}


def test_dynamic_sampling_goes_on_until_every_group_has_a_spread(run, text, unsaved, uneven_reward, seen_updates):
    flags = {**text, **uneven_reward, "advantage": "group_norm", "max_response_length": 12}
    steps = steps_of(run(**flags, dynamic_sampling=5))
    for call, metrics in zip(seen_updates, steps, strict=True):
        scores = call["rollout"].scores.view(4, 4)
        assert (scores.std(1) > 0).all() and metrics["rollout/responses_trained"] == 16
        assert metrics["rollout/prompts_sampled"] > 4 and metrics["rollout/zero_std_groups_frac"] > 0
    assert steps[1]["train/episode"] == 4 * sum(m["rollout/prompts_sampled"] for m in steps)
    seen_updates.clear()
    steps = steps_of(run(**flags, dynamic_sampling=0, run_name="off"))
    assert [m["rollout/prompts_sampled"] for m in steps] == [4, 4]
    assert any((call["rollout"].scores.view(4, 4).std(1) == 0).any() for call in seen_updates)


def test_dynamic_sampling_without_any_spread_is_refused(stops, text, tmp_path):
    (tmp_path / "same.py").write_text("def score(answer, **columns):\n    return [1.0] * len(answer)\n")
    flags = {**text, "rewards": [f"{tmp_path}/same.py:score"], "reward_weights": [1], "advantage": "rloo"}
    stops("step 1", "--dynamic-sampling", **flags, dynamic_sampling=2)


def test_epochs_are_shuffled_anew(caught, text, monkeypatch):
    """More in test_ppo_update.py; here over the steps of a run too, with fewer groups than optimizer steps."""
    flags = {"advantage": "rloo", "rollout_batch_size": 16, "train_batch_size": 4, "replay_limit": 12}
    call = caught("update", **text, **flags, num_ppo_epochs=4)
    batches, packs = [], ppo_vl.packs_of_rank

    def spy(args, rollout, groups, *rest):
        batches.append([g for g, _ in groups])
        return packs(args, rollout, groups, *rest)

    monkeypatch.setattr(ppo_vl, "packs_of_rank", spy)
    for step in (1, 2):
        _, skipped = ppo_vl.update(**{**call, "step": step})
        assert skipped == [{}] * 12, "3 of 4 optimizer steps have a group"
    order = [g for batch in batches for g in batch]
    epochs = [tuple(order[k : k + 3]) for k in range(0, len(order), 3)]
    assert len(epochs) == 8 and all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len(set(epochs)) > 3


# --- 11. rewards, advantages, entropy --------------------------------------------------------------------------------


@pytest.fixture
def raw_and_used(monkeypatch):
    """Scores of the rollouts, and those that the estimator sees."""
    seen, make, center = {"raw": [], "used": []}, ppo_vl.make_rollout, ppo_vl.center_scores

    def spy_make(*args):
        rollout = make(*args)
        seen["raw"].append(rollout.scores.clone())
        return rollout

    def spy_center(scores, *args):
        seen["used"].append(scores.clone())
        return center(scores, *args)

    monkeypatch.setattr(ppo_vl, "make_rollout", spy_make)
    monkeypatch.setattr(ppo_vl, "center_scores", spy_center)
    return seen


@pytest.mark.parametrize("norm", ["scale", "standardize"])
def test_scores_are_normalized_by_all_training_scores_so_far(norm, run, text, vqa, raw_and_used):
    flags = {**text, "eval_dataset": text["dataset"], "eval_steps": 1, "save_steps": 1, "advantage": "reinforce"}
    folder = run(**flags, total_steps=3, reward_running_norm=norm)
    raw, used = raw_and_used["raw"], raw_and_used["used"]
    for n in (1, 2, 3):
        so_far = torch.cat(raw[:n]).double()
        mean = so_far.mean() if norm == "standardize" else 0.0
        expected = (raw[n - 1].double() - mean) / so_far.std(correction=0)
        torch.testing.assert_close(used[n - 1].double(), expected, atol=1e-5, rtol=1e-5)
    state = json.loads((folder / "checkpoint-3/state/trainer_state.json").read_text())["moments"]
    assert state[0] == 48, "evaluations are not counted"
    assert state[1:] == pytest.approx([so_far.mean().item(), (so_far - so_far.mean()).square().sum().item()])
    shutil.rmtree(folder / "checkpoint-3")
    run(**flags, total_steps=3, reward_running_norm=norm, resume=folder / "checkpoint-2")
    assert torch.equal(raw_and_used["used"][3], used[2]), "the moments are restored"
    for metrics in steps_of(folder):
        assert metrics["objective/scores"] == pytest.approx(raw[metrics["train/step"] - 1].mean().item(), rel=1e-5)


@pytest.mark.parametrize("norm", ["scale", "standardize"])
def test_scores_that_are_all_equal_are_normalized_safely(norm, run, text, unsaved, tmp_path, raw_and_used):
    (tmp_path / "same.py").write_text("def score(answer, **columns):\n    return [0.7] * len(answer)\n")
    flags = {**text, "rewards": [f"{tmp_path}/same.py:score"], "reward_weights": [1], "advantage": "reinforce"}
    steps = steps_of(run(**flags, reward_running_norm=norm))
    assert all(math.isfinite(value) for m in steps for value in m.values())
    for scores in raw_and_used["used"]:
        assert scores.tolist() == pytest.approx([0.7 if norm == "scale" else 0.0] * 16, abs=1e-6)


def test_reward_clip_bounds_the_scores_and_counts_them(run, text, unsaved, raw_and_used):
    steps = steps_of(run(**text, advantage="reinforce", reward_clip=(0.2, 0.6)))
    for raw, used, metrics in zip(raw_and_used["raw"], raw_and_used["used"], steps, strict=True):
        assert torch.equal(used, raw.clamp(0.2, 0.6))
        outside = ((raw < 0.2) | (raw > 0.6)).float().mean().item()
        assert 0 < outside < 1 and metrics["objective/reward_clipfrac"] == pytest.approx(outside)


def test_reward_clip_comes_after_the_normalization(run, text, unsaved, raw_and_used):
    run(**text, advantage="reinforce", reward_clip=(-1, 1), reward_running_norm="standardize", total_steps=1)
    raw = raw_and_used["raw"][0]
    expected = ((raw - raw.mean()) / raw.std(correction=0)).clamp(-1, 1)
    torch.testing.assert_close(raw_and_used["used"][0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whiten", ["on", "off"])
def test_advantage_clip_bounds_the_advantages_and_counts_them(whiten, run, text, unsaved, seen_updates):
    flags = {**text, "advantage": "rloo", "whiten_advantages": whiten, "total_steps": 1}
    limit = 0.8 if whiten == "on" else 0.2
    run(**flags)
    [metrics] = steps_of(run(**flags, advantage_clip=limit, run_name="clipped"))
    mask = seen_updates[0]["rollout"].response_mask
    free, clipped = (call["tables"]["advantages"] for call in seen_updates)
    assert torch.equal(clipped, free.clamp(-limit, limit)) and free.abs().max() > limit
    frac = (free.abs() > limit)[mask].float().mean().item()
    assert 0 < frac < 1 and metrics["objective/advantage_clipfrac"] == pytest.approx(frac)
    assert metrics["objective/advantages_std"] == pytest.approx(clipped[mask].std(correction=0).item(), rel=1e-4)


def test_share_of_tokens_of_highest_entropy_is_chosen(run, text, unsaved, seen_updates):
    flags = {**text, "advantage": "rloo", "entropy_token_ratio": 0.2, "kl_coef": 0}
    steps = steps_of(run(**flags))
    for call, metrics in zip(seen_updates, steps, strict=True):
        mask, chosen, entropy = call["rollout"].response_mask, call["policy_mask"], call["rollout"].entropy
        assert entropy[mask & ~chosen].max() < entropy[chosen].min() and not (chosen & ~mask).any()
        assert metrics["train/tokens_trained_frac"] == pytest.approx(0.2, abs=0.03)
        assert metrics["train/tokens_trained_frac"] == pytest.approx((chosen.sum() / mask.sum()).item())


def test_policy_loss_of_the_chosen_tokens_alone(caught, text, monkeypatch):
    call = caught("update", **text, **ONE_STEP, advantage="rloo", entropy_token_ratio=0.2, kl_coef=0)
    few, _ = gradients_of_update(monkeypatch, call)
    zeroed = call["tables"]["advantages"] * call["policy_mask"]
    share = (call["policy_mask"].sum() / call["rollout"].response_mask.sum()).item()
    full_mask = call["rollout"].response_mask
    same, _ = gradients_of_update(
        monkeypatch, call, policy_mask=full_mask, tables=call["tables"] | {"advantages": zeroed}
    )
    assert_same_gradients(few, {name: g / share for name, g in same.items()})  # its mean is over the chosen tokens


def test_entropy_bonus_is_minus_the_gradient_of_the_mean_entropy(caught, text, tiny_text_model, monkeypatch):
    call = caught("update", **text, advantage="rloo", temperature=0.8, **ONE_STEP)
    bonus, _ = gradients_of_update(monkeypatch, call, args=replace(call["args"], entropy_coef=0.3))
    none, _ = gradients_of_update(monkeypatch, call)
    model, rollout = ppo_vl.load_model(tiny_text_model, torch.float32), call["rollout"]
    entropies = []
    for g, members in rollout.groups:
        prompt = call["prompt_of"](g)["prompt_ids"]
        for b in members:
            logits = model(input_ids=torch.cat([prompt, rollout.response_ids[b]])[None]).logits[0, len(prompt) - 1 : -1]
            logp = (logits / 0.8).log_softmax(-1)
            entropies.append(-(logp.exp() * logp).sum(-1))
    torch.cat(entropies).mean().backward()
    expected = {f"model.{name}": -0.3 * p.grad for name, p in model.named_parameters()}
    assert_same_gradients({name: bonus[name] - none[name] for name in bonus}, expected, tolerance=2e-3)


# --- 12. what is written ---------------------------------------------------------------------------------------------

TABLES = ["engine_logprobs", "logprobs", "ref_logprobs", "values", "advantages", "returns"]


@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_trajectories_hold_every_response_with_its_tables(advantage, run, vlm, tiny, unsaved, seen_updates):
    folder = run(**vlm, advantage=advantage, save_trajectories=True)
    decode = ppo_vl.load_processor(tiny).tokenizer.decode
    assert sorted(path.name for path in (folder / "trajectories").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    for step, call in enumerate(seen_updates, 1):
        lines, rollout = read_jsonl(folder / f"trajectories/step_{step}.jsonl"), call["rollout"]
        assert len(lines) == 16
        for b, line in enumerate(lines):
            ids = line["response_ids"]
            assert ids == rollout.response_ids[b].tolist()
            assert all(len(line[name]) == len(ids) for name in TABLES)
            assert decode(ids, skip_special_tokens=True) == line["response"]
            assert line["score"] == pytest.approx(rollout.scores[b].item(), rel=1e-5)
            assert line["logprobs"] == pytest.approx(rollout.logprobs[b, : len(ids)].tolist())
            assert line["advantages"] == pytest.approx(call["tables"]["advantages"][b, : len(ids)].tolist())
            assert line["truncated"] == (len(ids) == SHORT["max_response_length"] and ids[-1] != 500)
            assert line["row"] == rollout.row_indices[b // 4] and Path(line["images"][0]).is_file()


def test_trajectories_leave_out_responses_without_a_score_and_are_written_anew_on_resume(run, text, tmp_path):
    body = "return [None if sum(ids) % 3 == 0 else float(sum(ids) % 5) for ids in completion_ids]"
    (tmp_path / "some.py").write_text(f"def score(completion_ids, **columns):\n    {body}\n")
    flags = {**text, "rewards": [f"{tmp_path}/some.py:score"], "reward_weights": [1], "advantage": "reinforce"}
    folder = run(**flags, save_trajectories=True, save_steps=1)
    whole = [read_jsonl(folder / f"trajectories/step_{n}.jsonl") for n in (1, 2)]
    for lines, metrics in zip(whole, steps_of(folder), strict=True):
        assert len(lines) == metrics["rollout/responses_trained"] < 16
        for line in lines:
            assert sum(line["response_ids"]) % 3 and line["score"] == sum(line["response_ids"]) % 5
    shutil.rmtree(folder / "checkpoint-2")
    run(**flags, save_trajectories=True, resume=folder / "checkpoint-1")
    again = read_jsonl(folder / "trajectories/step_2.jsonl")
    assert [line["response_ids"] for line in again] == [line["response_ids"] for line in whole[1]]


def test_every_held_out_generation_is_kept(run, text, unsaved):
    flags = {**text, "eval_dataset": text["dataset"], "eval_samples": 0, "eval_num_samples": 3, "eval_steps": 1}
    folder = run(**flags, advantage="rloo")
    assert sorted(path.name for path in (folder / "eval").iterdir()) == [f"eval_step_{n}.json" for n in (0, 1, 2)]
    for step in (0, 1, 2):
        samples = json.loads((folder / f"eval/eval_step_{step}.json").read_text())
        [metrics] = [m for m in read_metrics(folder) if m["train/step"] == step]
        for phase, count in (("greedy", 1), ("sampled", 3)):
            own = [sample for sample in samples if sample["phase"] == f"eval_{phase}"]
            assert sorted(sample["row"] for sample in own) == sorted(list(range(12)) * count)
            scores = [sample["score"] for sample in own]
            assert metrics[f"eval/{phase}_score"] == pytest.approx(np.mean(scores))


# --- 13. bad flags ---------------------------------------------------------------------------------------------------

BAD_FLAGS = {
    "rollout no multiple": (["--rollout-batch-size 10", "multiple"], {"rollout_batch_size": 10}),
    "train no multiple": (["--train-batch-size 10", "multiple"], {"train_batch_size": 10}),
    "batches do not fit": (["--rollout-batch-size 24", "16"], {"rollout_batch_size": 24, "train_batch_size": 16}),
    "pack too small": (["--micro-batch-tokens"], {"micro_batch_tokens": 500}),
    "kl_target without kl": (["--kl-target"], {"kl_target": 1, "kl_coef": 0}),
    "kl_target of 0": (["--kl-target"], {"kl_target": 0}),
    "reward_clip upside down": (["--reward-clip", "less"], {"reward_clip": (1, -1)}),
    "reward_clip of nothing": (["--reward-clip", "less"], {"reward_clip": (1, 1)}),
    "dynamic sampling of one": (["--dynamic-sampling"], {"dynamic_sampling": 1, "num_samples_per_prompt": 1}),
    "critic model without critic": (["--critic-model", "rloo"], {"advantage": "rloo", "critic_model": "x"}),
    "shared backbone without critic": (["--critic-share-backbone"], {"advantage": "cpgd", "critic_share_backbone": True}),
    "frozen actor without critic": (["--freezing-actor-steps"], {"advantage": "reinforce", "freezing_actor_steps": 1}),
    "shared backbone and model": (["--critic-model"], {"critic_share_backbone": True, "critic_model": "x"}),
    "shared backbone, frozen actor": (["--critic-share-backbone"], {"critic_share_backbone": True, "freezing_actor_steps": 1}),
    "actor always frozen": (["--freezing-actor-steps 2", "--total-steps 2"], {"freezing_actor_steps": 2}),
    "dual_clip of 1": (["--dual-clip"], {"dual_clip": 1}),
    "replay limit below a group": (["--replay-limit 3"], {"replay_limit": 3}),
    "ema_beta of 1": (["--ema-beta"], {"ema_beta": 1}),
    "ema_beta above 1": (["--ema-beta"], {"ema_beta": 1.5}),
    "eval_ema without ema": (["--eval-ema", "--ema-beta"], {"eval_ema": True}),
    "freeze no regex": (["--freeze", "regular expression"], {"freeze": "("}),
    "lora targets without lora": (["--lora-targets", "--lora-rank"], {"lora_targets": "q"}),
    "lora targets no regex": (["--lora-targets", "regular expression"], {"lora_rank": 2, "lora_targets": "("}),
    "4 bit on the CPU": (["--load-in-4bit", "CUDA"], {"load_in_4bit": True, "lora_rank": 2}),
    **{
        f"{name} is {value}": ([f"--{name.replace('_', '-')}"], {name: value})
        for name, value in {
            "entropy_token_ratio": 0, "entropy_coef": -1, "advantage_clip": -1, "ptx_coef": -0.1, "ptx_batch_size": 0,
            "router_aux_coef": -1, "lora_rank": -1, "lora_alpha": 0, "replay_limit": -1, "critic_warmup_steps": -1,
            "freezing_actor_steps": -1, "clip_coef_high": 0, "generation_batch_size": 0, "eval_num_samples": 0,
        }.items()
    },
    **{
        f"{name} of one response": ([f"--advantage {name}", "2 or more"], {"advantage": name, "num_samples_per_prompt": 1})
        for name in ("reinforce_baseline", "rloo", "group_norm", "cpgd")
    },
    "half of the tokens twice": (["--entropy-token-ratio"], {"entropy_token_ratio": 1.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_refused_before_a_model_is_loaded(name, monkeypatch, tmp_path, capfd):
    words, flags = BAD_FLAGS[name]
    for function in ("load_model", "load_processor", "load_rows"):
        monkeypatch.delattr(ppo_vl, function)
    with pytest.raises(SystemExit) as stopped:  # without the command line, which takes longer than the checks
        ppo_vl.main(ppo_vl.Args(**{**SHORT, "output_dir": str(tmp_path / "runs"), **flags}))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, words)
    assert not (tmp_path / "runs").exists()
