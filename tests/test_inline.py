"""tools/inline.py: the file that it makes has everything once, and runs alone."""

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS, TINY, to_argv, write_jsonl

sys.path.append(str(ROOT / "tools"))
import inline as inline_tool  # noqa: E402


def call(words: list[str], folder) -> subprocess.CompletedProcess:
    """A command in a folder that can't see the repository."""
    env = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("name", SCRIPTS)
def test_inlined_file_has_everything_once_and_keeps_the_text(name, tmp_path):
    script = (ROOT / f"{name}.py").read_text()
    source = inline_tool.inline(ROOT / f"{name}.py")
    tree = ast.parse(source)
    assert ast.get_docstring(tree) == ast.get_docstring(ast.parse(script))
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) == len(set(imports)) and not re.search(r"^ *(from|import) common", source, re.M)
    used = ["__init__", "attention", *re.findall(r"^from common(?:\.| import )(\w+)", script, re.M)]
    for text in (script, *((ROOT / f"common/{module}.py").read_text() for module in used)):
        lines = text.splitlines()
        for node in ast.parse(text).body:  # with comments and docstrings, byte for byte
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                block = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                assert source.count(block) == 1, node.name
    (tmp_path / "one.py").write_text(source)
    done = call([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "one.py"], tmp_path)
    assert done.returncode == 0, done.stdout


def test_metadata_is_that_of_the_requirements():
    """PEP 723: between the two lines of slashes lies TOML, as comments."""
    start, block, _ = inline_tool.inline(ROOT / "rloo.py", metadata=True).split("# ///", 2)
    data = tomllib.loads(block.removeprefix(" script\n").replace("# ", ""))
    required = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert start == "" and "# ///" not in inline_tool.inline(ROOT / "rloo.py")
    assert data == {"requires-python": ">=3.11", "dependencies": [line for line in required if line]}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_inlined_file_runs_alone(name, tmp_path, vqa_rows):
    folder = tmp_path / "alone"
    folder.mkdir()
    done = call([sys.executable, ROOT / "tools/inline.py", ROOT / f"{name}.py", "--output", "one.py"], folder)
    assert done.returncode == 0 and [path.name for path in folder.iterdir()] == ["one.py"], done.stderr
    more = {"rejected": "no answer", "answer_0": "right", "answer_1": "wrong", "verdict": "1"}
    rows = [row | more | {"chosen": row["answer"]} for row in vqa_rows[:8]]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {"model": TINY, "dataset": data, "total_steps": 1, "train_batch_size": 8, "output_dir": "runs"}
    flags |= {"rollout_batch_size": 8} if name in ("rloo", "ppo_vl") else {}
    done = call([sys.executable, "one.py", *to_argv(flags | {"run_name": "run"})], folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "runs/run/metrics.jsonl").stat().st_size > 0
