"""Bradley-Terry reward model, for vision-language and text models.

A language model reads a prompt and a response; a linear layer without bias makes a score of the last hidden state:

    d = score(chosen) - score(rejected) - margin
    loss = weighted mean over prompts of the mean over their pairs of -log sigmoid(d) + center_coef * (sum of scores)^2

Papers: https://arxiv.org/abs/2203.02155 eq. (1), margins https://arxiv.org/abs/2307.09288 eq. (2), centering
https://arxiv.org/abs/2312.09244. Same interface: the RewardTrainers of TRL (huggingface/trl@f2cd577) and EasyDeL;
docs/reward_bt.md lists what differs. Start reading at main.

    python reward_bt.py                 # embedded default: tiny VLM on pairs of easy-VQA, minutes on two CPU cores
    python reward_bt.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset pairs.jsonl --learning-rate 5e-6
    torchrun --standalone --nproc_per_node=8 reward_bt.py --zero-stage 3 ...     # or: deepspeed reward_bt.py ...
"""

import functools
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from common import packing

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- args ----

TINY_VL = str(Path(__file__).resolve().parent / "assets" / "tiny_vl")


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # of the head, data order, and of the wrong answers of easy-vqa
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name

    # --- model and data ---
    model: str = TINY_VL  # folder or hub id of a vision-language or text model, or one of our checkpoints
    dataset: str = "easy-vqa"  # easy-vqa, .jsonl/.json/.csv/.parquet, saved folder, hub id; see load_data
    dataset_split: str = "train"  # of a hub id or a saved folder
    eval_datasets: tuple[
        str, ...
    ] = ()  # held-out sets, name=source; none: easy-vqa's test split beside easy-vqa
    eval_dataset_split: str = "test"  # as --dataset-split
    system_prompt: str | None = None  # for prompts that have no system message
    video_fps: float = 2.0  # frames per second that are taken from videos
    max_length: int = (
        1024  # tokens of a prompt and a response, those of pictures too; longer rows are left out
    )
    lora_rank: int = 0  # train adapters of this rank on the language model, and the head; 0 = all weights
    lora_alpha: float = 32.0  # the adapters' output is scaled by alpha / rank

    # --- algorithm ---
    total_steps: int = 300  # optimizer steps; 0 = as --epochs says
    epochs: float = 1.0  # passes over the data
    train_batch_size: int = 32  # prompts, each with a pair or a ranking, per optimizer step, over all ranks
    center_coef: float = 0.0  # weight of (chosen + rejected)^2 (TRL: off, advised 0.01; EasyDeL: 0.1)
    label_smoothing: float = 0.02  # probability that a label is wrong: above 0 the margins stay finite

    # --- optimizer ---
    learning_rate: float = 5e-4  # peak; pretrained models want about 5e-6, with LoRA 1e-4
    min_lr_ratio: float = 0.1  # after the warm-up it follows a cosine down to this fraction; 1 = constant
    warmup_steps: int = 10  # optimizer steps of linear warm-up
    weight_decay: float = 0.0  # of matrices (AdamW)
    adam_betas: tuple[float, float] = (0.9, 0.95)  # AdamW
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # bfloat16 (float32 master weights) on CUDA only
    zero_stage: Literal[0, 1, 2, 3] = 0  # shards 1 the optimizer, 2 + gradients, 3 + parameters
    offload_optimizer: bool = False  # keep optimizer states and the optimizer step on the CPU
    gradient_checkpointing: bool = False  # less memory, a third more time
    micro_batch_tokens: int = 8192  # tokens of one forward and backward on one rank

    # --- logging and checkpoints ---
    eval_steps: int = 150  # evaluate every so many steps, and at both ends; 0 = only there
    eval_samples: int = 1000  # prompts of each held-out set, a fixed random subset
    save_steps: int = 0  # checkpoint every so many steps, and at the end; 0 = only at the end
    save_total_limit: int = 2  # checkpoints kept, newest first
    track: Literal["off", "wandb", "tensorboard"] = (
        "off"  # log there too (wandb: see WANDB_PROJECT, WANDB_MODE)
    )


def check_args(args: Args) -> None:
    names = [item.partition("=")[0] for item in args.eval_datasets]
    for is_bad, message in (
        (
            min(args.train_batch_size, args.total_steps + 1, args.eval_samples) < 1,
            "counts must be at least 1",
        ),
        (
            not 0 <= args.label_smoothing < 0.5,
            "--label-smoothing must be in [0, 0.5): beyond, labels say nothing",
        ),
        (
            args.micro_batch_tokens < args.max_length,
            f"--micro-batch-tokens must hold --max-length {args.max_length}",
        ),
        (not all("=" in x for x in args.eval_datasets), "--eval-datasets: write each as name=source"),
        (len({*names}) < len(names), "--eval-datasets: two sets have the same name"),
        (args.offload_optimizer and args.zero_stage == 0, "--offload-optimizer needs --zero-stage 1 to 3"),
    ):
        if is_bad:
            fail(message)


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)  # on a line of its own, also under a progress bar
    raise SystemExit(2)


MAX_SKIPPED = 5  # updates in a row whose gradients are not finite: then the run stops
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # scores that count as the same


# ---- data ----

EASY_VQA_ANSWERS = (
    ("yes", "no"),
    ("circle", "rectangle", "triangle"),
    ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow"),
)


