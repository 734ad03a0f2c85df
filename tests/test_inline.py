"""tools/inline.py: the file that it makes runs alone; the scripts' inline metadata says what requirements.txt says."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS, to_argv, write_jsonl

spec = importlib.util.spec_from_file_location("inline_tool", ROOT / "tools/inline.py")
inline_tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inline_tool)


def inlined(name: str) -> str:
    return inline_tool.inline(ROOT / f"{name}.py")


def call(words: list[str], folder, limit: int = 300) -> subprocess.CompletedProcess:
    """A command in a folder that can't see the repository."""
    env = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)


@pytest.mark.parametrize("name", SCRIPTS)
def test_inline_metadata_equals_requirements(name):
    """PEP 723: the block is read by the standard's own regular expression."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    [match] = re.finditer(pattern, (ROOT / f"{name}.py").read_text())
    assert match["type"] == "script" and match.start() == 0
    lines = match["content"].splitlines(keepends=True)
    data = tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
    required = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert data == {"requires-python": ">=3.11", "dependencies": [line for line in required if line]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_inlined_file_has_everything_once_and_keeps_the_text(name, tmp_path):
    source = inlined(name)
    tree = ast.parse(source)
    assert ast.get_docstring(tree) == ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()))
    modules = [
        m
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for m in inline_tool.module_of(node)
    ]
    assert not [module for module in modules if module.split(".")[0] == "common"]
    top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(top) == len(set(top))
    used = ["__init__", "packing"] + (["kl"] if name in ("ppo_vl", "rloo") else [])
    for module in used:
        text = (ROOT / f"common/{module}.py").read_text()
        for node in ast.parse(text).body:  # functions with their comments and docstrings, byte for byte
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert source.count(ast.get_source_segment(text, node)) == 1, node.name
    (tmp_path / "one.py").write_text(source)
    done = call([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "one.py"], tmp_path)
    assert done.returncode == 0, done.stdout


def test_import_merging():
    nodes = ast.parse(
        "import os\nfrom a import c\nimport os, torch\nfrom __future__ import annotations\nfrom a import b, c as d"
    )
    text = "from __future__ import annotations\n\nimport os\n\nimport torch\nfrom a import b, c, c as d"
    assert inline_tool.merge_imports(nodes.body) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no such file"),
        ("import os\n", "imports nothing of common/"),
        ("import common\nx = (\n", "not one of the four scripts (SyntaxError)"),
        ("import os\nx = 1\nimport common\n", "line 2 stands between imports"),
        ("import common\nfrom common.kl import kl_estimate\nKL_ESTIMATORS = 1\n", "both define KL_ESTIMATORS"),
    ],
)
def test_bad_input(source, message, tmp_path, capsys):
    script = tmp_path / "script.py"
    if source is not None:
        script.write_text(source)
    with pytest.raises(SystemExit) as stop:
        inline_tool.main(inline_tool.Args(str(script)))
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_it_never_overwrites_the_script(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import common\n")
    with pytest.raises(SystemExit):
        inline_tool.main(inline_tool.Args(str(script), str(script)))
    assert "give another file" in capsys.readouterr().err and script.read_text() == "import common\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_inlined_file_runs_alone(name, tmp_path, argv, tiny, vqa_rows):
    """--help, and a step on the tiny model, in a folder with nothing else."""
    folder = tmp_path / "alone"
    folder.mkdir()
    done = call([sys.executable, str(ROOT / "tools/inline.py"), str(ROOT / f"{name}.py"), "--output", "one.py"], folder)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["one.py"]
    if name in ("ppo_vl", "rloo"):
        flags = argv(name, total_steps=1, output_dir="runs")
    else:
        rows = [{**row, "chosen": row["answer"], "rejected": "no answer"} for row in vqa_rows[:16]]
        if name == "grm_sft":  # makes its pairs from the answers
            rows = vqa_rows[:16]
        source = write_jsonl(tmp_path / "rows.jsonl", rows)
        held_out = "eval_datasets" if name == "reward_bt" else "eval_dataset"
        flags = {"model": tiny, "dataset": source, held_out: source, "eval_samples": 4, "eval_steps": 0}
        flags = to_argv({**flags, "batch_size": 8, "max_steps": 1, "output_dir": "runs", "run_name": "run"})
    done = call([sys.executable, "one.py", "--help"], folder)
    assert done.returncode == 0 and "--learning-rate" in done.stdout
    done = call([sys.executable, "one.py", *flags], folder, 500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "runs/run/metrics.jsonl").stat().st_size > 0
