"""tools/inline.py: its output defines everything once and runs without the repository."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, TINY, to_argv, write_jsonl
from test_forks import patch

sys.path.append(str(ROOT / "tools"))
import inline as inline_tool  # noqa: E402


def call(words: list[str], cwd) -> subprocess.CompletedProcess:
    """Run a command that can't import from the repository."""
    env = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)


def path_of(name: str, folder: Path) -> Path:
    """A script, or one with a diff."""
    return ROOT / f"{name}.py" if name in SCRIPTS else patch(folder, [name])[0]


@pytest.mark.parametrize("name", [*SCRIPTS, "ppo_ptx"])
def test_inlined_file_has_each_block_once_unchanged(name, tmp_path):
    path = path_of(name, tmp_path)
    script = path.read_text()
    source = inline_tool.inline(path)
    tree = ast.parse(source)
    assert ast.get_docstring(tree) == ast.get_docstring(ast.parse(script))
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) == len(set(imports)) and not re.search(
        r"^ *(from|import) (common|examples)", source, re.M
    )
    used = re.findall(r"^from (common|examples)(?:\.| import )(\w+)", script, re.M)
    used += [("common", "__init__"), ("common", "attention")]
    for text in (script, *((ROOT / folder / f"{module}.py").read_text() for folder, module in used)):
        lines = text.splitlines()
        for node in ast.parse(text).body:  # including comments and docstrings
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                block = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                assert source.count(block) == 1, node.name
    (tmp_path / "one.py").write_text(source)
    result = call([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "one.py"], tmp_path)
    assert result.returncode == 0, result.stdout


def test_metadata_lists_the_requirements():
    """PEP 723: TOML in comments, between two lines with slashes."""
    start, block, _ = inline_tool.inline(ROOT / "rloo.py", metadata=True).split("# ///", 2)
    data = tomllib.loads(block.removeprefix(" script\n").replace("# ", ""))
    required = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert start == "" and "# ///" not in inline_tool.inline(ROOT / "rloo.py")
    assert data == {"requires-python": ">=3.11", "dependencies": [line for line in required if line]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_vl", "grm_sft"])
def test_inlined_file_runs_without_the_repository(name, tmp_path, vqa_rows):
    cwd = tmp_path / "alone"
    cwd.mkdir()
    script = path_of(name, tmp_path)
    result = call([sys.executable, ROOT / "tools/inline.py", script, "--output", "one.py"], cwd)
    assert result.returncode == 0 and [path.name for path in cwd.iterdir()] == ["one.py"], result.stderr
    columns = {"rejected": "no answer", "answer_1": "right", "answer_2": "wrong", "verdict": "1"}
    rows = [row | columns | {"chosen": row["answer"]} for row in vqa_rows[:8]]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {"model": TINY, "dataset": data, "total_steps": 1, "train_batch_size": 8, "output_dir": "runs"}
    flags |= {"prompts_per_rollout": 1} if name == "ppo_vl" else {}
    result = call([sys.executable, "one.py", *to_argv(flags | {"run_name": "run"})], cwd)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (cwd / "runs/run/metrics.jsonl").stat().st_size > 0
