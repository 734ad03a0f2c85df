"""How fast the scripts are and what memory they take, each figure beside its counterpart from the same run.

    python tools/bench.py memory                                   # one part, Markdown to stdout
    python tools/bench.py bare curves rloo reward sft memory --trl-python TRL/bin/python \
        --text-model models/smollm2 --threads 1 --output runs/bench     # all: tables, JSON, a picture

bare     everything between rollout and optimizer step of rloo.py and ppo_vl.py (default runs on the tiny VLM,
         rloo.py on SmolLM2-135M too) against forward and backward of the model on the very same packs and no
         more, in the same process by turns; and both against the machine's fastest matrix product
curves   time and peak memory of a step of rloo.py and of TRL by responses per prompt
rloo     rloo.py and TRL's RLOOTrainer: same model, prompts, G, lengths, reward, fp32, generation with the same
         model; prompts of 200 and 600 tokens on SmolLM2-135M, pictures on the tiny VLM
reward   reward_bt.py and RewardTrainer on SmolLM2-135M: 16 pairs with prompts of 100 and of 300 words; and
         4 prompts with four ranked responses each, which TRL takes as six pairs
sft      grm_sft.py and SFTTrainer on the tiny VLM: 64 questions about easy-VQA pictures, all different, and
         grouped by picture
sampler  responses of 512 and 1024 tokens on SmolLM2-135M, 4 prompts x 8: rloo.py's own decoding and generate
memory   peak of the log-probs alone, forward and backward, chunked against dense, at a vocabulary of 152k

Our script, by its own main, and TRL's trainer (tools/bench_trl.py says in which environment) run in a process
each and take steps by turns: a busy machine is busy for both. Ratios are medians of those of single steps.
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
from bench_trl import Turns, peak_memory  # noqa: E402, I001  mends torchvision too (common), so it comes first
import torch  # noqa: E402
import tyro  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from common import packing  # noqa: E402

VOCAB, HIDDEN, TOKENS = 151_936, 256, 8192  # of part memory
Part = Literal["bare", "curves", "rloo", "reward", "sft", "sampler", "memory"]


@dataclass
class Args:
    parts: tyro.conf.Positional[tuple[Part, ...]] = ()  # what to measure
    cases: tuple[str, ...] = ()  # of those parts only these, such as text_200, rloo_vlm or group_vlm
    trl_python: str = "python"  # of the environment that has TRL
    text_model: str = "models/smollm2"  # folder made by tools/make_smollm2.py
    vlm: str = "assets/tiny_vl"  # folder of the vision-language model
    steps: int = 3  # timed ones, after one that is not; a step that takes a minute is the only one
    clock: Literal["wall", "cpu"] = "wall"  # cpu: seconds that the process computed; with --threads 1
    threads: int = 0  # 0: torch's choice
    seed: int = 0
    output: str | None = None  # folder for results.md, results.json and, of part curves, curves.png
    child: str | None = None  # internal: measure one side in this process


# ---- cases: flags and rows of our script, and what TRL's trainer needs ----

CONSTANT = {"learning_rate": 1e-6, "min_lr_ratio": 1.0, "warmup_steps": 0}


def words(args: Args, count: int, about: int, spread: int = 5) -> list[str]:
    """`count` English-looking texts of `about` words or tokens, each `spread` longer than the one before."""
    source = random.Random(args.seed)
    known = (
        "the old river was cold and a small boat went down past green hills under light rain to its home town"
    )
    return [" ".join(source.choices(known.split(), k=about + spread * i)) for i in range(count)]


def easy_vqa_rows(count: int, by_picture: bool = False) -> list[dict]:
    """Questions about different pictures, or all questions about the first ones."""
    import easy_vqa

    questions, answers, numbers = easy_vqa.get_train_questions()
    paths = easy_vqa.get_train_image_paths()
    first = {image: i for i, image in reversed([*enumerate(numbers)])}
    order = sorted(range(len(numbers)), key=lambda i: numbers[i]) if by_picture else [*first.values()]
    chosen = [(questions[i], str(paths[numbers[i]]), answers[i]) for i in order[:count]]
    return [dict(zip(("prompt", "image", "answer"), row)) for row in chosen]


def chat(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def rloo_case(model: str, rows: list[dict], G: int = 8, R: int = 24, packs: int = 8192, **more) -> dict:
    """One optimizer step per rollout of all rows, in packs of so many tokens."""
    size, reward = len(rows) * G, f"{Path(__file__).with_name('bench_trl.py')}:id_sum_reward"
    flags = dict(model=model, rollout_batch_size=size, train_batch_size=size, num_samples_per_prompt=G)
    flags |= dict(max_response_length=R, max_prompt_length=768, num_iterations=1, kl_coef=0.05) | CONSTANT
    flags |= dict(micro_batch_tokens=packs, rewards=(reward,), reward_weights=(1.0,))
    trl_rows = [{**row, "prompt": chat("user", row["prompt"])} if "image" in row else row for row in rows]
    return dict(script="rloo", flags=flags, rows=rows, trl_rows=trl_rows, G=G, R=R, **more)


def rloo_cases(args: Args) -> dict[str, dict]:
    cases, how = {}, dict(R=64, full_length=True, micro_rows=4, steps=1)
    for name, length, packs in (("text_200", 190, 1024), ("text_600", 590, 1280)):  # a prompt's group a pack
        rows = [{"prompt": prompt} for prompt in words(args, 4, length)]
        cases[name] = rloo_case(args.text_model, rows, packs=packs, **how)
    return cases | {"vlm_64": rloo_case(args.vlm, easy_vqa_rows(64), replay=True)}


def reward_cases(args: Args) -> dict[str, dict]:
    """Rankings, best response first. TRL gets every pair of a ranking."""
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
    """The same number of rows; TRL takes them as they come."""
    cases = {}
    for name, by_picture in (("different", False), ("by_picture", True)):
        rows, trl_rows = [], []
        for row in easy_vqa_rows(64, by_picture):
            own = chat("user", row["prompt"]), chat("assistant", f"<answer>{row['answer']}</answer>")
            rows.append({"messages": own[0] + own[1], "image": row["image"]})
            trl_rows.append({"prompt": own[0], "completion": own[1], "image": row["image"]})
        flags = dict(model=args.vlm, train_batch_size=64, train_samples=0, freeze="") | CONSTANT
        cases[name] = dict(script="grm_sft", flags=flags, rows=rows, trl_rows=trl_rows)
    return cases


def bare_cases(args: Args) -> dict[str, dict]:
    """The scripts' default runs; and 4 prompts x G = 8 with responses of 64 tokens, one optimizer step."""
    images = dict(flags=dict(model=args.vlm, eval_samples=8), steps=3 * args.steps)
    text = rloo_cases(args)["text_200"] | {"steps": args.steps}
    return {
        "rloo_vlm": images | {"script": "rloo"},
        "ppo_vlm": images | {"script": "ppo_vl"},
        "rloo_text": text,
    }


