"""The communicator that a Group borrows of torch's process group. One of NCCL: gpu_checks.py."""

import types

import pytest
import torch
import torch.distributed as dist

import uniep
import uniep.group
from uniep import communicators

GPU = torch.device("cuda", 0)


@pytest.fixture
def process_group(monkeypatch):
    """Makes process groups, as far as they are looked at; `reduced` says how many collectives they saw."""
    reduced = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.backends)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append(group))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: None)

    def make(backends="cuda:nccl", **backend):
        made = types.SimpleNamespace(backends=backends, reduced=reduced)
        made._get_backend = lambda device: types.SimpleNamespace(**backend)
        return made

    return make


def test_it_is_made_before_it_is_borrowed(process_group):
    group = process_group()
    group._get_backend = lambda device: types.SimpleNamespace(_comm_ptr=lambda: 4096 * len(group.reduced))
    assert communicators.borrowed(group, GPU) == 4096


def test_what_has_none(process_group):
    with pytest.raises(ValueError, match=r"communicator: 'borrow' of a process group with cpu:gloo.*legal is 'own'"):
        communicators.borrowed(process_group("cpu:gloo"), GPU)
    with pytest.raises(uniep.Unsupported, match="needs a torch that gives NCCL's communicator away"):
        communicators.borrowed(process_group(), GPU)
    with pytest.raises(uniep.Unsupported, match="has made none for cuda:0"):
        communicators.borrowed(process_group(_comm_ptr=lambda: 0), GPU)


def test_the_library_gets_it_in_the_place_of_an_id(monkeypatch):
    """A group of two native ranks, as on GPUs, up to where the library would be asked for it."""
    given = []

    def engine(device, options):
        given.append(options)
        raise uniep.Unsupported("no GPU here")

    monkeypatch.setattr(uniep.group, "Engine", engine)
    monkeypatch.setattr(uniep.group.Group, "_choose", lambda self, transport: ("native", "told so"))
    monkeypatch.setattr(uniep.group.Group, "_unique_id", lambda self: b"x" * 128)
    monkeypatch.setattr(uniep.group.peers, "gather_objects", lambda *_: [])
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(communicators, "borrowed", lambda group, device: 4096)
    group = dist.ProcessGroup(1, 2)
    for communicator in ("borrow", "own"):
        with pytest.raises(uniep.Unsupported, match="no GPU here"):
            uniep.Group(group, "native", device="cpu", communicator=communicator)
    borrowed, own = given
    assert (borrowed["communicator"], borrowed["rank"], borrowed["ranks"]) == (4096, 1, 2)
    assert "unique_id" not in borrowed and "communicator" not in own and own["unique_id"]


def test_one_rank_borrows_nothing():
    with uniep.Group("self", device="cpu", communicator="borrow") as group:
        assert group.transport == "native"
        assert group is not uniep.Group("self", device="cpu")
    with pytest.raises(ValueError, match="communicator: 'mine'; legal are own, borrow"):
        uniep.Group("self", communicator="mine")
