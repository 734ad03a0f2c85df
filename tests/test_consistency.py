"""What two scripts share is textually identical and in the same order, so that a diff shows only the algorithm."""

import ast
import re
from functools import cache
from itertools import combinations

import pytest
from conftest import ROOT, SCRIPTS

BANNERS = ["args", "the algorithm: tensors in, tensors and metrics out", "the data of a step", "main"]
BANNERS += "setup rollout samplers rewards data forward evaluation model DeepSpeed files".split()
# Functions, classes and flags that differ between scripts although they have the same name.
OWN = {"PRINTED_METRICS", *"Args Rollout Run main setup check_args fill_defaults".split()}
OWN |= {"iter_packs", "evaluate", "save_checkpoint"}
OWN_FLAGS = """
    seed model eval_dataset_split rewards freeze max_length max_response_length lora_rank max_grad_norm mask_truncated num_epochs
    total_steps train_batch_size learning_rate save_steps
""".split()

each_script = pytest.mark.parametrize("script", SCRIPTS)


@cache
def source_of(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


@cache
def blocks_of(script: str) -> dict[str, str]:
    """Source text of every top-level function, class and constant by name, with decorators."""
    lines, blocks = source_of(script).splitlines(), {}
    for node in ast.parse(source_of(script)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            name = getattr(node, "name", None) or ast.unparse(node.targets[0])
            blocks[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return blocks


@cache
def flags_of(script: str) -> dict[str, tuple[str, str]]:
    """Type and help text of every flag. The help is a comment on its line or above it."""
    lines, flags = source_of(script).splitlines(), {}
    (args,) = [n for n in ast.parse(source_of(script)).body if getattr(n, "name", None) == "Args"]
    for node in args.body:
        above = []
        k = node.lineno - 2
        while re.match(r"    # (?!---)", lines[k]):
            above.insert(0, lines[k].strip(" #"))
            k -= 1
        trailing = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
        flags[node.target.id] = ast.unparse(node.annotation), " ".join(filter(None, [*above, *trailing]))
    return flags


@pytest.mark.parametrize("parts_of, own", [(blocks_of, OWN), (flags_of, OWN_FLAGS)])
@pytest.mark.parametrize("one, other", list(combinations(SCRIPTS, 2)))
def test_functions_and_flags_of_the_same_name_are_identical(one, other, parts_of, own):
    first, second = parts_of(one), parts_of(other)
    shared = first.keys() & second.keys()
    assert len(shared) >= 15
    assert sorted(name for name in shared.difference(own) if first[name] != second[name]) == []


@each_script
def test_sections_and_phases_are_in_order(script):
    banners = re.findall(r"^# ---- (.+) ----$", source_of(script), re.M)
    assert banners == [banner for banner in BANNERS if banner in banners]
    assert {*banners} >= {*BANNERS} - {"rollout", "samplers", "rewards"}
    phases = [int(n) for n in re.findall(r"^ +# --- (\d+)\. ", source_of(script), re.M)]
    assert len(phases) >= 6 and phases == [*range(1, len(phases) + 1)]


@each_script
def test_no_script_imports_another_and_imports_are_light(script):
    """Libraries that not every run needs are imported inside functions."""
    imports = re.findall(r"^( *)(?:from|import) (\w+)", source_of(script), re.M)
    assert not {name for _, name in imports} & {*SCRIPTS, "tools", "examples", "tests"}
    at_the_top = {name for indent, name in imports if not indent}
    assert "torch" in at_the_top
    assert not at_the_top & {"vllm", "wandb", "deepspeed", "peft", "datasets", "easy_vqa"}
