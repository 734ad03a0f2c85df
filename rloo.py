"""RLOO: REINFORCE with a leave-one-out baseline, for vision-language and text models.

A step samples G responses to each prompt, scores them, and makes clipped policy updates:

    r = score - kl_coef * KL to the reference      A = r - mean r of the other responses to the same prompt
    rho = p_now(response) / p_before(response)     loss = -mean of min(rho A, clip(rho, 1 - c, 1 + c) A)

Papers: https://arxiv.org/abs/2402.14740, https://openreview.net/forum?id=r1lgTGL5DE.
docs/rloo.md lists what differs from TRL's RLOOTrainer (huggingface/trl@f2cd577),
docs/forking.md has diffs to GRPO, GSPO, DAPO and more.

Read to the end of main: the flags, the two functions that are the algorithm, the data of a
step, and main, which is the whole method. What main calls stands below it, to be looked up, in
the order of use: setup, rollout, samplers, rewards, data, forward, model, DeepSpeed, files.

Shapes: n prompts with G responses each, B = n * G of them, R tokens in the longest, V words; a
pack (common/packing.py) is one forward of prompts and S responses, which have M tokens.

    python rloo.py                      # embedded default: tiny VLM on easy-VQA, minutes on two CPU cores
    python rloo.py --model Qwen/Qwen2.5-VL-3B-Instruct --dataset my.jsonl --lora-rank 8 --learning-rate 1e-5
    torchrun --standalone --nproc_per_node=8 rloo.py --zero-stage 3 ...     # or: deepspeed rloo.py ...
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
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from common import packing
from common.kl import kl_estimate
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
    # --- rollout ---
    total_steps: int = 50  # rollouts, each followed by its updates
    rollout_batch_size: int = 256  # responses per rollout, over all ranks
    num_samples_per_prompt: int = 8  # responses per prompt (G)
    generation_batch_size: int = 256  # responses sampled side by side on a rank; lower it if memory runs out
    max_response_length: int = 24  # tokens, EOS counted; longer responses are cut
    temperature: float = 1.0  # of the sampler; log-probs are those of the tempered policy
    rollout: str = "hf"  # hf: the model itself; vllm: an engine in this process; path.py:Class, see SAMPLERS
    vllm_gpu_memory: float = 0.4  # share of the GPU for that engine
    # --- algorithm ---
    rewards: tuple[str, ...] = ("accuracy", "format")  # or path.py:function, as TRL calls it: score_responses
    reward_weights: tuple[float, ...] = (0.9, 0.1)  # the score of a response is the weighted sum
    reward_clip: tuple[float, float] | None = None  # range of scores, before the KL is subtracted
    kl_coef: float = 0.01  # weight of the KL to the reference in the reward (TRL: 0.05); 0 = no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # per token, see common/kl.py
    normalize_advantages: bool = False  # to standard deviation 1 over the rollout; their mean is 0 anyway
    clip_coef: float = 0.2  # the ratio is clipped below 1 - c
    clip_coef_high: float | None = None  # and above 1 + c; None: as --clip-coef
    mask_truncated: bool = False  # cut responses leave the loss and their siblings' baseline
    num_iterations: int = 2  # passes over each rollout (TRL: 1)
    train_batch_size: int = 128  # responses per optimizer step, over all ranks
    # --- optimizer ---
    learning_rate: float = 1e-4  # peak; models of 2B and more want about 1e-6
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


def compute_advantages(rewards: Tensor, trained: Tensor, normalize: bool) -> Tensor:
    """A_i = r_i - mean of r over the siblings of i, (n, G). trained (n, G): False is left out.

    = k / (k - 1) (r_i - mean of the k responses), 0 where there are no siblings. In float64, so
    that equal rewards give exactly 0, not noise to learn from. normalize: by the deviation.

    rewards [[1, 2, 6]] -> [[-3, -1.5, 4.5]]
    """
    rewards_64 = rewards.double().masked_fill(~trained, 0.0)
    count = trained.sum(1, keepdim=True).clamp(min=1)  # (n, 1)
    centered = (rewards_64 - rewards_64.sum(1, keepdim=True) / count) * trained
    advantages = centered * count / (count - 1).clamp(min=1)
    if normalize:  # the mean of each group is 0 already
        advantages = advantages / advantages[trained].std(correction=0).clamp(min=1e-4)
    return advantages.to(rewards.dtype)


def compute_rloo_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    owner: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss of each response (S,), to be averaged, and metrics (S,).

    new_logprobs, logprobs (M,): of the pack's response tokens, now and before the update;
    owner (M,): the response that each is of; advantages (S,).

    rho = exp(sum over its tokens of new - old logprobs)
    L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    Where new = old, rho is 1 and the gradient is -A grad log p(response): REINFORCE.

    one response, differences [.1, .2], A 1, clip .2 -> -1.2 (rho is e^.3 = 1.35, clipped)
    """
    logratio = torch.zeros_like(advantages).index_add(0, owner, new_logprobs - logprobs)  # (S,)
    ratio = logratio.clamp(-20, 20).exp()  # a whole response's ratio can leave fp32
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    metrics = {
        "loss/policy": losses.detach(),
        "policy/ratio": ratio.detach(),
        "policy/approx_kl": (ratio - 1 - logratio).detach(),  # of the update, per response
        "policy/clipfrac_low": ((ratio < 1 - clip_low) & (advantages < 0)).float(),
        "policy/clipfrac_high": ((ratio > 1 + clip_high) & (advantages > 0)).float(),
    }
    return losses, metrics


