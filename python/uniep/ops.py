"""The layer and its exchange as custom ops, which graphs of torch.compile hold.

An op is a pure function of tensors. So groups and schedules are strings, what forward keeps is one of its outputs, and
whatever needs a placement places anew: that is a function of the routing, and collective as the op itself. Results are
those of the functions that run outside of graphs, bit for bit.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Sequence

import torch
from torch._library.fake_impl import allocate_size

from uniep.addresses import check_apart
from uniep.call import Call
from uniep.group import find_group
from uniep.numerics import is_gated, read_numerics
from uniep.schedules import SAVES


def run_forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: list[torch.Tensor],
    w2: list[torch.Tensor],
    b1: list[torch.Tensor],
    b2: list[torch.Tensor],
    main_grad: list[torch.Tensor],
    group: str,
    schedules: tuple[str, str],
    capacity: tuple[int, int] | None,
    save: str,
    topk: int,
    apart: bool,
    activation: str,
    router_weight: str,
    marks: bool,
    keep: bool,
) -> torch.Tensor:
    """y of uniep::forward."""
    limits = (0, 0) if capacity is None else capacity
    options = group, *schedules, *limits, save, topk, apart, activation, router_weight, marks
    y, _ = torch.ops.uniep.forward(x, ids, probs, w1, w2, b1, b2, main_grad, *options, keep)
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
    counts = len(w1), len(w2), len(b1), len(b2)
    layer = getattr(w2[0], "uniep_layer", "")
    return Call(own, shape, *options, counts, numerics=numerics, layer=layer, places_anew=True)


@torch.library.custom_op("uniep::forward", mutates_args=())
def forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor],
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
    """y, and the bytes that backward needs: none unless `keep`.

    `rows` and `tokens` are the capacity, both 0 where there is none. `apart`: w1 is all gates, then all ups.
    `main_grad`, those of w1, w2, b1 and b2 behind each other, or nothing, is what backward adds to; it is not read
    here. With `marks` the weights are told so (grad_added_to_main_grad), and their gradients are zero; else they have
    none.
    """
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(x, w1, w2, b1, b2, group, schedules, limits, save, topk, apart, *numerics)
    call = call._replace(places_anew=keep)  # else there is no backward
    y, saved, _ = call.run(x, ids, probs, (*w1, *w2, *b1, *b2), keep)
    return y, saved if keep else x.new_empty(0, dtype=torch.uint8)


@forward.register_fake
def _(  # type: ignore[no-untyped-def]
    x,
    ids,
    probs,
    w1,
    w2,
    b1,
    b2,
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
    if not _may_be_captured(group, rows):
        size: int | torch.SymInt = new_size()
    elif not keep or save == "recompute":  # nothing is kept
        size = 0
    else:
        size = _saved_bytes(rows, x.shape[-1], (2 if is_gated(activation) else 1) * w2[0].shape[-1], save)
    return x.new_empty(x.shape), x.new_empty(size, dtype=torch.uint8)


def _may_be_captured(group: str, rows: int) -> bool:
    """Whether CUDA graphs hold the calls. Of others each op has an output of a size that nobody knows before, around
    which Inductor parts its CUDA graphs."""
    return rows > 0 and find_group(group).transport == "native"


def new_size() -> torch.SymInt:
    """A size that depends on the routing, which new_dynamic_size() refuses to make in torch's default configuration."""
    context = torch.library.get_ctx()
    shapes = getattr(context, "_shape_env", None)
    if shapes is None or shapes.allow_dynamic_output_shape_ops:
        return context.new_dynamic_size()
    return typing.cast(torch.SymInt, allocate_size(shapes))  # type: ignore[no-untyped-call]


def _saved_bytes(rows: int, hidden: int, z_columns: int, save: str) -> int:
    """Bytes that forward keeps of so many rows, in pieces of 64."""
    way = SAVES[save]
    pieces = [rows * z_columns * 2] * way.keeps_z + [rows * hidden * 2] * (not way.sends_x)
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
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    list[torch.Tensor],
    list[torch.Tensor],
    list[torch.Tensor],
    list[torch.Tensor],
    torch.Tensor,
]:
    """dx, dprobs, dw1, dw2, db1, db2, and no elements; x with save="redispatch" and "recompute".

    Those of w1 and b1 have no entries where neither is needed, those of w2 and b2 likewise.
    """
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(dy, w1, w2, b1, b2, group, schedules, limits, save, topk, apart, *numerics)
    route = call.place(ids, probs)
    stand_in = [list(w1) if need_w1 else [], list(w2) if need_w2 else [], list(b1), list(b2)]
    made, lacking = call.made(lambda: _gradients(w1, w2, b1, b2, need_w1, need_w2), stand_in)
    dw1, dw2, db1, db2 = made
    given = saved, x, dy, (*w1, *w2, *b1, *b2), dw1 or None, dw2 or None, db1, db2
    dx, dprobs = call.run_backward(route, *given, lacking=lacking)
    return dx, dprobs.view(probs.shape), dw1, dw2, db1, db2, dy.new_empty(0)


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
    return dy.new_empty(dy.shape), probs.new_empty(probs.shape), dw1, dw2, db1, db2, _nothing(dy, group, rows)


