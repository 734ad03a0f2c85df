"""The torchvision guard, the pins, and what README promises about installing."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

# Like the real package beside a CPU-only torch: its import dies unless the schema of nms exists.
FAKE_TORCHVISION = """
import torch
try:
    torch.ops.torchvision.nms
    torch.ops.torchvision.qnms
except AttributeError:
    raise RuntimeError("operator torchvision::nms does not exist")
from . import half
"""
LOADING_TORCHVISION = """
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def run_with_torchvision(folder: Path, source: str, code: str) -> subprocess.CompletedProcess:
    """Run code with a package `torchvision` of this source in front of any installed one."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "half.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\nimport torch\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


NO_CUDA = "torch.version.cuda = torch.version.hip = None\n"


@pytest.mark.slow
def test_without_the_guard_the_fake_fails(tmp_path):
    done = run_with_torchvision(tmp_path, FAKE_TORCHVISION, "import torchvision")
    assert done.returncode != 0 and "torchvision::nms does not exist" in done.stderr


@pytest.mark.slow
def test_guard_mends_a_torchvision_without_operators(tmp_path):
    code = NO_CUDA + "import common, torchvision\n"
    code += "assert torchvision.half\nassert common._TORCHVISION_SCHEMAS is not None"
    done = run_with_torchvision(tmp_path, FAKE_TORCHVISION, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_guard_leaves_a_loading_torchvision_alone(tmp_path):
    code = NO_CUDA + "import common\nassert common._TORCHVISION_SCHEMAS is None\nimport torchvision"
    done = run_with_torchvision(tmp_path, LOADING_TORCHVISION, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("field", ["cuda", "hip"])
@pytest.mark.slow
def test_guard_does_nothing_beside_an_accelerator_torch(tmp_path, field):
    code = NO_CUDA + f"torch.version.{field} = '1.0'\nimport common\n"
    code += "assert common._TORCHVISION_SCHEMAS is None\nassert 'torchvision' not in sys.modules\n"
    code += "assert not hasattr(torch.ops.torchvision, 'nms')"
    done = run_with_torchvision(tmp_path, FAKE_TORCHVISION, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_guard_hides_no_other_error(tmp_path):
    done = run_with_torchvision(tmp_path, "raise RuntimeError('another defect')", NO_CUDA + "import common")
    assert done.returncode != 0 and "another defect" in done.stderr


@pytest.mark.slow
def test_image_processors_import_after_common():
    code = "import common\nfrom transformers import AutoProcessor, Qwen2_5_VLProcessor"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


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


def test_installed_versions_are_the_pinned_ones():
    from importlib.metadata import version

    for line in requirement_lines("requirements.txt"):
        name, pinned = line.split("==")
        assert version(name).split("+")[0] == pinned, name


def marked_command(name: str) -> str:
    match = re.search(rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", README, flags=re.M | re.S)
    assert match, f"README has no block marked {name}"
    return match.group(1)


@pytest.mark.parametrize(("name", "last"), [("train", "python ppo_vl.py"), ("test", "pytest")])
def test_readme_commands_are_one_line_and_name_files_that_exist(name, last):
    command = marked_command(name)
    assert "\n" not in command
    steps = [step.strip() for step in command.split("&&")]
    assert steps[0].startswith("python -m venv ") and steps[-1] == last
    subprocess.run(["bash", "-n", "-c", command], check=True)
    for word in shlex.split(command):
        if word.endswith((".txt", ".py")):
            assert (ROOT / word).is_file(), word


def test_ci_runs_the_readme_test_command_itself(tmp_path):
    """Run .ci/run on a repository whose README has another command: that command runs, and its failure is CI's."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for command, code in [("echo ran-it-$((40 + 2)) && exit 7", 7), (None, 1)]:
        block = "" if command is None else f"<!-- command: test -->\n```bash\n{command}\n```\n"
        (tmp_path / "README.md").write_text(f"# title\n{block}\n<!-- command: x -->\n```bash\nexit 9\n```\n")
        done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("ran-it-42" in done.stdout) == (command is not None)


def test_every_script_of_the_readme_table_exists_or_is_marked():
    rows = re.findall(r"^\| `(\w+\.py)` \| .* \| (.*) \|$", README, flags=re.M)
    assert [name for name, _ in rows] == ["ppo_vl.py", "rloo.py", "grm_sft.py", "reward_bt.py"]
    for name, page in rows:
        assert (ROOT / name).exists() != (page == "not there yet"), name
