"""Whole runs of reward_bt on tiny models: what they write, packs and ranks, LoRA, resume, what others do with a saved model."""

# ruff: noqa: E501  the table of bad inputs

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, read_jsonl, to_argv, write_jsonl
from test_bad_input import assert_one_sentence, listing, picture, text_file
from test_ppo_update import assert_same_gradients

import reward_bt

SHORT = {"max_steps": 3, "batch_size": 8, "eval_steps": 0, "eval_samples": 0, "learning_rate": 1e-3, "warmup_steps": 0}
METRICS = """
    train/step train/episode train/epoch train/learning_rate train/grad_norm train/skipped_updates
    rm/loss rm/bt_loss rm/center_loss rm/accuracy rm/margin rm/chosen_rewards rm/chosen_std rm/rejected_rewards
    rm/rejected_std rm/length_correlation rm/ece time/total time/tokens_per_second
""".split()


@pytest.fixture(scope="session")
def pairs(vqa_rows, tmp_path_factory) -> str:
    """Pairs and rankings of three over pictures, with margins and weights."""
    rows = []
    for i, row in enumerate(vqa_rows[:24]):
        wrong = "blue" if row["answer"] != "blue" else "red"
        answers = [row["answer"], wrong, "none of these"][: 2 + i % 2]
        rows.append(
            {**row, "responses": [f"<answer>{a}</answer>" for a in answers], "margin": i % 4 / 4, "weight": 1 + i % 3}
        )
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> str:
    rows = [
        {"prompt": f"what is {i} + {i}?", "chosen": str(2 * i), "rejected": f"{2 * i + 1 + i % 3}?"} for i in range(16)
    ]
    return write_jsonl(tmp_path_factory.mktemp("sums") / "sums.jsonl", rows)


@pytest.fixture
def argv(tmp_path, tiny, pairs):
    def build(**flags) -> list[str]:
        sets = flags.pop("eval_datasets", ())
        base = {"model": tiny, "dataset": pairs, "output_dir": tmp_path / "runs", "run_name": "run", **SHORT}
        return to_argv({**base, **flags}) + (["--eval-datasets", *sets] if sets else [])

    return build


@pytest.fixture
def run(argv, tmp_path, monkeypatch):
    """A short run in this process -> its folder. Without pictures: drawing takes longer than the steps."""

    def go(pictures: bool = False, **flags) -> Path:
        args = reward_bt.parse_args(argv(**flags))
        with monkeypatch.context() as patch:
            for name in ("draw_curves", "draw_calibration", "draw_worst_pairs"):
                if not pictures:
                    patch.setattr(reward_bt, name, lambda *args: None)
            reward_bt.main(args)
        return Path(args.output_dir) / args.run_name if args.resume is None else Path(args.resume).parent

    return go


def read_metrics(folder: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} in metrics.jsonl is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- what a run writes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_held_out_sets_keep_distinct_metrics_tables_and_pictures(run, pairs, vqa_rows, tmp_path):
    other = [{**row, "chosen": row["answer"], "rejected": "no answer at all"} for row in vqa_rows[24:30]]
    sets = [f"mine={pairs}", write_jsonl(tmp_path / "other.jsonl", other)]
    folder = run(eval_datasets=sets, eval_steps=2, pictures=True)
    before, *steps = read_metrics(folder)
    assert [m["train/step"] for m in steps] == [1, 2, 3] and [m["train/episode"] for m in steps] == [8, 16, 24]
    names = [name.removeprefix("rm/") for name in METRICS if name.startswith("rm/")]
    for metrics in steps[1:]:
        assert not {*METRICS, *(f"eval/{s}/{n}" for s in ("mine", "other") for n in names)} - metrics.keys()
        assert all(math.isfinite(value) for value in metrics.values())
        assert (metrics["eval/mine/num_prompts"], metrics["eval/other/num_prompts"]) == (24, 6)
        assert metrics["eval/mine/loss"] != metrics["eval/other/loss"] != metrics["rm/loss"]
    assert 0.5 < before["eval/mine/bt_loss"] < 1.0
    samples = read_jsonl(folder / "samples.jsonl")
    assert {s["dataset"] for s in samples} == {"mine", "other"}
    worst = [s["margin"] for s in samples if s["step"] == 3 and s["dataset"] == "other"]
    assert len(worst) == 6 and worst == sorted(worst)
    assert all(s["margin"] == pytest.approx(s["chosen_reward"] - s["rejected_reward"], abs=1e-6) for s in samples)
    last = next(s for s in samples if s["step"] == 3 and s["dataset"] == "mine")
    row = read_jsonl(Path(pairs))[last["row"]]
    assert {last["chosen"], last["rejected"]} <= set(row["responses"]) and last["images"] == [row["image"]]
    for name in ("mine", "other"):
        for kind in ("calibration", "worst"):
            assert (folder / f"{kind}-{name}-3.png").stat().st_size > 5000


