"""Tensors whose memory the library may take as it is."""

from __future__ import annotations

import typing

import torch

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Of what an asynchronous collective gives, the tensor whose memory it is; others as they are."""
    if type(tensor) in _ORDINARY or not hasattr(tensor, "trigger_wait"):
        return tensor
    # Views of it are no ordinary tensors either, and trigger_wait() leaves autograd behind.
    return tensor.clone() if tensor.requires_grad else typing.cast(torch.Tensor, tensor.trigger_wait())


def check_ordinary(name: str, *tensors: torch.Tensor) -> None:
    """Raises ValueError where one has no memory of its own: a DTensor, or what an asynchronous collective gives."""
    for tensor in tensors:
        if type(tensor) in _ORDINARY:
            continue
        for gives in ("to_local", "trigger_wait"):
            if hasattr(tensor, gives):
                raise ValueError(
                    f"{name}: {type(tensor).__name__}; must be an ordinary tensor, such as {gives}() of it gives"
                )
