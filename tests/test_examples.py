"""examples/: each does what its docstring says, against the real thing; TRL's rewards run unchanged."""

import asyncio
import base64
import io
import json
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import common  # noqa: F401  before transformers # isort: skip
import pytest
import torch
from conftest import ROOT, read_jsonl
from PIL import Image

import rloo
from common.packing import Response

EXAMPLES = ROOT / "examples"
KINDS = {"rloo": ("prompts", "eval_dataset"), "ppo_vl": ("prompts", "eval_dataset")}
KINDS |= {"reward_bt": ("pairs", "eval_datasets"), "grm_sft": ("judged", "eval_dataset")}


def load(name: str) -> dict:
    return runpy.run_path(str(EXAMPLES / name))


def make(script: str, folder, *words: str, code: int = 0) -> str:
    """Run an example in a folder -> what it says."""
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def score(functions: dict, texts: list[str], ids=None, pictures=(), **columns) -> tuple[dict, list]:
    """One response to each row of some columns, as rloo.py would have it scored."""
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    parts = [{"type": "image", "image": picture} for picture in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    ids = ids or [torch.tensor([1])] * len(texts)
    return rloo.score_responses(
        functions=functions,
        prompts=[SimpleNamespace(row={"prompt": "?"} | row, messages=messages) for row in rows],
        responses=[Response(own, torch.zeros(len(own)), truncated=False) for own in ids],
        texts=texts,
        trainer_state=None,
    )


# ---- functions ----


def test_custom_reward():
    ids = [torch.arange(n) for n in (3, 5)]
    function = load("custom_reward.py")["short_and_right"]
    results, logged = score({"mine": function}, ["It is RED.", "blue"], ids, answer=["red", "red"])
    assert results["mine"] == pytest.approx([0.97, -0.05]) and logged == [("reward/mentions_answer", 0.5)]


def test_recipe():
    texts, labels = ["it makes 1,204.", "(b)", "b) yes", "whatever"], ["math", "choice", "choice", "other"]
    function = load("recipe.py")["by_label"]
    results, logged = score({"r": function}, texts, answer=["1204", "b", "B", "?"], label=labels)
    assert results["r"][:3] == pytest.approx([1 - 0.0015, 0, 1]) and results["r"][3] != results["r"][3]
    assert [name for name, _ in logged] == ["reward/math", "reward/choice", "reward/choice"]


def test_addition(tmp_path):
    make("addition.py", tmp_path, "data")
    train, test = (read_jsonl(tmp_path / f"data/{name}.jsonl") for name in ("train", "test"))
    assert len(train) == 320 and len(test) == 80 and len({row["prompt"] for row in train + test}) == 400
    assert {"prompt": "What is 7 + 13? Answer with the number only.", "answer": "20"} in train + test
    function, texts = load("addition.py")["right_sum"], ["7 + 13 is 20", "20, not 21", ""]
    assert score({"sum": function}, texts, answer=["20"] * 3)[0] == {"sum": [1, 0, 0]}


def test_spelling_pairs(tmp_path):
    make("spelling_pairs.py", tmp_path, "data")
    train, test = (read_jsonl(tmp_path / f"data/{name}.jsonl") for name in ("train", "test"))
    assert len(train) == 2000 and len(test) == 500
    texts = (" ".join(row["chosen"] for row in rows) for rows in (train, test))
    words = [{word for word in text.replace(".", "").split() if len(word) > 3} for text in texts]
    assert not words[0] & words[1] and all(len(known) > 40 for known in words)
    for row in train:
        pairs = zip(row["chosen"].split(), row["rejected"].split())
        [(good, bad)] = [(good, bad) for good, bad in pairs if good != bad]
        assert sorted(good) == sorted(bad) and good[0] == bad[0]


# ---- data ----


@pytest.fixture(scope="module")
def data(tmp_path_factory, vqa_rows):
    """Forty pictures in folders by their answer -> the folder with the six files."""
    folder = tmp_path_factory.mktemp("custom")
    for i, row in enumerate(vqa_rows):
        (folder / "pictures" / row["answer"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(row["image"], folder / "pictures" / row["answer"] / f"{i}.png")
    (folder / "pictures/yes/notes.txt").write_text("not a picture")
    said = make("custom_data.py", folder, "pictures", "made")
    assert said.startswith("40 pictures of ") and "8 held out" in said
    return folder / "made"


def test_custom_data(data, tmp_path):
    for kind in ("prompts", "pairs", "judged"):
        train, test = read_jsonl(data / f"{kind}.jsonl"), read_jsonl(data / f"{kind}_test.jsonl")
        assert len(train) == 32 and len(test) == 8
        assert not {row["image"] for row in train} & {row["image"] for row in test}
        for row in train + test:
            right = row["image"].split("/")[-2]
            side = int(row.get("verdict", 1)) - 1
            good = row[{"prompts": "answer", "pairs": "chosen", "judged": f"answer_{side}"}[kind]]
            assert good in (right, f"<answer>{right}</answer>")
            assert good not in (row.get("rejected"), row.get(f"answer_{1 - side}"))
    (tmp_path / "only").mkdir()
    (tmp_path / "only/a.png").write_bytes(b"")
    assert "at least two subfolders" in make("custom_data.py", tmp_path, ".", "out", code=1)


@pytest.mark.slow
@pytest.mark.parametrize("script", KINDS)
def test_every_script_takes_its_file(script, data, run):
    kind, name = KINDS[script]
    sources = {"dataset": str(data / f"{kind}.jsonl"), "eval_dataset": None}
    sources |= {name: ("held_out=" if name == "eval_datasets" else "") + f"{data}/{kind}_test.jsonl"}
    folder = run(script, **sources, total_steps=1, micro_batch_tokens=4096)
    assert [step["train/step"] for step in read_jsonl(folder / "metrics.jsonl")][-1] == 1


# ---- a server ----


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}")


@pytest.fixture(scope="module")
def reward_server():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "reward_server.py"), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(port)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_remote_reward(reward_server, monkeypatch):
    monkeypatch.setenv("REWARD_URL", reward_server)
    texts = [f"<answer>a{b}</answer>" if b % 3 else f"a{b}" for b in range(150)]
    answers = [f"A{b}" if b % 2 else (None if b % 4 else "no") for b in range(150)]
    results, logged = score({"remote": load("remote_reward.py")["remote"]}, texts, answer=answers)
    expected = [1.0 if b % 2 else (None if b % 4 else 0.0) for b in range(150)]
    assert [x if x == x else None for x in results["remote"]] == expected  # in order, of three requests
    assert logged == [("reward/remote_requests", 3)]


@pytest.fixture
def odd_server(monkeypatch):
    """A server that answers (status, reply), one after the other -> what to answer, and what it was asked."""
    answers, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, reply = answers.pop(0)
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("REWARD_URL", f"http://127.0.0.1:{server.server_port}")
    yield answers, asked
    server.shutdown()
    server.server_close()


def test_a_server_that_stumbles_is_asked_again(odd_server, monkeypatch):
    answers, asked = odd_server
    waits, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: waits.append(seconds) or sleep(0))
    remote = {"remote": load("remote_reward.py")["remote"]}
    picture = Image.new("RGB", (5, 7), "red")
    answers += [(503, {}), (429, {}), (200, {"rewards": [0.5, 1]})]
    assert score(remote, ["a", "b"], pictures=[picture], answer=["x", "y"])[0] == {"remote": [0.5, 1.0]}
    assert waits == [0, 1, 2] and len(asked) == 3
    texts = [asked[2][name] for name in ("prompts", "responses", "references")]
    assert texts == [["?", "?"], ["a", "b"], ["x", "y"]]
    [[sent], _] = asked[2]["images"]
    assert list(Image.open(io.BytesIO(base64.b64decode(sent))).get_flattened_data()) == [(255, 0, 0)] * 35
    answers += [(400, {"error": "no such thing"})]  # stays bad: asked once
    with pytest.raises(RuntimeError, match="status 400.*no such thing"):
        score(remote, ["a"], answer=["x"])
    assert len(asked) == 4
    answers += [(500, {"error": "broken"})] * 9
    with pytest.raises(RuntimeError, match="no answer in 6 tries: status 500.*broken"):
        score(remote, ["a"], answer=["x"])
    assert len(asked) == 10 and waits[-6:] == [0, 1, 2, 4, 8, 16]


