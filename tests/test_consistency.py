"""The four scripts say the same in the same words, in the same order: a diff of two shows the algorithm alone."""

import ast
import re
from functools import cache
from itertools import combinations

import pytest
from conftest import ROOT, SCRIPTS

BANNERS = ["args", "the algorithm: tensors in, tensors and metrics out", "the data of a step", "main"]
BANNERS += ["setup", "rollout", "samplers", "rewards", "data", "forward", "other estimators and losses"]
BANNERS += ["evaluation", "model", "DeepSpeed", "files"]
# Blocks that have one name and differ, because the algorithm differs.
OWN = {"Args", "Rollout", "Run", "Data", "main", "setup", "check_args", "enable_packing"}
OWN |= {"load_data", "packs_of", "evaluate", "messages_of", "save_checkpoint"}
OWN_FLAGS = """
    seed model eval_dataset rewards freeze max_length generation_batch_size
    total_steps train_batch_size learning_rate clip_coef kl_coef eval_samples
""".split()

each_script = pytest.mark.parametrize("script", SCRIPTS)
each_pair = pytest.mark.parametrize("one, other", list(combinations(SCRIPTS, 2)))


@cache
def source_of(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


@cache
def blocks_of(script: str) -> dict[str, str]:
    """Name of every top-level function, class and constant -> its source text, decorators included."""
    lines, blocks = source_of(script).splitlines(), {}
    for node in ast.parse(source_of(script)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            blocks[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            blocks[ast.unparse(node.targets[0])] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return blocks


@cache
def flags_of(script: str) -> dict[str, tuple[str, str]]:
    """Flag -> its type and its comment, behind it or in lines above."""
    lines, flags = source_of(script).splitlines(), {}
    (args,) = [n for n in ast.parse(source_of(script)).body if getattr(n, "name", None) == "Args"]
    for node in args.body:
        above, k = [], node.lineno - 2
        while re.match(r"    # (?!---)", lines[k]):
            above, k = [lines[k].strip(" #"), *above], k - 1
        behind = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
        flags[node.target.id] = ast.unparse(node.annotation), " ".join(filter(None, [*above, *behind]))
    return flags


@each_pair
def test_blocks_with_one_name_have_one_text(one, other):
    ours, theirs = blocks_of(one), blocks_of(other)
    shared = (ours.keys() & theirs.keys()) - OWN
    assert len(shared) >= 15
    assert sorted(name for name in shared if ours[name] != theirs[name]) == []


@each_pair
def test_flags_with_one_name_have_one_type_and_meaning(one, other):
    ours, theirs = flags_of(one), flags_of(other)
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 15
    assert sorted(name for name in shared.difference(OWN_FLAGS) if ours[name] != theirs[name]) == []


@each_script
def test_sections_and_phases_stand_in_the_house_order(script):
    banners = re.findall(r"^# ---- (.+) ----$", source_of(script), re.M)
    assert banners == [banner for banner in BANNERS if banner in banners]
    assert {*banners} >= {*BANNERS} - {"rollout", "samplers", "rewards", "other estimators and losses"}
    phases = [int(n) for n in re.findall(r"^ +# --- (\d+)\. ", source_of(script), re.M)]
    assert phases == sorted({*phases}) and {1, 5, 7, 8, 9} <= {*phases}


@each_script
def test_no_script_imports_another_and_imports_are_light(script):
    """At the top: what is needed to read the command line, not what one run may need."""
    tree = ast.parse(source_of(script))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    every = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    def roots(nodes: list) -> set[str]:
        names = [n.module if isinstance(n, ast.ImportFrom) else a.name for n in nodes for a in n.names]
        return {name.split(".")[0] for name in names}

    assert not roots(every) & {*SCRIPTS, "tools", "examples", "tests"}
    assert not roots(top) & {"vllm", "wandb", "deepspeed", "peft", "tensorboard", "datasets", "easy_vqa"}
