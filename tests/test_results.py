"""The results on the pages of the scripts are those of docs/results.json."""

import json
import re

import pytest
from conftest import ROOT, SCRIPTS

RESULTS = json.loads((ROOT / "docs/results.json").read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_tables_have_the_numbers_of_the_json(script):
    lines = (ROOT / f"docs/{script}.md").read_text().splitlines()
    for run, values in RESULTS[script].items():
        (line,) = [x for x in lines if x.startswith(f"| {run.removeprefix('seed ')} |")]
        known = [float(x) for x in re.findall(r"\d+\.\d+", json.dumps(values))]
        shown = [float(x) for x in re.findall(r"\d+\.\d+", line)]
        assert len(shown) > 2
        for number in shown:  # in the same order; the page may leave some out
            assert number in known, line
            known = known[known.index(number) + 1 :]
