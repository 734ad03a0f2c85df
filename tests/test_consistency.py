"""Scripts, --help and docs say the same: shared blocks, flags, metric keys, commands, section banners."""

import ast
import importlib
import importlib.util
import re
import shlex
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
KEY = re.compile(r"(?:objective|reward|policy|loss|val|rollout|train|time|eval|rm)/[a-z_]+")
BANNERS = "args data rewards model pure_math rollout DeepSpeed evaluate save main".split()
OWN = {"Args", "check_args", "main", "PANELS"}  # blocks that every script has to itself
OWN_WORDS = """
    model learning_rate max_grad_norm zero_stage micro_batch_tokens max_length batch_size kl_coef kl_loss clip_coef
""".split()  # flags whose meaning is each script's own

each_script = pytest.mark.parametrize("script", SCRIPTS)
each_pair = pytest.mark.parametrize("one, other", list(combinations(SCRIPTS, 2)))


@cache
def tree_of(script: str) -> ast.Module:
    return ast.parse((ROOT / f"{script}.py").read_text())


@cache
def blocks_of(script: str) -> dict[str, str]:
    """Name of every top-level function, class and constant -> its source text, decorators included."""
    lines, blocks = (ROOT / f"{script}.py").read_text().splitlines(), {}
    for node in tree_of(script).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            blocks[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                blocks[ast.unparse(target)] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return blocks


@cache
def flags_of(script: str) -> dict[str, tuple[str, str]]:
    """Field of Args -> its type and its docstring."""
    (args,) = [node for node in tree_of(script).body if getattr(node, "name", None) == "Args"]
    pairs = zip(args.body, args.body[1:])
    return {a.target.id: (ast.unparse(a.annotation), b.value.value) for a, b in pairs if isinstance(a, ast.AnnAssign)}


# --- shared blocks ---------------------------------------------------------------------------------------------------


@each_pair
def test_blocks_with_the_same_name_have_the_same_text(one, other):
    ours, theirs = blocks_of(one), blocks_of(other)
    shared = (ours.keys() & theirs.keys()) - OWN
    assert len(shared) >= 40
    assert sorted(name for name in shared if ours[name] != theirs[name]) == []


@each_pair
def test_flags_with_the_same_name_have_the_same_type_and_meaning(one, other):
    ours, theirs = flags_of(one), flags_of(other)
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 25
    assert sorted(name for name in shared if ours[name][0] != theirs[name][0]) == []
    assert sorted(name for name in shared.difference(OWN_WORDS) if ours[name][1] != theirs[name][1]) == []


# --- flags -----------------------------------------------------------------------------------------------------------


def flags_read(script: str, skipped: tuple[str, ...] = ()) -> set[str]:
    """x of every `args.x`, and of every getattr(args, f"..._x") with a fixed beginning or end, but for some blocks."""
    nodes = [n for top in tree_of(script).body if getattr(top, "name", None) not in skipped for n in ast.walk(top)]
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "args"}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(args, f"):
            pattern = "".join(v.value if isinstance(v, ast.Constant) else r"\w+" for v in node.args[1].values)
            read |= {name for name in flags_of(script) if re.fullmatch(pattern, name)}
    return read


@each_script
def test_every_flag_is_read_outside_the_checks(script):
    assert set(flags_of(script)) - flags_read(script, ("Args", "check_args")) == set()


@each_script
def test_every_read_of_args_is_a_flag(script):
    assert flags_read(script) - set(flags_of(script)) == set()


@each_script
def test_every_column_flag_belongs_to_a_kind_of_column(script):
    """They are read by name, as getattr(args, f"{kind}_column")."""
    module = importlib.import_module(script)
    kinds = {**getattr(module, "COLUMNS", {}), **getattr(module, "RANKING_COLUMNS", {})}
    assert {name for name in flags_of(script) if name.endswith("_column")} == {f"{kind}_column" for kind in kinds}


# --- metrics ---------------------------------------------------------------------------------------------------------


def strings_of(script: str) -> set[str]:
    """String constants of a script without its docstrings."""
    nodes = list(ast.walk(tree_of(script)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {n.value for n in constants if id(n) not in docstrings}


@each_script
def test_every_metric_is_documented_and_every_documented_metric_exists(script):
    page = ROOT / "docs" / f"{script}.md"
    if not page.is_file():
        pytest.skip(f"no page of {script} yet")
    in_code = {s for s in strings_of(script) if KEY.fullmatch(s)}
    in_docs = set(re.findall(rf"`({KEY.pattern})`", page.read_text()))
    computed = ("eval/greedy_", "eval/sampled_")  # built from a mode and a component's name
    assert {k for k in in_code - in_docs if not k.startswith(computed)} == set()
    assert {k for k in in_docs - in_code if not k.startswith(computed)} == set()
    assert len(in_code) >= 10


# --- docs ------------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[tuple[str, str]]:
    """(script, arguments) of every command in a fenced block, or in the docstring of an example."""
    text = page.read_text()
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S))
    call = rf"^ *(?:.*&& )?(?:[\w/.]*python|torchrun|deepspeed)\b(?: -\S+)* ({'|'.join(SCRIPTS)})\.py\b([^#\n&]*)"
    return re.findall(call, text.replace("\\\n", " "), re.M)


def test_commands_are_found():
    found = [script for page in PAGES for script, _ in commands(page)]
    assert len(found) >= 10 and found.count("ppo_vl") >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_parses_and_passes_the_flag_checks(page, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)  # some are for those who have vLLM
    for name, words in commands(page):
        if "--help" not in words:
            script = importlib.import_module(name)
            script.check_args(script.parse_args(shlex.split(words)), world_size=1)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_flag_named_in_the_docs_exists(page):
    """A page of a script names that script's flags, and others' where the line names the other script."""
    tools = {
        name for tool in (ROOT / "tools").glob("*.py") for name in re.findall(r"^    (\w+):", tool.read_text(), re.M)
    }
    unknown = []
    for line in page.read_text().splitlines():
        if re.search(
            r"pip|pytest|torchrun|deepspeed|tools/|vllm serve|of the server|api_server", line
        ):  # other programs
            continue
        scripts = [page.stem] if page.stem in SCRIPTS else SCRIPTS
        known = tools.union(
            {"help"}, *(flags_of(s) for s in {*scripts, *re.findall(r"\w+(?=\.py)", line)} & {*SCRIPTS})
        )
        named = re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]+)", line)
        unknown += [f"{flag}: {line}" for flag in named if flag.replace("-", "_") not in known]
    assert unknown == []


def test_every_test_named_in_the_docs_exists():
    named = {pair for page in PAGES for pair in re.findall(r"`(test_\w+\.py)::(test_\w+)`", page.read_text())}
    assert len(named) >= 40
    for file, name in sorted(named):
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


# --- order -----------------------------------------------------------------------------------------------------------


@each_script
def test_sections_and_phases_stand_in_the_house_order(script):
    source = (ROOT / f"{script}.py").read_text()
    titles = re.findall(r"^# =+\n# ([^\n]+)\n# =+$", source, re.M)
    found = [re.split("[,:]", title)[0].replace(" ", "_") for title in titles]
    assert found == [banner for banner in BANNERS if banner in found] and {*found} >= {"args", "data", "model", "main"}
    phases = [int(n) for n in re.findall(r"# --- (\d+)\. ", source)]
    assert phases == sorted({*phases}) and phases[0] == 1 and phases[-1] == 11
    if "rewards" in found and "rollout" in found and script != "grm_sft":
        assert found == BANNERS and phases == list(range(1, 12))
