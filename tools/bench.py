"""Compare the scripts with TRL's trainers on one machine: step times, memory, learning curves.

    python tools/bench.py rloo --trl-python TRL/bin/python                  # one part
    python tools/bench.py rloo reward sft learning --trl-python TRL/bin/python \\
        --text-model models/smollm2 --threads 1 --output runs/bench         # all

rloo      rloo.py and RLOOTrainer, sampling with the same model
reward    reward_bt.py and RewardTrainer
sft       grm_sft.py and SFTTrainer
learning  rloo.py and RLOOTrainer train the tiny VLM with the same data, rewards, batches and schedule. Both save
          their weights ten times, and the evaluation of rloo.py scores all of them on the same prompts.
          Seconds are those of the training steps only.

--trl-python needs an environment with requirements.txt and trl 1.16.0. Both sides run in one process each. In all
parts except learning they alternate steps, so that other load on the machine slows both; reported ratios are
medians of the ratios of single steps. "cleanrft" is our side.

TRL runs with fp32 on the CPU, bf16 on a GPU, no gradient checkpointing, AdamW, gradients clipped at 1.0, one optimizer
step per batch, nothing logged. Everything else is TRL's default. Its rows per forward pass (micro_rows) are those
that were fastest: for the tiny VLM the whole batch, for SmolLM2 4 rows.
"""

import itertools
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Literal

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common.chats  # noqa: E402, I001  repairs torchvision, so it comes before transformers
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import tyro  # noqa: E402

SIDES = ("cleanrft", "trl")
COLORS = {"trl": "#d9772b", "cleanrft": "#2b6cb0"}
Part = Literal["rloo", "reward", "sft", "learning"]


@dataclass
class Args:
    parts: tyro.conf.Positional[tuple[Part, ...]] = ()  # Parts to measure.
    cases: tuple[str, ...] = ()  # Measure only these cases, such as text_200 or pairs_100.
    trl_python: str = "python"  # Python of the environment that has TRL.
    text_model: str = "models/smollm2"  # Model directory made by tools/make_smollm2.py.
    vlm: str = "assets/tiny_vl"  # Directory of the vision-language model.
    steps: int = 3  # Timed steps, after one that is not timed; reward_bt.py's cases time two.
    threads: int = 0  # Number of CPU threads; 0 is torch's default. learning uses one thread per side.
    seeds: tuple[int, ...] = (1, 2, 3)  # Random seeds of learning; the other parts use the first one.
    output: str = "runs/bench"  # Directory for results.json, the plot and the runs of learning.
    child: tuple[str, ...] = ()  # Internal: run one side in this process.


# ---- cases: flags and rows of our script, and the job of TRL's trainer ----

CONSTANT = {"learning_rate": 1e-6, "min_lr_ratio": 1.0, "warmup_updates": 0}
NEVER_SAMPLED = 10**9  # a token id outside of the vocabulary: as EOS, it makes all responses full-length


def words(args: Args, count: int, about: int, spread: int = 5) -> list[str]:
    """`count` texts of about `about` words, each `spread` words longer than the previous one.

    Each word is one token of SmolLM2."""
    rng = random.Random(args.seeds[0])
    text = (
        "the old river was cold and a small boat went down past green hills under light rain to its home town"
    )
    return [" ".join(rng.choices(text.split(), k=about + spread * i)) for i in range(count)]


def easy_vqa_rows(count: int, by_image: bool = False) -> list[dict]:
    """Questions about different images, or all questions about the first images."""
    import easy_vqa

    questions, answers, image_ids = easy_vqa.get_train_questions()
    paths = easy_vqa.get_train_image_paths()
    if by_image:
        order = sorted(range(len(image_ids)), key=lambda i: image_ids[i])
    else:
        order = [*{image_id: i for i, image_id in reversed([*enumerate(image_ids)])}.values()]
    rows = []
    for i in order[:count]:
        rows.append({"prompt": questions[i], "image": str(paths[image_ids[i]]), "answer": answers[i]})
    return rows


