"""Bradley-Terry reward model, for vision-language and text models.

A linear head on the hidden state of a response's last token gives its reward. Training raises the
reward of the better of two responses over that of the other:

    d = reward(chosen) - reward(rejected) - margin        loss = -log sigmoid(d)

Paper: https://arxiv.org/abs/2203.02155. docs/reward_bt.md lists the differences from TRL's
RewardTrainer (huggingface/trl@f2cd577) and EasyDeL's; docs/forking.md has a diff for another loss.

Read to the end of `main`; the functions that it calls follow in order of use. A ranking is a
dataset row: a prompt with two or more responses, best first.

Shapes: a step has B responses and Q pairs of them. A pack (common/packing.py) is one forward pass
over some prompts and S of their responses.

    python reward_bt.py           # default: a tiny VLM on easy-VQA, minutes on two CPU cores
    python reward_bt.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset pairs.jsonl --learning-rate 5e-6
    torchrun --standalone --nproc_per_node=8 reward_bt.py --zero-stage 3 ...    # or: deepspeed ...
"""

import functools
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from common import packing, packing_check
from common.packing import Prompt, PromptInfo

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # Random seed of the head, LoRA, data order and easy-VQA's rejected answers.
    output_dir: str = "runs"  # Directory that contains one directory per run.
    run_name: str | None = None  # Subdirectory of --output-dir. Default: SCRIPT-MODEL-seedN-TIME.
    resume: str | None = None  # Checkpoint to resume from, or "auto" for the latest of --run-name.
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # Path or Hub id; a saved head is kept.
    dataset: str = "easy-vqa"  # easy-vqa, a JSON, CSV or Parquet file, a dataset directory or a Hub id.
    dataset_split: str = "train"  # Split of --dataset; ignored for files.
    columns: tuple[str, ...] = ()  # Columns to rename, as NEW=OLD, such as prompt=problem.
    eval_datasets: tuple[str, ...] = ()  # Evaluation sets, as NAME=DATASET. Default: easy-vqa's, or none.
    eval_dataset_split: str = "test"  # Split of each of --eval-datasets; ignored for files.
    system_prompt: str | None = None  # System prompt for prompts that have no system message.
    video_fps: float = 2.0  # Frames per second to sample from videos.
    max_length: int = 1024  # Maximum tokens of a prompt and one response; rows with longer ones are skipped.
    lora_rank: int = 0  # LoRA rank (language model only); 0 trains all weights.
    lora_alpha: float = 32.0  # LoRA scaling: the adapters' output is multiplied by alpha / rank.
    # --- algorithm ---
    center_coef: float = 0.0  # Weight of (chosen + rejected)^2 in the loss (TRL: center_rewards_coefficient).
    label_smoothing: float = 0.02  # Assumed probability that a pair's order is wrong, below 0.5 (TRL: 0).
    total_steps: int = 400  # Number of optimizer steps.
    train_batch_size: int = 32  # Dataset rows per optimizer step, over all ranks.
    # --- optimizer ---
    learning_rate: float = 3e-4  # Peak learning rate; about 5e-6 for pretrained models, 1e-4 with LoRA.
    min_lr_ratio: float = 0.1  # Final learning rate of the cosine schedule, as a fraction of the peak.
    warmup_steps: int = 10  # Optimizer steps of linear warmup.
    weight_decay: float = 0.0  # AdamW weight decay; not applied to biases and norm weights.
    adam_betas: tuple[float, float] = (0.9, 0.95)  # AdamW betas.
    max_grad_norm: float = 1.0  # Maximum gradient norm; larger gradients are scaled down.
    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32.
    zero_stage: Literal[0, 1, 2, 3] = 0  # ZeRO: shard optimizer (1), gradients (2), parameters (3).
    offload_optimizer: bool = False  # Keep optimizer states on the CPU and run the step there.
    gradient_checkpointing: bool = False  # Recompute activations to save memory; about a third slower.
    micro_batch_tokens: int = 8192  # Maximum tokens per forward and backward pass on a rank.
    # --- logging and checkpoints ---
    eval_steps: int = 200  # Evaluation interval in steps; 0 evaluates at the start and the end only.
    eval_rows: int = 1000  # Number of rows per evaluation set, a fixed random subset; 0 for all.
    save_steps: int = 0  # Checkpoint interval in steps; 0 saves at the end only.
    save_total_limit: int = 2  # Checkpoints to keep, at least 1; the oldest are deleted.
    track: Literal["off", "wandb", "tensorboard"] = "off"  # Experiment tracker to log to.


