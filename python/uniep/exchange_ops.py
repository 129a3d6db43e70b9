"""place(), dispatch() and combine() as custom ops, as ops.py has the layer."""

from __future__ import annotations

import typing

import torch

from uniep import capture, late_errors
from uniep.call import rows_of
from uniep.group import Group, find_group
from uniep.ops import never_recompute, new_size
from uniep.routes import Route, place_routing
from uniep.rows import padded

_NO_INTERMEDIATE = 8  # a legal one: the exchange has none
# Inductor parts its CUDA graphs around such ops, which place_exchange() refuses there.
_OPTIONS: typing.Any = {"tags": [torch.Tag.cudagraph_unsafe]} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def place_exchange(
    group: Group,
    hidden: int,
    experts: int,
    ids: torch.Tensor,
    probs: torch.Tensor,
    topk: int,
    capacity: tuple[int, int] | None,
) -> Route:
    """Places ids [T, K] and probs [T, K], or a map and probs [T, E], for rows of `hidden` columns. Collective."""
    capture.refuse("place: it waits for the number of rows, and a CUDA graph is captured; legal there is moe()")
    shape = hidden, _NO_INTERMEDIATE, experts
    return place_routing(group, shape, ids, probs.detach().contiguous(), topk, capacity)


def describe(group: Group, route: Route, experts: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Rows of this rank, and Plan.counts and Plan.offsets. Waits for the placement."""
    engine = group.engine
    local = experts // group.size
    first = engine.rank * local  # 0 with the transport "torch", whose engine has the local experts alone
    counts, ends = [], []
    for expert in range(first, first + local):
        count, begin = engine.expert_rows(route.placement, expert)
        counts.append(count)
        ends.append(begin + padded(count))
    return (
        engine.rank_rows(route.placement),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),  # whatever torch's default is
        torch.tensor(ends, dtype=torch.int32, device=group.device),
    )


def to_rows(group: Group, route: Route, x: torch.Tensor, with_probs: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H] as rows [R, H] and, if asked for, row_probs [R]. Collective."""
    late_errors.note_call(group, None)
    return group.engine.dispatch(route.config(), route.placement, route.send(rows_of(x)), with_probs)


def to_tokens(
    group: Group, route: Route, rows: torch.Tensor, row_dprobs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """rows [R, H] as sums [T, H] and, with row_dprobs [R], dprobs in the shape of probs. Collective."""
    late_errors.note_call(group, None)
    given = None if row_dprobs is None else row_dprobs.contiguous()
    y, dprobs = group.engine.combine(route.config(), route.placement, route.engine_tokens, rows_of(rows), given)
    return route.sum_slots(y), None if dprobs is None else route.gather_probs(dprobs)


def _placed(
    ids: torch.Tensor, probs: torch.Tensor, hidden: int, experts: int, topk: int, group: str, limits: tuple[int, int]
) -> tuple[Group, Route]:
    own = find_group(group)
    return own, place_exchange(own, hidden, experts, ids, probs, topk, limits if limits[0] > 0 else None)


@torch.library.custom_op("uniep::place", mutates_args=(), **_OPTIONS)
def place(
    ids: torch.Tensor,
    probs: torch.Tensor,
    hidden: int,
    experts: int,
    topk: int,
    group: str,
    most_rows: int,
    most_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plan.counts, Plan.offsets, and a tensor [Plan.rows, 0]. The capacity is 0, 0 where there is none."""
    own, route = _placed(ids, probs, hidden, experts, topk, group, (most_rows, most_tokens))
    rows, counts, offsets = describe(own, route, experts)
    return counts, offsets, probs.new_empty((rows, 0))


@place.register_fake
def _(ids, probs, hidden, experts, topk, group, most_rows, most_tokens):  # type: ignore[no-untyped-def]
    local = experts // find_group(group).size
    counts = torch.empty(local, dtype=torch.int64, device="cpu")
    return counts, probs.new_empty(local, dtype=torch.int32), probs.new_empty((new_size(), 0))


@torch.library.custom_op("uniep::dispatch", mutates_args=(), **_OPTIONS)
def dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    rows: int,
    experts: int,
    topk: int,
    group: str,
    most_rows: int,
    most_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [R, H] and row_probs [R], with R as place() says."""
    own, route = _placed(ids, probs, x.shape[1], experts, topk, group, (most_rows, most_tokens))
    out, row_probs = to_rows(own, route, x, with_probs=True)
    if row_probs is None or out.shape[0] != rows:
        raise RuntimeError(f"rows: {rows}; the routing has {out.shape[0]}")
    return out, row_probs


@dispatch.register_fake
def _(x, ids, probs, rows, experts, topk, group, most_rows, most_tokens):  # type: ignore[no-untyped-def]
    return x.new_empty((rows, x.shape[1])), probs.new_empty(rows)


@torch.library.custom_op("uniep::combine", mutates_args=(), **_OPTIONS)
def combine(
    rows: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    row_dprobs: torch.Tensor | None,
    experts: int,
    topk: int,
    group: str,
    most_rows: int,
    most_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [T, H] and, with row_dprobs [R], dprobs in the shape of probs; else no elements."""
    own, route = _placed(ids, probs, rows.shape[1], experts, topk, group, (most_rows, most_tokens))
    y, dprobs = to_tokens(own, route, rows, row_dprobs)
    return y, probs.new_empty(0) if dprobs is None else dprobs


@combine.register_fake
def _(rows, ids, probs, row_dprobs, experts, topk, group, most_rows, most_tokens):  # type: ignore[no-untyped-def]
    dprobs = probs.new_empty(0 if row_dprobs is None else probs.shape)
    return rows.new_empty((ids.shape[0], rows.shape[1])), dprobs


def _keep_for_dispatch(
    ctx: typing.Any, inputs: tuple[typing.Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    never_recompute(output)
    _, ids, probs, _, *ctx.options = inputs
    ctx.save_for_backward(ids, probs)


def _differentiate_dispatch(ctx: typing.Any, drows: torch.Tensor, drow_probs: torch.Tensor) -> tuple[typing.Any, ...]:
    ids, probs = ctx.saved_tensors
    dx, dprobs = torch.ops.uniep.combine(drows, ids, probs, drow_probs, *ctx.options)
    return dx, None, dprobs, *[None] * (1 + len(ctx.options))


def _keep_for_combine(
    ctx: typing.Any, inputs: tuple[typing.Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    never_recompute(output)
    rows, ids, probs, _, *ctx.options = inputs
    ctx.count = rows.shape[0]
    ctx.save_for_backward(ids, probs)


def _differentiate_combine(ctx: typing.Any, dy: torch.Tensor, _: object) -> tuple[typing.Any, ...]:
    ids, probs = ctx.saved_tensors
    drows, _ = torch.ops.uniep.dispatch(dy, ids, probs, ctx.count, *ctx.options)
    return drows, *[None] * (3 + len(ctx.options))


dispatch.register_autograd(_differentiate_dispatch, setup_context=_keep_for_dispatch)
combine.register_autograd(_differentiate_combine, setup_context=_keep_for_combine)
