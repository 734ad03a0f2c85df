"""The workaround for torchvision, and old versions."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import common
from common import attention

import torchvision  # isort: skip  # noqa: F401  after common, which makes it importable


def test_operators_are_defined_for_pypi_torchvision_beside_a_cpu_torch(monkeypatch):
    monkeypatch.setattr(torch.library, "define", defined := Mock())
    cases = {("2.13.0+cpu", "0.28.0+cpu"): 0, ("2.13.0", "0.28.0"): 0, ("2.13.0+cpu", "0.28.0"): 2}
    for versions, count in cases.items():
        monkeypatch.setattr(common, "version", dict(zip(("torch", "torchvision"), versions)).get)
        common._define_torchvision_operators()
        assert defined.call_count == count


@pytest.mark.parametrize("name", common.OLDEST_VERSIONS)
def test_a_library_that_is_too_old_is_refused_in_one_sentence(name, monkeypatch, refused):
    oldest = {name: version for name, (version, _) in common.OLDEST_VERSIONS.items()}
    monkeypatch.setattr(common.platform, "python_version", lambda: oldest["Python"])
    monkeypatch.setattr(common, "version", oldest.get)
    common._check_versions()
    oldest["torch"] += ".0a0+nv25.5"  # NVIDIA's containers
    common._check_versions()
    required, reason = common.OLDEST_VERSIONS[name]
    *first, last = map(int, required.split("."))
    oldest[name] = ".".join(map(str, [*first, last - 1, 99]))  # 2.8 -> 2.7.99
    with refused(f"error: {name} {oldest[name]} is too old, {required} or newer is required: {reason}"):
        common._check_versions()


def test_varlen_attention_needs_torch_2_12(monkeypatch):
    """torch 2.8 and 2.9 have no such module, the next versions another signature."""
    kernels = None, lambda query, key, value: None, lambda query, key, value, enable_gqa: None
    for kernel, is_used in zip(kernels, (False, False, True)):
        module = SimpleNamespace(varlen_attn=kernel) if kernel else None
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert (attention.varlen_kernel.__wrapped__() is not None) == is_used
