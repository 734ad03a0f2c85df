"""Make assets/tiny_vl: a Qwen2.5-VL of 1.9M parameters that answers easy-VQA, trained from nothing on two CPU cores.

Three phases, each cached in --work-dir so that a second run resumes after the last finished one:
1. eyes      the vision tower alone, with a linear head on shape and colour, on pictures drawn without end in the style of
             easy-VQA. Questions alone are too thin a signal: trained end to end, the model learns colours at once and
             shapes hardly at all.
2. language  the text model on frozen eyes: SFT on easy-VQA's training questions and on the same questions about drawn pictures.
3. noise     a little SFT on noisy demonstrations: half of them untagged, one in three wrong. The greedy answer stays right and
             tagged, the sampled one often is not. That is what RL has to undo.

    python tools/make_tiny_vl.py --output-dir assets/tiny_vl
"""

import json
import math
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import easy_vqa
import torch
import torch.nn.functional as F
import tyro
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401  mends torchvision beside a CPU-only torch, so it comes before transformers

# isort: split
from transformers import (  # noqa: E402
    AttentionInterface,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX  # noqa: E402

SHAPES = ["circle", "rectangle", "triangle"]
COLOURS = {
    "black": (0, 0, 0), "blue": (0, 0, 255), "brown": (165, 42, 42), "gray": (128, 128, 128),
    "green": (0, 255, 0), "red": (255, 0, 0), "teal": (0, 128, 128), "yellow": (255, 255, 0),
}  # fmt: skip
SIZE, PATCH, MERGE, HIDDEN = 64, 8, 2, 128
NUM_PATCHES = (SIZE // PATCH) ** 2
NUM_IMAGE_TOKENS = NUM_PATCHES // MERGE**2
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
]
SPECIAL_TOKENS += ["<|image_pad|>", "<|video_pad|>"]
TAG_TOKENS = ["<think>", "</think>", "<answer>", "</answer>"]
DRAWN_PICTURES = 16384
TAGGED = "<answer>{}</answer>"
NOISY_FORMATS = {TAGGED: 0.55, "{}": 0.15, "The answer is {}.": 0.15, "It is {}.": 0.15}
NOISY_TRUTH = 0.65
OTHER_TEXT = """You are a helpful assistant. Answer the question about the image. Think step by step, then give the final answer.
Question: Answer: Image 1 Image 2 Response 1 Response 2 Which response is better? The first response is better. The second one is
worse. Both are correct. Neither is right, because the image shows something different. Compare the two answers and score them.
Yes, there is one. No, there is not. I can see that this picture has a large small shape on the left right top bottom."""  # noqa: E501
# Qwen2.5-VL's template without its default system prompt.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif content['type'] == 'video' or 'video' in content -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in content -%}{{- content['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass
class Args:
    output_dir: Path = Path("assets/tiny_vl")
    """where the finished model goes"""
    work_dir: Path = Path("runs/make_tiny_vl")
    """where each finished phase is kept; delete it to start over"""
    seed: int = 1
    """of everything random"""
    eyes_steps: int = 1200
    """optimizer steps of phase 1"""
    language_steps: int = 2000
    """optimizer steps of phase 2"""
    noise_steps: int = 150
    """optimizer steps of phase 3"""
    eyes_lr: float = 2e-3
    """peak learning rate of phase 1"""
    language_lr: float = 1e-3
    """peak learning rate of phase 2"""
    noise_lr: float = 1e-3
    """peak learning rate of phase 3"""
    batch_size: int = 64
    """pictures (phase 1) or questions (phases 2 and 3) per step"""


# ---- pictures and questions -------------------------------------------------------------------------------------------------


def draw(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """n pictures like easy-VQA's: one anti-aliased shape, fully inside, on a light background. Sizes and ranges were measured.

    Returns pictures (n, 3, 64, 64) in 0..255, shape (n,), colour (n,), and which image tokens the shape touches (n, 16).
    """
    shape, colour = torch.randint(len(SHAPES), (n,)), torch.randint(len(COLOURS), (n,))
    width = torch.empty(n).uniform_(9, 33)
    height = torch.where(shape == 1, torch.empty(n).uniform_(9, 33), width)
    height = torch.where(
        shape == 2, width * math.sqrt(3) / 2, height
    )  # triangles are equilateral and point up
    cx = width / 2 + torch.rand(n) * (SIZE - width)
    cy = height / 2 + torch.rand(n) * (SIZE - height)
    pixel = torch.arange(SIZE) + 0.5
    x = (pixel[None, None, :] - cx[:, None, None]).expand(n, SIZE, SIZE)
    y = (pixel[None, :, None] - cy[:, None, None]).expand(n, SIZE, SIZE)
    half_w, half_h = width[:, None, None] / 2, height[:, None, None] / 2
    inside = torch.stack(  # (3, n, 64, 64): distance to the outline, positive inside
        [
            half_w - (x**2 + y**2).sqrt(),
            torch.minimum(half_w - x.abs(), half_h - y.abs()),
            torch.minimum(half_h - y, (y + half_h) / 2 - x.abs() * math.sqrt(3) / 2),
        ]
    )[shape, torch.arange(n)]
    blur = torch.empty(n, 1, 1).uniform_(1.0, 2.0)
    cover = (inside / blur + 0.5).clamp(0, 1)
    background = torch.randint(230, 256, (n, 3, 1, 1)).float()
    foreground = torch.tensor(list(COLOURS.values())).float()[colour][:, :, None, None]
    pictures = (background + cover[:, None] * (foreground - background)).round()
    return pictures, shape, colour, F.avg_pool2d(cover, PATCH * MERGE).flatten(1) > 0.02


def read_pictures(paths: dict) -> Tensor:
    """(number of pictures, 3, 64, 64) in 0..255, in the order of their ids 0, 1, 2, ..."""
    raw = b"".join(Image.open(paths[i]).convert("RGB").tobytes() for i in range(len(paths)))
    return (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        .view(-1, SIZE, SIZE, 3)
        .permute(0, 3, 1, 2)
        .float()
    )


def patchify(pictures: Tensor, image_processor) -> Tensor:
    """What the image processor returns as pixel_values for 64x64 pictures, without its overhead: (n * 64, 3 * 2 * 8 * 8)."""
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1) for v in (image_processor.image_mean, image_processor.image_std)
    )
    n, grid = len(pictures), SIZE // PATCH // MERGE
    patches = ((pictures / 255 - mean) / std).view(n, 3, grid, MERGE, PATCH, grid, MERGE, PATCH)
    patches = patches.permute(
        0, 2, 5, 3, 6, 1, 4, 7
    )  # (n, row, column, row in token, column in token, 3, 8, 8)
    patches = patches.unsqueeze(6).expand(
        -1, -1, -1, -1, -1, -1, 2, -1, -1
    )  # a still picture is two equal frames
    return patches.reshape(n * NUM_PATCHES, -1)


