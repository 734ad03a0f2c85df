"""Runs that are stopped, killed or out of disk, in all four scripts: what goes on is what would have been."""

import errno
import fcntl
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, read_jsonl, to_argv, write_jsonl

each_script = pytest.mark.parametrize("script", SCRIPTS)
STEPS = {"ppo_vl": "total_steps", "rloo": "total_steps", "grm_sft": "max_steps", "reward_bt": "max_steps"}
DRAWN = """
import random, numpy, torch

def score(completion_ids, **columns):
    drawn = random.random() + numpy.random.rand() + float(torch.rand(()))
    return [sum(ids) % 7 / 7 + drawn * i for i, ids in enumerate(completion_ids)]
"""


def flags_of(script: str, folder: Path, text_model: str) -> dict:
    """Flags of a run of four steps on a text model, with a checkpoint after two. The reward draws from every random state."""
    sums = [{"prompt": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(16)]
    flags = {"model": text_model, "seed": 3, "eval_steps": 1, "eval_samples": 4, "save_steps": 2, "save_total_limit": 9}
    flags |= {STEPS[script]: 4, "learning_rate": 1e-3, "warmup_steps": 1, "output_dir": folder / "runs"}
    if script in ("ppo_vl", "rloo"):
        (folder / "reward.py").write_text(DRAWN)
        data = write_jsonl(folder / "sums.jsonl", sums)
        flags |= {"rollout_batch_size": 8, "num_samples_per_prompt": 4, "train_batch_size": 4, "max_response_length": 6}
        flags |= {
            "dataset": data,
            "eval_dataset": data,
            "rewards": [f"{folder}/reward.py:score"],
            "reward_weights": [1],
        }
    elif script == "reward_bt":
        pairs = [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "?" * (i % 3 + 1)}
            for i, row in enumerate(sums)
        ]
        data = write_jsonl(folder / "pairs.jsonl", pairs)
        flags |= {"dataset": data, "eval_datasets": [f"own={data}"], "batch_size": 4, "dropout": True}
    else:
        pairs = [{"question": row["prompt"], "first": row["answer"], "second": "?", "answer": "A"} for row in sums]
        flags |= {"model": TINY, "dataset": f"{ROOT}/tests/data/grm/pairs.jsonl", "logging_steps": 3, "batch_size": 4}
        flags |= {
            "eval_dataset": flags["dataset"],
            "max_response_length": 4,
            "generation_batch_size": 8,
            "eval_steps": 2,
        }
    return flags


def main_of(script: str, flags: dict) -> Path:
    """A run in this process, without pictures -> its folder."""
    module = importlib.import_module(script)
    args = module.parse_args(to_argv(flags))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_samples", "draw_judged", "draw_calibration", "draw_worst_pairs"):
            patch.setattr(module, name, lambda *args: None, raising=False)
        module.main(args)
    return Path(args.output_dir) / args.run_name if args.resume in (None, "auto") else Path(args.resume).parent


