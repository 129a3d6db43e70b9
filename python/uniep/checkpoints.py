"""checkpoint_state(): what torch.distributed.checkpoint has to know of parameters that differ by rank."""

from __future__ import annotations

import typing

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from uniep.group import Group
from uniep.parallel import holders


def checkpoint_state(module: torch.nn.Module, state: dict[str, typing.Any] | None = None) -> dict[str, typing.Any]:
    """A state dict for torch.distributed.checkpoint, which else keeps one rank's experts in the place of all.

    Parameters of experts [E / W, ...] become DTensors [E, ...], with the same memory: load() writes into the module.
    A checkpoint can be loaded with another number of ranks.

    Args:
        module: with Experts, or experts that uniep.transformers.shard_experts() has sharded.
        state: module.state_dict(), the default, or what get_optimizer_state_dict() of
            torch.distributed.checkpoint.state_dict gives for it, not flattened.

    Raises:
        ValueError: FSDP2 has sharded experts, too.
    """
    groups: dict[str, Group] = {}
    for prefix, one, group in holders(module):
        if group.size > 1:
            groups |= {prefix + name: group for name, _ in one.named_parameters(recurse=False)}
    meshes: dict[str, DeviceMesh] = {}

    def marked(value: typing.Any, group: Group | None) -> typing.Any:
        if isinstance(value, dict):
            return {key: marked(one, groups.get(key, group)) for key, one in value.items()}
        if group is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if isinstance(value, DTensor):
            raise ValueError(
                f"state: a parameter of experts is a DTensor on {value.device_mesh}, as FSDP2 makes them; must be the "
                "rank's own tensor. Experts that are sharded over data parallelism, too, can not be saved and "
                "loaded so; to save them, gather them first (full_tensor() gives the rank's experts)"
            )
        if group.name not in meshes:
            assert group.process_group is not None
            meshes[group.name] = DeviceMesh.from_group(group.process_group, group.device.type)
        return DTensor.from_local(value.detach(), meshes[group.name], [Shard(0)], run_check=False)

    return typing.cast(dict[str, typing.Any], marked(module.state_dict() if state is None else state, None))
