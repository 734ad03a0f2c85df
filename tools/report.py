"""One HTML file for a run or several: curves, held-out samples before and after, pairs, judgements, args.

    python tools/report.py runs/a                                    # runs/a/report.html
    python tools/report.py runs/a runs/b runs/c --output abc.html    # seeds become a mean and a band

A run is a folder of one of the four scripts. Read are metrics.jsonl, samples.jsonl, args.json and the
pictures that samples name. The file needs no network and nothing beside it: pictures lie in it, scaled down.
"""

import base64
import fnmatch
import html
import io
import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

PICTURE_SIDE = 160  # pixels
SAMPLES = 12  # rows of a table, per run
TEXT = 1200  # characters of a prompt or response
POINTS = 100  # per curve; longer ones are averaged in bins
NOT_COMPARED = {
    "seed",
    "run_name",
    "output_dir",
    "resume",
}  # runs that differ here only are one line with a band
COLORS = ("#2878c0", "#d4691c", "#1f9d76", "#b5539a", "#9a7b0a", "#4fa3c7", "#d0405a", "#7a828c")
DASHES = ("", "6 3", "2 3", "9 3 2 3")
PANELS = [
    ("score", ["objective/scores", "eval/sampled_score", "eval/greedy_score"]),
    ("held-out accuracy", ["eval/sampled_accuracy", "eval/greedy_accuracy", "eval/pass_at_k"]),
    ("KL to the reference, nats per response", ["objective/kl"]),
    ("response length, tokens", ["rollout/response_length_mean"]),
    ("entropy of the policy, nats per token", ["policy/entropy"]),
    ("KL of the update, nats", ["policy/approx_kl"]),
    ("clipped, fraction", ["policy/clipfrac_low", "policy/clipfrac_high"]),
    ("no signal in the group; cut, fraction", ["rollout/zero_std_groups_frac", "rollout/truncated_frac"]),
    ("value loss", ["loss/value"]),
    ("explained variance", ["val/explained_variance"]),
    ("loss, nats per trained token", ["loss/sft", "eval/loss"]),
    ("held-out verdicts that are right", ["eval/accuracy", "eval/soft_accuracy"]),
    ("readable; the same in both orders", ["eval/parse_rate", "eval/swap_consistency"]),
    ("Bradley-Terry loss", ["rm/bt_loss", "eval/*bt_loss"]),
    ("pairs in the right order", ["rm/accuracy", "eval/*/accuracy"]),
    ("chosen - rejected", ["rm/margin", "eval/*margin"]),
    ("calibration error", ["rm/ece", "eval/*ece"]),
    ("sampler's against trainer's log-probs, nats", ["rollout/engine_logprob_diff_*"]),
    ("losses", ["loss/*"]),
    ("gradient norm", ["train/*grad_norm"]),
    ("seconds of a step", ["time/rollout", "time/logprobs", "time/update", "time/sync"]),
]


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # folders of the runs
    output: str | None = None  # file to write; None: report.html in the first run's folder


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- read ----


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON Lines file; a last line that is being written is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def load_run(folder: Path) -> dict:
    """-> name, args, metrics {key: {step: value}}, and samples {kind: {step: rows}}."""
    if not folder.is_dir():
        fail(f"{folder}: there is no such folder")
    try:
        args = json.loads((folder / "args.json").read_text(encoding="utf-8"))
        lines, rows = read_lines(folder / "metrics.jsonl"), read_lines(folder / "samples.jsonl")
    except (OSError, ValueError) as error:
        fail(f"{folder} is not the folder of a run: {error}")
    if not lines:
        fail(f"{folder} has no metrics yet: its metrics.jsonl is missing or empty")
    metrics, samples = defaultdict(dict), defaultdict(lambda: defaultdict(list))
    for line in lines:
        for key, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value):
                metrics[key][line["train/step"]] = value
    for row in rows:
        kind = "pairs" if "margin" in row else "judgements" if "verdict" in row else "responses"
        samples["train" if row["phase"] == "train" else kind][row["train/step"]].append(row)
    return dict(folder=folder, name=folder.resolve().name, args=args, metrics=metrics, samples=samples)


