"""GRM SFT: a vision-language model learns to write its judgement of two candidates, token by token:
"<think>the first one has no triangle</think><answer>Image 2 is better</answer>".

A pair is shown in both orders, in training and in evaluation, where verdicts are written and their
probabilities asked for. Papers: https://arxiv.org/abs/2408.15240, https://arxiv.org/abs/2505.03318.
docs/grm_sft.md lists what differs from LightRFT's GRMTrainerVL (opendilab/LightRFT@49e62cb). Start at main.

    python grm_sft.py                   # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python grm_sft.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset judgements.jsonl --learning-rate 1e-5
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
    seed: int = 1  # of data order, and of the wrong answers of easy-vqa and their sides
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # folder or hub id; vision-language or text
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
    freeze: str = "visual|vision_tower|projector"  # parts of names of parameters that stay; "": none do
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
    best_metric: str = "accuracy"  # the best eval/... so far leaves its model in checkpoint-best
    save_steps: int = 0  # checkpoint every so many steps, and at the end; 0 = only there
    save_total_limit: int = 2  # checkpoints kept, newest first
    track: Literal["off", "wandb", "tensorboard"] = "off"  # log there too (wandb: see WANDB_PROJECT)


def check_args(args: Args) -> None:
    longest = args.max_length + args.max_response_length
    for is_bad, message in (
        (min(args.train_batch_size, args.total_steps + 1) < 1, "counts must be at least 1"),
        (args.micro_batch_tokens < longest, f"--micro-batch-tokens must hold row + judgement, {longest}"),
        (args.offload_optimizer and args.zero_stage == 0, "--offload-optimizer needs --zero-stage 1 to 3"),
        (args.resume == "auto" and args.run_name is None, "--resume auto needs --run-name"),
    ):
        if is_bad:
            fail(message)


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)  # on a line of its own, also under a progress bar
    raise SystemExit(2)


# ---- data ----

EASY_VQA_KINDS = "yes no", "circle rectangle triangle", "black blue brown gray green red teal yellow"
VERDICTS = "1", "2", "tie"
SWAPPED = {"1": "2", "2": "1", "tie": "tie", "first": "second", "second": "first"}
SIDE = "(?<=[Ii]mage )[12]|(?<=[Vv]ideo )[12]|(?<=[Aa]nswer )[12]|(?:first|second)(?= (?:image|video|answer))"


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
        if kind in ("json", "csv", "parquet"):
            return datasets.load_dataset(kind, data_files=source, split="train")
        if not Path(source).is_dir():
            return datasets.load_dataset(source, split=split)
        rows = datasets.load_from_disk(source)
        return rows[split] if isinstance(rows, dict) else rows
    except Exception as error:
        fail(f"{source} (split {split}; HF_HOME) can't be read as a dataset: {error.__cause__ or error}")


def make_pair(row: dict, rng: np.random.Generator) -> dict:
    """easy-VQA as a judge's task: the answer against a wrong one of its kind, their sides drawn."""
    kind = next(kind.split() for kind in EASY_VQA_KINDS if row["answer"] in kind.split())
    sides = [row["answer"], str(rng.choice([other for other in kind if other != row["answer"]]))]
    first = int(rng.integers(2))  # where the right one stands
    sides = {"answer_0": sides[first], "answer_1": sides[1 - first], "verdict": str(1 + first)}
    return row | sides | {"reasoning": row["answer"]}


