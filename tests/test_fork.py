"""docs/forking.md: each diff applies with `patch`, trains for two steps, and does a thing that the script does not.

After a change of the scripts, `PYTHONPATH=. python tests/test_fork.py` renews the diffs and the counts of the page.
"""

import dataclasses
import importlib.util
import inspect
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, read_jsonl

PAGE = ROOT / "docs" / "forking.md"
BLOCK = r"^### (.+)\n((?:(?!###).*\n)*?)```diff\n((?:.*\n)*?)```$"


def diffs() -> dict[str, str]:
    return {title: diff for title, _, diff in re.findall(BLOCK, PAGE.read_text(), re.M)}


def script_of(diff: str) -> str:
    return re.match(r"--- (\w+)\.py\n\+\+\+ \1\.py\n", diff)[1]


def apply(titles: list[str], folder: Path) -> Path:
    """The script with some diffs, one after the other, as the page's command does it."""
    target = folder / f"{script_of(diffs()[titles[0]])}.py"
    target.write_text((ROOT / target.name).read_text())
    for title in titles:
        command = ["patch", "--batch", str(target)]
        given = subprocess.run(command, input=diffs()[title], capture_output=True, text=True)
        assert given.returncode == 0, given.stdout + given.stderr
    return target


# --- a run of two steps, with its rollouts and losses --------------------------------------------------------------

NOISY = """
from dataclasses import replace
from rloo import ModelSampler
class Noisy(ModelSampler):
    def sample(self, *given):
        return [replace(response, logprobs=response.logprobs + 5e-4) for response in super().sample(*given)]
"""
FLAGS = {"total_steps": 2, "model": TINY, "seed": 3}
ONLINE = {"rollout_batch_size": 32, "train_batch_size": 32}
ONLINE |= {"num_samples_per_prompt": 4, "max_response_length": 8}
OF_SCRIPT = {
    "rloo": ONLINE | {"num_iterations": 2},
    "ppo_vl": ONLINE,
    "reward_bt": {"train_batch_size": 8, "eval_samples": 8},
    "grm_sft": {"train_batch_size": 8, "eval_samples": 8, "train_samples": 64},
}


