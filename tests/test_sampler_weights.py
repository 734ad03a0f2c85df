"""Importance weights for responses that another engine drew, and what the trainer makes of a vLLM server, without vLLM."""

import gc
import importlib
import itertools
import json
import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import to_argv
from rloo_runs import BASE, catch, reward_file
from test_ppo_update import ONE_STEP, caught, gradients_of_update  # noqa: F401

import ppo_vl
import rloo

CPU = torch.device("cpu")


# --- the weights -----------------------------------------------------------------------------------------------------


def weights_of(ratios: list[list[float]], clip: float, level: str, mode: str) -> torch.Tensor:
    """Of responses whose tokens have these ratios; 0 stands for padding."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    mask = ratios > 0
    engine = torch.where(mask, -ratios.log(), torch.full_like(ratios, 99.0))  # padding may hold anything
    return ppo_vl.sampler_weights(torch.zeros_like(ratios), engine, mask, clip, level, mode)


@pytest.mark.parametrize(
    "level, mode, expected",
    [
        ("token", "truncate", [[0.25, 1.0, 2.0], [1.5, 0.5, 0.0]]),
        ("token", "mask", [[0.0, 1.0, 0.0], [1.5, 0.5, 0.0]]),
        ("sequence", "truncate", [[1.0, 1.0, 1.0], [0.75, 0.75, 0.0]]),
        ("sequence", "mask", [[1.0, 1.0, 1.0], [0.75, 0.75, 0.0]]),
    ],
)
def test_weights_by_hand(level, mode, expected):
    found = weights_of([[0.25, 1.0, 4.0], [1.5, 0.5, 0.0]], 2.0, level, mode)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_whole_response_is_masked_or_cut():
    assert weights_of([[2.0, 2.0]], 3.0, "sequence", "mask").tolist() == [[0, 0]]
    assert weights_of([[2.0, 2.0]], 3.0, "sequence", "truncate").tolist() == [[3, 3]]
    assert weights_of([[0.5, 0.5]], 3.0, "sequence", "mask").tolist() == [[0, 0]]


def test_far_off_samplers_give_finite_weights():
    logprobs, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    for engine in (-math.inf, -1e4):
        weights = ppo_vl.sampler_weights(logprobs, torch.tensor([[engine, -1.0]]), mask, 2.0, "token", "truncate")
        assert weights.tolist() == [[2.0, 1.0]]


def test_only_the_gradient_is_scaled():
    x = torch.tensor([0.1, -2.0, 3.3], requires_grad=True)
    y = ppo_vl.scale_gradient(x, torch.tensor([1.0, 0.5, 0.0]))
    assert torch.equal(x, y)
    (y * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0]


# --- the gradient ----------------------------------------------------------------------------------------------------


def gradients_of_toy(
    shift: float, level: str, mode: str, clip: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All responses of two tokens out of 4, drawn from q, which is p with logits moved by noise of size `shift` -> the
    expected policy gradient under p, and under q without and with the correction. Exact: every response is enumerated."""
    noise, V = torch.Generator().manual_seed(0), 4
    logits = torch.randn(1 + V, V, generator=noise, dtype=torch.float64, requires_grad=True)  # first; second after each
    moved = logits.detach() + shift * torch.randn(1 + V, V, generator=noise, dtype=torch.float64)
    pairs = list(itertools.product(range(V), repeat=2))
    scores = torch.randn(len(pairs), generator=noise, dtype=torch.float64)
    first, second = torch.tensor(pairs).T

    def tokens(logits: torch.Tensor) -> torch.Tensor:  # (B, 2)
        logp = logits.log_softmax(-1)
        return torch.stack([logp[0, first], logp[1 + first, second]], 1)

    drawn_from = tokens(moved)
    mask, owner = torch.ones(len(pairs), 2, dtype=torch.bool), torch.arange(len(pairs)).repeat_interleave(2)

    def gradient(probabilities, weights) -> torch.Tensor:
        new = tokens(logits)
        drawn = ppo_vl.scale_gradient(new, weights)
        loss, _ = rloo.compute_rloo_loss(drawn.flatten(), new.detach().flatten(), scores, owner, "token", 0.2, 0.2)
        return torch.autograd.grad((probabilities * loss).sum(), logits)[0]

    exact, p, q = torch.ones(mask.shape, dtype=torch.float64), tokens(logits).detach(), drawn_from
    weights = ppo_vl.sampler_weights(p, q, mask, clip, level, mode)
    return gradient(p.sum(1).exp(), exact), gradient(q.sum(1).exp(), exact), gradient(q.sum(1).exp(), weights)


