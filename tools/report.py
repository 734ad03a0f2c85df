"""Make one HTML file from one or more runs: curves, evaluation samples, pairs, judgments, flags.

    python tools/report.py runs/a                                    # writes runs/a/report.html
    python tools/report.py runs/a runs/b runs/c --output abc.html    # seeds are averaged, with a band

It reads a run's metrics.jsonl, samples.jsonl, args.json and images, which are scaled down and embedded.
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

import matplotlib
import tyro
from matplotlib.figure import Figure

matplotlib.rcParams |= {"svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
GRAY = "#7a828c"  # legible on a light and on a dark page
matplotlib.rcParams |= dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY)

IMAGE_SIDE = 160  # maximum side of an embedded image, in pixels
MAX_ROWS = 12  # rows of a table, per run
FIRST, LAST = 400, 800  # characters of a long text that are shown: the answer is at its end
MAX_POINTS = 100  # per curve; longer curves are averaged in bins
IGNORED_FLAGS = {"seed", "run_name", "output_dir", "resume"}  # runs that differ only in these are averaged
COLORS = ("#2878c0", "#d4691c", "#1f9d76", "#b5539a", "#9a7b0a", "#4fa3c7", "#d0405a", "#7a828c")
DASHES = ("solid", "dashed", "dotted", "dashdot")
PANELS = [
    ("score", ["objective/scores", "eval/sampled_score", "eval/greedy_score"]),
    ("evaluation accuracy", ["eval/sampled_reward_accuracy", "eval/greedy_reward_accuracy", "eval/pass@*"]),
    ("KL to the reference, nats per response", ["objective/kl"]),
    ("response length, tokens", ["rollout/response_length_mean"]),
    ("entropy of the policy, nats per token", ["policy/entropy"]),
    ("approximate KL of the policies before and after an update, nats", ["policy/approx_kl"]),
    ("fraction clipped", ["policy/clipfrac_low", "policy/clipfrac_high", "value/clipfrac"]),
    ("fraction of prompts with equal scores", ["rollout/frac_reward_zero_std"]),
    ("fraction of truncated responses", ["rollout/truncated_frac"]),
    ("value loss", ["loss/value"]),
    ("explained variance", ["value/explained_variance"]),
    ("loss, nats per trained token", ["loss/sft", "eval/loss"]),
    ("verdict accuracy", ["eval/accuracy", "eval/soft_accuracy"]),
    ("fraction of parsable verdicts", ["eval/parse_rate"]),
    ("fraction of pairs with the same verdict in both orders", ["eval/swap_consistency"]),
    ("Bradley-Terry loss", ["rm/bt_loss", "eval/*bt_loss"]),
    ("pair accuracy", ["rm/accuracy", "eval/*/accuracy"]),
    ("reward of chosen - reward of rejected", ["rm/reward_diff", "eval/*reward_diff"]),
    ("log-prob difference of sampler and trainer, nats per token", ["*/logprob_diff_*"]),
    ("losses", ["loss/policy", "loss/entropy", "loss/kl"]),
    ("gradient norm", ["train/*grad_norm"]),
    ("seconds per step", ["time/rollout", "time/logprobs", "time/update", "time/sync"]),
]


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # Run directories.
    output: str | None = None  # Output file. Default: report.html in the first run's directory.


# ---- read ----


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON Lines file, except for an incomplete last line, which is still being written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def load_run(run_dir: Path) -> dict:
    """Name, args, metrics {key: {step: value}}, and records {type: {step: [...]}} of samples.jsonl."""
    try:
        args = json.loads((run_dir / "args.json").read_text(encoding="utf-8"))
        lines = read_lines(run_dir / "metrics.jsonl")
        sample_records = read_lines(run_dir / "samples.jsonl")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {run_dir} is not a run directory: {error}")
    if not lines:
        sys.exit(f"error: {run_dir} has no metrics yet: its metrics.jsonl is missing or empty")
    metrics = defaultdict(dict)
    records = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for key, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value):
                metrics[key][line["train/step"]] = value
    for record in sample_records:
        if record["phase"] == "train":
            record_type = "train"
        elif "reward_diff" in record:
            record_type = "pairs"
        else:
            record_type = "judgments" if "predicted_verdict" in record else "responses"
        records[record_type][record["train/step"]].append(record)
    return dict(run_dir=run_dir, name=run_dir.resolve().name, args=args, metrics=metrics, records=records)


def group_runs(runs: list[dict]) -> list[tuple[str, list[dict]]]:
    """(label, runs) of each group of runs that differ only in the seed."""
    groups = defaultdict(list)
    for run in runs:
        same = {name: value for name, value in run["args"].items() if name not in IGNORED_FLAGS}
        groups[json.dumps(same, sort_keys=True)].append(run)
    names = [", ".join(run["name"] for run in group) for group in groups.values()]
    return [(f"{n} (mean)" if group[1:] else n, group) for n, group in zip(names, groups.values())]


# ---- text, numbers, images, tables ----


def number(x) -> str:
    return f"{x:.4g}" if isinstance(x, int | float) else "–"


def escape(text) -> str:
    """Text from the data as HTML, without markup and control characters."""
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", str(text)))


def paragraph(text, css: str = "text") -> str:
    """A paragraph, without the middle of a long text."""
    text, end = str(text), ""
    if (num_omitted := len(text) - FIRST - LAST) > 0:
        end = f'<span class="muted"> … {num_omitted} characters … </span>{escape(text[-LAST:])}'
        text = text[:FIRST]
    return f'<p class="{css}">{escape(text) or "(empty)"}{end}</p>'


def find_image(source: str, run: dict) -> Path | None:
    """Resolve a path as the run did: relative to the current directory or to one of its dataset files."""
    sources = [run["args"].get(name) for name in ("dataset", "eval_dataset", "eval_datasets")]
    files = [file for x in sources if x for file in (x if isinstance(x, list) else [x])]
    for path in (Path(source), *(Path(file).parent / source for file in files)):
        try:
            if path.is_file():
                return path
        except OSError:  # the text is too long for a path
            return None
    return None


def image_tag(path: Path) -> str:
    """<img> with the embedded image, or the file name if it can't be read."""
    from PIL import Image

    try:
        image = Image.open(path).convert("RGB")
    except Exception:  # a video, or a file that Pillow can't decode
        return f'<span class="muted">{escape(path.name)}</span>'
    file_format = "png" if max(image.size) <= IMAGE_SIDE else "jpeg"
    image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    data = f"data:image/{file_format};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<img src="{data}" alt="{escape(path.name)}" width="{image.width}" height="{image.height}">'


