"""forks/*.diff: each applies exactly, passes ruff and is the formula of its paper.

Most tests run the patched script's main on a rollout made by hand. Log-probs, entropies and values come from tables
instead of models, so a step takes milliseconds, and loss and gradient can be compared with a reference formula. A few
forks also train the tiny model. After a change of the scripts, `PYTHONPATH=. python tests/test_forks.py` renews the
diffs and the numbers of changed lines in forks/README.md.
"""

import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch
import tyro
from conftest import ROOT, TINY, assert_same_run, largest_difference, metrics_of, weights_of, write_jsonl

import ppo_vl
from common import packing

FORKS = ROOT / "forks"
README = FORKS / "README.md"
NAMES = sorted(path.stem for path in FORKS.glob("*.diff"))


# ---- diffs and their table ----
def read_diff(name: str) -> tuple[str, str, str]:
    """The text that explains it, the diff itself, and the script that it changes."""
    text, start, diff = (FORKS / f"{name}.diff").read_text().partition("\n--- ")
    return text, start[1:] + diff, diff.partition("\n")[0]


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def patch(folder: Path, names: list[str]) -> tuple[Path, str]:
    """The script with these diffs, one after the other, and what patch says if one fails."""
    path = folder / f"{'_'.join(names)}.py"
    path.write_text((ROOT / read_diff(names[0])[2]).read_text())
    for name in names:
        options = ["--forward", "--fuzz=0", "--no-backup-if-mismatch"]
        result = run("patch", *options, path, FORKS / f"{name}.diff")
        if result.returncode:
            return path, result.stdout + result.stderr
    return path, ""


def load(folder: Path, *names: str):
    path, error = patch(folder, names)
    assert error == ""
    spec = importlib.util.spec_from_file_location(f"fork_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def count_lines(name: str) -> tuple[int, int]:
    """Lines added and removed."""
    diff = read_diff(name)[1]
    return len(re.findall(r"^\+(?!\+\+)", diff, re.M)), len(re.findall("^-(?!--)", diff, re.M))


def read_table() -> dict[str, list[str]]:
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.diff\) \| (.*) \|$", README.read_text(), re.M)
    return {name: row.split(" | ") for name, row in rows}


def test_every_diff_applies_and_passes_ruff(tmp_path):
    assert [error for name in NAMES if (error := patch(tmp_path, [name])[1])] == []
    for command in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", tmp_path]
        subprocess.run(command, check=True)


def test_the_table_lists_every_diff_with_its_paper_and_its_size():
    table = read_table()
    assert sorted(table) == NAMES
    for name, (script, paper, lines, check) in table.items():
        text, _, target = read_diff(name)
        assert (script, lines) == (f"`{target}`", "+{} -{}".format(*count_lines(name))) and len(check) > 10
        assert re.findall(r"arxiv\.org/abs/([\d.]+)", text)[:1] == re.findall(r"abs/([\d.]+)", paper)
    sizes = [sum(count_lines(name)) for name in NAMES]
    claim = f"[{len(NAMES)} patches](forks/README.md) of {min(sizes)} to {max(sizes)} lines"
    assert claim in (ROOT / "README.md").read_text()


def test_commands_of_the_texts_parse(tmp_path):
    for name in NAMES:
        for command in re.findall(r"^    python \w+\.py (.*)$", read_diff(name)[0], re.M):
            module = load(tmp_path, name)
            args = tyro.cli(module.Args, args=command.split())
            module.fill_defaults(args)
            module.check_args(args)


# ---- a step of main on a rollout made by hand ----
G = 4  # responses per prompt
R = 7  # tokens of the longest response


class Engine:
    """A DeepSpeed engine whose outputs are tables: `before` without gradients, `after` in the update."""

    def __init__(self, before: torch.Tensor, after: torch.Tensor, entropies: torch.Tensor | None = None):
        self.before = before
        self.after = after.detach().clone().requires_grad_()
        self.entropies = entropies
        self.module = SimpleNamespace(model=SimpleNamespace(dtype=torch.float32))
        self.set_gradient_accumulation_boundary = lambda is_boundary: None
        self.losses = []
        self.num_updates = 0

    def __call__(self, pack, with_entropy: bool = False):
        outputs = (self.after if torch.is_grad_enabled() else self.before)[pack.token_index]
        if self.entropies is None:
            return outputs
        return outputs, self.entropies[pack.token_index] if with_entropy else None

    def backward(self, loss) -> None:
        loss.backward()
        self.losses.append(loss.item())