# ---- the algorithm: tensors in, tensors and metrics out ----


def compute_bt_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margins: Tensor,
    label_smoothing: float,
    center_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (Q,) and metrics (Q,), one entry per pair; the caller averages. All inputs are (Q,).

    d = chosen - rejected - margin, https://arxiv.org/abs/2307.09288 eq. (2)
    bt = -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)
    L = bt + center_coef (chosen + rejected)^2, https://arxiv.org/abs/2312.09244

    chosen [1, 0], rejected [0, 2], margins [0, .5], label_smoothing 0, center_coef .1
    -> d [1, -2.5], bt [.3133, 2.5789], L [.4133, 2.9789]
    """
    reward_diff = chosen_rewards - rejected_rewards
    d = reward_diff - margins
    bt = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
    center = (chosen_rewards + rejected_rewards) ** 2
    losses = bt + center_coef * center
    metrics = {
        "rm/loss": losses,
        "rm/bt_loss": bt,
        "rm/center_loss": center,
        "rm/chosen_rewards": chosen_rewards,
        "rm/rejected_rewards": rejected_rewards,
        "rm/reward_diff": reward_diff,
        "rm/accuracy": (reward_diff.sign() + 1) / 2,  # equal rewards count one half
    }
    return losses, metrics


# ---- the data of a step ----


@dataclass
class Ranking:
    """A dataset row: a prompt and its responses, best first."""

    prompt: PromptInfo  # a complete Prompt on the rank that encodes the row
    response_ids: list[Tensor]  # per response its token ids (R,)
    texts: list[str]  # per response its text, for samples.jsonl
    margin: float  # subtracted from the reward difference of each pair
    columns: dict  # strings and numbers of the dataset row, for samples.jsonl


@dataclass
class Pairs:
    """Every pair of responses within a ranking, for all rankings of a step."""

    chosen: Tensor  # (Q,): index of the better response among all B
    rejected: Tensor  # (Q,): index of the worse response
    margins: Tensor  # (Q,)
    weights: Tensor  # (Q,): they sum to 1


def make_pairs(rankings: list[Ranking], device: torch.device) -> Pairs:
    """All pairs. Each ranking has the same total weight, https://arxiv.org/abs/2203.02155 eq. (1).

    2 and 3 responses, margins 0 and .5
    -> chosen [0, 2, 2, 3], rejected [1, 3, 4, 4], margins [0, .5, .5, .5], weights [1/2, 1/6, 1/6, 1/6]
    """
    pairs = []
    start = 0  # index of the ranking's first response among all B
    for ranking in rankings:
        K = len(ranking.response_ids)
        weight = 1 / len(rankings) / (K * (K - 1) / 2)
        for i, j in combinations(range(start, start + K), 2):
            pairs.append((i, j, ranking.margin, weight))
        start += K
    chosen, rejected, margins, weights = (torch.tensor(x, device=device) for x in zip(*pairs))
    return Pairs(chosen=chosen, rejected=rejected, margins=margins, weights=weights)


@dataclass
class Run:
    """State created by setup and shared by all steps."""

    run_dir: Path
    device: torch.device
    processor: Any  # transformers processor, or the tokenizer of a text model
    reward_model: Any  # DeepSpeed engine around the trained RewardModel
    train_data: "RankingDataset"
    eval_sets: dict[str, "RankingDataset"]  # by the names in --eval-datasets
    checkpoint: Path | None  # latest checkpoint
    state: dict  # saved in each checkpoint, see setup; add what must survive a resume
    writer: Any = None  # TensorBoard's SummaryWriter


# ---- main ----


def main(args: Args) -> dict[str, float]:
    # --- 1. setup ---
    run_start = time.perf_counter()
    run = setup(args)
    reward_model = run.reward_model
    state = run.state
    received_signals = catch_signals()  # after a signal, the run saves and exits once the step ends
    stopped = False
    metrics = {}
    if run.eval_sets and not state["initial_eval"]:  # a resumed run has it in its state
        state["initial_eval"], eval_records = evaluate(args, run)
        log(args, run, {"train/step": 0, **state["initial_eval"]}, eval_records)

    steps = range(state["step"] + 1, args.total_steps + 1)
    show_bar = RANK == 0 and sys.stderr.isatty()  # otherwise each step prints a line
    bar = tqdm(steps, "reward_bt", total=args.total_steps, initial=state["step"], disable=not show_bar)
    for step in bar:
        # --- 2. data: the next rankings, all pairs within them, and packs of their responses ---
        step_start = time.perf_counter()
        indices = shuffled_indices(
            start=(step - 1) * args.train_batch_size,
            count=args.train_batch_size,
            num_rows=len(run.train_data.rows),
            seed=args.seed,
        )
        rankings = gather_rankings(run.train_data, indices)  # of all ranks
        pairs = make_pairs(rankings, run.device)
        packs = list(iter_packs(args, run, run.train_data, rankings))  # this rank's
        num_responses = sum(len(ranking.response_ids) for ranking in rankings)  # B
        # If the responses of a ranking are in several packs, each pack treats the rewards of the
        # other packs as constants. The gradients of all packs still add up to that of the loss.
        constant_rewards = torch.zeros(num_responses, device=run.device)  # (B,)
        most_tokens = max(x.prompt.length + sum(map(len, x.response_ids)) for x in rankings)
        if most_tokens > args.micro_batch_tokens or not packing.is_packed(reward_model.module.model):
            constant_rewards = compute_rewards(args, run, run.train_data, rankings).to(run.device)

        # --- 3. update: one optimizer step on all pairs ---
        set_gradient_checkpointing(reward_model.module, True)
        rewards = torch.zeros(num_responses, device=run.device)  # (B,), for the metrics
        for k, pack in enumerate(packs):
            reward_model.set_gradient_accumulation_boundary(k == len(packs) - 1)
            pack_rewards = reward_model(pack)  # (S,)
            rewards[pack.response_index] = pack_rewards.detach()
            all_rewards = constant_rewards.index_put((pack.response_index,), pack_rewards)  # (B,)
            losses, _ = compute_bt_loss(
                chosen_rewards=all_rewards[pairs.chosen],
                rejected_rewards=all_rewards[pairs.rejected],
                margins=pairs.margins,
                label_smoothing=args.label_smoothing,
                center_coef=args.center_coef,
            )
            loss = (pairs.weights * losses).sum()  # pairs outside of this pack have no gradient
            # Undo DeepSpeed's mean over ranks (WORLD_SIZE) and over packs (scale_wrt_gas).
            reward_model.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
        grad_norm = optimizer_step(reward_model)  # None: not finite, the step was skipped
        set_gradient_checkpointing(reward_model.module, False)
        rewards = all_reduce_sum(rewards, run.device)  # (B,)
        seconds = time.perf_counter() - step_start

        # --- 4. metrics ---
        metrics = {
            "train/step": step,
            "train/learning_rate": reward_model.get_lr()[0],
            "train/grad_norm": 0.0 if grad_norm is None else grad_norm,
            "train/skipped_updates": int(grad_norm is None),
            "train/rows_skipped": len(indices) - len(rankings),
            "time/total": seconds,
        }
        metrics |= ranking_metrics(args, rankings, rewards)
        eval_records = []

        # --- 5. evaluate, log, save ---
        is_last_step = step == args.total_steps
        if run.eval_sets and (is_last_step or (args.eval_steps and step % args.eval_steps == 0)):
            eval_metrics, eval_records = evaluate(args, run)
            metrics |= eval_metrics
        log(args, run, metrics, eval_records)
        keys = ["rm/loss", "rm/accuracy", *(f"eval/{name}/accuracy" for name in run.eval_sets)]
        postfix = {key: f"{metrics[key]:.3f}" for key in keys if key in metrics}
        bar.set_postfix(postfix)
        if not show_bar:
            print0(f"step {step} of {args.total_steps}, {seconds:.2f} s: {postfix}")

        state["step"] = step
        state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if grad_norm is None else 0
        diverged = state["skipped_in_a_row"] >= 5
        num_signals = int(all_reduce_sum(torch.tensor(len(received_signals)), run.device))
        stopped = num_signals > 0 and not is_last_step
        if is_last_step or stopped or diverged or (args.save_steps and step % args.save_steps == 0):
            run.checkpoint = save_checkpoint(args, run)
        if diverged:
            fail(f"step {step}: no finite gradients in 5 steps; the last weights are in {run.checkpoint}")
        if stopped:
            print0(f"stopped by a signal; continue with --resume {run.checkpoint}")
            break

    # --- 6. finish ---
    if not stopped:
        for name, initial in state["initial_eval"].items():
            if name.endswith("/accuracy") and name in metrics:
                print0(f"{name} {initial:.3f} -> {metrics[name]:.3f}")
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

    model = load_model(args.model, dtype, with_head=False).base_model
    torch.manual_seed(args.seed)  # for the initial head and LoRA weights
    module = RewardModel(model)
    head_path = Path(args.model) / "score.safetensors"  # if --model is a checkpoint of this script
    if head_path.is_file():
        module.score.load_state_dict({"weight": safetensors.torch.load_file(head_path)["score.weight"]})
    if args.lora_rank > 0:
        add_lora(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    reward_model = init_deepspeed_engine(args, module, dtype, args.total_steps, args.learning_rate)
    reward_model.eval()
    state = {
        "step": 0,
        "initial_eval": {},  # metrics before the first step
        "skipped_in_a_row": 0,  # updates skipped because their gradients were not finite
    }
    if checkpoint is not None:
        _, client_state = reward_model.load_checkpoint(str(checkpoint / "state" / "reward"), tag="engine")
        state = client_state["run_state"]

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = load_rankings(args, args.dataset, args.dataset_split, args.seed, model, processor)
    eval_sets = {}
    default_eval_sets = ["easy-vqa=easy-vqa"] if args.dataset == "easy-vqa" else []
    for name_and_source in args.eval_datasets or default_eval_sets:
        name, _, source = name_and_source.partition("=")
        eval_sets[name] = load_rankings(args, source, args.eval_dataset_split, 0, model, processor)
    prepare_run_dir(args, run_dir, last_step=state["step"])
    print0(f"{run_dir}: {len(train_data.rows)} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")

    probe_rows = packing_check.choose_probe_rows(train_data.rows)
    rankings = [ranking for row in probe_rows if (ranking := encode_or_skip(train_data, row))]
    if not rankings:
        train_data.encode(0)  # raises the error of the first row
    message = packing_check.enable_packing_if_exact(
        model=model,
        forward=reward_model,
        prompts=[ranking.prompt for ranking in rankings],
        max_length=args.max_length,
        max_tokens=args.micro_batch_tokens,
    )
    print0(message)
    if args.zero_stage == 3:  # a check that ends early leaves parameters gathered
        reward_model.empty_partition_cache()
    return Run(
        run_dir=run_dir, device=device, processor=processor, reward_model=reward_model,
        train_data=train_data, eval_sets=eval_sets, checkpoint=checkpoint, state=state,
    )  # fmt: skip


def check_args(args: Args) -> None:
    """Reject flags that contradict each other, before anything is loaded."""
    for name in ("total_steps", "train_batch_size", "save_total_limit"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} ({getattr(args, name)}) must be at least 1")
    if not 0 <= args.label_smoothing < 0.5:
        fail(f"--label-smoothing ({args.label_smoothing}) must be at least 0 and below 0.5")
    if args.micro_batch_tokens < args.max_length:
        fail(f"--micro-batch-tokens must be at least --max-length ({args.max_length})")
    names = [name_and_source.partition("=")[0] for name_and_source in args.eval_datasets]
    if not all("=" in x for x in args.eval_datasets) or len({*names}) < len(names):
        fail("--eval-datasets must be name=source, with different names")
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


# ---- data ----

# Raised if a dataset row can't be used: missing or broken media, too many tokens, a chat that the
# template rejects. Any other exception is a bug in code and ends the run.
ROW_ERRORS = (OSError, ValueError, Image.DecompressionBombError, jinja2.TemplateError)


@dataclass
class RankingDataset:
    source: str
    rows: Any  # datasets.Dataset
    encode: Callable[[int], Ranking]  # row index -> ranking; raises one of ROW_ERRORS


def shuffled_indices(start: int, count: int, num_rows: int, seed: int) -> list[int]:
    """Return `count` indices from position `start` of an endless stream of shuffled epochs.

    An index is epoch * num_rows + row, so a row that occurs twice in a step has two indices.
    """
    stream = []
    for epoch in range(start // num_rows, (start + count - 1) // num_rows + 1):
        rows = np.random.default_rng([seed, epoch]).permutation(num_rows)
        stream += (rows + epoch * num_rows).tolist()
    return stream[start % num_rows :][:count]


def load_rankings(args: Args, source: str, split: str, seed: int, model, processor) -> RankingDataset:
    """Columns: prompt or messages, a string or a chat; chosen and rejected, or responses (best
    first), strings or chats, see split_row; optional image(s), video(s) and margin."""
    rows = rename_columns(args, source, load_rows(source, split))
    if source == "easy-vqa":
        rows = add_pairs(rows, seed)
    columns = rows.column_names
    has_pair = "chosen" in columns and "rejected" in columns
    is_chat = not str(rows.features.get("chosen")).startswith("Value")
    has_prompt = "prompt" in columns or "messages" in columns or is_chat  # a chat can contain it
    if not has_prompt or not (has_pair or "responses" in columns):
        names = ", ".join(columns)
        fail(f"{source} has columns {names}: rename yours, --columns prompt=... chosen=... rejected=...")
    tokenizer = getattr(processor, "tokenizer", processor)

    # Cached: a step encodes a row once to plan the packs, and again to build them.
    @functools.lru_cache(maxsize=2 * args.train_batch_size)
    def encode(index: int) -> Ranking:
        row = rows[index]
        prompt_chat, response_chats = split_row(row)
        whole = prompt_chat + sum(response_chats, [])
        whole = build_messages(args, row | {"prompt": whole}, Path(source).parent, tokenizer)
        messages = whole[: -sum(map(len, response_chats))]
        remaining = iter(whole[len(messages) :])
        responses = [[next(remaining) for _ in chat] for chat in response_chats]
        texts = [" ".join(map(get_text, response)) for response in responses]
        prompt, response_ids = encode_ranking(model, processor, messages, responses, index)
        longest = prompt.length + max(map(len, response_ids))
        if longest > args.max_length:
            raise ValueError(f"{longest} tokens exceed --max-length")
        margin = float(row.get("margin") or 0.0)
        if not math.isfinite(margin):
            raise ValueError(f"its margin is {margin}")
        columns = {name: x for name, x in row.items() if isinstance(x, str | int | float)}
        return Ranking(prompt, response_ids, texts, margin, columns)

    return RankingDataset(source=source, rows=rows, encode=encode)


def encode_or_skip(data, row: int):
    """Encode a dataset row, or return None with a warning if the row can't be used."""
    try:
        return data.encode(row)
    except ROW_ERRORS as error:
        tqdm.write(f"warning: {data.source} row {row} is skipped: {error!s:.300}", file=sys.stderr)
        return None


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


