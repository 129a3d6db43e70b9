"""Random layers, a float64 reference that shares no code with the package, and comparisons of bytes."""

from __future__ import annotations

import dataclasses
import random

import torch


@dataclasses.dataclass
class Layer:
    """A layer's global batch: entry r of x, ids, probs and dy is rank r's; weights are those of all experts."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    probs: list[torch.Tensor]
    dy: list[torch.Tensor]
    w1: torch.Tensor
    w2: torch.Tensor

    @property
    def experts(self) -> int:
        return self.w1.shape[0]

    def local(self, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank r's weights, as tensors of their own."""
        first, last = rank * self.experts // ranks, (rank + 1) * self.experts // ranks
        return self.w1[first:last].clone(), self.w2[first:last].clone()

    def joined(self) -> Layer:
        """The same batch on one rank."""
        one = [[torch.cat(parts)] for parts in (self.x, self.ids, self.probs, self.dy)]
        return Layer(*one, self.w1, self.w2)


def make_layer(
    tokens: list[int],
    hidden: int = 64,
    intermediate: int = 32,
    experts: int = 8,
    topk: int = 2,
    seed: int = 1,
    unused: float = 0.0,
    dtype: torch.dtype = torch.int32,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    ids, probs = [], []
    for count in tokens:
        order = torch.rand(count, experts, generator=generator).argsort(1)[:, :topk]
        order[torch.rand(count, topk, generator=generator) < unused] = -1
        ids.append(order.to(dtype))
        probs.append(torch.rand(count, topk, generator=generator))
    return Layer(
        [normal(count, hidden) for count in tokens],
        ids,
        probs,
        [normal(count, hidden) for count in tokens],
        normal(experts, 2 * intermediate, hidden) * 0.2,
        normal(experts, hidden, intermediate) * 0.2,
    )


def slots_of_map(routing_map: torch.Tensor, probs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, K] and probs [T, K] of a map [T, E]: a token's experts ascending, then unused slots."""
    ids = torch.full((len(routing_map), topk), -1, dtype=torch.int32)
    slot_probs = torch.zeros(ids.shape)
    for token, row in enumerate(routing_map):
        for slot, expert in enumerate(row.nonzero()[:, 0].tolist()):
            ids[token, slot], slot_probs[token, slot] = expert, probs[token, expert]
    return ids, slot_probs


@dataclasses.dataclass
class DenseRouting:
    """A rank's routing of a Layer, by maps."""

    routing_map: torch.Tensor
    probs: torch.Tensor


def make_dense(layer: Layer) -> tuple[Layer, list[DenseRouting]]:
    """The layer with the slots that maps of its experts have, and the maps; probs are NaN where the map is False."""
    ids, probs, dense = [], [], []
    for own_ids, own_probs in zip(layer.ids, layer.probs, strict=True):
        routing_map = torch.zeros(len(own_ids), layer.experts, dtype=torch.bool)
        dense_probs = torch.full(routing_map.shape, torch.nan)
        token, slot = (own_ids >= 0).nonzero(as_tuple=True)
        expert = own_ids[token, slot].long()
        routing_map[token, expert] = True
        dense_probs[token, expert] = own_probs[token, slot]
        dense.append(DenseRouting(routing_map, dense_probs))
        slots = slots_of_map(routing_map, dense_probs, own_ids.shape[1])
        ids.append(slots[0])
        probs.append(slots[1])
    return Layer(layer.x, ids, probs, layer.dy, layer.w1, layer.w2), dense


def dense_gradient(ids: torch.Tensor, dprobs: torch.Tensor, experts: int) -> torch.Tensor:
    """dprobs [T, K] as [T, E], +0 elsewhere."""
    dense = torch.zeros(len(ids), experts)
    token, slot = (ids >= 0).nonzero(as_tuple=True)
    dense[token, ids[token, slot].long()] = dprobs[token, slot]
    return dense


def random_layer(seed: int, ranks: int) -> Layer:
    draw = random.Random(seed)
    experts = ranks * draw.choice([1, 2, 3])
    return make_layer(
        [draw.choice([0, 1, 5, 37, 64]) for _ in range(ranks)],
        hidden=8 * draw.randint(1, 12),
        intermediate=8 * draw.randint(1, 12),
        experts=experts,
        topk=draw.randint(1, min(experts, 5)),
        seed=seed,
        unused=draw.choice([0.0, 0.2, 1.0]),
        dtype=draw.choice([torch.int32, torch.int64]),
    )


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    dx: torch.Tensor
    dprobs: torch.Tensor
    dw1: torch.Tensor
    dw2: torch.Tensor

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


def run_moe(layer: Layer, rank: int, weights: tuple[torch.Tensor, torch.Tensor], **options: object) -> Result:
    """Forward and backward of one rank through uniep.moe()."""
    import uniep

    x = layer.x[rank].clone().requires_grad_()
    probs = layer.probs[rank].clone().requires_grad_()
    w1, w2 = (weight.clone().requires_grad_() for weight in weights)
    y = uniep.moe(x, layer.ids[rank], probs, w1, w2, **options)
    y.backward(layer.dy[rank])
    return Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad)


def reference(layer: Layer) -> Result:
    """The layer on one rank in float64."""
    joined = layer.joined()
    x, probs, w1, w2 = (
        tensor.double().requires_grad_() for tensor in (joined.x[0], joined.probs[0], joined.w1, joined.w2)
    )
    ids = joined.ids[0]
    intermediate = w2.shape[2]
    y = torch.zeros_like(x)
    for expert in range(layer.experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        z = x[token] @ w1[expert].T
        a = torch.nn.functional.silu(z[:, :intermediate]) * z[:, intermediate:] * probs[token, slot, None]
        y = y.index_add(0, token, a @ w2[expert].T)
    y.backward(joined.dy[0].double())
    return Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_same(a: Result, b: Result) -> None:
    for (name, got), (_, expected) in zip(a.items(), b.items(), strict=True):
        assert same_bits(got, expected), f"{name} differs"


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.norm()
    return ((got.double() - expected).norm() / norm).item() if norm > 0 else got.double().norm().item()
