"""PPO for vision-language and text models, with a critic.

A step samples responses, scores them, estimates how much better each token did than the critic expected, and
makes a few clipped updates of policy and critic:

    r_t = -kl_coef * KL of token t to the reference, plus the score at the last token
    A_t = sum over s >= t of (gamma lambda)^(s - t) (r_s + gamma V_{s+1} - V_s)
    rho_t = p_now(token t) / p_before(token t)
    policy loss = -mean of min(rho_t W_t, clip(rho_t, 1 - c, 1 + c) W_t), W = A whitened over the rollout
    value loss = mean of (V_t - return_t)^2, return_t = A_t + V_t before the update

Papers: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1506.02438. docs/ppo_vl.md lists what differs
from LightRFT's PPOTrainerVL (opendilab/LightRFT@49e62cb). Other estimators and losses (GRPO, RLOO, GSPO, ...)
are flags: they stand after main, and what main calls of them does nothing by default.

Read to the end of main: the flags, the functions that are the algorithm, the data of a step,
and main, which is the whole method. What main calls stands below it, to be looked up, in the
order of use: setup, rollout, samplers, rewards, data, forward, other losses, model, and so on.

Shapes: n prompts with G responses each, B = n * G of them, R tokens in the longest, V words; a
pack (common/packing.py) is one forward of prompts and S responses, which have M tokens.

    python ppo_vl.py                    # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python ppo_vl.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset my.jsonl --lora-rank 8 --learning-rate 1e-5
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
from typing import Any, Literal, NamedTuple, NoReturn

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
from common.kl import kl_estimate, next_kl_coef
from common.packing import Prompt, PromptInfo, Response

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


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
    columns: tuple[str, ...] = ()  # our names = the data's: prompt=problem answer=solution
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
    replay_limit: int = 0  # update on so many responses only, those of a step's last prompts; 0 = all
    # --- algorithm ---
    rewards: tuple[str, ...] = ("accuracy", "format")  # also overlong, or path.py:function: score_responses
    reward_weights: tuple[float, ...] = (0.9, 0.1)  # the score of a response is the weighted sum
    reward_running_norm: Literal["off", "scale", "standardize"] = "off"  # scores / std so far, or - mean too
    reward_clip: tuple[float, float] | None = None  # range of scores, before the KL is subtracted
    # estimator, see center_scores; all but gae work without a critic
    advantage: Literal["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "cpgd"] = "gae"
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95  # of gae: 1 = no bias, 0 = least noise
    whiten_advantages: Literal["auto", "on", "off"] = "auto"  # to mean 0, std 1; auto: gae and reinforce(_*)
    advantage_clip: float = 0.0  # bound of the advantages, whitened or not; 0 = off
    policy_loss: Literal["clip", "dual_clip", "cpg", "gspo"] = "clip"  # of a token, see POLICY_LOSSES
    clip_coef: float = 0.2  # the ratio is clipped below 1 - c (paper: 0.2; GSPO: 3e-4)
    clip_coef_high: float | None = None  # and above 1 + c; None: as --clip-coef
    dual_clip: float = 3.0  # dual_clip's loss is at most this times -A where A < 0
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
    kl_horizon: int = 10000  # responses over which it gets there
    value_clip: float = 0.2  # new values are clipped to old ones +- this, in units of reward; 0 = off
    vf_coef: float = 0.5  # weight of the value loss
    freezing_actor_steps: int = 0  # steps at the start in which the critic trains alone
    num_ppo_epochs: int = 2  # passes over each rollout
    train_batch_size: int = 128  # responses per optimizer step, over all ranks
    ptx_dataset: str | None = None  # chats, column messages: assistant turns learned in the same updates
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


# ---- the algorithm: tensors in, tensors and metrics out ----


def compute_token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * kl_t, and the score on top at the last token with mask 1. (B,), (B, R), (B, R) -> (B, R)

    scores [1, 2], kl 0.1, mask [[1, 1, 0], [1, 1, 1]], coef 1 -> [[-0.1, 0.9, 0], [-0.1, -0.1, 1.9]]
    """
    is_last = F.one_hot(mask.sum(1).long() - 1, mask.shape[1]).to(kl)  # (B, R)
    return (is_last * scores[:, None] - kl_coef * kl) * mask


def compute_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (B, R), 0 outside the mask. The value after the last token is 0.

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1},   returns = A + V

    With values 0 and lambda 1 these are the discounted rewards to go: the estimators without a critic.
    rewards [[0, 0, 1]], values [[.5, .5, .5]], mask 1, gamma 1, lambda .5 -> advantages [[.125, .25, .5]]
    """
    rewards = rewards * mask
    values = values * mask
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])  # (B,)
    next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * gae_lambda * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
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


class Clip(NamedTuple):
    low: float  # the ratio is clipped below 1 - low
    high: float  # and above 1 + high
    dual: float  # with dual_clip a loss is at most this times -A where A < 0


class PolicyLoss(NamedTuple):
    losses: Tensor  # (M,)
    ratio: Tensor  # (M,)
    is_clipped: Tensor  # (M,) bool: without gradient


def clip_loss(logratio: Tensor, advantages: Tensor, owner: Tensor, clip: Clip) -> PolicyLoss:
    """L = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(logratio). owner: for gspo_loss

    https://arxiv.org/abs/1707.06347 eq. (7)
    high .2: rho 1.5, A 1 -> -1.2 (clipped: no gradient); rho 1.5, A -1 -> 1.5 (not clipped)
    """
    ratio = logratio.clamp(-20, 20).exp()  # far from e^88, fp32's end
    clipped_ratio = ratio.clamp(1 - clip.low, 1 + clip.high)
    too_low = (ratio < 1 - clip.low) & (advantages < 0)
    too_high = (ratio > 1 + clip.high) & (advantages > 0)
    return PolicyLoss(
        losses=torch.maximum(-advantages * ratio, -advantages * clipped_ratio),
        ratio=ratio,
        is_clipped=too_low | too_high,
    )


def compute_policy_loss(
    new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, owner: Tensor, kind: str, clip: Clip
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (M,), to be averaged, and metrics (M,). new_logprobs, logprobs (M,): now and before
    the update; advantages (M,); owner (M,): the response that each token is of; kind: of POLICY_LOSSES."""
    logratio = new_logprobs - logprobs
    found = POLICY_LOSSES[kind](logratio, advantages, owner, clip)
    metrics = {
        "policy/ratio": found.ratio.detach(),
        "policy/approx_kl": (torch.expm1(logratio.clamp(max=20)) - logratio).detach(),  # KL(old || new), k3
        "policy/clipfrac_low": (found.is_clipped & (advantages < 0)).float(),
        "policy/clipfrac_high": (found.is_clipped & (advantages > 0)).float(),
    }
    return found.losses, metrics


def compute_value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Per token max((V - return)^2, (clip(V, V_old - c, V_old + c) - return)^2), and where it is clipped.

    c = 0: squared error. V_old 0, V 1, return 2, c 0.2 -> max(1, 3.24) = 3.24. openai/baselines@ea25b9e ppo2
    """
    losses = (new_values - returns).square()
    if value_clip == 0:
        return losses, torch.zeros_like(losses)
    change = new_values - values
    clipped_losses = (values + change.clamp(-value_clip, value_clip) - returns).square()
    # Within the bound rounding alone would count as a clip.
    is_clipped = (change.abs() > value_clip) & (clipped_losses > losses)
    return torch.where(is_clipped, clipped_losses, losses), is_clipped.float()


# ---- the data of a step ----


class Outputs(NamedTuple):  # of the actor, for a pack
    logprobs: Tensor  # (M,)
    entropy: Tensor | None  # (M,), where asked for
    values: Tensor | None  # (M,), of a head on its backbone: --critic-share-backbone
    router_logits: tuple | None  # of a mixture of experts, with --router-aux-coef


@dataclass
class Rollout:
    """n prompts, G responses to each, prompt by prompt. The same on every rank, on the CPU."""

    prompts: list[PromptInfo]  # n of them
    response_ids: list[Tensor]  # B of them, (R_b,): with EOS where it was drawn
    mask: Tensor  # (B, R) bool: True for tokens, False behind a response's end
    truncated: Tensor  # (n, G) bool: cut by the length limit
    rewards: dict[str, Tensor]  # by reward function (n, G), NaN where it does not apply
    scores: Tensor  # (n, G): their weighted sum, NaN where none applies
    sampler_logprobs: Tensor  # (B, R): of the sampler
    samples: list[dict]  # n of them: the first response to each prompt, to read
    logged: dict[str, float]  # means of what the reward functions have logged
    # main adds:
    trained: Tensor | None = None  # (n, G) bool: False is left out of the update
    trained_mask: Tensor | None = None  # (B, R) bool: tokens of these
    policy_mask: Tensor | None = None  # (B, R) bool: tokens of trained_mask in the policy loss
    logprobs: Tensor | None = None  # (B, R): of the policy before the update
    ref_logprobs: Tensor | None = None  # (B, R): of the reference
    entropy: Tensor | None = None  # (B, R): of the policy before the update, where it is asked for
    values: Tensor | None = None  # (B, R): of the critic before the update
    advantages: Tensor | None = None  # (B, R)
    returns: Tensor | None = None  # (B, R): what the critic learns


@dataclass
class TokenWeights:
    """Of the tokens in an optimizer step, (B, R) each: a loss is the sum of weight times the token's loss."""

    policy: Tensor  # by --loss-agg, of the tokens that the policy loss trains on
    trained: Tensor  # by --loss-agg, of all trained tokens: entropy bonus and KL
    per_token: Tensor  # 1 / number of trained tokens: the value loss


