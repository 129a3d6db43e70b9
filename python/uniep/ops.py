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
    group: str,
    schedules: tuple[str, str],
    capacity: tuple[int, int] | None,
    save: str,
    topk: int,
    apart: bool,
    activation: str,
    router_weight: str,
    main_grad: list[torch.Tensor],
    marks: bool,
    keep: bool,
) -> torch.Tensor:
    """y of uniep::forward."""
    limits = (0, 0) if capacity is None else capacity
    options = group, *schedules, *limits, save, topk, apart, activation, router_weight, marks
    y, _ = torch.ops.uniep.forward(x, ids, probs, w1, w2, main_grad, *options, keep)
    return typing.cast(torch.Tensor, y)


def _call(
    x: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
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
    numerics = read_numerics(activation, router_weight)
    return Call(own, shape, texts, topk, limits, save, apart, list(w1), list(w2), numerics=numerics)


@torch.library.custom_op("uniep::forward", mutates_args=())
def forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    main_grad: Sequence[torch.Tensor],
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
    marks: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and the bytes that backward needs: none unless `keep`, and with save="recompute".

    `rows` and `tokens` are the capacity, both 0 where there is none. `apart`: w1 is all gates, then all ups.
    `main_grad`, that of w1 and behind it that of w2, or nothing, is what backward adds to; it is not read here. With
    `marks` the weights are told so (grad_added_to_main_grad), and their gradients are zero; else they have none.
    """
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(x, w1, w2, group, schedules, limits, save, topk, apart, *numerics)
    y, saved, _ = call.run(x, ids, probs, (*w1, *w2), keep and save != "recompute")
    return y, saved if keep and save != "recompute" else x.new_empty(0, dtype=torch.uint8)


@forward.register_fake
def _(  # type: ignore[no-untyped-def]
    x,
    ids,
    probs,
    w1,
    w2,
    main_grad,
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
    marks,
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


@torch.library.custom_op("uniep::backward", mutates_args=())
def backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
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
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """dx, dprobs, dw1 and dw2, the last two without entries where they are not needed; x with save="redispatch"."""
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(dy, w1, w2, group, schedules, limits, save, topk, apart, *numerics)
    dw1 = [torch.empty_like(weight) for weight in w1] if need_w1 else []
    dw2 = [torch.empty_like(weight) for weight in w2] if need_w2 else []
    route = call.place(ids, probs)
    dx, dprobs = call.run_backward(route, saved, x, dy, (*w1, *w2), dw1 or None, dw2 or None)
    return dx, dprobs.view(probs.shape), dw1, dw2


@backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dy,
    x,
    ids,
    probs,
    w1,
    w2,
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
    dw1 = [torch.empty_like(weight) for weight in w1] if need_w1 else []
    dw2 = [torch.empty_like(weight) for weight in w2] if need_w2 else []
    return dy.new_empty(dy.shape), probs.new_empty(probs.shape), dw1, dw2


@torch.library.custom_op("uniep::backward_into", mutates_args=("main_grad1", "main_grad2"))
def backward_into(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    saved: torch.Tensor,
    main_grad1: Sequence[torch.Tensor],
    main_grad2: Sequence[torch.Tensor],
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
    marks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dprobs; adds dw1 and dw2 to fp32 tensors, or not where there are none. Otherwise as uniep::backward."""
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(dy, w1, w2, group, schedules, limits, save, topk, apart, *numerics)
    call = call._replace(main_grad=(list(main_grad1), list(main_grad2)))
    route = call.place(ids, probs)
    dx, dprobs = call.run_backward(route, saved, x, dy, (*w1, *w2), main_grad1 or None, main_grad2 or None)
    for weights, sums in ((w1, main_grad1), (w2, main_grad2)):
        for weight in weights if marks and sums else ():
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return dx, dprobs.view(probs.shape)


@backward_into.register_fake
def _(  # type: ignore[no-untyped-def]
    dy,
    x,
    ids,
    probs,
    w1,
    w2,
    saved,
    main_grad1,
    main_grad2,
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
    marks,
):
    return dy.new_empty(dy.shape), probs.new_empty(probs.shape)


def _keep_for_backward(
    ctx: typing.Any, inputs: tuple[typing.Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, ids, probs, w1, w2, main_grad, *ctx.options = inputs
    save = ctx.options[5]
    ctx.experts = len(w1)
    ctx.main_grad = main_grad
    _allow_changes(main_grad)
    ctx.save_for_backward(None if save == "keep" else x, ids, probs, output[1], *w1, *w2)


def _allow_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Lets a graph take these to its backward though others add to them before it, as that of another micro-batch."""
    try:
        from torch.fx.experimental.proxy_tensor import _get_proxies
    except ImportError:  # an older torch, whose graphs refuse such a backward
        return
    for tensor in tensors:
        for proxy in _get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def _differentiate(ctx: typing.Any, dy: torch.Tensor, _: torch.Tensor | None) -> tuple[typing.Any, ...]:
    x, ids, probs, saved, *weights = ctx.saved_tensors
    w1, w2 = weights[: ctx.experts], weights[ctx.experts :]
    *options, marks, _ = ctx.options
    if options[5] == "recompute":
        again = *options[:5], "keep", *options[6:], False, True
        _, saved = torch.ops.uniep.forward(x, ids, probs, w1, w2, [], *again)
        x = None
    need = ctx.needs_input_grad
    need1, need2 = any(need[3]), any(need[4])
    given = dy, x, ids, probs, w1, w2, saved
    if ctx.main_grad:
        sums1 = ctx.main_grad[: ctx.experts] if need1 else []
        sums2 = ctx.main_grad[ctx.experts :] if need2 else []
        dx, dprobs = torch.ops.uniep.backward_into(*given, sums1, sums2, *options, marks)
        dw1 = [torch.zeros_like(one) for one in w1] if marks and need1 else [None] * len(w1)
        dw2 = [torch.zeros_like(one) for one in w2] if marks and need2 else [None] * len(w2)
    else:
        dx, dprobs, dw1, dw2 = torch.ops.uniep.backward(*given, *options, need1, need2)
        dw1, dw2 = dw1 if need1 else [None] * len(w1), dw2 if need2 else [None] * len(w2)
    return dx, None, dprobs, dw1, dw2, [None] * len(ctx.main_grad), *[None] * len(ctx.options)


forward.register_autograd(_differentiate, setup_context=_keep_for_backward)
