"""Bradley-Terry reward model, for vision-language and text models.

The reward of a response is a linear projection of the hidden state at its last token. Training pushes
the reward of the chosen response above that of the rejected one:

    d = reward(chosen) - reward(rejected) - margin        loss = -log sigmoid(d)

Paper: InstructGPT (Ouyang et al. 2022), https://arxiv.org/abs/2203.02155, eq. (1).
docs/trl.md lists the differences from TRL's RewardTrainer.

Notation:

    ranking     dataset row: a prompt with two or more responses, best first
    pair        two responses of a ranking, of which the better one is "chosen"
    pack        a micro-batch, in which responses to a prompt share its prefix (common/packing.py)
    B, Q        responses in a step; pairs in a step
    S           responses in a pack

    python reward_bt.py           # default: a tiny VLM on easy-VQA, minutes on a CPU core
    python reward_bt.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset pairs.jsonl --max-length 4096
    torchrun --standalone --nproc_per_node=8 reward_bt.py --zero-stage 3 ...
"""

import datetime
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor, nn

from common import chats, packing, packing_check, require, stop
from common.chats import ROW_ERRORS, RowError, build_messages, load_rows
from common.packing import Prompt, PromptInfo

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
# Some schedulers set WORLD_SIZE without RANK.
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
BUNDLED_MODEL = str(Path(__file__).parent / "assets/tiny_vl")
PRINTED_METRICS = re.compile("time/total|rm/(loss|accuracy)|eval/.*/accuracy")


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # Random seed for head, LoRA, data order and easy-VQA's rejected answers.
    output_dir: str = "runs"  # Directory that contains one directory per run.
    run_name: str | None = None  # Directory in --output-dir. Default: SCRIPT-MODEL-seedN-TIME.
    resume: str | None = None  # auto: resume --run-name. PATH: start a new run from this checkpoint.
    # --- model and data ---
    model: str = BUNDLED_MODEL  # Path or Hub id; a checkpoint of this script restores its head.
    dataset: str = "easy-vqa"  # easy-vqa, a JSON, CSV or Parquet file, a saved Dataset or Hub id.
    dataset_split: str = "train"  # Split of --dataset; ignored for files.
    columns: tuple[str, ...] = ()  # Columns to rename, as NEW=OLD, such as prompt=problem.
    eval_datasets: tuple[str, ...] = ()  # NAME=DATASET each. Default: easy-vqa's test split, or none.
    eval_dataset_split: str = "test"  # Split of each of --eval-datasets; ignored for files.
    system_prompt: str | None = None  # System prompt for prompts that have no system message.
    max_pixels: int | None = None  # Scale down images that have more pixels (width * height).
    video_fps: float = 2.0  # Frames per second to sample from videos.
    max_length: int = 1024  # Rows with more tokens (prompt and one response) are skipped.
    freeze: str | None = None  # Freeze weights whose names match this regex, such as visual.
    lora_rank: int = 0  # LoRA rank (language model only); 0 trains all weights.
    lora_alpha: float = 32.0  # LoRA's scaling is alpha / rank.
    # --- algorithm ---
    center_coef: float = 0.0  # Weight of (chosen + rejected)^2 (TRL: center_rewards_coefficient).
    label_smoothing: float = 0.0  # Assumed probability that a pair's label is wrong.
    total_steps: int = 400  # Number of optimizer steps; 0 only evaluates.
    train_batch_size: int = 32  # Dataset rows per optimizer step, over all ranks.
    # --- optimizer ---
    learning_rate: float | None = None  # Peak. Default: 5e-6; LoRA: 1e-4; bundled model: 3e-4.
    min_lr_ratio: float = 0.1  # The cosine schedule ends at this fraction of the peak.
    warmup_updates: int = 10  # Optimizer steps of linear warmup.
    weight_decay: float = 0.0  # AdamW weight decay; not applied to biases or norm weights.
    max_grad_norm: float = 1.0  # Maximum gradient norm; 0 disables clipping.
    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32.
    zero_stage: Literal[0, 1, 2, 3] | None = None  # Default: 2 with bfloat16, else 0.
    offload_optimizer: bool = False  # Optimizer states and step on the CPU.
    gradient_checkpointing: bool = False  # Recompute activations: less memory, a third slower.
    micro_batch_tokens: int = 8192  # Tokens per forward pass on a rank, at most.
    # --- logging and checkpoints ---
    eval_steps: int = 200  # Evaluation interval in steps; 0: at the start and the end only.
    eval_rows: int = 1000  # Rows per evaluation set, a fixed random subset; 0 for all.
    save_steps: int = 0  # Checkpoint interval in steps; 0 saves at the end only.
    save_total_limit: int = 2  # Checkpoints to keep; 0 saves only if the run stops early.
    track: Literal["off", "wandb"] = "off"  # Experiment tracker to log to.


