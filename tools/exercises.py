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
    "build_packed": "common/packing.py",
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
    if function == "build_packed":
        return check_build_packed(solution)
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


def check_build_packed(solution) -> None:
    """Compare the packs of two prompts and their responses with the original's, token by token."""
    packing = importlib.import_module("common.packing")
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (2 + 3 + 2,), generator=generator).tolist()
        ids = torch.randint(100, (sum(lengths),), generator=generator).split(lengths)
        prompts = {}
        for i, prompt_ids in enumerate(ids[:2]):
            ones = torch.ones_like(prompt_ids)
            prompts[i] = packing.Prompt(
                row_id=i,
                length=len(prompt_ids),
                media_keys=(),
                token_inputs={"input_ids": prompt_ids[None], "attention_mask": ones[None]},
                media_inputs={},
                position_ids=torch.arange(len(prompt_ids)),
                next_inputs={"input_ids": ones[None, :1], "attention_mask": ones[None, :1]},
            )
        groups = [(0, [0, 1, 2]), (1, [3, 4])]
        responses = {}
        for i, response_indices in groups:
            for b in response_indices:
                responses[b] = packing.continue_prompt(prompts[i], ids[2 + b])
        right = describe_pack(packing.build_packed(groups, prompts, responses))
        for name, value in describe_pack(solution(groups, prompts, responses)).items():
            assert value == right[name], f"build_packed: {name} is\n{value}\nbut should be\n{right[name]}"


def describe_pack(pack) -> dict:
    """What a pack of texts says about its tokens; "attends to" ignores the causal mask inside a part."""
    described = {name: pack.model_inputs[name][0].tolist() for name in ("input_ids", "position_ids")}
    indices = pack.model_inputs["packed_indices"]
    attends_to = {}
    for bucket in indices.buckets:
        for queries, is_query, keys, is_key in zip(*bucket):
            for query in queries[is_query].tolist():
                attends_to[query] = keys[is_key].tolist()
    described |= {f"what token {query} attends to": keys for query, keys in sorted(attends_to.items())}
    described["sequence positions"] = indices.seq_positions.tolist()
    for name in ("response_of_token", "target_ids", "logit_indices", "last_token_indices", "response_index"):
        described[name] = getattr(pack, name).tolist()
    return described | {"token_index": [x.tolist() for x in pack.token_index]}


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
