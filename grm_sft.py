"""GRM SFT: a vision-language model learns to write verdicts on two candidates:
"<think>image 1 has no triangle</think><answer>Image 2 is better</answer>".

Pairs are shown in both orders; verdicts are written, their probabilities asked for. Papers:
https://arxiv.org/abs/2408.15240, https://arxiv.org/abs/2505.03318. docs/grm_sft.md lists what differs from
GRMTrainerVL (opendilab/LightRFT@49e62cb). Start reading at main.

    python grm_sft.py                   # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
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
    seed: int = 1  # of data order and easy-vqa's pairs
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # folder, hub id
    dataset: str = "easy-vqa"  # easy-vqa, .jsonl/.json/.csv/.parquet, saved folder, hub id; see load_data
    dataset_split: str = "train"  # of easy-vqa, a hub id or a saved folder
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


def check_args(args: Args) -> None:
    for is_bad, message in (
        (min(args.train_batch_size, args.total_steps) < 1, "counts must be at least 1"),
        (args.micro_batch_tokens < args.max_length, "--micro-batch-tokens must hold --max-length"),
        (args.offload_optimizer and args.zero_stage == 0, "--offload-optimizer needs --zero-stage 1 to 3"),
        (args.resume == "auto" and args.run_name is None, "--resume auto needs --run-name"),
    ):
        if is_bad:
            fail(message)


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- data ----

EASY_VQA_KINDS = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"
VERDICTS = {"1": "{} 1 is better", "2": "{} 2 is better", "tie": "Both are equally good"}
SWAPPED = {"1": "2", "2": "1", "tie": "tie", "first": "second", "second": "first"}
SIDE = r"(?i)(?<=\b{0} )[12]\b|\b(?:first|second)(?= {0}\b)"  # in reasoning


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


def make_pair(row: dict, rng: np.random.Generator) -> dict:
    """easy-VQA: the answer against a wrong one of its kind, on drawn sides."""
    kind = next(kind.split() for kind in EASY_VQA_KINDS if row["answer"] in kind.split())
    sides = [row["answer"], str(rng.choice([other for other in kind if other != row["answer"]]))]
    first = int(rng.integers(2))
    sides = {"answer_0": sides[first], "answer_1": sides[1 - first], "verdict": str(1 + first)}
    return row | sides | {"reasoning": row["answer"]}


def load_data(args: Args, source: str, split: str, model, processor, training: bool) -> SimpleNamespace:
    """-> source, tokenizer, encode, groups of entries (2 * row; + 1: a pair with its sides exchanged).

    Columns of pairs: `prompt`; `image_0`, `image_1` or `video_0`, `video_1` or texts, `answer_0`, `answer_1`;
    `verdict`: 1, 2 or tie; optional `reasoning`, `image(s)`, `video(s)` of the prompt. Chats: `messages`, all
    of whose assistant turns are trained, `image(s)`, `video(s)`."""
    rows, groups, begun = load_rows(source, split), defaultdict(list), {"whole": not training}
    known = {"messages", "verdict", "answer"} & {*rows.column_names}  # the last alone: easy-vqa
    if not known:
        fail(f"{source} has columns {', '.join(rows.column_names)}: it needs messages, or a verdict")
    limit = (args.train_samples if training else args.eval_samples) or None
    few = rows.select(chosen := np.sort(np.random.default_rng(0).permutation(len(rows))[:limit]))
    verdicts = few["verdict"] if "verdict" in known else [known == {"answer"} or None] * len(few)
    kinds = {name: str(rows.features.get(name)) for name in ("image", "images", "video", "videos")}
    media = [few[name] for name, kind in kinds.items() if re.match("(List|Value).*string", kind)]
    for i, verdict, *names in zip(chosen.tolist(), verdicts, *media):
        groups[str(names) if any(names) else i] += [2 * i] if verdict is None else [2 * i, 2 * i + 1]

    @functools.lru_cache(2 * args.train_batch_size)
    def encode(entry: int) -> dict | None:
        try:
            row, rng = rows[entry // 2], np.random.default_rng([args.seed if training else 0, entry // 2])
            row = make_pair(row, rng) if known == {"answer"} else row
            return encode_row(args, model, processor, row, entry, Path(source).parent, begun)
        except Exception as error:
            tqdm.write(f"warning: {source} row {entry // 2} is left out: {error!s:.300}", file=sys.stderr)

    usable = {"encode": lambda entries: [row for row in map(encode, entries) if row]}
    tokenizer = getattr(processor, "tokenizer", processor)
    return SimpleNamespace(source=source, tokenizer=tokenizer, groups=[*groups.values()], **usable)


def encode_row(args: Args, model, processor, row: dict, entry: int, folder: Path, begun: dict) -> dict:
    """-> index, row, noun, truth (the verdict), samples: of each answer a prompt of begin_prompt, and the ids
    (R,) that follow, trained from `start` on."""
    chat, tokenizer = make_chat(row, entry % 2 == 1), getattr(processor, "tokenizer", processor)
    messages, samples = to_messages(args, chat, folder, tokenizer), []
    for n, start, ids in split_chat(processor, messages, end_token_ids(model, tokenizer)):
        k = begin_prompt(model, processor, messages[:n], ids[:start], begun)
        own = {"index": (entry, len(samples)), "ids": torch.tensor(ids[k:]), "start": start - k}
        samples.append(begun | own)
        if (length := begun["length"] + len(ids) - k) > args.max_length:
            raise ValueError(f"{length} tokens are more than --max-length")
    if not samples:
        raise ValueError("no assistant's turn")
    known = {"noun": chat.get("noun", ""), "truth": chat.get("verdict")}
    return {"index": entry, "row": row, "samples": samples, **known}


def make_chat(row: dict, swap: bool) -> dict:
    """A pair -> a chat, its verdict, and noun: what the candidates are called."""
    if row.get("messages"):
        return row
    kinds = [kind for kind in ("image", "video", "answer") if row.get(f"{kind}_0") is not None]
    if not kinds or (verdict := str(row["verdict"])) not in VERDICTS:
        raise ValueError("a pair needs two candidates, a verdict: 1, 2 or tie")
    sides, noun = [row[f"{kinds[0]}_0"], row[f"{kinds[0]}_1"]], kinds[0].capitalize()
    prompt, thought, media = row["prompt"], row.get("reasoning") or "", {}
    if swap:
        sides, verdict = sides[::-1], SWAPPED[verdict]
        thought = re.sub(SIDE.format(noun), lambda found: SWAPPED[found[0].lower()], thought)
    for name in packing.MEDIA:
        items = row.get(name) or row.get(f"{name}s") or []
        items = items if isinstance(items, list) else [items]
        prompt = prompt if f"<{name}>" in prompt else f"<{name}>" * len(items) + prompt
        media[f"{name}s"] = items + (sides if name == kinds[0] else [])
    shown = [re.sub("<(image|video)>", r"< \1>", x) if noun == "Answer" else f"<{kinds[0]}>" for x in sides]
    asked = f"{prompt}\n{noun} 1: {shown[0]}\n{noun} 2: {shown[1]}"
    said = (f"<think>{thought}</think>" if thought else "") + write_verdict(verdict, noun)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return media | {"messages": turns, "noun": noun, "verdict": verdict}


def write_verdict(verdict: str, noun: str) -> str:
    return f"<answer>{VERDICTS[verdict].format(noun)}</answer>"


def read_verdict(text: str) -> str | None:
    """None where the text has not exactly one <answer>, or another sentence in it."""
    sentence = "(?:Image|Video|Answer) ([12]) is better|Both are equally good"
    found = re.findall(f"<answer>(?:{sentence})</answer>", text)
    return found[0] or "tie" if len(found) == text.count("<answer>") == 1 else None


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


def end_token_ids(model, tokenizer) -> list[int]:
    ids = model.generation_config.eos_token_id
    return sorted({*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None})


def split_chat(processor, chat: list[dict], end_ids: list[int]) -> list[tuple[int, int, list[int]]]:
    """A chat -> of each assistant message its number, start, and the tokens up to the EOS after it (which the
    last one always gets), a picture being one. Found by counting: the tokens of the chat up to an answer, and
    up to its end, must be how the whole begins."""
    tokenizer, answers = getattr(processor, "tokenizer", processor), []
    texts = [m | {"content": "".join(p.get("text", "") for p in m["content"])} for m in chat]

    def tokens(n: int, prompted: bool) -> list[int]:
        given = (texts if tokenizer is processor else chat)[:n]
        how = {"chat_template": processor.chat_template, "add_generation_prompt": prompted}
        return tokenizer.apply_chat_template(given, return_dict=False, **how)

    whole = [*tokens(len(chat), False), tokenizer.eos_token_id]
    for n, message in enumerate(chat):
        if message["role"] == "assistant":
            last, head = n == len(chat) - 1, tokens(n, True)
            body = whole[:-1] if last else tokens(n + 1, False)
            if whole[: len(head)] != head or whole[: len(body)] != body:
                raise ValueError(f"the chat template writes message {n} differently if others follow")
            ends = [t + 1 for t in range(len(head), len(body)) if whole[t] in end_ids]
            answers.append((n, len(head), whole[: ends[0] if ends else len(body) + last]))
    return answers


def begin_prompt(model, processor, messages: list[dict], head: list[int], begun: dict) -> int:
    """begun becomes a prompt of common/packing.py, if it isn't yet: messages up to the last picture, or all
    (without one, or begun["whole"]) -> its part of head, their tokens with pictures as one."""
    media_ids = packing.media_token_ids(model.config)
    places = [t + 1 for t, token in enumerate(head) if token in media_ids]
    n = places[-1] if places and not begun["whole"] else len(head)
    key = hashlib.blake2b(str(head[:n]).encode())
    for part in (part for message in messages for part in message["content"] if part["type"] != "text"):
        x = np.asarray(part[part["type"]])
        key.update(f"{x.shape} {part.get('taken')}".encode() + x.tobytes())
    if begun.get("key") != key.digest():
        inputs = packing.encode_chat(processor, messages, add_generation_prompt=True)
        (_, P), ids = inputs["input_ids"].shape, inputs["input_ids"][0].tolist()
        if ids[P - len(head) + n :] != head[n:]:  # rewritten by the processor
            begun["whole"] = True
            return begin_prompt(model, processor, messages, head, begun)
        inputs, end = {name: torch.as_tensor(x) for name, x in inputs.items()}, P - len(head) + n
        inputs = {k: x[:, :end] if x.shape[:2] == (1, P) else x for k, x in inputs.items()}
        begun |= packing.make_prompt(model, inputs) | {"key": key.digest()}
    return n


def batch_entries(start: int, count: int, groups: list[list[int]], seed: int) -> list[int]:
    """Entries start ... start + count - 1 of one endless stream of epochs of shuffled groups."""
    size, entries = sum(map(len, groups)), []
    for epoch in range(start // size, (start + count - 1) // size + 1):
        order = np.random.default_rng([seed, epoch]).permutation(len(groups))
        entries += [entry for g in order.tolist() for entry in groups[g]]
    return entries[start % size :][:count]


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


class Judge(nn.ModuleDict):
    """{"model": the model} as DeepSpeed runs it: pack -> log-probs (M,) of its targets."""

    def forward(self, pack) -> Tensor:
        return packing.response_logprobs(self.model, pack)[0]


# ---- pure math: tensors in, tensors and metrics out ----


def next_token_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """L = -sum over t of log p(token t | those before) / num_tokens: logprobs (M,) of a pack, num_tokens of
    the step, so that its packs, on all ranks, add up to the mean. [-1, -3], 8 -> 0.5"""
    return -logprobs.sum() / num_tokens


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a rate p: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),
    E. B. Wilson 1927. 9 of 10 -> (0.596, 0.982)"""
    p, n, z = successes / trials, trials, 1.96
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z * z / n)), min(1.0, (middle + spread) / (1 + z * z / n))


