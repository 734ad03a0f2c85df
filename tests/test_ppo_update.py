"""Rollout and update on the tiny model: log-probs, gradients, what the vision tower sees, and steps that are skipped.

`caught` runs main up to a chosen function and hands over that function's arguments, so that engines, packs and
tables are those of a real run.
"""

import inspect
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SHORT, read_jsonl, write_jsonl
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ppo_vl
from common import packing
from common.packing import media_token_ids


class Caught(Exception):
    pass


@pytest.fixture
def caught(argv, monkeypatch):
    """Run main until its `call`-th call of a top-level function -> the arguments of that call, by name."""

    def until(name: str, call: int = 1, **flags) -> dict:
        original, found, calls = getattr(ppo_vl, name), {}, []

        def stop(*args, **kwargs):
            calls.append(1)
            if len(calls) < call:
                return original(*args, **kwargs)
            found.update(inspect.signature(original).bind(*args, **kwargs).arguments)
            raise Caught

        with monkeypatch.context() as patch, pytest.raises(Caught):
            patch.setattr(ppo_vl, name, stop)
            ppo_vl.main(ppo_vl.parse_args(argv(**{"eval_dataset": None, **flags})))
        return found

    return until


@pytest.fixture
def value_head_is_random(monkeypatch):
    """A value head of zeros would hide every gradient of the critic's backbone."""
    make = ppo_vl.make_value_head

    def make_random(model):
        head = make(model)
        torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        return head

    monkeypatch.setattr(ppo_vl, "make_value_head", make_random)