def test_async_rewards_run_side_by_side():
    both_are_here = asyncio.Barrier(2)

    async def meet(texts, **columns):
        await asyncio.wait_for(both_are_here.wait(), timeout=30)
        return [1.0] * len(texts)

    assert score({"a": meet, "b": meet}, ["x"], answer=["x"])[0] == {"a": [1.0], "b": [1.0]}


# ---- TRL's own functions, where TRL is installed ----


def test_rewards_of_trl_run_unchanged():
    rewards = pytest.importorskip("trl.rewards")
    texts = ["<think>half</think>\n$\\boxed{\\frac{1}{2}}$", "$\\boxed{\\frac{1}{3}}$"]
    chat = [[{"role": "user", "content": "what?"}]] * 2
    functions = {"think": rewards.think_format_reward, "short": rewards.get_soft_overlong_punishment(20, 10)}
    results, _ = score(functions, texts, [torch.arange(n) for n in (15, 5)], prompt=chat)
    assert results == {"think": [1.0, 0.0], "short": [-0.5, 0.0]}
    pytest.importorskip("math_verify")
    right = {"right": rewards.accuracy_reward}
    results, _ = score(right, texts, prompt=chat, solution=["$\\frac{1}{2}$"] * 2)
    assert results == {"right": [1.0, 0.0]}
