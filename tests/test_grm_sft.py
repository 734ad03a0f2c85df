"""grm_sft.py, training and evaluation: packed losses and gradients, runs, records, checkpoints, the judge as a reward."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, read_jsonl, to_argv, write_jsonl

import grm_sft

FILES = ROOT / "tests/data/grm"
SHORT = {
    "model": TINY,
    "dataset": f"{FILES}/pairs.jsonl",
    "max_steps": 2,
    "batch_size": 4,
    "eval_steps": 0,
    "logging_steps": 1,
    "max_response_length": 8,
    "generation_batch_size": 4,
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "seed": 3,
    "run_name": "run",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A short run in this process -> its folder. Nothing is drawn: that takes longer than two steps."""
    monkeypatch.setattr(grm_sft, "draw_curves", lambda *args: None)
    monkeypatch.setattr(grm_sft, "draw_judged", lambda *args: None)

    def go(**flags) -> Path:
        args = grm_sft.parse_args(to_argv({**SHORT, "output_dir": tmp_path / "runs", **flags}))
        grm_sft.main(args)
        return tmp_path / "runs" / args.run_name if args.resume is None else Path(args.resume).parent

    return go


def load(**flags):
    """Args, model with packing, processor, data."""
    args = grm_sft.Args(**{**SHORT, "train_samples": 0, **flags})
    model, processor = grm_sft.load_model(args.model, torch.float32), grm_sft.load_processor(args.model)
    end_ids = grm_sft.end_token_ids(model, getattr(processor, "tokenizer", processor))
    data = grm_sft.prepare_judged(args, model, processor, end_ids, args.dataset, "train", True, show=False)
    grm_sft.disable_dropout(model)
    assert grm_sft.enable_packing(model)
    return args, model, processor, data


# --- losses and gradients --------------------------------------------------------------------------------------------


