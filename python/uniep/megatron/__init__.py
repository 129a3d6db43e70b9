"""Megatron-core's MoELayer with its experts run by UniEP.

Router, losses, shared experts, recomputation, parameters, optimizer and checkpoints stay Megatron's. Either

    spec = uniep.megatron.enable(get_gpt_layer_local_spec(...))

or, before the model is built, `uniep.megatron.patch()`. With UNIEP_DISABLE=1 both change nothing.

patch(), and enable() of a spec that names MoELayer as a ModuleSpec, put a function of UniEP's in the place of
`MoELayer.__init__`, for the whole process. It calls Megatron's for every layer that neither of them asked for.
unpatch() puts Megatron's back.
"""

from __future__ import annotations

import functools
import logging
import typing
import weakref

from megatron.core.transformer.moe.moe_layer import MoELayer

from uniep import rerun, reserved_sms, trials
from uniep.megatron.backend import UniEPBackend
from uniep.megatron.experts import Experts
from uniep.megatron.flags import FLAGS, refuse
from uniep.megatron.layer import STAYS, UniEPMoELayer, built_for_uniep, collection_of
from uniep.megatron.metrics import log_stats
from uniep.megatron.restart import abort_hook
from uniep.megatron.routing import expert_weights
from uniep.schedules import check_early
from uniep.switch import is_disabled
from uniep.tuner import Tuner
from uniep.verifier import Verifier

__all__ = [
    "FLAGS",
    "Experts",
    "UniEPBackend",
    "UniEPMoELayer",
    "abort_hook",
    "enable",
    "expert_weights",
    "log_stats",
    "patch",
    "refuse",
    "unpatch",
]


_log = logging.getLogger("uniep")


def enable(
    spec: typing.Any,
    *,
    schedule: str | tuple[str, str] = "auto",
    save: str = "keep",
    reserve_sms: int | str = "auto",
    verify: int = 0,
    tune_until: int = 0,
) -> typing.Any:
    """Replaces MoELayer in the spec of a layer or of a block, in place, and gives it back.

    A spec that names MoELayer as a ModuleSpec (Megatron-core 0.17) still names it, with the options beside: then
    `MoELayer.__init__` is UniEP's for the whole process, which builds Megatron's layer from all other specs, until
    unpatch() after the last such spec. `verify` and `tune_until` are of the whole process, too.

    A block without a MoELayer, as a pipeline stage of dense layers has it, stays as it is; the log says so.

    Args:
        spec: of a layer, of a hybrid stack or of multi-token prediction, or a block's TransformerBlockSubmodules.
        schedule: of uniep.moe(), of all layers: text, or two, for forward and backward.
        save: of uniep.moe(): "keep", "redispatch", "rows" or "recompute".
        reserve_sms: of uniep.Group, a number of SMs; "auto" leaves what collectives of gradients, parameters and
            pipelines can take.
        verify: check a layer every so many steps, before the optimizer's (uniep.Verifier); 0: never.
        tune_until: try other schedules up to this step, which changes no bit (uniep.Tuner); 0: never.

    Returns:
        `spec`.

    Raises:
        ValueError: an option is wrong, or there is no MoELayer in the spec of a layer.
    """
    options = _begin(schedule, save, reserve_sms, verify, tune_until)
    if not _enable_layers(spec, options):
        if hasattr(getattr(spec, "submodules", spec), "layer_specs"):
            _log.info("spec: %s without a MoELayer; nothing to replace in this block", type(spec).__name__)
            return spec
        raise ValueError(
            f"spec: {type(spec).__name__} without a MoELayer; legal is the spec of a layer or a block with one"
        )
    return spec


def _enable_layers(spec: typing.Any, options: dict[str, typing.Any]) -> int:
    """How many MoE layers there are in a layer, a block, or a hybrid stack or a layer of multi-token prediction."""
    submodules = getattr(spec, "submodules", spec)
    inner = [getattr(submodules, name, None) for name in ("moe_layer", "mtp_model_layer")]
    inner += getattr(submodules, "layer_specs", None) or ()
    return _enable_layer(submodules, options) + sum(_enable_layers(one, options) for one in inner if one is not None)


