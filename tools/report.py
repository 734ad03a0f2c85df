"""One HTML file for a run or a comparison of runs: curves, args, timings, samples before and after, groups, tokens.

    python tools/report.py runs/a                                    # report.html
    python tools/report.py runs/a runs/b runs/c --output abc.html    # seeds become a mean and a band

A run is a folder of ppo_vl.py, rloo.py, grm_sft.py or reward_bt.py. The file needs no network, no script and nothing beside it;
pictures lie in it, scaled down. Groups and tokens are there for runs of ppo_vl.py and rloo.py with `--save-trajectories`.
"""

import base64
import fnmatch
import html
import io
import json
import math
import re
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn

import tyro

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 3_000_000  # of the whole file
MAX_PICTURE_BYTES = 1_200_000  # of all pictures together, before base64
PICTURE_SIDE = 192  # pixels
SAMPLES = 12  # held-out rows shown per run
TOKENS = 4000  # tokens shown in all runs together
TEXT = 1500  # characters shown of a prompt or response
POINTS = 100  # per curve; longer ones are averaged in bins
NOT_COMPARED = ("seed", "run_name", "output_dir", "resume")  # runs that differ only here are one line with a band
SCRIPTS = {
    "gae_lambda": "ppo_vl.py",
    "mask_truncated": "rloo.py",
    "swap_sides": "grm_sft.py",
    "center_coef": "reward_bt.py",
}
PHASES = ("rollout", "score", "update", "sync")
PANELS = [
    ("score", ["objective/scores", "eval/sampled_score", "eval/greedy_score"]),
    ("held-out accuracy", ["eval/sampled_accuracy", "eval/greedy_accuracy", "eval/pass_at_k"]),
    ("KL to the reference, nats per response", ["objective/kl"]),
    ("response length, tokens", ["rollout/response_length_mean"]),
    ("policy entropy, nats per token", ["policy/entropy"]),
    ("KL of the update, nats per token", ["policy/approx_kl"]),
    ("clipped tokens, fraction", ["policy/clipfrac_low", "policy/clipfrac_high"]),
    ("groups without signal, truncated responses", ["rollout/zero_std_groups_frac", "rollout/truncated_frac"]),
    ("value loss", ["loss/value"]),
    ("explained variance", ["val/explained_variance"]),
    ("loss, nats per trained token", ["loss/sft", "eval/loss"]),
    ("held-out accuracy of the verdict", ["eval/accuracy", "eval/soft_accuracy"]),
    ("verdicts that can be read", ["eval/parse_rate"]),
    ("verdict follows when the sides change", ["eval/swap_consistency"]),
    ("Bradley-Terry loss", ["rm/bt_loss", "eval/*/bt_loss"]),
    ("pair accuracy", ["rm/accuracy", "eval/*/accuracy"]),
    ("chosen - rejected", ["rm/margin", "eval/*/margin"]),
    ("gradient norm", ["train/grad_norm"]),
]
VIEWS = (("advantages", "advantage"), ("kl", "KL, nats"), ("ratio", "ratio"))


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]
    """folders of the runs"""
    output: str = "report.html"
    """file to write"""


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------------------------------------------------------------------
# read
# ---------------------------------------------------------------------------------------------------------------------


