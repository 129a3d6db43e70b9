"""The last part: a job of its own loses a rank, and goes on from its checkpoint.

Each rank of the pilot starts its rank of the job as a process, so that the pilot outlives what is killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import typing

import torch.distributed as dist

from uniep.pilot.job import Job

LIMIT_S = 300.0  # of a whole job; what still runs then is ended, and the report says so


class Ended(typing.NamedTuple):
    """How one rank's process ended."""

    rank: int
    status: int | None  # negative: the signal; None: it was still there at the limit
    report: dict[str, typing.Any]  # what it left


@dataclasses.dataclass
class Outcome:
    """What the report says of this part."""

    killed_rank: int
    killed_in_step: int
    checkpoint_of_step: int
    noticed: list[dict[str, typing.Any]]  # rank, seconds, kind and words
    silent: list[int]  # ranks that noticed nothing within LIMIT_S
    steps: int
    resumed: bool
    same_bits: bool
    bits: str
    words: str  # why it did not resume, else ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _start(job: Job, name: str) -> list[Ended]:
    """Runs a job on all ranks, and tells how each ended. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shared: list[typing.Any] = [_free_port() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = pathlib.Path(job.folder)
    file = folder / f"{name}{rank}.json"
    file.write_text(json.dumps(dataclasses.asdict(job)))
    ended, died = folder / f"ended{rank}.json", folder / f"died{rank}.json"
    for left in (ended, died):
        left.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    environment |= {"MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": str(shared[0])}
    dist.barrier()
    process = subprocess.Popen(
        [sys.executable, "-m", "uniep.pilot.job", str(file)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if "UNIEP_PILOT_VERBOSE" not in os.environ else None,
    )
    try:
        status: int | None = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    report: dict[str, typing.Any] = {"ended_at": time.time()}
    for left in (ended, died):
        if left.exists():
            report |= json.loads(left.read_text())
    own = Ended(rank, status, report)
    found: list[typing.Any] = [None] * ranks
    dist.all_gather_object(found, own)
    return [Ended(*one) for one in found]


def kill_and_resume(job: Job, steps: int, losses: list[float], digest: str) -> Outcome:
    """Kills the last rank behind the checkpoint of half the steps, and resumes. Collective.

    Args:
        job: model, text, seed and folder.
        steps, losses, digest: of the run that nothing interrupted.
    """
    ranks = dist.get_world_size()
    half = steps // 2
    killed, step = ranks - 1, half + 1
    first = dataclasses.replace(job, end=steps, save_at=half, kill_rank=killed, kill_step=step)
    ended = _start(first, "killed")
    died_at = ended[killed].report.get("died_at")
    if died_at is None:
        words = "; ".join(f"rank {one.rank}: {one.report.get('words', one.status)}" for one in ended)
        return Outcome(
            killed, step + 1, half, [], [], steps, False, False, "", f"the job ended before the kill: {words}"
        )
    noticed = [
        {
            "rank": one.rank,
            "seconds": one.report["noticed_at"] - died_at,
            "kind": one.report["kind"],
            "words": one.report["words"],
        }
        for one in ended
        if "noticed_at" in one.report
    ]
    silent = [one.rank for one in ended if one.rank != killed and "noticed_at" not in one.report]
    again = _start(dataclasses.replace(job, end=steps, begin=half), "resumed")
    reports = [one.report for one in again]
    resumed = all("digest" in report for report in reports)
    if not resumed:
        words = "; ".join(f"rank {one.rank}: {one.report.get('words', one.status)}" for one in again)
        return Outcome(killed, step + 1, half, noticed, silent, steps, False, False, "", words)
    same = all(report["digest"] == digest and report["losses"] == losses[half:] for report in reports)
    bits = ", ".join(dict.fromkeys([digest[:12], reports[0]["digest"][:12]]))
    return Outcome(killed, step + 1, half, noticed, silent, steps, True, same, bits, "")