def _enable_layer(submodules: typing.Any, options: dict[str, typing.Any]) -> bool:
    mlp: typing.Any = getattr(submodules, "mlp", None)
    is_moe = getattr(mlp, "func", getattr(mlp, "module", None)) in (MoELayer, UniEPMoELayer)
    if not is_moe or is_disabled(STAYS):
        return is_moe
    if isinstance(mlp, functools.partial):
        submodules.mlp = functools.partial(UniEPMoELayer, *mlp.args, **{**mlp.keywords, "uniep_options": options})
    else:
        # 0.17's layers give process groups to a spec of MoELayer itself alone.
        _take_init()
        mlp.module, mlp.params = MoELayer, {**mlp.params, "uniep_options": _OfSpec(options)}
    return True


def _begin(schedule: typing.Any, save: str, reserve_sms: int | str, verify: int, until: int) -> dict[str, typing.Any]:
    """The options of layers, all checked before anything begins."""
    options = {"schedule": schedule, "save": save, "reserve_sms": reserved_sms.checked(reserve_sms)}
    for name, value in (("verify", verify), ("tune_until", until)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}: {value!r}; must be a number of steps, or 0 (never)")
    if not is_disabled(STAYS):
        check_early(schedule, save)
        _begin_to_verify(verify)
        _begin_to_tune(until)
    return options


def _begin_to_verify(every: int) -> None:
    if every > 0 and rerun.watcher is None:
        Verifier(every, before_optimizer=True)


def _begin_to_tune(until: int) -> None:
    if until > 0 and trials.active is None:
        Tuner(until=until, before_optimizer=True)


class _OfSpec(dict[str, typing.Any]):
    """Options in a spec: while it, or a copy of it, is there, MoELayer has to know them."""

    def __new__(cls, *_: typing.Any) -> _OfSpec:  # of copies, too
        made = super().__new__(cls)
        _in_specs.append(weakref.ref(made, _in_specs.remove))
        return made


_in_specs: list[weakref.ref[_OfSpec]] = []
_original_init = MoELayer.__init__
_is_taken = False
_patch: dict[str, typing.Any] | None = None  # its options
_told: set[type] = set()


@functools.wraps(_original_init)
def _init(
    self: typing.Any,
    config: typing.Any,
    *arguments: typing.Any,
    uniep_options: dict[str, typing.Any] | None = None,
    **keywords: typing.Any,
) -> None:
    options = _patch if uniep_options is None else uniep_options
    if type(self) is not MoELayer or options is None or is_disabled(STAYS):
        if options is not None and not isinstance(self, UniEPMoELayer) and type(self) not in (MoELayer, *_told):
            _told.add(type(self))
            _log.warning("%s: stays Megatron's; patch() takes MoELayer itself alone", type(self).__name__)
        _original_init(self, config, *arguments, **keywords)
        return
    with built_for_uniep(config):
        _original_init(self, config, *arguments, **keywords)
    self.__class__ = UniEPMoELayer
    self._take_over(options, collection_of(arguments, keywords))


def _take_init() -> None:
    global _original_init, _is_taken
    if not _is_taken:
        _original_init, _is_taken = MoELayer.__init__, True
        MoELayer.__init__ = _init


def patch(
    *,
    schedule: str | tuple[str, str] = "auto",
    save: str = "keep",
    reserve_sms: int | str = "auto",
    verify: int = 0,
    tune_until: int = 0,
) -> None:
    """From now on every MoELayer that is built becomes a UniEPMoELayer, whoever imported the class.

    So `MoELayer.__init__` is UniEP's in the whole process, until unpatch(). Subclasses of MoELayer stay as they are.
    Another patch() gives other options to later layers.

    Args:
        schedule: of uniep.moe(), of all layers: text, or two, for forward and backward.
        save: of uniep.moe(): "keep", "redispatch", "rows" or "recompute".
        reserve_sms: of uniep.Group, a number of SMs; "auto" leaves what collectives of gradients, parameters and
            pipelines can take.
        verify: check a layer every so many steps, before the optimizer's (uniep.Verifier); 0: never.
        tune_until: try other schedules up to this step, which changes no bit (uniep.Tuner); 0: never.

    Raises:
        ValueError: an option is wrong.
    """
    global _patch
    _patch = _begin(schedule, save, reserve_sms, verify, tune_until)
    _take_init()


def unpatch() -> None:
    """Undoes patch() for layers that are built later; those that are there keep running by UniEP.

    `MoELayer.__init__` is Megatron's again, unless a spec is still there for which enable() needs it (see there), or
    somebody else has put theirs around UniEP's. The Verifier and the Tuner of patch() go on: close() ends them.
    """
    global _patch, _is_taken
    _patch = None
    if _is_taken and not _in_specs and MoELayer.__init__ is _init:
        MoELayer.__init__, _is_taken = _original_init, False
