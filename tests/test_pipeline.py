"""tools/pipeline.sh and what it makes of its runs. The whole thing takes minutes: docs/pipeline.md shows a run of it."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, SCRIPTS, write_jsonl

sys.path.append(str(ROOT / "tools"))
import pipeline  # noqa: E402

SHELL = ROOT / "tools" / "pipeline.sh"


def stages(folder: str = "runs/pipeline") -> list[tuple[str, str, list[str]]]:
    """(NAME/checkpoint-N, script, flags) of every stage, variables filled in as bash does."""
    lines = [line for line in SHELL.read_text().replace("\\\n", " ").splitlines()]
    settings = [line for line in lines if re.match(r"(policy|late|early)=", line)]
    calls = [line.rstrip(" &") for line in lines if line.startswith("stage ")]
    program = "\n".join([f"out={folder}", 'stage() { printf "%q " "$@"; echo; }', *settings, *calls])
    printed = subprocess.run(["bash", "-euc", program], capture_output=True, text=True, check=True).stdout
    words = [shlex.split(line) for line in printed.splitlines()]
    return [(made, script, flags) for made, script, *flags in words]


def test_bash_reads_it():
    subprocess.run(["bash", "-n", SHELL], check=True)
    assert SHELL.stat().st_mode & 0o100, "it can be started"


def test_every_stage_passes_the_checks_of_its_script():
    assert {script for _, script, _ in stages()} == {f"{name}.py" for name in SCRIPTS}
    for made, script, flags in stages():
        module = importlib.import_module(script.removesuffix(".py"))
        args = module.parse_args(flags)
        module.check_args(args, world_size=1)
        steps = getattr(args, "total_steps", None) or args.max_steps
        assert made.endswith(f"/checkpoint-{steps}"), "the checkpoint that says that the stage is done"


def test_policies_train_on_folders_that_stages_make():
    made = {f"runs/pipeline/{made}" for made, _, _ in stages()}
    [(_, _, flags)] = [stage for stage in stages() if stage[0].startswith("reward_model/")]
    steps, every = (int(flags[flags.index(flag) + 1]) for flag in ("--max-steps", "--save-steps"))
    made |= {f"runs/pipeline/reward_model/checkpoint-{n}" for n in range(every, steps + 1, every)}
    used = {word for _, _, flags in stages() for word in flags if word.startswith("runs/pipeline/")}
    used |= {f"runs/pipeline/{path}" for path in re.findall(r"JUDGE=\$out/(\S+)", SHELL.read_text())}
    assert len(used) == 3 and used <= made


def test_proxies_are_trained_on_and_the_rule_is_always_logged():
    policies = {made.split("/")[0]: flags for made, script, flags in stages() if script in ("ppo_vl.py", "rloo.py")}
    assert policies.keys() == pipeline.POLICIES.keys()
    for name, flags in policies.items():
        script, _, proxy = pipeline.POLICIES[name]
        module = importlib.import_module(script.removesuffix(".py"))
        args = module.parse_args(flags)
        weights = {
            source.rpartition("/")[2].rpartition(":")[2]: w for source, w in zip(args.rewards, args.reward_weights)
        }
        assert pipeline.TRUE_RULE.keys() <= weights.keys()
        assert proxy is None or (weights[proxy] > 0 and weights["accuracy"] == 0)


def test_the_page_shows_the_very_commands():
    page = (ROOT / "docs" / "pipeline.md").read_text().replace("\\\n", " ")
    shown = [shlex.split(line)[1:] for line in page.splitlines() if re.match(r"python \w+\.py ", line)]
    ran = [
        [script, *flags, "--output-dir", "runs/pipeline", "--run-name", made.split("/")[0]]
        for made, script, flags in stages()
    ]
    assert shown == ran


def fill(folder: Path) -> None:
    """A folder as tools/pipeline.sh leaves it, with made-up metrics: the proxies rise, the truth does so by policy."""
    for k, (name, (_, _, proxy)) in enumerate(pipeline.POLICIES.items()):
        (folder / name / "eval").mkdir(parents=True)
        lines = []
        for step in (0, 30):
            parts = {"accuracy": 0.5 + step * k / 1000, "format": 1.0, "checkpoint-200": 0.25, proxy: step - 2.0}
            line = {f"eval/{mode}_{part}": x for mode in ("greedy", "sampled") for part, x in parts.items() if part}
            lines.append({"train/step": step, **line, "eval/num_samples": 300, "objective/kl": 0.25 * k})
            said = {"red": 0.9, "<answer>red</answer>": 0.7, "<answer>blue</answer>": 0.25, "green": 0.5}
            samples = [
                {"phase": "eval_sampled", "answer": "red", "response": text, "components": {"score": score}}
                for text, score in said.items()
            ]
            (folder / name / "eval" / f"eval_step_{step}.json").write_text(json.dumps(samples))
        write_jsonl(folder / name / "metrics.jsonl", lines)
    for name, accuracy in (("reward_model", "eval/easy-vqa/accuracy"), ("judge", "eval/accuracy")):
        (folder / name).mkdir()
        write_jsonl(folder / name / "metrics.jsonl", [{"train/step": 40, accuracy: 0.75, "eval/num_samples": 250}])
    for name in pipeline.STAGES:
        (folder / f"{name}.time").write_text("12.4 10.6\n")


def test_tables_and_picture_of_made_up_runs(tmp_path, capsys):
    fill(tmp_path)
    pipeline.main(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    policies, proxies, times = (part.splitlines()[2:] for part in text.split("\n\n"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in policies]
    assert [row[0].split()[0] for row in rows] == ["base", *pipeline.POLICIES]
    assert rows[0][2:] == ["0.550", "0.500", "0.500", "0", ""], "0.9 * 0.5 + 0.1 * 1"
    assert rows[2][2:] == ["0.577", "0.530", "0.530", "0.25", "-2.00 -> 28.00"]
    assert proxies == ["| reward model, step 40 | 0.750 |", "| judge | 0.750 |"]
    assert times == [f"| {name} | 12 | 11 |" for name in pipeline.STAGES]
    assert pipeline.verdicts(tmp_path / "judge_and_rule", 30) == (0.8, 0.25), "the undecided one is left out"
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")


def test_every_stage_has_its_seconds_in_the_table():
    assert {made.split("/")[0] for made, _, _ in stages()} == set(pipeline.STAGES)


def fake_python(folder: Path, body: str) -> dict[str, str]:
    """Environment whose `python` is a small shell program: stages become instant."""
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / "bin/python").chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


MAKES = r"""echo "$@" >> "$LOG"
while (( $# )); do [[ $1 == --output-dir ]] && out=$2; [[ $1 == --run-name ]] && name=$2
[[ $1 == --max-steps || $1 == --total-steps ]] && steps=$2; shift; done
[[ -n ${name:-} ]] && mkdir -p "$out/$name/checkpoint-$steps"; exit 0"""


def test_a_stage_that_is_done_is_not_run_again(tmp_path):
    env = {**fake_python(tmp_path, MAKES), "LOG": str(tmp_path / "log")}
    folder = tmp_path / "out"
    subprocess.run(["bash", SHELL, folder], env=env, check=True, capture_output=True)
    first = (tmp_path / "log").read_text().splitlines()
    assert len(first) == len(pipeline.STAGES) + 2, "and the report and the tables"
    assert all((folder / f"{name}.time").is_file() for name in pipeline.STAGES)
    subprocess.run(["bash", SHELL, folder], env=env, check=True, capture_output=True)
    again = (tmp_path / "log").read_text().splitlines()[len(first) :]
    assert [line.split()[0] for line in again] == ["tools/report.py", "tools/pipeline.py"]


def test_the_first_error_ends_it_and_is_shown(tmp_path):
    body = 'echo "$@" >> "$LOG"; [[ $1 == reward_bt.py ]] && { echo no pairs today; exit 2; }\n' + MAKES
    env = {**fake_python(tmp_path, body), "LOG": str(tmp_path / "log")}
    result = subprocess.run(["bash", SHELL, tmp_path / "out"], env=env, capture_output=True, text=True)
    assert result.returncode == 1 and "no pairs today" in result.stderr
    assert "rloo.py" not in (tmp_path / "log").read_text()
