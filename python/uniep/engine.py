"""One rank of the library's group, by addresses and sizes, with memory from torch.

Before a call the library says how many bytes it needs, and gets them as torch tensors of the current stream. What
backward needs of forward is such a tensor and nothing else.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import typing
from collections.abc import Callable

import torch
from torch.autograd import profiler

from uniep import capture, library, reserved_sms
from uniep.addresses import NOWHERE, Weights
from uniep.errors import CapacityError
from uniep.handles import GroupHandle, Owned
from uniep.numerics import PLAIN, Numerics

_log = logging.getLogger("uniep")
_Function = typing.TypeVar("_Function", bound=Callable[..., typing.Any])


def _named(function: _Function) -> _Function:
    """Shows calls of a function as `uniep.<its name>` where a profiler of torch runs; else next to free."""
    name = f"uniep.{function.__name__}"

    @functools.wraps(function)
    def call(*arguments: typing.Any, **named: typing.Any) -> typing.Any:
        if not profiler._is_profiler_enabled:
            return function(*arguments, **named)
        with profiler.record_function(name):
            return function(*arguments, **named)

    return typing.cast(_Function, call)


def text_of(error: torch.OutOfMemoryError) -> str:
    """Instead of the error, whose frames would keep their memory."""
    return str(error) or "no memory"


_RECLAIM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


def _give_back(_context: int | None, device: int) -> None:
    """What torch's allocator caches, where the library finds no memory on a GPU. Not while a graph is captured, which
    freeing would break."""
    if capture.is_capturing():
        return
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    given = (before - torch.cuda.memory_reserved(device)) >> 20
    _log.info("GPU %s had no memory left for a layer; of what torch had cached %s MiB are free now", device, given)


_given_back = _RECLAIM(_give_back)  # as long as the library may call it


@functools.cache
def _let_torch_give_back() -> None:
    set_reclaimer = library.load().uniep_set_memory_reclaimer
    set_reclaimer.argtypes, set_reclaimer.restype = [_RECLAIM, ctypes.c_void_p], None
    set_reclaimer(_given_back, None)
    atexit.register(set_reclaimer, _RECLAIM(), None)


class _Reused:
    """A structure that each call fills in again, under the engine's lock, and its address as an argument."""

    __slots__ = ("address", "fields")

    def __init__(self, structure: typing.Any) -> None:
        self.fields = structure.make()
        self.address = ctypes.byref(self.fields)


def _give(memory: typing.Any, tensor: torch.Tensor | None, count: int) -> None:
    memory.data, memory.bytes = None if tensor is None else tensor.data_ptr(), count