def test_training_makes_the_chosen_ones_win(run, sums, tiny_text_model):
    folder = run(
        model=tiny_text_model, dataset=sums, max_steps=40, batch_size=16, label_smoothing=0, learning_rate=1e-2
    )
    first, *_, last = read_metrics(folder)
    assert (
        first["rm/bt_loss"] == pytest.approx(0.693, abs=0.1) and last["rm/bt_loss"] < 0.3 and last["rm/accuracy"] == 1
    )


@pytest.mark.slow
def test_centering_pulls_the_sum_of_scores_to_zero(run, sums, tiny_text_model):
    flags = {"model": tiny_text_model, "dataset": sums, "max_steps": 30, "batch_size": 16, "learning_rate": 3e-3}
    losses = [read_metrics(run(**flags, center_coef=c, run_name=f"c{c}"))[-1]["rm/center_loss"] for c in (0, 1)]
    assert losses[1] < 0.1 * losses[0] + 0.01


def test_epochs_and_time_limit_end_a_run(run, sums, tiny_text_model):
    flags = {"model": tiny_text_model, "dataset": sums}
    assert len(read_metrics(run(**flags, max_steps=0, epochs=1.5, run_name="a"))) == 3  # 24 of 16 rows, 8 at a time
    folder = run(**flags, max_steps=500, training_time_limit=1e-6, run_name="b")
    assert len(read_metrics(folder)) == 1 and (folder / "checkpoint-1/model.safetensors").is_file()


def test_save_interval(run, sums, tiny_text_model):
    folder = run(model=tiny_text_model, dataset=sums, save_interval_minutes=1e-6, save_total_limit=9)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_resume_goes_on_as_if_nothing_had_happened(run, sums, tiny_text_model):
    flags = {"model": tiny_text_model, "dataset": sums, "max_steps": 4, "save_steps": 2, "eval_datasets": [f"s={sums}"]}
    whole = run(**flags, run_name="whole")
    again = run(**flags, resume=whole / "checkpoint-2", run_name=None)
    assert again == whole
    metrics = read_metrics(whole)
    assert [m["train/step"] for m in metrics] == [0, 1, 2, 3, 4]
    other = read_metrics(run(**flags, run_name="other"))
    for name in ("rm/loss", "rm/margin", "train/grad_norm", "eval/s/loss"):
        assert metrics[-1][name] == pytest.approx(other[-1][name], rel=1e-5), name


# --- what is trained and saved ---------------------------------------------------------------------------------------


def score_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("kind", ["text", "vision"])
@pytest.mark.slow
def test_lora_trains_and_saves_the_head_and_merges_adapters(kind, run, sums, pairs, tiny, tiny_text_model, tmp_path):
    """The loaded folder gives the scores that the run had at its end."""
    start, source = (tiny_text_model, sums) if kind == "text" else (tiny, pairs)
    flags = {
        "model": start,
        "dataset": source,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "eval_datasets": [f"own={source}"],
    }
    folder = run(**flags, gradient_checkpointing=True)
    args = reward_bt.Args(model=start, seed=1)
    before = reward_bt.load_backbone(args, torch.float32)
    args = replace(args, model=str(folder / "checkpoint-3"))
    model, head = reward_bt.load_backbone(args, torch.float32)
    assert not torch.equal(before[1].weight, head.weight), "the head was trained"
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, dict(before[0].named_parameters())[n][: len(p)])
               ] if kind == "vision" else []  # fmt: skip
    assert all("proj" in name and "visual" not in name for name in changed) and (kind == "text" or changed)
    processor = reward_bt.load_processor(args.model)
    data = reward_bt.prepare_rankings(args, model, processor, source, "train", 0, 0, False)
    module, shared = reward_bt.RewardModel(model, head), reward_bt.enable_packing(model)
    with torch.no_grad():
        packs = list(reward_bt.packs_of_rankings(args, model, processor, data, data["keep"], shared, (0, 1), "cpu"))
        scores = {b: float(r) for pack in packs for (b, _), r in zip(pack.rows, module(pack)[0])}
    last = [s for s in read_jsonl(folder / "samples.jsonl") if s["step"] == 3]
    sizes = [len(data["lengths"][i][1]) for i in data["keep"]]
    chosen, rejected, _, _ = reward_bt.ranking_pairs(sizes)
    margins = sorted(scores[int(c)] - scores[int(r)] for c, r in zip(chosen, rejected))
    assert margins[: len(last)] == pytest.approx([s["margin"] for s in last], abs=1e-4)