def read_json(path: Path, lines: bool = False):
    """Content of a JSON file, or the objects of a JSON Lines file."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if lines else [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path} can't be read ({type(error).__name__})")
    values = []
    for number, text in enumerate(texts, 1):
        where = f"{path} line {number}" if lines else str(path)
        try:
            values.append(json.loads(text))
        except ValueError as error:
            fail(f"{where} is not JSON ({error}); delete or mend it")
        if lines and not isinstance(values[-1], dict):
            fail(f"{where} is not a JSON object; delete or mend it")
    return values if lines else values[0]


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """{N: path} in ascending order, for files or folders of which the last number of the name is N."""
    found = {int(match[1]): path for path in folder.glob(pattern) if (match := re.search(r"(\d+)(\.\w+)?$", path.name))}
    return dict(sorted(found.items()))


def load_run(folder: Path) -> dict:
    """What the report shows of a run: name, script, args, metrics {key: {step: value}}, samples of the first and the last
    evaluation, trajectories of the first and the last saved step."""
    if not folder.is_dir():
        fail(f"{folder}: no such folder")
    for name in ("args.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            fail(f"{folder} has no {name}; give the folder of a run (runs/NAME)")
    args = read_json(folder / "args.json")
    if not isinstance(args, dict):
        fail(f"{folder / 'args.json'} is not a JSON object; give the folder of a run (runs/NAME)")
    metrics = {}
    for number, record in enumerate(read_json(folder / "metrics.jsonl", lines=True), 1):
        step = record.get("train/step")
        if not isinstance(step, int):
            fail(f"{folder / 'metrics.jsonl'} line {number} has no train/step; delete or mend it")
        for key, value in record.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                metrics.setdefault(key, {})[step] = value
    if not metrics:
        fail(f"{folder / 'metrics.jsonl'} is empty; wait until the run has logged a step")
    evals = numbered(folder / "eval", "eval_step_*.json")
    if evals:
        samples = {step: read_json(evals[step]) for step in (min(evals), max(evals))}
        if not all(isinstance(x, list) and all(isinstance(record, dict) for record in x) for x in samples.values()):
            fail(f"{folder / 'eval'}: eval_step_N.json is not a list of objects; delete or mend it")
    else:
        path, samples = folder / "samples.jsonl", {}
        for record in read_json(path, lines=True) if path.is_file() else []:
            samples.setdefault(record.get("step", 0), []).append(record)
        samples = {step: samples[step] for step in sorted(samples)[:1] + sorted(samples)[1:][-1:]}
    saved = numbered(folder / "trajectories", "step_*.jsonl")
    steps = sorted({min(saved), max(saved)}) if saved else []
    return {
        "folder": folder,
        "name": folder.resolve().name,
        "script": next((script for flag, script in SCRIPTS.items() if flag in args), "?"),
        "args": args,
        "metrics": metrics,
        "samples": {step: [read_sample(record) for record in records] for step, records in samples.items()},
        "trajectories": {step: pick_group(read_json(saved[step], lines=True)) for step in steps},
    }


def pick_group(lines: list[dict]) -> list[dict]:
    """The first prompt's responses that do not all score alike; if there is none, the first prompt's."""
    groups = [list(group) for _, group in groupby(lines, key=lambda line: line.get("row"))]
    return next(
        (group for group in groups if len({line.get("score") for line in group}) > 1), groups[0] if groups else []
    )


def read_sample(record: dict) -> dict:
    """A saved response, pair or judgement -> key (the same before and after), question, images, answer, response, score."""
    question = record.get("prompt", "")
    if "messages" in record:
        turns = []
        for message in record["messages"]:
            parts = [p.get("text", "") if isinstance(p, dict) else str(p) for p in message["content"]]
            turns.append((message["role"], " ".join(part for part in parts if part)))
        question = turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)
    sample = {"question": question, "images": record.get("images") or [], "answer": record.get("answer"), "phase": ""}
    if "chosen" in record:
        key = (record.get("dataset"), record.get("row"), record["chosen"], record["rejected"])
        response = "\n".join(
            f"{name} ({number(record[f'{name}_reward'])}): {record[name]}" for name in ("chosen", "rejected")
        )
        return {**sample, "key": key, "response": response, "score": f"margin {number(record['margin'])}"}
    if "generated_text" in record:
        right = {True: "right", False: "wrong", None: "no truth"}[record.get("right")]
        truth = record.get("truth")
        return {
            **sample,
            "key": record.get("number"),
            "answer": truth,
            "response": record["generated_text"],
            "score": f"verdict {record.get('predicted')}: {right}",
        }
    phase = str(record.get("phase", "")).removeprefix("eval_")
    score = "no score" if record.get("score") is None else f"score {number(record['score'])}"
    response = record.get("response", "")
    return {**sample, "phase": phase, "key": record.get("row"), "response": response, "score": score}


def group_runs(runs: list[dict]) -> list[dict]:
    """Runs that differ only in the seed together: [{"runs": [...], "label": ...}]."""
    groups = {}
    for run in runs:
        same = {name: value for name, value in run["args"].items() if name not in NOT_COMPARED}
        groups.setdefault((run["script"], json.dumps(same, sort_keys=True)), []).append(run)
    return [
        {
            "runs": members,
            "label": ", ".join(run["name"] for run in members) + (f" ({len(members)} seeds)" if members[1:] else ""),
        }
        for members in groups.values()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# text, numbers, pictures
# ---------------------------------------------------------------------------------------------------------------------


def number(x) -> str:
    return f"{x:.4g}" if isinstance(x, (int, float)) else "–"


def escape(text) -> str:
    """Text of the data as HTML: no markup, no control characters."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", str(text))
    return html.escape(text)


def shorten(text) -> str:
    text = str(text)
    rest = len(text) - TEXT
    return escape(text[:TEXT]) + (f' <span class="muted">… {rest} more characters</span>' if rest > 0 else "")


