"""The command line: --help is quick and complete, imports are light, no flag is dead, a copied script runs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import MISSING, fields

import pytest
from conftest import ROOT, SHORT, to_argv

import ppo_vl

BLOCKED = {"vllm", "wandb", "tensorboard", "deepspeed", "transformers", "datasets", "matplotlib"}
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Blocker())
"""


def python(*words, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    env = {**os.environ, "COLUMNS": "1000", "NO_COLOR": "1", **env}
    return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)


def shown(default) -> str:
    return str(getattr(default, "value", default))


@pytest.fixture(scope="module")
def help_text(tmp_path_factory) -> str:
    """Output of --help with every optional or heavy package blocked from import."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    started = time.time()
    result = python("ppo_vl.py", "--help", PYTHONPATH=str(folder))
    seconds = time.time() - started
    assert result.returncode == 0, result.stderr
    assert seconds < 6, f"--help took {seconds:.1f} s"
    return result.stdout


def test_blocker_blocks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    result = python("-c", "import transformers", PYTHONPATH=str(tmp_path))
    assert "No module named 'transformers'" in result.stderr


@pytest.mark.parametrize("field", fields(ppo_vl.Args), ids=lambda field: field.name)
def test_help_shows_every_flag_with_meaning_and_default(field, help_text):
    assert field.default is not MISSING, "every flag has a default"
    flag = re.escape("--" + field.name.replace("_", "-"))
    entry = re.search(rf"^│ {flag}[ ,].*?(?=^│ --|^╰)", help_text, re.DOTALL | re.MULTILINE)
    assert entry, f"{flag} is not in --help"
    text = " ".join(re.sub("[│\n]", " ", entry.group()).split())
    meaning, _, default = text.rpartition("(default: ")
    assert default == f"{shown(field.default)})", text
    words = re.sub(r"(--[\w-]+|\{[^}]*\}|[|,]|\b(STR|INT|FLOAT)\b)", "", meaning.split(" ", 1)[1])
    assert len(words.split()) >= 2, f"{flag} has no docstring"


def test_import_is_light():
    code = "import sys, ppo_vl; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = python("-c", code).stdout.split()
    assert "torch" in loaded
    assert not BLOCKED & set(loaded)


def flags_read(*skipped: str) -> set[str]:
    """x of every `args.x` in the source, but for some top-level definitions."""
    tree = ast.parse((ROOT / "ppo_vl.py").read_text())
    nodes = [node for top in tree.body if getattr(top, "name", None) not in skipped for node in ast.walk(top)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in attributes if node.value.id == "args"}


def test_every_flag_is_read_outside_the_checks():
    by_name = {f"{kind}_column" for kind in ppo_vl.COLUMNS}  # in find_columns
    assert {field.name for field in fields(ppo_vl.Args)} - flags_read("check_args", "Args") - by_name == set()


def test_every_read_of_args_is_a_flag():
    assert flags_read() - {field.name for field in fields(ppo_vl.Args)} == set()


def test_local_rank_of_the_deepspeed_launcher_is_accepted():
    assert ppo_vl.parse_args(["--local_rank=1", "--seed", "3"]) == ppo_vl.Args(seed=3)


def test_booleans_can_be_turned_off():
    assert ppo_vl.parse_args(["--no-whiten-advantages"]).whiten_advantages is False


def test_defaults_pass_the_checks():
    ppo_vl.check_args(ppo_vl.Args(), world_size=1)
    ppo_vl.check_args(ppo_vl.Args(), world_size=8)


def test_a_copied_script_runs_from_another_folder(tmp_path, tiny, vqa):
    shutil.copy(ROOT / "ppo_vl.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "elsewhere").mkdir()
    flags = to_argv({**SHORT, "model": tiny, "dataset": vqa, "total_steps": 1, "num_ppo_epochs": 1})
    result = python(tmp_path / "ppo_vl.py", *flags, cwd=tmp_path / "elsewhere", PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "elsewhere/runs/run/checkpoint-1/config.json").is_file()
