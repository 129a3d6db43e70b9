"""What a failed collective is told as; test_dead_rank.py has processes that really die."""

import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from uniep import peers


@pytest.fixture
def group(monkeypatch):
    """Rank 1 of 4: rank 0 on this host, rank 2 on it as well, rank 3 elsewhere."""
    monkeypatch.setattr(peers, "_LOOKS", 1)
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    own = peers.own_process()
    away = peers.Process(("another", "boot", "pid:[1]"), own.pid)
    return types.SimpleNamespace(
        rank=1, size=4, failure=None, process_group=None, processes=[peers.Process(own.host, 1), own, own, away]
    )


def fail(group, error):
    with peers.waiting(group, "rows for its experts"):
        raise error


@pytest.mark.parametrize(
    ("backend", "advice"),
    [("gloo", "make a new process group and a new Group"), ("nccl", "group.recover() allows new calls")],
)
def test_ranks_that_are_not_known_to_be_gone(group, backend, advice, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    message = (
        "group: rank 1 of 4 did not get rows for its experts: it waited for ranks 0, 2, 3, and none is known to be "
        f"gone (not seen from here are another: ranks 3); {advice}. {backend} says: Timed out"
    )
    with pytest.raises(TimeoutError) as raised:
        fail(group, RuntimeError("Timed\n out"))
    assert str(raised.value) == group.failure == message
    with pytest.raises(TimeoutError) as raised, peers.waiting(group, "more"):
        raise AssertionError("a group that has failed makes no call")
    assert str(raised.value) == message


def test_a_rank_that_is_gone(group):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    zombie.stdout.read()
    group.processes[0] = group.processes[0]._replace(pid=child.pid)
    group.processes[3] = group.processes[3]._replace(pid=child.pid)  # another host's number
    with pytest.raises(TimeoutError, match=rf"gone: rank 0 \(process {child.pid}\); the others need a new"):
        fail(group, dist.DistBackendError("Connection closed by peer"))
    group.processes[2] = group.processes[2]._replace(pid=zombie.pid)
    for _ in range(200):
        if f"rank 2 (process {zombie.pid})" in peers.find_gone(group):
            break
        peers.time.sleep(0.05)
    else:
        raise AssertionError("a process that ended and was not waited for is gone")
    zombie.wait()


def test_other_errors_stay(group):
    for error in (ValueError("an argument"), torch.OutOfMemoryError("no room")):
        with pytest.raises(type(error)):
            fail(group, error)
    assert group.failure is None
