"""The measured numbers on the pages are those of docs/results.json."""

import json
import re

import pytest
from conftest import ROOT, SCRIPTS

RESULTS = json.loads((ROOT / "docs/results.json").read_text())


@pytest.mark.parametrize("script", [*SCRIPTS, "pipeline"])
def test_tables_have_the_numbers_of_the_json(script):
    lines = (ROOT / f"docs/{script}.md").read_text().splitlines()
    for run, values in RESULTS[script].items():
        (line,) = [x for x in lines if x.startswith(f"| {run.removeprefix('seed ')} |")]
        known = [float(x) for x in re.findall(r"\d+\.\d+", json.dumps(values))]
        shown = [float(x) for x in re.findall(r"\d+\.\d+", line.partition(" | ")[2])]
        assert len(shown) > 2
        for number in shown:  # in the same order; the page may leave some out
            assert number in known, line
            known = known[known.index(number) + 1 :]


def test_benchmarks_are_those_of_the_json():
    """README shows a part of the tables of docs/benchmarks.md."""
    benchmarks = (ROOT / "docs/benchmarks.md").read_text()
    for case, numbers in RESULTS["benchmarks"].items():
        (row,) = re.findall(rf"^\| {re.escape(case)} \| (.*) \|$", benchmarks, re.M)
        assert [float(x) for x in re.findall(r"[\d.]+", row)] == numbers, case
    section = (ROOT / "README.md").read_text().split("## Compared with TRL")[1].split("\n\n")[1]
    known = {x for numbers in RESULTS["benchmarks"].values() for x in numbers}
    for row in section.splitlines()[2:]:
        assert {float(x) for x in re.findall(r"[\d.]+", row.partition(" | ")[2])} <= known, row
