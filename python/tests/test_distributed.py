"""1, 2 and 4 processes over gloo: one torchrun a size, which runs all of distributed_checks.py."""

import pathlib
import socket
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


def torchrun(ranks: int, script: pathlib.Path, *arguments: str, timeout: int = 280) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    done = subprocess.run(
        [*line, str(HERE / "run_and_leave.py"), str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes(ranks):
    assert f"checks passed on {ranks} ranks" in torchrun(ranks, HERE / "distributed_checks.py")


def test_checks_for_gpus():
    assert "22 of 22 checks passed" in torchrun(2, HERE / "gpu_checks.py", "--cpu")
