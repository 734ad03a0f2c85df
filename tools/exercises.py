"""Exercises: a copy of the scripts in which the functions that are the algorithms are empty.

python tools/exercises.py exercises      # writes exercises/; docs/exercises.md describes them
pytest -x exercises                      # checks your functions in order, up to the first that is wrong
python exercises/rloo.py                 # trains with your functions
"""

import ast
import shutil
import sys
from pathlib import Path

from check_exercises import EXERCISES, ROOT


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
    checks = (ROOT / "tools/check_exercises.py").read_text()
    checks = checks.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    (directory / "test_exercises.py").write_text(checks)


def without_body(source: str, function: str) -> str:
    """The source with `raise NotImplementedError` after the docstring of a function or Class.method."""
    node = ast.parse(source)
    for name in function.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == name)
    lines = source.splitlines(keepends=True)
    indent = " " * node.body[0].col_offset
    lines[node.body[0].end_lineno : node.end_lineno] = [f"{indent}raise NotImplementedError\n"]
    return "".join(lines)


if __name__ == "__main__":
    directory = Path(*sys.argv[1:2])
    write_exercises(directory)
    print(f"{directory}: {len(EXERCISES)} functions to write; check them with pytest -x {directory}")
