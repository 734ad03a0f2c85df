"""The workaround for torchvision, old and pinned versions, and the installation commands of README.md."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT

import common
from common import attention

import torchvision  # isort: skip  # noqa: F401  after common, which makes it importable

README = (ROOT / "README.md").read_text()


def test_operators_are_defined_for_pypi_torchvision_beside_a_cpu_torch(monkeypatch):
    monkeypatch.setattr(torch.library, "Library", lambda *args: Mock())
    cases = {("2.13.0+cpu", "0.28.0"): True, ("2.13.0+cpu", "0.28.0+cpu"): False, ("2.13.0", "0.28.0"): False}
    for versions, is_defined in cases.items():
        monkeypatch.setattr(common, "version", dict(zip(("torch", "torchvision"), versions)).get)
        assert (common._define_torchvision_operators() is not None) == is_defined


def test_installed_versions_equal_the_pinned_versions():
    pins = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)
    assert len(pins) > 5 and all(version(name).split("+")[0] == pinned for name, pinned in pins)


def marked_command(name: str) -> str:
    match = re.search(rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", README, flags=re.M | re.S)
    assert match, f"README has no block marked {name}"
    return match.group(1)


@pytest.mark.parametrize(("name", "last"), [("train", "python ppo_vl.py"), ("test", "pytest")])
def test_readme_commands_are_one_line_with_existing_files(name, last):
    command = marked_command(name)
    assert "\n" not in command
    steps = [step.strip() for step in command.split("&&")]
    assert steps[0].startswith("python3 -m venv ") and steps[-1] == last
    subprocess.run(["bash", "-n", "-c", command], check=True)
    for word in shlex.split(command):
        if word.endswith((".txt", ".py")):
            assert (ROOT / word).is_file(), word


def older(oldest: str) -> str:
    """2.8 -> 2.7.99, 5.16.1 -> 5.16.0.99"""
    *first, last = map(int, oldest.split("."))
    return ".".join(map(str, [*first, last - 1, 99]))


def pretend_installed(versions: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(common.platform, "python_version", lambda: versions.get("Python", "99"))
    monkeypatch.setattr(common, "version", lambda name: versions.get(name, "99"))


@pytest.mark.parametrize("name", common.OLDEST_VERSIONS)
def test_a_library_that_is_too_old_is_refused_in_one_sentence(name, monkeypatch, refused):
    oldest, reason = common.OLDEST_VERSIONS[name]
    pretend_installed({name: older(oldest)}, monkeypatch)
    with refused(f"error: {name} {older(oldest)} is too old, {oldest} or newer is required: {reason}"):
        common._check_versions()


def test_the_oldest_versions_and_builds_of_them_are_accepted(monkeypatch):
    oldest = {name: version for name, (version, _) in common.OLDEST_VERSIONS.items()}
    pretend_installed(oldest, monkeypatch)
    common._check_versions()
    pretend_installed(oldest | {"torch": f"{oldest['torch']}.0a0+nv25.5"}, monkeypatch)  # NVIDIA's containers
    common._check_versions()


def test_varlen_attention_needs_torch_2_12(monkeypatch):
    """torch 2.8 and 2.9 have no such module, the next versions another signature."""
    kernels = None, lambda query, key, value: None, lambda query, key, value, enable_gqa: None
    for kernel, is_used in zip(kernels, (False, False, True)):
        module = SimpleNamespace(varlen_attn=kernel) if kernel else None
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert (attention.varlen_kernel.__wrapped__() is not None) == is_used
