"""Scripts say the same: shared blocks, flags, section banners. What docs say of them: test_docs.py."""

import ast
import importlib
import re
from functools import cache
from itertools import combinations

import pytest
from conftest import ROOT, SCRIPTS

BANNERS = "args data rewards model pure_math rollout samplers DeepSpeed update evaluate save main".split()
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
