"""Bradley-Terry reward model, for vision-language and text models.

A head on a language model's last hidden state learns which of two responses is better:

    d = score(chosen) - score(rejected) - margin      loss = -log sigmoid(d)

Paper: https://arxiv.org/abs/2203.02155. docs/reward_bt.md lists what differs from the RewardTrainers of TRL
(huggingface/trl@f2cd577) and EasyDeL.

    python reward_bt.py              # tiny VLM on easy-VQA, minutes on two CPU cores
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
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NoReturn

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

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


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


def check_args(args: Args) -> None:
    for is_bad, message in (
        (min(args.train_batch_size, args.total_steps, args.eval_samples) < 1, "counts must be at least 1"),
        (args.micro_batch_tokens < args.max_length, "--micro-batch-tokens must hold --max-length"),
        (args.offload_optimizer and args.zero_stage == 0, "--offload-optimizer needs --zero-stage 1 to 3"),
        (not all("=" in x for x in args.eval_datasets), "--eval-datasets takes name=source"),
        (args.resume == "auto" and args.run_name is None, "--resume auto needs --run-name"),
    ):
        if is_bad:
            fail(message)


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- data ----


def load_rows(source: str, split: str):
    """A `datasets.Dataset` from easy-vqa, a local file or folder, or the hub."""
    import datasets

    datasets.disable_progress_bars()
    kind = Path(source).suffix[1:].replace("jsonl", "json")
    try:
        if source == "easy-vqa":  # 64 x 64 drawings with questions, inside the package
            import easy_vqa

            questions, answers, numbers = getattr(easy_vqa, f"get_{split}_questions")()
            paths = getattr(easy_vqa, f"get_{split}_image_paths")()
            columns = {"prompt": questions, "image": [str(paths[i]) for i in numbers], "answer": answers}
            return datasets.Dataset.from_dict(columns)
        if kind in ("json", "csv", "parquet"):
            return datasets.load_dataset(kind, data_files=source, split="train")
        if not Path(source).is_dir():
            return datasets.load_dataset(source, split=split)
        rows = datasets.load_from_disk(source)
        return rows[split] if isinstance(rows, dict) else rows
    except Exception as error:
        fail(f"{source} (split {split}; HF_HOME) can't be read as a dataset: {error.__cause__ or error}")


def add_pairs(rows, seed: int):
    """easy-vqa: the answer is preferred to another one of its kind."""
    kinds = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"
    others = {x: [y for y in kind.split() if y != x] for kind in kinds for x in kind.split()}
    rng, right = np.random.default_rng(seed), rows["answer"]
    wrong = [others[answer][rng.integers(len(others[answer]))] for answer in right]
    for name, answers in (("chosen", right), ("rejected", wrong)):
        rows = rows.add_column(name, [f"<answer>{answer}</answer>" for answer in answers])
    return rows


def load_data(args: Args, source: str, split: str, seed: int, model, processor) -> SimpleNamespace:
    """-> source, rows, tokenizer, encode(indices): usable rows as prompts of common/packing.py, and their
    `ranking`s, for all ranks. Columns: `chosen` and `rejected`, or `responses`, best first: strings or
    messages after `prompt` or `messages`; or whole chats; `image(s)`, `video(s)`; `margin`, `weight`."""
    rows, tokenizer = load_rows(source, split), getattr(processor, "tokenizer", processor)
    rows = add_pairs(rows, seed) if source == "easy-vqa" else rows
    read = functools.partial(to_messages, args, folder=Path(source).parent, tokenizer=tokenizer)

    @functools.lru_cache(2 * args.train_batch_size)  # a step asks repeatedly
    def encode(index: int) -> dict | None:
        try:
            row = rows[index]
            answers = row.get("responses") or [row["chosen"], row["rejected"]]
            answers = [[{"role": "assistant", "content": x}] if isinstance(x, str) else x for x in answers]
            if answers[0][0]["role"] != "assistant":  # whole chats
                shared = len(os.path.commonprefix([[*map(str, chat)] for chat in answers]))
                row, answers = row | {"messages": answers[0][:shared]}, [chat[shared:] for chat in answers]
            answers = [read({"messages": x})[-len(x) :] for x in answers]
            if len(answers) < 2 or any(x["type"] != "text" for a in answers for m in a for x in m["content"]):
                raise ValueError("a ranking needs two responses of text")
            prompt, responses = encode_ranking(model, processor, read(row), *answers)
            P, R = prompt["length"], [len(response) for response in responses]
            if P + max(R) > args.max_length:
                raise ValueError(f"{P} + {max(R)} tokens are more than --max-length")
            shown = {name: x for name, x in row.items() if isinstance(x, str | int | float)}
            ranking = {"index": index, "length": P, "kinds": prompt["kinds"], "tokens": P + sum(R)}
            ranking = {"margin": 0.0, "weight": 1.0} | shown | ranking | {"responses": responses}
            return prompt | {"ranking": ranking}
        except Exception as error:
            tqdm.write(f"warning: {source} row {index} is left out: {error!s:.300}", file=sys.stderr)

    usable = {"encode": lambda indices: [p for i in indices if (p := encode(i % len(rows)))]}
    return SimpleNamespace(source=source, rows=rows, tokenizer=tokenizer, **usable)


def encode_ranking(model, processor, messages: list[dict], *answers: list[dict]) -> tuple[dict, list[Tensor]]:
    """-> the tokens that the whole chats begin with, as a prompt, and the rest of each, (R,) with R >= 1."""
    text = [m | {"content": [part for part in m["content"] if part["type"] == "text"]} for m in messages]
    encoded = [packing.encode_chat(processor, text + answer) for answer in answers]
    ids = [inputs["input_ids"][0].tolist() for inputs in encoded]
    shared = min(len(os.path.commonprefix(ids)), min(map(len, ids)) - 1)
    responses = [torch.tensor(x[shared:]) for x in ids]
    first = encoded[0] if text == messages else packing.encode_chat(processor, messages + answers[0])
    inputs, (_, T) = {name: torch.as_tensor(x) for name, x in first.items()}, first["input_ids"].shape
    inputs = {k: x[:, : -len(responses[0])] if x.shape[:2] == (1, T) else x for k, x in inputs.items()}
    return packing.make_prompt(model, inputs), responses


def to_messages(args: Args, row: dict, folder: Path, tokenizer) -> list[dict]:
    """A row's string or chat, pictures and videos -> messages whose contents are lists of parts, media opened
    and in their places: where <image> and <video> stand, or parts of such types; without any, in front."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}

    def defuse(text: str) -> str:
        """Data must not end a turn or stand for a picture: "<|im_end|>" -> "< |im_end|>"."""
        while found := [token for token in special if token in text]:
            text = text.replace(found[0], f"{found[0][0]} {found[0][1:]}" if len(found[0]) > 1 else " ")
        return text

    given, messages, places = row.get("messages") or row["prompt"], [], {"image": [], "video": []}
    columns = {kind: row.get(kind) or row.get(f"{kind}s") or [] for kind in places}
    media = {kind: [*items] if isinstance(items, list) else [items] for kind, items in columns.items()}
    for message in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        text, parts = message["content"], []
        if not isinstance(text, str):  # what parts hold themselves goes to the places that they mark
            for kind in media:
                media[kind] += [part[kind] for part in text if part.get(kind) is not None]
            text = "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in text)
        marks = ("<image>", "<video>") if message["role"] != "assistant" else ()
        for piece in filter(None, re.split("(<image>|<video>)", text) if marks else [text]):
            kind = piece[1:-1] if piece in marks else "text"
            parts.append({"type": kind} | ({"text": defuse(piece)} if kind == "text" else {}))
            places.get(kind, []).append(parts[-1])
        messages.append({"role": message["role"], "content": parts})
    for kind, items in media.items():
        if items and not places[kind]:
            places[kind] = [{"type": kind} for _ in items]
            next(m for m in messages if m["role"] == "user")["content"][:0] = places[kind]
        if len(places[kind]) != len(items):
            raise ValueError(f"{len(places[kind])} places for {kind}s, but {len(items)} {kind}s")
        for place, item in zip(places[kind], items):
            place |= open_media(kind, item, folder, args.video_fps)
    if args.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": args.system_prompt}]})
    return messages


