"""Which results have the same bits: of an arm twice, and of UniEP under what must change none."""

from __future__ import annotations

import pathlib
import typing
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from uniep.pilot.arms import Arm
from uniep.pilot.training import Setting, Training
from uniep.pilot.turns import Block

OTHER_SCHEDULE = "fusion=none"


class Equality(typing.NamedTuple):
    """One comparison of bits. `compared` says of what."""

    what: str
    compared: str
    equal: bool
    bits: str  # the first digits of the digests


def of_blocks(blocks: Sequence[Block]) -> dict[str, Equality]:
    """By arm: whether all its turns gave the same losses and ended with the same parameters. Not of a single turn."""
    found = {}
    for name in dict.fromkeys(block.arm for block in blocks):
        own = [block for block in blocks if block.arm == name]
        if len(own) < 2:
            continue
        digests = [block.ends_with for block in own]
        equal = len(set(digests)) == 1 and all(block.losses == own[0].losses for block in own)
        steps = len(own[0].losses)
        compared = f"losses and parameters after {steps} steps, {len(own)} times"
        found[name] = Equality("the same again", compared, equal, _digits(digests))
    return found


def _digits(digests: Iterable[str]) -> str:
    return ", ".join(digest[:12] for digest in dict.fromkeys(digests))


def _run(setting: Setting, arm: Arm, steps: int) -> tuple[list[float], str]:
    training = Training(setting, arm)
    try:
        return training.run(steps), training.digest()
    finally:
        training.close()


def of_schedules(setting: Setting, arm: Arm, steps: int) -> Equality:
    """UniEP with another Schedule."""
    results = [_run(setting, arm._replace(schedule=schedule), steps) for schedule in (arm.schedule, OTHER_SCHEDULE)]
    return Equality(
        f"another Schedule: {OTHER_SCHEDULE} beside {arm.schedule}",
        f"losses and parameters after {steps} steps",
        results[0] == results[1],
        _digits(digest for _, digest in results),
    )


def of_restart(setting: Setting, arm: Arm, steps: int, folder: pathlib.Path) -> tuple[Equality, list[float], str]:
    """UniEP without an interruption, and begun again half-way from a checkpoint; also losses and digest of the first.

    The checkpoint is left in the folder.
    """
    half = steps // 2
    training = Training(setting, arm)
    try:
        losses = training.run(half)
        training.save(folder)
        losses += training.run(steps - half)
        digest = training.digest()
    finally:
        training.close()
    training = Training(setting, arm)
    try:
        training.load(folder)
        again, digest_again = training.run(steps - half), training.digest()
    finally:
        training.close()
    equality = Equality(
        f"a restart from the checkpoint of step {half}",
        f"losses of steps {half + 1} to {steps} and parameters behind them",
        again == losses[half:] and digest_again == digest,
        _digits((digest, digest_again)),
    )
    return equality, losses, digest


def of_other_batches(setting: Setting, arm: Arm) -> Equality:
    """One MoE layer: a rank's y and dx while all other ranks have another batch, for each rank in turn."""
    training = Training(setting, arm)
    try:
        layer: MoELayer | None = next(module for module in training.model.modules() if isinstance(module, MoELayer))
        equal = True
        for fixed in range(dist.get_world_size()):
            results = [_run_layer(training, layer, fixed, variant) for variant in (1, 2)]
            if dist.get_rank() == fixed:
                pairs = zip(*results, strict=True)
                equal = equal and all(
                    torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in pairs
                )
        everywhere = [True] * dist.get_world_size()
        dist.all_gather_object(everywhere, equal)
    finally:
        layer = None  # it holds the memory of all parameters
        training.close()
    compared = "y and dx of one MoE layer on each rank in turn"
    return Equality("another batch on the other ranks", compared, all(everywhere), "")


def _run_layer(training: Training, layer: MoELayer, fixed: int, variant: int) -> tuple[torch.Tensor, torch.Tensor]:
    size, device = training.setting.size, training.setting.device
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * rank + (0 if rank == fixed else variant))
    shape = size.sequence, size.batch, size.hidden
    x, dy = (torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(2))
    x.requires_grad_()
    with training.ddp.no_sync():
        y = layer(x)[0]
        y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad
