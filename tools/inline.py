"""Make one file that can be copied: a script together with the modules of common/ and examples/ that it imports.

    python tools/inline.py rloo.py --output ../elsewhere/rloo.py      # without --output, to stdout
    patch -o grpo.py rloo.py forks/grpo.diff && python tools/inline.py grpo.py --output ../elsewhere/grpo.py

The result needs no other file. The tiny model, which the scripts use by default, is not included: pass --model, or
copy assets/tiny_vl next to the file.
"""

import ast
import functools
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    script: tyro.conf.Positional[str]  # ppo_vl.py, rloo.py, grm_sft.py, reward_bt.py or a fork of one.
    output: str | None = None  # Output file. Default: stdout.
    metadata: bool = (
        False  # Start with requirements.txt as inline metadata (PEP 723) for uv run and pipx run.
    )


def stop(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@functools.cache
def split(path: Path) -> tuple[str, list[ast.stmt], str]:
    """The docstring with its quotes, the imports, and the code after them."""
    source = path.read_text()
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    after = source.splitlines()[imports[-1].end_lineno :]
    return ast.get_source_segment(source, tree.body[0]), imports, "\n".join(after).strip("\n")


def merge_imports(nodes: list[ast.stmt]) -> str:
    """Import each name once, sorted."""
    names = defaultdict(set)
    for node in nodes:
        names[getattr(node, "module", None)] |= {ast.unparse(alias) for alias in node.names}
    plain = [f"import {name}" for name in sorted(names.pop(None, ()))]
    return "\n".join(plain + [f"from {x} import {', '.join(sorted(names[x]))}" for x in sorted(names)])


def defined(code: str) -> list[str]:
    """Names of the functions, classes and constants of a file, with repetitions."""
    nodes = ast.parse(code).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [node.targets for node in nodes if isinstance(node, ast.Assign)]
    return names + [x.id for group in targets for t in group for x in ast.walk(t) if isinstance(x, ast.Name)]


def of_repository(imports: list[ast.stmt]) -> list[ast.ImportFrom]:
    nodes = [node for node in imports if isinstance(node, ast.ImportFrom)]
    return [node for node in nodes if node.module.split(".")[0] in ("common", "examples")]


def modules_of(imports: list[ast.stmt]) -> list[str]:
    """The required modules, such as common/kl.py, each after the modules that it imports."""
    needed = []
    for node in of_repository(imports):
        # common.kl of `from common.kl import x`, common.packing of `from common import packing`
        names = [node.module] if "." in node.module else [f"{node.module}.{x.name}" for x in node.names]
        for name in names:
            path = name.replace(".", "/") + ".py"
            _, module_imports, _ = split(ROOT / path)
            needed += [*modules_of(module_imports), path]
    return list(dict.fromkeys(needed))


def inline(script: Path, metadata: bool = False) -> str:
    """The script's source code, including the modules that it requires."""
    doc, imports, body = split(script)
    nodes = imports
    parts = []
    for path in ["common/__init__.py", *modules_of(imports)]:
        module_doc, module_imports, code = split(ROOT / path)
        nodes = nodes + module_imports
        comment = "\n".join(f"# {line}".rstrip() for line in module_doc.strip('"\n').splitlines())
        parts.append(f"# ---- {path}, inlined ----\n\n{comment}\n\n\n{code}")
    inlined = of_repository(nodes)
    external = [node for node in nodes if node not in inlined]
    # common/__init__.py runs before the other imports, because it makes torchvision importable.
    _, first_imports, _ = split(ROOT / "common" / "__init__.py")
    names = {ast.unparse(node) for node in first_imports}
    first = f"{merge_imports(first_imports)}\n\n\n{parts.pop(0)}"
    external = [node for node in external if ast.unparse(node) not in names]
    modules = {alias.name for node in inlined if "." not in node.module for alias in node.names}
    here = "\n".join(
        f"{name} = sys.modules[__name__]  # the module is part of this file" for name in sorted(modules)
    )
    code = "\n\n\n".join([here, *parts, f"# ---- {script.name} ----\n\n\n{body}\n"])
    duplicates = [name for name, count in Counter(defined(first + code)).items() if count > 1]
    if duplicates:
        stop(f"{script} and its modules both define {', '.join(duplicates)}: rename one of them")
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    dependencies = "".join(f'#     "{line}",\n' for line in lines if line)
    block = f'# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n{dependencies}# ]\n# ///\n'
    start = f"{block if metadata else ''}{doc}\n\n{first}"
    return f"{start}\n\n\n{merge_imports(external)}\n\n\n{code}"


def main(args: Args) -> None:
    script = Path(args.script)
    if not script.is_file():
        stop(f"{script}: no such file")
    result = inline(script, args.metadata)
    if args.output is None:
        sys.stdout.write(result)
        return
    output = Path(args.output)
    if output.resolve() == script.resolve() or not output.absolute().parent.is_dir():
        stop(f"--output {output} must be another file, in a directory that exists")
    output.write_text(result)
    print(f"{output}: {result.count(chr(10))} lines")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
