"""The ranks of torchrun, on GPUs or on CPUs."""

from __future__ import annotations

import datetime
import os
import re

import torch
import torch.distributed as dist

_ENVIRONMENT = {
    # What reserve_sms="auto" counts with, so that no kernel of UniEP's waits for a peer that waits in NCCL for an SM
    "NCCL_MAX_CTAS": "8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
_CHANGES = re.compile("NCCL_|NVTE_|UNIEP_(?!LIBRARY|CACHE_DIR)")


def prepare_environment() -> None:
    """Variables that must be there before CUDA begins; what the user has set stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str]:
    """What these variables are now, and what else changes NCCL's or UniEP's times."""
    return {name: value for name, value in sorted(os.environ.items()) if name in _ENVIRONMENT or _CHANGES.match(name)}


def begin(cpu: bool, timeout: datetime.timedelta) -> tuple[torch.device, int]:
    """The default process group; this rank's device and the number of ranks."""
    if cpu:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu"), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout)
    return device, dist.get_world_size()
