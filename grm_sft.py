"""GRM SFT: a vision-language model learns to be a judge, which writes a verdict on two candidates.

It reads a question and two pictures, videos or texts; next-token prediction teaches it to write

    <think>image 1 has no triangle</think><answer>Image 2 is better</answer>

Pairs are shown in both orders, so that a side alone says nothing. The probabilities of its verdicts
serve as a reward: examples/judge_reward.py. Papers: https://arxiv.org/abs/2408.15240 and 2505.03318.
What differs from GRMTrainerVL (opendilab/LightRFT@49e62cb): docs/grm_sft.md.

Read to the end of main; below stands what it calls, in the order of use. Letters: B samples, R tokens
in the longest response, M trained tokens in a pack (common/packing.py), which is one forward.

    python grm_sft.py                   # tiny VLM on easy-VQA, minutes on two CPU cores
    python grm_sft.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset data.jsonl --learning-rate 1e-5
    torchrun --standalone --nproc_per_node=8 grm_sft.py --zero-stage 3 ...  # or: deepspeed grm_sft.py ...
"""

import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from common import packing
from common.packing import Prompt, PromptInfo

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # of data order and easy-vqa's pairs
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # folder, hub id
    dataset: str = "easy-vqa"  # easy-vqa, .jsonl/.json/.csv/.parquet, saved folder, hub id; see load_data
    dataset_split: str = "train"  # of easy-vqa, a hub id or a saved folder
    columns: tuple[str, ...] = ()  # our names = the data's: prompt=problem answer=solution
    eval_dataset: str | None = None  # held-out rows; easy-vqa has its own
    eval_dataset_split: str = "test"  # as --dataset-split
    train_samples: int = 8000  # a random subset; 0 = all
    system_prompt: str | None = None  # for prompts that have no system message
    video_fps: float = 2.0  # frames per second that are taken from videos
    max_length: int = 2048  # tokens of a row; longer rows are left out
    freeze: str = "visual|vision_tower|projector"  # weights that stay, by name
    lora_rank: int = 0  # train adapters of this rank on the language model; 0 = all weights
    lora_alpha: float = 32.0  # the adapters' output is scaled by alpha / rank
    # --- rollout ---
    generation_batch_size: int = 64  # judgements written side by side
    max_response_length: int = 16  # tokens, EOS counted; longer responses are cut
    # --- algorithm ---
    total_steps: int = 500  # optimizer steps; a pair is two rows, one an order
    train_batch_size: int = 32  # rows per step, over all ranks
    # --- optimizer ---
    learning_rate: float = 1e-3  # peak; pretrained: 1e-5, LoRA: 1e-4
    min_lr_ratio: float = 0.1  # after the warm-up it follows a cosine down to this fraction; 1 = constant
    warmup_steps: int = 20  # optimizer steps of linear warm-up
    weight_decay: float = 0.0  # of matrices (AdamW)
    adam_betas: tuple[float, float] = (0.9, 0.95)  # AdamW
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32
    zero_stage: Literal[0, 1, 2, 3] = 0  # shards 1 the optimizer, 2 + gradients, 3 + parameters
    offload_optimizer: bool = False  # keep optimizer states and the optimizer step on the CPU
    gradient_checkpointing: bool = False  # less memory, a third more time
    micro_batch_tokens: int = 8192  # tokens of one forward and backward on one rank
    # --- logging and checkpoints ---
    eval_steps: int = 100  # evaluate every so many steps, and at both ends; 0 = only there
    eval_samples: int = 500  # held-out rows; 0 = all
    best_metric: str = "accuracy"  # checkpoint-best has the best eval/...
    save_steps: int = 0  # checkpoint every so many steps, and at the end; 0 = only there
    save_total_limit: int = 2  # checkpoints kept, newest first
    track: Literal["off", "wandb", "tensorboard"] = "off"  # log there too


# ---- the algorithm: tensors in, tensors and metrics out ----


def next_token_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """L = -sum over t of log p(token t | those before) / num_tokens: logprobs (M,) of a pack, num_tokens
    of the step, so that its packs, on all ranks, add up to the mean. [-1, -3], 8 -> 0.5"""
    return -logprobs.sum() / num_tokens


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a rate p, E. B. Wilson 1927. 9 of 10 -> (0.596, 0.982)

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    p = successes / n
    z = 1.96
    middle = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


# ---- the data of a step ----


@dataclass
class Sample:
    """An assistant's turn, and all before it: a prompt, which samples with the same pictures share, and
    the response that follows. The prompt ends with the last picture (in an evaluation where the turn
    begins); of the response the turn alone is trained."""

    entry: int  # of batch_entries
    prompt: PromptInfo  # a whole Prompt on the rank that encodes the entry
    prompt_key: bytes  # equal where the prompts are
    response_ids: Tensor  # (R_b,): all behind the prompt, up to the turn's EOS
    start: int  # the turn is response_ids[start:]


@dataclass
class Data:
    source: str
    tokenizer: Any
    groups: list[list[int]]  # all entries, those with the same pictures together
    encode: Callable[[int], "Example | None"]  # None, and a warning, where it can't be used


@dataclass
class Run:
    """What setup makes, and all steps use."""

    folder: Path
    device: torch.device
    processor: Any  # of transformers, or a text model's tokenizer
    judge: Any  # DeepSpeed's engine around the trained Judge
    writer: Any  # the model that writes judgements: the trained one, under ZeRO-3 its copy
    train_data: Data
    eval_data: Data | None
    checkpoint: Path | None  # the newest
    state: dict  # stands in every checkpoint: add what must survive a resume
    tensorboard: Any = None  # its writer, once there is one


# ---- main ----


