"""The handle of a group in the library: its calls come one at a time, and it ends when nobody is inside of one."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import sys
import threading
import typing
import weakref
from collections.abc import Callable

import torch

from uniep import library


class Owned:
    """A handle of the library that is destroyed with its last reference, between two calls of its engine."""

    __slots__ = ("destroy", "engine", "handle")

    def __init__(
        self, engine: GroupHandle, destroy: Callable[[ctypes.c_void_p], None], handle: ctypes.c_void_p
    ) -> None:
        self.engine, self.destroy, self.handle = engine, destroy, handle

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # an argument: `sys` may be gone by then
            self.engine.destroy_later(self.destroy, self.handle)


_engines: weakref.WeakSet[GroupHandle] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a child of os.fork(): the engines' threads are not here, and a call would wait for them for ever."""
    for engine in list(_engines):
        engine.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class GroupHandle:
    """A group that this process has one rank of. Calls come from any thread, one at a time."""

    def __init__(self, device: torch.device, options: dict[str, typing.Any]) -> None:
        self.device = device
        self._library = library.load()
        self._lock = threading.Lock()
        self._handle_lock = threading.Lock()  # held for no longer than an abort(): keeps the handle alive for it
        self._dead: collections.deque[tuple[Callable[[ctypes.c_void_p], None], ctypes.c_void_p]] = collections.deque()
        self._handle = library.Handle()
        self._is_traced = self._is_aborted = self._is_parents = False
        self._held = 0, 0
        given = library.GroupOptions.make(
            engine=library.ENGINE_CUDA if device.type == "cuda" else library.ENGINE_CPU, **options
        )
        library.check(self._library.uniep_group_create(ctypes.byref(given), ctypes.byref(self._handle)))
        info = library.GroupInfo.make()
        self._call(self._library.uniep_group_describe, self._handle, ctypes.byref(info))
        self.rank, self.ranks, self.workers = info.first_local_rank, info.ranks, info.workers
        _engines.add(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Of a group that was aborted, or that nobody closed: nothing of it is in use any more."""
        handle = getattr(self, "_handle", None)
        if handle and not is_finalizing():
            self._handle = library.Handle()
            self.destroy_later(self._library.uniep_group_destroy, handle)

    def close(self, waits: bool = True) -> None:
        """Ends the group. States of its calls may be dropped later; every other call is an error. With `waits` after
        the calls so far, unless another thread is inside of one: leaving ends what runs on the devices of all ranks."""
        if waits and self._handle:
            with contextlib.suppress(Exception):  # a call has failed, or the group was aborted: nobody asks any more
                self._call_unless_busy(self._library.uniep_group_synchronize, self._handle)
        with self._handle_lock:
            handle, self._handle = self._handle, library.Handle()
        if handle:
            self._library.uniep_group_leave(handle)
            self.destroy_later(self._library.uniep_group_destroy, handle)

    def abort(self) -> None:
        """Ends the group's calls in whatever thread they are, and all later ones; waits for nothing."""
        with self._handle_lock:
            self._is_aborted = True
            if self._handle:
                self._library.uniep_group_abort(self._handle)

    def leave_to_parent(self) -> None:
        self._handle, self._is_parents = library.Handle(), True
        self._lock, self._handle_lock = threading.Lock(), threading.Lock()  # another thread may have held them
        self._dead.clear()

    @property
    def closed(self) -> bool:
        return not self._handle

    @property
    def has_ended(self) -> bool:
        """By close() or abort()."""
        return self.closed or self._is_aborted

    def destroy_later(self, destroy: Callable[[ctypes.c_void_p], None], handle: ctypes.c_void_p) -> None:
        """Destroys a handle now, or after the call that runs: this may be the garbage collector inside of one."""
        if self._is_parents:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
                destroy(handle)
            finally:
                self._lock.release()
        else:
            self._dead.append((destroy, handle))

    def _bury(self) -> None:
        while self._dead:
            destroy, handle = self._dead.popleft()
            destroy(handle)

    def _begin(self) -> None:
        """What every call begins with, under the lock."""
        if self._dead:
            self._bury()
        if self._is_parents:
            raise ValueError("group: of the process that forked this one; make another one here")
        if not self._handle:
            raise ValueError("group: closed; make another one")

    def _call(self, function: Callable[..., int], *arguments: typing.Any) -> None:
        with self._lock:
            self._begin()
            library.check(function(*arguments))

    def _call_unless_busy(self, function: Callable[..., int], *arguments: typing.Any) -> bool:
        """Whether it was called: not while another thread is inside of a call."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._begin()
            library.check(function(*arguments))
        finally:
            self._lock.release()
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a thread is inside of a call."""
        return self._lock.locked()

    def synchronize(self) -> None:
        """Waits until the calls so far are over; raises the error of one that failed half-way."""
        self._call(self._library.uniep_group_synchronize, self._handle)

    def check(self) -> None:
        """Raises the error of a call so far that is known to have failed half-way; waits for none, so that nothing is
        known while another thread is inside of one."""
        self._call_unless_busy(self._library.uniep_group_check, self._handle)

    def memory(self) -> tuple[int, int]:
        """Bytes of symmetric memory, and of what else the library holds for this rank; those that were told last while
        another thread is inside of a call."""
        held = library.GroupBytes.make()
        if self._call_unless_busy(self._library.uniep_group_memory, self._handle, self.rank, ctypes.byref(held)):
            self._held = held.symmetric_bytes, held.workspace_bytes
        return self._held

    def begin_trace(self) -> None:
        """From here to end_trace() the library keeps when tiles of forwards and backwards run."""
        if self._is_traced:
            raise ValueError("group: it is traced already; a trace must end before the next one")
        self._call(self._library.uniep_trace_begin, self._handle)
        self._is_traced = True

    def end_trace(self, path: str) -> None:
        """Writes the calls since begin_trace() to a file."""
        self._is_traced = False
        self._call(self._library.uniep_trace_end, self._handle, os.fsencode(path))

    def make_timer(self) -> Owned:
        handle = library.Handle()
        self._call(self._library.uniep_timer_create, self._handle, ctypes.byref(handle))
        return Owned(self, self._library.uniep_timer_destroy, handle)

    def start_timer(self, timer: Owned) -> None:
        """The next forward or backward is timed."""
        self._call(self._library.uniep_timer_start, timer.handle)

    def read_timer(self, timer: Owned) -> dict[str, float] | None:
        """As LayerStats has them; None: not known yet, or never. Waits for nothing."""
        times = library.CallTimes.make()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            library.check(self._library.uniep_timer_read(timer.handle, self.rank, ctypes.byref(times)))
        finally:
            self._lock.release()
        if times.state != library.TIMES_KNOWN:
            return None
        return {name: getattr(times, name) for name in ("wait_ms", "exposed_dispatch_ms", "sum_ms")}

    def recover(self) -> None:
        """Makes the group usable again after TimeoutError. Collective."""
        self._call(self._library.uniep_group_recover, self._handle)

    def trim(self) -> None:
        """Gives back what is kept for later calls alone."""
        self._call(self._library.uniep_group_trim, self._handle)
