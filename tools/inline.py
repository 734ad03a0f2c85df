"""One file to copy away: a script with what it uses of common/ in it.

    python tools/inline.py ppo_vl.py --output ../elsewhere/ppo_vl.py      # without --output it is printed

The result needs no other file. The tiny model that the scripts start from by default is not part of it: give --model, or put
assets/tiny_vl beside the file.
"""

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
BANNER = "# " + "=" * 117


@dataclass
class Args:
    script: tyro.conf.Positional[str]
    """ppo_vl.py, rloo.py, grm_sft.py or reward_bt.py"""
    output: str | None = None
    """file to write; None: the result is printed"""


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def split_imports(source: str) -> tuple[list[str], list[ast.stmt], list[str]]:
    """-> lines before the import block, the statements of that block, lines after it."""
    body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    first, last = imports[0].lineno, imports[-1].end_lineno
    between = [node for node in body if first <= node.lineno <= last and node not in imports]
    if between:
        fail(f"line {between[0].lineno} stands between imports; this tool expects them in one block")
    lines = source.splitlines()
    return lines[: first - 1], imports, lines[last:]


def module_of(node: ast.stmt) -> list[str]:
    """Modules that an import statement names."""
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]


def merge_imports(nodes: list[ast.stmt]) -> str:
    """Every import once, sorted: __future__, standard library, others."""
    plain, named = set(), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            plain |= {ast.unparse(ast.Import([alias])) for alias in node.names}
        else:
            named.setdefault(node.module, set()).update(ast.unparse(alias) for alias in node.names)
    lines = sorted(plain)
    for module, names in sorted(named.items()):
        names = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))  # ruff's order
        line = f"from {module} import {', '.join(names)}"
        lines.append(line if len(line) <= WIDTH else f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)")

    def block(line: str) -> int:
        top = line.split()[1].split(".")[0]
        return 0 if top == "__future__" else 1 if top in sys.stdlib_module_names else 2

    return "\n\n".join(
        "\n".join(line for line in lines if block(line) == b) for b in range(3) if any(block(x) == b for x in lines)
    )


def module_body(path: Path) -> tuple[list[ast.stmt], str]:
    """-> imports of a module of common/, and its code under a banner, its docstring as a comment."""
    before, imports, after = split_imports(path.read_text())
    doc = "\n".join(
        f"# {line}".rstrip() for line in ast.get_docstring(ast.parse("\n".join(before)), clean=False).split("\n")
    )
    name = path.relative_to(ROOT)
    code = "\n".join(after).strip("\n")
    return imports, f"{BANNER}\n# {name}, inlined\n{BANNER}\n#\n{doc.rstrip('#').rstrip()}\n\n\n{code}\n"


def top_level_names(source: str) -> list[str]:
    """Names that the functions, classes and assignments of a file define, one entry per definition."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(alias.asname or alias.name).split(".")[0] for alias in node.names if "." not in alias.name]
    return names


def inline(script: Path) -> str:
    """The script's source with the modules of common/ that it imports in it."""
    before, imports, after = split_imports(script.read_text())
    used = {module for node in imports for module in module_of(node) if module.split(".")[0] == "common"}
    if not used:
        fail(f"{script} imports nothing of common/; copy it as it is")
    paths = [ROOT / "common" / "__init__.py"]  # importing any module of a package runs this first
    paths += [ROOT / (module.replace(".", "/") + ".py") for module in sorted(used - {"common"})]
    kept = [node for node in imports if module_of(node)[0].split(".")[0] != "common"]
    parts = []
    for path in paths:
        more, code = module_body(path)
        kept += more
        parts.append(code)
    result = "\n".join(before) + "\n" + merge_imports(kept) + "\n\n" + "\n\n".join(parts) + "\n\n"
    result += f"{BANNER}\n# {script.name}\n{BANNER}\n" + "\n".join(after).rstrip("\n") + "\n"
    twice = [name for name, count in Counter(top_level_names(result)).items() if count > 1]
    if twice:
        fail(f"{script} and common/ both define {', '.join(twice)}; rename one of them")
    return result


def main(args: Args) -> None:
    script = Path(args.script)
    if not script.is_file():
        fail(f"{script}: no such file")
    try:
        result = inline(script)
    except (SyntaxError, UnicodeDecodeError, IndexError) as error:
        fail(f"{script} is not one of the four scripts ({type(error).__name__})")
    if args.output is None:
        sys.stdout.write(result)
        return
    output = Path(args.output)
    if output.resolve() == script.resolve() or output.is_dir() or not output.absolute().parent.is_dir():
        fail(f"--output {output} can't be written: give another file in a folder that exists")
    output.write_text(result)
    print(f"{output}: {result.count(chr(10))} lines")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
