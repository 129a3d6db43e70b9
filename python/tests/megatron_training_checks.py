"""What test_megatron.py starts: training with recomputation, deterministic algorithms, and for long."""

import dataclasses
import sys

import megatron_shim  # noqa: F401

# isort: split
from distributed_checks import run_checks
from megatron_parallel_checks import compare
from megatron_training import Setting, train


def check_recomputation_and_determinism(rank, ranks):
    shared = {"moe_shared_expert_intermediate_size": 32, "moe_grouped_gemm": True}
    plain = Setting(expert=ranks, changes=shared)
    expected = compare(plain, 4)
    selective = {"recompute_granularity": "selective"}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for changes in (
        {**selective, "recompute_modules": ["moe"]},
        {**selective, "recompute_modules": ["moe_act"]},
        {**selective, "recompute_modules": ["shared_experts"]},
        full,
    ):
        assert train(dataclasses.replace(plain, changes={**shared, **changes}), True, 4)[0] == expected, changes
    deterministic = dataclasses.replace(plain, deterministic=True)
    assert train(deterministic, True, 4)[0] == train(deterministic, True, 4)[0]


def check_frozen_experts_and_sums_in_bf16(rank, ranks):
    """A frozen expert has no sums of DDP's, whose type says how UniEP adds to those of the others."""
    for frozen in ((0,), (1,)):
        for in_fp32 in (False, True):
            setting = Setting(expert=ranks, distributed_optimizer=True, sums_in_fp32=in_fp32, frozen=frozen)
            compare(setting, 3)


def check_a_hundred_steps(rank, ranks):
    losses = compare(Setting(expert=ranks, learning_rate=5e-4), 100)
    assert losses[-1] < 0.6 * losses[0]


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
