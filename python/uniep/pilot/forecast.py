"""How much memory a layer will need in UniEP, asked of the library: no layer runs."""

from __future__ import annotations

import ctypes
import typing

import torch
import torch.distributed as dist

from uniep import library
from uniep.group import Group
from uniep.pilot.sizes import Size
from uniep.routes import place_routing
from uniep.schedules import SAVES, with_save

MIB = 2**20


class Need(typing.NamedTuple):
    """MiB of a layer on the rank that needs most, for a routing of even probability."""

    save: str
    saved: float  # from forward to backward
    workspace: float  # while a call runs, the larger direction
    symmetric: float  # held by the group, for all layers together


def forecast(size: Size, group: Group, schedule: str, tokens: int) -> list[Need]:
    """For each way to save. Collective.

    Args:
        tokens: of a rank.
    """
    generator = torch.Generator().manual_seed(group.rank)
    probs, ids = torch.rand(tokens, size.experts, generator=generator).topk(size.topk)
    shape = size.hidden, size.intermediate, size.experts
    route = place_routing(group, shape, ids.to(group.device), probs.to(group.device), size.topk, None)
    found = []
    for save in SAVES:
        text = with_save(schedule, save)
        forward, backward = _ask(group, route, text, True), _ask(group, route, text, False)
        own = [forward.saved_bytes, max(forward.workspace_bytes, backward.workspace_bytes)]
        own.append(max(forward.symmetric_bytes, backward.symmetric_bytes))
        ranks: list[list[int]] = [[0, 0, 0]] * group.size
        if group.size > 1:
            dist.all_gather_object(ranks, own, group=group.process_group)
        else:
            ranks = [own]
        found.append(Need(save, *(max(column) / MIB for column in zip(*ranks, strict=True))))
    return found


def _ask(group: Group, route: typing.Any, schedule: str, forward: bool) -> typing.Any:
    need = library.MemoryNeed.make()
    engine, loaded = group.engine, library.load()
    layer = (engine._handle, route.config(), schedule.encode(), route.placement.handle)
    into = (ctypes.byref(need), 1)
    if forward:
        engine._call(loaded.uniep_query_forward_memory, *layer, 1, *into)
    else:
        engine._call(loaded.uniep_query_backward_memory, *layer, library.WEIGHT_GRADIENTS_NOW, 0, *into)
    return need