@dataclass
class Run:
    """What setup makes, and all steps use."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    processor: Any  # of transformers, or a text model's tokenizer
    actor: Any  # DeepSpeed's engine around the trained Actor
    critic: Any  # and around the Critic; None without one, or with a value head on the actor
    reference: Callable | None  # pack -> Outputs; no reference with --kl-coef 0
    average: Any  # --ema-beta: the model of averaged weights on rank 0, else None
    train_data: "Data"
    eval_data: "Data | None"
    turns: "Data | None"  # --ptx-dataset: its encode gives a Turn
    reward_functions: dict[str, Callable]
    sampler: Any  # one of SAMPLERS, or a class of your own
    sampler_is_exact: bool  # its log-probs are those of the actor, bit for bit
    checkpoint: Path | None  # the newest
    state: dict  # in every checkpoint, see setup: add what must survive a resume
    tensorboard: Any = None  # its writer, once there is one


# ---- main ----


def main(args: Args) -> dict[str, float]:
    # --- 1. setup ---
    time_begin = time.perf_counter()
    run = setup(args)
    actor, critic = run.actor, run.critic
    G = args.num_samples_per_prompt
    updates_per_epoch = args.rollout_batch_size // args.train_batch_size
    clip_high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
    clip = Clip(low=args.clip_coef, high=clip_high, dual=args.dual_clip)
    signals = []  # received: the run then ends, after its step and a checkpoint
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    stopped = False
    metrics = {}

    if run.eval_data and not run.state["before"]:  # a resumed run has it
        run.state["before"], samples = evaluate(args, run)
        log(args, run, {"train/step": 0, "train/episode": 0, **run.state["before"]}, samples)

    steps = range(run.state["step"] + 1, args.total_steps + 1)
    no_bar = RANK > 0 or not sys.stderr.isatty()  # a log file gets a line per step
    bar = tqdm(steps, "ppo_vl", total=args.total_steps, initial=run.state["step"], disable=no_bar)
    for step in bar:
        # --- 2. rollout: G scored responses to each prompt ---
        time_start = time.perf_counter()
        rollout, num_entries = roll_out_useful_prompts(args, run, step)
        run.state["cursor"] += num_entries  # place in the endless stream of shuffled prompts
        if hasattr(run.sampler, "sleep"):  # the trainer needs the memory; sync wakes it
            run.sampler.sleep()
        rollout.trained = trained_responses(args, rollout)  # (n, G): those that the update is on
        rollout.trained_mask = rollout.mask & rollout.trained.view(-1, 1)  # (B, R)
        time_sampled = time.perf_counter()

        # --- 3. log-probs and values before the update ---
        add_logprobs_and_values(args, run, rollout)  # fills logprobs, ref_logprobs, entropy and values

        # A sampler that computes another function than the trainer would spoil a run silently.
        gap = (rollout.sampler_logprobs - rollout.logprobs).abs() * rollout.mask  # (B, R)
        gap = gap.sum(1) / rollout.mask.sum(1)  # (B,): nats per token
        if not gap.mean() <= packing.TOLERANCE[run.dtype]:  # fp32 0.001, bf16 0.15; or NaN
            worst = rollout.prompts[int(gap.argmax()) // G].index
            fail(f"the sampler's log-probs are {gap.mean():.2g} nats from the trainer's, most at row {worst}")
        time_asked = time.perf_counter()

        # --- 4. advantages: every rank holds the whole rollout, so nothing is communicated ---
        kl_coef = run.state["kl_coef"]
        trained_mask = rollout.trained_mask  # (B, R)
        kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator) * rollout.mask  # (B, R)
        shaped_scores, run.state["moments"] = normalize_scores(  # (n, G)
            rollout.scores, rollout.trained, run.state["moments"], args.reward_running_norm
        )
        if args.reward_clip:
            shaped_scores = shaped_scores.clamp(min=args.reward_clip[0], max=args.reward_clip[1])
        token_rewards = compute_token_rewards(  # (B, R): of all responses
            scores=center_scores(shaped_scores, rollout.trained, args.advantage).flatten(),  # gae: as is
            kl=kl,
            mask=rollout.mask,
            kl_coef=0.0 if args.kl_loss else kl_coef,
        )
        rollout.advantages, rollout.returns = compute_gae(  # (B, R)
            rewards=token_rewards,
            values=rollout.values,
            mask=trained_mask,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda if args.advantage == "gae" else 1.0,
        )
        if is_whitened(args):
            rollout.advantages = whiten(rollout.advantages, trained_mask)
        if args.advantage_clip > 0:
            rollout.advantages = rollout.advantages.clamp(-args.advantage_clip, args.advantage_clip)
        rollout.policy_mask = high_entropy_mask(rollout.entropy, trained_mask, args.entropy_token_ratio)

        # --- 5. update: epochs over the rollout in shuffled mini-batches ---
        engines = {"critic": critic} if critic else {}  # that learn in this step
        train_actor = step > args.freezing_actor_steps
        if train_actor:
            engines["actor"] = actor
        for engine in engines.values():
            engine.train()
        groups = []  # (prompt, its responses)
        for i in range(len(rollout.prompts)):
            members = [i * G + j for j in range(G) if rollout.trained[i, j]]
            if members:
                groups.append((i, members))
        losses = defaultdict(list)  # name -> of each pack, its share of an optimizer step's loss
        update_metrics = defaultdict(list)  # name -> of each pack (M,)
        grad_norms = defaultdict(list)  # engine -> of each optimizer step that it took
        updates_taken = []  # False: an engine left it out, its gradients were not finite
        for epoch in range(args.num_ppo_epochs):
            order = np.random.default_rng([args.seed, step, epoch]).permutation(len(groups))
            splits = [split for split in np.array_split(order, updates_per_epoch) if len(split)]
            for number, split in enumerate(splits):
                mini_batch = [groups[i] for i in split]  # fewer where prompts were left out
                weights = make_token_weights(args, rollout, mini_batch)
                packs = list(packs_of(args, run, rollout, mini_batch))  # this rank's share
                if run.turns and train_actor:  # first: DeepSpeed's step comes with the last pack
                    num_updates = ((step - 1) * args.num_ppo_epochs + epoch) * updates_per_epoch + number
                    losses["loss/ptx"].append(backward_of_turns(args, run, num_updates))
                for k, pack in enumerate(packs):
                    for engine in engines.values():
                        engine.set_gradient_accumulation_boundary(k == len(packs) - 1)
                    # The factor undoes DeepSpeed's mean over ranks, scale_wrt_gas=False its mean over packs.
                    if critic:  # backward before the actor's graph takes its memory
                        value_loss, is_clipped = value_loss_of(args, rollout, weights, pack, critic(pack))
                        critic.backward(args.vf_coef * value_loss * WORLD_SIZE, scale_wrt_gas=False)
                        losses["loss/value"].append(value_loss.detach())
                        update_metrics["val/clipfrac"].append(is_clipped)
                    if not train_actor:
                        continue
                    outputs = actor(pack, with_entropy=True)
                    new_logprobs = outputs.logprobs  # (M,)
                    if args.tis_clip > 0:
                        new_logprobs = weigh_gradients(  # the values stay, gradients are weighed
                            new_logprobs=new_logprobs,
                            logprobs=pack.tokens(rollout.logprobs),
                            sampler_logprobs=pack.tokens(rollout.sampler_logprobs),
                            limit=args.tis_clip,
                        )
                    policy_losses, policy_metrics = compute_policy_loss(
                        new_logprobs=new_logprobs,
                        logprobs=pack.tokens(rollout.logprobs),  # (M,)
                        advantages=pack.tokens(rollout.advantages),  # (M,)
                        owner=pack.owner,  # (M,)
                        kind=args.policy_loss,
                        clip=clip,
                    )
                    loss = (pack.tokens(weights.policy) * policy_losses).sum()
                    losses["loss/policy"].append(loss.detach())
                    for term in other_terms(args, run, rollout, weights, pack, outputs):
                        loss = loss + term.coef * term.loss
                        losses[term.name].append(term.loss.detach())
                    if outputs.values is not None:  # of the actor's own head
                        value_loss, is_clipped = value_loss_of(args, rollout, weights, pack, outputs.values)
                        loss = loss + args.vf_coef * value_loss
                        losses["loss/value"].append(value_loss.detach())
                        update_metrics["val/clipfrac"].append(is_clipped)
                    actor.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
                    for name, values in policy_metrics.items():
                        update_metrics[name].append(values)
                    update_metrics["policy/entropy"].append(outputs.entropy.detach())
                norms = {name: optimizer_step(engine) for name, engine in engines.items()}
                updates_taken.append(None not in norms.values())
                for name, norm in norms.items():
                    if norm is not None:
                        grad_norms[name].append(norm)
                if args.ema_beta > 0 and norms.get("actor") is not None:
                    update_average(run.average, actor.module.model, args.ema_beta)
        for engine in engines.values():
            engine.eval()
        time_updated = time.perf_counter()

        # --- 6. the sampler wakes up, with the new weights ---
        run.sampler.sync()
        time_synced = time.perf_counter()

        # --- 7. metrics ---
        lengths = rollout.mask.sum(1).float()  # (B,)
        response_kl = kl.sum(1).view(-1, G)  # (n, G)
        equal_scores = (rollout.scores - rollout.scores[:, :1]).abs().amax(1) < 1e-9  # (n,)
        seconds = time_synced - time_start
        metrics = {
            "train/step": step,
            "train/episode": run.state["cursor"] * G,
            "train/learning_rate": actor.get_lr()[0],
            "train/kl_coef": kl_coef,
            "train/skipped_updates": updates_taken.count(False),
            "objective/scores": rollout.scores.nanmean(),
            "objective/kl": response_kl.mean(),
            "objective/rlhf_reward": (shaped_scores - kl_coef * response_kl).nanmean(),
            "rollout/response_length_mean": lengths.mean(),
            "rollout/truncated_frac": rollout.truncated.float().mean(),
            "rollout/zero_std_groups_frac": equal_scores.float().mean(),
            "rollout/prompts_dropped": num_entries - len(rollout.prompts),
            "rollout/engine_logprob_diff_max": gap.max(),
            "time/rollout": time_sampled - time_start,
            "time/logprobs": time_asked - time_sampled,
            "time/update": time_updated - time_asked,
            "time/sync": time_synced - time_updated,
            "time/total": seconds,
            "time/tokens_per_second": lengths.sum() / seconds,
        }
        metrics |= mean_over_ranks(update_metrics, run.device)
        for name, parts in losses.items():
            metrics[name] = sum_over_ranks(torch.stack(parts).sum(), run.device) / len(updates_taken)
        norm_names = {"actor": "train/grad_norm", "critic": "train/critic_grad_norm"}
        metrics |= {norm_names[name]: np.mean(norms) for name, norms in grad_norms.items()}
        metrics |= {f"reward/{name}": values.nanmean() for name, values in rollout.rewards.items()}
        metrics |= rollout.logged
        if args.advantage == "gae":
            explained = explained_variance(rollout.values[trained_mask], rollout.returns[trained_mask])
            metrics["val/explained_variance"] = explained
        metrics = {name: float(value) for name, value in metrics.items()}
        samples = [{"phase": "train", **sample} for sample in rollout.samples[:2]]
        shown = {
            "scores": f"{metrics['objective/scores']:.3f}",
            "kl": f"{metrics['objective/kl']:.3f}",
            "gap": f"{gap.max():.0e}",
        }

        # --- 8. evaluate, log, save ---
        is_last = step == args.total_steps
        if run.eval_data and (is_last or is_due(step, args.eval_steps)):
            eval_metrics, eval_samples = evaluate(args, run)
            metrics |= eval_metrics
            samples += eval_samples
            shown["held-out"] = f"{eval_metrics['eval/sampled_score']:.3f}"
        log(args, run, metrics, samples)
        bar.set_postfix(shown)
        if no_bar:
            tell(f"step {step} of {args.total_steps}, {seconds:.2f} s: {shown}")

        run.state["step"] = step
        run.state["kl_coef"] = next_kl_coef(
            kl_coef=kl_coef,
            kl=float(response_kl[rollout.trained].mean()),
            kl_target=args.kl_target,
            kl_horizon=args.kl_horizon,
            num_sequences=int(rollout.trained.sum()),
        )
        all_skipped = bool(updates_taken) and not any(updates_taken)
        stopped = sum_over_ranks(torch.tensor(len(signals)), run.device).item() > 0 and not is_last
        if is_last or stopped or all_skipped or is_due(step, args.save_steps):
            run.checkpoint = save_checkpoint(args, run)
        if all_skipped:  # in every update an engine left its step out
            fail(f"step {step}: no update had finite gradients; the last weights: {run.checkpoint}")
        if stopped:
            tell(f"stopped by a signal after step {step}; go on with --resume {run.checkpoint}")
            break

    # --- 9. finish ---
    if not stopped:
        summary = []
        for name, before in run.state["before"].items():
            if name.endswith("_score") and name in metrics:
                summary.append(f"{name} {before:.3f} -> {metrics[name]:.3f}")
        tell(" · ".join([*summary, f"{time.perf_counter() - time_begin:.0f} s", str(run.checkpoint)]))
        tell(f"to see it: python tools/report.py {run.folder}")
    if args.rollout != "vllm":  # vLLM ends the process group by itself
        dist.destroy_process_group()
    return metrics


def is_due(step: int, every: int) -> bool:
    """every: --eval-steps or --save-steps, 0 for never."""
    return every != 0 and step % every == 0


# ---- setup ----


def setup(args: Args) -> Run:
    """Load what the steps need, and prove what they rely on."""
    transformers.utils.logging.disable_progress_bar()
    check_args(args)
    device = init_distributed()
    folder, checkpoint = find_run(args)
    is_fp32 = args.dtype == "float32" or (args.dtype == "auto" and device.type == "cpu")
    dtype = torch.float32 if is_fp32 else torch.bfloat16

    actor, critic, reference = make_models(args, device, dtype)
    model = actor.module.model
    state = {
        "step": 0,
        "before": {},  # the evaluation at step 0
        "cursor": 0,  # entries of the stream of prompts that were taken
        "kl_coef": args.kl_coef,
        "moments": torch.zeros(3, dtype=torch.float64),  # of all scores, see normalize_scores
    }
    if checkpoint is not None:
        _, client_state = actor.load_checkpoint(str(checkpoint / "state" / "actor"), tag="engine")
        state = client_state["ours"]
        if critic:
            critic.load_checkpoint(str(checkpoint / "state" / "critic"), tag="engine")
    average = None
    if args.ema_beta > 0 and RANK == 0:
        source = str(checkpoint / "state" / "ema") if checkpoint else args.model
        average = load_model(source, torch.float32).to(device)

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = load_data(args, args.dataset, args.dataset_split, model, processor)
    eval_source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = None
    if eval_source:
        eval_data = load_data(args, eval_source, args.eval_dataset_split, model, processor)
    known_rewards = {**REWARDS, "overlong": functools.partial(overlong, limit=args.max_response_length)}
    reward_functions = {
        name_of(source): plug_in("--rewards", source, known_rewards) for source in args.rewards
    }
    make_sampler = plug_in("--rollout", args.rollout, SAMPLERS)
    end_ids = end_token_ids(model, train_data.tokenizer)
    turns = load_turns(args, model, processor, end_ids) if args.ptx_dataset else None
    open_folder(args, folder, last_step=state["step"])
    tell(f"{folder}: {len(train_data.rows)} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")

    enable_packing(args, actor, critic, reference, train_data)
    sampler = make_sampler(args, model, end_ids, folder)
    sampler.sync()
    # With packing, sampling was proved to give the log-probs of the packed forward. Another engine,
    # sharded weights or the rounding of bf16 make a difference: there the policy is asked again.
    sampler_is_exact = args.rollout == "hf" and is_fp32 and args.zero_stage < 3 and packing.is_packed(model)
    return Run(
        folder=folder, device=device, dtype=dtype, processor=processor, actor=actor, critic=critic,
        reference=reference, average=average, train_data=train_data, eval_data=eval_data, turns=turns,
        reward_functions=reward_functions, sampler=sampler, sampler_is_exact=sampler_is_exact,
        checkpoint=checkpoint, state=state,
    )  # fmt: skip


def check_args(args: Args) -> None:
    """What a user is likely to get wrong, in one sentence each."""
    G = args.num_samples_per_prompt
    longest = args.max_prompt_length + args.max_response_length
    names = [name_of(source) for source in args.rewards]
    counts = [args.rollout_batch_size, G, args.train_batch_size, args.total_steps, args.num_ppo_epochs]
    compares = args.advantage not in ("gae", "reinforce") or args.dynamic_sampling > 0
    wants_critic = args.critic_model is not None or args.freezing_actor_steps > 0
    if min([*counts, args.eval_samples, args.eval_num_samples]) < 1:
        fail("counts must be at least 1")
    if args.train_batch_size % G:
        fail("--train-batch-size must be a multiple of --num-samples-per-prompt")
    if compares and G < 2:
        fail("--num-samples-per-prompt: a single sample has no siblings to be compared with")
    if args.rollout_batch_size % args.train_batch_size:
        fail("--rollout-batch-size must be a multiple of --train-batch-size")
    if args.micro_batch_tokens < longest:
        fail(f"--micro-batch-tokens must hold prompt + response, {longest}")
    if len(args.rewards) != len(args.reward_weights) or len(set(names)) < len(names):
        fail("--rewards need different names, and --reward-weights one weight per reward")
    if args.temperature <= 0:
        fail("--temperature must be more than 0")
    if args.offload_optimizer and args.zero_stage == 0:
        fail("--offload-optimizer needs --zero-stage 1 to 3")
    if args.advantage != "gae" and (wants_critic or args.critic_share_backbone):
        fail(f"--advantage {args.advantage} has no critic")
    if args.critic_share_backbone and wants_critic:
        fail("--critic-share-backbone leaves no critic to load or to train alone")
    if args.freezing_actor_steps >= args.total_steps:
        fail("--freezing-actor-steps leaves no step to the actor")
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


def name_of(source: str) -> str:
    """accuracy -> accuracy, path.py:short_and_right -> short_and_right"""
    return source.rpartition(":")[2]


def plug_in(flag: str, source: str, known: dict[str, Callable]) -> Callable:
    """One of the script's own, or the function or class of "path.py:name"."""
    if source in known:
        return known[source]
    path, _, name = source.rpartition(":")
    if not Path(path).is_file():
        fail(f"{flag} {source} is neither path.py:name nor one of {', '.join(known)}")
    defined = runpy.run_path(path)
    if name not in defined:
        fail(f"{flag} {source}: {path} has no {name!r}")
    return defined[name]