def loss_one_by_one(model, processor, data: dict, members: list[int]) -> tuple[torch.Tensor, list[float]]:
    """The unmodified model's own forward on each whole row, with -100 where nothing is trained."""
    sums = []
    for member in members:
        row = grm_sft.get_judged(data, member)
        text = grm_sft.render_chat(processor, row, grm_sft.chat_of(row))
        inputs = grm_sft.run_processor(processor, row, text)
        sample, trained, (rest,), (mask,) = grm_sft.encode_entries(model, processor, data, [member])
        labels = torch.cat([sample["prompt_ids"], rest]).masked_fill(~torch.cat([trained, mask]), -100)
        labels = torch.nn.functional.pad(labels, (0, inputs["input_ids"].shape[1] - len(labels)), value=-100)
        logits = model(**inputs).logits[0, :-1].float()
        logits[:, grm_sft.media_token_ids(model.config)] = float("-inf")
        sums.append(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
    count = sum(int(data["entries"][m]["mask"].sum()) for m in members)
    return torch.stack(sums).sum() / count, [s.item() for s in sums]


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def packed_loss(args, model, processor, data: dict, members: list[int], shared: bool = True) -> torch.Tensor:
    policy, count = grm_sft.Policy(model, 1.0), sum(int(data["entries"][m]["mask"].sum()) for m in members)
    packs = list(grm_sft.packs_of_batch(args, model, processor, data, members, shared, (0, 1)))
    losses = [grm_sft.next_token_loss(policy(pack)[0], count)[0] for pack, _, _ in packs]
    packed_loss.packs, packed_loss.tokens = len(packs), sum(pack.num_tokens for pack, _, _ in packs)
    return torch.stack(losses).sum()


def assert_close(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys() and a
    difference = torch.stack([(a[n] - b[n]).norm() for n in a]).norm() / torch.stack([b[n].norm() for n in b]).norm()
    assert difference < tolerance, difference


ALL_FILES = ",".join(str(FILES / name) for name in ("pairs.jsonl", "chat.jsonl", "scores.jsonl", "text_pairs.jsonl", "video_pairs.jsonl"))  # fmt: skip # noqa: E501


@pytest.mark.parametrize("dataset, shared", [(ALL_FILES, True), ("easy-vqa", True), (ALL_FILES, False)])
@pytest.mark.slow
def test_packed_loss_and_gradient_are_those_of_one_row_at_a_time(dataset, shared):
    args, model, processor, data = load(dataset=dataset, train_samples=40)
    members = list(range(len(data["entries"])))[:24]
    if dataset == "easy-vqa":
        members = sorted(max(data["groups"], key=len) + max(data["groups"][1:], key=len))
    plain = grm_sft.load_model(args.model, torch.float32).eval()
    want, _ = loss_one_by_one(plain, processor, data, members)
    want.backward()
    got = packed_loss(args, model, processor, data, members, shared)
    got.backward()
    assert abs(got.item() - want.item()) < 1e-5
    assert_close(gradients(model), gradients(plain), 1e-4)


def test_sharing_a_picture_changes_work_and_not_the_gradient():
    together = load(dataset="easy-vqa", train_samples=100)
    members = max(together[3]["groups"], key=len)
    apart = load(dataset="easy-vqa", train_samples=100, group_by_image=False)
    losses, found, tokens = [], [], []
    for args, model, processor, data in (together, apart):
        loss = packed_loss(args, model, processor, data, members)
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(model))
        tokens.append(packed_loss.tokens)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_close(*found, 1e-4)
    assert tokens[0] < 0.8 * tokens[1]


def caught_gradients(monkeypatch, budget: int, **flags) -> tuple[dict, dict, int]:
    """Gradients, metrics and number of packs of one real train_step under main's engine."""
    args, model, processor, data = load(micro_batch_tokens=budget, **flags)
    grm_sft.init_distributed()
    engine = grm_sft.make_engine(args, grm_sft.Policy(model, 1.0), torch.float32, {"": 1e-4}, 2)
    found, calls = {}, []
    monkeypatch.setattr(
        grm_sft, "optimizer_step", lambda engine: (found.update(gradients(engine.module)), (1.0, True))[1]
    )
    loss = grm_sft.next_token_loss
    monkeypatch.setattr(grm_sft, "next_token_loss", lambda *a: (calls.append(1), loss(*a))[1])
    metrics, _ = grm_sft.train_step(
        args, model, processor, data, list(range(len(data["entries"]))), engine, True, (0, 1)
    )
    monkeypatch.setattr(grm_sft, "next_token_loss", loss)
    return found, metrics, len(calls)


def test_gradient_does_not_depend_on_the_micro_batches(monkeypatch):
    flags = {"dataset": ALL_FILES, "max_length": 300, "system_prompt": "x"}
    one, one_metrics, one_packs = caught_gradients(monkeypatch, 8192, **flags)
    many, many_metrics, many_packs = caught_gradients(monkeypatch, 300, **flags)
    assert one_packs == 1 and many_packs >= 4
    assert one_metrics["loss/sft"] == pytest.approx(many_metrics["loss/sft"], abs=1e-5)
    assert one_metrics["train/trained_tokens"] == many_metrics["train/trained_tokens"]
    assert_close(one, many, 1e-5)


def test_worked_examples():
    loss, metrics = grm_sft.next_token_loss(torch.tensor([-1.0, -3.0]), 8)
    assert loss.item() == metrics["loss/sft"].item() == 0.5
    low, high = grm_sft.wilson_interval(9, 10)
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)
    assert grm_sft.wilson_interval(0, 0) == (0.0, 1.0)
    assert grm_sft.wilson_interval(0, 5)[0] == 0 and grm_sft.wilson_interval(5, 5)[1] == 1


# --- records and metrics ---------------------------------------------------------------------------------------------