def error_of(script: str, flags: dict, capfd) -> str:
    """The one sentence of a run that must end with exit code 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main_of(script, flags)
    assert stopped.value.code == 2
    del stopped
    gc.collect()  # the lock of the folder goes with the frames of main
    lines = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1, lines
    return lines[0]


def without_times(path: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(path)]


def assert_same_tensors(a, b, where: str) -> None:
    """Of two loaded files, bit by bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all(), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_tensors(a[key], b[key], f"{where} {key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same_tensors(x, y, f"{where} {i}")
    elif isinstance(a, (int, float, str)):
        assert a == b, where


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Metrics, samples, evaluations, weights, optimizer, random states and counters."""
    from safetensors.torch import load_file

    for name in ("metrics.jsonl", "samples.jsonl"):
        if (one / name).exists():
            assert without_times(one / name) == without_times(other / name)
    for path in sorted((one / "eval").glob("*.json")):
        assert path.read_text() == (other / "eval" / path.name).read_text()
    one, other = one / f"checkpoint-{step}", other / f"checkpoint-{step}"
    files = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    assert files == {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    found = 0
    for file in files:
        if file.suffix == ".safetensors":
            assert_same_tensors(load_file(one / file), load_file(other / file), str(file))
            found += 1
        elif file.suffix == ".pt":
            a, b = (torch.load(folder / file, weights_only=False) for folder in (one, other))
            assert_same_tensors(a, b, str(file))
            found += 1
    assert found >= 3
    a, b = (json.loads((folder / "state/trainer_state.json").read_text()) for folder in (one, other))
    assert {**a, "args": 0, "seconds": 0} == {**b, "args": 0, "seconds": 0} or without_clock(a) == without_clock(b)


def without_clock(state: dict) -> dict:
    before = {k: v for k, v in state["before"].items() if not k.startswith("time/")}
    sums = {k: v for k, v in state.get("sums", {}).items() if not k.startswith("time/")}
    return {**state, "args": 0, "seconds": 0, "before": before, "sums": sums}


# --- exact resume ----------------------------------------------------------------------------------------------------


@each_script
@pytest.mark.slow
def test_two_steps_and_two_more_are_four(script, tiny_text_model, tmp_path):
    flags = flags_of(script, tmp_path, tiny_text_model)
    whole = main_of(script, {**flags, "run_name": "whole"})
    shutil.copytree(whole, tmp_path / "runs/part")
    shutil.rmtree(tmp_path / "runs/part/checkpoint-4")
    (tmp_path / "runs/part/checkpoint-3.tmp/state").mkdir(parents=True)  # killed while it saved, and while it logged
    with (tmp_path / "runs/part/metrics.jsonl").open("a") as file:
        file.write('{"train/step": 3, "obj')
    part = main_of(script, {**flags, "resume": tmp_path / "runs/part/checkpoint-2"})
    assert_same_run(whole, part, 4)
    assert len(set(map(str, without_times(whole / "metrics.jsonl")))) > 3 and not list(part.rglob("*.tmp"))


EVERYTHING = {
    "model": TINY,
    "ema_beta": 0.5,
    "eval_ema": True,
    "kl_coef": 0.1,
    "kl_target": 0.01,
    "kl_horizon": 20,
    "lora_rank": 4,
    "reward_running_norm": "standardize",
    "dynamic_sampling": 2,
    "max_response_length": 8,
    "eval_steps": 2,
}


@pytest.mark.slow
def test_everything_that_ppo_keeps_is_resumed(vqa, any_reward, tiny_text_model, tmp_path):
    rows = [{"prompt": f"{i}?", "response": str(i)} for i in range(5)]
    ptx = {"ptx_dataset": write_jsonl(tmp_path / "ptx.jsonl", rows), "ptx_coef": 0.5, "ptx_batch_size": 3}
    flags = {**flags_of("ppo_vl", tmp_path, tiny_text_model), **EVERYTHING, **ptx, **any_reward}
    flags |= {"dataset": vqa, "eval_dataset": vqa, "learning_rate": 1e-2}
    whole = main_of("ppo_vl", {**flags, "run_name": "whole"})
    shutil.copytree(whole, tmp_path / "runs/part")
    shutil.rmtree(tmp_path / "runs/part/checkpoint-4")
    part = main_of("ppo_vl", {**flags, "resume": "auto", "run_name": "part"})
    assert_same_run(whole, part, 4)
    steps = [m for m in read_jsonl(part / "metrics.jsonl") if "loss/ptx" in m]
    assert len({m["train/kl_coef"] for m in steps}) == 4 and steps[-1]["objective/kl"] != 0
    assert any("eval/ema_sampled_score" in m for m in steps)


@each_script
@pytest.mark.slow
def test_a_signal_ends_the_run_after_its_step_and_auto_goes_on(script, tiny_text_model, tmp_path, capfd, monkeypatch):
    """Stopped after step 1, where no checkpoint and no line of grm_sft's log is due, and once more after step 3."""
    flags = {**flags_of(script, tmp_path, tiny_text_model), "eval_steps": 2}
    whole = main_of(script, {**flags, "run_name": "whole"})
    module, calls = importlib.import_module(script), []
    step_of, per_step = module.optimizer_step, 4 * 2 if script == "ppo_vl" else 4 if script == "rloo" else 1

    def interrupted(engine):
        calls.append(1)
        if len(calls) in (1, 2 * per_step + 1):
            os.kill(os.getpid(), signal.SIGTERM if len(calls) == 1 else signal.SIGINT)
        return step_of(engine)

    monkeypatch.setattr(module, "optimizer_step", interrupted)
    flags = {**flags, "resume": "auto", "run_name": "part"}
    for step, words in ((1, "starts afresh"), (3, "checkpoint-1; flags changed since: none")):
        part = main_of(script, flags)
        out = capfd.readouterr().out
        assert words in out and f"stopped by a signal after step {step}" in out and f"checkpoint-{step}\n" in out
        assert (part / f"checkpoint-{step}/manifest.json").is_file()
    main_of(script, flags)
    assert_same_run(whole, part, 4)
    main_of(script, flags)
    assert "has done all 4 steps" in capfd.readouterr().out


def test_flags_of_today_decide_where_force_lets_them_change(tiny_text_model, tmp_path, capfd):
    flags = flags_of("reward_bt", tmp_path, tiny_text_model) | {"lr_schedule": "constant", "run_name": "run"}
    folder = main_of("reward_bt", flags)
    changed = {
        **flags,
        "resume": folder / "checkpoint-2",
        "learning_rate": 1e-4,
        "seed": 4,
        "max_steps": 5,
        "save_steps": 1,
    }
    error = error_of("reward_bt", changed, capfd)
    assert "--seed 3 -> 4, --learning-rate 0.001 -> 0.0001; use the same" in error and "--force" in error
    main_of("reward_bt", {**changed, "force": True})
    out = capfd.readouterr().out
    assert "--learning-rate 0.001 -> 0.0001, " in out and "--max-steps 4 -> 5" in out
    rates = [m["train/learning_rate"] for m in read_jsonl(folder / "metrics.jsonl") if "rm/loss" in m]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-4])