def labels_from_questions(questions: list, answers: list, ids: list) -> tuple[Tensor, Tensor, Tensor]:
    """(picture ids, shapes, colours) of those pictures whose questions give away both."""
    known = {}
    for question, answer, i in zip(questions, answers, ids):
        negated = " not " in question or " no " in question
        if question.startswith("what") or (answer == "yes") != negated:  # the words are true of the picture
            known.setdefault(i, set()).update(re.findall(r"\w+", f"{question} {answer}"))
    colours = list(COLOURS)
    rows = []
    for i, words in known.items():
        shape, colour = [s for s in SHAPES if s in words], [c for c in colours if c in words]
        if shape and colour:
            rows.append((i, SHAPES.index(shape[0]), colours.index(colour[0])))
    return tuple(torch.tensor(column) for column in zip(*rows))


def question_templates(questions: list) -> list[str]:
    """The questions with {S} for the shape and {C} for the colour; repeated as often as they occur."""
    shapes, colours = re.compile("|".join(SHAPES)), re.compile("|".join(COLOURS))
    return [colours.sub("{C}", shapes.sub("{S}", question)) for question in questions]


def ask(template: str, shape: str, colour: str, rng: random.Random) -> tuple[str, str]:
    """A question about a drawn picture and its answer. Yes/no questions name the true property half of the time."""
    if template.startswith("what"):
        asks_colour = "color" in template
        return template.format(S=shape, C=colour), colour if asks_colour else shape
    true = rng.random() < 0.5
    if not true:
        shape = rng.choice([s for s in SHAPES if s != shape])
        colour = rng.choice([c for c in COLOURS if c != colour])
    negated = " not " in template or " no " in template
    return template.format(S=shape, C=colour), "yes" if true != negated else "no"


