"""Preference pairs for reward_bt.py: a sentence is preferred to itself with two letters of a word swapped.

    python examples/spelling_pairs.py spelling        # writes spelling/train.jsonl and spelling/test.jsonl

No word of three letters or more stands in both files: who judges the test sentences has to know spelling.
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
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
generator = random.Random(0)


def swap_letters(word: str) -> str:
    places = [i for i in range(1, len(word) - 2) if word[i] != word[i + 1]]
    i = generator.choice(places)
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


for name, half, count in (("train", slice(0, 12), 2000), ("test", slice(12, 24), 500)):
    with (folder / f"{name}.jsonl").open("w") as file:
        for _ in range(count):
            words = [generator.choice(kind[half]) for kind in (ADJECTIVES, NOUNS, VERBS, ADJECTIVES, OBJECTS)]
            k = generator.randrange(5)
            wrong = [swap_letters(word) if i == k else word for i, word in enumerate(words)]
            good, bad = ("A {} {} {} the {} {}.".format(*w) for w in (words, wrong))
            file.write(json.dumps({"prompt": "Well spelled? ", "chosen": good, "rejected": bad}) + "\n")
