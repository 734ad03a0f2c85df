"""docs/forking.md: each diff applies with `patch`, trains for two steps, and has an effect that the script lacks.

After a change of the scripts, `PYTHONPATH=. python tests/test_fork.py` renews the diffs and the counts of the page.
"""

import dataclasses
import importlib.util
import inspect
import math
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, read_jsonl, weights_of, write_jsonl

import ppo_vl

PAGE = ROOT / "docs" / "forking.md"
BLOCK = r"^### (.+)\n((?:(?!###).*\n)*?)```diff\n((?:.*\n)*?)```$"


def read_diffs() -> dict[str, str]:
    return {title: diff for title, _, diff in re.findall(BLOCK, PAGE.read_text(), re.M)}


def get_script(diff: str) -> str:
    return re.match(r"--- (\w+)\.py\n\+\+\+ \1\.py\n", diff)[1]


def apply(titles: list[str], directory: Path) -> Path:
    """The script with some diffs, applied one after the other with the command of the page."""
    diffs = read_diffs()
    target = directory / f"{get_script(diffs[titles[0]])}.py"
    target.write_text((ROOT / target.name).read_text())
    for title in titles:
        command = ["patch", "--batch", str(target)]
        result = subprocess.run(command, input=diffs[title], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    return target


# ---- a run of two steps, with its rollouts and losses ----

NOISY_SAMPLER = """
from dataclasses import replace
from rloo import HFSampler
class Noisy(HFSampler):
    def generate(self, *inputs):
        return [replace(response, logprobs=response.logprobs + 5e-4) for response in super().generate(*inputs)]
"""
ROUTER = "Router loss of a mixture of experts"
FLAGS = {"total_steps": 2, "model": TINY, "seed": 3}
RL_FLAGS = {"rollout_batch_size": 32, "train_batch_size": 32}
RL_FLAGS |= {"num_samples_per_prompt": 4, "max_response_length": 8}
SCRIPT_FLAGS = {
    "rloo": RL_FLAGS | {"num_epochs": 2},
    "ppo_vl": RL_FLAGS,
    "reward_bt": {"train_batch_size": 8, "eval_rows": 8},
    "grm_sft": {"train_batch_size": 8, "eval_rows": 8},
}


def load(path: Path):
    """Import a script from a path."""
    spec = importlib.util.spec_from_file_location(f"fork_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train(path: Path, directory: Path, **flags) -> SimpleNamespace:
    """Two steps: the module, metrics, losses of all backward passes, and (arguments, rollout) of all rollouts."""
    module = load(path)
    result = SimpleNamespace(module=module, rollouts=[], losses=[], runs=[])
    init_deepspeed_engine = module.init_deepspeed_engine
    collect_rollout = getattr(module, "collect_rollout", None)
    setup = module.setup

    def watch_engine(*args, **keywords):
        engine = init_deepspeed_engine(*args, **keywords)
        backward = engine.backward

        def watch_backward(loss, **options):
            result.losses.append(float(loss.detach()))
            backward(loss, **options)

        engine.backward = watch_backward
        return engine

    def watch_rollout(*args, **keywords):
        arguments = inspect.signature(collect_rollout).bind(*args, **keywords).arguments
        rollout = collect_rollout(*args, **keywords)
        result.rollouts.append((arguments, rollout))
        return rollout

    def watch_setup(args):
        result.runs.append(setup(args))
        return result.runs[-1]

    module.init_deepspeed_engine = watch_engine
    module.collect_rollout = watch_rollout
    module.setup = watch_setup
    flags = FLAGS | {"output_dir": str(directory), "run_name": "run"} | SCRIPT_FLAGS[path.stem] | flags
    names = {field.name for field in dataclasses.fields(module.Args)}
    module.main(module.Args(**{name: value for name, value in flags.items() if name in names}))
    result.metrics = read_jsonl(directory / "run" / "metrics.jsonl")
    return result


@pytest.fixture(scope="module")
def files(vqa, any_score, tmp_path_factory) -> dict[str, dict]:
    """Flags per script: 40 questions, a reward that differs between responses, a slightly inexact sampler."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "noisy.py").write_text(NOISY_SAMPLER)
    flags = any_score | {"dataset": vqa}
    return {"rloo": flags | {"sampler": f"{directory}/noisy.py:Noisy"}, "ppo_vl": flags, "reward_bt": {}}


@pytest.fixture(scope="module")
def original(tmp_path_factory, files):
    """A function that trains a script without a diff, once."""
    mktemp = tmp_path_factory.mktemp
    return cache(lambda script: train(ROOT / f"{script}.py", mktemp("original"), **files[script]))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, tiny_text_model) -> dict:
    """Flags: a random mixture of experts, and sums as its prompts."""
    import transformers

    directory = tmp_path_factory.mktemp("mixture") / "model"
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text_config = transformers.AutoConfig.from_pretrained(tiny_text_model)
    size |= {"vocab_size": text_config.vocab_size, "eos_token_id": text_config.eos_token_id}
    config = transformers.MixtralConfig(**size, num_key_value_heads=2, num_local_experts=4, pad_token_id=None)
    torch.manual_seed(0)
    shutil.copytree(tiny_text_model, directory)
    transformers.MixtralForCausalLM(config).save_pretrained(directory)
    dataset = write_jsonl(directory / "sums.jsonl", [{"prompt": f"{i} + {i}?"} for i in range(12)])
    return {"model": str(directory), "dataset": dataset, "learning_rate": 1e-2, "warmup_steps": 0}


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> str:
    turns = [
        {"role": "user", "content": "what is 1 + 1?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "and 2 + 2?"},
        {"role": "assistant", "content": "four <|im_end|>"},
    ]
    rows = [{"messages": turns}, {"messages": turns[:2]}]
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


# ---- effects of the forks ----


def advantages_of_1_2_6(run) -> list[float]:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return run.module.compute_advantages(torch.tensor([[1.0, 2.0, 6.0]]), mask, False)[0].tolist()


def response_loss(run, logratios: list[float]) -> float:
    """Loss of one response with advantage 1, with these log-ratios of its tokens."""
    losses, _ = run.module.compute_rloo_loss(
        new_logprobs=torch.tensor(logratios),
        old_logprobs=torch.zeros(len(logratios)),
        advantages=torch.ones(1),
        response_of_token=torch.zeros(len(logratios), dtype=torch.long),
        clip_low=0.2,
        clip_high=0.2,
    )
    return float(losses.sum())


def near(x, y) -> bool:
    return x == pytest.approx(y, rel=1e-4, abs=1e-5)


def first_update(run) -> SimpleNamespace:
    """Step 1, where all ratios are 1: advantages (B,), lengths (B,), log-probs (B,), and the loss."""
    rollout = run.rollouts[0][1]
    return SimpleNamespace(
        advantages=rollout.advantages.flatten(),
        lengths=rollout.response_mask.sum(1),
        logprobs=(rollout.old_logprobs * rollout.response_mask).sum(1),
        loss=run.losses[0],
    )


def grpo(run) -> bool:
    """Standard deviation sqrt(7) in the group; per-token clip, mean over the response."""
    scaled = near(advantages_of_1_2_6(run), [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])
    return scaled and near(response_loss(run, [0.1, 0.3]), -(math.exp(0.1) + 1.2) / 2)


def dr_grpo(run) -> bool:
    step = first_update(run)
    loss = -float((step.advantages * step.lengths).sum()) / (32 * 8)
    return near(advantages_of_1_2_6(run), [-2, -1, 3]) and near(step.loss, loss)


def token_level(run) -> bool:
    step = first_update(run)
    return near(step.loss, -float((step.advantages * step.lengths).sum() / step.lengths.sum()))


def cispo(run) -> bool:
    step = first_update(run)
    return near(step.loss, -float((step.advantages * step.logprobs).sum() / step.lengths.sum()))


def gspo(run) -> bool:
    return near(response_loss(run, [0.1, 0.2]), -math.exp(0.15))  # 1.16 is inside the clip range, e^.3 is not


def remax(run) -> bool:
    rollouts = [(arguments["num_samples"], arguments["temperature"]) for arguments, _ in run.rollouts]
    sums = first_update(run).advantages.view(-1, 4).sum(1).abs()
    return rollouts == [(4, 1.0), (1, 0.0)] * 2 and float(sums.max()) > 0.01


def kl_as_a_loss(run) -> bool:
    last = run.metrics[-1]
    in_reward = last["objective/rlhf_reward"] != last["objective/scores"]
    return last["loss/kl"] > 0 and last["objective/kl"] != 0 and not in_reward


def entropy_bonus(run) -> bool:
    """At ratio 1 the advantages of each group sum to 0, so the first loss is -0.01 * the mean entropy."""
    return 0.5 < run.losses[0] / (-0.01 * run.metrics[0]["policy/entropy"]) < 2


def dynamic_sampling(run) -> bool:
    rollout = run.rollouts[0][1]
    groups = rollout.kept_responses.any(1)
    all_differ = bool((rollout.scores[groups].std(1) > 0).all())
    return len(groups) == 16 and 0 < int(groups.sum()) <= 8 and all_differ


def importance_sampling(run) -> bool:
    lengths = first_update(run).lengths
    return near(run.metrics[0]["sampling/importance_weight"], float((-5e-4 * lengths).exp().mean()))


def moving_reference(run) -> bool:
    return run.metrics[0]["objective/kl"] == 0 and abs(run.metrics[1]["objective/kl"]) < 1e-3


def new_metric(run) -> bool:
    ids = [tuple(x.tolist()) for x in run.rollouts[0][1].response_ids]
    distinct = sum(len({*ids[i : i + 4]}) for i in range(0, 32, 4))
    return run.metrics[0]["rollout/distinct_frac"] == distinct / 32


def curriculum(run) -> bool:
    first, second = ({prompt.index for prompt in rollout.prompts} for _, rollout in run.rollouts[:2])
    return max(first) < 20 <= max(second) and len(first | second) > 8


def adaptive_lambda(run) -> bool:
    """Returns with a lambda of 0.5 for 40 tokens, and of 0.3, the minimum, for short responses."""
    rollout = run.rollouts[0][1]
    mask = rollout.response_mask
    gae_lambda = (1 - 1 / (0.05 * mask.sum(1))).clamp(min=0.3)
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] = rollout.scores.flatten()  # no KL penalty
    _, returns = ppo_vl.compute_gae(rewards, rollout.values, mask, 1.0, gae_lambda)
    return gae_lambda.max() == 0.5 and torch.allclose(rollout.returns, returns, atol=1e-5)


def ptx(run) -> bool:
    first, second = run.metrics[-2:]
    return math.log(512) * 0.5 < first["loss/ptx"] and second["loss/ptx"] < first["loss/ptx"]


def router_loss(run) -> bool:
    """With 2 of 4 experts per token, the loss is 2 if the experts are balanced."""
    config = run.runs[0].actor.module.model.config
    return 2 <= run.metrics[-1]["loss/router"] < run.metrics[-2]["loss/router"] < 4 and not (
        config.output_router_logits
    )


def value_head(run) -> bool:
    first, second = (rollout.values for _, rollout in run.rollouts[:2])
    policy = run.runs[0].actor.module
    has_critic = run.runs[0].critic is not None or "train/critic_grad_norm" in run.metrics[-1]
    learned = bool(policy.value_head.weight.any()) and run.metrics[-1]["val/explained_variance"] != 0
    return not has_critic and learned and not first.any() and bool(second.any())


def token_loss(run, ratio: float, advantage: float) -> float:
    """Loss of one token with this ratio and advantage."""
    losses, _ = run.module.compute_policy_loss(
        new_logprobs=torch.tensor([math.log(ratio)]),
        old_logprobs=torch.zeros(1),
        advantages=torch.tensor([advantage]),
        response_of_token=torch.zeros(1, dtype=torch.long),
        loss_type="clip",
        clip_low=0.2,
        clip_high=0.2,
    )
    return float(losses)


def critic_warmup(run) -> bool:
    """Step 1 trains only the critic, so the KL of step 2 is still 0."""
    first, second = run.metrics
    only_critic = "train/grad_norm" not in first and first["train/critic_grad_norm"] > 0
    return only_critic and second["train/grad_norm"] > 0 and near(second["objective/kl"], 0)


def bounded_loss(run) -> bool:
    return near([token_loss(run, 5.0, -2.0), token_loss(run, 5.0, 2.0)], [6, -2.4]) and (
        run.metrics[0]["policy/clipfrac_dual"] == 0
    )


def cpgd(run) -> bool:
    """One of two groups has unequal scores, so advantages are doubled. The loss is the log of the ratio."""
    scores = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    advantages = run.module.subtract_baseline(scores, torch.ones(2, 2, dtype=torch.bool), "cpgd")
    losses = [token_loss(run, ratio, advantage) for ratio, advantage in ((1.5, 1.0), (1.1, 1.0), (0.5, -1.0))]
    logs = [-math.log(1.2), -math.log(1.1), math.log(0.8)]
    return advantages.tolist() == [[2, -2], [0, 0]] and near(losses, logs)


def high_entropy_tokens(run) -> bool:
    """A fifth of the tokens is in the loss, whose denominator counts all. The first ratio is 1."""
    rollout = run.rollouts[0][1]
    mask, kept = rollout.loss_mask, rollout.advantages != 0
    is_fifth = 0.2 <= kept.sum() / mask.sum() < 0.3  # ties count, too
    is_highest = rollout.entropy[kept].min() >= rollout.entropy[mask & ~kept].max()
    return bool(is_fifth and is_highest) and near(
        run.metrics[0]["loss/policy"], -float(rollout.advantages.sum() / mask.sum())
    )


def running_normalization(run) -> bool:
    """The KL coefficient is 0, so the reward of step 2 is the score over the std of both steps."""
    first, second = (rollout.scores for _, rollout in run.rollouts[:2])
    both = torch.cat([first, second])
    return near(run.metrics[1]["objective/rlhf_reward"], float(second.mean() / both.std(correction=0)))


def adaptive_kl(run) -> bool:
    """The KL of step 1 is 0, so the coefficient falls by 20 % times 32 responses / 100."""
    return near([m["train/kl_coef"] for m in run.metrics], [0.01, 0.01 * (1 - 0.2 * 0.32)])


def moving_average(run) -> bool:
    """A quarter of the initial weights, a quarter of those after the first update, half of the last ones."""
    directories = [run.runs[0].run_dir / f"checkpoint-{step}" for step in (1, 2)]
    start, first, second = (weights_of(path) for path in (Path(TINY), *directories))
    average = weights_of(directories[1] / "state" / "ema")
    expected = {name: (start[name] + first[name]) / 4 + second[name] / 2 for name in average}
    return all(torch.allclose(x, expected[name], atol=1e-7) for name, x in average.items()) and average != {}


def clipped_advantages(run) -> bool:
    return all(float(rollout.advantages.abs().max()) == 0.5 for _, rollout in run.rollouts)


def buffer_limit(run) -> bool:
    kept = [rollout.kept_responses.all(1).tolist() for _, rollout in run.rollouts]
    return kept == [[False] * 5 + [True] * 3] * 2


def hinge(run) -> bool:
    inputs = (torch.tensor([0.25, 2.0]), torch.zeros(2), torch.zeros(2), 0.0, 0.0)
    losses, _ = run.module.compute_bt_loss(*inputs)
    return near(losses.tolist(), [0.75, 0])


CHECKS = {  # title: check, flags
    "GRPO": (grpo, {}),
    "Dr. GRPO": (dr_grpo, {}),
    "GSPO": (gspo, {}),
    "Token-level loss (DAPO)": (token_level, {}),
    "CISPO": (cispo, {}),
    "ReMax": (remax, {}),
    "KL as a loss": (kl_as_a_loss, {}),
    "Entropy bonus": (entropy_bonus, {}),
    "Dynamic sampling (DAPO)": (dynamic_sampling, {}),
    "Truncated importance sampling": (importance_sampling, {}),
    "Moving reference (TR-DPO)": (moving_reference, {"ref_sync_steps": 1, "ref_sync_alpha": 1.0}),
    "Curriculum": (curriculum, {}),
    "A new metric": (new_metric, {}),
    "Length-adaptive GAE (VAPO)": (
        adaptive_lambda,
        {"gae_lambda": 0.3, "max_response_length": 40, "kl_coef": 0.0, "temperature": 5.0},
    ),
    "PTX": (ptx, {"ptx_batch_size": 3, "warmup_steps": 0}),
    ROUTER: (router_loss, {"router_aux_coef": 0.5}),
    "Value head on the actor's backbone": (value_head, {"learning_rate": 1e-3, "warmup_steps": 0}),
    "Critic warmup": (critic_warmup, {"critic_warmup_steps": 1}),
    "Dual clip": (bounded_loss, {}),
    "CPGD": (cpgd, {"advantage": "reinforce_baseline"}),
    "High-entropy tokens": (high_entropy_tokens, {"num_epochs": 1}),
    "Running normalization of scores": (running_normalization, {"kl_coef": 0.0}),
    "Adaptive KL coefficient": (adaptive_kl, {"kl_horizon": 100}),
    "Moving average of the weights": (
        moving_average,
        {"ema_decay": 0.5, "num_epochs": 1, "save_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0},
    ),
    "Clipped advantages": (clipped_advantages, {"advantage_clip": 0.5}),
    "Buffer limit": (buffer_limit, {"buffer_limit": 12}),
    "Hinge loss": (hinge, {}),
}


def has_effect(check, run) -> bool:
    try:
        return check(run)
    except (KeyError, AttributeError):  # the script does not have this metric or attribute
        return False


@pytest.mark.slow
@pytest.mark.parametrize("title", CHECKS)
def test_fork_trains_and_has_its_effect(title, tmp_path, files, original, chats, mixture):
    check, flags = CHECKS[title]
    path = apply([title], tmp_path)
    flags = files[path.stem] | {"ptx_dataset": chats} | (mixture if title == ROUTER else {}) | flags
    run = train(path, tmp_path, **flags)
    assert len(run.metrics) >= 2 and all(math.isfinite(loss) for loss in run.losses)
    assert has_effect(check, run) and not has_effect(check, original(path.stem))


@pytest.mark.slow
def test_forks_can_be_combined(tmp_path, files):
    """GRPO as in its paper: with the KL in the loss."""
    run = train(apply(["GRPO", "KL as a loss"], tmp_path), tmp_path, **files["rloo"])
    assert grpo(run) and kl_as_a_loss(run)


REFUSED = {  # title: flags, message
    ROUTER: ({}, "is not a mixture of experts"),
    "Value head on the actor's backbone": ({"critic_learning_rate": 1e-5}, "requires a separate critic"),
    "Buffer limit": ({"buffer_limit": 3}, "--buffer-limit must be at least"),
}


@pytest.mark.slow
@pytest.mark.parametrize("title", REFUSED)
def test_fork_refuses_flags_without_effect(title, tmp_path, files, capsys):
    flags, message = REFUSED[title]
    path = apply([title], tmp_path)
    with pytest.raises(SystemExit) as stop:
        train(path, tmp_path, **files[path.stem] | flags)
    assert stop.value.code == 2 and message in capsys.readouterr().err


# ---- the page ----

LARGE = {"Value head on the actor's backbone"}  # it replaces a model, so it may be longer


def counts(diff: str) -> tuple[int, int, int]:
    """Lines added, lines removed, hunks."""
    return tuple(len(re.findall(start, diff, re.M)) for start in (r"^\+(?!\+\+)", "^-(?!--)", "^@@"))


def read_table() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    rows = [line.strip("| \n").split(" | ") for line in lines]
    return {re.match(r"\[(.+?)\]", row[0])[1]: row for row in rows}


def test_every_diff_applies(tmp_path):
    for title in read_diffs():
        compile(apply([title], tmp_path).read_text(), title, "exec")


def test_page_lists_every_fork_with_its_paper_and_size():
    assert read_diffs().keys() == CHECKS.keys() == read_table().keys()
    for title, diff in read_diffs().items():
        added, removed, hunks = counts(diff)
        assert read_table()[title][-2:] == [f"+{added} -{removed}", str(hunks)], title
        assert title in LARGE or (added + removed <= 15 and hunks <= 4), title
        assert max(map(len, diff.splitlines())) <= 111


def renew() -> None:
    """Rewrite the diffs against the current scripts, and their sizes."""
    import tempfile

    text = PAGE.read_text()
    for title, diff in read_diffs().items():
        with tempfile.TemporaryDirectory() as directory:
            path = apply([title], Path(directory))
            names = ["--label", path.name, "--label", path.name]
            command = ["diff", "-U1", "-F", "^def ", *names, str(ROOT / path.name), str(path)]
            renewed = subprocess.run(command, capture_output=True, text=True).stdout
        text = text.replace(diff, re.sub(r"[ \t]+$", "", renewed, flags=re.M))
        added, removed, hunks = counts(renewed)
        row = re.escape(f"| [{title}]") + r".*\|"
        cells = rf"\1 +{added} -{removed} | {hunks} |"
        text = re.sub(rf"^({row}) [^|]* \| [^|]* \|$", cells, text, flags=re.M)
    PAGE.write_text(text)


if __name__ == "__main__":
    renew()