# ---- the data of a step ----


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
    logprobs: Tensor | None = None  # (B, R): of the policy before the update
    ref_logprobs: Tensor | None = None  # (B, R): of the reference
    trained: Tensor | None = None  # (n, G) bool: False is left out of the update
    advantages: Tensor | None = None  # (n, G)


@dataclass
class Run:
    """What setup makes, and all steps use."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    processor: Any  # of transformers, or a text model's tokenizer
    actor: Any  # DeepSpeed's engine around the trained Policy
    reference: Callable | None  # pack -> log-probs (M,), no entropy; None with --kl-coef 0
    train_data: "Data"
    eval_data: "Data | None"
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
    actor = run.actor
    G = args.num_samples_per_prompt
    prompts_per_rollout = args.rollout_batch_size // G  # fewer where rows can't be used
    updates_per_pass = args.rollout_batch_size // args.train_batch_size
    clip_high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
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
    bar = tqdm(steps, "rloo", total=args.total_steps, initial=run.state["step"], disable=no_bar)
    for step in bar:
        # --- 2. rollout: G scored responses to each prompt ---
        time_start = time.perf_counter()
        entries = batch_indices(
            start=(step - 1) * prompts_per_rollout,
            count=prompts_per_rollout,
            num_rows=len(run.train_data.rows),
            seed=args.seed,
        )
        rollout = roll_out(args, run, run.train_data, entries, G, args.temperature, step)
        if hasattr(run.sampler, "sleep"):  # the trainer needs the memory; sync wakes it
            run.sampler.sleep()
        time_sampled = time.perf_counter()

        # --- 3. log-probs of the policy before the update, and of the reference ---
        if run.sampler_is_exact:  # proved in setup; then the gap below is 0
            rollout.logprobs = rollout.sampler_logprobs  # (B, R)
        else:
            rollout.logprobs = compute_logprobs(args, run, rollout, actor)
        if run.reference:
            rollout.ref_logprobs = compute_logprobs(args, run, rollout, run.reference)  # (B, R)
        else:
            rollout.ref_logprobs = rollout.logprobs

        # A sampler that computes another function than the trainer would spoil a run silently.
        gap = (rollout.sampler_logprobs - rollout.logprobs).abs() * rollout.mask  # (B, R)
        gap = gap.sum(1) / rollout.mask.sum(1)  # (B,): nats per token
        if not gap.mean() <= packing.TOLERANCE[run.dtype]:  # fp32 0.001, bf16 0.15; or NaN
            worst = rollout.prompts[int(gap.argmax()) // G].index
            fail(f"the sampler's log-probs are {gap.mean():.2g} nats from the trainer's, most at row {worst}")
        time_asked = time.perf_counter()

        # --- 4. advantages: every rank holds the whole rollout, so nothing is communicated ---
        kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator)  # (B, R)
        kl = (kl * rollout.mask).sum(1).view(-1, G)  # (n, G)
        scores = rollout.scores
        if args.reward_clip:
            scores = scores.clamp(min=args.reward_clip[0], max=args.reward_clip[1])
        rewards = scores - args.kl_coef * kl  # (n, G): r of the header
        rollout.trained = ~scores.isnan()
        if args.mask_truncated:
            rollout.trained &= ~rollout.truncated
        rollout.advantages = compute_advantages(rewards, rollout.trained, args.normalize_advantages)  # (n, G)

        # --- 5. update: passes over the rollout in shuffled mini-batches ---
        actor.train()
        update_metrics = defaultdict(list)  # name -> of each pack (S,) or (M,)
        grad_norms = []  # of each optimizer step; None: not finite, left out
        for iteration in range(args.num_iterations):
            order = np.random.default_rng([args.seed, step, iteration]).permutation(len(rollout.prompts))
            for mini_batch in np.array_split(order, updates_per_pass):
                groups = []  # (prompt, its responses)
                for i in mini_batch.tolist():
                    members = [i * G + j for j in range(G) if rollout.trained[i, j]]
                    if members:
                        groups.append((i, members))
                if not groups:
                    continue
                num_responses = sum(len(members) for _, members in groups)  # of all ranks
                packs = list(packs_of(args, run, rollout, groups))  # this rank's, some without responses
                for k, pack in enumerate(packs):
                    actor.set_gradient_accumulation_boundary(k == len(packs) - 1)
                    new_logprobs, entropy = actor(pack, with_entropy=True)  # (M,), (M,)
                    losses, loss_metrics = compute_rloo_loss(
                        new_logprobs=new_logprobs,
                        logprobs=pack.tokens(rollout.logprobs),  # (M,)
                        advantages=pack.responses(rollout.advantages.flatten()),  # (S,)
                        owner=pack.owner,  # (M,)
                        clip_low=args.clip_coef,
                        clip_high=clip_high,
                    )
                    loss = losses.sum() / num_responses
                    # The factor undoes DeepSpeed's mean over ranks, scale_wrt_gas=False its mean over packs.
                    actor.backward(loss * WORLD_SIZE, scale_wrt_gas=False)
                    for name, values in loss_metrics.items():
                        update_metrics[name].append(values)
                    update_metrics["policy/entropy"].append(entropy.detach())
                grad_norms.append(optimizer_step(actor))
        actor.eval()
        time_updated = time.perf_counter()

        # --- 6. the sampler wakes up, with the new weights ---
        run.sampler.sync()
        time_synced = time.perf_counter()

        # --- 7. metrics ---
        lengths = rollout.mask.sum(1).float()  # (B,)
        finite_norms = [norm for norm in grad_norms if norm is not None]
        equal_scores = (rollout.scores - rollout.scores[:, :1]).abs().amax(1) < 1e-9  # (n,)
        seconds = time_synced - time_start
        metrics = {
            "train/step": step,
            "train/episode": step * args.rollout_batch_size,
            "train/learning_rate": actor.get_lr()[0],
            "train/grad_norm": np.mean(finite_norms or [0.0]),
            "train/skipped_updates": len(grad_norms) - len(finite_norms),
            "objective/scores": rollout.scores.nanmean(),  # before --reward-clip
            "objective/kl": kl.mean(),
            "objective/rlhf_reward": rewards.nanmean(),
            "rollout/response_length_mean": lengths.mean(),
            "rollout/truncated_frac": rollout.truncated.float().mean(),
            "rollout/zero_std_groups_frac": equal_scores.float().mean(),
            "rollout/prompts_dropped": prompts_per_rollout - len(rollout.prompts),
            "rollout/engine_logprob_diff_max": gap.max(),
            "time/rollout": time_sampled - time_start,
            "time/logprobs": time_asked - time_sampled,
            "time/update": time_updated - time_asked,
            "time/sync": time_synced - time_updated,
            "time/total": seconds,
            "time/tokens_per_second": lengths.sum() / seconds,
        }
        metrics |= mean_over_ranks(update_metrics, run.device)  # of responses or tokens
        metrics |= {f"reward/{name}": values.nanmean() for name, values in rollout.rewards.items()}
        metrics |= rollout.logged
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
        all_skipped = bool(grad_norms) and not finite_norms
        stopped = sum_over_ranks(torch.tensor(len(signals)), run.device).item() > 0 and not is_last
        if is_last or stopped or all_skipped or is_due(step, args.save_steps):
            run.checkpoint = save_checkpoint(args, run)
        if all_skipped:  # so nothing was learnt; a resume begins behind this step
            fail(f"step {step}: no update had finite gradients; {run.checkpoint} has the weights before it")
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

    actor, reference = make_policies(args, device, dtype)
    model = actor.module.model
    state = {"step": 0, "before": {}}  # before: the evaluation at step 0
    if checkpoint is not None:
        _, client_state = actor.load_checkpoint(str(checkpoint / "state" / "actor"), tag="engine")
        state = client_state["ours"]

    processor = transformers.AutoProcessor.from_pretrained(args.model)
    train_data = load_data(args, args.dataset, args.dataset_split, model, processor)
    eval_source = args.eval_dataset or ("easy-vqa" if args.dataset == "easy-vqa" else None)
    eval_data = None
    if eval_source:
        eval_data = load_data(args, eval_source, args.eval_dataset_split, model, processor)
    reward_functions = {name_of(source): plug_in("--rewards", source, REWARDS) for source in args.rewards}
    make_sampler = plug_in("--rollout", args.rollout, SAMPLERS)
    open_folder(args, folder, last_step=state["step"])
    tell(f"{folder}: {len(train_data.rows)} rows, {WORLD_SIZE} rank(s), {device}, {dtype}")

    enable_packing(args, actor, reference, train_data)
    sampler = make_sampler(args, model, end_token_ids(model, train_data.tokenizer), folder)
    sampler.sync()
    # With packing, sampling was proved to give the log-probs of the packed forward. Another engine,
    # sharded weights or the rounding of bf16 make a difference: there the policy is asked again.
    sampler_is_exact = args.rollout == "hf" and is_fp32 and args.zero_stage < 3 and packing.is_packed(model)
    return Run(
        folder=folder, device=device, dtype=dtype, processor=processor, actor=actor, reference=reference,
        train_data=train_data, eval_data=eval_data, reward_functions=reward_functions, sampler=sampler,
        sampler_is_exact=sampler_is_exact, checkpoint=checkpoint, state=state,
    )  # fmt: skip


def check_args(args: Args) -> None:
    """What a user is likely to get wrong, in one sentence each."""
    G = args.num_samples_per_prompt
    longest = args.max_prompt_length + args.max_response_length
    names = [name_of(source) for source in args.rewards]
    counts = [args.rollout_batch_size, G, args.train_batch_size, args.total_steps, args.num_iterations]
    if min([*counts, args.eval_samples, args.eval_num_samples]) < 1:
        fail("counts must be at least 1")
    if G < 2 or args.train_batch_size % G:
        fail("--num-samples-per-prompt must be 2 or more, and divide --train-batch-size")
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


def enable_packing(args: Args, actor, reference, data: "Data") -> None:
    """Pack if that is exact for some rows of the data."""
    some_rows = range(0, len(data.rows), len(data.rows) // 16 + 1)
    prompts = [prompt for row in some_rows if (prompt := data.encode(row))]
    if not prompts:
        fail(f"{data.source}: no row can be used")
    model = actor.module.model
    told = packing.enable_packing_if_exact(
        model=model,
        forward=lambda pack: actor(pack)[0],
        prompts=prompts,
        max_length=args.max_prompt_length + args.max_response_length,
        max_tokens=args.micro_batch_tokens,
        temperature=args.temperature,
    )
    tell(told)
    if packing.is_packed(model) and isinstance(reference, nn.Module):
        packing.switch_attention(getattr(reference, "module", reference).model, "packed")


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
def compute_logprobs(args: Args, run: Run, rollout: Rollout, policy: Callable) -> Tensor:
    """policy: pack -> log-probs (M,), ... -> those of all responses, (B, R), on all ranks."""
    n, G = rollout.scores.shape
    groups = [(i, list(range(i * G, (i + 1) * G))) for i in range(n)]
    table = torch.zeros(rollout.mask.shape, device=run.device)
    for pack in packs_of(args, run, rollout, groups):
        logprobs, _ = policy(pack)
        table[pack.token_index] = logprobs
    return sum_over_ranks(table, run.device)


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


class Policy(nn.Module):
    """Actor or reference, as DeepSpeed runs it: pack -> log-probs (M,), entropies or None."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, pack: packing.Pack, with_lora: bool = True, with_entropy: bool = False):
        if not with_lora:  # the reference of a model with adapters
            self.model.disable_adapters()
        logprobs, entropy = packing.response_logprobs(self.model, pack, self.temperature, with_entropy)
        if not with_lora:
            self.model.enable_adapters()
        return logprobs, entropy


def make_policies(args: Args, device: torch.device, dtype: torch.dtype) -> tuple[Any, Callable | None]:
    """-> the actor's engine; the reference: a frozen copy, the actor without adapters, or None."""
    torch.manual_seed(args.seed)  # of LoRA's first weights
    model = load_model(args.model, dtype)
    reference = None
    if args.kl_coef > 0 and args.lora_rank == 0:
        reference = Policy(load_model(args.model, dtype), args.temperature).requires_grad_(False)
        if args.zero_stage == 3:
            reference = make_engine(args, reference, dtype)
        else:
            reference = reference.to(device)
    if args.lora_rank > 0:
        add_adapters(args, model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    updates_per_step = args.rollout_batch_size // args.train_batch_size * args.num_iterations
    actor = make_engine(
        args=args,
        module=Policy(model, args.temperature),
        dtype=dtype,
        total_updates=args.total_steps * updates_per_step,
        learning_rate=args.learning_rate,
    )
    actor.eval()
    if args.kl_coef > 0 and args.lora_rank > 0:
        reference = functools.partial(actor, with_lora=False)
    return actor, reference


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
