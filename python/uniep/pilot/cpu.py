"""Makes a released Megatron-core run on a CPU: stands in for what it asks torch.cuda for.

For the whole process, and for good: call it before Megatron-core is imported.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream or an event where there are none."""

    def __init__(self, *_arguments: typing.Any, **_options: typing.Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., _Nothing]:
        return lambda *_arguments, **_options: self


def _is_cuda(device: typing.Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and gives types their names of CUDA, which Megatron tests."""

    def __torch_function__(
        self, function: typing.Any, types: typing.Any, arguments: typing.Any = (), options: typing.Any = None
    ) -> typing.Any:
        options = options or {}
        if _is_cuda(options.get("device")):
            options = {**options, "device": "cpu"}
        if function is torch.device and arguments and _is_cuda(arguments[0]):
            return torch.device("cpu")
        if function is torch.Tensor.to and len(arguments) > 1 and _is_cuda(arguments[1]):
            arguments = (arguments[0], "cpu", *arguments[2:])
        if function is torch.Tensor.type and len(arguments) == 1 and not options:
            return function(*arguments).replace("torch.", "torch.cuda.", 1)
        return function(*arguments, **options)


_STAND_INS: dict[str, typing.Any] = {
    "current_device": lambda: torch.device("cpu"),
    "Stream": _Nothing,
    "Event": _Nothing,
    "current_stream": lambda *_: _Nothing(),
    "stream": lambda _: contextlib.nullcontext(),
    "synchronize": lambda *_: None,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_device": lambda *_: None,
}

_all_to_all_single = dist.all_to_all_single


def _lists(sizes: typing.Any) -> typing.Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _all_to_all(
    output: torch.Tensor,
    values: torch.Tensor,
    output_split_sizes: typing.Any = None,
    input_split_sizes: typing.Any = None,
    **options: typing.Any,
) -> typing.Any:
    return _all_to_all_single(output, values, _lists(output_split_sizes), _lists(input_split_sizes), **options)


@contextlib.contextmanager
def _fork(self: typing.Any, name: typing.Any = None) -> Iterator[None]:
    yield


@functools.cache
def stand_in_for_cuda() -> None:
    """Puts the stand-ins in place; a second call does nothing."""
    for name, value in _STAND_INS.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]
    dist.all_to_all_single = typing.cast(typing.Any, _all_to_all)

    import megatron.core.tensor_parallel.random as random

    random.CudaRNGStatesTracker.fork = _fork
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
