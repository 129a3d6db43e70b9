"""SMs that calls leave to NCCL: how many, and in which schedules. Kernels that really share a GPU: gpu_checks.py."""

import itertools
import types

import pytest
import torch.distributed as dist

import uniep
from uniep import reserved_sms
from uniep.schedules import encoded


@pytest.fixture
def nccl(monkeypatch):
    """Makes process groups of so many ranks and CTAs, as far as taken_by() looks at them."""
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.ranks)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.backend)

    numbers = itertools.count()

    def make(ranks=2, ctas=-(2**31), backend="cpu:gloo,cuda:nccl", first=False):
        config = types.SimpleNamespace(max_ctas=ctas)
        made = types.SimpleNamespace(options=types.SimpleNamespace(config=config, is_high_priority_stream=first))
        name = f"group {next(numbers)}"
        return types.SimpleNamespace(ranks=ranks, backend=backend, group_name=name, _get_backend=lambda device: made)

    return make


def test_a_collective_takes_what_nccl_is_told(nccl, monkeypatch):
    assert reserved_sms.most_ctas(nccl(ctas=16)) == 16
    assert reserved_sms.most_ctas(nccl()) is None
    assert reserved_sms.most_ctas(nccl(ctas=16, ranks=1)) == 0
    assert reserved_sms.most_ctas(nccl(backend="cpu:gloo")) == 0
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    assert reserved_sms.most_ctas(nccl(ctas=16)) == reserved_sms.most_ctas(nccl()) == 4


def test_collectives_of_several_groups_run_side_by_side():
    assert (reserved_sms.total([]), reserved_sms.total([8, 0, 16]), reserved_sms.total([8, None])) == (0, 24, None)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("auto", "comm.reserve_sms=8"),
        ("", "comm.reserve_sms=8"),
        ("fusion=pairs", "fusion=pairs,comm.reserve_sms=8"),
        ("comm.reserve_sms=3,fusion=pairs", "comm.reserve_sms=3,fusion=pairs"),
        ('{"fusion": "pairs"}', '{"fusion": "pairs"}'),
    ],
)
def test_a_schedule_that_names_no_number_gets_it(text, left):
    assert reserved_sms.leave(text, 8) == left
    assert reserved_sms.leave(text, 0) == text


@pytest.mark.parametrize(
    ("text", "lent"),
    [
        ("auto", True),
        ("fusion=pairs", True),
        ("queue=static", False),
        ("queue = static", False),
        ("comm.where=sms", False),
        ("comm.dispatch_sms=8", False),
        ("comm.where=warps, comm.dispatch_sms=0,comm.combine_sms=0,comm.reduce_sms=0", True),
        ("comm.where=warps,comm.dispatch_sms=0,comm.combine_sms=4", False),
        ("comm.lend_sms=on", False),
        ("dispatch.transport=push", False),
        ("comm.lend_sms=off", False),
        ("comm.reserve_sms=3", False),
    ],
)
def test_what_can_be_lent_is(text, lent):
    left = reserved_sms.leave(text, 8, True)
    assert left.endswith("comm.reserve_sms=8,comm.lend_sms=on") == lent
    if not lent:
        assert left == reserved_sms.leave(text, 8)
    assert reserved_sms.leave(text, 0, True) == text


def test_collectives_of_high_priority_go_first(nccl, monkeypatch):
    assert reserved_sms.goes_first(nccl(first=True)) and not reserved_sms.goes_first(nccl())
    assert reserved_sms.goes_first(nccl(ranks=1)) and reserved_sms.goes_first(nccl(backend="cpu:gloo"))
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    assert not reserved_sms.goes_first(nccl())
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    assert reserved_sms.goes_first(nccl())


