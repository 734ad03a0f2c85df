"""What README, docs, examples and docstrings say is true: commands parse, flags, metrics, links, files and tests exist."""

import ast
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

SOURCES = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]
SOURCES += [ROOT / f"{script}.py" for script in SCRIPTS]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = "python torchrun deepspeed pip pytest bash vllm curl".split()
START = rf"(?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)}) "
PREFIXES = "objective reward policy loss val rollout train time eval rm".split()
KEY = re.compile(rf"(?:{'|'.join(PREFIXES)})/[a-z_]+")  # of a metric

# Flags of programs that the tests do not import: where they are documented.
OTHER_FLAGS = {
    # docs.vllm.ai, "vllm serve": the server is started in an environment of its own
    "vllm serve": "port dtype max-model-len max-num-batched-tokens enforce-eager logprobs-mode enable-chunked-prefill "
    "tensor-parallel-size model served-model-name gpu-memory-utilization limit-mm-per-prompt weight-transfer-config".split(),
    # named without a command that would parse it: `deepspeed --help`, `pip install --help`
    "others": "hostfile extra-index-url no-deps".split(),
}

each_page = pytest.mark.parametrize("page", [*PAGES, *SOURCES], ids=lambda p: str(p.relative_to(ROOT)))
each_markdown = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
each_script = pytest.mark.parametrize("script", SCRIPTS)


# --- reading pages ---------------------------------------------------------------------------------------------------


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block; one without a language that begins with a command is bash."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [(name or ("bash" if re.match(START, text) else "text"), text) for name, text in found]


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks; of a Python file the docstring without its commands."""
    text = page.read_text()
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
        return re.sub(r"^    \S.*(?:\\\n.*)*", "", text, flags=re.M)
    return re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """Inline code."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def commands(page: Path) -> list[list[str]]:
    """Every command of a page as its words: bash blocks, indented lines of a docstring, inline code."""
    blocks = [text for language, text in fences(page) if language == "bash"]
    if page.suffix == ".py":
        doc = (ast.get_docstring(ast.parse(page.read_text())) or "").replace("\\\n", " ")
        blocks = [re.sub(r"\.\.\.(?= |$)", "", line) for line in re.findall(rf"^    {START}.*", doc, re.M)]
    whole = r"(?:\w+=\S+ )*(?:(?:python|torchrun|deepspeed) .*\.py\b|pip (?:un)?install |pytest |vllm serve ).*"
    blocks += [span for span in spans(page) if re.fullmatch(whole, span)]
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", "|", "&"):
                words.append(word)
            elif words:
                found.append(words)
                words = []
    return found


# --- commands --------------------------------------------------------------------------------------------------------


def fill(words: list[str]) -> list[str]:
    """Numbers for the N that stand in for them."""
    return ["1" if word == "N" else word for word in words]


def parse_script(path: Path, words: list[str], world_size: int = 1) -> None:
    """As `python path words` would: by parse_args and check_args, by the dataclass Args, or by nothing."""
    assert path.is_file(), f"{path} does not exist"
    if "--help" in words:
        return
    if path.parent == ROOT:
        module = importlib.import_module(path.stem)
        module.check_args(module.parse_args(words), world_size)
    elif (args := args_of(path)) is not None:
        import tyro

        tyro.cli(args, args=words)
    else:  # it has options of its own, or reads sys.argv
        options = [word for word in words if word.startswith("-")]
        expected = len(options) or len(set(re.findall(r"sys\.argv\[\d\]", path.read_text())))
        assert len(words) == expected + len(options), words
        assert all(f'"{option}"' in path.read_text() for option in options), words


@cache
def args_of(path: Path) -> type | None:
    """The dataclass Args of a tool or an example; None: it has none."""
    if "\nclass Args" not in path.read_text():
        return None
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Args


def run_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert words[1] in ("venv", "vllm.entrypoints.openai.api_server"), words
        if words[1].startswith("vllm"):
            check_known("vllm serve", words[2:])
        return
    if words[0] == "-c":
        compile(words[1], "docs", "exec")
        return
    parse_script(ROOT / words[0], words[1:])


def run_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    world_size = int(args.nnodes.split(":")[-1]) * int(args.nproc_per_node)
    parse_script(ROOT / args.training_script, args.training_script_args, world_size)


