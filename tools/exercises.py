"""Exercises: a copy of the scripts in which the functions that are the algorithms are empty.

    python tools/exercises.py exercises      # writes exercises/; docs/exercises.md describes them
    pytest -n 0 exercises -k compute_gae     # checks one function
    pytest -n 0 exercises -k grpo            # compares exercises/grpo.py, if you wrote it, with forks/grpo.diff
    python exercises/rloo.py                 # trains with your functions
    python tools/exercises.py sheet WORD     # problems whose numbers follow from a word; key WORD: the answers

A check compares results, metrics, and the gradient of a loss with the original's on random inputs. Of the metrics,
only those of the policy must be there. The copy has this file as test_exercises.py.
"""

import ast
import importlib.util
import random
import re
import shutil
import subprocess
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
    "compute_policy_loss": "ppo_vl.py",
    "compute_value_loss": "ppo_vl.py",
    "compute_bt_loss": "reward_bt.py",
    "sample_token": "common/decoding.py",
}
# What the copy's docstrings leave out: paragraphs with a formula or an example, and sentences that are the solution.
FORMULAS = re.compile(r'\n\n(?:.+\n)*?.*(?: = | -> |>>>).*(?:\n.+)*?(?=\n\n|\n    """)')
SENTENCES = re.compile(
    r": r_i - mean[^.]*|This equals [^.]*\. |Subtract k1 from the reward[^:]*:[^:]*(?=Sources)"
)


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
    response_of_token = torch.arange(4).repeat_interleave(torch.tensor([2, 8, 3, 7]))  # (20,)
    return {
        "compute_advantages": dict(
            rewards=x.masked_fill(~kept, torch.nan), kept_responses=kept, normalize=seed % 2 == 1
        ),
        "kl_estimate": dict(logprobs=x, ref_logprobs=y, estimator=("k1", "k2", "k3")[seed % 3]),
        "compute_rloo_loss": dict(
            new_logprobs=0.1 * x.flatten(), old_logprobs=0.1 * y.flatten(), advantages=y[:, 0] - x[:, 1],
            response_of_token=response_of_token, clip_low=0.2, clip_high=0.3,
        ),
        "compute_token_rewards": dict(
            scores=y[:, 0].masked_fill(~(mask & kept).any(1), torch.nan), kl_penalty=x.abs(), mask=mask & kept
        ),
        "compute_gae": dict(rewards=x, values=y, mask=mask & kept, gamma=0.9, gae_lambda=0.8),
        "whiten": dict(x=torch.where(mask, x if seed else 0 * x + 0.1, torch.nan), mask=mask),
        "compute_policy_loss": dict(
            new_logprobs=0.3 * x[1], old_logprobs=0.3 * y[1], advantages=y[2], clip_low=0.2, clip_high=0.3,
        ),
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
    if is_loss := function.__name__.endswith("loss"):
        first.requires_grad_()
    result = function(**inputs)
    results = {}
    for k, part in enumerate(result if isinstance(result, tuple) else (result,)):
        results |= part if isinstance(part, dict) else {f"result {k}": part}
    has_gradient = is_loss and results["result 0"].requires_grad
    return results, torch.autograd.grad(results["result 0"].sum(), first)[0] if has_gradient else None


def check(directory: Path, function: str, grpo: Path | None = None) -> None:
    """Compare a function of a directory with the original; raises AssertionError if they differ.

    grpo: compare grpo.py with this file. Losses may be per token or per response, so only their sum counts."""
    file = "grpo.py" if grpo else EXERCISES[function]
    solution, original = load(directory / file, function), load(grpo or ROOT / file, function)
    for seed in range(20):
        inputs = make_inputs(function, seed)
        expected, expected_gradient = run(original, inputs)
        results, gradient = run(solution, inputs)
        if grpo and gradient is not None:
            results["the sum"], expected["the sum"] = (x.pop("result 0").sum() for x in (results, expected))
        required = {name for name in expected if "/" not in name or name.startswith("policy/")}
        missing = ", ".join(sorted(required - results.keys()))
        assert not missing, f"{function} must also return {missing}"
        names = sorted(required) if grpo else expected
        pairs = {name: (results[name], expected[name]) for name in names if name in results}
        pairs["the gradient"] = (gradient, expected_gradient)
        for name, (value, right) in pairs.items():
            message = f"{function}: {name} is\n{value}\nbut should be\n{right}\nfor {inputs}"
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5, msg=message)


@pytest.mark.parametrize("function", EXERCISES)
def test_exercise(function):
    check(Path(__file__).parent, function)


@pytest.mark.skipif(not Path(__file__).with_name("grpo.py").exists(), reason="no grpo.py")
@pytest.mark.parametrize("function", ["compute_advantages", "compute_rloo_loss"])
def test_grpo(function, tmp_path):
    diff = ROOT / "forks/grpo.diff"
    subprocess.run(["patch", "-s", "-o", tmp_path / "grpo.py", ROOT / "rloo.py", diff], check=True)
    check(Path(__file__).parent, function, grpo=tmp_path / "grpo.py")


