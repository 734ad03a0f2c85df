"""Answers that were made with the weights of another step are refused, in process and over HTTP. Fakes replace vLLM
here; tests/test_vllm.py has the same test with the real one."""

import json
import runpy
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import rloo


class LLM:
    """What VLLMSampler calls of vllm.LLM."""

    version = "default"

    def __init__(self):
        self.collective_rpc = self.reset_prefix_cache = self.reset_mm_cache = lambda *_, **__: None
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)
        self.generate = lambda *_, **__: []

    def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    def get_weight_version(self) -> str:
        return self.version


class Handler(BaseHTTPRequestHandler):
    """The endpoints of `vllm serve` that examples/vllm_server.py calls without prompts."""

    def do_GET(self) -> None:
        version = {"weight_version": self.server.llm.version}
        self.reply({"/v1/models": {"data": [{"id": "model"}]}, "/weight_info": version}[self.path])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/update_weight_version":
            self.server.llm.update_weight_version(**json.loads(body))
        self.reply(None)

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
        yield servers(SimpleNamespace(), model, [], tmp_path / "run"), llm
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
