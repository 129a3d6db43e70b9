"""What one step is made of, and how routing is spread, from hooks on Megatron's modules.

In steps of their own, since hooks cost time. On a GPU times are CUDA events of the current stream.
"""

from __future__ import annotations

import contextlib
import time
import typing
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from uniep.pilot.training import Training


class Span(typing.NamedTuple):
    """A part of a step, in milliseconds from its begin, on this rank."""

    name: str
    lane: str  # forward, backward or update
    begin_ms: float
    end_ms: float


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._zero = self.now()

    def now(self) -> typing.Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, moment: typing.Any) -> float:
        if self._on_gpu:
            return float(self._zero.elapsed_time(moment))
        return float(1e3 * (moment - self._zero))


class Trace:
    """The spans of one step, and rows by expert of each MoE layer [E], summed over the ranks."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._clock = _Clock(training.setting.device)
        self._begun: dict[tuple[str, str], typing.Any] = {}
        self._moments: list[tuple[str, str, typing.Any, typing.Any]] = []
        self._rows: dict[str, torch.Tensor] = {}

    def begin(self, name: str, lane: str) -> None:
        self._begun[name, lane] = self._clock.now()

    def end(self, name: str, lane: str) -> None:
        begun = self._begun.pop((name, lane), None)
        if begun is not None:
            self._moments.append((name, lane, begun, self._clock.now()))

    def count(self, name: str, routing_map: torch.Tensor) -> None:
        self._rows[name] = routing_map.reshape(-1, routing_map.shape[-1]).sum(0)

    def spans(self) -> list[Span]:
        """In the order of their begins. Waits for the device."""
        if self._training.setting.device.type == "cuda":
            torch.cuda.synchronize()
        found = [
            Span(name, lane, self._clock.milliseconds(begin), self._clock.milliseconds(end))
            for name, lane, begin, end in self._moments
        ]
        return sorted(found, key=lambda span: span.begin_ms)

    def rows_max_over_mean(self) -> dict[str, float]:
        """Of each MoE layer: the most rows that a rank's experts receive, over the mean of all ranks. Collective."""
        found = {}
        for name, rows in self._rows.items():
            total = rows.double()
            dist.all_reduce(total)
            ranks = total.view(dist.get_world_size(), -1).sum(1)
            found[name] = float(ranks.max() / ranks.mean())
        return found


def _parts(training: Training) -> Iterator[tuple[str, torch.nn.Module]]:
    number = 0
    for module in training.model.modules():
        if isinstance(module, TransformerLayer):
            number += 1
            yield f"attention {number}", module.self_attention
            yield f"{'MoE' if isinstance(module.mlp, MoELayer) else 'MLP'} {number}", module.mlp


def _router_hook(trace: Trace, name: str) -> Callable[..., None]:
    def hook(_module: typing.Any, _arguments: typing.Any, output: typing.Any) -> None:
        trace.count(name, output[1])

    return hook


def _stored_input_hook(trace: Trace, name: str) -> Callable[..., None]:
    """In a replay of Megatron's graphs a MoE layer takes what the replay left to it, and not its argument, whose
    gradient ends the backward elsewhere."""

    def hook(module: typing.Any, _arguments: typing.Any) -> None:
        given = getattr(getattr(module, "cudagraph_tensor_store", None), "hidden_states", None)
        if given is not None and given.requires_grad:
            given.register_hook(lambda _: trace.end(name, "backward"))

    return hook


@contextlib.contextmanager
def traced(training: Training) -> Iterator[Trace]:
    """Hooks on the modules of a training for the steps inside; one step gives one timeline."""
    trace = Trace(training)
    handles: list[typing.Any] = []

    def begin(name: str, lane: str) -> Callable[..., None]:
        return lambda *_: trace.begin(name, lane)

    def end(name: str, lane: str) -> Callable[..., None]:
        return lambda *_: trace.end(name, lane)

    for name, module in _parts(training):
        handles += [
            module.register_forward_pre_hook(begin(name, "forward")),
            module.register_forward_hook(end(name, "forward")),
            module.register_full_backward_pre_hook(begin(name, "backward")),
            module.register_full_backward_hook(end(name, "backward")),
        ]
        if isinstance(module, MoELayer):
            handles.append(module.register_forward_pre_hook(_stored_input_hook(trace, name)))
            handles.append(module.router.register_forward_hook(_router_hook(trace, name)))
    finalize, optimizer_step = training.config.finalize_model_grads_func, training.optimizer.step

    def timed(name: str, function: Callable[..., typing.Any]) -> Callable[..., typing.Any]:
        def call(*arguments: typing.Any, **options: typing.Any) -> typing.Any:
            trace.begin(name, "update")
            try:
                return function(*arguments, **options)
            finally:
                trace.end(name, "update")

        return call

    training.config.finalize_model_grads_func = timed("gradients' sums", finalize)
    training.optimizer.step = timed("optimizer", optimizer_step)
    try:
        yield trace
    finally:
        training.config.finalize_model_grads_func, training.optimizer.step = finalize, optimizer_step
        for handle in handles:
            handle.remove()


def moe_ms(spans: list[Span]) -> float:
    """Milliseconds in MoE layers, forward and backward."""
    return sum(span.end_ms - span.begin_ms for span in spans if span.name.startswith("MoE"))
