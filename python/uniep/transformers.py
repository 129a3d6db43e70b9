"""Transformers' mixture-of-experts models with their experts run by UniEP.

    import uniep.transformers
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="uniep")

Router, losses, parameters and checkpoints stay the model's. docs/transformers.md has the flags and the limits.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.activations import ACT2FN
from transformers.integrations import moe as _integration

from uniep.group import Group
from uniep.layer import moe
from uniep.switch import is_disabled

NAME = "uniep"
_OPTIONS = {"schedule", "capacity", "main_grad", "save", "router_weight"}  # of shard_experts()
_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]), type(ACT2FN["swish"]))
_GELU_TANH = (type(ACT2FN["gelu_pytorch_tanh"]), type(ACT2FN["gelu_new"]))
# Experts with a gate of their own, and moe()'s activation of what that computes; silu where they have an act_fn.
_OWN_GATES: dict[str, typing.Callable[[typing.Any], str]] = {
    "DeepseekV4Experts": lambda own: f"swiglu:limit={own.limit}",
    "GptOssExperts": lambda own: f"swiglu:alpha={own.alpha},limit={own.limit},up_offset=1",
    "MiniMaxM3VLExperts": lambda own: f"swiglu:alpha={own.swiglu_alpha},limit={own.swiglu_limit},up_offset=1",
}
# Attribute of Transformers' experts, the value that is served.
_SERVED = {
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of a Transformers experts module.

    Args:
        hidden_states: [T, H] bf16, or of another type under autocast.
        top_k_index: [T, K] int32 or int64, global experts.
        top_k_weights: [T, K] of any floating type.

    Returns:
        [T, H] of hidden_states' type.

    Raises:
        ValueError: the experts are not served; the message says why.
    """
    if getattr(self, "uniep_group", None) is None and is_disabled("Transformers' own experts run"):
        y = _own_forward(self)(self, hidden_states, top_k_index, top_k_weights)
        return typing.cast(torch.Tensor, y)
    refuse(self)
    name = _parameters(self)[0]
    weight = typing.cast(torch.Tensor, getattr(self, name))
    if weight.dtype != torch.bfloat16 and not torch.is_autocast_enabled(weight.device.type):
        raise ValueError(
            f"{name}: {weight.dtype}; load the model with dtype=torch.bfloat16, or run it under torch.autocast"
        )
    group = getattr(self, "uniep_group", None) or _own_group(hidden_states.device)
    options = dict(getattr(self, "uniep_options", {}))
    if getattr(self, "has_bias", False):
        options["router_weight"] = "output"  # it multiplies down_proj's bias, too
    w1, w2 = _weights(self)
    b1, b2 = _biases(self)
    return moe(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        w1,
        w2,
        b1=b1,
        b2=b2,
        group=group,
        activation=typing.cast(str, activation_of(self)),
        **options,
    ).type_as(hidden_states)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _own_group(device: torch.device) -> Group:
    """This process alone; in a graph made while that is compiled."""
    return Group("self", device=device)


def _is_interleaved(experts: torch.nn.Module) -> bool:
    return bool(getattr(experts, "has_gate", True)) and not getattr(experts, "is_concatenated", True)


def _weights(experts: torch.nn.Module) -> tuple[typing.Any, torch.Tensor]:
    """moe()'s w1 and w2: the parameters, or copies of them where those are transposed or interleaved."""
    first, second = (typing.cast(torch.Tensor, getattr(experts, name)) for name in _parameters(experts)[:2])
    if getattr(experts, "is_transposed", False):
        first, second = first.transpose(1, 2), second.transpose(1, 2).contiguous()
    if _is_interleaved(experts):
        return (first[:, ::2].contiguous(), first[:, 1::2].contiguous()), second
    return first.contiguous(), second