def make_tables(num_prompts: int) -> SimpleNamespace:
    """Random tables (B, R) of responses with 1 to R tokens, the first with an observation; scores (n, G)."""
    torch.manual_seed(num_prompts)
    noise = lambda scale: scale * torch.randn(num_prompts * G, R)  # noqa: E731
    lengths = torch.randint(1, R + 1, (num_prompts * G, 1))
    lengths[:2, 0] = torch.tensor([R, 1])
    mask = torch.arange(R) < lengths
    mask[0, 2:4] = False
    old = noise(1).abs().neg() * mask
    tables = {"mask": mask, "old": old, "new": (old + noise(0.3) * mask).requires_grad_()}
    tables |= {"ref": old + noise(0.3) * mask, "sampler": old + noise(0.3) * mask}
    tables |= {"entropy": noise(1).abs().requires_grad_(), "old_values": noise(1), "new_values": noise(1)}
    return SimpleNamespace(**tables, scores=torch.randn(num_prompts, G))


def select(t: SimpleNamespace, prompts: list[int]) -> SimpleNamespace:
    rows = [i * G + j for i in prompts for j in range(G)]
    tables = {name: x[rows] for name, x in vars(t).items() if name != "scores"}
    return SimpleNamespace(**tables, scores=t.scores[prompts])


def make_response(length: int) -> packing.Continuation:
    ids = torch.arange(length)
    return packing.Continuation(ids >= 0, {"input_ids": ids[None]}, {}, position_ids=ids)


def make_rollout(module, t: SimpleNamespace, scores=None):
    width = int(t.mask.any(0).nonzero().max()) + 1
    scores = t.scores if scores is None else scores
    return module.Rollout(
        prompts=[packing.PromptInfo(index, 5, ()) for index in range(len(scores))],
        continuations=[make_response(length) for length in t.mask.sum(1).tolist()],
        response_mask=t.mask[:, :width],
        sampler_logprobs=t.sampler[:, :width],
        truncated=torch.zeros_like(scores, dtype=torch.bool),
        rewards={"accuracy": scores},
        scores=scores,
        sample_records=[{}] * len(scores),
        logged_metrics={},
    )


def iter_packs(args, run, rollout, prompt_indices, kept_responses):
    """One pack per prompt, so that denominators have to count several packs."""
    for i in prompt_indices:
        response_index = kept_responses[i].nonzero()[:, 0] + i * G
        response, position = rollout.response_mask[response_index].nonzero().T
        token_index = response_index[response], position
        yield packing.Pack({}, response_index, token_index, response, None, None, None)


FLAGS = {"total_steps": 1, "num_epochs": 1, "num_samples_per_prompt": G, "max_response_length": 8}
FLAGS |= {"max_prompt_length": 8, "learning_rate": 0.1, "zero_stage": 0, "kl_coef": 0.0}


def update(module, t, rollouts=None, greedy=None, **flags) -> SimpleNamespace:
    """Run main on the rollouts: its engines, its metrics, its state, and the rows that it sampled for."""
    n = flags.get("prompts_per_rollout", len(t.scores))
    args = module.Args(**FLAGS | {"prompts_per_rollout": n, "train_batch_size": n * G} | flags)
    if hasattr(args, "critic_learning_rate"):
        args.critic_learning_rate = 0.1
    actor, critic = Engine(t.old, t.new, t.entropy), Engine(t.old_values, t.new_values)
    state = {"step": 0}
    result = SimpleNamespace(actor=actor, critic=critic, state=state, metrics=[], rows=[])
    run = SimpleNamespace(run_dir=Path("run"), actor=actor, critic=critic, state=state, eval_data=None)
    run.reference = lambda pack: (t.ref[pack.token_index], None)
    run.train_data = SimpleNamespace(rows=range(40))
    run.sampler = SimpleNamespace(sleep=lambda: None, update_weights=lambda step: None)
    rollouts = iter(rollouts or [make_rollout(module, t)])

    def collect_rollout(args, run, data, rows, num_samples, temperature, step):
        if num_samples == 1:
            assert temperature == 0.0 and rows == result.rows[-1]
            return SimpleNamespace(scores=greedy)
        result.rows.append(rows)
        return next(rollouts)

    def optimizer_step(engine, learning_rate) -> float:
        engine.num_updates += 1
        return 1.0

    module.setup = lambda args: run
    module.collect_rollout = collect_rollout
    module.iter_packs = iter_packs
    module.optimizer_step = optimizer_step
    module.check_logprobs = lambda *inputs: None  # log-probs of sampler and trainer differ
    module.save_checkpoint = lambda *inputs: Path("checkpoint")
    module.log = lambda *inputs: result.metrics.append(inputs[-2])
    module.main(args)
    return result


@pytest.fixture
def t() -> SimpleNamespace:
    return make_tables(3)


