"""The shared library: where it lies, its structures and its errors. Needs no torch.

Each class below mirrors the structure of the same name in include/uniep/c_*.h; `make()` fills in the size.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import typing
from collections.abc import Callable

import uniep
from uniep.errors import CapacityError, DeviceError, Unsupported

_POINTER, _INT32, _INT64, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
Handle = ctypes.c_void_p

ENGINE_CPU, ENGINE_CUDA = 1, 2
LAUNCH_THREADS, LAUNCH_PROCESSES = 0, 1
INDEX_INT32, INDEX_INT64 = 0, 1
WEIGHT_GRADIENT_BF16, WEIGHT_GRADIENT_FP32, WEIGHT_GRADIENT_MAIN_GRAD = 0, 1, 2
WEIGHT_GRADIENTS_NOW, WEIGHT_GRADIENTS_LATER, WEIGHT_GRADIENTS_NONE = 0, 1, 2
UNIQUE_ID_BYTES = 128
MEMORY_ALIGNMENT = 64
FORWARD, BACKWARD = 0, 1
TIMES_NOT_YET, TIMES_KNOWN, TIMES_LOST = 0, 1, 2


class _Sized(ctypes.Structure):
    """A structure that begins with its own size."""

    @classmethod
    def make(cls, **fields: typing.Any) -> typing.Any:
        return cls(size=ctypes.sizeof(cls), **fields)


def _structure(name: str, **fields: typing.Any) -> type[_Sized]:
    return type(name, (_Sized,), {"_fields_": [("size", _SIZE), *fields.items()]})


GroupOptions = _structure(
    "GroupOptions",
    engine=_INT32,
    ranks=_INT32,
    workers=_INT32,
    device_count=_INT32,
    devices=ctypes.POINTER(_INT32),
    launch=_INT32,
    rank=_INT32,
    unique_id=_POINTER,
    communicator=_POINTER,
    allocate=_POINTER,
    release=_POINTER,
    allocator_context=_POINTER,
    timeout_seconds=ctypes.c_double,
    arrival_timeout_seconds=ctypes.c_double,
    nan_on_overflow=_INT32,
)
GroupInfo = _structure(
    "GroupInfo", engine=_INT32, ranks=_INT32, workers=_INT32, first_local_rank=_INT32, local_ranks=_INT32
)
CallTimes = _structure(
    "CallTimes",
    state=_INT32,
    exposed_dispatch_ms=ctypes.c_double,
    sum_ms=ctypes.c_double,
    wait_ms=ctypes.c_double,
    call_ms=ctypes.c_double,
    runs=ctypes.c_uint32,
)
GroupBytes = _structure("GroupBytes", symmetric_bytes=_SIZE, workspace_bytes=_SIZE)
LayerConfig = _structure(
    "LayerConfig",
    hidden=_INT64,
    intermediate=_INT64,
    experts=_INT64,
    topk=_INT64,
    activation=_INT32,
    router_weight=_INT32,
    weight_gradient=_INT32,
    combine_groups=_INT64,
    alpha=ctypes.c_float,
    gate_limit=ctypes.c_float,
    up_limit=ctypes.c_float,
    up_offset=ctypes.c_float,
    bias=_INT32,
)
Routing = _structure(
    "Routing",
    tokens=_INT64,
    topk_ids=_POINTER,
    index_type=_INT32,
    probs=_POINTER,
    stream=_POINTER,
    routing_map=_POINTER,
)
Capacity = _structure("Capacity", rows=_INT64, tokens=_INT64)
RankRows = _structure("RankRows", tokens=_INT64, rows=_INT64, padded_rows=_INT64)
ExpertRows = _structure("ExpertRows", rows=_INT64, first_row=_INT64)
MemoryNeed = _structure(
    "MemoryNeed", saved_bytes=_SIZE, workspace_bytes=_SIZE, symmetric_bytes=_SIZE, pending_bytes=_SIZE
)


class CallerMemory(ctypes.Structure):
    _fields_: typing.ClassVar = [("data", _POINTER), ("bytes", _SIZE)]


Weights = _structure(
    "Weights",
    w1=_POINTER,
    w2=_POINTER,
    w1_experts=_POINTER,
    w2_experts=_POINTER,
    w1_up=_POINTER,
    w1_up_experts=_POINTER,
    b1=_POINTER,
    b2=_POINTER,
    b1_experts=_POINTER,
    b2_experts=_POINTER,
)
WeightGradients = _structure(
    "WeightGradients",
    dw1=_POINTER,
    dw2=_POINTER,
    dw1_experts=_POINTER,
    dw2_experts=_POINTER,
    dw1_up=_POINTER,
    dw1_up_experts=_POINTER,
    db1=_POINTER,
    db2=_POINTER,
    db1_experts=_POINTER,
    db2_experts=_POINTER,
)
ForwardArguments = _structure(
    "ForwardArguments",
    x=_POINTER,
    weights=_POINTER,
    y=_POINTER,
    stream=_POINTER,
    saved_memory=CallerMemory,
    workspace_memory=CallerMemory,
)
BackwardArguments = _structure(
    "BackwardArguments",
    dy=_POINTER,
    x=_POINTER,
    weights=_POINTER,
    dx=_POINTER,
    dprobs=_POINTER,
    gradients=_POINTER,
    stream=_POINTER,
    weight_gradients=_INT32,
    last_use=_INT32,
    workspace_memory=CallerMemory,
    pending_memory=CallerMemory,
)
WeightGradientArguments = _structure("WeightGradientArguments", gradients=_POINTER, stream=_POINTER, sms=_INT32)
DispatchArguments = _structure("DispatchArguments", x=_POINTER, rows=_POINTER, row_probs=_POINTER, stream=_POINTER)
CombineArguments = _structure(
    "CombineArguments", rows=_POINTER, y=_POINTER, row_dprobs=_POINTER, dprobs=_POINTER, stream=_POINTER
)
TunerLayer = _structure("TunerLayer", config=_POINTER, tokens=_INT64, forward=ctypes.c_char_p, backward=ctypes.c_char_p)
TunerCheck = _structure("TunerCheck", equal=_INT32, milliseconds=ctypes.c_double, refused=ctypes.c_char_p)
TunerPut = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _SIZE)
TunerCheckFunction = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _INT32, _INT32, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(TunerCheck)
)
TunerGiveFunction = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _INT64, _POINTER, _SIZE)
TunerTakeFunction = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _INT64, _POINTER, TunerPut)
TunerLogFunction = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_char_p)
TunerOptions = _structure(
    "TunerOptions",
    layers=_POINTER,
    layer_count=_INT32,
    rank=_INT32,
    ranks=_INT32,
    context=_POINTER,
    check=TunerCheckFunction,
    give=TunerGiveFunction,
    take=TunerTakeFunction,
    log=TunerLogFunction,
    folder=ctypes.c_char_p,
    machine_name=ctypes.c_char_p,
    budget=ctypes.c_double,
    until=_INT64,
    batch=_INT32,
    job_group=_INT32,
    job_groups=_INT32,
)
TunerCall = _structure(
    "TunerCall",
    schedule=ctypes.c_char_p,
    number=ctypes.c_uint64,
    layer=_INT32,
    direction=_INT32,
    timed=_INT32,
    of_candidate=_INT32,
)
TunerState = _structure(
    "TunerState",
    steps=_INT64,
    frozen=_INT32,
    wants_round=_INT32,
    decisions=_INT32,
    layers_milliseconds=ctypes.c_double,
    lost_milliseconds=ctypes.c_double,
    tried_calls=_INT64,
)
TunerDecision = _structure(
    "TunerDecision",
    step=_INT64,
    layer=_INT32,
    direction=_INT32,
    pairs=_INT32,
    ratio=ctypes.c_double,
    verdict=ctypes.c_char_p,
    schedule=ctypes.c_char_p,
    reason=ctypes.c_char_p,
)

_FUNCTIONS: dict[str, list[typing.Any]] = {
    "uniep_make_unique_id": [ctypes.c_char_p],
    "uniep_use_library": [ctypes.c_char_p, ctypes.c_char_p],
    "uniep_set_activation": [_POINTER, ctypes.c_char_p],
    "uniep_group_create": [_POINTER, _POINTER],
    "uniep_group_synchronize": [Handle],
    "uniep_group_check": [Handle],
    "uniep_group_memory": [Handle, _INT32, _POINTER],
    "uniep_group_recover": [Handle],
    "uniep_group_trim": [Handle],
    "uniep_group_describe": [Handle, _POINTER],
    "uniep_compile": [Handle, _POINTER, _INT32, ctypes.POINTER(ctypes.c_char_p), _INT32, _INT32],
    "uniep_schedule_resolve": [Handle, _POINTER, _INT32, ctypes.c_char_p, ctypes.c_char_p, _SIZE, _POINTER],
    "uniep_tuned_schedules": [Handle, ctypes.c_char_p, ctypes.c_char_p, _SIZE, _POINTER],
    "uniep_place": [Handle, _POINTER, _POINTER, _INT32, _POINTER, _POINTER],
    "uniep_placement_rank": [Handle, _INT32, _POINTER],
    "uniep_placement_expert": [Handle, _INT64, _POINTER],
    "uniep_query_forward_memory": [Handle, _POINTER, ctypes.c_char_p, Handle, _INT32, _POINTER, _INT32],
    "uniep_query_backward_memory": [Handle, _POINTER, ctypes.c_char_p, Handle, _INT32, _INT32, _POINTER, _INT32],
    "uniep_forward": [Handle, _POINTER, ctypes.c_char_p, Handle, _POINTER, _INT32, _POINTER],
    "uniep_saved_attach": [Handle, _POINTER, ctypes.c_char_p, Handle, _POINTER, _INT32, _POINTER],
    "uniep_backward": [Handle, _POINTER, ctypes.c_char_p, Handle, _POINTER, _INT32, _POINTER],
    "uniep_make_weight_gradients": [Handle, Handle, _POINTER, _INT32],
    "uniep_dispatch": [Handle, _POINTER, ctypes.c_char_p, Handle, _POINTER, _INT32],
    "uniep_combine": [Handle, _POINTER, ctypes.c_char_p, Handle, _POINTER, _INT32],
    "uniep_trace_begin": [Handle],
    "uniep_trace_end": [Handle, ctypes.c_char_p],
    "uniep_timer_create": [Handle, _POINTER],
    "uniep_timer_start": [Handle],
    "uniep_timer_read": [Handle, _INT32, _POINTER],
    "uniep_tuner_create": [Handle, _POINTER, _POINTER],
    "uniep_tuner_schedule": [Handle, _INT32, _INT32, _POINTER],
    "uniep_tuner_schedule_to_keep": [Handle, _INT32, _INT32, _POINTER],
    "uniep_tuner_measured": [Handle, _POINTER, ctypes.c_double, ctypes.c_double, ctypes.c_double],
    "uniep_tuner_failed": [Handle, _POINTER, ctypes.c_char_p],
    "uniep_tuner_not_measured": [Handle, _POINTER],
    "uniep_tuner_step": [Handle],
    "uniep_tuner_begin_round": [Handle],
    "uniep_tuner_freeze": [Handle],
    "uniep_tuner_describe": [Handle, _POINTER],
    "uniep_tuner_incumbent": [Handle, _INT32, _INT32, _POINTER],
    "uniep_tuner_get_decision": [Handle, _INT32, _POINTER],
    "uniep_tuner_results": [Handle, _POINTER, _SIZE, _POINTER],
    "uniep_tuner_add_results": [Handle, ctypes.c_char_p, _SIZE],
}
_DESTROYERS = ("group", "placement", "saved", "pending", "timer", "tuner")


def path() -> pathlib.Path:
    """The file: UNIEP_LIBRARY where that is set, else the one that was installed with the package."""
    named = os.environ.get("UNIEP_LIBRARY")
    if named:
        return pathlib.Path(named)
    for folder in uniep.__path__:
        file = pathlib.Path(folder) / "libuniep.so"
        if file.exists():
            return file
    raise ImportError(
        f"libuniep.so is not beside the package ({', '.join(uniep.__path__)}); install it with `pip install .`, or let "
        "UNIEP_LIBRARY name one that you built"
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, opened on first use; ImportError where it is missing or of another version than the package."""
    file = path()
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise ImportError(f"UNIEP_LIBRARY or the package's library can not be opened: {error}") from error
    try:
        library.uniep_last_error.restype = ctypes.c_char_p
        library.uniep_version_string.restype = ctypes.c_char_p
    except AttributeError as error:
        raise ImportError(f"{file} is not UniEP's library: {error}") from error
    version = library.uniep_version_string().decode()
    if version != uniep.__version__:
        raise ImportError(f"{file} is version {version}; the package is {uniep.__version__}")
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    for name in _DESTROYERS:
        function = getattr(library, f"uniep_{name}_destroy")
        function.argtypes, function.restype = [Handle], None
    for ending in (library.uniep_group_leave, library.uniep_group_abort):
        ending.argtypes, ending.restype = [Handle], None
    return library


_ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: Unsupported,
    3: CapacityError,
    4: TimeoutError,
    5: OSError,
    6: MemoryError,
    7: DeviceError,
}


def error_of(status: int, message: str) -> Exception:
    """What a uniep_status that is not UNIEP_OK stands for."""
    return _ERRORS.get(status, RuntimeError)(message)


def check(status: int) -> None:
    """Raises what a uniep_status stands for, with the library's message."""
    if status != 0:
        raise error_of(status, load().uniep_last_error().decode(errors="replace"))


def text_of(ask: Callable[..., None]) -> str:
    """A text that ask(buffer, capacity, needed) writes, as uniep_schedule_resolve() does."""
    needed = ctypes.c_size_t()
    ask(None, 0, ctypes.byref(needed))
    text = ctypes.create_string_buffer(needed.value)
    ask(text, needed, ctypes.byref(needed))
    return text.value.decode()
