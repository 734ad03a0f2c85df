"""Answers that were made with the weights of another step are refused, in process and over HTTP, and servers sample from
the whole distribution whatever the model's generation_config.json says. Fakes replace vLLM here; tests/test_vllm.py and
tests/test_recipes.py have tests with the real one."""

import json
import runpy
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT

import rloo
from common.packing import Prompt

# Of Qwen2.5-VL and of others. `vllm serve` takes from it what a request leaves out or sends as null.
GENERATION_CONFIG = {"repetition_penalty": 1.05, "temperature": 1e-6, "top_k": 1, "top_p": 0.001}
GENERATION_CONFIG |= {"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.5}


class LLM:
    """What VLLMSampler calls of vllm.LLM."""

    version = "default"

    def __init__(self):
        self.collective_rpc = self.reset_prefix_cache = self.reset_mm_cache = lambda *_, **__: None
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)
        self.generate = lambda *_, **__: []
        self.sampled_with = []  # the settings of each request to a server

    def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    def get_weight_version(self) -> str:
        return self.version


class Handler(BaseHTTPRequestHandler):
    """The endpoints of `vllm serve` that examples/vllm_server.py calls. Responses are one EOS token."""

    def do_GET(self) -> None:
        version = {"weight_version": self.server.llm.version}
        self.reply({"/v1/models": {"data": [{"id": "model"}]}, "/weight_info": version}[self.path])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/update_weight_version":
            self.server.llm.update_weight_version(**json.loads(body))
        if self.path != "/v1/chat/completions":
            return self.reply(None)
        request = {name: value for name, value in json.loads(body).items() if value is not None}
        self.server.llm.sampled_with.append(GENERATION_CONFIG | request)
        choice = {"token_ids": [3], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
        self.reply({"prompt_token_ids": [1, 2], "choices": [choice] * request["n"]})

    def reply(self, content) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode() if content else b"")

    def log_message(self, *inputs) -> None:
        pass


@pytest.fixture(params=["in process", "server"])
def setup(request, monkeypatch, tmp_path):
    """A sampler, and the (fake) vLLM from which it samples."""
    rloo.init_distributed()
    llm, model = LLM(), torch.nn.Linear(2, 2)
    model.config = transformers.Qwen2Config()
    if request.param == "in process":
        sampler = object.__new__(rloo.VLLMSampler)
        sampler.llm, sampler.policy, sampler.on_cuda = llm, model, False
        yield sampler, llm
        return
    with HTTPServer(("localhost", 0), Handler) as server:
        server.llm = llm
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("VLLM_URLS", f"http://localhost:{server.server_port}")
        servers = runpy.run_path(str(ROOT / "examples/vllm_server.py"))["Servers"]
        args = SimpleNamespace(max_response_length=8)
        yield servers(args, model, [3], tmp_path / "run"), llm
        server.shutdown()


def test_stale_weights_are_refused(setup, capsys):
    sampler, llm = setup
    for step in (0, 1):
        sampler.update_weights(step)
        assert sampler.generate([], 2, 1.0) == []
    label = llm.version
    for version in ("default", label.replace("1", "0")):  # a restarted vLLM, and one that missed an update
        llm.version = version
        with pytest.raises(SystemExit) as stop:
            sampler.generate([], 2, 1.0)
        assert stop.value.code == 2 and "has the weights of" in (error := capsys.readouterr().err)
        assert version in error and label in error
    llm.version = label
    assert sampler.generate([], 2, 1.0) == []
    sampler.sleep()  # the step's update follows
    with pytest.raises(SystemExit):
        sampler.generate([], 2, 1.0)


@pytest.mark.parametrize("setup", ["server"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_servers_ignore_the_generation_config_of_the_model(setup, temperature):
    sampler, llm = setup
    ids = {"input_ids": torch.tensor([[1, 2]])}
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    prompt = Prompt(0, 2, (), ids, {}, torch.arange(2), {}, messages=messages, seed=5)
    sampler.update_weights(0)
    responses = sampler.generate([prompt], 2, temperature)
    assert [response.token_ids.tolist() for response in responses] == [[3], [3]]
    [settings] = llm.sampled_with
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "top_k": 0}
    neutral |= {"min_p": 0, "temperature": temperature}
    assert {name: settings[name] for name in GENERATION_CONFIG} == neutral
