"""Group: the ranks that run a layer together."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import itertools
import logging
import os
import typing
import weakref

import torch
import torch.distributed as dist

from uniep import capture, communicators, cuda_libraries, library, peers, rerun, reserved_sms, trials, tuning
from uniep.engine import Engine
from uniep.errors import DeviceError, Unsupported

_log = logging.getLogger("uniep")
_TRANSPORTS = ("auto", "native", "torch")
_MOST_NATIVE_RANKS = 8
_ASKED_FOR = "asked for"
_ARRIVAL_SECONDS, _LONGEST_SECONDS = 600, 1e6  # the library's default, and the longest limit that it takes
_told: set[str] = set()
_numbers = itertools.count()
_by_name: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def find_group(name: str) -> Group:
    """The group of a name, which custom ops have in its place."""
    group = _by_name.get(name)
    if group is None:
        raise ValueError(f"group: there is none of the name '{name}' any more; compile again with one that is open")
    return group


class _Arguments(typing.NamedTuple):
    """What a shared Group was made with."""

    pg: dist.ProcessGroup | None
    device: torch.device
    transport: str
    workers: int
    timeout_s: float | None
    arrival_timeout_s: float | None
    reserve_sms: int | str
    communicator: str


class _Cached(type):
    """Equal arguments give the same Group until it is closed."""

    groups: typing.ClassVar[dict[_Arguments, Group]] = {}

    def __call__(
        cls,
        pg: dist.ProcessGroup | typing.Literal["self"] | None = None,
        transport: str = "auto",
        *,
        device: torch.device | str | int | None = None,
        workers: int = 0,
        timeout_s: float | None = None,
        arrival_timeout_s: float | None = None,
        reserve_sms: int | str = "auto",
        communicator: str = "own",
        shared: bool = True,
    ) -> typing.Any:
        if pg is None and dist.is_available() and dist.is_initialized():
            pg = dist.group.WORLD
        elif pg == "self":
            pg = None
        elif not _may_be_process_group(pg):
            hint = " (get_group() of a mesh)" if hasattr(pg, "get_group") else ""
            raise ValueError(f"pg: {pg!r}; legal are a process group{hint}, 'self' and None")
        limits = timeout_s, arrival_timeout_s
        given = _Arguments(pg, _device(device), transport, workers, *limits, reserve_sms, communicator)
        try:
            found = cls.groups.get(given) if shared else None
        except TypeError:  # a list, say
            found = None
        if found is not None:
            return found
        _check(given)
        if shared:
            _refuse_another(given, cls.groups)
        options = given._asdict()
        made = super().__call__(options.pop("pg"), options.pop("transport"), **options, shared=shared)
        if shared:
            cls.groups[given] = made
        return made


def _may_be_process_group(pg: object) -> bool:
    if pg is None:
        return True
    return dist.is_available() and (isinstance(pg, dist.ProcessGroup) or pg is dist.GroupMember.NON_GROUP_MEMBER)


def _check(given: _Arguments) -> None:
    if given.transport not in _TRANSPORTS:
        raise ValueError(f"transport: {given.transport!r}; legal are {', '.join(_TRANSPORTS)}")
    if not isinstance(given.workers, int) or given.workers < 0:
        raise ValueError(f"workers: {given.workers!r}; must be 0 (the engine's choice) or a larger whole number")
    for name, limit in (("timeout_s", given.timeout_s), ("arrival_timeout_s", given.arrival_timeout_s)):
        if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
            raise ValueError(f"{name}: {limit!r}; must be above 0, or None")
    reserved_sms.checked(given.reserve_sms)
    communicators.checked(given.communicator)


def _refuse_another(given: _Arguments, groups: dict[_Arguments, Group]) -> None:
    """ValueError where the ranks of several have a Group that differs in an option: a second one would have flags and
    symmetric memory of its own on each of them, unseen."""
    for other, group in list(groups.items()):
        if given[:2] != other[:2] or group.size == 1 or group.engine.has_ended:
            continue
        name = next(name for name in _Arguments._fields[2:] if getattr(given, name) != getattr(other, name))
        raise ValueError(
            f"{name}: {getattr(given, name)!r}; the Group that these ranks share on {given.device} has "
            f"{getattr(other, name)!r}. Give that one, close() it first, or shared=False for one more beside it"
        )


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if _has_hopper() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {found}; legal are cpu and cuda")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found


def _tell_transport(group: Group) -> None:
    """Each reason for the slow one on GPUs is a warning, once."""
    is_slow = group.transport == "torch" and group.device.type == "cuda" and group.why != _ASKED_FOR
    if is_slow and group.why not in _told:
        _told.add(group.why)
        _log.warning("transport torch: %s; nothing of it is overlapped with the GEMMs", group.why)
    else:
        _log.info("transport %s: %s", group.transport, group.why)


def _arrival_limit(pg: dist.ProcessGroup | None, device: torch.device) -> float:
    """Seconds; 0: the library's own choice. A job that lets its collectives wait for longer means layers, too."""
    if pg is None or os.environ.get("UNIEP_ARRIVAL_TIMEOUT_S"):
        return 0
    try:
        limit = getattr(getattr(pg._get_backend(device), "options", None), "_timeout", None)
    except RuntimeError:  # it has no backend of this device
        return 0
    if not isinstance(limit, datetime.timedelta) or limit.total_seconds() <= _ARRIVAL_SECONDS:
        return 0
    return min(limit.total_seconds(), _LONGEST_SECONDS)


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class GroupMemory(typing.NamedTuple):
    """Bytes on the group's device."""

    symmetric: int  # what peers reach: rows and sums on their way, flags. Grows with the largest call
    workspace: int  # what else the library has taken itself, placements with it; ranks that share a GPU share it


