"""Data parallelism beside expert parallelism: gradients as one process on the whole batch would have them.

An expert's gradient is a sum over the tokens of its group; a data-parallel wrapper makes the others means over the
ranks. docs/pytorch_parallel.md has the recipe.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from uniep.arguments import flat
from uniep.group import Group
from uniep.modules import Experts

_BUCKET_BYTES = 64 << 20
_FP32 = 2  # of _kind()
Replicas = dist.ProcessGroup | typing.Literal["self"] | None


class _Share(typing.NamedTuple):
    of: torch.Tensor
    is_gradient: bool  # main_grad, given as tensors; else a parameter, which has it

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.of if self.is_gradient else _gradient(self.of)


def holders(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Group]]:
    """The modules whose parameters are a rank's share of experts, with the prefix of their names."""
    for name, one in module.named_modules():
        group = one.group if isinstance(one, Experts) else getattr(one, "uniep_group", None)
        if isinstance(group, Group):
            yield f"{name}." if name else "", one, group


def expert_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of `module` that are a rank's share of experts, by their names in it.

    They are those of Experts, and of what uniep.transformers.shard_experts() has sharded. Wrappers that average, or
    shard over all ranks, have to leave them alone.
    """
    found = ((prefix, one.named_parameters(recurse=False)) for prefix, one, _ in holders(module))
    return {prefix + name: parameter for prefix, own in found for name, parameter in own}


@torch.no_grad()
def average_expert_gradients(module: torch.nn.Module, replicas: Replicas = None) -> None:
    """Makes gradients of experts those of the mean of the ranks' losses, as DistributedDataParallel makes the others.

    Sums over the group's W ranks become, with R groups that are replicas of each other, sums over the replicas divided
    by W R. Once a step, on all ranks, after the last backward and before clip_grad_norm(). Works on main_grad where
    there is one, else on .grad. Gradients of experts that FSDP2 has sharded over the replicas are means over these
    already, and are divided by W alone. checkpoint_state() saves and loads such experts as well.

    Small gradients travel together, in buckets of one dtype of up to 64 MiB, a collective each; a larger one needs no
    memory beside it. A parameter without a gradient gets one of zeros where another replica has one, for which it first
    takes a small collective of all parameters; where no replica has one it stays without. What is tied counts once.

    Args:
        module: with Experts, or what shard_experts() has sharded; without any nothing happens.
        replicas: the process group of the ranks that hold the same experts as this one, itself among them: one of each
            of the job's groups. None: `group.replicas`, or no other one where the group has all ranks of the job.
            "self": no other one.

    Raises:
        ValueError: the replicas are not known, or are ranks of one group.
    """
    found = [(_replicas(replicas, group), group, shares) for group, shares in _by_group(module)]
    lacking: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for shared, _, shares in found:
        if shared is not None:
            lacking.setdefault(shared, []).extend(one.of for one in shares if not one.is_gradient)
    for shared, parameters in lacking.items():
        _give_what_others_have(parameters, shared)
    summed: dict[tuple[dist.ProcessGroup, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for shared, group, shares in found:
        count = group.size * (1 if shared is None else dist.get_world_size(shared))
        for gradient in _gradients(shares):
            if isinstance(gradient, DTensor):
                gradient.to_local().div_(group.size)
                continue
            gradient.div_(count)
            if shared is not None:
                summed.setdefault((shared, gradient.device, gradient.dtype), []).append(gradient)
    for (shared, _, _), gradients in summed.items():
        for bucket in _buckets(gradients):
            _sum(bucket, shared)


def _give_what_others_have(parameters: list[torch.Tensor], replicas: dist.ProcessGroup) -> None:
    """Zeros as the gradient of parameters that have one on another replica alone: all have to sum the same tensors."""
    if not parameters:
        return
    given = [_kind(one) for one in parameters]
    known = torch.tensor(given, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX, group=replicas)
    if all(given):
        return  # without a wait for the device
    for parameter, own, kind in zip(parameters, given, known.tolist(), strict=True):
        if own == 0 and kind > 0 and not isinstance(parameter, DTensor):
            dtype = torch.float32 if kind == _FP32 else parameter.dtype
            if dtype is not parameter.dtype:
                parameter.grad_dtype = dtype
            parameter.grad = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _kind(parameter: torch.Tensor) -> int:
    """Of its gradient: 0 without one, 1 of its dtype."""
    gradient = _gradient(parameter)
    if gradient is None or gradient.dtype is parameter.dtype:
        return int(gradient is not None)
    return _FP32


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """These in order, together up to _BUCKET_BYTES; a larger one alone."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _sum(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Each becomes its sum over the ranks, by one collective."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.all_reduce(tensors[0], group=group)
        return
    flat_sums = torch.cat([one.reshape(-1) for one in tensors])
    dist.all_reduce(flat_sums, group=group)
    parts = torch.split(flat_sums, [one.numel() for one in tensors])
    torch._foreach_copy_(tensors, [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)])