def open_media(kind: str, source, folder: Path, fps: float) -> dict:
    """PIL, bytes, {"bytes", "path"} or a path, relative to the dataset's file -> a picture in RGB. A video's
    path -> fps frames a second, (F, height, width, 3), and when they were taken."""
    if kind == "video":
        frames, taken = transformers.video_utils.load_video(str(folder / source), fps=fps, backend="pyav")
        names = "total_num_frames", "fps", "frames_indices"
        return {"video": frames, "taken": {name: taken[name] for name in names}}
    source = (source["bytes"] or source["path"]) if isinstance(source, dict) else source
    source = io.BytesIO(source) if isinstance(source, bytes) else source
    source = folder / source if isinstance(source, str) else source
    return {"image": (source if isinstance(source, Image.Image) else Image.open(source)).convert("RGB")}


def batch_indices(start: int, count: int, num_rows: int, seed: int) -> list[int]:
    """Entries start ... start + count - 1 of an endless stream of shuffled epochs: row + epoch * num_rows."""
    epochs = range(start // num_rows, (start + count - 1) // num_rows + 1)
    order = [np.random.default_rng([seed, e]).permutation(num_rows) + e * num_rows for e in epochs]
    return np.concatenate(order)[start - epochs[0] * num_rows :][:count].tolist()


# ---- model ----


def load_model(name: str, dtype: torch.dtype):
    """A vision-language or text model, by what its config says, without dropout."""
    try:
        is_vision = hasattr(transformers.AutoConfig.from_pretrained(name), "vision_config")
        kind = "AutoModelForImageTextToText" if is_vision else "AutoModelForCausalLM"
        model = getattr(transformers, kind).from_pretrained(name, dtype=dtype)
    except Exception as error:
        fail(f"--model {name} can't be loaded: {error}")
    for module in model.modules():  # rollout, old and new log-probs must be of one function
        for name in [n for n, x in vars(module).items() if type(x) is float and (n == "p" or "drop" in n)]:
            setattr(module, name, 0.0)
    return model


def add_adapters(args: Args, model) -> None:
    """LoRA on the language model's linear layers; B starts at 0, so nothing changes yet."""
    from peft import LoraConfig

    inside = set(getattr(model.base_model, "language_model", model.base_model).modules())
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m in inside]
    model.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=names))