def add_pairs(rows, seed: int):
    """Prefer the correct answer of an easy-VQA question to a random wrong one of the same type."""
    colors = "black blue brown gray green red teal yellow"
    answer_types = ["yes no".split(), "circle rectangle triangle".split(), colors.split()]
    rng = np.random.default_rng(seed)
    wrong_answers = []
    for answer in rows["answer"]:
        same_type = next(answers for answers in answer_types if answer in answers)
        others = [other for other in same_type if other != answer]
        wrong_answers.append(others[rng.integers(len(others))])
    for name, answers in (("chosen", rows["answer"]), ("rejected", wrong_answers)):
        rows = rows.add_column(name, [f"<answer>{answer}</answer>" for answer in answers])
    return rows


def split_row(row: dict) -> tuple[list[dict], list[list[dict]]]:
    """The messages of the prompt, and those of each response, best first.

    Responses are strings, messages that follow the prompt, or chats that begin with the prompt.
    With q for a user's message, and a and b for an assistant's:

    prompt "q", chosen "a", rejected "b"       -> prompt [q], responses [[a], [b]]
    prompt [q], chosen [a], rejected [b]       -> prompt [q], responses [[a], [b]]
    chosen [q, a], rejected [q, b]             -> prompt [q], responses [[a], [b]]
    """
    responses = row.get("responses") or [row.get("chosen"), row.get("rejected")]
    if len(responses) < 2 or None in responses:
        raise ValueError("a ranking needs at least two responses")
    prompt = row.get("prompt") or row.get("messages")
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chats = [[{"role": "assistant", "content": x}] if isinstance(x, str) else x for x in responses]
    if chats[0] and chats[0][0].get("role") != "assistant":
        num_shared = count_shared(chats)
        prompt = chats[0][:num_shared]
        chats = [chat[num_shared:] for chat in chats]
    if not prompt:
        raise ValueError("its prompt is empty")
    if not all(chats):
        raise ValueError("a response is empty, or the beginning of another one")
    return prompt, chats