def chat(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def id_sum_reward(completion_ids: list[list[int]], **columns) -> list[float]:
    """A deterministic reward that differs between the responses of a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def rloo_case(
    model: str, rows: list[dict], G: int = 8, R: int = 24, packs: int = 8192, lora_rank: int = 0, **fields
) -> dict:
    """One optimizer step per rollout of all rows, in packs of at most `packs` tokens."""
    flags = dict(model=model, prompts_per_rollout=len(rows), num_samples_per_prompt=G)
    flags |= dict(train_batch_size=len(rows) * G, max_response_length=R, max_prompt_length=768, num_epochs=1)
    flags |= dict(micro_batch_tokens=packs, kl_coef=0.05, reward_weights=(1.0,)) | CONSTANT
    flags |= dict(lora_rank=lora_rank, rewards=(f"{Path(__file__)}:id_sum_reward",))
    trl_rows = [{**row, "prompt": chat("user", row["prompt"])} if "image" in row else row for row in rows]
    return dict(script="rloo", flags=flags, rows=rows, trl_rows=trl_rows, G=G, R=R, **fields)


def rloo_cases(args: Args) -> dict[str, dict]:
    cases = {"vlm_64": rloo_case(args.vlm, easy_vqa_rows(64))}
    lora = dict(R=64, full_length=True, micro_rows=16, lora_rank=16)
    cases["vlm_lora"] = rloo_case(args.vlm, easy_vqa_rows(16), **lora)
    rows = [{"prompt": prompt} for prompt in words(args, 4, 190)]
    how = dict(packs=1024, R=64, full_length=True, micro_rows=4)  # a pack is a prompt's group
    cases["text_200"] = rloo_case(args.text_model, rows, **how)
    return cases


def reward_cases(args: Args) -> dict[str, dict]:
    """Rankings, best response first. TRL trains on every pair of a ranking."""
    cases = {}
    for name, count, length, n in (
        ("pairs_100", 16, 100, 2),
        ("pairs_300", 16, 300, 2),
        ("ranked_4", 4, 100, 4),
    ):
        texts = [text.split() for text in words(args, count * n, 100, spread=0)]
        lengths = [40 + 60 * (7 * i % 10) // 9 for i in range(count * n)]  # 40 to 100 words
        texts = [" " + " ".join(text[:length]) for text, length in zip(texts, lengths)]
        groups = [(p, texts[i * n :][:n]) for i, p in enumerate(words(args, count, length, spread=0))]
        pairs = [(p, *pair) for p, responses in groups for pair in itertools.combinations(responses, 2)]
        flags = dict(model=args.text_model, train_batch_size=count, micro_batch_tokens=1024) | CONSTANT
        flags |= dict(label_smoothing=0.0, max_length=512)
        cases[name] = dict(script="reward_bt", flags=flags, steps=2, micro_rows=2)
        cases[name]["rows"] = [{"prompt": p, "responses": responses} for p, responses in groups]
        cases[name]["trl_rows"] = [dict(zip(("prompt", "chosen", "rejected"), pair)) for pair in pairs]
    return cases


def sft_cases(args: Args) -> dict[str, dict]:
    """The same rows in the same order."""
    cases = {}
    for name, by_image in (("different", False), ("by_image", True)):
        rows, trl_rows = [], []
        for row in easy_vqa_rows(64, by_image):
            prompt = chat("user", row["prompt"])
            completion = chat("assistant", f"<answer>{row['answer']}</answer>")
            rows.append({"messages": prompt + completion, "image": row["image"]})
            trl_rows.append({"prompt": prompt, "completion": completion, "image": row["image"]})
        flags = dict(model=args.vlm, train_batch_size=64, freeze="") | CONSTANT
        cases[name] = dict(script="grm_sft", flags=flags, rows=rows, trl_rows=trl_rows)
    return cases


CASES = {"rloo": rloo_cases, "reward": reward_cases, "sft": sft_cases}


# ---- two processes that alternate steps ----


class Turns:
    """Lets processes work by turns: each sends its measurements to the parent and waits for the reply."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # all other output goes to stderr

    def next(self, measured: dict) -> None:
        print(json.dumps(measured | {"peak_bytes": peak_memory()}), file=self.answers, flush=True)
        sys.stdin.readline()


def peak_memory() -> int:
    """Peak memory in bytes: of tensors on the GPU, else resident. (A child inherits its parent's ru_maxrss.)"""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def run_sides(args: Args, case: dict, sides: tuple[str, ...]) -> dict[str, list[dict]]:
    """Measurements of each step of each side."""
    steps = defaultdict(list)
    running = {}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        flags = case["flags"] | {"model": copy_model(args, case, Path(folder) / "model")}
        job = case | {"steps": 1 + case.get("steps", args.steps), "flags": flags}  # the first is not timed
        job |= {"seed": args.seeds[0], "threads": args.threads}
        for side in sides:
            path = Path(folder) / f"{side}.json"
            path.write_text(json.dumps(job))
            python = sys.executable if side == "cleanrft" else args.trl_python
            running[side] = subprocess.Popen([python, __file__, "--child", side, path], **pipes)
        try:
            for side, process in running.items():  # wait until all are ready
                receive(side, process)
            for _ in range(job["steps"]):
                for side, process in running.items():
                    print(file=process.stdin, flush=True)
                    steps[side].append(receive(side, process))
                note = " · ".join(f"{side} {x[-1]['seconds']:.2f} s" for side, x in steps.items())
                print(f"{case['script']}, seconds per step: {note}", file=sys.stderr)
        finally:
            for process in running.values():  # they still wait for their next turn
                process.kill()
                process.wait()
    return steps


def receive(side: str, process: subprocess.Popen) -> dict:
    line = process.stdout.readline()
    return json.loads(line) if line else sys.exit(f"the process of side {side} ended, see its error above")


def copy_model(args: Args, case: dict, model_dir: Path) -> str:
    """Link the model's files, except the chat template: text prompts are not formatted as chats, and TRL's SFT
    would train on the newline that the tiny VLM's template adds after the EOS token."""
    model_dir.mkdir()
    for path in Path(case["flags"]["model"]).iterdir():
        if path.name != "chat_template.jinja":
            (model_dir / path.name).symlink_to(path.resolve())
        elif case["flags"]["model"] == args.vlm:
            template = path.read_text()
            if case["script"] == "grm_sft":
                template = template.replace("'<|im_end|>\\n'", "'<|im_end|>'")
            (model_dir / path.name).write_text(template)
    return str(model_dir)


def watch(module, name: str, callback) -> None:
    """Wrap a function of a module so that `callback` gets its arguments and its result."""
    function = getattr(module, name)

    def call(*inputs, **options):
        result = function(*inputs, **options)
        callback(inputs, result)
        return result

    setattr(module, name, call)


def run_cleanrft(job: dict, directory: Path) -> None:
    """Run the script's main on the rows of the case, and report the seconds that it logs."""
    turns = Turns()
    script = import_module(job["script"])
    step = {}  # the measurements of this step
    prompt_ids = {}  # row -> token ids
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in job["rows"]))
    flags = {name: tuple(x) if isinstance(x, list) else x for name, x in job["flags"].items()}
    flags |= {"dataset": str(directory / "rows.jsonl"), "output_dir": str(directory), "run_name": "run"}
    flags |= {"seed": job["seed"], "eval_steps": 0, "total_steps": job["steps"]}

    def record_prompts(inputs, responses) -> None:
        sampler, prompts, *_ = inputs
        prompt_ids.update({prompt.row_id: prompt.input_ids.tolist() for prompt in prompts})

    def finish_setup(inputs, run) -> None:
        if job.get("full_length"):
            run.sampler.eos_ids = [NEVER_SAMPLED]
        turns.next({"ready": True})

    def finish_step(inputs, result) -> None:
        metrics = next(x for x in inputs if isinstance(x, dict))
        if "time/total" not in metrics:
            return
        loss = next(metrics[name] for name in ("rm/loss", "loss/sft", "loss/policy") if name in metrics)
        step.update(seconds=metrics["time/total"], loss=loss, grad_norm=metrics["train/grad_norm"])
        step["prompt_ids"] = [ids for _, ids in sorted(prompt_ids.items())]
        turns.next(step)

    if "G" in job:
        watch(script.HFSampler, "generate", record_prompts)
    watch(script, "setup", finish_setup)
    watch(script, "log", finish_step)
    script.main(script.Args(**flags))


