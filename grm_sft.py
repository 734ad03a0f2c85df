"""GRM SFT: a vision-language model learns to write its judgement of two candidates, by next-token prediction.

    <think>the first one has no triangle</think><answer>Image 2 is better</answer>

Trained are the assistant's tokens alone; rows lie packed, and share pictures and first tokens. A pair is shown in
both orders, in training and in evaluation, where verdicts are written and their probabilities asked for.

Papers: https://arxiv.org/abs/2408.15240 (generative verifiers), https://arxiv.org/abs/2505.03318 (multimodal).
Same task: LightRFT's GRMTrainerVL (opendilab/LightRFT@49e62cb); docs/grm_sft.md lists what differs. Start
reading at main.

    python grm_sft.py                   # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python grm_sft.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset judgements.jsonl --learning-rate 1e-5
    torchrun --standalone --nproc_per_node=8 grm_sft.py --zero-stage 3 ...  # or: deepspeed grm_sft.py ...
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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
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
    seed: int = 1  # of data order, and of the wrong answers of easy-vqa and their sides
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name

    # --- model and data ---
    model: str = TINY_VL  # folder or hub id of a vision-language or text model
    dataset: str = "easy-vqa"  # easy-vqa, .jsonl/.json/.csv/.parquet, saved folder, hub id; see load_data
    dataset_split: str = "train"  # of a hub id or a saved folder
    eval_dataset: str | None = None  # held-out rows; None: easy-vqa's test split beside easy-vqa, else none
    eval_dataset_split: str = "test"  # as --dataset-split
    train_samples: int = 8000  # training rows, a fixed random subset; 0 = all
    both_orders: bool = True  # train on every pair as it is and with its sides exchanged
    group_by_media: bool = True  # rows with the same pictures stand side by side in the data order
    system_prompt: str | None = None  # for rows that have no system message
    video_fps: float = 2.0  # frames per second that are taken from videos
    max_length: int = 2048  # tokens of a row, those of pictures too; longer ones are left out
    freeze: str = (
        "visual|vision_tower|projector"  # regular expression: such parameters stay as they are; "": none
    )
    lora_rank: int = 0  # train adapters of this rank on the language model; 0 = all weights
    lora_alpha: float = 32.0  # the adapters' output is scaled by alpha / rank

    # --- rollout ---
    generation_batch_size: int = 64  # judgements that an evaluation writes side by side on a rank
    max_response_length: int = 16  # tokens, EOS counted; longer judgements are cut

    # --- algorithm ---
    total_steps: int = 500  # optimizer steps; 0 = as --epochs says
    epochs: float = 1.0  # passes over the data
    train_batch_size: int = 32  # rows per optimizer step, over all ranks; a pair in both orders is two

    # --- optimizer ---
    learning_rate: float = 1e-3  # peak; pretrained models want about 1e-5, with LoRA 1e-4
    min_lr_ratio: float = 0.1  # after the warm-up it follows a cosine down to this fraction; 1 = constant
    warmup_steps: int = 20  # optimizer steps of linear warm-up
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
    eval_steps: int = 100  # evaluate every so many steps, and at both ends; 0 = only there
    eval_samples: int = 500  # held-out rows, a fixed random subset; 0 = all
    # the evaluation with the best eval/... leaves its model in checkpoint-best
    best_metric: Literal["accuracy", "soft_accuracy", "swap_consistency", "loss"] = "accuracy"
    save_steps: int = 0  # checkpoint every so many steps, and at the end; 0 = only at the end
    save_total_limit: int = 2  # checkpoints kept, newest first
    # log there too (wandb: see WANDB_PROJECT, WANDB_MODE)
    track: Literal["off", "wandb", "tensorboard"] = "off"


def check_args(args: Args) -> None:
    longest, counts = (
        args.max_length + args.max_response_length,
        (args.train_batch_size, args.total_steps + 1),
    )
    for is_bad, message in (
        (min(*counts, args.max_response_length) < 1, "counts must be at least 1"),
        (
            args.micro_batch_tokens < longest,
            f"--micro-batch-tokens must hold a row and a judgement, {longest}",
        ),
        (args.offload_optimizer and args.zero_stage == 0, "--offload-optimizer needs --zero-stage 1 to 3"),
    ):
        if is_bad:
            fail(message)


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)  # on a line of its own, also under a progress bar
    raise SystemExit(2)


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
            columns = {"prompt": questions, "image": [str(paths[i]) for i in numbers], "answer": answers}
            return datasets.Dataset.from_dict(columns)
        if Path(source).is_dir():
            rows = datasets.load_from_disk(source)
            return rows[split] if isinstance(rows, datasets.DatasetDict) else rows
        if kind in ("json", "csv", "parquet"):
            return datasets.load_dataset(kind, data_files=source, split="train")
        return datasets.load_dataset(source, split=split)
    except Exception as error:
        fail(f"{source} (split {split}) can't be read as a dataset: {error}")


def make_pair(row: dict, rng: np.random.Generator) -> dict:
    """easy-VQA as a judge's task: the answer against a wrong one of its kind, their sides drawn."""
    kind = next(kind for kind in EASY_VQA_ANSWERS if row["answer"] in kind)
    sides = [row["answer"], str(rng.choice([other for other in kind if other != row["answer"]]))]
    first = int(rng.integers(2))  # where the right one stands
    sides = {"answer_0": sides[first], "answer_1": sides[1 - first], "verdict": str(1 + first)}
    return row | sides | {"reasoning": row["answer"]}


