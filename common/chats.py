"""Dataset rows and chats: messages whose content is a list of parts, with loaded media."""

import http.client
import io
import math
import re
import urllib.request
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import transformers
from PIL import Image

from common import require, stop


class RowError(Exception):
    """A dataset row can't be used, and is skipped."""


# What loading and encoding a row may raise. `datasets` raises a SyntaxError for a broken PNG.
ROW_ERRORS = (RowError, OSError, SyntaxError, Image.DecompressionBombError)


def load_rows(args, source: str, split: str):
    """Load a `datasets.Dataset`, and rename its columns by --columns."""
    import datasets
    import pandas

    datasets.disable_progress_bars()
    file_format = Path(source).suffix[1:].replace("jsonl", "json")
    try:
        if source == "easy-vqa":
            rows = easy_vqa_rows(split)
        elif file_format == "csv":  # with nullable types: otherwise a gap in a column turns 3 into 3.0
            rows = datasets.Dataset.from_pandas(pandas.read_csv(source, dtype_backend="numpy_nullable"))
        elif file_format in ("json", "parquet"):
            rows = datasets.load_dataset(file_format, data_files=source, split="train")
        elif Path(source).is_dir():
            rows = datasets.load_from_disk(source)
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            path, _, config = source.partition(":")  # openai/gsm8k:main
            rows = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:
        stop(f"can't load the dataset {source} (split {split}): {error.__cause__ or error}")
    for pair in args.columns:
        new, _, old = pair.partition("=")
        if old in rows.column_names and new not in ("", old):
            replaced = [new] if new in rows.column_names else []
            rows = rows.remove_columns(replaced).rename_column(old, new)
        elif source == args.dataset or new not in rows.column_names:  # evaluation data may have it
            stop(f"--columns {pair} must be NEW=OLD; {source} has {rows.column_names}")
    require(len(rows) > 0, f"{source} (split {split}) has no rows")
    return rows


def easy_vqa_rows(split: str):
    """64 x 64 images of shapes with questions, from the package easy-vqa."""
    import datasets
    import easy_vqa

    questions, answers, image_ids = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    images = [str(paths[image_id]) for image_id in image_ids]
    return datasets.Dataset.from_dict({"prompt": questions, "image": images, "answer": answers})


def build_messages(args, row: dict, data_dir: Path, tokenizer) -> list[dict]:
    """Convert a dataset row to messages whose content is a list of parts, with loaded media.

    {"prompt": "Is <image> red?", "image": "a.png"} -> [{"role": "user", "content": [{"type": "text",
    "text": "Is "}, {"type": "image", "image": ...}, {"type": "text", "text": " red?"}]}]

    Media of the columns image(s) and video(s) replace, in order, the markers <image> and
    <video> and the parts of these types that have no media. If a chat has no such markers or
    parts, media precede the text of its first user message. args: the script's."""
    chat = row["prompt"]
    if isinstance(chat, str | int | float) and chat != "":
        chat = [{"role": "user", "content": str(chat)}]
    if not chat or not all(isinstance(x, dict) and {"role", "content"} <= x.keys() for x in chat):
        raise RowError("its prompt is empty, or has a message without the keys role and content")
    if any(message.get("tool_calls") for message in chat):
        raise RowError("tool_calls are not supported: write the calls into the content")
    if args.system_prompt and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": args.system_prompt}, *chat]
    messages = [{"role": x["role"], "content": split_markers(x["content"] or [])} for x in chat]
    users = [message for message in messages if message["role"] == "user"]
    for kind in ("image", "video"):
        media = row.get(kind) or row.get(f"{kind}s") or []
        media = media if isinstance(media, list) else [media]
        parts = [part for message in messages for part in message["content"] if part["type"] == kind]
        placeholders = [part for part in parts if kind not in part]
        if media and not parts and users:
            placeholders = [{"type": kind} for _ in media]
            users[0]["content"] = placeholders + users[0]["content"]
        if len(placeholders) != len(media):
            raise RowError(f"{len(placeholders)} <{kind}> markers, but {len(media)} {kind}s")
        for part, source in zip(placeholders, media):
            part[kind] = source
    load_media(args, messages, data_dir, tokenizer)
    return messages


def split_markers(content: str | list[dict]) -> list[dict]:
    """The content of a message as a list of parts: "a <image>" -> [text part "a ", image part]."""
    if isinstance(content, str | int | float):
        content = [{"type": "text", "text": str(content)}]
    if not all(isinstance(part, dict) and part.get("type") for part in content):
        raise RowError("content must be a string, or a list of parts with a type")
    parts = []
    for part in content:
        if part["type"] != "text":  # `datasets` fills missing keys with None
            part = {name: value for name, value in part.items() if value is not None}
            for name in {"url", "path"} & part.keys():  # as in transformers' chats
                part[part["type"]] = part.pop(name)
            parts.append(part)
            continue
        for piece in filter(None, re.split("(<image>|<video>)", str(part.get("text") or ""))):
            if piece in ("<image>", "<video>"):
                parts.append({"type": piece[1:-1]})
            elif parts and parts[-1]["type"] == "text":  # joined: a special token may span both
                parts[-1]["text"] += piece
            else:
                parts.append({"type": "text", "text": piece})
    return parts