def main(args: Args) -> dict[str, float]:
    # --- 1. setup ---
    time_begin = time.perf_counter()
    run = setup(args)
    judge = run.judge
    state = run.state
    best_key = f"eval/{args.best_metric}"
    signals = []  # received: the run then ends, after its step and a checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    stopped = False
    metrics = {}

    if run.eval_data and not state["before"]:  # a resumed run has it
        state["before"], judgements = evaluate(args, run)
        if best_key not in state["before"]:
            fail(f"--best-metric: {run.eval_data.source} gives {', '.join(state['before'])}")
        log(args, run, {"train/step": 0, **state["before"]}, judgements)

    steps = range(state["step"] + 1, args.total_steps + 1)
    no_bar = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step
    bar = tqdm(steps, "grm_sft", total=args.total_steps, initial=state["step"], disable=no_bar)
    for step in bar:
        # --- 5. update: the gradients of all packs, and one optimizer step ---
        time_start = time.perf_counter()
        first_entry = (step - 1) * args.train_batch_size
        entries = batch_entries(
            run.train_data.groups, start=first_entry, count=args.train_batch_size, seed=args.seed
        )
        samples = load_samples(run.train_data, entries)  # of all ranks
        num_tokens = sum(len(sample.response_ids) - sample.start for sample in samples)
        judge.train()
        step_loss = torch.zeros((), device=run.device)  # of this rank's packs
        packs = list(packs_of(args, run, samples))  # this rank's share
        for k, pack in enumerate(packs):
            judge.set_gradient_accumulation_boundary(k == len(packs) - 1)
            logprobs = judge(pack)  # (M,)
            loss = next_token_loss(logprobs, num_tokens)
            # The factor undoes DeepSpeed's mean over ranks, scale_wrt_gas=False its mean over packs.
            judge.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
            step_loss += loss.detach()
        grad_norm = optimizer_step(judge)  # None: left out, its gradients were not finite
        judge.eval()
        step_loss = sum_over_ranks(step_loss, run.device).item()  # of all ranks
        seconds = time.perf_counter() - time_start

        # --- 7. metrics ---
        metrics = {
            "train/step": step,
            "train/learning_rate": judge.get_lr()[0],
            "train/grad_norm": grad_norm or 0.0,
            "train/skipped_updates": int(grad_norm is None),
            "train/trained_tokens": num_tokens,
            "loss/sft": step_loss,
            "rollout/prompts_dropped": len(set(entries) - {sample.entry for sample in samples}),
            "time/total": seconds,
        }
        judgements = []
        shown = {"loss": f"{step_loss:.4f}"}

        # --- 8. evaluate, log, save ---
        is_last = step == args.total_steps
        is_best = False
        if run.eval_data and (is_last or is_due(step, args.eval_steps)):
            eval_metrics, judgements = evaluate(args, run)
            metrics |= eval_metrics
            shown[f"held-out {args.best_metric}"] = f"{eval_metrics[best_key]:.3f}"
            goodness = eval_metrics[best_key] * (-1 if args.best_metric == "loss" else 1)
            is_best = goodness > state["best"]
            state["best"] = max(goodness, state["best"])
        log(args, run, metrics, judgements)
        bar.set_postfix(shown)
        if no_bar:
            tell(f"step {step} of {args.total_steps}, {seconds:.2f} s: {shown}")

        state["step"] = step
        state["skipped"] = state["skipped"] + 1 if grad_norm is None else 0
        is_hopeless = state["skipped"] >= 5
        stopped = sum_over_ranks(torch.tensor(len(signals)), run.device).item() > 0 and not is_last
        if is_last or is_best or stopped or is_hopeless or is_due(step, args.save_steps):
            run.checkpoint = save_checkpoint(args, run, is_best)
        if is_hopeless:
            fail(f"step {step}: no finite gradients, 5 times; the weights before: {run.checkpoint}")
        if stopped:
            tell(f"stopped by a signal after step {step}; go on with --resume {run.checkpoint}")
            break

    # --- 9. finish ---
    if not stopped:
        summary = []
        for name, before in state["before"].items():
            if name in metrics:
                summary.append(f"{name} {before:.3f} -> {metrics[name]:.3f}")
        tell(" · ".join([*summary, f"{time.perf_counter() - time_begin:.0f} s", str(run.checkpoint)]))
        tell(f"to see it: python tools/report.py {run.folder}")
    dist.destroy_process_group()
    return metrics


def is_due(step: int, every: int) -> bool:
    """every: --eval-steps or --save-steps, 0 for never."""
    return every != 0 and step % every == 0


# ---- setup ----


def setup(args: Args) -> Run:
    """Load what the steps need, and prove what they rely on. Bad input ends the run here."""
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    device = init_distributed()
    folder, checkpoint = find_run(args)
    is_fp32 = args.dtype == "float32" or (args.dtype == "auto" and device.type == "cpu")
    dtype = torch.float32 if is_fp32 else torch.bfloat16

    torch.manual_seed(args.seed)  # of LoRA's first weights
    model = load_model(args.model, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (args.freeze and re.search(args.freeze, name)))
    if args.lora_rank > 0:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    judge = make_engine(args, Judge(model), dtype, args.total_steps, args.learning_rate)
    judge.eval()
    # before: the evaluation at step 0; best: so far; skipped: updates in a row
    state = {"step": 0, "before": {}, "best": -math.inf, "skipped": 0}
    if checkpoint is not None:
        _, client_state = judge.load_checkpoint(str(checkpoint / "state" / "judge"), tag="engine")
        state = client_state["ours"]

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = load_data(args, args.dataset, args.dataset_split, model, processor, training=True)
    eval_source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = None
    if eval_source:
        eval_data = load_data(args, eval_source, args.eval_dataset_split, model, processor, training=False)
    open_folder(args, folder, last_step=state["step"])
    tell(f"{folder}: {sum(map(len, train_data.groups))} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")

    enable_packing(args, judge, train_data)
    writer = model
    if args.zero_stage == 3:
        writer = load_model(args.model, dtype).to(device)
        packing.switch_attention(writer, model.config.get_text_config()._attn_implementation)
    return Run(
        folder=folder, device=device, processor=processor, judge=judge, writer=writer,
        train_data=train_data, eval_data=eval_data, checkpoint=checkpoint, state=state,
    )  # fmt: skip


