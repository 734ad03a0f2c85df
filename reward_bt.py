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
"""Bradley-Terry reward model for text and vision-language models, in one file.

Paper: Bradley-Terry rewards from comparisons, https://arxiv.org/abs/2203.02155 eq. (1) (more than two ranked responses:
all pairs of a prompt together) · margins: https://arxiv.org/abs/2307.09288 eq. (2) · centering: https://arxiv.org/abs/2312.09244.
Reference implementations: huggingface/trl@f2cd577 trl/trainer/reward_trainer.py, and EasyDeL's RewardTrainer. Differences:
- the responses of a prompt share its tokens and pictures in one packed row (common/packing.py): nothing is encoded twice
- pictures and videos; rankings of more than two responses; label smoothing and weights
- the score is read at the true last token, whatever the padding; the head is always trained and saved, also with LoRA
- rows that are too long are cut or left out as --overflow says, and counted; metrics of each held-out set stand apart

    python reward_bt.py                          # embedded default: tiny VLM on easy-VQA pairs, minutes on two CPU cores
    python reward_bt.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset pairs.jsonl --learning-rate 5e-6 ...   # one GPU
    deepspeed reward_bt.py --zero-stage 3 ...    # or: torchrun --standalone --nproc_per_node=8 reward_bt.py ...
"""

