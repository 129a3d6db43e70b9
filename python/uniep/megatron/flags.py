"""Which of Megatron-core's flags UniEP's layer does not serve. docs/megatron.md has the same table; a test compares."""

from __future__ import annotations

import logging
import typing

import torch
from megatron.core.activations import quick_gelu, squared_relu


class Flag(typing.NamedTuple):
    """A field of TransformerConfig that is refused for some values. Not every version of Megatron-core has it."""

    name: str
    is_served: typing.Callable[[typing.Any, typing.Any], bool]  # of the value and the configuration
    legal: str  # what to set


def _is_off(value: typing.Any, _config: typing.Any) -> bool:
    return not value


def _is_unset(value: typing.Any, _config: typing.Any) -> bool:
    return value is None


_EXPERTS_MODULES = {"expert_fc1", "moe_act", "fused_group_mlp"}


def _experts_are_not_offloaded(modules: typing.Any, config: typing.Any) -> bool:
    is_on = getattr(config, "fine_grained_activation_offloading", False)
    return not is_on or not _EXPERTS_MODULES & set(modules or ())


_BEFORE_EXPERTS = {"moe_router", "moe_preprocess"}


def _graphs_leave_experts_out(modules: typing.Any, config: typing.Any) -> bool:
    """Whether graphs are captured of nothing behind the router. No modules: the whole layer."""
    if modules is None:  # another version's name of the field
        return True
    given = modules.replace(",", " ").split() if isinstance(modules, str) else modules
    names = [str(getattr(one, "name", one)) for one in given]
    if any("moe" in name and name not in _BEFORE_EXPERTS for name in names):
        return False
    if getattr(config, "cuda_graph_impl", None) not in ("local", "transformer_engine"):
        return True
    return bool(names) and not any("full" in name for name in names)


def activation_of(config: typing.Any) -> str | None:
    """moe()'s activation of a TransformerConfig; None where UniEP has no such one."""
    function, gated = config.activation_func, config.gated_linear_unit
    limit = getattr(config, "activation_func_clamp_value", None) or 0.0
    offset = getattr(config, "glu_linear_offset", None) or 0.0
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    if getattr(config, "use_te_activation_func", False):  # without clamp and offset; silu without a gate becomes relu
        return {silu: "swiglu", gelu: "geglu_tanh"}.get(function) if gated else None
    if not gated:
        return None if limit or offset else {squared_relu: "relu2", silu: "silu"}.get(function)
    if function is quick_gelu:
        return f"swiglu:alpha=1.702,limit={limit},up_offset={offset}"
    if function is silu and (limit or offset):
        # Megatron's fused function leaves the clamp out. So do Transformer Engine's fused operations, and whether they
        # run is not known here.
        if getattr(config, "bias_activation_fusion", False):
            return "swiglu"
        fused = getattr(config, "use_transformer_engine_op_fuser", False)
        return None if fused else f"swiglu:alpha=1,limit={limit},up_offset={offset}"
    if function is silu:
        return "swiglu"
    return None if limit or offset else {gelu: "geglu_erf"}.get(function)


def _is_activation(_value: typing.Any, config: typing.Any) -> bool:
    return activation_of(config) is not None


FLAGS = [
    Flag("expert_tensor_parallel_size", lambda value, _: value in (None, 1), "1"),
    Flag("expert_gtp_weight_remat_size", lambda value, _: value == 1, "1 (expert_tensor_parallel_num_weight_shards=1)"),
    Flag("params_dtype", lambda value, _: value == torch.bfloat16, "torch.bfloat16 (bf16=True)"),
    Flag("fp8", _is_off, "None"),
    Flag("fp4", _is_off, "None"),
    Flag("quant_recipe", _is_unset, "None (no --te-precision-config-file)"),
    Flag(
        "add_bias_linear",
        lambda value, config: not value or not getattr(config, "moe_apply_probs_on_input", False),
        "False beside moe_apply_probs_on_input",
    ),
    Flag(
        "activation_func",
        _is_activation,
        "silu, quick_gelu or gelu with gated_linear_unit, or squared_relu or silu without it; a clamp and an offset "
        "with silu and quick_gelu alone",
    ),
    Flag("moe_mlp_glu_interleave_size", _is_unset, "None"),
    Flag("moe_paged_stash", _is_off, "False"),
    Flag("overlap_moe_expert_parallel_comm", _is_off, "False"),
    Flag("delay_wgrad_compute", _is_off, "False"),
    Flag("init_model_with_meta_device", _is_off, "False"),
    Flag("transformer_impl", lambda value, _: value != "inference_optimized", "'local' or 'transformer_engine'"),
    Flag(
        "offload_modules",
        _experts_are_not_offloaded,
        "modules without expert_fc1, moe_act and fused_group_mlp",
    ),
    Flag("cuda_graph_impl", lambda value, _: value != "full_iteration", "'none', 'local' or 'transformer_engine'"),
    Flag("cuda_graph_modules", _graphs_leave_experts_out, "some of attn, moe_router and moe_preprocess"),
    Flag("cuda_graph_scope", _graphs_leave_experts_out, "some of attn, moe_router and moe_preprocess"),
]


# Flags by which Megatron hides dispatch and combine behind other work. UniEP's kernels hide them; results are the same.
NOT_NEEDED = ("moe_shared_expert_overlap", "overlap_dispatch_backward_with_experts_wgrad")
_log = logging.getLogger("uniep")
_told: set[str] = set()


def not_needed(config: typing.Any) -> list[str]:
    """Which of NOT_NEEDED are on."""
    return [name for name in NOT_NEEDED if getattr(config, name, False)]


def turn_off_not_needed(config: typing.Any) -> None:
    """Before Megatron builds modules by them. The log says each once."""
    for name in not_needed(config):
        setattr(config, name, False)
        if name not in _told:
            _told.add(name)
            _log.warning("%s: off in UniEP's layers, whose kernels hide dispatch and combine themselves", name)


def refused(config: typing.Any) -> list[tuple[Flag, typing.Any]]:
    """The flags of a TransformerConfig whose values UniEP does not serve, with these values."""
    found = [(flag, getattr(config, flag.name)) for flag in FLAGS if hasattr(config, flag.name)]
    return [(flag, value) for flag, value in found if not flag.is_served(value, config)]


def refuse(config: typing.Any) -> None:
    """Raises ValueError for a TransformerConfig that asks for what UniEP does not serve, with a line for each flag."""
    lines = [f"{flag.name}: {value!r}; UniEP's layer needs {flag.legal}" for flag, value in refused(config)]
    if lines:
        raise ValueError("\n".join(lines))
