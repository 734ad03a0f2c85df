"""Each command of docs/recipes.md that runs a script or a patched one does a step on a CPU. What is replaced: the model (by
the bundled one), data, rewards, output directory, batch sizes and number of processes. All other flags are the page's.
vLLM, in this process or as a server, is replaced by the training model, and used where it is installed."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_forks
import test_vllm
import tyro
from conftest import ROOT, SCRIPTS, TINY, to_argv, write_jsonl
from test_docs import commands

PAGE = ROOT / "docs/recipes.md"
BATCH_SIZES = {"prompts_per_rollout": 2, "num_samples_per_prompt": 2, "train_batch_size": 4}
BATCH_SIZES |= {"eval_prompts": 2, "eval_rows": 2}
MY_REWARD = str(ROOT / "examples/answers.py")  # the page copies it


CHECK = "examples/check_sync"


def recipes(sampler: str | None = None) -> list[tuple[str, list[str]]]:
    """(script, its flags) of each command that runs one, or of those whose last --sampler is this one."""
    found = []
    for words in commands(PAGE):
        scripts = [word for word in words if word.removesuffix(".py") in (*SCRIPTS, "grpo", CHECK)]
        flags = words[words.index(scripts[0]) + 1 :] if scripts and words[0] != "patch" else []
        if flags and sampler in (None, dict(zip(flags, flags[1:])).get("--sampler")):
            found.append((scripts[0].removesuffix(".py"), flags))
    return found


REPLACED = "--model --dataset --eval-dataset --output-dir --run-name".split()
REPLACED += "--prompts-per-rollout --train-batch-size --eval-prompts".split()


def each_recipe(sampler: str | None = None, marks=pytest.mark.slow):
    """One command for each set of flags, without those that `args` replaces."""
    cases = {}
    for script, flags in recipes(sampler):
        names = {word for word in flags if word.startswith("--")}.difference(REPLACED)
        cases.setdefault((script, frozenset(names)), pytest.param(script, flags, marks=marks, id=script))
    return pytest.mark.parametrize("script, flags", cases.values())


def module_of(script: str, folder: Path):
    patches = [Path(words[-1]).stem for words in commands(PAGE) if words[0] == "patch" and "grpo.py" in words]
    if script == "grpo":
        return test_forks.load(folder, *patches)
    return importlib.import_module(script.replace("/", "."))


def test_my_reward(tmp_path, monkeypatch, capsys):
    reward = runpy.run_path(MY_REWARD)["accuracy"]
    right = {"Answer: dog\nNo.\nAnswer: **Cat.**": " cat.", "Answer: (b).": "B", "Answer: 1,000.0": 1000}
    right |= {"So the answer: it is three. Answer: 3": 3, "**Answer**: 3": "3", "Answer: '`B`'": "b"}
    right |= {"Answer: (B) 12 cm": "B", "Answer: b": "B. 12 cm", "Answer: $\\boxed{5}$": 5}
    right |= {"Answer: 5 cm": "5", "Answer: 50%": 50, "Answer: 7 apples": 7}
    wrong = {"Answer: a **cat**": "a cat", "cat": "cat", "Answer: 5": ".5", "Answer:": 0, "Answer: -3": 3}
    wrong |= {"Answer: 3,5": "35", "Answer: C) B": "B", "Answer: S. aureus": "S. mutans"}
    wrong |= {"Answer: 6 cm": "6 m", "Answer: 3 or 4": 3}
    reported = []
    rewards = reward([*right, *wrong], [*(right | wrong).values()], lambda *x: reported.append(x))
    assert rewards == [1.0] * 12 + [0.0] * 10 and reported == [("answered", 20 / 22)]
    rows = [{"prompt": "?", "answer": "3"}, {"prompt": "", "answer": "3"}, {"prompt": "?", "answer": None}]
    flags = ["--dataset", write_jsonl(tmp_path / "rows.jsonl", rows), "--rewards", f"{MY_REWARD}:accuracy"]
    for more, words in (([], "answer gets no reward [2]\n"), (["--rows", "1"], "the dataset has 3\n")):
        monkeypatch.setattr(sys, "argv", ["check_data.py", *flags, *more])
        runpy.run_path(str(ROOT / "examples/check_data.py"))
        out, error = capsys.readouterr()
        assert words in out and ("row 1 is skipped" in error or " of 1 checked rows can be used" in out)


def test_math_compares_the_last_answer(monkeypatch):
    """In place of math-verify, which is not installed here, formulas are compared as strings."""
    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=str, verify=str.__eq__))
    texts = ["Answer: 1\n**Answer:** $\\frac{1}{2}$.", "Answer: \\frac{1}{2}", "Answer: .5", "5"]
    golds = ["\\frac{1}{2}", "$\\frac{1}{2}$", "5", "5"]
    assert runpy.run_path(MY_REWARD)["math"](texts, golds, print) == [1.0, 1.0, 0.0, 0.0]


@pytest.fixture
def args(script, flags, vqa, tmp_path):
    """The flags of a command with the tiny model, small data and small batches, without W&B."""
    args = tyro.cli(module_of(script, tmp_path).Args, args=flags)
    args.track, args.columns = "off", ()
    sizes = BATCH_SIZES | {"total_steps": min(1, args.total_steps)}  # 0 evaluates a checkpoint
    vars(args).update({name: size for name, size in sizes.items() if hasattr(args, name)})
    args.model, args.dataset, args.output_dir = TINY, vqa, str(tmp_path / "runs")
    if hasattr(args, "rewards"):
        args.rewards = (f"{MY_REWARD}:accuracy",)  # also for `math`: math-verify is not installed here
    if hasattr(args, "eval_datasets"):
        args.eval_datasets = tuple(f"{x.partition('=')[0]}={vqa}" for x in args.eval_datasets)
    elif args.eval_dataset:
        args.eval_dataset = vqa
    return args


def assert_has_run(args) -> None:
    (run_dir,) = [path for path in Path(args.output_dir).iterdir() if path.is_dir()]
    assert (run_dir / "metrics.jsonl").exists()
    assert (run_dir / "checkpoint-1").exists() == (args.total_steps == 1 and args.save_total_limit > 0)


@each_recipe()
def test_command_runs_for_a_step(script, args, tmp_path):
    args.sampler = "hf"  # the last two scripts ignore it
    module_of(script, tmp_path).main(args)
    assert_has_run(args)


@each_recipe("vllm", test_vllm.pytestmark)
def test_command_runs_for_a_step_with_vllm(script, args, tmp_path):
    command = [sys.executable, module_of(script, tmp_path).__file__, *to_argv(vars(args))]
    env = {**os.environ, **test_vllm.ON_CPU, "PYTHONPATH": f"{ROOT}/tools/vllm_cpu:{ROOT}"}
    subprocess.run(command, env=env, check=True)
    assert_has_run(args)


SERVERS = "examples/vllm_server.py:Servers"


@each_recipe(SERVERS, test_vllm.pytestmark)
def test_command_runs_for_a_step_with_a_server(script, args, tmp_path, monkeypatch):
    server = test_vllm.Server(tmp_path)
    monkeypatch.setenv("VLLM_URLS", server.url)
    args.sampler = str(ROOT / SERVERS)
    args.max_prompt_length, args.max_response_length = 1024, 24
    try:
        server.wait()
        importlib.import_module(script).main(args)
    finally:
        server.stop()
    assert_has_run(args)


def test_grpo_and_ppo_can_repeat_check_7(tmp_path):
    [few] = [flags for _, flags in recipes() if "few" in flags]
    few = few[few.index("few.jsonl") + 1 :]  # what check 7 adds to the flags that commands share
    for script, flags in recipes():
        if script == "grpo" or "ppo" in flags:
            module = module_of(script, tmp_path)
            args = tyro.cli(module.Args, args=[*flags, *few, "--train-batch-size", "32"])
            module.fill_defaults(args)
            module.check_args(args)
            assert args.prompts_per_rollout * args.num_samples_per_prompt // args.train_batch_size == 4


def test_run_names_differ():
    """A run's folder must be new, except for the run that check 6 resumes, and W&B takes the name as its id."""
    assert {script for script, _ in recipes()} == {*SCRIPTS, "grpo", CHECK} and len(recipes()) >= 12
    names = [flags[flags.index("--run-name") + 1] for _, flags in recipes() if "--run-name" in flags]
    assert len(names) >= 5 and len(set(names)) == len(names) - 1