def media_cell(record: dict, run: dict) -> str:
    """The images and videos of a record: columns image(s), video(s), and those of its two candidates."""
    sources = []
    for suffix in ("", "s", "_1", "_2"):
        for media_type in ("image", "video"):
            value = record.get(f"{media_type}{suffix}") or []
            sources += [str(source) for source in (value if isinstance(value, list) else [value])]
    parts = []
    for source in sources[:4]:
        path = find_image(source, run)
        missing = f'<span class="muted">{escape(Path(source).name[:80])}: not found</span>'
        parts.append(image_tag(path) if path else missing)
    return "".join(parts) or "–"


def prompt_cell(record: dict) -> str:
    """The prompt, a string or a chat, and the answer if there is one."""
    prompts = (record.get(name) for name in ("text", "prompt", "messages"))
    prompt = next(filter(None, prompts), f"row {record.get('row')}")
    if isinstance(prompt, list):
        turns = [(m["role"], m["content"]) for m in prompt]
        texts = [(r, c if isinstance(c, str) else " ".join(x.get("text", "") for x in c)) for r, c in turns]
        prompt = texts[0][1] if len(texts) == 1 else "\n".join(f"{role}: {text}" for role, text in texts)
    answer = record.get("answer")
    return paragraph(prompt) + ("" if answer is None else paragraph(f"answer: {answer}", "muted"))


