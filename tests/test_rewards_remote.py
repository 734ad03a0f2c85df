"""Rewards of a server (--rewards http://...) and of a recipe (--reward-recipe), in both scripts that sample."""

import base64
import gc
import importlib
import io
import json
import logging
import math
import random
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, read_jsonl, write_jsonl
from PIL import Image

import common  # noqa: F401  before transformers
import ppo_vl
import rloo

STATE = SimpleNamespace(global_step=0, max_steps=1)
both = pytest.mark.parametrize("script", ["ppo_vl", "rloo"])


def by_length(body: dict) -> dict:
    return {"rewards": [float(len(text) % 5) for text in body["responses"]]}


def serve(http):
    http.serve_forever(poll_interval=0.02)


class Server:
    """answers: one per request, then by_length. One is a function of the body, (status, bytes), "hang", "drip" or "close"."""

    def __init__(self, port: int = 0):
        self.requests, self.answers, self.headers, outer = [], [], {}, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                answer = outer.answers.pop(0) if outer.answers else by_length
                if answer == "hang":
                    time.sleep(3)
                if answer == "drip":  # a promise of many bytes, and one from time to time
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                    for _ in range(30):
                        self.wfile.write(b" ")
                        time.sleep(0.1)
                if answer in ("hang", "close", "drip"):
                    return self.connection.close()
                status, text = (200, json.dumps(answer(body)).encode()) if callable(answer) else answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except OSError:  # the client left, or the connection was closed above
                    self.close_connection = True

            def log_message(self, *args):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads, block_on_close = True, False

            def handle_error(self, *args):
                pass

        self.http = Quiet(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}/score"
        threading.Thread(target=serve, args=(self.http,), daemon=True).start()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr(random.Random, "uniform", lambda *args: 0.01)


def row(index: int = 0, label: str | None = None, images: list | tuple = (), prompt="what?", **columns) -> dict:
    """As read_row makes it."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": "what?"}]
    media = {"images": list(images), "folder": Path("."), "where": f"rows row {index}"}
    columns = {"number": index, **columns}
    return {
        "messages": [{"role": "user", "content": parts}],
        "prompt": prompt,
        "answer": f"a{index}",
        "label": label,
        "columns": columns,
        **media,
    }


def score(args: dict, rows: list[dict], texts: list[str]):
    """-> scores, components, what was logged."""
    args = ppo_vl.Args(**{"reward_timeout": 10.0, **args})
    ppo_vl.check_args(args, 1)
    sources = ppo_vl.load_rewards(args, torch.device("cpu"))
    ids = [[1]] * len(rows)
    return ppo_vl.score_responses(sources, rows, texts, ids, STATE, args.reward_timeout, torch.device("cpu"))


def only(server, **args) -> dict:
    return {"rewards": (server.url,), "reward_weights": (1.0,), **args}


def sentence(capfd, act) -> str:
    """The one line on stderr with which act() ends, exit code 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        act()
    assert stopped.value.code == 2
    lines = re.findall(r"(?<!: )error: .*", capfd.readouterr().err)
    assert len(lines) == 1
    return lines[0]


# --- what is sent and what comes back --------------------------------------------------------------------------------


def test_many_responses_go_in_several_requests_and_come_back_in_order(server):
    rows = [row(g, label=("even", "odd")[g % 2]) for g in range(50) for _ in range(3)]
    texts = [f"r{b}" for b in range(150)]
    number = lambda body: {"rewards": [int(text[1:]) for text in body["responses"]]}  # noqa: E731
    server.answers = [number] * 3
    scores, components, _ = score({"rewards": (server.url, "length"), "reward_weights": (2.0, 24.0)}, rows, texts)
    assert [len(body["responses"]) for body in server.requests] == [64, 64, 22]
    assert scores.tolist() == pytest.approx([2.0 * b - 1 for b in range(150)])
    assert components[f"127_0_0_1_{server.port}_score"].tolist() == list(range(150))
    everything = {key: [x for body in server.requests for x in body[key]] for key in server.requests[0]}
    assert everything == {
        "prompts": ["what?"] * 150,
        "queries": [f"what?{text}" for text in texts],
        "responses": texts,
        "references": [f"a{g}" for g in range(50) for _ in range(3)],
        "labels": [("even", "odd")[g % 2] for g in range(50) for _ in range(3)],
        "images": [[]] * 150,
    }