def check_args(args: Args) -> None:
    if min(args.train_batch_size, args.total_steps) < 1:
        fail("counts must be at least 1")
    if args.micro_batch_tokens < args.max_length:
        fail("--micro-batch-tokens must hold --max-length")
    if args.offload_optimizer and args.zero_stage == 0:
        fail("--offload-optimizer needs --zero-stage 1 to 3")
    if args.resume == "auto" and args.run_name is None:
        fail("--resume auto needs --run-name")


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def tell(message: str) -> None:
    if RANK == 0:
        tqdm.write(message)  # also under a progress bar
        sys.stdout.flush()


def enable_packing(args: Args, judge, data: Data) -> None:
    """Pack if that is exact for some rows of the data."""
    some_groups = data.groups[:: len(data.groups) // 16 + 1]
    examples = [example for group in some_groups if (example := data.encode(group[0]))]
    if not examples:
        fail(f"{data.source}: no row can be used")
    prompts = [sample.prompt for example in examples for sample in example.samples]
    told = packing.enable_packing_if_exact(
        model=judge.module.model,
        forward=judge,
        prompts=prompts,
        max_length=args.max_length,
        max_tokens=args.micro_batch_tokens,
    )
    tell(told)


def end_token_ids(model, tokenizer) -> list[int]:
    end_ids = model.generation_config.eos_token_id  # one, several or None
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return sorted({*end_ids, tokenizer.eos_token_id} - {None})


# ---- data ----


EASY_VQA_KINDS = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"
VERDICTS = {"1": "{} 1 is better", "2": "{} 2 is better", "tie": "Both are equally good"}
SWAPPED = {"1": "2", "2": "1", "tie": "tie", "first": "second", "second": "first"}
SIDE = r"(?i)(?<=\b{0} )[12]\b|\b(?:first|second)(?= {0}\b)"  # in reasoning


@dataclass
class Example:
    """An entry as the model reads it."""

    entry: int  # 2 * row; + 1: a pair with its sides exchanged
    row: dict  # of the data set
    samples: list[Sample]  # of each assistant's turn; a pair has one
    noun: str  # what the candidates are called: Image, Video or Answer; empty for a chat
    truth: str | None  # the verdict, one of VERDICTS; None for a chat


def batch_entries(groups: list[list[int]], start: int, count: int, seed: int) -> list[int]:
    """Entries start ... start + count - 1 of one endless stream of epochs of shuffled groups."""
    epoch_size = sum(len(group) for group in groups)
    stream = []
    for epoch in range(start // epoch_size, (start + count - 1) // epoch_size + 1):
        for g in np.random.default_rng([seed, epoch]).permutation(len(groups)).tolist():
            stream += groups[g]
    return stream[start % epoch_size :][:count]


def load_samples(data: Data, entries: list[int]) -> list[Sample]:
    """Some entries, dealt out to the ranks -> their samples on all ranks, without pictures."""
    own = []
    for entry in np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist():
        example = data.encode(entry)
        for sample in example.samples if example else []:
            prompt = sample.prompt
            info = PromptInfo(prompt.index, prompt.length, prompt.kinds)
            own.append(replace(sample, prompt=info))
    samples = gather(own)
    if len({sample.entry for sample in samples}) * 2 < len(set(entries)):
        fail(f"more than half of {len(entries)} rows of {data.source} can't be used: see the warnings")
    return samples


def gather(own: list) -> list:
    """The lists of all ranks as one list, on every rank."""
    if WORLD_SIZE == 1:
        return own
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, own)
    return [item for part in lists for item in part]


def load_data(args: Args, source: str, split: str, model, processor, training: bool) -> Data:
    """Columns of pairs: `prompt`; `image_0`, `image_1` or `video_0`, `video_1` or texts, `answer_0`,
    `answer_1`; `verdict`: 1, 2 or tie; optional `reasoning`, `image(s)`, `video(s)` of the prompt.
    Chats: `messages`, `image(s)`, `video(s)`. From `answer` alone, as in easy-VQA, pairs are made."""
    rows = rename_columns(args, source, load_rows(source, split))
    columns = set(rows.column_names)
    if "messages" not in columns and not ("prompt" in columns and columns & {"verdict", "answer"}):
        has = ", ".join(rows.column_names)
        fail(f"{source} has columns {has}: rename yours, --columns messages=... or prompt=... verdict=...")
    makes_pairs = not columns & {"messages", "verdict"}
    folder = Path(source).parent
    seed = args.seed if training else 0
    previous = None  # the newest sample: rows with the same pictures follow each other

    @functools.lru_cache(maxsize=2 * args.train_batch_size)  # a step asks twice
    def encode(entry: int) -> Example | None:
        nonlocal previous
        index = entry // 2
        try:
            row = rows[index]
            if makes_pairs:
                row = make_pair(row, np.random.default_rng([seed, index]))
            example = encode_row(
                args, model, processor, row, entry, folder, share=training, previous=previous
            )
            previous = example.samples[-1]
            return example
        except Exception as error:
            tqdm.write(f"warning: {source} row {index} is left out: {error!s:.300}", file=sys.stderr)
            return None

    limit = args.train_samples if training else args.eval_samples
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[: limit or None]).tolist()
    groups = group_entries(rows, chosen, makes_pairs)
    tokenizer = getattr(processor, "tokenizer", processor)
    return Data(source=source, tokenizer=tokenizer, groups=groups, encode=encode)


def group_entries(rows, chosen: list[int], makes_pairs: bool) -> list[list[int]]:
    """Of a chat one entry, of a pair two; those whose pictures have the same paths stand together."""
    media = ("image", "images", "video", "videos")
    names = [name for name in ("messages", "verdict", "answer") if name in rows.column_names]
    names += [x for x in media if re.match("(List|Value).*string", str(rows.features.get(x)))]
    groups = defaultdict(list)
    for index, row in zip(chosen, rows.select(chosen).select_columns(names)):
        is_pair = makes_pairs or (row.get("verdict") is not None and not row.get("messages"))
        paths = [row.get(name) for name in media]
        key = str(paths) if any(paths) else index
        groups[key] += [2 * index, 2 * index + 1] if is_pair else [2 * index]
    return list(groups.values())