@each_script
def test_another_number_of_ranks_is_refused_with_the_way_out(script, tiny_text_model, tmp_path, capfd, monkeypatch):
    flags = flags_of(script, tmp_path, tiny_text_model) | {STEPS[script]: 1, "run_name": "run"}
    folder = main_of(script, flags)
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = error_of(script, {**flags, STEPS[script]: 2, "resume": folder / "checkpoint-1"}, capfd)
    assert "saved by 1 ranks, not 2" in error and f"--model {folder / 'checkpoint-1'}" in error


RANKS = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import json, shutil
from pathlib import Path
import test_resume
import torch.distributed as dist
dist.destroy_process_group, destroy = lambda *args: None, dist.destroy_process_group
folder, model = map(Path, sys.argv[1:3])
for script in sys.argv[3:]:
    (folder / script).mkdir(exist_ok=True)
    flags = test_resume.flags_of(script, folder / script, str(model))
    whole = test_resume.main_of(script, {{**flags, "run_name": "whole"}})
    if os.environ["RANK"] == "0":
        shutil.copytree(whole, whole.parent / "part")
        shutil.rmtree(whole.parent / "part/checkpoint-4")
    dist.barrier()
    test_resume.main_of(script, {{**flags, "run_name": "part", "resume": "auto"}})
