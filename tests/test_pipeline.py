"""tools/pipeline.sh: its commands parse, use checkpoints of earlier stages, and make a fair comparison."""

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import tyro
from conftest import ROOT

sys.path.append(str(ROOT / "tools"))
import pipeline  # noqa: E402


def test_policies_differ_only_in_reward_seed_and_kl_coef():
    commands = re.search(r"^# 1\..*(?=^# 3\.)", (ROOT / "tools/pipeline.sh").read_text(), re.M | re.S).group()
    print_stage = 'start() { printf "%q " "$@" "${JUDGE-}" "${REWARD_MODEL-}"; echo; }; finish() { :; }'
    program = f"out=runs/pipeline\n{print_stage}\n{commands}"
    printed = subprocess.run(["bash", "-euc", program], capture_output=True, text=True, check=True).stdout
    stages, checkpoints = {}, {}
    for line in printed.splitlines():
        name, script, steps, *flags, judge, reward_model = shlex.split(line)
        module = importlib.import_module(script.removesuffix(".py"))
        stages[name] = args = tyro.cli(module.Args, args=["--total-steps", steps, *flags])
        module.fill_defaults(args)
        module.check_args(args)
        checkpoints[name] = judge if name.startswith("judge") else reward_model
    assert list(stages)[:2] == ["reward_model", "judge"] and set(stages) == set(pipeline.STAGES)
    pairs = stages["reward_model"]
    assert pairs.total_steps // pairs.save_steps <= pairs.save_total_limit, "the early checkpoint is deleted"
    steps = {"judge": stages["judge"].total_steps, "rm": pairs.total_steps, "early_rm": pairs.save_steps}
    variants = {"seed1": {}, "seed2": {"seed": 2}, "kl0.1": {"kl_coef": 0.1}, "kl1": {"kl_coef": 1.0}}
    for name in pipeline.POLICIES:
        args, reward = stages[name], name.partition("_and_format")[0]
        weights = dict(zip((source.rpartition(":")[2] for source in args.rewards), args.reward_weights))
        learned = {"score": 1, "format": 1, "accuracy": 0}  # accuracy is only logged
        assert weights == (learned if reward in steps else {"accuracy": 1, "format": 1})
        if reward in steps:
            stage = "judge" if reward == "judge" else "reward_model"
            assert checkpoints[name] == f"runs/pipeline/{stage}/checkpoint-{steps[reward]}"
        variant = variants[name.rpartition("_")[2]] | {"rewards": args.rewards}
        variant |= {"reward_weights": args.reward_weights}
        assert args == replace(stages["accuracy_and_format_seed1"], **variant)