def get_text(message: dict) -> str:
    """The text of a response's message."""
    if any(part["type"] != "text" for part in message["content"]):
        raise ValueError("images and videos in responses are not supported")
    return " ".join(part["text"] for part in message["content"])


def count_shared(sequences: list[list]) -> int:
    """Length of the longest common prefix: [[1, 2, 3], [1, 2, 4]] -> 2."""
    for i, items in enumerate(zip(*sequences)):
        if any(item != items[0] for item in items):
            return i
    return min(map(len, sequences))


def encode_ranking(
    model, processor, messages: list[dict], responses: list[list[dict]], index: int
) -> tuple[Prompt, list[Tensor]]:
    """The tokens that all chats of a ranking begin with, as a Prompt, and the rest of each chat (R,).

    The tokenizer, for which an image is one token, finds where the chats differ:

        user <image> Color ? assistant red              num_shared = 5
        user <image> Color ? assistant dark blue        response_ids = [red], [dark blue]

    The processor expands an image to several tokens, but tokenizes the text after it in the same
    way. So the prompt is the processor's output for the first chat without its last token, red.
    """
    chats = [messages + response for response in responses]
    inputs = packing.encode_chat(processor, chats[0])
    input_ids = inputs["input_ids"][0].tolist()
    ids = [tokenize_chat(processor, chat) for chat in chats]
    num_shared = count_shared([chat_ids[:-1] for chat_ids in ids])  # each response has a token
    tail = ids[0][num_shared:]
    if input_ids[-len(tail) :] != tail:
        # PaliGemma's processor appends tokens to any text, so it must tokenize all chats.
        ids = [packing.encode_chat(processor, chat)["input_ids"][0].tolist() for chat in chats]
        num_shared = count_shared([chat_ids[:-1] for chat_ids in ids])
    length = len(input_ids) - len(ids[0]) + num_shared
    prompt = packing.make_prompt(model, inputs, index=index, length=length)
    return prompt, [torch.tensor(chat_ids[num_shared:]) for chat_ids in ids]