def compare_with_trl(args: Args, part: str) -> Iterator[dict]:
    for name, case in CASES[part](args).items():
        if args.cases and name not in args.cases:
            continue
        steps = run_sides(args, case, SIDES)
        cleanrft, trl = (steps[side][1:] for side in SIDES)  # without the warmup
        result = {"part": f"{part} {name}", **ratios(cleanrft, trl, "seconds", "step")}
        result |= ratios(cleanrft, trl, "peak_bytes", "memory")
        if steps["cleanrft"][0]["prompt_ids"] != steps["trl"][0].get("prompt_ids", []):
            sys.exit(f"case {name}: the two sides have different prompt tokens")
        yield result | {"steps": steps}


def ratios(cleanrft: list[dict], trl: list[dict], field: str, name: str) -> dict:
    """Medians over the steps of each side, and the median of the ratios trl / cleanrft of single steps."""
    a = [step[field] for step in cleanrft]
    b = [step[field] for step in trl]
    pairs = [y / x for x, y in zip(a, b)]
    median = statistics.median
    return {f"{name}_cleanrft": median(a), f"{name}_trl": median(b), f"{name}_ratio": median(pairs)}


# ---- TRL's side ----


class StepClock(transformers.TrainerCallback):
    """Times every optimizer step."""

    def __init__(self):
        self.turns = Turns()
        self.notes = {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.turns.next({"ready": True})
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.step = {"seconds": time.perf_counter() - self.start, **self.notes}

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        measured = {name: float(logs[name]) for name in ("loss", "grad_norm")}
        self.turns.next(self.step | measured)
        self.start = time.perf_counter()


def trainer_arguments(steps: int, rows: int, micro_rows: int | None, **fields) -> dict:
    """Arguments that the trainers share, with `rows` rows per optimizer step."""
    micro_rows = micro_rows or rows
    return {
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows // micro_rows,
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),  # as in our scripts; TRL's default is bf16, even on a CPU
        "gradient_checkpointing": False,  # TRL's default is True
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **fields,
    }


