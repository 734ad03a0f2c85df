"""tools/pipeline.sh and what it makes of its runs. The whole takes minutes: docs/pipeline.md shows a run of it."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import tyro
from conftest import ROOT, SCRIPTS, write_jsonl

sys.path.append(str(ROOT / "tools"))
import pipeline  # noqa: E402

SHELL = ROOT / "tools" / "pipeline.sh"


def stages() -> dict[str, tuple[str, list[str]]]:
    """{name: (script, flags)}, as bash starts the stages; the last two of flags are $JUDGE and $REWARD_MODEL."""
    lines = [line.rstrip(" &") for line in SHELL.read_text().splitlines()]
    kept = [line for line in lines if re.match(r"(policy=|export JUDGE|export REWARD|stage \w+ )", line)]
    show = 'stage() { printf "%q " "$@" "${JUDGE-}" "${REWARD_MODEL-}"; echo; }'
    program = "\n".join(["out=runs/pipeline", show, *kept])
    printed = subprocess.run(["bash", "-euc", program], capture_output=True, text=True, check=True).stdout
    words = [shlex.split(line) for line in printed.splitlines()]
    return {name: (script, ["--total-steps", steps, *flags]) for name, script, steps, *flags in words}


def parse(name: str):
    script, flags = stages()[name]
    return tyro.cli(importlib.import_module(script.removesuffix(".py")).Args, args=flags[:-2])


def test_stages_pass_the_checks_of_their_scripts_and_their_proxies_are_made_by_others():
    assert set(stages()) == set(pipeline.STAGES)
    assert {script for script, _ in stages().values()} == {f"{name}.py" for name in SCRIPTS}
    for name, (script, _) in stages().items():
        importlib.import_module(script.removesuffix(".py")).check_args(parse(name))
    found, pairs = {name: flags[-2:] for name, (_, flags) in stages().items()}, parse("reward_model")
    assert found["judge_and_rule"][0] == f"runs/pipeline/judge/checkpoint-{parse('judge').total_steps}"
    assert found["rm"][1] == f"runs/pipeline/reward_model/checkpoint-{pairs.total_steps}"
    assert found["early_rm"][1] == f"runs/pipeline/reward_model/checkpoint-{pairs.save_steps}"
    assert pairs.total_steps // pairs.save_steps <= pairs.save_total_limit, "the early one is not deleted"
    for name, (_, _, has_proxy) in pipeline.POLICIES.items():  # all log the truth
        args = parse(name)
        weights = dict(zip((source.rpartition(":")[2] for source in args.rewards), args.reward_weights))
        assert (weights.get("score") == 1 and weights["accuracy"] == weights["format"] == 0) == has_proxy
        assert all((ROOT / source.rpartition(":")[0]).exists() for source in args.rewards)


def test_tables_and_picture_of_made_up_runs(tmp_path, capsys):
    """The proxies rise, the truth does so by policy."""
    made = {"reward_model": [{"train/step": 40, "eval/easy-vqa/accuracy": 0.75}]}
    made["judge"] = [{"eval/accuracy": 0.75}]
    for k, name in enumerate(pipeline.POLICIES):
        made[name] = []
        for step in (0, 30):
            parts = {"accuracy": 0.5 + step * k / 1000, "format": 1.0, "score": step - 2.0}
            line = {f"eval/{mode}_{part}": x for mode in ("greedy", "sampled") for part, x in parts.items()}
            made[name].append({"train/step": step, **line, "objective/kl": 0.25 * k})
    for name, lines in made.items():
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", lines)
        (tmp_path / f"{name}.time").write_text("12.4 10.6\n")
    pipeline.main(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    policies, proxies, times = (part.splitlines()[2:] for part in text.split("\n\n"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in policies]
    assert [row[0].split()[0] for row in rows] == ["base", *pipeline.POLICIES]
    assert rows[0][2:] == ["0.550", "0.500", "0.500", "0", ""], "0.9 * 0.5 + 0.1 * 1"
    assert rows[4][2:] == ["0.631", "0.590", "0.590", "0.75", "-2.00 -> 28.00"] and rows[2][-1] == ""
    assert proxies == ["| reward model, step 40 | 0.750 |", "| judge | 0.750 |"]
    assert times == [f"| {name} | 12 | 11 |" for name in pipeline.STAGES]
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")


MAKES = r"""echo "$@" >> "$LOG"
while (( $# )); do [[ $1 == --output-dir ]] && out=$2; [[ $1 == --run-name ]] && name=$2
[[ $1 == --total-steps ]] && steps=$2; shift; done
[[ -n ${name:-} ]] && mkdir -p "$out/$name/checkpoint-$steps"; exit 0"""


def run_shell(folder: Path, body: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """tools/pipeline.sh with a small shell program as `python`: stages are instant -> result, what was called."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/python").write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / "bin/python").chmod(0o755)
    (folder / "log").write_text("")
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOG": str(folder / "log")}
    done = subprocess.run([SHELL, folder / "out"], env=env, capture_output=True, text=True)
    return done, (folder / "log").read_text().splitlines()
