"""torchtitan's routed experts run by UniEP: --override.imports uniep.torchtitan.routed_experts

Router, load balancing, shared experts, parameters, optimizer and checkpoints stay torchtitan's. docs/torchtitan.md has
the flags and the limits.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import typing

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from uniep import reserved_sms
from uniep.arguments import checked_capacity
from uniep.group import Group
from uniep.layer import moe
from uniep.numerics import read_numerics
from uniep.schedules import check_early
from uniep.switch import is_disabled

_log = logging.getLogger("uniep")
_told: set[str] = set()


class UniEPGroupedExperts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's parameters w1_EFD (gate), w2_EDF (down) and w3_EFD (up), and the whole layer as its forward.

    So what hangs on this module's forward, such as FSDP's gathering of parameters, happens.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        pass

    def forward(
        self,
        x: torch.Tensor,
        topk_scores: torch.Tensor,
        topk_expert_ids: torch.Tensor,
        group: Group,
        options: dict[str, typing.Any],
    ) -> torch.Tensor:
        """x [T, D], topk_scores and topk_expert_ids [T, K] to [T, D] of x's type."""
        gate, down, up = (_local(weight).bfloat16() for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        # moe() refuses scores that are not finite, which a diverged run has, and a pipeline that runs a stage on
        # memory of any content to learn shapes. As in torchtitan's layer these tokens become NaN: by a factor, so that
        # their gradients do, too; 1 changes no bit of the others.
        scores = topk_scores.float()
        factor = torch.where(scores.isfinite().all(-1, keepdim=True), 1.0, torch.nan)
        scores = scores.nan_to_num(0.0, 0.0, 0.0)
        y = moe(x.bfloat16(), topk_expert_ids, scores, (gate, up), down, group=group, **options)
        return (y * factor.type_as(y)).type_as(x)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class UniEPRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """RoutedExperts whose dispatch, experts and combine are one call of uniep.moe().

    Raises:
        ValueError: the number of experts or the parallelism is not served; the message says what to set.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        schedule: str = "auto"
        save: str = "keep"
        capacity: tuple[int, int] | None = None
        reserve_sms: int | str = "auto"
        router_weight: str = "activation"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.group, self.reserve_sms = Group("self"), config.reserve_sms
        names = ("schedule", "save", "capacity", "router_weight")
        self.options = {name: getattr(config, name) for name in names}

    def forward(
        self,
        x: torch.Tensor,
        topk_scores: torch.Tensor,
        topk_expert_ids: torch.Tensor,
        num_local_tokens_per_expert: torch.Tensor,
    ) -> torch.Tensor:
        """x [..., D], topk_scores and topk_expert_ids [..., K] to [..., D]; the leading sizes are [B, L] or [T]."""
        topk = topk_scores.shape[-1]
        y = self.inner_experts(
            x.reshape(-1, x.shape[-1]),
            topk_scores.reshape(-1, topk),
            topk_expert_ids.reshape(-1, topk),
            self.group,
            self.options,
        )
        return typing.cast(torch.Tensor, y).view(x.shape)

    # torchtitan looks up placements by the names of the arguments, which differ between its versions.
    forward.__signature__ = inspect.signature(RoutedExperts.forward)  # type: ignore[attr-defined]

    def parallelize(self, parallel_dims: typing.Any) -> None:
        """Shards the parameters as torchtitan does, and makes the group of the expert-parallel ranks."""
        if parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
            raise ValueError(
                f"parallelism.tensor_parallel_degree: {parallel_dims.tp} without expert parallelism splits every "
                "expert; UniEP's layer needs whole experts: set parallelism.expert_parallel_degree to a multiple of it"
            )
        experts = self.inner_experts.num_experts
        if experts % parallel_dims.ep != 0:
            raise ValueError(f"parallelism.expert_parallel_degree: {parallel_dims.ep}; must divide {experts} experts")
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            device = None if mesh.device_type == "cuda" else mesh.device_type
            self.group = Group(mesh.get_group(), device=device, reserve_sms=self.reserve_sms)
            self.group.run_beside(*_groups_beside(parallel_dims))


def _groups_beside(parallel_dims: typing.Any) -> list[dist.ProcessGroup]:
    """Process groups whose collectives may run at the same time as a layer's calls."""
    names = ["efsdp", "dp_replicate", "pp", "cp", "tp"]
    flattened = []
    if parallel_dims.spmd_backend == "partial_dtensor":
        names.append("fsdp")
    elif parallel_dims.cp_enabled:
        # As FSDP itself does later, which gets the same mesh then.
        flattened.append(parallel_dims.get_mesh(["dp_shard", "cp"])._flatten("dp_shard_cp"))
    else:
        names.append("dp_shard")
    meshes = [parallel_dims.get_optional_mesh(name) for name in names]
    return [mesh.get_group() for mesh in (*meshes, *flattened) if mesh is not None]


@override(  # type: ignore[untyped-decorator]
    target=RoutedExperts.Config,
    description="Dispatch, experts and combine of routed experts in one call of UniEP",
)
def routed_experts(
    cfg: RoutedExperts.Config,
    *,
    schedule: str = "auto",
    save: str = "keep",
    capacity: tuple[int, int] | None = None,
    reserve_sms: int | str = "auto",
    router_weight: str = "activation",
) -> RoutedExperts.Config:
    """The replacement of a RoutedExperts.Config, with UNIEP_DISABLE=1 itself. The options are those of uniep.moe().

    reserve_sms is that of uniep.Group; "auto" leaves what collectives of FSDP and other parallelism can take.

    Raises:
        ValueError: experts that UniEP does not serve; the message says which, and what it serves.
    """
    if is_disabled("torchtitan's own routed experts run"):
        return cfg
    check_early(schedule, save)
    read_numerics("swiglu", router_weight)
    limits = None if capacity is None else (capacity[0], capacity[1])
    checked_capacity(limits, 1, 1)
    refuse(cfg)
    text = (
        "torchtitan multiplies router scores behind w2, UniEP before it: same mathematics, other rounding; "
        "router_weight='output' multiplies behind w2"
    )
    if router_weight == "activation" and text not in _told:
        _told.add(text)
        _log.warning(text)
    inner, dispatcher = cfg.inner_experts, cfg.token_dispatcher
    replacement = derive(
        cfg,
        UniEPRoutedExperts.Config,
        inner_experts=derive(inner, UniEPGroupedExperts.Config),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k),
        schedule=schedule,
        save=save,
        capacity=limits,
        reserve_sms=reserved_sms.checked(reserve_sms),
        router_weight=router_weight,
    )
    return typing.cast(UniEPRoutedExperts.Config, replacement)