# ---- rollout ----


def generate_greedily(args: Args, model, prompts: list[dict], end_ids: list[int]) -> list[Tensor]:
    """The likeliest tokens after each prompt (R_b,), up to an EOS or the length limit."""
    if not packing.is_packed(model):
        return packing.generate_plain(model, prompts, 1, args.max_response_length, end_ids, 0.0)[0]
    decoder, end = packing.Decoder(model, prompts, 1), torch.tensor(end_ids, device=model.device)
    tokens = end.new_empty(len(prompts), 0)
    while tokens.shape[1] < args.max_response_length:
        token = packing.next_logprobs(model, decoder.hidden, 1.0).argmax(-1)  # (S,)
        tokens = torch.cat([tokens, token[:, None]], dim=1)  # (S, t)
        ended = torch.isin(tokens, end)
        if ended.any(1).all():
            break
        decoder.step(token)
    kept = ended.cumsum(1) - ended.long() == 0  # up to the first EOS
    return [row[mask] for row, mask in zip(tokens.cpu(), kept.cpu())]


@torch.no_grad()
def write_judgements(args: Args, model, tokenizer, rows: list[dict]) -> list[dict]:
    """The model as a judge -> per row of encode_row what it writes, its verdict, the summed loss of the true
    one, and p(verdict) = softmax over verdicts of log p(own reasoning, verdict | prompt)."""
    prompts = [row["samples"][-1] | {"index": i, "seed": 0} for i, row in enumerate(rows)]
    end_ids, k, responses, judged = end_token_ids(model, tokenizer), 1 + len(VERDICTS), [], []
    written = generate_greedily(args, model, prompts, end_ids)
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    for row, prompt, text in zip(rows, prompts, texts):  # k responses each: the truth, all verdicts
        said = [text.partition("<answer>")[0] + write_verdict(verdict, row["noun"]) for verdict in VERDICTS]
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        responses += [prompt["ids"], *map(torch.tensor, ids)]
    groups = [(i, [*range(k * i, k * i + k)]) for i in range(len(rows))]
    room = args.micro_batch_tokens + 2 * args.max_response_length
    given = groups, prompts, lambda indices: [prompts[i] for i in indices], responses, room
    logprobs = torch.zeros(len(responses), max(map(len, responses)), dtype=torch.float64)  # (B, R)
    for pack in packing.packs_of_rank(*given, packed=packing.is_packed(model)):
        logprobs[pack.index] = packing.response_logprobs(model, pack.to(model.device))[0].double().cpu()
    for row, prompt, own, ids, text in zip(rows, prompts, logprobs.split(k), written, texts):
        verdict, truth = read_verdict(text), row["truth"]
        soft = dict(zip(VERDICTS, own[1:].sum(1).softmax(0).tolist()))
        judged.append({
            "response": text, "verdict": verdict, "truth": truth, "probabilities": soft,
            "accuracy": None if truth is None else verdict == truth,  # unreadable: wrong
            "soft_accuracy": None if truth is None else max(soft, key=soft.get) == truth,
            "parse_rate": verdict is not None, "tie_rate": verdict == "tie",
            "length": len(ids), "truncated_frac": int(ids[-1]) not in end_ids,
            "loss": -float(own[0].sum()), "tokens": len(prompt["ids"]),
        })  # fmt: skip
    return judged


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


