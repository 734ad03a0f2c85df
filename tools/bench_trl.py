"""The TRL side of the benchmarks: run one job with TRL's own trainer and write what every step took.

    python tools/bench_trl.py --job job.json --out result.json

TRL wants an environment of its own (trl 1.16.0, transformers 5.19.0, torch 2.13.0, torchvision 0.28.0, datasets 5.2.0,
accelerate 1.15.0); this script runs under that environment's python, as a child process, and needs nothing else of this
project than `common`. fp32 on the CPU, no gradient checkpointing, AdamW, gradients clipped at 1.0, constant learning
rate, one optimizer step per batch, nothing logged anywhere, nothing saved. Everything else is TRL's default.

Fields of every job (those without a default are required):
    job                    "rloo", "reward" or "sft"
    model                  folder of the model and its tokenizer or processor
    steps                  optimizer steps; the first one warms up, leave it out of averages
    micro_rows             rows (pairs for "reward") of one forward and backward; default: the whole batch. What is best for
                           RLOOTrainer: the whole batch for tiny_vl (32 to 256 rows: the same within 5 %), 4 for SmolLM2
                           (16 rows of 170 + 64 tokens, one thread, CPU seconds of a step and peak GB: 2 rows 81 s, 3.6;
                           4 rows 78 s, 5.0; 8 rows 80 s, 7.7; 16 rows 86 s, 12.3)
    seed = 0, learning_rate = 1e-6, threads = 0 (torch's choice)
    clock = "wall"         "cpu": all seconds below are those that this process computed, on all its threads
rloo:
    kind                   "text" or "vlm"
    prompts                strings, or for vlm [{"question", "image": path}]; all of them make the batch of every step
    G                      responses per prompt
    max_new_tokens, min_new_tokens = 0
    beta = 0.05
    completions            optional [[token id]], G consecutive rows per prompt: replayed instead of sampling
reward:
    pairs                  [{"prompt", "chosen", "rejected"}], plain strings, taken in order, from the start again when used up
    batch                  pairs of one optimizer step
    pad_token              optional; default: the tokenizer's
sft:
    rows                   [{"image": path, "prompt", "completion"}] or [{"image": path, "messages"}], taken like pairs;
                           the loss is on the completion (on the last message)
    batch                  rows of one optimizer step

Seconds of a step, from the end of the step before to its own end:
    seconds                all of it
    generate_seconds       rloo: padding the prompts, HF generate, cutting at the end token
    update_seconds         = logprob_seconds (rloo: the old and reference log-probs, no gradient)
                           + backward_seconds (forward, loss, backward) + optimizer_seconds (clip, step, zero)
    other_seconds          the rest: loading and decoding pictures, chat template, processor, collating, rewards
    cpu_seconds            of all threads; with the wall clock far below seconds x threads: the machine was busy with
                           something else
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401, I001  mends torchvision, so it comes before transformers
import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402

IGNORED = -100  # label of a token without loss


class StepClock(TrainerCallback):
    """Seconds and memory of every optimizer step; `parts` collects what the wrapped methods of the trainer took."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.parts: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}  # what a job wants to keep of the step that is running
        self.last_backward = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.start, self.cpu_start = self.now(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now, cpu_now, parts = self.now(), time.process_time(), self.parts
        backward = parts["training_step"] - parts["prepare"]
        optimizer = now - self.last_backward
        update = parts["logprobs"] + backward + optimizer
        self.steps.append(
            {
                "seconds": now - self.start,
                "generate_seconds": parts["generate"],
                "update_seconds": update,
                "logprob_seconds": parts["logprobs"],
                "backward_seconds": backward,
                "optimizer_seconds": optimizer,
                "other_seconds": now - self.start - parts["generate"] - update,
                "cpu_seconds": cpu_now - self.cpu_start,
                "peak_rss_bytes": memory("VmHWM"),
                **self.notes,
            }
        )
        self.parts, self.notes, self.start, self.cpu_start = defaultdict(float), {}, now, cpu_now

    def watch(self, trainer, method: str, part: str, when: Callable[[], bool] = lambda: True) -> None:
        """Replace a method of this trainer by one that is timed."""
        original = getattr(trainer, method)

        def timed(*args, **kwargs):
            if not when():
                return original(*args, **kwargs)
            start = self.now()
            result = original(*args, **kwargs)
            end = self.now()
            self.parts[part] += end - start
            if part == "training_step":
                self.last_backward = end  # of the last micro batch; the optimizer comes next
            return result

        setattr(trainer, method, timed)


def memory(field: str) -> int:
    """Bytes of VmHWM (peak) or VmRSS (now). Not ru_maxrss, which a child process inherits from its parent."""
    for line in open("/proc/self/status") if os.path.exists("/proc/self/status") else ():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def trainer_arguments(job: dict, rows: int, folder: str) -> dict[str, Any]:
    """What the three jobs share; `rows` make one optimizer step."""
    micro_rows = job.get("micro_rows") or rows
    if rows % micro_rows:
        sys.exit(f"{rows} rows do not split into micro batches of {micro_rows}")
    return {
        "output_dir": folder,
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows // micro_rows,
        "max_steps": job["steps"],
        "learning_rate": job.get("learning_rate", 1e-6),
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": job.get("seed", 0),
        "use_cpu": True,
        "bf16": False,  # TRL's own default is bf16, on a CPU too
        "gradient_checkpointing": False,  # TRL's default is True
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def make_dataset(job: dict, rows: list[dict], batch: int) -> datasets.Dataset:
    """One batch more than steps: accelerate loads a batch ahead, so that every step then loads one."""
    dataset = datasets.Dataset.from_list([rows[i % len(rows)] for i in range(batch * (job["steps"] + 1))])
    return dataset.cast_column("image", datasets.Image()) if "image" in rows[0] else dataset


def unpad(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask)]


# --- jobs ------------------------------------------------------------------------------------------------------------


def id_sum_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Any deterministic reward will do that differs between the responses of a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def rloo(job: dict, folder: str, clock: StepClock) -> tuple[trl.RLOOTrainer, dict]:
    prompts, G = job["prompts"], job["G"]
    if job["kind"] == "vlm":
        rows = [{"prompt": [{"role": "user", "content": p["question"]}], "image": p["image"]} for p in prompts]
    else:
        rows = [{"prompt": p} for p in prompts]
    arguments = trainer_arguments(job, len(prompts) * G, folder)
    del arguments["train_sampling_strategy"]  # RLOOTrainer has a sampler of its own
    trainer = trl.RLOOTrainer(
        model=job["model"],
        reward_funcs=id_sum_reward,
        args=trl.RLOOConfig(
            **arguments,
            num_generations=G,
            max_completion_length=job["max_new_tokens"],
            generation_kwargs={"min_new_tokens": job.get("min_new_tokens", 0)},
            beta=job.get("beta", 0.05),
            num_iterations=1,
            shuffle_dataset=False,
        ),
        train_dataset=make_dataset(job, rows, len(rows)),
        callbacks=[clock],
    )
    if "completions" in job:
        completions = job["completions"]
        if len(completions) != len(prompts) * G:
            sys.exit(f"{len(completions)} completions for {len(prompts)} prompts x {G}")
        trainer._generate_single_turn = lambda prompt_ids, images, fields: [list(ids) for ids in completions]
    result: dict[str, Any] = {}
    score = trainer._generate_and_score_completions

    def keep_scores(inputs):
        output = score(inputs)
        result["prompt_ids"] = unpad(output["prompt_ids"], output["prompt_mask"])[::G]
        result["completion_ids"] = unpad(output["completion_ids"], output["completion_mask"])
        masks = output["prompt_mask"], output["completion_mask"]
        clock.notes["tokens"] = sum(int(mask.sum()) for mask in masks)
        clock.notes["padded_tokens"] = sum(mask.numel() for mask in masks)
        clock.notes["advantages"] = output["advantages"].tolist()
        clock.notes["old_logprobs"] = output["old_logps"].tolist()
        return output

    trainer._generate_and_score_completions = keep_scores
    clock.watch(trainer, "_generate_single_turn", "generate")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "logprobs", when=lambda: not torch.is_grad_enabled())
    return trainer, result


