"""Starts a program with a process a rank, as torchrun does, without the seconds that torchrun itself takes."""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import time

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
    line = [sys.executable, str(HERE / "run_and_leave.py"), str(script), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                line,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        end = time.monotonic() + timeout
        try:
            states = [process.poll() for process in processes]
            while None in states and not any(states) and time.monotonic() < end:
                time.sleep(0.02)
                states = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    assert not any(states), f"ended with {states}: {text[-8000:]}"
    assert None not in states, f"not over after {timeout} s: {text[-8000:]}"
    return text
