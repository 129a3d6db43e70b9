"""UniEPMoELayer: Megatron-core's MoELayer with its routed experts run by UniEP."""

from __future__ import annotations

import collections.abc
import contextlib
import typing

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.moe_layer import MoELayer

from uniep.layer_stats import name_layer
from uniep.megatron.experts import Experts
from uniep.megatron.flags import refuse, turn_off_not_needed
from uniep.switch import is_disabled

STAYS = "Megatron-core's own MoE layers run"


class _PassThrough:
    """In the place of the token dispatcher: rows stay where they are, and the routing is kept for the experts."""

    shared_experts = None
    # What Megatron's graphs that end behind dispatch_preprocess() return beside its results, and what is set again from
    # it behind a replay.
    cudagraph_attrs = ("routing_map",)

    def __init__(self, config: typing.Any) -> None:
        self.config = config
        self.routing_map: torch.Tensor | None = None
        self.hidden_shape: torch.Size | None = None
        self.valid_cudagraph_attrs: list[str] | None = None  # Megatron's to set

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        # Megatron then frees the norm's output behind the graph, and takes what that returns for the dispatcher's own.
        if is_graph_capturing() and "layernorm" in (self.config.recompute_modules or ()):
            rows = rows.clone()
        return rows, probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.hidden_shape is not None
        return hidden_states.view(self.hidden_shape)


@contextlib.contextmanager
def built_for_uniep(config: typing.Any) -> collections.abc.Iterator[None]:
    """In it MoELayer is built without what UniEP does itself. Its dispatcher, which is thrown away, needs no package.

    Raises:
        ValueError: the configuration asks for what UniEP does not serve.
    """
    refuse(config)
    turn_off_not_needed(config)
    named, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "alltoall"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = named


def collection_of(arguments: tuple[typing.Any, ...], options: dict[str, typing.Any]) -> typing.Any:
    """The ProcessGroupCollection among MoELayer's arguments behind the configuration; None: parallel_state's groups."""
    return options.get("pg_collection", arguments[2] if len(arguments) > 2 else None)


class UniEPMoELayer(MoELayer):  # type: ignore[misc]
    """MoELayer whose routed experts run in UniEP; with UNIEP_DISABLE=1 as it is built, in Megatron-core.

    Args:
        uniep_options: `schedule` and `save` of moe(), `reserve_sms` of Group. The others are MoELayer's.

    Attributes:
        uniep_experts: Experts; None with UNIEP_DISABLE=1.

    Raises:
        ValueError: the configuration asks for what UniEP does not serve; the message says what to set.
    """

    def __init__(
        self,
        config: typing.Any,
        *arguments: typing.Any,
        uniep_options: dict[str, typing.Any] | None = None,
        **options: typing.Any,
    ) -> None:
        self.uniep_experts: Experts | None = None
        if is_disabled(STAYS):
            super().__init__(config, *arguments, **options)
            return
        with built_for_uniep(config):
            super().__init__(config, *arguments, **options)
        self._take_over(uniep_options or {}, collection_of(arguments, options))

    def _take_over(self, uniep_options: dict[str, typing.Any], collection: typing.Any) -> None:
        self.token_dispatcher = _PassThrough(self.config)
        self.uniep_experts = Experts(self.config, self.ep_group, self.experts, **uniep_options, collection=collection)

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        if self.uniep_experts is not None:
            kind = "mtp" if getattr(self, "is_mtp_layer", False) else "layer"  # they count from 1 both
            name_layer(typing.cast(torch.Tensor, self.uniep_experts.w2_0), f"{kind} {layer_number}")

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> typing.Any:
        if self.uniep_experts is None:
            return super().routed_experts_compute(hidden_states, probs)
        self.uniep_experts.parts.check_whole(self._modules.get("experts"))
        assert self.token_dispatcher.routing_map is not None
        routing_map = self.token_dispatcher.routing_map
        routing_map = routing_map.view(len(hidden_states), routing_map.shape[-1])
        return self.uniep_experts(hidden_states, probs.view(routing_map.shape), routing_map), None