def group_runs(runs: list[dict]) -> list[tuple[str, list[dict]]]:
    """Runs that differ in the seed only together: (label, runs)."""
    groups = defaultdict(list)
    for run in runs:
        same = {name: value for name, value in run["args"].items() if name not in NOT_COMPARED}
        groups[json.dumps(same, sort_keys=True)].append(run)
    names = [", ".join(run["name"] for run in group) for group in groups.values()]
    return [(f"{n} (mean)" if group[1:] else n, group) for n, group in zip(names, groups.values())]


# ---- text, numbers, pictures, tables ----


def number(x) -> str:
    return f"{x:.4g}" if isinstance(x, int | float) else "–"


def escape(text) -> str:
    """Text of the data as HTML: no markup, no control characters."""
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", str(text)))


def said(text, css: str = "said") -> str:
    """A paragraph; long texts are cut."""
    text, rest = str(text), len(str(text)) - TEXT
    more = f' <span class="muted">… {rest} more characters</span>' if rest > 0 else ""
    return f'<p class="{css}">{escape(text[:TEXT]) or "(nothing)"}{more}</p>'


def find_picture(source: str, run: dict) -> Path | None:
    """A path as the run saw it: relative ones lie beside its dataset files."""
    sources = [run["args"].get(name) for name in ("dataset", "eval_dataset", "eval_datasets")]
    files = [file for x in sources if x for file in (x if isinstance(x, list) else [x])]
    for path in (Path(source), *(Path(file).parent / source for file in files)):
        try:
            if path.is_file():
                return path
        except OSError:  # a text too long to be a path
            return None
    return None


def picture(path: Path) -> str:
    """<img> with the picture in it, or a word where it can't be read."""
    from PIL import Image

    try:
        image = Image.open(path).convert("RGB")
    except Exception:  # a video, or what a decoder of Pillow stumbles over
        return f'<span class="muted">{escape(path.name)}</span>'
    kind = "png" if max(image.size) <= PICTURE_SIDE else "jpeg"
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    image.save(buffer := io.BytesIO(), kind)
    data = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<img src="{data}" alt="{escape(path.name)}" width="{image.width}" height="{image.height}">'


def pictures(row: dict, run: dict) -> str:
    """Those of a row's columns image(s) and video(s), and of its candidates."""
    given = [row.get(f"{kind}{end}") or [] for end in ("", "s", "_0", "_1") for kind in ("image", "video")]
    sources = [str(x) for own in given for x in (own if isinstance(own, list) else [own])]
    parts = []
    for source in sources[:4]:
        path = find_picture(source, run)
        parts.append(
            picture(path)
            if path
            else f'<span class="muted">{escape(Path(source).name[:80])}: not found</span>'
        )
    return "".join(parts) or "–"


def question(row: dict) -> str:
    """The prompt, a text or a chat, and the answer if there is one."""
    given = row.get("text") or row.get("prompt") or row.get("messages") or f"row {row.get('row')}"
    if isinstance(given, list):
        turns = [(m["role"], m["content"]) for m in given]
        texts = [(r, c if isinstance(c, str) else " ".join(x.get("text", "") for x in c)) for r, c in turns]
        given = texts[0][1] if len(texts) == 1 else "\n".join(f"{role}: {text}" for role, text in texts)
    return said(given) + (said(f"right: {row['answer']}", "muted") if row.get("answer") is not None else "")