import contextlib
import contextvars
import fcntl
import functools
import hashlib
import io
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from datetime import timedelta
from itertools import combinations, groupby
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
    encode_vision_inputs,
    forward_hidden,
    media_token_ids,
    plan_packs,
    prompt_positions,
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
    """the backbone: folder or hub id of a vision-language or text model, or of a reward model, whose head is then kept"""
    dataset: str = "easy-vqa"
    """training prompts: easy-vqa (embedded), a .jsonl/.json/.parquet/.csv file, a saved dataset folder, or a hub id"""
    dataset_split: str = "train"
    """split of a hub id or of a saved dataset folder with several splits"""
    eval_datasets: tuple[str, ...] = ()
    """held-out sets as name=source, sources as --dataset; none: the test split of easy-vqa if that is the dataset"""
    eval_split: str = "test"
    """split of those held-out sets that have several"""
    prompt_column: str | None = None
    """column with a string (<image> and <video> mark places) or chat messages; None: prompt, question, problem, messages"""
    image_column: str | None = None
    """column with one picture or a list (path, bytes, PIL); None: images, image"""
    video_column: str | None = None
    """column with one video or a list (file, or list of frames); None: videos, video"""
    video_fps: float = 2.0
    """frames per second that are taken from a video file; lists of frames are taken as they are, at this rate"""
    chosen_column: str | None = None
    """column with the better response (string or messages), or with a whole chat; None: chosen, chosen_ids"""
    rejected_column: str | None = None
    """column with the worse response, as --chosen-column; None: rejected, rejected_ids"""
    responses_column: str | None = None
    """column with a list of responses, best first, in place of the two above; None: responses, rankings"""
    margin_column: str | None = None
    """column with the margin that the chosen score should keep; None: margin, and 0 where there is none"""
    weight_column: str | None = None
    """column with the weight of a row in the loss; None: weight, and 1 where there is none"""
    system_prompt: str | None = None
    """system message put before prompts that have none"""
    plain_prompts: bool = False
    """string prompts go to a text model as they are, without its chat template"""
    chat_template_kwargs: str = "{}"
    """JSON object handed to the chat template, for example '{"enable_thinking": false}'"""
    on_bad_sample: Literal["error", "skip"] = "error"
    """a row that can't be used, found before training: end the run, or leave it out and name it in bad_samples.jsonl"""
    max_length: int = 1024
    """tokens of prompt and one response, picture tokens counted; see --overflow"""
    overflow: Literal["filter", "keep_start", "keep_end", "error"] = "filter"
    """longer rows: leave out, cut the end of the responses, cut the start of the prompt (never its pictures), or stop"""
    lora_rank: int = 0
    """train low-rank adapters of this rank instead of all weights; the reference is the model without them; 0 = off"""
    lora_alpha: float = 32.0
    """the adapters' output is scaled by alpha / rank"""
    lora_targets: str | None = None
    """regular expression on names of linear modules that get an adapter; None: all linear layers of the language model"""
    load_in_4bit: bool = False
    """4-bit base weights (bitsandbytes, CUDA) below the adapters of --lora-rank"""
    freeze: str | None = None
    """regular expression on names of parameters that are not trained, for example 'visual|embed'"""

    # --- algorithm ---
    head_init: Literal["inverse_sqrt", "config"] = "inverse_sqrt"
    """standard deviation of a new head: 1 / sqrt(H + 1) (https://arxiv.org/abs/2009.01325), or initializer_range"""
    center_coef: float = 0.0
    """weight of (chosen + rejected)^2, which keeps scores near 0; 0 = off (TRL: off, advised 0.01; EasyDeL: 0.1)"""
    label_smoothing: float = 0.02
    """probability that a label is wrong; above 0 the margins stay finite, below 0.5"""
    dropout: bool = False
    """train with the dropout of the model's config"""
    router_aux_coef: float | None = None
    """weight of the load-balancing loss of a mixture of experts; None: as its config says"""

    # --- optimizer ---
    epochs: float = 1.0
    """passes over the training rows"""
    max_steps: int = 300
    """optimizer steps; 0 = as --epochs says"""
    training_time_limit: float = 0.0
    """minutes of training after which the run evaluates, saves and ends; 0 = none"""
    batch_size: int = 32
    """prompts (each a pair or a ranking) per optimizer step, over all ranks"""
    learning_rate: float = 5e-4
    """peak learning rate; the default suits the tiny model, pretrained ones want about 5e-6 (with LoRA 1e-4)"""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """shape after the warm-up"""
    min_lr_ratio: float = 0.1
    """the cosine ends at this fraction of the peak"""
    warmup_steps: int = 10
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
    """what DeepSpeed shards over ranks: 1 optimizer, 2 + gradients, 3 + parameters"""
    offload_optimizer: bool = False
    """keep optimizer states and the optimizer step on the CPU (needs --zero-stage 1 or more)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    micro_batch_tokens: int = 8192
    """tokens of one packed forward and backward on one rank; the responses of a prompt stay together in it"""

    # --- logging and checkpoints ---
    eval_steps: int = 150
    """evaluate every this many steps, and before the first and after the last; 0 = only before and after"""
    eval_samples: int = 1000
    """held-out prompts, a fixed random subset; 0 = all"""
    save_steps: int = 0
    """checkpoint every this many steps, and always at the end; 0 = only at the end"""
    save_interval_minutes: float = 0.0
    """checkpoint when this much time has passed since the last one; 0 = never"""
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
        positive="max_length epochs batch_size learning_rate max_grad_norm lora_alpha max_skipped_updates "
        "micro_batch_tokens save_total_limit video_fps",
        not_negative="max_checkpoint_gb "
        "seed center_coef label_smoothing router_aux_coef max_steps training_time_limit "
        "warmup_steps weight_decay eval_steps eval_samples save_steps save_interval_minutes lora_rank",
        unit="min_lr_ratio adam_beta1 adam_beta2",
    )
    if args.label_smoothing >= 0.5:
        fail(
            f"--label-smoothing must be less than 0.5, not {args.label_smoothing}: from there on the labels say nothing"
        )
    if args.batch_size < world_size:
        fail(f"--batch-size {args.batch_size} is less than one prompt for each of {world_size} ranks")
    if args.freeze is not None:
        try:
            re.compile(args.freeze)
        except re.error as error:
            fail(f"--freeze {args.freeze} is not a regular expression ({error})")
    parse_template_kwargs(args)
    check_lora_args(args)
    eval_sources(args)


def eval_sources(args: Args) -> dict[str, str]:
    """--eval-datasets -> {name: source}; a source without a name is called as its file or folder."""
    if not args.eval_datasets:
        return {"easy-vqa": "easy-vqa"} if args.dataset == "easy-vqa" else {}
    sources = {}
    for item in args.eval_datasets:
        name, _, source = item.rpartition("=")
        name = name or Path(source).stem
        if not re.fullmatch(r"[\w.-]+", name) or not source:
            fail(f"--eval-datasets {item}: write it as name=source, the name of letters, digits, dots and dashes")
        if name in sources:
            fail(f"--eval-datasets {item}: there are two sets called {name!r}; give them different names")
        sources[name] = source
    return sources


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
# data: rows of any dataset -> token ids and pictures, checked before training. To be skipped on a first reading
# =====================================================================================================================

RANKING_COLUMNS = {
    "prompt": ("prompt", "question", "problem", "messages"),
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "chosen": ("chosen", "chosen_ids"),
    "rejected": ("rejected", "rejected_ids"),
    "responses": ("responses", "rankings"),
    "margin": ("margin",),
    "weight": ("weight",),
}
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
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


def load_preferences(source: str, split: str, seed: int):
    """A `datasets.Dataset`. easy-vqa: the right answer is preferred to a wrong one of its kind, drawn per row."""
    rows = load_rows(source, split)
    if source != "easy-vqa":
        return rows
    generator = np.random.default_rng(seed)
    others = {a: [b for b in kind if b != a] for kind in EASY_VQA_KINDS for a in kind}
    wrong = [others[answer][generator.integers(len(others[answer]))] for answer in rows["answer"]]
    columns = {"chosen": list(rows["answer"]), "rejected": wrong}
    for name, answers in columns.items():
        rows = rows.add_column(name, [f"<answer>{answer}</answer>" for answer in answers])
    return rows


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def find_ranking_columns(args: Args, names: list[str], source: str) -> dict[str, str | None]:
    """-> {"prompt": its column or None, "chosen": ...}: the flag, or the first sensible name that is there."""
    columns = {}
    for kind, candidates in RANKING_COLUMNS.items():
        chosen = getattr(args, f"{kind}_column")
        if chosen is not None and chosen not in names:
            fail(f"--{kind}-column {chosen}: {source} has no such column; it has {', '.join(names)}")
        columns[kind] = chosen or next((name for name in candidates if name in names), None)
    if columns["responses"] is None:
        for side in ("chosen", "rejected"):
            if columns[side] is None:
                fail(
                    f"{source} has no {side} column ({', '.join(RANKING_COLUMNS[side])}); name it with --{side}-column"
                )
    return columns


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


def read_chat(value: Any, where: str, name: str) -> str | list[dict]:
    """A string, or messages with role and content, {"from", "value"} (ShareGPT) included; a lone message is a chat of one."""
    if isinstance(value, str):
        return value
    if value is None or value == []:
        fail(f"{where}: {name} is missing")
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        fail(f"{where}: {name} must be a string or messages, not {str(value)[:80]!r}")
    messages = [{key: x for key, x in m.items() if x is not None} for m in messages]  # tables fill up with None
    for message in messages:
        if "from" in message and "value" in message:
            sender = message.pop("from")
            message |= {"role": ROLES.get(sender, sender), "content": message.pop("value")}
        if "tool_calls" in message:
            message.setdefault("content", "")
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, (str, list)):
            fail(f"{where}: a message of {name} has no role and content: {str(message)[:80]!r}")
        if isinstance(content, list):
            parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
            if not all(isinstance(part, dict) for part in parts):
                fail(f"{where}: a message part must be text, image or video, not {str(content)[:80]!r}")
            message["content"] = [{key: x for key, x in part.items() if x is not None} for part in parts]
    return messages


def read_response(messages: list[dict], where: str, name: str) -> list[dict]:
    """The messages that follow the prompt, as lists of text parts."""
    messages = [{**m, "content": as_list(m["content"])} for m in messages]
    for message in messages:
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in message["content"]]
        if any(part.get("type") != "text" for part in parts):
            fail(f"{where}: a picture or video stands in {name}; it belongs into the prompt, the same for all")
        message["content"] = [{"type": "text", "text": part.get("text", "")} for part in parts]
    if not any(part["text"].strip() for m in messages for part in m["content"]):
        if not any("tool_calls" in message for message in messages):
            fail(f"{where}: {name} is empty")
    return messages


def read_number(row: dict, column: str | None, default: float, where: str) -> float:
    if column is None:
        return default
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        fail(f"{where}: {column} must be a finite number, not {str(value)[:80]!r}")
    return float(value)


def read_json(row: dict, column: str, kind: type, where: str) -> Any:
    """A column that holds a dict or list, or its JSON text; None where there is none."""
    value = row.get(column)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kind):
        fail(f"{where}: {column} must be a {kind.__name__} or its JSON text, not {str(value)[:80]!r}")
    return value


def split_prompt(prompt: Any, chats: list, where: str) -> tuple[Any, list]:
    """-> the prompt, and what follows it of each response. Whole chats share their first messages, whatever `prompt` is."""
    whole = {isinstance(chat, list) and chat[0]["role"] != "assistant" for chat in chats}
    if len({type(chat) for chat in chats}) > 1 or len(whole) > 1:
        fail(f"{where}: some responses are strings or answers, others are whole chats; give all in one form")
    if not whole.pop():
        if prompt is None and isinstance(chats[0], list):
            fail(f"{where}: the responses are answers without a prompt; name its column with --prompt-column")
        return prompt, chats
    shared = 0
    while all(len(chat) > shared and chat[shared] == chats[0][shared] for chat in chats):
        shared += 1
    if shared == 0:
        fail(f"{where}: the chats begin with different messages (pictures count); they must share the prompt")
    return chats[0][:shared], [chat[shared:] for chat in chats]


def read_ranking(row: dict, data: dict, where: str) -> dict:
    """One row in one shape: prompt messages, the messages after it of each response (best first), media, margin, weight."""
    columns = data["columns"]
    names, values = (
        ["the chosen response", "the rejected response"],
        [row.get(columns[s]) for s in ("chosen", "rejected")],
    )
    if columns["responses"]:
        values = as_list(row[columns["responses"]])
        names = [f"response {i + 1}" for i in range(len(values))]
    if len(values) < 2:
        fail(f"{where}: {len(values)} response(s) in {columns['responses']}; a ranking needs at least two")
    images, videos = (as_list(row[columns[k]] if columns[k] else None, k == "video") for k in ("image", "video"))
    weight = read_number(row, columns["weight"], 1.0, where)
    if weight <= 0:
        fail(f"{where}: {columns['weight']} must be greater than 0, not {weight}; leave the row out")
    messages, tails, ids, plain, kwargs = [], [], None, False, data["template_kwargs"]
    if all(isinstance(v, list) and v and all(isinstance(i, int) for i in v) for v in values):
        if images or videos:
            fail(f"{where}: token ids and pictures can't go together; give the responses as text")
        ids = values
    else:
        chats = [read_chat(value, where, name) for value, name in zip(values, names)]
        prompt = row[columns["prompt"]] if columns["prompt"] else None
        if columns["prompt"] and prompt is None and isinstance(chats[0], str):
            fail(f"{where}: the prompt in column {columns['prompt']!r} is missing")
        prompt, chats = split_prompt(prompt, chats, where)
        if prompt is None:  # strings that hold prompt and response: plain text
            if images or videos or data["is_vision"]:
                fail(f"{where}: strings without a prompt are for text models; give a prompt column")
            plain, chats = True, [[{"role": "user", "content": chat}] for chat in chats]
        else:
            plain = data["plain_prompts"] and isinstance(prompt, str)
            messages, images, videos = read_messages(read_chat(prompt, where, "the prompt"), images, videos, where)
            if data["system_prompt"] and messages[0]["role"] != "system":
                system = {"role": "system", "content": [{"type": "text", "text": data["system_prompt"]}]}
                messages = [system, *messages]
        chats = [[{"role": "assistant", "content": chat}] if isinstance(chat, str) else chat for chat in chats]
        tails = [read_response(chat, where, name) for chat, name in zip(chats, names)]
        own = read_json(row, "chat_template_kwargs", dict, where) or {}
        own |= {"tools": read_json(row, "tools", list, where)}
        kwargs = {**kwargs, **{name: value for name, value in own.items() if value is not None}}
    for (i, first), (j, second) in combinations(enumerate(ids or tails), 2):
        if first == second:
            fail(f"{where}: {names[i]} and {names[j]} are the same; leave the row out")
    return {
        "messages": messages,
        "tails": tails,
        "ids": ids,
        "images": images,
        "videos": videos,
        "margin": read_number(row, columns["margin"], 0.0, where),
        "weight": weight,
        "plain": plain,
        "template_kwargs": kwargs,
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


def adds_special_tokens(tokenizer, row: dict) -> bool:
    """A chat template has its own BOS; plain text gets the tokenizer's."""
    return tokenizer.chat_template is None or row["plain"]


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


