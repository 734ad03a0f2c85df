"""Options of ppo_vl on tiny models, through its command line: estimators, losses, KL, critics, PTX, EMA, freezing, LoRA, batches."""
# ruff: noqa: F401, F811  fixtures

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
    steps = steps_of(run(**vlm, **{"advantage": "group_norm", **flags}))
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


def test_gradient_of_the_kl_loss_is_that_without_packing(caught, mixed, monkeypatch):
    call = caught("update", advantage="reinforce", kl_loss=True, **mixed, **ONE_STEP)
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
