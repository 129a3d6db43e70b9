"""Process groups whose collectives Megatron may run beside a layer: of gradients, parameters and pipelines."""

from __future__ import annotations

import typing

import torch.distributed as dist
from megatron.core import parallel_state

from uniep.group import Group

_SEPARATE_GATHERS = ("dp_cp_ag", "expt_dp_ag")  # Megatron-FSDP's, of parameters


def overlapped_groups(collection: typing.Any = None) -> dict[str, list[dist.ProcessGroup | None]]:
    """The groups by their names in a ProcessGroupCollection. What that lacks is parallel_state's; names that neither
    knows are missing."""
    known: dict[str, typing.Any] = {}
    if parallel_state.is_initialized():
        known["dp_cp"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        known["expt_dp"] = parallel_state.get_expert_data_parallel_group(check_initialized=False)
        known["pp"] = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
        known["dp_cp_ag"] = getattr(parallel_state, "_DATA_PARALLEL_GROUP_WITH_CP_AG", None)  # 0.17's
    given = {name: getattr(collection, name, None) for name in ("dp_cp", "expt_dp", "pp", *_SEPARATE_GATHERS)}
    known |= {name: one for name, one in given.items() if one is not None}
    return {name: one if isinstance(one, list) else [one] for name, one in known.items()}


def tell(group: Group, config: typing.Any, collection: typing.Any) -> None:
    """Says to a Group which collectives Megatron may run beside its calls, and who has the same experts.

    Args:
        config: TransformerConfig.
        collection: the ProcessGroupCollection that the layer was built with, or None.
    """
    known = overlapped_groups(collection)
    pipelines = known.pop("pp", None)
    all_known = {"dp_cp", "expt_dp"} <= known.keys() and (
        pipelines is not None or config.pipeline_model_parallel_size == 1
    )
    group.run_beside(*(one for found in known.values() for one in found), all_known=all_known)
    # Unbatched sends and receives have a communicator for each neighbour.
    group.run_beside(*(pipelines or ()), times=2 if config.overlap_p2p_comm else 1)
    replicas = known.get("expt_dp", [])
    group.replicas = replicas[0] if len(replicas) == 1 else None
