"""What test_dead_rank.py starts on each rank: two layers, between which the last rank goes; the others say what comes.

dead_rank_checks.py RANK RANKS FILE killed|stopped forward|backward
"""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import uniep
from layers import make_layer

TIMEOUT_S = 3


def main(rank: int, ranks: int, file: str, how: str, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", datetime.timedelta(minutes=1), world_size=ranks, rank=rank)
    dist.barrier()  # whose imports took longer is waited for; the short limit is that of the layers
    group = uniep.Group(dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S)), transport="torch")
    layer = make_layer([8] * ranks, experts=2 * ranks)
    w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))

    def run() -> torch.Tensor:
        return uniep.moe(layer.x[rank], layer.ids[rank], layer.probs[rank], w1, w2, group=group)

    y = run()
    group.check()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    begin = time.monotonic()
    try:
        run() if where == "forward" else y.sum().backward()
    except TimeoutError as error:
        print(f"{time.monotonic() - begin:.1f} {error}", flush=True)
    begin = time.monotonic()
    for call in (run, group.check, group.synchronize):
        try:
            call()
        except TimeoutError as error:
            print("again", error, flush=True)
    try:
        group.recover()
        group.check()
        print("recovered", flush=True)
    except TimeoutError as error:
        print("recover:", error, flush=True)
    print(f"{time.monotonic() - begin:.1f} end", flush=True)


main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
