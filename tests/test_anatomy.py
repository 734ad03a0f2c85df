"""tools/anatomy.py: one command makes the page, in which all is inside and the numbers fit each other."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_page_of_a_step_is_made(tmp_path):
    command = [sys.executable, str(ROOT / "tools/anatomy.py"), "--folder", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    page = (tmp_path / "anatomy.html").read_text()
    assert not re.search(r"<script|https?:|src=\"(?!data:)|url\(|nan\b|tensor\(", page)
    assert (tmp_path / "anatomy.png").stat().st_size > 10_000

    def column(name: str) -> list[float]:
        found = re.findall(rf'<td class="{name}[^"]*">([^<]+)</td>', page)
        return [float(x.replace("\N{MINUS SIGN}", "-")) for x in found]

    rewards, baselines, advantages = column("R"), column("baseline"), column("advantage")
    assert len(advantages) == 8 and max(advantages) > 0.05 and abs(sum(advantages)) < 0.01
    for reward, baseline, advantage in zip(rewards, baselines, advantages, strict=True):
        assert baseline == pytest.approx((sum(rewards) - reward) / 7, abs=0.002)
        assert advantage == pytest.approx(reward - baseline, abs=0.002)
    cost = re.search(r"tokens through the model</td><td>([\d,]+)</td><td>([\d,]+)</td>", page).groups()
    packed, padded = (int(x.replace(",", "")) for x in cost)
    assert f"The pack: {packed:,} tokens" in page and padded > 2 * packed
