"""The layer and its exchange as custom ops, which graphs of torch.compile hold.

An op is a pure function of tensors. So groups and schedules are strings, what forward keeps is one of its outputs, and
whatever needs a placement places anew: that is a function of the routing, and collective as the op itself. Results are
those of the functions that run outside of graphs, bit for bit.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch
from torch._library.fake_impl import allocate_size

from uniep.call import Call
from uniep.group import find_group
from uniep.numerics import is_gated, read_numerics


def run_forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: list[torch.Tensor],
    w2: list[torch.Tensor],
    b1: list[torch.Tensor],
    b2: list[torch.Tensor],
    group: str,
    schedules: tuple[str, str],
    capacity: tuple[int, int] | None,
    save: str,
    topk: int,
    apart: bool,
    activation: str,
    router_weight: str,
    keep: bool,
) -> torch.Tensor:
    """y of uniep::forward."""
    limits = (0, 0) if capacity is None else capacity
    options = group, *schedules, *limits, save, topk, apart, activation, router_weight
    y, _ = torch.ops.uniep.forward(x, ids, probs, w1, w2, b1, b2, *options, keep)
    return typing.cast(torch.Tensor, y)


def _call(
    x: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor],
    group: str,
    schedules: tuple[str, str],
    capacity: tuple[int, int],
    save: str,
    topk: int,
    apart: bool,
    activation: str,
    router_weight: str,
) -> Call:
    own = find_group(group)
    local = w1[0].shape[0] if w1[0].dim() == 3 else len(w1) // 2 if apart else len(w1)
    shape = x.shape[-1], w2[0].shape[-1], local * own.size
    texts = schedules[0].encode(), schedules[1].encode()
    limits = capacity if capacity[0] > 0 else None
    numerics = read_numerics(activation, router_weight, len(b1) > 0)
    options = texts, topk, limits, save, apart
    return Call(own, shape, *options, list(w1), list(w2), numerics=numerics, b1=list(b1), b2=list(b2))


@torch.library.custom_op("uniep::forward", mutates_args=())
def forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor],
    group: str,
    schedule: str,
    backward_schedule: str,
    rows: int,
    tokens: int,
    save: str,
    topk: int,
    apart: bool,
    activation: str,
    router_weight: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and the bytes that backward needs: none unless `keep`, and with save="recompute".

    `rows` and `tokens` are the capacity, both 0 where there is none. `apart`: w1 is all gates, then all ups.
    """
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(x, w1, w2, b1, b2, group, schedules, limits, save, topk, apart, *numerics)
    y, saved, _ = call.run(x, ids, probs, (*w1, *w2, *b1, *b2), keep and save != "recompute")
    return y, saved if keep and save != "recompute" else x.new_empty(0, dtype=torch.uint8)


@forward.register_fake
def _(  # type: ignore[no-untyped-def]
    x,
    ids,
    probs,
    w1,
    w2,
    b1,
    b2,
    group,
    schedule,
    backward_schedule,
    rows,
    tokens,
    save,
    topk,
    apart,
    activation,
    router_weight,
    keep,
):
    if not keep or save == "recompute":
        size: int | torch.SymInt = 0
    elif rows > 0 and find_group(group).transport == "native":
        size = _saved_bytes(rows, x.shape[-1], (2 if is_gated(activation) else 1) * w2[0].shape[-1], save)
    else:
        size = new_size()
    return x.new_empty(x.shape), x.new_empty(size, dtype=torch.uint8)


def new_size() -> torch.SymInt:
    """A size that depends on the routing, which new_dynamic_size() refuses to make in torch's default configuration."""
    context = torch.library.get_ctx()
    shapes = getattr(context, "_shape_env", None)
    if shapes is None or shapes.allow_dynamic_output_shape_ops:
        return context.new_dynamic_size()
    return typing.cast(torch.SymInt, allocate_size(shapes))  # type: ignore[no-untyped-call]


def _saved_bytes(rows: int, hidden: int, z_columns: int, save: str) -> int:
    """Bytes that forward keeps of so many rows, in pieces of 64."""
    pieces = [rows * z_columns * 2] + ([rows * hidden * 2] if save == "keep" else [])
    return sum(-(-piece // 64) * 64 for piece in pieces)


def _gradients(
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor],
    need_w1: bool,
    need_w2: bool,
) -> list[list[torch.Tensor]]:
    """Memory for the gradients of each; no entries where they are not made."""
    needs = need_w1, need_w2, need_w1, need_w2
    parts = zip((w1, w2, b1, b2), needs, strict=True)
    return [[torch.empty_like(one) for one in part] if need else [] for part, need in parts]


@torch.library.custom_op("uniep::backward", mutates_args=())
def backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor],
    saved: torch.Tensor,
    group: str,
    schedule: str,
    backward_schedule: str,
    rows: int,
    tokens: int,
    save: str,
    topk: int,
    apart: bool,
    activation: str,
    router_weight: str,
    need_w1: bool,
    need_w2: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """dx, dprobs, dw1, dw2, db1 and db2; x with save="redispatch".

    Those of w1 and b1 have no entries where neither is needed, those of w2 and b2 likewise.
    """
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(dy, w1, w2, b1, b2, group, schedules, limits, save, topk, apart, *numerics)
    dw1, dw2, db1, db2 = _gradients(w1, w2, b1, b2, need_w1, need_w2)
    route = call.place(ids, probs)
    dx, dprobs = call.run_backward(route, saved, x, dy, (*w1, *w2, *b1, *b2), dw1 or None, dw2 or None, db1, db2)
    return dx, dprobs.view(probs.shape), dw1, dw2, db1, db2


@backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dy,
    x,
    ids,
    probs,
    w1,
    w2,
    b1,
    b2,
    saved,
    group,
    schedule,
    backward_schedule,
    rows,
    tokens,
    save,
    topk,
    apart,
    activation,
    router_weight,
    need_w1,
    need_w2,
):
    dw1, dw2, db1, db2 = _gradients(w1, w2, b1, b2, need_w1, need_w2)
    return dy.new_empty(dy.shape), probs.new_empty(probs.shape), dw1, dw2, db1, db2


def _keep_for_backward(
    ctx: typing.Any, inputs: tuple[typing.Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, ids, probs, w1, w2, b1, b2, *ctx.options = inputs
    save = ctx.options[5]
    ctx.counts = len(w1), len(w2), len(b1), len(b2)
    ctx.save_for_backward(None if save == "keep" else x, ids, probs, output[1], *w1, *w2, *b1, *b2)


def _differentiate(ctx: typing.Any, dy: torch.Tensor, _: torch.Tensor | None) -> tuple[typing.Any, ...]:
    x, ids, probs, saved, *weights = ctx.saved_tensors
    parts = [[weights.pop(0) for _ in range(count)] for count in ctx.counts]
    options = ctx.options[:-1]
    if options[5] == "recompute":
        _, saved = torch.ops.uniep.forward(x, ids, probs, *parts, *options[:5], "keep", *options[6:], True)
        x = None
    need = [any(one) for one in ctx.needs_input_grad[3:7]]
    made = need[0] or need[2], need[1] or need[3]  # those of w1 and b1 together, and those of w2 and b2
    dx, dprobs, *gradients = torch.ops.uniep.backward(dy, x, ids, probs, *parts, saved, *options, *made)
    returned = [
        gradient if wanted else [None] * count
        for gradient, wanted, count in zip(gradients, need, ctx.counts, strict=True)
    ]
    return dx, None, dprobs, *returned, *[None] * len(ctx.options)


forward.register_autograd(_differentiate, setup_context=_keep_for_backward)
