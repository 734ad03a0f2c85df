"""Which tests notice a wrong line? Apply one mutant at a time in a copy of the repository and run the test that must fail.

    python tools/mutants.py                  # all mutants, about ten minutes on two CPU cores
    python tools/mutants.py --only reward    # those whose file, test or text contains this word
    python tools/mutants.py --all-tests      # run the whole quick half per mutant, to see which tests fail
    python tools/mutants.py --only rloo.py --write 3     # only write mutant.py, a script with a secret mistake

tools/mutants.txt lists the mutants: a file and the test that must fail, then the line's text before and after.
The test suite checks that each text still occurs exactly once. A survivor is a mutant that its test does not notice.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "mutants.txt"


@dataclass
class Args:
    only: str = ""  # Run only mutants that contain this word.
    all_tests: bool = False  # Run the quick half of the test suite instead of the test in the list.
    timeout: int = 900  # Seconds per run of tests; a test that hangs has noticed the mutant.
    write: int = 0  # Write the script with this mutant, counted from 1, to mutant.py, without showing it.


@dataclass
class Mutant:
    group: str  # heading in the list
    file: str
    test: str  # path relative to tests/, with ::function
    before: str
    after: str


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Blocks of four lines, separated by empty lines: file and test, "- before", "+ after"; "# group" above."""
    mutants = []
    group = ""
    lines = iter(path.read_text().splitlines())
    for line in lines:
        if line.startswith("# "):
            group = line[2:]
        elif line:
            file, test = line.split(" ", 1)
            before, after = next(lines), next(lines)
            if not (before.startswith("- ") and after.startswith("+ ") and before[2:] != after[2:]):
                raise ValueError(f"{path}: {line} must be followed by '- before' and '+ after'")
            mutants.append(Mutant(group, file, test, before[2:], after[2:]))
    return mutants


def run_tests(args: Args, tests: set[str], copy: Path) -> tuple[bool, str]:
    """Whether all tests pass, and the last lines that pytest prints."""
    words = [f"tests/{test}" for test in sorted(tests)]
    if args.all_tests:  # without tests that react to any change of the text
        text_tests = ("consistency", "size", "docs", "language", "fork", "mutants", "install")
        words = ["tests", "-m", "not slow", *(f"--ignore=tests/test_{name}.py" for name in text_tests)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *words]
    try:
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return False, "timeout"
    if result.returncode not in (0, 1):  # 1: a test failed
        raise SystemExit(f"{' '.join(command)}\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return result.returncode == 0, " ".join(result.stdout.strip().splitlines()[-2:])


def main(args: Args) -> None:
    survivors = []
    mutants = [mutant for mutant in read_mutants() if args.only in f"{mutant}"]
    if args.write:
        mutant = mutants[args.write - 1]
        source = (ROOT / mutant.file).read_text()
        (ROOT / "mutant.py").write_text(source.replace(mutant.before, mutant.after))
        return
    counts = Counter(mutant.group for mutant in mutants)
    noticed = Counter()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        passed, summary = run_tests(args, {mutant.test for mutant in mutants}, copy)
        if not passed:
            raise SystemExit(f"tests fail without a mutant: {summary}")
        for k, mutant in enumerate(mutants, 1):
            start = time.perf_counter()
            path = copy / mutant.file
            source = path.read_text()
            path.write_text(source.replace(mutant.before, mutant.after))
            passed, summary = run_tests(args, {mutant.test}, copy)
            path.write_text(source)
            noticed[mutant.group] += not passed
            if passed:
                survivors.append(mutant)
            result = f"{'SURVIVED' if passed else 'noticed'}, {time.perf_counter() - start:.0f} s"
            print(f"{k} of {len(mutants)} {result}: {mutant.file}: {mutant.after} ({summary})", flush=True)
    print("\n| part | mutants | noticed |\n|---|---|---|")
    for group, count in counts.items():
        print(f"| {group} | {count} | {noticed[group]} |")
    for mutant in survivors:
        print(f"\nsurvived {mutant.test}\n{mutant.file}\n- {mutant.before}\n+ {mutant.after}")
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
