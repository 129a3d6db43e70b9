"""Weights and their gradients as the library takes them."""

from __future__ import annotations

import ctypes
import typing
from collections.abc import Sequence

import torch

# Addresses of the experts' tensors: one tensor, or an array with one an expert; the same of ups that lie apart from
# their gates; and what keeps the arrays.
Weights = tuple[int | None, int | None, int | None, int | None, typing.Any]
NO_WEIGHTS: Weights = (None, None, None, None, None)


def addresses(tensors: Sequence[torch.Tensor] | None, apart: bool = False, dimensions: int = 3) -> Weights:
    """`apart`: the first half of the tensors are gates, the second the matching ups. `dimensions`: of a tensor over all
    experts; 2 of biases."""
    if not tensors:
        return NO_WEIGHTS
    if not apart and len(tensors) == 1 and tensors[0].dim() == dimensions:
        return tensors[0].data_ptr(), None, None, None, None
    if apart:
        half = len(tensors) // 2
        gate, up = addresses(tensors[:half]), addresses(tensors[half:])
        return gate[0], gate[1], up[0], up[1], (gate[4], up[4])
    array = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
    return None, ctypes.addressof(array), None, None, array