def run_deepspeed(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    args = parse_args(words)
    nodes, ranks = max(args.num_nodes, 2 if "--hostfile" in words else 1), max(args.num_gpus, 8)
    parse_script(ROOT / args.user_script, args.user_args, nodes * ranks)


def run_pip(words: list[str]) -> None:
    """By pip's own parser; the files of -r exist."""
    commands_of_pip = pytest.importorskip("pip._internal.commands")
    options, _ = commands_of_pip.create_command(words[0]).parser.parse_args(words[1:])
    for file in options.requirements:
        assert (ROOT / file).is_file(), file


def run_pytest(words: list[str]) -> None:
    files = [word for word in words if word.startswith("tests/")]
    assert all((ROOT / file.split("::")[0]).exists() for file in files), files
    flags = [word for word in words if word.startswith("-")]
    assert set(flags) <= {"-m", "-n", "-k", "-x", "-q"}, flags
    if "-m" in words:
        marked = re.findall(r"\w+", words[words.index("-m") + 1])
        markers = (ROOT / "pyproject.toml").read_text().split("markers = [")[1]
        assert [word for word in marked if word != "not" and f'"{word}:' not in markers] == []


def check_known(program: str, words: list[str]) -> None:
    flags = [re.sub("^--(no-)?", "", word) for word in words if word.startswith("--")]
    assert [flag for flag in flags if flag not in OTHER_FLAGS[program]] == []


def check_command(words: list[str]) -> None:
    """The first program's own parser, where there is one, takes the words; files that it names exist."""
    words = fill(words)
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    program, words = words[0].split("/")[-1], words[1:]
    if program in (".", "source"):
        assert re.fullmatch(r"\.venv\S*/bin/activate", words[0])
    elif program in ("cd", "mkdir", "export") or (program, words[:1]) == ("git", ["clone"]):
        pass  # nothing of ours is named
    elif program == "bash" or program.endswith(".sh"):
        path = ROOT / (words[0] if program == "bash" else f"tools/{program}")
        assert path.is_file(), path
        options = [word for word in words if word.startswith("-")]
        assert not options or all(option in path.read_text() for option in options), options
    elif program == "vllm":
        assert words[0] == "serve"
        check_known("vllm serve", words)
    else:
        runs = {"python": run_python, "torchrun": run_torchrun, "deepspeed": run_deepspeed}
        {**runs, "pip": run_pip, "pytest": run_pytest}[program](words)


@each_page
def test_every_command_parses(page, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", also_vllm(importlib.util.find_spec))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # some are for those who have a GPU
    problems = []
    for words in commands(page):
        try:
            check_command(words)
        except (Exception, SystemExit) as error:
            problems.append(f"{shlex.join(words)}: {error!r}")
    assert problems == []


def also_vllm(find_spec):
    """Some commands are for those who have vLLM."""
    return lambda name, *rest: name == "vllm" or find_spec(name, *rest)


def test_commands_are_found():
    found = [word for page in [*PAGES, *SOURCES] for words in commands(page) for word in words]
    for script in SCRIPTS:
        assert found.count(f"{script}.py") >= 6, script
    assert found.count("torchrun") >= 5 and found.count("deepspeed") >= 5 and found.count("pip") >= 5


@pytest.mark.parametrize(
    "line",
    [
        "python ppo_vl.py --no-such-flag",
        "python ppo_vl.py --seed x",
        "python ppo_vl.py --rollout-batch-size 3",
        "python nothing.py",
        "python tools/report.py --no-such-flag a",
        "torchrun --no-such-flag=2 ppo_vl.py",
        "torchrun --nproc_per_node=2 rloo.py --no-such-flag",
        "deepspeed --no-such-flag rloo.py",
        "deepspeed rloo.py --no-such-flag",
        "pip install --no-such-flag x",
        "pip install -r nothing.txt",
        "pytest -m nothing",
        "pytest tests/test_nothing.py",
        "vllm serve MODEL --no-such-flag",
        "bash tools/nothing.sh",
        "unknown ppo_vl.py",
    ],
)
def test_wrong_commands_are_noticed(line, capsys):
    with pytest.raises((Exception, SystemExit)):
        check_command(shlex.split(line))


@each_markdown
def test_every_block_says_what_it_is(page):
    """So that no command stands in a block that is not looked at; python and json are what they say."""
    for language, text in fences(page):
        assert language in ("bash", "python", "json", "text"), f"{language!r}: {text[:60]}"
        if language == "python":
            compile(text, page.name, "exec")
        if language == "json":
            importlib.import_module("json").loads(text)
        if language == "text":
            assert not re.search(rf"^\s*{START}", text, re.M), text


# --- flags -----------------------------------------------------------------------------------------------------------


@cache
def flags_of(path: Path) -> set[str]:
    """Flags of a script, a tool or an example, as typed, without --."""
    fields = re.findall(r"^    (\w+): ", path.read_text().partition("\nclass Args")[2].partition("\n\n\n")[0], re.M)
    return {name.replace("_", "-") for name in fields} | {"help"}


@each_page
def test_every_flag_named_in_the_text_exists(page):
    """A page of a script names that script's flags, and others' where the line names the other script; other pages any's."""
    tools = [path for path in SOURCES if path.parent != ROOT]
    unknown = []
    for line in prose(page).splitlines():
        own = [page.stem] if page.stem in SCRIPTS else SCRIPTS
        named = [ROOT / f"{script}.py" for script in {*own, *re.findall(r"\w+(?=\.py)", line)} & {*SCRIPTS}]
        known = set().union(*map(flags_of, [*named, *tools]), *OTHER_FLAGS.values())
        for flag in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]+)", line):
            if flag not in known and f"no-{flag}" not in known:
                unknown.append(f"--{flag}: {line}")
    assert unknown == []


