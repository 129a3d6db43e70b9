"""What Verifier does with one call: notes checksums of what it read and made, and runs it again elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import typing
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from uniep import library, peers
from uniep.together import make_together, run_together

if typing.TYPE_CHECKING:
    from uniep.call import Call
    from uniep.group import Group
    from uniep.routes import Route
    from uniep.verifier import Verifier

Sums = dict[str, torch.Tensor]  # by tensor: int64 [rows, tiles of a row]

COLUMNS = 128  # of a tile, which is one row high
BYTES_AT_ONCE = 1 << 25  # of a tensor whose checksums are made; three times that beside it
_GOLDEN = -0x61C8864680B583EB  # splitmix64's, as a signed number

watcher: Verifier | None = None  # of all calls of this process
running = False  # a call again

_Function = typing.TypeVar("_Function", bound=Callable[..., typing.Any])


@contextlib.contextmanager
def _without_watcher() -> Iterator[None]:
    global watcher, running
    kept, watcher, running = watcher, None, True
    try:
        yield
    finally:
        running = False
        if watcher is None and kept is not None and not kept.closed:  # else it has ended meanwhile
            watcher = kept


def unwatched(function: _Function) -> _Function:
    """Runs a function without gradients and without being told of its own calls."""

    @functools.wraps(function)
    def call(*arguments: typing.Any, **named: typing.Any) -> typing.Any:
        with torch.no_grad(), _without_watcher():
            return function(*arguments, **named)

    return typing.cast(_Function, call)


def tile_sums(tensor: torch.Tensor, *, nans_alike: bool = True) -> torch.Tensor:
    """Checksums [rows, tiles] of a tensor [rows, columns]: of 64-bit words, each times an odd number of its place, so
    that one word that changed always shows. A tile is COLUMNS columns of a row.

    nans_alike: all NaNs of a floating-point tensor count as one, since engines may give them other bits.
    """
    rows, columns = tensor.shape
    tiles = -(-columns // COLUMNS)
    words = COLUMNS * tensor.element_size() // 8
    places = (2 * torch.arange(words, device=tensor.device) + 1) * _GOLDEN
    sums = torch.empty((rows, tiles), dtype=torch.int64, device=tensor.device)
    at_once = max(1, BYTES_AT_ONCE // max(1, tiles * COLUMNS * tensor.element_size()))
    for begin in range(0, rows, at_once):
        part = tensor[begin : begin + at_once]
        if nans_alike and part.is_floating_point():
            part = torch.where(part.isnan(), math.nan, part)
        if tiles * COLUMNS != columns:
            part = torch.nn.functional.pad(part, (0, tiles * COLUMNS - columns))
        part = part.contiguous()
        if part.data_ptr() % 8 != 0:
            part = part.clone()
        mixed = part.view(torch.int64).view(-1, tiles, words) * places
        sums[begin : begin + at_once] = mixed.sum(2)
    return sums


class Noted:
    """A call that is checked at the end of the step: its inputs, held, and checksums of them and of its results."""

    def __init__(self, call: Call, direction: str, expert: int) -> None:
        self.call, self.direction, self.expert = call, direction, expert
        self.layer = call.name
        self.gradients = self.lacks_memory = False
        self.step = 0  # that it is told of by
        self.start: tuple[torch.Tensor, torch.Tensor] | None = None
        self.x = self.ids = self.probs = torch.empty(0)
        self.dy: torch.Tensor | None = None
        self.weights: Sequence[torch.Tensor] = ()
        self.made: Sums = {}
        self.read: Sums = {}
        self.not_finite = torch.zeros(())
        self.slots: list[list[int]] = []  # [T, K] on the host, where something differs

    @property
    def local(self) -> int:
        return self.call.shape[2] // self.call.group.size

    def host(self, expert: int, shift: int) -> int:
        """Which rank computes a global expert where one of each rank is moved."""
        return (expert // self.local + (shift if expert % self.local == self.expert else 0)) % self.call.group.size

    def host_slots(self) -> list[list[int]]:
        if not self.slots and len(self.x):
            self.slots = _slots(self)[0].tolist()
        return self.slots

    def expert_of(self, tensor: str, row: int) -> int:
        if tensor in ("o", "dprobs"):
            return self.host_slots()[row // self.call.topk][row % self.call.topk]
        if tensor in ("dw1", "dw2"):
            return self.call.group.rank * self.local + self.expert
        return -1

    def place_of(self, tensor: str, row: int) -> int:
        """The token of a row by slots, else the row itself."""
        return row // self.call.topk if tensor in ("o", "dprobs") else row

    def hosts_of_token(self, token: int, shift: int) -> set[int]:
        return {self.host(expert, shift) for expert in self.host_slots()[token] if expert >= 0}


def note(
    call: Call,
    direction: str,
    x: torch.Tensor,
    dy: torch.Tensor | None,
    ids: torch.Tensor,
    probs: torch.Tensor,
    weights: Sequence[torch.Tensor],
    made: Sums,
    expert: int,
) -> Noted:
    """Holds the inputs of a call, with their checksums."""
    noted = Noted(call, direction, expert)
    noted.x, noted.ids, noted.probs = x.detach(), ids.detach(), probs.detach()
    noted.dy = None if dy is None else dy.detach()
    noted.weights = [weight.detach() for weight in weights]
    noted.not_finite = made.pop("not finite")
    noted.made = made
    noted.read = _input_sums(noted)
    return noted


def _input_sums(noted: Noted) -> Sums:
    """Of memory that nobody writes, so by its bits."""

    def sums_of(tensor: torch.Tensor) -> torch.Tensor:
        return tile_sums(tensor, nans_alike=False)

    sums = {"x": sums_of(noted.x), "topk_ids": sums_of(noted.ids), "probs": sums_of(noted.probs)}
    if noted.dy is not None:
        sums["dy"] = sums_of(noted.dy)
    first, second = noted.call.split(noted.weights)
    for name, tensors in (("w1", first), ("w2", second)):
        rows = [sums_of(weight.reshape(-1, weight.shape[-1])) for weight in tensors]
        sums[name] = torch.cat(rows) if len(rows) > 1 else rows[0]
    return sums


def changed_inputs(noted: Noted) -> list[tuple[str, int, int, int, int]]:
    """(tensor, expert or -1, row, column, tiles of the tensor) of tiles that changed; at most a hundred."""
    found: list[tuple[str, int, int, int, int]] = []
    for name, now in _input_sums(noted).items():
        places = (now != noted.read[name]).nonzero()[:100].tolist()
        for row, tile in places:
            expert, line = -1, row
            if name in ("w1", "w2"):
                expert, line = _expert_of_row(noted, name, row)
            found.append((name, expert, line, tile * COLUMNS, now.numel()))
    return found[:100]


def inputs_are_freed(noted: Noted) -> bool:
    """Whether memory was given back since: of weights, as FSDP2 does behind a layer, or of x, as Megatron does where a
    norm runs again in backward and there is none."""
    held = [one for one in (*noted.weights, noted.x, noted.ids, noted.probs, noted.dy) if one is not None]
    return any(one.numel() > 0 and one.untyped_storage().nbytes() == 0 for one in held)


def _expert_of_row(noted: Noted, name: str, row: int) -> tuple[int, int]:
    first, second = noted.call.split(noted.weights)
    tensors = first if name == "w1" else second
    parts = 2 if noted.call.apart and name == "w1" else 1  # all gates, then all ups
    rows = sum(weight.shape[:-1].numel() for weight in tensors) // parts
    height = rows // noted.local
    local, line = row % rows // height, row % rows % height + row // rows * height
    return noted.call.group.rank * noted.local + local, line


def _result_sums(call: Call, name: str, result: torch.Tensor, route: Route) -> Sums:
    sums = {name: tile_sums(result.reshape(-1, result.shape[-1]))}
    sums["not finite"] = (~result.isfinite()).sum()
    if route.arrived is not None:
        order, rows = route.arrived
        by_slot = sums[name].new_zeros((len(sums[name]) * call.topk, sums[name].shape[1]))
        by_slot[order] = tile_sums(rows)
        sums["o"] = by_slot
    return sums


def forward_sums(call: Call, route: Route, y: torch.Tensor) -> Sums:
    """Of y, and of its rows as they arrived where the transport tells them."""
    return _result_sums(call, "y", y, route)


def backward_sums(call: Call, route: Route, ids: torch.Tensor, dx: torch.Tensor, dprobs: torch.Tensor) -> Sums:
    """Of dx, of its rows, and of dprobs [T, K] or of a map [T, E], slot by slot."""
    if ids.dtype == torch.bool:
        slots, used = _map_slots(ids, call.topk)
        dprobs = torch.where(used, dprobs.reshape(ids.shape).gather(1, slots.clamp(max=ids.shape[1] - 1)), 0.0)
    return _result_sums(call, "dx", dx, route) | {"dprobs": tile_sums(dprobs.reshape(-1, 1))}


def gradient_sums(dw1: torch.Tensor, dw2: torch.Tensor) -> Sums:
    return {"dw1": tile_sums(dw1), "dw2": tile_sums(dw2)}


def _one_expert(call: Call, tensors: Sequence[torch.Tensor], expert: int, apart: bool) -> torch.Tensor:
    """[rows, columns] of a local expert; of gate and up apart both, gate first."""
    parts = [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]] if apart else [tensors]
    found = [part[0][expert] if part[0].dim() == 3 else part[expert] for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def expert_gradients(
    call: Call, dw1: Sequence[torch.Tensor], dw2: Sequence[torch.Tensor], expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of one local expert's gradients: [2 I, H] and [H, I]."""
    return _one_expert(call, dw1, expert, call.apart).clone(), _one_expert(call, dw2, expert, False).clone()