def gather(own: list) -> list:
    gathered = [own] * WORLD_SIZE
    if WORLD_SIZE > 1:  # alone: see sum_over_ranks
        dist.all_gather_object(gathered, own)
    return sum(gathered, [])


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


def train_rows(args: Args, data, entries: list[int], engine) -> tuple[float, int, int]:
    """Gradients of some entries -> loss, trained tokens, usable entries, of all ranks. Equal prompts are
    shared: pictures and first tokens."""
    own, alike = data.encode(np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist()), defaultdict(list)
    names = ("index", "key", "length", "kinds", "ids", "start")  # no pictures
    samples = gather([{name: sample[name] for name in names} for row in own for sample in row["samples"]])
    if (usable := len({sample["index"][0] for sample in samples})) * 2 < len({*entries}):
        fail(f"more than half of {len(entries)} rows of {data.source} can't be used: see the warnings")
    for b, sample in enumerate(samples):
        alike[sample["key"]].append(b)
    groups, responses = [(own[0], own) for own in alike.values()], [sample["ids"] for sample in samples]
    starts = torch.tensor([sample["start"] for sample in samples])  # (B,)
    num_tokens, total = sum(map(len, responses)) - int(starts.sum()), torch.zeros((), device=engine.device)
    whole = lambda indices: [data.encode([e])[0]["samples"][part] for e, part in indices]  # noqa: E731
    given = groups, samples, whole, responses, args.micro_batch_tokens, RANK, WORLD_SIZE
    packed = packing.is_packed(engine.module.model)
    packs = [*packing.packs_of_rank(*given, packed, media_everywhere=args.zero_stage > 0)]
    for k, pack in enumerate(packs):
        trained = pack.index[1] >= starts[pack.index[0]]  # (M,)
        pack = pack._replace(targets=pack.targets[trained], predict_from=pack.predict_from[trained])
        loss = next_token_loss(engine(pack.to(engine.device)), num_tokens)
        engine.set_gradient_accumulation_boundary(k == len(packs) - 1)
        # DeepSpeed averages over ranks, hence the factor; it must not divide by the number of packs.
        engine.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
        total += loss.detach()
    return float(sum_over_ranks(total, engine.device)), num_tokens, usable