def gradients_of_update(monkeypatch, call: dict, **changes) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients at the only optimizer step of an update, which is not taken, and the number of packs."""
    gradients, packs, build_pack = {}, [], ppo_vl.build_pack

    def look(engine):
        gradients.update({name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None})
        engine.zero_grad()
        return 1.0, True

    with monkeypatch.context() as patch:
        patch.setattr(ppo_vl, "optimizer_step", look)
        patch.setattr(ppo_vl, "build_pack", lambda *args, **kwargs: packs.append(1) or build_pack(*args, **kwargs))
        ppo_vl.update(**{**call, **changes})
    return gradients, len(packs)


def assert_same_gradients(gradients, others, tolerance=1e-4):
    assert gradients.keys() == others.keys() and gradients
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    for name, gradient in gradients.items():
        error = (gradient - others[name]).norm()
        assert error <= tolerance * gradient.norm() + 1e-6 * total, f"{name}: {error / gradient.norm():.1e}"


ONE_STEP = {"rollout_batch_size": 32, "num_samples_per_prompt": 4, "train_batch_size": 32, "num_ppo_epochs": 1}


def group_tokens(rollout) -> list[int]:
    return [
        rollout.prompt_lengths[g] + sum(len(rollout.response_ids[b]) for b in members) for g, members in rollout.groups
    ]


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"critic_share_backbone": True, "kl_loss": True, "kl_estimator": "k2"}])
def test_gradient_does_not_depend_on_the_split_into_packs(flags, caught, monkeypatch, any_reward, value_head_is_random):
    call = caught("update", **any_reward, **ONE_STEP, **flags)
    rollout, tokens = call["rollout"], group_tokens(call["rollout"])
    noise = torch.randn(rollout.logprobs.shape, generator=torch.Generator().manual_seed(0))
    rollout.logprobs = rollout.logprobs + 0.3 * noise  # so that some tokens are clipped
    rollout.ref_logprobs = rollout.ref_logprobs - noise

    def split(budget: int):
        return gradients_of_update(monkeypatch, call, args=replace(call["args"], micro_batch_tokens=budget))

    one, packs_of_one = split(sum(tokens))
    two, packs_of_two = split(sum(tokens) // 2 + max(tokens))
    eight, packs_of_eight = split(max(tokens))
    assert (packs_of_one, packs_of_two, packs_of_eight) == (1, 2, 8)
    assert_same_gradients(one, two)
    assert_same_gradients(one, eight)


@pytest.mark.slow
@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_entropy_of_weight_0_costs_no_backward(coef, caught, monkeypatch, any_reward):
    call, given = caught("update", **any_reward, **ONE_STEP, entropy_coef=coef), []
    backward = packing._ChunkedLogProbs.backward
    look = staticmethod(
        lambda ctx, g, grad_entropy: given.append(grad_entropy is not None) or backward(ctx, g, grad_entropy)
    )
    monkeypatch.setattr(packing._ChunkedLogProbs, "backward", look)
    gradients_of_update(monkeypatch, call)
    assert given == [coef > 0] * len(given) and given


@pytest.mark.slow
def test_first_minibatch_is_on_policy_and_later_ones_are_not(run, monkeypatch, any_reward):
    metrics, compute = [], ppo_vl.compute_policy_loss

    def spy(*args, **kwargs):
        losses, per_token = compute(*args, **kwargs)
        metrics.append({name: values.float() for name, values in per_token.items()})
        return losses, per_token

    monkeypatch.setattr(ppo_vl, "compute_policy_loss", spy)
    run(**any_reward, total_steps=1, temperature=0.8, warmup_steps=0)
    first, last = metrics[0], metrics[-1]
    assert (first["policy/ratio"] - 1).abs().max() < 1e-4
    assert first["policy/approx_kl"].abs().max() < 1e-8
    assert first["policy/clipfrac_low"].sum() + first["policy/clipfrac_high"].sum() == 0
    assert (last["policy/ratio"] - 1).abs().max() > 1e-3


@pytest.mark.slow
def test_kl_loss_alone_moves_the_policy(caught, monkeypatch):
    call = caught("update", kl_loss=True, kl_estimator="k2", **ONE_STEP)
    call["tables"]["ref_logprobs"] = call["tables"]["ref_logprobs"] - 0.5
    call["tables"]["advantages"] = torch.zeros_like(call["tables"]["advantages"])
    norms = []
    for kl_coef in (0.0, 0.1, 0.2):
        gradients, _ = gradients_of_update(monkeypatch, call, kl_coef=kl_coef)
        actor = [g for name, g in gradients.items() if name.startswith("model.")]
        norms.append(torch.stack([g.norm() for g in actor]).norm().item())
    assert norms[0] == 0
    assert norms[1] > 1e-4
    assert norms[2] == pytest.approx(2 * norms[1], rel=1e-3)


def test_vf_coef_does_not_touch_the_policy_of_a_critic_apart(caught, monkeypatch, any_reward, value_head_is_random):
    call = caught("update", **any_reward, **ONE_STEP)
    small, _ = gradients_of_update(monkeypatch, call, args=replace(call["args"], vf_coef=0.5))
    large, _ = gradients_of_update(monkeypatch, call, args=replace(call["args"], vf_coef=5.0))
    actor = [name for name in small if name.startswith("model.")]
    critic = [name for name in small if not name.startswith("model.")]
    assert actor and critic
    assert_same_gradients({n: small[n] for n in actor}, {n: large[n] for n in actor}, tolerance=1e-6)
    assert_same_gradients({n: 10 * small[n] for n in critic}, {n: large[n] for n in critic})


# --- what an update consists of --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_epoch_trains_every_group_once_in_an_order_of_its_own(caught, monkeypatch):
    flags = {"rollout_batch_size": 16, "num_samples_per_prompt": 2, "train_batch_size": 4, "num_ppo_epochs": 3}
    call = caught("update", **flags)
    batches, packs_of_rank = [], ppo_vl.packs_of_rank

    def spy(*args, **kwargs):
        batches.append(inspect.signature(packs_of_rank).bind(*args, **kwargs).arguments["groups"])
        return packs_of_rank(*args, **kwargs)

    monkeypatch.setattr(ppo_vl, "packs_of_rank", spy)
    ppo_vl.update(**call)
    assert [len(batch) for batch in batches] == [2] * 12
    epochs = [[g for batch in batches[i : i + 4] for g, _ in batch] for i in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("whitened", [True, False])
def test_advantages_are_whitened_once_over_the_rollout_and_returns_are_not(whitened, caught, any_reward):
    flags = {"kl_coef": 0, "gae_lambda": 1.0, "whiten_advantages": "on" if whitened else "off"}
    call = caught("update", **{**any_reward, **flags})
    rollout, mask = call["rollout"], call["rollout"].response_mask
    scores = rollout.scores[:, None].expand(mask.shape)[mask]  # values start at 0: every return is the score
    torch.testing.assert_close(call["tables"]["returns"][mask], scores)
    expected = (scores - scores.mean()) / scores.std(correction=0) if whitened else scores
    torch.testing.assert_close(call["tables"]["advantages"][mask], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype, zero_stage", [("fp32", 0), ("bf16", 0), ("fp32", 2)])
@pytest.mark.slow
def test_gradients_of_actor_and_critic_are_clipped_apart(dtype, zero_stage, caught, any_reward, value_head_is_random):
    call = caught("update", **any_reward, dtype=dtype, zero_stage=zero_stage, max_grad_norm=1e-3, **ONE_STEP)
    norms = {}  # per optimizer; under ZeRO one group of parameters at a time

    def look(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.setdefault(id(optimizer), []).extend(p.grad.float().norm() for p in parameters)

    hook = register_optimizer_step_pre_hook(look)
    metrics, _ = ppo_vl.update(**call)
    hook.remove()
    assert [torch.stack(n).norm().item() for n in norms.values()] == pytest.approx([1e-3, 1e-3], rel=0.02)
    assert metrics["train/grad_norm"] > 0.01 and metrics["train/critic_grad_norm"] > 0.01, "norms before clipping"


def test_value_head_on_the_shared_backbone_learns_at_the_rate_of_the_critic(caught):
    rates = {"learning_rate": 1e-5, "critic_learning_rate": 1e-2, "warmup_steps": 0, "lr_schedule": "constant"}
    engine = caught("update", critic_share_backbone=True, **rates)["actor"]
    rate_of = {id(p): group["lr"] for group in engine.optimizer.param_groups for p in group["params"]}
    rates = {name: rate_of[id(p)] for name, p in engine.module.named_parameters()}
    assert rates.pop("value_head.weight") == 1e-2
    assert set(rates.values()) == {1e-5}


# --- log-probs and generation ----------------------------------------------------------------------------------------


def mixed_rows(vqa_rows) -> list[dict]:
    """One picture, two pictures in the midst of text, the same picture again, none; prompts of unequal length."""
    a, b = vqa_rows[0], vqa_rows[1]
    return [
        {"prompt": a["prompt"], "images": [a["image"]], "answer": a["answer"]},
        {
            "prompt": "first <image> then <image> which is blue?",
            "images": [a["image"], b["image"]],
            "answer": b["answer"],
        },
        {"prompt": "is there a circle in this picture or is there a square?", "images": [b["image"]], "answer": "no"},
        {"prompt": "what color is grass?", "images": [], "answer": "green"},
    ]


@pytest.fixture
def mixed(vqa_rows, tmp_path) -> dict:
    return {"dataset": write_jsonl(tmp_path / "mixed.jsonl", mixed_rows(vqa_rows)), "eval_dataset": None}


def plain_inputs(processor, row: dict) -> dict:
    """What a user of transformers feeds the model with."""
    from PIL import Image

    parts = []
    for i, text in enumerate(row["prompt"].split("<image>")):
        parts += ([{"type": "image"}] if i else []) + ([{"type": "text", "text": text}] if text else [])
    if "<image>" not in row["prompt"]:
        parts = [{"type": "image"}] * len(row["images"]) + parts
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    images = [Image.open(path).convert("RGB") for path in row["images"]] or None
    return processor(text=[text], images=images, return_tensors="pt")


@pytest.fixture
def plain_model(tiny):
    """The unmodified model and processor."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(tiny)


