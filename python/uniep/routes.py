"""Where rows go: from the ranks that have tokens to the rank of the library that computes, and back.

With the native transport both are the same and the library moves rows itself. With the transport "torch" a row travels
by all_to_all_single to its expert's owner, where a group of one rank takes it as a token with one slot. Rows arrive
ordered by (source rank, token, slot), the order of the library's own placement, and the sum over a token's slots is the
same chain of fp32 additions; so all results are the same bits.
"""

from __future__ import annotations

import contextlib
import typing

import torch
import torch.distributed as dist

from uniep import capture, late_errors, layer_stats, library, peers
from uniep.errors import CapacityError
from uniep.numerics import PLAIN, Numerics
from uniep.rows import ROW_ALIGNMENT
from uniep.schedules import SAVES

if typing.TYPE_CHECKING:
    from uniep.group import Group

_FAULTS = {
    1: "topk_ids: {value} at token {token}, slot {slot} of rank {rank}; legal are -1 (unused) and 0 to {last}",
    2: "topk_ids: {value} twice in token {token} of rank {rank}; an expert may be in one slot of a token only",
    3: "probs: not finite at token {token}, slot {slot} of rank {rank}",
    4: "routing_map: {value} experts at token {token} of rank {rank}; a token has at most topk, {topk}",
    5: "probs: not finite at token {token}, expert {value} of rank {rank}",
}


class Agreed(typing.NamedTuple):
    """What backward depends on, so that the ranks have to agree on it in forward."""

    save: str = "keep"
    places_anew: bool = False  # it does in a compiled graph


_PLAIN = Agreed()


