"""Bradley-Terry reward model, for vision-language and text models.

A head on a language model's last hidden state learns which of two responses is better:

    d = score(chosen) - score(rejected) - margin      loss = -log sigmoid(d)

Paper: https://arxiv.org/abs/2203.02155. docs/reward_bt.md lists what differs from the reward
trainers of TRL (huggingface/trl@f2cd577) and EasyDeL, docs/forking.md has a diff to another loss.

Read to the end of main: the flags, the algorithm, the data that a step works on, and the method.
Below stands what main calls, in the order of use, to be looked up.

Shapes: K responses in a ranking, B in all, Q pairs; a pack (common/packing.py) is one forward, with
S of the responses.

    python reward_bt.py              # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python reward_bt.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset pairs.jsonl --learning-rate 5e-6
    torchrun --standalone --nproc_per_node=8 reward_bt.py --zero-stage 3 ...
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

from common import packing
from common.packing import Prompt, PromptInfo

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # of head, data order and easy-vqa's wrong answers
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # folder, hub id, own checkpoint
    dataset: str = "easy-vqa"  # easy-vqa, .jsonl/.json/.csv/.parquet, saved folder, hub id; see load_data
    dataset_split: str = "train"  # of easy-vqa, a hub id or a saved folder
    columns: tuple[str, ...] = ()  # our names = the data's: prompt=problem answer=solution
    eval_datasets: tuple[str, ...] = ()  # held-out sets, name=source; easy-vqa has its own
    eval_dataset_split: str = "test"  # as --dataset-split
    system_prompt: str | None = None  # for prompts that have no system message
    video_fps: float = 2.0  # frames per second that are taken from videos
    max_length: int = 1024  # tokens of prompt and response; longer rows are left out
    lora_rank: int = 0  # train adapters of this rank on the language model; 0 = all weights
    lora_alpha: float = 32.0  # the adapters' output is scaled by alpha / rank
    # --- algorithm ---
    center_coef: float = 0.0  # of (chosen + rejected)^2 in the loss
    label_smoothing: float = 0.02  # probability of a wrong label, < 0.5
    total_steps: int = 400  # optimizer steps; an epoch: rows / train_batch_size
    train_batch_size: int = 32  # prompts per optimizer step, all ranks
    # --- optimizer ---
    learning_rate: float = 3e-4  # peak; pretrained: 5e-6, LoRA: 1e-4
    min_lr_ratio: float = 0.1  # after the warm-up it follows a cosine down to this fraction; 1 = constant
    warmup_steps: int = 10  # optimizer steps of linear warm-up
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
    eval_steps: int = 200  # evaluate every so many steps, and at both ends; 0 = only there
    eval_samples: int = 1000  # of each held-out set
    save_steps: int = 0  # checkpoint every so many steps, and at the end; 0 = only there
    save_total_limit: int = 2  # checkpoints kept, newest first
    track: Literal["off", "wandb", "tensorboard"] = "off"  # log there too


# ---- the algorithm: tensors in, tensors and metrics out ----


def make_pairs(rankings: list["Ranking"], device: torch.device) -> "Pairs":
    """All pairs; those of a ranking share its weight, https://arxiv.org/abs/2203.02155 eq. (1)

    2 and 3 responses, margins 0 and .5, weights 3 and 1
    -> chosen [0, 2, 2, 3], rejected [1, 3, 4, 4], margins [0, .5, .5, .5], weights [3/4, 1/12, 1/12, 1/12]
    """
    total_weight = sum(ranking.weight for ranking in rankings)
    rows = []
    start = 0  # the ranking's first response among all B
    for ranking in rankings:
        K = len(ranking.responses)
        weight = ranking.weight / total_weight * 2 / (K * (K - 1))
        for i, j in combinations(range(start, start + K), 2):
            rows.append((i, j, ranking.margin, weight))
        start += K
    chosen, rejected, margins, weights = (torch.tensor(x, device=device) for x in zip(*rows))
    return Pairs(chosen=chosen, rejected=rejected, margins=margins, weights=weights)


def compute_bt_loss(
    scores: Tensor, pairs: "Pairs", label_smoothing: float, center_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each pair (Q,) and metrics (Q,), to be averaged by the pairs' weights. scores (B,).

    d = chosen - rejected - margin, https://arxiv.org/abs/2307.09288 eq. (2)
    bt = -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)
    L = bt + center_coef (chosen + rejected)^2, https://arxiv.org/abs/2312.09244

    scores [1, 0, 0, 2], margins [0, .5], no smoothing, center_coef .1
    -> d [1, -2.5], bt [.3133, 2.5789], L [.4133, 2.9789]
    """
    chosen = scores[pairs.chosen]  # (Q,)
    rejected = scores[pairs.rejected]  # (Q,)
    gap = chosen - rejected
    d = gap - pairs.margins
    bt = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
    center = (chosen + rejected) ** 2
    losses = bt + center_coef * center
    metrics = {
        "rm/loss": losses,
        "rm/bt_loss": bt,
        "rm/center_loss": center,
        "rm/chosen_rewards": chosen,
        "rm/rejected_rewards": rejected,
        "rm/margin": gap,
        "rm/accuracy": (gap.sign() + 1) / 2,  # ties are one half
    }
    return losses, metrics


