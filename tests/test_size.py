"""Size is the first feature: budgets of lines and bytes, which comments and docstrings count against too."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

WIDTH, LONGEST = 110, 60  # of a line; of a function other than main
CODE = {  # lines, kB of 1000 bytes, lines of main
    "rloo.py": (1000, 56, 200),
    "ppo_vl.py": (1350, 79, 220),
    "reward_bt.py": (720, 39, 160),
    "grm_sft.py": (820, 45, 160),
    "common/packing.py": (650, 36, 0),
    "common/kl.py": (60, 3, 0),
}
LINES = {  # of one file, or of all that match together
    "README.md": 100,
    "docs/rloo.md": 150,
    "docs/ppo_vl.md": 150,
    "docs/reward_bt.md": 150,
    "docs/grm_sft.md": 150,
    "docs/recipes.md": 200,
    "tools/report.py": 700,
    "tools/bench*.py": 900,
    "tests/*.py": 5500,
}


def longest_functions(source: str) -> dict[str, int]:
    """Name -> lines, decorators included, of functions and methods; one inside another counts twice."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    first = {n: min([n.lineno, *(d.lineno for d in n.decorator_list)]) for n in nodes}
    return {node.name: node.end_lineno - first[node] + 1 for node in nodes}


@pytest.mark.parametrize("name", CODE)
def test_code_is_within_its_budget(name):
    source = (ROOT / name).read_text()
    lines, kilobytes, main = CODE[name]
    assert len(source.splitlines()) <= lines and len(source.encode()) <= 1000 * kilobytes
    assert max(map(len, source.splitlines())) <= WIDTH
    lengths = longest_functions(source)
    assert lengths.pop("main", 0) <= main
    assert {function: n for function, n in lengths.items() if n > LONGEST} == {}


@pytest.mark.parametrize("pattern", LINES)
def test_pages_tools_and_tests_are_within_theirs(pattern):
    files = [*ROOT.glob(pattern)]
    assert files and sum(len(path.read_text().splitlines()) for path in files) <= LINES[pattern]


def test_the_formatter_has_nothing_to_do():
    """Its layout, so that a budget is not met by crowded lines; `fmt: skip` is for calls with many keywords."""
    command = [sys.executable, "-m", "ruff", "format", "--check", *CODE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for name in CODE:
        source = (ROOT / name).read_text()
        assert source.count("# fmt: skip") <= 4 and "# fmt: off" not in source, name


def test_scripts_share_nothing_else():
    assert {path.name for path in (ROOT / "common").glob("*.py")} == {"__init__.py", "packing.py", "kl.py"}
    assert {path.name for path in ROOT.glob("*.py")} == {name for name in CODE if "/" not in name}