def _nothing(dy: torch.Tensor, group: str, rows: int) -> torch.Tensor:
    """The last output of a backward, in a trace."""
    return dy.new_empty(0 if _may_be_captured(group, rows) else new_size())


@torch.library.custom_op("uniep::backward_into", mutates_args=("sums1", "sums2", "bias_sums1", "bias_sums2"))
def backward_into(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor],
    saved: torch.Tensor,
    sums1: Sequence[torch.Tensor],
    sums2: Sequence[torch.Tensor],
    bias_sums1: Sequence[torch.Tensor],
    bias_sums2: Sequence[torch.Tensor],
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dprobs and no elements; adds dw1, dw2, db1 and db2 to fp32 tensors, or not where there are none. Otherwise as
    uniep::backward."""
    schedules, limits, numerics = (schedule, backward_schedule), (rows, tokens), (activation, router_weight)
    call = _call(dy, w1, w2, b1, b2, group, schedules, limits, save, topk, apart, *numerics)
    parts, sums = (w1, w2, b1, b2), (sums1, sums2, bias_sums1, bias_sums2)
    # The library makes those of w1 and b1 together, and those of w2 and b2: also where one of the two is not wanted.
    made = [
        one or [torch.zeros_like(weight, dtype=torch.float32) for weight in (part if partner else ())]
        for part, one, partner in zip(parts, sums, (*sums[2:], *sums[:2]), strict=True)
    ]
    for name, one in zip(("w1", "w2", "b1", "b2"), made, strict=True):
        check_apart(one, name)
    call = call._replace(main_grad=tuple(list(one) for one in made))
    route = call.place(ids, probs)
    dx, dprobs = call.run_backward(
        route, saved, x, dy, (*w1, *w2, *b1, *b2), made[0] or None, made[1] or None, made[2], made[3]
    )
    for part, one in zip(parts, sums, strict=True):
        for weight in part if marks and one else ():
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return dx, dprobs.view(probs.shape), dy.new_empty(0)


@backward_into.register_fake
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
    sums1,
    sums2,
    bias_sums1,
    bias_sums2,
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
    return dy.new_empty(dy.shape), probs.new_empty(probs.shape), _nothing(dy, group, rows)


def _split(tensors: Sequence[torch.Tensor], counts: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """So many tensors of each, from those of all behind each other."""
    rest = iter(tensors)
    return [list(itertools.islice(rest, count)) for count in counts]


def _keep_for_backward(
    ctx: typing.Any, inputs: tuple[typing.Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, ids, probs, w1, w2, b1, b2, main_grad, *ctx.options = inputs
    save = ctx.options[5]
    ctx.counts = len(w1), len(w2), len(b1), len(b2)
    ctx.main_grad = main_grad
    _allow_changes(main_grad)
    never_recompute(output)
    ctx.save_for_backward(x if SAVES[save].sends_x else None, ids, probs, output[1], *w1, *w2, *b1, *b2)


def never_recompute(outputs: Sequence[torch.Tensor]) -> None:
    """Of a collective op in a graph. Under activation_memory_budget a partitioner may let backward make it again, by
    sizes that differ from rank to rank; a checkpoint's own policy stays."""
    try:
        from torch.fx.experimental.proxy_tensor import _get_proxies
        from torch.utils.checkpoint import CheckpointPolicy
    except ImportError:  # an older torch
        return
    for output in outputs:
        for proxy in _get_proxies(output):
            for node in (proxy.node, *proxy.node.all_input_nodes):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


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
    parts = _split(weights, ctx.counts)
    *options, marks, _ = ctx.options
    need = [any(one) for one in ctx.needs_input_grad[3:7]]
    given = dy, x, ids, probs, *parts, saved
    if ctx.main_grad:
        all_sums = _split(ctx.main_grad, ctx.counts)
        sums = [one if wanted else [] for one, wanted in zip(all_sums, need, strict=True)]
        dx, dprobs, _ = torch.ops.uniep.backward_into(*given, *sums, *options, marks)
        gradients = [
            [torch.zeros_like(one) for one in part] if marks and wanted else [None] * len(part)
            for part, wanted in zip(parts, need, strict=True)
        ]
    else:
        made = need[0] or need[2], need[1] or need[3]  # those of w1 and b1 together, and those of w2 and b2
        dx, dprobs, *gradients, _ = torch.ops.uniep.backward(*given, *options, *made)
        gradients = [
            one if wanted else [None] * len(part) for one, wanted, part in zip(gradients, need, parts, strict=True)
        ]
    return dx, None, dprobs, *gradients, [None] * len(ctx.main_grad), *[None] * len(ctx.options)


forward.register_autograd(_differentiate, setup_context=_keep_for_backward)