# ---- evaluate ----


def evaluate(args: Args, model, judge, data) -> tuple[dict[str, float], list[dict]]:
    """Held-out rows, dealt to the ranks -> metrics, records. judge: the model or its unsharded copy."""
    if judge is not model:
        judge.load_state_dict(merged_state_dict(model))
    own, judged = np.array_split(np.array(sum(data.groups, [])), WORLD_SIZE)[RANK].tolist(), []
    for start in range(0, len(own), args.generation_batch_size):
        rows = data.encode(own[start : start + args.generation_batch_size])
        for row, record in zip(rows, write_judgements(args, judge, data.tokenizer, rows) if rows else []):
            shown = {name: x for name, x in row["row"].items() if isinstance(x, str | int | float)}
            judged.append((row["index"], shown | {"phase": "eval", "row": row["index"] // 2} | record))
    judged = dict(sorted(gather(judged))) or fail(f"{data.source}: no row can be used")
    for entry, record in judged.items():
        other = judged.get(entry ^ 1, {})
        follows = other.get("verdict") == SWAPPED.get(record["verdict"], "unreadable")
        record |= {"swapped_response": other.get("response"), "swap_consistency": follows if other else None}
    records = [record for entry, record in judged.items() if entry % 2 == 0]
    return judge_metrics(records), records


def judge_metrics(records: list[dict]) -> dict[str, float]:
    """Means over the records that have what it takes: a verdict, two sides."""
    names = "accuracy soft_accuracy swap_consistency parse_rate tie_rate length truncated_frac".split()
    columns = {name: [float(r[name]) for r in records if r[name] is not None] for name in names}
    metrics = {f"eval/{name}": float(np.mean(values)) for name, values in columns.items() if values}
    if right := columns["accuracy"]:
        metrics["eval/accuracy_low"], metrics["eval/accuracy_high"] = wilson_interval(sum(right), len(right))
    loss = sum(r["loss"] for r in records) / sum(r["tokens"] for r in records)
    return metrics | {"eval/loss": loss, "eval/num_samples": len(records)}


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


def save_checkpoint(args: Args, run_dir: Path, engines: dict, processor, state: dict) -> Path:
    """checkpoint-N: a Hugging Face folder that loads by itself, and state/ for --resume. Collective."""
    final, model = run_dir / f"checkpoint-{state['step']}", engines["actor"].module.model
    folder = final.with_suffix(".tmp")  # renamed when all of it is written
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(str(folder / "state" / name), tag="engine", client_state={"ours": state})
    weights = {name: weight.cpu() for name, weight in merged_state_dict(model).items()}
    if RANK == 0:
        with torch.device("meta"):  # the same architecture, without adapters
            plain = type(model)(model.config)
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder, state_dict=weights)
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
    device = init_distributed()
    run_dir, checkpoint = find_run(args)
    fp32 = args.dtype == "float32" or (args.dtype == "auto" and device.type == "cpu")
    dtype = torch.float32 if fp32 else torch.bfloat16
    torch.manual_seed(args.seed)

    # --- 2. models and engines ---
    model = load_model(args.model, dtype)
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (args.freeze and re.search(args.freeze, name)))
    if args.lora_rank:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine = make_engine(args, Judge({"model": model}), dtype, args.total_steps)
    engine.eval()
    state = {"step": 0, "before": {}, "best": -math.inf, "skipped": 0}
    if checkpoint is not None:
        state = engine.load_checkpoint(str(checkpoint / "state" / "actor"), tag="engine")[1]["ours"]

    # --- 3. data ---
    data = load_data(args, args.dataset, args.dataset_split, model, processor, True)
    source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = load_data(args, source, args.eval_dataset_split, model, processor, False) if source else None
    if RANK == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
        for path in run_dir.glob("*.jsonl"):  # without what was logged after the checkpoint
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            lines = [line for line in lines if 0 < state["step"] >= json.loads(line)["train/step"]]
            path.write_text("".join(lines))
    tell(f"{run_dir}: {sum(map(len, data.groups))} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")
    some = [own[0] for own in data.groups[:: len(data.groups) // 16 + 1]]
    rows = data.encode(some) or fail(f"{args.dataset}: no row can be used")
    probes = {sample["kinds"]: sample for row in rows for sample in row["samples"]}
    tell(packing.prove_packing(model, engine, [*probes.values()]))
    judge = load_model(args.model, dtype).to(device) if args.zero_stage == 3 else model
    packing.switch_attention(judge, model.config.get_text_config()._attn_implementation)
    received, stopped, saved = [], False, checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):  # save after this step, and end
        signal.signal(number, lambda number, frame: received.append(number))
    if eval_data and not state["before"]:
        state["before"], samples = evaluate(args, model, judge, eval_data)
        if f"eval/{args.best_metric}" not in state["before"]:
            fail(f"--best-metric: {source} gives {', '.join(state['before'])}")
        log(args, run_dir, {"train/step": 0, **state["before"]}, samples)
    metrics, steps = state["before"], range(state["step"] + 1, args.total_steps + 1)
    for step in tqdm(steps, "grm_sft", args.total_steps, initial=steps.start - 1, disable=RANK > 0 or None):
        # --- 7. update ---
        start, n = time.perf_counter(), args.train_batch_size
        entries = batch_entries((step - 1) * n, n, data.groups, args.seed)
        engine.train()
        loss, num_tokens, usable = train_rows(args, data, entries, engine)
        norm, taken = optimizer_step(engine)
        engine.eval()
        state |= {"step": step, "skipped": 0 if taken else state["skipped"] + 1}
        seconds = time.perf_counter() - start

        # --- 9. log ---
        metrics = {"train/step": step, "train/learning_rate": engine.get_lr()[0]}
        metrics |= {"loss/sft": loss, "train/trained_tokens": num_tokens, "time/total": seconds}
        metrics |= {"train/grad_norm": norm if taken else 0.0, "train/skipped_updates": int(not taken)}
        metrics["rollout/prompts_dropped"], samples = len({*entries}) - usable, []

        # --- 10. eval and save ---
        last, hopeless, better = step == args.total_steps, state["skipped"] >= 5, False
        if eval_data and (last or (args.eval_steps and step % args.eval_steps == 0)):
            evaluated, samples = evaluate(args, model, judge, eval_data)
            metrics |= evaluated
            value = metrics[f"eval/{args.best_metric}"] * (-1 if args.best_metric == "loss" else 1)
            better, state["best"] = value > state["best"], max(value, state["best"])
            tell(f"held-out {args.best_metric} {abs(value):.3f}")
        log(args, run_dir, metrics, samples)
        tell(f"step {step} of {args.total_steps}, {seconds:.2f} s: loss {loss:.4f}")
        stopped = bool(sum_over_ranks(torch.tensor(len(received)), device)) and not last  # on all ranks alike
        if last or stopped or hopeless or better or (args.save_steps and step % args.save_steps == 0):
            saved = save_checkpoint(args, run_dir, {"actor": engine}, processor, state)
        if better and RANK == 0:
            shutil.copytree(saved, run_dir / "best.tmp", ignore=lambda *_: ["state"], dirs_exist_ok=True)
            shutil.rmtree(run_dir / "checkpoint-best", ignore_errors=True)
            (run_dir / "best.tmp").rename(run_dir / "checkpoint-best")
        if hopeless:
            fail(f"step {step}: 5 times in a row no finite gradients; the weights before: {saved}")
        if stopped:
            break

    # --- 11. finish ---
    if stopped:
        tell(f"stopped by a signal after step {step}; go on with --resume {saved}")
    else:
        told = [f"{key} {x:.3f} -> {metrics[key]:.3f}" for key, x in state["before"].items()]
        tell(" · ".join([*told, f"{time.perf_counter() - started:.0f} s", str(saved)]))
        tell(f"to see it: python tools/report.py {run_dir}")
    dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    argv = [x for x in sys.argv[1:] if not x.startswith("--local_rank")]  # the deepspeed launcher's
    main(tyro.cli(Args, args=argv, description=__doc__))