def find_picture(source: str, run: dict) -> Path | None:
    """A path as the run saw it; relative ones are tried beside the dataset files, too."""
    path = Path(source).expanduser()
    names = [run["args"].get(name) for name in ("dataset", "eval_dataset", "eval_datasets")]
    files = [part for name in names if name for part in (name if isinstance(name, list) else str(name).split(","))]
    for candidate in [path, *(Path(file).parent / path for file in files)]:
        try:
            if candidate.is_file():
                return candidate
        except OSError:  # a name too long for a path is a description
            pass
    return None


def picture(source: str, run: dict, budget: list[int]) -> str:
    """<img> with the picture in it, at most PICTURE_SIDE pixels wide and high; or a sentence where it can't be had."""
    from PIL import Image

    name, path = escape(Path(str(source)).name), find_picture(str(source), run)
    if path is None:
        return f'<span class="muted">{name}: not found</span>'
    try:
        image = Image.open(path).convert("RGB")
    except Exception:  # Pillow raises what its decoders raise
        return f'<span class="muted">{name}: can\'t be read</span>'
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    options = []
    for kind, settings in (("png", {"optimize": True}), ("jpeg", {"quality": 80})):
        buffer = io.BytesIO()
        image.save(buffer, kind, **settings)
        options.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    size, kind, data = min(options)
    if size > budget[0]:
        return f'<span class="muted">{name}: left out, the file would grow too large</span>'
    budget[0] -= size
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img src="{uri}" alt="picture {name}" width="{image.width}" height="{image.height}">'


