"""tools/: reports, exercises, the pipeline, benchmarks, and the page on a step. Memory: test_memory.py."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, TINY, write_jsonl
from PIL import Image
from test_forks import patch

from tools import bench, exercises, pipeline
from tools import report as report_tool
from tools.exercises import EXERCISES

# ---- report.py: sections of each script's runs, escaping, a self-contained file, seeds ----
EVIL = "<script>alert('x')</script><img src=http://a.b/c onerror=alert(1)> \ud83d \x00 </style>"


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text = defaultdict(list), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag].append(dict(attrs))

    def handle_data(self, data):
        self.text += data


def make_run(folder: Path, metrics: list[dict], records: list[dict] = (), **args) -> Path:
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"seed": 1, "run_name": folder.name} | args))
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "samples.jsonl", records)
    return folder


def report(*folders: Path) -> str:
    report_tool.main(report_tool.Args([str(folder) for folder in folders]))
    return (folders[0] / "report.html").read_text()


def test_a_policy(tmp_path):
    """Before and after side by side; images embedded, nothing loaded from elsewhere, no markup from the data."""
    Image.effect_noise((1200, 900), 80).save(tmp_path / "noise.png")
    metrics = [{"train/step": step, "eval/sampled_score": step / 10, "odd/<b>": step} for step in (1, 2)]
    records = [{"train/step": 2, "phase": "train", "row": 7, "response": "in training"}]
    record = {"phase": "eval_greedy", "row": 7, "prompt": f"what? {EVIL}"}
    record |= {"images": ["noise.png", "gone.png"]}
    for step, response in ((0, "before it"), (2, f"after it {EVIL}" + "x" * 3000 + "\nAnswer: 3")):
        records.append(record | {"train/step": step, "response": response})
    run = make_run(tmp_path / "<i>a&b", metrics, records, dataset=f"{tmp_path}/d.jsonl", system_prompt=EVIL)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"train/step": 4, "objec')  # an incomplete line is skipped
    page = Page(text := report(run))
    assert [attrs["id"] for attrs in page.tags["section"]] == ["summary", "curves", "samples", "args"]
    for attrs in sum(page.tags.values(), []):
        assert all((attrs.get(name) or "#").startswith(("#", "data:")) for name in ("src", "href"))
        assert all(not name.startswith("on") for name in attrs)
    assert "script" not in page.tags and "<i>a" not in text and "odd/<b>" not in text and "\x00" not in text
    assert page.text.count("<script>alert('x')</script>") >= 3 and "odd/<b>" in page.text
    assert [image["alt"] for image in page.tags["img"]] == ["noise.png"]
    assert "gone.png: not found" in page.text
    assert "eval/sampled_score 0.1 → 0.2" in page.text
    assert text.index("before it") < text.index("after it") and "in training" not in text
    assert "\nAnswer: 3" in page.text and len(text) < 3e5  # a long response keeps its end, which rewards read


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
    assert "mine, step 2, 3 pairs" in page.text and "calibration error 0.254" in page.text
    positions = [page.text.index(f"bad {row}") for row in (2, 3, 1)]
    assert positions == sorted(positions), "lowest difference first"
    assert "older" not in page.text


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


# ---- exercises.py: the originals pass their checks, missing solutions and a wrong one don't ----
@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("exercises") / "all"
    exercises.write_exercises(path)
    return path


@pytest.mark.parametrize("function", EXERCISES)
def test_the_original_passes_its_check_and_the_empty_function_does_not(function, directory):
    exercises.check(ROOT, function)
    with pytest.raises(NotImplementedError):
        exercises.check(directory, function)


def test_grpo_is_compared_with_the_fork(tmp_path):
    """Losses may be per token or per response."""
    fork, _ = patch(tmp_path, ["grpo"])
    source, solution = fork.read_text(), tmp_path / "solution" / "grpo.py"
    solution.parent.mkdir()
    solution.write_text(source.replace("/ lengths, metrics", "/ 3, metrics"))
    with pytest.raises(AssertionError, match="compute_rloo_loss: the sum is"):
        exercises.check(solution.parent, "compute_rloo_loss", grpo=fork)
    per_response = "losses = torch.zeros(4).index_add(0, response_of_token, losses / lengths)"
    solution.write_text(source.replace("return losses / lengths,", f"{per_response}\n    return losses,"))
    exercises.check(solution.parent, "compute_rloo_loss", grpo=fork)


def test_numbers_of_a_problem_sheet_follow_from_its_word():
    (advantages, answer), *_, (pack, indices) = exercises.make_problems("alice")
    assert "rewards 0.7, 0.4, 0, 0." in advantages and answer == "0.5667, 0.1667, -0.3667, -0.3667"
    assert "prompt of 3 tokens and its responses of 3, 3, 2 tokens" in pack
    assert indices == "0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4; 0, 1, 2, 6, 7, 8; 2, 3, 4, 2, 6, 7, 2, 9"
    assert exercises.make_problems("bob") != exercises.make_problems("alice")


def test_the_page_has_all_exercises_in_order():
    page = (ROOT / "docs/exercises.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", page, re.M) == list(EXERCISES.items())
    mistakes = re.findall(r"^- (?:`([\w.]+)`: )?.*?: `([^`]+)` -> `[^`]+`$", page, re.M)
    assert len(mistakes) == page.count("` -> `") == 4
    for script, line in mistakes:
        assert (ROOT / (script or "rloo.py")).read_text().count(line) == 1, line


# ---- pipeline.sh ----
def test_commands_of_the_pipeline_parse():
    commands = re.search(r"^# 1\..*(?=^# 3\.)", (ROOT / "tools/pipeline.sh").read_text(), re.M | re.S).group()
    print_stage = 'start() { printf "%q " "$@"; echo; }; finish() { :; }; python() { :; }'
    program = f"out=runs/pipeline\n{print_stage}\n{commands}"
    printed = subprocess.run(["bash", "-euc", program], capture_output=True, text=True, check=True).stdout
    stages = set()
    for line in printed.splitlines():
        name, script, steps, *flags = shlex.split(line)
        module = importlib.import_module(script.removesuffix(".py"))
        args = tyro.cli(module.Args, args=["--total-steps", steps, *flags])
        module.fill_defaults(args)
        module.check_args(args)
        stages.add(name)
    assert stages == set(pipeline.STAGES)


# ---- bench.py: our side of a step runs ----
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vlm_64", "pairs_100", "different"])
def test_our_side_reports_each_step(name):
    """The functions that bench.py wraps still exist."""
    args = bench.Args(parts=(), threads=1, text_model=TINY, vlm=TINY, steps=1)
    cases = bench.rloo_cases(args) | bench.reward_cases(args) | bench.sft_cases(args)
    case = cases[name] | {"steps": 1}  # and one that is not timed
    if name == "vlm_64":
        case["flags"] |= {"prompts_per_rollout": 4, "train_batch_size": 32}
    if name == "pairs_100":  # a word is one token of SmolLM2, but five here
        case["flags"] |= {"max_length": 1024, "micro_batch_tokens": 2048}
    steps = bench.run_sides(args, case, ("cleanrft",))["cleanrft"]
    assert len(steps) == 2 and min(step["seconds"] for step in steps) > 0
    assert all(step["grad_norm"] > 0 and step["peak_bytes"] > 1e8 for step in steps)
    assert (len(steps[0]["prompt_ids"]) == 4) == (name == "vlm_64")


# ---- anatomy.py: the page needs no other file, and the committed one is not older ----
@pytest.mark.slow
def test_the_page_of_a_step(tmp_path):
    command = [sys.executable, str(ROOT / "tools/anatomy.py"), "--folder", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    written, committed = ((folder / "anatomy.html").read_text() for folder in (tmp_path, ROOT / "docs"))
    assert not re.search(r"<script|https?:|src=\"(?!data:)|url\(|\bnan\b|tensor\(", written)
    pattern = r"<code>(\w+/\w+)</code></td><td>(.+?)<"
    new, old = (dict(re.findall(pattern, text)) for text in (written, committed))
    assert list(new) == list(old), "docs/anatomy.html is older than rloo.py: run tools/anatomy.py"
    assert new["train/learning_rate"] == old["train/learning_rate"]
