"""uniep.stats() of all ranks, layer by layer, for a training loop's log."""

from __future__ import annotations

import math
import typing

import torch
import torch.distributed as dist

from uniep.layer_stats import LayerStats, stats

_NAMES = (
    "uniep_rows_max_over_mean",
    "uniep_forward_ms",
    "uniep_backward_ms",
    "uniep_forward_wait_ms",
    "uniep_backward_wait_ms",
)


def log_stats(
    num_layers: int,
    iteration: int = 0,
    writer: typing.Any = None,
    *,
    mtp_layers: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, list[float]]:
    """Five scalars a layer, each the mean of the ranks that have the layer and know it.

    Collective: all ranks of `group` call it, between steps, those without a MoE layer too. Waits for the device.
    uniep.record_stats() must have been called.

    Args:
        num_layers: of the whole model, without those of multi-token prediction.
        iteration: of the writer's entries.
        writer: has TensorBoard's add_scalar(name, value, iteration), and gets what is known; None: nobody.
        mtp_layers: layers of multi-token prediction.
        group: whose ranks are asked; None: all. Without torch.distributed, this process.

    Returns:
        By name the values of the layers, those of multi-token prediction behind the others; NaN where no rank knows.
    """
    layers = [f"layer {number + 1}" for number in range(num_layers)]
    layers += [f"mtp {number + 1}" for number in range(mtp_layers)]
    sums = torch.zeros(2, len(_NAMES), len(layers), dtype=torch.float64)  # of values, and how many there are
    for one in stats():
        for name, value in _scalars(one).items():
            if value is not None and one.layer in layers:
                sums[:, _NAMES.index(name), layers.index(one.layer)] += sums.new_tensor([value, 1.0])
    if dist.is_available() and dist.is_initialized():
        sums = sums.to("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")
        dist.all_reduce(sums, group=group)
    means: list[list[float]] = (sums[0] / sums[1]).tolist()
    if writer is not None:
        for name, values in zip(_NAMES, means, strict=True):
            for layer, mean in zip(layers, values, strict=True):
                if not math.isnan(mean):
                    writer.add_scalar(f"{name}/{layer}", mean, iteration)
    return dict(zip(_NAMES, means, strict=True))


def _scalars(one: LayerStats) -> dict[str, float | None]:
    found = {f"uniep_{one.direction}_ms": one.ms, f"uniep_{one.direction}_wait_ms": one.wait_ms}
    if one.direction == "forward":
        found["uniep_rows_max_over_mean"] = one.rows_max_over_mean
    return found