def table(head: list[str], rows: list[list[str]], kind: str = "") -> str:
    """Cells are HTML; the first cell of a row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>\n"
        for cells in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'
    )


# ---------------------------------------------------------------------------------------------------------------------
# sections
# ---------------------------------------------------------------------------------------------------------------------


def summary_section(runs: list[dict]) -> str:
    rows = []
    for run in runs:
        evals = []
        for key in expand([key for _, keys in PANELS for key in keys if key.startswith("eval/")], run["metrics"])[:6]:
            values = [value for _, value in sorted(run["metrics"][key].items())]
            evals.append(f"{escape(key)} {number(values[0])} → {number(values[-1])}")
        total = sum(run["metrics"].get("time/total", {}).values())
        rows.append(
            [
                escape(run["name"]),
                f"{escape(run['script'])}, {escape(run['args'].get('model'))}, {escape(run['args'].get('dataset'))}",
                str(max(run["metrics"]["train/step"])),
                f"{total:.0f} s" if total else "–",
                "<br>".join(evals) or "no evaluation",
            ]
        )
    return table(["run", "script, model, data", "steps", "time in steps", "held out, first → last evaluation"], rows)


def expand(patterns: list[str], metrics: dict) -> list[str]:
    """Those keys that are there, in the order of the patterns, each once."""
    return list(
        dict.fromkeys(key for pattern in patterns for key in sorted(metrics) if fnmatch.fnmatchcase(key, pattern))
    )


def curve(runs: list[dict], key: str) -> list[tuple[float, float, float, float]]:
    """[(step, mean, lowest, highest)] over the runs, at the steps that all of them have; averaged in bins over POINTS."""
    tables = [run["metrics"][key] for run in runs if key in run["metrics"]]
    if not tables:
        return []
    points = []
    for step in sorted(set.intersection(*map(set, tables))):
        values = [values[step] for values in tables]
        points.append((step, sum(values) / len(values), min(values), max(values)))
    size = math.ceil(len(points) / POINTS) if points else 1
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(column) / len(part) for column in zip(*part)) for part in bins]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def panel(title: str, groups: list[dict], keys: list[str]) -> str:
    """One SVG: colour = run or runs of several seeds, dash = metric. Empty where no run has the metrics."""
    series = [
        (g, k, points)
        for g, group in enumerate(groups)
        for k, key in enumerate(keys)
        if (points := curve(group["runs"], key))
    ]
    if not series:
        return ""
    W, H, left, right, top, bottom = 360, 210, 52, 10, 10, 26
    xs = [p[0] for _, _, points in series for p in points]
    ys = [y for _, _, points in series for p in points for y in p[2:]]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    y0, y1 = min(ys), max(ys)
    pad = (y1 - y0) * 0.06 or abs(y1) * 0.1 or 0.5
    y0, y1 = y0 - pad, y1 + pad

    def at(x: float, y: float) -> str:
        u, v = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return f"{left + u * (W - left - right):.1f},{H - bottom - v * (H - top - bottom):.1f}"

    parts, told = [], []
    for y in ticks(y0, y1):
        v = at(x0, y).split(",")[1]
        parts.append(
            f'<path class="grid" d="M{left},{v}H{W - right}"/><text x="{left - 6}" y="{v}" class="y">{y:.4g}</text>'
        )
    for x in ticks(x0, x1):
        if x == int(x):
            parts.append(f'<text x="{at(x, y0).split(",")[0]}" y="{H - 8}" class="x">{x:.6g}</text>')
    for g, _, points in series:
        if any(p[2] < p[3] for p in points):
            edge = [at(p[0], p[3]) for p in points] + [at(p[0], p[2]) for p in reversed(points)]
            parts.append(f'<path class="band c{g % 8}" d="M{"L".join(edge)}Z"/>')
    for g, k, points in series:
        parts.append(f'<path class="line c{g % 8} s{k % 4}" d="M{"L".join(at(*p[:2]) for p in points)}"/>')
        name = f"{groups[g]['label']}, {keys[k]}"
        if len(points) <= 30:
            for p in points:
                x, y = at(*p[:2]).split(",")
                about = f"{name}, step {p[0]:g}: {number(p[1])}" + (
                    f" ({number(p[2])} to {number(p[3])})" if p[2] < p[3] else ""
                )
                parts.append(
                    f'<circle class="c{g % 8}" cx="{x}" cy="{y}" r="2.6"><title>{escape(about)}</title></circle>'
                )
        told.append(
            f"{name}: {number(points[0][1])} at step {points[0][0]:g}, {number(points[-1][1])} at step {points[-1][0]:g}"
        )
    drawn = sorted({k for _, k, _ in series})
    legend = "".join(
        '<span><svg width="26" height="8" aria-hidden="true">'
        f'<path class="line key s{k % 4}" d="M1,4H25"/></svg>{escape(keys[k])}</span>'
        for k in drawn
    )
    label = escape(f"{title}. " + "; ".join(told))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {W} {H}" role="img" aria-label="{label}">'
        f'{"".join(parts)}</svg><div class="legend">{legend}</div></figure>\n'
    )


def curves_section(groups: list[dict]) -> str:
    everything = {key for group in groups for run in group["runs"] for key in run["metrics"]}
    legend = "".join(
        '<span><svg width="14" height="14" aria-hidden="true">'
        f'<circle class="c{g % 8}" cx="7" cy="7" r="6"/></svg>{escape(group["label"])}</span>'
        for g, group in enumerate(groups)
    )
    shown, panels = {"train/step", "train/episode"}, []
    for title, patterns in PANELS:
        keys = expand(patterns, everything)
        panels.append(panel(title, groups, keys))
        shown |= set(keys)
    rest = [panel(key, groups, [key]) for key in sorted(everything - shown)]
    text = "x: step. "
    if any(group["runs"][1:] for group in groups):
        text += "Line: mean over the seeds; band: lowest to highest seed. "
    text += f"Curves of more than {POINTS} steps are averaged in bins. Values: hover over a point."
    return (
        f'<p class="muted">{text}</p><div class="legend runs">{legend}</div><div class="panels">{"".join(panels)}</div>'
        f'<details><summary>{len(rest)} more metrics</summary><div class="panels">{"".join(rest)}</div></details>'
    )


def args_section(runs: list[dict]) -> str:
    """Flags with different values, flags that some of the scripts don't have, equal ones."""
    different, partial, equal = [], [], []
    for name in dict.fromkeys(name for run in runs for name in run["args"]):
        values = [json.dumps(run["args"][name], ensure_ascii=False) if name in run["args"] else "–" for run in runs]
        flag = f"<code>--{escape(name.replace('_', '-'))}</code>"
        there = [value for value in values if value != "–"]
        usual = max(there, key=there.count)
        marked = [usual] if there.count(usual) > 1 else []  # where no two are alike all are marked
        cells = [escape(value) if value in ("–", *marked) else f"<mark>{escape(value)}</mark>" for value in values]
        if len(set(there)) > 1:
            different.append([f"<b>≠</b> {flag}", *cells])
        elif len(there) < len(runs):
            partial.append([flag, *map(escape, values)])
        else:
            equal.append([flag, escape(values[0])])
    if not runs[1:]:
        return table(["flag", "value"], equal, "args")
    head = ["flag", *(escape(run["name"]) for run in runs)]
    parts = [table(head, different, "args") if different else "<p>The runs have the same args.</p>"]
    if partial:
        title = f"{len(partial)} flags that only some of the scripts have"
        parts.append(f"<details><summary>{title}</summary>{table(head, partial, 'args')}</details>")
    parts.append(
        f"<details><summary>{len(equal)} equal args</summary>{table(['flag', 'all runs'], equal, 'args')}</details>"
    )
    return "".join(parts)


