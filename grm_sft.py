"""GRM SFT: fine-tune a vision-language model to judge, as a generative reward model.

A judge reads a question and two candidates (images, videos or texts) and writes which is better:

    <think>image 1 has no triangle</think><answer>Image 2 is better</answer>

It learns this by next-token prediction. Each pair of candidates is shown in both orders, so that
it can't rely on their order. Papers: https://arxiv.org/abs/2408.15240, 2505.03318.
examples/judge_reward.py turns the probabilities of a judge's verdicts into a reward.
docs/grm_sft.md lists the differences from GRMTrainerVL (opendilab/LightRFT@49e62cb).

Read to the end of `main`; the functions that it calls follow in order of use. Terms:

    row         dataset row: two candidates with a verdict (a pair), or a chat
    example     what the model reads of a row: a pair gives two, one for each order of its candidates;
                a chat gives one, or several if there are images between its assistant turns
    prompt      the beginning of an example, up to its last image; examples can share it
    response    the rest of an example; its assistant turns are trained on, other tokens are context
    verdict     "1", "2" or "tie": which candidate is better; the verdict of the dataset is the label
    judgment    what the model generates for an example of the evaluation set

Shapes: B examples per step, P prompt tokens, R response tokens. A pack (common/packing.py) is one
forward pass over several examples, with M trained tokens.

    python grm_sft.py                # default: a tiny VLM on easy-VQA, minutes on two CPU cores
    python grm_sft.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset my.jsonl --learning-rate 1e-5
    torchrun --standalone --nproc_per_node=8 grm_sft.py --zero-stage 3 ...    # or: deepspeed grm_sft.py ...
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
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from common import decoding, packing, packing_check
from common.packing import Prompt, PromptInfo

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # Random seed for data order and easy-VQA's pairs.
    output_dir: str = "runs"  # Directory that contains one directory per run.
    run_name: str | None = None  # Subdirectory of --output-dir. Default: SCRIPT-MODEL-seedN-TIME.
    resume: str | None = None  # Checkpoint to resume from, or "auto" for the latest of --run-name.
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # Path or Hub id of a VLM or text model.
    dataset: str = "easy-vqa"  # easy-vqa, a JSON, CSV or Parquet file, a dataset directory or a Hub id.
    dataset_split: str = "train"  # Split of --dataset; ignored for files.
    columns: tuple[str, ...] = ()  # Columns to rename, as NEW=OLD, such as prompt=problem.
    eval_dataset: str | None = None  # Evaluation data. Default: for easy-vqa its test split, else none.
    eval_dataset_split: str = "test"  # Split of --eval-dataset; ignored for files.
    system_prompt: str | None = None  # System prompt for prompts that have no system message.
    video_fps: float = 2.0  # Frames per second to sample from videos.
    max_length: int = 2048  # Maximum tokens per example, with its images; longer ones are skipped.
    freeze: str = "visual|vision_tower|projector"  # Freeze parameters whose names match this regex.
    lora_rank: int = 0  # LoRA rank (language model only); 0 trains all weights.
    lora_alpha: float = 32.0  # LoRA scaling: the adapters' output is multiplied by alpha / rank.
    # --- algorithm ---
    total_steps: int = 500  # Number of optimizer steps.
    train_batch_size: int = 32  # Examples per optimizer step, over all ranks; a pair is two examples.
    # --- optimizer ---
    learning_rate: float = 1e-3  # Peak learning rate; about 1e-5 for pretrained models, 1e-4 with LoRA.
    min_lr_ratio: float = 0.1  # Final learning rate of the cosine schedule, as a fraction of the peak.
    warmup_steps: int = 20  # Optimizer steps of linear warmup.
    weight_decay: float = 0.0  # AdamW weight decay; not applied to biases and norm weights.
    adam_betas: tuple[float, float] = (0.9, 0.95)  # AdamW betas.
    max_grad_norm: float = 1.0  # Maximum gradient norm; larger gradients are scaled down.
    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32.
    zero_stage: Literal[0, 1, 2, 3] = 0  # ZeRO: shard optimizer (1), gradients (2), parameters (3).
    offload_optimizer: bool = False  # Keep optimizer states on the CPU and run the step there.
    gradient_checkpointing: bool = False  # Recompute activations to save memory; about a third slower.
    micro_batch_tokens: int = 8192  # Maximum tokens per forward and backward pass on a rank.
    # --- evaluation, logging and checkpoints ---
    eval_steps: int = 100  # Evaluation interval in steps; 0 evaluates at the start and the end only.
    eval_rows: int = 500  # Number of rows per evaluation set, a fixed random subset; 0 for all.
    generation_batch_size: int = 64  # Judgments generated in parallel on a rank.
    max_response_length: int = 16  # Maximum tokens per response, including EOS; longer ones are truncated.
    save_steps: int = 0  # Checkpoint interval in steps; 0 saves at the end only.
    save_total_limit: int = 2  # Checkpoints to keep, at least 1; the oldest are deleted.
    track: Literal["off", "wandb", "tensorboard"] = "off"  # Experiment tracker to log to.


# ---- the algorithm: tensors in, tensors and metrics out ----


def compute_sft_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """Next-token loss L = -sum of logprobs / num_tokens, in nats per token.

    logprobs (M,): log-probs of a pack's trained tokens. num_tokens: trained tokens of the whole
    step, so that the losses of all packs on all ranks add up to the mean.

    logprobs [-1, -3], num_tokens 8 -> 0.5
    """
    return -logprobs.sum() / num_tokens


# ---- the data of a step ----


@dataclass
class Example:
    """A pair in one order of its candidates, or a chat; see encode_row."""

    example_id: int  # 2 * row, plus 1 if the candidates are swapped
    prompt: PromptInfo  # a full Prompt on the rank that encoded it
    prompt_key: bytes  # content hash: equal prompts have equal keys
    response_ids: Tensor  # (R,): the rest, up to the EOS of the last assistant turn
    loss_mask: Tensor  # (R,) bool: True for tokens of assistant turns
    noun: str  # what the candidates are called: "Image", "Video" or "Answer"; "" for a chat
    label: str | None  # the right verdict in this order; None for a chat
    columns: dict  # strings and numbers of the row, for samples.jsonl


@dataclass
class ExampleDataset:
    source: str
    rows: Any  # datasets.Dataset
    tokenizer: Any
    groups: list[list[int]]  # ids of all examples; those with the same images are in one group
    encode: Callable[[int], list[Example]]  # by example id; raises one of ROW_ERRORS


@dataclass
class Run:
    """State created by setup and shared by all steps."""

    run_dir: Path
    device: torch.device
    processor: Any  # transformers processor, or the tokenizer of a text model
    judge: Any  # DeepSpeed engine around the trained Judge
    sampling_model: Any  # generates judgments: the trained model, or its unsharded copy under ZeRO-3
    train_data: ExampleDataset
    eval_data: ExampleDataset | None
    checkpoint: Path | None  # latest checkpoint
    state: dict  # saved in each checkpoint, see setup; add what must survive a resume
    writer: Any = None  # TensorBoard's SummaryWriter


# ---- main ----


def main(args: Args) -> dict[str, float]:
    # --- 1. setup ---
    run_start = time.perf_counter()
    run = setup(args)
    judge = run.judge
    state = run.state
    received_signals = catch_signals()  # after a signal, the run saves and exits once the step ends
    stopped = False
    metrics = {}
    if run.eval_data and not state["initial_eval"]:  # a resumed run has it in its state
        state["initial_eval"], eval_records = evaluate(args, run)
        log(args, run, {"train/step": 0, **state["initial_eval"]}, eval_records)

    steps = range(state["step"] + 1, args.total_steps + 1)
    show_bar = RANK == 0 and sys.stderr.isatty()  # otherwise each step prints a line
    bar = tqdm(steps, "grm_sft", total=args.total_steps, initial=state["step"], disable=not show_bar)
    for step in bar:
        # --- 2. data: the examples of all ranks, and this rank's packs ---
        step_start = time.perf_counter()
        example_ids = sample_example_ids(
            groups=run.train_data.groups,
            start=(step - 1) * args.train_batch_size,
            count=args.train_batch_size,
            seed=args.seed,
        )
        examples = gather_examples(run.train_data, example_ids)
        num_tokens = sum(int(example.loss_mask.sum()) for example in examples)
        packs = list(iter_packs(args, run, examples))

        # --- 3. update: the gradients of all packs, and one optimizer step ---
        set_gradient_checkpointing(judge.module, True)
        pack_losses = torch.zeros((), device=run.device)  # sum over this rank's packs
        for k, pack in enumerate(packs):
            judge.set_gradient_accumulation_boundary(k == len(packs) - 1)
            logprobs = judge(pack)  # (M,)
            loss = compute_sft_loss(logprobs, num_tokens)
            # Undo DeepSpeed's mean over ranks (WORLD_SIZE) and over packs (scale_wrt_gas).
            judge.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
            pack_losses += loss.detach()
        grad_norm = optimizer_step(judge)  # None: not finite, the step was skipped
        set_gradient_checkpointing(judge.module, False)
        mean_loss = float(all_reduce_sum(pack_losses, run.device))  # over the step's trained tokens
        seconds = time.perf_counter() - step_start

        # --- 4. metrics ---
        skipped_ids = set(example_ids) - {example.example_id for example in examples}
        metrics = {
            "train/step": step,
            "train/learning_rate": judge.get_lr()[0],
            "train/grad_norm": grad_norm or 0.0,
            "train/skipped_updates": int(grad_norm is None),
            "train/trained_tokens": num_tokens,
            "train/rows_skipped": len({example_id // 2 for example_id in skipped_ids}),
            "loss/sft": mean_loss,
            "time/total": seconds,
        }

        # --- 5. evaluate, log, save ---
        is_last_step = step == args.total_steps
        is_best = False
        eval_records = []
        if run.eval_data and (is_last_step or (args.eval_steps and step % args.eval_steps == 0)):
            eval_metrics, eval_records = evaluate(args, run)
            metrics |= eval_metrics
            # Without pairs there is no accuracy, so the score is minus the loss.
            score = metrics.get("eval/accuracy", -metrics["eval/loss"])
            is_best = score > state["best_score"]
            if is_best:
                state["best_score"] = score
        log(args, run, metrics, eval_records)
        keys = ("loss/sft", "eval/loss", "eval/accuracy")
        postfix = {key: f"{metrics[key]:.3g}" for key in keys if key in metrics}
        bar.set_postfix(postfix)
        if not show_bar:
            print0(f"step {step} of {args.total_steps}, {seconds:.2f} s: {postfix}")

        state["step"] = step
        state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if grad_norm is None else 0
        diverged = state["skipped_in_a_row"] >= 5
        num_signals = int(all_reduce_sum(torch.tensor(len(received_signals)), run.device))
        stopped = num_signals > 0 and not is_last_step
        is_due = args.save_steps > 0 and step % args.save_steps == 0
        if is_last_step or is_due or stopped or diverged or is_best:
            run.checkpoint = save_checkpoint(args, run, is_best)
        if diverged:
            fail(f"step {step}: no finite gradients in 5 steps; the last weights are in {run.checkpoint}")
        if stopped:
            print0(f"stopped by a signal; continue with --resume {run.checkpoint}")
            break

    # --- 6. finish ---
    if not stopped:
        for name in ("eval/accuracy", "eval/swap_consistency", "eval/loss"):
            if name in metrics:
                print0(f"{name} {state['initial_eval'][name]:.3f} -> {metrics[name]:.3f}")
        print0(f"{time.perf_counter() - run_start:.0f} s; saved {run.checkpoint}")
        print0(f"report: python tools/report.py {run.run_dir}")
    dist.destroy_process_group()
    return metrics


# ---- setup ----


def setup(args: Args) -> Run:
    """Load everything that the steps use, and check whether packing is exact."""
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    device = init_distributed()
    run_dir, checkpoint = resolve_run_dir(args)
    is_bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and device.type == "cuda")
    dtype = torch.bfloat16 if is_bf16 else torch.float32

    torch.manual_seed(args.seed)  # for the initial LoRA weights
    model = load_model(args.model, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (args.freeze and re.search(args.freeze, name)))
    if args.lora_rank > 0:
        add_lora(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    judge = init_deepspeed_engine(args, Judge(model), dtype, args.total_steps, args.learning_rate)
    judge.eval()
    state = {
        "step": 0,
        "initial_eval": {},  # metrics before the first step
        "best_score": -math.inf,  # accuracy, or minus the loss, of checkpoint-best
        "skipped_in_a_row": 0,  # updates whose gradients were not finite
    }
    if checkpoint is not None:
        _, client_state = judge.load_checkpoint(str(checkpoint / "state" / "judge"), tag="engine")
        state = client_state["run_state"]

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = load_examples(args, args.dataset, args.dataset_split, model, processor, training=True)
    eval_source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = None
    if eval_source:
        eval_data = load_examples(
            args, eval_source, args.eval_dataset_split, model, processor, training=False
        )
    prepare_run_dir(args, run_dir, last_step=state["step"])
    num_examples = sum(map(len, train_data.groups))
    print0(f"{run_dir}: {num_examples} examples, {WORLD_SIZE} rank(s), {device}, {dtype}")

    enable_packing(args, judge, train_data)
    sampling_model = model
    if args.zero_stage == 3:  # generation needs whole weights
        sampling_model = load_model(args.model, dtype).to(device)
        packing.set_attention(sampling_model, model.config.get_text_config()._attn_implementation)
    return Run(
        run_dir=run_dir, device=device, processor=processor, judge=judge, sampling_model=sampling_model,
        train_data=train_data, eval_data=eval_data, checkpoint=checkpoint, state=state,
    )  # fmt: skip


def check_args(args: Args) -> None:
    """Reject flags that contradict each other, before anything is loaded."""
    counts = "total_steps train_batch_size generation_batch_size max_response_length save_total_limit"
    for name in counts.split():
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} ({getattr(args, name)}) must be at least 1")
    if args.micro_batch_tokens < args.max_length:
        fail(f"--micro-batch-tokens must be at least --max-length ({args.max_length})")
    if args.offload_optimizer and args.zero_stage == 0:
        fail("--offload-optimizer requires --zero-stage 1, 2 or 3")
    if args.resume == "auto" and args.run_name is None:
        fail("--resume auto requires --run-name")
    if args.lora_rank == 0 and args.lora_alpha != Args.lora_alpha:
        fail("--lora-alpha requires --lora-rank")


def fail(message: str) -> NoReturn:
    """Exit with code 2 and a message: what is wrong, where, and what to do."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def print0(message: str) -> None:
    """Print on rank 0, above the progress bar."""
    if RANK == 0:
        tqdm.write(message)
        sys.stdout.flush()


