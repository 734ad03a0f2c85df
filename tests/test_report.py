"""tools/report.py: sections of each script's runs, escaping, a self-contained file, seeds."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT, write_jsonl
from PIL import Image

sys.path.append(str(ROOT / "tools"))
import report as report_tool  # noqa: E402

EVIL = "<script>alert('x')</script><img src=http://a.b/c onerror=alert(1)> \ud83d \x00 </style>"


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, name: str) -> list[dict]:
        return [attrs for tag, attrs in self.tags if tag == name]


def make_run(folder: Path, metrics: list[dict], records: list[dict] = (), **args) -> Path:
    folder.mkdir()
    flags = {"seed": 1, "run_name": folder.name, "model": "m", "dataset": "data/d.jsonl", "lr": 1e-4}
    (folder / "args.json").write_text(json.dumps({**flags, **args}))
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "samples.jsonl", records)
    return folder


def policy_run(folder: Path, image: str = "gone.png", seed: int = 1, response: str = "yes", **args) -> Path:
    """A run directory like rloo.py's: three steps, two evaluations of one row, greedy and sampled."""
    times = {"time/rollout": 1.0, "time/total": 4.0, "sampling/logprob_diff_mean": 1e-6}
    lines = [{"train/step": t, "objective/scores": t * seed / 10, "odd/<b>": t, **times} for t in (1, 2, 3)]
    lines[2]["eval/sampled_score"] = 0.2 * seed
    row = {"row": 7, "prompt": f"what? {EVIL}", "image": image, "answer": "blue", "reward/accuracy": 1.0}
    records = [{"train/step": 2, "phase": "train", **row, "response": "in training"}]
    for step, text in ((0, "before it"), (3, response)):
        for mode in ("greedy", "sampled"):
            records.append({"train/step": step, "phase": f"eval_{mode}", **row, "response": text})
    lines.insert(0, {"train/step": 0, "eval/sampled_score": 0.1 * seed})
    run = make_run(folder, lines, records, seed=seed, **args)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"train/step": 4, "objec')  # an incomplete line is skipped
    return run


def report(*folders: Path) -> str:
    report_tool.main(report_tool.Args([str(folder) for folder in folders]))
    return (folders[0] / "report.html").read_text()


def test_a_policy(tmp_path):
    """Flags collapsed at the end; before and after side by side; images embedded, nothing loaded from elsewhere."""
    Image.effect_noise((1200, 900), 80).save(tmp_path / "noise.png")
    run = policy_run(tmp_path / "a", "noise.png", response="after it", dataset=str(tmp_path / "d.jsonl"))
    page = Page(text := report(run))
    assert [attrs["id"] for attrs in page.all("section")] == ["summary", "curves", "samples", "args"]
    assert not page.all("script") and "url(http" not in text and "@import" not in text
    for _, attrs in page.tags:
        assert all((attrs.get(name) or "#").startswith(("#", "data:")) for name in ("src", "href"))
    [image] = page.all("img")
    assert (image["width"], image["height"], image["alt"]) == ("160", "120", "noise.png") and len(text) < 3e5
    section = text[text.index('id="samples"') : text.index('id="args"')]
    assert section.index("before: step 0") < section.index("after: step 3")
    assert section.count("before it") == section.count("after it") == 2 and "in training" not in section
    assert "greedy · accuracy 1" in section and "answer: blue" in section
    assert "<details><summary>5 flags</summary>" in text[text.index('id="args"') :]
    assert "eval/sampled_score 0.1 → 0.2" in page.text and "12 s" in page.text
    assert "log-prob difference of sampler and trainer, nats per token" in text


def test_text_from_the_data_is_never_markup(tmp_path):
    text = report(policy_run(tmp_path / "<i>a&b", response=EVIL, system_prompt=EVIL))
    page = Page(text)
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert not page.all("script") and "<i>a" not in text and "odd/<b>" not in text and "\x00" not in text
    assert page.text.count("<script>alert('x')</script>") >= 3 and "odd/<b>" in page.text
    assert "gone.png: not found" in page.text