class Group(metaclass=_Cached):
    """The ranks of a process group, one process each, that hold the experts of a layer between them.

    Rank r of W holds the experts [r E / W, (r + 1) E / W). Making a Group is collective. Equal arguments give the same
    Group to all who ask, until somebody closes it; copies of modules share it. Other options for a process group of
    several ranks that has a Group on the device already are a ValueError: see `shared`. uniep.groups() are those there
    are.

    Args:
        pg: a torch.distributed process group; "self": this process alone; None: the default process group, or this
            process alone where there is none.
        transport: "native", the library's own; "torch", all_to_all_single of `pg` around a rank of the library, which
            works with every backend, on CPUs too, and between hosts; "auto", native where it can be had. The bits of
            all results are equal. `group.transport` and `group.why` say what it became.
        device: of all tensors; None: this process's current GPU where that is a Hopper GPU, else the CPU.
        workers: threads of the CPU engine (0: its choice); on a GPU the number of SMs.
        timeout_s: bound of a wait for a peer that has begun a call (native); None: UNIEP_TIMEOUT_S, or 60.
        arrival_timeout_s: bound of a wait for a peer that has not begun it (native); None: UNIEP_ARRIVAL_TIMEOUT_S, or
            the time-out of `pg`, but at least 600.
        reserve_sms: SMs that calls of several ranks leave to NCCL's collectives beside them (native, on GPUs), where a
            schedule does not say it by comm.reserve_sms; "auto": what collectives of run_beside()'s groups can take.
        communicator: how native ranks find each other. "own": by an id that rank 0 broadcasts over `pg`, of whatever
            backend. "borrow": by one that the library itself shares over the NCCL communicator of `pg`, which it uses
            for nothing else, and no longer than this constructor. The transport "torch" always runs over `pg`.
        shared: False: a Group of its own, beside any other of these ranks, with memory of its own. Equal arguments do
            not give it again, so that whoever makes it may close it.

    Attributes:
        rank: of this process in the group, 0 to size - 1.
        size: W, the number of ranks.
        transport: what it became: "native" or "torch".
        why: the reason for this transport, in words.
        process_group: of torch; None: this process alone.
        reserved: SMs that calls leave, 0 where no kernel waits for a peer; None: not known, so that calls are refused.
        lends: whether calls use these SMs while no collective has them: where all groups that were named to
            run_beside() have streams of high priority (TORCH_NCCL_HIGH_PRIORITY=1, or their options'). A schedule's
            comm.lend_sms goes before it.
        replicas: a process group of the ranks that hold the same experts in the job's groups, by whose rank a Tuner
            numbers these; None: not known. To be set before the first call, on all ranks of these groups.

    Raises:
        ValueError: an argument is wrong, native was asked for where it can not be had, or the ranks share a Group that
            has other options.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | typing.Literal["self"] | None = None,
        transport: str = "auto",
        *,
        device: torch.device | str | int | None = None,
        workers: int = 0,
        timeout_s: float | None = None,
        arrival_timeout_s: float | None = None,
        reserve_sms: int | str = "auto",
        communicator: str = "own",
        shared: bool = True,  # the metaclass's alone
    ) -> None:
        capture.refuse("group: a CUDA graph is captured; make the Group before, and one call with it")
        self.process_group = None if pg == "self" else pg
        self.device = _device(device)
        self.name = f"uniep{next(_numbers)}"
        self.rank, self.size = 0, 1
        if self.process_group is not None:
            self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if self.rank < 0:
            raise ValueError("pg: this process is not a member of it")
        self.replicas: dist.ProcessGroup | None = None
        self.failure: str | None = None  # of a collective of torch's; the group refuses calls until recover()
        self.processes: list[peers.Process] = []
        if self.size > 1:
            self.processes = peers.gather_objects(self, peers.own_process(), "what the ranks say of themselves")
        self.transport, self.why = self._choose(transport)
        options: dict[str, typing.Any] = {"workers": workers, "timeout_seconds": timeout_s or 0}
        options["arrival_timeout_seconds"] = arrival_timeout_s or _arrival_limit(self.process_group, self.device)
        self.engine = self._first_engine(transport, options, communicator)
        self.reserve_sms, self._beside = reserve_sms, dict[str, int | None]()  # by names: groups end before this one
        self._ordinary = set[str]()  # of these, whose collectives do not go before other kernels
        self.reserved: int | None = 0
        self.lends = False
        self.run_beside()
        self.tuned = tuning.agreed(self)
        self.usable = dict[tuple[typing.Any, ...], tuning.Pair]()  # of these, with what calls save and leave
        _by_name[self.name] = self
        if self.rank == 0 and self.size > 1:
            _tell_transport(self)

    def _first_engine(self, transport: str, options: dict[str, typing.Any], communicator: str) -> Engine:
        """Where "auto" had the native transport tried in vain, that of torch with its reason. Collective: all ranks
        have one, or an error."""
        if self.transport != "native" or self.size == 1:
            return self._make_engine(options, communicator)
        made, error = None, None
        try:
            made = self._make_engine(options, communicator)
        except Exception as caught:
            error = caught
            if peers.find_gone_by_now(self) is not None:  # that rank answers no collective
                raise
        falls_back = isinstance(error, DeviceError | Unsupported)
        own = None if error is None else (falls_back, " ".join(str(error).split()))
        try:
            reasons = peers.gather_objects(self, own, "whether the ranks have the native transport")
        except TimeoutError:
            if error is not None:
                raise error from None
            raise
        failed = {rank: reason for rank, reason in enumerate(reasons) if reason}
        may_fall_back = transport == "auto" and communicator != "borrow"
        if failed and may_fall_back and all(may for may, _ in failed.values()):
            if made is not None:
                made.close(waits=False)
            self.transport, self.why = "torch", f"the GPUs have no native transport: {next(iter(failed.values()))[1]}"
            return self._make_engine(options, communicator)
        if error is not None:
            raise error
        made = typing.cast(Engine, made)
        if failed:
            made.close(waits=False)
            rank, (_, reason) = next(iter(failed.items()))
            raise DeviceError(f"group: rank {rank} has no native transport, and none goes on without it: {reason}")
        return made

    def _make_engine(self, options: dict[str, typing.Any], communicator: str) -> Engine:
        options = options | {"ranks": 1}
        keep: list[typing.Any] = []
        if self.device.type == "cuda":
            cuda_libraries.use_torchs()
            keep.append((ctypes.c_int32 * 1)(self.device.index))
            options |= {"devices": keep[0], "device_count": 1}
        if self.transport == "native" and self.size > 1:
            options |= {"ranks": self.size, "rank": self.rank, "launch": library.LAUNCH_PROCESSES}
            if communicator == "borrow":
                process_group = typing.cast(dist.ProcessGroup, self.process_group)
                options["communicator"] = communicators.borrowed(process_group, self.device)
            else:
                keep.append(ctypes.create_string_buffer(self._unique_id(), library.UNIQUE_ID_BYTES))
                options["unique_id"] = ctypes.addressof(keep[-1])
        return Engine(self.device, options)

    def _choose(self, transport: str) -> tuple[str, str]:
        if transport == "torch":
            if self.process_group is None:
                raise ValueError("transport: 'torch' needs torch.distributed; legal are 'auto' and 'native' without it")
            return "torch", _ASKED_FOR
        if self.size == 1:
            return "native", "one rank"
        hindrance = self._hindrance()
        if hindrance is None:
            return "native", _ASKED_FOR if transport == "native" else "Hopper GPUs of one host"
        if transport == "native":
            raise ValueError(f"transport: 'native' can not be had: {hindrance}; legal are 'auto' and 'torch'")
        return "torch", hindrance

    def _hindrance(self) -> str | None:
        """Why the ranks have no native transport, equal on all of them. Collective."""
        fine = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9
        if not all(peers.gather_objects(self, fine, "which ranks have a Hopper GPU")):
            return "not every rank has a Hopper GPU"
        if len({process.host[:2] for process in self.processes}) > 1:
            return "the ranks are on several hosts"
        if len({(process.network, process.user) for process in self.processes}) > 1:
            return "the ranks are in several network namespaces or of several users"
        if self.size > _MOST_NATIVE_RANKS:
            return f"{self.size} ranks; native serves {_MOST_NATIVE_RANKS}"
        return None

    def _unique_id(self) -> bytes:

        def make() -> bytes:
            made = ctypes.create_string_buffer(library.UNIQUE_ID_BYTES)
            library.check(library.load().uniep_make_unique_id(made))
            return made.raw

        return typing.cast(bytes, peers.broadcast_object(self, make, "the group's id of rank 0"))

    def run_beside(self, *groups: dist.ProcessGroup | None, times: int = 1, all_known: bool = True) -> None:
        """Says that collectives of these process groups, too, may run at the same time as calls of this group.

        None, and this process alone, is no group.

        Args:
            times: how many collectives of each of these groups run at the same time; mostly they follow each other.
            all_known: whether there is no other group than all that it is told of. Else reserve_sms="auto" is refused.
        """
        given = [one for one in groups if one is not None]
        self._beside |= {one.group_name: reserved_sms.total([reserved_sms.most_ctas(one)] * times) for one in given}
        self._ordinary |= {one.group_name for one in given if not reserved_sms.goes_first(one)}
        if not all_known:
            self._beside["groups that are not known"] = None
            self._ordinary.add("groups that are not known")
        waits_in_kernels = self.transport == "native" and self.size > 1
        if not waits_in_kernels:
            self.reserved = 0
        elif isinstance(self.reserve_sms, int):
            self.reserved = self.reserve_sms
        else:
            self.reserved = reserved_sms.total(self._beside.values())
        self.engine.reserved = self.reserved
        self.lends = waits_in_kernels and bool(self._beside) and not self._ordinary

    def check(self) -> None:
        """Raises the error of a call so far that is known to have failed, as the next call would; waits for none.

        Raises:
            CapacityError: the routing of a call did not fit (native, with a capacity: the call itself did not wait).
            TimeoutError: a peer did not come or is gone. As CapacityError it is raised until recover().
            ValueError: the group is closed.
        """
        self.engine.check()
        if self.failure is not None:
            raise TimeoutError(self.failure)

    def synchronize(self) -> None:
        """Waits until the calls so far are over, and raises the error of one that failed half-way."""
        self.engine.synchronize()
        self.check()

    def memory(self) -> GroupMemory:
        """Bytes that the library holds for this rank between calls; torch's statistics have none of them."""
        return GroupMemory(*self.engine.memory())

    def recover(self) -> None:
        """Makes the group usable again after TimeoutError, and after CapacityError on several GPUs. Collective.

        Raises:
            TimeoutError: a rank is gone, or a collective over gloo has failed: what is left needs a new process group
                and a new Group.
        """
        if self.failure is not None:
            gone = peers.find_gone(self)
            if gone is not None:
                raise TimeoutError(f"group: {gone}")
            if peers.is_lost(self):
                raise TimeoutError(self.failure)
        self.engine.recover()
        self.failure = None
        trials.forget(self)
        if rerun.watcher is not None:
            rerun.watcher.forget(self)

    def trim(self) -> None:
        """Gives back the memory and, on a GPU, the loaded kernels that are kept for later calls alone.

        Waits for the GPU; not collective. Later calls take them again.
        """
        self.engine.trim()

    def close(self) -> None:
        """Ends the group; a later call with it is a ValueError. Waits until the calls so far are over or have failed.

        It ends for all who share it: layers, and whoever made a Group of equal arguments. Nobody counts them. Close
        one of `shared=False`, or at the end of the job.

        As a context manager a group waits for nothing where an exception leaves the block: peers hear of it at once.
        """
        self._forget()
        self.engine.close()

    def abort(self) -> None:
        """Ends the group at once, from any thread, also while another one is inside of its calls: these and later ones
        are a TimeoutError. Waits for nothing. Native transport's memory that peers reach is given back.

        Waits in collectives of `pg` (transport "torch") are the process group's: abort that, too. Another Group of
        the same arguments is a new one. What calls were writing is unknown.
        """
        self._forget()
        self.engine.abort()

    def _forget(self) -> None:
        for key in [key for key, group in list(_Cached.groups.items()) if group is self]:
            _Cached.groups.pop(key, None)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._forget()
        self.engine.close(waits=kind is None)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, _memo: object) -> Group:
        return self

    def __reduce__(self) -> typing.NoReturn:
        raise TypeError("a uniep.Group can not be pickled; save the module's state_dict() instead of the module")

    def __repr__(self) -> str:
        return (
            f"uniep.Group(rank {self.rank} of {self.size}, {self.device}, transport {self.transport}: {self.why}"
            f"{', closed' if self.engine.closed else ''})"
        )


def groups() -> list[Group]:
    """The groups of this process that are neither closed nor aborted, oldest first; shared ones and others.

    For a look at what layers run with. Makes nothing, waits for nothing, and is not collective.
    """
    found = [group for group in _existing() if not group.engine.has_ended]
    return sorted(found, key=lambda group: int(group.name.removeprefix("uniep")))


def _existing() -> list[Group]:
    """Of any state. Other threads may make groups meanwhile."""
    found = (reference() for reference in _by_name.valuerefs())
    return [group for group in found if group is not None]


def abort() -> None:
    """Group.abort() of every group of this process, for a restart in it."""
    for group in _existing():
        group.abort()


# A child gets a Group of its own where it asks for one.
os.register_at_fork(after_in_child=_Cached.groups.clear)


@atexit.register
def _forget_process_groups() -> None:
    """With torch 2.12 a process aborts where it still refers to a destroyed gloo process group as it ends."""
    for group in _existing():
        group.process_group = group.replicas = None
    _Cached.groups.clear()