def table(head: list[str], rows: list[list[str]], css: str = "") -> str:
    """Cells are HTML; the first of a row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = ("".join(f"<td>{cell}</td>" for cell in cells[1:]) for cells in rows)
    body = "\n".join(f'<tr><th scope="row">{cells[0]}</th>{line}</tr>' for cells, line in zip(rows, lines))
    inside = f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{css}">{inside}</table></div>\n'


# ---- curves ----


def expand(patterns: list[str], keys) -> list[str]:
    """The keys that are there, in the order of the patterns."""
    return [*dict.fromkeys(k for pattern in patterns for k in fnmatch.filter(sorted(keys), pattern))]


def curve(runs: list[dict], key: str) -> list[tuple[float, ...]]:
    """(step, mean, lowest, highest) over the runs, at the steps that all have; in bins if there are many."""
    tables = [run["metrics"][key] for run in runs if key in run["metrics"]]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values = [[table[step] for table in tables] for step in steps]
    points = [(step, sum(own) / len(own), min(own), max(own)) for step, own in zip(steps, values)]
    size = -(-len(points) // POINTS) or 1
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(column) / len(part) for column in zip(*part)) for part in bins]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high: ticks(0, 1) -> 0, 0.2, 0.4 ... 1."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def stroke(color: str, dash: int, path: str) -> str:
    return f'<path class="line" stroke="{color}" stroke-dasharray="{DASHES[dash % 4]}" d="{path}"/>'


def panel(title: str, series: list[tuple[str, int, int, list[tuple]]], show_colors: bool = False) -> str:
    """One SVG of lines (label, color, dash, points). Points are (x, y) or (x, mean, lowest, highest)."""
    series = [s for s in series if s[3]]
    if not series:
        return ""
    W, H, left, right, top, bottom = 360, 210, 52, 10, 10, 26
    xs = [p[0] for *_, points in series for p in points]
    ys = [y for *_, points in series for p in points for y in p[1:]]
    x0, x1, y0, y1 = min(xs), max(max(xs), min(xs) + 1e-9), min(ys), max(ys)
    pad = (y1 - y0) * 0.06 or abs(y1) * 0.1 or 0.5
    y0, y1 = y0 - pad, y1 + pad

    def at(x: float, y: float) -> str:
        u, v = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return f"{left + u * (W - left - right):.1f},{H - bottom - v * (H - top - bottom):.1f}"

    parts = []
    for y in ticks(y0, y1):
        v = at(x0, y).split(",")[1]
        parts.append(f'<path class="grid" d="M{left},{v}H{W - right}"/>')
        parts.append(f'<text x="{left - 6}" y="{v}" class="y">{y:.4g}</text>')
    for x in ticks(x0, x1) if len({*xs}) > 1 else xs[:1]:
        parts.append(f'<text x="{at(x, y0).split(",")[0]}" y="{H - 8}" class="x">{x:.6g}</text>')
    for _, c, _, points in series:
        if any(len(p) > 2 and p[2] < p[3] for p in points):  # the band between seeds
            edge = [at(p[0], p[3]) for p in points] + [at(p[0], p[2]) for p in reversed(points)]
            parts.append(f'<path fill="{COLORS[c % 8]}" opacity=".2" d="M{"L".join(edge)}Z"/>')
    for label, c, dash, points in series:
        parts.append(stroke(COLORS[c % 8], dash, "M" + "L".join(at(*p[:2]) for p in points)))
        for p in points if len(points) <= 30 else points[-1:]:
            x, y = at(*p[:2]).split(",")
            about = f"<title>{escape(label)}, {number(p[0])}: {number(p[1])}</title>"
            parts.append(f'<circle fill="{COLORS[c % 8]}" cx="{x}" cy="{y}" r="2.6">{about}</circle>')
    told = "; ".join(f"{label}: {number(p[0][1])} to {number(p[-1][1])}" for label, _, _, p in series)
    keys = {(s[0].rpartition(": ")[2], COLORS[s[1] % 8] if show_colors else "gray", s[2]) for s in series}
    lines = [(name, stroke(color, dash, "M1,4H25")) for name, color, dash in sorted(keys)]
    legend = "".join(f'<span><svg width="26" height="8">{x}</svg>{escape(name)}</span>' for name, x in lines)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {W} {H}" role="img" '
        f'aria-label="{escape(told)}">{"".join(parts)}</svg><div class="legend">{legend}</div></figure>\n'
    )


def curves_section(runs: list[dict]) -> str:
    """Color: a run, or the mean of its seeds; dashes: the metrics of a panel."""
    groups, keys = group_runs(runs), {key for run in runs for key in run["metrics"]}

    def draw(title: str, own: list[str]) -> str:
        lines = [(label, key, c, d) for c, (label, _) in enumerate(groups) for d, key in enumerate(own)]
        return panel(title, [(f"{label}: {k}", c, d, curve(groups[c][1], k)) for label, k, c, d in lines])

    chosen = [(title, expand(patterns, keys)) for title, patterns in PANELS]
    rest = sorted(keys - {key for _, own in chosen for key in own} - {"train/step", "train/episode"})
    dot = '<svg width="14" height="14"><circle fill="{}" cx="7" cy="7" r="6"/></svg>'
    names = "".join(f"<span>{dot.format(COLORS[c % 8])}{escape(n)}</span>" for c, (n, _) in enumerate(groups))
    return (
        '<p class="muted">Over steps. Of seeds the mean, in a band from the lowest to the highest.</p>'
        f'<div class="legend">{names}</div><div class="panels">{"".join(draw(*x) for x in chosen)}</div>'
        f'<details><summary>{len(rest)} more metrics</summary><div class="panels">'
        f"{''.join(draw(key, [key]) for key in rest)}</div></details>"
    )


# ---- samples ----


def each_run(runs: list[dict], section) -> str:
    """What a section makes of each run, under the run's name where there are several; nothing for no run."""
    parts = [(run["name"], section(run)) for run in runs]
    return "".join((f"<h3>{escape(n)}</h3>" if runs[1:] else "") + part for n, part in parts if part)


