"""The command line: --help is quick and complete, imports are light, defaults pass, a copied script runs."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
from conftest import ROOT, SCRIPTS, SHORT, to_argv

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

each_script = pytest.mark.parametrize("script", SCRIPTS)


def python(*words, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    env = {**os.environ, "COLUMNS": "90", "NO_COLOR": "1", **env}
    return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)


def shown(default) -> str:
    """As a user would type it."""
    values = default if isinstance(default, tuple) else [default]
    return shlex.join(str(getattr(value, "value", value)) for value in values)


def test_blocker_blocks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    result = python("-c", "import transformers", PYTHONPATH=str(tmp_path))
    assert "No module named 'transformers'" in result.stderr


def assert_shown(field, help_text: str) -> None:
    assert field.default is not MISSING, "every flag has a default"
    flag = re.escape("--" + field.name.replace("_", "-"))
    entry = re.search(rf"^│ {flag}[ ,].*?(?=^│ --|^╰)", help_text, re.DOTALL | re.MULTILINE)
    assert entry, f"{flag} is not in --help"
    text = " ".join(re.sub("[│\n]", " ", entry.group()).split())
    meaning, _, default = text.rpartition("(default: ")
    assert default == f"{shown(field.default)})", text
    words = re.sub(r"(--[\w-]+|\{[^}]*\}|[|,]|\b(STR|INT|FLOAT)\b)", "", meaning.split(" ", 1)[1])
    assert len(words.split()) >= 2, f"{flag} has no docstring"


@each_script
def test_help_is_quick_and_shows_every_flag_with_meaning_and_default(script, tmp_path):
    """With every optional or heavy package blocked from import."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    started = os.times().children_user  # seconds of work: other programs may share the cores
    result = python(f"{script}.py", "--help", PYTHONPATH=str(tmp_path))
    seconds = os.times().children_user - started
    assert result.returncode == 0, result.stderr
    assert seconds < 6, f"--help took {seconds:.1f} s"
    for field in fields(importlib.import_module(script).Args):
        assert_shown(field, result.stdout)


@each_script
@pytest.mark.slow
def test_import_is_light(script):
    code = f"import sys, {script}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = python("-c", code).stdout.split()
    assert "torch" in loaded
    assert not BLOCKED & set(loaded)


@each_script
def test_local_rank_of_the_deepspeed_launcher_is_accepted(script):
    script = importlib.import_module(script)
    assert script.parse_args(["--local_rank=1", "--seed", "3"]) == script.Args(seed=3)


def test_booleans_can_be_turned_off():
    assert ppo_vl.parse_args(["--no-group-std"]).group_std is False


def test_lists_take_several_words():
    args = ppo_vl.parse_args("--rewards accuracy a.py:f --reward-weights 1 0.5".split())
    assert (args.rewards, args.reward_weights) == (("accuracy", "a.py:f"), (1.0, 0.5))


@each_script
def test_defaults_pass_the_checks(script):
    script = importlib.import_module(script)
    script.check_args(script.Args(), world_size=1)
    script.check_args(script.Args(), world_size=8)


@pytest.mark.slow
def test_a_copied_script_runs_from_another_folder(tmp_path, tiny, vqa):
    shutil.copy(ROOT / "ppo_vl.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "elsewhere").mkdir()
    flags = to_argv({**SHORT, "model": tiny, "dataset": vqa, "total_steps": 1, "num_ppo_epochs": 1})
    result = python(tmp_path / "ppo_vl.py", *flags, cwd=tmp_path / "elsewhere", PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "elsewhere/runs/run/checkpoint-1/config.json").is_file()
