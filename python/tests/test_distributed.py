"""1, 2 and 4 processes over gloo: one start a size, which runs all of distributed_checks.py."""

import pytest

from ranks import HERE, run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes(ranks):
    assert f"checks passed on {ranks} ranks" in run_ranks(ranks, HERE / "distributed_checks.py")


def test_checks_for_gpus():
    count = sum(
        (HERE / f"gpu_checks{end}.py").read_text().count("\ndef check_") for end in ("", "_beside_nccl", "_tuner")
    )
    assert count > 20
    assert f"{count} of {count} checks passed" in run_ranks(2, HERE / "gpu_checks.py", "--cpu")
