"""Different rewards for different kinds of rows, chosen by the dataset's column `label`:

    python rloo.py --dataset mixed.jsonl --rewards examples/recipe.py:by_label --reward-weights 1

A row of another kind gets None: this reward does not apply, and the row is left out if no other one does.
"""


def right_number(text: str, answer: str) -> float:
    words = text.replace(",", "").split()
    return float(bool(words) and words[-1].rstrip(".") == str(answer))


def right_choice(text: str, answer: str) -> float:
    return float(text.strip()[:1].lower() == str(answer).strip()[:1].lower())


def brevity(text: str, answer: str) -> float:
    return -len(text) / 1000


RECIPE = {  # label: [(reward, weight), ...]
    "math": [(right_number, 1.0), (brevity, 0.1)],
    "choice": [(right_choice, 1.0)],
}


def by_label(texts: list[str], answer: list, label: list[str], log_metric, **columns) -> list[float | None]:
    scores = []
    for text, reference, kind in zip(texts, answer, label):
        values = [weight * reward(text, reference) for reward, weight in RECIPE.get(kind, [])]
        scores.append(sum(values) if values else None)
        if values:
            log_metric(f"reward/{kind}", scores[-1])
    return scores