def two_steps(path: Path, folder: Path, **flags) -> SimpleNamespace:
    """-> module, lines of metrics.jsonl, the losses that went backward, and of each call of roll_out its arguments
    and the rollout, with what main has written into it."""
    spec = importlib.util.spec_from_file_location(f"fork_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    run = SimpleNamespace(module=module, rollouts=[], losses=[])
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    make_engine, roll_out = module.make_engine, getattr(module, "roll_out", None)

    def watched_engine(*args, **keywords):
        engine = make_engine(*args, **keywords)
        backward = engine.backward
        engine.backward = lambda loss, **how: (run.losses.append(float(loss.detach())), backward(loss, **how))
        return engine

    def watched_roll_out(*args, **keywords):
        given = inspect.signature(roll_out).bind(*args, **keywords).arguments
        rollout = roll_out(*args, **keywords)
        run.rollouts.append((given, rollout))
        return rollout

    module.make_engine = watched_engine
    module.roll_out = watched_roll_out
    flags = FLAGS | {"output_dir": str(folder), "run_name": "run"} | OF_SCRIPT[path.stem] | flags
    known = {field.name for field in dataclasses.fields(module.Args)}
    module.main(module.Args(**{name: value for name, value in flags.items() if name in known}))
    run.metrics = read_jsonl(folder / "run" / "metrics.jsonl")
    return run


@pytest.fixture(scope="module")
def files(vqa, any_score, tmp_path_factory) -> dict[str, dict]:
    """Flags by script: 40 questions without held-out ones, a reward that differs, a sampler that is a bit off."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "noisy.py").write_text(NOISY)
    online = any_score | {"dataset": vqa}
    return {"rloo": online | {"rollout": f"{folder}/noisy.py:Noisy"}, "ppo_vl": online, "reward_bt": {}}


@pytest.fixture(scope="module")
def original(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp
    return cache(lambda script: two_steps(ROOT / f"{script}.py", folder("x"), **files[script]))


# --- what only the fork does -----------------------------------------------------------------------------------------


def advantages_of(run) -> list[float]:
    """Of rewards 1, 2, 6."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    return run.module.compute_advantages(torch.tensor([[1.0, 2.0, 6.0]]), mask, False)[0].tolist()


def loss_of(run, differences: list[float]) -> float:
    """Of one response with advantage 1, whose tokens have become likelier by `differences`."""
    losses, _ = run.module.compute_rloo_loss(
        new_logprobs=torch.tensor(differences),
        logprobs=torch.zeros(len(differences)),
        advantages=torch.ones(1),
        owner=torch.zeros(len(differences), dtype=torch.long),
        clip_low=0.2,
        clip_high=0.2,
    )
    return float(losses.sum())


def near(one, other) -> bool:
    return one == pytest.approx(other, rel=1e-4, abs=1e-5)


def first_update(run) -> SimpleNamespace:
    """Step 1, where the ratio is 1: A (B,), lengths (B,), log-probs (B,), and the loss."""
    rollout = run.rollouts[0][1]
    logp = (rollout.logprobs * rollout.mask).sum(1)
    lengths = rollout.mask.sum(1)
    return SimpleNamespace(A=rollout.advantages.flatten(), lengths=lengths, logp=logp, loss=run.losses[0])


def grpo(run) -> bool:
    scores = near(advantages_of(run), [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])
    return scores and near(loss_of(run, [0.1, 0.3]), -(math.exp(0.1) + 1.2) / 2)


def dr_grpo(run) -> bool:
    step = first_update(run)
    loss = -float((step.A * step.lengths).sum()) / (32 * 8)
    return near(advantages_of(run), [-2, -1, 3]) and near(step.loss, loss)


def token_level(run) -> bool:
    step = first_update(run)
    return near(step.loss, -float((step.A * step.lengths).sum() / step.lengths.sum()))


def cispo(run) -> bool:
    step = first_update(run)
    return near(step.loss, -float((step.A * step.logp).sum() / step.lengths.sum()))


def gspo(run) -> bool:
    return near(loss_of(run, [0.1, 0.2]), -math.exp(0.15))  # 1.16, inside the clip, and not e^.3


def remax(run) -> bool:
    drawn = [(given["num_samples"], given["temperature"]) for given, _ in run.rollouts]
    sums = first_update(run).A.view(-1, 4).sum(1).abs()
    return drawn == [(4, 1.0), (1, 0.0)] * 2 and float(sums.max()) > 0.01


def kl_as_a_loss(run) -> bool:
    last = run.metrics[-1]
    in_reward = last["objective/rlhf_reward"] != last["objective/scores"]
    return last["loss/kl"] > 0 and last["objective/kl"] != 0 and not in_reward


def entropy_bonus(run) -> bool:
    return 0.5 < run.losses[0] / (-0.01 * run.metrics[0]["policy/entropy"]) < 2


def dynamic_sampling(run) -> bool:
    rollout = run.rollouts[0][1]
    groups = rollout.trained.any(1)
    all_differ = bool((rollout.scores[groups].std(1) > 0).all())
    return len(groups) == 16 and 0 < int(groups.sum()) <= 8 and all_differ


def importance_weights(run) -> bool:
    step = first_update(run)
    return near(run.metrics[0]["rollout/tis_weight"], float((-5e-4 * step.lengths).exp().mean()))


def reference_sync(run) -> bool:
    return run.metrics[0]["objective/kl"] == 0 and abs(run.metrics[1]["objective/kl"]) < 1e-3


def new_metric(run) -> bool:
    ids = [tuple(x.tolist()) for x in run.rollouts[0][1].response_ids]
    distinct = sum(len({*ids[i : i + 4]}) for i in range(0, 32, 4))
    return run.metrics[0]["rollout/distinct_frac"] == distinct / 32


def curriculum(run) -> bool:
    of_first_step = {prompt.index for prompt in run.rollouts[0][1].prompts}
    of_second_step = {prompt.index for prompt in run.rollouts[1][1].prompts}
    return max(of_first_step) < 20 <= max(of_second_step) and len(of_first_step | of_second_step) > 8


def adaptive_lambda(run) -> bool:
    rewards = torch.zeros(1, 40).index_fill(1, torch.tensor([39]), 1.0)
    advantages, _ = run.module.compute_gae(rewards, torch.zeros(1, 40), torch.ones(1, 40), 1.0, 1.0)
    return near(float(advantages[0, 38]), 0.5)  # 1 - 1 / (0.05 * 40)


def hinge(run) -> bool:
    chosen, rejected = torch.tensor([0, 2]), torch.tensor([1, 3])
    pairs = run.module.Pairs(chosen, rejected, margins=torch.zeros(2), weights=torch.ones(2) / 2)
    losses, _ = run.module.compute_bt_loss(torch.tensor([0.25, 0.0, 2.0, 0.0]), pairs, 0.0, 0.0)
    return near(losses.tolist(), [0.75, 0])


CHECKS = {
    "GRPO": (grpo, {}),
    "Dr. GRPO": (dr_grpo, {}),
    "GSPO": (gspo, {}),
    "Token-level loss (DAPO)": (token_level, {}),
    "CISPO": (cispo, {}),
    "ReMax": (remax, {}),
    "KL as a loss": (kl_as_a_loss, {}),
    "Entropy bonus": (entropy_bonus, {}),
    "Dynamic sampling (DAPO)": (dynamic_sampling, {}),
    "Importance weights of the sampler": (importance_weights, {}),
    "Reference that follows (TR-DPO)": (reference_sync, {"ref_sync_steps": 1, "ref_sync_alpha": 1.0}),
    "Curriculum": (curriculum, {}),
    "A new metric": (new_metric, {}),
    "Length-adaptive GAE (VAPO)": (adaptive_lambda, {}),
    "Hinge loss": (hinge, {}),
}


def does(check, run) -> bool:
    try:
        return check(run)
    except KeyError:  # no such metric
        return False


@pytest.mark.slow
@pytest.mark.parametrize("title", CHECKS)
def test_fork_trains_and_does_what_the_script_does_not(title, tmp_path, files, original):
    check, flags = CHECKS[title]
    path = apply([title], tmp_path)
    run = two_steps(path, tmp_path, **files[path.stem] | flags)
    assert len(run.metrics) >= 2 and all(math.isfinite(loss) for loss in run.losses)
    assert does(check, run) and not does(check, original(path.stem))


@pytest.mark.slow
def test_forks_go_together(tmp_path, files):
    """GRPO as in its paper: the KL in the loss."""
    run = two_steps(apply(["GRPO", "KL as a loss"], tmp_path), tmp_path, **files["rloo"])
    assert grpo(run) and kl_as_a_loss(run)


# --- the page --------------------------------------------------------------------------------------------------------


def counts(diff: str) -> tuple[int, int, int]:
    """Lines added, lines removed, places."""
    return tuple(len(re.findall(start, diff, re.M)) for start in (r"^\+(?!\+\+)", "^-(?!--)", "^@@"))


def table() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    rows = [line.strip("| \n").split(" | ") for line in lines]
    return {re.match(r"\[(.+?)\]", row[0])[1]: row for row in rows}


def test_every_diff_applies(tmp_path):
    for title in diffs():
        compile(apply([title], tmp_path).read_text(), title, "exec")


def test_page_has_every_fork_with_its_paper_and_its_size():
    assert diffs().keys() == CHECKS.keys() == table().keys() and len(CHECKS) >= 12
    for title, diff in diffs().items():
        added, removed, places = counts(diff)
        assert table()[title][-2:] == [f"+{added} -{removed}", str(places)], title
        assert added + removed <= 15 and places <= 3, title
        assert max(map(len, diff.splitlines())) <= 111


def renew() -> None:
    """The diffs again, against the scripts of today, and their sizes."""
    import tempfile

    text = PAGE.read_text()
    for title, diff in diffs().items():
        with tempfile.TemporaryDirectory() as folder:
            path = apply([title], Path(folder))
            names = ["--label", path.name, "--label", path.name]
            command = ["diff", "-U1", "-F", "^def ", *names, str(ROOT / path.name), str(path)]
            renewed = subprocess.run(command, capture_output=True, text=True).stdout
        text = text.replace(diff, re.sub(r"[ \t]+$", "", renewed, flags=re.M))
        added, removed, places = counts(renewed)
        row = re.escape(f"| [{title}]") + r".*\|"
        cells = rf"\1 +{added} -{removed} | {places} |"
        text = re.sub(rf"^({row}) [^|]* \| [^|]* \|$", cells, text, flags=re.M)
    PAGE.write_text(text)


if __name__ == "__main__":
    renew()
