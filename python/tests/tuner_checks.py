"""What test_tuner.py starts with torchrun: a training with uniep.Tuner beside one without it, on all ranks."""

import os
import sys
import tempfile
import types
import zlib

import pytest
import torch
import torch.distributed as dist

import uniep
import uniep.tuner
import uniep.tuner_calls
from uniep import candidate_check, peers, together, tuner_exchange

_STEPS, _CALLS = 16, 3
_check = candidate_check.CandidateCheck.check


def cheap_check(self, *arguments):
    """Checks weigh more than the calls of so small a layer; here they are not to use up the budget."""
    return *_check(self, *arguments)[:2], 1e-3


candidate_check.CandidateCheck.check = cheap_check
# Times of so small calls are the machine's mood; these are made up, by the schedule.
uniep.tuner_calls.Timed.milliseconds = lambda self: 1 + zlib.crc32(self.schedule) % 8 / 10


def train(tuner=None, *, steps=_STEPS, by_optimizer=False, after_step=None, **options):
    """Losses of all micro-batches and the last weights, as bytes."""
    torch.manual_seed(3)
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, **options)
    rank = layer.experts.group.rank
    if options.get("main_grad") == "param":
        for weight in layer.experts.parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        for _ in range(_CALLS):
            x = torch.randn(24 + 8 * rank, 64, generator=generator).bfloat16()
            loss = layer(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        for weight in layer.experts.parameters():
            if hasattr(weight, "main_grad"):
                weight.grad = weight.main_grad.bfloat16()
                weight.main_grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
        if tuner is not None and not by_optimizer:
            tuner.step()
            tuner.begin_round()
        if after_step is not None:
            after_step(layer.experts.group)
    return [torch.stack(losses), *[weight.detach().clone() for weight in layer.parameters()]]


def assert_same_bytes(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def agreed(value):
    """What all ranks have, which must be the same."""
    group = uniep.Group()
    ranks = peers.gather_objects(group, value, "a test's values") if group.size > 1 else [value]
    assert all(one == ranks[0] for one in ranks), ranks
    return value


def check_losses_and_weights(folder):
    for options in (
        {},
        {"save": "redispatch", "main_grad": "param"},
        {"save": "recompute", "activation": "relu2"},
        {"bias": True},
        {"bias": True, "main_grad": "param"},
    ):
        expected = train(**options)
        lines = []
        with uniep.Tuner(budget=1, folder="", on_line=lines.append) as tuner:
            assert_same_bytes(train(tuner, **options), expected)
            spent, decisions = tuner.spent, agreed([one._replace(reason="") for one in tuner.decisions])
            assert agreed(spent.tried_calls) > 4 and spent.layers_ms > 0, spent
            assert all(one.verdict in ("taken", "slower", "refused") for one in decisions), decisions
            agreed(tuner.incumbents())
            assert not tuner.frozen


def check_a_group_that_was_aborted(folder):
    """A restart in the process: tuning goes on with the new group."""
    expected = train(steps=12)
    with uniep.Tuner(budget=1, folder="") as tuner:
        for _ in range(2):
            processes = dist.new_group()
            group = uniep.Group(processes)
            assert_same_bytes(train(tuner, steps=12, group=group), expected)
            assert tuner.spent.tried_calls > 0 and len(tuner._groups) == 1
            group.abort()
            dist.destroy_process_group(processes)
        assert not tuner.frozen and tuner._groups == []


def check_recover_begins_anew(folder):
    """Behind an error that ranks heard of in other calls: rank 0 in one that was planned, the others before theirs."""
    expected, failed = train(), []

    def fail(group):
        own = next((own for own in tuner._groups if own.group is group), None)
        if failed or own is None or own.steps < 6:
            return
        failed.append(own)
        if group.rank == 0:
            own.plan(own.layers[0].call, "forward", types.SimpleNamespace())
        group.recover()

    with uniep.Tuner(budget=1, folder="") as tuner:
        assert_same_bytes(train(tuner, after_step=fail), expected)
        assert failed and [own.steps for own in tuner._groups] == [_STEPS - 6]
        assert agreed(tuner.spent.tried_calls) > 0


def check_autotune_and_stats(folder):
    """What autotune() times is no trial, and what it finds is tuned from then on; stats() has what ran."""
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2)
    tried = []

    def measure(group):
        if len(tried) == 0 and tuner.spent.tried_calls > 0:
            tried.append(tuner.spent.tried_calls)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(uniep.tuner._OfGroup, "plan", None)
                uniep.autotune(layer, tokens=24, seconds=0.1)

    uniep.record_stats()
    with uniep.Tuner(budget=1, folder="") as tuner:
        train(tuner, after_step=measure)
        train(tuner)
        assert tried and tuner.spent.tried_calls > 0
        whole = {schedule.count("=") for schedule in tuner.incumbents().values()}
        assert {one.schedule.count("=") for one in uniep.stats()} == whole, uniep.stats()
    uniep.record_stats(False)
    layer.experts.group.tuned.clear()


def check_an_interrupt_in_a_check_leaves_it(folder):
    """And no exchange follows, which would pair with what the others are in."""
    interrupted, given, give = [], [], tuner_exchange.Exchange.give

    def interrupt(*_):
        interrupted.append(len(given))
        raise KeyboardInterrupt

    def counted(self, *arguments):
        given.append(arguments)
        return give(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, uniep.Tuner(budget=1, folder="") as tuner:
        patch.setattr(candidate_check.CandidateCheck, "check", interrupt)
        patch.setattr(tuner_exchange.Exchange, "give", counted)
        with pytest.raises(KeyboardInterrupt):
            train(tuner)
        assert interrupted == [len(given)]
        assert not [one for one in tuner.decisions if one.verdict == "failed"]


def check_until_and_optimizer(folder):
    expected = train(steps=12)
    with uniep.Tuner(budget=1, folder="", until=6, before_optimizer=True) as tuner:
        assert_same_bytes(train(tuner, steps=12, by_optimizer=True), expected)
        assert tuner.frozen
        tried = tuner.spent.tried_calls
        assert tried > 0
        train(tuner, steps=3, by_optimizer=True)
        assert tuner.spent.tried_calls == tried
        assert not any(own.timed for own in tuner._groups), "of calls whose time nobody waits for nothing is held"


def check_results_of_another_group(folder):
    kept = {}
    with uniep.Tuner(budget=1, folder="", job_groups=2) as tuner:
        train(tuner, steps=12, after_step=lambda group: kept.update(bytes=tuner.results(group)))
    assert len(kept["bytes"]) > 100
    shared = agreed(kept["bytes"]) if uniep.Group().size == 1 else kept["bytes"]
    group = uniep.Group()
    if group.size > 1:
        shared = peers.broadcast_object(group, lambda: shared, "a test's results")
    given = []

    def give(group):
        if not given and tuner.results(group):
            tuner.add_results(group, shared)
            with pytest.raises(ValueError, match="results that can not be used"):
                tuner.add_results(group, shared[:-1])
            given.append(True)

    expected = train(steps=10)
    with uniep.Tuner(budget=1, folder="", job_group=1, job_groups=2) as tuner:
        assert_same_bytes(train(tuner, steps=10, after_step=give), expected)
    assert given


def check_groups_of_a_job_tell_each_other(folder):
    """By the ranks that hold the same experts; here each rank is a group of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return
    heard, told = [], []
    own_group = uniep.tuner._OfGroup
    add, results = own_group.add_results, own_group.results
    with pytest.MonkeyPatch.context() as patch, uniep.Group("self", workers=3) as group:
        patch.setattr(uniep.tuner, "_STEPS_TO_SHARE", 3)
        patch.setattr(own_group, "add_results", lambda self, one: heard.append(one) or add(self, one))
        patch.setattr(own_group, "results", lambda self: told.append(results(self)) or told[-1])
        expected = train(group=group)
        group.replicas = dist.group.WORLD
        with uniep.Tuner(budget=1, folder="", until=11) as tuner:
            assert_same_bytes(train(tuner, group=group), expected)
            own = tuner._groups[0]
            assert (own.settings["job_group"], own.settings["job_groups"]) == (rank, ranks)
            assert tuner._settings["job_groups"] == 1  # of other groups of this process
            assert tuner.frozen and own.others is None  # all have frozen: it is over
            tried = tuner.spent.tried_calls
        others = [None] * ranks
        dist.all_gather_object(others, (told, tried))
        assert all(count > 0 for _, count in others)
        assert len(told) == 4 and heard == others[1 - rank][0][:3] != told[:3], (len(told), len(heard))

        heard.clear(), told.clear()
        lines = []
        with uniep.Tuner(budget=1, folder="", on_line=lines.append) as tuner:
            train(tuner, group=group, bias=rank == 1)
        assert len(heard) == 5
        (line,) = [one for one in lines if "is not heard" in one]
        assert line.startswith(f"uniep tuner: group {1 - rank} of the job is not heard: ") and "other layers" in line

        heard.clear()
        with uniep.Tuner(budget=1, folder="", job_group=rank, job_groups=ranks) as tuner:
            train(tuner, group=group)
        assert heard == []  # who numbers them tells them himself


def check_one_rank_lacks_memory_in_a_check(folder):
    """It is an end of the check on all ranks, of which none waits for another: they recover together, or not at all."""
    group = uniep.Group()
    recovered = []

    class Check(candidate_check.CandidateCheck):
        check = _check

        def __init__(self, fails_in, error):
            self.call = types.SimpleNamespace(group=group)
            self.fails_in, self.error = fails_in, error

        def _inputs(self, direction):
            return {}

        def _run(self, direction, schedule, inputs):
            if schedule == self.fails_in and group.rank == group.size - 1:
                raise self.error("planted")
            return [torch.zeros(2)], (1, 1, 1)

    def outcome(fails_in, error=MemoryError):
        recovered.clear()
        try:
            found = Check(fails_in, error).check("forward", b"candidate", b"incumbent")[:2]
        except Exception as caught:
            found = together.status_of(caught), str(caught)
        return agreed((found, len(recovered)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "recover", lambda: recovered.append(True))
        assert outcome(None) == ((True, ""), 0)
        place = f"rank {group.size - 1}: " if group.size > 1 else ""
        kinds = {torch.OutOfMemoryError: 6, MemoryError: 6, TimeoutError: 4, ValueError: 1, RuntimeError: 8}
        for error, status in kinds.items():
            assert outcome(b"candidate", error) == ((status, f"{place}planted"), 1), error
        for error in (torch.OutOfMemoryError, MemoryError):
            assert outcome(b"incumbent", error) == ((False, "a rank has no room to check it"), 1), error
        assert outcome(b"incumbent", RuntimeError) == ((8, f"{place}planted"), 1)


def check_kept_in_a_folder(folder):
    with uniep.Tuner(budget=1, folder=folder) as tuner:
        train(tuner, steps=8)
        assert tuner.spent.tried_calls > 0
    group = uniep.Group()
    if group.size > 1:
        peers.gather_objects(group, None, "the end of a test")
    assert (group.rank != 0) or os.listdir(folder)


def check_faulty_candidates(folder):
    """A candidate with other bytes, and one that fails, on one rank only: neither runs in the job."""
    whole = candidate_check.CandidateCheck.check
    for fault in ("wrong", "fails"):
        seen = []

        def check(self, direction, candidate, incumbent, fault=fault, seen=seen):
            result = whole(self, direction, candidate, incumbent)
            seen.append(candidate)
            if len(seen) == 1 and self.call.group.rank == self.call.group.size - 1:
                if fault == "fails":
                    raise RuntimeError("planted")
                return False, "", 1e-3
            return result

        candidate_check.CandidateCheck.check = check
        try:
            with uniep.Tuner(budget=1, folder="") as tuner:
                train(tuner, steps=8)
                first = agreed([one._replace(reason="") for one in tuner.decisions])[0]
        finally:
            candidate_check.CandidateCheck.check = whole
        assert first.verdict == ("wrong" if fault == "wrong" else "failed"), first
        assert first.pairs == 0 and first.schedule.encode() == seen[0]


def check_other_layers(folder):
    group = uniep.Group()
    if group.size == 1:
        return
    with uniep.Tuner(budget=1, folder="") as tuner:
        option = {"schedule": "order.raster=2"} if group.rank == 0 else {}
        torch.manual_seed(3)
        uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, **option)(
            torch.zeros(4, 64, dtype=torch.bfloat16)
        )
        with pytest.raises(ValueError, match="called other layers than rank"):
            tuner.step()


def check_long_messages(folder):
    group = uniep.Group()
    if group.size == 1:
        return
    exchange = tuner_exchange.Exchange(group)
    own = [bytes([group.rank]) * count for count in (0, 5, 20_000 * group.rank)]
    for number, text in enumerate(own):
        exchange.give(number, text)
    for number in range(3):
        expected = [
            bytes([rank]) * len(own[number]) if number < 2 else bytes([rank]) * 20_000 * rank
            for rank in range(group.size)
        ]
        assert exchange.take(number) == expected


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    with tempfile.TemporaryDirectory() as folder:
        for check in checks:
            check(folder)
    if rank == 0:
        print(f"{len(checks)} checks passed on {ranks} ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
