"""tools/pipeline.sh and its tables. The whole pipeline takes minutes: docs/pipeline.md has the results of a run."""

import importlib
import re
import shlex
import subprocess
import sys

import tyro
from conftest import ROOT, SCRIPTS, write_jsonl

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


def test_tables_and_plot(tmp_path, capsys):
    """Written metrics: the scores rise in all runs, the true reward by a different amount in each."""
    metrics = {"reward_model": [{"train/step": 40, "eval/easy-vqa/accuracy": 0.75}]}
    metrics["judge"] = [{"eval/accuracy": 0.75}]
    for k, name in enumerate(pipeline.POLICIES):
        metrics[name] = []
        for step in (0, 30):
            parts = {"reward_accuracy": 0.5 + step * k / 1000, "reward_format": 1.0, "score": step - 2.0}
            line = {f"eval/{mode}_{part}": x for mode in ("greedy", "sampled") for part, x in parts.items()}
            metrics[name].append({"train/step": step, **line, "objective/kl": 0.25 * k})
    for name, lines in metrics.items():
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", lines)
        (tmp_path / f"{name}.time").write_text("12.4 10.6\n")
    pipeline.main(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    policies, proxies, times = (part.splitlines()[2:] for part in text.split("\n\n"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in policies]
    assert [row[0].split(" (")[0] for row in rows] == ["initial model", *pipeline.POLICIES]
    assert rows[0][2:] == ["0.550", "0.500", "0.500", "0", ""], "0.9 * 0.5 + 0.1 * 1"
    assert rows[4][2:] == ["0.631", "0.590", "0.590", "0.75", "-2.00 -> 28.00"] and rows[2][-1] == ""
    assert proxies == ["| reward model, step 40 | 0.750 |", "| judge | 0.750 |"]
    assert times == [f"| {name} | 12 | 11 |" for name in pipeline.STAGES]
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")