def load_rows(source: str, split: str):
    """A `datasets.Dataset` from easy-vqa, a local file or folder, or the hub."""
    import datasets

    datasets.disable_progress_bars()
    kind = Path(source).suffix[1:].replace("jsonl", "json")
    try:
        if source == "easy-vqa":  # 64 x 64 drawings, questions and 13 possible answers, inside the package
            import easy_vqa

            questions, answers, numbers = getattr(easy_vqa, f"get_{split}_questions")()
            paths = getattr(easy_vqa, f"get_{split}_image_paths")()
            images = [str(paths[i]) for i in numbers]
            return datasets.Dataset.from_dict({"prompt": questions, "image": images, "answer": answers})
        if Path(source).is_dir():
            rows = datasets.load_from_disk(source)
            return rows[split] if isinstance(rows, datasets.DatasetDict) else rows
        if kind in ("json", "csv", "parquet"):
            return datasets.load_dataset(kind, data_files=source, split="train")
        return datasets.load_dataset(source, split=split)
    except Exception as error:
        fail(f"{source} (split {split}) can't be read as a dataset: {error}")


def add_wrong_answers(rows, seed: int):
    """easy-vqa as pairs: the right answer is better than another one of its kind, drawn by the seed."""
    rng = np.random.default_rng(seed)
    others = {answer: [x for x in kind if x != answer] for kind in EASY_VQA_ANSWERS for answer in kind}
    wrong = [others[answer][rng.integers(len(others[answer]))] for answer in rows["answer"]]
    for name, answers in (("chosen", rows["answer"]), ("rejected", wrong)):
        rows = rows.add_column(name, [f"<answer>{answer}</answer>" for answer in answers])
    return rows


def load_data(args: Args, source: str, split: str, seed: int, model, processor) -> SimpleNamespace:
    """-> source, rows, and encode(indices): rows as prompts of common/packing.py, with their `responses`.

    Columns: `chosen` and `rejected`, or `responses`, best first: strings or messages after `prompt` (or
    `messages`), a string or a chat; or whole chats, whose common first messages are the prompt. `image(s)` and
    `video(s)` of the prompt, one or a list, see to_messages; `margin` and `weight`: numbers, else 0 and 1.
    """
    rows = load_rows(source, split)
    rows = add_wrong_answers(rows, seed) if source == "easy-vqa" else rows
    columns, special = set(rows.column_names), special_tokens(getattr(processor, "tokenizer", processor))
    if "responses" not in columns and not {"chosen", "rejected"} <= columns:
        fail(f"{source} has columns {', '.join(columns)}: rename yours to chosen and rejected, or responses")

    def encode(indices: list[int]) -> list[dict]:
        own = [rows[i] for i in indices]
        rankings = [read_ranking(args, row, Path(source).parent, special) for row in own]
        prompts = encode_rankings(model, processor, rankings)
        for i, row, ranking, prompt in zip(indices, own, rankings, prompts):
            longest = len(prompt["prompt_ids"]) + max(map(len, prompt["responses"]))
            if longest > args.max_length:
                raise ValueError(f"{longest} tokens are more than --max-length")
            weight, margin = (row.get(name) for name in ("weight", "margin"))
            texts = [
                "\n".join(part.get("text", "") for m in chat for part in m["content"]) for chat in ranking
            ]
            shown = {name: x for name, x in row.items() if isinstance(x, str | int | float)}
            prompt |= {"index": i, "shown": shown | {"row": i, "prompt": texts[0]}, "answers": texts[1:]}
            prompt |= {"margin": float(margin or 0), "weight": 1.0 if weight is None else float(weight)}
        return prompts

    return SimpleNamespace(
        source=source, rows=rows, encode=keep_usable(source, encode, 2 * args.train_batch_size)
    )


def keep_usable(source: str, encode: Callable, limit: int) -> Callable[[list[int]], list[dict]]:
    """encode(indices), a list, with rows that fail left out after a warning; the last results are kept."""
    kept = {}

    def encode_usable(indices: list[int]) -> list[dict]:
        new = [i for i in dict.fromkeys(indices) if i not in kept]
        try:
            kept.update(zip(new, encode(new)))
        except (
            Exception
        ):  # a bad row, or a processor whose output for several can't be taken apart: one by one
            for i in new:
                try:
                    kept[i] = encode([i])[0]
                except Exception as error:
                    kept[i] = None
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    tqdm.write(f"warning: {source} row {i} is left out: {reason}", file=sys.stderr)
        found = [kept[i] for i in indices if kept[i] is not None]
        for i in [*kept][:-limit]:
            del kept[i]
        return found

    return encode_usable


def special_tokens(tokenizer) -> re.Pattern:
    found = [re.escape(str(t)) for t in tokenizer.added_tokens_decoder.values() if t.special]
    return re.compile("|".join(found) or "(?!)")


def read_ranking(args: Args, row: dict, folder: Path, special: re.Pattern) -> list[list[dict]]:
    """-> the messages of the prompt, and those that each response adds to it, best first."""
    answers = row.get("responses") or [row["chosen"], row["rejected"]]
    answers = [[{"role": "assistant", "content": x}] if isinstance(x, str) else x for x in answers]
    prompt = row.get("prompt") or row.get("messages")
    if answers[0][0]["role"] != "assistant":  # whole chats
        shared = count_common(answers)
        prompt, answers = answers[0][:shared], [chat[shared:] for chat in answers]
    chats = [to_messages(args, prompt, row, folder, special)]
    chats += [to_messages(args, answer, {}, folder, special)[-len(answer) :] for answer in answers]
    if len(chats) < 3 or any(
        part["type"] != "text" for chat in chats[1:] for m in chat for part in m["content"]
    ):
        raise ValueError("a ranking needs two responses, and its pictures belong into the prompt")
    return chats


