"""Backward that has no derivative of its own."""

from __future__ import annotations

import functools
import typing

import torch

_WORDS = b"uniep: higher derivatives are not there: a second backward through a gradient of these layers"


def differentiable_once(backward: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    """As torch's once_differentiable(), but a second derivative is an error also where the gradient that came in needs
    none, and would be left out in silence there."""

    @functools.wraps(backward)
    def once(ctx: typing.Any, *gradients: torch.Tensor) -> typing.Any:
        with torch.no_grad():
            outputs = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return outputs
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        error: typing.Any = torch._C._functions.DelayedError(_WORDS, len(several))
        refusing = error(*(None if one is None else one.detach().requires_grad_() for one in several))
        return refusing if isinstance(outputs, tuple) else refusing[0]

    return once