def calibration_error(gap: Tensor, weights: Tensor) -> Tensor:
    """Expected calibration error, https://arxiv.org/abs/1706.04599: over ten bins of the confidence
    sigmoid(|gap|), |accuracy - confidence| by weight. gap = chosen - rejected (Q,), weights (Q,)

    gap [2, -2, 0], weights 1/3 -> confidence [.881, .881, .5], right [1, 0, .5],
    2 / 3 * |.5 - .881| + 1 / 3 * 0 = .2539
    """
    confidence = gap.abs().sigmoid()
    right = (gap.sign() + 1) / 2
    bins = (confidence * 20 - 10).long().clamp(0, 9)
    errors = torch.zeros(10).to(gap).index_add(0, bins, weights * (right - confidence))
    return errors.abs().sum()


# ---- the data of a step ----


@dataclass
class Ranking:
    """A row: responses to a prompt, best first."""

    prompt: PromptInfo  # a whole Prompt on the rank that has encoded it
    responses: list[Tensor]  # K of them, (R,)
    num_tokens: int  # of the prompt and all responses
    texts: list[str]  # K of them, to read
    margin: float  # that scores should be apart
    weight: float  # of the row in the loss
    columns: dict  # of the row: strings and numbers, to read


@dataclass
class Pairs:
    chosen: Tensor  # (Q,): which of the B responses
    rejected: Tensor  # (Q,): which other one of the same prompt
    margins: Tensor  # (Q,)
    weights: Tensor  # (Q,): their sum is 1


@dataclass
class Run:
    """What setup makes, and all steps use."""

    folder: Path
    device: torch.device
    processor: Any  # of transformers, or a text model's tokenizer
    engine: Any  # DeepSpeed's around the trained RewardModel
    train_data: "Data"
    eval_sets: dict[str, "Data"]  # by name
    checkpoint: Path | None  # the newest
    state: dict  # stands in every checkpoint: add what must survive a resume
    tensorboard: Any = None  # its writer, once there is one


# ---- main ----


