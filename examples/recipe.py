"""Different rewards for different tasks in one dataset, chosen by its column `label`:

    python rloo.py --dataset mixed.jsonl --rewards examples/recipe.py:by_label

A row with an unknown label gets None: this reward does not apply, and if no other one does either, the row
is excluded from the update.
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
    for text, expected, task in zip(texts, answer, label):
        values = [weight * reward(text, expected) for reward, weight in RECIPE.get(task, [])]
        scores.append(sum(values) if values else None)
        if values:
            log_metric(task, scores[-1])
    return scores