def catch_signals() -> list[int]:
    """Collect SIGTERM and SIGINT in the returned list; a second signal ends the process.

    Under a launcher, signals are only collected: each rank gets one from the terminal or job
    scheduler and again from torchrun, and the second one must not interrupt the save."""
    received_signals = []

    def handler(number, frame):
        received_signals.append(number)
        if "RANK" not in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    return received_signals


def enable_packing(args: Args, judge, data: ExampleDataset) -> None:
    """Switch to packed attention if it is exact on some examples."""
    examples = []
    for row in packing_check.choose_probe_rows(data.rows):
        examples += encode_examples_or_skip(data, 2 * row)
    if not examples:
        data.encode(0)  # raises the error of the first row
    message = packing_check.enable_packing_if_exact(
        model=judge.module.model,
        forward=judge,
        prompts=[example.prompt for example in examples],
        max_length=args.max_length,
        max_tokens=args.micro_batch_tokens,
    )
    print0(message)
    if args.zero_stage == 3:  # a check that ends early leaves parameters gathered
        judge.empty_partition_cache()


def get_eos_ids(model, tokenizer) -> list[int]:
    """Ids of all tokens that end a response."""
    eos_ids = model.generation_config.eos_token_id  # an int, a list or None
    eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    return sorted({*eos_ids, tokenizer.eos_token_id} - {None})


