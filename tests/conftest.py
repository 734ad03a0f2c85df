"""Shared by the tests: the tiny model, a small easy-VQA file, and runs of a script inside the test process."""

import importlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tiny model is faster on one thread, and two ranks share two cores
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need the network
os.environ["WANDB_MODE"] = "offline"

import pytest

import common  # noqa: F401  before transformers

from transformers.utils import logging  # isort: skip

logging.get_logger()  # its handler keeps the stderr of this moment, not that of the first test that captures it

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "assets/tiny_vl")
SCRIPTS = [name for name in ("ppo_vl", "rloo", "reward_bt", "grm_sft") if (ROOT / f"{name}.py").is_file()]


def pytest_collection_modifyitems(items):
    """Two processes take whole files. Those with the most slow tests first, so that none is left alone with them at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def lasting_process_group():
    """DeepSpeed caches its groups, so runs in one process share the process group: it is destroyed once, at the end."""
    import torch.distributed as dist

    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *args: None
    yield
    dist.destroy_process_group = destroy
    if dist.is_initialized():
        destroy()


@pytest.fixture(autouse=True)
def own_signal_handlers():
    """A run in this process takes SIGTERM and SIGINT for itself: afterwards they are the test runner's again."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny() -> str:
    """Folder of the tiny VLM."""
    return TINY


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def vqa_rows() -> list[dict]:
    """40 held-out questions of easy-VQA, about 40 pictures."""
    import easy_vqa

    questions, answers, image_ids = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    chosen = range(0, 4000, 100)
    return [{"prompt": questions[i], "image": str(paths[image_ids[i]]), "answer": answers[i]} for i in chosen]


@pytest.fixture(scope="session")
def vqa(vqa_rows, tmp_path_factory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("vqa") / "vqa.jsonl", vqa_rows)


@pytest.fixture(scope="session")
def any_reward(tmp_path_factory) -> dict:
    """Flags: the rules, and a reward that differs from response to response, whatever the model says."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text("def score(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n")
    return {"rewards": ("accuracy", "format", f"{path}:score"), "reward_weights": (0.9, 0.1, 1)}


SHORT = {
    "total_steps": 2,
    "rollout_batch_size": 16,
    "num_samples_per_prompt": 4,
    "train_batch_size": 8,
    "num_ppo_epochs": 2,
    "max_response_length": 8,
    "eval_steps": 0,
    "eval_samples": 8,
    "micro_batch_tokens": 2048,
    "seed": 3,
    "run_name": "run",
}


def to_argv(flags: dict) -> list[str]:
    """{"zero_stage": 2, "kl_loss": True, "resume": None, "rewards": ["a", "b"]} -> ["--zero-stage", "2", "--kl-loss", ...]"""
    argv = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is False:
            argv.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            argv += [flag, *map(str, value)]
        elif value is not None:
            argv += [flag, str(value)]
    return argv


@pytest.fixture
def argv(tmp_path, tiny, vqa):
    """Flags of a short run in tmp_path/runs/run, changed by keywords -> list of command line words.

    script: another one than ppo_vl; what it has no flags for is left out of the base.
    """

    def build(script: str = "ppo_vl", **flags) -> list[str]:
        base = {"model": tiny, "dataset": vqa, "eval_dataset": vqa, "output_dir": tmp_path / "runs", **SHORT}
        known = importlib.import_module(script).Args.__dataclass_fields__
        return to_argv({**{name: value for name, value in base.items() if name in known}, **flags})

    return build


@pytest.fixture
def run(argv, tmp_path, monkeypatch):
    """A short run of ppo_vl (or script) in this process -> its folder. Nothing is drawn: that takes longer than two steps."""

    def go(script: str = "ppo_vl", **flags) -> Path:
        module = importlib.import_module(script)
        for name in ("draw_curves", "draw_samples", "draw_gap"):
            monkeypatch.setattr(module, name, lambda *args: None, raising=False)
        args = module.parse_args(argv(script, **flags))
        module.main(args)
        return tmp_path / "runs" / args.run_name if args.resume is None else Path(args.resume).parent

    return go


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory) -> str:
    """Folder of a random text-only Qwen2 with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, **size)
    folder = tmp_path_factory.mktemp("text_model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def one_process_group(lasting_process_group):
    """A second run in this process finds the group of the first."""
    import torch.distributed as dist

    init = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: dist.is_initialized() or init(*args, **kwargs)
    yield
    dist.init_process_group = init