def _map_slots(routing_map: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    experts = routing_map.shape[1]
    numbers = torch.arange(experts, device=routing_map.device).expand_as(routing_map)
    ids = torch.where(routing_map, numbers, experts).topk(topk, dim=1, largest=False, sorted=True).values
    return ids, ids < experts


def _slots(noted: Noted) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, K] int64 and probs [T, K], a map as the slots that it stands for."""
    ids, probs = noted.ids, noted.probs
    if ids.dtype != torch.bool:
        return ids.long(), torch.where(ids >= 0, probs, 0.0)
    slots, used = _map_slots(ids, noted.call.topk)
    found = torch.where(used, probs.gather(1, slots.clamp(max=ids.shape[1] - 1)), 0.0)
    return torch.where(used, slots, -1), found


def _shifted(group: Group, tensor: torch.Tensor, shift: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of the rank `shift` before this one; shapes are equal. Collective.

    Args:
        room: for what comes, where `tensor` and it are contiguous.
    """
    size = group.size
    if shift % size == 0:
        return tensor
    sent, received = [0] * size, [0] * size
    sent[(group.rank + shift) % size] = received[(group.rank - shift) % size] = tensor.numel()
    flat = tensor.contiguous().view(-1)
    out = (torch.empty_like(tensor) if room is None else room).view(-1)
    with peers.waiting(group, "an expert to verify"):
        dist.all_to_all_single(out, flat, received, sent, group=group.process_group)
    return out.view(tensor.shape)