def load_rows(source: str, split: str):
    """A `datasets.Dataset` from easy-vqa, a local file or folder, or the hub."""
    import datasets

    datasets.disable_progress_bars()
    file_format = Path(source).suffix[1:].replace("jsonl", "json")
    try:
        if source == "easy-vqa":
            return easy_vqa_rows(split)
        if file_format in ("json", "csv", "parquet"):
            return datasets.load_dataset(file_format, data_files=source, split="train")
        if not Path(source).is_dir():
            return datasets.load_dataset(source, split=split)
        rows = datasets.load_from_disk(source)
        return rows[split] if isinstance(rows, dict) else rows
    except Exception as error:
        fail(f"{source} (split {split}; HF_HOME) can't be read as a dataset: {error.__cause__ or error}")


def rename_columns(args: Args, source: str, rows):
    """By --columns. Held-out data may have the script's names already."""
    names = {}  # the script's -> the data's
    for pair in args.columns:
        ours, _, theirs = pair.partition("=")
        if ours and theirs in rows.column_names:
            names[ours] = theirs
        elif source == args.dataset:
            fail(f"--columns takes name=column, not {pair}: {source} has {', '.join(rows.column_names)}")
    taken = {*names, "messages"} if "prompt" in names else {*names}  # else messages would be the prompt
    unused = [name for name in rows.column_names if name in taken and name not in names.values()]
    return rows.remove_columns(unused).rename_columns({names[ours]: ours for ours in names})


def easy_vqa_rows(split: str):
    """64 x 64 drawings with questions, inside the package of that name."""
    import datasets
    import easy_vqa

    questions, answers, image_numbers = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    images = [str(paths[number]) for number in image_numbers]
    return datasets.Dataset.from_dict({"prompt": questions, "image": images, "answer": answers})


def make_pair(row: dict, rng: np.random.Generator) -> dict:
    """easy-VQA: the answer against a wrong one of its kind, on drawn sides."""
    right = row["answer"]
    kind = next(kind.split() for kind in EASY_VQA_KINDS if right in kind.split())
    wrong = str(rng.choice([other for other in kind if other != right]))
    pair = {"answer_0": right, "answer_1": wrong, "verdict": "1"}
    if rng.integers(2) == 1:
        pair = {"answer_0": wrong, "answer_1": right, "verdict": "2"}
    return {**row, **pair, "reasoning": right}


def encode_row(
    args: Args, model, processor, row: dict, entry: int, folder: Path, share: bool, previous: Sample | None
) -> Example:
    """folder: of relative paths. share: prompts end with the last picture, if there is one. previous: a
    sample whose prompt serves again where it is equal: a picture goes through the processor once."""
    tokenizer = getattr(processor, "tokenizer", processor)
    chat, noun, truth = make_chat(row, swap=entry % 2 == 1)
    messages = to_messages(args, chat, folder, tokenizer)
    media_ids = packing.media_token_ids(model.config) if share else []
    samples = []
    for n, ids, start in split_chat(processor, messages, end_token_ids(model, tokenizer)):
        ends = [t + 1 for t in range(start) if ids[t] in media_ids]
        end = ends[-1] if ends else start  # of the prompt
        key = key_of(ids[:end], messages[:n])
        if previous is None or previous.prompt_key != key:
            inputs = packing.encode_chat(processor, messages[:n], add_generation_prompt=True)
            N = inputs["input_ids"].shape[1]  # a picture is several tokens here
            P = N - (start - end)
            if inputs["input_ids"][0, P:].tolist() != ids[end:start]:
                end, P = start, N  # the processor has rewritten it: nothing is shared
                key = key_of(ids[:end], messages[:n])
            inputs = {name: torch.as_tensor(x) for name, x in inputs.items()}
            inputs = {k: x[:, :P] if x.shape[:2] == (1, N) else x for k, x in inputs.items()}
            prompt = packing.make_prompt(model, inputs, index=entry, messages=messages[:n])
        else:
            prompt = previous.prompt
        response_ids = torch.tensor(ids[end:])
        length = prompt.length + len(response_ids)
        if length > args.max_length:
            raise ValueError(f"{length} tokens are more than --max-length")
        previous = Sample(
            entry=entry, prompt=prompt, prompt_key=key, response_ids=response_ids, start=start - end
        )
        samples.append(previous)
    if not samples:
        raise ValueError("no assistant's turn")
    return Example(entry=entry, row=row, samples=samples, noun=noun, truth=truth)


def make_chat(row: dict, swap: bool) -> tuple[dict, str, str | None]:
    """A pair, its sides exchanged or not -> a chat, what the candidates are called, the verdict."""
    if row.get("messages"):
        return row, "", None
    kinds = [kind for kind in ("image", "video", "answer") if row.get(f"{kind}_0") is not None]
    verdict = str(row["verdict"])
    if not kinds or verdict not in VERDICTS:
        raise ValueError("a pair needs two candidates, a verdict: 1, 2 or tie")
    kind = kinds[0]
    noun = kind.capitalize()
    sides = [row[f"{kind}_0"], row[f"{kind}_1"]]
    thought = row.get("reasoning") or ""
    if swap:
        sides.reverse()
        verdict = SWAPPED[verdict]
        thought = re.sub(SIDE.format(noun), lambda side: SWAPPED[side[0].lower()], thought)

    question = row["prompt"]
    media = {}
    for name in ("image", "video"):
        items = row.get(name) or row.get(f"{name}s") or []
        items = items if isinstance(items, list) else [items]
        if f"<{name}>" not in question:
            question = f"<{name}>" * len(items) + question
        media[f"{name}s"] = items + sides if name == kind else items
    shown = [f"<{kind}>", f"<{kind}>"]
    if kind == "answer":  # a text can't show pictures
        shown = [re.sub("<(image|video)>", r"< \1>", text) for text in sides]
    asked = f"{question}\n{noun} 1: {shown[0]}\n{noun} 2: {shown[1]}"
    said = (f"<think>{thought}</think>" if thought else "") + write_verdict(verdict, noun)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": turns, **media}, noun, verdict


