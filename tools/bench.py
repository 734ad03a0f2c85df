"""Measure speed and memory of the scripts, next to a reference that runs in the same benchmark.

    python tools/bench.py memory                                   # one part, Markdown on stdout
    python tools/bench.py bare curves rloo reward sft memory --trl-python TRL/bin/python \
        --text-model models/smollm2 --threads 1 --output runs/bench     # all parts: tables, JSON, a plot

bare     everything between rollout and optimizer step of rloo.py and ppo_vl.py (default runs on the tiny VLM,
         rloo.py also on SmolLM2-135M), compared with only forward and backward of the model on the same packs,
         in the same process by turns; also, both compared with the machine's fastest matrix product
curves   time and peak memory of a step of rloo.py and of TRL by the number of responses per prompt
rloo     rloo.py and TRL's RLOOTrainer: same model, prompts, G, lengths, reward, fp32, generation with the same
         model; prompts of 200 and 600 tokens on SmolLM2-135M, images on the tiny VLM
reward   reward_bt.py and RewardTrainer on SmolLM2-135M: 16 pairs with prompts of 100 and of 300 words; and
         4 prompts with four ranked responses each, which are six pairs each for TRL
sft      grm_sft.py and SFTTrainer on the tiny VLM: 64 questions about easy-VQA images, all different, and
         grouped by image
sampler  responses of 512 and 1024 tokens on SmolLM2-135M, 4 prompts x 8: rloo.py's decoder and generate
memory   peak of only the log-probs, forward and backward, chunked and dense, with a vocabulary of 152k tokens

Our script, through its main function, and TRL's trainer (tools/bench_trl.py lists its environment) run in one
process each and alternate steps, so that other load on the machine affects both. Reported ratios are medians
of the ratios of single steps. In tables and results, "cleanrft" is our side.
"""

import importlib
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
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from bench_trl import Turns, peak_memory  # noqa: E402, I001  imports common, which repairs torchvision, so it comes first
import torch  # noqa: E402
import tyro  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from common import decoding, packing, packing_check  # noqa: E402

VOCAB_SIZE, HIDDEN_SIZE, TOKENS = 151_936, 256, 8192  # for the part memory
Part = Literal["bare", "curves", "rloo", "reward", "sft", "sampler", "memory"]


@dataclass
class Args:
    parts: tyro.conf.Positional[tuple[Part, ...]] = ()  # Parts to measure.
    cases: tuple[str, ...] = ()  # Measure only these cases, such as text_200, rloo_vlm or group_vlm.
    trl_python: str = "python"  # Python of the environment that has TRL.
    text_model: str = "models/smollm2"  # Model directory made by tools/make_smollm2.py.
    vlm: str = "assets/tiny_vl"  # Directory of the vision-language model.
    steps: int = 3  # Timed steps, after one that is not timed; cases with steps of a minute time one only.
    clock: Literal["wall", "cpu"] = "wall"  # cpu: CPU seconds of the process; requires --threads 1.
    threads: int = 0  # Number of CPU threads; 0 is torch's default.
    seed: int = 0  # Random seed.
    output: str | None = None  # Directory for results.md, results.json and curves.png.
    child: str | None = None  # Internal: measure one side in this process.


# ---- cases: flags and rows of our script, and the job of TRL's trainer ----

CONSTANT = {"learning_rate": 1e-6, "min_lr_ratio": 1.0, "warmup_steps": 0}
NEVER_SAMPLED = 10**9  # a token id outside of the vocabulary: as EOS, it makes all responses full-length


def words(args: Args, count: int, about: int, spread: int = 5) -> list[str]:
    """`count` texts of about `about` words, each `spread` words longer than the previous one.

    Each word is one token of SmolLM2."""
    rng = random.Random(args.seed)
    text = (
        "the old river was cold and a small boat went down past green hills under light rain to its home town"
    )
    return [" ".join(rng.choices(text.split(), k=about + spread * i)) for i in range(count)]


def easy_vqa_rows(count: int, by_image: bool = False) -> list[dict]:
    """Questions about different images, or all questions about the first images."""
    import easy_vqa

    questions, answers, image_ids = easy_vqa.get_train_questions()
    paths = easy_vqa.get_train_image_paths()
    first_question = {image_id: i for i, image_id in reversed([*enumerate(image_ids)])}
    if by_image:
        order = sorted(range(len(image_ids)), key=lambda i: image_ids[i])
    else:
        order = [*first_question.values()]
    rows = []
    for i in order[:count]:
        rows.append({"prompt": questions[i], "image": str(paths[image_ids[i]]), "answer": answers[i]})
    return rows