def load_data(args: Args, source: str, split: str, model, processor, training: bool) -> SimpleNamespace:
    """-> source, tokenizer, groups of entries (2 * row, and + 1 with its sides exchanged), encode(entries).

    Columns of pairs: `prompt`, `verdict` (1, 2 or tie), two candidates: `image_0` and `image_1`, `video_0` and
    `video_1`, or texts, `answer_0` and `answer_1`; optional: `reasoning`, and `image(s)`, `video(s)` of the
    prompt. Of chats: `messages`, every assistant turn of which is trained, `image(s)`, `video(s)`.
    """
    rows, groups = load_rows(source, split), defaultdict(list)
    known = {"messages", "verdict", "answer"} & {*rows.column_names}  # the last one alone: as easy-vqa
    if not known:
        fail(f"{source} has columns {', '.join(rows.column_names)}: it needs messages, or a verdict")
    limit = (args.train_samples if training else args.eval_samples) or None
    few = rows.select(chosen := np.sort(np.random.default_rng(0).permutation(len(rows))[:limit]))
    verdicts = few["verdict"] if "verdict" in known else [known == {"answer"} or None] * len(few)
    paths = [name for name, kind in rows.features.items() if re.match("(List|Value).*string", str(kind))]
    media = [few[name] for name in paths if name.startswith(("image", "video"))]
    for i, verdict, *names in zip(chosen.tolist(), verdicts, *media):
        one = verdict is None or (training and not args.both_orders)
        group = str(names) if args.group_by_media and any(names) else i
        groups[group] += [2 * i] if one else [2 * i, 2 * i + 1]
    begun = {"whole": not training}

    @functools.lru_cache(2 * args.train_batch_size)  # a step asks repeatedly
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
    """-> index, row, noun, truth (the verdict) and samples: prompts, see begin_prompt, with the ids (R,) that
    follow and the mask (R,) of those that are trained."""
    chat, tokenizer = make_chat(row, entry % 2 == 1), getattr(processor, "tokenizer", processor)
    messages, samples = to_messages(args, chat, folder, tokenizer), []
    for n, ids, mask in split_chat(processor, messages, end_token_ids(model, tokenizer)):
        k = begin_prompt(model, processor, messages[:n], ids[: int(mask.int().argmax())], begun)
        own = {"index": (entry, len(samples)), "ids": torch.tensor(ids[k:]), "mask": mask[k:]}
        samples.append(begun | own)
        if (length := begun["length"] + len(ids) - k) > args.max_length:
            raise ValueError(f"{length} tokens are more than --max-length")
    truth = read_verdict(messages[-1]["content"][0]["text"])
    truth = truth if n == len(messages) - 1 else None  # of several answers, the first would be asked for
    return {"index": entry, "row": row, "noun": chat.get("noun", ""), "truth": truth, "samples": samples}


def make_chat(row: dict, swap: bool) -> dict:
    """A pair -> a chat, the judgement last, and noun: what its candidates are called."""
    if row.get("messages"):
        return row
    (kind,) = [kind for kind in ("image", "video", "answer") if row.get(f"{kind}_0") is not None] or [""]
    if not kind or (verdict := str(row["verdict"])) not in VERDICTS:
        raise ValueError("a pair needs two candidates, and a verdict that is 1, 2 or tie")
    sides, noun = [row[f"{kind}_0"], row[f"{kind}_1"]], kind.capitalize()
    prompt, thought, media = row["prompt"], row.get("reasoning") or "", {}
    if swap:
        sides, verdict = sides[::-1], SWAPPED[verdict]
        thought = re.sub(SIDE, lambda found: SWAPPED[found[0]], thought)
    for name in packing.MEDIA:
        items = row.get(name) or row.get(f"{name}s") or []
        items = items if isinstance(items, list) else [items]
        prompt = prompt if f"<{name}>" in prompt else f"<{name}>" * len(items) + prompt
        media[f"{name}s"] = items + (sides if name == kind else [])
    shown = [re.sub("<(image|video)>", r"< \1>", x) if kind == "answer" else f"<{kind}>" for x in sides]
    asked = f"{prompt}\n{noun} 1: {shown[0]}\n{noun} 2: {shown[1]}"
    said = (f"<think>{thought}</think>" if thought else "") + write_verdict(verdict, noun)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return media | {"messages": turns, "noun": noun}


