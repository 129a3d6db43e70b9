"""autotune(): which schedules are fastest for a layer on this machine, kept in a file that "auto" reads.

Schedules change no bit of a result, so what is found here changes speed alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import platform
import re
import statistics
import tempfile
import typing
from collections.abc import Iterator

import torch

import uniep
from uniep import peers, trials
from uniep.layer_stats import Span, _moment
from uniep.numerics import PLAIN, Numerics, read_numerics
from uniep.schedules import encoded

if typing.TYPE_CHECKING:
    from uniep.group import Group
    from uniep.modules import Experts, MoELayer

_log = logging.getLogger("uniep")
_FILE = "schedules.json"
_FORMAT = 1
Pair = tuple[str, str]  # forward and backward
_AUTO: Pair = ("auto", "auto")
_NOT_TUNED = ("save.xg", "save.z", "comm.reserve_sms", "comm.lend_sms")
_NUMERICS = {"activation": "swiglu", "router_weight": "activation"}  # of moe(), with what they are unless given
_KEY = re.compile(
    r"H (\d+), I (\d+), E (\d+), K (\d+)(?: --activation (\S+))?(?: --router-weight (\S+))?( --bias)?", re.ASCII
)

# What layer_tuning.md found worth a try, beside what "auto" fills in.
_FORWARD = {
    "cpu": ["fusion=none", "queue=dynamic", "order.interleave=phased", "tile.m=128", "order.raster=2"],
    "cuda": [
        "fusion=pairs",
        "order.interleave=mixed,combine.column_chunks=1",
        "order.interleave=phased,combine.column_chunks=4",
        "order.interleave=phased,combine.column_chunks=1",
        "comm.where=sms,comm.dispatch_sms=16",
    ],
}
_BACKWARD = {
    "cpu": ["fusion=none", "queue=dynamic", "backward.wgrad=after", "tile.m=128", "order.raster=2"],
    "cuda": [
        "backward.wgrad=after",
        "backward.wgrad=fill",
        "backward.wgrad=mixed",
        "fusion=none",
        "order.raster=8",
        "tile.cluster=1",
    ],
}


def folder() -> pathlib.Path | None:
    """Where the file lies: UNIEP_CACHE_DIR, else $XDG_CACHE_HOME/uniep, else ~/.cache/uniep; None: nowhere."""
    given = os.environ.get("UNIEP_CACHE_DIR")
    if given is not None:
        return pathlib.Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    if base.startswith("/"):
        return pathlib.Path(base) / "uniep"
    return pathlib.Path(home) / ".cache" / "uniep" if home else None


def _file() -> pathlib.Path | None:
    place = folder()
    return None if place is None else place / _FILE


def machine(group: Group) -> str:
    """What else a schedule's speed depends on, as the file's key of the first level."""
    on_gpu = group.device.type == "cuda"
    device = torch.cuda.get_device_name(group.device) if on_gpu else f"cpu {platform.machine()}"
    parts = (uniep.__version__, device, f"{group.engine.workers} workers", f"{group.size} ranks", group.transport)
    return ", ".join(parts)


def key(hidden: int, intermediate: int, experts: int, topk: int, numerics: Numerics = PLAIN) -> str:
    return f"H {hidden}, I {intermediate}, E {experts}, K {topk}{numerics.options()}"


def _parsed(name: str) -> tuple[tuple[int, ...], Numerics]:
    """The sizes (H, I, E, K) and the numerics of a key; ValueError where it is none."""
    found = _KEY.fullmatch(name)
    if found is None:
        raise ValueError("its name is none of a layer, such as H 64, I 32, E 8, K 2")
    *sizes, activation, router_weight, bias = found.groups()
    numerics = read_numerics(activation or "swiglu", router_weight or "activation", bias is not None)
    return tuple(map(int, sizes)), numerics


def agreed(group: Group) -> dict[str, Pair]:
    """What the file has for the group's machine, on rank 0: what is damaged or not legal there is left out, with a line
    each. Collective with more ranks than one."""

    def read() -> dict[str, Pair] | str:
        try:
            return _legal_entries(group)
        except ValueError as error:
            return str(error)

    found = peers.broadcast_object(group, read, "the tuned schedules of rank 0") if group.size > 1 else read()
    if isinstance(found, str):
        raise ValueError(found)
    return dict(found)


def _legal_entries(group: Group) -> dict[str, Pair]:
    """Of UNIEP_TUNED before autotune()'s, and these before what `uniep tune` keeps."""
    file = os.environ.get("UNIEP_TUNED")
    found = _of_tune(group, None)
    for name, entry in _of_machine(_read(), group).items():
        try:
            found[name] = _checked(group, name, entry)
        except Exception as error:  # whatever the file says, the job goes on, and other ranks wait for this one
            reason = " ".join(str(error).split())
            _log.warning("%s: the entry %r is left out: %s", _file(), name, reason)
    if file:
        try:
            named = _of_tune(group, os.fsencode(file))
        except (OSError, ValueError) as error:
            raise ValueError(f"UNIEP_TUNED: {file!r}: {error}") from None
        if not named:
            _log.warning("UNIEP_TUNED: %r has no entry for this machine and %s ranks", file, group.size)
        found |= named
    return found


