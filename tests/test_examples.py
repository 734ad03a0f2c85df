"""examples/: each does what its docstring promises, with a real server if it needs one."""

import asyncio
import base64
import io
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, read_jsonl
from PIL import Image

import rloo
from common.decoding import Response
from examples import chain_sums

EXAMPLES = ROOT / "examples"


def load(name: str) -> dict:
    return runpy.run_path(str(EXAMPLES / name))


def make(script: str, folder, *words: str) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / script), *words], cwd=folder, check=True)


def score(functions: dict, texts: list[str], ids=None, images=(), **columns) -> tuple[dict, list]:
    """Score one response per row of the columns, as rloo.py does."""
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    parts = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    ids = ids or [torch.tensor([1])] * len(texts)
    results, _, logged_pairs = rloo.score_responses(
        functions=functions,
        prompts=[SimpleNamespace(row={"prompt": "?"} | row, messages=messages) for row in rows],
        responses=[Response(token_ids, torch.zeros(len(token_ids)), truncated=False) for token_ids in ids],
        texts=texts,
        trainer_state=None,
    )
    logged_values = defaultdict(list)
    for name, value in logged_pairs:
        logged_values[name].append(value)
    return results, logged_values


# ---- functions ----
def test_overlong():
    """The limit is 24 tokens: no penalty up to 19.2, -1 at 24."""
    function, ids = load("custom_reward.py")["overlong"], [torch.arange(n) for n in (19, 22, 24)]
    results, _ = score({"length": function}, [""] * 3, ids, answer=[""] * 3)
    assert results["length"] == pytest.approx([0, -2.8 / 4.8, -1])


def test_recipe():
    texts, labels = ["it makes 1,204.", "(b)", "b) yes", "whatever"], ["math", "choice", "choice", "other"]
    function = load("recipe.py")["by_label"]
    results, metrics = score({"r": function}, texts, answer=["1204", "b", "B", "?"], label=labels)
    assert results["r"][:3] == pytest.approx([1 - 0.0015, 0, 1]) and results["r"][3] != results["r"][3]
    assert (len(metrics["reward_metrics/math"]), len(metrics["reward_metrics/choice"])) == (1, 2)


def test_addition(tmp_path):
    make("addition.py", tmp_path, "data")
    train, test = (read_jsonl(tmp_path / f"data/{name}.jsonl") for name in ("train", "test"))
    assert len(train) == 321 and len(test) == 79 and len({row["prompt"] for row in train + test}) == 400
    pairs = [{frozenset(re.findall(r"\d+", row["prompt"])) for row in rows} for rows in (train, test)]
    assert not pairs[0] & pairs[1], "4 + 9 and 9 + 4 are in the same split"
    assert {"prompt": "What is 7 + 13? Answer with the number only.", "answer": "20"} in train + test
    function, texts = load("addition.py")["right_sum"], ["7 + 13 is 20", "20, not 21", ""]
    assert score({"sum": function}, texts, answer=["20"] * 3)[0] == {"sum": [1, 0, 0]}


def test_chain_sums(tmp_path, run, monkeypatch):
    monkeypatch.setattr(chain_sums, "train", lambda *args: None)  # it takes two minutes
    chain_sums.main(tmp_path / "new")
    model = ROOT / "assets/chain_sums"
    assert {x.name for x in model.iterdir()} == {x.name for x in (tmp_path / "new").iterdir()}
    assert chain_sums.question([7, 4, 9]) == "a7b4c9:" and chain_sums.chain([7, 4, 9]) == "b7+4=1c1+9=0"
    texts, logged = ["=0", "b7+4=1c1+9=0", "=1", ""], []
    rewards = chain_sums.right_sum(texts, ["0"] * 4, ["a7b4c9:"] * 4, lambda *pair: logged.append(pair))
    assert rewards == [1, 1, 0, 0] == [reward for _, reward in logged] and logged[0][0] == "3_digits"
    flags = {"rewards": [f"{EXAMPLES / 'chain_sums.py'}:right_sum"], "reward_weights": [1], "model": model}
    run("rloo", dataset=model / "train.jsonl", eval_dataset=model / "test.jsonl", **flags)


def test_spelling_pairs(tmp_path):
    make("spelling_pairs.py", tmp_path, "data")
    train, test = (read_jsonl(tmp_path / f"data/{name}.jsonl") for name in ("train", "test"))
    assert len(train) == 2000 and len(test) == 500
    texts = (" ".join(row["chosen"] for row in rows) for rows in (train, test))
    words = [{word for word in text.replace(".", "").split() if len(word) > 3} for text in texts]
    assert not words[0] & words[1]
    for row in train:  # two letters are swapped
        assert row["chosen"] != row["rejected"] and sorted(row["chosen"]) == sorted(row["rejected"])


# ---- environments ----
def test_guess_number(tmp_path):
    make("guess_number.py", tmp_path, "data")
    game = load("guess_number.py")
    environment = game["GuessNumber"]()
    environment.reset(answer="5", chat=[], prompt="?")
    assert [environment.step(turn) for turn in ("4", "6", "six", "5")] == ["higher", "lower", "no", None]
    results, _ = score({"right": game["right_guess"]}, ["5", "4", " 5"], answer=["5"] * 3)
    assert results == {"right": [1, 0, 0]}
    rows = read_jsonl(tmp_path / "data/game.jsonl")
    assert [row["answer"] for row in rows] == [str(number) for number in range(1, 8)]


