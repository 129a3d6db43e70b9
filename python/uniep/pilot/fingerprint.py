"""A number that stands for the bits of a tensor, made on its device: gigabytes need not travel to the host."""

from __future__ import annotations

import torch

_CHUNK = 1 << 24  # words at a time, for memory
_PLACE, _MIX = -7046029254386353131, (-4658895280553007687, -7723592293110705685)  # of splitmix64, odd


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """int64, a scalar on the tensor's device: another bit or another place of an element gives another number.

    Sums of integers, so the order of additions and the kind of device do not matter.
    """
    halves = tensor.detach().contiguous().view(-1).view(torch.int16)
    if len(halves) % 4 or halves.storage_offset() % 4:
        halves = torch.nn.functional.pad(halves, (0, -len(halves) % 4)).clone()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = halves.view(torch.int64)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        places = torch.arange(begin, begin + len(part), dtype=torch.int64, device=tensor.device)
        mixed = part + (places + 1) * _PLACE
        for factor in _MIX:
            mixed = (mixed ^ (mixed >> 31)) * factor
        total += (mixed ^ (mixed >> 29)).sum()
    return total