def check(result, t, loss: torch.Tensor) -> None:
    """The actor's loss and its gradients are those of a formula of t.new and t.entropy."""
    assert sum(result.actor.losses) == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    gradients = torch.autograd.grad(loss, (t.new, t.entropy), allow_unused=True)
    for table, expected in zip((result.actor.after, t.entropy), gradients):
        assert expected is None or torch.allclose(table.grad, expected, rtol=1e-4, atol=1e-6)


# ---- critic-free algorithms ----
#
# GRPO, Dr. GRPO, DAPO, CISPO and GSPO are formulas of trl/trainer/grpo_trainer.py at huggingface/trl@f2cd577: advantages
# are in lines 2685 to 2707, losses in _compute_loss with loss_type grpo, dr_grpo, dapo and cispo, and grpo with
# importance_sampling_level "sequence". REINFORCE++ and a second GSPO are formulas of verl/trainer/ppo/core_algos.py at
# verl-project/verl@1dda039: compute_reinforce_plus_plus*_outcome_advantage and compute_policy_loss_gspo.


def mean_over_tokens(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # (B, R) -> (B,)
    return (x * mask).sum(1) / mask.sum(1)


def clip(ratio, advantages, low=0.2, high=0.2) -> torch.Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def center(scores: torch.Tensor) -> torch.Tensor:  # (n, G) -> (B, 1)
    return (scores - scores.mean(1, keepdim=True)).view(-1, 1)


def standardize(scores: torch.Tensor) -> torch.Tensor:  # (n, G) -> (B, 1)
    return center(scores) / (scores.std(1).repeat_interleave(G)[:, None] + 1e-4)


def whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    trained = advantages.expand_as(mask)[mask]
    return (advantages - trained.mean()) / trained.std()


def rloo(t, weights=1.0, advantages=None):
    advantages = center(t.scores) * G / (G - 1) if advantages is None else advantages
    return clip(((t.new - t.old) * t.mask).sum(1, keepdim=True).exp(), advantages * weights).mean()


def grpo(t, weights=1.0):
    return mean_over_tokens(clip((t.new - t.old).exp(), standardize(t.scores) * weights), t.mask).mean()


def dr_grpo(t, weights=1.0):
    losses = clip((t.new - t.old).exp(), center(t.scores) * weights)
    return (losses * t.mask).sum() / (len(t.mask) * FLAGS["max_response_length"])


def gspo(t, weights=1.0):
    ratio = mean_over_tokens(t.new - t.old, t.mask).exp()[:, None]
    return clip(ratio, standardize(t.scores) * weights).mean()


def gspo_by_token(t, advantages):
    """The ratio is a value of the response, and its gradient is that of the token."""
    mean = mean_over_tokens(t.new - t.old, t.mask).detach()[:, None]
    return mean_over_tokens(clip((mean + t.new - t.new.detach()).exp(), advantages), t.mask).mean()


def cispo(t, weights=1.0, low=0.2, high=0.2):
    ratio = (t.new - t.old).exp().clamp(1 - low, 1 + high).detach()
    return (-ratio * standardize(t.scores) * weights * t.new)[t.mask].mean()


def token_mean(t, advantages, high=0.2):
    return clip((t.new - t.old).exp(), advantages, high=high)[t.mask].mean()


def dapo(t):
    penalty = (t.mask.sum(1) / 8 - 0.8).clamp(min=0) / 0.2  # eq. (13) with L_max 8 and L_cache 1.6
    return token_mean(t, standardize(t.scores - penalty.view(-1, G)), high=0.28)


def reinforce_plus_plus(t):
    """Eq. (8) to (10) of the paper: the score minus the KL to go, normalized over all tokens."""
    kl_to_go = torch.stack([(t.old - t.ref)[:, position:].sum(1) for position in range(R)], 1)
    return token_mean(t, whiten(t.scores.view(-1, 1) - 0.1 * kl_to_go, t.mask))


def kl_losses(t, estimator: str) -> torch.Tensor:
    d = t.new - t.ref
    return {"k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[estimator]


def importance(t, limit: float) -> torch.Tensor:  # (B, R)
    return (t.old - t.sampler).exp().clamp(max=limit)


def importance_of_responses(t, limit: float) -> torch.Tensor:  # (B, 1)
    return ((t.old - t.sampler) * t.mask).sum(1, keepdim=True).exp().clamp(max=limit)


def with_additions(name: str) -> dict:
    """An algorithm with what can be added to it. The first two are TRL's beta with GRPO and GSPO."""
    loss = ALGORITHMS[name]
    mean = lambda t, x: mean_over_tokens(x, t.mask).mean()  # noqa: E731
    return {
        f'{name} kl_loss kl_coef=0.5 kl_estimator="k2"': lambda t: loss(t) + mean(t, kl_losses(t, "k2")) / 2,
        f'{name} kl_loss kl_coef=0.5 kl_estimator="k3"': lambda t: loss(t) + mean(t, kl_losses(t, "k3")) / 2,
        f"{name} entropy_bonus entropy_coef=0.5": lambda t: loss(t) - mean(t, t.entropy) / 2,
        f"{name} importance_sampling tis_clip=1.5": lambda t: loss(t, importance_of_responses(t, 1.5)),
    }


ALGORITHMS = {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo, "gspo": gspo, "cispo": cispo}
CRITIC_FREE = {  # forks and flags: loss
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "gspo num_epochs=1": lambda t: gspo_by_token(t, standardize(t.scores)),  # as verl has it
    "cispo": cispo,
    "cispo clip_coef=1 clip_coef_high=4": lambda t: cispo(t, low=1.0, high=4.0),  # without a lower clip
    "reinforce_plus_plus kl_coef=0.1": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": lambda t: token_mean(t, whiten(center(t.scores), t.mask)),
}
for name in ALGORITHMS:
    CRITIC_FREE |= with_additions(name)


def run_case(folder: Path, case: str, t) -> SimpleNamespace:
    """An update by these forks with these flags, "cispo clip_coef=1"."""
    flags = dict(word.split("=") for word in case.split() if "=" in word)
    names = [word for word in case.split() if "=" not in word and word != "rloo"]
    return update(load(folder, *names), t, **{name: json.loads(x) for name, x in flags.items()})


@pytest.mark.parametrize("case", CRITIC_FREE)
def test_loss_and_gradient_of_critic_free_algorithms(case, t, tmp_path):
    result = run_case(tmp_path, case, t)
    check(result, t, CRITIC_FREE[case](t))
    assert len(result.actor.losses) == 3 and result.actor.num_updates == 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_with_weights_of_tokens(name, t, tmp_path):
    result = run_case(tmp_path, f"{name} token_importance_sampling tis_clip=1.2", t)
    [gradient] = torch.autograd.grad(ALGORITHMS[name](t), t.new)
    assert torch.allclose(result.actor.after.grad, gradient * importance(t, 1.2), rtol=1e-4, atol=1e-6)
    if name in ("grpo", "dr_grpo", "cispo"):  # TRL multiplies the losses
        [of_trl] = torch.autograd.grad(ALGORITHMS[name](t, importance(t, 1.2)), t.new)
        assert torch.allclose(result.actor.after.grad, of_trl, rtol=1e-4, atol=1e-6)


def test_remax_subtracts_the_score_of_a_greedy_response(t, tmp_path):
    greedy = torch.tensor([[0.5], [-1.0], [0.0]])
    result = update(load(tmp_path, "remax"), t, greedy=greedy, kl_coef=0.1)
    kl = ((t.old - t.ref) * t.mask).sum(1, keepdim=True)
    check(result, t, rloo(t, advantages=(t.scores - greedy).view(-1, 1) - 0.1 * kl))
    greedy[1] = math.nan  # no score
    assert math.isfinite(sum(update(load(tmp_path, "remax"), t, greedy=greedy).actor.losses))


def test_cpgd_clips_log_ratios(t, tmp_path):
    """One of three groups has equal scores."""
    t.scores[1] = 1.0
    result = update(load(tmp_path, "cpgd"), t)
    logratio = t.new - t.old
    advantages = center(t.scores) * 3 / 2
    losses = torch.min(logratio * advantages, logratio.clamp(math.log(0.8), math.log(1.2)) * advantages)
    check(result, t, -losses[t.mask].mean())


@pytest.mark.parametrize("name", [*ALGORITHMS, "dapo", "ppo"])
def test_dynamic_sampling(name, tmp_path):
    """Two useful prompts are wanted, and each batch has one. The responses of the second batch are longer."""
    forks = {"rloo": ["dynamic_sampling"], "dapo": ["dapo"], "ppo": ["ppo_dynamic_sampling"]}
    module = load(tmp_path, *forks.get(name, [name, "dynamic_sampling"]))
    t = make_tables(4)
    t.mask[: 2 * G, 5:] = False
    t.scores[1] = 1.0
    t.scores[2, 1:] = math.nan  # one score alone is not useful, either
    batches = [make_rollout(module, select(t, [0, 1])), make_rollout(module, select(t, [2, 3]))]
    result = update(module, t, batches, prompts_per_rollout=2)
    losses = ALGORITHMS | {"dapo": dapo, "ppo": lambda part: token_mean(part, gae(part))}
    check(result, t, losses[name](select(t, [0, 3])))
    assert len(result.rows) == 2 and result.metrics[0]["rollout/prompts_skipped"] == 0


def test_dynamic_sampling_stops_at_its_limit_and_goes_on_in_the_data(tmp_path):
    """Step 1 needs both batches, and still has one useful prompt of two. Step 2 begins where step 1 ended."""
    module = load(tmp_path, "dynamic_sampling")
    t = make_tables(4)
    t.scores[1:] = 0.5
    batches = [make_rollout(module, select(t, [0, 1])), make_rollout(module, select(t, [2, 3]))]
    batches.append(make_rollout(module, select(t, [0, 1]), scores=torch.randn(2, G)))
    result = update(module, t, batches, prompts_per_rollout=2, total_steps=2, max_num_gen_batches=2)
    args = module.Args(prompts_per_rollout=2)
    assert result.rows == [module.shuffled_rows(args, batch, 40) for batch in (1, 2, 3)]
    assert result.metrics[0]["objective/scores"] == pytest.approx(float(t.scores.mean()))
    assert len(result.actor.losses) == 1 + 2 and result.state["batches"] == 3
    t.scores[:] = 0.5
    with pytest.raises(SystemExit):
        update(module, t, max_num_gen_batches=1)


def test_curriculum_draws_from_the_first_rows_first(t, tmp_path):
    module = load(tmp_path, "curriculum")
    result = update(module, t, [make_rollout(module, t)] * 4, total_steps=4)
    assert all(row < 10 * step for step, rows in enumerate(result.rows, 1) for _, row in rows)
    assert len({pair for rows in result.rows for pair in rows}) == 12
    assert max(row for _, row in result.rows[3]) > 20


def test_new_metric_counts_different_responses(t, tmp_path):
    """Responses are 0, 1, ..., length - 1, so those of a prompt differ if their lengths do."""
    result = update(load(tmp_path, "new_metric"), t)
    lengths = t.mask.sum(1).view(-1, G).tolist()
    assert result.metrics[0]["rollout/distinct_frac"] == sum(len({*group}) for group in lengths) / 12


# ---- PPO and reward models ----
def advantages_and_returns(t, kl_penalty=0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """By functions that tests/test_ppo_math.py checks."""
    penalties = torch.zeros(t.mask.shape) + kl_penalty
    rewards = ppo_vl.compute_token_rewards(t.scores.flatten(), penalties, t.mask)
    return ppo_vl.compute_gae(rewards, t.old_values, t.mask, 1.0, 0.95)


def gae(t, kl_penalty=0.0) -> torch.Tensor:
    return ppo_vl.whiten(advantages_and_returns(t, kl_penalty)[0], t.mask)


def uncertain(t, fraction: float) -> torch.Tensor:
    """Which tokens are among this fraction with the highest entropy."""
    count = math.ceil(fraction * int(t.mask.sum()))
    return t.entropy.detach() >= t.entropy[t.mask].sort(descending=True).values[count - 1]


PPO = {  # forks and flags: loss
    "ppo_kl_loss kl_coef=0.5": lambda t: token_mean(t, gae(t)) + kl_losses(t, "k3")[t.mask].mean() / 2,
    "ppo_entropy_bonus entropy_coef=0.5": lambda t: token_mean(t, gae(t)) - t.entropy[t.mask].mean() / 2,
    "ppo_importance_sampling tis_clip=1.2": lambda t: token_mean(t, gae(t) * importance(t, 1.2)),
    "ppo_sequence_mean": lambda t: mean_over_tokens(clip((t.new - t.old).exp(), gae(t)), t.mask).mean(),
    "ppo_entropy_bonus ppo_sequence_mean entropy_coef=0.5": lambda t: (
        mean_over_tokens(clip((t.new - t.old).exp(), gae(t)), t.mask).mean() - t.entropy[t.mask].mean() / 2
    ),
    "ppo_sequence_mean ppo_gspo": lambda t: gspo_by_token(t, gae(t)),
    "ppo_high_entropy_tokens entropy_token_ratio=0.25": lambda t: token_mean(t, gae(t) * uncertain(t, 0.25)),
    "ppo_clipped_advantages advantage_clip=0.5": lambda t: token_mean(t, gae(t).clamp(-0.5, 0.5)),
}


@pytest.mark.parametrize("case", PPO)
def test_loss_and_gradient_of_forks_of_ppo(case, t, tmp_path):
    result = run_case(tmp_path, case, t)
    check(result, t, PPO[case](t))
    losses, _ = ppo_vl.compute_value_loss(t.new_values, t.old_values, advantages_and_returns(t)[1], 0.2)
    mean = mean_over_tokens(losses, t.mask).mean() if "mean" in case else losses[t.mask].mean()
    assert sum(result.critic.losses) == pytest.approx(float(mean), rel=1e-4)


def test_ppo_with_k3_in_the_reward(t, tmp_path):
    result = update(load(tmp_path, "ppo_kl_k3"), t, kl_coef=0.5)
    d = t.old - t.ref
    check(result, t, token_mean(t, gae(t, 0.5 * ((-d).exp() - 1 + d))))
    response_kl = (d * t.mask).sum(1).mean()  # k1
    assert result.metrics[0]["objective/kl"] == pytest.approx(float(response_kl), rel=1e-4)


def test_critic_warmup_trains_only_the_critic(t, tmp_path):
    module = load(tmp_path, "ppo_critic_warmup")
    result = update(module, t, [make_rollout(module, t)] * 3, total_steps=3, critic_warmup_steps=2)
    assert (result.actor.num_updates, result.critic.num_updates) == (1, 3)
    assert [metrics["train/learning_rate"] > 0 for metrics in result.metrics] == [False, False, True]
    check(result, t, token_mean(t, gae(t)))


CPG_LOSSES = [-math.log(1.2), -math.log(1.1), math.log(0.8), math.log(1.5)]
BY_TOKEN = [  # fork; of each token: ratio, advantage, loss, and the gradient of its log-prob
    ("ppo_cpg_loss", [1.5, 1.1, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0], CPG_LOSSES, [0, -1, 0, 1]),
    ("ppo_dual_clip", [5.0, 2.0, 5.0, 0.5], [-2.0, -2.0, 2.0, -2.0], [6, 4, -2.4, 1.6], [0, 4, 0, 0]),
]


@pytest.mark.parametrize("name, ratios, advantages, losses, gradients", BY_TOKEN)
def test_losses_of_tokens(name, ratios, advantages, losses, gradients, tmp_path):
    logprobs = torch.tensor(ratios).log().requires_grad_()
    inputs = logprobs, torch.zeros(4), torch.tensor(advantages)
    results, _ = load(tmp_path, name).compute_policy_loss(*inputs, 0.2, 0.2)
    results.sum().backward()
    assert results.tolist() == pytest.approx(losses) and logprobs.grad.tolist() == pytest.approx(gradients)


def test_lambda_grows_with_the_length(tmp_path):
    """40 tokens have a lambda of 0.5; 20 would have 0, so the minimum of 0.3 applies."""
    module = load(tmp_path, "ppo_length_adaptive_gae")
    mask = torch.arange(40) < torch.tensor([[40], [20]])
    rewards, values = torch.randn(2, 40) * mask, torch.randn(2, 40) * mask
    advantages, _ = module.compute_gae(rewards, values, mask, 1.0, 0.3)
    for row, gae_lambda in enumerate((0.5, 0.3)):
        expected, _ = ppo_vl.compute_gae(rewards, values, mask, 1.0, gae_lambda)
        assert torch.allclose(advantages[row], expected[row])


def test_adaptive_kl_is_a_proportional_controller(t, tmp_path):
    """The KL is far from the target: the error is clipped to 0.2 of its sign; 12 responses, a horizon of 60."""
    module = load(tmp_path, "ppo_adaptive_kl")
    flags = {"kl_coef": 0.5, "kl_target": 1e-3, "kl_horizon": 60, "total_steps": 2}
    result = update(module, t, [make_rollout(module, t)] * 2, **flags)
    kl = result.metrics[0]["objective/kl"]
    factor = 1 + math.copysign(0.2, kl) * 12 / 60
    assert [x["train/kl_coef"] for x in result.metrics] == pytest.approx([0.5, 0.5 * factor])
    assert result.state["kl_coef"] == pytest.approx(0.5 * factor**2)
    penalties = [x["objective/scores"] - x["objective/rlhf_reward"] for x in result.metrics]
    assert penalties == pytest.approx([0.5 * kl, 0.5 * factor * kl], rel=1e-3)


def test_running_normalization_uses_all_scores_so_far(t, tmp_path):
    module = load(tmp_path, "ppo_running_normalization")
    second = torch.randn(3, G) + 5
    both = torch.cat([t.scores, second])
    for mode, mean in (("scale", 0.0), ("standardize", both.mean())):
        rollouts = [make_rollout(module, t), make_rollout(module, t, scores=second)]
        result = update(module, t, rollouts, total_steps=2, reward_running_norm=mode)
        expected = (second - mean).mean() / both.std(correction=0)
        assert result.metrics[1]["objective/rlhf_reward"] == pytest.approx(float(expected), rel=1e-4)


def test_hinge_loss(tmp_path):
    """Differences minus margins: 0.25 and 2. The second pair has no gradient; its smoothed loss is a tenth of 3."""
    chosen = torch.tensor([0.25, 2.5], requires_grad=True)
    inputs = (chosen, torch.zeros(2), torch.tensor([0.0, 0.5]))
    compute_bt_loss = load(tmp_path, "reward_hinge_loss").compute_bt_loss
    losses, _ = compute_bt_loss(*inputs, label_smoothing=0.0, center_coef=0.0)
    losses.sum().backward()
    assert losses.tolist() == [0.75, 0] and chosen.grad.tolist() == [-1, 0]
    losses, _ = compute_bt_loss(*inputs, label_smoothing=0.1, center_coef=0.0)
    assert losses.tolist() == pytest.approx([0.9 * 0.75 + 0.1 * 1.25, 0.1 * 3])


# ---- forks that train the tiny model ----
FAST = {"save_steps": 1, "learning_rate": 1e-3, "warmup_updates": 0}
ONE_UPDATE = {"num_epochs": 1, "train_batch_size": 16}


def train(module, folder: Path, run_name: str = "run", **flags) -> SimpleNamespace:
    """A short run: its metrics, its folder and what setup returned."""
    runs, setup = [], module.setup
    module.setup = lambda args: runs.append(setup(args)) or runs[-1]
    flags = conftest.SHORT | FAST | {"model": TINY, "output_dir": str(folder), "run_name": run_name} | flags
    module.main(module.Args(**{name: x for name, x in flags.items() if hasattr(module.Args, name)}))
    return SimpleNamespace(metrics=metrics_of(folder / run_name), run=runs[0], folder=folder / run_name)


def train_twice(module, folder: Path, **flags) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A run of two steps, and a branch from checkpoint-1 that repeats the second step exactly."""
    whole = train(module, folder, **flags)
    branch = train(module, folder, "branch", resume=str(whole.folder / "checkpoint-1"), **flags)
    assert_same_run(whole.folder, branch.folder, tolerance=0, of_weights=0)
    return whole, branch


@pytest.mark.slow
def test_dapo_trains_and_resumes_exactly(tmp_path, vqa):
    """Prompts with an even number of characters have equal scores, so a batch never has enough useful prompts."""
    code = "[len(x) % 2 * (sum(ids) % 7) for ids, x in zip(completion_ids, prompts)]"
    (tmp_path / "reward.py").write_text(f"def odd(completion_ids, prompts, **columns): return {code}")
    flags = {"rewards": (f"{tmp_path}/reward.py:odd",), "reward_weights": (1.0,)}
    flags |= {"dataset": vqa, "max_num_gen_batches": 3}
    whole, branch = train_twice(load(tmp_path, "dapo"), tmp_path, **flags)
    assert branch.run.state["batches"] == whole.run.state["batches"] > 2


@pytest.mark.slow
def test_moving_reference_is_the_policy_with_alpha_1(tmp_path, vqa, any_score):
    module = load(tmp_path, "moving_reference")
    flags = ONE_UPDATE | any_score | {"dataset": vqa, "ref_sync_steps": 1, "ref_sync_alpha": 1.0}
    whole, branch = train_twice(module, tmp_path, **flags)
    assert [metrics["objective/kl"] for metrics in whole.metrics] == pytest.approx([0, 0], abs=1e-6)
    checkpoints = [weights_of(whole.folder / f"checkpoint-{step}") for step in (1, 2)]
    assert largest_difference(*checkpoints) > 1e-5
    policy = branch.run.actor.module.state_dict()
    assert all(torch.equal(policy[name], x) for name, x in branch.run.reference.state_dict().items())
    evaluation = {"total_steps": 0, "eval_dataset": vqa, "resume": str(whole.folder / "checkpoint-1")}
    train(module, tmp_path, "eval", **flags | evaluation)
    with pytest.raises(SystemExit):
        train(module, tmp_path, "lora", lora_rank=4, **flags)


@pytest.mark.slow
def test_dither_lets_small_changes_arrive(tmp_path, vqa, any_score):
    """Adam's first update changes a weight by the learning rate: on average, bf16 weights change by as much."""
    flags = {"dataset": vqa, "dtype": "bfloat16", "learning_rate": 1e-5, "min_lr_ratio": 1.0}
    whole, _ = train_twice(load(tmp_path, "dither"), tmp_path, **ONE_UPDATE, **any_score, **flags)
    name = "model.layers.0.mlp.up_proj.weight"
    before = weights_of(Path(TINY))[name].float()
    after = weights_of(whole.folder / "checkpoint-1")[name].float()
    assert float((after - before).abs().mean()) == pytest.approx(1e-5, rel=0.1)


@pytest.mark.slow
def test_value_head_trains_with_the_policy(tmp_path, vqa, any_score):
    whole, _ = train_twice(load(tmp_path, "ppo_value_head"), tmp_path, dataset=vqa, **any_score)
    assert "train/critic_grad_norm" not in whole.metrics[0] and whole.run.critic.value_head.weight.any()
    explained = [metrics["value/explained_variance"] for metrics in whole.metrics]
    assert explained[0] == 0 != explained[1] and whole.metrics[0]["loss/value"] > 0
    assert not (whole.folder / "checkpoint-2" / "critic").exists()


@pytest.mark.slow
def test_moving_average_of_the_weights(tmp_path, vqa, any_score):
    """A quarter each of the initial weights and of those of step 1, half of those of step 2."""
    flags = ONE_UPDATE | any_score | {"dataset": vqa, "ema_decay": 0.5}
    whole, branch = train_twice(load(tmp_path, "ppo_ema"), tmp_path, **flags)
    folders = [Path(TINY), whole.folder / "checkpoint-1", whole.folder / "checkpoint-2"]
    start, first, second = map(weights_of, folders)
    expected = {name: (start[name] + first[name]) / 4 + second[name] / 2 for name in second}
    for result in (whole, branch):
        average = weights_of(result.folder / "checkpoint-2" / "ema")
        assert largest_difference(average, expected) < 1e-6 < largest_difference(average, second)


@pytest.mark.slow
def test_ptx_learns_the_assistant_turns(tmp_path, vqa, any_score):
    turns = conftest.chat("what is 1 + 1?", "two", "and 2 + 2?", "four <|im_end|>")
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}, {"messages": turns[:2]}])
    flags = any_score | {"dataset": vqa, "ptx_dataset": chats, "ptx_batch_size": 3}
    module = load(tmp_path, "ppo_ptx")
    first, second = train(module, tmp_path, **flags).metrics
    train(module, tmp_path, "eval", **flags | {"total_steps": 0, "eval_dataset": vqa})
    assert math.log(512) * 0.5 < first["loss/ptx"] and second["loss/ptx"] < first["loss/ptx"]