def merged_state_dict(model) -> dict[str, Tensor]:
    """Weights of the plain model, tied ones under each name: gathered under ZeRO-3 (collective), adapters
    added out of place, W + alpha / rank B A: merging in place would wear bf16 weights down."""
    import deepspeed

    names, layers = set(model.state_dict()), {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    weights = {name: buffer for name, buffer in model.named_buffers() if name in names}
    for name, parameter in model.named_parameters():
        sharded, layer = hasattr(parameter, "ds_id"), layers.get(name.removesuffix(".base_layer.weight"))
        adapters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight] if layer else []
        with deepspeed.zero.GatheredParameters([parameter, *adapters], enabled=sharded):
            weight = parameter.detach().clone() if sharded else parameter.detach()
            if adapters:
                A, B = (adapter.detach().float() for adapter in adapters)  # (rank, in), (out, rank)
                weight = (weight.float() + layer.scaling["default"] * (B @ A)).to(weight.dtype)
        if ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = weight.cpu() if sharded else weight
    return weights | {alias: weights[name] for alias, name in model.all_tied_weights_keys.items()}


class RewardModel(nn.Module):
    """A backbone with a scalar head: pack -> scores (S,), fp32, of its responses."""

    all_tied_weights_keys = {}  # for merged_state_dict

    def __init__(self, model):
        super().__init__()
        H = model.config.get_text_config().hidden_size
        self.model, self.score = model, nn.Linear(H, 1, bias=False, dtype=model.dtype)
        nn.init.normal_(self.score.weight, std=(H + 1) ** -0.5)  # https://arxiv.org/abs/2009.01325

    def forward(self, pack) -> Tensor:
        hidden = packing.forward_hidden(self.model, pack, last=True)  # (S, H)
        return hidden.float() @ self.score.weight[0].float()  # bf16 would make ties