def run_trl(job: dict, directory: Path) -> None:
    """One step of TRL's trainer per request of the parent process."""
    import datasets

    datasets.disable_progress_bars()
    clock = StepClock()
    # One batch more than steps, because accelerate prefetches one: then every step loads a batch.
    dataset = datasets.Dataset.from_list(job["trl_rows"] * (job["steps"] + 1))
    if "image" in job["trl_rows"][0]:
        dataset = dataset.cast_column("image", datasets.Image())
    fields = trainer_arguments(
        steps=job["steps"],
        rows=len(job["trl_rows"]) * job.get("G", 1),
        micro_rows=job.get("micro_rows"),
        output_dir=str(directory / "trl"),
        learning_rate=job["flags"]["learning_rate"],
        seed=job["seed"],
    )
    shared = {"model": job["flags"]["model"], "train_dataset": dataset, "callbacks": [clock]}
    make_trainer = {"rloo": make_rloo_trainer, "reward_bt": make_reward_trainer, "grm_sft": make_sft_trainer}
    trainer = make_trainer[job["script"]](job, fields, shared, clock)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def make_rloo_trainer(job: dict, fields: dict, shared: dict, clock: StepClock):
    import peft
    import trl

    G = job["G"]
    config = trl.RLOOConfig(
        **fields,
        num_generations=G,
        max_completion_length=job["R"],
        generation_kwargs={"min_new_tokens": job["R"] if job.get("full_length") else 0},
        beta=job["flags"]["kl_coef"],
        num_iterations=1,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "bfloat16"} if job["flags"]["lora_rank"] and fields["bf16"] else None,
    )
    if rank := job["flags"]["lora_rank"]:  # the layers that the script adapts
        where = {"target_modules": "all-linear", "exclude_modules": ".*(visual|lm_head).*"}
        shared["peft_config"] = peft.LoraConfig(r=rank, lora_alpha=32, **where)
    trainer = trl.RLOOTrainer(**shared, reward_funcs=id_sum_reward, args=config)

    def keep_prompts(inputs, output: dict) -> None:
        padded = zip(output["prompt_ids"], output["prompt_mask"].bool())
        clock.notes["prompt_ids"] = [ids[mask].tolist() for ids, mask in padded][::G]

    watch(trainer, "_generate_and_score_completions", keep_prompts)
    return trainer


def make_reward_trainer(job: dict, fields: dict, shared: dict, clock: StepClock):
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(job["flags"]["model"])
    tokenizer.pad_token = "<|endoftext|>"
    fields |= {"train_sampling_strategy": "sequential", "max_length": None}  # None: rows are never dropped
    return trl.RewardTrainer(**shared, args=trl.RewardConfig(**fields), processing_class=tokenizer)