def write_verdict(verdict: str, noun: str) -> str:
    said = (f"{noun} 1 is better", f"{noun} 2 is better", "Both are equally good")[VERDICTS.index(verdict)]
    return f"<answer>{said}</answer>"


def read_verdict(text: str) -> str | None:
    """1, 2 or tie; None where the text has not exactly one <answer>, or another sentence in it."""
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


def split_chat(processor, chat: list[dict], end_ids: list[int]) -> list[tuple[int, list[int], Tensor]]:
    """A chat -> samples (messages of the prompt, ids (T,), mask (T,)), a picture being one token. Trained are
    the text of each assistant message and the EOS after it; the last one gets it where a template has none.

    All pictures lie in prompts: answers after a further picture make another sample. Where a message lies is
    counted: the tokens of the chat up to an answer, and up to its end, must be how those of the whole begin.
    """
    tokenizer, pictures, samples = getattr(processor, "tokenizer", processor), 0, []
    texts = [m | {"content": "".join(p.get("text", "") for p in m["content"])} for m in chat]
    given, how = texts if tokenizer is processor else chat, {"chat_template": processor.chat_template}

    def tokens(n: int, prompted: bool) -> list[int]:
        how["add_generation_prompt"] = prompted
        return tokenizer.apply_chat_template(given[:n], return_dict=False, **how)

    whole = [*tokens(len(chat), False), tokenizer.eos_token_id]
    for n, message in enumerate(chat):
        pictures += sum(part["type"] != "text" for part in message["content"])
        if message["role"] == "assistant":
            head, body = tokens(n, True), tokens(n + 1, False)
            if whole[: len(head)] != head or whole[: len(body)] != body:
                raise ValueError(f"the chat template writes message {n} differently when others follow")
            ends = [t + 1 for t in range(len(head), len(body)) if whole[t] in end_ids]
            mask = torch.zeros(ends[0] if ends else len(body) + (n == len(chat) - 1), dtype=torch.bool)
            mask[len(head) :] = True
            if samples and samples[-1][0] == pictures:  # the sample goes on
                _, n, before = samples.pop()
                mask[: len(before)] |= before
            samples.append((pictures, n, mask))
    if chat[-1]["role"] != "assistant":
        raise ValueError("a chat must end with an assistant's message")
    return [(n, whole[: len(mask)], mask) for _, n, mask in samples]


def begin_prompt(model, processor, messages: list[dict], head: list[int], begun: dict) -> int:
    """begun becomes a prompt of common/packing.py: messages, whose tokens are head (a picture being one), up to
    the last picture; all of them without pictures or if begun["whole"]. What it is already is not done again.
    -> how many of these tokens it holds."""
    media_ids = packing.media_token_ids(model.config)
    places = [t + 1 for t, token in enumerate(head) if token in media_ids]
    n = places[-1] if places and not begun["whole"] else len(head)
    key = hashlib.blake2b(str(head[:n]).encode())
    for part in (part for message in messages for part in message["content"] if part["type"] != "text"):
        x = np.asarray(part[part["type"]])
        key.update(f"{x.shape} {part.get('taken')}".encode() + x.tobytes())
    if begun.get("key") != key.digest():
        inputs = packing.encode_chat(processor, messages, add_generation_prompt=True)
        inputs = {name: torch.as_tensor(x) for name, x in inputs.items()}
        (_, P), ids = inputs["input_ids"].shape, inputs["input_ids"][0].tolist()
        if ids[P - len(head) + n :] != head[n:]:  # the processor writes what follows a picture differently
            n = len(head)
            key.update(str(head).encode())
        inputs = {k: x[:, : P - len(head) + n] if x.shape[:2] == (1, P) else x for k, x in inputs.items()}
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


class Judge(nn.ModuleDict):
    """{"model": the model} as DeepSpeed runs it: pack -> log-probs (M,) of its targets."""

    def forward(self, pack) -> Tensor:
        return packing.response_logprobs(self.model, pack)[0]


# ---- pure math: tensors in, tensors and metrics out ----


