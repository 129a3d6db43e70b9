"""CUDA graphs of attention and of MoE layers up to the experts, in all arms: Megatron-core's, by Transformer Engine."""

from __future__ import annotations

import dataclasses
import typing

import torch.distributed as dist
from megatron.core import num_microbatches_calculator as micro_batches
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig

from uniep.pilot.arms import STEPS_BEFORE_GRAPHS
from uniep.pilot.sizes import Size


def changes() -> dict[str, typing.Any]:
    """Fields of Megatron's configuration."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    field = "cuda_graph_modules" if "cuda_graph_modules" in names else "cuda_graph_scope"  # before 0.18
    return {
        "cuda_graph_impl": "transformer_engine",
        field: ["attn", "moe_router", "moe_preprocess"],
        "cuda_graph_warmup_steps": STEPS_BEFORE_GRAPHS,
    }


def capture(ddp: typing.Any, config: typing.Any, size: Size, optimizer: typing.Any) -> typing.Any:
    """What Megatron's training loop does behind its warm-up steps: all layers' graphs. Collective.

    Returns:
        Megatron's helper, whose delete_cuda_graphs() gives their memory back.
    """
    ranks = dist.get_world_size()
    micro_batches.destroy_num_microbatches_calculator()
    micro_batches.init_num_microbatches_calculator(dist.get_rank(), None, size.batch * ranks, size.batch, ranks)
    ddp.disable_forward_pre_hook()  # waits for parameters that are still gathered
    helper = cuda_graphs.TECudaGraphHelper(
        model=[ddp],
        config=config,
        seq_length=size.sequence,
        micro_batch_size=size.batch,
        optimizers=[optimizer],
    )
    helper.create_cudagraphs()
    ddp.enable_forward_pre_hook()
    helper.cuda_graph_set_manual_hooks()
    return helper
