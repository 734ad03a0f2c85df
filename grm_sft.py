"""GRM SFT: fine-tune a vision-language model to judge, as a generative reward model.

A judge reads a question and two candidates (images, videos or texts) and writes which is better:

    <think>image 1 has no triangle</think><answer>Image 2 is better</answer>

It learns this by next-token prediction. The reasoning inside <think> comes from the dataset and may
be missing. Pairs are trained in both orders, so that the judge does not prefer a position. Reasoning
that names "Image 1" is wrong after a swap, so a pair with reasoning keeps the order of the dataset,
unless it also has swapped_reasoning.

Papers:
- Generative Verifiers (https://arxiv.org/abs/2408.15240). The reward is the probability of a verdict;
  examples/judge_reward.py computes it.
- UnifiedReward-Think (https://arxiv.org/abs/2505.03318). The first stage is this SFT, in this format.
docs/lightrft.md lists the differences from LightRFT's GRMTrainerVL.

Notation:

    row         dataset row: two candidates with a verdict (a pair), or a chat
    example     a pair in one order of its candidates, or a chat
    prefix      first tokens of an example, up to the last image (in evaluations: the whole prompt).
                Examples with the same image share them, and a pack runs them once
    suffix      the rest of an example; the loss is on its assistant turns
    verdict     "1", "2" or "tie": which candidate is better
    label       the correct verdict in the order shown
    judgment    what the judge writes in an evaluation
    pack        a micro-batch (common/packing.py)
    R, M        tokens in a suffix; trained tokens in a pack

    python grm_sft.py                # default: a tiny VLM on easy-VQA, minutes on a CPU core
    python grm_sft.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset my.jsonl --eval-dataset test.jsonl
    torchrun --standalone --nproc_per_node=8 grm_sft.py --zero-stage 3 ...
"""

import datetime
import functools
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from torch import Tensor, nn

from common import chats, decoding, packing, packing_check, require, stop
from common.chats import ROW_ERRORS, RowError, build_messages, load_rows
from common.packing import Continuation, Prompt, PromptInfo

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
# Some schedulers set WORLD_SIZE without RANK.
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
BUNDLED_MODEL = str(Path(__file__).parent / "assets/tiny_vl")
PRINTED_METRICS = re.compile("time/total|loss/sft|eval/(loss|accuracy|swap_consistency)")


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # Random seed for LoRA, data order and easy-VQA's pairs.
    output_dir: str = "runs"  # Directory that contains one directory per run.
    run_name: str | None = None  # Directory in --output-dir. Default: SCRIPT-MODEL-seedN-TIME.
    resume: str | None = None  # auto: resume --run-name. PATH: start a new run from this checkpoint.
    # --- model and data ---
    model: str = BUNDLED_MODEL  # Path or Hub id of a VLM or text model.
    dataset: str = "easy-vqa"  # easy-vqa, a JSON, CSV or Parquet file, a saved Dataset or Hub id.
    dataset_split: str = "train"  # Split of --dataset; ignored for files.
    columns: tuple[str, ...] = ()  # Columns to rename, as NEW=OLD, such as prompt=problem.
    eval_dataset: str | None = None  # Evaluation data. Default: easy-vqa's test split, or none.
    eval_dataset_split: str = "test"  # Split of --eval-dataset; ignored for files.
    system_prompt: str | None = None  # System prompt for prompts that have no system message.
    max_pixels: int | None = None  # Scale down images that have more pixels (width * height).
    video_fps: float = 2.0  # Frames per second to sample from videos.
    max_length: int = 2048  # Examples with more tokens (images count, too) are skipped.
    # Shuffle images, not rows: rows with the same image path stay together, and a pack encodes the image
    # once. Faster if several rows share an image, but a batch then has fewer different images.
    group_by_image: bool = True
    freeze: str | None = None  # Regex of weights to freeze. Default: all but the LM; "": none.
    lora_rank: int = 0  # LoRA rank (language model only); 0 trains all weights.
    lora_alpha: float = 32.0  # LoRA's scaling is alpha / rank.
    # --- algorithm ---
    total_steps: int = 500  # Number of optimizer steps; 0 only evaluates.
    train_batch_size: int = 32  # Examples per optimizer step, over all ranks. A pair has two orders.
    # --- optimizer ---
    learning_rate: float | None = None  # Peak. Default: 1e-5; LoRA: 1e-4; bundled model: 1e-3.
    min_lr_ratio: float = 0.1  # The cosine schedule ends at this fraction of the peak.
    warmup_updates: int = 20  # Optimizer steps of linear warmup.
    weight_decay: float = 0.0  # AdamW weight decay; not applied to biases or norm weights.
    max_grad_norm: float = 1.0  # Maximum gradient norm; 0 disables clipping.
    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32.
    zero_stage: Literal[0, 1, 2, 3] | None = None  # Default: 2 with bfloat16, else 0.
    offload_optimizer: bool = False  # Optimizer states and step on the CPU.
    gradient_checkpointing: bool = False  # Recompute activations: less memory, a third slower.
    micro_batch_tokens: int = 8192  # Tokens per forward pass on a rank, at most.
    # --- evaluation, logging and checkpoints ---
    eval_steps: int = 100  # Evaluation interval in steps; 0: at the start and the end only.
    eval_rows: int = 500  # Rows per evaluation set, a fixed random subset; 0 for all.
    max_num_seqs: int = 64  # Responses generated in parallel on a rank.
    max_response_length: int | None = None  # Tokens per generated judgment. Default: 512 (bundled: 16).
    save_steps: int = 0  # Checkpoint interval in steps; 0 saves at the end only.
    save_total_limit: int = 2  # Checkpoints to keep; 0 saves only if the run stops early.
    track: Literal["off", "wandb"] = "off"  # Experiment tracker to log to.


# ---- the algorithm: tensors in, tensors and metrics out ----


def compute_sft_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """Next-token loss L = -sum of logprobs / num_tokens, in nats per token.

    logprobs (M,): of a pack's trained tokens. num_tokens: trained tokens of the whole step, so
    that the losses of all packs on all ranks add up to the mean. As in sampling, the softmax of
    packing.py leaves out media tokens (image placeholders).

    logprobs [-1, -3], num_tokens 8 -> 0.5
    """
    return -logprobs.sum() / num_tokens


# ---- the data of a step ----


class ExampleId(NamedTuple):
    row: int
    swapped: bool  # whether the candidates of a pair are swapped; False for a chat


@dataclass
class Example:
    """A pair in one order of its candidates, or a chat; see ExampleDataset.tokenize."""

    example_id: ExampleId
    prefix: PromptInfo  # a Prompt, until gather_examples drops its tensors
    prefix_key: str  # examples with equal keys share their prefix
    suffix: Continuation  # R tokens; response_mask is True where they are trained
    row: dict  # dataset row
    noun: str  # what a pair's candidates are called: "Image", "Video" or "Answer"
    label: str | None  # a pair's verdict in this order; None for a chat