def before_and_after(run: dict, kind: str, cell, order=lambda row: 0) -> str:
    """The rows of the first and of the last evaluation side by side."""
    tables, found = run["samples"][kind], defaultdict(lambda: defaultdict(list))
    steps = sorted({min(tables), max(tables)}) if tables else []
    for step in steps:
        for row in tables[step]:
            found[row["row"]][step].append(row)
    lines = []
    for own in sorted(found.values(), key=lambda own: order(own[max(own)][0]))[:SAMPLES]:
        first, cells = own[max(own)][0], ("".join(map(cell, own[step])) or "–" for step in steps)
        lines.append([pictures(first, run), question(first), *cells])
    head = ["picture", "prompt", *(f"{when}: step {t}" for when, t in zip(("before", "after"), steps))]
    return table(head, lines, "samples") if lines else ""


def responses_section(run: dict) -> str:
    """rloo.py, ppo_vl.py: what was said to held-out prompts; without any, in training."""

    def cell(row: dict) -> str:
        parts = [row["phase"].removeprefix("eval_")]
        parts += [
            f"{key.partition('/')[2]} {number(x)}" for key, x in row.items() if key.startswith("reward/")
        ]
        return said(row["response"]) + said(" · ".join(parts), "muted")

    other = run["samples"]["pairs"] or run["samples"]["judgements"]
    return before_and_after(run, "responses", cell) or ("" if other else before_and_after(run, "train", cell))


def judgements_section(run: dict) -> str:
    """grm_sft.py: what the judge wrote, its soft verdict, and what it wrote with the sides exchanged."""

    def cell(row: dict) -> str:
        soft = [f"p({option}) {number(p)}" for option, p in (row.get("probabilities") or {}).items()]
        about = [f"verdict {row['verdict'] or 'unreadable'}", f"true {row.get('truth') or 'unknown'}", *soft]
        text = said(row["response"]) + said(" · ".join(about), "muted")
        swapped = row.get("swapped_response")
        how = "sides exchanged" if row.get("swap_consistency") else "sides exchanged, another verdict"
        return text + ("" if swapped is None else said(f"{how}: {swapped}", "muted"))

    tables = run["samples"]["judgements"]
    last = tables[max(tables)] if tables else []
    wrong = sum(row.get("accuracy") is False for row in last)
    note = f"<p>{wrong} of {len(last)} wrong at the last evaluation. Those come first.</p>" if last else ""
    worst = lambda row: (row.get("accuracy") is not False, row.get("swap_consistency") is not False)  # noqa: E731
    return note + before_and_after(run, "judgements", cell, worst)