@pytest.mark.parametrize("shift", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("level, mode", itertools.product(["token", "sequence"], ["truncate", "mask"]))
def test_corrected_gradient_is_nearer_to_the_on_policy_one(shift, level, mode):
    wanted, plain, corrected = gradients_of_toy(shift, level, mode, clip=4.0)
    assert (plain - wanted).norm() > 0.01 * wanted.norm()
    assert (corrected - wanted).norm() < (0.8 if level == "token" else 0.3) * (plain - wanted).norm()


def test_whole_responses_without_a_limit_give_the_on_policy_gradient():
    wanted, _, corrected = gradients_of_toy(0.5, "sequence", "truncate", clip=1e6)
    torch.testing.assert_close(corrected, wanted)


def assert_same(gradients: dict, others: dict, same: bool) -> None:
    assert gradients.keys() == others.keys() and any(g.any() for g in gradients.values())
    assert all(torch.equal(g, others[name]) for name, g in gradients.items()) == same


def equal_weights(rollout, level: str, mode: str, shift: float = 0.0) -> torch.Tensor:
    """Of a sampler with the trainer's very log-probs, or with others."""
    engine = rollout.logprobs - shift * torch.linspace(-1, 1, rollout.logprobs.shape[1])
    return ppo_vl.sampler_weights(rollout.logprobs, engine, rollout.response_mask, 2.0, level, mode)


def test_exact_sampler_changes_no_bit_of_ppo(caught, monkeypatch, any_reward):  # noqa: F811
    call = caught("update", **any_reward, **ONE_STEP)
    plain, _ = gradients_of_update(monkeypatch, call)
    args = replace(call["args"], tis_clip=2.0)
    for level, mode in itertools.product(["token", "sequence"], ["truncate", "mask"]):
        tables = {**call["tables"], "tis_weights": equal_weights(call["rollout"], level, mode)}
        corrected, _ = gradients_of_update(monkeypatch, call, args=args, tables=tables)
        assert_same(plain, corrected, True)
    tables["tis_weights"] = equal_weights(call["rollout"], "token", "truncate", shift=0.3)
    corrected, _ = gradients_of_update(monkeypatch, call, args=args, tables=tables)
    assert_same(plain, corrected, False)


def test_exact_sampler_changes_no_bit_of_rloo(vqa, tmp_path, monkeypatch):
    call = catch("update_policy", {**BASE, **reward_file(tmp_path), "dataset": vqa, "tis_clip": 2, "kl_coef": 0})

    def gradients(weights) -> dict:
        found = {}

        def look(engine):
            found.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
            engine.zero_grad()
            return 1.0, True

        with monkeypatch.context() as patch:
            patch.setattr(rloo, "optimizer_step", look)
            rloo.update_policy(**{**call, "tis_weights": weights})
        return found

    plain = gradients(None)
    for level, mode in itertools.product(["token", "sequence"], ["truncate", "mask"]):
        assert_same(plain, gradients(equal_weights(call["rollout"], level, mode)), True)
    assert_same(plain, gradients(equal_weights(call["rollout"], "token", "truncate", shift=0.3)), False)


# --- what can go wrong before a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["ppo_vl", "rloo", "grm_sft"])
def test_without_vllm_one_sentence(script, monkeypatch, capsys):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: None if name == "vllm" else find(name)
    )
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as stopped:
        module.main(module.parse_args(["--rollout", "vllm"]))
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "pip install -r requirements-gpu.txt" in lines[0] and "--rollout hf" in lines[0]


@pytest.mark.parametrize("script", ["ppo_vl", "rloo", "grm_sft"])
@pytest.mark.parametrize("installed, words", [(False, "pip install -r requirements-gpu.txt"), (True, "needs a GPU")])
def test_weights_over_nccl_need_vllm_and_a_gpu(script, installed, words, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module(script)
    args = module.parse_args(["--rollout", "vllm-server", "--vllm-weight-transfer", "nccl"])
    with pytest.raises(SystemExit):
        module.check_sampler_args(args, 1)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line and "--vllm-weight-transfer folder" in line


def test_no_server(argv, capsys):
    flags = {"rollout": "vllm-server", "vllm_urls": ["http://localhost:1"], "vllm_timeout": 0.2}
    with pytest.raises(SystemExit) as stopped:
        ppo_vl.main(ppo_vl.parse_args(argv(**flags)))
    assert stopped.value.code == 2
    assert "http://localhost:1 gave no answer within --vllm-timeout 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["ppo_vl", "rloo"])
def test_a_sampler_without_the_last_step_stops_the_run(script, argv, capsys, monkeypatch):
    module = importlib.import_module(script)
    sync = module.HFSampler.sync
    monkeypatch.setattr(module.HFSampler, "sync", lambda self, version, folder: sync(self, 0, folder))
    with pytest.raises(SystemExit) as stopped:
        module.main(module.parse_args(argv(script, eval_dataset=None)))
    assert stopped.value.code == 2
    assert "step 2: responses were drawn with the weights of step 0, not 1" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["ppo_vl", "rloo"])