def write_verdict(verdict: str, noun: str) -> str:
    return f"<answer>{VERDICTS[verdict].format(noun)}</answer>"


def read_verdict(text: str) -> str | None:
    """None where the text has not exactly one <answer>, or another sentence in it."""
    sentence = "(?:Image|Video|Answer) ([12]) is better|Both are equally good"
    found = re.findall(f"<answer>(?:{sentence})</answer>", text)
    return found[0] or "tie" if len(found) == text.count("<answer>") == 1 else None


def to_messages(args: Args, row: dict, folder: Path, tokenizer) -> list[dict]:
    """A row's string or chat, pictures and videos -> messages of lists of parts, media opened and in
    their places: where <image> and <video> stand, or parts of such types; else in front."""
    chat = row.get("messages") or row["prompt"]
    if isinstance(chat, str):
        chat = [{"role": "user", "content": chat}]
    media = {}
    for kind in ("image", "video"):
        items = row.get(kind) or row.get(f"{kind}s") or []
        media[kind] = list(items) if isinstance(items, list) else [items]

    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    messages = []
    for message in chat:
        text = message["content"]
        if not isinstance(text, str):  # parts become a text with marks, their media join the row's
            parts = message["content"]
            for kind, items in media.items():
                items += [part[kind] for part in parts if part.get(kind) is not None]
            text = "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts)
        pieces = [text] if message["role"] == "assistant" else re.split("<(image|video)>", text)
        parts = []
        for i, piece in enumerate(pieces):
            if i % 2 == 1:  # between two texts the kind of a mark
                parts.append({"type": piece})
            elif piece:
                parts.append({"type": "text", "text": defuse(piece, special_tokens)})
        messages.append({"role": message["role"], "content": parts})

    for kind, items in media.items():
        places = [part for message in messages for part in message["content"] if part["type"] == kind]
        if items and not places:  # in front
            places = [{"type": kind} for _ in items]
            first_user = next(message for message in messages if message["role"] == "user")
            first_user["content"] = places + first_user["content"]
        if len(places) != len(items):
            raise ValueError(f"{len(places)} places for {kind}s, but {len(items)} {kind}s")
        for part, source in zip(places, items):
            part.update(open_media(kind, source, folder, args.video_fps))
    if args.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": args.system_prompt}]})
    return messages


def open_media(kind: str, source, folder: Path, fps: float) -> dict:
    """PIL, bytes, {"bytes", "path"} or a path, relative to the dataset's file -> part of a message:
    a picture in RGB, or fps frames a second (F, height, width, 3) and when they were taken."""
    if kind == "video":
        frames, metadata = transformers.video_utils.load_video(str(folder / source), fps=fps, backend="pyav")
        needed = {name: metadata[name] for name in ("total_num_frames", "fps", "frames_indices")}
        return {"type": "video", "video": frames, "metadata": needed}
    if isinstance(source, dict):
        source = source["bytes"] or source["path"]
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    elif isinstance(source, str):
        source = folder / source
    image = source if isinstance(source, Image.Image) else Image.open(source)
    return {"type": "image", "image": image.convert("RGB")}


def defuse(text: str, special_tokens: list[str]) -> str:
    """Data must not end a turn or stand for a picture: "<|im_end|>" -> "< |im_end|>"."""
    while found := [token for token in special_tokens if token in text]:  # one may leave another
        token = found[0]
        text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else " ")
    return text


