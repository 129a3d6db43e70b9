"""Expert-parallel mixture-of-experts layers: one result, whatever the schedule, transport or number of ranks.

`import uniep` needs neither torch nor a GPU; what needs torch imports it when it is first used. docs/pytorch.md is the
page to begin with.
"""

from __future__ import annotations

import importlib
import typing

from uniep.errors import CapacityError, DeviceError, Unsupported

if typing.TYPE_CHECKING:
    from uniep.checkpoints import checkpoint_state
    from uniep.exchange import Plan, combine, dispatch, place
    from uniep.group import Group, abort, groups
    from uniep.layer import moe
    from uniep.layer_stats import record_stats, stats
    from uniep.modules import Experts, MoELayer
    from uniep.parallel import average_expert_gradients, clip_grad_norm, expert_parameters
    from uniep.show import show_config
    from uniep.tracing import trace
    from uniep.tuner import Tuner
    from uniep.tuning import autotune
    from uniep.verifier import Finding, Verifier

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "DeviceError",
    "Experts",
    "Finding",
    "Group",
    "MoELayer",
    "Plan",
    "Tuner",
    "Unsupported",
    "Verifier",
    "abort",
    "autotune",
    "average_expert_gradients",
    "checkpoint_state",
    "clip_grad_norm",
    "combine",
    "dispatch",
    "expert_parameters",
    "groups",
    "moe",
    "place",
    "record_stats",
    "show_config",
    "stats",
    "trace",
]

_MODULE_OF_NAME = {
    "Experts": "modules",
    "Finding": "verifier",
    "Group": "group",
    "MoELayer": "modules",
    "Plan": "exchange",
    "Tuner": "tuner",
    "Verifier": "verifier",
    "abort": "group",
    "autotune": "tuning",
    "average_expert_gradients": "parallel",
    "checkpoint_state": "checkpoints",
    "clip_grad_norm": "parallel",
    "combine": "exchange",
    "dispatch": "exchange",
    "expert_parameters": "parallel",
    "groups": "group",
    "moe": "layer",
    "place": "exchange",
    "record_stats": "layer_stats",
    "show_config": "show",
    "stats": "layer_stats",
    "trace": "tracing",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'uniep' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"uniep.{_MODULE_OF_NAME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"uniep.{name} needs torch, which is not installed: pip install 'uniep[torch]'") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF_NAME])