def load_media(args, messages: list[dict], data_dir: Path, tokenizer) -> None:
    """Load the images and videos of messages, and escape special tokens in their texts, in place."""
    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for part in [part for message in messages for part in message["content"]]:
        if part["type"] == "text":
            part["text"] = escape_special_tokens(part["text"], special_tokens)
        elif part["type"] == "image":
            part["image"] = load_image(part["image"], data_dir, args.max_pixels)
        elif part["type"] == "video":
            part["video"], part["metadata"] = load_video(part["video"], data_dir, args.video_fps)
        else:
            raise RowError(f"content of type {part['type']} is not supported")


def load_image(source, data_dir: Path, max_pixels: int | None) -> Image.Image:
    """An RGB image from a PIL image, bytes, {"bytes", "path"}, a path relative to data_dir, or a URL.

    It is scaled down to max_pixels (width * height)."""
    if isinstance(source, dict):  # as `datasets` stores images
        source = source.get("bytes") or source.get("path")
    try:
        if isinstance(source, str) and source.startswith(("http://", "https://", "data:image/")):
            source = urllib.request.urlopen(source, timeout=60).read()
        if isinstance(source, bytes):
            source = Image.open(io.BytesIO(source))
        elif isinstance(source, str):
            source = Image.open(data_dir / source)
        if isinstance(source, Image.Image) and source.mode == "I;16":  # else clipped to white
            source = Image.fromarray((np.asarray(source) / 257).astype(np.uint8))
        image = transformers.image_utils.load_image(source)  # RGB, with EXIF orientation applied
    except (TypeError, ValueError, RuntimeError, SyntaxError, http.client.HTTPException) as error:
        raise RowError(f"can't load an image: {error}") from error
    scale = math.sqrt((max_pixels or math.inf) / (image.width * image.height))
    if scale < 1:
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    return image


def load_video(source: str, data_dir: Path, fps: float) -> tuple[np.ndarray, Any]:
    """Frames (F, height, width, 3) of a video, sampled at `fps`, and metadata with their times."""
    try:
        return transformers.video_utils.load_video(str(data_dir / source), fps=fps, backend="pyav")
    except (TypeError, ValueError, LookupError, ZeroDivisionError) as error:
        raise RowError(f"can't load the video {source}: {error}") from error


def escape_special_tokens(text: str, special_tokens: list[str]) -> str:
    """Break up special tokens, so that data can't end a turn: "<|im_end|>" -> "< |im_end|>"."""
    special_tokens = [token.strip() for token in special_tokens if token.strip()]
    while found := [token for token in special_tokens if token in text]:  # breaking one up may form another
        for token in found:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else " ")
    return text


def encode_chat(processor, messages: list[dict], **template) -> dict:
    """Apply the chat template and the processor, or a text model's tokenizer, to messages.

    A video part holds frames and their metadata, so the processor must not sample frames again."""
    parts = [part for message in messages for part in message["content"]]
    metadata = [part["metadata"] for part in parts if part["type"] == "video"]
    if metadata:
        template["processor_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
    if not hasattr(processor, "tokenizer"):
        if any(part["type"] != "text" for part in parts):
            raise RowError("a text model can't read images and videos")
        texts = ["".join(part["text"] for part in message["content"]) for message in messages]
        messages = [message | {"content": text} for message, text in zip(messages, texts)]
        if processor.chat_template is None:  # then texts are concatenated
            return processor("".join(texts), return_tensors="pt")
    template |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return apply_template(processor, messages, template)


def tokenize_chat(processor, messages: list[dict], **template) -> list[int]:
    """Token ids of a chat with one token per image, so that images needn't be processed."""
    if not hasattr(processor, "tokenizer"):
        return encode_chat(processor, messages, **template)["input_ids"][0].tolist()
    template |= {"chat_template": processor.chat_template, "return_dict": False}
    return apply_template(processor.tokenizer, messages, template)


def apply_template(processor, messages: list[dict], template: dict) -> Any:
    """Apply the chat template. Errors of the template or of an image processor become a RowError."""
    try:
        return processor.apply_chat_template(messages, **template)
    except (ValueError, jinja2.TemplateError) as error:
        raise RowError(str(error)) from error


def row_columns(row: dict) -> dict[str, Any]:
    """Texts and finite numbers of a row for logs, without data URLs."""
    texts = {name: x for name, x in row.items() if isinstance(x, str) and "data:image/" not in x}
    numbers = {name: x for name, x in row.items() if isinstance(x, int | float) and math.isfinite(x)}
    return texts | numbers


def trajectory_columns(messages: list[dict]) -> dict[str, str]:
    """The texts of a trajectory for logs: {"turn/1": text, "observation/1": text, "turn/2": text}."""
    kinds = ("turn", "observation")
    return {f"{kinds[k % 2]}/{k // 2 + 1}": content_text(x) for k, x in enumerate(messages)}


def content_text(message: dict) -> str:
    """The content of a message as text, with markers for media."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"<{part['type']}>") for part in content)