# --- metrics ---------------------------------------------------------------------------------------------------------


@cache
def strings_of(script: str) -> tuple[set[str], list[str]]:
    """Strings of a script, and a regular expression for each f-string; not docstrings, and not PANELS, which is read."""
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PANELS")]
    nodes = list(ast.walk(tree))
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    parts = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    made = [
        "".join(re.escape(v.value) if isinstance(v, ast.Constant) else "([a-z_]+?)" for v in part) for part in parts
    ]
    prefixes = tuple(f"{prefix}/" for prefix in PREFIXES)
    texts = {n.value for n in constants if id(n) not in left_out}
    return texts, [pattern for pattern in made if pattern.startswith(prefixes)]


def logged(script: str) -> set[str]:
    return {text for text in strings_of(script)[0] if KEY.fullmatch(text) and not text.endswith("_")}


def is_logged(key: str, script: str) -> bool:
    """A whole key: a string of the script, or an f-string of it whose other parts are strings of the script. With a <name>, *,
    NAME or ... in it: some key begins like it up to there."""
    texts, patterns = strings_of(script)
    stem = re.split(r"[<*A-Z{.]", key)[0]
    if stem != key:
        found = any(re.fullmatch(pattern, stem) or re.fullmatch(pattern, stem + "x") for pattern in patterns)
        return found or any(text.startswith(stem) for text in texts) or stem.partition("/")[2] in texts
    matches = [match for pattern in patterns if (match := re.fullmatch(pattern, key))]
    return key in texts or any(texts.issuperset(match.groups()) for match in matches)


def panel_keys(script: str) -> set[str]:
    panels = importlib.import_module(script).PANELS
    return {key if "/" in key else f"rm/{key}" for _, keys in panels for key in keys}


@cache
def named_keys(page: Path) -> set[str]:
    """What stands in inline code and begins like a metric key."""
    return {span for span in spans(page) if KEY.match(re.sub("[<*A-Z]", "x", span)) and not span.endswith(".json")}


@each_markdown
def test_every_metric_named_in_the_docs_is_logged(page):
    scripts = [page.stem] if page.stem in SCRIPTS else SCRIPTS
    missing = [key for key in sorted(named_keys(page)) if not any(is_logged(key, script) for script in scripts)]
    assert missing == []


@each_script
def test_every_metric_that_is_logged_is_documented(script):
    documented = named_keys(ROOT / "docs" / f"{script}.md")
    assert logged(script) - documented == set()
    assert len(logged(script)) >= 10


@each_script
def test_every_metric_that_is_drawn_is_logged(script):
    keys = panel_keys(script)
    assert [key for key in keys if not is_logged(key, script)] == [] and len(keys) >= 5