def encode_group(model, processor, row: dict, texts: list[str]) -> tuple[dict, list[torch.Tensor]]:
    """Several rendered texts that begin alike, over the same media -> their common first tokens as a prompt that is
    encoded once, and what is left of each, (R,) with R >= 1. Token for token the texts as the processor sees them alone."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer(texts, add_special_tokens=adds_special_tokens(tokenizer, row))["input_ids"]  # placeholders single
    common_length = 0
    while common_length < min(map(len, ids)) - 1 and len({row_ids[common_length] for row_ids in ids}) == 1:
        common_length += 1
    media_ids = set(media_token_ids(model.config))
    rests = [row_ids[common_length:] for row_ids in ids]
    if any(media_ids & set(rest) for rest in rests):
        fail(f"{row['where']}: a picture or video stands where the answers differ already; put it into the prompt")
    inputs = run_processor(processor, row, texts[0])
    sample = make_prompt(model, inputs, inputs["input_ids"].shape[1] - (len(ids[0]) - common_length))
    return sample, [torch.tensor(rest) for rest in rests]


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


def tokenize_ranking(model, processor, row: dict) -> list[list[int]]:
    """Token ids of the K whole sequences, a picture still one placeholder."""
    if row["ids"] is not None:
        vocab_size, media_ids = model.config.get_text_config().vocab_size, set(media_token_ids(model.config))
        if any(not 0 <= i < vocab_size or i in media_ids for ids in row["ids"] for i in ids):
            fail(f"{row['where']}: a token id is outside the vocabulary of {vocab_size} or stands for a picture")
        return row["ids"]
    tokenizer = getattr(processor, "tokenizer", processor)
    texts = [render_chat(processor, row, [*row["messages"], *tail]) for tail in row["tails"]]
    return tokenizer(texts, add_special_tokens=adds_special_tokens(tokenizer, row))["input_ids"]


def common_prefix(ids: list[list[int]]) -> int:
    """Tokens that all sequences begin with; at least one of each is left over."""
    length = 0
    while length < min(map(len, ids)) - 1 and len({sequence[length] for sequence in ids}) == 1:
        length += 1
    return length


def fit_lengths(P: int, R: list[int], fixed: int, max_length: int, overflow: str) -> tuple[int, list[int]] | None:
    """Lengths of a prompt, of which `fixed` tokens belong to pictures, and its responses after the cut; None: leave it out.

    keep_start cuts the end of responses, keep_end the start of the prompt; what this can't mend is left out.
    fit_lengths(6, [2, 5], 4, 8, "keep_start") -> (6, [2, 2]);   (6, [2, 4], 4, 8, "keep_end") -> (4, [2, 4])
    """
    if P + max(R) <= max_length:
        return P, R
    if overflow == "keep_start" and P < max_length:
        return P, [min(r, max_length - P) for r in R]
    if overflow == "keep_end" and max_length - max(R) >= max(fixed, 1):
        return max_length - max(R), R
    return None


def encode_ranking(
    model, processor, row: dict, lengths: tuple[int, list[int]] | None
) -> tuple[dict, list[torch.Tensor]]:
    """The prompt that the responses share, as common/packing.py takes it, and the rest of each; cut to `lengths` (P, [R])."""
    if row["ids"] is not None:
        n = common_prefix(row["ids"])
        prompt_ids = torch.tensor(row["ids"][0][:n])
        sample = {
            "prompt_ids": prompt_ids,
            "position_ids": prompt_positions(model, prompt_ids, {}),
            "images": [],
            "videos": [],
        }
        rests = [torch.tensor(ids[n:]) for ids in row["ids"]]
    else:
        texts = [render_chat(processor, row, [*row["messages"], *tail]) for tail in row["tails"]]
        sample, rests = encode_group(model, processor, row, texts)
    if lengths is None:
        return sample, rests
    P, R = lengths
    rests = [rest[:r] for rest, r in zip(rests, R)]
    if P < len(sample["prompt_ids"]):
        sample = cut_prompt(model, sample, len(sample["prompt_ids"]) - P)
    assert len(sample["prompt_ids"]) == P and [len(rest) for rest in rests] == R, f"{row['where']}: counted otherwise"
    return sample, rests


def cut_prompt(model, sample: dict, count: int) -> dict:
    """The prompt without its first `count` tokens that are no picture's; positions are those of what is left."""
    prompt_ids = sample["prompt_ids"]
    text = ~torch.isin(prompt_ids, torch.tensor(media_token_ids(model.config), dtype=torch.long))  # (P,)
    keep = ~text | (text.cumsum(0) > count)  # (P,)
    inputs, sample = {}, {**sample, "prompt_ids": prompt_ids[keep]}
    if "mm_token_type_ids" in sample:
        inputs["mm_token_type_ids"] = sample["mm_token_type_ids"] = sample["mm_token_type_ids"][keep]
    for item in [*sample["images"], *sample["videos"]]:
        for name in item.keys() & {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}:
            inputs[name] = torch.cat([inputs[name], item[name]]) if name in inputs else item[name]
    sample["position_ids"] = prompt_positions(model, sample["prompt_ids"], inputs)
    return sample