def timings_section(runs: list[dict]) -> str:
    rows = []
    for run in runs:
        seconds = {}
        for phase in (*PHASES, "total", "eval"):
            values = list(run["metrics"].get(f"time/{phase}", {}).values())
            seconds[phase] = sum(values) / len(values) if values else 0.0
        rest = seconds["total"] - sum(seconds[phase] for phase in PHASES)
        seconds["other"] = rest if rest > 0.005 * seconds["total"] else 0.0
        rows.append((run, seconds))
    longest = max(seconds["total"] for _, seconds in rows)
    if not longest:
        return "<p>No step is timed yet.</p>"
    kinds = [phase for phase in (*PHASES, "other") if any(seconds[phase] for _, seconds in rows)]
    bars = ""
    for run, seconds in rows:
        pieces = "".join(
            f'<i class="p{i}" style="width:{100 * seconds[phase] / longest:.2f}%" title="{phase}: {seconds[phase]:.3f} s"></i>'
            for i, phase in enumerate((*PHASES, "other"))
        )
        told = ", ".join(f"{phase} {seconds[phase]:.2f} s" for phase in kinds)
        bars += f'<div class="bar"><b>{escape(run["name"])}</b><div role="img" aria-label="{told}">{pieces}</div></div>'
    legend = "".join(
        f'<span><i class="swatch p{i}"></i>{phase}</span>'
        for i, phase in enumerate((*PHASES, "other"))
        if phase in kinds
    )
    cells, columns = [], {**{kind: kind for kind in kinds}, "total": "step", "eval": "an evaluation"}
    if not any(seconds["eval"] for _, seconds in rows):
        del columns["eval"]
    for run, seconds in rows:
        shown = [f"{seconds[k]:.3f} s" if seconds[k] else "–" for k in columns]
        cells.append([escape(run["name"]), *shown])
    note = (
        "Mean seconds per step. Phases: time/rollout, time/score, time/update, time/sync; other: the rest of time/total, which "
        "is the whole step where a script times no phases."
    )
    return f'<p class="muted">{note}</p><div class="legend">{legend}</div>{bars}' + table(
        ["run", *columns.values()], cells, "numbers"
    )


def samples_section(runs: list[dict], budget: list[int]) -> str:
    parts, count = [], max(3, SAMPLES // len(runs))
    for i, run in enumerate(runs):
        steps = sorted(run["samples"])
        if not steps or not run["samples"][steps[0]]:
            parts.append(f"<p>{escape(run['name'])}: no held-out samples were saved.</p>")
            continue
        cells = {}  # key: {step: [sample]}, one response for each phase
        for step in steps:
            for sample in run["samples"][step]:
                found = cells.setdefault(str(sample["key"]), {}).setdefault(step, [])
                if sample["phase"] not in [x["phase"] for x in found]:
                    found.append(sample)
        rows = []
        for found in list(cells.values())[:count]:
            first = next(iter(found.values()))[0]
            answer = "" if first["answer"] is None else f'<p class="muted">right: {shorten(first["answer"])}</p>'
            pictures = "".join(picture(source, run, budget) for source in first["images"][:4])
            row = [pictures or "–", f'<p class="said">{shorten(first["question"])}</p>{answer}']
            for step in steps:
                said = [
                    f'<p class="said">{shorten(x["response"]) or "(nothing)"}</p>'
                    f'<p class="muted">{" · ".join(y for y in (escape(x["phase"]), escape(x["score"])) if y)}</p>'
                    for x in found.get(step, [])
                ]
                row.append("".join(said) or '<p class="muted">not among what was saved at this step</p>')
            rows.append(row)
        head = ["picture", "prompt", f"before: step {steps[0]}"] + [f"after: step {step}" for step in steps[1:]]
        note = "" if steps[1:] else '<p class="muted">There is one evaluation only.</p>'
        opened = " open" if i == 0 else ""
        title = f"{escape(run['name'])}: the first {len(rows)} of {len(cells)} saved rows"
        parts.append(f"<details{opened}><summary>{title}</summary>{note}{table(head, rows, 'samples')}</details>\n")
    return "".join(parts)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def without_trajectories(runs: list[dict]) -> str:
    """A sentence on the runs of which groups and tokens can't be shown, if there are any."""
    names = ", ".join(escape(run["name"]) for run in runs if not any(run["trajectories"].values()))
    how = "ppo_vl.py and rloo.py save them with --save-trajectories"
    return f"<p>Left out, because no trajectories were saved ({how}): {names}.</p>" if names else ""


def groups_section(runs: list[dict], budget: list[int]) -> str:
    parts = []
    for run in runs:
        for step, group in run["trajectories"].items():
            if not group:
                continue
            first, rows = read_sample(group[0]), []
            names = list(dict.fromkeys(name for line in group for name in line.get("components", {})))
            for k, line in enumerate(group):
                rows.append(
                    [
                        str(k),
                        f'<p class="said">{shorten(line.get("response", "")) or "(nothing)"}</p>',
                        *(number(line.get("components", {}).get(name)) for name in names),
                        number(line.get("score")),
                        number(mean(line.get("advantages", []))),
                        f"{len(line.get('response_ids', []))}{' (cut)' if line.get('truncated') else ''}",
                    ]
                )
            scores = [line["score"] for line in group if line.get("score") is not None]
            spread = math.sqrt(mean([(s - mean(scores)) ** 2 for s in scores]))
            pictures = "".join(picture(source, run, budget) for source in first["images"][:4])
            parts.append(
                f"<div><h3>{escape(run['name'])}, step {step}</h3>\n"
                f'<div class="prompt">{pictures}<div><p class="said">{shorten(first["question"])}</p>'
                f'<p class="muted">right: {escape(first["answer"])} · {len(group)} responses · '
                f"mean score {number(mean(scores))}, standard deviation {number(spread)}</p></div></div>"
                + table(["#", "response", *map(escape, names), "score", "advantage", "tokens"], rows)
                + "</div>"
            )
    note = (
        "One prompt per step: the first whose responses do not all score alike, in the first and the last saved step. "
        "Score: of all rewards together. Advantage: mean over the response's tokens."
    )
    return f'<p class="muted">{note}</p><div class="pairs">{"".join(parts)}</div>{without_trajectories(runs)}'


def load_tokenizer(run: dict):
    """Of the last checkpoint, else of --model where that is a folder, else None."""
    checkpoints = list(numbered(run["folder"], "checkpoint-*").values())[::-1]
    model = str(run["args"].get("model"))
    folders = [
        folder for folder in [*checkpoints, Path(model), ROOT / model] if (folder / "tokenizer_config.json").is_file()
    ]
    if not folders:
        return None
    sys.path.insert(0, str(ROOT))
    import common  # noqa: F401  before transformers: mends torchvision beside a CPU-only torch

    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folders[0], local_files_only=True)
    except Exception:  # a tokenizer that this transformers can't load: the ids are shown
        return None


