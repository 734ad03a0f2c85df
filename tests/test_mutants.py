"""tools/mutants.txt: each mutant changes one text that occurs once, and names a test that exists."""

import re

import pytest
from conftest import ROOT

from tools.mutants import read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_texts_occur_once(file):
    source = (ROOT / file).read_text()
    counts = [(source.count(m.before), m.before) for m in MUTANTS if m.file == file]
    wrong = [found for found in counts if found[0] != 1]
    assert wrong == []


def test_tests_exist_and_mutants_differ():
    for mutant in MUTANTS:
        path, function = mutant.test.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / "tests" / path).read_text(), re.M), mutant.test
    assert len({(m.file, m.before, m.after) for m in MUTANTS}) == len(MUTANTS) >= 60
    assert {m.file for m in MUTANTS[:10]} == {"rloo.py"}, "docs/exercises.md has the first ten as a task"