class Route:
    """One routing, placed: ids [T, K], or a map [T, E] of bool, and probs of that shape. The native transport.

    Attributes:
        keeps_arrived: `arrived` becomes the slots (t K + k) and rows of the next sum, where this transport sees them.
        spans: takes what this transport does itself in a call, in the order of time.
        verified: x, ids and probs of a call whose backward is checked.
        tokens: those of the library's rank. rank_tokens: T, those that this rank gave.
    """

    keeps_arrived = False
    spans: list[layer_stats.Span] | None = None
    arrived: tuple[torch.Tensor, torch.Tensor] | None = None
    verified: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self,
        group: Group,
        shape: tuple[int, int, int],
        ids: torch.Tensor,
        probs: torch.Tensor,
        topk: int,
        capacity: tuple[int, int] | None,
        agreed: Agreed = _PLAIN,
    ) -> None:
        self.hidden, self.intermediate, self.experts = shape
        self.tokens, self.probs_width = ids.shape
        self.rank_tokens = self.tokens
        self.topk = topk
        self._engine = group.engine
        self.placement = self._engine.place(self.config(), ids, probs, capacity)

    def config(self, weight_gradient: int = library.WEIGHT_GRADIENT_BF16, numerics: Numerics = PLAIN) -> typing.Any:
        """The layer as the engine sees it."""
        return self._engine.config(self.hidden, self.intermediate, self.experts, self.topk, weight_gradient, numerics)

    def rows_of_ranks(self) -> list[int]:
        """Routed rows that each rank's experts receive. Waits for the placement."""
        return [self._engine.routed_rows(self.placement, rank) for rank in range(self._engine.ranks)]

    @property
    def engine_tokens(self) -> tuple[int, int]:
        """The shape of dprobs as the engine writes it."""
        return self.tokens, self.probs_width

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] as the engine takes it. Collective, as the next two."""
        return x

    def sum_slots(self, y: torch.Tensor) -> torch.Tensor:
        """y of the engine as y [T, H]."""
        return y

    def gather_probs(self, dprobs: torch.Tensor) -> torch.Tensor:
        """dprobs of the engine as dprobs [T, K], of a map [T, E]."""
        return dprobs


class TorchRoute(Route):
    """The same by all_to_all_single of the group's process group. Collective."""

    def __init__(
        self,
        group: Group,
        shape: tuple[int, int, int],
        ids: torch.Tensor,
        probs: torch.Tensor,
        topk: int,
        capacity: tuple[int, int] | None,
        agreed: Agreed = _PLAIN,
    ) -> None:
        self._group = group
        self._size = group.size
        self._rank = group.rank
        self._is_map = ids.dtype == torch.bool
        hidden, intermediate, experts = shape
        if self._is_map:
            fault = _find_map_fault(ids, probs, topk)
            ids, probs = _slots_of_map(ids, probs, topk)
        else:
            fault = _find_fault(ids, probs, experts)
        self._all_experts = experts
        tokens = len(ids)
        self._shape = (tokens, topk)
        flat = ids.reshape(-1).long()
        sizes = hidden, intermediate, experts, topk, *(capacity or (0, 0))
        backward = list(SAVES).index(agreed.save), int(agreed.places_anew)
        self._agree(ids.device, [*fault, *sizes, tokens, *backward])

        self._used = flat >= 0
        own = torch.where(self._used, flat, experts)
        counts = self._gather(torch.bincount(own, minlength=experts + 1)[:experts], "how many rows the ranks send")
        local = experts // self._size
        if capacity is not None:
            _check_capacity(counts, local, capacity)
        by_rank = counts.view(self._size, self._size, local).sum(2)
        self._sent = by_rank[self._rank].tolist()
        self._received = by_rank[:, self._rank].tolist()
        self._rows_of_ranks: list[int] = by_rank.sum(0).tolist()
        self._order = torch.argsort(own // local, stable=True)[: sum(self._sent)]
        self._token = self._order // topk

        received_ids = self._to_owner((flat[self._order] % local).int(), "the experts of rows").view(-1, 1)
        received_probs = self._to_owner(probs.reshape(-1)[self._order], "the probs of rows").view(-1, 1)
        super().__init__(group, (hidden, intermediate, local), received_ids, received_probs, 1, None)
        self.rank_tokens = tokens
        self._flat_ids = flat if self._is_map else None

    def rows_of_ranks(self) -> list[int]:
        return self._rows_of_ranks

    def _gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        gathered = [torch.empty_like(values) for _ in range(self._size)]
        with peers.waiting(self._group, what):
            dist.all_gather(gathered, values.contiguous(), group=self._group.process_group)
            return torch.stack(gathered).cpu()

    def _agree(self, device: torch.device, own: list[int]) -> None:
        """Raises the same ValueError on all ranks where a routing is wrong, or calls differ."""
        described = torch.tensor(own, dtype=torch.int64, device=device)
        ranks = self._gather(described, "what the ranks are about to call").tolist()
        for rank, (fault, token, slot, value, *_) in enumerate(ranks):
            if fault:
                text = _FAULTS[fault]
                last, topk = ranks[0][6] - 1, ranks[0][7]
                raise ValueError(text.format(value=value, token=token, slot=slot, rank=rank, last=last, topk=topk))
        names = ("hidden", "intermediate", "experts", "topk", "capacity rows", "capacity tokens")
        for rank, values in enumerate(ranks):
            for name, expected, value in zip(names, ranks[0][4:10], values[4:10], strict=True):
                if value != expected:
                    raise ValueError(
                        f"{name}: {value} on rank {rank}, {expected} on rank 0; must be equal on all ranks"
                    )
            if values[11] != ranks[0][11]:  # in backward one rank would send x, and the other none
                here, first = (repr(list(SAVES)[which]) for which in (values[11], ranks[0][11]))
                raise ValueError(f"save: {here} on rank {rank}, {first} on rank 0; must be equal on all ranks")
            if values[9] and values[10] > values[9]:
                raise CapacityError(f"tokens: {values[10]} on rank {rank}; the capacity allows {values[9]}")
        _check_graphs([bool(values[12]) for values in ranks])

    def _noted(self, kind: str) -> contextlib.AbstractContextManager[None]:
        return layer_stats.noted(self.spans, kind, self._group.device)

    def _to_owner(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        received = rows.new_empty((sum(self._received), *rows.shape[1:]))
        with self._noted("dispatch"), peers.waiting(self._group, what):
            dist.all_to_all_single(received, rows, self._received, self._sent, group=self._group.process_group)
        return received

    def _from_owner(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        received = rows.new_empty((sum(self._sent), *rows.shape[1:]))
        with self._noted("return"), peers.waiting(self._group, what):
            dist.all_to_all_single(received, rows, self._sent, self._received, group=self._group.process_group)
        return received

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return self._to_owner(x[self._token], "rows for its experts")

    def sum_slots(self, y: torch.Tensor) -> torch.Tensor:
        tokens, topk = self._shape
        # Adding -0 changes no value, so unused slots need no select.
        slots = y.new_full((tokens * topk, y.shape[1]), -0.0)
        rows = self._from_owner(y, "the rows of its tokens")
        self.arrived = (self._order, rows) if self.keeps_arrived else None
        with self._noted("sum"):
            slots[self._order] = rows
            slots = slots.view(tokens, topk, y.shape[1])
            total = slots[:, 0].float()
            for slot in range(1, topk):
                total += slots[:, slot]
            total[~self._used.view(tokens, topk).any(1)] = 0.0
            return total.to(y.dtype)

    def gather_probs(self, dprobs: torch.Tensor) -> torch.Tensor:
        gathered = dprobs.new_zeros(self._used.numel())
        gathered[self._order] = self._from_owner(dprobs.reshape(-1), "the gradients of its probs")
        if self._flat_ids is None:
            return gathered.view(self._shape)
        dense = dprobs.new_zeros((self._shape[0], self._all_experts))
        token = torch.arange(self._used.numel(), device=dprobs.device)[self._used] // self._shape[1]
        dense[token, self._flat_ids[self._used]] = gathered[self._used]
        return dense


def place_routing(
    group: Group,
    shape: tuple[int, int, int],
    ids: torch.Tensor,
    probs: torch.Tensor,
    topk: int,
    capacity: tuple[int, int] | None,
    agreed: Agreed = _PLAIN,
) -> Route:
    """Places a routing of a layer of shape (H, I, E) on the group's transport: ids or a map, and K. Collective.

    Raises ValueError where a CUDA graph is captured that can not hold it.
    """
    capture.check_call(group, capacity)
    kind = TorchRoute if group.transport == "torch" else Route
    placed = kind(group, shape, ids, probs, topk, capacity, agreed)
    late_errors.note_call(group, capacity)
    return placed


def _slots_of_map(routing_map: torch.Tensor, probs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, K] int64 and probs [T, K]: a token's slots are its experts ascending, then unused ones."""
    experts = routing_map.shape[1]
    numbers = torch.arange(experts, device=routing_map.device).expand_as(routing_map)
    ids = torch.where(routing_map, numbers, experts).topk(topk, dim=1, largest=False, sorted=True).values
    used = ids < experts
    slot_probs = torch.where(used, probs.gather(1, ids.clamp(max=experts - 1)), 0.0)
    return torch.where(used, ids, -1), slot_probs


def _find_map_fault(routing_map: torch.Tensor, probs: torch.Tensor, topk: int) -> list[int]:
    """[fault, token, 0, value] of the first wrong token; zeros where all are right."""
    counts = routing_map.sum(1)
    too_many, not_finite = counts > topk, routing_map & ~torch.isfinite(probs)
    if not (too_many.any() | not_finite.any()):
        return [0, 0, 0, 0]
    if too_many.any():
        token = int(too_many.nonzero()[0])
        return [4, token, 0, int(counts[token])]
    token, expert = not_finite.nonzero()[0].tolist()
    return [5, token, 0, expert]


def _find_fault(ids: torch.Tensor, probs: torch.Tensor, experts: int) -> list[int]:
    """[fault, token, slot, value] of the first wrong slot of ids [T, K]; zeros where all are right."""
    ordered, slots = ids.sort(dim=1, stable=True)
    twice = torch.zeros_like(ids, dtype=torch.bool)
    if ids.shape[1] > 1:
        twice.scatter_(1, slots[:, 1:], (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
    wrong = [(ids < -1) | (ids >= experts), twice, (ids >= 0) & ~torch.isfinite(probs)]
    if not torch.stack([fault.any() for fault in wrong]).any():
        return [0, 0, 0, 0]
    for number, fault in enumerate(wrong, 1):
        if fault.any():
            token, slot = fault.nonzero()[0].tolist()
            return [number, token, slot, int(ids[token, slot])]
    raise AssertionError


def _check_graphs(inside: list[bool]) -> None:
    """Of every rank: whether its backward is in a graph and places anew, which is collective; others' does not."""
    if all(inside) or not any(inside):
        return
    first, second = (
        ", ".join(str(rank) for rank, one in enumerate(inside) if one is wanted) for wanted in (True, False)
    )
    raise ValueError(
        f"torch.compile: this layer is in a graph on ranks {first}, and outside of graphs on ranks {second}; must be "
        "alike on all: with fullgraph=True or dynamic=True no rank leaves its graph where it has compiled too often"
    )


def _check_capacity(counts: torch.Tensor, local: int, capacity: tuple[int, int]) -> None:
    """counts [W, E] on the CPU: rows of every source for every expert."""
    padded = -(-counts.sum(0) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    for rank, need in enumerate(padded.view(-1, local).sum(1).tolist()):
        if need > capacity[0]:
            raise CapacityError(f"capacity: {capacity[0]} rows; rank {rank} needs {need}. Nothing was dropped")