def record(truth, text, swapped=None, source="a", **changes) -> dict:
    row = {"source": source, "info": {}, "messages": [], "images": [], "videos": [], "answer": "x", "truth": truth}
    said = {"text": text, "verdict": grm_sft.parse_verdict(text), "truncated": False, "length": 5}
    other = None if swapped is None else {**said, "text": swapped, "verdict": grm_sft.parse_verdict(swapped)}
    soft = {"1": 0.7, "2": 0.3} if isinstance(truth, str) else {}
    return grm_sft.eval_record(0, row, {**said, "probabilities": soft}, other, 6.0, 4) | changes


ONE, TWO, TIE = (grm_sft.write_verdict(v, "Image") for v in ("1", "2", "tie"))


def test_metrics_of_hand_made_records():
    records = [
        record("1", ONE, TWO),  # right, consistent
        record("2", ONE, ONE, source="b"),  # wrong, follows the side instead of the image
        record("1", "no idea", "no idea"),  # unparsable twice: neither right nor consistent
        record("tie", TIE, TIE, source="b"),  # right, consistent
        record(None, "Hello."),  # no verdict to learn: only the loss
        record(7.0, "<answer>5</answer>"),
    ]
    metrics = grm_sft.judge_metrics(records)
    assert metrics["eval/accuracy"] == pytest.approx(2 / 5)
    assert metrics["eval/parse_rate"] == pytest.approx(4 / 6)
    assert metrics["eval/tie_rate"] == pytest.approx(1 / 6)
    assert metrics["eval/swap_consistency"] == pytest.approx(2 / 4)
    assert metrics["eval/soft_accuracy"] == pytest.approx(2 / 4)
    assert metrics["eval/score_error"] == 2
    assert metrics["eval/loss"] == pytest.approx(1.5)
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(1.5))
    assert metrics["eval/accuracy_of/a"] == pytest.approx(1 / 3) and metrics["eval/accuracy_of/b"] == pytest.approx(
        1 / 2
    )
    assert metrics["eval/accuracy_low"] < 2 / 5 < metrics["eval/accuracy_high"]
    assert metrics["eval/num_samples"] == 6


def test_none_is_never_right():
    unparsable = record("1", "?", "?")
    assert unparsable["predicted"] is None and unparsable["right"] is False and unparsable["consistent"] is False
    unknown = record(None, "?")
    assert unknown["predicted"] is None and unknown["truth"] is None and unknown["right"] is None
    assert "eval/accuracy" not in grm_sft.judge_metrics([unknown])


FIELDS = {"info", "prompt", "generated_text", "response_text", "predicted", "truth", "images"}


@pytest.mark.slow
def test_two_evaluations_are_identical_and_complete(run):
    flags = {"eval_dataset": ALL_FILES, "max_steps": 1, "generation_batch_size": 3}
    folders = [run(run_name=name, **flags) for name in ("a", "b")]
    for step in (0, 1):
        texts = [(folder / f"eval/eval_step_{step}.json").read_text() for folder in folders]
        assert texts[0] == texts[1]
        records = json.loads(texts[0])
        assert [r["number"] for r in records] == list(range(11)), "data order, nothing dropped"
        assert all(FIELDS <= r.keys() for r in records)
    assert json.loads((folders[0] / "eval/eval_step_0.json").read_text()) != records, (
        "training changed the judgements' loss"
    )


def by_name(row: dict) -> str:
    return "1" if row["images"][0] < row["images"][1] else "2"


