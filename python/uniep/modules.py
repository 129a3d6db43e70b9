"""Experts and MoELayer: modules around moe()."""

from __future__ import annotations

import typing

import torch

from uniep.arguments import checked_capacity
from uniep.group import Group
from uniep.layer import HAS_GRAD_DTYPE, moe, outside_of_graphs
from uniep.numerics import is_gated, read_numerics
from uniep.schedules import check_early

_OPTIONS = {"schedule", "capacity", "main_grad", "grad_dtype", "save", "activation", "router_weight"}


def parameter_device(group: Group) -> torch.device:
    """Where modules make parameters: on the group's device, or on meta where that is torch's default."""
    default = torch.get_default_device()
    return default if default.type == "meta" else group.device


def _refuse_by_place(given: tuple[object, ...], names: str) -> None:
    """Where some are given twice; of all by their places Python itself says which names are missing."""
    if given:
        raise TypeError(f"{names}: {len(given)} given by their places; must be given by name")


def _check_columns(hidden: int, intermediate: int) -> None:
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < 8 or size % 8 != 0:
            raise ValueError(f"{name}: {size}; must be a multiple of 8, 8 or more")


def _own_part(weight: torch.Tensor) -> tuple[torch.Tensor, range, tuple[slice, ...]]:
    """What this rank has of [El, ...], of which experts, and where in each: all, or the shard of a DTensor."""
    if not hasattr(weight, "to_local"):
        return weight, range(len(weight)), ()
    own = weight.to_local()
    (chunk,) = typing.cast(typing.Any, weight).__create_chunk_list__()
    places = [range(begin, begin + size) for begin, size in zip(chunk.offsets, own.shape, strict=True)]
    return own, places[0], tuple(slice(one.start, one.stop) for one in places[1:])


