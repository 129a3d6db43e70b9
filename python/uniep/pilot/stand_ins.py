"""Norm and attention where Megatron-core has its own in Transformer Engine only. For all arms alike."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn.attention import SDPBackend, sdpa_kernel

_KINDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose gradients Megatron sums over the tensor-parallel ranks where it splits the sequence."""

    def __init__(self, config: typing.Any, hidden_size: int, eps: float = 1e-5, **_options: typing.Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(torch.nn.Module):
    """Causal attention; context-parallel ranks hold contiguous parts of the sequence and gather keys and values."""

    def __init__(
        self,
        config: typing.Any,
        *_arguments: typing.Any,
        softmax_scale: float | None = None,
        pg_collection: typing.Any = None,
        **_options: typing.Any,
    ) -> None:
        super().__init__()
        self.group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_arguments: typing.Any,
        **_options: typing.Any,
    ) -> torch.Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] to [S, B, heads D]."""
        begin = 0
        if self.group is not None:
            begin = dist.get_rank(self.group) * len(query)
            key, value = (gather_from_sequence_parallel_region(one, group=self.group) for one in (key, value))
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        mask = None
        if self.group is not None:
            steps = torch.arange(begin, begin + len(query), device=query.device)
            mask = torch.arange(len(key), device=query.device) <= steps[:, None]
        kinds = [SDPBackend.MATH] if torch.are_deterministic_algorithms_enabled() else _KINDS
        with sdpa_kernel(kinds):
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return y.permute(2, 0, 1, 3).flatten(2)
