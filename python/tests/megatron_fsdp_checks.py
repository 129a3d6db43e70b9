"""What test_megatron.py starts: training under Megatron-FSDP, whose weights have get_main_grad()."""

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


def losses_of(setting, ours, strategy):
    print(f"training with {'UniEP' if ours else 'Megatron'}'s layers", flush=True)
    with parallelism(setting):
        training = Training(setting, ours, wrapped(strategy))
        return [training.step() for _ in range(STEPS)]


def check_megatron_fsdp(rank, ranks):
    """Close enough to see a micro-batch whose weight gradients are lost."""
    for strategy, expert in (("optim_grads_params", 1), ("optim_grads_params", ranks), ("optim", 1)):
        setting = Setting(expert=expert, distributed_optimizer=True, micro_batches=2)
        theirs, got = losses_of(setting, False, strategy), losses_of(setting, True, strategy)
        for step, (expected, loss) in enumerate(zip(theirs, got, strict=True)):
            assert abs(loss - expected) <= 5e-4 * expected, (strategy, expert, step, expected, loss)
        assert got[-1] < 0.9 * got[0]


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