def next_token_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """L = -sum over t of log p(token_t | what is before it) / num_tokens. logprobs (M,): of a pack's trained
    tokens; num_tokens: of the whole step, so that the losses of its packs, on all ranks, add up to the mean.
    logprobs [-1, -3], 8 trained tokens in the step -> 0.5"""
    return -logprobs.sum() / num_tokens


def wilson_interval(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate p: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),
    E. B. Wilson 1927. 9 of 10 -> (0.596, 0.982)"""
    p, z2 = successes / trials, z * z / trials
    middle, spread = p + z2 / 2, z * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials))
    return max(0.0, (middle - spread) / (1 + z2)), min(1.0, (middle + spread) / (1 + z2))


# ---- rollout ----


def generate_greedily(args: Args, model, prompts: list[dict], end_ids: list[int]) -> list[Tensor]:
    """The likeliest tokens after each prompt (R_b,), up to an EOS if one comes before the length limit."""
    if not packing.is_packed(model):
        return packing.generate_plain(model, prompts, 1, args.max_response_length, end_ids, 0.0)[0]
    decoder, end, tokens = packing.Decoder(model, prompts, 1), torch.tensor(end_ids, device=model.device), []
    while len(tokens) < args.max_response_length:
        tokens.append(packing.next_logprobs(model, decoder.hidden, 1.0).argmax(-1))  # (S,)
        ended = torch.isin(torch.stack(tokens, dim=1), end)  # (S, t)
        if ended.any(1).all():
            break
        decoder.step(tokens[-1])
    kept = ended.cumsum(1) - ended.long() == 0  # up to the first EOS
    return [row[mask] for row, mask in zip(torch.stack(tokens, dim=1).cpu(), kept.cpu())]


@torch.no_grad()
def write_judgements(args: Args, model, tokenizer, rows: list[dict]) -> list[dict]:
    """The model as a judge -> of each row, see encode_row, what it writes, the verdict in that, the loss (a sum
    over tokens) of the true judgement, and of a pair the probabilities of all verdicts, by its own reasoning:

    p(verdict) = softmax over verdicts of log p(reasoning <answer>verdict</answer> | prompt)
    """
    prompts = [row["samples"][-1] | {"index": i, "seed": 0} for i, row in enumerate(rows)]
    end_ids, k = (
        end_token_ids(model, tokenizer),
        1 + len(VERDICTS),
    )  # responses of a row: the truth, 1, 2, tie
    written = generate_greedily(args, model, prompts, end_ids)
    texts, responses, masks, judged = tokenizer.batch_decode(written, skip_special_tokens=True), [], [], []
    for row, prompt, text in zip(rows, prompts, texts):
        said = [text.partition("<answer>")[0] + write_verdict(verdict, row["noun"]) for verdict in VERDICTS]
        said = [torch.tensor(ids) for ids in tokenizer(said, add_special_tokens=False)["input_ids"]]
        responses += [prompt["ids"], *said]
        masks += [prompt["mask"], *(torch.ones(len(ids), dtype=torch.bool) for ids in said)]
    masks, room = nn.utils.rnn.pad_sequence(masks, True), 2 * args.micro_batch_tokens  # no graph is kept
    logprobs, groups = torch.zeros(masks.shape), [(i, [*range(k * i, k * i + k)]) for i in range(len(rows))]
    given = groups, prompts, lambda indices: [prompts[i] for i in indices], responses, room
    for pack in packing.packs_of_rank(*given, packed=packing.is_packed(model)):
        logprobs[pack.index] = packing.response_logprobs(model, pack.to(model.device))[0].float().cpu()
    sums = (logprobs.double() * masks).sum(1).view(-1, k)  # (n, k)
    for row, prompt, own, ids, text in zip(rows, prompts, sums, written, texts):
        verdict, truth, soft = read_verdict(text), row["truth"], own[1:].softmax(0).tolist()
        judged.append({
            "response": text, "verdict": verdict, "truth": truth, "probabilities": dict(zip(VERDICTS, soft)),
            "accuracy": None if truth is None else verdict == truth,  # one that can't be read is never right
            "soft_accuracy": VERDICTS[int(np.argmax(soft))] == truth if row["noun"] else None,
            "parse_rate": verdict is not None, "tie_rate": verdict == "tie",
            "length": len(ids), "truncated_frac": int(ids[-1]) not in end_ids,
            "loss": -float(own[0]), "tokens": int(prompt["mask"].sum()),
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
    if (
        WORLD_SIZE > 1
    ):  # alone, gloo would copy in a thread of its own: with two OpenMP teams none spins any more
        dist.all_reduce(table := table.to(device))
    return table.cpu()


def gather(own: list) -> list:
    """The lists of all ranks, one after the other."""
    gathered = [own] * WORLD_SIZE
    if WORLD_SIZE > 1:
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


def packs_of_batch(args: Args, data, entries: list[int], actor) -> tuple[list, int, int]:
    """-> this rank's packs of some entries, which predict trained tokens only; the number of these on all ranks;
    how many entries can be used. Samples with the same prompt share it: pictures and first tokens."""
    own, alike = data.encode(np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist()), defaultdict(list)
    names = ("index", "key", "length", "kinds", "ids", "mask")  # what all ranks need: no pictures
    samples = gather([{name: sample[name] for name in names} for row in own for sample in row["samples"]])
    if (usable := len({sample["index"][0] for sample in samples})) * 2 < len(entries):
        fail(f"more than half of {len(entries)} rows of {data.source} can't be used: see the warnings")
    for b, sample in enumerate(samples):
        alike[sample["key"]].append(b)
    groups, responses = [(own[0], own) for own in alike.values()], [sample["ids"] for sample in samples]
    masks, packs = nn.utils.rnn.pad_sequence([sample["mask"] for sample in samples], True), []  # (B, R)
    whole = lambda indices: [data.encode([e])[0]["samples"][part] for e, part in indices]  # noqa: E731
    given = groups, samples, whole, responses, args.micro_batch_tokens, RANK, WORLD_SIZE
    how = {"packed": packing.is_packed(actor.module.model), "media_everywhere": args.zero_stage > 0}
    for pack in packing.packs_of_rank(*given, **how):
        trained = masks[pack.index]  # (M,)
        pack = pack._replace(targets=pack.targets[trained], predict_from=pack.predict_from[trained])
        packs.append(pack.to(actor.device))
    return packs, int(masks.sum()), usable


def train_step(args: Args, data, entries: list[int], actor) -> dict[str, float]:
    """One optimizer step on some entries of the data -> metrics."""
    packs, num_tokens, usable = packs_of_batch(args, data, entries, actor)
    sums = torch.zeros(2, device=actor.device)  # loss, tokens of the packs
    for k, pack in enumerate(packs):
        actor.set_gradient_accumulation_boundary(k == len(packs) - 1)
        loss = next_token_loss(actor(pack), num_tokens)
        # DeepSpeed averages over ranks, hence the factor; it must not divide by the number of packs.
        actor.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
        sums += torch.stack([loss.detach(), loss.new_tensor(pack.inputs["input_ids"].numel())])
    norm, taken = optimizer_step(actor)
    metrics = dict(zip(("loss/sft", "train/packed_tokens"), sum_over_ranks(sums, actor.device).tolist()))
    metrics |= {"train/grad_norm": norm if taken else 0.0, "train/skipped_updates": int(not taken)}
    return metrics | {"train/trained_tokens": num_tokens, "train/rows_dropped": len({*entries}) - usable}


# ---- evaluate ----


def evaluate(args: Args, model, judge, data) -> tuple[dict[str, float], list[dict]]:
    """The held-out rows, pairs in both orders, dealt out to the ranks -> metrics, and a record of each row.
    judge: the model, or its unsharded copy."""
    if judge is not model:
        judge.load_state_dict(merged_state_dict(model))
    own, judged = np.array_split(np.array(sum(data.groups, [])), WORLD_SIZE)[RANK].tolist(), []
    for start in range(0, len(own), args.generation_batch_size):
        rows = data.encode(own[start : start + args.generation_batch_size])
        for row, record in zip(rows, write_judgements(args, judge, data.tokenizer, rows) if rows else []):
            columns = {name: x for name, x in row["row"].items() if isinstance(x, str | int | float)}
            judged.append((row["index"], {"phase": "eval", "row": row["index"] // 2} | columns | record))
    judged = dict(sorted(gather(judged)))
    for entry, record in judged.items():
        swapped = judged.get(entry ^ 1, {})
        follows = swapped.get("verdict") == SWAPPED.get(record["verdict"], ())
        record |= {"swapped": swapped.get("response"), "swap_consistency": follows if swapped else None}
    records = [record for entry, record in judged.items() if entry % 2 == 0]
    return judge_metrics(records), records


def judge_metrics(records: list[dict]) -> dict[str, float]:
    """Means over the records that have what a metric needs: a verdict, two sides."""
    loss = sum(r["loss"] for r in records) / sum(r["tokens"] for r in records)
    metrics = {"eval/loss": loss, "eval/num_samples": len(records)}
    names = "accuracy soft_accuracy swap_consistency parse_rate tie_rate length truncated_frac".split()
    columns = {name: [float(r[name]) for r in records if r[name] is not None] for name in names}
    metrics |= {f"eval/{name}": float(np.mean(values)) for name, values in columns.items() if values}
    if right := columns["accuracy"]:
        metrics["eval/accuracy_low"], metrics["eval/accuracy_high"] = wilson_interval(sum(right), len(right))
    return metrics


# ---- save, resume, log ----


def tell(message: str) -> None:
    if RANK == 0:
        tqdm.write(message)  # also under a progress bar
        sys.stdout.flush()


def checkpoints(run_dir: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted(run_dir.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name.split("-")[1]))


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
        for old in checkpoints(run_dir)[: -args.save_total_limit]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def log(args: Args, run_dir: Path, metrics: dict[str, float], samples: list[dict]) -> None:
    """Rank 0 alone: to metrics.jsonl, samples.jsonl, and where --track says."""
    step = metrics["train/step"]
    files = ("metrics", [metrics]), ("samples", [{"train/step": step} | sample for sample in samples])
    for name, lines in files if RANK == 0 else ():
        with (run_dir / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    if args.track == "wandb" and RANK == 0:
        import wandb

        known = {"id": run_dir.name, "name": run_dir.name, "config": asdict(args), "dir": run_dir}
        (wandb.run or wandb.init(**known, resume="allow")).log(metrics, step=step)
    if args.track == "tensorboard" and RANK == 0:
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
    torch.manual_seed(args.seed)  # of LoRA's first weights

    # --- 2. models and engines ---
    model = load_model(args.model, dtype)
    processor = transformers.AutoProcessor.from_pretrained(args.model)  # of a text model: its tokenizer
    data = load_data(args, args.dataset, args.dataset_split, model, processor, training=True)
    num_rows, batch = sum(map(len, data.groups)), args.train_batch_size
    total_steps = args.total_steps or math.ceil(args.epochs * num_rows / batch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (args.freeze and re.search(args.freeze, name)))
    if args.lora_rank:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    actor = make_engine(args, Judge({"model": model}), dtype, total_steps)
    actor.eval()
    state = {"step": 0, "before": {}, "best": -math.inf, "skipped": 0}  # skipped: updates in a row
    if checkpoint is not None:
        state = actor.load_checkpoint(str(checkpoint / "state" / "actor"), tag="engine")[1]["ours"]

    # --- 3. data ---
    source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = load_data(args, source, args.eval_dataset_split, model, processor, False) if source else None
    if RANK == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
        for path in run_dir.glob("*.jsonl"):  # without what an interrupted run logged after its checkpoint
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            lines = [line for line in lines if 0 < state["step"] >= json.loads(line)["train/step"]]
            path.write_text("".join(lines))
    tell(f"{run_dir}: {num_rows} rows, {total_steps} steps, {WORLD_SIZE} rank(s), {device}, {dtype}")
    rows = data.encode(batch_entries(0, min(16, num_rows), data.groups, args.seed))
    probes = {s["kinds"]: s for row in rows for s in row["samples"]}  # of a text, with a picture, ...
    probes = [*probes.values()] or fail(f"{args.dataset}: no row can be used")
    tell(packing.prove_packing(model, actor, probes))
    judge = load_model(args.model, dtype).to(device) if args.zero_stage == 3 else model  # see evaluate
    packing.switch_attention(judge, model.config.get_text_config()._attn_implementation)
    received, stopped, saved = [], False, checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):  # save after this step, and end
        signal.signal(number, lambda number, frame: received.append(number))
    if eval_data and not state["before"]:  # a resumed run has it
        state["before"], records = evaluate(args, model, judge, eval_data)
        if f"eval/{args.best_metric}" not in state["before"]:
            fail(f"--best-metric {args.best_metric}: {source} has only {', '.join(state['before'])}")
        log(args, run_dir, {"train/step": 0, "train/episode": 0, **state["before"]}, records)
    steps = range(state["step"] + 1, total_steps + 1)
    hidden = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step instead
    for step in (bar := tqdm(steps, "grm_sft", total_steps, initial=state["step"], disable=hidden)):
        # --- 4. rollout, 5. score, 6. advantages: none, judgements are given and all their tokens weigh 1 ---
        began, state["step"] = time.perf_counter(), step
        entries = batch_entries((step - 1) * batch, batch, data.groups, args.seed)

        # --- 7. update ---
        actor.train()
        metrics, records = train_step(args, data, entries, actor), []
        actor.eval()

        # --- 8. sync weights: before an evaluation ---
        # --- 9. log ---
        seconds = time.perf_counter() - began
        metrics |= {"train/learning_rate": actor.get_lr()[0], "time/samples_per_second": batch / seconds}
        metrics |= {"train/step": step, "train/episode": step * batch, "time/total": seconds}
        shown = {"loss": f"{metrics['loss/sft']:.4f}"}

        # --- 10. eval and save ---
        last, better = step == total_steps, False
        state["skipped"] = metrics["train/skipped_updates"] * (state["skipped"] + 1)
        if eval_data and (last or (args.eval_steps and step % args.eval_steps == 0)):
            evaluated, records = evaluate(args, model, judge, eval_data)
            metrics |= evaluated
            value = metrics[f"eval/{args.best_metric}"] * (-1 if args.best_metric == "loss" else 1)
            better, state["best"] = value > state["best"], max(value, state["best"])
            shown[f"eval/{args.best_metric}"] = f"{abs(value):.3f}"
        bar.set_postfix(shown)
        log(args, run_dir, metrics, records)
        if hidden:
            tell(f"step {step} of {total_steps}, {seconds:.2f} s: {shown}")
        stopped = bool(sum_over_ranks(torch.tensor(len(received)), device)) and not last  # on all ranks alike
        hopeless = state["skipped"] >= 5
        if last or stopped or hopeless or better or (args.save_steps and step % args.save_steps == 0):
            saved = save_checkpoint(args, run_dir, {"actor": actor}, processor, state)
        if better and RANK == 0:
            shutil.copytree(saved, run_dir / "best.tmp", ignore=shutil.ignore_patterns("state"))
            shutil.rmtree(run_dir / "checkpoint-best", ignore_errors=True)
            (run_dir / "best.tmp").rename(run_dir / "checkpoint-best")
        if hopeless:
            fail(f"gradients were not finite since step {step - 4}; {saved} has the weights from before")
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