# ---- pure math: tensors in, tensors and metrics out ----


def ranking_pairs(rankings: list[dict]) -> list[Tensor]:
    """All pairs of rankings with `responses`, best first, `margin`, `weight` -> (B,) each: chosen, rejected
    (among all S responses), margins, weights, which a prompt's pairs share; their sum is 1. Source:
    https://arxiv.org/abs/2203.02155 eq. (1).

    2 and 3 responses, margins 0 and .5, weights 3 and 1 -> chosen [0, 2, 2, 3], rejected [1, 3, 4, 4],
    margins [0, .5, .5, .5], weights [3/4, 1/12, 1/12, 1/12]
    """
    pairs, start, total = [], 0, sum(ranking["weight"] for ranking in rankings)
    for ranking in rankings:
        K = len(ranking["responses"])
        own = float(ranking["margin"]), ranking["weight"] / total * 2 / (K * (K - 1))
        pairs += [(start + i, start + j, *own) for i, j in combinations(range(K), 2)]
        start += K
    return [*map(torch.tensor, zip(*pairs))]


def bradley_terry(rewards: Tensor, pairs: list[Tensor], label_smoothing: float, center_coef: float) -> dict:
    """The loss, and what else is a mean over pairs by weight. rewards (S,), pairs: of ranking_pairs.

    d = chosen - rejected - margin, https://arxiv.org/abs/2307.09288 eq. (2)
    bt = -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)
    center = (chosen + rejected)^2, https://arxiv.org/abs/2312.09244

    rewards [1, 0, 0, 2], margins [0, .5], weights [3/4, 1/4], no smoothing, center_coef .1
    -> d [1, -2.5], bt [.3133, 2.5789], center [1, 4]: loss .8797 + .1 * 1.75 = 1.0547
    """
    chosen, rejected, margins, weights = rewards[pairs[0]], rewards[pairs[1]], *pairs[2:]  # (B,) each
    gap, center = chosen - rejected, (chosen + rejected) ** 2
    d, right = gap - margins, (gap.sign() + 1) / 2  # ties are one half
    bt = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
    tables = {"rm/loss": bt + center_coef * center, "rm/bt_loss": bt, "rm/center_loss": center}
    tables |= {"rm/chosen_rewards": chosen, "rm/rejected_rewards": rejected}
    tables |= {"rm/accuracy": right, "rm/margin": gap}
    return {name: (weights * x).sum() for name, x in tables.items()}


def ranking_metrics(rewards: Tensor, rankings: list[dict], smoothing: float, center_coef: float) -> dict:
    """All metrics of scores (S,). ece, expected calibration error: over ten bins of the confidence
    sigmoid(|chosen - rejected|), |accuracy - confidence| by weight, https://arxiv.org/abs/1706.04599

    rewards [2, 0, 0, 2, 1, 1] of three pairs -> confidence [.881, .881, .5], right [1, 0, .5],
    ece 2 / 3 * |.5 - .881| + 1 / 3 * 0 = .2539
    """
    rewards, pairs = rewards.double(), ranking_pairs(rankings)
    metrics = bradley_terry(rewards, pairs, smoothing, center_coef)
    gap = rewards[pairs[0]] - rewards[pairs[1]]
    confidence, right = gap.abs().sigmoid(), (gap.sign() + 1) / 2
    bins, error = (confidence * 20 - 10).long().clamp(0, 9), pairs[3] * (right - confidence)
    metrics["rm/ece"] = torch.zeros(10).to(error).index_add(0, bins, error).abs().sum()
    lengths = [torch.tensor([len(x) for x in ranking["responses"]]).double() for ranking in rankings]
    # Their means are 0 then: cosine is Pearson's correlation.
    within = [[x - x.mean() for x in table] for table in (rewards.split([*map(len, lengths)]), lengths)]
    metrics["rm/length_correlation"] = F.cosine_similarity(*map(torch.cat, within), dim=0, eps=1e-12)
    return {name: float(value) for name, value in metrics.items()}


