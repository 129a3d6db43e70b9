"""The arms: Megatron-core's layer with each dispatcher that is here, and UniEP's."""

from __future__ import annotations

import importlib
import importlib.util
import typing

import torch

NAMES = ("stock", "deepep", "hybridep", "uniep")
STEPS_BEFORE_GRAPHS = 2  # with --cuda-graphs


class Arm(typing.NamedTuple):
    """One way to run the MoE layers. `changes` are fields of Megatron's configuration."""

    name: str
    what: str
    changes: dict[str, typing.Any]
    schedule: str | None = None  # of UniEP; None: Megatron's own layer
    reserve_sms: int | str = "auto"  # of UniEP's Group
    experimental: bool = False  # Megatron's --enable-experimental
    plainer: Arm | None = None  # instead of it where its first step fails


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _experts() -> tuple[dict[str, typing.Any], str]:
    if has_transformer_engine():
        return {"moe_grouped_gemm": True, "moe_permute_fusion": True}, "Transformer Engine's grouped GEMM"
    return {"moe_grouped_gemm": False}, "SequentialMLP, without Transformer Engine"


def _why_not(name: str) -> str | None:
    """Why DeepEP's or Hybrid-EP's dispatcher can not be had here."""
    needed = "Buffer" if name == "deepep" else "HybridEPBuffer"
    if not torch.cuda.is_available():
        return "needs GPUs, and torch finds none"
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        return f"deep_ep does not import: {error}"
    return None if hasattr(module, needed) else f"deep_ep is there, but has no {needed}"


def with_reserved_sms(arm: Arm, count: int) -> Arm:
    """UniEP's arm with another number of SMs left alone, all else of its schedule as it is."""
    fields = [one for one in (arm.schedule or "").split(",") if not one.startswith("comm.reserve_sms=")]
    schedule = ",".join(one for one in fields if one) or "auto"
    what = f"UniEP, schedule {schedule}, reserve_sms={count}"
    return arm._replace(name=f"uniep, reserve_sms={count}", what=what, schedule=schedule, reserve_sms=count)


def with_idle_sms(arm: Arm) -> Arm:
    """UniEP's arm whose reserved SMs do nothing while no collective has them."""
    schedule = ",".join([*([arm.schedule] if arm.schedule not in (None, "", "auto") else []), "comm.lend_sms=off"])
    what = f"UniEP, schedule {schedule}, reserve_sms={arm.reserve_sms}"
    return arm._replace(name="uniep, comm.lend_sms=off", what=what, schedule=schedule)


def find(wanted: typing.Sequence[str], schedule: str) -> tuple[list[Arm], dict[str, str]]:
    """The arms that are here, and for each missing one why it is.

    Raises:
        ValueError: an arm is unknown, or is there twice.
    """
    for name in wanted:
        if name not in NAMES:
            raise ValueError(f"--arms: {name}; legal are {', '.join(NAMES)}")
        if wanted.count(name) > 1:
            raise ValueError(f"--arms: {name} twice; each may be there once")
    shared, experts = _experts()
    found, missing = [], {}
    for name in wanted:
        if name == "stock":
            changes = {**shared, "moe_token_dispatcher_type": "alltoall"}
            found.append(Arm(name, f"Megatron-core's all-to-all, {experts}", changes))
        elif name == "uniep":
            changes = {**shared, "moe_token_dispatcher_type": "alltoall"}
            found.append(Arm(name, f"UniEP, schedule {schedule}, reserve_sms=auto", changes, schedule))
        else:
            reason = _why_not(name)
            if reason is not None:
                missing[name] = reason
                continue
            found.append(_of_flex(name, shared, experts))
    return found, missing


def _of_flex(name: str, shared: dict[str, typing.Any], experts: str) -> Arm:
    """DeepEP's arm or Hybrid-EP's, with what makes it faster: fused steps that Megatron leaves off by itself."""
    changes = {**shared, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": name}
    words = {"deepep": "DeepEP", "hybridep": "Hybrid-EP"}[name]
    plain = Arm(name, f"Megatron-core's flex dispatcher with {words}, {experts}", changes)
    if not shared.get("moe_permute_fusion"):
        return plain
    if name == "deepep":
        what = f"{plain.what}, routing made by one kernel (--enable-experimental)"
        return plain._replace(what=what, experimental=True, plainer=plain)
    fused = {**changes, "moe_permute_fusion_into_hybridep": True}
    return plain._replace(what=f"{plain.what}, permutation inside of its kernels", changes=fused, plainer=plain)