def _of_tune(group: Group, file: bytes | None) -> dict[str, Pair]:
    """What `uniep tune` has found, of a layer that with most tokens. What is saved, and which SMs stay free, are not a
    tuned schedule's to say here."""
    if group.transport != "native":
        return {}
    found: dict[str, list[str]] = {}
    entries = json.loads(group.engine.tuned_schedules(file))["schedules"]
    for entry in sorted(entries, key=lambda entry: entry["tokens"]):
        numerics = entry["numerics"]
        if numerics["combine_groups"]:
            continue
        own, shape = read_numerics(numerics["activation"], numerics["router_weight"], numerics["bias"]), entry["shape"]
        name = key(shape["hidden"], shape["intermediate"], shape["experts"], shape["topk"], own)
        fields = {field: value for field, value in entry["schedule"].items() if field not in _NOT_TUNED}
        pair = found.setdefault(name, list(_AUTO))
        pair[("forward", "backward").index(entry["direction"])] = ",".join(f"{k}={v}" for k, v in fields.items())
    return {name: (forward, backward) for name, (forward, backward) in found.items()}


def _checked(group: Group, name: str, entry: typing.Any) -> Pair:
    sizes, numerics = _parsed(name)
    if not isinstance(entry, dict) or not all(isinstance(entry.get(one), str) for one in ("forward", "backward")):
        raise ValueError("it must have forward and backward, both texts")
    pair = entry["forward"], entry["backward"]
    for direction, text in enumerate(pair):
        group.engine.resolve(_config(group, sizes, numerics), direction, text.encode())
    return pair


def _config(group: Group, sizes: tuple[int, ...], numerics: Numerics) -> typing.Any:
    """The layer as the group's engine sees it."""
    hidden, intermediate, experts, topk = sizes
    if group.transport != "native":
        experts, topk = experts // group.size, 1
    return group.engine.config(hidden, intermediate, experts, topk, numerics=numerics)


def choose(
    group: Group,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
    activation: str = "swiglu",
    router_weight: str = "activation",
    bias: bool = False,
    save: str = "keep",
) -> Pair:
    """What "auto" stands for: schedules of forward and backward."""
    if not group.tuned:
        return _AUTO
    numerics = read_numerics(activation, router_weight, bias)
    name = key(hidden, intermediate, experts, topk, numerics)
    pair = group.tuned.get(name)
    return _AUTO if pair is None else _usable(group, name, pair, save)


def tuned_sizes(
    group: Group, activation: str, router_weight: str, bias: bool, save: str = "keep"
) -> tuple[tuple[tuple[int, ...], Pair], ...]:
    """What choose() looks up for layers of these numerics, as ((H, I, E, K), schedules)."""
    numerics = read_numerics(activation, router_weight, bias)
    known = [(name, *_parsed(name), pair) for name, pair in group.tuned.items()]
    return tuple((sizes, _usable(group, name, pair, save)) for name, sizes, own, pair in known if own == numerics)


def _usable(group: Group, name: str, pair: Pair, save: str) -> Pair:
    """The pair, or _AUTO where it is not legal beside what calls save and leave to collectives: it was found without.
    All ranks have the same pair and leave as much, so that all decide alike."""
    state = name, pair, save, group.reserved, group.lends
    found = group.usable.get(state)
    if found is None:
        found = pair
        if group.reserved is not None:  # else the call is refused, and says so
            try:
                config = _config(group, *_parsed(name))
                for direction, text in enumerate(encoded(pair, save, group.reserved, group.lends)):
                    group.engine.resolve(config, direction, text)
            except (ValueError, NotImplementedError) as error:
                found = _AUTO
                if group.rank == 0:
                    reason = " ".join(str(error).split())
                    _log.warning("%s: the tuned schedules are not used here: %s", name, reason)
        group.usable[state] = found
    return found


