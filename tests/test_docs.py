"""README, docs and docstrings are right: commands parse; flags, names, metrics, links, files and numbers exist."""

import ast
import fnmatch
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, SCRIPTS, read_jsonl
from test_consistency import each_script, source_of
from torch.distributed.run import get_args_parser

README = ROOT / "README.md"
MARKDOWN = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "forks").glob("*.md"))]
OF_OTHERS = {"trl.md", "lightrft.md"}  # pages that compare our names with other ones
PYTHON = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]
PYTHON += [ROOT / f"{script}.py" for script in SCRIPTS]
START = r"(?:\w+=\S+ )*(?:python|torchrun|pip|pytest|vllm|sed|patch) "
# Flags of torchrun, pip, vllm serve and OpenRLHF, and names of other libraries.
FOREIGN = "deps nproc_per_node standalone n_samples_per_prompt init_kl_coef remote_rm_url port logprobs-mode"
FOREIGN += " max-model-len"
FOREIGN_NAMES = {"DataProto", "trust_remote_code", "vision_tower"}

each_page = pytest.mark.parametrize("page", [*MARKDOWN, *PYTHON], ids=lambda p: str(p.relative_to(ROOT)))
each_markdown = pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: p.name)


# --- reading pages ---
def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)


def prose(page: Path) -> str:
    """The text of a page outside of its fenced blocks, or the docstring of a Python file."""
    if page.suffix == ".py":
        return ast.get_docstring(ast.parse(page.read_text())) or ""
    return re.sub(r"^```\w*\n.*?^```$", "", page.read_text(), flags=re.M | re.S)


def commands(page: Path) -> list[list[str]]:
    """The words of each command in bash blocks, docstrings and inline code, with common.sh's arrays filled in."""
    settings = (ROOT / "examples/common.sh").read_text()
    arrays = dict(re.findall(r"^(\w+)=\((?:  #[^\n]*)?\n(.*?)^\)$", settings, re.M | re.S))
    bash = [text for name, text in fences(page) if name == "bash"]
    blocks = [re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", text, flags=re.S) for text in bash]
    if page.suffix == ".py":
        doc = prose(page).replace("\\\n", " ")
        blocks = [re.sub(r" \.\.\.( |$)", " ", line) for line in re.findall(rf"^ *{START}.*", doc, re.M)]
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    blocks += [x for x in inline if re.match(START, x) and " ... " not in x + " "]
    parsed = []
    text = "\n".join(blocks)
    for _ in range(2):  # an array may contain another one
        text = re.sub(r'"\$\{(\w+)\[@\]:\?\}"', lambda x: re.sub(r"(  #.*)?\n", " ", arrays[x[1]]), text)
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|) ", re.sub(r" >>? \S+ *$", "", line)):
            words = shlex.split(part, comments=True)
            parsed += [words] if words else []
    return parsed


def flags_in(source: str) -> set[str]:
    """Fields of dataclasses, also those that a diff adds, and "--names"."""
    fields = re.findall(r"^\+?    (\w+): ", source, re.M)
    return {name.replace("_", "-") for name in fields} | {*re.findall(r'"--([\w-]+)"', source), "help"}


# --- commands ---
def check_python(path: Path, words: list[str]) -> None:
    """Our scripts accept the words, by tyro and check_args; tools and examples know the flags among them."""
    assert path.is_file(), f"{path} does not exist"
    if path.parent == ROOT and "--help" not in words:
        module = importlib.import_module(path.stem)
        args = tyro.cli(module.Args, args=words)
        module.fill_defaults(args)
        module.check_args(args)
        named = [*getattr(args, "rewards", ()), getattr(args, "sampler", "hf")]
        files = [name.rpartition(":")[0] for name in named if name.startswith("examples/")]
        assert all((ROOT / file).is_file() for file in files), files
    source = path.read_text()
    source += source_of("rloo") if "rloo.Args" in source else ""
    named = {word[2:].removeprefix("no-") for word in words if word.startswith("--")}
    assert named - flags_in(source) == set()


def check_command(words: list[str], outputs: set[str]) -> None:
    """Our scripts accept the words, and the files of this repository among them exist.

    outputs: scripts that `patch -o` makes on the same page; tests/test_recipes.py runs them."""
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    program, *words = words
    if program == "torchrun":
        args = get_args_parser().parse_args(words)
        words = [args.training_script, *args.training_script_args]
    if program.split("/")[-1] in ("torchrun", "python") and words[0] not in ("-m", "-c", *outputs):
        check_python(ROOT / words[0].removeprefix("exercises/"), words[1:])  # copies of the scripts
    files = [x for x in (program, *words) if re.fullmatch(r"[\w/-]+\.(txt|md|diff)|(tests|tools)/.*", x)]
    assert all((ROOT / file).exists() for file in files), files


@each_page
def test_every_command_parses(page, capsys):
    problems = []
    outputs = set(re.findall(r"patch -o (\S+)", page.read_text()))
    for words in commands(page):
        try:
            check_command(words, outputs)
        except (Exception, SystemExit) as error:
            problems.append(f"{shlex.join(words)}: {error!r}")
    assert problems == [], capsys.readouterr().err


@each_page
def test_every_flag_named_in_the_text_exists(page):
    text = re.sub(r"(?m)^\|[^|]*\|", "|", prose(page)) if page.name in OF_OTHERS else prose(page)
    sources = [path.read_text() for path in (*PYTHON, *(ROOT / "forks").glob("*.diff"))]
    named = {name for _, name in re.findall(r"(?<![\w-])--(no-)?([a-z][a-z0-9_-]+)", text)}
    assert named - flags_in("".join(sources)) - {*FOREIGN.split()} == set()


