"""How fast the scripts are and what memory they take, each figure beside its counterpart from the same run.

    python tools/bench.py                                  # the four parts of packing, CPU, fp32, Markdown to stdout
    python tools/bench.py vlm --repeats 9                  # one part
    python tools/bench.py bare                             # the update against the forward and backward that it needs
    python tools/bench.py rloo --trl-python TRL/bin/python # a whole training step against TRL's, both as users run them
    python tools/bench.py curves --output runs/bench       # cost against G, prompts, lengths ...: tables, JSON and a picture
    python tools/bench.py vlm text --device cuda           # bf16; torch's own peak counter for the memory part

Packing: the update phase packed against the padded-and-repeated way
vlm       forward and backward of the log-probs of one batch: 32 easy-VQA questions with their pictures, 8 responses each
          as the model samples them: a rollout of ppo_vl.py's default run
vlm_long  the same with random responses of 1 to 24 tokens
text      the same with SmolLM2-135M: 4 prompts of 208 to 256 tokens, 8 responses each of 16 to 64 tokens
memory    peak of the log-probs alone, forward and backward, chunked against dense, at a vocabulary of 152k
"padded" is what trainers without packing do, and lives only here: a row per response, prompt and pictures repeated,
prompts left-padded to the longest prompt, responses right-padded to the longest response, logits for responses only,
log_softmax. Both ways start from processed prompts and build their own tensors inside the timed part. Whether they agree
on log-probs and gradients is measured too.

Against the bare work
bare      everything between rollout and optimizer step of rloo.py and ppo_vl.py (default runs on the tiny VLM; rloo.py on
          SmolLM2-135M too) against forward and backward of the model on the very same packs and nothing else, in the same
          process by turns; and both against the machine's fastest matrix product

Against TRL: our script and TRL's trainer (tools/bench_trl.py says in which environment), each in a process of its own
rloo      rloo.py and RLOOTrainer: same model, prompts, G, lengths, reward, fp32, generation with the model's own forward
          (200-token and 600-token prompts on SmolLM2-135M, pictures on the tiny VLM). The update is timed on the same
          responses, which ours samples and TRL replays
reward    reward_bt.py and RewardTrainer on SmolLM2-135M: 16 pairs with prompts of 100 and of 300 words, and 4 prompts with
          four ranked responses each, which TRL takes as six pairs a prompt
sft       grm_sft.py and SFTTrainer on the tiny VLM: 64 questions about easy-VQA pictures, all of different pictures, and
          grouped by picture
curves    time and peak memory of a step of rloo.py against responses per prompt (TRL's too), prompts, response length,
          pictures per prompt and model size: every point a run in a process of its own

Needs vLLM (docs/vllm.md)
sync      handing SmolLM2-135M's weights to a vLLM engine in this process and to a server, against a plain copy of them
"""

import gc
import importlib
import itertools
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_vl  # noqa: E402  mends torchvision too (common), so it comes before transformers
from common.packing import (  # noqa: E402
    build_pack,
    enable_packing,
    encode_vision_inputs,
    flat_to_rows,
    forward_hidden,
    logprobs_from_hidden,
    plan_packs,
    prompt_positions,
)

VOCAB, HIDDEN = 151_936, 256  # of the memory part
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TRL_PARTS = ("rloo", "reward", "sft")
ID_SUM_REWARD = "def f(completion_ids, **columns):\n    return [float(sum(x) % 7) for x in completion_ids]\n"


@dataclass
class Args:
    parts: tyro.conf.Positional[
        tuple[
            Literal["vlm", "vlm_long", "text", "memory", "bare", "rloo", "reward", "sft", "curves", "sync"],
            ...,
        ]
    ] = ("vlm", "vlm_long", "text", "memory")
    """what to measure"""
    trl_python: str = "python"
    """python of the environment that has TRL"""
    text_model: str = "models/smollm2"
    """folder made by tools/make_smollm2.py"""
    vllm_url: str | None = None
    """part sync: also time a vLLM server there that serves --text-model"""
    cases: tuple[str, ...] = ()
    """cases of part bare, of a comparison with TRL, such as text_200, or curves, such as images; none: all"""
    replay: bool = True
    """part rloo: time the update in a second run of both sides, on the same responses; else in the first, each on its own"""
    steps: int = 3
    """timed training steps of each side of a comparison with TRL, after one that is not timed"""
    clock: Literal["wall", "cpu"] = "wall"
    """bare, curves and TRL: seconds as they pass, or those that the process computed, fairer beside other jobs; --threads 1"""
    vlm: str = "assets/tiny_vl"
    """folder or hub id of the vision-language model of part vlm"""
    device: str = "cpu"
    """cpu (fp32) or cuda (bf16)"""
    threads: int = 0
    """CPU threads; 0: torch's choice"""
    repeats: int = 5
    """timed runs of each way, after one that is not timed; the ways alternate, the fastest run of each counts"""
    micro_batch_tokens: int = 8192
    """tokens of one packed forward, as in the scripts"""
    padded_rows: int = 32
    """rows of one padded forward"""
    memory_tokens: int = 8192
    """response tokens of part memory; the dense way takes about 2 MB for each"""
    seed: int = 0
    output: str | None = None
    """folder for the figures as results.md, results.json and, of part curves, curves.png"""
    child: str | None = None
    """internal: measure one side in this process"""


# --- batches ---------------------------------------------------------------------------------------------------------