def _read() -> dict[str, typing.Any]:
    """Entries by machine and key, unchecked."""
    file = _file()
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text())
        return dict(content["schedules"]) if content["format"] == _FORMAT else {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s is not read: %s", file, error)
        return {}


def _of_machine(content: dict[str, typing.Any], group: Group) -> dict[str, typing.Any]:
    found = content.get(machine(group), {})
    if isinstance(found, dict):
        return found
    _log.warning("%s: what it has for '%s' is left out: it must be entries by layer", _file(), machine(group))
    return {}


def make_folder(place: pathlib.Path) -> None:
    """Makes it and those above it that are missing, whatever the umask none of them writable by others: the cache of
    compiled kernels, which may lie there, takes nothing from such a folder."""
    for one in (*reversed(place.parents), place):
        with contextlib.suppress(OSError):  # it is there, or the file that comes into it says why not
            one.mkdir(0o755)


def _write(group: Group, name: str, entry: dict[str, typing.Any]) -> None:
    file = _file()
    if file is None:
        return
    try:
        make_folder(file.parent)
        with _locked(file.parent):
            content = _read()
            content[machine(group)] = _of_machine(content, group) | {name: entry}
            with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False) as aside:
                try:
                    json.dump({"format": _FORMAT, "schedules": content}, aside, indent=2)
                    aside.flush()
                    os.fchmod(aside.fileno(), 0o644)
                    os.replace(aside.name, file)  # whole or not at all, for other processes
                except BaseException:
                    os.unlink(aside.name)
                    raise
    except OSError as error:
        _log.warning("%s is not written: %s", file, error)


@contextlib.contextmanager
def _locked(place: pathlib.Path) -> Iterator[None]:
    """What one job adds, another that writes at the same time does not lose; where the file system can do so."""
    folder_of = os.open(place, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder_of, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder_of)


def autotune(layer: Experts | MoELayer, tokens: int = 8192, seconds: float = 60, *, topk: int | None = None) -> Pair:
    """Measures a short list of schedules on all ranks, and keeps the pair whose slowest rank is fastest. Collective.

    "auto" stands for that pair from now on, for layers of this shape in this group, and in later programs: it is kept
    in schedules.json in UNIEP_CACHE_DIR (else $XDG_CACHE_HOME/uniep, else ~/.cache/uniep; an empty name keeps nothing).
    Rank 0's file counts when a group is made. Parameters and their gradients are left as they are.

    Args:
        layer: whose shape, group and `save` are meant.
        tokens: T of each rank, with uniform routing.
        seconds: about how long it may take; every schedule is run at least twice all the same.
        topk: K; needed for Experts, MoELayer has its own.

    Returns:
        The schedules of forward and backward.

    Raises:
        ValueError: an argument is wrong.
    """
    experts = typing.cast("Experts", getattr(layer, "experts", layer))
    topk = getattr(layer, "topk", None) if topk is None else topk
    if topk is None or not 1 <= topk <= experts.num_experts:
        raise ValueError(f"topk: {topk}; must be 1 to num_experts, {experts.num_experts}")
    if tokens < 1:
        raise ValueError(f"tokens: {tokens}; must be 1 or more")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds: {seconds}; must be above 0, and finite")
    pair = _Measurement(experts, tokens, topk).best(seconds)
    trials.forget(experts.group)  # its calls run under others now
    return pair