def table(head: list[str], rows: list[list[str]], css: str = "") -> str:
    """Cells are HTML; the first cell of a row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = ("".join(f"<td>{cell}</td>" for cell in cells[1:]) for cells in rows)
    body = "\n".join(f'<tr><th scope="row">{cells[0]}</th>{line}</tr>' for cells, line in zip(rows, lines))
    inside = f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{css}">{inside}</table></div>\n'


# ---- curves ----


def expand(patterns: list[str], keys) -> list[str]:
    """The keys that match, in the order of the patterns."""
    return [*dict.fromkeys(k for pattern in patterns for k in fnmatch.filter(sorted(keys), pattern))]


def curve(runs: list[dict], key: str) -> list[tuple[float, ...]]:
    """(step, mean, minimum, maximum) over the runs, at steps that all runs have; averaged in bins if many."""
    tables = [run["metrics"][key] for run in runs if key in run["metrics"]]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values = [[table[step] for table in tables] for step in steps]
    points = [(step, sum(x) / len(x), min(x), max(x)) for step, x in zip(steps, values)]
    size = -(-len(points) // MAX_POINTS) or 1
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(column) / len(part) for column in zip(*part)) for part in bins]


def panel(title: str, series: list[tuple[str, int, int, list[tuple]]]) -> str:
    """An inline SVG of lines (label, color, dash, points). Points are (x, y) or (x, mean, minimum, maximum)."""
    series = [line for line in series if line[3]]
    if not series:
        return ""
    figure = Figure(figsize=(4.4, 2.6), layout="constrained")
    axes = figure.subplots()
    for label, color, dash, points in series:
        name = None if label in axes.get_legend_handles_labels()[1] else label  # runs differ by color
        style = {"color": COLORS[color % 8], "linestyle": DASHES[dash % 4], "label": name}
        x, y, *band = zip(*points)
        axes.plot(x, y, marker="." if len(x) <= 30 else None, **style)
        if band and band[0] != band[1]:  # between seeds
            axes.fill_between(x, *band, color=style["color"], alpha=0.2, linewidth=0, gid="band")
    axes.grid(linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg[svg.index('<svg') :]}</figure>\n"


def curves_section(runs: list[dict]) -> str:
    """Colors are runs, or the mean over seeds; dashes are the metrics of a panel."""
    groups, keys = group_runs(runs), {key for run in runs for key in run["metrics"]}

    def draw(title: str, panel_keys: list[str]) -> str:
        colored = [(c, d, key) for c in range(len(groups)) for d, key in enumerate(panel_keys)]
        return panel(title, [(key, c, d, curve(groups[c][1], key)) for c, d, key in colored])

    chosen = [(title, expand(patterns, keys)) for title, patterns in PANELS]
    in_panels = {key for _, panel_keys in chosen for key in panel_keys}
    rest = sorted(keys - in_panels - {"train/step"})
    dot = '<svg width="14" height="14"><circle fill="{}" cx="7" cy="7" r="6"/></svg>'
    names = "".join(f"<span>{dot.format(COLORS[c % 8])}{escape(n)}</span>" for c, (n, _) in enumerate(groups))
    return (
        '<p class="muted">The horizontal axes are steps. Runs that differ only in the seed are averaged; '
        "the band is from their minimum to their maximum.</p>"
        f'<div class="legend">{names}</div><div class="panels">{"".join(draw(*x) for x in chosen)}</div>'
        f'<details><summary>{len(rest)} more metrics</summary><div class="panels">'
        f"{''.join(draw(key, [key]) for key in rest)}</div></details>"
    )


# ---- samples ----


def each_run(runs: list[dict], section) -> str:
    """The section of each run that has one, under the run's name if there are several runs."""
    parts = [(run["name"], section(run)) for run in runs]
    return "".join((f"<h3>{escape(n)}</h3>" if runs[1:] else "") + part for n, part in parts if part)


def before_and_after(run: dict, record_type: str, cell, order=lambda record: 0) -> str:
    """The records of the first and of the last evaluation side by side, one table row per dataset row."""
    tables = run["records"][record_type]
    records = defaultdict(lambda: defaultdict(list))  # dataset row -> step -> records
    steps = sorted({min(tables), max(tables)}) if tables else []
    for step in steps:
        for record in tables[step]:
            records[record["row"]][step].append(record)
    lines = []
    for by_step in sorted(records.values(), key=lambda by_step: order(by_step[max(by_step)][0]))[:MAX_ROWS]:
        last = by_step[max(by_step)][0]
        cells = ["".join(map(cell, by_step[step])) or "–" for step in steps]
        lines.append([media_cell(last, run), prompt_cell(last), *cells])
    head = ["image", "prompt", *(f"{when}: step {t}" for when, t in zip(("before", "after"), steps))]
    return table(head, lines, "samples") if lines else ""


def response_cell(record: dict) -> str:
    """The response, or with --environment a block for each of its turns and observations."""
    names = [name for name in record if name.startswith(("turn/", "observation/"))]
    if not names:
        return paragraph(record["response"])
    blocks = []
    for name in names:
        role, _, k = name.partition("/")
        blocks.append(
            f'<div class="{role}">{paragraph(f"{role} {k}", "muted")}{paragraph(record[name])}</div>'
        )
    return "".join(blocks)


