"""Explain one step of rloo.py's default run: writes docs/anatomy.html, a page for teaching, and docs/anatomy.png.

    python tools/anatomy.py             # half a minute on two CPU cores

It runs rloo.main to the end of the first step and records what its functions return, so every number on the page
is from that run. The text is in tools/anatomy.html. The page works offline and needs no other file.
"""

import base64
import contextlib
import io
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import tyro
from jinja2 import Environment, StrictUndefined
from PIL import Image
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import rloo  # noqa: E402
from common import attention, packing  # noqa: E402
from common.kl import kl_estimate  # noqa: E402

# Codes of tokens, and of pairs of tokens in attention, with their colors.
NOTHING, PROMPT, IMAGE, RESPONSE, NEXT_RESPONSE, PADDING = range(6)
COLORS = ["#ffffff", "#5875a4", "#96c4e2", "#de8440", "#f5ba7a", "#dcdfe4"]
PALETTE = np.array([list(bytes.fromhex(color[1:])) for color in COLORS], dtype=np.uint8)


# ---- the step ----


class Finished(Exception):
    """The first step is over."""


def take_step(args: rloo.Args) -> SimpleNamespace:
    results = {}  # function name -> first result
    rollouts = []  # those of the evaluation come first
    updates = []

    def record(name: str, callback=lambda result: None):
        function = getattr(rloo, name)

        def call(*args, **keywords):
            result = function(*args, **keywords)
            results.setdefault(name, result)
            callback(result)
            return result

        return mock.patch.object(rloo, name, call)

    def record_update(result: tuple) -> None:
        _, metrics = result
        pack = forward.call_args.args[1]
        b = pack.response_index.tolist()
        clipped = metrics["policy/clipfrac_low"] + metrics["policy/clipfrac_high"]
        updates.append({
            "pack": pack,
            "loss": metrics["loss/policy"].mean().item(),
            "ratio": dict(zip(b, metrics["policy/ratio"].tolist())),
            "clipped": dict(zip(b, clipped.tolist())),
        })  # fmt: skip

    optimizer_step = rloo.optimizer_step

    def step_and_record(engine, learning_rate: float) -> float:
        before = nn.utils.parameters_to_vector(engine.module.parameters()).detach()  # a copy
        norm = optimizer_step(engine, learning_rate)
        moved = nn.utils.parameters_to_vector(engine.module.parameters()).detach() - before
        updates[-1] |= dict(norm=norm, learning_rate=learning_rate, moved=moved.norm(), size=before.norm())
        return norm

    def log(args, run, metrics, sample_records):
        results["metrics"] = {name: x for name, x in metrics.items() if np.isfinite(x)}
        if metrics["train/step"] == 1:
            raise Finished

    with (
        contextlib.suppress(Finished),
        record("setup"),
        record("collect_rollout", rollouts.append),
        record("compute_logprobs"),
        record("compute_advantages"),
        record("compute_rloo_loss", record_update),
        mock.patch.object(rloo, "optimizer_step", step_and_record),
        mock.patch.object(packing, "response_logprobs", wraps=packing.response_logprobs) as forward,
        mock.patch.object(rloo, "log", log),
    ):
        rloo.main(args)
    run = results["setup"]
    rollout = rollouts[-1]
    old_logprobs, _, ref_logprobs = results["compute_logprobs"]
    kept = torch.ones_like(rollout.truncated)  # (n, G): all
    mini_batches = rloo.make_mini_batches(args, run, rollout, kept, step=1)[0]
    after = rloo.compute_logprobs(run, rollout, mini_batches)
    return SimpleNamespace(
        args=args,
        run=run,  # with the weights after the step
        rollout=rollout,
        metrics=results["metrics"],
        updates=updates,  # one per pack; ratio and clipped are by response index
        advantages=results["compute_advantages"],  # (n, G)
        old_logprobs=old_logprobs,  # (B, R): before the step
        ref_logprobs=ref_logprobs,  # (B, R)
        new_logprobs=after[0],  # (B, R): after the step
        example=choose_prompt(rollout),  # index of the prompt that the page follows
    )


def choose_prompt(rollout: rloo.Rollout) -> int:
    """The prompt with the most different scores, and among those the most different responses."""
    n, G = rollout.scores.shape
    responses = [tuple(x.input_ids.tolist()) for x in rollout.continuations]
    num_different = [len({*responses[i * G : (i + 1) * G]}) for i in range(n)]
    return max(range(n), key=lambda i: (len(rollout.scores[i].unique()), num_different[i]))


# ---- the page's content ----


def segment_codes(pack: packing.Pack, image_id: int) -> list[list[np.ndarray]]:
    """Codes of a pack's tokens, for each group [prompt, response, ...]. image_id: the image placeholder."""
    indices = pack.model_inputs["packed_indices"]
    groups = []
    for start, end in pairwise(indices.cu_seqlens[0].tolist()):
        if indices.seq_positions[start] == 0:  # a prompt
            groups.append([np.where(pack.model_inputs["input_ids"][0, start:end] == image_id, IMAGE, PROMPT)])
        else:
            code = RESPONSE if len(groups[-1]) % 2 else NEXT_RESPONSE
            groups[-1].append(np.full(end - start, code))
    return groups


