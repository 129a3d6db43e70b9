"""Ranks meet where a collective would not do."""

from __future__ import annotations

import datetime

import torch.distributed as dist

_LIMIT = datetime.timedelta(seconds=60)


def meet(what: str) -> bool:
    """Whether all ranks have come here within a minute. By the store: a collective may hang behind one that does."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"uniep.pilot, {what}, {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "yes")
    try:
        store.wait(keys, _LIMIT)
    except dist.DistError:
        return False
    return True