def responses_section(run: dict) -> str:
    """rloo.py, ppo_vl.py: responses to evaluation prompts, or without an evaluation set to training prompts."""

    def cell(record: dict) -> str:
        rewards = {key.partition("/")[2]: x for key, x in record.items() if key.startswith("reward/")}
        parts = [record["phase"].removeprefix("eval_")]
        parts += [f"{name} {number(x)}" for name, x in rewards.items()]
        return response_cell(record) + paragraph(" · ".join(parts), "muted")

    text = before_and_after(run, "responses", cell)
    if text or run["records"]["pairs"] or run["records"]["judgments"]:
        return text
    return before_and_after(run, "train", cell)


def judgments_section(run: dict) -> str:
    """grm_sft.py: the judge's response, its verdict probabilities, and its response with swapped candidates."""

    def cell(record: dict) -> str:
        parts = [f"verdict {record['predicted_verdict'] or 'not parsable'}"]
        parts.append(f"label {record.get('verdict') or 'unknown'}")
        parts += [f"p({name}) {number(p)}" for name, p in (record.get("probabilities") or {}).items()]
        text = paragraph(record["response"]) + paragraph(" · ".join(parts), "muted")
        swapped = record.get("swapped_response")
        if swapped is None:
            return text
        note = "swapped" if record.get("consistent") else "swapped, inconsistent verdict"
        return text + paragraph(f"{note}: {swapped}", "muted")

    tables = run["records"]["judgments"]
    last = tables[max(tables)] if tables else []
    wrong = sum(record.get("correct") is False for record in last)
    note = f"<p>{wrong} of {len(last)} wrong at the last evaluation, listed first.</p>" if last else ""

    def order(record: dict) -> tuple[bool, bool]:
        return record.get("correct") is not False, record.get("consistent") is not False

    return note + before_and_after(run, "judgments", cell, order)


def reliability(differences: list[float], num_bins: int = 10) -> list[tuple[float, float, float]]:
    """Mean confidence, accuracy (ties count 1/2) and fraction of all pairs, per nonempty bin of confidence.

    A difference is that of two rewards, minus the margin. The bins of confidence = sigmoid(|difference|) divide
    [0.5, 1] evenly. Calibration error = sum of fraction * |accuracy - confidence|, https://arxiv.org/abs/1706.04599.
    """
    bins = defaultdict(list)
    for diff in differences:
        confidence = 1 / (1 + math.exp(-min(abs(diff), 700)))
        accuracy = 1.0 if diff > 0 else 0.0 if diff < 0 else 0.5
        bins[min(int((confidence - 0.5) * 2 * num_bins), num_bins - 1)].append((confidence, accuracy))
    means = [(*(sum(x) / len(pairs) for x in zip(*pairs)), len(pairs)) for _, pairs in sorted(bins.items())]
    return [(confidence, accuracy, count / len(differences)) for confidence, accuracy, count in means]


def pairs_section(run: dict) -> str:
    """reward_bt.py, last evaluation, per evaluation set: calibration and the worst pairs."""
    sets = defaultdict(list)
    tables = run["records"]["pairs"]
    for record in tables[max(tables)] if tables else ():
        sets[record["phase"].removeprefix("eval_")].append(record)
    parts = []
    for name, records in sets.items():
        bins = reliability([record["reward_diff"] - (record.get("margin") or 0.0) for record in records])
        error = sum(fraction * abs(accuracy - confidence) for confidence, accuracy, fraction in bins)
        lines = [
            ("accuracy", 0, 0, [b[:2] for b in bins]),
            ("fraction of pairs", 1, 2, [(b[0], b[2]) for b in bins]),
            ("calibrated", 7, 1, [(0.5, 0.5), (1, 1)]),
        ]
        rows = []
        for record in sorted(records, key=lambda record: record["reward_diff"])[:MAX_ROWS]:
            cells = [media_cell(record, run), prompt_cell(record)]
            for side in ("chosen", "rejected"):
                reward = f"reward {number(record[f'{side}_reward'])}"
                cells.append(paragraph(record[side]) + paragraph(reward, "muted"))
            rows.append([*cells, number(record["reward_diff"])])
        parts.append(
            f'<h3>{escape(name)}, step {records[0]["train/step"]}, {len(records)} pairs</h3><div class="panels">'
            + panel(f"accuracy by confidence, sigmoid(|r - margin|); calibration error {error:.3f}", lines)
            + "</div><p>Pairs with the lowest difference r = reward of chosen - reward of rejected:</p>"
            + table(["image", "prompt", "chosen", "rejected", "r"], rows, "samples")
        )
    return "".join(parts)


