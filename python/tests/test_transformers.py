"""experts_implementation="uniep" in a released Transformers, on a CPU: one start a size."""

import importlib.util
import pathlib

import pytest

from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_models(ranks):
    script = pathlib.Path(__file__).resolve().parent / "transformers_checks.py"
    assert f"checks passed on {ranks} ranks" in run_ranks(ranks, script)
