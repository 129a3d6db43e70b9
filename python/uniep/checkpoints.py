"""checkpoint_state(): what torch.distributed.checkpoint has to know of parameters that differ by rank."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from uniep import peers
from uniep.group import Group
from uniep.parallel import holders


def checkpoint_state(module: torch.nn.Module, state: dict[str, typing.Any] | None = None) -> dict[str, typing.Any]:
    """A state dict for torch.distributed.checkpoint, which else keeps one rank's experts in the place of all.

    Parameters of experts [E / W, ...] become DTensors [E, ...], with the same memory: load() writes into the module.
    A checkpoint can be loaded with another number of ranks, and with another sharding.

    Experts that FSDP2 has sharded over their replicas, too, become DTensors over both: all ranks of a group call this
    together then.

    Args:
        module: with Experts, or experts that uniep.transformers.shard_experts() has sharded.
        state: module.state_dict(), the default, or what get_optimizer_state_dict() of
            torch.distributed.checkpoint.state_dict gives for it, not flattened.

    Raises:
        ValueError: experts are sharded over ranks that are no replicas of each other, or in a way of their own.
    """
    groups: dict[str, Group] = {}
    for prefix, one, group in holders(module):
        if group.size > 1:
            groups |= {prefix + name: group for name, _ in one.named_parameters(recurse=False)}
    meshes: dict[tuple[str, DeviceMesh | None], DeviceMesh] = {}

    def marked(value: typing.Any, group: Group | None) -> typing.Any:
        if isinstance(value, dict):
            return {key: marked(one, groups.get(key, group)) for key, one in value.items()}
        if group is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        replicas = value.device_mesh if isinstance(value, DTensor) else None
        if (group.name, replicas) not in meshes:
            meshes[group.name, replicas] = _mesh(group, replicas)
        return _whole(value.detach(), meshes[group.name, replicas])

    return typing.cast(dict[str, typing.Any], marked(module.state_dict() if state is None else state, None))


def _mesh(group: Group, replicas: DeviceMesh | None) -> DeviceMesh:
    """The group's ranks, and behind them the dimensions over which FSDP2 has sharded each rank's experts. That of the
    group alone is made without a collective."""
    assert group.process_group is not None
    if replicas is None:
        return DeviceMesh.from_group(group.process_group, group.device.type)
    ranks = torch.tensor(peers.gather_objects(group, replicas.mesh.tolist(), "which ranks have the same experts"))
    own = ranks.flatten(1)[:, replicas.mesh.flatten().tolist().index(dist.get_rank())].tolist()
    group_ranks = dist.get_process_group_ranks(group.process_group)
    if own != group_ranks:
        raise ValueError(
            f"state: a parameter of experts is a DTensor on {replicas}, and the group of the experts has ranks "
            f"{group_ranks}; must be on ranks that hold the same experts, one of each of the job's groups, in the same "
            "order for every rank of the group"
        )
    names = ("experts", *(f"replicas{dimension}" for dimension in range(replicas.ndim)))
    both = [group.process_group, *replicas.get_all_groups()]
    return DeviceMesh.from_group(both, group.device.type, mesh=ranks, mesh_dim_names=names)


def _whole(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """All experts [E, ...] of the ranks' [E / W, ...], or of DTensors of that shape."""
    if not isinstance(value, DTensor):
        return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
    if any(type(one) not in (Shard, Replicate) for one in value.placements):
        raise ValueError(
            f"state: a parameter of experts has placements {value.placements}; must be Shard and Replicate alone"
        )
    shape = torch.Size([value.shape[0] * mesh.size(0), *value.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0), *value.placements]
    return DTensor.from_local(value.to_local(), mesh, placements, run_check=False, shape=shape, stride=stride)