def test_frozen_parameters_stay_and_others_move(run, tiny):
    folder = run(freeze=r"visual|embed_tokens")
    before = dict(reward_bt.load_backbone(reward_bt.Args(model=tiny), torch.float32)[0].named_parameters())
    after = reward_bt.load_backbone(reward_bt.Args(model=str(folder / "checkpoint-3")), torch.float32)[0]
    for name, parameter in after.named_parameters():
        frozen = "visual" in name or "embed_tokens" in name
        assert torch.equal(parameter, before[name]) == frozen, name


def test_a_snippet_of_the_docs_scores_a_vision_language_folder(run, vqa_rows, tmp_path):
    """Both snippets of docs/reward_bt.md run as they stand, on folders that a run saved."""
    page = (ROOT / "docs/reward_bt.md").read_text()
    (snippet,) = [s for s in re.findall(r"```python\n(.*?)```", page, re.S) if "score.safetensors" in s]
    assert len(snippet.strip().splitlines()) <= 12
    folder = run(eval_datasets=[], max_steps=1) / "checkpoint-1"
    names = {}
    code = snippet.replace("runs/NAME/checkpoint-N", str(folder)).replace("picture.png", vqa_rows[0]["image"])
    exec(code, names)
    assert isinstance(names["reward"], float)


def test_the_text_snippet_of_the_docs(run, sums, tiny_text_model):
    page = (ROOT / "docs/reward_bt.md").read_text()
    (snippet,) = [s for s in re.findall(r"```python\n(.*?)```", page, re.S) if "ForSequenceClassification" in s]
    folder = run(model=tiny_text_model, dataset=sums, max_steps=1) / "checkpoint-1"
    names = {}
    exec(snippet.replace("runs/NAME/checkpoint-N", str(folder)), names)
    assert len(names["rewards"]) == 2 and names["rewards"][0] != names["rewards"][1]


@pytest.mark.parametrize("script", ["rloo", "ppo_vl"])
@pytest.mark.parametrize("kind", ["text", "vision"])
@pytest.mark.slow
def test_saved_model_is_a_reward_of_rloo_and_ppo(
    script, kind, run, sums, pairs, tiny, tiny_text_model, tmp_path, vqa, vqa_rows
):
    """A run of the other script on it, and its scorer against the script's own scores."""
    module = __import__(script)
    start, source = (tiny_text_model, sums) if kind == "text" else (tiny, pairs)
    folder = run(model=start, dataset=source, max_steps=1, eval_datasets=[f"own={source}"]) / "checkpoint-1"
    args = module.Args(model=start)
    score = module.load_reward_model(args, str(folder), torch.device("cpu"))
    rows, texts, expected = [], [], []
    for sample in [s for s in read_jsonl(folder.parent / "samples.jsonl") if s["step"] == 1][:4]:
        row = {
            "messages": sample["messages"],
            "images": sample["images"],
            "videos": [],
            "folder": Path("."),
            "where": "row",
        }
        for side in ("chosen", "rejected"):
            rows.append(row)
            texts.append(sample[side])
            expected.append(sample[f"{side}_reward"])
    assert score(rows, texts) == pytest.approx(expected, abs=1e-4)
    prompts = vqa if kind == "vision" else source
    flags = {
        "model": start,
        "dataset": prompts,
        "output_dir": tmp_path / "rl",
        "total_steps": 1,
        "rollout_batch_size": 4,
    }
    flags |= {"num_samples_per_prompt": 2, "train_batch_size": 4, "max_response_length": 6, "run_name": "run"}
    words = to_argv(flags) + ["--rewards", str(folder), "--reward-weights", "1", "--eval-samples", "2"]
    if kind == "text":
        words += ["--answer-column", "chosen"]
    script_args = module.parse_args(words)
    module.main(script_args)
    last = read_jsonl(tmp_path / "rl/run/metrics.jsonl")[-1]
    assert math.isfinite(last["reward/checkpoint-1"]) and last["objective/scores"] == last["reward/checkpoint-1"]