# ---- DeepSpeed ----


def init_distributed() -> torch.device:
    """Without a launcher: one process and no port, so that runs never collide."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    os.environ |= {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"), "DS_ACCELERATOR": device.type}
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute on a CPU
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return device


def sum_over_ranks(table: Tensor, device) -> Tensor:
    if WORLD_SIZE > 1:  # alone, gloo would copy in a thread of its own, and slow down OpenMP's
        dist.all_reduce(table := table.to(device))
    return table.cpu()


def make_engine(args: Args, module: nn.Module, dtype: torch.dtype, total_updates: int = 0):
    """DeepSpeed engine with AdamW (no decay on vectors) and schedule; a frozen module has neither. A pack is
    a micro-batch: their number varies, so `set_gradient_accumulation_boundary` ends a step, batch sizes stay
    1 here, and the losses carry their own global denominators."""
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
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW runs on the CPU too, and needs no compiler
    }
    if args.zero_stage == 3 and (head := module.model.get_output_embeddings()):
        deepspeed.zero.register_external_parameter(module, head.weight)  # read outside its own forward
    optimizer = schedule = None
    if total_updates:
        trained = [p for p in module.parameters() if p.requires_grad]
        vectors, matrices = ([p for p in trained if (p.dim() > 1) == kind] for kind in (False, True))
        groups = [{"params": matrices, "weight_decay": args.weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []  # LoRA has none
        fused = torch.cuda.is_available() and not args.offload_optimizer
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=args.adam_betas, fused=fused)
        name, shape = "cosine_warmup_with_min_lr", {"min_lr_rate": args.min_lr_ratio}
        schedule = transformers.get_scheduler(name, optimizer, args.warmup_steps, total_updates, shape)
    how = {"config": config, "optimizer": optimizer, "lr_scheduler": schedule}
    return deepspeed.initialize(model=module, dist_init_required=False, **how)[0]


def optimizer_step(engine) -> tuple[float, bool]:
    """Clip, step, advance the schedule -> gradient norm before clipping, and whether the step was taken: all
    ranks decide alike, by the reduced gradients."""
    if not engine.zero_optimization() and not engine.bfloat16_enabled():  # this path has no check of its own
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        engine.step() if norm.isfinite() else engine.zero_grad()
        return float(norm), bool(norm.isfinite())
    engine.step()
    taken, optimizer = engine.was_step_applied(), engine.optimizer
    # A parameter without gradients in the next step, as a vision tower's without pictures, would have those
    # of this step again (DeepSpeed 0.19): ZeRO-3 keeps them here, with offload in groups.
    kept = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        kept += [group.grad for group in getattr(optimizer, name, [])]
    for gradients in filter(torch.is_tensor, kept):
        gradients.zero_()
    return float(engine.get_global_grad_norm()) if taken else math.nan, taken


# ---- update ----


def score_rows(args: Args, indices: list[int], data, engine, train: bool = False) -> tuple[list, Tensor]:
    """Some rows -> on all ranks their rankings, and scores of all responses, (S,); train: and gradients."""
    prompts, device = data.encode(np.array_split(np.array(indices), WORLD_SIZE)[RANK].tolist()), engine.device
    gathered = [[prompt["ranking"] for prompt in prompts]] * WORLD_SIZE
    if WORLD_SIZE > 1:  # alone it would start threads in gloo, see sum_over_ranks
        dist.all_gather_object(gathered, gathered[0])
    rankings = sum(gathered, [])
    if len(rankings) * 2 < len(indices):
        fail(f"more than half of {len(indices)} rows of {data.source} can't be used: see the warnings")
    responses, groups = [], []
    for g, ranking in enumerate(rankings):
        start, responses = len(responses), responses + ranking["responses"]
        groups.append((g, [*range(start, len(responses))]))
    given = groups, rankings, data.encode, responses, args.micro_batch_tokens, RANK, WORLD_SIZE
    packed = packing.is_packed(engine.module.model)
    packs = [*packing.packs_of_rank(*given, packed, media_everywhere=args.zero_stage > 0)]
    pairs = [x.to(device) for x in ranking_pairs(rankings)]
    others, rewards = torch.zeros(2, len(responses), device=device)
    if train and (not packed or max(ranking["tokens"] for ranking in rankings) > args.micro_batch_tokens):
        # A pack may lack some of a prompt's responses: their scores are constants to it.
        others = score_rows(args, indices, data, engine)[1].to(device)
    engine.train(train)
    for k, pack in enumerate(packs):
        with torch.set_grad_enabled(train):
            own = engine(pack := pack.to(device))
        rewards[pack.rows] = own.detach()
        if train:
            known = others.index_put((pack.rows,), own)  # (S,)
            loss = bradley_terry(known, pairs, args.label_smoothing, args.center_coef)["rm/loss"]
            engine.set_gradient_accumulation_boundary(k == len(packs) - 1)
            # DeepSpeed averages over ranks, hence the factor; it must not divide by the number of packs.
            engine.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
    return rankings, sum_over_ranks(rewards, device)


# ---- evaluate ----


def evaluate(args: Args, engine, eval_sets: dict) -> tuple[dict[str, float], list[dict]]:
    """A fixed subset of each held-out set -> metrics, all pairs with their scores."""
    metrics, samples, n = {}, [], args.train_batch_size
    for name, data in eval_sets.items():
        indices = np.sort(np.random.default_rng(0).permutation(len(data.rows))[: args.eval_samples])
        rankings, rewards = [], torch.empty(0)
        for part in np.array_split(indices, -(-len(indices) // n)):  # alike in size
            found = score_rows(args, part.tolist(), data, engine)
            rankings, rewards = rankings + found[0], torch.cat([rewards, found[1]])
        found = ranking_metrics(rewards, rankings, args.label_smoothing, args.center_coef)
        metrics |= {key.replace("rm/", f"eval/{name}/"): value for key, value in found.items()}
        scores = iter(rewards.tolist())
        for ranking in rankings:
            texts = data.tokenizer.batch_decode(ranking["responses"])
            for (chosen, x), (rejected, y) in combinations([*zip(texts, scores)], 2):
                sample = {"chosen": chosen, "rejected": rejected} | ranking | {"responses": texts}
                sample |= {"chosen_reward": x, "rejected_reward": y, "margin": x - y}
                samples.append(sample | {"phase": f"eval_{name}", "row": ranking["index"]})
    return metrics, samples


# ---- save, resume, log ----


def tell(message: str) -> None:
    if RANK == 0:
        tqdm.write(message)  # also under a progress bar
        sys.stdout.flush()


def checkpoints(run_dir: Path) -> list[Path]:
    """By step."""
    return sorted(run_dir.glob("checkpoint-*[0-9]"), key=lambda p: int(p.name[11:]))


def find_run(args: Args) -> tuple[Path, Path | None]:
    """-> the run's folder, and the checkpoint to go on from."""
    name = f"{Path(__file__).stem}-{Path(args.model).name}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = [Path(args.output_dir) / (args.run_name or name), None]
    dist.broadcast_object_list(found)  # the name holds a time: all ranks take rank 0's
    if args.resume == "auto":
        found[1] = next(reversed(checkpoints(found[0])), None)
    elif args.resume is not None:
        found = [Path(args.resume).resolve().parent, Path(args.resume)]
        if not (found[1] / "state").is_dir():
            fail(f"--resume {args.resume} is no checkpoint: it has no folder named state")
    elif RANK == 0 and found[0].exists():
        fail(f"{found[0]} exists already: choose another --run-name, or go on with --resume auto")
    return found[0], found[1]


