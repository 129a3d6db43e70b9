"""1, 2 and 4 processes over gloo, all of verifier_checks.py in each."""

import pathlib

import pytest

from test_distributed import torchrun

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_wrong_rank_is_found(ranks):
    assert f"checks passed on {ranks} ranks" in torchrun(ranks, HERE / "verifier_checks.py")