def chat(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def rloo_case(model: str, rows: list[dict], G: int = 8, R: int = 24, packs: int = 8192, **fields) -> dict:
    """One optimizer step per rollout of all rows, in packs of at most `packs` tokens."""
    size, reward = len(rows) * G, f"{Path(__file__).with_name('bench_trl.py')}:id_sum_reward"
    flags = dict(model=model, rollout_batch_size=size, train_batch_size=size, num_samples_per_prompt=G)
    flags |= dict(max_response_length=R, max_prompt_length=768, num_epochs=1, kl_coef=0.05) | CONSTANT
    flags |= dict(micro_batch_tokens=packs, rewards=(reward,), reward_weights=(1.0,))
    trl_rows = [{**row, "prompt": chat("user", row["prompt"])} if "image" in row else row for row in rows]
    return dict(script="rloo", flags=flags, rows=rows, trl_rows=trl_rows, G=G, R=R, **fields)


def rloo_cases(args: Args) -> dict[str, dict]:
    cases, how = {}, dict(R=64, full_length=True, micro_rows=4, steps=1)
    for name, length, packs in (
        ("text_200", 190, 1024),
        ("text_600", 590, 1280),
    ):  # one prompt's group per pack
        rows = [{"prompt": prompt} for prompt in words(args, 4, length)]
        cases[name] = rloo_case(args.text_model, rows, packs=packs, **how)
    return cases | {"vlm_64": rloo_case(args.vlm, easy_vqa_rows(64), replay=True)}


def reward_cases(args: Args) -> dict[str, dict]:
    """Rankings, best response first. TRL trains on every pair of a ranking."""
    cases, names = {}, ("prompt", "chosen", "rejected")
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
        flags = dict(model=args.text_model, train_batch_size=count, micro_batch_tokens=512) | CONSTANT
        flags |= dict(label_smoothing=0.0, max_length=512)
        cases[name] = dict(script="reward_bt", flags=flags, steps=1, micro_rows=2, pad_token="<|endoftext|>")
        cases[name]["rows"] = [{"prompt": p, "responses": responses} for p, responses in groups]
        cases[name]["trl_rows"] = [dict(zip(names, pair)) for pair in pairs]
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


def bare_cases(args: Args) -> dict[str, dict]:
    """The scripts' default runs; and 4 prompts x G = 8 with responses of 64 tokens, one optimizer step."""
    images = dict(flags=dict(model=args.vlm, eval_prompts=8), steps=3 * args.steps)
    text = rloo_cases(args)["text_200"] | {"steps": args.steps}
    return {
        "rloo_vlm": images | {"script": "rloo"},
        "ppo_vlm": images | {"script": "ppo_vl"},
        "rloo_text": text,
    }


def curve_cases(args: Args) -> Iterator[tuple[str, int, dict]]:
    """(curve, responses per prompt, case)."""
    image_rows = easy_vqa_rows(16)
    for G in (2, 4, 8, 16, 32):
        yield "group_vlm", G, rloo_case(args.vlm, image_rows, G)
    text = {"R": 16, "full_length": True, "packs": 1024, "steps": 1}
    rows = [{"prompt": prompt} for prompt in words(args, 1, 190)]
    for G in (2, 4, 8, 16):
        yield "group_text", G, rloo_case(args.text_model, rows, G, micro_rows=min(G, 4), **text)


# ---- sides: processes that alternate steps ----


def run_sides(args: Args, case: dict, sides: tuple[str, ...]) -> dict[str, list[dict]]:
    """Measurements of each step of each side: cleanrft, bare (cleanrft with the bare work after each step), trl,
    or replay (TRL on the responses that cleanrft sampled in the same step)."""
    steps = defaultdict(list)
    running = {}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        flags = case["flags"] | {"model": copy_model(args, case, Path(folder) / "model")}
        for side in sides:
            job = {"steps": args.steps + 1, **case, "flags": flags, "side": side, "replay": side == "replay"}
            job |= {"seed": args.seed, "threads": args.threads, "clock": args.clock}
            path = Path(folder) / f"{side}.json"
            path.write_text(json.dumps(job))
            command = [sys.executable, __file__, "--child", path]
            if side in ("trl", "replay"):
                command = [args.trl_python, Path(__file__).with_name("bench_trl.py"), path]
            running[side] = subprocess.Popen(command, **pipes)
        try:
            for side, process in running.items():  # wait until all are ready
                receive(side, process)
            for _ in range(job["steps"]):
                sampled = {}
                for side, process in running.items():
                    print(json.dumps(sampled), file=process.stdin, flush=True)
                    steps[side].append(step := receive(side, process))
                    sampled = {"completions": step.pop("completions")} if "completions" in step else sampled
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
    """Wrap a function of a module so that `callback` gets each of its results."""
    function = getattr(module, name)

    def call(*inputs, **options):
        result = function(*inputs, **options)
        callback(result)
        return result

    setattr(module, name, call)


def run_cleanrft(job: dict, directory: Path) -> None:
    """Run the script's main on the rows of the case, and report the seconds that it logs."""
    turns = Turns()
    script = importlib.import_module(job["script"])
    step = {}  # the measurements of this step
    prompt_ids = {}  # row -> token ids
    if job["clock"] == "cpu":
        script.time = SimpleNamespace(**vars(time) | {"perf_counter": time.process_time})
    flags = {name: tuple(x) if isinstance(x, list) else x for name, x in job["flags"].items()}
    flags |= {"output_dir": str(directory), "run_name": "run", "seed": job["seed"], "eval_steps": 0}
    flags |= {"total_steps": job["steps"]}
    if "rows" in job:
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in job["rows"]))
        flags["dataset"] = str(directory / "rows.jsonl")
    bare = Bare(script, flags["model"]) if job["side"] == "bare" else None

    def record_responses(rollout) -> None:
        order = sorted(range(len(rollout.prompts)), key=lambda i: rollout.prompts[i].index)
        groups = [rollout.response_ids[i * job["G"] :][: job["G"]] for i in order]
        step["completions"] = [ids.tolist() for group in groups for ids in group]

    def generate(sampler, prompts: list, num_samples: int, temperature: float):
        prompt_ids.update({prompt.index: prompt.input_ids.tolist() for prompt in prompts})
        if job.get("full_length"):
            sampler.eos_ids = [NEVER_SAMPLED]
        return script_generate(sampler, prompts, num_samples, temperature)

    def log(args, run, metrics: dict, records: list) -> None:
        script_log(args, run, metrics, records)
        if "time/total" not in metrics:
            return
        loss = next(metrics[name] for name in ("rm/loss", "loss/sft", "loss/policy") if name in metrics)
        step.update(seconds=metrics["time/total"], loss=loss, grad_norm=metrics["train/grad_norm"])
        step["update_seconds"] = metrics.get("time/logprobs", 0.0) + metrics.get("time/update", 0.0)
        if bare:
            step.update(bare.work(metrics))
        step["prompt_ids"] = [ids for _, ids in sorted(prompt_ids.items())]
        turns.next(step)

    if "G" in job:
        script_generate = script.HFSampler.generate
        script.HFSampler.generate = generate
        watch(script, "collect_rollout", record_responses)
    script_log = script.log
    script.log = log
    watch(packing_check, "enable_packing_if_exact", lambda result: turns.next({"ready": True}))
    script.main(script.Args(**flags))


