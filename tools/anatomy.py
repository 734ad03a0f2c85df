"""One step of rloo.py's default, taken apart: docs/anatomy.html, a page for teaching, and docs/anatomy.png.

    python tools/anatomy.py             # half a minute on two CPU cores

rloo.main itself runs, to the end of its first step, and the functions that it calls are watched: every number
of the page is one of that run. tools/anatomy.html is its text. It needs no network and nothing beside it.
"""

import base64
import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import tyro
from jinja2 import Environment, StrictUndefined
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import rloo  # noqa: E402
from common import attention, packing  # noqa: E402

# Codes of tokens, and of pairs of them in attention, with their colours.
NOTHING, PROMPT, PICTURE, RESPONSE, NEXT_RESPONSE, PADDING = range(6)
COLORS = ["#ffffff", "#5875a4", "#96c4e2", "#de8440", "#f5ba7a", "#dcdfe4"]
PALETTE = np.array([list(bytes.fromhex(color[1:])) for color in COLORS], dtype=np.uint8)


# ---- the step ----


@dataclass
class Step:
    args: rloo.Args
    run: rloo.Run  # with the weights after the step
    rollout: rloo.Rollout
    logged: dict[str, float]  # metrics
    updates: list[dict]  # of each pack; ratio and clipped are by response
    after: torch.Tensor  # (B, R): log-probs after the step; rollout.logprobs has those before
    shown: int  # the prompt that the page looks at


class Finished(Exception):
    """The first step is over."""


def take_step(args: rloo.Args) -> Step:
    seen = {}  # the newest result of a function
    updates = []

    def watched(name: str, look=lambda result: None):
        function = getattr(rloo, name)

        def call(*args, **keywords):
            seen[name] = function(*args, **keywords)
            look(seen[name])
            return seen[name]

        return mock.patch.object(rloo, name, call)

    def look_at_loss(result: tuple) -> None:
        _, metrics = result
        pack = forward.call_args.args[1]
        b = pack.response_index.tolist()
        clipped = metrics["policy/clipfrac_low"] + metrics["policy/clipfrac_high"]
        updates.append({
            "pack": pack,
            "rate": seen["setup"].actor.get_lr()[0],
            "loss": metrics["loss/policy"].mean().item(),
            "ratio": dict(zip(b, metrics["policy/ratio"].tolist())),
            "clipped": dict(zip(b, clipped.tolist())),
        })  # fmt: skip

    def log(args, folder, metrics, samples):
        seen["logged"] = metrics
        if metrics["train/step"] == 1:
            raise Finished

    with (
        contextlib.suppress(Finished),
        watched("setup"),
        watched("roll_out"),
        watched("compute_rloo_loss", look_at_loss),
        watched("optimizer_step", lambda norm: updates[-1].update(norm=norm)),
        mock.patch.object(packing, "response_logprobs", wraps=packing.response_logprobs) as forward,
        mock.patch.object(rloo, "log", log),
    ):
        rloo.main(args)
    run, rollout = seen["setup"], seen["roll_out"]
    return Step(
        args=args,
        run=run,
        rollout=rollout,
        logged=seen["logged"],
        updates=updates,
        after=rloo.compute_logprobs(args, run, rollout, run.actor),
        shown=most_telling(rollout),
    )


def most_telling(rollout: rloo.Rollout) -> int:
    """The prompt with the most different scores, then responses."""
    n, G = rollout.scores.shape
    responses = [tuple(ids.tolist()) for ids in rollout.response_ids]
    different = [len({*responses[i * G : (i + 1) * G]}) for i in range(n)]
    return max(range(n), key=lambda i: (len(rollout.scores[i].unique()), different[i]))


# ---- what is made of it ----


