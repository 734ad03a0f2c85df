"""The workaround for torchvision, pinned versions, and the installation commands of README.md."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()

# Like the real package with a CPU-only torch: the import fails unless the schema of nms exists.
FAKE = """
import torch
try:
    torch.ops.torchvision.nms
except AttributeError:
    raise RuntimeError("operator torchvision::nms does not exist")
from . import half
"""
LOADS = "import torch\nlibrary = torch.library.Library('torchvision', 'DEF'); library.define('nms(Tensor dets) -> Tensor')"
NO_CUDA = "torch.version.cuda = torch.version.hip = None\n"
CUDA = "torch.version.cuda = '1.0'\n"
SCHEMAS = "import common; assert (common._TORCHVISION_SCHEMAS is None) ==" + " "
CASES = [
    (FAKE, "import torchvision", "torchvision::nms does not exist"),  # without the workaround
    (FAKE, NO_CUDA + SCHEMAS + "False; import torchvision; assert torchvision.half", ""),
    (LOADS, NO_CUDA + SCHEMAS + "True; import torchvision", ""),
    (FAKE, CUDA + SCHEMAS + "True; assert 'torchvision' not in sys.modules", ""),
    ("raise RuntimeError('another error')", NO_CUDA + "import common", "another error"),
]


@pytest.mark.slow
@pytest.mark.parametrize("package, code, error", CASES)
def test_common_repairs_torchvision_with_a_cpu_torch_only(tmp_path, package, code, error):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(package)
    (tmp_path / "torchvision" / "half.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\nimport torch\n" + code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == bool(error) and error in result.stderr, result.stderr


def requirement_lines(name: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-gpu.txt", "requirements-dev.txt"])
def test_pins_are_exact(name):
    lines = requirement_lines(name)
    assert lines, f"{name} is empty"
    for line in lines:
        if line.startswith("-r "):
            assert name != "requirements.txt" and line == "-r requirements.txt"
        else:
            assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*", line), f"{name}: {line}"
    names = [line.split("==")[0].lower() for line in lines]
    assert len(names) == len(set(names))


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