def compare_with_trl(args: Args, part: str) -> Iterator[dict]:
    for name, case in {"rloo": rloo_cases, "reward": reward_cases, "sft": sft_cases}[part](args).items():
        if args.cases and name not in args.cases:
            continue
        replay = "replay" if case.get("replay") else "trl"
        steps = run_sides(args, case, tuple(dict.fromkeys(("cleanrft", "trl", replay))))
        cleanrft, trl, replayed = (timed(steps[side]) for side in ("cleanrft", "trl", replay))
        result = {"part": f"{part} {name}", **ratios(cleanrft, trl, "seconds", "step")}
        result |= ratios(cleanrft, trl, "peak_bytes", "memory")
        if part == "rloo":
            result |= ratios(cleanrft, replayed, "update_seconds", "update")
            if steps["cleanrft"][0]["prompt_ids"] != steps["trl"][0]["prompt_ids"]:
                sys.exit(f"case {name}: the two sides have different prompt tokens")
        for field, key in (("losses", "loss"), ("grad_norms", "grad_norm")):
            result[field] = {side: [step[key] for step in x] for side, x in steps.items()}
        yield result


def timed(steps: list[dict]) -> list[dict]:
    """All steps except the first, which is a warmup, unless it is the only one."""
    return steps[1:] or steps