def prepare_rankings(args: Args, model, processor, source: str, split: str, limit: int, seed: int, show: bool) -> dict:
    """Read, check and measure a dataset before training: what is wrong with a row is said here, not after an hour.

    -> {"rows": Dataset, "columns", ..., "keep": indices of the rows that are used, "lengths": {index: (P, [R, ...])},
    "margins", "weights": {index: number}, "last_ids": tokens that sequences end with, "dropped", "cut": how many rows were
    left out or cut by --overflow}.
    Every picture is decoded once; limit > 0 takes a fixed random subset first.
    """
    from tqdm import tqdm

    rows = load_preferences(source, split, seed)
    if len(rows) == 0:
        fail(f"{source} is empty")
    tokenizer = getattr(processor, "tokenizer", processor)
    data = {
        "rows": rows,
        "columns": find_ranking_columns(args, rows.column_names, source),
        "folder": Path(source).parent if Path(source).is_file() else Path("."),
        "source": source,
        "system_prompt": args.system_prompt,
        "plain_prompts": args.plain_prompts,
        "template_kwargs": parse_template_kwargs(args),
        "video_fps": args.video_fps,
        "is_vision": tokenizer is not processor,
    }
    indices = np.arange(len(rows))
    if 0 < limit < len(rows):
        indices = np.sort(np.random.default_rng(0).permutation(len(rows))[:limit])
    cache = {}
    data |= {
        "keep": [],
        "lengths": {},
        "margins": {},
        "weights": {},
        "last_ids": set(),
        "bad": [],
        "dropped": 0,
        "cut": 0,
    }
    shortest = math.inf

    def measure(i: int) -> tuple:
        row = get_ranking(data, i)
        return row, *measure_ranking(model, processor, row, cache)

    for i in tqdm(indices.tolist(), desc=f"checking {source} ({split})", disable=not show, leave=False):
        checked = check_row(args, data, i, measure)
        if checked is None:
            continue
        row, ids, P, R, fixed = checked
        shortest = min(shortest, P + max(R))
        fitted = fit_lengths(P, R, fixed, args.max_length, args.overflow)
        if fitted != (P, R) and args.overflow == "error":
            fail(
                f"{row['where']} has {P + max(R)} tokens, --max-length is {args.max_length}; raise it or choose an --overflow"
            )
        if fitted is not None and fitted[1] != R:  # cut ends may leave equal responses
            ends = [tuple(sequence[-n:][:r]) for sequence, n, r in zip(ids, R, fitted[1])]
            fitted = fitted if len(set(ends)) == len(ends) else None
        if fitted is None:
            data["dropped"] += 1
            continue
        if fitted[0] + sum(fitted[1]) > args.micro_batch_tokens:
            fail(
                f"{row['where']}: prompt and responses have {fitted[0] + sum(fitted[1])} tokens, which must fit into one pack; "
                f"raise --micro-batch-tokens {args.micro_batch_tokens}"
            )
        data["cut"] += fitted != (P, R)
        data["last_ids"] |= {sequence[-1] for sequence in ids}
        data["keep"].append(i)
        data["lengths"][i], data["margins"][i], data["weights"][i] = fitted, row["margin"], row["weight"]
    report_bad(data, len(indices), show)
    if not data["keep"]:
        fail(
            f"all {len(indices)} rows of {source} are longer than --max-length {args.max_length} (the shortest has {shortest} "
            "tokens); raise it or choose another --overflow"
        )
    first = data["keep"][0]  # the whole path once, pixels and positions included
    encode_ranking(model, processor, get_ranking(data, first), data["lengths"][first])
    return data


def measure_ranking(model, processor, row: dict, cache: dict) -> tuple[list[list[int]], int, list[int], int]:
    """-> token ids of the sequences, a picture still one placeholder; lengths of prompt and responses; tokens of its media."""
    ids, media_ids = tokenize_ranking(model, processor, row), set(media_token_ids(model.config))
    if min(map(len, ids)) == 0:
        fail(f"{row['where']}: a response has no tokens")
    P = common_prefix(ids)
    R, fixed = [len(sequence) - P for sequence in ids], sum(token in media_ids for token in ids[0][:P])
    if row["videos"]:
        sample, _ = encode_ranking(model, processor, row, None)
        P, fixed = len(sample["prompt_ids"]), sum(int(token) in media_ids for token in sample["prompt_ids"])
    elif row["images"]:
        extra = count_picture_tokens(processor, row, cache)
        P, fixed = P + extra, fixed + extra
    if P == 0:
        fail(f"{row['where']}: the responses have no token in common, so there is nothing to share; give them a prompt")
    return ids, P, R, fixed


def count_picture_tokens(processor, row: dict, cache: dict) -> int:
    """Tokens of the row's pictures beyond their placeholders; every picture is read. cache: by path, and by sizes."""
    sizes = []
    for image in row["images"]:
        size = cache.get(image) if isinstance(image, str) else None
        if size is None:
            width, height = load_image(image, row["folder"], row["where"]).size
            size = (height, width)
            try:
                count_prompt_tokens(processor, [""], [[size]], False)
            except Exception as error:
                fail(f"{row['where']}: the processor rejects an image of {width} x {height} pixels ({one_line(error)})")
            if isinstance(image, str):
                cache[image] = size
        sizes.append(size)
    key = tuple(sizes)
    if key not in cache:
        cache[key] = count_prompt_tokens(processor, [""], [sizes], False)[0]
    return cache[key]


def get_ranking(data: dict, index: int) -> dict:
    where = f"{data['source']} row {index}"
    try:
        raw = data["rows"][index]
    except Exception as error:
        fail(f"{where} can't be read ({one_line(error)})")
    return read_ranking(raw, data, where)


