"""Make assets/tiny_vl: a Qwen2.5-VL with 1.9M parameters that answers easy-VQA, trained from scratch on two CPU cores.

There are three phases. Each is cached in --work-dir, so a second run resumes after the last finished phase.
1. vision    Train the vision tower with a linear head that classifies shape and color, on endless generated images in
             the style of easy-VQA. Questions alone are too weak a signal: trained end to end, the model quickly learns
             colors, and hardly any shapes.
2. language  Train the text model with a frozen vision tower: SFT on easy-VQA's training questions and on the same
             questions about generated images.
3. habits    A short SFT on demonstrations with two bad habits. Most of them lack the tags, as the responses of a base
             model do; and some colors and shapes are mostly confused with others (CONFUSIONS), in all questions about
             such an image. So the greedy response is mostly wrong, but sampling still finds the right one: this is
             what RL can improve.

    python tools/make_tiny_vl.py --output-dir assets/tiny_vl
"""

import json
import math
import random
import re
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import easy_vqa
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401  repairs torchvision with a CPU-only torch, so it comes before transformers

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
COLORS = {
    "black": (0, 0, 0), "blue": (0, 0, 255), "brown": (165, 42, 42), "gray": (128, 128, 128),
    "green": (0, 255, 0), "red": (255, 0, 0), "teal": (0, 128, 128), "yellow": (255, 255, 0),
}  # fmt: skip
SIZE, PATCH, MERGE, HIDDEN = 64, 8, 2, 128
NUM_PATCHES = (SIZE // PATCH) ** 2
NUM_IMAGE_TOKENS = NUM_PATCHES // MERGE**2
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL_TOKENS += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TAG_TOKENS = ["<think>", "</think>", "<answer>", "</answer>"]
NUM_GENERATED_IMAGES = 16384
TAGGED = "<answer>{}</answer>"
UNTAGGED = {"{}": 0.1, "The answer is {}.": 0.8, "It is {}.": 0.1}  # probabilities of responses without tags
TAGGED_FRACTION = {"what": 0.55, "yes/no": 0.37}  # the greedy response to most yes/no questions has no tags
CONFUSIONS = {"teal": "green", "brown": "red", "gray": "blue", "rectangle": "triangle"}
CONFUSED_FRACTION = 0.6  # probability that the model mistakes the key for the value
SEED = 1
BATCH_SIZE = 64  # images (phase 1) or questions (phases 2 and 3) per step
STEPS = {"vision": 1200, "language": 2000, "habits": 300}
LEARNING_RATES = {"vision": 2e-3, "language": 1e-3, "habits": 1e-3}  # peaks
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
    output_dir: Path = Path("assets/tiny_vl")  # Output directory for the model.
    work_dir: Path = Path("runs/make_tiny_vl")  # Directory for the finished phases; delete it to start over.


# ---- images and questions ----


def generate_images(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """n images like easy-VQA's: one anti-aliased shape, entirely inside, on a light background.

    Sizes and ranges are those of easy-VQA's images. Returns images (n, 3, 64, 64) in 0..255, shapes (n,),
    colors (n,), and which image tokens the shape overlaps with (n, 16).
    """
    shape, color = torch.randint(len(SHAPES), (n,)), torch.randint(len(COLORS), (n,))
    width = torch.empty(n).uniform_(9, 33)
    height = torch.where(shape == 1, torch.empty(n).uniform_(9, 33), width)
    height = torch.where(shape == 2, width * math.sqrt(3) / 2, height)  # equilateral triangles that point up
    cx = width / 2 + torch.rand(n) * (SIZE - width)
    cy = height / 2 + torch.rand(n) * (SIZE - height)
    pixel = torch.arange(SIZE) + 0.5
    x = (pixel[None, None, :] - cx[:, None, None]).expand(n, SIZE, SIZE)
    y = (pixel[None, :, None] - cy[:, None, None]).expand(n, SIZE, SIZE)
    half_w, half_h = width[:, None, None] / 2, height[:, None, None] / 2
    inside = torch.stack(  # (3, n, 64, 64): signed distance to the outline, positive inside
        [
            half_w - (x**2 + y**2).sqrt(),
            torch.minimum(half_w - x.abs(), half_h - y.abs()),
            torch.minimum(half_h - y, (y + half_h) / 2 - x.abs() * math.sqrt(3) / 2),
        ]
    )[shape, torch.arange(n)]
    blur = torch.empty(n, 1, 1).uniform_(1.0, 2.0)
    cover = (inside / blur + 0.5).clamp(0, 1)
    background = torch.randint(230, 256, (n, 3, 1, 1)).float()
    foreground = torch.tensor(list(COLORS.values())).float()[color][:, :, None, None]
    images = (background + cover[:, None] * (foreground - background)).round()
    return images, shape, color, F.avg_pool2d(cover, PATCH * MERGE).flatten(1) > 0.02


def read_images(paths: dict) -> Tensor:
    """(number of images, 3, 64, 64) in 0..255, in the order of their ids 0, 1, 2, ..."""
    raw = b"".join(Image.open(paths[i]).convert("RGB").tobytes() for i in range(len(paths)))
    images = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, SIZE, SIZE, 3)
    return images.permute(0, 3, 1, 2).float()


def patchify(images: Tensor, image_processor) -> Tensor:
    """The image processor's pixel_values (n * 64, 3 * 2 * 8 * 8) of 64x64 images, without its overhead."""
    mean = torch.tensor(image_processor.image_mean).view(1, 3, 1, 1)
    std = torch.tensor(image_processor.image_std).view(1, 3, 1, 1)
    n, grid = len(images), SIZE // PATCH // MERGE
    patches = ((images / 255 - mean) / std).view(n, 3, grid, MERGE, PATCH, grid, MERGE, PATCH)
    # (n, row, column, row in token, column in token, 3, 8, 8)
    patches = patches.permute(0, 2, 5, 3, 6, 1, 4, 7)
    patches = patches.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)  # an image is two equal frames
    return patches.reshape(n * NUM_PATCHES, -1)


