r"""A game of several turns: the model guesses a number, and an environment answers "higher" or "lower".

    python examples/guess_number.py guess       # writes guess/game.jsonl and guess/demonstrations.jsonl
    python grm_sft.py --dataset guess/demonstrations.jsonl --total-steps 200 --run-name guess_sft
    python ppo_vl.py --model runs/guess_sft/checkpoint-200 --dataset guess/game.jsonl \
        --eval-dataset guess/game.jsonl --eval-num-samples 64 --eval-steps 0 --max-turns 3 \
        --environment examples/guess_number.py:GuessNumber --rewards examples/guess_number.py:right_guess \
        --max-response-length 48 --kl-coef 0 --learning-rate 3e-4 --total-steps 40 --num-epochs 2 \
        --train-batch-size 128 --seed 1 --critic-learning-rate 1e-3 --gae-lambda 0.95

For RLOO, run rloo.py without the last two flags. docs/ppo_vl.md has results. The demonstrations teach the
rules, but no strategy: each guess is any number that the answers allow.
"""

import json
import random
import sys
from pathlib import Path

MAX_NUMBER, MAX_GUESSES = 7, 3  # three guesses are enough, but only if the first one is 4
PROMPT = f"Guess a number from 1 to {MAX_NUMBER}."


class GuessNumber:
    def reset(self, answer: str, **row) -> None:
        self.number = int(answer)

    def step(self, response: str) -> str | None:
        if not response.isdecimal():
            return "no"
        guess = int(response)
        if guess == self.number:
            return None  # the end
        return "higher" if guess < self.number else "lower"


def right_guess(texts: list[str], answer: list[str], **columns) -> list[float]:
    """1 if the last guess is the number, else 0."""
    return [float(text == number) for text, number in zip(texts, answer)]


def make_demonstration(rng: random.Random) -> dict:
    game = GuessNumber()
    game.reset(answer=str(rng.randint(1, MAX_NUMBER)))
    messages = [{"role": "user", "content": PROMPT}]
    low, high = 1, MAX_NUMBER
    for _ in range(MAX_GUESSES):
        guess = rng.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        answer = game.step(str(guess))
        if answer is None:
            break
        low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        messages.append({"role": "user", "content": answer})
    return {"messages": messages}


def main(output_dir: Path) -> None:
    rng = random.Random(0)
    files = {"game": [{"prompt": PROMPT, "answer": str(number)} for number in range(1, MAX_NUMBER + 1)]}
    files["demonstrations"] = [make_demonstration(rng) for _ in range(4000)]
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (output_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
