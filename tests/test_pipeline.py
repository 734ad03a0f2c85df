"""tools/pipeline.sh: its commands parse and use the checkpoints of earlier stages."""

import importlib
import re
import shlex
import subprocess
import sys

import tyro
from conftest import ROOT, SCRIPTS

sys.path.append(str(ROOT / "tools"))
import pipeline  # noqa: E402

SHELL = ROOT / "tools" / "pipeline.sh"


def stages() -> dict[str, tuple[str, list[str]]]:
    """{name: (script, flags)} as started by bash, followed by the values of $JUDGE and $REWARD_MODEL."""
    lines = [line.rstrip(" &") for line in SHELL.read_text().splitlines()]
    lines = [line for line in lines if re.match(r"(policy=|export JUDGE|export REWARD|stage \w+ )", line)]
    print_stage = 'stage() { printf "%q " "$@" "${JUDGE-}" "${REWARD_MODEL-}"; echo; }'
    program = "\n".join(["out=runs/pipeline", print_stage, *lines])
    printed = subprocess.run(["bash", "-euc", program], capture_output=True, text=True, check=True).stdout
    words = [shlex.split(line) for line in printed.splitlines()]
    return {name: (script, ["--total-steps", steps, *flags]) for name, script, steps, *flags in words}


def parse(name: str):
    script, flags = stages()[name]
    return tyro.cli(importlib.import_module(script.removesuffix(".py")).Args, args=flags[:-2])


def test_stages_pass_check_args_and_use_checkpoints_of_earlier_stages():
    assert set(stages()) == set(pipeline.STAGES)
    assert {script for script, _ in stages().values()} == {f"{name}.py" for name in SCRIPTS}
    for name, (script, _) in stages().items():
        module, args = importlib.import_module(script.removesuffix(".py")), parse(name)
        module.fill_defaults(args)
        module.check_args(args)
    checkpoints = {name: flags[-2:] for name, (_, flags) in stages().items()}
    pairs = parse("reward_model")
    assert checkpoints["judge_and_rule"][0] == f"runs/pipeline/judge/checkpoint-{parse('judge').total_steps}"
    assert checkpoints["rm"][1] == f"runs/pipeline/reward_model/checkpoint-{pairs.total_steps}"
    assert checkpoints["early_rm"][1] == f"runs/pipeline/reward_model/checkpoint-{pairs.save_steps}"
    assert pairs.total_steps // pairs.save_steps <= pairs.save_total_limit, (
        "the checkpoint after 40 steps is deleted"
    )
    for name, (_, _, has_proxy) in pipeline.POLICIES.items():  # all log the true rewards
        args = parse(name)
        weights = dict(zip((source.rpartition(":")[2] for source in args.rewards), args.reward_weights))
        assert (weights.get("score") == 1 and weights["accuracy"] == weights["format"] == 0) == has_proxy
        assert all((ROOT / source.rpartition(":")[0]).exists() for source in args.rewards)
