r"""Long answers of mixed difficulty for a small text model, assets/chain_sums.

    python rloo.py --model assets/chain_sums --dataset assets/chain_sums/train.jsonl \
        --eval-dataset assets/chain_sums/test.jsonl --rewards examples/chain_sums.py:right_sum \
        --max-response-length 64 --train-batch-size 64 --num-epochs 1 --learning-rate 3e-4 --kl-coef 0 \
        --total-steps 30 --eval-steps 5 --eval-num-samples 4 --seed 1      # half a minute on one core

docs/exercises.md has results, also of GRPO and PPO. This file made the model and the data:

    python examples/chain_sums.py models/chain       # two minutes; rounding makes each model differ

The answer is the last digit of a sum of 2 to 9 digits. The model guesses it, or adds one digit at a time:

    a7b4c9:  ->  =0                70% of the responses; 20% are right with two digits, else 10%
    a7b4c9:  ->  b7+4=1c1+9=0      6 tokens per step: name of the digit, total + digit = new total

For half of the pairs of total and digit, the new total is one too high in 75% of the steps; otherwise it is
random in 2%. So one reward per response has to teach two things: to work the answer out, and which steps were
wrong. Questions are random: 17% of those in test.jsonl are in train.jsonl, most of them with 2 or 3 digits.
"""

import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401  repairs torchvision with a CPU-only torch, so it comes before transformers

# isort: split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

NAMES = "abcdefghi"  # of the digits
VOCABULARY = ["<pad>", "<eos>", *"0123456789+=:", *NAMES]
PAIRS = [(total, digit) for total in range(10) for digit in range(10)]
HARD_PAIRS = set(random.Random(0).sample(PAIRS, 50))
MAX_LENGTH = 2 * 9 + 1 + 6 * 8 + 1  # tokens: question, chain, <eos>
BATCH_SIZE = 128
HABIT_STEPS = 150


def right_sum(texts: list[str], answer: list[str], prompts: list[str], log_metric, **columns) -> list[float]:
    """1 if the response ends with the right digit, else 0. Logs the mean for each number of digits, too."""
    rewards = [float(text.endswith(expected)) for text, expected in zip(texts, answer)]
    for prompt, reward in zip(prompts, rewards):
        log_metric(f"{len(prompt) // 2}_digits", reward)
    return rewards


def question(digits: list[int]) -> str:
    return "".join(f"{name}{digit}" for name, digit in zip(NAMES, digits)) + ":"


def chain(digits: list[int], rng: random.Random | None = None) -> str:
    """The chain of sums; with rng, a chain with mistakes."""
    total = digits[0]
    text = ""
    for name, digit in zip(NAMES[1:], digits[1:]):
        result = (total + digit) % 10
        if rng and (total, digit) in HARD_PAIRS and rng.random() < 0.75:
            result = (result + 1) % 10
        elif rng and rng.random() < 0.02:
            result = rng.randrange(10)
        text += f"{name}{total}+{digit}={result}"
        total = result
    return text


def demonstration(digits: list[int], rng: random.Random) -> str:
    """A response with both habits. A guess is the result of a chain that is not written."""
    text = chain(digits, rng)
    return f"={text[-1]}" if rng.random() < 0.7 else text


def random_digits(rng: random.Random) -> list[int]:
    return [rng.randrange(10) for _ in range(rng.randint(2, len(NAMES)))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def train(model: Qwen2ForCausalLM, tokenizer, rng: random.Random) -> None:
    """SFT on right chains until the loss is low (about 350 steps), then on responses with both habits."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def take_step(learning_rate: float, has_habits: bool) -> float:
        input_ids = torch.zeros(BATCH_SIZE, MAX_LENGTH, dtype=torch.long)  # (B, L): padding is 0
        is_response = torch.zeros(BATCH_SIZE, MAX_LENGTH, dtype=torch.bool)
        for b in range(BATCH_SIZE):
            digits = random_digits(rng)
            prompt = question(digits)
            response = demonstration(digits, rng) if has_habits else chain(digits)
            ids = tokenizer(f"{prompt}{response}<eos>")["input_ids"]
            input_ids[b, : len(ids)] = torch.tensor(ids)
            is_response[b, len(prompt) : len(ids)] = True
        logits = model(input_ids[:, :-1]).logits  # (B, L - 1, V)
        loss = F.cross_entropy(logits[is_response[:, 1:]], input_ids[is_response])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step, loss = 0, math.inf
    while loss > 0.02 and step < 1000:
        step += 1
        loss = take_step(3e-3 * min(1, step / 50), has_habits=False)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    for step in range(1, HABIT_STEPS + 1):
        take_step(3e-3 * (1 - step / HABIT_STEPS), has_habits=True)


def main(output_dir: Path) -> None:
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    rng = random.Random(1)
    train(model, tokenizer, rng)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    for split, num_rows in (("train", 4000), ("test", 250)):
        rows = [random_digits(rng) for _ in range(num_rows)]
        rows = [{"prompt": question(digits), "answer": chain(digits)[-1]} for digits in rows]
        (output_dir / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
