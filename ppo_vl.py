"""PPO for vision-language and text models: critic, GAE, clipped updates; other estimators and losses by flag.

A step samples responses, scores them, estimates advantages, and makes a few updates of policy and critic:

    r_t = -kl_coef * KL of token t to the reference, plus the score at the last token
    A_t = sum over s >= t of (gamma lambda)^(s - t) (r_s + gamma V_{s+1} - V_s), whitened over the rollout
    rho_t = p_now(token t) / p_before(token t)
    loss = -mean of min(rho_t A_t, clip(rho_t, 1 - c, 1 + c) A_t), critic: mean of (V_t - V_t before - A_t)^2

Papers: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1506.02438. docs/ppo_vl.md lists what differs
from LightRFT's PPOTrainerVL (opendilab/LightRFT@49e62cb). Start reading at main.

    python ppo_vl.py                    # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python ppo_vl.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset data.jsonl --learning-rate 1e-6
    torchrun --standalone --nproc_per_node=8 ppo_vl.py --zero-stage 3 ...     # or: deepspeed ppo_vl.py ...
"""

import asyncio
import functools
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from common import packing
from common.kl import kl_estimate, next_kl_coef

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- args ----


@dataclass
class Args:
    # --- experiment ---
    seed: int = 1  # of data order and sampling
    output_dir: str = "runs"  # folder that holds one folder per run
    run_name: str | None = None  # this run's folder; None: script, model, seed and time
    resume: str | None = None  # checkpoint to go on from, with the same flags; auto: the newest of --run-name
    # --- model and data ---
    model: str = str(Path(__file__).parent / "assets/tiny_vl")  # folder or hub id; vision-language or text
    critic_model: str | None = None  # same family, or a folder of reward_bt.py; None: --model
    critic_share_backbone: bool = False  # a value head on the actor's backbone instead of a critic of its own
    dataset: str = "easy-vqa"  # easy-vqa, .jsonl/.json/.csv/.parquet, saved folder, hub id; see load_data
    dataset_split: str = "train"  # of easy-vqa, a hub id or a saved folder
    eval_dataset: str | None = None  # held-out prompts; None: easy-vqa's test split with easy-vqa, else none
    eval_dataset_split: str = "test"  # as --dataset-split
    system_prompt: str | None = None  # for prompts that have no system message
    video_fps: float = 2.0  # frames per second that are taken from videos
    max_prompt_length: int = 1024  # tokens, those of pictures too; longer prompts are left out
    lora_rank: int = 0  # train adapters of this rank on the language model; 0 = all weights
    lora_alpha: float = 32.0  # the adapters' output is scaled by alpha / rank
    freeze: str | None = None  # regex: parameters with such names stay as they are, for example visual
    # --- rollout ---
    total_steps: int = 50  # rollouts, each followed by its updates
    rollout_batch_size: int = 256  # responses per rollout, over all ranks
    num_samples_per_prompt: int = 8  # responses per prompt (G)
    generation_batch_size: int = 256  # responses sampled side by side on a rank; lower it if memory runs out
    max_response_length: int = 24  # tokens, EOS counted; longer responses are cut
    temperature: float = 1.0  # of the sampler; log-probs are those of the tempered policy
    rollout: str = "hf"  # hf: the model itself; vllm: an engine in this process; path.py:Class, see SAMPLERS
    vllm_gpu_memory: float = 0.4  # share of the GPU for that engine
    tis_clip: float = 0.0  # tokens' gradients times p(trainer) / p(sampler), at most this; 0 = off
    dynamic_sampling: int = 0  # rounds that replace prompts whose responses all score alike (DAPO)
    replay_limit: int = 0  # train on so many of a step's responses, the newest; 0 = all
    # --- algorithm ---
    rewards: tuple[str, ...] = ("accuracy", "format")  # also overlong, or path.py:function: score_responses
    reward_weights: tuple[float, ...] = (0.9, 0.1)  # the score of a response is the weighted sum
    reward_running_norm: Literal["off", "scale", "standardize"] = "off"  # by std, or mean too, of all so far
    reward_clip: tuple[float, float] | None = None  # range of scores, before the KL is subtracted
    # estimator, see center_scores; all but gae work without a critic
    advantage: Literal["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "cpgd"] = "gae"
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95  # paper: 0.95
    whiten_advantages: Literal["auto", "on", "off"] = "auto"  # to mean 0, std 1; auto: gae and reinforce(_*)
    advantage_clip: float = 0.0  # bound of whitened advantages; 0 = off
    policy_loss: Literal["clip", "dual_clip", "cpg", "gspo"] = "clip"  # of a token, see compute_policy_loss
    clip_coef: float = 0.2  # the ratio is clipped below 1 - c (paper: 0.2; GSPO: 3e-4)
    clip_coef_high: float | None = None  # and above 1 + c; None: as --clip-coef
    dual_clip: float = 3.0  # with it the loss is at most this times -A where A < 0
    # how tokens are weighted, see token_weights
    loss_agg: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    entropy_token_ratio: float = 1.0  # share of tokens, of highest entropy, in the policy loss (paper: 0.2)
    entropy_coef: float = 0.0  # weight of the entropy bonus, nats per token
    mask_truncated: bool = False  # cut responses leave the loss and their siblings' baseline
    kl_coef: float = 0.01  # weight of the KL to the reference (paper: 0.02); 0 = no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # per token, see common/kl.py
    kl_loss: bool = False  # KL as a loss term, with gradient, instead of in the rewards; prefer k2 or k3
    kl_target: float | None = None  # nats per response that an adaptive coefficient steers to; None: fixed
    kl_horizon: int = 10000  # responses over which it reacts
    value_clip: float = 0.2  # new values are clipped to old ones +- this, in units of reward; 0 = off
    vf_coef: float = 0.5  # weight of the value loss
    freezing_actor_steps: int = 0  # steps at the start in which the critic trains alone
    num_ppo_epochs: int = 2  # passes over each rollout
    train_batch_size: int = 128  # responses per optimizer step, over all ranks
    ptx_dataset: str | None = None  # chats, column messages, whose assistant turns are learned beside
    ptx_coef: float = 0.05  # weight of their loss, nats per token
    ptx_batch_size: int = 16  # assistant turns per optimizer step, over all ranks
    router_aux_coef: float = 0.0  # weight of the load balance loss of a mixture of experts
    ema_beta: float = 0.0  # moving average of the weights, saved as checkpoint-N/state/ema; 0 = off
    # --- optimizer ---
    learning_rate: float = 1e-4  # peak; models of 2B and more want about 1e-6
    critic_learning_rate: float = 1e-3  # peak of a critic of its own; pretrained ones want about 1e-5
    min_lr_ratio: float = 0.1  # after the warm-up it follows a cosine down to this fraction; 1 = constant
    warmup_steps: int = 5  # optimizer steps of linear warm-up
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
    eval_steps: int = 10  # evaluate every so many steps, and at both ends; 0 = only there
    eval_samples: int = 250  # held-out prompts, a fixed random subset
    eval_num_samples: int = 8  # sampled responses per held-out prompt, besides the greedy one
    save_steps: int = 0  # checkpoint every so many steps, and at the end; 0 = only there
    save_total_limit: int = 2  # checkpoints kept, newest first
    track: Literal["off", "wandb", "tensorboard"] = "off"  # log there too


def check_args(args: Args) -> None:
    G, longest = args.num_samples_per_prompt, args.max_prompt_length + args.max_response_length
    train, rollout, alone = args.train_batch_size, args.rollout_batch_size, args.critic_share_backbone
    compares = args.advantage not in ("gae", "reinforce") or args.dynamic_sampling
    of_critic = args.critic_model or args.freezing_actor_steps
    counts = train, rollout, args.total_steps, args.num_ppo_epochs, args.eval_samples, args.eval_num_samples
    if min(G, *counts) < 1:
        fail("counts must be at least 1")
    for is_bad, message in (
        (train % G, "--train-batch-size must be a multiple of --num-samples-per-prompt"),
        (compares and G < 2, "--num-samples-per-prompt: a single sample has no siblings to be compared with"),
        (rollout % train, "--rollout-batch-size must be a multiple of --train-batch-size"),
        (args.micro_batch_tokens < longest, f"--micro-batch-tokens must hold prompt + response, {longest}"),
        (len(args.rewards) != len(args.reward_weights), "--reward-weights needs one weight per reward"),
        (len({x.rpartition(":")[2] for x in args.rewards}) < len(args.rewards), "--rewards: equal names"),
        (args.temperature <= 0, "--temperature must be more than 0"),
        (args.offload_optimizer and args.zero_stage == 0, "--offload-optimizer needs --zero-stage 1 to 3"),
        (args.advantage != "gae" and (alone or of_critic), f"--advantage {args.advantage} has no critic"),
        (alone and of_critic, "--critic-share-backbone leaves no critic to load or to train alone"),
        (args.freezing_actor_steps >= args.total_steps, "--freezing-actor-steps leaves no step to the actor"),
        (args.resume == "auto" and args.run_name is None, "--resume auto needs --run-name"),
    ):
        if is_bad:
            fail(message)


def fail(message: str) -> NoReturn:
    """Bad input: one sentence that names the file or flag and what to do; exit code 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def plug_in(flag: str, source: str, known: dict[str, Callable]) -> Callable:
    """One of the script's own, or the function or class of "path.py:name"."""
    path, _, name = source.rpartition(":")
    if source not in known and not Path(path).is_file():
        fail(f"{flag} {source} is neither path.py:name nor one of {', '.join(known)}")
    found = known if source in known else runpy.run_path(path)
    return found.get(name) or fail(f"{flag} {source}: {path} has no {name!r}")


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


def load_data(args: Args, source: str, split: str, model, processor) -> SimpleNamespace:
    """-> source, rows, tokenizer, and encode(indices): prompts of common/packing.py, without unusable ones.

    Columns: `prompt` or `messages`, a string or a chat; `image(s)` and `video(s)`, one or a list, see
    to_messages; `answer`, the reference that rewards get.
    """
    rows, tokenizer = load_rows(source, split), getattr(processor, "tokenizer", processor)
    columns = set(rows.column_names)
    if not columns & {"prompt", "messages"} or ("accuracy" in args.rewards and "answer" not in columns):
        fail(f"{source} has columns {', '.join(columns)}: rename yours to prompt or messages, and answer")

    @functools.lru_cache(2 * args.rollout_batch_size // args.num_samples_per_prompt)  # a step asks repeatedly
    def encode(index: int) -> dict | None:
        try:
            messages = to_messages(args, rows[index], Path(source).parent, tokenizer)
            inputs = packing.encode_chat(processor, messages, add_generation_prompt=True)
            prompt = packing.make_prompt(model, inputs)
            if prompt["length"] > args.max_prompt_length:
                raise ValueError(f"{prompt['length']} tokens are more than --max-prompt-length")
            return prompt | {"index": index, "row": rows[index], "messages": messages}
        except Exception as error:
            tqdm.write(f"warning: {source} row {index} is left out: {error!s:.300}", file=sys.stderr)

    usable = {"encode": lambda entries: [p | {"entry": i} for i in entries if (p := encode(i % len(rows)))]}
    return SimpleNamespace(source=source, rows=rows, tokenizer=tokenizer, **usable)


def load_turns(args: Args, model, processor, end_ids: list[int]) -> SimpleNamespace:
    """--ptx-dataset as load_data: for each assistant turn what comes before it, and its target_ids (R,)."""
    source, tokenizer, turns = args.ptx_dataset, getattr(processor, "tokenizer", processor), []
    rows = load_rows(source, "train")
    if "messages" not in rows.column_names:
        fail(f"{source} has no column messages, of chats whose assistant turns are to be learned")
    for i, chat in enumerate(rows["messages"]):  # counted from the end: a system message may come in front
        turns += [(i, k) for k in range(-len(chat), 0) if chat[k]["role"] == "assistant"]

    @functools.lru_cache(2 * args.ptx_batch_size)
    def encode(index: int) -> dict | None:
        i, k = turns[index % len(turns)]
        try:
            chat = to_messages(args, rows[i], Path(source).parent, tokenizer)
            prompt = packing.encode_chat(processor, chat[:k], add_generation_prompt=True)
            prompt, P = packing.make_prompt(model, prompt), prompt["input_ids"].shape[1]
            ids = packing.encode_chat(processor, chat[: k + 1 or None])["input_ids"][0]
            if not ids[:P].equal(prompt["prompt_ids"]):
                raise ValueError("the chat template does not go on from its own prompt")
            ends = torch.isin(ids[P:], torch.tensor(end_ids)).nonzero()[:, 0].tolist()
            ids = ids[: P + ends[0] + 1] if ends else F.pad(ids, (0, 1), value=end_ids[0])
            if len(ids) > args.max_prompt_length + args.max_response_length:
                raise ValueError(f"{len(ids)} tokens are more than those of a prompt and a response")
            return prompt | {"index": index, "target_ids": ids[P:]}
        except Exception as error:
            tqdm.write(f"warning: {source} row {i} is left out: {error!s:.300}", file=sys.stderr)

    return SimpleNamespace(rows=turns, encode=lambda indices: [*filter(None, map(encode, indices))])


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


# ---- rewards ----


def accuracy(texts: list[str], answer: list, **columns) -> list[float]:
    """1 when the text of the last <answer>...</answer> equals the reference, but for case and spaces."""
    if bad := [a for a in answer if not isinstance(a, str | int | float) or not str(a).strip()]:
        fail(f"the reward accuracy needs an answer that is a text or a number, not {bad[0]!r}")
    found = [re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) for text in texts]
    return [float(bool(f) and f[-1].strip().lower() == str(a).strip().lower()) for f, a in zip(found, answer)]


def format_reward(texts: list[str], **columns) -> list[float]:
    """1 when the whole response is [<think>...</think>] <answer>...</answer> with each tag once."""
    inner = r"(?:(?!</?think>|</?answer>).)*"
    pattern = re.compile(rf"\s*(?:<think>{inner}</think>\s*)?<answer>{inner}</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text) is not None) for text in texts]


def overlong(completion_ids: list[list[int]], limit: int, **columns) -> list[float]:
    """0 up to 4/5 of the length limit, then down to -1 there. https://arxiv.org/abs/2503.14476 eq. (13)."""
    return [min(0.0, (0.8 * limit - len(ids)) / (0.2 * limit)) for ids in completion_ids]


REWARDS = {"accuracy": accuracy, "format": format_reward}


def score_responses(functions: dict[str, Callable], prompts: list[dict], texts: list[str], ids: list, state):
    """-> {reward: B values, NaN where it does not apply}, and what was logged. prompts: one per response.

    A function gets keywords as in TRL: prompts and completions (strings, or where the dataset's prompt is a
    chat, messages), completion_ids, every column, trainer_state (an evaluation's step is 0),
    log_metric(name, number); and texts (always strings), chats (messages with pictures). It may be async; it
    returns a number or None per response.
    """
    if not prompts:
        return {name: [] for name in functions}, []
    rows, logged = [prompt["row"] for prompt in prompts], []
    given = [row.get("messages") or row["prompt"] for row in rows]
    is_chat = isinstance(given[0], list)
    keywords = {name: [row[name] for row in rows] for name in rows[0]}
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    keywords |= {"prompts": given, "completions": chats if is_chat else texts, "trainer_state": state}
    keywords |= {"completion_ids": [x.tolist() for x in ids], "texts": texts}
    keywords["chats"] = [prompt["messages"] for prompt in prompts]
    keywords["log_metric"] = lambda name, value: logged.append((name, float(value)))

    async def wait() -> None:  # those that ask a server, say, side by side
        waiting = [name for name, result in results.items() if hasattr(result, "__await__")]
        results.update(zip(waiting, await asyncio.gather(*map(results.get, waiting))))

    try:
        results = {name: function(**keywords) for name, function in functions.items()}
        asyncio.run(wait())
    except Exception as error:
        error.add_note(f"Rewards get {'chats' if is_chat else 'strings'} here, as the dataset's prompts are.")
        raise
    for name, own in results.items():
        results[name] = [math.nan if value is None else float(value) for value in own]
        if len(own) != len(texts) or np.isinf(results[name]).any():
            fail(f"reward {name} must return one finite number, or None, for each of {len(texts)} responses")
    return results, logged


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


def prepare_training(args: Args, model) -> None:
    """Adapters, frozen parameters, gradient checkpointing."""
    if args.lora_rank:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    frozen = [p for name, p in model.named_parameters() if args.freeze and re.search(args.freeze, name)]
    if args.freeze and not frozen:
        fail(f"--freeze {args.freeze} fits no parameter's name")
    for parameter in frozen:
        parameter.requires_grad_(False)


class Actor(nn.Module):
    """Policy or reference, as DeepSpeed runs it: pack -> log-probs (M,), entropies, and values of a head on
    its backbone, (M,) or None."""

    def __init__(self, args: Args, model, value_head: nn.Linear | None = None):
        super().__init__()
        self.model, self.value_head, self.temperature = model, value_head, args.temperature
        if args.router_aux_coef:
            model.config.get_text_config().output_router_logits = True
        if args.router_aux_coef or value_head is not None:  # they read what the backbone has put out
            model.base_model.register_forward_hook(lambda _, inputs, output: setattr(self, "output", output))

    def forward(self, pack, with_lora: bool = True, with_entropy: bool = False, temperature=None) -> tuple:
        if not with_lora:  # the reference of a model with adapters
            self.model.disable_adapters()
        found = packing.response_logprobs(self.model, pack, temperature or self.temperature, with_entropy)
        if not with_lora:
            self.model.enable_adapters()
        if self.value_head is None:
            return *found, None
        hidden = self.output.last_hidden_state.flatten(0, 1)[pack.predict_from]  # (M, H)
        return *found, self.value_head(hidden)[:, 0].float()


class Critic(nn.Module):
    """A backbone with a scalar head: pack -> values of the states before its tokens, ((M,),)."""

    def __init__(self, args: Args, model):
        super().__init__()
        self.model, self.value_head = model.base_model, make_value_head(args, model)  # without the LM head

    def forward(self, pack) -> tuple[Tensor]:
        return (self.value_head(packing.forward_hidden(self.model, pack))[:, 0].float(),)


def make_value_head(args: Args, model) -> nn.Linear:
    """The one that reward_bt.py saved, or zeros: the first advantages are the plain returns."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=model.dtype)
    file, weight = Path(args.critic_model or args.model) / "score.safetensors", torch.zeros_like(head.weight)
    head.weight.data = load_file(file)["score.weight"].to(weight) if file.is_file() else weight
    return head


def update_average(average, model, beta: float) -> None:
    """average = beta average + (1 - beta) weights, a model in fp32 on rank 0, else None. Collective."""
    weights = merged_state_dict(model)
    for name, mean in average.named_parameters() if average else ():
        mean.data.lerp_(weights[name].to(mean), 1 - beta)


# ---- pure math: tensors in, tensors and metrics out ----


def center_scores(scores: Tensor, mask: Tensor, advantage: str) -> Tensor:
    """What an estimator makes of the scores R of each prompt's responses. (n, G), mask (n, G): False is left
    out -> (n, G), 0 there. In float64: all but the first two give exactly 0 for a group of equal scores.

    scores [[1, 2, 6]] -> rloo [-3, -1.5, 4.5], group_norm [-.756, -.378, 1.134], others [-2, -1, 3]
    """
    R, n = scores.double().masked_fill(~mask, 0.0), mask.sum(1, keepdim=True).clamp(min=1)  # (n, G), (n, 1)
    if advantage in ("gae", "reinforce"):
        return R.to(scores.dtype)
    centered = (R - R.sum(1, keepdim=True) / n) * mask  # https://arxiv.org/abs/2501.03262
    squares = centered.square().sum(1, keepdim=True)  # (n, 1)
    if advantage == "rloo":  # R - mean of the siblings, https://arxiv.org/abs/2402.14740
        centered = centered * n / (n - 1).clamp(min=1)
    if advantage == "group_norm":  # GRPO https://arxiv.org/abs/2402.03300
        centered = centered / ((squares / (n - 1).clamp(min=1)).sqrt() + 1e-6)
    if advantage == "cpgd":  # groups / groups whose scores differ, https://arxiv.org/abs/2505.12504 sec. 4
        centered = centered * min(3.0, int(mask.any(1).sum()) / max(1, int((squares > 0).sum())))
    return centered.to(scores.dtype)


def compute_token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * kl_t, and the score on top at the last token with mask 1. (B,), (B, R), (B, R) -> (B, R)

    scores [1, 2], kl 0.1, mask [[1, 1, 0], [1, 1, 1]], coef 1 -> [[-0.1, 0.9, 0], [-0.1, -0.1, 1.9]]
    """
    last = F.one_hot(mask.sum(1).long() - 1, mask.shape[1]).to(kl)  # (B, R)
    return (last * scores[:, None] - kl_coef * kl) * mask


def compute_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> tuple:
    """Advantages and returns, both (B, R), 0 outside the mask. The value after the last token is 0.

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1},   returns = A + V

    With values 0 and lambda 1 these are the discounted rewards to go: the estimators without a critic.
    rewards [[0, 0, 1]], values [[.5, .5, .5]], mask 1, gamma 1, lambda .5 -> advantages [[.125, .25, .5]]
    """
    rewards, values = rewards * mask, values * mask
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage, next_value = (delta + gamma * gae_lambda * advantage) * mask[:, t], values[:, t]
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, (advantages + values) * mask


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / std over the entries with mask 1; 0 elsewhere, and everywhere if all are equal.

    x [[1, 2, 99], [3, 6, -99]], mask [[1, 1, 0], [1, 1, 0]] -> [[-2, -1, 0], [0, 3, 0]] / sqrt(3.5)
    """
    values = x[mask].double()
    std = values.std(correction=0)
    if len(values) == 0 or std <= max(1e-6, 1e-8 * values.abs().max()):  # rounding, not signal
        return torch.zeros_like(x)
    return ((x.double() - values.mean()) / std).to(x.dtype).masked_fill(~mask, 0.0)


def compute_policy_loss(
    new: Tensor, old: Tensor, A: Tensor, owner: Tensor, kind: str, low: float, high: float, dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, advantages and response of each token (M,) -> loss of each token (M,), and metrics (M,).

    clip: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(new - old), https://arxiv.org/abs/1707.06347
    ratio 1.5, A 1, c 0.2 -> -1.2 (clipped); ratio 1.5, A -1 -> 1.5 (not: the pessimistic side stays).
    policy/approx_kl = r - 1 - log r, the k3 estimate of KL(old || new); clipfrac: tokens without gradient.
    """
    token_logratio = logratio = new - old
    if kind == "gspo":  # value: the mean of the response, gradient: that of the token
        total = torch.bincount(owner, logratio.detach())  # (S,), https://arxiv.org/abs/2507.18071 eq. (13)
        mean = (total / torch.bincount(owner).clamp(min=1))[owner]
        logratio = mean + (logratio - logratio.detach())
    ratio = logratio.clamp(-20, 20).exp()  # fp32 ends at e^88
    too_low, too_high = (ratio < 1 - low) & (A < 0), (ratio > 1 + high) & (A > 0)
    loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - low, 1 + high))
    if kind == "cpg":  # log-probs, clipped at the same bounds; https://arxiv.org/abs/2505.12504 eq. (6)
        bound = torch.where(A > 0, math.log1p(high), math.log1p(-low) if low < 1 else -math.inf)
        loss = -A * torch.where(too_low | too_high, old + bound, new)
    if kind == "dual_clip":  # at most -dual A where A < 0; https://arxiv.org/abs/1912.09729 eq. (5)
        floored = (A < 0) & (loss > -A * dual)
        too_low, loss = too_low | floored, torch.where(floored, -A * dual, loss)
    approx_kl = torch.expm1(token_logratio.clamp(max=20)) - token_logratio
    metrics = {"policy/ratio": ratio.detach(), "policy/approx_kl": approx_kl.detach()}
    return loss, {**metrics, "policy/clipfrac_low": too_low, "policy/clipfrac_high": too_high}