# ---- writing the copy ----


def write_exercises(directory: Path) -> None:
    if directory.exists():
        print(f"error: give a directory that does not exist, not {directory}", file=sys.stderr)
        raise SystemExit(2)
    shutil.copytree(ROOT / "common", directory / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "assets").symlink_to(ROOT / "assets")
    for script in sorted({file for file in EXERCISES.values() if "/" not in file}):
        source = (ROOT / script).read_text()
        pointer = f"\n\n    (the formulas: docs/{Path(script).stem}.md)"
        (directory / script).write_text(FORMULAS.sub(pointer, source, count=1))
    for function, file in EXERCISES.items():
        path = directory / file
        path.write_text(without_body(path.read_text(), function))
    checks = Path(__file__).read_text()
    checks = checks.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    (directory / "test_exercises.py").write_text(checks)


def without_body(source: str, function: str) -> str:
    """The source with `raise NotImplementedError` as the body of a function, below what its docstring may say."""
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == function)
    lines = source.splitlines(keepends=True)
    docstring, *body = node.body
    lines[body[0].lineno - 1 : body[-1].end_lineno] = ["    raise NotImplementedError\n"]
    text = "".join(lines[docstring.lineno - 1 : docstring.end_lineno])
    lines[docstring.lineno - 1 : docstring.end_lineno] = [SENTENCES.sub("", FORMULAS.sub("", text))]
    return "".join(lines)


# ---- problem sheets ----


def make_problems(word: str) -> list[tuple[str, str]]:
    """Problems for pen and paper, with their answers by the original functions. Another word gives other numbers."""
    import ppo_vl
    import rloo
    from common import kl, packing

    rng = random.Random(word)
    tenths = lambda count, low, high: torch.tensor([rng.randrange(low, high) / 10 for _ in range(count)])  # noqa: E731
    show = lambda x: ", ".join(f"{round(value, 4):g}" for value in torch.as_tensor(x).flatten().tolist())  # noqa: E731
    rewards = tenths(4, 0, 11)
    answer = show(rloo.compute_advantages(rewards[None], rewards.isfinite()[None], normalize=False))
    problems = [(f"Four responses have the rewards {show(rewards)}. Their leave-one-out advantages?", answer)]

    logratios, advantage = tenths(2, -2, 3).requires_grad_(), tenths(1, -20, 20)
    loss, _ = rloo.compute_rloo_loss(logratios, torch.zeros(2), advantage, torch.zeros(2).long(), 0.2, 0.2)
    [gradient] = torch.autograd.grad(loss.sum(), logratios)
    text = f"A response has the advantage {show(advantage)} and two tokens with the log-ratios {show(logratios)}. "
    text += "RLOO's loss with a clip range of 0.2, and its gradients in the two log-probs?"
    problems.append((text, f"{show(loss)}; {show(gradient)}"))

    logprobs, ref_logprobs = tenths(2, -30, 0)
    answer = show([kl.kl_estimate(logprobs, ref_logprobs, name) for name in ("k1", "k2", "k3")])
    problems.append(
        (f"A log-prob is {show(logprobs)}, the reference's {show(ref_logprobs)}. k1, k2, k3?", answer)
    )

    rewards, values = tenths(8, -5, 11).view(2, 1, 4)
    advantages, _ = ppo_vl.compute_gae(rewards, values, rewards.isfinite(), 1.0, 0.5)
    text = f"Four tokens have the rewards {show(rewards)} and the values {show(values)}. Their advantages by GAE "
    problems.append((text + "with gamma 1 and lambda 0.5?", show(advantages)))

    P, *lengths = rng.choices((2, 3, 4), k=4)
    ids = torch.zeros(1, P, dtype=torch.long)
    prompt = packing.Prompt(0, P, (), {"input_ids": ids}, {}, torch.arange(P), {"input_ids": ids[:, :1]})
    responses = [packing.continue_prompt(prompt, torch.zeros(n, dtype=torch.long)) for n in lengths]
    pack = packing.build_packed([(0, [0, 1, 2])], [prompt], responses)
    start = P + lengths[0]  # of the second response
    seen = [*range(P), *range(start, start + lengths[1])]
    text = (
        f"A pack holds a prompt of {P} tokens and its responses of {show(lengths)} tokens. All position_ids, "
    )
    text += "the pack indices that the second response's last token attends to, and logit_indices?"
    problems.append(
        (text, "; ".join(map(show, (pack.model_inputs["position_ids"], seen, pack.logit_indices))))
    )
    return problems


if __name__ == "__main__":
    if sys.argv[1] in ("sheet", "key"):
        for k, (problem, answer) in enumerate(make_problems(sys.argv[2]), start=1):
            print(f"{k}. {answer if sys.argv[1] == 'key' else problem}")
        raise SystemExit
    directory = Path(sys.argv[1])
    write_exercises(directory)
    print(f"{directory}: {len(EXERCISES)} functions to write; check one with pytest -n 0 {directory} -k NAME")