@pytest.mark.parametrize("verdict, consistency", [(by_name, 1.0), (lambda row: "1", 0.0), (lambda row: "tie", 1.0)])
def test_both_orders_are_judged(verdict, consistency, monkeypatch):
    """Judges of known behaviour: one that looks at the pictures, one that takes the first, one that sees no difference."""
    args, model, processor, data = load(dataset=f"{FILES}/hpdv3.json", swap_sides=False)

    def judge(model, processor, rows, *rest):
        said = [grm_sft.write_verdict(verdict(row), "Image") for row in rows]
        result = {"truncated": False, "length": 1, "probabilities": {"1": 0.5, "2": 0.5}}
        return [{**result, "text": text, "verdict": grm_sft.parse_verdict(text)} for text in said]

    monkeypatch.setattr(grm_sft, "judge", judge)
    metrics, records = grm_sft.evaluate_judge(model, processor, data, args, [0], True, (0, 1))
    assert metrics["eval/swap_consistency"] == consistency
    assert [r["predicted"] for r in records] == [verdict(grm_sft.get_judged(data, i)) for i in range(4)]


@pytest.mark.slow
def test_evaluated_loss_is_that_of_the_plain_model(run):
    folder = run(eval_dataset=ALL_FILES, max_steps=1)
    records = json.loads((folder / "eval/eval_step_0.json").read_text())
    args, _, processor, data = load(dataset=ALL_FILES, swap_sides=False)
    plain = grm_sft.load_model(args.model, torch.float32).eval()
    with torch.no_grad():
        _, sums = loss_one_by_one(plain, processor, data, list(range(len(records))))
    assert [r["loss_sum"] for r in records] == pytest.approx(sums, abs=1e-4)
    metrics = read_jsonl(folder / "metrics.jsonl")[0]
    assert metrics["eval/loss"] == pytest.approx(sum(sums) / sum(r["trained_tokens"] for r in records), abs=1e-5)


def test_soft_verdicts_are_those_of_the_plain_model():
    args, model, processor, data = load(dataset=f"{FILES}/pairs.jsonl")
    rows = [grm_sft.get_judged(data, i) for i in range(4)]
    end_ids = grm_sft.end_token_ids(model, processor.tokenizer)
    judged = grm_sft.judge(model, processor, rows, args, end_ids, True)
    plain = grm_sft.load_model(args.model, torch.float32).eval()
    for row, result in zip(rows, judged):
        sums = []
        for option in row["options"]:
            inputs = grm_sft.run_processor(processor, row, grm_sft.render_chat(processor, row))
            said = result["text"].split("<answer>")[0] + grm_sft.write_verdict(option, row["noun"])
            ids = processor.tokenizer(said, return_tensors="pt")["input_ids"]
            P = inputs["input_ids"].shape[1]
            inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], 1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            types = torch.as_tensor(inputs["mm_token_type_ids"])
            inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(ids)], 1)
            with torch.no_grad():
                logits = plain(**inputs).logits[0, P - 1 : -1].float()
            logits[:, grm_sft.media_token_ids(plain.config)] = float("-inf")
            sums.append(logits.log_softmax(-1).gather(1, ids[0, :, None]).sum().item())
        want = np.exp(sums - np.logaddexp.reduce(sums))
        assert list(result["probabilities"].values()) == pytest.approx(want, abs=1e-4)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_its_files_and_learns(run):
    folder = run(eval_dataset=f"{FILES}/pairs.jsonl", max_steps=8, eval_steps=4, learning_rate=2e-3, best_metric="loss")
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [m["train/step"] for m in metrics] == list(range(9))
    losses = [m["loss/sft"] for m in metrics[1:]]
    assert losses[-1] < 0.7 * losses[0]
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    for checkpoint in ("checkpoint-8", "checkpoint-best"):
        grm_sft.load_model(str(folder / checkpoint), torch.float32)
        assert "eval/loss" in (folder / checkpoint / "README.md").read_text()
    best = grm_sft.load_model(str(folder / "checkpoint-best"), torch.float32).state_dict()
    last = grm_sft.load_model(str(folder / "checkpoint-8"), torch.float32).state_dict()
    assert all(torch.equal(best[name], last[name]) for name in best), "the last evaluation was the best"
    assert (folder / "eval/eval_step_4.json").is_file()