_KNOWN_FIELDS = {"dim", "hidden_dim", "num_experts", "param_init", "sharding_config"}


def refuse(cfg: typing.Any) -> None:
    """Raises ValueError for a RoutedExperts.Config that UniEP does not serve."""
    owner = type(cfg).__qualname__.removesuffix(".Config")
    if type(cfg) is not RoutedExperts.Config:
        raise ValueError(f"routed_experts: {owner}; UniEP replaces torchtitan's own RoutedExperts only")
    inner = cfg.inner_experts
    if type(inner) is not GroupedExperts.Config:
        name = type(inner).__qualname__.removesuffix(".Config")
        raise ValueError(
            f"inner_experts: {name}; UniEP serves GroupedExperts: SwiGLU in bf16 without bias, so neither gpt-oss's "
            "experts nor low-precision converters nor other overrides of the experts"
        )
    for field in dataclasses.fields(inner):
        if field.name not in _KNOWN_FIELDS and getattr(inner, field.name) != field.default:
            raise ValueError(f"inner_experts.{field.name}: {getattr(inner, field.name)!r}; must be {field.default!r}")
    for name, size in (("dim", inner.dim), ("hidden_dim", inner.hidden_dim)):
        if size % 8 != 0:
            raise ValueError(f"inner_experts.{name}: {size}; must be a multiple of 8")