def token_values(line: dict) -> dict[str, list[float]]:
    """{view: one number per token}. A table of zeros was not computed in that run: no reference, no old log-probs."""
    there = {name for name in ("logprobs", "ref_logprobs", "engine_logprobs", "advantages") if any(line.get(name, []))}
    values = {}
    if "advantages" in line:
        values["advantages"] = line["advantages"]
    if {"logprobs", "ref_logprobs"} <= there:
        values["kl"] = [a - b for a, b in zip(line["logprobs"], line["ref_logprobs"])]
    if {"logprobs", "engine_logprobs"} <= there:
        values["ratio"] = [math.exp(min(a - b, 80)) for a, b in zip(line["logprobs"], line["engine_logprobs"])]
    return values


def shade(view: str, value: float, scale: float) -> int:
    """0 to 8: 4 is zero (ratio: one), 0 and 8 are -scale and scale or beyond."""
    value = math.log(max(value, 1e-30)) if view == "ratio" else value
    return 4 + round(4 * max(-1.0, min(1.0, value / scale)))


def visible(text: str) -> str:
    """A token's text with its spaces and line ends to be seen."""
    return escape(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")) or "∅"


def tokens_section(runs: list[dict]) -> str:
    parts = []
    for r, run in enumerate(runs):
        lines = [(step, k, line) for step, group in run["trajectories"].items() for k, line in enumerate(group)]
        lines = [(step, k, line, token_values(line)) for step, k, line in lines if line.get("response_ids")]
        if not lines:
            continue
        tokenizer, left = load_tokenizer(run), TOKENS // len(runs)
        scales = {}
        for view, least in (("advantages", 1e-6), ("kl", 1e-3), ("ratio", 1e-3)):
            found = [x for *_, values in lines for x in values.get(view, [])]
            found = [math.log(max(x, 1e-30)) for x in found] if view == "ratio" else found
            if found:
                scales[view] = max(least, max(map(abs, found)))
        body = ""
        for step, group in groupby(lines, key=lambda entry: entry[0]):
            body += f"<div><h3>{escape(run['name'])}, step {step}</h3>\n"
            for _, k, line, values in group:
                ids = line["response_ids"][: max(left, 0)]
                left -= len(ids)
                spans = ""
                for t, token in enumerate(ids):
                    text = visible(tokenizer.decode([token])) if tokenizer else str(token)
                    classes = " ".join(f"{v[0]}{shade(v, values[v][t], scales[v])}" for v in values)
                    about = " · ".join(f"{name} {number(values[v][t])}" for v, name in VIEWS if v in values)
                    spans += f'<span class="t {classes}" title="{text} (id {token}) · {about}">{text}</span>'
                cut = len(line["response_ids"]) - len(ids)
                more = f' <span class="muted">… {cut} more tokens</span>' if cut else ""
                score = number(line.get("score"))
                body += f'<p class="tokens"><span class="muted">{k} · score {score}</span> {spans}{more}</p>\n'
            body += "</div>"
        picks = legends = ""
        for view, name in VIEWS:
            if view not in scales:
                continue
            low, middle, high = -scales[view], 0, scales[view]
            if view == "ratio":
                low, middle, high = math.exp(low), 1, math.exp(high)
            checked = "" if picks else " checked"
            item = f"v{r}{view}"
            picks += f'<input type="radio" class="pick-{view[0]}" name="view{r}" id="{item}"{checked}>'
            picks += f'<label for="{item}">{name}</label> '
            swatches = "".join(f'<i class="swatch d{i}"></i>' for i in range(9))
            legends += f'<div class="scale scale-{view[0]}">{number(low)} {swatches} {number(high)} '
            legends += f'<span class="muted">(middle: {middle})</span></div>'
        note = "" if tokenizer else '<p class="muted">No tokenizer in the run\'s folder: tokens are shown as ids.</p>'
        parts.append(f'<div class="view">{picks}{legends}{note}<div class="body pairs">{body}</div></div>\n')
    note = (
        "The groups from above, token by token. Advantage: as the update saw it. KL: logprobs - ref_logprobs, one sample of "
        "the KL to the reference, may be negative. Ratio: exp(logprobs - engine_logprobs), the policy's probability over the "
        "sampler's, before the first update of the step. Colours reach to the largest value shown of the run. Hover over a "
        "token for its values."
    )
    return f'<p class="muted">{note}</p>' + "".join(parts) + without_trajectories(runs)


# ---------------------------------------------------------------------------------------------------------------------
# page
# ---------------------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f5f6f8; --text: #1c2024; --muted: #5b6470; --rule: #d5dae0;
  --mark: #ffe08a;
  --c0: #0b62a8; --c1: #b84a00; --c2: #00795b; --c3: #a03c82; --c4: #6b5500; --c5: #2b7fa8; --c6: #b0203a;
  --c7: #50565e;
  --p0: #4c8fd0; --p1: #e0a030; --p2: #3fa37c; --p3: #b56fa3; --p4: #9aa2ac;
  --d0: #f2934f; --d1: #f7b484; --d2: #fbd2b4; --d3: #fdebdd; --d4: transparent; --d5: #e2eefa; --d6: #bdd9f5;
  --d7: #8fbeee; --d8: #62a3e4; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1d2126; --text: #e6e9ec; --muted: #a0a9b4;
  --rule: #363c44; --mark: #6b5200;
  --c0: #6cb2f5; --c1: #f5954a; --c2: #4fc9a0; --c3: #e28ac8; --c4: #d6bb4a; --c5: #7fd0ee; --c6: #ff8595;
  --c7: #b6bec8;
  --p0: #3f7fbd; --p1: #b57f1e; --p2: #2f8a67; --p3: #96558a; --p4: #6d757f;
  --d0: #9c4a0e; --d1: #7a3c10; --d2: #583015; --d3: #382519; --d5: #182a3c; --d6: #173f63; --d7: #15528a;
  --d8: #1465b0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1240px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
nav a { margin-right: 1rem; }
a { color: var(--c0); }
section { margin-top: 2rem; padding-top: 1.2rem; border-top: 1px solid var(--rule); }
p { margin: .2rem 0; }
td > p:first-child { margin-top: 0; }
.muted { color: var(--muted); font-size: .87em; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid var(--rule);
  font-weight: normal; }
thead th { color: var(--muted); font-size: .87em; }
td { font-variant-numeric: tabular-nums; }
.args td { overflow-wrap: anywhere; max-width: 26rem; }
.samples { width: 100%; table-layout: fixed; }
.samples th:first-child { width: 15%; }
.samples th:nth-child(2) { width: 25%; }
code { font-size: .92em; }
mark { background: var(--mark); color: var(--text); padding: 0 .2em; border-radius: 3px; }
img { max-width: 100%; height: auto; min-width: 64px; border-radius: 4px; margin: 0 4px 4px 0; vertical-align: top; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 0 2rem; }
.pairs th, .pairs td { padding: .3rem .4rem; }
.pairs table { font-size: .93em; }
.prompt { display: flex; gap: .8rem; align-items: flex-start; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 1rem; margin-top: .8rem; }
figure { margin: 0; padding: .7rem; background: var(--card); border-radius: 8px; }
figcaption { font-weight: 600; font-size: .93em; overflow-wrap: anywhere; }
figure svg[role] { width: 100%; height: auto; display: block; }
svg text { fill: var(--muted); font-size: 11px; }
.y { text-anchor: end; dominant-baseline: middle; }
.x { text-anchor: middle; }
.grid { stroke: var(--rule); }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.line.key { stroke: var(--muted); }
.band { fill: var(--c); opacity: .2; }
circle { fill: var(--c); }
.s1 { stroke-dasharray: 6 3; }
.s2 { stroke-dasharray: 2 3; }
.s3 { stroke-dasharray: 9 3 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .82em; color: var(--muted); }
.legend svg { margin-right: .35rem; vertical-align: middle; }
.legend.runs { font-size: .93em; color: var(--text); }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; }
.bar { display: flex; align-items: center; gap: .8rem; margin: .4rem 0; }
.bar b { flex: 0 0 9rem; font-weight: normal; overflow-wrap: anywhere; }
.bar div { flex: 1; display: flex; height: 1.4rem; }
.bar i { height: 100%; }
.swatch { display: inline-block; width: 1.1em; height: 1.1em; vertical-align: -.2em; border-radius: 2px;
  margin-right: .3em; }
