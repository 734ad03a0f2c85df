"""Convert a text reward model trained by reward_bt.py to transformers' classifier with one label:

python examples/export_classifier.py runs/NAME/checkpoint-400 classifier

AutoModelForSequenceClassification, TRL and vLLM load the result. transformers has no such class for
vision-language models.
"""

import sys
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401  repairs torchvision with a CPU-only torch, so it comes before transformers

# isort: split
import transformers  # noqa: E402


def choose_pad_token(tokenizer) -> int:
    """Id of a special token that does not end a chat.

    The classifier reads its reward at the last token that is not the pad token. If chats end with
    EOS and EOS is the pad token, it would miss that EOS."""
    last_token = tokenizer.eos_token_id  # without a chat template, reward_bt.py appends it
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        last_token = tokenizer.apply_chat_template(chat, return_dict=False)[-1]
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    candidates = [i for i in [tokenizer.pad_token_id, *special] if i not in (None, last_token)]
    if not candidates:
        raise SystemExit("all special tokens end chats; add one that can serve as pad token")
    return candidates[0]


def export(checkpoint: str, target: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.pad_token_id = choose_pad_token(tokenizer)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype="auto"
    )
    head = load_file(Path(checkpoint) / "score.safetensors")
    model.score.load_state_dict({"weight": head["score.weight"]})
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    export(*sys.argv[1:])
