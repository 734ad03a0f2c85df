"""Score and update of rloo on the tiny model: gradients against an independent float64 reference, splits, ranks, masking."""
# ruff: noqa: F401, F811  fixtures

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, write_jsonl
from rloo_runs import BASE, catch, caught, flags_of, read_metrics, reward_file, run, steps_of, words

import rloo
from common import packing
from common.packing import media_token_ids

ONE_STEP = {"rollout_batch_size": 16, "num_samples_per_prompt": 4, "train_batch_size": 16}


# --- helpers ---------------------------------------------------------------------------------------------------------


def mixed_rows(vqa_rows) -> list[dict]:
    """One picture, two pictures in the midst of text, the same picture again, none; prompts of unequal length."""
    a, b = vqa_rows[0], vqa_rows[1]
    return [
        {"prompt": a["prompt"], "images": [a["image"]], "answer": a["answer"]},
        {"prompt": "first <image> then <image> which is blue?", "images": [a["image"], b["image"]], "answer": "b"},
        {"prompt": "is there a circle in this picture or is there a square?", "images": [b["image"]], "answer": "no"},
        {"prompt": "what color is grass?", "images": [], "answer": "green"},
    ]


@pytest.fixture(scope="module")
def mixed(vqa_rows, tmp_path_factory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("mixed") / "mixed.jsonl", mixed_rows(vqa_rows))


def move(module: torch.nn.Module, size: float = 0.01) -> None:
    """Shift every weight a little, in place, so that the policy is no longer its reference."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_((torch.randn(p.shape, generator=generator) * size * p.float().std().nan_to_num(0.1)).to(p))


def gradients_of_update(call: dict, **changes) -> tuple[dict[str, torch.Tensor], int, dict]:
    """Gradients at the first optimizer step of an update, which is not taken, the number of packs, and the metrics."""
    gradients, packs, build_pack = {}, [], rloo.build_pack

    def look(engine):
        found = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
        gradients.update(gradients or found)
        engine.zero_grad()
        return 1.0, True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "optimizer_step", look)
        patch.setattr(rloo, "build_pack", lambda *args, **kwargs: packs.append(1) or build_pack(*args, **kwargs))
        metrics, _ = rloo.update_policy(**{**call, **changes})
    return gradients, len(packs), metrics


def assert_same_gradients(gradients, others, tolerance=1e-5):
    assert gradients.keys() == others.keys() and gradients
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert total > 0
    for name, gradient in gradients.items():
        error = (gradient - others[name]).norm()
        assert error <= tolerance * gradient.norm() + 1e-6 * total, f"{name}: {error / gradient.norm():.1e}"


@pytest.fixture(scope="module")
def moved(mixed, tmp_path_factory) -> tuple[dict, dict]:
    """Arguments of fill_logprobs and of update_policy in a run whose policy moved after the rollout. Weights are kept."""
    folder = tmp_path_factory.mktemp("moved")
    flags = {**BASE, **ONE_STEP, **reward_file(folder), "dataset": mixed, "output_dir": folder, "kl_coef": 0.3}
    scoring = catch("fill_logprobs", {**flags, "temperature": 0.8})
    update = catch("update_policy", {**flags, "temperature": 0.8})
    assert update["advantages"] is None and update["on_policy"], "an on-policy update has all it needs"
    move(update["actor"].module)
    scoring["rollout"] = update["rollout"]
    return scoring, update


def tables_of(scoring: dict, update: dict, budget: int | None = None):
    """A rollout whose log-probs are computed beforehand, with the moved policy, and its advantages."""
    rollout = replace(update["rollout"])
    args = replace(update["args"], micro_batch_tokens=budget or update["args"].micro_batch_tokens)

    def forward(pack):
        return {"logprobs": update["actor"](pack)[0]}

    rloo.fill_logprobs(**{**scoring, "args": args, "rollout": rollout, "forward": forward})
    kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.response_mask).sum(1)
    advantages = rloo.compute_advantages(rollout.scores - args.kl_coef * kl, rollout.group_ids, args.baseline)
    return args, rollout, advantages


def group_tokens(rollout) -> list[int]:
    return [rollout.prompt_lengths[g] + sum(len(rollout.response_ids[b]) for b in own) for g, own in rollout.groups]


# --- against a slow reference in float64 -----------------------------------------------------------------------------


class Slow:
    """The unmodified transformers model in float64, one response at a time."""

    def __init__(self, rows: list[dict], temperature: float):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.model = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float64).eval()
        self.processor, self.rows, self.temperature = AutoProcessor.from_pretrained(TINY), rows, temperature

    def inputs(self, row: dict) -> dict:
        from PIL import Image

        parts = []
        for i, text in enumerate(row["prompt"].split("<image>")):
            parts += ([{"type": "image"}] if i else []) + ([{"type": "text", "text": text}] if text else [])
        if "<image>" not in row["prompt"]:
            parts = [{"type": "image"}] * len(row["images"]) + parts
        text = self.processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        images = [Image.open(path).convert("RGB") for path in row["images"]] or None
        return dict(self.processor(text=[text], images=images, return_tensors="pt"))

    def __call__(self, row_index: int, response: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs (R,) of a response, and the entropies (R,) of the distributions that its tokens come from."""
        inputs = self.inputs(self.rows[row_index])
        P = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], response[None]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        types = torch.as_tensor(inputs["mm_token_type_ids"])
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, len(response)))
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].double()
        logits = self.model(**inputs).logits[0, P - 1 : -1] / self.temperature
        drawn = torch.ones(logits.shape[1], dtype=torch.bool)
        drawn[media_token_ids(self.model.config)] = False
        logp = logits.masked_fill(~drawn, -1e30).log_softmax(-1)
        entropy = -(logp.exp() * logp)[:, drawn].sum(-1)
        return logp.gather(1, response[:, None])[:, 0], entropy