def main(args: Args) -> dict[str, float]:
    # --- 1. setup ---
    time_begin = time.perf_counter()
    run = setup(args)
    engine = run.engine
    signals = []  # received: the run then ends, after its step and a checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    stopped = False
    metrics = {}

    if run.eval_sets and not run.state["before"]:  # a resumed run has it
        run.state["before"], samples = evaluate(args, run)
        log(args, run, {"train/step": 0, **run.state["before"]}, samples)

    steps = range(run.state["step"] + 1, args.total_steps + 1)
    no_bar = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step
    bar = tqdm(steps, "reward", total=args.total_steps, initial=run.state["step"], disable=no_bar)
    for step in bar:
        # --- 5. update: one optimizer step on all pairs of some rankings ---
        time_start = time.perf_counter()
        entries = batch_indices(
            start=(step - 1) * args.train_batch_size,
            count=args.train_batch_size,
            num_rows=len(run.train_data.rows),
            seed=args.seed,
        )
        rankings = gather_rankings(run.train_data, entries)  # of all ranks
        pairs = make_pairs(rankings, run.device)
        packs = list(packs_of(args, run, run.train_data, rankings))  # this rank's share
        B = sum(len(ranking.responses) for ranking in rankings)
        largest = max(ranking.num_tokens for ranking in rankings)
        known_scores = torch.zeros(B, device=run.device)
        if not packing.is_packed(engine.module.model) or largest > args.micro_batch_tokens:
            # A pack may lack some of a prompt's responses: their scores are constants to it.
            known_scores = compute_scores(args, run, run.train_data, rankings).to(run.device)

        engine.train()
        scores = torch.zeros(B, device=run.device)
        for k, pack in enumerate(packs):
            engine.set_gradient_accumulation_boundary(k == len(packs) - 1)
            pack_scores = engine(pack)  # (S,)
            scores[pack.response_index] = pack_scores.detach()
            losses, _ = compute_bt_loss(
                scores=known_scores.index_put((pack.response_index,), pack_scores),  # (B,)
                pairs=pairs,
                label_smoothing=args.label_smoothing,
                center_coef=args.center_coef,
            )
            loss = (pairs.weights * losses).sum()  # pairs of other packs add a constant
            # The factor undoes DeepSpeed's mean over ranks, scale_wrt_gas=False its mean over packs.
            engine.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
        grad_norm = optimizer_step(engine)  # None: left out, the gradients were not finite
        engine.eval()
        scores = sum_over_ranks(scores, run.device)  # (B,)
        seconds = time.perf_counter() - time_start

        # --- 7. metrics ---
        metrics = {
            "train/step": step,
            "train/learning_rate": engine.get_lr()[0],
            "train/grad_norm": 0.0 if grad_norm is None else grad_norm,
            "train/skipped_updates": int(grad_norm is None),
            "rollout/prompts_dropped": len(entries) - len(rankings),
            "time/total": seconds,
        }
        metrics |= ranking_metrics(args, rankings, scores)
        samples = []
        shown = {name: f"{metrics[f'rm/{name}']:.3f}" for name in ("loss", "accuracy")}

        # --- 8. evaluate, log, save ---
        is_last = step == args.total_steps
        if run.eval_sets and (is_last or is_due(step, args.eval_steps)):
            eval_metrics, samples = evaluate(args, run)
            metrics |= eval_metrics
            for name in run.eval_sets:
                shown[name] = f"{eval_metrics[f'eval/{name}/accuracy']:.3f}"
        log(args, run, metrics, samples)
        bar.set_postfix(shown)
        if no_bar:
            tell(f"step {step} of {args.total_steps}, {seconds:.2f} s: {shown}")

        run.state["step"] = step
        run.state["skipped"] = run.state["skipped"] + 1 if grad_norm is None else 0  # in a row
        is_hopeless = run.state["skipped"] >= 5
        stopped = sum_over_ranks(torch.tensor(len(signals)), run.device).item() > 0 and not is_last
        if is_last or stopped or is_hopeless or is_due(step, args.save_steps):
            run.checkpoint = save_checkpoint(args, run)
        if is_hopeless:
            fail(f"step {step}: 5 times no finite gradients; the weights before: {run.checkpoint}")
        if stopped:
            tell(f"stopped by a signal after step {step}; go on with --resume {run.checkpoint}")
            break

    # --- 9. finish ---
    if not stopped:
        summary = []
        for name, before in run.state["before"].items():
            if "/accuracy" in name and name in metrics:
                summary.append(f"{name} {before:.3f} -> {metrics[name]:.3f}")
        tell(" · ".join([*summary, f"{time.perf_counter() - time_begin:.0f} s", str(run.checkpoint)]))
        tell(f"to see it: python tools/report.py {run.folder}")
    dist.destroy_process_group()
    return metrics


# ---- setup ----