def save_checkpoint(args: Args, run_dir: Path, engine, processor, state: dict) -> Path:
    """checkpoint-N: transformers' classifier, or a vision-language backbone; score.safetensors; state/ for
    --resume. Collective."""
    final, config = run_dir / f"checkpoint-{state['step']}", engine.module.model.config
    folder = final.with_suffix(".tmp")  # renamed when all of it is written
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder / "state" / "reward"), tag="engine", client_state={"ours": state})
    weights = {name: weight.cpu() for name, weight in merged_state_dict(engine.module).items()}
    if RANK == 0:
        head, config.num_labels = {"score.weight": weights.pop("score.weight")}, 1
        safetensors.torch.save_file(head, folder / "score.safetensors")
        is_text = not hasattr(config, "vision_config")
        kind = transformers.AutoModelForSequenceClassification if is_text else transformers.AutoModel
        with torch.device("meta"):  # the same architecture, without adapters
            plain = kind.from_config(config)
        prefix, head = (f"{plain.base_model_prefix}.", head) if is_text else ("", {})
        weights = {name.replace("model.", prefix, 1): weight for name, weight in weights.items()}
        plain.save_pretrained(folder, state_dict=weights | head)
        processor.save_pretrained(folder)
        shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed before it
        folder.rename(final)
        for old in checkpoints(run_dir)[: -max(1, args.save_total_limit)]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def log(args: Args, run_dir: Path, metrics: dict[str, float], samples: list[dict]) -> None:
    """Rank 0 alone: to metrics.jsonl, samples.jsonl, and where --track says."""
    if RANK > 0:
        return
    step = int(metrics["train/step"])
    files = ("metrics", [metrics]), ("samples", [{"train/step": step} | sample for sample in samples])
    for name, lines in files:
        with (run_dir / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    if args.track == "wandb":
        import wandb

        known = {"id": run_dir.name, "name": run_dir.name, "config": asdict(args), "dir": run_dir}
        (wandb.run or wandb.init(**known, resume="allow")).log(metrics, step=step)
    if args.track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run_dir)) as writer:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)