def lay_out(groups: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the pack, with a line per prompt, and of the same as a padded batch, with a row per response."""
    P = max(len(prompt) for prompt, *_ in groups)
    R = max(len(response) for _, *responses in groups for response in responses)
    packed = np.full((len(groups), max(sum(map(len, group)) for group in groups)), NOTHING)
    padded = []
    for line, (prompt, *responses) in zip(packed, groups):
        tokens = np.concatenate([prompt, *responses])
        line[: len(tokens)] = tokens
        for response in responses:
            row = np.full(P + R, PADDING)
            row[P - len(prompt) : P] = prompt
            row[P : P + len(response)] = response
            padded.append(row)
    return packed, np.stack(padded)


@torch.no_grad()
def attended_pairs(pack: packing.Pack, policy) -> np.ndarray:
    """(N, N) codes: which tokens of a pack attend to which, by the model's mask."""
    masks = {}  # by bucket
    bucket_mask = attention.ModelMask.bucket_mask

    def record(mask, indices, i: int) -> torch.Tensor:
        masks[i] = bucket_mask(mask, indices, i)
        return masks[i]

    with mock.patch.object(attention.ModelMask, "bucket_mask", record):
        policy(pack)
    indices = pack.model_inputs["packed_indices"]
    codes = np.full((len(indices.seq_positions),) * 2, NOTHING)
    for i, bucket in enumerate(indices.buckets):
        s, q, k = (masks[i][:, 0] & bucket.queries_valid[..., None]).nonzero(as_tuple=True)
        prompt_length = bucket.keys_valid.sum(1) - bucket.queries_valid.sum(1)  # (S,): 0 for prompts
        of_prompt = np.where(prompt_length[s] == 0, PROMPT, IMAGE)
        codes[bucket.queries[s, q], bucket.keys[s, k]] = np.where(
            (prompt_length[s] == 0) | (k < prompt_length[s]), of_prompt, RESPONSE
        )
    return codes


@torch.no_grad()
def probabilities(step: SimpleNamespace) -> list[tuple[str, float, float, float]]:
    """(text, score, p before, p after) of responses to the example prompt, the most likely first.

    They are all answers of the dataset, in tags and bare, and the sampled responses, with their EOS. The
    probabilities are exact."""
    run, rollout = step.run, step.rollout
    data = run.train_data
    G = step.args.num_samples_per_prompt
    prompt = data.encode(rollout.prompts[step.example].row_id)
    end = next(x.input_ids[-1:] for x in rollout.continuations if x.input_ids[-1] in run.sampler.eos_ids)
    candidates = [x.input_ids for x in rollout.continuations[step.example * G : (step.example + 1) * G]]
    for word in sorted({str(answer) for answer in data.rows["answer"]}):
        for text in (f"<answer>{word}</answer>", word):
            ids = data.tokenizer.encode(text, add_special_tokens=False)
            candidates.append(torch.cat([torch.tensor(ids), end]))
    different = list({tuple(ids.tolist()): ids for ids in candidates}.values())
    responses = [packing.continue_prompt(prompt, ids) for ids in different]
    pack = packing.build_packed([(0, [*range(len(responses))])], [prompt], responses)
    pack = packing.to_device(pack, run.actor.module.model)
    sequence_probs = []
    for policy in (run.reference, run.actor):  # before the first step, the policy is the reference
        logprobs, _ = policy(pack)
        sums = torch.zeros(len(different), device=rloo.DEVICE).index_add(0, pack.response_of_token, logprobs)
        sequence_probs.append(sums.exp().tolist())
    texts = data.tokenizer.batch_decode(different, skip_special_tokens=True)
    scores = np.zeros(len(texts))
    for function, weight in zip(run.reward_funcs.values(), step.args.reward_weights):
        scores += weight * np.array(function(texts=texts, answer=[prompt.row["answer"]] * len(texts)))
    return sorted(zip(map(readable, texts), scores, *sequence_probs), key=lambda row: -max(row[2:]))


@torch.no_grad()
def padding_difference(step: SimpleNamespace) -> float:
    """Largest difference between the final log-probs in packs and those in ordinary padded batches."""
    policy, rollout, G = step.run.actor, step.rollout, step.args.num_samples_per_prompt
    model = policy.module.model
    attention.set_attention(model, "sdpa")  # transformers' own, as if packing didn't exist
    differences = []
    for i, prompt in enumerate(rollout.prompts):
        prompt = step.run.train_data.encode(prompt.row_id)
        batch = packing.build_padded([(0, [*range(i * G, i * G + G)])], [prompt], rollout.continuations)
        logprobs, _ = policy(packing.to_device(batch, model))
        differences.append((logprobs - step.new_logprobs[batch.token_index]).abs().max().item())
    attention.set_attention(model, "packed")
    return max(differences)


def describe(step: SimpleNamespace) -> dict:
    """The variables of the page's template."""
    run, rollout, example = step.run, step.rollout, step.example
    n, G = rollout.scores.shape
    tokenizer = run.train_data.tokenizer
    image_id = run.actor.module.model.config.image_token_id
    kl = kl_estimate(step.old_logprobs, step.ref_logprobs, "k1")  # (B, R)
    kl = (kl * rollout.response_mask).sum(1).view(n, G)
    penalized_rewards = rollout.scores - step.args.kl_coef * kl  # (n, G)
    k = next(k for k, update in enumerate(step.updates) if example * G in update["ratio"])
    pack = step.updates[k]["pack"]
    groups = segment_codes(pack, image_id)
    packed, padded = lay_out(groups)
    pairs = attended_pairs(pack, run.actor)
    line = pack.response_index.tolist().index(example * G) // G  # of the example prompt
    ends = np.cumsum([0] + [sum(map(len, group)) for group in groups])
    part = slice(ends[line], ends[line + 1])
    candidates = probabilities(step)
    texts = tokenizer.batch_decode([x.input_ids for x in rollout.continuations], skip_special_tokens=True)
    return vars(step) | {
        "G": G,
        "prompts": [run.train_data.encode(prompt.row_id) for prompt in rollout.prompts],
        "texts": [readable(text) for text in texts],
        "token": lambda id: readable(tokenizer.decode([id])),
        "image_id": image_id,
        "kl": kl,
        "penalized_rewards": penalized_rewards,
        "baselines": (penalized_rewards.sum(1, keepdim=True) - penalized_rewards) / (G - 1),
        "change": (step.new_logprobs - step.old_logprobs).sum(1),  # (B,)
        "pack_update": k + 1,
        "packed": packed,
        "padded": padded,
        "pairs": pairs,
        "group_pairs": pairs[part, part],
        "num_images": len(pack.model_inputs["image_grid_thw"]),
        "candidates": candidates,
        "expected": [sum(row[1] * row[k] for row in candidates) for k in (2, 3)],  # score
        "padding_difference": padding_difference(step),
    }


# ---- files ----


def data_uri(image: Image.Image | np.ndarray) -> str:
    """Data URI of an image, or of codes, with one pixel each."""
    if not isinstance(image, Image.Image):
        image = Image.fromarray(PALETTE[image])
    file = io.BytesIO()
    image.quantize(64).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def number(x: float, digits: int = 3, sign: str = "") -> str:
    x = round(float(x), digits) + 0.0  # not -0
    return f"{x:{sign},.{digits}f}".replace("-", "\N{MINUS SIGN}")


def direction(advantage: float) -> str:
    """CSS class. If all scores of a group are equal, rounding errors of the KL leave advantages of about 1e-11."""
    return "none" if abs(advantage) < 1e-6 else "up" if advantage > 0 else "down"


def readable(text: str) -> str:
    return re.sub("[^ -\u017f↵]", "\N{REPLACEMENT CHARACTER}", text.replace("\n", "↵"))


def draw(variables: dict, path: Path) -> None:
    """Draw docs/rloo.md's figure: advantages, attention within a group, and probabilities before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), dpi=90, layout="constrained")
    panels = figure.subplot_mosaic([["advantages", "pack"], ["probabilities", "pack"]])
    left, right, middle = panels["advantages"], panels["probabilities"], panels["pack"]
    i, G = variables["example"], variables["G"]
    y = np.arange(G)
    figure.suptitle(variables["prompts"][i].row["prompt"], fontsize=18)
    advantages = variables["advantages"][i].tolist()
    left.barh(y, advantages, color=[COLORS[PROMPT] if a > 0 else COLORS[RESPONSE] for a in advantages])
    left.set_yticks(y, [text[:28] for text in variables["texts"][i * G : (i + 1) * G]], parse_math=False)
    left.set_title(f"advantages of {G} responses", fontsize=15)
    middle.imshow(PALETTE[variables["group_pairs"]], interpolation="nearest")
    middle.set_title("attention in the pack: a token (row)\nattends to the colored columns", fontsize=15)
    middle.set_axis_off()
    likeliest = variables["candidates"][:G]
    for k, name, color in ((2, "before", PADDING), (3, "after", PROMPT)):
        right.barh(y + 0.4 * k - 1, [row[k] for row in likeliest], 0.4, color=COLORS[color], label=name)
    right.set_yticks(y, [row[0][:28] for row in likeliest], parse_math=False)
    right.set_title("probabilities of responses", fontsize=15)
    right.legend(frameon=False, fontsize=13)
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(labelsize=13)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(folder: Path = ROOT / "docs") -> None:
    """folder: directory for anatomy.html and anatomy.png."""
    with tempfile.TemporaryDirectory() as runs:
        variables = describe(take_step(rloo.Args(output_dir=runs, dtype="float32", eval_prompts=1)))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "data_uri": data_uri, "direction": direction}
    template = environment.from_string((ROOT / "tools" / "anatomy.html").read_text())
    page = template.render(variables, colors=COLORS, zip=zip)
    (folder / "anatomy.html").write_text(page)
    draw(variables, folder / "anatomy.png")
    print(f"{folder / 'anatomy.html'}: {len(page) / 1e3:.0f} kB")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
