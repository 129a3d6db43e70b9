"""One rank of the job that loses a rank: trains UniEP's arm, and is started by kill.py.

It leaves a file that says how it ended. The rank that is to die writes down when, and sends itself SIGKILL in the
middle of a backward.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import sys
import threading
import time
import typing

if typing.TYPE_CHECKING:
    from uniep.pilot.watch import Seen

_TIMEOUT = datetime.timedelta(seconds=120)  # of a collective; then NCCL's watchdog ends the process


@dataclasses.dataclass
class Job:
    """What to train, from which step to which, and who dies where."""

    model: str
    layers: int | None
    text: str  # its file
    seed: int
    schedule: str
    cpu: bool
    end: int  # steps
    folder: str  # of the checkpoint and of what the ranks leave
    begin: int = 0  # 0: from the seed; else from the checkpoint
    save_at: int | None = None
    kill_rank: int | None = None
    kill_step: int | None = None


def _write(file: pathlib.Path, content: dict[str, typing.Any]) -> None:
    file.write_text(json.dumps(content))


def _what(error: BaseException) -> dict[str, typing.Any]:
    return {"error_at": time.time(), "kind": type(error).__name__, "words": " ".join(str(error).split())}


class _End:
    """Leaves the file that says how this rank ended, and ends the process, in whichever thread comes first."""

    def __init__(self, file: pathlib.Path) -> None:
        self._file, self._lock = file, threading.Lock()

    def well(self, content: dict[str, typing.Any]) -> typing.NoReturn:
        self._leave(content, 0)

    def failed(self, error: BaseException) -> typing.NoReturn:
        self._leave(_what(error), 1)

    def saw(self, seen: Seen) -> typing.NoReturn:
        told = {"kind": "no error", "words": seen.words} if seen.error is None else _what(seen.error)
        self._leave({"gone_at": seen.at, **told}, 1)

    def _leave(self, content: dict[str, typing.Any], status: int) -> typing.NoReturn:
        self._lock.acquire()  # for good
        _write(self._file, content)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a process group whose peer is gone may wait for it at the interpreter's end


def _die_with_parent() -> None:
    """Where the pilot is ended in the middle, so is its job."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _die_in_backward(training: typing.Any, file: pathlib.Path) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def die(*_: typing.Any) -> None:
        _write(file, {"died_at": time.time()})
        os.kill(os.getpid(), signal.SIGKILL)

    layers = [module for module in training.model.modules() if isinstance(module, MoELayer)]
    layers[0].register_full_backward_pre_hook(die)  # before its layer's call: the others wait in theirs


def _train(job: Job, rank: int) -> dict[str, typing.Any]:
    from uniep.pilot.arms import find
    from uniep.pilot.sizes import of_model
    from uniep.pilot.text import Text, read
    from uniep.pilot.training import Setting, Training, mean_of_ranks, set_up_parallelism
    from uniep.pilot.world import begin

    device, ranks = begin(job.cpu, _TIMEOUT)
    set_up_parallelism(ranks, timeout=_TIMEOUT)
    size = of_model(job.model, job.layers)
    text = Text(read(job.text)[0], size.sequence, size.batch, job.seed)
    arm = find(["uniep"], job.schedule)[0][0]
    training = Training(Setting(size, text, device, job.seed, deterministic=True), arm)
    folder = pathlib.Path(job.folder)
    if job.begin:
        training.load(folder / "checkpoint")
    losses = []
    while training.step_number < job.end:
        if training.step_number == job.kill_step and rank == job.kill_rank:
            _die_in_backward(training, folder / f"died{rank}.json")
        losses += mean_of_ranks([training.step()])
        if training.step_number == job.save_at:
            training.save(folder / "checkpoint")
    return {"losses": losses, "digest": training.digest()}


def main() -> None:
    job = Job(**json.loads(pathlib.Path(sys.argv[1]).read_text()))
    rank = int(os.environ["RANK"])
    _die_with_parent()
    end = _End(pathlib.Path(job.folder) / f"ended{rank}.json")
    try:
        if job.cpu:
            from uniep.pilot.cpu import stand_in_for_cuda

            stand_in_for_cuda()
        import torch.distributed as dist

        from uniep.group import groups
        from uniep.pilot.watch import watch

        stop = threading.Event()
        watch(groups, end.saw, stop)
        found = _train(job, rank)
        stop.set()
        dist.barrier()  # the others watch no more, either, when this process ends
        end.well(found)
    except BaseException as error:
        end.failed(error)


if __name__ == "__main__":
    main()