@pytest.fixture(scope="module")
def slow(moved, vqa_rows):
    """-> per response of the moved rollout: (group, score, reference log-probs, log-probs, entropies); and its model."""
    _, update = moved
    rollout, model = update["rollout"], Slow(mixed_rows(vqa_rows), 0.8)
    members = [(g, b) for g, own in rollout.groups for b in own]
    with torch.no_grad():
        reference = [model(rollout.row_indices[g], rollout.response_ids[b])[0] for g, b in members]
    weights = {name.removeprefix("model."): p for name, p in update["actor"].module.state_dict().items()}
    missing, unexpected = model.model.load_state_dict({n: w.double() for n, w in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    now = [model(rollout.row_indices[g], rollout.response_ids[b]) for g, b in members]
    return [(g, rollout.scores[b].item(), r, *n) for (g, b), r, n in zip(members, reference, now)], model


def slow_gradient(slow, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model = slow[1].model
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return {f"model.{n}": g.float() for n, g in zip(names, gradients) if g is not None}


def slow_advantages(rows, rewards: list[float], baseline: str) -> list[float]:
    out = []
    for i, (group, *_) in enumerate(rows):
        siblings = [rewards[j] for j, (g, *_) in enumerate(rows) if g == group]
        if baseline == "leave_one_out":
            siblings = [rewards[j] for j, (g, *_) in enumerate(rows) if g == group and j != i]
        out.append(rewards[i] - (0.0 if baseline == "none" else sum(siblings) / len(siblings)))
    return out


@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean", "none"])
def test_on_policy_update_is_that_of_the_slow_reference(baseline, moved, slow):
    """KL of the whole response in the reward, before the baseline; REINFORCE."""
    _, update = moved
    rows, args = slow[0], replace(update["args"], baseline=baseline, entropy_coef=0.02)
    kls = [(new.detach() - ref).sum().item() for _, _, ref, new, _ in rows]
    assert max(map(abs, kls)) > 0.01, "the policy has moved"
    rewards = [score - 0.3 * kl for (_, score, *_), kl in zip(rows, kls)]
    advantages = slow_advantages(rows, rewards, baseline)
    loss = -sum(A * new.sum() for A, (*_, new, _) in zip(advantages, rows)) / len(rows)
    loss = loss - 0.02 * torch.cat([entropy for *_, entropy in rows]).mean()
    gradients, _, metrics = gradients_of_update(update, args=args)
    assert_same_gradients(slow_gradient(slow, loss), gradients, tolerance=1e-4)
    assert metrics["objective/advantages_mean"] == pytest.approx(np.mean(advantages), abs=1e-4)
    assert metrics["objective/advantages_std"] == pytest.approx(np.std(advantages), rel=1e-4)
    entropy = torch.cat([entropy for *_, entropy in rows]).mean().item()
    assert metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["policy/ratio_max"] == 1 and metrics["policy/approx_kl"] == 0


@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_off_policy_update_is_that_of_the_slow_reference(level, moved, slow):
    """Old log-probs of before the move; a KL loss besides. The clip is narrow, so that some ratios leave it."""
    _, update = moved
    rows = slow[0]
    clip = {"clip_coef": 0.002, "clip_coef_high": 0.001}
    args = replace(update["args"], ratio_level=level, kl_loss=True, kl_estimator="k3", **clip)
    rollout = replace(update["rollout"])
    rollout.logprobs = rollout.ref_logprobs  # the policy was the reference when it sampled
    advantages = slow_advantages(rows, [score for _, score, *_ in rows], "leave_one_out")
    losses, clipped = [], 0
    for A, (_, _, old, new, _) in zip(advantages, rows):
        d = new - old
        pieces = {"sequence": d.sum()[None], "sequence_mean": d.mean()[None], "token": d}[level]
        rho = pieces.exp()
        bounded = rho.clamp(1 - 0.002, 1 + 0.001)
        clipped += int((bounded * A < rho * A).sum())
        losses.append(-torch.minimum(rho * A, bounded * A).sum())
        losses.append(0.3 * (torch.expm1(-d) + d).sum())
    assert clipped > 0
    call = {"args": args, "rollout": rollout, "advantages": torch.tensor(advantages), "on_policy": False}
    gradients, _, metrics = gradients_of_update(update, **call)
    assert_same_gradients(slow_gradient(slow, sum(losses) / len(rows)), gradients, tolerance=1e-4)
    assert metrics["loss/policy"] == pytest.approx(sum(x.item() for x in losses[::2]) / len(rows), rel=1e-3, abs=1e-6)
    assert 0.3 * metrics["loss/kl"] == pytest.approx(sum(x.item() for x in losses[1::2]) / len(rows), rel=1e-3)
    assert metrics["policy/clipfrac_low"] + metrics["policy/clipfrac_high"] > 0


def test_logprobs_of_reference_policy_and_sampler_are_those_of_the_slow_reference(moved, slow):
    rollout = moved[1]["rollout"]
    for b, (_, _, ref, *_) in enumerate(slow[0]):
        for table in (rollout.ref_logprobs, rollout.engine_logprobs):
            assert (table[b, : len(ref)] - ref.float()).abs().max() < 1e-4
            assert not table[b, len(ref) :].any()


# --- the same gradient, however it is computed -----------------------------------------------------------------------


def test_on_policy_gradient_is_the_same_with_log_probs_computed_beforehand(moved):
    scoring, update = moved
    in_update, packs, _ = gradients_of_update(update)
    args, rollout, advantages = tables_of(scoring, update)
    beforehand, _, _ = gradients_of_update(update, rollout=rollout, advantages=advantages)
    recomputed, _, _ = gradients_of_update(update, rollout=rollout, advantages=advantages, on_policy=False)
    assert packs == 1
    assert_same_gradients(in_update, beforehand)
    assert_same_gradients(in_update, recomputed)


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_entropy_of_weight_0_costs_no_backward(coef, moved, monkeypatch):
    update, given = moved[1], []
    backward = packing._ChunkedLogProbs.backward
    look = staticmethod(
        lambda ctx, g, grad_entropy: given.append(grad_entropy is not None) or backward(ctx, g, grad_entropy)
    )
    monkeypatch.setattr(packing._ChunkedLogProbs, "backward", look)
    gradients_of_update(update, args=replace(update["args"], entropy_coef=coef))
    assert given == [coef > 0] * len(given) and given


def test_gradient_does_not_depend_on_the_split_into_packs(moved):
    """One, two and eight packs; with eight, groups are split, and log-probs are computed beforehand."""
    scoring, update = moved
    tokens = group_tokens(update["rollout"])
    one, packs_of_one, _ = gradients_of_update(update)
    two, packs_of_two, _ = gradients_of_update(
        update, args=replace(update["args"], micro_batch_tokens=max(max(tokens), sum(tokens) // 2 + 20))
    )
    longest = max(update["rollout"].prompt_lengths) + 2 * max(len(r) for r in update["rollout"].response_ids)
    assert longest < max(tokens)
    args, rollout, advantages = tables_of(scoring, update, budget=longest)
    many, packs_of_many, _ = gradients_of_update(update, args=args, rollout=rollout, advantages=advantages)
    assert packs_of_one == 1 and packs_of_two == 2 and packs_of_many >= 5
    assert_same_gradients(one, two)
    assert_same_gradients(one, many)


def test_groups_longer_than_a_pack_get_their_advantages_beforehand(caught, mixed):
    """Which the test above takes for granted. The rollout is the same."""
    whole = caught("update_policy", dataset=mixed)
    budget = max(group_tokens(whole["rollout"])) - 1
    small = caught("update_policy", dataset=mixed, micro_batch_tokens=budget, max_prompt_length=budget - 8)
    assert whole["advantages"] is None and small["advantages"] is not None
    assert max(group_tokens(small["rollout"])) > budget
    assert_same_gradients(gradients_of_update(whole)[0], gradients_of_update(small)[0])


def test_normalized_advantages_have_mean_0_and_deviation_1(caught):
    call = caught("update_policy", normalize_advantages=True, kl_coef=0.1)
    advantages = call["advantages"]
    assert advantages.mean().abs() < 1e-6 and advantages.std(correction=0) == pytest.approx(1, rel=1e-5)


def test_scores_are_clipped_before_the_kl_is_subtracted(caught):
    call = caught("update_policy", reward_clip=[0.2, 0.5], kl_coef=0)
    assert call["rollout"].scores.min() >= 0.2 and call["rollout"].scores.max() <= 0.5
    assert {0.2, 0.5} <= {round(x, 6) for x in call["rollout"].scores.tolist()}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_alone_moves_the_policy(estimator, moved):
    _, update = moved
    rollout, args = update["rollout"], replace(update["args"], kl_loss=True, kl_estimator=estimator)
    norms = []
    for kl_coef in (0.0, 0.1, 0.2):
        call = {"args": replace(args, kl_coef=kl_coef), "advantages": torch.zeros_like(rollout.scores)}
        gradients, _, _ = gradients_of_update(update, **call)
        norms.append(torch.stack([g.norm() for g in gradients.values()]).norm().item())
    assert norms[0] == 0 and norms[1] > 1e-4
    assert norms[2] == pytest.approx(2 * norms[1], rel=1e-3)


# --- forwards --------------------------------------------------------------------------------------------------------


def count_forwards(monkeypatch) -> list[tuple[str, bool]]:
    """(policy or reference, whether gradients are kept) of every forward through Policy."""
    calls, forward = [], rloo.Policy.forward

    def spy(self, *args, **kwargs):
        trained = any(p.requires_grad for p in self.parameters())
        calls.append(("policy" if trained else "reference", torch.is_grad_enabled()))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(rloo.Policy, "forward", spy)
    return calls


@pytest.mark.parametrize(
    "flags, policy, reference",
    [
        ({}, [True], [False]),
        ({"kl_coef": 0}, [True], []),
        ({"kl_loss": True}, [True], [False]),
        ({"normalize_advantages": True}, [False, True], [False]),  # needs every KL before the first backward
        ({"normalize_advantages": True, "kl_coef": 0}, [True], []),
        ({"num_iterations": 2}, [False, True, True], [False]),
        ({"train_batch_size": 8, "kl_coef": 0}, [False, True, True], []),
    ],
    ids=str,
)
def test_no_forward_more_than_needed(flags, policy, reference, run, monkeypatch):
    calls = count_forwards(monkeypatch)
    run(total_steps=1, **flags)
    assert [grad for name, grad in calls if name == "policy"] == policy
    assert [grad for name, grad in calls if name == "reference"] == reference


def test_each_picture_is_encoded_once_per_pass(caught, mixed):
    """Four slots, two different pictures, sixteen responses."""
    call = caught("update_policy", dataset=mixed)
    samples = [call["prompt_of"](g) for g, _ in call["rollout"].groups]
    patches = sum({item["key"]: len(item["pixel_values"]) for s in samples for item in s["images"]}.values())
    module, seen = call["actor"].module, []
    (tower,) = [m for name, m in module.named_modules() if name.split(".")[-1] == "visual"]
    tower.register_forward_pre_hook(lambda m, args, kwargs: seen.append(len(args[0] if args else kwargs["hidden_states"])), with_kwargs=True)  # fmt: skip # noqa: E501
    rloo.update_policy(**call)
    assert seen == [patches]


# --- masked responses ------------------------------------------------------------------------------------------------


def edit_records(monkeypatch, edit) -> None:
    gather = rloo.gather_records

    def edited(records, world_size):
        records = gather(records, world_size)
        for record in records:
            edit(record)
        return records

    monkeypatch.setattr(rloo, "gather_records", edited)


def test_truncated_responses_touch_neither_gradient_nor_baseline_when_masked(flags_of, mixed):
    """Other scores, tokens and lengths of the truncated ones: the same gradient. Without the mask another one."""
    results = {}
    for masked in (True, False):
        for changed in (False, True):

            def edit(record, changed=changed):
                record["scores"] = record["scores"].copy()
                record["truncated"] = [True, False, False, False]
                if changed:
                    record["scores"][0] -= 5
                    record["response_ids"][0] = torch.tensor([5, 6, 7])
                    record["engine_logprobs"][0] = torch.zeros(3)

            with pytest.MonkeyPatch.context() as patch:
                edit_records(patch, edit)
                call = catch("update_policy", flags_of(dataset=mixed, mask_truncated=masked))
            results[masked, changed] = gradients_of_update(call)[0]
            assert len(call["rollout"].response_ids) == (12 if masked else 16)
    assert_same_gradients(results[True, False], results[True, True])
    with pytest.raises(AssertionError):
        assert_same_gradients(results[False, False], results[False, True], tolerance=1e-2)
    with pytest.raises(AssertionError):
        assert_same_gradients(results[True, False], results[False, False], tolerance=1e-2)


def test_all_truncated_changes_no_parameter(run, monkeypatch, tiny):
    from safetensors.torch import load_file

    edit_records(monkeypatch, lambda record: record.update(truncated=[True] * 4))
    folder = run(mask_truncated=True, total_steps=1)
    before, after = load_file(f"{tiny}/model.safetensors"), load_file(folder / "checkpoint-1/model.safetensors")
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    (step,) = steps_of(folder)
    assert step["rollout/truncated_frac"] == 1 and step["rollout/responses_trained"] == 0
    assert step["objective/scores"] > 0 and "loss/policy" not in step


# --- several ranks, ZeRO stages --------------------------------------------------------------------------------------

# Runs rloo with each of several command lines, on rank 0's responses of the first; keeps gradients of the first step.
RANK_SCRIPT = """
import json, os, sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import rloo, test_rloo_update
import torch.distributed as dist
folder, rank = {folder!r}, int(os.environ.get("RANK", 0))
dist.destroy_process_group = lambda *args: None
make_engine, gather = rloo.make_engine, rloo.gather_records

def make_moved(*args, **kwargs):
    engine = make_engine(*args, **kwargs)
    test_rloo_update.move(engine.module)
    return engine

def replay(own, world_size):
    return torch.load(folder + "/records.pt", weights_only=False)

rloo.make_engine, rloo.gather_records = make_moved, replay
for name, argv in json.load(open(folder + "/argv.json")).items():
    gradients = {{}}
    def look(engine):
        gradients.update({{name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}})
        engine.zero_grad()
        return 1.0, True
    rloo.optimizer_step = look
    rloo.main(rloo.parse_args(argv))
    if rank == 0:
        torch.save(gradients, folder + "/" + name + ".pt")
"""


def torchrun(ranks: int, script) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", ranks, "--master_port", port, script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *map(str, launcher)], env=env, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
def test_one_and_two_ranks_have_the_same_gradient(flags_of, mixed, tmp_path, monkeypatch):
    """On-policy, with groups split over ranks, with a KL loss: each as one rank and one pack has it."""
    flags = {**ONE_STEP, "dataset": mixed, "total_steps": 1, "kl_coef": 0.3}
    budget = max(group_tokens(catch("update_policy", flags_of(**flags))["rollout"])) - 1
    split = {"micro_batch_tokens": budget, "max_prompt_length": budget - 8}
    variants = {"plain": {}, "split": split, "loss": {"kl_loss": True}}
    scoring = catch("make_rollout", flags_of(**flags))
    torch.save(scoring["records"], tmp_path / "records.pt")
    monkeypatch.setattr(rloo, "gather_records", lambda own, world_size: scoring["records"])
    make_engine = rloo.make_engine

    def make_moved(*args, **kwargs):
        engine = make_engine(*args, **kwargs)
        move(engine.module)
        return engine

    monkeypatch.setattr(rloo, "make_engine", make_moved)
    expected = {name: gradients_of_update(catch("update_policy", flags_of(**flags, **v)))[0] for name, v in variants.items()}  # fmt: skip # noqa: E501
    argv = {name: words(flags_of(**{**flags, **v}, run_name=name)) for name, v in variants.items()}
    (tmp_path / "argv.json").write_text(json.dumps(argv))
    (tmp_path / "script.py").write_text(RANK_SCRIPT.format(root=str(ROOT), folder=str(tmp_path)))
    torchrun(2, tmp_path / "script.py")
    assert_same_gradients(expected["plain"], expected["split"])
    for name in variants:
        assert_same_gradients(expected[name], torch.load(tmp_path / f"{name}.pt"))