def split_chat(processor, messages: list[dict], end_ids: list[int]) -> list[tuple[int, list[int], int]]:
    """A chat -> of each assistant's turn its number, the tokens of the chat up to its EOS
    (which the last one always gets), a picture being one, and where in these it starts. Found
    by counting: the tokens up to a turn, and up to its end, must be how the whole begins."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is processor:  # a text model's template takes strings
        messages = [m | {"content": "".join(part["text"] for part in m["content"])} for m in messages]
    tokenize = functools.partial(
        tokenizer.apply_chat_template, chat_template=processor.chat_template, return_dict=False
    )
    whole = tokenize(messages)
    turns = []
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenize(messages[:n], add_generation_prompt=True)
        ids = tokenize(messages[: n + 1])
        if whole[: len(before)] != before or whole[: len(ids)] != ids:
            raise ValueError(f"the chat template writes message {n} differently if others follow")
        ends = [t for t in range(len(before), len(ids)) if ids[t] in end_ids]
        if ends:
            ids = ids[: ends[0] + 1]
        elif n == len(messages) - 1:
            ids = [*ids, tokenizer.eos_token_id]
        turns.append((n, ids, len(before)))
    return turns


def key_of(ids: list[int], messages: list[dict]) -> bytes:
    """A hash of tokens and of the pictures and videos that they stand for."""
    key = hashlib.blake2b(str(ids).encode())
    for message in messages:
        for part in message["content"]:
            if part["type"] != "text":
                content = np.asarray(part[part["type"]])
                key.update(f"{content.shape} {part.get('metadata')}".encode() + content.tobytes())
    return key.digest()


# ---- forward ----


def packs_of(args: Args, run: Run, samples: list[Sample]) -> Iterator[packing.Pack]:
    """This rank's packs of a step's samples, with the trained tokens alone as targets."""
    sharing = defaultdict(list)  # key of a prompt -> the samples that have it
    for b, sample in enumerate(samples):
        sharing[sample.prompt_key].append(b)

    def encode(b: int) -> Prompt:
        own = run.train_data.encode(samples[b].entry).samples
        return next(x.prompt for x in own if x.prompt_key == samples[b].prompt_key)

    packs = packing.packs_of_rank(
        groups=[(members[0], members) for members in sharing.values()],
        prompts=[replace(sample.prompt, index=b) for b, sample in enumerate(samples)],
        encode=encode, responses=[sample.response_ids for sample in samples],
        max_tokens=args.micro_batch_tokens, rank=RANK, world_size=WORLD_SIZE,
        packed=packing.is_packed(run.judge.module.model), media_everywhere=args.zero_stage > 0,
    )  # fmt: skip
    starts = torch.tensor([sample.start for sample in samples])  # (B,)
    for pack in packs:
        b, t = pack.token_index
        trained = t >= starts[b]  # of all response tokens of the pack
        targets = pack.targets[trained]
        predict_from = pack.predict_from[trained]
        yield pack._replace(targets=targets, predict_from=predict_from).to(run.device)


# ---- evaluation ----


def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """Held-out rows, dealt out to the ranks -> metrics, and the judgements of the first orders."""
    data = run.eval_data
    if run.writer is not run.judge.module.model:
        weights = run.writer.state_dict()
        for name, weight in merged_weights(run.judge.module.model):
            weights[name].copy_(weight)
    entries = [entry for group in data.groups for entry in group]
    own_entries = np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist()
    own = []  # (entry, judgement)
    for start in range(0, len(own_entries), args.generation_batch_size):
        batch = own_entries[start : start + args.generation_batch_size]
        examples = [example for entry in batch if (example := data.encode(entry))]
        if examples:
            judgements = write_judgements(args, run.writer, data.tokenizer, examples)
            own += zip([example.entry for example in examples], judgements)
    judged = dict(sorted(gather(own)))
    if not judged:
        fail(f"{data.source}: no row can be used")

    for entry, judgement in judged.items():
        other = judged.get(entry ^ 1)  # a chat has none
        expected = SWAPPED.get(judgement["verdict"], "unreadable")
        judgement["swap_consistency"] = other["verdict"] == expected if other else None
        judgement["swapped_response"] = other["response"] if other else None
    in_first_order = [judgement for entry, judgement in judged.items() if entry % 2 == 0]
    return judge_metrics(in_first_order), in_first_order


@torch.no_grad()
def write_judgements(args: Args, model, tokenizer, examples: list[Example]) -> list[dict]:
    """What the model as a judge writes to each example, and how likely it finds each verdict:
    softmax over verdicts of log p(own reasoning, verdict | prompt)."""
    end_ids = end_token_ids(model, tokenizer)
    samples = [example.samples[-1] for example in examples]
    prompts = [replace(sample.prompt, index=i) for i, sample in enumerate(samples)]
    written = generate_greedily(args, model, prompts, end_ids)
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)

    responses = []  # to each prompt the true one, and the judge's own reasoning with each verdict
    for example, sample, text in zip(examples, samples, texts):
        reasoning = text.partition("<answer>")[0]
        verdicts = [reasoning + write_verdict(verdict, example.noun) for verdict in VERDICTS]
        verdict_ids = tokenizer(verdicts, add_special_tokens=False)["input_ids"]
        responses += [sample.response_ids, *map(torch.tensor, verdict_ids)]
    logprobs = sum_logprobs(args, model, prompts, responses)  # (n, 1 + verdicts)

    judgements = []
    for i, example in enumerate(examples):
        truth = example.truth
        verdict = read_verdict(texts[i])
        soft = dict(zip(VERDICTS, logprobs[i, 1:].softmax(0).tolist()))
        likeliest = max(soft, key=soft.get)
        readable = {k: x for k, x in example.row.items() if isinstance(x, str | int | float)}
        judgements.append({
            **readable, "phase": "eval", "row": example.entry // 2,
            "response": texts[i], "verdict": verdict, "truth": truth, "probabilities": soft,
            "accuracy": None if truth is None else verdict == truth,  # unreadable: wrong
            "soft_accuracy": None if truth is None else likeliest == truth,
            "parse_rate": verdict is not None, "tie_rate": verdict == "tie",
            "length": len(written[i]), "truncated_frac": int(written[i][-1]) not in end_ids,
            "loss": -float(logprobs[i, 0]), "tokens": len(samples[i].response_ids),
        })  # fmt: skip
    return judgements


def generate_greedily(args: Args, model, prompts: list[Prompt], end_ids: list[int]) -> list[Tensor]:
    """The likeliest tokens after each prompt (R_b,), up to an EOS or the length limit."""
    R = args.max_response_length
    if not packing.is_packed(model):
        responses = packing.generate_plain(model, prompts, 1, R, end_ids, temperature=0.0)
        return [response.ids for response in responses]
    decoder = packing.Decoder(model, prompts, 1)
    ends = torch.tensor(end_ids, device=model.device)
    tokens = ends.new_empty(len(prompts), 0)
    while tokens.shape[1] < R:
        token = packing.next_logprobs(model, decoder.hidden, 1.0).argmax(-1)  # (n,)
        tokens = torch.cat([tokens, token[:, None]], dim=1)  # (n, t)
        is_end = torch.isin(tokens, ends)
        if is_end.any(1).all():
            break
        decoder.step(token)
    is_kept = is_end.cumsum(1) - is_end.long() == 0  # up to the first EOS
    return [row[kept] for row, kept in zip(tokens.cpu(), is_kept.cpu())]


def sum_logprobs(args: Args, model, prompts: list[Prompt], responses: list[Tensor]) -> Tensor:
    """log p of whole responses, k to each of n prompts -> (n, k), in float64."""
    n = len(prompts)
    k = len(responses) // n
    packs = packing.packs_of_rank(
        groups=[(i, list(range(i * k, (i + 1) * k))) for i in range(n)], prompts=prompts,
        encode=prompts.__getitem__, responses=responses, packed=packing.is_packed(model),
        max_tokens=args.micro_batch_tokens + 2 * args.max_response_length,
    )  # fmt: skip
    table = torch.zeros(n * k, max(map(len, responses)), dtype=torch.float64)  # (n * k, R)
    for pack in packs:
        logprobs, _ = packing.response_logprobs(model, pack.to(model.device))
        table[pack.token_index] = logprobs.double().cpu()
    return table.sum(1).view(n, k)


def judge_metrics(judgements: list[dict]) -> dict[str, float]:
    """Means over the judgements that have what it takes: a verdict, two sides."""
    metrics = {}
    names = "accuracy soft_accuracy swap_consistency parse_rate tie_rate length truncated_frac"
    for name in names.split():
        values = [float(x[name]) for x in judgements if x[name] is not None]
        if values:
            metrics[f"eval/{name}"] = float(np.mean(values))
        if values and name == "accuracy":
            low, high = wilson_interval(sum(values), len(values))
            metrics |= {"eval/accuracy_low": low, "eval/accuracy_high": high}
    num_tokens = sum(x["tokens"] for x in judgements)
    metrics["eval/loss"] = sum(x["loss"] for x in judgements) / num_tokens
    metrics["eval/num_samples"] = len(judgements)
    return metrics


def messages_of(run: Run, sample: dict) -> list[dict]:
    """The prompt of a sample, with opened pictures."""
    return run.eval_data.encode(2 * sample["row"]).samples[-1].prompt.messages


# ---- model ----


class Judge(nn.Module):
    """The model as DeepSpeed runs it: pack -> log-probs (M,) of its targets."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pack: packing.Pack) -> Tensor:
        logprobs, _ = packing.response_logprobs(self.model, pack)
        return logprobs


