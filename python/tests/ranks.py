"""Starts a program with a process a rank, as torchrun does, without the seconds that torchrun itself takes."""

import contextlib
import datetime
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent


def run_ranks(ranks: int, script: pathlib.Path, *arguments: str, timeout: int = 280) -> str:
    """Runs a script on so many ranks and gives what they printed; where one fails, the others are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(minutes=5))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store lives here, as torchrun's does in torchrun
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes says where
    }
    if ranks > 1:
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    line = [sys.executable, str(HERE / "fork_ranks.py"), str(ranks), str(script), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        launcher = subprocess.Popen(
            line, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **shared}, start_new_session=True
        )
        try:
            state = launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            state = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the ranks, and what they started
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        output.seek(0)
        text = output.read()
    assert state is not None, f"not over after {timeout} s: {text[-8000:]}"
    assert state == 0, text[-8000:]
    return text