def curve_cases(args: Args) -> Iterator[tuple[str, int, dict]]:
    """(curve, responses per prompt, case)."""
    pictures = easy_vqa_rows(16)
    for G in (2, 4, 8, 16, 32):
        yield "group_vlm", G, rloo_case(args.vlm, pictures, G)
    text = {"R": 16, "full_length": True, "packs": 1024, "steps": 1}
    rows = [{"prompt": prompt} for prompt in words(args, 1, 190)]
    for G in (2, 4, 8, 16):
        yield "group_text", G, rloo_case(args.text_model, rows, G, micro_rows=min(G, 4), **text)


# ---- sides: processes that take steps by turns ----


def run_sides(args: Args, case: dict, sides: tuple[str, ...]) -> dict[str, list[dict]]:
    """What each step of each side took. Sides: ours, bare (ours with the bare work after each step), trl,
    replay (TRL on the responses that ours sampled in the same step)."""
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
            for side, process in running.items():  # all are ready
                receive(side, process)
            for _ in range(job["steps"]):
                sampled = {}
                for side, process in running.items():
                    print(json.dumps(sampled), file=process.stdin, flush=True)
                    steps[side].append(step := receive(side, process))
                    sampled = {"completions": step.pop("completions")} if "completions" in step else sampled
                note = " · ".join(f"{side} {own[-1]['seconds']:.2f} s" for side, own in steps.items())
                print(f"{case['script']}, a step: {note}", file=sys.stderr)
        finally:
            for process in running.values():  # they wait for a turn that does not come
                process.kill()
                process.wait()
    return steps