# ---- page ----


def summary_section(runs: list[dict]) -> str:
    rows = []
    for run in runs:
        metrics, args = run["metrics"], run["args"]
        patterns = [key for _, panel_keys in PANELS for key in panel_keys if key.startswith("eval/")]
        keys = expand(patterns, metrics)[:6]
        ends = [(key, metrics[key][min(metrics[key])], metrics[key][max(metrics[key])]) for key in keys]
        changes = [f"{escape(key)} {number(first)} → {number(last)}" for key, first, last in ends]
        about, seconds = f"{args.get('model')}, {args.get('dataset')}", sum(metrics["time/total"].values())
        cells = [f"{max(metrics['train/step']):.0f}", f"{seconds:.0f} s", "<br>".join(changes) or "–"]
        rows.append([escape(run["name"]), escape(about), *cells])
    head = ["run", "model, dataset", "steps", "training time", "first → last evaluation"]
    return table(head, rows)


def args_section(runs: list[dict]) -> str:
    """Two collapsed tables: the flags that differ between the runs, and the others."""
    different, equal = [], []
    for name in dict.fromkeys(name for run in runs for name in run["args"]):
        values = [escape(json.dumps(run["args"].get(name), ensure_ascii=False)) for run in runs]
        row = [f"<code>--{escape(name.replace('_', '-'))}</code>", *values]
        (different if len({*values}) > 1 else equal).append(row)
    parts = [("different", different, [escape(run["name"]) for run in runs]), ("equal", equal, ["all runs"])]
    text = ""
    for label, rows, head in parts:
        inside = table(["flag", *head], [row[: 1 + len(head)] for row in rows], "args")
        title = f"{len(rows)} flags{f', {label}' if runs[1:] else ''}"
        text += f"<details><summary>{title}</summary>{inside}</details>" if rows else ""
    return text


STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f5f6f8; --text: #1c2024; --muted: #5b6470;
  --rule: #d5dae0 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1d2126; --text: #e6e9ec; --muted: #a0a9b4; --rule: #363c44 } }
body { margin: 0 auto; padding: 1.5rem; max-width: 1240px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
h1 { margin: 0 0 .25rem; overflow-wrap: anywhere }
nav a { margin-right: 1rem; color: inherit }
p { margin: .2rem 0 }
section { margin-top: 2rem; padding-top: 1.2rem; border-top: 1px solid var(--rule) }
.muted { color: var(--muted); font-size: .87em }
.text { white-space: pre-wrap; overflow-wrap: anywhere }
.turn, .observation { margin: .2rem 0; padding-left: .6rem; border-left: 3px solid #2878c0 }
.observation { margin-left: 1.2rem; border-color: var(--rule) }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid var(--rule);
  font-weight: normal; font-variant-numeric: tabular-nums }
thead th { color: var(--muted); font-size: .87em }
.args td { overflow-wrap: anywhere; max-width: 26rem }
.samples { width: 100% }
.samples td { min-width: 9rem }
img { max-width: 100%; height: auto; min-width: 64px; border-radius: 4px; margin: 0 4px 4px 0 }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 1rem }
figure { margin: .5rem 0 0; padding: .7rem; background: var(--card); border-radius: 8px }
figcaption { font-weight: 600; font-size: .93em; overflow-wrap: anywhere }
figure svg { width: 100%; height: auto; display: block }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .82em; color: var(--muted) }
.legend svg { margin-right: .35rem; vertical-align: middle }
summary { cursor: pointer; font-weight: 600 }
"""


def build(runs: list[dict]) -> str:
    """The HTML page; empty sections are omitted."""
    sections = [
        ("summary", "Summary", summary_section(runs)),
        ("curves", "Curves", curves_section(runs)),
        ("samples", "Responses before and after", each_run(runs, responses_section)),
        ("pairs", "Evaluation pairs", each_run(runs, pairs_section)),
        ("judgments", "Evaluation judgments", each_run(runs, judgments_section)),
        ("args", "Flags", args_section(runs)),
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
        sys.exit("error: give at least one run directory")
    runs = [load_run(Path(name)) for name in args.runs]
    output = Path(args.output) if args.output else runs[0]["run_dir"] / "report.html"
    output.write_bytes(build(runs).encode("utf-8", "replace"))  # an unpaired surrogate becomes "?"
    print(f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
