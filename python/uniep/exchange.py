"""place(), dispatch() and combine(): the exchange of rows alone, for those who bring their own GEMM."""

from __future__ import annotations

import dataclasses
import typing

import torch
from torch.autograd.function import once_differentiable

from uniep.group import Group
from uniep.layer import check_probs, checked_capacity, checked_topk, outside_of_graphs
from uniep.routes import Route, place_routing

_ROW_ALIGNMENT = 128
_NO_INTERMEDIATE = 8  # a legal one: the exchange has none


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every (token, slot) lands.

    Rows of a rank lie expert by expert, each expert's from a multiple of 128 on, and inside an expert in the order
    (source rank, token, slot).

    Attributes:
        rows: R, rows of this rank with padding.
        counts: [El] int64 on the CPU, rows of each local expert without padding.
        offsets: [El] int32 on the group's device, where each local expert's rows end with padding: `offs` of
            torch's grouped_mm.
        probs: [T, K] fp32, or [T, E] with a map, as given to place().
    """

    group: Group
    rows: int
    counts: torch.Tensor
    offsets: torch.Tensor
    probs: torch.Tensor
    leading: tuple[int, ...]
    route: Route


@outside_of_graphs
def place(
    topk_ids: torch.Tensor,
    probs: torch.Tensor,
    num_experts: int,
    hidden: int,
    *,
    topk: int | None = None,
    group: Group | None = None,
    capacity: tuple[int, int] | None = None,
) -> Plan:
    """Places a routing. Collective; waits until the number of rows is known.

    Args:
        topk_ids: [..., K] int32 or int64, global experts; -1 is an unused slot. No expert twice in a token. Or a
            routing map [..., E] of bool, as in moe().
        probs: [..., K] fp32, finite, or [..., E] with a map; dispatch() is differentiable in it.
        num_experts: E, of all ranks, a multiple of their number.
        hidden: H of the rows to come, a multiple of 8.
        topk: K of a routing map.
        group: None is Group(device=topk_ids.device).
        capacity: as in moe().

    Raises:
        ValueError: an argument is wrong; the message names it, its value and what is legal.
        CapacityError: the routing does not fit.
    """
    if topk_ids.dim() < 1:
        raise ValueError("topk_ids: no dimension; must be [..., K]")
    check_probs(topk_ids, probs)
    if group is None:
        group = Group(device=topk_ids.device)
    for name, tensor in (("topk_ids", topk_ids), ("probs", probs)):
        if tensor.device != group.device:
            raise ValueError(f"{name}: on {tensor.device}; must be on the group's device, {group.device}")
    if num_experts < 1 or num_experts % group.size != 0:
        raise ValueError(f"num_experts: {num_experts}; must be a multiple of the number of ranks, {group.size}")
    if hidden < 8 or hidden % 8 != 0:
        raise ValueError(f"hidden: {hidden}; must be a multiple of 8, 8 or more")
    slots = checked_topk(topk_ids, num_experts, topk)
    ids = topk_ids.reshape(-1, topk_ids.shape[-1]).contiguous()
    flat_probs = probs.reshape(ids.shape)
    route = place_routing(
        group,
        (hidden, _NO_INTERMEDIATE, num_experts),
        ids,
        flat_probs.detach().contiguous(),
        slots,
        checked_capacity(capacity),
    )
    local = num_experts // group.size
    first = group.engine.rank * local  # 0 with the transport "torch", whose engine has the local experts alone
    counts, ends = [], []
    for expert in range(first, first + local):
        count, begin = group.engine.expert_rows(route.placement, expert)
        counts.append(count)
        ends.append(begin + -(-count // _ROW_ALIGNMENT) * _ROW_ALIGNMENT)
    return Plan(
        group=group,
        rows=group.engine.rank_rows(route.placement),
        counts=torch.tensor(counts, dtype=torch.int64),
        offsets=torch.tensor(ends, dtype=torch.int32, device=group.device),
        probs=flat_probs,
        leading=tuple(topk_ids.shape[:-1]),
        route=route,
    )


@outside_of_graphs
def dispatch(x: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends tokens to the ranks of their experts. Collective, its backward as well; differentiable in x and plan.probs.

    Args:
        x: [..., H] bf16, with the leading sizes that place() saw.

    Returns:
        rows [R, H] bf16: a copy of its token for every row, zero in padding; and row_probs [R] fp32.

    Raises:
        ValueError: x has another type, shape or device.
    """
    expected = [*plan.leading, plan.route.hidden]
    _check_rows(x, "x", expected, plan)
    flat = x.reshape(-1, plan.route.hidden)
    rows, row_probs = _Dispatch.apply(plan, flat, plan.probs)  # type: ignore[no-untyped-call]
    return rows, row_probs


@outside_of_graphs
def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Sums every token's rows, slots ascending in fp32. Collective, its backward as well; differentiable in rows.

    Args:
        rows: [R, H] bf16; rows of padding are not read, and their gradient is zero.

    Returns:
        [..., H] bf16, with the leading sizes that place() saw.

    Raises:
        ValueError: rows has another type, shape or device.
    """
    _check_rows(rows, "rows", [plan.rows, plan.route.hidden], plan)
    y = typing.cast(torch.Tensor, _Combine.apply(plan, rows))  # type: ignore[no-untyped-call]
    return y.view(*plan.leading, plan.route.hidden)


def _check_rows(tensor: torch.Tensor, name: str, shape: list[int], plan: Plan) -> None:
    if tensor.dtype != torch.bfloat16:
        raise ValueError(f"{name}: {tensor.dtype}; must be torch.bfloat16")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {list(tensor.shape)}; must be {shape}, as the plan has it")
    if tensor.device != plan.group.device:
        raise ValueError(f"{name}: on {tensor.device}; must be on the group's device, {plan.group.device}")


def _to_rows(plan: Plan, x: torch.Tensor, with_probs: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    route = plan.route
    return plan.group.engine.dispatch(route.config(), route.placement, route.send(x.contiguous()), with_probs)


def _to_tokens(
    plan: Plan, rows: torch.Tensor, row_dprobs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    route = plan.route
    given = None if row_dprobs is None else row_dprobs.contiguous()
    y, dprobs = plan.group.engine.combine(
        route.config(), route.placement, route.engine_tokens, rows.contiguous(), given
    )
    return route.sum_slots(y), None if dprobs is None else route.gather_probs(dprobs)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, plan: Plan, x: torch.Tensor, probs: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.plan = plan
        return _to_rows(plan, x, with_probs=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: typing.Any, drows: torch.Tensor, drow_probs: torch.Tensor):  # type: ignore[no-untyped-def]
        dx, dprobs = _to_tokens(ctx.plan, drows, drow_probs)
        return None, dx if ctx.needs_input_grad[1] else None, dprobs if ctx.needs_input_grad[2] else None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, plan: Plan, rows: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.plan = plan
        return _to_tokens(plan, rows, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: typing.Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        return None, _to_rows(ctx.plan, dy, with_probs=False)[0]