def other_answer(answer: str, rng: random.Random) -> str:
    """A wrong answer of the same kind."""
    kind = next(kind for kind in (["yes", "no"], SHAPES, list(COLOURS)) if answer in kind)
    return rng.choice([a for a in kind if a != answer])


# ---- model ------------------------------------------------------------------------------------------------------------------


def build_processor(questions: list[str]) -> Qwen2_5_VLProcessor:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # as in Qwen2Tokenizer
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(SPECIAL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=sorted(
            pre_tokenizers.ByteLevel.alphabet()
        ),  # every byte, so that any text round-trips
        show_progress=False,
    )
    words = ["user\n", "assistant\n", "system\n", *SHAPES, *COLOURS, "yes", "no"]
    responses = [form.format(word) for form in NOISY_FORMATS if form != TAGGED for word in words[3:]]
    bpe.train_from_iterator([*questions, *(words + responses) * 100, *OTHER_TEXT.split("\n")], trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=4096,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    vision = dict(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2)
    size = {
        "shortest_edge": 32 * 32,
        "longest_edge": 128 * 128,
    }  # in pixels: 64x64 stays, larger pictures shrink
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**vision, size=size, max_frames=16),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    token_id = tokenizer.convert_tokens_to_ids
    ends = dict(bos_token_id=token_id("<|endoftext|>"), pad_token_id=token_id("<|endoftext|>"))
    ends["eos_token_id"] = token_id("<|im_end|>")
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6]),
            tie_word_embeddings=True,
            **ends,
        ),
        vision_config=dict(
            depth=4,
            hidden_size=HIDDEN,
            intermediate_size=256,
            num_heads=4,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            tokens_per_second=2,
            window_size=SIZE,
            fullatt_block_indexes=[0, 1, 2, 3],
            out_hidden_size=HIDDEN,
        ),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
        **ends,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    stop = [ends["eos_token_id"], ends["pad_token_id"]]
    model.generation_config = GenerationConfig(**{**ends, "eos_token_id": stop})
    return model


def attend_equal_pictures(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float, **kwargs
):
    """Vision attention for a batch of 64x64 pictures in one call; transformers' SDPA path loops over the pictures."""
    heads, dim = query.shape[1], query.shape[3]
    q, k, v = (t.view(heads, -1, NUM_PATCHES, dim) for t in (query, key, value))  # (heads, pictures, 64, dim)
    attended = (q @ k.transpose(-1, -2) * scaling).softmax(-1).to(
        v.dtype
    ) @ v  # SDPA's backward on CPU is 3 times slower
    return attended.view(1, heads, -1, dim).transpose(1, 2), None


