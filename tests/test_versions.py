"""Libraries that are too old are refused; rows and code that fail are told apart."""

import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, SCRIPTS, write_jsonl
from packaging.version import Version

import common
from common import attention, packing


def older(oldest: str) -> str:
    """2.8 -> 2.7.99, 5.16.1 -> 5.16.0.99"""
    *first, last = map(int, oldest.split("."))
    return ".".join(map(str, [*first, last - 1, 99]))


def pretend_installed(versions: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(common.platform, "python_version", lambda: versions.get("Python", "99"))
    monkeypatch.setattr(common, "version", lambda name: versions.get(name, "99"))


@pytest.mark.parametrize("name", common.OLDEST_VERSIONS)
def test_a_library_that_is_too_old_is_refused_in_one_sentence(name, monkeypatch, refused):
    oldest, reason = common.OLDEST_VERSIONS[name]
    pretend_installed({name: older(oldest)}, monkeypatch)
    with refused(f"error: {name} {older(oldest)} is too old, {oldest} or newer is required: {reason}"):
        common._check_versions()


def test_the_oldest_versions_and_builds_of_them_are_accepted(monkeypatch):
    oldest = {name: version for name, (version, _) in common.OLDEST_VERSIONS.items()}
    pretend_installed(oldest, monkeypatch)
    common._check_versions()
    pretend_installed(oldest | {"torch": f"{oldest['torch']}.0a0+nv25.5"}, monkeypatch)  # NVIDIA's containers
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


@pytest.mark.parametrize(
    ("varlen", "has_kernel"),
    [
        (None, False),  # torch 2.8 and 2.9: no such module
        (SimpleNamespace(varlen_attn=lambda query, key, value: None), False),
        (SimpleNamespace(varlen_attn=lambda query, key, value, enable_gqa: None), True),
    ],
)
def test_varlen_attention_needs_torch_2_12(varlen, has_kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    assert (attention.varlen_kernel() is not None) == has_kernel


@pytest.mark.parametrize("script", SCRIPTS)
def test_errors_of_code_are_not_errors_of_data(script, run, monkeypatch, capsys):
    """transformers 5.2: KeyError 'cache_position' in every row was reported as bad data."""

    def make_prompt(*args, **kwargs):
        raise KeyError("cache_position")

    monkeypatch.setattr(packing, "make_prompt", make_prompt)
    with pytest.raises(KeyError, match="cache_position"):
        run(script, dataset="easy-vqa", eval_dataset=None)
    assert "skipped" not in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dataset_without_a_usable_row_ends_the_run(script, run, tmp_path, refused):
    row = {"image": "missing.png", "prompt": "Why?", "answer": "a", "chosen": "a", "rejected": "b"}
    row |= {"answer_1": "a", "answer_2": "b", "verdict": "1"} if script == "grm_sft" else {}
    dataset = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"image": "other.png"}])
    with refused("row 0 is skipped", "missing.png", "\nerror: ", "none of 2 rows can be used"):
        run(script, dataset=dataset, eval_dataset=None)
