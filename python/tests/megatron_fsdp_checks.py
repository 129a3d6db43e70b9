"""What test_megatron.py starts: training under Megatron-FSDP, whose weights have get_main_grad().

    megatron_fsdp_checks.py theirs|ours

Megatron's layers and UniEP's in processes of their own, so that a crash says whose it was.
"""

import json
import sys

import megatron_shim  # noqa: F401

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

from distributed_checks import run_checks
from megatron_training import Setting, Training, parallelism

STEPS = 4


def wrapped(strategy):
    def wrap(config, chunk, _index):
        given = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            megatron_fsdp_main_grads_dtype=torch.float32,
            megatron_fsdp_grad_comm_dtype=torch.float32,
            gradient_reduce_div_fusion=False,  # gloo has no such reduction
            bucket_size=20000,
        )
        return FullyShardedDataParallel(config, given, chunk, device=torch.device("cuda:0"))

    return wrap


def check_megatron_fsdp(rank, ranks):
    ours = sys.argv[1] == "ours"
    for strategy, expert in (("optim_grads_params", 1), ("optim_grads_params", ranks), ("optim", 1)):
        setting = Setting(expert=expert, distributed_optimizer=True, micro_batches=2)
        with parallelism(setting):
            training = Training(setting, ours, wrapped(strategy))
            losses = [training.step() for _ in range(STEPS)]
        if rank == 0:
            print(f"losses {strategy} EP{expert}: {json.dumps(losses)}", flush=True)


def check_a_layer_that_is_called_twice(rank, ranks):
    """Its gradients go to other ranks once, behind both calls."""
    changes = {"mlp_chunks_for_training": 2, "init_method_std": 0.1}
    setting = Setting(distributed_optimizer=True, micro_batches=2, changes=changes)
    with parallelism(setting):
        training = Training(setting, sys.argv[1] == "ours", wrapped("optim_grads_params"))
        training.step()
    if rank == 0:
        print(f"norm: {float(training.gradient_norm)}", flush=True)


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