destroy()
"""


@pytest.mark.slow
def test_two_ranks_go_on_as_if_nothing_had_happened(tiny_text_model, tmp_path):
    from test_ppo_update import torchrun

    (tmp_path / "ranks.py").write_text(RANKS.format(root=str(ROOT)))
    torchrun(2, tmp_path / "ranks.py", tmp_path, tiny_text_model, *SCRIPTS)
    for script in SCRIPTS:
        assert_same_run(*(tmp_path / script / "runs" / name for name in ("whole", "part")), 4)
        assert len(list((tmp_path / script / "runs/part/checkpoint-4/state").glob("rng_*.pt"))) == 2


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny_text_model, tmp_path_factory) -> tuple[Path, dict]:
    """A run of reward_bt with checkpoints 1, 2, 3 and 4, and its flags."""
    folder = tmp_path_factory.mktemp("finished")
    flags = flags_of("reward_bt", folder, tiny_text_model) | {"save_steps": 1, "run_name": "run"}
    return main_of("reward_bt", flags), flags


def copied(finished, tmp_path: Path) -> tuple[Path, dict]:
    shutil.copytree(finished[0], tmp_path / "runs/run")
    return tmp_path / "runs/run", {**finished[1], "output_dir": tmp_path / "runs", "max_steps": 6}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "manifest.json": lambda folder: (folder / "manifest.json").unlink(),
    "no object": lambda folder: (folder / "manifest.json").write_text('{"saved": 1, "fil'),
    "can't be read": lambda folder: (folder / "state/trainer_state.json").unlink(),
    "bytes, not": lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
    "checksum differs": lambda folder: flip_a_bit(folder / "model.safetensors"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damaged_checkpoints_are_skipped_by_auto_and_refused_by_name(words, finished, tmp_path, capfd):
    folder, flags = copied(finished, tmp_path)
    DAMAGE[words](folder / "checkpoint-4")
    words = "can't be read" if words == "no object" else words
    error = error_of("reward_bt", {**flags, "resume": folder / "checkpoint-4"}, capfd)
    assert "checkpoint-4 is no whole checkpoint" in error and words in error and "--resume auto" in error
    main_of("reward_bt", {**flags, "resume": "auto"})
    said = capfd.readouterr()
    warnings = [line for line in said.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "checkpoint-4 is skipped" in warnings[0] and words in warnings[0]
    assert "goes on from" in said.out and "checkpoint-3; flags changed since: --max-steps 4 -> 6" in said.out
    assert [m["train/step"] for m in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]


def test_auto_takes_what_was_saved_last_not_what_another_branch_left(finished, tmp_path, capfd):
    folder, flags = copied(finished, tmp_path)
    main_of("reward_bt", {**flags, "resume": folder / "checkpoint-1", "max_steps": 2})
    main_of("reward_bt", {**flags, "resume": "auto"})
    assert "goes on from" in (out := capfd.readouterr().out) and out.count("checkpoint-2; flags changed") == 1


def test_auto_needs_a_name_and_starts_afresh_where_nothing_is(finished, tmp_path, capfd):
    folder, flags = copied(finished, tmp_path)
    assert "--run-name" in error_of("reward_bt", {**flags, "resume": "auto", "run_name": None}, capfd)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    main_of("reward_bt", {**flags, "max_steps": 4, "resume": "auto"})
    assert "starts afresh" in capfd.readouterr().out
    assert_same_run(finished[0], folder, 4)


@pytest.mark.parametrize("limit, kept", [(0, [5, 6]), (1e-9, [6]), (1, [5, 6])])
def test_old_checkpoints_are_deleted_by_number_and_size(limit, kept, finished, tmp_path):
    folder, flags = copied(finished, tmp_path)
    main_of("reward_bt", {**flags, "resume": "auto", "save_total_limit": 2, "max_checkpoint_gb": limit})
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in kept]


def test_size_limit_counts_every_file(finished, tmp_path):
    module = importlib.import_module("reward_bt")
    folder, _ = copied(finished, tmp_path)
    size = sum(path.stat().st_size for path in (folder / "checkpoint-4").rglob("*") if path.is_file())
    module.delete_old_checkpoints(module.Args(save_total_limit=9, max_checkpoint_gb=2.5 * size / 1e9), folder, 4)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


# --- disks and locks -------------------------------------------------------------------------------------------------


@each_script
@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(script, tiny_text_model, tmp_path, capfd):
    flags = flags_of(script, tmp_path, tiny_text_model) | {STEPS[script]: 1, "run_name": "run"}
    folder = main_of(script, flags)
    flags |= {STEPS[script]: 2, "resume": "auto"}
    with (folder / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "in use by another run" in error_of(script, flags, capfd)
    main_of(script, flags)


@each_script
@pytest.mark.parametrize("place", ["torch.save", "metrics.jsonl", "manifest.json", "config.json"])
@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(
    place, script, tiny_text_model, tmp_path, capfd, monkeypatch
):
    module = importlib.import_module(script)
    flags = flags_of(script, tmp_path, tiny_text_model) | {STEPS[script]: 1, "run_name": "run"}
    folder = main_of(script, flags)

    def refuse(*args, **kwargs):
        if place == "torch.save":  # how torch tells it
            raise RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if place == "torch.save":
            patch.setattr(torch, "save", refuse)
        else:
            opened = Path.open

            def open_full(path, mode="r", *args, **kwargs):
                return opened(path, mode, *args, **kwargs) if path.name != place or "r" in mode else refuse()

            patch.setattr(Path, "open", open_full)
            if place == "config.json":
                patch.setattr("transformers.PreTrainedModel.save_pretrained", refuse)
        error = error_of(script, {**flags, STEPS[script]: 2, "resume": "auto"}, capfd)
    named = "metrics.jsonl" if place == "metrics.jsonl" else "checkpoint-2.tmp"
    assert named in error and "can't be written" in error and "--resume" in error
    assert "No space left" in error or "failed writing" in error
    assert module.checkpoint_damage(folder / "checkpoint-1") is None and not (folder / "checkpoint-2").exists()
    main_of(script, {**flags, STEPS[script]: 2, "resume": "auto"})


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_folder_that_is_read_only(where, finished, tmp_path, capfd, monkeypatch):
    """From the start, or since the run's folder was made. Root may write everywhere, but not what the system refuses."""
    folder, flags = copied(finished, tmp_path)

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if where == "before":
        made = Path.mkdir
        monkeypatch.setattr(
            Path, "mkdir", lambda path, *a, **k: refuse(path) if folder.parent in path.parents else made(path, *a, **k)
        )
        flags = {**flags, "run_name": "new"}
    else:
        opened = Path.open
        monkeypatch.setattr(
            Path, "open", lambda path, mode="r", *a, **k: opened(path, mode, *a, **k) if "r" in mode else refuse(path)
        )
        flags = {**flags, "resume": "auto"}
    error = error_of("reward_bt", flags, capfd)
    assert "Permission denied" in error and "can't be written" in error and str(folder.parent) in error
    assert not (folder.parent / "new").exists()