def test_the_prompt_is_the_text_of_all_messages(server):
    chat = row(label=None)
    system = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    chat["messages"] = [system, *chat["messages"]]
    score(only(server), [chat], ["yes"])
    assert server.requests[0]["prompts"] == ["be brief\nwhat?"] and server.requests[0]["labels"] == [None]
    assert server.requests[0]["queries"] == ["be brief\nwhat?yes"]


def test_pictures_arrive_file_by_file(server, tmp_path):
    """Paths (beside the dataset too), bytes and dicts as the file's own bytes, decoded pictures as PNG; a list per response."""
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (5 + i, 7, 3), dtype=np.uint8)) for i in range(5)]
    (tmp_path / "data").mkdir()
    for i, name in enumerate(("a.png", "data/b.jpg", "c.png", "d.png")):
        pictures[i].save(tmp_path / name)
    files = [(tmp_path / name).read_bytes() for name in ("a.png", "data/b.jpg", "c.png", "d.png")]
    several = row(0, images=[str(tmp_path / "a.png"), "b.jpg", files[2]])
    rest = row(1, images=[{"bytes": files[3], "path": None}, pictures[4]])
    several["folder"] = rest["folder"] = tmp_path / "data"
    score(only(server), [several, several, rest, row(2)], ["x", "y", "z", ""])
    sent = [[base64.b64decode(image) for image in images] for images in server.requests[0]["images"]]
    assert [len(images) for images in sent] == [3, 3, 2, 0]
    assert sent[0] == sent[1] == files[:3] and sent[2][0] == files[3]
    assert sent[2][1].startswith(b"\x89PNG")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(sent[2][1]))), np.asarray(pictures[4]))


def test_null_is_not_applicable(server):
    server.answers = [lambda body: {"rewards": [None, 2, None]}]
    args = {"rewards": (server.url, "accuracy"), "reward_weights": (1.0, 1.0)}
    scores, components, _ = score(args, [row(0)] * 3, ["", "<answer>a0</answer>", "<answer>a0</answer>"])
    assert scores.tolist() == [0, 3, 1]
    server.answers = [lambda body: {"rewards": [None, None]}]
    assert np.isnan(score(only(server), [row(0)] * 2, ["", ""])[0]).all()


def test_components_are_logged_and_not_rewarded(server):
    server.answers = [
        lambda body: {
            "rewards": [1, 2],
            "components": {"Good style!": [5, None], "facts": [7.5, -1]},
            "note": "ignored",
        }
    ]
    scores, components, logged = score(only(server), [row(0)] * 2, ["", ""])
    name = f"127_0_0_1_{server.port}_score"
    assert scores.tolist() == [1, 2] and list(components) == [name]
    assert logged["metrics"] == {f"reward/{name}_good_style": [5.0], f"reward/{name}_facts": [7.5, -1.0]}


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://judge:8009/v1/score", "judge_8009_v1_score"),
        ("https://user:secret@Judge.example.org/?key=1", "judge_example_org"),
        ("http://[::1]:80/", "1_80"),
    ],
)
def test_names_of_servers(url, name):
    assert ppo_vl.metric_name(url) == name


def test_servers_and_functions_run_side_by_side(server, tmp_path):
    def slow(body):
        time.sleep(0.5)
        return by_length(body)

    other, server.answers = Server(), [slow]
    other.answers = [slow]
    (tmp_path / "r.py").write_text(
        "import time\ndef f(completions, **_):\n    time.sleep(0.5)\n    return [0.0] * len(completions)\n"
    )
    args = {"rewards": (server.url, f"{tmp_path}/r.py:f", other.url), "reward_weights": (1.0, 1.0, 1.0)}
    started = time.time()
    assert score(args, [row(0)] * 2, ["abc", "a"])[0].tolist() == [6, 2]
    assert time.time() - started < 1.0
    other.stop()


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [(500, b"oops"), (503, b""), (429, b"slow"), (200, b"<html>"), (200, b'"\xff'), "close"]
)
def test_what_may_pass_is_asked_again(server, no_waits, caplog, bad):
    server.answers = [bad, bad]
    with caplog.at_level(logging.WARNING):
        assert score(only(server), [row(0)] * 2, ["abc", "a"])[0].tolist() == [3, 1]
    assert len(server.requests) == 3 and server.requests[0] == server.requests[2]
    warnings = [record.getMessage() for record in caplog.records if server.url in record.getMessage()]
    assert len(warnings) == 2 and all("asked again" in w and "\n" not in w for w in warnings)


