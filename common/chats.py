"""Chats: messages whose content is a list of parts, with text or loaded media."""

import math

from PIL import Image


def encode_chat(processor, messages: list[dict], **template) -> dict:
    """Apply the chat template and the processor, or a text model's tokenizer, to messages.

    A video part holds frames and their metadata, so the processor must not sample frames again."""
    parts = [part for message in messages for part in message["content"]]
    metadata = [part["metadata"] for part in parts if part["type"] == "video"]
    if metadata:
        template["processor_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
    if not hasattr(processor, "tokenizer"):
        if any(part["type"] != "text" for part in parts):
            raise ValueError("a text model can't read images and videos")
        texts = ["".join(part["text"] for part in message["content"]) for message in messages]
        messages = [message | {"content": text} for message, text in zip(messages, texts)]
        if processor.chat_template is None:
            return processor("".join(texts), return_tensors="pt")
    template |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(messages, **template)


def escape_special_tokens(text: str, special_tokens: list[str]) -> str:
    """Break up special tokens, so that data can't end a turn: "<|im_end|>" -> "< |im_end|>"."""
    for token in special_tokens:
        if token.strip() and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else " ")
            return escape_special_tokens(text, special_tokens)  # breaking one up may form another
    return text


def scale_image(image: Image.Image, max_pixels: int | None) -> Image.Image:
    """Scale an image down to at most max_pixels (width * height). None: unchanged."""
    if max_pixels is None or image.width * image.height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (image.width * image.height))
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))


def build_parts(content, tokenizer, max_pixels: int | None = None) -> list[dict]:
    """The content of an observation, a string or a list of parts with PIL images, as a list of parts."""
    if not isinstance(content, str | list):
        types = "None, a string, a list of parts or a message"
        raise TypeError(f"step must return {types}, not {type(content).__name__}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    parts = []
    for part in content:
        if part["type"] == "text":
            part = {"type": "text", "text": escape_special_tokens(part["text"], special_tokens)}
        else:
            image = part["image"].convert("RGB")
            part = {"type": "image", "image": scale_image(image, max_pixels)}
        parts.append(part)
    return parts


def trajectory_columns(messages: list[dict]) -> dict[str, str]:
    """The texts of a trajectory for logs: {"turn/1": text, "observation/1": text, "turn/2": text}."""
    columns = {}
    for k, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "<image>") for part in content)
        kind = "turn" if k % 2 == 0 else "observation"
        columns[f"{kind}/{k // 2 + 1}"] = content
    return columns