def ratios(cleanrft: list[dict], trl: list[dict], field: str, name: str) -> dict:
    """Medians over the steps of each side, and the median of the ratios trl / cleanrft of single steps."""
    a = [step[field] for step in cleanrft]
    b = [step[field] for step in trl]
    pairs = [y / x for x, y in zip(a, b)]
    median = statistics.median
    result = {f"{name}_cleanrft": median(a), f"{name}_trl": median(b), f"{name}_ratio": median(pairs)}
    return result | {f"{name}_steps": {"cleanrft": a, "trl": b, "ratio": pairs}}


# ---- comparison with only forward and backward ----


PARTS = ("packing", "forward", "backward", "optimizer")


class Bare:
    """Records the packs of each step and the seconds of the script's parts, then runs the model alone on them."""

    def __init__(self, script, model_name: str):
        self.script = script
        self.now = script.time.perf_counter
        self.model_name = model_name
        self.models = {}  # by the name of the module's class: Policy or Critic
        self.elapsed = Counter()  # seconds by phase and part
        self.calls = Counter()  # forward passes by phase and class
        self.packs = defaultdict(list)  # by phase
        iter_rank_packs = packing.iter_rank_packs

        def record_packs(*inputs, **options):
            packs = [*iter_rank_packs(*inputs, **options)]
            self.packs[self.phase()] += packs
            return packs

        def time_backward(engine) -> None:
            engine.backward = self.timed("backward", engine.backward)

        packing.iter_rank_packs = self.timed("packing", record_packs)
        watch(script, "init_deepspeed_engine", time_backward)
        script.optimizer_step = self.timed("optimizer", script.optimizer_step)
        for name, module in vars(script).items():
            is_module = isinstance(module, type) and issubclass(module, nn.Module)
            if is_module and module.__module__ == script.__name__:
                module.forward = self.count(name, self.timed("forward", module.forward))

    def phase(self) -> str:
        return "update" if torch.is_grad_enabled() else "score"

    def timed(self, part: str, function):
        def call(*inputs, **options):
            start = self.now()
            result = function(*inputs, **options)
            self.elapsed[f"{self.phase()}_{part}"] += self.now() - start
            return result

        return call

    def count(self, name: str, function):
        def call(*inputs, **options):
            self.calls[self.phase(), name] += 1
            return function(*inputs, **options)

        return call

    def work(self, metrics: dict) -> dict:
        """Seconds of the script's parts in this step, and of forward and backward alone on the same packs."""
        update_packs = self.packs["update"]
        score_packs = self.packs["score"]
        trained = []
        bare_update = bare_score = 0.0
        for (phase, name), count in [*self.calls.items()]:
            if name not in self.models:
                self.models[name] = self.script.load_model(self.model_name, torch.float32).train()
                packing.set_attention(self.models[name], "packed")
            if phase == "update":
                trained.append(name)
                bare_update += self.seconds(name, update_packs)
            else:
                with torch.no_grad():
                    bare_score += self.seconds(name, score_packs) * count / len(score_packs)
        # FlopCounterMode counts only this attention kernel.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            for name in trained:
                self.seconds(name, update_packs)
        step = {"update_packing": 0.0, **self.elapsed, "bare_update": bare_update, "bare_score": bare_score}
        step["packs"] = len(update_packs)
        step["tokens"] = sum(pack.model_inputs["input_ids"].shape[1] for pack in update_packs)
        step |= {"score": metrics["time/logprobs"], "update": metrics["time/update"]}
        step |= {"phase": step["score"] + step["update"], "flops": counter.get_total_flops()}
        for counts in (self.elapsed, self.calls, self.packs):
            counts.clear()
        return step | {"peak_flops": matmul_flops(self.now)}

    def seconds(self, name: str, packs: list) -> float:
        """Time of forward, and backward if gradients are enabled, of the sum of log-probs or of hidden states."""
        model = self.models[name]
        model.zero_grad()
        start = self.now()
        for pack in packs:
            if name == "Critic":
                out = packing.forward_hidden(model, pack)
            else:
                out = packing.response_logprobs(model, pack)[0]
            if torch.is_grad_enabled():
                out.sum().backward()
        return self.now() - start


