"""The collectives of torch that a group makes itself, and what is known of its ranks when one of them fails.

torch's own errors ("Connection closed by peer [127.0.0.1]:4711") name no rank. Here they become a TimeoutError that
says what this rank waited for, and which ranks of this host are gone. From then on the group refuses calls.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import time
import typing
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

if typing.TYPE_CHECKING:
    from uniep.group import Group

_LOOKS, _LOOK_SECONDS = 20, 0.05  # a process that is killed closes its sockets before it is seen to be gone


class Process(typing.NamedTuple):
    """Where a rank runs: two on one host have the same `host`, and see each other's process ids."""

    host: tuple[str, str, str]  # name, boot, namespace of process ids
    pid: int
    network: str = ""  # its namespace, in which the library's sockets are
    user: str = ""  # as the kernel has it: two user namespaces may both call theirs 0


def own_process() -> Process:
    host = socket.gethostname(), _boot_id(), _namespace("pid")
    return Process(host, os.getpid(), _namespace("net"), f"{os.geteuid()} {_user_map()}")


@contextlib.contextmanager
def waiting(group: Group, what: str) -> Iterator[None]:
    """Around a collective of the group's process group: its errors become TimeoutError, and stay the group's failure.

    Args:
        what: what this rank gets from the others by it.

    Raises:
        TimeoutError: the collective failed, or an earlier one had.
    """
    if group.failure is not None:
        raise TimeoutError(group.failure)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        group.failure = _described(group, what, error)
        raise TimeoutError(group.failure) from error


def gather_objects(group: Group, own: typing.Any, what: str) -> list[typing.Any]:
    """What each rank gives, in rank order. Collective."""
    ranks: list[typing.Any] = [None] * group.size
    with waiting(group, what):
        dist.all_gather_object(ranks, own, group=group.process_group)
    return ranks


def broadcast_object(group: Group, make: Callable[[], typing.Any], what: str) -> typing.Any:
    """What rank 0 makes. Collective."""
    shared = [make() if group.rank == 0 else None]
    with waiting(group, what):
        dist.broadcast_object_list(shared, group=group.process_group, group_src=0)
    return shared[0]


def is_lost(group: Group) -> bool:
    """Whether a collective that has failed leaves the process group without others: gloo closes its connections."""
    return dist.get_backend(group.process_group) == "gloo"


def find_gone(group: Group) -> str | None:
    """Which other ranks on this host have ended, in words; None: none that is known of."""
    own = own_process()
    gone = [
        f"rank {rank} (process {process.pid})"
        for rank, process in enumerate(group.processes)
        if rank != group.rank and process.host == own.host and _is_gone(process.pid)
    ]
    return f"gone: {', '.join(gone)}; the others need a new process group and a new Group" if gone else None


def find_gone_by_now(group: Group) -> str | None:
    """The same after an error, which may come before an end is seen: looks for a second."""
    known = find_gone(group)
    for _ in range(_LOOKS):
        if known is not None:
            break
        time.sleep(_LOOK_SECONDS)
        known = find_gone(group)
    return known


def _described(group: Group, what: str, error: RuntimeError) -> str:
    known = find_gone_by_now(group)
    if known is None:
        others = ", ".join(str(rank) for rank in range(group.size) if rank != group.rank)
        known = f"it waited for ranks {others}, and none is known to be gone{_elsewhere(group)}"
        lost = "make a new process group and a new Group"
        known += f"; {lost if is_lost(group) else 'group.recover() allows new calls'}"
    backend = dist.get_backend(group.process_group)
    reason = " ".join(str(error).split())
    return f"group: rank {group.rank} of {group.size} did not get {what}: {known}. {backend} says: {reason}"


def _elsewhere(group: Group) -> str:
    """The ranks that are not seen from here."""
    own = own_process()
    hosts: dict[str, list[str]] = {}
    for rank, process in enumerate(group.processes):
        if process.host != own.host:
            hosts.setdefault(process.host[0], []).append(str(rank))
    places = "; ".join(f"{name}: ranks {', '.join(ranks)}" for name, ranks in hosts.items())
    return f" (not seen from here are {places})" if places else ""


def _is_gone(pid: int) -> bool:
    status = pathlib.Path(f"/proc/{pid}/stat")
    try:
        state = status.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return pathlib.Path("/proc/self").exists()
    except OSError:
        return False
    return state in "ZX"


def _boot_id() -> str:
    file = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


def _user_map() -> str:
    try:
        return " ".join(pathlib.Path("/proc/self/uid_map").read_text().split())
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return str(pathlib.Path("/proc/self/ns", kind).readlink())
    except OSError:
        return ""