@dataclass
class Run:
    """What setup builds and the training loop uses."""

    run_dir: Path
    processor: Any  # transformers processor, or the tokenizer of a text model
    judge: Any  # DeepSpeed engine around the Judge
    sampling_model: Any  # the trained model, or its unsharded copy under ZeRO-3
    train_data: "ExampleDataset | None"
    eval_data: "ExampleDataset | None"
    state: dict  # saved in each checkpoint; put what must survive a resume here


# ---- main ----


def main(args: Args) -> None:
    # --- 1. setup ---
    run_start = time.perf_counter()
    run = setup(args)
    judge, state = run.judge, run.state
    received_signals = catch_signals()  # SIGTERM or SIGINT: finish the step, save and exit
    num_read = num_skipped = 0  # examples, and those that could not be used, since the last check
    consecutive_skips = 0  # updates whose gradients were not finite
    if run.eval_data and (state["step"] == 0 or args.total_steps == 0):
        log(args, run, *evaluate(args, run))

    for step in range(state["step"] + 1, args.total_steps + 1):
        # --- 2. data: the examples of all ranks, and this rank's packs ---
        step_start = time.perf_counter()
        example_ids = sample_example_ids(args, run.train_data.groups, step)
        examples = gather_examples(run.train_data, example_ids)
        num_tokens = sum(int(example.suffix.response_mask.sum()) for example in examples)
        packs = list(iter_packs(args, run, examples))  # each rank has the same number

        # --- 3. update: the gradients of all packs, and one optimizer step ---
        local_loss = torch.zeros((), device=DEVICE)  # sum over this rank's packs
        for k, pack in enumerate(packs):
            judge.set_gradient_accumulation_boundary(k == len(packs) - 1)
            logprobs = judge(pack)  # (M,)
            loss = compute_sft_loss(logprobs, num_tokens)
            judge.backward(loss * WORLD_SIZE)  # DeepSpeed averages over ranks; we want a sum
            local_loss += loss.detach()
        learning_rate = args.learning_rate * lr_factor(args, step - 1, args.total_steps)
        grad_norm = optimizer_step(judge, learning_rate) if packs else 0.0  # NaN if skipped
        mean_loss = sum(all_gather_list([float(local_loss)]))  # over the step's trained tokens
        seconds = time.perf_counter() - step_start

        # --- 4. metrics ---
        is_finite = math.isfinite(grad_norm)
        skipped_ids = set(example_ids) - {example.example_id for example in examples}
        metrics = {
            "train/step": step,
            "train/learning_rate": learning_rate,
            "train/grad_norm": grad_norm,
            "train/skipped_updates": int(not is_finite),
            "train/trained_tokens": num_tokens,
            "train/rows_skipped": len({example_id.row for example_id in skipped_ids}),
            "time/total": seconds,
        }
        if examples:  # all of a small batch may be skipped
            metrics["loss/sft"] = mean_loss
        state["step"] = step
        num_read += len(example_ids)
        num_skipped += len(example_ids) - len(examples)
        consecutive_skips = 0 if is_finite else consecutive_skips + 1
        log(args, run, metrics, sample_records=[])

        # --- 5. check, evaluate, save ---
        problem = "no finite gradients in 5 steps" if consecutive_skips >= 5 else ""
        if num_read >= 100:  # over several steps, because one bad row can be half of a small batch
            if num_skipped > num_read / 2:
                problem = f"{num_skipped} of the last {num_read} examples were skipped; see the warnings"
            num_read = num_skipped = 0
        if problem:
            save_and_stop(args, run, f"step {step}: {problem}")
        is_last_step = step == args.total_steps
        has_signal = any(all_gather_list(received_signals))  # on any rank
        is_eval_step = is_last_step or (args.eval_steps and step % args.eval_steps == 0)
        if run.eval_data and is_eval_step and not has_signal:
            log(args, run, *evaluate(args, run))
        has_signal = any(all_gather_list(received_signals))  # also during the evaluation
        is_save_step = is_last_step or (args.save_steps and step % args.save_steps == 0)
        if has_signal or (is_save_step and args.save_total_limit > 0):
            save_checkpoint(args, run)
        if has_signal and not is_last_step:
            print0(f"stopped by a signal; continue with --resume auto --run-name {run.run_dir.name}")
            break

    # --- 6. finish ---
    print0(f"{time.perf_counter() - run_start:.0f} s; report: python tools/report.py {run.run_dir}")
    dist.destroy_process_group()


# ---- setup ----


def setup(args: Args) -> Run:
    """Build everything that the training loop needs. Logs are created last, so a failed setup leaves none."""
    transformers.utils.logging.disable_progress_bar()
    fill_defaults(args)
    check_args(args)
    init_distributed()
    run_dir, checkpoint = resolve_run_dir(args)
    judge = load_judge(args)
    model = judge.module.model
    state = {"step": 0}
    if checkpoint is not None:
        state = load_checkpoint(args, checkpoint, judge=judge)

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = eval_data = None
    if args.total_steps > 0:  # else nothing is trained
        train_data = load_examples(args, args.dataset, args.dataset_split, model, processor, training=True)
    if source := args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None):
        eval_data = load_examples(args, source, args.eval_dataset_split, model, processor, training=False)
    data = train_data or eval_data
    num_examples = sum(map(len, data.groups))
    print0(f"{run_dir}: {num_examples} examples, {WORLD_SIZE} rank(s), {DEVICE}, {model.dtype}")
    # Pack batches if packing reproduces the unmodified model on some rows; else pad them.
    row_ids = packing_check.choose_probe_rows(data.rows)
    examples = data.encode_all([ExampleId(row_id, swapped=False) for row_id in row_ids])
    prompts = [packing.extend_prompt(x.prefix, x.suffix) for x in examples]  # prefixes may have no text
    require(prompts, f"{data.source}: none of {len(row_ids)} rows can be used; see the warnings")
    message = packing_check.choose_layout(
        network=judge,
        prompts=prompts,
        max_length=args.max_length + args.max_response_length,
        max_tokens=args.micro_batch_tokens,
        must_generate=eval_data is not None,
    )
    print0(message)
    sampling_model = model
    if args.zero_stage == 3 and eval_data:  # generation needs a whole model on every GPU
        sampling_model = load_model(args, args.model).to(DEVICE)
        packing.copy_layout(model, sampling_model)
    start_logs(args, run_dir, checkpoint, last_step=state["step"])
    return Run(run_dir, processor, judge, sampling_model, train_data, eval_data, state)