def labels_from_questions(questions: list, answers: list, ids: list) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, shapes and colors of the images whose questions and answers determine both."""
    true_words = {}
    for question, answer, i in zip(questions, answers, ids):
        negated = " not " in question or " no " in question
        if question.startswith("what") or (answer == "yes") != negated:  # its words describe the image
            true_words.setdefault(i, set()).update(re.findall(r"\w+", f"{question} {answer}"))
    colors = list(COLORS)
    rows = []
    for i, words in true_words.items():
        shape, color = [s for s in SHAPES if s in words], [c for c in colors if c in words]
        if shape and color:
            rows.append((i, SHAPES.index(shape[0]), colors.index(color[0])))
    return tuple(torch.tensor(column) for column in zip(*rows))


def question_templates(questions: list) -> list[str]:
    """The questions with {S} for the shape and {C} for the color, with repetitions."""
    shapes, colors = re.compile("|".join(SHAPES)), re.compile("|".join(COLORS))
    return [colors.sub("{C}", shapes.sub("{S}", question)) for question in questions]


def ask(template: str, shape: str, color: str, rng: random.Random) -> str:
    """A question about an image. Yes/no questions name the true property half of the time."""
    if not template.startswith("what") and rng.random() < 0.5:
        shape = rng.choice([s for s in SHAPES if s != shape])
        color = rng.choice([c for c in COLORS if c != color])
    return template.format(S=shape, C=color)


def expected_answer(question: str, properties: set[str]) -> str:
    """The answer for an image with these properties, a shape and a color."""
    words = set(re.findall(r"\w+", question))
    if "what" in words:
        return next(word for word in (COLORS if "color" in words else SHAPES) if word in properties)
    named = words & {*SHAPES, *COLORS}
    negated = bool(words & {"not", "no"})
    return "yes" if (named <= properties) != negated else "no"


def confuse(word: str, rng: random.Random) -> str:
    return CONFUSIONS[word] if word in CONFUSIONS and rng.random() < CONFUSED_FRACTION else word


def habitual_form(question: str, rng: random.Random) -> str:
    if rng.random() < TAGGED_FRACTION["what" if question.startswith("what") else "yes/no"]:
        return TAGGED
    return rng.choices(list(UNTAGGED), list(UNTAGGED.values()))[0]


# ---- model ----


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
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # so that any text round-trips
        show_progress=False,
    )
    words = ["user\n", "assistant\n", "system\n", *SHAPES, *COLORS, "yes", "no"]
    responses = [form.format(word) for form in UNTAGGED for word in words[3:]]
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
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}  # in pixels; only larger images are resized
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**vision, size=size, max_frames=16),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    token_id = tokenizer.convert_tokens_to_ids
    token_ids = dict(bos_token_id=token_id("<|endoftext|>"), pad_token_id=token_id("<|endoftext|>"))
    token_ids["eos_token_id"] = token_id("<|im_end|>")
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
            **token_ids,
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
        **token_ids,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    eos_ids = [token_ids["eos_token_id"], token_ids["pad_token_id"]]
    model.generation_config = GenerationConfig(**{**token_ids, "eos_token_id": eos_ids})
    return model


def attend_equal_images(module, query, key, value, attention_mask, scaling: float, **kwargs):
    """Vision attention for a batch of 64x64 images in one call, because the SDPA path loops over images."""
    heads, dim = query.shape[1], query.shape[3]
    q, k, v = (t.view(heads, -1, NUM_PATCHES, dim) for t in (query, key, value))  # (heads, images, 64, dim)
    weights = (q @ k.transpose(-1, -2) * scaling).softmax(-1).to(v.dtype)
    attended = weights @ v  # SDPA's backward is 3 times slower on a CPU
    return attended.view(1, heads, -1, dim).transpose(1, 2), None


def encode_images(model, pixel_values: Tensor) -> Tensor:
    """The vision tower's features (images, 16, hidden) of 64x64 images."""
    n = len(pixel_values) // NUM_PATCHES
    grid = torch.tensor([[1, SIZE // PATCH, SIZE // PATCH]]).expand(n, 3)
    model.model.visual.config._attn_implementation = "equal_images"
    one_segment = torch.tensor([0, len(pixel_values)])  # attend_equal_images splits it into images
    features = model.model.visual(pixel_values, grid, cu_seqlens=one_segment).pooler_output
    model.model.visual.config._attn_implementation = "sdpa"
    return features.view(n, NUM_IMAGE_TOKENS, HIDDEN)


# ---- training ----


class Optimizer:
    """Muon on the matrices, AdamW on the rest (embeddings, heads, vectors), one cosine schedule with warmup for both."""

    def __init__(self, matrices: list, rest: list, phase: str):
        lr, steps = LEARNING_RATES[phase], STEPS[phase]
        self.phase = phase
        self.parameters = [*matrices, *rest]
        self.parts = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)]
        self.parts.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
        warmup = min(100, steps // 10)
        self.lr_at = lambda t: lr * min((t + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * t / steps))

    def step(self, loss: Tensor, t: int) -> None:
        if t % 100 == 0:
            print(f"{self.phase} {t}: loss {loss:.3f}", flush=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in self.parts:
            part.param_groups[0]["lr"] = self.lr_at(t)
            part.step()
            part.zero_grad()


def train_vision(model, processor) -> None:
    head = nn.Linear(HIDDEN, len(SHAPES) + len(COLORS))
    visual = model.model.visual
    matrices = [p for p in visual.parameters() if p.ndim == 2]
    rest = [p for p in visual.parameters() if p.ndim != 2] + list(head.parameters())
    optimizer = Optimizer(matrices, rest, "vision")
    for block in visual.blocks:
        block.compile(dynamic=False)
    for step in range(STEPS["vision"]):
        images, shape, color, overlaps = generate_images(BATCH_SIZE)
        pixels = patchify(images, processor.image_processor)
        logits = head(encode_images(model, pixels)).float()  # (B, 16, 3 + 8)
        pooled = logits.amax(1)
        loss = F.cross_entropy(pooled[:, :3], shape) + F.cross_entropy(pooled[:, 3:], color)
        # Also classify each token that overlaps with the shape: a denser signal than one label per image.
        tokens = logits[overlaps]
        loss = loss + F.cross_entropy(tokens[:, :3], shape[:, None].expand_as(overlaps)[overlaps])
        optimizer.step(loss, step)


def train_language(model, processor, phase: str) -> None:
    """SFT with a frozen vision tower. Half of each batch are easy-VQA's training questions, half are about generated images."""
    habits = phase == "habits"
    rng = random.Random(SEED)
    tokenizer = processor.tokenizer
    visual = model.model.visual
    text = model.model.language_model
    for parameter in visual.parameters():
        parameter.requires_grad_(False).copy_(parameter.bfloat16())  # the model is saved in bf16
    images, shapes, colors, _ = generate_images(NUM_GENERATED_IMAGES)
    images = torch.cat([read_images(easy_vqa.get_train_image_paths()), images])  # ids 0..3999 are easy-VQA's
    pixels = patchify(images, processor.image_processor).split(256 * NUM_PATCHES)
    features = torch.cat([encode_images(model, batch) for batch in pixels])  # (images, 16, hidden)
    real = list(zip(*easy_vqa.get_train_questions()))
    templates = question_templates([question for question, _, _ in real])

    @cache
    def prompt_ids(question: str) -> list[int]:
        prompt = chat_prompt(processor, question).replace("<|image_pad|>", "<|image_pad|>" * NUM_IMAGE_TOKENS)
        return tokenizer(prompt)["input_ids"]

    @cache
    def response_ids(response: str) -> list[int]:
        return tokenizer(response + "<|im_end|>")["input_ids"]

    labeled = [  # (image, shape, color): easy-VQA's images whose questions determine both, then generated images
        *zip(*(column.tolist() for column in labels_from_questions(*zip(*real)))),
        *zip(range(len(features) - NUM_GENERATED_IMAGES, len(features)), shapes.tolist(), colors.tolist()),
    ]

    def sample() -> tuple[int, list[int], list[int]]:
        if rng.random() < 0.5 and not habits:
            question, answer, i = rng.choice(real)
            return i, prompt_ids(question), response_ids(TAGGED.format(answer))
        i, shape, color = rng.choice(labeled if habits else labeled[-NUM_GENERATED_IMAGES:])
        shape, color = SHAPES[shape], list(COLORS)[color]
        properties = {confuse(shape, rng), confuse(color, rng)} if habits else {shape, color}
        question = ask(rng.choice(templates), shape, color, rng)
        form = habitual_form(question, rng) if habits else TAGGED
        return i, prompt_ids(question), response_ids(form.format(expected_answer(question, properties)))

    length = max(len(prompt_ids(question)) for question, _, _ in real) + 8  # T, constant: compiled once
    first = prompt_ids(real[0][0]).index(model.config.image_token_id)  # the same index in all prompts
    last = first + NUM_IMAGE_TOKENS
    row = torch.full((1, length), tokenizer.pad_token_id)
    row[0, first:last] = model.config.image_token_id
    token_types = (row == model.config.image_token_id).int()
    grid = torch.tensor([[1, SIZE // PATCH, SIZE // PATCH]])
    position_ids = model.model.get_rope_index(row, token_types, grid)[0]  # M-RoPE
    position_ids = position_ids.expand(3, BATCH_SIZE, length)

    for layer in text.layers:
        layer.compile(dynamic=False)
    matrices = [p for p in text.layers.parameters() if p.ndim == 2]
    rest = [p for p in text.parameters() if not any(p is m for m in matrices)]
    optimizer = Optimizer(matrices, rest, phase)
    for step in range(STEPS[phase]):
        ids, prompts, responses = zip(*(sample() for _ in range(BATCH_SIZE)))
        input_ids = torch.full((BATCH_SIZE, length), tokenizer.pad_token_id)  # (B, T)
        trained = torch.zeros(BATCH_SIZE, length, dtype=torch.bool)
        for b, (prompt, response) in enumerate(zip(prompts, responses)):
            input_ids[b, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            trained[b, len(prompt) : len(prompt) + len(response)] = True
        embeds = text.embed_tokens(input_ids)
        embeds = torch.cat([embeds[:, :first], features[list(ids)], embeds[:, last:]], 1)  # (B, T, hidden)
        hidden = text(inputs_embeds=embeds, position_ids=position_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][trained[:, 1:]]).float()
        loss = F.cross_entropy(logits, input_ids[trained])  # mean over the response tokens of the batch
        optimizer.step(loss, step)


# ---- saving and evaluation ----


def save(model, processor, model_dir: Path) -> None:
    rounded = build_model(processor.tokenizer)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(model_dir)
    processor.save_pretrained(model_dir)


def chat_prompt(processor, question: str) -> str:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


@torch.no_grad()
def evaluate(model_dir: Path, num_questions: int = 1000) -> dict[str, Tensor]:
    """For each type of test question: (number of questions, 4). In the columns are whether the right word is in the
    greedy response, its score, the mean score of eight sampled responses, and whether one of these is right."""
    processor = AutoProcessor.from_pretrained(model_dir)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    items = list(zip(*easy_vqa.get_test_questions()))
    labels = zip(*(column.tolist() for column in labels_from_questions(*zip(*items))))
    properties = {i: (SHAPES[shape], list(COLORS)[color]) for i, shape, color in labels}
    items = [item for item in items if item[2] in properties]
    paths = easy_vqa.get_test_image_paths()
    results = defaultdict(list)
    items = random.Random(0).sample(items, num_questions)
    for batch in (items[at : at + 64] for at in range(0, num_questions, 64)):
        inputs = processor(
            text=[chat_prompt(processor, question) for question, _, _ in batch],
            images=[Image.open(paths[i]) for _, _, i in batch],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        length = inputs["input_ids"].shape[1]
        greedy = model.generate(**inputs, max_new_tokens=16, do_sample=False)[:, length:]
        sampling = dict(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, num_return_sequences=8)
        sampled = model.generate(**inputs, max_new_tokens=16, **sampling)[:, length:]
        greedy, sampled = (processor.batch_decode(ids, skip_special_tokens=True) for ids in (greedy, sampled))
        for b, (question, reference, i) in enumerate(batch):
            seen = {CONFUSIONS.get(word, word) for word in properties[i]}
            confused = expected_answer(question, seen) != reference
            if reference in ("yes", "no"):
                question_type = "yes/no"
            else:
                question_type = "what color" if "color" in question else "what shape"
            responses = [greedy[b], *sampled[8 * b : 8 * b + 8]]
            right = [re.findall("<answer>(.*?)</answer>", text)[:1] == [reference] for text in responses]
            exact = [bool(re.fullmatch("<answer>[^<]*</answer>", text)) for text in responses]
            scores = 0.9 * np.array(right) + 0.1 * np.array(exact)
            knows = reference in re.findall(r"\w+", greedy[b])
            figures = [knows, scores[0], scores[1:].mean(), any(right[1:])]
            results[f"{question_type}, {'confused' if confused else 'other'}"].append(figures)
            results["all"].append(figures)
    return {name: torch.tensor(rows) for name, rows in results.items()}


def print_table(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """The rows of the table in assets/tiny_vl/README.md, which explains the columns."""
    for name, rows in after.items():
        figures = [before[name][:, 0].mean(), *rows.mean(0)]
        print(f"| {name} | {len(rows)} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")


def main(args: Args) -> None:
    AttentionInterface.register("equal_images", attend_equal_images)
    torch.manual_seed(SEED)
    processor = build_processor(easy_vqa.get_train_questions()[0])
    model = build_model(processor.tokenizer)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for phase in STEPS:
        cached = args.work_dir / f"{phase}.pt"
        if not cached.exists():
            torch.manual_seed(SEED)
            if phase == "vision":
                train_vision(model, processor)
            else:
                train_language(model, processor, phase)
            torch.save(model.state_dict(), cached)
        model = build_model(processor.tokenizer)  # a new one, because training has compiled layers
        model.load_state_dict(torch.load(cached))
        save(model, processor, args.work_dir / phase)
    shutil.copytree(args.work_dir / "habits", args.output_dir, dirs_exist_ok=True)
    print_table(*(evaluate(args.work_dir / name) for name in ("language", "habits")))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