def test_the_waits_double_up_to_8_seconds(server, monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(ppo_vl.asyncio, "sleep", sleep)
    server.answers = [(502, b"")] * 7
    assert score(only(server, reward_timeout=100.0), [row(0)], ["abc"])[0].tolist() == [3]
    assert len(waits) == 7 and len({wait / base for wait, base in zip(waits, (0.5, 1, 2, 4, 8, 8, 8))}) == 7  # jitter
    assert all(base / 2 <= wait <= base for wait, base in zip(waits, (0.5, 1, 2, 4, 8, 8, 8)))


FATAL = {
    "a status that stays": ((404, b"no such\n thing"), ["404", "no such thing"]),
    "a bad request": ((400, b"?"), ["400"]),
    "no content": ((204, b""), ["204"]),
    "an answer that is no object": ((200, b"[1, 2]"), ["no list", "'rewards'", "2 responses"]),
    "no rewards": ((200, b"{}"), ["no list", "'rewards'", "2 responses"]),
    "rewards of another kind": ((200, b'{"rewards": "ab"}'), ["no list", "'rewards'"]),
    "too few": ((200, b'{"rewards": [1]}'), ["1 numbers", "2 responses"]),
    "too many": ((200, b'{"rewards": [1, 2, 3]}'), ["3 numbers", "2 responses"]),
    "NaN": ((200, b'{"rewards": [1, NaN]}'), ["nan", "finite"]),
    "infinity": ((200, b'{"rewards": [1, 1e999]}'), ["inf", "finite"]),
    "a number that no float holds": ((200, b'{"rewards": [1, 1%s]}' % (b"0" * 400)), ["1000", "finite"]),
    "text": ((200, b'{"rewards": [1, "2"]}'), ["'2'", "finite"]),
    "truth": ((200, b'{"rewards": [1, true]}'), ["True", "finite"]),
    "components in a list": ((200, b'{"rewards": [1, 2], "components": [1]}'), ["components", "object"]),
    "component too short": ((200, b'{"rewards": [1, 2], "components": {"x": [1]}}'), ["'x'", "2 responses"]),
    "component of text": ((200, b'{"rewards": [1, 2], "components": {"x": [1, "y"]}}'), ["'x'", "'y'"]),
    "too long": ((200, b'{"rewards": [1, 2], "note": "%s"}' % (b"x" * 2**24)), ["16777216 bytes"]),
    "a long error": ((404, b"x" * (2**24 + 1)), ["16777216 bytes"]),
}


@pytest.mark.parametrize("case", FATAL)
def test_what_stays_wrong_is_asked_once(server, capfd, case):
    answer, parts = FATAL[case]
    server.answers = [answer]
    error = sentence(capfd, lambda: score(only(server), [row(0)] * 2, ["abc", "a"]))
    assert len(server.requests) == 1
    for part in [server.url, "asked once", "go on from the newest with --resume", *parts]:
        assert part in error, part
    assert len(error) < 450


def test_redirects_are_refused(server, capfd):
    other = Server()
    server.answers, server.headers = [(307, b"")], {"Location": other.url}
    error = sentence(capfd, lambda: score(only(server), [row(0)], [""]))
    assert "307" in error and other.requests == [] and len(server.requests) == 1
    other.stop()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [(500, b"oops"), (200, b"<html>"), "close"])
