"""What is here, what UniEP will fuse of it, and which of the user's flags it would refuse."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import types
import typing

import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig

from uniep.group import Group
from uniep.megatron.flags import refused
from uniep.pilot.sizes import Size
from uniep.show import describe

_PACKAGES = {
    "Megatron-core": "megatron-core",
    "Transformer Engine": "transformer_engine",
    "DeepEP and Hybrid-EP": "deep_ep",
}
# Megatron-LM's command line, where a flag's name is not that of the field.
_WORDS: dict[str, dict[str, typing.Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "quick_geglu": {"gated_linear_unit": True, "activation_func": "quick_gelu"},
    "squared_relu": {"activation_func": "squared_relu"},
    "disable_bias_linear": {"add_bias_linear": False},
    "bf16": {"params_dtype": "bfloat16"},
    "fp16": {"params_dtype": "float16"},
}
_LINE_BEGINS = {
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "add_bias_linear": True,
    "params_dtype": "float32",
}
_FLAG_OF_WORD = {"fp8_format": "fp8", "fp4_format": "fp4", "te_precision_config_file": "quant_recipe"}
_ACTIVATIONS = {"quick_gelu": quick_gelu, "squared_relu": squared_relu}


def versions() -> dict[str, str]:
    """Versions and files by name, the driver's too."""
    found = describe()
    driver = pathlib.Path("/proc/driver/nvidia/version")
    words = re.search(r"\d+\.\d+(\.\d+)*", driver.read_text()) if driver.exists() else None
    found["driver"] = words[0] if words else "none"
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            is_here = importlib.util.find_spec(package.replace("-", "_")) is not None
            found[name] = "here, without a version" if is_here else "not installed"
    return found


def check_schedule(device: torch.device, size: Size, schedule: str) -> None:
    """Collective.

    Raises:
        ValueError: UniEP would refuse the schedule.
    """
    with Group(device=device) as group:
        try:
            fused(group, size, schedule)
        except ValueError as error:
            raise ValueError(f"--schedule: {schedule}; {error}") from error


def fused(group: Group, size: Size, schedule: str) -> dict[str, str]:
    """What of a layer runs in one launch, by direction, and how rows travel."""
    native = group.transport == "native"
    experts = size.experts if native else size.experts // group.size
    config = group.engine.config(size.hidden, size.intermediate, experts, size.topk if native else 1)
    words = {
        "layer": "one launch: dispatch, GEMMs and combine",
        "pairs": "two launches: dispatch with the first GEMM, the second GEMM with combine",
        "none": "a launch a stage, nothing is fused",
    }
    found = {"transport": f"{group.transport}: {group.why}"}
    for direction, name in enumerate(("forward", "backward")):
        resolved = json.loads(group.engine.resolve(config, direction, schedule.encode()))
        found[name] = words[resolved["fusion"]]
        if not native:
            found[name] += "; rows between ranks travel by all_to_all_single before and behind, so that is not fused"
    return found


def read_flags(file: pathlib.Path) -> dict[str, typing.Any]:
    """A configuration of the user's: JSON of TransformerConfig's fields, or Megatron-LM's command line.

    Raises:
        ValueError: it is neither.
    """
    text = file.read_text()
    if text.lstrip().startswith("{"):
        return dict(json.loads(text))
    found: dict[str, typing.Any] = dict(_LINE_BEGINS)
    groups = re.findall(r"--([\w-]+)((?:[ \t=]+(?!--)[^\s\\]+)*)", text)
    if not groups:
        raise ValueError(f"--config: {file} has neither JSON nor a flag that begins with --")
    for word, rest in groups:
        name = word.replace("-", "_")
        values = [_value(one) for one in rest.replace("=", " ").split()]
        value = True if not values else values[0] if len(values) == 1 else values
        found |= _WORDS.get(name, {_FLAG_OF_WORD.get(name, name): value})
    return found


def _value(text: str) -> typing.Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def difference(flags: dict[str, typing.Any]) -> list[str]:
    """What must change in a configuration, as lines of a diff."""
    given = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(TransformerConfig)
    }
    known = {name: _typed(name, value) for name, value in flags.items() if name in given}
    own = types.SimpleNamespace(**{**given, **known})
    _derive(own)
    lines = []
    for flag, value in refused(own):
        shown = flags.get(flag.name, value)
        lines += [f"-{flag.name} = {shown!r}", f"+{flag.name} = {flag.legal}"]
    return lines


def _derive(config: types.SimpleNamespace) -> None:
    """What Megatron works out of other fields as it makes a TransformerConfig."""
    if config.expert_tensor_parallel_size is None:
        config.expert_tensor_parallel_size = getattr(config, "tensor_model_parallel_size", 1)
    shards = getattr(config, "expert_tensor_parallel_num_weight_shards", None)
    if shards is not None:
        config.expert_gtp_weight_remat_size = shards // config.expert_tensor_parallel_size


def _typed(name: str, value: typing.Any) -> typing.Any:
    if name == "params_dtype" and isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."), value)
    if name == "activation_func" and isinstance(value, str):
        word = value.rpartition(".")[2]
        return _ACTIVATIONS.get(word) or getattr(torch.nn.functional, word, value)
    return value