def see(model, pixel_values: Tensor) -> Tensor:
    """The merger's output for a batch of 64x64 pictures: (pictures, 16, hidden)."""
    n = len(pixel_values) // NUM_PATCHES
    grid = torch.tensor([[1, SIZE // PATCH, SIZE // PATCH]]).expand(n, 3)
    model.model.visual.config._attn_implementation = "equal_pictures"
    everything = torch.tensor(
        [0, len(pixel_values)]
    )  # one segment: the attention above cuts it into pictures itself
    features = model.model.visual(pixel_values, grid, cu_seqlens=everything).pooler_output
    model.model.visual.config._attn_implementation = "sdpa"
    return features.view(n, NUM_IMAGE_TOKENS, HIDDEN)


# ---- training ---------------------------------------------------------------------------------------------------------------


class Optimizer:
    """Muon on the matrices, AdamW on the rest (embeddings, heads, vectors), one cosine schedule with warmup for both."""

    def __init__(self, matrices: list, rest: list, lr: float, steps: int):
        self.parameters = [*matrices, *rest]
        self.parts = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)]
        self.parts.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
        warmup = min(100, steps // 10)
        self.lr_at = lambda t: lr * min((t + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * t / steps))

    def step(self, loss: Tensor, t: int) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in self.parts:
            part.param_groups[0]["lr"] = self.lr_at(t)
            part.step()
            part.zero_grad()


def train_eyes(args: Args, model, processor) -> None:
    image_processor = processor.image_processor
    head = nn.Linear(HIDDEN, len(SHAPES) + len(COLOURS))
    visual = model.model.visual
    matrices = [p for p in visual.parameters() if p.ndim == 2]
    rest = [p for p in visual.parameters() if p.ndim != 2] + list(head.parameters())
    optimizer = Optimizer(matrices, rest, args.eyes_lr, args.eyes_steps)
    test_ids, test_shapes, test_colours = labels_from_questions(*easy_vqa.get_test_questions())
    test_pixels = patchify(read_pictures(easy_vqa.get_test_image_paths())[test_ids], image_processor)
    test_batches = test_pixels.split(args.batch_size * NUM_PATCHES)[
        :-1
    ]  # full ones only: one shape, compiled once
    for block in visual.blocks:
        block.compile(dynamic=False)
    start = time.time()
    for step in range(args.eyes_steps):
        pictures, shape, colour, touched = draw(args.batch_size)
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(see(model, patchify(pictures, image_processor))).float()  # (B, 16, 3 + 8)
        pooled = logits.amax(1)
        loss = F.cross_entropy(pooled[:, :3], shape) + F.cross_entropy(pooled[:, 3:], colour)
        # Every token that the shape touches must name it too: a far denser signal than one label a picture.
        tokens = logits[touched]
        loss = loss + F.cross_entropy(tokens[:, :3], shape[:, None].expand_as(touched)[touched])
        optimizer.step(loss, step)
        if (step + 1) % 100 == 0:
            with torch.autocast("cpu", torch.bfloat16):
                pooled = torch.cat([head(see(model, pixels)).amax(1).detach() for pixels in test_batches])
            right_shape = (pooled[:, :3].argmax(1) == test_shapes[: len(pooled)]).float().mean()
            right_colour = (pooled[:, 3:].argmax(1) == test_colours[: len(pooled)]).float().mean()
            print(f"eyes {step + 1}: loss {loss:.3f}, easy-VQA test pictures: shape {right_shape:.3f}, colour "
                  f"{right_colour:.3f}, {time.time() - start:.0f} s", flush=True)  # fmt: skip


def train_language(args: Args, model, processor, noisy: bool = False) -> None:
    """SFT with the vision tower frozen. Every batch is half real training questions and half questions about drawn pictures."""
    steps, lr = (args.noise_steps, args.noise_lr) if noisy else (args.language_steps, args.language_lr)
    rng, tokenizer, visual, text = (
        random.Random(args.seed),
        processor.tokenizer,
        model.model.visual,
        model.model.language_model,
    )
    for parameter in visual.parameters():
        parameter.requires_grad_(False).copy_(
            parameter.bfloat16()
        )  # the shipped eyes are bf16: learn to read those
    pictures, shapes, colours, _ = draw(DRAWN_PICTURES)
    pictures = torch.cat(
        [read_pictures(easy_vqa.get_train_image_paths()), pictures]
    )  # ids 0..3999 are the real ones
    pixels = patchify(pictures, processor.image_processor).split(256 * NUM_PATCHES)
    features = torch.cat([see(model, batch) for batch in pixels])  # (pictures, 16, hidden)
    real = list(zip(*easy_vqa.get_train_questions()))
    templates = question_templates([question for question, _, _ in real])

    @cache
    def prompt_ids(question: str) -> list[int]:
        prompt = chat_prompt(processor, question).replace("<|image_pad|>", "<|image_pad|>" * NUM_IMAGE_TOKENS)
        return tokenizer(prompt)["input_ids"]

    @cache
    def response_ids(response: str) -> list[int]:
        return tokenizer(response + "<|im_end|>")["input_ids"]

    def sample() -> tuple[int, list[int], list[int]]:
        question, answer, i = rng.choice(real)
        if rng.random() < 0.5:
            drawn = rng.randrange(DRAWN_PICTURES)
            i = len(features) - DRAWN_PICTURES + drawn
            question, answer = ask(
                rng.choice(templates), SHAPES[shapes[drawn]], list(COLOURS)[colours[drawn]], rng
            )
        form = TAGGED
        if noisy:  # the noise never looks at the question, so there is nothing in it to learn
            form = rng.choices(list(NOISY_FORMATS), list(NOISY_FORMATS.values()))[0]
            answer = answer if rng.random() < NOISY_TRUTH else other_answer(answer, rng)
        return i, prompt_ids(question), response_ids(form.format(answer))

    length = (
        max(len(prompt_ids(question)) for question, _, _ in real) + 8
    )  # T, the same in every step: compiled once
    first = prompt_ids(real[0][0]).index(
        model.config.image_token_id
    )  # the pictures' tokens stand at one place in all prompts
    last = first + NUM_IMAGE_TOKENS
    row = torch.full((1, length), tokenizer.pad_token_id)
    row[0, first:last] = model.config.image_token_id
    kinds, grid = (
        (row == model.config.image_token_id).int(),
        torch.tensor([[1, SIZE // PATCH, SIZE // PATCH]]),
    )
    position_ids = model.model.get_rope_index(row, kinds, grid)[0].expand(
        3, args.batch_size, length
    )  # true M-RoPE positions

    for layer in text.layers:
        layer.compile(dynamic=False)
    matrices = [p for p in text.layers.parameters() if p.ndim == 2]
    rest = [p for p in text.parameters() if not any(p is m for m in matrices)]
    optimizer = Optimizer(matrices, rest, lr, steps)
    start = time.time()
    for step in range(steps):
        ids, prompts, responses = zip(*(sample() for _ in range(args.batch_size)))
        input_ids = torch.full((args.batch_size, length), tokenizer.pad_token_id)  # (B, T)
        trained = torch.zeros(args.batch_size, length, dtype=torch.bool)
        for b, (prompt, response) in enumerate(zip(prompts, responses)):
            input_ids[b, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            trained[b, len(prompt) : len(prompt) + len(response)] = True
        with torch.autocast("cpu", torch.bfloat16):
            embeds = text.embed_tokens(input_ids)
            embeds = torch.cat(
                [embeds[:, :first], features[list(ids)], embeds[:, last:]], 1
            )  # (B, T, hidden)
            hidden = text(inputs_embeds=embeds, position_ids=position_ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][trained[:, 1:]]).float()
        loss = F.cross_entropy(logits, input_ids[trained])  # mean over the response tokens of the batch
        optimizer.step(loss, step)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(
                f"{'noise' if noisy else 'language'} {step + 1}: loss {loss:.3f}, {time.time() - start:.0f} s",
                flush=True,
            )
        if (step + 1) % 500 == 0:
            save(model, processor, args.work_dir / "check")
            accuracy = evaluate(args.work_dir / "check", 1000)["accuracy"]
            print(f"  greedy accuracy {accuracy:.3f} on 1000 test questions", flush=True)


# ---- saving and evaluation --------------------------------------------------------------------------------------------------


def save(model, processor, folder: Path) -> None:
    rounded = build_model(processor.tokenizer)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def chat_prompt(processor, question: str) -> str:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


@torch.no_grad()
def evaluate(folder: Path, num_questions: int | None = None, sampled: bool = False) -> dict[str, float]:
    """Load a saved folder the way a user does and answer test questions with generate(), in fp32.

    accuracy: share of responses whose text in <answer></answer> is the reference. reward: 0.9 * that + 0.1 * the share of
    responses that are exactly one <answer>...</answer> and nothing else.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    paths = easy_vqa.get_test_image_paths()
    items = list(zip(*easy_vqa.get_test_questions()))
    items = random.Random(0).sample(items, num_questions or len(items))
    sampling = dict(do_sample=True, temperature=1.0, top_p=1.0, top_k=0) if sampled else dict(do_sample=False)
    right = exact = 0
    for at in range(0, len(items), 256):
        batch = items[at : at + 256]
        inputs = processor(
            text=[chat_prompt(processor, question) for question, _, _ in batch],
            images=[Image.open(paths[i]) for _, _, i in batch],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        tokens = model.generate(**inputs, max_new_tokens=16, **sampling)[:, inputs["input_ids"].shape[1] :]
        for text, (_, reference, _) in zip(processor.batch_decode(tokens, skip_special_tokens=True), batch):
            right += re.findall("<answer>(.*?)</answer>", text)[:1] == [reference]
            exact += bool(re.fullmatch("<answer>[^<]*</answer>", text))
    return {"accuracy": right / len(items), "reward": (0.9 * right + 0.1 * exact) / len(items)}


def write_readme(args: Args, model, seconds: dict, clean: dict, greedy: dict, sampled: dict) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    total = sum(seconds.values())
    text = f"""# tiny_vl

A Qwen2.5-VL of {parameters / 1e6:.2f}M parameters (bf16) that looks at a 64x64 picture and answers a question of
[easy-VQA](https://github.com/vzhou842/easy-VQA) as `<answer>teal</answer>`. Standard architecture: `AutoProcessor`,
`AutoModelForImageTextToText` and vLLM load it. It knows nothing else: it is the embedded default of the scripts, for CPU
runs and tests.

Made from nothing, with no pretrained weights, by

    python tools/make_tiny_vl.py --output-dir assets/tiny_vl

Seed {args.seed}, two CPU cores, no GPU: {total / 60:.0f} minutes of training (eyes {seconds["eyes"] / 60:.1f}, language
{seconds["language"] / 60:.1f}, noise {seconds["noise"] / 60:.1f}). The script's docstring says what the three phases are.
Another machine rounds differently, so expect figures close to these, not equal.
The phases ran one by one, each from the cached result of the one before; the strength of the noise was chosen by these same
test questions.

| on easy-VQA's {len(easy_vqa.get_test_questions()[0])} test questions, bf16 weights computed in fp32 | |
|---|---|
| greedy accuracy after the language phase | {clean["accuracy"]:.4f} |
| greedy accuracy of the shipped weights | {greedy["accuracy"]:.4f} |
| accuracy of a sample, temperature 1 | {sampled["accuracy"]:.4f} |
| reward of a sample, temperature 1: 0.9 * correct in tags + 0.1 * nothing but one tagged answer | {sampled["reward"]:.4f} |

The gap between greedy and sampled is made on purpose by the last phase (demonstrations {1 - NOISY_FORMATS[TAGGED]:.0%}
untagged and {1 - NOISY_TRUTH:.0%} wrong, whatever the question): it is what RL has to close. Images and questions:
easy-VQA 1.0, MIT licence. The weights come under this repository's licence.
"""
    (args.output_dir / "README.md").write_text(text)
    print(text)


def main(args: Args) -> None:
    torch.set_num_threads(2)
    AttentionInterface.register("equal_pictures", attend_equal_pictures)
    torch.manual_seed(args.seed)
    processor = build_processor(easy_vqa.get_train_questions()[0])
    model = build_model(processor.tokenizer)
    phases = {"eyes": train_eyes, "language": train_language, "noise": partial(train_language, noisy=True)}
    seconds = {}
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for name, train in phases.items():
        cached = args.work_dir / f"{name}.pt"
        if not cached.exists():
            torch.manual_seed(args.seed)
            start = time.time()
            train(args, model, processor)
            torch.save({"weights": model.state_dict(), "seconds": time.time() - start}, cached)
        saved = torch.load(cached)
        seconds[name] = saved["seconds"]
        model = build_model(processor.tokenizer)  # anew, for training has compiled the layers of the old one
        model.load_state_dict(saved["weights"])
        save(model, processor, args.work_dir / name)
    shutil.copytree(args.work_dir / "noise", args.output_dir, dirs_exist_ok=True)
    clean = evaluate(args.work_dir / "language")
    write_readme(
        args, model, seconds, clean, evaluate(args.output_dir), evaluate(args.output_dir, sampled=True)
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