def segments_of(pack: packing.Pack, place: int) -> list[list[np.ndarray]]:
    """Codes of the tokens, by group: [prompt, response, ...]. place: the token that a picture fills."""
    layout = pack.model_inputs["layout"]
    groups = []
    for start, end in zip(layout.cu_q[:-1].tolist(), layout.cu_q[1:].tolist()):
        if layout.own[start] == 0:  # begins a text: a prompt
            groups.append([np.where(pack.model_inputs["input_ids"][0, start:end] == place, PICTURE, PROMPT)])
        else:
            code = RESPONSE if len(groups[-1]) % 2 else NEXT_RESPONSE
            groups[-1].append(np.full(end - start, code))
    return groups


def lay_out(groups: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The pack, a line per prompt, and the padded batch of the same, a row per response, as codes."""
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
def attended(pack: packing.Pack, policy) -> np.ndarray:
    """(N, N) codes: who attends to whom in a pack, by the mask that the model itself makes for it."""
    with mock.patch.object(attention, "_grouped_attention", wraps=attention._grouped_attention) as watched:
        policy(pack)
    *_, layout, mask = watched.call_args.args
    codes = np.full((len(layout.own), len(layout.own)), NOTHING)
    for bucket in layout.buckets:
        P = bucket.prompts.shape[1]
        of_prompts = mask.of_prompts(layout.own, bucket)
        if of_prompts is None:  # causal
            of_prompts = torch.ones(1, 1, P, P, dtype=torch.bool).tril()
        s, q, k = (of_prompts[:, 0] & bucket.prompts_valid[..., None]).nonzero(as_tuple=True)
        codes[bucket.prompts[s, q], bucket.prompts[s, k]] = PROMPT
        keys = torch.cat([bucket.prompts[bucket.owner], bucket.responses], dim=1)  # (S, P + R)
        of_responses = mask.of_responses(layout.own, bucket)
        s, q, k = (of_responses[:, 0] & bucket.responses_valid[..., None]).nonzero(as_tuple=True)
        codes[bucket.responses[s, q], keys[s, k]] = np.where(k < P, PICTURE, RESPONSE)
    return codes


@torch.no_grad()
def probabilities(step: Step) -> list[tuple[str, float, float, float]]:
    """(text, score, p before, p after) of every answer in the data, in tags and bare, and of what was sampled
    for the shown prompt: exact, of the whole response with its end. The likeliest come first."""
    run, rollout = step.run, step.rollout
    data = run.train_data
    G = step.args.num_samples_per_prompt
    prompt = data.encode(rollout.prompts[step.shown].index)
    end = next(ids[-1:] for ids in rollout.response_ids if ids[-1] in run.sampler.end_ids)
    candidates = rollout.response_ids[step.shown * G : (step.shown + 1) * G]
    for word in sorted({str(answer) for answer in data.rows["answer"]}):
        for text in (f"<answer>{word}</answer>", word):
            ids = data.tokenizer.encode(text, add_special_tokens=False)
            candidates.append(torch.cat([torch.tensor(ids), end]))
    different = list({tuple(ids.tolist()): ids for ids in candidates}.values())
    pack = packing.build_pack([(0, list(range(len(different))))], {0: prompt}, different).to(run.device)
    found = []
    for policy in (run.reference, run.actor):  # before a run's first step the reference is the policy
        logprobs, _ = policy(pack)
        sums = torch.zeros(len(different), device=run.device).index_add(0, pack.response_of_token, logprobs)
        found.append(sums.exp().tolist())
    texts = data.tokenizer.batch_decode(different, skip_special_tokens=True)
    scores = np.zeros(len(texts))
    for function, weight in zip(run.reward_functions.values(), step.args.reward_weights):
        scores += weight * np.array(function(texts=texts, answer=[prompt.row["answer"]] * len(texts)))
    return sorted(zip(map(readable, texts), scores, *found), key=lambda row: -max(row[2:]))


def describe(step: Step) -> dict:
    """What the page's text asks for."""
    run, rollout, shown = step.run, step.rollout, step.shown
    n, G = rollout.scores.shape
    tokenizer = run.train_data.tokenizer
    place = run.actor.module.model.config.image_token_id
    kl = rloo.kl_estimate(rollout.logprobs, rollout.ref_logprobs, step.args.kl_estimator)  # (B, R)
    kl = (kl * rollout.mask).sum(1).view(n, G)
    rewards = rollout.scores - step.args.kl_coef * kl  # (n, G): R
    k = next(k for k, update in enumerate(step.updates) if shown * G in update["ratio"])
    pack = step.updates[k]["pack"]
    groups = segments_of(pack, place)
    packed, padded = lay_out(groups)
    pairs = attended(pack, run.actor)
    line = pack.response_index.tolist().index(shown * G) // G  # of the shown prompt
    ends = np.cumsum([0] + [sum(map(len, group)) for group in groups])
    own = slice(ends[line], ends[line + 1])
    candidates = probabilities(step)
    return vars(step) | {
        "G": G,
        "prompts": [run.train_data.encode(prompt.index) for prompt in rollout.prompts],
        "texts": [readable(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rollout.response_ids],
        "token": lambda id: readable(tokenizer.decode([id])),
        "place": place,
        "kl": kl,
        "rewards": rewards,
        "baselines": (rewards.sum(1, keepdim=True) - rewards) / (G - 1),
        "change": (step.after - rollout.logprobs).sum(1),  # (B,)
        "pack_update": k + 1,
        "packed": packed,
        "padded": padded,
        "pairs": pairs,
        "own_pairs": pairs[own, own],
        "num_pictures": len({medium.key for medium in pack.media["image"]}),
        "candidates": candidates,
        "expected": [sum(row[1] * row[k] for row in candidates) for k in (2, 3)],  # score
    }


# ---- files ----


def data_uri(picture: Image.Image | np.ndarray) -> str:
    """Of a picture, or of codes, a pixel each."""
    if not isinstance(picture, Image.Image):
        picture = Image.fromarray(PALETTE[picture])
    file = io.BytesIO()
    picture.quantize(64).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def number(x: float, digits: int = 3, sign: str = "") -> str:
    x = round(float(x), digits) + 0.0  # not -0
    return f"{x:{sign},.{digits}f}".replace("-", "\N{MINUS SIGN}")


def readable(text: str) -> str:
    return re.sub("[^ -\u017f↵]", "\N{REPLACEMENT CHARACTER}", text.replace("\n", "↵"))


def draw(shown: dict, path: Path) -> None:
    """For docs/rloo.md: advantages of the responses, what a group's tokens attend to, before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), dpi=90, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    i, G = shown["shown"], shown["G"]
    y = np.arange(G)
    figure.suptitle(shown["prompts"][i].row["prompt"], fontsize=14)
    advantages = shown["rollout"].advantages[i].tolist()
    left.barh(y, advantages, color=[COLORS[PROMPT] if a > 0 else COLORS[RESPONSE] for a in advantages])
    left.set_yticks(y, [text[:28] for text in shown["texts"][i * G : (i + 1) * G]], parse_math=False)
    left.set_title(f"advantage A of {G} responses")
    middle.imshow(PALETTE[shown["own_pairs"]], interpolation="nearest")
    middle.set_title("who sees whom in the pack")
    middle.set_axis_off()
    likeliest = shown["candidates"][:G]
    for k, name, color in ((2, "before", PADDING), (3, "after", PROMPT)):
        right.barh(y + 0.4 * k - 1, [row[k] for row in likeliest], 0.4, color=COLORS[color], label=name)
    right.set_yticks(y, [row[0][:28] for row in likeliest], parse_math=False)
    right.set_title("probability of a response")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(folder: Path = ROOT / "docs") -> None:
    """folder: where anatomy.html and anatomy.png go."""
    with tempfile.TemporaryDirectory() as runs:
        shown = describe(take_step(rloo.Args(output_dir=runs, dtype="float32")))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "data_uri": data_uri}
    template = environment.from_string((ROOT / "tools" / "anatomy.html").read_text())
    page = template.render(shown, colors=COLORS, zip=zip)
    (folder / "anatomy.html").write_text(page)
    draw(shown, folder / "anatomy.png")
    print(f"{folder / 'anatomy.html'}: {len(page) / 1e3:.0f} kB")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