def load_model(name: str, dtype: torch.dtype):
    """A vision-language or text model, by what its config says, without dropout."""
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        is_vision = hasattr(config, "vision_config")
        kind = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
        # SDPA would leave out a soft cap on attention scores (Gemma 2) without a word.
        has_softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        attention = "eager" if has_softcap else None
        model = kind.from_pretrained(name, dtype=dtype, attn_implementation=attention)
    except Exception as error:
        fail(f"the model {name} can't be loaded: {error}")
    # Sampled, old and new log-probs are of one function: no attention_dropout, layerdrop, ...
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            is_dropout = "drop" in attribute or (attribute == "p" and isinstance(module, nn.Dropout))
            if is_dropout and isinstance(value, float):
                setattr(module, attribute, 0.0)
    return model


def add_adapters(args: Args, model) -> None:
    """LoRA on the language model's linear layers; B starts at 0, so nothing changes yet."""
    from peft import LoraConfig

    language_model = getattr(model.base_model, "language_model", model.base_model)
    inside = set(language_model.modules())
    targets = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m in inside]
    model.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets))


@torch.no_grad()
def merged_weights(model) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the plain model, one after the other, tied ones under each name:
    gathered under ZeRO-3 (collective), adapters added out of place, W + alpha / rank B A:
    merging in place would wear bf16 weights down."""
    import deepspeed

    saved_names = set(model.state_dict())
    lora_layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, buffer in model.named_buffers():
        if name in saved_names:
            yield name, buffer
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        is_sharded = hasattr(parameter, "ds_id")
        layer = lora_layers.get(name.removesuffix(".base_layer.weight"))
        adapters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight] if layer else []
        with deepspeed.zero.GatheredParameters([parameter, *adapters], enabled=is_sharded):
            weight = parameter.detach()
            if layer:
                lora_a, lora_b = (adapter.float() for adapter in adapters)  # (rank, in), (out, rank)
                weight = (weight.float() + layer.scaling["default"] * (lora_b @ lora_a)).to(weight.dtype)
            elif is_sharded:
                weight = weight.clone()
        yield name.replace(".base_layer.", "."), weight


# ---- DeepSpeed ----


def init_distributed() -> torch.device:
    """Without a launcher: one process and no port, so that runs never collide."""
    on_cuda = torch.cuda.is_available()
    local_rank = os.environ.get("LOCAL_RANK", "0")
    device = torch.device("cuda", int(local_rank)) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        # SDPA's first choice on sm90: NaN gradients with masks (torch 2.13, huggingface/trl#7181).
        torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "nccl" if on_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ |= {"LOCAL_RANK": local_rank, "DS_ACCELERATOR": device.type}
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would compile for a minute
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return device


def make_engine(
    args: Args, module: nn.Module, dtype: torch.dtype, total_updates: int = 0, learning_rate: float = 0.0
):
    """DeepSpeed engine with AdamW (no decay on vectors) and schedule; with no updates, a
    frozen module's, it has neither. A pack is a micro-batch: their number varies, so
    `set_gradient_accumulation_boundary` ends a step, batch sizes stay 1 here, and the losses
    carry their own global denominators."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": False,
            "reduce_scatter": dist.get_backend() != "gloo",  # gloo has none
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {"device": "cpu" if args.offload_optimizer else "none"},
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler
    }
    if args.zero_stage == 3 and (head := module.model.get_output_embeddings()):
        deepspeed.zero.register_external_parameter(module, head.weight)  # read outside its own forward
    optimizer = None
    schedule = None
    if total_updates > 0:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        vectors = [parameter for parameter in trained if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}]
        if vectors:  # LoRA has none
            groups.append({"params": vectors, "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=args.adam_betas, fused=True)
        schedule = transformers.get_scheduler(
            name="cosine_warmup_with_min_lr",
            optimizer=optimizer,
            num_warmup_steps=args.warmup_steps,
            num_training_steps=total_updates,
            scheduler_specific_kwargs={"min_lr_rate": args.min_lr_ratio},
        )
    engine, _, _, _ = deepspeed.initialize(
        model=module, config=config, optimizer=optimizer, lr_scheduler=schedule, dist_init_required=False
    )
    if optimizer is not None:  # in bf16 without ZeRO it has made a step without gradients
        for state in optimizer.state.values():
            state["step"].zero_()
    return engine


def optimizer_step(engine) -> float | None:
    """Clip, step, advance the schedule -> gradient norm before clipping, or None where it was
    not finite and the step was left out: all ranks decide alike, by the reduced gradients."""
    if not engine.zero_optimization() and not engine.bfloat16_enabled():  # has no check of its own
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not norm.isfinite():
            engine.zero_grad()
            return None
        engine.step()
        return float(norm)
    engine.step()
    optimizer = engine.optimizer
    # A parameter without gradients in the next step, as a vision tower's without pictures, would
    # have these again (DeepSpeed 0.19): ZeRO-3 keeps them here, with offload in groups.
    kept = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        kept += [group.grad for group in getattr(optimizer, name, [])]
    for gradients in kept:
        if torch.is_tensor(gradients):
            gradients.zero_()
    return float(engine.get_global_grad_norm()) if engine.was_step_applied() else None


def sum_over_ranks(table: Tensor, device: torch.device) -> Tensor:
    if WORLD_SIZE > 1:  # alone, gloo would copy in a thread of its own, and slow down OpenMP's
        table = table.to(device)
        dist.all_reduce(table)
    return table.cpu()


# ---- files ----


def find_run(args: Args) -> tuple[Path, Path | None]:
    """-> the run's folder, and the checkpoint to go on from."""
    if args.resume not in (None, "auto"):
        checkpoint = Path(args.resume)
        if not (checkpoint / "state").is_dir():
            fail(f"--resume {args.resume} is no checkpoint: it has no folder named state")
        return checkpoint.resolve().parent, checkpoint
    script = Path(__file__).stem
    now = time.strftime("%Y%m%d-%H%M%S")
    names = [args.run_name or f"{script}-{Path(args.model).name}-seed{args.seed}-{now}"]
    dist.broadcast_object_list(names)  # all ranks take rank 0's time
    folder = Path(args.output_dir) / names[0]
    if args.resume == "auto":
        found = checkpoints(folder)
        return folder, found[-1] if found else None
    if RANK == 0 and folder.exists():
        fail(f"{folder} exists already: choose another --run-name, or go on with --resume auto")
    return folder, None


def checkpoints(run_dir: Path) -> list[Path]:
    """By step."""
    return sorted(run_dir.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name[11:]))


def open_folder(args: Args, folder: Path, last_step: int) -> None:
    """Make the run's folder; of a resumed run, drop what was logged after its checkpoint."""
    if RANK > 0:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output-dir {args.output_dir} can't be written: {error}")
    (folder / "args.json").write_text(json.dumps(asdict(args), indent=2))
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
        kept = [line for line in whole if 0 < last_step >= json.loads(line)["train/step"]]
        path.write_text("".join(kept))


def save_checkpoint(args: Args, run: Run, is_best: bool) -> Path:
    """checkpoint-N: a Hugging Face folder that loads by itself, and state/ for --resume;
    without that also checkpoint-best. Collective."""
    model = run.judge.module.model
    final = run.folder / f"checkpoint-{run.state['step']}"
    unfinished = final.with_suffix(".tmp")  # renamed when all of it is written
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    run.judge.save_checkpoint(
        str(unfinished / "state" / "judge"), tag="engine", client_state={"ours": run.state}
    )
    weights = {}
    for name, weight in merged_weights(model):  # collective; one rank holds them
        if RANK == 0 and name not in model.all_tied_weights_keys:
            weights[name] = weight.cpu()
    if RANK == 0:
        config = type(model.config).from_dict(model.config.to_dict())  # without packing
        with torch.device("meta"):  # the same architecture, without adapters
            plain = type(model)(config)
        plain.generation_config = model.generation_config
        plain.save_pretrained(unfinished, state_dict=weights)
        run.processor.save_pretrained(unfinished)
        if is_best:  # before the rename: a run that is killed in between does this step again
            best = run.folder / "checkpoint-best"
            ignore = shutil.ignore_patterns("state")
            shutil.copytree(unfinished, run.folder / "best.tmp", ignore=ignore, dirs_exist_ok=True)
            shutil.rmtree(best, ignore_errors=True)
            (run.folder / "best.tmp").rename(best)
        shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed before it
        unfinished.rename(final)
        for old in checkpoints(run.folder)[: -max(1, args.save_total_limit)]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def log(args: Args, run: Run, metrics: dict[str, float], samples: list[dict]) -> None:
    """Rank 0 alone: to metrics.jsonl and samples.jsonl; where --track says, with samples of evaluations."""
    if RANK > 0:
        return
    step = int(metrics["train/step"])
    lines_of = {"metrics": [metrics], "samples": [{"train/step": step, **sample} for sample in samples]}
    for name, lines in lines_of.items():
        with (run.folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    shown = {}  # at evaluations: by phase (sample, its pictures)
    if args.track != "off" and any(name.startswith("eval/") for name in metrics):
        for sample in samples[:: len(samples) // 64 + 1]:
            shown.setdefault(f"samples/{sample['phase']}", []).append(to_show(run, sample))
    if args.track == "wandb":
        import wandb

        name = run.folder.name
        if wandb.run is None:
            wandb.init(id=name, name=name, config=asdict(args), dir=run.folder, resume="allow")
        tables = {}
        for key, pairs in shown.items():
            rows = []
            for sample, pictures in pairs:
                rows.append(sample | {f"picture_{k}": wandb.Image(x) for k, x in enumerate(pictures)})
            columns = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[row.get(column) for column in columns] for row in rows]
            tables[key] = wandb.Table(columns=columns, data=cells)
        wandb.run.log(metrics | tables, step=step)
    if args.track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        if run.tensorboard is None:  # of a resumed run, what it does again is hidden
            run.tensorboard = SummaryWriter(str(run.folder), purge_step=step)
        for name, value in metrics.items():
            run.tensorboard.add_scalar(name, value, step)
        for key, pairs in shown.items():
            texts = ["\n".join(f"{name}: {x}" for name, x in sample.items()) for sample, _ in pairs]
            text = re.sub("(?m)^", "    ", "\n\n".join(texts))  # Markdown, verbatim
            run.tensorboard.add_text(key, text, step)
        run.tensorboard.flush()


def to_show(run: Run, sample: dict) -> tuple[dict, list[Image.Image]]:
    """A sample with its whole prompt as text, and the prompt's pictures."""
    parts = [part for message in messages_of(run, sample) for part in message["content"]]
    prompt = "\n".join(part.get("text", f"<{part['type']}>") for part in parts)
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    others = {name: x for name, x in sample.items() if name != "prompt"}
    return {"prompt": prompt, **others}, pictures


if __name__ == "__main__":
    argv = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # the deepspeed launcher's
    main(tyro.cli(Args, args=argv, description=__doc__))
