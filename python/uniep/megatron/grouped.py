"""Transformer Engine's single grouped weight: a parameter without memory of its own, around that of all experts."""

from __future__ import annotations

import functools
import typing

import torch

from uniep.layer import main_grad_of
from uniep.layer_stats import name_layer


class _Memory(torch.autograd.Function):
    """The memory of a grouped parameter as a tensor [El, ...]; the gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: typing.Any, parameter: typing.Any, has_main_grad: bool) -> torch.Tensor:
        ctx.parameter = parameter if has_main_grad else None
        return typing.cast(torch.Tensor, parameter.rowwise_data.view(parameter.shape))

    @staticmethod
    def backward(ctx: typing.Any, gradient: torch.Tensor):  # type: ignore[no-untyped-def]
        if ctx.parameter is not None:
            ctx.parameter.grad_added_to_main_grad = True
        return gradient, None


def plain_weight(parameter: torch.nn.Parameter, name: str, has_main_grad: bool) -> torch.Tensor:
    """A parameter as moe() takes it: itself, or of a GroupedTensor what it holds.

    Args:
        name: in messages.
        has_main_grad: its gradient is added to main_grad, of the parameter.
    """
    if not hasattr(parameter, "rowwise_data"):
        return parameter
    memory: typing.Any = _Memory.apply(parameter, has_main_grad)  # type: ignore[no-untyped-call]
    if has_main_grad:
        memory.get_main_grad = functools.partial(main_grad_of, parameter, name)
    layer = getattr(parameter, "uniep_layer", None)
    if layer is not None:
        name_layer(memory, layer)
    return typing.cast(torch.Tensor, memory)