@torch.no_grad()
def clip_grad_norm(module: torch.nn.Module, max_norm: float, pipeline: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scales gradients so that their norm is at most max_norm: torch.nn.utils.clip_grad_norm_() for sharded experts.

    The norm is that of one process with all experts, and the factor has the same bits on all ranks. Collective over the
    groups of the experts and the pipeline; after average_expert_gradients(). Gradients of all other parameters must be
    equal on all ranks that have them, or DTensors. Works on main_grad where there is one, else on .grad.

    Args:
        module: with all of this rank's parameters: of several stages a ModuleList of them.
        max_norm: above 0.
        pipeline: the process group of the ranks that have the model's stages, itself among them. A parameter that
            several stages share counts once for each. None: this rank has the whole model.

    Returns:
        The norm before, fp32 without dimensions.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: {max_norm}; must be above 0")
    own = {id(one) for one in expert_parameters(module).values()}
    found = [_gradient(one) for one in module.parameters() if id(one) not in own]
    gradients = [one for one in found if one is not None]
    total = _squares(gradients)
    for group, shares in _by_group(module):
        mine = _gradients(shares)
        total = total + _sum_over(group.process_group, group.device, _squares(mine)).to(total.device)
        gradients += mine
    if pipeline is not None:
        total = _sum_over(pipeline, _device_of(module), total).to(total.device)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device))
    return norm.float()


def _by_group(module: torch.nn.Module) -> list[tuple[Group, list[_Share]]]:
    """Of each holder; what several have, such as a tied parameter, of the first."""
    seen: dict[int, torch.Tensor] = {}
    found: list[tuple[Group, list[_Share]]] = []
    for _, one, group in holders(module):
        found.append((group, []))
        for share in _shares(one):
            gradient = share.gradient
            own = share.of if gradient is None else gradient
            _refuse_shards_over(group, own)
            if id(own) not in seen:
                seen[id(own)] = own
                found[-1][1].append(share)
    return found


def _refuse_shards_over(group: Group, tensor: torch.Tensor) -> None:
    """Ranks of one group have other experts each: together they are no tensor."""
    if not isinstance(tensor, DTensor) or group.size == 1 or group.process_group is None:
        return
    others = set(dist.get_process_group_ranks(group.process_group)) - {dist.get_rank()}
    if others & set(tensor.device_mesh.mesh.flatten().tolist()):
        raise ValueError(
            "module: experts are sharded by FSDP2 over ranks of their own group, which have other experts each; must "
            "be over the replicas, or left out by ignored_params"
        )


def _shares(holder: torch.nn.Module) -> list[_Share]:
    options = holder.options if isinstance(holder, Experts) else getattr(holder, "uniep_options", None) or {}
    main_grad = options.get("main_grad")
    if main_grad is not None and not isinstance(main_grad, str):
        return [_Share(one, True) for part in main_grad for one in flat(part)]
    return [_Share(one, False) for one in holder.parameters(recurse=False)]


def _gradients(shares: list[_Share]) -> list[torch.Tensor]:
    return [one.gradient for one in shares if one.gradient is not None]


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer steps by. Beside main_grad .grad is a zero that parameters share."""
    sums = getattr(parameter, "main_grad", None)
    return sums if isinstance(sums, torch.Tensor) else parameter.grad


def _replicas(given: Replicas, group: Group) -> dist.ProcessGroup | None:
    """None: there is no other rank with these experts."""
    if isinstance(given, str):
        if given != "self":
            raise ValueError(f"replicas: {given!r}; legal are a process group, 'self' and None")
        return None
    found = group.replicas if given is None else given
    if found is None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks != group.size:
            raise ValueError(
                f"replicas: None, where the job has {ranks} ranks and the experts' group {group.size}; must be the "
                "process group of the ranks that hold the same experts, one of each group, or 'self' where this rank "
                "alone has them"
            )
        return None
    if group.process_group is not None:
        both = set(dist.get_process_group_ranks(found)) & set(dist.get_process_group_ranks(group.process_group))
        if len(both) != 1:
            raise ValueError(
                f"replicas: ranks {sorted(both)} are in one group of experts with this rank, and hold other experts; "
                "must be one rank of each group"
            )
    return found


def _squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares in fp64, of DTensors that of the whole tensors."""
    sharded = [one for one in gradients if isinstance(one, DTensor)]
    plain = [one for one in gradients if not isinstance(one, DTensor)]
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    if plain:
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in plain]
        total += torch.stack(norms).double().square().sum()
    if sharded:
        norm = torch.nn.utils.get_total_norm(sharded)
        total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
    return total


def _sum_over(group: dist.ProcessGroup | None, device: torch.device, value: torch.Tensor) -> torch.Tensor:
    """Of the group's ranks. Added in rank order, so that replicas of the group have the same bits whatever their
    all_reduce does."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return value
    on_gpu = "nccl" in str(dist.get_backend_config(group))
    own = value.to(device if on_gpu else "cpu")
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own, group=group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part  # no scan: torch has no deterministic one on GPUs
    return total


def _device_of(module: torch.nn.Module) -> torch.device:
    return next((one.device for one in module.parameters()), torch.device("cpu"))