@pytest.mark.slow
def test_an_engine_that_fails_leaves_a_checkpoint(script, argv, capsys, monkeypatch, tmp_path):
    module = importlib.import_module(script)
    sample, calls = module.HFSampler.sample, []

    def fail_late(*args):
        calls.append(1)
        if len(calls) == 2:
            raise module.EngineError("out of memory")
        return sample(*args)

    monkeypatch.setattr(module.HFSampler, "sample", fail_late)
    with pytest.raises(SystemExit) as stopped:
        module.main(module.parse_args(argv(script, eval_dataset=None)))
    assert stopped.value.code == 2
    del stopped
    gc.collect()  # the lock of the folder goes with the frames of main
    checkpoint = tmp_path / "runs/run/checkpoint-1"
    assert f"out of memory; go on with --resume {checkpoint}" in capsys.readouterr().err
    module.main(module.parse_args(argv(script, eval_dataset=None, resume=checkpoint)))
    steps = [json.loads(line)["train/step"] for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert (tmp_path / "runs/run/logprob_gap-2.png").stat().st_size > 5000


# --- a server that is not vLLM ---------------------------------------------------------------------------------------


class FakeServer(BaseHTTPRequestHandler):
    """The part of vLLM's server that is asked. Its only token is 10 + the number of the weights it has, 9 before any.

    server.faults: path -> functions (server, request body), each called once, in front of an answer; what one returns, if
    it returns something, is sent instead: (status, body).
    """

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null"))

    def answer(self, body):
        server = self.server
        with server.lock:
            server.asked.append(self.path)
            faults = server.faults.get(self.path, [])
            status, answer = (faults.pop(0)(server, body) if faults else None) or (200, self.regular(body))
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def regular(self, body):
        server = self.server
        if self.path == "/v1/models":
            return {"data": [{"id": "fake"}]}
        if self.path == "/weight_info":
            return {"weight_version": server.version}
        if self.path == "/collective_rpc":
            server.weights = int(body["kwargs"]["weights_path"].rsplit("-", 1)[1])
        if self.path == "/update_weight_version":
            server.version = body["new_version"]
        if self.path == "/v1/completions":
            ids = [10 + server.weights, body["seed"] % 97]
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
            choice["prompt_token_ids"] = body["prompt"]
            return {"choices": [choice] * body["n"]}
        return {}


class Listener(ThreadingHTTPServer):
    request_queue_size = 128  # all of a batch's requests come at once


def restart(server, body=None):
    server.version, server.weights = "default", -1


def restart_with_an_error(server, body):
    restart(server)
    return 503, {"error": "gone"}


@pytest.fixture
def fake():
    server = Listener(("localhost", 0), FakeServer)
    server.version, server.weights, server.asked, server.faults, server.lock = "default", -1, [], {}, threading.Lock()
    server.url = f"http://localhost:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def sampler(fake, tiny_text_model, tmp_path):
    argv = to_argv({"model": tiny_text_model, "vllm_urls": [fake.url], "vllm_timeout": 5, "rollout": "vllm-server"})
    model = ppo_vl.load_model(tiny_text_model, torch.float32)
    sampler = ppo_vl.ServerSampler(ppo_vl.parse_args(argv), model, None, None, [0], 64, (0, 1), CPU)
    sampler.sync(0, tmp_path)
    fake.asked.clear()
    return sampler


def sample(sampler, count: int = 40) -> list[list[int]]:
    rows = [{"where": f"data row {i + 1}", "images": [], "videos": []} for i in range(count)]
    prompts = [{"prompt_ids": torch.tensor([3, 4, i])} for i in range(count)]
    ids, logprobs, cut = sampler.sample(rows, prompts, 2, 1.0, torch.Generator().manual_seed(0))
    assert len(ids) == len(logprobs) == len(cut) == 2 * count
    assert all(cut) and logprobs[0].tolist() == [-1.0, -2.0]
    return [x.tolist() for x in ids]


def test_new_weights_reach_the_server(sampler, fake, tmp_path):
    first = sample(sampler)
    assert {ids[0] for ids in first} == {10}
    sampler.sync(1, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["server_weights-1"]
    assert {ids[0] for ids in sample(sampler)} == {11}
    assert [ids[1] for ids in sample(sampler)] == [ids[1] for ids in first]  # the same seeds
    sampler.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_log_prob_that_is_none_or_not_finite_is_seen(value, sampler, fake):
    """It reaches the trainer as what is not finite, and skips the update (test_faults.py)."""

    def broken(server, body):
        choice = {"token_ids": [10, 3], "logprobs": {"token_logprobs": [-1.0, value]}, "finish_reason": "length"}
        return 200, {"choices": [{**choice, "prompt_token_ids": body["prompt"]}] * body["n"]}

    fake.faults = {"/v1/completions": [broken]}
    rows, prompts = [{"where": "data row 1", "images": [], "videos": []}], [{"prompt_ids": torch.tensor([3, 4])}]
    _, logprobs, _ = sampler.sample(rows, prompts, 2, 1.0, torch.Generator().manual_seed(0))
    assert all(x[0] == -1 and not x[1].isfinite() for x in logprobs)


@pytest.mark.parametrize("choice", [{}, {"token_ids": [3], "logprobs": None}, {"token_ids": 5, "logprobs": {}}])
def test_an_answer_of_another_form_is_an_engine_error(choice, sampler, fake):
    fake.faults = {"/v1/completions": [lambda server, body: (200, {"choices": [choice] * body["n"]})]}
    rows, prompts = [{"where": "data row 1", "images": [], "videos": []}], [{"prompt_ids": torch.tensor([3, 4])}]
    with pytest.raises(ppo_vl.EngineError, match="another form"):
        sampler.sample(rows, prompts, 2, 1.0, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("path", ["/weight_info", "/v1/completions"])
@pytest.mark.parametrize("how", [restart, restart_with_an_error])
def test_a_restarted_server_is_given_the_weights_again(path, how, sampler, fake):
    fake.faults = {path: [lambda *args: None] * (1 if path == "/weight_info" else 20) + [how]}
    assert {ids[0] for ids in sample(sampler)} == {10}
    assert fake.asked.count("/collective_rpc") == 1


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/reset_encoder_cache", "/update_weight_version"])
def test_a_restart_in_the_midst_of_a_sync_begins_it_anew(path, sampler, fake, tmp_path):
    fake.faults = {path: [restart_with_an_error]}
    sampler.sync(1, tmp_path)
    assert fake.asked.count("/collective_rpc") == 2
    assert {ids[0] for ids in sample(sampler)} == {11}


def test_passing_errors_are_retried(sampler, fake):
    fake.faults = {"/v1/completions": [lambda *args: (500, {})] * 3, "/weight_info": [lambda *args: (502, {})]}
    assert {ids[0] for ids in sample(sampler)} == {10}


def test_lasting_errors_stop(sampler, fake):
    sampler.args = replace(sampler.args, vllm_timeout=0.3)
    fake.faults = {"/v1/completions": [lambda *args: (500, {"error": "boom"})] * 1000}
    with pytest.raises(ppo_vl.EngineError, match="no answer within --vllm-timeout 0.3 s .*500.*boom"):
        sample(sampler)


def test_a_sync_in_vain_stops_at_the_next_prompts(sampler, fake, tmp_path):
    sampler.args = replace(sampler.args, vllm_timeout=0.3)
    fake.faults = {"/collective_rpc": [lambda *args: (500, {})] * 1000}
    sampler.sync(1, tmp_path)
    with pytest.raises(ppo_vl.EngineError, match="--vllm-timeout"):
        sample(sampler)
    fake.faults.clear()  # and it is well again
    assert {ids[0] for ids in sample(sampler)} == {11}


def test_refused_requests_are_named(sampler, fake):
    fake.faults = {"/v1/completions": [lambda *args: (400, {"error": "prompt is too long"})]}
    with pytest.raises(ppo_vl.EngineError, match="/v1/completions refused a request .400.*prompt is too long"):
        sample(sampler)


def test_another_version_is_an_error(sampler, fake):
    fake.faults = {"/weight_info": [lambda *args: (200, {"weight_version": "7-abc"})] * 2}
    with pytest.raises(ppo_vl.EngineError, match="has weights of version 7-abc, not 0"):
        sample(sampler)


def changed(**changes):
    """An answer with one response, in which this is different."""

    def fault(server, body):
        choice = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
        return 200, {"choices": [{**choice, "prompt_token_ids": body["prompt"], **changes}] * changes.get("n", 2)}

    return fault


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"n": 1}, "data row 1: the vLLM server gave 1 responses instead of 2"),
        ({"finish_reason": "abort"}, "data row 1: the vLLM server gave no whole response .abort"),
        ({"token_ids": [1, 2]}, "data row 1: the vLLM server gave no whole response"),
    ],
)
def test_incomplete_answers_are_named(changes, words, sampler, fake):
    fake.faults = {"/v1/completions": [changed(**changes)]}
    with pytest.raises(ppo_vl.EngineError, match=words):
        sample(sampler, count=1)


def test_other_prompt_tokens_and_videos_are_refused(sampler, fake, capsys):
    fake.faults = {"/v1/completions": [changed(prompt_token_ids=[3, 4])]}
    with pytest.raises(SystemExit):
        sample(sampler, count=1)
    assert "data row 1: the vLLM server reads other prompt tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sampler.sample([{"where": "data row 9", "videos": ["a.mp4"]}], [{}], 1, 1.0, torch.Generator())
    assert "data row 9" in capsys.readouterr().err