def tokenize_chat(processor, messages: list[dict], **template) -> list[int]:
    """Token ids of a chat, with one token per image."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is processor:
        return packing.encode_chat(processor, messages, **template)["input_ids"][0].tolist()
    template |= {"chat_template": processor.chat_template, "return_dict": False}
    return tokenizer.apply_chat_template(messages, **template)


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


def gather_rankings(data: RankingDataset, indices: list[int]) -> list[Ranking]:
    """The rankings of all ranks, each of which encodes its share of the indices."""
    rankings = []
    for index in np.array_split(np.array(indices), WORLD_SIZE)[RANK].tolist():
        ranking = encode_or_skip(data, index % len(data.rows))
        if ranking is not None:
            prompt = ranking.prompt  # its media stay on this rank
            info = PromptInfo(prompt.index, prompt.length, prompt.media_keys)
            rankings.append(replace(ranking, prompt=info))
    rankings = all_gather_list(rankings)
    if len(rankings) * 2 < len(indices):
        fail(f"{data.source}: more than half of a batch's rows are skipped, see the warnings")
    return rankings


def all_gather_list(items: list) -> list:
    """The concatenated lists of all ranks, on every rank."""
    if WORLD_SIZE == 1:
        return items
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


# ---- forward ----


def iter_packs(args: Args, run: Run, data: RankingDataset, rankings: list[Ranking]) -> Iterator[packing.Pack]:
    """This rank's packs of some rankings."""
    groups = []  # (prompt index, response indices)
    response_ids = []  # length B
    for i, ranking in enumerate(rankings):
        start = len(response_ids)
        response_ids += ranking.response_ids
        groups.append((i, list(range(start, len(response_ids)))))
    return packing.iter_rank_packs(
        model=run.reward_model.module.model, groups=groups, responses=response_ids,
        prompts=[ranking.prompt for ranking in rankings],
        encode=lambda index: data.encode(index).prompt, max_tokens=args.micro_batch_tokens,
        rank=RANK, world_size=WORLD_SIZE, media_everywhere=args.zero_stage > 0,
    )  # fmt: skip


