"""Preference pairs for reward_bt.py: a sentence is preferred to the same sentence with a misspelled word.

    python examples/spelling_pairs.py spelling        # writes spelling/train.jsonl and spelling/test.jsonl

No word of three letters or more is in both files, so the test pairs measure generalization to new words.
"""

import json
import random
import sys
from pathlib import Path

ADJECTIVES = """famous gentle hungry modern narrow orange polite public silent strange tired wooden
    ancient broken clever distant eager fragile golden honest little patient quick simple""".split()
NOUNS = """teacher doctor farmer student captain sailor painter singer lawyer monkey rabbit tiger
    soldier driver engineer artist builder neighbor dentist baker hunter writer pilot manager""".split()
VERBS = """opened painted carried dropped visited studied cleaned invited watched followed ordered
    noticed bought repaired finished entered borrowed counted gathered ignored washed imagined measured
    promised""".split()
OBJECTS = """window picture basket letter village language kitchen garden machine bridge dinner
    problem bicycle computer building station blanket medicine flowers question cottage mountain ticket
    furniture""".split()
WORD_LISTS = (ADJECTIVES, NOUNS, VERBS, ADJECTIVES, OBJECTS)  # "A famous teacher opened the gentle window."


def swap_letters(word: str, rng: random.Random) -> str:
    """Swap two different letters inside the word."""
    i = rng.choice([i for i in range(1, len(word) - 2) if word[i] != word[i + 1]])
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def main(output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, half, count in (("train", slice(0, 12), 2000), ("test", slice(12, 24), 500)):
        with (output_dir / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                words = [rng.choice(word_list[half]) for word_list in WORD_LISTS]
                k = rng.randrange(5)
                misspelled = [swap_letters(word, rng) if i == k else word for i, word in enumerate(words)]
                chosen, rejected = ("A {} {} {} the {} {}.".format(*w) for w in (words, misspelled))
                row = {"prompt": "Well spelled? ", "chosen": chosen, "rejected": rejected}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