def batch_indices(start: int, count: int, num_rows: int, seed: int) -> list[int]:
    """Rows start ... start + count - 1 of one endless stream of shuffled epochs."""
    stream = range(start, start + count)
    epochs = {k // num_rows for k in stream}
    order = {e: np.random.default_rng([seed, e]).permutation(num_rows) for e in epochs}
    return [int(order[k // num_rows][k % num_rows]) for k in stream]


# =====================================================================================================================
# model
# =====================================================================================================================


class RewardModel(nn.Module):
    """A backbone and a scalar head without bias: pack -> rewards (S,), fp32, read at the last token of each response."""

    def __init__(self, model, score: nn.Linear, router_aux_coef: float | None = None):
        super().__init__()
        self.model = model
        self.score = score
        self.router_logits = None
        config = model.config.get_text_config()
        coef = getattr(config, "router_aux_loss_coef", 0.0) if router_aux_coef is None else router_aux_coef
        self.router_aux_coef = coef if hasattr(config, "num_experts_per_tok") else 0.0
        if self.router_aux_coef:
            config.output_router_logits = True
            model.register_forward_hook(self.keep_router_logits)

    @property
    def head_weight(self) -> nn.Parameter:
        return self.score.weight

    def keep_router_logits(self, module, inputs, output) -> None:
        self.router_logits = getattr(output, "router_logits", None)

    def forward(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = forward_hidden(self.model, pack, last=True)  # (S, H)
        rewards = hidden.float() @ self.head_weight[0].float()  # (S,)
        return rewards, self.router_loss(pack)

    def router_loss(self, pack: Pack) -> torch.Tensor:
        """Load-balancing loss of a mixture of experts over the tokens of this pack, weighted; else 0."""
        if not self.router_logits:
            return torch.zeros((), device=pack.input_ids.device)
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.model.config.get_text_config()
        num_experts = getattr(config, "num_experts", None) or config.num_local_experts
        loss = load_balancing_loss_func(
            self.router_logits, num_experts, config.num_experts_per_tok, pack.attention_mask
        )
        self.router_logits = None
        return self.router_aux_coef * loss


def load_backbone(args: Args, dtype: torch.dtype) -> tuple[Any, nn.Linear]:
    """-> backbone and head. Text: that of the transformers classifier, where there is one, so that it can be saved as such."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BitsAndBytesConfig

    path, kwargs = resolve_model(args.model), {}
    if args.load_in_4bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=["score"]
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        is_classifier = "ForSequenceClassification" in (config.architectures or [""])[0]
        if is_classifier and config.num_labels != 1:
            fail(f"--model {args.model} is a classifier with {config.num_labels} labels; a reward model has one")
        auto = AutoModel
        if classifier_class(config) is not None:
            auto, kwargs["num_labels"] = AutoModelForSequenceClassification, 1
        model, info = auto.from_pretrained(path, dtype=dtype, use_safetensors=True, output_loading_info=True, **kwargs)
        head_file = Path(path) / "score.safetensors"
        saved_head = load_file(head_file)["score.weight"] if head_file.is_file() else None
    except Exception as error:
        fail(f"--model {args.model} can't be loaded ({one_line(error)})")
    missing = sorted(set(info["missing_keys"]) - {"score.weight"})
    if missing:
        fail(f"--model {args.model} lacks the weights of {len(missing)} parameters, such as {missing[0]}")
    if auto is AutoModelForSequenceClassification:
        if not isinstance(getattr(model, "score", None), nn.Linear):
            fail(f"--model {args.model}: {type(model).__name__} has no score at its last token; choose a decoder")
        if not info["missing_keys"]:
            saved_head = model.score.weight.detach()
    text_config = config.get_text_config()
    std = (text_config.hidden_size + 1) ** -0.5
    if args.head_init == "config":
        std = text_config.initializer_range
    torch.manual_seed(args.seed)
    score = nn.Linear(text_config.hidden_size, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        score.weight.normal_(std=std)
        if saved_head is not None:
            score.weight.copy_(saved_head)
    return model.base_model, score


def classifier_class(config):
    """The transformers class `...ForSequenceClassification` of a text model; None for others and for vision-language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    has_vision = hasattr(config, "vision_config")
    return None if has_vision else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)


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


def set_pad_token(model, tokenizer, last_ids: set[int]) -> None:
    """A pad token that no sequence ends with, since transformers' classifiers read the score at the last token that is not
    pad: where pad is EOS they read one too early. Takes a special token that is there, else adds one."""
    endings = {tokenizer.eos_token_id, *last_ids}
    names = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    usable = [name for name in names if name is not None and tokenizer.convert_tokens_to_ids(name) not in endings]
    if usable:
        tokenizer.pad_token = usable[0]
    else:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id


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


def freeze_parameters(args: Args, module: nn.Module) -> None:
    """--freeze, after adapters are in place; something must match, and something must be left to train."""
    if args.freeze is None:
        return
    names = [name for name, _ in module.named_parameters()]
    frozen = [name for name in names if re.search(args.freeze, name)]
    if not frozen:
        fail(f"--freeze {args.freeze} matches no parameter; names look like {names[0]} and {names[-1]}")
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        fail(f"--freeze {args.freeze} matches every parameter, so nothing is left to train")


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


def ranking_pairs(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All pairs of each ranking. sizes: responses per prompt, best first, prompts one after the other in one list (S,)
    -> chosen (B,) and rejected (B,) positions in that list, owner (B,) prompt of a pair, share (B,) = 1 / pairs of its prompt.

    sizes [2, 3] -> chosen [0, 2, 2, 3], rejected [1, 3, 4, 4], owner [0, 1, 1, 1], share [1, 1/3, 1/3, 1/3]
    Source: https://arxiv.org/abs/2203.02155 eq. (1).
    """
    pairs, start = [], 0
    for g, K in enumerate(sizes):
        pairs += [(start + i, start + j, g, 2 / (K * (K - 1))) for i, j in combinations(range(K), 2)]
        start += K
    chosen, rejected, owner, share = zip(*pairs) if pairs else ((), (), (), ())
    indices = [torch.tensor(x, dtype=torch.long) for x in (chosen, rejected, owner)]
    return *indices, torch.tensor(share, dtype=torch.float32)


def bradley_terry_loss(
    chosen_rewards: torch.Tensor,
    rejected_rewards: torch.Tensor,
    margins: torch.Tensor,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood of each preference, and the centering term, all (B,).

    d           = chosen_rewards - rejected_rewards - margins
    bt_loss     = -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)
    center_loss = (chosen_rewards + rejected_rewards)^2
    Raises AssertionError unless all shapes are (B,): (B, 1) - (B,) would be (B, B).

    chosen [1, 0], rejected [0, 2], margins [0, .5] -> d [1, -2.5]: bt_loss [.3133, 2.5789], center_loss [1, 4]
    Sources: https://arxiv.org/abs/2307.09288 eq. (2), smoothing https://arxiv.org/abs/2305.18290 (as in cDPO),
    centering https://arxiv.org/abs/2312.09244.
    """
    assert chosen_rewards.dim() == 1 and chosen_rewards.shape == rejected_rewards.shape == margins.shape
    d = chosen_rewards - rejected_rewards - margins
    bt_loss = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
    return bt_loss, (chosen_rewards + rejected_rewards) ** 2


def ranking_loss(
    rewards: torch.Tensor,
    sizes: list[int],
    margins: torch.Tensor,
    weights: torch.Tensor,
    label_smoothing: float,
    center_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over n prompts of weight * mean over the prompt's pairs of (bt_loss + center_coef * center_loss), and its two parts.

    rewards (S,) in the order of `sizes`, margins (n,), weights (n,). To be divided by the weights of the whole optimizer step.

    rewards [1, 0], sizes [2], margins [0], weights [2], no smoothing, center_coef .1 -> 2 * (.3133 + .1) = .8265
    Source: https://arxiv.org/abs/2203.02155 eq. (1): a prompt counts once, however many of its responses are ranked.
    """
    assert rewards.shape == (sum(sizes),) and margins.shape == weights.shape == (len(sizes),)
    chosen, rejected, owner, share = (x.to(rewards.device) for x in ranking_pairs(sizes))  # (B,)
    bt_loss, center_loss = bradley_terry_loss(rewards[chosen], rewards[rejected], margins[owner], label_smoothing)
    parts = {
        "bt_loss": (weights[owner] * share * bt_loss).sum(),
        "center_loss": (weights[owner] * share * center_loss).sum(),
    }
    return parts["bt_loss"] + center_coef * parts["center_loss"], parts


def calibration_error(
    margins: torch.Tensor, share: torch.Tensor, num_bins: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected calibration error of sigmoid(|chosen - rejected|), the probability that the higher score is the better one.

    margins (B,) = chosen - rejected, share (B,) weights; bins of equal width over [0.5, 1]
    -> sum_b weight_b |accuracy_b - confidence_b|, and a table (num_bins, 3) of confidence, accuracy and weight of each bin.

    margins [2, -2, 0], share [1, 1, 1]: confidences .881, .881, .5, right 1, 0, 1/2 -> (2 * |.5 - .881| + 0) / 3 = .2539
    Source: https://arxiv.org/abs/1706.04599.
    """
    confidence, right = margins.abs().sigmoid(), preferred(margins)
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(0, num_bins - 1)
    zeros = torch.zeros(num_bins, dtype=margins.dtype)
    weight = zeros.index_add(0, bins, share)
    columns = [zeros.index_add(0, bins, share * x) / weight.clamp(min=1e-12) for x in (confidence, right)]
    error = (weight * (columns[1] - columns[0]).abs()).sum() / weight.sum()
    return error, torch.stack([*columns, weight / weight.sum()], dim=1)


def preferred(margins: torch.Tensor) -> torch.Tensor:
    """1 where the chosen response has the higher score, one half for ties, else 0."""
    return (torch.sign(margins) + 1) / 2


def correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Pearson's; 0 where one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return torch.where(scale > 1e-12, (x * y).sum() / scale.clamp(min=1e-12), 0.0)


def ranking_metrics(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    sizes: list[int],
    margins: torch.Tensor,
    weights: torch.Tensor,
    label_smoothing: float,
    center_coef: float,
) -> dict[str, torch.Tensor]:
    """Metrics of rewards (S,) of responses of `lengths` (S,) tokens; sizes, margins (n,), weights (n,) of their n prompts.

    Losses: weighted means over prompts, as trained. The others: means over prompts, every prompt once, whatever its weight
    and number of pairs.
    """
    rewards, lengths, margins, weights = (x.double() for x in (rewards, lengths, margins, weights))
    loss, parts = ranking_loss(rewards, sizes, margins, weights, label_smoothing, center_coef)
    chosen, rejected, _, share = ranking_pairs(sizes)
    per_pair, gap = share.double() / len(sizes), rewards[chosen] - rewards[rejected]  # (B,)
    prompt_of = torch.repeat_interleave(torch.tensor(sizes))  # (S,)

    def within(x: torch.Tensor) -> torch.Tensor:
        """Deviation from the mean of the prompt's responses."""
        mean = torch.zeros(len(sizes), dtype=x.dtype).index_add(0, prompt_of, x) / torch.tensor(sizes)
        return x - mean[prompt_of]

    metrics = {
        "rm/loss": loss / weights.sum(),
        "rm/bt_loss": parts["bt_loss"] / weights.sum(),
        "rm/center_loss": parts["center_loss"] / weights.sum(),
        "rm/accuracy": (per_pair * preferred(gap)).sum(),
        "rm/margin": (per_pair * gap).sum(),
        "rm/length_correlation": correlation(within(rewards), within(lengths)),
        "rm/ece": calibration_error(gap, share.double())[0],
    }
    for mean_name, std_name, side in (
        ("rm/chosen_rewards", "rm/chosen_std", rewards[chosen]),
        ("rm/rejected_rewards", "rm/rejected_std", rewards[rejected]),
    ):
        metrics[mean_name] = (per_pair * side).sum()
        metrics[std_name] = (per_pair * (side - metrics[mean_name]).square()).sum().sqrt()
    return metrics


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, schedule: str, min_ratio: float) -> float:
    """Factor on the peak learning rate at optimizer step `step` (from 0): linear warm-up, then constant or cosine."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


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


def sum_over_ranks(table: torch.Tensor, world_size: int, device) -> torch.Tensor:
    """Every entry was filled in on exactly one rank."""
    if world_size > 1:
        table = table.to(device)
        dist.all_reduce(table)
    return table.cpu()


# =====================================================================================================================
# update
# =====================================================================================================================


def packs_of_rankings(
    args: Args, model, processor, data: dict, indices: list[int], shared: bool, ranks: tuple[int, int], device
) -> Iterator[Pack]:
    """Yield this rank's packs of some rows, whose responses are numbered in order. Only these rows are encoded here.

    All ranks yield equally many: collectives inside a forward need everyone.
    """
    rank, world_size = ranks
    lengths, groups, response_lengths = [data["lengths"][i] for i in indices], [], []
    for g, (_, R) in enumerate(lengths):
        groups.append((g, list(range(len(response_lengths), len(response_lengths) + len(R)))))
        response_lengths += R
    prompt_lengths = [P for P, _ in lengths]
    plan = plan_packs(groups, prompt_lengths, response_lengths, args.micro_batch_tokens, world_size)[rank]

    def encode(g: int) -> tuple[dict, list[torch.Tensor]]:
        return encode_ranking(model, processor, get_ranking(data, indices[g]), lengths[g])

    filler = [(0, [])]  # a prompt without responses: no loss, but the same collectives
    with_media = {}
    if args.zero_stage > 0:
        # In all packs of a step, on all ranks, or in none: ZeRO-3 gathers the vision tower for images, and for videos, 1 and 2
        # reduce its gradients in buckets, which would differ; and DeepSpeed adds a pack's gradients to what the first one left.
        rows = {g: get_ranking(data, indices[g]) for g, _ in reversed(groups)}
        with_media = {kind: g for g, row in rows.items() for kind in ("images", "videos") if row[kind]}
    for pieces in plan:
        pieces = pieces or filler
        encoded = {g: encode(g) for g, _ in pieces}
        for kind, g in with_media.items():
            if not any(prompt[kind] for prompt, _ in encoded.values()):
                pieces, encoded[g] = [*pieces, (g, [])], encode(g)
        prompts = {g: prompt for g, (prompt, _) in encoded.items()}
        responses = {b: rest for g, members in pieces for b, rest in zip(members, encoded[g][1])}
        yield build_pack(pieces, prompts, responses, shared).to(device)


def update_reward(
    args: Args, engine, processor, data: dict, indices: list[int], shared: bool, ranks: tuple[int, int]
) -> tuple[dict[str, float], dict[int, str]]:
    """One optimizer step over some rows -> metrics, and which of them (by position) are to blame that it was skipped, and why;
    {}: it was taken."""
    world_size, device = ranks[1], engine.device
    sizes, lengths, margins, weights = row_tensors(data, indices)
    owner_of = torch.repeat_interleave(torch.tensor(sizes)).tolist()  # prompt of each response
    # The denominator: weights of the prompts of the whole optimizer step, on all ranks. DeepSpeed averages gradients over
    # ranks, hence the factor world_size; scale_wrt_gas=False keeps it from dividing again.
    total_weight = float(weights.sum())
    table, router_loss = torch.zeros(len(lengths)), torch.zeros(1)
    packs = list(packs_of_rankings(args, engine.module.model, processor, data, indices, shared, ranks, device))
    parts, broken = [], torch.zeros(len(indices), device=device)  # (n,)
    for i, pack in enumerate(packs):
        engine.set_gradient_accumulation_boundary(i == len(packs) - 1)
        rewards, aux_loss = engine(pack)  # (S,), ()
        owners = torch.tensor([owner_of[b] for b, _ in pack.rows], dtype=torch.long)  # (S,)
        members = [list(rows) for _, rows in groupby((b for b, _ in pack.rows), key=lambda b: owner_of[b])]
        prompts = torch.tensor([owner_of[rows[0]] for rows in members], dtype=torch.long)  # those of this pack
        margin, weight = margins[prompts].to(device), weights[prompts].to(device)
        loss, _ = ranking_loss(rewards, list(map(len, members)), margin, weight, args.label_smoothing, args.center_coef)
        loss = loss / total_weight
        aux_loss = aux_loss * float(weights[prompts].sum()) / total_weight  # each pack by its share of the step
        engine.backward((loss + aux_loss) * world_size, scale_wrt_gas=False)
        broken.index_add_(0, owners.to(device), (~rewards.detach().isfinite()).float())
        parts.append(([b for b, _ in pack.rows], rewards.detach(), aux_loss.detach()))
    norm, taken = optimizer_step(engine)
    for rows, rewards, aux_loss in parts:
        table[rows] = rewards.cpu()
        router_loss += aux_loss.cpu()
    table, router_loss = sum_over_ranks(table, world_size, device), sum_over_ranks(router_loss, world_size, device)
    metrics = ranking_metrics(table, lengths, sizes, margins, weights, args.label_smoothing, args.center_coef)
    metrics = {name: float(value) for name, value in metrics.items()}
    if engine.module.router_aux_coef:
        metrics["rm/router_loss"] = float(router_loss)
        metrics["rm/loss"] += metrics["rm/router_loss"]
    culprits = {} if taken else blame(list(range(len(indices))), broken, world_size)
    return {**metrics, "train/grad_norm": norm if taken else 0.0, "train/skipped_updates": int(not taken)}, culprits


def row_tensors(data: dict, indices: list[int]) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> responses per prompt, lengths of all responses (S,), margins (n,) and weights (n,) of n rows."""
    sizes = [len(data["lengths"][i][1]) for i in indices]
    lengths = torch.tensor([r for i in indices for r in data["lengths"][i][1]])
    margins, weights = (torch.tensor([data[name][i] for i in indices]) for name in ("margins", "weights"))
    return sizes, lengths, margins, weights


# =====================================================================================================================
# evaluate
# =====================================================================================================================


@torch.no_grad()
def evaluate_rankings(
    args: Args, engine, processor, name: str, data: dict, shared: bool, ranks: tuple[int, int]
) -> tuple[dict[str, float], torch.Tensor]:
    """Score one held-out set over all ranks -> its metrics, and rewards (S,) of all responses in the order of data["keep"]."""
    sizes, lengths, margins, weights = row_tensors(data, data["keep"])
    table = torch.zeros(len(lengths))
    model, device = engine.module.model, engine.device
    engine.eval()
    for pack in packs_of_rankings(args, model, processor, data, data["keep"], shared, ranks, device):
        table[[b for b, _ in pack.rows]] = engine(pack)[0].cpu()
    engine.train()
    table = sum_over_ranks(table, ranks[1], device)
    metrics = ranking_metrics(table, lengths, sizes, margins, weights, args.label_smoothing, args.center_coef)
    metrics = {key.replace("rm/", f"eval/{name}/"): float(value) for key, value in metrics.items()}
    return {**metrics, f"eval/{name}/num_prompts": len(sizes)}, table


def worst_pairs(data: dict, processor, rewards: torch.Tensor, count: int) -> list[dict]:
    """What samples.jsonl holds: the pairs with the lowest chosen - rejected."""
    tokenizer = getattr(processor, "tokenizer", processor)
    sizes = [len(data["lengths"][i][1]) for i in data["keep"]]
    chosen, rejected, owner, _ = ranking_pairs(sizes)
    first = np.cumsum([0, *sizes])  # position of each prompt's first response
    gap, samples = rewards[chosen] - rewards[rejected], []
    for k in gap.argsort()[:count].tolist():
        g = int(owner[k])
        row = get_ranking(data, data["keep"][g])
        if row["ids"] is not None:
            texts = [tokenizer.decode(ids) for ids in row["ids"]]
        else:
            texts = ["\n".join(part["text"] for m in tail for part in m["content"]) for tail in row["tails"]]
        pair = [int(x[k]) for x in (chosen, rejected)]
        samples.append(
            {
                "row": data["keep"][g],
                "messages": row["messages"],
                "images": [
                    x if isinstance(x, str) else f"{row['where']} image {n}" for n, x in enumerate(row["images"])
                ],
                "chosen": texts[pair[0] - first[g]],
                "rejected": texts[pair[1] - first[g]],
                "chosen_reward": float(rewards[pair[0]]),
                "rejected_reward": float(rewards[pair[1]]),
                "margin": float(gap[k]),
            }
        )
    return samples


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


def export_reward_model(module: RewardModel, processor, folder: Path, zero_stage: int, rank: int) -> None:
    """A transformers sequence classifier where the architecture has one; else the backbone as AutoModel loads it, and the head
    in score.safetensors. Adapters merged; with tokenizer, processor and chat template. Collective: all ranks call."""
    from safetensors.torch import save_file

    weights = merged_state_dict(module, zero_stage)
    if rank != 0:
        return
    weights = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    config = module.model.config
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):  # the same architecture without adapters and quantization
        if classifier_class(config) is not None:
            config.num_labels = 1
            plain = classifier_class(config)(config)
            weights = {re.sub(r"^model\.", plain.base_model_prefix + ".", name): x for name, x in weights.items()}
        else:
            plain, head = type(module.model)(config), weights.pop("score.weight")
            weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
            save_file({"score.weight": head}, folder / "score.safetensors")
        plain.to(next(iter(weights.values())).dtype)
    plain.save_pretrained(folder, state_dict=weights)
    processor.save_pretrained(folder)


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


def draw_calibration(run_dir: Path, name: str, step: int, data: dict, rewards: torch.Tensor) -> None:
    """calibration-NAME-N.png: how often the higher score is right against how sure it is, and the scores of both sides."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen, rejected, _, share = ranking_pairs([len(data["lengths"][i][1]) for i in data["keep"]])
    gap = (rewards[chosen] - rewards[rejected]).double()
    error, table = calibration_error(gap, share.double())
    used = table[table[:, 2] > 0]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([0.5, 1], [0.5, 1], color="gray", linestyle="--", label="calibrated")
    left.bar(np.linspace(0.525, 0.975, len(table)), table[:, 2], width=0.045, alpha=0.3, label="share of pairs")
    left.plot(used[:, 0], used[:, 1], marker="o", label="accuracy")
    left.set(
        title=f"reliability, expected calibration error {error:.3f}", xlabel="confidence: sigmoid(|chosen - rejected|)"
    )
    bins = np.linspace(float(rewards.min()), float(rewards.max()) + 1e-6, 40)
    for label, side in (("chosen", chosen), ("rejected", rejected)):
        right.hist(rewards[side].numpy(), bins=bins, weights=share.numpy(), alpha=0.6, label=label)
    right.set(title="scores", xlabel="reward", ylabel="pairs")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{run_dir.name}, {name}, step {step}, {len(data['keep'])} prompts")
    path = run_dir / f"calibration-{name}-{step}.png"
    with writing(path):
        figure.savefig(path, dpi=80)


def draw_worst_pairs(run_dir: Path, name: str, step: int, samples: list[dict], data: dict) -> None:
    """worst-NAME-N.png: the pairs that are scored worst, with their pictures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 11), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, sample in zip(figure.subplots(3, 4).flat, [*samples, *[None] * 12]):
        axes.axis("off")
        if sample is None:
            continue
        row = get_ranking(data, sample["row"])
        if row["images"]:
            axes.imshow(load_image(row["images"][0], row["folder"], row["where"]))
        asked = " ".join(p["text"] for m in row["messages"][-1:] for p in m["content"] if p["type"] == "text")
        sides = [f"{side} {sample[f'{side}_reward']:.2f}: {sample[side]}" for side in ("chosen", "rejected")]
        text = "\n".join(textwrap.shorten(line, 90, placeholder="...") for line in (asked, *sides))
        axes.set_title("\n".join(textwrap.fill(line, 44) for line in text.splitlines()).replace("$", r"\$"), fontsize=9)
    figure.suptitle(f"{run_dir.name}, {name}, step {step}: the pairs with the lowest chosen - rejected")
    path = run_dir / f"worst-{name}-{step}.png"
    with writing(path):
        figure.savefig(path, dpi=70)


PANELS = [
    ("loss", ["loss", "bt_loss"]),
    ("pair accuracy", ["accuracy"]),
    ("chosen - rejected", ["margin"]),
    ("scores", ["chosen_rewards", "rejected_rewards"]),
    ("expected calibration error", ["ece"]),
    ("correlation of score and length", ["length_correlation"]),
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
    transformers.utils.logging.set_verbosity_error()  # that the head is new; other missing weights stop the run
    check_args(args, int(os.environ.get("WORLD_SIZE", 1)))
    run_dir = check_output(args)
    auto, args = args.resume == "auto", replace(args, resume=find_checkpoint(args, run_dir))
    resumed = None
    if args.resume is not None:
        free = (
            "max_steps epochs training_time_limit eval_datasets eval_split save_interval_minutes "
            "max_skipped_updates eval_steps eval_samples save_steps save_total_limit max_checkpoint_gb track "
            "wandb_project tensorboard"
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
    model, score = load_backbone(args, dtype)

    # --- 3. data -----------------------------------------------------------------------------------------------------
    # Before the engines: a bad row should not cost their start-up. The model is needed for its position ids only.
    data = prepare_rankings(args, model, processor, args.dataset, args.dataset_split, 0, args.seed, main_rank)
    eval_sets = {
        name: prepare_rankings(args, model, processor, source, args.eval_split, args.eval_samples, 0, main_rank)
        for name, source in eval_sources(args).items()
    }
    total_steps = args.max_steps or math.ceil(args.epochs * len(data["keep"]) / args.batch_size)
    out_of_time = resumed is not None and 0 < args.training_time_limit * 60 <= resumed["seconds"]
    if resumed is not None and (resumed["step"] >= total_steps or out_of_time):
        if auto:  # a loop that starts it again and again ends here
            print(f"{args.resume} has done all {resumed['step']} steps")
            return {}
        fail(
            f"--resume {args.resume} has done {resumed['step']} of {total_steps} steps; raise --max-steps, --epochs or "
            "--training-time-limit"
        )

    if classifier_class(model.config) is not None:
        set_pad_token(model, processor, data["last_ids"])
    if not args.dropout:
        disable_dropout(model)
    shared = enable_packing(model)
    if args.lora_rank:
        add_lora(args, model)
    module = RewardModel(model, score, args.router_aux_coef)
    freeze_parameters(args, module)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        if args.lora_rank or args.freeze:
            model.enable_input_require_grads()  # frozen embeddings would cut the graph before the first checkpoint
    engine = make_engine(args, module, dtype, {"": args.learning_rate}, total_steps)

    # From here on the run has a folder.
    first_step, episode, skipped_in_a_row, wandb_id = 0, 0, 0, None
    if resumed is not None:
        load_checkpoint(args, {"reward": engine}, rank)
        first_step, episode = resumed["step"], resumed["episode"]
        skipped_in_a_row, wandb_id = resumed["skipped_in_a_row"], resumed["wandb_id"]
    loggers = []
    if main_rank:
        bad = [record for part in [data, *eval_sets.values()] for record in part["bad"]]
        lock = open_run(args, run_dir, -1 if resumed is None else first_step, bad)
        loggers, wandb_id = start_loggers(args, run_dir, wandb_id, first_step)
        for name, rows in {"training": data, **eval_sets}.items():
            print(
                f"{name}: {len(rows['keep'])} rows of {rows['source']}, {rows['dropped']} over --max-length left out, "
                f"{len(rows['bad'])} bad ones too, {rows['cut']} cut",
                flush=True,
            )
        print(f"{run_dir}: {total_steps} steps, {world_size} rank(s) on {device.type}, {dtype}", flush=True)

    def log(step: int, metrics: dict[str, float], samples: list[dict]) -> None:
        if main_rank:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # JSON has no NaN
            append_jsonl(run_dir / "metrics.jsonl", [finite])
            append_jsonl(run_dir / "samples.jsonl", [{"step": step, **sample} for sample in samples])
            with writing(run_dir):
                for logger in loggers:
                    logger(step, metrics)

    def run_evaluation(step: int) -> tuple[dict[str, float], list[dict]]:
        t0, results, samples = time.perf_counter(), {}, []
        for name, held_out in eval_sets.items():
            metrics, rewards = evaluate_rankings(args, engine, processor, name, held_out, shared, ranks)
            results |= metrics
            if main_rank:
                worst = worst_pairs(held_out, processor, rewards, 16)
                samples += [{"dataset": name, **sample} for sample in worst]
                draw_calibration(run_dir, name, step, held_out, rewards)
                draw_worst_pairs(run_dir, name, step, worst, held_out)
        return {**results, "time/eval": time.perf_counter() - t0}, samples

    panels = [
        (title, [f"rm/{key}" for key in keys] + [f"eval/{name}/{key}" for name in eval_sets for key in keys])
        for title, keys in PANELS
    ] + [("gradient norm", ["train/grad_norm"]), ("learning rate", ["train/learning_rate"])]
    metrics, before = {}, {} if resumed is None else resumed["before"]
    last_eval = before
    if eval_sets and not before:  # a resumed run has it
        last_eval, samples = run_evaluation(first_step)
        before = last_eval
        log(first_step, {"train/step": first_step, "train/episode": episode, **last_eval}, samples)
    received, stopped = catch_signals(), False
    bar = tqdm(total=total_steps, initial=first_step, desc=SCRIPT, unit="step", disable=not main_rank)
    last_save = time.perf_counter()
    train_started = last_save - (resumed["seconds"] if resumed is not None else 0.0)
    engine.train()
    for step in range(first_step + 1, total_steps + 1):
        # --- 7. update -----------------------------------------------------------------------------------------------
        t0 = time.perf_counter()
        positions = batch_indices((step - 1) * args.batch_size, args.batch_size, len(data["keep"]), args.seed)
        indices = [data["keep"][i] for i in positions]
        update_metrics, culprits = update_reward(args, engine, processor, data, indices, shared, ranks)
        skipped_in_a_row = skipped_in_a_row + 1 if culprits else 0
        hopeless = skipped_in_a_row >= args.max_skipped_updates
        if main_rank and culprits:
            named = [
                {"step": step, "reason": why, "dataset": data["source"], "row": indices[i]}
                for i, why in culprits.items()
            ]
            append_jsonl(run_dir / "bad_samples.jsonl", named)
        t1 = time.perf_counter()

        # --- 9. log --------------------------------------------------------------------------------------------------
        tokens = sum(P + sum(R) for P, R in (data["lengths"][i] for i in indices))
        episode += len(indices)
        metrics = {
            "train/step": step,
            "train/episode": episode,
            "train/epoch": episode / len(data["keep"]),
            "train/learning_rate": engine.get_lr()[0],
            **update_metrics,
            "time/total": t1 - t0,
            "time/tokens_per_second": tokens / (t1 - t0),
        }
        bar.set_postfix(
            loss=f"{metrics['rm/loss']:.3f}",
            accuracy=f"{metrics['rm/accuracy']:.2f}",
            tok_s=f"{metrics['time/tokens_per_second']:.0f}",
        )
        bar.update()

        # --- 10. eval and save ---------------------------------------------------------------------------------------
        minutes = torch.tensor([t1 - train_started, t1 - last_save], device=device) / 60
        if world_size > 1:
            dist.broadcast(minutes, 0)  # one clock
        out_of_time = 0 < args.training_time_limit <= float(minutes[0])
        save_due = 0 < args.save_interval_minutes <= float(minutes[1])
        last = step == total_steps or out_of_time
        stopped = stop_asked(received, world_size, device) and not last
        evaluated = last or (args.eval_steps > 0 and step % args.eval_steps == 0)
        samples = []
        if eval_sets and evaluated:
            last_eval, samples = run_evaluation(step)
            metrics |= last_eval
        log(step, metrics, samples)
        if main_rank and evaluated:
            draw_curves(run_dir, panels)
        if hopeless:
            skipped_in_a_row = 0  # of a run that goes on from here
        if last or stopped or hopeless or save_due or (args.save_steps and step % args.save_steps == 0):
            trainer_state = {
                "step": step,
                "episode": episode,
                "skipped_in_a_row": skipped_in_a_row,
                "wandb_id": wandb_id,
                "before": before,
                "seconds": t1 - train_started,
            }

            def export(folder: Path) -> None:
                export_reward_model(module, processor, folder, args.zero_stage, rank)

            saved = save_checkpoint(args, run_dir, step, {"reward": engine}, export, trainer_state, metrics, ranks)
            last_save = time.perf_counter()
        if hopeless:
            stop_skipping(args, run_dir, step, saved)
        if last or stopped:
            break

    # --- 11. finish --------------------------------------------------------------------------------------------------
    bar.close()
    if main_rank and stopped:
        print(f"stopped by a signal after step {step}; go on with --resume {saved}", flush=True)
    elif main_rank:
        gain = ", ".join(
            f"held-out {name} accuracy {before[f'eval/{name}/accuracy']:.3f} -> {last_eval[f'eval/{name}/accuracy']:.3f}, "
            f"ece {last_eval[f'eval/{name}/ece']:.3f}"
            for name in eval_sets
        )
        print(
            f"{gain or 'nothing held out'} · training {time.perf_counter() - train_started:.0f} s, "
            f"in all {time.perf_counter() - started:.0f} s · {saved}",
            flush=True,
        )
    if main_rank:
        lock.close()
    barrier(world_size)
    dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    main(parse_args(sys.argv[1:]))
