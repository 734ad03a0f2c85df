"""The workaround for torchvision, and old versions."""

import importlib
import importlib.metadata
import platform
from unittest.mock import Mock

import pytest
import torch

import common

import torchvision  # isort: skip  # noqa: F401  after common, which makes it importable


@pytest.fixture
def reload(monkeypatch):
    """Import common again with other versions of libraries."""

    def go(versions: dict) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name, "99"))
        monkeypatch.setattr(platform, "python_version", lambda: versions.get("Python", "99"))
        importlib.reload(common)

    return go


def test_operators_are_defined_for_pypi_torchvision_beside_a_cpu_torch(reload, monkeypatch):
    monkeypatch.setattr(torch.library, "define", defined := Mock())
    cases = {("2.13.0+cpu", "0.28.0+cpu"): 0, ("2.13.0", "0.28.0"): 0, ("2.13.0+cpu", "0.28.0"): 2}
    for versions, count in cases.items():
        reload(dict(zip(("torch", "torchvision"), versions)))
        assert defined.call_count == count


@pytest.mark.parametrize("name", common.OLDEST_VERSIONS)
def test_a_library_that_is_too_old_is_refused_in_one_sentence(name, reload, refused):
    oldest = {name: version for name, (version, _) in common.OLDEST_VERSIONS.items()}
    reload(oldest)
    oldest["torch"] += ".0a0+nv25.5"  # NVIDIA's containers
    reload(oldest)
    required, reason = common.OLDEST_VERSIONS[name]
    *first, last = map(int, required.split("."))
    oldest[name] = ".".join(map(str, [*first, last - 1, 99]))  # 2.8 -> 2.7.99
    with refused(f"error: {name} {oldest[name]} is too old, {required} or newer is required: {reason}"):
        reload(oldest)
