"""The ranks of torchrun, on GPUs or on CPUs."""

from __future__ import annotations

import datetime
import importlib.util
import os
import re

import torch
import torch.distributed as dist

_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
# Megatron's names of the groups whose collectives overlap with MoE layers. reserve_sms="auto" counts with their bound,
# so that no kernel of UniEP's waits for a peer that waits in NCCL for an SM. Their streams have high priority, so that
# UniEP's kernels may use these SMs until a collective comes. Expert parallelism's groups have neither.
_BESIDE_LAYERS = ("dp", "dp_cp", "ep_dp", "pp")
_MOST_CTAS = 8
_OF_THE_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_engine_as_given = os.environ.get(_OF_THE_ENGINE)
_CHANGES = re.compile("NCCL_|NVTE_|UNIEP_(?!LIBRARY|CACHE_DIR)")


def prepare_environment() -> None:
    """Variables that must be there before CUDA begins; what the user has set stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str]:
    """What these variables are now, and what else changes NCCL's or UniEP's times."""
    return {name: value for name, value in sorted(os.environ.items()) if name in _ENVIRONMENT or _CHANGES.match(name)}


def set_deterministic(on: bool) -> None:
    """Torch's deterministic mode, and the variable without which Megatron-core builds no Transformer Engine's attention
    in it. Off: the variable is as the user has set it.
    """
    torch.use_deterministic_algorithms(on, warn_only=torch.cuda.is_available())
    value = "0" if on else _engine_as_given
    if value is None:
        os.environ.pop(_OF_THE_ENGINE, None)
    else:
        os.environ[_OF_THE_ENGINE] = value


def communicators(bounded: bool) -> dict[str, dict[str, int]]:
    """What Megatron's NCCL groups are told, by their names, in all arms alike.

    Nothing unless `bounded`, over gloo, and where NCCL_MAX_CTAS is set, which NCCL takes before it.

    Raises:
        ValueError: Megatron-core would need PyYAML to read it.
    """
    if not bounded or dist.get_backend() != "nccl" or os.environ.get("NCCL_MAX_CTAS"):
        return {}
    if importlib.util.find_spec("yaml") is None:
        raise ValueError(
            "PyYAML: not installed; Megatron-core reads NCCL's bounds with it. Install it, or set NCCL_MAX_CTAS"
        )
    return {name: {"max_ctas": _MOST_CTAS} for name in _BESIDE_LAYERS}


def high_priority_groups(bounded: bool) -> list[str]:
    """Megatron's names of the groups whose collectives go before other kernels, in all arms alike."""
    return list(_BESIDE_LAYERS) if bounded and dist.get_backend() == "nccl" else []


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
