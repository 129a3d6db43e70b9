"""Megatron's routing and parameters as moe() takes them."""

from __future__ import annotations

import math
import typing

import torch

from uniep.rows import ROW_ALIGNMENT, padded


def capacity_of_factor(factor: float | None, tokens: int, topk: int, local_experts: int) -> tuple[int, int] | None:
    """moe()'s capacity of Megatron's moe_expert_rank_capacity_factor, which counts rows without padding."""
    if factor is None:
        return None
    rows = math.ceil(tokens * topk * factor)
    return padded(rows) + ROW_ALIGNMENT * local_experts, max(tokens, 1)


def expert_biases(experts: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The biases of Megatron's experts with add_bias_linear: [2 I] and [H] of each in order."""
    local = getattr(experts, "local_experts", None)
    if local is not None:
        return [one.linear_fc1.bias for one in local], [one.linear_fc2.bias for one in local]
    layers = experts.linear_fc1, experts.linear_fc2
    count = typing.cast(int, experts.num_local_experts)
    if not all(
        isinstance(getattr(one, f"bias{expert}", None), torch.nn.Parameter) for one in layers for expert in range(count)
    ):
        raise ValueError(
            f"experts: {type(experts).__name__} with one bias of all experts; UniEP serves a bias{{i}} of each"
        )
    first, second = ([getattr(layer, f"bias{expert}") for expert in range(count)] for layer in layers)
    return first, second


def expert_weights(experts: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters of Megatron's experts: [2 I, H] and [H, I] of each in order, of SequentialMLP or TEGroupedMLP; or
    one [El, 2 I, H] and one [El, H, I], of TEGroupedMLP with moe_single_grouped_weight."""
    local = getattr(experts, "local_experts", None)
    if local is not None:
        return [one.linear_fc1.weight for one in local], [one.linear_fc2.weight for one in local]
    count = getattr(experts, "num_local_experts", 0)
    if count and all(hasattr(experts.linear_fc1, f"weight{expert}") for expert in range(count)):
        layers = experts.linear_fc1, experts.linear_fc2
        first, second = ([getattr(layer, f"weight{expert}") for expert in range(count)] for layer in layers)
        return first, second
    found = (getattr(getattr(experts, name, None), "weight", None) for name in ("linear_fc1", "linear_fc2"))
    single = [one for one in found if isinstance(one, torch.nn.Parameter) and one.shape[:1] == (count,)]
    if count and len(single) == 2:
        return single[:1], single[1:]
    raise ValueError(
        f"experts: {type(experts).__name__}; UniEP serves SequentialMLP, and TEGroupedMLP with weight{{i}} or with one "
        "weight of all experts"
    )