# --- packs and ranks -------------------------------------------------------------------------------------------------


@pytest.fixture
def step(argv, tmp_path, monkeypatch):
    """The first optimizer step of a run, not taken -> its gradients, its number of packs, its metrics."""

    def go(**flags) -> tuple[dict, int, dict]:
        gradients, packs, build_pack, results = {}, [], reward_bt.build_pack, []
        update = reward_bt.update_reward

        def look(engine):
            gradients.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
            engine.zero_grad()
            return 1.0, True

        with monkeypatch.context() as patch:
            patch.setattr(reward_bt, "optimizer_step", look)
            patch.setattr(reward_bt, "build_pack", lambda *args: packs.append(1) or build_pack(*args))
            patch.setattr(reward_bt, "update_reward", lambda *args: results.append(update(*args)) or results[-1])
            patch.setattr(reward_bt, "save_checkpoint", lambda *args: None)
            patch.setattr(reward_bt, "draw_curves", lambda *args: None)
            reward_bt.main(reward_bt.parse_args(argv(max_steps=1, **flags)))
        return gradients, len(packs), results[0][0]

    return go


def test_gradient_and_metrics_do_not_depend_on_the_split_into_packs(step):
    one, packs_of_one, metrics = step(run_name="one")
    many, packs_of_many, others = step(run_name="many", micro_batch_tokens=100)
    assert packs_of_one == 1 and packs_of_many >= 4
    assert_same_gradients(one, many)
    for name in metrics:
        assert metrics[name] == pytest.approx(others[name], rel=1e-4, abs=1e-5), name


