"""How many experts the ranks of a group have together, and whether that is what the caller thinks."""

from __future__ import annotations

import logging
import typing

if typing.TYPE_CHECKING:
    from uniep.group import Group

_log = logging.getLogger("uniep")
_told: set[str] = set()


def all_experts(local: int, group: Group, expected: int | None, is_default: bool) -> int:
    """E; says once where nobody has said that these are the experts of one rank alone."""
    experts = local * group.size
    if expected is not None and expected != experts:
        raise ValueError(
            f"num_experts: {expected}; w1 has {local} experts of this rank, of {group.size} ranks, so that it must be "
            f"{experts}: give each rank its own share of the weights, or group=uniep.Group('self') for all of them"
        )
    if is_default and expected is None and group.size > 1 and group.rank == 0 and "share" not in _told:
        _told.add("share")
        _log.warning(
            "moe() without group= runs on all %d ranks of the job and takes w1's %d experts as rank 0's share of %d; "
            "num_experts= checks that",
            *(group.size, local, experts),
        )
    return experts