class Experts(torch.nn.Module):
    """The experts of one rank; the parameters are this rank's E / W experts of the group.

    Initial values do not depend on the number of ranks where all ranks have the same seed. Within
    `torch.device("meta")` parameters are made there: to_empty() and reset_parameters(), or loading, come before a call.

    Args:
        num_experts: E, of all ranks, a multiple of their number W.
        hidden: H, columns of x and y, a multiple of 8.
        intermediate: I, columns between both matrices of an expert, a multiple of 8.
        group: the ranks that hold the experts; None is Group().
        dtype: of the parameters: torch.bfloat16, or another one that autocast casts.
        bias: whether there are biases.
        options: `schedule`, `capacity`, `main_grad`, `grad_dtype`, `save`, `activation` and `router_weight` of moe().

    Attributes:
        gate_up_proj: [El, 2 I, H] of `dtype`, El = E / W, gate rows before up rows; of an activation without a gate
            [El, I, H].
        down_proj: [El, H, I] of `dtype`.
        gate_up_bias: [El, 2 I] of `dtype` (without a gate [El, I]), zero at first; None without `bias`.
        down_bias: [El, H] of `dtype`, zero at first; None without `bias`.
        options: as given; they may be changed between steps.

    Raises:
        TypeError: a size was given by its place: Experts and MoELayer have theirs by name alone.
        ValueError: a size or an option is wrong, or num_experts is not a multiple of the number of ranks.
    """

    def __init__(
        self,
        *by_place: typing.NoReturn,
        num_experts: int,
        hidden: int,
        intermediate: int,
        group: Group | None = None,
        dtype: torch.dtype = torch.bfloat16,
        bias: bool = False,
        **options: typing.Any,
    ) -> None:
        super().__init__()
        _refuse_by_place(by_place, "num_experts, hidden, intermediate")
        _check_columns(hidden, intermediate)
        self.group = Group() if group is None else group
        if num_experts < 1 or num_experts % self.group.size != 0:
            raise ValueError(
                f"num_experts: {num_experts}; must be a multiple of the number of ranks, {self.group.size}"
            )
        unknown = set(options) - _OPTIONS
        if unknown:
            raise ValueError(f"options: {', '.join(sorted(unknown))}; legal are {', '.join(sorted(_OPTIONS))}")
        check_early(options.get("schedule", "auto"), options.get("save", "keep"))
        checked_capacity(options.get("capacity"), 1, 1)
        grad_dtype = options.get("grad_dtype", torch.bfloat16)
        if grad_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"grad_dtype: {grad_dtype!r}; legal are torch.bfloat16 and torch.float32")
        main_grad = options.get("main_grad")
        if isinstance(main_grad, str) and main_grad != "param":
            raise ValueError(f"main_grad: {main_grad!r}; legal are None, 'param' and tensors")
        activation = options.get("activation", "swiglu")
        read_numerics(activation, options.get("router_weight", "activation"), bias)
        self.num_experts, self.options = num_experts, options
        local = num_experts // self.group.size
        device = parameter_device(self.group)
        rows = (2 if is_gated(activation) else 1) * intermediate
        self.gate_up_proj = torch.nn.Parameter(torch.empty(local, rows, hidden, device=device, dtype=dtype))
        self.down_proj = torch.nn.Parameter(torch.empty(local, hidden, intermediate, device=device, dtype=dtype))
        self.gate_up_bias: torch.nn.Parameter | None = None
        self.down_bias: torch.nn.Parameter | None = None
        if bias:
            self.gate_up_bias = torch.nn.Parameter(torch.empty(local, rows, device=device, dtype=dtype))
            self.down_bias = torch.nn.Parameter(torch.empty(local, hidden, device=device, dtype=dtype))
        if options.get("grad_dtype") is torch.float32:
            self._set_grad_dtype()
        self.reset_parameters()

    @outside_of_graphs
    def _set_grad_dtype(self) -> None:
        """In parameters that do not have it: it is lost where they are copied, and where others take their place."""
        for parameter in self.parameters() if HAS_GRAD_DTYPE else ():
            if parameter.is_leaf and parameter.grad_dtype is not torch.float32:
                parameter.grad_dtype = torch.float32

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every expert's weights from a generator of its own: uniform in +-1 / sqrt(columns). Biases: zero.

        Values are the same where FSDP2 has sharded the parameters."""
        if self.gate_up_proj.is_meta:
            return
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()
        seed = int(torch.randint(2**48, (), device="cpu").item())
        first = self.group.rank * len(self.gate_up_proj)
        weights = self.gate_up_proj, self.down_proj
        drawn = [torch.empty(one.shape[1:], device=one.device, dtype=one.dtype) for one in weights]
        parts = [_own_part(one) for one in weights]
        for local in range(len(self.gate_up_proj)):
            if not any(local in experts for _, experts, _ in parts):
                continue
            generator = torch.Generator(device=self.gate_up_proj.device).manual_seed(seed + first + local)
            for whole, (own, experts, inner) in zip(drawn, parts, strict=True):
                bound = whole.shape[-1] ** -0.5
                whole.uniform_(-bound, bound, generator=generator)
                if local in experts:
                    own[local - experts.start].copy_(whole[inner])

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """x [..., H] bf16, topk_ids [..., K] int32 or int64, probs [..., K] fp32 to y [..., H] bf16, as moe()."""
        if self.options.get("grad_dtype") is torch.float32:
            self._set_grad_dtype()
        weights = self.gate_up_proj, self.down_proj
        biases = self.gate_up_bias, self.down_bias
        return moe(x, topk_ids, probs, *weights, b1=biases[0], b2=biases[1], group=self.group, **self.options)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {self.group!r}"


def _is_plain(router: torch.nn.Module) -> bool:
    """Whether a router is the one that MoELayer makes: nobody has put another one there, or hooks."""
    hooks = (router._forward_hooks, router._forward_pre_hooks, router._backward_hooks, router._backward_pre_hooks)
    return type(router) is torch.nn.Linear and router.bias is None and not any(hooks)


class MoELayer(torch.nn.Module):
    """A router and its experts: the best K of a softmax in fp32, whose probabilities are scaled to a sum of 1.

    Args:
        hidden: H, columns of x and y, a multiple of 8.
        intermediate: I, columns between both matrices of an expert, a multiple of 8.
        num_experts: E, of all ranks, a multiple of their number.
        topk: K, experts of a token, 1 to E.
        group: the ranks that hold the experts; None is Group().
        options: `dtype`, `bias` and the options of Experts.

    Attributes:
        router: Linear with an fp32 weight [E, H]; its parameters are meant to be equal on all ranks.
        experts: Experts, this rank's.

    Raises:
        TypeError: a size was given by its place: Experts and MoELayer have theirs by name alone.
        ValueError: an argument is wrong.
    """

    def __init__(
        self,
        *by_place: typing.NoReturn,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        group: Group | None = None,
        **options: typing.Any,
    ) -> None:
        super().__init__()
        _refuse_by_place(by_place, "hidden, intermediate, num_experts, topk")
        _check_columns(hidden, intermediate)
        if not 1 <= topk <= num_experts:
            raise ValueError(f"topk: {topk}; must be 1 to num_experts, {num_experts}")
        self.topk = topk
        group = Group() if group is None else group
        self.router = torch.nn.Linear(
            hidden, num_experts, bias=False, device=parameter_device(group), dtype=torch.float32
        )
        self.experts = Experts(
            num_experts=num_experts, hidden=hidden, intermediate=intermediate, group=group, **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] bf16 to y [..., H] bf16."""
        with torch.autocast(x.device.type, enabled=False):
            if _is_plain(self.router):
                logits = torch.nn.functional.linear(x.float(), self.router.weight.float())
            else:
                dtype = next((one.dtype for one in self.router.parameters()), torch.float32)
                logits = self.router(x.to(dtype)).float()
            probs, ids = torch.topk(torch.softmax(logits, -1), self.topk)
            probs = probs / probs.sum(-1, keepdim=True)
        return typing.cast(torch.Tensor, self.experts(x, ids, probs))
