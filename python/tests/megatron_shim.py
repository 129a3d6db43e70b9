"""Makes a released Megatron-core run on a CPU: stands in for what it asks torch.cuda for. Import it first."""

import contextlib

import torch
import torch.distributed as dist


class _Nothing:
    """A stream or an event where there are none."""

    def __init__(self, *_arguments, **_options):
        pass

    def __getattr__(self, _name):
        return lambda *_arguments, **_options: self


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = torch.cuda.Event = _Nothing
torch.cuda.current_stream = lambda *_: _Nothing()
torch.cuda.stream = lambda _: contextlib.nullcontext()
torch.cuda.synchronize = lambda *_: None
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.set_device = lambda *_: None
torch.Tensor.record_stream = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self


def _is_cuda(device):
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _OnCpu(torch.overrides.TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and gives types their names of CUDA, which Megatron tests."""

    def __torch_function__(self, function, types, arguments=(), options=None):
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


_OnCpu().__enter__()

_all_to_all_single = dist.all_to_all_single


def _lists(sizes):
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _all_to_all(output, values, output_split_sizes=None, input_split_sizes=None, **options):
    return _all_to_all_single(output, values, _lists(output_split_sizes), _lists(input_split_sizes), **options)


dist.all_to_all_single = _all_to_all

import megatron.core.tensor_parallel.random as megatron_random  # noqa: E402


@contextlib.contextmanager
def _fork(self, name=None):
    yield


megatron_random.CudaRNGStatesTracker.fork = _fork
megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
megatron_random._set_cuda_rng_state = lambda *_, **__: None