def vlm_batch(args: Args, model, sampled: bool) -> tuple[list[dict], list[torch.Tensor], int]:
    """32 different pictures with a question each, G = 8, responses as sampled or of 1 to 24 random tokens."""
    import easy_vqa
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(args.vlm)
    questions, _, image_ids = easy_vqa.get_train_questions()
    paths = easy_vqa.get_train_image_paths()
    first = {image: i for i, image in reversed(list(enumerate(image_ids)))}
    prompts = []
    for i in list(first.values())[:32]:
        content = [{"type": "image"}, {"type": "text", "text": questions[i]}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        image = Image.open(paths[image_ids[i]]).convert("RGB")
        prompts.append(make_prompt(model, processor(text=[text], images=[image], return_tensors="pt")))
    if not sampled:
        return prompts, make_responses(len(prompts) * 8, 1, 24), 8
    end_ids = ppo_vl.end_token_ids(model, processor.tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    responses, _, _ = ppo_vl.generate(model.eval(), prompts, 8, ppo_vl.Args(), end_ids, 1.0, generator)
    return prompts, responses, 8


def text_batch(args: Args, model) -> tuple[list[dict], list[torch.Tensor], int]:
    """4 prompts of 256, 240, 224 and 208 tokens, G = 8, responses of 16 to 64 tokens; the tokens are random."""
    prompts = [make_prompt(model, {"input_ids": torch.randint(10, 300, (1, 256 - 16 * i))}) for i in range(4)]
    return prompts, make_responses(len(prompts) * 8, 16, 64), 8


def make_prompt(model, inputs) -> dict:
    prompt_ids = inputs["input_ids"][0]
    prompt = {"prompt_ids": prompt_ids, "position_ids": prompt_positions(model, prompt_ids, inputs), "inputs": inputs}
    return {**prompt, **encode_vision_inputs(inputs)}


def make_responses(count: int, shortest: int, longest: int) -> list[torch.Tensor]:
    return [torch.randint(10, 300, (int(R),)) for R in torch.randint(shortest, longest + 1, (count,))]


# --- the two ways ----------------------------------------------------------------------------------------------------


def packed_update(args: Args, model, prompts, responses, G: int) -> torch.Tensor:
    """-> (B, R) log-probs; gradients of their mean are left in the model."""
    groups = [(g, list(range(g * G, (g + 1) * G))) for g in range(len(prompts))]
    lengths = [len(r) for r in responses]
    table = torch.zeros(len(responses), max(lengths))
    prompt_lengths = [len(p["prompt_ids"]) for p in prompts]
    for pieces in plan_packs(groups, prompt_lengths, lengths, args.micro_batch_tokens)[0]:
        pack = build_pack(pieces, prompts, responses).to(args.device)
        logprobs, _ = logprobs_from_hidden(forward_hidden(model, pack), model.lm_head.weight, pack.targets)
        (logprobs.sum() / sum(lengths)).backward()
        table = flat_to_rows(logprobs.detach().cpu(), pack, table)
    return table


def padded_update(args: Args, model, prompts, responses, G: int) -> torch.Tensor:
    """The same, padded and repeated."""
    P, R = max(len(p["prompt_ids"]) for p in prompts), max(len(r) for r in responses)
    total, rows = sum(len(r) for r in responses), []
    for start in range(0, len(responses), args.padded_rows):
        members = range(start, min(start + args.padded_rows, len(responses)))
        input_ids = torch.zeros(len(members), P + R, dtype=torch.long)
        attention_mask, kinds = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
        media = {"pixel_values": [], "image_grid_thw": []}
        for i, b in enumerate(members):
            inputs, response = prompts[b // G]["inputs"], responses[b]
            length = inputs["input_ids"].shape[1]
            input_ids[i, P - length : P] = inputs["input_ids"][0]
            input_ids[i, P : P + len(response)] = response
            attention_mask[i, P - length : P + len(response)] = 1
            if "mm_token_type_ids" in inputs:
                kinds[i, P - length : P] = torch.as_tensor(inputs["mm_token_type_ids"])[0]
            for name in media:
                if name in inputs:
                    media[name].append(inputs[name])
        extra = {name: torch.cat(tensors) for name, tensors in media.items() if tensors}
        if "image_grid_thw" in extra:
            extra["mm_token_type_ids"] = kinds
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **extra}
        batch = {name: tensor.to(args.device) for name, tensor in batch.items()}
        logits = model(**batch, logits_to_keep=R + 1, use_cache=False).logits[:, :-1]  # (rows, R, V)
        targets = batch["input_ids"][:, P:]
        logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        logprobs = logprobs * batch["attention_mask"][:, P:]
        (logprobs.sum() / total).backward()
        rows.append(logprobs.detach().cpu())
    return torch.cat(rows)


def compare(args: Args, name: str, model, batch) -> dict:
    """Alternate the two ways: seconds of the fastest run, and the largest differences of log-probs and gradients."""
    prompts, responses, G = batch
    model = model.to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16).train()
    plain = model.config._attn_implementation
    seconds, results = {"padded": [], "packed": []}, {}
    for _ in range(args.repeats + 1):
        for way, update in (("padded", padded_update), ("packed", packed_update)):
            if way == "packed":
                assert enable_packing(model)
            else:
                model.set_attn_implementation(plain)
            model.zero_grad()
            synchronize(args)
            start = time.perf_counter()
            logprobs = update(args, model, prompts, responses, G)
            synchronize(args)
            seconds[way].append(time.perf_counter() - start)
            results[way] = logprobs, [p.grad.float().clone() for p in model.parameters() if p.grad is not None]
    distance = sum((a - b).square().sum() for a, b in zip(results["packed"][1], results["padded"][1], strict=True))
    norm = sum(b.square().sum() for b in results["padded"][1])
    best = {way: min(runs[1:]) for way, runs in seconds.items()}
    P, R = max(len(p["prompt_ids"]) for p in prompts), max(len(r) for r in responses)
    return {
        "part": name,
        "padded_tokens": len(responses) * (P + R),
        "packed_tokens": sum(len(p["prompt_ids"]) for p in prompts) + sum(len(r) for r in responses),
        "padded_seconds": best["padded"],
        "packed_seconds": best["packed"],
        "speedup": best["padded"] / best["packed"],
        "max_logprob_difference": (results["packed"][0] - results["padded"][0]).abs().max().item(),
        "relative_gradient_difference": (distance / norm).sqrt().item(),
        "runs": {way: runs[1:] for way, runs in seconds.items()},
    }


def synchronize(args: Args) -> None:
    if args.device != "cpu":
        torch.cuda.synchronize()


def load_smollm2(args: Args):
    from transformers import AutoModelForCausalLM

    if not Path(args.text_model).is_dir():
        sys.exit(f"--text-model {args.text_model}: no such folder; tools/make_smollm2.py makes it")
    return AutoModelForCausalLM.from_pretrained(args.text_model, dtype=torch.float32)


# --- vLLM ------------------------------------------------------------------------------------------------------------


def measure_sync(args: Args) -> dict:
    """Seconds, the fastest of each; the copy goes into tensors that are there already, as the engine's are."""
    model = load_smollm2(args)
    weights = list(model.parameters())
    copies = [x.detach().clone() for x in weights]

    def copy() -> None:
        for target, x in zip(copies, weights):
            target.copy_(x.detach())

    urls = () if args.vllm_url is None else (args.vllm_url,)
    rollout = ppo_vl.Args(model=args.text_model, max_prompt_length=256, max_response_length=64, vllm_urls=urls)
    processor = ppo_vl.load_processor(args.text_model)
    ways = {"copy": copy}
    for name in ("vllm", "vllm-server")[: 1 + len(urls)]:
        sampler = ppo_vl.SAMPLERS[name](rollout, model, None, processor, [0], 320, (0, 1), torch.device("cpu"))
        folder = Path(tempfile.mkdtemp())
        ways[name] = lambda sampler=sampler, folder=folder: sampler.sync(1, folder)
    seconds = {name: [] for name in ways}
    for _ in range(args.repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {
        "part": "sync",
        "bytes": sum(x.numel() * x.element_size() for x in weights),
        **{n: min(s[1:]) for n, s in seconds.items()},
    }


# --- memory ----------------------------------------------------------------------------------------------------------


def dense_logprobs(hidden, weight, targets) -> torch.Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def measure_memory(args: Args) -> int:
    """Bytes above what the process held before, at the peak of one forward and backward. Runs in its own process."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    hidden = torch.randn(args.memory_tokens, HIDDEN, device=args.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, device=args.device, dtype=dtype).mul_(0.05).requires_grad_()
    targets = torch.randint(0, VOCAB, (args.memory_tokens,), device=args.device)
    way = dense_logprobs if args.child == "dense" else lambda *inputs: logprobs_from_hidden(*inputs)[0]
    way(hidden[:2], weight[:99], targets[:2] % 99).sum().backward()  # what is loaded on first use is not counted
    hidden.grad = weight.grad = None
    baseline = peak_memory(args)
    way(hidden, weight, targets).mean().backward()
    return peak_memory(args) - baseline


def peak_memory(args: Args) -> int:
    if args.device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # not ru_maxrss, which a child inherits from its parent
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compare_memory(args: Args) -> dict:
    result = {"part": "memory", "tokens": args.memory_tokens, "vocab": VOCAB, "hidden": HIDDEN}
    for way in ("chunked", "dense"):  # one after the other, alone
        command = [sys.executable, __file__, "--child", way, "--device", args.device]
        command += ["--memory-tokens", str(args.memory_tokens), "--threads", str(args.threads)]
        start = time.perf_counter()
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode != 0:
            sys.exit(f"the {way} way ended with {child.returncode} (out of memory?): try fewer --memory-tokens")
        result[f"{way}_bytes"] = int(child.stdout)
        result[f"{way}_process_seconds"] = time.perf_counter() - start
    result["ratio"] = result["chunked_bytes"] / result["dense_bytes"]
    return result


# --- against the bare forward and backward ---------------------------------------------------------------------------


def bare_cases(args: Args) -> dict[str, dict]:
    """The scripts' default runs, and 4 prompts x G = 8 with responses of 64 tokens, one optimizer step."""
    prompts, text = words(args, 4, 190), {"model": args.text_model, "plain_prompts": True, "num_iterations": 1}
    text |= {"rollout_batch_size": 32, "train_batch_size": 32, "max_response_length": 64, "max_prompt_length": 768}
    text["micro_batch_tokens"] = 1024  # one prompt's group
    images = {"flags": {"model": args.vlm, "eval_samples": 8}, "steps": 3 * args.steps}
    return {
        "rloo_vlm": {"script": "rloo", **images},
        "ppo_vlm": {"script": "ppo_vl", **images},
        "rloo_text": {"script": "rloo", "prompts": prompts, "flags": text, "steps": args.steps},
    }


def compare_with_bare(args: Args) -> Iterator[dict]:
    for name, case in bare_cases(args).items():
        if args.cases and name not in args.cases:
            continue
        steps = run_side(args, {"job": "bare", **common_fields(args), **case, "steps": case["steps"] + 1}, ours=True)
        yield {"part": f"bare {name}", **summarize_bare(steps["steps"][1:])}


def summarize_bare(steps: list[dict]) -> dict:
    """Medians over steps, of the ratios too. Speed = seconds of the bare work / seconds of the script.

    update_speed  bare: forward and backward of every pack of every optimizer step; script: its update
    phase_speed   the same against everything from the finished rollout to the last optimizer step, in which log-probs of the
                  policy and the reference (and values) are computed beforehand: work that the bare side does not do
    work_speed    bare: those forwards too, without gradients, on the same packs
    """
    result = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    result["peak_flops"] = peak = max(step["peak_flops"] for step in steps)
    speeds = {
        "update_speed": lambda x: x["bare_update"] / x["update"],
        "phase_speed": lambda x: x["bare_update"] / x["phase"],
        "work_speed": lambda x: (x["bare_update"] + x["bare_score"]) / x["phase"],
        "update_mfu": lambda x: x["flops"] / x["update"] / peak,
        "bare_mfu": lambda x: x["flops"] / x["bare_update"] / peak,
    }
    runs = {name: [speed(step) for step in steps] for name, speed in speeds.items()}
    return result | {name: statistics.median(values) for name, values in runs.items()} | {"runs": runs}


def run_bare(job: dict, folder: Path, common: dict) -> dict:
    """The script's own main; after each update the bare work on the packs that it saw. Seconds of every step, by phase."""
    script, now = importlib.import_module(job["script"]), CLOCKS[job["clock"]]
    flags = {**common, "total_steps": job["steps"], **job["flags"]}
    if "prompts" in job:
        (folder / "reward.py").write_text(ID_SUM_REWARD)
        flags |= {"dataset": write_rows(folder, [{"prompt": prompt} for prompt in job["prompts"]])}
        flags |= {"rewards": (f"{folder}/reward.py:f",), "reward_weights": (1.0,)}
        end_ids = script.end_token_ids
        script.end_token_ids = lambda *inputs: [max(end_ids(*inputs)) + 10**6]  # never drawn: full lengths
    phase, spent, calls, packs, steps = "setup", defaultdict(float), Counter(), defaultdict(list), []
    models = {}  # name of the script's module -> a model of its own for the bare work

    def timed(part: str, function):
        def call(*inputs, **options):
            start = now()
            result = function(*inputs, **options)
            spent[f"{phase}_{part}"] += now() - start
            return result

        return call

    build = timed("packing", lambda *inputs: list(script_packs(*inputs)))

    def keep_packs(*inputs):
        built = build(*inputs)
        packs[phase] += built
        return built

    def score(*inputs):
        nonlocal phase
        phase = "score"
        spent["began"] = now()
        script_score(*inputs)
        spent["score"] = now() - spent["began"]

    def update(*inputs):
        nonlocal phase
        phase = "update"
        for engine in (x for x in inputs if hasattr(x, "set_gradient_accumulation_boundary")):
            kind = type(engine.module).__name__
            if kind not in models:
                engine.backward = timed("backward", engine.backward)
                models[kind] = bare_model(script, job["flags"]["model"], kind)
        start = now()
        result = script_update(*inputs)
        spent["update"], spent["phase"] = now() - start, now() - spent.pop("began")
        phase = "bare"
        spent["bare_update"] = sum(bare_seconds(*model, packs["update"], now) for model in models.values())
        for kind in (kind for (when, kind), count in calls.items() if when == "score" for _ in range(count)):
            with torch.no_grad():
                spent["bare_score"] += bare_seconds(*models[kind], packs["score"], now) / len(packs["score"])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it counts that kernel only
            for model in models.values():
                bare_seconds(*model, packs["update"], now)
        tokens = sum(pack.num_tokens for pack in packs["update"])
        step = {**spent, "tokens": tokens, "packs": len(packs["update"]), "flops": counter.get_total_flops()}
        steps.append({**step, "peak_flops": matmul_flops(now)})
        for kept in (spent, calls, packs):
            kept.clear()
        return result

    for kind in ("Policy", "Actor", "Critic"):
        if hasattr(script, kind):
            module = getattr(script, kind)

            def forward(self, *inputs, kind=kind, original=module.forward, **options):
                calls[phase, kind] += 1
                return timed("forward", original)(self, *inputs, **options)

            module.forward = forward
    name = "update_policy" if hasattr(script, "update_policy") else "update"
    script_packs, script_score, script_update = script.packs_of_rank, script.fill_logprobs, getattr(script, name)
    script.packs_of_rank, script.fill_logprobs = keep_packs, score
    script.optimizer_step = timed("optimizer", script.optimizer_step)
    setattr(script, name, update)
    script.main(script.Args(**flags))
    return {"steps": steps}


def bare_model(script, name: str, kind: str) -> tuple:
    """-> a model as the script trains it and, for a critic, a head."""
    model = script.load_model(name, torch.float32).train()
    script.disable_dropout(model)
    assert enable_packing(model)
    head = script.make_value_head(model) if kind == "Critic" else None
    return (model if head is None else model.base_model), head


def bare_seconds(model, head, packs: list, now) -> float:
    """Forward of every pack, and backward where gradients are on, of the sum of its log-probs (or values)."""
    model.zero_grad()
    start = now()
    for pack in packs:
        hidden = forward_hidden(model, pack)
        if head is not None:
            outputs = head(hidden)
        else:
            outputs, _ = logprobs_from_hidden(hidden, model.get_output_embeddings().weight, pack.targets)
        if torch.is_grad_enabled():
            outputs.sum().backward()
    return now() - start


def matmul_flops(now, size: int = 2048) -> float:
    """Multiplications and additions per second of the fastest of three fp32 products of square matrices."""
    a, b = torch.randn(2, size, size)
    seconds = []
    for _ in range(3):
        start = now()
        a @ b
        seconds.append(now() - start)
    return 2 * size**3 / min(seconds)


# --- against TRL -----------------------------------------------------------------------------------------------------


def easy_vqa_prompts(count: int) -> list[dict]:
    """Questions about different pictures."""
    import easy_vqa

    questions, answers, image_ids = easy_vqa.get_train_questions()
    paths = easy_vqa.get_train_image_paths()
    first = {image: i for i, image in reversed(list(enumerate(image_ids)))}
    chosen = list(first.values())[:count]
    return [{"question": questions[i], "image": str(paths[image_ids[i]]), "answer": answers[i]} for i in chosen]


def words(args: Args, count: int, about: int, spread: int = 5) -> list[str]:
    """`count` English-looking texts of `about` words or tokens; each is `spread` longer than the one before."""
    import random

    source = random.Random(args.seed)
    vocabulary = (
        "the old river was cold and a small boat went down past green hills under light rain to its home town".split()
    )
    return [" ".join(source.choices(vocabulary, k=about + spread * i)) for i in range(count)]


def rloo_cases(args: Args) -> dict[str, dict]:
    text = {
        "kind": "text",
        "model": args.text_model,
        "G": 8,
        "max_new_tokens": 64,
        "min_new_tokens": 64,
        "micro_rows": 4,
        "steps": 1,
    }
    images = {"kind": "vlm", "model": args.vlm, "G": 8, "max_new_tokens": 24}
    return {
        "text_200": {**text, "prompts": words(args, 4, 190), "micro_batch_tokens": 1024},  # one prompt's group
        "text_600": {**text, "prompts": words(args, 4, 590), "micro_batch_tokens": 1280},
        "vlm_64": {**images, "prompts": easy_vqa_prompts(64)},
    }


def reward_cases(args: Args) -> dict[str, dict]:
    """Rankings, best response first. TRL gets every pair of a ranking."""

    def rankings(count: int, prompt_words: int, responses: int) -> list[dict]:
        prompts = words(args, count, prompt_words, spread=0)
        texts = [text.split() for text in words(args, count * responses, 100, spread=0)]
        spread = [
            " " + " ".join(text[: 40 + 60 * (7 * i % 10) // 9]) for i, text in enumerate(texts)
        ]  # 40 to 100 words
        return [{"prompt": p, "responses": spread[i * responses : (i + 1) * responses]} for i, p in enumerate(prompts)]

    common = {
        "job": "reward",
        "model": args.text_model,
        "pad_token": "<|endoftext|>",
        "steps": 1,
        "micro_batch_tokens": 512,
    }
    made = {"pairs_100": rankings(16, 100, 2), "pairs_300": rankings(16, 300, 2), "ranked_4": rankings(4, 100, 4)}
    cases = {}
    for name, rows in made.items():
        pairs = [
            {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
            for row in rows
            for chosen, rejected in itertools.combinations(row["responses"], 2)
        ]
        cases[name] = {**common, "rows": rows, "pairs": pairs, "batch": len(pairs), "micro_rows": 2}
    return cases


def sft_cases(args: Args) -> dict[str, dict]:
    """The same number of rows; TRL takes them as they come."""
    import easy_vqa

    questions, answers, image_ids = easy_vqa.get_train_questions()
    paths = easy_vqa.get_train_image_paths()

    def rows(indices) -> list[dict]:
        return [
            {"image": str(paths[image_ids[i]]), "prompt": questions[i], "completion": f"<answer>{answers[i]}</answer>"}
            for i in indices
        ]

    by_picture = sorted(range(len(questions)), key=lambda i: image_ids[i])
    first = {image: i for i, image in reversed(list(enumerate(image_ids)))}
    common = {"job": "sft", "model": args.vlm, "batch": 64}
    return {
        "different": {**common, "rows": rows(list(first.values())[:64])},
        "by_picture": {**common, "rows": rows(by_picture[:64])},
    }


def common_fields(args: Args) -> dict:
    return {"seed": args.seed, "threads": args.threads, "clock": args.clock}


def compare_with_trl(args: Args, part: str) -> Iterator[dict]:
    for name, case in {"rloo": rloo_cases, "reward": reward_cases, "sft": sft_cases}[part](args).items():
        if args.cases and name not in args.cases:
            continue
        job = {"job": part, "beta": 0.05, "steps": args.steps + 1, **common_fields(args), **case}
        ours, theirs = (run_side(args, job, ours=own) for own in (True, False))
        result = {"part": f"{part} {name}", **ratios(ours, theirs, "seconds", "step")}
        result |= ratios(ours, theirs, "peak_rss_bytes", "memory")
        result |= {"loss_ours": ours["steps"][0]["loss"], "loss_trl": theirs["steps"][0]["loss"]}
        result |= {"trl_packages": theirs["packages"]}
        if part == "rloo" and not args.replay:
            result |= ratios(ours, theirs, "update_seconds", "update")
        elif part == "rloo":
            replay = {**job, "completions": ours["completions"]}
            replays = [run_side(args, replay, ours=own) for own in (True, False)]
            if replays[1]["prompt_ids"] != ours["prompt_ids"]:
                sys.exit(f"case {name}: the two sides have different prompt tokens")
            result |= ratios(*replays, "update_seconds", "update")
            result |= {"grad_norms": [replays[own]["steps"][0]["grad_norm"] for own in (0, 1)]}
        yield result


def ratios(ours: dict, theirs: dict, field: str, name: str) -> dict:
    """Median over the steps of both sides after the first (the only one, where a step takes minutes), and theirs / ours."""
    median = [statistics.median(step[field] for step in side["steps"][1:] or side["steps"]) for side in (ours, theirs)]
    return {f"{name}_ours": median[0], f"{name}_trl": median[1], f"{name}_ratio": median[1] / median[0]}


def run_side(args: Args, job: dict, ours: bool) -> dict:
    """One side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, out = Path(folder) / "job.json", Path(folder) / "out.json"
        if job["job"] == "sft":  # TRL trains on the template's newline after the end token too: leave it out for both
            job = {**job, "model": str(shutil.copytree(job["model"], Path(folder) / "model"))}
            template = Path(job["model"]) / "chat_template.jinja"
            template.write_text(template.read_text().replace("'<|im_end|>\\n'", "'<|im_end|>'"))
        job_file.write_text(json.dumps(job))
        if ours:
            command = [sys.executable, __file__, "--child", str(job_file)]
        else:
            command = [args.trl_python, str(Path(__file__).with_name("bench_trl.py")), "--job", job_file, "--out", out]
        started = time.perf_counter()
        child = subprocess.run(command, stdout=sys.stderr)
        if child.returncode != 0:
            sys.exit(f"{'our' if ours else 'the TRL'} side of the comparison ended with {child.returncode}")
        result = json.loads(out.read_text())
        note = [round(step.get("seconds", step.get("phase")), 2) for step in result["steps"]]
        print(
            f"{'ours' if ours else 'TRL'}: steps {note} s, {time.perf_counter() - started:.0f} s in all",
            file=sys.stderr,
        )
        return result


def run_ours(job: dict, folder: Path) -> dict:
    """The script's own main on the job's rows, as a user runs it, and the seconds that it logs."""
    run = {"rloo": run_rloo, "reward": run_reward, "sft": run_sft, "bare": run_bare}[job["job"]]
    script = importlib.import_module(
        job.get("script") or {"reward": "reward_bt", "sft": "grm_sft"}.get(job["job"], "rloo")
    )
    if job["clock"] == "cpu":
        script.time = SimpleNamespace(**{**vars(time), "time": time.process_time})
    kept = run(job, folder, {"output_dir": str(folder), "run_name": "run", "seed": job["seed"], "eval_steps": 0})
    if job["job"] == "bare":
        return kept
    steps = []
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        m = json.loads(line)
        if "time/total" in m:
            update = m.get("time/score", 0.0) + m.get("time/update", m["time/total"])
            loss = next(m[name] for name in ("rm/loss", "loss/sft", "loss/policy") if name in m)
            steps.append({"seconds": m["time/total"], "update_seconds": update, "loss": loss})
            steps[-1] |= {"grad_norm": m["train/grad_norm"], "peak_rss_bytes": peak_memory(Args())}
    return {"steps": steps, **kept}


def write_rows(folder: Path, rows: list[dict]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def run_reward(job: dict, folder: Path, common: dict) -> dict:
    import reward_bt

    reward_bt.main(
        reward_bt.Args(
            model=job["model"], dataset=write_rows(folder, job["rows"]), plain_prompts=True, max_steps=job["steps"],
            epochs=job["steps"], batch_size=len(job["rows"]), learning_rate=1e-6, lr_schedule="constant", warmup_steps=0,
            label_smoothing=0.0, micro_batch_tokens=job["micro_batch_tokens"], **common,
        )
    )  # fmt: skip
    return {}


def run_sft(job: dict, folder: Path, common: dict) -> dict:
    import grm_sft

    def chat(row: dict) -> dict:
        turns = [("user", "<image>" + row["prompt"]), ("assistant", row["completion"])]
        return {"messages": [{"role": role, "content": text} for role, text in turns], "images": [row["image"]]}

    grm_sft.main(
        grm_sft.Args(
            model=job["model"], dataset=write_rows(folder, [chat(row) for row in job["rows"]]), max_steps=job["steps"],
            epochs=job["steps"], train_samples=0, batch_size=job["batch"], learning_rate=1e-6, lr_schedule="constant",
            warmup_steps=0, freeze_vision=False, freeze_projector=False, logging_steps=1, **common,
        )
    )  # fmt: skip
    return {}


def run_rloo(job: dict, folder: Path, common: dict) -> dict:
    """-> the responses and the prompts' tokens too. For full lengths: an end token that is never drawn."""
    import rloo

    rows = [
        {"prompt": p} if isinstance(p, str) else {"prompt": p["question"], "images": p.get("images") or [p["image"]]}
        for p in job["prompts"]
    ]
    (folder / "reward.py").write_text(ID_SUM_REWARD)
    args = rloo.Args(
        model=job["model"], dataset=write_rows(folder, rows), plain_prompts=job["kind"] == "text", num_iterations=1,
        rewards=(f"{folder}/reward.py:f",), reward_weights=(1.0,), kl_coef=job["beta"], total_steps=job["steps"],
        rollout_batch_size=len(rows) * job["G"], num_samples_per_prompt=job["G"], train_batch_size=len(rows) * job["G"],
        max_response_length=job["max_new_tokens"], learning_rate=1e-6, lr_schedule="constant", warmup_steps=0,
        micro_batch_tokens=job.get("micro_batch_tokens", 8192), max_prompt_length=768, **common,
    )  # fmt: skip
    kept, G = {"prompt_ids": [None] * len(rows)}, job["G"]
    make_rollout, end_ids, encode = rloo.make_rollout, rloo.end_token_ids, rloo.encode_prompts

    def keep_responses(records, *rest):
        ordered = sorted(records, key=lambda record: record["row"])
        kept["completions"] = [ids.tolist() for record in ordered for ids in record["response_ids"]]
        return make_rollout(records, *rest)

    def keep_prompts(model, processor, rows):
        samples = encode(model, processor, rows)
        for row, sample in zip(rows, samples):
            sample["row"] = int(row["where"].split()[-1])
            kept["prompt_ids"][sample["row"]] = sample["prompt_ids"].tolist()
        return samples

    def replay(model, samples, *rest):
        ids = [torch.tensor(ids) for s in samples for ids in job["completions"][s["row"] * G : (s["row"] + 1) * G]]
        return ids, [torch.zeros(len(x)) for x in ids], [False] * len(ids)

    rloo.make_rollout, rloo.encode_prompts = keep_responses, keep_prompts
    if job.get("min_new_tokens"):
        rloo.end_token_ids = lambda model, tokenizer: [max(end_ids(model, tokenizer)) + 10**6]
    if "completions" in job:
        rloo.generate = replay
    rloo.main(args)
    return kept


# --- cost curves -----------------------------------------------------------------------------------------------------

CURVES = {  # name -> title, label of the x axis
    "group_text": ("SmolLM2-135M, one prompt of 200 tokens", "responses per prompt (G) of 16 tokens"),
    "group_vlm": ("tiny VLM, 16 pictures with a question", "responses per prompt (G)"),
    "prompts": ("tiny VLM, G = 8", "prompts per batch, one picture each"),
    "response": ("tiny VLM, 16 prompts, G = 8", "tokens of each response"),
    "images": ("tiny VLM, 16 prompts, G = 8", "pictures per prompt"),
    "model": ("Llama, 2 prompts of 200 tokens, G = 8", "million parameters"),
}


def curve_points(args: Args, folder: Path) -> Iterator[tuple[str, float, dict, bool]]:
    """(curve, x, job of part rloo, whether TRL runs it too)."""
    pictures = easy_vqa_prompts(128)
    vlm = {"kind": "vlm", "model": args.vlm, "G": 8, "max_new_tokens": 24, "prompts": pictures[:16]}
    text = {"kind": "text", "model": args.text_model, "G": 8, "max_new_tokens": 16, "min_new_tokens": 16}
    text |= {"prompts": words(args, 1, 190), "micro_batch_tokens": 1024, "steps": 1}
    for G in (2, 4, 8, 16, 32):
        yield "group_vlm", G, {**vlm, "G": G}, True
    for G in (2, 4, 8, 16):
        yield "group_text", G, {**text, "G": G, "micro_rows": min(G, 4)}, True  # 4: TRL's fastest
    for count in (8, 32, 64, 128):
        yield "prompts", count, {**vlm, "prompts": pictures[:count]}, False
    for R in (16, 64, 128, 256):
        yield "response", R, {**vlm, "max_new_tokens": R, "min_new_tokens": R}, False
    for count in (1, 2, 4, 8):
        shown = [[p["image"] for p in pictures[i * count : (i + 1) * count]] for i in range(16)]
        yield "images", count, {**vlm, "prompts": [{**p, "images": x} for p, x in zip(pictures, shown)]}, False
    if args.cases and "model" not in args.cases:  # they have to be made first
        return
    for hidden, layers in ((192, 6), (384, 12), (576, 30), (768, 24)):
        model = args.text_model if hidden == 576 else str(folder / str(hidden))
        size = text_model_size(args, model, hidden, layers)
        yield "model", size / 1e6, {**text, "model": model, "prompts": words(args, 2, 190), "steps": 2}, False


def text_model_size(args: Args, name: str, hidden: int, layers: int) -> int:
    """Parameters of a text model, which is made with random weights unless it is SmolLM2 itself."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(args.text_model)
    if name != args.text_model:
        config.hidden_size, config.num_hidden_layers, config.intermediate_size = hidden, layers, 8 * hidden // 3
        config.num_attention_heads, config.num_key_value_heads = hidden // 64, hidden // 192
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(name)
        AutoTokenizer.from_pretrained(args.text_model).save_pretrained(name)
        return model.num_parameters()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def measure_curves(args: Args) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        for curve, x, case, with_trl in curve_points(args, Path(folder)):
            if args.cases and curve not in args.cases:
                continue
            job = {"job": "rloo", "beta": 0.05, "steps": args.steps + 1, **common_fields(args), **case}
            sides = {"ours": run_side(args, job, ours=True)}
            if with_trl:
                sides["trl"] = run_side(args, job, ours=False)
            result = {"part": "curves", "curve": curve, "x": x}
            for side, run in sides.items():
                timed = run["steps"][1:] or run["steps"]
                for field, name in (("seconds", "seconds"), ("update_seconds", "update"), ("peak_rss_bytes", "memory")):
                    result[f"{name}_{side}"] = statistics.median(step[field] for step in timed)
            yield result


def draw_curves(results: list[dict], path: Path) -> None:
    """Two panels for each curve: seconds of a step above peak memory. Linear axes from 0, so that linear cost is a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = [name for name in CURVES if any(r.get("curve") == name for r in results)]
    columns = min(3, len(curves))
    blocks = -(-len(curves) // columns)
    figure = Figure(figsize=(3.6 * columns, 4.8 * blocks), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * blocks, columns, squeeze=False)
    for i in range(len(curves), blocks * columns):
        for row in range(2 * (i // columns), 2 * (i // columns) + 2):
            grid[row, i % columns].set_axis_off()
    for i, curve in enumerate(curves):
        points = sorted((r for r in results if r.get("curve") == curve), key=lambda r: r["x"])
        rows = 2 * (i // columns), 2 * (i // columns) + 1
        for row, name, unit, label in zip(rows, ("seconds", "memory"), (1, 1e9), ("s per step", "GB at the peak")):
            axes = grid[row, i % columns]
            for side, shown, color in (("trl", "TRL", "#d9772b"), ("ours", "ours", "#2b6cb0")):
                own = [(r["x"], r[f"{name}_{side}"] / unit) for r in points if f"{name}_{side}" in r]
                if own:
                    growth = f"{shown}: x {own[-1][1] / own[0][1]:.1f}"
                    axes.plot(*zip(*own), "o-", color=color, markersize=4, linewidth=1.6, label=growth)
            axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.12)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_ylabel(label, fontsize=8)
            axes.tick_params(labelsize=8)
            axes.grid(color="#e4e4e4", linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False, loc="upper left")
            title, x_label = CURVES[curve]
            if name == "seconds":
                axes.set_title(title, fontsize=9, fontweight="bold", pad=12, loc="left")
            else:
                axes.set_xlabel(x_label, fontsize=8)
    figure.savefig(path)


# --- report ----------------------------------------------------------------------------------------------------------


def describe_machine(args: Args) -> dict:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True)
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "command": shlex.join(["python", "tools/bench.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "device": torch.cuda.get_device_name() if args.device != "cpu" else cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "dtype": "float32" if args.device == "cpu" else "bfloat16",
        "threads": torch.get_num_threads(),
        "clock": args.clock,
        "load_average": round(os.getloadavg()[0], 1),
    }


def report(machine: dict, results: list[dict]) -> str:
    """Markdown: what was run, on what, and a table per kind of result."""
    lines = [" · ".join(f"{name} {value}" for name, value in machine.items())]

    def table(header: str, rows: list[list[str]]) -> None:
        if rows:
            lines.extend(["", f"| {header} |", "|---" * (header.count("|") + 1) + "|"])
            lines.extend(f"| {' | '.join(row)} |" for row in rows)

    def kind(key: str) -> list[dict]:
        return [result for result in results if key in result]

    table(
        "part | padded tokens | packed tokens | padded s | packed s | speed-up | log-prob diff | gradient diff",
        [
            [r["part"], str(r["padded_tokens"]), str(r["packed_tokens"])]
            + [f"{r['padded_seconds']:.2f}", f"{r['packed_seconds']:.2f}", f"{r['speedup']:.1f}"]
            + [f"{r['max_logprob_difference']:.1e}", f"{r['relative_gradient_difference']:.1e}"]
            for r in kind("speedup")
        ],
    )
    table(
        "part | packed tokens | bare, s | update, s | speed | with log-probs beforehand: bare, s | all, s | speed",
        [
            [
                r["part"],
                f"{r['tokens']:.0f}",
                f"{r['bare_update']:.2f}",
                f"{r['update']:.2f}",
                f"{r['update_speed']:.0%}",
            ]
            + [f"{r['bare_update'] + r['bare_score']:.2f}", f"{r['phase']:.2f}", f"{r['work_speed']:.0%}"]
            for r in kind("update_speed")
        ],
    )
    spans = ("score", "update_packing", "update_forward", "update_backward", "update_optimizer")
    table(
        "part | log-probs beforehand, s | update: packing, s | forward | backward | clipping and optimizer | the rest",
        [
            [
                r["part"],
                *(f"{r[span]:.2f}" for span in spans),
                f"{r['update'] - sum(r[span] for span in spans[1:]):.2f}",
            ]
            for r in kind("update_speed")
        ],
    )
    table(
        "part | GFLOP of the update | matrix product, GFLOP/s | update, share of it | bare, share of it",
        [
            [r["part"], f"{r['flops'] / 1e9:.0f}", f"{r['peak_flops'] / 1e9:.0f}"]
            + [f"{r['update_mfu']:.0%}", f"{r['bare_mfu']:.0%}"]
            for r in kind("update_speed")
        ],
    )
    sides = ("seconds_ours", "seconds_trl", "update_ours", "update_trl")
    table(
        "curve | x | step: ours, s | TRL, s | update: ours, s | TRL, s | peak: ours, GB | TRL, GB",
        [
            [r["curve"], f"{r['x']:.0f}", *(f"{r[side]:.2f}" if side in r else "" for side in sides)]
            + [f"{r[side] / 1e9:.2f}" if side in r else "" for side in ("memory_ours", "memory_trl")]
            for r in kind("curve")
        ],
    )
    keys = [f"{what}_{side}" for what in ("step", "update") for side in ("ours", "trl", "ratio")]
    table(
        "part | step: ours, s | TRL, s | ratio | update: ours, s | TRL, s | ratio | peak: ours, GB | TRL, GB",
        [
            [r["part"], *(f"{r[key]:.2f}" if key in r else "" for key in keys)]
            + [f"{r[f'memory_{side}'] / 1e9:.2f}" for side in ("ours", "trl")]
            for r in kind("step_ratio")
        ],
    )
    for r in kind("copy"):
        names = [name for name in ("copy", "vllm", "vllm-server") if name in r]
        rows = [[name, f"{r[name]:.2f}", f"{r[name] / r['copy']:.1f}"] for name in names]
        table(f"{r['bytes'] / 1e9:.2f} GB of weights | s | against a copy", rows)
    table(
        "log-probs, forward and backward | dense GB | chunked GB | chunked / dense",
        [
            [f"{r['tokens']} tokens x {r['vocab']}", f"{r['dense_bytes'] / 1e9:.2f}"]
            + [f"{r['chunked_bytes'] / 1e9:.2f}", f"1/{1 / r['ratio']:.1f}"]
            for r in kind("dense_bytes")
        ],
    )
    return "\n".join(lines)


def measure(args: Args, part: str) -> Iterator[dict]:
    if part == "memory":
        yield compare_memory(args)
    elif part == "sync":
        yield measure_sync(args)
    elif part == "bare":
        yield from compare_with_bare(args)
    elif part == "curves":
        yield from measure_curves(args)
    elif part in TRL_PARTS:
        yield from compare_with_trl(args, part)
    else:
        if part == "text":
            model = load_smollm2(args)
            batch = text_batch(args, model)
        else:
            from transformers import AutoModelForImageTextToText

            model = AutoModelForImageTextToText.from_pretrained(args.vlm, dtype=torch.float32)
            batch = vlm_batch(args, model, sampled=part == "vlm")
        yield compare(args, part, model, batch)


def main(args: Args) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.child in ("chunked", "dense"):
        print(measure_memory(args))
        return
    if args.child:
        job_file = Path(args.child)
        job = json.loads(job_file.read_text())
        if job["threads"]:
            torch.set_num_threads(job["threads"])
        job_file.with_name("out.json").write_text(json.dumps(run_ours(job, job_file.parent)))
        return
    if args.clock == "cpu" and args.threads != 1:
        sys.exit("--clock cpu adds up the seconds of all threads: use it with --threads 1")
    machine, results = describe_machine(args), []
    for part in args.parts:
        for result in measure(args, part):
            results.append(result)
            if args.output:  # after each, since a part may take an hour
                folder = Path(args.output)
                folder.mkdir(parents=True, exist_ok=True)
                figures = {"machine": machine, "args": asdict(args), "results": results}
                (folder / "results.json").write_text(json.dumps(figures, indent=1) + "\n")
                (folder / "results.md").write_text(report(machine, results) + "\n")
                if part == "curves":
                    draw_curves(results, folder / "curves.png")
        gc.collect()
    if not results:
        sys.exit(f"--cases {' '.join(args.cases)}: {' '.join(args.parts)} has no such case")
    print("\n" + report(machine, results))


if __name__ == "__main__":
    main(tyro.cli(Args))
