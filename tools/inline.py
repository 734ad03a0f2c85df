"""One file to copy away: a script with what it uses of common/ in it.

    python tools/inline.py rloo.py --output ../elsewhere/rloo.py      # without --output it is printed

The result needs no other file. The tiny model that the scripts start from by default is not part of it: give
--model, or put assets/tiny_vl beside the file.
"""

import ast
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    script: tyro.conf.Positional[str]  # ppo_vl.py, rloo.py, grm_sft.py or reward_bt.py
    output: str | None = None  # file to write; None: the result is printed
    metadata: bool = (
        False  # begin with requirements.txt as inline metadata (PEP 723), for uv run and pipx run
    )


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def split(path: Path) -> tuple[str, list[ast.stmt], str]:
    """-> docstring, the imports, and what comes after them."""
    source = path.read_text()
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    after = source.splitlines()[imports[-1].end_lineno :]
    return ast.get_docstring(tree, clean=False), imports, "\n".join(after).strip("\n")


def merge_imports(nodes: list[ast.stmt]) -> str:
    """Every name once, sorted."""
    names = defaultdict(set)
    for node in nodes:
        names[getattr(node, "module", None)] |= {ast.unparse(alias) for alias in node.names}
    plain = [f"import {name}" for name in sorted(names.pop(None, ()))]
    return "\n".join(plain + [f"from {x} import {', '.join(sorted(names[x]))}" for x in sorted(names)])


def defined(code: str) -> list[str]:
    """Names of a file's functions, classes and constants, one entry per definition."""
    nodes = ast.parse(code).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [node.targets for node in nodes if isinstance(node, ast.Assign)]
    return names + [x.id for own in targets for t in own for x in ast.walk(t) if isinstance(x, ast.Name)]


def of_common(imports: list[ast.stmt]) -> list[ast.ImportFrom]:
    nodes = [node for node in imports if isinstance(node, ast.ImportFrom)]
    return [node for node in nodes if node.module.split(".")[0] == "common"]


def modules_of(imports: list[ast.stmt]) -> list[str]:
    """The modules of common/ that are needed, each after those that it imports itself."""
    needed = []
    for node in of_common(imports):
        # common.kl of `from common.kl import x`, common.packing of `from common import packing`
        module = node.module.partition(".")[2]
        for name in [module] if module else [alias.name for alias in node.names]:
            _, its_imports, _ = split(ROOT / "common" / f"{name}.py")
            needed += [*modules_of(its_imports), name]
    return list(dict.fromkeys(needed))


def inline(script: Path, metadata: bool = False) -> str:
    """The script's source with the modules of common/ that it needs in it."""
    doc, imports, body = split(script)
    whole = [alias.name for node in of_common(imports) if node.module == "common" for alias in node.names]
    nodes, parts = imports, []
    for name in ["__init__", *modules_of(imports)]:  # importing any module of a package runs __init__ first
        note, its_imports, code = split(ROOT / "common" / f"{name}.py")
        nodes = nodes + its_imports
        comment = "\n".join(f"# {line}".rstrip() for line in note.strip().splitlines())
        parts.append(f"# ---- common/{name}.py, inlined ----\n\n{comment}\n\n\n{code}")
    own = of_common(nodes)
    kept = [node for node in nodes if node not in own]
    here = "".join(f"{name} = sys.modules[__name__]  # what was a module is in this file\n" for name in whole)
    code = "\n\n\n".join([*parts, here + f"\n\n# ---- {script.name} ----\n\n\n{body}\n"])
    if twice := [name for name, count in Counter(defined(code)).items() if count > 1]:
        fail(f"{script} and common/ both define {', '.join(twice)}: rename one of them")
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    needs = "".join(f'#     "{line}",\n' for line in lines if line)
    block = f'# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n{needs}# ]\n# ///\n'
    return f'{block if metadata else ""}"""{doc}"""\n\n{merge_imports(kept)}\n\n\n{code}'


def main(args: Args) -> None:
    script = Path(args.script)
    if not script.is_file():
        fail(f"{script}: there is no such file")
    result = inline(script, args.metadata)
    if args.output is None:
        sys.stdout.write(result)
        return
    output = Path(args.output)
    if output.resolve() == script.resolve() or not output.absolute().parent.is_dir():
        fail(f"--output {output}: give another file, in a folder that exists")
    output.write_text(result)
    print(f"{output}: {result.count(chr(10))} lines")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
