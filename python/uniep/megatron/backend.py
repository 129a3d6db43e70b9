"""The plugin for `MegakernelBackend`, which is on Megatron-LM's main branch and in no release.

There a layer whose configuration names a megakernel gives the routing's result to a module with
`forward(hidden_states, probs, routing_map)`. Megatron's factory, build_megakernel_backend(), knows the names of its own
backends only; UniEPBackend takes its arguments, so it can stand in the factory's place.
"""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist

from uniep.megatron.experts import Experts
from uniep.megatron.flags import not_needed, refuse
from uniep.switch import is_disabled


class UniEPBackend(Experts):
    """Routed experts by UniEP, and what Megatron's shared experts give added to it.

    The shared experts are called as a module, and stay the layer's: they are no child of this one.

    Args:
        config: TransformerConfig.
        ep_group: the expert-parallel process group.
        routed_experts: Megatron's SequentialMLP or TEGroupedMLP.
        shared_experts: [..., H] to [..., H], or None.
        num_local_experts: El, of this rank.
        schedule: of uniep.moe(): text, or two, for forward and backward.
        save: of uniep.moe(): "keep", "redispatch", "rows" or "recompute".
        reserve_sms: of uniep.Group, a number of SMs or "auto".

    Raises:
        ValueError: the configuration asks for what UniEP does not serve, a flag is on that UniEPMoELayer turns
            off before Megatron builds its experts, or routed_experts are not num_local_experts.
    """

    def __init__(
        self,
        *,
        config: typing.Any,
        ep_group: dist.ProcessGroup,
        routed_experts: torch.nn.Module,
        shared_experts: torch.nn.Module | None,
        num_local_experts: int,
        schedule: str | tuple[str, str] = "auto",
        save: str = "keep",
        reserve_sms: int | str = "auto",
    ) -> None:
        if is_disabled("UniEPBackend can not be built"):
            raise ValueError(
                "UNIEP_DISABLE: 1; there is no layer of Megatron's behind UniEPBackend: let the configuration name no "
                "megakernel"
            )
        refuse(config)
        for name in not_needed(config):
            raise ValueError(f"{name}: True; UniEPBackend needs False, since Megatron has built its experts by it")
        super().__init__(config, ep_group, routed_experts, schedule, save, reserve_sms)
        if self.count != num_local_experts:
            raise ValueError(f"num_local_experts: {num_local_experts}; routed_experts have {self.count}")
        self._shared = (shared_experts,)  # a tuple, so that it is not registered

    def forward(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., H] bf16, probs [T, E], routing_map [T, E] bool to [..., H] bf16."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing_map = routing_map.view(len(rows), routing_map.shape[-1])
        y = super().forward(rows, probs.view(routing_map.shape), routing_map).view(hidden_states.shape)
        shared = self._shared[0]
        return y if shared is None else y + shared(hidden_states)