@pytest.mark.slow
def test_zoom(tmp_path):
    make("zoom.py", tmp_path, "data")
    tool = load("zoom.py")
    rows = {name: read_jsonl(tmp_path / f"data/{name}.jsonl") for name in ("test", "demonstrations")}
    row = rows["test"][0]
    assert Image.open(tmp_path / "data" / row["image"]).size == (4, 4)
    environments = [tool["Zoom"](), tool["Zoom"]()]
    for environment in environments:
        environment.reset(chat=[], **row)
    [part] = environments[0].step("<zoom>")
    assert part["image"].size == (64, 64)
    assert environments[0].step("<zoom>") is None and environments[1].step("red") is None
    metrics = []
    values = tool["calls"](environments, ["shape", "color"], lambda *pair: metrics.append(pair))
    assert values == [1, 0] and metrics == [("calls_shape", 1), ("calls_color", 0)]
    assert all(len(chat["images"]) == len(chat["messages"]) / 2 for chat in rows["demonstrations"])


ENVIRONMENTS = [("guess_number.py", "GuessNumber", "right_guess", "game")]
ENVIRONMENTS += [("zoom.py", "Zoom", "calls", "train")]


@pytest.mark.slow
@pytest.mark.parametrize("file, environment, reward, data", ENVIRONMENTS)
def test_environments_train(file, environment, reward, data, tmp_path, run):
    make(file, tmp_path, "data")
    flags = {"dataset": tmp_path / f"data/{data}.jsonl", "eval_dataset": None, "max_response_length": 160}
    flags |= {"environment": f"{EXAMPLES / file}:{environment}", "rewards": [f"{EXAMPLES / file}:{reward}"]}
    folder = run("rloo", **flags, reward_weights=[1])
    steps = read_jsonl(folder / "metrics.jsonl")
    assert len(steps) == 2 and all(step["sampling/logprob_diff_mean"] < 1e-5 for step in steps)
    # The initial model neither guesses numbers, so that it gets more turns, nor calls the tool.
    assert all((step["rollout/turns_mean"] > 1) == (file == "guess_number.py") for step in steps)


# ---- data ----
def test_custom_data(vqa_rows, tmp_path):
    for i, row in enumerate(vqa_rows):
        (tmp_path / "images" / row["answer"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(row["image"], tmp_path / "images" / row["answer"] / f"{i}.png")
    (tmp_path / "images/yes/notes.txt").write_text("not an image")
    make("custom_data.py", tmp_path, "images", "data")
    for name in ("prompts", "pairs", "judged"):
        train, test = (read_jsonl(tmp_path / f"data/{name}{end}.jsonl") for end in ("", "_test"))
        assert len(train) == 32 and len(test) == 8
        assert not {row["image"] for row in train} & {row["image"] for row in test}
        for row in train + test:
            right = row["image"].split("/")[-2]
            side = int(row.get("verdict", 1))
            good = row[{"prompts": "answer", "pairs": "chosen", "judged": f"answer_{side}"}[name]]
            assert good in (right, f"<answer>{right}</answer>")
            assert good not in (row.get("rejected"), row.get(f"answer_{3 - side}"))


# ---- a server ----
def test_remote_reward(monkeypatch):
    command = [sys.executable, str(EXAMPLES / "reward_server.py"), "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    monkeypatch.setenv("REWARD_URL", process.stdout.readline().split()[-1])
    texts = [f"<answer>a{b}</answer>" if b % 3 else f"a{b}" for b in range(150)]
    answers = [f"A{b}" if b % 2 else (None if b % 4 else "no") for b in range(150)]
    try:
        results, metrics = score({"remote": load("remote_reward.py")["remote"]}, texts, answer=answers)
    finally:
        process.kill()
        process.communicate()
    expected = [1.0 if b % 2 else (None if b % 4 else 0.0) for b in range(150)]
    assert [x if x == x else None for x in results["remote"]] == expected  # in order, of three requests
    assert metrics == {"reward_metrics/remote_requests": [3]}


def test_temporary_errors_of_the_server_are_retried(serve, monkeypatch):
    replies, requests = [], []
    url = serve(lambda path, body: (requests.append(body), replies.pop(0))[1])
    monkeypatch.setenv("REWARD_URL", url)
    waits, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: waits.append(seconds) or sleep(0))
    remote = {"remote": load("remote_reward.py")["remote"]}
    image = Image.new("RGB", (5, 7), "red")
    replies += [(503, {}), (429, {}), (200, {"rewards": [0.5, 1]})]
    assert score(remote, ["a", "b"], images=[image], answer=["x", "y"])[0] == {"remote": [0.5, 1.0]}
    assert waits == [0, 1, 2] and len(requests) == 3
    texts = [requests[2][name] for name in ("prompts", "responses", "references")]
    assert texts == [["?", "?"], ["a", "b"], ["x", "y"]]
    [[sent], _] = requests[2]["images"]
    assert Image.open(io.BytesIO(base64.b64decode(sent))).tobytes() == b"\xff\0\0" * 35
    replies += [(400, {"error": "no such thing"})]  # not temporary: requested once
    with pytest.raises(RuntimeError, match="status 400.*no such thing"):
        score(remote, ["a"], answer=["x"])
    assert len(requests) == 4
    replies += [(500, {"error": "broken"})] * 9
    with pytest.raises(RuntimeError, match="failed 6 times: status 500.*broken"):
        score(remote, ["a"], answer=["x"])
    assert len(requests) == 10 and waits[-6:] == [0, 1, 2, 4, 8, 16]