def matmul_flops(now, size: int = 2048) -> float:
    """FLOP/s of the fastest of three fp32 products of square matrices."""
    a, b = torch.randn(2, size, size)
    seconds = []
    for _ in range(3):
        start = now()
        a @ b
        seconds.append(now() - start)
    return 2 * size**3 / min(seconds)


def compare_with_bare(args: Args) -> Iterator[dict]:
    for name, case in bare_cases(args).items():
        if not args.cases or name in args.cases:
            steps = run_sides(args, case | {"steps": case["steps"] + 1}, ("bare",))["bare"]
            yield {"part": f"bare {name}", **summarize_bare(timed(steps))}


def summarize_bare(steps: list[dict]) -> dict:
    """Medians over steps, also of the ratios. Speed = seconds of the bare work / seconds of the script.

    update_speed  bare: forward and backward of every pack of every optimizer step; script: its update
    phase_speed   bare: the same; script: everything from the end of the rollout to the last optimizer step,
                  including log-probs and values under the old policy, which the bare work does not compute
    work_speed    script: the same; bare: also those forward passes, without gradients, on the same packs
    """
    for step in steps:
        step["update_rest"] = step["update"] - sum(step[f"update_{part}"] for part in PARTS)
        step["bare_all"] = step["bare_update"] + step["bare_score"]
    result = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    result["peak_flops"] = peak = max(step["peak_flops"] for step in steps)
    speeds = {
        "update_speed": lambda x: x["bare_update"] / x["update"],
        "phase_speed": lambda x: x["bare_update"] / x["phase"],
        "work_speed": lambda x: x["bare_all"] / x["phase"],
        "update_mfu": lambda x: x["flops"] / x["update"] / peak,
        "bare_mfu": lambda x: x["flops"] / x["bare_update"] / peak,
    }
    runs = {name: [speed(step) for step in steps] for name, speed in speeds.items()}
    return result | {name: statistics.median(values) for name, values in runs.items()} | {"runs": runs}


# ---- cost curves ----

CURVES = {  # name -> title, label of the x axis
    "group_text": ("SmolLM2-135M, one prompt of 200 tokens", "responses per prompt (G) of 16 tokens"),
    "group_vlm": ("tiny VLM, 16 images with a question", "responses per prompt (G)"),
}


def measure_curves(args: Args) -> Iterator[dict]:
    fields = {"seconds": "seconds", "update": "update_seconds", "memory": "peak_bytes"}
    for curve, x, case in curve_cases(args):
        if args.cases and curve not in args.cases:
            continue
        result = {"part": "curves", "curve": curve, "x": x}
        for side, steps in run_sides(args, case, ("cleanrft", "trl")).items():
            for name, field in fields.items():
                result[f"{name}_{side}"] = statistics.median(step[field] for step in timed(steps))
        yield result


