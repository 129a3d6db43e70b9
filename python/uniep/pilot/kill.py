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
    host: str = ""

    @property
    def has_noticed(self) -> bool:
        """By an error, or ended by what did notice: NCCL's watchdog aborts the process."""
        return "gone_at" in self.report or "error_at" in self.report or self.status not in (None, 0)

    @property
    def ending(self) -> str:
        if self.status is None:
            return f"not over after {LIMIT_S:.0f} s"
        return f"signal {-self.status}" if self.status < 0 else f"status {self.status}"


@dataclasses.dataclass
class Outcome:
    """What the report says of this part."""

    killed_rank: int
    killed_in_step: int
    checkpoint_of_step: int
    noticed: list[dict[str, typing.Any]]  # _noticed()
    silent: list[int]  # ranks that noticed nothing within LIMIT_S
    steps: int
    resumed: bool
    same_bits: bool
    bits: str
    words: str  # why it did not resume, or what differs, else ""
    several_clocks: bool = False  # of hosts, so that seconds have these clocks' differences in them


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
    log = folder / f"{name}{rank}.log"
    dist.barrier()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "uniep.pilot.job", str(file)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors if "UNIEP_PILOT_VERBOSE" not in os.environ else None,
        )
    try:
        status: int | None = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    report: dict[str, typing.Any] = {"ended_at": time.time(), "last_words": _last_words(log)}
    for left in (ended, died):
        if left.exists():
            report |= json.loads(left.read_text())
    own = Ended(rank, status, report, socket.gethostname())
    found: list[typing.Any] = [None] * ranks
    dist.all_gather_object(found, own)
    return [Ended(*one) for one in found]


def _last_words(log: pathlib.Path) -> str:
    """Of standard error: what NCCL's watchdog says, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    watchdog = [line for line in lines if "Watchdog caught collective operation timeout" in line]
    return (watchdog or lines or [""])[-1][:500]


def _noticed(one: Ended, died_at: float) -> dict[str, typing.Any]:
    """When the pilot's watcher saw the process gone, and when an error came; None: it did not."""
    found = one.report
    told = "gone_at" in found or "error_at" in found
    error_at = found.get("error_at") if told else found["ended_at"]
    return {
        "rank": one.rank,
        "gone_seconds": found["gone_at"] - died_at if "gone_at" in found else None,
        "error_seconds": None if error_at is None else error_at - died_at,
        "kind": found["kind"] if told else one.ending,
        "words": found["words"] if told else found["last_words"],
    }


def _words(ended: list[Ended]) -> str:
    """How ranks ended that were to end well."""
    return "; ".join(
        f"rank {one.rank}: {one.report.get('words') or ', '.join(filter(None, (one.ending, one.report['last_words'])))}"
        for one in ended
        if "digest" not in one.report
    )


def apart(ends: list[tuple[list[float], str]]) -> str:
    """The losses and the digest without the kill, and of each rank that resumed."""
    names = ["without it", *(f"rank {rank}" for rank in range(len(ends) - 1))]
    return "; ".join(
        f"{name}: losses {', '.join(map(repr, losses))}, {digest[:12]}"
        for name, (losses, digest) in zip(names, ends, strict=True)
    )


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
        words = f"the job ended before the kill: {_words(ended)}"
        return Outcome(killed, step + 1, half, [], [], steps, False, False, "", words)
    noticed = [_noticed(one, died_at) for one in ended if one.rank != killed and one.has_noticed]
    silent = [one.rank for one in ended if one.rank != killed and not one.has_noticed]
    again = _start(dataclasses.replace(job, end=steps, begin=half), "resumed")
    reports = [one.report for one in again]
    resumed = all("digest" in report for report in reports)
    clocks = len({one.host for one in ended}) > 1
    if not resumed:
        return Outcome(killed, step + 1, half, noticed, silent, steps, False, False, "", _words(again), clocks)
    same = all(report["digest"] == digest and report["losses"] == losses[half:] for report in reports)
    bits = ", ".join(dict.fromkeys([digest[:12], reports[0]["digest"][:12]]))
    words = "" if same else apart([(losses[half:], digest), *((one["losses"], one["digest"]) for one in reports)])
    return Outcome(killed, step + 1, half, noticed, silent, steps, True, same, bits, words, clocks)
