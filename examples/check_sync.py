"""Do new weights reach the sampler? This takes the flags of rloo.py, but trains nothing:

    python examples/check_sync.py --model MODEL --sampler vllm --lora-rank 16

For each part of the model, noise is added to its trained weights until the log-probs of sampled tokens
change by 0.3 nats on average. Then the sampler gets the weights and samples again. If it lacks some of
them, its log-probs differ from the model's by a similar amount. A part fails if they differ by more than a
tenth of the change plus twice what they did before.
"""

import sys
from collections import defaultdict
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rloo  # noqa: E402

Args = rloo.Args  # all flags of rloo.py
CHANGE = 0.3  # nats per token


def sample(args: Args, run: rloo.Run, step: int) -> tuple:
    """A rollout, and a function for the model's log-probs (M,) of its tokens."""
    rows = rloo.shuffled_rows(args, step, num_rows=len(run.train_data.rows))
    rollout = rloo.collect_rollout(
        args, run, run.train_data, rows, args.num_samples_per_prompt, args.temperature, step
    )
    run.sampler.sleep()
    [mini_batches] = rloo.make_mini_batches(args, run, rollout, rollout.scores.isfinite(), step)
    return rollout, lambda: rloo.compute_logprobs(run, rollout, mini_batches)[0][rollout.response_mask]


@torch.no_grad()
def main(args: Args) -> None:
    args.rewards, args.reward_weights, args.num_epochs = ("format",), (1.0,), 1
    args.kl_coef, args.track = 0.0, "off"
    run = rloo.setup(args)
    import deepspeed

    parts = defaultdict(list)
    for name, x in run.actor.module.model.named_parameters():
        if x.requires_grad:
            parts[".".join(name.split(".")[:2])].append(x)
    rollout, logprobs = sample(args, run, step=1)
    rounding = float((logprobs() - rollout.sampler_logprobs[rollout.response_mask]).abs().mean())
    rloo.print0(f"sampler and trainer differ by {rounding:.3g} nats per token")
    has_failed = False
    for step, (part, weights) in enumerate(parts.items(), start=2):
        before = logprobs()
        torch.manual_seed(step)  # the same noise on all ranks
        scale = 1e-3
        while (change := float((logprobs() - before).abs().mean())) < CHANGE and scale < 10:
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
                for x in weights:
                    x += scale * (x.abs().mean() or 0.01) * torch.randn_like(x)  # LoRA's B is 0
            scale *= 2
        run.sampler.update_weights(step - 1)
        rollout, logprobs = sample(args, run, step)
        difference = float((logprobs() - rollout.sampler_logprobs[rollout.response_mask]).abs().mean())
        verdict = "pass" if difference < 2 * rounding + change / 10 else "FAIL"
        if change < CHANGE:  # noise has no effect: a vision tower, if all prompts are texts
            verdict = "not tested"
        has_failed |= verdict == "FAIL"
        rloo.print0(
            f"{verdict}: {part} changed by {change:.3g} nats per token, now they differ by {difference:.3g}"
        )
    if has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