class _Measurement:
    def __init__(self, experts: Experts, tokens: int, topk: int) -> None:
        self.group, self.experts = experts.group, experts
        self.hidden, self.intermediate = experts.down_proj.shape[1], experts.down_proj.shape[2]
        own = [experts.options.get(name, default) for name, default in _NUMERICS.items()]
        self.numerics = read_numerics(*own, experts.gate_up_bias is not None)
        self.sizes = self.hidden, self.intermediate, experts.num_experts, topk
        self.key = key(*self.sizes, self.numerics)
        device = self.group.device
        generator = torch.Generator(device=device).manual_seed(self.group.rank)
        scores = torch.rand(tokens, experts.num_experts, device=device, generator=generator)
        self.probs, self.ids = scores.topk(topk)
        x = torch.randn(tokens, self.hidden, device=device, generator=generator)
        self.x = x.bfloat16().requires_grad_()
        self.dy = torch.randn(x.shape, device=device, generator=generator).bfloat16()
        self.weights = [
            weight.detach().bfloat16().contiguous().requires_grad_()
            for weight in (experts.gate_up_proj, experts.down_proj, experts.gate_up_bias, experts.down_bias)
            if weight is not None
        ]

    @trials.suspended()
    def best(self, seconds: float) -> Pair:
        kind = self.group.device.type
        lists = [["auto", *_FORWARD[kind]], ["auto", *_BACKWARD[kind]]]
        before = self.group.tuned.pop(self.key, None)  # "auto" means the engine's own choice here
        try:
            self._compile(lists)
            self._times([_AUTO])
            first = max(self._agree(sum(self._times([_AUTO])[0])), 1e-6)
            # A round of a list takes one call more than it has; before its rounds each is called twice.
            repeats = max(1, min(50, int(seconds / first / (len(lists[0]) + len(lists[1]) + 2) - 2)))
            chosen, times = [], []
            for direction in (0, 1):
                pairs = [(text, "auto") if direction == 0 else ("auto", text) for text in lists[direction]]
                slowest = self._slowest(pairs, direction, repeats)
                # The engine's own choice stays unless something is at least 2 % faster.
                least = min(range(len(slowest)), key=slowest.__getitem__)
                take = least if slowest[least] < 0.98 * slowest[0] else 0
                chosen.append(lists[direction][take])
                times.append(slowest[take])
        except BaseException:
            if before is not None:
                self.group.tuned[self.key] = before
            raise
        pair = chosen[0], chosen[1]
        self.group.tuned[self.key] = pair
        if self.group.rank == 0:
            entry = {"forward": pair[0], "backward": pair[1], "tokens": len(self.x)}
            _write(self.group, self.key, entry | {"seconds": [round(one, 6) for one in times]})
            _log.info("autotune: %s: forward %s, backward %s", self.key, *pair)
        return pair

    def _compile(self, lists: list[list[str]]) -> None:
        """What is not in the cache yet, several kernels at once. Native ranks, which are on one host, share the work. A
        schedule that has no kernel, and a kernel that does not compile, are met again where they are measured."""
        group = self.group
        if folder() is None:  # nothing would be kept
            return
        shares, own = (group.size, group.rank) if group.transport == "native" else (1, 0)
        config = _config(group, self.sizes, self.numerics)
        for direction, texts in enumerate(lists):
            pairs = [(text, text) for text in texts]
            legal = [self._written(pair)[direction] for pair in pairs if self._is_legal(pair, direction)]
            with contextlib.suppress(RuntimeError, NotImplementedError):
                group.engine.compile(config, direction, legal[own::shares], -(-(os.cpu_count() or 1) // group.size))
        self._agree(0.0)

    def _slowest(self, pairs: list[Pair], direction: int, repeats: int) -> list[float]:
        """Of each the median time of the slowest rank, infinite where a rank's engine refuses the schedule."""
        legal = [pair for pair in pairs if self._agree(0.0 if self._is_legal(pair, direction) else 1.0) == 0]
        for pair in legal:
            self._times([pair])  # compiles
        times: dict[Pair, list[float]] = {pair: [] for pair in legal}
        for number in range(repeats):
            # In turn and back again: clocks that drift favour none.
            order = legal if number % 2 == 0 else legal[::-1]
            for pair, taken in zip(order, self._times(order), strict=True):
                times[pair].append(taken[direction])
        return [self._agree(statistics.median_high(times[pair])) if pair in times else float("inf") for pair in pairs]

    def _written(self, pair: Pair) -> tuple[bytes, bytes]:
        """As the calls below give them to the library."""
        return encoded(pair, self.experts.options.get("save", "keep"), self.group.reserved, self.group.lends)

    def _is_legal(self, pair: Pair, direction: int) -> bool:
        config = _config(self.group, self.sizes, self.numerics)
        try:
            self.group.engine.resolve(config, direction, self._written(pair)[direction])
        except (ValueError, NotImplementedError):
            return False
        return True

    def _times(self, pairs: list[Pair]) -> list[tuple[float, float]]:
        """Seconds of a forward and of a backward under each, one behind the other, as in a job."""
        on_gpu = self.group.device.type == "cuda"
        if on_gpu:
            self._run(pairs[0])  # the GPU has something to do until those that count are queued
        spans = [self._run(pair) for pair in pairs]
        if on_gpu:
            torch.cuda.synchronize(self.group.device)
        return [(forward.ms() / 1e3, backward.ms() / 1e3) for forward, backward in spans]

    def _run(self, pair: Pair) -> tuple[Span, Span]:
        from uniep.layer import moe

        own = ("save", "activation", "router_weight")
        options = {"schedule": pair} | {name: value for name, value in self.experts.options.items() if name in own}
        w1, w2, b1, b2, *_ = (*self.weights, None, None)
        begin = _moment(self.group.device)
        y = moe(self.x, self.ids, self.probs, w1, w2, b1=b1, b2=b2, group=self.group, **options)
        middle = _moment(self.group.device)
        torch.autograd.grad(y, [self.x, *self.weights], self.dy)
        return Span("forward", begin, middle), Span("backward", middle, _moment(self.group.device))

    def _agree(self, value: float) -> float:
        """The largest of all ranks'."""
        if self.group.size == 1:
            return value
        return float(max(peers.gather_objects(self.group, value, "the times of the ranks")))