.scale { display: none; margin: .5rem 0; font-variant-numeric: tabular-nums; }
.scale .swatch { margin: 0; border-radius: 0; border: 1px solid var(--rule); }
.view { margin-top: .6rem; }
.view label { margin-right: .8rem; }
.tokens { margin: .35rem 0; line-height: 1.9; overflow-wrap: anywhere; }
.t { font-family: ui-monospace, monospace; font-size: .9em; padding: .15em .12em; border: 1px solid var(--rule);
  border-radius: 3px; margin-right: 1px; }
"""
STYLE += "".join(f".c{i} {{ --c: var(--c{i}); }} " for i in range(8)) + "\n"
STYLE += "".join(f".p{i} {{ background: var(--p{i}); }} " for i in range(5)) + "\n"
STYLE += "".join(f".d{i} {{ background: var(--d{i}); }} " for i in range(9)) + "\n"
for _view, _ in VIEWS:
    STYLE += f".pick-{_view[0]}:checked ~ .scale-{_view[0]} {{ display: block; }}\n"
    STYLE += (
        "".join(f".pick-{_view[0]}:checked ~ .body .{_view[0]}{i} {{ background: var(--d{i}); }} " for i in range(9))
        + "\n"
    )


def build(runs: list[dict]) -> str:
    """The page."""
    budget = [MAX_PICTURE_BYTES]
    sections = [
        ("summary", "Summary", summary_section(runs)),
        ("curves", "Learning curves", curves_section(group_runs(runs))),
        ("args", "Args", args_section(runs)),
        ("timings", "Time by phase", timings_section(runs)),
        ("samples", "Held-out samples, before and after", samples_section(runs, budget)),
        ("groups", "Responses of one prompt", groups_section(runs, budget)),
        ("tokens", "Token by token", tokens_section(runs)),
    ]
    title = escape(", ".join(run["name"] for run in runs))
    nav = "".join(f'<a href="#{name}">{head}</a>' for name, head, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{head}</h2>\n{content}</section>\n' for name, head, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title>\n<style>{STYLE}</style></head>\n'
        f"<body><header><h1>{title}</h1><nav>{nav}</nav></header>\n<main>{body}</main></body></html>\n"
    )


def main(args: Args) -> None:
    output = Path(args.output)
    if not args.runs:
        fail("give the folder of at least one run (runs/NAME)")
    if not output.absolute().parent.is_dir() or output.is_dir():
        fail(f"--output {output} can't be written: give a file in a folder that exists")
    folders = [Path(name) for name in args.runs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        fail("the same run is named twice; name each once")
    runs = [load_run(folder) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        for run in runs:
            run["name"] = str(run["folder"])
    page = build(runs).encode("utf-8", "replace")  # half a surrogate pair in a response becomes a question mark
    if len(page) > MAX_BYTES:
        fail(
            f"the report would have {len(page) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}; compare fewer runs at once"
        )
    output.write_bytes(page)
    print(f"{output}: {len(runs)} run(s), {len(page) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