def reliability(margins: list[float], num_bins: int = 10) -> list[tuple[float, float, float]]:
    """Pairs in bins of confidence = sigmoid(|margin|) over [0.5, 1] -> mean confidence, share right (ties are
    one half) and share of all pairs, of each bin that has any. Calibration error = sum of share * |right -
    confidence|, https://arxiv.org/abs/1706.04599.

    margins [2, -2, 0] -> [(.5, .5, 1/3), (.881, .5, 2/3)]
    """
    bins = defaultdict(list)
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(abs(margin), 700)))
        right = 1.0 if margin > 0 else 0.0 if margin < 0 else 0.5
        bins[min(int((confidence - 0.5) * 2 * num_bins), num_bins - 1)].append((confidence, right))
    means = [(*(sum(x) / len(own) for x in zip(*own)), len(own)) for _, own in sorted(bins.items())]
    return [(confidence, right, count / len(margins)) for confidence, right, count in means]


def histogram(values: list[float], low: float, high: float, count: int = 24) -> list[tuple[float, float]]:
    """(middle of a bin, values in it)."""
    width = (high - low) / count or 1.0
    counts = [0] * count
    for value in values:
        counts[min(int((value - low) / width), count - 1)] += 1
    return [(low + (i + 0.5) * width, n) for i, n in enumerate(counts)]


def pairs_section(run: dict) -> str:
    """reward_bt.py: calibration, scores of both sides and the worst pairs of the last evaluation, by set."""
    sets, tables = defaultdict(list), run["samples"]["pairs"]
    for row in tables[max(tables)] if tables else ():
        sets[row["phase"].removeprefix("eval_")].append(row)
    parts = []
    for name, rows in sets.items():
        bins = reliability([row["margin"] for row in rows])
        error = sum(share * abs(right - confidence) for confidence, right, share in bins)
        lines = [
            ("right", 0, 0, [b[:2] for b in bins]),
            ("share of pairs", 1, 2, [(b[0], b[2]) for b in bins]),
        ]
        lines.append(("calibrated", 7, 1, [(0.5, 0.5), (1, 1)]))
        scores = {side: [row[f"{side}_reward"] for row in rows] for side in ("chosen", "rejected")}
        low, high = min(map(min, scores.values())), max(map(max, scores.values()))
        counts = [(side, c, 0, histogram(own, low, high)) for c, (side, own) in enumerate(scores.items())]
        shown = []
        for row in sorted(rows, key=lambda row: row["margin"])[:SAMPLES]:
            sides = [said(row[s]) + said(f"score {number(row[f'{s}_reward'])}", "muted") for s in scores]
            shown.append([pictures(row, run), question(row), *sides, number(row["margin"])])
        parts.append(
            f'<h3>{escape(name)}, step {rows[0]["train/step"]}, {len(rows)} pairs</h3><div class="panels">'
            + panel(f"right at a confidence of sigmoid(|margin|); calibration error {error:.3f}", lines, True)
            + panel("how many pairs at a score", counts, True)
            + "</div><p>The pairs with the lowest margin:</p>"
            + table(["picture", "prompt", "chosen", "rejected", "margin"], shown, "samples")
        )
    return "".join(parts)


# ---- page ----


def summary_section(runs: list[dict]) -> str:
    rows = []
    for run in runs:
        metrics, args = run["metrics"], run["args"]
        keys = expand([key for _, own in PANELS for key in own if key.startswith("eval/")], metrics)[:6]
        ends = [(key, metrics[key][min(metrics[key])], metrics[key][max(metrics[key])]) for key in keys]
        held_out = [f"{escape(key)} {number(first)} → {number(last)}" for key, first, last in ends]
        about, seconds = f"{args.get('model')}, {args.get('dataset')}", sum(metrics["time/total"].values())
        cells = [str(max(metrics["train/step"])), f"{seconds:.0f} s", "<br>".join(held_out) or "–"]
        rows.append([escape(run["name"]), escape(about), *cells])
    head = ["run", "model, data", "steps", "seconds in steps", "held out, first → last evaluation"]
    return table(head, rows)