@torch.no_grad()
def compute_rewards(args: Args, run: Run, data: RankingDataset, rankings: list[Ranking]) -> Tensor:
    """Rewards (B,) of all responses, on all ranks."""
    num_responses = sum(len(ranking.response_ids) for ranking in rankings)
    rewards = torch.zeros(num_responses, device=run.device)
    for pack in iter_packs(args, run, data, rankings):
        rewards[pack.response_index] = run.reward_model(pack)
    return all_reduce_sum(rewards, run.device)


# ---- evaluation ----


def ranking_metrics(args: Args, rankings: list[Ranking], rewards: Tensor) -> dict[str, float]:
    """Weighted means over the pairs, in float64. rewards (B,), on the CPU."""
    pairs = make_pairs(rankings, rewards.device)
    rewards = rewards.double()
    _, pair_metrics = compute_bt_loss(
        chosen_rewards=rewards[pairs.chosen],
        rejected_rewards=rewards[pairs.rejected],
        margins=pairs.margins,
        label_smoothing=args.label_smoothing,
        center_coef=args.center_coef,
    )
    return {name: float((pairs.weights * values).sum()) for name, values in pair_metrics.items()}


def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """Metrics of a fixed random subset of each evaluation set, and a record of each pair."""
    metrics = {}
    eval_records = []
    for name, data in run.eval_sets.items():
        rows = np.random.default_rng(0).permutation(len(data.rows))[: args.eval_rows or None]
        num_batches = math.ceil(len(rows) / args.train_batch_size)
        rankings = []
        rewards = []
        for batch in np.array_split(np.sort(rows), num_batches):
            batch_rankings = gather_rankings(data, batch.tolist())
            rewards.append(compute_rewards(args, run, data, batch_rankings))
            rankings += batch_rankings
        rewards = torch.cat(rewards)  # (B,)
        for key, value in ranking_metrics(args, rankings, rewards).items():
            metrics[key.replace("rm/", f"eval/{name}/")] = value
        eval_records += make_records(f"eval_{name}", rankings, rewards)
    return metrics, eval_records