# ---- the algorithm: tensors in, tensors and metrics out ----


def compute_bt_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margins: Tensor,
    label_smoothing: float,
    center_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and metrics of pairs, (Q,) each; the caller takes their weighted means.

    d = chosen - rejected - margin
    bt_loss = -log sigmoid(d)
    loss = (1 - label_smoothing) * bt_loss - label_smoothing * log sigmoid(-d)
           + center_coef * (chosen + rejected)^2

    Margin: Llama 2 (Touvron et al. 2023, https://arxiv.org/abs/2307.09288). Label smoothing:
    cDPO (Mitchell 2023). Centering: Eisenstein et al. 2023 (https://arxiv.org/abs/2312.09244).

    chosen [1, 0], rejected [0, 2], margins [0, .5], label_smoothing 0, center_coef .1
    -> d [1, -2.5], bt_loss [.3133, 2.5789], loss [.4133, 2.9789]
    """
    reward_diff = chosen_rewards - rejected_rewards
    d = reward_diff - margins
    bt_loss = -F.logsigmoid(d)
    center_loss = (chosen_rewards + rejected_rewards) ** 2
    smoothed_loss = (1 - label_smoothing) * bt_loss - label_smoothing * F.logsigmoid(-d)
    losses = smoothed_loss + center_coef * center_loss
    metrics = {
        "rm/loss": losses,
        "rm/bt_loss": bt_loss,
        "rm/center_loss": center_loss,
        "rm/chosen_rewards": chosen_rewards,
        "rm/rejected_rewards": rejected_rewards,
        "rm/reward_diff": reward_diff,
        "rm/accuracy": (reward_diff.sign() + 1) / 2,  # ties count as 0.5
    }
    return losses, metrics


# ---- the data of a step ----


@dataclass
class Ranking:
    """A dataset row: a prompt and its responses, best first."""

    # The longest common token prefix of its chats: the prompt, and what all responses begin with.
    prompt: PromptInfo  # a Prompt, until gather_rankings drops its tensors
    responses: list[packing.Continuation]  # the other tokens of each chat
    texts: list[str]  # text of each response, for samples.jsonl
    margin: float  # subtracted from the reward difference of each pair
    columns: dict  # the prompt and columns of the row, for samples.jsonl


@dataclass
class Pairs:
    """Every pair of responses within a ranking, for all rankings of a step."""

    chosen: Tensor  # (Q,): index of the better response among all B
    rejected: Tensor  # (Q,): index of the worse response
    margins: Tensor  # (Q,) float64
    weights: Tensor  # (Q,) float64: they sum to 1


def make_pairs(rankings: list[Ranking]) -> Pairs:
    """All pairs of each ranking. Rankings are weighted equally, as in InstructGPT eq. (1).

    2 and 3 responses, margins 0 and .5
    -> chosen [0, 2, 2, 3], rejected [1, 3, 4, 4], margins [0, .5, .5, .5], weights [1/2, 1/6, 1/6, 1/6]
    """
    indices = []  # (pairs, 2) per ranking: the better response, and the worse one
    margins = []
    weights = []
    start = 0  # index of the ranking's first response among all B
    for ranking in rankings:
        end = start + len(ranking.responses)
        pairs = torch.combinations(torch.arange(start, end))
        indices.append(pairs)
        margins += [ranking.margin] * len(pairs)
        weights += [1 / len(rankings) / len(pairs)] * len(pairs)
        start = end
    chosen, rejected = torch.cat(indices).to(DEVICE).T  # (Q,), (Q,)
    margins, weights = torch.tensor([margins, weights], dtype=torch.float64, device=DEVICE)
    return Pairs(chosen, rejected, margins, weights)


@dataclass
class Run:
    """What setup builds and the training loop uses."""

    run_dir: Path
    processor: Any  # transformers processor, or the tokenizer of a text model
    reward_model: Any  # DeepSpeed engine around the RewardModel
    train_data: "RankingDataset | None"
    eval_sets: dict[str, "RankingDataset"]  # by the names in --eval-datasets
    state: dict  # saved in each checkpoint; put what must survive a resume here


# ---- main ----


def main(args: Args) -> None:
    # --- 1. setup ---
    run_start = time.perf_counter()
    run = setup(args)
    reward_model, state = run.reward_model, run.state
    received_signals = catch_signals()  # SIGTERM or SIGINT: finish the step, save and exit
    consecutive_skips = 0  # updates whose gradients were not finite
    if run.eval_sets and (state["step"] == 0 or args.total_steps == 0):
        log(args, run, *evaluate(args, run))

    for step in range(state["step"] + 1, args.total_steps + 1):
        # --- 2. data: the next rankings, their pairs, and this rank's packs ---
        step_start = time.perf_counter()
        rows_read_before = state["rows_read"]
        rankings = next_rankings(args, run)  # the same on all ranks
        pairs = make_pairs(rankings)
        B = sum(len(ranking.responses) for ranking in rankings)
        packs = make_packs(args, run, run.train_data, rankings)

        # --- 3. update: one optimizer step on all pairs ---
        rewards = torch.zeros(B, device=DEVICE)  # of this rank's packs, for the metrics
        for k, pack in enumerate(packs):  # the same number on each rank; some are empty
            pack_rewards = reward_model(pack)  # (S,)
            batch_rewards = torch.zeros(B, device=DEVICE)  # 0 for responses in other packs
            batch_rewards[pack.response_index] = pack_rewards
            in_pack = torch.isin(pairs.chosen, pack.response_index)  # (Q,)
            # fits_into_pack excludes rankings that would be split over packs.
            assert in_pack.equal(torch.isin(pairs.rejected, pack.response_index)), "a pair is split"
            losses, _ = compute_bt_loss(
                chosen_rewards=batch_rewards[pairs.chosen],
                rejected_rewards=batch_rewards[pairs.rejected],
                margins=pairs.margins,
                label_smoothing=args.label_smoothing,
                center_coef=args.center_coef,
            )
            loss = (in_pack * pairs.weights * losses).sum()  # this pack's part of the step's loss
            reward_model.set_gradient_accumulation_boundary(k == len(packs) - 1)
            reward_model.backward(loss * WORLD_SIZE)  # DeepSpeed averages over ranks; we want a sum
            rewards[pack.response_index] = pack_rewards.detach()
        learning_rate = args.learning_rate * lr_factor(args, step - 1, args.total_steps)
        grad_norm = optimizer_step(reward_model, learning_rate)  # NaN if the update was skipped
        dist.all_reduce(rewards)  # each rank has filled in its own responses
        seconds = time.perf_counter() - step_start

        # --- 4. metrics ---
        state["step"] = step
        is_skipped = math.isnan(grad_norm)
        consecutive_skips = consecutive_skips + 1 if is_skipped else 0
        metrics = {
            "train/step": step,
            "train/learning_rate": learning_rate,
            "train/grad_norm": grad_norm,
            "train/skipped_updates": int(is_skipped),
            "train/rows_skipped": state["rows_read"] - rows_read_before - len(rankings),
            "time/total": seconds,
        }
        log(args, run, metrics | pair_metrics(args, pairs, rewards), sample_records=[])
        if consecutive_skips >= 5:
            save_and_stop(args, run, f"step {step}: no finite gradients in 5 steps")

        # --- 5. evaluate, save ---
        is_last_step = step == args.total_steps
        has_signal = any(all_gather_list(received_signals))  # on any rank
        is_eval_step = is_last_step or (args.eval_steps and step % args.eval_steps == 0)
        if run.eval_sets and is_eval_step and not has_signal:
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
    reward_model = load_reward_model(args)
    model = reward_model.module.model
    state = {"step": 0, "rows_read": 0}  # rows_read: position in the stream of epochs
    if checkpoint is not None:
        state = load_checkpoint(args, checkpoint, reward=reward_model)

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    make_dataset = functools.partial(RankingDataset, args, model=model, processor=processor)
    train_data = None
    if args.total_steps > 0:  # else nothing is trained
        train_data = make_dataset(args.dataset, args.dataset_split, seed=args.seed)
    eval_sets = {}
    for name, _, source in (x.partition("=") for x in args.eval_datasets):
        eval_sets[name] = make_dataset(source, args.eval_dataset_split, seed=0)
    data = train_data or next(iter(eval_sets.values()))
    print0(f"{run_dir}: {len(data.rows)} rows, {WORLD_SIZE} rank(s), {DEVICE}, {model.dtype}")

    # Pack batches if packing reproduces the unmodified model; else pad them.
    row_ids = packing_check.choose_probe_rows(data.rows)
    prompts = [ranking.prompt for ranking in data.encode_all(row_ids)]
    require(prompts, f"{data.source}: none of {len(row_ids)} rows can be used; see the warnings")
    message = packing_check.choose_layout(
        network=reward_model,
        prompts=prompts,
        max_length=args.max_length,
        max_tokens=args.micro_batch_tokens,
    )
    print0(message)
    limit = packing.rope_limit(model)
    can_run_pairs = packing.is_packed(model) or args.max_length <= limit
    require(can_run_pairs, f"--max-length must be at most {limit} with this model")
    start_logs(args, run_dir, checkpoint, last_step=state["step"])
    return Run(
        run_dir=run_dir,
        processor=processor,
        reward_model=reward_model,
        train_data=train_data,
        eval_sets=eval_sets,
        state=state,
    )


def fill_defaults(args: Args) -> None:
    """Fill in and print the flags that depend on the model, the machine or the dataset."""
    if args.dtype == "auto":
        args.dtype = "bfloat16" if DEVICE.type == "cuda" else "float32"
    if args.learning_rate is None:
        is_bundled = Path(args.model).resolve() == Path(BUNDLED_MODEL).resolve()
        pretrained_rate = 1e-4 if args.lora_rank else 5e-6
        args.learning_rate = 3e-4 if is_bundled else pretrained_rate
    if args.zero_stage is None:
        args.zero_stage = 2 if args.dtype == "bfloat16" else 0
    if args.dataset == "easy-vqa" and not args.eval_datasets:
        args.eval_datasets = ("easy-vqa=easy-vqa",)
    print0(f"--learning-rate {args.learning_rate} --zero-stage {args.zero_stage} --dtype {args.dtype}")


def check_args(args: Args) -> None:
    """Exit if flags contradict each other. tyro checks types and choices."""
    positive = ("train_batch_size", "max_length", "video_fps", "max_pixels")
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        if isinstance(value, int | float):
            require(value >= 0, f"{flag} must not be negative")
            require(value > 0 or name not in positive, f"{flag} must be positive")
    require(args.label_smoothing < 0.5, f"--label-smoothing ({args.label_smoothing}) must be below 0.5")
    is_enough = args.micro_batch_tokens >= 2 * args.max_length
    require(is_enough, "--micro-batch-tokens must be at least twice --max-length, to hold a pair")
    names = {x.partition("=")[0] for x in args.eval_datasets if "=" in x}
    is_named = len(names) == len(args.eval_datasets)
    require(is_named, "--eval-datasets must be NAME=DATASET, with different names")
    if args.dtype == "bfloat16" and args.zero_stage < 2:
        stop("--dtype bfloat16 requires --zero-stage 2 or 3, which accumulate gradients in fp32")
    require(args.zero_stage or not args.offload_optimizer, "--offload-optimizer requires --zero-stage")
    require(args.lora_rank or args.lora_alpha == Args.lora_alpha, "--lora-alpha requires --lora-rank")
    require(args.run_name or args.resume != "auto", "--resume auto requires --run-name")
    require(args.total_steps or args.eval_datasets, "--total-steps 0 requires --eval-datasets")


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


class RankingDataset:
    """Rows as rankings; docs/reward_bt.md#data has their columns."""

    def __init__(self, args: Args, source: str, split: str, seed: int, model, processor):
        self.args = args
        self.source = source
        self.data_dir = Path(source) if Path(source).is_dir() else Path(source).parent
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        has_end = processor.chat_template or self.tokenizer.eos_token
        require(has_end, f"{args.model} has no chat template and no EOS token")
        self.rows = load_rows(args, source, split)
        if source == "easy-vqa":
            self.rows = add_easy_vqa_responses(self.rows, seed)
        columns = self.rows.column_names
        formats = [{"chosen", "rejected"} <= {*columns}, "responses" in columns]
        rule = "must have either the columns chosen and rejected, or the column responses"
        require(sum(formats) == 1, f"{source} {rule}; it has {', '.join(columns)}")
        self.num_read = self.num_skipped = 0  # since the last check of next_rankings
        # A rank encodes its share of a step, and then the rows of its packs.
        cache_size = 2 * math.ceil(args.train_batch_size / WORLD_SIZE)
        self.encode = functools.lru_cache(cache_size)(self.encode)

    def encode_all(self, row_ids: list[int]) -> list[Ranking]:
        """The rankings of some rows, without those that can't be used."""
        rankings = []
        for row_id in row_ids:
            try:
                rankings.append(self.encode(row_id))
            except ROW_ERRORS as error:
                print(f"warning: {self.source} row {row_id} is skipped: {error!s:.300}", file=sys.stderr)
        return rankings

    def encode(self, row_id: int) -> Ranking:
        """Load, check and tokenize a row. Raises RowError or OSError if it can't be used."""
        row = self.rows[row_id]  # `datasets` opens images here, build_messages other media
        prompt_chat, response_chats = split_row(row)
        messages = build_messages(self.args, row | {"prompt": prompt_chat}, self.data_dir, self.tokenizer)
        response_chats = [build_response(chat, self.tokenizer) for chat in response_chats]
        prompt, responses = encode_ranking(self.model, self.processor, messages, response_chats, row_id)
        length = prompt.length + max(map(len, responses))
        if length > self.args.max_length:
            raise RowError(f"{length} tokens exceed --max-length")
        margin = row.get("margin") or 0.0
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            raise RowError(f"its margin is {margin}")
        return Ranking(
            prompt=prompt,
            responses=responses,
            texts=[" ".join(map(chats.content_text, chat)) for chat in response_chats],
            margin=margin,
            columns={"prompt": " ".join(map(chats.content_text, messages))} | chats.row_columns(row),
        )

    def fits_into_pack(self, ranking: Ranking) -> bool:
        """Whether a pack can hold all responses of a ranking; warns if it can't."""
        P = ranking.prompt.length
        lengths = [len(response) for response in ranking.responses]
        if packing.is_packed(self.model):
            size = P + sum(lengths)
        else:
            size = len(lengths) * (P + max(lengths))
        fits = size <= self.args.micro_batch_tokens
        if not fits:
            reason = f"its {len(lengths)} responses need {size} --micro-batch-tokens"
            print(f"warning: {self.source} row {ranking.prompt.row_id} is skipped: {reason}", file=sys.stderr)
        return fits


def split_row(row: dict) -> tuple[list[dict] | str, list[list[dict]]]:
    """The prompt, and the messages of each response, best first.

    Responses are strings, messages that follow the prompt, or chats that begin with the
    prompt. With q for a user's message, and a and b for an assistant's:

    prompt [q], chosen "a", rejected "b"       -> prompt [q], responses [[a], [b]]
    prompt [q], chosen [a], rejected [b]       -> prompt [q], responses [[a], [b]]
    chosen [q, a], rejected [q, b]             -> prompt [q], responses [[a], [b]]
    """
    sources = row["responses"] if "responses" in row else [row["chosen"], row["rejected"]]
    if not isinstance(sources, list) or len(sources) < 2 or None in sources:
        raise RowError("a ranking needs a list of at least two responses")
    responses = []
    for source in sources:
        if isinstance(source, str | int | float):
            source = [{"role": "assistant", "content": str(source)}]
        is_chat = isinstance(source, list)
        if not is_chat or not all(isinstance(x, dict) and "role" in x for x in source):
            raise RowError("a response must be a string or a list of messages with a role")
        responses.append(source)
    prompt = row.get("prompt") or row.get("messages")
    if any(response and response[0]["role"] != "assistant" for response in responses):  # whole chats
        num_shared = common_prefix_length(responses)
        shared = responses[0][:num_shared]
        if isinstance(prompt, list):  # compare contents, since Parquet adds empty keys to some messages
            contents = [x.get("content") for x in shared[: len(prompt)]]
            if contents != [x.get("content") for x in prompt if isinstance(x, dict)]:
                raise RowError("its responses are whole chats, which do not begin with its prompt")
        prompt = shared
        responses = [response[num_shared:] for response in responses]
    if not all(responses):
        raise RowError("a response is empty, or the beginning of another one")
    return prompt, responses


def common_prefix_length(sequences: list[list]) -> int:
    """Length of the longest common prefix: [[1, 2, 3], [1, 2, 4]] -> 2."""
    shared = takewhile(lambda items: all(x == items[0] for x in items), zip(*sequences))
    return len(list(shared))


def build_response(chat: list[dict], tokenizer) -> list[dict]:
    """The messages of a response, each with one text part. A literal <image> in it stays text."""
    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    messages = []
    for message in chat:
        content = message.get("content") or []
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [x.get("text") for x in parts if isinstance(x, dict) and x.get("type") == "text"]
        is_text = len(texts) == len(parts) and any(texts) and all(isinstance(x, str) for x in texts)
        if message.get("tool_calls") or not is_text:
            raise RowError("a response must have text, and no images, videos or tool_calls")
        text = "".join(texts)
        text = chats.escape_special_tokens(text, special_tokens)
        messages.append({"role": message["role"], "content": [{"type": "text", "text": text}]})
    return messages


def encode_ranking(
    model, processor, messages: list[dict], responses: list[list[dict]], row_id: int
) -> tuple[Prompt, list[packing.Continuation]]:
    """Split the chats of a ranking at the end of their longest common prefix of tokens.

    The prefix becomes the Prompt, and the rest of each chat a Continuation of at least the last
    token, which the head reads.

        user <image> Color ? assistant red <eos>         num_shared = 5, response red <eos>
        user <image> Color ? assistant dark blue <eos>                   dark blue <eos>

    Images are slow to process, so the processor runs once, on the first chat. The tokenizer,
    for which an image is one token, finds where the chats diverge."""
    inputs = chats.encode_chat(processor, messages + responses[0])
    processed_ids = inputs["input_ids"][0].tolist()
    chat_ids = [chats.tokenize_chat(processor, messages + response) for response in responses]
    num_shared = common_prefix_length([ids[:-1] for ids in chat_ids])
    tail = chat_ids[0][num_shared:]  # text, which the processor should not change
    if processed_ids[-len(tail) :] != tail:
        # PaliGemma's processor appends tokens to any text, so it must process all chats.
        encoded = [chats.encode_chat(processor, messages + response) for response in responses]
        chat_ids = [x["input_ids"][0].tolist() for x in encoded]
        num_shared = common_prefix_length([ids[:-1] for ids in chat_ids])
    length = num_shared + len(processed_ids) - len(chat_ids[0])  # with image tokens
    prompt = packing.make_prompt(model, inputs, row_id=row_id, length=length)
    # Without a chat template nothing ends the response, and the head would read its last word.
    end = [] if processor.chat_template else [processor.eos_token_id]
    suffixes = [torch.tensor(ids[num_shared:] + end) for ids in chat_ids]
    return prompt, [packing.continue_prompt(prompt, ids) for ids in suffixes]


def add_easy_vqa_responses(rows, seed: int):
    """Add the columns chosen (the answer) and rejected (a wrong one of the same type)."""
    answer_types = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"
    rng = np.random.default_rng(seed)
    wrong_answers = []
    for answer in rows["answer"]:
        same_type = next(x.split() for x in answer_types if answer in x.split())
        others = [other for other in same_type if other != answer]
        wrong_answers.append(others[rng.integers(len(others))])
    for name, answers in (("chosen", rows["answer"]), ("rejected", wrong_answers)):
        rows = rows.add_column(name, [f"<answer>{answer}</answer>" for answer in answers])
    return rows


def next_rankings(args: Args, run: Run) -> list[Ranking]:
    """The next --train-batch-size usable rows of a stream of shuffled epochs, on all ranks."""
    data, state = run.train_data, run.state
    rankings = []
    position = state["rows_read"]
    while (missing := args.train_batch_size - len(rankings)) > 0:
        positions = range(position, position + missing)
        found = gather_rankings(data, choose_row_ids(positions, len(data.rows), args.seed))
        rankings += found
        position += missing
        data.num_read += missing
        data.num_skipped += missing - len(found)
        if data.num_read >= 100:
            counts = f"{data.num_skipped} of the last {data.num_read} rows were skipped"
            if data.num_skipped > data.num_read / 2:
                save_and_stop(args, run, f"{data.source}: {counts}; see the warnings")
            data.num_read = data.num_skipped = 0
    state["rows_read"] = position
    return rankings


def choose_row_ids(positions: range, num_rows: int, seed: int) -> list[int]:
    """The rows at some positions of an endless stream of shuffled epochs."""
    stream = []
    for epoch in range(positions[0] // num_rows, positions[-1] // num_rows + 1):
        stream += np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()
    return stream[positions[0] % num_rows :][: len(positions)]


def gather_rankings(data: RankingDataset, row_ids: list[int]) -> list[Ranking]:
    """The rankings of the given rows, on all ranks, without the tensors of their prompts."""
    share = np.array_split(np.array(row_ids), WORLD_SIZE)[RANK].tolist()
    rankings = [ranking for ranking in data.encode_all(share) if data.fits_into_pack(ranking)]
    infos = [PromptInfo(x.prompt.row_id, x.prompt.length, x.prompt.media_keys) for x in rankings]
    return all_gather_list([replace(x, prompt=info) for x, info in zip(rankings, infos)])


def all_gather_list(items: list) -> list:
    """The concatenated lists of all ranks, on every rank."""
    lists = [items] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


# ---- forward ----


def make_packs(
    args: Args,
    run: Run,
    data: RankingDataset,
    rankings: list[Ranking],
) -> list[packing.Pack]:
    """This rank's packs of the rankings."""
    responses = [response for ranking in rankings for response in ranking.responses]  # B
    sizes = [len(ranking.responses) for ranking in rankings]
    indices = torch.arange(len(responses)).split(sizes)  # of each ranking's responses among all B
    packs = packing.iter_rank_packs(
        model=run.reward_model.module.model,
        groups=[(i, own_indices.tolist()) for i, own_indices in enumerate(indices)],
        prompts=[ranking.prompt for ranking in rankings],
        encode=lambda i: data.encode(rankings[i].prompt.row_id).prompt,
        responses=responses,
        max_tokens=args.micro_batch_tokens,
        rank=RANK,
        world_size=WORLD_SIZE,
    )
    return list(packs)


# ---- evaluation ----


def pair_metrics(args: Args, pairs: Pairs, rewards: Tensor) -> dict[str, float]:
    """Means of all metrics over each ranking's pairs, then over rankings. rewards (B,)."""
    rewards = rewards.double()
    _, metrics = compute_bt_loss(
        chosen_rewards=rewards[pairs.chosen],
        rejected_rewards=rewards[pairs.rejected],
        margins=pairs.margins,
        label_smoothing=args.label_smoothing,
        center_coef=args.center_coef,
    )
    # 1, up to rounding. Divide by it, so that the mean of ones is exactly 1.
    total = pairs.weights.sum()
    return {name: float((pairs.weights * x).sum() / total) for name, x in metrics.items()}


@torch.no_grad()
def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """Metrics of a fixed random subset of each evaluation set, and a record of each pair."""
    metrics = {"train/step": run.state["step"]}
    eval_records = []
    for name, data in run.eval_sets.items():
        row_ids = np.random.default_rng(0).permutation(len(data.rows))[: args.eval_rows or None]
        rankings = []
        batch_rewards = []
        num_batches = math.ceil(len(row_ids) / args.train_batch_size)
        for batch in np.array_split(np.sort(row_ids), num_batches):
            found = gather_rankings(data, batch.tolist())
            rewards = torch.zeros(sum(len(ranking.responses) for ranking in found), device=DEVICE)
            for pack in make_packs(args, run, data, found):
                rewards[pack.response_index] = run.reward_model(pack)
            dist.all_reduce(rewards)  # each rank has filled in its own responses
            batch_rewards.append(rewards)
            rankings += found
        num_skipped = len(row_ids) - len(rankings)
        if num_skipped > len(row_ids) / 2:
            save_and_stop(args, run, f"{data.source}: {num_skipped} of {len(row_ids)} rows were skipped")
        rewards = torch.cat(batch_rewards)  # (B,)
        for key, value in pair_metrics(args, make_pairs(rankings), rewards).items():
            metrics[key.replace("rm/", f"eval/{name}/")] = value
        metrics[f"eval/{name}/rows_skipped"] = num_skipped
        eval_records += make_records(f"eval_{name}", rankings, rewards)
    return metrics, eval_records


def make_records(phase: str, rankings: list[Ranking], rewards: Tensor) -> list[dict]:
    """A record of each pair with finite rewards (JSON has no NaN) for samples.jsonl."""
    records = []
    rewards_by_ranking = rewards.split([len(ranking.responses) for ranking in rankings])
    for ranking, ranking_rewards in zip(rankings, rewards_by_ranking):
        responses = zip(ranking.texts, ranking_rewards.tolist())
        responses = [(text, reward) for text, reward in responses if math.isfinite(reward)]
        for (chosen, chosen_reward), (rejected, rejected_reward) in combinations(responses, 2):
            record = ranking.columns | {
                "phase": phase,
                "row": ranking.prompt.row_id,
                "chosen": chosen,
                "rejected": rejected,
                "chosen_reward": chosen_reward,
                "rejected_reward": rejected_reward,
                "reward_diff": chosen_reward - rejected_reward,
                "margin": ranking.margin,
            }
            records.append(record)
    return records


# ---- model ----


class RewardHead(nn.Linear):
    """Hidden states (S, H) -> rewards (S,), in fp32: in bf16, many would be equal."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())[:, 0]


class RewardModel(nn.Module):
    """A backbone with a linear head: pack -> rewards (S,) of its responses."""

    def __init__(self, model):
        super().__init__()
        H = model.config.get_text_config().hidden_size
        self.model = model
        self.score = RewardHead(H, 1, bias=False, dtype=model.dtype)
        # As in Stiennon et al. 2020. Drawn in fp32: random bf16 numbers depend on torch's version.
        self.score.weight.data.copy_(torch.randn(1, H) * (H + 1) ** -0.5)

    def forward(self, pack: packing.Pack) -> Tensor:
        return self.score(packing.forward_hidden(self.model, pack, last=True))


def load_reward_model(args: Args):
    """A DeepSpeed engine around the reward model; its head is that of --model or random."""
    model = load_backbone(args)
    torch.manual_seed(args.seed)  # for the initial head and LoRA weights
    module = RewardModel(model)
    if (head := load_head(args.model, model.config)) is not None:
        module.score.load_state_dict({"weight": head})
    print0(f"reward head: {'random' if head is None else f'loaded from {args.model}'}")
    prepare_for_training(args, module)
    engine = init_reward_engine(args, module)
    engine.eval()  # no dropout; gradients still flow
    return engine


def load_backbone(args: Args):
    """Load a vision-language or text model without its LM head."""
    try:
        config = transformers.AutoConfig.from_pretrained(args.model)
        text_config = config.get_text_config()
        if config.is_encoder_decoder or text_config.is_encoder_decoder:
            stop(f"can't load the model {args.model}: encoder-decoder models are not supported")
        # SDPA silently ignores softcapping of attention scores (Gemma 2).
        has_softcap = getattr(text_config, "attn_logit_softcapping", None) is not None
        model, info = transformers.AutoModel.from_pretrained(
            args.model,
            dtype=getattr(torch, args.dtype),
            attn_implementation="eager" if has_softcap else None,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        stop(f"can't load the model {args.model}: {error}")
    missing = sorted(info["missing_keys"])  # would be initialized randomly
    require(not missing, f"{args.model}: {len(missing)} weights are missing: {missing[:3]}")
    return model


def load_head(source: str, config) -> Tensor | None:
    """The head (1, H) that save_checkpoint wrote, from a folder or the Hub, or None."""
    try:
        path = transformers.utils.cached_file(source, "score.safetensors")
    except OSError:  # no such file, or it can't be downloaded
        # A random head must not silently replace a trained one.
        has_head = hasattr(config, "reward_head") or "Classification" in str(config.architectures)
        require(not has_head, f"{source} has a trained head, but no score.safetensors with it")
        return None
    return safetensors.torch.load_file(path)["score.weight"]


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


def init_reward_engine(args: Args, module: nn.Module):
    """Wrap the reward model in a DeepSpeed engine, with AdamW."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, but unused
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # bf16 sums lose small gradients
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": False,
            "reduce_scatter": dist.get_backend() != "gloo",  # gloo does not support it
            "stage3_param_persistence_threshold": 10_000,  # shards the bundled model, too
            "offload_optimizer": {"device": "cpu" if args.offload_optimizer else "none"},
        },
        "zero_force_ds_cpu_optimizer": False,  # keep torch's AdamW: DeepSpeed's must be compiled
    }
    trained = [x for x in module.parameters() if x.requires_grad]
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
    """Save checkpoint-N: the backbone as a Hugging Face model (LoRA is merged; adapter/ has
    the adapter), the head in score.safetensors, and state/ for --resume. Call on all ranks."""
    module = run.reward_model.module
    checkpoint = run.run_dir / f"checkpoint-{run.state['step']}{suffix}"
    temporary = checkpoint.with_suffix(".tmp")  # renamed once it is complete
    if RANK == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    run.reward_model.save_checkpoint(temporary / "state", tag="reward", exclude_frozen_parameters=True)
    module.model.config.reward_head = "score.safetensors"  # load_head then requires the file
    export_model(args, module.model, run.processor, temporary)
    head = {f"score.{name}": weight.cpu() for name, weight in iter_full_weights(module.score)}
    if RANK == 0:
        safetensors.torch.save_file(head, temporary / "score.safetensors")
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
