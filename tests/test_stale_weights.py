"""Answers that were made with the weights of another step are refused, and servers ignore generation_config.json.
Fakes replace vLLM here; tests/test_vllm.py and tests/test_recipes.py have tests with the real one."""

import contextlib
import copy
import functools
import runpy
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT

import rloo
from common.packing import Prompt
from examples import check_sync

# Of Qwen2.5-VL and of others. `vllm serve` takes from it what a request leaves out or sends as null.
GENERATION_CONFIG = {"repetition_penalty": 1.05, "temperature": 1e-6, "top_k": 1, "top_p": 0.001}
GENERATION_CONFIG |= {"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.5}


def respond(llm: SimpleNamespace, path: str, body: dict) -> tuple[int, dict]:
    """The endpoints of `vllm serve` that examples/vllm_server.py calls. Responses are one EOS token."""
    if path == "/update_weight_version":
        llm.version = body["new_version"]
    if path != "/v1/chat/completions":
        info = {"/v1/models": {"data": [{"id": "model"}]}, "/weight_info": {"weight_version": llm.version}}
        return 200, info.get(path)
    request = {name: value for name, value in body.items() if value is not None}
    llm.sampled_with.append(GENERATION_CONFIG | request)
    choice = {"token_ids": [3], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
    return 200, {"prompt_token_ids": [1, 2], "choices": [choice] * request["n"]}


@pytest.fixture
def setup(serve, monkeypatch, tmp_path):
    """The sampler of examples/vllm_server.py, and the (fake) vLLM from which it samples."""
    rloo.init_distributed()
    llm, model = SimpleNamespace(version="default", sampled_with=[]), torch.nn.Linear(2, 2)
    model.config = transformers.Qwen2Config()
    monkeypatch.setenv("VLLM_URLS", serve(functools.partial(respond, llm), "HTTP/1.1"))
    servers = runpy.run_path(str(ROOT / "examples/vllm_server.py"))["Servers"]
    return servers(SimpleNamespace(max_response_length=8), model, [3], tmp_path / "run"), llm


def test_stale_weights_are_refused(setup, refused):
    sampler, llm = setup
    for step in (0, 1):
        sampler.update_weights(step)
        assert sampler.generate([], 2, 1.0) == []
    label = llm.version
    for version in ("default", label.replace("1", "0")):  # a restarted vLLM, and one that missed an update
        llm.version = version
        with refused("has the weights of", version, label):
            sampler.generate([], 2, 1.0)
    llm.version = label
    assert sampler.generate([], 2, 1.0) == []
    sampler.sleep()  # the step's update follows
    with refused():
        sampler.generate([], 2, 1.0)


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


class Copy(rloo.HFSampler):
    """A copy of the policy, in which the weights with `stale` in their names stay as they were."""

    stale = "none"

    def __init__(self, args, model, *more):
        super().__init__(args, model, *more)
        self.model = copy.deepcopy(model)

    def update_weights(self, step):
        old = {name: x.clone() for name, x in self.model.state_dict().items() if self.stale in name}
        super().update_weights(step)
        self.model.load_state_dict(old, strict=False)


@pytest.mark.parametrize(
    "stale, failed",
    [("none", []), ("visual", ["visual", "language_model"]), ("layers", ["language_model"])],
)
def test_check_sync_notices_stale_parts(stale, failed, vqa, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(rloo.SAMPLERS, "hf", Copy)
    monkeypatch.setattr(Copy, "stale", stale)
    flags = {"dataset": vqa, "eval_dataset": None, "output_dir": str(tmp_path), "prompts_per_rollout": 4}
    with pytest.raises(SystemExit) if failed else contextlib.nullcontext():
        check_sync.main(rloo.Args(**flags))
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split(":")[0] for line in lines] == [
        "FAIL" if any(x in line for x in failed) else "pass" for line in lines
    ]