# ---- data ----

# Raised if a dataset row can't be used: missing or broken media, too many tokens, a chat that the
# template rejects. Any other exception is a bug in code and ends the run.
ROW_ERRORS = (OSError, ValueError, Image.DecompressionBombError, jinja2.TemplateError)

EASY_VQA_ROWS = 8000  # training rows of easy-VQA to use, of 38,575: a small task needs no more
EASY_VQA_ANSWERS = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"
VERDICTS = {"1": "{} 1 is better", "2": "{} 2 is better", "tie": "Both are equally good"}
SWAPPED = {"1": "2", "2": "1", "tie": "tie", "first": "second", "second": "first"}
# In a reasoning, what names a candidate: the 1 of "Image 1", the "first" of "first image".
CANDIDATE_WORDS = r"(?i)(?<=\b{0} )[12]\b|\b(?:first|second)(?= {0}\b)"


def sample_example_ids(groups: list[list[int]], start: int, count: int, seed: int) -> list[int]:
    """Elements start ... start + count - 1 of an endless stream of epochs with shuffled groups."""
    epoch_size = sum(len(group) for group in groups)
    stream = []
    for epoch in range(start // epoch_size, (start + count - 1) // epoch_size + 1):
        for g in np.random.default_rng([seed, epoch]).permutation(len(groups)).tolist():
            stream += groups[g]
    return stream[start % epoch_size :][:count]


def gather_examples(data: ExampleDataset, example_ids: list[int]) -> list[Example]:
    """The examples of a step, on all ranks and without images. Each rank encodes its share."""
    examples = []
    for example_id in np.array_split(np.array(example_ids), WORLD_SIZE)[RANK].tolist():
        for k, example in enumerate(encode_examples_or_skip(data, example_id)):
            prompt = example.prompt
            info = PromptInfo(index=(example_id, k), length=prompt.length, media_keys=prompt.media_keys)
            examples.append(replace(example, prompt=info))
    examples = all_gather_list(examples)
    if len(examples) * 2 < len(example_ids):
        fail(f"{data.source}: more than half of a batch's rows are skipped, see the warnings")
    return examples


def encode_examples_or_skip(data: ExampleDataset, example_id: int) -> list[Example]:
    """The examples with this id; none, and a warning, if their row can't be used."""
    try:
        return data.encode(example_id)
    except ROW_ERRORS as error:
        row = example_id // 2
        tqdm.write(f"warning: {data.source} row {row} is skipped: {error!s:.300}", file=sys.stderr)
        return []


def all_gather_list(items: list) -> list:
    """The concatenated lists of all ranks, on every rank."""
    if WORLD_SIZE == 1:
        return items
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def load_examples(args: Args, source: str, split: str, model, processor, training: bool) -> ExampleDataset:
    """Columns of pairs: prompt; image_0 and image_1, video_0 and video_1, or texts answer_0 and
    answer_1; verdict: 1, 2 or tie; optional reasoning. Chats: messages. Both can have image(s)
    and video(s), see build_messages. A dataset with only prompt and answer is easy-VQA: its pairs
    are made here."""
    rows = rename_columns(args, source, load_rows(source, split))
    columns = rows.column_names
    is_easy_vqa = {"prompt", "answer"} <= {*columns} and not {"messages", "verdict"} & {*columns}
    if not (is_easy_vqa or "messages" in columns or {"prompt", "verdict"} <= {*columns}):
        fail(f"{source} has columns {', '.join(columns)}: rename yours, --columns prompt=... verdict=...")
    seed = args.seed if training else 0  # the evaluation set does not depend on --seed
    prompt_cache = weakref.WeakValueDictionary()  # prompts of the examples that are cached

    # Cached: a step needs an example's length first, to plan the packs, and its images later.
    @functools.lru_cache(maxsize=2 * args.train_batch_size)
    def encode(example_id: int) -> list[Example]:
        index = example_id // 2
        row = rows[index]
        if is_easy_vqa:
            row = make_easy_vqa_pair(row, np.random.default_rng([seed, index]))
        return encode_row(
            args=args,
            model=model,
            processor=processor,
            row=row,
            example_id=example_id,
            data_dir=Path(source).parent,
            share_prompt=training,
            prompt_cache=prompt_cache,
        )

    num_rows = args.eval_rows  # 0: all
    if training:
        num_rows = EASY_VQA_ROWS if source == "easy-vqa" else 0
    indices = np.random.default_rng(0).permutation(len(rows))[: num_rows or None]
    groups = group_examples(rows, np.sort(indices).tolist(), is_easy_vqa)
    tokenizer = getattr(processor, "tokenizer", processor)
    return ExampleDataset(source=source, rows=rows, tokenizer=tokenizer, groups=groups, encode=encode)


def group_examples(rows, indices: list[int], is_easy_vqa: bool) -> list[list[int]]:
    """Example ids of some rows, grouped by the paths of the images and videos that they share."""
    media_columns = ("image", "images", "video", "videos")
    columns = [name for name in ("prompt", "messages", "verdict") if name in rows.column_names]
    for name in media_columns:  # of paths only, because reading others would decode every image
        if re.match("(List|Value).*string", str(rows.features.get(name))):
            columns.append(name)
    groups = defaultdict(list)
    for index, row in zip(indices, rows.select(indices).select_columns(columns)):
        paths = [row.get(name) for name in media_columns]
        key = str(paths) if any(paths) else index
        groups[key].append(2 * index)
        if is_easy_vqa or is_pair(row):
            groups[key].append(2 * index + 1)  # with swapped candidates
    return list(groups.values())


def is_pair(row: dict) -> bool:
    """Whether a row is a pair; other rows are chats."""
    return row.get("prompt") is not None and row.get("verdict") is not None


def load_rows(source: str, split: str):
    """Load a `datasets.Dataset`: easy-vqa, a local file, a saved directory or a hub id."""
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
        fail(f"can't load the dataset {source} (split {split}): {error.__cause__ or error}")


def rename_columns(args: Args, source: str, rows):
    """Apply --columns. The evaluation set may already use the script's names."""
    columns = rows.column_names
    new_names = {}  # column of the dataset -> name in this script
    for pair in args.columns:
        name, _, column = pair.partition("=")
        if name and column in columns:
            new_names[column] = name
        elif source == args.dataset:
            fail(f"--columns {pair} must be name=column; {source} has {', '.join(columns)}")
    # A renamed column replaces an existing column of that name.
    replaced = [column for column in columns if column in new_names.values() and column not in new_names]
    return rows.remove_columns(replaced).rename_columns(new_names)


def easy_vqa_rows(split: str):
    """64 x 64 images of shapes with questions, from the package easy-vqa."""
    import datasets
    import easy_vqa

    questions, answers, image_ids = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    images = [str(paths[image_id]) for image_id in image_ids]
    return datasets.Dataset.from_dict({"prompt": questions, "image": images, "answer": answers})


def make_easy_vqa_pair(row: dict, rng: np.random.Generator) -> dict:
    """A row of easy-VQA as a pair: its answer and a wrong one of the same type, in random order."""
    right = row["answer"]
    same_type = [answers.split() for answers in EASY_VQA_ANSWERS if right in answers.split()]
    if not same_type:
        raise ValueError(f"{right!r} is not an answer of easy-VQA; other data needs a column verdict")
    wrong = str(rng.choice([answer for answer in same_type[0] if answer != right]))
    pair = {"answer_0": right, "answer_1": wrong, "verdict": "1"}
    if rng.integers(2) == 1:
        pair = {"answer_0": wrong, "answer_1": right, "verdict": "2"}
    return {**row, **pair, "reasoning": right}


def encode_row(
    args: Args, model, processor, row: dict, example_id: int, data_dir: Path, share_prompt: bool,
    prompt_cache: MutableMapping[bytes, Prompt],
) -> list[Example]:  # fmt: skip
    r"""Tokenize a row in one order of its candidates.

    With share_prompt, a prompt ends with an image, if there is one, so that examples with equal
    images share it in a pack. A response has no images, so a chat with images between assistant
    turns becomes several examples, one for each group of turns that have no image between them.
    For evaluation (share_prompt False), the response is the last assistant turn.

    prompt      <|im_start|> user \n <|vision_start|> <|image_pad|> x 16 <|vision_end|>
    response    What color? \n Answer 1: red \n Answer 2: blue <|im_end|> \n <|im_start|> assistant \n
                <answer> Answer 1 is better </answer> <|im_end|>
    loss_mask   True for the last line, False before
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    chat, noun, label = build_chat(row, swapped=example_id % 2 == 1)
    messages = build_messages(args, chat, data_dir, tokenizer)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise ValueError("the chat has no assistant turn")
    ids, turns = locate_turns(processor, messages, get_eos_ids(model, tokenizer))
    columns = {name: value for name, value in row.items() if isinstance(value, str | int | float)}
    media_ids = packing.media_token_ids(model.config) if share_prompt else []
    media_ends = [t + 1 for t, token in enumerate(ids) if token in media_ids]
    turn_messages = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    examples = []
    for group in group_turns(turns if share_prompt else turns[-1:], media_ends):
        first = group[0]
        last = group[-1]
        context = messages[: turn_messages[turns.index(first)]]
        prompt_end = max((t for t in media_ends if t <= first.start), default=first.start)
        key = hash_content(ids[:prompt_end], context)
        prompt = prompt_cache.get(key)
        if prompt is None:
            inputs = packing.encode_chat(processor, context, add_generation_prompt=True)
            P = inputs["input_ids"].shape[1] - (first.start - prompt_end)
            if inputs["input_ids"][0, P:].tolist() != ids[prompt_end : first.start]:
                # The processor also changes the text after the image: include that in the prompt.
                P = inputs["input_ids"].shape[1]
                prompt_end = first.start
                key = hash_content(ids[:prompt_end], context)
            prompt = packing.make_prompt(model, inputs, index=example_id, length=P)
            prompt_cache[key] = prompt
        length = prompt.length + last.stop - prompt_end
        if length > args.max_length:
            raise ValueError(f"{length} tokens exceed --max-length")
        loss_mask = [any(t in turn for turn in group) for t in range(prompt_end, last.stop)]
        response_ids = torch.tensor(ids[prompt_end : last.stop])
        example = Example(
            example_id=example_id, prompt=prompt, prompt_key=key, response_ids=response_ids,
            loss_mask=torch.tensor(loss_mask), noun=noun, label=label, columns=columns,
        )  # fmt: skip
        examples.append(example)
    return examples


def build_chat(row: dict, swapped: bool) -> tuple[dict, str, str | None]:
    r"""A row as a chat with its media, the noun for its candidates, and the label. Swapped, for example:

    row        {"prompt": "a ball", "image_0": "a.png", "image_1": "b.png", "verdict": "1"}
    chat       user: "a ball\nImage 1: <image>\nImage 2: <image>", with the images b.png and a.png
               assistant: "<answer>Image 2 is better</answer>"
    noun       Image
    label      2
    """
    if not is_pair(row):
        if not row.get("messages"):
            raise ValueError("it has neither a prompt with a verdict nor messages")
        return row | {"prompt": row["messages"]}, "", None
    verdict = str(row["verdict"])
    if verdict not in VERDICTS or not isinstance(row["prompt"], str):
        raise ValueError(f"a pair needs a verdict 1, 2 or tie, not {verdict}, and a string as prompt")
    names = ("image", "video", "answer")
    types = [name for name in names if row.get(f"{name}_0") is not None and row.get(f"{name}_1") is not None]
    if not types:
        raise ValueError("it has no two candidates, for example answer_0 and answer_1")
    candidate_type = types[0]
    noun = candidate_type.capitalize()
    candidates = [row[f"{candidate_type}_0"], row[f"{candidate_type}_1"]]
    reasoning = row.get("reasoning") or ""
    if swapped:
        candidates.reverse()
        verdict = SWAPPED[verdict]
        words = CANDIDATE_WORDS.format(noun)
        reasoning = re.sub(words, lambda word: SWAPPED[word[0].lower()], reasoning)

    question = row["prompt"]
    media = {}
    for name in ("image", "video"):
        items = row.get(name) or row.get(f"{name}s") or []
        items = items if isinstance(items, list) else [items]
        if f"<{name}>" not in question:
            question = f"<{name}>" * len(items) + question
        media[f"{name}s"] = items + candidates if name == candidate_type else items
    texts = [f"<{candidate_type}>"] * 2
    if candidate_type == "answer":  # the text of a candidate must not refer to an image
        texts = [re.sub("<(image|video)>", r"< \1>", str(candidate)) for candidate in candidates]
    user = f"{question}\n{noun} 1: {texts[0]}\n{noun} 2: {texts[1]}"
    assistant = (f"<think>{reasoning}</think>" if reasoning else "") + format_verdict(verdict, noun)
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"prompt": turns, **media}, noun, verdict


def format_verdict(verdict: str, noun: str) -> str:
    return f"<answer>{VERDICTS[verdict].format(noun)}</answer>"


def parse_verdict(text: str) -> str | None:
    """The verdict of a judgment; None unless it has exactly one <answer>, with a known sentence."""
    sentence = "(?:Image|Video|Answer) ([12]) is better|Both are equally good"
    answers = re.findall(f"<answer>(?:{sentence})</answer>", text)
    return answers[0] or "tie" if len(answers) == text.count("<answer>") == 1 else None


def read_chat(row: dict) -> tuple[list[str], list[str], dict[str, list]]:
    """Roles and texts of a row's messages, and the media that replace markers in the texts.

    The k-th marker <image> is replaced by the k-th image, and <video> likewise. A message part of
    type image or video becomes a marker. Without markers, the media precede the text of the first user
    message. In assistant messages a marker is text: chat templates accept media from users only.
    """
    chat = row.get("prompt") or row.get("messages")
    if not chat:
        raise ValueError("its prompt is empty")
    if isinstance(chat, str):
        chat = [{"role": "user", "content": chat}]
    if not all({"role", "content"} <= message.keys() for message in chat):
        raise ValueError("a message needs the keys role and content")
    media = {}
    for name in ("image", "video"):
        sources = row.get(name) or row.get(f"{name}s") or []
        media[name] = list(sources) if isinstance(sources, list) else [sources]
    roles = [message["role"] for message in chat]
    texts = []
    for message in chat:
        parts = message["content"] or ""
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        text = ""
        for part in parts:
            name = part["type"]
            if name not in ("text", "image", "video"):
                raise ValueError(f"content of type {name} is not supported")
            text += part["text"] if name == "text" else f"<{name}>"
            if name != "text" and message["role"] == "assistant":
                raise ValueError(f"an assistant message has content of type {name}")
            if name != "text" and part.get(name) is not None:
                media[name].append(part[name])
        texts.append(text)
    for name, sources in media.items():
        marker = f"<{name}>"
        count = sum(text.count(marker) for role, text in zip(roles, texts) if role != "assistant")
        if count == 0 and sources:
            if "user" not in roles:
                raise ValueError(f"it has {name}s, but no user message")
            first = roles.index("user")
            texts[first] = marker * len(sources) + texts[first]
        elif count != len(sources):
            raise ValueError(f"{count} {marker} markers, but {len(sources)} {name}s")
    return roles, texts, media


def build_messages(args: Args, row: dict, data_dir: Path, tokenizer) -> list[dict]:
    """Convert a dataset row to messages whose content is a list of parts, with loaded media.

    {"prompt": "Is <image> red?", "image": "a.png"} -> [{"role": "user", "content": [{"type": "text",
    "text": "Is "}, {"type": "image", "image": ...}, {"type": "text", "text": " red?"}]}]
    """
    roles, texts, media = read_chat(row)
    unused = {name: iter(sources) for name, sources in media.items()}
    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    messages = []
    for role, text in zip(roles, texts):
        pieces = [text] if role == "assistant" else re.split("<(image|video)>", text)
        parts = []
        for k, piece in enumerate(pieces):  # re.split puts the markers' names at odd positions
            if k % 2 == 1:
                parts.append(load_media(piece, next(unused[piece]), data_dir, args.video_fps))
            elif piece:
                parts.append({"type": "text", "text": packing.escape_special_tokens(piece, special_tokens)})
        messages.append({"role": role, "content": parts})
    if args.system_prompt and roles[0] != "system":
        parts = [{"type": "text", "text": args.system_prompt}]
        messages.insert(0, {"role": "system", "content": parts})
    return messages


def load_media(media_type: str, source, data_dir: Path, video_fps: float) -> dict:
    """A message part with loaded media.

    An image can be a PIL image, bytes, {"bytes", "path"} or a path relative to data_dir; it becomes
    RGB. A video is a path; it becomes frames (F, height, width, 3) and metadata with their times."""
    if media_type == "video":
        if not isinstance(source, str):
            raise ValueError(f"a video must be a path, not {type(source).__name__}")
        load_video = transformers.video_utils.load_video
        frames, metadata = load_video(str(data_dir / source), fps=video_fps, backend="pyav")
        names = ("total_num_frames", "fps", "frames_indices")
        return {"type": "video", "video": frames, "metadata": {name: metadata[name] for name in names}}
    if isinstance(source, dict):  # an image as `datasets` stores it
        source = source["bytes"] or source["path"]
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    elif isinstance(source, str):
        source = data_dir / source
    image = source if isinstance(source, Image.Image) else Image.open(source)
    return {"type": "image", "image": image.convert("RGB")}


def tokenize_chat(processor, messages: list[dict], **template) -> list[int]:
    """Token ids of a chat, with one token per image."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is processor:
        return packing.encode_chat(processor, messages, **template)["input_ids"][0].tolist()
    template |= {"chat_template": processor.chat_template, "return_dict": False}
    return tokenizer.apply_chat_template(messages, **template)


def locate_turns(processor, messages: list[dict], eos_ids: list[int]) -> tuple[list[int], list[range]]:
    r"""Token ids of a chat up to the EOS of its last message, an assistant turn, with one token per
    image; and the indices of each assistant turn, which ends with its first EOS.

    messages   user: "Hi", assistant: "Hello"
    ids        <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello <|im_end|>
    turns      [range(9, 11)]: Hello <|im_end|>

    Turns are located by their length: the chat before a turn, and up to its end, must be prefixes
    of the whole chat. If the template writes no EOS, the last turn gets one.
    """
    whole = tokenize_chat(processor, messages)
    turns = []
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenize_chat(processor, messages[:n], add_generation_prompt=True)
        until = tokenize_chat(processor, messages[: n + 1])
        if whole[: len(before)] != before or whole[: len(until)] != until:
            raise ValueError(f"the chat template writes message {n} differently if others follow")
        ends = [t + 1 for t in range(len(before), len(until)) if until[t] in eos_ids]
        turns.append(range(len(before), ends[0] if ends else len(until)))
    ids = whole[: turns[-1].stop]
    if ids[-1] not in eos_ids:
        ids.append(getattr(processor, "tokenizer", processor).eos_token_id)
        turns[-1] = range(turns[-1].start, len(ids))
    return ids, turns


def group_turns(turns: list[range], media_ends: list[int]) -> list[list[range]]:
    """Turns that have no image between them are in one group."""
    groups = defaultdict(list)  # media tokens before a turn -> turns
    for turn in turns:
        groups[sum(t <= turn.start for t in media_ends)].append(turn)
    return list(groups.values())


def hash_content(ids: list[int], messages: list[dict]) -> bytes:
    """Hash of token ids and of the images and videos that they refer to."""
    digest = hashlib.blake2b(str(ids).encode())
    for message in messages:
        for part in message["content"]:
            if part["type"] != "text":
                content = np.asarray(part[part["type"]])
                digest.update(f"{content.shape} {part.get('metadata')}".encode() + content.tobytes())
    return digest.digest()


# ---- forward ----


def iter_packs(args: Args, run: Run, examples: list[Example]) -> Iterator[packing.Pack]:
    """This rank's packs of a step's examples, with the trained tokens as targets."""
    sharing = defaultdict(list)  # prompt key -> indices of the examples with this prompt
    for b, example in enumerate(examples):
        sharing[example.prompt_key].append(b)
    packs = packing.iter_rank_packs(
        model=run.judge.module.model,
        groups=[(indices[0], indices) for indices in sharing.values()],
        prompts=[example.prompt for example in examples],
        encode=lambda index: run.train_data.encode(index[0])[index[1]].prompt,
        responses=[example.response_ids for example in examples], max_tokens=args.micro_batch_tokens,
        rank=RANK, world_size=WORLD_SIZE, media_everywhere=args.zero_stage > 0,
    )  # fmt: skip
    loss_masks = [example.loss_mask for example in examples]  # (R,) each
    table = nn.utils.rnn.pad_sequence(loss_masks, batch_first=True)  # (B, R)
    for pack in packs:
        is_trained = pack.gather_tokens(table)  # (M,) bool
        logit_indices = pack.logit_indices[is_trained]
        yield pack._replace(logit_indices=logit_indices, target_ids=pack.target_ids[is_trained])


# ---- evaluation ----


def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """Metrics of the evaluation set, with each pair in both orders, and one record per row."""
    data = run.eval_data
    if run.sampling_model is not run.judge.module.model:
        weights = run.sampling_model.state_dict()
        for name, weight in iter_full_weights(run.judge.module.model):
            weights[name].copy_(weight)
    example_ids = [example_id for group in data.groups for example_id in group]
    rank_ids = np.array_split(np.array(example_ids), WORLD_SIZE)[RANK].tolist()
    records = []
    for start in range(0, len(rank_ids), args.generation_batch_size):
        batch = rank_ids[start : start + args.generation_batch_size]
        examples = []
        for example_id in batch:
            examples += encode_examples_or_skip(data, example_id)
        if examples:
            records += judge_examples(args, run.sampling_model, data.tokenizer, examples)
    records = all_gather_list(records)
    if not records:
        fail(f"{data.source}: all rows are skipped, see the warnings")
    swapped_records = {record["row"]: record for record in records if record["swapped"]}
    row_records = [record for record in records if not record["swapped"]]
    for record in row_records:
        if swapped := swapped_records.get(record["row"]):
            expected = SWAPPED.get(record["predicted_verdict"], "none")  # also if it is None
            record["swap_consistency"] = swapped["predicted_verdict"] == expected
            record["swapped_response"] = swapped["response"]
    return judge_metrics(records), row_records


@torch.no_grad()
def judge_examples(args: Args, model, tokenizer, examples: list[Example]) -> list[dict]:
    """Generate a judgment per example and return its record.

    The probability of a verdict v is a softmax over v of log p(own reasoning, v | prompt), and the
    loss is that of the example's own response, so it does not depend on what is generated."""
    prompts = [example.prompt for example in examples]
    generated = decoding.generate(
        model=model,
        prompts=prompts,
        num_samples=1,
        max_length=args.max_response_length,
        eos_ids=get_eos_ids(model, tokenizer),
        temperature=0.0,
        max_tokens=args.micro_batch_tokens,
    )
    texts = tokenizer.batch_decode([x.token_ids for x in generated], skip_special_tokens=True)
    responses = []  # per example its own response, then one with each verdict; chats ignore these
    for example, text in zip(examples, texts):
        reasoning = text.partition("<answer>")[0]
        verdicts = [reasoning + format_verdict(verdict, example.noun) for verdict in VERDICTS]
        verdict_ids = tokenizer(verdicts, add_special_tokens=False)["input_ids"]
        responses += [example.response_ids, *map(torch.tensor, verdict_ids)]
    logprobs = sum_logprobs(args, model, prompts, responses)  # (B, 1 + verdicts)

    records = []
    for i, example in enumerate(examples):
        record = {
            **example.columns,
            "phase": "eval",
            "row": example.example_id // 2,
            "swapped": example.example_id % 2 == 1,
            "response": texts[i],
            "length": len(generated[i].token_ids),
            "truncated_frac": generated[i].truncated,
            "loss": -float(logprobs[i][0]),  # sum over the tokens, in nats
            "tokens": len(example.response_ids),
        }
        if example.label is not None:
            verdict = parse_verdict(texts[i])
            probabilities = dict(zip(VERDICTS, logprobs[i][1:].softmax(0).tolist()))
            record |= {
                "predicted_verdict": verdict,
                "probabilities": probabilities,
                "accuracy": verdict == example.label,  # False if it is unreadable
                "soft_accuracy": max(probabilities, key=probabilities.get) == example.label,
                "parse_rate": verdict is not None,
                "tie_rate": verdict == "tie",
            }
        records.append(record)
    return records


def sum_logprobs(args: Args, model, prompts: list[Prompt], responses: list[Tensor]) -> Tensor:
    """log p (B, K), in float64, of K responses to each of B prompts. responses: ordered by prompt."""
    K = len(responses) // len(prompts)
    lengths = [prompts[i // K].length + len(ids) for i, ids in enumerate(responses)]
    packs = packing.iter_rank_packs(
        model=model,
        groups=[(i, list(range(i * K, (i + 1) * K))) for i in range(len(prompts))],
        prompts=[replace(prompt, index=i) for i, prompt in enumerate(prompts)],
        encode=prompts.__getitem__,
        responses=responses,
        max_tokens=max(args.micro_batch_tokens, *lengths),  # a text can have more tokens than generated
    )
    shape = len(responses), max(map(len, responses))
    table = torch.zeros(shape, dtype=torch.float64, device=model.device)  # (responses, R)
    for pack in packs:
        logprobs, _ = packing.response_logprobs(model, pack)
        table[pack.token_index] = logprobs.double()
    return table.sum(1).cpu().view(-1, K)


def judge_metrics(records: list[dict]) -> dict[str, float]:
    """Means over the records of both orders, so that always answering "1" has accuracy 0.5."""
    metrics = {"eval/num_rows": len({record["row"] for record in records})}
    names = "accuracy soft_accuracy swap_consistency parse_rate tie_rate length truncated_frac"
    for name in names.split():
        values = [record[name] for record in records if name in record]  # chats have no verdict
        if values:
            metrics[f"eval/{name}"] = float(np.mean(values))
    num_tokens = sum(record["tokens"] for record in records)
    metrics["eval/loss"] = sum(record["loss"] for record in records) / num_tokens
    return metrics


# ---- model ----


class Judge(nn.Module):
    """The model for DeepSpeed: pack -> log-probs (M,) of its targets."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pack: packing.Pack) -> Tensor:
        logprobs, _ = packing.response_logprobs(self.model, pack)
        return logprobs


def load_model(source: str, dtype: torch.dtype, with_head: bool = True):
    """Load a vision-language or text model, depending on its config, without dropout.

    with_head=False: the LM head is not used, so a checkpoint of reward_bt.py need not have one."""
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        auto_class = transformers.AutoModelForCausalLM
        if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            auto_class = transformers.AutoModelForImageTextToText
        elif type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} is not a text or image-text-to-text model of transformers")
        text_config = config.get_text_config()
        if config.is_encoder_decoder or text_config.is_encoder_decoder:
            raise ValueError("encoder-decoder models are not supported")
        # SDPA silently ignores softcapping of attention scores (Gemma 2).
        softcap = getattr(text_config, "attn_logit_softcapping", None)
        attention = None if softcap is None else "eager"
        model, info = auto_class.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        if not with_head:
            missing = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
            if "score.weight" in info["unexpected_keys"] and not Path(source, "score.safetensors").is_file():
                raise ValueError("it has a score head, which must also be in its file score.safetensors")
        if missing:  # they would be randomly initialized
            names = ", ".join(missing[:3])
            raise ValueError(f"weights are missing or have other shapes, {len(missing)} in all: {names}")
    except Exception as error:
        fail(f"can't load the model {source}: {error}")
    # Layers that gradient checkpointing puts in training mode must not apply dropout.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def add_lora(args: Args, model) -> None:
    """Add LoRA adapters to the linear layers of the language model."""
    from peft import LoraConfig

    # Vision and audio towers: named by transformers, or models whose config has another type.
    text_config = model.config.get_text_config()
    own_configs = (type(model.config), type(text_config))
    models = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    towers = {m for m in models if type(m.config) not in own_configs}
    towers |= {model.get_encoder("image"), model.get_encoder("audio")} - {model, model.base_model, None}
    outside = {m for tower in towers for m in tower.modules()} | {model.get_output_embeddings()}
    num_layers = getattr(text_config, "num_hidden_layers", None)
    lists = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList)]
    layers = [m for m in lists if len(m) == num_layers] or [model.get_decoder()]
    inside = {m for part in layers for m in part.modules()} - outside
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m in inside]
    if not linear:
        fail("--lora-rank needs a language model with layers of type nn.Linear")
    model.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=linear))


@torch.no_grad()
def iter_full_weights(model) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the model, unsharded and with LoRA merged. Call on all ranks.

    LoRA is merged into copies, W + alpha / rank * B A: merging in place and undoing it would change
    bf16 weights by rounding. Tied weights appear under each of their names."""
    import deepspeed

    lora_layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    saved_names = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in saved_names:
            yield name, buffer
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:  # merged into its layer's weight
            continue
        layer = lora_layers.get(name.removesuffix(".base_layer.weight"))
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight] if layer else []
        is_sharded = hasattr(parameter, "ds_id")  # ZeRO-3
        with deepspeed.zero.GatheredParameters([parameter, *factors], enabled=is_sharded):
            weight = parameter.detach()
            if layer:
                lora_a, lora_b = (factor.float() for factor in factors)  # (rank, in), (out, rank)
                merged = weight.float() + layer.scaling["default"] * (lora_b @ lora_a)
                weight = merged.to(weight.dtype)
            elif is_sharded:  # the gathered weight is freed when this block ends
                weight = weight.clone()
        yield name.replace(".base_layer.", "."), weight


# ---- DeepSpeed ----


def init_distributed() -> torch.device:
    """Initialize torch.distributed. Without a launcher it uses no port, so runs can't conflict."""
    on_cuda = torch.cuda.is_available()
    local_rank = os.environ.get("LOCAL_RANK", "0")
    device = torch.device("cuda", int(local_rank)) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        # cuDNN's SDPA gives NaN gradients with masks on sm90 (torch 2.13, trl#7181).
        torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "nccl" if on_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ |= {"LOCAL_RANK": local_rank, "DS_ACCELERATOR": device.type}
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return device


def init_deepspeed_engine(
    args: Args, module: nn.Module, dtype: torch.dtype, total_updates: int = 0, learning_rate: float = 0.0
):
    """Wrap a module in a DeepSpeed engine, with AdamW and a cosine schedule unless frozen.

    A frozen module has 0 total_updates. The number of packs per optimizer step varies, so main
    marks the last one with set_gradient_accumulation_boundary."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": False,
            "reduce_scatter": dist.get_backend() != "gloo",  # gloo does not support it
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {"device": "cpu" if args.offload_optimizer else "none"},
        },
        "zero_force_ds_cpu_optimizer": False,  # it needs a compiler; torch's AdamW does not
    }
    if args.zero_stage == 3 and (head := module.model.get_output_embeddings()):
        # packing.py uses this weight outside of the head's forward, where ZeRO-3 gathers it.
        deepspeed.zero.register_external_parameter(module, head.weight)
    optimizer = None
    schedule = None
    if total_updates > 0:
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trainable if parameter.dim() > 1]
        vectors = [parameter for parameter in trainable if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}]
        if vectors:  # LoRA adapters have none
            groups.append({"params": vectors, "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=args.adam_betas, fused=True)
        schedule = transformers.get_scheduler(
            name="cosine_warmup_with_min_lr",
            optimizer=optimizer,
            num_warmup_steps=args.warmup_steps,
            num_training_steps=total_updates,
            scheduler_specific_kwargs={"min_lr_rate": args.min_lr_ratio},
        )
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    engine, _, _, _ = deepspeed.initialize(
        model=module, config=config, optimizer=optimizer, lr_scheduler=schedule, dist_init_required=False
    )
    # DeepSpeed before 0.19.2 rounds buffers to bf16, among them the frequencies of RoPE.
    for name, buffer in module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
        assert buffer.dtype == buffers[name].dtype, f"DeepSpeed rounded buffer {name} to {buffer.dtype}"
    if optimizer is not None:
        # DeepSpeed's bf16 optimizer takes a dummy step at initialization; reset its step counters.
        for state in optimizer.state.values():
            state["step"].zero_()
    return engine


def set_gradient_checkpointing(module: nn.Module, enabled: bool) -> None:
    """Switch gradient checkpointing on or off, if --gradient-checkpointing is set.

    The model stays in eval mode, because train mode could change its output (router noise, batch
    norm). But transformers checkpoints only layers in train mode, and those ignore the KV cache.
    So only these layers are switched, and only while the model is updated."""
    for layer in module.modules():
        is_layer = isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer)
        if is_layer and layer.gradient_checkpointing:
            layer.training = enabled


def optimizer_step(engine) -> float | None:
    """Clip gradients, step, advance the schedule; returns the gradient norm before clipping.

    If the norm is not finite, all ranks skip the step and return None: they see the same norm."""
    if engine.zero_optimization() or engine.bfloat16_enabled():
        engine.step()  # skips non-finite gradients
        zero_gradient_buffers(engine.optimizer)
        return float(engine.get_global_grad_norm()) if engine.was_step_applied() else None
    # In fp32 without ZeRO, DeepSpeed does not check for non-finite gradients.
    norm = nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    if not norm.isfinite():
        engine.zero_grad()
        return None
    engine.step()
    return float(norm)


def zero_gradient_buffers(optimizer) -> None:
    """Zero the buffers in which DeepSpeed 0.19 keeps gradients under ZeRO-3 and CPU offload.

    Otherwise parameters without a new gradient (the vision tower's, in a batch of texts) would be
    updated with the previous one. DeepSpeed has no public call for this."""
    buffers = [getattr(optimizer, "grad_partitions_flat_buffer", None)]  # ZeRO-3
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):  # offload
        buffers += [partition.grad for partition in getattr(optimizer, name, [])]
    for buffer in buffers:
        if torch.is_tensor(buffer):
            buffer.zero_()


def all_reduce_sum(x: Tensor, device: torch.device) -> Tensor:
    """Sum of the tensors of all ranks, on the CPU."""
    if WORLD_SIZE > 1:  # skipped on one rank: gloo's copy thread slows down OpenMP
        x = x.to(device)
        dist.all_reduce(x)
    return x.cpu()


# ---- files ----


def resolve_run_dir(args: Args) -> tuple[Path, Path | None]:
    """The directory of this run, and the checkpoint to resume from."""
    if args.resume not in (None, "auto"):
        checkpoint = Path(args.resume)
        if not (checkpoint / "state").is_dir():
            fail(f"--resume {args.resume} is not a checkpoint: it has no folder named state")
        return checkpoint.resolve().parent, checkpoint
    script = Path(__file__).stem
    now = time.strftime("%Y%m%d-%H%M%S")
    names = [args.run_name or f"{script}-{Path(args.model).name}-seed{args.seed}-{now}"]
    dist.broadcast_object_list(names)  # clocks of ranks may differ
    run_dir = Path(args.output_dir) / names[0]
    if args.resume == "auto":
        checkpoints = list_checkpoints(run_dir)
        return run_dir, checkpoints[-1] if checkpoints else None
    if RANK == 0 and run_dir.exists():
        fail(f"{run_dir} already exists: use another --run-name, or --resume auto")
    return run_dir, None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, ordered by step."""
    return sorted(run_dir.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name[11:]))


def prepare_run_dir(args: Args, run_dir: Path, last_step: int) -> None:
    """Create the run directory; remove checkpoints and log lines after last_step."""
    if RANK > 0:
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"can't create {run_dir} in --output-dir: {error}")
    (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
    for later in list_checkpoints(run_dir):  # --resume auto would prefer them to new ones
        if int(later.name[11:]) > last_step:
            print0(f"resuming from step {last_step}: {later} is removed")
            shutil.rmtree(later)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = run_dir / name
        lines = path.read_text().splitlines(keepends=True) if last_step > 0 and path.exists() else []
        lines = [line for line in lines if line.endswith("\n")]  # a kill may truncate the last
        lines = [line for line in lines if json.loads(line)["train/step"] <= last_step]
        path.write_text("".join(lines))


def save_checkpoint(args: Args, run: Run, is_best: bool) -> Path:
    """Save checkpoint-N: a Hugging Face directory, and state/ for --resume; if is_best, also
    checkpoint-best, without state/. Call on all ranks."""
    model = run.judge.module.model
    checkpoint = run.run_dir / f"checkpoint-{run.state['step']}"
    temporary = checkpoint.with_suffix(".tmp")  # renamed once it is complete
    if RANK == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    engine_dir = str(temporary / "state" / "judge")
    run.judge.save_checkpoint(engine_dir, tag="engine", client_state={"run_state": run.state})
    weights = {}
    for name, weight in iter_full_weights(model):  # on all ranks, but only rank 0 keeps them
        if RANK == 0 and name not in model.all_tied_weights_keys:
            weights[name] = weight.cpu()
    if RANK == 0:
        config = type(model.config).from_dict(model.config.to_dict())  # drops packed attention
        with torch.device("meta"):  # the same architecture, without LoRA
            export = type(model)(config)
        export.generation_config = model.generation_config
        export.save_pretrained(temporary, state_dict=weights)
        run.processor.save_pretrained(temporary)
        if is_best:  # before checkpoint-N exists: a run killed in between repeats this step
            best = run.run_dir / "checkpoint-best"
            best_temporary = best.with_suffix(".tmp")
            ignore = shutil.ignore_patterns("state")
            shutil.copytree(temporary, best_temporary, ignore=ignore, dirs_exist_ok=True)
            shutil.rmtree(best, ignore_errors=True)
            best_temporary.rename(best)
        temporary.rename(checkpoint)
        for old in list_checkpoints(run.run_dir)[: -args.save_total_limit]:
            shutil.rmtree(old)
    dist.barrier()
    return checkpoint


def log(args: Args, run: Run, metrics: dict[str, float], sample_records: list[dict]) -> None:
    """Append to metrics.jsonl and samples.jsonl, and log to --track. On rank 0 only."""
    if RANK > 0:
        return
    step = int(metrics["train/step"])
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    with (run.run_dir / "samples.jsonl").open("a") as file:
        for record in sample_records:
            file.write(json.dumps({**record, "train/step": step}, default=str) + "\n")
    if not any(name.startswith("eval/") for name in metrics):
        sample_records = []  # trackers show the samples of evaluations only
    if args.track == "wandb":
        log_to_wandb(args, run, metrics, sample_records)
    if args.track == "tensorboard":
        log_to_tensorboard(run, metrics, sample_records)


def log_to_wandb(args: Args, run: Run, metrics: dict[str, float], sample_records: list[dict]) -> None:
    import wandb

    if wandb.run is None:
        name = run.run_dir.name
        wandb.init(id=name, name=name, config=asdict(args), dir=run.run_dir, resume="allow")
    values = dict(metrics)
    if sample_records:
        columns = list(dict.fromkeys(name for record in sample_records for name in record))
        rows = [[str(record.get(column, "")) for column in columns] for record in sample_records]
        values["samples"] = wandb.Table(columns, rows)
    wandb.run.log(values, step=int(metrics["train/step"]))


def log_to_tensorboard(run: Run, metrics: dict[str, float], sample_records: list[dict]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    step = int(metrics["train/step"])
    if run.writer is None:  # purge_step hides the steps that a resumed run repeats
        run.writer = SummaryWriter(str(run.run_dir), purge_step=step)
    for name, value in metrics.items():
        run.writer.add_scalar(name, value, step)
    texts = ["\n".join(f"{name}: {x}" for name, x in record.items()) for record in sample_records]
    if texts:  # indented, so that Markdown shows it verbatim
        run.writer.add_text("samples", re.sub("(?m)^", "    ", "\n\n".join(texts)), step)
    run.writer.flush()


if __name__ == "__main__":
    argv = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # added by deepspeed
    main(tyro.cli(Args, args=argv, description=__doc__))