@pytest.mark.slow
def test_router_loss_of_a_random_mixture_of_experts(tmp_path, tiny_text_model, folder_of, any_score):
    """With 2 of 4 experts per token, the loss is 2 if the experts are balanced."""
    dataset = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": f"{i} + {i}?"} for i in range(12)])
    module = load(tmp_path, "ppo_router_loss")
    flags = any_score | {"dataset": dataset, "router_aux_coef": 0.5, "learning_rate": 1e-2}
    result = train(module, tmp_path, model=str(folder_of("mixtral")), critic_learning_rate=1e-3, **flags)
    first, second = (metrics["loss/router"] for metrics in result.metrics)
    assert 2 <= second < first < 4 and not result.run.actor.module.model.config.output_router_logits
    with pytest.raises(SystemExit):
        train(module, tmp_path, "dense", model=tiny_text_model, **flags)


# ---- after a change of the scripts ----
def renew() -> None:
    """Merge the scripts' changes since the last commit into the forks; write their diffs and numbers of lines."""
    page = README.read_text()
    for name in NAMES:
        text, _, script = read_diff(name)
        with tempfile.TemporaryDirectory() as folder:
            old, fork = Path(folder) / "old.py", Path(folder) / "fork.py"
            old.write_text(run("git", "-C", ROOT, "show", f"HEAD:{script}").stdout)
            applied = run("patch", "--fuzz=0", "-o", fork, old, FORKS / f"{name}.diff")
            if applied.returncode or run("git", "merge-file", fork, old, ROOT / script).returncode:
                conflicts = re.findall(r"^<<<<<<<.*?^>>>>>>>", fork.read_text(), re.M | re.S)
                print(f"{name}: {applied.stdout}", *conflicts, sep="\n")
                continue
            labels = ["--label", script, "--label", script]
            diff = run("diff", "-U1", "-F", "^def ", *labels, ROOT / script, fork).stdout
        diff = re.sub(r"[ \t]+$", "", diff, flags=re.M)
        (FORKS / f"{name}.diff").write_text(f"{text}\n{diff}")
        row = re.escape(f"| [{name}]") + r"\(.*?\) \| .*? \| .*? \|"
        page = re.sub(rf"(?m)^({row}) \+\d+ -\d+ ", r"\1 +{} -{} ".format(*count_lines(name)), page)
    README.write_text(page)


if __name__ == "__main__":
    renew()
