"""Limits on the number and width of lines, and on the line at which `main` ends."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

LONGEST = 60  # lines of a function other than main
CODE = {  # lines, last line of main, lines of main, mean length of non-empty lines, percent over 95 columns
    "rloo.py": (1507, 395, 143, 59, 10),
    "ppo_vl.py": (1706, 482, 172, 59, 10),
    "reward_bt.py": (1117, 290, 77, 57, 10),
    "grm_sft.py": (1221, 253, 76, 58, 10),
    "common/*.py": (1870, 0, 0, 58, 14),
}
LINES = {  # of one file, or of all files that match together
    "README.md": 130,
    "docs/rloo.md": 98,
    "docs/ppo_vl.md": 58,
    "docs/reward_bt.md": 88,
    "docs/grm_sft.md": 83,
    "docs/models.md": 75,
    "docs/recipes.md": 275,
    "tools/*.py": 3426,
    "tests/*.py": 7198,
}


def functions_of(source: str) -> dict[str, tuple[int, int]]:
    """Number of lines and last line of each function and method, with decorators and nested functions."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    first = {n: min([n.lineno, *(d.lineno for d in n.decorator_list)]) for n in nodes}
    return {node.name: (node.end_lineno - first[node] + 1, node.end_lineno) for node in nodes}


@pytest.mark.parametrize("pattern", CODE)
def test_code_is_within_its_limits(pattern):
    sources = [path.read_text() for path in sorted(ROOT.glob(pattern))]
    most_lines, most_to_main, most_main, mean, wide = CODE[pattern]
    lines = [line for source in sources for line in source.splitlines()]
    filled = [line for line in lines if line]
    assert len(lines) <= most_lines
    assert sum(map(len, filled)) / len(filled) <= mean, "crowded"
    assert 100 * sum(len(line) > 95 for line in filled) / len(filled) <= wide, "crowded"
    for source in sources:
        assert source.count("# fmt: skip") <= 4 and "# fmt: off" not in source, "crowded"
        functions = functions_of(source)
        main, end_of_main = functions.pop("main", (0, 0))
        assert main <= most_main and end_of_main <= most_to_main
        assert {name: n for name, (n, _) in functions.items() if n > LONGEST} == {}


@pytest.mark.parametrize("pattern", LINES)
def test_pages_tools_and_tests_are_within_their_limits(pattern):
    files = [*ROOT.glob(pattern)]
    assert files and sum(len(path.read_text().splitlines()) for path in files) <= LINES[pattern]


def test_code_is_formatted():
    files = [*ROOT.glob("*.py"), *(ROOT / folder for folder in ("common", "examples", "tests", "tools"))]
    subprocess.run([sys.executable, "-m", "ruff", "format", "--check", *files], check=True)


def test_common_uses_public_interfaces():
    """Nothing is patched or read from models' sources."""
    text = "".join(path.read_text() for path in (ROOT / "common").glob("*.py"))
    assert not re.search(r"setattr\(|__new__|inspect\.getsource|co_names|\.forward = ", text)