def draw_curves(results: list[dict], path: Path) -> None:
    """Two panels per curve: seconds per step above peak memory. The axes start at 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = [name for name in CURVES if any(r.get("curve") == name for r in results)]
    columns = min(3, len(curves))
    blocks = -(-len(curves) // columns)
    figure = Figure(figsize=(3.6 * columns, 4.8 * blocks), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * blocks, columns, squeeze=False)
    for i in range(len(curves), blocks * columns):
        grid[2 * (i // columns), i % columns].set_axis_off()
        grid[2 * (i // columns) + 1, i % columns].set_axis_off()
    for (i, curve), (k, name) in itertools.product(enumerate(curves), enumerate(("seconds", "memory"))):
        axes, unit = grid[2 * (i // columns) + k, i % columns], (1, 1e9)[k]
        points = sorted((r for r in results if r.get("curve") == curve), key=lambda r: r["x"])
        for side, title, color in (("trl", "TRL", "#d9772b"), ("cleanrft", "CleanRFT", "#2b6cb0")):
            line = [(r["x"], r[f"{name}_{side}"] / unit) for r in points if f"{name}_{side}" in r]
            if line:
                label = f"{title}: x {line[-1][1] / line[0][1]:.1f}"
                axes.plot(*zip(*line), "o-", color=color, markersize=4, linewidth=1.6, label=label)
        axes.set(xlim=(0, None), ylim=(0, axes.get_ylim()[1] * 1.12))
        axes.set_ylabel(("seconds per step", "peak memory, GB")[k], fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        if k == 0:
            axes.set_title(CURVES[curve][0], fontsize=9, fontweight="bold", pad=12, loc="left")
        else:
            axes.set_xlabel(CURVES[curve][1], fontsize=8)
    figure.savefig(path)


# ---- memory ----


def dense_logprobs(hidden, weight, target_ids) -> torch.Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, target_ids[:, None])[:, 0]


def measure_memory(method: str, tokens: int = TOKENS) -> int:
    """Peak bytes of one forward and backward in a new process, minus the bytes allocated before."""
    hidden = torch.randn(tokens, HIDDEN_SIZE, requires_grad=True)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE).mul_(0.05).requires_grad_()
    target_ids = torch.randint(0, VOCAB_SIZE, (tokens,))
    compute = (
        dense_logprobs if method == "dense" else lambda *inputs: packing.logprobs_from_hidden(*inputs)[0]
    )
    compute(hidden[:2], weight[:99], target_ids[:2] % 99).sum().backward()  # first use loads libraries
    hidden.grad = weight.grad = None
    before = peak_memory()
    compute(hidden, weight, target_ids).mean().backward()
    return peak_memory() - before


def compare_memory(args: Args) -> Iterator[dict]:
    result = {"part": f"memory, {TOKENS} tokens x {VOCAB_SIZE}"}
    for method in ("chunked", "dense"):  # each alone in a process
        command = [sys.executable, __file__, "--child", method, "--threads", str(args.threads)]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode != 0:
            sys.exit(f"the {method} log-probs ended with exit code {child.returncode}: out of memory?")
        result[f"memory_{method}"] = int(child.stdout)
    yield result | {"ratio": result["memory_dense"] / result["memory_chunked"]}


# ---- long responses ----


def measure_sampler(args: Args, side: str, length: int) -> dict:
    """Milliseconds per decoding step early and late, and peak memory, of 4 prompts x 8 full-length responses."""
    import transformers

    import rloo

    model = rloo.load_model(args.text_model, torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.text_model)
    prompts = []
    for i, text in enumerate(words(args, 4, 60)):
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        inputs = packing.encode_chat(tokenizer, [message], add_generation_prompt=True)
        prompt = packing.make_prompt(model, inputs, index=i, row={}, messages=[message])
        prompts.append(replace(prompt, seed=i))
    times = []
    if side == "cleanrft":
        packing.set_attention(model, "packed")
        sampler_args = rloo.Args(max_response_length=length)
        sampler = rloo.HFSampler(sampler_args, model, eos_ids=[NEVER_SAMPLED], run_dir=Path())
        watch(decoding, "next_logprobs", lambda logprobs: times.append(time.perf_counter()))
        sampler.generate(prompts, 8, 1.0)
    else:

        class Clock(transformers.LogitsProcessor):
            def __call__(self, input_ids, scores):
                times.append(time.perf_counter())
                return scores

        tokenizer.padding_side = "left"
        input_ids = [prompt.input_ids.tolist() for prompt in prompts]
        inputs = tokenizer.pad({"input_ids": input_ids}, return_tensors="pt")
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "num_return_sequences": 8}
        options |= {"min_new_tokens": length, "max_new_tokens": length, "logits_processor": [Clock()]}
        model.generate(**inputs, **options)
    steps = [1000 * (b - a) for a, b in itertools.pairwise(times)][1:]
    early, late = statistics.median(steps[:64]), statistics.median(steps[-64:])
    return {"early": early, "late": late, "all": times[-1] - times[0], "memory": peak_memory()}


def compare_samplers(args: Args) -> Iterator[dict]:
    for length in (512, 1024):
        result = {"part": f"{length} tokens"}
        for side in ("cleanrft", "generate"):
            command = [sys.executable, __file__, "--child", f"{side} {length}"]
            command += ["--text-model", args.text_model, "--threads", str(args.threads)]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            result |= {f"{name}_{side}": x for name, x in json.loads(child.stdout.splitlines()[-1]).items()}
        yield result | {"sampler_ratio": result["all_generate"] / result["all_cleanrft"]}


# ---- report ----


def describe_machine(args: Args) -> dict:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "command": shlex.join(["python", "tools/bench.py", *sys.argv[1:]]),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "threads": torch.get_num_threads(),
        "clock": args.clock,
        "load_average": round(os.getloadavg()[0], 1),
    }


SIDES = ("cleanrft", "trl")
TABLES = {  # key of the results that are rows of the table -> header, columns
    "update_speed": (
        "part | packed tokens | bare, s | update, s | speed | bare with old log-probs, s | script, s | speed",
        ("tokens", "bare_update", "update", "update_speed", "bare_all", "phase", "work_speed"),
    ),
    "update_packing": (
        "part | old log-probs, s | update: packing, s | forward | backward | clipping, optimizer | rest",
        ("score", *(f"update_{x}" for x in ("packing", "forward", "backward", "optimizer", "rest"))),
    ),
    "flops": (
        "part | GFLOP of the update | matrix product, GFLOP/s | update, fraction of it | bare, fraction of it",
        ("flops", "peak_flops", "update_mfu", "bare_mfu"),
    ),
    "curve": (
        "part | curve | x | step: CleanRFT, s | TRL, s | update: CleanRFT, s | TRL, s | peak: CleanRFT, GB | TRL, GB",
        ("curve", "x", *(f"{x}_{side}" for x in ("seconds", "update", "memory") for side in SIDES)),
    ),
    "step_ratio": (
        "part | step: CleanRFT, s | TRL, s | ratio | update: CleanRFT, s | TRL, s | ratio | "
        "peak: CleanRFT, GB | TRL, GB",
        (
            *(f"{x}_{y}" for x in ("step", "update") for y in (*SIDES, "ratio")),
            "memory_cleanrft",
            "memory_trl",
        ),
    ),
    "sampler_ratio": (
        "part | early step, ms: CleanRFT | generate | late step: CleanRFT | generate | all, s: CleanRFT | generate | "
        "ratio | peak, GB: CleanRFT | generate",
        (*(f"{x}_{y}" for x in ("early", "late", "all") for y in ("cleanrft", "generate")), "sampler_ratio")
        + ("memory_cleanrft", "memory_generate"),
    ),
    "memory_dense": ("part | dense, GB | chunked, GB | ratio", ("memory_dense", "memory_chunked", "ratio")),
}


def cell(name: str, value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name.endswith(("speed", "mfu")):
        return f"{value:.0%}"
    if name in ("tokens", "x"):
        return f"{value:.0f}"
    return f"{value / 1e9:.0f}" if "flops" in name else f"{value / (1e9 if 'memory' in name else 1):.2f}"


def report(machine: dict, results: list[dict]) -> str:
    """Markdown: the command and the machine, then one table per type of result."""
    lines = [" · ".join(f"{name} {value}" for name, value in machine.items())]
    for key, (head, columns) in TABLES.items():
        rows = [[r["part"], *(cell(name, r.get(name)) for name in columns)] for r in results if key in r]
        if rows:
            lines += ["", f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def main(args: Args) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.child in ("chunked", "dense"):
        return print(measure_memory(args.child))
    if args.child and args.child.startswith(("cleanrft ", "generate ")):
        side, length = args.child.split()
        return print(json.dumps(measure_sampler(args, side, int(length))))
    if args.child:
        job = json.loads(Path(args.child).read_text())
        if job["threads"]:
            torch.set_num_threads(job["threads"])
        return run_cleanrft(job, Path(args.child).parent)
    if args.clock == "cpu" and args.threads != 1:
        sys.exit("--clock cpu sums the CPU seconds of all threads, so it requires --threads 1")
    machine, results = describe_machine(args), []
    measure = {"bare": compare_with_bare, "curves": measure_curves, "memory": compare_memory}
    measure["sampler"] = compare_samplers
    for part in args.parts:
        for result in measure[part](args) if part in measure else compare_with_trl(args, part):
            results.append(result)
            if args.output:  # after each result, since a part may take an hour
                folder = Path(args.output)
                folder.mkdir(parents=True, exist_ok=True)
                figures = {"machine": machine, "args": asdict(args), "results": results}
                (folder / "results.json").write_text(json.dumps(figures, indent=1) + "\n")
                (folder / "results.md").write_text(report(machine, results) + "\n")
                if part == "curves":
                    draw_curves(results, folder / "curves.png")
    if not results:
        sys.exit(f"--cases {' '.join(args.cases)}: not a case of {' '.join(args.parts)}")
    print("\n" + report(machine, results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
