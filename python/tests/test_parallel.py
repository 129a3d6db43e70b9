"""Data parallelism around expert parallelism: one start a size, which runs all of parallel_checks.py."""

import pytest

from ranks import HERE, run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_parallel(ranks):
    assert f"checks passed on {ranks} ranks" in run_ranks(ranks, HERE / "parallel_checks.py")
