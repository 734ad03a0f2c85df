"""Run all scripts in other environments than the pinned one, and print the table of docs/recipes.md, "Versions".

    python tools/versions.py                                            # all of ENVIRONMENTS, hours
    python tools/versions.py --only transformers==5.10.4 deepspeed==0.19.0 oldest

An environment is the pinned one with one change, or one of requirements-oldest.txt, requirements-newest.txt and
"unpinned": the newest of everything, as pip would install it today. In each, every script makes two steps in fp32 and in
bf16 on the CPU; its metrics are compared with those of the pinned environment. Results stay in --work: what was measured
at the same commit isn't run again. Requires uv (pip install uv). On x86-64, torch from PyPI is a CUDA build of 5 GB; with
UV_TORCH_BACKEND=cpu, uv takes PyTorch's CPU builds.
"""

import json
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
RL = "--rollout-batch-size 64 --train-batch-size 32 --eval-prompts 8"
SCRIPTS = {
    "ppo_vl": RL,
    "rloo": RL,
    "reward_bt": "--train-batch-size 16 --eval-rows 16",
    "grm_sft": "--train-batch-size 16 --eval-rows 16",
}
DTYPES = ("float32", "bfloat16")
ENVIRONMENTS = """
oldest newest unpinned python==3.12 python==3.13
torch==2.8.0 torch==2.9.1 torch==2.10.0 torch==2.11.0 torch==2.12.1 torch==2.14.1 torch==2.15.0
transformers==5.5.4 transformers==5.7.0 transformers==5.10.4 transformers==5.12.1 transformers==5.14.1
transformers==5.16.1 transformers==5.17.0 transformers==5.18.0 transformers==5.20.2 transformers==5.21.1
transformers==5.22.2 transformers==5.23.0
deepspeed==0.16.9 deepspeed==0.17.6 deepspeed==0.18.9 deepspeed==0.19.0 deepspeed==0.19.2
python==3.10 torch==2.7.1 transformers==5.5.0 transformers==4.57.6 deepspeed==0.15.4
""".split()


@dataclass
class Args:
    only: tuple[str, ...] = ()  # Environments to run. Default: all of ENVIRONMENTS.
    work: str = "runs/versions"  # Directory of the environments, while they are used, and of the results.
    run_scripts: str | None = (
        None  # Used inside an environment: run all scripts, with results in this directory.
    )


def requirements(name: str) -> list[str]:
    """Lines for `uv pip install` in one of the environments."""
    if name in ("oldest", "newest"):
        return (ROOT / f"requirements-{name}.txt").read_text().splitlines()
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    if name == "unpinned":
        return [line.split("==")[0] for line in lines]
    library, _, version = name.partition("==")
    changed = [name if line.startswith(f"{library}==") else line for line in lines]
    if library == "torch":  # each torch has its own torchvision
        changed = ["torchvision" if line.startswith("torchvision==") else line for line in changed]
    if library == "python" and version < "3.11":  # the pins of numpy, av and pillow have no builds for it
        changed = [line.split("==")[0] for line in lines]
    return changed


def install(name: str, folder: Path) -> str:
    """Make an environment; returns an error message or ""."""
    version = name.removeprefix("python==") if name.startswith("python==") else "3.11"
    subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", version, folder], check=True)
    file = folder / "requirements.txt"
    file.write_text("\n".join(requirements(name)))
    command = ["uv", "pip", "install", "--quiet", "--python", folder / "bin/python", "--requirements", file]
    return subprocess.run(command, capture_output=True, text=True).stderr


def run_scripts(results: Path) -> None:
    """Two steps of each script and dtype, each in a fork of this process, which imports libraries once."""
    try:
        import rloo  # noqa: F401
    except (Exception, SystemExit):
        pass  # each run prints why
    for script, flags in SCRIPTS.items():
        for dtype in DTYPES:
            argv = [
                f"{script}.py",
                *flags.split(),
                "--dtype",
                dtype,
                "--total-steps",
                "2",
                "--eval-steps",
                "0",
            ]
            argv += ["--output-dir", str(results), "--run-name", f"{script}-{dtype}"]
            process = multiprocessing.get_context("fork").Process(target=run_script, args=(argv, results))
            process.start()
            process.join()


def run_script(argv: list[str], results: Path) -> None:
    with open(results / f"{argv[-1]}.log", "w", buffering=1) as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def outcome(results: Path, expected: Path, run: str) -> str:
    """How a run compares with the same run in the pinned environment."""
    log = (results / f"{run}.log").read_text() if (results / f"{run}.log").exists() else ""
    steps, pinned = (folder / run / "metrics.jsonl" for folder in (results, expected))
    if not steps.exists() or "saved " not in log:
        lines = re.findall(r"^error: .*|^\w*(?:Error|Exception)\b.*", log, flags=re.M) or ["no output"]
        return f"refused: {lines[-1][7:]}" if lines[-1].startswith("error: ") else f"fails: {lines[-1]}"
    largest = 0.0
    for line, other in zip(*(file.read_text().splitlines() for file in (steps, pinned))):
        metrics, wanted = json.loads(line), json.loads(other)
        assert metrics.keys() == wanted.keys()
        for key in metrics:
            if not key.startswith("time/"):
                largest = max(largest, abs(metrics[key] - wanted[key]) / max(1.0, abs(wanted[key])))
    same = f"equal within {largest:.0e}" if largest else "same"
    unpacked = re.search(r"packing is not supported for this model \((.*)\);", log)
    return f"unpacked ({unpacked[1]}): {same}" if unpacked else same


def cell(results: Path, expected: Path, dtype: str) -> str:
    """One outcome if it is that of all scripts, else one for each."""
    outcomes = {script: outcome(results, expected, f"{script}-{dtype}") for script in SCRIPTS}
    if len(set(outcomes.values())) == 1:
        return outcomes["rloo"]
    return "; ".join(f"{script} {text}" for script, text in outcomes.items())


def main(args: Args) -> None:
    if args.run_scripts:
        run_scripts(Path(args.run_scripts))
        return
    work = (ROOT / args.work).resolve()
    state = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    commit = state.stdout.strip()
    names = args.only or ENVIRONMENTS
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    print("| environment | fp32 | bf16 |\n|---|---|---|")
    for name in dict.fromkeys(["pins", *names]):
        results = work / name
        done = results / f"measured-{commit}"
        if not done.exists():
            shutil.rmtree(results, ignore_errors=True)
            results.mkdir(parents=True)
            failure = install(name, work / "environment")
            if failure:
                (results / "install.log").write_text(failure)
            command = [work / "environment/bin/python", __file__, "--run-scripts", results]
            subprocess.run(command, cwd=ROOT, env=environment, check=False)
            shutil.rmtree(work / "environment")
            done.touch()
        cells = [cell(results, work / "pins", dtype) for dtype in DTYPES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