def fill_defaults(args: Args) -> None:
    """Fill in the flags whose defaults depend on the model or the machine, and print them."""
    is_bundled = Path(args.model).resolve() == Path(BUNDLED_MODEL).resolve()
    if args.dtype == "auto":
        args.dtype = "bfloat16" if DEVICE.type == "cuda" else "float32"
    pretrained_rate = 1e-4 if args.lora_rank else 1e-5
    if args.learning_rate is None:
        args.learning_rate = 1e-3 if is_bundled else pretrained_rate
    if args.max_response_length is None:
        args.max_response_length = 16 if is_bundled else 512
    if args.zero_stage is None:
        args.zero_stage = 2 if args.dtype == "bfloat16" else 0
    names = ("learning_rate", "max_response_length", "zero_stage", "dtype")
    print0(" ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names))


def check_args(args: Args) -> None:
    """Exit if flags contradict each other. tyro checks types and choices."""
    positive = """train_batch_size max_length max_response_length max_num_seqs
        video_fps max_pixels""".split()
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        if isinstance(value, int | float):
            require(value >= 0, f"{flag} must not be negative")
            require(value > 0 or name not in positive, f"{flag} must be positive")
    is_enough = args.micro_batch_tokens >= args.max_length
    require(is_enough, "--micro-batch-tokens must be at least --max-length")
    if args.dtype == "bfloat16" and args.zero_stage < 2:
        stop("--dtype bfloat16 requires --zero-stage 2 or 3, which accumulate gradients in fp32")
    require(args.zero_stage or not args.offload_optimizer, "--offload-optimizer requires --zero-stage")
    require(args.lora_rank or args.lora_alpha == Args.lora_alpha, "--lora-alpha requires --lora-rank")
    require(args.run_name or args.resume != "auto", "--resume auto requires --run-name")
    has_eval = args.eval_dataset or args.dataset == "easy-vqa"
    require(args.total_steps or has_eval, "--total-steps 0 requires --eval-dataset")


def print0(message: str) -> None:
    """Print on rank 0."""
    if RANK == 0:
        print(message, flush=True)


def catch_signals() -> list[int]:
    """Collect SIGTERM and SIGINT in the returned list. A second signal ends the process, but
    not under torchrun, which sends a signal more than once (and SIGKILL after 30 s)."""
    received_signals = []

    def handler(number, frame):
        if received_signals and "RANK" not in os.environ:
            raise KeyboardInterrupt
        received_signals.append(number)
        if RANK == 0:  # print is not safe in a handler
            os.write(2, b"saving a checkpoint and stopping after this step\n")

    # Child processes inherit the handler, but SIGTERM must end them.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    return received_signals


# ---- data ----

EASY_VQA_ROWS = 8000  # training rows of easy-VQA to use, of 38,575: a small task needs no more
EASY_VQA_ANSWERS = "no yes", "circle rectangle triangle", "black blue brown gray green red teal yellow"
CANDIDATE_TYPES = ("image", "video", "answer")  # columns image_1 and image_2, and so on
VERDICTS = {"1": "{} 1 is better", "2": "{} 2 is better", "tie": "Both are equally good"}
SWAPPED = {"1": "2", "2": "1", "tie": "tie"}  # after the candidates are swapped


def sample_example_ids(args: Args, groups: list[list[ExampleId]], step: int) -> list[ExampleId]:
    """The example ids of a step, from an endless stream of shuffled epochs.

    Each epoch has all groups, shuffled by (seed, epoch), so resuming is exact."""
    epoch_size = sum(len(group) for group in groups)
    end = step * args.train_batch_size
    start = end - args.train_batch_size
    stream = []
    for epoch in range(start // epoch_size, (end - 1) // epoch_size + 1):
        for g in np.random.default_rng([args.seed, epoch]).permutation(len(groups)).tolist():
            stream += groups[g]
    return stream[start % epoch_size :][: args.train_batch_size]


def gather_examples(data: "ExampleDataset", example_ids: list[ExampleId]) -> list[Example]:
    """The examples of a step, on all ranks and without images.

    Each rank encodes its share, and sends lengths and suffixes, so that all ranks plan the same
    packs. If a pack has an example of another share, its prefix is encoded again."""
    share = np.array_split(range(len(example_ids)), WORLD_SIZE)[RANK]
    examples = data.encode_all([example_ids[i] for i in share])
    infos = [PromptInfo(x.prefix.row_id, x.prefix.length, x.prefix.media_keys) for x in examples]
    return all_gather_list([replace(x, prefix=info, row={}) for x, info in zip(examples, infos)])


def all_gather_list(items: list) -> list:
    """The concatenated lists of all ranks, on every rank."""
    lists = [items] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def load_examples(
    args: Args,
    source: str,
    split: str,
    model,
    processor,
    training: bool,
) -> "ExampleDataset":
    """Load pairs and chats; docs/grm_sft.md#data has their columns."""
    rows = load_rows(args, source, split)
    num_rows = args.eval_rows  # 0: all
    if training:
        num_rows = EASY_VQA_ROWS if source == "easy-vqa" else 0
    indices = np.sort(np.random.default_rng(0).permutation(len(rows))[: num_rows or None])
    if source == "easy-vqa":  # the evaluation set does not depend on --seed
        rows = make_easy_vqa_pairs(rows, seed=args.seed if training else 0)
    columns = rows.column_names
    is_known = "messages" in columns or {"prompt", "verdict"} <= {*columns}
    advice = "rename yours, such as --columns prompt=question verdict=label"
    require(is_known, f"{source} has columns {', '.join(columns)}: {advice}")
    if "messages" not in columns:
        is_text = not isinstance(rows.select_columns("prompt")[0]["prompt"], list)
        require(is_text, f"{source}: the prompt of a pair must be a string, not messages")
    values = rows.unique("verdict") if "verdict" in columns else []
    unknown = [repr(x) for x in values if x not in (None, "") and str(x).removesuffix(".0") not in VERDICTS]
    rule = "1 (the first candidate is better), 2 or tie; empty for chats"
    require(not unknown, f"{source}: a verdict must be {rule}, not {', '.join(unknown[:3])}")
    groups = group_examples(args, source, rows, indices, training)
    data_dir = Path(source) if Path(source).is_dir() else Path(source).parent
    return ExampleDataset(args, source, rows, groups, data_dir, model, processor, training)


def make_easy_vqa_pairs(rows, seed: int):
    """Rows of easy-VQA as pairs of the right and a wrong answer of the same type, in random order."""
    import datasets

    pairs = []
    for index, row in enumerate(rows.to_list()):
        rng = np.random.default_rng([seed, index])
        right = row["answer"]
        same_type = next(x.split() for x in EASY_VQA_ANSWERS if right in x.split())
        wrong = str(rng.choice([answer for answer in same_type if answer != right]))
        answers = {"answer_1": right, "answer_2": wrong, "verdict": "1"}
        if rng.integers(2) == 1:
            answers = {"answer_1": wrong, "answer_2": right, "verdict": "2"}
        pairs.append({**row, **answers, "reasoning": right, "swapped_reasoning": right})
    return datasets.Dataset.from_list(pairs)


def group_examples(
    args: Args, source: str, rows, indices: np.ndarray, training: bool
) -> list[list[ExampleId]]:
    """Groups of example ids that stay together when the data is shuffled: both orders of a pair and, with
    --group-by-image, all rows with the same paths of images and videos. A pair with reasoning is
    trained in one order, unless it also has swapped_reasoning."""
    names = {"prompt", "verdict", "reasoning", "swapped_reasoning", "image", "images", "video", "videos"}
    columns = [x for x in rows.features.arrow_schema if x.name in names]
    columns = [x.name for x in columns if "binary" not in str(x.type)]  # media in the dataset have no paths
    table = rows.select(indices).select_columns(columns).with_format("arrow")[:]
    table_rows = table.to_pylist() or [{}] * len(indices)  # a table without columns has no rows
    groups = defaultdict(list)
    num_unswapped = 0
    for i, row in zip(indices.tolist(), table_rows, strict=True):
        paths = [row.get(name) for name in ("image", "images", "video", "videos")]
        group = groups[str(paths) if args.group_by_image and any(paths) else i]
        group.append(ExampleId(i, swapped=False))
        if is_pair(row):
            if training and row.get("reasoning") and not row.get("swapped_reasoning"):
                num_unswapped += 1
            else:
                group.append(ExampleId(i, swapped=True))
    if num_unswapped:
        reason = "they have reasoning, but no swapped_reasoning"
        print0(f"{source}: {num_unswapped} of {len(indices)} rows have one order only: {reason}")
    return list(groups.values())


def is_pair(row: dict) -> bool:
    """Whether a row is a pair; other rows are chats."""
    return isinstance(row.get("prompt"), str | int | float) and row.get("verdict") not in (None, "")


@dataclass
class ExampleDataset:
    """Encodes the rows of a dataset as examples."""

    args: Args
    source: str
    rows: Any  # datasets.Dataset
    groups: list[list[ExampleId]]  # all examples; groups are shuffled, but not the examples in a group
    data_dir: Path  # paths of images and videos are relative to it
    model: Any
    processor: Any
    training: bool  # True: train all assistant turns; False: generate the last one and score it

    def __post_init__(self):
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.eos_ids = decoding.find_eos_ids(self.model, self.tokenizer)
        require(self.eos_ids, f"{self.args.model} has no EOS token")
        special = [x for x in ("<think>", "<answer>") if x in self.tokenizer.all_special_tokens]
        require(not special, f"{self.args.model}: {special} must be ordinary tokens, which decoding keeps")
        self.prefixes = {}  # of the current batch, by prefix key
        if self.training:  # for examples in a rank's share and in its packs
            cache_size = 2 * math.ceil(self.args.train_batch_size / WORLD_SIZE)
            self.encode = functools.lru_cache(cache_size)(self.encode)

    def encode_all(self, example_ids: list[ExampleId]) -> list[Example]:
        """The examples with these ids, without those that can't be used."""
        self.prefixes.clear()
        examples = []
        for example_id in example_ids:
            try:
                examples.append(self.encode(example_id))
            except ROW_ERRORS as error:
                row = f"{self.source} row {example_id.row}"
                print(f"warning: {row} is skipped: {error!s:.300}", file=sys.stderr)
        return examples

    def encode(self, example_id: ExampleId) -> Example:
        """The example with this id. Raises RowError or OSError if its row can't be used."""
        row = self.rows[example_id.row]  # `datasets` opens images here, build_messages other media
        if is_pair(row):
            chat, noun, label = build_pair(row, example_id.swapped)
        else:
            chat, noun, label = row | {"prompt": row.get("messages")}, "", None
        messages = build_messages(self.args, chat, self.data_dir, self.tokenizer)
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if not messages or messages[0]["role"] == "assistant":
            raise RowError("the chat has no assistant turn, or begins with one")
        prefix, prefix_key, suffix = self.tokenize(messages)
        # In evaluations, the model does not read the suffix, so its length doesn't count: otherwise only
        # one order of a pair might fit.
        length = prefix.length + (len(suffix) if self.training else 0)
        if length > self.args.max_length:
            raise RowError(f"{length} tokens exceed --max-length")
        prefix = replace(prefix, row_id=example_id.row)
        return Example(example_id, prefix, prefix_key, suffix, row, noun, label)

    def tokenize(self, messages: list[dict]) -> tuple[Prompt, str, Continuation]:
        r"""Prefix, prefix key and suffix of a chat that ends with an assistant turn. In training:

        prefix         <|im_start|> user \n <|vision_start|> <|image_pad|> x 16 <|vision_end|>
        suffix         What color? \n Answer 1: red \n Answer 2: blue <|im_end|> \n <|im_start|> assistant
                       \n <answer> Answer 1 is better </answer> <|im_end|>
        response_mask  True from <answer> on

        In evaluations, or without an image, the prefix ends before the first turn of the suffix."""
        first = [message["role"] for message in messages].index("assistant")
        later = [message["content"] for message in messages[first:]]
        if not all(later) or any(part["type"] != "text" for content in later for part in content):
            raise RowError("from the first assistant turn on, turns must have text and nothing else")
        ids, turns = self.locate_turns(messages)
        context = messages[:first]
        if not self.training:
            turns = turns[-1:]
            context = messages[:-1]
        prompt_end = prefix_end = turns[0].start
        if self.training:  # the prefix ends with the last image
            media_ids = packing.media_token_ids(self.model.config)
            prefix_end = max([t + 1 for t in range(prompt_end) if ids[t] in media_ids], default=prompt_end)
        key = self.cache_prefix(ids[:prefix_end], ids[prefix_end:prompt_end], context)
        if key is None:  # the processor rewrites the text after the image
            prefix_end = prompt_end
            key = self.cache_prefix(ids[:prefix_end], [], context)
        prefix = self.prefixes[key]
        suffix = packing.continue_prompt(prefix, torch.tensor(ids[prefix_end:]))
        mask = [any(t in turn for turn in turns) for t in range(prefix_end, len(ids))]
        suffix.response_mask = torch.tensor(mask)  # (R,)
        return prefix, key, suffix

    def cache_prefix(self, ids: list[int], rest: list[int], context: list[dict]) -> str | None:
        """Key in self.prefixes, a hash of ids and media; None if the chat does not end with `rest`."""
        parts = [part for message in context for part in message["content"]]
        media = [part for part in parts if part["type"] != "text"]
        key = hashlib.sha256(pickle.dumps((ids, media))).hexdigest()
        if key not in self.prefixes:
            inputs = chats.encode_chat(self.processor, context, add_generation_prompt=True)
            length = inputs["input_ids"].shape[1] - len(rest)
            if inputs["input_ids"][0, length:].tolist() != rest:
                return None
            self.prefixes[key] = packing.make_prompt(self.model, inputs, length=length)
        return key

    def locate_turns(self, messages: list[dict]) -> tuple[list[int], list[range]]:
        r"""Token ids of a chat that ends with an assistant turn, up to its EOS, and the
        indices of all assistant turns. A turn ends with its first EOS.

        messages   user: "Hi", assistant: "Hello"
        ids        <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello <|im_end|>
        turns      [range(9, 11)]: Hello <|im_end|>

        Turns are located by their length: the chat before a turn, and up to its end, must be
        prefixes of the whole chat. If the template writes no EOS, the last turn gets one."""
        whole = chats.tokenize_chat(self.processor, messages)
        turns = []
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = chats.tokenize_chat(self.processor, messages[:n], add_generation_prompt=True)
            until = chats.tokenize_chat(self.processor, messages[: n + 1])
            if whole[: len(before)] != before or whole[: len(until)] != until:
                raise RowError(f"in the chat template, message {n} depends on what follows it")
            ends = [t + 1 for t in range(len(before), len(until)) if until[t] in self.eos_ids]
            turns.append(range(len(before), ends[0] if ends else len(until)))
            thought = chats.content_text(message).rpartition("</think>")[0].replace("<think>", "")
            thought = self.tokenizer.decode(self.tokenizer.encode(thought, add_special_tokens=False))
            written = self.tokenizer.decode(until[len(before) :])
            if "".join(thought.split()) not in "".join(written.split()):
                raise RowError(f"the chat template leaves out the reasoning of message {n}")
        ids = whole[: turns[-1].stop]
        if ids[-1] not in self.eos_ids:
            ids.append(self.eos_ids[0])
            turns[-1] = range(turns[-1].start, len(ids))
        return ids, turns


def build_pair(row: dict, swapped: bool) -> tuple[dict, str, str]:
    r"""A pair as a chat with its media, the noun for its candidates, and the label. Swapped, for example:

    row        {"prompt": "a ball", "image_1": "a.png", "image_2": "b.png", "verdict": "1"}
    chat       user: "a ball\nImage 1: <image>\nImage 2: <image>", with the images b.png and a.png
               assistant: "<answer>Image 2 is better</answer>"
    noun       Image
    label      2
    """
    types = [x for x in CANDIDATE_TYPES if row.get(f"{x}_1") is not None and row.get(f"{x}_2") is not None]
    if len(types) != 1:
        raise RowError("expected exactly one of answer_1/2, image_1/2, video_1/2")
    candidate_type = types[0]
    noun = candidate_type.capitalize()
    candidates = [row[f"{candidate_type}_1"], row[f"{candidate_type}_2"]]
    label = str(row["verdict"]).removesuffix(".0")  # 1.0 is 1
    if swapped:
        candidates.reverse()
        label = SWAPPED[label]
    reasoning = str(row.get("swapped_reasoning" if swapped else "reasoning") or "")

    question = str(row["prompt"])
    media = {}
    for name in ("image", "video"):
        items = row.get(name) or row.get(f"{name}s") or []
        items = items if isinstance(items, list) else [items]
        if f"<{name}>" not in question:
            question = f"<{name}>" * len(items) + question
        media[f"{name}s"] = items + candidates if name == candidate_type else items
    texts = [f"<{candidate_type}>"] * 2
    if candidate_type == "answer":
        texts = [escape_markers(str(candidate)) for candidate in candidates]
    user = f"{question}\n{noun} 1: {texts[0]}\n{noun} 2: {texts[1]}"
    reasoning = escape_markers(reasoning).replace("<answer>", "< answer>")  # parse_verdict needs exactly one
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    turns = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": thought + format_verdict(label, noun)},
    ]
    return {"prompt": turns, **media}, noun, label


def escape_markers(text: str) -> str:
    """Break up markers of images in a text: "< image>". Otherwise images would be missing."""
    return re.sub("<(image|video)>", r"< \1>", text)


def format_verdict(verdict: str, noun: str) -> str:
    return f"<answer>{VERDICTS[verdict].format(noun)}</answer>"


def parse_verdict(text: str, noun: str) -> str | None:
    """The verdict of a judgment; None unless it has exactly one <answer>, with a known sentence."""
    found = [v for v in VERDICTS if re.search(rf"<answer>\s*{VERDICTS[v].format(noun)}\s*</answer>", text)]
    return found[0] if found and text.count("<answer>") == 1 else None


# ---- forward ----


def iter_packs(args: Args, run: Run, examples: list[Example]) -> Iterator[packing.Pack]:
    """This rank's packs of a step's examples. Their targets are the trained tokens."""
    sharing = defaultdict(list)  # prefix key -> indices of the examples with this prefix
    for b, example in enumerate(examples):
        sharing[example.prefix_key].append(b)
    return packing.iter_rank_packs(
        model=run.judge.module.model,
        groups=[(indices[0], indices) for indices in sharing.values()],
        prompts=[example.prefix for example in examples],
        encode=lambda i: run.train_data.encode(examples[i].example_id).prefix,
        responses=[example.suffix for example in examples],
        max_tokens=args.micro_batch_tokens,
        rank=RANK,
        world_size=WORLD_SIZE,
    )


# ---- evaluation ----


def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """Metrics of the evaluation set, with each pair in both orders, and one record per row."""
    data = run.eval_data
    if run.sampling_model is not run.judge.module.model:  # the unsharded copy under ZeRO-3
        weights = run.sampling_model.state_dict()
        for name, weight in iter_full_weights(run.judge.module.model):
            weights[name].copy_(weight)
    example_ids = [example_id for group in data.groups for example_id in group]
    share = [example_ids[i] for i in np.array_split(range(len(example_ids)), WORLD_SIZE)[RANK]]
    records = []
    for start in range(0, len(share), args.max_num_seqs):
        if examples := data.encode_all(share[start : start + args.max_num_seqs]):
            records += judge_examples(args, run.sampling_model, data.tokenizer, examples)
    records = all_gather_list(records)
    if not records:
        save_and_stop(args, run, f"{data.source}: all rows were skipped; see the warnings")
    swapped_records = {record["row"]: record for record in records if record["swapped"]}
    row_records = [record for record in records if not record["swapped"]]
    for record in row_records:
        if swapped := swapped_records.get(record["row"]):
            expected = SWAPPED.get(record["predicted_verdict"])  # None if it can't be parsed
            record["consistent"] = expected is not None and swapped["predicted_verdict"] == expected
            record["swapped_response"] = swapped["response"]
    metrics = {"train/step": run.state["step"]} | compute_judge_metrics(records)
    return metrics, [record.pop("columns") | record for record in row_records]


@torch.no_grad()
def judge_examples(args: Args, model, tokenizer, examples: list[Example]) -> list[dict]:
    """Generate a judgment per example and return its record.

    p(v | prefix, generated reasoning) is a softmax over the three verdicts v of the log-probs of
    <answer>v</answer>. The reasoning is tokenized again with v, as <answer> can begin inside a token.
    soft_correct: the most probable verdict is right."""
    prefixes = [example.prefix for example in examples]
    generated = decoding.generate(
        model=model,
        prompts=prefixes,
        num_samples=1,
        max_new_tokens=args.max_response_length,
        eos_ids=decoding.find_eos_ids(model, tokenizer),
        temperature=0.0,
        max_tokens=args.micro_batch_tokens,
    )
    texts = tokenizer.batch_decode([x.token_ids for x in generated], skip_special_tokens=True)
    scored = []  # per example: the dataset's response and, for a pair, one with each verdict
    for example, text in zip(examples, texts):
        scored.append([example.suffix])
        if example.label is not None:
            reasoning = text.partition("<answer>")[0]
            verdicts = [reasoning + format_verdict(verdict, example.noun) for verdict in VERDICTS]
            all_ids = tokenizer(verdicts, add_special_tokens=False)["input_ids"]
            num_shared = len(os.path.commonprefix(all_ids))
            for ids in all_ids:
                response = packing.continue_prompt(example.prefix, torch.tensor(ids))
                # The log-probs of shared tokens cancel in the softmax, but in bf16 not exactly.
                response.response_mask[:num_shared] = False
                scored[-1].append(response)

    records = []
    all_logprobs = sum_logprobs(args, model, prefixes, scored)
    for example, judgment, text, logprobs in zip(examples, generated, texts, all_logprobs):
        record = {
            "columns": chats.row_columns(example.row),
            "phase": "eval",
            "row": example.example_id.row,
            "swapped": example.example_id.swapped,
            "response": text,
            "length": len(judgment.token_ids),
            "truncated": judgment.truncated,
            "loss_sum": -float(logprobs[0]),  # of the dataset's response, in nats
            "num_tokens": len(example.suffix),
        }
        if example.label is not None:
            verdict = parse_verdict(text, example.noun)
            probabilities = dict(zip(VERDICTS, logprobs[1:].softmax(0).tolist()))
            # If the reasoning was truncated, the verdicts were scored in the middle of it.
            is_complete = "<answer>" in text or not judgment.truncated
            likeliest = max(probabilities, key=probabilities.get)
            record |= {
                "predicted_verdict": verdict,
                "probabilities": probabilities,
                "correct": verdict == example.label,  # False if it can't be parsed
                "soft_correct": likeliest == example.label if is_complete else None,
            }
        records.append(record)
    return records


def sum_logprobs(
    args: Args, model, prefixes: list[Prompt], responses: list[list[Continuation]]
) -> tuple[Tensor, ...]:
    """Per prefix, the sum of log-probs of each of its responses, in float64."""
    flat = [response for own_responses in responses for response in own_responses]
    sizes = [len(own_responses) for own_responses in responses]
    indices = torch.arange(len(flat)).split(sizes)  # of each prefix's responses in `flat`
    longest = max(prefix.length for prefix in prefixes) + max(map(len, flat))
    packs = packing.iter_rank_packs(
        model=model,
        groups=[(i, own_indices.tolist()) for i, own_indices in enumerate(indices)],
        prompts=prefixes,
        responses=flat,
        max_tokens=max(args.micro_batch_tokens, longest),  # prompt and judgment may exceed the limit
    )
    sums = torch.zeros(len(flat), dtype=torch.float64, device=model.device)
    for pack in packs:
        logprobs, _ = packing.response_logprobs(model, pack)  # (M,)
        sums.index_add_(0, pack.token_index[0], logprobs.double())  # by response
    return sums.cpu().split(sizes)


def compute_judge_metrics(records: list[dict]) -> dict[str, float]:
    """Means over all records. A judge that always answers "1" scores 0.5 on pairs without ties."""
    metrics = {"eval/num_rows": len({record["row"] for record in records})}
    keys = {  # metric -> what it is the mean of
        "accuracy": "correct",
        "soft_accuracy": "soft_correct",
        "swap_consistency": "consistent",
        "length": "length",
        "truncated_frac": "truncated",
    }
    for name, key in keys.items():
        values = [record[key] for record in records if record.get(key) is not None]
        if values:  # chats have no verdict
            metrics[f"eval/{name}"] = float(np.mean(values))
    verdicts = [record["predicted_verdict"] for record in records if "predicted_verdict" in record]
    if verdicts:
        metrics["eval/parse_rate"] = 1 - verdicts.count(None) / len(verdicts)
        metrics["eval/tie_rate"] = verdicts.count("tie") / len(verdicts)
        metrics["eval/first_rate"] = verdicts.count("1") / len(verdicts)
        is_skipped = ["soft_correct" in record and record["soft_correct"] is None for record in records]
        metrics["eval/num_soft_skipped"] = sum(is_skipped)
    unswapped = [record for record in records if not record["swapped"]]
    num_tokens = sum(record["num_tokens"] for record in unswapped)
    metrics["eval/loss"] = sum(record["loss_sum"] for record in unswapped) / (num_tokens or math.nan)
    return metrics


# ---- model ----


class Judge(nn.Module):
    """The model for DeepSpeed: pack -> log-probs (M,) of its targets."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pack: packing.Pack) -> Tensor:
        return packing.response_logprobs(self.model, pack)[0]


def load_judge(args: Args):
    """The judge's DeepSpeed engine. By default, only the decoder and the LM head are trained."""
    torch.manual_seed(args.seed)  # for the initial LoRA weights
    model = load_model(args, args.model)
    judge = Judge(model)
    if args.freeze is None:
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
        frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
        if frozen:  # a text model has nothing else
            print0(f"frozen outside the language model: {len(frozen)} weights: {frozen[0]}, ...")
    prepare_for_training(args, judge)
    engine = init_deepspeed_engine(args, judge)
    engine.eval()  # no dropout; gradients still flow
    return engine


def load_model(args: Args, source: str, auto_class=None):
    """Load a vision-language or text model, with its LM head or as `auto_class`."""
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        text_config = config.get_text_config()
        is_vlm = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if config.is_encoder_decoder or text_config.is_encoder_decoder:
            stop(f"can't load the model {source}: encoder-decoder models are not supported")
        if auto_class is None and is_vlm:
            auto_class = transformers.AutoModelForImageTextToText
        # SDPA silently ignores softcapping of attention scores (Gemma 2).
        has_softcap = getattr(text_config, "attn_logit_softcapping", None) is not None
        model, info = (auto_class or transformers.AutoModelForCausalLM).from_pretrained(
            source,
            dtype=getattr(torch, args.dtype),
            attn_implementation="eager" if has_softcap else None,
            output_loading_info=True,
        )
        if model.can_generate():  # else save_pretrained would fail, after training
            model.generation_config.validate(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        stop(f"can't load the model {source}: {error}")
    missing = sorted(info["missing_keys"])  # would be initialized randomly
    require(not missing, f"{source}: {len(missing)} weights are missing: {missing[:3]}")
    return model


def prepare_for_training(args: Args, module: nn.Module) -> None:
    """Apply --lora-rank, --freeze and --gradient-checkpointing to module.model."""
    model = module.model
    if args.lora_rank > 0:  # adapters of the language model's linear layers, without its head
        from peft import LoraConfig

        decoder = model.get_decoder()
        prefix = next(name for name, x in model.named_modules() if x is decoder)  # may be ""
        config = LoraConfig(
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            target_modules="all-linear",
            # Exclude modules outside the decoder (none if its prefix is ""), and towers inside it.
            exclude_modules=rf"(?!{re.escape(prefix)}).*|.*(vision|visual|image|audio|perceiver).*",
        )
        model.add_adapter(config)
    if args.freeze:
        # Match names without their prefix "model.", which not all classes have.
        parameters = {name.removeprefix("model."): x for name, x in model.named_parameters()}
        frozen = [name for name in parameters if re.search(args.freeze, name)]
        for name in frozen:
            parameters[name].requires_grad_(False)
        is_partial = frozen and any(x.requires_grad for x in module.parameters())
        require(is_partial, f"--freeze {args.freeze} must match some parameter names, but not all")
        print0(f"--freeze {args.freeze} freezes {len(frozen)} weights: {', '.join(frozen[:3])}, ...")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()


@torch.no_grad()
def iter_full_weights(model) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the model, unsharded and with LoRA merged. Call on all ranks.

    LoRA is merged into copies: merging in place and undoing it would change bf16 weights by
    rounding. Tied weights appear under each of their names."""
    import deepspeed

    lora_layers = {}  # name of a weight -> its LoRA layer; for experts, PEFT wraps a parameter
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            name = f"{name}.{getattr(layer, 'parameter_name', 'weight')}"
            lora_layers[name.replace(".base_layer", "")] = layer
    for name, x in model.state_dict(keep_vars=True).items():  # parameters and buffers
        if ".lora_" in name:  # merged into its layer's weight
            continue
        name = name.replace(".base_layer", "")
        layer = lora_layers.get(name)
        with deepspeed.zero.GatheredParameters(x if layer is None else layer.parameters()):
            weight = x.clone() if layer is None else x + layer.get_delta_weight("default")
        yield name, weight.detach()


# ---- DeepSpeed ----


def init_distributed() -> None:
    """Initialize torch.distributed. A single process uses no port, so runs can't conflict."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        # cuDNN's SDPA gives NaN gradients with masks on sm90 (torch 2.13, trl#7181).
        torch.backends.cuda.enable_cudnn_sdp(False)
    options = {"timeout": datetime.timedelta(hours=2)}  # ranks wait while rank 0 saves
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", **options)
    os.environ |= {"LOCAL_RANK": str(LOCAL_RANK), "DS_ACCELERATOR": DEVICE.type}
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute


def init_deepspeed_engine(args: Args, module: nn.Module):
    """Wrap a module in a DeepSpeed engine, with AdamW unless all weights are frozen."""
    import deepspeed

    trained = [x for x in module.parameters() if x.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, but unused
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # bf16 sums lose small gradients
        "zero_optimization": {
            "stage": args.zero_stage if trained or args.zero_stage == 3 else 0,
            "overlap_comm": False,
            "reduce_scatter": dist.get_backend() != "gloo",  # gloo does not support it
            "stage3_param_persistence_threshold": 10_000,  # shards the bundled model, too
            "offload_optimizer": {"device": "cpu" if args.offload_optimizer else "none"},
        },
        "zero_force_ds_cpu_optimizer": False,  # keep torch's AdamW: DeepSpeed's must be compiled
    }
    if args.zero_stage == 3 and (head := module.model.get_output_embeddings()):
        # ZeRO-3 gathers these weights in the head's forward only, but packing.py also uses them.
        for parameter in head.parameters():
            deepspeed.zero.register_external_parameter(module, parameter)
    optimizer = None
    if trained:  # betas as in OpenRLHF
        decay = {"params": [x for x in trained if x.dim() > 1], "weight_decay": args.weight_decay}
        no_decay = {"params": [x for x in trained if x.dim() <= 1], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decay, no_decay], betas=(0.9, 0.95), fused=True)
    engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=optimizer)
    return engine


def lr_factor(args: Args, update: int, total_updates: int) -> float:
    """The learning rate of an optimizer step (0 is the first) as a fraction of the peak.

    Linear warmup, then half a cosine that ends at min_lr_ratio with the last update.

    warmup_updates 2, min_lr_ratio 0, total_updates 5 -> 1/2, 1, 3/4, 1/4, 0
    """
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    progress = (update + 1 - args.warmup_updates) / max(1, total_updates - args.warmup_updates)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine


def optimizer_step(engine, learning_rate: float) -> float:
    """Clip gradients and step; returns the gradient norm before clipping.

    The norm is the same on all ranks. If it is not finite, all skip the step and return NaN."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    if engine.zero_optimization():
        engine.step()  # skips non-finite gradients
        zero_stale_gradients(engine)
        return float(engine.get_global_grad_norm()) if engine.was_step_applied() else math.nan
    # Without ZeRO, DeepSpeed does not check for non-finite gradients.
    norm = nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    if norm.isfinite():
        engine.step()
        return float(norm)
    engine.zero_grad()
    return math.nan


def zero_stale_gradients(engine) -> None:
    """Zero the buffers in which DeepSpeed 0.19 keeps gradients under ZeRO-3 and CPU offload.

    Otherwise parameters without a new gradient (a vision tower's, in a batch of texts) would
    be updated with the previous one. DeepSpeed has no public call for this. A version that renames
    these attributes fails here."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        buffers = [optimizer.grad_partitions_flat_buffer]
        partitions = optimizer.fp32_partitioned_groups_flat
    else:
        buffers = [*optimizer.accumulated_grads_in_cpu.values()] if optimizer.cpu_offload else []
        partitions = optimizer.single_partition_of_fp32_groups
    for buffer in [*buffers, *(partition.grad for partition in partitions)]:  # .grad exists with CPU offload
        if buffer is not None:
            buffer.zero_()


# ---- files ----


def resolve_run_dir(args: Args) -> tuple[Path, Path | None]:
    """Create the directory of this run; returns it and the checkpoint to load, if any.

    --resume   the run's directory        what happens
    not given  must not exist             a new run
    PATH       must not exist             a new run that continues from the checkpoint PATH
    auto       has checkpoints            the run continues from the latest one
    auto       has no checkpoint          the run starts again, from its own --resume PATH if it had one

    Rank 0 decides, since other ranks may see different times and files."""
    run_dir = checkpoint = None
    if RANK == 0:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        name = args.run_name or f"{Path(__file__).stem}-{Path(args.model).name}-seed{args.seed}-{now}"
        run_dir = Path(args.output_dir, name)
        resume = args.resume
        is_started = (run_dir / "args.json").exists()
        if resume == "auto":
            if problems := sorted(run_dir.glob("checkpoint-*-problem")):
                stop(f"{problems[0]} was saved after a problem: rename or delete it")
            if checkpoints := list_checkpoints(run_dir):
                resume = checkpoints[-1]
            elif is_started:
                resume = json.loads((run_dir / "args.json").read_text())["resume"]
        elif is_started:
            stop(f"{run_dir} already exists: use a different --run-name or --resume auto")
        if resume not in (None, "auto"):
            checkpoint = Path(resume).resolve()
            if not (checkpoint / "state/run.pt").is_file():
                stop(f"{checkpoint} is not a checkpoint: it has no file state/run.pt")
        run_dir.mkdir(parents=True, exist_ok=True)
    paths = [run_dir, checkpoint]
    dist.broadcast_object_list(paths)
    return tuple(paths)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint-N folders, sorted by N; other names are ignored."""
    paths = {path.name.removeprefix("checkpoint-"): path for path in run_dir.glob("checkpoint-*")}
    return [paths[step] for step in sorted(filter(str.isdigit, paths), key=int)]


def load_checkpoint(args: Args, checkpoint: Path, **engines) -> dict:
    """Load the engines by their names; returns the saved state. Warns about changed flags."""
    saved = torch.load(checkpoint / "state/run.pt", weights_only=False)
    old = saved["flags"]
    changes = {}  # flag -> its new and old value
    for name, new in (vars(args) | {"num_ranks": WORLD_SIZE}).items():
        if name not in ("resume", "run_name", "output_dir") and new != old.get(name):
            changes[name] = f"{name} {new} (was {old.get(name)})"
    fixed = ".*model|num_ranks|dtype|zero_stage|lora_rank|lora_alpha|freeze|weight_decay"
    if refused := [changes[name] for name in changes if re.fullmatch(fixed, name)]:
        stop(f"can't resume {checkpoint} with {', '.join(refused)}")
    if changes:
        print0(f"warning: flags changed since {checkpoint}: {', '.join(changes.values())}")
    for name, engine in engines.items():
        engine.load_checkpoint(checkpoint / "state", tag=name, load_module_strict=False)
        engine.optimizer.clip_grad = args.max_grad_norm  # the checkpoint has overwritten it
    return saved["state"]


def start_logs(args: Args, run_dir: Path, checkpoint: Path | None, last_step: int) -> None:
    """Write args.json, and copy the log lines of the steps up to the checkpoint.

    If a run is continued, it redoes the steps after its checkpoint; their old lines move to
    *.repeated.jsonl."""
    if RANK > 0:
        return
    is_continued = (run_dir / "args.json").exists()
    args_name = f"args-from-step-{last_step + 1}.json" if is_continued else "args.json"
    (run_dir / args_name).write_text(json.dumps(vars(args), indent=2))
    for name in ("metrics", "samples"):
        path = run_dir / f"{name}.jsonl"
        source = checkpoint.parent / path.name if checkpoint and not is_continued else path
        lines = source.read_text().splitlines(keepends=True) if source.exists() else []
        lines = [line for line in lines if line.endswith("\n")]  # a kill may cut the last one
        kept = [x for x in lines if checkpoint and json.loads(x)["train/step"] <= last_step]
        if is_continued:
            with (run_dir / f"{name}.repeated.jsonl").open("a") as file:
                file.writelines(lines[len(kept) :])  # kept lines come first
        path.write_text("".join(kept))
    if args.track == "wandb":
        import wandb

        created = (run_dir / "args.json").stat().st_mtime
        run_id = f"{run_dir.name}-{created:.0f}"  # names can be reused
        wandb.init(id=run_id, name=run_dir.name, config=vars(args), dir=run_dir, resume="allow")
        wandb.define_metric("*", step_metric="train/step")  # else W&B drops repeated steps


def log(args: Args, run: Run, metrics: dict[str, float], sample_records: list[dict]) -> None:
    """Log to metrics.jsonl, samples.jsonl, the terminal and, with --track wandb, W&B."""
    if RANK > 0:
        return
    step = int(metrics["train/step"])
    metrics = {name: x for name, x in metrics.items() if math.isfinite(x)}  # JSON has no NaN
    printed = [f"{name} {x:.3g}" for name, x in metrics.items() if PRINTED_METRICS.fullmatch(name)]
    print0(f"step {step} of {args.total_steps or step}: {', '.join(printed)}")
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    with (run.run_dir / "samples.jsonl").open("a") as file:
        for record in sample_records:
            file.write(json.dumps({**record, "train/step": step}, default=str) + "\n")
    if args.track == "wandb":
        import pandas
        import wandb

        if sample_records:
            table = pandas.DataFrame(sample_records).fillna("").astype(str)
            metrics["samples"] = wandb.Table(dataframe=table)
        wandb.run.log(metrics)


def save_and_stop(args: Args, run: Run, problem: str) -> NoReturn:
    """Save checkpoint-N-problem, which --resume auto refuses, and exit. Call on all ranks."""
    if run.state["step"] > 0:
        print0(f"saved {save_checkpoint(args, run, '-problem')}")
    stop(problem)


def save_checkpoint(args: Args, run: Run, suffix: str = "") -> Path:
    """Save checkpoint-N: the judge as a Hugging Face model (LoRA is merged; adapter/ has the
    adapter), and state/ for --resume. Call on all ranks."""
    checkpoint = run.run_dir / f"checkpoint-{run.state['step']}{suffix}"
    temporary = checkpoint.with_suffix(".tmp")  # renamed once it is complete
    if RANK == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    run.judge.save_checkpoint(temporary / "state", tag="judge", exclude_frozen_parameters=True)
    export_model(args, run.judge.module.model, run.processor, temporary)
    if RANK == 0:
        flags = vars(args) | {"num_ranks": WORLD_SIZE}
        torch.save({"state": run.state, "flags": flags}, temporary / "state/run.pt")
        temporary.rename(checkpoint)
        for old in list_checkpoints(run.run_dir)[: -args.save_total_limit]:  # 0 deletes none
            shutil.rmtree(old)
    dist.barrier()
    return checkpoint


def export_model(args: Args, model, processor, folder: Path) -> None:
    """Save a Hugging Face model, with LoRA merged. Call on all ranks."""
    import deepspeed

    if args.lora_rank > 0:
        adapter = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
        with deepspeed.zero.GatheredParameters(adapter):
            # In a subfolder, because from_pretrained would apply an adapter to the merged weights.
            model.save_pretrained(folder / "adapter", is_main_process=RANK == 0)
    weights = {}
    for name, weight in iter_full_weights(model):  # on all ranks, but only rank 0 keeps them
        if RANK == 0 and name not in model.all_tied_weights_keys:
            weights[name] = weight.cpu()
    if RANK > 0:
        return
    config = type(model.config).from_dict(model.config.to_dict())
    with torch.device("meta"):  # the same architecture, without LoRA
        export = type(model)(config)
    export.generation_config = getattr(model, "generation_config", None)  # not all have one
    export.save_pretrained(folder, state_dict=weights)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