def args_section(runs: list[dict]) -> str:
    """Folded: the flags that differ, then the others."""
    different, equal = [], []
    for name in dict.fromkeys(name for run in runs for name in run["args"]):
        values = [escape(json.dumps(run["args"].get(name), ensure_ascii=False)) for run in runs]
        row = [f"<code>--{escape(name.replace('_', '-'))}</code>", *values]
        (different if len({*values}) > 1 else equal).append(row)
    parts = [("different", different, [escape(run["name"]) for run in runs]), ("equal", equal, ["all runs"])]
    text = ""
    for kind, rows, head in parts:
        inside = table(["flag", *head], [row[: 1 + len(head)] for row in rows], "args")
        title = f"{len(rows)} args{f', {kind}' if runs[1:] else ''}"
        text += f"<details><summary>{title}</summary>{inside}</details>" if rows else ""
    return text


STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f5f6f8; --text: #1c2024; --muted: #5b6470;
  --rule: #d5dae0 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1d2126; --text: #e6e9ec; --muted: #a0a9b4; --rule: #363c44 } }
body { margin: 0 auto; padding: 1.5rem; max-width: 1240px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 0 0 .5rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
nav a { margin-right: 1rem; color: inherit }
p { margin: .2rem 0 }
section { margin-top: 2rem; padding-top: 1.2rem; border-top: 1px solid var(--rule) }
.muted { color: var(--muted); font-size: .87em }
.said { white-space: pre-wrap; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid var(--rule);
  font-weight: normal; font-variant-numeric: tabular-nums }
thead th { color: var(--muted); font-size: .87em }
.args td { overflow-wrap: anywhere; max-width: 26rem }
.samples { width: 100% }
.samples td { min-width: 6rem }
img { max-width: 100%; height: auto; min-width: 64px; border-radius: 4px; margin: 0 4px 4px 0 }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 1rem }
figure { margin: .5rem 0 0; padding: .7rem; background: var(--card); border-radius: 8px }
figcaption { font-weight: 600; font-size: .93em; overflow-wrap: anywhere }
figure svg[role] { width: 100%; height: auto; display: block }
svg text { fill: var(--muted); font-size: 11px }
.y { text-anchor: end; dominant-baseline: middle }
.x { text-anchor: middle }
.grid { stroke: var(--rule) }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .82em; color: var(--muted) }
.legend svg { margin-right: .35rem; vertical-align: middle }
details { margin-top: 1rem }
summary { cursor: pointer; font-weight: 600 }
"""


def build(runs: list[dict]) -> str:
    """The page; sections that have nothing to show are left out."""
    sections = [
        ("summary", "Summary", summary_section(runs)),
        ("curves", "Curves", curves_section(runs)),
        ("samples", "Held-out samples, before and after", each_run(runs, responses_section)),
        ("pairs", "Held-out pairs", each_run(runs, pairs_section)),
        ("judgements", "Held-out judgements", each_run(runs, judgements_section)),
        ("args", "Args", args_section(runs)),
    ]
    sections, title = [s for s in sections if s[2]], escape(", ".join(run["name"] for run in runs))
    nav = "".join(f'<a href="#{name}">{head}</a>' for name, head, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{head}</h2>\n{part}</section>\n' for name, head, part in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title>\n<style>{STYLE}</style></head>\n'
        f"<body><header><h1>{title}</h1><nav>{nav}</nav></header>\n<main>{body}</main></body></html>\n"
    )


def main(args: Args) -> None:
    if not args.runs:
        fail("name the folder of at least one run")
    runs = [load_run(Path(name)) for name in args.runs]
    output = Path(args.output) if args.output else runs[0]["folder"] / "report.html"
    if not output.absolute().parent.is_dir():
        fail(f"--output {output}: there is no such folder")
    output.write_bytes(
        build(runs).encode("utf-8", "replace")
    )  # half a surrogate pair becomes a question mark
    print(f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