def load_data(args: Args, source: str, split: str, model, processor, training: bool) -> SimpleNamespace:
    """-> source, tokenizer, groups of entries (2 * row, + 1 with its sides exchanged), encode(entries).

    Columns of pairs: `prompt`; two candidates, `image_0` and `image_1`, or `video_0` and `video_1`, or texts,
    `answer_0` and `answer_1`; `verdict`: 1, 2 or tie; optional `reasoning`; `image(s)`, `video(s)` of the prompt.
    Columns of chats: `messages`, all of whose assistant turns are trained; `image(s)`, `video(s)`.
    """
    rows, tokenizer = load_rows(source, split), getattr(processor, "tokenizer", processor)
    is_easy_vqa, folder, seed = source == "easy-vqa", Path(source).parent, args.seed if training else 0
    if not is_easy_vqa and not {"messages", "verdict"} & {*rows.column_names}:
        fail(
            f"{source} has columns {', '.join(rows.column_names)}: it needs messages, or pairs with a verdict"
        )
    limit = args.train_samples if training else args.eval_samples
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[: limit or None])
    few, groups = rows.select(chosen), defaultdict(list)
    verdicts = few["verdict"] if "verdict" in rows.column_names else [is_easy_vqa or None] * len(few)
    paths = [name for name, kind in rows.features.items() if re.search("^(List|Value).*string", str(kind))]
    media = [few[name] for name in paths if name.startswith(("image", "video"))]
    for i, verdict, *names in zip(chosen.tolist(), verdicts, *media):
        both = verdict is not None and (args.both_orders or not training)
        for entry in (2 * i, 2 * i + 1) if both else (2 * i,):
            group = (str(names) if any(names) else i) if args.group_by_media else -entry
            groups[group].append(entry)
    options = ("1", "2", "tie") if "tie" in {*verdicts} else ("1", "2")

    def encode(entries: list[int]) -> list[dict]:
        own = [rows[entry // 2] for entry in entries]
        if is_easy_vqa:
            own = [make_pair(row, np.random.default_rng([seed, e // 2])) for row, e in zip(own, entries)]
        encoded = encode_rows(args, model, processor, own, [e % 2 == 1 for e in entries], folder)
        for entry, row in zip(entries, encoded):
            row |= {"index": entry, "options": options if row["noun"] else ()}
            for part, sample in enumerate(row["samples"]):
                sample["index"] = (entry, part)
        return encoded

    encode = keep_usable(source, encode, 2 * args.train_batch_size)
    return SimpleNamespace(source=source, tokenizer=tokenizer, groups=[*groups.values()], encode=encode)


def keep_usable(source: str, encode: Callable, limit: int) -> Callable[[list[int]], list[dict]]:
    """encode(indices) without rows that fail, each named in a warning. The last results are kept."""
    kept = {}

    def encode_usable(indices: list[int]) -> list[dict]:
        new = [i for i in dict.fromkeys(indices) if i not in kept]
        try:
            kept.update(zip(new, encode(new)))
        except Exception:  # a bad row, or a processor whose output for many can't be taken apart: one by one
            for i in new:
                try:
                    kept[i] = encode([i])[0]
                except Exception as error:
                    kept[i] = None
                    tqdm.write(f"warning: {source} row {i} is left out: {error!r:.300}", file=sys.stderr)
        found = [kept[i] for i in indices if kept[i] is not None]
        for i in [*kept][:-limit]:
            del kept[i]
        return found

    return encode_usable


def to_messages(args: Args, given: str | list, row: dict, folder: Path, tokenizer) -> list[dict]:
    """A string or chat, and its row's pictures and videos -> messages whose contents are lists of parts, media
    opened, in their places: where <image> and <video> stand, or parts of such types; else in front."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}

    def defuse(text: str) -> str:
        """Data must not end a turn or stand for a picture: "<|im_end|>" -> "< |im_end|>"."""
        while found := [token for token in special if token in text]:
            text = text.replace(found[0], f"{found[0][0]} {found[0][1:]}" if len(found[0]) > 1 else " ")
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
        parts = []
        for piece in filter(None, re.split(f"({marks})", text)):
            kind = piece[1:-1] if re.fullmatch(marks, piece) else "text"
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
    parts = [[part for message in chat for part in message["content"]] for chat in chats]
    counts = [{kind: sum(part["type"] == kind for part in own) for kind in packing.MEDIA} for own in parts]
    taken = [part["taken"] for own in parts for part in own if part["type"] == "video"]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt" if len(chats) == 1 else None}
    how |= {"processor_kwargs": {"video_metadata": taken, "do_sample_frames": False}} if taken else {}
    if not hasattr(processor, "tokenizer"):
        chats = [[m | {"content": "".join(p["text"] for p in m["content"])} for m in chat] for chat in chats]
    if processor.chat_template is None:
        batch = processor(
            ["".join(m["content"] for m in chat) for chat in chats], return_tensors=how["return_tensors"]
        )
    else:
        batch = processor.apply_chat_template(chats, **how, **template)
    return [dict(batch)] if len(chats) == 1 else packing.split_batch(batch, counts)


def write_verdict(verdict: str, noun: str) -> str:
    """1, 2 or tie -> the sentence that is trained and read."""
    return (
        f"<answer>{'Both are equally good' if verdict == 'tie' else f'{noun} {verdict} is better'}</answer>"
    )


def read_verdict(text: str) -> str | None:
    """1, 2 or tie; None where the text has not exactly one <answer>, or another sentence in it."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    said = " ".join(found[0].split()).rstrip(".").lower() if len(found) == 1 else ""
    if side := re.fullmatch(r"(?:image|video|answer) ([12]) is better", said):
        return side[1]
    return "tie" if re.fullmatch(r"both (?:(?:images|videos|answers) )?are equally good", said) else None


SWAPPED = {"1": "2", "2": "1", "first": "second", "second": "first", "First": "Second", "Second": "First"}


def swap_sides(text: str) -> str:
    """Exchange what reasoning calls the sides: Image 1 and Image 2, the first image and the second image."""
    nouns = "[Ii]mage|[Vv]ideo|[Aa]nswer"
    text = re.sub(rf"\b((?:{nouns})[ _-]?)([12])\b", lambda m: m[1] + SWAPPED[m[2]], text)
    return re.sub(rf"\b([Ff]irst|[Ss]econd)(?= (?:{nouns})\b)", lambda m: SWAPPED[m[1]], text)


def make_chat(row: dict, swap: bool) -> tuple[list[dict], dict, str]:
    """A row -> its messages, the judgement last; its pictures and videos; what its candidates are called ("" for a
    chat). swap: with the sides of a pair exchanged."""
    if row.get("messages"):
        return row["messages"], row, ""
    kind = next(kind for kind in ("image", "video", "answer") if row.get(f"{kind}_0") is not None)
    sides, verdict, noun = [row[f"{kind}_0"], row[f"{kind}_1"]], str(row["verdict"]), kind.capitalize()
    prompt, thought, media = row["prompt"], row.get("reasoning") or "", {}
    if verdict not in ("1", "2", "tie"):
        raise ValueError(f"the verdict must be 1, 2 or tie, not {verdict}")
    if swap:
        sides, verdict, thought = sides[::-1], SWAPPED.get(verdict, verdict), swap_sides(thought)
    for name in packing.MEDIA:
        items = row.get(name) or row.get(f"{name}s") or []
        items = items if isinstance(items, list) else [items]
        prompt = prompt if f"<{name}>" in prompt else f"<{name}>" * len(items) + prompt
        media[f"{name}s"] = [*items, *(sides if name == kind else [])]
    shown = [re.sub("<(image|video)>", r"< \1>", x) if kind == "answer" else f"<{kind}>" for x in sides]
    asked = f"{prompt}\n{noun} 1: {shown[0]}\n{noun} 2: {shown[1]}"
    said = (f"<think>{thought}</think>" if thought else "") + write_verdict(verdict, noun)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}], media, noun


def encode_rows(
    args: Args, model, processor, rows: list[dict], swaps: list[bool], folder: Path
) -> list[dict]:
    """Rows -> row, text, noun, truth (the verdict), and samples, see split_chat: prompts of common/packing.py with
    the response_ids (R,) that follow and the mask (R,) of those that are trained."""
    tokenizer, encoded, heads = getattr(processor, "tokenizer", processor), [], []
    for row, swap in zip(rows, swaps):
        given, media, noun = make_chat(row, swap)
        chat = to_messages(args, given, media, folder, tokenizer)
        found = split_chat(processor, chat, end_token_ids(model, tokenizer))
        texts = ["".join(p.get("text", f"<{p['type']}>") for p in message["content"]) for message in chat]
        truth = read_verdict(texts[-1]) if found[-1][0] == len(chat) - 1 else None  # one answer to be written
        samples = [{"response_ids": ids, "mask": mask} for _, ids, mask in found]
        encoded.append(
            {"row": row, "text": "\n".join(texts[:-1]), "noun": noun, "truth": truth, "samples": samples}
        )
        heads += [chat[:n] for n, _, _ in found]
    inputs = iter(encode_chats(processor, heads, add_generation_prompt=True))
    for sample in (sample for row in encoded for sample in row["samples"]):
        sample |= packing.make_prompt(model, next(inputs))
        sample["media"] = tuple(
            item["key"] for items in packing.media_of([sample]).values() for item in items
        )
        if sample["length"] + len(sample["response_ids"]) > args.max_length:
            raise ValueError(
                f"{sample['length'] + len(sample['response_ids'])} tokens are more than --max-length"
            )
    return encoded


def end_token_ids(model, tokenizer) -> list[int]:
    ids = model.generation_config.eos_token_id
    return sorted({*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None})


def split_chat(processor, chat: list[dict], end_ids: list[int]) -> list[tuple[int, Tensor, Tensor]]:
    """A chat -> samples (messages of the prompt, response_ids (R,), mask (R,)), which train the text of every
    assistant message and the one EOS after it: not its header, nor what the template writes after the EOS.

    All pictures lie in prompts: an answer after a further picture begins a sample of its own. Messages are found by
    counting: the tokens of the chat up to an answer, and up to its end, must be those that the whole begins with.
    Where a template writes no EOS, the last message gets one.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    given = [m | {"content": "".join(p.get("text", "") for p in m["content"])} for m in chat]
    given = given if tokenizer is processor else chat

    def tokens(n: int, prompted: bool = False) -> list[int]:
        text = processor.apply_chat_template(given[:n], tokenize=False, add_generation_prompt=prompted)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = [*tokens(len(chat)), tokenizer.eos_token_id]  # (T + 1,), a picture being one placeholder
    mask, begins, seen = (
        torch.zeros(len(ids), dtype=torch.bool),
        [],
        False,
    )  # seen: no picture since an answer
    for n, message in enumerate(chat):
        seen &= all(part["type"] == "text" for part in message["content"])
        if message["role"] != "assistant":
            continue
        head, body = tokens(n, True), tokens(n + 1)
        if ids[: len(head)] != head or ids[: len(body)] != body:
            raise ValueError(f"the chat template writes message {n} differently when others follow")
        ends = [t + 1 for t in range(len(head), len(body)) if ids[t] in end_ids]
        mask[len(head) : ends[0] if ends else len(body) + (n == len(chat) - 1)] = True
        begins, seen = begins if seen else [*begins, (n, len(head))], True
    if chat[-1]["role"] != "assistant":
        raise ValueError("a chat must end with an assistant's message")
    samples = []
    for (n, start), (_, stop) in zip(begins, [*begins[1:], (0, len(ids))]):
        stop = int(mask[:stop].nonzero()[-1]) + 1
        samples.append((n, torch.tensor(ids[start:stop]), mask[start:stop]))
    return samples


def batch_entries(start: int, count: int, groups: list[list[int]], seed: int) -> list[int]:
    """Entries start ... start + count - 1 of one endless stream of epochs; groups are shuffled and stay whole."""
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


class Judge(nn.Module):
    """The model as DeepSpeed runs it: pack -> log-probs (M,) of its targets."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pack) -> Tensor:
        return packing.response_logprobs(self.model, pack)[0]


# ---- pure math: tensors in, tensors and metrics out ----


def next_token_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """L = -sum over t of log p(token_t | what is before it) / num_tokens. logprobs (M,): of a pack's trained tokens;
    num_tokens: those of the whole optimizer step, so that the losses of its packs, on all ranks, add up to the mean.

    logprobs [-1, -3], 8 trained tokens in the step -> 0.5
    """
    return -logprobs.sum() / num_tokens


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate p: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).

    9 of 10 -> (0.596, 0.982). Source: E. B. Wilson 1927.
    """
    p, z2 = successes / trials, z * z / trials
    middle, spread = p + z2 / 2, z * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials))
    return max(0.0, (middle - spread) / (1 + z2)), min(1.0, (middle + spread) / (1 + z2))


# ---- rollout ----


def generate_greedily(
    args: Args, model, prompts: list[dict], end_ids: list[int]
) -> tuple[list[Tensor], list[bool]]:
    """The likeliest token at every step -> a response to each prompt (R_b,), and which the length limit cut."""
    if not packing.is_packed(model):
        prompts = [prompt | {"seed": 0} for prompt in prompts]
        ids, _, cut = packing.generate_plain(model, prompts, 1, args.max_response_length, end_ids, 0.0, 1.0)
        return ids, cut
    decoder = packing.Decoder(model, prompts, 1)
    rows, end = torch.arange(len(prompts), device=model.device), torch.tensor(end_ids, device=model.device)
    tokens = torch.full((len(rows), args.max_response_length), -1, device=model.device)  # (S, R)
    for t in range(args.max_response_length):
        token = packing.next_logprobs(model, decoder.hidden, 1.0).argmax(-1)  # (rows,)
        tokens[rows, t] = token
        alive = (~torch.isin(token, end)).nonzero()[:, 0]
        if len(alive) < len(rows):  # finished responses leave the batch
            rows, token = rows[alive], token[alive]
            decoder.keep(alive)
        if len(rows) == 0 or t + 1 == args.max_response_length:
            break
        decoder.step(token)
    cut = set(rows.tolist())
    return [row[row >= 0] for row in tokens.cpu()], [b in cut for b in range(len(prompts))]


@torch.no_grad()
def write_judgements(args: Args, model, tokenizer, rows: list[dict]) -> list[dict]:
    """The model as a judge: per row of encode_rows the text that it writes, the verdict in that, whether the length
    limit cut it, the loss (a sum) of the true judgement, and the probabilities of the row's options:

    p(option) = softmax over options of log p(reasoning <answer>option</answer> | prompt), by its own reasoning
    """
    prompts, end_ids = [row["samples"][-1] for row in rows], end_token_ids(model, tokenizer)
    ids, cut = generate_greedily(args, model, prompts, end_ids)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    samples, groups, responses, masks, own = (
        [],
        [],
        [],
        [],
        [],
    )  # own: places among the responses of each row's
    for row, text in zip(rows, texts):
        options = [text.partition("<answer>")[0] + write_verdict(x, row["noun"]) for x in row["options"]]
        options = [torch.tensor(tokenizer(x, add_special_tokens=False)["input_ids"]) for x in options]
        own.append(len(responses))
        for sample in row["samples"]:
            groups.append((len(samples), [len(responses)]))
            samples.append(sample | {"index": len(samples)})
            responses, masks = [*responses, sample["response_ids"]], [*masks, sample["mask"]]
        groups[-1][1].extend(range(len(responses), len(responses) + len(options)))
        responses, masks = (
            responses + options,
            masks + [torch.ones(len(x), dtype=torch.bool) for x in options],
        )
    longest = max(samples[g]["length"] + len(responses[b]) for g, members in groups for b in members)
    masks = nn.utils.rnn.pad_sequence(masks, batch_first=True)  # (B, R)
    logprobs, size = torch.zeros(masks.shape), max(args.micro_batch_tokens, longest)
    whole, packed = functools.partial(map, samples.__getitem__), packing.is_packed(model)
    for pack in packing.packs_of_rank(groups, samples, whole, responses, size, packed=packed):
        logprobs[pack.index] = packing.response_logprobs(model, pack.to(model.device))[0].float().cpu()
    sums, judged = (logprobs.double() * masks).sum(1), []  # (B,)
    for b, row, text, x, is_cut in zip(own, rows, texts, ids, cut):
        end, options = b + len(row["samples"]), row["options"]
        soft = dict(zip(options, sums[end : end + len(options)].softmax(0).tolist()))
        judgement = {"response": text, "verdict": read_verdict(text), "length": len(x), "truncated": is_cut}
        truth = {"loss": -float(sums[b:end].sum()), "tokens": int(masks[b:end].sum())}
        judged.append(judgement | truth | {"probabilities": soft})
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


def share_beginnings(samples: list[dict], media_ids: list[int]) -> tuple[list, list[dict], list, list]:
    """Samples -> groups, prompts, responses and masks for packing.packs_of_rank. Those with the same pictures, or
    of the same row, make one group if they begin alike up to the last picture: its prompt is what they share; the
    rest of their prompts lies in the responses and is not trained."""
    alike, groups, prompts, responses, masks = defaultdict(list), [], [], {}, {}
    for b, sample in enumerate(samples):
        alike[sample["media"] or sample["index"][0] // 2].append(b)
    for members in alike.values():
        heads = [samples[b]["prompt_ids"] for b in members]
        n = min(map(len, heads))
        differ = torch.stack([head[:n] != heads[0][:n] for head in heads]).any(0)  # (n,)
        n = int(differ.int().argmax()) if differ.any() else n
        shared = n > 0 and not np.isin(heads[0][n:], media_ids).any()
        for own, length in [(members, n)] if shared else [([b], len(x)) for b, x in zip(members, heads)]:
            first = samples[own[0]]
            groups.append((len(prompts), own))
            prompts.append({"index": (*first["index"], length), "length": length, "kinds": first["kinds"]})
            for b in own:
                rest = samples[b]["prompt_ids"][length:]
                responses[b] = torch.cat([rest, samples[b]["response_ids"]])
                masks[b] = torch.cat([torch.zeros(len(rest), dtype=torch.bool), samples[b]["mask"]])
    return groups, prompts, *([table[b] for b in range(len(samples))] for table in (responses, masks))


def cut_prompt(prompt: dict, length: int) -> dict:
    """Its first tokens, with all of its pictures."""
    inputs = {
        k: x[:, :length] if x.shape[:2] == (1, prompt["length"]) else x for k, x in prompt["inputs"].items()
    }
    ids, positions = prompt["prompt_ids"][:length], prompt["position_ids"][..., :length]
    return prompt | {"inputs": inputs, "prompt_ids": ids, "position_ids": positions, "length": length}


def packs_of_batch(args: Args, data, entries: list[int], engine) -> tuple[list, int, int]:
    """-> this rank's packs of some entries, which predict the trained tokens only; how many of these there are on all
    ranks; how many entries can be used."""
    names = (
        "index media kinds prompt_ids response_ids mask".split()
    )  # what all ranks know of a sample: no pictures
    rows = data.encode(np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist())
    samples = gather([{name: sample[name] for name in names} for row in rows for sample in row["samples"]])
    usable = len({sample["index"][0] for sample in samples})
    if usable * 2 < len(entries):
        fail(f"more than half of {len(entries)} rows of {data.source} can't be used: see the warnings")
    model, packs = engine.module.model, []
    groups, prompts, responses, masks = share_beginnings(samples, packing.media_token_ids(model.config))
    table = nn.utils.rnn.pad_sequence(masks, batch_first=True)  # (B, R)

    def encode(indices: list[tuple[int, int, int]]) -> list[dict]:
        rows = data.encode([entry for entry, _, _ in indices])
        return [cut_prompt(row["samples"][part], length) for row, (_, part, length) in zip(rows, indices)]

    given = (
        groups,
        prompts,
        encode,
        responses,
        args.micro_batch_tokens,
        RANK,
        WORLD_SIZE,
        packing.is_packed(model),
    )
    for pack in packing.packs_of_rank(*given, media_everywhere=args.zero_stage > 0):
        trained = table[pack.index]  # (M,)
        pack = pack._replace(targets=pack.targets[trained], predict_from=pack.predict_from[trained])
        packs.append(pack.to(engine.device))
    return packs, int(table.sum()), usable


def gather(own: list) -> list:
    """The lists of all ranks, one after the other."""
    gathered = [own] * WORLD_SIZE
    if WORLD_SIZE > 1:  # alone it would start threads in gloo, see sum_over_ranks
        dist.all_gather_object(gathered, own)
    return sum(gathered, [])


def train_step(args: Args, data, entries: list[int], engine) -> dict[str, float]:
    """One optimizer step on some entries of the data -> metrics."""
    packs, num_tokens, usable = packs_of_batch(args, data, entries, engine)
    sums = torch.zeros(2, device=engine.device)  # loss, tokens of the packs
    for k, pack in enumerate(packs):
        engine.set_gradient_accumulation_boundary(k == len(packs) - 1)
        loss = next_token_loss(engine(pack), num_tokens)
        # DeepSpeed averages over ranks, hence the factor; it must not divide by the number of packs.
        engine.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
        sums += torch.stack([loss.detach(), loss.new_tensor(pack.inputs["input_ids"].numel())])
    norm, taken = optimizer_step(engine)
    loss, packed_tokens = sum_over_ranks(sums, engine.device).tolist()
    return {
        "loss/sft": loss,
        "train/grad_norm": norm if taken else 0.0,
        "train/skipped_updates": int(not taken),
        "train/trained_tokens": num_tokens,
        "train/packed_tokens": packed_tokens,
        "train/rows_dropped": len(entries) - usable,
    }


# ---- evaluate ----


def evaluate(args: Args, model, data) -> tuple[dict[str, float], list[dict]]:
    """The held-out rows, pairs in both orders, dealt out to the ranks -> metrics, and a record of each row."""
    own = np.array_split(np.array(sum(data.groups, [])), WORLD_SIZE)[RANK].tolist()
    judged, size = [], args.generation_batch_size
    for start in range(0, len(own), size):
        if rows := data.encode(own[start : start + size]):
            for row, judgement in zip(rows, write_judgements(args, model, data.tokenizer, rows)):
                kept = {name: x for name, x in row["row"].items() if isinstance(x, str | int | float)}
                judged.append(
                    {**kept, "row": row["index"], "text": row["text"], "truth": row["truth"], **judgement}
                )
    judged = {record["row"]: record for record in gather(judged)}
    records = [make_record(judged[e], judged.get(e + 1)) for e in sorted(judged) if e % 2 == 0]
    return judge_metrics(records), records


def make_record(judged: dict, swapped: dict | None) -> dict:
    """A row as it was judged, and with its sides exchanged. What can't be read is neither right nor consistent."""
    verdict, truth, soft = judged["verdict"], judged["truth"], judged["probabilities"]
    record = {"phase": "eval"} | judged | {"row": judged["row"] // 2, "right": None, "soft_right": None}
    record |= {"swapped_response": None, "consistent": None}
    if truth is not None:
        record |= {
            "right": verdict == truth,
            "soft_right": max(soft, key=soft.get) == truth if soft else None,
        }
    if swapped:
        follows = verdict is not None and swapped["verdict"] == SWAPPED.get(verdict, verdict)
        record |= {"swapped_response": swapped["response"], "consistent": follows}
    return record


def judge_metrics(records: list[dict]) -> dict[str, float]:
    """Means over the records that have what a metric needs (a verdict, two sides); without any it is left out."""
    metrics = {"eval/loss": sum(r["loss"] for r in records) / sum(r["tokens"] for r in records)}
    metrics |= {
        "eval/perplexity": math.exp(min(metrics["eval/loss"], 700.0)),
        "eval/num_samples": len(records),
    }
    metrics["eval/parse_rate"] = float(np.mean([r["verdict"] is not None for r in records]))
    metrics["eval/tie_rate"] = float(np.mean([r["verdict"] == "tie" for r in records]))
    names = {"accuracy": "right", "soft_accuracy": "soft_right", "swap_consistency": "consistent"}
    for name, field in (names | {"length": "length", "truncated_frac": "truncated"}).items():
        if known := [r[field] for r in records if r[field] is not None]:
            metrics[f"eval/{name}"] = float(np.mean(known))
            if name == "accuracy":
                interval = wilson_interval(sum(known), len(known))
                metrics["eval/accuracy_low"], metrics["eval/accuracy_high"] = interval
    return metrics


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


def export_model(model, processor, folder: Path) -> None:
    """The merged model and its processor, as transformers loads them. Collective."""
    weights = {name: weight.cpu() for name, weight in merged_state_dict(model).items()}
    if RANK == 0:
        with torch.device("meta"):  # the same architecture, without adapters
            plain = type(model)(model.config)
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder, state_dict=weights)
        processor.save_pretrained(folder)


def log(args: Args, run_dir: Path, metrics: dict[str, float], samples: list[dict]) -> None:
    """Rank 0 alone: to metrics.jsonl, samples.jsonl, and where --track says."""
    if RANK > 0:
        return
    samples = [{"train/step": metrics["train/step"], **sample} for sample in samples]
    for name, lines in (("metrics", [metrics]), ("samples", samples)):
        with (run_dir / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    if args.track == "wandb":
        import wandb

        known = {"id": run_dir.name, "name": run_dir.name, "config": asdict(args), "dir": run_dir}
        (wandb.run or wandb.init(**known, resume="allow")).log(metrics, step=metrics["train/step"])
    if args.track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(
            str(run_dir / "tensorboard"), filename_suffix=f".{metrics['train/step']}"
        ) as writer:
            for name, value in metrics.items():
                writer.add_scalar(name, value, metrics["train/step"])


def open_run(args: Args, run_dir: Path, step: int) -> None:
    """Rank 0 alone: the folder and its args.json; what an interrupted run logged after step is dropped."""
    if RANK > 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
    for path in run_dir.glob("*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        path.write_text("".join(line for line in lines if 0 < step >= json.loads(line)["train/step"]))


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
    torch.manual_seed(args.seed)  # of LoRA's first weights

    # --- 2. models and engines ---
    model = load_model(args.model, dtype)
    kind = "AutoProcessor" if hasattr(model.config, "vision_config") else "AutoTokenizer"
    processor = getattr(transformers, kind).from_pretrained(args.model)
    data = load_data(args, args.dataset, args.dataset_split, model, processor, training=True)
    num_rows, count = sum(map(len, data.groups)), args.train_batch_size
    total_steps = args.total_steps or math.ceil(args.epochs * num_rows / count)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (args.freeze and re.search(args.freeze, name)))
    if args.lora_rank:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine = make_engine(args, Judge(model), dtype, total_steps)
    engine.eval()
    state = {"step": 0, "best": -math.inf, "skipped_in_a_row": 0}
    if checkpoint is not None:
        state = engine.load_checkpoint(str(checkpoint / "state" / "judge"), tag="engine")[1]["ours"]

    # --- 3. data ---
    source, eval_data = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None), None
    if source is not None:
        eval_data = load_data(args, source, args.eval_dataset_split, model, processor, training=False)
    open_run(args, run_dir, state["step"])
    tell(f"{run_dir}: {num_rows} rows, {total_steps} steps, {WORLD_SIZE} rank(s), {device}, {dtype}")
    rows = data.encode(batch_entries(0, min(16, num_rows), data.groups, args.seed))
    samples = [sample for row in rows for sample in row["samples"]] or fail(
        f"{args.dataset}: no row can be used"
    )
    probes = [*{sample["kinds"]: sample for sample in samples}.values()]  # text, with a picture, ...
    tell(packing.prove_packing(model, engine, probes))
    judge = model  # that writes: under ZeRO-3 an unsharded copy
    if args.zero_stage == 3:
        judge = load_model(args.model, dtype).to(device)
        packing.switch_attention(judge, model.config.get_text_config()._attn_implementation)

    def run_evaluation() -> tuple[dict[str, float], list[dict]]:
        began = time.perf_counter()
        if judge is not model:
            judge.load_state_dict(merged_state_dict(model))
        metrics, records = evaluate(args, judge, eval_data)
        if f"eval/{args.best_metric}" not in metrics:
            fail(
                f"--best-metric {args.best_metric}: no row of {source} has what it measures; loss always can"
            )
        return metrics | {"time/eval": time.perf_counter() - began}, records

    received, stopped, saved, metrics = [], False, checkpoint, {}
    for number in (signal.SIGTERM, signal.SIGINT):  # save after this step, and end
        signal.signal(number, lambda number, frame: received.append(number))
    if eval_data and state["step"] == 0:
        before, records = run_evaluation()
        log(args, run_dir, {"train/step": 0, "train/episode": 0, **before}, records)
    steps = range(state["step"] + 1, total_steps + 1)
    hidden = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step instead
    for step in (bar := tqdm(steps, "grm_sft", total_steps, initial=state["step"], disable=hidden)):
        # --- 4. rollout, 5. score, 6. advantages: none, the judgements are given, every token has weight 1 ---
        began, state["step"] = time.perf_counter(), step
        entries = batch_entries((step - 1) * count, count, data.groups, args.seed)

        # --- 7. update ---
        engine.train()
        metrics = train_step(args, data, entries, engine)
        engine.eval()

        # --- 8. sync weights: before an evaluation ---
        # --- 9. log ---
        seconds = time.perf_counter() - began
        metrics |= {
            "train/step": step,
            "train/episode": step * count,
            "train/learning_rate": engine.get_lr()[0],
            "time/total": seconds,
            "time/samples_per_second": count / seconds,
        }
        records, shown = [], {"loss": f"{metrics['loss/sft']:.4f}"}

        # --- 10. eval and save ---
        last = step == total_steps
        state["skipped_in_a_row"] = metrics["train/skipped_updates"] * (state["skipped_in_a_row"] + 1)
        hopeless = state["skipped_in_a_row"] == 5
        if eval_data and (last or (args.eval_steps and step % args.eval_steps == 0)):
            evaluated, records = run_evaluation()
            metrics |= evaluated
            value = metrics[f"eval/{args.best_metric}"] * (-1 if args.best_metric == "loss" else 1)
            shown[args.best_metric] = f"{abs(value):.3f}"
            if value > state["best"]:
                state["best"] = value
                export_model(model, processor, run_dir / "checkpoint-best.tmp")
                if RANK == 0:
                    shutil.rmtree(run_dir / "checkpoint-best", ignore_errors=True)
                    (run_dir / "checkpoint-best.tmp").rename(run_dir / "checkpoint-best")
        bar.set_postfix(shown)
        log(args, run_dir, metrics, records)
        if hidden:
            tell(f"step {step} of {total_steps}, {seconds:.2f} s: {shown}")
        stopped = bool(sum_over_ranks(torch.tensor(len(received)), device)) and not last  # on all ranks alike
        if last or stopped or hopeless or (args.save_steps and step % args.save_steps == 0):
            export = functools.partial(export_model, model, processor)
            saved = save_checkpoint(args, run_dir, {"judge": engine}, state, export)
        if hopeless:
            fail(
                f"no gradients were finite in steps {step - 4} to {step}; {saved} has the weights from before them"
            )
        if stopped:
            break

    # --- 11. finish ---
    if stopped:
        tell(f"stopped by a signal after step {step}; go on with --resume {saved}")
    elif RANK == 0:
        before = json.loads((run_dir / "metrics.jsonl").read_text().partition("\n")[0])
        keys = [key for key in before if key.startswith("eval/") and key in metrics]
        told = [f"{key} {before[key]:.3f} -> {metrics[key]:.3f}" for key in keys]
        tell(" · ".join([*told, f"{time.perf_counter() - started:.0f} s", str(saved)]))
        tell(f"for a report: python tools/report.py {run_dir}")
    dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    argv = [x for x in sys.argv[1:] if not x.startswith("--local_rank")]  # the deepspeed launcher's
    main(tyro.cli(Args, args=argv, description=__doc__))
