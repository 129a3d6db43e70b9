"""What test_pilot.py starts: its large models in small, and comparisons of bits that differ."""

import dataclasses
import sys

import megatron_shim  # noqa: F401

# isort: split
import torch

from distributed_checks import run_checks
from uniep.pilot import arms, bits, sizes, turns
from uniep.pilot.text import Text
from uniep.pilot.training import Setting, Training, set_up_parallelism

SMALL = {"layers": 2, "hidden": 64, "intermediate": 32, "experts": 8, "topk": 2, "heads": 4, "vocabulary": 256}
CHANGES = {
    "qwen3-30b": {"num_query_groups": 2, "kv_channels": 16, "ffn_hidden_size": 64},
    "deepseek-v2-lite": {
        "ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 64,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 24,
        "kv_channels": 16,
    },
}


def setting(name="tiny"):
    size = sizes.SIZES[name]
    if name in CHANGES:
        changes = {**size.changes, **CHANGES[name]}
        size = dataclasses.replace(size, **SMALL, sequence=32, batch=2, learning_rate=3e-3, changes=changes)
    return Setting(size, Text(bytes(range(256)) * 8, size.sequence, size.batch, 3), torch.device("cpu"), 5)


def check_large_models_in_small(rank, ranks):
    for name in CHANGES:
        blocks = turns.take_turns(setting(name), arms.find(["stock", "uniep"], "auto")[0], 2, 0, 4, lambda _: None)
        stock, uniep = blocks[0], blocks[1]
        assert abs(stock.losses[0] - uniep.losses[0]) < 1e-3 * stock.losses[0], name
        assert stock.ends_with != uniep.ends_with
        assert uniep.losses[-1] < uniep.losses[0]
        assert bits.of_blocks(blocks)["uniep"].equal
        names = {span.name for span in uniep.timeline}
        assert ("MLP 1" in names) == (name == "deepseek-v2-lite") and "MoE 2" in names


def check_bits_that_differ_are_seen(rank, ranks):
    """A weight of an expert that differs in one bit, on one rank."""
    arm = arms.find(["uniep"], "auto")[0][0]
    given = setting()
    digests = []
    for nudge in (False, True):
        training = Training(given, arm)
        if nudge and rank == ranks - 1:
            weight = next(one for name, one in training.model.named_parameters() if ".local_experts." in name)
            weight.data.view(torch.int16).view(-1)[0] ^= 1
        digests.append(training.digest())
        training.close()
    assert digests[0] != digests[1]
    block = turns.run_block(given, arm, 0, 0, 2)
    other = dataclasses.replace(block, turn=1, ends_with=digests[0])
    assert bits.of_blocks([block, block])["uniep"].equal
    assert not bits.of_blocks([block, other])["uniep"].equal
    assert not bits.of_blocks([block, dataclasses.replace(block, losses=[1.0])])["uniep"].equal


def check_arms_must_begin_alike(rank, ranks):
    arm = arms.find(["uniep"], "auto")[0][0]
    one = setting()
    other = dataclasses.replace(one, seed=6)
    assert turns.run_block(one, arm, 0, 0, 1).begins_with != turns.run_block(other, arm, 0, 0, 1).begins_with


def set_up():
    set_up_parallelism(torch.distributed.get_world_size())


if __name__ == "__main__":
    sys.exit(run_checks(globals(), set_up))
