"""Exercises: a copy of the scripts in which the functions that are the algorithms are empty.

    python tools/exercises.py exercises      # writes exercises/; docs/exercises.md describes them
    pytest -x exercises                      # checks your functions in order, up to the first that is wrong
    python exercises/rloo.py                 # trains with your functions

A check compares a function, and the gradient of a loss, with the original on random inputs. Of the metrics that
a loss function returns, only those with the original's names are compared; there may be none. The copy gets this file
as test_exercises.py.
"""

import ast
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent  # the originals
sys.path.insert(0, str(ROOT))
EXERCISES = {  # function: file
    "compute_advantages": "rloo.py",
    "kl_estimate": "common/kl.py",
    "compute_rloo_loss": "rloo.py",
    "compute_token_rewards": "ppo_vl.py",
    "compute_gae": "ppo_vl.py",
    "whiten": "ppo_vl.py",
    "compute_value_loss": "ppo_vl.py",
    "compute_bt_loss": "reward_bt.py",
    "sample_token": "common/decoding.py",
    "plan_packs": "common/packing.py",
}


def load(path: Path, function: str):
    """A function of a file, which is imported under another name than the original."""
    spec = importlib.util.spec_from_file_location(f"exercise_{path.stem}_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses need it there
    spec.loader.exec_module(module)
    return getattr(module, function)


def make_inputs(function: str, seed: int) -> dict:
    """Random arguments of a function: 4 prompts or responses, up to 5 tokens each."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, 5, generator=generator)
    mask = torch.arange(5) < torch.randint(1, 6, (4, 1), generator=generator)  # (4, 5)
    kept = torch.rand(4, 5, generator=generator) < 0.7
    x[0] = 0.3  # a group of equal scores
    response_of_token = torch.arange(4).repeat_interleave(5)  # (20,)
    return {
        "compute_advantages": dict(
            rewards=x.masked_fill(~kept, torch.nan), kept_responses=kept, normalize=seed % 2 == 1
        ),
        "kl_estimate": dict(logprobs=x, ref_logprobs=y, estimator=("k1", "k2", "k3")[seed % 3]),
        "compute_rloo_loss": dict(
            new_logprobs=0.1 * x.flatten(), old_logprobs=0.1 * y.flatten(), advantages=y[:, 0] - x[:, 1],
            response_of_token=response_of_token, clip_low=0.2, clip_high=0.3,
        ),
        "compute_token_rewards": dict(scores=y[:, 0], kl_penalty=x.abs(), mask=mask & kept),
        "compute_gae": dict(rewards=x, values=y, mask=mask & kept, gamma=0.9, gae_lambda=0.8),
        "whiten": dict(x=x, mask=mask),
        "compute_value_loss": dict(new_values=x[1], old_values=y[1], returns=y[2], value_clip=0.2 * (seed % 2)),
        "compute_bt_loss": dict(
            chosen_rewards=x[1], rejected_rewards=y[1], margins=y[2].abs(), label_smoothing=0.1, center_coef=0.05,
        ),
        "sample_token": dict(logprobs=x.log_softmax(-1), uniform=torch.rand(4, generator=generator)),
    }[function]  # fmt: skip


def run(function, inputs: dict) -> tuple[dict, torch.Tensor | None]:
    """What a function returns, by name, and the gradient of a loss in its first argument."""
    inputs = {name: x.clone() if torch.is_tensor(x) else x for name, x in inputs.items()}
    first = next(iter(inputs.values()))
    is_loss = function.__name__.endswith("loss")
    first.requires_grad_(is_loss)
    result = function(**inputs)
    results = {}
    for k, part in enumerate(result if isinstance(result, tuple) else (result,)):
        results |= part if isinstance(part, dict) else {f"result {k}": part}
    loss = results["result 0"]
    gradient = torch.autograd.grad(loss.sum(), first)[0] if is_loss and loss.requires_grad else None
    return results, gradient


def check(directory: Path, function: str) -> None:
    """Compare a function of a directory with the original; raises AssertionError if they differ."""
    solution = load(directory / EXERCISES[function], function)
    if function == "plan_packs":
        return check_plan(solution)
    original = load(ROOT / EXERCISES[function], function)
    for seed in range(20):
        inputs = make_inputs(function, seed)
        expected, expected_gradient = run(original, inputs)
        results, gradient = run(solution, inputs)
        is_complete = {name for name in expected if name.startswith("result")} <= results.keys()
        assert is_complete, f"{function} must return {', '.join(expected)}; metrics are optional"
        pairs = {name: (results[name], expected[name]) for name in expected if name in results}
        pairs["the gradient"] = (gradient, expected_gradient)
        for name, (value, right) in pairs.items():
            message = f"{function}: {name} is\n{value}\nbut should be\n{right}\nfor {inputs}"
            if right is None or value is None:
                assert right is value, message
            else:
                assert value.dtype == right.dtype, f"{function}: {name} is {value.dtype}, not {right.dtype}"
                assert value.shape == right.shape, f"{function}: {name} is {value.shape}, not {right.shape}"
                assert torch.allclose(value, right, rtol=1e-4, atol=1e-5), message


def check_plan(plan_packs) -> None:
    """A plan is right if it holds each response once, within the limit, as many packs on each rank."""
    for seed in range(20):
        lengths = torch.randint(1, 9, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        groups = [(i, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(4)]
        plan = plan_packs(groups, [5, 2, 7, 4], lengths, max_tokens=16, world_size=2)
        packs = [pack for rank in plan for pack in rank]
        assert len(plan) == 2 and len(plan[0]) == len(plan[1]), "all ranks need the same number of packs"
        placed = [(i, b) for pack in packs for i, response_indices in pack for b in response_indices]
        assert sorted(placed) == [(b // 3, b) for b in range(12)], "each response must be in one pack, once"
        sizes = [sum([5, 2, 7, 4][i] + sum(lengths[b] for b in bs) for i, bs in pack) for pack in packs]
        assert max(sizes) <= 16, f"packs have {sizes} tokens, but the limit is 16"
        for i, prompt_length in enumerate([5, 2, 7, 4]):
            is_split = sum(i == other for pack in packs for other, _ in pack) > 1
            fits = prompt_length + sum(lengths[3 * i : 3 * i + 3]) <= 16
            assert not (is_split and fits), f"group {i} fits into one pack, but is split: {plan}"


@pytest.mark.parametrize("function", EXERCISES)
def test_exercise(function):
    check(Path(__file__).parent, function)


# ---- writing the copy ----


def write_exercises(directory: Path) -> None:
    if directory.exists():
        print(f"error: give a directory that does not exist, not {directory}", file=sys.stderr)
        raise SystemExit(2)
    shutil.copytree(ROOT / "common", directory / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "assets").symlink_to(ROOT / "assets")
    for script in sorted({file for file in EXERCISES.values() if "/" not in file}):
        shutil.copy(ROOT / script, directory)
    for function, file in EXERCISES.items():
        path = directory / file
        path.write_text(without_body(path.read_text(), function))
    checks = Path(__file__).read_text()
    checks = checks.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    (directory / "test_exercises.py").write_text(checks)


def without_body(source: str, function: str) -> str:
    """The source with `raise NotImplementedError` after the docstring of a function."""
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == function)
    lines = source.splitlines(keepends=True)
    indent = " " * node.body[0].col_offset
    lines[node.body[0].end_lineno : node.end_lineno] = [f"{indent}raise NotImplementedError\n"]
    return "".join(lines)


if __name__ == "__main__":
    directory = Path(*sys.argv[1:2])
    write_exercises(directory)
    print(f"{directory}: {len(EXERCISES)} functions to write; check them with pytest -x {directory}")
