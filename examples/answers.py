"""Rewards for responses that end with a line "Answer: X": `accuracy` compares words, numbers and letters of
choices, `math` formulas, by math-verify (pip install math-verify). To change them, copy this file.

    python rloo.py ... --rewards examples/answers.py:math --columns prompt=problem \\
        --dataset hiyouga/geometry3k --eval-dataset hiyouga/geometry3k \\
        --system-prompt "Think step by step. End with a line of the form Answer: X, where X is LaTeX."

These flags, after those of docs/recipes.md, make a control on public data. It was not run here.
"""

import re


def last_answer(text: str) -> str:
    parts = re.split(r"(?i)answer\W*:", text)
    return parts[-1].strip().split("\n")[0] if len(parts) > 1 else ""


def normalize(answer) -> str | float:
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", str(answer))
    answer = answer.strip().rstrip(" *.)'\"`$%").lstrip(" *('\"`$").lower()
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer)  # 1,000 is 1000
    try:
        return float(answer)  # 3 equals 3.0
    except ValueError:
        return answer


def is_same(x: str | float, gold: str | float) -> bool:
    if isinstance(gold, float) and isinstance(x, str):  # 5 equals "5 cm", if the column has no unit
        x = normalize(re.sub(r"(?<=\d) ?[a-z°]+[23²³]?$", "", x))
    short, long = sorted((str(x), str(gold)), key=len)
    is_choice = len(short) == 1 and long[0] == short and re.match("[a-z][).:] ", long)  # "B) 12 cm" is B
    return x == gold or bool(is_choice)


def accuracy(texts: list[str], answer: list, log_metric, **columns) -> list[float]:
    said = [last_answer(text) for text in texts]
    log_metric("answered", sum(map(bool, said)) / len(said))  # reward_metrics/answered
    return [float(x != "" and is_same(normalize(x), normalize(gold))) for x, gold in zip(said, answer)]


def math(texts: list[str], answer: list, log_metric, **columns) -> list[float]:
    from math_verify import parse, verify

    said = [last_answer(text).lstrip(" *$").rstrip(" *.$") for text in texts]
    log_metric("answered", sum(map(bool, said)) / len(said))
    pairs = [(str(gold).strip("$"), x) for gold, x in zip(answer, said)]
    return [float(verify(parse(f"${gold}$"), parse(f"${x}$"))) for gold, x in pairs]
