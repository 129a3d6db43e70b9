"""The NCCL communicator of a process group of torch, for a Group that shares its id over it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from uniep.errors import Unsupported

COMMUNICATORS = ("own", "borrow")


def checked(communicator: str) -> str:
    if communicator not in COMMUNICATORS:
        raise ValueError(f"communicator: {communicator!r}; legal are {', '.join(COMMUNICATORS)}")
    return communicator


def borrowed(group: dist.ProcessGroup, device: torch.device) -> int:
    """The ncclComm_t of a process group on this process's GPU; it stays the process group's. Collective.

    Raises:
        ValueError: the process group has no NCCL for GPUs.
        Unsupported: this torch does not give it away.
    """
    backends = str(dist.get_backend_config(group))
    if "nccl" not in backends:
        raise ValueError(
            f"communicator: 'borrow' of a process group with {backends}, which has no NCCL; legal is 'own', or pg with "
            "the backend nccl"
        )
    backend = group._get_backend(torch.device("cuda"))
    if not hasattr(backend, "_comm_ptr"):
        raise Unsupported(
            f"communicator: 'borrow' needs a torch that gives NCCL's communicator away; this is {torch.__version__}. "
            "communicator='own' does without"
        )
    # torch makes a communicator with its first collective.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    address = int(backend._comm_ptr())
    if address == 0:
        raise Unsupported(f"communicator: 'borrow', but torch {torch.__version__} has made none for {device}")
    return address