# ---- main ----


def main(args: Args) -> dict[str, float]:
    # --- 1. setup ---
    started = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    device, n = init_distributed(), args.train_batch_size
    run_dir, checkpoint = find_run(args)
    fp32 = args.dtype == "float32" or (args.dtype == "auto" and device.type == "cpu")
    dtype = torch.float32 if fp32 else torch.bfloat16

    # --- 2. models and engines ---
    model = load_model(args.model, dtype).base_model
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    torch.manual_seed(args.seed)  # of the head and LoRA
    module = RewardModel(model)
    if (head := Path(args.model) / "score.safetensors").is_file():
        module.load_state_dict(safetensors.torch.load_file(head), strict=False)
    if args.lora_rank:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine = make_engine(args, module, dtype, args.total_steps)
    state = {"step": 0, "before": {}, "skipped": 0}
    if checkpoint is not None:
        state = engine.load_checkpoint(str(checkpoint / "state" / "reward"), tag="engine")[1]["ours"]

    # --- 3. data ---
    data = load_data(args, args.dataset, args.dataset_split, args.seed, model, processor)
    sources = args.eval_datasets or ("easy-vqa=easy-vqa",) * (args.dataset == "easy-vqa")
    eval_sets = {}
    for name, _, source in (item.partition("=") for item in sources):
        eval_sets[name] = load_data(args, source, args.eval_dataset_split, 0, model, processor)
    if RANK == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
        for path in run_dir.glob("*.jsonl"):  # without what was logged after the checkpoint
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            lines = [line for line in lines if 0 < state["step"] >= json.loads(line)["train/step"]]
            path.write_text("".join(lines))
    tell(f"{run_dir}: {len(data.rows)} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")
    some = range(0, len(data.rows), len(data.rows) // 16 + 1)
    prompts = data.encode(some) or fail(f"{args.dataset}: no row can be used")
    probes = [*{prompt["kinds"]: prompt for prompt in prompts}.values()]
    tell(packing.prove_packing(model, engine, probes))
    if not hasattr(processor, "tokenizer"):  # its classifier reads the last token that is not pad
        last = int(prompts[0]["ranking"]["responses"][0][-1])
        free = [i for i, t in processor.added_tokens_decoder.items() if t.special and i != last]
        model.config.pad_token_id = processor.pad_token_id = free[0]
    metrics, received, stopped, saved = {}, [], False, checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):  # save after this step, and end
        signal.signal(number, lambda number, frame: received.append(number))
    if eval_sets and not state["before"]:  # a resumed run has it
        state["before"], samples = evaluate(args, engine, eval_sets)
        log(args, run_dir, {"train/step": 0, **state["before"]}, samples)
    steps = range(state["step"] + 1, args.total_steps + 1)
    for step in tqdm(steps, "reward", args.total_steps, initial=steps.start - 1, disable=RANK > 0 or None):
        # --- 7. update ---
        start = time.perf_counter()
        indices = batch_indices((step - 1) * n, n, len(data.rows), args.seed)
        rankings, rewards = score_rows(args, indices, data, engine, train=True)
        norm, taken = optimizer_step(engine)
        state |= {"step": step, "skipped": 0 if taken else state["skipped"] + 1}
        seconds = time.perf_counter() - start

        # --- 9. log ---
        metrics = ranking_metrics(rewards, rankings, args.label_smoothing, args.center_coef)
        metrics |= {"train/step": step, "train/learning_rate": engine.get_lr()[0]}
        metrics |= {"train/grad_norm": norm if taken else 0.0, "train/skipped_updates": int(not taken)}
        metrics |= {"rollout/prompts_dropped": n - len(rankings), "time/total": seconds}
        samples, told = [], [f"{key} {metrics[f'rm/{key}']:.3f}" for key in ("loss", "accuracy")]

        # --- 10. eval and save ---
        last, hopeless = step == args.total_steps, state["skipped"] >= 5
        if eval_sets and (last or (args.eval_steps and step % args.eval_steps == 0)):
            evaluated, samples = evaluate(args, engine, eval_sets)
            metrics |= evaluated
            told += [f"{name} {evaluated[f'eval/{name}/accuracy']:.3f}" for name in eval_sets]
        log(args, run_dir, metrics, samples)
        tell(f"step {step} of {args.total_steps}, {seconds:.2f} s: {', '.join(told)}")
        stopped = bool(sum_over_ranks(torch.tensor(len(received)), device)) and not last  # on all ranks alike
        if last or stopped or hopeless or (args.save_steps and step % args.save_steps == 0):
            saved = save_checkpoint(args, run_dir, engine, processor, state)
        if hopeless:
            fail(f"step {step}: 5 times in a row no finite gradients; the weights before: {saved}")
        if stopped:
            break

    # --- 11. finish ---
    if stopped:
        tell(f"stopped by a signal after step {step}; go on with --resume {saved}")
    else:
        before = state["before"].items()
        told = [f"{k} {x:.3f} -> {metrics[k]:.3f}" for k, x in before if "/accuracy" in k and k in metrics]
        tell(" · ".join([*told, f"{time.perf_counter() - started:.0f} s", str(saved)]))
        tell(f"to see it: python tools/report.py {run_dir}")
    dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    argv = [x for x in sys.argv[1:] if not x.startswith("--local_rank")]  # the deepspeed launcher's
    main(tyro.cli(Args, args=argv, description=__doc__))