def enable_packing(args: Args, actor, critic, reference, data: "Data") -> None:
    """Pack if that is exact for some rows of the data."""
    some_rows = range(0, len(data.rows), len(data.rows) // 16 + 1)
    prompts = [prompt for row in some_rows if (prompt := data.encode(row))]
    if not prompts:
        fail(f"{data.source}: no row can be used")
    model = actor.module.model
    told = packing.enable_packing_if_exact(
        model=model,
        forward=lambda pack: actor(pack).logprobs,
        prompts=prompts,
        max_length=args.max_prompt_length + args.max_response_length,
        max_tokens=args.micro_batch_tokens,
        temperature=args.temperature,
    )
    tell(told)
    for other in (critic, reference):
        if packing.is_packed(model) and isinstance(other, nn.Module):
            packing.switch_attention(getattr(other, "module", other).model, "packed")


def end_token_ids(model, tokenizer) -> list[int]:
    end_ids = model.generation_config.eos_token_id  # one, several or None
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return sorted({*end_ids, tokenizer.eos_token_id} - {None})


# ---- rollout ----


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


def roll_out_useful_prompts(args: Args, run: Run, step: int) -> tuple[Rollout, int]:
    """The step's rollout, and how many entries of batch_indices it took. --dynamic-sampling:
    so many more rounds replace prompts whose responses all score alike."""
    num_wanted = args.rollout_batch_size // args.num_samples_per_prompt
    num_useful = 0
    num_entries = 0
    rollout = None
    for _ in range(1 + args.dynamic_sampling):
        entries = batch_indices(
            start=run.state["cursor"] + num_entries,
            count=num_wanted - num_useful,
            num_rows=len(run.train_data.rows),
            seed=args.seed,
        )
        num_entries += len(entries)
        if rollout:  # a later round's few may all be unusable
            entries = [entry for entry in entries if run.train_data.encode(entry % len(run.train_data.rows))]
            if not entries:
                continue
        more = roll_out(
            args, run, run.train_data, entries, args.num_samples_per_prompt, args.temperature, step
        )
        rollout = join(rollout, more) if rollout else more
        num_useful = int(have_spread(rollout.scores).sum())
        if num_useful == num_wanted:
            break
    return rollout, num_entries


def have_spread(scores: Tensor) -> Tensor:
    """(n, G) -> (n,) bool: prompts whose responses don't all score alike; NaN does not count."""
    return scores.nan_to_num(-math.inf).amax(1) > scores.nan_to_num(math.inf).amin(1)


def join(one: Rollout, other: Rollout) -> Rollout:
    """The prompts of one, then those of the other."""

    def stack(x: Tensor, y: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence([*x, *y], batch_first=True)

    return Rollout(
        prompts=one.prompts + other.prompts,
        response_ids=one.response_ids + other.response_ids,
        mask=stack(one.mask, other.mask),
        truncated=stack(one.truncated, other.truncated),
        rewards={name: stack(values, other.rewards[name]) for name, values in one.rewards.items()},
        scores=stack(one.scores, other.scores),
        sampler_logprobs=stack(one.sampler_logprobs, other.sampler_logprobs),
        samples=one.samples + other.samples,
        logged=one.logged | other.logged,
    )


def trained_responses(args: Args, rollout: Rollout) -> Tensor:
    """(n, G) bool: those that the update is on."""
    trained = ~rollout.scores.isnan()
    if args.mask_truncated:
        trained &= ~rollout.truncated
    if args.dynamic_sampling > 0:
        trained &= have_spread(rollout.scores)[:, None]
    if args.replay_limit > 0:
        places = trained.any(1).nonzero()[:, 0]  # the newest prompts stay
        num_kept = max(1, args.replay_limit // args.num_samples_per_prompt)
        trained[places[:-num_kept]] = False
    return trained


def roll_out(
    args: Args, run: Run, data: "Data", entries: list[int], num_samples: int, temperature: float, step: int
) -> Rollout:
    """num_samples scored responses to each entry: dealt out to ranks, gathered on all."""
    # --- this rank's share ---
    prompts = []
    for entry in np.array_split(np.array(entries), WORLD_SIZE)[RANK].tolist():
        prompt = data.encode(entry % len(data.rows))
        if prompt is not None:  # else its warning has been printed
            # Draws depend on seed, step and entry alone, not on batches, ranks or a resume.
            seed = np.random.default_rng([args.seed, step, entry]).integers(2**31)
            prompts.append(replace(prompt, seed=int(seed)))
    responses = []  # prompt by prompt
    batch_size = max(1, args.generation_batch_size // args.num_samples_per_prompt)  # prompts
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        responses += run.sampler.sample(batch, num_samples, temperature)
    texts = data.tokenizer.batch_decode([response.ids for response in responses], skip_special_tokens=True)
    rewards, logged = score_responses(
        functions=run.reward_functions,
        prompts=[prompt for prompt in prompts for _ in range(num_samples)],
        responses=responses,
        texts=texts,
        trainer_state=transformers.TrainerState(global_step=step, max_steps=args.total_steps),
    )
    samples = []  # the first response to each prompt
    for b, prompt in zip(range(0, len(texts), num_samples), prompts):
        readable = {name: value for name, value in prompt.row.items() if isinstance(value, str | int | float)}
        scores = {f"reward/{name}": values[b] for name, values in rewards.items()}
        samples.append({"row": prompt.index, **readable, "response": texts[b], **scores})

    # --- the whole rollout ---
    infos = gather([PromptInfo(prompt.index, prompt.length, prompt.kinds) for prompt in prompts])
    responses = gather(responses)
    samples = gather(samples)
    rewards = {name: gather(values) for name, values in rewards.items()}
    logged = gather(logged)
    n = len(infos)
    if n * 2 < len(entries):
        fail(f"more than half of {len(entries)} rows of {data.source} can't be used: see the warnings")
    values = torch.tensor(list(rewards.values())).view(-1, n, num_samples)  # (rewards, n, G)
    weighted = values * torch.tensor(args.reward_weights)[:, None, None]
    lengths = torch.tensor([len(response.ids) for response in responses])  # (B,)
    logprobs = [response.logprobs for response in responses]
    return Rollout(
        prompts=infos,
        response_ids=[response.ids for response in responses],
        mask=torch.arange(int(lengths.max())) < lengths[:, None],
        truncated=torch.tensor([response.truncated for response in responses]).view(n, -1),
        rewards=dict(zip(rewards, values)),
        scores=weighted.nansum(0).masked_fill(weighted.isnan().all(0), math.nan),
        sampler_logprobs=nn.utils.rnn.pad_sequence(logprobs, batch_first=True),
        samples=samples,
        logged={name: np.mean([x for other, x in logged if other == name]) for name, _ in logged},
    )


def gather(own: list) -> list:
    """The lists of all ranks as one list, on every rank."""
    if WORLD_SIZE == 1:
        return own
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, own)
    return [item for part in lists for item in part]


# ---- samplers ----


class ModelSampler:
    """--rollout hf: the trained model itself, or its unsharded copy under ZeRO-3."""

    def __init__(self, args: Args, model, end_ids: list[int], run_dir: Path):
        self.args = args
        self.model = model
        self.end_ids = end_ids
        self.sampled = model
        if args.zero_stage == 3:
            self.sampled = load_model(args.model, model.dtype).to(model.device)
            packing.switch_attention(self.sampled, model.config.get_text_config()._attn_implementation)

    def sync(self) -> None:
        """Take over the trained model's weights."""
        if self.sampled is not self.model:
            weights = self.sampled.state_dict()
            for name, weight in merged_weights(self.model):
                weights[name].copy_(weight)

    def sample(self, prompts: list[Prompt], num_samples: int, temperature: float) -> list[Response]:
        """num_samples responses to each prompt, by its seed; temperature 0: greedy."""
        return generate(self.args, self.sampled, prompts, num_samples, temperature, self.end_ids)


@torch.no_grad()
def generate(
    args: Args, model, prompts: list[Prompt], num_samples: int, temperature: float, end_ids: list[int]
) -> list[Response]:
    """Placeholders of pictures are never drawn: log-probs mask them too."""
    R = args.max_response_length
    if not packing.is_packed(model):
        return packing.generate_plain(model, prompts, num_samples, R, end_ids, temperature)
    device = model.device
    ends = torch.tensor(end_ids, device=device)
    draws = [np.random.default_rng(prompt.seed).random((num_samples, R)) for prompt in prompts]
    draws = torch.tensor(np.concatenate(draws), device=device)  # (B, R): one number per token
    tokens = torch.full(draws.shape, -1, device=device)  # (B, R): -1 behind the end
    logprobs = torch.zeros(draws.shape, device=device)  # (B, R)

    decoder = packing.Decoder(model, prompts, num_samples)  # has run every prompt and picture once
    active = torch.arange(len(draws), device=device)  # responses that go on
    for t in range(R):
        logp = packing.next_logprobs(model, decoder.hidden, temperature or 1.0)  # (active, V)
        token = sample_token(logp, draws[active, t]) if temperature else logp.argmax(-1)  # (active,)
        tokens[active, t] = token
        logprobs[active, t] = logp.gather(1, token[:, None])[:, 0]
        goes_on = (~torch.isin(token, ends)).nonzero()[:, 0]  # places in active
        if len(goes_on) < len(active):  # finished responses leave the batch
            active = active[goes_on]
            token = token[goes_on]
            decoder.keep(goes_on)
        if len(active) == 0 or t + 1 == R:
            break
        decoder.step(token)

    lengths = (tokens >= 0).sum(1).tolist()
    cut = set(active.tolist())
    tokens, logprobs = tokens.cpu(), logprobs.cpu()
    responses = []
    for b, length in enumerate(lengths):
        own_ids, own_logprobs = tokens[b, :length].clone(), logprobs[b, :length].clone()
        responses.append(Response(ids=own_ids, logprobs=own_logprobs, truncated=b in cut))
    return responses


def sample_token(logprobs: Tensor, drawn: Tensor) -> Tensor:
    """The token whose share of [0, 1) drawn lies in: logprobs (B, V), drawn (B,) -> (B,)."""
    cumulative = logprobs.double().exp().nan_to_num(1.0).cumsum(-1)  # NaN: of no effect
    tokens = torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logprobs.shape[-1] - 1)


class VllmSampler:
    """--rollout vllm: an engine in this process, one per rank."""

    def __init__(self, args: Args, model, end_ids: list[int], run_dir: Path):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM, SamplingParams

        self.model = model
        self.on_cuda = torch.cuda.is_available()
        if self.on_cuda:
            check_memory_for_vllm(args, model)
        max_length = args.max_prompt_length + args.max_response_length
        self.llm = LLM(
            model=args.model,
            dtype=str(model.dtype).removeprefix("torch."),
            seed=args.seed,
            max_model_len=max_length,
            max_num_batched_tokens=max(4096, max_length),  # of a prefill, whose memory counts
            max_num_seqs=args.generation_batch_size,
            gpu_memory_utilization=args.vllm_gpu_memory,
            enable_sleep_mode=self.on_cuda,
            enforce_eager=not self.on_cuda,
            enable_chunked_prefill=self.on_cuda,  # with seeds it fails on the CPU
            distributed_executor_backend="external_launcher" if WORLD_SIZE > 1 else "uni",
            logprobs_mode="processed_logprobs",  # at the temperature: of what was drawn from
        )
        self.make_params = functools.partial(
            SamplingParams,
            max_tokens=args.max_response_length,
            stop_token_ids=end_ids,
            logit_bias=dict.fromkeys(packing.media_token_ids(model.config), -100.0),
            logprobs=0,  # of the drawn token alone
            detokenize=False,
        )

    def sync(self) -> None:
        """The newest weights; what it remembers of the old ones is forgotten."""
        if self.on_cuda:  # weights first: their peak needs the room of the keys
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        weights = merged_weights(self.model)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.on_cuda:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sample(self, prompts: list[Prompt], num_samples: int, temperature: float) -> list[Response]:
        chats = [self.to_chat(prompt) for prompt in prompts]
        params = [self.make_params(n=num_samples, temperature=temperature, seed=p.seed) for p in prompts]
        outputs = self.llm.chat(chats, params, use_tqdm=False)
        responses = []
        for prompt, output in zip(prompts, outputs):
            if output.prompt_token_ids != prompt.ids.tolist():
                fail(f"row {prompt.index}: vLLM reads other tokens than the trainer; use --rollout hf")
            for sampled in output.outputs:
                ids = list(sampled.token_ids)
                logprobs = [by_token[token].logprob for by_token, token in zip(sampled.logprobs, ids)]
                truncated = sampled.finish_reason == "length"
                responses.append(Response(torch.tensor(ids), torch.tensor(logprobs), truncated))
        return responses

    def to_chat(self, prompt: Prompt) -> list[dict]:
        """The messages with pictures as vLLM wants them."""
        chat = []
        for message in prompt.messages:
            parts = []
            for part in message["content"]:
                if part["type"] == "video":  # vLLM would take other frames
                    fail(f"row {prompt.index} has a video: use --rollout hf")
                is_image = part["type"] == "image"
                parts.append({"type": "image_pil", "image_pil": part["image"]} if is_image else part)
            chat.append({**message, "content": parts})
        return chat

    def sleep(self) -> None:
        if self.on_cuda:
            self.llm.sleep(level=2)  # the next sync brings the weights


def check_memory_for_vllm(args: Args, model) -> None:
    """AdamW's moments come with the first step, when vLLM has its share already."""
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    moments = 0 if args.offload_optimizer else 8 * trained // (WORLD_SIZE if args.zero_stage else 1)  # bytes
    free, total = torch.cuda.mem_get_info()
    needed = args.vllm_gpu_memory * total + moments
    if free < needed:
        fail(
            f"vLLM and the optimizer need {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free: --vllm-gpu-memory"
        )


# Yours has __init__, sync and sample as these two, and sleep if the trainer needs its memory.
SAMPLERS = {"hf": ModelSampler, "vllm": VllmSampler}


# ---- rewards ----


def accuracy(texts: list[str], answer: list, **columns) -> list[float]:
    """1 when the last <answer>...</answer> holds the reference, but for case and spaces."""
    scores = []
    for text, reference in zip(texts, answer):
        if not isinstance(reference, str | int | float) or not str(reference).strip():
            fail(f"the reward accuracy needs an answer that is a text or a number, not {reference!r}")
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        is_right = bool(answers) and answers[-1].strip().lower() == str(reference).strip().lower()
        scores.append(float(is_right))
    return scores


def format_reward(texts: list[str], **columns) -> list[float]:
    """1 when the response is [<think>...</think>] <answer>...</answer> with each tag once."""
    inner = r"(?:(?!</?think>|</?answer>).)*"
    pattern = re.compile(rf"\s*(?:<think>{inner}</think>\s*)?<answer>{inner}</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text) is not None) for text in texts]


def overlong(completion_ids: list[list[int]], limit: int, **columns) -> list[float]:
    """0 up to 4/5 of the length limit, then down to -1 there. https://arxiv.org/abs/2503.14476 eq. (13)."""
    return [min(0.0, (0.8 * limit - len(ids)) / (0.2 * limit)) for ids in completion_ids]


REWARDS = {"accuracy": accuracy, "format": format_reward}


def score_responses(
    functions: dict[str, Callable],
    prompts: list[Prompt],
    responses: list[Response],
    texts: list[str],
    trainer_state,
) -> tuple[dict[str, list[float]], list[tuple[str, float]]]:
    """-> {reward: B values, NaN where it does not apply}, and what was logged. B prompts.

    A function gets keywords as in TRL: prompts and completions (strings, or where the
    dataset's prompt is a chat, messages), completion_ids, every column, trainer_state (an
    evaluation's step is 0), log_metric(name, number); and texts (always strings), chats
    (messages with pictures). It may be async; it returns a number or None per response.
    """
    if not prompts:
        return {name: [] for name in functions}, []
    logged = []
    rows = [prompt.row for prompt in prompts]
    chats_or_texts = [row.get("messages") or row["prompt"] for row in rows]
    is_chat = isinstance(chats_or_texts[0], list)
    keywords = {column: [row[column] for row in rows] for column in rows[0]}
    keywords |= {
        "prompts": chats_or_texts,
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": [response.ids.tolist() for response in responses],
        "trainer_state": trainer_state,
        "log_metric": lambda name, value: logged.append((name, float(value))),
        "texts": texts,
        "chats": [prompt.messages for prompt in prompts],
    }

    async def wait_for(coroutines) -> list:  # those that ask a server, say, side by side
        return await asyncio.gather(*coroutines)

    try:
        results = {name: function(**keywords) for name, function in functions.items()}
        waiting = {name: result for name, result in results.items() if hasattr(result, "__await__")}
        results |= zip(waiting, asyncio.run(wait_for(waiting.values())))
    except Exception as error:
        error.add_note(f"Rewards get {'chats' if is_chat else 'strings'} here, as the dataset's prompts are.")
        raise
    rewards = {}
    for name, result in results.items():
        rewards[name] = [math.nan if value is None else float(value) for value in result]
        if len(result) != len(texts) or np.isinf(rewards[name]).any():
            fail(f"reward {name} must return one finite number, or None, for each of {len(texts)} responses")
    return rewards, logged


# ---- data ----


@dataclass
class Data:
    source: str
    rows: Any  # a datasets.Dataset
    tokenizer: Any
    encode: Callable[[int], Prompt | None]  # row -> prompt; None, warned of: can't be used


def load_data(args: Args, source: str, split: str, model, processor) -> Data:
    """Columns: `prompt` or `messages`, a string or a chat; `image(s)` and `video(s)`, one or a
    list, see to_messages; `answer`, the reference that rewards get."""
    rows = rename_columns(args, source, load_rows(source, split))
    tokenizer = getattr(processor, "tokenizer", processor)
    columns = rows.column_names
    if not {"prompt", "messages"} & {*columns} or ("accuracy" in args.rewards and "answer" not in columns):
        fail(f"{source} has columns {', '.join(columns)}: rename yours, --columns prompt=... answer=...")

    # The packs of a step ask for the same prompts again and again.
    @functools.lru_cache(maxsize=2 * args.rollout_batch_size // args.num_samples_per_prompt)
    def encode(index: int) -> Prompt | None:
        try:
            row = rows[index]
            messages = to_messages(args, row, Path(source).parent, tokenizer)
            inputs = packing.encode_chat(processor, messages, add_generation_prompt=True)
            prompt = packing.make_prompt(model, inputs, index=index, row=row, messages=messages)
            if prompt.length > args.max_prompt_length:
                raise ValueError(f"{prompt.length} tokens are more than --max-prompt-length")
            return prompt
        except Exception as error:
            tqdm.write(f"warning: {source} row {index} is left out: {error!s:.300}", file=sys.stderr)
            return None

    return Data(source=source, rows=rows, tokenizer=tokenizer, encode=encode)


@dataclass
class Turn:
    """An assistant turn of a chat in --ptx-dataset."""

    prompt: Prompt  # what comes before it
    target_ids: Tensor  # (R,), with its end token


def load_turns(args: Args, model, processor, end_ids: list[int]) -> Data:
    """All assistant turns of --ptx-dataset, as rows of their own."""
    source = args.ptx_dataset
    tokenizer = getattr(processor, "tokenizer", processor)
    chats = load_rows(source, "train")
    if "messages" not in chats.column_names:
        fail(f"{source} has no column messages, of chats whose assistant turns are to be learned")
    places = []  # (chat, turn), the turn counted from the end: a system message may come in front
    for i, chat in enumerate(chats["messages"]):
        places += [(i, k) for k in range(-len(chat), 0) if chat[k]["role"] == "assistant"]
    if not places:
        fail(f"{source} has no assistant turns to be learned")

    @functools.lru_cache(maxsize=2 * args.ptx_batch_size)
    def encode(index: int) -> Turn | None:
        i, k = places[index]
        try:
            chat = to_messages(args, chats[i], Path(source).parent, tokenizer)
            inputs = packing.encode_chat(processor, chat[:k], add_generation_prompt=True)
            prompt = packing.make_prompt(model, inputs, index=index)
            P = prompt.length
            ids = packing.encode_chat(processor, chat[: k + 1 or None])["input_ids"][0]
            if not ids[:P].equal(prompt.ids):
                raise ValueError("the chat template does not go on from its own prompt")
            ends = torch.isin(ids[P:], torch.tensor(end_ids)).nonzero()[:, 0].tolist()
            ids = ids[: P + ends[0] + 1] if ends else F.pad(ids, (0, 1), value=end_ids[0])
            if len(ids) > args.max_prompt_length + args.max_response_length:
                raise ValueError(f"{len(ids)} tokens are more than those of a prompt and a response")
            return Turn(prompt=prompt, target_ids=ids[P:])
        except Exception as error:
            tqdm.write(f"warning: {source} row {i} is left out: {error!s:.300}", file=sys.stderr)
            return None

    return Data(source=source, rows=places, tokenizer=tokenizer, encode=encode)


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


# ---- forward ----


def packs_of(args: Args, run: Run, rollout: Rollout, groups: packing.Groups) -> Iterator[packing.Pack]:
    """This rank's packs of some groups: (prompt, its responses)."""
    packs = packing.packs_of_rank(
        groups=groups, prompts=rollout.prompts, encode=run.train_data.encode,
        responses=rollout.response_ids, max_tokens=args.micro_batch_tokens,
        rank=RANK, world_size=WORLD_SIZE, media_everywhere=args.zero_stage > 0,
        packed=packing.is_packed(run.actor.module.model),
    )  # fmt: skip
    for pack in packs:
        yield pack.to(run.device)


@torch.no_grad()
def add_logprobs_and_values(args: Args, run: Run, rollout: Rollout) -> None:
    """logprobs, ref_logprobs, entropy and values (B, R), on all ranks. A forward of each model per pack."""
    n, G = rollout.scores.shape
    groups = [(i, list(range(i * G, (i + 1) * G))) for i in range(n)]
    with_entropy = args.entropy_token_ratio < 1
    asks_actor = not run.sampler_is_exact or with_entropy or args.critic_share_backbone
    tables = defaultdict(lambda: torch.zeros(rollout.mask.shape, device=run.device))
    if asks_actor or run.reference or run.critic:
        for pack in packs_of(args, run, rollout, groups):
            if asks_actor:
                outputs = run.actor(pack, with_entropy=with_entropy)
                tables["logprobs"][pack.token_index] = outputs.logprobs
                if with_entropy:
                    tables["entropy"][pack.token_index] = outputs.entropy
                if args.critic_share_backbone:
                    tables["values"][pack.token_index] = outputs.values
            if run.reference:
                tables["ref_logprobs"][pack.token_index] = run.reference(pack).logprobs
            if run.critic:
                tables["values"][pack.token_index] = run.critic(pack)
    tables = {name: sum_over_ranks(table, run.device) for name, table in tables.items()}
    rollout.logprobs = rollout.sampler_logprobs if run.sampler_is_exact else tables["logprobs"]
    rollout.ref_logprobs = tables.get("ref_logprobs", rollout.logprobs)
    rollout.entropy = tables.get("entropy")
    rollout.values = tables.get("values", torch.zeros(rollout.mask.shape))


def make_token_weights(args: Args, rollout: Rollout, groups: packing.Groups) -> TokenWeights:
    """Of an optimizer step on some groups; the denominators are those of all packs and ranks."""
    mask = torch.zeros_like(rollout.trained_mask)  # (B, R): tokens of the step
    for _, members in groups:
        mask[members] = rollout.trained_mask[members]
    limit = args.max_response_length
    return TokenWeights(
        policy=token_weights(mask & rollout.policy_mask, args.loss_agg, limit),
        trained=token_weights(mask, args.loss_agg, limit),
        per_token=token_weights(mask, "token-mean", limit),
    )


def value_loss_of(
    args: Args, rollout: Rollout, weights: TokenWeights, pack: packing.Pack, new_values: Tensor
) -> tuple[Tensor, Tensor]:
    """A pack's part of the value loss, and which tokens' values were clipped (M,)."""
    losses, is_clipped = compute_value_loss(
        new_values=new_values,
        values=pack.tokens(rollout.values),
        returns=pack.tokens(rollout.returns),
        value_clip=args.value_clip,
    )
    return (pack.tokens(weights.per_token) * losses).sum(), is_clipped


class Term(NamedTuple):
    name: str
    coef: float
    loss: Tensor


def other_terms(
    args: Args, run: Run, rollout: Rollout, weights: TokenWeights, pack: packing.Pack, outputs: Outputs
) -> Iterator[Term]:
    """A pack's part of the losses that flags add to the policy's."""
    token_weight = pack.tokens(weights.trained)  # (M,)
    if args.entropy_coef:
        yield Term("loss/entropy", args.entropy_coef, -(token_weight * outputs.entropy).sum())
    kl_coef = run.state["kl_coef"]
    if args.kl_loss and kl_coef > 0:
        kl = kl_estimate(outputs.logprobs, pack.tokens(rollout.ref_logprobs), args.kl_estimator)
        yield Term("loss/kl", kl_coef, (token_weight * kl).sum())
    if args.router_aux_coef:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        balance = load_balancing_loss_func(
            gate_logits=outputs.router_logits,
            num_experts=outputs.router_logits[0].shape[-1],
            top_k=run.actor.module.model.config.get_text_config().num_experts_per_tok,
        )
        share = pack.tokens(weights.per_token).sum()  # of the step's tokens
        yield Term("loss/router", args.router_aux_coef, share * balance)


def backward_of_turns(args: Args, run: Run, number: int) -> Tensor:
    """Add gradients of some assistant turns, at temperature 1 -> this rank's part of their
    loss. number: of the optimizer step in the run."""
    entries = batch_indices(
        start=number * args.ptx_batch_size,
        count=args.ptx_batch_size,
        num_rows=len(run.turns.rows),
        seed=args.seed + 1,
    )
    turns = [turn for entry in entries if (turn := run.turns.encode(entry % len(run.turns.rows)))]
    targets = [turn.target_ids for turn in turns]
    num_tokens = sum(map(len, targets))  # of all ranks
    loss = torch.zeros((), device=run.device)
    if not turns:
        return loss
    packs = packing.packs_of_rank(
        groups=[(i, [i]) for i in range(len(turns))], prompts=[turn.prompt for turn in turns],
        encode=lambda index: run.turns.encode(index).prompt, responses=targets,
        max_tokens=args.micro_batch_tokens, rank=RANK, world_size=WORLD_SIZE,
        packed=packing.is_packed(run.actor.module.model), media_everywhere=args.zero_stage > 0,
    )  # fmt: skip
    for pack in packs:  # an offloaded optimizer goes by the last pack, which is one of the rollout
        run.actor.set_gradient_accumulation_boundary(False)
        outputs = run.actor(pack.to(run.device), temperature=1.0)
        pack_loss = -outputs.logprobs.sum() / num_tokens
        run.actor.backward(args.ptx_coef * pack_loss * WORLD_SIZE, scale_wrt_gas=False)
        loss += pack_loss.detach()
    return loss


# ---- other estimators and losses ----


def center_scores(scores: Tensor, mask: Tensor, advantage: str) -> Tensor:
    """What an estimator makes of the scores of each prompt's responses. scores (n, G), mask (n, G): False
    is left out -> (n, G), 0 there. In float64: equal scores give exactly 0 where they are centred."""
    R = scores.double().masked_fill(~mask, 0.0)  # (n, G)
    return (ESTIMATORS[advantage](R, mask) * mask).to(scores.dtype)


def keep_scores(R: Tensor, mask: Tensor) -> Tensor:
    """With a critic, and REINFORCE++ https://arxiv.org/abs/2501.03262"""
    return R


def subtract_mean(R: Tensor, mask: Tensor) -> Tensor:
    """R - mean R of the prompt's k responses, https://arxiv.org/abs/2501.03262

    [[1, 2, 6]] -> [[-2, -1, 3]]"""
    k = mask.sum(1, keepdim=True).clamp(min=1)  # (n, 1)
    return (R - R.sum(1, keepdim=True) / k) * mask


def leave_one_out(R: Tensor, mask: Tensor) -> Tensor:
    """R - mean R of the siblings = k / (k - 1) (R - mean R), https://arxiv.org/abs/2402.14740

    [[1, 2, 6]] -> [[-3, -1.5, 4.5]]"""
    k = mask.sum(1, keepdim=True)
    return subtract_mean(R, mask) * k / (k - 1).clamp(min=1)


def group_norm(R: Tensor, mask: Tensor) -> Tensor:
    """GRPO: (R - mean R) / (std R + 1e-6), https://arxiv.org/abs/2402.03300

    [[1, 2, 6]] -> [[-.756, -.378, 1.134]]"""
    centered = subtract_mean(R, mask)
    k = mask.sum(1, keepdim=True)
    variance = centered.square().sum(1, keepdim=True) / (k - 1).clamp(min=1)
    return centered / (variance.sqrt() + 1e-6)


def cpgd(R: Tensor, mask: Tensor) -> Tensor:
    """(R - mean R) min(3, groups / groups whose scores differ)

    https://arxiv.org/abs/2505.12504 sec. 4
    [[1, 2, 6], [1, 1, 1]] -> [[-4, -2, 6], [0, 0, 0]]"""
    centered = subtract_mean(R, mask)
    num_groups = int(mask.any(1).sum())
    num_spread = int(centered.any(1).sum())
    return centered * min(3.0, num_groups / max(1, num_spread))


ESTIMATORS = {
    "gae": keep_scores,
    "reinforce": keep_scores,
    "reinforce_baseline": subtract_mean,
    "rloo": leave_one_out,
    "group_norm": group_norm,
    "cpgd": cpgd,
}


def is_whitened(args: Args) -> bool:
    if args.whiten_advantages == "auto":
        return args.advantage in ("gae", "reinforce", "reinforce_baseline")
    return args.whiten_advantages == "on"


def normalize_scores(scores: Tensor, trained: Tensor, moments: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """By the deviation of all training scores so far; "standardize": their mean is subtracted first.
    scores, trained (n, G); moments (3,): count, sum, sum of squares -> scores, moments with these."""
    if kind == "off":
        return scores, moments
    new = scores[trained].double()
    moments = moments + torch.stack([new**0, new, new**2]).sum(1)
    _, mean, square = (moments / moments[0].clamp(min=1)).tolist()
    std = max(0.0, square - mean**2) ** 0.5
    if kind == "standardize":
        scores = scores - mean
    is_spread = std > 1e-6 * abs(mean)
    return scores / (std if is_spread else 1.0), moments


def dual_clip_loss(logratio: Tensor, advantages: Tensor, owner: Tensor, clip: Clip) -> PolicyLoss:
    """clip_loss, at most -dual A where A < 0. https://arxiv.org/abs/1912.09729 eq. (5)

    dual 3: r 5, A -2 -> 6, without gradient (clip_loss: 10)
    """
    found = clip_loss(logratio, advantages, owner, clip)
    ceiling = -advantages * clip.dual
    is_above = (advantages < 0) & (found.losses > ceiling)
    losses = torch.where(is_above, ceiling, found.losses)
    return found._replace(losses=losses, is_clipped=found.is_clipped | is_above)


def cpg_loss(logratio: Tensor, advantages: Tensor, owner: Tensor, clip: Clip) -> PolicyLoss:
    """L = -min(log r A, clip(log r, log(1 - low), log(1 + high)) A)

    https://arxiv.org/abs/2505.12504 eq. (6)
    low .2: r 1.5, A 1 -> -log 1.2 (clipped); r 1.5, A -1 -> log 1.5
    """
    lowest = math.log1p(-clip.low) if clip.low < 1 else -math.inf
    clipped_logratio = logratio.clamp(lowest, math.log1p(clip.high))
    losses = torch.maximum(-advantages * logratio, -advantages * clipped_logratio)
    return clip_loss(logratio, advantages, owner, clip)._replace(losses=losses)


def gspo_loss(logratio: Tensor, advantages: Tensor, owner: Tensor, clip: Clip) -> PolicyLoss:
    """clip_loss with one ratio per response, r = exp(mean of its tokens' logratio), whose
    gradient goes to each token. https://arxiv.org/abs/2507.18071 eq. (13)

    one response, logratio [.1, .3], A 1, high .2 -> r e^.2, losses [-1.2, -1.2]
    """
    none = torch.zeros_like(logratio)  # (M,): there are no more responses than tokens
    total = none.index_add(0, owner, logratio.detach())
    count = none.index_add(0, owner, torch.ones_like(logratio)).clamp(min=1)
    mean = (total / count)[owner]  # (M,)
    return clip_loss(mean + logratio - logratio.detach(), advantages, owner, clip)


POLICY_LOSSES = {"clip": clip_loss, "dual_clip": dual_clip_loss, "cpg": cpg_loss, "gspo": gspo_loss}


def token_weights(mask: Tensor, loss_agg: str, limit: int) -> Tensor:
    """Mask (B, R) of an optimizer step -> weight of each token's loss (B, R): the loss is their sum.

    mask [[1, 1, 0], [1, 0, 0]], limit 4 -> 1/3 each; [[1/4, 1/4], [1/2]]; 1/2 each; 1/8 each.
    """
    num_tokens = mask.float().sum(1, keepdim=True)  # (B, 1)
    num_responses = (num_tokens > 0).sum().clamp(min=1)
    divisors = {
        "token-mean": num_tokens.sum().clamp(min=1),  # DAPO https://arxiv.org/abs/2503.14476
        "seq-mean-token-mean": num_tokens.clamp(min=1) * num_responses,  # GRPO
        "seq-mean-token-sum": num_responses,
        "seq-mean-token-sum-norm": num_responses * limit,  # Dr. GRPO https://arxiv.org/abs/2503.20783
    }
    return mask / divisors[loss_agg]


def high_entropy_mask(entropy: Tensor | None, mask: Tensor, ratio: float) -> Tensor:
    """The share `ratio` of tokens with the highest entropy, ties included. (B, R), (B, R) -> (B, R)

    https://arxiv.org/abs/2506.01939 eq. (5)
    entropy [[1, 5, 2], [4, 0, 9]], mask [[1, 1, 1], [1, 1, 0]], ratio .4 -> [[0, 1, 0], [1, 0, 0]]
    """
    if ratio == 1 or not mask.any():
        return mask
    ordered = entropy[mask].sort(descending=True).values
    num_kept = max(1, round(ratio * len(ordered)))
    return mask & (entropy >= ordered[num_kept - 1])


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns); 0 where all returns are equal."""
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
    return 1 - unexplained.nan_to_num(nan=1.0, posinf=1.0)


def weigh_gradients(new_logprobs: Tensor, logprobs: Tensor, sampler_logprobs: Tensor, limit: float) -> Tensor:
    """new_logprobs (M,), with gradients times p(trainer) / p(sampler) before the update, at
    most limit: truncated importance sampling for a sampler that is not exact."""
    weights = (logprobs - sampler_logprobs).exp().clamp(max=limit)  # (M,)
    return new_logprobs.detach() + weights * (new_logprobs - new_logprobs.detach())


# ---- evaluation ----


def evaluate(args: Args, run: Run) -> tuple[dict[str, float], list[dict]]:
    """Fixed held-out prompts, each with a greedy response and eval_num_samples sampled ones."""
    data = run.eval_data
    rows = np.random.default_rng(0).permutation(len(data.rows))[: args.eval_samples]
    rows = np.sort(rows).tolist()
    greedy = roll_out(args, run, data, rows, num_samples=1, temperature=0.0, step=0)
    sampled = roll_out(args, run, data, rows, args.eval_num_samples, args.temperature, step=0)
    metrics = {}
    samples = []
    for mode, rollout in (("greedy", greedy), ("sampled", sampled)):
        for name, values in rollout.rewards.items():
            key = f"reward_{name}" if name in ("score", "length") else name  # those are below
            metrics[f"eval/{mode}_{key}"] = float(values.nanmean())
        metrics[f"eval/{mode}_score"] = float(rollout.scores.nanmean())
        metrics[f"eval/{mode}_length"] = float(rollout.mask.sum(1).float().mean())
        samples += [{"phase": f"eval_{mode}", **sample} for sample in rollout.samples[:16]]
    if "accuracy" in sampled.rewards:
        one_is_right = (sampled.rewards["accuracy"] == 1).any(1)  # (n,)
        metrics["eval/pass_at_k"] = float(one_is_right.float().mean())
    return metrics, samples


def messages_of(run: Run, sample: dict) -> list[dict]:
    """The prompt of a sample, with opened pictures."""
    data = run.train_data if sample["phase"] == "train" else run.eval_data
    return data.encode(sample["row"]).messages


# ---- model ----


class Actor(nn.Module):
    """Policy or reference, as DeepSpeed runs it: pack -> Outputs."""

    def __init__(self, args: Args, model, value_head: nn.Linear | None = None):
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.temperature = args.temperature
        self.router_aux = args.router_aux_coef > 0
        if self.router_aux:
            model.config.get_text_config().output_router_logits = True
        if self.router_aux or value_head is not None:  # they read what the backbone has put out
            model.base_model.register_forward_hook(self.remember)

    def remember(self, module, inputs, output) -> None:
        self.backbone_output = output

    def forward(
        self,
        pack: packing.Pack,
        with_lora: bool = True,
        with_entropy: bool = False,
        temperature: float | None = None,  # None: the sampler's
    ) -> Outputs:
        if not with_lora:  # the reference of a model with adapters
            self.model.disable_adapters()
        logprobs, entropy = packing.response_logprobs(
            self.model, pack, temperature or self.temperature, with_entropy
        )
        if not with_lora:
            self.model.enable_adapters()
        values = None
        if self.value_head is not None:
            hidden = self.backbone_output.last_hidden_state.flatten(0, 1)[pack.predict_from]  # (M, H)
            values = self.value_head(hidden)[:, 0].float()
        router_logits = self.backbone_output.router_logits if self.router_aux else None
        return Outputs(logprobs=logprobs, entropy=entropy, values=values, router_logits=router_logits)


class Critic(nn.Module):
    """A backbone with a scalar head: pack -> values (M,) of the states before its tokens."""

    def __init__(self, args: Args, model):
        super().__init__()
        self.model = model.base_model  # without the LM head
        self.value_head = make_value_head(args, model)

    def forward(self, pack: packing.Pack) -> Tensor:
        hidden = packing.forward_hidden(self.model, pack)  # (M, H)
        return self.value_head(hidden)[:, 0].float()


def make_value_head(args: Args, model) -> nn.Linear:
    """The one that reward_bt.py saved, or zeros: the first advantages are the plain returns."""
    H = model.config.get_text_config().hidden_size
    head = nn.Linear(H, 1, bias=False, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    saved_head = Path(args.critic_model or args.model) / "score.safetensors"
    if saved_head.is_file():
        head.weight.data.copy_(safetensors.torch.load_file(saved_head)["score.weight"])
    return head


def make_models(args: Args, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, Callable | None]:
    """-> the engines of actor and critic (or None), and the reference: a frozen copy, the
    actor without adapters, or None."""
    torch.manual_seed(args.seed)  # of LoRA's first weights
    model = load_model(args.model, dtype)
    reference = None
    if args.kl_coef > 0 and args.lora_rank == 0:
        reference = Actor(args, load_model(args.model, dtype)).requires_grad_(False)
        if args.zero_stage == 3:
            reference = make_engine(args, reference, dtype)
        else:
            reference = reference.to(device)
    updates_per_step = args.rollout_batch_size // args.train_batch_size * args.num_ppo_epochs
    value_head = make_value_head(args, model) if args.critic_share_backbone else None
    critic = None
    if args.advantage == "gae" and value_head is None:
        critic_model = load_model(args.critic_model or args.model, dtype)
        prepare_training(args, critic_model)
        critic = make_engine(
            args=args,
            module=Critic(args, critic_model),
            dtype=dtype,
            total_updates=args.total_steps * updates_per_step,
            learning_rate=args.critic_learning_rate,
        )
        critic.eval()
    prepare_training(args, model)
    actor = make_engine(
        args=args,
        module=Actor(args, model, value_head),
        dtype=dtype,
        total_updates=(args.total_steps - args.freezing_actor_steps) * updates_per_step,
        learning_rate=args.learning_rate,
    )
    actor.eval()
    if args.kl_coef > 0 and args.lora_rank > 0:
        reference = functools.partial(actor, with_lora=False)
    return actor, critic, reference


def prepare_training(args: Args, model) -> None:
    """Adapters, frozen parameters, gradient checkpointing."""
    if args.lora_rank > 0:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if args.freeze:
        frozen = [p for name, p in model.named_parameters() if re.search(args.freeze, name)]
        if not frozen:
            fail(f"--freeze {args.freeze} fits no parameter's name")
        for parameter in frozen:
            parameter.requires_grad_(False)


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


def update_average(average, model, beta: float) -> None:
    """average = beta average + (1 - beta) weights: a model in fp32 on rank 0, else None. Collective."""
    means = dict(average.named_parameters()) if average is not None else {}
    for name, weight in merged_weights(model):
        if name in means:
            means[name].data.lerp_(weight.to(means[name]), 1 - beta)


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


def mean_over_ranks(values: dict[str, list[Tensor]], device: torch.device) -> dict[str, float]:
    """Name -> the mean over all entries of its tensors, those of the other ranks too."""
    sums = [float(sum(x.sum() for x in tensors)) for tensors in values.values()]
    counts = [sum(len(x) for x in tensors) for tensors in values.values()]
    totals = sum_over_ranks(torch.tensor([sums, counts], dtype=torch.float64), device)
    return dict(zip(values, (totals[0] / totals[1]).tolist()))


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
    """checkpoint-N: a Hugging Face folder, and state/ for --resume. Collective."""
    model = run.actor.module.model
    final = run.folder / f"checkpoint-{run.state['step']}"
    unfinished = final.with_suffix(".tmp")  # renamed when all of it is written
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    run.actor.save_checkpoint(
        str(unfinished / "state" / "actor"), tag="engine", client_state={"ours": run.state}
    )
    if run.critic:
        run.critic.save_checkpoint(str(unfinished / "state" / "critic"), tag="engine")
    if run.average is not None:
        run.average.save_pretrained(unfinished / "state" / "ema")
    weights = {}
    for name, weight in merged_weights(model):  # collective; one rank holds them
        if RANK == 0 and name not in model.all_tied_weights_keys:
            weights[name] = weight.cpu()
    if RANK == 0:
        config = type(model.config).from_dict(model.config.to_dict())  # without packing
        with torch.device("meta"):  # the same architecture, without adapters
            plain = type(model)(config)
        plain.generation_config = model.generation_config
        plain.save_pretrained(unfinished, state_dict=weights)
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