@pytest.mark.slow
def test_the_best_checkpoint_is_the_best_and_not_the_last(run, monkeypatch):
    metrics_of, values = grm_sft.judge_metrics, iter([0.1, 0.9, 0.3])
    monkeypatch.setattr(grm_sft, "judge_metrics", lambda records: metrics_of(records) | {"eval/accuracy": next(values)})
    folder = run(eval_dataset=f"{FILES}/pairs.jsonl", max_steps=4, eval_steps=2)
    text = (folder / "checkpoint-best/README.md").read_text()
    assert "step 2" in text and "| eval/accuracy | 0.9 |" in text


@pytest.mark.slow
def test_resume_continues_as_if_never_stopped(run):
    flags = {"dataset": ALL_FILES, "max_steps": 4, "save_steps": 2, "save_total_limit": 5}
    whole = run(run_name="whole", **flags)
    part = run(run_name="part", **flags)
    want = read_jsonl(whole / "metrics.jsonl")
    again = run(**flags, resume=part / "checkpoint-2")
    got = read_jsonl(again / "metrics.jsonl")
    assert [m["train/step"] for m in got] == [1, 2, 3, 4]
    assert [m["loss/sft"] for m in got] == [m["loss/sft"] for m in want]
    one, other = (grm_sft.load_model(str(f / "checkpoint-4"), torch.float32).state_dict() for f in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)


def changed(folder: Path) -> set[str]:
    """Parts of the model that training moved."""
    before = grm_sft.load_model(TINY, torch.float32).state_dict()
    after = grm_sft.load_model(str(folder / "checkpoint-2"), torch.float32).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    part = {True: "projector", False: "vision"}
    return {part["merger" in name] if "visual" in name else "text" for name in moved}


PARTS = {"vision", "projector", "text"}


@pytest.mark.parametrize("frozen", [(), ("text",), ("vision", "projector")])
def test_frozen_parts_stay(frozen, run):
    off = {"freeze_vision": False, "freeze_projector": False}
    assert changed(run(**off | {f"freeze_{part}": True for part in frozen})) == PARTS - set(frozen)


def test_lora_trains_adapters_and_saves_merged_weights(run):
    flags = {"freeze_vision": False, "freeze_projector": False, "lora_rank": 4, "learning_rate": 1e-2}
    assert changed(run(**flags)) == {"text"}


def test_gradient_checkpointing_gives_the_same_losses(run):
    plain, checkpointed = (run(run_name=str(flag), gradient_checkpointing=flag) for flag in (False, True))
    losses = [[m["loss/sft"] for m in read_jsonl(f / "metrics.jsonl")] for f in (plain, checkpointed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_text_model_learns_to_judge_texts(run, tiny_text_model):
    off = {"freeze_vision": False, "freeze_projector": False, "eval_dataset": f"{FILES}/text_pairs.jsonl"}
    folder = run(model=tiny_text_model, dataset=f"{FILES}/text_pairs.jsonl", **off)
    assert len(json.loads((folder / "eval/eval_step_2.json").read_text())) == 2


@pytest.mark.slow
def test_the_default_run_learns_to_judge(tmp_path):
    """As `python grm_sft.py`, with the figures that the docs promise."""
    metrics = grm_sft.main(grm_sft.Args(output_dir=str(tmp_path), run_name="run"))
    assert metrics["eval/accuracy"] >= 0.90
    assert metrics["eval/parse_rate"] >= 0.99
    assert metrics["eval/swap_consistency"] >= 0.85
    assert (tmp_path / "run/curves.png").is_file()
    assert list((tmp_path / "run").glob("samples-*.png"))


def test_write_jsonl_is_read_beside_its_pictures(tmp_path, run):
    """Relative paths are tried beside the dataset."""
    (tmp_path / "images").symlink_to(FILES / "images")
    rows = [json.loads(line) for line in (FILES / "pairs.jsonl").read_text().splitlines()]
    run(dataset=write_jsonl(tmp_path / "rows.jsonl", rows), max_steps=1)
