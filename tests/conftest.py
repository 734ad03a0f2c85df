"""Shared by the tests: the tiny model, small data, runs of a script in this process or under torchrun."""

import contextlib
import functools
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need the network
os.environ["WANDB_MODE"] = "offline"

import pytest
import torch
import torch.distributed as dist
import tyro
from safetensors.torch import load_file

from common import packing  # before transformers

from transformers.utils import logging  # isort: skip

logging.get_logger()  # its handler keeps the stderr of this moment, not that of the first test that captures it

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "assets/tiny_vl")  # folder of the tiny VLM
SCRIPTS = ("rloo", "ppo_vl", "reward_bt", "grm_sft")


def slow(*values) -> list:
    """Values of a parameter whose tests are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="session", autouse=True)
def lasting_process_group():
    """DeepSpeed caches its groups, so runs in one process share the process group: it ends with the session."""
    destroy = dist.destroy_process_group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    yield
    destroy()


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    """Runs in this process replace the handlers of SIGTERM and SIGINT."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def pytest_terminal_summary(terminalreporter):
    """Print what test_gpu.py measured as a table for docs/benchmarks.md."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    rows = [row for report in reports for name, row in report.user_properties if name == "row"]
    if rows:
        terminalreporter.write_line("\n".join(["", "| | |", "|---|---|", *rows]))


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(folder: Path) -> list[dict]:
    """The metrics of each step in metrics.jsonl, with its evaluation. NaN and infinity are not valid JSON."""
    by_step = {}
    for metrics in read_jsonl(folder / "metrics.jsonl"):
        assert all(math.isfinite(value) for value in metrics.values())
        known = by_step.setdefault(metrics["train/step"], {})
        assert known.keys() & metrics.keys() <= {"train/step"}, "a metric is logged twice"
        known.update(metrics)
    return list(by_step.values())


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*contents) -> list[dict]:
    """Messages that alternate between user and assistant."""
    return [{"role": role, "content": x} for role, x in zip(["user", "assistant"] * 9, contents)]


@pytest.fixture(scope="session")
def vqa_rows() -> list[dict]:
    """40 questions of easy-VQA's test split, about 40 images; with columns for each script."""
    import easy_vqa

    questions, answers, image_ids = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    rows = [(questions[i], str(paths[image_ids[i]]), answers[i]) for i in range(0, 4000, 100)]
    columns = "prompt image answer chosen rejected answer_1 answer_2 verdict".split()
    return [dict(zip(columns, (*row, row[2], "purple", row[2], "purple", "1"))) for row in rows]


@pytest.fixture(scope="session")
def vqa(vqa_rows, tmp_path_factory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("vqa") / "vqa.jsonl", vqa_rows)


@pytest.fixture(scope="session")
def any_score(tmp_path_factory) -> dict:
    """Flags for a reward that varies between responses, whatever their text."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    code = "def score(completion_ids, **columns):\n    return [sum(i) % 7 / 7 for i in completion_ids]\n"
    path.write_text(code)
    return {"rewards": (f"{path}:score",), "reward_weights": (1.0,)}


@pytest.fixture(scope="session")
def any_reward(any_score) -> dict:
    """Flags for the built-in rewards and that one."""
    return {"rewards": ("accuracy", "format", *any_score["rewards"]), "reward_weights": (0.9, 0.1, 1)}


SHORT = {"total_steps": 2, "prompts_per_rollout": 4, "num_samples_per_prompt": 4, "train_batch_size": 8}
SHORT |= {"max_prompt_length": 512, "max_response_length": 8, "micro_batch_tokens": 2048, "eval_steps": 0}
SHORT |= {"eval_prompts": 8, "eval_rows": 8, "eval_num_samples": 2, "seed": 3, "run_name": "run"}


def continuations(groups: list, prompts: list, ids: list) -> list:
    """The model inputs of responses (R,), which groups assign to prompts in order."""
    pairs = [(prompts[i], ids[b]) for i, own in groups for b in own]
    return [packing.continue_prompt(*pair) for pair in pairs]


def to_argv(flags: dict) -> list[str]:
    """{"zero_stage": 2, "kl_loss": True, "resume": None} -> ["--zero-stage", "2", "--kl-loss"]"""
    argv = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            argv += [flag, *map(str, value)]
        elif value is not None:
            argv += [flag, str(value)]
    return argv


def filled_args(script: str, **flags):
    """Args of a script with the defaults that depend on the model."""
    module = importlib.import_module(script)
    args = module.Args(**flags)
    module.fill_defaults(args)
    return args


@pytest.fixture
def argv(tmp_path, vqa):
    """Function from keywords to the command line of a short run in tmp_path/runs/run."""

    def build(script: str, **flags) -> list[str]:
        base = {"model": TINY, "dataset": vqa, "eval_dataset": vqa, "eval_datasets": (f"x={vqa}",)}
        base |= {"output_dir": tmp_path / "runs", **SHORT}
        known = importlib.import_module(script).Args.__dataclass_fields__
        return to_argv({**{name: value for name, value in base.items() if name in known}, **flags})

    return build


@pytest.fixture
def refused(capsys):
    """Context manager: the code in it ends with exit code 2 and an error with these words."""

    @contextlib.contextmanager
    def expect(*words: str):
        with pytest.raises(SystemExit) as stopped:
            yield
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and all(word in error for word in words), error

    return expect


@pytest.fixture
def spy(monkeypatch):
    """Function that records (arguments, keywords, result) of each call of a module's function."""

    def start(module, name: str) -> list[tuple]:
        calls, original = [], getattr(module, name)

        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            calls.append((args, kwargs, result))
            return result

        monkeypatch.setattr(module, name, call)
        return calls

    return start


