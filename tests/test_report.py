"""tools/report.py: every section, escaping, size, nothing from outside, bad input; and the page in a real browser."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT, write_jsonl

spec = importlib.util.spec_from_file_location("report_tool", ROOT / "tools/report.py")
report_tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report_tool)

SECTIONS = ["summary", "curves", "args", "timings", "samples", "groups", "tokens"]
EVIL = "<script>alert('x')</script><img src=http://a.b/c onerror=alert(1)> \ud83d \x00 </style>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)


class Page(HTMLParser):
    """Tags with their attributes, ids of sections, text; fails on what is not closed."""

    VOID = {"meta", "link", "img", "input", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, name: str) -> list[dict]:
        return [attrs for tag, attrs in self.tags if tag == name]


def make_run(folder: Path, picture: str, seed: int = 1, response: str = "yes", **args) -> Path:
    """A folder as ppo_vl.py leaves it, made by hand: three steps, two evaluations, two saved rollouts."""
    (folder / "eval").mkdir(parents=True)
    (folder / "trajectories").mkdir()
    flags = {"seed": seed, "run_name": folder.name, "output_dir": "runs", "model": "m", "dataset": "data/d.jsonl"}
    (folder / "args.json").write_text(json.dumps({**flags, "gae_lambda": 0.95, "learning_rate": 1e-4, **args}))
    times = {"time/rollout": 1.0, "time/score": 0.5, "time/update": 2.0, "time/sync": 0.25, "time/total": 4.0}
    lines = [{"train/step": 0, "eval/sampled_score": 0.1 * seed}]
    lines += [{"train/step": t, "objective/scores": t * seed / 10, "odd/<b>": t, **times} for t in (1, 2, 3)]
    write_jsonl(folder / "metrics.jsonl", [*lines, {"train/step": 3, "eval/sampled_score": 0.2 * seed, "x": None}])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"what? {EVIL}"}]}]
    sample = {"row": 7, "messages": messages, "images": [picture], "answer": "yes", "components": {"accuracy": 1.0}}
    for step, said in ((0, "before it"), (3, response)):
        saved = [
            {**sample, "phase": f"eval_{mode}", "response": said, "score": step / 3} for mode in ("greedy", "sampled")
        ]
        (folder / f"eval/eval_step_{step}.json").write_text(json.dumps(saved))
    for step in (1, 3):
        rollout = []
        for k, score in enumerate((1.0, 0.0, 0.0, None)):
            tables = {"logprobs": [-1.0, -0.5], "ref_logprobs": [-1.25, -0.5], "engine_logprobs": [-1.0, -0.75]}
            tables["advantages"] = [0.125 * (k + 1), -2.0]
            ids = {"response_ids": [5, 6], "truncated": k == 1}
            rollout.append({**sample, "phase": "train", "response": response, "score": score, **ids, **tables})
        write_jsonl(folder / f"trajectories/step_{step}.jsonl", rollout)
    return folder


@pytest.fixture
def picture(tmp_path) -> str:
    from PIL import Image

    Image.effect_noise((1200, 900), 80).convert("RGB").save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png")


def report(tmp_path, *folders) -> str:
    report_tool.main(report_tool.Args([str(folder) for folder in folders], str(tmp_path / "r.html")))
    assert (tmp_path / "r.html").stat().st_size < 3_000_000
    return (tmp_path / "r.html").read_text()


def test_sections_and_nothing_from_outside(tmp_path, picture):
    page = Page(report(tmp_path, make_run(tmp_path / "a", picture)))
    assert [attrs["id"] for attrs in page.all("section")] == SECTIONS
    assert {attrs["href"] for attrs in page.all("a")} == {f"#{name}" for name in SECTIONS}
    assert not page.all("script") and not page.all("iframe")
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on")], tag
        for name in ("src", "href", "data", "action", "xlink:href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    style = report_tool.STYLE
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


def test_text_of_the_data_is_never_markup(tmp_path, picture):
    """Prompt, response, run name, arg and metric key hold markup: it is shown, not run."""
    folder = make_run(tmp_path / "<i>a&b", picture, response=EVIL, system_prompt=EVIL)
    text = report(tmp_path, folder)
    page = Page(text)
    assert not page.all("script") and "<i>a" not in text and "odd/<b>" not in text
    assert page.text.count("<script>alert('x')</script>") >= 4 and "odd/<b>" in page.text and "<i>a&b" in page.text
    assert "\x00" not in text and "onerror" in page.text and all("onerror" not in attrs for _, attrs in page.tags)


def test_pictures_are_embedded_small_and_named(tmp_path, picture):
    images = Page(report(tmp_path, make_run(tmp_path / "a", picture))).all("img")
    assert len(images) == 3  # the held-out row and the two groups
    for attrs in images:
        assert attrs["src"].startswith("data:image/jpeg;base64,") and "noise.png" in attrs["alt"]
        assert (attrs["width"], attrs["height"]) == ("192", "144") and len(attrs["src"]) < 60_000


def test_relative_pictures_lie_beside_the_dataset(tmp_path, picture):
    folder = make_run(tmp_path / "a", "noise.png", dataset=str(tmp_path / "d.jsonl"))
    assert len(Page(report(tmp_path, folder)).all("img")) == 3
    text = Page(report(tmp_path, make_run(tmp_path / "b", "gone.png"))).text
    assert "gone.png: not found" in text
    (tmp_path / "bad.png").write_text("no picture")
    assert "bad.png: can't be read" in Page(report(tmp_path, make_run(tmp_path / "c", str(tmp_path / "bad.png")))).text


def test_pictures_and_tokens_have_a_budget(tmp_path, picture, monkeypatch):
    monkeypatch.setattr(report_tool, "MAX_PICTURE_BYTES", 18_000)
    monkeypatch.setattr(report_tool, "TOKENS", 3)
    page = Page(report(tmp_path, make_run(tmp_path / "a", picture)))
    assert 0 < len(page.all("img")) < 3 and "left out, the file would grow too large" in page.text
    assert (
        len([a for a in page.all("span") if a.get("class", "").startswith("t ")]) == 3 and "1 more tokens" in page.text
    )
    monkeypatch.setattr(report_tool, "MAX_BYTES", 10_000)
    with pytest.raises(SystemExit):
        report(tmp_path, tmp_path / "a")


def test_seeds_become_a_mean_and_a_band(tmp_path, picture):
    a, b = (make_run(tmp_path / name, picture, seed) for name, seed in (("a", 1), ("b", 3)))
    runs = [report_tool.load_run(folder) for folder in (a, b)]
    [group] = report_tool.group_runs(runs)
    assert group["label"] == "a, b (2 seeds)"
    points = report_tool.curve(group["runs"], "objective/scores")
    assert points == [pytest.approx(p) for p in [(1, 0.2, 0.1, 0.3), (2, 0.4, 0.2, 0.6), (3, 0.6, 0.3, 0.9)]]
    text = report(tmp_path, a, b)
    assert 'class="band c0"' in text and 'class="band c1"' not in text
    c = make_run(tmp_path / "c", picture, learning_rate=3e-4)
    assert [g["label"] for g in report_tool.group_runs([*runs, report_tool.load_run(c)])] == ["a, b (2 seeds)", "c"]
    text = report(tmp_path, a, b, c)
    row = re.search(r"<tr><th[^>]*><b>≠</b> <code>--learning-rate</code></th>(.*?)</tr>", text)[1]
    assert row == "<td>0.0001</td><td>0.0001</td><td><mark>0.0003</mark></td>"
    assert "≠</b> <code>--model" not in text and 'class="line c1' in text


def test_a_curve_ends_where_a_seed_ends_and_long_ones_are_averaged():
    runs = [{"metrics": {"x": {t: t for t in range(n)}}} for n in (1000, 1200)]
    points = report_tool.curve(runs, "x")
    assert len(points) == 100 and points[0] == (4.5, 4.5, 4.5, 4.5) and points[-1][0] == 994.5


def test_times_are_stacked_to_the_longest_step(tmp_path, picture):
    page = Page(report(tmp_path, make_run(tmp_path / "a", picture)))
    widths = [a["style"] for a in page.all("i") if "style" in a]
    assert widths == [f"width:{w}%" for w in ("25.00", "12.50", "50.00", "6.25", "6.25")]
    told = "rollout 1.00 s, score 0.50 s, update 2.00 s, sync 0.25 s, other 0.25 s"
    assert told in [attrs.get("aria-label") for attrs in page.all("div")]


def test_before_and_after_stand_side_by_side(tmp_path, picture):
    text = report(tmp_path, make_run(tmp_path / "a", picture, response="after it"))
    section = text[text.index('id="samples"') : text.index('id="groups"')]
    assert section.index("before: step 0") < section.index("after: step 3")
    assert section.count("before it") == 2 and section.count("after it") == 2 and "greedy · score 1" in section


def test_tokens_have_colour_and_exact_values(tmp_path, picture):
    """k = 1, first token: advantage 0.25, KL -1 + 1.25 = 0.25, ratio 1; second: -2, 0, exp(-0.5 + 0.75) = 1.284."""
    page = Page(report(tmp_path, make_run(tmp_path / "a", picture)))
    tokens = [a for a in page.all("span") if a.get("class", "").startswith("t ")]
    assert len(tokens) == 16 and "tokens are shown as ids" in page.text
    assert tokens[2] == {"class": "t a4 k8 r4", "title": "5 (id 5) · advantage 0.25 · KL, nats 0.25 · ratio 1"}
    assert tokens[3] == {"class": "t a0 k4 r8", "title": "6 (id 6) · advantage -2 · KL, nats 0 · ratio 1.284"}
    assert [a["class"] for a in page.all("input")] == ["pick-a", "pick-k", "pick-r"]
    assert "-2 " in page.text and "(middle: 1)" in page.text


def test_what_a_run_did_not_compute_is_not_shown():
    line = {"logprobs": [-1.0], "ref_logprobs": [0.0], "engine_logprobs": [-1.0], "advantages": [0.0]}
    assert report_tool.token_values(line) == {"advantages": [0.0], "ratio": [1.0]}


def test_the_group_with_a_signal_is_chosen():
    lines = (
        [{"row": 1, "score": 0}] * 2 + [{"row": 2, "score": 0}, {"row": 2, "score": 1}] + [{"row": 3, "score": 1}] * 2
    )
    assert [line["row"] for line in report_tool.pick_group(lines)] == [2, 2]
    assert [line["row"] for line in report_tool.pick_group(lines[:2])] == [1, 1] and report_tool.pick_group([]) == []


def test_a_judge_and_a_reward_model(tmp_path):
    """Records as grm_sft.py and reward_bt.py write them; groups and tokens are left out with a sentence."""
    for name, flag in (("judge", "swap_sides"), ("rm", "center_coef")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(json.dumps({flag: 0, "dataset": "d"}))
        write_jsonl(
            tmp_path / name / "metrics.jsonl",
            [{"train/step": t, "time/total": 2.0, "train/grad_norm": t} for t in (1, 2)],
        )
    judged = {"number": 0, "prompt": "which?", "images": [], "generated_text": "<answer>A</answer>", "predicted": "A"}
    (tmp_path / "judge/eval").mkdir()
    (tmp_path / "judge/eval/eval_step_0.json").write_text(json.dumps([{**judged, "truth": "B", "right": False}]))
    pair = {"dataset": "d", "row": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "why?"}]}]}
    pair |= {
        "images": [],
        "chosen": "good",
        "rejected": "bad",
        "chosen_reward": 1.5,
        "rejected_reward": 2.0,
        "margin": -0.5,
    }
    write_jsonl(tmp_path / "rm/samples.jsonl", [{"step": 0, **pair}, {"step": 2, **pair, "rejected": "worse"}])
    text = Page(report(tmp_path, tmp_path / "judge", tmp_path / "rm")).text
    for part in (
        "verdict A: wrong",
        "There is one evaluation only",
        "rejected (2): bad",
        "margin -0.5",
        "not among what was saved",
    ):
        assert part in text, part
    assert text.count("no trajectories were saved") == 2 and "rloo.py save them" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: shutil.rmtree(run), "a: no such folder"),
        (lambda run: (run / "metrics.jsonl").unlink(), "a has no metrics.jsonl"),
        (lambda run: (run / "args.json").unlink(), "a has no args.json"),
        (lambda run: (run / "args.json").write_text("[]"), "args.json is not a JSON object"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"train/step": 1}\n{"tra'),
            "metrics.jsonl line 2 is not JSON",
        ),
        (lambda run: (run / "metrics.jsonl").write_text("7\n"), "metrics.jsonl line 1 is not a JSON object"),
        (lambda run: (run / "metrics.jsonl").write_text("{}\n"), "metrics.jsonl line 1 has no train/step"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl is empty"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff"), "metrics.jsonl can't be read"),
        (lambda run: (run / "eval/eval_step_3.json").write_text("{"), "eval_step_3.json is not JSON"),
        (lambda run: (run / "eval/eval_step_3.json").write_text("{}"), "is not a list of objects"),
        (lambda run: (run / "trajectories/step_1.jsonl").write_text("x\n"), "step_1.jsonl line 1 is not JSON"),
    ],
)
def test_bad_runs_end_with_a_sentence(change, message, tmp_path, picture, capsys):
    run = make_run(tmp_path / "a", picture)
    change(run)
    with pytest.raises(SystemExit) as stop:
        report(tmp_path, run)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1 and not (tmp_path / "r.html").exists()


def test_bad_flags_end_with_a_sentence(tmp_path, picture, capsys):
    run = str(make_run(tmp_path / "a", picture))
    bad = [
        ([], "r.html", "at least one run"),
        ([run, run], "r.html", "named twice"),
        ([run], "no/r.html", "can't be written"),
    ]
    for runs, output, message in bad:
        with pytest.raises(SystemExit) as stop:
            report_tool.main(report_tool.Args(runs, str(tmp_path / output)))
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_texts_can_be_read_in_both_schemes():
    """WCAG contrast: 4.5 for text on page, card, mark and token colours, 3 for curves on their card."""
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+|transparent)", part))
        for part in report_tool.STYLE.split("* {")[0].split("@media")
    )

    def luminance(colour: str) -> float:
        colour = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        parts = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for colours in (light, {**light, **dark}):
        page = colours["page"]
        for ground in ("page", "card", "mark", *(f"d{i}" for i in range(9))):
            ground = page if colours[ground] == "transparent" else colours[ground]
            assert contrast(colours["text"], ground) >= 4.5, ground
        assert min(contrast(colours["muted"], colours[ground]) for ground in ("page", "card")) >= 4.5
        assert min(contrast(colours[f"c{i}"], colours["card"]) for i in range(8)) >= 3


@pytest.mark.slow
def test_a_real_run_and_its_twin(run, tmp_path):
    """Every metric of a run is on the page. The twin is a copy with another seed in args.json."""
    real_runs = [run(save_trajectories=True, eval_steps=1), tmp_path / "twin"]
    shutil.copytree(*real_runs)
    args = json.loads((real_runs[0] / "args.json").read_text())
    (real_runs[1] / "args.json").write_text(json.dumps({**args, "seed": 9, "run_name": "twin"}))
    text = report(tmp_path, *real_runs)
    page = Page(text)
    assert (
        page.text.count("<answer>") > 4
        and "run, twin (2 seeds)" in page.text
        and "tokens are shown as ids" not in page.text
    )
    titles = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert titles[:4] == [title for title, _ in report_tool.PANELS[:4]]
    assert {"reward/accuracy", "time/tokens_per_second"} <= set(titles)
    assert len(page.all("img")) > 8 and all(len(a["src"]) > 200 for a in page.all("img"))
    [metrics] = [json.loads(x) for x in (real_runs[0] / "metrics.jsonl").read_text().splitlines()[-1:]]
    shown = {key for key in metrics if key in text}
    assert shown == set(metrics) - {"train/step", "train/episode"}


def test_commands_of_the_page_parse():
    """Each command of docs/report.md; the folders and the script that it names are what the others write."""
    import tyro

    import ppo_vl

    page = (ROOT / "docs/report.md").read_text()
    words = [shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", page, re.S) for line in block.splitlines()]
    made = []
    for python, script, *flags in words:
        assert python == "python" and (ROOT / script).is_file()
        if script == "ppo_vl.py":
            args = ppo_vl.parse_args(flags)
            made.append(f"{args.output_dir}/{args.run_name}")
        elif script == "tools/report.py":
            assert tyro.cli(report_tool.Args, args=flags).runs == made and len(made) == 2
        else:
            assert script == "tools/inline.py" and flags[0] == "ppo_vl.py" and flags[1] == "--output"
    assert len(words) == 4
    for key in re.findall(r"`((?:time|policy)/\w+)`", page):
        assert f'"{key}"' in (ROOT / "ppo_vl.py").read_text(), key


def browse(page: Path, *flags: str) -> subprocess.CompletedProcess:
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    words = [
        CHROMIUM,
        "--headless",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=1280,2000",
        *root,
        *flags,
    ]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    return subprocess.run([*words, profile, page.as_uri()], capture_output=True, text=True, timeout=120)


CHECK = """<script>
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.querySelectorAll("details").forEach(d => d.open = true);
const broken = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
const ground = e => getComputedStyle(e).backgroundColor;
const token = document.querySelector(".t.k8, .t.k0"), before = ground(token);
document.querySelector(".pick-k").click();
const changed = ground(token) !== before;
document.title = JSON.stringify({wide, broken, changed, tall: document.body.scrollHeight > 3000});
</script>"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
@pytest.mark.slow
def test_in_a_browser(tmp_path, picture):
    """No word in the console, light and dark, no picture broken, nothing wider than the window, the picker recolours."""
    import numpy as np
    from PIL import Image

    runs = [make_run(tmp_path / name, picture, seed, response="long " * 300) for name, seed in (("a", 1), ("b", 2))]
    text = report(tmp_path, *runs)
    page, brightness = tmp_path / "r.html", []
    for scheme, flags in (("light", []), ("dark", ["--force-dark-mode"])):
        done = browse(page, f"--screenshot={tmp_path / scheme}.png", *flags)
        assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
        brightness.append(float(np.asarray(Image.open(tmp_path / f"{scheme}.png").convert("L")).mean()))
    assert brightness[0] > 180 and brightness[1] < 80
    page.write_text(text.replace("</body>", CHECK + "</body>"))
    done = browse(page, "--dump-dom")
    title = re.search("<title>(.*?)</title>", done.stdout)[1]
    assert json.loads(title) == {"wide": 0, "broken": 0, "changed": True, "tall": True}
    page.write_text(text.replace("</body>", "<script>no_such_name()</script></body>"))
    assert "CONSOLE" in browse(page, "--dump-dom").stderr, "an error on the page would be seen"