def count_common(rows: list[list]) -> int:
    """How many first items all have in common: [[1, 2, 3], [1, 2, 4, 5]] -> 2"""
    return sum(1 for _ in takewhile(lambda items: all(x == items[0] for x in items), zip(*rows)))


def encode_rankings(model, processor, rankings: list[list[list[dict]]]) -> list[dict]:
    """Of read_ranking -> what the K chats of each begin with as a prompt, and what is left, K x (R,), R >= 1, as its
    `responses`: token for token the chats as the processor sees them alone. Pictures are prepared once."""

    def run(chats: list[list[dict]]) -> Iterator[dict]:
        alone = len(rankings) == 1  # keep_usable's second try: some processors' output can't be taken apart
        for part in [[chat] for chat in chats] if alone else [chats] if chats else []:
            yield from encode_chats(processor, part)

    def text_only(chat: list[dict]) -> list[dict]:
        return [m | {"content": [part for part in m["content"] if part["type"] == "text"]} for m in chat]

    texts = run([text_only(prompt) + answer for prompt, *answers in rankings for answer in answers])
    whole = run([prompt + answers[0] for prompt, *answers in rankings if text_only(prompt) != prompt])
    found = []
    for prompt, *answers in rankings:
        encoded = [next(texts) for _ in answers]
        ids = [inputs["input_ids"][0] for inputs in encoded]
        shared = min(count_common([x.tolist() for x in ids]), min(map(len, ids)) - 1)
        responses = [x[shared:] for x in ids]
        inputs = next(whole) if text_only(prompt) != prompt else encoded[0]
        T = inputs["input_ids"].shape[1]
        P = T - len(responses[0])
        if P < 1 or not torch.equal(inputs["input_ids"][0, P:], responses[0]):
            raise ValueError("its responses don't follow one and the same prompt")
        inputs = {name: torch.as_tensor(x) for name, x in inputs.items()}
        inputs = {name: x[:, :P] if x.shape[:2] == (1, T) else x for name, x in inputs.items()}
        found.append(packing.make_prompt(model, inputs) | {"responses": responses})
    return found


def to_messages(args: Args, given: str | list, row: dict, folder: Path, special: re.Pattern) -> list[dict]:
    """A string or chat, and its row's pictures and videos -> messages whose contents are lists of parts, media
    opened and in their places: where <image> and <video> stand, or parts of such types; else first of all."""

    def defuse(text: str) -> str:
        """Data must not end a turn or stand for a picture: "<|im_end|>" -> "< |im_end|>"."""
        while special.search(text):
            text = special.sub(lambda m: f"{m[0][0]} {m[0][1:]}" if len(m[0]) > 1 else " ", text)
        return text

    messages, media, places = [], {}, {"image": [], "video": []}
    for kind in places:
        items = row.get(kind) or row.get(f"{kind}s") or []
        media[kind] = [*items] if isinstance(items, list) else [items]
    for message in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        text, marks = message["content"], "<image>|<video>" if message["role"] != "assistant" else "(?!)"
        if not isinstance(text, str):  # what parts hold themselves goes to the places that they mark
            for kind in media:
                media[kind] += [part[kind] for part in text if part.get(kind) is not None]
            text = "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in text)
        pieces = [piece for piece in re.split(f"({marks})", text) if piece]
        kinds = [piece[1:-1] if re.fullmatch(marks, piece) else "text" for piece in pieces]
        parts = [{"type": k} | ({"text": defuse(x)} if k == "text" else {}) for k, x in zip(kinds, pieces)]
        messages.append({"role": message["role"], "content": parts})
        for kind in places:
            places[kind] += [part for part in parts if part["type"] == kind]
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
    """A picture: PIL, bytes, {"bytes", "path"} or a path, relative to the dataset's file -> in RGB. A video: a
    path -> fps frames a second, (F, height, width, 3), and when they were taken."""
    from PIL import Image
    from transformers.video_utils import load_video

    if kind == "video":
        frames, taken = load_video(str(folder / source), fps=fps, backend="pyav")
        return {
            "video": frames,
            "taken": {k: taken[k] for k in ("total_num_frames", "fps", "frames_indices")},
        }
    source = (source["bytes"] or source["path"]) if isinstance(source, dict) else source
    source = io.BytesIO(source) if isinstance(source, bytes) else source
    source = folder / source if isinstance(source, str) else source
    return {"image": (source if isinstance(source, Image.Image) else Image.open(source)).convert("RGB")}


def encode_chats(processor, chats: list[list[dict]], **template) -> list[dict]:
    """The chat template of a processor, or of a text model's tokenizer -> what it makes of each chat."""
    how = {"tokenize": True, "return_dict": True} | template
    how |= {"return_tensors": "pt"} if len(chats) == 1 else {}
    counts = [
        {k: sum(p["type"] == k for m in c for p in m["content"]) for k in ("image", "video")} for c in chats
    ]
    taken = [
        part["taken"] for chat in chats for m in chat for part in m["content"] if part["type"] == "video"
    ]
    how |= {"processor_kwargs": {"video_metadata": taken, "do_sample_frames": False}} if taken else {}
    if not hasattr(processor, "tokenizer"):
        chats = [[m | {"content": "".join(p["text"] for p in m["content"])} for m in chat] for chat in chats]
    if processor.chat_template is None:
        batch = processor(["".join(m["content"] for m in chat) for chat in chats], **how)
    else:
        batch = processor.apply_chat_template(chats, **how)
    return [dict(batch)] if len(chats) == 1 else packing.split_batch(batch, counts)