def other_schedules(noted: Noted) -> list[tuple[bytes, bytes]]:
    """Schedules of both directions that are legal here and not the call's own; at least one."""
    texts = ("fusion=none", "auto", "queue=dynamic", "fusion=pairs", "tile.m=64", "order.raster=1")
    call = noted.call
    engine = call.group.engine
    native = call.group.transport == "native"
    config = engine.config(
        call.shape[0], call.shape[1], call.shape[2] if native else noted.local, call.topk if native else 1
    )
    direction = library.FORWARD if noted.direction == "forward" else library.BACKWARD
    own = engine.resolve(config, direction, call.schedules[direction])
    found = []
    for text in texts:
        try:
            resolved = [engine.resolve(config, each, text.encode()) for each in (library.FORWARD, library.BACKWARD)]
        except (ValueError, NotImplementedError):
            continue
        if resolved[direction] != own:
            found.append((text.encode(), text.encode()))
    return found or [call.schedules]


class _Moved:
    """What a rank needs of its own for the call with one expert moved."""

    def __init__(self, noted: Noted, shift: int) -> None:
        call = noted.call
        first, second = call.split(noted.weights)
        self.w1 = [_one_expert(call, first, expert, call.apart) for expert in range(noted.local)]
        self.w2 = [_one_expert(call, second, expert, False) for expert in range(noted.local)]
        self.sent = [experts[noted.expert].contiguous() for experts in (self.w1, self.w2)]
        self.room = [torch.empty_like(one) for one in self.sent]
        ids, self.probs = _slots(noted)
        self.is_moved = (ids >= 0) & (ids % noted.local == noted.expert)
        self.target = (ids // noted.local + shift) % call.group.size
        self.ids = torch.where(self.is_moved, self.target * noted.local + noted.expert, ids)


def run_again(noted: Noted, schedules: tuple[bytes, bytes], shift: int) -> Sums | None:
    """The call again, with one local expert of each rank `shift` ranks further on; None on all ranks where one has no
    memory for that. Collective.

    Weight gradients are made of the moved experts alone: in a layer of one expert a rank.
    """
    group = noted.call.group
    moved = make_together(group, lambda: _Moved(noted, shift))
    if moved is None:
        return None
    try:
        return run_together(group, lambda: _run_moved(noted, moved, schedules, shift), "whether the call ran again")
    except (torch.OutOfMemoryError, MemoryError):
        return None


def _run_moved(noted: Noted, moved: _Moved, schedules: tuple[bytes, bytes], shift: int) -> Sums:
    call, group = noted.call, noted.call.group
    w1, w2 = (_shifted(group, one, shift, room) for one, room in zip(moved.sent, moved.room, strict=True))
    moved.w1[noted.expert], moved.w2[noted.expert] = w1, w2
    again = call._replace(
        schedules=schedules,
        capacity=None,
        save="keep",
        apart=False,
        counts=(noted.local, noted.local, 0, 0),
        main_grad=None,
        parameters=(),
    )
    backward = noted.direction == "backward"
    weights = [*moved.w1, *moved.w2]
    y, saved, route = again.run(noted.x, moved.ids, moved.probs, weights, backward)
    if not backward:
        return _without_count(forward_sums(again, route, y))
    assert noted.dy is not None
    dx, dprobs = again.run_backward(route, saved, None, noted.dy, weights, None, None)
    sums = _without_count(backward_sums(again, route, moved.ids, dx, dprobs))
    return sums | _gradients_again(noted, again, moved, (w1, w2), shift) if noted.gradients else sums


def _without_count(sums: Sums) -> Sums:
    del sums["not finite"]
    return sums


def _gradients_again(
    noted: Noted, again: Call, moved: _Moved, weights: tuple[torch.Tensor, torch.Tensor], shift: int
) -> Sums:
    call, group = noted.call, noted.call.group
    w1, w2 = weights
    topk = min(call.topk, group.size)
    order = torch.argsort(~moved.is_moved, dim=1, stable=True)[:, :topk]
    ids = torch.where(moved.is_moved, moved.target, -1).gather(1, order)
    kept = torch.where(moved.is_moved, moved.probs, 0.0).gather(1, order)
    added = noted.start if call.main_grad is not None else None
    if added is not None:
        dw1, dw2 = (_shifted(group, start, shift).clone() for start in added)
    else:
        dtype = torch.float32 if call.main_grad is not None else call.grad_dtype
        dw1, dw2 = torch.empty_like(w1, dtype=dtype), torch.empty_like(w2, dtype=dtype)
    main_grad = None if added is None else ([dw1], [dw2])
    small = again._replace(
        shape=(call.shape[0], call.shape[1], group.size), topk=topk, counts=(1, 1, 0, 0), main_grad=main_grad
    )
    assert noted.dy is not None
    _, saved, route = small.run(noted.x, ids, kept, [w1, w2], True)
    small.run_backward(route, saved, None, noted.dy, [w1, w2], [dw1], [dw2])
    return {name: _shifted(group, sums, -shift) for name, sums in gradient_sums(dw1, dw2).items()}


def differ(one: Sums, other: Sums) -> int:
    """Tiles that differ, but for rows on their way, which only explain others."""
    return sum(int((one[name] != other[name]).sum()) for name in one if name in other and name != "o")


def wrong_rows(runs: Sequence[Sums], name: str) -> set[int]:
    wrong = (runs[0][name] != runs[1][name]) | (runs[0][name] != runs[2][name])
    return set(wrong.any(1).nonzero().view(-1).tolist())


def different_tiles(runs: Sequence[Sums], name: str) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """(row, tile, its checksum in each of three runs) where they are not all equal."""
    wrong = (runs[0][name] != runs[1][name]) | (runs[0][name] != runs[2][name])
    for row, tile in wrong.nonzero().tolist():
        yield row, tile, typing.cast(tuple[int, int, int], tuple(int(run[name][row, tile]) for run in runs))


def write_inputs(noted: Noted, stem: str) -> str:
    """Writes STEM.safetensors and STEM.npy for `uniep run`, whose command line is in the metadata.

    Collective: each rank writes its part, into a folder that all of them see. Gives the first one's name back. Raises
    OSError on all ranks where one of them can not write, or has no memory for one expert at a time.
    """
    group, call = noted.call.group, noted.call
    hidden, intermediate, experts = call.shape
    counts = peers.gather_objects(group, len(noted.x), "the tokens of ranks") if group.size > 1 else [len(noted.x)]
    tokens, first = sum(counts), sum(counts[: group.rank])
    expert = group.rank * noted.local
    parts = {"x": ("BF16", [tokens, hidden], first)}  # and this rank's first row of it
    if noted.dy is not None:
        parts["dy"] = "BF16", [tokens, hidden], first
    parts["w1"] = "BF16", [experts, 2 * intermediate, hidden], expert
    parts["w2"] = "BF16", [experts, hidden, intermediate], expert
    parts["probs"] = "F32", [tokens, call.topk], first
    header: dict[str, typing.Any] = {"__metadata__": {"replay": _replay(noted, counts, stem)}}
    end = 0
    for name, (dtype, shape, _) in parts.items():
        begin, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numpy = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({tokens}, {call.topk}), }}".encode()
    numpy += b" " * (-(len(numpy) + 11) % 64) + b"\n"
    files = {
        f"{stem}.safetensors": (len(text).to_bytes(8, "little") + text, end),
        f"{stem}.npy": (b"\x93NUMPY\x01\x00" + len(numpy).to_bytes(2, "little") + numpy, tokens * call.topk * 4),
    }

    def make_files() -> None:
        for file, (begin_bytes, size) in files.items() if group.rank == 0 else ():
            with open(file, "wb") as out:
                out.write(begin_bytes)
                out.truncate(len(begin_bytes) + size)

    def values_of(name: str, probs: torch.Tensor) -> Iterator[torch.Tensor]:
        if name in ("w1", "w2"):
            own = call.split(noted.weights)[("w1", "w2").index(name)]
            yield from (_one_expert(call, own, each, call.apart and name == "w1") for each in range(noted.local))
        else:
            yield {"x": noted.x, "dy": noted.x if noted.dy is None else noted.dy, "probs": probs}[name]

    def write_parts() -> None:
        ids, probs = _slots(noted)
        with open(f"{stem}.safetensors", "r+b") as out:
            for name, (dtype, shape, row) in parts.items():
                row_bytes = math.prod(shape[1:]) * (2 if dtype == "BF16" else 4)
                out.seek(len(text) + 8 + header[name]["data_offsets"][0] + row * row_bytes)
                for values in values_of(name, probs):
                    out.write(_bytes(values))
        with open(f"{stem}.npy", "r+b") as out:
            out.seek(len(numpy) + 10 + first * call.topk * 4)
            out.write(_bytes(ids.int()))

    _on_all(group, make_files, "that the file is there")
    _on_all(group, write_parts, "that the file is whole")
    return f"{stem}.safetensors"


