"""Libraries that are too old are refused; differences between the others change nothing (docs/recipes.md, "Versions")."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
import tyro
from conftest import ROOT, SCRIPTS, TINY, write_jsonl
from packaging.version import Version
from PIL import Image

import common
import rloo
from common import attention, packing
from tools import versions

OLD = {"Python": "3.10.13", "torch": "2.7.1+cpu", "transformers": "5.10.3", "deepspeed": "0.16.8"}


def pretend_installed(versions: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(common.platform, "python_version", lambda: versions.get("Python", "99"))
    monkeypatch.setattr(common, "version", lambda name: versions.get(name, "99"))


@pytest.mark.parametrize("name", common.OLDEST_VERSIONS)
def test_a_library_that_is_too_old_is_refused_in_one_sentence(name, monkeypatch, capsys):
    pretend_installed({name: OLD[name]}, monkeypatch)
    with pytest.raises(SystemExit) as exit_info:
        common._check_versions()
    oldest, reason = common.OLDEST_VERSIONS[name]
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name} {OLD[name]} is too old, {oldest} or newer is required: {reason}")
    assert exit_info.value.code == 2 and error.count("\n") == 1


def test_the_oldest_versions_and_builds_of_them_are_accepted(monkeypatch):
    oldest = {name: version for name, (version, _) in common.OLDEST_VERSIONS.items()}
    pretend_installed(oldest, monkeypatch)
    common._check_versions()
    pretend_installed(oldest | {"torch": "2.8.0a0+nv25.5"}, monkeypatch)  # of NVIDIA's containers
    common._check_versions()


def requirements(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {library: Version(version) for library, version in pairs}


def test_the_pins_lie_within_the_tested_range():
    oldest, pins, newest = (requirements(f"requirements{end}.txt") for end in ("-oldest", "", "-newest"))
    assert oldest.keys() == pins.keys() == newest.keys()
    assert all(oldest[name] <= pins[name] <= newest[name] for name in pins)
    for name in ("transformers", "deepspeed"):
        assert oldest[name] == Version(common.OLDEST_VERSIONS[name][0])


class ModelWithBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 2).bfloat16()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1234567]), persistent=False)


@pytest.mark.parametrize("script", SCRIPTS)
def test_deepspeed_does_not_round_buffers(script, monkeypatch):
    """DeepSpeed before 0.19.2 calls module.bfloat16(), which also rounds RoPE's frequencies."""
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_as_before(model, **options):
        return initialize(model=model.bfloat16(), **options)

    monkeypatch.setattr(deepspeed, "initialize", initialize_as_before)
    module = importlib.import_module(script)
    module.init_distributed()
    args = tyro.cli(module.Args, args=[])
    engine = module.init_deepspeed_engine(args, ModelWithBuffer(), torch.bfloat16)
    assert torch.equal(engine.module.frequencies, torch.tensor([1.0, 0.1234567]))


def test_models_without_the_keyword_for_features_get_them_from_their_methods(monkeypatch):
    """transformers before 5.18: forward has no mm_encoder_outputs."""
    model = rloo.load_model(TINY, torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    prompts = {}
    for i, color in enumerate(("red", "blue")):
        image = {"type": "image", "image": Image.new("RGB", (64, 64), color)}
        messages = [{"role": "user", "content": [image, {"type": "text", "text": "Why?"}]}]
        inputs = packing.encode_chat(processor, messages, add_generation_prompt=True)
        prompts[i] = packing.make_prompt(model, inputs, index=i)
    packing.set_attention(model, "packed")
    pack = packing.build_pack([(0, [0]), (1, [1])], prompts, [torch.tensor([5, 6]), torch.tensor([7])])
    with torch.no_grad():
        expected = packing.run_backbone(model, pack)
        names = packing._parameter_names(type(model.base_model), "forward") - {"mm_encoder_outputs"}
        monkeypatch.setattr(packing, "_parameter_names", lambda *args: names)
        hidden = packing.run_backbone(model, pack)
    assert torch.equal(hidden, expected)
    assert "get_image_features" not in vars(model.base_model)  # the class's method is back


class VisionTower(torch.nn.Module):
    def forward(self, hidden, cu_seqlens):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("varlen", "has_kernel"),
    [
        (None, False),  # torch 2.8 and 2.9: no such module
        (SimpleNamespace(varlen_attn=lambda query, key, value: None), False),
        (SimpleNamespace(varlen_attn=lambda query, key, value, enable_gqa: None), True),
    ],
)
def test_varlen_attention_on_a_gpu_needs_torch_2_12(varlen, has_kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    monkeypatch.setattr(attention, "_has_varlen_kernel", attention._has_varlen_kernel.__wrapped__)
    query = SimpleNamespace(shape=(1, 4, 7, 64), dtype=torch.bfloat16, is_cuda=True)
    model = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, modules=lambda: [VisionTower()]
    )
    assert attention._varlen_supports(query) == has_kernel
    assert attention._has_varlen_vision(model) == has_kernel
    query.is_cuda = False  # the CPU's loop over segments needs no kernel
    assert attention._varlen_supports(query)


@pytest.mark.parametrize("script", SCRIPTS)
def test_errors_of_code_are_not_errors_of_data(script, run, monkeypatch, capsys):
    """transformers 5.2: KeyError 'cache_position' in every row was reported as bad data."""

    def make_prompt(*args, **kwargs):
        raise KeyError("cache_position")

    monkeypatch.setattr(packing, "make_prompt", make_prompt)
    with pytest.raises(KeyError, match="cache_position"):
        run(script, dataset="easy-vqa")
    assert "skipped" not in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_error_is_raised_if_no_row_can_be_used(script, run, tmp_path):
    row = {"image": "missing.png", "prompt": "Why?", "answer": "a", "chosen": "a", "rejected": "b"}
    row |= {"answer_0": "a", "answer_1": "b", "verdict": "1"} if script == "grm_sft" else {}
    dataset = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"image": "other.png"}])
    with pytest.raises(FileNotFoundError, match="missing.png"):
        run(script, dataset=dataset)


@pytest.mark.parametrize(
    ("log", "loss", "cell"),
    [
        ("; saved ", 4.0, "same"),
        ("; saved ", 4.002, "equal within 0.2, first loss within 0.0005"),
        ("warning: packing is not supported (why); slow\n; saved ", 4.0, "unpacked: why; same"),
        ("error: torch 2.7.1 is too old (docs/recipes.md)\n", 4.0, "refused: torch 2.7.1 is too old"),
        ("Traceback\nKeyError: 'cache_position'", 4.0, "KeyError: 'cache_position'"),
        ("Killed", 4.0, "failed"),
    ],
)
def test_cells_of_the_table(log, loss, cell, tmp_path):
    for environment, difference in {"pins": 0.0, "other": loss - 4.0}.items():
        for script in versions.FLAGS:
            losses = {1: 4.0 + difference, 2: 4.0 + 400 * difference}
            steps = [{"train/step": i, "loss/sft": losses[i], "time/total": difference} for i in losses]
            run_dir = tmp_path / environment / f"{script}-float32"
            run_dir.mkdir(parents=True)
            run_dir.with_suffix(".log").write_text(log)
            (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    assert versions.summarize(tmp_path / "other", tmp_path / "pins", "float32") == cell