def make_sft_trainer(job: dict, fields: dict, shared: dict, clock: StepClock):
    import trl

    fields |= {"train_sampling_strategy": "sequential", "completion_only_loss": True, "max_length": None}
    return trl.SFTTrainer(**shared, args=trl.SFTConfig(**fields))


# ---- learning curves ----

ROLLOUTS = 30  # of 256 responses each
SAVES = 10  # evaluations of a run, after the first one
SCORE = "eval/sampled_score"
LEVELS = (0.8, 0.9, 0.95)  # the table has the seconds until each level is reached


def learning_args(args: Args, seed: int, **flags):
    """rloo.Args, from which TRL's arguments are derived, too."""
    rloo = import_module("rloo")
    flags = {"output_dir": args.output, "eval_steps": 0, "seed": seed, **flags}
    flags |= {"num_epochs": 2, "train_batch_size": 128}  # defaults for the tiny VLM
    flags |= {"learning_rate": 1e-4, "max_response_length": 24}
    filled = rloo.Args(model=args.vlm, total_steps=ROLLOUTS, **flags)
    rloo.fill_defaults(filled)
    return filled


def measure_learning(args: Args) -> Iterator[dict]:
    for seed in args.seeds:
        options = ["--output", args.output, "--vlm", args.vlm]
        children = []
        for side, python in zip(SIDES, (sys.executable, args.trl_python)):
            command = [python, __file__, *options, "--child", f"learn_{side}", seed]
            children.append(subprocess.Popen(list(map(str, command))))
        if any([child.wait() for child in children]):
            sys.exit("one side failed, see its error above")
    yield from evaluate_all(args)


def learn_cleanrft(args: Args, seed: int, run_dir: Path) -> list[float]:
    """Train with checkpoints; returns the seconds of each rollout with its updates."""
    rloo = import_module("rloo")
    saving = {"save_steps": ROLLOUTS // SAVES, "save_total_limit": 99, "eval_prompts": 1}
    rloo.main(learning_args(args, seed, run_name=run_dir.name, **saving))
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["time/total"] for line in lines if "time/total" in line]


class SecondsPerStep(transformers.TrainerCallback):
    """Seconds of each optimizer step, including data loading, excluding saving."""

    def __init__(self):
        self.seconds = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.start = time.perf_counter()

    on_save = on_train_begin

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.start = time.perf_counter()


def learn_trl(args: Args, seed: int, run_dir: Path) -> list[float]:
    import datasets
    import trl

    rloo = import_module("rloo")
    flags = learning_args(args, seed)
    num_mini_batches = flags.prompts_per_rollout * flags.num_samples_per_prompt // flags.train_batch_size
    updates_per_rollout = num_mini_batches * flags.num_epochs  # TRL's steps are optimizer steps
    fields = trainer_arguments(
        steps=flags.total_steps * updates_per_rollout,
        rows=flags.train_batch_size,
        micro_rows=None,
        output_dir=str(run_dir),
        seed=seed,
        learning_rate=flags.learning_rate,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": flags.min_lr_ratio},
        warmup_steps=flags.warmup_updates,
        adam_beta1=0.9,
        adam_beta2=0.95,
        save_strategy="steps",
        save_steps=ROLLOUTS // SAVES * updates_per_rollout,
        save_only_model=True,
    )
    config = trl.RLOOConfig(
        **fields,
        steps_per_generation=num_mini_batches,
        num_iterations=flags.num_epochs,
        num_generations=flags.num_samples_per_prompt,
        max_completion_length=flags.max_response_length,
        beta=flags.kl_coef,
        reward_weights=list(flags.reward_weights),
    )

    def accuracy(completions, answer, **columns) -> list[float]:
        return rloo.accuracy_reward([chat[0]["content"] for chat in completions], answer)

    def format_reward(completions, **columns) -> list[float]:
        return rloo.format_reward([chat[0]["content"] for chat in completions])

    rows = common.chats.easy_vqa_rows("train").map(lambda row: {"prompt": chat("user", row["prompt"])})
    clock = SecondsPerStep()
    trainer = trl.RLOOTrainer(
        model=flags.model,
        reward_funcs=[accuracy, format_reward],
        args=config,
        train_dataset=rows.cast_column("image", datasets.Image()),
        callbacks=[clock],
    )
    trainer.train()
    return np.reshape(clock.seconds, (flags.total_steps, -1)).sum(1).tolist()


