#!/usr/bin/env python3
"""What a call of uniep.moe() costs beside the same calls of the C API, in microseconds.

    PYTHONPATH=python UNIEP_LIBRARY=build/release/libuniep.so python bench/python_overhead.py [--calls N] [--json]

The layer is small and has one worker, so that little but the calls is measured. Both sides take turns in short runs;
each figure is the difference of their medians. "forward and backward" is a graph of one layer, with the start of
autograd's engine; "of a further layer" is a layer more in a graph of several. "further tensor" compares 8 experts with
128, one tensor an expert. "autograd alone" is a Function with these tensors that calls nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
import typing
from collections.abc import Callable

import torch

import uniep
from uniep import library

HIDDEN, INTERMEDIATE, TOKENS, TOPK = 16, 8, 2, 1


class Layer:
    """A layer for both sides; weights are stacked, or one tensor an expert."""

    def __init__(self, group: uniep.Group, experts: int, stacked: bool) -> None:
        self.group, self.experts = group, experts
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
        self.ids = torch.rand(TOKENS, experts, generator=generator).argsort(1)[:, :TOPK].int()
        self.probs = torch.rand(TOKENS, TOPK, generator=generator).requires_grad_()
        self.dy = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
        w1 = torch.randn(experts, 2 * INTERMEDIATE, HIDDEN, generator=generator).bfloat16()
        w2 = torch.randn(experts, HIDDEN, INTERMEDIATE, generator=generator).bfloat16()
        self.w1 = [w1] if stacked else list(w1.unbind())
        self.w2 = [w2] if stacked else list(w2.unbind())
        for weight in (*self.w1, *self.w2):
            weight.requires_grad_()
        self.given = (self.w1[0], self.w2[0]) if stacked else (self.w1, self.w2)
        self._prepare_calls(stacked)

    def python_forward(self) -> torch.Tensor:
        return uniep.moe(self.x, self.ids, self.probs, *self.given, group=self.group)

    def python_both(self) -> None:
        """Gradients go to torch.autograd.grad(), so that no adding to .grad is measured."""
        torch.autograd.grad(self.python_forward(), (self.x, self.probs, *self.w1, *self.w2), self.dy)

    def python_stack(self, layers: int) -> None:
        """As many layers behind each other in one graph, as a model has them."""
        x = self.x
        for _ in range(layers):
            x = uniep.moe(x, self.ids, self.probs, *self.given, group=self.group)
        torch.autograd.grad(x, (self.x, self.probs, *self.w1, *self.w2), self.dy)

    def c_stack(self, layers: int) -> None:
        for _ in range(layers):
            self.c_both()

    def _prepare_calls(self, stacked: bool) -> None:
        functions = library.load()
        group = self.group.engine._handle
        config = ctypes.byref(
            library.LayerConfig.make(hidden=HIDDEN, intermediate=INTERMEDIATE, experts=self.experts, topk=TOPK)
        )
        routing = ctypes.byref(
            library.Routing.make(tokens=TOKENS, topk_ids=self.ids.data_ptr(), probs=self.probs.data_ptr())
        )
        self._kept: list[typing.Any] = []

        def memory(count: int) -> torch.Tensor:
            self._kept.append(torch.empty(count, dtype=torch.uint8))
            return self._kept[-1]

        def addresses(name: str, tensors: list[torch.Tensor]) -> dict[str, int]:
            if stacked:
                return {name: tensors[0].data_ptr()}
            self._kept.append((ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]))
            return {f"{name}_experts": ctypes.addressof(self._kept[-1])}

        weights = library.Weights.make(**addresses("w1", self.w1), **addresses("w2", self.w2))
        gradients = [[torch.empty_like(weight) for weight in tensors] for tensors in (self.w1, self.w2)]
        made_gradients = library.WeightGradients.make(
            **addresses("dw1", gradients[0]), **addresses("dw2", gradients[1])
        )
        self._kept += [weights, gradients, made_gradients]
        saved, work, out = memory(1 << 20), memory(1 << 22), memory(1 << 16)
        own = {
            "weights": ctypes.addressof(weights),
            "workspace_memory": library.CallerMemory(work.data_ptr(), work.numel()),
        }
        forward = ctypes.byref(
            library.ForwardArguments.make(
                x=self.x.data_ptr(),
                y=out.data_ptr(),
                saved_memory=library.CallerMemory(saved.data_ptr(), saved.numel()),
                **own,
            )
        )
        backward = ctypes.byref(
            library.BackwardArguments.make(
                dy=self.dy.data_ptr(),
                dx=out.data_ptr(),
                dprobs=memory(1 << 12).data_ptr(),
                gradients=ctypes.addressof(made_gradients),
                **own,
            )
        )
        needed = library.MemoryNeed.make()
        need = ctypes.byref(needed)
        placement, handle = library.Handle(), library.Handle()
        used = library.CallerMemory(saved.data_ptr(), 0)  # just what forward needed
        saved_memory = ctypes.byref(used)
        placed, made = ctypes.byref(placement), ctypes.byref(handle)
        check = library.check

        def run_forward() -> None:
            check(functions.uniep_place(group, config, routing, 1, None, placed))
            check(functions.uniep_query_forward_memory(group, config, b"auto", placement, 1, need, 1))
            used.bytes = needed.saved_bytes
            check(functions.uniep_forward(group, config, b"auto", placement, forward, 1, made))
            functions.uniep_saved_destroy(handle)

        def run_both() -> None:
            run_forward()
            check(functions.uniep_query_backward_memory(group, config, b"auto", placement, 0, 0, need, 1))
            check(functions.uniep_saved_attach(group, config, b"auto", placement, saved_memory, 1, made))
            check(functions.uniep_backward(group, config, b"auto", handle, backward, 1, None))
            functions.uniep_saved_destroy(handle)
            functions.uniep_placement_destroy(placement)

        def run_forward_alone() -> None:
            run_forward()
            functions.uniep_placement_destroy(placement)

        self.c_forward, self.c_both = run_forward_alone, run_both


class Nothing(torch.autograd.Function):
    """What torch itself costs: as many tensors in, saved and given back."""

    @staticmethod
    def forward(ctx: typing.Any, x: torch.Tensor, ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: typing.Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return dy, None, *(torch.empty_like(other) for other in ctx.saved_tensors)


def autograd_alone(layer: Layer) -> Callable[[], object]:
    def run() -> None:
        y = Nothing.apply(layer.x, layer.ids, layer.probs, *layer.w1, *layer.w2)
        torch.autograd.grad(y, (layer.x, layer.probs, *layer.w1, *layer.w2), layer.dy)

    return run


def difference(python: Callable[[], object], c: Callable[[], object], calls: int) -> tuple[float, float]:
    """Medians of a call, in microseconds: of the difference, and of the C side."""
    samples: tuple[list[int], list[int]] = ([], [])
    for function in (python, c):
        for _ in range(200):
            function()
    for _ in range(max(1, calls // 20)):
        for function, times in zip((python, c), samples, strict=True):
            for _ in range(20):
                begin = time.perf_counter_ns()
                function()
                times.append(time.perf_counter_ns() - begin)
    medians = [statistics.median(times) / 1e3 for times in samples]
    return medians[0] - medians[1], medians[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    group = uniep.Group(transport="native", device="cpu", workers=1)
    torch.autograd.set_multithreading_enabled(False)
    stacked = Layer(group, 2, True)
    few, many = Layer(group, 8, False), Layer(group, 128, False)
    found = {}
    for name, python, c in (
        ("forward", "python_forward", "c_forward"),
        ("forward and backward", "python_both", "c_both"),
    ):
        found[name], found[f"{name}, C"] = difference(getattr(stacked, python), getattr(stacked, c), given.calls)
        ends = [difference(getattr(own, python), getattr(own, c), given.calls // 4)[0] for own in (few, many)]
        found[f"{name}, further tensor"] = (ends[1] - ends[0]) / (2 * (many.experts - few.experts))
    first = difference(lambda: stacked.python_stack(1), lambda: stacked.c_stack(1), given.calls // 4)[0]
    fourth = difference(lambda: stacked.python_stack(4), lambda: stacked.c_stack(4), given.calls // 4)[0]
    found["forward and backward, of a further layer"] = (fourth - first) / 3
    alone = [difference(autograd_alone(own), lambda: None, given.calls // 4)[0] for own in (stacked, few, many)]
    found["autograd alone"] = alone[0]
    found["autograd alone, further tensor"] = (alone[2] - alone[1]) / (2 * (many.experts - few.experts))
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name + ':':<44}{value:8.2f} us")


if __name__ == "__main__":
    main()
