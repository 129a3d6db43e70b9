"""checkpoint_state(): what torch.distributed.checkpoint has to know of parameters that differ by rank."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from uniep import peers
from uniep.group import Group
from uniep.parallel import holders

# Parts of names that wrappers put in: DistributedDataParallel's, torch.compile's, checkpoint_wrapper's and FSDP's.
# PyTorch has them in some of its names of a parameter, and leaves them out of others.
_OF_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_LEGAL = "must be what state_dict(), get_model_state_dict() or get_optimizer_state_dict() gives for module"


def checkpoint_state(module: torch.nn.Module, state: dict[str, typing.Any] | None = None) -> dict[str, typing.Any]:
    """A state dict for torch.distributed.checkpoint, which else keeps one rank's experts in the place of all.

    Parameters of experts [E / W, ...] become DTensors [E, ...], with the same memory: load() writes into the module.
    What load() sets instead, such as a step that is a number, it sets in `state` as well. A checkpoint can be loaded
    with another number of ranks, and with another sharding.

    Experts that FSDP2 has sharded over their replicas, too, become DTensors over both: all ranks of a group call this
    together then.

    Args:
        module: with Experts, or experts that uniep.transformers.shard_experts() has sharded; also in wrappers.
        state: module.state_dict(), the default, or what get_model_state_dict() or get_optimizer_state_dict() of
            torch.distributed.checkpoint.state_dict gives for it, also flattened.

    Raises:
        ValueError: experts are sharded over ranks that are no replicas of each other, or in a way of their own; or
            `state` is not of this module, or keeps lists of tensors for experts.
    """
    state = module.state_dict() if state is None else state
    names = _Names(module)
    names.check(state)
    meshes: dict[tuple[str, DeviceMesh | None], DeviceMesh] = {}

    def marked(value: typing.Any, name: str | None) -> typing.Any:
        if isinstance(value, dict):
            return _Marked(((key, marked(one, name or names.of_experts(key))) for key, one in value.items()), value)
        if name is None:
            return value
        if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            raise ValueError(f"state: {name!r} has a {type(value).__name__} of tensors; must be tensors in dicts alone")
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        group, replicas = names.groups[name], value.device_mesh if isinstance(value, DTensor) else None
        if (group.name, replicas) not in meshes:
            meshes[group.name, replicas] = _mesh(group, replicas)
        return _whole(value.detach(), meshes[group.name, replicas])

    return typing.cast(dict[str, typing.Any], marked(state, None))


class _Marked(dict[typing.Any, typing.Any]):
    """A dict of what checkpoint_state() gives. load() writes into tensors and sets all else, which is set in the dict
    that this was made of as well."""

    def __init__(self, items: Iterable[tuple[typing.Any, typing.Any]], source: dict[typing.Any, typing.Any]) -> None:
        super().__init__(items)
        self._source = source

    def __setitem__(self, key: typing.Any, value: typing.Any) -> None:
        if self.get(key) is not value:  # load() sets the parts of its argument once more as they are
            self._source[key] = value
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return dict, (dict(self),)


class _Names:
    """Of a module's parameters, without the parts of wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        held = [(one, group) for _, one, group in holders(module) if group.size > 1]
        experts = {id(own): group for one, group in held for own in one.parameters(recurse=False)}
        self.groups: dict[str, Group] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        for full, parameter in module.named_parameters(remove_duplicate=False):
            name = _short(full)
            if id(parameter) in experts:
                self.groups[name] = experts[id(parameter)]
            if self._parameters.setdefault(name, parameter) is not parameter and name in self.groups:
                raise ValueError(
                    f"module: two parameters are {name!r} but for parts of wrappers, one of experts; must differ "
                    f"in more than {', '.join(sorted(_OF_WRAPPERS))}"
                )

    def of_experts(self, key: object) -> str | None:
        """The experts' parameter that a key of a state names."""
        name = self._find(key)
        return name if name in self.groups else None

    def check(self, state: dict[typing.Any, typing.Any]) -> None:
        """Raises ValueError where a state could have experts that of_experts() does not see."""
        if not self.groups:
            return
        for one in list(_states(state)) or [state]:
            named = _named_by_optimizer(one)
            if named is not None:
                unknown = [key for key in named if self._find(key) is None]
                if unknown:
                    raise ValueError(f"state: an optimizer's of {unknown[0]!r}, no parameter of module; {_LEGAL}")
                continue
            found = {id(self._parameters[name]) for name in map(self.of_experts, one) if name is not None}
            for name in self.groups:
                if self._parameters[name].requires_grad and id(self._parameters[name]) not in found:
                    raise ValueError(f"state: has {next(iter(one), None)!r} first and no {name!r}; {_LEGAL}")

    def _find(self, key: object) -> str | None:
        """What a key names: a parameter, or in a flattened state of an optimizer something that is kept of one."""
        if not isinstance(key, str):
            return None
        name = _short(key)
        if name in self._parameters:
            return name
        section, *parts = name.split(".")
        if section not in ("state", "param_groups"):
            return None
        starts = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((one for one in starts if one in self._parameters), None)


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


def _states(state: dict[typing.Any, typing.Any]) -> Iterator[dict[typing.Any, typing.Any]]:
    """The states of a model or of an optimizer: this, or those in it."""
    if _named_by_optimizer(state) is not None or any(isinstance(one, torch.Tensor) for one in state.values()):
        yield state
        return
    for one in state.values():
        if isinstance(one, dict):
            yield from _states(one)


def _named_by_optimizer(state: dict[typing.Any, typing.Any]) -> list[object] | None:
    """What names parameters in an optimizer's state; None of another state."""
    groups = state.get("param_groups")
    if isinstance(groups, list):
        return [*state.get("state", ()), *(name for group in groups for name in group["params"])]
    flattened = any(str(key).startswith("param_groups.") for key in state)
    return list(state) if flattened else None


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