def test_the_run_pauses_until_the_server_is_back(server, no_waits, caplog, monkeypatch, bad):
    monkeypatch.setattr(ppo_vl, "REMOTE_NEWS", 0.1)
    server.answers, started = [bad] * 40, time.time()
    with caplog.at_level(logging.WARNING):
        assert score(only(server), [row(0)], ["abc"])[0].tolist() == [3]
    assert len(server.requests) == 41
    paused = [record.getMessage() for record in caplog.records if "the run is paused" in record.getMessage()]
    assert 2 <= len(paused) <= 1 + (time.time() - started) / 0.1 and all(server.url in message for message in paused)


@pytest.mark.parametrize("bad", [(500, b"oops"), (200, b"<html>"), "close"])
def test_a_pause_ends_with_the_time_out(server, no_waits, capfd, bad):
    server.answers, started = [bad] * 999, time.time()
    error = sentence(capfd, lambda: score(only(server, reward_timeout=0.3), [row(0)], [""]))
    assert 0.3 <= time.time() - started < 2 and server.url in error and len(server.requests) > 5
    assert f"asked {len(server.requests)} times" in error


def test_nobody_listens(no_waits, capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    flags = {"rewards": (url,), "reward_weights": (1.0,), "reward_timeout": 0.3}
    error = sentence(capfd, lambda: score(flags, [row(0)], [""]))
    assert url in error and "ConnectError" in error


@pytest.mark.parametrize("bad", ["hang", "drip"])
def test_a_server_that_hangs_is_left_at_the_time_out(server, capfd, bad):
    server.answers, started = [bad] * 9, time.time()
    error = sentence(capfd, lambda: score(only(server, reward_timeout=0.4), [row(0)], [""]))
    assert time.time() - started < 3
    assert server.url in error and "no answer within --reward-timeout 0.4 seconds" in error


@pytest.mark.parametrize("bad", ["hang", "drip"])
def test_one_hang_is_survived(server, caplog, bad):
    server.answers = [bad]
    assert score(only(server, reward_timeout=1.0), [row(0)], ["abc"])[0].tolist() == [3]
    assert "the run is paused" in caplog.text and len(server.requests) == 2


def test_tries_end_with_the_time_out(server, capfd):
    server.answers, started = [(500, b"")] * 9, time.time()
    error = sentence(capfd, lambda: score(only(server, reward_timeout=0.2), [row(0)], [""]))
    assert time.time() - started < 1.5 and "500" in error and "asked once" in error


@pytest.mark.parametrize(
    "url", ["http://", "https:///score", "http://[bad", "http://host:port/", "http://host:99999", "http://a b"]
)
def test_bad_urls(capfd, url):
    assert url in sentence(capfd, lambda: score({"rewards": (url,), "reward_weights": (1.0,)}, [row(0)], [""]))


# --- recipes ---------------------------------------------------------------------------------------------------------


def recipe(folder: Path, content) -> str:
    path = folder / "recipe.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


NOTING = """
def f(completions, number, log_extra, **_):
    assert completions == ["one", "three"]
    log_extra("note", [f"f{x}" for x in number])
    return [1.0 * x for x in number]
async def g(completions, number, log_extra, **_):
    assert completions == ["one", "two", "three"]
    log_extra("note", [f"g{x}" for x in number])
    return [{"x": 10.0 * x, "y": None} for x in number]
def h(completions, **_):
    raise AssertionError("no row needs it")
"""


def test_sources_see_the_responses_of_their_labels_alone(server, tmp_path):
    (tmp_path / "r.py").write_text(NOTING)
    f, g, h = (f"{tmp_path}/r.py:{name}" for name in "fgh")
    content = {
        "math": [[f, 2], [g, 0.5]],
        "chat": [[g, 1], [server.url, 3]],
        "default": [["accuracy", 1]],
        "code": [[h, 1]],
    }
    rows = [row(1, "math"), row(2, "chat"), row(3, "math"), row(4, "other"), row(5)]
    texts = ["one", "two", "three", "<answer>a4</answer>", "no"]
    args = {"reward_recipe": recipe(tmp_path, content), "rewards": ("nonsense",)}  # which is not read
    scores, components, logged = score(args, rows, texts)
    assert scores.tolist() == [2 * 1 + 0.5 * 10, 1 * 20 + 3 * 3, 2 * 3 + 0.5 * 30, 1, 0]
    assert server.requests[0]["responses"] == ["two"] and server.requests[0]["labels"] == ["chat"]
    assert server.requests[0]["references"] == ["a2"] and len(server.requests) == 1
    present = {name: np.flatnonzero(~np.isnan(values)).tolist() for name, values in components.items()}
    name = ppo_vl.metric_name(server.url)
    assert present == {"f": [0, 2], "x": [0, 1, 2], "y": [], name: [1], "accuracy": [3, 4]}
    assert components["f"][[0, 2]].tolist() == [1, 3]
    assert logged["extra"]["note"][3:] == [None, None] and logged["extra"]["note"][1] == "g2"


def test_a_source_that_no_row_needs_is_not_called(server, tmp_path):
    content = {"a": [[server.url, 1]], "b": [["length", 24]]}
    assert score({"reward_recipe": recipe(tmp_path, content)}, [row(0, "b")] * 2, ["", ""])[0].tolist() == [-1, -1]
    assert server.requests == []


def test_a_recipe_with_only_a_default_is_as_flags(tmp_path):
    rows, texts = [row(i, label) for i, label in enumerate(("a", None))], ["<answer>a0</answer>", "x"]
    args = {"reward_recipe": recipe(tmp_path, {"default": [["accuracy", 0.9], ["format", 0.1]]})}
    assert score(args, rows, texts)[0].tolist() == score({}, rows, texts)[0].tolist() == [1, 0]


BAD_RECIPES = {
    "no JSON": ("{", ["JSON"]),
    "empty": ({}, ["object"]),
    "a list": ([["accuracy", 1]], ["object"]),
    "no sources": ({"a": []}, ["'a'", "[source, weight]"]),
    "a name alone": ({"a": "accuracy"}, ["'a'", "[source, weight]"]),
    "no weight": ({"a": [["accuracy"]]}, ["'a'", "[source, weight]"]),
    "a bare pair": ({"a": ["accuracy", 1]}, ["'a'", "[source, weight]"]),
    "weight in words": ({"a": [["accuracy", "1"]]}, ["'a'", "[source, weight]"]),
    "weight NaN": ('{"a": [["accuracy", NaN]]}', ["'a'", "[source, weight]"]),
    "weight infinite": ('{"b": [["format", 1]], "a": [["accuracy", 1e999]]}', ["'a'", "[source, weight]"]),
    "a source of no kind": ({"a": [["nonsense", 1]]}, ["nonsense", "accuracy"]),
    "a source twice": ({"a": [["length", 1], ["length", 2]]}, ["'length'", "once"]),
}


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_bad_recipes(tmp_path, capfd, case):
    content, parts = BAD_RECIPES[case]
    path = recipe(tmp_path, content)
    error = sentence(capfd, lambda: score({"reward_recipe": path}, [row(0, "a")], [""]))
    for part in [f"--reward-recipe {path}", *parts]:
        assert part in error, error


def test_a_recipe_that_is_not_there(tmp_path, capfd):
    assert "nope.json" in sentence(capfd, lambda: score({"reward_recipe": "nope.json"}, [row(0, "a")], [""]))


def read(args: dict, raw: dict) -> dict:
    args = rloo.Args(**args)
    columns = rloo.find_columns(args, list(raw), "rows")
    data = {"columns": columns, "recipe": rloo.parse_recipe(args), "system_prompt": None, "plain_prompts": False}
    return rloo.read_row(raw, {**data, "template_kwargs": {}, "video_fps": 2.0, "folder": Path(".")}, "rows row 7")


def test_labels_of_rows(tmp_path, capfd):
    path = recipe(tmp_path, {"math": [["accuracy", 1]], "3": [["format", 1]]})
    raw, args = {"prompt": "a", "answer": "b", "label": "math"}, {"reward_recipe": path}
    assert read(args, raw)["label"] == "math"
    assert read(args, {**raw, "label": 3})["label"] == "3"
    assert read(args, {"prompt": "a", "answer": "b", "reward_label": "math"})["label"] == "math"
    assert read({**args, "label_column": "kind"}, {**raw, "kind": "math", "label": "?"})["label"] == "math"
    assert read({}, {**raw, "label": "anything"})["label"] == "anything"
    for label in ("maths", None):
        error = sentence(capfd, lambda label=label: read(args, {**raw, "label": label}))
        for part in ("rows row 7", repr(label), "math, 3", "default"):
            assert part in error
    assert "row 7" in sentence(capfd, lambda: read(args, {"prompt": "a", "answer": "b"}))
    assert "--label-column" in sentence(capfd, lambda: read({**args, "label_column": "x"}, raw))
    path = recipe(tmp_path, {"math": [["accuracy", 1]], "default": [["format", 1]]})
    assert read(args, {**raw, "label": "maths"})["label"] == "maths"


def test_answers_are_needed_where_accuracy_is(tmp_path, capfd):
    args = {"reward_recipe": recipe(tmp_path, {"math": [["accuracy", 1]], "chat": [["format", 1]]})}
    assert "accuracy" in sentence(capfd, lambda: read(args, {"prompt": "a", "label": "chat"}))
    assert read(args, {"prompt": "a", "label": "chat", "answer": None})["answer"] is None
    assert "row 7" in sentence(capfd, lambda: read(args, {"prompt": "a", "label": "math", "answer": None}))
    args = {"reward_recipe": recipe(tmp_path, {"chat": [["format", 1]]})}
    assert read(args, {"prompt": "a", "label": "chat"})["answer"] is None


# --- whole runs ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.slow
def test_runs_against_a_server(run, server, script):
    server.answers = []
    folder = run(script, **only(server, eval_samples=2, eval_num_samples=1))
    name = ppo_vl.metric_name(server.url)
    steps = [m for m in read_jsonl(folder / "metrics.jsonl") if "objective/scores" in m]
    assert [m["objective/scores"] for m in steps] == [m[f"reward/{name}"] for m in steps] and len(steps) == 2
    probe, rollouts = server.requests[0], [body for body in server.requests if len(body["responses"]) == 16]
    assert probe["responses"] == ["", ""] and len(rollouts) == 2
    for body in rollouts:
        images = [base64.b64decode(*own) for own in body["images"]]
        assert len(set(images)) <= 4 and all(Image.open(io.BytesIO(image)).size == (64, 64) for image in images)
        assert all(prompt.endswith("?") for prompt in body["prompts"]) and body["labels"] == [None] * 16


@both
def test_an_unreachable_server_is_said_before_the_run_has_a_folder(run, server, no_waits, capfd, tmp_path, script):
    server.stop()
    error = sentence(capfd, lambda: run(script, **only(server, reward_timeout=0.5)))
    assert server.url in error and "ConnectError" in error and not (tmp_path / "runs").exists()


@both
@pytest.mark.slow
def test_faults_of_a_server_do_not_change_the_weights(run, server, no_waits, script):
    """Statuses, garbage, closed sockets and a hang, at the first rollout and again: the run is the one without them."""
    from safetensors.torch import load_file

    faults = [
        (500, b"oops"),
        "close",
        (200, b"<html>"),
        (429, b""),
        (503, b""),
        (200, b'{"rewards": ['),
        "drip",
        (502, b"x"),
    ]
    weights = {}
    for name, answers in (("calm", []), ("wild", [by_length, *faults, by_length, *faults[:3], "hang"])):
        server.answers, before = list(answers), len(server.requests)
        folder = run(script, run_name=name, **only(server, eval_dataset=None, reward_timeout=20.0))
        assert server.answers == [] and len(server.requests) - before == 3 + 12 * (name == "wild")
        [file] = folder.glob("checkpoint-2/**/model.safetensors")
        weights[name] = load_file(file)
    assert all(bool((x == weights["wild"][key]).all()) for key, x in weights["calm"].items())


@both
@pytest.mark.slow
def test_a_server_that_dies_costs_no_checkpoint(run, server, no_waits, capfd, tmp_path, script):
    flags = only(server, total_steps=3, eval_dataset=None, save_steps=1, seed=5)
    whole = run(script, run_name="whole", **flags)

    def last(body):
        threading.Thread(target=server.stop).start()
        return by_length(body)

    server.requests.clear()
    server.answers = [by_length, last]  # the probe, the first rollout
    error = sentence(capfd, lambda: run(script, **{**flags, "reward_timeout": 0.5}))
    assert server.url in error and "--resume" in error
    folder = tmp_path / "runs" / "run"
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-1"] and len(
        read_jsonl(folder / "metrics.jsonl")
    ) == 1
    server.__init__(server.port)
    gc.collect()  # the lock of the folder goes with the frames of main
    run(script, **{**flags, "resume": folder / "checkpoint-1"})
    assert (folder / "checkpoint-3").is_dir()
    scores = [[m["objective/scores"] for m in read_jsonl(f / "metrics.jsonl")] for f in (whole, folder)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and len(scores[0]) == 3


@both
@pytest.mark.slow
def test_runs_with_a_recipe(run, server, vqa_rows, tmp_path, script):
    """Half of the rows are judged by the rules, the other half by the server; the first of each kind is tried at the start."""
    rows = [{**r, "label": ("rules", "server")[i % 2]} for i, r in enumerate(vqa_rows)]
    for r in rows[1::2]:
        r["answer"] = None
    data = write_jsonl(tmp_path / "labelled.jsonl", rows)
    path = recipe(
        tmp_path, {"rules": [["accuracy", 0.9], ["format", 0.1]], "server": [[server.url, 1]], "none": [["length", 1]]}
    )
    folder = run(script, dataset=data, eval_dataset=data, eval_samples=0, reward_recipe=path)
    name = ppo_vl.metric_name(server.url)
    probe, *others = server.requests
    assert probe["responses"] == ["", ""] and {label for body in others for label in body["labels"]} == {"server"}
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert all(f"eval/sampled_{key}" in metrics[0] for key in ("accuracy", "format", name))
    assert not any("length" in key and "response" not in key for key in metrics[1] if key.startswith("reward/"))
    samples = [s for s in read_jsonl(folder / "samples.jsonl") if s["phase"] == "eval_greedy"]
    assert samples and all((s["components"]["accuracy"] is None) == (s["row"] % 2 == 1) for s in samples)
    assert metrics[0]["eval/greedy_accuracy"] > 0.8  # of the rows with an answer alone


def test_pass_at_k_counts_the_prompts_that_accuracy_judges(monkeypatch):
    nan, components = math.nan, [[1.0, 0.0], [math.nan, math.nan], [0.0, 0.0]]
    records = [
        {"components": {"accuracy": np.array(values)}, "scores": np.array([1.0, nan]), "response_ids": [[1]]}
        for values in components
    ]
    for script in (ppo_vl, rloo):
        monkeypatch.setattr(script, "generate_and_score", lambda *args: (records, {}))
        monkeypatch.setattr(script, "sample_record", lambda *args: {})
        args = script.Args(eval_num_samples=2)
        model = SimpleNamespace(device="cpu")
        metrics, _ = script.evaluate(model, None, {"keep": [0]}, args, [], (0, 1), 0)
        assert metrics["eval/pass_at_k"] == 0.5


# --- the example -----------------------------------------------------------------------------------------------------


def test_example_server_scores_exact_matches(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("reward_server")
    http = ThreadingHTTPServer(("127.0.0.1", 0), example.Rewards)
    threading.Thread(target=serve, args=(http,), daemon=True).start()
    args = {"rewards": (f"http://127.0.0.1:{http.server_port}",), "reward_weights": (1.0,)}
    unknown = {**row(2), "answer": None}
    texts = ["<answer> A0 </answer>", "it is a0", "a0", "anything"]
    scores, _, logged = score(args, [row(0), row(0), row(0), unknown], texts)
    assert scores[:3].tolist() == [1, 0, 1] and math.isnan(scores[3])
    [key] = logged["metrics"]
    assert re.fullmatch(r"reward/127_0_0_1_\d+_tagged", key) and logged["metrics"][key] == [1, 0, 0, 0]
    http.shutdown()
    http.server_close()