def batch_indices(start: int, count: int, num_rows: int, seed: int) -> list[int]:
    """Rows start ... start + count - 1 of one endless stream of shuffled epochs."""
    epochs = range(start // num_rows, (start + count - 1) // num_rows + 1)
    order = np.concatenate([np.random.default_rng([seed, e]).permutation(num_rows) for e in epochs])
    return order[start - epochs[0] * num_rows :][:count].tolist()


class Rankings(NamedTuple):
    """n prompts with their ranked responses, prompt by prompt; the same on every rank."""

    prompts: list[dict]  # (n,) of packing.summary; tokens, of the responses too; what is shown
    sizes: list[int]  # (n,): responses of each
    responses: list[Tensor]  # S x (R_b,): tokens after the prompt, best first
    margins: list[float]  # (n,)
    weights: list[float]  # (n,)


def gather_rankings(data, indices: list[int]) -> Rankings:
    """Some rows, dealt out to the ranks, encoded, and gathered on all of them."""
    own = data.encode(np.array_split(np.array(indices, dtype=int), WORLD_SIZE)[RANK].tolist())
    responses, sizes = [x for p in own for x in p["responses"]], [len(p["responses"]) for p in own]
    tokens = [len(p["prompt_ids"]) + sum(map(len, p["responses"])) for p in own]
    told = [
        packing.summary(p) | {"tokens": n} | {k: p[k] for k in ("shown", "answers")}
        for p, n in zip(own, tokens)
    ]
    mine = Rankings(told, sizes, responses, [p["margin"] for p in own], [p["weight"] for p in own])
    gathered = [mine] * WORLD_SIZE
    if WORLD_SIZE > 1:  # alone it would start threads in gloo, see sum_over_ranks
        dist.all_gather_object(gathered, mine)
    rankings = join(gathered)
    if len(rankings.prompts) * 2 < len(indices):
        fail(f"more than half of {len(indices)} rows of {data.source} can't be used: see the warnings")
    return rankings


def join(parts: list[Rankings]) -> Rankings:
    return Rankings(*(sum(lists, []) for lists in zip(*parts)))


def packs_of_rankings(args: Args, engine, data, rankings: Rankings) -> Iterator:
    """This rank's packs."""
    ends = np.cumsum(rankings.sizes).tolist()
    groups = [(g, [*range(end - K, end)]) for g, (K, end) in enumerate(zip(rankings.sizes, ends))]
    given = groups, rankings.prompts, data.encode, rankings.responses, args.micro_batch_tokens
    how = {"packed": packing.is_packed(engine.module.model), "media_everywhere": args.zero_stage > 0}
    for pack in packing.packs_of_rank(*given, (RANK, WORLD_SIZE), **how):
        yield pack.to(engine.device)


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
        name = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        if hasattr(module, name):
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
    added out of place, W + alpha / rank B A: merging in place would wear bf16 weights down, sync by sync."""
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
            weights[name.replace(".base_layer.", ".")] = weight
    return weights | {alias: weights[name] for alias, name in model.all_tied_weights_keys.items()}


class Head(nn.Linear):
    """(S, H) -> (S,) in fp32: bf16 scores would tie."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())[:, 0]


class RewardModel(nn.Module):
    """As DeepSpeed runs it: pack -> scores (S,), read at the last token of each response, wherever its row has it."""

    all_tied_weights_keys = {}  # a backbone has none

    def __init__(self, model):
        super().__init__()
        H = model.config.get_text_config().hidden_size
        self.model, self.score = model, Head(H, 1, bias=False, dtype=model.dtype)
        nn.init.normal_(self.score.weight, std=(H + 1) ** -0.5)  # https://arxiv.org/abs/2009.01325

    def forward(self, pack) -> Tensor:
        return self.score(packing.forward_hidden(self.model, pack, last=True))


def load_reward_model(name: str, dtype: torch.dtype) -> RewardModel:
    """The backbone of a language model with a new head, or with its own if it is one of our checkpoints."""
    from safetensors.torch import load_file

    module, head = RewardModel(load_model(name, dtype).base_model), Path(name) / "score.safetensors"
    module.score.load_state_dict(
        {"weight": load_file(head)["score.weight"]} if head.is_file() else {}, strict=False
    )
    return module


def set_pad_token(tokenizer, last: int) -> None:
    """A pad token that chats don't end with: transformers' classifiers read the score at the last other one."""
    names = [tokenizer.pad_token, tokenizer.eos_token, *tokenizer.all_special_tokens]
    names += [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
    usable = (name for name in names if name is not None and tokenizer.convert_tokens_to_ids(name) != last)
    tokenizer.pad_token = next(usable, None) or fail(
        "--model: chats end with its tokenizer's only special token"
    )


# ---- pure math: tensors in, tensors and metrics out ----


def ranking_pairs(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All pairs of each ranking. sizes: responses per prompt, best first, prompts one after the other: (S,) in all
    -> chosen (B,) and rejected (B,) places in that row, owner (B,): prompt of a pair, share (B,) = 1 / its pairs.

    sizes [2, 3] -> chosen [0, 2, 2, 3], rejected [1, 3, 4, 4], owner [0, 1, 1, 1], share [1, 1/3, 1/3, 1/3]
    """
    pairs, start = [], 0
    for g, K in enumerate(sizes):
        pairs += [(start + i, start + j, g, 2 / (K * (K - 1))) for i, j in combinations(range(K), 2)]
        start += K
    chosen, rejected, owner, share = zip(*pairs)
    return torch.tensor(chosen), torch.tensor(rejected), torch.tensor(owner), torch.tensor(share)


def bradley_terry_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, margins: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each preference, and the centering term, all (B,).

    d           = chosen_rewards - rejected_rewards - margins
    bt_loss     = -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)
    center_loss = (chosen_rewards + rejected_rewards)^2

    chosen [1, 0], rejected [0, 2], margins [0, .5] -> d [1, -2.5]: bt_loss [.3133, 2.5789], center_loss [1, 4]
    Smoothing: as in cDPO, https://arxiv.org/abs/2305.18290.
    """
    # (B, 1) - (B,) would be (B, B)
    assert chosen_rewards.dim() == 1 and chosen_rewards.shape == rejected_rewards.shape == margins.shape
    d = chosen_rewards - rejected_rewards - margins
    bt_loss = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
    return bt_loss, (chosen_rewards + rejected_rewards) ** 2


def ranking_loss(
    rewards: Tensor,
    sizes: list[int],
    margins: Tensor,
    weights: Tensor,
    label_smoothing: float,
    center_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over n prompts, by weight, of the mean over a prompt's pairs of bt_loss + center_coef * center_loss, and
    of both parts: a prompt counts once, however many of its responses are ranked.

    rewards (S,) in the order of `sizes`, margins (n,), weights (n,)

    rewards [1, 0, 0, 0], sizes [2, 2], margins [0, 0], weights [3, 1], no smoothing, center_coef .1
    -> (3 * (.3133 + .1) + .6931) / 4 = .4832
    """
    assert rewards.shape == (sum(sizes),) and margins.shape == weights.shape == (len(sizes),)
    chosen, rejected, owner, share = (x.to(rewards.device) for x in ranking_pairs(sizes))  # (B,)
    bt_loss, center_loss = bradley_terry_loss(
        rewards[chosen], rewards[rejected], margins[owner], label_smoothing
    )
    by_pair = weights[owner] * share / weights.sum()  # (B,)
    parts = {"rm/bt_loss": (by_pair * bt_loss).sum(), "rm/center_loss": (by_pair * center_loss).sum()}
    return parts["rm/bt_loss"] + center_coef * parts["rm/center_loss"], parts


def calibration_error(margins: Tensor, share: Tensor, num_bins: int = 10) -> Tensor:
    """Expected calibration error of sigmoid(|chosen - rejected|), the probability that the higher score is the
    better one: sum over bins of weight * |accuracy - confidence|, https://arxiv.org/abs/1706.04599.

    margins (B,) = chosen - rejected, share (B,): weights of the pairs; bins of equal width over [0.5, 1]

    margins [2, -2, 0], share [1, 1, 1]: confidences .881, .881, .5, right 1, 0, 1/2 -> (2 * |.5 - .881| + 0) / 3 = .2539
    """
    confidence = margins.abs().sigmoid()
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(0, num_bins - 1)
    gap = torch.zeros(num_bins).to(margins).index_add(0, bins, share * (preferred(margins) - confidence))
    return gap.abs().sum() / share.sum()


def preferred(margins: Tensor) -> Tensor:
    """1 where the chosen response has the higher score, one half for ties, else 0."""
    return (torch.sign(margins) + 1) / 2


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's; 0 where one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / (x.square().sum() * y.square().sum()).sqrt().clamp(min=1e-12)


def ranking_metrics(
    rewards: Tensor,
    lengths: Tensor,
    sizes: list[int],
    margins: Tensor,
    weights: Tensor,
    smoothing: float,
    center: float,
) -> dict[str, Tensor]:
    """Of the scores (S,) of responses of `lengths` (S,) tokens; sizes, margins (n,), weights (n,) of their n prompts.
    Losses as trained. The others: means over prompts of means over their pairs, whatever the weights.
    """
    rewards, lengths, margins, weights = (x.double() for x in (rewards, lengths, margins, weights))
    loss, parts = ranking_loss(rewards, sizes, margins, weights, smoothing, center)
    chosen, rejected, _, share = ranking_pairs(sizes)
    per_pair, gap = share.double() / len(sizes), rewards[chosen] - rewards[rejected]  # (B,)
    size = torch.tensor(sizes)
    owner = torch.repeat_interleave(size)  # (S,): prompt of each response

    def within(x: Tensor) -> Tensor:
        """Deviation from the mean of the prompt's responses."""
        return x - (torch.zeros(len(sizes)).to(x).index_add(0, owner, x) / size)[owner]

    metrics = {"rm/loss": loss, **parts} | {
        "rm/accuracy": (per_pair * preferred(gap)).sum(),
        "rm/margin": (per_pair * gap).sum(),
        "rm/length_correlation": correlation(within(rewards), within(lengths)),
        "rm/ece": calibration_error(gap, share.double()),
    }
    for name, side in (("chosen", rewards[chosen]), ("rejected", rewards[rejected])):
        mean = (per_pair * side).sum()
        metrics[f"rm/{name}_rewards"] = mean
        metrics[f"rm/{name}_std"] = (per_pair * (side - mean).square()).sum().sqrt()
    return metrics


# ---- proof: packing against the unmodified model ----


def pack_if_equal(engine, probes: list[dict]) -> None:
    """Pack if packed scores are those of the unmodified model on some real prompts; say so."""
    model = engine.module.model
    gap, reason = max(packing.packing_gap(model, engine, prompt) for prompt in probes)
    if gap > TOLERANCE[model.dtype]:
        tell(f"warning: no packing ({reason}): responses run one by one, exact but slow")
    else:
        packing.switch_attention(model, "packed")
        tell(f"packed scores = those of the unmodified model within {gap:.0e}")


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

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU it would compile this for a minute, for nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return device


def sum_over_ranks(table: Tensor, device) -> Tensor:
    if WORLD_SIZE == 1:  # gloo copies in its own thread: with a second OpenMP team no thread spins any more
        return table.cpu()
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


def make_engine(args: Args, module: nn.Module, dtype: torch.dtype, total_updates: int = 0):
    """DeepSpeed engine with AdamW (no decay on vectors) and schedule; a frozen module has neither.

    One pack is one micro-batch. Batch sizes stay 1 here: the number of packs per optimizer step varies, so
    `set_gradient_accumulation_boundary` ends a step, and the losses carry their own global denominators.
    """
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": False,
            "reduce_scatter": dist.get_backend() != "gloo",  # gloo has none
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {"device": "cpu" if args.offload_optimizer else "none"},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW runs on the CPU too, and needs no compiler
        "steps_per_print": 2**31,
    }
    if args.zero_stage == 3:  # read outside its own module's forward
        deepspeed.zero.register_external_parameter(module, module.model.get_output_embeddings().weight)
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
    """Clip, step, advance the schedule -> gradient norm before clipping, and whether the step was taken:
    gradients are reduced over ranks before they are looked at, so all ranks decide alike about them."""
    if not engine.zero_optimization() and not engine.bfloat16_enabled():  # this path has no check of its own
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        engine.step() if norm.isfinite() else engine.zero_grad()
        return float(norm), bool(norm.isfinite())
    engine.step()
    taken, optimizer = engine.was_step_applied(), engine.optimizer
    # A parameter without gradients in the next step, such as a vision tower's in one without pictures,
    # would have those of this step again (DeepSpeed 0.19): ZeRO-3 keeps them here, with offload in groups.
    kept = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        kept += [group.grad for group in getattr(optimizer, name, [])]
    for gradients in filter(torch.is_tensor, kept):
        gradients.zero_()
    return float(engine.get_global_grad_norm()) if taken else math.nan, taken


# ---- update ----


def update_reward(args: Args, engine, data, rankings: Rankings) -> tuple[dict[str, float], bool]:
    """One optimizer step -> metrics, and whether it was taken."""
    # Where a prompt's responses lie in several packs, a first pass tells each pack the scores of the others.
    longest = max(prompt["tokens"] for prompt in rankings.prompts)
    split = longest > args.micro_batch_tokens or not packing.is_packed(engine.module.model)
    known = compute_scores(args, engine, data, rankings) if split else torch.zeros(len(rankings.responses))
    known, table = known.to(engine.device), torch.zeros(len(known), device=engine.device)  # (S,), (S,)
    margins, weights = (torch.tensor(x, device=engine.device) for x in (rankings.margins, rankings.weights))
    packs = list(packs_of_rankings(args, engine, data, rankings))
    for k, pack in enumerate(packs):
        engine.set_gradient_accumulation_boundary(k == len(packs) - 1)
        rows = torch.tensor([b for b, _ in pack.rows], dtype=torch.long, device=engine.device)
        rewards = engine(pack)  # (rows,)
        table[rows] = rewards.detach()
        # Of the whole step, on all ranks; other packs' scores are constants here.
        whole = known.index_put((rows,), rewards)  # (S,)
        loss, _ = ranking_loss(
            whole, rankings.sizes, margins, weights, args.label_smoothing, args.center_coef
        )
        # DeepSpeed averages over ranks, hence the factor; it must not divide by the number of packs.
        engine.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
    norm, taken = optimizer_step(engine)
    metrics = score_metrics(args, sum_over_ranks(table, engine.device), rankings)
    return metrics | {"train/grad_norm": norm if taken else 0.0}, taken


def score_metrics(args: Args, rewards: Tensor, rankings: Rankings) -> dict[str, float]:
    lengths = torch.tensor([len(response) for response in rankings.responses])
    given = (
        torch.tensor(rankings.margins),
        torch.tensor(rankings.weights),
        args.label_smoothing,
        args.center_coef,
    )
    metrics = ranking_metrics(rewards, lengths, rankings.sizes, *given)
    return {name: float(value) for name, value in metrics.items()}


@torch.no_grad()
def compute_scores(args: Args, engine, data, rankings: Rankings) -> Tensor:
    """Of all responses, (S,)."""
    table = torch.zeros(len(rankings.responses), device=engine.device)
    for pack in packs_of_rankings(args, engine, data, rankings):
        table[[b for b, _ in pack.rows]] = engine(pack)
    return sum_over_ranks(table, engine.device)


# ---- evaluate ----


def evaluate(args: Args, engine, name: str, data) -> tuple[dict[str, float], list[dict]]:
    """A fixed subset of a held-out set -> metrics, and every pair with its scores."""
    indices = np.sort(np.random.default_rng(0).permutation(len(data.rows))[: args.eval_samples]).tolist()
    batches, scores, n = [], [], args.train_batch_size
    for start in range(0, len(indices), n):
        batches.append(gather_rankings(data, indices[start : start + n]))
        scores.append(compute_scores(args, engine, data, batches[-1]))
    rewards, rankings, samples = torch.cat(scores), join(batches), []
    starts = np.cumsum([0, *rankings.sizes]).tolist()
    for i, j, g in zip(*(x.tolist() for x in ranking_pairs(rankings.sizes)[:3])):
        prompt, own = rankings.prompts[g], {"phase": f"eval_{name}", "margin": float(rewards[i] - rewards[j])}
        for side, b in (("chosen", i), ("rejected", j)):
            own |= {side: prompt["answers"][b - starts[g]], f"{side}_reward": float(rewards[b])}
        samples.append(prompt["shown"] | own)
    metrics = score_metrics(args, rewards, rankings)
    return {key.replace("rm/", f"eval/{name}/"): value for key, value in metrics.items()}, samples


# ---- save, resume, log ----


def tell(message: str) -> None:
    """One line, from rank 0, also under a progress bar."""
    if RANK == 0:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()


def checkpoints(run_dir: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted(run_dir.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name.split("-")[1]))


def find_run(args: Args) -> tuple[Path, Path | None]:
    """-> the run's folder, and the checkpoint to go on from."""
    name = f"{Path(__file__).stem}-{Path(args.model).name}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = [Path(args.output_dir) / (args.run_name or name), None]
    if args.resume == "auto":
        found[1] = next(reversed(checkpoints(found[0])), None)
    elif args.resume is not None:
        found = [Path(args.resume).resolve().parent, Path(args.resume)]
        if not (found[1] / "state").is_dir():
            fail(f"--resume {args.resume} is no checkpoint: it has no folder named state")
    elif RANK == 0 and found[0].exists():
        fail(f"{found[0]} exists already: choose another --run-name, or go on with --resume auto")
    dist.broadcast_object_list(found)  # the name holds a time: all ranks take rank 0's
    return found[0], found[1]


def save_checkpoint(
    args: Args, run_dir: Path, engines: dict, state: dict, export: Callable[[Path], None]
) -> Path:
    """checkpoint-N: a Hugging Face folder, by export, that loads by itself; and state/ for --resume. Collective."""
    final = run_dir / f"checkpoint-{state['step']}"
    folder = final.with_suffix(".tmp")  # renamed when all of it is written
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(str(folder / "state" / name), tag="engine", client_state={"ours": state})
    export(folder)
    if RANK == 0:
        shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed before it
        folder.rename(final)
        for old in checkpoints(run_dir)[: -args.save_total_limit]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def export_reward_model(module: RewardModel, processor, folder: Path) -> None:
    """The merged backbone, its head in score.safetensors, and the processor; a text model is a classifier with
    one label, which has the head too. Collective."""
    from safetensors.torch import save_file

    weights = {name: weight.cpu() for name, weight in merged_state_dict(module).items()}
    if RANK > 0:
        return
    config, kind, name = module.model.config, transformers.AutoModelForSequenceClassification, "score.weight"
    save_file({name: weights[name]}, folder / "score.safetensors")
    if hasattr(config, "vision_config"):
        kind = transformers.AutoModel
    else:
        config.num_labels, config.pad_token_id = 1, processor.pad_token_id
    with torch.device("meta"):  # the same architecture, without adapters
        plain = kind.from_config(config, dtype=module.model.dtype)
    names = set(plain.state_dict())
    prefix = f"{plain.base_model_prefix}." if name in names else ""
    weights = {re.sub(r"^model\.", prefix, name): weight for name, weight in weights.items()}
    plain.save_pretrained(
        folder, state_dict={name: weight for name, weight in weights.items() if name in names}
    )
    processor.save_pretrained(folder)


def start_logging(args: Args, run_dir: Path, step: int) -> Callable[[dict[str, float], list[dict]], None]:
    """-> log(metrics, samples): rank 0 writes to metrics.jsonl, samples.jsonl, and where --track says. What an
    interrupted run wrote after step, its last checkpoint, is dropped."""
    if RANK > 0:
        return lambda metrics, samples: None
    run_dir.mkdir(parents=True, exist_ok=True)
    for path in run_dir.glob("*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        path.write_text("".join(line for line in lines if step and json.loads(line)["train/step"] <= step))
    (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
    if args.track == "wandb":
        import wandb

        known = {"id": run_dir.name, "name": run_dir.name, "config": asdict(args), "dir": run_dir}
        wandb.init(**known, resume="allow")
    if args.track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_dir), purge_step=step + 1)

    def log(metrics: dict[str, float], samples: list[dict]) -> None:
        now = {"train/step": metrics["train/step"]}
        for name, lines in (("metrics", [metrics]), ("samples", [now | sample for sample in samples])):
            with (run_dir / f"{name}.jsonl").open("a") as file:
                file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
        if args.track == "wandb":
            wandb.log(metrics, step=metrics["train/step"])
        if args.track == "tensorboard":
            for name, value in metrics.items():
                writer.add_scalar(name, value, metrics["train/step"])

    return log


# ---- main ----


def main(args: Args) -> dict[str, float]:
    """Train; -> the last metrics."""
    # --- 1. setup ---
    started = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    device = init_distributed()
    run_dir, checkpoint = find_run(args)
    best = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, best if args.dtype == "auto" else args.dtype)

    # --- 2. models and engines ---
    torch.manual_seed(args.seed)  # of the head and LoRA's first weights
    module = load_reward_model(args.model, dtype)
    model, kind = (
        module.model,
        "AutoProcessor" if hasattr(module.model.config, "vision_config") else "AutoTokenizer",
    )
    processor = getattr(transformers, kind).from_pretrained(args.model)
    data = load_data(args, args.dataset, args.dataset_split, args.seed, model, processor)
    total_steps = args.total_steps or math.ceil(args.epochs * len(data.rows) / args.train_batch_size)
    if args.lora_rank:
        model.requires_grad_(False)
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine = make_engine(args, module, dtype, total_steps)
    state = {"step": 0, "skipped": 0}  # updates skipped in a row
    if checkpoint is not None:
        state = engine.load_checkpoint(str(checkpoint / "state" / "reward"), tag="engine")[1]["ours"]

    # --- 3. data ---
    sources = dict(item.split("=", 1) for item in args.eval_datasets)
    if not sources and args.dataset == "easy-vqa":
        sources = {"easy-vqa": "easy-vqa"}
    eval_sets = {
        name: load_data(args, source, args.eval_dataset_split, 0, model, processor)
        for name, source in sources.items()
    }
    log = start_logging(args, run_dir, state["step"])
    tell(f"{run_dir}: {len(data.rows)} rows, {total_steps} steps, {WORLD_SIZE} rank(s), {device}, {dtype}")
    prompts = data.encode([*range(min(16, len(data.rows)))]) or fail(f"{args.dataset}: no row can be used")
    if kind == "AutoTokenizer":
        set_pad_token(processor, int(prompts[0]["responses"][0][-1]))
    pack_if_equal(engine, [*{packing.summary(prompt)["kinds"]: prompt for prompt in prompts}.values()])
    received, stopped, saved = [], False, checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):  # save after this step, and end
        signal.signal(number, lambda number, frame: received.append(number))

    def evaluate_all() -> tuple[dict[str, float], list[dict]]:
        metrics, samples = {}, []
        for name, held_out in eval_sets.items():
            found = evaluate(args, engine, name, held_out)
            metrics, samples = metrics | found[0], samples + found[1]
        return metrics, samples

    if eval_sets and state["step"] == 0:
        metrics, samples = evaluate_all()
        log({"train/step": 0, "train/episode": 0, **metrics}, samples)
    steps = range(state["step"] + 1, total_steps + 1)
    hidden = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step instead
    for step in (bar := tqdm(steps, "reward", total_steps, initial=state["step"], disable=hidden)):
        # --- 7. update ---
        start = time.perf_counter()
        wanted = batch_indices(
            (step - 1) * args.train_batch_size, args.train_batch_size, len(data.rows), args.seed
        )
        rankings = gather_rankings(data, wanted)
        metrics, taken = update_reward(args, engine, data, rankings)
        state = {"step": step, "skipped": 0 if taken else state["skipped"] + 1}
        seconds = time.perf_counter() - start

        # --- 9. log ---
        metrics |= {
            "train/step": step,
            "train/episode": step * args.train_batch_size,
            "train/epoch": step * args.train_batch_size / len(data.rows),
            "train/learning_rate": engine.get_lr()[0],
            "train/skipped_updates": int(not taken),
            "rollout/prompts_dropped": len(wanted) - len(rankings.prompts),
            "time/total": seconds,
            "time/tokens_per_second": sum(prompt["tokens"] for prompt in rankings.prompts) / seconds,
        }
        shown = {key: f"{metrics[f'rm/{key}']:.3f}" for key in ("loss", "accuracy")}
        bar.set_postfix(shown)

        # --- 10. eval and save ---
        last, hopeless, samples = step == total_steps, state["skipped"] == MAX_SKIPPED, []
        if eval_sets and (last or (args.eval_steps and step % args.eval_steps == 0)):
            evaluated, samples = evaluate_all()
            metrics |= evaluated
            shown |= {f"held-out {name}": f"{evaluated[f'eval/{name}/accuracy']:.3f}" for name in eval_sets}
        log(metrics, samples)
        if hidden:
            tell(f"step {step} of {total_steps}, {seconds:.2f} s: {shown}")
        stopped = bool(sum_over_ranks(torch.tensor(len(received)), device)) and not last  # on all ranks alike
        if last or stopped or hopeless or (args.save_steps and step % args.save_steps == 0):
            export = functools.partial(export_reward_model, module, processor)
            saved = save_checkpoint(args, run_dir, {"reward": engine}, state, export)
        if hopeless:
            fail(
                f"{MAX_SKIPPED} updates in a row had gradients that are not finite; {saved} has the weights before"
            )
        if stopped:
            break

    # --- 11. finish ---
    if stopped:
        tell(f"stopped by a signal after step {step}; go on with --resume {saved}")
    elif RANK == 0:
        before = json.loads((run_dir / "metrics.jsonl").read_text().partition("\n")[0])
        keys = [key for key in before if key.endswith(("/accuracy", "/ece")) and key in metrics]
        told = [f"{key} {before[key]:.3f} -> {metrics[key]:.3f}" for key in keys]
        tell(" · ".join([*told, f"{time.perf_counter() - started:.0f} s", str(saved)]))
        tell(f"for a report: python tools/report.py {run_dir}")
    dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    argv = [x for x in sys.argv[1:] if not x.startswith("--local_rank")]  # the deepspeed launcher's
    main(tyro.cli(Args, args=argv, description=__doc__))