def test_logprobs_equal_those_of_the_plain_model(caught, mixed, vqa_rows, plain_model):
    rollout = caught("update", temperature=0.7, **mixed)["rollout"]
    model, processor = plain_model
    rows, suppressed = mixed_rows(vqa_rows), media_token_ids(model.config)
    assert sorted(rollout.row_indices) == [0, 1, 2, 3] and len(rollout.response_ids) == 16
    for g, members in rollout.groups:
        inputs = plain_inputs(processor, rows[rollout.row_indices[g]])
        P = inputs["input_ids"].shape[1]
        assert P == rollout.prompt_lengths[g]
        for b in members:
            response = rollout.response_ids[b]
            whole = dict(inputs) | {"input_ids": torch.cat([inputs["input_ids"], response[None]], dim=1)}
            whole["attention_mask"] = torch.ones_like(whole["input_ids"])
            if "mm_token_type_ids" in whole:
                types = torch.as_tensor(whole["mm_token_type_ids"])
                whole["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, len(response)))
            with torch.no_grad():
                logits = model(**whole).logits[0, P - 1 : -1] / 0.7
            logits[:, suppressed] = float("-inf")
            expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(rollout.logprobs[b, : len(response)], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(rollout.ref_logprobs, rollout.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.engine_logprobs, rollout.logprobs, atol=1e-4, rtol=0)


def test_greedy_generation_equals_transformers(caught, mixed, vqa_rows, plain_model):
    call = caught("generate", **mixed)
    model, processor = plain_model
    rows, order = mixed_rows(vqa_rows), ppo_vl.batch_indices(0, 4, 4, seed=SHORT["seed"])
    args = replace(call["args"], max_response_length=16)
    responses, _, _ = ppo_vl.generate(**{**call, "args": args, "num_samples": 2, "temperature": 0.0})
    for i, row in enumerate(order):
        inputs = plain_inputs(processor, rows[row])
        P = inputs["input_ids"].shape[1]
        greedy = {"do_sample": False, "max_new_tokens": 16, "suppress_tokens": media_token_ids(model.config)}
        expected = model.generate(**inputs, **greedy, eos_token_id=call["end_ids"])[0, P:].tolist()
        assert responses[2 * i].tolist() == responses[2 * i + 1].tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholder_ids_are_never_drawn(temperature, caught, mixed):
    call = caught("generate", **mixed)
    model = call["model"]
    banned = media_token_ids(model.config)
    assert len(banned) >= 4

    def favour(module, inputs, logits):
        logits[..., banned] += 1000
        return logits

    hook = model.get_output_embeddings().register_forward_hook(favour)
    responses, _, _ = ppo_vl.generate(**{**call, "temperature": temperature})
    hook.remove()
    assert responses and not any(set(response.tolist()) & set(banned) for response in responses)


def test_responses_end_at_the_first_end_id_and_differ_within_a_group(caught, mixed):
    call = caught("generate", **mixed)
    args = replace(call["args"], max_response_length=64)
    responses, logprobs, truncated = ppo_vl.generate(**{**call, "args": args, "num_samples": 8})
    responses = [r.tolist() for r in responses]
    assert len(responses) == 8 * len(call["samples"])
    for response, cut, own in zip(responses, truncated, logprobs, strict=True):
        assert not set(response[:-1]) & set(call["end_ids"])
        assert cut == (response[-1] not in call["end_ids"]) and (len(response) == 64 or not cut)
        assert len(own) == len(response) and (own <= 0).all()
    assert all(len({tuple(r) for r in responses[i : i + 8]}) > 1 for i in range(0, len(responses), 8))


def test_any_end_id_ends_a_response_also_at_the_limit(caught, mixed):
    call = caught("generate", **mixed)

    def greedy(limit: int, *more_ends: int) -> tuple[list[int], bool]:
        """The first response, and whether it was cut."""
        changes = {"num_samples": 1, "temperature": 0.0, "end_ids": [*call["end_ids"], *more_ends]}
        args = replace(call["args"], max_response_length=limit)
        responses, _, truncated = ppo_vl.generate(**{**call, **changes, "args": args})
        return responses[0].tolist(), truncated[0]

    whole, cut = greedy(64)
    assert not cut and 2 < len(whole) < 64
    assert greedy(len(whole)) == (whole, False)
    assert greedy(len(whole) - 1) == (whole[:-1], True)
    assert greedy(64, whole[2]) == (whole[: whole.index(whole[2]) + 1], False)


@pytest.mark.parametrize("configured, expected", [([5, 2], [2, 3, 5]), (3, [3]), (None, [3])])
def test_end_ids_are_those_of_the_generation_config_and_the_tokenizer(configured, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert ppo_vl.end_token_ids(model, SimpleNamespace(eos_token_id=3)) == expected


# --- what the vision tower sees --------------------------------------------------------------------------------------


def count_patches(module) -> list[int]:
    """Picture patches that pass through the module's vision tower, one entry per call."""
    (tower,) = [m for name, m in module.named_modules() if name.split(".")[-1] == "visual"]
    seen = []

    def count(module, args, kwargs):
        seen.append(len(args[0] if args else kwargs["hidden_states"]))

    tower.register_forward_pre_hook(count, with_kwargs=True)
    return seen


def unique_patches(samples: list[dict]) -> int:
    return sum({item["key"]: len(item["pixel_values"]) for s in samples for item in s["images"]}.values())


def test_each_picture_is_encoded_once_per_pass_in_policy_reference_and_critic(caught, mixed):
    call = caught("fill_logprobs", **mixed)
    samples = [call["prompt_of"](g) for g, _ in call["rollout"].groups]
    assert sum(len(s["images"]) for s in samples) == 4 and len({i["key"] for s in samples for i in s["images"]}) == 2
    engines = inspect.getclosurevars(call["forward"]).nonlocals
    seen = [count_patches(m) for m in (engines["actor"].module, engines["reference"], engines["critic"].module)]
    ppo_vl.fill_logprobs(**call)
    assert seen == [[unique_patches(samples)]] * 3


def test_generation_encodes_each_picture_once(caught, mixed):
    call = caught("generate", **mixed)
    seen = count_patches(call["model"])
    ppo_vl.generate(**{**call, "num_samples": 8})
    assert seen == [unique_patches(call["samples"])]


def test_update_encodes_each_picture_once_per_pack(caught, mixed, monkeypatch):
    call = caught("update", **mixed, train_batch_size=16, num_ppo_epochs=1)
    samples = [call["prompt_of"](g) for g, _ in call["rollout"].groups]
    seen = [count_patches(call[name].module) for name in ("actor", "critic")]
    ppo_vl.update(**call)
    assert seen == [[unique_patches(samples)]] * 2


# --- non-finite gradients --------------------------------------------------------------------------------------------


def spoil(monkeypatch, spoiled) -> None:
    """Policy losses of those optimizer steps become NaN. One pack per step here."""
    calls, compute = [], ppo_vl.compute_policy_loss

    def broken(*args, **kwargs):
        losses, metrics = compute(*args, **kwargs)
        calls.append(1)
        return (losses * float("nan") if spoiled(len(calls)) else losses), metrics

    monkeypatch.setattr(ppo_vl, "compute_policy_loss", broken)


def weights(engine) -> torch.Tensor:
    return torch.cat(
        [
            t.flatten().float()
            for t in ppo_vl.merged_state_dict(engine.module, engine.zero_optimization_stage()).values()
        ]
    ).clone()


ENGINES = [("fp32", 0), ("bf16", 0), ("fp32", 1), ("fp32", 2), ("bf16", 2), ("fp32", 3)]


@pytest.mark.parametrize("dtype, zero_stage", ENGINES)
@pytest.mark.slow
def test_step_with_nan_gradient_is_skipped_and_leaves_no_trace(dtype, zero_stage, caught, monkeypatch, any_reward):
    flags = {"dtype": dtype, "zero_stage": zero_stage, "warmup_steps": 0, "learning_rate": 1e-2}
    call = caught("update", **any_reward, **flags)  # 2 epochs of 2 steps
    before = weights(call["actor"])
    with monkeypatch.context() as patch:
        spoil(patch, lambda step: True)
        metrics, skipped = ppo_vl.update(**call)
    assert metrics["train/skipped_updates"] == 4 and len(skipped) == 4 and all(skipped)
    assert torch.equal(weights(call["actor"]), before)
    metrics, skipped = ppo_vl.update(**call)
    assert metrics["train/skipped_updates"] == 0 and skipped == [{}] * 4
    assert weights(call["actor"]).isfinite().all() and not torch.equal(weights(call["actor"]), before)


def test_skipped_steps_that_are_not_in_a_row_do_not_stop_the_run(run, monkeypatch):
    spoil(monkeypatch, lambda step: step % 2 == 0)
    folder = run(max_skipped_updates=2, total_steps=2, eval_dataset=None)
    assert sum(m["train/skipped_updates"] for m in read_jsonl(folder / "metrics.jsonl")) == 4


# --- several processes, of two runs; of one: test_ranks.py ------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(ranks: int, *words) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", ranks, "--master_port", free_port()]
    command = [sys.executable, *map(str, [*launcher, *words])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.mark.slow
def test_two_plain_runs_side_by_side_do_not_collide(argv, tmp_path):
    words = [argv(run_name=name, total_steps=1, eval_dataset=None) for name in ("left", "right")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "ppo_vl.py"]
    runs = [subprocess.Popen([*command, *w], env=env, cwd=ROOT, stderr=subprocess.PIPE) for w in words]
    for process in runs:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr[-2000:]
    states = [json.loads((tmp_path / f"runs/{n}/args.json").read_text())["run_name"] for n in ("left", "right")]
    assert states == ["left", "right"]
