"""tools/anatomy.py: one command writes the page, which needs no other file and whose numbers are consistent."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

COMMITTED = ROOT / "docs/anatomy.html"


@pytest.mark.slow
def test_the_page_of_a_step(tmp_path):
    command = [sys.executable, str(ROOT / "tools/anatomy.py"), "--folder", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    written = (tmp_path / "anatomy.html").read_text()
    page = written.replace("\N{MINUS SIGN}", "-").replace(",", "")
    assert not re.search(r"<script|https?:|src=\"(?!data:)|url\(|\bnan\b|tensor\(", page)
    rows = re.findall(r'class="R">(.+?)<.*?class="baseline">(.+?)<.*?class="advantage.*?">(.+?)<', page, re.S)
    rewards, baselines, advantages = ([float(x) for x in column] for column in zip(*rows))
    assert len(rows) == 8 and max(advantages) > 0.05 and abs(sum(advantages)) < 0.01
    for reward, baseline, advantage in zip(rewards, baselines, advantages):
        mean_of_others = (sum(rewards) - reward) / 7
        assert [baseline, advantage] == pytest.approx([mean_of_others, reward - mean_of_others], abs=0.002)
    packed, padded = re.search(r"through the model</td><td>(\d+)</td><td>(\d+)</td>", page).groups()
    assert f"The pack: {packed} tokens" in page and int(padded) > 2 * int(packed)
    up, down, none = (page.count(f'r="4" fill="var(--{direction})"') for direction in ("up", "down", "none"))
    assert up + down + none == 256 and none > 0 and f"Their {none} advantages are 0" in page
    assert f"{up} responses with A &gt; 0" in page and f"Of {down} with A &lt; 0" in page
    pattern = r"<code>(\w+/\w+)</code></td><td>(.+?)<"
    new, committed = (dict(re.findall(pattern, text)) for text in (written, COMMITTED.read_text()))
    assert list(new) == list(committed), "docs/anatomy.html is older than rloo.py: run tools/anatomy.py"
    assert new["train/learning_rate"] == committed["train/learning_rate"]
