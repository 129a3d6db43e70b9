"""torchtitan 0.3 on a CPU: what it wants of torch.cuda, and Qwen3's debug model with an attention that runs here.

As a program: torchtitan's own train.py, with --module titan_cpu --config qwen3_moe.
"""

import sys
import types

import torch

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: {},
}.items():
    setattr(torch.cpu, name, value)

import torchtitan.tools.utils  # noqa: E402

torchtitan.tools.utils.get_local_device = lambda: torch.device("cpu")

import torchtitan.distributed.fsdp  # noqa: E402
import torchtitan.distributed.utils  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402

torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None


def plain_sums(model: torch.nn.Module) -> None:
    """gloo has no sum with a factor, and torchtitan's factor is 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


torchtitan.distributed.fsdp.disable_fsdp_gradient_division = plain_sums
Decoder.get_attention_masks = lambda *_: None  # plain causal attention has none
LAYERS, EXPERTS = 2, 16


def qwen3_moe():
    """Qwen3's MoE debug model with two of its eight layers and 16 of its 64 experts, for the sake of time."""
    config = qwen3_moe_debug()
    config.loss = config.loss.loss_fn  # in one piece
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        moe = layer.moe
        for part in (moe, moe.router, moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher):
            part.num_experts = EXPERTS
        moe.router.gate.out_features = EXPERTS
    return config


if __name__ == "__main__":
    from torchtitan.train import main

    sys.exit(main())
