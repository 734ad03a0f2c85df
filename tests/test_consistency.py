"""Code, --help and docs say the same: metric keys, flags, commands, section banners."""

import ast
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

import ppo_vl

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KEY = re.compile(r"(?:objective|reward|policy|loss|val|rollout|train|time|eval)/[a-z_]+")
BANNERS = """args data rewards model pure_math rollout DeepSpeed evaluate save main""".split()


def strings_of(script: Path) -> list[str]:
    """String constants of a script without its docstrings; the constant parts of f-strings count."""
    tree = ast.parse(script.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [n.value for n in constants if id(n) not in docstrings]


def test_every_metric_is_documented_and_every_documented_metric_exists():
    in_code = {s for s in strings_of(ROOT / "ppo_vl.py") if KEY.fullmatch(s)}
    in_docs = set(re.findall(rf"`({KEY.pattern})`", (ROOT / "docs" / "ppo_vl.md").read_text()))
    computed = ("eval/greedy_", "eval/sampled_")  # built from a mode and a component's name
    assert {k for k in in_code - in_docs if not k.startswith(computed)} == set()
    assert {k for k in in_docs - in_code if not k.startswith(computed)} == set()


def commands(page: Path) -> list[str]:
    """Arguments of every ppo_vl.py command in a fenced block."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text().replace("\\\n", " "), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        line.split("ppo_vl.py", 1)[1].split("#")[0].split("&&")[0]
        for line in lines
        if re.match(r"(?:.*&& )?(python|torchrun|deepspeed)\b.* ppo_vl\.py|deepspeed ppo_vl\.py", line)
    ]


def test_commands_are_found():
    assert sum(len(commands(page)) for page in PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_parses_and_passes_the_flag_checks(page):
    for command in (c for c in commands(page) if "--help" not in c):
        args = ppo_vl.parse_args(shlex.split(command.strip(" `")))
        ppo_vl.check_args(args, world_size=1)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_flag_named_in_the_docs_exists(page):
    known = {"--" + name.replace("_", "-") for name in asdict(ppo_vl.Args())} | {"--help"}
    for tool in (ROOT / "tools").glob("*.py"):
        known |= {"--" + name.replace("_", "-") for name in re.findall(r"^    ([a-z_]+):", tool.read_text(), re.M)}
    text = re.sub(r"^.*(?:pip|pytest|torchrun|deepspeed|tools/).*$", "", page.read_text(), flags=re.M)  # other programs
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named - known == set()


def test_sections_stand_in_the_house_order():
    source = (ROOT / "ppo_vl.py").read_text()
    found = re.findall(r"^# =+\n# ([^\n]+)\n# =+$", source, re.M)
    assert [f.split(",")[0].split(":")[0].replace(" ", "_") for f in found] == BANNERS
    phases = [int(n) for n in re.findall(r"# --- (\d+)\. ", source)]
    assert phases == list(range(1, 12))
