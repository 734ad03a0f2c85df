"""The exercises of docs/exercises.md: the originals pass their checks, wrong and missing solutions don't."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "tools"))
import exercises  # noqa: E402
from exercises import EXERCISES  # noqa: E402
from test_forks import patch  # noqa: E402

WRONG = [  # function, a part of its code, and a replacement that makes the function wrong
    ("compute_advantages", "(count - 1).clamp(min=1)", "count"),
    ("kl_estimate", "torch.expm1(-d) + d", "torch.expm1(d) - d"),
    ("compute_rloo_loss", "torch.maximum", "torch.minimum"),
    ("compute_rloo_loss", "1 + clip_high)", "1 + clip_low)"),
    ("compute_rloo_loss", '"policy/clipfrac_low"', '"clipfrac"'),  # main reads it
    ("compute_token_rewards", "mask.sum(1, keepdim=True)", "1"),
    ("compute_gae", "torch.where(mask[:, t], advantage, next_advantage)", "advantage * mask[:, t]"),
    ("whiten", "x[mask]", "x.flatten()"),
    ("compute_policy_loss", "clamp(1 - clip_low", "clamp(1 - clip_high"),
    ("compute_value_loss", "old_values + change.clamp", "new_values + change.clamp"),
    ("compute_bt_loss", "- margins", "+ margins"),
    ("compute_bt_loss", "+ rejected_rewards) ** 2", "- rejected_rewards) ** 2"),
    ("sample_token", "uniform[:, None] * cdf[:, -1:]", "uniform[:, None].square() * cdf[:, -1:]"),
    ("build_packed", "prompt[-1:], response", "response[:1], response"),
    ("build_packed", "len(continuations[b].response_mask)", "int(continuations[b].response_mask.sum())"),
    ("build_packed", "position_ids[:, None]", "position_ids[:1]"),
    ("build_packed", '| inputs["media_inputs"]', ""),
    ("build_packed", 'model_inputs["attention_mask"] =', "_ ="),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("exercises") / "all"
    exercises.write_exercises(path)
    return path


@pytest.mark.parametrize("function", EXERCISES)
def test_the_original_passes_its_check_and_the_empty_function_does_not(function, directory):
    exercises.check(ROOT, function)
    with pytest.raises(NotImplementedError):
        exercises.check(directory, function)
    docstring = exercises.load(directory / EXERCISES[function], function).__doc__
    assert not re.search(r" = | -> |>>>|mean\(|c / \(c|k2 or k3", docstring)


@pytest.mark.slow
@pytest.mark.parametrize("function, right, wrong", WRONG)
def test_wrong_solutions_fail(function, right, wrong, tmp_path):
    source = (ROOT / EXERCISES[function]).read_text()
    code = re.search(rf"^def {function}\(.*?(?=^(?:def|class|@|#) |\Z)", source, re.M | re.S)[0]
    assert right in code and {name for name, *_ in WRONG} == {*EXERCISES}
    path = tmp_path / EXERCISES[function]
    path.parent.mkdir(exist_ok=True)
    path.write_text(source.replace(code, code.replace(right, wrong)))
    with pytest.raises((AssertionError, RuntimeError)):
        exercises.check(tmp_path, function)


def test_grpo_is_compared_with_the_fork(tmp_path):
    """Also constant factors, which training hides."""
    fork, _ = patch(tmp_path, ["grpo"])
    source, solution = fork.read_text(), tmp_path / "solution" / "grpo.py"
    solution.parent.mkdir()
    for function, right, wrong in (
        ("compute_advantages", "(count - 1).clamp(min=1)).sqrt", "count).sqrt"),  # of a population
        ("compute_rloo_loss", "return losses / lengths", "return losses / lengths.float().mean()"),
    ):
        solution.write_text(source.replace(right, wrong))
        with pytest.raises(AssertionError, match=f"{function}: (result 0|the sum) is"):
            exercises.check(solution.parent, function, grpo=fork)
    per_response = "losses = torch.zeros(4).index_add(0, response_of_token, losses / lengths)"
    solution.write_text(source.replace("return losses / lengths,", f"{per_response}\n    return losses,"))
    exercises.check(solution.parent, "compute_rloo_loss", grpo=fork)


def test_existing_files_are_not_changed(directory, refused):
    before = (directory / "rloo.py").read_bytes()
    with refused("error: give a directory"):
        exercises.write_exercises(directory)
    assert (directory / "rloo.py").read_bytes() == before


def test_the_page_has_all_exercises_in_order(directory):
    page = (ROOT / "docs/exercises.md").read_text()
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/.]+)` \|", page, re.M)
    assert rows == list(EXERCISES.items())
    assert (directory / "test_exercises.py").read_text().count("def test_") == 2
    assert "min(rho" not in (directory / "rloo.py").read_text() + (directory / "ppo_vl.py").read_text()