def make_records(phase: str, rankings: list[Ranking], rewards: Tensor) -> list[dict]:
    """A record of each pair for samples.jsonl, with the columns of its dataset row."""
    records = []
    rewards_by_ranking = rewards.split([len(ranking.response_ids) for ranking in rankings])
    for ranking, ranking_rewards in zip(rankings, rewards_by_ranking):
        responses = zip(ranking.texts, ranking_rewards.tolist())
        for (chosen, chosen_reward), (rejected, rejected_reward) in combinations(responses, 2):
            record = {
                **ranking.columns,
                "phase": phase,
                "row": ranking.prompt.index,
                "chosen": chosen,
                "rejected": rejected,
                "chosen_reward": chosen_reward,
                "rejected_reward": rejected_reward,
                "reward_diff": chosen_reward - rejected_reward,
            }
            records.append(record)
    return records


# ---- model ----


class RewardModel(nn.Module):
    """A backbone with a linear head: pack -> rewards (S,) of its responses, in fp32."""

    def __init__(self, model):
        super().__init__()
        H = model.config.get_text_config().hidden_size
        self.model = model
        self.score = nn.Linear(H, 1, bias=False, dtype=model.dtype)
        # arxiv.org/abs/2009.01325; in fp32, because random bf16 numbers depend on torch's version
        self.score.weight.data.copy_(torch.randn(1, H) * (H + 1) ** -0.5)

    def forward(self, pack: packing.Pack) -> Tensor:
        hidden = packing.forward_hidden(self.model, pack, last=True)  # (S, H)
        return hidden.float() @ self.score.weight[0].float()  # in bf16 many rewards would be equal


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


def save_checkpoint(args: Args, run: Run) -> Path:
    """Save checkpoint-N: the backbone as a Hugging Face directory, with the head in
    score.safetensors, and state/ for --resume. Call on all ranks."""
    module = run.reward_model.module
    checkpoint = run.run_dir / f"checkpoint-{run.state['step']}"
    temporary = checkpoint.with_suffix(".tmp")  # renamed once it is complete
    if RANK == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    engine_dir = str(temporary / "state" / "reward")
    run.reward_model.save_checkpoint(engine_dir, tag="engine", client_state={"run_state": run.state})
    # All ranks gather the weights, but only rank 0 keeps them.
    weights = {name: weight.cpu() for name, weight in iter_full_weights(module.model) if RANK == 0}
    head = {f"score.{name}": weight.cpu() for name, weight in iter_full_weights(module.score)}
    if RANK == 0:
        config = module.model.config
        config = type(config).from_dict(config.to_dict())  # drops packed attention
        with torch.device("meta"):  # the same architecture, without LoRA
            export = type(module.model)(config)
        export.save_pretrained(temporary, state_dict=weights)
        safetensors.torch.save_file(head, temporary / "score.safetensors")
        run.processor.save_pretrained(temporary)
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