def test_a_group_lends_where_all_collectives_go_first(nccl):
    with uniep.Group("self", workers=1) as group:
        assert not group.lends
        group.size = 2
        group.run_beside()
        assert not group.lends, "nothing is reserved"
        group.run_beside(nccl(ctas=8, first=True), nccl(ranks=1))
        assert group.lends and group.reserved == 8
        group.run_beside(nccl(ctas=8))
        assert not group.lends and group.reserved == 16
        group.size = 1
    with uniep.Group("self", workers=1, shared=False) as group:
        group.size = 2
        group.run_beside(nccl(ctas=8, first=True), all_known=False)
        assert not group.lends
        group.size = 1


def test_redispatch_and_reserved_sms_meet_in_one_text():
    forward, backward = encoded(("auto", "queue=static"), "redispatch", 8)
    assert forward == b"comm.reserve_sms=8,save.xg=redispatch"
    assert backward == b"queue=static,comm.reserve_sms=8,save.xg=redispatch"


def test_an_unknown_number_is_refused_where_it_is_needed():
    with pytest.raises(ValueError, match="set NCCL_MAX_CTAS"):
        encoded("auto", "keep", None)
    assert encoded("comm.reserve_sms=16", "keep", None) == (b"comm.reserve_sms=16",) * 2


def test_a_group_of_several_native_ranks_leaves_them(nccl):
    """As a Group on GPUs does; here there is none, so that it is told to be one."""
    with uniep.Group("self", workers=1) as group:
        group.run_beside(nccl(ctas=8), None)
        assert group.reserved == 0, "one rank waits for nobody"
        group.size = 2
        group.run_beside(nccl(ctas=16))
        assert group.reserved == 24 and group.engine.reserved == 24
        pipeline = nccl(ctas=8)
        for times in (1, 2, 2):
            group.run_beside(pipeline, times=times)
            assert group.reserved == 24 + 8 * times
        group.run_beside(all_known=False)
        assert group.reserved is None
        group._beside.popitem()
        group.run_beside(nccl())
        assert group.reserved is None
        group.reserve_sms = 12
        group.run_beside()
        assert group.reserved == 12
        group.transport = "torch"
        group.run_beside()
        assert group.reserved == 0, "kernels of transport torch wait for nobody"
        group.size = 1


class Told:
    """A stand-in for a Group, which notes how often each process group counts."""

    def __init__(self):
        self.all_known, self.times = True, {}

    def run_beside(self, *groups, times=1, all_known=True):
        self.all_known &= all_known
        self.times |= {one: times for one in groups if one is not None}


def test_megatrons_groups_beside_a_layer(monkeypatch):
    """Of the collection that a layer is built with, and of parallel_state where it lacks them."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    from uniep.megatron import beside

    def told(overlap=False, stages=2, **collection):
        group = Told()
        config = types.SimpleNamespace(overlap_p2p_comm=overlap, pipeline_model_parallel_size=stages)
        beside.tell(group, config, types.SimpleNamespace(**collection) if collection else None)
        return group

    three = {"dp_cp": "DP", "expt_dp": "EDP", "pp": "PP"}
    assert not told().all_known
    assert not told(dp_cp="DP", expt_dp="EDP").all_known
    assert told(dp_cp="DP", expt_dp="EDP", stages=1).all_known
    found = told(**three, overlap=True, dp_cp_ag="AG", expt_dp_ag=None)
    assert found.all_known and found.times == {"DP": 1, "EDP": 1, "PP": 2, "AG": 1}
    assert told(dp_cp="DP", expt_dp="EDP", pp=["PP", "PP of another module"]).times["PP of another module"] == 1
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: True)
    for name, answer in (("data", "DP"), ("expert_data", "EDP"), ("pipeline_model", "PP")):
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_group", lambda answer=answer, **_: answer)
    found = told()
    assert found.all_known and found.times == {"DP": 1, "EDP": 1, "PP": 1}
    assert told(dp_cp="DP of the layer", dp_cp_ag=None).times == {"DP of the layer": 1, "EDP": 1, "PP": 1}


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8", None])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="reserve_sms: .*; legal are 'auto' and numbers from 0"):
        uniep.Group("self", workers=1, reserve_sms=wrong)