def receive(side: str, process: subprocess.Popen) -> dict:
    line = process.stdout.readline()
    return json.loads(line) if line else sys.exit(f"the side {side} has ended: see above")


def copy_model(args: Args, case: dict, folder: Path) -> str:
    """Links to the model's files, but for the chat template: plain prompts want none, and TRL's SFT would
    train on the newline that the tiny VLM's has after the end token."""
    folder.mkdir()
    for path in Path(case["flags"]["model"]).iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path.resolve())
        elif case["flags"]["model"] == args.vlm:
            old, new = ("'<|im_end|>\\n'", "'<|im_end|>'") if case["script"] == "grm_sft" else ("", "")
            (folder / path.name).write_text(path.read_text().replace(old, new))
    return str(folder)


def watch(owner, name: str, look) -> None:
    """Replace a function by one whose result is looked at; what `look` returns, if anything, replaces it."""
    function = getattr(owner, name)

    def call(*inputs, **options):
        result = function(*inputs, **options)
        return look(result) or result

    setattr(owner, name, call)


def run_ours(job: dict, folder: Path) -> None:
    """The script's own main on the case's rows, as a user runs it, with the seconds that it logs."""
    turns, script, kept = Turns(), importlib.import_module(job["script"]), {"prompt_ids": {}}
    if job["clock"] == "cpu":
        script.time = SimpleNamespace(**vars(time) | {"perf_counter": time.process_time})
    flags = {name: tuple(x) if isinstance(x, list) else x for name, x in job["flags"].items()}
    flags |= {"output_dir": str(folder), "run_name": "run", "seed": job["seed"], "eval_steps": 0}
    flags |= {"total_steps": job["steps"]}
    if "rows" in job:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in job["rows"]))
        flags["dataset"] = str(folder / "rows.jsonl")
    bare = Bare(script, flags["model"]) if job["side"] == "bare" else None

    def keep_responses(rollout) -> None:
        order = sorted(range(len(rollout.prompts)), key=lambda i: rollout.prompts[i].index)
        responses = [rollout.response_ids[i * job["G"] :][: job["G"]] for i in order]
        kept["completions"] = [ids.tolist() for own in responses for ids in own]

    def generate(args, model, prompts: list, G: int, temperature: float, end_ids: list[int]):
        kept["prompt_ids"] |= {prompt.index: prompt.ids.tolist() for prompt in prompts}
        end_ids = [10**9] if job.get("full_length") else end_ids  # one that is never drawn
        return script_generate(args, model, prompts, G, temperature, end_ids)

    def log(args, run_dir: Path, metrics: dict, samples: list) -> None:
        script_log(args, run_dir, metrics, samples)
        if "time/total" in metrics:
            loss = next(metrics[name] for name in ("rm/loss", "loss/sft", "loss/policy") if name in metrics)
            step = {"seconds": metrics["time/total"], "loss": loss, "grad_norm": metrics["train/grad_norm"]}
            step["update_seconds"] = metrics.get("time/logprobs", 0.0) + metrics.get("time/update", 0.0)
            prompt_ids = [ids for _, ids in sorted(kept["prompt_ids"].items())]
            turns.next(step | (bare.work(metrics) if bare else kept | {"prompt_ids": prompt_ids}))

    if "G" in job:
        script_generate, script.generate = script.generate, generate
        watch(script, "roll_out", keep_responses)
    script_log, script.log = script.log, log
    watch(packing, "enable_packing_if_exact", lambda result: turns.next({"ready": True}) and None)
    script.main(script.Args(**flags))


def compare_with_trl(args: Args, part: str) -> Iterator[dict]:
    for name, case in {"rloo": rloo_cases, "reward": reward_cases, "sft": sft_cases}[part](args).items():
        if args.cases and name not in args.cases:
            continue
        replay = "replay" if case.get("replay") else "trl"
        steps = run_sides(args, case, tuple(dict.fromkeys(("ours", "trl", replay))))
        ours, theirs, replayed = (timed(steps[side]) for side in ("ours", "trl", replay))
        result = {"part": f"{part} {name}", **ratios(ours, theirs, "seconds", "step")}
        result |= ratios(ours, theirs, "peak_bytes", "memory")
        if part == "rloo":
            result |= ratios(ours, replayed, "update_seconds", "update")
            if steps["ours"][0]["prompt_ids"] != steps["trl"][0]["prompt_ids"]:
                sys.exit(f"case {name}: the two sides have different prompt tokens")
        result["losses"] = {side: [step["loss"] for step in own] for side, own in steps.items()}
        result["grad_norms"] = {side: [step["grad_norm"] for step in own] for side, own in steps.items()}
        yield result


