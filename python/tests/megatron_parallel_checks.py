"""What test_megatron.py starts: training under Megatron-core's parallelisms, and checkpoints.

For two processes or four.
"""

import pathlib
import shutil
import sys
import tempfile

import megatron_shim  # noqa: F401

# isort: split
import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.pipeline_parallel import get_forward_backward_func

import uniep.candidate_check
import uniep.megatron
import uniep.trials
import uniep.tuner
from distributed_checks import run_checks
from megatron_layers import gathered
from megatron_training import Setting, Training, forward_step, parallelism, train

STEPS = 4


def compare(setting, steps=STEPS):
    """Losses of UniEP's run, beside Megatron's."""
    theirs, got = train(setting, False, steps)[0], train(setting, True, steps)[0]
    for step, (expected, loss) in enumerate(zip(theirs, got, strict=True)):
        assert abs(loss - expected) <= 0.005 * expected, (step, expected, loss)
    assert got[-1] < got[0]
    return got


def check_tensor_parallelism(rank, ranks):
    compare(Setting(tensor=2, expert=ranks))


def check_interleaved_pipeline(rank, ranks):
    compare(Setting(pipeline=2, virtual=2, expert=ranks // 2, layers=4, micro_batches=4))


def check_context_parallelism(rank, ranks):
    compare(Setting(context=2, expert=ranks))


def check_distributed_optimizer(rank, ranks):
    """With overlapped reduces and gathers; experts are sharded too where EP leaves them replicas."""
    got = compare(Setting(expert=ranks // 2, distributed_optimizer=True))
    plain = train(Setting(expert=ranks // 2), True, STEPS)[0]
    assert all(abs(a - b) <= 1e-3 * b for a, b in zip(got, plain, strict=True)), (got, plain)


def check_bf16_main_grads(rank, ranks):
    """DDP adds gradients to them itself, of several micro-batches."""
    compare(Setting(expert=ranks // 2, distributed_optimizer=True, micro_batches=2, sums_in_fp32=False))


def check_tuners_of_replicas(rank, ranks):
    """The expert-parallel groups begin with different candidates, tell each other, and change no loss."""
    setting = Setting(expert=ranks // 2, distributed_optimizer=True)
    expected = train(setting, True, 8)[0]
    replica, checked, heard = rank // (ranks // 2), [], []
    own_group = uniep.tuner._OfGroup
    add = own_group.add_results

    def check(self, direction, candidate, incumbent):
        checked.append((direction, candidate))
        if replica == 1:
            raise RuntimeError("planted")
        return True, "", 1e-3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uniep.tuner, "_STEPS_TO_SHARE", 3)
        patch.setattr(own_group, "add_results", lambda self, one: heard.append(one) or add(self, one))
        patch.setattr(uniep.candidate_check.CandidateCheck, "check", check)
        uniep.megatron.patch(tune_until=100)
        uniep.megatron.unpatch()
        with uniep.trials.active as tuner:
            tuner._settings |= {"budget": 1, "folder": None}
            assert train(setting, True, 8)[0] == expected
            (own,) = tuner._groups
            assert (own.settings["job_group"], own.settings["job_groups"]) == (replica, 2)
            assert own.steps == 8 and own.strangers == set() and len(heard) == 2
    all_checked = gathered(checked)
    assert all(all_checked) and all_checked[0][0] != all_checked[-1][0]
    failed = [text for _, text in all_checked[-1]]
    assert replica == 1 or any(text in heard[1] for text in failed)


def loss_without_training(training):
    """Of every rank, forward only."""
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=training.iterators[0],
        model=training.chunks[0],
        num_microbatches=1,
        seq_length=training.setting.sequence,
        micro_batch_size=training.setting.micro_batch,
        forward_only=True,
    )
    return losses[0]["loss"].item()


def shared_folder(rank):
    given = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(given)
    return pathlib.Path(given[0])


def check_checkpoint_of_another_number_of_ranks(rank, ranks):
    """Saved with fewer experts a rank, loaded with more, and by Megatron's own layer; the loss has the same bits."""
    folder = shared_folder(rank)
    try:
        with parallelism(Setting(expert=ranks // 2)):
            training = Training(Setting(expert=ranks // 2), True)
            for _ in range(3):
                training.step()
            expected = loss_without_training(training)
            dist_checkpointing.save(training.chunks[0].module.sharded_state_dict(), str(folder))
            del training
        for ours in (True, False):
            setting = Setting(expert=ranks, seed=99)
            with parallelism(setting):
                training = Training(setting, ours)
                model = training.chunks[0].module
                assert loss_without_training(training) != expected
                model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))
                got = loss_without_training(training)
                assert got == expected if ours else abs(got - expected) <= 0.005 * expected, (got, expected)
                del training, model
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
