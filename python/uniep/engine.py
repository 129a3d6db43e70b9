"""One rank of the library's group, by addresses and sizes, with memory from torch.

Everything that the library asks for while it runs is a torch tensor of the stream that the call was made on, so torch's
caching allocator and memory statistics hold it.
"""

from __future__ import annotations

import collections
import ctypes
import sys
import threading
import typing
from collections.abc import Callable, Sequence

import torch

from uniep import library

_SLACK = 64  # torch aligns its memory on a CPU to 64 bytes, on a GPU to 512


class _Memory:
    """The library's allocator callbacks. What can not be had is remembered, and raised behind the call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, tuple[torch.Tensor, int]] = {}
        self.error: BaseException | None = None
        self.allocate = library.ALLOCATE(self._allocate)
        self.release = library.RELEASE(self._release)

    def _allocate(self, _context: int, size: int, alignment: int, _rank: int, stream: int | None) -> int | None:
        try:
            extra = alignment if alignment > _SLACK else 0
            tensor = torch.empty(size + extra, dtype=torch.uint8, device=self._device)
            address = tensor.data_ptr()
            address += -address % alignment
            self._held[address] = (tensor, stream or 0)
            return address
        except BaseException as error:  # nothing may leave a callback
            self.error = error
            return None

    def _release(self, _context: int, address: int, _size: int, _rank: int, stream: int | None) -> None:
        tensor, taken_on = self._held.pop(address)
        if self._device.type == "cuda" and (stream or 0) != taken_on:
            last = torch.cuda.ExternalStream(stream or 0, device=self._device)  # type: ignore[no-untyped-call]
            tensor.record_stream(last)


class Owned:
    """A handle of the library that is destroyed with its last reference, between two calls of its engine."""

    def __init__(self, engine: Engine, kind: str, handle: ctypes.c_void_p) -> None:
        self.engine, self.kind, self.handle = engine, kind, handle

    def __del__(self) -> None:
        if self.handle and not sys.is_finalizing():
            self.engine.destroy_later(self.kind, self.handle)


class Weights(typing.NamedTuple):
    """Addresses of the experts' tensors: one tensor (`stacked`), or one an expert; of gate and up apart the gates'."""

    stacked: int | None = None
    experts: typing.Any = None
    up: Weights | None = None

    @staticmethod
    def of(tensors: Sequence[torch.Tensor] | None, apart: bool = False) -> Weights:
        """`apart`: the first half of the tensors are gates, the second the matching ups."""
        if tensors is None:
            return Weights()
        if apart:
            half = len(tensors) // 2
            return Weights.of(tensors[:half])._replace(up=Weights.of(tensors[half:]))
        if len(tensors) == 1 and tensors[0].dim() == 3:
            return Weights(tensors[0].data_ptr())
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        return Weights(None, addresses)

    @property
    def array(self) -> int | None:
        return None if self.experts is None else ctypes.addressof(self.experts)

    def up_fields(self, name: str) -> dict[str, int | None]:
        """The fields of the ups, where they lie apart: `name` is w1 or dw1."""
        return {} if self.up is None else {f"{name}_up": self.up.stacked, f"{name}_up_experts": self.up.array}


class Engine:
    """A group of the library that this process has one rank of. Calls come from any thread, one at a time."""

    def __init__(self, device: torch.device, options: dict[str, typing.Any]) -> None:
        self.device = device
        self._library = library.load()
        self._memory = _Memory(device)
        self._lock = threading.Lock()
        self._dead: collections.deque[tuple[str, ctypes.c_void_p]] = collections.deque()
        self._handle = library.Handle()
        given = library.GroupOptions.make(
            allocate=self._memory.allocate,
            release=self._memory.release,
            engine=library.ENGINE_CUDA if device.type == "cuda" else library.ENGINE_CPU,
            **options,
        )
        self._call(self._library.uniep_group_create, ctypes.byref(given), ctypes.byref(self._handle), needs_group=False)
        info = library.GroupInfo.make()
        self._call(self._library.uniep_group_describe, self._handle, ctypes.byref(info))
        self.rank, self.ranks, self.workers = info.first_local_rank, info.ranks, info.workers

    def close(self) -> None:
        """Ends the group. States of its calls may be dropped later; every other call is an error."""
        handle, self._handle = self._handle, library.Handle()
        if handle:
            self._library.uniep_group_leave(handle)
            self.destroy_later("group", handle)

    @property
    def closed(self) -> bool:
        return not self._handle

    def destroy_later(self, kind: str, handle: ctypes.c_void_p) -> None:
        """Destroys a handle now, or behind the call that runs: this may be the garbage collector inside of one."""
        self._dead.append((kind, handle))
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._dead:
            kind, handle = self._dead.popleft()
            getattr(self._library, f"uniep_{kind}_destroy")(handle)

    def _call(self, function: Callable[..., int], *arguments: typing.Any, needs_group: bool = True) -> None:
        if needs_group and self.closed:
            raise ValueError("group: closed; make another one")
        with self._lock:
            self._bury()
            self._memory.error = None
            status = function(*arguments)
            error, self._memory.error = self._memory.error, None
            try:
                library.check(status)
            except MemoryError:
                if error is None:
                    raise
                raise error from None

    def _stream(self) -> int | None:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None

    def synchronize(self) -> None:
        """Waits until the calls so far are over; raises the error of one that failed half-way."""
        self._call(self._library.uniep_group_synchronize, self._handle)

    def recover(self) -> None:
        """Makes the group usable again after TimeoutError. Collective."""
        self._call(self._library.uniep_group_recover, self._handle)

    def resolve(self, config: typing.Any, direction: int, schedule: bytes) -> str:
        """The whole schedule that a text stands for, as JSON."""
        needed = ctypes.c_size_t()
        arguments = (self._handle, ctypes.byref(config), direction, schedule)
        self._call(self._library.uniep_schedule_resolve, *arguments, None, 0, ctypes.byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        self._call(self._library.uniep_schedule_resolve, *arguments, text, needed, ctypes.byref(needed))
        return text.value.decode()

    def place(
        self, config: typing.Any, ids: torch.Tensor, probs: torch.Tensor, capacity: tuple[int, int] | None
    ) -> Owned:
        """uniep_place() of ids [T, K] (int32 or int64) and probs [T, K] fp32, or of a map [T, E] (bool) and
        probs [T, E]; contiguous."""
        is_map = ids.dtype == torch.bool
        routing = library.Routing.make(
            tokens=ids.shape[0],
            topk_ids=None if is_map else ids.data_ptr(),
            routing_map=ids.data_ptr() if is_map else None,
            index_type=library.INDEX_INT64 if ids.dtype == torch.int64 else library.INDEX_INT32,
            probs=probs.data_ptr(),
            stream=self._stream(),
        )
        limits = None
        if capacity is not None:
            limits = ctypes.byref(library.Capacity.make(rows=capacity[0], tokens=capacity[1]))
        handle = library.Handle()
        self._call(
            self._library.uniep_place,
            self._handle,
            ctypes.byref(config),
            ctypes.byref(routing),
            1,
            limits,
            ctypes.byref(handle),
        )
        return Owned(self, "placement", handle)

    def rank_rows(self, placement: Owned) -> int:
        """Padded rows of this rank. Waits for the placement."""
        rows = library.RankRows.make()
        self._call(self._library.uniep_placement_rank, placement.handle, self.rank, ctypes.byref(rows))
        return int(rows.padded_rows)

    def expert_rows(self, placement: Owned, expert: int) -> tuple[int, int]:
        """Rows of an expert, and where they begin on its rank. Waits for the placement."""
        rows = library.ExpertRows.make()
        self._call(self._library.uniep_placement_expert, placement.handle, expert, ctypes.byref(rows))
        return rows.rows, rows.first_row

    def forward(
        self, config: typing.Any, schedule: bytes, placement: Owned, x: torch.Tensor, w1: Weights, w2: Weights
    ) -> tuple[torch.Tensor, Owned]:
        """uniep_forward(): y [T, H] and the saved state."""
        y = torch.empty_like(x)
        arguments = library.ForwardArguments.make(
            x=x.data_ptr(),
            w1=w1.stacked,
            w2=w2.stacked,
            w1_experts=w1.array,
            w2_experts=w2.array,
            y=y.data_ptr(),
            stream=self._stream(),
            **w1.up_fields("w1"),
        )
        handle = library.Handle()
        self._call(
            self._library.uniep_forward,
            self._handle,
            ctypes.byref(config),
            schedule,
            placement.handle,
            ctypes.byref(arguments),
            1,
            ctypes.byref(handle),
        )
        return y, Owned(self, "saved", handle)

    def backward(
        self,
        config: typing.Any,
        schedule: bytes,
        saved: Owned,
        dy: torch.Tensor,
        x: torch.Tensor | None,
        w1: Weights,
        w2: Weights,
        dprobs: torch.Tensor,
        dw1: Weights,
        dw2: Weights,
    ) -> torch.Tensor:
        """uniep_backward_pending() and, where one gradient of the two is asked for, uniep_weight_gradients().

        Writes dprobs [T, K], of a map [T, E], and the gradients that have addresses; gives back dx [T, H].
        """
        wanted = [weights.stacked is not None or weights.experts is not None for weights in (dw1, dw2)]
        if all(wanted):
            time = library.WEIGHT_GRADIENTS_NOW
        else:
            time = library.WEIGHT_GRADIENTS_LATER if any(wanted) else library.WEIGHT_GRADIENTS_NONE
        dx = torch.empty_like(dy)
        stream = self._stream()
        arguments = library.BackwardArguments.make(
            dy=dy.data_ptr(),
            x=None if x is None else x.data_ptr(),
            w1=w1.stacked,
            w2=w2.stacked,
            w1_experts=w1.array,
            w2_experts=w2.array,
            dx=dx.data_ptr(),
            dprobs=dprobs.data_ptr(),
            dw1=dw1.stacked,
            dw2=dw2.stacked,
            dw1_experts=dw1.array,
            dw2_experts=dw2.array,
            stream=stream,
            weight_gradients=time,
            **w1.up_fields("w1"),
            **dw1.up_fields("dw1"),
        )
        handle = library.Handle()
        self._call(
            self._library.uniep_backward_pending,
            self._handle,
            ctypes.byref(config),
            schedule,
            saved.handle,
            ctypes.byref(arguments),
            1,
            ctypes.byref(handle),
        )
        if time == library.WEIGHT_GRADIENTS_LATER:
            pending = Owned(self, "pending", handle)
            work = library.WeightGradientArguments.make(
                dw1=dw1.stacked,
                dw2=dw2.stacked,
                dw1_experts=dw1.array,
                dw2_experts=dw2.array,
                stream=stream,
                **dw1.up_fields("dw1"),
            )
            self._call(self._library.uniep_weight_gradients, self._handle, pending.handle, ctypes.byref(work), 1)
        return dx

    def dispatch(
        self, config: typing.Any, placement: Owned, x: torch.Tensor, with_probs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """uniep_dispatch(): rows [R, H] bf16 and, if asked for, row_probs [R] fp32."""
        count = self.rank_rows(placement)
        rows = x.new_empty((count, x.shape[1]))
        row_probs = x.new_empty(count, dtype=torch.float32) if with_probs else None
        arguments = library.DispatchArguments.make(
            x=x.data_ptr(),
            rows=rows.data_ptr(),
            row_probs=None if row_probs is None else row_probs.data_ptr(),
            stream=self._stream(),
        )
        self._call(
            self._library.uniep_dispatch,
            self._handle,
            ctypes.byref(config),
            b"auto",
            placement.handle,
            ctypes.byref(arguments),
            1,
        )
        return rows, row_probs

    def combine(
        self,
        config: typing.Any,
        placement: Owned,
        probs_shape: tuple[int, int],
        rows: torch.Tensor,
        row_dprobs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """uniep_combine(): y [T, H] bf16 and, with row_dprobs [R] fp32, dprobs [T, K] fp32, of a map [T, E]."""
        y = rows.new_empty((probs_shape[0], rows.shape[1]))
        dprobs = None if row_dprobs is None else row_dprobs.new_empty(probs_shape)
        # A null address says that there are none; without rows there still are.
        given = None if row_dprobs is None else row_dprobs.new_zeros(1) if row_dprobs.numel() == 0 else row_dprobs
        arguments = library.CombineArguments.make(
            rows=rows.data_ptr(),
            y=y.data_ptr(),
            row_dprobs=None if given is None else given.data_ptr(),
            dprobs=None if dprobs is None else dprobs.data_ptr(),
            stream=self._stream(),
        )
        self._call(
            self._library.uniep_combine,
            self._handle,
            ctypes.byref(config),
            b"auto",
            placement.handle,
            ctypes.byref(arguments),
            1,
        )
        return y, dprobs