def timed(steps: list[dict]) -> list[dict]:
    """Those after the first, which warms up; it alone where it is the only one."""
    return steps[1:] or steps


def ratios(ours: list[dict], theirs: list[dict], field: str, name: str) -> dict:
    """Medians over the steps of both sides, and of the steps' own ratios theirs / ours."""
    own, other = [step[field] for step in ours], [step[field] for step in theirs]
    pairs = [b / a for a, b in zip(own, other)]
    median = statistics.median
    result = {f"{name}_ours": median(own), f"{name}_trl": median(other), f"{name}_ratio": median(pairs)}
    return result | {f"{name}_steps": {"ours": own, "trl": other, "ratio": pairs}}


# ---- against the bare forward and backward ----


PARTS = ("packing", "forward", "backward", "optimizer")


class Bare:
    """Keeps the packs of each step and what the script's parts took; then does the bare work on them."""

    def __init__(self, script, model_name: str):
        self.script = script
        self.now = script.time.perf_counter
        self.model_name = model_name
        self.models = {}  # by kind of module
        self.spent = Counter()  # seconds by part
        self.calls = Counter()  # of a kind of module in a phase
        self.packs = defaultdict(list)  # by phase
        build = packing.packs_of_rank

        def keep_packs(*inputs, **options):
            built = [*build(*inputs, **options)]
            self.packs[self.phase()] += built
            return built

        def time_backward(engine) -> None:
            engine.backward = self.timed("backward", engine.backward)

        packing.packs_of_rank = self.timed("packing", keep_packs)
        watch(script, "make_engine", time_backward)
        script.optimizer_step = self.timed("optimizer", script.optimizer_step)
        for kind, module in vars(script).items():
            own = isinstance(module, type) and issubclass(module, nn.Module)
            if own and module.__module__ == script.__name__:
                module.forward = self.count(kind, self.timed("forward", module.forward))

    def phase(self) -> str:
        return "update" if torch.is_grad_enabled() else "score"

    def timed(self, part: str, function):
        def call(*inputs, **options):
            start = self.now()
            result = function(*inputs, **options)
            self.spent[f"{self.phase()}_{part}"] += self.now() - start
            return result

        return call

    def count(self, kind: str, function):
        def call(*inputs, **options):
            self.calls[self.phase(), kind] += 1
            return function(*inputs, **options)

        return call

    def work(self, metrics: dict) -> dict:
        """-> seconds of a step: the script's parts, and the same packs through forward and backward alone."""
        update, score, trained = self.packs["update"], self.packs["score"], []
        bare_update = bare_score = 0.0
        for (phase, kind), count in [*self.calls.items()]:
            if kind not in self.models:
                self.models[kind] = self.script.load_model(self.model_name, torch.float32).train()
                packing.switch_attention(self.models[kind], "packed")
            if phase == "update":
                trained.append(kind)
                bare_update += self.seconds(kind, update)
            else:
                with torch.no_grad():
                    bare_score += self.seconds(kind, score) * count / len(score)
        # The counter knows this kernel only.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            for kind in trained:
                self.seconds(kind, update)
        step = {"update_packing": 0.0, **self.spent, "bare_update": bare_update, "bare_score": bare_score}
        step |= {"packs": len(update), "tokens": sum(pack.inputs["input_ids"].shape[1] for pack in update)}
        step |= {"score": metrics["time/logprobs"], "update": metrics["time/update"]}
        step |= {"phase": step["score"] + step["update"], "flops": counter.get_total_flops()}
        for kept in (self.spent, self.calls, self.packs):
            kept.clear()
        return step | {"peak_flops": matmul_flops(self.now)}

    def seconds(self, kind: str, packs: list) -> float:
        """Forward, and backward where gradients are on, of the sum of log-probs, or of a critic's inputs."""
        model = self.models[kind]
        model.zero_grad()
        start = self.now()
        for pack in packs:
            if kind == "Critic":
                out = packing.forward_hidden(model, pack)
            else:
                out = packing.response_logprobs(model, pack)[0]
            if torch.is_grad_enabled():
                out.sum().backward()
        return self.now() - start


