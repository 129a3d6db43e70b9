"""The plugin beside a released Megatron-core, on a CPU: one torchrun a size."""

import importlib.util
import pathlib

import pytest

from test_distributed import torchrun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_megatron(ranks):
    script = pathlib.Path(__file__).resolve().parent / "megatron_checks.py"
    assert f"checks passed on {ranks} ranks" in torchrun(ranks, script)