def test_a_metric_that_is_not_logged_is_noticed():
    for script, key in (("ppo_vl", "policy/kl"), ("ppo_vl", "eval/greedy_nothing"), ("rloo", "loss/value")):
        assert not is_logged(key, script)
    for script, key in (("grm_sft", "eval/accurate"), ("reward_bt", "rm/nothing"), ("reward_bt", "objective/scores")):
        assert not is_logged(key, script)


# --- links, files, tests ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them: lower case, letters, digits and hyphens."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_markdown
def test_every_link_and_anchor_resolves(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        inside = file.resolve().is_relative_to(ROOT)
        if not inside or not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@each_markdown
def test_every_file_named_in_the_text_exists(page):
    """`docs/...`, `tools/...`, `tests/...` and so on in inline code."""
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("runs", "wandb"))
    named = {m[0] for span in spans(page) for m in re.finditer(rf"\b(?:{folders})/[\w/]+(?:\.\w+)?", span)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


FILES = r"(?:(?:common|docs|tools|examples|tests|assets)/.+|[^/]+)\.(?:py|md|sh|txt|toml)"


def tracked() -> set[str]:
    """Files of the repository; without git those that are there, but for what a user may have put beside the scripts."""
    listed = ""
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout
    names = listed.split("\0")
    if not listed:
        there = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
        names = [name for name in there if "/" in name or Path(name).stem in SCRIPTS]
    return {name for name in names if re.fullmatch(FILES, name) and (ROOT / name).exists()}


def test_readme_lists_every_file_and_no_other():
    """Of examples, tests, the tiny model and tools/vllm_cpu it lists the folder."""
    tree = dict(fences(ROOT / "README.md"))["text"].strip().splitlines()
    listed = {line.split()[0] for line in tree}
    assert len(listed) == len(tree) >= 25 and all(len(line.split()) >= 3 for line in tree)
    assert all((ROOT / name).exists() for name in listed)
    folders = tuple(name for name in listed if name.endswith("/"))
    assert {name for name in tracked() - listed if not name.startswith(folders)} <= {"README.md"}


def named_tests() -> set[tuple[str, str]]:
    """(file, test) of `test_x.py::test_y` in a page, and of links to tests/test_x.py with the test as their title."""
    text = "\n".join(page.read_text() for page in PAGES)
    titled = re.findall(r"\]\((?:\.\./)?tests/(test_\w+\.py) \"(test_\w+)\"\)", text)
    return {*re.findall(r"`(?:tests/)?(test_\w+\.py)::(test_\w+)`", text), *titled}


def test_every_test_named_in_the_docs_exists():
    named = named_tests()
    assert len(named) >= 60
    missing = [f"{file}::{name}" for file, name in sorted(named) if f"\ndef {name}(" not in text_of(file)]
    assert missing == []


@cache
def text_of(file: str) -> str:
    path = ROOT / "tests" / file
    return path.read_text() if path.is_file() else ""


def test_every_feature_of_the_comparison_is_shown_by_a_test():
    """README's table: the second column is ours, and links a test, or says no."""
    table = (ROOT / "README.md").read_text().split("\n## Compared")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in re.findall(r"^\|(.*)\|$", table, re.M)]
    assert {len(row) for row in rows} == {5} and len(rows) >= 15
    for row in rows[2:]:
        assert re.search(r"\]\(tests/test_\w+\.py \"test_\w+\"\)", row[1]) or row[1].startswith("no"), row


def test_memory_of_the_recipes_is_what_the_formula_gives():
    page = ROOT / "docs" / "recipes.md"
    ((_, code),) = [fence for fence in fences(page) if fence[0] == "python"]
    names: dict = {}
    exec(code, names)
    rows = [line.split(" | ") for line in re.findall(r"^\| (.* \| `.*) \|$", page.read_text(), re.M)][1:]
    assert len(rows) >= 10
    for recipe, call, states, critic, reference, others, peak in rows:
        gb = eval(f"memory(**{call.strip('`')})", names)
        shown = [*states.split(" + "), critic, reference, *others.split(", "), peak]
        kinds = "weights gradients optimizer critic reference pack step engine peak".split()
        assert [float(x) for x in shown] == [gb[kind] for kind in kinds], recipe
        assert gb["peak"] < 0.85 * 80, f"{recipe}: what the formula leaves out needs room too"
