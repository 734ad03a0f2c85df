"""The TRL side of tools/bench.py: one job with TRL's own trainer, a step whenever the parent says so.

    python tools/bench_trl.py job.json

It wants an environment of its own (trl 1.16.0, transformers 5.19.0, torch 2.13.0, torchvision 0.28.0,
datasets 5.2.0, accelerate 1.15.0). fp32 on the CPU, bf16 on a GPU, no gradient checkpointing, AdamW, gradients
clipped at 1.0, constant learning rate, one optimizer step per batch, nothing logged or saved. All else is TRL's
default.

Fields of a job, those without a default are required:
    script      rloo, reward_bt or grm_sft: the script of ours that it is compared with
    flags       of our side; TRL takes model, learning_rate and kl_coef
    steps, seed, threads (0: torch's choice), clock (wall, cpu)
    trl_rows    rows as TRL wants them, all of which make the batch of every step
    micro_rows  rows (pairs) of one forward and backward; default: the whole batch. Fastest for RLOOTrainer:
                the whole batch for tiny_vl (32 to 256 rows: the same within 5 %), 4 for SmolLM2 (16 rows of
                170 + 64 tokens, one thread, CPU seconds of a step and peak GB: 2 rows 81 s, 3.6; 4 rows 78 s,
                5.0; 8 rows 80 s, 7.7; 16 rows 86 s, 12.3)
    G, R, full_length    rloo: responses per prompt, their longest length, and whether all shall have it
    replay      rloo: train on the responses that our side sampled in the same step, which the parent sends
    pad_token   reward_bt: if the tokenizer knows it

What is answered after a step: seconds (all of it), update_seconds (rloo: all but generation, rewards and the
preparation of pictures and texts; else forward, backward and optimizer), peak memory, loss, gradient norm.
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
import common  # noqa: E402, F401, I001  mends torchvision, so it comes before transformers
import torch  # noqa: E402
import transformers  # noqa: E402


class Turns:
    """Processes that work by turns: each answers the parent with what it has done, and waits for a line."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what else is printed goes to stderr

    def next(self, done: dict) -> dict:
        print(json.dumps(done | {"peak_bytes": peak_memory()}), file=self.answers, flush=True)
        return json.loads(sys.stdin.readline())


def peak_memory() -> int:
    """Bytes. Not ru_maxrss, which a child process inherits from its parent."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def id_sum_reward(completion_ids: list[list[int]], **columns) -> list[float]:
    """Any deterministic reward will do that differs between the responses of a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class StepClock(transformers.TrainerCallback):
    """Times every optimizer step; `spent` collects what the watched methods of the trainer took."""

    def __init__(self, clock: str):
        self.now = time.process_time if clock == "cpu" else time.perf_counter
        self.turns, self.spent, self.notes = Turns(), defaultdict(float), {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.message, self.start = self.turns.next({"ready": True}), self.now()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now, spent = self.now(), self.spent
        update = spent["logprobs"] + spent["training_step"] - spent["prepare"] + now - self.last_backward
        self.step = {"seconds": now - self.start, "update_seconds": update, **self.notes}

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        done = self.step | {name: float(logs[name]) for name in ("loss", "grad_norm")}
        self.spent, self.message = defaultdict(float), self.turns.next(done)
        self.start = self.now()

    def watch(self, trainer, method: str, part: str, when=lambda: True) -> None:
        """Replace a method of this trainer by one that is timed."""
        original = getattr(trainer, method)

        def timed(*args, **kwargs):
            start = self.now()
            result = original(*args, **kwargs)
            self.last_backward = self.now()  # that of the last training_step: the optimizer comes next
            self.spent[part] += self.last_backward - start if when() else 0.0
            return result

        setattr(trainer, method, timed)


def trainer_arguments(job: dict, rows: int, folder: str) -> dict:
    """What the three jobs share; `rows` make one optimizer step."""
    micro_rows = job.get("micro_rows") or rows
    return {
        "output_dir": folder,
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows // micro_rows,
        "max_steps": job["steps"],
        "learning_rate": job["flags"]["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": job["seed"],
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),  # as our scripts; TRL's own default is bf16, on a CPU too
        "gradient_checkpointing": False,  # TRL's default is True
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def make_dataset(job: dict):
    """One batch more than steps: accelerate loads a batch ahead, so that every step then loads one."""
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(job["trl_rows"] * (job["steps"] + 1))
    return dataset.cast_column("image", datasets.Image()) if "image" in job["trl_rows"][0] else dataset


def rloo(job: dict, folder: str, clock: StepClock):
    import trl

    G = job["G"]
    config = trl.RLOOConfig(
        **trainer_arguments(job, len(job["trl_rows"]) * G, folder),
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


def reward_bt(job: dict, folder: str, clock: StepClock):
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(job["flags"]["model"])
    known = job["pad_token"] in tokenizer.get_vocab()
    tokenizer.pad_token = job["pad_token"] if known else tokenizer.pad_token or tokenizer.eos_token
    own = trainer_arguments(job, len(job["trl_rows"]), folder)
    return trl.RewardTrainer(
        model=job["flags"]["model"],
        args=trl.RewardConfig(
            **own, train_sampling_strategy="sequential", max_length=None
        ),  # none are dropped
        train_dataset=make_dataset(job),
        processing_class=tokenizer,
        callbacks=[clock],
    )


def grm_sft(job: dict, folder: str, clock: StepClock):
    import trl

    own = trainer_arguments(job, len(job["trl_rows"]), folder)
    own |= {"train_sampling_strategy": "sequential", "completion_only_loss": True, "max_length": None}
    return trl.SFTTrainer(
        model=job["flags"]["model"],
        args=trl.SFTConfig(**own),
        train_dataset=make_dataset(job),
        callbacks=[clock],
    )


def main(job: dict) -> None:
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    clock = StepClock(job["clock"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = {"rloo": rloo, "reward_bt": reward_bt, "grm_sft": grm_sft}[job["script"]](
            job, folder, clock
        )
        trainer.remove_callback(transformers.PrinterCallback)
        clock.watch(trainer, "_prepare_inputs", "prepare")
        clock.watch(trainer, "training_step", "training_step")
        trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
