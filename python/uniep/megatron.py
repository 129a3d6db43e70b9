"""Megatron-core's MoELayer with its experts run by UniEP.

Router, losses, shared experts, recomputation, parameters, optimizer and checkpoints stay Megatron's. Either

    spec = uniep.megatron.enable(get_gpt_layer_local_spec(...))

or, before the model is built, `uniep.megatron.patch()`.
"""

from __future__ import annotations

import functools
import typing

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from uniep.group import Group
from uniep.layer import moe


class _PassThrough:
    """In the place of the token dispatcher: rows stay where they are, and the routing is kept for the experts."""

    shared_experts = None

    def __init__(self, config: typing.Any) -> None:
        self.config = config
        self.routing_map: torch.Tensor | None = None
        self.hidden_shape: torch.Size | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.hidden_shape is not None
        return hidden_states.view(self.hidden_shape)


class _Experts(torch.nn.Module):
    """Calls moe() with the parameters of Megatron's experts.

    The parameters are registered here once more, so that what Megatron hangs on a module's forward happens, as waiting
    for gathered parameters; the experts' own forward is never called. State dicts have them once, by Megatron's names.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.ep_group, self.topk = layer.ep_group, layer.config.moe_router_topk
        self.main_grad = "param" if layer.config.gradient_accumulation_fusion else None
        self.schedule = "auto"
        first, second = expert_weights(layer.experts)
        self.count = len(first)
        for expert, (w1, w2) in enumerate(zip(first, second, strict=True)):
            self.register_parameter(f"w1_{expert}", w1)
            self.register_parameter(f"w2_{expert}", w2)

    def forward(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """hidden_states [T, H] bf16, probs [T, E], routing_map [T, E] bool to [T, H] bf16."""
        return moe(
            hidden_states,
            routing_map,
            probs.float(),
            [getattr(self, f"w1_{expert}") for expert in range(self.count)],
            [getattr(self, f"w2_{expert}") for expert in range(self.count)],
            topk=self.topk,
            group=Group(self.ep_group, device=hidden_states.device),
            schedule=self.schedule,
            main_grad=typing.cast(typing.Any, self.main_grad),
        )

    def _save_to_state_dict(self, *_: typing.Any) -> None:
        pass

    def _load_from_state_dict(self, *_: typing.Any) -> None:
        pass

    def sharded_state_dict(self, *_: typing.Any, **__: typing.Any) -> dict[str, typing.Any]:
        return {}


class UniEPMoELayer(MoELayer):  # type: ignore[misc]
    """MoELayer whose routed experts run in UniEP.

    Raises:
        ValueError: the configuration asks for what UniEP does not serve; the message says what to set.
    """

    def __init__(self, config: typing.Any, *arguments: typing.Any, **options: typing.Any) -> None:
        refuse(config)
        super().__init__(config, *arguments, **options)
        self._take_over()

    def _take_over(self) -> None:
        self.token_dispatcher = _PassThrough(self.config)
        self.uniep_experts = _Experts(self)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert self.token_dispatcher.routing_map is not None
        routing_map = self.token_dispatcher.routing_map.view(len(hidden_states), -1)
        return self.uniep_experts(hidden_states, probs.view(routing_map.shape), routing_map), None


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


# Name, whether a value is served, what to set.
_SERVED: list[tuple[str, typing.Callable[[typing.Any], bool], str]] = [
    ("expert_tensor_parallel_size", lambda value: value in (None, 1), "1"),
    ("params_dtype", lambda value: value == torch.bfloat16, "torch.bfloat16 (bf16=True)"),
    ("fp8", lambda value: not value, "None"),
    ("fp4", lambda value: not value, "None"),
    ("add_bias_linear", lambda value: not value, "False"),
    ("gated_linear_unit", bool, "True"),
    ("activation_func", lambda value: value is torch.nn.functional.silu, "torch.nn.functional.silu"),
    ("activation_func_clamp_value", lambda value: value is None, "None"),
    ("glu_linear_offset", lambda value: not value, "0.0"),
    ("moe_mlp_glu_interleave_size", lambda value: value is None, "None"),
    ("moe_pad_expert_input_to_capacity", lambda value: not value, "False"),
    ("moe_apply_probs_on_input", lambda value: not value, "False"),
    ("moe_shared_expert_overlap", lambda value: not value, "False"),
    ("moe_expert_rank_capacity_factor", lambda value: value is None, "None"),
    ("moe_single_grouped_weight", lambda value: not value, "False"),
    ("moe_paged_stash", lambda value: not value, "False"),
    ("overlap_moe_expert_parallel_comm", lambda value: not value, "False"),
    ("delay_wgrad_compute", lambda value: not value, "False"),
    ("overlap_dispatch_backward_with_experts_wgrad", lambda value: not value, "False"),
    ("transformer_impl", lambda value: value != "inference_optimized", "'local' or 'transformer_engine'"),
    (
        "offload_modules",
        lambda value: not {"expert_fc1", "moe_act", "fused_group_mlp"} & set(value or ()),
        "modules without expert_fc1, moe_act and fused_group_mlp",
    ),
    ("cuda_graph_modules", lambda value: not [one for one in value or () if "moe" in str(one)], "modules without moe"),
]


def refuse(config: typing.Any) -> None:
    """Raises ValueError for a TransformerConfig that asks for what UniEP does not serve."""
    for name, is_served, legal in _SERVED:
        if hasattr(config, name) and not is_served(getattr(config, name)):
            raise ValueError(f"{name}: {getattr(config, name)!r}; UniEP's layer needs {legal}")


def enable(spec: typing.Any) -> typing.Any:
    """Replaces MoELayer in the spec of a layer or of a block, in place, and gives it back.

    Raises:
        ValueError: there is no MoELayer in it.
    """
    if not sum(_enable_layer(layer) for layer in getattr(spec, "layer_specs", None) or [spec]):
        raise ValueError(
            f"spec: {type(spec).__name__} without a MoELayer; legal is the spec of a layer or a block with one"
        )
    return spec


def _enable_layer(spec: typing.Any) -> bool:
    submodules: typing.Any = getattr(spec, "submodules", None)
    mlp: typing.Any = getattr(submodules, "mlp", None)
    if isinstance(mlp, functools.partial) and mlp.func is MoELayer:
        submodules.mlp = functools.partial(UniEPMoELayer, *mlp.args, **mlp.keywords)
        return True
    if getattr(mlp, "module", None) is MoELayer:
        mlp.module = UniEPMoELayer
        return True
    return False


_original_init = MoELayer.__init__


def patch() -> None:
    """From now on every MoELayer that is built becomes a UniEPMoELayer, whoever imported the class."""

    @functools.wraps(_original_init)
    def init(self: typing.Any, config: typing.Any, *arguments: typing.Any, **options: typing.Any) -> None:
        replaced = type(self) is MoELayer
        if replaced:
            refuse(config)
        _original_init(self, config, *arguments, **options)
        if replaced:
            self.__class__ = UniEPMoELayer
            self._take_over()

    MoELayer.__init__ = init


def unpatch() -> None:
    """Undoes patch() for layers that are built later."""
    MoELayer.__init__ = _original_init