def matmul_flops(now, size: int = 2048) -> float:
    """Multiplications and additions per second of the fastest of three fp32 products of square matrices."""
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
    """Medians over steps, of the ratios too. Speed = seconds of the bare work / seconds of the script.

    update_speed  bare: forward and backward of every pack of every optimizer step; script: its update
    phase_speed   the same against everything from the finished rollout to the last optimizer step, in which
                  log-probs and values are computed beforehand: work that the bare side does not do
    work_speed    bare: those forwards too, without gradients, on the same packs
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
    "group_vlm": ("tiny VLM, 16 pictures with a question", "responses per prompt (G)"),
}


def measure_curves(args: Args) -> Iterator[dict]:
    fields = {"seconds": "seconds", "update": "update_seconds", "memory": "peak_bytes"}
    for curve, x, case in curve_cases(args):
        if args.cases and curve not in args.cases:
            continue
        result = {"part": "curves", "curve": curve, "x": x}
        for side, steps in run_sides(args, case, ("ours", "trl")).items():
            for name, field in fields.items():
                result[f"{name}_{side}"] = statistics.median(step[field] for step in timed(steps))
        yield result


def draw_curves(results: list[dict], path: Path) -> None:
    """Two panels for each curve: seconds of a step above peak memory. Axes from 0: linear cost is a line."""
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
        for side, shown, color in (("trl", "TRL", "#d9772b"), ("ours", "ours", "#2b6cb0")):
            own = [(r["x"], r[f"{name}_{side}"] / unit) for r in points if f"{name}_{side}" in r]
            if own:
                label = f"{shown}: x {own[-1][1] / own[0][1]:.1f}"
                axes.plot(*zip(*own), "o-", color=color, markersize=4, linewidth=1.6, label=label)
        axes.set(xlim=(0, None), ylim=(0, axes.get_ylim()[1] * 1.12))
        axes.set_ylabel(("s per step", "GB at the peak")[k], fontsize=8)
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


def dense_logprobs(hidden, weight, targets) -> torch.Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def measure_memory(way: str, tokens: int = TOKENS) -> int:
    """Bytes above what this process, a new one, held before, at the peak of one forward and backward."""
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN).mul_(0.05).requires_grad_()
    targets = torch.randint(0, VOCAB, (tokens,))
    compute = dense_logprobs if way == "dense" else lambda *inputs: packing.logprobs_from_hidden(*inputs)[0]
    compute(hidden[:2], weight[:99], targets[:2] % 99).sum().backward()  # what is loaded on first use
    hidden.grad = weight.grad = None
    before = peak_memory()
    compute(hidden, weight, targets).mean().backward()
    return peak_memory() - before


def compare_memory(args: Args) -> Iterator[dict]:
    result = {"part": f"memory, {TOKENS} tokens x {VOCAB}"}
    for way in ("chunked", "dense"):  # one after the other, alone
        command = [sys.executable, __file__, "--child", way, "--threads", str(args.threads)]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode != 0:
            sys.exit(f"the {way} way ended with {child.returncode}: out of memory?")
        result[f"memory_{way}"] = int(child.stdout)
    yield result | {"ratio": result["memory_dense"] / result["memory_chunked"]}


# ---- long responses ----


def measure_sampler(args: Args, side: str, length: int) -> dict:
    """Milliseconds of a decoding step early and late, and the peak: 4 prompts x 8 responses, none of which ends."""
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
    if side == "ours":
        packing.switch_attention(model, "packed")
        watch(packing, "next_logprobs", lambda logprobs: times.append(time.perf_counter()))
        rloo.generate(rloo.Args(max_response_length=length), model, prompts, 8, 1.0, end_ids=[10**9])
    else:

        class Clock(transformers.LogitsProcessor):
            def __call__(self, input_ids, scores):
                times.append(time.perf_counter())
                return scores

        tokenizer.padding_side = "left"
        inputs = tokenizer.pad(
            {"input_ids": [prompt.ids.tolist() for prompt in prompts]}, return_tensors="pt"
        )
        how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "num_return_sequences": 8}
        how |= {"min_new_tokens": length, "max_new_tokens": length, "logits_processor": [Clock()]}
        model.generate(**inputs, **how)
    steps = [1000 * (b - a) for a, b in itertools.pairwise(times)][1:]
    early, late = statistics.median(steps[:64]), statistics.median(steps[-64:])
    return {"early": early, "late": late, "all": times[-1] - times[0], "memory": peak_memory()}


def compare_samplers(args: Args) -> Iterator[dict]:
    for length in (512, 1024):
        result = {"part": f"{length} tokens"}
        for side in ("ours", "generate"):
            command = [
                sys.executable,
                __file__,
                "--child",
                f"{side} {length}",
                "--text-model",
                args.text_model,
            ]
            command += ["--threads", str(args.threads)]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            result |= {f"{name}_{side}": x for name, x in json.loads(child.stdout.splitlines()[-1]).items()}
        yield result | {"sampler_ratio": result["all_generate"] / result["all_ours"]}


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


SIDES = ("ours", "trl")
TABLES = {  # what a result has that belongs into the table -> head and columns
    "update_speed": (
        "part | packed tokens | bare, s | update, s | speed | and log-probs before: bare, s | all, s | speed",
        ("tokens", "bare_update", "update", "update_speed", "bare_all", "phase", "work_speed"),
    ),
    "update_packing": (
        "part | log-probs before, s | update: packing, s | forward | backward | clipping, optimizer | rest",
        ("score", *(f"update_{x}" for x in ("packing", "forward", "backward", "optimizer", "rest"))),
    ),
    "flops": (
        "part | GFLOP of the update | matrix product, GFLOP/s | update, share of it | bare, share of it",
        ("flops", "peak_flops", "update_mfu", "bare_mfu"),
    ),
    "curve": (
        "part | curve | x | step: ours, s | TRL, s | update: ours, s | TRL, s | peak: ours, GB | TRL, GB",
        ("curve", "x", *(f"{x}_{side}" for x in ("seconds", "update", "memory") for side in SIDES)),
    ),
    "step_ratio": (
        "part | step: ours, s | TRL, s | ratio | update: ours, s | TRL, s | ratio | peak: ours, GB | TRL, GB",
        (*(f"{x}_{y}" for x in ("step", "update") for y in (*SIDES, "ratio")), "memory_ours", "memory_trl"),
    ),
    "sampler_ratio": (
        "part | a step at first, ms: ours | generate | at last: ours | generate | all, s: ours | generate | "
        "ratio | peak, GB: ours | generate",
        (*(f"{x}_{y}" for x in ("early", "late", "all") for y in ("ours", "generate")), "sampler_ratio")
        + ("memory_ours", "memory_generate"),
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
    """Markdown: what was run, on what, and a table per kind of result."""
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
    if args.child and args.child.startswith(("ours ", "generate ")):
        side, length = args.child.split()
        return print(json.dumps(measure_sampler(args, side, int(length))))
    if args.child:
        job = json.loads(Path(args.child).read_text())
        if job["threads"]:
            torch.set_num_threads(job["threads"])
        return run_ours(job, Path(args.child).parent)
    if args.clock == "cpu" and args.threads != 1:
        sys.exit("--clock cpu adds up the seconds of all threads: use it with --threads 1")
    machine, results = describe_machine(args), []
    measure = {"bare": compare_with_bare, "curves": measure_curves, "memory": compare_memory}
    measure["sampler"] = compare_samplers
    for part in args.parts:
        for result in measure[part](args) if part in measure else compare_with_trl(args, part):
            results.append(result)
            if args.output:  # after each, since a part may take an hour
                folder = Path(args.output)
                folder.mkdir(parents=True, exist_ok=True)
                figures = {"machine": machine, "args": asdict(args), "results": results}
                (folder / "results.json").write_text(json.dumps(figures, indent=1) + "\n")
                (folder / "results.md").write_text(report(machine, results) + "\n")
                if part == "curves":
                    draw_curves(results, folder / "curves.png")
    if not results:
        sys.exit(f"--cases {' '.join(args.cases)}: {' '.join(args.parts)} has no such case")
    print("\n" + report(machine, results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
