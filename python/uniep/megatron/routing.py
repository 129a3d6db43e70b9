"""Megatron's routing and parameters as moe() takes them."""

from __future__ import annotations

import math

import torch

_ROW_ALIGNMENT = 128


def capacity_of_factor(factor: float | None, tokens: int, topk: int, local_experts: int) -> tuple[int, int] | None:
    """moe()'s capacity of Megatron's moe_expert_rank_capacity_factor, which counts rows without padding."""
    if factor is None:
        return None
    rows = math.ceil(tokens * topk * factor)
    padded = -(-rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return padded + _ROW_ALIGNMENT * local_experts, max(tokens, 1)


def expert_weights(experts: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters [2 I, H] and [H, I] of Megatron's experts, in order: SequentialMLP's or TEGroupedMLP's."""
    local = getattr(experts, "local_experts", None)
    if local is not None:
        return [one.linear_fc1.weight for one in local], [one.linear_fc2.weight for one in local]
    count = getattr(experts, "num_local_experts", 0)
    if count and all(hasattr(experts.linear_fc1, f"weight{expert}") for expert in range(count)):
        layers = experts.linear_fc1, experts.linear_fc2
        first, second = ([getattr(layer, f"weight{expert}") for expert in range(count)] for layer in layers)
        return first, second
    raise ValueError(
        f"experts: {type(experts).__name__}; UniEP serves SequentialMLP, and TEGroupedMLP with weight{{i}}"
    )