def _biases(experts: torch.nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """moe()'s b1 and b2, if there are any."""
    if not getattr(experts, "has_bias", False):
        return None, None
    first, second = (typing.cast(torch.Tensor, getattr(experts, name)) for name in _parameters(experts)[2:])
    if _is_interleaved(experts):
        first = torch.cat([first[:, ::2], first[:, 1::2]], 1)
    return first, second


def _own_forward(experts: torch.nn.Module) -> typing.Any:
    """What experts_implementation="eager" runs: the forward behind Transformers' decorator."""
    return type(experts).forward.__wrapped__  # type: ignore[attr-defined]


_integration.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def refuse(experts: torch.nn.Module) -> None:
    """Raises ValueError for an experts module that UniEP does not serve."""
    kind = type(experts).__name__
    for name, served in _SERVED.items():
        if getattr(experts, name, served) != served:
            raise ValueError(
                f"{kind}.{name}: {getattr(experts, name)}; experts_implementation='uniep' serves {served}: experts "
                "of this process, without a norm behind them"
            )
    if activation_of(experts) is None:
        is_unknown = _has_own_gate(experts) and _own_gate(experts) is None
        what = "a gate of its own" if is_unknown else type(getattr(experts, "act_fn", None)).__name__
        raise ValueError(
            f"{kind}.act_fn: {what}; experts_implementation='uniep' serves silu(gate) * up and gelu(gate) * up, the "
            f"gates of {' and '.join(_OWN_GATES)}, and without a gate relu2 and silu"
        )


def _check_options(experts: torch.nn.Module, options: dict[str, typing.Any]) -> None:
    """Raises ValueError for options of shard_experts() that these experts can not have."""
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise ValueError(f"options: {', '.join(sorted(unknown))}; legal are {', '.join(sorted(_OPTIONS))}")
    kind, weight = type(experts).__name__, options.get("router_weight", "output")
    if getattr(experts, "has_bias", False) and weight != "output":
        raise ValueError(
            f"router_weight: {weight!r}; must be 'output' or left out, since {kind} has biases, which it multiplies"
        )
    copied = _is_interleaved(experts) or getattr(experts, "is_transposed", False)
    if copied and options.get("main_grad") is not None:
        raise ValueError(
            f"main_grad: {options['main_grad']!r}; must be None, since weights of {kind} are transposed or interleaved "
            "and moe() gets copies"
        )


def _parameters(experts: torch.nn.Module) -> tuple[str, ...]:
    """Names: w1's and w2's, and of their biases, if there are any."""
    names = ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"), "down_proj"
    return (*names, *(f"{name}_bias" for name in names)) if getattr(experts, "has_bias", False) else names


def _has_own_gate(experts: torch.nn.Module) -> bool:
    return getattr(type(experts), "_apply_gate", None) is not _integration._default_apply_gate


def _own_gate(experts: torch.nn.Module) -> typing.Callable[[typing.Any], str] | None:
    """By the class or one that it is made of: FSDP2 and parametrizations make others, under other names."""
    return next((_OWN_GATES[one.__name__] for one in type(experts).__mro__ if one.__name__ in _OWN_GATES), None)


def activation_of(experts: torch.nn.Module) -> str | None:
    """moe()'s activation of an experts module; None where UniEP has no such one."""
    function = getattr(experts, "act_fn", None)
    is_silu = function is torch.nn.functional.silu or isinstance(function, _SILU)
    if not getattr(experts, "has_gate", True):
        return "silu" if is_silu else "relu2" if isinstance(function, type(ACT2FN["relu2"])) else None
    if _has_own_gate(experts):
        own = _own_gate(experts)
        return own(experts) if own is not None and (function is None or is_silu) else None
    if is_silu:
        return "swiglu"
    if isinstance(function, _GELU_TANH):
        return "geglu_tanh"
    return "geglu_erf" if isinstance(function, type(ACT2FN["gelu"])) else None


def shard_experts(model: torch.nn.Module, group: Group, **options: typing.Any) -> int:
    """Leaves every rank of `group` its E / W experts of each layer, and runs them expert-parallel.

    Call it on all ranks, on models with equal weights, before the optimizer is made. Parameters keep their names and
    become [E / W, ...]: do not average their gradients over the group. What layers share stays shared.

    Args:
        model: a Transformers model with mixture-of-experts layers.
        group: who shares the experts.
        options: `schedule`, `capacity`, `main_grad`, `save` and `router_weight` of moe(), for all layers. Experts with
            biases have "output"; where weights are transposed or interleaved there is no `main_grad`.

    Returns:
        The number of layers.

    Raises:
        ValueError: no layer has such experts, or UniEP does not serve them, or W does not divide their number.
    """
    if group.size > 1 and is_disabled("experts can not be sharded"):
        raise ValueError(
            f"UNIEP_DISABLE: 1; Transformers has no layer of its own for experts on {group.size} ranks of a group: do "
            "not shard them, or give a group of one rank"
        )
    layers = _layers(model)
    for experts in layers:
        refuse(experts)
        _check_options(experts, options)
        count = len(typing.cast(torch.Tensor, experts.down_proj))
        if getattr(experts, "uniep_group", None) is not None:
            raise ValueError("model: its experts are sharded already; gather_experts() undoes it")
        if count % group.size != 0:
            raise ValueError(f"group: {group.size} ranks; must divide the {count} experts of {type(experts).__name__}")
    configs: dict[int, typing.Any] = {}  # copies: other models may have been made of the same ones
    made = WeakTensorKeyDictionary()
    for experts in layers:
        _replace(experts, lambda whole: whole.chunk(group.size)[group.rank].clone(), made)
        experts.uniep_group = group  # type: ignore[assignment]
        experts.uniep_options = options  # type: ignore[assignment]
        config = experts.uniep_config = experts.config
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            configs[id(config)]._experts_implementation = NAME
        experts.config = configs[id(config)]
    return len(layers)


def gather_experts(model: torch.nn.Module) -> None:
    """Undoes shard_experts(), for save_pretrained(): every rank has all experts again, and runs them as the model's
    experts_implementation says. Collective.

    Raises:
        ValueError: the experts are not sharded.
    """
    made = WeakTensorKeyDictionary()
    for experts in _layers(model):
        group = typing.cast("Group | None", getattr(experts, "uniep_group", None))
        if group is None:
            raise ValueError("model: its experts are not sharded; shard_experts() does it")
        _replace(experts, functools.partial(_gathered, group), made)
        experts.config = experts.uniep_config
        del experts.uniep_group, experts.uniep_options, experts.uniep_config


def _gathered(group: Group, part: torch.Tensor) -> torch.Tensor:
    parts = [part]
    if group.size > 1:
        parts = [torch.empty_like(part) for _ in range(group.size)]
        dist.all_gather(parts, part.contiguous(), group=group.process_group)
    return torch.cat(parts)


def _replace(
    experts: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor], made: WeakTensorKeyDictionary
) -> None:
    """Gives experts other parameters; `made` has those of layers before, which may share one with these."""
    for name in _parameters(experts):
        before = typing.cast(torch.nn.Parameter, getattr(experts, name))
        if before not in made:
            made[before] = torch.nn.Parameter(make(before.detach()), requires_grad=before.requires_grad)
        setattr(experts, name, made[before])


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that Transformers runs through its experts' interface."""
    # Of the class: wrappers pass on what they are asked for.
    found = [one for one in model.modules() if hasattr(type(one), "_apply_gate") and hasattr(one, "config")]
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no experts that Transformers' experts_implementation runs")
    return found