def setup(args: Args) -> Run:
    """Load what the steps need, and prove what they rely on. Bad input ends the run here."""
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    device = init_distributed()
    folder, checkpoint = find_run(args)
    is_fp32 = args.dtype == "float32" or (args.dtype == "auto" and device.type == "cpu")
    dtype = torch.float32 if is_fp32 else torch.bfloat16

    model = load_model(args.model, dtype).base_model
    torch.manual_seed(args.seed)  # of the head and LoRA
    module = RewardModel(model)
    saved_head = Path(args.model) / "score.safetensors"  # of an own checkpoint
    if saved_head.is_file():
        module.load_state_dict(safetensors.torch.load_file(saved_head), strict=False)
    if args.lora_rank > 0:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine = make_engine(args, module, dtype, args.total_steps, args.learning_rate)
    engine.eval()
    state = {"step": 0, "before": {}, "skipped": 0}  # before: the evaluation at step 0
    if checkpoint is not None:
        _, client_state = engine.load_checkpoint(str(checkpoint / "state" / "reward"), tag="engine")
        state = client_state["ours"]

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = load_data(args, args.dataset, args.dataset_split, args.seed, model, processor)
    eval_sets = {}
    own_eval_sets = ["easy-vqa=easy-vqa"] if args.dataset == "easy-vqa" else []
    for item in args.eval_datasets or own_eval_sets:
        name, _, source = item.partition("=")
        eval_sets[name] = load_data(args, source, args.eval_dataset_split, 0, model, processor)
    open_folder(args, folder, last_step=state["step"])
    tell(f"{folder}: {len(train_data.rows)} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")

    enable_packing(args, engine, train_data)
    if not hasattr(processor, "tokenizer"):
        set_pad_token(model, processor, train_data)
    return Run(
        folder=folder, device=device, processor=processor, engine=engine, train_data=train_data,
        eval_sets=eval_sets, checkpoint=checkpoint, state=state,
    )  # fmt: skip


def check_args(args: Args) -> None:
    if min(args.train_batch_size, args.total_steps, args.eval_samples) < 1:
        fail("counts must be at least 1")
    if args.micro_batch_tokens < args.max_length:
        fail("--micro-batch-tokens must hold --max-length")
    if args.offload_optimizer and args.zero_stage == 0:
        fail("--offload-optimizer needs --zero-stage 1 to 3")
    if not all("=" in item for item in args.eval_datasets):
        fail("--eval-datasets takes name=source")
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


