"""place(), dispatch() and combine(): the exchange of rows alone, for those who bring their own GEMM."""

from __future__ import annotations

import dataclasses
import typing

import torch

from uniep import tickets
from uniep.arguments import Capacity, check_probs, checked_capacity, checked_topk, default_group
from uniep.derivatives import differentiable_once
from uniep.exchange_ops import describe, place_exchange, to_rows, to_tokens
from uniep.group import Group
from uniep.routes import Route


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every (token, slot) lands.

    Rows of a rank lie expert by expert, each expert's from a multiple of 128 on, and inside an expert in the order
    (source rank, token, slot).

    Attributes:
        group: whose ranks the rows go to.
        rows: R, rows of this rank with padding.
        counts: [El] int64 on the CPU, rows of each local expert without padding.
        offsets: [El] int32 on the group's device, where each local expert's rows end with padding: `offs` of
            torch's grouped_mm.
        probs: [T, K] fp32, or [T, E] with a map, as given to place().
        leading: sizes of x before H, whose product is T.
        ids: [T, K] int32 or int64, or a map [T, E] of bool, as given to place().
        topk: K.
        hidden: H.
        num_experts: E, of all ranks.
        capacity: (padded rows of a rank, tokens of a rank), or None.
    """

    group: Group
    rows: int
    counts: torch.Tensor
    offsets: torch.Tensor
    probs: torch.Tensor
    leading: tuple[int, ...]
    ids: torch.Tensor
    topk: int
    hidden: int
    num_experts: int
    capacity: tuple[int, int] | None
    placed: Route | None  # None: made in a compiled graph, and placed anew where it is used

    @property
    def route(self) -> Route:
        if self.placed is not None:
            return self.placed
        return place_exchange(self.group, self.hidden, self.num_experts, self.ids, self.probs, self.topk, self.capacity)


def _arguments(plan: Plan) -> tuple[int, int, str, int, int]:
    """What the custom ops have in the place of a plan, beside tensors."""
    return (plan.num_experts, plan.topk, plan.group.name, *(plan.capacity or (0, 0)))


def place(
    topk_ids: torch.Tensor,
    probs: torch.Tensor,
    num_experts: int,
    hidden: int,
    *,
    topk: int | None = None,
    group: Group | None = None,
    capacity: Capacity | None = None,
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

    Returns:
        What dispatch() and combine() need; for calls of the same group alone.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and what is legal.
        CapacityError: the routing does not fit; as in moe().
    """
    if topk_ids.dim() < 1:
        raise ValueError("topk_ids: no dimension; must be [..., K]")
    check_probs(topk_ids, probs)
    compiling = torch.compiler.is_compiling()
    if group is None:
        group = default_group(topk_ids.device) if compiling else Group(device=topk_ids.device)
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
    limits = checked_capacity(capacity, slots, num_experts // group.size)
    placed = None
    if compiling:
        counts, offsets, all_rows = torch.ops.uniep.place(
            ids, flat_probs.detach(), hidden, num_experts, slots, group.name, *(limits or (0, 0))
        )
        rows = all_rows.shape[0]
    else:
        placed = place_exchange(group, hidden, num_experts, ids, flat_probs, slots, limits)
        rows, counts, offsets = describe(group, placed, num_experts)
    return Plan(
        group=group,
        rows=rows,
        counts=counts,
        offsets=offsets,
        probs=flat_probs,
        leading=tuple(topk_ids.shape[:-1]),
        ids=ids,
        topk=slots,
        hidden=hidden,
        num_experts=num_experts,
        capacity=limits,
        placed=placed,
    )


def dispatch(x: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends tokens to the ranks of their experts. Collective, its backward as well; differentiable in x and plan.probs.

    Args:
        x: [..., H] bf16, with the leading sizes that place() saw.
        plan: of place().

    Returns:
        rows [R, H] bf16: a copy of its token for every row, zero in padding; and row_probs [R] fp32.

    Raises:
        ValueError: x has another type, shape or device.
    """
    expected = [*plan.leading, plan.hidden]
    _check_rows(x, "x", expected, plan)
    flat = x.reshape(-1, plan.hidden)
    if torch.compiler.is_compiling():
        arguments = _arguments(plan)
        rows, row_probs = torch.ops.uniep.dispatch(flat, plan.ids, plan.probs, plan.rows, *arguments)
        return rows, row_probs
    rows, row_probs = _Dispatch.apply(plan, flat, plan.probs)  # type: ignore[no-untyped-call]
    return rows, row_probs


def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Sums every token's rows, slots ascending in fp32. Collective, its backward as well; differentiable in rows.

    Args:
        rows: [R, H] bf16; rows of padding are not read, and their gradient is zero.
        plan: of place().

    Returns:
        [..., H] bf16, with the leading sizes that place() saw.

    Raises:
        ValueError: rows has another type, shape or device.
    """
    _check_rows(rows, "rows", [plan.rows, plan.hidden], plan)
    if torch.compiler.is_compiling():
        y, _ = torch.ops.uniep.combine(rows, plan.ids, plan.probs.detach(), None, *_arguments(plan))
    else:
        y = _Combine.apply(plan, rows)  # type: ignore[no-untyped-call]
    return typing.cast(torch.Tensor, y.view(*plan.leading, plan.hidden))


def _check_rows(tensor: torch.Tensor, name: str, shape: list[int], plan: Plan) -> None:
    if tensor.dtype != torch.bfloat16:
        raise ValueError(f"{name}: {tensor.dtype}; must be torch.bfloat16")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {list(tensor.shape)}; must be {shape}, as the plan has it")
    if tensor.device != plan.group.device:
        raise ValueError(f"{name}: on {tensor.device}; must be on the group's device, {plan.group.device}")


def _keep(ctx: typing.Any, plan: Plan) -> None:
    ctx.ticket, number = tickets.issue(plan)
    ctx.save_for_backward(number)


def _kept(ctx: typing.Any) -> Plan:
    """The plan by which the rows lie that other backwards have from saved tensors."""
    (number,) = ctx.saved_tensors
    return typing.cast(Plan, tickets.held_beside(number, ctx.ticket))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, plan: Plan, x: torch.Tensor, probs: torch.Tensor):  # type: ignore[no-untyped-def]
        _keep(ctx, plan)
        return to_rows(plan.group, plan.route, x, with_probs=True)

    @staticmethod
    @differentiable_once
    def backward(ctx: typing.Any, drows: torch.Tensor, drow_probs: torch.Tensor):  # type: ignore[no-untyped-def]
        plan = _kept(ctx)
        dx, dprobs = to_tokens(plan.group, plan.route, drows, drow_probs)
        return None, dx if ctx.needs_input_grad[1] else None, dprobs if ctx.needs_input_grad[2] else None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, plan: Plan, rows: torch.Tensor):  # type: ignore[no-untyped-def]
        _keep(ctx, plan)
        return to_tokens(plan.group, plan.route, rows, None)[0]

    @staticmethod
    @differentiable_once
    def backward(ctx: typing.Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        plan = _kept(ctx)
        return None, to_rows(plan.group, plan.route, dy, with_probs=False)[0]