def _on_all(group: Group, write: typing.Callable[[], None], what: str) -> None:
    problem = ""
    try:
        write()
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    for rank, one in enumerate(peers.gather_objects(group, problem, what) if group.size > 1 else [problem]):
        if one:
            raise OSError(f"rank {rank}: {one}")


def _bytes(values: torch.Tensor) -> bytes:
    plain = values.contiguous().cpu().view(-1).view(torch.uint8)
    return ctypes.string_at(plain.data_ptr(), plain.numel())


def _replay(noted: Noted, tokens: Sequence[int], stem: str) -> str:
    hidden, intermediate, experts = noted.call.shape
    shape = f"--hidden {hidden} --intermediate {intermediate} --experts {experts} --topk {noted.call.topk}"
    files = f"--routing {stem}.npy --tensors {stem}.safetensors"
    options = noted.call.numerics.options()
    backward = " --backward" if noted.direction == "backward" else ""
    return f"uniep run --ranks {len(tokens)} --tokens {','.join(map(str, tokens))} {shape} {files}{options}{backward}"


def serial_number(uuid: str) -> str:
    """A GPU's serial number by NVML; its id where that tells none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return uuid
    device, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) != 0:
        return uuid
    if nvml.nvmlDeviceGetSerial(device, text, 96) != 0:
        return uuid
    return f"serial number {text.value.decode()}"