def reward(job: dict, folder: str, clock: StepClock) -> tuple[trl.RewardTrainer, dict]:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = job.get("pad_token") or tokenizer.pad_token or tokenizer.eos_token
    trainer = trl.RewardTrainer(
        model=job["model"],
        # No max_length: pairs beyond it would be dropped
        args=trl.RewardConfig(**trainer_arguments(job, job["batch"], folder), max_length=None),
        train_dataset=make_dataset(job, job["pairs"], job["batch"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    kept = trainer.train_dataset[: len(job["pairs"])]
    compute_loss = trainer.compute_loss

    def keep_rewards(model, inputs, return_outputs=False, num_items_in_batch=None):
        note_tokens(clock, inputs)
        loss, outputs = compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        chosen, rejected = outputs.logits.detach().flatten().chunk(2)
        clock.notes.setdefault("chosen_rewards", []).extend(chosen.tolist())
        clock.notes.setdefault("rejected_rewards", []).extend(rejected.tolist())
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = keep_rewards
    return trainer, {
        "chosen_ids": kept["chosen_ids"],
        "rejected_ids": kept["rejected_ids"],
        "pad_token_id": tokenizer.pad_token_id,
        "score_weight": trainer.model.score.weight.detach().flatten().tolist(),
    }


def sft(job: dict, folder: str, clock: StepClock) -> tuple[trl.SFTTrainer, dict]:
    rows = []
    for row in job["rows"]:
        if "messages" in row:
            prompt, completion = row["messages"][:-1], row["messages"][-1:]
        else:
            prompt = [{"role": "user", "content": row["prompt"]}]
            completion = [{"role": "assistant", "content": row["completion"]}]
        rows.append({"prompt": prompt, "completion": completion, "image": row["image"]})
    trainer = trl.SFTTrainer(
        model=job["model"],
        args=trl.SFTConfig(**trainer_arguments(job, job["batch"], folder), completion_only_loss=True, max_length=None),
        train_dataset=make_dataset(job, rows, job["batch"]),
        callbacks=[clock],
    )
    result: dict[str, Any] = {"input_ids": [], "labels": []}
    compute_loss = trainer.compute_loss

    def keep_batch(model, inputs, **kwargs):
        note_tokens(clock, inputs)
        clock.notes["label_tokens"] = clock.notes.get("label_tokens", 0) + int((inputs["labels"] != IGNORED).sum())
        if not clock.steps:
            result["input_ids"] += unpad(inputs["input_ids"], inputs["attention_mask"])
            result["labels"] += unpad(inputs["labels"], inputs["attention_mask"])
        return compute_loss(model, inputs, **kwargs)

    trainer.compute_loss = keep_batch
    return trainer, result


def note_tokens(clock: StepClock, inputs) -> None:
    notes = clock.notes
    notes["tokens"] = notes.get("tokens", 0) + int(inputs["attention_mask"].sum())
    notes["padded_tokens"] = notes.get("padded_tokens", 0) + inputs["input_ids"].numel()


def run(job: dict) -> dict:
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    clock = StepClock(time.process_time if job.get("clock") == "cpu" else time.perf_counter)
    with tempfile.TemporaryDirectory() as folder:
        trainer, result = {"rloo": rloo, "reward": reward, "sft": sft}[job["job"]](job, folder, clock)
        trainer.remove_callback(PrinterCallback)
        clock.watch(trainer, "_prepare_inputs", "prepare")
        clock.watch(trainer, "training_step", "training_step")
        before = memory("VmRSS")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, entry in zip(clock.steps, logged, strict=True):
        wanted = ("loss", "grad_norm", "kl", "entropy", "reward", "accuracy")
        step.update({name: float(entry[name]) for name in wanted if entry.get(name) is not None})
        if "batch" in job:
            step["samples_per_second"] = job["batch"] / step["seconds"]
    packages = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    return {
        "job": job["job"],
        "packages": packages,
        "threads": torch.get_num_threads(),
        "clock": job.get("clock", "wall"),
        "micro_rows": trainer.args.per_device_train_batch_size,
        "rss_before_bytes": before,
        "peak_rss_bytes": memory("VmHWM"),
        "steps": clock.steps,
        **result,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", required=True, type=Path, help="JSON file")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    options = parser.parse_args()
    options.out.write_text(json.dumps(run(json.loads(options.job.read_text()))))