class Engine(GroupHandle):
    """The calls of the layer on a group."""

    def __init__(self, device: torch.device, options: dict[str, typing.Any]) -> None:
        if device.type == "cuda":
            _let_torch_give_back()
        super().__init__(device, options)
        self.reserved: int | None = 0  # SMs that exchanges leave, as reserved_sms.leave() takes it
        self._configs: dict[tuple[typing.Any, ...], typing.Any] = {}
        self._byte = torch.empty(1, dtype=torch.uint8, device=device)
        self._float = torch.empty(1, dtype=torch.float32, device=device)
        # What calls fill in and read again, under the lock.
        self._out, self._saved = library.Handle(), library.CallerMemory()
        self._out_address = ctypes.byref(self._out)
        self._saved_arguments = ctypes.byref(self._saved), 1, self._out_address
        self._routing = _Reused(library.Routing)
        self._need = _Reused(library.MemoryNeed)
        self._weights, self._gradients = _Reused(library.Weights), _Reused(library.WeightGradients)
        self._forward = _Reused(library.ForwardArguments)
        self._backward = _Reused(library.BackwardArguments)
        self._forward.fields.weights = self._backward.fields.weights = ctypes.addressof(self._weights.fields)
        self._backward.fields.gradients = ctypes.addressof(self._gradients.fields)

    def _stream(self) -> int | None:
        if self.device.type == "cpu":
            return None
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def _take_room(self, lacking: str, *sizes: str) -> None:
        """Of a call that lacks memory: without room it tells the other ranks, and does nothing. Raises where there are
        none."""
        need = self._need.fields
        if self.ranks == 1 or not any(getattr(need, name) for name in sizes):
            raise torch.OutOfMemoryError(lacking)
        for name in sizes:
            setattr(need, name, 0)

    def _bytes(self, count: int) -> torch.Tensor:
        return self._byte.new_empty(count)

    def config(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        topk: int,
        weight_gradient: int = library.WEIGHT_GRADIENT_BF16,
        numerics: Numerics = PLAIN,
    ) -> typing.Any:
        """A layer as an argument of the calls below."""
        key = (hidden, intermediate, experts, topk, weight_gradient, numerics)
        found = self._configs.get(key)
        if found is None:
            found = self._configs[key] = ctypes.byref(
                library.LayerConfig.make(
                    hidden=hidden,
                    intermediate=intermediate,
                    experts=experts,
                    topk=topk,
                    weight_gradient=weight_gradient,
                    **numerics._asdict(),
                )
            )
        return found

    def resolve(self, config: typing.Any, direction: int, schedule: bytes) -> str:
        """The whole schedule that a text stands for, as JSON."""
        arguments = self._library.uniep_schedule_resolve, self._handle, config, direction, schedule
        return library.text_of(functools.partial(self._call, *arguments))

    def compile(self, config: typing.Any, direction: int, schedules: list[bytes], threads: int) -> None:
        """Kernels that calls of these schedules need, several at once, into the cache; 0 threads: one a processor."""
        texts = (ctypes.c_char_p * max(1, len(schedules)))(*schedules)
        self._call(self._library.uniep_compile, self._handle, config, direction, texts, len(schedules), threads)

    def tuned_schedules(self, file: bytes | None) -> str:
        """What `uniep tune` has found for this group, in a file or, with None, in its cache, as JSON."""
        return library.text_of(functools.partial(self._call, self._library.uniep_tuned_schedules, self._handle, file))

    def memory_need(self, config: typing.Any, direction: int, schedule: bytes, placement: Owned) -> tuple[int, ...]:
        """Bytes that a call needs: saved (as its forward keeps it), workspace, symmetric."""
        need = library.MemoryNeed.make()
        arguments = self._handle, config, schedule, placement.handle
        address = ctypes.byref(need)
        if direction == library.FORWARD:
            self._call(self._library.uniep_query_forward_memory, *arguments, 1, address, 1)
        else:
            self._call(self._library.uniep_query_backward_memory, *arguments, 0, 0, address, 1)
        return need.saved_bytes, need.workspace_bytes, need.symmetric_bytes

    def make_tuner(self, options: typing.Any) -> ctypes.c_void_p:
        """A handle of uniep_tuner_create(); its functions are called back outside of the engine's lock."""
        handle = library.Handle()
        library.check(self._library.uniep_tuner_create(self._handle, ctypes.byref(options), ctypes.byref(handle)))
        return handle

    @_named
    def place(
        self, config: typing.Any, ids: torch.Tensor, probs: torch.Tensor, capacity: tuple[int, int] | None
    ) -> Owned:
        """uniep_place() of ids [T, K] (int32 or int64) and probs [T, K] fp32, or of a map [T, E] (bool) and
        probs [T, E]; contiguous."""
        limits = None
        if capacity is not None:
            if ids.shape[0] > capacity[1]:
                raise CapacityError(f"tokens: {ids.shape[0]} on rank {self.rank}; the capacity allows {capacity[1]}")
            limits = ctypes.byref(library.Capacity.make(rows=capacity[0], tokens=capacity[1]))
        handle = library.Handle()
        routing = self._routing.fields
        with self._lock:
            self._begin()
            routing.tokens = ids.shape[0]
            is_map = ids.dtype == torch.bool
            routing.topk_ids = None if is_map else ids.data_ptr()
            routing.routing_map = ids.data_ptr() if is_map else None
            routing.index_type = library.INDEX_INT64 if ids.dtype == torch.int64 else library.INDEX_INT32
            routing.probs = probs.data_ptr()
            routing.stream = self._stream()
            library.check(
                self._library.uniep_place(self._handle, config, self._routing.address, 1, limits, ctypes.byref(handle))
            )
        return Owned(self, self._library.uniep_placement_destroy, handle)

    def rank_rows(self, placement: Owned) -> int:
        """Padded rows of this rank. Waits for the placement."""
        rows = library.RankRows.make()
        self._call(self._library.uniep_placement_rank, placement.handle, self.rank, ctypes.byref(rows))
        return int(rows.padded_rows)

    def routed_rows(self, placement: Owned, rank: int) -> int:
        """Rows that a rank's experts receive, without padding. Waits for the placement."""
        rows = library.RankRows.make()
        self._call(self._library.uniep_placement_rank, placement.handle, rank, ctypes.byref(rows))
        return int(rows.rows)

    def expert_rows(self, placement: Owned, expert: int) -> tuple[int, int]:
        """Rows of an expert, and where they begin on its rank. Waits for the placement."""
        rows = library.ExpertRows.make()
        self._call(self._library.uniep_placement_expert, placement.handle, expert, ctypes.byref(rows))
        return rows.rows, rows.first_row

    @_named
    def forward(
        self,
        config: typing.Any,
        schedule: bytes,
        placement: Owned,
        x: torch.Tensor,
        weights: Weights,
        keep: bool,
        lacking: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uniep_forward(): y [T, H] and, to be kept for backward, bytes; none where `keep` is false.

        lacking: the text of an OutOfMemoryError in making its arguments, which is raised when the other ranks know.
        """
        functions, need, given = self._library, self._need.fields, self._forward.fields
        with self._lock:
            self._begin()
            library.check(
                functions.uniep_query_forward_memory(
                    self._handle, config, schedule, placement.handle, keep, self._need.address, 1
                )
            )
            y = saved = workspace = self._byte
            try:
                if not lacking:
                    y, saved = torch.empty_like(x), self._bytes(need.saved_bytes)
                    workspace = self._bytes(need.workspace_bytes)
            except torch.OutOfMemoryError as error:
                lacking = text_of(error)
            if lacking:
                x = self._byte
                self._take_room(lacking, "saved_bytes", "workspace_bytes")
            weights.fill(self._weights.fields)
            given.x, given.y, given.stream = x.data_ptr(), y.data_ptr(), self._stream()
            _give(given.saved_memory, saved, need.saved_bytes)
            _give(given.workspace_memory, workspace, need.workspace_bytes)
            out = self._out_address if keep else None
            status = functions.uniep_forward(
                self._handle, config, schedule, placement.handle, self._forward.address, 1, out
            )
            if lacking:
                raise torch.OutOfMemoryError(lacking)
            library.check(status)
            if keep:
                functions.uniep_saved_destroy(self._out)
        return y, saved

    @_named
    def backward(
        self,
        config: typing.Any,
        schedules: tuple[bytes, bytes],
        placement: Owned,
        saved: torch.Tensor,
        dy: torch.Tensor,
        x: torch.Tensor | None,
        weights: Weights,
        dprobs: torch.Tensor,
        gradients: Weights,
        lacking: str = "",
    ) -> torch.Tensor:
        """uniep_backward(); where one gradient of the two is asked for, uniep_make_weight_gradients() after it.

        Takes the bytes of a forward with these schedules, of forward and of backward. Writes dprobs [T, K],
        of a map [T, E], and the gradients that have addresses, those of biases with their weights'; gives back dx
        [T, H]. `lacking` as of forward().
        """
        if gradients.w1 is NOWHERE or gradients.w2 is NOWHERE:
            time = library.WEIGHT_GRADIENTS_NONE if gradients.w1 is gradients.w2 else library.WEIGHT_GRADIENTS_LATER
        else:
            time = library.WEIGHT_GRADIENTS_NOW
        stream, saved_bytes = self._stream(), saved.numel()
        functions, need, given = self._library, self._need.fields, self._backward.fields
        attached = self._out
        with self._lock:
            self._begin()
            library.check(
                functions.uniep_query_backward_memory(
                    self._handle, config, schedules[1], placement.handle, time, 0, self._need.address, 1
                )
            )
            dx, workspace = self._byte, self._byte
            left: torch.Tensor | None = self._byte
            try:
                if not lacking:
                    if saved.data_ptr() % library.MEMORY_ALIGNMENT != 0:  # a copy that a hook has made
                        saved = saved.clone()
                    dx, workspace = torch.empty_like(dy), self._bytes(need.workspace_bytes)
                    left = self._bytes(need.pending_bytes) if need.pending_bytes else None
            except torch.OutOfMemoryError as error:
                lacking = text_of(error)
            if lacking:
                saved = dy = dprobs = self._byte
                x = None if x is None else self._byte
                self._take_room(lacking, "workspace_bytes", "pending_bytes")
            given.dy, given.x = dy.data_ptr(), None if x is None else x.data_ptr()
            weights.fill(self._weights.fields)
            gradients.fill_gradients(self._gradients.fields)
            given.dx, given.dprobs = dx.data_ptr(), dprobs.data_ptr()
            given.stream, given.weight_gradients = stream, time
            _give(given.workspace_memory, workspace, need.workspace_bytes)
            _give(given.pending_memory, left, need.pending_bytes)
            _give(self._saved, saved, saved_bytes)
            library.check(
                functions.uniep_saved_attach(
                    self._handle,
                    config,
                    schedules[0],
                    placement.handle,
                    *self._saved_arguments,
                )
            )
            call = self._handle, config, schedules[1], attached, self._backward.address, 1
            try:
                if time == library.WEIGHT_GRADIENTS_LATER:
                    status = self._backward_in_two(call, stream)
                else:
                    status = functions.uniep_backward(*call, None)
                if lacking:
                    raise torch.OutOfMemoryError(lacking)
                library.check(status)
            finally:
                functions.uniep_saved_destroy(attached)
        return dx

    def _backward_in_two(self, call: tuple[typing.Any, ...], stream: int | None) -> int:
        """uniep_backward(), and uniep_make_weight_gradients() of one of the two; the status of the first."""
        functions, pending = self._library, library.Handle()
        status: int = functions.uniep_backward(*call, ctypes.byref(pending))
        if status != 0:
            return status
        try:
            work = library.WeightGradientArguments.make(gradients=self._backward.fields.gradients, stream=stream)
            library.check(functions.uniep_make_weight_gradients(self._handle, pending, ctypes.byref(work), 1))
        finally:
            functions.uniep_pending_destroy(pending)
        return status

    def probs_gradient(self, shape: tuple[int, int]) -> torch.Tensor:
        """Memory for dprobs."""
        return self._float.new_empty(shape)

    @_named
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
            config,
            reserved_sms.leave("auto", self.reserved).encode(),
            placement.handle,
            ctypes.byref(arguments),
            1,
        )
        return rows, row_probs

    @_named
    def combine(
        self,
        config: typing.Any,
        placement: Owned,
        shape: tuple[int, int],
        rows: torch.Tensor,
        row_dprobs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """uniep_combine() for probs of a shape: y [T, H] bf16 and, with row_dprobs [R] fp32, dprobs fp32."""
        y = rows.new_empty((shape[0], rows.shape[1]))
        dprobs = None if row_dprobs is None else row_dprobs.new_empty(shape)
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
            config,
            reserved_sms.leave("auto", self.reserved).encode(),
            placement.handle,
            ctypes.byref(arguments),
            1,
        )
        return y, dprobs