def evaluate_all(args: Args) -> Iterator[dict]:
    """For each side and seed, the scores of all saved weights, by the evaluation of rloo.py."""
    rloo = import_module("rloo")
    flags = learning_args(args, args.seeds[0], run_name=f"evaluation-{int(time.time())}")
    run = rloo.setup(flags)
    for side, seed in itertools.product(SIDES, args.seeds):
        run_dir = Path(args.output) / f"{side}-{seed}"
        seconds = json.loads((run_dir / "seconds.json").read_text())
        points = []
        for i, checkpoint in enumerate([args.vlm, *rloo.list_checkpoints(run_dir)]):
            saved = rloo.load_model(replace(flags, model=str(checkpoint)), str(checkpoint))
            run.actor.module.model.load_state_dict(saved.state_dict())
            rollouts = i * (ROLLOUTS // SAVES)
            score = rloo.evaluate(flags, run)[0][SCORE]
            points.append({"rollouts": rollouts, "seconds": sum(seconds[:rollouts]), "score": score})
            print(f"{side}, seed {seed}: {points[-1]}", file=sys.stderr, flush=True)
        times = {f"level_{level}": seconds_to(points, level) for level in LEVELS}
        result = {"part": "learning", "side": side, "seed": str(seed), "final": points[-1]["score"], **times}
        yield result | {"points": points}


def seconds_to(points: list[dict], level: float) -> float:
    """Seconds until the curve, linear between its points, first crosses the level; infinite if it never does."""
    for a, b in itertools.pairwise(points):
        if a["score"] <= level <= b["score"]:
            fraction = (level - a["score"]) / max(b["score"] - a["score"], 1e-9)
            return a["seconds"] + fraction * (b["seconds"] - a["seconds"])
    return float("inf")


# ---- report ----


def draw_learning(results: list[dict], path: Path) -> None:
    """One line per seed. By rollouts, the curves of the two sides should coincide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, x, label in zip(panels, ("rollouts", "seconds"), ("rollouts of 256 responses", "seconds")):
        axes.grid(color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        for result in (r for r in results if r["part"] == "learning"):
            line = [[point[name] for point in result["points"]] for name in (x, "score")]
            name = {"trl": "TRL's RLOOTrainer", "cleanrft": "rloo.py"}[result["side"]]
            axes.plot(*line, "o-", color=COLORS[result["side"]], markersize=3, label=name)
        axes.set(xlim=(0, None), xlabel=label)
    panels[0].set_ylabel("evaluation score, sampled")
    lines, names = panels[0].get_legend_handles_labels()
    panels[0].legend(*zip(*{name: (line, name) for line, name in zip(lines, names)}.values()), frameon=False)
    figure.savefig(path)


def describe_machine() -> dict:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "command": shlex.join(["python", "tools/bench.py", *sys.argv[1:]]),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "cpu": names[0] if names else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def run_child(args: Args) -> None:
    name, value = args.child
    if name in SIDES:
        job = json.loads(Path(value).read_text())
        if job["threads"]:
            torch.set_num_threads(job["threads"])
        run = {"cleanrft": run_cleanrft, "trl": run_trl}[name]
        run(job, Path(value).parent)
        return
    torch.set_num_threads(1)
    side = name.removeprefix("learn_")
    run_dir = Path(args.output) / f"{side}-{value}"
    seconds = {"cleanrft": learn_cleanrft, "trl": learn_trl}[side](args, int(value), run_dir)
    (run_dir / "seconds.json").write_text(json.dumps(seconds))


def main(args: Args) -> None:
    transformers.logging.set_verbosity_error()
    if args.child:
        return run_child(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    machine, results, output = describe_machine(), [], Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        for result in measure_learning(args) if part == "learning" else compare_with_trl(args, part):
            results.append(result)  # and write it now, since a part may take an hour
            figures = {"machine": machine, "args": asdict(args), "results": results}
            (output / "results.json").write_text(json.dumps(figures, indent=1) + "\n")
            numbers = [(name, x) for name, x in result.items() if not isinstance(x, dict | list)]
            print(", ".join(f"{name} {x if isinstance(x, str) else f'{x:.4g}'}" for name, x in numbers))
            if part == "learning":
                draw_learning(results, output / "learning.png")
    if not results:
        sys.exit(f"--cases {' '.join(args.cases)}: not a case of {' '.join(args.parts)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