def test_gradient_of_a_step_is_that_of_the_closed_form(step, pairs, tiny, monkeypatch):
    """Plain transformers, one row per response, autograd: margins, weights and rankings of three included."""
    gradients, _, metrics = step(batch_size=24, center_coef=0.1)
    args = reward_bt.Args(model=tiny, center_coef=0.1)
    model, head = reward_bt.load_backbone(args, torch.float32)
    processor, total, total_weight = reward_bt.load_processor(tiny), 0.0, 0.0
    data = reward_bt.prepare_rankings(args, model, processor, pairs, "train", 0, 0, False)
    for i in data["keep"]:
        row, scores = reward_bt.get_ranking(data, i), []
        for tail in row["tails"]:
            inputs = reward_bt.run_processor(
                processor, row, reward_bt.render_chat(processor, row, [*row["messages"], *tail])
            )
            scores.append(head(model(**inputs).last_hidden_state[0, -1])[0])
        terms = []
        for a in range(len(scores)):
            for b in range(a + 1, len(scores)):
                d = scores[a] - scores[b] - row["margin"]
                p = torch.sigmoid(d)
                s = args.label_smoothing
                terms.append(-(1 - s) * p.log() - s * (1 - p).log() + 0.1 * (scores[a] + scores[b]) ** 2)
        total, total_weight = total + row["weight"] * sum(terms) / len(terms), total_weight + row["weight"]
    loss = total / total_weight
    loss.backward()
    assert metrics["rm/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    module = reward_bt.RewardModel(model, head)
    assert_same_gradients(gradients, {n: p.grad for n, p in module.named_parameters() if p.grad is not None})


@pytest.mark.slow
def test_default_run_learns(tmp_path):
    words = to_argv({"output_dir": tmp_path, "run_name": "run", "max_steps": 60, "eval_steps": 0, "eval_samples": 500})
    command = [sys.executable, "reward_bt.py", *words]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    before, *_, last = read_metrics(tmp_path / "run")
    assert before["eval/easy-vqa/accuracy"] < 0.65 and last["eval/easy-vqa/accuracy"] >= 0.8


# --- bad input -------------------------------------------------------------------------------------------------------


def data(folder: Path, *rows: dict) -> dict:
    return {"dataset": write_jsonl(folder / "data.jsonl", list(rows))}


def pair(**columns) -> dict:
    return {"prompt": "what is it?", "chosen": "good", "rejected": "bad", **columns}


def talk(*contents) -> list[dict]:
    return [{"role": role, "content": c} for role, c in zip(["user", "assistant"] * 2, contents)]


def without(name: str) -> dict:
    return {key: value for key, value in pair().items() if key != name}


# name: (words that the sentence must hold, flags from the test's folder); the model is a text model unless "vision"
CASES = {
    # flags
    "zero batch": (["--batch-size"], lambda t: {"batch_size": 0}),
    "negative smoothing": (["--label-smoothing"], lambda t: {"label_smoothing": -0.1}),
    "smoothing of one half": (["--label-smoothing", "0.5"], lambda t: {"label_smoothing": 0.5}),
    "negative centering": (["--center-coef"], lambda t: {"center_coef": -1}),
    "freeze is no regex": (["--freeze", "regular expression"], lambda t: {"freeze": "("}),
    "freeze matches nothing": (["--freeze", "none_such", "score.weight"], lambda t: {"freeze": "none_such"}),
    "freeze matches all": (["--freeze", "nothing is left"], lambda t: {"freeze": "."}),
    "template kwargs": (["--chat-template-kwargs"], lambda t: {"chat_template_kwargs": "[1]"}),
    "two sets of one name": (["--eval-datasets", "'a'"], lambda t: {"eval_datasets": ["a=x.jsonl", "a=y.jsonl"]}),
    "set without source": (["--eval-datasets", "name=source"], lambda t: {"eval_datasets": ["a="]}),
    "set that is not there": (["nope.jsonl"], lambda t: {"eval_datasets": ["a=nope.jsonl"]}),
    "run exists": (["--run-name", "run"], lambda t: (t / "old/run/x").mkdir(parents=True) or {"output_dir": t / "old"}),
    # files and columns
    "no such file": (["nope.jsonl"], lambda t: {"dataset": "nope.jsonl"}),
    "empty file": (["a.csv", "empty"], lambda t: {"dataset": text_file(t, "a.csv", "prompt,chosen,rejected\n")}),
    "no chosen column": (["chosen", "--chosen-column"], lambda t: data(t, without("chosen"))),
    "no rejected column": (["rejected", "--rejected-column"], lambda t: data(t, without("rejected"))),
    "wrong column": (["--margin-column", "gap"], lambda t: {"margin_column": "gap"}),
    # rows
    "missing side": (["row 1", "rejected", "missing"], lambda t: data(t, pair(), pair(rejected=None))),
    "missing prompt": (["row 1", "prompt"], lambda t: data(t, pair(), pair(prompt=None))),
    "identical pair": (["row 1", "same"], lambda t: data(t, pair(), pair(rejected="good"))),
    "empty response": (["row 0", "rejected", "empty"], lambda t: data(t, pair(rejected=" "))),
    "empty prompt": (["row 0", "no text"], lambda t: data(t, pair(prompt=""))),
    "response is a number": (["row 0", "chosen"], lambda t: data(t, pair(chosen=[[1.5]]))),
    "responses are numbers": (["row 0", "chosen", "5"], lambda t: data(t, pair(chosen=5, rejected=6))),
    "content of numbers": (["row 0", "part"], lambda t: data(t, pair(chosen=talk([1], [2]), rejected=talk([1], [3])))),
    "strings beside chats": (["row 0", "one form"], lambda t: data(t, {"prompt": "q", "chosen": talk("", "a")[1:], "rejected": talk("q", "b")})),
    "margin is text": (["row 0", "margin"], lambda t: data(t, pair(margin="big"))),
    "margin is missing": (["row 1", "margin"], lambda t: data(t, pair(margin=1), pair(margin=None))),
    "margin is a flag": (["row 0", "margin"], lambda t: data(t, pair(margin=True))),
    "margin is a list": (["row 0", "margin"], lambda t: data(t, pair(margin=[1.0]))),
    "weight of zero": (["row 1", "weight"], lambda t: data(t, pair(weight=1), pair(weight=0))),
    "ranking of one": (["row 0", "two"], lambda t: data(t, {"prompt": "q", "responses": ["a"]})),
    "ranking with a double": (["row 0", "response 1", "response 3", "same"], lambda t: data(t, {"prompt": "q", "responses": ["a", "b", "a"]})),
    "different prompts": (["row 0", "different"], lambda t: data(t, {"chosen": talk("q", "a"), "rejected": talk("p", "b")})),
    "nothing after the prompt": (["row 0", "empty"], lambda t: data(t, {"chosen": talk("q", "a"), "rejected": talk("q")})),
    "answers without a prompt": (["row 0", "--prompt-column"], lambda t: data(t, {"chosen": talk("", "a")[1:], "rejected": talk("", "b")[1:]})),
    "message without role": (["row 0", "role"], lambda t: data(t, {"chosen": [{"text": "a"}], "rejected": [{"text": "b"}]})),
    "ids outside the vocabulary": (["row 0", "vocabulary"], lambda t: data(t, {"chosen_ids": [1, 2], "rejected_ids": [1, 9999]})),
    "ids with nothing in common": (["row 0", "common"], lambda t: data(t, {"chosen_ids": [1, 2], "rejected_ids": [2, 3]})),
    "tools are no list": (["row 0", "tools"], lambda t: data(t, pair(tools="search"))),
    "picture for a text model": (["row 0", "text model"], lambda t: data(t, pair(image=picture(t)))),
    "all too long": (["--max-length", "--overflow"], lambda t: {"max_length": 9}),
    "too long is an error": (["row 0", "--max-length", "--overflow"], lambda t: {"max_length": 9, "overflow": "error"}),
    "pack too small": (["row 0", "--micro-batch-tokens"], lambda t: {"micro_batch_tokens": 20}),
    # pictures
    "image missing": (["vision", "row 1", "nope.png"], lambda t: data(t, pair(image=picture(t)), pair(image="nope.png"))),
    "image of one side only": (
        ["vision", "row 0", "pictures count"],
        lambda t: data(t, {
            "chosen": talk([{"type": "image", "image": picture(t)}, {"type": "text", "text": "q"}], [{"type": "text", "text": "a"}]),
            "rejected": talk([{"type": "text", "text": "q"}], [{"type": "text", "text": "b"}]),
        }),
    ),
    "image in a response": (
        ["vision", "row 0", "chosen", "picture"],
        lambda t: data(t, pair(chosen=[{"role": "assistant", "content": [{"type": "image", "image": picture(t)}]}],
                               rejected=[{"role": "assistant", "content": [{"type": "text", "text": "b"}]}])),
    ),
    "more placeholders than images": (["vision", "row 0", "2 image"], lambda t: data(t, pair(prompt="<image><image>?", image=picture(t)))),
    "strings without a prompt": (["vision", "row 0", "prompt"], lambda t: data(t, without("prompt"))),
    # models
    "no such model": (["--model", "/nope"], lambda t: {"model": "/nope"}),
    "resume from nothing": (["--resume", "nope"], lambda t: {"resume": "nope"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, argv, sums, tiny, tiny_text_model, tmp_path, capfd):
    words, make = CASES[name]
    flags = {"model": tiny if "vision" in words else tiny_text_model, "dataset": sums, **make(tmp_path)}
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        reward_bt.main(reward_bt.parse_args(argv(**flags)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, [word for word in words if word != "vision"])
    assert listing(tmp_path) == before, "nothing may be left behind"


@pytest.mark.parametrize("kind", ["two labels", "no decoder"])
def test_classifiers_that_are_no_reward_models(kind, argv, sums, tiny_text_model, tmp_path, capfd):
    import transformers

    if kind == "two labels":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_text_model, num_labels=2)
    else:
        size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=257, num_labels=1, **size)
        )
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tiny_text_model).save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as stopped:
        reward_bt.main(reward_bt.parse_args(argv(model=tmp_path / "model", dataset=sums)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, ["--model", "labels" if kind == "two labels" else "decoder"])