def enable_packing(args: Args, engine, data: "Data") -> None:
    """Pack if that is exact for some rows of the data."""
    some_rows = range(0, len(data.rows), len(data.rows) // 16 + 1)
    prompts = [ranking.prompt for row in some_rows if (ranking := data.encode(row))]
    if not prompts:
        fail(f"{data.source}: no row can be used")
    told = packing.enable_packing_if_exact(
        model=engine.module.model,
        forward=engine,
        prompts=prompts,
        max_length=args.max_length,
        max_tokens=args.micro_batch_tokens,
    )
    tell(told)


def set_pad_token(model, tokenizer, data: "Data") -> None:
    """transformers' classifier reads the last token that is not pad: pad must not end a chat."""
    ranking = next(filter(None, map(data.encode, range(len(data.rows)))))
    end = int(ranking.responses[0][-1])
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    free = next((i for i in special if i != end), None)
    if free is None:
        fail(f"{tokenizer.name_or_path}: all chats end with the only special token, so none can pad")
    model.config.pad_token_id = free
    tokenizer.pad_token_id = free


def is_due(step: int, every: int) -> bool:
    """every: --eval-steps or --save-steps, 0 for never."""
    return every != 0 and step % every == 0


# ---- data ----


@dataclass
class Data:
    source: str
    rows: Any  # a datasets.Dataset
    encode: Callable[[int], Ranking | None]  # row -> ranking, or None and a warning


def load_data(args: Args, source: str, split: str, seed: int, model, processor) -> Data:
    """Columns: `chosen` and `rejected`, or `responses`, best first: strings or messages that follow
    `prompt` or `messages`, or whole chats; `image(s)`, `video(s)`, see to_messages; `margin`, `weight`."""
    rows = rename_columns(args, source, load_rows(source, split))
    if source == "easy-vqa":
        rows = add_pairs(rows, seed)
    columns = {*rows.column_names}
    is_text = str(rows.features.get("chosen")).startswith("Value")  # a chat has its prompt inside
    has_prompt = columns & {"prompt", "messages"} or not is_text
    if not has_prompt or not (columns >= {"chosen", "rejected"} or "responses" in columns):
        has = ", ".join(rows.column_names)
        fail(f"{source} has columns {has}: rename yours, --columns prompt=... chosen=... rejected=...")
    tokenizer = getattr(processor, "tokenizer", processor)

    # A step asks for the same rows again and again.
    @functools.lru_cache(maxsize=2 * args.train_batch_size)
    def encode(index: int) -> Ranking | None:
        try:
            row = rows[index]
            messages, answers = split_row(args, row, Path(source).parent, tokenizer)
            prompt, responses = encode_ranking(model, processor, messages, answers, index)
            longest = prompt.length + max(map(len, responses))
            if longest > args.max_length:
                raise ValueError(f"{longest} tokens are more than --max-length")
            columns = {name: x for name, x in row.items() if isinstance(x, str | int | float)}
            return Ranking(
                prompt=prompt,
                responses=responses,
                num_tokens=prompt.length + sum(map(len, responses)),
                texts=[" ".join(p["text"] for m in answer for p in m["content"]) for answer in answers],
                margin=float(columns.get("margin", 0.0)),
                weight=float(columns.get("weight", 1.0)),
                columns=columns,
            )
        except Exception as error:
            tqdm.write(f"warning: {source} row {index} is left out: {error!s:.300}", file=sys.stderr)
            return None

    return Data(source=source, rows=rows, encode=encode)


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


def add_pairs(rows, seed: int):
    """easy-vqa: the answer is preferred to another one of its kind."""
    colours = "black blue brown gray green red teal yellow"
    kinds = ["yes no".split(), "circle rectangle triangle".split(), colours.split()]
    rng = np.random.default_rng(seed)
    wrong = []
    for answer in rows["answer"]:
        kind = next(kind for kind in kinds if answer in kind)
        others = [other for other in kind if other != answer]
        wrong.append(others[rng.integers(len(others))])
    for name, answers in (("chosen", rows["answer"]), ("rejected", wrong)):
        rows = rows.add_column(name, [f"<answer>{answer}</answer>" for answer in answers])
    return rows


def split_row(args: Args, row: dict, folder: Path, tokenizer) -> tuple[list[dict], list[list[dict]]]:
    """-> the messages of the prompt, with opened media, and of each response, best first."""
    chats = []
    for answer in row.get("responses") or [row["chosen"], row["rejected"]]:
        is_text = isinstance(answer, str)
        chats.append([{"role": "assistant", "content": answer}] if is_text else answer)
    if chats[0][0]["role"] != "assistant":  # whole chats: what all begin with is the prompt
        shared = count_shared(chats)
        row = {**row, "messages": chats[0][:shared]}
        chats = [chat[shared:] for chat in chats]
    answers = []
    for chat in chats:
        messages = to_messages(args, {"messages": chat}, folder, tokenizer)
        answers.append(messages[-len(chat) :])  # without a system prompt in front
    parts = [part for answer in answers for message in answer for part in message["content"]]
    if len(answers) < 2 or any(part["type"] != "text" for part in parts):
        raise ValueError("a ranking needs two responses of text")
    return to_messages(args, row, folder, tokenizer), answers


def count_shared(sequences: list[list]) -> int:
    """How many items all begin with: [[1, 2, 3], [1, 2, 4]] -> 2"""
    for i, items in enumerate(zip(*sequences)):
        if any(item != items[0] for item in items):
            return i
    return min(map(len, sequences))


def encode_ranking(
    model, processor, messages: list[dict], answers: list[list[dict]], index: int
) -> tuple[Prompt, list[Tensor]]:
    """-> the tokens that all whole chats begin with, as a prompt, and the rest of each, (R,), R >= 1."""
    tokenizer = getattr(processor, "tokenizer", processor)

    def tokenize(chat: list[dict], **options) -> list[int]:  # a picture is one token here
        if tokenizer is processor:
            return packing.encode_chat(processor, chat, **options)["input_ids"][0].tolist()
        options |= {"chat_template": processor.chat_template, "return_dict": False}
        return tokenizer.apply_chat_template(chat, **options)

    ids = [tokenize(messages + answer) for answer in answers]
    shared = min(count_shared(ids), min(map(len, ids)) - 1)
    inputs = packing.encode_chat(processor, messages + answers[0])
    end = inputs["input_ids"].shape[1] - (len(ids[0]) - shared)  # of the prompt
    if inputs["input_ids"][0, end:].tolist() != ids[0][shared:]:  # the processor adds to ends, as of prompts
        shared = len(tokenize(messages, add_generation_prompt=True))
        inputs = packing.encode_chat(processor, messages, add_generation_prompt=True)
        end = inputs["input_ids"].shape[1]
    inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
    T = inputs["input_ids"].shape[1]
    inputs = {name: x[:, :end] if x.shape[:2] == (1, T) else x for name, x in inputs.items()}
    responses = [torch.tensor(own[shared:]) for own in ids]
    return packing.make_prompt(model, inputs, index=index, messages=messages), responses


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


def batch_indices(start: int, count: int, num_rows: int, seed: int) -> list[int]:
    """Entries start ... start + count - 1 of an endless stream of shuffled epochs.

    An entry is a row's number, plus num_rows in the second epoch, twice that in the third, and
    so on: the same row in another epoch is another entry, and gets other responses.
    """
    stream = []
    for epoch in range(start // num_rows, (start + count - 1) // num_rows + 1):
        rows = np.random.default_rng([seed, epoch]).permutation(num_rows)
        stream += (rows + epoch * num_rows).tolist()
    return stream[start % num_rows :][:count]


def gather_rankings(data: Data, entries: list[int]) -> list[Ranking]:
    """Entries of batch_indices -> the usable ones, each encoded on one rank, on all ranks."""
    rankings = []
    for entry in np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist():
        ranking = data.encode(entry % len(data.rows))
        if ranking is not None:  # else its warning has been printed
            prompt = ranking.prompt
            info = PromptInfo(prompt.index, prompt.length, prompt.kinds)  # pictures stay here
            rankings.append(replace(ranking, prompt=info))
    rankings = gather(rankings)
    if len(rankings) * 2 < len(entries):
        fail(f"more than half of {len(entries)} rows of {data.source} can't be used: see the warnings")
    return rankings


def gather(own: list) -> list:
    """The lists of all ranks as one list, on every rank."""
    if WORLD_SIZE == 1:
        return own
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, own)
    return [item for part in lists for item in part]


# ---- forward ----


def packs_of(args: Args, run: Run, data: Data, rankings: list[Ranking]) -> Iterator[packing.Pack]:
    """This rank's packs of some rankings, whose responses are numbered through."""
    responses = [x for ranking in rankings for x in ranking.responses]  # B of them
    indices = torch.arange(len(responses)).split([len(ranking.responses) for ranking in rankings])
    packs = packing.packs_of_rank(
        groups=[(g, own.tolist()) for g, own in enumerate(indices)],
        prompts=[ranking.prompt for ranking in rankings],
        encode=lambda index: data.encode(index).prompt, responses=responses,
        max_tokens=args.micro_batch_tokens, rank=RANK, world_size=WORLD_SIZE,
        packed=packing.is_packed(run.engine.module.model), media_everywhere=args.zero_stage > 0,
    )  # fmt: skip
    for pack in packs:
        yield pack.to(run.device)


@torch.no_grad()
def compute_scores(args: Args, run: Run, data: Data, rankings: list[Ranking]) -> Tensor:
    """Scores of all responses, (B,), on all ranks."""
    scores = torch.zeros(sum(len(ranking.responses) for ranking in rankings), device=run.device)
    for pack in packs_of(args, run, data, rankings):
        scores[pack.response_index] = run.engine(pack)
    return sum_over_ranks(scores, run.device)


# ---- evaluation ----


def ranking_metrics(args: Args, rankings: list[Ranking], scores: Tensor) -> dict[str, float]:
    """Means over the pairs by weight, in float64. scores (B,), on the CPU."""
    pairs = make_pairs(rankings, scores.device)
    _, tables = compute_bt_loss(scores.double(), pairs, args.label_smoothing, args.center_coef)
    metrics = {name: float((pairs.weights * values).sum()) for name, values in tables.items()}
    metrics["rm/ece"] = float(calibration_error(tables["rm/margin"], pairs.weights))
    return metrics


def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """A fixed subset of each held-out set -> metrics, all pairs with their scores."""
    metrics = {}
    samples = []
    for name, data in run.eval_sets.items():
        rows = np.random.default_rng(0).permutation(len(data.rows))[: args.eval_samples]
        num_batches = math.ceil(len(rows) / args.train_batch_size)
        rankings = []
        scores = []
        for batch in np.array_split(np.sort(rows), num_batches):  # alike in size
            some = gather_rankings(data, batch.tolist())
            scores.append(compute_scores(args, run, data, some))
            rankings += some
        scores = torch.cat(scores)  # (B,)
        for key, value in ranking_metrics(args, rankings, scores).items():
            metrics[key.replace("rm/", f"eval/{name}/")] = value
        for sample in samples_of(rankings, scores):
            samples.append({**sample, "phase": f"eval_{name}"})
    return metrics, samples


def samples_of(rankings: list[Ranking], scores: Tensor) -> list[dict]:
    """All pairs with their scores, to read."""
    samples = []
    scores_by_ranking = scores.split([len(ranking.responses) for ranking in rankings])
    for ranking, own_scores in zip(rankings, scores_by_ranking):
        judged = zip(ranking.texts, own_scores.tolist())
        for (chosen, chosen_reward), (rejected, rejected_reward) in combinations(judged, 2):
            sample = {
                **ranking.columns,
                "row": ranking.prompt.index,
                "chosen": chosen,
                "rejected": rejected,
                "chosen_reward": chosen_reward,
                "rejected_reward": rejected_reward,
                "margin": chosen_reward - rejected_reward,
            }
            samples.append(sample)
    return samples


def messages_of(run: Run, sample: dict) -> list[dict]:
    """The prompt of a sample, with opened pictures."""
    data = run.eval_sets[sample["phase"].removeprefix("eval_")]
    return data.encode(sample["row"]).prompt.messages


# ---- model ----


class RewardModel(nn.Module):
    """A backbone with a scalar head: pack -> scores (S,), fp32, of its responses."""

    def __init__(self, model):
        super().__init__()
        H = model.config.get_text_config().hidden_size
        self.model = model
        self.score = nn.Linear(H, 1, bias=False, dtype=model.dtype)
        nn.init.normal_(self.score.weight, std=(H + 1) ** -0.5)  # https://arxiv.org/abs/2009.01325

    def forward(self, pack: packing.Pack) -> Tensor:
        hidden = packing.forward_hidden(self.model, pack, last=True)  # (S, H)
        return hidden.float() @ self.score.weight[0].float()  # bf16 would make ties


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


def save_checkpoint(args: Args, run: Run) -> Path:
    """checkpoint-N: transformers' classifier, or a vision-language backbone;
    score.safetensors; state/ for --resume. Collective."""
    module = run.engine.module
    final = run.folder / f"checkpoint-{run.state['step']}"
    unfinished = final.with_suffix(".tmp")  # renamed when all of it is written
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    run.engine.save_checkpoint(
        str(unfinished / "state" / "reward"), tag="engine", client_state={"ours": run.state}
    )
    weights = {}
    for name, weight in merged_weights(module):  # collective; one rank holds them
        if RANK == 0:
            weights[name] = weight.cpu()
    if RANK == 0:
        head = {"score.weight": weights.pop("score.weight")}
        safetensors.torch.save_file(head, unfinished / "score.safetensors")
        config = module.model.config
        config = type(config).from_dict(config.to_dict())  # without packing
        config.num_labels = 1
        is_text = not hasattr(config, "vision_config")
        kind = transformers.AutoModelForSequenceClassification if is_text else transformers.AutoModel
        with torch.device("meta"):  # the same architecture, without adapters
            plain = kind.from_config(config)
        prefix = f"{plain.base_model_prefix}." if is_text else ""
        weights = {name.replace("model.", prefix, 1): weight for name, weight in weights.items()}
        plain.save_pretrained(unfinished, state_dict=weights | head if is_text else weights)
        run.processor.save_pretrained(unfinished)
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
