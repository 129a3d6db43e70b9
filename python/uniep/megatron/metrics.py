"""uniep.stats() as scalars among Megatron-core's MoE metrics."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

from uniep.layer_stats import stats


def log_stats(num_layers: int, micro_batches: int = 1, device: torch.device | str = "cuda") -> None:
    """Puts five scalars a layer beside Megatron's load-balancing losses, which its training loop reports.

    Call it once a step, on all ranks, before the metrics are reported; uniep.record_stats() must have been called. A
    layer that has nothing yet, and one without UniEP, counts as NaN or 0. Waits for nothing.

    Args:
        num_layers: of the whole model.
        micro_batches: of a step; Megatron divides its metrics by it.
        device: of Megatron's metrics.
    """
    for one in stats():
        if not one.layer.startswith("layer "):
            continue
        number = int(one.layer.removeprefix("layer "))
        values = {f"uniep_{one.direction}_ms": one.ms, f"uniep_{one.direction}_wait_ms": one.wait_ms}
        if one.direction == "forward":
            values["uniep_rows_max_over_mean"] = one.rows_max_over_mean
        for name, value in values.items():
            scalar = torch.full((), float("nan") if value is None else value * micro_batches, device=device)
            save_to_aux_losses_tracker(name, scalar, number, num_layers)