# --- metrics ---
def documented(script: str) -> set[str]:
    """Keys under "## Metrics"; <name>, NAME and K match anything, as * does."""
    pages = {"metrics", script} if script in ("rloo", "ppo_vl") else {script}  # theirs have only what differs
    texts = [(ROOT / "docs" / f"{page}.md").read_text() for page in pages]
    section = "\n".join(text.split("\n## Metrics")[1].split("\n## ")[0] for text in texts)
    groups = "objective|reward|reward_metrics|policy|loss|value|rollout|sampling|train|time|memory|eval|rm"
    keys = re.findall(rf"`((?:{groups})/[^`]+)`", section)
    return {re.sub(r"<[^>]*>|[A-Z]+|\.\.\.", "*", key) for key in keys}


@pytest.mark.slow
@each_script
def test_the_table_of_metrics_is_what_a_run_writes(script, run):
    """The table has every key that a run writes. Keys that need a flag are at least in the script."""
    written = {key for line in read_jsonl(run(script) / "metrics.jsonl") for key in line}
    known = documented(script)
    assert {key for key in written if not any(fnmatch.fnmatch(key, pattern) for pattern in known)} == set()
    absent = {pattern for pattern in known if not fnmatch.filter(written, pattern)}
    source = source_of(script) + (ROOT / "common/environments.py").read_text()
    assert {pattern for pattern in absent if pattern.split("*")[0] not in source} == set()
    assert len(written) >= 10 and len(absent) <= len(known) / 3


# --- links, files, figures ---
def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them: lower case, letters, digits and hyphens."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_markdown
def test_every_link_and_file_exists(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose(page)):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not target.startswith("http") and (not file.exists() or (anchor and anchor not in anchors(file))):
            broken.append(target)
    named = re.findall(r"`(?:\.\./)?((?:docs|tools|examples|tests|common|assets)/[\w/.]+)", prose(page))
    assert broken == [] and [name for name in named if not (ROOT / name).exists()] == []


@each_markdown
def test_every_block_says_what_it_is(page):
    """Otherwise commands could be in a block that no test reads."""
    for language, text in fences(page):
        assert language in ("bash", "python", "json", "text", "diff"), f"{language!r}: {text[:60]}"
        if language == "python":
            compile(text, page.name, "exec")
        if language == "json":
            json.loads(text)


def test_the_readme_links_every_page():
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.html")]:
        assert f"](docs/{page.name})" in README.read_text(), page.name


def test_line_counts_of_the_readme():
    rows = re.findall(r"^\| \[?`([\w/.]+)`.*\| ([\d,]+) \|$", README.read_text(), re.M)
    assert [name for name, _ in rows] == [*(f"{script}.py" for script in SCRIPTS), "common/"]
    for name, number in rows:
        files = (ROOT / name).glob("*.py") if name.endswith("/") else [ROOT / name]
        num_lines = sum(len(file.read_text().splitlines()) for file in files)
        assert abs(int(number.replace(",", "")) - num_lines) <= 20, f"{name} has {num_lines} lines"


@each_markdown
def test_functions_and_classes_exist(page):
    """Names in inline code are in the code. The first column of tables may have names of other projects."""
    text = re.sub(r"(?m)^\| `?[^|]*\|", "|", prose(page)) if page.parent.name != "forks" else prose(page)
    names = re.findall(r"`([a-z]\w*_\w+|_\w+|[A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(\))?`", text)
    files = [*PYTHON, *(ROOT / "forks").glob("*.diff"), *ROOT.glob("common/*.py"), *ROOT.glob("tests/*.py")]
    known = {word for file in files for word in re.findall(r"\w+", file.read_text())} | FOREIGN_NAMES
    assert {name for pair in names for name in pair if name} - known == set()


# --- measured numbers ---
RESULTS = json.loads((ROOT / "docs/results.json").read_text())


@pytest.mark.parametrize("page", [*SCRIPTS, "pipeline", "theory", "exercises", "benchmarks"])
def test_tables_have_the_numbers_of_the_json(page):
    lines = re.split(r"\n *", (ROOT / f"docs/{page}.md").read_text())
    pattern = r"[\d.]+" if page == "benchmarks" else r"\d+\.\d+"
    for run, values in RESULTS[page].items():
        (line,) = [x for x in lines if x.startswith(f"| {run.removeprefix('seed ')} |")]
        known = [float(x) for x in re.findall(pattern, json.dumps(values))]
        shown = [float(x) for x in re.findall(pattern, line.partition(" | ")[2])]
        assert len(shown) > 1
        for number in shown:  # in the same order; the page may leave some out
            assert number in known, line
            known = known[known.index(number) + 1 :]


def test_the_diff_in_the_readme_is_that_of_the_fork():
    [diff] = [text for language, text in fences(README) if language == "diff"]
    shown = [line for line in diff.splitlines() if not line.startswith("@@")]
    fork = (ROOT / "forks/dr_grpo.diff").read_text().partition("+++")[2].splitlines()
    assert shown == [line for line in fork if line[:1] in "+-" and "kl_coef" not in line and line.strip()]


def test_the_readme_has_benchmarks_of_the_json():
    section = README.read_text().split("## Compared with TRL")[1].split("\n## ")[0]
    known = {x for numbers in RESULTS["benchmarks"].values() for x in numbers}
    seconds = RESULTS["benchmarks"]["0.95"]
    known |= {slow / fast for fast, slow in zip(seconds[:3], seconds[3:])}
    for row in re.findall(r"^\|.*", section, re.M)[2:]:
        for number in re.findall(r"[\d.]+", row.partition(" | ")[2]):
            digits = len(number.partition(".")[2])
            assert float(number) in {round(x, digits) for x in known}, row
