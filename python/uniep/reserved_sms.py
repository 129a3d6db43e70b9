"""SMs that a group's calls leave to NCCL's collectives beside them.

A kernel on all SMs that waits for a peer never ends while that peer waits in a collective for a kernel that finds no SM
here. So calls that wait for peers leave as many SMs as all collectives can take that may run at the same time. Where
collectives go before other kernels, calls use these SMs until one comes (comm.lend_sms).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

FIELD = "comm.reserve_sms"
_LEND = "comm.lend_sms"
_OF_SMS = ("comm.dispatch_sms", "comm.relay_sms", "comm.combine_sms", "comm.reduce_sms")
UNKNOWN = (
    "reserve_sms: 'auto' beside collectives of NCCL, and which these are or how many SMs one takes is not known; "
    "set NCCL_MAX_CTAS (8, for example) before communicators are made, or give reserve_sms as a number"
)


def checked(reserve_sms: int | str) -> int | str:
    is_number = isinstance(reserve_sms, int) and not isinstance(reserve_sms, bool)
    if reserve_sms == "auto" or (is_number and int(reserve_sms) >= 0):
        return reserve_sms
    raise ValueError(f"reserve_sms: {reserve_sms!r}; legal are 'auto' and numbers from 0")


def total(counts: Iterable[int | None]) -> int | None:
    """What collectives of several process groups take together."""
    found = 0
    for count in counts:
        if count is None:
            return None
        found += count
    return found


def most_ctas(group: dist.ProcessGroup) -> int | None:
    """SMs that a collective of a process group takes at most; None: not known.

    NCCL's environment comes before the communicator's own configuration.
    """
    if dist.get_world_size(group) == 1 or "nccl" not in str(dist.get_backend_config(group)):
        return 0
    named = os.environ.get("NCCL_MAX_CTAS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    given = getattr(getattr(options, "config", None), "max_ctas", 0)
    return given if isinstance(given, int) and given > 0 else None


def goes_first(group: dist.ProcessGroup) -> bool:
    """Whether collectives of a process group are in streams of high priority: a free SM is theirs before others'."""
    if dist.get_world_size(group) == 1 or "nccl" not in str(dist.get_backend_config(group)):
        return True
    if os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "").lower() in ("1", "y", "yes", "t", "true"):
        return True
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    return bool(getattr(options, "is_high_priority_stream", False))


def may_lend(text: str) -> bool:
    """Whether a schedule's text can lend, and does not say itself whether or how many SMs it does. JSON says so."""
    if text.lstrip().startswith("{"):
        return False
    fields = dict(word.partition("=")[::2] for word in "".join(text.split()).split(","))
    says_itself = FIELD in fields or _LEND in fields
    copies_on_sms = fields.get("comm.where") == "sms" or any(fields.get(one, "0") != "0" for one in _OF_SMS)
    return not (says_itself or copies_on_sms or fields.get("queue") == "static" or "push" in fields.values())


def leave(text: str, reserve: int | None, lends: bool = False) -> str:
    """A schedule's text that leaves so many SMs, unless it says itself how many. JSON is a whole schedule, and stays.

    Args:
        lends: use these SMs, too, while no collective has them, where the schedule can.

    Raises:
        ValueError: how many is not known (None).
    """
    if reserve == 0 or FIELD in text or text.lstrip().startswith("{"):
        return text
    if reserve is None:
        raise ValueError(UNKNOWN)
    field = f"{FIELD}={reserve}"
    if lends and may_lend(text):
        field += f",{_LEND}=on"
    return field if text in ("", "auto") else f"{text},{field}"
