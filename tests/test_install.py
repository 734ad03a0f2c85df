"""The workaround for torchvision, pinned versions, and the installation commands of README.md."""

import re
import shlex
import subprocess
from importlib.metadata import version
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT

import common

import torchvision  # isort: skip  # noqa: F401  after common, which makes it importable

README = (ROOT / "README.md").read_text()


def test_operators_are_defined_for_pypi_torchvision_beside_a_cpu_torch(monkeypatch):
    monkeypatch.setattr(torch.library, "Library", lambda *args: Mock())
    cases = {("2.13.0+cpu", "0.28.0"): True, ("2.13.0+cpu", "0.28.0+cpu"): False, ("2.13.0", "0.28.0"): False}
    for versions, is_defined in cases.items():
        monkeypatch.setattr(common, "version", dict(zip(("torch", "torchvision"), versions)).get)
        assert (common._define_torchvision_operators() is not None) == is_defined


def requirement_lines(name: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line]


def test_installed_versions_equal_the_pinned_versions():
    for line in requirement_lines("requirements.txt"):
        name, pinned = line.split("==")
        assert version(name).split("+")[0] == pinned, name


def marked_command(name: str) -> str:
    match = re.search(rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", README, flags=re.M | re.S)
    assert match, f"README has no block marked {name}"
    return match.group(1)


@pytest.mark.parametrize(("name", "last"), [("train", "python ppo_vl.py"), ("test", "pytest")])
def test_readme_commands_are_one_line_with_existing_files(name, last):
    command = marked_command(name)
    assert "\n" not in command
    steps = [step.strip() for step in command.split("&&")]
    assert steps[0].startswith("python -m venv ") and steps[-1] == last
    subprocess.run(["bash", "-n", "-c", command], check=True)
    for word in shlex.split(command):
        if word.endswith((".txt", ".py")):
            assert (ROOT / word).is_file(), word