@pytest.fixture
def check_once(monkeypatch):
    """The check at startup is a third of a short run, so a model in fp32 is checked in its first run only."""
    from common import packing, packing_check

    choose_layout = packing_check.choose_layout

    def choose(network, **keywords) -> str:
        model = getattr(network, "module", network).model
        key = (type(model), model.name_or_path, *keywords["prompts"][0].media_keys)
        if key in CHECKED and model.dtype.itemsize == 4:
            packing.copy_layout(CHECKED[key][0], model)
            return CHECKED[key][1]
        message = choose_layout(network, **keywords)
        CHECKED[key] = (model, message)
        return message

    monkeypatch.setattr(packing_check, "choose_layout", choose)


CHECKED = {}  # by class, folder and media: a model with its layout, and the message of the check


@pytest.fixture
def run(argv, tmp_path, check_once):
    """Function that runs a script in this process and returns the run directory."""

    def go(script: str, **flags) -> Path:
        module = importlib.import_module(script)
        args = tyro.cli(module.Args, args=argv(script, **flags))
        module.main(args)
        return Path(args.output_dir) / args.run_name

    return go


@pytest.fixture
def start(argv, tmp_path):
    """Function that starts a script as a subprocess, under torchrun if ranks > 1, with output in tmp_path/log."""

    def go(script: str, ranks: int = 1, env: dict | None = None, **flags) -> subprocess.Popen:
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}"
        launcher = torchrun.split() if ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / f"{script}.py"), *argv(script, **flags)]
        log = (tmp_path / "log").open("a")
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | (env or {}))

    return go


@pytest.fixture
def finish(start, tmp_path):
    """The same, but wait for the process, which must succeed; returns its output."""

    def go(script: str, ranks: int = 1, **how) -> str:
        code, output = start(script, ranks, **how).wait(timeout=500), (tmp_path / "log").read_text()
        assert code == 0, output[-3000:]
        return output

    return go


@pytest.fixture
def serve():
    """Function that starts an HTTP server, which answers with respond(path, body): status and JSON.

    With HTTP/1.1, it closes a connection when a second request arrives on it."""
    servers = []

    def start(respond, protocol: str = "HTTP/1.0") -> str:
        class Handler(BaseHTTPRequestHandler):  # one per connection
            protocol_version = protocol
            num_requests = 0

            def do_POST(self):
                self.num_requests += 1
                if self.num_requests > 1:
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, reply = respond(self.path, json.loads(body or "{}"))
                self.send_response(status)
                reply = json.dumps(reply).encode()
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST
            log_message = lambda *arguments: None  # noqa: E731

        servers.append(server := ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def weights_of(checkpoint: Path) -> dict:
    return {k: v for path in checkpoint.glob("*.safetensors") for k, v in load_file(path).items()}


def largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def assert_same_run(one: Path, other: Path, tolerance: float, of_weights: float) -> None:
    """Compare all metrics except times, and the weights of the last checkpoint."""
    worst = metrics_differ(metrics_of(one), metrics_of(other))
    assert {name: x for name, x in worst.items() if x > tolerance} == {}
    last = f"checkpoint-{metrics_of(one)[-1]['train/step']:.0f}"
    assert (one / last).is_dir()
    assert largest_difference(weights_of(one / last), weights_of(other / last)) <= of_weights


def metrics_differ(a: list[dict], b: list[dict]) -> dict[str, float]:
    """Largest relative difference of each metric over the steps of two runs, without times."""
    assert [x["train/step"] for x in a] == [x["train/step"] for x in b] and a[-1].keys() == b[-1].keys()
    worst = {}
    for x, y in zip(a, b):
        for name in x.keys() - {name for name in x if name.startswith("time/")}:
            worst[name] = max(worst.get(name, 0.0), abs(x[name] - y[name]) / max(1.0, abs(x[name])))
    return worst


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Function from a family of test_families.py to a folder with its model and rows.jsonl."""
    from test_families import save_family

    @functools.cache
    def make(family: str) -> Path:
        save_family(family, folder := tmp_path_factory.mktemp("family"))
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory) -> str:
    """Directory of a random text-only Qwen2 with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    turns = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template = turns + "assistant: "
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = Qwen2Config(**sizes, eos_token_id=tokenizer.eos_token_id)
    folder = tmp_path_factory.mktemp("text_model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