def test_a_folder_below_a_file_is_refused(finished, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    flags = {**finished[1], "output_dir": tmp_path / "file/runs", "run_name": "run"}
    error = error_of("reward_bt", flags, capfd)
    assert str(tmp_path / "file") in error


# --- signals and kills, in processes of their own --------------------------------------------------------------------

DRIVER = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import json, pathlib, test_resume
script, flags = json.loads(pathlib.Path(__file__).with_name("run.json").read_text())
test_resume.main_of(script, flags)
"""


def start(script: str, flags: dict, folder: Path, launcher: tuple = ()) -> subprocess.Popen:
    (folder / "driver.py").write_text(DRIVER.format(root=str(ROOT)))
    (folder / "run.json").write_text(json.dumps([script, flags], default=str))
    words, env = [sys.executable, *launcher, folder / "driver.py"], {**os.environ, "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def wait_for(condition, process, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.02)


def endless(script: str, folder: Path, text_model: str) -> tuple[dict, Path]:
    """Flags of a run that takes long enough to be stopped, and its metrics."""
    flags = flags_of(script, folder, text_model) | {STEPS[script]: 100_000, "eval_steps": 0, "save_steps": 0}
    return {**flags, "run_name": "run"}, folder / "runs/run/metrics.jsonl"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_from_outside_saves_and_exits_0(number, tiny_text_model, tmp_path):
    flags, metrics = endless("reward_bt", tmp_path, tiny_text_model)
    process = start("reward_bt", flags, tmp_path)
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and number.name in out and "stopped by a signal after step" in out, out[-3000:]
    [saved] = metrics.parent.glob("checkpoint-*")
    step = int(saved.name.removeprefix("checkpoint-"))
    assert read_jsonl(metrics)[-1]["train/step"] == step
    assert importlib.import_module("reward_bt").checkpoint_damage(saved) is None


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tiny_text_model, tmp_path):
    """The first one waits for the end of a step, which takes a minute: the reward sleeps in its fourth call."""
    flags, metrics = endless("rloo", tmp_path, tiny_text_model)
    Path(flags["rewards"][0].split(":")[0]).write_text(
        "import time\ncalls = []\n\ndef score(completion_ids, **columns):\n    calls.append(1)\n"
        f"    if len(calls) == 6:\n        open({str(tmp_path / 'slow')!r}, 'w').close()\n        time.sleep(60)\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    process = start("rloo", flags, tmp_path)
    wait_for((tmp_path / "slow").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 5 and "Traceback" not in out, out[-3000:]
    assert not list(metrics.parent.glob("checkpoint-*"))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port")


def launcher_of(name: str) -> tuple:
    from test_ppo_update import free_port

    return TORCHRUN if name == "torchrun" else (*DEEPSPEED, free_port())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["rloo"])
def test_two_ranks_stop_together(script, tiny_text_model, tmp_path):
    """SIGTERM to the launcher, as from a cluster: it hands it on, and both ranks save after the same step."""
    flags, metrics = endless(script, tmp_path, tiny_text_model)
    process = start(script, flags, tmp_path, TORCHRUN)
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "stopped by a signal after step" in out and out.count("the run saves and ends") == 1, out[-3000:]
    [saved] = metrics.parent.glob("checkpoint-*")
    assert importlib.import_module(script).checkpoint_damage(saved) is None
    assert len(list(saved.glob("state/rng_*.pt"))) == 2


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Rank -> process id, of what a launcher started."""
    import psutil

    children = [child for child in psutil.Process(process.pid).children(recursive=True) if child.environ().get("RANK")]
    return {int(child.environ()["RANK"]): child.pid for child in reversed(children)}


@pytest.mark.slow
@pytest.mark.parametrize("launcher, rank", [("torchrun", 0), ("deepspeed", 1)])
def test_a_rank_that_dies_ends_the_others(launcher, rank, tiny_text_model, tmp_path):
    flags, metrics = endless("rloo", tmp_path, tiny_text_model)
    process = start("rloo", flags, tmp_path, launcher_of(launcher))
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, process)
    ranks, began = ranks_of(process), time.monotonic()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[rank], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert time.monotonic() - began < 60 and process.returncode != 0
    assert "SIGKILL" in out or "exitcode: -9" in out or "return code = -9" in out, out[-3000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert f"rank {1 - rank} ends" in out or "Traceback" not in out.split("Root Cause")[0], out[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("launcher, rank", [("torchrun", 1), ("deepspeed", 0)])
def test_a_rank_that_fails_alone_ends_the_others_with_its_sentence(launcher, rank, tiny_text_model, tmp_path):
    """Its reward raises, while the other one waits for its share of the rollout."""
    flags, metrics = endless("rloo", tmp_path, tiny_text_model)
    Path(flags["rewards"][0].split(":")[0]).write_text(
        "import os, time\ncalls = []\n\ndef score(completion_ids, **columns):\n    calls.append(1)\n"
        f"    if len(calls) == 5 and os.environ['RANK'] == '{rank}':\n"
        f"        open({str(tmp_path / 'time')!r}, 'w').write(str(time.monotonic()))\n        raise ValueError('no more')\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    process = start("rloo", flags, tmp_path, launcher_of(launcher))
    out, _ = process.communicate(timeout=300)
    assert time.monotonic() - float((tmp_path / "time").read_text()) < 60 and process.returncode != 0
    assert out.count("error: reward function score raised ValueError: no more") == 1, out[-3000:]
    assert f"rank {1 - rank} ends" in out and "no more" not in out.split("error: ")[0], out[-3000:]


@pytest.mark.slow
def test_all_ranks_that_fail_alike_say_it_once(tiny_text_model, tmp_path):
    flags, _ = endless("rloo", tmp_path, tiny_text_model)
    out, _ = start("rloo", {**flags, "learning_rate": -1}, tmp_path, TORCHRUN).communicate(timeout=120)
    assert out.count("error: --learning-rate") == 1
    out, _ = start("rloo", {**flags, "max_prompt_length": 1}, tmp_path, TORCHRUN).communicate(timeout=120)
    assert out.count("error: all 16 rows") == 1


KILLS = """
import importlib, json, os, pathlib, random, signal, sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import test_resume, torch, transformers
torch.set_num_threads(1)
runs, draw = json.loads(sys.argv[1]), random.Random(0)

def go(script, flags, name):
    child = os.fork()  # all is imported already: a run starts in a fraction of a second
    if child == 0:
        try:
            test_resume.main_of(script, {{**flags, "resume": "auto", "run_name": name}})
            os._exit(0)
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
    return child

for script, _, _, _ in runs:
    importlib.import_module(script)
for script, flags, steps, kills in runs:
    began, child = time.monotonic(), go(script, flags, "whole")
    while not os.path.exists(flags["output_dir"] + "/whole/metrics.jsonl"):
        time.sleep(0.01)
    setup = time.monotonic() - began
    assert os.waitpid(child, 0)[1] == 0
    step = (time.monotonic() - began - setup) / steps
    metrics = pathlib.Path(flags["output_dir"], "part/metrics.jsonl")
    lines = lambda: len(metrics.read_text().splitlines()) if metrics.exists() else 0
    for number in range(kills):
        before, child = lines(), go(script, flags, "part")
        starting = draw.uniform(0, setup) if number % 3 == 0 else 1000  # a third of them while it starts, if it takes so long
        end = time.monotonic() + starting
        while lines() <= before and time.monotonic() < end:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), (script, number)
            time.sleep(0.005)
        time.sleep(0 if time.monotonic() > end else draw.uniform(0, 1) * step)  # in a step, or while it saves
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert status == signal.SIGKILL, (status, script, number)
        print("killed", script, number, lines(), flush=True)
    assert os.waitpid(go(script, flags, "part"), 0)[1] == 0
"""


@pytest.mark.slow
def test_thirty_kills_at_random_moments_change_nothing(tiny_text_model, tmp_path):
    runs, steps = [], 16
    for script, kills in zip(SCRIPTS, (8, 8, 7, 7)):
        (tmp_path / script).mkdir()
        flags = flags_of(script, tmp_path / script, tiny_text_model)
        flags |= {STEPS[script]: steps, "save_steps": 1, "eval_steps": 8}
        runs.append((script, flags, steps, kills))
    (tmp_path / "kills.py").write_text(KILLS.format(root=str(ROOT)))
    words = [sys.executable, str(tmp_path / "kills.py"), json.dumps(runs, default=str)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    assert result.stdout.count("killed") == 30 and "is skipped" not in result.stderr
    for script in SCRIPTS:
        assert_same_run(*(tmp_path / script / "runs" / name for name in ("whole", "part")), steps)