def test_a_reward_model(tmp_path):
    """Differences 2, -2, 0: confidences .881, .881, .5; calibration error (2 * |.5 - .881| + 0) / 3 = .254."""
    bins = report_tool.reliability([2.0, -2.0, 0.0])
    assert bins == [pytest.approx((0.5, 0.5, 1 / 3)), pytest.approx((0.8808, 0.5, 2 / 3), abs=1e-4)]
    old = "of an older evaluation"
    pairs = [{"train/step": 0, "phase": "eval_mine", "reward_diff": 1.0, "rejected": old}]
    for row, diff in ((1, 2.0), (2, -2.0), (3, 0.0)):
        pairs.append({"train/step": 2, "phase": "eval_mine", "row": row, "prompt": "why?"})
        pairs[-1] |= {"reward_diff": diff + 1, "chosen": "good", "rejected": f"bad {row}"}
        pairs[-1] |= {"chosen_reward": diff + 1, "rejected_reward": 0.0, "margin": 1.0}
    run = make_run(tmp_path / "a", [{"train/step": 2, "eval/mine/accuracy": 0.5}], pairs)
    page = Page(report(run))
    assert [attrs["id"] for attrs in page.all("section")] == ["summary", "curves", "pairs", "args"]
    assert "mine, step 2, 3 pairs" in page.text and "calibration error 0.254" in page.text
    positions = [page.text.index(f"bad {row}") for row in (2, 3, 1)]
    assert positions == sorted(positions), "lowest difference first"
    assert "older" not in page.text and "pair accuracy" in page.text


def test_a_judge(tmp_path):
    records = []
    right = {"row": 4, "verdict": "1", "consistent": True, "swapped_response": "2 then"}
    wrong = {"row": 5, "verdict": "2", "consistent": False, "swapped_response": None}
    for step, verdict in ((0, None), (2, "1")):
        for record in (right, wrong):
            record = {"train/step": step, "phase": "eval", "text": f"which of {record['row']}?", **record}
            record |= {"predicted_verdict": verdict, "correct": verdict == record["verdict"]}
            record |= {"probabilities": {"1": 0.75, "2": 0.25}, "response": f"response at {step}"}
            records.append(record)
    page = Page(report(make_run(tmp_path / "a", [{"train/step": 2, "eval/accuracy": 0.5}], records)))
    assert "1 of 2 wrong" in page.text and page.text.index("which of 5?") < page.text.index("which of 4?")
    assert "verdict not parsable · label 1 · p(1) 0.75 · p(2) 0.25" in page.text
    assert [page.text.count(x) for x in ("response at 0", "response at 2", "swapped: 2 then")] == [2, 2, 2]


def test_seeds_are_averaged_with_a_band(tmp_path):
    a, b = (policy_run(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 3)))
    runs = [report_tool.load_run(folder) for folder in (a, b)]
    [(_, group)] = report_tool.group_runs(runs)
    points = [(1, 0.2, 0.1, 0.3), (2, 0.4, 0.2, 0.6), (3, 0.6, 0.3, 0.9)]
    assert report_tool.curve(group, "objective/scores") == [pytest.approx(p) for p in points]
    long = report_tool.curve([{"metrics": {"x": {t: t for t in range(n)}}} for n in (1000, 1200)], "x")
    assert len(long) == 100 and long[0] == (4.5, 4.5, 4.5, 4.5) and long[-1][0] == 994.5
    assert 'id="band"' in report(a, b) and 'id="band"' not in report(a)
    c = policy_run(tmp_path / "c", lr=3e-4)
    groups = report_tool.group_runs([*runs, report_tool.load_run(c)])
    assert [label for label, _ in groups] == ["a, b (mean)", "c"]
    text = report(a, b, c)
    differing = text[text.index("flags, different") : text.index("flags, equal")]
    assert "0.0003" in differing and "--model" not in differing