def token_weights(mask: Tensor, loss_agg: str, limit: int) -> Tensor:
    """Mask (B, R) of an optimizer step -> weight of each token's loss (B, R): the loss is their sum.

    mask [[1, 1, 0], [1, 0, 0]], limit 4 -> 1/3 each; [[1/4, 1/4], [1/2]]; 1/2 each; 1/8 each.
    """
    tokens = mask.float().sum(1, keepdim=True)  # (B, 1)
    responses = (tokens > 0).sum().clamp(min=1)
    divisors = {
        "token-mean": tokens.sum().clamp(min=1),  # DAPO https://arxiv.org/abs/2503.14476
        "seq-mean-token-mean": tokens.clamp(min=1) * responses,  # GRPO
        "seq-mean-token-sum": responses,
        "seq-mean-token-sum-norm": responses * limit,  # Dr. GRPO https://arxiv.org/abs/2503.20783
    }
    return mask / divisors[loss_agg]


def high_entropy_mask(entropy: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """The share `ratio` of tokens with the highest entropy, ties included. (B, R), (B, R) -> (B, R)

    entropy [[1, 5, 2], [4, 0, 9]], mask [[1, 1, 1], [1, 1, 0]], ratio .4 -> [[0, 1, 0], [1, 0, 0]]
    """
    ordered = entropy[mask].sort(descending=True).values  # https://arxiv.org/abs/2506.01939 eq. (5)
    return mask & (entropy >= ordered[max(1, round(ratio * len(ordered))) - 1]) if len(ordered) else mask


def compute_value_loss(new: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Per token max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), and where the second is larger.

    c = 0: squared error. V_old 0, V 1, R 2, c 0.2 -> max(1, 3.24) = 3.24. openai/baselines@ea25b9e ppo2
    """
    loss, change, bound = (new - returns).square(), new - old, clip or math.inf
    clipped = (old + change.clamp(-bound, bound) - returns).square()
    worse = (change.abs() > bound) & (clipped > loss)  # within the bound they differ by rounding alone
    return torch.where(worse, clipped, loss), worse


def sample_token(logprobs: Tensor, drawn: Tensor) -> Tensor:
    """The token in whose share of [0, 1) a number lies: logprobs (B, V), drawn (B,) uniform -> ids (B,)."""
    cumulative = logprobs.double().exp().nan_to_num(1.0).cumsum(-1)  # NaN: of no effect
    tokens = torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logprobs.shape[-1] - 1)


# ---- rollout ----


@dataclass
class Rollout:
    """n prompts with G responses each, prompt by prompt, B = n * G; the same on every rank."""

    prompts: list[dict]  # (n,): index, length and kinds of inputs; its row is data.rows[index]
    response_ids: list[Tensor]  # B x (R_b,), EOS included where drawn
    truncated: Tensor  # (n, G) bool: cut by the length limit
    rewards: dict[str, Tensor]  # by reward function (n, G), NaN: does not apply
    scores: Tensor  # (n, G): their weighted sum, NaN: none applies
    mask: Tensor  # (B, R) bool: tokens of the response
    engine_logprobs: Tensor  # (B, R) of the sampler
    samples: list[dict]  # (n,) one response each, to read
    logged: list[tuple[str, float]]  # by the reward functions


@torch.no_grad()
def generate(args: Args, model, prompts: list[dict], G: int, temperature: float, end_ids: list[int]):
    """G responses per prompt (temperature 0: greedy) -> S * G of them (R_b,), log-probs (R_b,), and which the
    length limit cut. Placeholders of pictures are never drawn: log-probs mask them too."""
    R, device = args.max_response_length, model.device
    if not packing.is_packed(model):
        return packing.generate_plain(model, prompts, G, R, end_ids, temperature)
    decoder = packing.Decoder(model, prompts, G)  # has run every prompt and picture once
    end, rows = torch.tensor(end_ids, device=device), torch.arange(len(prompts) * G, device=device)
    tokens = torch.full((len(rows), R), -1, device=device)  # (S * G, R)
    logprobs = torch.zeros(tokens.shape, device=device)
    # One number per token, by the prompt's seed.
    drawn = [np.random.default_rng(p["seed"]).random((G, R)) for p in prompts]
    drawn = torch.tensor(np.concatenate(drawn), device=device)  # (S * G, R)
    for t in range(R):
        logp = packing.next_logprobs(model, decoder.hidden, temperature or 1.0)  # (rows, V)
        token = sample_token(logp, drawn[rows, t]) if temperature else logp.argmax(-1)  # (rows,)
        tokens[rows, t], logprobs[rows, t] = token, logp.gather(1, token[:, None])[:, 0]
        alive = (~torch.isin(token, end)).nonzero()[:, 0]
        if len(alive) < len(rows):  # finished responses leave the batch
            rows, token = rows[alive], token[alive]
            decoder.keep(alive)
        if len(rows) == 0 or t + 1 == R:
            break
        decoder.step(token)
    lengths, cut = (tokens >= 0).sum(1).tolist(), set(rows.tolist())
    ids, logprobs = ([row[:n].clone() for row, n in zip(x.cpu(), lengths)] for x in (tokens, logprobs))
    return ids, logprobs, [b in cut for b in range(len(lengths))]


class ModelSampler:
    """--rollout hf: the trained model itself, or its unsharded copy under ZeRO-3. sync takes over the model's
    weights, sample answers as `generate` does."""

    def __init__(self, args: Args, model, end_ids: list[int], run_dir: Path):
        self.args, self.model, self.sampled, self.end_ids = args, model, model, end_ids
        if args.zero_stage == 3:
            self.sampled = load_model(args.model, model.dtype).to(model.device)
            packing.switch_attention(self.sampled, model.config.get_text_config()._attn_implementation)

    def sync(self) -> None:
        if self.sampled is not self.model:
            self.sampled.load_state_dict(merged_state_dict(self.model))

    def sample(self, prompts: list[dict], num_samples: int, temperature: float):
        return generate(self.args, self.sampled, prompts, num_samples, temperature, self.end_ids)


class VllmSampler:
    """--rollout vllm: an engine in this process, one per rank."""

    def __init__(self, args: Args, model, end_ids: list[int], run_dir: Path):
        self.model, self.cuda = model, torch.cuda.is_available()
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=args.model, dtype=str(model.dtype).removeprefix("torch."), seed=args.seed,
            max_model_len=args.max_prompt_length + args.max_response_length,
            max_num_seqs=args.generation_batch_size, gpu_memory_utilization=args.vllm_gpu_memory,
            enable_sleep_mode=self.cuda, enforce_eager=not self.cuda,
            enable_chunked_prefill=self.cuda,  # with seeds it fails on the CPU
            distributed_executor_backend="external_launcher" if WORLD_SIZE > 1 else "uni",
            logprobs_mode="processed_logprobs",  # at the temperature: of what was drawn from
        )  # fmt: skip
        self.make_params = functools.partial(
            SamplingParams, max_tokens=args.max_response_length, stop_token_ids=end_ids, detokenize=False,
            logit_bias=dict.fromkeys(packing.media_token_ids(model.config), -100.0), logprobs=0,
        )  # fmt: skip

    def sync(self) -> None:
        """The newest weights; what it remembers of the old ones is forgotten."""
        weights = iter(merged_state_dict(self.model).items())
        if self.cuda:
            self.llm.wake_up()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sample(self, prompts: list[dict], num_samples: int, temperature: float):
        def rename(part: dict) -> dict:
            return {"type": "image_pil", "image_pil": part["image"]} if part["type"] == "image" else part

        if videos := [prompt["index"] for prompt in prompts if prompt["video"]]:
            fail(f"row {videos[0]} has a video: use --rollout hf")
        chats = [[m | {"content": [*map(rename, m["content"])]} for m in p["messages"]] for p in prompts]
        params = [self.make_params(n=num_samples, temperature=temperature, seed=p["seed"]) for p in prompts]
        outputs = self.llm.chat(chats, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs):
            if output.prompt_token_ids != prompt["prompt_ids"].tolist():
                fail(f"row {prompt['index']}: vLLM reads other tokens than the trainer; use --rollout hf")
        flat = [x for output in outputs for x in output.outputs]
        logprobs = [[step[token].logprob for step, token in zip(x.logprobs, x.token_ids)] for x in flat]
        ids = [torch.tensor(list(x.token_ids)) for x in flat]
        return ids, list(map(torch.tensor, logprobs)), [x.finish_reason == "length" for x in flat]

    def sleep(self) -> None:
        if self.cuda:
            self.llm.sleep(level=2)  # the next sync brings the weights


SAMPLERS = {"hf": ModelSampler, "vllm": VllmSampler}  # yours has sync, sample, maybe sleep; prompts: seed


def roll_out(args: Args, sampler, data, functions, indices, G: int, temperature: float, step: int) -> Rollout:
    """G scored responses to each of some rows, dealt out to the ranks and gathered on all of them."""
    prompts, ids, logprobs, cut, samples = [], [], [], [], []
    own, size = np.array_split(np.array(indices), WORLD_SIZE)[RANK].tolist(), args.generation_batch_size // G
    for start in range(0, len(own), max(1, size)):
        batch = data.encode(own[start : start + max(1, size)])
        # What is drawn depends on seed, step and entry alone, not on batches, ranks or a resume.
        seeds = [np.random.default_rng([args.seed, step, p["entry"]]).integers(2**31) for p in batch]
        batch = [prompt | {"seed": int(seed)} for prompt, seed in zip(batch, seeds)]
        drawn = sampler.sample(batch, G, temperature) if batch else ([], [], [])
        prompts, ids, logprobs, cut = prompts + batch, ids + drawn[0], logprobs + drawn[1], cut + drawn[2]
    texts = data.tokenizer.batch_decode(ids, skip_special_tokens=True)
    state = SimpleNamespace(global_step=step, max_steps=args.total_steps)
    values, logged = score_responses(functions, [p for p in prompts for _ in range(G)], texts, ids, state)
    for prompt, i in zip(prompts, range(0, len(texts), G)):  # the first response to each, to read
        row = {name: x for name, x in prompt["row"].items() if isinstance(x, str | int | float)}
        scores = {f"reward/{name}": column[i] for name, column in values.items()}
        samples.append({"row": prompt["index"], **row, "response": texts[i], **scores})
    prompts = [{name: prompt[name] for name in ("index", "length", "kinds")} for prompt in prompts]
    mine = prompts, ids, logprobs, cut, samples, logged, *values.values()
    gathered = [mine] * WORLD_SIZE
    if WORLD_SIZE > 1:  # alone it would cost threads, see sum_over_ranks
        dist.all_gather_object(gathered, mine)
    prompts, ids, logprobs, cut, samples, logged, *values = (sum(x, []) for x in zip(*gathered))
    if len(prompts) * 2 < len(indices):
        fail(f"more than half of {len(indices)} rows of {data.source} can't be used: see the warnings")
    values = torch.tensor(values).view(-1, len(prompts), G)  # (rewards, n, G)
    weighted = values * torch.tensor(args.reward_weights)[:, None, None]
    R = torch.tensor([len(x) for x in ids])  # (B,)
    return Rollout(
        prompts=prompts, response_ids=ids, truncated=torch.tensor(cut).view(-1, G),
        rewards=dict(zip(functions, values)),
        scores=weighted.nansum(0).masked_fill(weighted.isnan().all(0), math.nan),
        mask=torch.arange(int(R.max()))[None] < R[:, None],
        engine_logprobs=nn.utils.rnn.pad_sequence(logprobs, batch_first=True), samples=samples, logged=logged,
    )  # fmt: skip


def join(one: Rollout, other: Rollout) -> Rollout:
    """The prompts of one, then those of the other: rounds of dynamic sampling."""

    def add(x, y):
        if isinstance(x, dict):
            return {name: add(x[name], y[name]) for name in x}
        return x + y if isinstance(x, list) else nn.utils.rnn.pad_sequence([*x, *y], batch_first=True)

    return Rollout(*map(add, vars(one).values(), vars(other).values()))


def packs_of(args: Args, rollout: Rollout, groups: packing.Groups, data, actor) -> Iterator:
    """This rank's packs of some groups: (prompt, its responses)."""
    given = groups, rollout.prompts, data.encode, rollout.response_ids, args.micro_batch_tokens
    how = {"packed": packing.is_packed(actor.module.model), "media_everywhere": args.zero_stage > 0}
    for pack in packing.packs_of_rank(*given, RANK, WORLD_SIZE, **how):
        yield pack.to(actor.device)


@torch.no_grad()
def compute_logprobs(args: Args, rollout: Rollout, data, actor, forwards: dict[str, Callable]) -> dict:
    """{name: forward}, pack -> (M,), of all responses -> {name: (B, R)}."""
    n, G = rollout.scores.shape
    tables = {name: torch.zeros(rollout.mask.shape, device=actor.device) for name in forwards}
    groups = [(i, [*range(i * G, (i + 1) * G)]) for i in range(n)]
    for pack in packs_of(args, rollout, groups, data, actor) if forwards else ():
        for name, forward in forwards.items():
            tables[name][pack.index] = forward(pack)[0]
    return {name: sum_over_ranks(table, actor.device) for name, table in tables.items()}


def add_advantages(args: Args, rollout: Rollout, tables: dict[str, Tensor], trained: Tensor, state: dict):
    """Into tables, all of them (B, R): mask, policy_mask, kl, returns, advantages, engine_logprobs -> scores,
    normalized, then clipped (n, G). trained (n, G): False is left out. Every rank does it for all of them."""
    mask, scores, logprobs = rollout.mask & trained.view(-1, 1), rollout.scores, tables["logprobs"]
    ref_logprobs = tables.get("ref_logprobs", logprobs)
    kl = kl_estimate(logprobs, ref_logprobs, args.kl_estimator) * rollout.mask  # (B, R)
    if args.reward_running_norm != "off":
        own = scores[trained].double()  # of all steps so far: count, sum, sum of squares
        state["moments"] = state["moments"] + torch.stack([own**0, own, own**2]).sum(1)
        _, mean, square = (state["moments"] / state["moments"][0].clamp(min=1)).tolist()
        std = max(0.0, square - mean**2) ** 0.5
        scores = scores - mean if args.reward_running_norm == "standardize" else scores
        scores = scores / (std if std > 1e-6 * abs(mean) else 1.0)
    shaped = scores.clamp(*args.reward_clip) if args.reward_clip else scores
    scores = center_scores(shaped, trained, args.advantage).flatten()  # (B,)
    rewards = compute_token_rewards(scores, kl, rollout.mask, 0.0 if args.kl_loss else state["kl_coef"])
    values = tables.get("values", torch.zeros(mask.shape))
    gae_lambda = args.gae_lambda if args.advantage == "gae" else 1.0
    advantages, returns = compute_gae(rewards, values, mask, args.gamma, gae_lambda)
    whitened = args.advantage in ("gae", "reinforce", "reinforce_baseline")
    if args.whiten_advantages == "on" or (args.whiten_advantages == "auto" and whitened):
        advantages = whiten(advantages, mask)
    ratio, bound = args.entropy_token_ratio, args.advantage_clip or math.inf
    policy_mask = high_entropy_mask(tables["entropy"], mask, ratio) if ratio < 1 else mask
    tables |= {"mask": mask, "policy_mask": policy_mask, "kl": kl, "returns": returns}
    tables |= {"advantages": advantages.clamp(-bound, bound), "engine_logprobs": rollout.engine_logprobs}
    return shaped


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


def ptx_packs(args: Args, turns: SimpleNamespace, number: int, actor) -> tuple[list, int]:
    """This rank's packs of assistant turns for optimizer step `number` of the run, and all ranks' tokens."""
    size = args.ptx_batch_size
    prompts = turns.encode(batch_indices(number * size, size, len(turns.rows), args.seed + 1))
    targets, groups = [prompt["target_ids"] for prompt in prompts], [(i, [i]) for i in range(len(prompts))]
    batch = SimpleNamespace(prompts=prompts, response_ids=targets)
    return list(packs_of(args, batch, groups, turns, actor)) if groups else [], sum(map(len, targets))


def value_terms(args: Args, new_values: Tensor, flat: dict[str, Tensor]) -> tuple[Tensor, dict]:
    """Value loss of one pack, and what is logged: sums over tokens."""
    loss, clipped = compute_value_loss(new_values, flat["values"], flat["returns"], args.value_clip)
    loss = (flat["value_weights"] * loss).sum()
    return args.vf_coef * loss, {"loss/value": loss, "val/clipfrac": clipped.sum()}


def actor_terms(args: Args, actor, pack, flat: dict[str, Tensor], kl_coef: float) -> tuple[Tensor, dict]:
    """The actor's loss of one pack, those of an optimizer step are added up; and what is logged."""
    new_logprobs, entropy, new_values = actor(pack, with_entropy=True)  # (M,) each
    drawn = new_logprobs
    if args.tis_clip:  # the value itself, its gradient times the importance weight
        weights = (flat["logprobs"] - flat["engine_logprobs"]).exp().clamp(max=args.tis_clip)  # (M,)
        drawn = new_logprobs.detach() + weights * (new_logprobs - new_logprobs.detach())
    high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
    given = drawn, flat["logprobs"], flat["advantages"], pack.owner, args.policy_loss
    losses, logs = compute_policy_loss(*given, args.clip_coef, high, args.dual_clip)  # (M,)
    logs = {name: x.sum() for name, x in logs.items()} | {"policy/entropy": entropy.sum()}
    loss = logs["loss/policy"] = (flat["policy_weights"] * losses).sum()
    if args.entropy_coef:  # a term of weight 0 would cost a backward through the vocabulary
        loss = loss - args.entropy_coef * (flat["weights"] * entropy).sum()
    if args.kl_loss and kl_coef > 0:
        kl = kl_estimate(new_logprobs, flat["ref_logprobs"], args.kl_estimator)
        logs["loss/kl"] = (flat["weights"] * kl).sum()
        loss = loss + kl_coef * logs["loss/kl"]
    if args.router_aux_coef:  # each pack by its share of the step's tokens
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        logits, config = actor.module.output.router_logits, actor.module.model.config.get_text_config()
        balance = load_balancing_loss_func(logits, logits[0].shape[-1], config.num_experts_per_tok)
        logs["loss/router"] = flat["value_weights"].sum() * balance
        loss = loss + args.router_aux_coef * logs["loss/router"]
    if new_values is not None:  # of the actor's head
        value_loss, more = value_terms(args, new_values, flat)
        loss, logs = loss + value_loss, logs | more
    return loss, logs


def update(args: Args, rollout: Rollout, tables, trained, data, engines: dict, turns, average, state: dict):
    """num_ppo_epochs passes over the rollout in shuffled mini-batches -> metrics (losses over optimizer
    steps, others over tokens), and which of these steps were taken. trained (n, G): False is left out."""
    actor, step, G = engines["actor"], state["step"], trained.shape[1]
    num_batches = args.rollout_batch_size // args.train_batch_size
    train_actor = step > args.freezing_actor_steps
    engines = {name: engine for name, engine in engines.items() if name == "critic" or train_actor}
    groups = [(i, [i * G + j for j in range(G) if own[j]]) for i, own in enumerate(trained.tolist())]
    groups, sums, steps, tokens = [group for group in groups if group[1]], defaultdict(float), [], 0
    tables = {name: table.to(actor.device) for name, table in tables.items()}  # (B, R) each
    for epoch in range(args.num_ppo_epochs):
        order = np.random.default_rng([args.seed, step, epoch]).permutation(len(groups))
        for number, batch in enumerate(filter(len, np.array_split(order, num_batches))):
            batch, inside, learned = [groups[i] for i in batch], torch.zeros_like(tables["mask"]), []
            inside[[b for _, members in batch for b in members]] = True
            inside, how = inside & tables["mask"], (args.loss_agg, args.max_response_length)
            tokens += int(inside.sum())
            # Denominators are those of the whole optimizer step, on all ranks.
            tables["policy_weights"] = token_weights(inside & tables["policy_mask"], *how)
            tables["weights"] = token_weights(inside, *how)
            tables["value_weights"] = token_weights(inside, "token-mean", 0)
            packs = list(packs_of(args, rollout, batch, data, actor))
            if turns is not None and train_actor:
                so_far = ((step - 1) * args.num_ppo_epochs + epoch) * num_batches + number
                learned, learned_tokens = ptx_packs(args, turns, so_far, actor)
            for pack in learned:  # first: an offloaded optimizer goes by the last pack
                actor.set_gradient_accumulation_boundary(False)
                loss = -actor(pack, temperature=1.0)[0].sum() / learned_tokens
                actor.backward(args.ptx_coef * loss * WORLD_SIZE, scale_wrt_gas=False)
                sums["loss/ptx"] += loss.detach()
            for k, pack in enumerate(packs):
                flat, logs = {name: table[pack.index] for name, table in tables.items()}, {}  # (M,) each
                # DeepSpeed averages over ranks, hence the factor; it must not divide by the number of packs.
                if "critic" in engines:  # backward too, before the actor's graph takes its memory
                    engines["critic"].set_gradient_accumulation_boundary(k == len(packs) - 1)
                    loss, logs = value_terms(args, *engines["critic"](pack), flat)
                    engines["critic"].backward(loss * WORLD_SIZE, scale_wrt_gas=False)
                if train_actor:
                    actor.set_gradient_accumulation_boundary(k == len(packs) - 1)
                    loss, more = actor_terms(args, actor, pack, flat, state["kl_coef"])
                    actor.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
                    logs |= more
                for name, x in logs.items():
                    sums[name] += x.detach()
            steps.append({name: optimizer_step(engine) for name, engine in engines.items()})
            if args.ema_beta and train_actor and steps[-1]["actor"][1]:
                update_average(average, actor.module.model, args.ema_beta)
    if not steps:  # nothing to train on
        return {}, []
    totals = sum_over_ranks(torch.stack([*sums.values()]), actor.device).tolist()
    counts = [len(steps) if name.startswith("loss/") else tokens for name in sums]
    metrics = {name: total / count for name, total, count in zip(sums, totals, counts)}
    for name, key in (("actor", "train/grad_norm"), ("critic", "train/critic_grad_norm")):
        norms = [each[name][0] for each in steps if name in each and each[name][1]]
        metrics |= {key: np.mean(norms)} if norms else {}
    return metrics, [all(taken for _, taken in each.values()) for each in steps]


# ---- evaluate ----


def evaluate(args: Args, sampler, data, functions: dict[str, Callable]) -> tuple[dict, list[dict]]:
    """A fixed subset of held-out prompts, each with a greedy response and eval_num_samples sampled ones."""
    indices = np.sort(np.random.default_rng(0).permutation(len(data.rows))[: args.eval_samples])
    metrics, samples = {}, []
    for mode, temperature, G in (("greedy", 0.0, 1), ("sampled", args.temperature, args.eval_num_samples)):
        rollout = roll_out(args, sampler, data, functions, indices, G, temperature, step=0)
        tables = {"reward_" * (name in ("score", "length")) + name: x for name, x in rollout.rewards.items()}
        tables |= {"score": rollout.scores, "length": rollout.mask.sum(1).float()}
        metrics |= {f"eval/{mode}_{name}": float(values.nanmean()) for name, values in tables.items()}
        samples += [{"phase": f"eval_{mode}", **sample} for sample in rollout.samples[:16]]
    if "accuracy" in rollout.rewards:
        metrics["eval/pass_at_k"] = float((rollout.rewards["accuracy"] == 1).any(1).float().mean())
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
    device, G = init_distributed(), args.num_samples_per_prompt
    run_dir, checkpoint = find_run(args)
    fp32 = args.dtype == "float32" or (args.dtype == "auto" and device.type == "cpu")
    dtype = torch.float32 if fp32 else torch.bfloat16
    torch.manual_seed(args.seed)  # of LoRA's first weights

    # --- 2. models and engines ---
    model, reference = load_model(args.model, dtype), None
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    if args.kl_coef > 0 and args.lora_rank == 0:
        reference = Actor(args, load_model(args.model, dtype)).requires_grad_(False)
        reference = make_engine(args, reference, dtype) if args.zero_stage == 3 else reference.to(device)
    engines, updates = {}, args.rollout_batch_size // args.train_batch_size * args.num_ppo_epochs  # per step
    value_head = make_value_head(args, model) if args.critic_share_backbone else None
    if args.advantage == "gae" and value_head is None:
        backbone = load_model(args.critic_model or args.model, dtype)
        prepare_training(args, backbone)
        own = replace(args, learning_rate=args.critic_learning_rate)
        engines["critic"] = make_engine(own, Critic(args, backbone), dtype, args.total_steps * updates)
    prepare_training(args, model)
    updates *= args.total_steps - args.freezing_actor_steps
    actor = engines["actor"] = make_engine(args, Actor(args, model, value_head), dtype, updates)
    # In every checkpoint: add what must survive a resume.
    state = {"step": 0, "before": {}, "cursor": 0, "kl_coef": args.kl_coef, "moments": torch.zeros(3)}
    for name, engine in engines.items():
        engine.eval()
        if checkpoint is not None:
            state = engine.load_checkpoint(str(checkpoint / "state" / name), tag="engine")[1]["ours"]
    average, saved_parts = None, dict(engines)
    if args.ema_beta and RANK == 0:
        average = load_model(str(checkpoint / "state" / "ema") if checkpoint else args.model, torch.float32)
        saved_parts["ema"] = SimpleNamespace(save_checkpoint=lambda path, **_: average.save_pretrained(path))

    # --- 3. data ---
    data = load_data(args, args.dataset, args.dataset_split, model, processor)
    source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = load_data(args, source, args.eval_dataset_split, model, processor) if source else None
    known = REWARDS | {"overlong": functools.partial(overlong, limit=args.max_response_length)}
    functions = {x.rpartition(":")[2]: plug_in("--rewards", x, known) for x in args.rewards}
    if RANK == 0:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--output-dir {args.output_dir} can't be written: {error}")
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2))
        for path in run_dir.glob("*.jsonl"):  # without what was logged after the checkpoint
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            lines = [line for line in lines if 0 < state["step"] >= json.loads(line)["train/step"]]
            path.write_text("".join(lines))
    tell(f"{run_dir}: {len(data.rows)} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")
    some = range(0, len(data.rows), len(data.rows) // 16 + 1)
    prompts = data.encode(some) or fail(f"{args.dataset}: no row can be used")
    probes = [*{prompt["kinds"]: prompt for prompt in prompts}.values()]  # text, with a picture, ...
    tell(packing.prove_packing(model, lambda pack: actor(pack)[0], probes, args.temperature))
    for other in filter(None, (reference, engines.get("critic")) if packing.is_packed(model) else ()):
        packing.switch_attention(getattr(other, "module", other).model, "packed")
    end_ids = model.generation_config.eos_token_id
    end_ids = {*(end_ids if isinstance(end_ids, list) else [end_ids]), data.tokenizer.eos_token_id} - {None}
    turns = load_turns(args, model, processor, sorted(end_ids)) if args.ptx_dataset else None
    sampler = plug_in("--rollout", args.rollout, SAMPLERS)(args, model, sorted(end_ids), run_dir)
    sampler.sync()
    forwards = {}  # of the score step
    if args.kl_coef > 0:
        forwards["ref_logprobs"] = reference or functools.partial(actor, with_lora=False)
    if (args.rollout, dtype) != ("hf", torch.float32) or args.zero_stage == 3 or not packing.is_packed(model):
        forwards["logprobs"] = actor  # elsewhere the sampler's are the same, as proved
    if args.entropy_token_ratio < 1:
        forwards["entropy"] = lambda pack: actor(pack, with_entropy=True)[1:]
    if args.advantage == "gae":
        forwards["values"] = engines.get("critic") or (lambda pack: actor(pack)[2:])
    metrics, received, stopped, saved = {}, [], False, checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):  # save after this step, and end
        signal.signal(number, lambda number, frame: received.append(number))
    if eval_data and not state["before"]:  # a resumed run has it
        state["before"], samples = evaluate(args, sampler, eval_data, functions)
        log(args, run_dir, {"train/step": 0, "train/episode": 0, **state["before"]}, samples)
    steps, wanted = range(state["step"] + 1, args.total_steps + 1), args.rollout_batch_size // G
    hidden = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step
    for step in (bar := tqdm(steps, "ppo_vl", args.total_steps, initial=state["step"], disable=hidden)):
        # --- 4. rollout: one round, unless prompts that teach nothing are replaced ---
        times, state["step"], rollout, useful = [time.perf_counter()], step, None, torch.zeros(0)
        first = state["cursor"]
        for _ in range(args.dynamic_sampling + 1):
            count = wanted - int(useful.sum())
            indices = batch_indices(state["cursor"], count, len(data.rows), args.seed)
            state["cursor"] += count
            if rollout and not (indices := [i for i in indices if data.encode([i])]):
                continue  # a later round's few may be unusable
            more = roll_out(args, sampler, data, functions, indices, G, args.temperature, step)
            rollout = join(rollout, more) if rollout else more
            scores = rollout.scores  # (n, G)
            useful = scores.nan_to_num(-math.inf).amax(1) > scores.nan_to_num(math.inf).amin(1)  # (n,)
            if not args.dynamic_sampling or useful.sum() == wanted:
                break
        if hasattr(sampler, "sleep"):  # the trainer needs the memory
            sampler.sleep()
        trained = ~scores.isnan() & ~(rollout.truncated & args.mask_truncated)  # (n, G)
        trained &= useful[:, None] | (args.dynamic_sampling == 0)
        if args.replay_limit:
            places = trained.any(1).nonzero()[:, 0]
            trained[places[: -max(1, args.replay_limit // G)]] = False
        times.append(time.perf_counter())

        # --- 5. score: log-probs and values before the update ---
        tables = compute_logprobs(args, rollout, data, actor, forwards)
        logprobs = tables.setdefault("logprobs", rollout.engine_logprobs)  # (B, R)
        gap = ((rollout.engine_logprobs - logprobs).abs() * rollout.mask).sum(1) / rollout.mask.sum(1)
        if gap.mean() > packing.TOLERANCE[dtype]:
            row = rollout.prompts[int(gap.argmax()) // G]["index"]
            fail(f"the sampler's log-probs are {gap.mean():.2g} nats from the trainer's, most at row {row}")
        times.append(time.perf_counter())

        # --- 6. advantages ---
        shaped = add_advantages(args, rollout, tables, trained, state)
        kl, kl_coef = tables["kl"].sum(1).view(-1, G), state["kl_coef"]  # (n, G)

        # --- 7. update ---
        for engine in engines.values():
            engine.train()
        metrics, taken = update(args, rollout, tables, trained, data, engines, turns, average, state)
        for engine in engines.values():
            engine.eval()
        times.append(time.perf_counter())

        # --- 8. sync weights ---
        sampler.sync()
        times.append(time.perf_counter())

        # --- 9. log ---
        lengths = rollout.mask.sum(1).float()
        metrics |= {
            "train/step": step,
            "train/episode": state["cursor"] * G,
            "train/learning_rate": actor.get_lr()[0],
            "train/kl_coef": kl_coef,
            "train/skipped_updates": taken.count(False),
            "objective/scores": rollout.scores.nanmean(),
            "objective/kl": kl.mean(),
            "objective/rlhf_reward": (shaped - kl_coef * kl).nanmean(),
            "rollout/response_length_mean": lengths.mean(),
            "rollout/truncated_frac": rollout.truncated.float().mean(),
            "rollout/zero_std_groups_frac": ((scores - scores[:, :1]).abs().amax(1) < 1e-9).float().mean(),
            "rollout/prompts_dropped": state["cursor"] - first - len(rollout.prompts),
            "rollout/engine_logprob_diff_max": gap.max(),
            "time/total": times[-1] - times[0],
            "time/tokens_per_second": lengths.sum() / (times[-1] - times[0]),
        }
        if "values" in tables:
            values, returns = (tables[name][tables["mask"]] for name in ("values", "returns"))
            unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
            metrics["val/explained_variance"] = 1 - unexplained.nan_to_num(1.0, 1.0)
        control = float(kl[trained].mean()), args.kl_target, args.kl_horizon, int(trained.sum())
        state["kl_coef"] = next_kl_coef(kl_coef, *control)
        metrics |= zip(("time/rollout", "time/score", "time/update", "time/sync"), np.diff(times))
        metrics |= {f"reward/{name}": values.nanmean() for name, values in rollout.rewards.items()}
        for name in {name for name, _ in rollout.logged}:
            metrics[name] = np.mean([value for key, value in rollout.logged if key == name])
        metrics = {name: float(value) for name, value in metrics.items()}
        samples = [{"phase": "train"} | sample for sample in rollout.samples[:2]]
        shown = {key: f"{metrics[f'objective/{key}']:.3f}" for key in ("scores", "kl")}
        shown["gap"] = f"{gap.max():.0e}"

        # --- 10. eval and save ---
        last, hopeless = step == args.total_steps, bool(taken) and not any(taken)
        if eval_data and (last or (args.eval_steps and step % args.eval_steps == 0)):
            evaluated, eval_samples = evaluate(args, sampler, eval_data, functions)
            metrics, samples = metrics | evaluated, samples + eval_samples
            shown["held-out"] = f"{evaluated['eval/sampled_score']:.3f}"
        bar.set_postfix(shown)
        log(args, run_dir, metrics, samples)
        if hidden:
            tell(f"step {step} of {args.total_steps}, {metrics['time/total']:.2f} s: {shown}")
        stopped = bool(sum_over_ranks(torch.tensor(len(received)), device)) and not last  # on all ranks alike
        if last or stopped or hopeless or (args.save_steps and step % args.save_steps == 0):
            saved = save_checkpoint(args, run_dir, saved_parts, processor, state)
        if hopeless:
            fail(f"step {step}: no update had finite gradients; {saved} has the weights from before it")
        if stopped:
            break

    # --- 11. finish ---
    if stopped:
        tell(f"stopped by a signal after step {step}; go on with --resume {saved}")
    else:
        before = state["before"].items()
        told = [f"{k} {x:.3f} -> {metrics[k]:.3f}" for k, x in before if "_score" in k and k in metrics]
        tell(" · ".join([*told, f"{time.perf_counter() - started:.0f} s", str(saved)]))
        tell(f"to see it: python tools/report.py {run_dir}")
    if args.rollout != "vllm":  # the engine ends the process group by itself
        dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    argv = [x for x in sys.argv[1:] if not x.startswith("--local_rank")]  # the deepspeed launcher's
    main(tyro.cli(Args, args=argv, description=__doc__))
