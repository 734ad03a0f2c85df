"""tools/anatomy.py: one command writes the page, which needs no other file and whose numbers are consistent."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_page_of_a_step(tmp_path):
    command = [sys.executable, str(ROOT / "tools/anatomy.py"), "--folder", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    page = (tmp_path / "anatomy.html").read_text().replace("\N{MINUS SIGN}", "-").replace(",", "")
    assert not re.search(r"<script|https?:|src=\"(?!data:)|url\(|\bnan\b|tensor\(", page)
    rows = re.findall(r'class="R">(.+?)<.*?class="baseline">(.+?)<.*?class="advantage.*?">(.+?)<', page, re.S)
    rewards, baselines, advantages = ([float(x) for x in column] for column in zip(*rows))
    assert len(rows) == 8 and max(advantages) > 0.05 and abs(sum(advantages)) < 0.01
    for reward, baseline, advantage in zip(rewards, baselines, advantages):
        mean_of_others = (sum(rewards) - reward) / 7
        assert [baseline, advantage] == pytest.approx([mean_of_others, reward - mean_of_others], abs=0.002)
    packed, padded = re.search(r"through the model</td><td>(\d+)</td><td>(\d+)</td>", page).groups()
    assert f"The pack: {packed} tokens" in page and int(padded) > 2 * int(packed)
