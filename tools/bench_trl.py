"""The TRL side of tools/bench.py: runs one job with TRL's trainer, one step per request of the parent process.

    python tools/bench_trl.py job.json

It needs a separate environment with requirements.txt, trl 1.16.0 and accelerate 1.15.0. fp32 on the CPU, bf16 on
a GPU, no gradient checkpointing, AdamW, gradients clipped at 1.0, constant learning rate, one optimizer step per
batch, nothing logged or saved. Everything else is TRL's default.

Fields of a job; all are required unless a default is given:
    script      rloo, reward_bt or grm_sft: the script to compare with
    flags       flags of the script; TRL uses model, learning_rate and kl_coef
    steps, seed, threads (0: torch's default), clock (wall or cpu)
    trl_rows    rows in TRL's format; all of them are the batch of every step
    micro_rows  rows (pairs) per forward and backward; default: the whole batch. Fastest for RLOOTrainer:
                the whole batch for tiny_vl (32 to 256 rows: equal within 5 %), 4 for SmolLM2 (16 rows of
                170 + 64 tokens, one thread, CPU seconds per step and peak GB: 2 rows 81 s, 3.6; 4 rows 78 s,
                5.0; 8 rows 80 s, 7.7; 16 rows 86 s, 12.3)
    G, R, full_length    rloo: responses per prompt, their maximum length, and whether all have that length
    replay      rloo: train on the responses that the script sampled in the same step, sent by the parent
    pad_token   reward_bt: used if the tokenizer has it

The answer after a step: seconds (the whole step), update_seconds (rloo: everything except generation, rewards and
processing of images and texts; else forward, backward and optimizer), peak memory, loss, gradient norm.
"""

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401, I001  repairs torchvision, so it comes before transformers
import torch  # noqa: E402
import transformers  # noqa: E402


class Turns:
    """Lets processes work by turns: each sends its measurements to the parent and waits for the reply."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # all other output goes to stderr

    def next(self, measured: dict) -> dict:
        print(json.dumps(measured | {"peak_bytes": peak_memory()}), file=self.answers, flush=True)
        return json.loads(sys.stdin.readline())


def peak_memory() -> int:
    """Peak resident memory in bytes. (A child process would inherit ru_maxrss from its parent.)"""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def id_sum_reward(completion_ids: list[list[int]], **columns) -> list[float]:
    """A deterministic reward that differs between the responses of a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class StepClock(transformers.TrainerCallback):
    """Times every optimizer step; `elapsed` sums the seconds of the watched methods of the trainer."""

    def __init__(self, clock: str):
        self.now = time.process_time if clock == "cpu" else time.perf_counter
        self.turns = Turns()
        self.elapsed = defaultdict(float)
        self.notes = {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.message = self.turns.next({"ready": True})
        self.start = self.now()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = self.now()
        elapsed = self.elapsed
        update = (
            elapsed["logprobs"] + elapsed["training_step"] - elapsed["prepare"] + now - self.last_backward
        )
        self.step = {"seconds": now - self.start, "update_seconds": update, **self.notes}

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        self.elapsed = defaultdict(float)
        self.message = self.turns.next(
            self.step | {name: float(logs[name]) for name in ("loss", "grad_norm")}
        )
        self.start = self.now()

    def watch(self, trainer, method: str, part: str, when=lambda: True) -> None:
        """Replace a method of the trainer by a timed one."""
        original = getattr(trainer, method)

        def timed(*args, **kwargs):
            start = self.now()
            result = original(*args, **kwargs)
            self.last_backward = self.now()  # after the last training_step, the optimizer steps
            self.elapsed[part] += self.last_backward - start if when() else 0.0
            return result

        setattr(trainer, method, timed)


def trainer_arguments(job: dict, rows: int, output_dir: str) -> dict:
    """Arguments that the three trainers share, with `rows` rows per optimizer step."""
    micro_rows = job.get("micro_rows") or rows
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows // micro_rows,
        "max_steps": job["steps"],
        "learning_rate": job["flags"]["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": job["seed"],
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),  # as in our scripts; TRL's default is bf16, even on a CPU
        "gradient_checkpointing": False,  # TRL's default is True
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def make_dataset(job: dict):
    """One batch more than steps, because accelerate prefetches one: then every step loads a batch."""
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(job["trl_rows"] * (job["steps"] + 1))
    return dataset.cast_column("image", datasets.Image()) if "image" in job["trl_rows"][0] else dataset


def rloo(job: dict, output_dir: str, clock: StepClock):
    import trl

    G = job["G"]
    config = trl.RLOOConfig(
        **trainer_arguments(job, len(job["trl_rows"]) * G, output_dir),
        num_generations=G,
        max_completion_length=job["R"],
        generation_kwargs={"min_new_tokens": job["R"] if job.get("full_length") else 0},
        beta=job["flags"]["kl_coef"],
        num_iterations=1,
        shuffle_dataset=False,
    )
    trainer = trl.RLOOTrainer(
        model=job["flags"]["model"],
        reward_funcs=id_sum_reward,
        args=config,
        train_dataset=make_dataset(job),
        callbacks=[clock],
    )
    if job.get("replay"):
        trainer._generate_single_turn = lambda *inputs: clock.message["completions"]
    score = trainer._generate_and_score_completions

    def keep_prompts(inputs):
        output = score(inputs)
        padded = zip(output["prompt_ids"], output["prompt_mask"].bool())
        clock.notes["prompt_ids"] = [ids[mask].tolist() for ids, mask in padded][::G]
        return output

    trainer._generate_and_score_completions = keep_prompts
    no_grad = lambda: not torch.is_grad_enabled()  # noqa: E731
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "logprobs", no_grad)
    return trainer


def reward_bt(job: dict, output_dir: str, clock: StepClock):
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(job["flags"]["model"])
    if job["pad_token"] in tokenizer.get_vocab():
        tokenizer.pad_token = job["pad_token"]
    else:
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    fields = trainer_arguments(job, len(job["trl_rows"]), output_dir)
    fields |= {"train_sampling_strategy": "sequential", "max_length": None}  # None: rows are never dropped
    return trl.RewardTrainer(
        model=job["flags"]["model"],
        args=trl.RewardConfig(**fields),
        train_dataset=make_dataset(job),
        processing_class=tokenizer,
        callbacks=[clock],
    )


def grm_sft(job: dict, output_dir: str, clock: StepClock):
    import trl

    fields = trainer_arguments(job, len(job["trl_rows"]), output_dir)
    fields |= {"train_sampling_strategy": "sequential", "completion_only_loss": True, "max_length": None}
    return trl.SFTTrainer(
        model=job["flags"]["model"],
        args=trl.SFTConfig(**fields),
        train_dataset=make_dataset(job),
        callbacks=[clock],
    )


def main(job: dict) -> None:
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    clock = StepClock(job["clock"])
    make_trainer = {"rloo": rloo, "reward_bt": reward_bt, "grm_sft": grm_sft}[job["script"]]
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(job, output_dir, clock)
        trainer.remove_callback(transformers.PrinterCallback)
        clock.watch(trainer, "_prepare_inputs", "prepare")
        clock.watch(trainer, "training_step", "training_step")
        trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
